"""Every layer equals its op composition: outputs and gradients.

test_every_layer.py compares the libraries with these layers. A function here writes a layer with ops; their values are
checked in tests/core/test_definitions.py. JAX differentiates it.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import slow_except
from every_layer import CASES
from layer_libraries import Case, by_kind, inputs_of, variables_of

import lutjax
from lutjax import testing
from lutjax.reads import straight_through

Arrays = dict[str, Any]
KEY = np.array([0, 7], np.uint32)  # no array of a device: it is made when tests are collected


# ------------------------------------------------------------------------------------- tables over vectors
def lut(s: Any, a: Arrays, x: jax.Array) -> jax.Array:
    parts = x if s.groups is None else x.reshape(*x.shape[:-1], s.groups, -1)
    options = {"groups": s.groups, "epsilon": s.epsilon, "accumulate": s.accumulate}
    if "targets" not in a:
        y = lutjax.lut(parts, a["weights"], a["anchors"], **options)
    else:
        n_outputs = s.out_features // (s.groups or 1)
        y = lutjax.sparse_lut(parts, a["weights"], a["anchors"], a["targets"], n_outputs, **options)
    return y.reshape(*x.shape[:-1], s.out_features)


def attention(s: Any, a: Arrays, x: jax.Array, *, pairs: bool) -> jax.Array:
    """Attention to all keys, or the sum over key blocks: per block, the mean over a query's visible rows."""
    n, positions = x.shape[-2], a.get("positions")
    of_table = {
        "targets": a.get("targets"),
        "n_outputs": s.out_features if "targets" in a else None,
    }
    options = {**of_table, "window": s.window, "accumulate": s.accumulate, "causal": s.causal}
    if not s.causal and positions is not None:  # they begin with the last key
        positions = positions[len(positions) // 2 + 1 - n :]
    if pairs:
        options |= {"interleave": s.interleave, "epsilon": s.epsilon}
        attend = functools.partial(
            lutjax.lut_pair_attention, x, a["weights"], a["anchors"], positions, **options
        )
        attend_to = lambda at: attend(keys=x[..., at, :], key_start=at.start)  # noqa: E731
    else:
        d = lutjax.detect(x, a["anchors"], epsilon=s.epsilon)
        e = None if positions is None else lutjax.detect_signs(positions)

        def attend(key=d, **more):
            return lutjax.lookup_attention(a["weights"], d, key, e, **options, **more)

        attend_to = lambda at: attend(jax.tree.map(lambda v: v[..., at, :], d), key_start=at.start)  # noqa: E731
    if s.pool is None:
        return attend()
    total = 0.0
    for first in range(0, n, s.pool):
        at = slice(first, min(first + s.pool, n))
        counts = np.clip(np.arange(n) - first, 1, at.stop - at.start)
        total += attend_to(at) / counts[:, None].astype(np.float32)
    return jnp.asarray(total)


def scored(s: Any, a: Arrays, x: jax.Array, keep: Any, **options: Any) -> jax.Array:
    weights = (
        lutjax.QuantizedTables(a["weights"], a["exponents"]) if "exponents" in a else a["weights"]
    )
    scalars = {name: a[name] for name in s.read.initial()}
    return lutjax.scored_lut(
        x,
        weights,
        a["anchors"],
        scalars,
        read=s.read,
        keep=keep,
        accumulate=s.accumulate,
        **options,
    )


def kept(s: Any, shape: tuple[int, ...]) -> jax.Array | None:
    if not s.table_dropout or s.deterministic:
        return None
    return jax.random.bernoulli(KEY, 1 - s.table_dropout, shape) / (1 - s.table_dropout)


def projection(s: Any, a: Arrays, x: jax.Array) -> jax.Array:
    z = x @ a["compress_kernel"] + a["compress_bias"] if s.compress else x
    z = z.reshape(*z.shape[:-1], 1 if s.share_input else s.heads, -1)
    keep = kept(s, (*x.shape[:-1], s.heads * s.tables))
    y = scored(s, a, z, keep, groups=s.heads, sum_groups=s.sum_heads)
    y = y.reshape(*x.shape[:-1], -1)
    return y @ a["decompress_kernel"] + a["decompress_bias"] if s.decompress else y


# ------------------------------------------------------------------------------------- tables over images
def in_groups(s: Any, a: Arrays, x: jax.Array, groups: int, lead: tuple[int, ...]) -> jax.Array:
    shared = x.reshape(*lead, 1, -1)
    if s.read is not None:
        return scored(s, a, shared, kept(s, (*lead, len(a["weights"]))), groups=groups)
    options = {"epsilon": s.epsilon, "accumulate": s.accumulate}
    return lutjax.lut(shared, a["weights"], a["anchors"], groups=groups, **options)


def spatial(s: Any, a: Arrays, x: jax.Array) -> jax.Array:
    lead, targets = x.shape[: x.ndim - len(s.connectivity.in_shape)], a["targets"][:, 0]
    n_outputs = math.prod(s.connectivity.out_shape)
    of_groups = in_groups(s, a, x, len(targets), lead)
    y = (
        jnp.zeros((*lead, n_outputs + 1)).at[..., targets].add(of_groups)
    )  # the last one is no output
    return y[..., :-1].reshape(*lead, *s.connectivity.out_shape)


def windows(s: Any, a: Arrays, x: jax.Array) -> jax.Array:
    lead = x.shape[: x.ndim - len(s.in_shape)]
    n_places = len(a["weights"]) // s.n_detectors
    y = in_groups(s, a, x, n_places, lead)
    rows, columns = places(s)
    return y.reshape(*lead, rows, columns, s.out_features)


def pair(size: Any) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else tuple(size)


def places(s: Any) -> tuple[int, int]:
    sizes = zip(s.in_shape[:2], pair(s.kernel), pair(s.stride), pair(s.padding), strict=True)
    rows, columns = ((n + 2 * p - k) // step + 1 for n, k, step, p in sizes)
    return rows, columns


def convolution(s: Any, a: Arrays, x: jax.Array) -> jax.Array:
    lead = x.shape[: x.ndim - len(s.in_shape)]
    weights = (
        lutjax.QuantizedTables(a["weights"], a["exponents"]) if "exponents" in a else a["weights"]
    )
    of_read = {} if s.read is None else {"scalars": {name: a[name] for name in s.read.initial()}}
    if s.read is not None:
        of_read["keep"] = kept(s, (*lead, len(a["weights"])))
    y = lutjax.conv_lut(
        x.reshape(*lead, *s.in_shape[:2], -1), weights, a["anchors"], kernel=s.kernel, stride=s.stride, padding=s.padding,
        groups=s.groups, read=s.read, epsilon=s.epsilon, accumulate=s.accumulate, **of_read,
    )  # fmt: skip
    if s.pool is None:
        return y
    high, wide = y.shape[-3:-1] if s.pool == "all" else pair(s.pool)
    rows, columns = y.shape[-3] // high, y.shape[-2] // wide
    whole = y[..., : rows * high, : columns * wide, :]
    blocks = whole.reshape(*lead, rows, high, columns, wide, s.out_channels)
    return blocks.mean((-4, -2)).reshape(
        *lead, *((rows, columns) if s.pool != "all" else ()), s.out_channels
    )


# ------------------------------------------------------------------------------------- memories
def normalized(x: jax.Array, scale: jax.Array, eps: float = 1e-6) -> jax.Array:
    return x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + eps) * scale


def ngram_memory(s: Any, a: Arrays, x: jax.Array, *, tokens: np.ndarray) -> jax.Array:
    if s.layout is not None:
        return published_memory(s, a, x, tokens=tokens)
    n_tables, _, width = a["weights"].shape
    options = {"rows": s.rows, "orders": s.orders, "heads": s.heads, "seed": s.seed}
    index = lutjax.ngram_rows(tokens, **options)[..., None]
    options = {"groups": n_tables, "accumulate": s.accumulate}
    read = lutjax.weighted_lookup(a["weights"], index, jnp.ones(index.shape), **options)
    read = read.reshape(*x.shape[:-1], n_tables * width)
    query, key = normalized(x, a["query_scale"]), normalized(read @ a["key_kernel"], a["key_scale"])
    gate = jax.nn.sigmoid((query * key).sum(-1, keepdims=True) / math.sqrt(x.shape[-1]))
    y = gate * (read @ a["value_kernel"])
    if not s.kernel:
        return y
    step, normed, length = max(s.orders), normalized(y, a["conv_scale"]), x.shape[-2]
    total = 0.0
    for i in range(s.kernel):  # the last element of the kernel is that of the token itself
        earlier = jnp.pad(normed, ((0, 0), (i * step, 0), (0, 0)))[:, :length]
        total += earlier * a["conv_kernel"][s.kernel - 1 - i]
    return y + jax.nn.silu(jnp.asarray(total))


def published_memory(s: Any, a: Arrays, x: jax.Array, *, tokens: np.ndarray) -> jax.Array:
    """A memory with streams, the root of the score, and a Qwen layout."""
    rows = published_rows(s, a, tokens)
    key = normalized((rows @ a["key_kernel"]).reshape(x.shape), a["key_scale"], s.eps)
    score = (normalized(x, a["query_scale"], s.eps) * key).sum(-1, keepdims=True) / math.sqrt(
        x.shape[-1]
    )
    gate = jax.nn.sigmoid(jnp.sign(score) * jnp.sqrt(jnp.maximum(jnp.abs(score), 1e-6)))
    y = gate * (rows @ a["value_kernel"])[..., None, :]
    normed, length, total = normalized(y, a["conv_scale"], s.eps), x.shape[-3], 0.0
    for i in range(s.kernel):
        earlier = jnp.pad(normed, ((0, 0), (i * 3, 0), (0, 0), (0, 0)))[:, :length]
        total += earlier * a["conv_kernel"][s.kernel - 1 - i]
    return y + jax.nn.silu(jnp.asarray(total))


def published_rows(s: Any, a: Arrays, tokens: np.ndarray) -> jax.Array:
    index = s.layout.rows(tokens)[..., None, None]
    read = lutjax.weighted_lookup(
        a["weights"], index, jnp.ones(index.shape), accumulate=s.accumulate
    )
    return read.reshape(*tokens.shape, -1)


def ngram_embedding(s: Any, a: Arrays, x: jax.Array, *, tokens: np.ndarray) -> jax.Array:
    projected = published_rows(s, a, tokens) @ a["kernel"].reshape(-1, x.shape[-1])
    return (x + projected) / (1 + s.layout.columns)


def best_keys(s: Any, a: Arrays, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the product-key ids with the largest scores, ``[batch, heads, k]``, and their shares."""
    heads, _, n_keys, size = a["half_keys"].shape
    plain = (x @ a["query_kernel"]).reshape(len(x), heads, 2, size)
    scores = jnp.einsum("bhsc,hsnc->bhsn", normalized(plain, a["query_scale"]), a["half_keys"])
    sums = scores[:, :, 0, :, None] + scores[:, :, 1, None, :]
    best, ids = jax.lax.top_k(sums.reshape(len(x), heads, n_keys**2), s.k)
    return ids, jax.nn.softmax(best, -1)


def product_key_memory(s: Any, a: Arrays, x: jax.Array) -> jax.Array:
    ids, share = best_keys(s, a, x)
    flat = (v.reshape(len(x), 1, -1) for v in (ids, share))
    return lutjax.weighted_lookup(a["weights"], *flat, accumulate=s.accumulate)


def product_key_experts(s: Any, a: Arrays, x: jax.Array) -> jax.Array:
    ids, share = best_keys(s, a, x)
    products = jnp.einsum("bhkf,bf->bhk", a["down"][0][ids], x)
    return jnp.einsum("bhk,bhko->bo", share * s.activation(products), a["up"][0][ids])


# ------------------------------------------------------------------------------------- gates
@jax.custom_vjp
def clip(values: jax.Array) -> jax.Array:
    """Values in [-1, 1]; at the ends only a cotangent leading back passes."""
    return jnp.clip(values, -1, 1)


def _clip_backward(values: jax.Array, d: jax.Array) -> tuple[jax.Array]:
    return (jnp.where(jnp.where(d < 0, values >= 1, values <= -1), 0, d),)


clip.defvjp(lambda values: (clip(values), values), _clip_backward)


def noisy(s: Any, values: jax.Array, key: Any, noise: Any) -> jax.Array:
    return (
        values + noise(key, values.shape) if s.estimator == "gumbel" else values
    ) / s.temperature


def tables_of(s: Any, a: Arrays, key: Any, arity: int) -> jax.Array:
    hard = s.deterministic or s.estimator == "straight_through"
    if "logits" in a:
        soft = lutjax.gate_coefficients(noisy(s, a["logits"], key, jax.random.gumbel))
        chosen = lutjax.gate_coefficients(a["logits"], hard=True)
        return chosen if s.deterministic else straight_through(chosen, soft) if hard else soft
    table = a["table"]
    if not hasattr(s, "parameterization"):  # signs address it
        return (table > 0).astype(table.dtype) if s.deterministic else clip(table)
    values = table
    if s.parameterization == "raw":
        soft = (clip(table) + 1) / 2
    else:
        ids = np.arange(2**arity)
        walsh = -((-1.0) ** np.bitwise_count(ids[:, None] & ids)).astype(np.float32)
        values = table @ walsh if s.parameterization == "walsh" else table
        soft = jax.nn.sigmoid(noisy(s, values, key, jax.random.logistic))
    bits = (values > 0).astype(table.dtype)
    return bits if s.deterministic else straight_through(bits, soft) if hard else soft


def read_inputs(s: Any, a: Arrays, x: jax.Array, key: Any, binary: bool) -> tuple[jax.Array, Any]:
    """Return gate inputs from ``x [batch, I]``, and their wires: fixed, selected by scores, or candidate mixtures."""
    if "scores" not in a:
        return x, a["wires"]
    scores, candidates = a["scores"], a.get("wires")
    n = scores.shape[-1]
    at = np.broadcast_to(np.arange(n), scores.shape) if candidates is None else candidates
    if s.wiring == "learnable" and not s.deterministic:
        shares = jax.nn.softmax(noisy(s, scores, key, jax.random.gumbel), -1)
        if s.estimator == "straight_through" or binary:
            shares = straight_through(jax.nn.one_hot(scores.argmax(-1), n), shares)
        mixed = (x[:, at] * shares).sum(-1).reshape(len(x), -1)
        return mixed, np.arange(mixed.shape[1]).reshape(scores.shape[:2])
    if not s.deterministic:
        scores = scores / s.temperature
        if s.estimator == "gumbel" and not binary:
            scores = scores + jax.random.gumbel(key, scores.shape)
    wires = jnp.take_along_axis(jnp.asarray(at), scores.argmax(-1)[..., None], -1)[..., 0]
    if s.deterministic:
        return x, wires
    # The score of a candidate gains what its input would add to the loss; a part of the samples judges each candidate.
    part = 0 if candidates is None else len(x) // n
    weight = np.ones((len(x), n), np.float32)
    if part:
        judged = np.equal.outer(np.arange(len(x)) // part, np.arange(n))
        weight = (judged * len(x) / part).astype(np.float32)
    change = jax.lax.stop_gradient(x[:, at] - x[:, wires][..., None]) * weight[:, None, None]
    gains = (change * jax.nn.softmax(scores, -1)).sum(-1)
    read = x[:, wires] + gains - jax.lax.stop_gradient(gains)
    return read.reshape(len(x), -1), np.arange(wires.size).reshape(wires.shape)


OP_OF = {
    "LogicGates": lutjax.bilinear_gates,
    "LogicRNN": lutjax.bilinear_gates,
    "SoftLUT": lutjax.soft_lut,
    "BinaryLUT": lutjax.binary_lut,
}


def gates(s: Any, a: Arrays, x: jax.Array, layer: str) -> jax.Array:
    if s.feature_axis == 0:
        return gates_last(s, a, jnp.moveaxis(x, 0, -1), layer).T
    return gates_last(s, a, x, layer)


def gates_last(s: Any, a: Arrays, x: jax.Array, layer: str) -> jax.Array:
    table_key, scores_key = jax.random.split(KEY)
    binary = layer == "BinaryLUT"
    read, wires = read_inputs(s, a, x, scores_key, binary)
    y = OP_OF[layer](
        read, tables_of(s, a, table_key, wires.shape[1]), wires, accumulate=s.accumulate
    )
    bits = binary and not s.deterministic and s.estimator == "straight_through"
    return straight_through((y > 0).astype(y.dtype), y) if bits else y


def recurrent(s: Any, a: Arrays, x: jax.Array) -> jax.Array:
    first = s.feature_axis == 0
    x = jnp.transpose(x, (2, 1, 0)) if first else x
    state, states = jnp.zeros((len(x), s.out_features)), []
    for t in range(x.shape[1]):
        state = gates_last(s, a, jnp.concatenate([x[:, t], state], -1), "LogicRNN")
        states.append(state)
    y = jnp.stack(states, 1)
    return jnp.transpose(y, (2, 1, 0)) if first else y


def trees(s: Any, a: Arrays, x: jax.Array) -> jax.Array:
    """Evaluate gates level by level at every window position, then the maximum in each position block."""
    first = s.feature_axis == 0
    x = jnp.moveaxis(x, (0, 1, 2), (-1, -3, -2)) if first else x
    around = [(0, 0), *((p, p) for p in pair(s.padding)), (0, 0)]
    padded, (high, wide) = jnp.pad(x, around), pair(s.kernel)
    rows, columns = (
        range(0, n - k + 1, step)
        for n, k, step in zip(padded.shape[1:3], pair(s.kernel), pair(s.stride), strict=True)
    )
    patches = [
        [padded[:, r : r + high, c : c + wide].reshape(len(x), -1) for c in columns] for r in rows
    ]
    values = jnp.stack([jnp.stack(row, 1) for row in patches], 1)
    wires, at, op = a["wires"], 0, lutjax.bilinear_gates if "logits" in a else lutjax.soft_lut
    made, arity = tables_of(s, a, KEY, wires.shape[1]), wires.shape[1]
    while True:
        own = slice(at, at + len(wires))
        values = op(values, made[:, own] if "logits" in a else made[own], wires)
        at += len(wires)
        if len(wires) == s.n_kernels:
            break
        wires = np.arange(len(wires)).reshape(-1, arity)
    y = largest(values, pair(s.pool), pair(s.pool_padding))
    return jnp.moveaxis(y, (-1, -3, -2), (0, 1, 2)) if first else y


def largest(y: jax.Array, pool: tuple[int, int], around: tuple[int, int]) -> jax.Array:
    """Return the maximum in each position block; its gradient goes to the first one."""
    padded = jnp.pad(y, [(0, 0), *((p, p) for p in around), (0, 0)], constant_values=-jnp.inf)
    rows, columns = (n // k for n, k in zip(padded.shape[1:3], pool, strict=True))
    each = [
        padded[:, r :: pool[0], c :: pool[1]][:, :rows, :columns]
        for r, c in itertools.product(*map(range, pool))
    ]
    stacked = jnp.stack(each)
    return jnp.take_along_axis(stacked, stacked.argmax(0)[None], 0)[0]


def group_sum(s: Any, a: Arrays, x: jax.Array) -> jax.Array:
    x = jnp.moveaxis(x, s.feature_axis, -1)
    y = x.reshape(*x.shape[:-1], s.k, -1)
    if s.accumulate is None:
        total = y.sum(-1)
    else:
        total = straight_through(
            jnp.trunc(y * s.accumulate.scale).sum(-1) / s.accumulate.scale, y.sum(-1)
        )
    return jnp.moveaxis(total / s.tau, -1, s.feature_axis)


def thermometer(s: Any, a: Arrays, x: jax.Array) -> jax.Array:
    x = jnp.moveaxis(x, s.feature_axis, -1)
    gap = x[..., None] - a["thresholds"]
    bits = (gap > 0).astype(x.dtype)
    if s.learnable:
        soft = jax.nn.sigmoid(
            gap / (s.temperature * jnp.asarray(a.get("widths", 1.0)).reshape(-1, 1))
        )
        if s.gradient == "straight_through":
            bits = straight_through(bits, soft)
        elif not s.deterministic:
            bits = soft
    y = bits.reshape(*x.shape[:-1], -1)
    return jnp.moveaxis(y, -1, s.feature_axis)


WITH_OPS: dict[str, Callable[..., jax.Array]] = {
    "LUT": lut,
    "SparseLUT": lut,
    "LUTAttention": functools.partial(attention, pairs=False),
    "LUTPairAttention": functools.partial(attention, pairs=True),
    "ProjectionLUT": projection,
    "SpatialLUT": spatial,
    "WindowLUT": windows,
    "ConvLUT": convolution,
    "NgramMemory": ngram_memory,
    "NgramEmbedding": ngram_embedding,
    "ProductKeyMemory": product_key_memory,
    "ProductKeyExperts": product_key_experts,
    **{
        layer: functools.partial(gates, layer=layer)
        for layer in ("LogicGates", "SoftLUT", "BinaryLUT")
    },
    "LogicRNN": recurrent,
    "LogicConv": trees,
    "GroupSum": group_sum,
    "Thermometer": thermometer,
}
FAST = (
    "LUT, groups", "SparseLUT, targets of tables", "LUTAttention, pooled", "LUTPairAttention, interleaved", "ProjectionLUT, confidence",
    "SpatialLUT, dropout", "WindowLUT", "ConvLUT, powers of two", "NgramMemory, given", "ProductKeyMemory, given", "ProductKeyExperts, sines",
    "LogicGates, top-k, gumbel", "LogicGates, learnable, straight_through", "SoftLUT, full, soft",
    "BinaryLUT, top-k, straight_through", "LogicRNN, top-k, soft", "LogicConv, wide", "LogicConv, raw, straight_through",
    "GroupSum, features first", "Thermometer, soft",
)  # fmt: skip


@pytest.mark.parametrize("name", slow_except(CASES, *FAST))
def test_layers_are_the_ops_that_they_call(name):
    case = CASES[name]
    spec, arrays, x = case.spec, variables_of(case), inputs_of(case)
    if case.layer == "ProductKeyExperts":  # its sums in fixed point are no op's
        spec = dataclasses.replace(spec, accumulate=None)
    elif getattr(spec, "accumulate", None) is not None:
        # Programs round a product near a half differently, as XLA fuses other multiply-adds: units
        # far below the tolerance.
        spec = dataclasses.replace(spec, accumulate=lutjax.FixedPoint(2.0**20))
    params = by_kind(case, arrays).get("params", {})
    options: Arrays = dict(case.call)
    of_spec = {**options, "key": KEY} if is_random(spec) else dict(options)
    if hasattr(spec, "deterministic"):
        of_spec["deterministic"] = spec.deterministic

    @jax.jit
    def results(params: Arrays, x: jax.Array) -> Any:
        every = (
            lambda p, x: spec({**arrays, **p}, x, **of_spec),
            lambda p, x: WITH_OPS[case.layer](spec, {**arrays, **p}, x, **options),
        )
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            if not has_gradient(case):
                return tuple({"y": f(params, x)} for f in every)
            y, pull = jax.vjp(every[0], params, x)
            dy = jax.random.normal(jax.random.key(3), y.shape, y.dtype)
            expected, expected_pull = jax.vjp(every[1], params, x)
            return {"y": y, "cotangents": pull(dy)}, {
                "y": expected,
                "cotangents": expected_pull(dy.astype(expected.dtype)),
            }

    actual, expected = results(params, x)
    for (path, a), e in zip(
        jax.tree.leaves_with_path(actual), jax.tree.leaves(expected), strict=True
    ):
        testing.assert_close(
            f"{name}: {jax.tree_util.keystr(path)}", a, np.asarray(e).astype(a.dtype), 2e-5
        )


def is_random(spec: Any) -> bool:
    return bool(getattr(spec, "random", False)) and not spec.deterministic


def test_every_layer_is_here():
    assert {case.layer for case in CASES.values()} == set(WITH_OPS)


def has_gradient(case: Case) -> bool:
    return not case.options.get("quantized")  # integer tables have none
