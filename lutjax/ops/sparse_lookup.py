"""Summing rows that reach only some of the outputs."""

import dataclasses

import jax
from jaxtyping import Float, Int

from lutjax._typing import Array
from lutjax.dispatch._transforms import apply
from lutjax.dispatch.contract import Call, batched, shared, static
from lutjax.dispatch.registry import Implementation
from lutjax.ops import _checks, _edges, _groups, _nan
from lutjax.values._detection import Detection
from lutjax.values._fixed_point import FixedPoint
from lutjax.values._ids import as_int32, as_jax


@dataclasses.dataclass(frozen=True, eq=False)
class SparseLookup(Call, op="sparse_lookup", table="weights", output="o"):
    """The call of `lutjax.sparse_lookup`.

    Attributes:
      weights: ``[T, R, K]`` floats.
      detection: arrays ``[B, T]``; ids may lie beyond the rows.
      targets: int32 ``[T or 1, R or 1, K]``; negative ids are unused slots, others may lie beyond the outputs.
      n_outputs: ``O``. accumulate: as the op takes it.

    Output and its cotangent: ``[B, O]``. Differentiable: `weights`, `detection`.
    """

    weights: jax.Array = shared("t r k")
    detection: Detection = batched(1, "t")
    targets: jax.Array = shared("t r k")
    n_outputs: int = static()
    accumulate: FixedPoint | None = static(default=None)


def sparse_lookup(
    weights: Float[Array, "detectors rows slots"],
    detection: Detection,
    targets: Int[Array, "#detectors #rows slots"],
    n_outputs: int,
    *,
    groups: int | None = None,
    accumulate: FixedPoint | None = None,
    implementation: Implementation = None,
) -> Float[jax.Array, "*any {n_outputs}"]:
    """Sums addressed rows whose slots reach chosen outputs only.

    Slot ``k`` of row ``r`` of detector ``t`` adds ``weights[t, r, k]`` to output ``targets[t, r, k]``. Equal to
    `lutjax.lookup` of a table that is zero elsewhere.

    Definition, for one sample; ``dy`` is the cotangent of ``y`` and ``dmargin`` that of ``detection.margin``, and `groups` are 1
    for None::

        targets = np.broadcast_to(targets, weights.shape)
        t, index, margin = np.arange(len(weights)), detection.index, detection.margin
        group = np.broadcast_to((t // (len(t) // groups))[:, None, None], targets.shape)
        used = targets[t, index] >= 0
        y = np.zeros((groups, n_outputs))
        np.add.at(y, (group[t, index][used], targets[t, index][used]), weights[t, index][used])

        of_slots = np.where(targets >= 0, dy[group, targets], 0)  # the cotangent of the output that a slot reaches
        of_rows = (weights * of_slots).sum(axis=-1)
        surrogate_derivative = 0.5 * np.where(margin > 0, 1, -1) / (1 + np.abs(margin)) ** 2
        dmargin = surrogate_derivative * (of_rows[t, index] - of_rows[t, index ^ detection.flip])
        dweights = np.zeros_like(weights)
        dweights[t, index] = of_slots[t, index]  # of all samples: their sum

    Args:
      weights: ``[T, R, K]`` float32, bfloat16, float16 or float64, with ``R == 2**detection.bits``.
      detection: arrays ``[..., T]``.
      targets: int32 ``[T or 1, R or 1, K]``, -1 for an unused slot. Ids beyond the outputs are clamped.
      n_outputs: number of outputs, ``O``.
      groups: number of groups, ``G``: the first ``T / G`` tables reach the ``O`` outputs of the first group, and so on. None: one
        group, without an axis.
      accumulate: None for floating-point sums, or see `lutjax.FixedPoint`.
      implementation: see `lutjax.detect`.

    Returns:
      ``[..., O]``, or ``[..., G, O]`` with `groups`, of the dtype of `weights`; 16-bit tables are summed in float32.

    Large rows are safe as for `lutjax.lookup`, where slot ``k`` of both rows has one target: then their values are subtracted
    before they are multiplied. Of slots with different targets two products are subtracted, which must be finite.

    Raises:
      ValueError, TypeError: a wrong shape or dtype, rows that do not fit the detection's bits, or groups that do not divide the
        detectors.

    Source: docs/semantics.md, section 4.

    Example:
      >>> import jax.numpy as jnp, lutjax
      >>> d = lutjax.detect(jnp.array([0.5, 0.25]), jnp.array([[[0, 1]]]))
      >>> lutjax.sparse_lookup(jnp.array([[[1.0], [7.0]]]), d, jnp.array([[[2]]]), 3)
      Array([0., 0., 7.], dtype=float32)
    """
    op = "sparse_lookup"
    detection = _checks.detection(op, "detection", detection, 1, "[..., detectors]")
    _checks.table(op, weights, detection.shape[-1], detection.bits, "detection")
    n_outputs, n_detectors = _edges.checked(op, weights, targets, n_outputs), weights.shape[0]
    accumulate = _checks.accumulation(op, accumulate)
    n_groups = _groups.number(op, groups, n_detectors)
    call = SparseLookup(
        as_jax(weights),
        detection,
        _groups.outputs_apart(as_int32(targets), n_outputs, n_groups, n_detectors),
        n_outputs=n_groups * n_outputs,
        accumulate=accumulate,
    )
    y = _groups.of_each(apply(call, implementation=implementation), groups)
    return _nan.shown(y, detection.margin)
