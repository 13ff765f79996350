"""Multilinear interpolation of lookup tables over bits.

Formula for one gate with slots ``s`` and inputs ``x_l``, bit ``l`` of ``s`` the l-th least
significant::

    share[s] = product over l of (x_l if bit l of s else 1 - x_l)
    value = sum over s of table[s] * share[s]
    slopes[l] = d value / d x_l
    of_table[s] = sum over samples of dy * share[s]

Work: the `_LOW_BITS` low bits (at most 16 slots) are written out as a tree of ``s + a (t - s)``; a
loop visits the values of the high bits. No array has an axis of slots and of samples, and the
program size does not grow with ``2**n``.

Layout: features first, ``[G, B]``; XLA fuses the tree of a gate into one pass over its samples.

Numerics: the dtype of the arguments, which kernels choose as accumulator. Sums over high bits are
in ascending order. Boolean inputs select the slot exactly, with no product.
"""

import jax
import jax.numpy as jnp
import numpy as np

from lutjax.kernels._xla import _wire_gathers

# Four bits are 15 interpolations in one fusion; each further bit doubles them.
_LOW_BITS = 4


def value(table: jax.Array, x: list[jax.Array]) -> jax.Array:
    """Interpolate tables: ``[G, 2**n]``, n times ``[G, B]`` -> ``[G, B]``."""
    low, high = x[:_LOW_BITS], x[_LOW_BITS:]
    if not high:
        return _interpolate_slots(list(table.T[..., None]), low)

    def add(y: jax.Array, xs: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        bits, slots = xs
        # XLA drops the unused derivatives.
        share, _ = _shares(bits, high)
        return y + share * _interpolate_slots(list(slots[..., None]), low), None

    return jax.lax.scan(add, jnp.zeros_like(x[0]), _split_high_bits(table, len(high)))[0]


def slopes(table: jax.Array, x: list[jax.Array]) -> list[jax.Array]:
    """Return the derivatives of `value` with respect to `x`."""
    low, high = x[:_LOW_BITS], x[_LOW_BITS:]
    if not high:
        return _slopes(list(table.T[..., None]), low)[1]

    def add(
        totals: list[jax.Array], xs: tuple[jax.Array, jax.Array]
    ) -> tuple[list[jax.Array], None]:
        bits, slots = xs
        share, of_each = _shares(bits, high)
        y, of_low = _slopes(list(slots[..., None]), low)
        # Product rule: a low bit changes the interpolation, a high bit changes the share.
        addends = [*(share * s for s in of_low), *(s * y for s in of_each)]
        return [t + a for t, a in zip(totals, addends, strict=True)], None

    return jax.lax.scan(add, [jnp.zeros_like(a) for a in x], _split_high_bits(table, len(high)))[0]


def table_cotangent(n_slots: int, x: list[jax.Array], dy: jax.Array) -> jax.Array:
    """Return the table cotangent, ``[G, 2**n]``: dy times the share, summed over samples.

    For boolean `x` the addressed slot receives dy, and every other slot 0, even if dy is infinite.
    """
    low, high = x[:_LOW_BITS], x[_LOW_BITS:]

    def sums(weight: jax.Array) -> jax.Array:
        shares = [weight]
        for a in reversed(low):  # the first is the least significant bit
            shares = [s for share in shares for s in _split_share(share, a)]
        # All slots of the low bits are reduced in one pass over the samples.
        return _wire_gathers.sum_over_samples(shares)

    if not high:
        return sums(dy).T

    def slot_sums(bits: jax.Array) -> jax.Array:
        # Booleans are selected, not multiplied: 0 times an infinite dy would be NaN.
        if high[0].dtype != jnp.bool_:
            return sums(dy * _shares(bits, high)[0])
        weight = dy
        for b, a in zip(bits, high, strict=True):
            weight = jnp.where(a == (b > 0), weight, jnp.zeros_like(weight))
        return sums(weight)

    by_value = jax.lax.map(slot_sums, _bits(jnp.arange(n_slots >> len(low)), len(high), dy.dtype))
    return by_value.reshape(n_slots, dy.shape[0]).T


def _split_share(share: jax.Array, a: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Split a share between slots with next bit 0 and 1."""
    if a.dtype == jnp.bool_:
        return jnp.where(a, jnp.zeros_like(share), share), jnp.where(
            a, share, jnp.zeros_like(share)
        )
    return share * (1 - a), share * a


def slopes_at_addresses(table: jax.Array) -> jax.Array:
    """Return the wire cotangents of `lutjax.binary_lut` per address, for a unit output cotangent.

    ``[G, 2**n]`` -> ``[G * n, 2**n]``.
    """
    n_slots = table.shape[1]
    n = n_slots.bit_length() - 1
    place, slot = np.arange(n), np.arange(n_slots)
    # [slot, address, place]: a slot differs from the address in some bits.
    factors = np.where((slot[:, None] ^ slot)[..., None] >> place & 1, 0.25, 0.75)
    sign = np.where(slot[:, None] >> place & 1, 0.5, -0.5)[:, None]
    weight = sign * np.prod(factors, -1, keepdims=True) / factors
    # Weights depend only on the number of bits: a NumPy constant, and one matrix product for all
    # tables.
    matrix = jnp.asarray(np.swapaxes(weight, 1, 2).reshape(n_slots, n * n_slots), table.dtype)
    return jnp.dot(table, matrix, precision="highest").reshape(len(table) * n, n_slots)


def _interpolate_slots(slots: list[jax.Array], x: list[jax.Array]) -> jax.Array:
    for a in x:
        slots = [s + a * (t - s) for s, t in zip(slots[::2], slots[1::2], strict=True)]
    return slots[0]


def _slopes(slots: list[jax.Array], x: list[jax.Array]) -> tuple[jax.Array, list[jax.Array]]:
    """Return the value and its derivatives."""
    derivatives = []
    for place, a in enumerate(x):
        difference = [t - s for s, t in zip(slots[::2], slots[1::2], strict=True)]
        # The derivative in this bit is the interpolation of its differences over the remaining
        # bits; slots are reduced on the way, so the value costs nothing extra.
        derivatives.append(_interpolate_slots(difference, x[place + 1 :]))
        slots = [s + a * d for s, d in zip(slots[::2], difference, strict=True)]
    return slots[0], derivatives


def _bits(values: jax.Array, n: int, dtype: jnp.dtype) -> jax.Array:
    """Return the bits of values, ``[values, n]``, least significant first."""
    return (values[:, None] >> jnp.arange(n)[None] & 1).astype(dtype)


def _split_high_bits(table: jax.Array, n_high: int) -> tuple[jax.Array, jax.Array]:
    """Return high bits ``[2**n_high, n_high]``, and their slots ``[2**n_high, 2**n_low, G]``."""
    values = jnp.arange(2**n_high)
    n_gates, n_slots = table.shape
    return _bits(values, n_high, table.dtype), table.T.reshape(
        2**n_high, n_slots >> n_high, n_gates
    )


def _shares(bits: jax.Array, x: list[jax.Array]) -> tuple[jax.Array, list[jax.Array]]:
    """Return the share for high bits ``[n]``, and its derivatives with respect to `x`."""
    factors = [1 - b + (2 * b - 1) * a for b, a in zip(bits, x, strict=True)]
    share = jnp.ones_like(x[0])
    for f in factors:
        share = share * f
    derivatives = []
    for place, b in enumerate(bits):
        derivative = jnp.full_like(x[0], 2 * b - 1)
        # Products without one factor, not a division by it, which may be 0.
        for f in factors[:place] + factors[place + 1 :]:
            derivative = derivative * f
        derivatives.append(derivative)
    return share, derivatives
