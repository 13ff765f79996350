"""Row ids of token n-grams: a uint32 hash with identical results in NumPy, JAX and all devices."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int, Integer

from lutjax._typing import Array
from lutjax.arguments import format_value, require_array

MOST_ORDER, MOST_HEADS = 1 << 8, 1 << 12

_GOLDEN = 0x9E3779B9
_MASK = 0xFFFFFFFF


def ngram_rows(
    tokens: Integer[Array, "*batch length"],
    *,
    rows: int,
    orders: Sequence[int] = (2, 3),
    heads: int = 4,
    seed: int = 0,
    segments: Integer[Array, "*#batch length"] | None = None,
) -> Int[Array, "*batch length tables"]:
    """Return the rows addressed by the n-grams that end at each token, several for each order.

    Rows depend only on tokens, so they are known before a model runs and can be prefetched or
    counted. The hash is multiplicative: each token of an n-gram is multiplied by its own constant,
    the products are joined by exclusive or, and a 32-bit bijection mixes the result. Tables may
    therefore have any number of rows, prime or not. All arithmetic is 32-bit integer arithmetic,
    with the same result in NumPy and JAX, on every device and in every version.

    Definition, for one sequence; numbers are unsigned 32-bit integers, and arithmetic is modulo
    ``2**32``::


        def mix(h):  # the finaliser of MurmurHash3
            h = (h ^ (h >> 16)) * 0x85EBCA6B
            h = (h ^ (h >> 13)) * 0xC2B2AE35
            return h ^ (h >> 16)

        def multiplier(order, head, j):
            k = (order * 2**12 + head) * 2**8 + j
            return mix(mix(seed + 0x9E3779B9) + k * 0x9E3779B9) | 1

        for i, order in enumerate(orders):
            for head in range(heads):
                h = 0
                for j in range(order):  # the token j positions before t, if any
                    h ^= (tokens[t - j] + 1) * multiplier(order, head, j)
                index[t, i * heads + head] = mix(h) % rows

    Args:
      tokens: ids ``[..., length]``, taken modulo ``2**32``. NumPy arrays give a NumPy array.
      rows: rows of each table, any number from 1 on.
      orders: lengths of the n-grams; 2 is a token and its predecessor.
      heads: hashes, and therefore tables, for each order.
      seed: seed of the multipliers; different seeds give different hashes.
      segments: ids ``[..., length]``: an n-gram contains only consecutive tokens of the same
        segment, as if the segment had no predecessor. None: one segment.

    Returns:
      int32 ``[..., length, len(orders) * heads]``, from 0 to ``rows - 1``; the heads of the first
      order come first.

    Raises:
      ValueError, TypeError: a size is impossible, or tokens are not an integer array.

    Source: docs/semantics.md, section 14.

    Published: Cheng et al., Conditional Memory via Scalable Lookup, 2026 (Engram): multiplicative
    hashes joined by exclusive or, several for each order; its tables have prime sizes instead of
    the mixing.

    Example:
      >>> import numpy as np, lutjax
      >>> lutjax.ngram_rows(np.array([5, 7, 5, 7]), rows=1000, orders=(2,), heads=2)
      array([[119, 736],
             [941, 767],
             [172, 872],
             [941, 767]], dtype=int32)
    """
    check_hashes("ngram_rows", rows=rows, orders=orders, heads=heads, seed=seed)
    require_array("ngram_rows", "tokens", tokens)
    if not jnp.issubdtype(tokens.dtype, jnp.integer) or not tokens.ndim:
        raise TypeError(
            f"ngram_rows: tokens is {format_value(tokens)}; expected integer ids [..., length]."
        )
    if segments is not None:
        require_array("ngram_rows", "segments", segments)
        is_integer = jnp.issubdtype(segments.dtype, jnp.integer)
        if not is_integer or segments.shape[-1:] != tokens.shape[-1:]:
            raise ValueError(
                f"ngram_rows: segments is {format_value(segments)} "
                f"and tokens {format_value(tokens)}; expected integer ids, one for each token."
            )
    arrays = (tokens,) if segments is None else (tokens, segments)
    xp: Any = np if all(isinstance(a, np.ndarray) for a in arrays) else jnp
    ids = None if segments is None else xp.asarray(segments)
    place = segment_positions(xp, ids, tokens.shape[-1])
    return rows_at(xp, xp.asarray(tokens), place, rows=rows, orders=orders, heads=heads, seed=seed)


def rows_at(
    xp: Any, tokens: Any, place: Any, *, rows: int, orders: Sequence[int], heads: int, seed: int
) -> Any:
    """Return rows as `ngram_rows` does, for tokens with known positions in their runs.

    Args:
      xp: `numpy` or `jax.numpy`.
      tokens: ids ``[..., length]``.
      place: number of preceding tokens available to each n-gram, int32 ``[..., length]``.
    """
    # Plus one: the hash of a missing token is 0, and token 0 must differ from it.
    length, unsigned = tokens.shape[-1], tokens.astype(np.uint32) + np.uint32(1)
    place = xp.broadcast_to(place, tokens.shape)
    rows_by_order = []
    for order in orders:
        earlier = []
        for j in range(order):
            shifted = unsigned
            if j:
                lead = [(0, 0)] * (tokens.ndim - 1)
                shifted = xp.pad(unsigned, [*lead, (j, 0)])[..., :length]
                shifted = xp.where(place >= j, shifted, xp.zeros_like(shifted))
            earlier.append(shifted[..., None])
        # One array for all heads of an order keeps the program size independent of the head count.
        each = np.array(
            [[multiplier(order, head, j, seed) for head in range(heads)] for j in range(order)]
        )
        each = each.astype(np.uint32).reshape(order, *(1,) * tokens.ndim, heads)
        h = earlier[0] * each[0]
        for j in range(1, order):
            h = h ^ (earlier[j] * each[j])
        rows_by_order.append(xp.remainder(_mix_elements(h), np.uint32(rows)).astype(np.int32))
    return xp.concatenate(rows_by_order, -1)


def segment_positions(xp: Any, segments: Any, length: int) -> Any:
    """Return the number of preceding tokens in the same segment, int32 ``[..., length]``."""
    at = xp.arange(length, dtype=np.int32)
    if segments is None:
        return at
    at = xp.broadcast_to(at, segments.shape)
    if length == 0:
        return segments.astype(np.int32)
    lead = [(0, 0)] * (segments.ndim - 1)
    begins = xp.pad(segments[..., 1:] != segments[..., :-1], [*lead, (1, 0)], constant_values=True)
    # A running maximum carries the start of a segment to all of its tokens.
    first = xp.where(begins, at, xp.zeros_like(at))
    if xp is np:
        return at - np.maximum.accumulate(first, -1)
    return at - jax.lax.cummax(first, axis=first.ndim - 1)


def multiplier(order: int, head: int, j: int, seed: int) -> int:
    """Return the odd multiplier of the token `j` positions before the last one."""
    number = (order * MOST_HEADS + head) * MOST_ORDER + j
    return _mix((_mix((seed + _GOLDEN) & _MASK) + number * _GOLDEN) & _MASK) | 1


def _mix(h: int) -> int:
    # The finalizer of MurmurHash3, a bijection of uint32.
    h = ((h ^ (h >> 16)) * 0x85EBCA6B) & _MASK
    h = ((h ^ (h >> 13)) * 0xC2B2AE35) & _MASK
    return h ^ (h >> 16)


def _mix_elements(h: Any) -> Any:
    """Apply `_mix` to each element of a uint32 array."""
    h = (h ^ (h >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    h = (h ^ (h >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return h ^ (h >> np.uint32(16))


def check_hashes(where: str, *, rows: Any, orders: Any, heads: Any, seed: Any) -> None:
    """Raise ValueError if the hash arguments are invalid."""

    def require(name: str, value: Any, least: int, most: int) -> None:
        whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
        if not whole or not least <= value <= most:
            raise ValueError(
                f"{where}: {name} is {format_value(value)}; "
                f"it must be a whole number from {least} to {most}."
            )

    require("rows", rows, 1, 2**31 - 1)
    require("heads", heads, 1, MOST_HEADS)
    require("seed", seed, 0, _MASK)
    if not isinstance(orders, Sequence) or not len(orders) or len(set(orders)) != len(orders):
        raise ValueError(
            f"{where}: orders is {format_value(orders)}; "
            "expected different lengths of n-grams, as in (2, 3)."
        )
    for order in orders:
        whole = isinstance(order, int | np.integer) and not isinstance(order, bool)
        if not whole or not 1 <= order < MOST_ORDER:
            raise ValueError(
                f"{where}: orders is {format_value(orders)}; "
                f"lengths are whole numbers from 1 to {MOST_ORDER - 1}."
            )
