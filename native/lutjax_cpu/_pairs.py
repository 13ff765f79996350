"""Arrays and options of both attentions, as their kernels get and return them."""

from typing import Any

import jax
import jax.numpy as jnp

from lutjax._compat import zeros_varying
from lutjax._fixed_point import FixedPoint, addend_dtype
from lutjax.ops.lookup_attention import LookupAttention
from lutjax.ops.lut_pair_attention import LutPairAttention

WEIGHTS = 3
"""Number of the tables among the arrays of a kernel, behind `places`."""

_EVERY = 2**40  # a window that all pairs are in


def without_table(arrays: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """Return the arrays of a kernel without the tables, which an update in their own memory is given once."""
    return *arrays[:WEIGHTS], *arrays[WEIGHTS + 1 :]


def places(call: LookupAttention | LutPairAttention) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the start and the segments of queries and keys; empty ones where there are none."""
    like = call.query_places
    none = zeros_varying(like, (0, 0), jnp.int32)
    start = zeros_varying(like, (), jnp.int32) if call.start is None else call.start
    of_queries = none if call.query_segments is None else call.query_segments
    of_keys = none if call.key_segments is None else call.key_segments
    return start, of_queries, of_keys


def options(call: LookupAttention | LutPairAttention) -> tuple[int, int, int]:
    """Return the window, whether there are segments, and whether sums are of integers."""
    window = _EVERY if call.window is None else call.window
    return window, call.query_segments is not None, call.accumulate is not None


def numbers(accumulate: FixedPoint | None) -> tuple[float, ...]:
    """Return the scale of addends."""
    return () if accumulate is None else (accumulate.scale,)


def sums(shape: tuple[int, ...], accumulate: FixedPoint | None) -> jax.ShapeDtypeStruct:
    """Return an outline of sums of addends."""
    return jax.ShapeDtypeStruct(shape, addend_dtype(jnp.float32, accumulate))


def in_float32(cotangent: Any) -> jax.Array:
    """Return the cotangent of an output, as kernels read it."""
    result: jax.Array = cotangent.astype(jnp.float32)
    return result
