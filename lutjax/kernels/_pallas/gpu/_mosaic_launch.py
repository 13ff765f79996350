"""Launching Mosaic GPU kernels: programs of warpgroups that share memory, one of which only asks for copies into it."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from lutjax.kernels._pallas import _call

# Registers of a thread of the warpgroup that asks for copies. With this number, 2 warpgroups that compute get 232 each;
# 4 would ask for more than a program has, and wait for ever.
_REGISTERS_TO_COPY = 40
WARPGROUPS = 2  # of a program, that compute
THREADS = 128  # of a warpgroup


def launch(
    kernel: Callable[..., None],
    *inputs: jax.Array,
    outputs: Sequence[jax.ShapeDtypeStruct],
    name: str,
    grid: Mapping[str, int],
    by_lanes: bool = False,
    warpgroups: int = WARPGROUPS + 1,
) -> tuple[jax.Array, ...]:
    """Run a kernel. That of most is one `pipeline`.

    Args:
      kernel: a function of references to all inputs and outputs.
      outputs: shapes and dtypes of what it writes. name: what a profile shows.
      grid: programs along each axis; neighbors along the last run at the same time. The kernel asks
        for its place by `jax.lax.axis_index`, and for its warpgroup by the name ``"warpgroup"``.
      warpgroups: of a program; as many as a `pipeline` takes, if nothing is said.
      by_lanes: whether arrays of the kernel have the layouts that they are given; otherwise the compiler chooses.
    """

    def run(*shapes: jax.ShapeDtypeStruct) -> Callable[..., Any]:
        semantics = plgpu.LoweringSemantics
        parameters = plgpu.CompilerParams(
            lowering_semantics=semantics.Lane if by_lanes else semantics.Warpgroup
        )
        return plgpu.kernel(
            kernel,
            out_type=list(shapes),
            grid=tuple(grid.values()),
            grid_names=tuple(grid),
            num_threads=warpgroups,
            thread_name="warpgroup",
            kernel_name=f"lutjax_{name}",
            compiler_params=parameters,
        )

    return _call.on_varying(run, inputs, outputs)


def pipeline(
    step: Callable[..., Any],
    around: Callable[[Callable[..., Any]], None],
    *inputs: Any,
    blocks: Sequence[plgpu.BlockSpec],
    steps: int,
    stages: int,
) -> None:
    """Run ``step((number,), *blocks, carry) -> carry`` in every warpgroup that computes, on blocks in shared memory.

    Args:
      around: a function that gets one that runs all steps on a carry and returns the last carry.
      inputs: references. blocks: what of each a step reads. stages: so many steps' blocks are there at the same time.
    """
    plgpu.emit_pipeline_warp_specialized(
        step,
        grid=(steps,),
        in_specs=list(blocks),
        max_concurrent_steps=min(stages, steps),
        memory_registers=_REGISTERS_TO_COPY,
        num_compute_wgs=WARPGROUPS,
        wg_axis="warpgroup",
        compute_context=around,
    )(*inputs)


def load(reference: Any, layout: Any) -> jax.Array:
    """Return the array that a reference holds, in a given layout."""
    # Before jax 0.11 an index had to be given beside the reference.
    index = inspect.signature(plgpu.load).parameters.get("idx")
    needed = [()] if index is not None and index.default is inspect.Parameter.empty else []
    values: jax.Array = plgpu.load(reference, *needed, layout=layout)
    return values


def padded(a: jax.Array, *sizes: int, value: int = 0) -> jax.Array:
    """Return `a` with its last axes made as long as `sizes`."""
    lengths = a.shape[a.ndim - len(sizes) :]
    by = [(0, 0)] * (a.ndim - len(sizes)) + [(0, size - n) for size, n in zip(sizes, lengths, strict=True)]
    return jnp.pad(a, by, constant_values=value) if any(after for _, after in by) else a
