"""`lutjax.lookup_attention` on TensorCores: how often each query meets each id of keys and positions, times its rows.

With the table seen as ``S[query id, (key id, position id), output]``, a query's result is the inner product of a
vector of counts with the *slab* of its id. Counts of 128 queries are products of matrices of ones and zeros on
the matrix unit; slabs lie in vector memory, and are found by scalar ids. The cost is that of reading a slab for
each query and detector, however many keys it has. Ids out of range are those at the end of their range.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from lutjax._detection import Detection
from lutjax._fixed_point import FixedPoint
from lutjax.kernels._pallas import _call, _tpus
from lutjax.kernels._pallas.tpu._attention import LANES, UNROLLED, Plan, ids
from lutjax.kernels._xla import lookup_attention as plain
from lutjax.kernels.registry import Device


def forward(
    weights: jax.Array,
    query: Detection,
    key: Detection,
    position: Detection | None,
    start: jax.Array | None,
    query_segments: jax.Array | None,
    key_segments: jax.Array | None,
    *,
    window: int | None,
    accumulate: FixedPoint | None,
    device: Device,
) -> jax.Array:
    plan = Plan.of(weights, query, key, position)
    if plan.empty:
        segments = (query_segments, key_segments)
        return plain.forward(
            weights, query, key, position, start, *segments, window=window, accumulate=accumulate, device=device
        )
    pairs = Pairs(plan, query, key, position, start, query_segments, key_segments, window)
    grid = ("query tile", "step", "detector", "key tile")
    outputs = plan.n_outputs
    (y,) = _call.call(
        functools.partial(_forward, plan, query_segments is not None),
        *pairs.arrays,
        plan.table(weights),
        outputs=[jax.ShapeDtypeStruct((plan.query_tiles, plan.all_blocks, outputs, LANES), jnp.float32)],
        name="lookup_attention",
        grid=pairs.grid(grid),
        in_specs=[*pairs.specs(grid), pairs.table_spec(grid)],
        out_specs=[pairs.spec(grid, ("query tile", "step"), (plan.blocks, outputs, LANES))],
        scratch_shapes=_counts_scratch(plan),
        compiler_params=_parameters(device),
    )
    return plan.from_queries(jnp.moveaxis(y, 2, 0)).astype(weights.dtype)


class Pairs:
    """What kernels read of a call, and where it lies in a grid of detectors, query tiles, key tiles and steps."""

    def __init__(
        self,
        plan: Plan,
        query: Detection,
        key: Detection,
        position: Detection | None,
        start: jax.Array | None,
        query_segments: jax.Array | None,
        key_segments: jax.Array | None,
        window: int | None,
    ):
        self.plan, self.start, self.window = plan, start, window
        if position is None:
            e = jnp.zeros((1, 1), jnp.int32)
        else:
            e = ids(position.index, position.bits).T
        self.shared = e.shape[0] == 1
        in_memory = self.scalars(ids(query.index, query.bits))
        self.arrays = [in_memory, self.keys(ids(key.index, key.bits)), self.at_pairs(e, -1)]
        if query_segments is not None and key_segments is not None:
            self.arrays += [plan.of_queries(query_segments)[:, :, None], plan.of_keys(key_segments)[:, :, None]]

    def scalars(self, a: jax.Array) -> jax.Array:
        """``[B, Lq, T]`` as kernels read it one by one."""
        plan = self.plan
        shape = (plan.n_detectors, plan.query_tiles, plan.steps, 1, plan.blocks * LANES)
        return plan.of_queries(a).reshape(shape)

    def queries(self, a: jax.Array) -> jax.Array:
        """``[B, Lq, T]`` -> ``[T, query tiles, blocks, 1, 128]``."""
        return self.plan.of_queries(a)[..., None, :]

    def keys(self, a: jax.Array) -> jax.Array:
        """``[B, Lk, T]`` -> ``[T, key tiles, blocks, 1, key lanes]``."""
        return self.plan.of_keys(a)[..., None, :]

    def at_pairs(self, a: jax.Array, other: int) -> jax.Array:
        return self.plan.of_pairs(a, self.start, self.window, other)

    # ---- blocks
    def grid(self, order: tuple[str, ...]) -> tuple[int, ...]:
        plan = self.plan
        sizes = {
            "detector": plan.n_detectors,
            "query tile": plan.query_tiles,
            "key tile": plan.key_tiles,
            "step": plan.steps,
        }
        return tuple(sizes[name] for name in order)

    def spec(self, order: tuple[str, ...], axes: tuple[str, ...], block: tuple[int, ...]) -> Any:
        """One block in front of which lie axes of the grid; the first axis of a block is that of steps."""
        steps = axes[-1] == "step"
        outer = axes[:-1] if steps else axes

        def at(*place: Any) -> tuple[Any, ...]:
            where = dict(zip(order, place, strict=True)) | {"all": 0}
            first = (where["step"],) if steps else ()
            zeros = (0,) * (len(block) - len(first))
            return (*(where[name] for name in outer), *first, *zeros)

        return pl.BlockSpec((*(None for _ in outer), *block), at)

    def scalars_spec(self, order: tuple[str, ...]) -> Any:
        block = (None, None, None, 1, self.plan.blocks * LANES)

        def at(*place: Any) -> tuple[Any, ...]:
            where = dict(zip(order, place, strict=True))
            return where["detector"], where["query tile"], where["step"], 0, 0

        return pl.BlockSpec(block, at, memory_space=pltpu.SMEM)

    def queries_spec(self, order: tuple[str, ...]) -> Any:
        return self.spec(order, ("detector", "query tile", "step"), (self.plan.blocks, 1, LANES))

    def keys_spec(self, order: tuple[str, ...]) -> Any:
        return self.spec(order, ("detector", "key tile", "step"), (self.plan.blocks, 1, self.plan.key_lanes))

    def pairs_spec(self, order: tuple[str, ...], shared: bool) -> Any:
        detector = "all" if shared else "detector"
        return self.spec(order, (detector, "query tile", "key tile"), (self.plan.key_lanes, LANES))

    def table_spec(self, order: tuple[str, ...]) -> Any:
        return self.spec(order, ("detector",), (self.plan.n_outputs, self.plan.rows))

    def specs(self, order: tuple[str, ...]) -> list[Any]:
        """Those of `arrays`."""
        specs = [self.scalars_spec(order), self.keys_spec(order), self.pairs_spec(order, self.shared)]
        if len(self.arrays) > len(specs):
            blocks = self.plan.blocks
            specs.append(self.spec(order, ("query tile", "step"), (blocks, 1, LANES)))
            specs.append(self.spec(order, ("key tile", "step"), (blocks, 1, self.plan.key_lanes)))
        return specs


def _parameters(device: Device) -> Any:
    return pltpu.CompilerParams(vmem_limit_bytes=_tpus.limits(device).vmem * 15 // 16)


def _counts_scratch(plan: Plan) -> list[Any]:
    return [pltpu.VMEM((plan.slab, LANES), jnp.float32), pltpu.VMEM((LANES, plan.slab), jnp.float32)]


# ------------------------------------------------------------------------------------- kernels
def _forward(plan: Plan, segments: bool, *refs: Any) -> None:
    pairs, (table_ref, y_ref, by_id_ref, counts_ref) = refs[:-4], refs[-4:]

    @pl.when((pl.program_id(2) == 0) & (pl.program_id(3) == 0))
    def _() -> None:
        y_ref[...] = jnp.zeros_like(y_ref)

    lane = jax.lax.broadcasted_iota(jnp.int32, (plan.n_outputs, LANES), 1)

    def block(n: jax.Array, _: None) -> None:
        count(plan, n, pairs, by_id_ref, counts_ref)

        def some(first: jax.Array, y: jax.Array) -> jax.Array:
            counts = counts_ref[pl.ds(first, UNROLLED), :]
            for u in range(UNROLLED):
                rows = table_ref[:, slab(plan, pairs[0], n, first + u)].astype(jnp.float32)
                value = jnp.sum(rows * counts[u : u + 1], 1, keepdims=True)
                y = jnp.where(lane == first + u, y + value, y)
            return y

        y_ref[n] += over_queries(plan, some, jnp.zeros((plan.n_outputs, LANES), jnp.float32))

    jax.lax.fori_loop(0, plan.blocks, block, None)


def over_queries(plan: Plan, body: Any, carry: Any) -> Any:
    """`carry` passed through ``body(first, carry)`` for the queries of a block, several at a time."""
    steps = pl.cdiv(plan.used_lanes, UNROLLED)
    return jax.lax.fori_loop(0, steps, lambda i, c: body(pl.multiple_of(i * UNROLLED, UNROLLED), c), carry)


def slab(plan: Plan, ids_ref: Any, n: jax.Array, query: jax.Array) -> Any:
    """Where the rows of a query of block `n` are."""
    return pl.ds(pl.multiple_of(ids_ref[0, n * LANES + query] * plan.slab, LANES), plan.slab)


def pairs_of(n: jax.Array, pairs: tuple[Any, ...]) -> jax.Array:
    """Position ids of the pairs of block `n`, -1 where they do not count: ``[keys, queries]``."""
    e = pairs[2][...]
    if len(pairs) > 3:
        e = jnp.where(column(pairs[4][n]) == pairs[3][n], e, -1)
    return e


def column(row: jax.Array) -> jax.Array:
    """``[1, n]`` -> ``[n, 128]``, the same in all lanes."""
    return jnp.broadcast_to(row, (LANES, row.shape[1])).T


def count(plan: Plan, n: jax.Array, pairs: tuple[Any, ...], by_id_ref: Any, counts_ref: Any) -> None:
    """How often each query of block `n` meets each pair of ids: ``[128, slab]``."""
    e = pairs_of(n, pairs)
    key = jax.lax.broadcasted_iota(jnp.int32, (plan.k_ids, plan.key_lanes), 0)
    of_key = _ones(key == pairs[1][n])

    def of_position(i: Any, _: None) -> None:
        counts = jnp.dot(of_key, _ones(e == i), preferred_element_type=jnp.float32)
        by_id_ref[pl.ds(i, plan.k_ids, stride=plan.e_ids), :] = counts

    over_positions(plan, of_position)
    counts_ref[...] = by_id_ref[...].T


def over_positions(plan: Plan, body: Any) -> None:
    """``body(i, None)`` for each id of positions."""
    if plan.e_ids <= 16:
        for i in range(plan.e_ids):
            body(i, None)
    else:
        jax.lax.fori_loop(0, plan.e_ids, body, None)


def _ones(where: jax.Array) -> jax.Array:
    return where.astype(jnp.float32).astype(jnp.bfloat16)


backward = plain.backward
