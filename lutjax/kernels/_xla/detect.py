"""`lutjax.detect` in plain JAX.

Formula for detector ``t`` and anchor pair ``r``::

    delta[t, r] = x[anchors[t, r, 0]] - x[anchors[t, r, 1]]
    bit r of index = delta > 0 and not |delta| < epsilon
    margin = delta of the pair with the smallest |delta|;  flip = its bit
    dx[first anchor of that pair] += dmargin;  dx[second anchor] -= dmargin

Work: one pair of all detectors at a time, so only one delta per detector is live. Layout: inputs
first, ``[I, B]``, so that an anchor reads a contiguous row of the batch.

Numerics: accumulator dtype. Ties take the first pair; NaN is closer than any number. Ids are
clamped.
"""

import jax
import jax.numpy as jnp

from lutjax._compat import zeros_varying
from lutjax.dispatch.registry import Device
from lutjax.kernels._xla._row_gathers import add, read
from lutjax.ops.detect import Detect
from lutjax.values._detection import Detection, is_above_zero
from lutjax.values._dtypes import accumulator
from lutjax.values._fixed_point import addends


def forward(call: Detect, *, device: Device) -> Detection:
    assert call.x is not None
    # Inputs first: an anchor then reads a contiguous row of the batch.
    inputs = call.x.T.astype(accumulator(call.x.dtype))
    ids = jnp.clip(call.anchors, 0, call.n_inputs - 1)
    n_detectors, n_pairs, _ = ids.shape

    def end(r: int, side: int) -> jax.Array:
        return read(inputs, ids[:, r, side])

    deltas = [end(r, 0) - end(r, 1) for r in range(n_pairs)]
    d = detect_closest(deltas, (n_detectors, call.x.shape[0]), inputs.dtype, call.epsilon)
    return jax.tree.map(jnp.transpose, d)


def backward(
    call: Detect, cotangent: jax.Array, needs: frozenset[str], *, device: Device
) -> dict[str, jax.Array]:
    assert call.flip is not None
    d_margin = addends(cotangent, call.accumulate)
    batch, n_detectors = d_margin.shape
    dx = zeros_varying(d_margin, (batch, call.n_inputs), d_margin.dtype)
    if call.anchors.shape[1] == 0:  # no comparison, no gradient
        return {"x": dx}
    detector = jnp.arange(n_detectors, dtype=jnp.int32)[None]
    ids = jnp.clip(call.anchors, 0, call.n_inputs - 1)
    # The closest pair differs by sample, so the backward pass gathers ids and scatters by element.
    pair = ids.at[detector, closest_pair(call.flip)].get(mode="clip")
    sample = jnp.arange(batch, dtype=jnp.int32)[:, None]
    dx = add(dx, (sample, pair[..., 0]), d_margin)
    return {"x": add(dx, (sample, pair[..., 1]), -d_margin)}


def detect_closest(
    deltas: list[jax.Array], shape: tuple[int, ...], dtype: jnp.dtype, epsilon: float
) -> Detection:
    """Return the detection from one delta per anchor pair (section 1 of the semantics)."""
    index = flip = jnp.zeros(shape, jnp.int32)
    margin = jnp.full(shape, jnp.inf, dtype)
    for r, delta in enumerate(deltas):
        bit = is_above_zero(delta)
        if epsilon:
            # Negated, so that a NaN keeps its bit.
            bit &= ~(jnp.abs(delta) < epsilon)
        index |= bit.astype(jnp.int32) << r
        # Strictly closer, so that the first of equals stays; NaN is closer than any number.
        closer = (jnp.abs(delta) < jnp.abs(margin)) | (jnp.isnan(delta) & ~jnp.isnan(margin))
        if r == 0:
            closer = jnp.ones_like(closer)  # also where it is infinite
        margin = jnp.where(closer, delta, margin)
        flip = jnp.where(closer, jnp.int32(1 << r), flip)
    return Detection(index, flip, margin, len(deltas))


def closest_pair(flip: jax.Array) -> jax.Array:
    """Return the pair index of a flip mask; 0 for an empty mask."""
    # A flip mask has one bit; clz finds its number without a loop.
    return jnp.maximum(31 - jax.lax.clz(flip), 0)
