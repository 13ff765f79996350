"""Differentiable logic for Flax Linen."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Float, Shaped

from lutjax._typing import Array
from lutjax.layers import _logic
from lutjax.layers._spec import Initializer
from lutjax.layers.linen._layer import Layer


class _Gates(Layer):
    """The options of layers with wires and estimators."""

    _: dataclasses.KW_ONLY
    estimator: str = "soft"
    temperature: float | int = 1.0
    feature_axis: int = -1
    dtype: Any = None
    param_dtype: Any = jnp.float32
    implementation: str | tuple[str, ...] | None = None
    wires: Any = None
    deterministic: bool = False

    @nn.compact
    def __call__(
        self, x: Shaped[Array, "..."], *, deterministic: bool | None = None
    ) -> Float[jax.Array, "..."]:
        """Outputs for inputs; `deterministic` takes precedence over the field."""
        spec, variables = self._spec_and_variables()
        arrays = self._arrays(variables)
        hard = self.deterministic if deterministic is None else deterministic
        key = self.make_rng("gates") if spec.random and not hard else None
        return spec(arrays, x, deterministic=hard, key=key)


class _Wired(_Gates):
    """The options of layers whose gates read inputs of a vector."""

    in_features: int
    out_features: int
    _: dataclasses.KW_ONLY
    wiring: str = "balanced"
    candidates: int = 8
    scores_init: Initializer = _logic.GAUSSIAN

    def truth_tables(self, variables: Mapping[str, Any]) -> tuple[jax.Array, jax.Array]:
        """The hard network for `lutjax.packed_lut`: wires ``[G, n]`` and bool tables ``[G, 2**n]``.

        Call it on the layer's own part of the variables, those of ``params`` and of ``wires``.
        """
        spec, _ = self._spec_and_variables()
        return spec.truth_tables({name: array for kind in variables.values() for name, array in kind.items()})


class LogicGates(_Wired):
    """Differentiable logic gates, with the options of `lutjax.layers.nnx.LogicGates`.

    Variables: ``params/logits [out_features, 16]``, ``wires/wires`` int32 ``[out_features, 2]`` and
    ``wires/readers`` int32 ``[in_features, fan-out]``, a collection of its own that no optimiser sees. With
    learnable wiring also ``params/scores``. All are drawn from the ``params`` stream; noise comes from the
    stream ``gates``.

    Raises:
      ValueError: on first use, a size is impossible or a wire is not an input.

    Source: docs/logic.md, sections 1 and 4.

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

    _: dataclasses.KW_ONLY
    logits_init: Initializer = _logic.RESIDUAL

    spec_type = _logic.LogicGatesSpec


class SoftLUT(_Wired):
    """Tables of inputs between 0 and 1, with the options of `lutjax.layers.nnx.SoftLUT`.

    Variables: ``params/table [out_features, 2**n_inputs]``, and wires as in `LogicGates`.

    Raises:
      ValueError: on first use, a size is impossible or a wire is not an input.

    Source: docs/logic.md, sections 3 and 4.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from lutjax.layers.linen import SoftLUT
      >>> y, variables = SoftLUT(16, 40, n_inputs=3).init_with_output(jax.random.key(0), jnp.ones((32, 16)))
      >>> y.shape, variables["params"]["table"].shape
      ((32, 40), (40, 8))
    """

    _: dataclasses.KW_ONLY
    n_inputs: int = 4
    parametrisation: str = "light"
    table_init: Initializer | None = None

    spec_type = _logic.SoftLUTSpec


class BinaryLUT(_Wired):
    """Tables addressed by the signs of inputs, with the options of `lutjax.layers.nnx.BinaryLUT`.

    Variables: ``params/table [out_features, 2**n_inputs]``, and wires as in `LogicGates`.

    Raises:
      ValueError: on first use, a size is impossible or a wire is not an input.

    Source: docs/logic.md, section 3.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from lutjax.layers.linen import BinaryLUT
      >>> y, variables = BinaryLUT(16, 40, n_inputs=3).init_with_output(jax.random.key(0), jnp.ones((32, 16)))
      >>> y.shape, variables["params"]["table"].shape
      ((32, 40), (40, 8))
    """

    _: dataclasses.KW_ONLY
    estimator: str = "straight_through"
    n_inputs: int = 4
    table_init: Initializer = _logic.uniform_table

    spec_type = _logic.BinaryLUTSpec


class LogicTree(_Gates):
    """Convolution with trees of gates, with the options of `lutjax.layers.nnx.LogicTree`.

    Variables: ``params/logits [n_kernels * (2**depth - 1), 16]``, ``wires/wires`` int32
    ``[n_kernels * 2**(depth - 1), 2]`` and ``wires/readers``.

    Raises:
      ValueError: on first use, a size is impossible or a wire is not in the window.

    Source: docs/logic.md, section 4.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from lutjax.layers.linen import LogicTree
      >>> layer = LogicTree((8, 8, 3), 16, kernel=3, depth=3, padding=1, pool=2)
      >>> layer.init_with_output(jax.random.key(0), jnp.ones((32, 8, 8, 3)))[0].shape
      (32, 4, 4, 16)
    """

    in_shape: tuple[int, int, int]
    n_kernels: int
    _: dataclasses.KW_ONLY
    kernel: int = 3
    depth: int = 3
    stride: int = 1
    padding: int = 0
    pool: int = 1
    logits_init: Initializer = _logic.RESIDUAL

    spec_type = _logic.LogicTreeSpec


class GroupSum(Layer):
    """Sums of contiguous groups of features over a temperature, as `lutjax.layers.nnx.GroupSum`.

    Raises:
      ValueError: on first use, a size is impossible or `k` does not divide the features.

    Source: docs/logic.md, section 4.

    Example:
      >>> import jax.numpy as jnp
      >>> from lutjax.layers.linen import GroupSum
      >>> print(GroupSum(2, tau=2.0).apply({}, jnp.array([1.0, 1.0, 1.0, 0.0, 0.0, 1.0])))
      [1.5 0.5]
    """

    k: int
    tau: float | int = 1.0
    _: dataclasses.KW_ONLY
    feature_axis: int = -1

    spec_type = _logic.GroupSumSpec

    @nn.compact
    def __call__(self, x: Shaped[Array, "..."]) -> Float[jax.Array, "..."]:
        """Sums of groups."""
        spec, _ = self._spec_and_variables()
        return spec({}, x)


class Thermometer(Layer):
    """Numbers as bits, with the options of `lutjax.layers.nnx.Thermometer`.

    Variables: ``thresholds/thresholds [in_features, n_thresholds]``, a collection of its own, or
    ``params/thresholds`` if learnable.

    Raises:
      ValueError: on first use, a size is impossible, thresholds do not fit, or are NaN.

    Source: docs/logic.md, section 4.

    Example:
      >>> import jax, jax.numpy as jnp, lutjax
      >>> from lutjax.layers.linen import Thermometer
      >>> thresholds = lutjax.thermometer_thresholds(jnp.array([[0.0], [3.0]]), 2)
      >>> layer = Thermometer(1, 2, thresholds=thresholds)
      >>> y, variables = layer.init_with_output(jax.random.key(0), jnp.array([[1.5]]))
      >>> print(y, variables["thresholds"]["thresholds"])
      [[1. 0.]] [[1. 2.]]
    """

    in_features: int
    n_thresholds: int
    _: dataclasses.KW_ONLY
    learnable: bool = False
    gradient: str = "straight_through"
    temperature: float | int = 1.0
    feature_axis: int = -1
    dtype: Any = None
    param_dtype: Any = jnp.float32
    thresholds: Any = None
    deterministic: bool = False

    spec_type = _logic.ThermometerSpec

    @nn.compact
    def __call__(
        self, x: Shaped[Array, "..."], *, deterministic: bool | None = None
    ) -> Float[jax.Array, "..."]:
        """Bits; `deterministic` takes precedence over the field."""
        spec, variables = self._spec_and_variables()
        hard = self.deterministic if deterministic is None else deterministic
        return spec(self._arrays(variables), x, deterministic=hard)
