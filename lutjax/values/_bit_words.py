"""`lutjax.pack_bits` and `lutjax.unpack_bits` in plain JAX.

Bit ``j`` of word ``w`` is sample ``32 w + j``.
"""

import functools

import jax
import jax.numpy as jnp


@jax.jit
def pack(bits: jax.Array) -> jax.Array:
    """Pack ``[F, B]`` of any dtype into uint32 ``[F, ceil(B / 32)]``."""
    bits = jnp.pad(jnp.asarray(bits).astype(bool), ((0, 0), (0, -bits.shape[1] % 32)))
    bits = bits.reshape(bits.shape[0], bits.shape[1] // 32, 32).astype(jnp.uint32)
    return jnp.sum(bits << _bit_shifts(), -1, dtype=jnp.uint32)


@functools.partial(jax.jit, static_argnums=1)
def unpack(words: jax.Array, n_samples: int) -> jax.Array:
    """Unpack uint32 ``[F, W]`` into bool ``[F, n_samples]``."""
    bits = jnp.asarray(words)[..., None] >> _bit_shifts() & 1
    return bits.reshape(words.shape[0], 32 * words.shape[1])[:, :n_samples] != 0


def _bit_shifts() -> jax.Array:
    return jnp.arange(32, dtype=jnp.uint32)[None, None]
