"""TensorCore register shape and memory limits. Imports no Pallas."""

from typing import Any

from lutjax.dispatch.registry import Device
from lutjax.kernels._pallas import _tpus

# Shape of a register of 32-bit elements.
SUBLANES, LANES = 8, 128


def vmem_budget(device: Device) -> int:
    """Return the vector memory available for blocks in bytes; the compiler reserves some."""
    # Blocks are estimated; the compiler also keeps spills and temporaries in vector memory.
    return _tpus.limits(device).vmem * 3 // 4


def params(device: Device, **options: Any) -> Any:
    """Return compiler parameters that raise the memory limit to the chip's vector memory."""
    # Rules import this module where Pallas is not installed, or not needed.
    from jax.experimental.pallas import tpu as pltpu

    # The default limit of the compiler is below the memory of most chips.
    return pltpu.CompilerParams(vmem_limit_bytes=_tpus.limits(device).vmem * 15 // 16, **options)
