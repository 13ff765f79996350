"""Layers for Flax (`lutjax.layers.nnx`, `lutjax.layers.linen`) and Haiku (`lutjax.layers.haiku`).

The three modules provide layers with the same names, options and variables; import the one you use.
With equal variables, their outputs and gradients are equal.
"""

import importlib
from typing import Any

_LIBRARIES = ("haiku", "linen", "nnx")


def __getattr__(name: str) -> Any:
    if name in _LIBRARIES:
        return importlib.import_module(f"lutjax.layers.{name}")
    raise AttributeError(f"module 'lutjax.layers' has no attribute {name!r}")
