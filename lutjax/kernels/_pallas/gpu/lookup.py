"""`lutjax.lookup` in Mosaic GPU, for tables of few rows.

Formula for sample ``b`` and tables ``t``::

    y[b] = sum over t of weights[t, index[b, t]]
    dmargin[b, t] = slope(margin[b, t]) * <dy[b], weights[t, index] - weights[t, index ^ flip]>
    dweights[t, r] = sum over b of [index[b, t] == r] * dy[b]

Work: reads keep tables in shared memory (`_shared_tables`): a program owns a block of samples and
of outputs, and visits the tables one after the other. Table gradients are tensor-core products
(`_one_hot`). In fixed point, integers are added in shared memory (`_shared_sums`), for larger
tables too, and Triton kernels do the other parts. An update subtracts ``rate * factor * dweights``
from the whole table, which is small.

Numerics: float32 sums in a fixed order, without atomics, so results are equal in every run. Ids are
clamped.
"""

import jax
import jax.numpy as jnp

from lutjax.dispatch.contract import Step
from lutjax.dispatch.registry import Declaration, Deferral, Device, Request
from lutjax.kernels._nvidia import compute_capability
from lutjax.kernels._pallas.gpu._rules import (
    MAX_ROWS,
    fewer_than_measured,
    lacks_triton,
    too_many,
    unsupported_arrays,
)
from lutjax.kernels._triton import lookup as in_triton
from lutjax.kernels._xla._row_gathers import slope
from lutjax.ops.lookup import Lookup
from lutjax.values._fixed_point import addends, result
from lutjax.values._row_rules import SGD, RowState

_MOST_ROWS_OF_INTEGERS = 2**12  # of which columns do

# Tables of so many rows are kept. Microseconds on an H200, float32, 64 detectors unless said,
# forward / backward of Triton and here (`lookup` alone; both cotangents):
#   samples  outputs  rows       Triton          here
#     16384      512    64   140 /  924     116 / 515
#     16384      512    32   152 /  927     117 / 506
#     16384      256    64    87 /  474      64 / 276
#     16384      512    64    50 /  256      47 / 167   (16 detectors)
#      4096      512    64    53 /  251      58 / 206
#     16384      128    64    55 /  269      62 / 194
#     16384      512   128   186 /  925     183 / 905   (the same, so it is left to Triton)
# For updates, the sums of rows were measured, at the sizes of the first line: 590 in Triton, 288
# here.
_FEWEST_ROWS, _MOST_ROWS = 32, 64
_FEWEST_DETECTORS = {"forward": 16, "backward": 16, "update": 64}
_FEWEST_OUTPUTS = {"forward": 256, "backward": 128, "update": 512}
_FEWEST_NUMBERS = {"forward": 2**22, "backward": 2**21, "update": 2**23}  # samples times outputs


def _supports(request: Request) -> str | None:
    call, step = request.call, request.step
    assert isinstance(call, Lookup)
    # The gradient of a table is a product of tensor cores.
    if request.direction != "forward" and (compute_capability(request.device) or 0) >= 100:
        return (
            f"multiplies by wgmma, which compute capability 9.0 has and {request.device.kind} has "
            "not"
        )
    if why := unsupported_arrays(request):
        return why
    if call.accumulate is not None:
        if request.direction == "forward":
            return "has no forward kernel for sums of integers"
        if why := lacks_triton("sums integers by Triton kernels"):
            return why
    if call.groups > 1:
        return f"sums all detectors to one output, here {call.groups} groups"
    if step is not None and not (isinstance(step.rule, SGD) and step.rule.additive):
        return f"moves rows by SGD without weight decay only, not by {step.rule}"
    n_detectors, n_rows, n_outputs = call.weights.shape
    # A program of the integer kernel holds 8 columns, not a block of outputs: more rows fit.
    most = MAX_ROWS if call.accumulate is None else _MOST_ROWS_OF_INTEGERS
    if n_rows > most:
        return f"keeps tables in shared memory: at most {most} rows, here {n_rows}"
    # Numbers of tables, of outputs, and of the parts of margins that warps add up.
    of_sample = max(n_outputs, 4 * n_detectors * -(-n_outputs // 128))
    if why := too_many(max(call.weights.size, call.detection.shape[0] * of_sample)):
        return why
    if call.accumulate is not None:
        # Sums of all rows are written, read or not.
        reads = len(call.detection.index) // n_rows
        return fewer_than_measured((("look-ups of each row in fixed point", reads, 1),))
    if call.weights.dtype.name != "float32":
        return Deferral(
            f"was measured faster than Triton for float32 tables only, not {call.weights.dtype}"
        )
    few = fewer_than_measured(
        (
            ("rows", n_rows, _FEWEST_ROWS),
            ("detectors", n_detectors, _FEWEST_DETECTORS[request.direction]),
            ("outputs", n_outputs, _FEWEST_OUTPUTS[request.direction]),
            (
                "numbers in the outputs",
                call.detection.shape[0] * n_outputs,
                _FEWEST_NUMBERS[request.direction],
            ),
        )
    )
    # At 128 rows the one-hot product has two chunks per table, so twice the work.
    if few is None and n_rows > _MOST_ROWS:
        return Deferral(f"was measured faster than Triton up to {_MOST_ROWS} rows, here {n_rows}")
    return few


SPEC = Declaration(_supports, requires=("jax_triton", "triton"), launches=("lookup.margins",))


def forward(call: Lookup, *, device: Device) -> jax.Array:
    from lutjax.kernels._pallas.gpu import _shared_tables

    return _shared_tables.sum_rows(call.weights, call.detection.index.T).astype(call.weights.dtype)


def backward(
    call: Lookup, cotangent: jax.Array, needs: frozenset[str], *, device: Device
) -> dict[str, jax.Array]:
    from lutjax.kernels._pallas.gpu import _shared_tables

    if call.accumulate is not None:
        cotangents = in_triton.backward(call, cotangent, needs - {"weights"}, device=device)
        return (
            {"weights": _sums(call, cotangent), **cotangents} if "weights" in needs else cotangents
        )
    d, cotangents = call.detection, {}
    index = d.index.T
    if "weights" in needs:
        cotangents["weights"] = _sums(call, cotangent)
    if "detection" in needs:
        difference = _shared_tables.differences(call.weights, index, index ^ d.flip.T, cotangent)
        # The slope multiplies the complete product, in XLA.
        cotangents["detection"] = slope(d.margin) * difference.astype(d.margin.dtype)
    return cotangents


def update(
    call: Lookup, cotangent: jax.Array, step: Step, *, device: Device
) -> tuple[jax.Array, RowState]:
    weights = call.weights
    # Rows that no sample read have sums of zero, and stay as they are.
    sums = result(_sums(call, cotangent), jnp.float32, call.accumulate)
    # One pass over the table: rows without readers subtract zero.
    moved = weights.astype(jnp.float32) - step.rate_and_factor * sums
    return moved.astype(weights.dtype), step.state


def _sums(call: Lookup, cotangent: jax.Array) -> jax.Array:
    """Return the summed addends for each row, ``[T, R, O]``."""
    from lutjax.kernels._pallas.gpu import _one_hot, _shared_sums

    index, n_rows = call.detection.index.T, call.weights.shape[1]
    if call.accumulate is None:
        return _one_hot.add_rows(index, cotangent, n_rows)
    return _shared_sums.add_rows(
        jnp.clip(index, 0, n_rows - 1), addends(cotangent, call.accumulate), n_rows
    )
