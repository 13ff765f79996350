"""Pallas kernel calls from JAX.

`call` wraps `pallas_call`. It prefixes the kernel names shown in profiles, and supports
`shard_map`, where arrays carry their varying mesh axes.
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
      kernel: function that takes references, as for `pallas_call`.
      options: `pallas_call` options: grid, block specs, scratch memory, `compiler_params`.

    Returns:
      The output arrays.
    """

    def launch(*shapes: jax.ShapeDtypeStruct) -> Callable[..., Any]:
        return pl.pallas_call(kernel, out_shape=list(shapes), name=f"lutjax_{name}", **options)

    return launch_varying(launch, inputs, outputs)


def launch_varying(
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
