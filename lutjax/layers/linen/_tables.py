"""Look-up tables for Flax Linen; `lutjax.layers._tables` has their arguments."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike
from jaxtyping import Float

import lutjax
from lutjax._typing import Array
from lutjax.dispatch.registry import Implementation
from lutjax.layers import _tables
from lutjax.layers._spec import Initializer
from lutjax.layers._tables import uniform_positions
from lutjax.layers.linen._layer import Layer


class _Tables(Layer):
    """Base of layers without another call."""

    @nn.compact
    def __call__(self, x: Float[Array, "*batch inputs"]) -> Float[jax.Array, "*batch outputs"]:
        """Return outputs ``[..., out_features]`` for inputs ``[..., in_features]``."""
        spec, arrays = self._bound(x)
        y: jax.Array = spec(arrays, x)
        return y


class LUT(_Tables):
    """Layer of fully connected look-up tables: ``y = lutjax.lut(x, weights, anchors)``.

    Each detector compares ``n_anchors`` pairs of inputs. The bits of the comparisons address a row of its table, and
    the output is the sum of these rows. There is no bias: a constant input selects rows too.

    With `groups` inputs, detectors and outputs fall into groups that follow each other: the detectors of a group read its inputs and
    add to its outputs.

    Variables:
      weights: trained, ``[n_detectors, 2**n_anchors, out_features]``, zeros at first; with `groups`
        ``[..., out_features / groups]``.
      anchors: int32 ids of inputs ``[n_detectors, n_anchors, 2]``.

    Args:
      in_features: inputs. By default as many as the first input has.
      out_features: outputs.
      n_detectors: detectors, each with one table.
      n_anchors: anchor pairs of each detector.
      epsilon: half-width of the dead zone of a comparison.
      dtype: dtype of the output, to which inputs are cast. Rows are read in the dtype of the tables and summed in at least
        float32; only the sum is rounded to `dtype`. Tables narrower than `dtype` are first widened, in a copy. None: inputs are
        not cast, and the output has the dtype of the tables.
      param_dtype: dtype of the tables: float32, bfloat16, float16 or float64.
      weights_init: draws the tables, as in `jax.nn.initializers`.
      accumulate: sums of integers, the same in any order; see `lutjax.FixedPoint`.
      implementation: which implementation runs the op; see `lutjax.lut`.
      anchors: int32 ``[n_detectors, n_anchors, 2]``, instead of drawn ones.
      groups: number of groups; anchors are ids of the inputs of a group.
      name: of the module.

    Raises:
      ValueError: a size is impossible, groups do not divide a size, or an anchor is not an input.

    Source: docs/semantics.md, section 3.

    In Flax Linen a trained variable is in the collection ``params``, and the others are in collections of their own, which
    `apply` needs: see `lutjax.layers.linen`. All are drawn from the stream ``params``. Arguments are checked on first use.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from lutjax.layers.linen import LUT
      >>> layer = LUT(8, 4, n_detectors=16, n_anchors=6)
      >>> variables = layer.init(jax.random.key(0), jnp.ones((32, 8)))
      >>> layer.apply(variables, jnp.ones((32, 8))).shape
      (32, 4)
    """

    spec_type = _tables.LUTSpec

    in_features: int | None = None
    out_features: int | None = None
    _: dataclasses.KW_ONLY
    n_detectors: int
    n_anchors: int
    epsilon: float | int = 0.0
    dtype: DTypeLike | None = None
    param_dtype: DTypeLike = jnp.float32
    weights_init: Initializer = jax.nn.initializers.zeros
    accumulate: lutjax.FixedPoint | None = None
    implementation: Implementation = None
    anchors: Any = None
    groups: int | None = None


class SparseLUT(_Tables):
    """Layer of look-up tables whose rows reach only some of the outputs: `lutjax.sparse_lut`.

    Variables:
      weights: trained, ``[n_detectors, 2**n_anchors, n_targets]``, zeros at first; of a list of edges ``[edges]``.
      anchors: int32 ids of inputs ``[n_detectors, n_anchors, 2]``.
      targets: int32 ids of outputs ``[n_detectors or 1, 2**n_anchors or 1, n_targets]``, -1 for an unused slot; of a list ``[edges]``.
      first_edges: int32 ``[n_detectors * 2**n_anchors + 1]``, the first edge of each row, only of a list.

    Args:
      in_features: inputs. By default as many as the first input has.
      out_features: outputs.
      n_detectors: detectors, each with one table.
      n_anchors: anchor pairs of each detector.
      epsilon: half-width of the dead zone of a comparison.
      dtype: dtype of the output, to which inputs are cast. Rows are read in the dtype of the tables and summed in at least
        float32; only the sum is rounded to `dtype`. Tables narrower than `dtype` are first widened, in a copy. None: inputs are
        not cast, and the output has the dtype of the tables.
      param_dtype: dtype of the tables: float32, bfloat16, float16 or float64.
      weights_init: draws the tables, as in `jax.nn.initializers`.
      accumulate: sums of integers, the same in any order; see `lutjax.FixedPoint`.
      implementation: which implementation runs the op; see `lutjax.lut`.
      anchors: int32 ``[n_detectors, n_anchors, 2]``, instead of drawn ones.
      groups: number of groups; anchors are ids of the inputs of a group. Targets are ids of the outputs of a group.
      n_targets: outputs that each row reaches, drawn without replacement.
      targets_per: unit that has a list of targets of its own: each ``"row"``, each ``"table"`` (its rows share one), or the
        whole ``"layer"``.
      targets: explicit targets, instead of `n_targets`; or a list of edges of `lutjax.wiring.from_edges`, any number of them
        for each row.
      name: of the module.

    Raises:
      ValueError: a size is impossible, an anchor is not an input, or a target neither an output nor -1.

    Source: docs/semantics.md, section 4.

    In Flax Linen a trained variable is in the collection ``params``, and the others are in collections of their own, which
    `apply` needs: see `lutjax.layers.linen`. All are drawn from the stream ``params``. Arguments are checked on first use.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from lutjax.layers.linen import SparseLUT
      >>> layer = SparseLUT(8, 100, n_detectors=16, n_anchors=3, n_targets=5)
      >>> variables = layer.init(jax.random.key(0), jnp.ones((32, 8)))
      >>> layer.apply(variables, jnp.ones((32, 8))).shape
      (32, 100)
    """

    spec_type = _tables.SparseLUTSpec

    in_features: int | None = None
    out_features: int | None = None
    _: dataclasses.KW_ONLY
    n_detectors: int
    n_anchors: int
    epsilon: float | int = 0.0
    dtype: DTypeLike | None = None
    param_dtype: DTypeLike = jnp.float32
    weights_init: Initializer = jax.nn.initializers.zeros
    accumulate: lutjax.FixedPoint | None = None
    implementation: Implementation = None
    anchors: Any = None
    groups: int | None = None
    n_targets: int | None = None
    targets_per: str = "row"
    targets: Any = None


class _Attention(Layer):
    """Base of the two kinds of attention: the call and the cache."""

    __call__ = _tables.attention_call

    @nn.compact
    def _attend(self, x: Any, decode: bool | None, **others: Any) -> Any:
        spec, arrays = self._bound(x)
        if not (spec.decode if decode is None else decode):
            return spec(arrays, x, **others)
        empty = spec.empty_cache(x.shape, x.dtype)
        cache = {
            name: self.variable("cache", name, lambda value: value, value) for name, value in empty.items()
        }
        y, latest = spec.attend_with_cache(arrays, {n: v.value for n, v in cache.items()}, x, **others)
        if not self.is_initializing():  # which leaves the cache empty
            for name, value in latest.items():
                cache[name].value = value
        return y


class LUTAttention(_Attention):
    """Layer of concatenated look-up-table attention: one row per pair of positions.

    The row of a pair is the query's bits, the key's bits and the bits of their distance, one after the other. A query
    attends to the positions strictly before it, or with ``causal=False`` to all; outputs are sums, so position 0 of a
    causal layer outputs 0. There are no heads: use more detectors.

    Variables:
      weights: trained, ``[n_detectors, 2**(2 * n_anchors + n_position_bits), out_features or n_targets]``, zeros at first.
      targets: int32 ids of outputs ``[n_detectors or 1, rows or 1, n_targets]``, only if rows have targets.
      positions: trained, ``[n_positions, 1 or n_detectors, n_position_bits]``, only if there are positional bits; with
        ``causal=False`` ``[2 * n_positions + 1, ...]``, from the key farthest after the query to the farthest before it.
      anchors: int32 ids of inputs ``[n_detectors, n_anchors, 2]``.
      cached_key_index, cached_key_flip, cached_key_margin, cached_segments, cache_index: the latest keys, only for decoding; of `cached`
        ``"ids"`` neither flips nor margins, and of ``"counts"`` ``cached_counts`` ``[..., n_detectors, 2**n_anchors]`` in place of keys.

    Args:
      in_features: inputs. By default as many as the first input has.
      out_features: outputs.
      n_detectors: detectors, each with one table.
      epsilon: half-width of the dead zone of a comparison.
      dtype: dtype of the output, to which inputs are cast. Rows are read in the dtype of the tables and summed in at least
        float32; only the sum is rounded to `dtype`. Tables narrower than `dtype` are first widened, in a copy. None: inputs are
        not cast, and the output has the dtype of the tables. Positions are cast to `dtype`.
      param_dtype: dtype of the tables: float32, bfloat16, float16 or float64. It is that of positions, too.
      weights_init: draws the tables, as in `jax.nn.initializers`.
      accumulate: sums of integers, the same in any order; see `lutjax.FixedPoint`.
      implementation: which implementation runs the op; see `lutjax.lut`.
      anchors: int32 ``[n_detectors, n_anchors, 2]``, instead of drawn ones.
      n_anchors: anchor pairs of each detector; query and key are detected alike.
      n_positions: largest distance that has a position: the longest sequence is one longer.
      n_position_bits: positional bits; 0 for no positions, and then any length is legal.
      shared_positions: whether all detectors read the same positions, or each its own.
      positions_init: draws the positions, as in `jax.nn.initializers`; uniform(-1, 1) by default.
      window: number of positions before it that a query sees; all of them if not given.
      causal: whether a query sees only positions before it. With ``causal=False`` it sees every key, also itself and those
        after it; then there is no `window`, `decode`, `query_start` or `key_start`.
      decode: whether a call continues the sequence of the calls before it, whose latest keys are in a cache.
      cached: what the cache keeps: ``"keys"``, with all that gradients need; ``"ids"`` of their rows alone, one or two bytes
        for each detector in place of twelve; or ``"counts"``, how many keys had each row: a text of any length in the same
        memory, and every query sees all keys before it. Counts need a layer without positions, window and pool, whose rows
        reach all outputs or have one list of targets, and texts of one segment. With ids and counts gradients of earlier keys
        and of their queries are left out; tables have theirs.
      blocks: number and size of the blocks of a pool ``[blocks, size, n_detectors]``, in which the keys of all sequences are;
        calls then say which blocks a sequence has (``block_tables``). By default each sequence has a cache of its own.
      pool: keys of a block, ``i // pool`` of key i: outputs are the sum over blocks of the mean of the rows of the keys that
        a query sees in each. With `causal`, and neither `decode` nor ``block_mask``. By default outputs are the sum over all
        keys.
      n_targets: outputs that each row reaches, drawn without replacement. By default rows reach all outputs.
      targets_per: unit that has a list of targets of its own: each ``"row"``, each ``"table"`` (its rows share one), or the
        whole ``"layer"``.
      targets: explicit targets, instead of `n_targets`; or a list of edges of `lutjax.wiring.from_edges`, any number of them
        for each row.
      name: of the module.

    Raises:
      ValueError: a size is impossible, an anchor is not an input, or a target neither an output nor -1.

    Source: docs/semantics.md, section 5.

    In Flax Linen a trained variable is in the collection ``params``, and the others are in collections of their own, which
    `apply` needs: see `lutjax.layers.linen`. All are drawn from the stream ``params``. Arguments are checked on first use.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from lutjax.layers.linen import LUTAttention
      >>> layer = LUTAttention(
      ...     8, 8, n_detectors=16, n_anchors=3, n_positions=31, n_position_bits=2, decode=True
      ... )
      >>> variables = layer.init(jax.random.key(0), jnp.ones((4, 1, 8)))
      >>> jax.tree.map(jnp.shape, variables["params"])
      {'positions': (31, 1, 2), 'weights': (16, 256, 8)}
      >>> y, new = layer.apply(variables, jnp.ones((4, 3, 8)), mutable=["cache"])
      >>> y.shape, int(new["cache"]["cache_index"])
      ((4, 3, 8), 3)
    """

    spec_type = _tables.LUTAttentionSpec

    in_features: int | None = None
    out_features: int | None = None
    _: dataclasses.KW_ONLY
    n_detectors: int
    n_anchors: int
    epsilon: float | int = 0.0
    dtype: DTypeLike | None = None
    param_dtype: DTypeLike = jnp.float32
    weights_init: Initializer = jax.nn.initializers.zeros
    accumulate: lutjax.FixedPoint | None = None
    implementation: Implementation = None
    anchors: Any = None
    n_positions: int = 0
    n_position_bits: int = 0
    shared_positions: bool = True
    positions_init: Initializer = uniform_positions
    window: int | None = None
    causal: bool = True
    decode: bool = False
    cached: str = "keys"
    blocks: tuple[int, int] | None = None
    pool: int | None = None
    n_targets: int | None = None
    targets_per: str = "row"
    targets: Any = None


class LUTPairAttention(_Attention):
    """Layer of look-up-table attention that detects each pair of positions as one vector.

    Anchors compare values of the joint vector ``[earlier position, later position, position of their distance]``, one
    part after the other or interleaved. A query attends to the positions strictly before it, or with ``causal=False`` to
    all, where "earlier" is then the key and "later" the query; outputs are sums.

    Variables:
      weights: trained, ``[n_detectors, 2**n_anchors, out_features or n_targets]``, zeros at first.
      targets: int32 ids of outputs ``[n_detectors or 1, rows or 1, n_targets]``, only if rows have targets.
      positions: trained, ``[n_positions, 1 or n_detectors, n_position_bits]``, only if there are positional bits; with
        ``causal=False`` ``[2 * n_positions + 1, ...]``, from the key farthest after the query to the farthest before it.
      anchors: int32 ids of places in the joint vector, ``[n_detectors, n_anchors, 2]``.
      cached_x, cached_segments, cache_index: the latest inputs, only for decoding.

    Args:
      in_features: inputs. By default as many as the first input has.
      out_features: outputs.
      n_detectors: detectors, each with one table.
      n_anchors: anchor pairs of each detector.
      epsilon: half-width of the dead zone of a comparison.
      dtype: dtype of the output, to which inputs are cast. Rows are read in the dtype of the tables and summed in at least
        float32; only the sum is rounded to `dtype`. Tables narrower than `dtype` are first widened, in a copy. None: inputs are
        not cast, and the output has the dtype of the tables.
      param_dtype: dtype of the tables: float32, bfloat16, float16 or float64.
      weights_init: draws the tables, as in `jax.nn.initializers`.
      accumulate: sums of integers, the same in any order; see `lutjax.FixedPoint`.
      implementation: which implementation runs the op; see `lutjax.lut`.
      anchors: int32 ``[n_detectors, n_anchors, 2]``, instead of drawn ones.
      n_positions: largest distance that has a position: the longest sequence is one longer.
      n_position_bits: positional bits; 0 for no positions, and then any length is legal.
      shared_positions: whether all detectors read the same positions, or each its own.
      positions_init: draws the positions, as in `jax.nn.initializers`; uniform(-1, 1) by default.
      window: number of positions before it that a query sees; all of them if not given.
      causal: whether a query sees only positions before it. With ``causal=False`` it sees every key, also itself and those
        after it; then there is no `window`, `decode`, `query_start` or `key_start`.
      decode: whether a call continues the sequence of the calls before it, whose latest keys are in a cache.
      blocks: number and size of the blocks of a pool ``[blocks, size, n_detectors]``, in which the keys of all sequences are;
        calls then say which blocks a sequence has (``block_tables``). By default each sequence has a cache of its own.
      pool: keys of a block, ``i // pool`` of key i: outputs are the sum over blocks of the mean of the rows of the keys that
        a query sees in each. With `causal`, and neither `decode` nor ``block_mask``. By default outputs are the sum over all
        keys.
      n_targets: outputs that each row reaches, drawn without replacement. By default rows reach all outputs.
      targets_per: unit that has a list of targets of its own: each ``"row"``, each ``"table"`` (its rows share one), or the
        whole ``"layer"``.
      targets: explicit targets, instead of `n_targets`; or a list of edges of `lutjax.wiring.from_edges`, any number of them
        for each row.
      cached: ``"keys"``. ``"ids"`` changes nothing, as keys have no rows of their own.
      interleave: whether the joint vector takes one value of each part in turn, which needs ``n_position_bits ==
        in_features``, or one part after the other.
      name: of the module.

    Raises:
      ValueError: a size is impossible, or an anchor is not a place in the joint vector.

    Source: docs/semantics.md, section 6.

    In Flax Linen a trained variable is in the collection ``params``, and the others are in collections of their own, which
    `apply` needs: see `lutjax.layers.linen`. All are drawn from the stream ``params``. Arguments are checked on first use.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from lutjax.layers.linen import LUTPairAttention
      >>> layer = LUTPairAttention(8, 6, n_detectors=16, n_anchors=6, n_positions=31, n_position_bits=4)
      >>> variables = layer.init(jax.random.key(0), jnp.ones((4, 32, 8)))
      >>> layer.apply(variables, jnp.ones((4, 32, 8))).shape
      (4, 32, 6)
    """

    spec_type = _tables.LUTPairAttentionSpec

    in_features: int | None = None
    out_features: int | None = None
    _: dataclasses.KW_ONLY
    n_detectors: int
    n_anchors: int
    epsilon: float | int = 0.0
    dtype: DTypeLike | None = None
    param_dtype: DTypeLike = jnp.float32
    weights_init: Initializer = jax.nn.initializers.zeros
    accumulate: lutjax.FixedPoint | None = None
    implementation: Implementation = None
    anchors: Any = None
    n_positions: int = 0
    n_position_bits: int = 0
    shared_positions: bool = True
    positions_init: Initializer = uniform_positions
    window: int | None = None
    causal: bool = True
    decode: bool = False
    cached: str = "keys"
    blocks: tuple[int, int] | None = None
    pool: int | None = None
    n_targets: int | None = None
    targets_per: str = "row"
    targets: Any = None
    interleave: bool = False
