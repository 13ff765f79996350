"""Integer accumulation at its bounds: no sum wraps, and each matches the 64-bit sum, rounded once."""

import dataclasses

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import implementations, skipping_what_is_left_to_others

import lutjax
from lutjax import reads
from lutjax.values import _quantized

pytestmark = pytest.mark.gpu  # worth running wherever implementations run

WIDE = 1e6  # a margin whose score is above the largest power of two
_SHIFT = 6


def tables(rng, n_tables, outputs, groups, entry=None):
    """One-comparison tables: random, or with equal entries."""
    shape = (n_tables, 2, outputs)
    values = rng.integers(-128, 128, shape) if entry is None else np.full(shape, entry)
    exponents = rng.integers(-9, -5, (groups, outputs))
    return lutjax.QuantizedTables(
        jnp.asarray(values, jnp.int8), jnp.asarray(exponents.reshape(groups, outputs), jnp.int32)
    )


def scalars_of(read):
    """Scalars giving a neighbor the same weight as its row, at margins as large as `WIDE`."""
    scalars = read.initial()
    return scalars | {"log_tau": jnp.float32(60)} if "log_tau" in scalars else scalars


def coefficients(x, anchors, read, groups):
    """Rows and coefficients for one or both ways, in units of the smallest coefficient.

    At `WIDE` margins, use the largest power of two without calling the read.
    """
    n, ways = len(x), read.ways
    if (np.abs(x[..., 0]) == WIDE).all():
        of_table = np.repeat(x, len(anchors) // x.shape[1], 1)
        a, b = (
            np.take_along_axis(of_table, anchors[None, :, 0, side, None], 2)[..., 0]
            for side in (0, 1)
        )
        row = (a > b).astype(int)
        return np.stack([row, 1 - row], -1)[..., :ways], np.full((n, len(anchors), ways), 2**10)
    index, c = read(lutjax.margins(jnp.asarray(x), anchors, groups=groups), scalars_of(read))
    return np.asarray(index), (np.asarray(c, np.float64) * 2**_SHIFT).astype(np.int64)


def defined(x, anchors, quantized, read, groups):
    """The section 12 sums in int64."""
    index, units = coefficients(x, anchors, read, groups)
    rows = np.asarray(quantized.values).astype(np.int64)[np.arange(len(anchors))[:, None], index]
    each = (units[..., None] * rows).sum(-2)  # [n, T, O]
    total = each.reshape(len(x), groups, -1, each.shape[-1]).sum(2)
    return total.astype(np.float32) * np.ldexp(
        np.float32(1), np.asarray(quantized.exponents) - _SHIFT
    )


def check(
    implementation, n_tables, *, n=3, groups=1, outputs=5, ways=2, entry=None, margins=(WIDE, WIDE)
):
    rng = np.random.default_rng(n_tables)
    read = reads.PowersOfTwo(ways)
    scalars, anchors = scalars_of(read), np.tile(np.int32([[[0, 1]]]), (groups * n_tables, 1, 1))
    anchors = anchors ^ rng.integers(0, 2, anchors.shape[:2])[..., None].astype(np.int32)
    x = np.zeros((n, groups, 2), np.float32)
    x[..., 0] = np.float32(np.geomspace(*margins, n))[:, None]
    given = tables(rng, groups * n_tables, outputs, groups, entry)
    y = jax.jit(
        lambda x, given: lutjax.scored_lut(
            x, given, anchors, scalars, read=read, groups=groups, implementation=implementation
        )
    )(x, given)
    expected = defined(x, anchors, given, read, groups)
    np.testing.assert_array_equal(y, expected)
    return np.asarray(y)


BOUNDS = [
    {"n_tables": 8191, "entry": -128},
    {"n_tables": 8192, "entry": -128},
    {"n_tables": 16385, "ways": 1, "n": 1, "entry": -128},
]
MORE = {"n_tables": 9001, "n": 70, "groups": 2, "margins": (0.1, WIDE)}


@pytest.mark.parametrize("implementation", implementations("scored_lut"))
@pytest.mark.parametrize(
    "how",
    BOUNDS,
    ids=str,
)
def test_sums_of_tables(how, implementation):
    with skipping_what_is_left_to_others(implementation):
        check(implementation, **how)


@pytest.mark.slow
@pytest.mark.usefixtures("accelerator_formulation")
def test_sums_of_tables_as_on_accelerators():
    check("xla", **MORE)


@pytest.fixture
def few_fit(monkeypatch):
    """Reduce the addend limit for int32 sums so far that small tables exceed it."""
    import forgotten

    forgotten.compiled()
    monkeypatch.setattr(_quantized, "MOST_ADDENDS", 5)
    yield
    forgotten.compiled()


@pytest.mark.parametrize(("n_tables", "groups", "n"), [(7, 2, 65)])
@pytest.mark.usefixtures("few_fit")
def test_sums_of_any_number_of_tables(n_tables, groups, n):
    check("xla", n_tables, n=n, groups=groups, margins=(0.05, WIDE))


@hypothesis.settings(max_examples=3)
@hypothesis.given(
    st.lists(
        st.lists(st.integers(-(2**31), 2**31 - 1), min_size=3, max_size=3), min_size=30, max_size=30
    )
)
def test_wide_sums_are_exact(addends):
    exact, parts = (
        [sum(column) for column in zip(*addends, strict=True)],
        jnp.array(addends, jnp.int32),
    )
    one_by_one = _quantized.WideSum(jnp.zeros_like(parts[0]), jnp.zeros_like(parts[0]))
    for addend in parts:
        one_by_one = one_by_one + addend
    for result in (one_by_one, _quantized.WideSum.from_parts(parts)):
        high, low = (np.asarray(a, np.int64) for a in (result.high, result.low))
        assert (high * 2**16 + low).tolist() == exact
        assert (low >> 16 == 0).all()
        # One rounding, as the high part has at most 24 bits.
        np.testing.assert_array_equal(
            result.astype(jnp.float32), np.array(exact).astype(np.float32)
        )


def test_as_many_parts_as_a_wide_sum_takes():
    for addend in (-(2**31), 2**31 - 1):
        result = _quantized.WideSum.from_parts(jnp.full((2**15 - 1, 1), addend, jnp.int32))
        assert int(result.high[0]) * 2**16 + int(result.low[0]) == (2**15 - 1) * addend


@dataclasses.dataclass(frozen=True)
class Own(reads.PowersOfTwo):
    """A read with given coefficients."""

    coefficients: tuple[float, ...] = ()

    def select(self, u, scalars):
        index, flip, _ = reads.address(u)
        ways = (index, index ^ flip, index)
        return [(i, jnp.full_like(u[0], c)) for i, c in zip(ways, self.coefficients, strict=False)]


OWN = {
    "all that there are": ((2.0**4, 2.0**-6, -0.375), 16 * 3 - 5 / 64 - 0.375 * 3),
    "too large": ((32.0,), np.nan),
    "too fine": ((0.3,), np.nan),
    "the second one too fine": ((1.0, 0.01), np.nan),
    "infinite": ((np.inf,), np.nan),
}


@pytest.mark.parametrize("name", OWN)
def test_coefficients_of_a_read_of_your_own(name):
    coefficients, expected = OWN[name]
    given = lutjax.QuantizedTables(jnp.array([[[-5], [3]]], jnp.int8), jnp.zeros((1, 1), jnp.int32))
    read = Own(coefficients=coefficients)
    y = lutjax.scored_lut(
        jnp.array([1.0, 0.0]), given, np.int32([[[0, 1]]]), read.initial(), read=read
    )
    np.testing.assert_array_equal(y, [expected])
