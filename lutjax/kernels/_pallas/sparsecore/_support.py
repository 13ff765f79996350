"""Which calls and devices SparseCore kernels fit. Imports no Pallas: the registry asks at every call."""

import jax

from lutjax.kernels._pallas import _tpus
from lutjax.kernels._pallas.sparsecore import _sizes
from lutjax.kernels.registry import Call


def unsupported(call: Call) -> str | None:
    """Why a call cannot run on the SparseCores of its device; None if it can."""
    tpu = _tpus.generation(call.device)
    if tpu is None or tpu.sparse_cores is None:
        return f"needs a TPU with SparseCores that gather rows: v5p, v6e or v7x, not {call.device.kind}"
    return unsupported_arguments(call)


def unsupported_arguments(call: Call) -> str | None:
    """The same, of what the call computes."""
    if call.op.endswith("_update"):
        return "leaves updates to plain JAX: SparseCores overwrite rows in HBM, they do not add to them"
    for leaf in jax.tree.leaves(call.arguments):
        if leaf.dtype.name not in ("float32", "int32"):
            return f"has no kernel for {leaf.dtype}: rows are added up as they arrive, in their own dtype"
    if call.options.get("accumulate") is not None:
        return "adds in float32, not in fixed point"
    return _too_long(call)


def _too_long(call: Call) -> str | None:
    """Why rows do not fit the memory of a subcore; None if they do."""
    n_outputs = _weights(call).shape[2]
    forward = call.direction == "forward"
    if call.op == "sparse_lookup":
        rows = 1 if forward else 2
        what = f"{rows} row{'s' * (rows > 1)} of {n_outputs} values and {call.options['n_outputs']} outputs"
        numbers = _sizes.numbers_of_sparse_lookup(n_outputs, call.options["n_outputs"], rows=rows)
    elif forward:
        what, numbers = f"rows of {n_outputs} outputs", _sizes.width(n_outputs)
    else:
        what, numbers = (
            f"two rows of {n_outputs} outputs and their cotangents",
            _sizes.numbers_of_differences(n_outputs),
        )
    most = _sizes.most_numbers(_sizes.sparse_cores(call.device))
    if numbers <= most:
        return None
    return f"holds at most {most} numbers of a sample in the memory of a subcore; {what} are {numbers}"


_FEW_ROWS = 512  # of a detector
_TABLE_IN_READS = 8


def slower(call: Call) -> str | None:
    """Why the next implementation comes first for a call that would fit: none of it has been timed.

    One-hot products and tables in the memory of a TensorCore were far ahead of anything that gathers from HBM, in the
    compiler's static profile; SparseCores are not in it. XLA's gather took 7 ns a row there, and laying out a row of
    32 numbers anew moves bytes for 0.8 ns.
    """
    weights = _weights(call)
    n_detectors, n_rows, n_outputs = weights.shape
    if n_rows <= _FEW_ROWS:
        return f"tables of at most {_FEW_ROWS} rows, here {n_rows}, are left to one-hot products"
    n_bytes, memory = weights.size * weights.dtype.itemsize, _tpus.limits(call.device).vmem
    if 2 * n_bytes <= memory:
        return f"a table of {n_bytes} bytes is left to TensorCores: it fits half their memory of {memory}"
    narrow = call.op == "sparse_lookup" or n_outputs % _sizes.TILE
    if narrow and _TABLE_IN_READS * _reads(call) < n_detectors * n_rows:
        return (
            f"a table of {n_detectors * n_rows} rows that are no whole tiles of {_sizes.TILE} numbers is copied at "
            f"every call, for {_reads(call)} reads"
        )
    return None


def _weights(call: Call) -> jax.ShapeDtypeStruct:
    weights: jax.ShapeDtypeStruct = call.arguments[2 if call.op == "lut_pair_attention" else 0]
    return weights


def _reads(call: Call) -> int:
    """How many rows a call reads."""
    n_detectors = _weights(call).shape[0]
    if call.op in ("lookup", "sparse_lookup"):
        return call.arguments[1].index.size
    queries, keys = call.arguments[:2] if call.op == "lut_pair_attention" else call.arguments[1:3]
    n_samples, n_queries, _ = queries.shape
    window = call.options["window"]
    n_keys = keys.shape[1] if window is None else min(window, keys.shape[1])
    return n_samples * n_queries * n_keys * n_detectors // 2  # keys are earlier: half of all pairs
