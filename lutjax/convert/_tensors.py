"""Tensors in files written by other packages; no file content is executed."""

import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Shaped

from lutjax.convert.errors import ConversionError
from lutjax.extras import require_optional
from lutjax.files.messages import in_a_line

Tensors = Mapping[str, Shaped[np.ndarray, "..."]]

MOST_BYTES = 1 << 34
"""Maximum file size in bytes."""


def read(path: str | os.PathLike[str]) -> dict[str, Shaped[np.ndarray, "..."]]:
    """Read tensors by name from a safetensors file or a PyTorch state dict.

    PyTorch files (``.pt``, ``.pth``, ``.bin``) are read by ``torch.load(weights_only=True)``, which
    runs no code in the file; this requires PyTorch. It takes at most 100 times the memory of the
    file.

    Raises:
      ConversionError: the file is missing or damaged, or holds anything except tensors.
      ModuleNotFoundError: a package is missing.
    """
    place = Path(path)
    if not place.is_file():
        raise ConversionError(f"{place} is no file.")
    if place.stat().st_size > MOST_BYTES:
        raise ConversionError(
            f"{place} has {place.stat().st_size:,} bytes; at most {MOST_BYTES:,} are read."
        )
    read_file = _read_torch if place.suffix in (".pt", ".pth", ".bin") else _read_safetensors
    tensors = read_file(place)
    if not tensors:
        raise ConversionError(f"{place} has no tensors.")
    return tensors


def _read_safetensors(path: Path) -> dict[str, Any]:
    with require_optional("lutjax.convert"):
        from safetensors import SafetensorError, safe_open
    try:
        with safe_open(path, framework="np") as file:
            return {name: file.get_tensor(name) for name in sorted(file.keys())}
    # AttributeError: a dtype unknown to NumPy.
    except (SafetensorError, AttributeError, ValueError) as error:
        raise ConversionError(f"{path} is no file of safetensors: {in_a_line(error)}") from error


def _read_torch(path: Path) -> dict[str, Any]:
    if importlib.util.find_spec("torch") is None:
        raise ModuleNotFoundError(
            f"{path} is a file of PyTorch, which is not installed here: "
            "install it, or save the state dict there "
            "by safetensors.torch.save_file(model.state_dict(), 'model.safetensors').",
            name="torch",
        )
    torch: Any = importlib.import_module("torch")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ConversionError(
            f"{path} cannot be read as tensors alone: PyTorch's loader of weights refuses it. "
            "Save a state dict, not a model."
        ) from error
    if not isinstance(content, dict) or not all(isinstance(name, str) for name in content):
        raise ConversionError(f"{path} holds no state dict. Save model.state_dict().")
    others = [name for name, value in content.items() if not torch.is_tensor(value)]
    if others:
        raise ConversionError(
            f"{path}: {in_a_line(others[0], 80)} is no tensor. Save model.state_dict()."
        )

    def to_numpy(tensor: Any) -> np.ndarray:
        if tensor.dtype == torch.bfloat16:  # unknown to NumPy
            tensor = tensor.float()
        values: np.ndarray = tensor.detach().cpu().numpy()
        return values

    return {name: to_numpy(tensor) for name, tensor in content.items()}
