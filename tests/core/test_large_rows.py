"""Margin gradients with large rows, compared with the float64 definition within individual error bounds.

Kernels subtract rows before multiplying, so the error scales with row differences. Kernels with whole-table products
subtract the products instead. Their bound scales with the products, as the `lutjax.lookup` docstring explains.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import worlds
from cases import ops
from machine import needs_gpu

import lutjax
from lutjax.values._dtypes import accumulator

# Weighted reads have the product of each row as the cotangent of its coefficient: nothing to subtract.
LOOK_UPS = [op for op in ops("update") if op not in ("weighted_lookup", "scored_lut")]
MULTIPLIES_FIRST = ("xla, TPUs", "pallas/tpu", "triton, counted")  # worlds
# Relative to the sum of |dy| |row - flipped row|: a rounding for each output, pair and step of the slope.
OF_DIFFERENCES = {"float32": 2.0**-19, "bfloat16": 2.0**-19, "float64": 2.0**-48}
OF_PRODUCTS = 2.0**-20  # relative to the sum of |dy| (|row| + |flipped row|)

BITS, N_OUTPUTS, T, LENGTH = 2, 5, 2, 5


def numbers(seed, *shape):
    return np.random.default_rng([seed, *shape]).integers(-4, 5, shape) / 4


def large(base, dtype, *shape):
    """Rows close to a large number, some with the other sign."""
    step = {"float32": 2.0**-20, "bfloat16": 2.0**-6, "float64": 2.0**-48}[dtype]
    return jnp.asarray(base * (1 + 4 * step * numbers(1, *shape)), dtype)


def detection(seed, dtype, *shape, bits=BITS):
    return lutjax.detect_signs(jnp.asarray(numbers(seed, *shape, bits) + 1 / 8, accumulator(dtype)))


def as_numpy(d):
    return np.asarray(d.index), np.asarray(d.flip), np.asarray(d.margin, np.float64)


class Sums:
    """Float64 cotangents, sums over addend magnitudes, and magnitude sums for products subtracted by other kernels."""

    def __init__(self, shape):
        self.value, self.of_differences, self.of_products = np.zeros((3, *shape))

    def add(self, at, margin, dy, row, other, sign=1.0):
        slope = 0.5 * (1 if margin > 0 else -1) / (1 + abs(margin)) ** 2
        self.value[at] += sign * slope * np.sum(dy * (row - other))
        self.of_differences[at] += abs(slope) * np.sum(np.abs(dy) * np.abs(row - other))
        with np.errstate(
            over="ignore", invalid="ignore"
        ):  # of numbers near the largest; used where there are none
            self.of_products[at] += abs(slope) * np.sum(np.abs(dy) * (np.abs(row) + np.abs(other)))


def of_lookup(base, dtype):
    weights, d = large(base, dtype, T, 2**BITS, N_OUTPUTS), detection(2, dtype, 3, T)
    dy = jnp.asarray(numbers(3, 3, N_OUTPUTS), dtype)

    def f(implementation, weights, margin):
        at = lutjax.Detection(d.index, d.flip, margin, BITS)
        return lutjax.lookup(weights, at, implementation=implementation)

    sums, (index, flip, margin) = Sums((3, T)), as_numpy(d)
    w, c = (np.asarray(a, np.float64) for a in (weights, dy))
    for b, t in np.ndindex(3, T):
        i = index[b, t]
        sums.add((b, t), margin[b, t], c[b], w[t, i], w[t, i ^ flip[b, t]])
    return f, weights, (d.margin,), dy, [sums]


def of_sparse_lookup(base, dtype, targets=((1, 0, -1),) * 2**BITS):
    targets = np.asarray(targets)[None]
    n_slots = targets.shape[2]
    weights, d = large(base, dtype, T, 2**BITS, n_slots), detection(4, dtype, 3, T)
    dy = jnp.asarray(numbers(3, 3, N_OUTPUTS), dtype)

    def f(implementation, weights, margin):
        at = lutjax.Detection(d.index, d.flip, margin, BITS)
        ids = jnp.asarray(targets, jnp.int32)
        return lutjax.sparse_lookup(weights, at, ids, N_OUTPUTS, implementation=implementation)

    full = np.asarray(weights, np.float64)[..., None] * (targets[..., None] == np.arange(N_OUTPUTS))
    full = full.sum(2)
    sums, (index, flip, margin) = Sums((3, T)), as_numpy(d)
    c = np.asarray(dy, np.float64)
    for b, t in np.ndindex(3, T):
        i = index[b, t]
        sums.add((b, t), margin[b, t], c[b], full[t, i], full[t, i ^ flip[b, t]])
    return f, weights, (d.margin,), dy, [sums]


def of_lookup_attention(base, dtype):
    q, k = detection(5, dtype, 2, LENGTH, T), detection(6, dtype, 2, LENGTH, T)
    e = detection(7, dtype, LENGTH - 1, T, bits=1)
    weights = large(base, dtype, T, 2 ** (2 * BITS + 1), N_OUTPUTS)
    dy = jnp.asarray(numbers(8, 2, LENGTH, N_OUTPUTS), dtype)

    def f(implementation, weights, *margins):
        of = zip((q, k, e), margins, strict=True)
        return lutjax.lookup_attention(
            weights,
            *(lutjax.Detection(d.index, d.flip, m, d.bits) for d, m in of),
            implementation=implementation,
        )

    of_q, of_k, of_e = Sums(q.shape), Sums(k.shape), Sums(e.shape)
    (qi, qf, qm), (ki, kf, km), (ei, ef, em) = (as_numpy(d) for d in (q, k, e))
    w, c = (np.asarray(a, np.float64) for a in (weights, dy))
    for b, t, j, i in np.ndindex(2, T, LENGTH, LENGTH):
        n = j - i - 1
        if n < 0:
            continue
        query, key, place = (b, j, t), (b, i, t), (n, t)
        row = qi[query] << (BITS + 1) | ki[key] << 1 | ei[place]
        if abs(qm[query]) < abs(km[key]):
            of, at, margin, other = of_q, query, qm[query], row ^ qf[query] << (BITS + 1)
        else:
            of, at, margin, other = of_k, key, km[key], row ^ kf[key] << 1
        of.add(at, margin, c[b, j], w[t, row], w[t, other])
        if abs(em[place]) < min(abs(qm[query]), abs(km[key])):
            of_e.add(place, em[place], c[b, j], w[t, row], w[t, row ^ ef[place]])
    return f, weights, (q.margin, k.margin, e.margin), dy, [of_q, of_k, of_e]


def of_lut_pair_attention(base, dtype):
    n_inputs = 3
    x = jnp.asarray(numbers(9, 2, LENGTH, n_inputs) + np.arange(n_inputs) / 16, accumulator(dtype))
    positions = jnp.asarray(numbers(10, LENGTH - 1, T, 1) + 1 / 32, accumulator(dtype))
    anchors = np.array([[[0, 4], [6, 2]], [[5, 1], [3, 6]]])
    weights = large(base, dtype, T, 2**BITS, N_OUTPUTS)
    dy = jnp.asarray(numbers(11, 2, LENGTH, N_OUTPUTS), dtype)

    def f(implementation, weights, x, positions):
        ids = jnp.asarray(anchors, jnp.int32)
        return lutjax.lut_pair_attention(x, weights, ids, positions, implementation=implementation)

    of_x, of_p = Sums(x.shape), Sums(positions.shape)
    w, c, x_, p_ = (np.asarray(a, np.float64) for a in (weights, dy, x, positions))
    for b, t, j, i in np.ndindex(2, T, LENGTH, LENGTH):
        n = j - i - 1
        if n < 0:
            continue
        z = np.concatenate([x_[b, i], x_[b, j], p_[n, t]])
        delta = z[anchors[t, :, 0]] - z[anchors[t, :, 1]]
        row, closest = int(((delta > 0) << np.arange(BITS)).sum()), int(np.argmin(np.abs(delta)))
        for end, sign in zip(anchors[t, closest], (1, -1), strict=True):
            part, place = divmod(int(end), n_inputs)
            of, at = (of_p, (n, t, place)) if part == 2 else (of_x, (b, (i, j)[part], place))
            of.add(at, delta[closest], c[b, j], w[t, row], w[t, row ^ 1 << closest], sign)
    return f, weights, (x, positions), dy, [of_x, of_p]


CASES = {
    "lookup": of_lookup,
    "sparse_lookup": of_sparse_lookup,
    "lookup_attention": of_lookup_attention,
    "lut_pair_attention": of_lut_pair_attention,
}
LARGE = {"float32": (1e8, 3e38), "bfloat16": (1e8, 3e38), "float64": (1e17, 1.6e308)}
# Sums of their products are finite.
LARGE_OF_PRODUCTS = {"float32": (1e8, 2e37), "bfloat16": (1e8, 2e37)}


def cotangents(f):
    def call(weights, dy, *arguments):
        return jax.vjp(functools.partial(f, weights), *arguments)[1](dy)

    return call


def check(world, op, implementation, bases, dtype, case=None):
    """Check rows with small differences from each of `bases`."""
    call = None
    for base in bases:
        f, weights, arguments, dy, sums = (case or CASES[op])(base, dtype)
        call = call or jax.jit(
            cotangents(functools.partial(f, implementation))
        )  # only tables differ
        for number, (a, of) in enumerate(zip(call(weights, dy, *arguments), sums, strict=True)):
            assert np.any(of.value)
            if world in MULTIPLIES_FIRST:
                bound = OF_PRODUCTS * of.of_products
            else:
                bound = OF_DIFFERENCES[dtype] * of.of_differences
            error = np.abs(np.asarray(a, np.float64) - of.value)
            message = f"{world}, {op}, {dtype}, {base}: cotangent {number}"
            assert np.all(error <= bound), f"{message}: {np.max(error - bound)} above its bound"


def test_every_look_up_is_tried():
    assert list(CASES) == LOOK_UPS


def bases(world, dtype):
    return (LARGE_OF_PRODUCTS if world in MULTIPLIES_FIRST else LARGE)[dtype]


@pytest.mark.parametrize(
    ("world", "op"),
    worlds.in_worlds(LOOK_UPS, ("lookup",)),
)
def test_large_rows(world, op, request):
    with worlds.of(world, request) as implementation:
        check(world, op, implementation, bases(world, "float32"), "float32")


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
@pytest.mark.parametrize("world", ["xla", "triton"])
def test_large_rows_of_other_dtypes(world, dtype, request):
    with worlds.of(world, request) as implementation, jax.enable_x64(dtype == "float64"):
        check(world, "lookup", implementation, bases(world, dtype), dtype)


# One list for all rows; lists of which some slots have one target in both rows, and some are not used in one of them.
LISTS = {
    "one list": ((1, 0, -1),),
    "other lists": ((1, 0, -1), (1, -1, -1), (1, 0, -1), (1, -1, -1)),
}


@pytest.mark.parametrize("lists", LISTS)
@pytest.mark.parametrize("world", ["xla", "triton"])
def test_large_rows_of_other_lists(world, lists, request):
    def case(base, dtype):
        return of_sparse_lookup(base, dtype, LISTS[lists])

    with worlds.of(world, request) as implementation:
        largest = 3e38 if lists == "one list" else 1e37
        check(world, "sparse_lookup", implementation, (1e8, largest), "float32", case)


@pytest.mark.parametrize("world", ["xla"])
def test_rows_whose_difference_is_too_large(world, request):
    d = lutjax.Detection(
        *(jnp.asarray([[a]]) for a in (1, 1)), jnp.asarray([[0.5]], jnp.float32), 1
    )
    weights = jnp.asarray([[[-3e38, 1.0], [3e38, 2.0]]], jnp.float32)
    with worlds.of(world, request) as implementation:

        def f(margin):
            at = lutjax.Detection(d.index, d.flip, margin, 1)
            return lutjax.lookup(weights, at, implementation=implementation)

        pullback = jax.vjp(f, d.margin)[1]
        for dy, wanted in (([[1.0, 1.0]], np.inf), ([[-1.0, 1.0]], -np.inf)):
            assert pullback(jnp.asarray(dy, jnp.float32))[0] == wanted


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("op", LOOK_UPS)
@pytest.mark.parametrize("implementation", ["xla", "triton", "pallas"])
def test_large_rows_on_gpus(implementation, op):
    """Check the kernels as compiled for the device; `pallas` is Mosaic GPU, which covers some ops."""
    check("", op, (implementation, "xla"), bases("", "float32"), "float32")
