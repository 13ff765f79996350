"""A lookup with a per-sample output gain."""

import dataclasses

import jax

from lutjax.dispatch.contract import Call, batched, shared
from lutjax.ops import apply


@dataclasses.dataclass(frozen=True, eq=False)
class GainedLookup(Call, op="gained_lookup", table="weights"):
    """Call arguments for `gained_lookup`.

    Attributes:
      weights: ``[T, R, O]`` floats.
      index: int32 ``[B, T]``, ids of existing rows.
      gain: ``[B, O]``.

    Output and its cotangent: ``[B, O]``. Differentiable: `weights`, `gain`.
    """

    weights: jax.Array = shared()
    index: jax.Array = batched(1)
    gain: jax.Array = batched(1)


def gained_lookup(weights, index, gain, *, implementation=None):
    """``y[o] = gain[o] * sum_t weights[t, index[t], o]``, with any batch dimensions in `index` and `gain`."""
    return apply(GainedLookup(weights, index, gain), implementation=implementation)
