"""Killed, interrupted and resumed runs for every kind end like uninterrupted runs."""

import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys

import jax
import jax.numpy as jnp
import kills
import numpy as np
import pytest
from commands import command, output, refusal
from machine import needs_devices
from PIL import Image
from pytrees import equal
from small_runs import LABELS, TEXT, images, table_text

from lutjax.cli import _progress
from lutjax.models import GPTConfig, LogicClassifierConfig, LUTTransformerConfig
from lutjax.training import (
    checkpoints,
    classifier,
    classifier_runs,
    lm,
    lm_runs,
    loop,
    models,
    runs,
)
from lutjax.training.classifier_runs import MODELS, Classifier
from lutjax.training.datasets.columns import Encoding
from lutjax.training.presets import fields_of
from lutjax.training.recipes import RECIPES, recipe
from lutjax.training.samples import load_digits, split

KINDS = ("lm_run", "table_run", "digits_run", "tree_run", "automaton_run")


@pytest.fixture
def whole(request):
    return request.getfixturevalue(request.param)


def resume(whole, out, *words):
    return output(*whole.words[:2], "--resume", "--out", out, *words)


def interrupt(step, *words):
    """Run a command, and press Ctrl-C after a step."""
    show = _progress.Report.training

    def training(self, losses):
        show(self, losses)
        if losses[-1][0] == step:
            signal.raise_signal(signal.SIGINT)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_progress.Report, "training", training)
        patch.setattr(loop, "CALL", 0.0)  # each loss comes alone
        return command(*words)


@pytest.mark.parametrize("whole", KINDS, indirect=True)
def test_a_run_resumes_from_the_checkpoint_before_the_last(whole, tmp_path):
    out = tmp_path / "run"
    shutil.copytree(whole.out, out)
    before, last = checkpoints.steps(out / runs.FOLDER)
    shutil.rmtree(out / runs.FOLDER / str(last))
    assert f"resumed after {before} steps" in resume(whole, out)
    kills.assert_same(out, whole.out)


def test_a_run_resumes_from_the_checkpoint_before_a_damaged_one(lm_run, tmp_path):
    out = tmp_path / "run"
    shutil.copytree(lm_run.out, out)
    largest = max((out / runs.FOLDER / "24").rglob("*"), key=lambda path: path.stat().st_size)
    content = largest.read_bytes()
    largest.write_bytes(content[:-9] + bytes([content[-9] ^ 1]) + content[-8:])
    said = resume(lm_run, out, "--log-every=1")
    assert said.count("24 is damaged: ") == 1
    assert "resumed after 16 steps" in said
    kills.assert_same(out, lm_run.out)


@pytest.mark.parametrize(
    ("whole", "step", "other"),
    [("lm_run", 11, "--seed=3"), ("automaton_run", 5, "--hard-share=0.5")],
    indirect=["whole"],
)
def test_an_interrupted_run_resumes(whole, step, other, tmp_path):
    out = tmp_path / "run"
    stopped = interrupt(step, *whole.words, "--out", out)
    assert stopped.exit_code == 130
    assert f"Stopped after {step} of " in stopped.output
    assert f"lutjax train {whole.words[1]} --resume --out {out}" in stopped.output
    assert "in the checkpoint, not" in refusal(*whole.words[:2], "--resume", "--out", out, other)
    assert f"resumed after {step} steps" in resume(whole, out)
    kills.assert_same(out, whole.out)


@pytest.mark.parametrize(("whole", "pattern", "count", "resumed"), [
    ("lm_run", r"\.16\.tmp/checkpoint\.json", 1, "resumed after 8 steps"),
    ("automaton_run", r"automaton\.gif", 2, "drawing the automaton ..."),
    ("digits_run", r"finished\.json", 4, ""),
], indirect=["whole"])  # fmt: skip
def test_a_run_is_killed_while_it_writes(
    whole, pattern, count, resumed, tmp_path, compilation_cache_directory
):
    out = tmp_path / "run"
    assert kills.run(out, whole.words, compilation_cache_directory, pattern, count)
    said = resume(whole, out)
    assert resumed in said
    if "resumed" not in resumed:  # no step is taken, and nothing is counted again
        assert "resumed after" not in said
        assert "counting its gates" not in said
    kills.assert_same(out, whole.out)


@pytest.mark.parametrize("whole", ["lm_run", "digits_run", "automaton_run"], indirect=True)
def test_a_run_is_killed_twenty_times(whole, tmp_path, compilation_cache_directory):
    kills.check(whole.words, whole.out, tmp_path, compilation_cache_directory)


@needs_devices(8)
def test_a_run_resumes_on_another_mesh(lm_run, tmp_path):
    out = tmp_path / "run"
    stopped = interrupt(10, *lm_run.words, "--out", out, "--mesh", "data=2,detectors=4")
    assert "on 8 x cpu (data=2,detectors=4)" in stopped.output
    assert "on 2 x cpu (detectors=2); resumed after 10 steps" in resume(
        lm_run, out, "--mesh", "detectors=2"
    )
    histories = (runs.read(folder, lm_runs.Record)[1].history for folder in (out, lm_run.out))
    for points, expected in zip(*((*h.train, *h.test) for h in histories), strict=True):
        assert points == pytest.approx(expected, rel=1e-4)
    generate = ("generate", out, "--prompt", "the ", "--bytes", 30)
    assert output(*generate, "--mesh", "detectors=4") == output(*generate)


def test_a_run_is_made_longer(lm_run, automaton_run, tmp_path):
    out = tmp_path / "run"
    shutil.copytree(lm_run.out, out)
    words = ("train", "lm", "--resume", "--out", out)
    refused = refusal(*words, "--steps=32", "--model=lut", "--preset=demo", "--cooldown=0.5")
    assert "--n-detectors is 4 in the checkpoint, not 8" in refused
    said = output(*words, "--steps=26")
    assert "11 of them, the first of them step 14, were taken at another rate" in said
    assert "resumed after 24 steps" in said
    assert "finished, as all 26 steps are done" in said
    assert [n for n, _ in runs.read(out, lm_runs.Record)[1].history.train] == list(range(1, 27))
    shutil.copytree(automaton_run.out, tmp_path / "ca")
    said = resume(automaton_run, tmp_path / "ca", "--steps=10", "--no-pictures")
    assert "were taken at another rate or share of hard gates" in " ".join(said.split())


def test_baselines_are_fitted_last(tmp_path, monkeypatch):
    words = ("train", "digits", "--layers=20", "--steps=2", "--log-every=1", "--eval-every=2")
    fitting = "fitting logistic regression and a random forest to the same bits ..."
    with monkeypatch.context() as patch:
        patch.setattr(classifier_runs, "baselines", lambda *_: signal.raise_signal(signal.SIGINT))
        stopped = command(*words, "--out", tmp_path)
    assert stopped.exit_code == 130
    lines = stopped.output.splitlines()
    assert lines.index(fitting) > max(
        k for k, line in enumerate(lines) if line.startswith("step 2/2")
    )
    monkeypatch.setattr(classifier_runs, "baselines", lambda *_: {"a coin": 0.125})
    said = output("train", "digits", "--resume", "--out", tmp_path)
    assert fitting in said
    assert "on the same bits a coin 12.5 %" in said


LUT = LUTTransformerConfig(
    features=8,
    context=8,
    n_layers=1,
    n_heads=1,
    n_detectors=4,
    n_anchors=2,
    ffn_detectors=4,
    ffn_anchors=3,
)
GPT = GPTConfig(features=8, context=8, n_layers=1, n_heads=2, dropout=0.1, feed_forward="dense")
GATES = LogicClassifierConfig(16, 2, layers=(40, 20), n_thresholds=3)
GUMBEL = {"tables": "light", "estimator": "gumbel", "learned_thresholds": True}
RESUMED = {
    "row_adagrad": (LUT, {"table_optimizer": "row_adagrad"}),
    "row_adam": (LUT, {"table_optimizer": "row_adam"}),
    "batch_norm": (dataclasses.replace(LUT, batch_norm=True), {}),
    "selected": (
        GPT, {"select_every": 3, "validate": True, "table_optimizer": "same", "table_gradient": "dense"},
    ),
    "learned thresholds": (dataclasses.replace(GATES, **GUMBEL), {"thresholds": "learned"}),
    **{
        f"{wiring}, {estimator}": (
            dataclasses.replace(GATES, wiring=wiring, candidates=4, estimator=estimator), {"weight_decay": 0.01},
        )
        for wiring in ("top-k", "full")
        for estimator in ("soft", "gumbel")
    },
}  # fmt: skip


@pytest.mark.parametrize("name", RESUMED)
def test_a_restored_state_trains_to_the_same_bits(name, tmp_path):
    config, options = RESUMED[name]
    if isinstance(config, LogicClassifierConfig):
        options = {"batch_size": 20, "learning_rate": 0.5, "final_temperature": 0.5, **options}
        run = classifier.Run(config, classifier.TrainingConfig(steps=8, **options), images())
        record = classifier.Record(
            config, run.training, runs.Source(None, 60, ""), {}, {}, runs.History()
        )
    else:
        training = lm.TrainingConfig(steps=8, batch_size=4, **options)
        run = lm.Run(config, training, TEXT.train, TEXT.validation)
        source = runs.Source(None, TEXT.size, TEXT.digest)
        record = lm_runs.Record(config, training, source, 3.0, {}, runs.History(train=[(4, 5.25)]))
    first = run.init()
    start = jax.tree.map(np.asarray, first.params)
    part, _ = run.advance(first, 0, 3)
    models.save(tmp_path, 3, part, record)
    assert runs.read(tmp_path, type(record)) == (3, record)
    middle = jax.tree.map(np.asarray, part.params)
    resumed, _ = run.advance(models.restore(tmp_path, 3, run), 3, 5)
    assert not equal(start, middle)
    assert not equal(middle, resumed.params)
    whole, _ = run.advance(run.init(), 0, 8)
    assert equal(whole, resumed)


def test_the_best_hard_network_is_kept(tmp_path):
    config = LogicClassifierConfig(16, 2, layers=(12,), n_thresholds=3)
    options = {"steps": 9, "batch_size": 8, "select_every": 2, "learning_rate": 0.5}
    data = images()
    run = classifier.Run(config, classifier.TrainingConfig(**options), data)
    state, result = run.init(), []
    for step in range(9):
        state, _ = run.advance(state, step, 1)
        if step + 1 in (2, 4, 6, 8, 9):
            plain = state._replace(params=jax.tree.map(jnp.copy, state.params))
            result.append((run.accuracy(plain, data, hard=True), step + 1, plain.params))
    best, step, params = max(result, key=lambda one: one[:2])
    assert len({accuracy for accuracy, *_ in result}) > 1
    assert int(state.optimizer.step) == step
    assert float(state.optimizer.accuracy) == pytest.approx(best)
    assert equal(run.selected(state).params, params)
    record = classifier.Record(
        config, run.training, runs.Source(None, 60, ""), {}, {}, runs.History()
    )
    models.save(tmp_path, 9, state, record)
    assert equal(models.arrays(classifier.load_model(tmp_path)[0])[0], params)


def test_generate_many_texts(lm_run):
    words = ("generate", lm_run.out, "--bytes", 40)
    drawn = [
        ("--prompt", prompt, "--seed", seed)
        for prompt in ("the ", "quick", "over")
        for seed in (5, 6)
    ]
    alone = [command(*words, *one).stdout_bytes for one in drawn]
    assert len(set(alone)) == 6
    prompts = ("--prompt", "the ", "--prompt", "quick", "--prompt", "over")
    together = command(*words, *prompts, "--samples", 2, "--seed", 5)
    assert together.stdout_bytes == b"".join(text + b"\n" for text in alone)
    integers = ("--integers", "int16", "--prompt", "the ")
    one, other = (command(*words, *integers, "--seed", seed).stdout_bytes for seed in (5, 6))
    assert command(*words, *integers, "--seed", 5, "--samples", 2).stdout_bytes == b"%s\n%s\n" % (
        one,
        other,
    )


def test_a_dry_run(lm_run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = output(*lm_run.words, "--dry-run")
    for text in ("\nkernels: ", "parameters: 10,552 (0.0 MB)", "24 steps take"):
        assert text in said
    assert not list(tmp_path.iterdir())
    refusal("train", "lm", "--dry-run", "--resume")


def test_a_device_that_is_not_there(tmp_path):
    words, environment = (
        [sys.executable, "-m", "lutjax", "train", "digits"],
        {**os.environ, "JAX_PLATFORMS": "tpu"},
    )
    done = subprocess.run(
        words, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("Error: JAX found no tpu device")
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


def test_accuracy_on_the_digits():
    train, test = split(load_digits(), 0)
    config = LogicClassifierConfig(64, 10, layers=(1000, 1000), tables="light")
    run = classifier.Run(config, classifier.TrainingConfig(steps=2000), train)
    state, _ = run.advance(run.init(), 0, 2000)
    # The splits 0, 1 and 2 give 95.0, 94.7 and 94.4 %.
    assert run.accuracy(state, test, hard=True) > 0.94
    model = run.structure.model(state.params, state.others)
    np.testing.assert_array_equal(model.packed()(test.x), run.classes(state, test.x, hard=True))


def test_images_of_bytes_train(tmp_path):
    rng = np.random.default_rng(1)
    for k in range(24):
        path = tmp_path / ("train", "test")[k // 12] / str(k % 2) / f"{k}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (8, 8, 3), np.uint8)).save(path)
    run = Classifier.create({"layers": (20,), "n_thresholds": 1, "batch_size": 4}, tmp_path)
    assert run.train.x.dtype == np.uint8
    state, loss = run.run.advance(run.run.init(), 0, 2)
    assert np.isfinite(float(loss))
    x = run.test.x
    alone = [
        run.run.classes(state, x[n : n + 1].astype(np.float32), hard=True)[0] for n in range(2)
    ]
    np.testing.assert_array_equal(run.run.classes(state, x, hard=True)[:2], alone)
    with pytest.raises(
        ValueError, match=r"split is 3, but .* has its own test part\. Omit --split"
    ):
        Classifier.create({"split": 3}, tmp_path)


def test_a_run_on_scaled_images_goes_on(tmp_path):
    for k in range(24):
        path = tmp_path / f"data/{k % 2}/{k:02}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(k).integers(0, 250, (9 + k, 17), np.uint8) // (1 + k % 2)
        Image.fromarray(pixels).save(path)
    train = ("train", "classify", "--out", tmp_path / "run")
    sizes = (
        "--layers=24",
        "--n-thresholds=1",
        "--batch-size=16",
        "--no-baselines",
        "--image-size=4x5",
    )
    assert "24 scaled to 4 x 5 pixels" in output(
        *train, "--data", tmp_path / "data", *sizes, "--steps=10"
    )
    assert "step 20/20" in output(*train, "--resume", "--steps=20")
    assert "; images are scaled to this size" in output("info", tmp_path / "run")
    assert output("predict", tmp_path / "run", tmp_path / "data").count("\n") == 25
    output("export", tmp_path / "run", "--format=c")
    refused = refusal(*train, "--resume", "--image-size=5x5", "--steps=30")
    assert "belongs to other samples" in refused


def write(path, text):
    path.write_text(text)
    return path


def write_table(folder):
    return write(folder / "table.csv", table_text())


def test_recipes(tmp_path):
    for name, one in RECIPES.items():
        assert one.name == name
        configs = (MODELS[one.model], classifier.TrainingConfig)
        assert sum(len(fields_of(config, one.fields())) for config in configs) == len(one.fields())
        layers = one.sizes()["layers"]
        assert not layers[-1] % (2 if one.data == "Adult" else 10)
        assert str(one).startswith(f"{name}: ")
        assert one.model == "tree" or f" {sum(layers):,} " in str(one)
    with pytest.raises(
        ValueError, match="recipe is 'none'; the known ones are difflogic-mnist-small"
    ):
        recipe("none")
    table = write_table(tmp_path)
    record = Classifier.create(
        {"tau": 7.0, "wiring": "balanced"}, table, "class", None, "difflogic-adult"
    ).record
    assert (record.model.layers, record.model.tau, record.training.steps) == (
        (256,) * 5,
        7.0,
        100_000,
    )
    assert record.recipe == "difflogic-adult"
    with pytest.raises(ValueError, match="n_thresholds is 2, but columns are already bits"):
        Classifier.create({"n_thresholds": 2}, table, "class")


def test_an_export_names_classes_and_bits(table_run, tmp_path):
    out = table_run.out
    for words in ((), (out, "--run", out)):
        assert "Error: give the folder of one run or bundle, as RUN." in refusal("export", *words)
    output(
        "export", "--run", out, "--out", tmp_path, "--format", "verilog,c,html", "--inputs", "bits"
    )
    encoding = Encoding.from_json((tmp_path / "columns.json").read_text())
    assert encoding == Encoding.from_json((out / "columns.json").read_text())
    for name in ("run.json", "manifest.json"):
        about = json.loads((tmp_path / name).read_text())["about"]
        assert about["input_names"] == encoding.features
        assert about["classes"] == list(LABELS)
        assert about["image"] is None
    for name, begin in (("run.h", " * "), ("run.v", "// ")):
        lines = (tmp_path / name).read_text().splitlines()
        assert begin + 'class 1: "<small>\\n_"' in lines  # in one line, whatever the name
        for number, feature in enumerate(encoding.features):
            assert any(line.startswith(f'{begin}x[{number}]: "{feature}"') for line in lines)
    page = (tmp_path / "run.html").read_text()
    assert "pixels" not in re.sub(r"(?s)<script.*?</script>", "", page)
    assert "tells 2 classes apart: $large_$ &amp; \\x$$, &lt;small&gt;" in page
    assert "size &gt; " in page or '"size > ' in page
    told = json.loads((tmp_path / "manifest.json").read_text())["files"]["columns.json"]
    assert told["format"] == "extra"
    assert "PASS     manifest.json = the files" in command("verify", tmp_path).output
