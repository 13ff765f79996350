"""Base of the layers of Flax Linen: a spec made of the fields, and its variables."""

from collections.abc import Mapping
from typing import Any, ClassVar

import jax
from flax import linen as nn
from jaxtyping import Float, Shaped

from lutjax._typing import Array
from lutjax.layers import _spec
from lutjax.layers._copies import state_of
from lutjax.layers._declared import declare, on_host


class Layer(nn.Module):
    """Base of layers, whose fields are the arguments of their spec."""

    spec_type: ClassVar[type[_spec.Spec]]

    @nn.nowrap
    def __getstate__(self) -> dict[str, Any]:
        """Return the fields for `pickle` and `copy.deepcopy`."""
        return state_of(self)

    def _build(self) -> tuple[Any, tuple[_spec.Variable, ...]]:
        options = {name: getattr(self, name) for name in _spec.arguments(self.spec_type)}
        return _spec.build(self.spec_type, options)

    def _bound(self) -> tuple[Any, dict[str, jax.Array]]:
        """Return the spec and the arrays of its variables, which `init` makes."""
        spec, variables = self._build()
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
        return self._build()[0], merged(variables)

    def check(self, variables: Mapping[str, Any]) -> None:
        """Check variables, for example those of a checkpoint.

        Args:
          variables: the layer's own part of them: ``layer.check({"params": ..., "anchors": ...})``.

        Raises:
          ValueError: a variable has a wrong shape or holds an id that does not exist.
        """
        self._build()[0].check(merged(variables))


class Switched(Layer):
    """Base of layers whose calls are deterministic or not: hard or soft, without dropout or with it."""

    @nn.compact
    def __call__(
        self, x: Shaped[Array, "..."], *, deterministic: bool | None = None
    ) -> Float[jax.Array, "..."]:
        """Return outputs for inputs; `deterministic` takes precedence over the field."""
        return self._run(x, deterministic)

    def _run(self, x: Any, deterministic: bool | None, **options: Any) -> jax.Array:
        spec, arrays = self._bound()
        calm = spec.deterministic if deterministic is None else deterministic
        noise = {"key": self.make_rng(spec.stream)} if spec.random and not calm else {}
        y: jax.Array = spec(arrays, x, deterministic=calm, **noise, **options)
        return y


def merged(variables: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arrays of all collections of a layer in one mapping."""
    return {name: array for kind in variables.values() for name, array in kind.items()}
