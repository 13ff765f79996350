"""Product-key memories for all libraries: arguments, variables and forward pass."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Float, Int

import lutjax
from lutjax import _meshes
from lutjax._typing import Array
from lutjax.dispatch.registry import Implementation
from lutjax.layers._largest import largest_elements
from lutjax.layers._memory import (
    MATRIX,
    check_placement,
    read_rows,
    rms_normalize,
    rows_here,
    table_variables,
)
from lutjax.layers._spec import (
    Arrays,
    Example,
    Initializer,
    Op,
    Spec,
    Variable,
    names_layer,
    plain_call,
)
from lutjax.ops._checks import accumulation
from lutjax.tables.host_tables import HostTables

_MOST_KEYS = 46340
"""Largest number of keys in a set: pair ids are int32."""


def unit_rows(key: Array, shape: tuple[int, ...], dtype: DTypeLike = jnp.float32) -> jax.Array:
    """Return rows sampled from normal(1 / sqrt(row size)), so that their lengths are about 1."""
    return jax.random.normal(key, shape, dtype) * jnp.asarray(max(shape[-1], 1) ** -0.5, dtype)


def uniform_keys(key: Array, shape: tuple[int, ...], dtype: DTypeLike = jnp.float32) -> jax.Array:
    """Return keys sampled from uniform(-1, 1) / sqrt(key size)."""
    scale = jnp.asarray(max(shape[-1], 1) ** -0.5, dtype)
    return jax.random.uniform(key, shape, dtype, -1, 1) * scale


@dataclasses.dataclass(unsafe_hash=True)
class _KeySpec(Spec):
    in_features: int
    out_features: int
    _: dataclasses.KW_ONLY
    n_keys: int
    heads: int = 4
    k: int = 32
    key_size: int | None = None
    dtype: DTypeLike | None = None
    param_dtype: DTypeLike = jnp.float32
    weights_init: Initializer = unit_rows
    keys_init: Initializer = uniform_keys
    kernel_init: Initializer = MATRIX
    row_axis: str | None = None
    accumulate: lutjax.FixedPoint | None = None
    implementation: Implementation = None
    placement: str | HostTables = "device"

    methods: ClassVar[tuple[str, ...]] = ("reads",)
    call: ClassVar[Callable[..., Any]] = plain_call
    op = staticmethod(lutjax.weighted_lookup)
    _tables: ClassVar[Callable[..., tuple[Variable, ...]]]

    def __post_init__(self) -> None:
        self._require_sizes(1, "in_features", "out_features", "n_keys", "heads", "k")
        if self.n_keys > _MOST_KEYS:
            raise self._error(f"n_keys is {self.n_keys}; at most {_MOST_KEYS} fit int32 row ids.")
        if self.k > self.n_keys:
            raise self._error(f"k is {self.k} and n_keys {self.n_keys}; k must be at most n_keys.")
        if self.key_size is None:
            self.key_size = -(-self.in_features // 2)
        self._require_sizes(1, "key_size")
        accumulation(self.layer, self.accumulate)
        self._normalize_dtypes()
        check_placement(self)

    def variables(self) -> tuple[Variable, ...]:
        assert self.key_size is not None
        queries, ones = self.heads * 2 * self.key_size, jax.nn.initializers.ones
        return (
            self._trained_variable("query_kernel", (self.in_features, queries), self.kernel_init),
            self._trained_variable("query_scale", (self.heads, 2, self.key_size), ones),
            self._trained_variable(
                "half_keys", (self.heads, 2, self.n_keys, self.key_size), self.keys_init
            ),
            *table_variables(self, *self._tables()),
        )

    def _inputs(self, x: Any) -> jax.Array:
        self._require_features(x, self.in_features)
        return jnp.asarray(x).astype(self._resolve_dtype(x))

    def reads(
        self, arrays: Arrays, x: Float[Array, "*batch inputs"]
    ) -> tuple[Int[jax.Array, "*batch reads"], Float[jax.Array, "*batch reads"]]:
        """Return the selected row ids, head by head, and their weights."""
        names = ("query_kernel", "query_scale", "half_keys")
        choose = _meshes.shard_by_compiler(
            self._select_keys, lambda x, *_: (PartitionSpec(*_meshes.spec_of(x)[:-1]),) * 2
        )
        return choose(self._inputs(x), *(arrays[name] for name in names))

    def _select_keys(
        self, x: jax.Array, kernel: Array, scale: Array, keys: Array
    ) -> tuple[jax.Array, jax.Array]:
        assert self.key_size is not None
        batch = x.shape[:-1]
        queries = jnp.dot(x, jnp.asarray(kernel).astype(x.dtype))
        queries = queries.reshape(*batch, self.heads, 2, self.key_size)
        queries = rms_normalize(queries, jnp.asarray(scale))
        scores = jnp.einsum("...hsc,hsnc->...hsn", queries, jnp.asarray(keys).astype(queries.dtype))
        best, ids = largest_elements(scores, self.k)  # [..., heads, 2, k], the best first
        # The best pairs of keys are pairs of good keys: a few sums of half scores replace
        # n_keys**2.
        i, j = _pairs(self.k)
        sums = best[..., 0, i] + best[..., 1, j]
        rows = ids[..., 0, i] * self.n_keys + ids[..., 1, j]
        best, which = largest_elements(sums, self.k)
        rows = jnp.take_along_axis(rows, which, -1)
        shape = (*batch, self.heads * self.k)
        return rows.reshape(shape), jax.nn.softmax(best).reshape(shape)


@functools.cache
def _pairs(k: int) -> tuple[np.ndarray, np.ndarray]:
    """Return rank pairs that may have one of the `k` largest sums over two descending lists."""
    # Pair i, j is no better than the (i + 1) (j + 1) - 1 other pairs with ranks up to i, j, so
    # about k log(k) of the k**2 pairs remain.
    i, j = np.indices((k, k)).reshape(2, -1)
    is_candidate = (i + 1) * (j + 1) <= k
    return i[is_candidate], j[is_candidate]


@dataclasses.dataclass(unsafe_hash=True)
class ProductKeyMemorySpec(_KeySpec):
    """Large table with ``n_keys**2`` rows, addressed by products of keys.

    A projection makes two queries for each head, each divided by its root mean square and scaled,
    and compared to `n_keys` keys by inner products. The score of row ``i * n_keys + j`` sums the
    scores of key ``i`` in the first set and key ``j`` in the second. Each head adds the `k` rows
    with the largest scores, weighted by their softmax; ``2 * n_keys`` scores suffice.

    Variables:
      query_kernel: trained, ``[in_features, heads * 2 * key_size]``, LeCun normal.
      query_scale: trained, ``[heads, 2, key_size]``, ones.
      half_keys: trained, ``[heads, 2, n_keys, key_size]``, uniform(-1, 1) / sqrt(key_size).
      weights: table, trained, ``[1, n_keys**2, out_features]``, normal(1 / sqrt(out_features)).

    Args:
      in_features, out_features: number of inputs and outputs.
      n_keys: keys in each of a head's two sets; all heads share the ``n_keys**2`` rows.
      heads: number of query pairs, each with its own keys.
      k: number of rows per head.
      key_size: key size; by default half of `in_features`, rounded up.
      dtype: dtype of projection and output; by default promoted from inputs and parameters.
      param_dtype: parameter dtype: float32, bfloat16, float16 or float64.
      weights_init, keys_init, kernel_init: initializers of table, keys and projection.
      row_axis, accumulate, implementation, placement: as in `NgramMemory`.

    Raises:
      ValueError: a size is impossible.

    Source: docs/semantics.md, section 15.

    Published: Lample et al., Large Memory Layers with Product Keys, 2019, with normalization of
    each query by itself instead of over the batch (Berges et al., Memory Layers at Scale, 2024).
    """

    example: ClassVar[Example] = ("16, 8, n_keys=32, k=4", (32, 16), (32, 8))

    def _tables(self) -> tuple[Variable, ...]:
        shape = (1, rows_here(self, self.n_keys**2), self.out_features)
        return (self._trained_variable("weights", shape, self.weights_init, "tables"),)

    @names_layer
    def run(self, op: Op, x: Any, *, weights: Any, **keys: Any) -> jax.Array:
        rows, coefficients = self.reads(keys, x)
        y = read_rows(self, op, weights, rows[..., None, :], coefficients[..., None, :])
        return y.astype(self._inputs(x).dtype)


@dataclasses.dataclass(unsafe_hash=True)
class ProductKeyExpertsSpec(_KeySpec):
    """Single-neuron experts, ``n_keys**2`` in total; product keys select a few for each input.

    Experts are selected and weighted like the rows in a `ProductKeyMemory`. Expert ``i`` adds
    ``activation(<x, down[i]>) * up[i]``, times its weight.

    Variables:
      query_kernel, query_scale, half_keys: as in `ProductKeyMemory`.
      down: input weight table, trained, ``[1, n_keys**2, in_features]``, normal(1 /
        sqrt(in_features)).
      up: output weight table, trained, ``[1, n_keys**2, out_features]``, normal(1 /
        sqrt(out_features)).

    Args:
      in_features, out_features, heads, key_size, dtype, param_dtype, keys_init, kernel_init: as in
        `ProductKeyMemory`.
      row_axis, accumulate, implementation, placement: as in `ProductKeyMemory`.
      n_keys: keys in each of a head's two sets; all heads share the ``n_keys**2`` experts.
      k: number of experts per head.
      weights_init: initializer of both tables, as in `jax.nn.initializers`.
      activation: activation function, applied to arrays.

    Raises:
      ValueError: a size is impossible.

    Source: docs/semantics.md, section 15.

    Published: He, Mixture of A Million Experts, 2024 (PEER).
    """

    _: dataclasses.KW_ONLY
    heads: int = 8
    k: int = 16
    activation: Callable[..., Any] = jax.nn.gelu

    example: ClassVar[Example] = ("16, 8, n_keys=32, k=4", (32, 16), (32, 8))

    def _tables(self) -> tuple[Variable, ...]:
        sizes = {"down": self.in_features, "up": self.out_features}
        shape = (1, rows_here(self, self.n_keys**2))
        return tuple(
            self._trained_variable(name, (*shape, size), self.weights_init, "tables")
            for name, size in sizes.items()
        )

    @names_layer
    def run(self, op: Op, x: Any, *, down: Any, up: Any, **keys: Any) -> jax.Array:
        rows, coefficients = self.reads(keys, x)
        z = self._inputs(x)
        ones = jnp.ones((*rows.shape, 1, 1), coefficients.dtype)
        down = read_rows(self, op, down, rows[..., None, None], ones)
        dtype = coefficients.dtype
        products = jnp.sum(down.astype(dtype) * z[..., None, :].astype(dtype), -1)
        coefficients = coefficients * self.activation(products)
        y = read_rows(self, op, up, rows[..., None, :], coefficients[..., None, :])
        return y.astype(z.dtype)
