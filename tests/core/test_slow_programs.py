"""Slow compiled programs and processes: their memory, their numbers, and their imports."""

import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import (
    implementations,
)

import lutjax
from lutjax import extras as _extras
from lutjax.status import (
    checks as _checks,
    matrix as _matrix,
)


def test_memory_of_attention_grows_with_the_length_not_its_square():
    """XLA's own figure for forward and backward temporaries."""

    def temporaries(length):
        x = jax.ShapeDtypeStruct((1, length, 8), jnp.float32)
        anchors = jax.ShapeDtypeStruct((4, 2, 2), jnp.int32)
        weights = jax.ShapeDtypeStruct((4, 2**6, 8), jnp.float32)
        positions = jax.ShapeDtypeStruct((length - 1, 4, 2), jnp.float32)

        def loss(x, weights, positions, anchors):
            return lutjax.lut_attention(x, weights, anchors, positions).sum()

        compiled = (
            jax.jit(jax.grad(loss, (0, 1, 2))).lower(x, weights, positions, anchors).compile()
        )
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporaries(2048) < 3 * temporaries(1024)


SUBNORMAL = """
import sys
import jax, jax.numpy as jnp, numpy as np, lutjax

anchors = jnp.arange(6).reshape(3, 1, 2)
x = jnp.tile(jnp.float32([2e-38, 1.9e-38, 3e-38, 1.5e-38, 1e-40, 0]), (int(sys.argv[1]), 1))  # differences 1e-39, 1.5e-38, 1e-40
weights = jnp.asarray(np.arange(6, dtype=np.float32).reshape(3, 2, 1))
read = lutjax.reads.Hard()
for implementation in sys.argv[2:]:
    how = {"implementation": implementation}
    d = jax.jit(lambda x: lutjax.detect(x, anchors, **how))(x)
    found = {
        "detect": (d.index, d.margin),
        "scored": jax.jit(lambda x: lutjax.scored_lut(x, weights, anchors, {}, read=read, **how))(x),
        "lut": jax.jit(lambda x: lutjax.lut(x, weights, anchors, **how))(x),
    }
    for a, wanted in zip(jax.tree.leaves(found), ([0, 1, 0], [0, np.float32(1.5e-38), 0], [7], [7]), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.tile(wanted, (len(x), 1)), rtol=1e-6, err_msg=implementation)
counts = jax.jit(lutjax.usage(lambda w, x: lutjax.scored_lut(x, w, anchors, {}, read=read)))({"w": weights}["w"], x)
assert next(iter(counts.values())).counts.tolist() == [[len(x), 0], [0, len(x)], [len(x), 0]]
"""


@pytest.mark.skipif("jax.default_backend() != 'cpu'", reason="GPUs keep subnormal numbers")
def test_a_difference_below_the_normal_numbers_is_0_on_cpus():
    """Compile as users do: a compiler turns comparing a difference with 0 into comparing its two sides."""
    names = [name for name in implementations("detect") if name in ("xla", "native")]
    environment = {**os.environ, "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", SUBNORMAL, "5000", *names]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]


SECONDS = 240
"""Longest time for calls with a bounded wait."""


PROGRAM = """
import multiprocessing, os, signal, sys, warnings

warnings.filterwarnings("ignore", "os.fork", RuntimeWarning)  # JAX's own

import jax, jax.numpy as jnp, numpy as np, lutjax

anchors = jnp.asarray(np.random.default_rng(0).permutation(64)[:48].reshape(8, 3, 2))
weights, x = jnp.arange(8 * 8 * 16, dtype=jnp.float32).reshape(8, 8, 16), jnp.linspace(-1, 1, 1000 * 64).reshape(1000, 64)


def layer(x=x):
    return np.asarray(lutjax.lut(x, weights, anchors)).sum()


def refused(_=0):
    try:
        layer()
    except RuntimeError as error:
        return str(error)
    return "ran"


def status(child):
    pid = os.fork()
    if pid:
        return os.waitpid(pid, 0)[1]
    signal.alarm(60)  # what waits without end
    os._exit(0 if child() else 1)


if __name__ == "__main__":
    once = jax.jit(lambda x: lutjax.lut(x, weights, anchors))
    expected = np.asarray(once(x))
    if "(lutjax_cpu.kernels.lookup): chosen" in lutjax.explain("lookup", weights, lutjax.detect(x, anchors)):
        assert status(lambda: np.array_equal(once(x), expected)) == 0, "what was compiled runs without the threads of the pool"
    assert status(lambda: "lookup: this process was forked" in refused() or "detect: this process was forked" in refused()) == 0
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert "multiprocessing's method 'spawn'" in pool.map(refused, [0])[0]
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.map(layer, [x])[0] == expected.sum()
    assert layer() == expected.sum()
    print("done")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_processes_that_are_forked(tmp_path):
    """Processes run compiled native kernels or report the error; spawned processes behave like any other."""
    path = tmp_path / "program.py"
    path.write_text(PROGRAM, encoding="utf-8")
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, str(path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.stdout == "done\n", done.stderr[-3000:]


PUBLIC = """
import importlib, json, pkgutil, sys
extras = json.loads(sys.argv[1])
for package in extras:
    sys.modules[package] = None
import lutjax
for found in pkgutil.walk_packages(lutjax.__path__, "lutjax.", onerror=lambda name: None):
    if "._" in found.name or found.name.startswith("lutjax.cli"):
        continue
    try:
        importlib.import_module(found.name)
    except ModuleNotFoundError as error:
        assert str(error).startswith("lutjax.") and "is not installed: pip install" in str(error), (found.name, error)
"""


def test_every_module_without_its_extra_says_how_to_install_it():
    subprocess.run(
        [sys.executable, "-c", PUBLIC, json.dumps(list(_extras.EXTRAS))], check=True, timeout=300
    )


def test_kernels_that_are_imported_by_the_first_call_let_nothing_be_compiled_again():
    pytest.importorskip("triton")
    program = """
import jax, jax.numpy as jnp
jax.default_backend = lambda: "gpu"
from lutjax.training import loop

def step(state, number, data):
    import jax.experimental.pallas.tpu, lutjax.kernels._triton.lookup, lutjax.kernels._pallas.tpu.lookup
    return state + 1, state

advance, state = loop.Repeated(step), jnp.float32(0)
for first in range(3):
    state, _ = advance(state, first, 1)
print(advance.programs)
"""
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert result.stdout.split() == ["1"]


@pytest.mark.parametrize("read", [lutjax.reads.SoftSign(), lutjax.reads.PowersOfTwo()], ids=str)
def test_scored_reads_of_no_samples_in_fixed_point(read):
    x, weights = jnp.zeros((0, 3)), jnp.ones((2, 4, 5))
    anchors, scalars = jnp.array([[[0, 1], [1, 2]]] * 2), read.initial()

    def loss(x, weights):
        y = lutjax.scored_lut(
            x, weights, anchors, scalars, read=read, accumulate=lutjax.FixedPoint(2.0**10)
        )
        return y.sum()

    value, (of_x, of_weights) = jax.value_and_grad(loss, (0, 1))(x, weights)
    assert value == 0
    assert of_x.shape == (0, 3)
    np.testing.assert_array_equal(of_weights, 0)


CPU, NATIVE, TPU = (
    next(c for c in _matrix.COLUMNS if c.key == key)
    for key in ("xla/cpu", "native/cpu", "pallas/tpu")
)


def test_checks_in_processes_agree_with_checks_in_one(monkeypatch):
    main = sys.modules["__main__"]  # new processes would run it first
    monkeypatch.setattr(main, "__spec__", None)
    monkeypatch.delattr(main, "__file__", raising=False)
    monkeypatch.setattr(_checks, "_WORTH_A_PROCESS", 1)
    keys = [
        ("detect_signs", column, dtype)
        for dtype in ("float32", "bfloat16")
        for column in (CPU, TPU)
    ]
    with _checks.in_processes(_checks.check, keys) as check:
        assert check is not _checks.check
        result = [check(*key) for key in keys]
    assert result == [_checks.check(*key) for key in keys]
    with _checks.in_processes(_checks.check, keys[:1]) as check:
        assert check is _checks.check


def test_kernel_of_another_device_is_lowered_or_has_a_reason():
    assert _checks.check("lookup", TPU, "float32")["forward"].state == "lowers"
    unsupported = _checks.check("lookup", TPU, "float64")["backward"]
    assert unsupported.state == "unsupported"
    assert "float64" in unsupported.reason
