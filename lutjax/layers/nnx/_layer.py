"""What layers of Flax NNX share: kinds of variables, a spec and its variables as attributes."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Float

from lutjax._typing import Array
from lutjax.layers import _spec


class Anchors(nnx.Variable):
    """Ids of the inputs that detectors compare. Kept with the tables, never trained."""


class Targets(nnx.Variable):
    """Ids of the outputs that rows reach. Kept with the tables, never trained."""


class Wires(nnx.Variable):
    """Ids of the inputs that gates read, and their readers. Kept with the gates, never trained."""


class Thresholds(nnx.Variable):
    """Thresholds of an encoder that are not learned."""


_VARIABLES = {
    "params": nnx.Param,
    "anchors": Anchors,
    "targets": Targets,
    "wires": Wires,
    "thresholds": Thresholds,
}


class Layer(nnx.Module):
    """A spec, and its variables as attributes of the same names.

    The sizes are attributes too, as `in_features`: those of the arrays, so they follow when arrays are replaced. An
    array that is assigned to a variable becomes its value: ``layer.weights = array`` is
    ``layer.weights.set_value(array)``.
    """

    _declared: _spec.Spec

    def _build(
        self,
        spec_type: type[_spec.Spec],
        *sizes: Any,
        given: _spec.Arrays,
        rngs: nnx.Rngs | None,
        **options: Any,
    ) -> None:
        self._declared, variables = _spec.build(spec_type, *sizes, given=given, **options)
        arrays: dict[str, Any] = {}
        for v in variables:
            arrays[v.name] = v.make(lambda: None if rngs is None else rngs.params(), arrays)
            setattr(self, v.name, _VARIABLES[v.kind](arrays[v.name]))

    @property
    def spec(self) -> Any:
        """Specification of the layer, with the sizes that its arrays have."""
        return self._declared.fitted(self._arrays())

    def __getattr__(self, name: str) -> Any:
        declared = self.__dict__.get("_declared")
        if declared is None or name not in _spec.sizes(declared):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.spec, name)

    def __setattr__(self, name: str, value: Any) -> None:
        declared, old = self.__dict__.get("_declared"), self.__dict__.get(name)
        if isinstance(old, nnx.Variable) and not isinstance(value, nnx.Variable):
            self._set_array(name, old, value)
        elif declared is not None and old is None and name in _spec.sizes(declared):
            super().__setattr__("_declared", dataclasses.replace(declared, **{name: value}))
        else:
            super().__setattr__(name, value)

    def _set_array(self, name: str, variable: Any, value: Any) -> None:
        """Gives a variable of the layer another array, and those that follow from it."""
        layer = self._declared.layer
        if not isinstance(value, jax.Array | np.ndarray):
            raise TypeError(
                f"{layer}: {name} is a variable and takes an array, not {type(value).__name__}: `layer.{name} = array`, or "
                f"for some of its numbers `layer.{name}[...] = value`."
            )
        old = variable.get_value()
        whole = jnp.issubdtype(old.dtype, np.integer)
        if whole != jnp.issubdtype(value.dtype, np.integer):
            raise TypeError(
                f"{layer}: {name} holds {'ids' if whole else 'numbers'}, {old.dtype}; it cannot take {value.dtype}"
                f"{list(value.shape)}."
            )
        variable.set_value(jnp.asarray(value, old.dtype if whole else None))
        for other, array in self._declared.follow(name, self._arrays()).items():
            getattr(self, other).set_value(array)

    def _arrays(self) -> dict[str, Any]:
        # The arrays themselves: an index, even [...], makes other ones of them, see lutjax.training.tables.
        return {v.name: getattr(self, v.name).get_value() for v in self._declared.variables()}

    def __call__(self, x: Float[Array, "*batch inputs"]) -> Float[jax.Array, "*batch outputs"]:
        """Outputs ``[..., out_features]`` for inputs ``[..., in_features]``."""
        return self.spec(self._arrays(), x)

    def check(self) -> None:
        """Raises ValueError if a variable's shape does not fit the others, or it holds an id that does not exist.

        Call it after variables were replaced, for example by those of a checkpoint or by fewer of them.
        """
        self.spec.check(self._arrays())


def check(model: nnx.Module) -> None:
    """Calls ``check()`` of every layer of this package in a model: after a checkpoint was read, for example.

    Raises:
      ValueError: a variable has a wrong shape or holds an id that does not exist.

    Example:
      >>> from flax import nnx
      >>> from lutjax.layers.nnx import LUT, check
      >>> layer = LUT(4, 2, n_detectors=3, n_anchors=2, rngs=nnx.Rngs(0))
      >>> layer.anchors[...] = layer.anchors[...] + 4
      >>> check(layer)
      Traceback (most recent call last):
      ...
      ValueError: LUT: anchors holds ids from 4 to 7; inputs are 0 to 3.
    """
    for _, module in nnx.iter_modules(model):
        if isinstance(module, Layer):
            module.check()
