"""`lutjax.detect` in Triton, and pair detection for other kernels.

Formula for sample ``b``, with detector ``t``'s pairs ``r`` and its closest pair ``c``::

    delta[r] = x[b, anchors[t, r, 0]] - x[b, anchors[t, r, 1]]
    index[b, t] = sum_r 2**r * [delta[r] > 0 and not |delta[r]| < epsilon]
    flip[b, t], margin[b, t] = 2**c, delta[c]
    dx[b, anchors[t, c, 0]] += dmargin[b, t];  dx[b, anchors[t, c, 1]] -= dmargin[b, t]

Work: a forward program owns a sample tile and a detector block. Backward, if inputs and detectors
are few, a program owns a sample and input tile, and compares its inputs with both ends of every
closest pair; otherwise programs for samples and detectors scatter. The grid is one-dimensional:
samples change fastest, then inputs, then detector blocks.

Layout: arrays are detector-major, ``[T, B]``, and inputs ``[I, B]``, so a program's samples are
contiguous. A program's samples share their anchors.

Numerics: deltas use the accumulator dtype; subnormal deltas give bit 0. Among equal deltas the
first is the closest, and the first NaN is closer than any number. The compared backward pass has a
fixed order. The scattering pass uses atomics, so its last bits differ between runs, except in fixed
point. Anchors are clamped.
"""

from typing import Any

import jax

from lutjax._compat import zeros_varying
from lutjax.dispatch.registry import Declaration, Device
from lutjax.kernels._triton import _row_tiles
from lutjax.kernels._triton._language import tl, triton
from lutjax.kernels._triton._rules import unsupported_arguments
from lutjax.kernels._triton._triton_launch import kernel, launch
from lutjax.kernels._xla.detect import detect_closest
from lutjax.ops.detect import Detect
from lutjax.tuning import Launch, Sizes, launch_of
from lutjax.values._detection import Detection
from lutjax.values._dtypes import accumulator
from lutjax.values._fixed_point import addend_dtype

# Most comparisons of detectors with inputs per sample that cost less than atomics.
_COMPARED = 2**14

SPEC = Declaration(unsupported_arguments, launches=("detect.forward", "detect.backward"))


def forward(call: Detect, *, device: Device) -> Detection:
    x, anchors = call.x, call.anchors
    assert x is not None
    n_detectors, n_pairs, _ = anchors.shape
    shape, dtype = (n_detectors, len(x)), accumulator(x.dtype)
    if n_pairs == 0:
        return jax.tree.map(lambda a: a.T, detect_closest([], shape, dtype, call.epsilon))
    config = launch_of("detect.forward", _sizes(call, len(x)), device, _forward_rule)
    tile = _row_tiles.RowTile(config, len(x), 1, n_detectors, device)
    index, flip, margin = launch(
        _compare,
        x.T,
        anchors,
        outputs=[jax.ShapeDtypeStruct(shape, t) for t in ("int32", "int32", dtype)],
        **_arguments(tile, call),
    )
    return Detection(index.T, flip.T, margin.T, n_pairs)


def backward(
    call: Detect, cotangent: jax.Array, needs: frozenset[str], *, device: Device
) -> dict[str, jax.Array]:
    flip = call.flip
    assert flip is not None
    n_detectors, n_pairs, _ = call.anchors.shape
    shape, dtype = (len(flip), call.n_inputs), addend_dtype(cotangent.dtype, call.accumulate)
    # Without pairs there is no gradient.
    if n_pairs == 0:
        return {"x": zeros_varying(cotangent, shape, dtype)}
    config = launch_of("detect.backward", _sizes(call, len(flip)), device, _backward_rule)
    compared = n_detectors * call.n_inputs <= _COMPARED
    tile = _row_tiles.RowTile(config, *shape, n_detectors, device, all_outputs=not compared)
    # Atomics add to zeros ``[B, I]``; compared sums are parts ``[detector blocks, I, B]``.
    changed: dict[str, Any] = {"zeroed": [jax.ShapeDtypeStruct(shape, dtype)]}
    if compared:
        changed = {"outputs": [jax.ShapeDtypeStruct((tile.detector_blocks, *shape[::-1]), dtype)]}
    (dx,) = launch(
        _collect if compared else _scatter,
        call.anchors,
        flip.T,
        cotangent.T,
        **changed,
        **_arguments(tile, call),
    )
    return {"x": _row_tiles.sum_of_parts(dx).T if compared else dx}


# ------------------------------------------------------------------------------------- launches
def _sizes(call: Detect, n_samples: int) -> Sizes:
    detectors, pairs, _ = call.anchors.shape
    return {"samples": n_samples, "inputs": call.n_inputs, "detectors": detectors, "pairs": pairs}


def _arguments(tile: _row_tiles.RowTile, call: Detect) -> dict[str, Any]:
    return {
        **tile.arguments,
        "n_samples": tile.n_reads,
        "n_pairs": call.anchors.shape[1],
        "n_inputs": call.n_inputs,
        "INPUTS": tile.outputs,
        "EPSILON": call.epsilon,
        "SCALE": 0.0 if call.accumulate is None else call.accumulate.scale,
    }


def _forward_rule(sizes: Sizes) -> Launch:
    detectors = _row_tiles.split(sizes["samples"] // 128, sizes["detectors"])
    return Launch(rows=128, outputs=1, detectors=detectors, warps=4)


def _backward_rule(sizes: Sizes) -> Launch:
    compared = sizes["detectors"] * sizes["inputs"] <= _COMPARED
    rows, inputs = (32, 32) if compared else (128, 1)
    programs = sizes["samples"] // rows * (triton.cdiv(sizes["inputs"], inputs) if compared else 1)
    # Each further detector block writes a part, which is read once more.
    detectors = max(
        _row_tiles.split(programs, sizes["detectors"], enough=512), 8 if compared else 1
    )
    return Launch(rows=rows, outputs=inputs, detectors=detectors, warps=1 if compared else 4)


# ------------------------------------------------------------------------------------- kernels
@kernel
def _compare(x, anchors, index, flip, margin, c: tl.constexpr):
    sample, exists, _, _, group = _row_tiles.locate_program(c.n_samples, 1, c.ROWS, 1)
    for t in range(group * c.DETECTORS, tl.minimum((group + 1) * c.DETECTORS, c.n_detectors)):
        pair = anchors + t.to(tl.int64) * c.n_pairs * 2
        of_index, of_flip, of_margin = initial_detection(c.ROWS, margin.dtype.element_ty)
        # Unrolled: bits and masks of pair `r` are compile-time constants.
        for r in tl.static_range(c.n_pairs):
            a = _input(pair + 2 * r, c.n_inputs).to(tl.int64) * c.n_samples + sample
            b = _input(pair + 2 * r + 1, c.n_inputs).to(tl.int64) * c.n_samples + sample
            delta = tl.load(x + a, mask=exists, other=0).to(of_margin.dtype)
            delta -= tl.load(x + b, mask=exists, other=0).to(of_margin.dtype)
            closer = is_closer(delta, of_margin, r)
            of_index |= bit(delta, r, c.EPSILON)
            of_margin = tl.where(closer, delta, of_margin)
            of_flip = tl.where(closer, 1 << r, of_flip)
        here = t.to(tl.int64) * c.n_samples + sample
        tl.store(index + here, of_index, mask=exists)
        tl.store(flip + here, of_flip, mask=exists)
        tl.store(margin + here, of_margin, mask=exists)


@kernel
def _collect(anchors, flip, d_margin, parts, c: tl.constexpr):
    """Sum in a fixed order, by comparing every input with both ends of every closest pair."""
    UNROLL: tl.constexpr = min(c.DETECTORS, 4)
    sample, exists, inputs, input_exists, group = _row_tiles.locate_program(
        c.n_samples, c.n_inputs, c.ROWS, c.INPUTS
    )
    last = tl.minimum((group + 1) * c.DETECTORS, c.n_detectors)
    total = tl.zeros((c.INPUTS, c.ROWS), parts.dtype.element_ty)
    for t0 in range(group * c.DETECTORS, last, UNROLL):
        # The loads of several detectors are independent, and unrolling lets them overlap.
        for u in tl.static_range(UNROLL):
            t = t0 + u
            a, b, value = _addend(anchors, flip, d_margin, t, sample, exists & (t < last), c)
            # Two statements, because both ends may be the same input.
            total += tl.where(inputs[:, None] == a[None, :], value[None, :], 0)
            total -= tl.where(inputs[:, None] == b[None, :], value[None, :], 0)
    at = (group.to(tl.int64) * c.n_inputs + inputs)[:, None] * c.n_samples + sample[None, :]
    tl.store(parts + at, total, mask=input_exists[:, None] & exists[None, :])


@kernel
def _scatter(anchors, flip, d_margin, dx, c: tl.constexpr):
    sample, exists, _, _, group = _row_tiles.locate_program(c.n_samples, 1, c.ROWS, 1)
    for t in range(group * c.DETECTORS, tl.minimum((group + 1) * c.DETECTORS, c.n_detectors)):
        a, b, value = _addend(anchors, flip, d_margin, t, sample, exists, c)
        # Programs of other detectors, and other pairs, add to the same inputs.
        tl.atomic_add(dx + sample * c.n_inputs + a, value, mask=exists, sem="relaxed")
        tl.atomic_add(dx + sample * c.n_inputs + b, -value, mask=exists, sem="relaxed")


@kernel
def _addend(anchors, flip, d_margin, t, sample, exists, c: tl.constexpr):
    """Return both ends of each sample's closest pair, and the first end's addend."""
    here = t.to(tl.int64) * c.n_samples + sample
    # A flip of a detection from elsewhere may name a missing pair, and is clamped to the last one.
    r = tl.minimum(pair_of(tl.load(flip + here, mask=exists, other=0)), c.n_pairs - 1)
    pair = anchors + (t.to(tl.int64) * c.n_pairs + r) * 2
    value = tl.load(d_margin + here, mask=exists, other=0)
    a = _input(pair, c.n_inputs, exists)
    return a, _input(pair + 1, c.n_inputs, exists), _row_tiles.addend(value, c)


@kernel
def _input(anchor, n_inputs: tl.constexpr, exists=True):
    return tl.minimum(tl.maximum(tl.load(anchor, mask=exists, other=0), 0), n_inputs - 1)


# ------------------------------------------------------------- detection functions for kernels
@kernel
def initial_detection(size: tl.constexpr, dtype: tl.constexpr):
    """Return index, flip and margin before any comparison."""
    return (
        tl.zeros((size,), tl.int32),
        tl.zeros((size,), tl.int32),
        tl.full((size,), float("inf"), dtype),
    )


@kernel
def bit(delta, r: tl.constexpr, EPSILON: tl.constexpr):
    """Return a comparison's index addend."""
    is_set = is_above_zero(delta)
    if EPSILON != 0:
        is_set = is_set & ~(tl.abs(delta) < EPSILON)
    return is_set.to(tl.int32) << r


@kernel
def is_above_zero(delta):
    """Return True where a delta gives bit 1, as `lutjax.values._detection.is_above_zero`."""
    # Compared with the least normal number: some devices flush subnormal differences to 0.
    return delta >= (2.0**-126 if delta.dtype == tl.float32 else 2.0**-1022)


@kernel
def is_closer(delta, margin, r: tl.constexpr):
    """Return True where a delta is closer than the margin; the first of equals stays."""
    if r == 0:
        # Always true: the first pair counts also if its delta is infinite.
        return margin == margin
    else:
        # NaN is closer than any number, and the first NaN stays.
        return (tl.abs(delta) < tl.abs(margin)) | ((delta != delta) & (margin == margin))


@kernel
def pair_of(flip):
    """Return a flip mask's pair number; 0 for an empty mask."""
    # The exponent of a power of two, as a float32, is its logarithm.
    exponent = (flip.to(tl.float32).to(tl.int32, bitcast=True) >> 23) & 255
    return tl.maximum(exponent - 127, 0)
