"""Rules that say which calls SparseCore kernels fit. Imports no Pallas: the registry asks at every call."""

import jax

from lutjax.kernels._pallas import _tpus
from lutjax.kernels._pallas.sparsecore import _sizes
from lutjax.kernels.registry import Request
from lutjax.ops.lookup import Lookup
from lutjax.ops.lookup_attention import LookupAttention
from lutjax.ops.lut_pair_attention import LutPairAttention
from lutjax.ops.sparse_lookup import SparseLookup

LookUp = Lookup | SparseLookup | LookupAttention | LutPairAttention


def unsupported(request: Request) -> str | None:
    """Return why a call cannot run on the SparseCores of its device; None if it can."""
    tpu = _tpus.generation(request.device)
    if tpu is None or tpu.sparse_cores is None:
        return f"needs a TPU with SparseCores that gather rows: v5p, v6e or v7x, not {request.device.kind}"
    return unsupported_arguments(request)


def unsupported_arguments(request: Request) -> str | None:
    """Return why the arrays or options of a call do not fit, on whatever device."""
    if request.direction == "update":
        return "leaves updates to plain JAX: SparseCores overwrite rows in HBM, they do not add to them"
    call = _look_up(request)
    for leaf in jax.tree.leaves(call):
        if leaf.dtype.name not in ("float32", "int32"):
            return f"has no kernel for {leaf.dtype}: rows are added up as they arrive, in their own dtype"
    if call.accumulate is not None:
        return "adds in float32, not in fixed point"
    forward, n_outputs = request.direction == "forward", call.weights.shape[2]
    if isinstance(call, SparseLookup):
        rows = 1 if forward else 2
        what = f"{rows} row{'s' * (rows > 1)} of {n_outputs} values and {call.n_outputs} outputs"
        numbers = _sizes.numbers_of_sparse_lookup(n_outputs, call.n_outputs, rows=rows)
    elif forward:
        what, numbers = f"rows of {n_outputs} outputs", _sizes.width(n_outputs)
    else:
        what = f"two rows of {n_outputs} outputs and their cotangents"
        numbers = _sizes.numbers_of_differences(n_outputs)
    most = _sizes.most_numbers(_sizes.sparse_cores(request.device))
    if numbers <= most:
        return None
    return f"holds at most {most} numbers of a sample in the memory of a subcore; {what} are {numbers}"


_FEW_ROWS = 512  # of a detector
_TABLE_IN_READS = 8


def slower(request: Request) -> str | None:
    """Return why the next implementation comes first for a call that would fit: none of it has been timed.

    One-hot products and tables in the memory of a TensorCore were far ahead of anything that gathers from HBM, in the
    compiler's static profile; SparseCores are not in it. XLA's gather took 7 ns a row there, and laying out a row of
    32 numbers anew moves bytes for 0.8 ns.
    """
    call = _look_up(request)
    weights, reads = call.weights, _reads(call)
    n_detectors, n_rows, n_outputs = weights.shape
    if n_rows <= _FEW_ROWS:
        return f"tables of at most {_FEW_ROWS} rows, here {n_rows}, are left to one-hot products"
    n_bytes, memory = weights.size * weights.dtype.itemsize, _tpus.limits(request.device).vmem
    if 2 * n_bytes <= memory:
        return f"a table of {n_bytes} bytes is left to TensorCores: it fits half their memory of {memory}"
    narrow = isinstance(call, SparseLookup) or n_outputs % _sizes.TILE
    if narrow and _TABLE_IN_READS * reads < n_detectors * n_rows:
        return (
            f"a table of {n_detectors * n_rows} rows that are no whole tiles of {_sizes.TILE} numbers is copied at "
            f"every call, for {reads} reads"
        )
    return None


def _look_up(request: Request) -> LookUp:
    assert isinstance(request.call, LookUp)
    return request.call


def _reads(call: LookUp) -> int:
    """Return the number of rows that a call reads."""
    if isinstance(call, Lookup | SparseLookup):
        return call.detection.index.size
    queries, keys = (call.x, call.keys) if isinstance(call, LutPairAttention) else (call.query, call.key)
    n_samples, n_queries, _ = queries.shape
    n_keys = keys.shape[1] if call.window is None else min(call.window, keys.shape[1])
    return n_samples * n_queries * n_keys * call.weights.shape[0] // 2  # keys are earlier: half of all pairs
