"""Gate and vote layers in fixed point; the case lists, property tests and `test_fixed_point.py` cover the ops."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import lutjax
from lutjax.dispatch import registry
from lutjax.layers import _logic
from lutjax.layers.nnx import GroupSum, LogicGates, LogicRNN

FINE = lutjax.FixedPoint(2.0**20)


def uniform(*shape):
    return np.random.default_rng(0).uniform(size=shape).astype(np.float32)


@pytest.mark.parametrize("feature_axis", [-1, 0])
def test_votes(feature_axis):
    x = uniform(7, 12)
    layer = GroupSum(3, tau=2.0, feature_axis=feature_axis, accumulate=FINE)
    given = x.T if feature_axis == 0 else x
    integers = np.trunc(x * FINE.scale).astype(np.int32).reshape(7, 3, 4).sum(-1)
    want = integers.astype(np.float32) / np.float32(FINE.scale) / 2
    y, pull = jax.vjp(lambda x: layer(x), jnp.asarray(given))
    np.testing.assert_array_equal(y.T if feature_axis == 0 else y, want)
    np.testing.assert_array_equal(pull(jnp.ones_like(y))[0], np.full(given.shape, 0.5))
    checked = GroupSum(
        3, tau=2.0, feature_axis=feature_axis, accumulate=lutjax.FixedPoint(2.0**29, checked=True)
    )
    assert np.isnan(checked(10 * jnp.asarray(given))).any()


def test_any_order_of_samples():
    x, order = uniform(500, 9), np.random.default_rng(1).permutation(500)
    dy = np.random.default_rng(2).normal(size=(500, 8)).astype(np.float32)
    same = []
    for accumulate in (None, FINE):
        made = LogicGates(9, 8, accumulate=accumulate, rngs=nnx.Rngs(0))
        graph, state = nnx.split(made)

        @jax.jit
        def gradient(x, dy, graph=graph, state=state):
            loss = jax.grad(lambda state: jnp.sum(nnx.merge(graph, state)(x) * dy), allow_int=True)
            return next(iter(jax.tree.leaves(nnx.filter_state(loss(state), nnx.Param))))

        a, b = gradient(x, dy), gradient(x[order], dy[order])
        assert np.any(a)
        same.append(bool(np.all(a == b)))
    assert same == [False, True]


def test_gates_of_logits_are_those_of_their_coefficients():
    x, wires = (
        jnp.asarray(uniform(40, 9)),
        jnp.asarray(np.random.default_rng(1).integers(0, 9, (8, 2)), jnp.int32),
    )
    logits = jnp.asarray(np.random.default_rng(2).normal(size=(8, 16)), jnp.float32)
    y, pull = jax.vjp(
        lambda x, logits: lutjax.logic_gates(x, logits, wires, accumulate=FINE), x, logits
    )

    def parts(x, logits):
        return lutjax.bilinear_gates(x, lutjax.gate_coefficients(logits), wires, accumulate=FINE)

    want, pull_parts = jax.vjp(parts, x, logits)
    np.testing.assert_array_equal(y, want)
    for actual, expected in zip(pull(jnp.sin(y)), pull_parts(jnp.sin(y)), strict=True):
        np.testing.assert_array_equal(actual, expected)


def test_recurrent_gates_are_gates_in_every_step():
    x, state = jnp.asarray(uniform(5, 3, 4)), jnp.asarray(uniform(5, 6))
    layer = LogicRNN(4, 6, accumulate=FINE, rngs=nnx.Rngs(0))
    step = LogicGates(10, 6, accumulate=FINE, rngs=nnx.Rngs(1))
    step.logits[...], step.wires[...] = layer.logits[...], layer.wires[...]
    result = layer(x, state=state)
    for t in range(3):
        state = step(jnp.concatenate([x[:, t], state], -1))
        np.testing.assert_array_equal(result[:, t], state)
    floats = LogicRNN(4, 6, rngs=nnx.Rngs(0))
    assert np.any(floats(x, state=jnp.asarray(uniform(5, 6))) != result)


def test_wirings_that_are_learned():
    with pytest.raises(
        ValueError,
        match=r"LogicGates: accumulate is FixedPoint.* and wiring is 'top-k', whose scores are judged by sums of floats",
    ):
        _logic.LogicGatesSpec(9, 8, wiring="top-k", accumulate=FINE)


@pytest.mark.usefixtures("without_typechecking")
@pytest.mark.parametrize("op", ["bilinear_gates", "soft_lut", "binary_lut"])
def test_explained(op):
    x, wires = jnp.asarray(uniform(4, 9)), jnp.zeros((8, 2), jnp.int32)
    parameter = jnp.ones((4, 8) if op == "bilinear_gates" else (8, 4))
    run = getattr(lutjax, op)
    assert np.isfinite(run(x, parameter, wires, accumulate=FINE)).all()
    with pytest.raises(
        TypeError, match=f"{op}: accumulate is float 2.0; expected None or a lutjax.FixedPoint"
    ):
        run(x, parameter, wires, accumulate=2.0)
    pytest.importorskip(
        "lutjax_cpu",
        reason="native kernels are not installed, which would say why they do not run it",
    )
    with pytest.raises(
        registry.NoImplementationError,
        match="gates and tables over bits in fixed point are for plain JAX",
    ):
        run(x, parameter, wires, accumulate=FINE, implementation="native")
