"""Support rules shared by TensorCore kernels."""

import jax

from lutjax.dispatch.registry import Deferral, Request, Rule
from lutjax.values._row_rules import SGD

_DTYPES = ("float32", "bfloat16", "int32", "uint32")


def tensorcore_rule(
    unsupported: Rule | None = None, slower: Rule | None = None, *dtypes: str
) -> Rule:
    """Return a kernel's support rule.

    Args:
      unsupported: returns the reason that a call's blocks do not fit, or None.
      slower: returns the reason that the next implementation comes first, or None.
      *dtypes: supported dtypes in addition to the common dtypes.
    """

    def supports(request: Request) -> str | None:
        if why := _unsupported_arguments(request, dtypes) or (unsupported and unsupported(request)):
            return why
        why = slower and slower(request)
        return Deferral(why) if why else None

    return supports


def _unsupported_arguments(request: Request, dtypes: tuple[str, ...]) -> str | None:
    for leaf in jax.tree.leaves((request.call, request.cotangent, request.step)):
        if leaf.dtype.name not in (*_DTYPES, *dtypes):
            return f"has no kernel for {leaf.dtype}: TensorCores compute in float32 and bfloat16"
    # Fixed point needs int32 sums whose order does not matter; float32 sums round beyond 2**24.
    if request.call.accumulate is not None:
        return "adds in float32, not in fixed point: matrix units have no int32 sums of that range"
    # Kernels update tables without optimizer state.
    if request.step is not None and not isinstance(request.step.rule, SGD):
        return f"moves rows by SGD only, not by {request.step.rule}"
    return None
