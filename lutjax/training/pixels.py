"""Pixels of untrusted image files.

Only known formats are read, and the pixel count is checked before any pixel is decoded.
"""

import contextlib
import io
import logging
import re
import struct
import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import UInt8

from lutjax.extras import require_optional
from lutjax.files import compressed
from lutjax.files.messages import in_a_line

if TYPE_CHECKING:
    from PIL import Image

FORMATS = ("PNG", "BMP", "GIF", "PPM", "JPEG", "WEBP", "TIFF")
"""Supported formats, as named in Pillow.

Others are never tried: for PostScript, Pillow runs a program.
"""

ENDINGS = (
    ".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm", ".pbm",
)  # fmt: skip
"""File name endings for single-image files."""

ALWAYS = 1 << 26
"""Bytes of decoded pixels allowed for any image; the file size limits larger images."""

_MOST_SIDE = 4096  # maximum height and width for scaled images
_ORIENTATION = 0x0112  # the Exif tag

_DAMAGED = (
    OSError, SyntaxError, ValueError, TypeError, LookupError, AttributeError, OverflowError,
    EOFError, RuntimeError, NotImplementedError, struct.error, zlib.error, Warning,
)  # fmt: skip
"""Exceptions raised while reading a damaged image."""


class SizeError(ValueError):
    """An image whose `height` and `width` differ from the expected size."""

    def __init__(self, path: Path, height: int, width: int):
        super().__init__(f"{path} has {height} x {width} pixels.")
        self.height, self.width = height, width


@contextlib.contextmanager
def _silence_logger(logger: str) -> Iterator[None]:
    muted = logging.getLogger(logger)
    disabled, muted.disabled = muted.disabled, True
    try:
        yield
    finally:
        muted.disabled = disabled


@contextlib.contextmanager
def _open_image(path: Path) -> Iterator[tuple["Image.Image", int]]:
    """Yield an undecoded image and its file size; errors in the block name the file."""
    with require_optional(__name__):
        from PIL import Image, UnidentifiedImageError

    try:
        with warnings.catch_warnings(), _silence_logger("PIL.TiffImagePlugin"):
            warnings.simplefilter("error")  # Pillow only warns about some damaged or huge images
            content = path.read_bytes()
            # From a file, Pillow allocates any length that a damaged chunk states; from memory it
            # does not.
            with Image.open(io.BytesIO(content), formats=FORMATS) as image:
                yield image, len(content)
    except (SizeError, compressed.PackedError):
        raise
    except UnidentifiedImageError as error:
        raise ValueError(
            f"{path} is no image of a known format; they are {', '.join(FORMATS)}."
        ) from error
    except (*_DAMAGED, Image.DecompressionBombError) as error:
        why = error.strerror if isinstance(error, OSError) else None
        raise ValueError(f"cannot read the image {path}: {in_a_line(why or error)}.") from error


def parse_size(text: str) -> tuple[int, int]:
    """Parse a height and width such as ``"32x48"``, or ``"32"`` for a square.

    Raises:
      ValueError: the text is not a size.

    Example:
      >>> from lutjax.training import pixels
      >>> pixels.parse_size("32x48"), pixels.parse_size("28")
      ((32, 48), (28, 28))
    """
    match = re.fullmatch(r"([0-9]{1,4})(?:x([0-9]{1,4}))?", text.strip().lower(), re.ASCII)
    height, width = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not (0 < height <= _MOST_SIDE and 0 < width <= _MOST_SIDE):
        raise ValueError(
            f"the image size is {in_a_line(repr(text), 40)}; "
            f"expected HEIGHTxWIDTH, such as 32x32, each from 1 to {_MOST_SIDE}."
        )
    return height, width


def stored_size(path: Path) -> tuple[int, int]:
    """Return an image file's height and width before Exif orientation, without decoding pixels."""
    with _open_image(path) as (image, _):
        width, height = image.size
    return height, width


def read(
    path: Path, mode: str | None, size: tuple[int, int] | None, *, scaled: bool = False
) -> UInt8[np.ndarray, "height width ..."]:
    """Read an image's pixels. Images with another size are rejected before decoding.

    The Exif orientation is applied, and 16-bit values keep their upper 8 bits.

    It takes at most 200 times the memory of the file, 100 bytes per pixel, and 70 MB for compressed
    text in a PNG image. Nothing in the file is executed.

    Args:
      path: the image file.
      mode: Pillow mode of the result: ``"L"``, ``"RGB"`` or ``"RGBA"``. None: the first of these
        modes able to represent all pixels, with shape ``[height, width]``, ``[height, width, 3]``
        or ``[height, width, 4]``.
      size: required height and width; None for any size.
      scaled: scale an image of another size to `size` instead of rejecting it. The aspect ratio is
        not preserved.

    Raises:
      SizeError: the image has another size.
      ValueError: the image cannot be read, has too many pixels for its file size, or is not opaque
        and `mode` has no alpha channel; the message names the file.
    """
    with _open_image(path) as (opened, n_bytes):
        from PIL import Image

        width, height = opened.size
        if size is None or scaled:
            _check_worth(path, height, width, n_bytes)
        elif size not in ((height, width), (width, height)):  # a photo may be stored rotated
            raise SizeError(path, height, width)
        image = _in_mode(_apply_orientation(opened), opened.format, mode)
        if size is not None and image.size != size[::-1]:
            if not scaled:
                raise SizeError(path, *image.size[::-1])
            image = image.resize(size[::-1], Image.Resampling.BILINEAR)
        values = np.asarray(image)
    if mode is not None:
        return values
    if values.ndim == 3 and values.shape[2] == 4 and (values[..., 3] == 255).all():
        values = values[..., :3]
    gray = values.ndim == 3 and values.shape[2] == 3 and (values == values[..., :1]).all()
    return np.ascontiguousarray(values[..., 0] if gray else values)


def _check_worth(path: Path, height: int, width: int, n_bytes: int) -> None:
    """Raise if an image has far more pixels than its file size justifies."""
    n_unpacked = 4 * height * width  # Pillow stores colors in four bytes
    if n_unpacked > max(ALWAYS, compressed.MOST * n_bytes):
        raise compressed.PackedError(
            f"{path} has {n_bytes:,} bytes, which unpack to {height} x {width} pixels; at most "
            f"{compressed.MOST} bytes of pixels per file byte, or {ALWAYS:,} in all, are unpacked. "
            "If the file is right, make the image smaller."
        )


def _apply_orientation(image: "Image.Image") -> "Image.Image":
    """Apply the Exif orientation. Ignore unreadable Exif data: the pixels are intact without it."""
    from PIL import Image

    image.load()
    try:
        orientation = image.getexif().get(_ORIENTATION)
    except _DAMAGED:
        return image
    turns = {  # by the number in Exif; 1 is upright
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_270,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_90,
    }
    turn = turns.get(orientation) if isinstance(orientation, int) else None
    return image if turn is None else image.transpose(turn)


def _in_mode(image: "Image.Image", format: str | None, mode: str | None) -> "Image.Image":
    """Convert an image to 8 bits in a mode, by default the first of L, RGB and RGBA that fits."""
    from PIL import Image

    if image.mode.startswith("I;16") or (image.mode == "I" and format in ("PNG", "PPM")):
        # Pillow's own conversion clips: every value above 255 of 65535 would become white.
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    elif image.mode in ("I", "F"):
        raise ValueError("it has numbers of 32 bits; save it with 8 or 16 bits a channel")
    if image.mode in ("P", "PA") and image.palette is None:
        raise ValueError("its pixels index a palette, which it lacks; save it again with colors")
    if image.has_transparency_data:
        # Convert through RGBA: Pillow warns when a transparent palette is converted to any other
        # mode.
        image = image.convert("RGBA")
        if mode in ("L", "RGB") and np.asarray(image)[..., 3].min() < 255:
            raise ValueError(
                f"it has transparent pixels, but opaque pixels ({mode}) are expected; put it on a "
                "background first"
            )
    if mode is None:
        mode = {"1": "L", "L": "L", "RGBA": "RGBA"}.get(image.mode, "RGB")
    return image.convert(mode)
