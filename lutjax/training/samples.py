"""Labelled samples to classify: scikit-learn's digits, or arrays of a file, and their parts."""

import dataclasses
import hashlib
import math
import zipfile
from pathlib import Path

import numpy as np
from jaxtyping import Float32, Int32

TEST_SHARE = 0.2
_LEAST = 10


class SamplesError(ValueError):
    """Data that cannot be read or used."""


@dataclasses.dataclass(frozen=True)
class Samples:
    """Samples and their classes.

    Attributes:
      x: one row for each sample.
      y: labels from 0.
      shape: of a sample before it was made a row: ``(features,)``, or ``(height, width)`` of an image.
      name: where they are from, for messages.
    """

    x: Float32[np.ndarray, "samples features"]
    y: Int32[np.ndarray, " samples"]
    shape: tuple[int, ...]
    name: str

    @property
    def n_classes(self) -> int:
        """Labels are below this."""
        return int(self.y.max()) + 1

    @property
    def digest(self) -> str:
        """SHA-256 of samples and labels."""
        shape = np.asarray(self.shape, np.int64)
        return hashlib.sha256(b"".join(a.tobytes() for a in (shape, self.x, self.y))).hexdigest()


def load_digits() -> Samples:
    """The 1797 images of 8 x 8 pixels, from 0 to 16, that come with scikit-learn.

    Raises:
      SamplesError: scikit-learn is not installed.
    """
    try:
        from sklearn import datasets
    except ImportError:
        raise SamplesError(
            "scikit-learn, which the digits come with, is not installed: pip install 'lutjax[apps]'"
        ) from None
    found = datasets.load_digits()
    return samples(found.images, found.target, name="scikit-learn's digits")


def load_samples(path: Path) -> Samples:
    """The arrays ``x``, ``[N, F]`` or images ``[N, H, W]``, and ``y``, integers ``[N]``, of an ``.npz`` file.

    Raises:
      SamplesError: it cannot be read, lacks an array, or they cannot be used; see `samples`.
    """
    try:
        with np.load(path) as file:
            arrays = {name: file[name] for name in ("x", "y") if name in file}
            found = sorted(file)
    except OSError as error:
        raise SamplesError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, TypeError, AttributeError, zipfile.BadZipFile) as error:
        raise SamplesError(f"{path} is not a .npz file of plain arrays, as numpy.savez writes it.") from error
    missing = [name for name in ("x", "y") if name not in arrays]
    if missing:
        raise SamplesError(f"{path} has no array {' and no array '.join(missing)}; it has {found}.")
    return samples(arrays["x"], arrays["y"], name=str(path))


def samples(x: np.ndarray, y: np.ndarray, *, name: str) -> Samples:
    """Checked samples of two arrays.

    Args:
      x: numbers ``[N, F]``, or images ``[N, H, W]``.
      y: integers ``[N]``, from 0.

    Raises:
      SamplesError: a wrong shape or dtype, a number that is not finite, a negative label, or too few samples.
    """
    if x.ndim not in (2, 3) or not x[:1].size:
        raise SamplesError(
            f"{name}: x has shape {list(x.shape)}; expected [N, features] or [N, height, width]."
        )
    if x.dtype.kind not in "buif":
        raise SamplesError(f"{name}: x has dtype {x.dtype}; expected numbers.")
    if y.ndim != 1 or len(y) != len(x):
        raise SamplesError(
            f"{name}: y has shape {list(y.shape)}; expected one label for each of the {len(x)} samples of x."
        )
    if y.dtype.kind not in "ui":
        raise SamplesError(f"{name}: y has dtype {y.dtype}; labels must be integers.")
    if len(x) < _LEAST:
        raise SamplesError(f"{name}: there are {len(x)} samples; at least {_LEAST} are needed.")
    rows = x.reshape(len(x), -1).astype(np.float32)
    if not np.isfinite(rows).all():
        raise SamplesError(f"{name}: x of sample {int(np.isfinite(rows).all(1).argmin())} is not finite.")
    if y.min() < 0 or y.max() >= len(y) or y.max() < 1:
        raise SamplesError(
            f"{name}: labels are from {y.min()} to {y.max()}; expected at least two classes, counted from 0, and "
            "fewer than samples."
        )
    return Samples(rows, y.astype(np.int32), x.shape[1:], name)


def split(whole: Samples, seed: int) -> tuple[Samples, Samples]:
    """A training and a test part, a random fifth (rounded up), whatever the classes.

    The test part is the first fifth of ``numpy.random.default_rng(seed).permutation(N)``.
    """
    order = np.random.default_rng(seed).permutation(len(whole.x))
    n_test = math.ceil(len(order) * TEST_SHARE)
    return part(whole, order[n_test:]), part(whole, order[:n_test])


def part(whole: Samples, ids: np.ndarray) -> Samples:
    """Return the samples with these numbers."""
    return dataclasses.replace(whole, x=whole.x[ids], y=whole.y[ids])
