"""Models and layers on meshes with automatic and explicit axes: results match one device."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import called_weights
from every_layer import CASES
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec as P
from layer_libraries import LIBRARIES, nnx_layer, variables_of
from machine import needs_devices
from meshes import KINDS, assert_same, check_layer, four_device_mesh, put_on_mesh

import lutjax
from lutjax import models, optim as tables, sharding
from lutjax.models import (
    GPTConfig,
    LogicCAConfig,
    LogicClassifierConfig,
    LogicTreeNetConfig,
    LUTTransformerConfig,
)

pytestmark = needs_devices(2)

RNG = np.random.default_rng(0)


def array(*shape):
    return RNG.normal(size=shape).astype(np.float32)


LANGUAGE = {"vocab_size": 16, "features": 8, "context": 4, "n_layers": 1}


DETECTORS = {
    "n_heads": 1,
    "n_detectors": 4,
    "n_anchors": 2,
    "n_position_bits": 2,
    "ffn_detectors": 4,
    "ffn_anchors": 3,
}


SCORED = {"n_heads": 2, "lut_heads": 2, "lut_tables": 4, "lut_bits": 3}


GATES = {"in_features": 8, "n_classes": 3, "layers": (8, 12)}


IMAGES = {
    "in_shape": (8, 4, 2),
    "n_classes": 3,
    "kernels": (2, 4),
    "layers": (8, 12),
    "depth": 2,
    "padding": 1,
}


CELLS = {"channels": 2, "kernels": 2, "perception": (8, 2), "update": (8, 2)}


DROPOUT = {"rngs": lambda: jax.random.key(5)}


CALM, HARD = {"deterministic": True}, {"deterministic": True}


MODELS = {  # the sizes of a model, and the options of its calls
    "tables": (LUTTransformerConfig(**LANGUAGE, **DETECTORS), DROPOUT),
    "pairs": (LUTTransformerConfig(**LANGUAGE, **DETECTORS, attention="pair", shared_positions=True), DROPOUT),
    "pairs, interleaved": (
        LUTTransformerConfig(**LANGUAGE, **{**DETECTORS, "n_position_bits": 8}, attention="pair_interleaved", ffn=False), CALM,
    ),
    "powers of two": (GPTConfig(**LANGUAGE, **SCORED, read="powers_of_two", table_dropout=0.5, dropout=0.5), DROPOUT),
    "scored": (GPTConfig(**LANGUAGE, **SCORED, feed_forward="scored_lut", read="soft_sign", remat=True), CALM),
    "hard": (GPTConfig(**LANGUAGE, **SCORED, feed_forward="lut"), CALM),
    "dense": (GPTConfig(**LANGUAGE, **SCORED, feed_forward="dense"), CALM),
    "gates": (LogicClassifierConfig(**GATES, wiring="learnable", candidates=4, learned_thresholds=True), {}),
    "gates, gumbel": (
        LogicClassifierConfig(**GATES, wiring="windows,top-k", image_shape=(4, 2), window=2, estimator="gumbel"), {},
    ),
    "tables over bits": (LogicClassifierConfig(**GATES, n_inputs=4, wiring="full"), {}),
    "tables over signs": (LogicClassifierConfig(**GATES, n_inputs=4, tables="binary", wiring="butterfly"), {}),
    "gates, hard": (LogicClassifierConfig(**GATES), HARD),
    "trees": (LogicTreeNetConfig(**IMAGES, edges=True, learned_thresholds=True, wiring="learnable", candidates=4), {}),
    "trees of tables": (LogicTreeNetConfig(**IMAGES, tables="light", n_thresholds=0, channels_per_kernel=1), {}),
    "trees, hard": (LogicTreeNetConfig(**IMAGES, estimator="straight_through"), HARD),
    "automaton": (LogicCAConfig(**CELLS), {"n_steps": 2}),
    "automaton, asynchronous": (
        LogicCAConfig(**CELLS, update_rate=0.5, periodic=True), {"n_steps": 2, "key": lambda: jax.random.key(0)},
    ),
    "automaton, hard": (LogicCAConfig(**CELLS), {"n_steps": 2, **HARD}),
}  # fmt: skip


INPUTS = {
    "LUTTransformer": (4, 4),
    "GPT": (4, 4),
    "LogicClassifier": (4, 8),
    "LogicTreeNet": (4, 8, 4, 2),
    "LogicCA": (4, 5, 4, 2),
}


def model_and_inputs(name):
    config, _ = MODELS[name]
    kind = type(config).__name__.removesuffix("Config")
    shape = INPUTS[kind]
    inputs = jax.random.uniform(jax.random.key(1), shape)
    if kind in ("LUTTransformer", "GPT"):
        inputs = jax.random.randint(jax.random.key(1), shape, 0, 16)
    return getattr(models, kind)(config, rngs=nnx.Rngs(0)), inputs


def split(model):
    """A model in parts, with random parameters. Its other variables are arrays, so that a traced function may close over them."""
    graph, params, others = nnx.split(model, nnx.Param, ...)
    others = nnx.State(nnx.to_pure_dict(others))
    return graph, jax.tree.map(lambda a: array(*a.shape) / 4, nnx.to_pure_dict(params)), others


def test_every_model_is_here():
    configs = {name for name in models.__all__ if name.endswith("Config")}
    assert {type(config).__name__ for config, _ in MODELS.values()} == configs


@pytest.mark.parametrize(("name", "kind"), list(zip(MODELS, itertools.cycle(KINDS), strict=False)))
def test_a_step_of_a_model(name, kind):
    model, inputs = model_and_inputs(name)
    graph, params, others = split(model)
    optimizer = tables.Optimizer(
        tables.RowAdagrad(), 0.1, rest=optax.sgd(0.1), tables=called_weights
    )

    def step(params, state, inputs):
        def loss(params):
            options = {k: v() if callable(v) else v for k, v in MODELS[name][1].items()}
            y = nnx.merge(graph, nnx.State(params), others)(inputs, **options)
            return jnp.mean(jnp.sin(y)), y

        (_, y), gradients = tables.value_and_grad(loss, has_aux=True)(params)
        return *optimizer.apply(params, gradients, state), y

    state = optimizer.init(params)
    expected = jax.jit(step)(params, state, inputs)
    with four_device_mesh(kind) as mesh:
        specs = sharding.specs((params, state), mesh)
        place = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
        out = (*place, None) if kind == "auto" else None  # explicit axes stay as they are
        params, state = jax.device_put((params, state), place)
        actual = jax.jit(step, out_shardings=out)(
            params, state, put_on_mesh(inputs, P("data"), mesh)
        )
    assert_same(actual, expected, name)
    for a, spec in zip(jax.tree.leaves(actual[:2]), jax.tree.leaves(specs), strict=True):
        assert a.sharding.is_equivalent_to(NamedSharding(mesh, spec), a.ndim)


@pytest.mark.parametrize("layer", ["LUTAttention", "LUTPairAttention", "counts"])
def test_decoding(layer):
    case = CASES["LUTAttention, window" if layer == "counts" else f"{layer}, window"]
    if layer == "counts":
        without = {"window": None, "n_position_bits": 0, "n_targets": None, "cached": "counts"}
        case = case._replace(options={**case.options, **without})
    attention = nnx_layer(case, variables_of(case))
    x = array(*case.shape)
    expected = attention(x)
    attention.init_cache(case.shape)

    @jax.jit
    def decoded(state, x):
        def step(state, x):
            attention = nnx.merge(graph, state)
            y = attention(x, decode=True)
            return nnx.state(attention), y

        state, first = step(state, x[:, :2])
        _, later = jax.lax.scan(step, state, jnp.moveaxis(x[:, 2:, None], 1, 0))
        return first, jnp.moveaxis(later[:, :, 0], 0, 1)

    graph, state = nnx.split(attention)
    with four_device_mesh("explicit") as mesh:
        first, later = decoded(state, put_on_mesh(x, P("data"), mesh))
    assert_same(first, expected[:, :2], layer)
    assert_same(later, expected[:, 2:], layer)


SLOW_LAYERS = list(zip(itertools.cycle(LIBRARIES), CASES, itertools.cycle(KINDS), strict=False))


@pytest.mark.parametrize(("library", "name", "kind"), SLOW_LAYERS)
def test_every_layer(library, name, kind):
    check_layer(library, name, kind)


@pytest.mark.parametrize(
    "specs", [(P("data"), P()), (P(), P("detectors"))], ids=["batch", "detectors"]
)
def test_a_step_of_a_table_optimizer(specs):
    """A step in microbatches, clipped, and with a penalty on neighboring rows in the other table."""
    anchors = lutjax.sample_anchors(jax.random.key(0), 8, 6, 2)
    samples = array(4, 6, 8)
    optimizer = tables.Optimizer(tables.RowAdagrad(), rate=0.1, tables=called_weights)

    def step(params, state, x):
        def loss(params, x):
            penalty = lutjax.cell_total_variation(params["dense"])
            y = lutjax.lut(x, params["weights"], anchors) + lutjax.lut(x, params["dense"], anchors)
            return jnp.mean(y**2) + penalty

        value_and_grad = tables.microbatched(tables.value_and_grad(loss, tables=called_weights), 2)
        value, gradients = value_and_grad(params, x)
        gradients = tables.clip_by_global_norm(gradients, 0.01)
        return *optimizer.apply(params, gradients, state), value

    params = {"weights": array(6, 4, 4), "dense": array(6, 4, 4)}
    expected = jax.jit(step)(params, optimizer.init(params), samples)
    with four_device_mesh("explicit") as mesh:
        of_x, of_weights = (NamedSharding(mesh, spec) for spec in specs)
        params = jax.device_put(params, of_weights)
        actual = jax.jit(step)(params, optimizer.init(params), jax.device_put(samples, of_x))
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)
    spec = tuple(jax.typeof(actual[0]["weights"]).sharding.spec)
    assert spec == (*of_weights.spec, None, None, None)[:3]


@pytest.mark.parametrize(
    ("name", "kind"), [("powers of two", "explicit"), ("gates", "auto"), ("trees", "explicit")]
)
def test_what_models_produce(name, kind):
    """Cached continuation by models, and packed classifier networks."""
    model, inputs = model_and_inputs(name)
    graph, params, others = split(model)

    def results(params, inputs):
        model = nnx.merge(graph, nnx.State(params), others)
        if hasattr(model, "generate"):
            key = jax.random.key(0)
            return [model.generate(inputs, 6, key=key), *model.stream(inputs, 6, key=key)]
        packed = model.packed()
        bits = packed.first_bits(inputs)
        words = jnp.tile(
            lutjax.pack_bits(np.asarray(bits).T), (1, 4)
        )  # whole words for each device
        words = jax.device_put(
            words, NamedSharding(inputs.sharding.mesh, P(None, "data")) if on_mesh else None
        )
        return [packed(inputs), bits, packed.last_words(words), packed.from_words(words)]

    on_mesh = False
    expected = results(params, inputs)
    on_mesh = True
    with four_device_mesh(kind) as mesh:
        actual = results(
            put_on_mesh(params, sharding.specs(params, mesh), mesh),
            put_on_mesh(inputs, P("data"), mesh),
        )
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("name", CASES)
def test_inputs_divided_by_features(name):
    """An op gets whole features, and preprocessing in layers does not depend on their placement."""
    check_layer("nnx", name, "explicit", by_sample=False)
