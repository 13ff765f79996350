"""Int8 tables for deployed reads."""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Float

from lutjax import _meshes
from lutjax._typing import Array
from lutjax.ops import _checks, _groups
from lutjax.values import _quantized
from lutjax.values._ids import as_jax


def quantize_tables(
    weights: Float[Array, "detectors rows outputs"], *, groups: int | None = None
) -> _quantized.QuantizedTables:
    """Quantize tables to int8 with a power-of-two scale per group and output.

    Definition. ``groups=None`` means 1::

        n_tables, n_rows, n_outputs = weights.shape
        each = weights.reshape(groups, n_tables // groups * n_rows, n_outputs)
        largest = np.maximum(np.abs(each).max(axis=1), 1e-30)
        exponents = np.ceil(np.log2(largest)).astype(np.int32) - 7
        scaled = each / 2.0 ** exponents[:, None]
        values = np.clip(np.floor(scaled + 0.5), -128, 127).reshape(weights.shape).astype(np.int8)

    Args:
      weights: ``[T, R, O]`` floats.
      groups: see `lutjax.scored_lut`.

    Returns:
      The tables used by `lutjax.reads.PowersOfTwo` during training.

    Raises:
      ValueError, TypeError: a wrong shape or dtype, or groups that do not divide the tables.

    Source: docs/semantics.md, section 12.

    Example:
      >>> import jax.numpy as jnp, lutjax
      >>> tables = lutjax.quantize_tables(jnp.array([[[0.75], [-0.3]]]))
      >>> tables.values[0, :, 0], tables.exponents
      (Array([ 96, -38], dtype=int8), Array([[-7]], dtype=int32))
    """
    _checks.floats("quantize_tables", "weights", weights, 3, "[detectors, rows, outputs]")
    n = _groups.number("quantize_tables", groups, weights.shape[0])

    def quantize(weights: jax.Array) -> tuple[jax.Array, jax.Array]:
        e = _quantized.exponents(weights, n)
        return _quantized.round_to_scale(weights, e).astype(jnp.int8), e

    def specs(weights: jax.Array) -> tuple[PartitionSpec, PartitionSpec]:
        return _meshes.spec_of(weights), PartitionSpec()

    values, e = _meshes.shard_by_compiler(quantize, specs)(as_jax(weights))
    return _quantized.QuantizedTables(values, e)
