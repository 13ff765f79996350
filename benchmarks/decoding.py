"""Decoders of tables beside softmax attention of the same width: `python benchmarks/decoding.py`.

Bytes that a cache keeps of each token, and tokens a second of `generate` for 1, 16 and 256 texts, as a table in Markdown. Models are untrained; the best of
three calls counts. Both have as many layers and features; `--implementation` chooses that of the tables.

`--slots` measures `lutjax.models.Slots` instead, each text with a cache of its own or all in blocks of a pool: tokens a second of running texts, prompts that are
read in a second, and bytes that hold their tokens, of prompts that differ and of prompts that have all but their last token in common.

`--feed-forward` measures the GPT of a preset with dense layers and with tables in their place, of floats and of int8: bytes of its arrays, and tokens a second of `generate` for 1 and 64 texts.
"""

import dataclasses
import time
from collections.abc import Iterator

import jax
import numpy as np
from flax import nnx
from harness import options, print_table, timed  # beside this file

from lutjax.layers.nnx import quantize
from lutjax.models import GPT, GPTConfig, LUTTransformer, LUTTransformerConfig, Slots
from lutjax.training import presets

FEATURES, CONTEXT, LAYERS, TOKENS, PROMPT = 32, 32, 6, 64, 16
TEXTS = (1, 16, 256)
TEXTS_OF_GPT = (1, 64)
STEP = 8  # tokens of each text in one program of slots


def models(implementation: str | None) -> Iterator[tuple[str, LUTTransformer | GPT]]:
    """The models, by name."""
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
            features=FEATURES, context=CONTEXT, n_layers=LAYERS, n_heads=4, feed_forward="dense", dtype=dtype
        )
        yield f"softmax, {dtype}", GPT(softmax, rngs=nnx.Rngs(0))


def bytes_of_text(model: LUTTransformer | GPT) -> str:
    """Bytes of a cache of one text: for each token of it, or of counts for all, how many there may be."""
    model = nnx.merge(*nnx.split(model))
    model.init_cache((1,))
    held = model.config.context - (1 if isinstance(model, LUTTransformer) else 0)
    caches = jax.tree.leaves(nnx.state(model, nnx.Cache))
    if isinstance(model, LUTTransformer) and model.config.memory == "counts":
        return f"{sum(a.nbytes for a in caches):,} a text"
    return f"{sum(a.nbytes for a in caches if held in a.shape) / held:,.0f}"


def speed(model: LUTTransformer | GPT, texts: int) -> float:
    """Tokens a second of all texts."""
    prompts = np.random.default_rng(0).integers(0, 256, (texts, PROMPT)).astype(np.int32)
    seconds = timed(lambda: model.generate(prompts, TOKENS, key=jax.random.key(0)), 3)
    return float(texts * TOKENS / min(seconds))


def feed_forward(preset: str, implementation: str | None) -> Iterator[tuple[str, GPT]]:
    """GPTs of a preset that differ in their feed-forward layers, by name."""
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
    rows = (
        (
            name,
            f"{sum(a.nbytes for a in jax.tree.leaves(nnx.state(model)) if hasattr(a, 'nbytes')) / 1e6:.1f}",
            *(f"{speed(model, n):,.0f}" for n in TEXTS_OF_GPT),
        )
        for name, model in feed_forward(preset, implementation)
    )
    print_table(["feed-forward", "MB", *(f"{n} texts, tokens/s" for n in TEXTS_OF_GPT)], rows)


def tables(implementation: str | None) -> LUTTransformer:
    """The model of tables."""
    return LUTTransformer(
        LUTTransformerConfig(features=FEATURES, context=CONTEXT, n_layers=LAYERS),
        implementation=implementation,
        rngs=nnx.Rngs(0),
    )


def of_slots(model: LUTTransformer, texts: int, block_size: int | None) -> list[str]:
    """Tokens a second, and prompts a second and bytes of their tokens, of prompts that differ and of those with a common beginning."""
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
        found += [f"{per_second:,.0f}", f"{held(model, slots, texts, block_size):,}"]
        if prompts is different:
            found.append(f"{texts * STEP / min(timed(lambda: slots.step(STEP), 3)):,.0f}")
        for slot in range(texts):
            slots.leave(slot)
    return [found[2], *found[:2], *found[3:]]


def held(model: LUTTransformer, slots: Slots, texts: int, block_size: int | None) -> int:
    """Bytes of caches that texts have."""
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
    model = tables(implementation)
    names = (
        "texts",
        "caches",
        "tokens/s",
        "different prompts/s",
        "bytes",
        "prompts with a common beginning/s",
        "bytes",
    )
    rows = (
        (texts, name, *of_slots(model, texts, block_size))
        for texts in TEXTS
        for name, block_size in (("of each text", None), ("in blocks of 8", 8))
    )
    print_table(names, rows, 2)


def main() -> None:
    """Print the table."""
    parser = options(__doc__)
    parser.add_argument(
        "--implementation", help="Of the tables: xla or native. Default: the best of this machine."
    )
    parser.add_argument("--slots", action="store_true", help="Texts that come and go.")
    parser.add_argument("--feed-forward", action="store_true", help="Whole GPTs of a preset.")
    parser.add_argument("--preset", default="small", help="Of these.")
    given = parser.parse_args()
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
