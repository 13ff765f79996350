"""Lookup-table convolutions."""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Float

from lutjax import _meshes
from lutjax._typing import Anchors, Array, Scalar
from lutjax.dispatch import _table_reads
from lutjax.dispatch.registry import Implementation
from lutjax.ops import _checks, _groups
from lutjax.ops.lut_at_places import Windows, lut_at_places
from lutjax.ops.margins import margins
from lutjax.ops.scored_lut import _scalars, scored_lut
from lutjax.ops.weighted_lookup import weighted_lookup
from lutjax.reads import Read, straight_through
from lutjax.values import _quantized
from lutjax.values._dtypes import accumulator
from lutjax.values._fixed_point import FixedPoint
from lutjax.values._ids import as_int32, as_jax, trusted_ids
from lutjax.values._quantized import QuantizedTables
from lutjax.wiring._images import window_sizes
from lutjax.wiring._sizes import Size


def conv_lut(
    images: Float[Array, "*batch height width channels"],
    weights: Float[Array, "detectors rows outputs"] | QuantizedTables,
    anchors: Anchors,
    scalars: Mapping[str, Scalar] | None = None,
    *,
    kernel: Size,
    stride: Size = 1,
    padding: Size = 0,
    groups: int = 1,
    read: Read | None = None,
    keep: Float[Array, "*leading detectors"] | None = None,
    epsilon: float = 0.0,
    accumulate: FixedPoint | None = None,
    implementation: Implementation = None,
) -> Float[jax.Array, "*any place_rows place_columns out_channels"]:
    """Apply a lookup-table convolution: `lutjax.lut` on every image window, with shared tables.

    Windows are never materialized: detectors at all positions read the image directly.

    Definition for ``padding=0``. Otherwise the images are first zero-padded::

        channels = images.shape[-1] // groups
        # [rows, columns, values of a window]
        ids = lutjax.wiring.windows(images.shape[-3:], kernel, stride)
        ids = np.moveaxis(ids.reshape(*ids.shape[:2], -1, groups, channels), 3, 2)  # group by group
        patches = images.reshape(*images.shape[:-3], -1)[..., ids.reshape(*ids.shape[:3], -1)]
        if read is None:
            y = lutjax.lut(patches, weights, anchors, groups=groups, epsilon=epsilon)
        else:
            if keep is not None:  # shared by all positions
                of_patches = (*patches.shape[:-2], len(anchors))
                keep = np.broadcast_to(keep[..., None, None, :], of_patches)
            y = lutjax.scored_lut(
                patches, weights, anchors, scalars, read=read, groups=groups, keep=keep
            )
        y = y.reshape(*y.shape[:-2], -1)

    Args:
      images: ``[..., height, width, F]`` floats.
      weights: ``[T, 2**C, O]``, floats, or `lutjax.QuantizedTables` for `lutjax.reads.PowersOfTwo`,
        without a gradient.
      anchors: int32 ``[T, C, 2]``, ids of the ``h * w * F / groups`` window values in the order
        row, column, channel. They are independent of the image size. Out-of-range traced ids are
        clamped.
      scalars: the read's learned scalars by name, as returned by ``read.initial()``.
      kernel: window height and width, ``h`` and ``w``, or one number for both.
      stride: window stride in rows and columns.
      padding: zero padding in rows and columns, less than `kernel`.
      groups: number of channel groups ``G``. The first ``T / G`` detectors read the first ``F / G``
        channels and add to the first ``O`` outputs, and so on.
      read: one of `lutjax.reads`. None reads one row per table, as in `lutjax.lookup`.
      keep: ``[..., T]``, coefficient factors per image and table, for table dropout, shared by all
        positions. Only with a `read`.
      epsilon: comparison dead zone, as in `lutjax.detect`; not with a `read`.
      accumulate: None for floating-point sums, or see `lutjax.FixedPoint`.
      implementation: see `lutjax.detect`.

    Returns:
      ``[..., rows, columns, G * O]`` with dtype ``weights.dtype``, where
      ``rows = (height + 2 * padding - h) // stride + 1``.

    Raises:
      ValueError, TypeError: a wrong shape or dtype, a window larger than the padded image, groups
        that do not divide channels and detectors, scalars, `keep` or quantized tables without a
        read, or scalars other than the read's.

    Source: docs/semantics.md, section 11.

    Example:
      >>> import jax, jax.numpy as jnp, lutjax
      >>> sizes = {"n_inputs": 3 * 3 * 2, "n_detectors": 4, "n_anchors": 5}
      >>> anchors = lutjax.sample_anchors(jax.random.key(0), **sizes)
      >>> images, weights = jnp.ones((6, 9, 7, 2)), jnp.ones((4, 2**5, 8))
      >>> lutjax.conv_lut(images, weights, anchors, kernel=3, stride=2, padding=1).shape
      (6, 5, 4, 8)
    """
    op = "conv_lut"
    _checks.floats(op, "images", images, -3, "[..., height, width, channels]")
    _checks.anchors(op, anchors)
    n_detectors, n_comparisons, _ = anchors.shape
    n_groups, channels = _groups.number(op, groups, n_detectors), images.shape[-1]
    rule = f"it must divide the number of channels, {channels}"
    _checks.require(channels % n_groups == 0, op, "groups", n_groups, rule)
    _checks.require(channels > 0, op, "images", images, "there must be at least one channel")
    if not isinstance(weights, QuantizedTables):
        _checks.table(op, weights, n_detectors, n_comparisons, "anchors")
    _check_read(op, read, scalars, epsilon, n_comparisons)
    if read is None:
        if isinstance(weights, QuantizedTables):
            raise ValueError(
                f"{op}: read is None, and tables of integers are read by lutjax.reads.PowersOfTwo."
            )
        rule = (
            "read is None, and rows without coefficients have no factors; lutjax.reads.Hard() "
            "reads the same rows"
        )
        _checks.require(keep is None, op, "keep", keep, rule)
    keep = _checked_keep(op, keep, images.shape[:-3], n_detectors)
    size, step, around = window_sizes(op, images.shape[-3:], kernel, stride, padding)

    images, lead, (height, width) = as_jax(images), images.shape[:-3], images.shape[-3:-1]
    windows = Windows((height, width, channels), size, step, around, channels // n_groups)
    how: dict[str, Any] = {"accumulate": accumulate, "implementation": implementation}
    _checks.ids(op, "anchors", anchors, math.prod(size) * windows.channels, "values of a window")
    if read is None:
        return lut_at_places(
            images,
            as_jax(weights),
            anchors,
            windows=windows,
            groups=n_groups,
            epsilon=epsilon,
            **how,
        )
    of_all, of_window = windows.merge_channels(as_int32(anchors), n_groups)
    ids, places = of_all.ids(of_window), windows.places
    padded = windows.pad_images(images)
    x = _meshes.reshape_unsharded(padded, len(lead), math.prod(padded.shape[-3:]))

    def split_positions(a: jax.Array, *of_detector: int) -> jax.Array:
        return a.reshape(*lead, *places, n_detectors, *of_detector)

    with trusted_ids():  # built from checked anchors
        if isinstance(weights, QuantizedTables):
            # A scored read takes margins one by one. Without a gradient they are not saved.
            each = n_detectors // n_groups * n_comparisons
            probes = jnp.arange(n_detectors * n_comparisons, dtype=jnp.int32) % each
            y = scored_lut(
                _meshes.reshape_unsharded(
                    margins(x, ids, **how), len(lead), *places, n_groups, each
                ),
                weights,
                probes.reshape(n_detectors, n_comparisons),
                scalars or {},
                read=read,
                groups=n_groups,
                keep=keep,
                **how,
            )
        else:
            weights = as_jax(weights)

            def read_ways(x: jax.Array, values: jax.Array) -> tuple[jax.Array, jax.Array]:
                named = dict(zip(read.initial(), values, strict=True))
                return read(margins(x, ids, **how), named, accumulate=accumulate)

            # Margins (one per comparison and position) are not saved for the backward pass.
            index, coefficients = jax.checkpoint(read_ways)(
                x, _scalars(op, scalars, read, accumulator(x.dtype))
            )
            coefficients = split_positions(coefficients, index.shape[-1])
            if keep is not None:
                at_places = keep.astype(coefficients.dtype).reshape(*lead, 1, 1, n_detectors, 1)
                coefficients = coefficients * jnp.broadcast_to(at_places, coefficients.shape)
            y = weighted_lookup(
                _round_tables(weights, n_groups) if read.rounds_tables else weights,
                split_positions(index, index.shape[-1]),
                coefficients,
                groups=n_groups,
                valued=read.valued,
                **how,
            )
    return _meshes.reshape_unsharded(y, y.ndim - 2, n_groups * y.shape[-1])


def _check_read(op: str, read: Any, scalars: Any, epsilon: float, n_comparisons: int) -> None:
    """Check that a read has no dead zone and a comparison, and no read no scalars."""
    if read is None:
        _checks.require(
            scalars is None, op, "scalars", scalars, "they are those of a read, and read is None"
        )
        return
    if not isinstance(read, Read):
        raise TypeError(
            f"{op}: read is {_checks.describe(read)}; expected one of lutjax.reads, such as "
            "Confidence()."
        )
    rule = f"read is {read}, whose scores have no dead zone; use 0"
    _checks.require(not epsilon, op, "epsilon", epsilon, rule)
    _checks.require(n_comparisons > 0, op, "read", read, "a score needs at least one comparison")


def _checked_keep(op: str, keep: Any, lead: tuple[int, ...], n_detectors: int) -> jax.Array | None:
    if keep is None:
        return None
    _checks.floats(op, "keep", keep, -1, "[..., detectors]")
    sizes = ", ".join(map(str, (*lead, n_detectors)))
    rule = f"expected [{sizes}], a factor for each image and table"
    _checks.require(keep.shape == (*lead, n_detectors), op, "keep", keep, rule)
    return as_jax(keep)


def _round_tables(weights: jax.Array, groups: int) -> jax.Array:
    """Return tables rounded to scaled int8, as floats, with a straight-through gradient."""

    def round_groups(weights: jax.Array) -> jax.Array:
        scale = _quantized.exponents(weights, groups)
        whole = _quantized.in_groups(_quantized.round_to_scale(weights, scale), groups)
        scaled = whole * _quantized.power(scale[:, None], whole.dtype)
        return scaled.reshape(weights.shape).astype(weights.dtype)

    made = straight_through(
        _meshes.shard_by_compiler(round_groups, _meshes.spec_of)(weights), weights
    )
    reads = _table_reads.current_reads()
    if reads is not None:
        reads.stand_in(weights, made)
    return made
