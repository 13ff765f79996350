"""Gradients of tables in factors, and updates by them, against dense ones and the definitions, on drawn models."""

from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import slow_except
from flax import nnx
from hypothesis import given

import lutjax
from lutjax.layers import nnx as nnx_layers
from lutjax.training import nnx as nnx_training, tables
from properties.bounds import bounded
from properties.calls import OPS
from properties.members import SIZES
from properties.trainings import (
    LOOK_UPS,
    RATE,
    RULES,
    Table,
    Training,
    arrays_of,
    check,
    compare,
    dense,
    expected_gradients,
    expected_step,
    loss_of,
    trainings,
)


@bounded(5)
@given(trainings())
@pytest.mark.slow
def test_steps(training):
    check(training)


@pytest.mark.slow
@bounded(300)
@given(trainings())
def test_many_steps(training):
    check(training)


@pytest.mark.parametrize(
    "rule",
    slow_except(
        RULES,
        "SGD(weight_decay=0.5)",
        "RowAdam(weight_decay=0.0, b1=0.0, b2=0.99, eps=1e-10)",
        "RowAdam(weight_decay=0.25, b1=0.5, b2=0.99, eps=1e-10)",
        ids=str,
    ),
    ids=str,
)
def test_every_rule(rule):
    check(Training((Table("lut"),), rule, size="b"))


def test_a_table_of_16_bits():
    """NumPy keeps its view of such an array, so what was compared could not be donated."""
    check(Training((Table("lut", dtype="bfloat16"),), tables.SGD()))


@bounded(3)
@given(trainings())
def test_steps_by_dense_gradients(training):
    """The rows that a dense gradient moves are those in which it is not zero."""
    with jax.enable_x64(training.x64):
        params, batch, fixed = arrays_of(training)
        given, optimizer = jax.tree.map(jnp.asarray, params), training.optimizer

        @jax.jit
        def step(params: Any, state: Any) -> Any:
            return optimizer.apply(params, jax.grad(loss_of(training, fixed))(params, batch), state)

        state = optimizer.init(given)
        rows = jax.tree.map(np.asarray, state.rows)
        _, gradients = expected_gradients(training, params, batch, fixed)
        touched = [np.any(gradients[f"t{i}"]["weights"] != 0, -1) for i in range(len(training.tables))]
        after = expected_step(training, params, gradients, touched, rows)
        moved, state = step(given, state)
        compare(str(training), (moved, state.rows), after, training.tolerance)


# ------------------------------------------------------------------------------------- uses of a table
def _look_up(op: str) -> tuple[Any, Any, jax.Array]:
    """An op as a function of its table and inputs, a table, inputs; outputs can be inputs again."""
    z = SIZES["a"]
    a = {n: jnp.asarray(v) for n, v in arrays_of(Training((Table(op),), tables.SGD()))[0]["t0"].items()}
    _, batch, fixed = arrays_of(Training((Table(op),), tables.SGD()))
    others = {**fixed[0], **{n: v for n, v in a.items() if n != "weights"}}

    def look_up(weights: Any, x: Any) -> jax.Array:
        return OPS[op].call(lutjax, {**others, "weights": weights, "x": x}, {"sizes": z})["y"]

    return look_up, a["weights"], jnp.asarray(batch["x"])


def _scan(f: Any, x: Any) -> Any:
    return jnp.sum(jax.lax.scan(lambda total, x: (total + f(x), None), jnp.zeros_like(f(x[0])), x)[0])


USES: dict[str, Any] = {
    "once": lambda f, w, v, x: jnp.sum(f(w, x) ** 2),
    "two tables": lambda f, w, v, x: jnp.sum(f(w, x) * f(v, x + 1)),
    "one layer after another": lambda f, w, v, x: jnp.sum(f(v, x + f(w, x)) ** 2),
    "twice": lambda f, w, v, x: jnp.sum(f(w, x) * f(w, x + 1)),
    "a layer after itself": lambda f, w, v, x: jnp.sum(f(w, x + f(w, x)) ** 2),
    "scan over the batch": lambda f, w, v, x: _scan(lambda x: f(w, x) ** 2, x),
    "scan over layers": lambda f, w, v, x: jnp.sum(
        jax.lax.scan(lambda x, w: (x + f(w, x), None), x, jnp.stack([w, v]))[0] ** 2
    ),
    "scan that carries it": lambda f, w, v, x: jnp.sum(
        jax.lax.scan(lambda c, x: (c, f(c, x) ** 2), w, x[None])[1]
    ),
    "loop": lambda f, w, v, x: jnp.sum(
        jax.lax.scan(lambda x, _: (x + f(w, x), None), x, None, length=2)[0] ** 2
    ),
    "cond": lambda f, w, v, x: jnp.sum(jax.lax.cond(x[0, 0, 0] > 0, lambda: f(w, x), lambda: f(w, -x)) ** 2),
    "cond of it": lambda f, w, v, x: jnp.sum(jax.lax.cond(x[0, 0, 0] > 0, f, lambda w, x: f(w, -x), w, x)),
    "vmap": lambda f, w, v, x: jnp.sum(jax.vmap(lambda x: f(w, x))(x) ** 2),
    "vmap of it": lambda f, w, v, x: jnp.sum(jax.vmap(f, (0, None))(jnp.stack([w, v]), x) ** 2),
    "checkpoint": lambda f, w, v, x: jnp.sum(jax.checkpoint(lambda x: f(w, x))(x) ** 2),
    "checkpoint of it": lambda f, w, v, x: jnp.sum(jax.checkpoint(f)(w, x) ** 2),
    "jit": lambda f, w, v, x: jnp.sum(jax.jit(lambda x: f(w, x))(x) ** 2),
    "jit of it": lambda f, w, v, x: jnp.sum(jax.jit(f)(w, x) ** 2),
    "penalty": lambda f, w, v, x: jnp.sum(f(w, x) ** 2) + jnp.sum(w**2),
    "stopped penalty": lambda f, w, v, x: jnp.sum(f(w, x) ** 2) + jnp.sum(jax.lax.stop_gradient(w) ** 2),
    "twice, stopped once": lambda f, w, v, x: jnp.sum(f(w, x) * f(jax.lax.stop_gradient(w), x + 1)),
    "half of its inputs": lambda f, w, v, x: jnp.sum(f(w, jax.lax.stop_gradient(x)[:2]) ** 2),
    "scaled": lambda f, w, v, x: jnp.sum(f(lutjax.scale_gradient(w, 0.5), x) ** 2),
    "scaled twice": lambda f, w, v, x: jnp.sum(
        f(lutjax.scale_gradient(lutjax.scale_gradient(w, 0.5), x[0, 0, 0]), x) ** 2
    ),
    "multiplied": lambda f, w, v, x: jnp.sum(f(2 * w, x) ** 2),
    "swapped": lambda f, w, v, x: jnp.sum(jnp.where(x[0, 0, 0] > 0, f(w, x), f(v, x)) ** 2),
    "an inner gradient": lambda f, w, v, x: jnp.sum(jax.grad(lambda x: jnp.sum(f(w, x) ** 2))(x) * x),
    "an inner value": lambda f, w, v, x: jax.value_and_grad(lambda x: jnp.sum(f(w, x) ** 2))(x)[0],
    "not at all": lambda f, w, v, x: jnp.sum(f(v, x) ** 2),
}


@pytest.mark.parametrize("jitted", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "use",
    slow_except(
        USES,
        "once",
        "twice",
        "stopped penalty",
        "twice, stopped once",
        "half of its inputs",
        "scaled",
        "scaled twice",
        "swapped",
        "not at all",
    ),
)
def test_a_table_has_the_right_gradient_or_none(use, jitted):
    """Whatever a loss does with a table: its factored gradient is that of jax.grad, or there is an error."""
    for op in ("lut",) if jitted else LOOK_UPS:
        look_up, weights, x = _look_up(op)
        params = {"w": {"weights": weights}, "v": {"weights": weights + 0.25}, "x": x}

        def loss(params: Any, look_up: Any = look_up) -> jax.Array:
            return USES[use](look_up, params["w"]["weights"], params["v"]["weights"], params["x"])

        for chosen in ("w", "v", "wv"):
            value_and_grad = tables.value_and_grad(
                loss, tables=lambda name, a, chosen=chosen: name[0] in chosen
            )

            def run(params: Any, value_and_grad: Any = value_and_grad) -> Any:
                value, gradients = value_and_grad(params)
                return value, dense(gradients)

            try:
                actual = (jax.jit(run) if jitted else run)(params)
            except tables.TableUseError:
                continue
            compare(f"{use}, {op}, {chosen}", actual, jax.value_and_grad(loss)(params), 2e-5)


RIGHT = {
    "once": ("w",),
    "two tables": ("w", "v", "wv"),
    "one layer after another": ("w", "v", "wv"),
    "scaled": ("w",),
    "scaled twice": ("w",),
    "half of its inputs": ("w",),
    "stopped penalty": ("w",),
}


@pytest.mark.parametrize("use", RIGHT)
def test_uses_that_have_a_factored_gradient(use):
    look_up, weights, x = _look_up("lut")
    for chosen in RIGHT[use]:
        value_and_grad = tables.value_and_grad(
            lambda p: USES[use](look_up, p["w"], p["v"], x),
            tables=lambda name, a, chosen=chosen: name in chosen,
        )
        _, gradients = jax.eval_shape(value_and_grad, {"w": weights, "v": weights})
        assert [isinstance(gradients[name], tables.TableGradient) for name in chosen] == [True] * len(chosen)


def test_one_array_under_two_names():
    look_up, weights, x = _look_up("lut")
    params = {"w": {"weights": weights}, "v": {"weights": weights}}

    def loss(params: Any) -> jax.Array:
        return jnp.sum(look_up(params["w"]["weights"], x) * look_up(params["v"]["weights"], x + 1))

    value, gradients = jax.jit(tables.value_and_grad(loss))(params)
    compare("one array", (value, dense(gradients)), jax.value_and_grad(loss)(params), 2e-5)


# ------------------------------------------------------------------------------------- Flax
SIZES_OF_LAYERS = {"n_detectors": 3, "n_anchors": 2, "weights_init": jax.nn.initializers.normal(1.0)}


class Model(nnx.Module):
    def __init__(self, dtype: Any):
        rngs = nnx.Rngs(0)
        self.attention = nnx_layers.LUTAttention(
            4, 4, n_positions=3, n_position_bits=1, rngs=rngs, param_dtype=dtype, **SIZES_OF_LAYERS
        )
        self.last = nnx_layers.LUT(4, 3, rngs=rngs, param_dtype=dtype, **SIZES_OF_LAYERS)

    def __call__(self, x: Any) -> Any:
        return self.last(x + self.attention(x).astype(x.dtype)).astype(jnp.float32)


@pytest.mark.slow
@bounded(8)
@given(st.sampled_from(RULES), st.sampled_from(["float32", "bfloat16"]), st.booleans())
def test_nnx_moves_what_functions_move(rule, dtype, donated):
    model, other = Model(dtype), Model(dtype)
    optimizer = nnx_training.Optimizer(model, tables.Optimizer(rule, RATE))
    x = jnp.asarray(arrays_of(Training((Table("lut"),), rule, size="b"))[1]["x"])

    @nnx.jit(donate_argnums=(0, 1) if donated else ())
    def step(model: Any, optimizer: Any) -> Any:
        loss, gradients = nnx_training.value_and_grad(lambda m: jnp.sum(m(x) ** 2))(model)
        optimizer.update(model, gradients)
        return loss

    graph, params, rest = nnx.split(other, nnx.Param, ...)

    def loss(params: Any) -> jax.Array:
        return jnp.sum(
            nnx.merge(graph, nnx_training.filled(nnx.state(other, nnx.Param), params), rest)(x) ** 2
        )

    arrays = nnx.to_pure_dict(params)
    of_functions = tables.Optimizer(rule, RATE, tables=nnx_layers.tables_of(model))
    value, gradients = jax.jit(tables.value_and_grad(loss))(arrays)
    moved, _ = of_functions.apply(arrays, gradients, of_functions.init(arrays))
    tolerance = 2e-5 if dtype == "float32" else 2**-6
    compare("loss", step(model, optimizer), value, tolerance)
    compare("after", nnx.to_pure_dict(nnx.state(model, nnx.Param)), moved, tolerance)
    compare("dense", dense(gradients), jax.jit(jax.grad(loss))(arrays), tolerance)
