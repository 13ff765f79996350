"""A penalty on tables whose neighboring rows differ."""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Float

from lutjax import _meshes
from lutjax._typing import Array
from lutjax.ops import _checks
from lutjax.values._dtypes import accumulator
from lutjax.values._ids import as_jax


def cell_total_variation(weights: Float[Array, "detectors rows outputs"]) -> Float[jax.Array, ""]:
    """Return the mean squared distance of rows whose addresses differ in one bit.

    A regularizer of tables: rows that are seldom read follow their neighbors. Of a model with several layers, take the mean.

    Definition; ``dy`` is the cotangent of ``y`` and ``dweights`` that of ``weights``::

        n_tables, n_rows, _ = weights.shape
        rows, bits = np.arange(n_rows), n_rows.bit_length() - 1
        pairs = [((weights - weights[:, rows ^ (1 << bit)]) ** 2).sum() / 2 for bit in range(bits)]
        y = sum(pairs) / max(n_tables * bits * n_rows // 2, 1)

        changes = sum(weights - weights[:, rows ^ (1 << bit)] for bit in range(bits))
        dweights = dy * 2 * changes / max(n_tables * bits * n_rows // 2, 1)

    Args:
      weights: ``[T, 2**C, O]`` floats.

    Returns:
      ``[]``, at least float32: summed over outputs, averaged over tables and pairs of rows. 0 for tables of one row.

    Raises:
      ValueError, TypeError: a wrong shape or dtype, or a number of rows that is not a power of two.

    Source: docs/semantics.md, section 12.

    Example:
      >>> import jax.numpy as jnp, lutjax
      >>> lutjax.cell_total_variation(jnp.array([[[1.0], [3.0]]]))
      Array(4., dtype=float32)
    """
    op = "cell_total_variation"
    _checks.floats(op, "weights", weights, 3, "[detectors, rows, outputs]")
    n_tables, n_rows, n_outputs = weights.shape
    rule = "the number of rows must be a power of two"
    _checks.require(n_rows > 0 and n_rows & (n_rows - 1) == 0, op, "weights", weights, rule)
    bits = n_rows.bit_length() - 1

    def variation(weights: jax.Array) -> jax.Array:
        weights = weights.astype(accumulator(weights.dtype))
        total = jnp.zeros((), weights.dtype)
        for bit in range(bits):
            # Rows that differ in this bit lie in the two halves of the middle axis.
            pairs = weights.reshape(n_tables, n_rows >> (bit + 1), 2, n_outputs << bit)
            total += jnp.sum(jnp.square(pairs[:, :, 0] - pairs[:, :, 1]))
        return total / max(n_tables * bits * n_rows // 2, 1)

    whole = _meshes.divided_by_compiler(variation, lambda _: PartitionSpec())
    result: jax.Array = whole(as_jax(weights))
    return result
