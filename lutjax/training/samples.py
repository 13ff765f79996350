"""Labeled samples for classification (scikit-learn's digits, or arrays in a file) and splits."""

import dataclasses
import hashlib
import math
import struct
import tokenize
import warnings
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float32, Int32, Shaped, UInt8

from lutjax.extras import command, require_optional
from lutjax.files import compressed
from lutjax.files.messages import in_a_line

TEST_SHARE = 0.2
_DAMAGED = (
    EOFError, LookupError, NotImplementedError, RuntimeError, SyntaxError, TypeError, ValueError,
    OverflowError, struct.error, tokenize.TokenError, zlib.error, zipfile.BadZipFile, Warning,
)  # fmt: skip
"""Exceptions raised for a damaged, encrypted or unsupported .npz file."""

LEAST = 10


class SamplesError(ValueError):
    """Unreadable or unusable data."""


@dataclasses.dataclass(frozen=True)
class Samples:
    """Samples with their classes or regression targets.

    Attributes:
      x: one row per sample.
      y: labels from 0, or regression targets.
      shape: sample shape before flattening: ``(features,)``, or ``(height, width)`` or
        ``(height, width, channels)`` for images.
      name: data source, for messages.
      classes: class names by label; empty if unnamed.
    """

    x: Float32[np.ndarray, "samples features"] | UInt8[np.ndarray, "samples features"]
    y: Int32[np.ndarray, " samples"] | Float32[np.ndarray, " samples"]
    shape: tuple[int, ...]
    name: str
    classes: tuple[str, ...] = ()

    @property
    def n_classes(self) -> int:
        """Exclusive upper bound of the labels; 1 for regression."""
        if self.regression:
            return 1
        return len(self.classes) or int(self.y.max()) + 1

    @property
    def regression(self) -> bool:
        """True for regression targets instead of classes."""
        return self.y.dtype.kind == "f"

    @property
    def digest(self) -> str:
        """SHA-256 of samples and labels."""
        shape = np.asarray(self.shape, np.int64)
        return hashlib.sha256(b"".join(a.tobytes() for a in (shape, self.x, self.y))).hexdigest()


def load_digits() -> Samples:
    """Return scikit-learn's 1797 digit images with 8 x 8 pixels, from 0 to 16."""
    try:
        from sklearn import datasets
    except ImportError:
        raise SamplesError(
            f"the digits require scikit-learn, which is not installed: {command('sklearn')}"
        ) from None
    digits = datasets.load_digits()
    return samples(digits.images, digits.target, name="scikit-learn's digits")


def load_samples(path: Path) -> Samples:
    """Load samples ``x`` and integer labels ``y`` ``[N]`` from an ``.npz`` file.

    ``x`` has shape ``[N, F]``, or ``[N, H, W]`` or ``[N, H, W, C]`` for images.
    """
    arrays = read_arrays(path, ("x", "y"))
    return samples(arrays["x"], arrays["y"], name=str(path))


def read_arrays(
    path: Path, names: Sequence[str], optional: Sequence[str] = ()
) -> dict[str, np.ndarray]:
    """Read arrays of an ``.npz`` file by name.

    Memory use is at most 300 times the file size, and a few times 4 MiB.

    Raises:
      SamplesError: the file cannot be read, holds anything except plain arrays, or lacks an array.
    """
    try:
        with zipfile.ZipFile(path) as file:
            members = {info.filename.removesuffix(".npy"): info for info in file.infolist()}
            present = sorted(members)
            # Other arrays are not read: they may be large, or need pickle.
            requested = {name: members[name] for name in (*names, *optional) if name in members}
            _check_sizes(path, list(requested.values()))
            arrays = {name: _array(file, info) for name, info in requested.items()}
    except OSError as error:
        raise SamplesError(f"{path} cannot be read: {error.strerror or error}") from error
    except compressed.PackedError as error:
        raise SamplesError(str(error)) from error
    except _DAMAGED as error:
        raise SamplesError(
            f"{path} is not a .npz file with plain arrays, "
            f"as from numpy.savez ({in_a_line(error)})."
        ) from error
    missing = [name for name in names if name not in arrays]
    if missing:
        raise SamplesError(
            f"{path} has no array {' and no array '.join(missing)}; it has {in_a_line(present)}."
        )
    return arrays


def _check_sizes(path: Path, members: Sequence[zipfile.ZipInfo]) -> None:
    """Compare the sizes stated by .npz members with the file size."""
    n_bytes = path.stat().st_size
    for info in members:
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise ValueError(
                f"{info.filename} has the compression {info.compress_type}; "
                "numpy.savez writes 0 or 8"
            )
        if info.compress_size > n_bytes:  # allocated at once
            raise ValueError(
                f"{info.filename} has {info.compress_size:,} bytes; the file has {n_bytes:,}"
            )
    unpacked = sum(info.file_size for info in members)
    compressed.check(path, unpacked, "save it by numpy.savez, not compressed")


def _array(file: zipfile.ZipFile, info: zipfile.ZipInfo) -> np.ndarray:
    """Return the array in an .npz member, after comparing its shape with its size."""
    with file.open(info) as member, warnings.catch_warnings():
        warnings.simplefilter("error")  # headers that NumPy does not write
        # np.load would allocate whatever size the header of a damaged file states.
        version = np.lib.format.read_magic(member)
        read = np.lib.format.read_array_header_2_0
        if version == (1, 0):
            read = np.lib.format.read_array_header_1_0
        shape, by_column, dtype = read(member)
        if dtype.hasobject:
            raise ValueError(
                f"{info.filename} has Python objects; convert it before saving, to numbers or, by "
                ".astype(str), to text"
            )
        size, rest = math.prod(shape) * dtype.itemsize, info.file_size - member.tell()
        if min(shape, default=0) < 0 or size != rest:
            raise ValueError(
                f"{info.filename} has {rest:,} bytes of numbers, but its header requires {size:,} "
                f"for {dtype} {list(shape)}"
            )
        data = member.read(size)  # and nothing after it
    array = np.frombuffer(data, dtype).reshape(shape, order="F" if by_column else "C")
    if dtype.kind == "U" and not _is_text(data, dtype):
        raise ValueError(f"{info.filename} has text with characters that there are none of")
    return array


def _is_text(data: bytes, dtype: np.dtype[Any]) -> bool:
    # NumPy stores text as UTF-32 without checks; Python fails on codes beyond Unicode and on
    # surrogates.
    codes = np.frombuffer(data, np.dtype(np.uint32).newbyteorder(dtype.byteorder))
    return not ((codes > 0x10FFFF) | (codes >= 0xD800) & (codes < 0xE000)).any()


def samples(x: np.ndarray, y: np.ndarray, *, name: str) -> Samples:
    """Return checked samples: finite values ``[N, F]`` or images, and integer labels from 0."""
    if x.ndim not in (2, 3, 4) or not x[:1].size:
        raise SamplesError(
            f"{name}: x has shape {list(x.shape)}; expected [N, features] or [N, height, width], "
            "or [N, height, width, channels]."
        )
    if x.dtype.kind not in "buif":
        raise SamplesError(f"{name}: x has dtype {x.dtype}; expected numbers.")
    if y.ndim != 1 or len(y) != len(x):
        raise SamplesError(
            f"{name}: y has shape {list(y.shape)}; "
            f"expected one label for each of the {len(x)} samples of x."
        )
    if y.dtype.kind not in "ui":
        raise SamplesError(f"{name}: y has dtype {y.dtype}; labels must be integers.")
    if len(x) < LEAST:
        raise SamplesError(f"{name}: there are {len(x)} samples; at least {LEAST} are needed.")
    # Large float64 values overflow to infinity, which the next check reports.
    with np.errstate(over="ignore"):
        rows = x.reshape(len(x), -1).astype(np.float32)
    if not np.isfinite(rows).all():
        raise SamplesError(
            f"{name}: x of sample {int(np.isfinite(rows).all(1).argmin())} is not "
            "finite in float32."
        )
    if y.min() < 0 or y.max() >= len(y) or y.max() < 1:
        raise SamplesError(
            f"{name}: labels are from {y.min()} to {y.max()}; "
            "expected at least two classes, counted from 0, and fewer than samples."
        )
    return Samples(rows, y.astype(np.int32), x.shape[1:], name)


def split(whole: Samples, seed: int) -> tuple[Samples, Samples]:
    """Split into a training and a test part: a random fifth (rounded up), regardless of class.

    The test part is the first fifth of ``numpy.random.default_rng(seed).permutation(N)``.
    """
    train, test = split_ids(whole.y, seed, stratified=False)
    return select_samples(whole, train), select_samples(whole, test)


def split_ids(
    labels: Shaped[np.ndarray, " samples"],
    seed: int,
    *,
    stratified: bool,
    name: str = "samples",
    classes: Sequence[str] = (),
) -> tuple[np.ndarray, np.ndarray]:
    """Return training and test sample indices: a random fifth (rounded up) for test.

    With `stratified`, scikit-learn keeps class proportions in both parts.

    Raises:
      SamplesError: a class has a single sample, or there are more classes than test samples.
    """
    n_test = math.ceil(len(labels) * TEST_SHARE)
    if not stratified:
        order = np.random.default_rng(seed).permutation(len(labels))
        return order[n_test:], order[:n_test]
    with require_optional("a stratified split"):
        from sklearn.model_selection import train_test_split

    distinct, codes, counts = np.unique(labels, return_inverse=True, return_counts=True)
    if counts.min() < 2 or n_test < len(distinct):
        rarest = distinct[counts.argmin()]
        raise SamplesError(
            f"{name}: class {in_a_line(classes[rarest], 80) if classes else rarest} has "
            f"{counts.min()} of {len(labels)} samples, and {len(distinct)} classes share a test "
            f"part of {n_test}; a stratified split needs two samples "
            "and one test sample per class. "
            "Remove rare classes, or split at random (--no-stratified)."
        )
    train, test = train_test_split(
        np.arange(len(labels)), test_size=n_test, stratify=codes, random_state=seed
    )
    return train, test


def select_samples(whole: Samples, ids: np.ndarray) -> Samples:
    """Return the samples with these indices."""
    return dataclasses.replace(whole, x=whole.x[ids], y=whole.y[ids])
