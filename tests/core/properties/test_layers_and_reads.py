"""Values and cotangents of layers, models of trees, and ops of reads, with options and values of every kind; sequences that mix members.

In each run every layer is called with some values of each kind; ``pytest -m slow`` tries each option in each size.
"""

import dataclasses
import itertools

import jax
import pytest
from cases import slow
from hypothesis.stateful import run_state_machine_as_test

from properties.bounds import bounded
from properties.calls import OPS, Call, check, with_gradient
from properties.drawn_calls import names
from properties.layers import LAYERS, NETS
from properties.members import SIZES
from properties.test_sequences import sequences

# What the default of a layer does not show, in every run; the slow suite has all options.
OPTIONS = {
    "LUT": {"groups": True},
    "SparseLUT": {"groups": True},
    "ProjectionLUT": {"read": "powers_1", "table_dropout": True},
    "SpatialLUT": {"read": "confidence", "table_dropout": True},
    "WindowLUT": {"read": "powers"},
    "ConvLUT": {"read": "integers", "groups": True},
    "LogicGates": {"wiring": "top-k"},
    "SoftLUT": {"wiring": "full"},
    "BinaryLUT": {"wiring": "learnable"},
    "LogicConv": {"geometry": "padding"},
    "Thermometer": {"widths": True},
    "LogicTreeNet": {"learned_thresholds": True},
}
CHAINED = {**LAYERS, **NETS}


def check_values(op, size, options):
    """Check calls with values of every kind of one program."""
    functions = {}
    for values, seed in itertools.product(OPS[op].values, (0, 1)):
        call = Call(op, size=size, options=options, values=values, seed=seed, outer=("jit",))
        check(dataclasses.replace(call, wanted=with_gradient(call, names(call))), functions)


@pytest.mark.parametrize(
    "op",
    [
        slow(op) if op in ("LUTPairAttention", "LUTAttention", "LogicTreeNet", "SparseLUT") else op
        for op in CHAINED
    ],
)
def test_values(op):
    check_values(op, "a", OPTIONS.get(op, {}))


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("op", OPS)
def test_values_with_each_option(op, size):
    options = OPS[op].options
    for chosen in ({}, *({name: value} for name, values in options.items() for value in values[1:])):
        check_values(op, size, chosen)
    jax.clear_caches()


RELATED = {
    "scored reads": (
        "scored_lut",
        "conv_lut",
        "margins",
        "weighted_lookup",
        "ProjectionLUT",
        "WindowLUT",
        "ConvLUT",
        "SpatialLUT",
    ),
    "rows": ("lookup", "lut", "sparse_lut", "lut_at_places", "LUT", "SparseLUT", "ConvLUT"),
    "gates": (
        "bilinear_gates",
        "soft_lut",
        "binary_lut",
        "LogicGates",
        "SoftLUT",
        "BinaryLUT",
        "LogicConv",
        "LogicTreeNet",
    ),
    "sequences": (
        "lookup_attention",
        "lut_attention",
        "lut_pair_attention",
        "LUTAttention",
        "LUTPairAttention",
    ),
}
"""Members that run the same ops, and may keep what another one has left."""


@pytest.mark.slow
@pytest.mark.parametrize("related", RELATED)
def test_no_call_depends_on_those_of_other_members(related):
    run_state_machine_as_test(sequences(*RELATED[related]), settings=bounded(10, 20))
