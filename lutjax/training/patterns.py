"""Patterns of bits that automata learn to draw: made here, or read from an image."""

from pathlib import Path

import numpy as np
from jaxtyping import Bool

from lutjax.training import pixels

Pattern = Bool[np.ndarray, "channels height width"]

_LIZARD = """
....................
....................
.........##.........
...#....####....#...
..###...####...###..
....##..####..##....
.....##########.....
.......######.......
.......######.......
.......######.......
.......######.......
......########......
....###.####.###....
..###...####...###..
...#.....###....#...
..........##........
..........##........
.....#...##.........
.....#####..........
......###...........
"""


class PatternError(ValueError):
    """An image that cannot be a pattern."""


def checkerboard(size: int) -> Pattern:
    """Squares of 2 x 2 cells."""
    y, x = np.mgrid[:size, :size] // 2
    board: Pattern = ((x + y) % 2 == 1)[None]
    return board


def lizard(size: int = 20) -> Pattern:
    """A lizard from above, in the middle of a larger grid.

    Raises:
      ValueError: the grid is smaller than the lizard.
    """
    rows = [[c == "#" for c in row] for row in _LIZARD.split()]
    return _in_the_middle("lizard", np.array(rows)[None], size)


def letter(size: int = 16) -> Pattern:
    """The letter G in red, yellow, green and blue: channels are red, green and blue.

    Raises:
      ValueError: the grid is smaller than the letter.
    """
    y, x = np.mgrid[:16, :16] - 7.5
    radius, angle = np.hypot(x, y), np.degrees(np.arctan2(-y, x)) % 360
    ring = (radius < 7.6) & (radius > 4.2)
    blue = ring & ((angle >= 315) | (angle < 5)) | (np.abs(y - 1) < 1.6) & (x > -0.5)
    red, yellow = ring & (angle >= 45) & (angle < 150), ring & (angle >= 150) & (angle < 210)
    green = ring & (angle >= 210) & (angle < 315)
    return _in_the_middle("letter", np.stack([(red | yellow) & ~blue, (yellow | green) & ~blue, blue]), size)


def read_image(path: Path, size: int, n_channels: int, *, threshold: float | None = None) -> Pattern:
    """A square image as a pattern. See `lutjax.training.pixels.read`.

    Args:
      size: height and width that it must have.
      n_channels: 1 for black and white, 3 for red, green and blue.
      threshold: what is above this share of full brightness is 1. By default every value must be 0 or full.

    Raises:
      PatternError: it cannot be read, has another size, or is not of two values.
    """
    try:
        colours = pixels.read(path, "RGBA", (size, size))
    except pixels.SizeError as error:
        raise PatternError(
            f"{path} has {error.width} x {error.height} pixels; the grid is {size} x {size}. Give an image of that size, or --size."
        ) from None
    except ValueError as error:
        raise PatternError(str(error)) from error
    brightness = colours[..., :3] * (colours[..., 3:] / 255)  # over black
    if threshold is not None:
        bits = brightness > 255 * threshold
    else:
        bad = np.argwhere(((brightness != 0) & (brightness != 255)).any(-1))
        if len(bad):
            y, x = bad[0]
            raise PatternError(
                f"{path} is not of two values: the pixel at row {y}, column {x} is {colours[y, x].tolist()}; colours "
                "must be 0 or 255. Use --threshold 0.5 to make them so."
            )
        bits = brightness == 255
    if n_channels == 1:
        if (bits != bits[..., :1]).any():
            raise PatternError(f"{path} has colours, but this pattern is black and white.")
        bits = bits[..., :1]
    return np.moveaxis(bits, -1, 0)


def _in_the_middle(name: str, pattern: np.ndarray, size: int) -> Pattern:
    room = size - pattern.shape[1]
    if room < 0:
        raise ValueError(f"size is {size}; a {name} needs {pattern.shape[1]} rows and columns.")
    pad = (room // 2, room - room // 2)
    return np.pad(pattern, ((0, 0), pad, pad))
