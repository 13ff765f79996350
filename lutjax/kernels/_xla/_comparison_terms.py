"""Comparisons of `lutjax.lut_pair_attention` as sums of one term per position.

Formula for comparison ``c`` of detector ``t`` with ends ``a, b`` and ``z = [key, query,
position]``::

    delta[c, t] = z[a] - z[b] = key_term[c, t, i] + query_term[c, t, j] + position_term[c, t, d]

Each end lies in one part of ``z``, so at most two terms are not zero, and the sum is exact: it
equals the difference of the two values. Terms are computed once per position and added for every
pair.

Layout: terms are ``[C, T, ...positions]``, so that a tile of pairs reads contiguous positions.

Numerics: terms use the accumulator dtype. Ids of ends are clamped.
"""

import math

import jax
import jax.numpy as jnp

from lutjax._compat import zeros_varying
from lutjax.kernels._xla import _row_gathers
from lutjax.ops.lut_pair_attention import LutPairAttention
from lutjax.values._dtypes import accumulator


class Terms:
    """Comparison terms of keys, queries and positions, ``[C, T, ...positions]``."""

    def __init__(self, call: LutPairAttention):
        x, positions = call.x, call.positions
        self._n_inputs = n_inputs = x.shape[-1]
        n_bits = 0 if positions is None else positions.shape[-1]
        # Clamp in the concatenated inputs, before splitting an id into part and position.
        ids = jnp.clip(call.anchors, 0, 2 * n_inputs + n_bits - 1).transpose(2, 1, 0)  # [end, C, T]
        if call.interleave:
            self._part, self._id = ids % 3, ids // 3
        else:
            # Positions may have more values than inputs: every id after the queries belongs to part
            # 2.
            self._part = jnp.minimum(ids // max(n_inputs, 1), 2)
            self._id = ids - self._part * n_inputs
        dtype = accumulator(*(a.dtype for a in (x, positions) if a is not None))
        self.key = self._input_terms(call.keys.astype(dtype), 0)
        self.query = self._input_terms(x.astype(dtype), 1)
        self.position = None
        if positions is not None:
            self._positions_shape = positions.shape
            self.position = self._position_terms(positions.astype(dtype))

    def compared_parts(self) -> jax.Array:
        """Return the parts that each comparison reads, ``[C, T]``.

        Bits: 1 for keys, 2 for queries, 4 for positions.
        """
        return (1 << self._part[0]) | (1 << self._part[1])

    def to_x(self, total: jax.Array, part: int) -> jax.Array:
        """Return the input cotangent ``[B, L, I]`` from term cotangents ``[C, T, B, L]``."""
        flat = total.reshape(*total.shape[:2], math.prod(total.shape[2:]))
        # One extra row for ends in other parts.
        dx = zeros_varying(total, (self._n_inputs + 1, flat.shape[-1]), total.dtype)
        for end, sign in ((0, flat), (1, -flat)):
            at = jnp.where(self._part[end] == part, self._id[end], self._n_inputs)
            dx = _row_gathers.add(dx, (at,), sign)
        return jnp.moveaxis(dx[:-1].reshape(self._n_inputs, *total.shape[2:]), 0, -1)

    def to_positions(self, total: jax.Array) -> jax.Array:
        """Return the position cotangent ``[distances, T or 1, N]`` from ``[C, T, distances]``."""
        n_distances, n_detectors, n_bits = self._positions_shape
        dp = zeros_varying(total, (n_detectors, n_bits + 1, n_distances), total.dtype)
        detector = self._position_detector(total.shape[1])
        # As above, one row more for ends in other parts.
        for end, sign in ((0, total), (1, -total)):
            at = jnp.where(self._part[end] == 2, self._id[end], n_bits)
            dp = _row_gathers.add(dp, (detector, at), sign)
        return dp[:, :-1].transpose(2, 0, 1)

    def _input_terms(self, values: jax.Array, part: int) -> jax.Array:
        by_input = jnp.moveaxis(values, -1, 0)
        n_inputs = self._n_inputs

        def end(e: int) -> jax.Array:
            # Ids of other parts are read too, and masked: clamping keeps them in bounds.
            ids = jnp.clip(self._id[e], 0, n_inputs - 1)
            of = _row_gathers.read(by_input, ids)
            return jnp.where((self._part[e] == part)[..., None, None], of, 0)

        return end(0) - end(1)

    def _position_terms(self, values: jax.Array) -> jax.Array:
        n_bits = values.shape[-1]
        by_bit = values.transpose(1, 2, 0)  # [T or 1, N, distances]
        detector = self._position_detector(self._id.shape[-1])

        def end(e: int) -> jax.Array:
            # An empty array cannot be read, not even with clamped ids.
            if n_bits == 0:
                return jnp.zeros((*self._id.shape[1:], values.shape[0]), values.dtype)
            ids = jnp.clip(self._id[e], 0, n_bits - 1)
            of = _row_gathers.read(by_bit, detector, ids)
            return jnp.where((self._part[e] == 2)[..., None], of, 0)

        return end(0) - end(1)

    def _position_detector(self, n_detectors: int) -> jax.Array:
        """Return the position row for each detector, ``[1, T]``."""
        at = jnp.arange(n_detectors, dtype=jnp.int32)[None]
        # Positions shared by all detectors have one entry; their cotangents add up there.
        return at if self._positions_shape[1] > 1 else jnp.zeros_like(at)
