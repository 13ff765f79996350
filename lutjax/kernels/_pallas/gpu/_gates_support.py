"""Which calls of `binary_lut` the kernels in Mosaic GPU fit. Imports no Pallas: the registry asks at every call."""

from lutjax.kernels.registry import Call

_BLOCK = 512  # samples of a program


def unsupported(call: Call) -> str | None:
    """Why a call does not fit; None if it does."""
    x, table, wires, _ = call.arguments
    # Of inputs and outputs in whole blocks, and of what a wire receives by the address.
    n_samples = -(-x.shape[1] // _BLOCK) * _BLOCK
    numbers = max(n_samples * max(x.shape[0], wires.shape[0]), table.size * wires.shape[1])
    if numbers >= 2**31:
        return f"has been tried on arrays of fewer than 2^31 numbers, here {numbers}"
    return None


# Microseconds on an H200 of both cotangents, float32, as many inputs as gates, every input read as often as a gate reads:
#   gates  samples  bits   Triton   here
#   16384     4096     2      434    448
#   16384     4096     4      559    561
#    4096     2048     4       87     68
#   16384     4096     5      806    636
#   16384     4096     6     1120    721
#   16384      512     6      209    157
#    4096     4096     6      296    160
#    2048     2048     6       92     51
#    4096     2048     8      513    288
# Forward, 16384 gates and 4096 samples of 6 bits: 159 in Triton, 243 here.
_FEWEST_BITS = 5
_FEWEST_INPUTS = 2**22  # inputs times samples
_MOST_UNUSED = 1.5  # entries of the lists of readers for each wire


def slower(call: Call) -> str | None:
    """Why the next implementation comes first for a call that would fit; None if this one does."""
    x, table, wires, readers = call.arguments
    if call.direction == "forward":
        return "was measured slower than Triton forward"
    if x.dtype.name != "float32" or table.dtype.name != "float32":
        return f"was measured faster than Triton for float32 only, not {x.dtype} and tables of {table.dtype}"
    if wires.shape[1] < _FEWEST_BITS:
        return f"was measured faster than Triton from {_FEWEST_BITS} bits on, here {wires.shape[1]}"
    if x.size < _FEWEST_INPUTS:
        return f"was measured faster than Triton from {_FEWEST_INPUTS} inputs on, here {x.size}"
    if x.shape[1] % _BLOCK:
        return f"was measured faster than Triton for multiples of {_BLOCK} samples, here {x.shape[1]}"
    if readers is None:
        return "adds up what the readers of an input receive, and the call gives no readers"
    if readers.size > _MOST_UNUSED * wires.size:
        return f"reads every entry of the lists of readers: {readers.size}, of {wires.size} wires"
    return None
