"""Look-up tables for Flax NNX; `lutjax.layers._tables` has their arguments."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

import lutjax
from lutjax.dispatch.registry import Implementation
from lutjax.layers import _tables
from lutjax.layers._spec import Initializer
from lutjax.layers._tables import uniform_positions
from lutjax.layers.nnx._layer import Layer


class LUT(Layer):
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
      in_features: inputs.
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
      rngs: draws the variables, from its stream ``params``.

    Raises:
      ValueError: a size is impossible, groups do not divide a size, or an anchor is not an input.

    Source: docs/semantics.md, section 3.

    In Flax NNX a variable is an attribute: an `nnx.Param` if it is trained (tables are `Tables`), and otherwise an `Anchors`,
    `Targets`, `Wires` or `Thresholds`. Restore all of them with a checkpoint: `lutjax.layers.nnx.check` refuses other states.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from lutjax.layers.nnx import LUT
      >>> layer = LUT(8, 4, n_detectors=16, n_anchors=6, rngs=nnx.Rngs(0))
      >>> layer.weights.shape, layer.anchors.shape
      ((16, 64, 4), (16, 6, 2))
      >>> layer(jnp.ones((32, 8))).shape
      (32, 4)
    """

    spec_type = _tables.LUTSpec

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        n_detectors: int,
        n_anchors: int,
        epsilon: float | int = 0.0,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        weights_init: Initializer = jax.nn.initializers.zeros,
        accumulate: lutjax.FixedPoint | None = None,
        implementation: Implementation = None,
        anchors: Any = None,
        groups: int | None = None,
        rngs: nnx.Rngs,
    ) -> None:
        self._make(locals())


class SparseLUT(Layer):
    """Layer of look-up tables whose rows reach only some of the outputs: `lutjax.sparse_lut`.

    Variables:
      weights: trained, ``[n_detectors, 2**n_anchors, n_targets]``, zeros at first; of a list of edges ``[edges]``.
      anchors: int32 ids of inputs ``[n_detectors, n_anchors, 2]``.
      targets: int32 ids of outputs ``[n_detectors or 1, 2**n_anchors or 1, n_targets]``, -1 for an unused slot; of a list ``[edges]``.
      first_edges: int32 ``[n_detectors * 2**n_anchors + 1]``, the first edge of each row, only of a list.

    Args:
      in_features: inputs.
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
      rngs: draws the variables, from its stream ``params``.

    Raises:
      ValueError: a size is impossible, an anchor is not an input, or a target neither an output nor -1.

    Source: docs/semantics.md, section 4.

    In Flax NNX a variable is an attribute: an `nnx.Param` if it is trained (tables are `Tables`), and otherwise an `Anchors`,
    `Targets`, `Wires` or `Thresholds`. Restore all of them with a checkpoint: `lutjax.layers.nnx.check` refuses other states.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from lutjax.layers.nnx import SparseLUT
      >>> layer = SparseLUT(8, 100, n_detectors=16, n_anchors=3, n_targets=5, rngs=nnx.Rngs(0))
      >>> layer(jnp.ones((32, 8))).shape
      (32, 100)
    """

    spec_type = _tables.SparseLUTSpec

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        n_detectors: int,
        n_anchors: int,
        epsilon: float | int = 0.0,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        weights_init: Initializer = jax.nn.initializers.zeros,
        accumulate: lutjax.FixedPoint | None = None,
        implementation: Implementation = None,
        anchors: Any = None,
        groups: int | None = None,
        n_targets: int | None = None,
        targets_per: str = "row",
        targets: Any = None,
        rngs: nnx.Rngs,
    ) -> None:
        self._make(locals())


class _Attention(Layer):
    """Base of the two kinds of attention: the call and the cache."""

    def _make(self, arguments: Mapping[str, Any]) -> None:
        super()._make(arguments)
        for name in self.spec.cache_names:
            setattr(self, name, nnx.data(None))

    __call__ = _tables.attention_call

    def _attend(self, x: Any, decode: bool | None, **others: Any) -> Any:
        spec = self.spec
        if not (spec.decode if decode is None else decode):
            return spec(self._held(), x, **others)
        cache = {name: getattr(self, name) for name in spec.cache_names}
        if all(array is None for array in cache.values()):
            raise ValueError(f"{spec.layer}: there is no cache to decode with; call init_cache first.")
        held = {name: c[...] for name, c in cache.items() if c is not None}
        y, latest = spec.attend_with_cache(self._held(), held, x, **others)
        for name, value in latest.items():
            cache[name][...] = value
        return y

    def init_cache(
        self,
        input_shape: tuple[int, ...],
        dtype: DTypeLike = jnp.float32,
        *,
        ids: bool = False,
        counts: bool = False,
        blocks: tuple[int, int] | None = None,
    ) -> None:
        """Make an empty cache (`nnx.Cache`) for decoding inputs of this shape and dtype.

        The length in `input_shape` does not matter: the cache holds as many keys as a query can see,
        `window` or else `n_positions`, and any number of new positions can be decoded at once.

        Args:
          ids: of `LUTAttention`, keep of a key the ids of its rows alone: one or two bytes for each detector in place of twelve. Then no gradient
            flows to inputs of other calls, nor to queries from keys of earlier calls.
          counts: of `LUTAttention` without positions, window and pool, keep how many keys had each row: constant memory for texts of any
            length, of one segment, and each query sees all keys before it. No gradient flows to inputs.

          blocks: number and size of the blocks of a pool, in which the keys of all sequences are; a call then takes ``block_tables``.

        Without `ids` and `counts` it is a cache of what the layer's `cached` says, and without `blocks` of what `blocks` does.

        Raises:
          ValueError: both are asked for, or the layer has no such cache.
        """
        if ids and counts:
            raise ValueError(f"{self.spec.layer}: a cache keeps either ids or counts; give one of them.")
        cached = "ids" if ids else "counts" if counts else None
        cache = self.spec.empty_cache(input_shape, dtype, cached=cached, blocks=blocks)
        for name in self.spec.cache_names:
            delattr(self, name)  # a cache of another kind has other variables
            setattr(self, name, nnx.Cache(cache[name]) if name in cache else nnx.data(None))

    def set_view(
        self,
        decode: bool | None = None,
        batch_size: int | tuple[int, ...] | None = None,
        cache_dtype: DTypeLike | None = None,
    ) -> None:
        """Change the mode of the layer, for ``nnx.view``.

        Args:
          decode: whether calls decode with the cache.
          batch_size: makes an empty cache for this batch.
          cache_dtype: dtype of the inputs that are decoded; float32 by default.
        """
        if decode is not None:
            self.decode = decode
        if batch_size is not None:
            batch = (batch_size,) if isinstance(batch_size, int) else tuple(batch_size)
            self.init_cache((*batch, 1, self.spec.in_features), cache_dtype or jnp.float32)


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
      in_features: inputs.
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
      rngs: draws the variables, from its stream ``params``.

    Raises:
      ValueError: a size is impossible, an anchor is not an input, or a target neither an output nor -1.

    Source: docs/semantics.md, section 5.

    In Flax NNX a variable is an attribute: an `nnx.Param` if it is trained (tables are `Tables`), and otherwise an `Anchors`,
    `Targets`, `Wires` or `Thresholds`. Restore all of them with a checkpoint: `lutjax.layers.nnx.check` refuses other states.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from lutjax.layers.nnx import LUTAttention
      >>> layer = LUTAttention(
      ...     8, 8, n_detectors=16, n_anchors=3, n_positions=31, n_position_bits=2, rngs=nnx.Rngs(0)
      ... )
      >>> layer.weights.shape, layer.positions.shape
      ((16, 256, 8), (31, 1, 2))
      >>> layer(jnp.ones((4, 32, 8))).shape
      (4, 32, 8)

      Decoding, here three positions and then one more:

      >>> decoder = nnx.view(layer, decode=True, batch_size=4)
      >>> decoder(jnp.ones((4, 3, 8))).shape, decoder(jnp.ones((4, 1, 8))).shape
      ((4, 3, 8), (4, 1, 8))
      >>> int(decoder.cache_index[...])
      4
    """

    spec_type = _tables.LUTAttentionSpec

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        n_detectors: int,
        n_anchors: int,
        epsilon: float | int = 0.0,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        weights_init: Initializer = jax.nn.initializers.zeros,
        accumulate: lutjax.FixedPoint | None = None,
        implementation: Implementation = None,
        anchors: Any = None,
        n_positions: int = 0,
        n_position_bits: int = 0,
        shared_positions: bool = True,
        positions_init: Initializer = uniform_positions,
        window: int | None = None,
        causal: bool = True,
        decode: bool = False,
        cached: str = "keys",
        blocks: tuple[int, int] | None = None,
        pool: int | None = None,
        n_targets: int | None = None,
        targets_per: str = "row",
        targets: Any = None,
        rngs: nnx.Rngs,
    ) -> None:
        self._make(locals())


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
      in_features: inputs.
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
      rngs: draws the variables, from its stream ``params``.

    Raises:
      ValueError: a size is impossible, or an anchor is not a place in the joint vector.

    Source: docs/semantics.md, section 6.

    In Flax NNX a variable is an attribute: an `nnx.Param` if it is trained (tables are `Tables`), and otherwise an `Anchors`,
    `Targets`, `Wires` or `Thresholds`. Restore all of them with a checkpoint: `lutjax.layers.nnx.check` refuses other states.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from lutjax.layers.nnx import LUTPairAttention
      >>> layer = LUTPairAttention(8, 6, n_detectors=16, n_anchors=6, n_positions=31, n_position_bits=4, rngs=nnx.Rngs(0))
      >>> layer(jnp.ones((4, 32, 8))).shape
      (4, 32, 6)
    """

    spec_type = _tables.LUTPairAttentionSpec

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        n_detectors: int,
        n_anchors: int,
        epsilon: float | int = 0.0,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        weights_init: Initializer = jax.nn.initializers.zeros,
        accumulate: lutjax.FixedPoint | None = None,
        implementation: Implementation = None,
        anchors: Any = None,
        n_positions: int = 0,
        n_position_bits: int = 0,
        shared_positions: bool = True,
        positions_init: Initializer = uniform_positions,
        window: int | None = None,
        causal: bool = True,
        decode: bool = False,
        cached: str = "keys",
        blocks: tuple[int, int] | None = None,
        pool: int | None = None,
        n_targets: int | None = None,
        targets_per: str = "row",
        targets: Any = None,
        interleave: bool = False,
        rngs: nnx.Rngs,
    ) -> None:
        self._make(locals())
