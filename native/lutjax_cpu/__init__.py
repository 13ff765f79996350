"""Native CPU kernels for lutjax.

Importing this package has no effect; lutjax finds it through its entry point.
"""

import importlib
from typing import Any

__version__ = "0.2.0"  # that of lutjax, whose inner modules it imports

KERNELS: dict[str, tuple[str, ...]] = {
    "detect": ("forward", "backward"),
    "detect_signs": ("forward", "backward"),
    "lookup": ("forward", "backward", "update"),
    "sparse_lookup": ("forward", "backward", "update"),
    "margins": ("forward", "backward"),
    "weighted_lookup": ("forward", "backward", "update"),
    "scored_lut": ("forward", "backward", "update"),
    "lookup_attention": ("forward", "backward", "update"),
    "lut_pair_attention": ("forward", "backward", "update"),
    "bilinear_gates": ("forward", "backward"),
    "gate_network": ("forward", "backward"),
    "soft_lut": ("forward", "backward"),
    "binary_lut": ("forward", "backward"),
    "packed_lut": ("forward",),
}
"""Ops with native kernels, and their directions."""


def register(registry: Any) -> None:
    """Register the kernels; called by lutjax when it first looks for implementations."""
    from lutjax_cpu import _native

    not_built = _native.not_built()

    def unsupported(request: Any) -> str | None:
        # Imported late: `_fit` imports JAX and the ops.
        if not_built:
            return not_built
        from lutjax_cpu import _fit

        return _native.unsupported() or _fit.unsupported(request)

    for op, directions in KERNELS.items():
        registry.register(
            op,
            "native",
            "cpu",
            f"lutjax_cpu.kernels.{op}",
            directions=directions,
            unsupported=unsupported,
            rates=True,
            about=_native.about,
        )


def load() -> None:
    """Load the library, for processes that only run programs from `jax.export`."""
    importlib.import_module("lutjax_cpu._call")
