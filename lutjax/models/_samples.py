"""Shapes of samples that classifiers take: images, or rows of all their numbers."""

import math
from typing import Any

from lutjax.arguments import require_array
from lutjax.values import Array


def of_shape(where: str, x: Array, shape: tuple[int, ...]) -> Any:
    """Return samples ``[..., *shape]``, given so or otherwise with the same numbers in the same order.

    A classifier of images also takes rows of all numbers, and images without the axis of one channel. A classifier of rows also takes
    batches of images with as many numbers, ``[..., batch, height, width]`` or with channels.

    Args:
      where: the model, for messages.

    Raises:
      TypeError: they are no array.
      ValueError: they have another size.
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
        for n_axes in (2, 3):  # an axis of samples before them tells images from rows of another size
            if len(given) > n_axes and math.prod(given[-n_axes:]) == size:
                return x.reshape(*given[:-n_axes], size)
    sizes = ", ".join(map(str, shape))
    others = f", or rows of their {size} numbers" if len(shape) > 1 else ", or images of as many numbers"
    raise ValueError(f"{where}: x has shape {list(given)}; expected [..., {sizes}]{others}.")
