"""Array trees as tensors with paths, and their comparison between bundle and model."""

from collections.abc import Mapping
from typing import Any

import jax

from lutjax.bundles._layout import Path, name_of
from lutjax.bundles._reading import Bundle
from lutjax.bundles.errors import BundleError
from lutjax.files.strict_json import format_value


def path_of(entries: tuple[Any, ...]) -> Path:
    """Convert JAX tree keys to a path of strings and integers."""
    return tuple(map(_key, entries))


def _key(entry: Any) -> str | int:
    for attribute in ("key", "idx", "name"):  # dicts, sequences, attributes
        value = getattr(entry, attribute, None)
        if isinstance(value, str | int):
            return value
    return str(entry)


def flat(tree: Any) -> dict[Path, Any]:
    return {path_of(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def fit(bundle: Bundle, expected: Mapping[Path, Any]) -> None:
    """Raise BundleError unless a bundle has exactly these paths, dtypes and shapes."""
    stored = {tensor.path: tensor for tensor in bundle.config.tensors.values()}
    # Keys of a path are strings and integers, which have no common order.
    for path in sorted({*stored, *expected}, key=str):
        actual, needed = (_describe(arrays.get(path)) for arrays in (stored, expected))
        if actual != needed:
            raise BundleError(
                f"the bundle {bundle.folder} does not fit this model: "
                f"its tensor {format_value(name_of(path))} is {actual}; the model's is {needed}."
            )


def _describe(array: Any) -> str:
    return "missing" if array is None else f"{array.dtype}{list(array.shape)}"
