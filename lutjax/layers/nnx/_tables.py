"""Look-up tables for Flax NNX."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from lutjax._typing import Array, Integer
from lutjax.layers import _tables
from lutjax.layers._spec import takes
from lutjax.layers.nnx._layer import Layer


class LUT(Layer):
    """Fully connected look-up tables.

    ``y = sum over detectors of weights[t, row of t]``, where the row is the answers to ``n_anchors``
    comparisons of inputs. No bias: a constant input selects rows too.

    State: ``weights`` (`nnx.Param`, ``[n_detectors, 2**n_anchors, out_features]``, zeros at first) and
    ``anchors`` (`Anchors`, int32 ``[n_detectors, n_anchors, 2]``).

    Args:
      in_features: inputs.
      out_features: outputs.
      n_detectors: detectors, each with one table.
      n_anchors: anchor pairs of each detector.
      epsilon: half-width of the dead zone of a comparison.
      dtype: inputs and tables are cast to it first; by default they are not cast, and the output has the
        dtype of the tables.
      param_dtype: dtype of the tables: float32, bfloat16, float16 or float64.
      weights_init: draws the tables, as in `jax.nn.initializers`.
      accumulate: sums of integers, the same in any order; see `lutjax.FixedPoint`.
      implementation: which implementation runs the op; see `lutjax.lut`.
      anchors: int32 ``[n_detectors, n_anchors, 2]``, instead of drawn ones.
      rngs: its ``params`` stream draws everything.

    Raises:
      ValueError: a size is impossible, or an anchor is not an input.

    Source: docs/semantics.md, section 3.

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

    @takes(_tables.LUTSpec)
    def __init__(
        self, in_features: int, out_features: int, *, anchors: Any = None, rngs: nnx.Rngs, **options: Any
    ):
        self._build(
            _tables.LUTSpec, in_features, out_features, given={"anchors": anchors}, rngs=rngs, **options
        )


class SparseLUT(Layer):
    """Look-up tables whose rows reach only some of the outputs.

    State: ``weights`` (`nnx.Param`, ``[n_detectors, 2**n_anchors, n_targets]``, zeros at first),
    ``anchors`` (`Anchors`, int32 ``[n_detectors, n_anchors, 2]``) and ``targets`` (`Targets`, int32
    ``[n_detectors or 1, 2**n_anchors or 1, n_targets]``, -1 for an unused slot).

    Args:
      in_features: inputs.
      out_features: outputs.
      n_detectors: detectors, each with one table.
      n_anchors: anchor pairs of each detector.
      n_targets: outputs that each row reaches, drawn without replacement.
      targets_per: who has a list of targets of its own: each ``"row"``, each ``"table"``, or the ``"layer"``.
      targets: explicit targets, instead of `n_targets`.
      epsilon, dtype, param_dtype, weights_init, accumulate, implementation, anchors, rngs: as in `LUT`.

    Raises:
      ValueError: a size is impossible, an anchor is not an input, or a target neither an output nor -1.

    Source: docs/semantics.md, section 4.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from lutjax.layers.nnx import SparseLUT
      >>> layer = SparseLUT(8, 100, n_detectors=16, n_anchors=3, n_targets=5, rngs=nnx.Rngs(0))
      >>> layer.weights.shape, layer.targets.shape
      ((16, 8, 5), (16, 8, 5))
      >>> layer(jnp.ones((32, 8))).shape
      (32, 100)
    """

    @takes(_tables.SparseLUTSpec)
    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        anchors: Any = None,
        targets: Any = None,
        rngs: nnx.Rngs,
        **options: Any,
    ):
        self._build(
            _tables.SparseLUTSpec,
            in_features,
            out_features,
            given={"anchors": anchors, "targets": targets},
            rngs=rngs,
            **options,
        )


class _Attention(Layer):
    """What the two kinds of attention share: the call and the cache."""

    decode: bool

    def _build_attention(self, *args: Any, decode: bool, **options: Any) -> None:
        self._build(*args, **options)
        self.decode = decode
        for name in self.spec.cache_names:
            setattr(self, name, nnx.data(None))

    def __call__(
        self,
        x: Float[Array, "*batch queries inputs"],
        keys: Float[Array, "*batch keys inputs"] | None = None,
        *,
        segments: Int[Array, "*#batch queries"] | None = None,
        key_segments: Int[Array, "*#batch keys"] | None = None,
        query_start: Integer | None = None,
        key_start: Integer | None = None,
        decode: bool | None = None,
    ) -> Float[jax.Array, "*batch queries outputs"]:
        """Outputs ``[..., length, out_features]`` for inputs ``[..., length, in_features]``.

        Args:
          x: inputs of the queries, and of the keys where `keys` is not given.
          keys: inputs of the keys, for attention from one sequence to another.
          segments: ids ``[..., length]``; a query attends only to keys of its own segment.
          key_segments: the same for `keys`.
          query_start: place of the first query, where `keys` is given; 0 by default.
          key_start: place of the first key, where `keys` is given; 0 by default.
          decode: `x` continues what the cache holds, and the cache then holds the latest keys. Takes
            precedence over the layer's own `decode`.

        Raises:
          ValueError: decoding without a cache, or with arguments that the cache replaces.
        """
        others = {
            "keys": keys,
            "segments": segments,
            "key_segments": key_segments,
            "query_start": query_start,
            "key_start": key_start,
        }
        if not (self.decode if decode is None else decode):
            return self.spec(self._arrays(), x, **others)
        cache = {name: getattr(self, name) for name in self.spec.cache_names}
        if cache["cache_index"] is None:
            raise ValueError(f"{self.spec.layer}: there is no cache to decode with; call init_cache first.")
        y, latest = self.spec.decode(self._arrays(), {name: c[...] for name, c in cache.items()}, x, **others)
        for name, value in latest.items():
            cache[name][...] = value
        return y

    def init_cache(self, input_shape: tuple[int, ...], dtype: DTypeLike = jnp.float32) -> None:
        """Makes an empty cache (`nnx.Cache`) for decoding inputs of this shape and dtype.

        The length in `input_shape` does not matter: the cache holds as many keys as a query can see,
        `window` or else `n_positions`, and any number of new positions can be decoded at once.
        """
        for name, value in self.spec.empty_cache(input_shape, dtype).items():
            setattr(self, name, nnx.Cache(value))

    def set_view(
        self,
        decode: bool | None = None,
        batch_size: int | tuple[int, ...] | None = None,
        cache_dtype: DTypeLike | None = None,
    ) -> None:
        """Class method used by ``nnx.view``.

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
    """Concatenated look-up-table attention: one row per pair of positions.

    The row of a pair is the query's bits, the key's bits and the bits of their distance, one after the
    other. A query attends to the positions strictly before it; outputs are sums, so position 0 outputs 0.
    Heads are nothing but more detectors.

    State: ``weights`` (`nnx.Param`, ``[n_detectors, 2**(2 * n_anchors + n_position_bits), out_features]``,
    zeros at first), ``positions`` (`nnx.Param`, ``[n_positions, 1 or n_detectors, n_position_bits]``,
    only if there are positional bits), ``anchors`` (`Anchors`, int32 ``[n_detectors, n_anchors, 2]``), and
    after `init_cache` the keys to decode with (`nnx.Cache`).

    Args:
      in_features: inputs.
      out_features: outputs.
      n_detectors: detectors, each with one table.
      n_anchors: anchor pairs of each detector; query and key are detected alike.
      n_positions: distances that have a position: the longest text is one longer.
      n_position_bits: positional bits; 0 for no positions, and then any length is legal.
      shared_positions: all detectors read the same positions, or each its own.
      positions_init: draws the positions, as in `jax.nn.initializers`; uniform(-1, 1) by default.
      window: a query sees this many positions before it; all of them if not given.
      decode: whether calls decode with the cache, one text in several calls.
      epsilon, dtype, param_dtype, weights_init, accumulate, implementation, anchors, rngs: as in `LUT`; positions are
        cast and stored like tables.

    Raises:
      ValueError: a size is impossible, or an anchor is not an input.

    Source: docs/semantics.md, section 5.

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

    @takes(_tables.LUTAttentionSpec)
    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        anchors: Any = None,
        decode: bool = False,
        rngs: nnx.Rngs,
        **options: Any,
    ):
        spec_type = _tables.LUTAttentionSpec
        self._build_attention(
            spec_type,
            in_features,
            out_features,
            given={"anchors": anchors},
            decode=decode,
            rngs=rngs,
            **options,
        )


class LUTPairAttention(_Attention):
    """Look-up-table attention that detects each pair of positions as one vector.

    Anchors compare values of ``[earlier position, later position, position of their distance]``, one part
    after the other or interleaved. A query attends to the positions strictly before it; outputs are sums.

    State: ``weights`` (`nnx.Param`, ``[n_detectors, 2**n_anchors, out_features]``, zeros at first),
    ``positions`` (`nnx.Param`, ``[n_positions, 1 or n_detectors, n_position_bits]``, only if there are
    positional bits), ``anchors`` (`Anchors`, int32 ``[n_detectors, n_anchors, 2]``, ids of the joint
    vector), and after `init_cache` the inputs to decode with (`nnx.Cache`).

    Args:
      interleave: whether the joint vector takes one value of each part in turn; needs
        ``n_position_bits == in_features``.
      in_features, out_features, n_detectors, n_anchors, n_positions, n_position_bits, shared_positions,
        positions_init, window, decode: as in `LUTAttention`.
      epsilon, dtype, param_dtype, weights_init, accumulate, implementation, anchors, rngs: as in `LUT`.

    Raises:
      ValueError: a size is impossible, or an anchor is not a place in the joint vector.

    Source: docs/semantics.md, section 6.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from lutjax.layers.nnx import LUTPairAttention
      >>> layer = LUTPairAttention(
      ...     8, 8, n_detectors=16, n_anchors=6, n_positions=31, n_position_bits=4, rngs=nnx.Rngs(0)
      ... )
      >>> layer.weights.shape, layer.positions.shape
      ((16, 64, 8), (31, 1, 4))
      >>> layer(jnp.ones((4, 32, 8))).shape
      (4, 32, 8)
    """

    @takes(_tables.LUTPairAttentionSpec)
    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        anchors: Any = None,
        decode: bool = False,
        rngs: nnx.Rngs,
        **options: Any,
    ):
        spec_type = _tables.LUTPairAttentionSpec
        self._build_attention(
            spec_type,
            in_features,
            out_features,
            given={"anchors": anchors},
            decode=decode,
            rngs=rngs,
            **options,
        )
