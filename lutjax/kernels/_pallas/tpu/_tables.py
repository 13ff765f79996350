"""Choice between two methods to read tables on TensorCores. Imports no Pallas.

Tables with at least `MANY_ROWS` rows are read row by row from vector memory (`_resident`) if they
fit; other tables are multiplied by one-hot matrices (`_products`), whose cost grows with the number
of rows.
"""

import math

from lutjax.dispatch.registry import Device, Request
from lutjax.kernels._pallas import _tpus
from lutjax.kernels._pallas.tpu._limits import LANES
from lutjax.ops.lookup import Lookup
from lutjax.ops.sparse_lookup import SparseLookup

# Rows from which tables are read from vector memory row by row, where that holds them, not by
# one-hot matrices.
MANY_ROWS = 1024


def resident_outputs(shape: tuple[int, ...], device: Device) -> int | None:
    """Return the number of float32 outputs per row that fit half the vector memory, or None."""
    lines = -(-shape[2] // LANES)
    for blocks in range(1, lines + 1):
        outputs = lines // blocks * LANES
        most = _tpus.limits(device).vmem // 2
        # As few blocks of outputs as possible: each block visits all samples again. Blocks must
        # have equal size.
        if lines % blocks == 0 and resident_bytes(shape, outputs) <= most:
            return outputs
    return None


def resident_bytes(shape: tuple[int, ...], outputs: int) -> int:
    """Return the size of all rows with `outputs` outputs in bytes."""
    n_detectors, n_rows, _ = shape
    return 4 * outputs * n_detectors * n_rows


def is_resident(shape: tuple[int, ...], device: Device, groups: int = 1) -> bool:
    """Return True if tables are read row by row from vector memory."""
    # The resident kernel has one sum per sample, so it does not support groups.
    return groups == 1 and shape[1] >= MANY_ROWS and resident_outputs(shape, device) is not None


_WHOLE = 2**24  # numbers of the largest sparse table that is made whole


def _whole_shape(request: Request) -> tuple[int, int, int]:
    call = request.call
    assert isinstance(call, Lookup | SparseLookup)
    n_detectors, n_rows, n_outputs = call.weights.shape
    return n_detectors, n_rows, call.n_outputs if isinstance(call, SparseLookup) else n_outputs


def unsupported(request: Request) -> str | None:
    """Return the reason that tables do not fit, or None."""
    shape = _whole_shape(request)
    if isinstance(request.call, SparseLookup) and math.prod(shape) > _WHOLE:
        return (
            f"reads the whole table, zeros too: {list(shape)} is larger than the {_WHOLE} numbers "
            "that it makes of a sparse one"
        )
    return None


def slower(request: Request) -> str | None:
    """Return the reason that the next implementation comes first, or None."""
    shape, step, groups = _whole_shape(request), request.step, getattr(request.call, "groups", 1)
    if is_resident(shape, request.device, groups):
        return None
    # Plain JAX multiplies up to this number of rows, so beyond it gathers are the alternative.
    if shape[1] > MANY_ROWS // 2:
        if groups > 1:
            return (
                f"gathers are faster: one-hot matrices of {shape[1]} rows are slow, and groups "
                "are multiplied with them only"
            )
        return (
            f"gathers are faster: tables of {list(shape)} do not fit vector memory, and one-hot "
            f"matrices of {shape[1]} rows are slow"
        )
    if step is not None:
        # Plain JAX moves rows of float32 tables by products where their updates may be added one by
        # one.
        call = request.call
        if not (
            isinstance(call, Lookup) and step.rule.additive and call.weights.dtype == "float32"
        ):
            return None
    return (
        f"plain JAX multiplies with one-hot matrices too for at most {MANY_ROWS // 2} rows, as fast"
    )
