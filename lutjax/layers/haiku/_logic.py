"""Differentiable logic for Haiku."""

from typing import Any, ClassVar

import haiku as hk
import jax
from jaxtyping import Float, Shaped

from lutjax._typing import Array
from lutjax.layers import _logic, _spec
from lutjax.layers._spec import takes
from lutjax.layers.haiku._layer import Layer


class _Gates(Layer):
    """Layers with wires and estimators."""

    spec_type: ClassVar[type[_spec.Spec]]
    deterministic: bool

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        _spec.takes_fields(cls)

    def __call__(
        self, x: Shaped[Array, "..."], *, deterministic: bool | None = None
    ) -> Float[jax.Array, "..."]:
        """Outputs for inputs; `deterministic` takes precedence over the layer's own."""
        hard = self.deterministic if deterministic is None else deterministic
        arrays = self._arrays()
        key = hk.next_rng_key() if self.spec.random and not hard else None
        return self.spec(arrays, x, deterministic=hard, key=key)


class _Wired(_Gates):
    """Layers whose gates read inputs of a vector."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        deterministic: bool = False,
        wires: Any = None,
        name: str | None = None,
        **options: Any,
    ):
        super().__init__(name=name)
        self.deterministic = deterministic
        self._build(self.spec_type, in_features, out_features, given={"wires": wires}, **options)

    def truth_tables(self) -> tuple[jax.Array, jax.Array]:
        """The hard network for `lutjax.packed_lut`: wires ``[G, n]`` and bool tables ``[G, 2**n]``."""
        return self.spec.truth_tables(self._arrays())


class LogicGates(_Wired):
    """Differentiable logic gates, with the options of `lutjax.layers.nnx.LogicGates`.

    Parameter: ``logits [out_features, 16]``. State: ``wires`` int32 ``[out_features, 2]`` and ``readers``
    int32 ``[in_features, fan-out]``. With learnable wiring also a parameter ``scores``. The estimator
    ``"gumbel"`` needs a key in `apply`.

    Raises:
      ValueError: a size is impossible, or a wire is not an input.

    Source: docs/logic.md, sections 1 and 4.

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

    spec_type = _logic.LogicGatesSpec


class SoftLUT(_Wired):
    """Tables of inputs between 0 and 1, with the options of `lutjax.layers.nnx.SoftLUT`.

    Parameter: ``table [out_features, 2**n_inputs]``. State as of `LogicGates`.

    Raises:
      ValueError: a size is impossible, or a wire is not an input.

    Source: docs/logic.md, sections 3 and 4.

    Example:
      >>> import haiku as hk, jax, jax.numpy as jnp
      >>> from lutjax.layers.haiku import SoftLUT
      >>> f = hk.transform_with_state(lambda x: SoftLUT(16, 40, n_inputs=3)(x))
      >>> params, state = f.init(jax.random.key(0), jnp.ones((32, 16)))
      >>> f.apply(params, state, None, jnp.ones((32, 16)))[0].shape
      (32, 40)
    """

    spec_type = _logic.SoftLUTSpec


class BinaryLUT(_Wired):
    """Tables addressed by the signs of inputs, with the options of `lutjax.layers.nnx.BinaryLUT`.

    Parameter: ``table [out_features, 2**n_inputs]``. State as of `LogicGates`.

    Raises:
      ValueError: a size is impossible, or a wire is not an input.

    Source: docs/logic.md, section 3.

    Example:
      >>> import haiku as hk, jax, jax.numpy as jnp
      >>> from lutjax.layers.haiku import BinaryLUT
      >>> f = hk.transform_with_state(lambda x: BinaryLUT(16, 40, n_inputs=3)(x))
      >>> params, state = f.init(jax.random.key(0), jnp.ones((32, 16)))
      >>> f.apply(params, state, None, jnp.ones((32, 16)))[0].shape
      (32, 40)
    """

    spec_type = _logic.BinaryLUTSpec


class LogicTree(_Gates):
    """Convolution with trees of gates, with the options of `lutjax.layers.nnx.LogicTree`.

    Parameter: ``logits [n_kernels * (2**depth - 1), 16]``. State: ``wires`` int32
    ``[n_kernels * 2**(depth - 1), 2]`` and ``readers``.

    Raises:
      ValueError: a size is impossible, or a wire is not in the window.

    Source: docs/logic.md, section 4.

    Example:
      >>> import haiku as hk, jax, jax.numpy as jnp
      >>> from lutjax.layers.haiku import LogicTree
      >>> f = hk.transform_with_state(lambda x: LogicTree((8, 8, 3), 16, padding=1, pool=2)(x))
      >>> params, state = f.init(jax.random.key(0), jnp.ones((32, 8, 8, 3)))
      >>> f.apply(params, state, None, jnp.ones((32, 8, 8, 3)))[0].shape
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
        name: str | None = None,
        **options: Any,
    ):
        super().__init__(name=name)
        self.deterministic = deterministic
        self._build(self.spec_type, in_shape, n_kernels, given={"wires": wires}, **options)


class GroupSum(Layer):
    """Sums of contiguous groups of features over a temperature, as `lutjax.layers.nnx.GroupSum`.

    Raises:
      ValueError: a size is impossible, or `k` does not divide the features.

    Source: docs/logic.md, section 4.

    Example:
      >>> import haiku as hk, jax.numpy as jnp
      >>> from lutjax.layers.haiku import GroupSum
      >>> f = hk.transform(lambda x: GroupSum(2, tau=2.0)(x))
      >>> print(f.apply({}, None, jnp.array([1.0, 1.0, 1.0, 0.0, 0.0, 1.0])))
      [1.5 0.5]
    """

    @takes(_logic.GroupSumSpec)
    def __init__(self, k: int, tau: float | int = 1.0, *, name: str | None = None, **options: Any):
        super().__init__(name=name)
        self._build(_logic.GroupSumSpec, k, tau, given={}, **options)

    def __call__(self, x: Shaped[Array, "..."]) -> Float[jax.Array, "..."]:
        """Sums of groups."""
        return self.spec({}, x)


class Thermometer(Layer):
    """Numbers as bits, with the options of `lutjax.layers.nnx.Thermometer`.

    State, or a parameter if learnable: ``thresholds [in_features, n_thresholds]``.

    Raises:
      ValueError: a size is impossible, thresholds do not fit, or are NaN.

    Source: docs/logic.md, section 4.

    Example:
      >>> import haiku as hk, jax, jax.numpy as jnp, lutjax
      >>> from lutjax.layers.haiku import Thermometer
      >>> thresholds = lutjax.thermometer_thresholds(jnp.array([[0.0], [3.0]]), 2)
      >>> f = hk.transform_with_state(lambda x: Thermometer(1, 2, thresholds=thresholds)(x))
      >>> params, state = f.init(jax.random.key(0), jnp.array([[1.5]]))
      >>> print(f.apply(params, state, None, jnp.array([[1.5]]))[0])
      [[1. 0.]]
    """

    @takes(_logic.ThermometerSpec)
    def __init__(
        self,
        in_features: int,
        n_thresholds: int,
        *,
        thresholds: Any = None,
        deterministic: bool = False,
        name: str | None = None,
        **options: Any,
    ):
        super().__init__(name=name)
        self.deterministic = deterministic
        given = {"thresholds": thresholds}
        self._build(_logic.ThermometerSpec, in_features, n_thresholds, given=given, **options)

    def __call__(
        self, x: Shaped[Array, "..."], *, deterministic: bool | None = None
    ) -> Float[jax.Array, "..."]:
        """Bits; `deterministic` takes precedence over the layer's own."""
        hard = self.deterministic if deterministic is None else deterministic
        return self.spec(self._arrays(), x, deterministic=hard)
