"""Reasons against native kernels."""

from typing import Any

import jax

from lutjax_cpu import _rules

_TABLES = ("float32", "bfloat16")


def unsupported(request: Any) -> str | None:
    """Return the reason why no kernel here can run a call, or None."""
    call = request.call
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
