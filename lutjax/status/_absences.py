"""Reasons for deliberately missing kernels, as their packages state them."""

from collections.abc import Mapping

from lutjax.dispatch.registry import kernel_registry
from lutjax.kernels import _triton
from lutjax.kernels._pallas import gpu, tpu
from lutjax.kernels._pallas.gpu import Measured as Measured

# By column, then by op and direction, by op or by direction.
ABSENT: dict[str, Mapping[str, str | Measured]] = {
    "triton/gpu": _triton.ABSENT,
    "pallas/gpu": gpu.ABSENT,
    "pallas/tpu": tpu.ABSENT,
}


def absence_reason(op: str, direction: str, column: str) -> str | None:
    """Return the reason, or None for a missing kernel."""
    of_column = ABSENT.get(column, {})
    for key in (f"{op} {direction}", op, direction):
        if key in of_column:
            return str(of_column[key])
    decomposed = any(spec.is_decomposition for spec in kernel_registry.candidates(op))
    if decomposed and kernel_registry.announced(op, column) is None:
        return "runs by its parts, which have kernels"
    return None
