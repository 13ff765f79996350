"""Integer layers and language models with their generated C programs."""

import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import tools
from flax import nnx

import lutjax
from lutjax.layers.nnx import LUT, SparseLUT
from lutjax.models import LUTTransformer, LUTTransformerConfig

FLAGS = ("-O2", "-fsanitize=undefined", "-fno-sanitize-recover=all")
DRIVER = """
#include <stdio.h>
%s
int main(int argc, char **argv)
{
    int32_t x[64], y[64];
    (void)argc;
    switch (argv[1][0] - 'a') {
%s
    }
    return 1;
}
"""
CASE = """    case %d:
        while (fread(x, 4, {0}_INPUTS, stdin) == {0}_INPUTS) {{
            {1}(x, y);
            fwrite(y, 4, {0}_OUTPUTS, stdout);
        }}
        return 0;"""


def run(program, *words, given=b""):
    return subprocess.run(
        [program, *map(str, words)], input=given, check=True, capture_output=True
    ).stdout


# ------------------------------------------------------------------------------------- layers
def ties(key, shape, dtype=jnp.float32):
    """Return tables with negative and positive elements, many of them not multiples of the resolution."""
    return jax.random.normal(key, shape, dtype) * 3


KEPT = {"accumulate": lutjax.FixedPoint(2.0**10), "weights_init": ties}
SLOTS = np.array([[[0, 3, -1], [2, 2, 1]]])  # of two rows: an unused slot, and an output twice


LAYERS = {
    "dense": (LUT, (4, 5), {"n_detectors": 7, "n_anchors": 5}),
    "groups": (LUT, (6, 4), {"n_detectors": 6, "n_anchors": 3, "groups": 2, "epsilon": 2.0}),
    "no_pairs": (LUT, (3, 4), {"n_detectors": 2, "n_anchors": 0}),
    "by_row": (SparseLUT, (5, 9), {"n_detectors": 6, "n_anchors": 3, "n_targets": 4}),
    "by_table": (SparseLUT, (8, 12),
        {"n_detectors": 4, "n_anchors": 2, "n_targets": 2, "targets_per": "table", "groups": 2}),
    "given": (SparseLUT, (4, 4), {"n_detectors": 3, "n_anchors": 1, "targets": SLOTS}),
}  # fmt: skip
"""A layer for each kind; few inputs produce repeated pairs within a detector, and ids in both orders."""


def layer_of(name):
    kind, sizes, options = LAYERS[name]
    return kind(*sizes, **options, **KEPT, rngs=nnx.Rngs(int(kind is SparseLUT)))


def of_layers(folder, layers):
    """Compile layers into one program and return a function to run a layer on inputs."""
    files = {name: text for layer, of in layers.items() for name, text in of.to_c(layer).items()}
    includes = "\n".join(f'#include "{name}.h"' for name in layers)
    cases = "\n".join(CASE.format(name.upper(), name) % k for k, name in enumerate(layers))
    program = tools.compiled(folder, {**files, "driver.c": DRIVER % (includes, cases)}, *FLAGS)

    def call(name, x):
        place = chr(ord("a") + list(layers).index(name))
        written = run(program, place, given=x.astype("<i4").tobytes())
        return np.frombuffer(written, "<i4").reshape(len(x), -1)

    return call


# ------------------------------------------------------------------------------------- language models
CONFIG = LUTTransformerConfig(
    features=8, context=6, n_layers=2, n_heads=1, n_detectors=3, n_anchors=2, n_position_bits=2,
    ffn_detectors=4, ffn_anchors=3, dropout=0.0,
)  # fmt: skip
PROMPTS = (b"a", b"It was", b"much longer than the context", bytes(range(256))[::-37])


def model_of(config=CONFIG, scale=0.3):
    """Return a model with random tables, since new models have zero tables."""
    model = LUTTransformer(config, rngs=nnx.Rngs(3))
    rng = np.random.default_rng(4)
    for path, part in nnx.iter_graph(model):
        if path and path[-1] == "weights":
            part.set_value(jnp.asarray(rng.normal(0, scale, part.shape), part.dtype))
    return model


def check_texts(rounded, program):
    """Assert that a program and its model write the same text."""
    for seed, prompt in enumerate(PROMPTS):
        drawn = rounded.generate(prompt, 40, temperature=1.25, top_k=20, seed=seed)
        assert run(program, "-n", 40, "-t", "1.25", "-k", 20, "-s", seed, given=prompt) == drawn
        likeliest = rounded.generate(prompt, 20, temperature=0)
        assert run(program, "-n", 20, "-t", 0, given=prompt) == likeliest
