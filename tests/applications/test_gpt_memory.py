"""GPT with an n-gram memory: decoding, segments, row-wise training, checkpoints and the command."""

import dataclasses
import functools
import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from commands import output
from flax import nnx
from folders import ROOT
from small_runs import FOX, TEXT, perturb

import lutjax
from lutjax.models import GPT, GPTConfig, Slots
from lutjax.training import lm_runs, models, presets, runs
from lutjax.training.lm import Run, TrainingConfig
from lutjax.training.text import bigram_loss

SMALL = GPTConfig(
    vocab_size=11, features=8, context=6, n_layers=1, n_heads=2, feed_forward="dense",
    memory=True, memory_orders=(2, 3), memory_rows=50, memory_heads=2, memory_layers=(0,),
)  # fmt: skip


@functools.cache
def parts_of(**changes):
    """Model with parameters large enough to expose every component."""
    return nnx.split(perturb(GPT(dataclasses.replace(SMALL, **changes), rngs=nnx.Rngs(0))))


def model_of(**changes):
    return nnx.merge(*parts_of(**changes))


TOKENS = np.random.default_rng(0).integers(0, SMALL.vocab_size, (2, 14), np.int32)


@nnx.jit
def logits_of(model, tokens, segments=None):
    return model(tokens, deterministic=True, segments=segments)


def test_segments_are_texts_of_their_own():
    segments = jnp.asarray([[0] * 5 + [1] * 4 + [2] * 5] * 2)
    model = model_of()
    packed = logits_of(model, TOKENS, segments)
    for i, j in ((0, 5), (5, 9), (9, 14)):
        alone = logits_of(model, np.pad(TOKENS[:, i:j], ((0, 0), (0, 14 - j + i))))[:, : j - i]
        np.testing.assert_allclose(packed[:, i:j], alone, atol=1e-4)


def test_vectors_alone_do_not_say_which_rows():
    model = model_of()
    vectors = model.embed(TOKENS)
    with pytest.raises(
        ValueError, match="vectors alone do not say which rows of the memory to read; give"
    ):
        model.from_embedded(vectors)
    of_vectors = nnx.jit(lambda model, x: model.from_embedded(x, deterministic=True, tokens=TOKENS))
    np.testing.assert_allclose(of_vectors(model, vectors), logits_of(model, TOKENS), atol=1e-5)
    outside, last = (
        logits_of(model, np.tile(np.int32(ids), (2, 7))) for ids in ([99, -1], [10, 0])
    )
    np.testing.assert_array_equal(outside, last)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"memory_rows": 0}, "memory_rows is 0; it must be a whole number from 1"),
        ({"memory_orders": ()}, r"memory_orders is \(\); expected different lengths"),
        ({"memory_width": 0}, "memory_width is 0; it must be at least 1"),
        ({"memory_layers": (1,)}, r"memory_layers is \(1,\) and n_layers 1; expected different numbers of layers, from 0 to 0"),
        ({"memory_layers": ()}, r"memory_layers is \(\)"),
    ],
)  # fmt: skip
def test_impossible_configs(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SMALL, **changes)
    assert GPTConfig.from_dict(json.loads(json.dumps(SMALL.to_dict()))) == SMALL


SCORED = {"feed_forward": "scored_lut", "lut_heads": 2, "lut_tables": 2, "lut_bits": 3}
CONFIG = dataclasses.replace(SMALL, vocab_size=256, context=8, **SCORED)
TRAINING = TrainingConfig(
    **presets.fields_of(TrainingConfig, presets.PRESETS["gpt"]["demo"])
    | {"steps": 12, "batch_size": 4, "learning_rate": 0.02, "table_optimizer": "same"}
)


@functools.cache
def trained(config=CONFIG, **changes):
    run = Run(config, dataclasses.replace(TRAINING, **changes), TEXT.train)
    state, losses = run.init(), []
    for step in range(4):
        state, loss = run.advance(state, step, 1)
        losses.append(float(loss))
    return run, state, losses


def test_reads_of_a_memory_are_known_from_bytes():
    run, context = Run(CONFIG, TRAINING, TEXT.train), CONFIG.context
    result = run.memory_usage(TEXT.test)
    assert list(result) == ["layers/0/memory/weights"]
    counts = np.zeros((4, 50), int)
    for first in range(0, TEXT.test.size - 1, context):
        first = min(first, TEXT.test.size - 1 - context)
        tokens = TEXT.test[first : first + context].astype(np.int32)
        for row in run.structure.empty().layers[0].memory.row_ids(tokens):
            counts[range(4), row] += 1
    np.testing.assert_array_equal(result["layers/0/memory/weights"].counts, counts)
    few = run.memory_usage(TEXT.test, max_windows=2)["layers/0/memory/weights"]
    np.testing.assert_array_equal(few.reads, 2 * context)
    assert run.memory_usage(TEXT.test[: context + 1])["layers/0/memory/weights"].reads[0] == context
    assert not Run(dataclasses.replace(CONFIG, memory=False), TRAINING, TEXT.train).memory_usage(
        TEXT.test
    )


class TestSlow:
    @pytest.mark.parametrize("changes", [
        {"microbatches": 2},
        {"table_gradient": "factored", "table_optimizer": "row_adagrad"},
        {"remat": True},
    ], ids=["microbatches", "factored", "remat"])  # fmt: skip
    def test_other_ways_to_the_same_losses(self, changes):
        changes = dict(changes)
        config = dataclasses.replace(CONFIG, remat=changes.pop("remat", False))
        tables = {"table_optimizer": "row_adagrad"} if changes.get("table_gradient") else {}
        np.testing.assert_allclose(trained(config, **changes)[2], trained(**tables)[2], rtol=1e-4)

    def test_models_are_saved_and_loaded(self, tmp_path):
        run, state, _ = trained()
        text, bigram = runs.Source(None, TEXT.size, TEXT.digest), bigram_loss(TEXT.train, TEXT.test)
        record = lm_runs.Record(run.config, run.training, text, bigram, {}, runs.History())
        models.save(tmp_path / "run", 4, state, record)
        model = lutjax.load(tmp_path / "run")
        tokens = jnp.asarray(TEXT.test[None, :8].astype(np.int32))
        want = logits_of(run.structure.model(state.params, state.others), tokens)
        np.testing.assert_array_equal(logits_of(model, tokens), want)
        lutjax.save(model, tmp_path / "bundle")
        np.testing.assert_array_equal(logits_of(lutjax.load(tmp_path / "bundle"), tokens), want)
        actual = run.usage(state, TEXT.test)["layers/0/memory/weights"]
        assert actual.counts.shape == (4, 50)
        assert len(set(actual.reads.tolist())) == 1

    def test_the_command(self, text, tmp_path):
        words = [
            "--features=8", "--context=8", "--n-layers=1", "--n-heads=2", "--lut-heads=2", "--lut-tables=2",
            "--lut-bits=3", "--memory", "--memory-rows=64", "--batch-size=4", "--steps=8",
            "--learning-rate=0.02",
        ]  # fmt: skip
        assert "layers/0/memory/weights" in output(
            "train", "lm", "--text", text, "--out", tmp_path, *words
        )
        assert output("generate", tmp_path, "--prompt", "the ", "--bytes", 9).startswith("the ")
        assert "layers/0/memory/weights: never read" in output("info", tmp_path)
        (counted,) = json.loads((tmp_path / "usage.json").read_text())
        assert counted["name"] == "layers/0/memory/weights"

    def test_comparison_in_equal_time(self, tmp_path):
        (tmp_path / "fox.txt").write_bytes(FOX * 5)
        sizes = [
            "features=16", "context=16", "n_layers=1", "n_heads=2", "lut_bits=2", "memory_rows=64",
            "memory_width=2",
        ]  # fmt: skip
        options = [
            "--steps", "30", "--seeds", "0,1", "--rates", "1,5", "--text", "fox.txt", "--json", "rows.jsonl",
        ]  # fmt: skip
        words = ["train", *options, *(word for size in sizes for word in ("--set", size))]
        subprocess.run(
            [sys.executable, ROOT / "benchmarks" / "memory.py", *words], cwd=tmp_path, check=True
        )
        result = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
        tried, made = ([r for r in result if r["what"] == what] for what in ("rate", "train"))
        assert [r["rate"] for r in tried] == [1, 5]
        best = min(tried, key=lambda r: r["validation"])["rate"]
        ways = [
            (name, seed, rate)
            for seed in (0, 1)
            for name, rate in (("without", None), ("with", best))
        ]
        assert [(r["model"], r["seed"], r.get("memory_rate")) for r in made] == ways
        assert abs(made[0]["read"] / made[1]["read"] - 1) < 0.05
        assert made[0]["loss"] != made[2]["loss"]

    def test_decoding_in_chunks_equals_full_pass(self):
        model = model_of()
        want = logits_of(model, TOKENS)
        model.init_cache((2,))
        decode = nnx.jit(lambda model, tokens: model(tokens, deterministic=True, decode=True))
        got = [decode(model, TOKENS[:, i:j]) for i, j in ((0, 8), (8, 9), (9, 10), (10, 14))]
        atol = 1e-5 * float(jnp.abs(want).max())
        np.testing.assert_allclose(jnp.concatenate(got, 1), want, rtol=1e-5, atol=atol)
        without = logits_of(model_of(memory=False), TOKENS)
        assert jnp.abs(without - want).max() > 0.1

    def test_generate_and_slots_draw_the_same(self):
        model, n = model_of(), 4
        texts, want = [TOKENS[0, :9], TOKENS[1, :3]], []
        for text in texts:
            padded = jnp.pad(text, (0, 14 - len(text)))
            for i in range(len(text), len(text) + n):
                padded = padded.at[i].set(
                    jnp.argmax(logits_of(model, jnp.stack([padded] * 2))[0, i - 1])
                )
            want.append(padded[len(text) : len(text) + n].tolist())
        assert model.generate(texts, n, key=jax.random.key(0), temperature=0).tolist() == want
        slots = Slots(model, 3, temperature=0)
        first, token = slots.join(texts[0], key=jax.random.key(0))
        actual = {first: [token, *slots.step()[first].tolist()]}
        second, token = slots.join(texts[1], key=jax.random.key(1))
        actual[second] = [token]
        for _ in range(n - 2):
            for slot, tokens in slots.step().items():
                actual[slot] += tokens.tolist()
        assert actual[first] == want[0]
        assert actual[second] == want[1][: n - 1]

    def test_rows_of_a_memory_move_by_a_rule_of_their_own(self):
        run, state, losses = trained()
        assert set(state.optimizer.rows) == {"layers/0/memory/weights"}
        counts = np.asarray(state.optimizer.rows["layers/0/memory/weights"]["count"])
        first = np.asarray(run.init().params["layers"][0]["memory"]["weights"])
        moved = (np.asarray(state.params["layers"][0]["memory"]["weights"]) != first).any(-1)
        np.testing.assert_array_equal(moved, counts[..., 0] > 0)
        assert losses[-1] < losses[0]
