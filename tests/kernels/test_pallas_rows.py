"""Weighted rows on TensorCores, interpreted: digits, blocks, tables of integers, reads of one's own, and what is refused."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pallas_interpreter
import pytest
from cases import detections, slow
from pallas_interpreter import outline

import lutjax
from lutjax import reads, testing
from lutjax.kernels._pallas import _tpus
from lutjax.kernels._pallas.tpu import _row_blocks
from lutjax.ops.lookup import Lookup
from lutjax.ops.scored_lut import ScoredLut
from lutjax.ops.weighted_lookup import WeightedLookup
from lutjax.values._row_rules import SGD, RowAdagrad


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of 8 rows, 128 samples and 128 outputs: several along every axis."""
    for name in ("_ROWS", "_SAMPLES", "_OUTPUTS"):
        monkeypatch.setattr(_row_blocks, name, 128 if name != "_ROWS" else 8)


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


@pytest.mark.usefixtures("interpreted")
def test_sums_and_gradients_have_all_digits_of_float32():
    """Coefficients, tables and cotangents that no grid rounds: as many digits as float32 sums have."""
    weights, coefficients, dy = normal(0, 6, 8, 5), normal(1, 9, 6, 3), normal(2, 9, 2, 5)
    index = jax.random.randint(jax.random.key(3), (9, 6, 3), 0, 8)

    def f(weights, coefficients):
        return lutjax.weighted_lookup(weights, index, coefficients, groups=2, implementation="pallas")

    y, pullback = jax.vjp(f, weights, coefficients)
    dweights, dcoefficients = pullback(dy)
    w, c, d, t = *(np.asarray(a, np.float64) for a in (weights, coefficients, dy)), np.arange(6)[:, None]
    rows, of_group = w[t, index], np.repeat(d, 3, axis=1)[:, :, None]
    wanted = np.zeros_like(w)
    np.add.at(wanted, (np.broadcast_to(t, index.shape), index), c[..., None] * of_group)
    for actual, expected in (
        (y, (c[..., None] * rows).reshape(9, 2, 3, 3, 5).sum((2, 3))),
        (dcoefficients, (rows * of_group).sum(-1)),
        (dweights, wanted),
    ):
        np.testing.assert_allclose(actual, expected, rtol=0, atol=4e-7 * np.abs(expected).max())


@pytest.mark.usefixtures("interpreted")
def test_margins_are_those_of_plain_jax():
    """A read whose coefficients are the margins shows them: the same bits, at any distance of two inputs."""
    x = jnp.ldexp(normal(0, 7, 1, 20), jax.random.randint(jax.random.key(1), (7, 1, 20), -30, 30))
    anchors = jax.random.randint(jax.random.key(2), (5, 1, 2), 0, 20)
    y = lutjax.scored_lut(
        x,
        jnp.tile(jnp.eye(5)[:, None], (1, 2, 1)),
        anchors,
        {},
        read=_Margin(),
        groups=1,
        implementation="pallas",
    )
    np.testing.assert_array_equal(y[:, 0], lutjax.margins(x[:, 0], anchors)[..., 0])


@dataclasses.dataclass(frozen=True)
class _Margin(reads.Read):
    """Read of one row, weighted by the first margin: one that the package does not have."""

    def initial(self):
        return {}

    def select(self, u, scalars):
        index, _, _ = reads.address(u)
        return [(index, u[0])]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("op", "size", "sizes"),
    [
        slow("weighted_lookup", "groups", {"batch": 130, "detectors": 9, "outputs": 130}),
        slow("weighted_lookup", "primes", {"rows": 20, "outputs": 130}),
        slow("lookup", "groups", {"batch": 130, "detectors": 9, "outputs": 130}),
        ("scored_lut", "groups", {"batch": 70, "bits": 3}),
        slow("scored_lut", "groups", {"batch": 130, "detectors": 33, "bits": 3, "outputs": 130}),
        slow("scored_lut", "sum_groups", {"batch": 130, "detectors": 33, "bits": 3, "outputs": 130}),
        slow("scored_lut", "shared_input", {"batch": 130, "detectors": 33}),
        slow("scored_lut", "powers", {"batch": 130, "detectors": 22}),
    ],
)
@pytest.mark.usefixtures("interpreted", "small_blocks")
def test_several_blocks(op, size, sizes):
    testing.check(testing.case(op, size, **sizes), "pallas", transformation="jit")


@pytest.mark.slow
@pytest.mark.parametrize("op", ["weighted_lookup", "lookup", "scored_lut"])
@pytest.mark.usefixtures("interpreted", "small_blocks")
def test_updates_in_several_blocks(op):
    case = testing.case(op, "groups", batch=130, detectors=9, outputs=130)
    testing.check_update(case, "pallas")


@pytest.mark.parametrize(
    ("op", "size", "rule"),
    [
        ("weighted_lookup", "groups", SGD(weight_decay=0.5)),
        slow("scored_lut", "sum_groups", SGD(weight_decay=0.5)),
    ],
)
@pytest.mark.usefixtures("interpreted")
def test_only_rows_that_were_read_decay(op, size, rule):
    testing.check_update(testing.case(op, size), "pallas", rule)


def tables_of_integers(n_tables=6, comparisons=3, groups=2):
    weights = normal(0, n_tables, 2**comparisons, 5)
    anchors = jax.random.randint(jax.random.key(1), (n_tables, comparisons, 2), 0, 7)
    return lutjax.quantize_tables(weights, groups=groups), anchors


@pytest.mark.parametrize("sum_groups", [False, slow(True)])
@pytest.mark.usefixtures("interpreted")
def test_tables_of_integers_are_read_exactly(sum_groups):
    tables, anchors = tables_of_integers()
    x = normal(2, 12, 2, 7).at[3, 1].set(jnp.nan)
    read = reads.PowersOfTwo()

    def run(implementation):
        return lutjax.scored_lut(
            x,
            tables,
            anchors,
            read.initial(),
            read=read,
            groups=2,
            sum_groups=sum_groups,
            implementation=implementation,
        )

    y = np.asarray(run("pallas"))
    np.testing.assert_array_equal(y, run("xla"))
    assert np.isnan(y[3, -1]).all()
    assert np.isfinite(np.delete(y, 3, axis=0)).all()


@pytest.mark.usefixtures("interpreted")
def test_sums_of_integers_beyond_the_digits_of_float32():
    """Each product is exact, and products are summed as integers."""
    n_tables = 300
    values = jnp.full((n_tables, 2, 1), 127, jnp.int8).at[0].set(1)
    tables = lutjax.QuantizedTables(values, jnp.full((1, 1), 6, jnp.int32))
    x, anchors = jnp.asarray([[1000.0, 0.0]]), jnp.tile(jnp.asarray([[[0, 1]]]), (n_tables, 1, 1))
    read = reads.PowersOfTwo(ways=1)
    y = lutjax.scored_lut(x, tables, anchors, read.initial(), read=read, implementation="pallas")
    total = 2**10 * (1 + 127 * (n_tables - 1))  # coefficients of 2**4 in units of 2**-6
    assert total > 2**24
    assert float(y[0, 0]) == np.float32(total)


# ------------------------------------------------------------------------------------- what is refused
V4, V6E = (
    lutjax.dispatch.registry.Device(lutjax.Backend("tpu"), _tpus.named(name).device_kind)
    for name in ("v4", "v6e")
)


def array(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype)


def scored(rows=256, inputs=48, dtype="float32", accumulate=None):
    bits = rows.bit_length() - 1
    return outline(
        ScoredLut,
        array(24576, 8, inputs, dtype=dtype),
        array(512, rows, 48, dtype=dtype),
        array(512, bits, 2, dtype="int32"),
        array(3),
        read=reads.Confidence(),
        groups=8,
        accumulate=accumulate,
    )


def weighted(rows=256, ways=2):
    reads_of = (1024, 64, ways)
    return outline(
        WeightedLookup, array(64, rows, 48), array(*reads_of, dtype="int32"), array(*reads_of), valued=ways
    )


def grouped(bits):
    return outline(Lookup, array(64, 2**bits, 128), detections(1024, 64, bits=bits), groups=8)


@pytest.mark.parametrize(
    ("call", "device", "direction", "rule", "why"),
    [
        (scored(), V6E, "forward", None, None),
        (scored(), V4, "backward", None, None),
        (scored(), V6E, "update", SGD(weight_decay=0.5), None),
        (scored(), V6E, "update", RowAdagrad(), "moves rows by SGD only, not by RowAdagrad"),
        (scored(rows=1024), V6E, "forward", None, "compared with every row, up to 512"),
        (scored(inputs=2**16), V6E, "forward", None, "x has 65536 inputs: a block of samples"),
        (scored(dtype="float16"), V6E, "forward", None, "has no kernel for float16"),
        (
            scored(accumulate=lutjax.FixedPoint(8)),
            V6E,
            "forward",
            None,
            "adds in float32, not in fixed point",
        ),
        (weighted(), V4, "backward", None, None),
        (
            weighted(rows=1024),
            V6E,
            "forward",
            None,
            "gathers are faster: matrices of coefficients of 1024 rows",
        ),
        (weighted(ways=2**17), V6E, "forward", None, "index has 131072 ways: a block of samples"),
        (grouped(6), V6E, "forward", None, "plain JAX multiplies with one-hot matrices too"),
        (grouped(10), V6E, "forward", None, "groups are multiplied with them only"),
    ],
)
def test_when_weighted_rows_come_first(call, device, direction, rule, why):
    output = array(call.weights.shape[0], 1, 48) if rule else None
    found = pallas_interpreter.reason("tpu", device, call, direction, output, rule)
    assert found is None if why is None else why in found


def test_blocks_of_a_layer_fit_every_generation():
    """Blocks of the smallest memory are smaller; whole registers of tables, and products of 512 rows."""
    call = scored()
    small, large = _row_blocks.of_scored(call, V4), _row_blocks.of_scored(call, V6E)
    assert (large.tables, large.together, large.samples, large.outputs) == (8, 2, 256, 128)
    assert (small.tables, small.together) == (8, 2)
    assert small.samples <= large.samples
