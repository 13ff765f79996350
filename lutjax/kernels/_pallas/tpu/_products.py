"""Rows read and added as products with one-hot matrices, made on chip and multiplied on the matrix unit.

Arrays are detector-major with samples last, ``[T, 1, B]``, so that a one-hot matrix ``[rows, samples]`` is a comparison
without a transposition. A block is some detectors with all their rows, or, of larger tables, some rows of one detector.
Sizes are padded to whole blocks: what lies outside an array may be NaN, and would poison every sum.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from lutjax.kernels._pallas import _call
from lutjax.kernels._xla._row_gathers import terms
from lutjax.kernels.contract import Step

_ROWS = 512  # of a block, over its detectors
_SAMPLES = 512
_OUTPUTS = 512


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Blocks of a call.

    Attributes:
      group: detectors of a block. rows: of each of them in it.
      samples, outputs: of a block. detectors, n_rows, batch, n_outputs: of the whole, padded.
    """

    group: int
    rows: int
    samples: int
    outputs: int
    detectors: int
    n_rows: int
    batch: int
    n_outputs: int

    @classmethod
    def of(cls, shape: tuple[int, ...], batch: int) -> "Blocks":
        n_detectors, n_rows, n_outputs = shape
        rows = min(n_rows, _ROWS)
        group = min(n_detectors, _ROWS // rows)
        samples = min(_SAMPLES, up(batch, 128))
        outputs = min(_OUTPUTS, up(n_outputs, 128))
        return cls(
            group,
            rows,
            samples,
            outputs,
            up(n_detectors, group),
            up(n_rows, rows),
            up(batch, samples),
            up(n_outputs, outputs),
        )

    @property
    def parts(self) -> int:
        """Number of blocks that the rows of a detector are cut into."""
        return self.n_rows // self.rows

    @property
    def row_blocks(self) -> int:
        return self.detectors // self.group * self.parts

    def table(self, a: jax.Array) -> jax.Array:
        """``[..., T, R, O]`` -> ``[..., blocks * rows of a block, O]``."""
        a = padded(a, (*a.shape[:-3], self.detectors, self.n_rows, self.n_outputs))
        return a.reshape(*a.shape[:-3], -1, self.n_outputs)

    def unpadded_table(self, a: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        a = a.reshape(self.detectors, self.n_rows, self.n_outputs)
        return a[: shape[0], : shape[1], : shape[2]]

    def ids(self, index: jax.Array, n_rows: int) -> jax.Array:
        """``[B, T]`` -> ``[T, 1, B]``: rows that exist, and none for samples and detectors that do not."""
        index = jnp.clip(index, 0, n_rows - 1).T[:, None]
        pads = [(0, self.detectors - index.shape[0], 0), (0, 0, 0), (0, self.batch - index.shape[2], 0)]
        return jax.lax.pad(index, jnp.int32(-1), pads)

    def samples_of(self, a: jax.Array) -> jax.Array:
        """``[..., B, O]``, padded."""
        return padded(a, (*a.shape[:-2], self.batch, self.n_outputs))

    # ---- blocks; each takes the numbers of the block of rows, of samples and of outputs
    def table_spec(self, order: Any, n_terms: int) -> pl.BlockSpec:
        shape = (n_terms, self.group * self.rows, self.outputs)
        return pl.BlockSpec(shape, lambda *at: (0, order(*at)[0], order(*at)[2]))

    def total_spec(self, order: Any) -> pl.BlockSpec:
        return pl.BlockSpec(
            (self.group * self.rows, self.outputs), lambda *at: (order(*at)[0], order(*at)[2])
        )

    def ids_spec(self, order: Any) -> pl.BlockSpec:
        return pl.BlockSpec(
            (self.group, 1, self.samples), lambda *at: (order(*at)[0] // self.parts, 0, order(*at)[1])
        )

    def samples_spec(self, order: Any, n_terms: int) -> pl.BlockSpec:
        shape = (n_terms, self.samples, self.outputs)
        return pl.BlockSpec(shape, lambda *at: (0, *order(*at)[1:]))

    def y_spec(self, order: Any) -> pl.BlockSpec:
        return pl.BlockSpec((self.samples, self.outputs), lambda *at: order(*at)[1:])

    def hits(self, ids: jax.Array, row_block: Any) -> jax.Array:
        """Compare ids with the rows of a block: ``[group, 1, samples]`` -> bool ``[group * rows, samples]``."""
        first = row_block % self.parts * self.rows
        row = jax.lax.broadcasted_iota(jnp.int32, (self.group, self.rows, self.samples), 1)
        return (row == ids - first).reshape(self.group * self.rows, self.samples)


def sum_rows(weights: jax.Array, index: jax.Array) -> jax.Array:
    """Sum the rows that samples read: ``[T, R, O]``, ``[B, T]`` -> ``[B, O]`` float32."""
    blocks = Blocks.of(weights.shape, len(index))
    parts = blocks.table(jnp.stack(terms(weights)))

    def order(b: Any, o: Any, u: Any) -> tuple[Any, Any, Any]:
        return u, b, o

    (y,) = _call.call(
        functools.partial(_sum_rows, blocks),
        blocks.ids(index, weights.shape[1]),
        parts,
        outputs=[jax.ShapeDtypeStruct((blocks.batch, blocks.n_outputs), jnp.float32)],
        name="lookup",
        grid=(blocks.batch // blocks.samples, blocks.n_outputs // blocks.outputs, blocks.row_blocks),
        in_specs=[blocks.ids_spec(order), blocks.table_spec(order, len(parts))],
        out_specs=[blocks.y_spec(order)],
    )
    return y[: len(index), : weights.shape[2]]


def _sum_rows(blocks: Blocks, ids_ref: Any, parts_ref: Any, y_ref: Any) -> None:
    @pl.when(pl.program_id(2) == 0)
    def _() -> None:
        y_ref[...] = jnp.zeros_like(y_ref)

    one_hot = _as_bfloat16(blocks.hits(ids_ref[...], pl.program_id(2)))
    for i in range(parts_ref.shape[0]):
        y_ref[...] += _dot(one_hot, parts_ref[i], 0, 0)


def add_rows(
    total: jax.Array | None, shape: tuple[int, ...], index: jax.Array, values: jax.Array
) -> jax.Array:
    """Return tables of a shape, or zeros, plus ``values [B, O]`` at each row that was read: ``[T, R, O]`` float32."""
    blocks = Blocks.of(shape, len(index))
    parts = blocks.samples_of(jnp.stack(terms(values)))

    def order(u: Any, o: Any, b: Any) -> tuple[Any, Any, Any]:
        return u, b, o

    started = [] if total is None else [blocks.table(total)]
    (total,) = _call.call(
        functools.partial(_add_rows, blocks),
        blocks.ids(index, shape[1]),
        parts,
        *started,
        outputs=[jax.ShapeDtypeStruct((blocks.detectors * blocks.n_rows, blocks.n_outputs), jnp.float32)],
        name="lookup_add",
        grid=(blocks.row_blocks, blocks.n_outputs // blocks.outputs, blocks.batch // blocks.samples),
        in_specs=[
            blocks.ids_spec(order),
            blocks.samples_spec(order, len(parts)),
            *(blocks.total_spec(order) for _ in started),
        ],
        out_specs=[blocks.total_spec(order)],
        input_output_aliases={2: 0} if started else {},
    )
    return blocks.unpadded_table(total, shape)


def _add_rows(blocks: Blocks, ids_ref: Any, parts_ref: Any, *refs: Any) -> None:
    *started, total_ref = refs

    @pl.when(pl.program_id(2) == 0)
    def _() -> None:
        total_ref[...] = started[0][...] if started else jnp.zeros_like(total_ref)

    one_hot = _as_bfloat16(blocks.hits(ids_ref[...], pl.program_id(0)))
    for i in range(parts_ref.shape[0]):
        total_ref[...] += _dot(one_hot, parts_ref[i], 1, 0)


def differences(weights: jax.Array, index: jax.Array, other: jax.Array, dy: jax.Array) -> jax.Array:
    """Return ``<dy, row - other row>``: ``[T, R, O]``, ``[B, T]`` twice, ``[B, O]`` -> ``[B, T]`` float32.

    From the products with every row: the error is relative to them, not to what the rows differ by.
    """
    blocks = Blocks.of(weights.shape, len(index))

    def order(b: Any, u: Any, o: Any) -> tuple[Any, Any, Any]:
        return u, b, o

    (sums,) = _call.call(
        functools.partial(_differences, blocks),
        blocks.ids(index, weights.shape[1]),
        blocks.ids(other, weights.shape[1]),
        blocks.table(weights.astype(jnp.float32)),
        blocks.samples_of(dy.astype(jnp.float32)),
        outputs=[jax.ShapeDtypeStruct((blocks.detectors, 1, blocks.batch), jnp.float32)],
        name="lookup_margins",
        grid=(blocks.batch // blocks.samples, blocks.row_blocks, blocks.n_outputs // blocks.outputs),
        in_specs=[
            blocks.ids_spec(order),
            blocks.ids_spec(order),
            blocks.total_spec(order),
            blocks.y_spec(order),
        ],
        out_specs=[blocks.ids_spec(order)],
    )
    return sums[: index.shape[1], 0, : len(index)].T


def _differences(
    blocks: Blocks, main_ref: Any, other_ref: Any, table_ref: Any, dy_ref: Any, sums_ref: Any
) -> None:
    unit, output = pl.program_id(1), pl.program_id(2)

    @pl.when((unit % blocks.parts == 0) & (output == 0))
    def _() -> None:
        sums_ref[...] = jnp.zeros_like(sums_ref)

    products = _dot(table_ref[...], dy_ref[...], 1, 1, precision=jax.lax.Precision.HIGHEST)
    picked = jnp.where(blocks.hits(main_ref[...], unit), products, 0)
    picked -= jnp.where(blocks.hits(other_ref[...], unit), products, 0)
    picked = picked.reshape(blocks.group, blocks.rows, blocks.samples)
    sums_ref[...] += jnp.sum(picked, 1, keepdims=True)


def moved(weights: jax.Array, gradient: jax.Array, index: jax.Array, step: Step) -> jax.Array:
    """Return tables after a step of a rule without state, which moves rows that were read."""
    if step.factor is not None:
        gradient = gradient * step.factor
    new, _ = step.rule.step(weights.astype(gradient.dtype), gradient, {}, step.rate)
    new = new.astype(weights.dtype)
    if not step.rule.moves_without_gradient:
        return new
    ones = jnp.ones((len(index), 1), jnp.bfloat16)
    touched = add_rows(None, (*weights.shape[:2], 1), index, ones) > 0
    return jnp.where(touched, new, weights)


def _dot(a: jax.Array, b: jax.Array, axis_a: int, axis_b: int, **options: Any) -> jax.Array:
    contracted = (((axis_a,), (axis_b,)), ((), ()))
    return jax.lax.dot_general(a, b, contracted, preferred_element_type=jnp.float32, **options)


def _as_bfloat16(hits: jax.Array) -> jax.Array:
    return hits.astype(jnp.float32).astype(jnp.bfloat16)


def up(n: int, multiple: int) -> int:
    return math.ceil(n / multiple) * multiple


def padded(a: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    if a.shape == shape:
        return a
    pads = [(0, wanted - size, 0) for wanted, size in zip(shape, a.shape, strict=True)]
    return jax.lax.pad(a, jnp.zeros((), a.dtype), pads)
