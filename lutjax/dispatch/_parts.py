"""Decomposition of fused ops: when it runs, and a kernel interface for it."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from lutjax import _meshes
from lutjax.dispatch import _table_reads
from lutjax.dispatch.contract import Call


class Parts:
    """Plain-JAX kernel for a fused op, made from the op's decomposition.

    If it is selected, `lutjax.dispatch._transforms.apply` calls the parts directly, with their own
    kernels and gradients. The kernel interface is for code that measures and compares
    implementations.
    """

    @staticmethod
    def forward(call: Call, *, device: Any) -> Any:
        del device
        return _in_plain_jax(call)

    @staticmethod
    def backward(
        call: Call, cotangent: Any, needs: frozenset[str], *, device: Any
    ) -> dict[str, Any]:
        del device
        wanted = {name: getattr(call, name) for name in needs}
        pull = jax.vjp(lambda arrays: _in_plain_jax(call.replace(**arrays)), wanted)[1]
        found: dict[str, Any] = pull(cotangent)[0]
        return found


def _in_plain_jax(call: Call) -> Any:
    return run_decomposed(call, "xla", 0)


def run_decomposed(call: Call, implementation: Any, feature_axis: int) -> Any:
    """Return a fused op's outputs from its parts, features first if its kernels take them so."""
    run: Callable[..., Any] = call.parts  # type: ignore[assignment]  # bound to the call
    if not call.features_first or feature_axis == 0:
        return run(implementation=implementation)
    arrays = {
        name: getattr(call, name)
        for name, rank in zip(call.arrays(), call.ranks(), strict=True)
        if rank
    }
    first: Call = call.replace(**{name: jnp.moveaxis(a, -1, 0) for name, a in arrays.items()})
    y = first.parts(implementation=implementation)  # type: ignore[misc]
    rank = len(str(call.output).split())
    return jnp.moveaxis(y, range(rank), range(-rank, 0))


def needs_parts(call: Call) -> bool:
    """Return True if the decomposition must run instead of kernels.

    The parts can show where a NaN arises, return sparse table gradients, and follow arrays on a
    mesh with explicit axes. Kernels cannot.
    """
    shows_nan: bool = jax.config.jax_debug_nans  # type: ignore[attr-defined]
    watched = _table_reads.current_reads() is not None and call.table_name is None
    return (
        shows_nan
        or watched
        or any(_meshes.explicit_axes(a) for a in jax.tree.leaves(call.values()))
    )
