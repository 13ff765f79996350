"""`lutjax.gate_coefficients` in plain JAX.

Returns ``softmax(logits) @ GATES``, or the row of the largest logit.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lutjax.values._dtypes import accumulator

_ANSWERS = np.arange(16)[:, None] >> np.array([3, 2, 1, 0]) & 1  # for ab = 00, 01, 10, 11
GATES = np.stack(
    [
        _ANSWERS[:, 0],
        _ANSWERS[:, 2] - _ANSWERS[:, 0],
        _ANSWERS[:, 1] - _ANSWERS[:, 0],
        _ANSWERS[:, 3] - _ANSWERS[:, 2] - _ANSWERS[:, 1] + _ANSWERS[:, 0],
    ],
    -1,
).astype(np.float32)
"""Coefficients of 1, a, b and ab for the sixteen gates, ``[16, 4]``."""


# One dispatch outside of jit, not one per operation. Inlined, other programs fuse it.
@functools.partial(jax.jit, static_argnames=("hard", "axis"), inline=True)
def coefficients(logits: jax.Array, *, hard: bool, axis: int) -> jax.Array:
    """Return coefficients ``[4, G]`` for logits ``[G, 16]`` (or ``[16, G]`` with `axis` 0)."""
    logits = logits.astype(accumulator(logits.dtype))
    if hard:
        share = jax.nn.one_hot(jnp.argmax(logits, axis), 16, axis=axis, dtype=logits.dtype)
        return _sums(share, axis, precision=None)
    return _mixtures(logits, axis)


def _sums(share: jax.Array, axis: int, precision: str | None) -> jax.Array:
    of_gates = GATES.astype(share.dtype)
    return jnp.einsum("gk,kc->cg" if axis else "kg,kc->cg", share, of_gates, precision=precision)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _mixtures(logits: jax.Array, axis: int) -> jax.Array:
    return _sums(jax.nn.softmax(logits, axis), axis, precision="highest")


@_mixtures.defjvp
def _mixtures_jvp(axis: int, primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    """Return coefficients ``c`` and their tangents."""
    # The tangents are dc = sum_k p_k dlogit_k (GATES_k - c) with shares p. JAX transposes them to
    # dlogit_k = p_k (sum_j dc_j GATES_kj - sum_j dc_j c_j). Unlike a softmax gradient, this has no
    # sum over the sixteen gates, so a GPU computes it in one pass.
    (logits,), (tangent,) = primals, tangents
    c = _mixtures(logits, axis)
    weighted = jax.nn.softmax(logits, axis) * tangent
    columns = GATES.astype(logits.dtype).T.reshape(4, *((1, 16) if axis else (16, 1)))
    sums = [jnp.sum(weighted * column, axis) for column in columns]
    return c, jnp.stack(sums) - c * jnp.sum(weighted, axis)[None]
