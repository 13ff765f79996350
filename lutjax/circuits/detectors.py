"""Integer lookup layers, and their C99 code: comparators, integer tables, and row sums."""

import dataclasses
import math
import re
from fractions import Fraction
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from lutjax.circuits import _names, _templates
from lutjax.circuits._c_emitter import array, read_source
from lutjax.values import exponents, round_to_scale as rounded_at

_INT32 = np.iinfo(np.int32)
_DTYPES = ("int8", "int16", "int32")
_MOST_SHIFT = 30
_MOST_IN_C = 2**24
_FINER_THAN_ALL = 120  # fraction of int8 scales
_NAME = re.compile(r"[a-z][a-z0-9_]*")
_OWN = ("detectors", "anchors", "values", "shifts", "targets")


def _error(text: str) -> ValueError:
    return ValueError(f"IntegerLUT: {text}")


@dataclasses.dataclass(frozen=True, eq=False)
class IntegerLUT:
    """Integer lookup layer: the integer form of `lutjax.lut` and `lutjax.sparse_lut`.

    Detector ``t`` compares pairs of integers, and the bits select a row of its table, the first
    pair giving the lowest bit. The rows of all detectors are accumulated in int32, and each sum is
    shifted left by a per-output bit count. An output represents its integer over ``2**fraction``.
    The input scale is irrelevant to comparisons.

    Definition, for one sample ``x`` without groups and targets::

        a, b = anchors[..., 0], anchors[..., 1]
        bit = x[a] - x[b] >= max(1, dead_zone)
        row = (bit << np.arange(anchors.shape[1])).sum(axis=1)
        y = values[np.arange(len(row)), row].sum(axis=0) << shifts

    Attributes:
      in_features: number of inputs.
      anchors: int32 input ids within a group ``[T, C, 2]``.
      values: int8, int16 or int32 ``[T, 2**C, K]``; K is the number of group outputs or targets.
      shifts: left shift for each output ``[O]``, from 0 to 30.
      fraction: fraction bits of an output.
      targets: int32 output ids within a group ``[T or 1, 2**C or 1, K]``, -1 for an unused slot;
        None: rows reach all outputs.
      groups: number of groups; detectors, inputs and outputs are split into consecutive groups.
      dead_zone: smallest input difference that sets a bit, if above 1.

    Raises:
      ValueError: inconsistent shapes, an id that does not exist, or tables with sums beyond int32.

    Example:
      >>> import numpy as np
      >>> from lutjax.circuits.detectors import IntegerLUT
      >>> anchors, values = np.array([[[0, 1]]]), np.array([[[-3], [5]]], np.int8)
      >>> layer = IntegerLUT(2, anchors, values, shifts=np.array([4]))
      >>> layer(np.array([[7, 7], [8, 7]]))[:, 0]
      array([-48,  80], dtype=int32)
    """

    in_features: int
    anchors: Int[np.ndarray, "detectors anchors 2"]
    values: Int[np.ndarray, "detectors rows columns"]
    shifts: Int[np.ndarray, " outputs"]
    fraction: int = 0
    targets: Int[np.ndarray, "#detectors #rows columns"] | None = None
    groups: int = 1
    dead_zone: int = 0

    def __post_init__(self) -> None:
        tables, rows, columns = self.values.shape
        outputs = self.out_features // self.groups
        if self.values.dtype.name not in _DTYPES:
            raise _error(f"values are {self.values.dtype}; expected one of {_DTYPES}.")
        if self.anchors.shape[0] != tables or rows != 2 ** self.anchors.shape[1]:
            raise _error(
                f"anchors have shape {list(self.anchors.shape)} "
                f"and values {list(self.values.shape)}; expected [T, C, 2] and [T, 2**C, K]."
            )
        sizes = {
            "in_features": self.in_features,
            "out_features": self.out_features,
            "detectors": tables,
        }
        for name, size in sizes.items():
            if self.groups < 1 or size % self.groups:
                raise _error(f"groups is {self.groups}; it must divide {name}, {size}.")
        if self.targets is None and columns != outputs:
            raise _error(
                f"values have {columns} columns; expected one for each of {outputs} outputs."
            )
        if self.targets is not None:
            shape = self.targets.shape
            if shape[0] not in (1, tables) or shape[1] not in (1, rows) or shape[2] != columns:
                raise _error(
                    f"targets have shape {list(shape)}; "
                    f"expected [{tables} or 1, {rows} or 1, {columns}]."
                )
        if self.in_features // self.groups > 2**16:
            raise _error(f"in_features is {self.in_features}; a group has at most {2**16} inputs.")
        _check_ids("anchors", self.anchors, 0, self.in_features // self.groups)
        _check_ids("shifts", self.shifts, 0, _MOST_SHIFT + 1)
        if self.targets is not None:
            _check_ids("targets", self.targets, -1, outputs)
        most = max(self.bound)
        if most > _INT32.max:
            raise _error(
                f"sums can reach {most}, beyond int32; use a smaller fraction, or smaller tables."
            )

    @property
    def out_features(self) -> int:
        """Number of outputs."""
        return len(self.shifts)

    @property
    def bound(self) -> tuple[int, ...]:
        """Maximum magnitude of each output and its partial sums."""
        magnitudes = np.abs(self.values.astype(np.int64))
        most = sums(magnitudes, self.out_features, self.targets, self.groups)
        return tuple(int(m) << int(s) for m, s in zip(most, self.shifts, strict=True))

    def rows(self, x: Int[np.ndarray, "*batch inputs"]) -> Int[np.ndarray, "*batch detectors"]:
        """Return the selected rows, int64."""
        if not np.issubdtype(x.dtype, np.integer):
            raise TypeError(f"IntegerLUT: x is {x.dtype}; expected whole numbers.")
        if x.ndim < 1 or x.shape[-1] != self.in_features:
            raise _error(f"x has shape {list(x.shape)}; expected [..., {self.in_features}].")
        if x.size and not (_INT32.min <= x.min() and x.max() <= _INT32.max):
            raise _error(f"x is from {x.min()} to {x.max()}; expected numbers that fit int32.")
        # Anchors are ids in a group: the first input of the group makes them ids of the layer.
        group = np.arange(len(self.anchors)) // (len(self.anchors) // self.groups)
        first = group * (self.in_features // self.groups)
        a, b = np.moveaxis(self.anchors + first[:, None, None], -1, 0)
        # A difference of int32 numbers needs 33 bits.
        wide = x.astype(np.int64)
        bits = wide[..., a] - wide[..., b] >= max(1, self.dead_zone)
        rows: np.ndarray = (bits.astype(np.int64) << np.arange(self.anchors.shape[1])).sum(-1)
        return rows

    def __call__(self, x: Int[np.ndarray, "*batch inputs"]) -> Int[np.ndarray, "*batch outputs"]:
        """Return the int32 outputs for integers in int32 range.

        Raises:
          ValueError, TypeError: wrong input shape, non-integer inputs, or inputs out of range.
        """
        rows = self.rows(x)
        *batch, tables = rows.shape
        read = self.values[np.arange(tables), rows].astype(np.int64)  # [..., T, K]
        outputs = self.out_features // self.groups
        if self.targets is not None:
            targets = np.broadcast_to(self.targets, self.values.shape)[np.arange(tables), rows]
            # An additional output collects unused slots, whose target is -1, the last index.
            spread = np.zeros((*batch, tables, outputs + 1), np.int64)
            places = tuple(np.ogrid[tuple(slice(n) for n in read.shape[:-1])])
            np.add.at(spread, (*(p[..., None] for p in places), targets), read)
            read = spread[..., :outputs]
        sums = read.reshape(*batch, self.groups, -1, outputs).sum(-2).reshape(*batch, -1)
        shifted: np.ndarray = (sums << self.shifts.astype(np.int64)).astype(np.int32)
        return shifted

    def to_c(self, name: str = "layer") -> dict[str, str]:
        """Return the C99 header and source of the layer, by file name.

        The source defines ``void NAME(const int32_t x[INPUTS], int32_t y[OUTPUTS])``, valid for
        any inputs. It uses no heap, no floating point and no variables except constants and
        locals, and it cannot overflow.

        Args:
          name: function and file name: lower-case letters, digits and underscores; not reserved in
            C, C++, their libraries or the generated files.

        Raises:
          ValueError: invalid name, or tables too large for compilers.

        Example:
          >>> import numpy as np
          >>> from lutjax.circuits.detectors import IntegerLUT
          >>> anchors, values = np.array([[[0, 1]]]), np.array([[[-3], [5]]], np.int8)
          >>> layer = IntegerLUT(2, anchors, values, shifts=np.array([4]))
          >>> sorted(layer.to_c("door"))
          ['detectors.h', 'door.c', 'door.h']
        """
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ValueError(
                f"to_c: name is {name!r}; expected lower-case letters, digits and underscores."
            )
        own = None
        if name in _OWN or name.startswith("lutjax"):
            own = "it is a name in the files of each layer"
        if why := own or _names.explain_bad_function(name):
            raise ValueError(f"to_c: name is {name!r}; {why}. Take another one.")
        if self.values.size > _MOST_IN_C:
            raise ValueError(
                f"to_c: the tables have {self.values.size:,} entries, "
                f"more than the {_MOST_IN_C:,} that compilers take in a minute."
            )
        return {
            "detectors.h": read_source("detectors.h"),
            f"{name}.h": _templates.fill_template(
                "layer.h",
                name=name,
                NAME=name.upper(),
                detectors=len(self.values),
                inputs=self.in_features,
                outputs=self.out_features,
                fraction=self.fraction,
            ),
            f"{name}.c": self._source(name),
        }

    def _source(self, name: str) -> str:
        tables, rows, columns = self.values.shape
        n_anchors, dtype = self.anchors.shape[1], f"{self.values.dtype}_t"
        arrays = array("uint16_t", "anchors", self.anchors) if n_anchors else []
        arrays += array(dtype, "values", self.values)
        shifted, x, y = "", "x", "y"
        if self.shifts.any():
            arrays += array("uint8_t", "shifts", self.shifts)
            # A product instead of a shift: C leaves shifts of negative numbers to the compiler.
            shifted = (
                f"    for (int32_t k = 0; k < {self.out_features}; k++)\n"
                "        y[k] *= (int32_t)1 << shifts[k];\n"
            )
        if self.groups > 1:
            group = f"t / {tables // self.groups}"
            x = f"x + {group} * {self.in_features // self.groups}"
            y = f"y + {group} * {self.out_features // self.groups}"
        least = max(1, self.dead_zone)
        row = f"lutjax_row({x}, anchors + t * {2 * n_anchors}, {n_anchors}, {least})"
        place, added = "", "sum[k] += value[k]"
        if self.targets is not None:
            arrays += array("int32_t", "targets", self.targets)
            n_tables, n_rows, _ = self.targets.shape
            table = "(uint32_t)t" if n_tables > 1 else "0"
            target_row = "row" if n_rows > 1 else "0"
            place = (
                f"const int32_t *target = targets + ({table} * {n_rows} + {target_row}) "
                f"* {columns};\n        "
            )
            added = "if (target[k] >= 0)\n                sum[target[k]] += value[k]"
        return _templates.fill_template(
            "layer.c",
            name=name,
            arrays=arrays,
            inputs=self.in_features,
            outputs=self.out_features,
            detectors=tables,
            rows=rows,
            columns=columns,
            dtype=dtype,
            row=row if n_anchors else "0",
            unused="" if n_anchors else "(void)x, (void)lutjax_row;\n        ",
            sum=y,
            place=place,
            added=added,
            shifted=shifted,
        )


def from_layer(
    layer: Any, *, tables: str = "int16", fraction: int | None = None, input_fraction: int = 0
) -> IntegerLUT:
    """Return the integer form of a Flax NNX `LUT` or `SparseLUT` layer.

    A layer with fixed-point accumulation, ``accumulate=lutjax.FixedPoint(2.0**fraction)``, keeps
    its values: its outputs times the scale equal the integer form bit for bit. Tables of other
    layers are rounded, see `rounded`.

    Args:
      layer: the layer.
      tables: integer dtype, ``"int8"``, ``"int16"`` or ``"int32"``; for a fixed-point layer,
        default: the smallest sufficient dtype.
      fraction: fraction bits of an output.
      input_fraction: fraction bits of an input; only relevant to a dead zone.

    Raises:
      ValueError, TypeError: unsupported layer, or values out of range.

    Example:
      >>> import numpy as np, jax.numpy as jnp, lutjax
      >>> from flax import nnx
      >>> from lutjax.circuits import detectors
      >>> from lutjax.layers.nnx import LUT
      >>> options = dict(n_detectors=4, n_anchors=3, weights_init=nnx.initializers.uniform())
      >>> layer = LUT(8, 2, **options, accumulate=lutjax.FixedPoint(2.0**12), rngs=nnx.Rngs(0))
      >>> x = np.arange(8) % 3
      >>> integer = detectors.from_layer(layer)
      >>> bool((integer(x) == layer(jnp.asarray(x, jnp.float32)) * 2**integer.fraction).all())
      True
    """
    name = type(layer).__name__
    if name not in ("LUT", "SparseLUT") or not hasattr(layer, "spec"):
        raise TypeError(
            f"detectors.from_layer: layer is a {name}; "
            "expected a LUT or SparseLUT from lutjax.layers.nnx. "
            "Pass arrays to detectors.rounded instead."
        )
    spec, weights = layer.spec, np.asarray(layer.weights[...])
    options = {
        "in_features": spec.in_features,
        "groups": spec.groups or 1,
        "targets": np.asarray(layer.targets[...]) if name == "SparseLUT" else None,
        "dead_zone": dead_zone(spec.epsilon, input_fraction),
    }
    if spec.accumulate is None:
        fields = _rounded_fields(
            weights, spec.out_features, tables, fraction, options["targets"], options["groups"]
        )
    else:
        fields = _fixed_point_fields(weights, spec.out_features, spec.accumulate.scale, fraction)
    return IntegerLUT(anchors=np.asarray(layer.anchors[...]), **fields, **options)


def rounded(
    weights: Any,
    anchors: Int[np.ndarray, "detectors anchors 2"],
    *,
    in_features: int,
    out_features: int | None = None,
    tables: str = "int16",
    fraction: int | None = None,
    targets: Int[np.ndarray, "_ _ columns"] | None = None,
    groups: int = 1,
    epsilon: float | int = 0.0,
    input_fraction: int = 0,
) -> IntegerLUT:
    """Return the integer form of lookup tables, rounded to nearest.

    Tables in int16 or int32 are fixed-point numbers with one `fraction`. Tables in int8 have a
    power-of-two scale for each group and output, as in `lutjax.quantize_tables`, and the sums are
    shifted to one `fraction`. A finer scale is coarsened to it.

    The same form covers `lutjax.scored_lut` tables with the `lutjax.reads.Hard` read; other reads
    use float row weights.

    Args:
      weights: floats ``[T, 2**C, K]``.
      anchors: as in `IntegerLUT`.
      in_features: number of inputs.
      out_features: number of outputs; required with `targets`.
      tables: integer dtype, ``"int8"``, ``"int16"`` or ``"int32"``.
      fraction: fraction bits of an output, from 0 to 30; None: the maximum that fits.
      targets: as in `IntegerLUT`.
      groups: as in `IntegerLUT`.
      epsilon: half-width of the comparison dead zone, in real input units.
      input_fraction: fraction bits of an input; only relevant to a dead zone.

    Raises:
      ValueError: invalid size, a non-finite table, or values too large for the fraction.

    Example:
      >>> import numpy as np
      >>> from lutjax.circuits import detectors
      >>> tables, anchors = np.array([[[0.75, 3.0], [-0.3, 2.0]]]), np.array([[[0, 1]]])
      >>> layer = detectors.rounded(tables, anchors, in_features=2, tables="int8", fraction=10)
      >>> layer.values[0].tolist(), layer.shifts.tolist()
      ([[96, 96], [-38, 64]], [3, 5])
    """
    if targets is not None and out_features is None:
        raise ValueError("rounded: targets are given, so out_features is required.")
    fields = _rounded_fields(weights, out_features, tables, fraction, targets, groups)
    zone = dead_zone(epsilon, input_fraction)
    return IntegerLUT(
        in_features, anchors, targets=targets, groups=groups, dead_zone=zone, **fields
    )


def dead_zone(epsilon: float | int, input_fraction: int) -> int:
    """Return the smallest difference not below `epsilon`, in ``2.0**-input_fraction`` units."""
    return math.ceil(Fraction(epsilon) * Fraction(2) ** input_fraction)


def integers(
    weights: np.ndarray, fraction: int, tables: str, groups: int = 1
) -> tuple[np.ndarray, Int[np.ndarray, " outputs"]]:
    """Return tables as nearest integers, or clamped, and the output shifts for all groups.

    With int8, each group has its own scale for each output.
    """
    if tables == "int8":
        array = jnp.asarray(weights, jnp.float32)
        # Scales of small entries would be finer than the fraction, but all columns are multiples of
        # its unit.
        scale = jnp.maximum(exponents(array, groups), -fraction)
        values = np.asarray(rounded_at(array, scale)).astype(np.int8)
        return values, np.asarray(scale).ravel() + fraction
    limits = np.iinfo(tables)
    # Ties round up, as for int8.
    units = np.floor(np.ldexp(weights.astype(np.float64), fraction) + 0.5)
    values = np.clip(units, limits.min, limits.max).astype(tables)
    return values, np.zeros(groups * weights.shape[2], np.int64)


def magnitudes(weights: np.ndarray, tables: str, groups: int = 1) -> np.ndarray:
    """Return magnitude bounds for rounded tables, up to half a fraction unit; see `integers`."""
    exact = np.abs(weights.astype(np.float64))
    if tables != "int8":
        return exact
    values, shifts = integers(weights, _FINER_THAN_ALL, tables, groups)
    scale = np.ldexp(1.0, shifts - _FINER_THAN_ALL).reshape(groups, 1, -1)
    rounded = np.abs(values.reshape(groups, -1, values.shape[2]) * scale).reshape(exact.shape)
    most: np.ndarray = np.maximum(exact, rounded)
    return most


def finest_fraction(
    most: float, largest: float, n_addends: int, tables: str, *, limit: int = _INT32.max
) -> int:
    """Return the largest fraction without overflow, from 0 to 30, or -1 if none exists.

    Sums are below `most` in magnitude, table entries below `largest`, for int8 with separate
    scales. Each of the `n_addends` in a sum is rounded by up to half a unit.
    """
    # Half a unit per addend, twice for safety: the rounded sums must fit as well.
    fits = [math.log2(max(limit - n_addends, 0.5) / max(most, 2.0**-40))]
    if tables != "int8":
        fits.append(math.log2((np.iinfo(tables).max - 1) / max(largest, 2.0**-40)))
    return max(-1, min(_MOST_SHIFT, math.floor(min(fits))))


def _rounded_fields(
    weights: Any,
    out_features: int | None,
    tables: str,
    fraction: int | None,
    targets: np.ndarray | None,
    groups: int,
) -> dict[str, Any]:
    if tables not in _DTYPES:
        raise ValueError(f"rounded: tables is {tables!r}; expected one of {_DTYPES}.")
    if fraction is not None and not 0 <= fraction <= _MOST_SHIFT:
        raise ValueError(f"rounded: fraction is {fraction}; it must be from 0 to {_MOST_SHIFT}.")
    weights = np.asarray(weights).astype(np.float64)
    if not np.isfinite(weights).all():
        raise ValueError(
            "rounded: weights has infinite or NaN entries, which integers cannot represent."
        )
    size = out_features or groups * weights.shape[2]
    scaled = weights if targets is None else weights.reshape(len(weights), -1, 1)
    # A target sum combines values from all columns, so they share one scale.
    scales = groups if targets is None else 1
    reached = magnitudes(scaled, tables, scales).reshape(weights.shape)
    largest = float(reached.max(initial=0))
    most = float(sums(reached, size, targets, groups).max(initial=0))
    n_addends = len(weights) * (1 if targets is None else weights.shape[2])
    finest = finest_fraction(most, largest, n_addends, tables)
    requested, fraction = fraction, finest if fraction is None else fraction
    if not 0 <= fraction <= finest:
        raise ValueError(
            f"rounded: sums reach {most:g} and entries {largest:g}, "
            f"which fit {tables} and sums of int32 with a fraction of at most {finest}"
            + ("; scale them down." if finest < 0 else f", not {fraction}; use a smaller one.")
        )
    values, shifts = integers(scaled, fraction, tables, scales)
    # Int8 scales may all be coarser than the fraction, which then need not be so fine.
    if requested is None:
        spare = min(int(shifts.min()), fraction)
        shifts, fraction = shifts - spare, fraction - spare
    if targets is not None:
        values, shifts = values.reshape(weights.shape), np.repeat(shifts, size)
    return {"values": values, "shifts": shifts, "fraction": fraction}


def _fixed_point_fields(
    weights: np.ndarray, out_features: int, scale: float, fraction: int | None
) -> dict[str, Any]:
    exponent = round(math.log2(scale))
    if (
        2.0**exponent != scale
        or not 0 <= exponent <= _MOST_SHIFT
        or fraction not in (None, exponent)
    ):
        stated = "" if fraction is None else f", and fraction is {fraction}"
        raise ValueError(
            f"detectors.from_layer: the layer adds integers of the scale {scale:g}{stated}; "
            "the integer form of these has the scale 2**fraction, "
            f"with a fraction from 0 to {_MOST_SHIFT}."
        )
    units = np.trunc(np.ldexp(weights.astype(np.float64), exponent))
    for name in _DTYPES:
        if np.abs(units).max(initial=0) <= np.iinfo(name).max:
            shifts = np.zeros(out_features, int)
            return {"values": units.astype(name), "shifts": shifts, "fraction": exponent}
    raise ValueError(
        f"detectors.from_layer: a table holds an entry that is not below {2**31 / scale:g}, "
        f"which the scale {scale:g} does not fit."
    )


def sums(
    magnitudes: np.ndarray, out_features: int, targets: np.ndarray | None = None, groups: int = 1
) -> np.ndarray:
    """Return each output's maximum sum of magnitudes, over all reads of tables ``[T, R, K]``."""
    outputs, tables_per_group = out_features // groups, len(magnitudes) // groups
    totals = np.zeros((groups, outputs), magnitudes.dtype)
    for t, table in enumerate(magnitudes):
        if targets is not None:
            reached = np.broadcast_to(targets[t if len(targets) > 1 else 0], table.shape)
            # The last column collects unused slots.
            every = np.zeros((len(table), outputs + 1), table.dtype)
            np.add.at(every, (np.arange(len(table))[:, None], reached), table)
            table = every[:, :outputs]
        # A table adds one of its rows, so at most the largest entry of each column.
        totals[t // tables_per_group] += table.max(axis=0, initial=0)
    return totals.ravel()


def _check_ids(name: str, ids: np.ndarray, least: int, end: int) -> None:
    if ids.size and not (least <= ids.min() and ids.max() < end):
        raise _error(f"{name} are from {ids.min()} to {ids.max()}; expected {least} to {end - 1}.")
