"""Gates and tables over bits: against the sixteen truth tables, finite differences, and each other."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import implementations, slow

import lutjax
from lutjax import reference, testing

RNG = np.random.default_rng(0)


def random(*shape):
    return jnp.asarray(RNG.normal(size=shape), jnp.float32)


def wires(n_inputs, n_gates, n=2):
    return jnp.asarray(RNG.integers(0, n_inputs, (n_gates, n)), jnp.int32)


BITS = np.array([[0, 0], [0, 1], [1, 0], [1, 1]], np.float32)


def test_hard_gates_are_their_truth_tables():
    """The number of a gate is its answers, the one to ab = 00 first."""
    answers = lutjax.logic_gates(
        BITS, jnp.eye(16, dtype=jnp.float32), jnp.tile(jnp.array([[0, 1]]), (16, 1)), hard=True
    )
    expected = np.array([[gate >> 3 - row & 1 for gate in range(16)] for row in range(4)])
    np.testing.assert_array_equal(answers, expected)


def naive(x, logits, wires):
    """A stack of sixteen gates, as the formula of each says."""
    a, b = x[:, wires[:, 0]], x[:, wires[:, 1]]
    o = jnp.ones_like(a)
    gates = [
        0 * a, a * b, a - a * b, a, b - a * b, b, a + b - 2 * a * b, a + b - a * b,
        o - (a + b - a * b), o - (a + b - 2 * a * b), o - b, o - b + a * b, o - a, o - a + a * b, o - a * b, o,
    ]  # fmt: skip
    return jnp.einsum("kbg,gk->bg", jnp.stack(gates), jax.nn.softmax(logits), precision="highest")


@pytest.mark.parametrize("with_readers", [slow(False), True])
def test_mixtures_of_gates(with_readers):
    """Values and gradients with logits at random; two gates read one wire twice."""
    x, logits, w, ct = random(9, 5), random(8, 16), wires(5, 8), random(9, 8)
    w = w.at[2].set(3).at[5].set(0)
    readers = lutjax.readers(w, 5) if with_readers else None

    def of(f):
        def value_and_cotangents(x, logits):
            y, pullback = jax.vjp(f, x, logits)
            return {"y": y, **dict(zip(("x", "logits"), pullback(ct), strict=True))}

        return jax.jit(value_and_cotangents)(x, logits)

    actual = of(lambda x, logits: lutjax.logic_gates(x, logits, w, readers=readers))
    for name, expected in of(lambda x, logits: naive(x, logits, w)).items():
        np.testing.assert_allclose(actual[name], expected, rtol=2e-5, atol=2e-6, err_msg=name)


def test_logits_of_gates_first():
    logits = random(7, 16)
    for hard in (False, True):
        np.testing.assert_array_equal(
            lutjax.gate_coefficients(logits.T, hard=hard, axis=0), lutjax.gate_coefficients(logits, hard=hard)
        )
    assert not np.any(jax.grad(lambda a: lutjax.gate_coefficients(a, hard=True).sum())(logits))


def test_tables_of_two_bits_are_gates():
    """Slot 0 is the least significant bit, gates are written the other way round."""
    x, w = random(6, 5), wires(5, 16)
    truth = jnp.array([[gate >> 3 - (a << 1 | b) & 1 for b in (0, 1) for a in (0, 1)] for gate in range(16)])
    gates = lutjax.bilinear_gates(x, jnp.asarray(reference.GATES.T), w)
    np.testing.assert_allclose(lutjax.soft_lut(x, truth.astype(jnp.float32), w), gates, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("n", [slow(1), 3, slow(5)])
def test_hard_tables_agree_at_bits(n):
    """soft_lut at bits, binary_lut at signs and packed words answer alike."""
    corners = jnp.array(list(itertools.product([0.0, 1.0], repeat=n)), jnp.float32)
    table = (random(6, 2**n) > 0).astype(jnp.float32)
    w = jnp.asarray(np.stack([RNG.permutation(n) for _ in range(6)]), jnp.int32)
    soft = lutjax.soft_lut(corners, table, w)
    np.testing.assert_array_equal(lutjax.binary_lut(corners - 0.5, table, w), soft)
    packed = lutjax.packed_lut(lutjax.pack_bits(corners.T), table > 0, w)
    np.testing.assert_array_equal(lutjax.unpack_bits(packed, 2**n).T, soft > 0)


@pytest.mark.parametrize(("n", "samples"), [(2, 1), slow(4, 100), (6, 64)])
def test_packed_words(n, samples):
    bits = RNG.integers(0, 2, (7, samples)).astype(bool)
    truth = jnp.asarray(RNG.integers(0, 2, (11, 2**n)).astype(bool))
    w = wires(7, 11, n)
    words = lutjax.pack_bits(jnp.asarray(bits))
    np.testing.assert_array_equal(lutjax.unpack_bits(words, samples), bits)
    address = (bits[np.asarray(w)].astype(int) << np.arange(n)[None, :, None]).sum(1)
    expected = np.take_along_axis(np.asarray(truth), address, 1)
    actual = lutjax.packed_lut(words, truth, w)
    np.testing.assert_array_equal(lutjax.unpack_bits(actual, samples), expected)
    np.testing.assert_array_equal(actual, jax.jit(reference.packed_lut)(words, truth, w))


def test_extended_finite_difference_is_half_of_a_softened_table():
    x, table, w, ct = random(5, 4), random(3, 8), wires(4, 3, 3), random(5, 3)
    softened = jnp.where(x > 0, 0.75, 0.25).astype(jnp.float32)
    of_soft = jax.jit(jax.grad(lambda x: (ct * reference.soft_lut(x, table, w)).sum()))(softened)
    of_hard = jax.jit(jax.grad(lambda x: (ct * reference.binary_lut(x, table, w)).sum()))(x)
    np.testing.assert_allclose(of_hard, 0.5 * of_soft, rtol=1e-5, atol=1e-6)


def test_zero_and_nan_are_bit_zero():
    x = jnp.array([0.0, -0.0, jnp.nan, 1e-30], jnp.float32)
    table = jnp.tile(jnp.array([[0.0, 1.0]], jnp.float32), (4, 1))
    np.testing.assert_array_equal(lutjax.binary_lut(x, table, jnp.arange(4)[:, None]), [0, 0, 0, 1])


@pytest.mark.parametrize("n", [2, 6])
def test_an_infinite_cotangent_reaches_the_addressed_slot_alone(n):
    x, w, table = random(3, n), wires(n, 4, n), random(4, 2**n)
    dy = jnp.ones((3, 4)).at[1, 2].set(jnp.inf)

    def of_table(f):
        return jax.jit(lambda t: jax.vjp(lambda t: f(x, t, w), t)[1](dy)[0])(table)

    expected = of_table(reference.binary_lut)
    assert np.isinf(expected).sum() == 1
    for implementation in implementations("binary_lut", "backward"):
        found = of_table(functools.partial(lutjax.binary_lut, implementation=implementation))
        np.testing.assert_array_equal(found, expected, err_msg=implementation)


def test_gradients_of_coefficients_make_no_temporary_per_sample():
    """Neither sixteen nor four numbers for each gate and sample are written to memory."""
    gates, batch = 256, 512
    x, logits, w = random(64, batch), random(gates, 16), wires(64, gates)

    def loss(logits, x):
        return lutjax.logic_gates(x, logits, w, feature_axis=0).sum()

    compiled = jax.jit(jax.grad(loss)).lower(logits, x).compile()
    layer = 4 * gates * batch
    assert compiled.memory_analysis().temp_size_in_bytes < 2.5 * layer  # the output and its cotangent


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


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: lutjax.logic_gates(random(3), random(2, 15), wires(3, 2)), r"logits is float32\[2, 15\]"),
        (lambda: lutjax.logic_gates(random(3), random(2, 16), wires(3, 2, 3)), "a gate has two inputs"),
        (lambda: lutjax.logic_gates(random(3), random(4, 16), wires(3, 2)), r"expected \[4, 2\]"),
        (
            lambda: lutjax.bilinear_gates(random(3), random(4, 2), wires(3, 2), feature_axis=1),
            "feature_axis is",
        ),
        (lambda: lutjax.bilinear_gates(random(0), random(4, 2), wires(3, 2)), "at least one input"),
        (
            lambda: lutjax.bilinear_gates(random(3), random(4, 2), wires(3, 2), readers=wires(4, 4)),
            r"its first axis must have size 3",
        ),
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
        (
            lambda: lutjax.pack_bits(np.array([[0, 255, -1]])),
            "2 of its numbers are neither 0 nor 1, such as 255",
        ),
        (lambda: lutjax.pack_bits(np.array([[np.nan]])), "1 of its numbers are neither 0 nor 1, such as nan"),
        (
            lambda: lutjax.pack_bits(np.array([0, 1])),
            r"bits is int64\[2\]; expected shape \[features, samples\]",
        ),
    ],
)
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


def test_oracle_knows_finite_differences():
    """soft_lut of the reference, in float64."""
    with jax.enable_x64(True):
        case = testing.case("soft_lut", "primes", jnp.float64)
        x, table, w = (np.asarray(a) for a in (*case.differentiable.values(), case.fixed["wires"]))
        direction = np.random.default_rng(1).normal(size=x.shape)
        f = jax.jit(lambda t: reference.soft_lut(x + t * direction, table, w).sum())
        slope = jax.jit(jax.grad(f))(0.0)
        np.testing.assert_allclose(slope, (f(1e-5) - f(-1e-5)) / 2e-5, rtol=1e-7)


@pytest.mark.parametrize("axis", [slow(-1), 0])
def test_derivatives_of_coefficients(axis):
    """Forward mode, and second derivatives in both modes: the coefficients' own rule, differentiated again."""
    logits, tangent, weights = random(3, 16), random(3, 16), random(4, 3)
    if axis == 0:
        logits, tangent = logits.T, tangent.T

    @functools.partial(jax.jit, static_argnums=0)
    def derivatives(module, logits, tangent):
        def coefficients(logits):
            return module.gate_coefficients(logits, axis=axis)

        def loss(logits):
            return jnp.sum(weights * coefficients(logits) ** 2)

        of_gradient = jax.jvp(jax.grad(loss), (logits,), (tangent,))
        return jax.jvp(coefficients, (logits,), (tangent,)), of_gradient, jax.hessian(loss)(logits)

    actual, expected = (derivatives(module, logits, tangent) for module in (lutjax, reference))
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)
