"""Fields of calls that the ops on tables over bits share."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lutjax.dispatch.contract import Call, batched, shared, static
from lutjax.values._fixed_point import FixedPoint


def readers_of_part(readers: jax.Array, n_wires: int, index: Any) -> jax.Array:
    """Return the readers of each input among the gates of one device, ``[I, F]``.

    Args:
      readers: places in the list of all wires. n_wires: of the device's gates, which are part number `index` of all.
    """
    places = readers - index * n_wires
    none = np.iinfo(np.int32).max  # behind all places, as they are ascending
    places = jnp.sort(jnp.where((places >= 0) & (places < n_wires), places, none), axis=1)
    return jnp.where(places == none, -1, places)


@dataclasses.dataclass(frozen=True, eq=False)
class TableGates(Call, op="", features_first=True, output="t"):
    """Base of the calls of ops on tables over bits.

    Attributes:
      x: ``[I, B]`` floats, features first.
      table: ``[G, 2**n]`` floats.
      wires: int32 ``[G, n]``, ids that may lie beyond the inputs.
      readers: int32 ``[I, F]`` of `lutjax.readers`, or None.

    Output and its cotangent: ``[G, B]``. Differentiable: `x`, `table`.
    """

    x: jax.Array = batched(1, "i")
    table: jax.Array = shared("t s")
    wires: jax.Array = shared("t w")
    readers: jax.Array | None = shared("i f", default=None)

    def of_part(self, index: Any) -> "TableGates":
        if self.readers is None:
            return self
        return self.replace(readers=readers_of_part(self.readers, self.wires.size, index))


@functools.cache
def in_integers(kind: type[Call]) -> Any:
    """Return the class of the calls of an op on gates in fixed point: those of a kind, and `accumulate`.

    It is a class of its own, so that kernels which add floats alone know nothing of it.
    """

    @dataclasses.dataclass(frozen=True, eq=False)
    class InIntegers(kind, op=kind.op, features_first=kind.features_first, output=kind.output):  # type: ignore[valid-type, misc, call-arg]
        """The call of an op on gates in fixed point.

        Attributes:
          accumulate: as the op takes it.
        """

        accumulate: FixedPoint | None = static(default=None)

        @property
        def plain(self) -> str | None:
            return "adds floats: gates and tables over bits in fixed point are for plain JAX"

    return InIntegers
