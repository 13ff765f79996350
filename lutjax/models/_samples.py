"""Sample shapes accepted by classifiers: images, or flattened rows."""

import math
from typing import Any

from lutjax.arguments import require_array
from lutjax.values import Array


def reshape_samples(where: str, x: Array, shape: tuple[int, ...]) -> Any:
    """Reshape samples to ``[..., *shape]``, keeping the order of values.

    Image classifiers also accept flattened rows, and images without the axis of a single channel.
    Row classifiers also accept image batches with as many values, ``[..., batch, height, width]``,
    with or without channels.
    """
    require_array(where, "x", x)
    shape_of_x, size = tuple(x.shape), math.prod(shape)
    if shape_of_x[-len(shape) :] == shape:
        return x
    if len(shape) > 1:
        if shape[-1] == 1 and shape_of_x[1 - len(shape) :] == shape[:-1]:
            return x[..., None]
        if shape_of_x[-1:] == (size,):
            return x.reshape(*shape_of_x[:-1], *shape)
    else:
        for n_axes in (2, 3):  # the batch axis distinguishes images from rows of another size
            if len(shape_of_x) > n_axes and math.prod(shape_of_x[-n_axes:]) == size:
                return x.reshape(*shape_of_x[:-n_axes], size)
    sizes = ", ".join(map(str, shape))
    others = ", or images of as many numbers"
    if len(shape) > 1:
        others = f", or rows of their {size} numbers"
    raise ValueError(f"{where}: x has shape {list(shape_of_x)}; expected [..., {sizes}]{others}.")
