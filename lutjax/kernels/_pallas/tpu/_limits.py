"""Register shape and memory limits of TensorCores. Imports no Pallas."""

from typing import Any

from lutjax.dispatch.registry import Device
from lutjax.kernels._pallas import _tpus

# Shape of a register of 32-bit elements.
SUBLANES, LANES = 8, 128


def vmem_budget(device: Device) -> int:
    """Return the bytes of vector memory that blocks may take: the compiler needs some itself."""
    # Blocks are estimated; the compiler also keeps spills and temporaries in vector memory.
    return _tpus.limits(device).vmem * 3 // 4


def params(device: Device, **options: Any) -> Any:
    """Return compiler parameters that let a kernel use the vector memory of its chip."""
    # Rules import this module where Pallas is not installed, or not needed.
    from jax.experimental.pallas import tpu as pltpu

    # The default limit of the compiler is below the memory of most chips.
    return pltpu.CompilerParams(vmem_limit_bytes=_tpus.limits(device).vmem * 15 // 16, **options)
