"""Training Flax models with table optimizers equals their own training with dense gradients."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import pytrees
from flax import linen, nnx
from flax.training import train_state

from lutjax import optim as tables
from lutjax.layers import linen as linen_layers, nnx as nnx_layers
from lutjax.optim import linen as linen_training, nnx as nnx_training

FEATURES = 6


SIZES = {"n_detectors": 4, "n_anchors": 3, "weights_init": jax.nn.initializers.normal(1.0)}


X = np.random.default_rng(0).normal(size=(8, FEATURES)).astype(np.float32)


TX = tables.Optimizer(tables.SGD(), 0.5, rest=optax.sgd(0.5), rates={"last/weights": 1.0})


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
        pytrees.assert_close("step", result, dense_step(expected, of_dense, X))
    # Parameters, and what the losses have changed beside: statistics of the norm, counts of the draws.
    pytrees.assert_close(
        "step", nnx.to_pure_dict(nnx.state(model)), nnx.to_pure_dict(nnx.state(expected))
    )
    assert np.any(model.norm.mean[...])
    assert int(model.dropout.rngs.count[...]) > 0
    assert isinstance(optimizer.state, tables.OptimizerState)
    assert int(optimizer.state.step[...]) == 2


class LinenModel(linen.Module):
    @linen.compact
    def __call__(self, x):
        x = linen_layers.LUT(FEATURES, FEATURES, **SIZES, name="first")(x)
        x = linen.BatchNorm(use_running_average=False)(x)
        return linen_layers.LUT(FEATURES, 3, **SIZES, name="last")(x)


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
        tx=dataclasses.replace(TX, tables=linen_layers.tables_of(model.init, jax.random.key(0), X)),
    )
    first = state
    for _ in range(2):
        expected, others, value_of_dense = dense_step(expected, others, X)
        state, value = factored_step(state, X)
        pytrees.assert_close("step", value, value_of_dense)
    pytrees.assert_close("step", (state.params, state.others), (expected.params, others))
    assert state.step == 2
    assert first.params["last"]["weights"].is_deleted()
    with pytest.raises(ValueError, match="the gradients have the structure"):
        state.apply_gradients(grads={})
    with pytest.raises(ValueError, match=r"rates names \['last/weights'\]"):
        linen_training.TrainState.create(
            apply_fn=model.apply, params={}, tx=dataclasses.replace(TX, tables=())
        )
