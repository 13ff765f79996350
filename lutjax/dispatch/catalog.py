"""Catalog of the kernels: for each op one row of the platforms and backends that have it.

Adding a kernel to lutjax is a word here and its module, ``lutjax.kernels.<room of the column>.<op>``.
"""

import dataclasses
import functools
import importlib
from collections.abc import Callable

from lutjax.dispatch._parts import Parts
from lutjax.dispatch.contract import DIRECTIONS, Direction
from lutjax.dispatch.registry import Backend, KernelRegistry, Platform, Request

FORWARD: tuple[Direction, ...] = ("forward",)
GRADIENT: tuple[Direction, ...] = ("forward", "backward")
ALL = DIRECTIONS


@dataclasses.dataclass(frozen=True)
class Column:
    """A platform on a backend.

    Attributes:
      room: package of its kernels. fit: module in it with `unsupported` and `slower`; None: every call fits.
      requires: packages that its kernels need. priority: None: the default of the platform.
      awaits_record: whether a kernel is chosen by itself only where a record says that it ran on such a device.
      rates: whether updates take rates that differ by row.
      launches: whether its kernels are those of `LAUNCHES`.
    """

    platform: Platform
    backend: Backend
    room: str
    fit: str | None = None
    requires: tuple[str, ...] = ()
    priority: int | None = None
    awaits_record: bool = False
    rates: bool = False
    launches: bool = False


XLA = Column(Platform.XLA, Backend.ANY, "_xla")
TRITON = Column(
    Platform.TRITON,
    Backend.GPU,
    "_triton",
    "_triton_fit",
    ("jax_triton", "triton"),
    rates=True,
    launches=True,
)
# jax's Mosaic GPU imports absl, and jax does not bring it. It is tried before Triton; `slower` defers to Triton.
MOSAIC = Column(Platform.PALLAS, Backend.GPU, "_pallas.gpu", "_mosaic_fit", ("absl",), 21, rates=True)
# Triton has a part of their kernels: it multiplies by counts of sequences, adds to sparse rows, and reads rows in fixed point.
MOSAIC_AND_TRITON = dataclasses.replace(MOSAIC, requires=("absl", *TRITON.requires), launches=True)
# In packages that are installed beside lutjax: they register their kernels themselves.
NATIVE = Column(Platform.NATIVE, Backend.CPU, "lutjax_cpu.kernels")
# The parts of fused ops: ops that compute them step by step.
PARTS = Column(Platform.XLA, Backend.ANY, "lutjax.dispatch._parts")
TENSORCORE = Column(Platform.PALLAS, Backend.TPU, "_pallas.tpu", "_tensorcore_fit", (), 10, True, True)

KERNELS: dict[str, dict[Column, tuple[Direction, ...]]] = {
    "detect": {XLA: GRADIENT, NATIVE: GRADIENT, TRITON: GRADIENT, TENSORCORE: GRADIENT},
    "detect_signs": {XLA: GRADIENT, NATIVE: GRADIENT, TENSORCORE: GRADIENT},
    "lookup": {XLA: ALL, NATIVE: ALL, TRITON: ALL, MOSAIC_AND_TRITON: ALL, TENSORCORE: ALL},
    "margins": {XLA: GRADIENT, NATIVE: GRADIENT},
    "weighted_lookup": {XLA: ALL, NATIVE: ALL, TRITON: ALL, TENSORCORE: ALL},
    "scored_lut": {XLA: ALL, NATIVE: ALL, TRITON: ALL, MOSAIC_AND_TRITON: ALL, TENSORCORE: ALL},
    "sparse_lookup": {XLA: ALL, NATIVE: ALL, TRITON: ALL, MOSAIC_AND_TRITON: ALL, TENSORCORE: ALL},
    "lut_at_places": {PARTS: GRADIENT, TRITON: GRADIENT},
    "lookup_attention": {XLA: ALL, NATIVE: ALL, TRITON: ALL, MOSAIC_AND_TRITON: ALL, TENSORCORE: ALL},
    "lut_pair_attention": {XLA: ALL, NATIVE: ALL, TRITON: ALL, TENSORCORE: ALL},
    "bilinear_gates": {XLA: GRADIENT, NATIVE: GRADIENT, TRITON: GRADIENT, TENSORCORE: GRADIENT},
    "gate_network": {PARTS: GRADIENT, NATIVE: GRADIENT, TRITON: GRADIENT},
    "logic_trees": {PARTS: GRADIENT, TRITON: GRADIENT},
    "soft_lut": {XLA: GRADIENT, NATIVE: GRADIENT, TRITON: GRADIENT, TENSORCORE: GRADIENT},
    "binary_lut": {XLA: GRADIENT, NATIVE: GRADIENT, TRITON: GRADIENT, MOSAIC: GRADIENT, TENSORCORE: GRADIENT},
    "packed_lut": {XLA: FORWARD, NATIVE: FORWARD, TENSORCORE: FORWARD},
}

LAUNCHES: dict[str, tuple[str, ...]] = {
    "detect": ("forward", "backward"),
    "lookup": ("forward", "margins", "table"),
    "weighted_lookup": ("forward", "products", "table"),
    "scored_lut": ("forward", "backward", "update", "rows", "inputs"),
    "sparse_lookup": ("forward", "margins", "table"),
    "lut_at_places": ("forward", "backward"),
    "lookup_attention": ("forward", "margins", "table"),
    "lut_pair_attention": ("forward", "terms", "table"),
    "bilinear_gates": ("forward", "gates", "inputs"),
    "gate_network": ("forward", "backward"),
    "soft_lut": ("forward", "wires", "readers", "inputs", "table"),
    "binary_lut": ("forward", "wires", "words", "addresses", "inputs", "table"),
}
"""Kernels that ask for a launch, by ``op.kernel``. Those of one op may be launched by another."""


STACKED: dict[str, tuple[Column, ...]] = {"gate_network": (TRITON,)}
"""Kernels that take calls side by side; see `lutjax.dispatch.contract`."""


def register(registry: KernelRegistry) -> None:
    """Register the ops of lutjax and their kernels."""
    for op, row in KERNELS.items():
        registry.register_op(op, f"lutjax.ops.{op}", cases=f"lutjax.cases.{op}")
        for column, directions in row.items():
            if column is NATIVE:
                registry.announce(op, column.platform, column.backend, f"{column.room}.{op}")
                continue
            if column is PARTS:
                registry.register(op, column.platform, column.backend, directions=directions)(Parts)
                continue
            room = f"lutjax.kernels.{column.room}"
            fit = f"{room}.{column.fit}" if column.fit else None
            registry.register(
                op,
                column.platform,
                column.backend,
                f"{room}.{op}",
                requires=column.requires,
                priority=column.priority,
                unsupported=_asked(fit, "unsupported"),
                slower=_asked(fit, "slower"),
                directions=directions,
                awaits_record=column.awaits_record,
                rates=column.rates,
                stacks=column in STACKED.get(op, ()),
                launches=tuple(f"{op}.{kernel}" for kernel in LAUNCHES.get(op, ()) if column.launches),
            )


@functools.cache
def _asked(module: str | None, function: str) -> Callable[[Request], str | None] | None:
    """Return a function of a module that is imported when it is first asked."""
    if module is None:
        return None

    def ask(request: Request) -> str | None:
        why: str | None = getattr(importlib.import_module(module), function)(request)
        return why

    return ask
