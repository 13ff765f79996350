"""Reasons against native kernels."""

from typing import Any

import jax

_TABLES = ("float32", "bfloat16")
_IN_INTEGERS = ("lookup_attention", "lut_pair_attention")  # ops with kernels that add in fixed point


def unsupported(request: Any) -> str | None:
    """Return the reason why no kernel here can run a call, or None."""
    call = request.call
    if getattr(call, "accumulate", None) is not None and request.op not in _IN_INTEGERS:
        return "adds in floats, not in fixed point"
    for array in jax.tree.leaves(call):
        if array.dtype.name in ("float16", "float64"):
            return f"has kernels for {' and '.join(_TABLES)}, not {array.dtype}"
    return None


def slower(request: Any) -> str | None:
    """Return the reason to leave a call to the next implementation, or None."""
    return None
