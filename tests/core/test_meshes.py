"""Meshes with explicit axes, as `jax.make_mesh` makes them: the same results, and outputs lie as inputs do."""

import contextlib
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import pytrees
from cases import called_weights, ops, slow, slow_except
from every_layer import CASES
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from layer_libraries import LIBRARIES, by_kind, function, nnx_layer, variables_of
from machine import needs_devices

import lutjax
from lutjax import models, optim as tables, sharding, testing
from lutjax.cases import Tag
from lutjax.models import (
    GPTConfig,
    LogicCAConfig,
    LogicClassifierConfig,
    LogicTreeNetConfig,
    LUTTransformerConfig,
)

pytestmark = needs_devices(2)

RNG = np.random.default_rng(0)
ANCHORS = RNG.permuted(np.tile(np.arange(8, dtype=np.int32), (6, 1)), axis=1)[:, :4].reshape(6, 2, 2)
TARGETS = RNG.integers(-1, 5, (6, 4, 3), np.int32)
WIRES = RNG.integers(0, 8, (6, 2), np.int32)


def array(*shape):
    return RNG.normal(size=shape).astype(np.float32)


X = array(4, 6, 8)
OPS = {
    "lut": (lambda x, w: lutjax.lut(x, w, ANCHORS), array(6, 4, 4)),
    "sparse_lut": (lambda x, w: lutjax.sparse_lut(x, w, ANCHORS, TARGETS, 5), array(6, 4, 3)),
    "lut_attention": (lambda x, w: lutjax.lut_attention(x, w, ANCHORS), array(6, 16, 4)),
    "lut_pair_attention": (lambda x, w: lutjax.lut_pair_attention(x, w, ANCHORS), array(6, 4, 4)),
    "bilinear_gates": (lambda x, c: lutjax.bilinear_gates(x, c, WIRES), array(4, 6)),
    "soft_lut": (lambda x, t: lutjax.soft_lut(x, t, WIRES), array(6, 4)),
    "binary_lut": (lambda x, t: lutjax.binary_lut(x, t, WIRES), array(6, 4)),
}
LAYOUTS = {
    "the batch": (P("shards"), P()),
    "the second axis": (P(None, "shards"), P()),
    "detectors": (P(), P("shards")),
    "nothing": (P(), P()),
}


@pytest.fixture(scope="module")
def mesh():
    found = jax.make_mesh((2,), ("shards",), devices=jax.devices()[:2])
    assert found.axis_types == (jax.sharding.AxisType.Explicit,)
    return found


@pytest.mark.parametrize(
    ("name", "layout"),
    slow_except(
        itertools.product(OPS, LAYOUTS),
        *(f"lut-{layout}" for layout in LAYOUTS),
        *("lut_pair_attention-detectors", "binary_lut-the batch", "bilinear_gates-detectors"),
    ),
)
def test_results_are_those_of_one_device(name, layout, mesh):
    op, parameter = OPS[name]

    def loss(x, parameter):
        y = op(x, parameter)
        return jnp.sum(jnp.sin(y)), y

    def both(x, parameter):
        return jax.value_and_grad(loss, (0, 1), has_aux=True)(x, parameter)

    (expected, y), gradients = jax.jit(both)(X, parameter)
    of_x, of_parameter = LAYOUTS[layout]
    x = jax.device_put(X, NamedSharding(mesh, of_x))
    parameter = jax.device_put(parameter, NamedSharding(mesh, of_parameter))
    (value, on_mesh), of_mesh = jax.jit(both)(x, parameter)
    for a, b in zip((value, on_mesh, *of_mesh), (expected, y, *gradients), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)
    assert jax.typeof(on_mesh).sharding.spec[:2] == (*of_x, None, None)[:2]
    assert jax.typeof(of_mesh[0]).sharding.spec[:2] == (*of_x, None, None)[:2]
    with jax.set_mesh(mesh):
        np.testing.assert_allclose(op(x, parameter), y, atol=2e-5)


def test_outside_of_jit_and_under_vmap(mesh):
    op, weights = OPS["lut"]
    gradient = jax.grad(lambda weights, x: jnp.sum(jnp.sin(op(x, weights))))
    expected, y = gradient(weights, X), op(X, weights)
    x = jax.device_put(X, NamedSharding(mesh, P("shards")))
    with jax.set_mesh(mesh):
        np.testing.assert_allclose(gradient(weights, x), expected, atol=2e-5)
        np.testing.assert_allclose(jax.vmap(op, (0, None))(x, weights), y, atol=2e-5)
        in_scope = jax.sharding.auto_axes(op, out_sharding=P("shards"))
        np.testing.assert_allclose(jax.jit(in_scope)(x, weights), y, atol=2e-5)


@pytest.mark.parametrize(("mapped", "samples", "n_outputs"), [(4, 2, 5), (0, 2, 5), (4, 0, 5), (4, 2, 0)])
def test_vmap_over_one_axis_of_the_mesh_and_the_batch_over_the_other(mapped, samples, n_outputs):
    """No `jax.shard_map` takes arrays without elements: the compiler of jaxlib 0.11.2 may end its process there."""

    def value_and_gradients(weights, detection):
        def total(weights, detection):
            y = jax.vmap(lambda d: lutjax.sparse_lookup(weights, d, TARGETS, n_outputs))(detection)
            return jnp.sum(jnp.sin(y)), y

        return jax.value_and_grad(total, (0, 1), has_aux=True, allow_int=True)(weights, detection)

    weights, detection = OPS["sparse_lut"][1], lutjax.detect(X[:mapped, :samples], ANCHORS)
    (value, y), (of_weights, of_detection) = value_and_gradients(weights, detection)
    with mesh_of_both("explicit") as mesh:
        over = P("data", "detectors") if samples else P("data")
        given = jax.device_put(detection, NamedSharding(mesh, over))
        program = jax.jit(value_and_gradients).trace(weights, given)
        (on_mesh, z), (each, of_each) = program.lower().compile()(weights, given)
        assert ("shard_map" in str(program.jaxpr)) == bool(samples and n_outputs)
        assert jax.typeof(z).sharding.spec[:2] == (*over, None)[:2]
    found = (on_mesh, z, each, of_each.margin)
    for a, b in zip(found, (value, y, of_weights, of_detection.margin), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["the batch", "detectors"])
def test_a_step_of_a_table_optimizer(layout, mesh):
    """A step in microbatches, clipped, and with a penalty on neighboring rows of the other table."""
    optimizer = tables.Optimizer(tables.RowAdagrad(), rate=0.1, tables=called_weights)

    def step(params, state, x):
        def loss(params, x):
            penalty = lutjax.cell_total_variation(params["dense"])
            y = lutjax.lut(x, params["weights"], ANCHORS) + lutjax.lut(x, params["dense"], ANCHORS)
            return jnp.mean(y**2) + penalty

        value_and_grad = tables.microbatched(tables.value_and_grad(loss, tables=called_weights), 2)
        value, gradients = value_and_grad(params, x)
        gradients = tables.clip_by_global_norm(gradients, 0.01)
        return *optimizer.apply(params, gradients, state), value

    params = {"weights": OPS["lut"][1], "dense": OPS["lut"][1] / 2}
    expected = jax.jit(step)(params, optimizer.init(params), X)
    of_x, of_weights = (NamedSharding(mesh, spec) for spec in LAYOUTS[layout])
    with jax.set_mesh(mesh):
        params = jax.device_put(params, of_weights)
        actual = jax.jit(step)(params, optimizer.init(params), jax.device_put(X, of_x))
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)
    spec = tuple(jax.typeof(actual[0]["weights"]).sharding.spec)
    assert spec == (*of_weights.spec, None, None, None)[:3]


# ------------------------------------------------------------------------------------- layers and models, on both kinds of meshes
KINDS = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}


@contextlib.contextmanager
def mesh_of_both(kind):
    """A mesh of samples and detectors with axes of a kind, in scope where programs need that."""
    if jax.device_count() < 4:
        pytest.skip("the mesh has four devices, and this machine has fewer")
    found = jax.make_mesh((2, 2), ("data", "detectors"), (KINDS[kind],) * 2, devices=jax.devices()[:4])
    with jax.set_mesh(found) if kind == "explicit" else contextlib.nullcontext():
        yield found


def put(arrays, specs, mesh):
    """Arrays that lie on a mesh as specs say."""
    return jax.device_put(arrays, jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs))


def assert_same(actual, expected, what, tolerance=2e-5):
    for (path, a), b in zip(jax.tree.leaves_with_path(actual), jax.tree.leaves(expected), strict=True):
        message = f"{what} {jax.tree_util.keystr(path)}"
        np.testing.assert_allclose(a, b, atol=tolerance, rtol=tolerance, err_msg=message)


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
    """A model in parts, with random numbers for parameters."""
    graph, params, others = nnx.split(model, nnx.Param, ...)
    return graph, jax.tree.map(lambda a: array(*a.shape) / 4, nnx.to_pure_dict(params)), others


def test_every_model_is_here():
    configs = {name for name in models.__all__ if name.endswith("Config")}
    assert {type(config).__name__ for config, _ in MODELS.values()} == configs


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MODELS)
def test_a_step_of_a_model(name, kind):
    """Parameters and state lie as `sharding.specs` says, before and after, and the batch by samples."""
    model, inputs = model_and_inputs(name)
    graph, params, others = split(model)
    optimizer = tables.Optimizer(tables.RowAdagrad(), 0.1, rest=optax.sgd(0.1), tables=called_weights)

    def step(params, state, inputs):
        def loss(params):
            options = {k: v() if callable(v) else v for k, v in MODELS[name][1].items()}
            y = nnx.merge(graph, nnx.State(params), others)(inputs, **options)
            return jnp.mean(jnp.sin(y)), y

        (_, y), gradients = tables.value_and_grad(loss, has_aux=True)(params)
        return *optimizer.apply(params, gradients, state), y

    state = optimizer.init(params)
    expected = jax.jit(step)(params, state, inputs)
    with mesh_of_both(kind) as mesh:
        specs = sharding.specs((params, state), mesh)
        place = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
        out = (*place, None) if kind == "auto" else None  # explicit axes stay as they are
        params, state = jax.device_put((params, state), place)
        actual = jax.jit(step, out_shardings=out)(params, state, put(inputs, P("data"), mesh))
    assert_same(actual, expected, name)
    for a, spec in zip(jax.tree.leaves(actual[:2]), jax.tree.leaves(specs), strict=True):
        assert a.sharding.is_equivalent_to(NamedSharding(mesh, spec), a.ndim)


FAST_TO_PRODUCE = ("powers of two", "gates", "trees")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["explicit", "auto"])
@pytest.mark.parametrize("name", [n for n in MODELS if "automaton" not in n])
def test_what_models_produce(name, kind):
    """Texts that models continue with caches, and the packed networks of classifiers."""
    model, inputs = model_and_inputs(name)
    graph, params, others = split(model)

    def results(params, inputs):
        model = nnx.merge(graph, nnx.State(params), others)
        if hasattr(model, "generate"):
            key = jax.random.key(0)
            return [model.generate(inputs, 6, key=key), *model.stream(inputs, 6, key=key)]
        packed = model.packed()
        bits = packed.first_bits(inputs)
        words = jnp.tile(lutjax.pack_bits(np.asarray(bits).T), (1, 4))  # whole words for each device
        words = jax.device_put(
            words, NamedSharding(inputs.sharding.mesh, P(None, "data")) if on_mesh else None
        )
        return [packed(inputs), bits, packed.last_words(words), packed.from_words(words)]

    on_mesh = False
    expected = results(params, inputs)
    on_mesh = True
    with mesh_of_both(kind) as mesh:
        actual = results(put(params, sharding.specs(params, mesh), mesh), put(inputs, P("data"), mesh))
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
@pytest.mark.parametrize("layer", ["LUTAttention", "LUTPairAttention", "counts"])
def test_decoding(layer):
    """Caches lie where they were put, so that a loop may carry them."""
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
    with mesh_of_both("explicit") as mesh:
        first, later = decoded(state, put(x, P("data"), mesh))
    assert_same(first, expected[:, :2], layer)
    assert_same(later, expected[:, 2:], layer)


FAST_LAYERS = {  # and the library and the kind of mesh on which it is tried in the fast suite
    "LUT, groups": ("nnx", "auto"),
    "SparseLUT, targets of tables": ("linen", "explicit"),
    "LUTAttention, window": ("haiku", "explicit"),
    "LUTPairAttention, interleaved": ("nnx", "auto"),
    "ProjectionLUT, powers of two": ("linen", "explicit"),
    "NgramMemory": ("nnx", "explicit"),
    "ProductKeyMemory": ("haiku", "auto"),
    "ProductKeyExperts": ("linen", "explicit"),
    "SpatialLUT, powers of two": ("haiku", "auto"),
    "WindowLUT, dropout": ("nnx", "explicit"),
    "ConvLUT, powers of two": ("linen", "auto"),
    "LogicGates, learnable, soft": ("haiku", "explicit"),
    "SoftLUT, features first": ("nnx", "auto"),
    "BinaryLUT, top-k, straight_through": ("linen", "explicit"),
    "LogicRNN, balanced": ("linen", "explicit"),
    "LogicConv": ("haiku", "auto"),
    "GroupSum": ("nnx", "explicit"),
    "Thermometer, straight_through": ("linen", "auto"),
}


def test_a_case_of_every_layer_is_fast():
    assert sorted(CASES[name].layer for name in FAST_LAYERS) == sorted({c.layer for c in CASES.values()})


@pytest.mark.parametrize(
    ("library", "name", "kind"),
    slow_except(
        [
            (library, name, kind) if FAST_LAYERS.get(name) == (library, kind) else slow(library, name, kind)
            for library in LIBRARIES
            for name in CASES
            for kind in KINDS
        ],
        "nnx-LUT, groups-auto",
        "nnx-NgramMemory-explicit",
        "nnx-SoftLUT, features first-auto",
        "nnx-GroupSum-explicit",
        "linen-SparseLUT, targets of tables-explicit",
        "linen-ProductKeyExperts-explicit",
        "linen-Thermometer, straight_through-auto",
        "haiku-ProductKeyMemory-auto",
        "haiku-LogicGates, learnable, soft-explicit",
    ),
)
def test_layers_of_all_libraries(library, name, kind):
    """Outputs and gradients on a mesh of a kind, parameters by `sharding.specs` and the batch by samples."""
    _check_layer(library, name, kind)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_inputs_divided_by_features(name):
    """An op gets whole features, and what layers do with them before does not depend on where they lie."""
    _check_layer("nnx", name, "explicit", by_sample=False)


def _check_layer(library, name, kind, by_sample=True):
    case = CASES[name]
    arrays, x = variables_of(case), array(*case.shape)
    layer, params = function(library, case, arrays), by_kind(case, arrays).get("params", {})
    features_first = case.options.get("feature_axis") == 0
    of_x = P("data") if by_sample != features_first else P(*[None] * (x.ndim - 1), "data")

    def loss(params, x):
        y = layer(params, x)
        return jnp.sum(jnp.sin(y)), y

    run = jax.jit(loss if "quantized" in case.options else jax.value_and_grad(loss, (0, 1), has_aux=True))
    expected = run(params, x)
    with mesh_of_both(kind) as mesh:
        # A single table is divided by its rows.
        rows = {"ProductKeyMemory": ["weights"], "ProductKeyExperts": ["down", "up"]}.get(case.layer, ())
        specs = sharding.specs({"layer": params}, mesh, by_rows=rows)["layer"]
        actual = run(put(params, specs, mesh), put(x, of_x, mesh))
    assert_same(actual, expected, kind)


# ------------------------------------------------------------------------------------- the reference
REFERENCES = {
    "conv_lut": lambda r, x: r.conv_lut(jnp.expand_dims(x, 1), array_of(6, 4, 4), ANCHORS, kernel=1),
    "gate_coefficients": lambda r, x: r.gate_coefficients(jnp.tile(x[:, 0], (1, 2))),
    "logic_gates": lambda r, x: r.logic_gates(x, array_of(6, 16), WIRES),
    "lut": lambda r, x: r.lut(x, array_of(6, 4, 4), ANCHORS),
    "lut, groups": lambda r, x: r.lut(x, array_of(6, 4, 4), ANCHORS, groups=6),
    "lut_attention": lambda r, x: r.lut_attention(x, array_of(6, 16, 4), ANCHORS),
    "scale_gradient": lambda r, x: r.scale_gradient(x, array_of(4, 6, 8)),
    "sparse_lut": lambda r, x: r.sparse_lut(x, array_of(6, 4, 3), ANCHORS, TARGETS, 5),
    "soft_lut, features first": lambda r, x: r.soft_lut(
        jnp.moveaxis(x, -1, 0), array_of(6, 4), WIRES, feature_axis=0
    ),
}


def array_of(*shape):
    return np.random.default_rng(1).normal(size=shape).astype(np.float32)


def derivatives(f, arguments):
    """Values, and derivatives forward, forward and backward, and of second order."""
    floats = lambda a: [v for v in jax.tree.leaves(f(a)) if jnp.issubdtype(v.dtype, jnp.floating)]  # noqa: E731
    if not floats(arguments):
        return f(arguments), (), ()
    tangents = jax.linearize(floats, arguments)[1](arguments)
    total = lambda a: sum(jnp.sum(jnp.sin(v)) for v in jax.jvp(floats, (a,), (a,))[1])  # noqa: E731
    return f(arguments), tangents, jax.grad(total)(arguments)


@pytest.mark.parametrize(
    ("op", "axis"),
    slow_except(
        itertools.product(ops(), ["batch", "detector"]),
        *("lookup-batch", "lookup-detector", "bilinear_gates-batch"),
    ),
)
def test_reference_of_every_op(op, axis, mesh):
    """The reference has the values of one device, in every mode, and its outputs lie as those of the op do."""
    case = testing.case(op, next(name for name, size in testing.shapes(op).items() if Tag.FAST in size.tags))

    def laid_out(name, a):
        at = getattr(case.axes[name], axis)
        divides = at is not None and a.shape[at] % 2 == 0
        return jax.device_put(a, NamedSharding(mesh, P(*[None] * at, "shards") if divides else P()))

    fixed = {name: a for name, a in case.fixed.items() if isinstance(a, jax.Array)}
    fixed = {name: laid_out(name, a) for name, a in fixed.items()}
    on_mesh = {name: laid_out(name, a) for name, a in case.differentiable.items()}

    def called(function, others):
        return lambda a: case.call(function, {**case.fixed, **others, **a})

    reference = getattr(lutjax.reference, op)
    want = jax.jit(lambda a: derivatives(called(reference, {}), a))(case.differentiable)
    with jax.set_mesh(mesh):
        found = jax.jit(lambda a, others: derivatives(called(reference, others), a))(on_mesh, fixed)
        pytrees.assert_close(op, found, want, 2e-5)
        if axis == "batch":
            function = lutjax.kernel_registry.function(op)
            of_op = jax.jit(lambda a, others: called(function, others)(a))(on_mesh, fixed)
            for name, a in of_op.items():
                assert jax.typeof(found[0][name]).sharding.spec == jax.typeof(a).sharding.spec


@pytest.mark.parametrize("name", slow_except(REFERENCES, "lut", "scale_gradient"))
def test_other_functions_of_the_reference(name, mesh):
    call = REFERENCES[name]
    f = lambda x: call(lutjax.reference, x)  # noqa: E731
    want = jax.jit(lambda x: derivatives(f, x))(X)
    with jax.set_mesh(mesh):
        x = jax.device_put(X, NamedSharding(mesh, P("shards")))
        found = jax.jit(lambda x: derivatives(f, x))(x)
    pytrees.assert_close(name, found, want, 2e-5)
    spec = jax.typeof(found[0]).sharding.spec
    if name not in ("gate_coefficients", "soft_lut, features first"):
        assert spec[0] == "shards"


def test_references_are_all_here():
    named = {name.partition(",")[0] for name in REFERENCES} | set(ops())
    assert set(lutjax.reference.__all__) == named | {"pack_bits", "unpack_bits"}


def test_reference_of_packed_bits(mesh):
    bits = np.random.default_rng(0).integers(0, 2, (6, 64)).astype(bool)
    words = lutjax.reference.pack_bits(bits)
    for spec in (P("shards"), P(None, "shards")):
        on_mesh = jax.device_put(jnp.asarray(bits), NamedSharding(mesh, spec))
        found = jax.jit(lutjax.reference.pack_bits)(on_mesh)
        np.testing.assert_array_equal(found, words)
        again = jax.jit(lambda words: lutjax.reference.unpack_bits(words, 64))(
            jax.device_put(words, NamedSharding(mesh, spec))
        )
        np.testing.assert_array_equal(again, bits)
