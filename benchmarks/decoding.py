"""Table decoders next to softmax attention with the same width: `python benchmarks/decoding.py`.

Cache bytes per token, and tokens per second of `generate` for 1, 16 and 256 texts, in Markdown.
Models are untrained, with equally many layers and features; the best of three calls counts.
`--implementation` selects that of the tables.

`--slots` measures `lutjax.models.Slots` instead, with separate caches or a block pool: tokens per
second, prompts read per second, and cache bytes, for prompts that differ and prompts equal up to
the last token.

`--feed-forward` measures the GPT of a preset with dense layers, float tables and int8 tables: array
bytes, and tokens per second of `generate` for 1 and 64 texts.
"""

import dataclasses
import time
from collections.abc import Iterator

import jax
import numpy as np
from flax import nnx
from harness import parse, print_table, time_calls  # beside this file

from lutjax.layers.nnx import quantize
from lutjax.models import GPT, GPTConfig, LUTTransformer, LUTTransformerConfig, Slots
from lutjax.training import presets

FEATURES, CONTEXT, LAYERS, TOKENS, PROMPT = 32, 32, 6, 64, 16
TEXTS = (1, 16, 256)
TEXTS_OF_GPT = (1, 64)
STEP = 8  # tokens per text and slot program


def models(implementation: str | None) -> Iterator[tuple[str, LUTTransformer | GPT]]:
    """Yield models by name."""
    usual = LUTTransformerConfig(features=FEATURES, context=CONTEXT, n_layers=LAYERS)
    without = dataclasses.replace(usual, n_position_bits=0)
    of_tables = {
        "tables": usual,
        "tables without positions": without,
        "tables with counts": dataclasses.replace(without, memory="counts"),
    }
    for name, config in of_tables.items():
        yield name, LUTTransformer(config, implementation=implementation, rngs=nnx.Rngs(0))
    for dtype in ("float32", "bfloat16"):
        softmax = GPTConfig(
            features=FEATURES,
            context=CONTEXT,
            n_layers=LAYERS,
            n_heads=4,
            feed_forward="dense",
            dtype=dtype,
        )
        yield f"softmax, {dtype}", GPT(softmax, rngs=nnx.Rngs(0))


def bytes_of_text(model: LUTTransformer | GPT) -> str:
    """Return cache bytes per token; with counts, per text of any length."""
    model = nnx.merge(*nnx.split(model))
    model.init_cache((1,))
    held = model.config.context - (1 if isinstance(model, LUTTransformer) else 0)
    caches = jax.tree.leaves(nnx.state(model, nnx.Cache))
    if isinstance(model, LUTTransformer) and model.config.memory == "counts":
        return f"{sum(a.nbytes for a in caches):,} a text"
    return f"{sum(a.nbytes for a in caches if held in a.shape) / held:,.0f}"


def speed(model: LUTTransformer | GPT, texts: int) -> float:
    """Return the tokens per second over all texts."""
    prompts = np.random.default_rng(0).integers(0, 256, (texts, PROMPT)).astype(np.int32)
    seconds = time_calls(lambda: model.generate(prompts, TOKENS, key=jax.random.key(0)), 3)
    return float(texts * TOKENS / min(seconds))


def feed_forward(preset: str, implementation: str | None) -> Iterator[tuple[str, GPT]]:
    """Yield GPTs of a preset with each feed-forward layer, by name."""
    values = presets.preset("gpt", preset)
    for dtype in ("float32", "bfloat16"):
        dense = {**values, "feed_forward": "dense", "dtype": dtype}
        yield f"dense, {dtype}", GPT(presets.make(GPTConfig, dense), rngs=nnx.Rngs(0))
    scored = {**values, "feed_forward": "projection_lut", "read": "powers_of_two"}
    model = GPT(presets.make(GPTConfig, scored), implementation=implementation, rngs=nnx.Rngs(0))
    yield f"tables, float32, else {values.get('dtype', 'float32')}", model
    yield "tables, int8", quantize(model)


def print_feed_forward(preset: str, implementation: str | None) -> None:
    """Print the table of feed-forward layers."""

    def megabytes(model: GPT) -> str:
        arrays = (a for a in jax.tree.leaves(nnx.state(model)) if hasattr(a, "nbytes"))
        return f"{sum(a.nbytes for a in arrays) / 1e6:.1f}"

    rows = (
        (name, megabytes(model), *(f"{speed(model, n):,.0f}" for n in TEXTS_OF_GPT))
        for name, model in feed_forward(preset, implementation)
    )
    print_table(["feed-forward", "MB", *(f"{n} texts, tokens/s" for n in TEXTS_OF_GPT)], rows)


def measure_slots(model: LUTTransformer, texts: int, block_size: int | None) -> list[str]:
    """Return tokens per second, and prompts per second and cache bytes for different and for common prompts."""
    slots = Slots(model, texts, temperature=0, block_size=block_size)
    slots.compile(STEP)
    rng = np.random.default_rng(0)
    different = rng.integers(0, 256, (texts, PROMPT)).astype(np.int32)
    common = np.where(np.arange(PROMPT) < PROMPT - 1, different[0], different)
    found = []
    for prompts in (different, common):
        start = time.perf_counter()
        for prompt in prompts:
            slots.join(prompt, key=jax.random.key(0))
        per_second = texts / (time.perf_counter() - start)
        found += [f"{per_second:,.0f}", f"{cache_bytes(model, slots, texts, block_size):,}"]
        if prompts is different:
            found.append(f"{texts * STEP / min(time_calls(lambda: slots.step(STEP), 3)):,.0f}")
        for slot in range(texts):
            slots.leave(slot)
    return [found[2], *found[:2], *found[3:]]


def cache_bytes(model: LUTTransformer, slots: Slots, texts: int, block_size: int | None) -> int:
    """Return the cache bytes of texts."""
    own = nnx.merge(*nnx.split(model))
    if block_size is None:
        own.init_cache((texts,))
        return sum(a.nbytes for a in jax.tree.leaves(nnx.state(own, nnx.Cache)))
    own.init_cache((texts,), blocks=(1, block_size))
    tables = own.block_tables[...].nbytes + own.cached_lengths[...].nbytes
    of_block = sum(a.nbytes for a in jax.tree.leaves(nnx.state(own, nnx.Cache))) - tables
    return (slots.blocks["all"] - slots.blocks["free"]) * of_block + tables


def print_slots(implementation: str | None) -> None:
    """Print the table of slots."""
    config = LUTTransformerConfig(features=FEATURES, context=CONTEXT, n_layers=LAYERS)
    model = LUTTransformer(config, implementation=implementation, rngs=nnx.Rngs(0))
    names = (
        "texts | caches | tokens/s | different prompts/s | bytes | prompts with a common "
        "beginning/s | bytes"
    )
    rows = (
        (texts, name, *measure_slots(model, texts, block_size))
        for texts in TEXTS
        for name, block_size in (("of each text", None), ("in blocks of 8", 8))
    )
    print_table(names, rows, 2)


def main() -> None:
    given = parse(
        __doc__,
        implementation=(str, "of the tables: xla or native; default: the best on this machine"),
        slots=(False, "measure slots"),
        feed_forward=(False, "measure GPTs of a preset"),
        preset=("small", "preset of these GPTs"),
    )
    if given.feed_forward:
        print_feed_forward(given.preset, given.implementation)
    elif given.slots:
        print_slots(given.implementation)
    else:
        rows = (
            (name, bytes_of_text(model), *(f"{speed(model, n):,.0f}" for n in TEXTS))
            for name, model in models(given.implementation)
        )
        print_table(["model", "bytes a token", *(f"{n} texts, tokens/s" for n in TEXTS)], rows)


if __name__ == "__main__":
    main()
