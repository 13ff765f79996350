"""Bytes that layers over images move: `python benchmarks/image_layers.py [--batch 128] [--only ConvLUT]`.

For each layer, of the compiled program of the forward pass and of a step (forward and backward, gradients of inputs and parameters): the
bytes that its operations read and write, each operand and result once, beside the bytes of what has to move. Forward that is the
input, the output and the parameters; in a step these again, their gradients, and the cotangent of the output. Nothing runs.
"""

import argparse
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from lutjax import wiring
from lutjax.benchmark.results import size
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
    """Return the bytes that the operations of an optimised program read and write, by its text. Bodies of loops count once."""
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


def measured(
    make: Callable[[nnx.Rngs], Any], shape: tuple[int, ...], batch: int
) -> tuple[int, int, int, int]:
    """Return bytes forward and of what has to move, and the same of a step."""
    graph, params, others = nnx.split(nnx.jit(lambda: make(nnx.Rngs(0)))(), nnx.Param, ...)
    x = jax.ShapeDtypeStruct((batch, *shape), jnp.float32)

    def forward(params: Any, others: Any, x: jax.Array) -> jax.Array:
        y: jax.Array = nnx.merge(graph, params, others)(x)
        return y

    y = jax.eval_shape(forward, params, others, x)

    def step(params: Any, others: Any, x: jax.Array, dy: jax.Array) -> Any:
        def loss(params: Any, x: jax.Array) -> Any:
            return jnp.vdot(forward(params, others, x), dy)

        return jax.grad(loss, argnums=(0, 1))(params, x)

    once = _of_arrays((params, x, y))
    rest = _of_arrays((params, x, x, y))
    found = []
    for f, arguments in ((forward, (params, others, x)), (step, (params, others, x, y))):
        text = jax.jit(f).lower(*arguments).compile().as_text()
        found.append(bytes_moved(text or ""))
    return found[0], once, found[1], once + rest


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--only", nargs="+", default=list(layers()))
    given = parser.parse_args(arguments)
    for name in given.only:
        forward, least, step, least_of_step = measured(*layers()[name], given.batch)
        print(
            f"{name}: forward {size(forward)} of {size(least)}, {forward / least:.2f}x; "
            f"step {size(step)} of {size(least_of_step)}, {step / least_of_step:.2f}x",
            flush=True,
        )


if __name__ == "__main__":
    main()
