"""`lutjax.detect` in Triton.

Detector-major, ``[T, B]`` and inputs ``[I, B]``, so that the samples of a program lie side by side.
"""

from typing import Any

import jax
import triton
import triton.language as tl

from lutjax._compat import zeros_varying
from lutjax._detection import Detection
from lutjax._dtypes import accumulator
from lutjax._fixed_point import FixedPoint, addend_dtype
from lutjax.kernels._triton import _rows
from lutjax.kernels._triton._launch import kernel, launch
from lutjax.kernels._xla.detect import closest
from lutjax.kernels.registry import Device
from lutjax.tuning import Launch, Sizes, launch_of

_COMPARED = 2**14  # most detectors times inputs at which comparing them costs less than atomics


def forward(
    x: jax.Array,
    anchors: jax.Array,
    *,
    epsilon: float,
    n_inputs: int,
    accumulate: FixedPoint | None,
    device: Device,
) -> Detection:
    n_detectors, n_pairs, _ = anchors.shape
    shape, dtype = (n_detectors, len(x)), accumulator(x.dtype)
    if n_pairs == 0:
        return jax.tree.map(lambda a: a.T, closest([], shape, dtype, epsilon))
    how = launch_of("detect.forward", _sizes(x.shape, anchors), device, _forward_rule)
    tile = _rows.Tile(how, len(x), 1, n_detectors, device)
    index, flip, margin = launch(
        _compare,
        x.T,
        anchors,
        outputs=[jax.ShapeDtypeStruct(shape, t) for t in ("int32", "int32", dtype)],
        programs=tile.programs,
        device=device,
        warps=how.warps,
        **_constants(tile, anchors, n_inputs),
        EPSILON=epsilon,
    )
    return Detection(index.T, flip.T, margin.T, n_pairs)


def backward(
    saved: tuple[jax.Array, jax.Array],
    d_margin: jax.Array,
    needs: tuple[bool, ...],
    *,
    epsilon: float,
    n_inputs: int,
    accumulate: FixedPoint | None,
    device: Device,
) -> tuple[jax.Array, None]:
    anchors, flip = saved
    n_detectors, n_pairs, _ = anchors.shape
    shape, dtype = (len(flip), n_inputs), addend_dtype(d_margin.dtype, accumulate)
    if n_pairs == 0:  # no comparison, no gradient
        return zeros_varying(d_margin, shape, dtype), None
    how = launch_of("detect.backward", _sizes(shape, anchors), device, _backward_rule)
    compared = n_detectors * n_inputs <= _COMPARED
    tile = _rows.Tile(how, len(flip), n_inputs, n_detectors, device, all_outputs=not compared)
    changed: dict[str, Any] = {"zeroed": [jax.ShapeDtypeStruct(shape, dtype)]}
    if compared:
        changed = {"outputs": [jax.ShapeDtypeStruct((tile.groups, *shape[::-1]), dtype)]}
    (dx,) = launch(
        _collect if compared else _scatter,
        anchors,
        flip.T,
        d_margin.T,
        **changed,
        programs=tile.programs,
        device=device,
        warps=how.warps,
        **_constants(tile, anchors, n_inputs),
        SCALE=0.0 if accumulate is None else accumulate.scale,
    )
    return _rows.sum_of_parts(dx).T if compared else dx, None


# ------------------------------------------------------------------------------------- launches
def _sizes(shape: tuple[int, ...], anchors: jax.Array) -> Sizes:
    detectors, pairs, _ = anchors.shape
    return {"samples": shape[0], "inputs": shape[1], "detectors": detectors, "pairs": pairs}


def _constants(tile: _rows.Tile, anchors: jax.Array, n_inputs: int) -> dict[str, Any]:
    constants = tile.constants
    del constants["n_outputs"], constants["OUTPUTS"]
    return {
        **constants,
        "n_samples": tile.n_rows,
        "n_pairs": anchors.shape[1],
        "n_inputs": n_inputs,
        "INPUTS": tile.outputs,
    }


def _forward_rule(sizes: Sizes) -> Launch:
    detectors = _rows.split(sizes["samples"] // 128, sizes["detectors"])
    return Launch(rows=128, outputs=1, detectors=detectors, warps=4)


def _backward_rule(sizes: Sizes) -> Launch:
    compared = sizes["detectors"] * sizes["inputs"] <= _COMPARED
    rows, inputs = (32, 32) if compared else (128, 1)
    programs = sizes["samples"] // rows * (triton.cdiv(sizes["inputs"], inputs) if compared else 1)
    # Each further part is written and read once more.
    detectors = max(_rows.split(programs, sizes["detectors"], enough=512), 8 if compared else 1)
    return Launch(rows=rows, outputs=inputs, detectors=detectors, warps=1 if compared else 4)


# ------------------------------------------------------------------------------------- kernels
# Programs: samples first, then inputs, then groups of detectors.
@kernel
def _compare(
    x,
    anchors,
    index,
    flip,
    margin,
    n_samples: tl.constexpr,
    n_detectors: tl.constexpr,
    n_pairs: tl.constexpr,
    n_inputs: tl.constexpr,
    ROWS: tl.constexpr,
    INPUTS: tl.constexpr,
    DETECTORS: tl.constexpr,
    EPSILON: tl.constexpr,
):
    sample, exists, _, _, group = _rows.place(n_samples, 1, ROWS, 1)
    for t in range(group * DETECTORS, tl.minimum((group + 1) * DETECTORS, n_detectors)):
        pair = anchors + t.to(tl.int64) * n_pairs * 2
        of_index, of_flip, of_margin = nothing(ROWS, margin.dtype.element_ty)
        for r in tl.static_range(n_pairs):
            a = _input(pair + 2 * r, n_inputs).to(tl.int64) * n_samples + sample
            b = _input(pair + 2 * r + 1, n_inputs).to(tl.int64) * n_samples + sample
            delta = tl.load(x + a, mask=exists, other=0).to(of_margin.dtype)
            delta -= tl.load(x + b, mask=exists, other=0).to(of_margin.dtype)
            closer = is_closer(delta, of_margin, r)
            of_index |= bit(delta, r, EPSILON)
            of_margin = tl.where(closer, delta, of_margin)
            of_flip = tl.where(closer, 1 << r, of_flip)
        here = t.to(tl.int64) * n_samples + sample
        tl.store(index + here, of_index, mask=exists)
        tl.store(flip + here, of_flip, mask=exists)
        tl.store(margin + here, of_margin, mask=exists)


@kernel
def _collect(
    anchors,
    flip,
    d_margin,
    parts,
    n_samples: tl.constexpr,
    n_detectors: tl.constexpr,
    n_pairs: tl.constexpr,
    n_inputs: tl.constexpr,
    ROWS: tl.constexpr,
    INPUTS: tl.constexpr,
    DETECTORS: tl.constexpr,
    SCALE: tl.constexpr,
):
    """Sums in a fixed order: every input is compared with the ends of every closest pair."""
    UNROLL: tl.constexpr = min(DETECTORS, 4)
    sample, exists, inputs, input_exists, group = _rows.place(n_samples, n_inputs, ROWS, INPUTS)
    last = tl.minimum((group + 1) * DETECTORS, n_detectors)
    total = tl.zeros((INPUTS, ROWS), parts.dtype.element_ty)
    for t0 in range(group * DETECTORS, last, UNROLL):
        for u in tl.static_range(UNROLL):
            t = t0 + u
            a, b, value = _addend(
                anchors, flip, d_margin, t, sample, exists & (t < last), n_samples, n_pairs, n_inputs, SCALE
            )
            total += tl.where(inputs[:, None] == a[None, :], value[None, :], 0)
            total -= tl.where(inputs[:, None] == b[None, :], value[None, :], 0)
    at = (group.to(tl.int64) * n_inputs + inputs)[:, None] * n_samples + sample[None, :]
    tl.store(parts + at, total, mask=input_exists[:, None] & exists[None, :])


@kernel
def _scatter(
    anchors,
    flip,
    d_margin,
    dx,
    n_samples: tl.constexpr,
    n_detectors: tl.constexpr,
    n_pairs: tl.constexpr,
    n_inputs: tl.constexpr,
    ROWS: tl.constexpr,
    INPUTS: tl.constexpr,
    DETECTORS: tl.constexpr,
    SCALE: tl.constexpr,
):
    sample, exists, _, _, group = _rows.place(n_samples, 1, ROWS, 1)
    for t in range(group * DETECTORS, tl.minimum((group + 1) * DETECTORS, n_detectors)):
        a, b, value = _addend(anchors, flip, d_margin, t, sample, exists, n_samples, n_pairs, n_inputs, SCALE)
        tl.atomic_add(dx + sample * n_inputs + a, value, mask=exists, sem="relaxed")
        tl.atomic_add(dx + sample * n_inputs + b, -value, mask=exists, sem="relaxed")


@kernel
def _addend(
    anchors,
    flip,
    d_margin,
    t,
    sample,
    exists,
    n_samples: tl.constexpr,
    n_pairs: tl.constexpr,
    n_inputs: tl.constexpr,
    SCALE: tl.constexpr,
):
    """Ends of the closest pair of each sample, and what they receive, the second with the other sign."""
    here = t.to(tl.int64) * n_samples + sample
    r = tl.minimum(pair_of(tl.load(flip + here, mask=exists, other=0)), n_pairs - 1)
    pair = anchors + (t.to(tl.int64) * n_pairs + r) * 2
    value = tl.load(d_margin + here, mask=exists, other=0)
    a = _input(pair, n_inputs, exists)
    return a, _input(pair + 1, n_inputs, exists), _rows.addend(value, SCALE)


@kernel
def _input(anchor, n_inputs: tl.constexpr, exists=True):
    """An input that exists."""
    return tl.minimum(tl.maximum(tl.load(anchor, mask=exists, other=0), 0), n_inputs - 1)


# ------------------------------------------------------------------------------------- of any detection
@kernel
def nothing(size: tl.constexpr, dtype: tl.constexpr):
    """Index, flip and margin of no comparison."""
    return tl.zeros((size,), tl.int32), tl.zeros((size,), tl.int32), tl.full((size,), float("inf"), dtype)


@kernel
def bit(delta, r: tl.constexpr, EPSILON: tl.constexpr):
    """What a comparison adds to the index."""
    is_set = delta > 0
    if EPSILON != 0:
        is_set = is_set & ~(tl.abs(delta) < EPSILON)
    return is_set.to(tl.int32) << r


@kernel
def is_closer(delta, margin, r: tl.constexpr):
    """Strictly closer, so that the first of equals stays; NaN is closer than any number."""
    if r == 0:
        return margin == margin  # always: also where it is infinite
    else:
        return (tl.abs(delta) < tl.abs(margin)) | ((delta != delta) & (margin == margin))


@kernel
def pair_of(flip):
    """Which pair a flip mask stands for, by the exponent of a float; 0 for none."""
    exponent = (flip.to(tl.float32).to(tl.int32, bitcast=True) >> 23) & 255
    return tl.maximum(exponent - 127, 0)
