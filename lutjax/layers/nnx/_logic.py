"""Differentiable logic for Flax NNX; `lutjax.layers._logic` documents the arguments."""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import UInt32

import lutjax
from lutjax._typing import Array
from lutjax.dispatch.registry import Implementation
from lutjax.layers import _logic, _logic_images
from lutjax.layers._logic import GAUSSIAN, RESIDUAL, uniform_table
from lutjax.layers._spec import Initializer, Inputs, Mode, Outputs, Scalar
from lutjax.layers.nnx._layer import Layer, Noise, Switched, builds
from lutjax.layers.nnx._variables import Param, Thresholds, Wires
from lutjax.ops.logic_trees import logic_trees
from lutjax.wiring._names import Wiring
from lutjax.wiring._sizes import Size


class _Wired(Switched):
    estimator: str
    feature_axis: int

    wires: Wires  # not with the wiring "full"
    readers: Wires  # of drawn wires
    scores: Param  # of learned wires

    def truth_tables(self) -> tuple[jax.Array, jax.Array]:
        """Return the hard network for `packed_lut`: wires ``[G, n]`` and tables ``[G, 2**n]``."""
        spec, arrays = self._bind_arrays()
        wires, tables = spec.truth_tables(arrays)
        return wires, tables

    def expected_needs(self, temperature: Scalar = None) -> tuple[jax.Array, jax.Array]:
        """Return the expected number of needed inputs, and the probability of any, ``[G]`` each."""
        spec, arrays = self._bind_arrays()
        inputs, any_input = spec.expected_needs(arrays, temperature)
        return inputs, any_input


class _Gates(_Wired):
    in_features: int
    out_features: int

    logits: Param

    @builds
    def __init__(
        self, in_features: int, out_features: int, *, estimator: str = "soft",
        temperature: float | int = 1.0, feature_axis: int = -1, dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32, implementation: Implementation = None,
        wires: Any = None, deterministic: bool = False, wiring: str | Wiring = "balanced",
        candidates: int = 8, scores_init: Initializer = GAUSSIAN,
        accumulate: lutjax.FixedPoint | None = None, logits_init: Initializer = RESIDUAL,
        rngs: nnx.Rngs,
    ) -> None: ...  # fmt: skip


class LogicGates(_Gates):
    """Differentiable two-input logic gates: `lutjax.bilinear_gates`.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from lutjax.layers.nnx import GroupSum, LogicGates
      >>> model = nnx.Sequential(LogicGates(16, 40, rngs=nnx.Rngs(0)), GroupSum(10))
      >>> nnx.view(model, deterministic=True)(jnp.ones((32, 16))).shape
      (32, 10)
    """

    spec_type = _logic.LogicGatesSpec

    def __call__(
        self, x: Inputs, *, deterministic: Mode = None, temperature: Scalar = None,
        rngs: Noise = None,
    ) -> Outputs:  # fmt: skip
        """Return outputs for inputs; other arguments take precedence over the layer's own."""
        call = self._call(deterministic, rngs, temperature=temperature)
        return call.run(lutjax.bilinear_gates, x)


class LogicRNN(_Gates):
    """Recurrent layer of differentiable logic gates."""

    spec_type = _logic.LogicRNNSpec

    def __call__(
        self, x: Inputs, *, state: Inputs | None = None, deterministic: Mode = None,
        temperature: Scalar = None, rngs: Noise = None,
    ) -> Outputs:  # fmt: skip
        """Return the states after each step, ``[..., length, out_features]``.

        The state ``[..., out_features]`` before the first step is 0 by default; pass the last state
        of a call to continue it.
        """
        call = self._call(deterministic, rngs, temperature=temperature)
        return call.run(lutjax.bilinear_gates, x, state=state)  # in each step

    def from_words(
        self,
        words: UInt32[Array, "inputs length *batch"],
        state: UInt32[Array, " outputs *batch"] | None = None,
    ) -> UInt32[jax.Array, "outputs length *batch"]:
        """Return the hard-network states of 32 sequences per word: ``[out_features, length, ...]``.

        Words ``[in_features, length, ...]`` and states ``[out_features, ...]`` are uint32.
        """
        spec, arrays = self._bind_arrays()
        y: jax.Array = spec.from_words(arrays, words, state)
        return y


class SoftLUT(_Wired):
    """Interpolated tables over inputs between 0 and 1: `lutjax.soft_lut`."""

    spec_type = _logic.SoftLUTSpec

    in_features: int
    out_features: int
    n_inputs: int

    table: Param

    @builds
    def __init__(
        self, in_features: int, out_features: int, *, estimator: str = "soft",
        temperature: float | int = 1.0, feature_axis: int = -1, dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32, implementation: Implementation = None,
        wires: Any = None, deterministic: bool = False, wiring: str | Wiring = "balanced",
        candidates: int = 8, scores_init: Initializer = GAUSSIAN,
        accumulate: lutjax.FixedPoint | None = None, n_inputs: int = 4,
        parameterization: str = "light", table_init: Initializer | None = None, rngs: nnx.Rngs,
    ) -> None: ...  # fmt: skip

    def __call__(
        self, x: Inputs, *, deterministic: Mode = None, temperature: Scalar = None,
        rngs: Noise = None,
    ) -> Outputs:  # fmt: skip
        """Return outputs for inputs; arguments as in a call of `LogicGates`."""
        return self._call(deterministic, rngs, temperature=temperature).run(lutjax.soft_lut, x)


class BinaryLUT(_Wired):
    """Tables addressed by the signs of their inputs: `lutjax.binary_lut`."""

    spec_type = _logic.BinaryLUTSpec

    in_features: int
    out_features: int
    n_inputs: int

    table: Param

    @builds
    def __init__(
        self, in_features: int, out_features: int, *, estimator: str = "straight_through",
        temperature: float | int = 1.0, feature_axis: int = -1, dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32, implementation: Implementation = None,
        wires: Any = None, deterministic: bool = False, wiring: str | Wiring = "balanced",
        candidates: int = 8, scores_init: Initializer = GAUSSIAN,
        accumulate: lutjax.FixedPoint | None = None, n_inputs: int = 4,
        table_init: Initializer = uniform_table, rngs: nnx.Rngs,
    ) -> None: ...  # fmt: skip

    def __call__(
        self, x: Inputs, *, deterministic: Mode = None, temperature: Scalar = None,
        rngs: Noise = None,
    ) -> Outputs:  # fmt: skip
        """Return outputs for inputs; arguments as in a call of `LogicGates`."""
        return self._call(deterministic, rngs, temperature=temperature).run(lutjax.binary_lut, x)


def in_sequence(
    layers: Iterable[LogicGates | SoftLUT | BinaryLUT], x: Inputs, *, deterministic: Mode,
    temperature: Scalar, rngs: nnx.Rngs | None,
) -> Outputs:  # fmt: skip
    """Return the outputs of consecutive layers; equal layers share one gate-mixture computation."""
    calls = [layer._call(deterministic, rngs, temperature=temperature) for layer in layers]
    return _logic.in_sequence(calls, x)


class LogicConv(_Wired):
    """Convolution with trees of gates."""

    spec_type = _logic_images.LogicConvSpec

    in_shape: tuple[int, int, int]
    out_shape: tuple[int, int, int]
    n_kernels: int

    logits: Param  # gate logits
    table: Param  # alternative: table values

    @builds
    def __init__(
        self, in_shape: tuple[int, int, int], n_kernels: int, *, estimator: str = "soft",
        temperature: float | int = 1.0, feature_axis: int = -1, dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32, implementation: Implementation = None,
        wires: Any = None, deterministic: bool = False, kernel: Size = 3, depth: int = 3,
        stride: Size = 1, padding: Size = 0, pool: Size = 1, pool_padding: Size = 0,
        channels_per_kernel: int | None = None, wiring: str = "balanced", n_inputs: int = 2,
        parameterization: str = "gates", logits_init: Initializer = RESIDUAL,
        table_init: Initializer | None = None, rngs: nnx.Rngs,
    ) -> None: ...  # fmt: skip

    def __call__(
        self, x: Inputs, *, deterministic: Mode = None, temperature: Scalar = None,
        rngs: Noise = None,
    ) -> Outputs:  # fmt: skip
        """Return ``[..., *out_shape]`` for images; arguments as in a call of `LogicGates`."""
        return self._call(deterministic, rngs, temperature=temperature).run(logic_trees, x)

    def from_words(
        self, words: UInt32[Array, "channels height width *batch"]
    ) -> UInt32[jax.Array, "..."]:
        """Return hard-tree bits, 32 samples per uint32 word: ``[kernels, rows, columns, ...]``."""
        spec, arrays = self._bind_arrays()
        y: jax.Array = spec.from_words(arrays, words)
        return y


class GroupSum(Layer):
    """Sums of contiguous groups of features.

    Example:
      >>> import jax.numpy as jnp
      >>> from lutjax.layers.nnx import GroupSum
      >>> print(GroupSum(2, tau=2.0)(jnp.array([1.0, 1.0, 1.0, 0.0, 0.0, 1.0])))
      [1.5 0.5]
    """

    spec_type = _logic.GroupSumSpec

    k: int
    out_features: int
    feature_axis: int

    @builds
    def __init__(
        self, k: int, tau: float | int = 1.0, *, feature_axis: int = -1,
        accumulate: lutjax.FixedPoint | None = None,
    ) -> None: ...  # fmt: skip

    def __call__(self, x: Inputs) -> Outputs:
        """Return the group sums."""
        y: jax.Array = self.spec.sum_groups(x)
        return y


class Thermometer(Switched):
    """Thresholds that turn numbers into bits.

    Example:
      >>> import jax.numpy as jnp, lutjax
      >>> from lutjax.layers.nnx import Thermometer
      >>> data = jnp.array([[0.0, 10.0], [1.0, 11.0], [2.0, 12.0], [7.0, 30.0]])
      >>> thresholds = lutjax.thermometer_thresholds(data, 3, method="distributive")
      >>> print(Thermometer(2, 3, thresholds=thresholds)(jnp.array([[1.5, 13.0]])))
      [[1. 0. 0. 1. 1. 0.]]
    """

    spec_type = _logic.ThermometerSpec

    in_features: int
    out_features: int
    n_thresholds: int
    feature_axis: int

    thresholds: Param | Thresholds
    widths: Thresholds

    @builds
    def __init__(
        self, in_features: int, n_thresholds: int, *, learnable: bool = False,
        gradient: str = "straight_through", temperature: float | int = 1.0, feature_axis: int = -1,
        dtype: DTypeLike | None = None, param_dtype: DTypeLike = jnp.float32,
        thresholds: Any = None, widths: Any = None, deterministic: bool = False,
    ) -> None: ...  # fmt: skip

    def __call__(self, x: Inputs, *, deterministic: Mode = None) -> Outputs:
        """Return the bits for inputs; `deterministic` takes precedence over the layer's own."""
        call = self._call(deterministic)
        y: jax.Array = call.spec.compare(x, **call.arrays, **call.mode)
        return y
