"""Automaton rows packed into 32-cell words."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Shaped, UInt32

import lutjax
from lutjax.models._automaton_wires import NEIGHBORS
from lutjax.values import Array


def pack_bits(bits: Bool[Array, "*rows width"]) -> UInt32[jax.Array, "*rows words"]:
    """Pack bits: bit j of word w is column ``32 w + j``; bits beyond the row are 0."""
    *rows, width = bits.shape
    words = lutjax.pack_bits(jnp.asarray(bits).reshape(math.prod(rows), width))
    return words.reshape(*rows, words.shape[-1])


def unpack_bits(
    words: UInt32[Array, "*rows words"], width: int
) -> Bool[jax.Array, "*rows {width}"]:
    """Unpack words; see `pack_bits`."""
    *rows, across = words.shape
    return lutjax.unpack_bits(words.reshape(math.prod(rows), across), width).reshape(*rows, width)


def shift_words(
    words: Shaped[Array, "channels batch height words"], width: int, *, periodic: bool
) -> list[jax.Array]:
    """Return the eight neighbors of every cell, in the order of `NEIGHBORS`; see `pack_bits`."""
    words = jnp.asarray(words)
    edge = jnp.zeros_like(words[..., :1])
    before = jnp.concatenate([edge, words[..., :-1]], -1)
    after = jnp.concatenate([words[..., 1:], edge], -1)
    # Columns of a word are its bits from the lowest: a shift to the left brings the left neighbor.
    left, right = words << 1 | before >> 31, words >> 1 | after << 31
    if periodic:
        last = (width - 1) % 32
        left = left.at[..., 0].set(left[..., 0] | words[..., -1] >> last & 1)
        right = right.at[..., -1].set(right[..., -1] | (words[..., 0] & 1) << last)
    rows = []
    for a in (left, words, right):
        outer = ((0, 0), (0, 0), (1, 1), (0, 0))
        rows.append(jnp.pad(a, outer, mode="wrap" if periodic else "constant"))
    height = words.shape[2]
    return [rows[x][:, :, y : y + height] for y, x in NEIGHBORS]
