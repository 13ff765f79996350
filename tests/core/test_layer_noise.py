"""Layers with random draws or hard mode in their calls: the same results in every library."""

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import slow_except
from flax import nnx
from layer_libraries import LIBRARIES, Case, by_kind, inputs_of, nnx_layer, variables_of

import lutjax
from lutjax.layers import haiku as lutjax_haiku, linen, nnx as layers

CASES = {
    "LogicGates": Case("LogicGates", {"estimator": "gumbel", "temperature": 0.5}, (5, 7)),
    "LogicConv": Case(
        "LogicConv", {"kernel": 2, "depth": 1, "estimator": "gumbel"}, (2, 3, 4, 2), ((3, 4, 2), 3)
    ),
    "ProjectionLUT": Case(
        "ProjectionLUT", {"heads": 3, "tables": 2, "bits": 2, "table_dropout": 0.5}, (4, 7)
    ),
}


def caller(library, case, arrays, **options):
    """Return the layer as a function of its input and noise key."""
    kinds = by_kind(case, arrays)
    if library == "nnx":
        layer = nnx_layer(case, arrays)
        return lambda x, key: layer(x, rngs=nnx.Rngs(key), **options)
    if library == "linen":
        module = getattr(linen, case.layer)(*case.sizes, **case.options)
        return lambda x, key: module.apply(kinds, x, rngs={case.spec.stream: key}, **options)
    f = hk.transform_with_state(
        lambda x: getattr(lutjax_haiku, case.layer)(*case.sizes, **case.options, name="layer")(
            x, **options
        )
    )
    state = {
        "layer": {k: v for kind, part in kinds.items() if kind != "params" for k, v in part.items()}
    }
    return lambda x, key: f.apply({"layer": kinds["params"]}, state, key, x)[0]


@pytest.mark.parametrize("library", slow_except(LIBRARIES, "nnx"))
@pytest.mark.parametrize("layer", CASES)
def test_noise_is_that_of_the_key_and_hard_calls_have_none(layer, library):
    case = CASES[layer]
    arrays, x = variables_of(case), inputs_of(case)
    call = jax.jit(caller(library, case, arrays))
    first, second, again = (call(x, jax.random.key(seed)) for seed in (0, 1, 0))
    assert np.any(first != second)
    np.testing.assert_array_equal(first, again)
    hard = jax.jit(caller(library, case, arrays, deterministic=True))(x, jax.random.key(0))
    want = jax.jit(lambda x: case.spec(arrays, x, deterministic=True))(x)
    np.testing.assert_array_equal(hard, want)


@pytest.mark.parametrize("layer", CASES)
def test_streams_and_views_of_flax_nnx(layer):
    case = CASES[layer]
    arrays, x = variables_of(case), inputs_of(case)
    module, run = nnx_layer(case, arrays), nnx.jit(lambda layer, x: layer(x))
    assert np.any(run(module, x) != run(module, x)), "each call draws"
    hard = jax.jit(lambda x: case.spec(arrays, x, deterministic=True))(x)
    view = nnx.view(module, deterministic=True)
    assert (view.deterministic, module.deterministic) == (True, False)
    np.testing.assert_array_equal(run(view, x), hard)
    module.eval()
    np.testing.assert_array_equal(run(module, x), hard)
    module.train()
    module.rngs = nnx.data(None)
    with pytest.raises(ValueError, match=f"^{layer}: .*; pass rngs"):
        module(x)


def test_layers_without_noise_have_no_stream():
    layer = layers.LogicGates(7, 6, rngs=nnx.Rngs(0))
    assert "rngs" not in nnx.to_pure_dict(nnx.state(layer))


def test_noise_of_gates_is_that_of_the_definition():
    case = CASES["LogicGates"]
    arrays, x, key = variables_of(case), inputs_of(case), jax.random.key(5)
    noise = jax.random.gumbel(jax.random.split(key)[0], (6, 16))
    want = lutjax.logic_gates(x, (arrays["logits"] + noise) / 0.5, arrays["wires"])
    np.testing.assert_allclose(case.spec(arrays, x, key=key), want, rtol=1e-5)


def test_rows_of_dropped_tables_have_no_gradient():
    case, key = CASES["ProjectionLUT"], jax.random.key(0)
    arrays, x = variables_of(case), inputs_of(case)[:1]
    gradient = jax.jit(jax.grad(lambda w: case.spec({**arrays, "weights": w}, x, key=key).sum()))
    kept = jax.random.bernoulli(key, 0.5, (1, 6))[0]
    assert 0 < kept.sum() < 6
    moved = np.any(np.asarray(gradient(arrays["weights"])) != 0, (1, 2))
    np.testing.assert_array_equal(moved, kept)
    factors = case.spec._keep(False, key, (1, 6), jnp.float32)[0]
    np.testing.assert_array_equal(factors, np.where(kept, 2.0, 0.0))
