"""Gate tree convolutions from other packages, as a `lutjax.models.LogicTreeNet`."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from flax import nnx
from jaxtyping import Float, Int

from lutjax.convert._networks import Layer, check_layer, encode_thresholds, encoder, put
from lutjax.convert.errors import ConversionError
from lutjax.files.messages import in_a_line
from lutjax.layers.specifications import LogicConvSpec
from lutjax.models import LogicTreeNet, LogicTreeNetConfig

PerLayer = int | Sequence[int]


@dataclasses.dataclass(frozen=True)
class Image:
    """Image and convolution sizes missing in files.

    Padding and pools are numbers for all layers, or one per layer.

    Attributes:
      shape: height, width and channels of images, with numeric values or, without a thermometer,
        bits.
      padding: zeros around the image read by a convolution.
      pool: height, width and stride of the OR-pooling after each convolution; 1 for none.
      pool_padding: positions around the pooling input.

    Raises:
      ConversionError: a size is impossible.

    Source: docs/convert.md, section 1.

    Example:
      >>> import lutjax
      >>> lutjax.convert.Image((28, 28, 1), pool=2, pool_padding=(0, 1, 1)).padding
      0
    """

    shape: tuple[int, int, int]
    padding: PerLayer = 0
    pool: PerLayer = 1
    pool_padding: PerLayer = 0

    def __post_init__(self) -> None:
        if len(self.shape) != 3 or min(self.shape) < 1:
            raise ConversionError(
                f"shape is {self.shape}; expected height, width and channels of images."
            )
        for name, least in (("padding", 0), ("pool", 1), ("pool_padding", 0)):
            sizes = self.size_per_layer(name, 1)
            if not sizes or min(sizes) < least:
                raise ConversionError(
                    f"{name} is {getattr(self, name)}; it must be at least {least}."
                )

    def size_per_layer(self, name: str, n_layers: int) -> tuple[int, ...]:
        size = getattr(self, name)
        return (size,) * n_layers if isinstance(size, int) else tuple(size)


@dataclasses.dataclass(frozen=True)
class Trees:
    """A tree convolution.

    Attributes:
      name: name in the file, for messages.
      levels: trained values, ``[nodes, kernels, numbers]`` per node level, leaves first. Node k
        reads nodes ``n * k`` to ``n * k + n - 1`` of the previous level. Values are as in `Layer`.
      leaves: ``[kernels * nodes, n, 3]``: row and column in the padded image at the first position,
        and channel.
      places: rows and columns of positions.
      stride: distance between positions.
    """

    name: str
    levels: Sequence[Float[np.ndarray, "_ kernels numbers"]]
    leaves: Int[np.ndarray, "_ n 3"]
    places: tuple[int, int]
    stride: int


def tree_net(
    trees: Sequence[Trees],
    layers: Sequence[Layer],
    *,
    image: Image,
    kind: str,
    n_classes: int,
    tau: float | int,
    thresholds: Float[np.ndarray, "channels thresholds"] | None,
    sampling: str = "fixed",
    width: float | int = 1.0,
) -> LogicTreeNet:
    """Return the classifier for convolutions and the layers after them; see `classifier`."""
    arity = trees[0].leaves.shape[1]
    expected = 16 if kind == "gates" else 2**arity
    names = ("padding", "pool", "pool_padding")
    sizes: dict[str, Any] = {name: image.size_per_layer(name, len(trees)) for name in names}
    for name, per_layer in sizes.items():
        if len(per_layer) != len(trees):
            raise ConversionError(
                f"{name} is {getattr(image, name)}; "
                f"expected one number, or one for each of the {len(trees)} convolutions."
            )
    height, wide, channels = image.shape
    if thresholds is not None and len(thresholds) != channels:
        raise ConversionError(
            f"thresholds have {len(thresholds)} channels; images have {channels}."
        )
    shape = height, wide, channels * (1 if thresholds is None else thresholds.shape[1])
    kernels, leaves = [], []
    for k, tree in enumerate(trees):
        _check_tree(tree, arity, expected, shape[2])
        padding = sizes["padding"][k]
        kernels.append(_kernel(tree, (shape[0], shape[1]), padding))
        # `LogicConv` numbers the pixels of a window by row, column and channel.
        row, column, channel = np.moveaxis(tree.leaves, -1, 0)
        leaves.append((row * kernels[k] + column) * shape[2] + channel)
        geometry = {name: per_layer[k] for name, per_layer in sizes.items()}
        geometry |= {"kernel": kernels[k], "stride": tree.stride}
        try:
            shape = LogicConvSpec(shape, tree.levels[0].shape[1], **geometry, depth=1).out_shape
        except ValueError as error:
            raise ConversionError(
                f"{tree.name} does not fit the image: {in_a_line(error)}"
            ) from error
    n_before, wiring = math.prod(shape), []
    for layer in layers:
        wiring.append(check_layer(layer, arity, expected, n_before))
        n_before = len(layer.wires)
    try:
        config = LogicTreeNetConfig(
            in_shape=image.shape,
            n_classes=n_classes,
            kernels=tuple(tree.levels[0].shape[1] for tree in trees),
            layers=tuple(len(layer.wires) for layer in layers),
            depth=tuple(len(tree.levels) for tree in trees),
            kernel=tuple(kernels),
            stride=tuple(tree.stride for tree in trees),
            tables=kind,
            n_inputs=arity,
            leaves="random",
            wiring="random" if "random" in wiring else "balanced",
            tau=tau,
            **sizes,
            **encode_thresholds(thresholds, sampling),
        )
    except ValueError as error:
        raise ConversionError(f"the layers make no classifier: {in_a_line(error)}") from error
    model = LogicTreeNet(config, rngs=nnx.Rngs(0), **encoder(thresholds, sampling, width))
    for tree, wires, convolution in zip(trees, leaves, model.trees, strict=True):
        levels = [np.moveaxis(level, 1, 0).reshape(-1, expected) for level in tree.levels]
        put(convolution, kind, np.concatenate(levels), wires)
    for layer, gates in zip(layers, model.gates, strict=True):
        put(gates, kind, layer.table, layer.wires)
    return model


def _check_tree(tree: Trees, arity: int, expected: int, n_channels: int) -> None:
    if tree.leaves.shape[1] != arity or any(level.shape[2] != expected for level in tree.levels):
        raise ConversionError(
            f"{tree.name} has trees {[list(level.shape) for level in tree.levels]} over "
            f"{tree.leaves.shape[1]} inputs; expected {expected} numbers for each node "
            f"of {arity} inputs, as in the first convolution."
        )
    if not all(np.isfinite(level).all() for level in tree.levels):
        raise ConversionError(f"{tree.name} has numbers that are not finite.")
    least, largest = int(tree.leaves.min()), int(tree.leaves[..., 2].max())
    if least < 0 or largest >= n_channels:
        raise ConversionError(
            f"{tree.name} has leaves that read channels up to {largest}, and rows, "
            f"columns and channels from {least}; its channels are 0 to {n_channels - 1}."
        )


def _kernel(tree: Trees, size: tuple[int, int], padding: int) -> int:
    """Return the smallest window that covers all leaves and gives the same number of positions."""
    needed = int(tree.leaves[..., :2].max()) + 1
    # The file has no window size. A larger one would have fewer positions, a smaller one more.
    largest = [
        n + 2 * padding - (places - 1) * tree.stride
        for n, places in zip(size, tree.places, strict=True)
    ]
    least = max(needed, *(n - tree.stride + 1 for n in largest))
    if least > min(largest):
        raise ConversionError(
            f"{tree.name} has {tree.places[0]} x {tree.places[1]} places {tree.stride} apart, "
            f"and leaves in {needed} rows and columns; no square window has that many in an image "
            f"of {size[0]} x {size[1]} with a padding of {padding}. "
            "Check the size of images, padding and pool."
        )
    return least
