"""What layers of Haiku share: a spec, and its variables as parameters and state."""

from typing import Any

import haiku as hk
import jax
from jaxtyping import Float

from lutjax._typing import Array
from lutjax.layers import _spec


class Layer(hk.Module):
    """A spec, and its variables as Haiku's parameters and state of the same names. Its sizes are attributes."""

    def _build(self, spec_type: type[_spec.Spec], *sizes: Any, given: _spec.Arrays, **options: Any) -> None:
        self.spec, self._variables = _spec.build(spec_type, *sizes, given=given, **options)
        for name in _spec.sizes(self.spec):
            setattr(self, name, getattr(self.spec, name))

    def _arrays(self) -> dict[str, jax.Array]:
        arrays: dict[str, jax.Array] = {}

        def array(v: _spec.Variable) -> jax.Array:
            get = hk.get_parameter if v.kind == "params" else hk.get_state
            return get(v.name, v.shape, v.dtype, init=lambda shape, dtype: v.make(hk.next_rng_key, arrays))

        for v in self._variables:
            arrays[v.name] = array(v)
        return arrays

    def __call__(self, x: Float[Array, "*batch inputs"]) -> Float[jax.Array, "*batch outputs"]:
        """Outputs ``[..., out_features]`` for inputs ``[..., in_features]``."""
        return self.spec(self._arrays(), x)

    def check(self) -> None:
        """Raises ValueError if a variable has a wrong shape or holds an id that does not exist.

        Call it inside a transformed function, without `jit`, when variables come from a checkpoint.
        """
        self.spec.check(self._arrays())
