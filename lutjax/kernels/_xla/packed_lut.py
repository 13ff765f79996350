"""`lutjax.packed_lut` in plain JAX.

Formula: each table is a polynomial over GF(2) in its input bits, for two bits ``y = m0 ^ a & m1 ^ b
& m2 ^ a & b & m3`` with words ``a, b`` of 32 samples and masks ``m`` of all or no bits.

Work: `masks` derives the coefficients from the truth table once; `value` evaluates them in Horner
form, ``2**n - 1`` ands and exclusive ors per word for 32 samples. Layout: features first,
``[features, words]``. Exact; wire ids are clamped.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from lutjax.dispatch.registry import Device
from lutjax.kernels._xla import _wire_gathers
from lutjax.ops.packed_lut import PackedLut


def forward(call: PackedLut, *, device: Device) -> jax.Array:
    read = _wire_gathers.rows(call.words, call.wires, call.words.dtype)
    return value([m[:, None] for m in masks(call.truth)], read)


def masks(truth: jax.Array) -> list[jax.Array]:
    """Return polynomial coefficients, ``2**n`` times uint32 ``[G]``, all bits set or none."""
    terms = list(jnp.where(truth.T, jnp.uint32(0xFFFFFFFF), jnp.uint32(0)))
    place = 1
    while place < len(terms):
        # The Moebius transform, one input per round: exclusive or over all subsets of the set bits.
        terms = [m if not k & place else m ^ terms[k ^ place] for k, m in enumerate(terms)]
        place *= 2
    return terms


def value(masks: Sequence[jax.Array], read: Sequence[jax.Array]) -> jax.Array:
    """Evaluate the polynomial: ``m0 ^ a & (m1 ^ b & m3) ^ b & m2`` for two bits, regrouped."""
    terms = list(masks)
    for a in read:
        # The first wire is the lowest bit, so neighbors differ in it; each round halves the list.
        terms = [low ^ (a & high) for low, high in zip(terms[::2], terms[1::2], strict=True)]
    return terms[0]
