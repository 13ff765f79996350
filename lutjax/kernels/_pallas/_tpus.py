"""TPU generations with kernels, and the sizes that decide their blocks.

Imports no Pallas: rules ask for these sizes at every call, also where no TPU is installed.
"""

import dataclasses
import re

from lutjax.dispatch.registry import Device


@dataclasses.dataclass(frozen=True)
class TPU:
    """TPU generation.

    Attributes:
      name: short name. kinds: pattern that matches `device_kind`.
      topology: smallest topology for ahead-of-time compilation.
      vmem: vector memory per TensorCore in bytes.
      bandwidth: HBM bandwidth per device in bytes per second.
      flops: bfloat16 matrix multiplications and additions per second and device.
      mxu: rows and columns of each matrix unit; a TensorCore has four.
    """

    name: str
    kinds: str
    device_kind: str
    topology: str
    vmem: int
    bandwidth: float
    flops: float
    mxu: int

    @property
    def clock(self) -> float:
        """Return the cycles a second."""
        # Four matrix units, each with mxu**2 multiplications and additions per cycle.
        return self.flops / (4 * 2 * self.mxu**2)


_MIB = 2**20
TPUS = (
    TPU("v4", r"v4$", "TPU v4", "v4:2x2x1", 16 * _MIB, 615e9, 137.5e12, 128),
    TPU("v5e", r"v5 ?(lite|e)$", "TPU v5 lite", "v5e:2x2", 128 * _MIB, 820e9, 197e12, 128),
    TPU("v5p", r"v5p?$", "TPU v5", "v5p:2x2x1", 64 * _MIB, 1230e9, 229.5e12, 128),
    TPU("v6e", r"v6 ?(lite|e)$", "TPU v6 lite", "v6e:2x2", 128 * _MIB, 1640e9, 920e12, 256),
    TPU("v7x", r"(v7x|7x)$", "TPU7x", "TPU7x:2x2x1", 64 * _MIB, 3700e9, 1155e12, 256),
)
# Kernels interpreted on a CPU use the blocks of a v5e, so that tests run the code of a real chip.
_INTERPRETED = TPUS[1]


def generation(device: Device) -> TPU | None:
    """Return a device's TPU generation, or None for other devices and unknown generations."""
    # Patterns below are short, such as `v4$`, and could match the names of other devices.
    if "TPU" not in device.kind:
        return None
    # Unknown generations are None, not an error: plain JAX runs there.
    return next((tpu for tpu in TPUS if re.search(tpu.kinds, device.kind)), None)


def limits(device: Device) -> TPU:
    """Return a device's TPU generation, or the v5e where kernels are interpreted."""
    return generation(device) or _INTERPRETED


def find_generation(name: str) -> TPU:
    """Return the TPU generation with this name.

    Raises:
      ValueError: unknown name.
    """
    for tpu in TPUS:
        if tpu.name == name:
            return tpu
    raise ValueError(
        f"unknown TPU {name!r}; those with kernels are {', '.join(t.name for t in TPUS)}."
    )
