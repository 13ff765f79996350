"""Published n-gram memories: small tensors in a bundle, and tables that stay in their files."""

import contextlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from lutjax.bundles._layout import MEMORY_RECORD
from lutjax.bundles.saving import save
from lutjax.convert.errors import ConversionError
from lutjax.files import strict_json
from lutjax.files.atomic import write_atomically
from lutjax.files.errors import FolderError
from lutjax.files.messages import in_a_line
from lutjax.files.tensors import TensorFile
from lutjax.tables.host import HostTable
from lutjax.values import NgramLayout, Vocabulary

if TYPE_CHECKING:
    from lutjax.layers.nnx import NgramEmbedding, NgramMemory

FAMILIES = ("engram", "ple", "longcat")

_INDEX = "model.safetensors.index.json"
_DTYPES = {
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
    "BF16": ml_dtypes.bfloat16,
}
_DTYPES |= {"F16": np.float16, "F32": np.float32, "I64": np.int64, "I32": np.int32}

Parts = list[tuple[str, str]]


class _Checkpoint:
    """Files and tensors of a published checkpoint; only used tensors are read."""

    def __init__(self, folder: Path):
        self.folder, self._files = folder, dict[str, TensorFile]()
        self.config = _read_json(folder / "config.json")
        # The index names the file of each tensor, so that the other files may be missing.
        if (folder / _INDEX).is_file():
            self._files_of = dict(_read_json(folder / _INDEX).get("weight_map") or {})
        else:
            paths = sorted(folder.glob("*.safetensors"))
            self._files_of = {
                name: path.name for path in paths for name in self._open(path.name).tensors
            }

    def _open(self, file: str) -> TensorFile:
        if file not in self._files:
            self._files[file] = TensorFile.open(self.folder / file)
        return self._files[file]

    def prefix(self, ending: str) -> str:
        names = [name for name in self._files_of if name == ending or name.endswith(f".{ending}")]
        if len(names) != 1:
            raise ConversionError(f"{self.folder} has {len(names)} tensors {ending}; expected one.")
        return names[0].removesuffix(ending)

    def has(self, name: str) -> bool:
        return name in self._files_of

    def locate(self, name: str) -> tuple[str, str]:
        if name not in self._files_of:
            raise ConversionError(f"{self.folder} has no tensor {name}.")
        return self._files_of[name], name

    def tensor_series(self, name: str) -> Parts:
        """Return the tensors of a numbered series, in numerical order."""
        series: Parts = []
        while self.has(name.format(len(series))):
            series.append(self.locate(name.format(len(series))))
        return series or [self.locate(name.format(0))]

    def dtype(self, name: str) -> str:
        return self._open(self.locate(name)[0]).tensor(name).dtype

    def array(self, name: str, *shape: int) -> np.ndarray:
        """Return a tensor as float32, or as int64, after a check of its shape."""
        file = self._open(self.locate(name)[0])
        tensor = file.tensor(name)
        if tensor.dtype not in _DTYPES:
            raise ConversionError(
                f"{name} is {tensor.dtype}; expected one of {', '.join(_DTYPES)}."
            )
        if shape and tensor.shape != shape:
            raise ConversionError(
                f"{name} has shape {list(tensor.shape)}; the config needs {list(shape)}."
            )
        data = file.map[tensor.offset : tensor.offset + tensor.n_bytes]
        values = np.frombuffer(data, _DTYPES[tensor.dtype]).reshape(tensor.shape)
        return values.astype(np.int64 if tensor.dtype.startswith("I") else np.float32)

    def matrix(self, name: str, *shape: int) -> np.ndarray:
        """Return a matrix with a scale for each tile, if the checkpoint has scales for it."""
        values = self.array(f"{name}.weight", *shape)
        if self.has(f"{name}.scale"):
            quantization = self.config.get("quantization_config") or {}
            rows, columns = quantization.get("weight_block_size", (32, 32))
            # The last tiles may reach beyond the matrix; their scales are cut off.
            tiles = tuple(-(-n // size) for n, size in zip(shape, (rows, columns), strict=True))
            scale = np.repeat(np.repeat(self.array(f"{name}.scale", *tiles), rows, 0), columns, 1)
            values = values * scale[: shape[0], : shape[1]]
        elif self.dtype(f"{name}.weight") == "F8_E4M3":
            raise ConversionError(f"{name}.weight is F8_E4M3, which needs {name}.scale.")
        return values


def convert_memory(
    folder: str | os.PathLike[str],
    model: str | os.PathLike[str],
    *,
    family: str,
    layer: int | None = None,
    tokenizer: str | os.PathLike[str] | None = None,
) -> dict[str, Any]:
    """Write a bundle for the memory of a published checkpoint, without its table.

    The bundle has the small tensors, and ``memory.json`` with the layout, the codec, and the base
    files by size and digest. Read it with `memory_layer`.

    Args:
      folder: checkpoint with ``config.json`` and the safetensors files of the memory; other files
        may be missing.
      model: output folder.
      family: ``"engram"`` (DeepSeek-V4.1-Flash), ``"ple"`` (Qwen3.8-Flash-Next) or ``"longcat"``
        (LongCat-Flash-Lite).
      layer: decoder layer of the memory, from 0; by default the first with a memory.
      tokenizer: ``tokenizer.json`` for ``"engram"``; by default the checkpoint's.

    Returns:
      The content of ``memory.json``.

    Raises:
      ConversionError: a tensor or value is missing or of another kind.
      FolderError: a file is missing, damaged or truncated.
      ValueError: values in the config contradict each other or the files.

    Source: docs/semantics.md, section 14.
    """
    place = Path(folder)
    if family not in FAMILIES:
        raise ConversionError(f"family is {family!r}; expected one of {', '.join(FAMILIES)}.")
    checkpoint = _Checkpoint(place)
    config = checkpoint.config.get("text_config", checkpoint.config)
    try:
        read = {"engram": _engram, "ple": _ple, "longcat": _longcat}[family]
        facts, arrays, parts, scales, codec = read(checkpoint, config, layer, tokenizer)
    except (KeyError, TypeError) as error:
        raise ConversionError(
            f"{place / 'config.json'} lacks or damages {in_a_line(error)}."
        ) from error
    layout: NgramLayout = facts.pop("layout")
    table = HostTable.mapped(
        [(place / file, name) for file, name in parts],
        codec=codec,
        width=facts["arguments"]["width"],
        scales=[(place / file, name) for file, name in scales],
        layout=layout,
    )
    if table.shape[1] != layout.n_rows:
        raise ConversionError(
            f"{place} has {table.shape[1]:,} rows; its config has {layout.n_rows:,}."
        )
    base: Any = table
    record = {
        "kind": "memory",
        "family": family,
        "folder": str(place.absolute()),
        **facts,
        "codec": codec,
        "parts": parts,
        "scales": scales,
        "base": base.description,
        "layout": layout.to_json(),
    }
    # The record comes last: without it the folder is no memory.
    save(arrays, model)
    with write_atomically(Path(model) / MEMORY_RECORD) as path:
        path.write_text(json.dumps(record, allow_nan=False) + "\n", encoding="utf-8")
    return record


_RECORD_FIELDS: dict[str, type] = {
    "family": str,
    "class": str,
    "arguments": dict,
    "codec": str,
    "parts": list,
    "scales": list,
    "base": dict,
    "layout": dict,
}
"""Fields of ``memory.json``, and their types; `layer` is an integer or null."""


def read_record(model: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the content of a bundle's ``memory.json``."""
    path = Path(model) / MEMORY_RECORD
    if not path.exists():
        raise ConversionError(
            f"{path} cannot be read: there is no such file. Give a folder from lutjax import."
        )
    record = _read_json(path)
    fields = strict_json.Fields("the record")
    with _damaged_record(model):
        for name, kind in _RECORD_FIELDS.items():
            fields.field(record, name, kind)
        if fields.field(record, "layer", object) is not None:
            fields.field(record, "layer", int)
    return record


@contextlib.contextmanager
def _damaged_record(model: str | os.PathLike[str]) -> Iterator[None]:
    """Raise ConversionError, with the file's name, for values that describe no memory."""
    try:
        yield
    except FolderError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        what = f"it has no {error}" if isinstance(error, KeyError) else in_a_line(error)
        raise ConversionError(
            f"{Path(model) / MEMORY_RECORD} is damaged: {what.rstrip('.')}. "
            "Import the memory again."
        ) from error


def read_layout(record: Mapping[str, Any], model: str | os.PathLike[str]) -> NgramLayout:
    """Return the layout in the record of a bundle."""
    with _damaged_record(model):
        return NgramLayout.from_json(record["layout"])


def open_memory_table(
    model: str | os.PathLike[str],
    base: str | os.PathLike[str] | None = None,
    *,
    trains: bool = False,
    overlays: Sequence[str | os.PathLike[str]] = (),
) -> HostTable:
    """Return the table of a bundle from `convert_memory`; see `memory_layer`."""
    record = read_record(model)
    return _open_table(record, read_layout(record, model), model, base, trains, overlays)


def _open_table(
    record: Mapping[str, Any],
    layout: NgramLayout,
    model: str | os.PathLike[str],
    base: str | os.PathLike[str] | None,
    trains: bool,
    overlays: Sequence[str | os.PathLike[str]],
) -> HostTable:
    folder = record.get("folder") if base is None else base
    if folder is None:
        raise ConversionError(
            f"{model} does not name the folder of its base files; give it as base=."
        )
    if base is None and not os.path.isdir(folder):
        raise ConversionError(
            f"{model} was imported from {folder}, which does not exist. Move that folder back, or "
            "import the memory again from the new place; in Python, give it as base=."
        )
    with _damaged_record(model):
        parts, scales = (
            [(Path(folder) / file, name) for file, name in record[kind]]
            for kind in ("parts", "scales")
        )
        width = record["arguments"]["width"]
    return HostTable.mapped(
        parts,
        codec=record["codec"],
        width=width,
        scales=scales,
        layout=layout,
        trains=trains,
        overlays=overlays,
        base=record["base"],
    )


def memory_layer(
    model: str | os.PathLike[str],
    base: str | os.PathLike[str] | None = None,
    *,
    trains: bool = False,
    overlays: Sequence[str | os.PathLike[str]] = (),
) -> "NgramMemory | NgramEmbedding":
    """Return the Flax NNX layer of a bundle from `convert_memory`, over its base files.

    Args:
      model: the bundle.
      base: folder with the base files, whose sizes and digests must be those of the bundle; by
        default where `convert_memory` found them.
      trains: True if rows may be updated; see `lutjax.optim.host.HostTable.mapped`.
      overlays: folders with updated rows; later ones take precedence.

    Raises:
      FolderError: a file is missing, damaged, or another than the bundle names.
      ValueError: the description is damaged.
    """
    from flax import nnx

    from lutjax.bundles.loading import load
    from lutjax.layers.nnx import NgramEmbedding, NgramMemory

    record = read_record(model)
    layout = read_layout(record, model)
    table = _open_table(record, layout, model, base, trains, overlays)
    kinds: Mapping[str, Any] = {"NgramMemory": NgramMemory, "NgramEmbedding": NgramEmbedding}
    with _damaged_record(model):
        layer: NgramMemory | NgramEmbedding = kinds[record["class"]](
            layout=layout, placement=table, rngs=nnx.Rngs(0), **record["arguments"]
        )
    # The bundle stores only the arrays beside the table, whose rows stay in the base files.
    for name, array in load(Path(model)).items():
        setattr(layer, name, array)
    return layer


def _engram(checkpoint: _Checkpoint, config: Any, layer: int | None, tokenizer: Any) -> Any:
    layers = list(config["engram_layer_ids"])
    layer = layers[0] if layer is None else layer
    place = _index_of_layer(layers, layer, 0)
    vocabulary = Vocabulary.from_tokenizer(checkpoint.folder if tokenizer is None else tokenizer)
    layout = NgramLayout.deepseek(config, vocabulary, place)
    ending = f"layers.{layer}.engram.embed.weight"
    # Checkpoints of one model differ in what is before the layers, such as "model.".
    at = checkpoint.prefix(ending) + ending.removesuffix("embed.weight")
    streams, features, width = config["hc_mult"], config["hidden_size"], config["engram_head_dim"]
    wkv = checkpoint.matrix(f"{at}wkv", (streams + 1) * features, layout.columns * width).T
    arrays = {
        "key_kernel": wkv[:, : streams * features],
        "value_kernel": wkv[:, streams * features :],
        "query_scale": checkpoint.array(f"{at}q_weight", streams, features),
        "key_scale": checkpoint.array(f"{at}k_weight", streams, features),
    }
    arguments = _memory_arguments(features, streams, 0, config["rms_norm_eps"], width)
    facts = {"layer": layer, "class": "NgramMemory", "arguments": arguments, "layout": layout}
    parts = [checkpoint.locate(f"{at}embed.weight")]
    if checkpoint.dtype(f"{at}embed.weight") == "BF16":
        return facts, _make_contiguous(arrays), parts, [], "bfloat16"
    scales = [checkpoint.locate(f"{at}embed.scale")]
    return facts, _make_contiguous(arrays), parts, scales, "e4m3_ue8m0"


def _ple(checkpoint: _Checkpoint, config: Any, layer: int | None, tokenizer: Any) -> Any:
    layers = sorted(config["ple_layer_ids"])  # counted from 1
    layer = layers[0] - 1 if layer is None else layer
    layout = NgramLayout.qwen(config, _index_of_layer(layers, layer, 1))
    ending = f"layers.{layer}.ple.key_proj.weight"
    at = checkpoint.prefix(ending) + ending.removesuffix("key_proj.weight")
    table = f"{at}ple_embedding."
    stored = {
        "multipliers": "layer_multipliers",
        "sizes": "ngram_heads_vocab_sizes",
        "offsets": "ngram_heads_offsets",
    }
    # The layout is computed from the config; the checkpoint's own constants prove it right.
    for name, tensor in stored.items():
        if checkpoint.has(table + tensor):
            layout.check(**{name: checkpoint.array(table + tensor)})
    streams, features = config["hc_count"], config["hidden_size"]
    kernel = config["ple_conv_kernel_size"]
    row_size, channels = config["ple_embed_dim"], streams * features
    conv = checkpoint.array(f"{at}conv1d.weight", channels, 1, kernel)
    arrays = {
        "key_kernel": checkpoint.matrix(f"{at}key_proj", channels, row_size).T,
        "value_kernel": checkpoint.matrix(f"{at}value_proj", features, row_size).T,
        "conv_kernel": conv[:, 0].T.reshape(kernel, streams, features),
    }
    for name in ("query", "key", "conv"):
        offset = checkpoint.array(f"{at}norm_{name}.weight", channels)
        # The checkpoint stores the distance of the scale from 1.
        arrays[f"{name}_scale"] = 1 + offset.reshape(streams, features)
    arguments = _memory_arguments(features, streams, kernel, config["rms_norm_eps"], layout.width)
    facts = {"layer": layer, "class": "NgramMemory", "arguments": arguments, "layout": layout}
    parts = checkpoint.tensor_series(f"{table}ngram_embedding.shard_{{}}.weight")
    if checkpoint.dtype(parts[0][1]) == "BF16":
        return facts, _make_contiguous(arrays), parts, [], "bfloat16"
    scales = [checkpoint.locate(f"{table}ngram_embedding.weight_scale")]
    return facts, _make_contiguous(arrays), parts, scales, "e4m3"


def _longcat(checkpoint: _Checkpoint, config: Any, layer: int | None, tokenizer: Any) -> Any:
    layout, features = NgramLayout.longcat(config), config["hidden_size"]
    ending = "ngram_embeddings.embedders.0.weight"
    at = checkpoint.prefix(ending) + "ngram_embeddings."
    assert layout.width is not None
    # Each table: other sizes may have the same total.
    for i, size in enumerate(layout.sizes):
        file, name = checkpoint.locate(f"{at}embedders.{i}.weight")
        if (shape := checkpoint._open(file).tensor(name).shape) != (size, layout.width):
            raise ConversionError(
                f"{name} has shape {list(shape)}; the config needs {[size, layout.width]}."
            )
    kernel = [
        checkpoint.matrix(f"{at}post_projs.{i}", features, layout.width).T
        for i in range(layout.columns)
    ]
    arguments = {"features": features, "width": layout.width}
    facts = {"layer": 0, "class": "NgramEmbedding", "arguments": arguments, "layout": layout}
    parts = checkpoint.tensor_series(f"{at}embedders.{{}}.weight")
    return facts, {"kernel": np.stack(kernel)}, parts, [], "bfloat16"


def _memory_arguments(
    features: int, streams: int, kernel: int, eps: float, width: int | None
) -> dict[str, Any]:
    sizes = {"features": features, "streams": streams, "kernel": kernel, "width": width}
    return {**sizes, "gate": "root", "eps": eps}


def _make_contiguous(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: np.ascontiguousarray(a) for name, a in arrays.items()}


def _index_of_layer(layers: list[int], layer: int, first: int) -> int:
    if layer + first not in layers:
        choices = ", ".join(str(other - first) for other in layers)
        raise ConversionError(f"layer {layer} has no memory; layers with one are {choices}.")
    return layers.index(layer + first)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = strict_json.loads(path.read_bytes())
    except OSError as error:
        raise FolderError(f"{path} cannot be read: {error.strerror or error}.") from error
    except ValueError as error:
        raise FolderError(f"{path} is no JSON: {in_a_line(error)}.") from error
    if not isinstance(content, dict):
        raise FolderError(f"{path} holds no JSON object.")
    return content


def facts(model: Path) -> dict[str, Any]:
    record = read_record(model)
    layout = read_layout(record, model)
    token_map = {"vocabulary": layout.vocabulary and layout.vocabulary.digest}
    described = {
        **record,
        "kind": "memory",
        "folder": str(model.absolute()),
        "layout": {**record["layout"], **token_map},
    }
    with _damaged_record(model):
        lines(described)  # reads each field that is shown
    return described


def lines(record: Mapping[str, Any]) -> list[str]:
    layout, base, arguments = record["layout"], record["base"], record["arguments"]
    files: dict[str, Any] = {part["file"]: part for part in base["parts"]}
    source = f"converted from {record['family']}, layer {record['layer']}"
    sizes = ", ".join(f"{name} {value}" for name, value in arguments.items())
    rows = f"{base['rows']:,} rows of {base['width']} elements, {record['codec']}"
    orders = f"orders {', '.join(map(str, layout['orders']))}, {layout['heads']} heads"
    return [
        f"{record['folder']}: an n-gram memory, {source}",
        f"holds: the small tensors of a {record['class']}: {sizes}",
        f"table: {rows}, in {len(files)} files:",
        *(
            f"  {name}: {part['size']:,} bytes, header {part['header']}"
            for name, part in files.items()
        ),
        f"layout: {layout['family']}, {orders}, digest {layout['digest']}",
        f"vocabulary: {layout['vocabulary'] or 'tokens are not merged'}",
    ]
