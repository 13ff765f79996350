"""Ops, one module each. `apply` runs built-in and user-defined ops.

The other functions check arguments the same way as the ops.
"""

from lutjax.dispatch._transforms import apply
from lutjax.ops._checks import describe, integers, require, segments

__all__ = ["apply", "describe", "integers", "require", "segments"]
