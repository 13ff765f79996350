"""Shared support rules for Triton kernels: dtypes, update rules, and sizes.

Below the measured sizes a `Deferral` gives way to plain JAX, because kernel launches dominate small
calls.
"""

import jax

from lutjax.dispatch.registry import Deferral, Request
from lutjax.ops._gates import TableGates
from lutjax.ops.bilinear_gates import BilinearGates
from lutjax.ops.lookup_attention import LookupAttention
from lutjax.ops.lut_pair_attention import LutPairAttention
from lutjax.values._dtypes import FLOATS
from lutjax.values._row_rules import SGD

# Most elements added by an update that plain JAX runs. On an H200 it was faster up to 16.8 million.
_FEW_ADDITIONS = 2**24
# Most inputs or gates times samples that plain JAX runs. On an H200 it was faster for 1 million and
# equal for 4 million.
_FEW_VALUES = 2**21


def unsupported_arguments(request: Request, *dtypes: str) -> str | None:
    """Return the reason that a call's dtypes or update rule are unsupported, or None.

    Args:
      *dtypes: supported dtypes in addition to floats and int32.
    """
    for leaf in jax.tree.leaves((request.call, request.step)):
        if leaf.dtype.name not in (*FLOATS, "int32", *dtypes):
            return f"has no kernel for {leaf.dtype}"
    if request.step is not None and not isinstance(request.step.rule, SGD):
        return f"moves rows by SGD only, not by {request.step.rule}"
    return None


def few_additions(request: Request, n_reads: int) -> Deferral | None:
    """Return a deferral to plain JAX for small updates, which kernel launches dominate."""
    step, weights = request.step, request.call.weights
    if step is None:
        return None
    # Such updates sum gradients per row first, like those of 16-bit tables.
    sums = step.differs_by_row or step.rule.weight_decay
    if weights.dtype.itemsize < 4 or sums:
        return None
    n_additions = n_reads * weights.shape[-1] if request.cotangent.size else 0
    if n_additions > _FEW_ADDITIONS:
        return None
    return Deferral(
        f"plain JAX is faster for at most {_FEW_ADDITIONS} numbers added, here {n_additions}"
    )


def few_pair_additions(
    request: Request, call: LookupAttention | LutPairAttention, queries: tuple[int, ...]
) -> Deferral | None:
    """Return `few_additions` for attention, which reads a row per counted pair and detector."""
    n_samples, n_queries, *_ = queries
    n_keys = n_queries if call.window is None else min(n_queries, call.window)
    # Keys precede queries, so about half of all pairs count.
    return few_additions(request, n_samples * n_queries * call.weights.shape[0] * n_keys // 2)


def few_values(call: BilinearGates | TableGates) -> Deferral | None:
    """Return a deferral to plain JAX for few gates, whose time is mostly the kernel launch.

    Half precision always runs in Triton: on an H100, 6 layers with 8000 gates and 128 samples took
    14 times as long in plain JAX.
    """
    if call.x.dtype.itemsize < 4:
        return None
    values = max(call.x.shape[0], call.wires.shape[0]) * call.x.shape[1]
    if values > _FEW_VALUES:
        return None
    return Deferral(
        f"plain JAX is faster for at most {_FEW_VALUES} values of inputs or gates, here {values}"
    )
