"""Drawing anchor pairs, and checking ids that are known before anything runs."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from lutjax._typing import Array


def sample_anchors(
    key: Array,
    n_inputs: int,
    n_detectors: int,
    n_anchors: int,
    *,
    candidates: Int[Array, "#detectors candidates"] | None = None,
) -> Int[jax.Array, "{n_detectors} {n_anchors} 2"]:
    """Draws the anchor pairs of detectors.

    Each pair is drawn uniformly from the ``n * (n - 1)`` ordered pairs of distinct candidate inputs,
    independently and with replacement: a detector can hold a pair twice.

    Args:
      key: a key of `jax.random`.
      n_inputs: number of inputs, at least 2.
      n_detectors: number of detectors, ``T``.
      n_anchors: pairs per detector, ``C``.
      candidates: int32 ``[T or 1, W]``, the inputs each detector may compare; -1 is an unused slot. All
        inputs if not given. Not traced: it is checked here.

    Returns:
      int32 ``[T, C, 2]``, for `lutjax.detect`.

    Raises:
      ValueError: a size is negative, a detector has fewer than two candidates, or a candidate is not an input.

    Source: docs/semantics.md, section 10.

    Example:
      >>> import jax, lutjax
      >>> anchors = lutjax.sample_anchors(jax.random.key(0), n_inputs=4, n_detectors=2, n_anchors=3)
      >>> anchors.shape
      (2, 3, 2)
      >>> bool((anchors[..., 0] != anchors[..., 1]).all())
      True
    """
    for name, size in (("n_inputs", n_inputs), ("n_detectors", n_detectors), ("n_anchors", n_anchors)):
        if size < 0:
            raise ValueError(f"sample_anchors: {name} is {size}; it must not be negative.")
    if candidates is None:
        if n_inputs < 2:
            raise ValueError(
                f"sample_anchors: n_inputs is {n_inputs}; every detector compares two different inputs, "
                "so there must be at least 2."
            )
        ids, count = None, jnp.full((n_detectors, 1), n_inputs, jnp.int32)
    else:
        ids, count = _packed(np.asarray(candidates), n_inputs, n_detectors)
    a_key, b_key = jax.random.split(key)
    shape = (n_detectors, n_anchors)
    a = jax.random.randint(a_key, shape, 0, count)
    b = jax.random.randint(b_key, shape, 0, count - 1)
    pairs = jnp.stack([a, b + (b >= a).astype(b.dtype)], -1)
    if ids is None:
        return pairs
    return jnp.take_along_axis(ids, pairs.reshape(n_detectors, -1), -1).reshape(pairs.shape)


def _packed(candidates: np.ndarray, n_inputs: int, n_detectors: int) -> tuple[jax.Array, jax.Array]:
    """Candidates with the unused slots last, and how many each detector has."""
    if candidates.ndim != 2 or candidates.shape[0] not in (1, n_detectors):
        raise ValueError(
            f"sample_anchors: candidates has shape {candidates.shape}; "
            f"expected [{n_detectors} or 1, candidates per detector]."
        )
    if candidates.size and (candidates.min() < -1 or candidates.max() >= n_inputs):
        raise ValueError(
            f"sample_anchors: candidates holds ids from {candidates.min()} to {candidates.max()}; "
            f"inputs are 0 to {n_inputs - 1}, and -1 marks an unused slot."
        )
    used = candidates >= 0
    count = used.sum(1)
    if (count < 2).any():
        t = int(np.argmax(count < 2))
        raise ValueError(
            f"sample_anchors: detector {t} has {count[t]} candidate inputs; it compares two different "
            "inputs, so it needs at least 2."
        )
    packed = np.take_along_axis(candidates, np.argsort(~used, axis=1, kind="stable"), 1)
    packed = np.broadcast_to(packed, (n_detectors, packed.shape[1]))
    return (
        jnp.asarray(packed, jnp.int32),
        jnp.asarray(np.broadcast_to(count[:, None], (n_detectors, 1)), jnp.int32),
    )


def check_anchors(anchors: Int[Array, "detectors bits 2"], n_inputs: int, *, where: str) -> None:
    """Raises if an anchor pair names an input that does not exist, or one input twice.

    Ids of a traced array are not known; ops clamp them instead. Layers call this when they are built and
    when a checkpoint is read.
    """
    ids = np.asarray(anchors)
    if ids.ndim != 3 or ids.shape[-1] != 2 or not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(
            f"{where}: anchors is {ids.dtype}{list(ids.shape)}; expected int32 [detectors, pairs, 2]."
        )
    if ids.size and (ids.min() < 0 or ids.max() >= n_inputs):
        raise ValueError(
            f"{where}: anchors holds ids from {ids.min()} to {ids.max()}; inputs are 0 to {n_inputs - 1}."
        )
    same = ids[..., 0] == ids[..., 1]
    if same.any():
        t, r = np.argwhere(same)[0]
        raise ValueError(
            f"{where}: anchor pair {r} of detector {t} compares input {ids[t, r, 0]} with itself; "
            "the two inputs of a pair must differ."
        )


def check_targets(targets: Int[Array, "#detectors #rows slots"], n_outputs: int, *, where: str) -> None:
    """Raises if a target is neither an output nor -1 (an unused slot)."""
    ids = np.asarray(targets)
    if ids.ndim != 3 or not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(
            f"{where}: targets is {ids.dtype}{list(ids.shape)}; expected int32 [detectors or 1, rows or 1, slots]."
        )
    if ids.size and (ids.min() < -1 or ids.max() >= n_outputs):
        raise ValueError(
            f"{where}: targets holds ids from {ids.min()} to {ids.max()}; outputs are 0 to {n_outputs - 1}, "
            "and -1 marks an unused slot."
        )
