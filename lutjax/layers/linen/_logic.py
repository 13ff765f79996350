"""Differentiable logic for Flax Linen; `lutjax.layers._logic` has the arguments of the layers."""

from collections.abc import Mapping
from typing import Any

import jax
from flax import linen as nn
from jaxtyping import Float, Shaped, UInt32

from lutjax._typing import Array
from lutjax.layers import _logic, _logic_images
from lutjax.layers.linen._layer import Layer, Switched


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


class LogicGates(_Wired, _logic.LogicGatesArguments):
    """Layer of differentiable logic gates of two inputs.

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


class SoftLUT(_Wired, _logic.SoftLUTArguments):
    """Layer of tables over inputs between 0 and 1."""


class BinaryLUT(_Wired, _logic.BinaryLUTArguments):
    """Layer of tables addressed by the signs of inputs."""


class LogicConv(_Wired, _logic_images.LogicConvArguments):
    """Layer that convolves an image with trees of gates."""

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


class GroupSum(Layer, _logic.GroupSumArguments):
    """Layer that sums groups of features over a temperature."""

    @nn.compact
    def __call__(self, x: Shaped[Array, "..."]) -> Float[jax.Array, "..."]:
        """Return sums of groups."""
        spec, arrays = self._bound()
        y: jax.Array = spec(arrays, x)
        return y


class Thermometer(Switched, _logic.ThermometerArguments):
    """Layer that turns numbers into bits.

    Example:
      >>> import jax, jax.numpy as jnp, lutjax
      >>> from lutjax.layers.linen import Thermometer
      >>> thresholds = lutjax.thermometer_thresholds(jnp.array([[0.0], [3.0]]), 2)
      >>> layer = Thermometer(1, 2, thresholds=thresholds)
      >>> y, variables = layer.init_with_output(jax.random.key(0), jnp.array([[1.5]]))
      >>> print(y, variables["thresholds"]["thresholds"])
      [[1. 0.]] [[1. 2.]]
    """
