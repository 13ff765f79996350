"""Conversion of torchlogix networks from their saved tensors."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Float, Shaped

from lutjax.convert._networks import Layer, array, check_some, classifier, modules
from lutjax.convert._trees import Image, Trees, tree_net
from lutjax.convert.errors import ConversionError
from lutjax.models import LogicClassifier, LogicTreeNet
from lutjax.models._config import MOST_DEPTH

Tensors = Mapping[str, Shaped[np.ndarray, "..."]]

SAMPLING = ("fixed", "hard", "soft")
"""Binarization outputs in training: fixed bits, learned bits, or learned sigmoids."""

_KINDS = {"light": "light", "warp": "walsh"}
_LEVEL, _LEAVES = "tree_weights.{}", "connections._indices_L{}"
_ENDINGS = (
    *("weight", "connections.indices", "connections.weights", "thresholds", "raw_diffs"),
    *("_export_lut_ids", "connections._export_indices"),
    *(
        name.format(k)
        for k in range(MOST_DEPTH)
        for name in (_LEVEL, _LEAVES, "_export_lut_ids_L{}")
    ),
)


def torchlogix(
    tensors: Tensors,
    *,
    n_classes: int,
    tau: float | int = 1.0,
    parameterization: str = "light",
    temperature: float | int = 1.0,
    n_inputs: int | None = None,
    image: Image | None = None,
    binarization: str | None = None,
    binarization_temperature: float | int = 0.1,
) -> LogicClassifier | LogicTreeNet:
    """Convert a torchlogix state dict to a classifier.

    The network has dense layers, optionally preceded by convolutions and an initial binarization.

    Hard outputs are identical. Soft outputs agree within rounding for gate layers (``"raw"`` in
    torchlogix, 16 logits each) and ``"light"`` tables. For ``"warp"`` layers torchlogix applies the
    sigmoid after the interpolation, which makes a difference only for inputs other than bits.
    Learned connections become the selected wires.

    Args:
      tensors: tensors by name: ``weight`` and ``connections.indices`` of each dense layer,
        ``tree_weights`` and ``connections._indices_L0`` of each convolution, ``thresholds`` of a
        binarization.
      n_classes, tau: arguments of its ``GroupSum``.
      parameterization: ``"light"`` or ``"warp"`` for tables with ``2**inputs`` values; the file
        does not include it.
      temperature: temperature of the parameterization.
      n_inputs: bits per sample, without binarization and image; by default as many as the first
        layer reads.
      image: convolution settings missing in the file: image size, and arguments of its
        ``LogicConv2d`` and ``OrPooling2d``.
      binarization: output in training: ``"fixed"``: bits; ``"soft"``: sigmoids, as in
        ``SoftBinarization`` and, by default, ``LearnableBinarization``; ``"hard"``: bits with
        sigmoid derivatives. Default: soft for learned thresholds, else fixed. All except fixed ones
        are learned here.
      binarization_temperature: sigmoid width, ``temperature_sampling`` in torchlogix.

    Raises:
      ConversionError: the network is of another kind, or the image settings do not fit.

    Source: docs/convert.md, section 1.

    Example:
      >>> import numpy as np, lutjax
      >>> wires = np.array([[0, 1, 2, 3], [1, 2, 3, 0]])
      >>> weight = np.eye(16, dtype=np.float32)[[1, 6, 7, 14]]  # and, xor, or, nand
      >>> tensors = {"0.weight": weight, "0.connections.indices": wires}
      >>> model = lutjax.convert.torchlogix(tensors, n_classes=2)
      >>> model(np.array([[1, 1, 0, 1]], np.float32), deterministic=True)
      Array([[2., 1.]], dtype=float32)
    """
    if parameterization not in _KINDS:
        raise ConversionError(f"parameterization is {parameterization!r}; expected light or warp.")
    if not 0 < binarization_temperature < math.inf:
        raise ConversionError(
            f"binarization_temperature is {binarization_temperature}; "
            "it must be positive and finite."
        )
    layers: list[Layer] = []
    trees: list[Trees] = []
    thresholds, sampling = None, "fixed"
    for name, parts in modules(tensors, _ENDINGS):
        if "thresholds" in parts:
            thresholds = _thresholds(name, parts)
            sampling = _sampling(name, binarization, learned="raw_diffs" in parts)
        elif _LEVEL.format(0) in parts:
            if layers:
                raise ConversionError(
                    f"{name} is a convolution after a dense layer; expected it first."
                )
            trees.append(_trees(name, parts, temperature))
        else:
            layers.append(_dense_layer(name, parts, temperature))
    # Tables of 16 columns for two inputs weight the sixteen gates; a network must have one kind.
    tables = [layer.table for layer in layers] + [tree.levels[0] for tree in trees]
    arities = [layer.wires.shape[1] for layer in layers] + [tree.leaves.shape[1] for tree in trees]
    kinds = {_kind(table, n, parameterization) for table, n in zip(tables, arities, strict=True)}
    check_some(layers, kinds)
    options: dict[str, Any] = {"kind": kinds.pop(), "n_classes": n_classes, "tau": tau}
    options |= {"sampling": sampling, "width": binarization_temperature}
    if trees or image is not None:
        if not trees:
            raise ConversionError(
                "the size of images is given, but the file has no convolutions; leave it out."
            )
        if image is None:
            raise ConversionError(
                "the file has convolutions, and not the size of images: "
                "say what it is (image, --image)."
            )
        # One list of thresholds serves every channel.
        if thresholds is not None and thresholds.ndim == 1:
            thresholds = np.tile(thresholds, (image.shape[2], 1))
        return tree_net(trees, layers, image=image, thresholds=thresholds, **options)
    # One list of thresholds serves every feature; the wires of the first layer tell how many.
    if thresholds is not None and thresholds.ndim == 1:
        n_bits = n_inputs or int(layers[0].wires.max()) + 1
        thresholds = np.tile(thresholds, (-(-n_bits // len(thresholds)), 1))
    return classifier(layers, thresholds=thresholds, n_inputs=n_inputs, **options)


def _kind(table: np.ndarray, n_inputs: int, parameterization: str) -> str:
    return "gates" if n_inputs == 2 and table.shape[-1] == 16 else _KINDS[parameterization]


def _dense_layer(name: str, parts: Mapping[str, Any], temperature: float) -> Layer:
    table = array(name, parts, "weight", 2).astype(np.float32) / np.float32(temperature)
    wires = _select_wires(name, parts)
    return Layer(name, _lowest_first(table, wires.shape[1]), wires)


def _trees(name: str, parts: Mapping[str, Any], temperature: float) -> Trees:
    """Return the trees of a convolution, from the pixels stored for leaves at every position."""
    depth = sum(_LEVEL.format(k) in parts for k in range(MOST_DEPTH))
    levels = [array(name, parts, _LEVEL.format(k), 3) for k in range(depth)]
    # [inputs, kernels, positions, nodes, (row, column, channel)]
    pixels = array(name, parts, _LEAVES.format(0), 5)
    arity, n_kernels, _, n_nodes, n_axes = pixels.shape
    expected = [(arity**k, n_kernels) for k in reversed(range(depth))]
    sizes = [level.shape[:2] for level in levels]
    if n_axes != 3 or sizes != expected or n_nodes != expected[0][0]:
        raise ConversionError(
            f"{name} has leaves {list(pixels.shape)} and trees "
            f"{[list(level.shape) for level in levels]}; expected those of a LogicConv2d: "
            "leaves [inputs, kernels, places, nodes, 3] and nodes [nodes, kernels, numbers], "
            "level by level."
        )
    # The file has the pixels of every position; a window that slides reads shifted ones.
    first = pixels[:, :, :1]
    shifts = pixels[0, 0, :, 0] - pixels[0, 0, 0, 0]  # of positions
    if (pixels != first + shifts[None, None, :, None]).any() or shifts[:, 2].any():
        raise ConversionError(f"{name} does not read the same pixels of a window at all places.")
    down, right = (np.unique(shifts[:, axis]) for axis in (0, 1))
    strides = {int(step) for starts in (down, right) for step in np.diff(starts)} or {1}
    grid = np.stack(np.meshgrid(down, right, indexing="ij"), -1).reshape(-1, 2)
    if len(strides) > 1 or not np.array_equal(shifts[:, :2], grid):
        raise ConversionError(f"{name} has windows at other places than those of one stride.")
    values = [level.astype(np.float32) / np.float32(temperature) for level in levels]
    values = [_lowest_first(level, arity) for level in values]
    leaves = first[:, :, 0].transpose(1, 2, 0, 3).reshape(-1, arity, 3)
    return Trees(name, values, leaves, (len(down), len(right)), strides.pop())


def _lowest_first(table: np.ndarray, n_inputs: int) -> np.ndarray:
    """Reorder tables from first input highest to first input lowest; gates keep their values."""
    if table.shape[-1] != 2**n_inputs or (n_inputs, table.shape[-1]) == (2, 16):
        return table
    # One axis of size 2 per input; reversing these axes reverses the address bits.
    axes = table.reshape(*table.shape[:-1], *(2,) * n_inputs)
    first = table.ndim - 1
    order = (*range(first), *reversed(range(first, axes.ndim)))
    return axes.transpose(order).reshape(table.shape)


def _sampling(name: str, requested: str | None, *, learned: bool) -> str:
    sampling = requested or ("soft" if learned else "fixed")
    if sampling not in SAMPLING:
        raise ConversionError(
            f"binarization is {sampling!r}; expected one of {', '.join(SAMPLING)}."
        )
    if learned and sampling == "fixed":
        raise ConversionError(
            f"binarization is 'fixed', but {name} is learned; expected soft or hard."
        )
    return sampling


def _thresholds(name: str, parts: Mapping[str, Any]) -> Float[np.ndarray, "..."]:
    thresholds = np.asarray(parts["thresholds"], np.float32)
    if thresholds.ndim not in (1, 2) or not thresholds.size:
        raise ConversionError(
            f"{name}.thresholds has shape {list(thresholds.shape)}; "
            "expected [features, thresholds]."
        )
    if "raw_diffs" in parts:
        differences = array(name, parts, "raw_diffs", thresholds.ndim).astype(np.float64)
        scale = 0.1 + 1e-6  # the default temperature_softplus, missing in the file
        # A softplus of the differences keeps thresholds in ascending order.
        later = scale * np.logaddexp(0, differences[..., 1:] / scale)
        thresholds = np.cumsum(np.concatenate([differences[..., :1], later], -1), -1).astype(
            np.float32
        )
    return thresholds


def _select_wires(name: str, parts: Mapping[str, Any]) -> Any:
    """Return wires ``[gates, inputs]``: the fixed ones, or the best candidates."""
    if "connections.weights" not in parts:
        return array(name, parts, "connections.indices", 2).T
    scores = array(name, parts, "connections.weights", 3)
    candidates = array(name, parts, "connections.indices", 3)
    if candidates.shape != scores.shape:
        raise ConversionError(
            f"{name}.connections has scores {list(scores.shape)} for candidates "
            f"{list(candidates.shape)}; expected as many."
        )
    return np.take_along_axis(candidates, scores.argmax(0)[None], 0)[0].T
