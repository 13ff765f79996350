"""Initializers for gates and bit-addressed tables, compatible with `jax.nn.initializers`.

Residual initialization: every gate initially passes on its first input, so deep networks start as
the identity on some inputs. `jax.nn.initializers.normal(1.0)` is the Gaussian initialization.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from lutjax._typing import Array

__all__ = ["residual_gates", "residual_table"]

_FIRST_INPUT = 3  # the gate that passes on its first input


# Initializers are values: equal arguments give equal initializers, and layers can be pickled.
@dataclasses.dataclass(frozen=True)
class Normal:
    """Normal initializer, `jax.nn.initializers.normal`."""

    deviation: float

    def __call__(
        self, key: Array, shape: tuple[int, ...], dtype: DTypeLike = jnp.float32
    ) -> jax.Array:
        init = jax.nn.initializers.normal(self.deviation)
        drawn: jax.Array = init(jnp.asarray(key), shape, dtype)
        return drawn


@dataclasses.dataclass(frozen=True)
class LecunNormal:
    """LeCun normal initializer for matrices, `jax.nn.initializers.lecun_normal`."""

    def __call__(
        self, key: Array, shape: tuple[int, ...], dtype: DTypeLike = jnp.float32
    ) -> jax.Array:
        drawn: jax.Array = jax.nn.initializers.lecun_normal()(jnp.asarray(key), shape, dtype)
        return drawn


@dataclasses.dataclass(frozen=True)
class ResidualGates:
    """Initializer for logits ``[gates, 16]``: see `residual_gates`."""

    logit: float | int

    def __call__(
        self, key: Array, shape: tuple[int, ...], dtype: DTypeLike = jnp.float32
    ) -> jax.Array:
        return jnp.zeros(shape, dtype).at[..., _FIRST_INPUT].set(self.logit)


@dataclasses.dataclass(frozen=True)
class ResidualTable:
    """Initializer for tables ``[gates, 2**inputs]``: see `residual_table`."""

    probability: float | int
    parameterization: str

    def __call__(
        self, key: Array, shape: tuple[int, ...], dtype: DTypeLike = jnp.float32
    ) -> jax.Array:
        p = self.probability
        logit = math.log(p / (1 - p))
        # The negated first input, as -1 or 1, has one Walsh coefficient.
        if self.parameterization == "walsh":
            return jnp.zeros(shape, dtype).at[..., 1].set(logit)
        value = logit if self.parameterization == "light" else 2 * p - 1
        row = np.where(np.arange(shape[-1]) % 2 == 1, value, -value)
        return jnp.broadcast_to(jnp.asarray(row, dtype), shape)


def _probability(where: str, probability: float | int) -> float | int:
    if not 0 < probability < 1:
        raise ValueError(f"{where}: probability is {probability}; it must be between 0 and 1.")
    return probability


def residual_gates(
    probability: float | int = 0.9, *, strength: float | int | None = None
) -> ResidualGates:
    """Return an initializer for logits ``[gates, 16]`` whose gates pass on their first input.

    Args:
      probability: probability of this gate; the other 15 share the remainder.
      strength: its logit instead, with all other logits 0; the published cellular automata use 10.

    Raises:
      ValueError: `probability` is not between 0 and 1.

    Source: docs/logic.md, section 4.

    Example:
      >>> import jax
      >>> from lutjax.layers.initializers import residual_gates
      >>> logits = residual_gates(0.9)(jax.random.key(0), (2, 16))
      >>> round(float(jax.nn.softmax(logits)[0, 3]), 3)
      0.9
    """
    p = _probability("residual_gates", probability)
    return ResidualGates(math.log(15 * p / (1 - p)) if strength is None else strength)


def residual_table(
    probability: float | int = 0.9, parameterization: str = "light"
) -> ResidualTable:
    """Return an initializer for tables ``[gates, 2**inputs]`` whose output is the first input.

    Args:
      probability: value of corners that are 1 in the hard table; its complement elsewhere.
      parameterization: meaning of the trained values: ``"light"``, ``"walsh"`` or ``"raw"``, as in
        `lutjax.layers.nnx.SoftLUT`.

    Raises:
      ValueError: `probability` is not between 0 and 1, or `parameterization` is unknown.

    Source: docs/logic.md, sections 3 and 4.

    Example:
      >>> import jax
      >>> from lutjax.layers.initializers import residual_table
      >>> print(jax.nn.sigmoid(residual_table(0.9)(jax.random.key(0), (1, 4))))
      [[0.1 0.9 0.1 0.9]]
    """
    p = _probability("residual_table", probability)
    if parameterization not in ("light", "walsh", "raw"):
        raise ValueError(
            f"residual_table: parameterization is {parameterization!r}; "
            "expected 'light', 'walsh' or 'raw'."
        )
    return ResidualTable(p, parameterization)
