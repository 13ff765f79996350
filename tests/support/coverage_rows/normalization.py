"""Section 4: normalizations, channels last."""

import flax.linen
import jax
import numpy as np

from coverage_rows._row import Section, normal, positive

SECTION = Section("Normalization Kernels", "Channels come last, and `scale` and `bias` are (channels,).")

AFFINE = {"scale": positive(4), "bias": normal(4)}
STATISTICS = {"mean": normal(4), "var": positive(4)}
LINES = {"x": normal(2, 3, 4)}
IMAGES = {"x": normal(2, 3, 2, 4)}


def standardized(x, axes, epsilon):
    """Two passes: the mean, then the variance around it. Returns also one over the standard deviation."""
    centerd = x - x.mean(axes, keepdims=True)
    rate = 1 / np.sqrt(np.mean(centerd**2, axes, keepdims=True) + epsilon)
    return centerd * rate, rate


def cotangents(x, scale, dy, axes, epsilon=1e-6):
    """Cotangents of inputs, scale and bias of a normalization over these axes."""
    y, rate = standardized(x, axes, epsilon)
    inner = dy * scale
    dx = rate * (inner - inner.mean(axes, keepdims=True) - y * np.mean(inner * y, axes, keepdims=True))
    return dx, *parameter_cotangents(y, dy)


def parameter_cotangents(y, dy):
    outer = tuple(range(y.ndim - 1))
    return np.sum(dy * y, outer), np.sum(dy, outer)


def grouped(x):
    """Two groups of channels on an axis of their own."""
    return x.reshape(*x.shape[:-1], 2, x.shape[-1] // 2)


def batch_reference(x, scale, bias, mean, var):
    y = standardized(x, (0, 1, 2), 1e-5)[0] * scale + bias
    running = {
        "mean": 0.9 * mean + 0.1 * x.mean((0, 1, 2)),
        "var": 0.9 * var + 0.1 * np.mean((x - x.mean((0, 1, 2))) ** 2, (0, 1, 2)),
    }
    return y, {"batch_stats": running}


def group_reference(x, scale, bias):
    return standardized(grouped(x), (1, 2, 4), 1e-6)[0].reshape(x.shape) * scale + bias


def rms_reference(x, scale):
    return x / np.sqrt(np.mean(x**2, -1, keepdims=True) + 1e-6) * scale


@SECTION.forward(batch_reference, **IMAGES, **AFFINE, **STATISTICS)
def batchnorm_forward(x, scale, bias, mean, var):
    """Returns the new running statistics as well."""
    variables = {"params": {"scale": scale, "bias": bias}, "batch_stats": {"mean": mean, "var": var}}
    return flax.linen.BatchNorm(use_running_average=False, momentum=0.9).apply(
        variables, x, mutable=["batch_stats"]
    )


@SECTION.forward(lambda x, scale, bias: standardized(x, -1, 1e-6)[0] * scale + bias, **LINES, **AFFINE)
def layernorm_forward(x, scale, bias):
    return flax.linen.LayerNorm().apply({"params": {"scale": scale, "bias": bias}}, x)


@SECTION.forward(group_reference, **IMAGES, **AFFINE)
def groupnorm_forward(x, scale, bias):
    return flax.linen.GroupNorm(num_groups=2).apply({"params": {"scale": scale, "bias": bias}}, x)


@SECTION.forward(lambda x, scale, bias: standardized(x, (1, 2), 1e-6)[0] * scale + bias, **IMAGES, **AFFINE)
def instancenorm_forward(x, scale, bias):
    return flax.linen.InstanceNorm().apply({"params": {"scale": scale, "bias": bias}}, x)


@SECTION.forward(rms_reference, **LINES, scale=positive(4))
def rmsnorm_forward(x, scale):
    return flax.linen.RMSNorm().apply({"params": {"scale": scale}}, x)


@SECTION.backward(
    lambda *arguments, **named: batch_reference(*arguments, **named)[0],
    "x",
    "scale",
    "bias",
    formula=lambda x, scale, bias, mean, var, dy: cotangents(x, scale, dy, (0, 1, 2), 1e-5),
    **IMAGES,
    **AFFINE,
    **STATISTICS,
)
def batchnorm_backward(x, scale, bias, mean, var, dy):
    return jax.vjp(lambda *moved: batchnorm_forward(*moved, mean, var)[0], x, scale, bias)[1](dy)


@SECTION.backward(layernorm_forward, "x", formula=lambda x, scale, bias, dy: cotangents(x, scale, dy, -1)[0])
def layernorm_backward(x, scale, bias, dy):
    return jax.vjp(lambda x: layernorm_forward(x, scale, bias), x)[1](dy)


@SECTION.backward(
    layernorm_forward,
    "scale",
    "bias",
    formula=lambda x, scale, bias, dy: parameter_cotangents(standardized(x, -1, 1e-6)[0], dy),
)
def layernorm_grad_params(x, scale, bias, dy):
    return jax.vjp(lambda *moved: layernorm_forward(x, *moved), scale, bias)[1](dy)


def group_formula(x, scale, bias, dy):
    y, rate = standardized(grouped(x), (1, 2, 4), 1e-6)
    inner = grouped(dy * scale)
    means = inner.mean((1, 2, 4), keepdims=True), np.mean(inner * y, (1, 2, 4), keepdims=True)
    dx = rate * (inner - means[0] - y * means[1])
    return dx.reshape(x.shape), *parameter_cotangents(y.reshape(x.shape), dy)


@SECTION.backward(groupnorm_forward, "x", "scale", "bias", formula=group_formula)
def groupnorm_backward(x, scale, bias, dy):
    return jax.vjp(groupnorm_forward, x, scale, bias)[1](dy)


@SECTION.backward(
    instancenorm_forward,
    "x",
    "scale",
    "bias",
    formula=lambda x, scale, bias, dy: cotangents(x, scale, dy, (1, 2)),
)
def instancenorm_backward(x, scale, bias, dy):
    return jax.vjp(instancenorm_forward, x, scale, bias)[1](dy)


def rms_formula(x, scale, dy):
    rate = 1 / np.sqrt(np.mean(x**2, -1, keepdims=True) + 1e-6)
    inner = dy * scale
    return rate * inner - x * rate**3 * np.mean(inner * x, -1, keepdims=True)


@SECTION.backward(rmsnorm_forward, "x", formula=rms_formula)
def rmsnorm_backward(x, scale, dy):
    return jax.vjp(lambda x: rmsnorm_forward(x, scale), x)[1](dy)


@SECTION.backward(
    rmsnorm_forward,
    "scale",
    formula=lambda x, scale, dy: parameter_cotangents(rms_reference(x, 1.0), dy)[0],
)
def rmsnorm_grad_gamma(x, scale, dy):
    return jax.vjp(lambda scale: rmsnorm_forward(x, scale), scale)[1](dy)
