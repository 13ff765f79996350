"""Wires that scores choose: a gate reads one wire for each of its inputs, and all candidates for it get a gradient.

To read candidate `j` instead of the chosen wire changes the loss, to first order, by the sum over samples of ``slope * (x[j] - x[chosen])``, where
`slope` is the cotangent of that input of the gate. With shares ``p = softmax(scores)`` the scores get the gradient of a mixture of the
candidates by these shares, taken where the chosen wire is read instead of the mixture.

For each of `k` candidates that sum reads an input for all samples. Instead the batch is divided into `k` parts, and part `j` stands for
all samples where candidate `j` is judged: together one read for each input of a gate, and the same expectation if samples are in random order.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from lutjax import _meshes
from lutjax._compat import cast_varying, varying_axes
from lutjax._dtypes import accumulator
from lutjax.kernels._xla._row_gathers import read

Slopes = Callable[[Any, jax.Array, jax.Array], jax.Array]
"""Cotangents of the inputs of gates, from their tables, these inputs ``[G, n, B]``, and the cotangent of their outputs ``[G, B]``."""


def judged(
    y: jax.Array,
    scores: jax.Array,
    x: jax.Array,
    wires: jax.Array,
    candidates: jax.Array | None,
    tables: Any,
    *,
    slopes: Slopes,
    feature_axis: int,
) -> jax.Array:
    """Return `y`, what gates make of the wires that were chosen, with a gradient for the scores of all candidates.

    Args:
      y: ``[..., G]``, or ``[G, ...]`` with ``feature_axis=0``.
      scores: ``[G, n, k]``, after division by their temperature.
      x: inputs ``[..., I]``, or ``[I, ...]``.
      wires: the chosen ones, int32 ``[G, n]``.
      candidates: int32 ``[G, n, k]``, or None: all inputs in their order.
      tables: what `slopes` takes.
      slopes: of the gates.
    """

    def gradient(
        dy: jax.Array, scores: jax.Array, x: jax.Array, wires: jax.Array, candidates: Any, tables: Any
    ) -> jax.Array:
        if feature_axis:
            dy, x = (jnp.moveaxis(a, -1, 0) for a in (dy, x))
        dy, x = (a.reshape(len(a), math.prod(a.shape[1:])) for a in (dy, x))
        return _gradient(slopes, dy, scores, x, wires, candidates, tables)

    scores = cast_varying(scores, varying_axes(y))
    rest = jax.lax.stop_gradient((x, wires, candidates, tables))
    return _with_gradient(
        _meshes.divided_by_compiler(gradient, lambda _, scores, *rest: _meshes.spec_of(scores)),
        y,
        scores,
        rest,
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _with_gradient(
    gradient: Callable[..., jax.Array], y: jax.Array, scores: jax.Array, rest: Any
) -> jax.Array:
    """Return `y`; the gradient of scores is that of a function of the cotangent of `y`, of scores and the rest."""
    return y


def _forward(
    gradient: Callable[..., jax.Array], y: jax.Array, scores: jax.Array, rest: Any
) -> tuple[jax.Array, Any]:
    return y, (scores, rest)


def _backward(gradient: Callable[..., jax.Array], kept: Any, dy: jax.Array) -> tuple[Any, ...]:
    scores, rest = kept
    return dy, gradient(dy, scores, *rest), None


_with_gradient.defvjp(_forward, _backward)


def _gradient(
    slopes: Slopes,
    dy: jax.Array,
    scores: jax.Array,
    x: jax.Array,
    wires: jax.Array,
    candidates: Any,
    tables: Any,
) -> jax.Array:
    """Return the gradient of scores ``[G, n, k]``, features first: `dy` ``[G, B]``, `x` ``[I, B]``."""
    dtype = accumulator(x.dtype, scores.dtype)
    # XLA would compute each of them anew for every candidate that reads it.
    x, wires, dy = jax.lax.optimization_barrier((x, wires, dy))
    inputs = read(x, wires).astype(dtype)
    slope = slopes(tables, inputs, dy.astype(dtype))
    if candidates is None:
        gains = jnp.einsum("gnb,ib->gni", slope, x.astype(dtype), precision="highest")
    else:
        gains = _gains(slope, inputs, x, jnp.asarray(candidates))
    shares = jax.nn.softmax(scores.astype(dtype))
    return (shares * (gains - jnp.sum(shares * gains, -1, keepdims=True))).astype(scores.dtype)


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
