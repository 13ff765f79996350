"""Section 6: attention."""

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np

from coverage_rows._row import Section, bits, normal

# A softmax in float32 rounds exponents, exponentials, their sum and the quotient; a gradient has two probabilities in a
# product, and a difference in which digits cancel.
SINGLE = 16 * float(np.finfo(np.float32).eps)

SECTION = Section(
    "Attention Kernels",
    "`q` is (batch, queries, heads, features), `k` and `v` (batch, keys, heads, features).",
    "`jax.nn.dot_product_attention` computes its softmax in float32 for any argument dtype, so its rows are compared to "
    f"float32 rounding: {SINGLE:.0e}.",
)


ROUNDED = {"value_tolerance": SINGLE, "gradient_tolerance": SINGLE}
QKV = {"q": normal(2, 4, 2, 3), "k": normal(2, 4, 2, 3), "v": normal(2, 4, 2, 3)}
GROUPS = {"q": normal(2, 4, 4, 3), "k": normal(2, 4, 2, 3), "v": normal(2, 4, 2, 3)}
CROSS = {"q": normal(2, 3, 2, 3), "k": normal(2, 5, 2, 3), "v": normal(2, 5, 2, 3)}


def probabilities(q, k, seen=None):
    """Return the probabilities of the keys for every query; heads of queries share those of keys in groups."""
    k = np.repeat(k, q.shape[2] // k.shape[2], 2)
    scores = np.exp(np.einsum("btnh,bsnh->bnts", q, k) / np.sqrt(q.shape[-1]))
    scores = scores if seen is None else scores * seen
    return scores / scores.sum(-1, keepdims=True)


def attention(q, k, v, seen=None):
    v = np.repeat(v, q.shape[2] // v.shape[2], 2)
    return np.einsum("bnts,bsnh->btnh", probabilities(q, k, seen), v)


def causal(q, k, v):
    return attention(q, k, v, np.tril(np.ones((q.shape[1], k.shape[1]))))


def formula(q, k, v, dy, seen=None):
    """The backward pass as in the paper on FlashAttention, on whole matrices."""
    groups = q.shape[2] // k.shape[2]
    p, keys, values = probabilities(q, k, seen), np.repeat(k, groups, 2), np.repeat(v, groups, 2)
    dp = np.einsum("btnh,bsnh->bnts", dy, values)
    ds = p * (dp - np.sum(dp * p, -1, keepdims=True)) / np.sqrt(q.shape[-1])
    dk, dv = np.einsum("bnts,btnh->bsnh", ds, q), np.einsum("bnts,btnh->bsnh", p, dy)
    together = (*k.shape[:3], groups, k.shape[3])
    return np.einsum("bnts,bsnh->btnh", ds, keys), dk.reshape(together).sum(3), dv.reshape(together).sum(3)


def causal_formula(q, k, v, dy):
    return formula(q, k, v, dy, np.tril(np.ones((q.shape[1], k.shape[1]))))


@SECTION.forward(
    lambda q, k, v, mask: attention(q, k, v, mask | np.eye(4, dtype=bool)),
    **QKV,
    mask=bits(2, 2, 4, 4),
    **ROUNDED,
)
def scaled_dot_product_attention(q, k, v, mask):
    """Here each query sees its own key, so that none sees nothing."""
    return jax.nn.dot_product_attention(q, k, v, mask=mask | jnp.eye(4, dtype=bool))


@SECTION.forward(causal, **QKV, **ROUNDED)
def flash_attention_v2(q, k, v):
    """A few queries at a time, forward and backward, on any device: memory does not grow with queries times keys.
    `jax.nn.dot_product_attention` has `implementation="cudnn"` for GPUs, which this check does not run."""
    keys = jnp.arange(k.shape[1])[None, None, None]
    one = jax.checkpoint(lambda q, at: jax.nn.dot_product_attention(q[:, None], k, v, mask=keys <= at)[:, 0])
    queries = (jnp.moveaxis(q, 1, 0), jnp.arange(q.shape[1]))
    y = jax.lax.map(lambda query: one(*query), queries, batch_size=2)
    return jnp.moveaxis(y, 0, 1)


@SECTION.forward(attention, **GROUPS, **ROUNDED)
def grouped_query_attention(q, k, v):
    """`q` has more heads than `k` and `v`."""
    return jax.nn.dot_product_attention(q, k, v)


@SECTION.backward(flash_attention_v2, "q", "k", "v", formula=causal_formula, **ROUNDED)
def flash_attention_backward(q, k, v, dy):
    return jax.vjp(flash_attention_v2, q, k, v)[1](dy)


@SECTION.backward(grouped_query_attention, "q", "k", "v", formula=formula, **ROUNDED)
def grouped_query_attention_backward(q, k, v, dy):
    return jax.vjp(jax.nn.dot_product_attention, q, k, v)[1](dy)


@SECTION.backward(attention, "q", "k", "v", formula=formula, **CROSS, **ROUNDED)
def cross_attention_backward(q, k, v, dy):
    return jax.vjp(jax.nn.dot_product_attention, q, k, v)[1](dy)


HEADS = {
    "x": normal(2, 3, 4),
    "params": {
        **{name: {"kernel": normal(4, 2, 2)} for name in ("query", "key", "value")},
        "out": {"kernel": normal(2, 2, 4)},
    },
}


def project(x, parameters):
    return np.einsum("btc,cnh->btnh", x, parameters["kernel"])


def heads(x, params):
    inner = attention(*(project(x, params[name]) for name in ("query", "key", "value")))
    return np.einsum("btnh,nhc->btc", inner, params["out"]["kernel"])


def heads_formula(x, params, dy):
    q, k, v = (project(x, params[name]) for name in ("query", "key", "value"))
    grads = {"out": {"kernel": np.einsum("btnh,btc->nhc", attention(q, k, v), dy)}}
    dx = np.zeros_like(x)
    inner = formula(q, k, v, np.einsum("btc,nhc->btnh", dy, params["out"]["kernel"]))
    for name, cotangent in zip(("query", "key", "value"), inner, strict=True):
        dx += np.einsum("btnh,cnh->btc", cotangent, params[name]["kernel"])
        grads[name] = {"kernel": np.einsum("btc,btnh->cnh", x, cotangent)}
    return dx, grads


@SECTION.backward(heads, "x", "params", formula=heads_formula, **HEADS)
def multi_head_attention_backward(x, params, dy):
    """`params` has the projections `query`, `key`, `value` and `out`."""
    heads = flax.linen.MultiHeadAttention(num_heads=2, use_bias=False)
    return jax.vjp(lambda x, params: heads.apply({"params": params}, x), x, params)[1](dy)
