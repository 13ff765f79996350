"""Models over HTTP: an ASGI application for text models, by the completion interface that clients speak, and for classifiers, by a call in JSON.

`application(model)` returns it, for any ASGI server; ``lutjax serve DIR`` runs it with uvicorn. They need the extra ``serve``.
"""

import importlib
from typing import TYPE_CHECKING, Any

from lutjax._extras import needed_by

if TYPE_CHECKING:
    from lutjax.serving._app import application
    from lutjax.serving._limits import Limits

__all__ = ["Limits", "application"]

_MODULES = {"Limits": "_limits", "application": "_app"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with needed_by(f"{__name__}.{name}"):
        module = importlib.import_module(f"{__name__}.{_MODULES[name]}")
    return getattr(module, name)


def __dir__() -> list[str]:
    return sorted(__all__)
