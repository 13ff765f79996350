"""Pairwise comparison of inputs."""

import dataclasses

import jax
from jaxtyping import Float

from lutjax._typing import Anchors, Array
from lutjax.dispatch._transforms import apply
from lutjax.dispatch.contract import Call, batched, shared, static
from lutjax.dispatch.registry import Implementation
from lutjax.ops import _checks
from lutjax.values._detection import Detection
from lutjax.values._fixed_point import FixedPoint
from lutjax.values._ids import as_int32, as_jax


@dataclasses.dataclass(frozen=True, eq=False)
class Detect(Call, op="detect", output="t"):
    """The call of `lutjax.detect`.

    Attributes:
      x: ``[B, I]`` floats; None in the backward pass.
      anchors: int32 ``[T, C, 2]``, ids, possibly out of range.
      flip: int32 ``[B, T]``, from the detection; None in the forward pass.
      epsilon: dead zone. n_inputs: ``I``. accumulate: see the op.

    Cotangent: the margin's, ``[B, T]``. Differentiable: `x`.
    """

    x: jax.Array | None = batched(1, "i")
    anchors: jax.Array = shared("t c w")
    flip: jax.Array | None = batched(1, "t", default=None)
    epsilon: float = static(default=0.0)
    n_inputs: int = static()
    accumulate: FixedPoint | None = static(default=None)

    def residuals(self, outputs: Detection) -> "Detect":
        return self.replace(x=None, flip=outputs.flip)


def detect(
    x: Float[Array, "*batch inputs"],
    anchors: Anchors,
    *,
    epsilon: float = 0.0,
    accumulate: FixedPoint | None = None,
    implementation: Implementation = None,
) -> Detection:
    """Compare pairs of inputs: the bits address a row, the closest comparison carries the gradient.

    Detector ``t`` computes ``delta_r = x[a_r] - x[b_r]`` for its ``C`` anchor pairs. Bit ``r`` of
    the index is ``delta_r > 0``; the margin is the first delta with the smallest ``|delta|``, and
    ``flip`` its bit.

    Definition for one sample. ``dmargin`` and ``dx`` are the cotangents::

        a, b = anchors[..., 0], anchors[..., 1]
        delta = x[a] - x[b]  # [T, C]
        bit = (delta > 0) & ~(np.abs(delta) < epsilon)  # NaN gives 0
        index = (bit << np.arange(delta.shape[1])).sum(axis=1)
        t = np.arange(len(delta))
        closest = np.abs(delta).argmin(axis=1)  # the first; NaN is the smallest
        flip, margin = 1 << closest, delta[t, closest]

        dx = np.zeros_like(x)
        np.add.at(dx, a[t, closest], dmargin)
        np.subtract.at(dx, b[t, closest], dmargin)

    Args:
      x: ``[..., I]`` float32, bfloat16, float16 or float64.
      anchors: int32 ``[T, C, 2]``, from `lutjax.sample_anchors`: input ids. Out-of-range traced ids
        are clamped.
      epsilon: dead zone, in the units of `x`: ``|delta| < epsilon`` gives bit 0. Margin and flip
        ignore it.
      accumulate: None for floating-point gradient sums, or see `lutjax.FixedPoint`.
      implementation: kernel to run: None for the best supported one, a name, or names in order of
        preference.

    Returns:
      `Detection` with arrays ``[..., T]``. The margin has dtype ``x.dtype``, or float32 for 16-bit
      inputs, which are compared in float32. NaN gives bit 0 and a NaN margin.

    Without pairs (``C = 0``) index and flip are 0 and the margin is ``+inf``, without a gradient.

    Raises:
      ValueError, TypeError: a wrong shape or dtype, or anchors out of range.

    Source: docs/semantics.md, section 1.

    Example:
      >>> import jax.numpy as jnp, lutjax
      >>> d = lutjax.detect(jnp.array([0.5, 0.25, 2.0]), jnp.array([[[0, 1], [0, 2]]]))
      >>> int(d.index[0]), int(d.flip[0]), float(d.margin[0])
      (1, 1, 0.25)
    """
    _checks.floats("detect", "x", x, -1, "[..., inputs]")
    _checks.anchors("detect", anchors)
    rule = "detectors need at least 2 inputs to compare"
    _checks.require(x.shape[-1] > 0 or not anchors.size, "detect", "x", x, rule)
    _checks.ids("detect", "anchors", anchors, x.shape[-1], "inputs of x")
    call = Detect(
        as_jax(x),
        as_int32(anchors),
        epsilon=_checks.finite_epsilon("detect", epsilon),
        n_inputs=x.shape[-1],
        accumulate=_checks.accumulation("detect", accumulate),
    )
    result: Detection = apply(call, implementation=implementation)
    return result
