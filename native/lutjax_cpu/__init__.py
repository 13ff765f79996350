"""Native kernels of lutjax for CPUs. Importing this package does nothing; lutjax finds it by its entry point."""

from typing import Any

KERNELS: dict[str, tuple[str, ...]] = {
    "detect": ("forward", "backward"),
    "detect_signs": ("forward", "backward"),
    "lookup": ("forward", "update"),
    "lookup_attention": ("forward", "backward", "update"),
    "lut_pair_attention": ("forward", "backward", "update"),
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
