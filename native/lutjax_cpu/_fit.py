"""Reasons against native kernels."""

from typing import Any

import jax

from lutjax_cpu import _rules

_TABLES = ("float32", "bfloat16")
_IN_FIXED_POINT = ("detect", "detect_signs", "lookup", "sparse_lookup", "lookup_attention", "lut_pair_attention")


def unsupported(request: Any) -> str | None:
    """Return the reason why no kernel here can run a call, or None."""
    call = request.call
    if getattr(call, "accumulate", None) is not None and request.op not in _IN_FIXED_POINT:
        return "adds in floats, not in fixed point"
    for array in jax.tree.leaves(call):
        if array.dtype.name in ("float16", "float64"):
            return f"has kernels for {' and '.join(_TABLES)}, not {array.dtype}"
    return None if request.step is None else _rules.unsupported(request.step.rule)


def slower(request: Any) -> str | None:
    """Return the reason to leave a call to the next implementation, or None."""
    return None
