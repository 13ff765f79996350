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
    given, size = tuple(x.shape), math.prod(shape)
    if given[-len(shape) :] == shape:
        return x
    if len(shape) > 1:
        if shape[-1] == 1 and given[1 - len(shape) :] == shape[:-1]:
            return x[..., None]
        if given[-1:] == (size,):
            return x.reshape(*given[:-1], *shape)
    else:
        for n_axes in (2, 3):  # the batch axis distinguishes images from rows of another size
            if len(given) > n_axes and math.prod(given[-n_axes:]) == size:
                return x.reshape(*given[:-n_axes], size)
    sizes = ", ".join(map(str, shape))
    others = (
        f", or rows of their {size} numbers" if len(shape) > 1 else ", or images of as many numbers"
    )
    raise ValueError(f"{where}: x has shape {list(given)}; expected [..., {sizes}]{others}.")
