"""Sections 1 and 2: activations and their gradients."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from coverage_rows._row import Section, normal

FORWARD = Section("Activation Forward Kernels")
BACKWARD = Section("Activation Backward Kernels")

X = {"x": normal(4, 7, scale=3.0)}  # on both sides of every kink


def each(function):
    """A function of one number, for every number of an array."""
    return np.vectorize(function, otypes=[np.float64])


def sigmoid_of(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def softmax_of(x):
    return np.stack([np.exp(line) / sum(math.exp(number) for number in line) for line in x])


@FORWARD.forward(lambda x: np.where(x > 0, x, 0.0), **X)
def relu(x):
    return jax.nn.relu(x)


@FORWARD.forward(lambda x: np.where(x > 0, x, 0.01 * x), **X)
def leaky_relu(x):
    return jax.nn.leaky_relu(x, 0.01)


@FORWARD.forward(each(sigmoid_of), **X)
def sigmoid(x):
    return jax.nn.sigmoid(x)


@FORWARD.forward(each(lambda x: math.tanh(x)), **X)
def tanh(x):
    return jnp.tanh(x)


@FORWARD.forward(each(lambda x: x * (1 + math.erf(x / math.sqrt(2))) / 2), **X)
def gelu(x):
    return jax.nn.gelu(x, approximate=False)


@FORWARD.forward(each(lambda x: x * sigmoid_of(x)), name="swish/silu", **X)
def swish(x):
    return jax.nn.silu(x)


@FORWARD.forward(softmax_of, **X)
def softmax(x):
    return jax.nn.softmax(x, axis=-1)


@FORWARD.forward(each(lambda x: x if x > 0 else math.exp(x) - 1), **X)
def elu(x):
    return jax.nn.elu(x)


@FORWARD.forward(each(lambda x: x * math.tanh(math.log(1 + math.exp(x)))), **X)
def mish(x):
    return jax.nn.mish(x)


@FORWARD.forward(each(lambda x: math.log(1 + math.exp(x))), **X)
def softplus(x):
    return jax.nn.softplus(x)


@FORWARD.forward(each(lambda x: x * min(max(x + 3, 0), 6) / 6), **X)
def hardswish(x):
    return jax.nn.hard_swish(x)


@BACKWARD.backward(relu, "x", formula=lambda x, dy: dy * (x > 0))
def relu_backward(x, dy):
    return jax.vjp(jax.nn.relu, x)[1](dy)


@BACKWARD.backward(leaky_relu, "x", formula=lambda x, dy: dy * np.where(x > 0, 1, 0.01))
def leaky_relu_backward(x, dy):
    return jax.vjp(jax.nn.leaky_relu, x)[1](dy)


@BACKWARD.backward(sigmoid, "x", formula=lambda x, dy: dy * each(sigmoid_of)(x) * each(sigmoid_of)(-x))
def sigmoid_backward(x, dy):
    return jax.vjp(jax.nn.sigmoid, x)[1](dy)


@BACKWARD.backward(tanh, "x", formula=lambda x, dy: dy / np.cosh(x) ** 2)
def tanh_backward(x, dy):
    return jax.vjp(jnp.tanh, x)[1](dy)


def gelu_slope(x: float) -> float:
    return (1 + math.erf(x / math.sqrt(2))) / 2 + x * math.exp(-x * x / 2) / math.sqrt(2 * math.pi)


@BACKWARD.backward(gelu, "x", formula=lambda x, dy: dy * each(gelu_slope)(x))
def gelu_backward(x, dy):
    return jax.vjp(gelu, x)[1](dy)


def softmax_formula(x, dy):
    y = softmax_of(x)
    return y * (dy - np.sum(dy * y, axis=-1, keepdims=True))


@BACKWARD.backward(softmax, "x", formula=softmax_formula)
def softmax_backward(x, dy):
    return jax.vjp(jax.nn.softmax, x)[1](dy)


@BACKWARD.backward(elu, "x", formula=lambda x, dy: dy * np.where(x > 0, 1, np.exp(x)))
def elu_backward(x, dy):
    return jax.vjp(jax.nn.elu, x)[1](dy)


def swish_slope(x: float) -> float:
    return sigmoid_of(x) * (1 + x * sigmoid_of(-x))


@BACKWARD.backward(swish, "x", formula=lambda x, dy: dy * each(swish_slope)(x))
def swish_backward(x, dy):
    return jax.vjp(jax.nn.silu, x)[1](dy)


def mish_slope(x: float) -> float:
    inner = math.tanh(math.log(1 + math.exp(x)))
    return inner + x * (1 - inner**2) * sigmoid_of(x)


@BACKWARD.backward(mish, "x", formula=lambda x, dy: dy * each(mish_slope)(x))
def mish_backward(x, dy):
    return jax.vjp(jax.nn.mish, x)[1](dy)


@BACKWARD.backward(softplus, "x", formula=lambda x, dy: dy * each(sigmoid_of)(x))
def softplus_backward(x, dy):
    return jax.vjp(jax.nn.softplus, x)[1](dy)


def hardswish_slope(x: float) -> float:
    return 0.0 if x < -3 else 1.0 if x > 3 else (2 * x + 3) / 6


@BACKWARD.backward(hardswish, "x", formula=lambda x, dy: dy * each(hardswish_slope)(x))
def hardswish_backward(x, dy):
    return jax.vjp(jax.nn.hard_swish, x)[1](dy)
