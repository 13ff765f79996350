"""Section 11: copies, masks and reductions."""

import jax
import jax.numpy as jnp
import numpy as np

from coverage_rows._row import Section, bits, distinct, key, normal

SECTION = Section("Utility Kernels")

RATE = 0.3


def dropped(x, key):
    """Numbers of the same stream say which are kept."""
    return np.where(np.asarray(jax.random.uniform(key, x.shape)) < 1 - RATE, x / (1 - RATE), 0.0)


def copied(x, axes):
    """Number by number to its place."""
    y = np.empty([x.shape[axis] for axis in axes])
    for place in np.ndindex(*y.shape):
        source = [0] * x.ndim
        for axis, at in zip(axes, place, strict=True):
            source[axis] = at
        y[place] = x[tuple(source)]
    return y


@SECTION.forward(lambda x: copied(x, (1, 0)), x=normal(3, 4))
def transpose_2d(x):
    return x.T


@SECTION.forward(lambda x: copied(x, (0, 2, 1)), x=normal(2, 3, 4))
def batched_transpose(x):
    return x.mT


@SECTION.forward(lambda x: copied(x, (2, 0, 3, 1)), x=normal(2, 3, 4, 2))
def permute_general(x):
    return jnp.transpose(x, (2, 0, 3, 1))


@SECTION.forward(lambda x: copied(x, (0, 1)), x=normal(3, 4))
def copy_buffer(x):
    return jnp.copy(x)


@SECTION.forward(lambda value: np.array([[float(value)] * 4] * 3), value=normal())
def fill_buffer(value):
    return jnp.full((3, 4), value)


@SECTION.forward(dropped, x=normal(4, 6), key=key())
def dropout_forward(x, key):
    """Drop with a rate of 0.3. The reference draws with the same key."""
    keep = jax.random.bernoulli(key, 0.7, x.shape)
    return jnp.where(keep, x / 0.7, 0.0)


@SECTION.backward(dropout_forward, "x", formula=lambda x, key, dy: dropped(dy, key))
def dropout_backward(x, key, dy):
    """Draw the mask again from the same key: none is kept."""
    return jax.vjp(lambda x: dropout_forward(x, key), x)[1](dy)


@SECTION.forward(lambda x: np.array([[min(max(n, -1.0), 0.5) for n in line] for line in x]), x=normal(4, 6))
def clamp(x):
    return jnp.clip(x, -1.0, 0.5)


@SECTION.forward(
    lambda condition, x, y: np.array([a if c else b for c, a, b in zip(condition, x, y, strict=True)]),
    condition=bits(12),
    x=normal(12),
    y=normal(12),
)
def where_cond(condition, x, y):
    return jnp.where(condition, x, y)


@SECTION.forward(
    lambda x: np.array([list(line).index(max(line)) for line in x]), x=normal(5, 6), no_gradient="integers"
)
def argmax_axis(x):
    return jnp.argmax(x, axis=1)


@SECTION.forward(
    lambda x: np.array([list(line).index(min(line)) for line in x]), x=normal(5, 6), no_gradient="integers"
)
def argmin_axis(x):
    return jnp.argmin(x, axis=1)


@SECTION.forward(lambda x: np.array([sum(line) for line in x]), x=normal(5, 6))
def reduce_sum(x):
    return jnp.sum(x, axis=1)


@SECTION.forward(lambda x: np.array([max(line) for line in x]), x=distinct(5, 6))
def reduce_max(x):
    return jnp.max(x, axis=1)
