"""Section 12: kernels fused by hand elsewhere."""

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np

from coverage_rows._row import Section, key, normal, positive
from coverage_rows.activations import gelu, relu, sigmoid, swish, tanh
from coverage_rows.normalization import layernorm_forward
from coverage_rows.utilities import dropped

SECTION = Section(
    "Fused Kernels",
    "Each row is one `jax.jit`; XLA decides which operations to fuse.",
)

DENSE = {"x": normal(3, 4), "w": normal(4, 5), "b": normal(5)}
LINES = {"x": normal(3, 5), "scale": positive(5), "bias": normal(5)}


def gemm(x, w, b):
    return np.array([[sum(x[i] * w[:, j]) + b[j] for j in range(w.shape[1])] for i in range(x.shape[0])])


def then(activation, inner):
    return lambda **arguments: activation.reference(inner(**arguments))


@SECTION.forward(then(relu, gemm), **DENSE)
def gemm_bias_relu(x, w, b):
    return jax.nn.relu(x @ w + b)


@SECTION.forward(then(gelu, gemm), **DENSE)
def gemm_bias_gelu(x, w, b):
    return jax.nn.gelu(x @ w + b, approximate=False)


@SECTION.forward(then(sigmoid, gemm), **DENSE)
def gemm_bias_sigmoid(x, w, b):
    return jax.nn.sigmoid(x @ w + b)


@SECTION.forward(then(tanh, gemm), **DENSE)
def gemm_bias_tanh(x, w, b):
    return jnp.tanh(x @ w + b)


@SECTION.forward(gemm, **DENSE)
def gemm_bias(x, w, b):
    return x @ w + b


@SECTION.forward(then(swish, gemm), **DENSE)
def gemm_bias_swish(x, w, b):
    return jax.nn.silu(x @ w + b)


@SECTION.forward(then(relu, layernorm_forward.reference), **LINES)
def layernorm_relu(x, scale, bias):
    return jax.nn.relu(flax.linen.LayerNorm().apply({"params": {"scale": scale, "bias": bias}}, x))


@SECTION.forward(then(gelu, layernorm_forward.reference), **LINES)
def layernorm_gelu(x, scale, bias):
    y = flax.linen.LayerNorm().apply({"params": {"scale": scale, "bias": bias}}, x)
    return jax.nn.gelu(y, approximate=False)


@SECTION.forward(
    lambda x, residual, scale, bias: layernorm_forward.reference(x + residual, scale, bias),
    residual=normal(3, 5),
    **LINES,
)
def residual_layernorm(x, residual, scale, bias):
    return flax.linen.LayerNorm().apply({"params": {"scale": scale, "bias": bias}}, x + residual)


@SECTION.forward(lambda x, b, key: dropped(x + b, key), x=normal(4, 6), b=normal(6), key=key())
def bias_dropout(x, b, key):
    keep = jax.random.bernoulli(key, 0.7, x.shape)
    return jnp.where(keep, (x + b) / 0.7, 0.0)
