"""Triton kernels for NVIDIA GPUs, called through jax-triton."""

import functools
import importlib.metadata
import importlib.util
import re

from lutjax.dispatch.registry import Request
from lutjax.kernels._nvidia import unsupported_generation

ABSENT = {
    "detect_signs": "a few comparisons per distance, which XLA compiles to one small loop",
    "margins": (
        "comparisons and one product, which XLA computes; before tables, scored_lut computes them "
        "in its own kernel"
    ),
    "packed_lut": "bitwise operations on words, which XLA compiles to one memory-bound loop",
}
"""Reasons for deliberately missing kernels, by op."""


def supports(request: Request) -> str | None:
    """Return the reason that no Triton kernel supports a device, or None."""
    # Kernels use bfloat16 tensor-core products and cp.async, which need Ampere.
    return unsupported_generation(request.device, 80) or unfit_packages()


@functools.cache
def unfit_packages() -> str | None:
    """Return the reason that the installed packages are incompatible, or None."""
    try:
        jax_triton, triton = version("jax-triton"), version("triton")
    except importlib.metadata.PackageNotFoundError as error:
        return f"needs {error.name}, not installed"
    if jax_triton < (0, 3):
        return f"needs jax-triton 0.3.1 or newer, found {importlib.metadata.version('jax-triton')}"
    if jax_triton >= (0, 4) and triton < (3, 7):
        return (
            f"jax-triton {importlib.metadata.version('jax-triton')} needs triton 3.7 or newer, "
            f"found {importlib.metadata.version('triton')}; jax-triton 0.3.1 works with it"
        )
    # The kernels run only in a jax with a CUDA plugin.
    if not any(importlib.util.find_spec(f"jax_cuda{n}_plugin") for n in (12, 13)):
        return "needs jax with CUDA: pip install 'jax[cuda13]'"
    return None


def version(package: str) -> tuple[int, ...]:
    numbers = re.findall(r"\d+", importlib.metadata.version(package))
    return tuple(int(n) for n in numbers[:2])
