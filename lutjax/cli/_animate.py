"""Animated pictures."""

from pathlib import Path

import numpy as np
from jaxtyping import UInt8


def animate(
    frames: UInt8[np.ndarray, "frames height width 3"],
    path: Path,
    *,
    side: int = 240,
    milliseconds: int = 150,
) -> None:
    """Writes frames as a GIF, each cell a square; the last frame stays for a while."""
    from PIL import Image

    scale = max(1, side // frames.shape[1])
    pictures = []
    for frame in frames:
        large = frame.repeat(scale, 0).repeat(scale, 1)
        pictures.append(Image.fromarray(large).convert("P", palette=Image.Palette.ADAPTIVE, colors=8))
    durations = [milliseconds] * (len(pictures) - 1) + [10 * milliseconds]
    pictures[0].save(
        path, save_all=True, append_images=pictures[1:], duration=durations, loop=0, optimize=True
    )
