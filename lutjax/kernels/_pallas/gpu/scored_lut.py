"""`lutjax.scored_lut` in Mosaic GPU, with tables in shared memory (`_shared_reads`).

Formula: ``y[b, g] = sum_{t, k} c[t, k] * weights[t, i[t, k]]``, with the read's row ids ``i`` and
coefficients ``c``, see `lutjax.kernels._xla.scored_lut`.

Work: Triton kernels compute margins, scores, input cotangents and table gradients. Samples are
processed in chunks to bound the scratch memory for row ids, factors and products. Updates, fixed
point, quantized tables, user-written reads and larger tables are left to Triton.

Numerics: see `_shared_reads`. Sums that are not finite are recomputed by a kernel that ignores rows
with coefficient 0.
"""

import jax
import jax.numpy as jnp

from lutjax import reads
from lutjax.dispatch.registry import Declaration, Device, Request
from lutjax.kernels._pallas.gpu._rules import (
    fewer_than_measured,
    lacks_triton,
    too_many,
    unsupported_arrays,
)
from lutjax.kernels._triton import scored_lut as in_triton
from lutjax.ops.scored_lut import ScoredLut

_MOST_SCRATCH = 2**30  # bytes that are computed of samples: rows, factors, products

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


def _unsupported_read(call: ScoredLut) -> str | None:
    """Return the reason that shared-memory reads do not support a call, or None."""
    if call.accumulate is not None or call.exponents is not None:
        return "sums floats only, of tables of floats"
    # Exact types: a subclass may override `select`.
    if type(call.read) not in (reads.Hard, reads.Blend, reads.SoftSign, reads.Confidence):
        return f"has no kernel for {type(call.read).__name__}"
    n_rows, n_outputs = call.weights.shape[1:]
    if n_outputs > _MOST_OUTPUTS_OF_ROWS or n_rows > 2**8:
        return (
            f"keeps two tables in shared memory, of at most {2**8} rows and "
            f"{_MOST_OUTPUTS_OF_ROWS} outputs, here {n_rows} and {n_outputs}"
        )
    n_inputs = call.x.shape[2]
    if n_inputs > _MOST_INPUTS:
        return (
            "keeps the cotangents of the inputs of a sample in shared memory: of at most "
            f"{_MOST_INPUTS} inputs, here {n_inputs}"
        )
    return too_many(max(call.x.size, call.weights.size, 3 * len(call.x) * len(call.weights)))


def _supports(request: Request) -> str | None:
    call = request.call
    assert isinstance(call, ScoredLut)
    if why := unsupported_arrays(request) or lacks_triton("computes scores by Triton kernels"):
        return why
    if why := _unsupported_read(call):
        return why
    n = len(call.x) * call.groups
    return fewer_than_measured((("samples of all groups", n, _FEWEST_READS[request.direction]),))


SPEC = Declaration(
    _supports,
    requires=("jax_triton", "triton"),
    launches=("scored_lut.backward", "scored_lut.rows", "scored_lut.inputs"),
)


def forward(call: ScoredLut, *, device: Device) -> jax.Array:
    y = in_triton.run_parts(call, _n_chunks(call), lambda part: {"y": _outputs(part, device)})["y"]
    return (jnp.sum(y, 1, keepdims=True, dtype=y.dtype) if call.sum_groups else y).astype(
        call.weights.dtype
    )


def backward(
    call: ScoredLut, cotangent: jax.Array, needs: frozenset[str], *, device: Device
) -> dict[str, jax.Array]:
    return in_triton.run_parts(
        call, _n_chunks(call), lambda part, dy: _pulled_back(part, dy, needs, device), cotangent
    )


def _outputs(call: ScoredLut, device: Device) -> jax.Array:
    from lutjax.kernels._pallas.gpu import _shared_reads

    n, call = len(call.x), _pad_samples(call)
    rows, factors = in_triton.rows_and_factors(call, device)
    # A coefficient of 0 times an infinite row is NaN in the fast kernel; flagged samples are
    # computed again.
    y, strange = _shared_reads.sum_rows(call.weights, rows, factors, call.groups)
    return in_triton.recompute_nonfinite(call, y, strange, _shared_reads.SAMPLES_OF_WARP, device)[
        :n
    ]


def _pulled_back(
    call: ScoredLut, cotangent: jax.Array, needs: frozenset[str], device: Device
) -> dict[str, jax.Array]:
    from lutjax.kernels._pallas.gpu import _mosaic_launch, _shared_reads

    n, call = len(call.x), _pad_samples(call)
    # Padding samples have cotangents of zero, so they add nothing to tables.
    dy = _mosaic_launch.pad_to(cotangent, len(call.x), *cotangent.shape[1:])
    rows, factors = in_triton.rows_and_factors(call, device)
    cotangents = {}
    if "weights" in needs:
        cotangents["weights"] = in_triton.sums_of_rows(call, rows, factors, dy, device)
    if others := needs - {"weights"}:
        products = _shared_reads.products(
            call.weights, rows, dy, in_triton.all_ways(call), call.groups
        )
        if n < len(call.x):  # of samples that are not there: 0 times a row, which may be infinite
            products = products.at[..., n:].set(0)
        cotangents |= in_triton.pull_back_products(call, products, others, device)
    return {name: a[:n] if name in ("x", "keep") else a for name, a in cotangents.items()}


def _pad_samples(call: ScoredLut) -> ScoredLut:
    from lutjax.kernels._pallas.gpu import _mosaic_launch, _shared_reads

    n = -(-len(call.x) // _shared_reads.SAMPLES) * _shared_reads.SAMPLES
    keep = (
        call.keep
        if call.keep is None
        else _mosaic_launch.pad_to(call.keep, n, *call.keep.shape[1:])
    )
    return call.replace(x=_mosaic_launch.pad_to(call.x, n, *call.x.shape[1:]), keep=keep)


def _n_chunks(call: ScoredLut) -> int:
    """Return the number of sample chunks, computed one after another to bound memory."""
    # Per sample and table: one word of packed rows, and a factor and a product for each way.
    of_sample = (1 + 2 * in_triton.all_ways(call)) * len(call.weights)
    if call.x.shape[1] < call.groups:
        of_sample += call.groups * call.x.shape[2]  # cotangents of inputs by groups
    return -(-4 * of_sample * len(call.x) // _MOST_SCRATCH)
