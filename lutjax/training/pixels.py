"""Images of files that anybody may have written: only known formats, and no pixels before their number is known to be the expected one."""

import contextlib
import io
import logging
import struct
import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from jaxtyping import UInt8

from lutjax.files._messages import in_a_line

FORMATS = ("PNG", "BMP", "GIF", "PPM", "JPEG", "WEBP", "TIFF")
"""Formats that are read, as Pillow calls them. Others are not looked at: it gives PostScript to a program."""

_DAMAGED = (
    *(OSError, SyntaxError, ValueError, TypeError, LookupError, AttributeError, OverflowError, EOFError),
    *(RuntimeError, NotImplementedError, struct.error, zlib.error, Warning),
)
"""Errors of what reads an image that is damaged."""


class SizeError(ValueError):
    """An image of another size than the expected one.

    Attributes:
      height, width: of it.
    """

    def __init__(self, path: Path, height: int, width: int):
        super().__init__(f"{path} has {height} x {width} pixels.")
        self.height, self.width = height, width


@contextlib.contextmanager
def _silent(logger: str) -> Iterator[None]:
    """Keep a logger from printing what an error says, too."""
    found = logging.getLogger(logger)
    disabled, found.disabled = found.disabled, True
    try:
        yield
    finally:
        found.disabled = disabled


def read(path: Path, mode: str, size: tuple[int, int]) -> UInt8[np.ndarray, "height width ..."]:
    """Return the pixels of an image of a file. One of another size is refused before its pixels are read.

    Beside 100 octets for each of its pixels, and 70 MB for texts that a PNG image holds packed, it takes at most 200 times the memory of the
    file. Nothing that is read is executed.

    Args:
      mode: of Pillow: ``"L"``, ``"RGB"`` or ``"RGBA"``.
      size: height and width that it must have.

    Raises:
      SizeError: it has another size.
      ValueError: it cannot be read; the message names it.
    """
    from PIL import Image, UnidentifiedImageError

    damaged = (*_DAMAGED, Image.DecompressionBombError)
    found = None
    try:
        with warnings.catch_warnings(), _silent("PIL.TiffImagePlugin"):
            warnings.simplefilter("error")
            # A file makes room for as many octets as it is asked for, and these do not.
            with Image.open(io.BytesIO(path.read_bytes()), formats=FORMATS) as image:
                width, height = image.size
                if (height, width) == size:
                    found = np.asarray(image.convert(mode))
    except UnidentifiedImageError as error:
        raise ValueError(f"{path} is no image of a known format; they are {', '.join(FORMATS)}.") from error
    except damaged as error:
        why = error.strerror if isinstance(error, OSError) else None
        raise ValueError(f"cannot read the image {path}: {in_a_line(why or error)}.") from error
    if found is None:
        raise SizeError(path, height, width)
    return found
