"""Tables of Flax models: NNX and Linen helpers give what their own training gives with dense gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from flax.training import train_state

from lutjax.layers import linen as linen_layers, nnx as nnx_layers
from lutjax.testing import assert_close
from lutjax.training import linen as linen_training, nnx as nnx_training, tables

FEATURES = 6
SIZES = {"n_detectors": 4, "n_anchors": 3, "weights_init": jax.nn.initializers.normal(1.0)}
X = np.random.default_rng(0).normal(size=(8, FEATURES)).astype(np.float32)
TX = tables.Optimizer(tables.SGD(), 0.5, rest=optax.sgd(0.5), rates={"last/weights": 1.0})


def assert_trees_close(actual, expected):
    actual, expected = (jax.tree_util.tree_leaves_with_path(t) for t in (actual, expected))
    for (path, a), (other, e) in zip(actual, expected, strict=True):
        assert path == other
        a, e = (jax.random.key_data(k) if jnp.issubdtype(k.dtype, jax.dtypes.prng_key) else k for k in (a, e))
        assert_close(jax.tree_util.keystr(path), a, e)


# ------------------------------------------------------------------------------------- NNX
class Model(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.first = nnx_layers.LUT(FEATURES, FEATURES, rngs=rngs, dtype=jnp.float32, **SIZES)
        self.norm = nnx.BatchNorm(FEATURES, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.last = nnx_layers.LUT(FEATURES, 3, rngs=rngs, **SIZES)

    def __call__(self, x):
        return self.last(self.dropout(self.norm(self.first(x))))


def nnx_loss(model, x):
    y = model(x)
    return jnp.mean((y - 1) ** 2), y


@pytest.mark.thorough
def test_nnx_equals_its_own_training_with_dense_gradients():
    model, expected = Model(), Model()
    optimizer, of_dense = (
        nnx_training.Optimizer(model, TX),
        nnx.Optimizer(expected, optax.sgd(0.5), wrt=nnx.Param),
    )

    @nnx.jit(donate_argnums=(0, 1))
    def step(model, optimizer, x):
        result, gradients = nnx_training.value_and_grad(nnx_loss, has_aux=True)(model, x)
        optimizer.update(model, gradients)
        is_table = lambda g: isinstance(g, tables.TableGradient)  # noqa: E731
        return result, sum(map(is_table, jax.tree.leaves(gradients, is_leaf=is_table)))

    @nnx.jit
    def dense_step(model, optimizer, x):
        result, gradients = nnx.value_and_grad(nnx_loss, has_aux=True)(model, x)
        optimizer.update(model, gradients)
        return result

    for _ in range(2):
        result, n_tables = step(model, optimizer, X)
        assert n_tables == 2
        assert_trees_close(result, dense_step(expected, of_dense, X))
    # Parameters, and what the losses have changed beside: statistics of the norm, counts of the draws.
    assert_trees_close(nnx.to_pure_dict(nnx.state(model)), nnx.to_pure_dict(nnx.state(expected)))
    assert np.any(model.norm.mean[...])
    assert int(model.dropout.rngs.count[...]) > 0
    assert isinstance(optimizer.state, tables.OptimizerState)
    assert int(optimizer.state.step[...]) == 2


@pytest.mark.fast("False")
@pytest.mark.parametrize("jitted", [False, True])
def test_flax_own_optimizer_refuses_factors(jitted):
    model = nnx_layers.LUT(FEATURES, 3, rngs=nnx.Rngs(0), **SIZES)
    optimizer = nnx.Optimizer(model, optax.sgd(0.5), wrt=nnx.Param)

    def step(model, optimizer):
        _, gradients = nnx_training.value_and_grad(lambda model: jnp.mean(model(X)))(model)
        optimizer.update(model, gradients)

    with pytest.raises(TypeError, match=r"lutjax\.training\.tables\.Optimizer"):
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
        tables.TableUseError, match=r"weights is not looked up .*use `variable.get_value\(\)`"
    ):
        nnx_training.value_and_grad(lambda model: jnp.mean(model(X)))(indexed)
    jax.tree.map(np.testing.assert_array_equal, nnx.to_pure_dict(nnx.state((model, optimizer))), before)
    optimizer.update(model, gradients)
    assert np.any(optimizer.state.rows["weights"]["sum_of_squares"][...])


# ------------------------------------------------------------------------------------- Linen
class LinenModel(linen.Module):
    @linen.compact
    def __call__(self, x):
        x = linen_layers.LUT(FEATURES, FEATURES, **SIZES, name="first")(x)
        x = linen.BatchNorm(use_running_average=False)(x)
        return linen_layers.LUT(FEATURES, 3, **SIZES, name="last")(x)


@pytest.mark.slow
def test_linen_equals_its_own_training_with_dense_gradients():
    model = LinenModel()
    others = model.init(jax.random.key(0), X)
    params = others.pop("params")

    def step(state, others, value_and_grad, x):
        def loss(params):
            y, changed = state.apply_fn({"params": params, **others}, x, mutable=["batch_stats"])
            return jnp.mean((y - 1) ** 2), {**others, **changed}

        (value, others), gradients = value_and_grad(loss, has_aux=True)(state.params)
        return state, value, others, gradients

    @jax.jit
    def dense_step(state, others, x):
        state, value, others, gradients = step(state, others, jax.value_and_grad, x)
        return state.apply_gradients(grads=gradients), others, value

    @jax.jit(donate_argnums=0)
    def factored_step(state, x):
        state, value, others, gradients = step(state, state.others, tables.value_and_grad, x)
        return state.apply_gradients(grads=gradients, others=others), value

    expected = train_state.TrainState.create(apply_fn=model.apply, params=params, tx=optax.sgd(0.5))
    state = linen_training.TrainState.create(
        apply_fn=model.apply,
        params=jax.tree.map(jnp.copy, params),
        others=jax.tree.map(jnp.copy, others),
        tx=TX,
    )
    first = state
    for _ in range(2):
        expected, others, value_of_dense = dense_step(expected, others, X)
        state, value = factored_step(state, X)
        assert_trees_close(value, value_of_dense)
    assert_trees_close((state.params, state.others), (expected.params, others))
    assert state.step == 2
    assert first.params["last"]["weights"].is_deleted()
    with pytest.raises(ValueError, match="the gradients have the structure"):
        state.apply_gradients(grads={})
    with pytest.raises(ValueError, match=r"rates names \['last/weights'\]"):
        linen_training.TrainState.create(apply_fn=model.apply, params={}, tx=TX)
