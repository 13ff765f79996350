"""Which calls and devices SparseCore kernels fit. Imports no Pallas: the registry asks at every call."""

import jax

from lutjax.kernels._pallas import _tpus
from lutjax.kernels.registry import Call


def unsupported(call: Call) -> str | None:
    """Why a call cannot run on the SparseCores of its device; None if it can."""
    tpu = _tpus.generation(call.device)
    if tpu is None or tpu.sparse_cores is None:
        return f"needs a TPU with SparseCores that gather rows: v5p, v6e or v7x, not {call.device.kind}"
    return unsupported_arguments(call)


def unsupported_arguments(call: Call) -> str | None:
    """The same, of what the call computes."""
    for leaf in jax.tree.leaves(call.arguments):
        if leaf.dtype.name not in ("float32", "int32"):
            return f"has no kernel for {leaf.dtype}"
    if call.options.get("accumulate") is not None:
        return "adds in float32, not in fixed point"
    return None


def slower(call: Call) -> str | None:
    """Why the next implementation comes first for a call that would fit; None if this one does."""
    return None
