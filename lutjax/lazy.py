"""Lazy imports for submodules."""

import importlib
import importlib.util
from collections.abc import Callable
from types import ModuleType


def modules_of(package: str) -> Callable[[str], ModuleType]:
    """Return a package ``__getattr__`` for lazily importing public modules."""

    def get(name: str) -> ModuleType:
        module = f"{package}.{name}"
        if name.startswith("_") or importlib.util.find_spec(module) is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return importlib.import_module(module)

    return get
