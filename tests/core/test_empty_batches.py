"""Models, their packed forms, and layers accept empty batches and decode no positions: output shapes, and zero gradients."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import lutjax
from lutjax import models, wiring
from lutjax.layers import _tables, nnx as layers

TREES = models.LogicTreeNetConfig((6, 4, 1), 2, kernels=(4,), layers=(8, 4), padding=1)
EDGES = models.LogicTreeNetConfig((6, 4, 1), 2, kernels=(4,), layers=(8, 4), padding=1, edges=True)
GATES = models.LogicClassifierConfig(6, 2, layers=(8, 4), n_thresholds=2)
AUTOMATON = models.LogicCAConfig(channels=3, kernels=2, perception=(8, 4), update=(6, 3))


def shape_of(function, *arguments):
    """Return a function's output shape by tracing, without running it."""
    return jax.eval_shape(function, *arguments).shape


def zeros(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


MADE = {
    "LUT": (lambda r: layers.LUT(4, 6, n_detectors=2, n_anchors=2, groups=2, rngs=r), (4,), (6,)),
    "SparseLUT": (lambda r: layers.SparseLUT(4, 6, n_detectors=2, n_anchors=2, groups=2, n_targets=1, rngs=r),
        (4,), (6,)),
    "SpatialLUT": (
        lambda r: layers.SpatialLUT(
            wiring.full((3, 2), (2, 2)), n_detectors=2, n_anchors=2, read=lutjax.reads.Blend(), rngs=r
        ),
        (3, 2),
        (2, 2),
    ),
    "LogicGates, top-k": (lambda r: layers.LogicGates(4, 6, wiring="top-k", rngs=r), (4,), (6,)),
    "LogicTreeNet": (lambda r: models.LogicTreeNet(TREES, rngs=r), (6, 4, 1), (2,)),
    "LogicClassifier": (lambda r: models.LogicClassifier(GATES, rngs=r), (6,), (2,)),
}  # fmt: skip


@pytest.mark.parametrize("name", MADE)
def test_values_and_gradients(name):
    make, inputs, outputs = MADE[name]
    graph, params, rest = nnx.split(nnx.eval_shape(lambda: make(nnx.Rngs(0))), nnx.Param, ...)

    def total(params, rest, x):
        y = nnx.merge(graph, params, rest)(x)
        return jnp.sum(y), y

    gradients, y = jax.eval_shape(jax.grad(total, has_aux=True), params, rest, zeros(0, *inputs))
    assert y.shape == (0, *outputs)
    assert jax.tree.map(jnp.shape, gradients) == jax.tree.map(jnp.shape, params)


def test_gradients_of_scores_are_zero():
    """Candidates are not judged on an empty batch: dividing by the batch size would give NaN."""
    layer = layers.LogicGates(4, 6, wiring="top-k", rngs=nnx.Rngs(0))
    gradients = nnx.jit(nnx.grad(lambda layer, x: layer(x).sum()))(layer, jnp.zeros((0, 4)))
    assert not np.any(gradients["scores"][...])


@pytest.mark.parametrize("config", [EDGES])
def test_packed_trees(config):
    packed = models.LogicTreeNet(config, rngs=nnx.Rngs(0)).packed()
    n_bits = 24 * config.n_maps
    assert shape_of(packed, zeros(0, 6, 4, 1)) == (0,)
    assert shape_of(packed.first_bits, zeros(0, 6, 4, 1)) == (0, n_bits)
    words = zeros(n_bits, 0, dtype=jnp.uint32)
    assert shape_of(packed.last_words, words) == (4, 0)
    assert shape_of(packed.from_words, words) == (0,)


def test_packed_gates():
    packed = models.LogicClassifier(GATES, rngs=nnx.Rngs(0)).packed()
    assert shape_of(packed, zeros(0, 6)) == (0,)
    assert shape_of(packed.first_bits, zeros(0, 6)) == (0, 12)
    assert shape_of(packed.from_words, zeros(12, 0, dtype=jnp.uint32)) == (0,)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("shape", [(0, 4, 5, 3), (2, 0, 5, 3)], ids=["no grids", "no rows"])
def test_automata(shape, deterministic):
    graph, arrays = nnx.split(nnx.eval_shape(lambda: models.LogicCA(AUTOMATON, rngs=nnx.Rngs(0))))
    state = zeros(*shape, dtype=bool if deterministic else jnp.float32)

    def run(arrays, state):
        return nnx.merge(graph, arrays)(state, 2, deterministic=deterministic)

    assert shape_of(run, arrays, state) == shape


@pytest.mark.parametrize("accumulate", [None, lutjax.FixedPoint(8)])
def test_vmap_over_an_axis_of_length_0(accumulate):
    anchors = np.zeros((2, 1, 2), np.int32)

    def total(x, weights):
        y = jax.vmap(lambda x: lutjax.lut(x, weights, anchors, accumulate=accumulate))(x)
        return jnp.sum(y), y

    gradients, y = jax.grad(total, (0, 1), has_aux=True)(jnp.ones((0, 3, 4)), jnp.ones((2, 2, 5)))
    assert y.shape == (0, 3, 5)
    assert gradients[0].shape == (0, 3, 4)
    assert not np.any(gradients[1])
    assert jax.vmap(lambda w: lutjax.lut(jnp.ones((3, 4)), w, anchors))(
        jnp.ones((0, 2, 2, 5))
    ).shape == (
        0,
        3,
        5,
    )


CACHES = {
    "keys": {"cached": "keys", "window": 5},
    "blocks of ids": {"cached": "ids", "blocks": (6, 3), "window": 5},
    "counts": {"cached": "counts"},
}


@pytest.mark.parametrize(
    ("layer", "kind"),
    [("LUTPairAttention", "keys"), ("LUTAttention", "blocks of ids"), ("LUTAttention", "counts")],
)
def test_decoding_no_positions(layer, kind):
    spec = getattr(_tables, f"{layer}Spec")(6, 4, n_detectors=3, n_anchors=2, **CACHES[kind])
    rng = np.random.default_rng(0)
    arrays = {
        v.name: rng.integers(0, 6, v.shape, np.int32)
        if v.kind == "anchors"
        else rng.normal(size=v.shape).astype(np.float32)
        for v in spec.variables()
    }
    x = rng.normal(size=(2, 3, 6)).astype(np.float32)
    cache = spec.empty_cache(x.shape, x.dtype)
    for held, part in enumerate((x[:, :0], x, x[:, :0])):
        others = {}
        if spec.blocks is not None:
            others["block_tables"] = np.array([[0, 1], [3, 4]], np.int32)
            others["lengths"] = np.full(2, 3 * (held > 1), np.int32)
        y, after = jax.jit(spec.attend_with_cache)(arrays, cache, part, **others)
        assert y.shape == (*part.shape[:2], 4)
        if not part.size:
            assert after.keys() == cache.keys()
            for name, array in cache.items():
                np.testing.assert_array_equal(after[name], array, strict=True)
        cache = after


GPT = models.GPTConfig(
    vocab_size=11,
    features=8,
    context=6,
    n_layers=1,
    n_heads=2,
    lut_tables=2,
    lut_bits=2,
    memory=True,
    memory_rows=7,
)
LUT = models.LUTTransformerConfig(
    vocab_size=11,
    features=6,
    context=6,
    n_layers=1,
    n_detectors=3,
    n_anchors=2,
    n_position_bits=0,
    ffn_anchors=3,
)
LANGUAGE_MODELS = {
    "GPT": lambda rngs: models.GPT(GPT, rngs=rngs),
    "LUTTransformer": lambda rngs: models.LUTTransformer(LUT, rngs=rngs),
    "counts": lambda rngs: models.LUTTransformer(
        dataclasses.replace(LUT, memory="counts"), rngs=rngs
    ),
}


@pytest.mark.parametrize(
    ("name", "shape"), [("GPT", (2, 0)), ("LUTTransformer", (0, 3)), ("counts", (0, 1))]
)
def test_language_models_of_no_tokens(name, shape):
    def both(tokens):
        model = LANGUAGE_MODELS[name](nnx.Rngs(0))
        model.init_cache(shape[:1])
        y = model(tokens, deterministic=True), model(tokens, segments=tokens, deterministic=True)
        return *y, model(tokens, decode=True, deterministic=True)

    for y in jax.eval_shape(both, zeros(*shape, dtype=jnp.int32)):
        assert y.shape == (*shape, 11)
