"""Sparse lookups with long rows: one sample's outputs or cotangents in shared memory.

Formula for sample ``b``, detectors ``t``, slots ``k`` with ``row = index[b, t]``::

    sum_slots:    y[b, targets[t, row, k]] += weights[t, row, k]
    differences:  d[b, t] = sum_k weights[t, row, k] * dy[b, targets[t, row, k]]
                            - the same for the other row

Work: one program of one warpgroup per sample. To sum, a thread takes a slot of a detector, reads
weight and target, and adds to shared memory. For differences a warp takes a detector, its 32 lanes
read adjacent slots of both rows, and a butterfly sums the lanes.

Layout: tables and targets stay in global memory, read coalesced because adjacent lanes read
adjacent slots. Scattered accesses only hit shared memory.

Numerics: float32 or int32. Float additions to shared memory are atomic in varying order, so the
last bits of ``y`` may differ between runs; integers and differences do not vary. The caller clamps
ids; target -1 is an unused slot. Where both rows reach the same output, values are subtracted
before the product.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mosaic
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import arith, memref

from lutjax.kernels._pallas.gpu import _mosaic_launch, _mosaic_values as mlir

_THREADS = _mosaic_launch.THREADS
_LANES = 32
_WARPS = _THREADS // _LANES
# Slots that a thread reads at the same time; of margins, half as many detectors that a warp does.
_TOGETHER = 16


def sum_slots(
    weights: jax.Array, index: jax.Array, targets: jax.Array, n_outputs: int
) -> jax.Array:
    """Sum the addressed slots: ``[T, R, K]``, ``[B, T]``, ``[T or 1, R or 1, K]`` -> ``[B, O]``.

    Args:
      weights: float32 or int32, also the dtype of the sums. index: existing row ids.
      targets: output ids; -1 marks an unused slot.
    """
    n_detectors, _, n_slots = weights.shape
    slots, entries = _Slots.from_arrays(weights, targets), n_detectors * n_slots
    together = min(_TOGETHER, -(-entries // _THREADS))

    def kernel(index: Any, weights: Any, targets: Any, y: Any) -> None:
        sample = lax.axis_index("samples")

        def with_sums(sums: Any) -> None:
            layout = mlir.layout_of_all(sums.shape[0])
            # Zeros must be visible to all threads before the first addition: hence the commit
            # below.
            sums[...] = plgpu.layout_cast(jnp.zeros(sums.shape, sums.dtype), layout)
            plgpu.commit_smem()

            @pl.loop(0, -(-entries // (together * _THREADS)))
            def _(step: jax.Array) -> None:
                _add(
                    index.at[sample],
                    weights,
                    targets,
                    sums,
                    step * together * _THREADS,
                    together,
                    slots,
                )

            plgpu.commit_smem()
            # The commit above completes the additions of all threads.
            y[sample] = _mosaic_launch.load(sums, layout)

        sums = plgpu.SMEM((_pad_outputs(n_outputs),), weights.dtype)
        pl.run_scoped(with_sums, sums, collective_axes="warpgroup")

    (y,) = _mosaic_launch.launch(
        kernel,
        index,
        weights.reshape(-1),
        targets.reshape(-1),
        outputs=[jax.ShapeDtypeStruct((len(index), _pad_outputs(n_outputs)), weights.dtype)],
        name="sparse_lookup",
        grid={"samples": len(index)},
        by_lanes=True,
        warpgroups=1,
    )
    return y[:, :n_outputs]


def differences(
    weights: jax.Array, index: jax.Array, other: jax.Array, targets: jax.Array, dy: jax.Array
) -> jax.Array:
    """Return dy products with the row minus products with the other row, float32 ``[B, T]``.

    Args:
      weights: float32. index, other: existing row ids. dy: float32 ``[B, O]``.
    """
    n_detectors = weights.shape[0]
    slots = _Slots.from_arrays(weights, targets)
    together = min(_TOGETHER // 2, -(-n_detectors // _WARPS))
    dy = _mosaic_launch.pad_to(dy, _pad_outputs(dy.shape[1]))

    def kernel(index: Any, other: Any, weights: Any, targets: Any, dy: Any, output: Any) -> None:
        sample = lax.axis_index("samples")

        def with_cotangents(cotangents: Any) -> None:
            layout = mlir.layout_of_all(cotangents.shape[0])
            # One coalesced copy; the scattered reads of targets then hit shared memory. The commit
            # makes it visible to all warps.
            cotangents[...] = _mosaic_launch.load(dy.at[sample], layout)
            plgpu.commit_smem()

            @pl.loop(0, -(-n_detectors // (together * _WARPS)))
            def _(step: jax.Array) -> None:
                arrays = (
                    index.at[sample],
                    other.at[sample],
                    weights,
                    targets,
                    cotangents,
                    output.at[sample],
                )
                _subtract(*arrays, step * together * _WARPS, together, slots)

        cotangents = plgpu.SMEM((dy.shape[1],), jnp.float32)
        pl.run_scoped(with_cotangents, cotangents, collective_axes="warpgroup")

    (output,) = _mosaic_launch.launch(
        kernel,
        index,
        other,
        weights.reshape(-1),
        targets.reshape(-1),
        dy,
        outputs=[jax.ShapeDtypeStruct(index.shape, jnp.float32)],
        name="sparse_lookup_margins",
        grid={"samples": len(index)},
        by_lanes=True,
        warpgroups=1,
    )
    return output


def _pad_outputs(n_outputs: int) -> int:
    """Round the number of outputs up to a multiple of the threads."""
    return -(-n_outputs // _THREADS) * _THREADS


@dataclasses.dataclass(frozen=True)
class _Slots:
    """Sizes of the tables and their target lists."""

    n_detectors: int
    n_rows: int
    n_slots: int
    list_per_table: bool
    list_per_row: bool

    @classmethod
    def from_arrays(cls, weights: jax.Array, targets: jax.Array) -> "_Slots":
        n_detectors, n_rows, n_slots = weights.shape
        return cls(n_detectors, n_rows, n_slots, targets.shape[0] > 1, targets.shape[1] > 1)

    def offsets(self, detector: Any, row: Any, slot: Any) -> tuple[Any, Any]:
        """Return a slot's offsets in the tables and in the target lists."""

        def offset(number: Any) -> Any:
            return arith.addi(arith.muli(number, mlir.integer(self.n_slots)), slot)

        number = arith.addi(arith.muli(detector, mlir.integer(self.n_rows)), row)
        if self.list_per_row:
            return offset(number), offset(number if self.list_per_table else row)
        # Targets shared by all rows of a table, or by all tables, have one list.
        return offset(number), offset(detector) if self.list_per_table else slot


# ------------------------------------------------------------------------------------- in kernels
def _add(
    index: Any,
    weights: Any,
    targets: Any,
    sums: Any,
    first: jax.Array,
    together: int,
    slots: _Slots,
) -> None:
    """Add a sample's slots to their targets, starting with slot `first`, `together` per thread."""
    entries = slots.n_detectors * slots.n_slots

    @plgpu.inline_mgpu(arg_types=(*(plgpu.RefType(),) * 4, mlir.one_each(together)))
    def add(_: Any, index: Any, weights: Any, targets: Any, sums: Any, numbers: Any) -> None:
        base = mlir.address(sums)
        read = []
        for register in numbers.registers.flat:
            number = mlir.only_element(register)
            # The last step has threads without a slot: they read the last one and add nothing.
            exists = arith.cmpi(arith.CmpIPredicate.slt, number, mlir.integer(entries))
            number = arith.minsi(number, mlir.integer(entries - 1))
            detector = arith.divui(number, mlir.integer(slots.n_slots))
            slot = arith.remui(number, mlir.integer(slots.n_slots))
            read.append((exists, detector, slot, mlir.load_element(index, detector)))
        # Three rounds: all row ids, then all weights and targets, then the additions. Loads of a
        # round do not depend on each other, so their latencies overlap.
        values = []
        for exists, detector, slot, row in read:
            place, of_list = slots.offsets(detector, row, slot)
            values.append(
                (
                    mlir.load_element(weights, place),
                    arith.select(exists, mlir.load_element(targets, of_list), mlir.integer(-1)),
                )
            )
        for value, target in values:
            mlir.add_in_shared_memory(base, target, value)

    add(index, weights, targets, sums, mlir.iota(first, together))


def _subtract(
    index: Any,
    other: Any,
    weights: Any,
    targets: Any,
    cotangents: Any,
    found: Any,
    first: jax.Array,
    together: int,
    slots: _Slots,
) -> None:
    """Write a sample's differences, starting with detector `first`, `together` per warp."""

    @plgpu.inline_mgpu(arg_types=(*(plgpu.RefType(),) * 6, mlir.one_each(together)))
    def subtract(
        _: Any,
        index: Any,
        other: Any,
        weights: Any,
        targets: Any,
        dy: Any,
        found: Any,
        numbers: Any,
    ) -> None:
        warps = []
        for register in numbers.registers.flat:
            number = mlir.only_element(register)
            detector = arith.divui(number, mlir.integer(_LANES))
            detector = arith.minsi(
                detector, mlir.integer(slots.n_detectors - 1)
            )  # the last one again
            lane = arith.remui(number, mlir.integer(_LANES))
            warps.append(
                (
                    detector,
                    lane,
                    mlir.load_element(index, detector),
                    mlir.load_element(other, detector),
                )
            )
        # Several detectors per warp at a time, so that their loads overlap.
        totals = [mlir.zero()] * len(warps)
        for start in range(0, slots.n_slots, _LANES):
            read = []
            for detector, lane, row, other_row in warps:
                slot = arith.addi(lane, mlir.integer(start))
                # Rows need not be multiples of 32 slots: other lanes read the last slot and are
                # masked.
                exists = arith.cmpi(arith.CmpIPredicate.slt, slot, mlir.integer(slots.n_slots))
                slot = arith.minsi(slot, mlir.integer(slots.n_slots - 1))
                of_rows = [slots.offsets(detector, r, slot) for r in (row, other_row)]
                read.append(
                    [
                        (mlir.load_element(weights, p), mlir.load_element(targets, q), exists)
                        for p, q in of_rows
                    ]
                )
            totals = [
                arith.addf(total, _slot_difference(dy, *pair))
                for total, pair in zip(totals, read, strict=True)
            ]
        for (detector, *_), total in zip(warps, totals, strict=True):
            # Butterfly: after five exchanges every lane has the sum.
            distance = _LANES // 2
            while distance:
                total = arith.addf(total, mosaic.utils.shfl_bfly(total, distance))
                distance //= 2
            memref.store(total, found, [mlir.to_index(detector)])  # every lane the same

    arrays = index, other, weights, targets, cotangents, found
    subtract(*arrays, mlir.iota(first * _LANES, together))


def _slot_difference(dy: Any, main: tuple[Any, Any, Any], other: tuple[Any, Any, Any]) -> Any:
    """Return two slots' products with their target cotangents, subtracted."""

    def with_cotangent(value: Any, target: Any, exists: Any) -> tuple[Any, Any]:
        used = arith.andi(exists, arith.cmpi(arith.CmpIPredicate.sge, target, mlir.integer(0)))
        none = mlir.zero()
        # Loads need a valid address; the selects drop unused slots, whose weight may be NaN.
        cotangent = mlir.load_element(dy, arith.maxsi(target, mlir.integer(0)))
        return arith.select(used, value, none), arith.select(used, cotangent, none)

    (value, cotangent), (other_value, other_cotangent) = (
        with_cotangent(*main),
        with_cotangent(*other),
    )
    # Where both rows reach one output, values are subtracted before they are multiplied.
    together = arith.mulf(arith.subf(value, other_value), cotangent)
    apart = arith.subf(arith.mulf(value, cotangent), arith.mulf(other_value, other_cotangent))
    return arith.select(arith.cmpi(arith.CmpIPredicate.eq, main[1], other[1]), together, apart)
