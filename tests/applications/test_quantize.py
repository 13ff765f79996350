"""Language-model deployment with integer tables: losses, generated text, sizes, and unsupported runs."""

import dataclasses
import re
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from commands import command, refusal
from flax import nnx
from small_runs import FOX, TEXT

import lutjax
from lutjax.layers.nnx import Quantized, Tables
from lutjax.models import GPTConfig, LUTTransformerConfig
from lutjax.training import lm_runs, models, quantize, runs
from lutjax.training.errors import RunError
from lutjax.training.lm import Run, TrainingConfig

CONFIG = GPTConfig(
    features=8, context=8, n_layers=1, n_heads=2, lut_heads=2, lut_tables=4, lut_bits=5,
    read="powers_of_two", table_dropout=0.2,
)  # fmt: skip
TRAINING = TrainingConfig(
    steps=12,
    batch_size=4,
    learning_rate=0.5,
    optimizer="sgd",
    table_optimizer="same",
    table_gradient="dense",
)


def record_of(config, text=None):
    source = runs.Source.create(text, TEXT.size, TEXT.digest)
    return lm_runs.Record(config, TRAINING, source, 3.0, {}, runs.History())


def louder(path, leaf):
    """Scale the table inputs, near zero and unreadable in such a small model, and expose all components."""
    if jax.tree_util.keystr(path).endswith("['compress_kernel']"):
        return 50 * leaf
    return leaf + 0.1 * jax.random.normal(jax.random.key(leaf.size), leaf.shape)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Read-only run with tables read in deployed form."""
    path = tmp_path_factory.mktemp("trained")
    (path / "fox.txt").write_bytes(FOX)
    state = Run(CONFIG, TRAINING, TEXT.train, TEXT.validation).init()
    state = state._replace(params=jax.tree.map_with_path(louder, state.params))
    models.save(path / "run", 12, state, record_of(CONFIG, path / "fox.txt"))
    return path / "run"


@pytest.fixture(scope="module")
def deployed(folder, tmp_path_factory):
    """Run the command on a copy of the quantized run."""
    path = tmp_path_factory.mktemp("deployed") / "run"
    shutil.copytree(folder, path)
    return path, command("quantize", path)


def losses(result):
    (line,) = (line for line in result.output.splitlines() if line.startswith("test loss"))
    words = line.split()
    return float(words[2]), float(words[words.index("before,") + 1])


@nnx.jit
def logits_of(model):
    tokens = jnp.asarray(TEXT.test[:16].reshape(2, 8).astype(np.int32))
    logits = model(tokens)
    return logits


def test_sizes(deployed):
    path, result = deployed
    model = lutjax.load(path / "quantized")
    assert not jax.tree.leaves(nnx.state(model, Tables))
    assert {str(a.dtype) for a in jax.tree.leaves(nnx.state(model, Quantized))} == {"int8", "int32"}
    numbers = CONFIG.n_layers * 2 * 4 * 2**5 * 4
    exponents = CONFIG.n_layers * 4 * 8
    assert f"tables: {4 * numbers:,} bytes before, {numbers + exponents:,} after" in result.output
    saved = 3 * numbers - exponents
    kept = sum(a.nbytes for a in jax.tree.leaves(nnx.state(lutjax.load(path))))
    assert f"model: {kept:,} bytes before, {kept - saved:,} after" in result.output


def test_record_of_the_deployed_model(deployed):
    path, result = deployed
    record = lutjax.load(path / "quantized").record
    assert (record.quantized, record.steps, record.model.read) == (True, 12, "powers_of_two")
    assert not lutjax.load(path).record.quantized
    assert "deploys without a loss" not in result.output
    assert f"lutjax generate {path / 'quantized'} --prompt" in result.output
    assert sorted(p.name for p in path.iterdir()) == [".lock", "checkpoints", "quantized"]
    for words in (
        ("quantize", path / "quantized"),
        ("train", "lm", "--resume", "--out", path / "quantized"),
    ):
        assert "quantized" in refusal(*words)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (LUTTransformerConfig(), "is a run of the model lut, whose integer form is the C program"),
        (dataclasses.replace(CONFIG, feed_forward="dense"), "has no tables: its feed_forward is 'dense'"),
        (dataclasses.replace(CONFIG, feed_forward="lut"), "without a form of integers: its feed_forward is 'lut'"),
        (dataclasses.replace(CONFIG, read="hard"), "the read 'hard', which has no integer form"),
        (dataclasses.replace(CONFIG, read="blend"), "--model gpt --read powers_of_two"),
    ],
)  # fmt: skip
def test_models_without_integers(config, message):
    with pytest.raises(RunError, match=message):
        quantize.deployed_record(Path("runs/lm"), record_of(config))


def test_reads_keep_their_number_of_ways():
    for read, want in (("confidence_1", "powers_of_two_1"), ("powers_of_two_1", "powers_of_two_1")):
        record = record_of(dataclasses.replace(CONFIG, read=read))
        actual = quantize.deployed_record(Path("runs/lm"), record)
        assert (actual.model.read, actual.model.table_dropout) == (want, 0.0)


def test_bad_input_is_one_line(folder, tmp_path):
    other = tmp_path / "other.txt"
    other.write_bytes(FOX.upper())
    dense = record_of(dataclasses.replace(CONFIG, feed_forward="dense"))
    models.save(
        tmp_path / "dense", 1, models.State({"a": jnp.zeros(1)}, {"b": jnp.zeros(1)}, None), dense
    )
    for words, message in (
        ([tmp_path / "none"], "none does not exist."),
        ([folder.parent], "is not the folder of a run, but holds 1"),
        ([tmp_path / "dense"], "has no tables: its feed_forward is 'dense'"),
        ([folder, "--text", other], "the run belongs to another text"),
        ([folder, "--text", tmp_path / "none.txt"], "cannot read the text"),
    ):
        said = refusal("quantize", *words)
        assert message in said
        assert said.count("Error: ") == 1
    assert not (tmp_path / "none").exists()
    assert not (folder / "quantized").exists()


def test_a_folder_is_replaced_as_a_whole_or_not_at_all(tmp_path):
    def replace(write, fail=False):
        with runs.replace_folder(tmp_path / "a") as path:
            if write:
                path.mkdir()
                (path / "new").touch()
            if fail:
                raise OSError("full")
        return found()

    def found():
        return sorted(
            p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*") if p.is_file()
        )

    (tmp_path / ".replaced-a").mkdir()  # killed between the two renames
    (tmp_path / ".replaced-a" / "old").touch()
    with pytest.raises(OSError, match="full"):
        replace(write=True, fail=True)
    assert found() == ["a/old"]
    with pytest.raises(FileNotFoundError):
        replace(write=False)
    assert found() == ["a/old"]
    assert replace(write=True) == ["a/new"]
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


class TestSlow:
    def test_the_deployed_model_is_the_trained_one(self, deployed):
        path, result = deployed
        assert result.exit_code == 0, result.output
        before, after = losses(result)
        assert after == pytest.approx(before, abs=1e-4)
        trained, model = lutjax.load(path), lutjax.load(path / "quantized")
        logits = logits_of(trained)
        np.testing.assert_allclose(logits_of(model), logits, rtol=1e-4, atol=1e-5)
        nnx.update(trained, jax.tree.map(jnp.zeros_like, nnx.state(trained, Tables)))
        assert np.abs(logits_of(trained) - logits).max() > 0.01  # the tables matter
        words = ("generate", "--prompt", "the ", "--bytes", 40, "--temperature", 0, "--checkpoint")
        texts = [command(*words, each) for each in (path, path / "quantized")]
        assert texts[0].exit_code == 0
        assert texts[0].output == texts[1].output
        fast = command(*words, path, "--speed")
        assert fast.stdout == texts[0].stdout
        # On a terminal both streams are one text.
        assert re.fullmatch(r"\n[\d,]+ bytes a second\.\n", fast.stderr)
        several = command(*words, path, "--speed", "--samples", 2)
        assert re.fullmatch(r"[\d,]+ bytes a second\.\n", several.stderr)

    def test_the_best_state_of_a_run_of_exact_scores_is_rounded_after_training(
        self, folder, deployed, tmp_path
    ):
        trained = models.restore(folder, 12, Run(CONFIG, TRAINING, TEXT.train))
        config = dataclasses.replace(CONFIG, read="confidence")
        record = record_of(config, folder.parent / "fox.txt")
        record.training = dataclasses.replace(TRAINING, select_every=6)
        run = Run(config, record.training, TEXT.train, TEXT.validation)
        latest = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), run.abstract())
        latest = latest._replace(others=trained.others)
        best = latest.optimizer._replace(params=trained.params, others=trained.others)
        models.save(tmp_path / "run", 12, latest._replace(optimizer=best), record)
        # The folder that an earlier run or a killed command left is replaced.
        for name in (
            "quantized/checkpoints/99",
            ".unfinished-quantized",
            ".replaced-quantized/checkpoints",
        ):
            (tmp_path / "run" / name).mkdir(parents=True)
        result = command("quantize", tmp_path / "run")
        assert result.exit_code == 0, result.output
        before, after = losses(result)
        assert after != before
        assert after == pytest.approx(losses(deployed[1])[1], abs=1e-4)
        assert "trained with --read confidence" in result.output
        assert lutjax.load(tmp_path / "run" / "quantized").record.model.read == "powers_of_two"
        assert sorted(p.name for p in (tmp_path / "run").iterdir()) == [
            ".lock",
            "checkpoints",
            "quantized",
        ]
