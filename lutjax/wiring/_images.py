"""Image connectivity: the inputs and table outputs of detector groups."""

import dataclasses
import functools
import hashlib
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Int

from lutjax._typing import Array
from lutjax.values._anchors import sample_anchors
from lutjax.wiring._sizes import Size, as_image, pair, shape_of

CENTERS = ("grid", "uniform", "normal")


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Connectivity:
    """Receptive and projective fields for detector groups, between two maps of values.

    A map has the shape ``(height, width)``, ``(height, width, channels)``, or ``(values,)``. A
    value's id is its index in the flattened map. `projections`, `window_groups` and `full` return
    connectivities; the constructor accepts other ids. Connectivities with equal contents are equal
    and have equal hashes.

    Attributes:
      in_shape: sizes of the input map.
      out_shape: sizes of the output map.
      centers: float64 ``[G, 2]``: each group's center row and column in the input map;
        the first pixel is at (0, 0).
      candidates: int32 ``[G, inputs]``: input ids that a group's detectors may compare; -1 is
        an unused slot.
      targets: int32 ``[G, outputs]``: output ids that a group's tables reach; -1 is an unused
        slot.

    Raises:
      ValueError: an id is not in its map, or the arrays have different numbers of groups.

    Source: docs/semantics.md, section 11.

    Example:
      >>> import jax, lutjax
      >>> from lutjax import wiring
      >>> c = wiring.Connectivity((1, 3), (2,), [[0, 0.5], [0, 1.5]], [[0, 1], [1, 2]], [[0], [1]])
      >>> c
      Connectivity((1, 3) to (2,), groups=2, inputs=2, outputs=1)
      >>> anchors = c.sample_anchors(jax.random.key(0), n_detectors=4, n_anchors=2)
      >>> anchors.shape, c.table_targets(4).shape
      ((8, 2, 2), (8, 1, 1))
    """

    in_shape: tuple[int, ...]
    out_shape: tuple[int, ...]
    centers: Any
    candidates: Any
    targets: Any

    def __post_init__(self) -> None:
        where = type(self).__name__
        for name in ("in_shape", "out_shape"):
            object.__setattr__(self, name, shape_of(where, name, getattr(self, name), (1, 2, 3)))
        for name in ("centers", "candidates", "targets"):
            value = np.asarray(getattr(self, name))
            whole = name != "centers"
            if value.ndim != 2 or (whole and not np.issubdtype(value.dtype, np.integer)):
                expected = "int32 [groups, ids]" if whole else "[groups, 2]"
                raise ValueError(
                    f"{where}: {name} is {value.dtype}{list(value.shape)}; expected {expected}."
                )
            # A read-only copy, so that the digest, which is also the hash, stays valid.
            array = np.array(value, np.int32 if whole else np.float64)
            array.flags.writeable = False
            object.__setattr__(self, name, array)
        arrays = (self.centers, self.candidates, self.targets)
        if self.centers.shape[1] != 2 or len(set(map(len, arrays))) > 1:
            shapes = ", ".join(str(list(a.shape)) for a in arrays)
            raise ValueError(
                f"{where}: centers, candidates and targets have the shapes {shapes}; expected "
                "[groups, 2], and [groups, ids] with the same number of groups."
            )
        for name, kind, size in (
            ("candidates", "inputs", self.n_inputs),
            ("targets", "outputs", self.n_outputs),
        ):
            ids = getattr(self, name)
            if ids.size and (ids.min() < -1 or ids.max() >= size):
                raise ValueError(
                    f"{where}: {name} holds ids from {ids.min()} to {ids.max()}; "
                    f"{kind} are 0 to {size - 1}, and -1 marks an unused slot."
                )

    @property
    def n_groups(self) -> int:
        """Number of groups, ``G``."""
        return len(self.centers)

    @property
    def n_inputs(self) -> int:
        """Number of values in the input map."""
        return math.prod(self.in_shape)

    @property
    def n_outputs(self) -> int:
        """Number of values in the output map."""
        return math.prod(self.out_shape)

    def sample_anchors(
        self, key: Array, n_detectors: int, n_anchors: int, *, distinct: bool = False
    ) -> Int[jax.Array, "detectors {n_anchors} 2"]:
        """Sample anchor pairs among the candidates of each group: `lutjax.sample_anchors`.

        Args:
          key: a `jax.random` key.
          n_detectors: detectors per group, consecutive in the result.
          n_anchors: pairs per detector, ``C``.
          distinct: draw the pairs of a group without replacement.

        Returns:
          int32 ``[G * n_detectors, C, 2]``, input ids.

        Raises:
          ValueError: a size is negative, or a group has fewer than two candidates.
        """
        self.check_candidates(type(self).__name__)
        candidates = np.repeat(self.candidates, n_detectors, axis=0)
        return sample_anchors(
            key, self.n_inputs, len(candidates), n_anchors,
            candidates=candidates, distinct=distinct, groups=self.n_groups,
        )  # fmt: skip

    def table_targets(self, n_detectors: int) -> Int[np.ndarray, "detectors 1 slots"]:
        """Return the table targets of all groups for `lutjax.sparse_lut`.

        Args:
          n_detectors: detectors per group.

        Returns:
          int32 ``[G * n_detectors, 1, K]``.
        """
        return np.repeat(self.targets, n_detectors, axis=0)[:, None]

    def check_candidates(self, where: str, remedy: str = "") -> None:
        """Raise if a group has fewer than two candidates."""
        count = (self.candidates >= 0).sum(1)
        if (count < 2).any():
            g = int(np.argmax(count < 2))
            raise ValueError(
                f"{where}: group {g}, with its center at {_point(self.centers[g])}, "
                f"has too few inputs, {count[g]}; a detector compares two different inputs, "
                f"so it needs at least 2.{remedy}"
            )

    @functools.cached_property
    def _digest(self) -> bytes:
        shapes = f"{self.in_shape} {self.out_shape} {self.candidates.shape} {self.targets.shape}"
        contents = hashlib.sha256(shapes.encode())
        for a in (self.centers, self.candidates, self.targets):
            contents.update(a.tobytes())
        return contents.digest()

    def __hash__(self) -> int:
        return int.from_bytes(self._digest[:8])

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Connectivity) and self._digest == other._digest)

    def __reduce__(self) -> tuple[Any, ...]:
        arrays = (self.centers, self.candidates, self.targets)
        return type(self), (self.in_shape, self.out_shape, *arrays)

    def __repr__(self) -> str:
        n_read, n_reached = self.candidates.shape[1], self.targets.shape[1]
        return (
            f"Connectivity({self.in_shape} to {self.out_shape}, groups={self.n_groups}, "
            f"inputs={n_read}, outputs={n_reached})"
        )


def windows(
    image_shape: tuple[int, ...], kernel: Size, stride: Size = 1, *, padding: Size = 0
) -> Int[np.ndarray, "rows columns window"]:
    """Return the value ids in each window over a flattened image.

    Args:
      image_shape: height, width and channels, in memory order. Default: one channel.
      kernel: window height and width, or one number for both.
      stride: distance between windows, in rows and in columns.
      padding: rows and columns around the image that windows may cover; less than `kernel`. Their
        ids are -1.

    Returns:
      int32 ``[rows, columns, height * width * channels]``: each window's value ids.
      ``windows(...)[..., leaves]`` are tree wires at every window position. With padding they are
      candidates for `lutjax.sample_anchors`.

    Raises:
      ValueError: the window is larger than the image, or a size is impossible.

    Source: docs/logic.md, section 4; docs/semantics.md, section 11.

    Example:
      >>> from lutjax import wiring
      >>> wiring.windows((3, 4, 1), kernel=2)[1, 2]
      array([ 6,  7, 10, 11], dtype=int32)
      >>> wiring.windows((3, 4), kernel=(2, 3), padding=(0, 1))[1, 0]
      array([-1,  4,  5, -1,  8,  9], dtype=int32)
    """
    shape = as_image(shape_of("windows", "image_shape", image_shape, (2, 3)))
    size, step, around = window_sizes("windows", shape, kernel, stride, padding)
    ids = np.arange(math.prod(shape), dtype=np.int32).reshape(shape)
    ids = np.pad(ids, [(n, n) for n in (*around, 0)], constant_values=-1)
    views = np.lib.stride_tricks.sliding_window_view(ids, size, (0, 1))[:: step[0], :: step[1]]
    return np.moveaxis(views, 2, -1).reshape(*views.shape[:2], -1)


def window_sizes(
    where: str, image_shape: tuple[int, ...], kernel: Size, stride: Size, padding: Size
) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
    """Return kernel, stride and padding heights and widths for windows over an image."""
    size, step = pair(where, "kernel", kernel), pair(where, "stride", stride)
    around = pair(where, "padding", padding, 0)
    height, width = image_shape[:2]
    if any(k > n + 2 * p for k, n, p in zip(size, image_shape, around, strict=False)):
        padded = f" with padding {padding}" if any(around) else ""
        raise ValueError(
            f"{where}: kernel is {kernel}, larger than an image of {height} by {width}{padded}."
        )
    if any(p >= k for k, p in zip(size, around, strict=True)):
        raise ValueError(
            f"{where}: padding is {padding} and kernel is {kernel}; a window could be outside the "
            "image. The padding must be less than the kernel."
        )
    return size, step, around


def window_groups(
    image_shape: tuple[int, ...],
    kernel: Size,
    stride: Size = 1,
    *,
    padding: Size = 0,
    outputs: int = 1,
) -> Connectivity:
    """Return the connectivity of a sliding window: each position has its own detectors and outputs.

    Args:
      image_shape, kernel, stride, padding: as in `windows`. Padding has no inputs.
      outputs: outputs of each window position.

    Returns:
      `Connectivity` to a map ``(rows, columns, outputs)``, with one group per window position, row
      by row.

    Raises:
      ValueError: the window is larger than the image, or a size is impossible.

    Source: docs/semantics.md, section 11.

    Example:
      >>> from lutjax import wiring
      >>> c = wiring.window_groups((28, 28), kernel=7, stride=7, outputs=10)
      >>> c
      Connectivity((28, 28) to (4, 4, 10), groups=16, inputs=49, outputs=10)
      >>> c.centers[1]
      array([ 3., 10.])
    """
    where = "window_groups"
    in_shape = shape_of(where, "image_shape", image_shape, (2, 3))
    size, step, around = window_sizes(where, in_shape, kernel, stride, padding)
    (outputs,) = shape_of(where, "outputs", outputs, (1,))
    ids = windows(in_shape, size, step, padding=around)
    rows, columns, _ = ids.shape
    places = np.indices((rows, columns)).reshape(2, -1).T
    corners = places * step - np.array(around)
    return Connectivity(
        in_shape,
        (rows, columns, outputs),
        # Centers lie between pixels if the kernel is even.
        corners + (np.array(size) - 1) / 2,
        _pack_ids(ids.reshape(rows * columns, -1)),
        np.arange(rows * columns * outputs).reshape(-1, outputs),
    )


def full(in_shape: Size, out_shape: Size) -> Connectivity:
    """Return a connectivity with one group that reads every input and reaches every output.

    Args:
      in_shape: input map sizes: (height, width), (height, width, channels), or a number of
        values.
      out_shape: output map sizes, likewise.

    Returns:
      `Connectivity` with one group.

    Raises:
      ValueError: a size is less than 1.

    Source: docs/semantics.md, section 11.

    Example:
      >>> from lutjax import wiring
      >>> wiring.full((14, 14), 10)
      Connectivity((14, 14) to (10,), groups=1, inputs=196, outputs=10)
    """
    read, reached = (
        shape_of("full", name, shape, (1, 2, 3))
        for name, shape in (("in_shape", in_shape), ("out_shape", out_shape))
    )
    height, width, _ = as_image(read)
    ids = (np.arange(math.prod(shape))[None] for shape in (read, reached))
    return Connectivity(read, reached, [[(height - 1) / 2, (width - 1) / 2]], *ids)


def projections(
    key: Array | None,
    in_shape: tuple[int, ...],
    out_shape: tuple[int, ...],
    *,
    groups: Size | None = None,
    receptive: Size | None = None,
    projective: Size | None = None,
    centers: Any = "grid",
    deviation: float = 0.25,
    probability: float | int = 1.0,
    input_mask: Bool[Any, "height width"] | None = None,
    output_mask: Bool[Any, "out_height out_width"] | None = None,
) -> Connectivity:
    """Return detector groups with corresponding windows in an input map and an output map.

    A group has a center in the input map. Its detectors read the pixels with ``|row - center row|
    <= (receptive height - 1) / 2``, and likewise for columns. The center times ``out_shape /
    in_shape``, for rows and for columns, is a point in the output map. The group's tables reach the
    pixels with ``|row - point's row| <= (projective height - 1) / 2``, and likewise for columns. A
    pixel's channels are all read and reached. Centers are shifted as little as necessary for whole
    windows: half a pixel, and more at the border.

    Args:
      key: a `jax.random` key; None if nothing is random.
      in_shape: input map height and width, and optionally channels.
      out_shape: output map height and width, and optionally channels.
      groups: number of groups. For a grid its rows and columns, or one number for both.
      receptive: a group's input window height and width, or one number for both. None: the whole
        map.
      projective: a group's output window height and width. None: the whole map.
      centers: ``"grid"``: evenly spaced, from the first possible window position to the last.
        ``"uniform"``: uniformly random in the map. ``"normal"``: normally distributed around the
        middle of the map. Or an array ``[groups, 2]`` of rows and columns.
      deviation: standard deviation of normal centers, relative to height and width.
      probability: probability that a group keeps an output in its window.
      input_mask: bool ``[height, width]``, False for pixels that no group reads.
      output_mask: bool with the shape of the output map, False for pixels that no group reaches.

    Returns:
      `Connectivity` with candidates and targets in the order row, column, channel.

    Raises:
      ValueError: a size is impossible, a window is larger than its map, a mask has a wrong shape,
        or a group has fewer than two inputs or no output.

    Source: docs/semantics.md, section 11.

    Example:
      >>> from lutjax import wiring
      >>> c = wiring.projections(None, (8, 8), (10, 12), groups=(3, 3), receptive=3, projective=4)
      >>> c
      Connectivity((8, 8) to (10, 12), groups=9, inputs=9, outputs=16)
      >>> c.centers[:3].tolist(), c.candidates[1, :3].tolist(), c.targets[1, :4].tolist()
      ([[1.0, 1.0], [1.0, 4.0], [1.0, 6.0]], [3, 4, 5], [5, 6, 7, 17])
    """
    where = "projections"
    in_shape = shape_of(where, "in_shape", in_shape, (2, 3))
    out_shape = shape_of(where, "out_shape", out_shape, (2, 3))
    read, reached = as_image(in_shape), as_image(out_shape)
    window = read[:2] if receptive is None else pair(where, "receptive", receptive)
    if window[0] > read[0] or window[1] > read[1]:
        raise ValueError(
            f"{where}: receptive is {receptive}, larger than the input map, {read[0]} by {read[1]}."
        )
    if not 0 < probability <= 1:
        raise ValueError(
            f"{where}: probability is {probability}; it must be above 0 and at most 1."
        )
    center_key, target_key = _keys(where, key, centers, probability)
    points = _centers(where, center_key, read, window, groups, centers, deviation)
    # The window nearest to the center, shifted into the map so that it is whole.
    limits = np.array(read[:2]) - window
    first = np.clip(np.floor(points - (np.array(window) - 1) / 2 + 0.5), 0, limits).astype(np.int64)

    candidates = _ids(first, np.broadcast_to(window, first.shape), read)
    candidates = _replace_masked(where, "input_mask", candidates, input_mask, read)
    # In integers, so exact: the center is first + (window - 1) / 2, and target t is reached if
    # |2 height t - twice out_height| <= (size - 1) height.
    twice, span = 2 * first + window - 1, (0, 0)
    start, count = np.zeros_like(first), np.broadcast_to(reached[:2], first.shape)
    if projective is not None:
        span = pair(where, "projective", projective)
        high, wide = np.array(read[:2]), np.array(reached[:2])
        middle, reach = twice * wide, (np.array(span) - 1) * high
        start = np.maximum(-((reach - middle) // (2 * high)), 0)
        count = np.minimum((middle + reach) // (2 * high), wide - 1) - start + 1
    targets = _replace_masked(
        where, "output_mask", _ids(start, count, reached), output_mask, reached
    )
    empty = (targets < 0).all(1)
    if empty.any():
        g = int(np.argmax(empty))
        point = _point(twice[g] / 2 * np.array(reached[:2]) / np.array(read[:2]))
        raise ValueError(
            f"{where}: group {g} reaches no output: its center {_point(twice[g] / 2)} "
            f"is the point {point} of the outputs, and projective is {projective}. "
            "Use a larger projective size or another output_mask."
        )
    if probability < 1:
        assert target_key is not None
        # Known in advance also where a layer is made inside of `jax.jit`.
        with jax.ensure_compile_time_eval():
            drawn = np.asarray(jax.random.uniform(target_key, targets.shape))
        targets = np.where(drawn < probability, targets, -1)
    connectivity = Connectivity(
        in_shape, out_shape, twice / 2, _pack_ids(candidates), _pack_ids(targets)
    )
    connectivity.check_candidates(where, " Use a larger receptive size or another input_mask.")
    return connectivity


def _keys(
    where: str, key: Array | None, centers: Any, probability: float
) -> tuple[Array, Array] | tuple[None, None]:
    if key is None:
        reason = f"centers is {centers!r}" if isinstance(centers, str) and centers != "grid" else ""
        reason = reason or (f"probability is {probability}" if probability < 1 else "")
        if reason:
            raise ValueError(f"{where}: key is None, but {reason}; give a key of jax.random.")
        return None, None
    if isinstance(key, jax.core.Tracer):
        raise ValueError(
            f"{where}: key is traced; connectivity must be known in advance. "
            "Sample it outside jax.jit."
        )
    # A program may construct a layer, but connectivity must not become a part of it.
    with jax.ensure_compile_time_eval():
        center_key, target_key = jax.random.split(key)
    return center_key, target_key


def _centers(
    where: str,
    key: Array | None,
    image: tuple[int, ...],
    window: tuple[int, int],
    groups: Size | None,
    centers: Any,
    deviation: float,
) -> np.ndarray:
    """Return centers ``[G, 2]``, before the shift to whole windows."""
    size = np.array(image[:2], np.float64)
    if not isinstance(centers, str):
        points = np.asarray(centers, np.float64)
        is_list = points.ndim == 2 and points.shape[1] == 2 and len(points) > 0
        if not is_list or not np.isfinite(points).all():
            raise ValueError(
                f"{where}: centers has shape {list(points.shape)}; "
                "expected finite numbers [groups, 2]."
            )
        if groups is not None:
            raise ValueError(
                f"{where}: groups is {groups}, but the number of centers determines it. Omit one."
            )
        return points
    if centers not in CENTERS:
        raise ValueError(
            f"{where}: centers is {centers!r}; expected one of {CENTERS}, or an array."
        )
    if groups is None:
        raise ValueError(f"{where}: groups is None; give their number, or an array of centers.")
    if centers == "grid":
        rows, columns = pair(where, "groups", groups)
        along = [
            np.linspace(0, free, n) if n > 1 else np.array([free / 2])
            for free, n in zip(size - window, (rows, columns), strict=True)
        ]
        corners = np.stack(np.meshgrid(*along, indexing="ij"), -1).reshape(-1, 2)
        return corners + (np.array(window) - 1) / 2
    pair(where, "groups", groups)
    n_groups = math.prod(groups) if isinstance(groups, Sequence) else groups
    if not deviation > 0:
        raise ValueError(f"{where}: deviation is {deviation}; it must be positive.")
    assert key is not None
    draw = jax.random.uniform if centers == "uniform" else jax.random.normal
    with jax.ensure_compile_time_eval():
        drawn = np.asarray(draw(key, (n_groups, 2), jnp.float32), np.float64)
    if centers == "uniform":
        return drawn * size - 0.5
    return (size - 1) / 2 + deviation * size * drawn


def _ids(first: np.ndarray, count: np.ndarray, image: tuple[int, int, int]) -> np.ndarray:
    """Return value ids ``[G, values]`` in rectangles from `first` with size `count`, else -1."""
    _, width, channels = image
    high, wide = (int(n) for n in count.max(0).clip(1))
    rows = first[:, :1] + np.arange(high)
    columns = first[:, 1:] + np.arange(wide)
    # Rectangles differ in size: each is a part of the largest one.
    has_row = (np.arange(high) < count[:, :1])[:, :, None]
    has_column = (np.arange(wide) < count[:, 1:])[:, None]
    pixels = np.where(has_row & has_column, rows[:, :, None] * width + columns[:, None], -1)
    pixels = pixels.reshape(len(first), -1, 1)
    return np.where(pixels < 0, -1, pixels * channels + np.arange(channels)).reshape(len(first), -1)


def _replace_masked(
    where: str, name: str, ids: np.ndarray, mask: Any, image: tuple[int, int, int]
) -> np.ndarray:
    if mask is None:
        return ids
    selected = np.asarray(mask)
    if selected.dtype != np.bool_ or selected.shape != image[:2]:
        raise ValueError(
            f"{where}: {name} is {selected.dtype}{list(selected.shape)}; "
            f"expected bool {list(image[:2])}, False for excluded pixels."
        )
    return np.where(selected.reshape(-1)[np.maximum(ids, 0) // image[2]], ids, -1)


def _pack_ids(ids: np.ndarray) -> np.ndarray:
    """Return ids with the unused slots last, and as few unused slots as possible."""
    used = ids >= 0
    order = np.argsort(~used, axis=1, kind="stable")
    return np.take_along_axis(ids, order, 1)[:, : max(int(used.sum(1).max()), 1)]


def _point(point: np.ndarray) -> str:
    return f"({point[0]:g}, {point[1]:g})"
