"""Cases of `lutjax.ops.gate_network`."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

import lutjax
from lutjax.cases._case import Arrays, Axes, Case, Draw, Size, Sizes, Tag
from lutjax.cases._traffic import DENSE, FORWARD, ID_BYTES, Bytes, Kind

NETWORK = Kind("gate_network", ("batch", "inputs", "gates", "layers", "outputs"), optional=2)
KINDS = (NETWORK,)

# Gates of each layer are `gates`, those of the last one `outputs` where that is given.
SIZES = {
    "one": Size(Tag.SLOW, batch=1, inputs=1, gates=1, layers=1),
    "split": Size(Tag.FAST, batch=4, inputs=5, gates=4, layers=2),
    "primes": Size(Tag.DTYPES, batch=13, inputs=7, gates=11, layers=3, outputs=5),
    "readers": Size(Tag.SLOW, batch=70, inputs=17, gates=29, layers=2, readers=1, features_first=1),
    "deep": Size(Tag.SLOW, batch=5, inputs=3, gates=6, layers=9, outputs=1, features_first=1),
    "large_fan_out": Size(Tag.SLOW, batch=3, inputs=2, gates=41, layers=2, outputs=67, readers=1),
    "funnel": Size(Tag.SLOW, batch=9, inputs=6, gates=13, layers=4, outputs=2, readers=1),
    "empty_batch": Size(Tag.SLOW, batch=0, inputs=5, gates=3, layers=2),
    "no_outputs": Size(Tag.SLOW, batch=3, inputs=5, gates=4, layers=2, outputs=0),
    "gate_network": NETWORK.size(128, 784, 8000, tags=(Tag.BENCH, Tag.CPU)),
    "gate_network-16x256": NETWORK.size(512, 264, 256, 16, 8),
}


def sizes_of(s: Sizes) -> tuple[int, ...]:
    """Return the gates of each layer."""
    return (*(s["gates"] for _ in range(_n_layers(s) - 1)), s.get("outputs", s["gates"]))


def _n_layers(s: Sizes) -> int:
    return s.get("layers", 6)


def case(draw: Draw, s: Sizes) -> Case:
    """Return a case with random inputs; values in the first layers are exact on the grid."""
    sizes, first = sizes_of(s), bool(s.get("features_first"))
    wires = [draw.ids((n, 2), 0, before) for before, n in _layers(s)]
    x = draw.grid((s["inputs"], s["batch"]) if first else (s["batch"], s["inputs"]), 2)
    # Coefficients of up to a quarter keep values small in many layers.
    coefficients = draw.grid((4, sum(sizes)), 2) / 2
    return _case(
        draw, s, x, coefficients, wires, lutjax.readers if s.get("readers") else None, first
    )


def measured(draw: Draw, s: Sizes) -> Case:
    """Return features-first layers on ``x[inputs, batch]``, with balanced wires and fan-outs."""
    wires = [(draw.permutation(n * 2) % before).reshape(n, 2) for before, n in _layers(s)]
    x = draw.uniform((s["inputs"], s["batch"]), 0.0, 1.0)
    coefficients = draw.uniform((4, sum(sizes_of(s))), 0.0, 0.25)

    def readers(wires: Any, n_inputs: int) -> Any:
        return lutjax.readers(wires, n_inputs, fan_out=-(-2 * len(wires) // n_inputs))

    return _case(draw, s, x, coefficients, wires, readers, True)


def _layers(s: Sizes) -> list[tuple[int, int]]:
    """Return input and gate counts by layer."""
    sizes = sizes_of(s)
    return list(zip((s["inputs"], *sizes[:-1]), sizes, strict=True))


def _case(
    draw: Draw,
    s: Sizes,
    x: Any,
    coefficients: Any,
    wires: list[Any],
    readers: Callable[..., Any] | None,
    first: bool,
) -> Case:
    batch, axis = (1, 0) if first else (0, -1)
    names = [f"readers{layer}" for layer in range(_n_layers(s))] if readers else []
    fixed: Arrays = {"wires": jnp.concatenate(wires)}
    for name, of_layer, (before, _) in zip(names, wires, _layers(s), strict=False):
        assert readers is not None
        fixed[name] = readers(of_layer, before)

    def call(op: Any, a: Arrays) -> Arrays:
        lists = [a[name] for name in names] or None
        y = op(
            a["x"],
            a["coefficients"],
            a["wires"],
            sizes=sizes_of(s),
            readers=lists,
            feature_axis=axis,
        )
        return {"y": y}

    axes = {"x": Axes(batch), **{name: Axes() for name in ("coefficients", *fixed)}}
    return draw.case({"x": x, "coefficients": coefficients}, fixed, axes, {"y": Axes(batch)}, call)


def traffic(s: Sizes) -> Bytes:
    """Return the traffic: inputs, outputs, float32 coefficients, wires, and cotangents."""
    n_gates, elements = sum(sizes_of(s)), (s["inputs"] + sizes_of(s)[-1]) * s["batch"]
    others = 4 * n_gates * 4 + 2 * n_gates * ID_BYTES
    rows = {FORWARD: (elements, others), DENSE: (2 * elements, 2 * others)}
    return Bytes((0, 4 * n_gates * 4), rows)
