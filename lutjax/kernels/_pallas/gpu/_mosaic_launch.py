"""Launches of Mosaic GPU kernels, and pipelines of copies into shared memory.

Work division: a program has `WARPGROUPS` warpgroups of 128 threads that compute, and one that only
issues asynchronous copies (TMA) of the blocks of later steps. They share the memory of one
multiprocessor.

Memory: `pipeline` keeps the blocks of up to `stages` steps in shared memory; step ``k`` computes
while the blocks of the next steps arrive. Barriers between the warpgroups are those of
`emit_pipeline_warp_specialized`.

Semantics: with `by_lanes` the kernel gives layouts of register arrays itself (lane semantics),
which inline MLIR needs; otherwise the compiler infers them (warpgroup semantics).
"""

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
    """Run a kernel; most kernels consist of one `pipeline`.

    Args:
      kernel: a function of references to all inputs and outputs.
      outputs: shapes and dtypes of the outputs. name: shown in a profile.
      grid: programs along each axis; neighbors along the last one run at the same time. Kernels
        read their place with `jax.lax.axis_index`, and their warpgroup by the name ``"warpgroup"``.
      warpgroups: warpgroups of a program; by default the number that a `pipeline` requires.
      by_lanes: the kernel gives the layouts of arrays; otherwise the compiler infers them.
    """

    def run(*shapes: jax.ShapeDtypeStruct) -> Callable[..., Any]:
        semantics = plgpu.LoweringSemantics
        parameters = plgpu.CompilerParams(
            # Inline MLIR addresses the registers of a thread, so it requires known layouts.
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
      around: function of a function that runs all steps on a carry and returns the last carry.
      inputs: references.
      blocks: block of each input that a step reads.
      stages: number of steps whose blocks are resident at the same time.
    """
    plgpu.emit_pipeline_warp_specialized(
        step,
        grid=(steps,),
        in_specs=list(blocks),
        # More stages than steps would reserve shared memory that no copy fills.
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
    # Kernels have no bounds checks: arrays are padded to whole blocks outside of them.
    lengths = a.shape[a.ndim - len(sizes) :]
    by = [(0, 0)] * (a.ndim - len(sizes)) + [(0, size - n) for size, n in zip(sizes, lengths, strict=True)]
    return jnp.pad(a, by, constant_values=value) if any(after for _, after in by) else a
