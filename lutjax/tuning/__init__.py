"""Kernel configs: from the call, else measured on the device, else from the kernel's rule.

User calls never measure: ``lutjax tune`` measures and writes a file.
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

__all__ = [
    "Asked",
    "Launch",
    "Sizes",
    "launch_of",
    "launched",
    "load",
    "measured",
    "recorded",
    "use",
]
