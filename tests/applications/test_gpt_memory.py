"""A GPT with a memory of n-grams: decoding, segments, training by rows, checkpoints and the command."""

import dataclasses
import functools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from commands import command
from flax import nnx
from folders import ROOT
from small_runs import FOX, TEXT, perturb

import lutjax
from lutjax.models import GPT, GPTConfig, Slots
from lutjax.training import lm_runs, models, presets, runs
from lutjax.training.lm import Run, TrainingConfig
from lutjax.training.text import bigram_loss

SMALL = GPTConfig(
    vocab_size=11,
    features=8,
    context=6,
    n_layers=2,
    n_heads=2,
    feed_forward="dense",
    memory=True,
    memory_orders=(2, 3),
    memory_rows=50,
    memory_heads=2,
    memory_layers=(0, 1),
)


@functools.cache
def parts_of(**changes: Any) -> Any:
    """A model whose parameters are large enough for every part to show."""
    return nnx.split(perturb(GPT(dataclasses.replace(SMALL, **changes), rngs=nnx.Rngs(0))))


def model_of(**changes: Any) -> GPT:
    return nnx.merge(*parts_of(**changes))


TOKENS = np.random.default_rng(0).integers(0, SMALL.vocab_size, (2, 14), np.int32)


@nnx.jit
def logits_of(model: GPT, tokens: Any, segments: Any = None) -> jax.Array:
    return model(tokens, deterministic=True, segments=segments)


def test_decoding_in_chunks_equals_full_pass() -> None:
    model = model_of()
    want = logits_of(model, TOKENS)
    model.init_cache((2,))
    decode = nnx.jit(lambda model, tokens: model(tokens, deterministic=True, decode=True))
    got = [decode(model, TOKENS[:, i:j]) for i, j in ((0, 8), (8, 9), (9, 10), (10, 14))]
    np.testing.assert_allclose(
        jnp.concatenate(got, 1), want, rtol=1e-5, atol=1e-5 * float(jnp.abs(want).max())
    )
    without = logits_of(model_of(memory=False), TOKENS)
    assert jnp.abs(without - want).max() > 0.1


def test_generate_slots_and_stream_draw_the_same() -> None:
    """Texts of several lengths, each as alone: the likeliest tokens of full passes."""
    model, lengths, n = model_of(n_layers=1, memory_layers=(0,)), (9, 3), 6
    texts = [TOKENS[i, :length] for i, length in enumerate(lengths)]
    want = []
    for text in texts:
        padded = jnp.pad(text, (0, n))
        for i in range(len(text), len(text) + n):
            logits = logits_of(model, jnp.pad(padded, (0, 15 - len(padded)))[None])[0, i - 1]
            padded = padded.at[i].set(jnp.argmax(logits))
        want.append(padded[len(text) :].tolist())
    drawn = {"key": jax.random.key(0), "temperature": 0}
    assert model.generate(texts, n, **drawn).tolist() == want
    assert jnp.concatenate(list(model.stream(texts, n, **drawn)), 1).tolist() == want
    slots = Slots(model, 3, temperature=0)
    first, token = slots.join(texts[0], key=jax.random.key(0))
    found = {first: [token, *slots.step(2)[first].tolist()]}
    second, token = slots.join(texts[1], key=jax.random.key(1))
    found[second] = [token]
    for _ in range(n - 3):
        for slot, tokens in slots.step().items():
            found[slot] += tokens.tolist()
    assert found[first] == want[0]
    assert found[second] == want[1][: n - 2]


def test_segments_are_texts_of_their_own() -> None:
    segments = jnp.asarray([[0] * 5 + [1] * 4 + [2] * 5] * 2)
    model = model_of()
    packed = logits_of(model, TOKENS, segments)
    alone = [logits_of(model, TOKENS[:, i:j]) for i, j in ((0, 5), (5, 9), (9, 14))]
    np.testing.assert_allclose(packed, jnp.concatenate(alone, 1), atol=1e-4)


def test_vectors_alone_do_not_say_which_rows() -> None:
    model = model_of()
    vectors = model.embed(TOKENS)
    with pytest.raises(
        ValueError, match="vectors alone do not say which rows of the memory to read; give their tokens"
    ):
        model.from_embedded(vectors)
    of_vectors = nnx.jit(lambda model, x: model.from_embedded(x, deterministic=True, tokens=TOKENS))
    np.testing.assert_allclose(of_vectors(model, vectors), logits_of(model, TOKENS), atol=1e-5)
    outside, last = (logits_of(model, np.asarray(tokens)) for tokens in ([99, -1], [10, 0]))
    np.testing.assert_array_equal(outside, last)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"memory_rows": 0}, "memory_rows is 0; it must be a whole number from 1"),
        ({"memory_orders": ()}, r"memory_orders is \(\); expected different lengths"),
        ({"memory_width": 0}, "memory_width is 0; it must be at least 1"),
        ({"memory_layers": (2,)}, r"memory_layers is \(2,\) and n_layers 2; expected different numbers of layers, from 0 to 1"),
        ({"memory_layers": ()}, r"memory_layers is \(\)"),
    ],
)  # fmt: skip
def test_impossible_configs(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SMALL, **changes)
    assert GPTConfig.from_dict(json.loads(json.dumps(SMALL.to_dict()))) == SMALL


# ------------------------------------------------------------------------------------- training
CONFIG = dataclasses.replace(
    SMALL, vocab_size=256, context=8, feed_forward="scored_lut", lut_heads=2, lut_tables=2, lut_bits=3
)
TRAINING = TrainingConfig(
    **presets.fields_of(TrainingConfig, presets.PRESETS["gpt"]["demo"])
    | {"steps": 12, "batch_size": 4, "learning_rate": 0.02, "table_optimizer": "same"}
)
ONE_LAYER = dataclasses.replace(CONFIG, n_layers=1, memory_layers=(0,))


@functools.cache
def trained(config: GPTConfig = CONFIG, **changes: Any) -> tuple[Run, Any, list[float]]:
    run = Run(config, dataclasses.replace(TRAINING, **changes), TEXT.train)
    state, losses = run.init(), []
    for step in range(4):
        state, loss = run.advance(state, step, 1)
        losses.append(float(loss))
    return run, state, losses


def test_rows_of_a_memory_move_by_a_rule_of_their_own() -> None:
    """Beside tables of detectors that move as all else does, with dense gradients, one loss for both."""
    run, state, losses = trained()
    assert set(state.optimizer.rows) == {"layers/0/memory/weights", "layers/1/memory/weights"}
    counts = np.asarray(state.optimizer.rows["layers/0/memory/weights"]["count"])
    first = np.asarray(run.init().params["layers"][0]["memory"]["weights"])
    moved = (np.asarray(state.params["layers"][0]["memory"]["weights"]) != first).any(-1)
    np.testing.assert_array_equal(moved, counts[..., 0] > 0)
    assert losses[-1] < losses[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [{"microbatches": 2}, {"table_gradient": "factored", "table_optimizer": "row_adagrad"}, {"remat": True}],
    ids=["microbatches", "factored", "remat"],
)
def test_other_ways_to_the_same_losses(changes: dict) -> None:
    changes = dict(changes)
    config = dataclasses.replace(ONE_LAYER, remat=changes.pop("remat", False))
    tables = {"table_optimizer": "row_adagrad"} if changes.get("table_gradient") else {}
    _, _, want = trained(ONE_LAYER, **tables)
    _, _, found = trained(config, **changes)
    np.testing.assert_allclose(found, want, rtol=1e-4)


@pytest.mark.slow
def test_checkpoints_bundles_and_reads(tmp_path: Path) -> None:
    run, state, _ = trained(ONE_LAYER)
    text = runs.Source(None, TEXT.size, TEXT.digest)
    record = lm_runs.Record(
        run.config, run.training, text, bigram_loss(TEXT.train, TEXT.test), {}, runs.History()
    )
    models.save(tmp_path / "run", 4, state, record)
    model = lutjax.load(tmp_path / "run")
    tokens = jnp.asarray(TEXT.test[None, :8].astype(np.int32))
    want = logits_of(run.structure.model(state.params, state.others), tokens)
    np.testing.assert_array_equal(logits_of(model, tokens), want)
    lutjax.save(model, tmp_path / "bundle")
    np.testing.assert_array_equal(logits_of(lutjax.load(tmp_path / "bundle"), tokens), want)
    found = run.usage(state, TEXT.test)["layers/0/memory/weights"]
    assert found.counts.shape == (4, 50)
    assert len(set(found.reads.tolist())) == 1


def test_reads_of_a_memory_are_known_from_bytes() -> None:
    config = dataclasses.replace(CONFIG, memory_layers=(1,))
    run, context = Run(config, TRAINING, TEXT.train), config.context
    found = run.memory_usage(TEXT.test)
    assert list(found) == ["layers/1/memory/weights"]
    counts = np.zeros((4, 50), int)
    for first in range(0, TEXT.test.size - 1, context):
        first = min(first, TEXT.test.size - 1 - context)
        ids = (
            run.structure.empty()
            .layers[1]
            .memory.row_ids(TEXT.test[first : first + context].astype(np.int32))
        )
        for row in ids:
            counts[range(4), row] += 1
    np.testing.assert_array_equal(found["layers/1/memory/weights"].counts, counts)
    few = run.memory_usage(TEXT.test, max_windows=2)["layers/1/memory/weights"]
    np.testing.assert_array_equal(few.reads, 2 * context)
    assert run.memory_usage(TEXT.test[: context + 1])["layers/1/memory/weights"].reads[0] == context
    assert not Run(dataclasses.replace(CONFIG, memory=False), TRAINING, TEXT.train).memory_usage(TEXT.test)


@pytest.mark.slow
def test_comparison_in_equal_time(tmp_path: Path) -> None:
    """`benchmarks/memory.py`: the validation part alone chooses the rate, and both models read equally many parameters."""
    text, rows = tmp_path / "fox.txt", tmp_path / "rows.jsonl"
    text.write_bytes(b"the quick brown fox jumps over the lazy dog. " * 200)
    sizes = (
        "features=16",
        "context=16",
        "n_layers=1",
        "n_heads=2",
        "lut_bits=2",
        "memory_rows=64",
        "memory_width=2",
    )
    words = [word for size in sizes for word in ("--set", size)]
    subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "memory.py", "train", "--text", text, "--steps", "30", "--seeds", "0,1",
         "--rates", "1,5", "--json", rows, *words],
        check=True,
    )  # fmt: skip
    found = [json.loads(line) for line in rows.read_text().splitlines()]
    tried, made = ([r for r in found if r["what"] == what] for what in ("rate", "train"))
    assert [r["rate"] for r in tried] == [1, 5]
    best = min(tried, key=lambda r: r["validation"])["rate"]
    assert [(r["model"], r["seed"], r.get("memory_rate")) for r in made] == [
        (name, seed, rate) for seed in (0, 1) for name, rate in (("without", None), ("with", best))
    ]
    assert abs(made[0]["read"] / made[1]["read"] - 1) < 0.05
    assert made[0]["loss"] != made[2]["loss"]


@pytest.mark.slow
@pytest.mark.usefixtures("compilation_cache_directory")
def test_the_command(tmp_path: Path) -> None:
    text, out = tmp_path / "fox.txt", tmp_path / "run"
    text.write_bytes(FOX)
    sizes = {
        "features": 8,
        "context": 8,
        "n-layers": 1,
        "n-heads": 2,
        "lut-heads": 2,
        "lut-tables": 2,
        "lut-bits": 3,
    }
    words = [f"--{name}={value}" for name, value in sizes.items()]
    words += [
        "--memory",
        "--memory-rows=64",
        "--batch-size=4",
        "--steps=8",
        "--learning-rate=0.02",
    ]
    result = command("train", "lm", "--text", text, "--out", out, *words)
    assert result.exit_code == 0, result.output
    assert "layers/0/memory/weights" in result.output
    generated = command("generate", "--checkpoint", out, "--prompt", "the ", "--bytes", 9)
    assert generated.output.startswith("the ")
    assert "layers/0/memory/weights: never read" in command("info", out).output
    (counted,) = json.loads((out / "usage.json").read_text())
    assert counted["name"] == "layers/0/memory/weights"
