"""Which calls and devices TensorCore kernels fit. Imports no Pallas: the registry asks at every call."""

import jax

from lutjax._row_rules import SGD
from lutjax.kernels._pallas import _tpus
from lutjax.kernels._pallas.tpu import _lanes, _shifts
from lutjax.kernels.registry import Call


def unsupported(call: Call) -> str | None:
    """Why a call cannot run on the TensorCores of its device; None if it can."""
    if _tpus.generation(call.device) is None:
        return f"needs a TPU v4, v5e, v5p, v6e or v7x, not {call.device.kind}"
    return unsupported_arguments(call)


def unsupported_arguments(call: Call) -> str | None:
    """The same, of what the call computes."""
    for leaf in jax.tree.leaves(call.arguments):
        if leaf.dtype.name not in ("float32", "bfloat16", "int32", "uint32"):
            return f"has no kernel for {leaf.dtype}: TensorCores compute in float32 and bfloat16"
    if call.options.get("accumulate") is not None:
        return "adds in float32, not in fixed point: matrix units have no int32 sums of that range"
    if call.op.endswith("_update") and not isinstance(call.options["rule"], SGD):
        return f"moves rows by SGD only, not by {call.options['rule']}"
    if call.op == "detect":
        return _lanes.detect_unsupported(call)
    if call.op.startswith("lut_pair_attention"):
        return _shifts.unsupported(call)
    return None


def slower(call: Call) -> str | None:
    """Why the next implementation comes first for a call that would fit; None if this one does."""
    if call.op.startswith("lut_pair_attention"):
        return _shifts.slower(call)
    return None
