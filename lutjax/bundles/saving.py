"""Bundle saving."""

import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from lutjax.arguments import format_value
from lutjax.bundles import _card, _tables
from lutjax.bundles._fit import flat
from lutjax.bundles._layout import (
    CARD,
    CODES,
    CONFIG,
    FLOATS,
    NNX,
    TABLE_DTYPES,
    TABLES,
    TENSORS,
    TREE,
    Config,
    Path as Keys,
    Tensor,
    name_of,
    scale_of,
)
from lutjax.bundles._reading import read_config
from lutjax.bundles.errors import BundleError
from lutjax.extras import require_optional
from lutjax.files.atomic import digest_of, write_atomically

MOST_NAME = 512
"""Maximum length of a tensor name in characters."""


def save(
    model: Any,
    folder: str | os.PathLike[str],
    *,
    table_dtype: str | None = None,
    tables: Iterable[str] = (),
) -> None:
    """Write a model as a bundle: a hub-ready folder with config, tensors and model card.

    The files are ``config.json``, ``model.safetensors`` and ``README.md``. A tensor name joins its
    keys with dots, such as ``layers.0.ffn.layer.weights``; ``config.json`` describes each tensor,
    and `lutjax.load` reads everything. A bundle contains no code.

    Args:
      model: a `flax.nnx.Module`, from lutjax or a user; or arrays: Linen variables, Haiku
        ``{"params": params, "state": state}``, or any tree of dicts and lists. Module caches and
        random streams are left out. The `record` of a model returned by `lutjax.load` is stored in
        the bundle, with data file names but not their folders.
      folder: output folder; created if missing. Other files in it are kept, so it may be a clone of
        a hub repository. A ``README.md`` without its generated last line is kept as well.
      table_dtype: dtype for stored float tables: ``"float32"``, ``"bfloat16"``, or ``"int8"`` with
        a power-of-two scale for each table and output, or for an edge list. By default tables keep
        their dtype; all other tensors always do.
      tables: table names among arrays, as returned by `tables_of` of `lutjax.layers.linen` and
        `lutjax.layers.haiku`. The variables of a `flax.nnx.Module` identify themselves.

    Raises:
      BundleError: the folder has files with these names that belong to no bundle.
      ValueError: a table has values that int8 cannot represent, there are no tables to convert, or
        array names are duplicate or invalid.
      TypeError: the model is no model, or holds anything except numeric arrays.
      ModuleNotFoundError: the package safetensors is missing, of the extra ``bundles``.

    Source: docs/bundles.md, sections 1 and 2.

    Example:
      >>> import jax.numpy as jnp, lutjax, tempfile
      >>> from flax import nnx
      >>> from lutjax.layers.nnx import LUT
      >>> layer = LUT(8, 5, n_detectors=4, n_anchors=3, rngs=nnx.Rngs(0))
      >>> folder = tempfile.mkdtemp()
      >>> lutjax.save(layer, folder, table_dtype="int8")
      >>> other = lutjax.load(folder)
      >>> bool((other.anchors[...] == layer.anchors[...]).all())
      True
    """
    with require_optional("lutjax.save"):
        from safetensors import SafetensorError
        from safetensors.numpy import save_file

    place = Path(folder)
    if table_dtype is not None and table_dtype not in TABLE_DTYPES:
        raise ValueError(
            f"save: table_dtype is {format_value(table_dtype)}; "
            f"expected one of {', '.join(TABLE_DTYPES)}, or None for the dtype that they have."
        )
    facts, parts = _flatten_model(model, frozenset(tables))
    tensors, arrays = _tensors(parts, table_dtype)
    _check_place(place)
    place.mkdir(parents=True, exist_ok=True)
    # Tensors before the config: a killed save leaves a config whose digest does not fit, which
    # `load` reports, and never a mixture that it accepts.
    with write_atomically(place / TENSORS) as path:
        try:
            save_file(arrays, path, metadata={"format": "np"})
        except SafetensorError as error:
            raise BundleError(f"{place / TENSORS} cannot be written: {error}") from error
        n_bytes, sha256 = path.stat().st_size, digest_of(path)
    config = Config(**facts, n_bytes=n_bytes, sha256=sha256, tensors=tensors)
    with write_atomically(place / CONFIG) as path:
        content = json.dumps(config.to_dict(), indent=1, allow_nan=False)
        path.write_text(content + "\n", encoding="utf-8")
    if _card.is_ours(place / CARD):
        with write_atomically(place / CARD) as path:
            path.write_text(_card.card(place.absolute().name, config), encoding="utf-8")


def _flatten_model(
    model: Any, tables: frozenset[str]
) -> tuple[dict[str, Any], list[tuple[Keys, str, Any]]]:
    # Not imported: arrays of Linen or Haiku are saved without Flax NNX.
    nnx = sys.modules.get("flax.nnx")
    if nnx is not None and isinstance(model, nnx.Module):
        return _flatten_module(model)
    leaves = flat(model)
    if not leaves or (len(leaves) == 1 and () in leaves):
        raise TypeError(
            f"save: model is {format_value(model)}; expected an nnx.Module, or arrays in dicts."
        )
    unknown = sorted(tables - {name for path in leaves for name in _array_names(path)})
    if unknown:
        raise ValueError(f"save: tables has {format_value(unknown[0])}, which no array is called.")
    facts = {
        "architecture": "arrays",
        "library": TREE,
        "model": None,
        "quantized": False,
        "run": None,
    }
    kinds = {path: TABLES if tables & set(_array_names(path)) else str(path[0]) for path in leaves}
    return facts, [(path, kinds[path], leaf) for path, leaf in leaves.items()]


def _array_names(path: Keys) -> tuple[str, ...]:
    """Return an array's names relative to the tree root and to its collection."""
    return "/".join(map(str, path)), "/".join(map(str, path[1:]))


def _flatten_module(model: Any) -> tuple[dict[str, Any], list[tuple[Keys, str, Any]]]:
    from lutjax.bundles import _modules, _records
    from lutjax.training.loaded import Loaded

    _modules.refuse_on_host(model)
    record = getattr(model, "record", None)
    facts = {
        "architecture": type(model).__name__,
        "library": NNX,
        "model": _modules.config_of(model),
        "quantized": _modules.is_quantized(model),
        "run": _records.to_dict(record) if isinstance(record, Loaded) else None,
    }
    return facts, [(part.path, part.kind, part.array) for part in _modules.learned_parts(model)]


def _tensors(
    parts: list[tuple[Keys, str, Any]], table_dtype: str | None
) -> tuple[dict[str, Tensor], dict[str, np.ndarray]]:
    tensors: dict[str, Tensor] = {}
    arrays: dict[str, np.ndarray] = {}
    n_tables = 0
    for path, kind, array in parts:
        name = name_of(path)
        _check_name(name, array)
        dtype = str(array.dtype)
        narrower = table_dtype is not None and kind == TABLES and dtype in FLOATS and array.ndim > 0
        n_tables += narrower
        store = table_dtype if narrower and table_dtype is not None else dtype
        scale = scale_of(name) if store == "int8" and dtype != "int8" else None
        tensor = Tensor(path, kind, tuple(array.shape), dtype, store, scale)
        encoded = _tables.encode_tensor(tensor, np.asarray(array))
        # Keys with dots can make one name in two ways.
        if name in tensors or set(encoded) & set(arrays):
            raise ValueError(
                f"save: two arrays have the name {format_value(name)}, or scale; rename one."
            )
        tensors[name] = tensor
        arrays |= {key: np.ascontiguousarray(a).reshape(a.shape) for key, a in encoded.items()}
    if table_dtype is not None and not n_tables:
        raise ValueError(
            f"save: table_dtype is {table_dtype}, but there are no float tables; leave it out."
        )
    return tensors, arrays


def _check_name(name: str, array: Any) -> None:
    if not name.isprintable() or not 0 < len(name) <= MOST_NAME or name == "__metadata__":
        raise ValueError(
            f"save: an array has the name {format_value(name)}; "
            f"expected 1 to {MOST_NAME} characters that can be printed, and not __metadata__."
        )
    dtype = getattr(array, "dtype", None)
    if not isinstance(array, jax.Array | np.ndarray) or str(dtype) not in CODES:
        raise TypeError(
            f"save: {name} is {format_value(array)}; expected an array of {', '.join(CODES)}."
        )


def _check_place(folder: Path) -> None:
    """Raise BundleError if a folder's files with bundle names do not belong to a bundle."""
    if folder.exists() and not folder.is_dir():
        raise BundleError(f"{folder} is a file; choose another folder.")
    present = [name for name in (CONFIG, TENSORS) if os.path.lexists(folder / name)]
    if not present:
        return
    # Another program's config.json or tensors must not be lost, so only a bundle is replaced.
    try:
        read_config(folder)
    except BundleError as error:
        raise BundleError(
            f"{folder} holds {present[0]}, which is of no bundle that this version knows, "
            f"and would be replaced: choose another folder, or move it away ({error})."
        ) from error
