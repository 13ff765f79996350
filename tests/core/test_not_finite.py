"""NaN, infinities and subnormal numbers: the "NaN" section in docs/semantics.md, for every implementation."""

import functools
import zlib

import jax
import jax.numpy as jnp
import machine
import numpy as np
import pytest
from cases import (
    case_of,
    fast_size,
    implementations,
    ops,
    skipping_what_is_left_to_others,
    slow_where,
)

import lutjax
from lutjax import reads, testing

pytestmark = pytest.mark.gpu  # worth running wherever implementations run

NUMBERS = [np.nan, np.inf, -np.inf, 1e-40, -2e-39]
DRAWS = 8

FINITE_ALIKE = ("soft_lut", "binary_lut")
"""Ops with finite results at the same positions, and no further guarantee."""

COTANGENTS_FINITE_ALIKE = ("bilinear_gates", "gate_network", "logic_trees", "scored_lut")

PRODUCTS_OF_SAMPLES = (("margins", "xla"), ("scored_lut", "xla"))
"""On accelerators these multiply margin cotangents by a matrix: one non-finite element reaches all inputs in its sample."""

PRODUCTS_OF_OUTPUTS = (("lookup", "pallas/gpu"), ("lookup_attention", "pallas/gpu"))
"""Ops multiplying tables and output cotangents by read counts: one non-finite element reaches more output elements."""

OF_ALL_PLACES = (("logic_trees", "xla"),)
"""Level by level, zero cotangents at unselected positions are multiplied by the values: a non-finite value gives NaN."""

SCORED = ("split", "powers", "hard", "soft_sign")
SCORED_SLOW = (
    "powers_one_way", "blend", "hard_soft_sign", "shared_input", "sum_groups", "single", "ties",
)  # fmt: skip
MORE = {
    "lookup_attention": ("segments", "cross", "window"),
    "lut_pair_attention": ("ties", "window_segments"),
    "sparse_lookup": ("list_per_table", "one_list"),
    "weighted_lookup": ("valued",),
    "logic_trees": ("pools", "uneven_pools"),
    "lut_at_places": ("targets",),
    "soft_lut": ("eight_inputs",),
    "binary_lut": ("eight_inputs",),
}


def places():
    """Op, implementation, size."""
    for op in ops():
        if op == "packed_lut":  # of words
            continue
        fast, more = (
            ((fast_size(op),), MORE.get(op, ())) if op != "scored_lut" else (SCORED, SCORED_SLOW)
        )
        for implementation in implementations(op):
            yield from ((op, implementation, size) for size in (*fast, *more))


@functools.cache
def expected_at(op, size):
    """Arguments with unusual numbers at drawn positions, and the reference results."""
    program = testing.program(case_of(op, size))
    reference = jax.jit(program.expected)
    rng = np.random.default_rng(zlib.crc32(f"{op} {size}".encode()))

    def drawn(path, a):
        # Scalars of reads are finite: what computes them is asked by the layers and the op.
        if "log_" in jax.tree_util.keystr(path) or not a.size or rng.random() < 0.5:
            return a
        a = np.array(a)
        for _ in range(rng.integers(1, 3)):
            a.flat[rng.integers(a.size)] = rng.choice(NUMBERS)
        return jnp.asarray(a)

    result = []
    for _ in range(DRAWS):
        arguments = jax.tree_util.tree_map_with_path(drawn, program.arguments)
        result.append((arguments, reference(*arguments)))
    return result


def reached(op, implementation, part, name, expected, arguments):
    """Mask the elements where a matrix product may produce NaN."""
    if (op, implementation) in PRODUCTS_OF_SAMPLES and name == "x" and machine.backend() != "cpu":
        return ~np.isfinite(expected).all(-1, keepdims=True)
    if (op, implementation) in PRODUCTS_OF_OUTPUTS and name in ("y", "weights"):
        factor = np.asarray(arguments[0]["weights"] if name == "y" else arguments[1]["y"])
        return ~np.isfinite(factor).all(tuple(range(factor.ndim - 1)))
    if (op, implementation) in OF_ALL_PLACES and part == "cotangent":
        return np.True_
    return np.False_


FAST = ("detect", "lookup", "scored_lut", "margins")


@pytest.mark.parametrize(
    ("op", "implementation", "size"),
    slow_where(places(), lambda op, _, size: size != "split" or op not in FAST),
)
def test_every_element_is_as_in_the_reference(op, implementation, size):
    run = jax.jit(testing.program(case_of(op, size), implementation).function)
    for arguments, expected in expected_at(op, size):
        with skipping_what_is_left_to_others(implementation):
            found = run(*arguments)
        for part, a, e in zip(("output", "cotangent"), found, expected, strict=False):
            for name in e:
                one, other = np.asarray(a[name]), np.asarray(e[name])
                by_product = reached(op, implementation, part, name, other, arguments) & np.isnan(
                    one
                )
                one, other = (np.where(by_product, 0, x).astype(x.dtype) for x in (one, other))
                if op in FINITE_ALIKE or (part == "cotangent" and op in COTANGENTS_FINITE_ALIKE):
                    np.testing.assert_array_equal(
                        np.isfinite(one), np.isfinite(other), err_msg=name
                    )
                    one, other = (np.where(np.isfinite(x), x, 0) for x in (one, other))
                # Atomics of GPUs take subnormal numbers for 0.
                if machine.backend() != "cpu" and jnp.issubdtype(one.dtype, np.floating):
                    one, other = (
                        np.where(np.abs(x) < jnp.finfo(x.dtype).tiny, 0, x) for x in (one, other)
                    )
                testing.assert_close(f"{op} {size}: {part} {name}", one, other)


# ------------------------------------------------------------------------------------- scored reads
ANCHORS = np.int32([[[0, 3], [1, 3], [2, 3]]])
TABLE = np.arange(0.5, 16.5, dtype=np.float32).reshape(1, 8, 2)  # exact when rounded
ALL = [
    reads.Hard(), reads.Blend(), reads.SoftSign(), reads.SoftSign(hard=True), reads.Confidence(1),
    reads.Confidence(), reads.PowersOfTwo(1), reads.PowersOfTwo(),
]  # fmt: skip


def run_read(read, x, implementation):
    def layer(x, weights, scalars):
        return lutjax.scored_lut(
            x, weights, ANCHORS, scalars, read=read, implementation=implementation
        )

    with skipping_what_is_left_to_others(implementation):
        y, pull = jax.vjp(layer, jnp.asarray(x, jnp.float32), TABLE, read.initial())
    return np.asarray(y), *(jax.tree.map(np.asarray, result) for result in pull(jnp.ones_like(y)))


@pytest.mark.parametrize("implementation", implementations("scored_lut"))
@pytest.mark.parametrize("read", [ALL[2], ALL[7]], ids=str)
def test_a_nan_makes_nan_of_what_its_table_reads(read, implementation):
    y, dx, dw, ds = run_read(read, [[2, np.nan, -3, 0], [-0.5, -1, 2, 0]], implementation)
    assert np.isnan(y[0]).all()
    assert np.isfinite(y[1]).all()
    valued = read.valued or getattr(read, "ways", 2)
    np.testing.assert_array_equal(np.isnan(dw[0]).all(1), np.isin(np.arange(8), [1, 3][:valued]))
    assert np.isfinite(dw[0, [4, 5]]).all()
    of_all = isinstance(read, reads.Confidence | reads.PowersOfTwo)
    of_all |= implementation == "xla" and machine.backend() != "cpu"  # a product of matrices
    np.testing.assert_array_equal(np.isnan(dx[0]), [of_all, True, of_all, True])
    assert np.isfinite(dx[1]).all()
    assert all(np.isnan(d) for d in ds.values())


@pytest.mark.parametrize("implementation", implementations("scored_lut"))
@pytest.mark.parametrize("read", [ALL[1], ALL[5]], ids=str)
def test_an_infinity_is_no_score(read, implementation):
    """An infinite distance is NaN in a score; other reads treat it as the smallest distance, where a blend gives it a share of 0."""
    of_scores = isinstance(read, reads.Confidence | reads.PowersOfTwo)
    y, dx, _, _ = run_read(read, [[2, np.inf, -3, 0], [-0.5, -1, 2, 0]], implementation)
    assert np.isnan(y[0]).all() == of_scores
    assert np.isnan(dx[0]).all() == of_scores
    assert np.isfinite(y[1]).all()
    assert np.isfinite(dx[1]).all()
    y, dx, _, _ = run_read(read, [[-np.inf, np.inf, np.inf, 0]], implementation)
    is_nan = not isinstance(read, reads.Hard | reads.Blend)
    assert np.isnan(y).all() == is_nan
    if not is_nan:
        np.testing.assert_array_equal(y[0], TABLE[0, 6])
        np.testing.assert_array_equal(dx, 0)


@pytest.mark.parametrize("implementation", implementations("scored_lut"))
def test_a_sum_of_distances_beyond_floats_is_no_score(implementation):
    y, dx, _, _ = run_read(
        reads.PowersOfTwo(1), [[3e38, 3e38, 1, 0], [3e37, 1, 1, 0]], implementation
    )
    assert np.isnan(y[0]).all()
    assert np.isnan(dx[0]).all()
    np.testing.assert_array_equal(y[1], 16 * np.asarray(TABLE[0, 7]))


# ------------------------------------------------------------------------------------- sizes of numbers
@pytest.mark.parametrize("implementation", implementations("scored_lut"))
def test_gradients_of_soft_signs_at_any_size_of_margins(implementation):
    """Compared with the closed form in float64: no digits are lost where a margin is much larger than the scalars, or smaller."""
    m = np.float32(np.geomspace(1e-20, 1e17, 75))
    read, anchors, table = reads.SoftSign(), np.int32([[[0, 1]]]), jnp.array([[[0.0], [1.0]]])

    def each(x, soft):
        scalars = {**read.initial(), "log_soft": soft}
        return lutjax.scored_lut(
            x, table, anchors, scalars, read=read, implementation=implementation
        )[0]

    x = jnp.stack([jnp.asarray(m), jnp.zeros_like(m)], 1)
    dx, d_soft = jax.jit(jax.vmap(jax.grad(each, argnums=(0, 1)), (0, None)))(
        x, jnp.log(jnp.float32(0.5))
    )
    wide, soft = m.astype(np.float64), 0.5
    w = 1 / (1 + np.exp(4 * wide / (soft + wide)))
    slope = 4 * w * (1 - w) * soft / (soft + wide) ** 2
    np.testing.assert_allclose(dx[:, 0], slope, rtol=3e-6)
    np.testing.assert_allclose(d_soft, -slope * wide, rtol=3e-6)


@pytest.mark.parametrize("implementation", implementations("scored_lut"))
def test_gradients_of_scores_at_large_margins(implementation):
    """Beyond 126 / beta a sigmoid is 1: its logarithm and derivatives are 0, however large the margin multiplied with them."""
    read, anchors, table = reads.Confidence(), np.int32([[[0, 1]]]), jnp.array([[[1.0], [3.0]]])
    x = jnp.array([[1e2, 0], [1e8, 0], [1e18, 0], [3e37, 0]], jnp.float32)

    def layer(x, scalars):
        return lutjax.scored_lut(
            x, table, anchors, scalars, read=read, implementation=implementation
        ).sum()

    dx, ds = jax.grad(layer, argnums=(0, 1))(x, read.initial())
    np.testing.assert_allclose(dx, [[3, -3]] * 4, rtol=1e-6)
    assert float(ds["log_beta"]) == 0
    assert float(ds["log_gamma"]) == 0


class TestSlow:
    @pytest.mark.parametrize("implementation", implementations("scored_lut"))
    @pytest.mark.parametrize("entry", [np.inf])
    def test_rounded_tables_with_an_entry_that_is_no_number(self, entry, implementation):
        read = reads.PowersOfTwo()
        anchors = np.tile(ANCHORS, (4, 1, 1))
        weights = jnp.tile(TABLE, (4, 1, 1)).at[1, 7, 0].set(entry)
        x = jnp.array([[[2.0, -1.0, -1.5, 0.0]]])

        def layer(x, weights):
            options = {"read": read, "groups": 2, "implementation": implementation}
            return lutjax.scored_lut(x, weights, anchors, read.initial(), **options)

        with skipping_what_is_left_to_others(implementation):
            y, pull = jax.vjp(layer, x, weights)
        expected = [[True, False], [False, False]]
        np.testing.assert_array_equal(np.isnan(y[0]), expected)
        dx, dw = pull(jnp.ones_like(y).at[0, 0].set(0))
        assert np.isfinite(dw).all()
        assert np.isnan(dx).any()
        with skipping_what_is_left_to_others(implementation):
            of_integers = layer(x, lutjax.quantize_tables(weights, groups=2))
        np.testing.assert_array_equal(np.isnan(of_integers[0]), expected)
