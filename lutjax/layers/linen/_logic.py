"""Differentiable logic for Flax Linen; `lutjax.layers._logic` has the arguments of the layers."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike
from jaxtyping import Float, Shaped, UInt32

import lutjax
from lutjax._typing import Array
from lutjax.dispatch.registry import Implementation
from lutjax.layers import _logic, _logic_images
from lutjax.layers._logic import GAUSSIAN, RESIDUAL, uniform_table
from lutjax.layers._spec import Initializer
from lutjax.layers.linen._layer import Layer, Switched
from lutjax.wiring._names import Wiring
from lutjax.wiring._sizes import Size


class _Wired(Switched):
    """Base of layers of gates with wires."""

    @nn.compact
    def __call__(
        self,
        x: Shaped[Array, "..."],
        *,
        deterministic: bool | None = None,
        temperature: Float[Array, ""] | float | None = None,
    ) -> Float[jax.Array, "..."]:
        """Return outputs for inputs.

        Args:
          x: inputs.
          deterministic: whether to run the hard network; takes precedence over the field.
          temperature: in place of the field; it may be traced.
        """
        return self._run(x, deterministic, temperature=temperature)

    def truth_tables(self, variables: Mapping[str, Any]) -> tuple[jax.Array, jax.Array]:
        """Return the hard network for `lutjax.packed_lut`: wires ``[G, n]`` and bool tables ``[G, 2**n]``.

        Those of `LogicConv` are the trees of one window: ids below its number of values are values of the window, the next ones gates.

        Args:
          variables: the layer's own part of them, ``params`` and ``wires``.
        """
        spec, arrays = self._spec_and_arrays(variables)
        wires, tables = spec.truth_tables(arrays)
        return wires, tables

    def expected_needs(
        self, variables: Mapping[str, Any], temperature: Float[Array, ""] | float | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """Return for each gate the expected number of inputs that it needs, and the probability that it needs any.

        See `lutjax.layers.nnx.LogicGates.expected_needs`.

        Args:
          variables: the layer's own part of them, ``params`` and ``wires``.
          temperature: in place of the field.
        """
        spec, arrays = self._spec_and_arrays(variables)
        inputs, any_input = spec.expected_needs(arrays, temperature)
        return inputs, any_input


class LogicGates(_Wired):
    """Layer of differentiable logic gates of two inputs, each a mixture of all sixteen: `lutjax.logic_gates`.

    With ``deterministic=True`` (an argument of the layer and of each call) every gate is the one with the largest logit:
    bits in, bits out.

    Variables:
      logits: trained, ``[out_features, 16]``.
      wires: int32 ids of inputs ``[out_features, 2]``; of candidates ``[out_features, 2, candidates]``. Wiring ``"full"`` has none.
      readers: int32 ``[in_features, fan-out]``: which places in `wires` read each input, for the gradient. Left out
        where it is not known how often inputs are read, where scores choose, and where a few inputs of explicit wires are read by so many gates that
        the list would be mostly empty.
      scores: trained, of the shape of `wires`, or ``[out_features, 2, in_features]``; only where wires are learned.

    Args:
      in_features: inputs, numbers from 0 to 1 or bits. By default as many as the first input has.
      out_features: gates, with one output each.
      wiring: which inputs gates read, by name or a function as those of `lutjax.wiring`. Drawn once: ``"balanced"``: every
        input is read about equally often. ``"unique"``: likewise, and no pair of inputs is read twice. ``"butterfly"``: outputs
        of several layers depend on as many inputs as possible. ``"random"``: each wire by itself. `lutjax.wiring.Windows`,
        `lutjax.wiring.Groups`: windows of an image, groups of inputs. Learned, by trained scores, with the highest in the hard
        network: ``"top-k"``: for each input of a gate one of `candidates`; a soft layer, too, reads that one, at about the cost
        of fixed wires. ``"full"``: one of all inputs, with a product of matrices in the backward pass. ``"learnable"``: a soft
        layer reads the mixture of all candidates.
      candidates: number of candidates of each input of a gate; even for ``"learnable"``.
      scores_init: draws their scores, as in `jax.nn.initializers`; normal(0, 1) by default.
      logits_init: draws the logits; by default `lutjax.layers.initializers.residual_gates()`: a gate passes on its first
        input with probability 0.9. ``jax.nn.initializers.normal(1.0)`` is the other usual one.
      estimator: how gates are relaxed in training. ``"soft"``: mixtures of gates. ``"gumbel"``: mixtures with Gumbel noise on
        the logits, drawn anew in each call and the same for all samples: from the stream ``gates`` in Flax, from the key of
        `apply` in Haiku. ``"straight_through"``: the hard network forward; logits get the gradient that they have in a mixture
        of the same inputs.
      temperature: logits and scores are divided by it, so that a lower one is nearer to the hard network. A call takes
        another one, ``layer(x, temperature=t)``; it may be traced, as that of a schedule is.
      feature_axis: -1, or 0 where inputs and outputs come first, ``[features, ...]``: the fast layout.
      accumulate: sums of integers, the same in any order of samples and gates; see `lutjax.FixedPoint`. With a wiring that is
        drawn.
      dtype: inputs are cast to it first, and the outputs have it; by default they are not cast.
      param_dtype: dtype of logits and scores: float32, bfloat16, float16 or float64.
      implementation: which implementation runs the op; see `lutjax.bilinear_gates`.
      wires: int32 ``[out_features, 2]``, or candidates ``[out_features, 2, candidates]``, instead of drawn ones. A gate may
        read one input twice.
      deterministic: whether calls run the hard network.
      name: of the module.

    Raises:
      ValueError: a size is impossible, there are not that many different pairs, or a wire is not an input.

    Source: docs/logic.md, sections 1 and 4.

    In Flax Linen a trained variable is in the collection ``params``, and the others are in collections of their own, which
    `apply` needs: see `lutjax.layers.linen`. All are drawn from the stream ``params``. Arguments are checked on first use.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from lutjax.layers.linen import LogicGates
      >>> layer = LogicGates(16, 40)
      >>> variables = layer.init(jax.random.key(0), jnp.ones((32, 16)))
      >>> jax.tree.map(jnp.shape, variables)
      {'params': {'logits': (40, 16)}, 'wires': {'readers': (16, 5), 'wires': (40, 2)}}
      >>> layer.apply(variables, jnp.ones((32, 16)), deterministic=True).shape
      (32, 40)
    """

    spec_type = _logic.LogicGatesSpec

    in_features: int | None = None
    out_features: int | None = None
    _: dataclasses.KW_ONLY
    estimator: str = "soft"
    temperature: float | int = 1.0
    feature_axis: int = -1
    dtype: DTypeLike | None = None
    param_dtype: DTypeLike = jnp.float32
    implementation: Implementation = None
    wires: Any = None
    deterministic: bool = False
    wiring: str | Wiring = "balanced"
    candidates: int = 8
    scores_init: Initializer = GAUSSIAN
    accumulate: lutjax.FixedPoint | None = None
    logits_init: Initializer = RESIDUAL


class LogicRNN(_Wired):
    """Recurrent layer of differentiable logic gates: at each step gates read the inputs of the step and the state, and their outputs are the next state.

    Inputs are ``[..., length, in_features]`` and outputs, the state after each step, ``[..., length, out_features]``; with ``feature_axis=0``
    ``[features, length, ...]``. The state is 0 before the first step, or the one that a call is given. With ``deterministic=True`` every gate is the one with the
    largest logit: bits in, bits out, and `from_words` runs 32 sequences in a word.

    Variables:
      logits: trained, ``[out_features, 16]``.
      wires, readers, scores: as in `LogicGates`, of ``in_features + out_features`` inputs: those of the layer, then the state.

    Args:
      in_features: inputs of a step, numbers from 0 to 1 or bits. By default as many as the first input has.
      out_features: gates, and numbers of the state.
      wiring: which inputs gates read, by name or a function as those of `lutjax.wiring`. Drawn once: ``"balanced"``: every
        input is read about equally often. ``"unique"``: likewise, and no pair of inputs is read twice. ``"butterfly"``: outputs
        of several layers depend on as many inputs as possible. ``"random"``: each wire by itself. `lutjax.wiring.Windows`,
        `lutjax.wiring.Groups`: windows of an image, groups of inputs. Learned, by trained scores, with the highest in the hard
        network: ``"top-k"``: for each input of a gate one of `candidates`; a soft layer, too, reads that one, at about the cost
        of fixed wires. ``"full"``: one of all inputs, with a product of matrices in the backward pass. ``"learnable"``: a soft
        layer reads the mixture of all candidates.
      estimator: how gates are relaxed in training. ``"soft"``: mixtures of gates. ``"gumbel"``: mixtures with Gumbel noise on
        the logits, drawn anew in each call and the same for all samples: from the stream ``gates`` in Flax, from the key of
        `apply` in Haiku. ``"straight_through"``: the hard network forward; logits get the gradient that they have in a mixture
        of the same inputs. Noise is the same in all steps of a call.
      wires: int32 ``[out_features, 2]``, or candidates ``[out_features, 2, candidates]``, instead of drawn ones: ids below
        `in_features` are inputs, and ``in_features + g`` is the state of gate g.
      candidates: number of candidates of each input of a gate; even for ``"learnable"``.
      scores_init: draws their scores, as in `jax.nn.initializers`; normal(0, 1) by default.
      logits_init: draws the logits; by default `lutjax.layers.initializers.residual_gates()`: a gate passes on its first
        input with probability 0.9. ``jax.nn.initializers.normal(1.0)`` is the other usual one.
      temperature: logits and scores are divided by it, so that a lower one is nearer to the hard network. A call takes
        another one, ``layer(x, temperature=t)``; it may be traced, as that of a schedule is.
      feature_axis: -1, or 0 where inputs and outputs come first, ``[features, ...]``: the fast layout.
      dtype: inputs are cast to it first, and the outputs have it; by default they are not cast.
      param_dtype: dtype of logits and scores: float32, bfloat16, float16 or float64.
      implementation: which implementation runs the op; see `lutjax.bilinear_gates`.
      deterministic: whether calls run the hard network.
      accumulate: sums of integers, the same in any order of samples and gates; see `lutjax.FixedPoint`. With a wiring that is
        drawn. In each step: sums over steps are of floats.
      name: of the module.

    Raises:
      ValueError: a size is impossible, or a wire is neither an input nor a gate.

    Source: docs/logic.md, section 10.

    In Flax Linen a trained variable is in the collection ``params``, and the others are in collections of their own, which
    `apply` needs: see `lutjax.layers.linen`. All are drawn from the stream ``params``. Arguments are checked on first use.

    .

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from lutjax.layers.linen import LogicRNN
      >>> layer = LogicRNN(16, 40)
      >>> variables = layer.init(jax.random.key(0), jnp.ones((32, 5, 16)))
      >>> layer.apply(variables, jnp.ones((32, 5, 16))).shape
      (32, 5, 40)
    """

    spec_type = _logic.LogicRNNSpec

    in_features: int | None = None
    out_features: int | None = None
    _: dataclasses.KW_ONLY
    estimator: str = "soft"
    temperature: float | int = 1.0
    feature_axis: int = -1
    dtype: DTypeLike | None = None
    param_dtype: DTypeLike = jnp.float32
    implementation: Implementation = None
    wires: Any = None
    deterministic: bool = False
    wiring: str | Wiring = "balanced"
    candidates: int = 8
    scores_init: Initializer = GAUSSIAN
    accumulate: lutjax.FixedPoint | None = None
    logits_init: Initializer = RESIDUAL

    @nn.compact
    def __call__(
        self,
        x: Shaped[Array, "..."],
        *,
        state: Shaped[Array, "..."] | None = None,
        deterministic: bool | None = None,
        temperature: Float[Array, ""] | float | None = None,
    ) -> Float[jax.Array, "..."]:
        """Return the states after each step, ``[..., length, out_features]``.

        Args:
          x: inputs ``[..., length, in_features]``.
          state: before the first step, ``[..., out_features]``: the last one of a call before this, which this continues. 0 by default.
          deterministic: whether to run the hard network; takes precedence over the field.
          temperature: in place of the field; it may be traced.
        """
        return self._run(x, deterministic, temperature=temperature, state=state)

    def from_words(
        self,
        variables: Mapping[str, Any],
        words: UInt32[Array, "inputs length *batch"],
        state: UInt32[Array, "outputs *batch"] | None = None,
    ) -> UInt32[jax.Array, "outputs length *batch"]:
        """Return the states of the hard network, for 32 sequences a word: ``[out_features, length, ...]``.

        Args:
          variables: the layer's own part of them, ``params`` and ``wires``.
          words: uint32 ``[in_features, length, ...]``, bits packed by `lutjax.pack_bits`, whatever the `feature_axis`.
          state: before the first step, ``[out_features, ...]``; 0 by default.

        Raises:
          ValueError: words or the state have another shape or dtype.
        """
        spec, arrays = self._spec_and_arrays(variables)
        y: jax.Array = spec.from_words(arrays, words, state)
        return y


class SoftLUT(_Wired):
    """Layer of tables over up to 8 inputs between 0 and 1, interpolated between their corners: `lutjax.soft_lut`.

    With ``deterministic=True`` corners above 1/2 are 1 and the others 0: bits in, bits out.

    Variables:
      table: trained, ``[out_features, 2**n_inputs]``; the first input is the lowest bit of an address.
      wires, readers, scores: as in `LogicGates`, for `n_inputs` inputs of a table.

    Args:
      in_features: inputs, numbers from 0 to 1 or bits. By default as many as the first input has.
      out_features: tables, with one output each.
      n_inputs: inputs of each table, 1 to 8.
      parameterization: meaning of the trained numbers. ``"light"``: logits; corners are their sigmoids. ``"walsh"``: Walsh
        coefficients ``c``; the logit of corner k is ``-sum_s c[s] (-1)**(number of common bits of s and k)``. Where inputs are
        bits this is the "warp" parameterization of other libraries, which take the sigmoid after the interpolation. ``"raw"``:
        numbers v, clipped to [-1, 1]; corners are ``(v + 1) / 2``. Beyond the ends only gradients that lead back pass.
      table_init: draws the table; by default `lutjax.layers.initializers.residual_table`: corners of 0.9 where the first
        input is 1, and 0.1 elsewhere.
      estimator: how gates are relaxed in training. ``"soft"``: mixtures of gates. ``"gumbel"``: mixtures with Gumbel noise on
        the logits, drawn anew in each call and the same for all samples: from the stream ``gates`` in Flax, from the key of
        `apply` in Haiku. ``"straight_through"``: the hard network forward; logits get the gradient that they have in a mixture
        of the same inputs. ``"gumbel"`` adds logistic noise to the logits of corners, and is not for raw tables.
      wiring: which inputs gates read, by name or a function as those of `lutjax.wiring`. Drawn once: ``"balanced"``: every
        input is read about equally often. ``"unique"``: likewise, and no pair of inputs is read twice. ``"butterfly"``: outputs
        of several layers depend on as many inputs as possible. ``"random"``: each wire by itself. `lutjax.wiring.Windows`,
        `lutjax.wiring.Groups`: windows of an image, groups of inputs. Learned, by trained scores, with the highest in the hard
        network: ``"top-k"``: for each input of a gate one of `candidates`; a soft layer, too, reads that one, at about the cost
        of fixed wires. ``"full"``: one of all inputs, with a product of matrices in the backward pass. ``"learnable"``: a soft
        layer reads the mixture of all candidates. ``"unique"`` is for 2 inputs.
      candidates: number of candidates of each input of a gate; even for ``"learnable"``.
      scores_init: draws their scores, as in `jax.nn.initializers`; normal(0, 1) by default.
      temperature: logits and scores are divided by it, so that a lower one is nearer to the hard network. A call takes
        another one, ``layer(x, temperature=t)``; it may be traced, as that of a schedule is.
      feature_axis: -1, or 0 where inputs and outputs come first, ``[features, ...]``: the fast layout.
      accumulate: sums of integers, the same in any order of samples and gates; see `lutjax.FixedPoint`. With a wiring that is
        drawn.
      dtype: inputs are cast to it first, and the outputs have it; by default they are not cast.
      param_dtype: dtype of logits and scores: float32, bfloat16, float16 or float64.
      implementation: which implementation runs the op; see `lutjax.bilinear_gates`.
      wires: int32 ``[out_features, 2]``, or candidates ``[out_features, 2, candidates]``, instead of drawn ones. A gate may
        read one input twice.
      deterministic: whether calls run the hard network.
      name: of the module.

    Raises:
      ValueError: a size is impossible, or a wire is not an input.

    Source: docs/logic.md, sections 3 and 4.

    In Flax Linen a trained variable is in the collection ``params``, and the others are in collections of their own, which
    `apply` needs: see `lutjax.layers.linen`. All are drawn from the stream ``params``. Arguments are checked on first use.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from lutjax.layers.linen import SoftLUT
      >>> layer = SoftLUT(16, 40, n_inputs=3)
      >>> variables = layer.init(jax.random.key(0), jnp.ones((32, 16)))
      >>> layer.apply(variables, jnp.ones((32, 16))).shape
      (32, 40)
    """

    spec_type = _logic.SoftLUTSpec

    in_features: int | None = None
    out_features: int | None = None
    _: dataclasses.KW_ONLY
    estimator: str = "soft"
    temperature: float | int = 1.0
    feature_axis: int = -1
    dtype: DTypeLike | None = None
    param_dtype: DTypeLike = jnp.float32
    implementation: Implementation = None
    wires: Any = None
    deterministic: bool = False
    wiring: str | Wiring = "balanced"
    candidates: int = 8
    scores_init: Initializer = GAUSSIAN
    accumulate: lutjax.FixedPoint | None = None
    n_inputs: int = 4
    parameterization: str = "light"
    table_init: Initializer | None = None


class BinaryLUT(_Wired):
    """Layer of tables over up to 8 inputs, addressed by their signs: `lutjax.binary_lut`.

    A bit of the address is ``x > 0``, so inputs are bits of 0 and 1, or numbers around 0. The outputs are bits too,
    ``value > 0`` of the addressed slot; slot and inputs receive their gradients, the extended finite difference, as if
    there were no threshold: in training this is the hard network already. With ``estimator="soft"`` outputs are the
    values themselves, for the last layer before a sum of groups, or before another layer of this kind, which looks at
    the sign alone. Values are clipped to [-1, 1]; beyond the ends only gradients that lead back pass.

    With ``deterministic=True`` the outputs are the bits, whatever the estimator.

    Variables:
      table: trained, ``[out_features, 2**n_inputs]``; the first input is the lowest bit of an address.
      wires, readers, scores: as in `LogicGates`, for `n_inputs` inputs of a table.

    Args:
      in_features: inputs. By default as many as the first input has.
      out_features: tables, with one output each.
      n_inputs: inputs of each table, 1 to 8.
      table_init: draws the tables; uniform(-1, 1) by default.
      estimator: ``"straight_through"`` or ``"soft"``.
      temperature: scores of learnable wiring are divided by it; their forward pass is the hard choice here.
      wiring: which inputs gates read, by name or a function as those of `lutjax.wiring`. Drawn once: ``"balanced"``: every
        input is read about equally often. ``"unique"``: likewise, and no pair of inputs is read twice. ``"butterfly"``: outputs
        of several layers depend on as many inputs as possible. ``"random"``: each wire by itself. `lutjax.wiring.Windows`,
        `lutjax.wiring.Groups`: windows of an image, groups of inputs. Learned, by trained scores, with the highest in the hard
        network: ``"top-k"``: for each input of a gate one of `candidates`; a soft layer, too, reads that one, at about the cost
        of fixed wires. ``"full"``: one of all inputs, with a product of matrices in the backward pass. ``"learnable"``: a soft
        layer reads the mixture of all candidates. ``"unique"`` is for 2 inputs.
      candidates: number of candidates of each input of a gate; even for ``"learnable"``.
      scores_init: draws their scores, as in `jax.nn.initializers`; normal(0, 1) by default.
      feature_axis: -1, or 0 where inputs and outputs come first, ``[features, ...]``: the fast layout.
      accumulate: sums of integers, the same in any order of samples and gates; see `lutjax.FixedPoint`. With a wiring that is
        drawn.
      dtype: inputs are cast to it first, and the outputs have it; by default they are not cast.
      param_dtype: dtype of logits and scores: float32, bfloat16, float16 or float64.
      implementation: which implementation runs the op; see `lutjax.bilinear_gates`.
      wires: int32 ``[out_features, 2]``, or candidates ``[out_features, 2, candidates]``, instead of drawn ones. A gate may
        read one input twice.
      deterministic: whether calls run the hard network.
      name: of the module.

    Raises:
      ValueError: a size is impossible, or a wire is not an input.

    Source: docs/logic.md, section 3.

    In Flax Linen a trained variable is in the collection ``params``, and the others are in collections of their own, which
    `apply` needs: see `lutjax.layers.linen`. All are drawn from the stream ``params``. Arguments are checked on first use.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from lutjax.layers.linen import BinaryLUT
      >>> layer = BinaryLUT(16, 40, n_inputs=3)
      >>> variables = layer.init(jax.random.key(0), jnp.ones((32, 16)))
      >>> layer.apply(variables, jnp.ones((32, 16))).shape
      (32, 40)
    """

    spec_type = _logic.BinaryLUTSpec

    in_features: int | None = None
    out_features: int | None = None
    _: dataclasses.KW_ONLY
    estimator: str = "straight_through"
    temperature: float | int = 1.0
    feature_axis: int = -1
    dtype: DTypeLike | None = None
    param_dtype: DTypeLike = jnp.float32
    implementation: Implementation = None
    wires: Any = None
    deterministic: bool = False
    wiring: str | Wiring = "balanced"
    candidates: int = 8
    scores_init: Initializer = GAUSSIAN
    accumulate: lutjax.FixedPoint | None = None
    n_inputs: int = 4
    table_init: Initializer = uniform_table


class LogicConv(_Wired):
    """Layer that convolves an image with trees of gates, and takes the or of neighboring places.

    A kernel is a complete tree of gates, whose leaves are values in a window of the image. Its gates and wires are the same
    at each place of the window. The output is the largest of ``pool`` places, for bits their or, and its gradient goes to the
    first of the largest. Gates read the image itself: windows are not copied.

    Variables:
      logits: trained, ``[n_kernels * nodes of a tree, 16]``, the first level first. A tree has ``n_inputs**(depth - 1) + ... + 1`` nodes.
      table: trained, ``[n_kernels * nodes of a tree, 2**n_inputs]``, instead of logits, where nodes are tables.
      wires: int32 ``[n_kernels * n_inputs**(depth - 1), n_inputs]``: the leaves, ids in the window in the order row, column, channel.
      readers: int32 ``[channels, most readers]``: ``lutjax.readers(wires % channels, channels)``. Absent if it would be mostly empty.

    Args:
      in_shape: height, width and channels of the image. Inputs are ``[..., height, width, channels]``; with
        ``feature_axis=0`` ``[channels, height, width, ...]``. Outputs are laid out alike.
      n_kernels: trees, and channels of the output.
      kernel: height and width of a window, or one number for both.
      depth: levels of gates.
      stride: from one window to the next, in rows and in columns.
      padding: rows and columns of zeros around the image; less than `kernel`.
      pool: height and width of the groups of places whose maximum is taken; it divides the places and their padding.
      pool_padding: rows and columns around the places that groups may reach into, where there is nothing; less than `pool`.
      channels_per_kernel: channels that a tree reads, drawn for each so that all are read by about as many trees. None: all.
      wiring: which values of a window leaves read: ``"balanced"``: all about equally often; ``"random"``: each is drawn by
        itself.
      n_inputs: inputs of a node, 2 to 8.
      parameterization: ``"gates"``: nodes are gates of two inputs, as in `LogicGates`. ``"light"``, ``"walsh"``, ``"raw"``:
        nodes are tables, as in `SoftLUT`.
      logits_init: draws the logits; by default `lutjax.layers.initializers.residual_gates()`: a gate passes on its first
        input with probability 0.9.
      table_init: draws the tables; by default `lutjax.layers.initializers.residual_table`.
      wires: explicit leaves, instead of drawn ones; those of `lutjax.wiring.trees` are ``leaves.reshape(-1, n_inputs)``.
      estimator: how gates are relaxed in training. ``"soft"``: mixtures of gates. ``"gumbel"``: mixtures with Gumbel noise on
        the logits, drawn anew in each call and the same for all samples: from the stream ``gates`` in Flax, from the key of
        `apply` in Haiku. ``"straight_through"``: the hard network forward; logits get the gradient that they have in a mixture
        of the same inputs.
      temperature: logits and scores are divided by it, so that a lower one is nearer to the hard network. A call takes
        another one, ``layer(x, temperature=t)``; it may be traced, as that of a schedule is.
      feature_axis: -1, or 0 where inputs and outputs come first, ``[features, ...]``: the fast layout.
      dtype: inputs are cast to it first, and the outputs have it; by default they are not cast.
      param_dtype: dtype of logits and scores: float32, bfloat16, float16 or float64.
      implementation: which implementation runs the op; see `lutjax.bilinear_gates`.
      deterministic: whether calls run the hard network.
      name: of the module.

    Raises:
      ValueError: a size is impossible, or a wire is not in the window.

    Source: docs/logic.md, section 8.

    In Flax Linen a trained variable is in the collection ``params``, and the others are in collections of their own, which
    `apply` needs: see `lutjax.layers.linen`. All are drawn from the stream ``params``. Arguments are checked on first use.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from lutjax.layers.linen import LogicConv
      >>> layer = LogicConv((8, 8, 3), 16, kernel=3, depth=3, padding=1, pool=2)
      >>> variables = layer.init(jax.random.key(0), jnp.ones((32, 8, 8, 3)))
      >>> layer.apply(variables, jnp.ones((32, 8, 8, 3))).shape
      (32, 4, 4, 16)
    """

    spec_type = _logic_images.LogicConvSpec

    in_shape: tuple[int, int, int]
    n_kernels: int
    _: dataclasses.KW_ONLY
    estimator: str = "soft"
    temperature: float | int = 1.0
    feature_axis: int = -1
    dtype: DTypeLike | None = None
    param_dtype: DTypeLike = jnp.float32
    implementation: Implementation = None
    wires: Any = None
    deterministic: bool = False
    kernel: Size = 3
    depth: int = 3
    stride: Size = 1
    padding: Size = 0
    pool: Size = 1
    pool_padding: Size = 0
    channels_per_kernel: int | None = None
    wiring: str = "balanced"
    n_inputs: int = 2
    parameterization: str = "gates"
    logits_init: Initializer = RESIDUAL
    table_init: Initializer | None = None

    def from_words(
        self, variables: Mapping[str, Any], words: UInt32[Array, "channels height width *batch"]
    ) -> UInt32[jax.Array, "..."]:
        """Return the bits of the hard trees, for 32 samples a word: ``[kernels, rows, columns, ...]``.

        Args:
          variables: the layer's own part of them, ``params`` and ``wires``.
          words: uint32 ``[channels, height, width, ...]``, bits packed by `lutjax.pack_bits`, whatever the `feature_axis`.

        Raises:
          ValueError: words have another shape or dtype.
        """
        spec, arrays = self._spec_and_arrays(variables)
        y: jax.Array = spec.from_words(arrays, words)
        return y


class GroupSum(Layer):
    """Layer that sums contiguous groups of features and divides by a temperature: votes of gates for classes.

    Outputs ``[..., k]`` for inputs ``[..., features]``; ``[k, ...]`` for ``[features, ...]`` with ``feature_axis=0``.

    Args:
      k: groups, and outputs; it divides the features.
      tau: the sums are divided by it.
      feature_axis: -1, or 0 where features come first.
      accumulate: sums of integers, the same in any order; see `lutjax.FixedPoint`.
      name: of the module.

    Raises:
      ValueError: a size is impossible; in a call, `k` does not divide the features.

    Source: docs/logic.md, section 4.

    In Flax Linen a trained variable is in the collection ``params``, and the others are in collections of their own, which
    `apply` needs: see `lutjax.layers.linen`. All are drawn from the stream ``params``. Arguments are checked on first use.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from lutjax.layers.linen import GroupSum
      >>> layer = GroupSum(2, tau=2.0)
      >>> variables = layer.init(jax.random.key(0), jnp.ones((32, 6)))
      >>> layer.apply(variables, jnp.ones((32, 6))).shape
      (32, 2)
    """

    spec_type = _logic.GroupSumSpec

    k: int
    tau: float | int = 1.0
    _: dataclasses.KW_ONLY
    feature_axis: int = -1
    accumulate: lutjax.FixedPoint | None = None

    @nn.compact
    def __call__(self, x: Shaped[Array, "..."]) -> Float[jax.Array, "..."]:
        """Return sums of groups."""
        spec, arrays = self._bound(x)
        y: jax.Array = spec(arrays, x)
        return y


class Thermometer(Switched):
    """Layer that turns numbers into bits: ``x > threshold`` for each of a feature's thresholds.

    Outputs ``[..., in_features * n_thresholds]``, the bits of a feature side by side, for inputs ``[..., in_features]``;
    with ``feature_axis=0`` the first axis. NaN gives bits of 0.

    Variables:
      thresholds: ``[in_features, n_thresholds]``, trained only if learnable.
      widths: ``[in_features]``, not trained; only where they are given.

    Args:
      in_features: numbers. By default as many as the first input has.
      n_thresholds: thresholds, and bits, of each.
      learnable: whether thresholds are trained. They may then cross. Otherwise neither inputs nor thresholds get a gradient.
      gradient: how learnable thresholds get theirs. ``"straight_through"``: the outputs are bits, with the gradient of a
        sigmoid of ``(x - threshold) / temperature``. ``"soft"``: the outputs are that sigmoid, and bits with
        ``deterministic=True``.
      temperature: width of that sigmoid, in units of `x`.
      widths: ``[in_features]``, positive factors of `temperature`, where features have different units.
      feature_axis: -1, or 0 where features come first.
      dtype: inputs are cast to it first, and the outputs have it; by default they are not cast.
      param_dtype: dtype of the thresholds.
      thresholds: `lutjax.thermometer_thresholds` of the training data; by default evenly spaced in (0, 1).
      deterministic: whether calls give bits.
      name: of the module.

    Raises:
      ValueError: a size is impossible, thresholds do not fit or are NaN, or widths are not positive.

    Source: docs/logic.md, section 4.

    In Flax Linen a trained variable is in the collection ``params``, and the others are in collections of their own, which
    `apply` needs: see `lutjax.layers.linen`. All are drawn from the stream ``params``. Arguments are checked on first use.

    Example:
      >>> import jax, jax.numpy as jnp, lutjax
      >>> from lutjax.layers.linen import Thermometer
      >>> thresholds = lutjax.thermometer_thresholds(jnp.array([[0.0], [3.0]]), 2)
      >>> layer = Thermometer(1, 2, thresholds=thresholds)
      >>> y, variables = layer.init_with_output(jax.random.key(0), jnp.array([[1.5]]))
      >>> print(y, variables["thresholds"]["thresholds"])
      [[1. 0.]] [[1. 2.]]
    """

    spec_type = _logic.ThermometerSpec

    in_features: int | None = None
    n_thresholds: int | None = None
    _: dataclasses.KW_ONLY
    learnable: bool = False
    gradient: str = "straight_through"
    temperature: float | int = 1.0
    feature_axis: int = -1
    dtype: DTypeLike | None = None
    param_dtype: DTypeLike = jnp.float32
    thresholds: Any = None
    widths: Any = None
    deterministic: bool = False
