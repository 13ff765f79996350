"""Table layers over images: table dropout, integer tables, sparse gradients, and attention over all pixels."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from layer_libraries import Case, assert_refused, inputs_of, nnx_layer

from lutjax import reads, wiring
from lutjax.layers import nnx as layers
from lutjax.testing import assert_close

TABLES = {"n_detectors": 4, "n_anchors": 3}
SCORED = {**TABLES, "read": reads.PowersOfTwo(), "table_dropout": 0.5}
FIELDS = wiring.projections(None, (5, 4), (3, 3), groups=2, receptive=3, projective=2)
CASES = {
    "spatial": Case("SpatialLUT", SCORED, (2, 5, 4), (FIELDS,)),
    "window": Case(
        "WindowLUT", {**SCORED, "kernel": 3, "padding": 1, "stride": 2}, (2, 5, 4), ((5, 4), 3)
    ),
    "conv": Case(
        "ConvLUT", {**SCORED, "kernel": 3, "padding": 1, "groups": 2}, (2, 3, 4, 2), ((3, 4, 2), 6)
    ),
}


def variables_of(case):
    arrays = {}
    for i, v in enumerate(case.spec.variables()):
        key = jax.random.key(10 + i)
        arrays[v.name] = (
            jax.random.normal(key, v.shape, v.dtype) if v.name == "weights" else v.init(key)
        )
    return arrays


def test_errors():
    x = jnp.zeros(CASES["conv"].shape)
    with pytest.raises(ValueError, match=r"ConvLUT: table_dropout is 0\.5; pass rngs"):
        CASES["conv"].spec(variables_of(CASES["conv"]), x)
    for name, case in CASES.items():
        hard = {k: v for k, v in case.options.items() if k not in ("read", "table_dropout")}
        for options, message in (
            (
                {"table_dropout": 0.5},
                "table_dropout is 0.5 but read is None; it is of scored reads",
            ),
            (
                {"quantized": True},
                "quantized is True but read is None; tables of integers are read by",
            ),
            (
                {"table_dropout": 1.0, "read": reads.Hard()},
                "table_dropout is 1.0; it must be at least 0 and below 1",
            ),
        ):
            with pytest.raises(ValueError, match=f"{case.layer}: {message}"):
                nnx_layer(Case(case.layer, {**hard, **options}, case.shape, case.other_sizes))
        assert name
    assert_refused(
        Case(
            "ConvLUT",
            {**CASES["conv"].options, "read": reads.Confidence(), "quantized": True},
            x.shape,
            CASES["conv"].sizes,
        ),
        "ConvLUT: quantized is True but read is Confidence",
    )
    with pytest.raises(
        ValueError, match="Sequential has no ProjectionLUT, and no layer of images with the read"
    ):
        layers.quantize(
            nnx.Sequential(
                nnx_layer(Case("ConvLUT", {**TABLES, "kernel": 3}, x.shape, ((3, 4, 2), 6)))
            )
        )


class TestSlow:
    @pytest.mark.parametrize("name", ["spatial"])
    def test_quantized_layers_have_the_values_of_trained_layers(self, name):
        case = CASES[name]
        arrays, x = variables_of(case), inputs_of(case)
        deployed = layers.quantize(nnx.Sequential(nnx_layer(case, arrays), lambda y: y))
        y = deployed(x)
        assert np.any(y)
        assert_close("integers", y, case.spec(arrays, x, deterministic=True))
        layer = deployed.layers[0]
        assert layer.weights.dtype == jnp.int8
        assert layer.exponents.shape == (case.spec.table_groups, case.spec.weights_shape[-1])
        assert not jax.tree.leaves(nnx.state(deployed, layers.Tables))
        layers.check(deployed)
