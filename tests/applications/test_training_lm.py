"""Language-model runs: steps, evaluation, checkpoints, and the learned text."""

import dataclasses
import math
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from pytrees import equal
from small_runs import TEXT

from lutjax.models import LUTTransformerConfig
from lutjax.training import checkpoints, lm_runs, loop, models, runs
from lutjax.training.lm import Run, TrainingConfig
from lutjax.training.models import State
from lutjax.training.text import (
    STANDARD_LIBRARY_BYTES,
    TextError,
    bigram_loss,
    load_text,
    split_text,
)

CONFIG = LUTTransformerConfig(
    features=8, context=8, n_layers=1, n_heads=1, n_detectors=4, n_anchors=2, n_position_bits=2, ffn_detectors=4, ffn_anchors=3,
)  # fmt: skip
TRAINING = TrainingConfig(steps=12, batch_size=4)


@pytest.fixture(scope="module")
def run():
    return Run(CONFIG, TRAINING, TEXT.train)


def record_of(run):
    text = runs.Source(None, TEXT.size, TEXT.digest)
    return lm_runs.Record(run.config, run.training, text, 3.0, {}, runs.History(train=[(4, 5.25)]))


def test_training_lowers_the_loss_and_keeps_frozen_variables(run):
    before = run.init()
    others = jax.tree.map(np.asarray, before.others)
    loss = run.evaluate(before, TEXT.test)
    assert loss == pytest.approx(np.log(256))  # tables of zeros: all bytes alike
    after, _ = loop.run(run.advance, before, first=0, steps=12)
    assert run.evaluate(after, TEXT.test) < loss - 0.5
    assert equal(after.others, others)


def test_evaluation_predicts_every_byte_once(run):
    state, _ = run.advance(run.init(), 0, 12)
    whole = run.evaluate(state, TEXT.test)
    assert run.evaluate(state, TEXT.test, max_windows=10**6) == whole
    assert run.evaluate(state, TEXT.test, max_windows=5) == pytest.approx(whole, abs=0.5)
    model = run.structure.model(state.params, state.others)
    logits_of = nnx.jit(lambda model, tokens: model(tokens, deterministic=True))
    for size in (10, 23):
        part = TEXT.test[:size]
        losses, done = [], 0
        while done < size - 1:
            start = min(done, size - 1 - 8)
            window = part[start : start + 9].astype(np.int32)
            logits = logits_of(model, window[None, :-1])
            loss = optax.softmax_cross_entropy_with_integer_labels(
                logits[0], jnp.asarray(window[1:])
            )
            losses += loss[done - start :].tolist()
            done = start + 8
        assert len(losses) == size - 1
        assert run.evaluate(state, part) == pytest.approx(np.mean(losses), rel=1e-5)


def test_model_of_a_checkpoint(run, tmp_path):
    state, _ = run.advance(run.init(), 0, 4)
    models.save(tmp_path, 4, state, record_of(run))
    model, record = lm_runs.load_model(tmp_path)
    assert record.model == CONFIG
    tokens = jnp.asarray(TEXT.test[None, :8].astype(np.int32))
    expected = run.structure.model(state.params, state.others)(tokens, deterministic=True)
    assert (model(tokens, deterministic=True) == expected).all()


def test_ids_out_of_range_are_refused(run, tmp_path):
    def broken(path, leaf):
        return leaf + 100 if "anchors" in jax.tree_util.keystr(path) else leaf

    state = run.init()
    state = state._replace(others=jax.tree_util.tree_map_with_path(broken, state.others))
    models.save(tmp_path, 4, state, record_of(run))
    for read in (lambda: models.restore(tmp_path, 4, run), lambda: lm_runs.load_model(tmp_path)):
        with pytest.raises(
            checkpoints.CheckpointError, match=r"cannot be used: .*inputs are 0 to 7"
        ):
            read()


def test_arrays_of_another_configuration_are_refused(run, tmp_path):
    models.save(tmp_path, 4, run.init(), record_of(run))
    other = Run(dataclasses.replace(CONFIG, n_detectors=5), TRAINING, TEXT.train)
    with pytest.raises(checkpoints.CheckpointError, match="does not fit this model"):
        models.restore(tmp_path, 4, other)
    with pytest.raises(ValueError, match="vocab_size is 300"):
        Run(dataclasses.replace(CONFIG, vocab_size=300), TRAINING, TEXT.train)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("steps", 0), ("batch_size", -1), ("learning_rate", 0.0), ("learning_rate", float("nan"))],
        *[("warmup", -0.1), ("cooldown", 1.5), ("seed", -1), ("optimizer", "lion"), ("schedule", "linear")],
        *[("loss", "max"), ("table_gradient", "sparse"), ("table_optimizer", "adam"), ("microbatches", 0)],
        *[("table_weight_decay", -0.1), ("table_rate", -1.0), ("table_rate", float("inf")), ("microbatches", 3)],
    ],
)  # fmt: skip
def test_training_values_out_of_range(field, value):
    with pytest.raises(ValueError, match=f"^{field} is "):
        TrainingConfig(**{field: value})


def test_state_is_all_that_training_needs(run):
    # also what the checkpoint is read with
    abstract, state = run.abstract(), run.init()
    assert isinstance(abstract, State)
    assert jax.tree.structure(abstract) == jax.tree.structure(state)
    assert jax.tree.all(
        jax.tree.map(lambda a, b: (a.shape, a.dtype) == (b.shape, b.dtype), abstract, state)
    )
    params = nnx.state(run.structure.model(state.params, state.others), nnx.Param)
    assert run.structure.n_parameters() == sum(p.size for p in jax.tree.leaves(params))


class TestSlow:
    def test_chunks_change_nothing(self, run):
        one, _ = run.advance(run.init(), 0, 12)
        other = run.init()
        for first, count in ((0, 5), (5, 1), (6, 6)):
            other, _ = run.advance(other, first, count)
        assert equal(one, other)
        assert (
            run.advance.programs == 1
        )  # a state after steps is like the first one: nothing is compiled anew
        seeds = (
            Run(CONFIG, dataclasses.replace(TRAINING, seed=seed), TEXT.train) for seed in (0, 1)
        )
        again, different = (r.advance(r.init(), 0, 12)[0] for r in seeds)
        assert equal(again.params, one.params)
        assert not equal(different.params, one.params)

    def test_sum_and_mean_loss_differ_by_a_factor_of_the_rate(self):
        states = []
        for loss, rate in (("mean", 0.5), ("sum", 0.5 / (4 * 8))):
            training = TrainingConfig(
                steps=3,
                batch_size=4,
                optimizer="sgd",
                table_optimizer="sgd",
                cooldown=0.0,
                loss=loss,
                learning_rate=rate,
            )
            run = Run(CONFIG, training, TEXT.train)
            state, value = run.advance(run.init(), 0, 3)
            assert value == pytest.approx(np.log(256), abs=0.2)  # reported as a mean either way
            states.append(state.params)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), *states)


def test_parts_are_contiguous_and_complete():
    data = bytes(i % 251 for i in range(1234))
    text = split_text(data, name="t")
    assert (text.train.size, text.validation.size, text.test.size) == (1050, 61, 123)
    assert b"".join(p.tobytes() for p in (text.train, text.validation, text.test)) == data
    assert text.size == 1234


def test_standard_library_is_the_default_and_always_the_same():
    text = load_text()
    assert text.size == STANDARD_LIBRARY_BYTES
    assert text.digest == load_text().digest
    assert b"import " in text.train.tobytes()
    assert b"def " in text.test.tobytes()


def test_folder_is_read_in_sorted_order_without_what_is_not_text(tmp_path):
    files = {"b.txt": b"b" * 40, "a.txt": b"a" * 40, "image.png": b"\xff\xfe", ".hidden": b"x"}
    for name, data in {**files, "test/c.txt": b"c" * 40}.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
    text = load_text(tmp_path)
    whole = b"".join(p.tobytes() for p in (text.train, text.validation, text.test))
    assert whole == b"\n".join([b"a" * 40, b"b" * 40, b"c" * 40])


@pytest.mark.parametrize(("data", "message"), [
    (b"", "empty"),
    (b"abc", "too short: its training part has 3 of 3 bytes"),
    (b"x" * 600, ", 680 in all"),
])  # fmt: skip
def test_unusable_text(tmp_path, data, message):
    path = tmp_path / "t.txt"
    path.write_bytes(data)
    with pytest.raises(TextError, match=message):
        load_text(path, context=32)


def test_texts_that_cannot_be_read(tmp_path, monkeypatch):
    with pytest.raises(TextError, match="No such file"):
        load_text(tmp_path / "missing")
    with pytest.raises(TextError, match="holds no UTF-8 text"):
        load_text(tmp_path)
    path = tmp_path / "t.txt"
    path.write_bytes(b"x" * 1001)
    monkeypatch.setattr("lutjax.training.text.MOST_BYTES", 1000)
    with pytest.raises(TextError, match=r"has 1,001 bytes; the maximum is 1,000"):
        load_text(path)


def test_a_large_file_is_mapped(tmp_path, monkeypatch):
    path = tmp_path / "t.txt"
    path.write_bytes(bytes(range(256)) * 4)
    whole = load_text(path)
    monkeypatch.setattr("lutjax.training.text.MAPPED_BYTES", 1000)
    monkeypatch.setattr(Path, "read_bytes", None)
    mapped = load_text(path)
    assert mapped.digest == whole.digest
    for part in ("train", "validation", "test"):
        np.testing.assert_array_equal(getattr(mapped, part), getattr(whole, part))
    assert bigram_loss(mapped.train, mapped.test) == bigram_loss(whole.train, whole.test)


def test_bigram_loss():
    train = np.frombuffer(b"ababab", np.uint8)
    test = np.frombuffer(b"aba", np.uint8)
    # a is followed by b 3 times of 3, b by a 2 times of 2
    expected = -(math.log(3.5 / (3 + 128)) + math.log(2.5 / (2 + 128))) / 2
    assert bigram_loss(train, test, smoothing=0.5) == pytest.approx(expected)
    uniform = np.random.default_rng(0).integers(0, 256, 100_000).astype(np.uint8)
    assert bigram_loss(uniform, uniform[:1000], smoothing=1e6) == pytest.approx(
        math.log(256), abs=0.01
    )


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes here")
def test_pipes_in_a_folder_are_left_out(tmp_path):
    (tmp_path / "a.txt").write_text("some text " * 20)
    os.mkfifo(tmp_path / "b.txt")
    assert load_text(tmp_path).size == 200
