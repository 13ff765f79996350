"""Which calls and devices Mosaic GPU kernels fit. Imports no Pallas: the registry asks at every call."""

import jax

from lutjax._detection import Detection
from lutjax._row_rules import SGD
from lutjax.kernels._pallas.gpu import _attention, _gates_support
from lutjax.kernels._triton._support import compute_capability
from lutjax.kernels.registry import Call

MAX_ROWS = 128  # of a table that lies in shared memory
# What knows the limits of an op's kernels, where it is not this module. An update has those of its op.
_LIMITS = {"lookup_attention": _attention, "binary_lut": _gates_support}


def unsupported(call: Call) -> str | None:
    """Why a call cannot run on Mosaic GPU; None if it can."""
    capability = compute_capability(call.device)
    if capability is None:
        return f"needs an NVIDIA GPU whose compute capability is known, not {call.device.kind}"
    if capability < 90:
        return f"needs compute capability 9.0 or newer, {call.device.kind} has {capability / 10}"
    if _adds_rows(call) and capability >= 100:
        return f"multiplies by wgmma, which compute capability 9.0 has and {call.device.kind} has not"
    return unsupported_arguments(call)


def unsupported_arguments(call: Call) -> str | None:
    """The same, of what the call computes."""
    for leaf in jax.tree.leaves(call.arguments):
        if leaf.dtype.name not in ("float32", "bfloat16", "float16", "int32"):
            return f"has no kernel for {leaf.dtype}"
    limits = _LIMITS.get(call.op.removesuffix("_update"))
    if limits is not None:
        return limits.unsupported(call)
    if call.options.get("accumulate") is not None:
        return "adds in float32, not in fixed point"
    rule = call.options.get("rule")
    if rule is not None and not (isinstance(rule, SGD) and rule.additive):
        return f"moves rows by SGD without weight decay only, not by {rule}"
    weights, detection = _tables(call)
    n_detectors, n_rows, n_outputs = weights.shape
    if n_rows > MAX_ROWS:
        return f"keeps tables in shared memory: at most {MAX_ROWS} rows, here {n_rows}"
    # Of tables, outputs, and the parts of margins that warps add up.
    of_sample = max(n_outputs, 4 * n_detectors * -(-n_outputs // 128))
    numbers = max(weights.size, detection.index.shape[0] * of_sample)
    if numbers >= 2**31:
        return f"has been tried on arrays of fewer than 2^31 numbers, here {numbers}"
    return None


def _tables(call: Call) -> tuple[jax.ShapeDtypeStruct, Detection]:
    """What a look-up or its update reads."""
    return call.arguments[0], call.arguments[-1]


def _adds_rows(call: Call) -> bool:
    """Whether a call adds to rows by products of one-hot rows."""
    return call.op == "lookup_update" or (call.op == "lookup" and call.direction == "backward")


# Of tables of so many rows. Microseconds on an H200, float32, 64 detectors unless said, forward / backward of Triton and here
# (`lookup` alone; both cotangents):
#   samples  outputs  rows       Triton          here
#     16384      512    64   140 /  924     116 / 515
#     16384      512    32   152 /  927     117 / 506
#     16384      256    64    87 /  474      64 / 276
#     16384      512    64    50 /  256      47 / 167   (16 detectors)
#      4096      512    64    53 /  251      58 / 206
#     16384      128    64    55 /  269      62 / 194
#     16384      512   128   186 /  925     183 / 905   (the same, so it is left to Triton)
# Of updates the sums of rows were measured, in the first line: 590 in Triton, 288 here.
_FEWEST_ROWS, _MOST_ROWS = 32, 64
_FEWEST_DETECTORS = {"forward": 16, "backward": 16, "update": 64}
_FEWEST_OUTPUTS = {"forward": 256, "backward": 128, "update": 512}
_FEWEST_NUMBERS = {"forward": 2**22, "backward": 2**21, "update": 2**23}  # samples times outputs


def slower(call: Call) -> str | None:
    """Why the next implementation comes first for a call that would fit; None if this one does."""
    limits = _LIMITS.get(call.op.removesuffix("_update"))
    if limits is not None:
        return limits.slower(call)
    weights, detection = _tables(call)
    kind = "update" if call.op == "lookup_update" else call.direction
    n_detectors, n_rows, n_outputs = weights.shape
    numbers = detection.index.shape[0] * n_outputs
    if weights.dtype.name != "float32":
        return f"was measured faster than Triton for float32 tables only, not {weights.dtype}"
    for name, number, fewest in (
        ("rows", n_rows, _FEWEST_ROWS),
        ("detectors", n_detectors, _FEWEST_DETECTORS[kind]),
        ("outputs", n_outputs, _FEWEST_OUTPUTS[kind]),
        ("numbers in the outputs", numbers, _FEWEST_NUMBERS[kind]),
    ):
        if number < fewest:
            return f"was measured faster than Triton from {fewest} {name} on, here {number}"
    if n_rows > _MOST_ROWS:
        return f"was measured faster than Triton up to {_MOST_ROWS} rows, here {n_rows}"
    return None
