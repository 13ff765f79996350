"""Weighted rows in interpreted Pallas kernels: exact digits, integer tables, and shared-memory reads in Mosaic GPU."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pallas_interpreter import WITHOUT_MOSAIC

import lutjax
from lutjax import reads, testing
from lutjax.values._row_rules import SGD

mosaic = pytest.mark.skipif(WITHOUT_MOSAIC is not None, reason=str(WITHOUT_MOSAIC))


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


@pytest.mark.usefixtures("interpreted")
def test_sums_and_gradients_have_all_digits_of_float32():
    """Unrounded coefficients, tables and cotangents with full float32 sum precision."""
    weights, coefficients, dy = normal(0, 6, 8, 5), normal(1, 9, 6, 3), normal(2, 9, 2, 5)
    index = jax.random.randint(jax.random.key(3), (9, 6, 3), 0, 8)

    def f(weights, coefficients):
        return lutjax.weighted_lookup(
            weights, index, coefficients, groups=2, implementation="pallas"
        )

    y, pullback = jax.vjp(f, weights, coefficients)
    dweights, dcoefficients = pullback(dy)
    w, c, d, t = (
        *(np.asarray(a, np.float64) for a in (weights, coefficients, dy)),
        np.arange(6)[:, None],
    )
    rows, of_group = w[t, index], np.repeat(d, 3, axis=1)[:, :, None]
    wanted = np.zeros_like(w)
    np.add.at(wanted, (np.broadcast_to(t, index.shape), index), c[..., None] * of_group)
    for actual, expected in (
        (y, (c[..., None] * rows).reshape(9, 2, 3, 3, 5).sum((2, 3))),
        (dcoefficients, (rows * of_group).sum(-1)),
        (dweights, wanted),
    ):
        np.testing.assert_allclose(actual, expected, rtol=0, atol=4e-7 * np.abs(expected).max())


@dataclasses.dataclass(frozen=True)
class _Margin(reads.Read):
    """Custom single-row read, weighted by the first margin and absent from the package."""

    def initial(self):
        return {}

    def select(self, u, scalars):
        index, _, _ = reads.address(u)
        return [(index, u[0])]


@pytest.mark.usefixtures("interpreted")
def test_margins_are_those_of_plain_jax():
    """Margin-valued coefficients expose the margins: the same bits, at any distance between two inputs."""
    x = jnp.ldexp(normal(0, 7, 1, 20), jax.random.randint(jax.random.key(1), (7, 1, 20), -30, 30))
    anchors = jax.random.randint(jax.random.key(2), (5, 1, 2), 0, 20)
    weights = jnp.tile(jnp.eye(5)[:, None], (1, 2, 1))
    y = lutjax.scored_lut(
        x, weights, anchors, {}, read=_Margin(), groups=1, implementation="pallas"
    )
    np.testing.assert_array_equal(y[:, 0], lutjax.margins(x[:, 0], anchors)[..., 0])


@pytest.mark.usefixtures("interpreted")
def test_only_rows_that_were_read_decay():
    testing.check_update(testing.case("weighted_lookup", "groups"), "pallas", SGD(weight_decay=0.5))


@pytest.mark.usefixtures("interpreted")
def test_sums_of_integers_beyond_the_digits_of_float32():
    """Each product is exact, and products are accumulated as integers."""
    n_tables = 300
    values = jnp.full((n_tables, 2, 1), 127, jnp.int8).at[0].set(1)
    tables = lutjax.QuantizedTables(values, jnp.full((1, 1), 6, jnp.int32))
    x, anchors = jnp.asarray([[1000.0, 0.0]]), jnp.tile(jnp.asarray([[[0, 1]]]), (n_tables, 1, 1))
    read = reads.PowersOfTwo(ways=1)
    y = lutjax.scored_lut(x, tables, anchors, read.initial(), read=read, implementation="pallas")
    total = 2**10 * (1 + 127 * (n_tables - 1))  # coefficients of 2**4 in units of 2**-6
    assert total > 2**24
    assert float(y[0, 0]) == np.float32(total)


# ------------------------------------------------------------------------------------- shared memory in Mosaic GPU
@pytest.fixture
def scored_interpreted():
    """Interpret everything except shared-memory reads."""
    triton_interpreter = pytest.importorskip("triton_interpreter", reason="Triton is not installed")
    with triton_interpreter.interpreted(), triton_interpreter.scored_rows_in_numpy():
        yield


@mosaic
@pytest.mark.usefixtures("scored_interpreted")
def test_rows_with_a_coefficient_of_0_are_not_read():
    """Zero margins have zero scores: their row contents have no effect, unlike rows with nonzero scores."""
    x = jnp.zeros((70, 4)).at[3].set(jnp.array([1.0, 2.0, -1.0, 0.5]))
    anchors = jnp.array([[[0, 1], [2, 3]], [[1, 2], [0, 3]]])
    weights, read = jnp.full((2, 4, 5), jnp.inf), reads.Confidence()

    def run(implementation):
        options = {"read": read, "implementation": implementation}
        return lutjax.scored_lut(x, weights, anchors, read.initial(), **options)

    actual, expected = jax.jit(lambda: (run("pallas"), run("xla")))()
    np.testing.assert_array_equal(actual, expected)
    assert np.isinf(actual[3]).all()
    assert (actual[4] == 0).all()


@mosaic
@pytest.mark.parametrize("n_rows", [2, 64, 256])
def test_rows_that_differ_in_a_bit_lie_in_different_banks(n_rows):
    from lutjax.kernels._pallas.gpu import _shared_reads

    weights = jnp.broadcast_to(jnp.arange(n_rows, dtype=jnp.float32)[:, None], (1, n_rows, 48))
    call = _shared_reads._Call.for_reads(weights, jnp.zeros((1, 512), jnp.int32), 2, 1)
    wide, narrow = call.tables(weights)
    np.testing.assert_array_equal(wide, weights)
    assert narrow.shape == (1, n_rows, 16)
    place = np.argsort(np.asarray(narrow[0, :, 0]))  # of each row
    for bit in range(n_rows.bit_length() - 1):
        other = place[np.arange(n_rows) ^ (1 << bit)]
        assert np.all(place % 2 != other % 2), "64 bytes each: two of them are all banks"


@mosaic
@pytest.mark.usefixtures("scored_interpreted")
def test_samples_to_the_end_of_a_program_have_no_gradient():
    """Padding samples read the first row, which is infinite and unread by the actual samples."""
    x, anchors = jnp.array([[3.0, 2.0, 1.0, 0.0]]), jnp.array([[[0, 1], [1, 2], [2, 3]]])
    weights, read = jnp.ones((1, 8, 5)).at[:, 0].set(jnp.inf), reads.Confidence()

    def gradients(implementation):
        def total(given):
            options = {"read": read, "implementation": implementation}
            return lutjax.scored_lut(
                given["x"], given["weights"], anchors, given["scalars"], **options
            ).sum()

        actual = jax.grad(total)({"x": x, "weights": weights, "scalars": read.initial()})
        return {"x": actual["x"], "weights": actual["weights"], **actual["scalars"]}

    actual, expected = jax.jit(lambda: (gradients("pallas"), gradients("xla")))()
    testing.assert_all_close("gradients", actual, expected)
    assert all(np.isfinite(a).all() for a in actual.values())
