"""`lut_at_places` in Triton: detection inside the lookup.

Formula for window position ``n``, group ``g`` and its detectors ``t``, with ``i``, ``j`` and
``margin`` as in `lutjax.detect`, computed from the image on demand::

    y[n, g] = sum_t weights[t, i]
    dmargin[t, n] = slope(margin) * <dy[n, g], weights[t, i] - weights[t, j]>
    dweights[t, i] += dy[n, g]
    dx[a] += dmargin[t, n];  dx[b] -= dmargin[t, n]  for the ends (a, b) of the closest pair

Work: `_sum_rows` and `_multiply_and_add_rows` programs own a position and output tile, and one
group's detector block. The backward pass detects again, and stores margin gradients and closest
pairs. A `_collect` program then owns one channel in a pixel block, and visits all pair ends that
read the channel; each reads a pixel from at most one position.

Layout: images are ``[B, H * W * C]``, channels last. Positions are numbered over all images. Margin
gradients and pairs are ``[T, positions]``. Pair ends are sorted by channel.

Numerics: the accumulator dtype. Image gradients, and outputs without targets, have a fixed order.
Table gradients, and outputs with targets, use atomics, so their last bits differ between runs.
Values outside the image are 0. Among equal deltas the first is the closest, and NaN is closer than
any number.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from lutjax.dispatch.registry import Declaration, Deferral, Device, Request
from lutjax.kernels._triton import _histograms, _row_tiles, detect
from lutjax.kernels._triton._language import tl, triton
from lutjax.kernels._triton._rules import unsupported_arguments
from lutjax.kernels._triton._triton_launch import kernel, launch
from lutjax.ops.lut_at_places import LutAtPlaces
from lutjax.tuning import Launch, Sizes, launch_of
from lutjax.values._dtypes import accumulator

# Most outputs of a table. On an H100, a step with 128 outputs took 205 us fused and 214 us as
# separate detection and lookup; with 256 outputs it took 404 and 282 us.
_MOST_OUTPUTS = 128
# Most comparisons of channels with pair ends, per row read. Listing the ends of 784 inputs took 22
# us, as long as all other work of a step of 128 samples.
_MOST_LISTED = 4


def _supports(request: Request) -> str | None:
    call = request.call
    assert isinstance(call, LutAtPlaces)
    if why := unsupported_arguments(request):
        return why
    if call.accumulate is not None:
        return "has no sums in fixed point"
    if not call.anchors.shape[1]:
        return "has no kernel for detectors without pairs"
    # Beyond these sizes a separate detection and lookup are faster.
    n_detectors, _, n_outputs = call.weights.shape
    if n_outputs > _MOST_OUTPUTS:
        return Deferral(
            f"was measured faster up to {_MOST_OUTPUTS} outputs of a table, here {n_outputs}"
        )
    listed = call.windows.image[2] * 2 * call.anchors.shape[1] * n_detectors
    reads = n_detectors * call.x.shape[0] * call.n_places
    if call.targets is None and listed > _MOST_LISTED * reads:
        return Deferral(
            f"lists the pairs that read each channel, {listed} comparisons for {reads} reads"
        )
    return None


SPEC = Declaration(_supports, launches=("lut_at_places.forward", "lut_at_places.backward"))


def forward(call: LutAtPlaces, *, device: Device) -> jax.Array:
    config = launch_of("lut_at_places.forward", _sizes(call), device, _forward_rule)
    # A program owns all detectors of a group and stores complete outputs.
    config = dataclasses.replace(config, detectors=0)
    shape = jax.ShapeDtypeStruct((len(call.x), call.n_places, call.n_outputs), call.weights.dtype)
    changed: dict[str, Any] = {"outputs": [shape]}
    # Groups with targets may share outputs, so atomics add them.
    if call.targets is not None:
        sums = accumulator(shape.dtype)
        changed = {"zeroed": [jax.ShapeDtypeStruct(shape.shape, sums)]}
    ends = _ends(call)
    (y,) = launch(
        _sum_rows,
        call.x,
        call.weights,
        ends,
        _targets(call),
        **changed,
        **_arguments(call, config, device),
    )
    return y.astype(shape.dtype)


def backward(
    call: LutAtPlaces, cotangent: jax.Array, needs: frozenset[str], *, device: Device
) -> dict[str, jax.Array]:
    config = launch_of("lut_at_places.backward", _sizes(call), device, _backward_rule)
    n_detectors, n = len(call.anchors), len(call.x) * call.n_places
    of_margin, of_table = "x" in needs, "weights" in needs
    ends = _ends(call)
    d_margin, pair, d_weights = launch(
        _multiply_and_add_rows,
        call.x,
        call.weights,
        ends,
        _targets(call),
        cotangent,
        outputs=[
            jax.ShapeDtypeStruct(
                (n_detectors, n) if of_margin else (1,), accumulator(call.x.dtype)
            ),
            jax.ShapeDtypeStruct((n_detectors, n) if of_margin else (1,), "int8"),
        ],
        zeroed=[
            jax.ShapeDtypeStruct(
                call.weights.shape if of_table else (1,), accumulator(call.weights.dtype)
            )
        ],
        OF_MARGIN=of_margin,
        OF_TABLE=of_table,
        **_arguments(call, config, device, all_outputs=True),
    )
    cotangents = {"weights": d_weights}
    if of_margin:
        cotangents["x"] = _image_gradient(call, ends, d_margin, pair, device)
    return {name: cotangents[name] for name in needs}


def _image_gradient(
    call: LutAtPlaces, ends: jax.Array, d_margin: jax.Array, pair: jax.Array, device: Device
) -> jax.Array:
    """Return the image gradient ``[B, I]`` from margin gradients and closest pairs."""
    height, width, channels = call.windows.image
    channel = call.windows.in_image(call.anchors)[..., 2]
    order, starts = _histograms.sort_by_id(channel.reshape(1, channel.size), channels, device)
    n_pixels = len(call.x) * height * width
    pixels = _row_tiles.fit_size(_PIXELS, n_pixels)
    (dx,) = launch(
        _collect,
        ends,
        order,
        starts,
        d_margin,
        pair,
        outputs=[jax.ShapeDtypeStruct(call.x.shape, d_margin.dtype)],
        programs=triton.cdiv(n_pixels, pixels) * channels if d_margin.size else 0,
        device=device,
        warps=max(min(pixels // 64, 4), 1),
        PIXELS=pixels,
        n_pixels=n_pixels,
        **_geometry(call),
    )
    return dx


_PIXELS = 256  # pixels of a `_collect` program


# ------------------------------------------------------------------------------------- launches
def _sizes(call: LutAtPlaces) -> Sizes:
    n, pairs = len(call.x) * call.n_places, call.anchors.shape[1]
    return _row_tiles.sizes(call.weights, samples=n, pairs=pairs, groups=call.groups)


def _forward_rule(sizes: Sizes) -> Launch:
    outputs = _row_tiles.fit_size(64, sizes["outputs"])
    rows = 32
    # Smaller tiles until there are about 1024 programs, which fill a device.
    while rows > 8 and _programs(sizes, rows, outputs) < 1024:
        rows //= 2
    return Launch(rows=rows, outputs=outputs, warps=1)


def _backward_rule(sizes: Sizes) -> Launch:
    # As many positions as threads. With fewer, several threads hold the same position, and Triton
    # repeats the detection for each output of a thread.
    outputs = _row_tiles.fit_size(64, sizes["outputs"])
    programs = _programs(sizes, 32, sizes["outputs"])
    detectors = _row_tiles.split(programs, sizes["detectors"] // sizes["groups"])
    return Launch(rows=32, outputs=outputs, detectors=detectors, warps=1)


def _programs(sizes: Sizes, rows: int, outputs: int) -> int:
    return (
        triton.cdiv(sizes["samples"], rows)
        * triton.cdiv(sizes["outputs"], outputs)
        * sizes["groups"]
    )


def _ends(call: LutAtPlaces) -> jax.Array:
    """Return every pair end's read position, int32 ``[T, C, 2, 2]``.

    The two integers are the distance from a window's first value, and row and column in 16 bits
    each. A one-pixel window has only distances, ``[T, C, 2, 1]``.
    """
    _, width, channels = call.windows.image
    row, column, channel = jnp.unstack(call.windows.in_image(call.anchors), axis=-1)
    if call.windows.size == (1, 1):
        return channel[..., None]
    # Side by side, so that kernels load both as one 64-bit integer.
    return jnp.stack([(row * width + column) * channels + channel, row << 16 | column], -1)


def _targets(call: LutAtPlaces) -> jax.Array:
    """Return targets, or a placeholder."""
    return call.anchors if call.targets is None else call.targets


def _geometry(call: LutAtPlaces) -> dict[str, Any]:
    """Return kernel constants for pairs, images and windows."""
    windows = call.windows
    return {
        "n_pairs": call.anchors.shape[1],
        "n_samples": len(call.x) * call.n_places,
        "HEIGHT": windows.image[0],
        "WIDTH": windows.image[1],
        "CHANNELS": windows.image[2],
        "n_values": call.x.size,
        "ONE_PIXEL": windows.size == (1, 1),
        "PLACES": call.n_places,
        "PLACE_ROWS": windows.places[0],
        "PLACE_COLUMNS": windows.places[1],
        "DOWN": windows.stride[0],
        "RIGHT": windows.stride[1],
        "ABOVE": windows.padding[0],
        "LEFT": windows.padding[1],
    }


def _arguments(
    call: LutAtPlaces, config: Launch, device: Device, *, all_outputs: bool = False
) -> dict[str, Any]:
    """Return `launch` arguments and constants for kernels that read tables."""
    n_detectors, n_rows, n_outputs = call.weights.shape
    n, number = len(call.x) * call.n_places, accumulator(call.weights.dtype)
    tile = _row_tiles.RowTile(
        config, n, n_outputs, n_detectors, device, all_outputs, n_groups=call.groups
    )
    return {
        **tile.arguments,
        **_geometry(call),
        **_row_tiles.arithmetic_of(n_rows, number, None),
        "programs": tile.programs if math.prod((n, n_detectors, n_outputs, call.x.shape[1])) else 0,
        "n_groups": call.groups,
        "n_of_group": max(n_detectors // call.groups, 1),
        "n_all_outputs": call.n_outputs,
        "EPSILON": call.epsilon,
        "COMPARED": _row_tiles.TYPES[accumulator(call.x.dtype).name],
        "TARGETS": call.targets is not None,
    }


# ------------------------------------------------------------------------------------- kernels
@kernel
def _sum_rows(x, weights, ends, targets, y, c: tl.constexpr):
    # Four detectors per step let their loads overlap; only if they divide the group, so that no
    # load needs a mask for a remainder.
    UNROLL: tl.constexpr = 4 if c.n_of_group % 4 == 0 else 1
    sample, exists, output, output_exists, group = _row_tiles.locate_program(
        c.n_samples, c.n_outputs, c.ROWS, c.OUTPUTS
    )
    first, row, column = _window(sample, c)
    total = tl.zeros((c.ROWS, c.OUTPUTS), c.ACC)
    for t0 in range(group * c.n_of_group, (group + 1) * c.n_of_group, UNROLL):
        for u in tl.static_range(UNROLL):
            t = t0 + u
            index = tl.zeros((c.ROWS,), tl.int32)
            for r in tl.static_range(c.n_pairs):
                delta = _delta(x, ends, t, r, first, row, column, exists, c)
                index |= detect.bit(delta, r, c.EPSILON)
            total += _row_tiles.read(
                _row_tiles.table(weights, t, c), _row_tiles.offset(index, c), output, c
            ).to(c.ACC)
    at, reached = _outputs(targets, sample, exists, output, output_exists, group, c)
    if c.TARGETS:
        tl.atomic_add(y + at, total, mask=reached, sem="relaxed")
    else:
        tl.store(y + at, total.to(y.dtype.element_ty), mask=reached)


@kernel
def _multiply_and_add_rows(
    x, weights, ends, targets, dy, d_margin, pair, d_weights, c: tl.constexpr
):
    # A program owns all outputs of a detector block, because a margin needs the whole inner
    # product.
    blocks: tl.constexpr = (c.n_samples + c.ROWS - 1) // c.ROWS
    of_group: tl.constexpr = (c.n_of_group + c.DETECTORS - 1) // c.DETECTORS
    sample, exists = _row_tiles.block(c.ROWS, c.n_samples, tl.program_id(0) % blocks)
    block = tl.program_id(0) // blocks
    group = block // of_group
    begin = group * c.n_of_group + block % of_group * c.DETECTORS
    first, row, column = _window(sample, c)
    # A gradient that fits one tile is loaded once for all detectors.
    if c.n_outputs <= c.OUTPUTS:
        output = tl.arange(0, c.OUTPUTS)
        cotangent = _cotangent(targets, dy, sample, exists, output, group, c)
    for t in range(begin, tl.minimum(begin + c.DETECTORS, (group + 1) * c.n_of_group)):
        index, _flip, margin = detect.initial_detection(c.ROWS, c.COMPARED)
        closest = tl.zeros((c.ROWS,), tl.int32)
        for r in tl.static_range(c.n_pairs):
            delta = _delta(x, ends, t, r, first, row, column, exists, c)
            index |= detect.bit(delta, r, c.EPSILON)
            # Without an image gradient, only the row id is needed.
            if c.OF_MARGIN:
                closer = detect.is_closer(delta, margin, r)
                margin = tl.where(closer, delta, margin)
                closest = tl.where(closer, r, closest)
        main = _row_tiles.offset(index, c)
        table = _row_tiles.table(weights, t, c)
        product = tl.zeros((c.ROWS,), c.ACC)
        for o in range(0, c.n_outputs, c.OUTPUTS):
            if c.n_outputs > c.OUTPUTS:
                output = o + tl.arange(0, c.OUTPUTS)
                cotangent = _cotangent(targets, dy, sample, exists, output, group, c)
            if c.OF_MARGIN:
                other = _row_tiles.offset(index ^ (1 << closest), c)
                value = _row_tiles.read(table, main, output, c).to(c.ACC)
                value -= _row_tiles.read(table, other, output, c).to(c.ACC)
                # An unused slot may hold anything, also NaN, and contributes 0.
                if c.TARGETS:
                    slot = group * c.n_outputs + output
                    used = tl.load(targets + slot, mask=output < c.n_outputs, other=-1) >= 0
                    value = tl.where(used[None, :], value, 0)
                product += tl.sum(value * cotangent, 1)
            if c.OF_TABLE:
                at = t.to(tl.int64) * c.n_rows * c.n_outputs + main[:, None] + output[None, :]
                adds = exists[:, None] & (output < c.n_outputs)[None, :]
                tl.atomic_add(d_weights + at, cotangent, mask=adds, sem="relaxed")
        if c.OF_MARGIN:
            at = t.to(tl.int64) * c.n_samples + sample
            tl.store(
                d_margin + at, _row_tiles.slope(margin) * product.to(margin.dtype), mask=exists
            )
            # One byte per position and detector: the second kernel need not detect again.
            tl.store(pair + at, closest.to(tl.int8), mask=exists)


@kernel
def _collect(ends, order, starts, d_margin, pair, dx, c: tl.constexpr):
    """Sum one channel's gradient in a fixed order, over the pair ends that read it."""
    UNROLL: tl.constexpr = 4
    channel = tl.program_id(0) % c.CHANNELS
    pixel, exists = _row_tiles.block(c.PIXELS, c.n_pixels, tl.program_id(0) // c.CHANNELS)
    image = pixel // (c.HEIGHT * c.WIDTH)
    # In the padded image. The window that reads this pixel through an end begins at the pixel minus
    # the offset of the end.
    row = (pixel // c.WIDTH % c.HEIGHT).to(tl.int32) + c.ABOVE
    column = (pixel % c.WIDTH).to(tl.int32) + c.LEFT
    total = tl.zeros((c.PIXELS,), dx.dtype.element_ty)
    last = tl.load(starts + channel + 1)
    for k0 in range(tl.load(starts + channel), last, UNROLL):
        # The loads of several ends are independent, and unrolling lets them overlap.
        for u in tl.static_range(UNROLL):
            k = k0 + u
            end = tl.load(order + k, mask=k < last, other=0)
            top, left = row, column
            if not c.ONE_PIXEL:
                at_pixel = tl.load(ends + end * 2 + 1)
                top -= at_pixel >> 16
                left -= at_pixel & 0xFFFF
            reads = exists & (k < last) & (top >= 0) & (left >= 0)
            # Only windows at multiples of the stride exist.
            if c.DOWN > 1:
                reads &= top % c.DOWN == 0
                top = top // c.DOWN
            if c.RIGHT > 1:
                reads &= left % c.RIGHT == 0
                left = left // c.RIGHT
            reads &= (top < c.PLACE_ROWS) & (left < c.PLACE_COLUMNS)
            at = image * c.PLACES + top * c.PLACE_COLUMNS + left
            at += (end // (2 * c.n_pairs)).to(tl.int64) * c.n_samples
            closest = tl.load(pair + at, mask=reads, other=-1).to(tl.int32)
            value = tl.load(d_margin + at, mask=reads, other=0)
            # Only the closest pair of a detector has a gradient.
            value = tl.where(closest == end // 2 % c.n_pairs, value, 0)
            # The first end of a pair is added, the second one subtracted.
            total += tl.where(end % 2 == 0, value, -value)
    tl.store(dx + pixel * c.CHANNELS + channel, total, mask=exists)


@kernel
def _window(sample, c: tl.constexpr):
    """Return each position's window start.

    Returns:
      Index of its first value in the images, and its row and column, which may be out of bounds.
    """
    image, place = sample // c.PLACES, (sample % c.PLACES).to(tl.int32)
    row = place // c.PLACE_COLUMNS * c.DOWN - c.ABOVE
    column = place % c.PLACE_COLUMNS * c.RIGHT - c.LEFT
    first = image * (c.HEIGHT * c.WIDTH * c.CHANNELS) + (row * c.WIDTH + column) * c.CHANNELS
    # 32-bit offsets, with room for the distances in a window.
    if c.n_values < 2**30:
        first = first.to(tl.int32)
    return first, row, column


@kernel
def _delta(x, ends, t, r: tl.constexpr, first, row, column, exists, c: tl.constexpr):
    number = (t * c.n_pairs + r) * 2
    a = _value(x, ends, number, first, row, column, exists, c)
    return a - _value(x, ends, number + 1, first, row, column, exists, c)


@kernel
def _value(x, ends, number, first, row, column, exists, c: tl.constexpr):
    """Return the value at a pair end for each position; 0 outside the image."""
    if c.ABOVE + c.LEFT > 0:
        # Distance, and row and column, with one 64-bit load.
        both = tl.load((ends + number * 2).to(tl.pointer_type(tl.int64), bitcast=True))
        distance, at_pixel = both.to(tl.int32), (both >> 32).to(tl.int32)
        # As unsigned integers negative rows are large, so one comparison checks both borders.
        reads = (row + (at_pixel >> 16)).to(tl.uint32) < c.HEIGHT
        reads &= (column + (at_pixel & 0xFFFF)).to(tl.uint32) < c.WIDTH
        if c.n_samples % c.ROWS != 0:
            reads &= exists
        return tl.load(x + (first + distance), mask=reads, other=0).to(c.COMPARED)
    else:
        distance = tl.load(ends + (number if c.ONE_PIXEL else number * 2))
        return tl.load(x + (first + distance), mask=exists, other=0).to(c.COMPARED)


@kernel
def _outputs(targets, sample, exists, output, output_exists, group, c: tl.constexpr):
    """Return a group's output offsets, and whether they exist."""
    used = exists[:, None] & output_exists[None, :]
    if c.TARGETS:
        target = tl.load(targets + group * c.n_outputs + output, mask=output_exists, other=-1)
        used &= (target >= 0)[None, :]
        target = tl.minimum(tl.maximum(target, 0), c.n_all_outputs - 1)
        return sample[:, None] * c.n_all_outputs + target[None, :], used
    else:
        return (sample * c.n_all_outputs)[:, None] + (group * c.n_outputs + output)[None, :], used


@kernel
def _cotangent(targets, dy, sample, exists, output, group, c: tl.constexpr):
    at, used = _outputs(targets, sample, exists, output, output < c.n_outputs, group, c)
    return tl.load(dy + at, mask=used, other=0).to(c.ACC)
