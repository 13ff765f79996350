"""TPU kernels, compiled ahead of time by libtpu without a TPU. Run them in a separate environment:

python -m venv tpu && tpu/bin/pip install -e ".[tpu]" absl-py beartype pytest pytest-xdist
ALLOW_MULTIPLE_LIBTPU_LOAD=1 TPU_SKIP_MDS_QUERY=1 JAX_PLATFORMS=cpu tpu/bin/pytest -m slow -n 0 tests/kernels/test_tpu_compilation.py
"""

import importlib.util

import jax
import pallas_interpreter
import pytest
from cases import split

import lutjax
from lutjax import reads, testing
from lutjax.kernels._pallas import _tpus
from lutjax.testing import _ahead_of_time
from lutjax.values._row_rules import SGD

pytestmark = pytest.mark.slow

ON_TENSOR_CORES = pallas_interpreter.implemented("tpu")

if importlib.util.find_spec("libtpu") is None:
    pytest.skip("libtpu is not installed: see the top of this file", allow_module_level=True)


def check(case, implementation, tpu):
    compiled = testing.check_compilation(case, implementation, tpu=tpu)
    assert "tpu_custom_call" in compiled.as_text()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tpu", [tpu.name for tpu in _tpus.TPUS])
@pytest.mark.parametrize("op", ON_TENSOR_CORES)
def test_tensor_cores(op, tpu, dtype):
    if dtype not in testing.cases_of(op).dtypes:
        pytest.skip(f"{op} takes no {dtype}")
    check(split(op, dtype), "pallas/tpu", tpu)


@pytest.mark.parametrize("op", ON_TENSOR_CORES)
@pytest.mark.parametrize("tpu", ["v5e", "v6e"])
def test_every_shape(op, tpu):
    for shape in testing.shapes(op, "pallas"):
        testing.check_compilation(testing.case(op, shape), "pallas/tpu", tpu=tpu)


@pytest.mark.parametrize("tpu", [tpu.name for tpu in _tpus.TPUS])
def test_tables_of_many_rows(tpu):
    """Compile tables resident in vector memory, with all outputs at a time or some."""
    check(testing.case("lookup", "primes", bits=10), "pallas/tpu", tpu)
    detectors = _tpus.find_generation(tpu).vmem // 2**20  # half the memory for 128 outputs
    case = testing.case("lookup", "primes", bits=10, detectors=detectors, outputs=256)
    check(case, "pallas/tpu", tpu)
    program = testing.update_program(case, "pallas/tpu")
    _ahead_of_time.compile_for_tpu(program.function, *program.shapes(), tpu=tpu)


@pytest.mark.parametrize("tpu", [tpu.name for tpu in _tpus.TPUS])
def test_layers_of_scored_tables(tpu):
    """Compile grouped 256-row tables in several blocks: a training step, an update, and the integer read."""
    sizes = {"groups": 8, "detectors": 128, "bits": 8, "batch": 1000, "inputs": 48, "outputs": 48}
    case = testing.case("scored_lut", "primes", **sizes)
    check(case, "pallas/tpu", tpu)
    program = testing.update_program(case, "pallas/tpu", SGD(weight_decay=0.5))
    _ahead_of_time.compile_for_tpu(program.function, *program.shapes(), tpu=tpu)
    read = reads.PowersOfTwo()

    def integers(x, weights, anchors):
        tables = lutjax.quantize_tables(weights, groups=8)
        return lutjax.scored_lut(
            x, tables, anchors, read.initial(), read=read, groups=8, implementation="pallas/tpu"
        )

    arrays = {**case.differentiable, **case.fixed}
    shapes = [
        jax.ShapeDtypeStruct(arrays[n].shape, arrays[n].dtype) for n in ("x", "weights", "anchors")
    ]
    assert "tpu_custom_call" in _ahead_of_time.compile_for_tpu(integers, *shapes, tpu=tpu).as_text()


def test_what_does_not_fit_is_refused():
    """The compiler knows the chip's memory: kernels beyond it are not selected."""
    import jax.numpy as jnp
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    def copy(x):
        whole = pl.BlockSpec(memory_space=pltpu.VMEM)
        return pl.pallas_call(
            lambda i, o: pltpu.sync_copy(i, o), out_shape=x, in_specs=[whole], out_specs=whole
        )(x)

    x = jax.ShapeDtypeStruct((2**17, 512), jnp.float32)
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"(?i)vmem"):
        _ahead_of_time.compile_for_tpu(copy, x, tpu="v5e")
