"""Section 5: pooling, channels last."""

import math

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np

from coverage_rows._row import Section, distinct, normal

SECTION = Section("Pooling Kernels", "Channels come last.")


def windows(x, window, stride):
    """Places of the output, and the numbers under each."""
    sizes = [(n - w) // stride + 1 for n, w in zip(x.shape[1:-1], window, strict=True)]
    for at in np.ndindex(*sizes):
        yield at, tuple(slice(stride * a, stride * a + w) for a, w in zip(at, window, strict=True))


def pool(x, window, stride, reduce):
    places = list(windows(x, window, stride))
    y = np.empty((x.shape[0], *(a + 1 for a in places[-1][0]), x.shape[-1]))
    for at, place in places:
        y[:, *at] = reduce(x[:, *place].reshape(x.shape[0], -1, x.shape[-1]), 1)
    return y


def maximum_backward(x, dy, window, stride):
    """A cotangent goes to the largest of its window."""
    dx = np.zeros_like(x)
    for at, place in windows(x, window, stride):
        for sample in range(x.shape[0]):
            for channel in range(x.shape[-1]):
                cut = x[sample, *place, channel]
                where = np.unravel_index(np.argmax(cut), cut.shape)
                dx[sample, *place, channel][where] += dy[sample, *at, channel]
    return dx


def mean_backward(x, dy, window, stride):
    dx = np.zeros_like(x)
    for at, place in windows(x, window, stride):
        dx[:, *place] += np.expand_dims(dy[:, *at], tuple(range(1, x.ndim - 1))) / math.prod(window)
    return dx


@SECTION.forward(lambda x: pool(x, (3, 2), 2, np.max), x=distinct(2, 5, 4, 3))
def maxpool2d(x):
    return flax.linen.max_pool(x, (3, 2), strides=(2, 2))


@SECTION.forward(lambda x: pool(x, (3, 2), 2, np.mean), x=normal(2, 5, 4, 3))
def avgpool2d(x):
    return flax.linen.avg_pool(x, (3, 2), strides=(2, 2))


@SECTION.forward(lambda x: pool(x, x.shape[1:3], 1, np.mean)[:, 0, 0], x=normal(2, 3, 4, 3))
def global_avgpool2d(x):
    return x.mean(axis=(1, 2))


@SECTION.forward(lambda x: pool(x, x.shape[1:3], 1, np.max)[:, 0, 0], x=distinct(2, 3, 4, 3))
def global_maxpool2d(x):
    return x.max(axis=(1, 2))


def bins(size, n):
    """Divide an axis as PyTorch does: bins of nearly equal size, which may overlap."""
    return [slice(i * size // n, math.ceil((i + 1) * size / n)) for i in range(n)]


def adaptive_reference(x):
    rows, cols = bins(x.shape[1], 3), bins(x.shape[2], 2)
    return np.stack([np.stack([x[:, r, c].mean((1, 2)) for c in cols], 1) for r in rows], 1)


def adaptive_formula(x, dy):
    dx = np.zeros_like(x)
    for i, rows in enumerate(bins(x.shape[1], 3)):
        for j, cols in enumerate(bins(x.shape[2], 2)):
            size = (rows.stop - rows.start) * (cols.stop - cols.start)
            dx[:, rows, cols] += dy[:, i, j][:, None, None] / size
    return dx


@SECTION.forward(adaptive_reference, x=normal(1, 5, 5, 2))
def adaptive_avgpool2d(x):
    """Pool to 3 x 2; bins as PyTorch's, which may overlap."""
    h, w = x.shape[1:3]
    rows = jnp.stack([x[:, i * h // 3 : -(-(i + 1) * h // 3)].mean(1) for i in range(3)], 1)
    return jnp.stack([rows[:, :, i * w // 2 : -(-(i + 1) * w // 2)].mean(2) for i in range(2)], 2)


@SECTION.backward(maxpool2d, "x", formula=lambda x, dy: maximum_backward(x, dy, (3, 2), 2))
def maxpool2d_backward(x, dy):
    return jax.vjp(maxpool2d, x)[1](dy)


@SECTION.backward(avgpool2d, "x", formula=lambda x, dy: mean_backward(x, dy, (3, 2), 2))
def avgpool2d_backward(x, dy):
    return jax.vjp(avgpool2d, x)[1](dy)


@SECTION.backward(
    global_avgpool2d,
    "x",
    formula=lambda x, dy: np.broadcast_to(dy[:, None, None] / (x.shape[1] * x.shape[2]), x.shape),
)
def global_avgpool2d_backward(x, dy):
    return jax.vjp(global_avgpool2d, x)[1](dy)


@SECTION.backward(
    global_maxpool2d,
    "x",
    formula=lambda x, dy: np.where(x == x.max((1, 2), keepdims=True), dy[:, None, None], 0.0),
)
def global_maxpool2d_backward(x, dy):
    return jax.vjp(global_maxpool2d, x)[1](dy)


@SECTION.backward(adaptive_avgpool2d, "x", formula=adaptive_formula)
def adaptive_avgpool2d_backward(x, dy):
    return jax.vjp(adaptive_avgpool2d, x)[1](dy)


@SECTION.backward(
    lambda x: pool(x, (2, 2, 2), 1, np.max),
    "x",
    formula=lambda x, dy: maximum_backward(x, dy, (2, 2, 2), 1),
    x=distinct(1, 3, 3, 4, 2),
)
def maxpool3d_backward(x, dy):
    return jax.vjp(lambda x: flax.linen.max_pool(x, (2, 2, 2)), x)[1](dy)


@SECTION.backward(
    lambda x: pool(x, (2, 2, 2), 1, np.mean),
    "x",
    formula=lambda x, dy: mean_backward(x, dy, (2, 2, 2), 1),
    x=normal(1, 3, 3, 4, 2),
)
def avgpool3d_backward(x, dy):
    return jax.vjp(lambda x: flax.linen.avg_pool(x, (2, 2, 2)), x)[1](dy)
