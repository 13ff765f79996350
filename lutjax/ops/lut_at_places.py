"""Look-up tables at the places of a window over images, in one op: detection, and the sums of the rows that it addresses."""

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
    """Places of a window over an image.

    Attributes:
      image: height, width and channels. size, stride, padding: of the window, in rows and in columns.
      channels: of a window. Fewer than those of the image: those of each group of detectors follow those of the group before.
    """

    image: tuple[int, int, int]
    size: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    channels: int

    @property
    def places(self) -> tuple[int, int]:
        """Rows and columns of places."""
        sizes = zip(self.image[:2], self.size, self.stride, self.padding, strict=True)
        rows, columns = ((n + 2 * p - k) // s + 1 for n, k, s, p in sizes)
        return rows, columns

    @classmethod
    def whole(cls, n_inputs: int) -> "Windows":
        """Return the one place of a window that is all there is: anchors are ids of inputs."""
        return cls((1, 1, n_inputs), (1, 1), (1, 1), (0, 0), n_inputs)

    def of_all_channels(self, anchors: jax.Array, groups: int) -> tuple["Windows", jax.Array]:
        """Return windows of all channels of the image, and anchors ``[T, C, 2]`` as ids of values in these."""
        if self.channels == self.image[2]:
            return self, anchors
        pixel, channel = jnp.divmod(self._existing(anchors), self.channels)
        first = _groups.of_detector(len(anchors), groups) * self.channels
        ids = pixel * self.image[2] + channel + first[:, None, None]
        return dataclasses.replace(self, channels=self.image[2]), ids

    def in_image(self, anchors: jax.Array) -> jax.Array:
        """Return row, column and channel of every end of anchor pairs in a window of all channels, int32 ``[T, C, 2, 3]``."""
        pixel, channel = jnp.divmod(self._existing(anchors), self.channels)
        return jnp.stack([pixel // self.size[1], pixel % self.size[1], channel], -1)

    def _existing(self, anchors: jax.Array) -> jax.Array:
        return jnp.clip(anchors, 0, math.prod(self.size) * self.channels - 1)

    def ids(self, anchors: jax.Array) -> jax.Array:
        """Return the anchors of a window of all channels at every place as ids of values of the padded image, ``[P * T, C, 2]``.

        The id of a value of the window at a place is its id in the first window plus the shift of that place.
        """
        width, n_channels = self.image[1] + 2 * self.padding[1], self.image[2]
        rows, columns = (np.arange(n) * s for n, s in zip(self.places, self.stride, strict=True))
        shifts = ((rows[:, None] * width + columns) * n_channels).astype(np.int32)

        def shifted(anchors: jax.Array) -> jax.Array:
            row, column, channel = jnp.unstack(self.in_image(anchors), axis=-1)
            at_first = (row * width + column) * n_channels + channel
            at_places = jnp.asarray(shifts.reshape(-1, 1, 1, 1)) + at_first[None]
            return at_places.reshape(shifts.size * len(anchors), *anchors.shape[1:])

        ids: jax.Array = _meshes.divided_by_compiler(shifted, lambda _: jax.sharding.PartitionSpec())(anchors)
        return ids

    def padded(self, images: jax.Array) -> jax.Array:
        """Return images ``[..., height, width, channels]`` with rows and columns of zeros around them."""
        if not any(self.padding):
            return images
        return jnp.pad(images, [(0, 0)] * (images.ndim - 3) + [(n, n) for n in (*self.padding, 0)])


def _detect_then_look_up(call: "LutAtPlaces", *, implementation: Implementation) -> jax.Array:
    """Return the outputs of a call: detectors of all places read the padded image, and places are samples of the look-up."""
    windows, x, lead, n_detectors = call.windows, call.x, call.x.shape[:-1], len(call.weights)
    how: dict[str, Any] = {"accumulate": call.accumulate, "implementation": implementation}
    if any(windows.padding):
        padded = windows.padded(_meshes.reshaped(x, len(lead), *windows.image))
        x = _meshes.reshaped(padded, len(lead), math.prod(padded.shape[-3:]))
    of_all = detect(x, windows.ids(call.anchors), epsilon=call.epsilon, **how)
    d = jax.tree.map(lambda a: a.reshape(*lead, call.n_places, n_detectors), of_all)
    if call.targets is None:
        y = lookup(call.weights, d, groups=call.groups, **how)
        return _meshes.reshaped(y, y.ndim - 2, call.n_outputs)
    each = n_detectors // call.groups
    targets = jnp.repeat(call.targets[:, None], each, 0, total_repeat_length=n_detectors)
    return sparse_lookup(call.weights, d, targets, call.n_outputs, **how)


@dataclasses.dataclass(frozen=True, eq=False)
class LutAtPlaces(Call, op="lut_at_places", output="p go", parts=_detect_then_look_up):
    """The call of `lut_at_places` in which each group has outputs of its own.

    Its parts are a detection and a look-up.

    Attributes:
      x: ``[B, I]`` floats, the values of images, not padded.
      weights: ``[T, R, O]`` floats.
      anchors: int32 ``[T, C, 2]``, ids of values of a window, which may lie beyond it.
      targets: int32 ``[G, O]``, the outputs that each group reaches, -1 for none; None: each group has outputs of its own.
      windows: where detectors are, with all channels of the image. groups: ``G``, whose detectors follow each other.
      epsilon: dead zone. accumulate: as the op takes it. n_reached: outputs of a place among which targets are; None without targets.

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
        """Number of places, ``P``."""
        return math.prod(self.windows.places)

    @property
    def n_outputs(self) -> int:
        """Number of outputs of a place."""
        return self.groups * self.weights.shape[2] if self.n_reached is None else self.n_reached


@dataclasses.dataclass(frozen=True, eq=False)
class LutToTargets(LutAtPlaces, op="lut_at_places", output="p o", parts=_detect_then_look_up):
    """The call of `lut_at_places` with targets: groups on several devices may reach the same outputs."""


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
    """Look-up tables at all places of a window: `lutjax.detect`, then `lutjax.lookup`.

    In one kernel, where there is one, there is no array of detections: rows and margins are computed where they are used, from the image, in
    the forward and in the backward pass.

    Definition without padding; with padding the images first get rows and columns of zeros on each side::

        parts = images.shape[-1] // windows.channels  # 1 where all groups share a window
        ids = lutjax.wiring.windows(images.shape[-3:], windows.size, windows.stride)  # [rows, columns, values of a window]
        ids = np.moveaxis(ids.reshape(*ids.shape[:2], -1, parts, windows.channels), 3, 2)
        patches = images.reshape(*images.shape[:-3], -1)[..., ids.reshape(*ids.shape[:3], -1)]
        if targets is None:
            y = lutjax.lut(patches, weights, anchors, groups=groups, epsilon=epsilon)
            y = y.reshape(*y.shape[:-2], -1)
        else:
            targets = np.repeat(targets, len(anchors) // groups, axis=0)[:, None]
            y = lutjax.sparse_lut(patches, weights, anchors, targets, n_outputs, groups=groups, epsilon=epsilon)
            y = y.sum(axis=-2)

    Args:
      images: ``[..., height, width, F]``.
      weights: ``[T, 2**C, O]``.
      anchors: int32 ``[T, C, 2]``, ids of values of a window.
      targets: int32 ``[groups, O]``: the outputs that the tables of each group reach, of `n_outputs`; -1 for none. None: each group
        has ``O`` outputs of its own.
      n_outputs: of a place, with `targets`; without them it is not used.
      windows: the places of the window.
      groups: number of groups, as for `lutjax.conv_lut`. Groups share windows of all channels.
      epsilon: dead zone, see `lutjax.detect`.
      accumulate: None for floating-point sums, or see `lutjax.FixedPoint`.
      implementation: see `lutjax.detect`. In Triton, the gradient of the weights, and outputs with `targets`, are summed by atomics.

    Returns:
      ``[..., rows, columns, n_outputs]``, without targets ``[..., rows, columns, groups * O]``; of the dtype of `weights`.

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
    _checks.ids(op, "anchors", anchors, math.prod(windows.size) * windows.channels, "values of a window")
    of_all, ids = windows.of_all_channels(as_int32(anchors), n_groups)
    x = _meshes.reshaped(images, images.ndim - 3, math.prod(windows.image))
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
            raise ValueError(f"{op}: n_outputs is None; with targets it is the number of outputs of a place.")
        _checks.ids(op, "targets", targets, n_outputs, "outputs", unused=True)
        call = LutToTargets(x, weights, ids, as_int32(targets), n_reached=n_outputs, **options)
    y = apply(call, implementation=implementation)
    return _meshes.reshaped(y, y.ndim - 2, *windows.places, call.n_outputs)
