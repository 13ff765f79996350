"""`lutjax.scored_lut` in Mosaic GPU on machines without a GPU: all but the reads from shared memory is interpreted."""

import jax
import jax.numpy as jnp
import numpy as np
import pallas_interpreter
import pytest
from cases import slow
from pallas_interpreter import WITHOUT_MOSAIC

import lutjax
from lutjax import reads, testing
from lutjax.dispatch.registry import Backend, Device

pytestmark = pytest.mark.skipif(WITHOUT_MOSAIC is not None, reason=str(WITHOUT_MOSAIC))
triton_interpreter = pytest.importorskip("triton_interpreter", reason="Triton is not installed")

H100 = Device(Backend.GPU, "NVIDIA H100 80GB HBM3")


def array(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype)


@pytest.fixture
def interpreted():
    with triton_interpreter.interpreted(), triton_interpreter.scored_rows_in_numpy():
        yield


@pytest.mark.parametrize("shape", [s if s == "primes" else slow(s) for s in testing.shapes("scored_lut")])
@pytest.mark.usefixtures("interpreted")
def test_shapes(shape):
    testing.check(testing.case("scored_lut", shape), "pallas", transformation="jit")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.usefixtures("interpreted")
def test_dtypes(dtype):
    testing.check(testing.case("scored_lut", "groups", dtype), "pallas", transformation="jit")


@pytest.mark.slow
@pytest.mark.parametrize("transformation", [t for t in testing.TRANSFORMATIONS if t != "export"])
@pytest.mark.usefixtures("interpreted")
def test_transformations(transformation):
    testing.check(testing.case("scored_lut", "split"), "pallas", transformation=transformation)


@pytest.mark.usefixtures("interpreted")
def test_samples_in_parts(monkeypatch):
    """Rows, factors and products of all samples do not fit the memory that they may have."""
    from lutjax.kernels._pallas.gpu import scored_lut

    triton_interpreter.own_always(monkeypatch)
    monkeypatch.setattr(scored_lut, "_MOST_SCRATCH", 210)  # of 7 samples, 3 tables and 5 numbers
    testing.check(testing.case("scored_lut", "hard"), "pallas", transformation="jit")


@pytest.mark.usefixtures("interpreted")
def test_rows_with_a_coefficient_of_0_are_not_read():
    """Margins of 0 have a score of 0: what their rows hold does not matter, elsewhere it does."""
    x = jnp.zeros((70, 4)).at[3].set(jnp.array([1.0, 2.0, -1.0, 0.5]))
    anchors = jnp.array([[[0, 1], [2, 3]], [[1, 2], [0, 3]]])
    weights = jnp.full((2, 4, 5), jnp.inf)
    read = reads.Confidence()

    def run(implementation):
        return lutjax.scored_lut(
            x, weights, anchors, read.initial(), read=read, implementation=implementation
        )

    found, expected = jax.jit(lambda: (run("pallas"), run("xla")))()
    np.testing.assert_array_equal(found, expected)
    assert np.isinf(found[3]).all()
    assert (found[4] == 0).all()


@pytest.mark.usefixtures("interpreted")
def test_samples_to_the_end_of_a_program_have_no_gradient():
    """They read the first row, which is infinite and which no sample of the call reads."""
    x, anchors = jnp.array([[3.0, 2.0, 1.0, 0.0]]), jnp.array([[[0, 1], [1, 2], [2, 3]]])
    weights = jnp.ones((1, 8, 5)).at[:, 0].set(jnp.inf)
    read = reads.Confidence()

    def gradients(implementation):
        def total(given):
            options = {"read": read, "implementation": implementation}
            return lutjax.scored_lut(given["x"], given["weights"], anchors, given["scalars"], **options).sum()

        found = jax.grad(total)({"x": x, "weights": weights, "scalars": read.initial()})
        return {"x": found["x"], "weights": found["weights"], **found["scalars"]}

    found, expected = jax.jit(lambda: (gradients("pallas"), gradients("xla")))()
    testing.assert_all_close("gradients", found, expected)
    assert all(np.isfinite(a).all() for a in found.values())


@pytest.mark.parametrize("n_rows", [2, 64, 256])
def test_rows_that_differ_in_a_bit_lie_in_different_banks(n_rows):
    from lutjax.kernels._pallas.gpu import _shared_reads

    weights = jnp.broadcast_to(jnp.arange(n_rows, dtype=jnp.float32)[:, None], (1, n_rows, 48))
    call = _shared_reads._Call.of(weights, jnp.zeros((1, 512), jnp.int32), 2, 1)
    wide, narrow = call.tables(weights)
    np.testing.assert_array_equal(wide, weights)
    assert narrow.shape == (1, n_rows, 16)
    place = np.argsort(np.asarray(narrow[0, :, 0]))  # of each row
    for bit in range(n_rows.bit_length() - 1):
        other = place[np.arange(n_rows) ^ (1 << bit)]
        assert np.all(place % 2 != other % 2), "64 bytes each: two of them are all banks"


@pytest.mark.parametrize(
    ("direction", "batch", "changes", "reason"),
    [
        ("forward", 2**14, {}, None),
        ("backward", 2**13, {}, None),
        ("forward", 2**13, {}, "from 32768 samples of all groups on, here 16384"),
        ("update", 2**14, {}, "by Triton's kernels"),
        ("forward", 2**14, {"outputs": 65}, "at most 256 rows and 64 outputs, here 8 and 65"),
        ("forward", 2**14, {"bits": 9}, "at most 256 rows and 64 outputs, here 512 and 4"),
        ("forward", 2**14, {"inputs": 400}, "at most 384 inputs, here 400"),
        ("forward", 2**14, {"read": reads.PowersOfTwo()}, "sums floats only"),
        ("forward", 2**14, {"accumulate": lutjax.FixedPoint(1.0)}, "sums floats only"),
    ],
)
def test_which_calls_come_first(monkeypatch, direction, batch, changes, reason):
    from lutjax.kernels import _triton
    from lutjax.ops.scored_lut import ScoredLut
    from lutjax.values._row_rules import SGD

    monkeypatch.setattr(_triton, "unfit_packages", lambda: None)
    sizes = {"outputs": 4, "bits": 3, "inputs": 5, "read": reads.Confidence(), "accumulate": None} | changes
    rounded = [array(batch, 6), array(2, sizes["outputs"], dtype="int32")] * sizes["read"].rounds_tables
    call = pallas_interpreter.outline(
        ScoredLut,
        array(batch, 2, sizes["inputs"]),
        array(6, 2 ** sizes["bits"], sizes["outputs"]),
        array(6, sizes["bits"], 2, dtype="int32"),
        array(3),
        *rounded,
        read=sizes["read"],
        groups=2,
        accumulate=sizes["accumulate"],
    )
    rule = SGD() if direction == "update" else None
    found = pallas_interpreter.reason("gpu", H100, call, direction, array(batch, 2, sizes["outputs"]), rule)
    assert found is None if reason is None else reason in found
