"""`lutjax.lut_pair_attention` on TensorCores: row-read histograms times the tables.

Formula for detector ``t``, query ``j`` and row ``r``::

    counts[t, j, r] = number of earlier keys whose pair with query j addresses row r
    y[j] = sum_t counts[t, j] @ weights[t]
    dweights[t] = counts[t].T @ dy
    a pair's dmargin = slope * <dy[j], row - flipped row>, selected from weights[t] @ dy[j]

Work: a grid step owns one detector and the samples in a lane block. It loops over shifts
(`_shifts`): at each shift every query meets one key, and comparisons are sums with one term per
position (`lutjax.kernels._xla._comparison_terms`). Row ids are compared with all row numbers, so
nothing is gathered; one matrix product per detector then applies the table.

Layout: features in sublanes, queries in lanes. Key terms rotate by one lane per shift; key
cotangents rotate with them and are rotated back at the end.

Numerics: counts are exact in float32, products use full float32 precision. Margin cotangents
subtract products, not rows, so their error is relative to the products. Sums have a fixed order.
Anchors are clamped.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from lutjax.dispatch.contract import Step
from lutjax.dispatch.registry import Declaration, Device
from lutjax.kernels._pallas import _call
from lutjax.kernels._pallas.tpu import _shifts
from lutjax.kernels._pallas.tpu._limits import LANES, params, vmem_budget
from lutjax.kernels._pallas.tpu._rules import tensorcore_rule
from lutjax.kernels._xla import lut_pair_attention as plain
from lutjax.kernels._xla._comparison_terms import Terms
from lutjax.kernels._xla._row_gathers import slope
from lutjax.ops.lut_pair_attention import LutPairAttention
from lutjax.values._detection import is_above_zero
from lutjax.values._row_rules import RowState

_CHUNK = 2**15  # numbers of the rows that are compared at once: they fit the registers
_AT_ONCE = (
    4  # shifts of one step of the loop: detecting one hides behind the comparisons of another
)

SPEC = Declaration(tensorcore_rule(_shifts.unsupported, _shifts.slower))


def forward(call: LutPairAttention, *, device: Device) -> jax.Array:
    pairs = ShiftedPairs(call, device)
    if pairs.empty:
        return plain.forward(call, device=device)
    weights, shifts = call.weights, pairs.shifts
    n_detectors, n_rows, n_outputs = weights.shape

    def kernel(*refs: Any) -> None:
        inputs, (weights_ref, y_ref, counts) = pairs.split(refs)

        @pl.when(pl.program_id(1) == 0)
        def _() -> None:
            # Detectors are the inner axis of the grid and add to one block of outputs.
            y_ref[...] = jnp.zeros_like(y_ref)

        pairs.count(inputs, counts)
        y_ref[...] += _dot(weights_ref[0].astype(jnp.float32), counts[...])

    (y,) = _call.call(
        kernel,
        *pairs.inputs,
        # ``[outputs, rows] @ [rows, lanes]``: outputs in sublanes, queries stay in lanes.
        weights.transpose(0, 2, 1),
        outputs=[jax.ShapeDtypeStruct((n_outputs, shifts.n_lanes), jnp.float32)],
        name="lut_pair_attention",
        grid=(shifts.n_blocks, n_detectors),
        in_specs=[
            *pairs.blocks(lambda b, t: (t, b)),
            pl.BlockSpec((1, n_outputs, n_rows), lambda b, t: (t, 0, 0)),
        ],
        out_specs=[pl.BlockSpec((n_outputs, shifts.lanes), lambda b, t: (0, b))],
        scratch_shapes=[pltpu.VMEM((n_rows, shifts.lanes), jnp.float32)],
        compiler_params=params(device),
    )
    y = jnp.moveaxis(shifts.in_places(y, shifts.n_queries), 0, -1)
    return y.astype(weights.dtype)


def backward(
    call: LutPairAttention, cotangent: jax.Array, needs: frozenset[str], *, device: Device
) -> dict[str, jax.Array]:
    pairs = ShiftedPairs(call, device)
    if pairs.empty:
        return plain.backward(call, cotangent, needs, device=device)
    weights, shifts = call.weights, pairs.shifts
    n_detectors, n_rows, n_outputs = weights.shape
    n_pairs = call.anchors.shape[1]
    need_terms = bool(needs - {"weights"})

    def locate_detector(t: Any, b: Any) -> tuple[Any, Any]:
        return t, b

    of_terms = (n_detectors, n_pairs, shifts.n_lanes), pairs.term_spec(locate_detector)
    of_distances = (n_detectors, n_pairs, pairs.n_distances), pairs.distance_spec(locate_detector)
    of_table = weights.shape, pl.BlockSpec((1, n_rows, n_outputs), lambda t, b: (t, 0, 0))
    every = {"x": of_terms, "keys": of_terms, "positions": of_distances, "weights": of_table}
    results = {name: result for name, result in every.items() if name in needs}

    def kernel(*refs: Any) -> None:
        inputs, (weights_ref, dy_ref, *others) = pairs.split(refs)
        d = dict(zip(results, others[: len(results)], strict=True))
        scratch = others[len(results) :]
        products = scratch[0] if need_terms else None
        counts = scratch[-1] if "weights" in needs else None

        @pl.when(pl.program_id(1) == 0)
        def _() -> None:
            # Only these sum over blocks of samples; cotangents of terms belong to one block.
            for name in ("positions", "weights"):
                if name in d:
                    d[name][...] = jnp.zeros_like(d[name])

        if products is not None:
            # All rows times dy once per detector and block; each shift then only selects.
            products[...] = _dot(weights_ref[0].astype(jnp.float32), dy_ref[...])
        if counts is not None:
            counts[...] = jnp.zeros_like(counts)
        bit = jax.lax.broadcasted_iota(jnp.int32, (n_pairs, shifts.lanes), 0)
        zeros = jnp.zeros((n_pairs, shifts.lanes), jnp.float32)
        of_distance = jnp.zeros((n_pairs, pairs.n_distances), jnp.float32)
        at_first = jax.lax.broadcasted_iota(jnp.int32, of_distance.shape, 1) == 0

        def differences(steps: list[Shift], closest: list[jax.Array]) -> list[jax.Array]:
            """Return the difference between both rows' products for each shift.

            Count rows in the same pass.
            """
            assert products is not None
            flipped = [s.index ^ (1 << c) for s, c in zip(steps, closest, strict=True)]

            def visit(rows: Any, number: jax.Array, totals: list[jax.Array]) -> list[jax.Array]:
                is_main = [number == s.index for s in steps]
                if counts is not None:
                    counts[rows] += sum(is_it.astype(jnp.float32) for is_it in is_main)
                of_rows = products[rows]

                def change(is_main: jax.Array, flipped: jax.Array) -> jax.Array:
                    change = jnp.where(is_main, of_rows, 0) - jnp.where(
                        number == flipped, of_rows, 0
                    )
                    return jnp.sum(change, 0, keepdims=True)

                return [t + change(*of) for t, *of in zip(totals, is_main, flipped, strict=True)]

            # Rows are visited once for counting and for selecting: comparisons with the main row
            # serve both.
            nothing = [jnp.zeros((1, shifts.lanes), jnp.float32)] * len(steps)
            return _for_rows(n_rows, shifts.lanes, visit, nothing)

        def step(steps: list[Shift], totals: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            if products is None:
                _count_rows(counts, steps)
                return totals
            closest, margins = zip(*(s.find_closest() for s in steps), strict=True)
            of_query, of_key, of_distance = totals
            for s, c, margin, change in zip(
                steps, closest, margins, differences(steps, list(closest)), strict=True
            ):
                of_pair = jnp.where(s.counts, slope(margin) * change, 0)
                of_pair = jnp.where(bit == c, of_pair, 0)
                if "x" in needs:
                    of_query = of_query + of_pair
                if "keys" in needs:
                    # The sum travels with the keys, so that the addend of a pair meets the sum of
                    # its key.
                    of_key = pltpu.roll(of_key + of_pair, 1, 1)
                if "positions" in needs:
                    of_all = jnp.sum(of_pair, 1, keepdims=True)
                    # A shift has one distance: its sum is always added in lane 0, and the array
                    # rotates against it.
                    of_distance = jnp.where(at_first, of_distance + of_all, of_distance)
                    of_distance = pltpu.roll(of_distance, pairs.n_distances - 1, 1)
            return of_query, of_key, of_distance

        of_query, of_key, of_distance = pairs.for_each_shift(
            inputs, step, (zeros, zeros, of_distance)
        )
        if "x" in needs:
            d["x"][0] = of_query
        if "keys" in needs:
            d["keys"][0] = pairs.keys_back(inputs, of_key)
        if "positions" in needs:
            d["positions"][0] += pairs.distances_back(inputs, of_distance)
        if counts is not None:
            # Contracted over lanes: the sum over all queries of the block.
            d["weights"][0] += _dot(counts[...], dy_ref[...], contract_lanes=True)

    n_scratch = int(need_terms) + int("weights" in needs)
    outputs = _call.call(
        kernel,
        *pairs.inputs,
        weights,
        pairs.output_rows(cotangent),
        outputs=[jax.ShapeDtypeStruct(shape, jnp.float32) for shape, _ in results.values()],
        name="lut_pair_attention_backward",
        grid=(n_detectors, shifts.n_blocks),
        in_specs=[
            *pairs.blocks(locate_detector),
            of_table[1],
            pl.BlockSpec((n_outputs, shifts.lanes), lambda t, b: (0, b)),
        ],
        out_specs=[block for _, block in results.values()],
        scratch_shapes=[pltpu.VMEM((n_rows, shifts.lanes), jnp.float32)] * n_scratch,
        compiler_params=params(device),
    )
    cotangents = dict(zip(results, outputs, strict=True))
    for name, length, part in (("keys", shifts.n_keys, 0), ("x", shifts.n_queries, 1)):
        if name in cotangents:
            cotangents[name] = pairs.terms.to_x(
                shifts.in_places(cotangents[name], length).swapaxes(0, 1), part=part
            )
    if "positions" in cotangents:
        cotangents["positions"] = pairs.terms.to_positions(
            pairs.add_to_distances(cotangents["positions"])
        )
    return cotangents


def update(
    call: LutPairAttention, cotangent: jax.Array, step: Step, *, device: Device
) -> tuple[jax.Array, RowState]:
    pairs = ShiftedPairs(call, device)
    if pairs.empty:
        return plain.update(call, cotangent, step, device=device)
    weights, decay = call.weights, step.rule.weight_decay
    n_detectors, n_rows, n_outputs = weights.shape
    shifts = pairs.shifts

    def kernel(*refs: Any) -> None:
        inputs, (scales, weights_ref, dy_ref, new_ref, counts, total, *touched) = pairs.split(refs)

        @pl.when(pl.program_id(1) == 0)
        def _() -> None:
            for ref in (total, *touched):
                ref[...] = jnp.zeros_like(ref)

        pairs.count(inputs, counts)
        total[...] += _dot(counts[...], dy_ref[...], contract_lanes=True)
        for ref in touched:
            ref[...] += jnp.sum(counts[...], 1, keepdims=True)

        @pl.when(pl.program_id(1) == shifts.n_blocks - 1)
        def _() -> None:
            rows = weights_ref[0].astype(jnp.float32)
            # The table moves once, by the sum over all blocks.
            moved = rows - scales[0] * total[...]
            for ref in touched:
                moved = jnp.where(ref[...] > 0, moved - scales[1] * rows, rows)
            new_ref[0] = moved.astype(new_ref.dtype)

    scales = jnp.stack([step.rate_and_factor, step.rate.astype(jnp.float32) * decay])
    table = pl.BlockSpec((1, n_rows, n_outputs), lambda t, b: (t, 0, 0))
    # Only decay moves a row whose gradient is zero, and only if it was read.
    touched = [pltpu.VMEM((n_rows, 1), jnp.float32)] if decay else []
    (new,) = _call.call(
        kernel,
        *pairs.inputs,
        scales,
        weights,
        pairs.output_rows(cotangent),
        outputs=[jax.ShapeDtypeStruct(weights.shape, weights.dtype)],
        name="lut_pair_attention_update",
        grid=(n_detectors, shifts.n_blocks),
        in_specs=[
            *pairs.blocks(lambda t, b: (t, b)),
            pl.BlockSpec(memory_space=pltpu.SMEM),
            table,
            pl.BlockSpec((n_outputs, shifts.lanes), lambda t, b: (0, b)),
        ],
        out_specs=[table],
        scratch_shapes=[
            pltpu.VMEM((n_rows, shifts.lanes), jnp.float32),
            pltpu.VMEM((n_rows, n_outputs), jnp.float32),
            *touched,
        ],
        # In place: the table of a detector is read and written by its own steps only.
        input_output_aliases={len(pairs.inputs) + 1: 0},
        compiler_params=params(device),
    )
    return new, step.state


class Shift:
    """Detections for every query and its key at one shift, in a kernel."""

    def __init__(self, delta: jax.Array, counts: jax.Array, epsilon: float):
        self._delta, self.counts = delta, counts
        self._bit = jax.lax.broadcasted_iota(jnp.int32, delta.shape, 0)
        is_set = is_above_zero(delta)
        if epsilon:
            is_set &= ~(jnp.abs(delta) < epsilon)
        # Comparisons are in sublanes: the sum over them packs the bits of a row id.
        index = jnp.sum(jnp.where(is_set, 1 << self._bit, 0), 0, keepdims=True, dtype=jnp.int32)
        # A negative one for pairs that do not count, which is no row.
        self.index = jnp.where(counts, index, -1)

    def find_closest(self) -> tuple[jax.Array, jax.Array]:
        """Return the first closest comparison's number and delta, ``[1, lanes]``."""
        # NaN is closer than any number, as in `detect`: -1 sorts before all magnitudes.
        size = jnp.where(jnp.isnan(self._delta), -1, jnp.abs(self._delta))
        smallest = jnp.min(size, 0, keepdims=True)
        # The first of equal comparisons.
        closest = jnp.min(jnp.where(size == smallest, self._bit, len(size)), 0, keepdims=True)
        margin = jnp.sum(jnp.where(self._bit == closest, self._delta, 0), 0, keepdims=True)
        return closest, margin


class ShiftedPairs:
    """Kernel inputs for a call's pairs, and the in-kernel loop over shifts."""

    def __init__(self, call: LutPairAttention, device: Device):
        self.shifts = shifts = _shifts.plan(call, vmem_budget(device), len(call.x))
        distances = 1 if call.positions is None else len(call.positions)
        self.empty = 0 in (
            len(call.x),
            call.keys.shape[1],
            shifts.most,
            distances,
            *call.anchors.shape,
        )
        if self.empty:
            return
        self._epsilon = call.epsilon
        self._n_pairs = call.anchors.shape[1]
        self.terms = Terms(call)
        found = _shifts.shifts_of(shifts, call.start, call.window)
        # Whole registers: rotations are over all lanes of an array.
        self.n_distances = -(-shifts.most // LANES) * LANES
        shift = jnp.mod(found.first, shifts.lanes)
        named = {
            "range": jnp.stack([shift, found.count]),
            "keys": found.keys,
            "query": shifts.in_lanes(self.terms.query.swapaxes(0, 1)),
            "key": shifts.in_lanes(self.terms.key.swapaxes(0, 1)),
        }
        if self.terms.position is not None:
            capacity = self.terms.position.shape[-1]
            self._at = jnp.clip(found.distances, 0, capacity - 1)
            # The term of each shift, in order, so that the loop reads lane 0 and rotates.
            of_shifts = jnp.take(self.terms.position, self._at, axis=-1, mode="clip").swapaxes(0, 1)
            widths = ((0, 0), (0, 0), (0, self.n_distances - shifts.most))
            named["position"] = jnp.pad(of_shifts, widths)
        if call.query_segments is not None and call.key_segments is not None:
            named["query_segments"] = shifts.in_lanes(call.query_segments)[None]
            named["key_segments"] = shifts.in_lanes(call.key_segments)[None]
        self._names, self.inputs = tuple(named), tuple(named.values())

    # ---- around a kernel
    def blocks(self, place: Callable[[Any, Any], tuple[Any, Any]]) -> list[pl.BlockSpec]:
        """Return input block specs. `place` maps a grid point to its detector and lane block."""
        specs = {
            "range": pl.BlockSpec(memory_space=pltpu.SMEM),
            "query": self.term_spec(place),
            "key": self.term_spec(place),
            "position": self.distance_spec(place),
        }
        of_lanes = pl.BlockSpec((1, self.shifts.lanes), lambda *point: (0, place(*point)[1]))
        return [specs.get(name, of_lanes) for name in self._names]

    def term_spec(self, place: Callable[[Any, Any], tuple[Any, Any]]) -> pl.BlockSpec:
        def index_map(*point: Any) -> tuple[Any, ...]:
            t, b = place(*point)
            return t, 0, b

        return pl.BlockSpec((1, self._n_pairs, self.shifts.lanes), index_map)

    def distance_spec(self, place: Callable[[Any, Any], tuple[Any, Any]]) -> pl.BlockSpec:
        return pl.BlockSpec(
            (1, self._n_pairs, self.n_distances), lambda *point: (place(*point)[0], 0, 0)
        )

    def output_rows(self, dy: jax.Array) -> jax.Array:
        """``[B, Lq, O]`` -> ``[O, lanes of all blocks]`` float32."""
        return self.shifts.in_lanes(jnp.moveaxis(dy.astype(jnp.float32), -1, 0))

    def add_to_distances(self, total: jax.Array) -> jax.Array:
        """Add shift sums ``[T, C, shifts]`` to their distances ``[C, T, distances]``."""
        assert self.terms.position is not None
        total = total[..., : self.shifts.most].swapaxes(0, 1)
        return jnp.zeros(self.terms.position.shape, total.dtype).at[..., self._at].add(total)

    # ---- in a kernel
    def split(self, refs: tuple[Any, ...]) -> tuple[dict[str, Any], tuple[Any, ...]]:
        """Split references into inputs by name and all others."""
        n = len(self._names)
        return dict(zip(self._names, refs[:n], strict=True)), refs[n:]

    def for_each_shift(
        self, refs: dict[str, Any], body: Callable[[list[Shift], Any], Any], carry: Any
    ) -> Any:
        """Pass `carry` through a body for some shifts at a time."""
        shift, count = refs["range"][0], refs["range"][1]
        query, first_key = refs["query"][0], refs["keys"][...]
        # The first shift may be anywhere; from there each step rotates by one lane.
        moving = {"key": pltpu.roll(refs["key"][0], shift, 1)}
        if "position" in refs:
            moving["position"] = refs["position"][0]
        if "key_segments" in refs:
            moving["key_segments"] = pltpu.roll(refs["key_segments"][...], shift, 1)
        by = {"key": 1, "position": self.n_distances - 1, "key_segments": 1}

        def one(n: Any, moving: dict[str, jax.Array]) -> Shift:
            key = first_key - n
            # Rotations wrap around the block, and several shifts run per turn: the key number and
            # the count mask both.
            counts = (key >= 0) & (key < self.shifts.n_keys) & (n < count)
            delta = query + moving["key"]
            if "position" in moving:
                # All pairs of a shift have one distance, so a column is broadcast over the lanes.
                delta = delta + moving["position"][:, :1]
            if "key_segments" in moving:
                counts &= refs["query_segments"][...] == moving["key_segments"]
            return Shift(delta, counts, self._epsilon)

        def visit_shifts(n: Any, carry: Any) -> Any:
            moving, carry = carry
            steps = []
            for i in range(_AT_ONCE):
                steps.append(one(n * _AT_ONCE + i, moving))
                moving = {name: pltpu.roll(a, by[name], 1) for name, a in moving.items()}
            return moving, body(steps, carry)

        return jax.lax.fori_loop(0, _turns(count), visit_shifts, (moving, carry))[1]

    def count(self, refs: dict[str, Any], counts: Any) -> None:
        """Count in `counts` ``[rows, lanes]`` how often each query reads each row."""
        counts[...] = jnp.zeros_like(counts)
        self.for_each_shift(refs, lambda steps, _: _count_rows(counts, steps), None)

    def keys_back(self, refs: dict[str, Any], a: jax.Array) -> jax.Array:
        """Undo the rotations for an array that was rotated along with the keys."""
        # Every turn rotates `_AT_ONCE` times, also behind the last shift that counts.
        turned = jax.lax.rem(
            refs["range"][0] + _turns(refs["range"][1]) * _AT_ONCE, self.shifts.lanes
        )
        return pltpu.roll(a, jax.lax.rem(self.shifts.lanes - turned, self.shifts.lanes), 1)

    def distances_back(self, refs: dict[str, Any], a: jax.Array) -> jax.Array:
        """Undo the rotations for an array that was rotated along with the positions."""
        return pltpu.roll(a, jax.lax.rem(_turns(refs["range"][1]) * _AT_ONCE, self.n_distances), 1)


def _turns(count: jax.Array) -> jax.Array:
    return jax.lax.div(count + (_AT_ONCE - 1), jnp.int32(_AT_ONCE))


def _count_rows(counts: Any, steps: list[Shift]) -> None:
    """Count each query's row at each shift in `counts` ``[rows, lanes]``."""

    def add(rows: Any, number: jax.Array, _: None) -> None:
        counts[rows] += sum((number == s.index).astype(jnp.float32) for s in steps)

    n_rows, lanes = counts.shape
    _for_rows(n_rows, lanes, add, None)


def _for_rows(
    n_rows: int, lanes: int, body: Callable[[Any, jax.Array, Any], Any], carry: Any
) -> Any:
    """Pass `carry` through a body for each row slice and its row numbers ``[rows, lanes]``."""
    # Chunks of rows stay in registers; a loop over chunks keeps the program short.
    size = min(n_rows, 1 << (max(_CHUNK // lanes, 8).bit_length() - 1))  # both are powers of two
    number = jax.lax.broadcasted_iota(jnp.int32, (size, lanes), 0)
    if size == n_rows:
        return body(slice(None), number, carry)

    def chunk(n: Any, carry: Any) -> Any:
        first = pl.multiple_of(n * size, size)
        return body(pl.ds(first, size), number + first, carry)

    return jax.lax.fori_loop(0, n_rows // size, chunk, carry)


def _dot(a: jax.Array, b: jax.Array, *, contract_lanes: bool = False) -> jax.Array:
    # Counts may exceed the 8 digits of bfloat16, and tables are float32: full precision for both.
    contracted = ((1,), (1 if contract_lanes else 0,))
    return jax.lax.dot_general(
        a, b, (contracted, ((), ())), precision="highest", preferred_element_type=jnp.float32
    )
