"""Registers of a TensorCore and memory of a chip, which kernels plan with. Imports no Pallas."""

from typing import Any

from lutjax.dispatch.registry import Device
from lutjax.kernels._pallas import _tpus

# A register of 32-bit numbers.
SUBLANES, LANES = 8, 128


def vmem_budget(device: Device) -> int:
    """Return the bytes of vector memory that blocks may take: the compiler needs some itself."""
    return _tpus.limits(device).vmem * 3 // 4


def params(device: Device, **options: Any) -> Any:
    """Return compiler parameters that let a kernel use the vector memory of its chip."""
    from jax.experimental.pallas import tpu as pltpu

    return pltpu.CompilerParams(vmem_limit_bytes=_tpus.limits(device).vmem * 15 // 16, **options)
