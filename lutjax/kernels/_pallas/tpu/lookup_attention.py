"""`lutjax.lookup_attention` on TensorCores: per-query id histograms times table rows.

Formula with the table viewed as ``S[t, query id, (key id, position id), output]``::

    counts[t, j, (k, e)] = number of query j's earlier keys with id k at a distance with id e
    y[j] = sum_t counts[t, j] @ S[t, query id of j]
    dS[t, q] = sum over queries j with id q: counts[t, j] * dy[j]
    dmargin = slope * <dy[j], row - flipped row> for a pair's closest margin

Work: a grid step owns a detector, a query tile, a key tile and up to 32 sample blocks. Counts for
128 queries are products between 0/1 matrices on the matrix unit. The cost is one slab read per
query and detector, regardless of the number of keys.

Layout: slabs ``[outputs, slab]`` are stored in vector memory and addressed by query ids in scalar
memory, see `_attention_blocks`. Counts are computed as ``[slab, queries]`` and transposed once per
block.

Numerics: counts are exact in float32; float32 sums follow the grid order and are equal in every
run. Margin cotangents subtract products, not rows, so their error is relative to the products. An
update adds ``-rate * factor * dS`` in place. The op clamps ids.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from lutjax.dispatch.contract import Step
from lutjax.dispatch.registry import Declaration, Device
from lutjax.kernels._pallas import _call
from lutjax.kernels._pallas.tpu import _attention_blocks
from lutjax.kernels._pallas.tpu._attention_blocks import UNROLLED, Plan
from lutjax.kernels._pallas.tpu._limits import LANES, params
from lutjax.kernels._pallas.tpu._rules import tensorcore_rule
from lutjax.kernels._xla import _row_gathers, lookup_attention as plain
from lutjax.ops.lookup_attention import LookupAttention
from lutjax.values._detection import Detection
from lutjax.values._row_rules import RowState

SPEC = Declaration(tensorcore_rule(_attention_blocks.unsupported, _attention_blocks.slower))


def forward(call: LookupAttention, *, device: Device) -> jax.Array:
    pairs = BlockedPairs(call)
    plan = pairs.plan
    if plan.empty:
        return plain.forward(call, device=device)
    # Detectors and key tiles are innermost: the output block of a tile of queries accumulates in
    # vector memory.
    grid = ("query tile", "step", "detector", "key tile")
    shape = (plan.query_tiles, plan.all_blocks, plan.n_outputs, LANES)
    (y,) = _call.call(
        functools.partial(_forward, plan),
        *pairs.arrays,
        plan.table(call.weights),
        outputs=[jax.ShapeDtypeStruct(shape, jnp.float32)],
        name="lookup_attention",
        grid=pairs.grid(grid),
        in_specs=[*pairs.specs(grid), pairs.table_spec(grid)],
        out_specs=[pairs.outputs_spec(grid)],
        scratch_shapes=_counts_scratch(plan),
        compiler_params=params(device),
    )
    return plan.from_queries(jnp.moveaxis(y, 2, 0)).astype(call.weights.dtype)


def backward(
    call: LookupAttention, cotangent: jax.Array, needs: frozenset[str], *, device: Device
) -> dict[str, jax.Array]:
    pairs = BlockedPairs(call)
    if pairs.plan.empty:
        return plain.backward(call, cotangent, needs, device=device)
    dy, cotangents = cotangent.astype(jnp.float32), {}
    if "weights" in needs:
        cotangents["weights"] = _add_rows(pairs, dy, None, device)
    if needs - {"weights"}:
        for name, total in _products(pairs, dy, "position" in needs, device).items():
            if name in needs:
                cotangents[name] = _row_gathers.times_slope(total, getattr(call, name).margin)
    return cotangents


def update(
    call: LookupAttention, cotangent: jax.Array, step: Step, *, device: Device
) -> tuple[jax.Array, RowState]:
    pairs = BlockedPairs(call)
    if pairs.plan.empty:
        return call.weights, step.state
    # The rate scales the cotangent, not each addend.
    dy = -step.rate_and_factor * cotangent.astype(jnp.float32)
    return _add_rows(pairs, dy, call.weights, device), step.state


def _add_rows(
    pairs: "BlockedPairs", dy: jax.Array, weights: jax.Array | None, device: Device
) -> jax.Array:
    """Add `dy` to every pair's row, in existing tables or in zeros."""
    plan = pairs.plan
    grid = ("detector", "query tile", "key tile", "step")
    table = [] if weights is None else [plan.table(weights)]
    inputs = [*pairs.arrays, plan.outputs(dy), *table]
    dtype = jnp.float32 if weights is None else weights.dtype
    shape = (plan.n_detectors, plan.n_outputs, plan.rows)
    scratch = _counts_scratch(plan)
    # Narrower tables accumulate in float32 and are rounded once, at the last step.
    if dtype != jnp.float32:
        scratch.append(pltpu.VMEM(shape[1:], jnp.float32))
    (total,) = _call.call(
        functools.partial(_add_rows_kernel, plan, pairs.segments, weights is not None),
        *inputs,
        outputs=[jax.ShapeDtypeStruct(shape, dtype)],
        name="lookup_attention_table",
        grid=pairs.grid(grid),
        in_specs=[
            *pairs.specs(grid),
            pairs.outputs_spec(grid),
            *(pairs.table_spec(grid) for _ in table),
        ],
        out_specs=[pairs.table_spec(grid)],
        scratch_shapes=scratch,
        compiler_params=params(device),
        # In place: a detector's table is read at its first step and written after its last.
        input_output_aliases={len(inputs) - 1: 0} if table else {},
    )
    return plan.weights(total)


def _products(
    pairs: "BlockedPairs", dy: jax.Array, need_position: bool, device: Device
) -> dict[str, jax.Array]:
    """Return the slope factors for query, key and, if needed, position margins, by name."""
    plan, call = pairs.plan, pairs.call
    query, key, position = call.query, call.key, call.position
    grid = ("detector", "query tile", "key tile", "step")
    inputs = [
        (pairs.scalars(_flip_ids(query)), pairs.scalars_spec(grid)),
        (pairs.queries(query.margin), pairs.queries_spec(grid)),
        (pairs.keys(_flip_ids(key)), pairs.keys_spec(grid)),
        (pairs.keys(key.margin), pairs.keys_spec(grid)),
        (plan.outputs(dy), pairs.outputs_spec(grid)),
        (plan.table(call.weights), pairs.table_spec(grid)),
    ]
    detectors, blocks = plan.n_detectors, plan.all_blocks
    outputs: list[tuple[tuple[int, ...], Any]] = [
        (
            # Tiles of the other axis write separate parts, added by XLA: an output block is visited
            # by consecutive steps only.
            (plan.key_tiles, detectors, plan.query_tiles, blocks, 1, LANES),
            pairs.spec(
                grid, ("key tile", "detector", "query tile", "step"), (plan.blocks, 1, LANES)
            ),
        ),
        (
            (plan.query_tiles, detectors, plan.key_tiles, blocks, 1, plan.key_lanes),
            pairs.spec(
                grid,
                ("query tile", "detector", "key tile", "step"),
                (plan.blocks, 1, plan.key_lanes),
            ),
        ),
    ]
    if need_position:
        assert position is not None
        inputs.append(
            (pairs.expand_to_pairs(_flip_ids(position).T, -1), pairs.pairs_spec(grid, pairs.shared))
        )
        inputs.append(
            (pairs.expand_to_pairs(position.margin.T, 0), pairs.pairs_spec(grid, pairs.shared))
        )
        shape = (detectors, plan.query_tiles, plan.key_tiles, plan.key_lanes, LANES)
        outputs.append((shape, pairs.pairs_spec(grid, False)))
    d_query, d_key, *d_position = _call.call(
        functools.partial(_multiply_rows, plan, pairs.segments, need_position),
        *pairs.arrays,
        *(a for a, _ in inputs),
        outputs=[jax.ShapeDtypeStruct(shape, jnp.float32) for shape, _ in outputs],
        name="lookup_attention_margins",
        grid=pairs.grid(grid),
        in_specs=[*pairs.specs(grid), *(spec for _, spec in inputs)],
        out_specs=[spec for _, spec in outputs],
        scratch_shapes=[pltpu.VMEM((LANES, plan.slab), jnp.float32)] * 2
        + [pltpu.VMEM((plan.slab, LANES), jnp.float32)] * 2,
        compiler_params=params(device),
    )
    totals = {
        "query": plan.from_queries(jnp.sum(d_query, 0)[..., 0, :]),
        "key": plan.from_keys(jnp.sum(d_key, 0)[..., 0, :]),
    }
    if need_position:
        total = plan.sum_of_distances(d_position[0], call.start)
        totals["position"] = (jnp.sum(total, 0, keepdims=True) if pairs.shared else total).T
    return totals


def _flip_ids(detection: Detection) -> jax.Array:
    return detection.index ^ detection.flip


class BlockedPairs:
    """Kernel inputs and their blocks for a call.

    The grid has axes for detectors, query tiles, key tiles and steps.

    Attributes:
      shared: whether all detectors share positions. segments: whether the call has segments.
      arrays: query ids, key ids, position ids for every pair, and query and key segments if any.
    """

    def __init__(self, call: LookupAttention):
        self.call, self.plan = call, Plan.for_call(call)
        if self.plan.empty:
            return
        # No positions: one id for all distances.
        e = jnp.zeros((1, 1), jnp.int32) if call.position is None else call.position.index.T
        self.shared = len(e) == 1
        self.segments = call.query_segments is not None
        self.arrays = [
            self.scalars(call.query.index),
            self.keys(call.key.index),
            self.expand_to_pairs(e, -1),
        ]
        if call.query_segments is not None and call.key_segments is not None:
            self.arrays += [
                self.plan.query_blocks(call.query_segments)[:, :, None],
                self.plan.key_blocks(call.key_segments)[:, :, None],
            ]

    def scalars(self, a: jax.Array) -> jax.Array:
        """Lay out ``[B, Lq, T]`` as kernels read it one by one."""
        plan = self.plan
        shape = (plan.n_detectors, plan.query_tiles, plan.steps, 1, plan.blocks * LANES)
        return plan.query_blocks(a).reshape(shape)

    def queries(self, a: jax.Array) -> jax.Array:
        """``[B, Lq, T]`` -> ``[T, query tiles, blocks, 1, 128]``."""
        return self.plan.query_blocks(a)[..., None, :]

    def keys(self, a: jax.Array) -> jax.Array:
        """``[B, Lk, T]`` -> ``[T, key tiles, blocks, 1, key lanes]``."""
        return self.plan.key_blocks(a)[..., None, :]

    def expand_to_pairs(self, a: jax.Array, other: int) -> jax.Array:
        return self.plan.expand_to_pairs(a, self.call.start, self.call.window, other)

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
        """Return a block spec with leading grid axes.

        The step indexes the first axis in `block`.
        """
        steps = axes[-1] == "step"
        outer = axes[:-1] if steps else axes

        def index_map(*place: Any) -> tuple[Any, ...]:
            where = dict(zip(order, place, strict=True)) | {"all": 0}
            first = (where["step"],) if steps else ()
            zeros = (0,) * (len(block) - len(first))
            return (*(where[name] for name in outer), *first, *zeros)

        return pl.BlockSpec((*(None for _ in outer), *block), index_map)

    def scalars_spec(self, order: tuple[str, ...]) -> Any:
        block = (None, None, None, 1, self.plan.blocks * LANES)

        def index_map(*place: Any) -> tuple[Any, ...]:
            where = dict(zip(order, place, strict=True))
            return where["detector"], where["query tile"], where["step"], 0, 0

        # Query ids are addresses of slabs, so they are read one by one from scalar memory.
        return pl.BlockSpec(block, index_map, memory_space=pltpu.SMEM)

    def queries_spec(self, order: tuple[str, ...]) -> Any:
        return self.spec(order, ("detector", "query tile", "step"), (self.plan.blocks, 1, LANES))

    def keys_spec(self, order: tuple[str, ...]) -> Any:
        return self.spec(
            order, ("detector", "key tile", "step"), (self.plan.blocks, 1, self.plan.key_lanes)
        )

    def pairs_spec(self, order: tuple[str, ...], shared: bool) -> Any:
        detector = "all" if shared else "detector"
        return self.spec(order, (detector, "query tile", "key tile"), (self.plan.key_lanes, LANES))

    def outputs_spec(self, order: tuple[str, ...]) -> Any:
        return self.spec(
            order, ("query tile", "step"), (self.plan.blocks, self.plan.n_outputs, LANES)
        )

    def table_spec(self, order: tuple[str, ...]) -> Any:
        return self.spec(order, ("detector",), (self.plan.n_outputs, self.plan.rows))

    def specs(self, order: tuple[str, ...]) -> list[Any]:
        specs = [
            self.scalars_spec(order),
            self.keys_spec(order),
            self.pairs_spec(order, self.shared),
        ]
        if len(self.arrays) > len(specs):
            blocks = self.plan.blocks
            specs.append(self.spec(order, ("query tile", "step"), (blocks, 1, LANES)))
            specs.append(self.spec(order, ("key tile", "step"), (blocks, 1, self.plan.key_lanes)))
        return specs


def _counts_scratch(plan: Plan) -> list[Any]:
    return [
        pltpu.VMEM((plan.slab, LANES), jnp.float32),
        pltpu.VMEM((LANES, plan.slab), jnp.float32),
    ]


# ------------------------------------------------------------------------------------- kernels
def _forward(plan: Plan, *refs: Any) -> None:
    pairs, (table_ref, y_ref, by_id_ref, counts_ref) = refs[:-4], refs[-4:]

    @pl.when((pl.program_id(2) == 0) & (pl.program_id(3) == 0))
    def _() -> None:
        # The first detector and key tile of this block of outputs.
        y_ref[...] = jnp.zeros_like(y_ref)

    lane = jax.lax.broadcasted_iota(jnp.int32, (plan.n_outputs, LANES), 1)

    def block(n: jax.Array, _: None) -> None:
        _count(plan, n, pairs, by_id_ref, counts_ref)

        def visit_queries(first: jax.Array, y: jax.Array) -> jax.Array:
            for u in range(UNROLLED):
                rows = table_ref[:, _slab(plan, pairs[0], n, first + u)].astype(jnp.float32)
                # A vector product, not a matrix product: every query has its own slab.
                value = jnp.sum(rows * counts_ref[pl.ds(first + u, 1), :], 1, keepdims=True)
                # The result of a query belongs in its lane; single lanes are written by selects.
                y = jnp.where(lane == first + u, y + value, y)
            return y

        y_ref[n] += _over_queries(
            plan, visit_queries, jnp.zeros((plan.n_outputs, LANES), jnp.float32)
        )

    jax.lax.fori_loop(0, plan.blocks, block, None)


def _over_queries(plan: Plan, body: Any, carry: Any) -> Any:
    """Pass `carry` through ``body(first, carry)`` for a block's queries, several at a time."""
    steps = pl.cdiv(plan.used_lanes, UNROLLED)
    return jax.lax.fori_loop(
        0, steps, lambda i, c: body(pl.multiple_of(i * UNROLLED, UNROLLED), c), carry
    )


def _slab(plan: Plan, ids_ref: Any, n: jax.Array, query: jax.Array) -> Any:
    """Return the slab slice for a query in block `n`."""
    # Slabs are multiples of 128 lanes: the slice is aligned for any id.
    return pl.ds(pl.multiple_of(ids_ref[0, n * LANES + query] * plan.slab, LANES), plan.slab)


def _pairs_of(n: jax.Array, pairs: Sequence[Any]) -> jax.Array:
    """Return the pairs' position ids in block `n`, -1 for uncounted pairs: ``[keys, queries]``."""
    e = pairs[2][...]
    if len(pairs) > 3:
        # Pairs across segments do not count: -1 equals no position id.
        e = jnp.where(_column(pairs[4][n]) == pairs[3][n], e, -1)
    return e


def _column(row: jax.Array) -> jax.Array:
    """``[1, n]`` -> ``[n, 128]``, the same in all lanes."""
    return jnp.broadcast_to(row, (LANES, row.shape[1])).T


def _count(plan: Plan, n: jax.Array, pairs: Sequence[Any], by_id_ref: Any, counts_ref: Any) -> None:
    """Count id pairs for each query in block `n`: ``[128, slab]``."""
    e = _pairs_of(n, pairs)
    key = jax.lax.broadcasted_iota(jnp.int32, (plan.k_ids, plan.key_lanes), 0)
    # [key ids, keys] @ [keys, queries]: the product counts keys per id. 0 and 1 are exact in
    # bfloat16, and the float32 sums are whole numbers.
    of_key = _ones(key == pairs[1][n])

    def visit_position(i: Any, _: None) -> None:
        counts = jnp.dot(of_key, _ones(e == i), preferred_element_type=jnp.float32)
        # Rows of a slab are ordered by key id, then position id: a strided store interleaves them.
        by_id_ref[pl.ds(i, plan.k_ids, stride=plan.e_ids), :] = counts

    _over_positions(plan, visit_position, None)
    # One transpose per block; a query then reads its counts as one row of lanes.
    counts_ref[...] = by_id_ref[...].T


def _over_positions(plan: Plan, body: Any, carry: Any) -> Any:
    # Written-out iterations overlap; more would only lengthen the program.
    if plan.e_ids > 16:
        return jax.lax.fori_loop(0, plan.e_ids, body, carry)
    for i in range(plan.e_ids):
        carry = body(i, carry)
    return carry


def _ones(where: jax.Array) -> jax.Array:
    return where.astype(jnp.float32).astype(jnp.bfloat16)


def _add_rows_kernel(plan: Plan, segments: bool, in_place: bool, *refs: Any) -> None:
    """Add `dy` to every pair's row, in zeros or in a table."""
    *pairs, dy_ref = refs[: 6 if segments else 4]
    table_ref = refs[len(pairs) + 1] if in_place else None
    out_ref, by_id_ref, counts_ref, *wider = refs[len(pairs) + 1 + in_place :]
    total_ref = wider[0] if wider else out_ref
    # Detectors are the outermost axis: all other steps accumulate in one table block.
    steps = [pl.program_id(axis) for axis in (1, 2, 3)]

    @pl.when((steps[0] == 0) & (steps[1] == 0) & (steps[2] == 0))
    def _() -> None:
        total_ref[...] = jnp.zeros_like(total_ref) if wider or table_ref is None else table_ref[...]

    def block(n: jax.Array, _: None) -> None:
        _count(plan, n, pairs, by_id_ref, counts_ref)
        dy = dy_ref[n]

        def visit_queries(first: jax.Array, _: None) -> None:
            for u in range(UNROLLED):
                at = _slab(plan, pairs[0], n, first + u)
                # One query after the other, since queries may share a slab. The outer product of
                # cotangent and counts covers all pairs of a query.
                total_ref[:, at] += _take_lane(dy, first + u) * counts_ref[pl.ds(first + u, 1), :]

        _over_queries(plan, visit_queries, None)

    jax.lax.fori_loop(0, plan.blocks, block, None)
    if wider and table_ref is not None:
        last = [pl.num_programs(axis) - 1 for axis in (1, 2, 3)]

        @pl.when((steps[0] == last[0]) & (steps[1] == last[1]) & (steps[2] == last[2]))
        def _() -> None:
            out_ref[...] = (table_ref[...].astype(jnp.float32) + total_ref[...]).astype(
                out_ref.dtype
            )


def _take_lane(a: jax.Array, lane: jax.Array) -> jax.Array:
    """``[n, 128]`` -> ``[n, 1]``."""
    at = jax.lax.broadcasted_iota(jnp.int32, a.shape, 1)
    return jnp.sum(jnp.where(at == lane, a, 0), 1, keepdims=True)


def _multiply_rows(plan: Plan, segments: bool, need_position: bool, *refs: Any) -> None:
    """Multiply `dy` by the rows of every pair and sum over pairs, without the slope.

    Products are subtracted, not rows: the error is relative to them.
    """
    n_pairs = 5 if segments else 3
    pairs = refs[:n_pairs]
    q_other_ref, q_margin_ref, k_other_ref, k_margin_ref, dy_ref, table_ref, *rest = refs[n_pairs:]
    if need_position:
        e_other_ref, e_margin_ref, d_query_ref, d_key_ref, d_pairs_ref, *rest = rest

        @pl.when(pl.program_id(3) == 0)
        def _() -> None:
            d_pairs_ref[...] = jnp.zeros_like(d_pairs_ref)
    else:
        d_query_ref, d_key_ref, *rest = rest
    of_main_ref, of_other_ref, main_ref, other_ref = rest
    shape = (plan.key_lanes, LANES)

    def block(n: jax.Array, _: None) -> None:
        dy = dy_ref[n]

        def visit_queries(first: jax.Array, _: None) -> None:
            main: list[jax.Array] = []
            other: list[jax.Array] = []
            for u in range(UNROLLED):
                cotangent = _take_lane(dy, first + u)
                for ids_ref, products in ((pairs[0], main), (q_other_ref, other)):
                    rows = table_ref[:, _slab(plan, ids_ref, n, first + u)].astype(jnp.float32)
                    products.append(jnp.sum(rows * cotangent, 0, keepdims=True))
            of_main_ref[pl.ds(first, UNROLLED), :] = jnp.concatenate(main)
            of_other_ref[pl.ds(first, UNROLLED), :] = jnp.concatenate(other)

        _over_queries(plan, visit_queries, None)
        main_ref[...], other_ref[...] = of_main_ref[...].T, of_other_ref[...].T

        # The products of each pair, out of those with whole slabs.
        # Three copies of the ids, one for each bfloat16 term of `_terms`: one product then sums the
        # terms. k_ids is a power of two, so `&` is the remainder.
        id_of_key = jax.lax.broadcasted_iota(jnp.int32, (plan.key_lanes, 3 * plan.k_ids), 1) & (
            plan.k_ids - 1
        )
        keys = _ones(_column(pairs[1][n])[:, :1] == id_of_key)
        other_keys = _ones(_column(k_other_ref[n])[:, :1] == id_of_key)
        # The main and the flipped key ids read the same products in one matrix product.
        both = jnp.concatenate([keys, other_keys])
        e = _pairs_of(n, pairs)
        if need_position:
            # Pairs that do not count must not match the flipped position id either.
            e_other = jnp.where(e < 0, -1, e_other_ref[...])

        def visit_position(i: Any, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            ids_of_keys = pl.ds(i, plan.k_ids, stride=plan.e_ids)
            of_main = jnp.dot(
                both, _terms(main_ref[ids_of_keys, :]), preferred_element_type=jnp.float32
            )
            of_other = jnp.dot(
                keys, _terms(other_ref[ids_of_keys, :]), preferred_element_type=jnp.float32
            )
            main = of_main[: plan.key_lanes]
            candidates = [(e, main), (e, of_other), (e, of_main[plan.key_lanes :])]
            if need_position:
                candidates.append((e_other, main))
            # Each pair takes the product of its own position id; pairs that do not count keep 0.
            return tuple(
                jnp.where(ids == i, f, s) for (ids, f), s in zip(candidates, sums, strict=True)
            )

        zeros = (jnp.zeros(shape, jnp.float32),) * (4 if need_position else 3)
        main, of_query, of_key, *of_other_position = _over_positions(plan, visit_position, zeros)
        q_margin = jnp.broadcast_to(jnp.abs(q_margin_ref[n]), shape)
        k_margin = jnp.abs(_column(k_margin_ref[n]))
        # Strictly: the key wins ties, as in plain JAX.
        query_is_closer = q_margin < k_margin
        d_query = jnp.where(query_is_closer, main - of_query, 0)
        d_key = jnp.where(query_is_closer, 0, main - of_key)
        d_query_ref[n] = jnp.sum(d_query, 0, keepdims=True)
        # Keys are in sublanes here, but in lanes in the output: transpose, then sum.
        d_key_ref[n] = jnp.sum(d_key.T, 0, keepdims=True)
        if need_position:
            position_is_closest = jnp.abs(e_margin_ref[...]) < jnp.minimum(q_margin, k_margin)
            d_pairs_ref[...] += jnp.where(position_is_closest, main - of_other_position[0], 0)

    jax.lax.fori_loop(0, plan.blocks, block, None)


def _terms(values: jax.Array) -> jax.Array:
    """Stack three 8-bit terms that sum to a float32 array.

    A product with ones sums them exactly.
    """
    terms = []
    for _ in range(3):
        # Truncation to 8 significant bits by a mask; the remainder is exact.
        bits = jax.lax.bitcast_convert_type(values, jnp.int32) & jnp.int32(-(2**16))
        term = jax.lax.bitcast_convert_type(bits, jnp.float32)
        terms.append(term)
        values = values - term
    return jnp.concatenate(terms).astype(jnp.bfloat16)
