"""Facts in the rows of a published table: `python benchmarks/memory_facts.py --folder DIR`.

Trains a small GPT whose n-gram memory is a mapped table, and writes the table as a bfloat16
safetensors file: the published base. Then it writes `--facts` facts, such as ``The code of qzkv:
417``, into rows of the table by gradients on rows alone: the model and the file stay as they are.
It prints the answers before and after, the change of the loss on other text, the size of the
overlay, and compares all bits after removal of the overlay.
"""

import dataclasses
import json
import struct
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from harness import parse  # beside this file

from lutjax import optim
from lutjax.files.atomic import digest_of
from lutjax.models import GPT, GPTConfig
from lutjax.optim.host import HostTable
from lutjax.optim.nnx import Optimizer, update_host, value_and_grad
from lutjax.tables.gradient import TableGradient
from lutjax.training.lm import structure_of
from lutjax.training.text import load_text

ORDER, CONTEXT, BATCH, FACTS = 8, 64, 32, 256
MARGIN = 0.5
"""Logits by which an answer exceeds others."""

TENSOR = "layers.0.memory.embed.weight"
LETTERS = np.frombuffer(b"bcdfghjklmnpqrstvwxz", np.uint8)
PROMPT, DIGITS = b"The code of ", 3


def config_of(rows: int, width: int) -> GPTConfig:
    memory = {"orders": (ORDER,), "heads": 1, "rows": rows, "width": width, "placement": "host"}
    options: Any = {f"memory_{name}": value for name, value in memory.items()}
    return GPTConfig(
        features=128, context=CONTEXT, n_layers=2, feed_forward="dense", memory=True, **options
    )


def write_base(path: Path, rows: int, width: int, ids: Any = (), values: Any = ()) -> None:
    """Write a bfloat16 table of zeros, apart from some rows."""
    n_bytes = 2 * rows * width
    entry = {"dtype": "BF16", "shape": [rows, width], "data_offsets": [0, n_bytes]}
    text = json.dumps({TENSOR: entry}).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + n_bytes)
    if len(ids):
        table = np.memmap(path, np.uint16, "r+", 8 + len(text), (rows, width))
        table[ids] = np.asarray(jnp.asarray(values).astype(jnp.bfloat16)).view(np.uint16)
        table.flush()


def open_base(path: Path, width: int, **options: Any) -> HostTable:
    return HostTable.mapped([(path, TENSOR)], codec="bfloat16", width=width, **options)


def build(config: GPTConfig, table: HostTable) -> GPT:
    """Build a model on the mapped table."""
    structure: Any = structure_of(config)
    model: GPT = structure.model(*structure.init(0))
    model.layers[0].memory.weights = table  # type: ignore[assignment]
    return model


def loss_of(model: GPT, tokens: Any, weights: Any) -> Any:
    logits = model(tokens[:, :-1], deterministic=True)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return (losses * weights).sum() / weights.sum()


def windows(text: np.ndarray, starts: np.ndarray) -> np.ndarray:
    return text[starts[:, None] + np.arange(CONTEXT + 1)].astype(np.int32)


def pretrain(model: GPT, text: np.ndarray, steps: int) -> None:
    """Train all parameters and rows on a text."""
    table: Any = model.layers[0].memory.weights
    table.start(optim.RowAdam())
    optimizer = Optimizer(model, optim.Optimizer(optim.SGD(), rate=1.0, rest=optax.adamw(2e-3)))

    @nnx.jit
    def step(model: GPT, optimizer: Any, tokens: Any) -> Any:
        loss = lambda model: loss_of(model, tokens, jnp.ones((BATCH, CONTEXT)))  # noqa: E731
        value, (gradients, of_host) = value_and_grad(loss, tables=(), host=True)(model)
        optimizer.update(model, gradients)
        return value, of_host

    rng, start = np.random.default_rng(0), time.perf_counter()
    for number in range(steps):
        tokens = windows(text, rng.integers(0, text.size - CONTEXT - 1, BATCH))
        value, of_host = step(model, optimizer, tokens)
        update_host(model, of_host, 2e-2)
        if number % 100 == 0 or number + 1 == steps:
            print(
                f"step {number + 1}: loss {float(value):.3f}, {time.perf_counter() - start:.0f} s",
                flush=True,
            )


def facts(count: int) -> np.ndarray:
    """Return sentences with different names and random codes, and the weight of each prediction."""
    rng = np.random.default_rng(1)
    names: dict[bytes, None] = {}
    while len(names) < count:
        names[bytes(rng.choice(LETTERS, 4))] = None
    codes = [f"{code:0{DIGITS}}".encode() for code in rng.integers(0, 10**DIGITS, count)]
    return np.stack(
        [np.frombuffer(PROMPT + a + b": " + b, np.uint8) for a, b in zip(names, codes, strict=True)]
    ).astype(np.int32)


def write_facts(model: GPT, sentences: np.ndarray, steps: int, rate: float) -> None:
    """Update the rows of the answers by gradients, until each answer is right with some margin.

    Facts have rows of their own, so facts that are answered make room for others in a batch. Rows
    begin at zero, where the normalized key of the memory is steep: with slow second moments the
    first gradients would keep later steps small.
    """
    table: Any = model.layers[0].memory.weights
    table.start(optim.RowAdam(b1=0.9, b2=0.9))
    answers = np.arange(sentences.shape[1] - 1) >= sentences.shape[1] - 1 - DIGITS
    weights = jnp.broadcast_to(jnp.asarray(answers, jnp.float32), (FACTS, len(answers)))

    @nnx.jit
    def step(model: GPT, sentences: Any) -> Any:
        value, (_, of_host) = value_and_grad(
            lambda model: loss_of(model, sentences, weights), tables=(), host=True
        )(model)
        return value, jax.tree.map(
            only_answers, of_host, is_leaf=lambda a: isinstance(a, TableGradient)
        )

    def only_answers(gradient: TableGradient) -> TableGradient:
        # Rows of the prompt belong to other texts too.
        look_up: Any = gradient.look_up
        chosen = np.flatnonzero(np.broadcast_to(answers, weights.shape))
        index, coefficients = (
            a.reshape(weights.size, *a.shape[-2:])[chosen]
            for a in (look_up.index, look_up.coefficients)
        )
        cotangent = gradient.cotangent
        cotangent = cotangent.reshape(weights.size, *cotangent.shape[-2:])[chosen]
        return dataclasses.replace(
            gradient,
            look_up=look_up.replace(index=index, coefficients=coefficients),
            sealed=cotangent,
        )

    waiting, start = sentences, time.perf_counter()
    for number in range(0, steps, 10):
        batch = np.resize(waiting[:FACTS], (FACTS, sentences.shape[1]))
        for _ in range(10):
            value, of_host = step(model, batch)
            update_host(model, of_host, rate)
        keeps = np.ones(len(waiting), np.bool_)
        keeps[:FACTS] = (margins(model, batch) < MARGIN)[: len(waiting)]
        waiting = waiting[keeps]
        if number % 50 == 0 or not len(waiting):
            seconds = time.perf_counter() - start
            print(
                (
                    f"step {number + 10}: {len(waiting)} facts wait, loss {float(value):.3f}, "
                    f"{seconds:.0f} s"
                ),
                flush=True,
            )
        if not len(waiting):
            break


@nnx.jit
def _logits(model: GPT, x: Any) -> Any:
    return model(x, deterministic=True)[:, -DIGITS:]


def margins(model: GPT, sentences: np.ndarray) -> np.ndarray:
    """Return the smallest logit of each fact's digits above the likeliest other bytes: above 0, greedy decoding answers the fact."""
    found = []
    for first in range(0, len(sentences), FACTS):
        part = sentences[first : first + FACTS]
        logits = np.array(_logits(model, np.resize(part, (FACTS, part.shape[1]))[:, :-1]))[
            : len(part)
        ]
        digits = part[:, -DIGITS:, None]
        right = np.take_along_axis(logits, digits, -1)
        np.put_along_axis(logits, digits, -np.inf, -1)
        found.append((right - logits.max(-1, keepdims=True)).min((1, 2)))
    return np.concatenate(found)


def answered(model: GPT, sentences: np.ndarray) -> int:
    """Return how many facts greedy decoding answers."""
    return int((margins(model, sentences) > 0).sum())


def other_loss(model: GPT, text: np.ndarray, count: int) -> float:
    """Return the mean loss over evenly spaced windows of a text, in nats per byte."""
    starts = np.linspace(0, text.size - CONTEXT - 1, count).astype(int)
    evaluate = nnx.jit(lambda model, tokens: loss_of(model, tokens, jnp.ones((128, CONTEXT))))
    return float(
        np.mean([evaluate(model, windows(text, part)) for part in starts.reshape(-1, 128)])
    )


def main() -> None:
    options = parse(
        __doc__,
        folder=(str, "folder for files"),
        rows=(1 << 24, "rows of the table"),
        width=(64, "elements per row"),
        facts=(1000, "number of facts"),
        steps=(300, "steps of the first training"),
        windows=(1024, "windows of other text"),
        fact_steps=(3000, "most steps for the facts"),
        rate=(0.05, "learning rate of their rows"),
    )
    folder = Path(options.folder)
    folder.mkdir(parents=True, exist_ok=True)
    text, config = load_text(None, context=CONTEXT), config_of(options.rows, options.width)
    write_base(folder / "zeros.safetensors", options.rows, options.width)
    first: Any = open_base(folder / "zeros.safetensors", options.width, trains=True)
    model = build(config, first)
    pretrain(model, text.train, options.steps)
    base, ids = folder / "base.safetensors", first.updated
    write_base(base, options.rows, options.width, ids, first.gather(ids.reshape(-1, 1, 1))[0])
    print(
        f"published: {len(ids):,} trained rows of {options.rows:,}, "
        f"{base.stat().st_size / 1e9:.2f} GB"
    )

    digest, sentences = digest_of(base), facts(options.facts)

    def with_table(**how: Any) -> GPT:
        graph, state = nnx.split(model)
        found = nnx.merge(graph, state)
        found.layers[0].memory.weights = open_base(base, options.width, **how)
        return found

    before = with_table()
    loss, right = other_loss(before, text.test, options.windows), answered(before, sentences)
    print(f"before: {right} of {len(sentences)} facts answered; loss of other text {loss:.6f}")
    learner = with_table(trains=True)
    write_facts(learner, sentences, options.fact_steps, options.rate)
    overlay = folder / f"overlay-{time.time_ns()}"
    learner.layers[0].memory.weights.save(overlay)
    size = sum(path.stat().st_size for path in overlay.iterdir())

    after = with_table(overlays=[overlay])
    changed, right = other_loss(after, text.test, options.windows), answered(after, sentences)
    print(
        f"after: {right} of {len(sentences)} facts answered; loss of other text {changed:.6f}, "
        f"changed by {changed - loss:+.6f}; overlay {size / 1e6:.2f} MB"
    )
    after.layers[0].memory.weights.remove_overlay(overlay)
    restored, right = other_loss(after, text.test, options.windows), answered(after, sentences)
    same = restored == loss and digest_of(base) == digest
    print(
        f"removed: {right} facts answered; loss of other text {restored:.6f}; all bits restored, "
        f"base file unchanged: {same}"
    )


if __name__ == "__main__":
    main()
