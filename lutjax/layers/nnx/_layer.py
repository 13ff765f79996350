"""Base classes of Flax NNX layers: a spec with variables and sizes as attributes."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.nnx.module import ModuleMeta

from lutjax.arguments import format_value, require_rngs
from lutjax.layers import _spec
from lutjax.layers._copies import can_be_pickled
from lutjax.layers._documentation import Library, document
from lutjax.layers.nnx import _variables
from lutjax.layers.nnx._variables import Tables
from lutjax.tables.host import HostTable
from lutjax.values._ids import is_concrete

_LIBRARY = Library(
    argument="rngs: draws the variables, from its stream ``params``.",
    note="",  # the classes declare their variables
    example=""">>> import jax.numpy as jnp
>>> from flax import nnx{imports}
>>> from lutjax.layers.nnx import {name}
>>> layer = {name}({arguments}, rngs=nnx.Rngs(0))
>>> layer(jnp.ones({inputs})).shape
{outputs}""",
)

_MODES = ("deterministic", "decode")
"""Options that `nnx.view` changes."""

Noise = nnx.Rngs | nnx.RngStream | None

_HIDDEN = {
    "__abstractmethods__", "__annotations__", "__dir__", "__getattr__", "__getstate__", "__init__",
    "__init_subclass__", "__setattr__", "set_view", "spec", "spec_type",
}  # fmt: skip
"""Attributes hidden from `help`: irrelevant, called by Flax, or in its first line (`__init__`)."""

Constructor = TypeVar("Constructor", bound=Callable[..., None])


def builds(init: Constructor) -> Constructor:
    """Return a constructor that builds the spec and its variables, with the signature of `init`."""
    signature = inspect.signature(init)

    @functools.wraps(init)
    def constructor(self: Any, *args: Any, **options: Any) -> None:
        try:
            bound = signature.bind(self, *args, **options)
        except TypeError as error:
            raise TypeError(f"{type(self).__name__}: {error}.") from None
        bound.apply_defaults()
        _, *arguments = bound.arguments.items()
        arguments_by_name = dict(arguments)
        self._build(arguments_by_name.pop("rngs", None), **arguments_by_name)

    return constructor  # type: ignore[return-value]


class _LayerType(ModuleMeta):
    """Layer metaclass that shows constructor signatures, unlike Flax's own metaclass."""

    @property
    def __signature__(cls) -> inspect.Signature:
        signature = inspect.signature(cls.__init__)  # type: ignore[misc]
        return signature.replace(parameters=list(signature.parameters.values())[1:])

    def __dir__(cls) -> list[str]:
        return [name for name in super().__dir__() if name not in _HIDDEN]


class Layer(nnx.Module, metaclass=_LayerType):
    """Base class for layers: a spec, and its variables as attributes.

    Sizes and options, such as `in_features`, are read-only attributes derived from the arrays, so
    they follow when arrays are replaced. An array assigned to a variable becomes its value:
    ``layer.weights = array`` is ``layer.weights.set_value(array)``.
    """

    spec_type: ClassVar[type[_spec.Spec]]

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "spec_type" in vars(cls):
            _, _, own = (cls.__doc__ or "").partition("\n")
            takes_rngs = "rngs" in inspect.signature(cls.__init__).parameters
            library = _LIBRARY if takes_rngs else _LIBRARY._replace(argument="")
            cls.__doc__ = document(cls.spec_type, library, own)

    def _build(self, rngs: nnx.Rngs | None, **arguments: Any) -> None:
        if rngs is not None:
            require_rngs(type(self).__name__, rngs)
        name = type(self).__name__
        self._declared, variables = _spec.build(self.spec_type, arguments, name=name, owner=True)
        arrays: dict[str, Any] = {}
        # In order, because a variable may be derived from the ones before it.
        for v in variables:
            arrays[v.name] = v.make(lambda: None if rngs is None else rngs.params(), arrays)
            setattr(self, v.name, _variables.KINDS[v.kind](arrays[v.name]))
            if v.drawn is not None:
                table = self._declared.host_table(arguments["placement"], v.drawn)
                setattr(self, v.drawn.name, table)
                # Traced keys have no values: such a table is drawn, or loaded, later.
                if table is not arguments["placement"] and is_concrete(arrays[v.name]):
                    table.draw(jax.random.wrap_key_data(arrays[v.name]))
        _variables.link({v.name: getattr(self, v.name) for v in variables})

    if not TYPE_CHECKING:  # classes declare their sizes and options

        def __getattr__(self, name: str) -> Any:
            """Return a layer size or option."""
            if name in _spec.sizes(type(self).spec_type) and "_declared" in vars(self):
                return getattr(self.spec, name)
            raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *_spec.sizes(type(self).spec_type)})

    @property
    def spec(self) -> Any:
        """Layer spec, with sizes from the arrays."""
        return self._declared.fit_to_arrays(self._arrays())

    def __setattr__(self, name: str, value: Any) -> None:
        declared, old = self.__dict__.get("_declared"), self.__dict__.get(name)
        if isinstance(old, nnx.Variable) and not isinstance(value, nnx.Variable):
            self._set_array(name, old, value)
        elif name not in _spec.sizes(self.spec_type):
            super().__setattr__(name, value)
        elif name in _MODES and declared is not None:
            super().__setattr__("_declared", dataclasses.replace(declared, **{name: value}))
        else:
            raise AttributeError(
                f"{type(self).__name__}: {name} is read-only, as the variables depend on it. "
                f"Create a layer with {name}={format_value(value)}."
            )

    def _set_array(self, name: str, variable: Any, value: Any) -> None:
        layer = self._declared.layer
        if not isinstance(value, jax.Array | np.ndarray):
            raise TypeError(
                f"{layer}: {name} is a variable and takes an array, not {type(value).__name__}: "
                f"`layer.{name} = array`, or for some of its numbers `layer.{name}[...] = value`."
            )
        old = variable.get_value()
        whole = jnp.issubdtype(old.dtype, np.integer)
        if whole != jnp.issubdtype(value.dtype, np.integer):
            raise TypeError(
                f"{layer}: {name} holds {'ids' if whole else 'numbers'}, {old.dtype}; "
                f"it cannot take {value.dtype}{list(value.shape)}."
            )
        if whole:
            self.spec.checked_arrays({name: value})
        variable.set_value(jnp.asarray(value, old.dtype if whole else None))
        for other, array in self._declared.follow(name, self._arrays()).items():
            getattr(self, other).set_value(array)

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes for `pickle`, with defaults for initializers that it rejects."""
        state, declared = dict(vars(self)), self._declared
        defaults = {
            f.name: f.default
            for f in dataclasses.fields(self.spec_type)
            if f.name.endswith("_init") and not can_be_pickled(getattr(declared, f.name))
        }
        # A default stands in for an initializer that `pickle` rejects: the variables exist already.
        if not defaults:
            return state
        return {**state, "_declared": dataclasses.replace(declared, **defaults)}

    def _arrays(self) -> dict[str, Any]:
        own = vars(self)
        return {v.name: _variables.array_of(own[v.name]) for v in self._declared.all_variables}

    def _check_origin(self) -> None:
        own, declared = vars(self), self._declared
        _variables.check(declared.layer, {v.name: own[v.name] for v in declared.all_variables})

    def _bind_arrays(self) -> tuple[Any, dict[str, Any]]:
        """Return the spec and a call's arrays, with checked ids and host-resident tables."""
        self._check_origin()
        arrays = self._arrays()
        spec = self._declared.fit_to_arrays(arrays)
        on_host = {v.drawn.name: getattr(self, v.drawn.name) for v in spec.all_variables if v.drawn}
        return spec, {**spec.checked_arrays(arrays), **on_host}

    def _call(self, **mode: Any) -> _spec.LayerCall:
        """Return a call, which passes the variables to the op by name."""
        return _spec.LayerCall(*self._bind_arrays(), mode)

    def check(self) -> None:
        """Raise ValueError if a shape does not fit, an id does not exist or is another layer's."""
        self.spec.check(self._arrays())
        self._check_origin()


class Switched(Layer):
    """Base class for layers with a deterministic mode: hard or soft, without dropout or with it.

    A fork of the spec's stream, ``gates`` or ``dropout``, draws the noise.
    """

    def _build(self, rngs: nnx.Rngs | None, **arguments: Any) -> None:
        super()._build(rngs, **arguments)
        stream = None if rngs is None or not self.spec.random else rngs[self.spec.stream].fork()
        self.rngs = nnx.data(None) if stream is None else stream

    def _call(
        self, deterministic: bool | None = None, rngs: Noise = None, **mode: Any
    ) -> _spec.LayerCall:
        """Return a call in a mode, with a key if the mode is random."""
        spec, arrays = self._bind_arrays()
        mode["deterministic"] = spec.deterministic if deterministic is None else deterministic
        stream = self.rngs if rngs is None else rngs
        # Without a stream, the spec raises an error that names the option.
        if spec.random and not mode["deterministic"] and stream is not None:
            mode["key"] = stream[spec.stream]() if isinstance(stream, nnx.Rngs) else stream()
        return _spec.LayerCall(spec, arrays, mode)

    def set_view(self, deterministic: bool | None = None) -> None:
        """Change the layer's `deterministic`, for ``nnx.view``."""
        if deterministic is not None:
            self.deterministic = deterministic


def tables_of(model: nnx.Module) -> frozenset[str]:
    """Return the table names of a model: the paths of all `Tables` in it, joined by ``/``.

    The option `tables` of `lutjax.optim` and `lutjax.sharding` takes these names.

    Example:
      >>> from flax import nnx
      >>> from lutjax.layers.nnx import LUT, tables_of
      >>> rngs = nnx.Rngs(0)
      >>> layer = LUT(8, 5, n_detectors=4, n_anchors=3, rngs=rngs)
      >>> tables_of(nnx.Sequential(layer, nnx.Linear(5, 2, rngs=rngs)))
      frozenset({'layers/0/weights'})
    """
    state = nnx.to_flat_state(nnx.state(model, Tables))
    return frozenset("/".join(map(str, path)) for path, _ in state)


def host_tables_of(model: nnx.Module) -> dict[str, tuple[HostTable, str]]:
    """Return the host-resident tables of a model and the names of their keys, as in `tables_of`.

    Example:
      >>> from flax import nnx
      >>> from lutjax.layers.nnx import NgramMemory, host_tables_of
      >>> host_tables_of(NgramMemory(16, rows=1000, placement="host", rngs=nnx.Rngs(0)))
      {'weights': (HostTable(float32[8, 1000, 2]), 'weights_key')}
    """
    tables = {}
    for path, module in nnx.iter_modules(model):
        if isinstance(module, Layer):
            for v in module._declared.all_variables:
                if v.drawn is not None:
                    name, key = ("/".join(map(str, (*path, n))) for n in (v.drawn.name, v.name))
                    tables[name] = getattr(module, v.drawn.name), key
    return tables


def check(model: nnx.Module, restored: Any = None) -> None:
    """Check every layer of this package in a model, for example after checkpoint loading.

    Args:
      model: the model.
      restored: the state that updated the model: an `nnx.State`, nested dicts from
        `nnx.to_pure_dict`, or a flat state from `nnx.to_flat_state`. Ids belong to the tables
        trained with them, so a state with variables of a layer must have its ids.

    Raises:
      ValueError: a variable has a wrong shape or an invalid id, or `restored` lacks ids.
      TypeError: `restored` is not a state.

    Example:
      >>> from flax import nnx
      >>> from lutjax.layers.nnx import LUT, check
      >>> layer = LUT(4, 2, n_detectors=3, n_anchors=2, rngs=nnx.Rngs(0))
      >>> check(layer, nnx.state(layer, nnx.Param))
      Traceback (most recent call last):
      ...
      ValueError: LUT: the state has no anchors, which belong to its weights: restore all
      variables, not only the trained ones.
      >>> layer.anchors[...] = layer.anchors[...] + 4
      >>> check(layer)
      Traceback (most recent call last):
      ...
      ValueError: LUT: anchors holds ids from 4 to 7; inputs are 0 to 3.
    """
    restored_paths = None if restored is None else set(_paths_of(restored))
    for path, module in nnx.iter_modules(model):
        if isinstance(module, Layer):
            module.check()
            if restored_paths is not None:
                _check_restored(module.spec, path, restored_paths)


def _paths_of(state: Any) -> Iterator[tuple[str, ...]]:
    """Yield the variable paths of a state, with numbers as strings, as in checkpoints."""
    items = state.items() if isinstance(state, Mapping) else state
    is_flat = isinstance(state, nnx.FlatState | Sequence) and all(
        isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], tuple) for item in items
    )
    if not isinstance(state, Mapping) and not is_flat:
        raise TypeError(
            f"check: restored is of type {type(state).__name__}; "
            "expected an nnx.State, nested dicts of arrays (nnx.to_pure_dict) "
            "or a flat state (nnx.to_flat_state)."
        )
    for key, value in items:
        path = tuple(map(str, key if isinstance(key, tuple) else (key,)))
        if isinstance(value, Mapping):
            yield from ((*path, *below) for below in _paths_of(value))
        else:
            yield path


def _check_restored(spec: Any, path: tuple[Any, ...], restored_paths: set[tuple[str, ...]]) -> None:
    names = {v.name: v.collection for v in spec.all_variables}
    restored_names = {name for name in names if (*map(str, path), name) in restored_paths}
    missing = [
        name for name, kind in names.items() if kind != "params" and name not in restored_names
    ]
    if restored_names and missing:
        raise ValueError(
            f"{spec.layer}: the state has no {missing[0]}, "
            f"which belong to its {min(restored_names)}: restore all variables, "
            "not only the trained ones."
        )
