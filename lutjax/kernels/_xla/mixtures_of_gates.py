"""`lutjax.gate_coefficients` in plain JAX: ``softmax(logits) @ GATES``, or the row of the largest logit."""

import jax
import jax.numpy as jnp
import numpy as np

from lutjax._dtypes import accumulator

_ANSWERS = np.arange(16)[:, None] >> np.array([3, 2, 1, 0]) & 1  # of each gate to ab = 00, 01, 10, 11
GATES = np.stack(
    [
        _ANSWERS[:, 0],
        _ANSWERS[:, 2] - _ANSWERS[:, 0],
        _ANSWERS[:, 1] - _ANSWERS[:, 0],
        _ANSWERS[:, 3] - _ANSWERS[:, 2] - _ANSWERS[:, 1] + _ANSWERS[:, 0],
    ],
    -1,
).astype(np.float32)
"""Coefficients of 1, a, b and ab of the sixteen gates, ``[16, 4]``."""


def coefficients(logits: jax.Array, *, hard: bool, axis: int) -> jax.Array:
    """``[G, 16]`` (or ``[16, G]``, `axis` 0) -> ``[4, G]``."""
    logits = logits.astype(accumulator(logits.dtype))
    if hard:
        share = jax.nn.one_hot(jnp.argmax(logits, axis), 16, axis=axis, dtype=logits.dtype)
    else:
        share = jax.nn.softmax(logits, axis)
    return jnp.einsum(
        "gk,kc->cg" if axis else "kg,kc->cg",
        share,
        GATES.astype(share.dtype),
        precision=None if hard else "highest",
    )
