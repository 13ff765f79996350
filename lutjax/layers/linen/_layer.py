"""Flax Linen layers, generated from their specifications."""

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import linen as nn

from lutjax.layers import _spec
from lutjax.layers._copies import state_of
from lutjax.layers._declared import declare, host_tables
from lutjax.layers._documentation import Library, call_of, document, method_of

_INPUTS, _IN_FEATURES = "inputs", "in_features"
"""Collection and name of the variable with the number of inputs as shape."""

_VARIABLES = inspect.Parameter(
    "variables", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=Mapping[str, Any]
)

_LIBRARY = Library(
    argument="name: of the module.",
    note=(
        "In Flax Linen a trained variable is in the collection ``params``, "
        "and other variables are in collections of their own, which\n`apply` needs: "
        "see `lutjax.layers.linen`. All are drawn from the stream ``params``. "
        "Arguments are checked on first use."
    ),
    example=""">>> import jax, jax.numpy as jnp{imports}
>>> from lutjax.layers.linen import {name}
>>> layer = {name}({arguments})
>>> variables = layer.init(jax.random.key(0), jnp.ones({inputs}))
>>> layer.apply(variables, jnp.ones({inputs})).shape
{outputs}""",
)


class Layer(nn.Module):
    """Base class for layers with the spec arguments as fields."""

    spec_type: ClassVar[type[_spec.Spec]]

    @nn.nowrap
    def __getstate__(self) -> dict[str, Any]:
        return state_of(self)

    def _options(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _spec.arguments(self.spec_type)}

    def _build(self, n_inputs: int | None = None) -> tuple[Any, tuple[_spec.Variable, ...]]:
        """Return the spec and its variables; `n_inputs` replaces an `in_features` of None."""
        options, name = self._options(), type(self).__name__
        if options.get("in_features", 0) is None:
            if n_inputs is None:
                raise _spec.unknown_inputs(name)
            options["in_features"] = n_inputs
        return _spec.build(self.spec_type, options, name=name)

    def _n_inputs(self, x: Any) -> int | None:
        size = _spec.n_inputs(type(self).__name__, self._options(), x)
        if size is None:
            return None
        if not (self.is_initializing() or self.has_variable(_INPUTS, _IN_FEATURES)):
            raise _spec.unknown_inputs(type(self).__name__)
        # `init` stores the number as a shape, and another `x` does not change it.
        marker = self.variable(_INPUTS, _IN_FEATURES, lambda: jnp.zeros(size, bool)).value
        return int(marker.shape[0])

    def _bind_arrays(self, x: Any) -> tuple[Any, dict[str, jax.Array]]:
        """Return the spec and the variable arrays of a call, which `init` creates."""
        spec, variables = self._build(self._n_inputs(x))
        declare(self.path, variables)
        arrays: dict[str, jax.Array] = {}

        def array(v: _spec.Variable) -> Any:
            if v.collection == "params":
                return self.param(v.name, lambda key: v.make(lambda: key, arrays))
            if not (self.is_initializing() or self.has_variable(v.kind, v.name)):
                raise _spec.missing_variable_error(spec.layer, v.name)
            return self.variable(
                v.kind, v.name, lambda: v.make(lambda: self.make_rng("params"), arrays)
            ).value

        for v in variables:
            arrays[v.name] = array(v)
        placement = getattr(self, "placement", None)
        tables = host_tables(placement, self.path, variables, making=self.is_initializing())
        return spec, {**spec.checked_arrays(arrays), **tables}

    def _spec_and_arrays(self, variables: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
        marker = variables.get(_INPUTS, {}).get(_IN_FEATURES)
        arrays = {name: array for kind in variables.values() for name, array in kind.items()}
        return self._build(None if marker is None else len(marker))[0], arrays

    @nn.nowrap
    def _run(self, x: Any, deterministic: bool | None = None, **options: Any) -> Any:
        spec, arrays = self._bind_arrays(x)
        if hasattr(spec, "deterministic"):
            if deterministic is None:
                deterministic = spec.deterministic
            # A call without noise takes no key, so that `apply` needs no `rngs`.
            noise = {"key": self.make_rng(spec.stream)} if spec.random and not deterministic else {}
            options |= {"deterministic": deterministic, **noise}
        return spec(arrays, x, **options)

    def _call_spec(self, name: str, *args: Any, **options: Any) -> Any:
        """Call a spec method; methods that take arrays get the layer's subtree of `variables`."""
        if "arrays" not in inspect.signature(getattr(self.spec_type, name)).parameters:
            return getattr(self._build()[0], name)(*args, **options)
        bound = inspect.signature(getattr(type(self), name)).bind(self, *args, **options)
        _, variables, *others = bound.args
        spec, arrays = self._spec_and_arrays(variables)
        return getattr(spec, name)(arrays, *others, **bound.kwargs)

    def check(self, variables: Mapping[str, Any]) -> None:
        """Raise ValueError if the layer's subtree of variables has wrong shapes or ids."""
        spec, arrays = self._spec_and_arrays(variables)
        spec.check(arrays)


def make_layer(spec_type: type[_spec.Spec], own: str = "") -> Any:
    """Return a layer class with the spec arguments as fields, and its `own` documentation."""
    fields: dict[str, Any] = {}
    annotations: dict[str, Any] = {}
    for p in _spec.parameters(spec_type, inferred=True):
        if p.kind is p.KEYWORD_ONLY:
            annotations.setdefault("_", dataclasses.KW_ONLY)
        annotations[p.name] = p.annotation
        if p.default is not p.empty:
            fields[p.name] = p.default
    namespace = {
        "__module__": __package__,
        "__doc__": document(spec_type, _LIBRARY, own),
        "__annotations__": annotations,
        "spec_type": spec_type,
        "__call__": nn.compact(call_of(spec_type)),
        **fields,
        **{n: method_of(spec_type, n, Layer._call_spec, _VARIABLES) for n in spec_type.methods},
    }
    base = Attention if hasattr(spec_type, "attend_with_cache") else Layer
    metaclass: Any = type(base)
    return metaclass(_spec.layer_name(spec_type), (base,), namespace)


class Attention(Layer):
    """Base class for attention layers with a cache."""

    @nn.nowrap
    def _attend(self, x: Any, decode: bool | None, **others: Any) -> Any:
        spec, arrays = self._bind_arrays(x)
        if not (spec.decode if decode is None else decode):
            return spec(arrays, x, **others)
        empty = spec.empty_cache(x.shape, x.dtype)
        cache = {
            name: self.variable("cache", name, lambda v: v, value) for name, value in empty.items()
        }
        arrays_of_cache = {name: v.value for name, v in cache.items()}
        y, latest = spec.attend_with_cache(arrays, arrays_of_cache, x, **others)
        # `init` creates the cache, which stays empty.
        if not self.is_initializing():
            for name, value in latest.items():
                cache[name].value = value
        return y
