"""Bit patterns for automata to draw, generated or read from an image."""

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


LARGEST = 64  # maximum rows and columns of an image for an automaton
_LEAST = 3  # of a grid


class PatternError(ValueError):
    """An image unusable as a pattern."""


def checkerboard(size: int) -> Pattern:
    """Return squares of 2 x 2 cells."""
    y, x = np.mgrid[:size, :size] // 2
    board: Pattern = ((x + y) % 2 == 1)[None]
    return board


def lizard(size: int = 20) -> Pattern:
    """Return a lizard seen from above, centered in a grid at least as large (else ValueError)."""
    rows = [[c == "#" for c in row] for row in _LIZARD.split()]
    return _in_the_middle("lizard", np.array(rows)[None], size)


def letter(size: int = 16) -> Pattern:
    """Return the letter G in red, yellow, green and blue; channels are red, green and blue."""
    y, x = np.mgrid[:16, :16] - 7.5
    radius, angle = np.hypot(x, y), np.degrees(np.arctan2(-y, x)) % 360
    ring = (radius < 7.6) & (radius > 4.2)
    blue = ring & ((angle >= 315) | (angle < 5)) | (np.abs(y - 1) < 1.6) & (x > -0.5)
    red, yellow = ring & (angle >= 45) & (angle < 150), ring & (angle >= 150) & (angle < 210)
    green = ring & (angle >= 210) & (angle < 315)
    # Yellow is red and green light.
    channels = np.stack([(red | yellow) & ~blue, (yellow | green) & ~blue, blue])
    return _in_the_middle("letter", channels, size)


def read_image(path: Path, size: int | None = None, *, threshold: float | None = None) -> Pattern:
    """Read an image as a pattern, see `lutjax.training.pixels.read`.

    A black-and-white image has one channel, any other image has red, green and blue. Without
    `size`, an image up to `LARGEST` is centered in a black square. Values above `threshold`, a
    share of full brightness, become 1; without it every value must be 0 or full.

    Raises:
      PatternError: the image cannot be read, has another size, or is not two-valued.
    """
    expected = (size or LARGEST, size or LARGEST)
    try:
        try:
            colors = pixels.read(path, "RGBA", expected)
        except pixels.SizeError as error:
            if size or max(error.height, error.width) > LARGEST:
                raise
            colors = pixels.read(path, "RGBA", (error.height, error.width))
    except pixels.SizeError as error:
        pixels_of_it = f"{path} has {error.width} x {error.height} pixels"
        if size is None:
            raise PatternError(
                f"{pixels_of_it}; the maximum is {LARGEST} x {LARGEST}. Make it smaller."
            ) from None
        raise PatternError(
            f"{pixels_of_it}; the grid is {size} x {size}. Give an image of that size, set --size, "
            "or omit --experiment."
        ) from None
    except ValueError as error:
        raise PatternError(str(error)) from error
    brightness = colors[..., :3] * (colors[..., 3:] / 255)  # over black
    if threshold is not None:
        bits = brightness > 255 * threshold
    else:
        bad = np.argwhere(((brightness != 0) & (brightness != 255)).any(-1))
        if len(bad):
            y, x = bad[0]
            raise PatternError(
                f"{path} is not two-valued: the pixel at row {y}, column {x} is "
                f"{colors[y, x].tolist()}; colors must be 0 or 255. Use --threshold 0.5."
            )
        bits = brightness == 255
    if (bits == bits[..., :1]).all():
        bits = bits[..., :1]
    pattern = np.moveaxis(bits, -1, 0)
    side = max(*pattern.shape[1:], _LEAST)
    around = [(0, 0)]  # channels
    for length in pattern.shape[1:]:
        near = (side - length) // 2
        around.append((near, side - length - near))
    return np.pad(pattern, around)


def _in_the_middle(name: str, pattern: np.ndarray, size: int) -> Pattern:
    room = size - pattern.shape[1]
    if room < 0:
        raise ValueError(f"size is {size}; a {name} needs {pattern.shape[1]} rows and columns.")
    pad = (room // 2, room - room // 2)
    return np.pad(pattern, ((0, 0), pad, pad))
