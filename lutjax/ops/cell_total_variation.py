"""A smoothness penalty on neighboring table rows."""

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
    """Return the mean squared distance between rows with addresses one bit apart.

    A table regularizer: rarely read rows follow their neighbors. Average it over a model's layers.

    Definition. ``dy`` and ``dweights`` are the cotangents::

        n_tables, n_rows, _ = weights.shape
        rows, bits = np.arange(n_rows), n_rows.bit_length() - 1
        pairs = [((weights - weights[:, rows ^ (1 << bit)]) ** 2).sum() / 2 for bit in range(bits)]
        y = sum(pairs) / max(n_tables * bits * n_rows // 2, 1)

        changes = sum(weights - weights[:, rows ^ (1 << bit)] for bit in range(bits))
        dweights = dy * 2 * changes / max(n_tables * bits * n_rows // 2, 1)

    Args:
      weights: ``[T, 2**C, O]`` floats.

    Returns:
      ``[]``, at least float32: summed over outputs, averaged over tables and row pairs. 0 for
      one-row tables.

    Raises:
      ValueError, TypeError: a wrong shape or dtype, or a row count other than a power of two.

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
            # The two halves of the middle axis hold the rows with and without this bit.
            pairs = weights.reshape(n_tables, n_rows >> (bit + 1), 2, n_outputs << bit)
            total += jnp.sum(jnp.square(pairs[:, :, 0] - pairs[:, :, 1]))
        return total / max(n_tables * bits * n_rows // 2, 1)

    whole = _meshes.shard_by_compiler(variation, lambda _: PartitionSpec())
    result: jax.Array = whole(as_jax(weights))
    return result
