"""Pallas kernels for TPU TensorCores."""

from lutjax.dispatch.registry import Request, record_deferral
from lutjax.kernels._pallas import _tpus

ABSENT = {
    "margins": (
        "comparisons and one product, which XLA computes; before tables, scored_lut computes them "
        "in its own kernel"
    )
}
"""Reasons for deliberately missing kernels, by op."""


def supports(request: Request) -> str | None:
    """Return the reason that a device runs no TensorCore kernel by default, or None."""
    # Block sizes depend on the vector memory of a generation, so unknown ones are refused.
    if _tpus.generation(request.device) is None:
        return f"needs a TPU v4, v5e, v5p, v6e or v7x, not {request.device.kind}"
    return record_deferral(request, "pallas/tpu")
