"""Haiku layers, generated from their specifications."""

import functools
import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import haiku as hk
import jax
import jax.numpy as jnp

from lutjax.layers import _spec
from lutjax.layers._copies import refer_by_name, state_of
from lutjax.layers._declared import declare, host_tables
from lutjax.layers._documentation import Library, call_of, document, method_of

if TYPE_CHECKING:
    from haiku._src.module import ModuleMetaclass

    T = TypeVar("T")

    class _Module(ModuleMetaclass):
        """Metaclass with typed constructor calls; Haiku's own metaclass declares Any."""

        def __call__(cls: type[T], *args: Any, **kwargs: Any) -> T: ...

else:
    _Module = type(hk.Module)

_HINT = (
    " Use haiku.transform_with_state, not haiku.transform, "
    "and pass the state that init returned to apply."
)

_LIBRARY = Library(
    argument="name: of the module.",
    note=(
        "In Haiku a trained variable is a parameter, and other variables are state, "
        "so a layer needs `haiku.transform_with_state`: see\n`lutjax.layers.haiku`."
    ),
    example=""">>> import haiku as hk, jax, jax.numpy as jnp{imports}
>>> from lutjax.layers.haiku import {name}
>>> f = hk.transform_with_state(lambda x: {name}({arguments})(x))
>>> params, state = f.init(jax.random.key(0), jnp.ones({inputs}))
>>> y, state = f.apply(params, state, None, jnp.ones({inputs}))
>>> y.shape
{outputs}""",
)


class Layer(hk.Module, metaclass=_Module):
    """Base class for layers: a spec, with sizes as attributes.

    Its variables are parameters and state with the same names.
    """

    spec_type: ClassVar[type[_spec.Spec]]

    def _make(self, arguments: Mapping[str, Any]) -> None:
        self._options = {name: arguments[name] for name in _spec.arguments(self.spec_type)}
        for name, value in self._options.items():
            setattr(self, name, value)
        self.spec: Any = None
        # Without the number of inputs, the spec is built at the first call.
        if self._options.get("in_features", 0) is not None:
            self._make_spec()

    @hk.transparent
    def _make_spec(self) -> None:
        self.spec, _ = _spec.build(self.spec_type, self._options, name=type(self).__name__)
        for name in _spec.sizes(self.spec_type):
            setattr(self, name, getattr(self.spec, name))

    def _infer(self, x: Any = None) -> None:
        """Build the spec if `in_features` is None, with the number of inputs found by `init`.

        A separate state stores it, so an input `x` with another size raises an error.
        """
        if self.spec is not None:
            return

        def make_zeros(shape: Any, dtype: Any) -> jax.Array:
            if not hk.running_init() or x is None:
                raise _spec.unknown_inputs(type(self).__name__)
            return jnp.zeros(shape, dtype)

        size = None if x is None else _spec.n_inputs(type(self).__name__, self._options, x)
        # A state without elements, whose shape is the number: `apply` finds it there.
        marker = hk.get_state("in_features", [size or 0], bool, init=make_zeros)
        self._options["in_features"] = int(marker.shape[0])
        self._make_spec()

    @hk.transparent
    def __getstate__(self) -> dict[str, Any]:
        options = {name: refer_by_name(value) for name, value in self._options.items()}
        return {**state_of(self), "_options": options}

    def _arrays(self) -> dict[str, jax.Array]:
        arrays: dict[str, jax.Array] = {}

        def array(v: _spec.Variable) -> jax.Array:
            get = hk.get_parameter if v.collection == "params" else hk.get_state
            return get(v.name, v.shape, v.dtype, init=functools.partial(make_variable, v))

        def make_variable(v: _spec.Variable, shape: Any, dtype: Any) -> Any:
            if not hk.running_init():
                hint = _HINT if v.collection != "params" else ""
                raise _spec.missing_variable_error(self.spec.layer, v.name, hint)
            return v.make(hk.next_rng_key, arrays)

        # The spec of a copied layer has lost its initializers.
        _, variables = _spec.build(self.spec_type, self._options, name=self.spec.layer)
        declare((self.module_name,), variables)
        for v in variables:
            arrays[v.name] = array(v)
        return arrays

    def _bind_arrays(self) -> Any:
        self._infer()
        placement, variables = self._options.get("placement"), self.spec.all_variables
        tables = host_tables(placement, (self.module_name,), variables, making=hk.running_init())
        return {**self.spec.checked_arrays(self._arrays()), **tables}

    def _run(self, x: Any, deterministic: bool | None = None, **options: Any) -> Any:
        self._infer(x)
        arrays = self._bind_arrays()
        if hasattr(self.spec, "deterministic"):
            if deterministic is None:
                deterministic = self.spec.deterministic
            # A call without noise takes no key, so that `apply` needs none.
            noise = {"key": hk.next_rng_key()} if self.spec.random and not deterministic else {}
            options |= {"deterministic": deterministic, **noise}
        return self.spec(arrays, x, **options)

    def _call_spec(self, name: str, *args: Any, **options: Any) -> Any:
        """Call a spec method; methods that take arrays get the layer's arrays."""
        self._infer(args[0] if name == "reads" else None)
        takes_arrays = "arrays" in inspect.signature(getattr(self.spec_type, name)).parameters
        arrays = (self._bind_arrays(),) if takes_arrays else ()
        return getattr(self.spec, name)(*arrays, *args, **options)

    def check(self) -> None:
        """Raise ValueError if a variable has a wrong shape or ids, in a transformed function."""
        self._infer()
        self.spec.check(self._arrays())


def make_layer(spec_type: type[_spec.Spec], own: str = "") -> Any:
    """Return a layer class with the spec arguments, and its `own` documentation."""
    self = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    name = inspect.Parameter(
        "name", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=str | None
    )
    signature = inspect.Signature(
        [self, *_spec.parameters(spec_type, inferred=True), name], return_annotation=None
    )

    def __init__(*args: Any, **options: Any) -> None:
        layer = args[0]
        try:
            bound = signature.bind(*args, **options)
        except TypeError as error:
            raise TypeError(f"{type(layer).__name__}: {error}.") from None
        bound.apply_defaults()
        super(layer_type, layer).__init__(bound.arguments["name"])
        layer._make(bound.arguments)

    __init__.__qualname__ = f"{_spec.layer_name(spec_type)}.__init__"
    __init__.__signature__ = signature  # type: ignore[attr-defined]
    namespace = {
        "__module__": __package__,
        "__doc__": document(spec_type, _LIBRARY, own),
        "spec_type": spec_type,
        "__call__": call_of(spec_type),
        "__init__": __init__,
        **{n: method_of(spec_type, n, Layer._call_spec) for n in spec_type.methods},
    }
    base = Attention if hasattr(spec_type, "attend_with_cache") else Layer
    metaclass: Any = type(base)
    layer_type = metaclass(_spec.layer_name(spec_type), (base,), namespace)
    return layer_type


class Attention(Layer):
    """Base class for attention layers with a cache."""

    def _attend(self, x: Any, decode: bool | None, **others: Any) -> Any:
        self._infer(x)
        if not (self.spec.decode if decode is None else decode):
            return self.spec(self._bind_arrays(), x, **others)
        cache = {
            name: hk.get_state(name, value.shape, value.dtype, init=lambda *_, value=value: value)
            for name, value in self.spec.empty_cache(x.shape, x.dtype).items()
        }
        y, latest = self.spec.attend_with_cache(self._bind_arrays(), cache, x, **others)
        for name, value in latest.items():
            hk.set_state(name, value)
        return y
