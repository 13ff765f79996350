"""Rules that several Triton kernels share."""

import jax

from lutjax.dispatch.registry import Deferral, Request
from lutjax.ops._gates import TableGates
from lutjax.ops.bilinear_gates import BilinearGates
from lutjax.values._dtypes import FLOATS
from lutjax.values._row_rules import SGD

# Elements that an update adds; of shapes measured on an H200, those up to 16.8 million were faster in plain JAX.
_FEW_ADDITIONS = 2**24
# Inputs or gates times samples; of shapes measured on an H200, 1 million were faster in plain JAX, and 4 million equal.
_FEW_VALUES = 2**21


def unsupported_arguments(request: Request, *dtypes: str) -> str | None:
    """Return why no kernel takes the dtypes or the update rule of a call; None if one does.

    Args:
      request: the request.
      *dtypes: supported dtypes besides floats and int32.
    """
    for leaf in jax.tree.leaves((request.call, request.step)):
        if leaf.dtype.name not in (*FLOATS, "int32", *dtypes):
            return f"has no kernel for {leaf.dtype}"
    if request.step is not None and not isinstance(request.step.rule, SGD):
        return f"moves rows by SGD only, not by {request.step.rule}"
    return None


def few_additions(request: Request, n_reads: int) -> Deferral | None:
    """Return why plain JAX comes first for an update: small ones are mostly the launch of kernels.

    Args:
      request: the request, in any direction.
      n_reads: number of row reads.
    """
    step, weights = request.step, request.call.weights
    if step is None:
        return None
    sums = step.differs_by_row or step.rule.weight_decay  # rows move by a sum, as those of 16 bits
    if weights.dtype.itemsize < 4 or sums:
        return None
    n_additions = n_reads * weights.shape[-1] if request.cotangent.size else 0
    if n_additions > _FEW_ADDITIONS:
        return None
    return Deferral(f"plain JAX is faster for at most {_FEW_ADDITIONS} numbers added, here {n_additions}")


def few_values(call: BilinearGates | TableGates) -> Deferral | None:
    """Return why plain JAX comes first for gates: few are mostly the launch of kernels.

    In half precision it does not: on an H100, 6 layers of 8000 gates and 128 samples took 14 times as long in plain JAX.
    """
    if call.x.dtype.itemsize < 4:
        return None
    values = max(call.x.shape[0], call.wires.shape[0]) * call.x.shape[1]
    if values > _FEW_VALUES:
        return None
    return Deferral(f"plain JAX is faster for at most {_FEW_VALUES} values of inputs or gates, here {values}")
