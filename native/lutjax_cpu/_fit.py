"""Reasons against native kernels."""

from typing import Any

import jax

from lutjax_cpu import _rules

_TABLES = ("float32", "bfloat16")
_IN_FIXED_POINT = (
    "detect",
    "detect_signs",
    "lookup",
    "lookup_attention",
    "lut_pair_attention",
    "margins",
    "scored_lut",
    "sparse_lookup",
    "weighted_lookup",
)


def unsupported(request: Any) -> str | None:
    """Return the reason why no kernel here can run a call, or None."""
    call = request.call
    if getattr(call, "accumulate", None) is not None and request.op not in _IN_FIXED_POINT:
        return "adds in floats, not in fixed point"
    for array in jax.tree.leaves(call):
        if array.dtype.name in ("float16", "float64"):
            return f"has kernels for {' and '.join(_TABLES)}, not {array.dtype}"
    reason = None if request.step is None else _rules.unsupported(request.step.rule)
    if reason is None and request.op == "scored_lut":
        reason = _unsupported_scored(call)
    return reason


def _unsupported_scored(call: Any) -> str | None:
    from lutjax_cpu.kernels import scored_lut

    if not scored_lut.knows(call.read):
        return f"has kernels for the reads of lutjax.reads, not for {type(call.read).__name__}"
    return None


def slower(request: Any) -> str | None:
    """Return the reason to leave a call to the next implementation, or None."""
    return None
