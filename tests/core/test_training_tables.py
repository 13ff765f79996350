"""Training tables without dense gradients: the same results as with them, without their memory."""

import dataclasses

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import pytrees
from cases import called_weights, slow_except
from flax.training import train_state
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import lutjax
from lutjax import optim as tables
from lutjax.testing import _ahead_of_time, assert_close

BATCH, LENGTH, INPUTS = 8, 4, 6
RNG = np.random.default_rng(0)


def anchors_of(n_inputs, n_detectors, n):
    pairs = [[RNG.permutation(n_inputs)[:2] for _ in range(n)] for _ in range(n_detectors)]
    return np.array(pairs, np.int32)


POINTWISE, PAIRS, SPARSE = (
    anchors_of(INPUTS, 4, 5),
    anchors_of(INPUTS, 4, 1),
    anchors_of(INPUTS, 3, 2),
)
TARGETS = RNG.integers(0, INPUTS, (3, 4, 2), np.int32)


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def predict(params, x, accumulate=None, anchors=POINTWISE):
    attention = params["attention"]
    z = lutjax.lut_attention(
        x, attention["weights"], PAIRS, attention["positions"], accumulate=accumulate
    )
    y = lutjax.lut(x, params["pointwise"]["weights"], anchors, accumulate=accumulate)
    s = lutjax.sparse_lut(
        z, params["sparse"]["weights"], SPARSE, TARGETS, n_outputs=INPUTS, accumulate=accumulate
    )
    return z + y + s + params["bias"][None, None]


def loss_of(params, batch):
    x, target = batch
    error = predict(params, x) - target
    return jnp.mean(error**2), error[:, 0, 0]


BATCHES = [
    (normal(10 + i, BATCH, LENGTH, INPUTS), normal(20 + i, BATCH, LENGTH, INPUTS)) for i in range(5)
]
factored = jax.jit(tables.value_and_grad(loss_of, has_aux=True))
dense = jax.jit(jax.value_and_grad(loss_of, has_aux=True))


def to_dense(gradients):
    is_factored = lambda g: isinstance(g, tables.TableGradient)  # noqa: E731
    return jax.tree.map(
        lambda g: g.to_dense() if is_factored(g) else g, gradients, is_leaf=is_factored
    )


def assert_trees_equal(actual, expected):
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


# ------------------------------------------------------------------------------------- the same as dense


def linear(params, x):
    """Its gradients are exact sums of small integers."""
    weights = lutjax.scale_gradient(params["scaled"]["weights"], 0.25)
    y = lutjax.lut(x, params["weights"], POINTWISE) + lutjax.lut(x, weights, POINTWISE)
    return jnp.vdot(
        y, jnp.round(4 * jnp.cos(jnp.arange(y.size, dtype=jnp.float32))).reshape(y.shape)
    )


def test_outside_of_jit_too():
    params = {"scaled": {"weights": jnp.ones((4, 32, 3))}, "weights": jnp.zeros((4, 32, 3))}
    value, gradients = tables.value_and_grad(linear)(params, normal(0, 5, INPUTS))
    expected = jax.value_and_grad(linear)(params, normal(0, 5, INPUTS))
    assert_trees_equal((value, to_dense(gradients)), expected)
    assert gradients["scaled"]["weights"].nbytes < params["weights"].nbytes
    assert_trees_equal(gradients["weights"].scaled(0.5).to_dense(), 0.5 * expected[1]["weights"])

    def copied(params, x):
        return jnp.sum(lutjax.lut(x, jnp.asarray(params["weights"]), POINTWISE))

    with pytest.raises(tables.TableUseError, match="weights is not looked up by the loss"):
        tables.value_and_grad(copied)({"weights": params["weights"]}, normal(0, 5, INPUTS))


def test_the_number_of_steps_ends_where_int32_does():
    """A schedule then uses the rate for the last counted step, not for a step before the first."""
    optimizer = tables.Optimizer(
        tables.SGD(), lambda step: jnp.where(step < 0, jnp.nan, 0.5), tables={"weights"}
    )
    params, last = {"weights": jnp.ones((1, 2, 3))}, 2**31 - 1
    state = optimizer.init(params)._replace(step=jnp.int32(last - 1))
    for _ in range(2):
        params, state = optimizer.apply(params, {"weights": jnp.ones((1, 2, 3))}, state)
        assert int(state.step) == last
    np.testing.assert_array_equal(params["weights"], 0)


@pytest.mark.parametrize(("rule", "size"), [
    (tables.SGD(), 0),
    (tables.RowAdagrad(), 4),
    (tables.RowMomentum(), 4 * 32),
    (tables.RowAdam(), 8),
    (tables.RowAdam(b1=0.9), 8 + 4 * 32),
], ids=str)  # fmt: skip
def test_bytes_of_state(rule, size):
    assert rule.bytes_per_row(32) == size
    table = jnp.zeros((3, 8, 32), jnp.bfloat16)
    assert sum(a.nbytes for a in rule.init(table).values()) == 3 * 8 * size
    counting = dataclasses.replace(rule, weight_decay=0.1, decay="every")
    assert counting.bytes_per_row(32) == size + 4
    of_tables = 3 * 2 * 4
    assert sum(a.nbytes for a in counting.init(table).values()) == 3 * 8 * (size + 4) + of_tables
    assert dataclasses.replace(rule, decay="every").bytes_per_row(32) == size  # nothing to count


def test_decay_of_every_step_is_refused_where_it_cannot_be_counted():
    rule = tables.SGD(weight_decay=0.1, decay="every")
    params = {"weights": jnp.ones((4, 32, 3))}
    with pytest.raises(
        ValueError, match=r"rates\['weights'\] has shape \[1, 32, 1\].*one factor per table"
    ):
        tables.Optimizer(
            rule, 0.1, rates={"weights": np.ones((1, 32, 1))}, tables={"weights"}
        ).init(params)
    with pytest.raises(
        ValueError, match="decay is 'every'; the rows of a list of edges are touched one by one"
    ):
        tables.Optimizer(rule, 0.1, tables={"edges"}).init({"edges": jnp.ones(5)})
    optimizer = tables.Optimizer(rule, 0.1, tables={"weights"})
    state = optimizer.init(params)
    with pytest.raises(ValueError, match=r"rows names \['bias'\]; the tables are \['weights'\]"):
        optimizer.current(params, state, {"bias": jnp.zeros((1, 4), jnp.int32)})
    with pytest.raises(
        ValueError, match=r"rows\['weights'\] has shape \[4, 1\]; expected ids \[..., 4\]"
    ):
        optimizer.current(params, state, {"weights": jnp.zeros((4, 1), jnp.int32)})
    _, gradients = tables.value_and_grad(
        lambda p: jnp.sum(lutjax.lut(BATCHES[0][0], p["weights"], POINTWISE))
    )(params)
    with pytest.raises(
        ValueError, match=r"rates has shape \[4, 32, 3\].*counts decay once per table"
    ):
        lutjax.update_table(
            params["weights"],
            gradients["weights"],
            0.1,
            rule,
            state.rows["weights"],
            rates=jnp.ones((4, 32, 3)),
        )


# ------------------------------------------------------------------------------------- norms
def norm_of(gradients):
    """Return the norm of the dense gradients, in float64."""
    leaves = jax.tree.leaves(to_dense(gradients))
    return np.sqrt(sum(np.sum(np.square(np.asarray(a, np.float64))) for a in leaves))


def pair_loss(params):
    y = lutjax.lut_pair_attention(BATCHES[0][0], params["weights"], POINTWISE)
    return jnp.vdot(y, BATCHES[0][1][..., :3])


NORMS = {
    "pairs": lambda: tables.value_and_grad(pair_loss)({"weights": jnp.zeros((4, 32, 3))})[1],
    "scaled": lambda: tables.value_and_grad(linear)(
        {"scaled": {"weights": jnp.ones((4, 32, 3))}, "weights": jnp.zeros((4, 32, 3))},
        normal(0, 5, INPUTS),
    )[1],
}


@pytest.mark.parametrize("name", NORMS)
def test_norms_are_those_of_dense_gradients(name):
    gradients = NORMS[name]()
    expected = norm_of(gradients)
    norm = tables.global_norm(gradients)
    np.testing.assert_allclose(norm, expected, rtol=1e-5)
    for limit, after in ((expected / 3, expected / 3), (2 * expected, expected)):
        clipped = jax.jit(tables.clip_by_global_norm)(gradients, limit)
        np.testing.assert_allclose(norm_of(clipped), after, rtol=1e-5)
    pytrees.assert_close(
        "direction",
        to_dense(tables.clip_by_global_norm(gradients, norm / 4)),
        jax.tree.map(lambda g: 0.25 * g, to_dense(gradients)),
        1e-5,
    )


def test_norms_of_dense_gradients_and_of_none():
    gradients = {"a": jnp.array([3.0, 0.0]), "b": jnp.array([[4.0]], jnp.bfloat16)}
    assert tables.global_norm(gradients) == 5
    clipped = tables.clip_by_global_norm(gradients, 2.5)
    assert_trees_equal(clipped, {"a": np.array([1.5, 0.0]), "b": np.array([[2.0]])})
    assert clipped["b"].dtype == jnp.bfloat16
    assert tables.global_norm({}) == 0
    zeros = {"a": jnp.zeros(2)}
    assert_trees_equal(tables.clip_by_global_norm(zeros, 1.0), zeros)
    with pytest.raises(ValueError, match=r"clip_by_global_norm: max_norm is 0; it must be above 0"):
        tables.clip_by_global_norm(zeros, 0)


def test_norms_over_devices():
    x = normal(0, 8, INPUTS)
    params = {"weights": jnp.zeros((4, 32, 3))}

    def loss(params, x):
        return jnp.vdot(lutjax.lut(x, params["weights"], POINTWISE), jnp.cos(x[:, :3]))

    mesh = Mesh(np.array(jax.devices()[:4]), ("batch",))
    everywhere, split = PartitionSpec(), PartitionSpec("batch")
    norm = jax.shard_map(
        lambda params, x: tables.global_norm(tables.value_and_grad(loss)(params, x)[1]),
        mesh=mesh,
        in_specs=(everywhere, split),
        out_specs=everywhere,
    )
    expected = norm_of(jax.grad(loss)(params, x))
    np.testing.assert_allclose(jax.jit(norm)(params, x), expected, rtol=1e-5)


def test_a_norm_needs_no_memory_of_a_table():
    shape = (16, 2**12, 32)
    loss = lambda w, x: jnp.sum(lutjax.lut(x, w["weights"], LARGE_POINTWISE) ** 2)  # noqa: E731
    x = jax.ShapeDtypeStruct((8, 16), jnp.float32)
    gradients = jax.eval_shape(
        tables.value_and_grad(loss), {"weights": jax.ShapeDtypeStruct(shape, jnp.float32)}, x
    )[1]
    memory = jax.jit(tables.global_norm).lower(gradients).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 4 * np.prod(shape) / 50


# ------------------------------------------------------------------------------------- no numbers
PARAMS = {"bias": np.zeros(3, np.float32), "weights": np.zeros((4, 32, 3), np.float32)}
CURE = "use lutjax.optim.Optimizer, optim.global_norm or optim.clip_by_global_norm"


def gradients_of_both(params=PARAMS, x=None):
    x = normal(0, 5, INPUTS) if x is None else x
    return tables.value_and_grad(lambda p, x: look_up(p["weights"], x) + jnp.sum(p["bias"]))(
        params, x
    )[1]


def updated_by(name, *args):
    def update(gradients):
        optimizer = getattr(optax, name)(*args)
        return optimizer.update(gradients, optimizer.init(PARAMS), PARAMS)[0]

    return update


WALKS = {
    "global_norm": lambda g: optax.tree.norm(g),
    "clip": updated_by("clip_by_global_norm", 1.0),
    "momentum": updated_by("sgd", 0.1, 0.9),
    "adam": updated_by("adam", 0.1),
    "apply_updates": lambda g: optax.apply_updates(PARAMS, g),
    "train state": lambda g: train_state.TrainState.create(
        apply_fn=None, params=PARAMS, tx=optax.sgd(0.1)
    ).apply_gradients(grads=g),
    "sum": lambda g: jax.tree.map(jnp.add, g, g),
    "mean": lambda g: jax.tree.map(lambda a: a / 2, g),
    "step by hand": lambda g: jax.tree.map(lambda p, g: p - 0.1 * g, PARAMS, g),
    "norm by hand": lambda g: sum(jnp.sum(jnp.square(a)) for a in jax.tree.leaves(g)),
    "vector": lambda g: jax.flatten_util.ravel_pytree(g)[0],
    "cast": lambda g: jnp.asarray(g["weights"], jnp.float32),
    "cast by NumPy": lambda g: np.asarray(g["weights"]),
    "key": lambda g: jax.random.bits(g["weights"].sealed[0, 0]),
}


@pytest.mark.parametrize("name", WALKS)
def test_factors_are_no_numbers(name):
    for walk in (WALKS[name], jax.jit(WALKS[name])):
        with jax.numpy_dtype_promotion("standard"), pytest.raises(TypeError, match=CURE):
            walk(gradients_of_both())


X8 = normal(0, 8, INPUTS)
IN_PARTS = X8.reshape(2, 4, INPUTS)


def over_batch():
    return Mesh(np.array(jax.devices()[:4]), ("batch",))


def sum_of_parts(gradients):
    return jax.tree.map(lambda a: a.sum(0), jax.vmap(to_dense)(gradients))


PASSED_ON = {
    "jit": lambda p: jax.jit(lambda g: g)(jax.jit(gradients_of_both)(p, X8)),
    "vmap": lambda p: jax.vmap(gradients_of_both, (None, 0))(p, IN_PARTS),
    "scan": lambda p: jax.lax.scan(lambda c, x: (c, gradients_of_both(p, x)), None, IN_PARTS)[1],
    "carry": lambda p: jax.lax.scan(lambda c, x: (gradients_of_both(p, X8), None),
        jax.tree.map(jnp.zeros_like, gradients_of_both(p, X8)), None, length=1)[0],
    "remat": lambda p: jax.checkpoint(gradients_of_both)(p, X8),
    "export": lambda p: jax.export.export(jax.jit(gradients_of_both),
        disabled_checks=_ahead_of_time.KERNELS)(p, X8).call(p, X8),
    "everywhere": lambda p: jax.device_put(jax.jit(gradients_of_both)(p, X8),
        NamedSharding(over_batch(), PartitionSpec())),
}  # fmt: skip


@pytest.mark.parametrize("name", slow_except(PASSED_ON, "vmap", "scan", "export"))
def test_factors_are_passed_on(name):
    params = {"bias": jnp.zeros(3), "weights": normal(3, 4, 32, 3)}
    gradients = PASSED_ON[name](params)
    dense = sum_of_parts(gradients) if name in ("vmap", "scan") else to_dense(gradients)
    expected = jax.grad(lambda p: look_up(p["weights"], X8) + 0 * jnp.sum(p["bias"]))(params)
    assert_close(name, dense["weights"], expected["weights"], 1e-6)


@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "float16"])
def test_cotangents_are_kept_bit_for_bit(dtype):
    with jax.enable_x64(dtype == "float64"):
        x, weights = normal(0, 5, INPUTS), jnp.zeros((4, 32, 3), dtype)
        ct = jnp.asarray([[1 / 3, -0.0, np.inf], [np.nan, 1e-3, 7]] * 2 + [[0, 1, 2]], dtype)

        def loss(params):
            return jnp.sum(lutjax.lut(x, params["weights"], POINTWISE) * ct)

        gradient = jax.jit(tables.value_and_grad(loss))({"weights": weights})[1]["weights"]
        assert gradient.cotangent.dtype == dtype
        np.testing.assert_array_equal(
            np.asarray(gradient.cotangent).tobytes(), np.asarray(ct).tobytes()
        )
        shapes = jax.eval_shape(lambda g: g, gradient)
        assert (shapes.cotangent.shape, shapes.cotangent.dtype) == (ct.shape, ct.dtype)
        assert gradient.nbytes == shapes.nbytes
        assert repr(gradient) == f"TableGradient of lookup, for a table {dtype}[4, 32, 3]"


# ------------------------------------------------------------------------------------- fixed point


# ------------------------------------------------------------------------------------- memory
LARGE = {
    "attention": {"weights": (8, 2**12, 16), "positions": (7, 1, 2)},
    "pointwise": {"weights": (16, 2**12, 32)},
}
LARGE_BYTES = 4 * (8 * 2**12 * 16 + 16 * 2**12 * 32)
LARGE_PAIRS, LARGE_POINTWISE = anchors_of(8, 8, 5), anchors_of(16, 16, 12)


def temporary_bytes(optimizer, value_and_grad, *, form="step"):
    """Return the bytes required by a jitted step in addition to its donated arguments."""

    def loss(params, x):
        attention = params["attention"]
        z = lutjax.lut_attention(x, attention["weights"], LARGE_PAIRS, attention["positions"])
        return jnp.mean((lutjax.lut(z, params["pointwise"]["weights"], LARGE_POINTWISE) - 1) ** 2)

    def step(params, state, x):
        _, gradients = value_and_grad(loss)(params, x)
        if form == "sharded":
            gradients = jax.lax.with_sharding_constraint(gradients, everywhere)
        return optimizer.apply(params, gradients, state)

    def steps(params, state, x):
        return jax.lax.fori_loop(
            0, x[0, 0, 0].astype(jnp.int32), lambda _, ps: step(*ps, x), (params, state)
        )

    mesh = Mesh(np.array(jax.devices()[: 4 if form == "sharded" else 1]), ("batch",))
    everywhere, split = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in ((), ("batch",)))
    params = jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(s, jnp.float32),
        LARGE,
        is_leaf=lambda s: isinstance(s, tuple),
    )
    state = jax.eval_shape(optimizer.init, params)
    x = jax.ShapeDtypeStruct((4, 8, 8), jnp.float32)
    jitted = jax.jit(
        steps if form == "loop" else step,
        donate_argnums=(0, 1),
        in_shardings=(everywhere, everywhere, split),
        out_shardings=everywhere,
    )
    memory = jitted.lower(params, state, x).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= LARGE_BYTES
    return memory.temp_size_in_bytes


FORMS = [
    pytest.param(tables.RowAdagrad(), "loop", id="loop"),
    pytest.param(tables.SGD(weight_decay=0.1, decay="every"), "loop", id="decay"),
    pytest.param(
        tables.SGD(), "sharded", id="sharded"
    ),  # adds up whole tables if gradients are not asked for everywhere
]


@pytest.mark.parametrize(("rule", "form"), slow_except(FORMS, "loop"))
def test_a_step_copies_no_table(rule, form):
    temporary = temporary_bytes(
        tables.Optimizer(rule, 0.1, tables=called_weights), tables.value_and_grad, form=form
    )
    assert temporary < LARGE_BYTES / 20


def test_a_dense_step_needs_the_memory_of_the_tables():
    """Show that the test above can fail."""
    assert (
        temporary_bytes(
            tables.Optimizer(tables.SGD(), 0.1, tables=called_weights), jax.value_and_grad
        )
        >= LARGE_BYTES
    )


# ------------------------------------------------------------------------------------- errors
X = normal(0, 5, INPUTS)
TABLE = {"weights": np.zeros((4, 32, 3), np.float32)}


def look_up(weights, x=X):
    return jnp.sum(lutjax.lut(x, weights, POINTWISE))


def in_scan(p):
    return jax.lax.scan(
        lambda total, x: (total + look_up(p["weights"], x), None), jnp.float32(0), X
    )[0]


NOT_LOOKED_UP = "the table weights is not looked up by the loss: it is unused"
ANOTHER = "the table weights is not looked up by the loss, but another array with its shape is, as after a cast"
ARGUMENT = r"the table weights is an argument of a jit, vmap, scan, checkpoint \(nnx.remat\) or shard_map within the loss"
INSIDE = (
    r"the table weights is used inside a jit, vmap, scan, checkpoint or shard_map within the loss"
)
LOSSES = {
    "twice": (lambda p: 2 * look_up(p["weights"]) + look_up(p["weights"], X + 1),
        "looked up twice in the loss"),
    "frozen": (lambda p: look_up(jax.lax.stop_gradient(p["weights"])), ANOTHER),
    "unused": (lambda p: jnp.float32(0), NOT_LOOKED_UP),
    "cast": (lambda p: look_up(p["weights"].astype(jnp.bfloat16)).astype(jnp.float32), ANOTHER),
    "indexed": (lambda p: look_up(p["weights"][...] * 1), ANOTHER),
    "part": (lambda p: jnp.sum(lutjax.lut(X, p["weights"][:2], POINTWISE[:2])), NOT_LOOKED_UP),
    "penalty": (lambda p: look_up(p["weights"]) + jnp.sum(p["weights"] ** 2), "outside of its lookup as well"),
    "jit": (lambda p: jax.jit(lambda x: look_up(p["weights"], x))(X), INSIDE),
    "jit of it": (lambda p: jax.jit(look_up)(p["weights"]), ARGUMENT),
    "vmap": (lambda p: jnp.sum(jax.vmap(lambda x: look_up(p["weights"], x))(X)), INSIDE),
    "scan": (in_scan, INSIDE),
    "checkpoint": (lambda p: jax.checkpoint(lambda x: look_up(p["weights"], x))(X), INSIDE),
    "vmap of it": (lambda p: jnp.sum(jax.vmap(look_up)(jnp.stack([p["weights"]] * 2))), ARGUMENT),
    "checkpoint of it": (lambda p: jax.checkpoint(look_up)(p["weights"]), ARGUMENT),
}  # fmt: skip


@pytest.mark.parametrize("name", LOSSES)
def test_losses_without_a_factored_gradient(name):
    loss, message = LOSSES[name]
    with pytest.raises(tables.TableUseError, match=message):
        jax.eval_shape(tables.value_and_grad(loss, tables={"weights"}), TABLE)
    # As the message says, such a table can have a dense gradient. It has one by default where the loss looks up another array.
    dense = tables.value_and_grad(loss, tables=())
    assert jax.eval_shape(dense, TABLE)[1]["weights"].shape == (4, 32, 3)
    if message in (NOT_LOOKED_UP, ANOTHER, ARGUMENT):
        assert jax.eval_shape(tables.value_and_grad(loss), TABLE)[1]["weights"].dtype == jnp.float32
    else:
        with pytest.raises(tables.TableUseError, match=message):
            jax.eval_shape(tables.value_and_grad(loss), TABLE)


def test_states_and_gradients_of_others_are_refused():
    optimizer = tables.Optimizer(tables.RowAdagrad(), 0.1, tables={"weights"})
    params = {**TABLE, "bias": jnp.zeros(3)}
    _, gradients = tables.value_and_grad(lambda p: look_up(p["weights"]) + jnp.sum(p["bias"]))(
        params
    )
    state = optimizer.init(params)
    of_adam = dataclasses.replace(optimizer, rule=tables.RowAdam()).init(params)
    of_another_size = optimizer.init({**params, "weights": jnp.zeros((4, 16, 3))})
    for bad, message in (
        (of_adam, r"the state has count .*RowAdagrad\(.*needs sum_of_squares float32\[4, 32, 1\]"),
        (of_another_size, r"sum_of_squares float32\[4, 16, 1\].*Use rule.init\(weights\)"),
        (
            state._replace(rows={}),
            r"the state has rows for the tables \[\]; the parameters have \['weights'\]",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            optimizer.apply(params, gradients, bad)
    with pytest.raises(ValueError, match="the gradients have the structure"):
        optimizer.apply(params, {"weights": gradients["weights"]}, state)
    with pytest.raises(TypeError, match="not a table has a sparse gradient"):
        optimizer.apply(
            params, {"bias": gradients["weights"], "weights": gradients["weights"]}, state
        )
    with pytest.raises(ValueError, match=r"rates names \['bias'\]; the tables are \['weights'\]"):
        tables.Optimizer(tables.SGD(), 0.1, rates={"bias": 1.0}, tables={"weights"}).init(params)
    with pytest.raises(ValueError, match=r"rates names \['weights'\]; the tables are none"):
        tables.Optimizer(tables.SGD(), 0.1, rates={"weights": 1.0}, tables=called_weights).init(
            {"bias": params["bias"]}
        )
    with pytest.raises(TypeError, match=r"normalized: a gradient is a TableGradient"):
        tables.normalized().update(gradients, None)
    with pytest.raises(ValueError, match=r"gradient belongs to a table float32\[4, 32, 3\]"):
        lutjax.update_table(jnp.zeros((4, 16, 3)), gradients["weights"], 0.1)
    with pytest.raises(ValueError, match=r"gradient belongs to a table float32"):
        lutjax.update_table(params["weights"].astype(jnp.bfloat16), gradients["weights"], 0.1)
    with pytest.raises(ValueError, match="the state has no arrays at all"):
        lutjax.update_table(params["weights"], gradients["weights"], 0.1, tables.RowAdagrad())
    # Nothing has happened to them.
    after, _ = optimizer.apply(params, gradients, state)
    assert np.any(after["weights"])


@pytest.mark.usefixtures("without_typechecking")
def test_update_table_takes_factored_gradients_only():
    with pytest.raises(TypeError, match=r"update_table: gradient is .*expected a TableGradient"):
        lutjax.update_table(TABLE["weights"], TABLE["weights"], 0.1)


def test_forms_of_results_of_microbatches():
    for aux, expected in ((1.0, (2,)), (None, None)):
        gradient = tables.value_and_grad(
            lambda p, x, aux=aux: (look_up(p["weights"], x), aux), has_aux=True
        )
        (value, of_parts), _ = jax.eval_shape(tables.microbatched(gradient, 2), TABLE, X[:4])
        assert value.shape == ()
        assert (of_parts if aux is None else of_parts.shape) == expected


def test_batches_that_cannot_be_divided():
    parts = tables.microbatched(tables.value_and_grad(lambda p, x: look_up(p["weights"], x)), 2)
    assert jax.eval_shape(parts, TABLE, X[:4])[0].shape == ()
    with pytest.raises(ValueError, match=r"shape \[5, 6\]; its first axis must be a multiple of 2"):
        parts(TABLE, X)
    with pytest.raises(ValueError, match=r"shape \[\]; its first axis"):
        parts(TABLE, {"x": X[:4], "scale": jnp.float32(1)})


@pytest.mark.usefixtures("without_typechecking")
@pytest.mark.parametrize(("rule", "options", "message"), [
    (tables.SGD, {"weight_decay": -0.1}, "SGD: weight_decay is -0.1; it must not be negative"),
    (tables.SGD, {"weight_decay": "x"}, "SGD: weight_decay is 'x'; expected a finite number"),
    (tables.SGD, {"weight_decay": None}, "SGD: weight_decay is None; expected a finite number"),
    (tables.SGD, {"decay": "lazy"}, "SGD: decay is 'lazy'; expected 'read' or 'every'"),
    (tables.RowAdam, {"eps": float("nan")}, "RowAdam: eps is nan; expected a finite number"),
    (tables.RowMomentum, {"momentum": 1.0}, r"RowMomentum: momentum is 1.0; 0 <= momentum < 1"),
    (tables.RowAdam, {"b1": -0.1}, "RowAdam: b1 is -0.1; 0 <= b1 < 1"),
    (tables.RowAdam, {"b2": 1.0}, "RowAdam: b2 is 1.0; 0 <= b2 < 1"),
    (tables.RowAdam, {"eps": 0.0}, "RowAdam: eps is 0.0; it must be above 0"),
    (tables.RowAdagrad, {"eps": 0.0}, "RowAdagrad: eps is 0.0; it must be above 0"),
])  # fmt: skip
def test_parameters_of_rules_out_of_range(rule, options, message):
    with pytest.raises(ValueError, match=message):
        rule(**options)


def test_normalized_gradients():
    updates, _ = tables.normalized().update(
        {"w": jnp.array([-4.0, 1.0]), "zero": jnp.zeros(2)}, None
    )
    assert_trees_equal(
        updates, {"w": np.array([-1, 0.25], np.float32), "zero": np.zeros(2, np.float32)}
    )
    optimizer = optax.chain(tables.normalized(), optax.sgd(0.5))
    updates, _ = optimizer.update(jnp.array([8.0, 2.0]), optimizer.init(jnp.zeros(2)))
    assert_trees_equal(updates, np.array([-0.5, -0.125], np.float32))


@pytest.mark.usefixtures("without_typechecking")
@pytest.mark.parametrize(("wrong", "message"), [
    (lambda: tables.Optimizer("adam", 0.1), "rule is 'adam'; expected a row rule"),
    (lambda: tables.Optimizer(tables.RowAdam, 0.1), "rule is .*; expected a row rule"),
    (lambda: tables.Optimizer(tables.SGD(), "0.1"), "rate is '0.1'; expected a number or a schedule"),
    (lambda: tables.Optimizer(tables.SGD(), float("nan")), "rate is nan; expected a number or a schedule"),
    (lambda: tables.Optimizer(tables.SGD(), 0.1, rest="sgd"),
     "rest is 'sgd'; expected an Optax optimizer"),
    (lambda: tables.Optimizer(tables.SGD(), 0.1, tables="weights"),
     "Optimizer: tables is 'weights'; expected parameter names"),
    (lambda: tables.value_and_grad(look_up, tables=True),
     "value_and_grad: tables is True; expected parameter names"),
    (lambda: tables.clip_by_global_norm({}, "1"), "max_norm is '1'; expected a number"),
    (lambda: tables.microbatched(lambda *_: None, 0), "count is 0; it must be at least 1"),
    (lambda: lutjax.sharding.specs({}, "mesh"), "mesh is 'mesh'; expected a jax.sharding.Mesh"),
])  # fmt: skip
def test_arguments_of_another_kind(wrong, message):
    with pytest.raises((TypeError, ValueError), match=message):
        wrong()
