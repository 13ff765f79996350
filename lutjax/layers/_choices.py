"""Wires that scores choose: a gate reads one wire for each of its inputs, and all candidates for it get a gradient.

To read candidate `j` instead of the chosen wire changes the loss, to first order, by the sum over samples of ``slope * (x[j] - x[chosen])``, where
`slope` is the cotangent of that input of the gate. With shares ``p = softmax(scores)`` the scores get the gradient of a mixture of the
candidates by these shares, taken where the chosen wire is read instead of the mixture.

For each of `k` candidates that sum reads an input for all samples. Instead the batch is divided into `k` parts, and part `j` stands for
all samples where candidate `j` is judged: together one read for each input of a gate, and the same expectation if samples are in random order.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from lutjax._dtypes import accumulator
from lutjax.kernels._xla._row_gathers import read

Slopes = Callable[[Any, jax.Array, jax.Array], jax.Array]
"""Cotangents of the inputs of gates, from their tables, these inputs ``[G, n, B]``, and the cotangent of their outputs ``[G, B]``."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def judged(
    slopes: Slopes, y: jax.Array, scores: jax.Array, x: jax.Array, wires: jax.Array, candidates: Any, tables: Any
) -> jax.Array:
    """Return `y`, what gates make of the wires that were chosen, with a gradient for the scores of all candidates.

    Args:
      slopes: of the gates.
      y: ``[G, B]``, features first.
      scores: ``[G, n, k]``, after division by their temperature.
      x: inputs ``[I, B]``.
      wires: the chosen ones, int32 ``[G, n]``.
      candidates: int32 ``[G, n, k]``, or None: all inputs in their order.
      tables: what `slopes` takes.
    """
    return y


def _forward(slopes: Slopes, y: jax.Array, *rest: Any) -> tuple[jax.Array, Any]:
    return y, rest


def _backward(slopes: Slopes, kept: Any, dy: jax.Array) -> tuple[Any, ...]:
    scores, x, wires, candidates, tables = kept
    dtype = accumulator(x.dtype, scores.dtype)
    # XLA would compute each of them anew for every candidate that reads it.
    x, wires, cotangent = jax.lax.optimization_barrier((x, wires, dy))
    inputs = read(x, wires).astype(dtype)
    slope = slopes(tables, inputs, cotangent.astype(dtype))
    if candidates is None:
        gains = jnp.einsum("gnb,ib->gni", slope, x.astype(dtype), precision="highest")
    else:
        gains = _gains(slope, inputs, x, candidates)
    shares = jax.nn.softmax(scores.astype(dtype))
    found = shares * (gains - jnp.sum(shares * gains, -1, keepdims=True))
    return dy, found.astype(scores.dtype), None, None, None, None


judged.defvjp(_forward, _backward)


def _gains(slope: jax.Array, inputs: jax.Array, x: jax.Array, candidates: jax.Array) -> jax.Array:
    """Return what each candidate adds to the loss if it is read instead of the chosen wire: ``[G, n, k]``."""
    n_candidates, batch = candidates.shape[-1], x.shape[-1]
    size = batch // n_candidates
    if not size:  # too few samples to be divided
        others = read(x, candidates).astype(slope.dtype)
        return jnp.sum(slope[:, :, None] * (others - inputs[:, :, None]), -1)

    def in_parts(values: jax.Array) -> jax.Array:
        return values[..., : n_candidates * size].reshape(*values.shape[:-1], n_candidates, size)

    part = jnp.arange(n_candidates, dtype=candidates.dtype)
    others = read(in_parts(x), candidates, part[None, None]).astype(slope.dtype)
    # A product with ones adds vectors; the compiler's own sum over the last axis adds one number after the other.
    ones = jnp.full((size,), batch / size, slope.dtype)
    return jnp.matmul(in_parts(slope) * (others - in_parts(inputs)), ones, precision="highest")
