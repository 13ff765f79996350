"""`lutjax.sparse_lookup` in Mosaic GPU, for long rows (`_shared_outputs`).

Formula: ``y[b, targets[t, row, k]] += weights[t, row, k]`` with ``row = index[b, t]``; margin
cotangents as in `lutjax.kernels._xla.sparse_lookup`.

Work: outputs and cotangents of a sample lie in shared memory, so scattered accesses do not reach
the L2 cache. Triton kernels compute table gradients. They also run updates and backward passes in
fixed point, which have no kernel here.

Numerics: see `_shared_outputs`. Row ids and targets are clamped.
"""

import jax
import jax.numpy as jnp

from lutjax.dispatch.registry import Declaration, Device, Request
from lutjax.kernels._pallas.gpu._rules import (
    fewer_than_measured,
    lacks_triton,
    too_many,
    unsupported_arrays,
)
from lutjax.kernels._triton import sparse_lookup as in_triton
from lutjax.kernels._xla._row_gathers import slope
from lutjax.ops.sparse_lookup import SparseLookup
from lutjax.values._fixed_point import addends, result

# 32 KiB of 4-byte outputs.
_MOST_OUTPUTS = 2**13  # of a sample, in shared memory

_FEWEST_SLOTS = 32
_FEWEST_SAMPLES = 512


def _supports(request: Request) -> str | None:
    call = request.call
    assert isinstance(call, SparseLookup)
    if why := unsupported_arrays(request) or lacks_triton("adds to tables by Triton kernels"):
        return why
    if call.n_outputs > _MOST_OUTPUTS:
        return (
            f"keeps the outputs of a sample in shared memory: at most {_MOST_OUTPUTS}, here "
            f"{call.n_outputs}"
        )
    # Outputs are padded to the threads of a program.
    n_outputs = -(-call.n_outputs // 128) * 128
    if why := too_many(max(call.weights.size, len(call.detection.index) * n_outputs)):
        return why
    if call.accumulate is not None and request.direction == "backward":
        return "computes margins in floating point only"
    return fewer_than_measured(
        (
            ("slots", call.weights.shape[2], _FEWEST_SLOTS),
            ("samples", len(call.detection.index), _FEWEST_SAMPLES),
        )
    )


SPEC = Declaration(_supports, requires=("jax_triton", "triton"), launches=("sparse_lookup.table",))


def forward(call: SparseLookup, *, device: Device) -> jax.Array:
    from lutjax.kernels._pallas.gpu import _shared_outputs

    # Rounded once per entry: in fixed point the kernel then adds int32.
    weights = addends(call.weights, call.accumulate)
    y = _shared_outputs.sum_slots(
        weights, _clamp_rows(call, call.detection.index), _targets(call), call.n_outputs
    )
    return result(y, call.weights.dtype, call.accumulate)


def backward(
    call: SparseLookup, cotangent: jax.Array, needs: frozenset[str], *, device: Device
) -> dict[str, jax.Array]:
    from lutjax.kernels._pallas.gpu import _shared_outputs

    # Table gradients scatter to global memory in any kernel, so Triton computes them.
    cotangents = in_triton.backward(call, cotangent, needs - {"detection"}, device=device)
    if "detection" in needs:
        d = call.detection
        rows = _clamp_rows(call, d.index), _clamp_rows(call, d.index ^ d.flip)
        arrays = (
            call.weights.astype(jnp.float32),
            *rows,
            _targets(call),
            cotangent.astype(jnp.float32),
        )
        cotangents["detection"] = slope(d.margin) * _shared_outputs.differences(*arrays).astype(
            d.margin.dtype
        )
    return cotangents


def _clamp_rows(call: SparseLookup, rows: jax.Array) -> jax.Array:
    """Return clamped row ids, ``[B, T]``."""
    return jnp.clip(rows, 0, call.weights.shape[1] - 1)


def _targets(call: SparseLookup) -> jax.Array:
    # -1 and below: unused slots.
    return jnp.clip(call.targets, -1, call.n_outputs - 1)
