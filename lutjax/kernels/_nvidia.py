"""NVIDIA GPU generations; the only module with this data. Imports neither Triton nor Pallas."""

import functools
import re

import jax

from lutjax.dispatch.registry import Device

# Compute capabilities by device name, for compilation without the device.
_BY_NAME = {
    r"A100|A30\b|A800": 80,
    r"A10\b|A10G|A16\b|A40\b|RTX A\d|RTX 30": 86,
    r"L4\b|L40|RTX 40|Ada Generation": 89,
    r"H100|H200|H800|H20\b": 90,
    r"B100|B200": 100,
    r"B300": 103,
    r"RTX 50|Blackwell": 120,
}
# Maximum shared memory per program, in bytes.
_SHARED_MEMORY = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99}


@functools.cache
def compute_capability(device: Device) -> int | None:
    """Return ten times the compute capability, as in sm_90; None for unknown or other devices."""
    for local in jax.local_devices():
        if local.device_kind == device.kind and hasattr(local, "compute_capability"):
            major, _, minor = str(local.compute_capability).partition(".")
            return 10 * int(major) + int(minor or 0)
    if "NVIDIA" not in device.kind:
        return None
    return next((c for name, c in _BY_NAME.items() if re.search(name, device.kind)), None)


def shared_memory(device: Device) -> int:
    """Return the maximum shared memory per program, in bytes."""
    return 1024 * _SHARED_MEMORY.get(compute_capability(device) or 0, 99)


def unsupported_generation(device: Device, least: int) -> str | None:
    """Return the reason that a device lacks a compute capability, or None."""
    capability = compute_capability(device)
    if capability is None:
        return f"needs an NVIDIA GPU whose compute capability is known, not {device.kind}"
    if capability < least:
        return (
            f"needs compute capability {least / 10} or newer, {device.kind} has {capability / 10}"
        )
    return None
