"""Plain JAX kernels for the op: ``y = gain * r`` with row sums ``r``, ``dgain = r * dy``, ``dr = gain * dy``."""

import jax
import jax.numpy as jnp

from lutjax.values._dtypes import accumulator


def forward(call, *, device):
    sums = _sums(call)
    return (call.gain.astype(sums.dtype) * sums).astype(call.weights.dtype)


def backward(call, cotangent, needs, *, device):
    result = {}
    if "gain" in needs:
        sums = _sums(call)
        result["gain"] = sums * cotangent.astype(sums.dtype)
    if "weights" in needs:
        result["weights"] = _gradient(call, cotangent)
    return result


def update(call, cotangent, step, *, device):
    dtype = accumulator(call.weights.dtype)
    gradient = _gradient(call, cotangent)
    if step.factor is not None:
        gradient = gradient * step.factor
    moved, state = step.rule.step(call.weights.astype(dtype), gradient, step.state, step.rate)
    t = jnp.arange(call.weights.shape[0])
    touched = jnp.zeros((*call.weights.shape[:2], 1), bool).at[t[None], call.index].set(True)
    moved = jnp.where(touched, moved, call.weights.astype(dtype)).astype(call.weights.dtype)
    return moved, jax.tree.map(lambda new, old: jnp.where(touched, new, old), state, step.state)


def _sums(call):
    t = jnp.arange(call.weights.shape[0])
    return call.weights[t[None], call.index].astype(accumulator(call.weights.dtype)).sum(1)


def _gradient(call, cotangent):
    dtype = accumulator(call.weights.dtype)
    t = jnp.arange(call.weights.shape[0])
    of_rows = (call.gain.astype(dtype) * cotangent.astype(dtype))[:, None]
    of_rows = jnp.broadcast_to(of_rows, (*call.index.shape, of_rows.shape[-1]))
    return jnp.zeros(call.weights.shape, dtype).at[t[None], call.index].add(of_rows)
