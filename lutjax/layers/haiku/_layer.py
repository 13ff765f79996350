"""Base of the layers of Haiku: a spec, and its variables as parameters and state."""

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import haiku as hk
import jax
import jax.numpy as jnp
from jaxtyping import Float, Shaped

from lutjax._typing import Array
from lutjax.layers import _spec
from lutjax.layers._copies import by_name, state_of
from lutjax.layers._declared import declare, on_host

if TYPE_CHECKING:
    from haiku._src.module import ModuleMetaclass

    T = TypeVar("T")

    class _Module(ModuleMetaclass):
        """Metaclass by which calls of a class make what it says: Haiku's own declares that they make anything."""

        def __call__(cls: type[T], *args: Any, **kwargs: Any) -> T: ...

else:
    _Module = type(hk.Module)

_HINT = (
    " Use haiku.transform_with_state, not haiku.transform, and pass the state that init returned to apply."
)


class Layer(hk.Module, metaclass=_Module):
    """Base of layers: a spec, its variables as parameters and state of the same names, and its sizes as attributes."""

    spec_type: ClassVar[type[_spec.Spec]]

    def _make(self, arguments: Mapping[str, Any]) -> None:
        """Make the spec of the arguments of the constructor, and attributes of them."""
        self._options = {name: arguments[name] for name in _spec.arguments(self.spec_type)}
        for name, value in self._options.items():
            setattr(self, name, value)
        self.spec: Any = None
        if self._options.get("in_features", 0) is not None:
            self._make_spec()

    @hk.transparent
    def _make_spec(self) -> None:
        self.spec, _ = _spec.build(self.spec_type, self._options)
        for name in _spec.sizes(self.spec_type):
            setattr(self, name, getattr(self.spec, name))

    def _infer(self, x: Any = None) -> None:
        """Make the spec of a layer whose `in_features` is None, with the number of inputs that `init` found.

        The shapes of most variables do not depend on it. A state of its own keeps it, so that an input of another size is an error.

        Args:
          x: the input of a call, from which `init` has the number.
        """
        if self.spec is not None:
            return

        def first(shape: Any, dtype: Any) -> jax.Array:
            if not hk.running_init() or x is None:
                raise _spec.unknown_inputs(type(self).__name__)
            return jnp.zeros(shape, dtype)

        found = None if x is None else _spec.n_inputs(self.spec_type, self._options, x)
        kept = hk.get_state("in_features", [found or 0], bool, init=first)
        self._options["in_features"] = self.in_features = int(kept.shape[0])
        self._make_spec()

    @hk.transparent
    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes for `pickle` and `copy.deepcopy`."""
        options = {name: by_name(value) for name, value in self._options.items()}
        return {**state_of(self), "_options": options}

    def _arrays(self) -> dict[str, jax.Array]:
        arrays: dict[str, jax.Array] = {}

        def array(v: _spec.Variable) -> jax.Array:
            get = hk.get_parameter if v.collection == "params" else hk.get_state
            return get(v.name, v.shape, v.dtype, init=functools.partial(first, v))

        def first(v: _spec.Variable, shape: Any, dtype: Any) -> Any:
            if not hk.running_init():
                raise _spec.missing(self.spec.layer, v.name, _HINT if v.collection != "params" else "")
            return v.make(hk.next_rng_key, arrays)

        _, variables = _spec.build(
            self.spec_type, self._options
        )  # functions that draw, which cannot be pickled
        declare((self.module_name,), variables)
        for v in variables:
            arrays[v.name] = array(v)
        return arrays

    def _held(self) -> Any:
        """Return the arrays, with ids checked where they are known, and tables in the memory of the host."""
        self._infer()
        placement, variables = self._options.get("placement"), self.spec.variables()
        tables = on_host(placement, (self.module_name,), variables, making=hk.running_init())
        return {**self.spec.held(self._arrays()), **tables}

    def __call__(self, x: Float[Array, "*batch inputs"]) -> Float[jax.Array, "*batch outputs"]:
        """Return outputs ``[..., out_features]`` for inputs ``[..., in_features]``."""
        self._infer(x)
        y: jax.Array = self.spec(self._held(), x)
        return y

    def check(self) -> None:
        """Check the variables. Call it inside a transformed function, without `jit`, when they come from a checkpoint.

        Raises:
          ValueError: a variable has a wrong shape or holds an id that does not exist.
        """
        self._infer()
        self.spec.check(self._arrays())


class Switched(Layer):
    """Base of layers whose calls are deterministic or not: hard or soft, without dropout or with it."""

    def __call__(
        self, x: Shaped[Array, "..."], *, deterministic: bool | None = None
    ) -> Float[jax.Array, "..."]:
        """Return outputs for inputs; `deterministic` takes precedence over the layer's own."""
        return self._run(x, deterministic)

    def _run(self, x: Any, deterministic: bool | None, **options: Any) -> jax.Array:
        self._infer(x)
        arrays = self._held()
        calm = self.spec.deterministic if deterministic is None else deterministic
        noise = {"key": hk.next_rng_key()} if self.spec.random and not calm else {}
        y: jax.Array = self.spec(arrays, x, deterministic=calm, **noise, **options)
        return y
