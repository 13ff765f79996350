"""Folders with IDX files, the format of MNIST and Fashion-MNIST, optionally gzipped."""

import math
from pathlib import Path

import numpy as np

from lutjax.files import compressed
from lutjax.training.datasets._published import identify
from lutjax.training.samples import Samples, SamplesError

FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)

PUBLISHED = {
    "MNIST": {
        "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
        "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
        "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
        "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
    },
    "Fashion-MNIST": {
        "train-images-idx3-ubyte": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
        "train-labels-idx1-ubyte": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
        "t10k-images-idx3-ubyte": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
        "t10k-labels-idx1-ubyte": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
    },
}
"""SHA-256 of published files, uncompressed; for MNIST only MD5 is published."""

_CLASSES = {
    "Fashion-MNIST": (
        "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat",
        "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
    ),
}  # fmt: skip
_UNSIGNED_BYTES = 8
_MOST_AXES = 32  # for NumPy 1 arrays; later versions use 64


def holds(folder: Path) -> bool:
    """Return True if a folder contains any IDX file."""
    return any(_find(folder, name) for name in FILES)


def load(folder: Path) -> tuple[Samples, Samples]:
    """Return the training and test parts from a folder with four IDX files; images are uint8."""
    paths = {}
    for name in FILES:
        path = _find(folder, name)
        if path is None:
            raise SamplesError(
                f"{folder} has no file {name} or {name}.gz; all of {', '.join(FILES)} are needed."
            )
        paths[name] = path
    contents = {name: _content(path) for name, path in paths.items()}
    known = identify(folder, contents, PUBLISHED)
    arrays = [parse(data, name=str(paths[name])) for name, data in contents.items()]
    source = f"{known} in {folder}" if known else str(folder)
    classes = _CLASSES.get(known or "", ())
    parts = []
    names = [path.name for path in paths.values()]
    # `FILES` has images and labels of the training part, then those of the test part.
    for k in (0, 2):
        images, labels = arrays[k : k + 2]
        if images.ndim != 3 or labels.ndim != 1 or len(images) != len(labels) or not images.size:
            raise SamplesError(
                f"{folder}: {names[k]} has shape {list(images.shape)} "
                f"and its labels {list(labels.shape)} ({names[k + 1]}); "
                "expected images [N, height, width] and labels [N]."
            )
        rows = images.reshape(len(images), -1)
        parts.append(Samples(rows, labels.astype(np.int32), images.shape[1:], source, classes))
    train, test = parts
    if train.shape != test.shape:
        raise SamplesError(
            f"{folder}: training images have {train.shape} pixels, test images {test.shape} "
            f"({names[0]}, {names[2]})."
        )
    return train, test


def parse(data: bytes, *, name: str) -> np.ndarray:
    """Return the array in an IDX file of unsigned bytes.

    Args:
      data: uncompressed content of the file.
      name: file name, for messages.

    Raises:
      SamplesError: the format is not IDX, or the size differs from the header.

    Example:
      >>> from lutjax.training.datasets import idx
      >>> idx.parse(bytes([0, 0, 8, 1, 0, 0, 0, 2, 7, 9]), name="two labels")
      array([7, 9], dtype=uint8)
    """
    if len(data) < 4 or data[:2] != b"\0\0" or data[2] != _UNSIGNED_BYTES:
        raise SamplesError(
            f"{name} begins with the bytes {data[:4].hex(' ') or '(none)'}; IDX files of unsigned "
            "bytes begin with 00 00 08."
        )
    if data[3] > _MOST_AXES:
        raise SamplesError(
            f"{name} has {data[3]} axes, as its header says; images have 3, and labels 1."
        )
    header = 4 + 4 * data[3]
    sizes = np.frombuffer(data[4:header], ">u4", count=-1 if len(data) >= header else 0)
    shape = tuple(map(int, sizes))  # Python integers: a product of damaged sizes may be large
    n_bytes = header + math.prod(shape)
    if len(shape) != data[3] or len(data) != n_bytes:
        raise SamplesError(
            f"{name} has {len(data):,} bytes, but its header requires {n_bytes:,} for "
            f"{list(shape)}: it is incomplete. Get it again."
        )
    return np.frombuffer(data, np.uint8, offset=header).reshape(shape)


def _find(folder: Path, name: str) -> Path | None:
    stem, kind = name.split("-idx", 1)
    for spelling in (name, f"{stem}.idx{kind}"):
        for path in (folder / spelling, folder / f"{spelling}.gz"):
            if path.is_file():
                return path
    return None


def _content(path: Path) -> bytes:
    try:
        with compressed.open_compressed(path) as file:
            return file.read()
    except compressed.PackedError as error:
        raise SamplesError(str(error)) from error
