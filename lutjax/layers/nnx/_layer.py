"""What layers of Flax NNX share: kinds of variables, a spec and its variables as attributes."""

from typing import Any

import jax
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
    """A spec, and its variables as attributes of the same names."""

    def _build(
        self,
        spec_type: type[_spec.Spec],
        *sizes: Any,
        given: _spec.Arrays,
        rngs: nnx.Rngs | None,
        **options: Any,
    ) -> None:
        self.spec, variables = _spec.build(spec_type, *sizes, given=given, **options)
        arrays: dict[str, Any] = {}
        for v in variables:
            arrays[v.name] = v.make(lambda: None if rngs is None else rngs.params(), arrays)
            setattr(self, v.name, _VARIABLES[v.kind](arrays[v.name]))

    def _arrays(self) -> dict[str, Any]:
        # The arrays themselves: an index, even [...], makes other ones of them, see lutjax.training.tables.
        return {v.name: getattr(self, v.name).get_value() for v in self.spec.variables()}

    def __call__(self, x: Float[Array, "*batch inputs"]) -> Float[jax.Array, "*batch outputs"]:
        """Outputs ``[..., out_features]`` for inputs ``[..., in_features]``."""
        return self.spec(self._arrays(), x)

    def check(self) -> None:
        """Raises ValueError if a variable has a wrong shape or holds an id that does not exist.

        Call it after variables were replaced, for example by those of a checkpoint.
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
