"""Conversion of models trained by other packages.

`torchlogix`, `difflogic`, `torch_dwn` and `spiky` convert the tensors returned by `read`.
`convert_memory` and `memory_layer` read published n-gram memories, with tables in their files.

Hard outputs are identical; each function documents the agreement of soft outputs. They need Flax,
and `read` needs safetensors (the extra ``bundles``) or, for PyTorch files, PyTorch.
"""

from typing import TYPE_CHECKING, Any

from lutjax.extras import attribute, importable_names

if TYPE_CHECKING:
    from lutjax.convert._memories import convert_memory, memory_layer
    from lutjax.convert._packages import difflogic, torch_dwn, torchlogix
    from lutjax.convert._spiky import spiky, spiky_layer
    from lutjax.convert._tensors import read
    from lutjax.convert._trees import Image
    from lutjax.convert.errors import ConversionError

__all__ = [
    "ConversionError",
    "Image",
    "convert_memory",
    "difflogic",
    "memory_layer",
    "read",
    "spiky",
    "spiky_layer",
    "torch_dwn",
    "torchlogix",
]

_MODULES = {
    "ConversionError": "errors",
    "Image": "_trees",
    "convert_memory": "_memories",
    "difflogic": "_packages",
    "memory_layer": "_memories",
    "read": "_tensors",
    "spiky": "_spiky",
    "spiky_layer": "_spiky",
    "torch_dwn": "_packages",
    "torchlogix": "_packages",
}


def __getattr__(name: str) -> Any:
    return attribute(__name__, name, _MODULES)


def __dir__() -> list[str]:
    return importable_names(__name__, _MODULES)
