"""Weighted rows on the matrix unit: products with on-chip coefficient matrices.

Formula for a block's tables ``t``, samples ``b``, ways ``k`` with row ids ``i`` and coefficients
``c``::

    C[(t, r), b] = sum_k c[k, t, b] * [i[k, t, b] == r]
    sum_rows:  y[b] = sum_{t, r} C[(t, r), b] * weights[t, r]
    add_rows:  total[t, r] += sum_b C[(t, r), b] * values[b]
    pull_back: p[k, t, b] = (weights @ dy)[(t, i[k, t, b]), b]

Work: the grid runs over row, sample and output blocks. Its last axis is the accumulated one: an
output block stays in vector memory for consecutive steps and is cleared at the first step.

Layout: rows in sublanes, samples in lanes; ``C`` compares ids with a row iota, so nothing is
gathered. See `_row_blocks` for padding.

Numerics: a float32 factor is split into three bfloat16 terms, whose products are exact and
accumulate in float32; products below float32 precision are omitted. `pull_back` multiplies by all
rows and selects, so its error is relative to the products, not to the row difference. An infinity
or NaN in a block reaches all sums in its column. Sums have a fixed order. Ids are clamped; -1 reads
nothing.
"""

import abc
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike

from lutjax.dispatch.contract import Step
from lutjax.dispatch.registry import Device
from lutjax.kernels._pallas import _call
from lutjax.kernels._pallas.tpu._limits import params
from lutjax.kernels._pallas.tpu._row_blocks import RowBlocks
from lutjax.kernels._xla._row_gathers import terms
from lutjax.values._row_rules import RowState

Way = tuple[jax.Array, jax.Array | None]
"""Row ids, negative where nothing is read, and coefficients, ``[lines, samples]``; None: 1."""
Order = Callable[..., tuple[Any, Any, Any]]
"""Function from a grid point to its row, sample and output block numbers."""
Output = tuple[jax.ShapeDtypeStruct, pl.BlockSpec]


class Reads(abc.ABC):
    """A call's reads, as computed in a kernel.

    Attributes:
      inputs: input arrays for a kernel.
    """

    inputs: tuple[jax.Array, ...]

    @abc.abstractmethod
    def specs(self, order: Order) -> list[pl.BlockSpec]:
        """Return the input block specs."""

    @abc.abstractmethod
    def compute_ways(self, refs: Sequence[Any], block: Any, samples: Any) -> list[Way]:
        """Return each way's values for a row block and a sample block."""

    @abc.abstractmethod
    def index(self, refs: Sequence[Any], block: Any, samples: Any) -> list[jax.Array]:
        """Return the row ids for all ways."""

    @abc.abstractmethod
    def cotangents(self, order: Order) -> list[Output]:
        """Return the shapes and block specs for the `pull` outputs."""

    @abc.abstractmethod
    def pull(
        self,
        refs: Sequence[Any],
        outputs: Sequence[Any],
        products: Sequence[jax.Array],
        block: Any,
        samples: Any,
    ) -> None:
        """Write the read's cotangents, given ``<dy, row>`` for all ways."""


class GivenReads(Reads):
    """Reads with ids and coefficients from arrays.

    Args:
      index: ``[K, B, T]``, by way. coefficients: likewise; None: 1. n_rows: rows per table.
      valued: number of leading ways with a value.
    """

    def __init__(
        self,
        blocks: RowBlocks,
        index: jax.Array,
        n_rows: int,
        coefficients: jax.Array | None = None,
        valued: int | None = None,
    ):
        self._blocks, self._n_ways, self._valued = blocks, len(index), valued
        # Clamp before padding: -1 marks padding, not an id.
        inputs = [blocks.split_elements(jnp.clip(index, 0, n_rows - 1), -1)]
        if coefficients is not None:
            inputs.append(blocks.split_elements(coefficients.astype(jnp.float32)))
        self.inputs = tuple(inputs)

    def specs(self, order: Order) -> list[pl.BlockSpec]:
        return [element_spec(self._blocks, order, self._n_ways) for _ in self.inputs]

    def compute_ways(self, refs: Sequence[Any], block: Any, samples: Any) -> list[Way]:
        index, *coefficients = refs
        return [
            (index[k, 0], coefficients[0][k, 0] if coefficients else None)
            for k in range(self._n_ways)[: self._valued]
        ]

    def index(self, refs: Sequence[Any], block: Any, samples: Any) -> list[jax.Array]:
        return [refs[0][k, 0] for k in range(self._n_ways)]

    def cotangents(self, order: Order) -> list[Output]:
        shape = jax.ShapeDtypeStruct(self.inputs[0].shape, jnp.float32)
        return [(shape, element_spec(self._blocks, order, self._n_ways))]

    def pull(
        self,
        refs: Sequence[Any],
        outputs: Sequence[Any],
        products: Sequence[jax.Array],
        block: Any,
        samples: Any,
    ) -> None:
        for k, product in enumerate(products):
            outputs[0][k, 0] = product


# ------------------------------------------------------------------------------------- blocks
def element_spec(blocks: RowBlocks, order: Order, n: int) -> pl.BlockSpec:
    """Return the block spec for `n` arrays with an element per table and sample."""

    def index_map(*point: Any) -> tuple[Any, ...]:
        row_block, samples, _ = order(*point)
        # Parts of one table share the ids of the table.
        return 0, row_block // blocks.parts, 0, samples

    return pl.BlockSpec((n, 1, blocks.lines, blocks.samples), index_map)


def group(blocks: RowBlocks, row_block: Any, n_groups: int) -> Any:
    """Return a row block's index in an array with one entry per group, or one shared entry."""
    return row_block // (blocks.blocks_per_group * blocks.parts) if n_groups > 1 else 0


def table_spec(blocks: RowBlocks, order: Order, n_terms: int) -> pl.BlockSpec:
    def index_map(*point: Any) -> tuple[Any, ...]:
        row_block, _, outputs = order(*point)
        return 0, row_block, 0, outputs

    return pl.BlockSpec((n_terms, 1, blocks.tables * blocks.rows, blocks.outputs), index_map)


def sample_spec(blocks: RowBlocks, order: Order, n_terms: int, n_groups: int) -> pl.BlockSpec:
    def index_map(*point: Any) -> tuple[Any, ...]:
        row_block, samples, outputs = order(*point)
        return 0, group(blocks, row_block, n_groups), samples, outputs

    return pl.BlockSpec((n_terms, 1, blocks.samples, blocks.outputs), index_map)


def sums_shape(blocks: RowBlocks, n_groups: int, dtype: DTypeLike) -> jax.ShapeDtypeStruct:
    """Return the shape and dtype of sums over all samples and outputs."""
    shape = (1, n_groups, blocks.n_samples * blocks.samples, blocks.n_of_outputs * blocks.outputs)
    return jax.ShapeDtypeStruct(shape, dtype)


# ------------------------------------------------------------------------------------- kernels
def sum_rows(
    reads: Reads, weights: jax.Array, blocks: RowBlocks, device: Device, *, shared: bool = False
) -> jax.Array:
    """Sum the addressed rows: ``[T, R, O]`` -> ``[B, groups, O]``, float32.

    Args:
      shared: all groups share one sum, ``[B, 1, O]``.
    """
    n_groups = 1 if shared else blocks.groups
    table = blocks.split_tables(jnp.stack(terms(weights)))

    def order(b: Any, o: Any, v: Any) -> tuple[Any, Any, Any]:
        return v, b, o

    def kernel(*refs: Any) -> None:
        *given, table_ref, y_ref = refs
        samples, block = pl.program_id(0), pl.program_id(2)

        # The sum of a group, or of all of them, begins: blocks of rows are the innermost axis of
        # the grid.
        @pl.when(block % (blocks.n_rows // n_groups) == 0)
        def _() -> None:
            y_ref[...] = jnp.zeros_like(y_ref)

        ways = reads.compute_ways(given, block, samples)
        for tables in products_of(blocks):
            # The loop is written out, so that the coefficient matrix of one product can be made
            # while another one runs on the matrix unit.
            factors = [table_ref[i, 0, rows_of(blocks, tables)] for i in range(len(table))]
            y_ref[0, 0] += multiply(matrix(blocks, ways, tables, block), factors, 0, 0)

    (y,) = _call.call(
        kernel,
        *reads.inputs,
        table,
        outputs=[sums_shape(blocks, n_groups, jnp.float32)],
        name="rows",
        grid=(blocks.n_samples, blocks.n_of_outputs, blocks.n_rows),
        in_specs=[*reads.specs(order), table_spec(blocks, order, len(table))],
        out_specs=[sample_spec(blocks, order, 1, n_groups)],
        compiler_params=params(device),
    )
    return blocks.to_samples(y[0])


def add_rows(
    total: jax.Array | None,
    shape: tuple[int, ...],
    reads: Reads,
    values: jax.Array,
    blocks: RowBlocks,
    device: Device,
) -> jax.Array:
    """Return the tables, or zeros, plus coefficient times value at each addressed row, float32.

    Args:
      values: ``[B, groups, O]``, or ``[B, 1, O]`` shared by all groups.

    Returns:
      ``[T, R, O]``.
    """
    addends = blocks.split_samples(jnp.stack(terms(values)))
    n_terms, n_groups = addends.shape[:2]
    started = [] if total is None else [blocks.split_tables(total[None])]

    def order(v: Any, o: Any, b: Any) -> tuple[Any, Any, Any]:
        return v, b, o

    def kernel(*refs: Any) -> None:
        given, (values_ref, *started, total_ref) = (
            refs[: len(reads.inputs)],
            refs[len(reads.inputs) :],
        )
        block, samples = pl.program_id(0), pl.program_id(2)

        @pl.when(samples == 0)
        def _() -> None:
            # Samples are the innermost axis: the block of tables stays in vector memory until all
            # samples are added.
            total_ref[...] = started[0][...] if started else jnp.zeros_like(total_ref)

        ways, factors = (
            reads.compute_ways(given, block, samples),
            [values_ref[i, 0] for i in range(n_terms)],
        )
        for tables in products_of(blocks):
            coefficients = matrix(blocks, ways, tables, block)
            total_ref[0, 0, rows_of(blocks, tables)] += multiply(coefficients, factors, 1, 0)

    padded = (1, blocks.n_rows, blocks.tables * blocks.rows, blocks.n_of_outputs * blocks.outputs)
    of_total = table_spec(blocks, order, 1)
    (total,) = _call.call(
        kernel,
        *reads.inputs,
        addends,
        *started,
        outputs=[jax.ShapeDtypeStruct(padded, jnp.float32)],
        name="rows_add",
        grid=(blocks.n_rows, blocks.n_of_outputs, blocks.n_samples),
        in_specs=[
            *reads.specs(order),
            sample_spec(blocks, order, n_terms, n_groups),
            *(of_total for _ in started),
        ],
        out_specs=[of_total],
        # In place: each block is read before it is written, by the same grid step sequence.
        input_output_aliases={len(reads.inputs) + 1: 0} if started else {},
        compiler_params=params(device),
    )
    return blocks.to_tables(total, shape)


def pull_back(
    reads: Reads, weights: jax.Array, n_ways: int, dy: jax.Array, blocks: RowBlocks, device: Device
) -> tuple[jax.Array, ...]:
    """Return the read cotangents, from products between rows and ``dy [B, groups or 1, O]``.

    The kernel multiplies by every row, so the error is relative to the products, not to the
    difference between two rows.
    """
    table = blocks.split_tables(jnp.stack(terms(weights)))
    cotangents = blocks.split_samples(jnp.stack(terms(dy)))
    n_terms, n_groups = cotangents.shape[:2]

    def order(b: Any, v: Any, o: Any) -> tuple[Any, Any, Any]:
        return v, b, o

    outputs = reads.cotangents(order)

    def kernel(*refs: Any) -> None:
        n = len(reads.inputs)
        given, (table_ref, dy_ref, *results, picked) = refs[:n], refs[n:]
        samples, block, output = (pl.program_id(axis) for axis in range(3))
        part = block % blocks.parts

        # Products accumulate over blocks of outputs and over parts of a table; a read hits one of
        # the parts.
        @pl.when((output == 0) & (part == 0))
        def _() -> None:
            picked[...] = jnp.zeros_like(picked)

        index, factors = reads.index(given, block, samples), [dy_ref[i, 0] for i in range(n_terms)]
        for tables in products_of(blocks):
            rows = [table_ref[i, 0, rows_of(blocks, tables)] for i in range(len(table))]
            products = multiply(rows, factors, 1, 1)
            for k, ids in enumerate(index):
                picked[k, tables] += _select_by_id(blocks, products, ids[tables], part)

        # The scalar function of the read runs once, on complete products.
        @pl.when((output == blocks.n_of_outputs - 1) & (part == blocks.parts - 1))
        def _() -> None:
            reads.pull(given, results, [picked[k] for k in range(n_ways)], block, samples)

    return _call.call(
        kernel,
        *reads.inputs,
        table,
        cotangents,
        outputs=[shape for shape, _ in outputs],
        name="rows_pull",
        grid=(blocks.n_samples, blocks.n_rows, blocks.n_of_outputs),
        in_specs=[
            *reads.specs(order),
            table_spec(blocks, order, len(table)),
            sample_spec(blocks, order, n_terms, n_groups),
        ],
        out_specs=[spec for _, spec in outputs],
        # Scratch memory, because the cotangents of a read are not linear block by block: they need
        # the complete products.
        scratch_shapes=[pltpu.VMEM((n_ways, blocks.lines, blocks.samples), jnp.float32)],
        compiler_params=params(device),
    )


def update_tables(
    weights: jax.Array,
    cotangent: jax.Array,
    step: Step,
    add_to: Callable[[jax.Array | None, jax.Array], jax.Array],
    touched: Callable[[], jax.Array],
) -> tuple[jax.Array, RowState]:
    """Return the tables and row state after a stateless rule's step.

    Args:
      add_to: adds a cotangent to the accessed rows of tables; None stands for zeros.
      touched: see `update_rows`.
    """
    # Narrower tables would round every addition.
    if step.rule.additive and not step.differs_by_row and weights.dtype == jnp.float32:
        # Additive rules add each addend to its row, in the table's own memory.
        return add_to(weights, -step.rate_and_factor * cotangent.astype(jnp.float32)), step.state
    return update_rows(weights, add_to(None, cotangent), step, touched), step.state


def update_rows(
    weights: jax.Array, gradient: jax.Array, step: Step, touched: Callable[[], jax.Array]
) -> jax.Array:
    """Return the tables after a stateless rule's step, which updates accessed rows only.

    Args:
      touched: returns each row's number of reads, ``[T, R, 1]``.
    """
    if step.factor is not None:
        gradient = gradient * step.factor
    new, _ = step.rule.step(weights.astype(gradient.dtype), gradient, {}, step.rate)
    new = new.astype(weights.dtype)
    # Counting reads is a second kernel, so it runs only for rules that move rows without a
    # gradient.
    return jnp.where(touched() > 0, new, weights) if step.rule.moves_without_gradient else new


# ------------------------------------------------------------------------------------- in a kernel
def products_of(blocks: RowBlocks) -> list[slice]:
    """Return the tables in each of a block's products."""
    return [slice(t, t + blocks.together) for t in range(0, blocks.tables, blocks.together)]


def rows_of(blocks: RowBlocks, tables: slice) -> slice:
    return slice(tables.start * blocks.rows, tables.stop * blocks.rows)


def matrix(
    blocks: RowBlocks, ways: Sequence[Way], tables: slice, block: Any, n_terms: int = 3
) -> list[jax.Array]:
    """Return a coefficient matrix ``[rows, samples]`` in bfloat16 terms."""
    every = []
    for ids, coefficients in ways:
        hits = _hits(blocks, ids[tables], block % blocks.parts)
        if coefficients is None:
            every.append(hits.astype(jnp.float32))
        else:
            # A select, so that a NaN coefficient of one row does not spread to other rows of its
            # sample.
            every.append(jnp.where(hits, _over_rows(blocks, coefficients[tables]), 0))
    total = functools.reduce(operator.add, every)
    total = total.reshape(blocks.together * blocks.rows, blocks.samples)
    if all(coefficients is None for _, coefficients in ways):
        return [total.astype(jnp.bfloat16)]  # small whole numbers
    return split(total, n_terms)


def _select_by_id(blocks: RowBlocks, products: jax.Array, ids: jax.Array, part: Any) -> jax.Array:
    """Select elements from ``[rows, samples]`` at row ids ``[tables, samples]``.

    Ids outside the block's rows select 0.
    """
    hits = _hits(blocks, ids, part)
    return jnp.sum(jnp.where(hits, products.reshape(hits.shape), 0), 1)


def _hits(blocks: RowBlocks, ids: jax.Array, part: Any) -> jax.Array:
    """Compare ids with row numbers: ``[tables, samples]`` -> bool ``[tables, rows, samples]``."""
    shape = (blocks.together, blocks.rows, blocks.samples)
    row = jax.lax.broadcasted_iota(jnp.int32, shape, 1)
    # Ids relative to the part; those of other parts match no row.
    return row == _over_rows(blocks, ids - part * blocks.rows if blocks.parts > 1 else ids)


def _over_rows(blocks: RowBlocks, a: jax.Array) -> jax.Array:
    """``[tables, samples]`` -> ``[tables, rows, samples]``."""
    shape = (blocks.together, blocks.rows, blocks.samples)
    return jnp.broadcast_to(a.reshape(blocks.together, 1, blocks.samples), shape)


def split(a: jax.Array, n_terms: int) -> list[jax.Array]:
    """Split a float32 array into bfloat16 terms with the same sum.

    Unlike `lutjax.kernels._xla._row_gathers.terms`, this truncates instead of rounding.
    """
    parts = []
    for _ in range(n_terms):
        # A mask is one vector instruction; the remainder is exact, so three terms of 8 digits hold
        # float32.
        upper = jax.lax.bitcast_convert_type(a, jnp.int32) & jnp.int32(-(2**16))
        term = jax.lax.bitcast_convert_type(upper, jnp.float32)
        parts.append(term.astype(jnp.bfloat16))
        a = a - term
    return parts


def multiply(a: Sequence[jax.Array], b: Sequence[jax.Array], axis_a: int, axis_b: int) -> jax.Array:
    """Multiply two matrices given in terms, without products below float32 precision."""
    most = max(len(a), len(b))
    # Term i carries digits below 8 i bits: pairs with i + j >= 3 lie below the last digit of
    # float32.
    pairs = [(i, j) for i in range(len(a)) for j in range(len(b)) if i + j < most]
    pairs.sort(key=sum, reverse=True)  # the smallest products first
    return functools.reduce(operator.add, [_dot(a[i], b[j], axis_a, axis_b) for i, j in pairs])


def _dot(a: jax.Array, b: jax.Array, axis_a: int, axis_b: int) -> jax.Array:
    contracted = (((axis_a,), (axis_b,)), ((), ()))
    # The matrix unit multiplies bfloat16 and accumulates float32.
    return jax.lax.dot_general(a, b, contracted, preferred_element_type=jnp.float32)
