"""How kernels are cut into programs: chosen by a call, else measured on the device, else by a rule beside the kernel."""

from lutjax.tuning._launches import Launch, Sizes, launch_of, load, measured, use

__all__ = ["Launch", "Sizes", "launch_of", "load", "measured", "use"]
