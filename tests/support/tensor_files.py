"""Writers for small safetensors and GGUF files in the layouts used by published memory tables."""

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

import lutjax
from lutjax.convert import convert_memory


def write_safetensors(path: Path, tensors: Mapping[str, tuple[str, np.ndarray]]) -> Path:
    """Write tensors ``{name: (dtype, bytes or numbers)}``; bfloat16 as uint16, float8 as uint8."""
    header, at = dict[str, Any](), 0
    for name, (dtype, a) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(a.shape), "data_offsets": [at, at + a.nbytes]}
        at += a.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(
        struct.pack("<Q", len(text)) + text + b"".join(a.tobytes() for _, a in tensors.values())
    )
    return path


def write_gguf(path: Path, name: str, rows: np.ndarray) -> Path:
    """Write one I8 tensor, after metadata entries with several types."""

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    values = [
        text("general.architecture") + struct.pack("<I", 8) + text("deepseek41"),
        text("general.alignment") + struct.pack("<II", 4, 64),
        text("map") + struct.pack("<IIQ", 9, 5, 3) + np.arange(3, dtype=np.int32).tobytes(),
        text("words") + struct.pack("<IIQ", 9, 8, 2) + text("a") + text("bc"),
        text("half") + struct.pack("<If", 6, 0.5),
    ]
    head = b"GGUF" + struct.pack("<IQQ", 3, 1, len(values)) + b"".join(values)
    head += text(name) + struct.pack("<IQQIQ", 2, rows.shape[1], rows.shape[0], 24, 0)
    path.write_bytes(head + b"\0" * (-len(head) % 64) + rows.tobytes())
    return path


def write_memory_of_bytes(folder: Path, n_tokens: int = 256) -> Path:
    """Write a checkpoint with the memory of a model of bytes, and convert it; return the bundle."""
    config = {
        "ple_layer_ids": [1], "ngram_size": 3, "heads_per_ngram": 2, "ple_embed_dim": 32, "ngram_vocab_size_base": 100,
        "vocab_size": n_tokens, "eos_token_id": 0, "hc_count": 1, "hidden_size": 8, "ple_conv_kernel_size": 4,
        "rms_norm_eps": 1e-6,
    }  # fmt: skip
    rng, n_rows = np.random.default_rng(0), lutjax.NgramLayout.qwen(config).n_rows
    shapes = {"key_proj": (8, 32), "value_proj": (8, 32), "conv1d": (8, 1, 4), "norm_key": (8,)}
    shapes |= {
        "norm_query": (8,),
        "norm_conv": (8,),
        "ple_embedding.ngram_embedding.shard_0": (n_rows, 8),
    }
    tensors = {
        f"model.layers.0.ple.{name}.weight": ("BF16", (rng.standard_normal(shape, np.float32).view(np.uint32) >> 16).astype(np.uint16))
        for name, shape in shapes.items()
    }  # fmt: skip
    folder.mkdir()
    write_safetensors(folder / "model.safetensors", tensors)
    (folder / "config.json").write_text(json.dumps(config))
    convert_memory(folder, folder / "bundle", family="ple")
    return folder / "bundle"
