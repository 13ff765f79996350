"""Kernel packages of lutjax.

A kernel is a module ``lutjax.kernels.<package>.<op>``. Its path gives the op, platform and backend,
and its ``SPEC`` everything else. A new module adds a kernel, and every op with a kernel is an op of
lutjax.
"""

import dataclasses

from lutjax.dispatch._parts import Parts
from lutjax.dispatch.registry import Backend, KernelRegistry, Platform, public_modules


@dataclasses.dataclass(frozen=True)
class Package:
    """Kernel package for a platform on a backend.

    Attributes:
      requires: packages required by all its kernels. priority: None: the platform's default.
    """

    name: str
    platform: Platform
    backend: Backend
    requires: tuple[str, ...] = ()
    priority: int | None = None


PACKAGES = (
    Package("lutjax.kernels._xla", Platform.XLA, Backend.ANY),
    Package("lutjax.kernels._triton", Platform.TRITON, Backend.GPU, ("jax_triton", "triton")),
    # Mosaic GPU imports absl, which jax does not bring. It comes before Triton, and defers to it.
    Package("lutjax.kernels._pallas.gpu", Platform.PALLAS, Backend.GPU, ("absl",), priority=21),
    Package("lutjax.kernels._pallas.tpu", Platform.PALLAS, Backend.TPU),
)

_NATIVE = (
    "detect", "detect_signs", "lookup", "margins", "weighted_lookup", "scored_lut",
    "sparse_lookup", "lookup_attention", "lut_pair_attention", "bilinear_gates", "gate_network",
    "soft_lut", "binary_lut", "packed_lut",
)  # fmt: skip
"""Ops with a native kernel, which the separate package lutjax-cpu registers.

Without it, error messages include the install command.
"""


_ORDER = (
    "detect", "detect_signs", "lookup", "margins", "weighted_lookup", "scored_lut",
    "sparse_lookup", "lut_at_places", "lookup_attention", "lut_pair_attention", "bilinear_gates",
    "gate_network", "logic_trees", "soft_lut", "binary_lut", "packed_lut",
)  # fmt: skip
"""Mathematical order for op listings. Other ops follow by name."""


def register(registry: KernelRegistry) -> None:
    """Register lutjax's ops and their kernels."""
    kernels = {package: public_modules(package.name) for package in PACKAGES}
    found = {op for ops in kernels.values() for op in ops}
    for op in (*_ORDER, *sorted(found - set(_ORDER))):
        registry.register_op(op, f"lutjax.ops.{op}", cases=f"lutjax.cases.{op}")
        if op not in kernels[PACKAGES[0]]:  # a fused op
            directions = ("forward", "backward")
            registry.register(op, Platform.XLA, Backend.ANY, directions=directions)(Parts)
    registry.announce(_NATIVE, Platform.NATIVE, Backend.CPU, "lutjax_cpu.kernels")
    for package in PACKAGES:
        registry.discover(
            package.name,
            package.platform,
            package.backend,
            requires=package.requires,
            priority=package.priority,
        )
