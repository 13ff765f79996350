"""SparseCore kernels on a machine without a TPU.

What surrounds the kernels (ids, blocks, padding) is checked with the kernels replaced by their meaning. The kernels are
interpreted with what only SparseCores have replaced (indirect copies, loads and additions by index), which no
interpreter of Pallas knows. That they lower is checked in `test_pallas.py`, that they compile in
`test_tpu_compilation.py`.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pallas_interpreter
import pytest
from cases import case_of, fast_size, slow, split
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu, tpu_sc as plsc
from test_pallas import ON_SPARSE_CORES

import lutjax
from lutjax import _ahead_of_time, testing
from lutjax.kernels._pallas import _tpus
from lutjax.kernels._pallas.sparsecore import _gather, _gathered_rows, _sizes, sparse_lookup
from lutjax.kernels.registry import Device, Made
from lutjax.ops.lookup import Lookup
from lutjax.ops.sparse_lookup import SparseLookup

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
        ((ids >= 0) & (ids < table.shape[0]))[..., None],
        table.at[ids].get(mode="clip").astype(jnp.float32),
        jnp.nan,
    )


def sum_rows(table, ids, terms, cores):
    return rows_read(table, ids, terms, cores).sum(1).reshape(-1, table.shape[1])


def differences(table, ids, dy, terms, cores):
    blocks, padded, block = ids[0].shape
    dy = dy.reshape(blocks, 1, block, table.shape[1])
    row, *others = (rows_read(table, i, terms, cores) for i in ids)
    sums = jnp.stack([((row - other) * dy).sum(-1) for other in others])
    return jnp.pad(sums, ((0, 0), (0, 0), (0, padded - terms), (0, 0)), constant_values=jnp.nan)


def scattered_to(targets, target_ids, terms, n_outputs, cores):
    """Return one-hot vectors, ``[blocks, terms, block, width, n_outputs]``, zero for unused targets."""
    assert n_outputs % 16 == 0
    to = rows_read(targets, target_ids, terms, cores)
    exists = ~jnp.isnan(to)
    one_hot = jax.nn.one_hot(jnp.where(exists, to, -1).astype(jnp.int32), n_outputs)
    return jnp.where(exists[..., None], one_hot, jnp.nan)


def sum_scattered(values, targets, ids, target_ids, terms, n_outputs, cores):
    to = scattered_to(targets, target_ids, terms, n_outputs, cores)
    return jnp.einsum("btnk,btnko->bno", rows_read(values, ids, terms, cores), to).reshape(-1, n_outputs)


def differences_scattered(values, targets, ids, target_ids, dy, terms, cores):
    blocks, padded, block = ids[0].shape
    dy = dy.reshape(blocks, block, dy.shape[1])
    row, other = (
        rows_read(values, i, terms, cores)[..., None] * scattered_to(targets, t, terms, dy.shape[-1], cores)
        for i, t in zip(ids, target_ids, strict=True)
    )
    sums = jnp.einsum("btnko,bno->btn", row - other, dy)
    return jnp.pad(sums, ((0, 0), (0, padded - terms), (0, 0)), constant_values=jnp.nan)


@pytest.fixture
def replaced(monkeypatch):
    """The implementation "pallas" runs on CPUs: that for SparseCores, its kernels replaced by their meaning."""
    for meaning in (sum_rows, differences, sum_scattered, differences_scattered):
        monkeypatch.setattr(_gather, meaning.__name__, meaning)
    with pallas_interpreter.interpreted("sparsecore"):
        yield


@pytest.mark.parametrize(
    ("op", "shape"),
    [
        (op, shape) if shape == fast_size(op) else slow(op, shape)
        for op in ON_SPARSE_CORES
        for shape in testing.shapes(op)
    ],
)
@pytest.mark.usefixtures("replaced")
def test_shapes(op, shape):
    testing.check(case_of(op, shape), "pallas", transformation="jit")


@pytest.mark.slow
@pytest.mark.parametrize("transformation", [t for t in testing.TRANSFORMATIONS if t not in ("jit", "export")])
@pytest.mark.parametrize("op", ON_SPARSE_CORES)
@pytest.mark.usefixtures("replaced")
def test_transformations(op, transformation):
    testing.check(split(op), "pallas", transformation=transformation)


WILD = np.array([0, 1, 2, 3, 4, -1, 2**31 - 1, -(2**31)], np.int32)


@pytest.fixture
def large():
    """700 samples of 37 detectors: more than one block and one group of terms, none of them whole; ids that do not exist."""
    random = np.random.default_rng(0)
    index, flipped = random.choice(WILD, (2, 37, 700))
    block = _sizes.samples(700, 32, _sizes.sparse_cores(CPU))
    assert block < 700
    assert 700 % block
    assert _sizes.group(37) < 37

    def of_shape(*shape):
        return random.integers(-4, 5, shape).astype(np.float32)

    def rows(table, index):
        return table[np.arange(37)[:, None] % table.shape[0], np.clip(index, 0, 3) % table.shape[1]]

    return of_shape, index, flipped, rows


@pytest.mark.parametrize("outputs", [3, slow(128)])
@pytest.mark.usefixtures("replaced")
def test_several_blocks_and_groups_of_terms(outputs, large):
    of_shape, index, flipped, rows = large
    weights, dy = of_shape(37, 4, outputs), of_shape(700, outputs)
    y = _gathered_rows.sum_rows(jnp.asarray(weights), jnp.asarray(index), CPU, None)
    np.testing.assert_array_equal(y, rows(weights, index).sum(0))
    both = jnp.asarray(index), jnp.asarray(flipped)
    (difference,) = _gathered_rows.differences(jnp.asarray(weights), both, jnp.asarray(dy), CPU, None)
    np.testing.assert_array_equal(difference, ((rows(weights, index) - rows(weights, flipped)) * dy).sum(-1))


@pytest.mark.fast("lists2")
@pytest.mark.parametrize("lists", [slow((37, 4)), (37, 1), (1, 4), slow((1, 1))])
@pytest.mark.usefixtures("replaced")
def test_sparse_lookup_of_several_blocks_and_groups(lists, large):
    of_shape, index, _, rows = large
    weights, dy = of_shape(37, 4, 3), of_shape(700, 5)
    targets = np.random.default_rng(1).choice(WILD, (*lists, 3))
    margin = of_shape(37, 700) + np.float32(0.5)
    d = lutjax.Detection(jnp.asarray(index.T), jnp.ones((700, 37), jnp.int32), jnp.asarray(margin.T), 2)
    call = SparseLookup(jnp.asarray(weights), d, jnp.asarray(targets), n_outputs=5)
    y = sparse_lookup.forward(call, device=CPU)
    found = sparse_lookup.backward(call, jnp.asarray(dy), frozenset({"detection"}), device=CPU)
    assert set(found) == {"detection"}

    one_hot = np.clip(targets, -1, 4)[..., None] == np.arange(5)

    def scattered(index):
        return np.einsum("tnk,tnko->tno", rows(weights, index), rows(one_hot, index))

    np.testing.assert_array_equal(y, scattered(index).sum(0))
    slope = np.where(margin > 0, 0.5, -0.5) / np.square(1 + np.abs(margin))
    expected = slope * ((scattered(index) - scattered(index ^ 1)) * dy).sum(-1)
    testing.assert_close("margin", found["detection"], expected.T.astype(np.float32))


def looked_up(shape, batch=4096, dtype="float32", accumulate=None):
    """The call of a look-up in tables of a shape."""
    d = jax.eval_shape(
        lutjax.detect_signs, jax.ShapeDtypeStruct((batch, shape[0], shape[1].bit_length() - 1), "float32")
    )
    weights = jax.ShapeDtypeStruct(shape, dtype)
    return pallas_interpreter.outline(Lookup, weights, d, accumulate=accumulate)


def why_not(shape, kind="TPU v6e", direction="forward", **sizes):
    """Return the reason why a look-up cannot run on SparseCores."""
    call = looked_up(shape, **sizes)
    output = jax.ShapeDtypeStruct((call.detection.shape[0], shape[2]), "float32")
    device = Device(lutjax.Backend.TPU, kind)
    return pallas_interpreter.fit("sparsecore").unsupported(Made(call, output).request(direction, device))


def test_why_not():
    assert why_not((16, 1024, 256)) is None
    assert "v5p, v6e or v7x, not TPU v5e" in why_not((16, 1024, 256), "TPU v5e")
    assert "no kernel for bfloat16" in why_not((16, 1024, 256), dtype="bfloat16")
    assert "fixed point" in why_not((16, 1024, 256), accumulate=lutjax.FixedPoint(2.0**10))
    assert "do not add to them" in why_not((16, 1024, 256), direction="update")
    most = _sizes.most_numbers(_tpus.named("v6e").sparse_cores) // 128 * 128
    assert why_not((1, 2, most)) is None
    assert "holds at most" in why_not((1, 2, most + 128))
    assert "two rows" in why_not((1, 2, most // 3 + 128), direction="backward")
    assert why_not((1, 2, most // 3 // 128 * 128), direction="backward") is None
    asked = lutjax.kernel_registry.consider(
        "lookup", *looked_up((16, 1024, 256)).values(), device=Device(lutjax.Backend.TPU, "TPU v6e"),
        direction="update", implementation="pallas/sparsecore",
    )  # fmt: skip
    assert asked[0].reason == "has no update"


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_why_not_first(direction):
    def why(shape, batch=4096):
        v6e = Device(lutjax.Backend.TPU, "TPU v6e")
        return pallas_interpreter.reason("sparsecore", v6e, looked_up(shape, batch), direction)

    assert why((64, 65536, 32), 16384) is None
    assert "one-hot" in why((64, 512, 512))
    assert "left to TensorCores" in why((16, 1024, 256))
    assert "is copied at every call, for 6400 reads" in why((64, 65536, 32), 100)
    assert why((64, 65536, 128), 100) is None


@pytest.mark.parametrize("tpu", WITH_SPARSE_CORES, ids=lambda tpu: tpu.name)
def test_blocks_fit_a_subcore(tpu):
    cores = tpu.sparse_cores
    for numbers in (16, 48, 128, 1000, _sizes.most_numbers(cores)):
        for n in (1, 100, 4096, 10**6):
            block = _sizes.samples(n, numbers, cores)
            assert block in (16, 32, 64, 128)
            of_terms = _sizes.ARRAYS_OF_TERMS * _sizes.group(1000) * 128
            assert 4 * (block * numbers + of_terms) < cores.vmem
    assert _sizes.samples(4096, 32, cores) * cores.cores * cores.subcores <= 4096
    assert _sizes.samples(10**6, 32, cores) == 128


def fetch(table, ids_here, t, here, add=False):
    """An indirect copy, row by row."""

    def row_by_row(row):
        @pl.loop(0, here.shape[0])
        def _(k):
            pltpu.sync_copy(table.at[pl.ds(ids_here[t, k], 1)], row)
            here[pl.ds(k, 1)] = here[pl.ds(k, 1)] + row[...] if add else row[...]

    pl.run_scoped(row_by_row, pltpu.VMEM((1, table.shape[1]), table.dtype))


def parallel_loop(lower, upper, step=1, *, unroll=1, carry=None):
    return lambda body: jax.lax.fori_loop(
        0, (upper - lower) // step, lambda n, c: body(lower + n * step, c), carry
    )


def addupdate_scatter(ref, at, x, *, mask):
    ref[...] = ref[...].at[tuple(at)].add(jnp.where(mask, x, 0))


KERNELS = {
    "sum_rows": lambda k, a: k.sum_rows(a["values"], a["ids"], 9, a["cores"]),
    "differences": lambda k, a: k.differences(
        a["values"], (a["ids"], a["target_ids"], a["other_ids"]), a["dy"], 9, a["cores"]
    )[:, :, :9],
    "sum_scattered": lambda k, a: k.sum_scattered(
        a["values"], a["targets"], a["ids"], a["target_ids"], 9, 16, a["cores"]
    ),
    "differences_scattered": lambda k, a: k.differences_scattered(
        a["values"],
        a["targets"],
        (a["ids"], a["other_ids"]),
        (a["target_ids"], a["other_target_ids"]),
        a["dy"],
        9,
        a["cores"],
    )[:, :9],
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "large"),
    [*((name, False) for name in KERNELS), ("differences", True), ("differences_scattered", True)],
)
def test_kernels_interpreted(name, large, monkeypatch):
    """Two blocks of 9 terms in groups of 8 on one subcore, the only one that the interpreter runs."""
    monkeypatch.setattr(_sizes, "_MOST_TERMS", 8)
    tpu = _tpus.named("v6e")
    random = np.random.default_rng(0)
    arguments = {
        "values": jnp.asarray(random.integers(-4, 5, (24, 16)), jnp.float32),
        "targets": jnp.asarray(random.integers(-1, 16, (20, 16)), jnp.int32),
        "ids": jnp.asarray(random.integers(0, 24, (2, 16, 16)), jnp.int32),
        "target_ids": jnp.asarray(random.integers(0, 20, (2, 16, 16)), jnp.int32),
        "other_ids": jnp.asarray(random.integers(0, 24, (2, 16, 16)), jnp.int32),
        "other_target_ids": jnp.asarray(random.integers(0, 20, (2, 16, 16)), jnp.int32),
        "dy": jnp.asarray(random.integers(-4, 5, (32, 16)), jnp.float32),
        "cores": dataclasses.replace(tpu.sparse_cores, cores=1, subcores=1),
    }
    if large:  # of one list of targets, so that every sum is exact
        arguments["values"] = arguments["values"] * 8 + 1e8
        arguments["targets"] = jnp.broadcast_to(arguments["targets"][:1], arguments["targets"].shape)
    with monkeypatch.context() as replaced:
        for meaning in (sum_rows, differences, sum_scattered, differences_scattered):
            replaced.setattr(_gather, meaning.__name__, meaning)
        expected = KERNELS[name](_gather, arguments)
    monkeypatch.setattr(_gather, "_fetch", fetch)
    monkeypatch.setattr(_gather, "_copy_out", pltpu.sync_copy)
    monkeypatch.setattr(plsc, "parallel_loop", parallel_loop)
    monkeypatch.setattr(plsc, "load_gather", lambda ref, at: ref[...][tuple(at)])
    monkeypatch.setattr(plsc, "addupdate_scatter", addupdate_scatter)
    as_on_tpu = pltpu.InterpretParams(out_of_bounds_reads="raise", uninitialized_memory="nan")
    with pltpu.force_tpu_interpret_mode(as_on_tpu), _ahead_of_time.tracing_for("tpu", tpu.device_kind):
        traced = jax.jit(lambda: KERNELS[name](_gather, arguments)).trace()
        actual = traced.lower(lowering_platforms=("cpu",)).compile()()
    np.testing.assert_array_equal(actual, expected)
