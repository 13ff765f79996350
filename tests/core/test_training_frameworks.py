"""Flax model tables: NNX and Linen helpers match the models' own training with dense gradients."""

import dataclasses

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from jax.sharding import AbstractMesh, PartitionSpec

import lutjax
from lutjax import optim as parameters, optim as tables, sharding
from lutjax.layers import haiku as haiku_layers, linen as linen_layers, nnx as nnx_layers
from lutjax.optim import linen as linen_training, nnx as nnx_training
from lutjax.testing import assert_close

FEATURES = 6
SIZES = {"n_detectors": 4, "n_anchors": 3, "weights_init": jax.nn.initializers.normal(1.0)}
X = np.random.default_rng(0).normal(size=(8, FEATURES)).astype(np.float32)


# ------------------------------------------------------------------------------------- NNX


@pytest.mark.parametrize("jitted", [False, True])
def test_flax_own_optimizer_refuses_factors(jitted):
    model = nnx_layers.LUT(FEATURES, 3, rngs=nnx.Rngs(0), **SIZES)
    optimizer = nnx.Optimizer(model, optax.sgd(0.5), wrt=nnx.Param)

    def step(model, optimizer):
        _, gradients = nnx_training.value_and_grad(lambda model: jnp.mean(model(X)))(model)
        optimizer.update(model, gradients)

    with pytest.raises(TypeError, match=r"lutjax\.optim\.Optimizer"):
        (nnx.jit(step) if jitted else step)(model, optimizer)


class Indexed(nnx_layers.LUT):
    def _arrays(self):
        return {**super()._arrays(), "weights": self.weights[...] * 1}


def test_nnx_errors_change_nothing():
    model = nnx_layers.LUT(FEATURES, 3, rngs=nnx.Rngs(0), **SIZES)
    optimizer = nnx_training.Optimizer(model, tables.Optimizer(tables.RowAdagrad(), 0.5))
    before = nnx.to_pure_dict(nnx.state((model, optimizer)))
    _, gradients = nnx_training.value_and_grad(lambda model: jnp.mean(model(X)))(model)
    with pytest.raises(ValueError, match="the gradients have the structure"):
        optimizer.update(model, {"layer": gradients})
    indexed = Indexed(FEATURES, 3, rngs=nnx.Rngs(0), **SIZES)
    with pytest.raises(
        tables.TableUseError, match=r"weights is not looked up .*in NNX `variable.get_value\(\)`"
    ):
        nnx_training.value_and_grad(lambda model: jnp.mean(model(X)))(indexed)
    jax.tree.map(
        np.testing.assert_array_equal, nnx.to_pure_dict(nnx.state((model, optimizer))), before
    )
    optimizer.update(model, gradients)
    assert np.any(optimizer.state.rows["weights"]["sum_of_squares"][...])


def test_nnx_and_linen_take_the_decay_of_skipped_steps():
    rule = tables.SGD(weight_decay=0.5, decay="every")
    model = nnx_layers.LUT(FEATURES, 3, rngs=nnx.Rngs(0), **SIZES)
    optimizer = nnx_training.Optimizer(model, tables.Optimizer(rule, 1.0))
    before = np.asarray(model.weights[...])
    for x in (X[:1], X[1:2]):
        _, gradients = nnx_training.value_and_grad(lambda model, x: 0 * jnp.sum(model(x)))(model, x)
        optimizer.update(model, gradients)
    assert not np.array_equal(model.weights[...], before / 4)
    optimizer.current(model)
    np.testing.assert_allclose(model.weights[...], before / 4, rtol=1e-6)
    params = {"weights": jnp.asarray(before)}
    tx = tables.Optimizer(rule, 1.0, tables={"weights"})
    state = linen_training.TrainState.create(apply_fn=model, params=params, tx=tx)
    state = state.apply_gradients(grads={"weights": jnp.zeros_like(before)})  # no row is read
    np.testing.assert_array_equal(state.params["weights"], before)
    np.testing.assert_allclose(state.current().params["weights"], before / 2, rtol=1e-6)


# ------------------------------------------------------------------------------------- Linen


# ------------------------------------------------------------------------------------- who says what a table is
NORMAL = jax.nn.initializers.normal(1.0)


class NnxOwn(nnx.Module):
    """Has its own `weights` with three axes, a layer deep inside, and a table with another name."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.weights = nnx.Param(NORMAL(rngs.params(), (2, FEATURES, 3)))
        self.blocks = nnx.List(
            [nnx.Sequential(nnx_layers.LUT(FEATURES, FEATURES, rngs=rngs, **SIZES))]
        )
        self.memory = nnx_layers.Tables(NORMAL(rngs.params(), (4, 2**3, FEATURES)))
        self.anchors = nnx_layers.Anchors(jnp.asarray(ANCHORS))

    def __call__(self, x):
        x = self.blocks[0](x) + lutjax.lut(x, self.memory.get_value(), self.anchors[...])
        return jnp.einsum("bi,hio->bo", x, self.weights[...])


class LinenOwn(linen.Module):
    @linen.compact
    def __call__(self, x, unused: bool = True):
        x = linen.Sequential([linen_layers.LUT(FEATURES, FEATURES, **SIZES)])(x)
        weights = self.param("weights", NORMAL, (2, FEATURES, 3))
        return jnp.einsum("bi,hio->bo", x, weights)


def haiku_own(x):
    x = hk.Sequential([haiku_layers.LUT(FEATURES, FEATURES, **SIZES)])(x)
    weights = hk.get_parameter(
        "weights", (2, FEATURES, 3), init=lambda *_: jnp.ones((2, FEATURES, 3))
    )
    return jnp.einsum("bi,hio->bo", x, weights)


ANCHORS = np.array([[[0, 1], [2, 3], [4, 5]]] * 4)
RULE = tables.Optimizer(tables.RowMomentum(), 0.5, rest=optax.sgd(0.25))


def of_linen():
    model = LinenOwn()
    others = model.init(jax.random.key(0), X)
    names = linen_layers.tables_of(model.init, jax.random.key(0), X, unused=False)
    params = others.pop("params")
    return params, lambda p: jnp.mean(model.apply({"params": p, **others}, X) ** 2), names


def of_haiku():
    model = hk.transform_with_state(haiku_own)
    params, state = model.init(jax.random.key(0), X)
    names = haiku_layers.tables_of(
        jax.jit(model.init), jax.random.key(0), X
    )  # jitted: it is asked all the same
    return params, lambda p: jnp.mean(model.apply(p, state, None, X)[0] ** 2), names


OWN = {
    "linen": (of_linen, "weights", "LUT_0/weights"),
    "haiku": (of_haiku, "~/weights", "lut/weights"),
}


def leaf(tree, name):
    result = jax.tree_util.tree_leaves_with_path(
        tree, is_leaf=lambda g: isinstance(g, tables.TableGradient)
    )
    return {jax.tree_util.keystr(path, simple=True, separator="/"): a for path, a in result}[name]


@pytest.mark.parametrize("library", OWN)
def test_layers_say_what_is_a_table(library):
    make, own, table = OWN[library]
    params, loss, names = make()
    assert names == {table}
    optimizer = dataclasses.replace(RULE, tables=names)
    state = optimizer.init(params)
    assert set(state.rows) == {table}
    for chosen in (names, None):
        _, gradients = tables.value_and_grad(loss, tables=chosen)(params)
        assert isinstance(leaf(gradients, table), tables.TableGradient)
        assert leaf(gradients, own).shape == (2, FEATURES, 3)
    moved, _ = optimizer.apply(params, gradients, state)
    of_own = leaf(jax.grad(loss)(params), own)
    assert np.any(of_own)
    assert_close("own", leaf(moved, own), leaf(params, own) - 0.25 * of_own)
    assert np.any(leaf(moved, table) != leaf(params, table))
    assert {leaf(parameters.kinds(params, names), n) for n in (own, table)} == {"matrix", "table"}
    assert leaf(parameters.decayed(params, names), own)
    specs = sharding.specs(
        params, AbstractMesh((4,), ("detectors",)), tables=names
    )  # 2 are not divided by 4
    assert leaf(specs, own) == PartitionSpec()
    assert leaf(specs, table) == PartitionSpec("detectors", None, None)


def test_nnx_layers_say_what_is_a_table():
    model, same = NnxOwn(), NnxOwn()
    names = nnx_layers.tables_of(model)
    assert names == {"blocks/0/layers/0/weights", "memory"}
    loss = lambda model: jnp.mean(model(X) ** 2)  # noqa: E731
    optimizer = nnx_training.Optimizer(model, RULE)
    assert set(optimizer.state.rows) == optimizer.tx.tables == names
    _, gradients = nnx_training.value_and_grad(loss)(model)
    assert isinstance(gradients["memory"], tables.TableGradient)
    optimizer.update(model, gradients)
    want = same.weights[...] - 0.25 * nnx.grad(loss)(same).weights[...]
    assert np.any(want != same.weights[...])
    assert_close("own", model.weights[...], want)
    kinds = parameters.kinds(nnx.to_pure_dict(nnx.state(model, nnx.Param)), names)
    assert (kinds["weights"], kinds["memory"]) == ("matrix", "table")


def test_tables_of_stacked_blocks():
    scanned = linen.scan(
        lambda mdl, x, _: (linen_layers.LUT(FEATURES, FEATURES, **SIZES, name="lut")(x), None),
        variable_axes={"params": 0, "anchors": 0},
        split_rngs={"params": True},
        length=2,
    )

    class Stacked(linen.Module):
        @linen.compact
        def __call__(self, x):
            return scanned(self, x, None)[0]

    x = jax.ShapeDtypeStruct(X.shape, X.dtype)
    names = linen_layers.tables_of(Stacked().init, jax.random.key(0), x)
    params = jax.eval_shape(Stacked().init, jax.random.key(0), x)["params"]
    assert names == {"lut/weights"}
    assert params["lut"]["weights"].shape == (2, 4, 8, FEATURES)


def test_nobody_who_says_what_is_a_table():
    with pytest.raises(ValueError, match="tables_of: init runs no lutjax layer"):
        linen_layers.tables_of(linen.Dense(2).init, jax.random.key(0), X)
    with pytest.raises(ValueError, match=r"the tables are unknown\. Give their names as tables="):
        RULE.init({"weights": jnp.zeros((2, 4, 3))})
    with pytest.raises(
        ValueError, match=r"tables has \['other'\]; the parameters are \['weights'\]"
    ):
        dataclasses.replace(RULE, tables={"other"}).init({"weights": jnp.zeros((2, 4, 3))})


def test_a_layer_under_nnx_remat_is_named_as_the_cause():
    class Block(nnx.Module):
        def __init__(self, rngs):
            self.layer = nnx_layers.LUT(FEATURES, 5, n_detectors=4, n_anchors=3, rngs=rngs)

        @nnx.remat
        def __call__(self, x):
            return self.layer(x)

    with pytest.raises(
        ValueError, match=r"^the table layer/weights is an argument of a jit, .*\(nnx\.remat\)"
    ):
        nnx_training.value_and_grad(lambda model: jnp.mean(model(X)))(Block(nnx.Rngs(0)))
