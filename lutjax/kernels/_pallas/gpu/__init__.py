"""Pallas kernels for NVIDIA GPUs (Mosaic GPU): Hopper and newer.

Kernel modules import Pallas in the functions that launch: a call that Triton runs does without it.
"""

from lutjax.dispatch.registry import Request
from lutjax.kernels._nvidia import compute_capability


def supports(request: Request) -> str | None:
    """Return why no Mosaic GPU kernel runs on a device; None if some do."""
    device = request.device
    capability = compute_capability(device)
    if capability is None:
        return f"needs an NVIDIA GPU whose compute capability is known, not {device.kind}"
    if capability < 90:
        return f"needs compute capability 9.0 or newer, {device.kind} has {capability / 10}"
    return None
