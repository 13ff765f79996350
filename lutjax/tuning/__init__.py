"""Launches of kernels: the sizes of their programs, chosen by a call, else measured on the device, else by a rule beside the kernel.

Nothing is measured in a user's call: ``lutjax tune`` measures, and writes a file.
"""

from lutjax.tuning._files import (
    Document as Document,
    Entry as Entry,
    Key as Key,
    load,
    measured,
    read as read,
)
from lutjax.tuning._launch import Launch, Sizes, bucket as bucket
from lutjax.tuning._launches import Asked, launch_of, launched, recorded, use

__all__ = ["Asked", "Launch", "Sizes", "launch_of", "launched", "load", "measured", "recorded", "use"]
