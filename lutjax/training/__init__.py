"""Training: texts, optimisers for tables, loops and checkpoints."""

import importlib.util
from typing import Any


def __getattr__(name: str) -> Any:
    """Import a module of this package when it is first used."""
    module = f"{__name__}.{name}"
    if name.startswith("_") or importlib.util.find_spec(module) is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(module)
