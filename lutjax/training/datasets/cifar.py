"""Folders of CIFAR-10, in its binary or its Python version."""

import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np

from lutjax.training.datasets._published import identify, md5
from lutjax.training.samples import Samples, SamplesError

FILES = (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch")

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")

PUBLISHED = {
    "CIFAR-10": {
        "data_batch_1": "c99cafc152244af753f735de768cd75f",
        "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
        "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
        "data_batch_4": "634d18415352ddfa80567beed471001a",
        "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
        "test_batch": "40351d587109b95175f43aff81a1287e",
    }
}
"""MD5 of the files of the Python version; none are published of the single files of the binary one."""

_CHANNELS, _SIZE = 3, 32
_PIXELS = _CHANNELS * _SIZE * _SIZE


def holds(folder: Path) -> bool:
    """Return whether a folder has any of the files."""
    return any((folder / f"{name}{end}").is_file() for name in FILES for end in ("", ".bin"))


def load(folder: Path) -> tuple[Samples, Samples]:
    """The training and the test part of a folder of CIFAR-10; images are uint8, pixels in the order row, column, channel.

    Raises:
      SamplesError: a file is missing or damaged.
    """
    binary = any((folder / f"{name}.bin").is_file() for name in FILES)
    paths = [folder / (f"{name}.bin" if binary else name) for name in FILES]
    for path in paths:
        if not path.is_file():
            raise SamplesError(
                f"{folder} has no file {path.name}; all of {', '.join(p.name for p in paths)} are needed."
            )
    contents = [path.read_bytes() for path in paths]
    known = None
    if not binary:
        known = identify(folder, dict(zip(FILES, map(md5, contents), strict=True)), PUBLISHED)
    read = _of_binary if binary else _of_pickle
    batches = [read(data, path) for data, path in zip(contents, paths, strict=True)]
    name = f"{known} in {folder}" if known else str(folder)
    train, test = (
        Samples(
            np.concatenate([x for x, _ in some]),
            np.concatenate([y for _, y in some]).astype(np.int32),
            (_SIZE, _SIZE, _CHANNELS),
            name,
            CLASSES,
        )
        for some in (batches[:-1], batches[-1:])
    )
    return train, test


def _of_binary(data: bytes, path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return pixels and labels of records of a label and 3072 pixels."""
    if not data or len(data) % (1 + _PIXELS):
        raise SamplesError(
            f"{path} has {len(data):,} bytes; expected a multiple of {1 + _PIXELS:,}, a label and {_PIXELS:,} pixels for each "
            "image: it is not whole, or not of CIFAR-10."
        )
    records = np.frombuffer(data, np.uint8).reshape(-1, 1 + _PIXELS)
    return _checked(records[:, 1:], records[:, 0], path)


def _of_pickle(data: bytes, path: Path) -> tuple[np.ndarray, np.ndarray]:
    try:
        found: Any = _Arrays(io.BytesIO(data), encoding="bytes").load()
        batch = {key.decode() if isinstance(key, bytes) else key: value for key, value in found.items()}
        pixels, labels = np.asarray(batch["data"]), np.asarray(batch["labels"])
    except (
        pickle.UnpicklingError,
        EOFError,
        KeyError,
        IndexError,
        AttributeError,
        TypeError,
        ValueError,
    ) as error:
        raise SamplesError(
            f"{path} is not a batch of CIFAR-10's Python version, a pickled dict of data and labels ({error!r})."
        ) from error
    if pixels.dtype != np.uint8 or pixels.ndim != 2 or pixels.shape[1] != _PIXELS:
        raise SamplesError(
            f"{path}: data are {pixels.dtype} {list(pixels.shape)}; expected uint8 [N, {_PIXELS}]."
        )
    return _checked(pixels, labels, path)


def _checked(pixels: np.ndarray, labels: np.ndarray, path: Path) -> tuple[np.ndarray, np.ndarray]:
    if labels.shape != (len(pixels),) or labels.dtype.kind not in "iu" or not len(labels):
        raise SamplesError(
            f"{path}: labels are {labels.dtype} {list(labels.shape)}; expected one integer for each of {len(pixels)} images."
        )
    if labels.min() < 0 or labels.max() >= len(CLASSES):
        raise SamplesError(
            f"{path}: labels are from {labels.min()} to {labels.max()}; expected 0 to {len(CLASSES) - 1}."
        )
    images = pixels.reshape(-1, _CHANNELS, _SIZE, _SIZE).transpose(0, 2, 3, 1)
    return np.ascontiguousarray(images).reshape(len(pixels), -1), labels


class _Arrays(pickle.Unpickler):
    """Unpickler of dicts, lists and NumPy's arrays alone: a file of data must not run code."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("numpy", "ndarray"):
            return np.ndarray
        if (module, name) == ("numpy", "dtype"):
            return _dtype
        if (module, name) in (
            ("numpy.core.multiarray", "_reconstruct"),
            ("numpy._core.multiarray", "_reconstruct"),
        ):
            return np.zeros(0).__reduce__()[0]  # where NumPy has it now
        if (module, name) == ("_codecs", "encode"):
            import _codecs

            return _codecs.encode
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")


def _dtype(kind: str | bytes, align: int = 0, copy: int = 0) -> np.dtype[Any]:
    """Return a dtype; files of Python 2 have 0 and 1 where NumPy now wants False and True."""
    return np.dtype(kind.decode() if isinstance(kind, bytes) else kind, align=bool(align), copy=bool(copy))
