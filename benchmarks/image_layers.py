"""Memory traffic of layers over images, and times.

Run `python benchmarks/image_layers.py [--batch 128] [--only ConvLUT] [--time]`.

For each layer, the compiled forward pass and step (with the output, and the gradients of input and
parameters): bytes read and written by all operations, counting each operand and result once,
relative to two lower bounds:

- required traffic: input, output and parameters forward; in a step these, then input, parameters
  and output cotangent again for the backward pass, and the two gradients.
- each array once: input, output, parameters, and in a step their gradients. Layers dominated by
  parameters cannot reach it, because both passes read them.

Cached rereads and the initialization of accumulators are not counted. Nothing runs without
`--time`. `--apart` separates detection and lookup.
"""

import contextlib
import dataclasses
import math
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from harness import parse  # beside this file

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
    sizes = {"n_detectors": 16, "n_anchors": 6}
    tree = {"padding": 1, "pool": 2, "channels_per_kernel": 2}
    return {
        "SpatialLUT": (lambda rngs: SpatialLUT(fields, **sizes, rngs=rngs), (28, 28)),
        "WindowLUT": (
            lambda rngs: WindowLUT((28, 28), 16, kernel=4, stride=4, **sizes, rngs=rngs),
            (28, 28),
        ),
        "ConvLUT": (
            lambda rngs: ConvLUT((32, 32, 3), 64, kernel=3, padding=1, **sizes, rngs=rngs),
            (32, 32, 3),
        ),
        "LogicConv": (lambda rngs: LogicConv((16, 16, 32), 128, **tree, rngs=rngs), (16, 16, 32)),
    }


def bytes_moved(text: str) -> int:
    """Return the bytes read and written by the operations of an optimized program.

    Loop bodies count once.
    """
    computations: dict[str, list[str]] = {}
    lines: list[str] = []
    entry = ""
    for line in text.splitlines():
        if (
            line
            and not line[0].isspace()
            and line.rstrip().endswith("{")
            and "HloModule" not in line
        ):
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
                called = re.findall(
                    r"(?:to_apply|body|calls|called_computation)=%?([\w.\-]+)", rest
                )
                total += sum(of(one) for one in called)
            elif kind not in _FREE and not kind.endswith("-done"):
                operands = re.findall(r"%([\w.\-]+)", rest.split("), ")[0])
                total += sizes[result] + sum(sizes.get(one, 0) for one in dict.fromkeys(operands))
        return total

    return of(entry)


def _bytes(shape: str) -> int:
    total = 0
    for kind, dims in _ARRAY.findall(shape):
        width = 1 if kind == "pred" else int(re.findall(r"\d+", kind)[0]) // 8
        total += width * math.prod(map(int, filter(None, dims.split(","))))
    return total


def _of_arrays(arrays: Any) -> int:
    return sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(arrays))


@dataclasses.dataclass(frozen=True)
class Program:
    """Forward pass or step of a layer.

    Attributes:
      function, arguments: the program and its argument shapes.
      floor: required traffic.
      once: bytes of each array once.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    floor: int
    once: int

    def moved(self) -> int:
        """Return the traffic of the compiled program."""
        return bytes_moved(jax.jit(self.function).lower(*self.arguments).compile().as_text() or "")

    def seconds(self) -> float:
        """Return the seconds per call on normally distributed arrays."""

        def sample(a: Any) -> Any:
            shaped = isinstance(a, jax.ShapeDtypeStruct)
            return jax.random.normal(jax.random.key(a.size), a.shape, a.dtype) if shaped else a

        return measure.device_time(self.function, *jax.tree.map(sample, self.arguments)).p50


def programs(
    make: Callable[[nnx.Rngs], Any], shape: tuple[int, ...], batch: int
) -> dict[str, Program]:
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


def main() -> None:
    given = parse(
        __doc__,
        batch=(128, "images"),
        only=(layers(), "layers"),
        time=(False, "also measure times"),
        apart=(False, "separate detection and lookup"),
    )
    apart = (
        lutjax.use_implementation({"lut_at_places": "xla"})
        if given.apart
        else contextlib.nullcontext()
    )
    with apart:
        for name in given.only:
            for which, program in programs(*layers()[name], given.batch).items():
                moved = program.moved()
                took = f", {duration(program.seconds())}" if given.time else ""
                floor = f"has to move {size(program.floor)}: {moved / program.floor:.2f}x"
                once = f"each array once {size(program.once)}: {moved / program.once:.2f}x"
                print(f"{name}, {which}: {size(moved)}; {floor}; {once}{took}", flush=True)


if __name__ == "__main__":
    main()
