"""Connectivity of images: the pixels that windows hold."""

import numpy as np
from jaxtyping import Int

from lutjax.wiring._sizes import require


def windows(
    image_shape: tuple[int, int, int], kernel: int, stride: int = 1
) -> Int[np.ndarray, "rows columns window"]:
    """Return the ids of the values of a flattened image that each window holds.

    Args:
      image_shape: height, width and channels; values lie in that order.
      kernel: height and width of a window.
      stride: from one window to the next.

    Returns:
      int32 ``[rows, columns, kernel * kernel * channels]``: for each place of the window the ids of its
      values. ``windows(...)[..., leaves]`` are the wires of trees at every place.

    Raises:
      ValueError: the window is larger than the image, or a size is less than 1.

    Source: docs/logic.md, section 4.

    Example:
      >>> from lutjax import wiring
      >>> wiring.windows((3, 4, 1), kernel=2)[1, 2]
      array([ 6,  7, 10, 11], dtype=int32)
    """
    height, width, channels = image_shape
    require("windows", height=height, width=width, channels=channels, kernel=kernel, stride=stride)
    if kernel > min(height, width):
        raise ValueError(f"windows: kernel is {kernel}, larger than an image of {height} by {width}.")
    ids = np.arange(height * width * channels, dtype=np.int32).reshape(height, width, channels)
    found = np.lib.stride_tricks.sliding_window_view(ids, (kernel, kernel), (0, 1))[::stride, ::stride]
    return np.moveaxis(found, 2, -1).reshape(*found.shape[:2], -1)
