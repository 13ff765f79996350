"""What layers of Flax Linen share: a spec made of the fields, and its variables."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
from flax import linen as nn

from lutjax.layers import _spec


class Layer(nn.Module):
    """The fields of a layer are those of its spec, and the variables that can be given explicitly."""

    spec_type: ClassVar[type[_spec.Spec]]

    def _spec_and_variables(self) -> tuple[Any, tuple[_spec.Variable, ...]]:
        kind = self.spec_type
        names = [f.name for f in dataclasses.fields(kind) if f.name not in kind.implied]
        options = {name: getattr(self, name) for name in names}
        return _spec.build(kind, given={name: getattr(self, name) for name in kind.given}, **options)

    def _arrays(self, variables: tuple[_spec.Variable, ...]) -> dict[str, jax.Array]:
        arrays: dict[str, jax.Array] = {}

        def array(v: _spec.Variable) -> jax.Array:
            if v.kind == "params":
                return self.param(v.name, lambda key: v.make(lambda: key, arrays))
            return self.variable(
                v.kind, v.name, lambda: v.make(lambda: self.make_rng("params"), arrays)
            ).value

        for v in variables:
            arrays[v.name] = array(v)
        return arrays

    def check(self, variables: Mapping[str, Any]) -> None:
        """Raises ValueError if a variable has a wrong shape or holds an id that does not exist.

        Call it on the layer's own part of the variables when they come from a checkpoint:
        ``layer.check({"params": ..., "anchors": ...})``.
        """
        spec, _ = self._spec_and_variables()
        spec.check({name: array for kind in variables.values() for name, array in kind.items()})
