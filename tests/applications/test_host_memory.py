"""Memories of n-grams in the memory of the host: training as on the device, stale rows, runs that are killed, generation and errors."""

import dataclasses
import functools
import itertools
from pathlib import Path
from typing import Any

import jax
import kills
import numpy as np
import pytest
from commands import command
from flax import nnx

import lutjax
from lutjax.models import GPT, GPTConfig, Slots
from lutjax.tables import host as tables_on_host
from lutjax.training import experiments, lm_runs
from lutjax.training.lm import Run, TrainingConfig

TEXT = np.random.default_rng(0).integers(0, 64, 3000).astype(np.uint8)
MODEL = GPTConfig(
    features=16,
    context=16,
    n_layers=2,
    n_heads=2,
    feed_forward="dense",
    memory=True,
    memory_orders=(2, 3),
    memory_rows=100,
    memory_layers=(0, 1),
)
TRAINING = TrainingConfig(
    steps=9, batch_size=4, learning_rate=0.02, clip=1.0, optimizer="adamw", memory_weight_decay=0.1
)
HOST = dataclasses.replace(MODEL, memory_placement="host")
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


@pytest.mark.thorough
def test_reads_are_counted_as_on_the_device() -> None:
    run, device = run_of(), run_of(MODEL)
    found, want = (one.usage(one.init(), TEXT[:300]) for one in (run, device))
    assert set(found) == set(want) == set(run.structure.host_tables)
    for name, usage in want.items():
        np.testing.assert_array_equal(found[name].counts, usage.counts)


@pytest.mark.thorough("*-xla", "sgd-native")
@pytest.mark.parametrize("implementation", ["native", "xla"])
@pytest.mark.parametrize(
    "changes", [{"microbatches": 2}, {"memory_optimizer": "sgd", "clip": None}], ids=["parts", "sgd"]
)
def test_training_in_parts_and_by_other_rules(implementation: str, changes: dict[str, Any]) -> None:
    if implementation == "native":
        pytest.importorskip("lutjax_cpu", reason="the package of native kernels is not installed")
    with lutjax.use_implementation({"weighted_lookup": implementation}):
        models = [dataclasses.replace(model, **ONE_LAYER) for model in (MODEL, HOST)]
        losses = [trained(run_of(model, **changes), 3)[0] for model in models]
    np.testing.assert_allclose(*losses, rtol=1e-5)


@pytest.mark.parametrize("depth", [1, pytest.param(3, marks=pytest.mark.thorough)])
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


@pytest.mark.thorough
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


@pytest.mark.thorough
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
    device, on_host = pair(**ONE_LAYER)
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


def test_a_mesh_is_refused() -> None:
    with pytest.raises(ValueError, match="one process on one device"):
        run_of().divide({"data": 2})


def test_a_table_that_does_not_fit_says_its_size_and_the_cure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = words_of(tmp_path)
    monkeypatch.setattr(experiments, "free_memory", lambda: 10_000)
    result = command(*words, "--out", tmp_path / "run")
    assert result.output.endswith(
        "Error: the run needs 0.1 MB of the memory of the host for tables and the state of their optimiser; 0.0 MB are free. Choose fewer or smaller "
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
