"""Differentiable logic for Flax NNX; `lutjax.layers._logic` has the arguments of the layers."""

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax
from flax import nnx
from jaxtyping import Float, Shaped, UInt32

from lutjax._typing import Array
from lutjax.layers import _logic, _logic_images
from lutjax.layers.nnx._layer import Layer, Random, Switched


class _Wired(Random):
    """Base of layers of gates with wires."""

    def __call__(
        self,
        x: Shaped[Array, "..."],
        *,
        deterministic: bool | None = None,
        temperature: Float[Array, ""] | float | None = None,
        rngs: nnx.Rngs | nnx.RngStream | None = None,
    ) -> Float[jax.Array, "..."]:
        """Return outputs for inputs.

        Args:
          x: inputs.
          deterministic: whether to run the hard network; takes precedence over the layer's own.
          temperature: in place of the layer's own; it may be traced.
          rngs: for the noise, instead of the layer's own stream.
        """
        return self._run(x, deterministic, rngs, temperature=temperature)

    def _call(
        self, deterministic: bool | None, temperature: Any, rngs: nnx.Rngs | nnx.RngStream | None
    ) -> _logic.LayerCall:
        spec = self.spec
        options = {**self._mode(spec, deterministic, rngs), "temperature": temperature}
        return _logic.LayerCall(spec, self._held(), options)

    def truth_tables(self) -> tuple[jax.Array, jax.Array]:
        """Return the hard network for `lutjax.packed_lut`: wires ``[G, n]`` and bool tables ``[G, 2**n]``.

        Those of `LogicConv` are the trees of one window: ids below its number of values are values of the window, the next ones gates.
        """
        wires, tables = self.spec.truth_tables(self._held())
        return wires, tables

    def expected_needs(
        self, temperature: Float[Array, ""] | float | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """Return for each gate the expected number of inputs that it needs, and the probability that it needs any: ``[G]`` each.

        Tables are drawn with the probabilities that training has for them: a mixture of gates, or the values of slots. Both
        are differentiable. A circuit leaves out constants, and buffers and inverters, which need one input; a table that
        needs n inputs takes ``n - 1`` gates of two inputs or more.

        Args:
          temperature: in place of the layer's own.
        """
        inputs, any_input = self.spec.expected_needs(self._held(), temperature)
        return inputs, any_input


@dataclasses.dataclass(eq=False, repr=False)
class LogicGates(_Wired, _logic.LogicGatesArguments):
    """Layer of differentiable logic gates of two inputs.

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


@dataclasses.dataclass(eq=False, repr=False)
class SoftLUT(_Wired, _logic.SoftLUTArguments):
    """Layer of tables over inputs between 0 and 1."""


@dataclasses.dataclass(eq=False, repr=False)
class BinaryLUT(_Wired, _logic.BinaryLUTArguments):
    """Layer of tables addressed by the signs of inputs."""


def in_sequence(
    layers: Iterable[LogicGates | SoftLUT | BinaryLUT],
    x: Shaped[Array, "..."],
    *,
    deterministic: bool | None,
    temperature: Float[Array, ""] | float | None,
    rngs: nnx.Rngs | None,
) -> Float[jax.Array, "..."]:
    """Return the outputs of layers that follow one another; mixtures of gates of layers of the same size are computed at once."""
    return _logic.in_sequence([layer._call(deterministic, temperature, rngs) for layer in layers], x)


@dataclasses.dataclass(eq=False, repr=False)
class LogicConv(_Wired, _logic_images.LogicConvArguments):
    """Layer that convolves an image with trees of gates."""

    def from_words(self, words: UInt32[Array, "channels height width *batch"]) -> UInt32[jax.Array, "..."]:
        """Return the bits of the hard trees, for 32 samples a word: ``[kernels, rows, columns, ...]``.

        Args:
          words: uint32 ``[channels, height, width, ...]``, bits packed by `lutjax.pack_bits`, whatever the `feature_axis`.

        Raises:
          ValueError: words have another shape or dtype.
        """
        y: jax.Array = self.spec.from_words(self._held(), words)
        return y


@dataclasses.dataclass(eq=False, repr=False)
class GroupSum(Layer, _logic.GroupSumArguments):
    """Layer that sums groups of features over a temperature.

    Example:
      >>> import jax.numpy as jnp
      >>> from lutjax.layers.nnx import GroupSum
      >>> print(GroupSum(2, tau=2.0)(jnp.array([1.0, 1.0, 1.0, 0.0, 0.0, 1.0])))
      [1.5 0.5]
    """

    def __call__(self, x: Shaped[Array, "..."]) -> Float[jax.Array, "..."]:
        """Return sums of groups."""
        y: jax.Array = self.spec(self._held(), x)
        return y


@dataclasses.dataclass(eq=False, repr=False)
class Thermometer(Switched, _logic.ThermometerArguments):
    """Layer that turns numbers into bits.

    Example:
      >>> import jax.numpy as jnp, lutjax
      >>> from lutjax.layers.nnx import Thermometer
      >>> data = jnp.array([[0.0, 10.0], [1.0, 11.0], [2.0, 12.0], [7.0, 30.0]])
      >>> thresholds = lutjax.thermometer_thresholds(data, 3, method="distributive")
      >>> print(Thermometer(2, 3, thresholds=thresholds)(jnp.array([[1.5, 13.0]])))
      [[1. 0. 0. 1. 1. 0.]]
    """
