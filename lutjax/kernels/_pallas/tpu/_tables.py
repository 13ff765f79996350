"""How TensorCores read tables: all rows from vector memory, or by one-hot matrices. Imports no Pallas."""

import math

from lutjax.kernels._pallas import _tpus
from lutjax.kernels._pallas.tpu._limits import LANES
from lutjax.kernels.registry import Call, Device

# Rows from which tables are read from vector memory row by row, where that holds them, not by one-hot matrices.
MANY_ROWS = 1024


def resident_outputs(shape: tuple[int, ...], device: Device) -> int | None:
    """How many outputs of all rows of such tables, in float32, half the vector memory holds; None: none."""
    lines = -(-shape[2] // LANES)
    for blocks in range(1, lines + 1):
        outputs = lines // blocks * LANES
        most = _tpus.limits(device).vmem // 2
        if lines % blocks == 0 and resident_bytes(shape, outputs) <= most:
            return outputs
    return None


def resident_bytes(shape: tuple[int, ...], outputs: int) -> int:
    """Bytes of so many outputs of all rows."""
    n_detectors, n_rows, _ = shape
    return 4 * outputs * n_detectors * n_rows


def resident(shape: tuple[int, ...], device: Device) -> bool:
    """Whether tables are read from vector memory row by row."""
    return shape[1] >= MANY_ROWS and resident_outputs(shape, device) is not None


_WHOLE = 2**24  # numbers of the largest sparse table that is made whole


def _whole_shape(call: Call) -> tuple[int, ...]:
    """The shape of the tables that a call multiplies or reads."""
    n_detectors, n_rows, n_outputs = call.arguments[0].shape
    return n_detectors, n_rows, call.options.get("n_outputs", n_outputs)


def unsupported(call: Call) -> str | None:
    """Why tables do not fit; None if they do."""
    if call.op.startswith("sparse_lookup") and math.prod(_whole_shape(call)) > _WHOLE:
        return (
            f"reads the whole table, zeros too: {list(_whole_shape(call))} is larger than the {_WHOLE} numbers that it "
            "makes of a sparse one"
        )
    return None


def slower(call: Call) -> str | None:
    """Why the next implementation comes first for a call that would fit; None if this one does."""
    shape = _whole_shape(call)
    if resident(shape, call.device):
        return None
    if shape[1] > MANY_ROWS // 2:
        return (
            f"gathers are faster: tables of {list(shape)} do not fit vector memory, and one-hot matrices of "
            f"{shape[1]} rows are slow"
        )
    additive = call.op != "sparse_lookup_update" and (
        call.op != "lookup_update" or (call.options["rule"].additive and call.arguments[0].dtype == "float32")
    )
    if additive:
        return f"plain JAX multiplies with one-hot matrices too for at most {MANY_ROWS // 2} rows, as fast"
    return None
