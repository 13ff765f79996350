"""Image folders with one subfolder per class, the layout of torchvision's ``ImageFolder``."""

import dataclasses
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import UInt8

from lutjax.files import compressed, strict_json
from lutjax.files.messages import escape_unprintable, in_a_line
from lutjax.training import pixels
from lutjax.training.samples import LEAST, Samples, SamplesError

TRAINING = ("train", "training")  # lowercase names of the training subfolder

TEST = ("test", "testing", "val", "valid", "validation")
"""Lowercase names of the test subfolder; the first match is used."""

ALWAYS = 1 << 27  # unpacked pixel bytes allowed for any folder; file sizes limit larger folders

_IGNORED = ("thumbs.db", "desktop.ini", "__macosx")
_CHANNELS = {1: "gray", 3: "in color", 4: "in color with transparency"}


@dataclasses.dataclass(frozen=True)
class Found:
    """Files in a folder and its subfolders, sorted by name, without hidden files and folders."""

    images: tuple[Path, ...]
    others: tuple[Path, ...]  # other files


def is_image(path: Path) -> bool:
    """Return True if a file has an image extension."""
    return path.suffix.lower() in pixels.ENDINGS


def find(folder: Path) -> Found:
    """Return the files in a folder and its subfolders; follow links, visit each folder once."""
    images: list[Path] = []
    others: list[Path] = []
    visited: set[str] = set()
    for place, folders, files in os.walk(folder, onerror=_unreadable, followlinks=True):
        real = os.path.realpath(place)
        if real in visited:  # a link to an enclosing folder
            folders.clear()
            continue
        visited.add(real)
        folders[:] = filter(_is_visible, folders)
        for path in (Path(place, name) for name in files if _is_visible(name)):
            # Opening a pipe with an image extension would block.
            (images if is_image(path) and path.is_file() else others).append(path)
    return Found(tuple(sorted(images)), tuple(sorted(others)))


def find_parts(folder: Path) -> tuple[Path, Path | None, tuple[Path, ...]]:
    """Return the training folder, the test folder or None, and unused folders of other parts.

    Enclosing folders with a single folder of folders are skipped. Without part folders, the whole
    folder is the training part and there is no test part.
    """
    inner = _subfolders(folder)
    # Archives often unpack to a single folder around the data.
    while len(inner) == 1 and not _has_images(folder) and (below := _subfolders(inner[0])):
        if _has_images(inner[0]):
            break
        folder, inner = inner[0], below
    by_name = {path.name.lower(): path for path in inner}
    train = next((by_name[name] for name in TRAINING if name in by_name), None)
    # A class may be called "train" (the vehicle): all folders must have names of parts.
    are_parts = all(name in (*TRAINING, *TEST) for name in by_name)
    if train is None or len(by_name) == 1 or not are_parts:
        return folder, None, ()
    # Competitions publish unlabeled test images, which are not a test part.
    labeled = (by_name[name] for name in TEST if name in by_name and _subfolders(by_name[name]))
    test = next(labeled, None)
    return train, test, tuple(path for path in inner if path not in (train, test))


def _has_images(folder: Path) -> bool:
    return any(map(is_image, folder.iterdir()))


def load(
    folder: Path, size: tuple[int, int] | None = None
) -> tuple[Samples, Samples | None, list[str]]:
    """Return the training part, the test part if present, and remarks about the data.

    Classes are subfolder names, sorted as text; images may be nested deeper. Images are uint8 in a
    common mode (gray, RGB or RGBA), scaled to `size` if given, else of equal size.
    """
    train, test, unused = find_parts(folder)
    why = f"the test part is {test}" if test else "it has no folder for each class"
    remarks = [f"{path} is left out: {why}." for path in unused]
    by_class, others = _classes(train)
    classes = tuple(by_class)
    images = [by_class]
    if len(classes) < 2:
        raise SamplesError(
            f"{train} has images of one class, {in_a_line(classes[0], 80)}; expected at least two "
            "class folders."
        )
    if test is not None:
        in_test, more = _classes(test)
        others += more
        unknown = sorted(set(in_test) - set(classes))
        if unknown:
            raise SamplesError(
                f"{test} has the class {in_a_line(unknown[0], 80)}, which is missing from {train}; "
                f"it has {in_a_line(', '.join(classes))}."
            )
        images.append(in_test)
    if others:
        names = [str(path.relative_to(folder)) for path in others[:3]]
        remarks.append(
            f"warning: files that are no images of a class are left out, {len(others)} in all: "
            f"{strict_json.format_names(names, 200)}{', ...' if others[3:] else ''}"
        )
    n_images = sum(len(paths) for part in images for paths in part.values())
    if test is None and n_images < LEAST:
        raise SamplesError(f"{folder}: there are {n_images} images; at least {LEAST} are needed.")
    # Both parts at once: they need a common size and number of channels.
    every_path = [path for part in images for paths in part.values() for path in paths]
    arrays = _read(every_path, folder, size)
    shape = arrays.shape[1:]
    kind = _CHANNELS[shape[2] if len(shape) > 2 else 1]
    scaled = "scaled to" if size else "of"
    remarks.insert(
        0,
        f"images: {n_images} {scaled} {shape[0]} x {shape[1]} pixels, {kind}; "
        f"{len(classes)} classes: {strict_json.format_names(classes, 200)}.",
    )
    parts, first = [], 0
    for part in images:
        numbers = np.array([classes.index(name) for name in part], np.int32)
        y = np.repeat(numbers, [len(paths) for paths in part.values()])
        x = arrays[first : first + len(y)].reshape(len(y), -1)
        first += len(y)
        parts.append(Samples(x, y, shape, str(folder), classes))
    return parts[0], parts[1] if parts[1:] else None, [escape_unprintable(line) for line in remarks]


def _is_visible(name: str) -> bool:
    return not name.startswith(".") and name.lower() not in _IGNORED


def _unreadable(error: OSError) -> None:
    raise SamplesError(f"{error.filename} cannot be read: {error.strerror or error}.") from error


def _subfolders(folder: Path) -> list[Path]:
    try:
        return sorted(one for one in folder.iterdir() if _is_visible(one.name) and one.is_dir())
    except OSError as error:
        _unreadable(error)
        raise


def _classes(folder: Path) -> tuple[dict[str, tuple[Path, ...]], list[Path]]:
    """Return each class's images, and files that are outside the classes or not images."""
    visible = (path for path in sorted(folder.iterdir()) if _is_visible(path.name))
    by_class, others = {}, [path for path in visible if not path.is_dir()]
    for inner in _subfolders(folder):
        files = find(inner)
        if not files.images:
            raise SamplesError(
                f"{inner} is a class folder without images ({', '.join(pixels.ENDINGS)}); add "
                "some, or remove the folder."
            )
        try:
            inner.name.encode()  # reports and exports are UTF-8 files with the class names
        except UnicodeEncodeError:
            raise SamplesError(
                f"{folder} has a folder named {inner.name!a}, which is not UTF-8; rename it."
            ) from None
        by_class[inner.name] = files.images
        others += files.others
    if not by_class:
        raise SamplesError(
            f"{folder} has no class folders; "
            "put each class's images into a folder named like the class."
        )
    return by_class, others


def _read(
    paths: Sequence[Path], folder: Path, size: tuple[int, int] | None
) -> UInt8[np.ndarray, "N H W ..."]:
    """Return equally sized images, converted to a common channel count."""
    images: list[np.ndarray] = []
    expected = size
    limit = max(ALWAYS, compressed.MOST * sum(path.stat().st_size for path in paths))

    def check(height: int, width: int, channels: int) -> None:
        n_bytes = len(paths) * height * width * channels
        if size is None and n_bytes > limit:
            raise SamplesError(
                f"{folder}: {len(paths)} images with {height} x {width} pixels take {n_bytes:,} "
                f"bytes or more; at most {compressed.MOST} per byte of their files, or {ALWAYS:,} "
                "in all, are unpacked. Scale them by --image-size."
            )

    path = paths[0]
    try:
        if size is None:
            # Read all headers first: the size of a single image may be wrong.
            stored = pixels.stored_size(path)
            for path in paths:
                if (other := pixels.stored_size(path)) not in (stored, stored[::-1]):
                    raise pixels.SizeError(path, *other)
            check(*stored, 1)
        for path in paths:
            images.append(pixels.read(path, None, expected, scaled=size is not None))
            expected = expected or (images[0].shape[0], images[0].shape[1])
    except pixels.SizeError as error:
        height, width = expected or stored
        raise SamplesError(
            f"{path} has {error.height} x {error.width} pixels, but {paths[0]} has {height} x "
            f"{width}; images must have one size. Scale them by --image-size, such as --image-size "
            f"{height}x{width}."
        ) from None
    except ValueError as error:
        raise SamplesError(str(error)) from error
    n_channels = max(1 if image.ndim == 2 else image.shape[2] for image in images)
    check(images[0].shape[0], images[0].shape[1], n_channels)
    if n_channels == 1:
        return np.stack(images)
    return np.stack([_with_channels(image, n_channels) for image in images])


def _with_channels(image: np.ndarray, n_channels: int) -> np.ndarray:
    """Convert an image to three or four channels: repeat gray, and add an opaque alpha channel."""
    if image.ndim == 2:
        image = np.repeat(image[..., None], 3, -1)
    if image.shape[2] == n_channels:
        return image
    return np.concatenate([image, np.full((*image.shape[:2], 1), 255, np.uint8)], -1)


def labels(folder: Path, images: Iterable[Path], classes: Sequence[str]) -> list[str]:
    """Return each image's class: the outermost subfolder with a class name."""
    labels_of_images = []
    for path in images:
        names = path.relative_to(folder).parts[:-1]
        label = next((name for name in names if name in classes), None)
        if label is None:
            raise SamplesError(
                f"{path} is not in a folder named like a class, as --target requires; the classes "
                f"are {in_a_line(', '.join(classes))}."
            )
        labels_of_images.append(label)
    return labels_of_images
