"""`lutjax.scored_lut` on TensorCores: margins, read and weighted rows, one kernel per result.

Formula: as in `lutjax.kernels._xla.scored_lut`. Margins ``u`` are products between the inputs and
one-hot anchor matrices; row ids and coefficients are the read's own elementwise function of ``u``,
and its gradient is an in-kernel `jax.vjp`; `_products` sums and adds rows. ``dx`` is the anchors'
incidence matrix times ``du``.

Work: see `_products`. Every kernel recomputes margins and scores: nothing is saved.

Layout: margins, ids and coefficients are ``[tables, samples]`` in registers; inputs are ``[inputs,
samples]``.

Numerics: one-hot products keep full float32 precision, so margins equal plain JAX margins. int8
tables are multiplied as bfloat16 (exact) with integer coefficients and summed in int32. Elements
without a table or a sample are masked. Sums have a fixed order. Ids are clamped.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from lutjax.dispatch.contract import Step
from lutjax.dispatch.registry import Declaration, Device
from lutjax.kernels._pallas import _call
from lutjax.kernels._pallas.tpu import _products, _row_blocks
from lutjax.kernels._pallas.tpu._limits import params
from lutjax.kernels._pallas.tpu._products import Order, Output, Way
from lutjax.kernels._pallas.tpu._row_blocks import (
    RowBlocks,
    blocks_for_scored,
    pad_to_shape,
    round_up,
)
from lutjax.kernels._pallas.tpu._rules import tensorcore_rule
from lutjax.kernels._xla import scored_lut as plain
from lutjax.kernels._xla._row_gathers import terms
from lutjax.ops.scored_lut import ScoredLut
from lutjax.values import _quantized
from lutjax.values._row_rules import RowState

_INPUTS = 16  # of bfloat16 in a register
_BITS = 8  # of a number of bfloat16

SPEC = Declaration(tensorcore_rule(_row_blocks.unsupported, _row_blocks.slower, "int8"))


def forward(call: ScoredLut, *, device: Device) -> jax.Array:
    in_integers = call.weights.dtype == jnp.int8
    if _empty(call) or (in_integers and not plain.sums_fit_int32(call)):
        return plain.forward(call, device=device)
    blocks = _blocks(call, device)
    if in_integers:
        return _sum_of_integers(call, blocks, device)
    y = _products.sum_rows(
        _Scored(call, blocks), _tables(call), blocks, device, shared=call.sum_groups
    )
    return y.astype(call.weights.dtype)


def backward(
    call: ScoredLut, cotangent: jax.Array, needs: frozenset[str], *, device: Device
) -> dict[str, jax.Array]:
    if _empty(call) or call.weights.dtype == jnp.int8:
        return plain.backward(call, cotangent, needs, device=device)
    blocks, cotangents = _blocks(call, device), {}
    if "weights" in needs:
        reads = _Scored(call, blocks)
        cotangents["weights"] = _products.add_rows(
            None, call.weights.shape, reads, cotangent, blocks, device
        )
    others = needs - {"weights"}
    if others:
        reads = _Scored(call, blocks, others)
        pulled = _products.pull_back(
            reads, _tables(call), plain.n_ways(call), cotangent, blocks, device
        )
        cotangents |= reads.name_cotangents(pulled)
        if "scalars" in needs and not call.scalars.size:
            cotangents["scalars"] = jnp.zeros_like(call.scalars)
    return cotangents


def update(
    call: ScoredLut, cotangent: jax.Array, step: Step, *, device: Device
) -> tuple[jax.Array, RowState]:
    if _empty(call) or call.weights.dtype == jnp.int8:
        return plain.update(call, cotangent, step, device=device)
    weights, blocks = call.weights, _blocks(call, device)
    reads = _Scored(call, blocks)

    def count_reads() -> jax.Array:
        reads, ones = (
            _Scored(call, blocks, counts=True),
            jnp.ones((*cotangent.shape[:2], 1), jnp.bfloat16),
        )
        return _products.add_rows(None, (*weights.shape[:2], 1), reads, ones, blocks, device)

    def add_to(total: jax.Array | None, values: jax.Array) -> jax.Array:
        return _products.add_rows(total, weights.shape, reads, values, blocks, device)

    return _products.update_tables(weights, cotangent, step, add_to, count_reads)


def _blocks(call: ScoredLut, device: Device) -> RowBlocks:
    blocks = blocks_for_scored(call, device)
    assert blocks is not None, "a call that does not fit is not chosen"
    return blocks


def _empty(call: ScoredLut) -> bool:
    return 0 in (call.weights.size, call.x.size)


def _tables(call: ScoredLut) -> jax.Array:
    """Return the tables to read, in bfloat16 if they are quantized to 8 bits."""
    return plain.tables(call) if call.exponents is None else plain.tables(call).astype(jnp.bfloat16)


class _Scored(_products.Reads):
    """Reads computed from inputs inside a kernel.

    Args:
      needs: names of the required cotangents.
      counts: each accessed row counts once per way, regardless of its coefficient.
    """

    def __init__(
        self,
        call: ScoredLut,
        blocks: RowBlocks,
        needs: frozenset[str] = frozenset(),
        counts: bool = False,
    ):
        self._call, self._blocks, self._counts = call, blocks, counts
        # The cotangents of a read without scalars are made where they are returned.
        self._needs = [
            name for name in ("x", "scalars", "keep") if name in needs and getattr(call, name).size
        ]
        self._n_inputs = round_up(call.x.shape[2], _INPUTS)
        self._ends = 1 if call.anchors.ndim == 2 else 2
        self._n_scalars = call.scalars.shape[0]
        inputs = [
            # An array without elements has no block.
            pad_to_shape(call.scalars.astype(jnp.float32), (max(self._n_scalars, 1),)),
            self._ids(),
            self._x(),
        ]
        if call.keep is not None:
            inputs.append(blocks.split_elements(call.keep.astype(jnp.float32)[None]))
        self.inputs = tuple(inputs)

    def _ids(self) -> jax.Array:
        """Return compared input ids by table block: ``[blocks, 1, ends * comparisons * lines]``."""
        anchors, blocks = self._call.anchors, self._blocks
        ids = jnp.clip(anchors, 0, self._call.x.shape[2] - 1).reshape(
            *anchors.shape[:2], self._ends
        )
        # -1 is no input: padding tables compare zeros.
        ids = blocks.split_detectors(ids, -1)  # [blocks, lines, comparisons, ends]
        # Ends, then comparisons, then tables: each comparison of all tables is a slice of whole
        # sublanes of the product.
        return ids.transpose(0, 3, 2, 1).reshape(blocks.n_tables, 1, -1)

    def _x(self) -> jax.Array:
        """Return the inputs in terms, ``[terms, groups or 1, inputs, samples]``."""
        x = jnp.stack(terms(self._call.x)).transpose(0, 2, 3, 1)
        return pad_to_shape(
            x, (*x.shape[:2], self._n_inputs, self._blocks.n_samples * self._blocks.samples)
        )

    # ---- around a kernel
    def specs(self, order: Order) -> list[pl.BlockSpec]:
        _, ids, x, *keep = self.inputs
        return [
            pl.BlockSpec(memory_space=pltpu.SMEM),
            # Tables of this op have one part, so the block of rows is the block of tables.
            pl.BlockSpec((1, *ids.shape[1:]), lambda *point: (order(*point)[0], 0, 0)),
            self._input_spec(order, len(x)),
            *(_products.element_spec(self._blocks, order, 1) for _ in keep),
        ]

    def _input_spec(self, order: Order, n_terms: int) -> pl.BlockSpec:
        n_groups = self._call.x.shape[1]

        def index_map(*point: Any) -> tuple[Any, ...]:
            block, samples, _ = order(*point)
            return 0, _products.group(self._blocks, block, n_groups), 0, samples

        return pl.BlockSpec((n_terms, 1, self._n_inputs, self._blocks.samples), index_map)

    def cotangents(self, order: Order) -> list[Output]:
        blocks, x = self._blocks, self.inputs[2]
        of_element = (blocks.lines, blocks.samples)
        batch = blocks.n_samples * blocks.samples
        every = {
            "x": ((1, *x.shape[1:]), self._input_spec(order, 1)),
            # Sums over all blocks, element by element.
            "scalars": (
                (self._n_scalars, *of_element),
                pl.BlockSpec((self._n_scalars, *of_element), lambda *_: (0, 0, 0)),
            ),
            "keep": (
                (1, blocks.n_tables, blocks.lines, batch),
                _products.element_spec(blocks, order, 1),
            ),
        }
        return [(jax.ShapeDtypeStruct(every[n][0], jnp.float32), every[n][1]) for n in self._needs]

    def name_cotangents(self, found: Sequence[jax.Array]) -> dict[str, jax.Array]:
        every = dict(zip(self._needs, found, strict=True))
        batch, _, n_inputs = self._call.x.shape
        layouts = {
            "x": lambda a: a[0, :, :n_inputs, :batch].transpose(2, 0, 1),
            "scalars": lambda a: jnp.sum(a, (1, 2)),
            "keep": lambda a: self._blocks.to_elements(a[0]),
        }
        return {name: layouts[name](a) for name, a in every.items()}

    # ---- in a kernel
    def compute_ways(self, refs: Sequence[Any], block: Any, samples: Any) -> list[Way]:
        u, scalars, keep = self._arguments(refs)
        ways = self._call.read.select(u, plain.name_scalars(self._call.read, scalars))[
            : self._call.read.valued
        ]
        if keep is not None:
            ways = [(index, keep * coefficient) for index, coefficient in ways]
        if self._counts:
            # A coefficient of 0 is no hit.
            ways = [(index, (coefficient != 0).astype(jnp.float32)) for index, coefficient in ways]
        return [
            (self._mask_missing(index, block, samples), coefficient) for index, coefficient in ways
        ]

    def index(self, refs: Sequence[Any], block: Any, samples: Any) -> list[jax.Array]:
        u, scalars, _ = self._arguments(refs)
        ways = self._call.read.select(u, plain.name_scalars(self._call.read, scalars))
        return [self._mask_missing(index, block, samples) for index, _ in ways]

    def pull(
        self,
        refs: Sequence[Any],
        outputs: Sequence[Any],
        products: Sequence[jax.Array],
        block: Any,
        samples: Any,
    ) -> None:
        by_name = dict(zip(self._needs, outputs, strict=True))
        _, pull, _ = plain.linearize_read(self._call.read, *self._arguments(refs))
        du, scalars, keep = pull(list(products))
        exist = self._exist(block, samples)
        if "x" in by_name:
            ref, blocks_of_x = by_name["x"], self._blocks.n_rows // self._call.x.shape[1]

            # The first block of tables that reads this group of inputs.
            @pl.when(block % blocks_of_x == 0)
            def _() -> None:
                ref[...] = jnp.zeros_like(ref)

            # Masked by a select: cotangents of padding elements may be NaN, and one NaN would reach
            # all inputs of its sample.
            of_margins = _products.split(jnp.concatenate([jnp.where(exist, d, 0) for d in du]), 3)
            ref[0, 0] += _products.multiply([self._incidence(refs)], of_margins, 1, 0)
        if "scalars" in by_name:
            of_scalars = by_name["scalars"]

            # One sum over the whole grid, kept element by element: XLA reduces it once.
            @pl.when((block == 0) & (samples == 0))
            def _() -> None:
                of_scalars[...] = jnp.zeros_like(of_scalars)

            for i, scalar in enumerate(scalars):
                of_scalars[i] += jnp.where(exist, scalar, 0)
        if "keep" in by_name:
            by_name["keep"][0, 0] = keep

    def _arguments(
        self, refs: Sequence[Any]
    ) -> tuple[list[jax.Array], list[jax.Array], jax.Array | None]:
        """Return margins, scalars and coefficient factors, each ``[lines, samples]``."""
        scalars_ref, ids_ref, x_ref, *keep_ref = refs
        lines, shape = self._blocks.lines, (self._blocks.lines, self._blocks.samples)
        # A gather by matrix: an input may be read by any table, and the sum of its terms is exact.
        ends = _products.multiply(
            [self._one_hot(ids_ref[0])], [x_ref[i, 0] for i in range(len(self.inputs[2]))], 0, 0
        )
        of_ends = [ends[first : first + lines] for first in range(0, len(ends), lines)]
        n = self._call.anchors.shape[1]
        u = (
            of_ends
            if self._ends == 1
            else [a - b for a, b in zip(of_ends[:n], of_ends[n:], strict=True)]
        )
        scalars = [jnp.full(shape, scalars_ref[i]) for i in range(self._n_scalars)]
        return u, scalars, keep_ref[0][0, 0] if keep_ref else None

    def _incidence(self, refs: Sequence[Any]) -> jax.Array:
        """Return the margins' signed input incidence: ``[inputs, comparisons * lines]``."""
        ids = refs[1][0]
        if self._ends == 1:
            return self._one_hot(ids)
        half = ids.shape[1] // 2
        return self._one_hot(ids[:, :half]) - self._one_hot(ids[:, half:])

    def _one_hot(self, ids: jax.Array) -> jax.Array:
        """``[1, n]`` -> bfloat16 ``[inputs, n]``."""
        inputs = jax.lax.broadcasted_iota(jnp.int32, (self._n_inputs, ids.shape[1]), 0)
        return (inputs == ids).astype(jnp.float32).astype(jnp.bfloat16)

    def _exist(self, block: Any, samples: Any) -> jax.Array:
        """Return a mask over ``[lines, samples]``: True for tables and samples in the call."""
        blocks = self._blocks
        shape = (blocks.lines, blocks.samples)
        line, sample = (jax.lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
        table = block % blocks.blocks_per_group * blocks.tables + line
        return (
            (line < blocks.tables)
            & (table < blocks.each)
            & (samples * blocks.samples + sample < blocks.batch)
        )

    def _mask_missing(self, index: jax.Array, block: Any, samples: Any) -> jax.Array:
        """Return row ids, negative where no table or sample exists."""
        index = jnp.clip(index, 0, self._call.weights.shape[1] - 1)
        # Clamped first: an id out of range of an existing element reads the nearest row.
        return jnp.where(self._exist(block, samples), index, -1)


def _sum_of_integers(call: ScoredLut, blocks: RowBlocks, device: Device) -> jax.Array:
    """Sum integers times coefficients in units of the smallest coefficient, then rescale."""
    assert call.exponents is not None
    reads, table = _Scored(call, blocks), blocks.split_tables(call.weights[None])
    most = plain.n_ways(call) * _quantized.MOST_UNITS  # of a row that all ways read
    # As many bfloat16 terms of 8 bits as the largest sum of coefficients of a row needs.
    n_terms = -(-most.bit_length() // _BITS)
    per_group = blocks.n_rows // blocks.groups

    def order(b: Any, o: Any, v: Any) -> tuple[Any, Any, Any]:
        return v, b, o

    def kernel(*refs: Any) -> None:
        *given, table_ref, y_ref, unknown_ref = refs
        samples, block = pl.program_id(0), pl.program_id(2)

        @pl.when(block % per_group == 0)
        def _() -> None:
            y_ref[...] = jnp.zeros_like(y_ref)
            unknown_ref[...] = jnp.zeros_like(unknown_ref)

        whole: list[Way] = []
        for index, coefficient in reads.compute_ways(given, block, samples):
            assert coefficient is not None
            units, wrong = _quantized.in_units(coefficient)
            unknown = jnp.where(index < 0, 0, wrong.astype(jnp.float32))
            # Integers have no NaN: a count per sample carries it.
            unknown_ref[0] += jnp.sum(unknown, 0, keepdims=True)
            whole.append((index, units.astype(jnp.float32)))
        for tables in _products.products_of(blocks):
            # int8 is exact in bfloat16, whose 8 significant bits hold all of [-128, 127].
            rows = (
                table_ref[0, 0, _products.rows_of(blocks, tables)]
                .astype(jnp.float32)
                .astype(jnp.bfloat16)
            )
            matrix = _products.matrix(blocks, whole, tables, block, n_terms)
            # A product is exact in float32 (see `of_scored`); the sum over products may not be, so
            # it is one of integers.
            y_ref[0, 0] += _products.multiply(matrix, [rows], 0, 0).astype(jnp.int32)

    def unknown_index_map(*point: Any) -> tuple[Any, ...]:
        block, samples, _ = order(*point)
        return _products.group(blocks, block, blocks.groups), 0, samples

    total, unknown = _call.call(
        kernel,
        *reads.inputs,
        table,
        outputs=[
            _products.sums_shape(blocks, blocks.groups, jnp.int32),
            jax.ShapeDtypeStruct(
                (blocks.groups, 1, blocks.n_samples * blocks.samples), jnp.float32
            ),
        ],
        name="rows_of_integers",
        grid=(blocks.n_samples, blocks.n_of_outputs, blocks.n_rows),
        in_specs=[*reads.specs(order), _products.table_spec(blocks, order, 1)],
        out_specs=[
            _products.sample_spec(blocks, order, 1, blocks.groups),
            pl.BlockSpec((1, 1, blocks.samples), unknown_index_map),
        ],
        compiler_params=params(device),
    )
    return plain.in_floats(
        call, blocks.to_samples(total[0]), unknown[:, 0, : blocks.batch].T > 0, call.scalars.dtype
    )
