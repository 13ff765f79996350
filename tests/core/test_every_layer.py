"""Every layer in every library: the list is complete, and the libraries agree."""

import dataclasses

import pytest
from every_layer import CASES
from layer_libraries import assert_outputs_agree, spec_type_of

from lutjax import reads, wiring
from lutjax.layers import _logic, _logic_images, _tables, haiku, linen, nnx
from lutjax.layers._spec import arguments as arguments_of

NO_NUMBERS = {
    "dtype",
    "param_dtype",
    "implementation",
    "decode",
    "cached",
    "blocks",
    "row_axis",
    "placement",
}
"""Arguments for how, where or when to compute, without effect on the result, and arguments for initializing variables."""


def layers_of(library):
    return {name for name in library.__all__ if hasattr(getattr(library, name), "spec_type")}


@pytest.mark.parametrize("library", [nnx, linen, haiku])
def test_every_layer_of_a_library(library):
    assert layers_of(library) == {case.layer for case in CASES.values()}


@pytest.mark.parametrize("layer", sorted(layers_of(nnx)))
def test_every_argument_of_a_layer(layer):
    spec_type = spec_type_of(layer)
    cases = [case for case in CASES.values() if case.layer == layer]
    arguments = {
        f.name: f for f in dataclasses.fields(spec_type) if f.name in arguments_of(spec_type)
    }
    wanted = {
        n
        for n, f in arguments.items()
        if f.kw_only and n not in NO_NUMBERS and not n.endswith("_init")
    }
    assert wanted <= {name for case in cases for name in case.options}

    def taken(name):
        return {case.options.get(name, arguments[name].default) for case in cases}

    if "read" in arguments:
        every = {
            getattr(reads, name) for name in reads.__all__ if isinstance(getattr(reads, name), type)
        }
        assert {type(read) for read in taken("read") if read is not None} == every - {reads.Read}
    if "targets_per" in arguments and layer == "SparseLUT":
        assert taken("targets_per") == set(_tables.TARGET_LISTS)
    if "wiring" in arguments:
        names = {name for name in taken("wiring") if isinstance(name, str)}
        left_out = set() if layer in ("LogicGates", "LogicRNN") else {"unique"}
        every = {*wiring.FIXED, *wiring.LEARNED} - left_out
        assert names == (set(_logic_images.LEAVES) if layer == "LogicConv" else every)
    if "estimator" in arguments:
        assert taken("estimator") == set(spec_type.estimators)
    if "parameterization" in arguments:
        gates = {"gates"} if layer == "LogicConv" else set()
        assert taken("parameterization") == gates | set(_logic.PARAMETERIZATIONS)
    if "gradient" in arguments:
        assert taken("gradient") == set(_logic.GRADIENTS)


@pytest.mark.parametrize(
    "name",
    ["LUT", "LUTAttention, window", "ProjectionLUT, confidence", "ConvLUT", "LogicGates, balanced"],
)
def test_libraries_agree(name):
    """Compare representatives; test_slow_every_layer.py compares all layers."""
    assert_outputs_agree(CASES[name])
