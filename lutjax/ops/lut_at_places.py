"""Fused windowed lookup tables over images: detection and row sums."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from lutjax import _meshes
from lutjax._typing import Anchors, Array
from lutjax.dispatch._transforms import apply
from lutjax.dispatch.contract import Call, batched, shared, static
from lutjax.dispatch.registry import Implementation
from lutjax.ops import _checks, _groups
from lutjax.ops.detect import detect
from lutjax.ops.lookup import lookup
from lutjax.ops.sparse_lookup import sparse_lookup
from lutjax.values._fixed_point import FixedPoint
from lutjax.values._ids import as_int32, as_jax


@dataclasses.dataclass(frozen=True)
class Windows:
    """Window positions over an image.

    Attributes:
      image: height, width and channels. size, stride, padding: the window's, in rows and columns.
      channels: channels per window. If fewer than the image's, each detector group reads the next
        channels.
    """

    image: tuple[int, int, int]
    size: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    channels: int

    @property
    def places(self) -> tuple[int, int]:
        """Number of position rows and columns."""
        sizes = zip(self.image[:2], self.size, self.stride, self.padding, strict=True)
        rows, columns = ((n + 2 * p - k) // s + 1 for n, k, s, p in sizes)
        return rows, columns

    @classmethod
    def single_window(cls, n_inputs: int) -> "Windows":
        """Return a single window over all inputs, with input ids as anchors."""
        return cls((1, 1, n_inputs), (1, 1), (1, 1), (0, 0), n_inputs)

    def merge_channels(self, anchors: jax.Array, groups: int) -> tuple["Windows", jax.Array]:
        """Return windows over all image channels, and renumbered anchors ``[T, C, 2]``."""
        if self.channels == self.image[2]:
            return self, anchors
        pixel, channel = jnp.divmod(self._clamp_anchors(anchors), self.channels)
        first = _groups.detector_groups(len(anchors), groups) * self.channels
        ids = pixel * self.image[2] + channel + first[:, None, None]
        return dataclasses.replace(self, channels=self.image[2]), ids

    def in_image(self, anchors: jax.Array) -> jax.Array:
        """Return each anchor's row, column and all-image channel, int32 ``[T, C, 2, 3]``."""
        pixel, channel = jnp.divmod(self._clamp_anchors(anchors), self.channels)
        return jnp.stack([pixel // self.size[1], pixel % self.size[1], channel], -1)

    def _clamp_anchors(self, anchors: jax.Array) -> jax.Array:
        return jnp.clip(anchors, 0, math.prod(self.size) * self.channels - 1)

    def ids(self, anchors: jax.Array) -> jax.Array:
        """Return all-channel anchors at every position as padded-image ids, ``[P * T, C, 2]``.

        Each id is the id in the first window plus the position's shift.
        """
        width, n_channels = self.image[1] + 2 * self.padding[1], self.image[2]
        rows, columns = (np.arange(n) * s for n, s in zip(self.places, self.stride, strict=True))
        shifts = ((rows[:, None] * width + columns) * n_channels).astype(np.int32)

        def shift_anchors(anchors: jax.Array) -> jax.Array:
            row, column, channel = jnp.unstack(self.in_image(anchors), axis=-1)
            at_first = (row * width + column) * n_channels + channel
            at_places = jnp.asarray(shifts.reshape(-1, 1, 1, 1)) + at_first[None]
            return at_places.reshape(shifts.size * len(anchors), *anchors.shape[1:])

        ids: jax.Array = _meshes.shard_by_compiler(
            shift_anchors, lambda _: jax.sharding.PartitionSpec()
        )(anchors)
        return ids

    def pad_images(self, images: jax.Array) -> jax.Array:
        """Zero-pad images ``[..., height, width, channels]``."""
        if not any(self.padding):
            return images
        return jnp.pad(images, [(0, 0)] * (images.ndim - 3) + [(n, n) for n in (*self.padding, 0)])


def _detect_then_look_up(call: "LutAtPlaces", *, implementation: Implementation) -> jax.Array:
    """Detect at all positions in the padded image, then look up positions as samples."""
    windows, x, lead, n_detectors = call.windows, call.x, call.x.shape[:-1], len(call.weights)
    how: dict[str, Any] = {"accumulate": call.accumulate, "implementation": implementation}
    if any(windows.padding):
        padded = windows.pad_images(_meshes.reshape_unsharded(x, len(lead), *windows.image))
        x = _meshes.reshape_unsharded(padded, len(lead), math.prod(padded.shape[-3:]))
    of_all = detect(x, windows.ids(call.anchors), epsilon=call.epsilon, **how)
    d = jax.tree.map(lambda a: a.reshape(*lead, call.n_places, n_detectors), of_all)
    if call.targets is None:
        y = lookup(call.weights, d, groups=call.groups, **how)
        return _meshes.reshape_unsharded(y, y.ndim - 2, call.n_outputs)
    each = n_detectors // call.groups
    targets = jnp.repeat(call.targets[:, None], each, 0, total_repeat_length=n_detectors)
    return sparse_lookup(call.weights, d, targets, call.n_outputs, **how)


@dataclasses.dataclass(frozen=True, eq=False)
class LutAtPlaces(Call, op="lut_at_places", output="p go", parts=_detect_then_look_up):
    """The call of `lut_at_places` with separate outputs per group.

    It decomposes into a detection and a lookup.

    Attributes:
      x: ``[B, I]`` floats, unpadded images.
      weights: ``[T, R, O]`` floats.
      anchors: int32 ``[T, C, 2]``, window ids, possibly out of range.
      targets: int32 ``[G, O]``, output ids per group, -1 for none; None: separate outputs per
        group.
      windows: the window positions, with all image channels. groups: ``G``; each group's detectors
        are contiguous.
      epsilon: dead zone. accumulate: see the op. n_reached: outputs per position with targets, else
        None.

    Output and its cotangent: ``[B, P, n_outputs]``. Differentiable: `x`, `weights`.
    """

    x: jax.Array = batched(1, "i")
    weights: jax.Array = shared("t r k")
    anchors: jax.Array = shared("t c w")
    targets: jax.Array | None = shared("g k", default=None)
    windows: Windows = static()
    groups: int = static(default=1)
    epsilon: float = static(default=0.0)
    accumulate: FixedPoint | None = static(default=None)
    n_reached: int | None = static(default=None)

    @property
    def n_places(self) -> int:
        """Number of positions ``P``."""
        return math.prod(self.windows.places)

    @property
    def n_outputs(self) -> int:
        """Number of outputs per position."""
        return self.groups * self.weights.shape[2] if self.n_reached is None else self.n_reached


@dataclasses.dataclass(frozen=True, eq=False)
class LutToTargets(LutAtPlaces, op="lut_at_places", output="p o", parts=_detect_then_look_up):
    """The call of `lut_at_places` with targets. Groups on different devices may share outputs."""


def lut_at_places(
    images: Float[Array, "*batch height width channels"],
    weights: Float[Array, "detectors rows outputs"],
    anchors: Anchors,
    targets: Int[Array, "groups outputs"] | None = None,
    n_outputs: int | None = None,
    *,
    windows: Windows,
    groups: int = 1,
    epsilon: float = 0.0,
    accumulate: FixedPoint | None = None,
    implementation: Implementation = None,
) -> Float[jax.Array, "*any place_rows place_columns out_channels"]:
    """Apply lookup tables at all window positions: `lutjax.detect`, then `lutjax.lookup`.

    A fused kernel, if available, never stores detections. It recomputes rows and margins from the
    image in the forward and backward pass.

    Definition without padding. With padding, images are first zero-padded on each side::

        parts = images.shape[-1] // windows.channels  # 1 if all groups share a window
        # [rows, columns, values of a window]
        ids = lutjax.wiring.windows(images.shape[-3:], windows.size, windows.stride)
        ids = np.moveaxis(ids.reshape(*ids.shape[:2], -1, parts, windows.channels), 3, 2)
        patches = images.reshape(*images.shape[:-3], -1)[..., ids.reshape(*ids.shape[:3], -1)]
        if targets is None:
            y = lutjax.lut(patches, weights, anchors, groups=groups, epsilon=epsilon)
            y = y.reshape(*y.shape[:-2], -1)
        else:
            targets = np.repeat(targets, len(anchors) // groups, axis=0)[:, None]
            y = lutjax.sparse_lut(
                patches, weights, anchors, targets, n_outputs, groups=groups, epsilon=epsilon
            )
            y = y.sum(axis=-2)

    Args:
      images: ``[..., height, width, F]``.
      weights: ``[T, 2**C, O]``.
      anchors: int32 ``[T, C, 2]``, window ids.
      targets: int32 ``[groups, O]``, output ids per group, below `n_outputs`; -1 for none. None
        means ``O`` separate outputs per group.
      n_outputs: outputs per position; ignored without `targets`.
      windows: the window positions.
      groups: number of groups, as in `lutjax.conv_lut`. Groups share all-channel windows.
      epsilon: dead zone, see `lutjax.detect`.
      accumulate: None for floating-point sums, or see `lutjax.FixedPoint`.
      implementation: see `lutjax.detect`. Triton sums weight gradients, and outputs with `targets`,
        by atomics.

    Returns:
      ``[..., rows, columns, n_outputs]``, without targets ``[..., rows, columns, groups * O]``. The
      dtype is ``weights.dtype``.

    Raises:
      ValueError, TypeError: a wrong shape or dtype.

    Source: docs/semantics.md, section 11.
    """
    images = as_jax(images)
    op, weights = LutAtPlaces.op, as_jax(weights)
    _checks.floats(op, "images", images, -3, "[..., height, width, channels]")
    rule = f"its last axes must be {list(windows.image)}, the image of windows"
    _checks.require(images.shape[-3:] == windows.image, op, "images", images, rule)
    _checks.anchors(op, anchors)
    n_detectors, n_comparisons, _ = anchors.shape
    _checks.table(op, weights, n_detectors, n_comparisons, "anchors")
    n_groups = _groups.number(op, groups, n_detectors)
    _checks.ids(
        op, "anchors", anchors, math.prod(windows.size) * windows.channels, "values of a window"
    )
    of_all, ids = windows.merge_channels(as_int32(anchors), n_groups)
    x = _meshes.reshape_unsharded(images, images.ndim - 3, math.prod(windows.image))
    options: dict[str, Any] = {
        "windows": of_all,
        "groups": n_groups,
        "epsilon": _checks.finite_epsilon(op, epsilon),
        "accumulate": _checks.accumulation(op, accumulate),
    }
    if targets is None:
        call = LutAtPlaces(x, weights, ids, **options)
    else:
        _checks.integers(op, "targets", targets, 2, "[groups, outputs]")
        expected = (n_groups, weights.shape[2])
        rule = f"expected {list(expected)}: a target for each output of the tables of each group"
        _checks.require(targets.shape == expected, op, "targets", targets, rule)
        if n_outputs is None:
            raise ValueError(
                f"{op}: n_outputs is None; with targets it is the number of outputs of a place."
            )
        _checks.ids(op, "targets", targets, n_outputs, "outputs", unused=True)
        call = LutToTargets(x, weights, ids, as_int32(targets), n_reached=n_outputs, **options)
    y = apply(call, implementation=implementation)
    return _meshes.reshape_unsharded(y, y.ndim - 2, *windows.places, call.n_outputs)
