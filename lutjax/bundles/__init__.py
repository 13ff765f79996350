"""Bundles: models in folders that hubs of models take, and that everybody reads.

`lutjax.save` writes one and `lutjax.load` reads it as a model; `read` gives its arrays without making a model of them. They need the extra ``bundles``,
and models of Flax NNX the extra ``apps``.
"""

from typing import TYPE_CHECKING, Any

from lutjax.extras import attribute, importable

if TYPE_CHECKING:
    from lutjax.bundles._reading import Bundle, read
    from lutjax.bundles.errors import BundleError

__all__ = ["Bundle", "BundleError", "read"]

_MODULES = {"Bundle": "_reading", "BundleError": "errors", "read": "_reading"}


def __getattr__(name: str) -> Any:
    return attribute(__name__, name, _MODULES)


def __dir__() -> list[str]:
    return importable(__name__, _MODULES)
