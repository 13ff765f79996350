"""Ids and positions as saturating int32, and one-time checks of concrete ids.

Values beyond the int32 range saturate, because wrapped values would be other valid ids.
"""

import contextlib
import weakref
from collections.abc import Callable, Hashable, Iterator
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_INT32 = np.iinfo(np.int32)
_FARTHEST = 2**30  # sums of two of these fit int32


_checked: dict[int, tuple[weakref.ref[Any], set[Hashable]]] = {}


def is_concrete(a: Any) -> bool:
    """Return True if the array is not traced and fully addressable by this process."""
    if isinstance(a, jax.core.Tracer):
        return False
    return isinstance(a, np.ndarray) or (isinstance(a, jax.Array) and a.is_fully_addressable)


def check_once(ids: Any, rule: Hashable, check: Callable[[], None]) -> None:
    """Run a check of ids, only once per JAX array and hashable rule: an array is immutable."""
    # Keyed by `id`, because arrays have no hash. The weak reference tells the array from a later
    # one at the same address, and keeps no array alive.
    key = id(ids)
    entry = _checked.get(key)
    if entry is not None and entry[0]() is ids and rule in entry[1]:
        return
    if not is_concrete(ids):
        return
    check()
    if isinstance(ids, np.ndarray):  # mutable, may change between two calls
        return
    if entry is None or entry[0]() is not ids:
        entry = weakref.ref(ids, lambda gone: _forget(key, gone)), set()
        _checked[key] = entry
    entry[1].add(rule)


_trusted: ContextVar[bool] = ContextVar("lutjax_trusted_ids", default=False)


@contextlib.contextmanager
def trusted_ids() -> Iterator[None]:
    """Let ops skip the checks of ids derived from checked ids.

    Such arrays are new in every call, so each check would wait for the device.
    """
    token = _trusted.set(True)
    try:
        yield
    finally:
        _trusted.reset(token)


def are_trusted() -> bool:
    """Return True if ops skip the checks of ids in this context."""
    return _trusted.get()


def _forget(key: int, gone: Any) -> None:
    entry = _checked.get(key)
    # A new array may have the address already: its entry stays.
    if entry is not None and entry[0] is gone:
        _checked.pop(key, None)


def as_jax(a: Any) -> jax.Array:
    """Return an array as a JAX array, without a copy if it is one."""
    return a if isinstance(a, jax.Array) else jnp.asarray(a)


def as_int32(ids: Any) -> jax.Array:
    """Return integers of any dtype as int32, with saturation."""
    if ids.dtype == np.int32:
        return as_jax(ids)
    own = np.iinfo(ids.dtype)
    low, high = max(own.min, _INT32.min), min(own.max, _INT32.max)
    # Saturate in NumPy first: the conversion to a JAX array would wrap.
    clip = np.clip if isinstance(ids, np.ndarray | np.generic) else jnp.clip
    return jnp.asarray(clip(ids, ids.dtype.type(low), ids.dtype.type(high)).astype(np.int32))


def is_known(position: Any) -> bool:
    """Return True if a position is a concrete number."""
    return isinstance(position, int | np.integer)


def difference(a: Any, b: Any) -> jax.Array | None:
    """Return ``a - b`` as int32, at most 2**30 in magnitude; None where it is known to be 0."""
    if is_known(a) and is_known(b):
        exact = int(a) - int(b)
        return jnp.asarray(min(max(exact, -_FARTHEST), _FARTHEST), jnp.int32) if exact else None
    a, b = (
        jnp.int32(min(max(int(p), _INT32.min), _INT32.max)) if is_known(p) else as_int32(p)
        for p in (a, b)
    )
    # Halves cannot overflow; for distant positions the exact difference does not matter.
    half = (a >> 1) - (b >> 1)
    near = jnp.abs(half) < _FARTHEST // 2
    return jnp.where(
        near, jnp.where(near, a, 0) - jnp.where(near, b, 0), jnp.sign(half) * _FARTHEST
    )
