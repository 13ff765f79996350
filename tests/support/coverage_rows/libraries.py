"""Section 15: families of kernels that libraries of JAX have beside those of the list."""

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np

from coverage_rows._row import Section, bits, fixed, normal
from coverage_rows.attention import CROSS, QKV, ROUNDED, attention, formula
from coverage_rows.recurrent import SERIES, affine, affine_backward, over_time

SECTION = Section(
    "Kernels of JAX Libraries",
    "Arguments are named as in section 6, with one head axis. If JAX has no parameter for a variant, the row says so and shows code to compute it. "
    "Rows that call `jax.nn.dot_product_attention` are compared to float32 rounding, as in section 6.",
)

LENGTHS = {"lengths": fixed([3, 5])}


def softmax(scores):
    scores = np.exp(scores - scores.max(-1, keepdims=True))
    return scores / scores.sum(-1, keepdims=True)


def scores_of(q, k):
    return np.einsum("btnh,bsnh->bnts", q, k) / np.sqrt(q.shape[-1])


def weighed(p, v):
    return np.einsum("bnts,bsnh->btnh", p, v)


# ------------------------------------------------------------------------------------- bias and masks
@SECTION.forward(
    lambda q, k, v, bias: weighed(softmax(scores_of(q, k) + bias), v),
    **QKV,
    bias=normal(2, 2, 4, 4),
    **ROUNDED,
)
def attention_bias(q, k, v, bias):
    """`bias` is (batch, heads, queries, keys), or 1 in place of some; relative positions and ALiBi are such a bias."""
    return jax.nn.dot_product_attention(q, k, v, bias)


@SECTION.forward(
    lambda q, k, v, segments: attention(
        q, k, v, (segments[:, :, None] == segments[:, None, :])[:, None] & np.tril(np.ones((4, 4), bool))
    ),
    **QKV,
    segments=fixed([[0, 0, 1, 1], [0, 1, 1, 1]]),
    **ROUNDED,
)
def attention_segments(q, k, v, segments):
    """Packed texts; there is no parameter for segments, and a mask says the same."""
    same = segments[:, None, :, None] == segments[:, None, None, :]
    return jax.nn.dot_product_attention(q, k, v, mask=same, is_causal=True)


@SECTION.forward(
    lambda q, k, v, lengths: attention(q, k, v, (np.arange(5) < lengths[:, None])[:, None, None]),
    **CROSS,
    **LENGTHS,
    **ROUNDED,
)
def attention_lengths(q, k, v, lengths):
    """Texts of different lengths, padded behind."""
    return jax.nn.dot_product_attention(q, k, v, key_value_seq_lengths=lengths.astype(jnp.int32))


def near(left, right):
    place = np.arange(4)[:, None] - np.arange(4)
    return (place <= left) & (place >= -right)


@SECTION.forward(lambda q, k, v: attention(q, k, v, near(2, 1)), **QKV, **ROUNDED)
def local_window_attention(q, k, v):
    """Two keys before a query, its own and one after it."""
    return jax.nn.dot_product_attention(q, k, v, local_window_size=(2, 1))


@SECTION.backward(
    local_window_attention,
    "q",
    "k",
    "v",
    formula=lambda q, k, v, dy: formula(q, k, v, dy, near(2, 1)),
    **ROUNDED,
)
def local_window_attention_backward(q, k, v, dy):
    return jax.vjp(local_window_attention, q, k, v)[1](dy)


@SECTION.forward(
    lambda q, k, v, blocks: attention(q, k, v, np.kron(blocks | np.eye(2, dtype=bool), np.ones((2, 2)))),
    **QKV,
    blocks=bits(2, 2),
    **ROUNDED,
)
def block_sparse_attention(q, k, v, blocks):
    """`blocks` says which blocks of two queries and two keys count. On TPUs `jax.experimental.pallas.ops.tpu.splash_attention`
    passes over the others, which this check does not run; elsewhere there is no parameter for blocks, and all pairs are computed."""
    mask = (blocks | jnp.eye(2, dtype=bool)).repeat(2, axis=0).repeat(2, axis=1)
    return jax.nn.dot_product_attention(q, k, v, mask=mask[None, None])


# ------------------------------------------------------------------------------------- other scores
@SECTION.forward(lambda q, k, v: weighed(softmax(3 * np.tanh(scores_of(q, k) / 3)), v), **QKV)
def soft_cap_attention(q, k, v):
    """`jax.nn.dot_product_attention` has no parameter for a cap of its scores, here 3."""
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) / jnp.sqrt(q.shape[-1])
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(3 * jnp.tanh(scores / 3)), v)


def with_sinks(q, k, v, sinks):
    of_sinks = np.broadcast_to(sinks[None, :, None, None], (len(q), len(sinks), q.shape[1], 1))
    return weighed(softmax(np.concatenate([scores_of(q, k), of_sinks], -1))[..., :-1], v)


@SECTION.forward(with_sinks, **QKV, sinks=normal(2))
def attention_sinks(q, k, v, sinks):
    """`sinks` has a score for each head, which takes a share of the softmax and adds nothing: no parameter of
    `jax.nn.dot_product_attention`."""
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) / jnp.sqrt(q.shape[-1])
    top = jnp.maximum(scores.max(-1, keepdims=True), sinks[:, None, None])
    shares = jnp.exp(scores - top)
    total = shares.sum(-1, keepdims=True) + jnp.exp(sinks[:, None, None] - top)
    return jnp.einsum("bnts,bsnh->btnh", shares / total, v)


# ------------------------------------------------------------------------------------- caches
def paged(q, key_blocks, value_blocks, tables, lengths):
    y = np.zeros_like(q)
    for b, (table, length) in enumerate(zip(tables, lengths, strict=True)):
        k, v = (np.concatenate(list(blocks[table]))[:length] for blocks in (key_blocks, value_blocks))
        y[b] = attention(q[None, b : b + 1], k[None], v[None])[0, 0]
    return y


@SECTION.forward(
    paged,
    q=normal(2, 2, 3),
    key_blocks=normal(5, 2, 2, 3),
    value_blocks=normal(5, 2, 2, 3),
    tables=fixed([[4, 1, 0], [1, 3, 2]]),
    **LENGTHS,
    **ROUNDED,
)
def paged_attention(q, key_blocks, value_blocks, tables, lengths):
    """Attention of one query of each text, (batch, heads, features); blocks of two keys that texts may share, and `tables` of the blocks of each text.
    `jax.experimental.pallas.ops.tpu.paged_attention` reads the blocks in place on TPUs, which this check does not run."""
    k, v = (blocks[tables].reshape(len(q), -1, *blocks.shape[2:]) for blocks in (key_blocks, value_blocks))
    lengths = lengths.astype(jnp.int32)
    return jax.nn.dot_product_attention(q[:, None], k, v, key_value_seq_lengths=lengths)[:, 0]


# ------------------------------------------------------------------------------------- products of matrices
@SECTION.backward(
    lambda a, b: a @ b,
    "a",
    "b",
    formula=lambda a, b, dy: (dy @ b.T, a.T @ dy),
    a=normal(3, 4),
    b=normal(4, 2),
)
def matmul_backward(a, b, dy):
    return jax.vjp(jnp.matmul, a, b)[1](dy)


@SECTION.backward(
    lambda a, b: a @ b,
    "a",
    "b",
    formula=lambda a, b, dy: (dy @ b.mT, (a.mT @ dy).sum(0)),
    a=normal(2, 3, 4),
    b=normal(4, 2),
)
def batched_matmul_backward(a, b, dy):
    """`b` is the same for the whole batch."""
    return jax.vjp(jnp.matmul, a, b)[1](dy)


@SECTION.forward(
    lambda a, b: np.stack([[x @ y for x, y in zip(*of, strict=True)] for of in zip(a, b, strict=True)]),
    a=normal(2, 3, 2, 4),
    b=normal(2, 3, 4, 2),
)
def grouped_matmul(a, b):
    return jnp.matmul(a, b)


def in_groups(x, w, sizes):
    parts = np.split(x, np.cumsum(sizes)[:-1])
    return np.concatenate([part @ own for part, own in zip(parts, w, strict=True)])


def in_groups_formula(x, w, sizes, dy):
    at = np.cumsum(sizes)[:-1]
    parts, of = np.split(x, at), np.split(dy, at)
    dx = np.concatenate([d @ own.T for d, own in zip(of, w, strict=True)])
    return dx, np.stack([part.T @ d for part, d in zip(parts, of, strict=True)])


RAGGED = {"x": normal(6, 4), "w": normal(3, 4, 2), "sizes": fixed([2, 0, 4])}


@SECTION.forward(in_groups, **RAGGED)
def ragged_dot(x, w, sizes):
    """Rows of `x` in groups of these sizes, each times a matrix of its own: the experts of a mixture."""
    return jax.lax.ragged_dot(x, w, sizes.astype(jnp.int32))


@SECTION.backward(ragged_dot, "x", "w", formula=in_groups_formula)
def ragged_dot_backward(x, w, sizes, dy):
    return jax.vjp(lambda x, w: ragged_dot(x, w, sizes), x, w)[1](dy)


# ------------------------------------------------------------------------------------- sequences
CELL = {"i": {"kernel": normal(2, 3), "bias": normal(3)}, "h": {"kernel": normal(3, 3)}}


def rnn_states(params, x, h):
    step = lambda x, h: (np.tanh(affine(params["i"], x) + affine(params["h"], h)),)  # noqa: E731
    return [h for (h,) in over_time(step, x, h)]


def rnn(params, x, h):
    return np.stack(rnn_states(params, x, h)[1:], 1)


def rnn_formula(params, x, h, dy):
    """Elman's cell by the chain rule, backwards through time."""
    states = rnn_states(params, x, h)
    total, dx, dh = jax.tree.map(np.zeros_like, params), np.zeros_like(x), np.zeros_like(h)
    for t in reversed(range(x.shape[1])):
        inner = (dh + dy[:, t]) * (1 - states[t + 1] ** 2)
        of_input, dx[:, t] = affine_backward(params["i"], x[:, t], inner)
        of_state, dh = affine_backward(params["h"], states[t], inner)
        total = jax.tree.map(np.add, total, {"i": of_input, "h": of_state})
    return total, dx, dh


@SECTION.forward(rnn, params=CELL, h=normal(2, 3), **SERIES)
def rnn_forward(params, x, h):
    cell = flax.linen.RNN(flax.linen.SimpleCell(3))
    return cell.apply({"params": {"cell": params}}, x, initial_carry=h)


@SECTION.backward(rnn_forward, "params", "x", "h", formula=rnn_formula)
def rnn_backward(params, x, h, dy):
    return jax.vjp(rnn_forward, params, x, h)[1](dy)


def both_ways(params, x):
    zero = np.zeros((len(x), 3))
    back = rnn(params["backward_rnn"]["cell"], x[:, ::-1], zero)[:, ::-1]
    return np.concatenate([rnn(params["forward_rnn"]["cell"], x, zero), back], -1)


@SECTION.forward(both_ways, params={"forward_rnn": {"cell": CELL}, "backward_rnn": {"cell": CELL}}, **SERIES)
def bidirectional_rnn(params, x):
    """Outputs of both directions side by side. LSTM and GRU cells go the same way."""
    one, other = (flax.linen.RNN(flax.linen.SimpleCell(3, param_dtype=x.dtype)) for _ in range(2))
    return flax.linen.Bidirectional(one, other).apply({"params": params}, x)


def mean_of_kept(x, keep):
    return np.stack([of[k].sum(0) / max(k.sum(), 1) for of, k in zip(x, keep, strict=True)])


KEPT = {"x": normal(3, 4, 2), "keep": fixed([[True] * 4, [True, True, False, False], [False] * 4])}


@SECTION.forward(mean_of_kept, **KEPT)
def mean_pooling(x, keep):
    """Over the positions that a mask keeps; 0 where it keeps none, where `jnp.mean(..., where=)` would be NaN."""
    return x.sum(1, where=keep[:, :, None]) / jnp.maximum(keep.sum(1, keepdims=True), 1)


@SECTION.backward(
    mean_pooling,
    "x",
    formula=lambda x, keep, dy: (
        (keep / np.maximum(keep.sum(1, keepdims=True), 1))[:, :, None] * dy[:, None, :],
    ),
)
def mean_pooling_backward(x, keep, dy):
    return jax.vjp(lambda x: mean_pooling(x, keep), x)[1](dy)
