"""Row reads and additions in resident vector-memory tables, for tables with many rows.

Formula: ``y[b] = sum_t weights[t, index[b, t]]``, ``total[t, index[b, t]] += values[b]``, and
``<dy[b], row - other row>``. For large tables, one-hot matrices cost more than single reads.

Work: grid (output blocks, sample blocks). All rows in all tables, restricted to one output block,
are copied to vector memory at the first sample block. Then samples are visited one by one. One
sample's reads, one per table, are unrolled and overlap. They address different tables, so additions
never meet in a row.

Layout: a resident row is ``[outputs / 128, 128]``: any index into the leading axis is an address.
XLA tiles eight rows together; the copies change that, one 128-output column at a time. Ids are in
scalar memory.

Numerics: float32. Tables are added as a tree within 16, samples in ascending order, so results are
equal in every run. Rows are subtracted before the product. Ids are clamped.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from lutjax.dispatch.registry import Device
from lutjax.kernels._pallas import _call, _tpus
from lutjax.kernels._pallas.tpu._limits import LANES
from lutjax.kernels._pallas.tpu._row_blocks import pad_to_shape, round_up
from lutjax.kernels._pallas.tpu._tables import resident_bytes, resident_outputs

_READS = 2048  # of one step, over its samples
_NUMBERS = 2**18  # of outputs of one step's samples: 1 MiB, twice, beside as much of products
_TOGETHER = 16  # reads that overlap
_WRITTEN_OUT = 128  # of a loop that only reads


class _Layout:
    """Call layout: the table block stays resident while sample blocks pass."""

    def __init__(self, shape: tuple[int, ...], batch: int, device: Device):
        n_detectors, _, n_outputs = shape
        self.shape, self.device = shape, device
        self.outputs = resident_outputs(shape, device) or LANES
        self.n_outputs = round_up(n_outputs, self.outputs)
        # Two limits: ids in scalar memory, and outputs of the samples in vector memory.
        most = min(_READS // n_detectors, _NUMBERS // self.outputs)
        self.samples = min(max(most // 8 * 8, 8), round_up(batch, 8))
        self.n_samples = round_up(batch, self.samples)
        self.reads = round_up(self.samples * n_detectors, 1024)  # whole lines of scalar memory
        self.grid = (self.n_outputs // self.outputs, self.n_samples // self.samples)

    def ids(self, index: jax.Array) -> jax.Array:
        """Return each read's row number among all tables, one line per sample block."""
        n_detectors, n_rows, _ = self.shape
        # Row numbers over all tables: one index instead of two in the inner loop.
        first = n_rows * jnp.arange(n_detectors, dtype=jnp.int32)
        rows = pad_to_shape(
            jnp.clip(index, 0, n_rows - 1) + first[None], (self.n_samples, n_detectors)
        )
        return pad_to_shape(rows.reshape(self.grid[1], -1), (self.grid[1], self.reads)).reshape(-1)

    def table(self, weights: jax.Array) -> jax.Array:
        """``[T, R, O]`` -> ``[rows, padded outputs]``."""
        rows = self.shape[0] * self.shape[1]
        return pad_to_shape(weights.astype(jnp.float32).reshape(rows, -1), (rows, self.n_outputs))

    def samples_of(self, dy: jax.Array) -> jax.Array:
        """``[B, O]`` -> ``[blocks of outputs, padded samples, lines, 128]``."""
        dy = pad_to_shape(dy.astype(jnp.float32), (self.n_samples, self.n_outputs))
        return jnp.swapaxes(dy.reshape(self.n_samples, self.grid[0], -1, LANES), 0, 1)

    def batch_first(self, y: jax.Array) -> jax.Array:
        """Undo `samples_of`, but for the padding."""
        return jnp.swapaxes(y, 0, 1).reshape(self.n_samples, self.n_outputs)

    @property
    def _lines(self) -> int:
        return self.outputs // LANES

    @property
    def ids_spec(self) -> pl.BlockSpec:
        return pl.BlockSpec((self.reads,), lambda o, b: (b,), memory_space=pltpu.SMEM)

    @property
    def table_spec(self) -> pl.BlockSpec:
        """Return the table in its own memory; `copy` transfers it explicitly."""
        return pl.BlockSpec(memory_space=pl.ANY)

    @property
    def sums_of_samples(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((self.grid[0], self.n_samples, self._lines, LANES), jnp.float32)

    @property
    def samples_spec(self) -> pl.BlockSpec:
        return pl.BlockSpec((1, self.samples, self._lines, LANES), lambda o, b: (o, b, 0, 0))

    @property
    def options(self) -> dict[str, Any]:
        vmem = _tpus.limits(self.device).vmem
        # The table has one buffer: it is copied by hand, so the automatic pipeline does not double
        # it.
        limit = min(resident_bytes(self.shape, self.outputs) + 6 * 2**20, vmem * 15 // 16)
        rows = self.shape[0] * self.shape[1]
        return {
            "grid": self.grid,
            "scratch_shapes": [
                pltpu.VMEM((rows, self._lines, LANES), jnp.float32),
                pltpu.SemaphoreType.DMA((self._lines,)),
            ],
            "compiler_params": pltpu.CompilerParams(vmem_limit_bytes=limit),
        }

    def copy(
        self, table_ref: Any, resident_ref: Any, semaphores: Any, *, back: bool = False
    ) -> None:
        """Copy this step's outputs for all rows into vector memory, or back."""
        copies = []
        for line in range(self._lines):
            column = (pl.program_id(0) * self._lines + line) * LANES
            ends = table_ref.at[:, pl.ds(column, LANES)], resident_ref.at[:, line]
            # All columns are started before the first wait, so that their transfers overlap.
            copies.append(
                pltpu.make_async_copy(*(ends[::-1] if back else ends), semaphores.at[line])
            )
        for copy in copies:
            copy.start()
        for copy in copies:
            copy.wait()

    def for_each_read(self, body: Any, unroll: int = 1) -> None:
        """Call ``body(sample, detectors)`` for detector groups with overlapping reads.

        `unroll` is the number of unrolled samples.
        """
        n_detectors = self.shape[0]

        def one(sample: Any, _: None) -> None:
            # Groups of reads bound the number of live registers.
            for first in range(0, n_detectors, _TOGETHER):
                body(sample, range(first, min(first + _TOGETHER, n_detectors)))

        jax.lax.fori_loop(0, self.samples, one, None, unroll=unroll)


def sum_rows(weights: jax.Array, index: jax.Array, device: Device) -> jax.Array:
    """Sum the addressed rows: ``[T, R, O]``, ``[B, T]`` -> ``[B, O]`` float32."""
    layout = _Layout(weights.shape, len(index), device)
    (y,) = _call.call(
        functools.partial(_sum_rows, layout),
        layout.ids(index),
        layout.table(weights),
        outputs=[layout.sums_of_samples],
        name="lookup",
        in_specs=[layout.ids_spec, layout.table_spec],
        out_specs=[layout.samples_spec],
        **layout.options,
    )
    return layout.batch_first(y)[: len(index), : weights.shape[2]]


def _sum_rows(
    layout: _Layout, ids_ref: Any, table_ref: Any, y_ref: Any, resident_ref: Any, semaphores: Any
) -> None:
    pl.when(pl.program_id(1) == 0)(lambda: layout.copy(table_ref, resident_ref, semaphores))

    def add(sample: Any, detectors: range) -> None:
        first = sample * layout.shape[0]
        rows = [resident_ref[ids_ref[first + t]] for t in detectors]
        while len(rows) > 1:  # a tree: sums wait for each other less
            rows = [a + b for a, b in zip(rows[::2], rows[1::2], strict=False)] + rows[
                len(rows) & ~1 :
            ]
        # The first group of tables sets the sum: no separate clearing pass.
        y_ref[0, sample] = rows[0] if detectors.start == 0 else y_ref[0, sample] + rows[0]

    layout.for_each_read(add, unroll=max(min(_WRITTEN_OUT // layout.shape[0], 8), 1))


def add_rows(
    total: jax.Array | None,
    shape: tuple[int, ...],
    index: jax.Array,
    values: jax.Array,
    device: Device,
) -> jax.Array:
    """Return the tables, or zeros, plus ``values [B, O]`` at each addressed row, float32."""
    layout = _Layout(shape, len(index), device)
    started = [] if total is None else [layout.table(total)]
    (total,) = _call.call(
        functools.partial(_add_rows, layout),
        layout.ids(index),
        layout.samples_of(values),
        *started,
        outputs=[jax.ShapeDtypeStruct((shape[0] * shape[1], layout.n_outputs), jnp.float32)],
        name="lookup_add",
        in_specs=[layout.ids_spec, layout.samples_spec, *(layout.table_spec for _ in started)],
        out_specs=[layout.table_spec],
        # In place: the table is read at the first step of a block of outputs, and written at the
        # last.
        input_output_aliases={2: 0} if started else {},
        **layout.options,
    )
    return total.reshape(shape[0], shape[1], -1)[:, :, : shape[2]]


def _add_rows(layout: _Layout, ids_ref: Any, values_ref: Any, *refs: Any) -> None:
    *started, total_ref, resident_ref, semaphores = refs

    @pl.when(pl.program_id(1) == 0)
    def _() -> None:
        if started:
            layout.copy(started[0], resident_ref, semaphores)
        else:
            resident_ref[...] = jnp.zeros_like(resident_ref)

    def add(sample: Any, detectors: range) -> None:
        first = sample * layout.shape[0]
        rows = [ids_ref[first + t] for t in detectors]
        value = values_ref[0, sample]
        # All rows are read before the first is written: otherwise each store would wait for
        # possible aliases. Rows of different tables are distinct.
        sums = [resident_ref[row] + value for row in rows]
        for row, new in zip(rows, sums, strict=True):
            resident_ref[row] = new

    layout.for_each_read(add)
    # Written back once per block of outputs, after all samples.
    last = pl.program_id(1) == pl.num_programs(1) - 1
    pl.when(last)(lambda: layout.copy(total_ref, resident_ref, semaphores, back=True))


def differences(
    weights: jax.Array, index: jax.Array, other: jax.Array, dy: jax.Array, device: Device
) -> jax.Array:
    """Return ``<dy, row - other row>``, float32 ``[B, T]``, for ids ``[B, T]``, ``dy [B, O]``."""
    layout = _Layout(weights.shape, len(index), device)
    n_reads = layout.n_samples * weights.shape[0]
    (sums,) = _call.call(
        functools.partial(_differences, layout),
        layout.ids(index),
        layout.ids(other),
        layout.table(weights),
        layout.samples_of(dy),
        outputs=[jax.ShapeDtypeStruct((layout.grid[0], n_reads, LANES), jnp.float32)],
        name="lookup_margins",
        in_specs=[layout.ids_spec, layout.ids_spec, layout.table_spec, layout.samples_spec],
        out_specs=[
            pl.BlockSpec((1, layout.samples * weights.shape[0], LANES), lambda o, b: (o, b, 0))
        ],
        **layout.options,
    )
    return jnp.sum(sums, (0, 2)).reshape(layout.n_samples, -1)[: len(index)]


def _differences(
    layout: _Layout,
    main_ref: Any,
    other_ref: Any,
    table_ref: Any,
    dy_ref: Any,
    sums_ref: Any,
    resident_ref: Any,
    semaphores: Any,
) -> None:
    pl.when(pl.program_id(1) == 0)(lambda: layout.copy(table_ref, resident_ref, semaphores))

    def multiply(sample: Any, detectors: range) -> None:
        first = sample * layout.shape[0]
        cotangent = dy_ref[0, sample]
        products = [
            (resident_ref[main_ref[first + t]] - resident_ref[other_ref[first + t]]) * cotangent
            for t in detectors
        ]
        for t, product in zip(detectors, products, strict=True):
            # Lanes are not summed here: that is slow per read, and XLA does it for all reads at
            # once.
            sums_ref[0, first + t] = jnp.sum(product, 0)

    layout.for_each_read(multiply)
