"""Modules of a package that are imported when they are first used."""

import importlib
import importlib.util
from collections.abc import Callable
from types import ModuleType


def modules_of(package: str) -> Callable[[str], ModuleType]:
    """Return the ``__getattr__`` of a package all of whose public modules are its attributes.

    Raises:
      AttributeError: there is no public module of this name; of the function that is returned.
    """

    def get(name: str) -> ModuleType:
        module = f"{package}.{name}"
        if name.startswith("_") or importlib.util.find_spec(module) is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return importlib.import_module(module)

    return get
