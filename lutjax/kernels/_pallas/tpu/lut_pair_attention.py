"""`lutjax.lut_pair_attention` on TensorCores: how often each query reads each row is counted, then rows are multiplied.

Everything has its features in front and its queries in lanes, see `_shifts`. The comparisons are sums of terms of
places, see `lutjax.kernels._xla._terms`. What is counted are comparisons of row ids with the numbers of all rows, which
no gather is needed for; the counts times the table are one product for each detector.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from lutjax._fixed_point import FixedPoint
from lutjax.kernels._pallas import _call
from lutjax.kernels._pallas.tpu import _shifts
from lutjax.kernels._pallas.tpu._limits import LANES, params, vmem_budget
from lutjax.kernels._xla import lut_pair_attention as plain
from lutjax.kernels._xla._rows import slope
from lutjax.kernels._xla._terms import Terms
from lutjax.kernels.registry import Device

_CHUNK = 2**15  # numbers of the rows that are compared at once: they fit the registers
_AT_ONCE = (
    4  # shifts of one step of the loop: what is detected of one hides behind the comparisons of another
)


def forward(
    x: jax.Array,
    keys: jax.Array,
    weights: jax.Array,
    anchors: jax.Array,
    positions: jax.Array | None,
    start: jax.Array | None,
    query_segments: jax.Array | None,
    key_segments: jax.Array | None,
    *,
    interleave: bool,
    window: int | None,
    epsilon: float,
    accumulate: FixedPoint | None,
    device: Device,
) -> jax.Array:
    pairs = Pairs(
        x, keys, weights, anchors, positions, start, query_segments, key_segments,
        interleave=interleave, window=window, epsilon=epsilon, device=device,
    )  # fmt: skip
    if pairs.empty:
        return plain.forward(
            x, keys, weights, anchors, positions, start, query_segments, key_segments,
            interleave=interleave, window=window, epsilon=epsilon, accumulate=accumulate, device=device,
        )  # fmt: skip
    n_detectors, n_rows, n_outputs = weights.shape
    shifts = pairs.shifts

    def kernel(*refs: Any) -> None:
        inputs, (weights_ref, y_ref, counts) = pairs.split(refs)

        @pl.when(pl.program_id(1) == 0)
        def _() -> None:
            y_ref[...] = jnp.zeros_like(y_ref)

        counts[...] = jnp.zeros_like(counts)

        def count(steps: list[Step], _: None) -> None:
            count_rows(counts, steps)

        pairs.for_each_shift(inputs, count, None)
        y_ref[...] += dot(weights_ref[0].astype(jnp.float32), counts[...])

    (y,) = _call.call(
        kernel,
        *pairs.inputs,
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
    saved: tuple[Any, ...],
    dy: jax.Array,
    needs: tuple[bool, ...],
    *,
    interleave: bool,
    window: int | None,
    epsilon: float,
    accumulate: FixedPoint | None,
    device: Device,
) -> tuple[jax.Array | None, ...]:
    x, keys, weights, anchors, positions, start, query_segments, key_segments = saved
    need_x, need_keys, need_weights, _, need_positions = needs[:5]
    pairs = Pairs(
        x, keys, weights, anchors, positions, start, query_segments, key_segments,
        interleave=interleave, window=window, epsilon=epsilon, device=device,
    )  # fmt: skip
    if pairs.empty:
        return plain.backward(
            saved, dy, needs,
            interleave=interleave, window=window, epsilon=epsilon, accumulate=accumulate, device=device,
        )  # fmt: skip
    n_detectors, n_rows, n_outputs = weights.shape
    n_pairs, shifts = anchors.shape[1], pairs.shifts
    need_terms = need_x or need_keys or need_positions
    of_terms = (n_detectors, n_pairs, shifts.n_lanes)
    results: dict[str, tuple[tuple[int, ...], pl.BlockSpec]] = {}
    if need_x:
        results["x"] = of_terms, pairs.of_places(lambda t, b: (t, b))
    if need_keys:
        results["keys"] = of_terms, pairs.of_places(lambda t, b: (t, b))
    if need_positions:
        results["positions"] = (
            (n_detectors, n_pairs, pairs.n_distances),
            pairs.of_distances(lambda t, b: (t, b)),
        )
    if need_weights:
        results["weights"] = weights.shape, pl.BlockSpec((1, n_rows, n_outputs), lambda t, b: (t, 0, 0))

    def kernel(*refs: Any) -> None:
        inputs, (weights_ref, dy_ref, *others) = pairs.split(refs)
        d = dict(zip(results, others[: len(results)], strict=True))
        scratch = others[len(results) :]
        products = scratch[0] if need_terms else None
        counts = scratch[-1] if need_weights else None

        @pl.when(pl.program_id(1) == 0)
        def _() -> None:
            for name in ("positions", "weights"):
                if name in d:
                    d[name][...] = jnp.zeros_like(d[name])

        if products is not None:
            products[...] = dot(weights_ref[0].astype(jnp.float32), dy_ref[...])
        if counts is not None:
            counts[...] = jnp.zeros_like(counts)
        bit = jax.lax.broadcasted_iota(jnp.int32, (n_pairs, shifts.lanes), 0)
        zeros = jnp.zeros((n_pairs, shifts.lanes), jnp.float32)
        of_distance = jnp.zeros((n_pairs, pairs.n_distances), jnp.float32)
        at_first = jax.lax.broadcasted_iota(jnp.int32, of_distance.shape, 1) == 0

        def differences(steps: list[Step], closest: list[jax.Array]) -> list[jax.Array]:
            """What a flipped row changes, of each step, as a difference of products; counts the rows on the way."""
            assert products is not None
            flipped = [s.index ^ (1 << c) for s, c in zip(steps, closest, strict=True)]

            def visit(rows: Any, number: jax.Array, totals: list[jax.Array]) -> list[jax.Array]:
                is_main = [number == s.index for s in steps]
                if counts is not None:
                    counts[rows] += sum(is_it.astype(jnp.float32) for is_it in is_main)
                of_rows = products[rows]

                def change(is_main: jax.Array, flipped: jax.Array) -> jax.Array:
                    change = jnp.where(is_main, of_rows, 0) - jnp.where(number == flipped, of_rows, 0)
                    return jnp.sum(change, 0, keepdims=True)

                return [t + change(*of) for t, *of in zip(totals, is_main, flipped, strict=True)]

            nothing = [jnp.zeros((1, shifts.lanes), jnp.float32)] * len(steps)
            return _for_rows(n_rows, shifts.lanes, visit, nothing)

        def step(steps: list[Step], totals: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            if products is None:
                count_rows(counts, steps)
                return totals
            closest, margins = zip(*(s.closest() for s in steps), strict=True)
            of_query, of_key, of_distance = totals
            for s, c, margin, change in zip(
                steps, closest, margins, differences(steps, list(closest)), strict=True
            ):
                cotangent = jnp.where(s.counts, slope(margin) * change, 0)
                cotangent = jnp.where(bit == c, cotangent, 0)
                if need_x:
                    of_query = of_query + cotangent
                if need_keys:
                    of_key = pltpu.roll(of_key + cotangent, 1, 1)
                if need_positions:
                    of_all = jnp.sum(cotangent, 1, keepdims=True)
                    of_distance = jnp.where(at_first, of_distance + of_all, of_distance)
                    of_distance = pltpu.roll(of_distance, pairs.n_distances - 1, 1)
            return of_query, of_key, of_distance

        of_query, of_key, of_distance = pairs.for_each_shift(inputs, step, (zeros, zeros, of_distance))
        if need_x:
            d["x"][0] = of_query
        if need_keys:
            d["keys"][0] = pairs.keys_back(inputs, of_key)
        if need_positions:
            d["positions"][0] += pairs.distances_back(inputs, of_distance)
        if counts is not None:
            d["weights"][0] += dot(counts[...], dy_ref[...], contract_lanes=True)

    by_output = shifts.in_lanes(jnp.moveaxis(dy.astype(jnp.float32), -1, 0))
    n_scratch = int(need_terms) + int(need_weights)
    outputs = _call.call(
        kernel,
        *pairs.inputs,
        weights,
        by_output,
        outputs=[jax.ShapeDtypeStruct(shape, jnp.float32) for shape, _ in results.values()],
        name="lut_pair_attention_backward",
        grid=(n_detectors, shifts.n_blocks),
        in_specs=[
            *pairs.blocks(lambda t, b: (t, b)),
            pl.BlockSpec((1, n_rows, n_outputs), lambda t, b: (t, 0, 0)),
            pl.BlockSpec((n_outputs, shifts.lanes), lambda t, b: (0, b)),
        ],
        out_specs=[block for _, block in results.values()],
        scratch_shapes=[pltpu.VMEM((n_rows, shifts.lanes), jnp.float32)] * n_scratch,
        compiler_params=params(device),
    )
    totals = dict(zip(results, outputs, strict=True))
    terms = pairs.terms

    def of_places(name: str, length: int, part: int) -> jax.Array:
        return terms.to_x(shifts.in_places(totals[name], length).swapaxes(0, 1), part=part)

    return (
        of_places("x", shifts.n_queries, 1) if need_x else None,
        of_places("keys", shifts.n_keys, 0) if need_keys else None,
        totals.get("weights"),
        None,
        terms.to_positions(pairs.at_positions(totals["positions"])) if need_positions else None,
        *(None,) * 3,
    )


class Step:
    """One shift in a kernel: what is detected of every query and its key."""

    def __init__(self, delta: jax.Array, counts: jax.Array, epsilon: float):
        self._delta, self.counts = delta, counts
        self._bit = jax.lax.broadcasted_iota(jnp.int32, delta.shape, 0)
        is_set = delta > 0
        if epsilon:
            is_set &= ~(jnp.abs(delta) < epsilon)
        index = jnp.sum(jnp.where(is_set, 1 << self._bit, 0), 0, keepdims=True, dtype=jnp.int32)
        # A negative one for pairs that do not count, which is no row.
        self.index = jnp.where(counts, index, -1)

    def closest(self) -> tuple[jax.Array, jax.Array]:
        """Number and delta of the first closest comparison, ``[1, lanes]``."""
        size = jnp.where(jnp.isnan(self._delta), -1, jnp.abs(self._delta))
        smallest = jnp.min(size, 0, keepdims=True)
        closest = jnp.min(jnp.where(size == smallest, self._bit, len(size)), 0, keepdims=True)
        margin = jnp.sum(jnp.where(self._bit == closest, self._delta, 0), 0, keepdims=True)
        return closest, margin


class Pairs:
    """The pairs of a call: the inputs that a kernel reads of them, and the loop over their shifts in it."""

    def __init__(
        self,
        x: jax.Array,
        keys: jax.Array,
        weights: jax.Array,
        anchors: jax.Array,
        positions: jax.Array | None,
        start: jax.Array | None,
        query_segments: jax.Array | None,
        key_segments: jax.Array | None,
        *,
        interleave: bool,
        window: int | None,
        epsilon: float,
        device: Device,
    ):
        self.shifts = shifts = _shifts.plan(x, keys, weights, start, window, vmem_budget(device))
        distances = 1 if positions is None else positions.shape[0]
        self.empty = 0 in (x.shape[0], keys.shape[1], shifts.most, distances, *anchors.shape)
        if self.empty:
            return
        self._epsilon = epsilon
        self._n_pairs = anchors.shape[1]
        self.terms = Terms(x, keys, anchors, positions, interleave)
        found = _shifts.shifts_of(shifts, start, window)
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
            of_shifts = jnp.take(self.terms.position, self._at, axis=-1, mode="clip").swapaxes(0, 1)
            widths = ((0, 0), (0, 0), (0, self.n_distances - shifts.most))
            named["position"] = jnp.pad(of_shifts, widths)
        if query_segments is not None and key_segments is not None:
            named["query_segments"] = shifts.in_lanes(query_segments)[None]
            named["key_segments"] = shifts.in_lanes(key_segments)[None]
        self._names, self.inputs = tuple(named), tuple(named.values())

    # ---- around a kernel
    def blocks(self, place: Callable[[Any, Any], tuple[Any, Any]]) -> list[pl.BlockSpec]:
        """Of the inputs. `place`: detector and block of lanes at a point of the grid."""
        specs = {
            "range": pl.BlockSpec(memory_space=pltpu.SMEM),
            "query": self.of_places(place),
            "key": self.of_places(place),
            "position": self.of_distances(place),
        }
        of_lanes = pl.BlockSpec((1, self.shifts.lanes), lambda *at: (0, place(*at)[1]))
        return [specs.get(name, of_lanes) for name in self._names]

    def of_places(self, place: Callable[[Any, Any], tuple[Any, Any]]) -> pl.BlockSpec:
        def at(*at: Any) -> tuple[Any, ...]:
            t, b = place(*at)
            return t, 0, b

        return pl.BlockSpec((1, self._n_pairs, self.shifts.lanes), at)

    def of_distances(self, place: Callable[[Any, Any], tuple[Any, Any]]) -> pl.BlockSpec:
        return pl.BlockSpec((1, self._n_pairs, self.n_distances), lambda *at: (place(*at)[0], 0, 0))

    def at_positions(self, total: jax.Array) -> jax.Array:
        """Sums of each distance ``[C, T, distances]`` of those of each shift ``[T, C, shifts]``."""
        assert self.terms.position is not None
        total = total[..., : self.shifts.most].swapaxes(0, 1)
        return jnp.zeros(self.terms.position.shape, total.dtype).at[..., self._at].add(total)

    # ---- in a kernel
    def split(self, refs: tuple[Any, ...]) -> tuple[dict[str, Any], tuple[Any, ...]]:
        """References to the inputs by name, and those that follow."""
        n = len(self._names)
        return dict(zip(self._names, refs[:n], strict=True)), refs[n:]

    def for_each_shift(self, refs: dict[str, Any], body: Callable[[list[Step], Any], Any], carry: Any) -> Any:
        """`carry` passed through a body for some shifts at a time."""
        shift, count = refs["range"][0], refs["range"][1]
        query, first_key = refs["query"][0], refs["keys"][...]
        moving = {"key": pltpu.roll(refs["key"][0], shift, 1)}
        if "position" in refs:
            moving["position"] = refs["position"][0]
        if "key_segments" in refs:
            moving["key_segments"] = pltpu.roll(refs["key_segments"][...], shift, 1)
        by = {"key": 1, "position": self.n_distances - 1, "key_segments": 1}

        def one(n: Any, moving: dict[str, jax.Array]) -> Step:
            key = first_key - n
            counts = (key >= 0) & (key < self.shifts.n_keys) & (n < count)
            delta = query + moving["key"]
            if "position" in moving:
                delta = delta + moving["position"][:, :1]
            if "key_segments" in moving:
                counts &= refs["query_segments"][...] == moving["key_segments"]
            return Step(delta, counts, self._epsilon)

        def some(n: Any, carry: Any) -> Any:
            moving, carry = carry
            steps = []
            for i in range(_AT_ONCE):
                steps.append(one(n * _AT_ONCE + i, moving))
                moving = {name: pltpu.roll(a, by[name], 1) for name, a in moving.items()}
            return moving, body(steps, carry)

        return jax.lax.fori_loop(0, _turns(count), some, (moving, carry))[1]

    def keys_back(self, refs: dict[str, Any], a: jax.Array) -> jax.Array:
        """What has moved along with the keys, where the keys were."""
        turned = jax.lax.rem(refs["range"][0] + _turns(refs["range"][1]) * _AT_ONCE, self.shifts.lanes)
        return pltpu.roll(a, jax.lax.rem(self.shifts.lanes - turned, self.shifts.lanes), 1)

    def distances_back(self, refs: dict[str, Any], a: jax.Array) -> jax.Array:
        """What has moved along with the positions, the other way, at their distances."""
        return pltpu.roll(a, jax.lax.rem(_turns(refs["range"][1]) * _AT_ONCE, self.n_distances), 1)


def _turns(count: jax.Array) -> jax.Array:
    """How often the loop runs for so many shifts."""
    return jax.lax.div(count + (_AT_ONCE - 1), jnp.int32(_AT_ONCE))


def count_rows(counts: Any, steps: list[Step]) -> None:
    """Adds to the reference `counts` ``[rows, lanes]`` which row each query reads in each step."""

    def add(rows: Any, number: jax.Array, _: None) -> None:
        counts[rows] += sum((number == s.index).astype(jnp.float32) for s in steps)

    n_rows, lanes = counts.shape
    _for_rows(n_rows, lanes, add, None)


def _for_rows(n_rows: int, lanes: int, body: Callable[[Any, jax.Array, Any], Any], carry: Any) -> Any:
    """`carry` passed through a body for each slice of rows and their numbers ``[rows, lanes]``."""
    size = min(n_rows, 1 << (max(_CHUNK // lanes, 8).bit_length() - 1))  # both are powers of two
    number = jax.lax.broadcasted_iota(jnp.int32, (size, lanes), 0)
    if size == n_rows:
        return body(slice(None), number, carry)

    def chunk(n: Any, carry: Any) -> Any:
        first = pl.multiple_of(n * size, size)
        return body(pl.ds(first, size), number + first, carry)

    return jax.lax.fori_loop(0, n_rows // size, chunk, carry)


def dot(a: jax.Array, b: jax.Array, *, contract_lanes: bool = False) -> jax.Array:
    contracted = ((1,), (1 if contract_lanes else 0,))
    return jax.lax.dot_general(
        a, b, (contracted, ((), ())), precision="highest", preferred_element_type=jnp.float32
    )
