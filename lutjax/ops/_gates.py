"""Fields of calls that the ops on tables over bits share."""

import dataclasses

import jax

from lutjax.kernels.contract import Call, batched, shared


@dataclasses.dataclass(frozen=True, eq=False)
class TableGates(Call, op="", features_first=True):
    """Base of the calls of ops on tables over bits.

    Attributes:
      x: ``[I, B]`` floats, features first.
      table: ``[G, 2**n]`` floats.
      wires: int32 ``[G, n]``, ids that may lie beyond the inputs.
      readers: int32 ``[I, F]`` of `lutjax.readers`, or None.

    Output and its cotangent: ``[G, B]``. Differentiable: `x`, `table`.
    """

    x: jax.Array = batched(1)
    table: jax.Array = shared()
    wires: jax.Array = shared()
    readers: jax.Array | None = shared(default=None)
