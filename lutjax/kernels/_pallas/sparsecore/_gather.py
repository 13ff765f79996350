"""The kernels on SparseCores, and nothing else: arrays come in blocks that fit a subcore.

Each subcore takes every so-manieth block of samples. For one term after the other it fetches the rows that the
samples of its block address, by one indirect copy, and adds them up or multiplies them with the cotangents. Copies
are waited for one by one.

They lower and compile for v5p, v6e and v7x. No such device ran them, and no interpreter of Pallas runs them as they
are: it has been seen that they compute the right numbers where indirect copies, loads and additions by index, parallel
loops and copies without a semaphore are replaced by plain ones, not that these do what they promise.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu, tpu_sc as plsc

from lutjax.kernels._pallas import _call
from lutjax.kernels._pallas._tpus import SparseCores
from lutjax.kernels._pallas.sparsecore import _sizes


def sum_rows(table: jax.Array, ids: jax.Array, terms: int, cores: SparseCores) -> jax.Array:
    """Sum over terms the rows that they address.

    Args:
      table: ``[rows, width]`` float32, of a width that `_sizes.width` gives.
      ids: ``[blocks, groups * group, block]`` int32: rows that exist, of `terms` terms; the rest is not looked at.

    Returns:
      ``[blocks * block, width]``.
    """
    blocks, _, block = ids.shape
    width = table.shape[1]

    def kernel(table: Any, ids: Any, y: Any, ids_here: Any, total: Any) -> None:
        def of_block(b: jax.Array) -> None:
            def of_term(t: jax.Array, number: jax.Array) -> None:
                @pl.when(number == 0)
                def _() -> None:
                    _fetch(table, ids_here, t, total)

                @pl.when(number > 0)
                def _() -> None:
                    _fetch(table, ids_here, t, total, add=True)

            _for_each_term(terms, [(ids.at[b], ids_here)], of_term)
            _copy_out(total, y.at[pl.ds(b * block, block)])

        _for_each_block(cores, blocks, of_block)

    return _launch(
        kernel,
        table,
        ids,
        output=jax.ShapeDtypeStruct((blocks * block, width), table.dtype),
        scratch=[
            pltpu.VMEM((_sizes.group(terms), block), jnp.int32),
            pltpu.VMEM((block, width), table.dtype),
        ],
        cores=cores,
        in_tiles=width % _sizes.TILE == 0,
        name="sum_rows",
    )


def differences(
    table: jax.Array,
    ids: tuple[jax.Array, ...],
    dy: jax.Array,
    terms: int,
    cores: SparseCores,
) -> jax.Array:
    """Return ``<dy, row - other row>`` of each read, for each other way to read than the first.

    Args:
      table, terms: as for `sum_rows`. ids: for each way to read, as there.
      dy: ``[blocks * block, width]``, of each sample.

    Returns:
      ``[ways - 1, *shape of ids]``; what lies behind `terms` terms means nothing.
    """
    blocks, _, block = ids[0].shape
    width, n_others = table.shape[1], len(ids) - 1
    lanes = cores.lanes
    unrolled = next(n for n in (8, 4, 2, 1) if width // lanes % n == 0)

    def kernel(table: Any, *references: Any) -> None:
        ids, (dy, out, *here) = references[: n_others + 1], references[n_others + 1 :]
        ids_here, (rows, others, dy_here), sums = here[: n_others + 1], here[n_others + 1 : -1], here[-1]
        lane = lax.iota(jnp.int32, lanes)

        def of_block(b: jax.Array) -> None:
            def of_term(t: jax.Array, number: jax.Array) -> None:
                _fetch(table, ids_here[0], t, rows)
                for way in range(n_others):
                    _fetch(table, ids_here[1 + way], t, others)

                    @pl.loop(0, block, step=lanes)
                    def _(first: jax.Array, way: int = way) -> None:
                        @plsc.parallel_loop(0, lanes, carry=jnp.zeros(lanes, jnp.float32))
                        def of_samples(i: jax.Array, of_samples: jax.Array) -> jax.Array:
                            @plsc.parallel_loop(
                                0, width, lanes, unroll=unrolled, carry=jnp.zeros(lanes, jnp.float32)
                            )
                            def total(o: jax.Array, total: jax.Array) -> jax.Array:
                                at = first + i, pl.ds(o, lanes)
                                return total + (rows[at] - others[at]) * dy_here[at]

                            return jnp.where(lane == i, jnp.sum(total), of_samples)

                        sums[way, t, pl.ds(first, lanes)] = of_samples

            pltpu.sync_copy(dy.at[pl.ds(b * block, block)], dy_here)
            of_group = [(of_way.at[b], way_here) for of_way, way_here in zip(ids, ids_here, strict=True)]
            results = [(sums.at[way], out.at[way, b]) for way in range(n_others)]
            _for_each_term(terms, of_group, of_term, results)

        _for_each_block(cores, blocks, of_block)

    group = _sizes.group(terms)
    return _launch(
        kernel,
        table,
        *ids,
        dy,
        output=jax.ShapeDtypeStruct((n_others, *ids[0].shape), jnp.float32),
        scratch=[
            *(pltpu.VMEM((group, block), jnp.int32) for _ in ids),
            pltpu.VMEM((block, width), jnp.float32),
            pltpu.VMEM((block, width), jnp.float32),
            pltpu.VMEM((block, width), jnp.float32),
            pltpu.VMEM((n_others, group, block), jnp.float32),
        ],
        cores=cores,
        in_tiles=width % _sizes.TILE == 0,
        name="differences",
    )


def sum_scattered(
    values: jax.Array,
    targets: jax.Array,
    ids: jax.Array,
    target_ids: jax.Array,
    terms: int,
    n_outputs: int,
    cores: SparseCores,
) -> jax.Array:
    """Sum over terms the values that they address, each added to the output that its target names.

    Args:
      values: ``[rows, width]`` float32, of a width that `_sizes.width` gives.
      targets: ``[rows, width]`` int32 of the same width, the rows may be others: less than `n_outputs`; negative
        where a value is not used.
      ids: ``[blocks, groups * group, block]`` int32: rows of `values` that exist, of `terms` terms; the rest is not
        looked at. target_ids: the same, of `targets`.
      n_outputs: a number that `_sizes.width` gives.

    Returns:
      ``[blocks * block, n_outputs]``.
    """
    blocks, _, block = ids.shape
    width, lanes = values.shape[1], cores.lanes

    def kernel(
        values: Any,
        targets: Any,
        ids: Any,
        target_ids: Any,
        y: Any,
        ids_here: Any,
        target_ids_here: Any,
        values_here: Any,
        targets_here: Any,
        total: Any,
    ) -> None:
        def of_block(b: jax.Array) -> None:
            @pl.loop(0, block)
            def _(sample: jax.Array) -> None:
                @pl.loop(0, n_outputs, step=lanes)
                def _(o: jax.Array) -> None:
                    total[sample, pl.ds(o, lanes)] = jnp.zeros(lanes, jnp.float32)

            def of_term(t: jax.Array, number: jax.Array) -> None:
                _fetch(values, ids_here, t, values_here)
                _fetch(targets, target_ids_here, t, targets_here)

                @pl.loop(0, block, step=lanes)
                def _(first: jax.Array) -> None:
                    sample = first + lax.iota(jnp.int32, lanes)

                    @pl.loop(0, width)
                    def _(slot: jax.Array) -> None:
                        # Each lane adds to a sample of its own: no two to the same number.
                        at = [sample, jnp.full(lanes, slot, jnp.int32)]
                        to = plsc.load_gather(targets_here, at)
                        value = plsc.load_gather(values_here, at)
                        plsc.addupdate_scatter(total, [sample, jnp.maximum(to, 0)], value, mask=to >= 0)

            _for_each_term(terms, [(ids.at[b], ids_here), (target_ids.at[b], target_ids_here)], of_term)
            _copy_out(total, y.at[pl.ds(b * block, block)])

        _for_each_block(cores, blocks, of_block)

    return _launch(
        kernel,
        values,
        targets,
        ids,
        target_ids,
        output=jax.ShapeDtypeStruct((blocks * block, n_outputs), jnp.float32),
        scratch=[
            pltpu.VMEM((_sizes.group(terms), block), jnp.int32),
            pltpu.VMEM((_sizes.group(terms), block), jnp.int32),
            pltpu.VMEM((block, width), jnp.float32),
            pltpu.VMEM((block, width), jnp.int32),
            pltpu.VMEM((block, n_outputs), jnp.float32),
        ],
        cores=cores,
        in_tiles=False,
        name="sum_scattered",
    )


def differences_scattered(
    values: jax.Array,
    targets: jax.Array,
    ids: tuple[jax.Array, jax.Array],
    target_ids: tuple[jax.Array, jax.Array],
    dy: jax.Array,
    terms: int,
    cores: SparseCores,
) -> jax.Array:
    """Return the sum of each read's values times the cotangents that their targets name, minus that of another row.

    Values with one target are subtracted before they are multiplied.

    Args:
      values, targets, terms: as for `sum_scattered`. ids, target_ids: of the row and of the other one, as there.
      dy: ``[blocks * block, n_outputs]``, of each sample.

    Returns:
      The shape of one of `ids`; what lies behind `terms` terms means nothing.
    """
    blocks, _, block = ids[0].shape
    width, lanes = values.shape[1], cores.lanes

    def kernel(
        values: Any,
        targets: Any,
        ids: Any,
        other_ids: Any,
        target_ids: Any,
        other_target_ids: Any,
        dy: Any,
        out: Any,
        ids_here: Any,
        other_ids_here: Any,
        target_ids_here: Any,
        other_target_ids_here: Any,
        values_here: Any,
        others_here: Any,
        targets_here: Any,
        other_targets_here: Any,
        dy_here: Any,
        sums: Any,
    ) -> None:
        def of_block(b: jax.Array) -> None:
            def of_term(t: jax.Array, number: jax.Array) -> None:
                _fetch(values, ids_here, t, values_here)
                _fetch(values, other_ids_here, t, others_here)
                _fetch(targets, target_ids_here, t, targets_here)
                _fetch(targets, other_target_ids_here, t, other_targets_here)

                @pl.loop(0, block, step=lanes)
                def _(first: jax.Array) -> None:
                    sample = first + lax.iota(jnp.int32, lanes)

                    def read(of_values: Any, of_targets: Any, slot: jax.Array) -> tuple[jax.Array, ...]:
                        """Return values, their targets, and the cotangents that these name."""
                        at = [sample, jnp.full(lanes, slot, jnp.int32)]
                        to = plsc.load_gather(of_targets, at)
                        cotangent = plsc.load_gather(dy_here, [sample, jnp.maximum(to, 0)])
                        return jnp.where(to >= 0, plsc.load_gather(of_values, at), 0), to, cotangent

                    @plsc.parallel_loop(0, width, carry=jnp.zeros(lanes, jnp.float32))
                    def of_samples(slot: jax.Array, of_samples: jax.Array) -> jax.Array:
                        value, to, cotangent = read(values_here, targets_here, slot)
                        other, other_to, of_other = read(others_here, other_targets_here, slot)
                        apart = value * cotangent - other * of_other
                        return of_samples + jnp.where(to == other_to, (value - other) * cotangent, apart)

                    sums[t, pl.ds(first, lanes)] = of_samples

            pltpu.sync_copy(dy.at[pl.ds(b * block, block)], dy_here)
            of_group = [
                (ids.at[b], ids_here),
                (other_ids.at[b], other_ids_here),
                (target_ids.at[b], target_ids_here),
                (other_target_ids.at[b], other_target_ids_here),
            ]
            _for_each_term(terms, of_group, of_term, [(sums, out.at[b])])

        _for_each_block(cores, blocks, of_block)

    group = _sizes.group(terms)
    return _launch(
        kernel,
        values,
        targets,
        *ids,
        *target_ids,
        dy,
        output=jax.ShapeDtypeStruct(ids[0].shape, jnp.float32),
        scratch=[
            *(pltpu.VMEM((group, block), jnp.int32) for _ in (*ids, *target_ids)),
            pltpu.VMEM((block, width), jnp.float32),
            pltpu.VMEM((block, width), jnp.float32),
            pltpu.VMEM((block, width), jnp.int32),
            pltpu.VMEM((block, width), jnp.int32),
            pltpu.VMEM((block, dy.shape[1]), jnp.float32),
            pltpu.VMEM((group, block), jnp.float32),
        ],
        cores=cores,
        in_tiles=False,
        name="differences_scattered",
    )


def _for_each_block(cores: SparseCores, blocks: int, of_block: Callable[[jax.Array], None]) -> None:
    """Call ``of_block(b)`` on one subcore for each block."""
    units = cores.cores * cores.subcores
    unit = lax.axis_index("core") * cores.subcores + lax.axis_index("subcore")

    @pl.loop(0, lax.div(blocks - unit + units - 1, units))
    def _(n: jax.Array) -> None:
        of_block(unit + n * units)


def _for_each_term(
    terms: int,
    ids: list[tuple[Any, Any]],
    of_term: Callable[[jax.Array, jax.Array], None],
    results: Sequence[tuple[Any, Any]] = (),
) -> None:
    """Call ``of_term(place in the group, number)`` for each term of a block.

    `ids`: of the block, and where of_term finds those of its group; several, if it needs several.
    `results`: what each group of terms leaves, and the array to whose part of the group it is copied.
    """
    group = _sizes.group(terms)

    @pl.loop(0, pl.cdiv(terms, group))
    def _(g: jax.Array) -> None:
        part = pl.ds(g * group, group)
        for of_block, of_group in ids:
            pltpu.sync_copy(of_block.at[part], of_group)

        @pl.loop(0, jnp.minimum(group, terms - g * group))
        def _(t: jax.Array) -> None:
            of_term(t, g * group + t)

        for here, out in results:
            _copy_out(here, out.at[part])


def _fetch(table: Any, ids_here: Any, t: jax.Array, here: Any, add: bool = False) -> None:
    """Fetch the rows of a table in HBM that a block's term addresses, and wait for them. `add`: to what is here."""
    pltpu.sync_copy(table.at[ids_here.at[t]], here, add=add)


def _copy_out(here: Any, there: Any) -> None:
    """Copy from a subcore's memory to HBM, and wait for it."""
    copy: Any = pltpu.async_copy
    if inspect.signature(copy).parameters["sem"].default is None:
        copy(here, there).wait()  # such copies have no semaphore of theirs since jax 0.12
    else:
        pltpu.sync_copy(here, there)


def _launch(
    kernel: Callable[..., None],
    *inputs: jax.Array,
    output: jax.ShapeDtypeStruct,
    scratch: list[Any],
    cores: SparseCores,
    in_tiles: bool,
    name: str,
) -> jax.Array:
    """Run a kernel on all subcores. `in_tiles`: arrays in HBM lie in tiles, as on TensorCores; else row after row, which costs copies of them."""
    mesh = plsc.VectorSubcoreMesh(
        core_axis_name="core",
        subcore_axis_name="subcore",
        num_cores=cores.cores,
        num_subcores=cores.subcores,
    )
    return _call.call_on_mesh(
        kernel,
        *inputs,
        output=output,
        mesh=mesh,
        name=f"sparsecore_{name}",
        scratch_types=scratch,
        # Without layout passes: with them, loops cannot carry vectors.
        compiler_params=pltpu.CompilerParams(use_tc_tiling_on_sc=in_tiles, needs_layout_passes=False),
    )
