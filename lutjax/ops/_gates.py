"""Call fields shared by the gate ops."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lutjax.dispatch.contract import Call, batched, shared, static
from lutjax.values._fixed_point import FixedPoint


def readers_of_part(readers: jax.Array, n_wires: int, index: Any) -> jax.Array:
    """Return fan-out lists restricted to one device's gates, ``[I, F]``.

    Args:
      readers: global wire indices.
      n_wires: wires per device.
      index: the device's part number.
    """
    places = readers - index * n_wires
    # Unused entries come last, as in `lutjax.readers`: this value sorts behind all others.
    none = np.iinfo(np.int32).max
    places = jnp.sort(jnp.where((places >= 0) & (places < n_wires), places, none), axis=1)
    return jnp.where(places == none, -1, places)


@dataclasses.dataclass(frozen=True, eq=False)
class TableGates(Call, op="", features_first=True, output="t"):
    """Base class for calls on bit-addressed tables.

    Attributes:
      x: ``[I, B]`` floats, features first.
      table: ``[G, 2**n]`` floats.
      wires: int32 ``[G, n]``, ids, possibly out of range.
      readers: int32 ``[I, F]`` from `lutjax.readers`, or None.

    Output and its cotangent: ``[G, B]``. Differentiable: `x`, `table`.
    """

    x: jax.Array = batched(1, "i")
    table: jax.Array = shared("t s")
    wires: jax.Array = shared("t w")
    readers: jax.Array | None = shared("i f", default=None)

    def select_shard(self, index: Any) -> "TableGates":
        if self.readers is None:
            return self
        return self.replace(readers=readers_of_part(self.readers, self.wires.size, index))


# Cached: another class would be another pytree, for which programs are traced again.
@functools.cache
def in_integers(kind: type[Call]) -> Any:
    """Return a fixed-point variant of a gate call class, with the field `accumulate`.

    A separate class keeps floating-point kernels unaware of it.
    """
    options: Any = {name: getattr(kind, name) for name in ("op", "features_first", "output")}

    @dataclasses.dataclass(frozen=True, eq=False)
    class InIntegers(kind, **options):  # type: ignore[valid-type, misc]
        """A gate call in fixed point.

        Attributes:
          accumulate: see the op.
        """

        accumulate: FixedPoint | None = static(default=None)

        @property
        def plain(self) -> str | None:
            return "adds floats: gates and tables over bits in fixed point are for plain JAX"

    return InIntegers
