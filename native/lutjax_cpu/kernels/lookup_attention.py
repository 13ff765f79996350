"""`lutjax.lookup_attention`."""

import jax
import jax.numpy as jnp

from lutjax._compat import zeros_varying
from lutjax.ops.lookup_attention import LookupAttention
from lutjax.values._detection import Detection
from lutjax_cpu import _pairs


def _detections(call: LookupAttention) -> dict[str, Detection]:
    """Return query, key and position detections.

    Without positions, the position detection is a placeholder that is never the closest.
    """
    # One kernel for both forms. An infinite margin is never the smallest.
    position = call.position
    if position is None:
        none = zeros_varying(call.query.index, (1, 1), jnp.int32)
        position = Detection(none, none, none.astype(call.query.margin.dtype) + jnp.inf, 0)
    return {"query": call.query, "key": call.key, "position": position}


def _ids(call: LookupAttention) -> tuple[jax.Array, ...]:
    return tuple(d.index for d in _detections(call).values())


def _shifts(call: LookupAttention) -> tuple[int, ...]:
    position_bits = _detections(call)["position"].bits
    return position_bits + call.key.bits, position_bits


def _margin_cotangents(
    call: LookupAttention, dy: jax.Array, needs: frozenset[str]
) -> dict[str, jax.Array]:
    detections = _detections(call)
    arrays = [a for d in detections.values() for a in (d.flip, d.margin)]
    outputs = [_pairs.sums(d.shape, call.accumulate) for d in detections.values()]
    cotangents = _KERNELS.run("margins", call, (*arrays, dy), outputs)
    return {name: ct for name, ct in zip(detections, cotangents, strict=True) if name in needs}


_KERNELS = _pairs.Kernels("lookup_attention", _ids, _shifts, lambda call: (), _margin_cotangents)
forward, backward, update = _KERNELS.forward, _KERNELS.backward, _KERNELS.update
