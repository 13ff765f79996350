"""Which calls and devices TensorCore kernels fit. Imports no Pallas: the registry asks at every call."""

import jax

from lutjax._row_rules import SGD
from lutjax.kernels._pallas import _tpus
from lutjax.kernels._pallas.tpu import _gate_blocks
from lutjax.kernels.registry import Call

_GATES = ("bilinear_gates", "soft_lut", "binary_lut", "packed_lut")


def unsupported(call: Call) -> str | None:
    """Why a call cannot run on the TensorCores of its device; None if it can."""
    if _tpus.generation(call.device) is None:
        return f"needs a TPU v4, v5e, v5p, v6e or v7x, not {call.device.kind}"
    return unsupported_arguments(call)


def unsupported_arguments(call: Call) -> str | None:
    """The same, of what the call computes."""
    dtypes = ("float32", "bfloat16", "int32", "uint32", *(["bool"] if call.op == "packed_lut" else []))
    for leaf in jax.tree.leaves(call.arguments):
        if leaf.dtype.name not in dtypes:
            return f"has no kernel for {leaf.dtype}: TensorCores compute in float32 and bfloat16"
    if call.options.get("accumulate") is not None:
        return "adds in float32, not in fixed point: matrix units have no int32 sums of that range"
    if call.op.endswith("_update") and not isinstance(call.options["rule"], SGD):
        return f"moves rows by SGD only, not by {call.options['rule']}"
    return _unsupported_gates(call) if call.op in _GATES else None


def _unsupported_gates(call: Call) -> str | None:
    x, parameter, wires = call.arguments[:3]
    if parameter.shape[0] != wires.shape[0]:  # coefficients: those of a gate are a column
        parameter = jax.ShapeDtypeStruct(parameter.shape[::-1], parameter.dtype)
    if _gate_blocks.blocks(x, parameter, wires, call.device, call.direction == "backward") is not None:
        return None
    memory = _tpus.limits(call.device).vmem // 2**20
    return f"holds {_gate_blocks.LANES} samples of all inputs in vector memory: {x.shape[0]} inputs do not fit {memory} MiB"


def slower(call: Call) -> str | None:
    """Why the next implementation comes first for a call that would fit; None if this one does."""
    return None
