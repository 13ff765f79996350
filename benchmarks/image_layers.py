"""Bytes that layers over images move, and times: `python benchmarks/image_layers.py [--batch 128] [--only ConvLUT] [--time]`.

For each layer, of the compiled program of the forward pass and of a step (which returns the output, and the gradients of input and
parameters): the bytes that its operations read and write, each operand and result once, over two floors:

- what has to move: forward the input, the output and the parameters; in a step these, then input, parameters and the cotangent of the
  output once more, for the backward pass, and the two gradients.
- each array once: input, output, parameters, and in a step their gradients. No step of layers that are mostly parameters can reach it:
  both passes read these.

What an operation reads again comes from caches and is not counted, nor is what a kernel clears before it adds to it. Nothing runs without
`--time`. With `--apart`, detections are arrays of their own, as before tables and detectors had one kernel.
"""

import contextlib
import dataclasses
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from harness import options  # beside this file

import lutjax
from lutjax import wiring
from lutjax.benchmark import measure
from lutjax.benchmark.results import duration, size
from lutjax.layers.nnx import ConvLUT, LogicConv, SpatialLUT, WindowLUT

_FREE = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "iota")
_CALLS = ("call", "while", "conditional", "async-start")
_ARRAY = re.compile(r"\b(pred|[suf]\d+|bf16|f8\w+)\[([\d,]*)\]")
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (.*?) ([\w\-]+)\((.*)$")


def layers() -> dict[str, tuple[Callable[[nnx.Rngs], Any], tuple[int, ...]]]:
    """Return each layer and the shape of its input."""
    fields = wiring.projections(None, (28, 28), (14, 14), groups=(7, 7), receptive=7, projective=4)
    return {
        "SpatialLUT": (lambda rngs: SpatialLUT(fields, n_detectors=16, n_anchors=6, rngs=rngs), (28, 28)),
        "WindowLUT": (
            lambda rngs: WindowLUT((28, 28), 16, kernel=4, stride=4, n_detectors=16, n_anchors=6, rngs=rngs),
            (28, 28),
        ),
        "ConvLUT": (
            lambda rngs: ConvLUT(
                (32, 32, 3), 64, kernel=3, padding=1, n_detectors=16, n_anchors=6, rngs=rngs
            ),
            (32, 32, 3),
        ),
        "LogicConv": (
            lambda rngs: LogicConv((16, 16, 32), 128, padding=1, pool=2, channels_per_kernel=2, rngs=rngs),
            (16, 16, 32),
        ),
    }


def bytes_moved(text: str) -> int:
    """Return the bytes that the operations of an optimized program read and write, by its text. Bodies of loops count once."""
    computations: dict[str, list[str]] = {}
    lines: list[str] = []
    entry = ""
    for line in text.splitlines():
        if line and not line[0].isspace() and line.rstrip().endswith("{") and "HloModule" not in line:
            name = re.sub(r"^ENTRY\s+", "", line).split()[0].lstrip("%")
            lines = computations[name] = []
            entry = name if line.startswith("ENTRY") else entry
        else:
            lines.append(line)

    def of(name: str) -> int:
        sizes, total = {}, 0
        for line in computations[name]:
            found = _INSTRUCTION.match(line)
            if not found:
                continue
            result, shape, kind, rest = found.groups()
            sizes[result] = _bytes(shape)
            if kind in _CALLS:
                called = re.findall(r"(?:to_apply|body|calls|called_computation)=%?([\w.\-]+)", rest)
                total += sum(of(one) for one in called)
            elif kind not in _FREE and not kind.endswith("-done"):
                operands = re.findall(r"%([\w.\-]+)", rest.split("), ")[0])
                total += sizes[result] + sum(sizes.get(one, 0) for one in dict.fromkeys(operands))
        return total

    return of(entry)


def _bytes(shape: str) -> int:
    total = 0
    for kind, dims in _ARRAY.findall(shape):
        n = 1
        for dim in filter(None, dims.split(",")):
            n *= int(dim)
        total += n * (1 if kind == "pred" else int(re.findall(r"\d+", kind)[0]) // 8)
    return total


def _of_arrays(arrays: Any) -> int:
    return sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(arrays))


@dataclasses.dataclass(frozen=True)
class Program:
    """Forward pass or step of a layer.

    Attributes:
      arguments: as shapes. floor: bytes that have to move. once: bytes of each array once.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    floor: int
    once: int

    def moved(self) -> int:
        """Return the bytes that the compiled program moves."""
        return bytes_moved(jax.jit(self.function).lower(*self.arguments).compile().as_text() or "")

    def seconds(self) -> float:
        """Return the time of a call on arrays of normal numbers, in seconds."""

        def drawn(a: Any) -> Any:
            return (
                jax.random.normal(jax.random.key(a.size), a.shape, a.dtype)
                if isinstance(a, jax.ShapeDtypeStruct)
                else a
            )

        return measure.device_time(self.function, *jax.tree.map(drawn, self.arguments)).p50


def programs(make: Callable[[nnx.Rngs], Any], shape: tuple[int, ...], batch: int) -> dict[str, Program]:
    """Return the forward pass and the step of a layer."""
    made = nnx.jit(lambda: make(nnx.Rngs(0)))()
    graph, params, others = nnx.split(made, nnx.Param, ...)
    params = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), params)
    x = jax.ShapeDtypeStruct((batch, *shape), jnp.float32)

    def forward(params: Any, others: Any, x: jax.Array) -> jax.Array:
        y: jax.Array = nnx.merge(graph, params, others)(x)
        return y

    def step(params: Any, others: Any, x: jax.Array, dy: jax.Array) -> Any:
        y, pull = jax.vjp(lambda params, x: forward(params, others, x), params, x)
        return y, pull(dy)

    y = jax.eval_shape(forward, params, others, x)
    once = _of_arrays((params, x, y))
    return {
        "forward": Program(forward, (params, others, x), once, once),
        "step": Program(step, (params, others, x, y), 3 * once - _of_arrays(y), 2 * once),
    }


def main(arguments: list[str] | None = None) -> None:
    parser = options(__doc__)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--only", nargs="+", default=list(layers()))
    parser.add_argument("--time", action="store_true")
    parser.add_argument("--apart", action="store_true")
    given = parser.parse_args(arguments)
    apart = lutjax.use_implementation({"lut_at_places": "xla"}) if given.apart else contextlib.nullcontext()
    with apart:
        for name in given.only:
            for which, program in programs(*layers()[name], given.batch).items():
                moved = program.moved()
                took = f", {duration(program.seconds())}" if given.time else ""
                print(
                    f"{name}, {which}: {size(moved)}; has to move {size(program.floor)}: {moved / program.floor:.2f}x; "
                    f"each array once {size(program.once)}: {moved / program.once:.2f}x{took}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
