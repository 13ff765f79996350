"""Every layer with all its arguments, in sizes divisible across devices, for tests on general layer claims.

tests/core/test_every_layer.py fails if a layer or an argument is missing here.
"""

import jax.numpy as jnp
import numpy as np
from layer_libraries import Case

from lutjax import FixedPoint, NgramLayout, reads, wiring

EXACT = {"accumulate": FixedPoint(2.0**12)}
TABLES = {"n_detectors": 4, "n_anchors": 2}
PAIRS = np.array([[[0, 1], [2, 1]]] * 4)
ONE_LIST = np.array([[[0, 2, -1]]])
POSITIONS = {"n_positions": 5, "n_position_bits": 2}
HEADS = {"heads": 2, "tables": 4, "bits": 3}
INTEGERS = {"read": reads.PowersOfTwo(), "quantized": True}
READS = {
    "hard": reads.Hard(),
    "blend": reads.Blend(),
    "soft sign": reads.SoftSign(),
    "confidence": reads.Confidence(ways=1),
    "powers of two": reads.PowersOfTwo(),
}
WINDOW = {**TABLES, "kernel": 3, "padding": 1}
LAYOUT = NgramLayout.qwen(
    {
        "ngram_size": 3,
        "heads_per_ngram": 2,
        "ngram_vocab_size_base": 11,
        "vocab_size": 9,
        "eos_token_id": 8,
        "make_ngram_vocab_size_divisible_by": 8,
    }
)
IMAGES = {
    "SpatialLUT": (TABLES, (4, 5, 4), (wiring.projections(None, (5, 4), (3, 3), groups=2, receptive=3, projective=2),)),
    "WindowLUT": ({**WINDOW, "stride": 2}, (4, 5, 4), ((5, 4), 3)),
    "ConvLUT": ({**WINDOW, "stride": (2, 1), "groups": 2, "pool": 2}, (4, 5, 4, 2), ((5, 4, 2), 6)),
}  # fmt: skip
WIRES = np.stack([np.arange(8) % 6, np.arange(1, 9) % 6], 1)
LEARNED = {"candidates": 4, "temperature": 0.5}
CONV = {"kernel": 2, "depth": 2}


def vectors(layer, **options):
    """Return a layer with 6 inputs and 6 outputs."""
    return Case(layer, options, (4, 6))


def sequences(layer, **options):
    return Case(layer, {**TABLES, **options}, (4, 5, 6))


def images(layer, **options):
    of_layer, shape, sizes = IMAGES[layer]
    return Case(layer, {**of_layer, **options}, shape, sizes)


def gates(layer, **options):
    """Return a layer with 8 gates or tables over 6 inputs."""
    return Case(layer, options, (6, 4) if "feature_axis" in options else (4, 6), (6, 8))


def recurrent(**options):
    """Return a recurrent layer with 8 gates over 6 inputs and 3 steps."""
    return Case("LogicRNN", options, (6, 3, 4) if "feature_axis" in options else (4, 3, 6), (6, 8))


def trees(**options):
    shape = (2, 5, 3, 4) if "feature_axis" in options else (4, 5, 3, 2)
    return Case("LogicConv", options, shape, ((5, 3, 2), 2))


def thermometer(**options):
    return Case("Thermometer", options, (6, 4) if "feature_axis" in options else (4, 6), (6, 3))


CASES = {
    "LUT": Case("LUT", TABLES, (4, 3, 6)),
    "LUT, groups": vectors("LUT", n_detectors=6, n_anchors=2, groups=3, epsilon=0.25),  # three for two devices
    "LUT, fixed point": vectors("LUT", **TABLES, **EXACT, anchors=PAIRS),
    "SparseLUT, targets of rows": vectors("SparseLUT", **TABLES, n_targets=3),
    "SparseLUT, targets of tables": vectors("SparseLUT", **TABLES, n_targets=3, targets_per="table"),
    "SparseLUT, targets of the layer": vectors("SparseLUT", **TABLES, n_targets=3, targets_per="layer", epsilon=0.25),
    "SparseLUT, given": vectors("SparseLUT", **TABLES, **EXACT, targets=ONE_LIST, anchors=PAIRS, groups=2),
    **{
        layer + name: sequences(layer, **options)
        for layer in ("LUTAttention", "LUTPairAttention")
        for name, options in {
            ", window": {**POSITIONS, "window": 3},
            ", not causal": {**POSITIONS, "shared_positions": False, "causal": False},
            ", pooled": {**POSITIONS, "pool": 2},
            ", targets": {"epsilon": 0.25, "n_targets": 3, "targets_per": "table", **EXACT},
            ", given": {"anchors": PAIRS, "targets": ONE_LIST},
        }.items()
    },
    "LUTPairAttention, interleaved": sequences(
        "LUTPairAttention", n_positions=5, n_position_bits=6, interleave=True
    ),
    **{f"ProjectionLUT, {name}": vectors("ProjectionLUT", **HEADS, read=read) for name, read in READS.items()},
    "ProjectionLUT, shared": vectors(
        "ProjectionLUT", heads=3, tables=2, bits=2, width=4, outputs=5, share_input=True, sum_heads=True, **EXACT
    ),
    "ProjectionLUT, alone": vectors("ProjectionLUT", **HEADS, compress=False, decompress=False, table_dropout=0.5),
    "ProjectionLUT, given": vectors(
        "ProjectionLUT", heads=2, tables=2, bits=2, anchors=PAIRS, table_dropout=0.5, deterministic=True
    ),
    "ProjectionLUT, integers": vectors("ProjectionLUT", **HEADS, **INTEGERS),
    "NgramMemory": Case("NgramMemory", {"rows": 7}, (4, 5, 6), (6,)),
    "NgramMemory, given": Case(
        "NgramMemory", {"rows": 5, "heads": 2, "width": 3, "kernel": 2, "seed": 3, **EXACT}, (4, 5, 6), (6, (1, 3))
    ),
    "NgramMemory, layout": Case("NgramMemory", {"layout": LAYOUT, "streams": 2, "gate": "root", "eps": 1e-20}, (4, 5, 2, 6), (6,)),
    "NgramEmbedding": Case("NgramEmbedding", {}, (4, 5, 6), (6, NgramLayout.hash(5))),
    "NgramEmbedding, given": Case("NgramEmbedding", {"width": 3, **EXACT}, (4, 5, 6), (6, LAYOUT)),
    "NgramMemory, gate alone": Case("NgramMemory", {"rows": 5, "heads": 1, "kernel": 0}, (4, 5, 6), (6,)),
    **{
        layer + name: vectors(layer, n_keys=4, **options)
        for layer in ("ProductKeyMemory", "ProductKeyExperts")
        for name, options in {
            "": {"k": 2},
            ", given": {"heads": 1, "k": 3, "key_size": 2, **EXACT},
        }.items()
    },
    "ProductKeyExperts, sines": vectors("ProductKeyExperts", n_keys=4, k=2, activation=jnp.sin),
    **{
        layer + name: images(layer, **options)
        for layer in IMAGES
        for name, options in {
            "": {},
            ", fixed point": {"epsilon": 0.25, **EXACT},
            **{f", {name}": {"read": read} for name, read in READS.items()},
            ", dropout": {"read": reads.Confidence(), "table_dropout": 0.5},
            ", deterministic": {"read": reads.Blend(), "table_dropout": 0.5, "deterministic": True},
            ", integers": INTEGERS,
        }.items()
    },
    "SpatialLUT, full": Case(
        "SpatialLUT", {**TABLES, "anchors": PAIRS}, (4, 5, 4), (wiring.full((5, 4), (3, 2)),)
    ),
    "WindowLUT, given": Case(
        "WindowLUT", {**WINDOW, "kernel": (7, 6), "anchors": PAIRS}, (4, 5, 4), ((5, 4), 3)
    ),
    "ConvLUT, given": Case("ConvLUT", {**WINDOW, "anchors": PAIRS, "pool": "all"}, (4, 5, 4), ((5, 4), 3)),
    **{
        f"{layer}, {name}": gates(layer, wiring=name)
        for layer in ("LogicGates", "SoftLUT", "BinaryLUT")
        for name in wiring.FIXED
        if layer == "LogicGates" or name != "unique"
    },
    **{
        f"{layer}, {name}, {estimator}": gates(layer, wiring=name, estimator=estimator, **LEARNED)
        for layer in ("LogicGates", "SoftLUT", "BinaryLUT")
        for name in wiring.LEARNED
        for estimator in ("soft", "gumbel", "straight_through")
        if (layer, estimator) != ("BinaryLUT", "gumbel")
    },
    **{
        f"{layer}, {name}": gates(layer, n_inputs=2, **options) if layer != "LogicGates" else gates(layer, **options)
        for layer in ("LogicGates", "SoftLUT", "BinaryLUT")
        for name, options in {
            "features first": {"wiring": "learnable", "candidates": 4, "feature_axis": 0},
            "windows": {"wiring": wiring.Windows((3, 2), 2)},
            "groups": {"wiring": wiring.Groups(2)},
            "fixed point": EXACT,
            "deterministic": {"wires": WIRES, "deterministic": True},
            "deterministic, learned": {"wiring": "top-k", "candidates": 4, "deterministic": True},
        }.items()
    },
    **{f"LogicRNN, {name}": recurrent(wiring=name) for name in wiring.FIXED},
    **{
        f"LogicRNN, {name}, {estimator}": recurrent(wiring=name, estimator=estimator, **LEARNED)
        for name, estimator in zip(wiring.LEARNED, ("soft", "gumbel", "straight_through"), strict=True)
    },
    "LogicRNN, features first": recurrent(feature_axis=0),
    "LogicRNN, fixed point": recurrent(**EXACT),
    "LogicRNN, deterministic": recurrent(wires=WIRES, deterministic=True),
    **{
        f"SoftLUT, {name}": gates("SoftLUT", n_inputs=3, parameterization=name) for name in ("light", "walsh", "raw")
    },
    "LogicConv": trees(**CONV, padding=1, pool=2),
    "LogicConv, random": trees(**CONV, wiring="random"),
    "LogicConv, wide": trees(depth=1, kernel=(7, 2), stride=(2, 3), padding=(3, 1)),
    "LogicConv, features first": trees(
        **CONV, feature_axis=0, stride=(2, 1), padding=(1, 0), pool=(3, 2), pool_padding=(0, 1), channels_per_kernel=1
    ),
    **{
        f"LogicConv, {name}, {estimator}": trees(
            kernel=2, depth=1, parameterization=name, n_inputs=n_inputs, estimator=estimator, temperature=temperature
        )
        for name, n_inputs, temperature in (("gates", 2, 0.5), ("light", 3, 0.5), ("walsh", 2, 2.0), ("raw", 3, 1.0))
        for estimator in ("soft", "gumbel", "straight_through")
        if (name, estimator) != ("raw", "gumbel")
    },
    "LogicConv, deterministic": trees(kernel=2, depth=1, wires=WIRES[:2] % 4, deterministic=True),
    "GroupSum": Case("GroupSum", {}, (4, 6), (3,)),
    "GroupSum, fixed point": Case("GroupSum", EXACT, (4, 6), (3,)),
    "GroupSum, features first": Case("GroupSum", {"tau": 2.0, "feature_axis": 0}, (6, 4), (3,)),
    "Thermometer": thermometer(),
    "Thermometer, features first": thermometer(thresholds=np.linspace(-1, 1, 18).reshape(6, 3), feature_axis=0),
    **{
        f"Thermometer, {gradient}": thermometer(
            learnable=True, gradient=gradient, widths=np.linspace(0.5, 2, 6), temperature=0.5
        )
        for gradient in ("straight_through", "soft")
    },
    "Thermometer, deterministic": thermometer(learnable=True, gradient="soft", deterministic=True),
}  # fmt: skip
