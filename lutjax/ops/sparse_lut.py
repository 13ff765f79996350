"""Sparse lookup-table layer."""

import jax
from jaxtyping import Float, Int

from lutjax._typing import Anchors, Array
from lutjax.dispatch.registry import Implementation
from lutjax.ops.lut import detect_inputs
from lutjax.ops.sparse_lookup import sparse_lookup
from lutjax.values._edges import Edges
from lutjax.values._fixed_point import FixedPoint


def sparse_lut(
    x: Float[Array, "*batch inputs"],
    weights: Float[Array, "detectors rows slots"] | Float[Array, " edges"],
    anchors: Anchors,
    targets: Int[Array, "#detectors #rows slots"] | Edges,
    n_outputs: int | None = None,
    *,
    groups: int | None = None,
    epsilon: float = 0.0,
    accumulate: FixedPoint | None = None,
    implementation: Implementation = None,
) -> Float[jax.Array, "*any outputs"]:
    """Apply a sparse lookup-table layer: `lutjax.detect`, then `lutjax.sparse_lookup`.

    Definition::

        if groups is not None:  # as in `lutjax.lut`
            first = np.arange(len(anchors)) // (len(anchors) // groups) % x.shape[-2] * x.shape[-1]
            x, anchors = x.reshape(*x.shape[:-2], -1), anchors + first[:, None, None]
        d = lutjax.detect(x, anchors, epsilon=epsilon)
        y = lutjax.sparse_lookup(weights, d, targets, n_outputs, groups=groups)

    Args:
      x: ``[..., I]``; with `groups` ``[..., G, I]``, or ``[..., 1, I]`` if all groups share the
        input.
      weights: ``[T, 2**C, K]``.
      anchors: int32 ``[T, C, 2]``, input ids within a group.
      targets: int32 ``[T or 1, 2**C or 1, K]`` with output ids within a group, -1 for an unused
        slot; or an edge list from `lutjax.wiring.from_edges`, with weights ``[E]``, see
        `lutjax.sparse_lookup`.
      n_outputs: ``O``; an edge list defines its own.
      groups: number of groups, as in `lutjax.lut`.
      epsilon: see `lutjax.detect`.
      accumulate: see `lutjax.detect`.
      implementation: see `lutjax.detect`.

    Returns:
      ``[..., O]``, or ``[..., G, O]`` with `groups`; dtype ``weights.dtype``.

    Raises:
      ValueError, TypeError: see `lutjax.detect`, `lutjax.sparse_lookup`.

    Source: docs/semantics.md, section 4.

    Example:
      >>> import jax.numpy as jnp, lutjax
      >>> table, targets = jnp.array([[[1.0], [7.0]]]), jnp.array([[[2]]])
      >>> lutjax.sparse_lut(jnp.array([0.5, 0.25]), table, jnp.array([[[0, 1]]]), targets, 3)
      Array([0., 0., 7.], dtype=float32)
    """
    detection = detect_inputs("sparse_lut", x, anchors, groups, epsilon, accumulate, implementation)
    return sparse_lookup(
        weights,
        detection,
        targets,
        n_outputs,
        groups=groups,
        accumulate=accumulate,
        implementation=implementation,
    )
