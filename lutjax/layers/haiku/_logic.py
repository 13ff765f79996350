"""Differentiable logic for Haiku; `lutjax.layers._logic` has the arguments of the layers."""

import dataclasses

import jax
from jaxtyping import Float, Shaped, UInt32

from lutjax._typing import Array
from lutjax.layers import _logic, _logic_images
from lutjax.layers.haiku._layer import Layer, Switched


class _Wired(Switched):
    """Base of layers of gates with wires."""

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
          deterministic: whether to run the hard network; takes precedence over the layer's own.
          temperature: in place of the layer's own; it may be traced.
        """
        return self._run(x, deterministic, temperature=temperature)

    def truth_tables(self) -> tuple[jax.Array, jax.Array]:
        """Return the hard network for `lutjax.packed_lut`: wires ``[G, n]`` and bool tables ``[G, 2**n]``.

        Those of `LogicConv` are the trees of one window: ids below its number of values are values of the window, the next ones gates.
        """
        wires, tables = self.spec.truth_tables(self._held())
        return wires, tables

    def expected_needs(
        self, temperature: Float[Array, ""] | float | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """Return for each gate the expected number of inputs that it needs, and the probability that it needs any.

        See `lutjax.layers.nnx.LogicGates.expected_needs`.

        Args:
          temperature: in place of the layer's own.
        """
        inputs, any_input = self.spec.expected_needs(self._held(), temperature)
        return inputs, any_input


@dataclasses.dataclass(eq=False, repr=False)
class LogicGates(_Wired, _logic.LogicGatesArguments):
    """Layer of differentiable logic gates of two inputs.

    Example:
      >>> import haiku as hk, jax, jax.numpy as jnp
      >>> from lutjax.layers.haiku import LogicGates
      >>> f = hk.transform_with_state(lambda x, hard: LogicGates(16, 40)(x, deterministic=hard))
      >>> params, state = f.init(jax.random.key(0), jnp.ones((32, 16)), False)
      >>> jax.tree.map(jnp.shape, (params, state))
      ({'logic_gates': {'logits': (40, 16)}}, {'logic_gates': {'readers': (16, 5), 'wires': (40, 2)}})
      >>> f.apply(params, state, None, jnp.ones((32, 16)), True)[0].shape
      (32, 40)
    """


@dataclasses.dataclass(eq=False, repr=False)
class SoftLUT(_Wired, _logic.SoftLUTArguments):
    """Layer of tables over inputs between 0 and 1."""


@dataclasses.dataclass(eq=False, repr=False)
class BinaryLUT(_Wired, _logic.BinaryLUTArguments):
    """Layer of tables addressed by the signs of inputs."""


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
    """Layer that sums groups of features over a temperature."""

    def __call__(self, x: Shaped[Array, "..."]) -> Float[jax.Array, "..."]:
        """Return sums of groups."""
        y: jax.Array = self.spec(self._held(), x)
        return y


@dataclasses.dataclass(eq=False, repr=False)
class Thermometer(Switched, _logic.ThermometerArguments):
    """Layer that turns numbers into bits.

    Example:
      >>> import haiku as hk, jax, jax.numpy as jnp, lutjax
      >>> from lutjax.layers.haiku import Thermometer
      >>> thresholds = lutjax.thermometer_thresholds(jnp.array([[0.0], [3.0]]), 2)
      >>> f = hk.transform_with_state(lambda x: Thermometer(1, 2, thresholds=thresholds)(x))
      >>> params, state = f.init(jax.random.key(0), jnp.array([[1.5]]))
      >>> print(f.apply(params, state, None, jnp.array([[1.5]]))[0])
      [[1. 0.]]
    """
