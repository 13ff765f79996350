"""Reading of untrusted bundles.

Everything is checked before an array is created, and nothing is executed.
"""

import dataclasses
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Shaped

from lutjax.bundles import _tables
from lutjax.bundles._layout import CODES, CONFIG, MOST_BYTES, TENSORS, Config
from lutjax.bundles.errors import BundleError
from lutjax.extras import require_optional
from lutjax.files import strict_json
from lutjax.files.atomic import digest_of
from lutjax.files.messages import in_a_line
from lutjax.files.strict_json import format_value


@dataclasses.dataclass(frozen=True, eq=False)
class Bundle:
    """A bundle as read from disk.

    Attributes:
      folder: its folder.
      config: content of ``config.json``.
      tensors: arrays of ``model.safetensors`` by name, as stored, including scales of int8 tables.

    Example:
      >>> import lutjax, numpy as np, tempfile
      >>> folder = tempfile.mkdtemp()
      >>> lutjax.save({"params": {"weights": np.ones((2, 4, 3), np.float32)}}, folder)
      >>> bundle = lutjax.bundles.read(folder)
      >>> {name: array.shape for name, array in bundle.tensors.items()}
      {'params.weights': (2, 4, 3)}
    """

    folder: Path
    config: Config
    tensors: Mapping[str, Shaped[np.ndarray, "..."]]

    def values(self, name: str) -> Shaped[np.ndarray, "..."]:
        """Return the values of a tensor, in its model dtype."""
        return _tables.values(self.config.tensors[name], self.tensors)

    def tree(self) -> dict[Any, Any]:
        """Return all tensor values in nested dicts, keyed by their paths."""
        tree: dict[Any, Any] = {}
        for name, tensor in self.config.tensors.items():
            inner = tree
            for key in tensor.path[:-1]:
                inner = inner.setdefault(key, {})
            inner[tensor.path[-1]] = self.values(name)
        return tree


def read(folder: str | os.PathLike[str]) -> Bundle:
    """Read and check the bundle in a folder, without building a model.

    Before any array is created, the names, dtypes and shapes in ``config.json`` are compared with
    the header of ``model.safetensors``, the header with the file size, and the file with its
    digest. Links are rejected, and nothing is executed. It takes at most 100 times the memory of
    the bundle.

    Args:
      folder: folder written by `lutjax.save`.

    Raises:
      FileNotFoundError: the folder does not exist.
      BundleError: the folder is no bundle, or a damaged one; the message is one line.
      ModuleNotFoundError: the package safetensors is missing, of the extra ``bundles``.

    Source: docs/bundles.md, sections 3 and 4.

    Example:
      >>> import lutjax, numpy as np, tempfile
      >>> folder = tempfile.mkdtemp()
      >>> lutjax.save({"params": {"weights": np.ones((2, 4, 3), np.float32)}}, folder)
      >>> lutjax.bundles.read(folder).tree()["params"]["weights"].shape
      (2, 4, 3)
    """
    with require_optional("lutjax.bundles.read"):
        from safetensors import SafetensorError, safe_open

    path = Path(folder)
    config = read_config(path)
    place, size = path / TENSORS, _size(path, TENSORS)
    if size != config.n_bytes:
        raise BundleError(
            f"the bundle {path} is damaged: {TENSORS} has {size:,} bytes, "
            f"not {format_value(config.n_bytes)} as {CONFIG} says."
        )
    try:
        # From the cheapest check to the most expensive, and all before the first array.
        _check_header(place, size)
        with safe_open(place, framework="np") as file:
            _check_tensors(file, config)
            if digest_of(place) != config.sha256:
                raise ValueError(f"{TENSORS} has changed since it was written")
            tensors = {name: file.get_tensor(name) for name, *_ in config.stored_tensors()}
    except (SafetensorError, ValueError) as error:
        raise BundleError(
            f"the bundle {path} is damaged: {in_a_line(error).removesuffix('.')}."
        ) from error
    return Bundle(path, config, tensors)


def read_config(folder: Path) -> Config:
    if not folder.exists():
        raise FileNotFoundError(f"the folder {folder} does not exist.")
    if not folder.is_dir():
        raise BundleError(f"{folder} is a file; give the folder of a bundle.")
    size = _size(folder, CONFIG)
    # Before reading: a bundle may come from anyone, and its JSON is parsed in memory.
    if size > MOST_BYTES:
        raise BundleError(f"the bundle {folder} is damaged: {CONFIG} exceeds {MOST_BYTES:,} bytes.")
    try:
        content = strict_json.loads((folder / CONFIG).read_bytes())
        return Config.from_dict(strict_json.rename_fields(content))
    except BundleError as error:
        raise BundleError(f"the bundle {folder} cannot be read: {error}") from None
    except ValueError as error:
        why = in_a_line(error).removesuffix(".")
        named = why if CONFIG in why else f"{CONFIG}: {why}"
        raise BundleError(f"the bundle {folder} is damaged: {named}.") from error


def _size(folder: Path, name: str) -> int:
    """Return the size of a regular bundle file; links and pipes are rejected."""
    try:
        status = (folder / name).lstat()
    except FileNotFoundError:
        raise BundleError(
            f"{folder} is no bundle: it has no {name}. `lutjax save` writes one."
        ) from None
    if stat.S_ISLNK(status.st_mode):
        raise BundleError(
            f"the bundle {folder} cannot be read: {name} is a link, which may lead anywhere; "
            "copy what it leads to (cp -L)."
        )
    if not stat.S_ISREG(status.st_mode):
        raise BundleError(f"the bundle {folder} cannot be read: {name} is no file.")
    return status.st_size


def _check_header(path: Path, size: int) -> None:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
    if not 2 <= length <= min(MOST_BYTES, size - 8):
        raise ValueError(
            f"{TENSORS} has a header of {length:,} bytes; "
            f"the file has {size:,}, of which at most {MOST_BYTES:,} are one"
        )


def _check_tensors(file: Any, config: Config) -> None:
    expected = {name: (CODES[dtype], shape) for name, dtype, shape in config.stored_tensors()}
    names = set(file.keys())
    for name in sorted(names ^ set(expected)):
        where = f"{TENSORS} has and {CONFIG} does not describe"
        if name in expected:
            where = f"{CONFIG} describes and {TENSORS} lacks"
        raise ValueError(f"the tensor {format_value(name)}, which {where}")
    # A slice has the dtype and shape of the file's header, without reading the tensor.
    for name, (code, shape) in expected.items():
        tensor = file.get_slice(name)
        actual = tensor.get_dtype(), tuple(tensor.get_shape())
        if actual != (code, shape):
            raise ValueError(
                f"the tensor {format_value(name)} is {actual[0]}{list(actual[1])} in {TENSORS}, "
                f"and {code}{list(shape)} in {CONFIG}"
            )
