"""Decoders of tables beside softmax attention of the same width: `python benchmarks/decoding.py`.

Bytes that a cache keeps of each token, and tokens a second of `generate` for 1, 16 and 256 texts, as a table in Markdown. Models are untrained; the best of
three calls counts. Both have as many layers and features; `--implementation` chooses that of the tables.
"""

import argparse
import dataclasses
import time
from collections.abc import Iterator

import jax
import numpy as np
from flax import nnx

from lutjax.models import GPT, GPTConfig, LUTTransformer, LUTTransformerConfig

FEATURES, CONTEXT, LAYERS, TOKENS, PROMPT = 32, 32, 6, 64, 16
TEXTS = (1, 16, 256)


def models(implementation: str | None) -> Iterator[tuple[str, LUTTransformer | GPT]]:
    """The models, by name."""
    tables = LUTTransformerConfig(features=FEATURES, context=CONTEXT, n_layers=LAYERS)
    without = dataclasses.replace(tables, n_position_bits=0)
    of_tables = {
        "tables": tables,
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
    times = []
    for _ in range(4):
        start = time.perf_counter()
        model.generate(prompts, TOKENS, key=jax.random.key(0)).block_until_ready()
        times.append(time.perf_counter() - start)
    return texts * TOKENS / min(times[1:])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--implementation", help="Of the tables: xla or native. Default: the best of this machine."
    )
    options = parser.parse_args()
    print(f"| model | bytes a token | {' | '.join(f'{n} texts, tokens/s' for n in TEXTS)} |")
    print("| --- " * (2 + len(TEXTS)) + "|")
    for name, model in models(options.implementation):
        rates = (f"{speed(model, n):,.0f}" for n in TEXTS)
        print(f"| {name} | {bytes_of_text(model)} | {' | '.join(rates)} |", flush=True)


if __name__ == "__main__":
    main()
