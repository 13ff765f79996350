"""Calls of Pallas kernels from JAX.

`call` wraps `pallas_call`: it prefixes kernel names, which profiles show, and makes kernels usable
inside of `shard_map`, where arrays carry the mesh axes over which they vary.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.experimental import pallas as pl

from lutjax import _compat


def call(
    kernel: Callable[..., None],
    *inputs: jax.Array,
    outputs: Sequence[jax.ShapeDtypeStruct],
    name: str,
    **options: Any,
) -> tuple[jax.Array, ...]:
    """Run a kernel.

    Args:
      kernel: a function of references, as `pallas_call` takes it.
      inputs: input arrays.
      outputs: shapes and dtypes of the outputs.
      name: shown in a profile.
      options: of `pallas_call`: the grid, its blocks, scratch memory, `compiler_params` of the device.

    Returns:
      The arrays of `outputs`.
    """

    def launch(*shapes: jax.ShapeDtypeStruct) -> Callable[..., Any]:
        return pl.pallas_call(kernel, out_shape=list(shapes), name=f"lutjax_{name}", **options)

    return on_varying(launch, inputs, outputs)


def on_varying(
    launch: Callable[..., Callable[..., Any]],
    inputs: Sequence[jax.Array],
    outputs: Sequence[jax.ShapeDtypeStruct],
) -> tuple[jax.Array, ...]:
    """Call ``launch(*outputs)`` with all arrays varying over the same mesh axes."""
    # A kernel cannot mix varying and replicated inputs: all of them, and the outputs, get the
    # union.
    axes = frozenset[str]().union(*(_compat.varying_axes(a) for a in inputs))
    run = launch(*(_compat.shape_varying(s, axes) for s in outputs))
    return tuple(run(*(_compat.cast_varying(a, axes) for a in inputs)))
