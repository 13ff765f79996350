"""Imports that follow the import of JAX, so that `import lutjax` does not import JAX and the command line answers `--help` at once."""

import importlib
import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class _AfterJax:
    """Finder that lets the loader of JAX import another module behind it, once."""

    def __init__(self, module: str):
        self._module = module

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != "jax":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec("jax")
        if spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            load(module)
            importlib.import_module(self._module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def after_jax(module: str) -> None:
    """Import a module now if JAX is imported, else right after JAX."""
    if "jax" in sys.modules:
        importlib.import_module(module)
    else:
        sys.meta_path.insert(0, _AfterJax(module))
