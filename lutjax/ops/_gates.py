"""Fields of calls that the ops on tables over bits share."""

import dataclasses

import jax

from lutjax.kernels.contract import Call, batched, shared


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

    def divided(self) -> str:
        return "bt" if self.readers is None else "b"  # readers are places in the list of all gates
