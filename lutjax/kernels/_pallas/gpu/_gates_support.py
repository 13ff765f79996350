"""Which calls of tables over bits the kernels in Mosaic GPU fit. Imports no Pallas."""

import jax

from lutjax.kernels.registry import Call

OPS = ("binary_lut",)
_FLOATS = ("float32", "bfloat16", "float16")
_BLOCK = 512  # samples of a program


def unsupported_arguments(call: Call) -> str | None:
    """Why a call cannot run, by what it computes; None if it can."""
    for leaf in jax.tree.leaves(call.arguments):
        if leaf.dtype.name not in (*_FLOATS, "int32"):
            return f"has no kernel for {leaf.dtype}"
    x, table, wires, _ = call.arguments
    # Of inputs and outputs in blocks, and what a wire receives by the address.
    n_samples = -(-x.shape[1] // _BLOCK) * _BLOCK
    numbers = max(n_samples * max(x.shape[0], wires.shape[0]), table.size * wires.shape[1])
    if numbers >= 2**31:
        return f"has been tried on arrays of fewer than 2^31 numbers, here {numbers}"
    return None


def slower(call: Call) -> str | None:
    """Why the next implementation comes first for a call that would fit; None if this one does."""
    return None
