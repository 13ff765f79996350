"""Support rules shared by Mosaic GPU kernels."""

from collections.abc import Iterable

import jax

from lutjax.dispatch.registry import Deferral, Request
from lutjax.kernels import _triton

# Ids are packed four to a word, so a table has at most 2**8 rows; 128 rows of 128 float32 outputs
# fill a stage of 64 KiB (see `_shared_tables`).
MAX_ROWS = 128  # of a table in shared memory
# Kernels compute places in int32.
_ELEMENTS = 2**31  # larger arrays have not been tried


def unsupported_arrays(request: Request) -> str | None:
    """Return the reason that a call's dtypes or empty arrays are unsupported, or None."""
    # All leaves, also gradients and optimizer state: one unsupported dtype fails the whole kernel.
    for leaf in jax.tree.leaves((request.call, request.cotangent, request.step)):
        if leaf.dtype.name not in ("float32", "bfloat16", "float16", "int32"):
            return f"has no kernel for {leaf.dtype}"
        # Vectors may be empty: a read may have no scalars.
        if leaf.ndim > 1 and 0 in leaf.shape:
            return "has no kernel for arrays without elements"
    return None


def lacks_triton(use: str) -> str | None:
    """Return the reason that Triton, which a kernel also launches, is unusable, or None."""
    why = _triton.unfit_packages()
    return None if why is None else f"{use}, and Triton {why}"


def too_many(elements: int) -> str | None:
    """Return the reason that arrays with this many elements are unsupported, or None."""
    if elements < _ELEMENTS:
        return None
    return f"has been tried on arrays of fewer than 2^31 numbers, here {elements}"


def fewer_than_measured(sizes: Iterable[tuple[str, int, int]]) -> Deferral | None:
    """Return a deferral for the first size below its measured minimum, or None.

    Args:
      sizes: name, value and smallest value measured to be faster than Triton.
    """
    for name, number, fewest in sizes:
        if number < fewest:
            return Deferral(
                f"was measured faster than Triton from {fewest} {name} on, here {number}"
            )
    return None
