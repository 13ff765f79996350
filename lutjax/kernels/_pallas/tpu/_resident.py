"""Rows read from and added to tables that stay in vector memory, one by one at ids in scalar memory.

For tables of many rows, whose one-hot matrices cost more than the reads. A row is ``[outputs / 128, 128]`` of float32: an
index of the axis in front is an address, wherever it points. The reads of one sample, one of each detector, are written
out: they overlap, and as they never meet in a row, so do additions.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from lutjax.kernels._pallas import _call, _tpus
from lutjax.kernels._pallas.tpu._limits import LANES
from lutjax.kernels._pallas.tpu._products import padded, up
from lutjax.kernels._pallas.tpu._tables import resident_bytes, resident_outputs
from lutjax.kernels.registry import Device

_READS = 2048  # of one step, over its samples
_NUMBERS = 2**18  # of outputs of one step's samples: 1 MiB, twice, beside as much of products
_TOGETHER = 16  # reads that overlap


class _Layout:
    """How a call is cut: all rows of all tables and some outputs are resident while blocks of samples pass."""

    def __init__(self, shape: tuple[int, ...], batch: int, device: Device):
        n_detectors, _, n_outputs = shape
        self.shape, self.device = shape, device
        self.outputs = resident_outputs(shape, device) or LANES
        self.n_outputs = up(n_outputs, self.outputs)
        most = min(_READS // n_detectors, _NUMBERS // self.outputs)
        self.samples = min(max(most // 8 * 8, 8), up(batch, 8))
        self.n_samples = up(batch, self.samples)
        self.reads = up(self.samples * n_detectors, 1024)  # whole lines of scalar memory
        self.grid = (self.n_outputs // self.outputs, self.n_samples // self.samples)

    def ids(self, index: jax.Array) -> jax.Array:
        """``[B, T]`` -> the row of each read among those of all tables, a line of each block of samples."""
        n_detectors, n_rows, _ = self.shape
        first = n_rows * jnp.arange(n_detectors, dtype=jnp.int32)
        rows = padded(jnp.clip(index, 0, n_rows - 1) + first[None], (self.n_samples, n_detectors))
        return padded(rows.reshape(self.grid[1], -1), (self.grid[1], self.reads)).reshape(-1)

    def rows(self, a: jax.Array) -> jax.Array:
        """``[..., O]`` -> ``[rows, lines, 128]``."""
        a = a.reshape(-1, a.shape[-1]).astype(jnp.float32)
        return padded(a, (len(a), self.n_outputs)).reshape(len(a), -1, LANES)

    def samples_of(self, dy: jax.Array) -> jax.Array:
        return self.rows(padded(dy, (self.n_samples, dy.shape[1])))

    @property
    def _lines(self) -> int:
        return self.outputs // LANES

    @property
    def ids_spec(self) -> pl.BlockSpec:
        return pl.BlockSpec((self.reads,), lambda o, b: (b,), memory_space=pltpu.SMEM)

    @property
    def table_spec(self) -> pl.BlockSpec:
        rows = self.shape[0] * self.shape[1]
        return pl.BlockSpec((rows, self._lines, LANES), lambda o, b: (0, o, 0))

    @property
    def samples_spec(self) -> pl.BlockSpec:
        return pl.BlockSpec((self.samples, self._lines, LANES), lambda o, b: (b, o, 0))

    @property
    def options(self) -> dict[str, Any]:
        vmem = _tpus.limits(self.device).vmem
        limit = min(resident_bytes(self.shape, self.outputs) + 6 * 2**20, vmem * 15 // 16)
        return {"grid": self.grid, "compiler_params": pltpu.CompilerParams(vmem_limit_bytes=limit)}

    def for_each_read(self, body: Any, unroll: int = 1) -> None:
        """Calls ``body(sample, detectors)`` for groups of detectors whose reads may overlap; `unroll`: of samples."""
        n_detectors = self.shape[0]

        def one(sample: Any, _: None) -> None:
            for first in range(0, n_detectors, _TOGETHER):
                body(sample, range(first, min(first + _TOGETHER, n_detectors)))

        jax.lax.fori_loop(0, self.samples, one, None, unroll=unroll)


def sum_rows(weights: jax.Array, index: jax.Array, device: Device) -> jax.Array:
    """``[T, R, O]``, ``[B, T]`` -> ``[B, O]`` float32."""
    layout = _Layout(weights.shape, len(index), device)
    table = layout.rows(weights)
    (y,) = _call.call(
        functools.partial(_sum_rows, layout),
        layout.ids(index),
        table,
        outputs=[jax.ShapeDtypeStruct((layout.n_samples, *table.shape[1:]), jnp.float32)],
        name="lookup",
        in_specs=[layout.ids_spec, layout.table_spec],
        out_specs=[layout.samples_spec],
        **layout.options,
    )
    return y.reshape(layout.n_samples, -1)[: len(index), : weights.shape[2]]


def _sum_rows(layout: _Layout, ids_ref: Any, table_ref: Any, y_ref: Any) -> None:
    def add(sample: Any, detectors: range) -> None:
        first = sample * layout.shape[0]
        rows = [table_ref[ids_ref[first + t]] for t in detectors]
        while len(rows) > 1:  # a tree: sums wait for each other less
            rows = [a + b for a, b in zip(rows[::2], rows[1::2], strict=False)] + rows[len(rows) & ~1 :]
        y_ref[sample] = rows[0] if detectors.start == 0 else y_ref[sample] + rows[0]

    layout.for_each_read(add, unroll=4)


def add_rows(
    total: jax.Array | None, shape: tuple[int, ...], index: jax.Array, values: jax.Array, device: Device
) -> jax.Array:
    """Tables of a shape, or zeros, plus ``values [B, O]`` at each row that was read: ``[T, R, O]`` float32."""
    layout = _Layout(shape, len(index), device)
    started = [] if total is None else [layout.rows(total)]
    lines = layout.n_outputs // LANES
    (total,) = _call.call(
        functools.partial(_add_rows, layout),
        layout.ids(index),
        layout.samples_of(values),
        *started,
        outputs=[jax.ShapeDtypeStruct((shape[0] * shape[1], lines, LANES), jnp.float32)],
        name="lookup_add",
        in_specs=[layout.ids_spec, layout.samples_spec, *(layout.table_spec for _ in started)],
        out_specs=[layout.table_spec],
        input_output_aliases={2: 0} if started else {},
        **layout.options,
    )
    return total.reshape(shape[0], shape[1], -1)[:, :, : shape[2]]


def _add_rows(layout: _Layout, ids_ref: Any, values_ref: Any, *refs: Any) -> None:
    *started, total_ref = refs

    @pl.when(pl.program_id(1) == 0)
    def _() -> None:
        total_ref[...] = started[0][...] if started else jnp.zeros_like(total_ref)

    def add(sample: Any, detectors: range) -> None:
        first = sample * layout.shape[0]
        rows = [ids_ref[first + t] for t in detectors]
        value = values_ref[sample]
        sums = [total_ref[row] + value for row in rows]
        for row, new in zip(rows, sums, strict=True):
            total_ref[row] = new

    layout.for_each_read(add)


def differences(
    weights: jax.Array, index: jax.Array, other: jax.Array, dy: jax.Array, device: Device
) -> jax.Array:
    """``<dy, row - other row>``: ``[T, R, O]``, ``[B, T]`` twice, ``[B, O]`` -> ``[B, T]`` float32."""
    layout = _Layout(weights.shape, len(index), device)
    n_reads = layout.n_samples * weights.shape[0]
    (sums,) = _call.call(
        functools.partial(_differences, layout),
        layout.ids(index),
        layout.ids(other),
        layout.rows(weights),
        layout.samples_of(dy),
        outputs=[jax.ShapeDtypeStruct((layout.grid[0], n_reads, LANES), jnp.float32)],
        name="lookup_margins",
        in_specs=[layout.ids_spec, layout.ids_spec, layout.table_spec, layout.samples_spec],
        out_specs=[pl.BlockSpec((1, layout.samples * weights.shape[0], LANES), lambda o, b: (o, b, 0))],
        **layout.options,
    )
    return jnp.sum(sums, (0, 2)).reshape(layout.n_samples, -1)[: len(index)]


def _differences(
    layout: _Layout, main_ref: Any, other_ref: Any, table_ref: Any, dy_ref: Any, sums_ref: Any
) -> None:
    def multiply(sample: Any, detectors: range) -> None:
        first = sample * layout.shape[0]
        cotangent = dy_ref[sample]
        products = [
            (table_ref[main_ref[first + t]] - table_ref[other_ref[first + t]]) * cotangent for t in detectors
        ]
        for t, product in zip(detectors, products, strict=True):
            sums_ref[0, first + t] = jnp.sum(product, 0)

    layout.for_each_read(multiply)
