"""Gates and tables over bits: compared with the sixteen truth tables, finite differences, and each other."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import implementations

import lutjax
from lutjax import reference

RNG = np.random.default_rng(0)


def random(*shape):
    return jnp.asarray(RNG.normal(size=shape), jnp.float32)


def wires(n_inputs, n_gates, n=2):
    return jnp.asarray(RNG.integers(0, n_inputs, (n_gates, n)), jnp.int32)


BITS = np.array([[0, 0], [0, 1], [1, 0], [1, 1]], np.float32)


def test_hard_gates_are_their_truth_tables():
    answers = lutjax.logic_gates(
        BITS, jnp.eye(16, dtype=jnp.float32), jnp.tile(jnp.array([[0, 1]]), (16, 1)), hard=True
    )
    expected = np.array([[gate >> 3 - row & 1 for gate in range(16)] for row in range(4)])
    np.testing.assert_array_equal(answers, expected)


def test_tables_of_two_bits_are_gates():
    x, w = random(6, 5), wires(5, 16)
    truth = jnp.array(
        [[gate >> 3 - (a << 1 | b) & 1 for b in (0, 1) for a in (0, 1)] for gate in range(16)]
    )
    gates = lutjax.bilinear_gates(x, jnp.asarray(reference.GATES.T), w)
    np.testing.assert_allclose(
        lutjax.soft_lut(x, truth.astype(jnp.float32), w), gates, rtol=1e-5, atol=1e-5
    )


def test_hard_tables_agree_at_bits():
    n = 3
    corners = jnp.array(list(itertools.product([0.0, 1.0], repeat=n)), jnp.float32)
    table = (random(6, 2**n) > 0).astype(jnp.float32)
    w = jnp.asarray(np.stack([RNG.permutation(n) for _ in range(6)]), jnp.int32)
    soft = lutjax.soft_lut(corners, table, w)
    np.testing.assert_array_equal(lutjax.binary_lut(corners - 0.5, table, w), soft)
    packed = lutjax.packed_lut(lutjax.pack_bits(corners.T), table > 0, w)
    np.testing.assert_array_equal(lutjax.unpack_bits(packed, 2**n).T, soft > 0)


def test_zero_and_nan_are_bit_zero():
    x = jnp.array([0.0, -0.0, jnp.nan, 1e-30], jnp.float32)
    table = jnp.tile(jnp.array([[0.0, 1.0]], jnp.float32), (4, 1))
    np.testing.assert_array_equal(lutjax.binary_lut(x, table, jnp.arange(4)[:, None]), [0, 0, 0, 1])


@pytest.mark.parametrize("n", [6])
def test_an_infinite_cotangent_reaches_the_addressed_slot_alone(n):
    x, w, table = random(3, n), wires(n, 4, n), random(4, 2**n)
    dy = jnp.ones((3, 4)).at[1, 2].set(jnp.inf)

    def of_table(f):
        return jax.jit(lambda t: jax.vjp(lambda t: f(x, t, w), t)[1](dy)[0])(table)

    expected = of_table(reference.binary_lut)
    assert np.isinf(expected).sum() == 1
    for implementation in implementations("binary_lut", "backward"):
        # Plain JAX runs the forward pass where an implementation has none.
        options = {"implementation": (implementation, "xla"), "readers": lutjax.readers(w, 6)}
        actual = of_table(functools.partial(lutjax.binary_lut, **options))
        np.testing.assert_array_equal(actual, expected, err_msg=implementation)


def test_gradients_of_coefficients_make_no_temporary_per_sample():
    """Write neither sixteen nor four values per gate and sample to memory."""
    gates, batch = 256, 512
    x, logits, w = random(64, batch), random(gates, 16), wires(64, gates)

    def loss(logits, x):
        return lutjax.logic_gates(x, logits, w, feature_axis=0).sum()

    compiled = jax.jit(jax.grad(loss)).lower(logits, x).compile()
    layer = 4 * gates * batch
    assert (
        compiled.memory_analysis().temp_size_in_bytes < 2.5 * layer
    )  # the output and its cotangent


def test_traced_ids_beyond_the_inputs_are_clamped():
    x, coefficients = random(4, 3), random(4, 2)
    wild, tame = jnp.array([[-7, 99], [1, 2**30]]), jnp.array([[0, 2], [1, 2]])
    table = random(2, 4)
    for f in (
        lambda w: lutjax.bilinear_gates(x, coefficients, w),
        lambda w: lutjax.soft_lut(x, table, w),
        lambda w: lutjax.binary_lut(x, table, w),
        lambda w: lutjax.packed_lut(lutjax.pack_bits(x.T > 0), table > 0, w),
    ):
        np.testing.assert_array_equal(jax.jit(f)(wild), f(tame))


def test_readers():
    w = wires(9, 20, 3)
    readers = np.asarray(lutjax.readers(w, 9))
    for i, row in enumerate(readers):
        np.testing.assert_array_equal(row[row >= 0], np.flatnonzero(np.asarray(w).ravel() == i))
    traced = jax.jit(lambda w: lutjax.readers(w, 9, fan_out=readers.shape[1] + 2))(w)
    np.testing.assert_array_equal(traced[:, : readers.shape[1]], readers)
    assert (np.asarray(traced)[:, readers.shape[1] :] == -1).all()


@pytest.mark.parametrize(("call", "message"), [
    (lambda: lutjax.logic_gates(random(3), random(2, 15), wires(3, 2)), r"logits is float32\[2, 15\]"),
    (lambda: lutjax.logic_gates(random(3), random(2, 16), wires(3, 2, 3)), "a gate has two inputs"),
    (lambda: lutjax.logic_gates(random(3), random(4, 16), wires(3, 2)), r"expected \[4, 2\]"),
    (lambda: lutjax.bilinear_gates(random(3), random(4, 2), wires(3, 2), feature_axis=1), "feature_axis is"),
    (lambda: lutjax.bilinear_gates(random(0), random(4, 2), wires(3, 2)), "at least one input"),
    (lambda: lutjax.bilinear_gates(random(3), random(4, 2), wires(3, 2), readers=wires(4, 4)),
     r"its first axis must have size 3"),
    (lambda: lutjax.soft_lut(random(3), random(2, 512), wires(3, 2, 9)), "a gate has 1 to 8 inputs"),
    (lambda: lutjax.soft_lut(random(3), random(2, 4), wires(3, 2, 3)), r"expected \[2, 8\]"),
    (lambda: lutjax.readers(jnp.array([[0, 3]]), 3), "inputs are 0 to 2"),
    (lambda: lutjax.readers(jnp.array([[1, 1]]), 3, fan_out=1), "an input has 2 readers"),
    (lambda: jax.jit(lambda w: lutjax.readers(w, 3))(wires(3, 2)), "fan_out is None"),
    (lambda: lutjax.unpack_bits(jnp.zeros((1, 2), jnp.uint32), 65), "2 words hold 0 to 64 samples"),
    (
        lambda: lutjax.pack_bits(jnp.array([[0, 0.5, 1]])),
        r"bits is float32\[1, 3\]; 1 of its numbers are neither 0 nor 1, such as 0.5: compare it with a threshold first",
    ),
    (lambda: lutjax.pack_bits(np.array([[0, 255, -1]])), "2 of its numbers are neither 0 nor 1, such as 255"),
    (lambda: lutjax.pack_bits(np.array([[np.nan]])), "1 of its numbers are neither 0 nor 1, such as nan"),
    (lambda: lutjax.pack_bits(np.array([0, 1])), r"bits is int64\[2\]; expected shape \[features, samples\]"),
])  # fmt: skip
@pytest.mark.usefixtures("without_typechecking")
def test_clear_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.usefixtures("without_typechecking")
@pytest.mark.parametrize("bits", [0.5, "01", [[0, 1]], None])
def test_bits_are_an_array(bits):
    with pytest.raises(TypeError, match=r"pack_bits: bits is .*; expected a JAX or numpy array"):
        lutjax.pack_bits(bits)


def test_traced_bits_are_not_looked_at():
    assert jax.jit(lutjax.pack_bits)(jnp.array([[0, 0.5, 1]])) == 6


@pytest.mark.usefixtures("without_typechecking")
def test_clear_errors_of_dtypes():
    with pytest.raises(TypeError, match="words is float32"):
        lutjax.packed_lut(random(3, 1), random(2, 4) > 0, wires(3, 2))
    with pytest.raises(TypeError, match="its dtype must be bool"):
        lutjax.packed_lut(jnp.zeros((3, 1), jnp.uint32), random(2, 4), wires(3, 2))
    with pytest.raises(TypeError, match="its dtype must be int32"):
        lutjax.soft_lut(random(3), random(2, 4), random(2, 2))


def test_derivatives_of_coefficients():
    logits, tangent, weights = random(16, 3), random(16, 3), random(4, 3)

    @functools.partial(jax.jit, static_argnums=0)
    def derivatives(module, logits, tangent):
        def coefficients(logits):
            return module.gate_coefficients(logits, axis=0)

        def loss(logits):
            return jnp.sum(weights * coefficients(logits) ** 2)

        of_gradient = jax.jvp(jax.grad(loss), (logits,), (tangent,))
        return jax.jvp(coefficients, (logits,), (tangent,)), of_gradient, jax.hessian(loss)(logits)

    actual, expected = (derivatives(module, logits, tangent) for module in (lutjax, reference))
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)
