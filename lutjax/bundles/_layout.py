"""Layout of a bundle: the names of its files, and what ``config.json`` says, checked field by field."""

import dataclasses
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path as Folder
from typing import Any

from lutjax import __version__
from lutjax.bundles.errors import BundleError
from lutjax.files import strict_json
from lutjax.files.strict_json import Fields

CONFIG, TENSORS, CARD = "config.json", "model.safetensors", "README.md"
"""Names of the files of a bundle, which hubs of models know."""

VERSION = 1
"""Version of the layout."""

MODEL_TYPE = "lutjax"

MOST_BYTES = 1 << 24
"""Bytes of the largest ``config.json``, and of the largest header of ``model.safetensors``."""

MOST_AXES = 32

NNX, TREE = "flax.nnx", "arrays"
LIBRARIES = (NNX, TREE)
"""Kinds of bundles: of a module of Flax NNX, or of nested dicts and other trees of arrays, as Linen and Haiku have them."""

TABLES = "tables"
"""Kind of the tensors that may be stored in fewer bits."""

CODES = {
    "bool": "BOOL",
    "int8": "I8",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
    "uint8": "U8",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
    "bfloat16": "BF16",
    "float16": "F16",
    "float32": "F32",
    "float64": "F64",
}
"""Names that safetensors has for dtypes."""

FLOATS = ("bfloat16", "float16", "float32", "float64")

TABLE_DTYPES = ("float32", "bfloat16", "int8")
"""Dtypes in which tables can be stored."""

Path = tuple[str | int, ...]


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor of a bundle.

    Attributes:
      path: keys from the root of the model.
      kind: what it is: ``"tables"``, ``"anchors"``, ``"wires"``, ``"params"`` and the like.
      shape: its shape.
      dtype: of its values in the model.
      stored: dtype in the file.
      scale: name of the tensor that the stored one is multiplied by, ``[..., tables, 1, outputs]`` or, of an edge list, ``[..., 1]`` float32; None where it is not.
    """

    path: Path
    kind: str
    shape: tuple[int, ...]
    dtype: str
    stored: str
    scale: str | None = None

    @property
    def scale_shape(self) -> tuple[int, ...]:
        """Shape of the scale: one for each table and output, and one for a whole edge list."""
        return (*self.shape[:-1], 1) if len(self.shape) < 3 else (*self.shape[:-2], 1, self.shape[-1])

    @classmethod
    def from_dict(cls, name: str, found: Any) -> "Tensor":
        """Return the tensor that an entry of ``config.json`` describes.

        Raises:
          ValueError: it describes none.
        """
        fields = Fields(f"{CONFIG}: the tensor {strict_json.shown(name)}")
        path = fields.field(found, "path", list)
        shape = fields.field(found, "shape", list)
        if not path or not all(type(key) in (str, int) for key in path) or name_of(tuple(path)) != name:
            raise ValueError(
                f"{fields.where}: 'path' is {strict_json.shown(path)}; expected the keys that make the name, with dots between them."
            )
        if len(shape) > MOST_AXES or not all(type(size) is int and 0 <= size < 1 << 48 for size in shape):
            raise ValueError(
                f"{fields.where}: 'shape' is {strict_json.shown(shape)}; expected sizes, of at most {MOST_AXES} axes."
            )
        dtype, stored = (fields.field(found, field, str) for field in ("dtype", "stored"))
        scale = fields.field(found, "scale", object)
        tensor = cls(tuple(path), fields.field(found, "kind", str), tuple(shape), dtype, stored, scale)
        narrower = dtype in FLOATS and shape and stored in TABLE_DTYPES
        if dtype not in CODES or (stored != dtype and not narrower):
            raise ValueError(
                f"{fields.where} has values of {strict_json.shown(dtype)}, stored as {strict_json.shown(stored)}; expected one of {', '.join(CODES)}, "
                f"stored so or, of a table of floats, as {', '.join(TABLE_DTYPES)}."
            )
        if scale != (scale_of(name) if stored == "int8" and dtype != "int8" else None):
            raise ValueError(
                f"{fields.where}: 'scale' is {strict_json.shown(scale)}; expected the name of its scale where floats are stored as int8, else null."
            )
        return tensor


def name_of(path: Path) -> str:
    """Return the name of a tensor: its keys with dots between them.

    Example:
      >>> from lutjax.bundles._layout import name_of
      >>> name_of(("layers", 0, "ffn", "weights"))
      'layers.0.ffn.weights'
    """
    return ".".join(map(str, path))


def scale_of(name: str) -> str:
    """Return the name of the scale of a tensor."""
    return f"{name}.scale"


@dataclasses.dataclass(frozen=True)
class Config:
    """Content of ``config.json``.

    Attributes:
      architecture: name of the class of the model.
      library: one of `LIBRARIES`.
      model: config fields of a lutjax model, or constructor arguments of a lutjax layer; None for other modules and for arrays.
      quantized: whether the model is one with tables of integers, see `lutjax.layers.nnx.quantize`.
      run: kind, steps, record and results of the run that trained the model; None without one.
      n_bytes, sha256: of the file of tensors.
      tensors: by name.
    """

    architecture: str
    library: str
    model: dict[str, Any] | None
    quantized: bool
    run: dict[str, Any] | None
    n_bytes: int
    sha256: str | None
    tensors: Mapping[str, Tensor]

    def to_dict(self) -> dict[str, Any]:
        """Return what JSON can hold of it."""
        return {
            "model_type": MODEL_TYPE,
            "architectures": [self.architecture],
            "bundle": VERSION,
            "lutjax": __version__,
            "library": self.library,
            "model": self.model,
            "quantized": self.quantized,
            "run": self.run,
            "files": {TENSORS: {"bytes": self.n_bytes, "sha256": self.sha256}},
            "tensors": {name: dataclasses.asdict(tensor) for name, tensor in self.tensors.items()},
        }

    @classmethod
    def from_dict(cls, found: Any) -> "Config":
        """Return the config that an object of JSON describes.

        Raises:
          ValueError: it describes none; the message names the field.
          BundleError: it is one of a later version.
        """
        fields = Fields(CONFIG)
        if not is_config(found):
            raise ValueError(
                f"{CONFIG} is of no bundle of lutjax: it has not the fields 'model_type' and 'bundle' of one."
            )
        if found["bundle"] != VERSION:
            raise BundleError(
                f"{CONFIG} is of version {strict_json.shown(found['bundle'])} of bundles; lutjax {__version__} reads version {VERSION}."
            )
        names = fields.field(found, "architectures", list)
        if len(names) != 1 or not isinstance(names[0], str):
            raise ValueError(f"{CONFIG}: 'architectures' is {strict_json.shown(names)}; expected one name.")
        library = fields.field(found, "library", str)
        if library not in LIBRARIES:
            raise ValueError(
                f"{CONFIG}: 'library' is {strict_json.shown(library)}; expected {' or '.join(LIBRARIES)}."
            )
        either = {name: fields.field(found, name, object) for name in ("model", "run")}
        for name, value in either.items():
            if value is not None:
                fields.field(found, name, dict)
        file = Fields(f"{CONFIG}: files").field(fields.field(found, "files", dict), TENSORS, dict)
        of_file = Fields(f"{CONFIG}: {TENSORS}")
        tensors = {
            name: Tensor.from_dict(name, one) for name, one in fields.field(found, "tensors", dict).items()
        }
        config = cls(
            names[0],
            library,
            either["model"],
            fields.field(found, "quantized", bool),
            either["run"],
            of_file.field(file, "bytes", int),
            of_file.field(file, "sha256", str),
            tensors,
        )
        stored = list(config.stored())
        if len({name for name, *_ in stored}) != len(stored):
            raise ValueError(f"{CONFIG}: a tensor has the name of the scale of another one.")
        paths = {tensor.path for tensor in tensors.values()}
        for path in paths:
            if any(path[:length] in paths for length in range(1, len(path))):
                raise ValueError(
                    f"{CONFIG}: the tensor {strict_json.shown(name_of(path))} lies in another one."
                )
        return config

    def stored(self) -> Iterator[tuple[str, str, tuple[int, ...]]]:
        """Yield name, dtype and shape of each tensor in the file, scales among them."""
        for name, tensor in self.tensors.items():
            yield name, tensor.stored, tensor.shape
            if tensor.scale is not None:
                yield tensor.scale, "float32", tensor.scale_shape

    @property
    def n_values(self) -> int:
        """Number of values of all tensors, without scales."""
        return sum(math.prod(tensor.shape) for tensor in self.tensors.values())


def is_config(found: Any) -> bool:
    """Return whether what JSON holds is the config of a bundle, of whatever version."""
    return (
        isinstance(found, dict) and found.get("model_type") == MODEL_TYPE and type(found.get("bundle")) is int
    )


def is_bundle(folder: Folder) -> bool:
    """Return whether a folder has the files of a bundle, or one of them."""
    return any(os.path.lexists(folder / name) for name in (CONFIG, TENSORS))
