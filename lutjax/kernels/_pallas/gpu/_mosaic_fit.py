"""Rules that say which calls Mosaic GPU kernels fit. Imports no Pallas: the registry asks at every call."""

import math
from collections.abc import Callable, Iterable

import jax

from lutjax import reads
from lutjax.dispatch.registry import Request
from lutjax.kernels._nvidia import compute_capability
from lutjax.kernels._triton._triton_fit import unfit_packages
from lutjax.ops.binary_lut import BinaryLut
from lutjax.ops.lookup import Lookup
from lutjax.ops.lookup_attention import LookupAttention
from lutjax.ops.scored_lut import ScoredLut
from lutjax.ops.sparse_lookup import EdgeLookup, SparseLookup
from lutjax.tables._row_rules import SGD

_NUMBERS = 2**31  # arrays of more numbers have not been tried


def unsupported(request: Request) -> str | None:
    """Return why a call cannot run on Mosaic GPU; None if it can."""
    device = request.device
    capability = compute_capability(device)
    if capability is None:
        return f"needs an NVIDIA GPU whose compute capability is known, not {device.kind}"
    if capability < 90:
        return f"needs compute capability 9.0 or newer, {device.kind} has {capability / 10}"
    # The gradient of a table is a product of tensor cores.
    if request.op == "lookup" and request.direction != "forward" and capability >= 100:
        return f"multiplies by wgmma, which compute capability 9.0 has and {device.kind} has not"
    return unsupported_arguments(request)


def unsupported_arguments(request: Request) -> str | None:
    """Return why the arrays or options of a call do not fit, on whatever device."""
    for leaf in jax.tree.leaves((request.call, request.cotangent, request.step)):
        if leaf.dtype.name not in ("float32", "bfloat16", "float16", "int32"):
            return f"has no kernel for {leaf.dtype}"
    return _RULES[request.op][0](request)


def slower(request: Request) -> str | None:
    """Return why the next implementation comes first for a call that would fit; None if this one does."""
    return _RULES[request.op][1](request)


def _too_many(numbers: int) -> str | None:
    return (
        f"has been tried on arrays of fewer than 2^31 numbers, here {numbers}"
        if numbers >= _NUMBERS
        else None
    )


def _fewer_than_measured(sizes: Iterable[tuple[str, int, int]]) -> str | None:
    """Return which size, of names, numbers and the fewest that were measured faster, is too small; None if all are large."""
    for name, number, fewest in sizes:
        if number < fewest:
            return f"was measured faster than Triton from {fewest} {name} on, here {number}"
    return None


# ------------------------------------------------------------------------------------- lookup
MAX_ROWS = 128  # of a table that lies in shared memory
_MOST_ROWS_OF_INTEGERS = 2**12  # of which columns do

# Tables of so many rows are kept. Microseconds on an H200, float32, 64 detectors unless said, forward / backward of Triton and here
# (`lookup` alone; both cotangents):
#   samples  outputs  rows       Triton          here
#     16384      512    64   140 /  924     116 / 515
#     16384      512    32   152 /  927     117 / 506
#     16384      256    64    87 /  474      64 / 276
#     16384      512    64    50 /  256      47 / 167   (16 detectors)
#      4096      512    64    53 /  251      58 / 206
#     16384      128    64    55 /  269      62 / 194
#     16384      512   128   186 /  925     183 / 905   (the same, so it is left to Triton)
# For updates, the sums of rows were measured, at the sizes of the first line: 590 in Triton, 288 here.
_FEWEST_ROWS, _MOST_ROWS = 32, 64
_FEWEST_DETECTORS = {"forward": 16, "backward": 16, "update": 64}
_FEWEST_OUTPUTS = {"forward": 256, "backward": 128, "update": 512}
_FEWEST_NUMBERS = {"forward": 2**22, "backward": 2**21, "update": 2**23}  # samples times outputs


def _unsupported_lookup(request: Request) -> str | None:
    call, step = request.call, request.step
    assert isinstance(call, Lookup)
    if call.accumulate is not None and (why := unfit_packages()) is not None:
        return f"sums integers by Triton kernels, and Triton {why}"
    if call.groups > 1:
        return f"sums all detectors to one output, here {call.groups} groups"
    if step is not None and not (isinstance(step.rule, SGD) and step.rule.additive):
        return f"moves rows by SGD without weight decay only, not by {step.rule}"
    n_detectors, n_rows, n_outputs = call.weights.shape
    most = MAX_ROWS if call.accumulate is None else _MOST_ROWS_OF_INTEGERS
    if n_rows > most:
        return f"keeps tables in shared memory: at most {most} rows, here {n_rows}"
    # Numbers of tables, of outputs, and of the parts of margins that warps add up.
    of_sample = max(n_outputs, 4 * n_detectors * -(-n_outputs // 128))
    return _too_many(max(call.weights.size, call.detection.shape[0] * of_sample))


def _slower_lookup(request: Request) -> str | None:
    call, direction = request.call, request.direction
    assert isinstance(call, Lookup)
    n_detectors, n_rows, n_outputs = call.weights.shape
    if call.accumulate is not None:
        return _slower_integers(call, direction)
    if call.weights.dtype.name != "float32":
        return f"was measured faster than Triton for float32 tables only, not {call.weights.dtype}"
    few = _fewer_than_measured(
        (
            ("rows", n_rows, _FEWEST_ROWS),
            ("detectors", n_detectors, _FEWEST_DETECTORS[direction]),
            ("outputs", n_outputs, _FEWEST_OUTPUTS[direction]),
            ("numbers in the outputs", call.detection.shape[0] * n_outputs, _FEWEST_NUMBERS[direction]),
        )
    )
    if few is None and n_rows > _MOST_ROWS:
        return f"was measured faster than Triton up to {_MOST_ROWS} rows, here {n_rows}"
    return few


def _slower_integers(call: Lookup, direction: str) -> str | None:
    if direction == "forward":
        return "sums rows of integers by Triton's kernels"
    # Sums of all rows are written, read or not.
    reads = len(call.detection.index) // call.weights.shape[1]
    return _fewer_than_measured((("look-ups of each row in fixed point", reads, 1),))


# ------------------------------------------------------------------------------------- sparse_lookup
_MOST_OUTPUTS = 2**13  # of a sample, in shared memory

_FEWEST_SLOTS = 32
_FEWEST_SAMPLES = 512


def _unsupported_sparse(request: Request) -> str | None:
    call = request.call
    if isinstance(call, EdgeLookup):
        return call.plain
    assert isinstance(call, SparseLookup)
    why = unfit_packages()
    if why is not None:
        return f"adds to tables by Triton kernels, and Triton {why}"
    if call.n_outputs > _MOST_OUTPUTS:
        return (
            f"keeps the outputs of a sample in shared memory: at most {_MOST_OUTPUTS}, here {call.n_outputs}"
        )
    n_outputs = -(-call.n_outputs // 128) * 128
    return _too_many(max(call.weights.size, len(call.detection.index) * n_outputs))


def _slower_sparse(request: Request) -> str | None:
    call = request.call
    assert isinstance(call, SparseLookup)
    if request.direction == "update":
        return "moves rows by Triton's kernels"
    return _fewer_than_measured(
        (
            ("slots", call.weights.shape[2], _FEWEST_SLOTS),
            ("samples", len(call.detection.index), _FEWEST_SAMPLES),
        )
    )


# ------------------------------------------------------------------------------------- scored_lut
_MOST_OUTPUTS_OF_ROWS = 64
_MOST_INPUTS = 384

# Microseconds of kernels on an H100, float32, 256 rows, two ways: Triton / here.
#   samples  tables x groups  outputs      forward         step
#     32768        64 x 16       48    1273 / 891   5373 / 3893
#     24576        64 x  8       48     456 / 350   2028 / 1576
#     16384        32 x 16       64     408 / 298   1876 / 1465
#      8192        32 x  8       32      70 /  58    366 /  290
#      4096        64 x  8       48     118 / 107    462 /  375
#      2048        64 x  8       48      60 /  96    299 /  292
#      1024        32 x 16       64      44 /  65    230 /  224
#      1024        64 x  8       48      48 /  92    173 /  298
_FEWEST_READS = {"forward": 2**15, "backward": 2**14}  # samples times groups


def _unsupported_scored(request: Request) -> str | None:
    why = unfit_packages()
    return None if why is None else f"computes scores by Triton kernels, and Triton {why}"


def rows_by_triton(call: ScoredLut) -> str | None:
    """Return why Triton's kernels read the rows of a call; None if they are read from shared memory."""
    if call.accumulate is not None or call.exponents is not None:
        return "sums floats only, of tables of floats"
    if type(call.read) not in (reads.Hard, reads.Blend, reads.SoftSign, reads.Confidence):
        return f"has no kernel for {type(call.read).__name__}"
    n_rows, n_outputs = call.weights.shape[1:]
    if n_outputs > _MOST_OUTPUTS_OF_ROWS or n_rows > 2**8:
        return f"keeps two tables in shared memory, of at most {2**8} rows and {_MOST_OUTPUTS_OF_ROWS} outputs, here {n_rows} and {n_outputs}"
    n_inputs = call.x.shape[2]
    if n_inputs > _MOST_INPUTS:
        return f"keeps the cotangents of the inputs of a sample in shared memory: of at most {_MOST_INPUTS} inputs, here {n_inputs}"
    return _too_many(max(call.x.size, call.weights.size, 3 * len(call.x) * len(call.weights)))


def _slower_scored(request: Request) -> str | None:
    call = request.call
    assert isinstance(call, ScoredLut)
    if request.direction == "update":
        return "moves rows by Triton's kernels"
    n = len(call.x) * call.groups
    few = _fewer_than_measured((("samples of all groups", n, _FEWEST_READS[request.direction]),))
    return rows_by_triton(call) or few


# ------------------------------------------------------------------------------------- lookup_attention
_MOST_COUNTS = 2**12  # of a query, in shared memory
_MOST_IDS = 2**12  # of queries: each has a program that looks for them
_MOST_ALL_COUNTS = 2**28  # of all queries
_MOST_KEYS = 2**15 - 1  # a count is a signed integer of 16 bits

# Long sequences: microseconds on an H200 are in `lutjax.kernels._triton._histograms`.
_FEWEST_KEYS = {"forward": 512, "backward": 256, "update": 256}
_FEWEST_OF_ID = 16
_MOST_COUNTED = 2**10


def _unsupported_attention(request: Request) -> str | None:
    call, step = request.call, request.step
    assert isinstance(call, LookupAttention)
    why = unfit_packages()
    if why is not None:
        return f"multiplies counts by Triton kernels, and Triton {why}"
    if step is not None and not isinstance(step.rule, SGD):
        return f"moves rows by SGD only, not by {step.rule}"
    counts, ids = _counted(call)
    for number, most, name in (
        (counts, _MOST_COUNTS, "rows for each id of a query"),
        (ids, _MOST_IDS, "ids of queries"),
        (call.key.shape[1], _MOST_KEYS, "keys"),
    ):
        if number > most:
            return f"counts the reads of at most {most} {name}, here {number}"
    numbers = math.prod(call.query.shape[:2]) * counts
    if numbers > _MOST_ALL_COUNTS:
        return f"keeps at most {_MOST_ALL_COUNTS} counts of a detector in memory, here {numbers}"
    return None


def _slower_attention(request: Request) -> str | None:
    call = request.call
    assert isinstance(call, LookupAttention)
    if call.accumulate is not None and request.direction == "forward":
        return "was measured faster than Triton for sums of floats only, not of integers"
    n_samples, n_queries, _ = call.query.shape
    n_keys = call.key.shape[1]
    counts, ids = _counted(call)
    few = _fewer_than_measured(
        (
            (
                "keys",
                n_keys if call.window is None else min(n_keys, call.window),
                _FEWEST_KEYS[request.direction],
            ),
            ("queries for each of their ids", n_samples * n_queries // ids, _FEWEST_OF_ID),
        )
    )
    if few is None and counts > _MOST_COUNTED:
        return f"was measured faster than Triton up to {_MOST_COUNTED} rows for each id of a query, here {counts}"
    return few


def _counted(call: LookupAttention) -> tuple[int, int]:
    """Return the number of rows that a query of one id may read, and the number of ids of queries."""
    counts = 2 ** (call.key.bits + (0 if call.position is None else call.position.bits))
    return counts, call.weights.shape[1] // counts


# ------------------------------------------------------------------------------------- binary_lut
_BLOCK = 512  # samples of a program

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


def _unsupported_gates(request: Request) -> str | None:
    call = request.call
    assert isinstance(call, BinaryLut)
    # Numbers of inputs and outputs in whole blocks, and of the cotangents of a wire by the address.
    n_samples = -(-call.x.shape[1] // _BLOCK) * _BLOCK
    n_gates, bits = call.wires.shape
    return _too_many(max(n_samples * max(call.x.shape[0], n_gates), call.table.size * bits))


def _slower_gates(request: Request) -> str | None:
    call = request.call
    assert isinstance(call, BinaryLut)
    x, table, wires, readers = call.x, call.table, call.wires, call.readers
    if request.direction == "forward":
        return "was measured slower than Triton forward"
    if x.dtype.name != "float32" or table.dtype.name != "float32":
        return f"was measured faster than Triton for float32 only, not {x.dtype} and tables of {table.dtype}"
    few = _fewer_than_measured((("bits", wires.shape[1], _FEWEST_BITS), ("inputs", x.size, _FEWEST_INPUTS)))
    if few is not None:
        return few
    if x.shape[1] % _BLOCK:
        return f"was measured faster than Triton for multiples of {_BLOCK} samples, here {x.shape[1]}"
    if readers is None:
        return "adds up what the readers of an input receive, and the call gives no readers"
    if readers.size > _MOST_UNUSED * wires.size:
        return f"reads every entry of the lists of readers: {readers.size}, of {wires.size} wires"
    return None


# For each op `unsupported_arguments` and `slower`.
_Rule = Callable[[Request], str | None]
_RULES: dict[str, tuple[_Rule, _Rule]] = {
    "lookup": (_unsupported_lookup, _slower_lookup),
    "sparse_lookup": (_unsupported_sparse, _slower_sparse),
    "scored_lut": (_unsupported_scored, _slower_scored),
    "lookup_attention": (_unsupported_attention, _slower_attention),
    "binary_lut": (_unsupported_gates, _slower_gates),
}
