"""Self-attention with lookup tables."""

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from lutjax._typing import Anchors, Array, Positions
from lutjax.dispatch.registry import Implementation
from lutjax.ops import _checks
from lutjax.ops.detect import detect
from lutjax.ops.detect_signs import detect_signs
from lutjax.ops.lookup_attention import lookup_attention
from lutjax.values._fixed_point import FixedPoint


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
            block_mask=block_mask, block_sizes=block_sizes,
            query_segments=segments, key_segments=segments,
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
        # Detectors first: each device's detectors stay together when batch dimensions are
        # flattened.
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
