"""`ProjectionLUT`: sizes, wrong calls and variable kinds; test_layers_and_ops.py covers its values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import called_weights
from flax import nnx
from layer_libraries import Case, by_kind, nnx_layer, variables_of

import lutjax
from lutjax import optim as parameters, reads
from lutjax.layers import nnx as layers
from lutjax.testing import assert_close

SIZES = {"heads": 3, "tables": 2, "bits": 2}
CASE = Case("ProjectionLUT", SIZES, (2, 3, 7))


def test_sizes_of_heads_follow_from_features():
    spec = Case("ProjectionLUT", {"heads": 4}, (2, 384), (384, 100)).spec
    assert (spec.width, spec.outputs) == (96, 25)
    spec = Case(
        "ProjectionLUT", {"heads": 4, "share_input": True, "sum_heads": True}, (2, 384), (384, 100)
    ).spec
    assert (spec.width, spec.outputs) == (384, 100)


class Named(reads.Hard):
    def initial(self):
        return {"weights": jnp.float32(0)}


def test_wrong_calls():
    with pytest.raises(
        ValueError,
        match=r"ProjectionLUT: Named.* has scalars with the names of variables, \['weights'\]",
    ):
        _ = Case("ProjectionLUT", {**SIZES, "read": Named()}, (2, 7)).spec
    layer = nnx_layer(CASE)
    layer.log_beta = jnp.float32(jnp.nan)
    with pytest.raises(ValueError, match="ProjectionLUT: log_beta is nan; it must be finite"):
        layer.check()
    with pytest.raises(
        ValueError, match=r"ProjectionLUT: scored_lut: scalars\['log_beta'\] is nan"
    ):
        layer(jnp.zeros((2, 7)))
    arrays = variables_of(CASE)
    layer.weights, layer.anchors = arrays["weights"][:3], arrays["anchors"][:3]
    assert layer.tables == 1


def test_kinds_of_parameters():
    """Layers declare their table parameters, and names distinguish the other parameters, also in stacked blocks."""
    case = CASE
    layer, arrays = nnx_layer(case), by_kind(case, variables_of(case))["params"]
    assert set(nnx.to_pure_dict(nnx.state(layer, layers.Tables))) == {"weights"}
    assert set(nnx.to_pure_dict(nnx.state(layer, layers.Scalars))) == set(
        reads.Confidence().initial()
    )
    want = dict.fromkeys(("compress_bias", "decompress_bias"), "vector")
    want |= dict.fromkeys(("compress_kernel", "decompress_kernel"), "matrix")
    want |= dict.fromkeys(reads.Confidence().initial(), "scalar") | {"weights": "table"}
    stacked = jax.tree.map(lambda a: jnp.stack([a, a]), arrays)
    for params in (arrays, {"block": {"layer": arrays}}, stacked):
        assert parameters.kinds(params, called_weights) in (want, {"block": {"layer": want}})
    state = nnx.state(layer, nnx.Param)
    assert nnx.to_pure_dict(parameters.kinds(state, layers.tables_of(layer))) == want
    norms = {
        "norm": {"scale": jnp.ones(3), "bias": jnp.ones(3)},
        "out": {"kernel": jnp.ones((3, 3))},
    }
    assert parameters.decayed(norms, ()) == {
        "norm": {"scale": False, "bias": False},
        "out": {"kernel": True},
    }


def test_cell_total_variation_of_a_model():
    weights = [jax.random.normal(jax.random.key(i), (2, 4, 3)) for i in range(3)]
    one, two, three = map(lutjax.cell_total_variation, weights)
    trees = {"nested": {"weights": weights[0]}, "blocks": {"weights": jnp.stack(weights[1:])}}
    assert_close(
        "trees", parameters.cell_total_variation(trees, called_weights), (one + two + three) / 3
    )
    layer = nnx_layer(CASE)
    want = lutjax.cell_total_variation(layer.weights[...])
    np.testing.assert_array_equal(
        parameters.cell_total_variation(nnx.state(layer, nnx.Param), layers.tables_of(layer)), want
    )
    assert parameters.cell_total_variation({"kernel": jnp.ones((2, 2))}, ()) == 0


def test_models_without_a_form_of_integers():
    with pytest.raises(ValueError, match="quantize: Linear has no ProjectionLUT"):
        layers.quantize(nnx.Linear(2, 2, rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match="ProjectionLUT: quantized is True but read is Confidence"):
        layers.quantize(nnx_layer(CASE))
