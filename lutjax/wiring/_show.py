"""Connectivity figures: the map regions that detector groups read and reach."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from lutjax.extras import require_optional
from lutjax.wiring._images import Connectivity
from lutjax.wiring._sizes import Size, as_image, shape_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_INPUTS, _OUTPUTS, _PAIRS, _INK = "Blues", "Oranges", "#d6604d", "#222222"


@dataclasses.dataclass(frozen=True)
class _Fields:
    """Ids to draw."""

    unit: str  # name of the owner of a row of ids: a group, a detector or a gate
    in_shape: tuple[int, ...]  # sizes of the input map
    read: np.ndarray  # input ids ``[G, inputs]``, -1 for an unused slot
    pairs: np.ndarray | None = None  # compared pairs of inputs, ``[G, pairs, 2]``, or None
    centers: np.ndarray | None = None  # rows and columns ``[G, 2]``, or None
    out_shape: tuple[int, ...] | None = None  # sizes of the output map, or None
    reached: np.ndarray | None = None  # output ids ``[G, outputs]``, or None


def show(
    source: Any,
    *,
    in_shape: Size | None = None,
    out_shape: Size | None = None,
    groups: int | Sequence[int] = 5,
) -> "Figure":
    """Draw receptive and projective fields: one column per selected group, and one for all groups.

    The first row shows the candidate inputs of a group, and lines between the pairs that its
    detectors compare. The second row shows the outputs of its tables, if they are a subset. The
    last column counts the groups that read or reach each pixel.

    Args:
      source: a `Connectivity`; a layer of `lutjax.layers.nnx`; the variables of a Linen or Haiku
        layer, by name; or ids: anchors ``[detectors, pairs, 2]``, or ``[groups, inputs]`` such as
        wires or candidates, where -1 is an unused slot.
      in_shape: sizes of the input map, (height, width) or (height, width, channels). Only for
        sources without a connectivity; by default their inputs are one row, or a window for
        `ConvLUT`.
      out_shape: sizes of the output map, likewise.
      groups: number of groups to draw, evenly spaced, or their ids.

    Returns:
      A Matplotlib figure, for ``figure.savefig("fields.png")``.

    Raises:
      ValueError: there is nothing to draw, a shape does not match the number of ids, or a group
        does not exist.
      ModuleNotFoundError: Matplotlib is not installed.

    Example:
      >>> from lutjax import wiring
      >>> c = wiring.projections(None, (8, 8), (10, 12), groups=(3, 3), receptive=3, projective=4)
      >>> figure = wiring.show(c, groups=[0, 4])
      >>> [axes.get_title() for axes in figure.axes[:3]]
      ['group 0 reads', 'group 4 reads', 'groups that read a pixel']
    """
    with require_optional("lutjax.wiring.show"):
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

    fields = _fields_of(source, in_shape, out_shape)
    picked = _select_groups(fields, groups)
    rows = 1 if fields.reached is None else 2
    figure = Figure(figsize=(2.0 * (len(picked) + 1) + 0.8, 2.3 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(rows, len(picked) + 1, squeeze=False)
    maps = [(fields.in_shape, fields.read, "read", _INPUTS)]
    if fields.reached is not None:
        assert fields.out_shape is not None
        maps.append((fields.out_shape, fields.reached, "reach", _OUTPUTS))
    for line, (shape, ids, verb, colors) in zip(grid, maps, strict=True):
        for axes, g in zip(line, picked, strict=False):
            label = f"{fields.unit} {g} {verb}{'es' if verb == 'reach' else 's'}"
            _draw(axes, _image(shape, ids[g]), label, colors)
        n_groups = np.zeros(as_image(shape)[:2], int)
        for ids_of_group in ids:
            n_groups += _image(shape, ids_of_group) > 0
        image = _draw(line[-1], n_groups, f"{fields.unit}s that {verb} a pixel", colors)
        figure.colorbar(image, ax=line[-1], shrink=0.8)
    for axes, g in zip(grid[0], picked, strict=False):
        _draw_comparisons(axes, fields, g)
    return figure


def _select_groups(fields: _Fields, groups: int | Sequence[int]) -> list[int]:
    n = len(fields.read)
    if isinstance(groups, Sequence):
        picked = [int(g) for g in groups]
    else:
        picked = sorted(set(np.linspace(0, n - 1, min(int(groups), n)).astype(int).tolist()))
    if not picked or min(picked) < 0 or max(picked) >= n:
        raise ValueError(
            f"show: groups is {groups}; there are {n} {fields.unit}s, from 0 to {n - 1}."
        )
    return picked


def _image(shape: tuple[int, ...], ids: np.ndarray) -> np.ndarray:
    """Return the selected share of each pixel's channels, ``[height, width]``."""
    height, width, channels = as_image(shape)
    values = np.zeros(height * width * channels, bool)
    values[ids[ids >= 0]] = True
    share: np.ndarray = values.reshape(height, width, channels).mean(-1)
    return share


def _draw(axes: Any, image: np.ndarray, title: str, colors: str) -> Any:
    axes.set_title(title, fontsize=9)
    axes.set_xticks([])
    axes.set_yticks([])
    # Shares end at 1, below the darkest color, so that lines stay visible on them; counts do not.
    largest = max(1.3 if image.dtype != int else 0, image.max())
    return axes.imshow(image, cmap=colors, vmin=0, vmax=largest)


def _draw_comparisons(axes: Any, fields: _Fields, g: int) -> None:
    """Draw lines between the compared pairs of a group, and its center."""
    _, width, channels = as_image(fields.in_shape)
    if fields.pairs is not None:
        pixels = fields.pairs[g] // channels
        style = {"color": _PAIRS, "linewidth": 0.8, "marker": ".", "markersize": 2}
        axes.plot(pixels.T % width, pixels.T // width, **style)
    if fields.centers is not None:
        row, column = fields.centers[g]
        axes.plot([column], [row], color=_INK, marker="+", markersize=7)


def _fields_of(source: Any, in_shape: Size | None, out_shape: Size | None) -> _Fields:
    if isinstance(source, Connectivity):
        _require_none(in_shape, out_shape)
        return _connectivity_fields(source, None)
    spec = getattr(source, "spec", None)
    if spec is None and not isinstance(source, Mapping):
        ids = np.asarray(source)
        if ids.ndim not in (2, 3) or not np.issubdtype(ids.dtype, np.integer):
            raise ValueError(
                f"show: source is {ids.dtype}{list(ids.shape)}; "
                "expected a Connectivity, a layer of lutjax.layers.nnx, variables by name, "
                "anchors [detectors, pairs, 2], or ids [groups, inputs]."
            )
        name = "anchors" if ids.ndim == 3 and ids.shape[2] == 2 else "wires"
        arrays: dict[str, Any] = {name: ids}
    else:
        arrays = _arrays_of(source if spec is None else source._arrays())
    if spec is not None and hasattr(spec, "connectivity"):
        _require_none(in_shape, out_shape)
        return _connectivity_fields(spec.connectivity, spec.compared_pairs(arrays))
    return _array_fields(arrays, spec, in_shape, out_shape)


def _require_none(in_shape: Size | None, out_shape: Size | None) -> None:
    if in_shape is not None or out_shape is not None:
        raise ValueError(
            "show: in_shape and out_shape are those of the connectivity; leave them out."
        )


def _arrays_of(variables: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Return the id arrays by name, also from nested collections, as in Linen."""
    arrays: dict[str, np.ndarray] = {}
    for name, value in variables.items():
        if isinstance(value, Mapping):
            arrays |= _arrays_of(value)
        elif name in ("anchors", "targets", "wires"):
            arrays[name] = np.asarray(value)
    return arrays


def _connectivity_fields(c: Connectivity, pairs: np.ndarray | None) -> _Fields:
    # A figure of targets that are all outputs would show nothing.
    every = c.targets.shape[1] == c.n_outputs and (c.targets >= 0).all()
    out_shape, reached = (None, None) if every else (c.out_shape, c.targets)
    return _Fields("group", c.in_shape, c.candidates, pairs, c.centers, out_shape, reached)


def _array_fields(
    arrays: Mapping[str, np.ndarray], spec: Any, in_shape: Size | None, out_shape: Size | None
) -> _Fields:
    """Return the fields of a layer or arrays without a connectivity.

    Args:
      arrays: anchors ``[detectors, pairs, 2]`` or wires ``[gates, inputs]``, and perhaps targets
          ``[detectors or 1, rows or 1, slots]``.
      spec: the layer; None for arrays.
      in_shape, out_shape: shapes of the maps; None for vectors.
    """
    name = next((n for n in ("anchors", "wires") if n in arrays), None)
    if name is None:
        raise ValueError("show: source has neither anchors nor wires to draw.")
    ids, targets = arrays[name], arrays.get("targets")
    n_groups, n_inputs, n_outputs = 1, None, None
    if hasattr(spec, "n_tables"):
        # Tables over a vector. Each group of a layer counts its inputs and outputs from 0.
        n_groups = getattr(spec, "groups", None) or 1
        n_inputs, n_outputs = n_groups * spec.n_inputs, n_groups * spec.n_outputs
        ids = _global_ids(ids, n_groups, spec.n_inputs)
    elif name == "wires":
        n_inputs = getattr(spec, "in_features", None)
    if name == "anchors":
        unit, pairs = "detector", ids
    else:  # two inputs of a gate are drawn like a compared pair
        unit, pairs = "group" if spec is None else "gate", None
        if ids.shape[1:] == (2,):
            pairs = ids[:, None]
    if in_shape is None:
        in_shape = getattr(spec, "window_shape", None)
    shape = _shape("in_shape", in_shape, ids, n_inputs, "inputs")
    fields = _Fields(unit, shape, ids.reshape(len(ids), -1), pairs)
    if targets is None:
        return fields
    # Detectors may share their targets. The rows of a table are drawn as one.
    reached = np.repeat(targets.reshape(len(targets), -1), len(ids) // len(targets), axis=0)
    if n_outputs:
        reached = _global_ids(reached, n_groups, spec.n_outputs)
    shape = _shape("out_shape", out_shape, reached, n_outputs, "outputs")
    return dataclasses.replace(fields, out_shape=shape, reached=reached)


def _global_ids(ids: np.ndarray, n_groups: int, n_of_group: int) -> np.ndarray:
    """Convert group-local ids to global ids, with groups in order on the first axis."""
    group = np.arange(len(ids)) * n_groups // len(ids)
    first = (n_of_group * group).reshape(-1, *(1,) * (ids.ndim - 1))
    return np.where(ids < 0, -1, ids + first)


def _shape(
    name: str, shape_argument: Size | None, ids: np.ndarray, n_values: int | None, kind: str
) -> tuple[int, ...]:
    """Return the map shape, by default one row; a map of unknown size may exceed the ids."""
    least = int(ids.max(initial=0)) + 1 if n_values is None else n_values
    if shape_argument is None:
        return (least,)
    shape = shape_of("show", name, shape_argument, (1, 2, 3))
    size = int(np.prod(shape))
    if size < least or n_values not in (None, size):
        raise ValueError(
            f"show: {name} is {shape_argument}, a map of {size} values; there are {least} {kind}."
        )
    return shape
