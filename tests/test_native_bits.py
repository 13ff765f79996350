"""Native kernels of gates and tables over bits, where the common suites do not reach."""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import lutjax
from lutjax.models import LogicCA, LogicCAConfig, automaton

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("lutjax_cpu") is None, reason="lutjax-cpu is not installed"
)


@pytest.mark.parametrize("periodic", [False, True])
def test_the_first_layer_of_an_automaton_is_the_same_as_an_op(periodic):
    """The automaton calls the op for its first layer, too, if a native kernel runs it; plain JAX has that one written out."""
    config = LogicCAConfig(channels=2, kernels=3, perception=(8, 2), update=(8, 2), periodic=periodic)
    model = LogicCA(config, rngs=nnx.Rngs(0))
    coefficients = lutjax.gate_coefficients(jax.random.normal(jax.random.key(0), (config.n_gates, 16)))
    state = jax.random.uniform(jax.random.key(1), (2, 3, 5, 6))

    def both(implementation):
        with lutjax.use_implementation(implementation):

            def loss(coefficients, state):
                last = automaton.run_soft(config, coefficients, model.wiring, state, 3)
                return jnp.square(last - 0.25).sum()

            text = str(jax.make_jaxpr(jax.grad(loss))(coefficients, state))
            return text, jax.jit(jax.grad(loss, (0, 1)))(coefficients, state)

    (plain_text, plain), (native_text, native) = both("xla"), both("native")
    assert "lutjax_cpu" in native_text
    assert "_meet" in plain_text
    assert "_meet" not in native_text
    for found, expected in zip(native, plain, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("op", ["bilinear_gates", "soft_lut", "binary_lut"])
def test_rows_of_any_length_and_inputs_with_many_readers(op):
    """Batches that no number of lanes divides, longer than the columns of a task; one input is read by every gate."""
    key = jax.random.key(3)
    wires = jnp.stack([jnp.zeros(60, jnp.int32), jax.random.randint(key, (60,), 0, 9)], 1)
    parameters = jax.random.normal(key, (4, 60) if op == "bilinear_gates" else (60, 4))
    x, dy = jax.random.normal(key, (9, 2051)), jax.random.normal(key, (60, 2051))

    def run(implementation):
        y, pull_back = jax.vjp(
            lambda x, p: getattr(lutjax, op)(x, p, wires, feature_axis=0, implementation=implementation),
            x,
            parameters,
        )
        return y, *pull_back(dy)

    for found, expected in zip(run("native"), run("xla"), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())


def test_the_sum_of_binary_tables_takes_no_part_of_other_slots():
    """An infinite cotangent reaches the slot that its sample addresses, and makes no NaN of the others."""
    x, table = jnp.array([[1.0, -1.0]]), jnp.zeros((1, 2))
    _, pull_back = jax.vjp(
        lambda t: lutjax.binary_lut(
            x, t, jnp.zeros((1, 1), jnp.int32), feature_axis=0, implementation="native"
        ),
        table,
    )
    np.testing.assert_array_equal(pull_back(jnp.array([[jnp.inf, 2.0]]))[0], [[2.0, jnp.inf]])


@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_words_of_any_number(n):
    key = jax.random.key(n)
    words = jax.random.bits(key, (11, 37), jnp.uint32)
    truth, wires = jax.random.bernoulli(key, shape=(23, 2**n)), jax.random.randint(key, (23, n), 0, 11)
    found, expected = (lutjax.packed_lut(words, truth, wires, implementation=i) for i in ("native", "xla"))
    np.testing.assert_array_equal(found, expected)
