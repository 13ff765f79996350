"""`benchmarks/devices.py`: its models learn the same in both ways, and plain jit exchanges no more than a `shard_map` by hand. `benchmarks/memory_devices.py`."""

import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import slow
from folders import ROOT
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from machine import needs_devices

import lutjax
from lutjax import optim as tables
from lutjax.dispatch._partition import some_element


@pytest.fixture
def devices(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import devices

    return devices


def losses(devices, *names):
    """Return the programs of cases, and the mean losses of two steps each."""
    found = []
    for case in devices.cases(8, tiny=True):
        if case.name in names:
            program = devices.Program(case)
            program.start()
            found.append((program, program.run(2)[1]))
    assert len(found) == len(names)
    return found


@pytest.mark.slow
@needs_devices(8)
def test_plain_jit_by_detector_sums_outputs_and_cotangents_alone(devices):
    """Devices sum the output of each look-up, and the cotangent of the input of all but the first: no gradient, no index, no token."""
    (_, one), (program, loss) = losses(devices, "reference:1x1:jit", "reference:1x8:jit")
    np.testing.assert_allclose(loss, one, rtol=1e-5)
    n_samples = program.case.batch * program.subject.context
    n_bytes = 4 * n_samples * (4 * program.subject.features + program.subject.vocab)
    found = devices.collectives(program.compiled.as_text())
    assert found == {"all-reduce": (5, n_bytes)}
    assert program.plan()["collectives"] == 5


@needs_devices(8)
@pytest.mark.parametrize(
    "names",
    [
        slow(["reference:1x1:jit", "reference:8x1:jit", "reference:2x4:jit", "reference:8x1:shard_map"]),
        slow(["weak:1x8:jit", "weak:1x8:shard_map", "weak:8x1:jit"]),
        slow(["context:1x1:jit", "context:1x8:jit", "context:1x8:shard_map"]),
        slow(["scored:1x8:jit", "scored:1x8:shard_map", "scored:8x1:jit"]),
        slow(["gates:1x8:jit", "gates:1x8:shard_map", "gates:8x1:jit"]),
    ],
    ids=lambda names: names[0],
)
def test_both_ways_learn_the_same(devices, names):
    (_, expected), *others = losses(devices, *names)
    for program, loss in others:
        np.testing.assert_allclose(loss, expected, rtol=1e-5, err_msg=program.case.name)


def test_collectives_are_counted(devices):
    program = """
      %a = f32[4,8]{1,0} all-reduce(%x), channel_id=1
      %b = (bf16[2]{0}, bf16[16]{0}) all-gather-start(%y), channel_id=2
      %c = (f32[], s32[3]{0}) all-reduce-start(%z, %w), channel_id=3
    """
    assert devices.collectives(program) == {"all-reduce": (2, 4 * 32 + 4 + 12), "all-gather": (1, 32)}


def test_rows_become_a_table(devices):
    one, two, weak, *_ = devices.cases(2, tiny=False)
    rows = {
        one: {"batch": 128, "ms": 4.0},
        two: {"batch": 128, "ms": 2.5, "peak GB": 1.0, "over share": 1.02},
    }
    *_, first, second = devices.compare(rows).splitlines()
    assert "| 4.000 | 1.00x | - |" in first
    assert "1 data x 2 detectors | jit | 128 | 2.500 | 1.60x | 1.00 | 1.02 |" in second
    assert weak.way == "shard_map"


@needs_devices(8)
def test_some_element_exchanges_nothing():
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("data", "detectors"))
    a = jax.device_put(jnp.ones((4, 8)), NamedSharding(mesh, P("data", "detectors")))
    compiled = jax.jit(some_element).lower(a).compile()
    assert "all-" not in compiled.as_text()
    assert compiled(a) == 1
    gradient = jax.vmap(_of_each, (None, 0))(jnp.ones((2, 2, 1)), jnp.ones((3, 4, 2)))
    assert gradient.after.shape == (3,)


def _of_each(weights, x):
    def loss(params):
        return jnp.sum(lutjax.lut(x, params["weights"], jnp.array([[[0, 1]], [[1, 0]]])))

    return tables.value_and_grad(loss)({"weights": weights})[1]["weights"]


@pytest.mark.slow
def test_the_command(tmp_path):
    words = (
        "--tiny",
        "--devices",
        "2",
        "--only",
        "gates",
        "--large",
        "0.0003",
        "--folder",
        str(tmp_path),
        "--jobs",
        "2",
    )
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "devices.py", *words],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "| gates | 2 data x 1 detectors | jit |" in done.stdout
    assert "| large | 1 data x 2 detectors |" in done.stdout
    assert '"same bits": true' in done.stdout


@pytest.mark.slow
def test_memories_over_devices():
    """All ways give the same losses; blocks of rows need an eighth of the memory of whole tables."""
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "memory_devices.py", "--tiny"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"},
    )
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [r["way"] for r in rows] == 2 * ["jit", "detectors", "rows", "whole"] + ["rows", "whole"]
    for of_size in (rows[:4], rows[4:8], rows[8:]):
        np.testing.assert_allclose([r["loss"] for r in of_size], of_size[-1]["loss"], rtol=1e-5)
        memory = {r["way"]: r["memory"] for r in of_size}
        assert memory["rows"] < memory["whole"] / 2
    assert "| n-grams | 8, 64, 4 | 16, 1 | rows |" in done.stdout
