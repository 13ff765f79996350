"""`lutjax.binary_lut` in Mosaic GPU.

For gate g and sample s, with ``address`` of the bits ``x[wires[g]] > 0``::

    y[g, s] = table[g, address[g, s]]
    dtable[g, k] = sum_s dy[g, s] [address[g, s] == k]
    dx[i, s] = sum of dy[g, s] slope[g, l, address[g, s]] over the wires (g, l) that read i

Programs own 512 samples of one gate, or of one input and all its readers; a thread owns four of them. Of `dtable` a program owns a
part of the samples of one gate.
"""

import jax

from lutjax.dispatch.registry import Device
from lutjax.kernels._pallas.gpu import _by_address
from lutjax.kernels._xla import _slot_polynomials, binary_lut as plain
from lutjax.ops.binary_lut import BinaryLut
from lutjax.values._dtypes import accumulator


def forward(call: BinaryLut, *, device: Device) -> jax.Array:
    x = call.x
    if 0 in (x.size, call.wires.size):
        return plain.forward(call, device=device)
    addresses = _by_address.pack_addresses(x, call.wires)
    return _by_address.look_up(addresses, call.table, x.shape[1]).astype(x.dtype)


def backward(
    call: BinaryLut, cotangent: jax.Array, needs: frozenset[str], *, device: Device
) -> dict[str, jax.Array]:
    x, table, wires, readers = call.x, call.table, call.wires, call.readers
    if 0 in (x.size, wires.size):
        return plain.backward(call, cotangent, needs, device=device)
    addresses = _by_address.pack_addresses(x, wires)
    found = {}
    if "table" in needs:
        found["table"] = _by_address.sum_by_address(addresses, cotangent, table.shape[1])
    if "x" in needs and readers is not None and readers.shape[1]:
        slopes = _slot_polynomials.slopes_at_addresses(table.astype(accumulator(x.dtype, table.dtype)))
        found["x"] = _by_address.sum_over_readers(addresses, slopes, readers, cotangent, wires.shape[1])
    elif "x" in needs:
        # Without readers there is nothing to gather, and XLA scatters.
        found |= plain.backward(call, cotangent, frozenset({"x"}), device=device)
    return found
