"""Gradient of `lutjax.binary_lut` in Mosaic GPU. The forward pass is left to Triton.

Formula for gate ``g``, sample ``s`` and ``address[g, s]`` with bit ``l`` equal to ``x[wires[g, l],
s] > 0``::

    dtable[g, k] = sum_s dy[g, s] * [address[g, s] == k]
    dx[i, s] = sum over wires (g, l) reading i: dy[g, s] * slope[g, l, address[g, s]]

Work, layout and numerics: see `_by_address`. Programs own 512 samples for one gate, or for one
input with all its readers; for ``dtable``, a sample chunk for one gate.
"""

import jax

from lutjax.dispatch.registry import Declaration, Deferral, Device, Request
from lutjax.kernels._pallas.gpu._rules import fewer_than_measured, too_many, unsupported_arrays
from lutjax.kernels._xla import _slot_polynomials
from lutjax.ops.binary_lut import BinaryLut
from lutjax.values._dtypes import accumulator

_BLOCK = 512  # samples of a program

# Microseconds on an H200 of both cotangents, float32, as many inputs as gates, every input read as
# often as a gate reads:
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
_FEWEST_BITS = 5
_FEWEST_INPUTS = 2**22  # inputs times samples
# Lists are padded to the longest fan-out, and padding costs as much as a reader.
_MOST_UNUSED = 1.5  # entries of the lists of readers for each wire


def _supports(request: Request) -> str | None:
    call = request.call
    assert isinstance(call, BinaryLut)
    if why := unsupported_arrays(request):
        return why
    # Numbers of inputs and outputs in whole blocks, and of the cotangents of a wire by the address.
    n_samples = -(-call.x.shape[1] // _BLOCK) * _BLOCK
    n_gates, bits = call.wires.shape
    if why := too_many(max(n_samples * max(call.x.shape[0], n_gates), call.table.size * bits)):
        return why
    x, table, wires, readers = call.x, call.table, call.wires, call.readers
    if readers is None:
        return "sums over the readers of an input, and the call gives no readers"
    if x.dtype.name != "float32" or table.dtype.name != "float32":
        return Deferral(
            f"was measured faster than Triton for float32 only, not {x.dtype} and tables of "
            f"{table.dtype}"
        )
    few = fewer_than_measured(
        (("bits", wires.shape[1], _FEWEST_BITS), ("inputs", x.size, _FEWEST_INPUTS))
    )
    if few is not None:
        return few
    if x.shape[1] % _BLOCK:
        return Deferral(
            f"was measured faster than Triton for multiples of {_BLOCK} samples, here {x.shape[1]}"
        )
    if readers.size > _MOST_UNUSED * wires.size:
        return Deferral(
            f"reads every entry of the lists of readers: {readers.size}, of {wires.size} wires"
        )
    return None


SPEC = Declaration(_supports)


def backward(
    call: BinaryLut, cotangent: jax.Array, needs: frozenset[str], *, device: Device
) -> dict[str, jax.Array]:
    from lutjax.kernels._pallas.gpu import _by_address

    x, table, wires, readers = call.x, call.table, call.wires, call.readers
    addresses = _by_address.pack_addresses(x, wires)
    cotangents = {}
    if "table" in needs:
        cotangents["table"] = _by_address.sum_by_address(addresses, cotangent, table.shape[1])
    if "x" in needs:
        assert readers is not None, "a call without readers is not chosen"
        # The surrogate gradient depends only on the address: tabulated once per gate, it is one
        # read per reader instead of a polynomial.
        slopes = _slot_polynomials.slopes_at_addresses(
            table.astype(accumulator(x.dtype, table.dtype))
        )
        cotangents["x"] = _by_address.sum_over_readers(
            addresses, slopes, readers, cotangent, wires.shape[1]
        )
    return cotangents
