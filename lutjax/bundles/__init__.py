"""Bundles: models in folders that hubs of models take, and that everybody reads.

`lutjax.save` writes one and `lutjax.load` reads it as a model; `read` gives its arrays without making a model of them. They need the extra ``bundles``,
and models of Flax NNX the extra ``apps``.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lutjax.bundles._reading import Bundle, read
    from lutjax.bundles.errors import BundleError

__all__ = ["Bundle", "BundleError", "read"]

_MODULES = {"Bundle": "_reading", "BundleError": "errors", "read": "_reading"}


def __getattr__(name: str) -> Any:
    # Reading needs safetensors; to ask whether a folder is a bundle does not.
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
