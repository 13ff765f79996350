"""Table layers with geometry for all libraries: arguments, variables and forward pass."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

import lutjax
from lutjax import _meshes, wiring
from lutjax._typing import Array
from lutjax.arguments import format_value, require_array
from lutjax.layers._projection import ScoredSpec, check_read, check_scalar, scalars_of
from lutjax.layers._spec import Arrays, Mode, Op, Variable, names_layer
from lutjax.layers._tables import TableSpec
from lutjax.ops.lut_at_places import Windows, lut_at_places
from lutjax.reads import Read
from lutjax.values._dtypes import accumulator
from lutjax.wiring import Connectivity
from lutjax.wiring._images import window_sizes
from lutjax.wiring._sizes import Size, as_image, pair, shape_of

_window_groups = functools.lru_cache(maxsize=32)(wiring.window_groups)


@dataclasses.dataclass(unsafe_hash=True)
class _ReadSpec(ScoredSpec, TableSpec):
    """Base spec for table layers over images, with one row per table or scored rows."""

    _: dataclasses.KW_ONLY
    read: Read | None = None
    table_dropout: float | int = 0.0
    deterministic: bool = False
    quantized: bool = False

    def _check_sizes(self) -> None:
        self._check_scored()
        if self.read is None:
            return
        check_read(self.layer, self.read)
        if self.epsilon or not self.n_anchors:
            name = "epsilon" if self.epsilon else "n_anchors"
            raise self._error(
                f"{name} is {getattr(self, name)} and read is {self.read!r}; "
                "scores have no dead zone, and need at least one comparison."
            )

    def variables(self) -> tuple[Variable, ...]:
        variables = super().variables()
        if self.quantized:
            others = (v for v in variables if v.name != "weights")
            variables = (*others, *self._quantized_tables(self.weights_shape))
        return variables + (() if self.read is None else scalars_of(self.read))

    def tables_of(self, arrays: Arrays) -> Any:
        return super().tables_of(arrays) if self.quantized else self._cast_tables(arrays["weights"])

    @property
    def _reads(self) -> dict[str, Any]:
        """Options for scored reads: integer tables already have exact sums."""
        return {**self._sums, "accumulate": None} if self.quantized else self._sums

    def _check_values(self, variable: Variable, arrays: Arrays) -> None:
        if variable.kind == "scalars":
            check_scalar(self.layer, variable.name, arrays[variable.name])
        else:
            super()._check_values(variable, arrays)

    def _images(
        self, x: Any, shape: tuple[int, ...], deterministic: Mode, key: Any
    ) -> tuple[Any, jax.Array | None]:
        require_array(self.layer, "x", x)
        if x.ndim < len(shape) or x.shape[x.ndim - len(shape) :] != shape:
            sizes = ", ".join(map(str, shape))
            raise self._error(f"x has shape {list(x.shape)}; expected [..., {sizes}].")
        x, factors = self._cast(x), (*x.shape[: x.ndim - len(shape)], self.n_tables)
        return x, self._keep(deterministic, key, factors, accumulator(x.dtype))


class _ImageSpec(_ReadSpec):
    """Base spec for grouped table layers with separate inputs per group."""

    connectivity: Connectivity  # detector groups
    op = staticmethod(lutjax.scored_lut)

    def _check_inputs(self) -> None:
        if self.n_anchors:
            self.connectivity.check_candidates(self.layer)

    @property
    def n_inputs(self) -> int:
        return self.connectivity.n_inputs

    @property
    def n_tables(self) -> int:
        return self.connectivity.n_groups * self.n_detectors

    def compared_pairs(self, arrays: Arrays) -> np.ndarray:
        pairs: np.ndarray = np.asarray(arrays["anchors"]).reshape(self.connectivity.n_groups, -1, 2)
        return pairs

    def _draw_anchors(self, key: Array) -> jax.Array:
        return self.connectivity.sample_anchors(key, self.n_detectors, self.n_anchors)

    def sizes_of(self, arrays: Arrays) -> dict[str, Any]:
        weights, anchors = np.shape(arrays["weights"]), np.shape(arrays["anchors"])
        if len(weights) != 3 or len(anchors) != 3 or weights[0] % self.connectivity.n_groups:
            return {}
        return {"n_detectors": weights[0] // self.connectivity.n_groups, "n_anchors": anchors[1]}

    @property
    def table_groups(self) -> int:
        return self.connectivity.n_groups

    @names_layer
    def run(
        self, op: Op, x: Any, *, deterministic: Mode = None, key: Any = None, **arrays: Any
    ) -> jax.Array:
        groups, targets = self.connectivity, arrays.get("targets")
        # Targets are [groups, 1, slots]: all tables and rows of a group have the same.
        targets = None if targets is None else jnp.asarray(targets)[:, 0]
        images, keep = self._images(x, groups.in_shape, deterministic, key)
        values = _meshes.reshape_unsharded(
            images, images.ndim - len(groups.in_shape), self.n_inputs
        )
        if self.read is None:
            # A layer is one window that holds the whole map.
            window = Windows.single_window(self.n_inputs)
            options = {"windows": window, "groups": groups.n_groups, **self._options}
            tables, values = self._cast_tables(arrays["weights"]), values[..., None, None, :]
            y = lut_at_places(values, tables, arrays["anchors"], targets, self.n_outputs, **options)
            y = y[..., 0, 0, :]
            if targets is None:
                y = _meshes.reshape_unsharded(y, y.ndim - 1, groups.n_groups, self.n_outputs)
        else:
            options = {"read": self.read, "groups": groups.n_groups, "keep": keep, **self._reads}
            tables, scalars = self.tables_of(arrays), self.scalars_of(arrays)
            y = op(values[..., None, :], tables, arrays["anchors"], scalars, **options)
            if targets is not None:
                y = _add_to_targets(y, targets, self.n_outputs)
        return self._cast_sums(y).reshape(*images.shape[: -len(groups.in_shape)], *groups.out_shape)


@dataclasses.dataclass(unsafe_hash=True)
class SpatialLUTSpec(_ImageSpec):
    """Lookup tables between two maps: detector groups with receptive and projective fields.

    The detectors in a group compare pairs of inputs in its receptive field, and their tables add to
    the outputs in its projective field. Inputs are ``[..., *connectivity.in_shape]`` and outputs
    ``[..., *connectivity.out_shape]``; an output without a group is 0.

    Variables:
      weights: trained, ``[groups * n_detectors, 2**n_anchors, outputs of a group]``, zeros.
      anchors: int32 input ids ``[groups * n_detectors, n_anchors, 2]``.
      targets: int32 output ids ``[groups, 1, outputs of a group]``, -1 for an unused slot.
      log_beta, log_gamma, log_tau: trained scalars of a read.
      weights, exponents: int8 tables and their scale, int32 ``[groups, outputs of a group]``, not
        trained, with ``quantized=True``.

    Args:
      connectivity: `lutjax.wiring.projections`, `lutjax.wiring.window_groups` or `full`.
      n_detectors: number of detectors per group, each with one table.
      n_anchors: as in `LUT`.
      read: a read from `lutjax.reads`, with scores from margins. None: one row per table.
      table_dropout: share of tables dropped in training, for each image; only with a `read`.
      deterministic, quantized: as in `ProjectionLUT`.
      epsilon: as in `LUT`; not with a `read`.
      dtype, param_dtype, weights_init, implementation: as in `LUT`.
      accumulate: as in `LUT`; not with a `read`, whose groups are added as floats.
      anchors: int32 ``[groups * n_detectors, n_anchors, 2]``, instead of random ones.

    Raises:
      ValueError: a size is impossible, or an anchor is not an input of its group.

    Source: docs/semantics.md, section 11.
    """

    connectivity: Connectivity

    example = ("wiring.full((6, 5), (3, 4)), n_detectors=4, n_anchors=3", (32, 6, 5), (32, 3, 4))

    def _check_features(self) -> None:
        if not isinstance(self.connectivity, Connectivity):
            raise self._error(
                f"connectivity is {format_value(self.connectivity)}; "
                "expected what lutjax.wiring.projections, window_groups or full returns."
            )

    def _check_sizes(self) -> None:
        super()._check_sizes()
        if self.read is not None and self.accumulate is not None:
            raise self._error(
                f"accumulate is {self.accumulate} and read is {self.read!r}; "
                "the outputs of groups of scored reads are added as floats. "
                "Leave out one of the two."
            )

    @property
    def n_outputs(self) -> int:
        return self.connectivity.n_outputs

    @property
    def weights_shape(self) -> tuple[int, ...]:
        return (self.n_tables, 2**self.row_bits, self.connectivity.targets.shape[1])

    def variables(self) -> tuple[Variable, ...]:
        targets = self.connectivity.targets[:, None]
        fixed = Variable(
            "targets", "targets", targets.shape, jnp.dtype("int32"),
            lambda key: jnp.asarray(targets),
        )  # fmt: skip
        anchors, *trained = super().variables()
        return (anchors, fixed, *trained)


def _add_to_targets(y: jax.Array, targets: jax.Array, n_outputs: int) -> jax.Array:
    """Add group outputs ``[..., G, K]`` to their targets ``[G, K]``: ``[..., n_outputs]``."""

    def add_values(y: jax.Array, targets: jax.Array) -> jax.Array:
        # Out-of-range ids are dropped.
        ids = jnp.where(targets < 0, n_outputs, targets).reshape(-1)
        total = jnp.zeros((*y.shape[:-2], n_outputs), accumulator(y.dtype))
        values = y.reshape(*y.shape[:-2], ids.size).astype(total.dtype)
        return total.at[..., ids].add(values, mode="drop").astype(y.dtype)

    add = _meshes.shard_by_compiler(
        add_values, lambda y, _: PartitionSpec(*_meshes.spec_of(y)[:-2])
    )
    return add(y, targets)


def _check_windows(spec: Any) -> None:
    spec.in_shape = shape_of(spec.layer, "in_shape", spec.in_shape, (2, 3))
    names = ("kernel", "stride", "padding")
    sizes = window_sizes(spec.layer, spec.in_shape, *(getattr(spec, name) for name in names))
    for name, size in zip(names, sizes, strict=True):
        if isinstance(getattr(spec, name), Sequence):
            setattr(spec, name, size)


@dataclasses.dataclass(unsafe_hash=True)
class WindowLUTSpec(_ImageSpec):
    """Lookup tables over image windows, with separate tables for each window.

    The detectors in a window compare pairs of its values, and their tables add to its outputs.
    Inputs are ``[..., *in_shape]`` and outputs ``[..., rows, columns, out_features]``, with one row
    and column for each window.

    Variables:
      weights: trained, ``[rows * columns * n_detectors, 2**n_anchors, out_features]``, zeros;
        windows are in row-major order.
      anchors: int32 ids of image values ``[rows * columns * n_detectors, n_anchors, 2]``.
      log_beta, log_gamma, log_tau: trained scalars of a read.
      weights, exponents: int8 tables and their scale, int32 ``[rows * columns, out_features]``, not
        trained, with ``quantized=True``.

    Args:
      in_shape: height and width of the image, and optionally channels.
      out_features: outputs per window.
      n_detectors: number of detectors per window, each with one table.
      n_anchors: as in `LUT`.
      kernel: height and width of a window, or one number for both.
      stride: step between windows, in rows and in columns.
      padding: rows and columns around the image, which are not compared.
      read, table_dropout, epsilon: as in `SpatialLUT`.
      deterministic, quantized: as in `ProjectionLUT`.
      dtype, param_dtype, weights_init, accumulate, implementation: as in `LUT`.
      anchors: int32 ``[rows * columns * n_detectors, n_anchors, 2]``, instead of random ones.

    Raises:
      ValueError: a size is impossible, or an anchor is not in the image.

    Source: docs/semantics.md, section 11.
    """

    in_shape: tuple[int, ...]
    out_features: int
    _: dataclasses.KW_ONLY
    kernel: Size
    stride: Size = 1
    padding: Size = 0

    example = (
        "(8, 8), 10, kernel=4, stride=4, n_detectors=4, n_anchors=3",
        (32, 8, 8),
        (32, 2, 2, 10),
    )

    def _check_features(self) -> None:
        self._require_sizes(1, "out_features")
        _check_windows(self)

    @property
    def connectivity(self) -> Connectivity:  # type: ignore[override]
        """Detector groups, one for each window."""
        return _window_groups(
            self.in_shape, self.kernel, self.stride, padding=self.padding, outputs=self.out_features
        )

    @property
    def n_outputs(self) -> int:
        return self.out_features

    def sizes_of(self, arrays: Arrays) -> dict[str, Any]:
        sizes = super().sizes_of(arrays)
        return {**sizes, "out_features": np.shape(arrays["weights"])[2]} if sizes else {}


@dataclasses.dataclass(unsafe_hash=True)
class ConvLUTSpec(_ReadSpec):
    """Lookup tables over image windows, with tables shared by all windows: `lutjax.conv_lut`.

    Detectors compare pairs of values in a window, and their tables add to its outputs. Windows are
    not copied. Inputs are ``[..., *in_shape]`` and outputs ``[..., *out_shape]``: one row and
    column of `out_channels` for each window, or fewer with `pool`.

    Variables:
      weights: trained, ``[n_detectors, 2**n_anchors, out_channels / groups]``, initially zeros.
      anchors: int32 value ids in a group's window ``[n_detectors, n_anchors, 2]``, in the order
        row, column, channel, for any image size.
      log_beta, log_gamma, log_tau: trained scalars of a read.
      weights, exponents: int8 tables and their scale, int32 ``[groups, out_channels / groups]``,
        not trained, with ``quantized=True``.

    Args:
      in_shape, n_anchors, kernel, stride: as in `WindowLUT`.
      out_channels: outputs per window.
      n_detectors: number of detectors, each with one table.
      padding: rows and columns of zeros around the image.
      groups: number of channel groups with their own detectors and outputs.
      pool: average pooling of outputs: rows and columns per block of windows, without incomplete
        blocks, or ``"all"``, with outputs ``[..., out_channels]``.
      read, table_dropout, epsilon: as in `SpatialLUT`.
      deterministic, quantized: as in `ProjectionLUT`.
      accumulate: as in `LUT`; averages are sums of floats.
      dtype, param_dtype, weights_init, implementation: as in `LUT`.
      anchors: int32 ``[n_detectors, n_anchors, 2]``, instead of random ones.

    Raises:
      ValueError: a size is impossible, or an anchor is not in a window.

    Source: docs/semantics.md, section 11.
    """

    in_shape: tuple[int, ...]
    out_channels: int
    _: dataclasses.KW_ONLY
    kernel: Size
    stride: Size = 1
    padding: Size = 0
    groups: int = 1
    pool: Size | str | None = None

    example = (
        "(8, 6, 3), 10, kernel=3, padding=1, n_detectors=16, n_anchors=5",
        (32, 8, 6, 3),
        (32, 8, 6, 10),
    )
    op = staticmethod(lutjax.conv_lut)

    def _check_features(self) -> None:
        self._require_sizes(1, "out_channels")
        _check_windows(self)

    def _check_sizes(self) -> None:
        super()._check_sizes()
        self._require_sizes(1, "groups")
        channels = as_image(self.in_shape)[2]
        sizes = {
            f"the channels of in_shape {self.in_shape}": channels,
            "out_channels": self.out_channels,
            "n_detectors": self.n_detectors,
        }
        for name, size in sizes.items():
            if size % self.groups:
                raise self._error(f"groups is {self.groups}; it must divide {name}, {size}.")
        if isinstance(self.pool, str) and self.pool != "all":
            raise self._error(
                f"pool is {format_value(self.pool)}; "
                'expected rows and columns of places, "all" or None.'
            )
        block, places = self._block, self._window_counts
        if block[0] > places[0] or block[1] > places[1]:
            raise self._error(
                f"pool is {self.pool}, larger than {places[0]} by {places[1]} window positions."
            )
        if isinstance(self.pool, Sequence) and self.pool != "all":
            self.pool = block

    def _check_inputs(self) -> None:
        if self.n_anchors and self.n_inputs < 2:
            raise self._error(
                f"kernel is {self.kernel} and in_shape is {self.in_shape}, "
                "so a window has one value of each group; a detector compares two different ones."
            )

    @property
    def n_inputs(self) -> int:
        return math.prod(self._window)

    @property
    def n_outputs(self) -> int:
        return self.out_channels // self.groups

    @property
    def table_groups(self) -> int:
        return self.groups

    @property
    def window_shape(self) -> tuple[int, int, int]:
        """Height, width and channels of a plotted window, with group windows stacked."""
        height, width, channels = self._window
        return self.groups * height, width, channels

    @property
    def _window(self) -> tuple[int, int, int]:
        height, width = pair(self.layer, "kernel", self.kernel)
        return height, width, as_image(self.in_shape)[2] // self.groups

    @property
    def _window_counts(self) -> tuple[int, int]:
        sizes = window_sizes(self.layer, self.in_shape, self.kernel, self.stride, self.padding)
        each = zip(self.in_shape[:2], *sizes, strict=True)
        rows, columns = ((n + 2 * p - k) // s + 1 for n, k, s, p in each)
        return rows, columns

    @property
    def out_shape(self) -> tuple[int, ...]:
        """Output shape for one image, as the next layer's `in_shape`."""
        if self.pool == "all":
            return (self.out_channels,)
        (rows, columns), (high, wide) = self._window_counts, self._block
        return rows // high, columns // wide, self.out_channels

    @property
    def _block(self) -> tuple[int, int]:
        """Rows and columns per averaged block of windows."""
        if self.pool is None or isinstance(self.pool, str):
            return (1, 1) if self.pool is None else self._window_counts
        return pair(self.layer, "pool", self.pool)

    def sizes_of(self, arrays: Arrays) -> dict[str, Any]:
        weights, anchors = np.shape(arrays["weights"]), np.shape(arrays["anchors"])
        if len(weights) != 3 or len(anchors) != 3:
            return {}
        channels = weights[2] * self.groups
        return {"n_detectors": weights[0], "n_anchors": anchors[1], "out_channels": channels}

    @names_layer
    def run(
        self, op: Op, x: Any, *, deterministic: Mode = None, key: Any = None, **arrays: Any
    ) -> jax.Array:
        images, keep = self._images(x, self.in_shape, deterministic, key)
        images = images if len(self.in_shape) == 3 else images[..., None]
        tables, scalars = self.tables_of(arrays), self.scalars_of(arrays)
        names = ("kernel", "stride", "padding", "groups", "read", "epsilon")
        options = {name: getattr(self, name) for name in names} | self._reads
        y = op(images, tables, arrays["anchors"], scalars, keep=keep, **options)
        if self.pool is None:
            return self._cast_sums(y)
        y = self._cast_sums(_average_blocks(y, self._block))
        return y.reshape(*y.shape[:-3], *self.out_shape)


def _average_blocks(y: jax.Array, block: Sequence[int]) -> jax.Array:
    high, wide = block

    def averages(y: jax.Array) -> jax.Array:
        lead, (rows, columns, n_outputs) = y.shape[:-3], y.shape[-3:]
        down, across = rows // high, columns // wide
        # Windows that fill no block are left out, as in pooling layers.
        whole = y[..., : down * high, : across * wide, :]
        blocks = whole.reshape(*lead, down, high, across, wide, n_outputs)
        return jnp.mean(blocks, (-4, -2), accumulator(y.dtype)).astype(y.dtype)

    def spec(y: jax.Array) -> PartitionSpec:
        *lead, _, _, outputs = _meshes.spec_of(y)
        return PartitionSpec(*lead, None, None, outputs)

    return _meshes.shard_by_compiler(averages, spec)(y)
