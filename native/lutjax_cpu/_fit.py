"""Reasons against native kernels."""

from typing import Any

import jax

from lutjax_cpu import _rules

_TABLES = ("float32", "bfloat16")
_MOST = 2**31 - 1  # places that kernels keep as int32
_IN_BLOCK = 64  # samples of a block of `scored_lut`, in which an input has as many numbers


def unsupported(request: Any) -> str | None:
    """Return the reason why no kernel here can run a call, or None."""
    call = request.call
    for array in jax.tree.leaves(call):
        if array.dtype.name in ("float16", "float64"):
            return f"has kernels for {' and '.join(_TABLES)}, not {array.dtype}"
    reason = None if request.step is None else _rules.unsupported(request.step.rule)
    if reason is None and request.op in ("scored_lut", "margins"):
        reason = _too_many_inputs(request.op, call)
    if reason is None and request.op == "scored_lut":
        reason = _unsupported_scored(call)
    return reason


def _too_many_inputs(op: str, call: Any) -> str | None:
    _, groups, n_inputs = call.x.shape
    places, most = groups * n_inputs, _MOST
    if op == "scored_lut":  # it copies the inputs of a group and a block of samples
        places, most = n_inputs, _MOST // _IN_BLOCK
    return None if places <= most else f"has kernels for at most {most} inputs, not {places}"


def _unsupported_scored(call: Any) -> str | None:
    from lutjax_cpu.kernels import scored_lut

    if not scored_lut.supports(call.read):
        return f"has kernels for the reads of lutjax.reads, not for {type(call.read).__name__}"
    return None
