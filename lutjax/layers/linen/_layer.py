"""Base of the layers of Flax Linen: a spec made of the fields, and its variables."""

from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Float, Shaped

from lutjax._typing import Array
from lutjax.layers import _spec
from lutjax.layers._copies import state_of
from lutjax.layers._declared import declare, on_host

_INPUTS, _IN_FEATURES = "inputs", "in_features"
"""Collection and name of the variable whose shape is the number of inputs."""


class Layer(nn.Module):
    """Base of layers, whose fields are the arguments of their spec."""

    spec_type: ClassVar[type[_spec.Spec]]

    @nn.nowrap
    def __getstate__(self) -> dict[str, Any]:
        """Return the fields for `pickle` and `copy.deepcopy`."""
        return state_of(self)

    def _options(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _spec.arguments(self.spec_type)}

    def _build(self, n_inputs: int | None = None) -> tuple[Any, tuple[_spec.Variable, ...]]:
        """Return the spec and its variables.

        Args:
          n_inputs: value of `in_features` where the field is None.
        """
        options = self._options()
        if options.get("in_features", 0) is None:
            if n_inputs is None:
                raise _spec.unknown_inputs(type(self).__name__)
            options["in_features"] = n_inputs
        return _spec.build(self.spec_type, options)

    def _n_inputs(self, x: Any) -> int | None:
        """Return the number of inputs that `init` found where `in_features` is None.

        The shapes of most variables do not depend on it. A variable of its own keeps it, so that an input of another size is an error.
        """
        found = _spec.n_inputs(self.spec_type, self._options(), x)
        if found is None:
            return None
        if not (self.is_initializing() or self.has_variable(_INPUTS, _IN_FEATURES)):
            raise _spec.unknown_inputs(type(self).__name__)
        kept = self.variable(_INPUTS, _IN_FEATURES, lambda: jnp.zeros(found, bool)).value
        return int(kept.shape[0])

    def _bound(self, x: Any) -> tuple[Any, dict[str, jax.Array]]:
        """Return the spec and the arrays of its variables, which `init` makes.

        Args:
          x: the input of the call.
        """
        spec, variables = self._build(self._n_inputs(x))
        declare(self.path, variables)
        arrays: dict[str, jax.Array] = {}

        def array(v: _spec.Variable) -> Any:
            if v.collection == "params":
                return self.param(v.name, lambda key: v.make(lambda: key, arrays))
            if not (self.is_initializing() or self.has_variable(v.kind, v.name)):
                raise _spec.missing(spec.layer, v.name)
            return self.variable(
                v.kind, v.name, lambda: v.make(lambda: self.make_rng("params"), arrays)
            ).value

        for v in variables:
            arrays[v.name] = array(v)
        placement = getattr(self, "placement", None)
        return spec, {
            **spec.held(arrays),
            **on_host(placement, self.path, variables, making=self.is_initializing()),
        }

    def _spec_and_arrays(self, variables: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Return the spec of the layer, and the arrays of its own part of `variables`."""
        kept = variables.get(_INPUTS, {}).get(_IN_FEATURES)
        return self._build(None if kept is None else len(kept))[0], merged(variables)

    def check(self, variables: Mapping[str, Any]) -> None:
        """Check variables, for example those of a checkpoint.

        Args:
          variables: the layer's own part of them: ``layer.check({"params": ..., "anchors": ...})``.

        Raises:
          ValueError: a variable has a wrong shape or holds an id that does not exist.
        """
        spec, arrays = self._spec_and_arrays(variables)
        spec.check(arrays)


class Switched(Layer):
    """Base of layers whose calls are deterministic or not: hard or soft, without dropout or with it."""

    @nn.compact
    def __call__(
        self, x: Shaped[Array, "..."], *, deterministic: bool | None = None
    ) -> Float[jax.Array, "..."]:
        """Return outputs for inputs; `deterministic` takes precedence over the field."""
        return self._run(x, deterministic)

    def _run(self, x: Any, deterministic: bool | None, **options: Any) -> jax.Array:
        spec, arrays = self._bound(x)
        calm = spec.deterministic if deterministic is None else deterministic
        noise = {"key": self.make_rng(spec.stream)} if spec.random and not calm else {}
        y: jax.Array = spec(arrays, x, deterministic=calm, **noise, **options)
        return y


def merged(variables: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arrays of all collections of a layer in one mapping."""
    return {name: array for kind in variables.values() for name, array in kind.items()}
