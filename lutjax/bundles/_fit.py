"""Array trees as tensors with paths, and their comparison between bundle and model."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from lutjax.bundles._layout import Path, name_of
from lutjax.bundles._reading import Bundle
from lutjax.bundles.errors import BundleError
from lutjax.files.strict_json import format_value


def path_of(entries: tuple[Any, ...]) -> Path:
    """Convert JAX tree keys to a path of strings and integers."""
    return tuple(map(_key, entries))


def _key(entry: Any) -> str | int:
    for attribute in ("key", "idx", "name"):  # dicts, sequences, attributes
        found = getattr(entry, attribute, None)
        if isinstance(found, str | int):
            return found
    return str(entry)


def flat(tree: Any) -> dict[Path, Any]:
    return {path_of(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def fit(bundle: Bundle, wanted: Mapping[Path, Any]) -> None:
    """Raise BundleError unless a bundle has exactly these paths, dtypes and shapes."""
    found = {tensor.path: tensor for tensor in bundle.config.tensors.values()}
    for path in sorted({*found, *wanted}, key=str):
        there = f"{found[path].dtype}{list(found[path].shape)}" if path in found else "missing"
        needed = (
            f"{wanted[path].dtype}{list(np.shape(wanted[path]))}" if path in wanted else "missing"
        )
        if there != needed:
            raise BundleError(
                f"the bundle {bundle.folder} does not fit this model: "
                f"its tensor {format_value(name_of(path))} is {there}; the model's is {needed}."
            )
