"""NaN in a lookup input: the results, and detection by JAX's `jax_debug_nans`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lutjax

ANCHORS = np.array([[[0, 1], [1, 2]]], np.int32)
TABLE = np.arange(1, 5, dtype=np.float32).reshape(1, 4, 1)
CLEAN, WITH_NAN = np.float32([3, 1, 2]), np.float32([np.nan, 1, 2])


def sequence(x):
    return jnp.stack([x, jnp.array([1.0, 2.0, 3.0])])


# Functions of an input [3] and a table.
OPS = {
    "lut": lambda x, w: lutjax.lut(x, w, ANCHORS),
    "sparse_lut": lambda x, w: lutjax.sparse_lut(x, w, ANCHORS, jnp.zeros((1, 1, 1), jnp.int32), 1),
    "lut_attention": lambda x, w: lutjax.lut_attention(sequence(x), w, ANCHORS[:, :1]),
    "lut_pair_attention": lambda x, w: lutjax.lut_pair_attention(sequence(x), w, ANCHORS),
    "binary_lut": lambda x, w: lutjax.binary_lut(x, w[..., 0], jnp.array([[0, 1]])),
}


def total(name):
    return lambda x, w: OPS[name](x, w).sum()


@pytest.mark.parametrize("name", OPS)
def test_a_comparison_with_nan_is_a_bit_of_0(name):
    y = OPS[name](WITH_NAN, TABLE)
    assert np.isfinite(y).all()
    if name == "lut":
        assert y == 1 + 0  # row 0: both bits are 0
        assert np.isnan(jax.grad(total(name))(WITH_NAN, TABLE)[:2]).all()


TRANSFORMED = {
    "eager": lambda name: OPS[name],
    "jit": lambda name: jax.jit(OPS[name]),
    "value and gradient of the table": lambda name: jax.jit(jax.value_and_grad(total(name), 1)),
    "vmap": lambda name: lambda x, w: jax.jit(jax.vmap(OPS[name], (0, None)))(x[None], w),
}


@pytest.mark.parametrize(
    ("name", "how"),
    [*((name, "jit") for name in OPS), *(("lut", how) for how in TRANSFORMED if how != "jit")],
)
def test_debug_nans_finds_it(name, how):
    with jax.debug_nans(True):
        op = TRANSFORMED[how](name)
        op(CLEAN, TABLE)
        with pytest.raises(FloatingPointError):
            op(WITH_NAN, TABLE)


def test_debug_nans_finds_it_in_a_gradient():
    with jax.debug_nans(True), pytest.raises(FloatingPointError):
        jax.jit(jax.grad(total("lut")))(WITH_NAN, TABLE)


def test_debug_nans_knows_what_is_none():
    """A detection without bits has an infinite margin; an infinite input is not NaN."""
    with jax.debug_nans(True):
        no_pairs = jnp.zeros((1, 0, 2), jnp.int32)
        y, gradient = jax.value_and_grad(lambda w: lutjax.lut(CLEAN, w, no_pairs).sum())(
            TABLE[:, :1]
        )
        assert y == 1
        assert gradient.shape == (1, 1, 1)
        assert lutjax.lut(jnp.array([jnp.inf, 1.0, 2.0]), TABLE, ANCHORS) == 2


def test_without_debug_nans_nothing_is_added():
    def n_operations():
        return len(jax.make_jaxpr(lambda x, w: lutjax.lut(x, w, ANCHORS))(CLEAN, TABLE).eqns)

    without = n_operations()
    with jax.debug_nans(True):
        assert n_operations() > without == 2
