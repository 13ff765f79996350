"""`lutjax.lookup_attention` in Mosaic GPU, for long sequences: histograms in shared memory.

Formula with the table viewed as ``S[t, query id, (key id, position id), output]``::

    counts[t, j, (k, e)] = number of query j's earlier keys with id k at a distance with id e
    y[j] = sum_t counts[t, j] @ S[t, query id of j]
    dS[t, q] = sum over queries j with id q: counts[t, j] * dy[j]

Work: one program counts for four queries of one detector (`_counts`). Triton kernels multiply the
counts, and compute margin cotangents (`lutjax.kernels._triton._histograms`). An update adds ``dS``
to the table.

Numerics: counts are exact int16, so a query has at most 2**15 - 1 keys. Products
accumulate in float32, or in integers in fixed point. Ids are clamped.
"""

import math

import jax

from lutjax.dispatch.contract import Step
from lutjax.dispatch.registry import Declaration, Deferral, Device, Request
from lutjax.kernels._pallas.gpu._rules import fewer_than_measured, lacks_triton, unsupported_arrays
from lutjax.kernels._triton import _histograms, lookup_attention as in_triton
from lutjax.kernels._triton._detected_pairs import DetectedPairs
from lutjax.kernels._triton._row_additions import Addition
from lutjax.ops.lookup_attention import LookupAttention
from lutjax.values._fixed_point import result
from lutjax.values._row_rules import SGD, RowState

_MOST_COUNTS = 2**12  # of a query, in shared memory
_MOST_IDS = 2**12  # of queries: each has a program that looks for them
_MOST_ALL_COUNTS = 2**28  # of all queries
_MOST_KEYS = 2**15 - 1  # a count is a signed integer of 16 bits

# Long sequences: microseconds on an H200 are in `lutjax.kernels._triton._histograms`.
_FEWEST_KEYS = {"forward": 512, "backward": 256, "update": 256}
_FEWEST_OF_ID = 16
_MOST_COUNTED = 2**10


def _supports(request: Request) -> str | None:
    call, step = request.call, request.step
    assert isinstance(call, LookupAttention)
    if why := unsupported_arrays(request) or lacks_triton("multiplies counts by Triton kernels"):
        return why
    # Other rules need optimizer state per row, which the kernels that add counts do not read.
    if step is not None and not isinstance(step.rule, SGD):
        return f"moves rows by SGD only, not by {step.rule}"
    # Rows for each id of a query, and the ids of queries.
    counts = 2 ** (call.key.bits + (0 if call.position is None else call.position.bits))
    ids = call.weights.shape[1] // counts
    for number, most, name in (
        (counts, _MOST_COUNTS, "rows for each id of a query"),
        (ids, _MOST_IDS, "ids of queries"),
        (call.key.shape[1], _MOST_KEYS, "keys"),
    ):
        if number > most:
            return f"counts the reads of at most {most} {name}, here {number}"
    # The counts of a detector are written to global memory for the Triton products.
    numbers = math.prod(call.query.shape[:2]) * counts
    if numbers > _MOST_ALL_COUNTS:
        return f"keeps at most {_MOST_ALL_COUNTS} counts of a detector in memory, here {numbers}"
    # Histograms are exact in both modes; this is a measured choice.
    if call.accumulate is not None and request.direction == "forward":
        return Deferral("was measured faster than Triton for sums of floats only, not of integers")
    n_samples, n_queries, _ = call.query.shape
    n_keys = min(call.key.shape[1], call.window or call.key.shape[1])
    # A histogram costs as much for one pair as for many: it pays for long sequences and for query
    # ids that several queries share.
    few = fewer_than_measured(
        (
            ("keys", n_keys, _FEWEST_KEYS[request.direction]),
            ("queries for each of their ids", n_samples * n_queries // ids, _FEWEST_OF_ID),
        )
    )
    if few is None and counts > _MOST_COUNTED:
        return Deferral(
            f"was measured faster than Triton up to {_MOST_COUNTED} rows for each id of a query, "
            f"here {counts}"
        )
    return few


SPEC = Declaration(
    _supports, requires=("jax_triton", "triton"), launches=("lookup_attention.margins",)
)


def forward(call: LookupAttention, *, device: Device) -> jax.Array:
    from lutjax.kernels._pallas.gpu._counts import COUNTER

    pairs = DetectedPairs.from_call(call)
    return result(_histograms.sum_rows(pairs, device, COUNTER), call.weights.dtype, call.accumulate)


def backward(
    call: LookupAttention, cotangent: jax.Array, needs: frozenset[str], *, device: Device
) -> dict[str, jax.Array]:
    return in_triton.backward_by(_add_rows, call, cotangent, needs, device=device)


def update(
    call: LookupAttention, cotangent: jax.Array, step: Step, *, device: Device
) -> tuple[jax.Array, RowState]:
    return in_triton.update_by(_add_rows, call, cotangent, step, device=device)


def _add_rows(
    pairs: DetectedPairs, dy: jax.Array, device: Device, addition: Addition
) -> tuple[jax.Array, ...]:
    from lutjax.kernels._pallas.gpu._counts import COUNTER

    return _histograms.add_rows(pairs, dy, device, addition, COUNTER)
