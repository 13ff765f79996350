"""Folders with CIFAR-10, in its binary or its Python version."""

import io
import operator
import pickle
import pickletools
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from lutjax.files.messages import in_a_line
from lutjax.training.datasets._published import identify
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
"""MD5 sums for the Python version's files; the binary version has no published file checksums."""

_DAMAGED = (
    pickle.UnpicklingError, EOFError, LookupError, OverflowError, AttributeError, TypeError,
    ValueError, Warning,
)  # fmt: skip
"""Exceptions raised while reading a damaged pickle."""

_CHANNELS, _SIZE = 3, 32
_PIXELS = _CHANNELS * _SIZE * _SIZE


def holds(folder: Path) -> bool:
    """Return True if a folder contains any CIFAR-10 file."""
    return any((folder / f"{name}{end}").is_file() for name in FILES for end in ("", ".bin"))


def load(folder: Path) -> tuple[Samples, Samples]:
    """Return the training and test parts in a folder with CIFAR-10: uint8, channels last."""
    binary = any((folder / f"{name}.bin").is_file() for name in FILES)
    paths = [folder / (f"{name}.bin" if binary else name) for name in FILES]
    for path in paths:
        if not path.is_file():
            raise SamplesError(
                f"{folder} has no file {path.name}; "
                f"all of {', '.join(p.name for p in paths)} are needed."
            )
    contents = [path.read_bytes() for path in paths]
    known = None
    if not binary:
        known = identify(folder, dict(zip(FILES, contents, strict=True)), PUBLISHED)
    read = _parse_binary if binary else _parse_pickle
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


def _parse_binary(data: bytes, path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return pixels and labels from records of one label and 3072 pixels."""
    if not data or len(data) % (1 + _PIXELS):
        raise SamplesError(
            f"{path} has {len(data):,} bytes; expected a multiple of {1 + _PIXELS:,}, a label and "
            f"{_PIXELS:,} pixels per image: it is incomplete, or not CIFAR-10."
        )
    records = np.frombuffer(data, np.uint8).reshape(-1, 1 + _PIXELS)
    return _check_samples(records[:, 1:], records[:, 0], path)


def _parse_pickle(data: bytes, path: Path) -> tuple[np.ndarray, np.ndarray]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # for strings that Python does not pickle
            _check_sizes(data)
            content: Any = _Arrays(io.BytesIO(data), encoding="bytes").load()
        batch = {
            key.decode() if isinstance(key, bytes) else key: value for key, value in content.items()
        }
        pixels, labels = (_array_of(batch[name]) for name in ("data", "labels"))
    except _DAMAGED as error:
        raise SamplesError(
            f"{path} is not a batch of CIFAR-10's Python version, "
            f"a pickled dict of data and labels ({in_a_line(repr(error))})."
        ) from error
    if pixels.dtype != np.uint8 or pixels.ndim != 2 or pixels.shape[1] != _PIXELS:
        raise SamplesError(
            f"{path}: data are {pixels.dtype} {list(pixels.shape)}; expected uint8 [N, {_PIXELS}]."
        )
    return _check_samples(pixels, labels, path)


def _array_of(value: Any) -> np.ndarray:
    """Convert an unpickled array or flat list of integers.

    Nested lists are rejected, because they may expand exponentially.
    """
    if isinstance(value, _Array):
        return value.value
    if not isinstance(value, list) or not all(type(one) is int for one in value):
        raise ValueError(
            f"it has a {type(value).__name__} where an array or a list of integers is expected"
        )
    return np.array(value)


def _check_sizes(data: bytes) -> None:
    """Raise ValueError if an instruction would allocate more memory than the pickle's size.

    Some damaged pickles have such instructions.
    """
    # genops reads the text of each name, so their lengths come from the data. The memo of PUT is
    # an array that grows to any index.
    for opcode, argument, _ in pickletools.genops(data):
        if opcode.name.endswith("PUT") and int(argument or 0) > len(data):
            raise ValueError(f"{opcode.name} {argument} in {len(data):,} bytes")


def _check_samples(
    pixels: np.ndarray, labels: np.ndarray, path: Path
) -> tuple[np.ndarray, np.ndarray]:
    if labels.shape != (len(pixels),) or labels.dtype.kind not in "iu" or not len(labels):
        raise SamplesError(
            f"{path}: labels are {labels.dtype} {list(labels.shape)}; "
            f"expected one integer for each of {len(pixels)} images."
        )
    if labels.min() < 0 or labels.max() >= len(CLASSES):
        raise SamplesError(
            f"{path}: labels are from {labels.min()} to {labels.max()}; "
            f"expected 0 to {len(CLASSES) - 1}."
        )
    images = pixels.reshape(-1, _CHANNELS, _SIZE, _SIZE).transpose(0, 2, 3, 1)
    return np.ascontiguousarray(images).reshape(len(pixels), -1), labels


class _Arrays(pickle.Unpickler):
    """Unpickler restricted to dicts, lists and integer arrays, so that data files cannot run code.

    Arrays are constructed here because NumPy trusts a pickle's state, and crashes if it is damaged.
    """

    def find_class(self, module: str, name: str) -> Any:
        allowed = {
            ("numpy", "ndarray"): _Array,
            ("numpy", "dtype"): _Dtype,
            ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
            ("numpy._core.multiarray", "_reconstruct"): _reconstruct,
            ("_codecs", "encode"): _encode_string,
        }.get((module, name))
        if allowed is None:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return allowed


class _Dtype:
    """An integer dtype; only the byte order of its state matters."""

    def __init__(self, kind: str | bytes, align: Any = 0, copy: Any = 0):
        kind = kind.decode() if isinstance(kind, bytes) else kind
        if re.fullmatch("[ui][1248]", kind) is None:
            raise ValueError(f"it has an array of {kind}")
        self.value: np.dtype[Any] = np.dtype(kind)

    def __setstate__(self, state: Any) -> None:
        order: Any = state[1].decode() if isinstance(state[1], bytes) else state[1]
        if order not in ("<", ">", "|", "="):
            raise ValueError(f"it has an order of bytes {order!r}")
        self.value = self.value.newbyteorder(order)


class _Array:
    """An array constructed from its state: version, shape, dtype, Fortran order and bytes."""

    value: np.ndarray

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, by_column, data = state
        array = np.frombuffer(data, dtype.value)
        sizes = [operator.index(size) for size in shape]
        self.value = array.reshape(sizes, order="F" if by_column else "C")


def _reconstruct(kind: Any, shape: Any, letter: Any) -> _Array:
    return _Array()


def _encode_string(text: str, encoding: str) -> bytes:
    """Return bytes that Python 3 pickles as text in protocols before 3."""
    if encoding != "latin1":
        raise ValueError(f"it has bytes in {encoding}")
    return text.encode(encoding)
