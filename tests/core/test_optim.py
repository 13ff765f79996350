"""`lutjax.optim` inside Optax: layer labels, partition, masks, schedules and accumulated steps."""

import functools
import subprocess
import sys

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, PartitionSpec

import lutjax
from lutjax import optim
from lutjax.layers import haiku, linen, nnx as layers
from lutjax.optim._transformations import next_step

RULES = [
    optim.SGD(weight_decay=0.25),
    optim.SGD(weight_decay=0.25, decay="every"),
    optim.RowAdagrad(),
    optim.RowMomentum(),
    optim.RowAdam(b1=0.5),
]
RATE = optax.linear_schedule(0.5, 0.1, 3)


@pytest.fixture(autouse=True)
def standard_promotion():
    """Optax needs implicit promotion."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def sample(step, shape=(2, 4, 3)):
    """Return a gradient with every third row zero, a different one each step."""
    gradient = jax.random.normal(jax.random.key(step), shape)
    return gradient * (jnp.arange(shape[-2]) % 3 != step % 3)[:, None]


def train(tx, params, gradients):
    @jax.jit
    def step(params, state, gradient):
        updates, state = tx.update(gradient, state, params)
        return optax.apply_updates(params, updates), state

    state = tx.init(params)
    for gradient in gradients:
        params, state = step(params, state, gradient)
    return params, state


@pytest.mark.parametrize("rule", RULES, ids=repr)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_transform_is_the_optimizer_with_dense_gradients(rule, dtype):
    params = {"weights": jnp.ones((2, 4, 3), dtype)}
    gradients = [{"weights": sample(step).astype(dtype)} for step in range(4)]
    actual, state = train(optim.row_transform(rule, RATE), params, gradients)

    optimizer = optim.Optimizer(rule, RATE, tables={"weights"})
    expected, rows = params, optimizer.init(params)
    for gradient in gradients:
        expected, rows = optimizer.apply(expected, gradient, rows)
    wide = [np.asarray(p["weights"], np.float32) for p in (actual, expected)]
    np.testing.assert_allclose(*wide, rtol=1e-6 if dtype == "float32" else 1e-2, atol=1e-7)
    assert state.step == rows.step == 4
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-2), state.rows, rows.rows)


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_stacked_tables_are_tables_of_their_own(rule):
    tx = optim.row_transform(rule, 0.1)
    stacked, single = jnp.ones((3, 2, 4, 3)), jnp.ones((2, 4, 3))
    gradients = [jnp.stack([sample(step + layer) for layer in range(3)]) for step in range(3)]
    result, state = train(tx, stacked, gradients)
    each = [train(tx, single, [gradient[layer] for gradient in gradients]) for layer in range(3)]
    np.testing.assert_array_equal(result, jnp.stack([params for params, _ in each]))
    jax.tree.map(
        np.testing.assert_array_equal,
        state.rows,
        jax.tree.map(lambda *a: jnp.stack(a), *(s.rows for _, s in each)),
    )


def test_the_last_axis_is_a_row():
    rule = optim.RowAdagrad()
    params = {"matrix": jnp.ones((4, 3)), "edges": jnp.ones(5), "scalar": jnp.ones(())}
    gradients = {
        "matrix": sample(0, (4, 3)),
        "edges": jnp.array([2.0, 0, -1, 3, 0]),
        "scalar": jnp.float32(4),
    }
    result, state = train(optim.row_transform(rule, 0.5), params, [gradients])
    np.testing.assert_allclose(result["edges"], 1 - 0.5 * np.sign(gradients["edges"]))
    np.testing.assert_allclose(result["scalar"], 0.5)
    table, _ = train(
        optim.row_transform(rule, 0.5), params["matrix"][None], [gradients["matrix"][None]]
    )
    np.testing.assert_array_equal(result["matrix"], table[0])
    assert state.rows["matrix"]["sum_of_squares"].shape == (4, 1)


def of_nnx(key, x):
    model = nnx.Sequential(
        layers.LUT(8, 4, n_detectors=4, n_anchors=3, rngs=nnx.Rngs(0)),
        nnx.Linear(4, 2, rngs=nnx.Rngs(1)),
    )
    graph, params, others = nnx.split(model, nnx.Param, ...)

    def apply(params, x):
        return nnx.merge(graph, params, others)(x)

    return params, apply, layers.tables_of(model)


def of_linen(key, x):
    model = linen.LUT(8, 4, n_detectors=4, n_anchors=3)
    others = model.init(key, x)
    tables = linen.tables_of(model.init, key, x)
    lut = others.pop("params")
    params = {"lut": lut, "dense": {"kernel": jnp.ones((4, 2))}}

    def apply(params, x):
        return model.apply({"params": params["lut"], **others}, x) @ params["dense"]["kernel"]

    return params, apply, {f"lut/{name}" for name in tables}


def of_haiku(key, x):
    f = hk.transform_with_state(
        lambda x: hk.Linear(2)(haiku.LUT(8, 4, n_detectors=4, n_anchors=3)(x))
    )
    params, state = f.init(key, x)
    return (
        params,
        lambda params, x: f.apply(params, state, None, x)[0],
        haiku.tables_of(f.init, key, x),
    )


@pytest.mark.parametrize("library", [of_nnx, of_linen, of_haiku])
def test_labels_of_layers_partition_parameters(library):
    key, x = jax.random.key(0), jax.random.normal(jax.random.key(1), (16, 8))
    params, apply, tables = library(key, x)
    labels = functools.partial(optim.kinds, tables=tables)
    groups = {
        "table": optim.row_transform(optim.RowAdagrad(), 0.1),
        "matrix": optax.sgd(0.1),
        "vector": optax.sgd(0),
    }
    tx = optax.partition(groups, labels)
    gradients = jax.grad(lambda p: jnp.mean((apply(p, x) - 1) ** 2))(params)
    gradients = jax.tree.map(
        jnp.add, gradients, jax.tree.map(jnp.ones_like, params)
    )  # none is zero
    updates, _ = jax.jit(tx.update)(gradients, tx.init(params), params)

    kinds = jax.tree.leaves(labels(params))
    assert kinds.count("table") == len(tables) == 1
    assert "matrix" in kinds
    for kind, gradient, update in zip(
        kinds, jax.tree.leaves(gradients), jax.tree.leaves(updates), strict=True
    ):
        expected = {
            "table": -0.1 * gradient / jnp.sqrt(jnp.mean(gradient**2, -1, keepdims=True)),
            "matrix": -0.1 * gradient,
            "vector": 0 * gradient,
        }[kind]
        np.testing.assert_allclose(update, expected, rtol=1e-5, atol=1e-6)


def test_accumulated_steps_are_steps_of_the_mean():
    params = {"weights": jnp.ones((2, 4, 3))}
    gradients = [{"weights": sample(step)} for step in range(4)]
    tx = optim.row_transform(optim.RowAdam(), RATE)
    actual, state = train(optax.MultiSteps(tx, 2), params, gradients)
    means = [
        jax.tree.map(lambda a, b: (a + b) / 2, *pair) for pair in (gradients[:2], gradients[2:])
    ]
    expected, inner = train(tx, params, means)
    np.testing.assert_allclose(actual["weights"], expected["weights"], rtol=1e-6)
    assert state.inner_opt_state.step == inner.step == 2


def test_steps_are_counted_up_to_the_largest_int32():
    steps, largest = [0, 6, 2**31 - 2, 2**31 - 1], 2**31 - 1
    counted = next_step(jnp.asarray(steps, jnp.int32))
    np.testing.assert_array_equal(counted, [1, 7, largest, largest])


def test_masks_and_injected_rates():
    params = {"a": jnp.ones((2, 4, 3)), "b": jnp.ones((2, 4, 3))}
    tx = optax.inject_hyperparams(optim.row_transform, static_args="rule")(
        optim.SGD(), learning_rate=RATE
    )
    frozen = optax.chain(
        optax.masked(tx, {"a": True, "b": False}),
        optax.masked(optax.set_to_zero(), {"a": False, "b": True}),
    )
    gradient = {"a": sample(1), "b": sample(1)}
    result, state = train(frozen, params, [gradient, gradient])
    np.testing.assert_array_equal(result["b"], params["b"])
    np.testing.assert_allclose(result["a"], 1 - (RATE(0) + RATE(1)) * gradient["a"], rtol=1e-6)
    assert state[0].inner_state.hyperparams["learning_rate"] == RATE(1)


PARAMS = {
    "lut": {"weights": np.ones((1, 2, 4), np.float32)},
    "out": {"kernel": np.ones((4, 2), np.float32), "bias": np.ones((2, 2), np.float32)},
}
TABLES = frozenset({"lut/weights"})


@pytest.mark.parametrize("steps", [1, 2])
def test_the_rest_of_an_optimizer_sees_names(steps):
    rest = optax.partition(
        {"matrix": optax.adam(0.5), "vector": optax.sgd(0.25)},
        functools.partial(optim.kinds, tables=TABLES),
    )
    optimizer = optim.Optimizer(
        optim.SGD(), 0.125, rest=optax.MultiSteps(rest, steps), tables=TABLES
    )
    params, state = PARAMS, optimizer.init(PARAMS)
    for _ in range(steps):
        params, state = jax.jit(optimizer.apply)(params, jax.tree.map(jnp.ones_like, params), state)
    np.testing.assert_array_equal(params["lut"]["weights"], 1 - 0.125 * steps)
    np.testing.assert_allclose(params["out"]["kernel"], 0.5, rtol=1e-5)
    np.testing.assert_array_equal(params["out"]["bias"], 0.75)


def test_a_mask_of_names_keeps_biases_from_decay():
    mask = functools.partial(optim.decayed, tables=TABLES)
    rest = optax.chain(optax.add_decayed_weights(0.5, mask=mask), optax.sgd(1.0))
    optimizer = optim.Optimizer(optim.SGD(), 1.0, rest=rest, tables=TABLES)
    params, _ = optimizer.apply(
        PARAMS, jax.tree.map(jnp.zeros_like, PARAMS), optimizer.init(PARAMS)
    )
    assert (params["out"]["kernel"] == 0.5).all()
    assert (params["out"]["bias"] == 1).all()


def test_state_of_partitioned_parameters_is_sharded_like_them():
    params = {
        "weights": jnp.ones((4, 2, 4)),
        "positions": jnp.ones((7, 4, 2)),
        "kernel": jnp.ones((4, 4)),
    }
    kinds = functools.partial(optim.kinds, tables={"weights"})
    rest = optax.partition({"matrix": optax.adam(0.1)}, kinds)
    optimizer = optim.Optimizer(
        optim.RowAdagrad(), 0.1, rest=optax.MultiSteps(rest, 2), tables={"weights"}
    )
    specs = optimizer.specs(jax.eval_shape(lambda: params), AbstractMesh((4,), ("detectors",)))
    adam = specs.rest.inner_opt_state.inner_states["matrix"].inner_state[0]
    divided = PartitionSpec(None, "detectors", None)
    assert adam.mu == adam.nu == specs.rest.acc_grads == [PartitionSpec(), divided]
    assert adam.count == PartitionSpec()


@pytest.mark.usefixtures("without_typechecking")
def test_what_optax_cannot_do_is_an_error():
    x = jnp.ones((3, 8))
    anchors = lutjax.sample_anchors(jax.random.key(0), n_inputs=8, n_detectors=1, n_anchors=1)
    params = {"weights": jnp.ones((1, 2, 4))}
    _, gradients = optim.value_and_grad(lambda p: lutjax.lut(x, p["weights"], anchors).sum())(
        params
    )
    tx = optim.row_transform(optim.SGD(), 0.1)
    with pytest.raises(
        TypeError,
        match=r"row_transform: a gradient is a TableGradient; use this table's dense gradient",
    ):
        tx.update(gradients, tx.init(params), params)
    with pytest.raises(
        ValueError, match=r"row_transform: params is None; call update\(gradients, state, params\)"
    ):
        tx.update(params, tx.init(params))
    with pytest.raises(TypeError, match=r"row_transform: rule is 'sgd'; expected a row rule"):
        optim.row_transform("sgd", 0.1)
    with pytest.raises(ValueError, match="decay is 'every'; the rows of a list of edges"):
        optim.row_transform(optim.SGD(weight_decay=0.1, decay="every"), 0.1).init(jnp.ones(3))
    steps = optax.MultiSteps(optim.Optimizer(optim.SGD(), 0.1, tables={"weights"}), 2)
    with pytest.raises(TypeError, match=r"Optimizer\.update: tables are updated in place"):
        steps.update(params, steps.init(params), params)


def test_rules_need_neither_optax_nor_flax():
    code = (
        "import sys; sys.modules['optax'] = sys.modules['flax'] = None\n"
        "import lutjax\n"
        "optim = lutjax.optim; optim.RowAdagrad(), optim.value_and_grad, optim.kinds, optim.host.HostTable\n"
        "assert 'row_transform' not in dir(optim) and 'RowAdam' in dir(optim)\n"
        "try: optim.Optimizer\n"
        "except ModuleNotFoundError as error: print(error)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.startswith(
        "lutjax.optim.Optimizer needs optax, which is not installed: pip install"
    )


def test_global_norm_of_numbers():
    assert optim.global_norm({"a": 3.0, "b": np.float32(4)}) == 5
