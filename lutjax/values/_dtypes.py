"""Supported dtypes of the ops, and their accumulation dtypes."""

import functools
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from lutjax.names import FLOATS as FLOATS


def holds_all_of(dtype: DTypeLike, other: DTypeLike) -> bool:
    """Return True if a float dtype represents every value of another dtype."""
    wide, narrow = jnp.finfo(dtype), jnp.finfo(other)
    return bool(wide.nmant >= narrow.nmant and wide.maxexp >= narrow.maxexp)


def _accumulator(*dtypes: DTypeLike) -> np.dtype:
    """Return the dtype for comparisons and sums: the widest, and at least float32."""
    widest = max((jnp.dtype(dtype) for dtype in dtypes), key=lambda dtype: dtype.itemsize)
    return jnp.dtype(jnp.float32) if widest.itemsize < 4 else widest


accumulator: Callable[..., np.dtype] = functools.cache(_accumulator)
