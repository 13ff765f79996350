"""Ops composed of a detection and a lookup."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from lutjax._typing import Anchors, Array, Positions
from lutjax.dispatch.registry import Implementation
from lutjax.ops import _checks, _groups
from lutjax.ops.detect import detect
from lutjax.ops.detect_signs import detect_signs
from lutjax.ops.lookup import lookup
from lutjax.ops.lookup_attention import lookup_attention
from lutjax.ops.sparse_lookup import sparse_lookup
from lutjax.values._detection import Detection
from lutjax.values._edges import Edges
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

        if groups is not None:  # concatenate the groups' inputs; a detector's group begins at `first`
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
    detection = _detect_inputs("lut", x, anchors, groups, epsilon, accumulate, implementation)
    return lookup(
        weights, detection, groups=groups, accumulate=accumulate, implementation=implementation
    )


def _detect_inputs(
    op: str,
    x: Any,
    anchors: Any,
    groups: int | None,
    epsilon: float,
    accumulate: FixedPoint | None,
    implementation: Implementation,
) -> Detection:
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
    detection = _detect_inputs(
        "sparse_lut", x, anchors, groups, epsilon, accumulate, implementation
    )
    return sparse_lookup(
        weights,
        detection,
        targets,
        n_outputs,
        groups=groups,
        accumulate=accumulate,
        implementation=implementation,
    )


def lut_attention(
    x: Float[Array, "*batch length inputs"],
    weights: Float[Array, "detectors rows slots"],
    anchors: Anchors,
    positions: Positions | None = None,
    *,
    targets: Int[Array, "#detectors #rows slots"] | None = None,
    n_outputs: int | None = None,
    causal: bool = True,
    window: int | None = None,
    block_mask: Bool[Array, "_ _"] | None = None,
    block_sizes: tuple[int, int] | int | None = None,
    segments: Int[Array, "*#batch length"] | None = None,
    sequence_axis: str | None = None,
    epsilon: float = 0.0,
    accumulate: FixedPoint | None = None,
    implementation: Implementation = None,
) -> Float[jax.Array, "*batch length outputs"]:
    """Apply `lutjax.lookup_attention` as self-attention, detecting each position once.

    Definition::

        d, e = lutjax.detect(x, anchors, epsilon=epsilon), lutjax.detect_signs(positions)
        y = lutjax.lookup_attention(
            weights, d, d, e, targets=targets, n_outputs=n_outputs, causal=causal, window=window,
            block_mask=block_mask, block_sizes=block_sizes, query_segments=segments, key_segments=segments,
        )

    Args:
      x: ``[..., L, I]``.
      weights: ``[T, 2**(2C + N), O]``.
      anchors: int32 ``[T, C, 2]``.
      positions: ``[distances, T or 1, N]`` with at least ``min(L - 1, window)`` distances; none:
        ``N = 0``.
      targets: see `lutjax.lookup_attention`.
      n_outputs: see `lutjax.lookup_attention`.
      causal: if False, every query attends to every key; see `lutjax.lookup_attention`. Positions
        then have ``2 * L - 1`` distances.
      window: attend only to keys less than this far away.
      block_mask: see `lutjax.lookup_attention`.
      block_sizes: see `lutjax.lookup_attention`.
      segments: int32 ``[..., L]``.
      sequence_axis: mesh axis that shards sequences; see `lutjax.lookup_attention`. Positions cover
        whole sequences.
      epsilon: see `lutjax.detect`.
      accumulate: see `lutjax.detect`.
      implementation: see `lutjax.detect`.

    Returns:
      ``[..., L, O]`` with dtype ``weights.dtype``. The first position has no earlier key and gives
      0.

    Raises:
      ValueError, TypeError: see `lutjax.detect`, `lutjax.lookup_attention`; also a sequence longer
        than the positions.

    Source: docs/semantics.md, section 5.

    Example:
      >>> import jax, jax.numpy as jnp, lutjax
      >>> anchors = lutjax.sample_anchors(jax.random.key(0), n_inputs=8, n_detectors=4, n_anchors=3)
      >>> weights, positions = jnp.ones((4, 2 ** (2 * 3 + 2), 5)), jnp.ones((15, 4, 2))
      >>> lutjax.lut_attention(jnp.ones((2, 16, 8)), weights, anchors, positions).shape
      (2, 16, 5)
    """
    _checks.floats("lut_attention", "x", x, -2, "[..., length, inputs]")
    detection = detect(
        x, anchors, epsilon=epsilon, accumulate=accumulate, implementation=implementation
    )
    position = None
    if positions is not None:
        _checks.positions("lut_attention", positions, detection.shape[-1])
        # Detectors first: each device's detectors stay together when batch dimensions are flattened.
        signs = detect_signs(jnp.swapaxes(positions, 0, 1), implementation=implementation)
        position = jax.tree.map(lambda a: jnp.swapaxes(a, 0, 1), signs)
    return lookup_attention(
        weights,
        detection,
        detection,
        position,
        targets=targets,
        n_outputs=n_outputs,
        causal=causal,
        window=window,
        block_mask=block_mask,
        block_sizes=block_sizes,
        query_segments=segments,
        key_segments=segments,
        sequence_axis=sequence_axis,
        accumulate=accumulate,
        implementation=implementation,
    )
