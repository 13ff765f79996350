"""Rules that say which calls TensorCore kernels fit. Imports no Pallas: the registry asks at every call."""

from types import ModuleType

import jax

from lutjax.dispatch.registry import Request
from lutjax.kernels._pallas import _tpus
from lutjax.kernels._pallas.tpu import _attention_blocks, _gate_blocks, _lanes, _row_blocks, _shifts, _tables
from lutjax.tables._row_rules import SGD

# Modules that know the sizes of an op's blocks. An update is cut as its op.
_SIZES: dict[str, ModuleType] = {
    "lookup": _tables,
    "sparse_lookup": _tables,
    "weighted_lookup": _row_blocks,
    "scored_lut": _row_blocks,
    "lookup_attention": _attention_blocks,
    "lut_pair_attention": _shifts,
    "bilinear_gates": _gate_blocks,
    "soft_lut": _gate_blocks,
    "binary_lut": _gate_blocks,
    "packed_lut": _gate_blocks,
}
_DTYPES = ("float32", "bfloat16", "int32", "uint32")
_OTHERS = (("packed_lut", "bool"), ("scored_lut", "int8"))


def unsupported(request: Request) -> str | None:
    """Return why a call cannot run on the TensorCores of its device; None if it can."""
    if _tpus.generation(request.device) is None:
        return f"needs a TPU v4, v5e, v5p, v6e or v7x, not {request.device.kind}"
    return unsupported_arguments(request)


def unsupported_arguments(request: Request) -> str | None:
    """Return why the arrays or options of a call do not fit, on whatever device."""
    for leaf in jax.tree.leaves((request.call, request.cotangent, request.step)):
        if leaf.dtype.name not in _DTYPES and (request.op, leaf.dtype.name) not in _OTHERS:
            return f"has no kernel for {leaf.dtype}: TensorCores compute in float32 and bfloat16"
    if getattr(request.call, "accumulate", None) is not None:
        return "adds in float32, not in fixed point: matrix units have no int32 sums of that range"
    if request.step is not None and not isinstance(request.step.rule, SGD):
        return f"moves rows by SGD only, not by {request.step.rule}"
    pairs = request.op in ("lookup_attention", "lut_pair_attention")
    if pairs and request.step is not None and request.step.differs_by_row:
        return "adds pairs to rows at one rate for all, and the rates or factors of these differ"
    if request.op == "detect":
        return _lanes.unsupported(request)
    return _SIZES[request.op].unsupported(request) if request.op in _SIZES else None


def slower(request: Request) -> str | None:
    """Return why the next implementation comes first for a call that would fit; None if this one does."""
    return _SIZES[request.op].slower(request) if request.op in _SIZES else None
