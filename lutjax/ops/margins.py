"""Pairwise input differences."""

import dataclasses

import jax
from jaxtyping import Float, Int

from lutjax._typing import Array
from lutjax.dispatch._transforms import apply
from lutjax.dispatch.contract import Call, batched, shared, static
from lutjax.dispatch.registry import Implementation
from lutjax.ops import _checks, _groups
from lutjax.values._fixed_point import FixedPoint
from lutjax.values._ids import as_int32


@dataclasses.dataclass(frozen=True, eq=False)
class Margins(Call, op="margins", output="t c"):
    """The call of `lutjax.margins`.

    Attributes:
      x: ``[B, H, I]`` floats; ``H`` is ``G``, or 1 if all groups share the input. The backward pass
        uses only its shape.
      anchors: int32 ``[T, C, 2]``, or ``[T, C]`` for single probes; ids may be out of range.
      groups: ``G``; each group's tables are contiguous.
      accumulate: see the op.

    Output and its cotangent: ``[B, T, C]``. Differentiable: `x`.
    """

    x: jax.Array = batched(2, "h i")
    anchors: jax.Array = shared("t c w")
    groups: int = static(default=1)
    accumulate: FixedPoint | None = static(default=None)


def margins(
    x: Float[Array, "*batch inputs"],
    anchors: Int[Array, "detectors comparisons *pair"],
    *,
    groups: int | None = None,
    accumulate: FixedPoint | None = None,
    implementation: Implementation = None,
) -> Float[jax.Array, "*any detectors comparisons"]:
    """Return all pairwise differences; `lutjax.detect` keeps only the closest.

    Definition for one sample. ``du`` and ``dx`` are the cotangents. Without `groups` there is one
    group::

        x = x.reshape(-1, x.shape[-1])  # [groups or 1, I]
        t = np.arange(len(anchors))
        group = (t // (len(t) // groups) % len(x))[:, None]
        a = anchors if anchors.ndim == 2 else anchors[..., 0]
        u = x[group, a] if anchors.ndim == 2 else x[group, a] - x[group, anchors[..., 1]]

        dx = np.zeros_like(x)
        np.add.at(dx, (group, a), du)
        if anchors.ndim == 3:
            np.subtract.at(dx, (group, anchors[..., 1]), du)

    Args:
      x: ``[..., I]`` float32, bfloat16, float16 or float64; with `groups` ``[..., G, I]``, or
        ``[..., 1, I]`` if all groups share the input.
      anchors: int32 ``[T, C, 2]`` input pairs, or ``[T, C]`` single inputs to compare with 0.
        Out-of-range traced ids are clamped.
      groups: number of groups ``G``. The first ``T / G`` detectors read the first input, and so on.
        None means one group without a group axis.
      accumulate: see `lutjax.detect`.
      implementation: see `lutjax.detect`.

    Returns:
      ``[..., T, C]``, at least float32.

    Raises:
      ValueError, TypeError: a wrong shape or dtype, or groups that do not divide the detectors.

    Source: docs/semantics.md, section 12.

    Example:
      >>> import jax.numpy as jnp, lutjax
      >>> lutjax.margins(jnp.array([0.5, 0.25, 2.0]), jnp.array([[[0, 1], [1, 2]]]))
      Array([[ 0.25, -1.75]], dtype=float32)
    """
    x, n_groups = _groups.inputs("margins", x, anchors, groups)
    call = Margins(
        x,
        as_int32(anchors),
        groups=n_groups,
        accumulate=_checks.accumulation("margins", accumulate),
    )
    u: jax.Array = apply(call, implementation=implementation)
    return u
