"""Layers for published n-gram memories: recorded outputs in all libraries, decoding, and histories in other layouts."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from layer_libraries import Case, function

from lutjax import NgramLayout, Vocabulary
from lutjax.layers.nnx import NgramEmbedding, NgramMemory

RECORDED = np.load(Path(__file__).parents[1] / "golden" / "memory_tables.npz")
DEEPSEEK = {
    "engram_layer_ids": [1, 3], "engram_max_ngram_size": 4, "engram_n_heads": 2, "engram_head_dim": 32, "engram_vocab_size": 41,
    "engram_compressed_vocab_size": 90, "engram_pad_token_id": 2, "hc_mult": 3, "hidden_size": 16, "rms_norm_eps": 1e-20,
}  # fmt: skip
QWEN = {
    "ple_layer_ids": [2, 3], "ngram_size": 3, "heads_per_ngram": 2, "ple_embed_dim": 32, "ngram_vocab_size_base": 100, "vocab_size": 150,
    "eos_token_id": 149, "hc_count": 2, "hidden_size": 12, "ple_conv_kernel_size": 4, "rms_norm_eps": 1e-6,
}  # fmt: skip
LONGCAT = {"vocab_size": 50, "ngram_vocab_size_ratio": 3, "emb_neighbor_num": 4, "emb_split_num": 2, "eos_token_id": 2, "hidden_size": 24}  # fmt: skip


def recorded(family):
    """A family's arrays, float32."""
    result = {
        n.removeprefix(f"{family}_"): a for n, a in RECORDED.items() if n.startswith(f"{family}_")
    }
    return {n: a.astype(np.float32) if a.dtype == np.float64 else a for n, a in result.items()}


def deepseek():
    a = recorded("deepseek")
    layout = NgramLayout.deepseek(DEEPSEEK, Vocabulary.identity(90))
    scale = 2.0 ** (a["scale"].astype(np.float32) - 127)
    weights = a["weight"].view(ml_dtypes.float8_e4m3fn).astype(np.float32) * scale
    keys, values = np.split(a["wkv"].T, [48], 1)
    variables = {"weights": weights[None], "key_kernel": keys, "value_kernel": values, "query_scale": a["q"], "key_scale": a["k"]}  # fmt: skip
    options = {"layout": layout, "streams": 3, "gate": "root", "kernel": 0, "eps": 1e-20}
    return "NgramMemory", (16,), options, variables, a, a["y"] - a["h"]


def qwen():
    a = recorded("ple")
    layout = NgramLayout.qwen(QWEN, 1)
    scale = np.float32(0.0078125)
    weights = (a["table"].view(ml_dtypes.float8_e4m3fn).astype(np.float32) * scale).astype(
        ml_dtypes.bfloat16
    )
    scales = {
        f"{name}_scale": 1 + a[f"norm_{name}"].reshape(2, 12) for name in ("key", "query", "conv")
    }
    conv = a["conv1d"][:, 0].T.reshape(4, 2, 12)
    variables = {"weights": weights.astype(np.float32)[None], "key_kernel": a["key_proj"].T, "value_kernel": a["value_proj"].T, "conv_kernel": conv, **scales}  # fmt: skip
    options = {"layout": layout, "streams": 2, "gate": "root"}
    return "NgramMemory", (12,), options, variables, a, a["y"]


def longcat():
    a = recorded("longcat")
    layout = NgramLayout.longcat(LONGCAT)
    variables = {"weights": a["tables"][None], "kernel": a["projections"].swapaxes(1, 2)}
    return "NgramEmbedding", (24, layout), {}, variables, {**a, "h": a["words"]}, a["y"]


FAMILIES = {"deepseek": deepseek, "qwen": qwen, "longcat": longcat}


def built(family):
    layer, sizes, options, variables, a, want = FAMILIES[family]()
    layout = options.get("layout", sizes[-1])
    rows = a["rows"] + (np.asarray(layout.offsets) if family == "longcat" else 0)
    np.testing.assert_array_equal(layout.rows(a["ids"]), rows)
    case = Case(layer, options, a["h"].shape, sizes, {"tokens": jnp.asarray(a["ids"], jnp.int32)})
    return case, variables, a, want


def nnx_layer(family):
    case, variables, a, want = built(family)
    layer = {"NgramMemory": NgramMemory, "NgramEmbedding": NgramEmbedding}[case.layer](
        *case.sizes, **case.options, rngs=nnx.Rngs(0)
    )
    for name, value in variables.items():
        setattr(layer, name, value)
    return layer, a, want


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "library",
    ["nnx", *(pytest.param(other, marks=pytest.mark.slow) for other in ("linen", "haiku"))],
)
def test_recorded_outputs(family, library):
    case, variables, a, want = built(family)
    assert {v.name: v.shape for v in case.built()[1]} == {
        n: np.shape(v) for n, v in variables.items()
    }
    arrays = {name: jnp.asarray(value) for name, value in variables.items()}
    y = jax.jit(functools.partial(function(library, case, arrays), arrays))(jnp.asarray(a["h"]))
    np.testing.assert_allclose(y, want, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_decoding_is_the_whole_text(family):
    layer, a, want = nnx_layer(family)
    x, tokens = jnp.asarray(a["h"])[None], jnp.asarray(a["ids"], jnp.int32)[None]
    call = jax.jit(lambda x, tokens, history: layer(x, tokens, history=history))
    history, actual = layer.history((1,)), []
    for first, last in ((0, 1), (1, 2), (2, len(want))):
        y, history = call(x[:, first:last], tokens[:, first:last], history)
        actual.append(y)
    np.testing.assert_allclose(jnp.concatenate(actual, 1)[0], want, rtol=2e-6, atol=2e-6)


def test_small_and_zero_vectors():
    """An eps far below other layers, and the gate at score 0."""
    call = nnx.jit(lambda layer, x, tokens: layer(x, tokens))
    layer, a, want = nnx_layer("deepseek")
    x, tokens = jnp.asarray(a["h"]), jnp.asarray(a["ids"], jnp.int32)
    np.testing.assert_allclose(call(layer, x * 1e-6, tokens), want, atol=2e-6, rtol=2e-6)
    rows = layer.weights[...][0][layer.row_ids(tokens)].reshape(len(tokens), -1)
    value = np.where(tokens >= 0, (rows @ layer.value_kernel[...]).T, 0).T[:, None]
    change = np.abs(call(layer, x * 0, tokens) - value / 2)
    assert (change >= 2e-4 * np.abs(value)).all()  # a root of at least 1e-3
    layer, a, _ = nnx_layer("qwen")
    layer.conv_kernel = jnp.zeros((4, 2, 12))
    x, tokens = jnp.asarray(a["h"]), jnp.asarray(a["ids"], jnp.int32)
    rows = layer.weights[...][0][layer.row_ids(tokens)].reshape(len(tokens), -1)
    value = jnp.broadcast_to((rows @ layer.value_kernel[...])[:, None], x.shape)
    np.testing.assert_allclose(call(layer, x * 0, tokens), value / 2, atol=2e-6, rtol=2e-6)


def test_segments_are_texts():
    layer, a, _ = nnx_layer("qwen")
    x, tokens = jnp.asarray(a["h"])[None], jnp.asarray(a["ids"], jnp.int32)[None]
    segments = jnp.asarray(np.arange(14) >= 7, jnp.int32)[None]

    @jax.jit
    def both(x, tokens, segments):
        whole, (one, other) = layer(x, tokens, segments=segments), (slice(7), slice(7, 14))
        first, history = layer(
            x[:, one], tokens[:, one], segments=segments[:, one], history=layer.history((1,))
        )
        second, _ = layer(
            x[:, other], tokens[:, other], segments=segments[:, other], history=history
        )
        return whole, jnp.concatenate([first, second], 1), layer(x[:, other], tokens[:, other])

    whole, parts, alone = both(x, tokens, segments)
    np.testing.assert_allclose(whole[:, 7:], alone, atol=1e-6)
    np.testing.assert_allclose(parts, whole, atol=1e-6)
    missing, _, _ = both(x, tokens.at[:, 9].set(-1), segments)
    assert not missing[:, 9].any()


def test_histories_of_other_layouts():
    layer, a, _ = nnx_layer("qwen")
    x, tokens = jnp.asarray(a["h"])[None], jnp.asarray(a["ids"], jnp.int32)[None]
    other = NgramMemory(
        12, layout=NgramLayout.qwen(QWEN, 0), streams=2, gate="root", rngs=nnx.Rngs(0)
    )
    digests = f"{other.spec.layout.digest}, and the layer {layer.spec.layout.digest}"
    with pytest.raises(ValueError, match=f"history has layout {digests}"):
        layer(x, tokens, history=other.history((1,)))
    plain = NgramMemory(12, rows=5, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="history has layout None, and the layer"):
        layer(x, tokens, history=plain.history((1,)))
    with pytest.raises(ValueError, match="and the layer None; use the layer's"):
        plain(x[:, :, 0], tokens, history=other.history((1,)))
    embedding, a, _ = nnx_layer("longcat")
    with pytest.raises(ValueError, match="NgramEmbedding: history has layout"):
        embedding(a["h"][None], a["ids"][None].astype(np.int32), history=other.history((1,)))


@pytest.mark.usefixtures("without_typechecking")
def test_impossible_options():
    layout = NgramLayout.qwen(QWEN)
    for options, message in (
        ({}, "rows is None"),
        ({"layout": layout, "rows": 5}, "rows is 5, but the layout has 512; leave it out"),
        ({"layout": layout, "heads": 3}, "heads is 3, but the layout has 2"),
        ({"rows": 5, "gate": "tanh"}, "gate is 'tanh'; expected one of"),
        ({"rows": 5, "eps": 0}, "eps is 0; it must be positive"),
        ({"layout": 5}, "layout is 5; expected a lutjax.NgramLayout"),
    ):
        with pytest.raises(ValueError, match=f"NgramMemory: {message}"):
            NgramMemory(12, **options, rngs=nnx.Rngs(0))
    layer = NgramMemory(12, layout=layout, streams=2, rngs=nnx.Rngs(0))
    with pytest.raises(
        ValueError, match=r"x has shape \[1, 4, 3, 12\]; expected \[..., length, 2, 12\]"
    ):
        layer(jnp.zeros((1, 4, 3, 12)), jnp.zeros((1, 4), jnp.int32))
