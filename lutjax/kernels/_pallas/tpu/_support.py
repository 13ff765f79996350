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
    return _slower_gates(call) if call.op in _GATES else None


# Wires of a gate, and part of the vector memory that inputs, outputs and what wires read fill, up to which plain JAX comes
# first where it reads whole rows. In the static profile of a TPU v6e it takes 33 thousand cycles, and these kernels 62, for
# 2048 gates of two inputs and 1024 samples; of 16384 gates and 4096 samples 2.9 and 2.0 million. Backward it is behind.
_FEW_WIRES = 4
_SMALL = 0.5


def _slower_gates(call: Call) -> str | None:
    x, _, wires = call.arguments[:3]
    n_gates, places = wires.shape
    if call.direction == "backward" or call.op == "binary_lut" or places > _FEW_WIRES:
        return None
    filled = 4 * (x.size + n_gates * (places + 1) * (x.size // max(x.shape[0], 1)))
    memory = _tpus.limits(call.device).vmem
    if filled > _SMALL * memory:
        return None
    return (
        f"plain JAX gathers the rows of at most {_FEW_WIRES} wires a gate faster in half of the vector memory, here "
        f"{places} and {filled / memory:.0%}"
    )
