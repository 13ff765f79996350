"""Models made of the layers: `LUTTransformer` (Flax NNX)."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lutjax.models.transformer import LUTTransformer, LUTTransformerConfig

__all__ = ["LUTTransformer", "LUTTransformerConfig"]

_MODULES = {"LUTTransformer": "transformer", "LUTTransformerConfig": "transformer"}


def __getattr__(name: str) -> Any:
    # The models need Flax; `import lutjax.models` does not.
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
