"""`lutjax.detect` in plain JAX."""

import jax
import jax.numpy as jnp

from lutjax._compat import zeros_varying
from lutjax._detection import Detection
from lutjax._dtypes import accumulator
from lutjax._fixed_point import FixedPoint, addends
from lutjax.kernels._xla._rows import add, read
from lutjax.kernels.registry import Device


def forward(
    x: jax.Array,
    anchors: jax.Array,
    *,
    epsilon: float,
    n_inputs: int,
    accumulate: FixedPoint | None,
    device: Device,
) -> Detection:
    # Inputs first: an anchor then reads a contiguous row of the batch.
    inputs = x.T.astype(accumulator(x.dtype))
    ids = jnp.clip(anchors, 0, n_inputs - 1)

    def end(r: int, side: int) -> jax.Array:
        return read(inputs, ids[:, r, side])

    shape = (anchors.shape[0], x.shape[0])
    d = closest([end(r, 0) - end(r, 1) for r in range(anchors.shape[1])], shape, inputs.dtype, epsilon)
    return jax.tree.map(jnp.transpose, d)


def backward(
    saved: tuple[jax.Array, jax.Array],
    d_margin: jax.Array,
    needs: tuple[bool, ...],
    *,
    epsilon: float,
    n_inputs: int,
    accumulate: FixedPoint | None,
    device: Device,
) -> tuple[jax.Array, None]:
    anchors, flip = saved
    d_margin = addends(d_margin, accumulate)
    batch, n_detectors = flip.shape
    if anchors.shape[1] == 0:  # no comparison, no gradient
        return zeros_varying(d_margin, (batch, n_inputs), d_margin.dtype), None
    detector = jnp.arange(n_detectors, dtype=jnp.int32)[None]
    pair = jnp.clip(anchors, 0, n_inputs - 1).at[detector, closest_pair(flip)].get(mode="clip")
    sample = jnp.arange(batch, dtype=jnp.int32)[:, None]
    dx = zeros_varying(d_margin, (batch, n_inputs), d_margin.dtype)
    dx = add(dx, (sample, pair[..., 0]), d_margin)
    return add(dx, (sample, pair[..., 1]), -d_margin), None


def closest(deltas: list[jax.Array], shape: tuple[int, ...], dtype: jnp.dtype, epsilon: float) -> Detection:
    """The detection of one delta for each anchor pair, all of one shape (section 1 of the semantics)."""
    index = flip = jnp.zeros(shape, jnp.int32)
    margin = jnp.full(shape, jnp.inf, dtype)
    for r, delta in enumerate(deltas):
        bit = delta > 0
        if epsilon:
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
    """Which pair a flip mask stands for; 0 for none."""
    return jnp.maximum(31 - jax.lax.clz(flip), 0)
