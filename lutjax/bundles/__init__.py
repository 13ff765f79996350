"""Bundles: portable model folders in the format of model hubs.

`lutjax.save` writes a bundle, `lutjax.load` reads it as a model, and `read` returns its arrays
without a model. They need the extra ``bundles``, and Flax NNX models the extra ``apps``.
"""

from typing import TYPE_CHECKING, Any

from lutjax.extras import attribute, importable_names

if TYPE_CHECKING:
    from lutjax.bundles._reading import Bundle, read
    from lutjax.bundles.errors import BundleError

__all__ = ["Bundle", "BundleError", "read"]

_MODULES = {"Bundle": "_reading", "BundleError": "errors", "read": "_reading"}


def __getattr__(name: str) -> Any:
    return attribute(__name__, name, _MODULES)


def __dir__() -> list[str]:
    return importable_names(__name__, _MODULES)
