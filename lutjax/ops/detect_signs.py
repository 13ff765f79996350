"""Detection by sign."""

import dataclasses

import jax
from jaxtyping import Float

from lutjax._typing import Array
from lutjax.dispatch._transforms import apply
from lutjax.dispatch.contract import Call, batched, static
from lutjax.dispatch.registry import Implementation
from lutjax.ops import _checks
from lutjax.values._detection import Detection
from lutjax.values._ids import as_jax


@dataclasses.dataclass(frozen=True, eq=False)
class DetectSigns(Call, op="detect_signs", output=""):
    """The call of `lutjax.detect_signs`.

    Attributes:
      positions: ``[B, N]`` floats; None in the backward pass.
      flip: int32 ``[B]``, from the detection; None in the forward pass.
      epsilon: dead zone. n_bits: ``N``.

    Cotangent: the margin's, ``[B]``. Differentiable: `positions`.
    """

    positions: jax.Array | None = batched(1, "n")
    flip: jax.Array | None = batched(0, "", default=None)
    epsilon: float = static(default=0.0)
    n_bits: int = static()

    def residuals(self, outputs: Detection) -> "DetectSigns":
        return self.replace(positions=None, flip=outputs.flip)


def detect_signs(
    positions: Float[Array, "*batch bits"],
    *,
    epsilon: float = 0.0,
    implementation: Implementation = None,
) -> Detection:
    """Detect precomputed deltas: bit = value > 0.

    Attention uses it for its learned positions.

    Definition for one row. ``dmargin`` is the margin cotangent::

        bit = (positions > 0) & ~(np.abs(positions) < epsilon)
        index = (bit << np.arange(len(positions))).sum()
        closest = np.abs(positions).argmin()  # the first; NaN is the smallest
        flip, margin = 1 << closest, positions[closest]

        dpositions = np.zeros_like(positions)
        dpositions[closest] = dmargin

    Args:
      positions: ``[..., N]`` float32, bfloat16, float16 or float64.
      epsilon: dead zone, in the units of `positions`: ``|value| < epsilon`` gives bit 0.
      implementation: see `lutjax.detect`.

    Returns:
      `Detection` with arrays ``[...]``; see `lutjax.detect`.

    Raises:
      ValueError, TypeError: a wrong shape or dtype.

    Source: docs/semantics.md, sections 1 and 5.

    Example:
      >>> import jax.numpy as jnp, lutjax
      >>> d = lutjax.detect_signs(jnp.array([0.5, -0.25]))
      >>> int(d.index), int(d.flip), float(d.margin)
      (1, 2, -0.25)
    """
    _checks.floats("detect_signs", "positions", positions, -1, "[..., bits]")
    fits = positions.shape[-1] <= _checks.MAX_BITS
    rule = f"a detection has at most {_checks.MAX_BITS} bits"
    _checks.require(fits, "detect_signs", "positions", positions, rule)
    epsilon = _checks.finite_epsilon("detect_signs", epsilon)
    call = DetectSigns(as_jax(positions), epsilon=epsilon, n_bits=positions.shape[-1])
    result: Detection = apply(call, implementation=implementation)
    return result
