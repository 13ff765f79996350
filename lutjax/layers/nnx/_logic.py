"""Differentiable logic for Flax NNX."""

from typing import Any, ClassVar

import jax
from flax import nnx
from jaxtyping import Float, Shaped

from lutjax._typing import Array
from lutjax.layers import _logic, _spec
from lutjax.layers._spec import takes
from lutjax.layers.nnx._layer import Layer


class _Logic(Layer):
    """What layers share that have a soft and a hard form."""

    deterministic: bool

    def __call__(
        self, x: Shaped[Array, "..."], *, deterministic: bool | None = None
    ) -> Float[jax.Array, "..."]:
        """Outputs for inputs; `deterministic` takes precedence over the layer's own."""
        hard = self.deterministic if deterministic is None else deterministic
        return self.spec(self._arrays(), x, deterministic=hard)

    def set_view(self, deterministic: bool | None = None) -> None:
        """Class method used by ``nnx.view``.

        Args:
          deterministic: whether calls run the hard network.
        """
        if deterministic is not None:
            self.deterministic = deterministic


class _Gates(_Logic):
    """Layers with wires and estimators."""

    spec_type: ClassVar[type[_spec.Spec]]

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        _spec.takes_fields(cls)

    def _build_gates(
        self, *sizes: Any, wires: Any, deterministic: bool, rngs: nnx.Rngs, **options: Any
    ) -> None:
        self._build(self.spec_type, *sizes, given={"wires": wires}, rngs=rngs, **options)
        self.deterministic = deterministic
        self.rngs = rngs["gates"].fork() if self.spec.random else nnx.data(None)

    def __call__(
        self,
        x: Shaped[Array, "..."],
        *,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | nnx.RngStream | None = None,
    ) -> Float[jax.Array, "..."]:
        """Outputs for inputs.

        Args:
          x: inputs.
          deterministic: whether to run the hard network; takes precedence over the layer's own.
          rngs: for the noise of the estimator ``"gumbel"``, instead of the layer's own stream ``gates``.
        """
        hard = self.deterministic if deterministic is None else deterministic
        key = None
        if self.spec.random and not hard:
            stream: Any = self.rngs if rngs is None else rngs
            key = stream["gates"]() if isinstance(stream, nnx.Rngs) else stream()
        return self.spec(self._arrays(), x, deterministic=hard, key=key)


class _Wired(_Gates):
    """Layers whose gates read inputs of a vector."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        deterministic: bool = False,
        wires: Any = None,
        rngs: nnx.Rngs,
        **options: Any,
    ):
        self._build_gates(
            in_features, out_features, wires=wires, deterministic=deterministic, rngs=rngs, **options
        )

    def truth_tables(self) -> tuple[jax.Array, jax.Array]:
        """The hard network for `lutjax.packed_lut`: wires ``[G, n]`` and bool tables ``[G, 2**n]``."""
        return self.spec.truth_tables(self._arrays())


class LogicGates(_Wired):
    """Differentiable logic gates of two inputs, each a mixture of the sixteen that there are.

    State: ``logits`` (`nnx.Param`, ``[out_features, 16]``), ``wires`` (`Wires`, int32 ``[out_features, 2]``)
    and ``readers`` (`Wires`, int32 ``[in_features, fan-out]``: who reads each input, for the gradient; left
    out where a few inputs of explicit wires are read by so many gates that the list would be mostly empty).
    With learnable wiring ``wires`` is ``[out_features, 2, candidates]``, and there are ``scores``
    (`nnx.Param`) of that shape.

    With ``deterministic=True``, of a call, a layer or a view (``nnx.view(model, deterministic=True)``,
    ``model.eval()``), each gate is the one with the largest logit: bits in, bits out.

    Args:
      in_features: inputs, numbers from 0 to 1 or bits.
      out_features: gates, with one output each.
      wiring: ``"balanced"``, every input is read about equally often; ``"unique"``, and no pair of inputs
        twice; ``"learnable"``, each input of a gate is a mixture of `candidates` by trained scores, and in
        the hard network the one with the highest.
      candidates: of each input of a gate with learnable wiring, an even number.
      scores_init: draws their scores, as in `jax.nn.initializers`; normal(0, 1) by default.
      logits_init: draws the logits; by default `lutjax.layers.initializers.residual_gates()`: a gate passes
        on its first input with probability 0.9. ``jax.nn.initializers.normal(1.0)`` is the other usual one.
      estimator: what is run while training. ``"soft"``: mixtures of gates. ``"gumbel"``: mixtures with Gumbel
        noise on the logits, drawn anew in each call and the same for all samples. ``"straight_through"``: the
        hard network; logits get the gradient that they have in a mixture of the same inputs.
      temperature: logits and scores are divided by it.
      feature_axis: -1, or 0 where inputs and outputs come first, ``[features, ...]``: the fast layout.
      dtype: inputs are cast to it first, and the outputs have it; by default they are not cast.
      param_dtype: dtype of logits and scores: float32, bfloat16, float16 or float64.
      implementation: which implementation runs the op; see `lutjax.bilinear_gates`.
      deterministic: whether calls run the hard network.
      wires: int32 ``[out_features, 2]``, instead of drawn ones. A gate may read one input twice.
      rngs: its ``params`` stream draws everything, a fork of its ``gates`` stream the noise.

    Raises:
      ValueError: a size is impossible, there are not that many different pairs, or a wire is not an input.

    Source: docs/logic.md, sections 1 and 4.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from lutjax.layers.nnx import GroupSum, LogicGates
      >>> rngs = nnx.Rngs(0)
      >>> model = nnx.Sequential(LogicGates(16, 40, rngs=rngs), LogicGates(40, 20, rngs=rngs), GroupSum(10))
      >>> model.layers[0].logits.shape, model.layers[0].wires.shape, model.layers[0].readers.shape
      ((40, 16), (40, 2), (16, 5))
      >>> bits = jnp.ones((32, 16))
      >>> model(bits).shape
      (32, 10)
      >>> hard = nnx.view(model, deterministic=True)
      >>> print(hard(bits)[0])
      [2. 2. 2. 2. 2. 2. 2. 2. 2. 2.]
    """

    spec_type = _logic.LogicGatesSpec


class SoftLUT(_Wired):
    """Tables of up to 8 inputs between 0 and 1: the multilinear interpolation of corners.

    State: ``table`` (`nnx.Param`, ``[out_features, 2**n_inputs]``; the first input is the lowest bit of an
    address), ``wires``, ``readers`` and ``scores`` as in `LogicGates`.

    With ``deterministic=True`` corners above 1/2 are 1 and the others 0: bits in, bits out.

    Args:
      in_features: inputs, numbers from 0 to 1 or bits.
      out_features: tables, with one output each.
      n_inputs: inputs of each table, 1 to 8.
      parametrisation: what is trained. ``"light"``: logits; corners are their sigmoids. ``"walsh"``: Walsh
        coefficients ``c``; the logit of corner k is ``-sum_s c[s] (-1)**(number of common bits of s and k)``.
        Where inputs are bits that is the "warp" of others, who take the sigmoid after the interpolation.
        ``"raw"``: numbers v, clipped to [-1, 1]; corners are ``(v + 1) / 2``. Beyond the ends only gradients
        that lead back pass.
      table_init: draws it; by default `lutjax.layers.initializers.residual_table`: corners of 0.9 where the
        first input is 1, and 0.1.
      estimator: as in `LogicGates`; ``"gumbel"`` adds logistic noise to the logits of corners, and is not for
        raw tables.
      wiring, candidates, scores_init, temperature, feature_axis, dtype, param_dtype, implementation,
        deterministic, wires, rngs: as in `LogicGates`; ``"unique"`` wiring is for 2 inputs.

    Raises:
      ValueError: a size is impossible, or a wire is not an input.

    Source: docs/logic.md, sections 3 and 4.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from lutjax.layers.nnx import SoftLUT
      >>> layer = SoftLUT(16, 40, n_inputs=6, parametrisation="walsh", rngs=nnx.Rngs(0))
      >>> layer.table.shape, layer.wires.shape
      ((40, 64), (40, 6))
      >>> layer(jnp.ones((32, 16))).shape
      (32, 40)
    """

    spec_type = _logic.SoftLUTSpec


class BinaryLUT(_Wired):
    """Tables of up to 8 inputs addressed by signs, with the extended finite difference as gradient.

    A bit of the address is ``x > 0``, so inputs are bits of 0 and 1, or numbers around 0. The outputs are
    bits too, ``value > 0`` of the addressed slot; slot and inputs receive their gradients as if there were no
    threshold: while training this is the hard network already. With ``estimator="soft"`` they are the values
    themselves, as of the last layer before a sum of groups, or before another layer of this kind, which looks
    at the sign alone. Values are clipped to [-1, 1]; beyond the ends only gradients that lead back pass.

    State: ``table`` (`nnx.Param`, ``[out_features, 2**n_inputs]``; the first input is the lowest bit of an
    address), ``wires``, ``readers`` and ``scores`` as in `LogicGates`.

    With ``deterministic=True`` the outputs are the bits, whatever the estimator.

    Args:
      in_features: inputs.
      out_features: tables, with one output each.
      n_inputs: inputs of each table, 1 to 8.
      table_init: draws the tables; uniform(-1, 1) by default.
      estimator: ``"straight_through"`` or ``"soft"``.
      temperature: of the scores of learnable wiring, whose forward pass is the hard choice here.
      wiring, candidates, scores_init, feature_axis, dtype, param_dtype, implementation, deterministic, wires,
        rngs: as in `LogicGates`; ``"unique"`` wiring is for 2 inputs.

    Raises:
      ValueError: a size is impossible, or a wire is not an input.

    Source: docs/logic.md, section 3.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from lutjax.layers.nnx import BinaryLUT
      >>> layer = BinaryLUT(16, 40, n_inputs=6, rngs=nnx.Rngs(0))
      >>> layer(jnp.ones((32, 16))).shape
      (32, 40)
    """

    spec_type = _logic.BinaryLUTSpec


class LogicTree(_Gates):
    """Convolution of an image with trees of gates, and the or of neighbouring places.

    A kernel is a complete binary tree of gates, whose leaves are drawn in a window of the image. It is the
    same at each place, gates and wires; the output is the maximum over ``pool x pool`` places, for bits
    their or.

    State: ``logits`` (`nnx.Param`, ``[n_kernels * (2**depth - 1), 16]``, the first level first), ``wires``
    (`Wires`, int32 ``[n_kernels * 2**(depth - 1), 2]``: the leaves, ids in the window in the order row,
    column, channel) and ``readers`` as in `LogicGates`.

    Args:
      in_shape: height, width and channels of the image. Inputs are ``[..., height, width, channels]``; with
        ``feature_axis=0`` ``[channels, height, width, ...]``. Outputs are laid out alike.
      n_kernels: trees, and channels of the output.
      kernel: height and width of a window.
      depth: levels of gates.
      stride: from one window to the next.
      padding: rows and columns of zeros around the image.
      pool: height and width of the groups of places whose maximum is taken; it divides the places.
      wires: as above, instead of drawn ones; those of `lutjax.wiring.trees` are ``leaves.reshape(-1, 2)``.
      logits_init, estimator, temperature, feature_axis, dtype, param_dtype, implementation, deterministic,
        rngs: as in `LogicGates`.

    Raises:
      ValueError: a size is impossible, or a wire is not in the window.

    Source: docs/logic.md, section 4.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from lutjax.layers.nnx import LogicTree
      >>> layer = LogicTree((8, 8, 3), 16, kernel=3, depth=3, padding=1, pool=2, rngs=nnx.Rngs(0))
      >>> layer(jnp.ones((32, 8, 8, 3))).shape
      (32, 4, 4, 16)
    """

    spec_type = _logic.LogicTreeSpec

    def __init__(
        self,
        in_shape: tuple[int, int, int],
        n_kernels: int,
        *,
        deterministic: bool = False,
        wires: Any = None,
        rngs: nnx.Rngs,
        **options: Any,
    ):
        self._build_gates(in_shape, n_kernels, wires=wires, deterministic=deterministic, rngs=rngs, **options)


class GroupSum(Layer):
    """Sums of contiguous groups of features over a temperature: votes of gates for classes.

    Outputs ``[..., k]`` for inputs ``[..., features]``; ``[k, ...]`` for ``[features, ...]`` with
    ``feature_axis=0``.

    Args:
      k: groups; it divides the features.
      tau: the sums are divided by it.
      feature_axis: -1, or 0 where features come first.

    Raises:
      ValueError: a size is impossible; in a call, `k` does not divide the features.

    Source: docs/logic.md, section 4.

    Example:
      >>> import jax.numpy as jnp
      >>> from lutjax.layers.nnx import GroupSum
      >>> print(GroupSum(2, tau=2.0)(jnp.array([1.0, 1.0, 1.0, 0.0, 0.0, 1.0])))
      [1.5 0.5]
    """

    @takes(_logic.GroupSumSpec)
    def __init__(self, k: int, tau: float | int = 1.0, **options: Any):
        self._build(_logic.GroupSumSpec, k, tau, given={}, rngs=None, **options)

    def __call__(self, x: Shaped[Array, "..."]) -> Float[jax.Array, "..."]:
        """Sums of groups."""
        return self.spec(self._arrays(), x)


class Thermometer(_Logic):
    """Numbers as bits: ``x > threshold`` for each of a feature's thresholds.

    State: ``thresholds`` ``[in_features, n_thresholds]``: `Thresholds`, never trained, or `nnx.Param` if
    learnable.

    Outputs ``[..., in_features * n_thresholds]``, the bits of a feature side by side, for inputs
    ``[..., in_features]``; with ``feature_axis=0`` the first axis. NaN gives bits of 0.

    Args:
      in_features: numbers.
      n_thresholds: thresholds, and bits, of each.
      thresholds: `lutjax.thermometer_thresholds` of the training data; by default n of them evenly in (0, 1).
      learnable: whether thresholds are trained. They may then cross; otherwise there is no gradient of
        anything.
      gradient: of learnable ones. ``"straight_through"``: the outputs are bits, with the gradient of a
        sigmoid of ``(x - threshold) / temperature``. ``"soft"``: they are that sigmoid, and bits with
        ``deterministic=True``.
      temperature: width of that sigmoid, in units of `x`.
      feature_axis: -1, or 0 where features come first.
      dtype: inputs are cast to it first, and the outputs have it; by default they are not cast.
      param_dtype: dtype of the thresholds.
      deterministic: whether calls give bits.

    Raises:
      ValueError: a size is impossible, thresholds do not fit, or are NaN.

    Source: docs/logic.md, section 4.

    Example:
      >>> import jax.numpy as jnp, lutjax
      >>> from lutjax.layers.nnx import Thermometer
      >>> data = jnp.array([[0.0, 10.0], [1.0, 11.0], [2.0, 12.0], [7.0, 30.0]])
      >>> thresholds = lutjax.thermometer_thresholds(data, 3, method="distributive")
      >>> print(Thermometer(2, 3, thresholds=thresholds)(jnp.array([[1.5, 13.0]])))
      [[1. 0. 0. 1. 1. 0.]]
    """

    @takes(_logic.ThermometerSpec)
    def __init__(
        self,
        in_features: int,
        n_thresholds: int,
        *,
        thresholds: Any = None,
        deterministic: bool = False,
        **options: Any,
    ):
        given = {"thresholds": thresholds}
        self._build(_logic.ThermometerSpec, in_features, n_thresholds, given=given, rngs=None, **options)
        self.deterministic = deterministic
