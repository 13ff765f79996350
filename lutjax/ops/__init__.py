"""The ops: a file each, with what it computes and what it accepts. `apply` makes an op of a call, also of one of yours.

The other names check arguments as the ops do.
"""

from lutjax.dispatch._transforms import apply
from lutjax.ops._checks import describe, integers, require, segments

__all__ = ["apply", "describe", "integers", "require", "segments"]
