"""Invalid layer arguments and inputs: rejected in every library, in one line naming the layer."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from layer_libraries import Case, assert_refused, nnx_layer

from lutjax import FixedPoint, reads, wiring
from lutjax.layers import nnx as nnx_layers

pytestmark = pytest.mark.usefixtures("without_typechecking")

TABLES = {"n_detectors": 5, "n_anchors": 3}
POSITIONS = {"n_positions": 8, "n_position_bits": 2}
READ = reads.Confidence()
IMAGE = ((5, 6), 4)
FIELDS = wiring.projections(None, (5, 6), (4, 3), groups=2, receptive=(3, 4), projective=3)
BASES = {
    "LUT": Case("LUT", TABLES, (2, 7)),
    "SparseLUT": Case("SparseLUT", TABLES, (2, 7)),
    "LUTAttention": Case("LUTAttention", TABLES, (2, 3, 7)),
    "LUTPairAttention": Case("LUTPairAttention", TABLES, (2, 3, 7)),
    "ProjectionLUT": Case("ProjectionLUT", {"heads": 3, "tables": 2, "bits": 2}, (2, 7)),
    "SpatialLUT": Case("SpatialLUT", {"n_detectors": 2, "n_anchors": 3}, (5, 6), (FIELDS,)),
    "WindowLUT": Case("WindowLUT", {"n_detectors": 2, "n_anchors": 3, "kernel": 2}, (5, 6), IMAGE),
    "ConvLUT": Case("ConvLUT", {"n_detectors": 4, "n_anchors": 3, "kernel": 3}, (5, 6), IMAGE),
    "NgramMemory": Case("NgramMemory", {"rows": 5}, (4, 5, 6), (6,)),
    "ProductKeyMemory": Case("ProductKeyMemory", {"n_keys": 4}, (4, 6)),
    "ProductKeyExperts": Case("ProductKeyExperts", {"n_keys": 4, "k": 2}, (4, 6)),
    "LogicGates": Case("LogicGates", {}, (2, 7)),
    "SoftLUT": Case("SoftLUT", {}, (2, 7)),
    "BinaryLUT": Case("BinaryLUT", {}, (2, 7)),
    "LogicConv": Case("LogicConv", {}, (2, 5, 3, 2), ((5, 3, 2), 3)),
    "GroupSum": Case("GroupSum", {}, (2, 7), (3,)),
    "Thermometer": Case("Thermometer", {}, (2, 7), (7, 3)),
}
RAW = {"parameterization": "raw"}
# Layer: changes of its case, and the message; "sizes" are positional arguments, "shape" is that of the input.
REFUSED = {
    "LUT": [
        ({"n_detectors": 0}, "n_detectors is 0; it must be at least 1"),
        ({"n_anchors": -1}, "n_anchors is -1; it must be at least 0"),
        ({"sizes": (1, 6)}, "in_features is 1; .* at least 2"),
        ({"groups": 5}, "groups is 5; it must divide in_features, 7"),
        ({"groups": 5, "sizes": (5, 5)},
            "groups is 5 and in_features is 5; a detector compares two"),
        ({"epsilon": -1.0}, "epsilon is -1.0"),
        ({"param_dtype": jnp.int32}, "param_dtype is int32; expected one of"),
        ({"param_dtype": "float64"}, "param_dtype is float64, which .*jax_enable_x64"),
        ({"anchors": [[[0, 1]]]}, r"anchors has shape \[1, 1, 2\]; expected \[5, 3, 2\]"),
        ({"anchors": np.tile([0, 7], (5, 3, 1))},
            "anchors holds ids from 0 to 7; inputs are 0 to 6"),
    ],
    "SparseLUT": [
        ({}, "give either n_targets"),
        ({"n_targets": 7}, "n_targets is 7; there are only 6 outputs"),
        ({"n_targets": 2, "targets_per": "day"}, "targets_per is 'day'; expected one"),
        ({"targets": np.zeros((1, 4, 2), int)},
            r"targets has shape \[1, 4, 2\]; expected \[5 or 1, 8 or 1,"),
        ({"targets": np.full((1, 1, 2), 6)}, "targets holds ids from 6 to 6; outputs are 0 to 5"),
    ],
    "LUTAttention": [
        ({"n_anchors": 16}, r"n_anchors is 16 and n_position_bits is 0, .* 2\*\*32 rows"),
        ({"n_position_bits": 2}, "n_position_bits is 2 but n_positions is 0"),
        ({**POSITIONS, "window": 9}, "window is 9 but only 8 distances have a position"),
        ({**POSITIONS, "window": 3, "causal": False}, "window is 3 but causal is False"),
        ({"pool": 0}, "pool is 0; it must be at least 1"),
        ({"pool": 2, "causal": False}, "pool is 2 and causal is False"),
        ({"pool": 2, "decode": True, "window": 2}, "pool is 2 and decode is True"),
    ],
    "LUTPairAttention": [
        ({"anchors": np.full((5, 3, 2), 13)}, "pair 0 of detector 0 compares input 13 with itself"),
        ({**POSITIONS, "decode": True, "causal": False}, "decode is True but causal is False"),
        ({**POSITIONS, "interleave": True}, "n_position_bits is 2 and in_features is 7"),
    ],
    "ProjectionLUT": [
        ({"compress": False}, "in_features is 7 and compress is False, .* 3 heads with width=3, 9"),
        ({"decompress": False, "outputs": 4}, "out_features is 6 and decompress .* outputs=4, 12"),
        ({"width": 1}, "width is 1; a comparison needs at least 2"),
        ({"read": "hard"}, "read is 'hard'; expected one of lutjax.reads"),
        ({"table_dropout": 1.0}, "table_dropout is 1.0; it must be at least 0 and below 1"),
        ({"quantized": True}, "quantized is True but read is Confidence"),
        ({"bits": 40}, "bits is 40, so a table has"),
        ({"anchors": np.tile([0, 3], (6, 2, 1))},
            "anchors holds ids from 0 to 3; inputs are 0 to 2"),
    ],
    "SpatialLUT": [
        ({"sizes": (7,), "shape": (2, 7)}, "connectivity is 7; expected"),
        ({"n_detectors": 0}, "n_detectors is 0; it must be at least 1"),
        ({"read": "soft"}, "read is 'soft'; expected one of lutjax.reads"),
        ({"read": READ, "accumulate": FixedPoint(8)},
            "accumulate is FixedPoint.* and read is Confidence"),
    ],
    "WindowLUT": [
        ({"read": READ, "epsilon": 0.5}, "epsilon is 0.5 and read is Confidence"),
        ({"kernel": (2, 7)}, r"kernel is \(2, 7\), larger than an image of 5 by 6"),
        ({"padding": 1}, r"group 0, with its center at \(-0\.5, -0\.5\), has too few inputs, 1;"),
        ({"kernel": 5, "anchors": np.full((4, 3, 2), 30)}, "ids from 30 to 30; inputs are 0 to 29"),
    ],
    "ConvLUT": [
        ({"kernel": 1}, r"kernel is 1 and in_shape is \(5, 6\), so a window has one value"),
        ({"padding": 3}, "padding is 3 and kernel is 3"),
        ({"stride": (0, 1)}, r"stride is \(0, 1\); it must be at least 1"),
        ({"groups": 0}, "groups is 0; it must be at least 1"),
        ({"groups": 2}, r"groups is 2; it must divide the channels of in_shape \(5, 6\), 1"),
        ({"pool": (4, 1)}, r"pool is \(4, 1\), larger than 3 by 4 window positions"),
        ({"pool": "max"}, "pool is 'max'; expected rows and columns of places"),
        ({"pool": (1, 2, 3)}, r"pool is \(1, 2, 3\); expected an integer, or a height"),
        ({"read": reads.Hard(), "epsilon": 0.5}, "epsilon is 0.5 and read is Hard"),
        ({"anchors": np.full((4, 3, 2), 9)}, "anchors holds ids from 9 to 9; inputs are 0 to 8"),
    ],
    "NgramMemory": [({"rows": 0}, "rows is 0"), ({"heads": 5000}, "heads is 5000"),
        ({"width": 0}, "width is 0; it must be at least 1"), ({"kernel": -1}, "kernel is -1"),
        ({"dtype": "int8"}, "dtype is int8")],
    "ProductKeyMemory": [({"k": 5}, "k is 5 and n_keys 4"),
        ({"n_keys": 50_000}, "n_keys is 50000; at most 46340")],
    "ProductKeyExperts": [({"key_size": 0}, "key_size is 0")],
    "LogicGates": [
        ({"sizes": (7, 0)}, "out_features is 0; .* at least 1"),
        ({"estimator": "hard"}, "estimator is 'hard'; expected one of"),
        ({"wiring": "dense"}, "wiring is 'dense'; expected one of"),
        ({"wiring": "unique", "sizes": (4, 7), "shape": (2, 4)}, "4 inputs have only 6 pairs"),
        ({"wiring": "learnable", "candidates": 3}, "candidates is 3; it must be even"),
        ({"wires": np.full((6, 2), 7)}, "wires holds ids from 7 to 7; inputs are 0 to 6"),
        ({"wires": np.zeros((6, 2))}, r"wires is float64\[6, 2\]"),
        ({"feature_axis": 1}, "feature_axis is 1; expected one of"),
        ({"temperature": 0.0}, "temperature is 0.0; .* positive"),
        ({"sizes": (7, 3), "shape": (2, 6)}, r"x has shape \[2, 6\]; expected \[..., 7\]"),
    ],
    "SoftLUT": [
        ({"estimator": "gumbel", **RAW}, "parameterization is 'raw', which has no logits"),
        ({"wiring": "unique"}, "wiring is 'unique', .* n_inputs is 4"),
        ({"n_inputs": 2, "wires": np.full((6, 2), -1)}, "ids from -1 to -1; inputs are 0 to 6"),
        ({"n_inputs": 9}, "n_inputs is 9; expected at most 8"),
        ({"n_inputs": 0}, "n_inputs is 0; .* at least 1"),
        ({"parameterization": "warp"}, "parameterization is 'warp'; expected one of"),
    ],
    "BinaryLUT": [({"estimator": "gumbel"},
        r"estimator is 'gumbel'; expected one of \('soft', 'straight_through'\)"),
        ({"n_inputs": 3, "wires": np.zeros((6, 2), int)},
        r"wires has shape \[6, 2\]; expected \[6, 3\]")],
    "LogicConv": [
        ({"shape": (2, 5, 4, 2)}, r"x has shape \[2, 5, 4, 2\]; expected \[..., 5, 3, 2\]"),
        ({"kernel": 4}, "kernel is 4, larger"),
        ({"kernel": (1, 2, 3)}, r"kernel is \(1, 2, 3\); expected an integer, or a height"),
        ({"kernel": 2, "padding": 2}, "padding is 2 and kernel is 2"),
        ({"pool": 2}, r"pool is 2, which must divide the \(3, 1\) windows"),
        ({"pool": 2, "pool_padding": 2}, "pool_padding is 2 and pool is 2"),
        ({"pool": (1, 2), "pool_padding": (0, 1)}, r"must divide .* with pool_padding \(0, 1\)"),
        ({"wires": np.full((12, 2), 18)}, "wires holds ids from 18 to 18; inputs are 0 to 17"),
        ({"channels_per_kernel": 3}, "channels_per_kernel is 3; expected at most 2"),
        ({"n_inputs": 3}, "parameterization is 'gates', .* use 'light'"),
        ({"n_inputs": 9, **RAW}, "n_inputs is 9; expected at most 8"),
        ({"estimator": "gumbel", **RAW}, "parameterization is 'raw', which has no logits"),
        ({"depth": 0}, "depth is 0; it must be at least 1"),
    ],
    "GroupSum": [({}, r"x has shape \[2, 7\]; expected a multiple of 3 features"),
        ({"sizes": (0,)}, "k is 0; it must be at least 1")],
    "Thermometer": [({"thresholds": np.zeros((7, 2))},
        r"thresholds has shape \[7, 2\]; expected \[7, 3\]"),
        ({"thresholds": np.full((7, 3), np.nan)}, "thresholds holds NaN")],
}  # fmt: skip
EACH = [(layer, *one) for layer, every in REFUSED.items() for one in every]


@pytest.mark.parametrize(
    ("layer", "changes", "message"), EACH, ids=[f"{e[0]}-{e[2]}" for e in EACH]
)
def test_impossible_arguments(layer, changes, message):
    base, options = BASES[layer], dict(changes)
    sizes, shape = options.pop("sizes", base.other_sizes), options.pop("shape", base.shape)
    if "anchors" in options:
        options["anchors"] = np.asarray(options["anchors"])
    case = Case(layer, {**base.options, **options}, shape, sizes)
    assert_refused(case, f"^{layer}: .*{message}")


WRONG_INPUTS = {
    "LUT": ((2, 6), r"\[\.\.\., 7\]"),
    "LUTAttention": ((2, 9, 6), r"\[\.\.\., length, 7\]"),
    "ProjectionLUT": ((2, 6), r"\[\.\.\., 7\]"),
    "WindowLUT": ((3, 6, 5), r"\[\.\.\., 5, 6\]"),
    "ConvLUT": ((3, 6, 5), r"\[\.\.\., 5, 6\]"),
    "ProductKeyExperts": ((4, 5), r"\[\.\.\., 6\]"),
    "LogicGates": ((2, 6), r"\[\.\.\., 7\]"),
    "LogicConv": ((2, 3, 5, 2), r"\[\.\.\., 5, 3, 2\]"),
    "Thermometer": ((2, 6), r"\[\.\.\., 7\]"),
}


@pytest.mark.parametrize("layer", WRONG_INPUTS)
def test_inputs_of_other_sizes(layer):
    shape, expected = WRONG_INPUTS[layer]
    with pytest.raises(ValueError, match=rf"^{layer}: x has shape .*; expected {expected}"):
        nnx_layer(BASES[layer])(jnp.zeros(shape))


@pytest.mark.parametrize(
    ("layer", "op"), [("SpatialLUT", "lut_at_places"), ("ConvLUT", "conv_lut"), ("LUT", "detect")]
)
def test_errors_of_ops_name_the_layer(layer, op):
    x = jnp.zeros(BASES[layer].shape, jnp.uint8)
    with pytest.raises(TypeError, match=rf"^{layer}: {op}: .* is uint8"):
        nnx_layer(BASES[layer])(x)


@pytest.mark.parametrize("layer", ["GroupSum", "Thermometer", "ProjectionLUT"])
def test_complex_numbers_are_refused(layer):
    case = BASES[layer]
    with pytest.raises(TypeError, match=r"x is complex64\[2, .\]; expected real numbers"):
        nnx_layer(case)(jnp.ones((2, 3 if layer == "GroupSum" else 7), jnp.complex64))


def test_a_key_for_a_size():
    with pytest.raises(TypeError, match=r"GroupSum: k is key<fry>\[\]; expected a whole number"):
        nnx_layers.GroupSum(jax.random.key(0))


@pytest.mark.parametrize("name", ["dtype", "param_dtype"])
def test_an_array_for_a_dtype(name):
    with pytest.raises(ValueError, match=rf"LUT: {name} is float32\[2\]; expected one of"):
        nnx_layers.LUT(2, 4, n_detectors=1, n_anchors=1, **{name: jnp.ones(2)}, rngs=nnx.Rngs(0))
