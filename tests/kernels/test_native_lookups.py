"""Native lookup kernels beyond the common implementation tests: the same bits as plain JAX, and row update rules."""

import dataclasses

import jax
import jax.numpy as jnp
import native_kernels
import numpy as np
import pytest
from cases import fast_size, rates_of, slow_except

import lutjax
from lutjax import optim as tables, testing

if why := native_kernels.why_not():
    pytest.skip(why, allow_module_level=True)


def same_bits(f, *args):
    of_native, of_xla = (
        jax.tree.leaves(jax.jit(f, static_argnums=0)(i, *args)) for i in ("native", "xla")
    )
    for a, b in zip(of_native, of_xla, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a).view(np.uint8), np.asarray(b).view(np.uint8))


def random(seed, *shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def detection(seed, *shape, bits):
    draw = np.random.default_rng(seed)
    index, flip = draw.integers(0, 2**bits, shape), 1 << draw.integers(0, bits, shape)
    return lutjax.Detection(
        jnp.asarray(index, jnp.int32), jnp.asarray(flip, jnp.int32), random(seed, *shape), bits
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "scale", [2.0**20, 12345.0, 2.0**31]
)  # the last one: addends saturate, sums wrap
def test_fixed_point_is_that_of_plain_jax(scale, dtype):
    d, accumulate = detection(0, 9, 6, bits=3), lutjax.FixedPoint(scale)
    weights, dy = random(1, 6, 8, 37, dtype=dtype), random(2, 9, 2, 37, dtype=dtype)

    def both(implementation, weights, margin, dy):
        def f(weights, margin):
            at = dataclasses.replace(d, margin=margin)
            options = {"accumulate": accumulate, "implementation": implementation}
            return lutjax.lookup(weights, at, groups=2, **options)

        y, pullback = jax.vjp(f, weights, margin)
        return y, pullback(dy)

    same_bits(both, weights, d.margin, dy)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("epsilon", [0.0, 0.5])
def test_detection_of_special_values_is_that_of_plain_jax(epsilon, dtype):
    """Several NaN kinds, infinities, signed zeros, subnormal numbers, and ties."""
    odd = np.array(
        [0x7FC00001, 0xFFC00000, 0x7F800000, 0xFF800000, 0, 0x80000000, 0x00400000, 0x3F000000],
        np.uint32,
    )
    x = np.random.default_rng(0).choice(odd, (70, 12)).view(np.float32)
    x = jnp.asarray(x).astype(dtype)
    anchors = jnp.asarray(np.random.default_rng(1).integers(-2, 14, (19, 5, 2)), jnp.int32)

    def detect(implementation, x):
        d = lutjax.detect(x, anchors, epsilon=epsilon, implementation=implementation)
        return d.index, d.flip, jnp.isnan(d.margin), jnp.where(jnp.isnan(d.margin), 0, d.margin)

    for n in (70, 3):  # of few samples, detectors are in the lanes
        same_bits(detect, x[:n])
    same_bits(lambda i, x: lutjax.detect_signs(x, epsilon=epsilon, implementation=i).index, x)
    same_bits(lambda i, x: lutjax.detect_signs(x, epsilon=epsilon, implementation=i).flip, x)


@pytest.mark.parametrize("rule", [tables.SGD(), tables.RowAdam(b1=0.5, weight_decay=0.5)], ids=str)
def test_tables_with_more_rows_than_one_pass_sorts(rule):
    testing.check_update(testing.case("lookup", "repeats", bits=13, outputs=21), "native", rule)


@pytest.mark.parametrize(
    ("op", "kind", "rule"),
    slow_except(
        [
            ("lookup", "table", tables.SGD()),
            ("lookup", "edge", tables.RowAdam(b1=0.5, weight_decay=0.5)),
            ("scored_lut", "row", tables.SGD()),
            ("sparse_lookup", "output", tables.RowAdagrad()),
            ("weighted_lookup", "edge", tables.SGD()),
            ("lookup_attention", "table", tables.SGD()),
            ("lut_pair_attention", "edge", tables.RowMomentum()),
        ],
        f"lookup-table-{tables.SGD()}", f"lookup-edge-{tables.RowAdam(b1=0.5, weight_decay=0.5)}", ids=str,
    ),
    ids=str,
)  # fmt: skip
def test_rates_that_differ(op, kind, rule):
    case = testing.case(op, fast_size(op))
    testing.check_update(case, "native", rule, rates=rates_of(case, kind))


def test_rules_of_users_are_left_to_plain_jax():
    @dataclasses.dataclass(frozen=True)
    class Signs(tables.RowMomentum):
        def _direction(self, gradient, state):
            return jnp.sign(gradient), state

    testing.check_update(testing.case("lookup", "split"), None, Signs())
    with pytest.raises(lutjax.NoImplementationError, match=r"moves rows by SGD, .*not by Signs"):
        testing.check_update(testing.case("lookup", "split"), "native", Signs())
