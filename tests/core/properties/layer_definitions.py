"""The layers in NumPy, independent of the package: docs/semantics.md and docs/logic.md as code.

Each function takes a layer's arrays by the names of its variables, its input and its options, and returns the output, float64,
with its pullback: of the cotangent of the output, those of the input ``"x"`` and of the variables that have one. Sums are made in
float64, comparisons and choices in the dtype of what is compared. Random numbers are those that `jax.random` draws from the key.
"""

import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np

from properties import definitions as D
from properties.definitions import wide
from properties.members import (
    LOST,
    MAGNITUDES,
    READS,
    Arrays,
    Undecided,
    exponentials,
    lost_of,
    tables,
    value_of,
    values_of,
)

ALLOWED = 2 * 2e-5 / float(np.finfo(np.float32).eps)
"""Roundings of float32 in the tolerance of comparisons, by which `MAGNITUDES` are multiplied."""

Pull = Callable[[np.ndarray], Arrays]
Defined = tuple[np.ndarray, Pull]


# ------------------------------------------------------------------------------------- memories
def root_mean_square(x: np.ndarray, scale: np.ndarray) -> Defined:
    """Vectors divided by the root of their mean square, and scaled; the cotangent of the scale is one of each vector."""
    x, scale = wide(x), wide(scale)
    inverse = 1 / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)

    def pull(dy: np.ndarray) -> Arrays:
        g = dy * scale
        dx = inverse * g - x * inverse**3 * (g * x).mean(-1, keepdims=True)
        return {"x": dx, "scale": dy * x * inverse}

    return x * inverse * scale, pull


def _of_all(a: np.ndarray, rank: int) -> np.ndarray:
    """A sum over all axes but the last `rank`."""
    return a.sum(tuple(range(a.ndim - rank)))


def hashes(
    tokens: np.ndarray, place: np.ndarray, orders: Any, heads: int, rows: int, seed: int
) -> np.ndarray:
    """Rows of the n-grams that end at each token of texts ``[batch, length]``; `place`: earlier tokens that are there."""

    def mix(h: int) -> int:
        h = ((h ^ (h >> 16)) * 0x85EBCA6B) % 2**32
        h = ((h ^ (h >> 13)) * 0xC2B2AE35) % 2**32
        return h ^ (h >> 16)

    index = np.zeros((*tokens.shape, len(orders) * heads), np.int64)
    for b, t in np.ndindex(*tokens.shape):
        for i, order in enumerate(orders):
            for head in range(heads):
                h = 0
                for j in range(min(order, place[b, t] + 1)):
                    number = ((order * 2**12 + head) * 2**8 + j) * 0x9E3779B9
                    times = mix((mix((seed + 0x9E3779B9) % 2**32) + number) % 2**32) | 1
                    h ^= ((int(tokens[b, t - j]) + 1) * times) % 2**32
                index[b, t, i * heads + head] = mix(h) % rows
    return index


def ngram_memory(
    a: Arrays,
    x: np.ndarray,
    tokens: np.ndarray,
    segments: np.ndarray | None,
    *,
    orders: Any,
    heads: int,
    kernel: int,
    seed: int,
    scale: float | None = None,
) -> Defined:
    """Rows of n-grams, read by a gate, and a convolution over those of a text."""
    n_tables, n_rows, width = a["weights"].shape
    place = np.zeros(tokens.shape, int)
    for t in range(1, tokens.shape[1]):
        same = np.ones(len(tokens), bool) if segments is None else segments[:, t] == segments[:, t - 1]
        place[:, t] = np.where(same, place[:, t - 1] + 1, 0)
    index = hashes(tokens, place, orders, heads, n_rows, seed)[..., None]
    ones = np.ones(index.shape, D.accumulator(a["weights"].dtype))
    read = value_of(D.weighted_lookup(a["weights"], index, ones, n_tables, scale))
    rows = read.reshape(*x.shape[:-1], n_tables * width)
    of_key, of_value = wide(a["key_kernel"]), wide(a["value_kernel"])
    query, pull_query = root_mean_square(x, a["query_scale"])
    key, pull_key = root_mean_square(rows @ of_key, a["key_scale"])
    root, value = np.sqrt(x.shape[-1]), rows @ of_value
    gate = 1 / (1 + np.exp(-(query * key).sum(-1, keepdims=True) / root))
    gated = gate * value
    step = max(orders)
    y, pull_conv = gated, None
    if kernel:
        normed, pull_conv = root_mean_square(gated, a["conv_scale"])
        weights, earlier = wide(a["conv_kernel"]), np.zeros((kernel, *normed.shape))
        for i in range(min(kernel, (tokens.shape[1] - 1) // step + 1)):
            earlier[i, :, i * step :] = normed[:, : tokens.shape[1] - i * step]
            earlier[i] *= (place >= i * step)[..., None]
        total = np.einsum("ibtf,if->btf", earlier, weights[::-1])
        sigmoid = 1 / (1 + np.exp(-total))
        y = gated + total * sigmoid

    def pull(dy: np.ndarray) -> Arrays:
        found: Arrays = {}
        dgated = wide(dy).copy()
        if pull_conv is not None:
            dtotal = dy * sigmoid * (1 + total * (1 - sigmoid))
            found["conv_kernel"] = np.einsum("ibtf,btf->if", earlier, dtotal)[::-1]
            dnormed = np.zeros(normed.shape)
            for i in range(min(kernel, (tokens.shape[1] - 1) // step + 1)):
                back = dtotal * weights[kernel - 1 - i] * (place >= i * step)[..., None]
                dnormed[:, : tokens.shape[1] - i * step] += back[:, i * step :]
            of = pull_conv(dnormed)
            dgated += of["x"]
            found["conv_scale"] = _of_all(of["scale"], 1)
        dscore = (dgated * value).sum(-1, keepdims=True) * gate * (1 - gate) / root
        dvalue = dgated * gate
        of_query, of_keys = pull_query(dscore * key), pull_key(dscore * query)
        drows = of_keys["x"] @ of_key.T + dvalue @ of_value.T
        flat = rows.reshape(math.prod(rows.shape[:-1]), rows.shape[-1])
        found["key_kernel"] = flat.T @ of_keys["x"].reshape(-1, x.shape[-1])
        found["value_kernel"] = flat.T @ dvalue.reshape(-1, x.shape[-1])
        found |= {"query_scale": _of_all(of_query["scale"], 1), "key_scale": _of_all(of_keys["scale"], 1)}
        dtables = D.weighted_lookup_vjp(a["weights"], index, ones, drows.reshape(read.shape), n_tables, scale)
        return {**found, "x": of_query["x"], "weights": value_of(dtables["weights"])}

    return y, pull


def _product_keys(a: Arrays, x: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray, Pull]:
    """Rows that products of keys choose, ``[batch, heads, k]``, their weights, and the pullback of these."""
    heads, _, n_keys, size = a["half_keys"].shape
    kernel, keys = wide(a["query_kernel"]), wide(a["half_keys"])
    plain = (wide(x) @ kernel).reshape(*x.shape[:-1], heads, 2, size)
    queries, pull_queries = root_mean_square(plain, a["query_scale"])
    scores = np.einsum("bhsc,hsnc->bhsn", queries, keys)
    sums = (scores[:, :, 0, :, None] + scores[:, :, 1, None, :]).reshape(*scores.shape[:2], n_keys**2)
    order = np.argsort(-sums, -1, kind="stable")
    ids = order[..., :k]
    best = np.take_along_axis(sums, order[..., : k + 1], -1)
    eps = max(float(ml_dtypes.finfo(v.dtype).eps) for v in (x, a["query_kernel"]))
    if best.size and np.min(-np.diff(best, axis=-1), initial=np.inf) < 64 * eps * (1 + np.abs(scores).max()):
        raise Undecided
    share = np.exp(best[..., :k] - best[..., :1])
    share /= share.sum(-1, keepdims=True)

    def pull(dshare: np.ndarray) -> Arrays:
        dsums = share * (dshare - (dshare * share).sum(-1, keepdims=True))
        dscores = np.zeros(scores.shape)
        b, h, _ = np.indices(ids.shape)
        np.add.at(dscores, (b, h, 0, ids // n_keys), dsums)
        np.add.at(dscores, (b, h, 1, ids % n_keys), dsums)
        of = pull_queries(np.einsum("bhsn,hsnc->bhsc", dscores, keys))
        dplain = of["x"].reshape(len(x), kernel.shape[1])
        return {
            "half_keys": np.einsum("bhsn,bhsc->hsnc", dscores, queries),
            "query_scale": of["scale"].sum(0),
            "query_kernel": wide(x).T @ dplain,
            "x": dplain @ kernel.T,
        }

    return ids, share, pull


def product_key_memory(a: Arrays, x: np.ndarray, k: int, scale: float | None = None) -> Defined:
    """Rows of a table with the largest sums of scores of keys, weighted by their softmax."""
    ids, share, pull_share = _product_keys(a, x, k)
    index, shape = ids.reshape(len(x), 1, math.prod(ids.shape[1:])), share.shape
    inner = D.accumulator(x.dtype, a["query_kernel"].dtype)
    coefficients = share.reshape(index.shape).astype(inner)
    y = value_of(D.weighted_lookup(a["weights"], index, coefficients, 1, scale))[..., 0, :]

    def pull(dy: np.ndarray) -> Arrays:
        of = values_of(D.weighted_lookup_vjp(a["weights"], index, coefficients, dy[..., None, :], 1, scale))
        found = pull_share(of.pop("coefficients").reshape(shape))
        return {**found, "weights": of["weights"]}

    return y, pull


def product_key_experts(a: Arrays, x: np.ndarray, k: int) -> Defined:
    """Experts of one neuron, whose activation is the sine."""
    ids, share, pull_share = _product_keys(a, x, k)
    down, up = wide(a["down"])[0][ids], wide(a["up"])[0][ids]  # [batch, heads, k, features]
    products = np.einsum("bhkf,bf->bhk", down, wide(x))
    y = np.einsum("bhk,bhko->bo", share * np.sin(products), up)

    def pull(dy: np.ndarray) -> Arrays:
        of_each = np.einsum("bhko,bo->bhk", up, dy)
        dproducts = of_each * share * np.cos(products)
        found = pull_share(of_each * np.sin(products))
        tables = {name: np.zeros(a[name].shape) for name in ("down", "up")}
        np.add.at(tables["down"][0], ids, dproducts[..., None] * wide(x)[:, None, None, :])
        np.add.at(tables["up"][0], ids, (share * np.sin(products))[..., None] * dy[:, None, None, :])
        dx = found["x"] + np.einsum("bhk,bhkf->bf", dproducts, down)
        return {**found, **tables, "x": dx}

    return y, pull


# ------------------------------------------------------------------------------------- tables over vectors
def lut(
    a: Arrays, x: np.ndarray, *, groups: int | None = None, epsilon: float = 0.0, scale: float | None = None
) -> Defined:
    """Look-up tables over a vector, or over the parts of it that groups read, with outputs side by side."""
    parts = x if groups is None else x.reshape(*x.shape[:-1], groups, x.shape[-1] // groups)
    given, how = (parts, a["weights"], a["anchors"]), (epsilon, scale, groups)
    y = value_of(D.lut(*given, *how))

    def pull(dy: np.ndarray) -> Arrays:
        of = values_of(D.lut_vjp(*given, dy.reshape(y.shape), *how))
        return {**of, "x": of["x"].reshape(x.shape)}

    return _last_joined(y, 1 if groups is None else 2), pull


def sparse_lut(
    a: Arrays,
    x: np.ndarray,
    n_outputs: int,
    *,
    groups: int | None = None,
    epsilon: float = 0.0,
    scale: float | None = None,
) -> Defined:
    """Outputs of rows that reach some of the outputs, of their group."""
    parts = x if groups is None else x.reshape(*x.shape[:-1], groups, x.shape[-1] // groups)
    given, how = (parts, a["weights"], a["anchors"], a["targets"]), (epsilon, scale, groups)
    y = value_of(D.sparse_lut(*given, n_outputs, *how))

    def pull(dy: np.ndarray) -> Arrays:
        of = values_of(D.sparse_lut_vjp(*given, dy.reshape(y.shape), *how))
        return {**of, "x": of["x"].reshape(x.shape)}

    return _last_joined(y, 1 if groups is None else 2), pull


def _last_joined(y: np.ndarray, n: int) -> np.ndarray:
    """An array whose last `n` axes are one."""
    lead = y.shape[: y.ndim - n]
    return y.reshape(*lead, math.prod(y.shape[y.ndim - n :]))


def scored(
    a: Arrays,
    x: np.ndarray,
    read: str,
    *,
    groups: int,
    sum_groups: bool = False,
    keep: np.ndarray | None = None,
    scale: float | None = None,
) -> Defined:
    """Scored reads of ``[..., G or 1, I]``: ``[..., G or 1, O]``."""
    name, how = READS[read]
    scalars = exponentials(a)
    ways = D.ways_of(name, D.margins(x, a["anchors"], groups), scalars, getattr(how, "ways", 2))
    rest = (name, groups, sum_groups, keep, scale)
    total = D.scored_lut(ways, tables(a), *rest)

    def pull(dy: np.ndarray) -> Arrays:
        of = D.scored_lut_vjp(x, ways, tables(a), a["anchors"], dy, *rest)
        of.pop("keep")
        names = {short: f"log_{short}" for short in scalars}
        return {**values_of(of, names), **lost_of(total, of, names)}

    return value_of(total), pull


def dense(a: Arrays, x: np.ndarray, name: str) -> Defined:
    """``x @ kernel + bias``."""
    kernel, bias = wide(a[f"{name}_kernel"]), wide(a[f"{name}_bias"])

    def pull(dy: np.ndarray) -> Arrays:
        flat_x, flat_dy = (v.reshape(math.prod(v.shape[:-1]), v.shape[-1]) for v in (x, dy))
        return {
            f"{name}_kernel": flat_x.T @ flat_dy,
            f"{name}_bias": flat_dy.sum(0),
            "x": dy @ kernel.T,
        }

    return x @ kernel + bias, pull


def projection(
    a: Arrays,
    x: np.ndarray,
    read: str,
    *,
    heads: int,
    share_input: bool,
    sum_heads: bool,
    inner: Any,
    keep: np.ndarray | None = None,
    scale: float | None = None,
) -> Defined:
    """Heads of scored tables between two projections, or without one; `inner`: the dtype of scores."""
    steps: list[Pull] = []
    z = wide(x)
    if "compress_kernel" in a:
        z, pull_first = dense(a, z, "compress")
        steps.append(pull_first)
    n_inputs = 1 if share_input else heads
    z = z.reshape(*z.shape[:-1], n_inputs, z.shape[-1] // n_inputs).astype(inner)
    y, pull_reads = scored(a, z, read, groups=heads, sum_groups=sum_heads, keep=keep, scale=scale)
    of_heads = y.shape
    y = _last_joined(y, 2)
    pull_last = None
    if "decompress_kernel" in a:
        y, pull_last = dense(a, y, "decompress")

    def pull(dy: np.ndarray) -> Arrays:
        found: Arrays = {}
        last, lost = dy, {}
        if pull_last is not None:
            found = pull_last(dy)
            dy = found.pop("x")
        of = pull_reads(dy.reshape(of_heads))
        dz, lost = of.pop("x").reshape(*x.shape[:-1], math.prod(z.shape[-2:])), of.pop(LOST, {})
        found |= of
        for step in steps:
            of = step(dz)
            dz = of.pop("x")
            found |= of
        return {**found, **_lost_around(a, x, last, lost), "x": dz}

    return y, pull


def _lost_around(a: Arrays, x: np.ndarray, dy: np.ndarray, lost: dict[str, float]) -> Arrays:
    """`LOST` of a layer by that of the reads between its projections, whose sums add it with the magnitudes of the other factors."""
    if not lost:
        return {}
    lost, of_y, of_z = dict(lost), lost.get("y", 0.0), lost.get("x", 0.0)
    if "decompress_kernel" in a:
        lost["y"] = of_y * np.abs(wide(a["decompress_kernel"])).sum(0).max()
        lost["decompress_kernel"] = of_y * np.abs(_last_of(dy)).sum(0).max(initial=0)
    if "compress_kernel" in a:
        lost["x"] = of_z * np.abs(wide(a["compress_kernel"])).sum(1).max()
        lost["compress_kernel"] = of_z * np.abs(_last_of(wide(x))).sum(0).max(initial=0)
        lost["compress_bias"] = of_z * math.prod(x.shape[:-1])
    return {LOST: lost}


def _last_of(a: np.ndarray) -> np.ndarray:
    """An array with one axis before the last."""
    return a.reshape(math.prod(a.shape[:-1]), a.shape[-1])


# ------------------------------------------------------------------------------------- attention
class Sight(NamedTuple):
    """Keys that queries see: options of a layer of attention, and what its call was given."""

    causal: bool = True
    window: int | None = None
    query_start: int = 0
    key_start: int = 0
    segments: Any = None
    key_segments: Any = None
    block_mask: Any = None
    block_sizes: Any = None

    def where(self, n_keys: int) -> D.Where:
        of_keys = self.segments if self.key_segments is None else self.key_segments
        if not self.causal:
            return D.Where(None, n_keys, 0, self.segments, of_keys, self.block_mask, self.block_sizes)
        starts = self.query_start, self.key_start
        return D.Where(self.window, *starts, self.segments, of_keys, self.block_mask, self.block_sizes)


def over_blocks(
    define: Callable[..., Defined], size: int, x: np.ndarray, keys: np.ndarray | None, sight: Sight
) -> Defined:
    """The sum over blocks of keys of attention to each, divided by the keys that count: `define` is that of other keys, of these and a sight."""
    of = x if keys is None else keys
    n, parts = of.shape[-2], []
    y: Any = 0.0
    of_keys = sight.segments if sight.key_segments is None else sight.key_segments
    for first in range(0, max(n, 1), size):
        own = slice(first, min(first + size, n))
        segments = None if of_keys is None else of_keys[..., own]
        seen = sight._replace(key_start=sight.key_start + first, key_segments=segments)
        value, pull = define(of[..., own, :], seen)
        place = (
            sight.query_start
            + np.arange(x.shape[-2])[:, None]
            - np.arange(own.start, own.stop)
            - sight.key_start
            - 1
        )
        counts = (place >= 0) & (place < (np.inf if sight.window is None else sight.window))
        if of_keys is not None:
            counts = counts & (sight.segments[..., :, None] == segments[..., None, :])
        share = 1 / np.maximum(counts.sum(-1, keepdims=True), 1)
        y = y + value * share
        parts.append((own, pull, share))

    def pull_all(dy: np.ndarray) -> Arrays:
        total: Any = None
        of_all = np.zeros(of.shape)
        for own, pull, share in parts:
            found = pull(wide(dy) * share)
            of_all[..., own, :] = found.pop("keys")
            total = found if total is None else jax.tree.map(np.add, total, found)
        return {**total, "x": total["x"] + of_all} if keys is None else {**total, "keys": of_all}

    return y, pull_all


def _of_distances(positions: Any, sight: Sight, n_keys: int) -> Any:
    """The position parameters that are used; where all keys are seen they begin with the last key."""
    if positions is None or sight.causal:
        return positions
    return positions[len(positions) // 2 + 1 - n_keys :]


def attention(
    a: Arrays,
    x: np.ndarray,
    keys: np.ndarray | None,
    n_outputs: int,
    sight: Sight,
    *,
    epsilon: float = 0.0,
    scale: float | None = None,
) -> Defined:
    """Sum of a row for each pair of positions, of a detection of each; `keys` are other inputs."""
    n_keys = (x if keys is None else keys).shape[-2]
    where, positions = sight.where(n_keys), _of_distances(a.get("positions"), sight, n_keys)
    query = D.detect(x, a["anchors"], epsilon)
    key = query if keys is None else D.detect(keys, a["anchors"], epsilon)
    position = None if positions is None else D.detect_signs(positions)
    table = D.spread(a["weights"], a.get("targets"), n_outputs)

    def pull(dy: np.ndarray) -> Arrays:
        of = D.lookup_attention_vjp(table, query, key, position, dy, where, scale)
        found = {"weights": D.spread_vjp(of["weights"], a.get("targets"), a["weights"].shape)}
        if keys is None:
            found["x"] = D.detect_vjp(x, a["anchors"], D.added(of["query"], of["key"]), scale)
        else:
            found["x"] = D.detect_vjp(x, a["anchors"], of["query"], scale)
            found["keys"] = D.detect_vjp(keys, a["anchors"], of["key"], scale)
        if positions is not None:
            found["positions"] = _within(a, D.detect_signs_vjp(positions, of["position"]))
        return values_of(found)

    return value_of(D.lookup_attention(table, query, key, position, where, scale)), pull


def _within(a: Arrays, cotangent: D.Sum) -> D.Sum:
    """A cotangent of the last position parameters as one of all."""
    n = len(a["positions"]) - len(cotangent.value)
    return cotangent.map(lambda c: np.concatenate([np.zeros((n, *c.shape[1:])), c]))


def pair_attention(
    a: Arrays,
    x: np.ndarray,
    keys: np.ndarray | None,
    n_outputs: int,
    sight: Sight,
    *,
    interleave: bool = False,
    epsilon: float = 0.0,
    scale: float | None = None,
) -> Defined:
    """Sum of a row for each pair of positions, of a detection of both together."""
    of_keys = x if keys is None else keys
    where = sight.where(of_keys.shape[-2])
    positions = _of_distances(a.get("positions"), sight, of_keys.shape[-2])
    table = D.spread(a["weights"], a.get("targets"), n_outputs)
    given, options = (a["anchors"], positions), {"interleave": interleave, "epsilon": epsilon}

    def pull(dy: np.ndarray) -> Arrays:
        of = D.lut_pair_attention_vjp(x, of_keys, table, *given, dy, where, **options, accumulate=scale)
        found = {"weights": D.spread_vjp(of["weights"], a.get("targets"), a["weights"].shape)}
        if keys is None:
            found["x"] = D.added(of["x"], of["keys"])
        else:
            found |= {"x": of["x"], "keys": of["keys"]}
        if positions is not None:
            found["positions"] = _within(a, of["positions"])
        return values_of(found)

    y = D.lut_pair_attention(x, of_keys, table, *given, where, **options, accumulate=scale)
    return value_of(y), pull


# ------------------------------------------------------------------------------------- tables over images
def kept(key: np.ndarray, share: float, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Factors of tables of which a share is dropped: 0, or 1 over the share that is kept."""
    drawn = np.asarray(jax.random.bernoulli(key, 1 - share, shape))
    return drawn.astype(dtype) / np.asarray(1 - share, dtype)


def spatial(
    a: Arrays,
    x: np.ndarray,
    n_outputs: int,
    read: str | None,
    *,
    rank: int,
    keep: np.ndarray | None = None,
    epsilon: float = 0.0,
    scale: float | None = None,
) -> Defined:
    """Groups of detectors that read a vector, images ``[..., *rank]`` in a row, and add to their targets ``[G, 1, K]``."""
    flat, targets = _last_joined(x, rank), a["targets"]
    groups = len(targets)
    if read is None:
        of_tables = np.repeat(targets, len(a["weights"]) // groups, 0)
        y, pull_flat = sparse_lut({**a, "targets": of_tables}, flat, n_outputs, epsilon=epsilon, scale=scale)
    else:
        of_groups, pull_reads = scored(a, flat[..., None, :], read, groups=groups, keep=keep, scale=scale)
        target, used = D.slots_of(targets[:, 0], targets[:, 0].shape, n_outputs)
        y = np.zeros((*of_groups.shape[:-2], n_outputs))
        np.add.at(y, (..., target), np.where(used, of_groups, 0))

        def pull_flat(dy: np.ndarray) -> Arrays:
            of = pull_reads(np.where(used, dy[..., target], 0))
            if LOST in of:  # several groups may add to one output
                of[LOST] = {**of[LOST], "y": of[LOST].get("y", 0.0) * groups}
            return of

    def pull(dy: np.ndarray) -> Arrays:
        of = pull_flat(dy.reshape(y.shape))
        return {**of, "x": of["x"].reshape(x.shape)}

    return y, pull


def windows(
    a: Arrays,
    x: np.ndarray,
    groups: int,
    read: str | None,
    *,
    rank: int,
    keep: np.ndarray | None = None,
    epsilon: float = 0.0,
    scale: float | None = None,
) -> Defined:
    """Groups of detectors, one for each place of a window, that compare values of the whole image: ``[..., places, outputs]``."""
    shared = _last_joined(x, rank)[..., None, :]
    if read is None:
        given, how = (shared, a["weights"], a["anchors"]), (epsilon, scale, groups)
        y = value_of(D.lut(*given, *how))

        def pull_shared(dy: np.ndarray) -> Arrays:
            return values_of(D.lut_vjp(*given, dy, *how))
    else:
        y, pull_shared = scored(a, shared, read, groups=groups, keep=keep, scale=scale)

    def pull(dy: np.ndarray) -> Arrays:
        of = pull_shared(dy.reshape(y.shape))
        return {**of, "x": of["x"].reshape(x.shape)}

    return y, pull


def convolution(
    a: Arrays,
    x: np.ndarray,
    read: str | None,
    block: tuple[int, int],
    *,
    windows: Any,
    groups: int,
    keep: np.ndarray | None = None,
    epsilon: float = 0.0,
    scale: float | None = None,
) -> Defined:
    """Tables that are the same at all places of a window, and the average of the outputs of each block of places."""
    images = (
        x.reshape(*x.shape[: x.ndim - 3], *windows.image) if x.shape[-3:] == windows.image else x[..., None]
    )
    options: dict[str, Any] = {"windows": windows, "groups": groups}
    scalars = exponentials(a)
    options["accumulate"] = scale
    if read is None:
        options |= {"epsilon": epsilon}
    else:
        name, how = READS[read]
        options |= {"read": name, "scalars": scalars, "n_ways": getattr(how, "ways", 2), "keep": keep}
    given = images, tables(a), a["anchors"]
    total = D.conv_lut(*given, **options)
    at_places = value_of(total)
    (high, across), lead = block, at_places.shape[:-3]
    rows, columns, n_outputs = at_places.shape[-3] // high, at_places.shape[-2] // across, at_places.shape[-1]
    whole = at_places[..., : rows * high, : columns * across, :]
    y = whole.reshape(*lead, rows, high, columns, across, n_outputs).mean((-4, -2))

    def pull(dy: np.ndarray) -> Arrays:
        each = np.repeat(np.repeat(dy.reshape(y.shape), high, -3), across, -2) / (high * across)
        of_places = np.zeros(at_places.shape)
        of_places[..., : rows * high, : columns * across, :] = each
        of = D.conv_lut_vjp(*given, of_places, **options)
        of.pop("keep", None)
        names = {"images": "x", **{short: f"log_{short}" for short in scalars}}
        found = values_of(of, names)
        lost = {} if read is None else lost_of(total, of, names)
        return {**found, **lost, "x": found["x"].reshape(x.shape)}

    return y, pull


# ------------------------------------------------------------------------------------- tables of gates
class Training(NamedTuple):
    """Relaxation of gates, and the key of a call."""

    estimator: str = "soft"
    temperature: float = 1.0
    deterministic: bool = False
    key: Any = None

    def noisy(self, values: np.ndarray, key: Any, noise: Callable[..., Any]) -> np.ndarray:
        """Numbers with noise, if the estimator has some, over the temperature; in their own dtype."""
        if self.estimator == "gumbel":
            values = values + np.asarray(noise(key, values.shape, values.dtype))
        return values / np.asarray(self.temperature, values.dtype)

    @property
    def keys(self) -> Any:
        """Keys of the noise of tables and of scores."""
        return (None, None) if self.key is None else np.asarray(jax.random.split(self.key))


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-wide(x)))


def gates(logits: np.ndarray, how: Training, key: Any) -> Defined:
    """Coefficients ``[4, G]`` of mixtures of gates, or of those of the largest logits; ``"straight_through"``: with the others' gradient."""
    hard = how.deterministic or how.estimator == "straight_through"
    relaxed = how._replace(estimator="soft") if hard else how
    mixed = relaxed.noisy(logits, key, jax.random.gumbel)

    def pull(dc: np.ndarray) -> Arrays:
        of = D.gate_coefficients_vjp(mixed, D.exactly(dc), how.deterministic).value
        return {"logits": of / how.temperature}

    return D.gate_coefficients(logits if hard else mixed, hard).value, pull


def clipped(values: np.ndarray) -> Defined:
    """Values within [-1, 1]; at the ends only a cotangent that leads back passes."""

    def pull(d: np.ndarray) -> Arrays:
        outward = np.where(d < 0, values >= 1, values <= -1)
        return {"table": np.where(outward, 0, d)}

    return np.clip(values, -1, 1), pull


def corners(table: np.ndarray, parameterization: str, how: Training, key: Any) -> Defined:
    """Values of the slots of tables: sigmoids of logits, of their Walsh coefficients, or clipped numbers; hard ones are bits."""
    hard = how.deterministic or how.estimator == "straight_through"
    if parameterization == "raw":
        values, pull_clip = clipped(table)
        soft, pull_soft = (wide(values) + 1) / 2, lambda d: pull_clip(d / 2)
    else:
        ids = np.arange(table.shape[1])
        walsh = -np.where(np.bitwise_count(ids[:, None] & ids) % 2, -1.0, 1.0)
        values = (wide(table) @ walsh).astype(table.dtype) if parameterization == "walsh" else table
        relaxed = how._replace(estimator="soft") if hard else how
        soft = sigmoid(relaxed.noisy(values, key, jax.random.logistic))

        def pull_soft(d: np.ndarray) -> Arrays:
            of_logits = d * soft * (1 - soft) / how.temperature
            return {"table": of_logits @ walsh.T if parameterization == "walsh" else of_logits}

    def pull(d: np.ndarray) -> Arrays:
        return {"table": np.zeros(table.shape)} if how.deterministic else pull_soft(d)

    return np.where(values > 0, 1.0, 0.0) if hard else soft, pull


def slots(table: np.ndarray, how: Training) -> Defined:
    """Values that signs address, within [-1, 1]; hard ones are bits."""
    values, pull = clipped(table)
    if how.deterministic:
        return np.where(table > 0, 1.0, 0.0), lambda d: {"table": np.zeros(table.shape)}
    return wide(values), pull


# ------------------------------------------------------------------------------------- wires
GATES: dict[str, tuple[Callable[..., D.Sum], Callable[..., dict[str, D.Sum]], str]] = {
    "LogicGates": (D.bilinear_gates, D.bilinear_gates_vjp, "coefficients"),
    "SoftLUT": (D.soft_lut, D.soft_lut_vjp, "table"),
    "BinaryLUT": (D.binary_lut, D.binary_lut_vjp, "table"),
}


def of_tables(layer: str, a: Arrays, how: Training, key: Any, parameterization: str = "light") -> Defined:
    """Tables of a layer as its op takes them."""
    if layer == "LogicGates":
        return gates(a["logits"], how, key)
    return slots(a["table"], how) if layer == "BinaryLUT" else corners(a["table"], parameterization, how, key)


def wired(
    layer: str, a: Arrays, x: np.ndarray, wiring: str, how: Training, parameterization: str = "light"
) -> Defined:
    """A layer of gates or tables over a vector, ``[..., I]`` to ``[..., G]``."""
    table_key, scores_key = how.keys
    made, pull_tables = of_tables(layer, a, how, table_key, parameterization)
    forward, backward, name = GATES[layer]
    flat = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    bits = layer == "BinaryLUT" and not how.deterministic and how.estimator == "straight_through"
    if wiring == "learnable" and not how.deterministic:
        read, pull_read, wires = mixed_candidates(a, flat, _of_scores(layer, how), scores_key)
    else:
        read, pull_read, wires = chosen_wires(a, flat, wiring, how, scores_key)
    y = wide(forward(read, made, wires).value)

    def pull(dy: np.ndarray) -> Arrays:
        dy = dy.reshape(y.shape)
        of = backward(read, made, wires, dy)
        found = pull_read(of["x"].value, lambda: _slopes(layer, made, read, wires, dy))
        return {**pull_tables(of[name].value), **found, "x": found["x"].reshape(x.shape)}

    return (np.where(y > 0, 1.0, 0.0) if bits else y).reshape(*x.shape[:-1], y.shape[-1]), pull


def recurrent(a: Arrays, x: np.ndarray, state: np.ndarray, wiring: str, how: Training) -> Defined:
    """A recurrent layer of gates, ``[..., L, I]`` to ``[..., L, G]``: each step reads its inputs and the state, the outputs of the step before it."""
    states, pulls = [], []
    for t in range(x.shape[-2]):
        state, pull_step = wired("LogicGates", a, np.concatenate([x[..., t, :], state], -1), wiring, how)
        states.append(state)
        pulls.append(pull_step)

    def pull(dy: np.ndarray) -> Arrays:
        of_state, of_x, total = 0.0, [], None
        for t in reversed(range(len(pulls))):
            found = pulls[t](wide(dy[..., t, :]) + of_state)
            read = found.pop("x")
            of_x.insert(0, read[..., : x.shape[-1]])
            of_state = read[..., x.shape[-1] :]
            total = found if total is None else jax.tree.map(np.add, total, found)
        return {**(total or {}), "x": np.stack(of_x, -2), "state": of_state}

    return np.stack(states, -2), pull


def _of_scores(layer: str, how: Training) -> Training:
    return how._replace(estimator="straight_through") if layer == "BinaryLUT" else how


def _slopes(layer: str, made: np.ndarray, x: np.ndarray, wires: np.ndarray, dy: np.ndarray) -> np.ndarray:
    """Cotangents of each input of each gate, ``[B, G, n]``."""
    inputs = D.read(x, wires)
    own = np.arange(wires.size).reshape(wires.shape)
    _, backward, _ = GATES[layer]
    return backward(inputs.reshape(len(x), wires.size), made, own, dy)["x"].value.reshape(inputs.shape)


def chosen_wires(
    a: Arrays, x: np.ndarray, wiring: str, how: Training, key: Any
) -> tuple[np.ndarray, Callable[..., Arrays], np.ndarray]:
    """Inputs, their pullback, and the wires: fixed ones, or those with the highest scores.

    All candidates get a gradient from the slopes of the inputs of gates: to read candidate j instead of the chosen wire changes the
    loss by the sum over samples of ``slope * (x[j] - x[chosen])``; of candidates, each is judged by a part of the samples.
    """
    if wiring not in ("top-k", "full", "learnable"):
        return x, lambda dx, slopes: {"x": dx}, a["wires"]
    scores = a["scores"]
    if not how.deterministic:  # noise comes after the division
        scores = scores / np.asarray(how.temperature, scores.dtype)
        if how.estimator == "gumbel":
            scores = scores + np.asarray(jax.random.gumbel(key, scores.shape, scores.dtype))
    best = np.argmax(scores, -1)
    candidates = None if wiring == "full" else a["wires"]
    wires = best if candidates is None else np.take_along_axis(candidates, best[..., None], -1)[..., 0]

    def pull(dx: np.ndarray, slopes: Callable[[], np.ndarray]) -> Arrays:
        if how.deterministic:
            return {"x": dx, "scores": np.zeros(scores.shape)}
        gains, sizes = _gains(wide(x), slopes(), wires, candidates, scores.shape[-1])
        return {"x": dx, **_of_shares(D.softmax(scores), gains, sizes, len(x), how)}

    return x, pull, wires


def _of_shares(
    shares: np.ndarray, of_shares: np.ndarray, sizes: np.ndarray, batch: int, how: Training
) -> Arrays:
    """The cotangent of scores by that of their softmax, of whose addends `sizes` are the magnitudes.

    Softmax takes the mean from it: where candidates are nearly the same all of it cancels. What is left has the roundings of the
    addends: of each product, of the sum over samples, and of the mean over candidates.
    """
    of = shares * (of_shares - (shares * of_shares).sum(-1, keepdims=True)) / how.temperature
    size = shares * (sizes + (shares * sizes).sum(-1, keepdims=True)) / how.temperature
    return {
        "scores": of,
        MAGNITUDES: {"scores": size.max(initial=0) * (batch + shares.shape[-1] + 4) / ALLOWED},
    }


MOST_JUDGES = 64


def _gains(
    x: np.ndarray, slopes: np.ndarray, wires: np.ndarray, candidates: Any, n: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return what the loss gains by each candidate for each input of each gate, ``[G, n, candidates]``, and the magnitudes of its addends."""
    batch = len(x)
    if candidates is None:
        return np.einsum("bgn,bi->gni", slopes, x), np.einsum("bgn,bi->gni", np.abs(slopes), np.abs(x))
    size, gains = min(batch // n, MOST_JUDGES), np.zeros((*wires.shape, n))
    sizes = np.zeros_like(gains)
    for j in range(n):
        part = slice(j * size, (j + 1) * size) if size else slice(None)
        other, own = D.read(x[part], candidates[..., j]), D.read(x[part], wires)
        each, times = slopes[part], batch / size if size else 1
        gains[..., j] = (each * (other - own)).sum(0) * times
        sizes[..., j] = (np.abs(each) * (np.abs(other) + np.abs(own))).sum(0) * times
    return gains, sizes


def mixed_candidates(
    a: Arrays, x: np.ndarray, how: Training, key: Any
) -> tuple[np.ndarray, Callable[..., Arrays], np.ndarray]:
    """Return for each input of each gate the mixture of its candidates by the softmax of their scores, or the one with the highest."""
    scores, candidates = a["scores"], a["wires"]
    hard = how.estimator == "straight_through"
    relaxed = (how._replace(estimator="soft") if hard else how).noisy(scores, key, jax.random.gumbel)
    shares = D.softmax(relaxed)
    used = np.eye(scores.shape[-1])[np.argmax(scores, -1)] if hard else shares
    read = D.read(x, candidates.reshape(math.prod(candidates.shape[:2]), candidates.shape[2]))  # [B, G n, k]
    each = used.reshape(read.shape[1:])

    def pull(dmixed: np.ndarray, slopes: Any) -> Arrays:
        addends = dmixed[..., None] * read
        of_shares, sizes = (a.sum(0).reshape(scores.shape) for a in (addends, np.abs(addends)))
        dx = D.write(x, candidates.reshape(read.shape[1:]), D.exactly(dmixed[..., None] * each)).value
        return {"x": dx, **_of_shares(shares, of_shares, sizes, len(x), how)}

    wires = np.arange(len(each)).reshape(candidates.shape[:2])
    return (read * each).sum(-1), pull, wires


# ------------------------------------------------------------------------------------- around gates
def group_sum(x: np.ndarray, k: int, tau: float) -> Defined:
    """Sums of groups of features that follow each other, over tau."""
    parts = wide(x).reshape(*x.shape[:-1], k, x.shape[-1] // k)
    return parts.sum(-1) / tau, lambda dy: {
        "x": np.broadcast_to(dy[..., None] / tau, parts.shape).reshape(x.shape)
    }


def thermometer(
    a: Arrays,
    x: np.ndarray,
    *,
    learnable: bool = False,
    gradient: str = "straight_through",
    temperature: float = 1.0,
    deterministic: bool = False,
) -> Defined:
    """Bits ``x > threshold``, those of a feature side by side; learnable ones are, or have the gradient of, a sigmoid."""
    thresholds = a["thresholds"]
    dtype = D.accumulator(x.dtype, thresholds.dtype)
    gap = x.astype(dtype)[..., None] - thresholds.astype(dtype)
    bits = np.where(gap > 0, 1.0, 0.0)
    width = (temperature * wide(a.get("widths", np.ones(len(thresholds)))))[:, None]
    soft = sigmoid(gap / width)
    soft_out = learnable and gradient == "soft" and not deterministic
    trained = learnable and (gradient == "straight_through" or not deterministic)

    def pull(dy: np.ndarray) -> Arrays:
        of_gap = dy.reshape(gap.shape) * soft * (1 - soft) / width if trained else np.zeros(gap.shape)
        return {"x": of_gap.sum(-1), "thresholds": -of_gap.sum(tuple(range(x.ndim - 1)))}

    return _last_joined(soft if soft_out else bits, 2), pull


# ------------------------------------------------------------------------------------- trees over images
class Geometry(NamedTuple):
    """Windows over an image, and groups of places: rows and columns."""

    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    pool: tuple[int, int] = (1, 1)
    pool_padding: tuple[int, int] = (0, 0)


def copied_windows(x: np.ndarray, g: Geometry) -> Defined:
    """The values of the window at each place, in the order row, column, channel: ``[B, H, W, F]`` to ``[B, rows, columns, values]``."""
    n_samples, height, width, n_channels = x.shape
    around = [(0, 0), *((p, p) for p in g.padding), (0, 0)]
    padded = np.pad(wide(x), around)
    starts = [
        range(0, n + 2 * p - k + 1, s)
        for n, p, k, s in zip((height, width), g.padding, g.kernel, g.stride, strict=True)
    ]
    shape = (n_samples, *map(len, starts), math.prod(g.kernel) * n_channels)
    places = [
        (np.s_[:, i, j], np.s_[:, r : r + g.kernel[0], c : c + g.kernel[1]])
        for (i, r), (j, c) in itertools.product(*map(enumerate, starts))
    ]
    found = np.zeros(shape)
    for place, window in places:
        found[place] = padded[window].reshape(n_samples, shape[-1])

    def pull(d: np.ndarray) -> Arrays:
        total = np.zeros(padded.shape)
        for place, window in places:
            total[window] += d[place].reshape(n_samples, *g.kernel, n_channels)
        (top, left) = g.padding
        return {"x": total[:, top : top + height, left : left + width]}

    return found, pull


def pooled(y: np.ndarray, g: Geometry, rounding: float) -> Defined:
    """The largest value of each group of places, the first of several: ``[B, rows, columns, K]``.

    Raises:
      Undecided: two values are different, but by less than rounding.
    """
    of_axes = [
        [[i for i in range(start, start + k) if 0 <= i < n] for start in range(-p, n + p - k + 1, k)]
        for n, k, p in zip(y.shape[1:3], g.pool, g.pool_padding, strict=True)
    ]
    found = np.zeros((len(y), *map(len, of_axes), y.shape[-1]))
    chosen = np.zeros((*found.shape, 2), int)
    for b, r, c, k in np.ndindex(found.shape):
        places = list(itertools.product(of_axes[0][r], of_axes[1][c]))
        best = places[0]
        for place in places[1:]:
            if y[b, *place, k] > y[b, *best, k] or np.isnan(y[b, *place, k]):
                best = place
        gaps = [abs(y[b, *place, k] - y[b, *best, k]) for place in places]
        if any(0 < gap < rounding for gap in gaps):
            raise Undecided
        found[b, r, c, k], chosen[b, r, c, k] = y[b, *best, k], best
    b, _, _, k = np.indices(found.shape)

    def pull(d: np.ndarray) -> Arrays:
        of_places = np.zeros(y.shape)
        np.add.at(of_places, (b, chosen[..., 0], chosen[..., 1], k), d)
        return {"x": of_places}

    return found, pull


def trees(
    a: Arrays, x: np.ndarray, parameterization: str, g: Geometry, n_kernels: int, how: Training
) -> Defined:
    """Trees of gates or tables over images ``[..., H, W, F]``, and the largest of each group of places."""
    layer = "LogicGates" if parameterization == "gates" else "SoftLUT"
    made, pull_tables = of_tables(layer, a, how, how.key, parameterization)
    forward, backward, name = GATES[layer]
    axis = 1 if layer == "LogicGates" else 0
    flat = x.reshape(math.prod(x.shape[:-3]), *x.shape[-3:])
    inputs, pull_windows = copied_windows(flat, g)
    wires, first, levels = a["wires"], 0, []
    arity = wires.shape[1]
    while True:
        own = np.take(made, np.arange(first, first + len(wires)), axis)
        outputs = forward(inputs, own, wires).value
        levels.append((inputs, own, wires))
        first += len(wires)
        if len(wires) == n_kernels:
            break
        inputs, wires = outputs, np.arange(len(wires)).reshape(len(wires) // arity, arity)
    y, pull_pool = pooled(outputs, g, 64 * float(ml_dtypes.finfo(x.dtype).eps))

    def pull(dy: np.ndarray) -> Arrays:
        d, of_levels = pull_pool(dy.reshape(y.shape))["x"], []
        for inputs, own, wires in reversed(levels):
            of = backward(inputs, own, wires, d)
            d = of["x"].value
            of_levels.append(of[name].value)
        found = pull_tables(np.concatenate(of_levels[::-1], axis))
        return {**found, "x": pull_windows(d)["x"].reshape(x.shape)}

    return y.reshape(*x.shape[:-3], *y.shape[1:]), pull


def channels_joined(x: np.ndarray) -> Defined:
    """Images ``[..., H, W, F]`` as vectors, channel by channel."""
    y = np.moveaxis(x, -1, -3)
    shape = y.shape
    return _last_joined(y, 3), lambda dy: {"x": np.moveaxis(dy.reshape(shape), -3, -1)}


def with_edges(x: np.ndarray) -> Defined:
    """Images ``[..., H, W, F]`` followed by differences of neighbors, each of all channels; beyond the border a pixel is that at it."""
    height, width = x.shape[-3:-1]
    rows, columns = np.arange(height), np.arange(width)
    ends = [  # pixels and their factors
        ((rows, np.minimum(columns + 1, width - 1)), (rows, np.maximum(columns - 1, 0))),
        ((np.minimum(rows + 1, height - 1), columns), (np.maximum(rows - 1, 0), columns)),
    ]
    maps = [[(after, 1), (before, -1)] for after, before in ends]
    maps += [[(after, 1), ((rows, columns), -2), (before, 1)] for after, before in ends]
    maps = [[((rows, columns), 1)], *maps]

    def at(pixels: Any) -> Any:
        return (..., *np.ix_(*pixels), slice(None))

    found = [sum(f * wide(x)[at(pixels)] for pixels, f in one) for one in maps]

    def pull(d: np.ndarray) -> Arrays:
        total = np.zeros(x.shape)
        for one, of in zip(maps, np.split(d, len(maps), -1), strict=True):
            for pixels, f in one:
                np.add.at(total, at(pixels), f * of)
        return {"x": total}

    return np.concatenate(found, -1), pull


# ------------------------------------------------------------------------------------- layers one after another
def chained(*steps: tuple[str, Callable[[np.ndarray], Defined]]) -> Callable[[np.ndarray], Defined]:
    """Layers that follow one another; the names of the variables of each begin with its own."""

    def define(x: np.ndarray) -> Defined:
        pulls = []
        for name, step in steps:
            x, pull = step(x)
            pulls.append((name, pull))

        def pull_all(dy: np.ndarray) -> Arrays:
            found: Arrays = {}
            sizes: dict[str, Any] = {}
            for name, pull in reversed(pulls):
                of = pull(dy)
                dy = of.pop("x")
                sizes |= {f"{name}/{n}": c for n, c in of.pop(MAGNITUDES, {}).items()}
                found |= {f"{name}/{n}": c for n, c in of.items()}
            return {**found, MAGNITUDES: sizes, "x": dy}

        return x, pull_all

    return define
