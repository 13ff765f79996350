"""HTTP serving through an ASGI application.

Text models use the common completion interface, classifiers a JSON call.

`application(model)` returns the application for any ASGI server; ``lutjax serve DIR`` runs it with
uvicorn. Both need the extra ``serve``.
"""

from typing import TYPE_CHECKING, Any

from lutjax.extras import attribute, importable_names

if TYPE_CHECKING:
    from lutjax.serving._app import application
    from lutjax.serving._limits import Limits

__all__ = ["Limits", "application"]

_MODULES = {"Limits": "_limits", "application": "_app"}


def __getattr__(name: str) -> Any:
    return attribute(__name__, name, _MODULES)


def __dir__() -> list[str]:
    return importable_names(__name__, _MODULES)
