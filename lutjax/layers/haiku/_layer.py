"""Base of the layers of Haiku: a spec, and its variables as parameters and state."""

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import haiku as hk
import jax
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


class Layer(hk.Module, metaclass=_Module):
    """Base of layers: a spec, its variables as parameters and state of the same names, and its sizes as attributes."""

    spec_type: ClassVar[type[_spec.Spec]]

    def _make(self, arguments: Mapping[str, Any]) -> None:
        """Make the spec of the arguments of the constructor, and attributes of them."""
        self._options = {name: arguments[name] for name in _spec.arguments(self.spec_type)}
        self.spec, _ = _spec.build(self.spec_type, self._options)
        for name, value in self._options.items():
            setattr(self, name, value)
        for name in _spec.sizes(self.spec_type):
            setattr(self, name, getattr(self.spec, name))

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
                raise _spec.missing(self.spec.layer, v.name)
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
        placement, variables = self._options.get("placement"), self.spec.variables()
        tables = on_host(placement, (self.module_name,), variables, making=hk.running_init())
        return {**self.spec.held(self._arrays()), **tables}

    def __call__(self, x: Float[Array, "*batch inputs"]) -> Float[jax.Array, "*batch outputs"]:
        """Return outputs ``[..., out_features]`` for inputs ``[..., in_features]``."""
        y: jax.Array = self.spec(self._held(), x)
        return y

    def check(self) -> None:
        """Check the variables. Call it inside a transformed function, without `jit`, when they come from a checkpoint.

        Raises:
          ValueError: a variable has a wrong shape or holds an id that does not exist.
        """
        self.spec.check(self._arrays())


class Switched(Layer):
    """Base of layers whose calls are deterministic or not: hard or soft, without dropout or with it."""

    def __call__(
        self, x: Shaped[Array, "..."], *, deterministic: bool | None = None
    ) -> Float[jax.Array, "..."]:
        """Return outputs for inputs; `deterministic` takes precedence over the layer's own."""
        return self._run(x, deterministic)

    def _run(self, x: Any, deterministic: bool | None, **options: Any) -> jax.Array:
        arrays = self._held()
        calm = self.spec.deterministic if deterministic is None else deterministic
        noise = {"key": hk.next_rng_key()} if self.spec.random and not calm else {}
        y: jax.Array = self.spec(arrays, x, deterministic=calm, **noise, **options)
        return y
