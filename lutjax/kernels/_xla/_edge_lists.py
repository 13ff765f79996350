"""Edge lists of `lutjax.sparse_lookup` in plain JAX: rows with any number of edges.

Formula for the edges ``e`` of row ``index[b, t]``, that is ``first[row] <= e < first[row + 1]``::

    y[b, target[e]] += weights[e]
    dweights[e] += dy[b, target[e]]
    dmargin[b, t] = slope(margin[b, t]) * (sum over e of weights[e] * dy[b, target[e]]
                                           - the same for the edges of row index ^ flip)

Work: a scan over tables. For every read the first `width` edges are processed at once. Reads of
longer rows continue in a loop, `width` edges at a time for a block of reads, so that time follows
the number of reached edges and not the longest row.

Layout: edges of a row are adjacent, rows of a table are adjacent; one gather reads `width`
neighbors. Outputs have one extra column behind the last one, which receives neighbors that belong
to other rows.

Numerics: sums use `addend_dtype`. Row ids, targets and edge numbers are clamped. On CPUs additions
have a fixed order; on GPUs the order of a scatter may vary, except in fixed point.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from lutjax._compat import zeros_varying
from lutjax.dispatch.contract import Step
from lutjax.kernels._xla import _row_updates
from lutjax.kernels._xla._row_gathers import add, read, slope
from lutjax.ops.sparse_lookup import EdgeLookup
from lutjax.values._dtypes import accumulator
from lutjax.values._fixed_point import addend_dtype, addends, result
from lutjax.values._row_rules import RowState

_BLOCK = 512  # continued reads per block


@dataclasses.dataclass(frozen=True)
class Edges:
    """Adjacent edges for reads of a table, `width` per read.

    Attributes:
      samples: sample per read, ``[n]``; None: read ``b`` belongs to sample ``b``.
      first: first edge per read, ``[n]``.
      outputs: output per edge, ``[n, width]``; ``n_outputs`` for edges in other rows.
    """

    samples: jax.Array | None
    first: jax.Array
    outputs: jax.Array

    def gather(self, a: jax.Array) -> jax.Array:
        """Gather from a per-edge array, ``[n, width]``."""
        # A gather of slices of `width` neighbors, not of single edges: one start per read.
        dimensions = jax.lax.GatherDimensionNumbers((1,), (), (0,))
        output: jax.Array = jax.lax.gather(
            a, self.first[:, None], dimensions, (self.outputs.shape[1],), mode="promise_in_bounds"
        )
        return output

    def gather_outputs(self, dy: jax.Array) -> jax.Array:
        """Gather the edges' outputs from ``[n, O + 1]``: ``[n, width]``."""
        return read(dy, self._sample_column, self.outputs)

    def add_to(self, total: jax.Array, values: jax.Array) -> jax.Array:
        """Add values ``[n, width]`` to a per-edge array."""
        # Neighbors of other rows lie in the slice too; their values are zero, so adding them is
        # harmless.
        dimensions = jax.lax.ScatterDimensionNumbers((1,), (), (0,))
        return jax.lax.scatter_add(
            total,
            self.first[:, None],
            values.astype(total.dtype),
            dimensions,
            mode="promise_in_bounds",
        )

    def add_to_outputs(self, y: jax.Array, values: jax.Array) -> jax.Array:
        """Add values ``[n, width]`` to their outputs in ``[n, O + 1]``."""
        return add(y, (self._sample_column, self.outputs), values)

    def add_to_samples(self, total: jax.Array, values: jax.Array) -> jax.Array:
        """Add values ``[n]`` to their samples in ``[n]``."""
        # In the first pass reads are in the order of samples, which needs no scatter.
        return total + values if self.samples is None else add(total, (self.samples,), values)

    @property
    def _sample_column(self) -> jax.Array:
        n = self.first.shape[0]
        return (jnp.arange(n, dtype=jnp.int32) if self.samples is None else self.samples)[:, None]


Body = Callable[[Any, Edges], Any]


@dataclasses.dataclass(frozen=True)
class EdgeLists:
    """Edge lists for a call, with clamped ids."""

    first: jax.Array
    target: jax.Array
    n_rows: int
    n_outputs: int
    width: int

    @classmethod
    def from_call(cls, call: EdgeLookup) -> "EdgeLists":
        target, width = call.targets, call.width
        if target.shape[0] < width:  # fewer edges than the width
            target = jnp.pad(target, (0, width - target.shape[0]))
        # Clamped once here; gathers and scatters below promise ids in bounds.
        target = jnp.clip(target, 0, max(call.n_outputs - 1, 0))
        first = jnp.clip(call.first, 0, call.targets.shape[0])
        return cls(first, target, call.n_rows, call.n_outputs, width)

    def pad_edges(self, weights: jax.Array) -> jax.Array:
        """Pad a per-edge array to at least `width` elements."""
        return jnp.pad(weights, (0, self.target.shape[0] - weights.shape[0]))

    def visit(self, body: Body, carry: Any, t: jax.Array, row: jax.Array) -> Any:
        """Pass a carry through a body for all edges of a table's rows ``[n]``."""
        n, width = row.shape[0], self.width
        at = t * self.n_rows + jnp.clip(row, 0, self.n_rows - 1)
        begin, end = read(self.first, at), read(self.first, at + 1)
        # Most rows fit the width, so the first pass covers all reads and needs no sample ids.
        carry = body(carry, self._take_edges(None, begin, end))
        more = jnp.maximum(-(-(end - begin) // width) - 1, 0)  # further reads of each row
        # Continued reads are numbered consecutively: read number m belongs to the first sample
        # whose cumulative count exceeds m, so no step is spent on samples without further edges.
        upto = jnp.cumsum(more, dtype=jnp.int32)
        block = min(n, _BLOCK) if isinstance(n, int) else _BLOCK

        def go_on(xs: tuple[jax.Array, Any]) -> tuple[jax.Array, Any]:
            done, carry = xs
            number = done + jnp.arange(block, dtype=jnp.int32)
            sample = _counts_up_to(upto, number)
            # The last block may contain numbers behind the last read; they use a valid sample, and
            # an end of 0 leaves them without edges.
            last = jnp.minimum(sample, n - 1)
            nth = number - read(upto, last) + read(more, last) + 1
            stop = jnp.where(sample < n, read(end, last), 0)
            return done + block, body(
                carry, self._take_edges(last, read(begin, last) + nth * width, stop)
            )

        # The last cumulative count; a maximum also works for no read at all.
        total = jnp.max(upto, initial=0)
        done = zeros_varying(upto, (), jnp.int32)
        return jax.lax.while_loop(lambda xs: xs[0] < total, go_on, (done, carry))[1]

    def visit_all(self, body: Body, carry: Any, index: jax.Array) -> Any:
        """Pass a carry through a body for all edges of all tables' rows ``[T, n]``."""

        def step(carry: Any, xs: tuple[jax.Array, jax.Array]) -> tuple[Any, None]:
            return self.visit(body, carry, *xs), None

        return jax.lax.scan(step, carry, (_count_up(index), index))[0]

    def _take_edges(self, samples: jax.Array | None, begin: jax.Array, end: jax.Array) -> Edges:
        """Return at most `width` edges from `begin` up to `end`."""
        # A slice must end within the array. Edges before `begin` are masked below.
        first = jnp.minimum(begin, self.target.shape[0] - self.width)
        edges = Edges(samples, first, jnp.zeros((begin.shape[0], self.width), jnp.int32))
        number = first[:, None] + jnp.arange(self.width, dtype=jnp.int32)[None, :]
        of_row = (number >= begin[:, None]) & (number < end[:, None])
        outputs = jnp.where(of_row, edges.gather(self.target), self.n_outputs)
        return dataclasses.replace(edges, outputs=outputs)


def forward(call: EdgeLookup) -> jax.Array:
    accumulate, edges, index = call.accumulate, EdgeLists.from_call(call), call.detection.index
    weights = edges.pad_edges(call.weights)

    def body(y: Any, part: Edges) -> Any:
        return part.add_to_outputs(y, addends(part.gather(weights), accumulate))

    y = zeros_varying(
        index, (index.shape[0], call.n_outputs + 1), addend_dtype(weights.dtype, accumulate)
    )
    y = edges.visit_all(body, y, index.T)
    return result(y[:, : call.n_outputs], weights.dtype, accumulate)


def backward(call: EdgeLookup, cotangent: jax.Array, needs: frozenset[str]) -> dict[str, jax.Array]:
    d, accumulate, edges = call.detection, call.accumulate, EdgeLists.from_call(call)
    weights, dy = edges.pad_edges(call.weights), _pad_cotangent(cotangent, call.weights)
    dtype = addend_dtype(dy.dtype, accumulate)

    def products(total: jax.Array, part: Edges, xs: jax.Array) -> jax.Array:
        # Weights of neighbors may be NaN or infinite: their product with the zero cotangent would
        # be NaN.
        values = jnp.where(
            part.outputs < edges.n_outputs, part.gather(weights).astype(dy.dtype) * xs, 0
        )
        values = addends(values, accumulate)
        return part.add_to_samples(total, jnp.sum(values, -1, dtype=values.dtype))

    def add_and_multiply(carry: Any, part: Edges) -> Any:
        d_weights, total = carry
        xs = part.gather_outputs(dy)
        if d_weights is not None:
            d_weights = part.add_to(d_weights, addends(xs, accumulate))
        return d_weights, None if total is None else products(total, part, xs)

    def step(d_weights: Any, xs: tuple[jax.Array, ...]) -> tuple[Any, Any]:
        t, row, flipped = xs
        none = zeros_varying(row, row.shape, dtype) if "detection" in needs else None
        d_weights, total = edges.visit(add_and_multiply, (d_weights, none), t, row)
        if none is None:
            return d_weights, None
        # The two rows have different edges, so their products are summed apart; no row difference
        # exists.
        return d_weights, total - edges.visit(add_and_multiply, (None, none), t, flipped)[1]

    d_weights = zeros_varying(weights, weights.shape, dtype) if "weights" in needs else None
    index = d.index.T
    d_weights, difference = jax.lax.scan(
        step, d_weights, (_count_up(index), index, (d.index ^ d.flip).T)
    )
    cotangents = {}
    if d_weights is not None:
        cotangents["weights"] = d_weights[: call.weights.shape[0]]
    if "detection" in needs:
        cotangents["detection"] = slope(d.margin) * result(difference.T, d.margin.dtype, accumulate)
    return cotangents


def update(call: EdgeLookup, cotangent: jax.Array, step: Step) -> tuple[jax.Array, RowState]:
    weights, accumulate, edges, rule = (
        call.weights,
        call.accumulate,
        EdgeLists.from_call(call),
        step.rule,
    )
    n, dtype = weights.shape[0], accumulator(weights.dtype)
    index, dy = call.detection.index.T, _pad_cotangent(cotangent, weights)
    scale = _row_updates.scale_of_additions(call, step)

    def add(total: Any, part: Edges) -> Any:
        values = addends(part.gather_outputs(dy), accumulate)
        if scale is not None:
            # An infinite scale times the zero of an unused slot would be NaN.
            values = jnp.where(part.outputs < edges.n_outputs, scale * values, 0)
        return part.add_to(total, values)

    def mark(touched: Any, part: Edges) -> Any:
        return part.add_to(touched, part.outputs < edges.n_outputs)

    if scale is not None:
        return edges.visit_all(add, edges.pad_edges(weights), index)[:n], step.state
    total = zeros_varying(weights, edges.target.shape, addend_dtype(dtype, accumulate))
    # Edges have no row of outputs; the gradient has the size of the edge list and needs no groups.
    gradient = result(edges.visit_all(add, total, index)[:n], dtype, accumulate)
    gradient = gradient if step.factor is None else gradient * step.factor.astype(dtype)
    new, state = rule.step_table(
        weights.astype(dtype), gradient, step.state, step.rate.astype(dtype)
    )
    moved = new.astype(weights.dtype), state
    # Rules with momentum or decay also update edges without a hit: restore these.
    if rule.moves_without_gradient:
        touched = (
            edges.visit_all(mark, zeros_varying(weights, edges.target.shape, jnp.int32), index)[:n]
            > 0
        )
        moved = jax.tree.map(lambda n, o: jnp.where(touched, n, o), moved, (weights, step.state))
    return moved


def _pad_cotangent(dy: jax.Array, weights: jax.Array) -> jax.Array:
    """Return a cotangent ``[n, O + 1]`` in the accumulator dtype, with zeros for masked edges."""
    return jnp.pad(dy.astype(accumulator(weights.dtype)), ((0, 0), (0, 1)))


def _counts_up_to(ascending: jax.Array, values: jax.Array) -> jax.Array:
    """Return the number of elements in an ascending array up to each value."""
    if isinstance(ascending.shape[0], int):
        return jnp.searchsorted(ascending, values, side="right").astype(jnp.int32)
    # A binary search needs a step count, but the length may be symbolic: compare every element.
    return jnp.sum(ascending[None, :] <= values[:, None], 1, dtype=jnp.int32)


def _count_up(rows: jax.Array) -> jax.Array:
    return jnp.arange(rows.shape[0], dtype=jnp.int32)
