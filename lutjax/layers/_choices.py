"""Gradients for learned wires: a gate input reads one wire, and all candidates get a gradient.

To first order, reading candidate `j` instead of the chosen wire changes the loss by the sum over
samples of ``slope * (x[j] - x[chosen])``, where `slope` is the cotangent of the gate input. With
shares ``p = softmax(scores)``, the scores get the gradient of the candidates' mixture by these
shares, evaluated at the chosen wire instead of the mixture.

The exact sum reads an input in all samples for each of `k` candidates. Instead, the batch is
divided into `k` parts, and part `j` represents all samples for candidate `j`: together one read per
gate input, with the same expectation if samples are in random order. Parts of large batches are
smaller still.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from lutjax import _meshes
from lutjax._compat import cast_varying, varying_axes
from lutjax.kernels._xla._row_gathers import read
from lutjax.layers._spec import Op
from lutjax.values._derivatives import FORWARD_MODE, reverse_only
from lutjax.values._dtypes import accumulator

Slopes = Callable[[Any, list[jax.Array], jax.Array], Sequence[jax.Array]]
"""Cotangents of each gate input, from tables, inputs and output cotangent: ``[G, B]`` each."""

_JUDGES = 64
"""Maximum number of samples per candidate: more would cost more than they contribute."""

_NO_FORWARD_MODE = f"scores of wires have gradients and {FORWARD_MODE}; use jax.grad or jax.vjp."


def add_score_gradients(
    y: jax.Array, scores: jax.Array, x: jax.Array, wires: jax.Array, candidates: jax.Array | None,
    tables: Any, *, slopes: Slopes, feature_axis: int,
) -> jax.Array:  # fmt: skip
    """Return gate outputs `y` for the chosen wires, with a gradient for all scores.

    Scores ``[G, n, k]`` are divided by their temperature; candidates of None are all inputs in
    order. `slopes` computes the gates' input cotangents from `tables`. Features may be first.
    """

    def gradient(dy: jax.Array, scores: jax.Array, x: jax.Array, *others: Any) -> jax.Array:
        if feature_axis:
            dy, x = (jnp.moveaxis(a, -1, 0) for a in (dy, x))
        dy, x = (a.reshape(len(a), math.prod(a.shape[1:])) for a in (dy, x))
        return _gradient(slopes, dy, scores, x, *others)

    scores = reverse_only(scores, _NO_FORWARD_MODE)
    scores = cast_varying(scores, varying_axes(y))
    # Only the scores have a gradient here: the op's own gradient covers inputs and tables.
    rest = jax.lax.stop_gradient((x, wires, candidates, tables))
    divided = _meshes.shard_by_compiler(gradient, lambda _, scores, *rest: _meshes.spec_of(scores))
    return _with_gradient(divided, y, scores, rest)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _with_gradient(gradient: Op, y: jax.Array, scores: jax.Array, rest: Any) -> jax.Array:
    """Return `y`, with a score gradient from `dy`, the scores and the other arguments."""
    return y


_with_gradient.defvjp(
    lambda gradient, y, scores, rest: (y, (scores, rest)),
    lambda gradient, saved, dy: (dy, gradient(dy, saved[0], *saved[1]), None),
)


def _gradient(
    slopes: Slopes,
    dy: jax.Array,
    scores: jax.Array,
    x: jax.Array,
    wires: Any,
    candidates: Any,
    tables: Any,
) -> jax.Array:
    """Return the score gradient ``[G, n, k]``, features first: `dy` ``[G, B]``, `x` ``[I, B]``."""
    dtype = accumulator(x.dtype, scores.dtype)
    # Without the barrier, XLA recomputes each of them for every candidate that reads it.
    x, wires, dy = jax.lax.optimization_barrier((x, wires, dy))
    if candidates is None:
        inputs = [read(x, wires_of_input).astype(dtype) for wires_of_input in wires.T]
        slopes_of_inputs = slopes(tables, inputs, dy.astype(dtype))
        gains = [
            jnp.matmul(slope, x.astype(dtype).T, precision="highest") for slope in slopes_of_inputs
        ]
    else:
        gains = _gains(slopes, dy.astype(dtype), x, wires, jnp.asarray(candidates), tables)
    shares, gain = jax.nn.softmax(scores.astype(dtype)), jnp.stack(gains, 1)
    # The gradient of the expected loss change, under a softmax of the scores.
    return (shares * (gain - jnp.sum(shares * gain, -1, keepdims=True))).astype(scores.dtype)


def _gains(
    slopes: Slopes,
    dy: jax.Array,
    x: jax.Array,
    wires: jax.Array,
    candidates: jax.Array,
    tables: Any,
) -> list[jax.Array]:
    """Return the loss change per gate input and candidate: ``[G, k]`` each."""
    n_candidates = candidates.shape[-1]
    x, dy, n_parts, is_judge, scale = _judges(x, dy, n_candidates)
    inputs = [read(x, wires_of_input).astype(dy.dtype) for wires_of_input in wires.T]

    def split_parts(values: jax.Array) -> jax.Array:
        return values.reshape(values.shape[0], n_parts, values.shape[1] // n_parts)

    parts = split_parts(x)
    part = jnp.zeros_like(candidates[0, 0])
    if n_parts > 1:
        part = jnp.arange(n_candidates, dtype=candidates.dtype)
    gains = []
    for pin, slope in enumerate(slopes(tables, inputs, dy)):
        others = read(parts, candidates[:, pin], part[None]).astype(dy.dtype)
        values = split_parts(slope) * (others - split_parts(inputs[pin]))
        if is_judge is not None:
            values = jnp.where(is_judge[None], values, 0)
        gains.append(_sum_last_axis(values) * scale)
    return gains


def _judges(
    x: jax.Array, dy: jax.Array, n_candidates: int
) -> tuple[jax.Array, jax.Array, int, jax.Array | None, Any]:
    """Select the samples for each candidate: a part of the batch.

    The result is inputs and cotangents of all parts; the number of parts; a mask
    ``[parts, samples per part]``, or None if every sample counts; and the factor that scales sums
    over a part to the batch.
    """
    batch = x.shape[-1]
    if isinstance(batch, int):
        size = min(batch // n_candidates, _JUDGES)
        # A batch with fewer samples than candidates is one part, which judges every candidate.
        if not size:
            return x, dy, 1, None, 1.0
        used = n_candidates * size
        return x[:, :used], dy[:, :used], n_candidates, None, batch / size
    # The part size depends on the symbolic batch, so each part has the maximum size, and a mask.
    n = jnp.asarray(batch, jnp.int32)
    size = jnp.minimum(n // n_candidates, _JUDGES)
    first = jnp.arange(n_candidates, dtype=jnp.int32)[:, None] * size
    place = jnp.arange(max(_JUDGES, n_candidates - 1), dtype=jnp.int32)[None]
    ids = (first + place).reshape(-1)
    n_judges = jnp.where(size > 0, size, n)
    is_judge = jnp.broadcast_to(place < n_judges, (n_candidates, place.shape[1]))
    scale = jnp.where(size > 0, n.astype(dy.dtype) / jnp.maximum(size, 1).astype(dy.dtype), 1)
    x, dy = (jnp.take(a, ids, axis=1, mode="clip") for a in (x, dy))
    return x, dy, n_candidates, is_judge, scale


def _sum_last_axis(values: jax.Array) -> jax.Array:

    def sum_by_product(values: jax.Array) -> jax.Array:
        return jnp.matmul(values, jnp.ones(values.shape[-1], values.dtype), precision="highest")

    # On a CPU, a sum over the last axis is sequential; elsewhere XLA fuses it into its producer.
    sums: jax.Array = jax.lax.platform_dependent(
        values, cpu=sum_by_product, default=lambda values: jnp.sum(values, -1)
    )
    return sums
