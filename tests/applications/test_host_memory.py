"""Host-resident n-gram memories: training parity with the device, stale rows, generation and errors."""

import ctypes
import dataclasses
import functools
import itertools
import subprocess
import sys

import jax
import numpy as np
import pytest
from cases import slow_except
from commands import command, output
from flax import nnx
from folders import ROOT
from host_memory import DEVICE, HOST, TEXT, run_of, table_of, trained, words_of
from machine import needs_devices
from small_runs import MEMORY

import lutjax
from lutjax.models import GPT, Slots
from lutjax.optim import host as training_on_host
from lutjax.tables import _registered, host as tables_on_host
from lutjax.training import experiments

NAME = "layers/0/memory/weights"


@functools.cache
def on_device():
    return trained(run_of(DEVICE))


def test_rows_lack_at_most_the_last_updates():
    depth = 2
    run = run_of(memory_depth=depth)
    table, snapshots, state = table_of(run), [], run.init()
    for i in range(5):
        run.ahead.wait()
        snapshots.append(table.weights.copy())
        batch = run.ahead.batch(i)
        ids = np.moveaxis(run._ids(i)[NAME][..., 0], 1, 0)
        result = np.take_along_axis(snapshots[max(i - depth, 0)], ids[..., None], 1)
        np.testing.assert_array_equal(batch.rows[NAME], result)
        state, _ = run.advance(state, i, 1)
    assert any((a != b).any() for a, b in itertools.pairwise(snapshots))


@pytest.mark.parametrize(("model", "training", "message"), [
    ({}, {"select_every": 2}, "select_every is 2; it must be 0 with memory_placement 'host'"),
    ({"memory_placement": "device"}, {"memory_depth": 2},
        "memory_depth is 2; it requires memory_placement 'host'"),
    ({"memory_placement": "disk"}, {}, "memory_placement is 'disk'"),
])  # fmt: skip
def test_what_cannot_be_trained(model, training, message):
    with pytest.raises(ValueError, match=message):
        run_of(dataclasses.replace(HOST, **model), **training)


def test_a_table_that_does_not_fit_says_its_size_and_the_cure(tmp_path, monkeypatch):
    words = (*words_of(tmp_path), "--out", tmp_path / "run")
    monkeypatch.setattr(experiments, "free_memory", lambda: 10_000)
    assert command(*words).output.endswith(
        "Error: the run needs 0.1 MB of host memory for tables and their optimizer state; 0.0 MB are free. Choose fewer or smaller "
        "rows, or a machine with more memory.\n"
    )
    monkeypatch.undo()
    monkeypatch.setattr(tables_on_host, "free_memory", lambda: 10_000)
    result = command(*words)
    assert result.exit_code
    assert result.output.splitlines()[-1].startswith(
        "Error: the table weights float32[6, 300, 8]: it takes "
    )


IN_PARTS = {"native": {"microbatches": 2}, "xla": {"memory_optimizer": "sgd", "clip": None}}


@pytest.mark.parametrize("implementation", slow_except(IN_PARTS, "native"))
def test_training_in_parts_and_by_other_rules(implementation):
    if implementation == "native":
        pytest.importorskip("lutjax_cpu", reason="the package of native kernels is not installed")
    with lutjax.use_implementation({"weighted_lookup": implementation}):
        losses = [trained(run_of(model, **IN_PARTS[implementation]))[0] for model in (DEVICE, HOST)]
    np.testing.assert_allclose(*losses, rtol=1e-5)


class CopyingDriver:
    """Fake GPU driver with host memory as its device memory."""

    def __init__(self):
        self.locked, self.copies = set[int](), 0

    def register(self, address, n_bytes):
        self.locked.add(address)

    def unregister(self, address):
        self.locked.remove(address)

    def wait(self): ...

    def copy_out(self, array, out):
        assert out.ctypes.data in self.locked
        np.copyto(out, array)
        self.copies += 1

    def copy_in(self, array, out):
        assert array.ctypes.data in self.locked
        numbers = (ctypes.c_float * out.size).from_address(out.unsafe_buffer_pointer())
        np.copyto(np.ctypeslib.as_array(numbers).reshape(out.shape), array)


class TestSlow:
    def test_gradients_come_into_locked_memory_that_is_used_again(self, monkeypatch):
        expected = trained(run_of(memory_depth=1), 4)[0]
        driver = CopyingDriver()
        monkeypatch.setattr(_registered, "driver_of", lambda array: driver)
        monkeypatch.setattr(_registered, "view", lambda array: jax.dlpack.from_dlpack(array))
        monkeypatch.setattr(training_on_host, "_SMALL", 0)
        run = run_of(memory_depth=1)
        assert trained(run, 4)[0] == expected
        in_one_step = driver.copies // 4
        assert in_one_step == 5  # of a table the ids, coefficients, cotangent and two factors
        # Each has its memory at most twice, beside the rows of a table and three steps.
        assert 0 < len(driver.locked) <= 2 * in_one_step + 3

    def test_two_layers_are_trained_and_counted_as_on_the_device(self):
        host = dataclasses.replace(MEMORY, memory_placement="host")
        run, device, late = run_of(host), run_of(MEMORY), run_of(host, memory_depth=2)
        actual, want = (one.usage(one.init(), TEXT[:300]) for one in (run, device))
        assert set(actual) == set(want) == set(run.structure.host_tables)
        for name, usage in want.items():
            np.testing.assert_array_equal(actual[name].counts, usage.counts)
        (exact, state), (expected, on_device) = trained(run, 6), trained(device, 6)
        np.testing.assert_allclose(exact, expected, rtol=1e-5)
        test = TEXT[:500]
        assert run.evaluate(state, test) == pytest.approx(
            device.evaluate(on_device, test), rel=1e-5
        )
        stale, again = (trained(late, 6)[0] for _ in range(2))
        assert stale == again
        assert exact[0] == stale[0]
        assert exact[1:] != stale[1:]
        np.testing.assert_allclose(exact, stale, rtol=0.05)

    def test_a_dry_run_says_what_the_host_holds(self, tmp_path):
        said = output(*words_of(tmp_path), "--out", tmp_path / "run", "--dry-run")
        assert (
            "in the memory of the host: 0.1 MB, of which a checkpoint has the rows that have moved"
            in said
        )

    @needs_devices(4)
    def test_training_on_several_devices_is_that_on_one(self):
        changes = {"microbatches": 2, "memory_depth": 1}
        model = dataclasses.replace(
            HOST, memory_orders=(2,), feed_forward="lut", lut_tables=4, lut_bits=2
        )
        one, several = run_of(model, **changes), run_of(model, **changes)
        several.divide({"data": 2, "detectors": 2})
        (expected, state), (losses, on_mesh) = trained(one, 4), trained(several, 4)
        np.testing.assert_allclose(losses, expected, rtol=1e-5)
        np.testing.assert_allclose(table_of(several).weights, table_of(one).weights, atol=1e-5)
        assert several.evaluate(on_mesh, TEXT[:300]) == pytest.approx(
            one.evaluate(state, TEXT[:300]), rel=1e-5
        )

    def test_the_benchmark_of_a_memory_that_is_larger_than_the_device(self):
        script = ROOT / "benchmarks" / "host_memory_larger.py"
        words = [sys.executable, script, "--gigabytes", "0.01", "--small"]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        same = "the 10 losses after the kill are those of the process that was killed, bit for bit"
        assert same in done.stdout, done.stdout + done.stderr

    def test_training_is_that_of_a_memory_on_the_device(self):
        run = run_of()
        first = run.structure.init(0)[1]
        losses, _ = trained(run)
        expected, device = on_device()
        np.testing.assert_allclose(losses, expected, rtol=1e-5)
        weights = device.params["layers"][0]["memory"]["weights"]
        np.testing.assert_allclose(table_of(run).weights, weights, atol=1e-5)
        # All is drawn of the same keys.
        table_of(run).draw(jax.random.wrap_key_data(run.structure.host_keys(first)[NAME]))
        of_device = run_of(DEVICE).init().params["layers"][0]["memory"]["weights"]
        np.testing.assert_array_equal(table_of(run).weights, of_device)

    def test_generation_is_that_of_a_memory_on_the_device(self):
        device, on_host = (GPT(config, rngs=nnx.Rngs(0)) for config in (DEVICE, HOST))
        own = device.layers[0].memory.weights
        own[...] = own[...] * 20
        on_host.layers[0].memory.weights.weights[:] = np.asarray(own[...])
        prompts = [TEXT[:5].astype(np.int32), TEXT[7:9].astype(np.int32)]
        want, actual = (
            model.generate(prompts, 4, key=jax.random.key(0)) for model in (device, on_host)
        )
        np.testing.assert_array_equal(want, actual)
        slots = Slots(on_host, 2, temperature=0)
        first, token = slots.join(prompts[0], key=jax.random.key(0))
        likeliest = device.generate(prompts[:1], 4, key=jax.random.key(0), temperature=0)
        assert [token, *slots.step(3)[first].tolist()] == likeliest[0].tolist()
