"""`lutjax.packed_lut` in plain JAX: each table as a polynomial over bits, exclusive or of ands of words."""

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
    """Each table's polynomial over bits, ``2**n`` times uint32 ``[G]``: of every term all bits, or none."""
    terms = list(jnp.where(truth.T, jnp.uint32(0xFFFFFFFF), jnp.uint32(0)))
    place = 1
    while place < len(terms):
        terms = [m if not k & place else m ^ terms[k ^ place] for k, m in enumerate(terms)]
        place *= 2
    return terms


def value(masks: Sequence[jax.Array], read: Sequence[jax.Array]) -> jax.Array:
    """The polynomial: exclusive or of ands, ``m0 ^ a & (m1 ^ b & m3) ^ b & m2`` for two bits."""
    terms = list(masks)
    for a in read:
        terms = [low ^ (a & high) for low, high in zip(terms[::2], terms[1::2], strict=True)]
    return terms[0]
