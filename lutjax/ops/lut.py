"""Fully connected lookup-table layer."""

from typing import Any

import jax
from jaxtyping import Float

from lutjax._typing import Anchors, Array
from lutjax.dispatch.registry import Implementation
from lutjax.ops import _groups
from lutjax.ops.detect import detect
from lutjax.ops.lookup import lookup
from lutjax.values._detection import Detection
from lutjax.values._fixed_point import FixedPoint
from lutjax.values._ids import trusted_ids


def lut(
    x: Float[Array, "*batch inputs"],
    weights: Float[Array, "detectors rows outputs"],
    anchors: Anchors,
    *,
    groups: int | None = None,
    epsilon: float = 0.0,
    accumulate: FixedPoint | None = None,
    implementation: Implementation = None,
) -> Float[jax.Array, "*any outputs"]:
    """Apply a fully connected lookup-table layer: `lutjax.detect`, then `lutjax.lookup`.

    Definition::

        if groups is not None:
            # Concatenate the groups' inputs; a detector's group begins at `first`.
            first = np.arange(len(anchors)) // (len(anchors) // groups) % x.shape[-2] * x.shape[-1]
            x, anchors = x.reshape(*x.shape[:-2], -1), anchors + first[:, None, None]
        y = lutjax.lookup(weights, lutjax.detect(x, anchors, epsilon=epsilon), groups=groups)

    Args:
      x: ``[..., I]``; with `groups` ``[..., G, I]``, or ``[..., 1, I]`` if all groups share the
        input.
      weights: ``[T, 2**C, O]``.
      anchors: int32 ``[T, C, 2]``, input ids within a group.
      groups: number of groups ``G``. The first ``T / G`` detectors read the first input and add to
        the first output, and so on. None means one group without a group axis.
      epsilon: see `lutjax.detect`.
      accumulate: see `lutjax.detect`.
      implementation: see `lutjax.detect`.

    Returns:
      ``[..., O]``, or ``[..., G, O]`` with `groups`; dtype ``weights.dtype``.

    Raises:
      ValueError, TypeError: see `lutjax.detect`, `lutjax.lookup`.

    Source: docs/semantics.md, section 3.

    Example:
      >>> import jax, jax.numpy as jnp, lutjax
      >>> anchors = lutjax.sample_anchors(jax.random.key(0), n_inputs=8, n_detectors=4, n_anchors=3)
      >>> lutjax.lut(jnp.ones((2, 8)), jnp.ones((4, 2**3, 5)), anchors).shape
      (2, 5)
    """
    detection = detect_inputs("lut", x, anchors, groups, epsilon, accumulate, implementation)
    return lookup(
        weights, detection, groups=groups, accumulate=accumulate, implementation=implementation
    )


def detect_inputs(
    op: str,
    x: Any,
    anchors: Any,
    groups: int | None,
    epsilon: float,
    accumulate: FixedPoint | None,
    implementation: Implementation,
) -> Detection:
    """Return the detection of an input, or of each group's input."""
    how: dict[str, Any] = {
        "epsilon": epsilon,
        "accumulate": accumulate,
        "implementation": implementation,
    }
    if groups is None:
        return detect(x, anchors, **how)
    x, anchors = _groups.inputs_joined(op, x, anchors, groups)
    with trusted_ids():  # the anchors are already checked
        return detect(x, anchors, **how)
