"""What surrounds the SparseCore kernels, in plain JAX: ids, blocks, padding. The kernels themselves are replaced.

No interpreter runs them. That they lower is checked in `test_pallas.py`, that they compile in
`test_tpu_compilation.py`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pallas_interpreter
import pytest
from test_pallas import FAST, ON_SPARSE_CORES, SPLIT, slow

import lutjax
from lutjax import testing
from lutjax.kernels._pallas import _tpus
from lutjax.kernels._pallas.sparsecore import _gather, _rows, _sizes, _support
from lutjax.kernels._xla import _rows as plain
from lutjax.kernels.registry import Call, Device

CPU = Device(lutjax.Backend.CPU, "cpu")
WITH_SPARSE_CORES = [tpu for tpu in _tpus.TPUS if tpu.sparse_cores]


def rows_read(table, ids, terms, cores):
    """``[blocks, terms, block, width]``, if a kernel may be called so."""
    width, (_, padded, block) = table.shape[1], ids.shape
    assert width % 16 == 0
    assert block % 16 == 0
    assert block % cores.lanes == 0
    assert padded % _sizes.group(terms) == 0
    ids = ids[:, :terms]
    return jnp.where(
        ((ids >= 0) & (ids < table.shape[0]))[..., None], table.at[ids].get(mode="clip"), jnp.nan
    )


def sum_rows(table, ids, terms, cores):
    return rows_read(table, ids, terms, cores).sum(1).reshape(-1, table.shape[1])


def products(table, ids, dy, terms, cores):
    blocks, padded, block = ids.shape
    dy = dy.reshape(blocks, 1, block, table.shape[1])
    sums = (rows_read(table, ids, terms, cores) * dy).sum(-1)
    return jnp.pad(sums, ((0, 0), (0, padded - terms), (0, 0)), constant_values=jnp.nan)


@pytest.fixture
def replaced(monkeypatch):
    """The implementation "pallas" runs on CPUs: that for SparseCores, its kernels replaced by their meaning."""
    for meaning in (sum_rows, products):
        monkeypatch.setattr(_gather, meaning.__name__, meaning)
    with pallas_interpreter.interpreted("sparsecore"):
        yield


@pytest.mark.parametrize(
    ("op", "shape"),
    [
        (op, shape) if shape in FAST else slow(op, shape)
        for op in ON_SPARSE_CORES
        for shape in testing.shapes(op)
    ],
)
@pytest.mark.usefixtures("replaced")
def test_shapes(op, shape):
    testing.check(testing.case(op, shape), "pallas", transformation="jit")


@pytest.mark.slow
@pytest.mark.parametrize("transformation", [t for t in testing.TRANSFORMATIONS if t not in ("jit", "export")])
@pytest.mark.parametrize("op", ON_SPARSE_CORES)
@pytest.mark.usefixtures("replaced")
def test_transformations(op, transformation):
    shape, sizes = SPLIT[op]
    testing.check(testing.case(op, shape, **sizes), "pallas", transformation=transformation)


@pytest.mark.parametrize("outputs", [3, 128])
@pytest.mark.usefixtures("replaced")
def test_several_blocks_and_groups_of_terms(outputs):
    """700 samples of 37 terms: more than one block and one group, neither of them whole; ids that do not exist."""
    random = np.random.default_rng(0)
    weights = jnp.asarray(random.integers(-4, 5, (37, 4, outputs)), jnp.float32)
    dy = jnp.asarray(random.integers(-4, 5, (700, outputs)), jnp.float32)
    wild = [0, 1, 2, 3, 4, -1, 2**31 - 1, -(2**31)]
    index, flipped = (jnp.asarray(random.choice(wild, (37, 700)), jnp.int32) for _ in range(2))
    block = _sizes.samples(700, outputs, _sizes.sparse_cores(CPU))
    assert 700 % block
    assert 700 > block
    np.testing.assert_array_equal(
        _rows.sum_rows(weights, index, CPU, None), plain.sum_rows(weights, index, CPU, None)
    )
    (actual,) = _rows.differences(weights, (index, flipped), dy, CPU, None)
    (expected,) = plain.differences(weights, (index, flipped), dy, CPU, None)
    np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("tpu", WITH_SPARSE_CORES, ids=lambda tpu: tpu.name)
def test_blocks_fit_a_subcore(tpu):
    cores = tpu.sparse_cores
    for numbers in (16, 48, 128, 1000, _sizes.most_numbers(cores)):
        for n in (1, 100, 4096, 10**6):
            block = _sizes.samples(n, numbers, cores)
            assert block in (16, 32, 64, 128)
            assert 4 * (block * numbers + 3 * _sizes.group(1000) * 128) < cores.vmem
    assert _sizes.samples(4096, 32, cores) * cores.cores * cores.subcores <= 4096
    assert _sizes.samples(10**6, 32, cores) == 128



