"""Small language models, and prompts with different lengths."""

import dataclasses
import functools

import numpy as np
from flax import nnx
from small_runs import perturb

from lutjax.models import GPT, GPTConfig, LUTTransformer, LUTTransformerConfig

VOCAB = 13
CONTEXT = 12  # shorter than the longest prompt, which is read in windows: some hold padding alone
TABLES = LUTTransformerConfig(
    vocab_size=VOCAB, features=8, context=CONTEXT, n_layers=2, n_heads=1, n_detectors=4, n_anchors=3,
    n_position_bits=2, ffn_detectors=4, ffn_anchors=3,
)  # fmt: skip
SOFTMAX = GPTConfig(
    vocab_size=VOCAB, features=8, context=CONTEXT, n_layers=2, n_heads=2, feed_forward="dense"
)
CONFIGS = {
    "tables": TABLES,
    "pair": dataclasses.replace(TABLES, attention="pair", n_layers=1),
    "counts": dataclasses.replace(TABLES, memory="counts", n_position_bits=0),
    "no ffn, bfloat16 tables": dataclasses.replace(
        TABLES, ffn=False, table_dtype="bfloat16", n_layers=1
    ),
    "gpt": SOFTMAX,
    "gpt, bfloat16": dataclasses.replace(SOFTMAX, dtype="bfloat16", n_layers=1),
}


@functools.cache
def _parts_of(name):
    config = CONFIGS[name]
    model = (GPT if isinstance(config, GPTConfig) else LUTTransformer)(config, rngs=nnx.Rngs(0))
    return nnx.split(perturb(model))


def model_of(name="tables"):
    """Return a model with parameters large enough for every part to affect the output."""
    return nnx.merge(*_parts_of(name))


def prompts_of(*lengths):
    rng = np.random.default_rng(0)
    return [rng.integers(0, VOCAB, n).astype(np.int32) for n in lengths]
