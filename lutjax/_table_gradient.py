"""The gradient of a table in factors: what was looked up, and the cotangent of what came out."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class TableGradient:
    """The gradient of one table, as the look-up that it had: row and cotangent instead of an array of its shape.

    Made by `lutjax.training.tables.value_and_grad`, applied by `lutjax.update_table`. A pytree of arrays.

    Attributes:
      op: the look-up, e.g. ``"lookup"``.
      arguments: its arguments without the table; detections or what they are made of, ``[..., T]``.
      cotangent: of its output, ``[..., O]``: ``dy``.
      factor: the product of the factors of `lutjax.scale_gradient` on the way to the table, or None.
      after: a scalar without meaning, known when the backward pass has read the table.
      options: static options of the look-up.
      shape, dtype: of the table. axes: mesh axes over which it is sharded, inside a `jax.shard_map`.

    Source: docs/semantics.md, section 8.
    """

    op: str
    arguments: tuple[Any, ...]
    cotangent: Any  # an array, or whatever jax makes of the leaves of a pytree
    factor: Any
    after: Any
    options: tuple[tuple[str, Any], ...]
    shape: tuple[int, ...]
    dtype: np.dtype
    axes: frozenset[str] = frozenset()

    def to_dense(self) -> jax.Array:
        """The same gradient as an array of the table's shape: what `jax.grad` returns. For checks."""
        from lutjax.ops.update_table import dense

        return dense(self)

    def scaled(self, factor: Any) -> "TableGradient":
        """The gradient times a number."""
        return dataclasses.replace(
            self, factor=jnp.asarray(factor) if self.factor is None else self.factor * factor
        )

    @property
    def nbytes(self) -> int:
        """Bytes of the factors."""
        return sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(self))


jax.tree_util.register_dataclass(
    TableGradient,
    data_fields=["arguments", "cotangent", "factor", "after"],
    meta_fields=["op", "options", "shape", "dtype", "axes"],
)
