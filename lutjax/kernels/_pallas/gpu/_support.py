"""Which calls and devices Mosaic GPU kernels fit. Imports no Pallas: the registry asks at every call."""

import jax

from lutjax.kernels._triton._support import compute_capability
from lutjax.kernels.registry import Call

MAX_ROWS = 128  # of a table that lies in shared memory


def unsupported(call: Call) -> str | None:
    """Why a call cannot run on Mosaic GPU; None if it can."""
    capability = compute_capability(call.device)
    if capability is None:
        return f"needs an NVIDIA GPU whose compute capability is known, not {call.device.kind}"
    if capability < 90:
        return f"needs compute capability 9.0 or newer, {call.device.kind} has {capability / 10}"
    if call.op == "lookup" and call.direction == "backward" and capability >= 100:
        return f"multiplies by wgmma, which compute capability 9.0 has and {call.device.kind} has not"
    return unsupported_arguments(call)


def unsupported_arguments(call: Call) -> str | None:
    """The same, of what the call computes."""
    for leaf in jax.tree.leaves(call.arguments):
        if leaf.dtype.name not in ("float32", "bfloat16", "float16", "int32"):
            return f"has no kernel for {leaf.dtype}"
    if call.options.get("accumulate") is not None:
        return "adds in float32, not in fixed point"
    if call.op == "lookup" and call.arguments[0].shape[1] > MAX_ROWS:
        return f"keeps tables in shared memory: at most {MAX_ROWS} rows, here {call.arguments[0].shape[1]}"
    return None


def slower(call: Call) -> str | None:
    """Why the next implementation comes first for a call that would fit; None if this one does."""
    return None
