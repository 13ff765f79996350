"""`lutjax.packed_lut` in plain JAX."""

import jax
import jax.numpy as jnp

from lutjax.kernels._xla import _wires
from lutjax.kernels.registry import Device


def forward(words: jax.Array, truth: jax.Array, wires: jax.Array, *, device: Device) -> jax.Array:
    """Each table as its polynomial over bits: exclusive or of ands, ``m0 ^ a & (m1 ^ b & m3) ^ b & m2`` for two."""
    masks = list(jnp.where(truth.T, jnp.uint32(0xFFFFFFFF), jnp.uint32(0)))
    for place in range(wires.shape[1]):
        masks = [m if not k >> place & 1 else m ^ masks[k ^ 1 << place] for k, m in enumerate(masks)]
    terms = [m[:, None] for m in masks]
    for read in _wires.rows(words, wires, words.dtype):
        terms = [low ^ (read & high) for low, high in zip(terms[::2], terms[1::2], strict=True)]
    return terms[0]
