"""Mosaic GPU kernel launches and pipelined copies into shared memory.

Work division: a program has `WARPGROUPS` compute warpgroups with 128 threads each, and one
warpgroup that only issues asynchronous copies (TMA) for later steps. They share one
multiprocessor's memory.

Memory: `pipeline` keeps the blocks for up to `stages` steps in shared memory. Step ``k`` computes
while the next steps' blocks arrive. `emit_pipeline_warp_specialized` inserts the barriers.

Semantics: with `by_lanes` the kernel specifies register layouts itself (lane semantics), as inline
MLIR requires; otherwise the compiler infers them (warpgroup semantics).
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from lutjax.kernels._pallas import _call

# Registers of a thread of the warpgroup that asks for copies. With this number, 2 warpgroups that
# compute get 232 each; 4 would ask for more than a program has, and wait for ever.
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
      kernel: function that takes references to all inputs and outputs.
      grid: programs along each axis; neighbors along the last axis run at the same time. Kernels
        read their position with `jax.lax.axis_index`, and their warpgroup as axis ``"warpgroup"``.
      warpgroups: warpgroups per program; by default as many as `pipeline` requires.
      by_lanes: the kernel specifies array layouts; otherwise the compiler infers them.
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

    return _call.launch_varying(run, inputs, outputs)


def pipeline(
    step: Callable[..., Any],
    around: Callable[[Callable[..., Any]], None],
    *inputs: Any,
    blocks: Sequence[plgpu.BlockSpec],
    steps: int,
    stages: int,
) -> None:
    """Run ``step((number,), *blocks, carry) -> carry`` on shared-memory blocks.

    Every compute warpgroup runs all steps.

    Args:
      around: function that receives ``run(carry) -> carry``, which runs all steps.
      inputs: references.
      blocks: each input's block per step.
      stages: number of steps with resident blocks.
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
    # Before jax 0.11 an index had to be given beside the reference.
    index = inspect.signature(plgpu.load).parameters.get("idx")
    needed = [()] if index is not None and index.default is inspect.Parameter.empty else []
    values: jax.Array = plgpu.load(reference, *needed, layout=layout)
    return values


def pad_to(a: jax.Array, *sizes: int, value: int = 0) -> jax.Array:
    """Return `a` with its last axes made as long as `sizes`."""
    # Kernels have no bounds checks: arrays are padded to whole blocks outside of them.
    lengths = a.shape[a.ndim - len(sizes) :]
    by = [(0, 0)] * (a.ndim - len(sizes)) + [
        (0, size - n) for size, n in zip(sizes, lengths, strict=True)
    ]
    return jnp.pad(a, by, constant_values=value) if any(after for _, after in by) else a
