"""Memories of n-grams in the memory of the host: training as on the device, stale rows, runs that are killed, generation and errors."""

import ctypes
import dataclasses
import functools
import itertools
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import kills
import numpy as np
import processes
import pytest
from cases import slow
from commands import command
from flax import nnx
from folders import ROOT
from jax.sharding import NamedSharding, PartitionSpec
from machine import needs_devices
from small_runs import MEMORY

import lutjax
from lutjax.models import GPT, GPTConfig, Slots
from lutjax.optim import host as training_on_host
from lutjax.tables import _registered, host as tables_on_host
from lutjax.tables.gradient import TableGradient
from lutjax.training import experiments, hosts, lm_runs, models, runs
from lutjax.training.lm import Run, TrainingConfig

TEXT = np.random.default_rng(0).integers(0, 64, 3000).astype(np.uint8)
MODEL = MEMORY
TRAINING = TrainingConfig(
    steps=9, batch_size=4, learning_rate=0.02, clip=1.0, optimizer="adamw", memory_weight_decay=0.1
)
HOST = dataclasses.replace(MODEL, memory_placement="host")
SMALL = dataclasses.replace(HOST, n_layers=1, memory_layers=(0,), memory_orders=(2,))
ONE_LAYER = {"n_layers": 1, "memory_layers": (0,)}


def run_of(model: GPTConfig = HOST, **changes: Any) -> Run:
    return Run(model, dataclasses.replace(TRAINING, **changes), TEXT, TEXT)


def trained(run: Run, steps: int = 6) -> tuple[list[float], Any]:
    state, losses = run.init(), []
    for i in range(steps):
        state, loss = run.advance(state, i, 1)
        losses.append(float(loss))
    return losses, state


def table_of(run: Run, place: int = 0) -> Any:
    return run.structure.host_tables[f"layers/{place}/memory/weights"][0]


@functools.cache
def on_device() -> tuple[list[float], Any]:
    return trained(run_of(MODEL))


def test_training_is_that_of_a_memory_on_the_device() -> None:
    run = run_of()
    first = run.structure.init(0)[1]
    losses, state = trained(run)
    expected, device = on_device()
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    for place in (0, 1):
        weights = device.params["layers"][place]["memory"]["weights"]
        np.testing.assert_allclose(table_of(run, place).weights, weights, atol=1e-5)
    key = run.structure.host_keys(first)["layers/0/memory/weights"]
    assert run.evaluate(state, TEXT[:500]) == pytest.approx(
        run_of(MODEL).evaluate(device, TEXT[:500]), rel=1e-5
    )
    # All is drawn of the same keys.
    table_of(run).draw(jax.random.wrap_key_data(key))
    np.testing.assert_array_equal(
        table_of(run).weights, run_of(MODEL).init().params["layers"][0]["memory"]["weights"]
    )


@pytest.mark.slow
def test_reads_are_counted_as_on_the_device() -> None:
    run, device = run_of(), run_of(MODEL)
    found, want = (one.usage(one.init(), TEXT[:300]) for one in (run, device))
    assert set(found) == set(want) == set(run.structure.host_tables)
    for name, usage in want.items():
        np.testing.assert_array_equal(found[name].counts, usage.counts)


@pytest.mark.parametrize("implementation", ["native", slow("xla")])
@pytest.mark.parametrize(
    "changes", [{"microbatches": 2}, slow({"memory_optimizer": "sgd", "clip": None})], ids=["parts", "sgd"]
)
def test_training_in_parts_and_by_other_rules(implementation: str, changes: dict[str, Any]) -> None:
    if implementation == "native":
        pytest.importorskip("lutjax_cpu", reason="the package of native kernels is not installed")
    with lutjax.use_implementation({"weighted_lookup": implementation}):
        models = [dataclasses.replace(model, **ONE_LAYER) for model in (MODEL, HOST)]
        losses = [trained(run_of(model, **changes), 3)[0] for model in models]
    np.testing.assert_allclose(*losses, rtol=1e-5)


@pytest.mark.parametrize("depth", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_rows_lack_at_most_the_last_updates(depth: int) -> None:
    run = run_of(memory_depth=depth)
    table, snapshots, state = table_of(run), [], run.init()
    for i in range(6):
        run.ahead.wait()
        assert table.weights is not None
        snapshots.append(table.weights.copy())
        batch = run.ahead.batch(i)
        name = "layers/0/memory/weights"
        ids = np.moveaxis(run._ids(i)[name][..., 0], 1, 0)
        found = np.take_along_axis(snapshots[max(i - depth, 0)], ids[..., None], 1)
        np.testing.assert_array_equal(batch.rows[name], found)
        state, _ = run.advance(state, i, 1)
    assert any((a != b).any() for a, b in itertools.pairwise(snapshots))


class CopyingDriver:
    """A driver of a GPU whose memory is that of the host."""

    def __init__(self) -> None:
        self.locked, self.copies = set[int](), 0

    def register(self, address: int, n_bytes: int) -> None:
        self.locked.add(address)

    def unregister(self, address: int) -> None:
        self.locked.remove(address)

    def wait(self) -> None: ...

    def copy_out(self, array: jax.Array, out: np.ndarray) -> None:
        assert out.ctypes.data in self.locked
        np.copyto(out, array)
        self.copies += 1

    def copy_in(self, array: np.ndarray, out: jax.Array) -> None:
        assert array.ctypes.data in self.locked
        np.copyto(written(out), array)


def written(array: jax.Array) -> np.ndarray:
    """The memory of an array of the CPU."""
    numbers = ctypes.c_float * array.size
    return np.ctypeslib.as_array(numbers.from_address(array.unsafe_buffer_pointer())).reshape(array.shape)


def test_gradients_come_into_locked_memory_that_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = trained(run_of(memory_depth=1), 4)[0]
    driver = CopyingDriver()
    monkeypatch.setattr(_registered, "driver_of", lambda array: driver)
    monkeypatch.setattr(_registered, "view", lambda array: jax.dlpack.from_dlpack(array))
    monkeypatch.setattr(training_on_host, "_SMALL", 0)
    run = run_of(memory_depth=1)
    assert trained(run, 4)[0] == expected
    in_one_step = driver.copies // 4
    assert in_one_step == 2 * 5  # of each table the ids, coefficients, cotangent and two factors
    # Each has its memory at most twice, beside the rows of two tables and three steps.
    assert 0 < len(driver.locked) <= 2 * in_one_step + 6


@pytest.mark.slow
def test_depth_changes_nothing_but_the_age_of_rows() -> None:
    model = dataclasses.replace(HOST, **ONE_LAYER)
    exact, _ = trained(run_of(model))
    run = run_of(model, memory_depth=2)
    stale, again = (trained(run)[0] for _ in range(2))
    assert stale == again
    assert exact[0] == stale[0]
    assert exact[1:] != stale[1:]
    np.testing.assert_allclose(exact, stale, rtol=0.05)


OPTIONS = (
    "--memory", "--memory-placement", "host", "--memory-depth", "2", "--memory-rows", "300", "--features", "16", "--context", "16", "--n-layers", "1", "--n-heads", "2",
    "--feed-forward", "dense", "--batch-size", "4", "--steps", "12", "--checkpoint-every", "4", "--eval-every", "4", "--log-every", "2",
)  # fmt: skip


def words_of(folder: Path) -> list[str]:
    text = folder / "text.txt"
    text.write_bytes(TEXT.tobytes())
    return ["train", "lm", "--text", str(text), *OPTIONS]


@pytest.mark.slow
def test_a_run_that_was_killed_ends_as_if_it_had_not(
    tmp_path: Path, compilation_cache_directory: Path
) -> None:
    words = words_of(tmp_path)
    whole, out = tmp_path / "whole", tmp_path / "killed"
    result = command(*words, "--out", whole)
    assert result.exit_code == 0, result.output
    killed = kills.run(out, words, compilation_cache_directory, r"^/checkpoints/\.8\.tmp/host", 3)
    assert killed is not None
    result = command("train", "lm", "--resume", "--out", out)
    assert "resumed after 4 steps" in result.output
    for name in ("curves.csv", "sample.txt"):
        assert (out / name).read_bytes() == (whole / name).read_bytes()
    one, other = (np.load(path / "checkpoints" / "12" / "host" / "0" / "rows.npy") for path in (whole, out))
    np.testing.assert_array_equal(one, other)
    # Rows that never moved are in no checkpoint.
    assert len(one) == len(np.load(out / "checkpoints" / "12" / "host" / "0" / "ids.npy")) < 6 * 300
    model, _ = lm_runs.load_model(out)
    assert command("generate", out, "--prompt", "abc", "--bytes", 5).output.startswith("abc")
    with pytest.raises(ValueError, match=r"weights lies in the memory of the host"):
        lutjax.save(model, tmp_path / "bundle")
    np.save(out / "checkpoints" / "12" / "host" / "0" / "ids.npy", np.arange(3))
    damaged = command("generate", out, "--prompt", "abc", "--bytes", 5)
    assert "ids.npy has changed since it was written" in damaged.output


def pair(**changes: Any) -> tuple[GPT, GPT]:
    """Two models, with the same memory on the device and on the host."""
    device, on_host = (
        GPT(dataclasses.replace(config, **changes), rngs=nnx.Rngs(0)) for config in (MODEL, HOST)
    )
    for own, other in zip(device.layers, on_host.layers, strict=True):
        other.memory.weights.weights[:] = np.asarray(own.memory.weights[...]) * 20
        own.memory.weights[...] = own.memory.weights[...] * 20
    return device, on_host


def test_generation_is_that_of_a_memory_on_the_device() -> None:
    device, on_host = pair()
    prompts = [TEXT[:5].astype(np.int32), TEXT[7:9].astype(np.int32)]
    want, found = (model.generate(prompts, 9, key=jax.random.key(0)) for model in (device, on_host))
    np.testing.assert_array_equal(want, found)
    drawn = []
    for model in (device, on_host):
        slots = Slots(model, 2, temperature=0)
        first, token = slots.join(prompts[0], key=jax.random.key(0))
        drawn.append([token, *np.asarray(slots.step(3)[first]).tolist()])
    assert drawn[0] == drawn[1]


@pytest.mark.parametrize(
    ("model", "training", "message"),
    [
        ({}, {"select_every": 2}, "select_every is 2; with memory_placement 'host'"),
        ({"memory_placement": "device"}, {"memory_depth": 2}, "memory_depth is 2; it is for a memory with"),
    ],
)
def test_what_cannot_be_trained(model: dict[str, Any], training: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run_of(dataclasses.replace(HOST, **model), **training)


def test_a_dry_run_says_what_the_host_holds(tmp_path: Path) -> None:
    result = command(*words_of(tmp_path), "--out", tmp_path / "run", "--dry-run")
    assert (
        "in the memory of the host: 0.1 MB, of which a checkpoint has the rows that have moved"
        in result.output
    )


@needs_devices(4)
@pytest.mark.slow
def test_training_on_several_devices_is_that_on_one() -> None:
    """Tables with a queue, in parts, beside tables that are divided by detector; tests, too."""
    changes = {"microbatches": 2, "memory_depth": 1}
    model = dataclasses.replace(SMALL, feed_forward="lut", lut_tables=4, lut_bits=2)
    one, several = run_of(model, **changes), run_of(model, **changes)
    several.divide({"data": 2, "detectors": 2})
    (expected, state), (losses, on_mesh) = trained(one, 4), trained(several, 4)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    np.testing.assert_allclose(table_of(several).weights, table_of(one).weights, atol=1e-5)
    test = TEXT[:300]
    assert several.evaluate(on_mesh, test) == pytest.approx(one.evaluate(state, test), rel=1e-5)


def record_of(run: Run) -> lm_runs.Record:
    nothing = runs.Source(None, 0, "")
    return lm_runs.Record(run.config, run.training, nothing, 0.0, {}, history=runs.History())


def one_of_two_processes(folder: str) -> None:
    """Train 4 steps, with a checkpoint after 2, and test."""
    run = run_of(SMALL, memory_depth=1)
    run.divide()
    assert len(table_of(run).rows) == 50
    state, losses = run.init(), []
    for i in range(4):
        if i == 2:
            models.save(Path(folder), 2, state, record_of(run), run)
        state, loss = run.advance(state, i, 1)
        losses.append(float(loss))
    found = {"losses": losses, "test": run.evaluate(state, TEXT[:300])}
    divided = NamedSharding(run.mesh, PartitionSpec("data"))
    gradient = TableGradient(
        None, hosts.put(np.zeros((2, 1)), divided), None, None, table_of(run).shape, np.float32
    )
    with pytest.raises(ValueError, match="is divided over devices of other processes; jit the step"):
        table_of(run).update(gradient, 0.1)
    if hosts.is_first():
        (Path(folder) / "found.json").write_text(json.dumps(found))


@pytest.mark.slow
def test_two_processes_share_the_rows(tmp_path: Path, compilation_cache_directory: Path) -> None:
    """They learn what one does, which goes on with what they saved, and with the rows in their queue."""
    processes.run(
        "test_host_memory:one_of_two_processes", str(tmp_path), devices=1, cache=compilation_cache_directory
    )
    found = json.loads((tmp_path / "found.json").read_text())
    run = run_of(SMALL, memory_depth=1)
    expected, _ = trained(run, 4)
    np.testing.assert_allclose(found["losses"], expected, rtol=1e-5)
    state = models.restore(tmp_path, 2, run)
    for i in (2, 3):
        state, loss = run.advance(state, i, 1)
        assert float(loss) == pytest.approx(expected[i], rel=1e-5)
    assert found["test"] == pytest.approx(run.evaluate(state, TEXT[:300]), rel=1e-5)
    shares = sorted(path.name for path in (tmp_path / "checkpoints" / "2" / "host" / "0").iterdir())
    assert shares == ["0", "50"]


@pytest.mark.slow
def test_two_processes_train_and_generate_by_the_command(
    tmp_path: Path, compilation_cache_directory: Path
) -> None:
    words, cache = [str(word) for word in words_of(tmp_path)], {"cache": compilation_cache_directory}
    result = command(*words, "--out", tmp_path / "one")
    assert result.exit_code == 0, result.output
    with processes.Processes(
        "lutjax", *words, "--out", str(tmp_path / "two"), victim=(1, "agree", 3, "kill"), **cache
    ) as started:
        assert any(status for status, _ in started.wait())
    resumed = processes.run("lutjax", "train", "lm", "--resume", "--out", str(tmp_path / "two"), **cache)
    assert "resumed after " in resumed[0]
    one, two = (
        [float(line.split(",")[2]) for line in (tmp_path / name / "curves.csv").read_text().splitlines()[1:]]
        for name in ("one", "two")
    )
    np.testing.assert_allclose(two, one, rtol=1e-5)
    prompt = ("--prompt", "ab", "--bytes", "5")
    outputs = processes.run("lutjax", "generate", str(tmp_path / "two"), *prompt, **cache)
    text = re.sub(r"\[Gloo\].*\n", "", outputs[0])  # which comes between parts of the text
    assert command("generate", tmp_path / "two", *prompt).output in text


@pytest.mark.slow
def test_the_benchmark_of_a_memory_that_is_larger_than_the_device() -> None:
    script = ROOT / "benchmarks" / "host_memory_larger.py"
    words = [sys.executable, script, "--gigabytes", "0.01", "--small"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (
        "the 10 losses after the kill are those of the process that was killed, bit for bit" in done.stdout
    ), done.stdout + done.stderr


def test_a_table_that_does_not_fit_says_its_size_and_the_cure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = words_of(tmp_path)
    monkeypatch.setattr(experiments, "free_memory", lambda: 10_000)
    result = command(*words, "--out", tmp_path / "run")
    assert result.output.endswith(
        "Error: the run needs 0.1 MB of the memory of the host for tables and the state of their optimizer; 0.0 MB are free. Choose fewer or smaller "
        "rows, or a machine with more memory.\n"
    )
    monkeypatch.undo()
    monkeypatch.setattr(tables_on_host, "free_memory", lambda: 10_000)
    result = command(*words, "--out", tmp_path / "run")
    assert result.exit_code
    assert result.output.splitlines()[-1].startswith("Error: the table weights float32[6, 300, 8]: it takes ")


def test_a_placement_that_does_not_exist() -> None:
    with pytest.raises(ValueError, match="memory_placement is 'disk'"):
        dataclasses.replace(MODEL, memory_placement="disk")
