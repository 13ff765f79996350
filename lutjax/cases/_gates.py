"""Shared arguments and traffic for gates."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import lutjax
from lutjax.cases._case import Arrays, Axes, Case, Draw, Size, Sizes, Tag
from lutjax.cases._traffic import DENSE, FORWARD, ID_BYTES, Bytes

MAX_BITS = 8

# Test sizes for gates with truth tables.
TESTED = {
    "one": Size(batch=1, inputs=1, gates=1, bits=1),
    "split": Size(Tag.FAST, batch=4, inputs=5, gates=4, bits=2),
    "primes": Size(batch=13, inputs=7, gates=11, bits=3),
    "readers": Size(Tag.DTYPES, batch=37, inputs=17, gates=29, bits=2, readers=1),
    "features_first": Size(batch=5, inputs=7, gates=3, bits=4, readers=1, features_first=1),
    "large_fan_out": Size(
        Tag.SLOW, batch=3, inputs=3, gates=37, bits=3, readers=1, features_first=1
    ),
    "six_inputs": Size(Tag.SLOW, batch=5, inputs=67, gates=13, bits=6),
    "eight_inputs": Size(Tag.SLOW, batch=3, inputs=11, gates=5, bits=8, readers=1),
    "empty_batch": Size(batch=0, inputs=5, gates=3, bits=3, readers=1),
    "no_gates": Size(batch=3, inputs=5, gates=0, bits=2),
}


def too_many_places(s: Sizes) -> str | None:
    """Return the problem with too many table inputs, or None."""
    return (
        f"places is {s['bits']}; a table can have at most {MAX_BITS}"
        if s["bits"] > MAX_BITS
        else None
    )


@dataclasses.dataclass(frozen=True)
class Parameter:
    """Gate parameter array.

    Attributes:
      name: argument name. shape: returns the shape for some gates and inputs. axis: gate axis.
    """

    name: str
    shape: Callable[[int, int], tuple[int, ...]]
    axis: int


COEFFICIENTS = Parameter("coefficients", lambda gates, bits: (4, gates), 1)
TABLE = Parameter("table", lambda gates, bits: (gates, 2**bits), 0)


def case(draw: Draw, s: Sizes, parameter: Parameter) -> Case:
    """Return a case with random inputs."""
    bits, first = s.get("bits", 2), bool(s.get("features_first"))
    n_inputs, n_gates = s["inputs"], s["gates"]
    fixed: Arrays = {"wires": draw.ids((n_gates, bits), 0, n_inputs)}
    if s.get("readers"):
        # With fan-out lists the input gradient gathers, without them it scatters.
        fixed["readers"] = lutjax.readers(fixed["wires"], n_inputs)
    x = draw.grid((n_inputs, s["batch"]) if first else (s["batch"], n_inputs), 6)
    return _case(draw, x, draw.weights(parameter.shape(n_gates, bits)), fixed, parameter, first)


def measured(draw: Draw, s: Sizes, parameter: Parameter, low: float = 0.0) -> Case:
    """Return a features-first case with ``x[inputs, batch]`` in ``[low, 1]`` and fan-out lists.

    Random wires read all inputs about equally often.
    """
    bits, n_inputs, n_gates = s.get("bits", 2), s["inputs"], s["gates"]
    x = draw.uniform((n_inputs, s["batch"]), low, 1.0)
    values = draw.normal(parameter.shape(n_gates, bits))
    # A permutation modulo the inputs: fan-outs differ by one at most.
    wires = (draw.permutation(n_gates * bits) % n_inputs).reshape(n_gates, bits)
    readers = lutjax.readers(wires, n_inputs, fan_out=_fan_out(s))
    return _case(draw, x, values, {"wires": wires, "readers": readers}, parameter, True)


def _case(
    draw: Draw, x: Any, values: Any, fixed: Arrays, parameter: Parameter, first: bool
) -> Case:
    batch, feature = (1, 0) if first else (0, 1)
    return draw.case(
        {"x": x, parameter.name: values},
        fixed,
        {
            "x": Axes(batch),
            parameter.name: Axes(detector=parameter.axis),
            "wires": Axes(detector=0),
            "readers": Axes(),
        },
        {"y": Axes(batch, feature)},
        lambda op, a: {
            "y": op(
                a["x"],
                a[parameter.name],
                a["wires"],
                readers=a.get("readers"),
                feature_axis=0 if first else -1,
            )
        },
    )


def _fan_out(s: Sizes) -> int:
    """Return the largest fan-out."""
    return -(-s["gates"] * s.get("bits", 2) // s["inputs"])


def bytes_of_gates(inputs: int, outputs: int, parameters: int, wires: int, readers: int) -> Bytes:
    """Return gate traffic with cached rereads, from element and id counts; parameters are float32.

    Forward reads the inputs and writes the outputs. Backward reads the inputs and the outputs'
    cotangent, and writes that of the inputs.
    """
    forward = inputs + outputs, wires * ID_BYTES + parameters * 4
    both = 3 * inputs + 2 * outputs, 2 * wires * ID_BYTES + readers * ID_BYTES + 3 * parameters * 4
    return Bytes((0, parameters * 4), {FORWARD: forward, DENSE: both})


def traffic(s: Sizes, parameter: Parameter) -> Bytes:
    """Return the bytes moved by `measured`."""
    bits, n_inputs, n_gates = s.get("bits", 2), s["inputs"], s["gates"]
    return bytes_of_gates(
        inputs=n_inputs * s["batch"],
        outputs=n_gates * s["batch"],
        parameters=math.prod(parameter.shape(n_gates, bits)),
        wires=n_gates * bits,
        readers=n_inputs * _fan_out(s),
    )


def functions(parameter: Parameter, low: float = 0.0) -> tuple[Callable[..., Any], ...]:
    """Return `case`, `measured` and `traffic` of an op with this parameter."""
    return (
        functools.partial(case, parameter=parameter),
        functools.partial(measured, parameter=parameter, low=low),
        functools.partial(traffic, parameter=parameter),
    )
