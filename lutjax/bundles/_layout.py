"""Bundle layout: file names, and the content of ``config.json``, checked field by field."""

import dataclasses
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path as Folder
from typing import Any

from lutjax import __version__
from lutjax.bundles.errors import BundleError
from lutjax.files.strict_json import Fields, format_value

CONFIG, TENSORS, CARD = "config.json", "model.safetensors", "README.md"
"""Bundle file names, recognized by model hubs."""

MEMORY_RECORD = "memory.json"
"""File of an imported memory, next to its bundle: layout and base files."""

VERSION = 1
"""Layout version."""

MODEL_TYPE = "lutjax"

MOST_BYTES = 1 << 24
"""Maximum bytes of ``config.json``, and of the header in ``model.safetensors``."""

MOST_AXES = 32

NNX, TREE = "flax.nnx", "arrays"
LIBRARIES = (NNX, TREE)
"""Bundle kinds: a Flax NNX module, or an array tree such as nested dicts (Linen, Haiku)."""

TABLES = "tables"
"""Kind of tensors that support storage in fewer bits."""

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
"""safetensors dtype names."""

FLOATS = ("bfloat16", "float16", "float32", "float64")

TABLE_DTYPES = ("float32", "bfloat16", "int8")
"""Dtypes for stored tables."""

Path = tuple[str | int, ...]


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A bundle tensor.

    Attributes:
      path: keys from the model root.
      kind: variable kind: ``"tables"``, ``"anchors"``, ``"wires"``, ``"params"`` and the like.
      shape: its shape.
      dtype: dtype in the model.
      stored: dtype in the file.
      scale: name of the tensor that multiplies the stored one, float32 ``[..., tables, 1,
        outputs]`` or, for an edge list, ``[..., 1]``; None for unscaled tensors.
    """

    path: Path
    kind: str
    shape: tuple[int, ...]
    dtype: str
    stored: str
    scale: str | None = None

    @property
    def scale_shape(self) -> tuple[int, ...]:
        """Scale shape: one element per table and output, or one for a whole edge list."""
        if len(self.shape) < 3:
            return (*self.shape[:-1], 1)
        return (*self.shape[:-2], 1, self.shape[-1])

    @classmethod
    def from_dict(cls, name: str, entry: Any) -> "Tensor":
        """Parse a tensor entry of ``config.json``."""
        fields = Fields(f"{CONFIG}: the tensor {format_value(name)}")
        path = fields.field(entry, "path", list)
        shape = fields.field(entry, "shape", list)
        are_keys = bool(path) and all(type(key) in (str, int) for key in path)
        if not are_keys or name_of(tuple(path)) != name:
            raise ValueError(
                f"{fields.where}: 'path' is {format_value(path)}; "
                "expected the keys that make the name, with dots between them."
            )
        # type: a bool is an int. 1 << 48: products of sizes stay far below what NumPy can count.
        are_sizes = all(type(size) is int and 0 <= size < 1 << 48 for size in shape)
        if len(shape) > MOST_AXES or not are_sizes:
            raise ValueError(
                f"{fields.where}: 'shape' is {format_value(shape)}; "
                f"expected sizes, at most {MOST_AXES}."
            )
        dtype, stored = (fields.field(entry, field, str) for field in ("dtype", "stored"))
        scale = fields.field(entry, "scale", object)
        kind = fields.field(entry, "kind", str)
        tensor = cls(tuple(path), kind, tuple(shape), dtype, stored, scale)
        narrower = dtype in FLOATS and shape and stored in TABLE_DTYPES
        if dtype not in CODES or (stored != dtype and not narrower):
            raise ValueError(
                f"{fields.where} has values of {format_value(dtype)}, "
                f"stored as {format_value(stored)}; expected one of {', '.join(CODES)}, "
                f"stored so or, of a table of floats, as {', '.join(TABLE_DTYPES)}."
            )
        if scale != (scale_of(name) if stored == "int8" and dtype != "int8" else None):
            raise ValueError(
                f"{fields.where}: 'scale' is {format_value(scale)}; "
                "expected the name of its scale where floats are stored as int8, else null."
            )
        return tensor


def name_of(path: Path) -> str:
    """Return the name of a tensor: its keys joined by dots."""
    return ".".join(map(str, path))


def scale_of(name: str) -> str:
    return f"{name}.scale"


@dataclasses.dataclass(frozen=True)
class Config:
    """Content of ``config.json``.

    Attributes:
      architecture: class name of the model.
      library: one of `LIBRARIES`.
      model: config fields of a lutjax model, or constructor arguments of a lutjax layer; None for
        other modules and for arrays.
      quantized: whether the model has quantized tables, see `lutjax.layers.nnx.quantize`.
      run: kind, steps, record and results of the training run; None without one.
      n_bytes, sha256: size and digest of the tensor file.
      tensors: tensors by name.
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
    def from_dict(cls, content: Any) -> "Config":
        """Parse a config from a JSON object; errors name the field."""
        fields = Fields(CONFIG)
        if not is_config(content):
            raise ValueError(
                f"{CONFIG} is not a lutjax bundle: it has no 'model_type' and 'bundle'."
            )
        if content["bundle"] != VERSION:
            raise BundleError(
                f"{CONFIG} is of version {format_value(content['bundle'])} of bundles; "
                f"lutjax {__version__} reads version {VERSION}."
            )
        names = fields.field(content, "architectures", list)
        if len(names) != 1 or not isinstance(names[0], str):
            raise ValueError(
                f"{CONFIG}: 'architectures' is {format_value(names)}; expected one name."
            )
        library = fields.field(content, "library", str)
        if library not in LIBRARIES:
            raise ValueError(
                f"{CONFIG}: 'library' is {format_value(library)}; "
                f"expected {' or '.join(LIBRARIES)}."
            )
        either = {name: fields.field(content, name, object) for name in ("model", "run")}
        for name, value in either.items():
            if value is not None:
                fields.field(content, name, dict)
        file = Fields(f"{CONFIG}: files").field(fields.field(content, "files", dict), TENSORS, dict)
        of_file = Fields(f"{CONFIG}: {TENSORS}")
        tensors = {
            name: Tensor.from_dict(name, one)
            for name, one in fields.field(content, "tensors", dict).items()
        }
        config = cls(
            names[0],
            library,
            either["model"],
            fields.field(content, "quantized", bool),
            either["run"],
            of_file.field(file, "bytes", int),
            of_file.field(file, "sha256", str),
            tensors,
        )
        # Names and paths must not collide: one tensor would replace another in the model.
        stored = list(config.stored_tensors())
        if len({name for name, *_ in stored}) != len(stored):
            raise ValueError(f"{CONFIG}: a tensor has the name of the scale of another one.")
        paths = {tensor.path for tensor in tensors.values()}
        for path in paths:
            if any(path[:length] in paths for length in range(1, len(path))):
                raise ValueError(
                    f"{CONFIG}: the tensor {format_value(name_of(path))} lies in another one."
                )
        return config

    def stored_tensors(self) -> Iterator[tuple[str, str, tuple[int, ...]]]:
        """Yield name, dtype and shape of each tensor in the file, including scales."""
        for name, tensor in self.tensors.items():
            yield name, tensor.stored, tensor.shape
            if tensor.scale is not None:
                yield tensor.scale, "float32", tensor.scale_shape

    @property
    def n_values(self) -> int:
        return sum(math.prod(tensor.shape) for tensor in self.tensors.values())


def is_config(content: Any) -> bool:
    return (
        isinstance(content, dict)
        and content.get("model_type") == MODEL_TYPE
        and type(content.get("bundle")) is int
    )


def is_memory(folder: Folder) -> bool:
    """Return True if a bundle is of an imported memory."""
    return (folder / MEMORY_RECORD).is_file()


def is_bundle(folder: Folder) -> bool:
    """Return True if a folder has any bundle file."""
    return any(os.path.lexists(folder / name) for name in (CONFIG, TENSORS))
