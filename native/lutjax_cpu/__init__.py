"""Native kernels of lutjax for CPUs. Importing this package does nothing; lutjax finds it by its entry point."""

from typing import Any

KERNELS: dict[str, tuple[str, ...]] = {
    "lookup": ("forward",),
    "bilinear_gates": ("forward", "backward"),
    "soft_lut": ("forward", "backward"),
    "binary_lut": ("forward", "backward"),
    "packed_lut": ("forward",),
}
"""The ops that have kernels here, with their directions."""


def register(registry: Any) -> None:
    """Register the kernels; called by lutjax when it first looks for implementations."""
    from lutjax_cpu import _fit

    for op, directions in KERNELS.items():
        registry.register(
            op,
            "native",
            "cpu",
            f"lutjax_cpu.kernels.{op}",
            directions=directions,
            unsupported=_fit.unsupported,
            slower=_fit.slower,
        )
