"""GPT: NumPy definition, cached decoding, dtypes, initial values."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import slow_except
from flax import nnx
from small_runs import perturb

from lutjax.dispatch.registry import Backend, Device
from lutjax.layers.nnx import Anchors
from lutjax.models import GPT, GPTConfig, _attention

SMALL = GPTConfig(
    vocab_size=11, features=8, context=6, n_layers=2, n_heads=2, feed_forward="dense", lut_heads=2,
    lut_tables=3, lut_bits=3,
)  # fmt: skip
TABLES = {"feed_forward": "projection_lut", "n_layers": 1}
SCORED_ALONE = {"feed_forward": "scored_lut", "n_layers": 1}
TABLES_ALONE = {"feed_forward": "lut", "n_layers": 1}


def model_of(**changes):
    """Model with parameters large enough to expose every component."""
    return nnx.merge(*parts_of(**changes))


@functools.cache
def parts_of(seed=0, **changes):
    return nnx.split(perturb(GPT(dataclasses.replace(SMALL, **changes), rngs=nnx.Rngs(seed)), seed))


def tokens_of(*shape, seed=0):
    return jax.random.randint(jax.random.key(seed), shape, 0, SMALL.vocab_size)


@nnx.jit
def logits_of(model, tokens):
    return model(tokens, deterministic=True)


def expected(model, tokens):
    """Compute logits for one sequence in float64 NumPy, looping over positions, heads and keys."""
    state = nnx.to_pure_dict(nnx.state(model, (nnx.Param, Anchors)))
    params = jax.tree.map(
        lambda a: np.asarray(a, np.float64 if a.dtype == jnp.float32 else None), state
    )
    config, size = model.config, model.config.features // model.config.n_heads

    def norm(z, scale):
        return z / np.sqrt(np.mean(z**2, -1, keepdims=True) + 1e-6) * scale

    def turned(x, position):
        pairs = x[: size // 2] + 1j * x[size // 2 :]
        pairs = pairs * np.exp(1j * position * 10000.0 ** (-np.arange(0, size, 2) / size))
        return np.concatenate([pairs.real, pairs.imag])

    def gelu(x):
        return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))

    def feed_forward(x, layer):
        if config.feed_forward == "dense":
            up, down = layer["up"], layer["down"]
            return gelu(x @ up["kernel"] + up["bias"]) @ down["kernel"] + down["bias"]
        first, second = np.moveaxis(layer["anchors"], -1, 0)
        row = (x[:, first] > x[:, second]) @ (1 << np.arange(config.lut_bits))  # [position, table]
        return layer["weights"][np.arange(len(first)), row].sum(1)

    z = params["embedding"]["embedding"][tokens]
    for layer in params["layers"].values():
        projected = (
            norm(z, layer["attention_norm"]["scale"]) @ layer["attention"]["project"]["kernel"]
        )
        query, key, value = np.split(projected.reshape(len(z), 3 * config.n_heads, size), 3, 1)
        sums = np.zeros((len(z), config.n_heads, size))
        for i, head in np.ndindex(sums.shape[:2]):
            seen = range(max(0, i - config.context + 1), i + 1)
            scores = [
                turned(query[i, head], i) @ turned(key[j, head], j) / np.sqrt(size) for j in seen
            ]
            weights = np.exp(scores) / np.exp(scores).sum()
            sums[i, head] = weights @ value[seen, head]
        z = z + sums.reshape(len(z), -1) @ layer["attention"]["merge"]["kernel"]
        z = z + feed_forward(norm(z, layer["feed_forward_norm"]["scale"]), layer["feed_forward"])
    return norm(z, params["norm"]["scale"]) @ params["unembed"]["kernel"]


@pytest.mark.parametrize("changes", [{}, TABLES_ALONE])
def test_definition(changes):
    model, tokens = model_of(**changes), tokens_of(2, 14)
    want = np.stack([expected(model, text) for text in np.asarray(tokens)])
    assert np.abs(want).max() > 1
    np.testing.assert_allclose(logits_of(model, tokens), want, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(logits_of(model, tokens[0, :5]), want[0, :5], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "changes",
    slow_except(
        [{}, {"dtype": "bfloat16"}, TABLES, SCORED_ALONE, TABLES_ALONE],
        "changes0",
        ids=[f"changes{i}" for i in range(5)],
    ),
)
def test_decoding_in_chunks_equals_full_pass(changes):
    model, tokens = model_of(**changes), tokens_of(2, 14)
    want = logits_of(model, tokens)
    model.init_cache((2,))
    decode = nnx.jit(lambda model, tokens: model(tokens, deterministic=True, decode=True))
    got = [decode(model, tokens[:, i:j]) for i, j in ((0, 8), (8, 9), (9, 10), (10, 11), (11, 14))]
    tolerance = 0.05 if "dtype" in changes else 1e-5
    atol = tolerance * float(np.abs(want).max())
    np.testing.assert_allclose(jnp.concatenate(got, 1), want, rtol=tolerance, atol=atol)
    with pytest.raises(ValueError, match="call init_cache first"):
        model_of()(tokens, decode=True)


def test_generate_equals_full_passes():
    model, prompt = model_of(), tokens_of(2, 8)
    text = jnp.pad(prompt, ((0, 0), (0, 6)))
    for i in range(8, 14):
        text = text.at[:, i].set(jnp.argmax(logits_of(model, text)[:, i - 1], -1))
    got = model.generate(prompt, 6, key=jax.random.key(0), temperature=0)
    np.testing.assert_array_equal(got, text[:, 8:])


def test_new_tables_alone_are_zero_and_learn():
    model, tokens = (
        GPT(dataclasses.replace(SMALL, **TABLES_ALONE), rngs=nnx.Rngs(0)),
        tokens_of(2, 6),
    )
    layer = model.layers[0].feed_forward
    assert layer.weights.shape == (2 * 3, 2**3, 8)
    assert not np.any(layer.weights)
    gradient = nnx.jit(nnx.grad(lambda model: (model(tokens, deterministic=True) ** 2).sum()))(
        model
    )
    assert np.any(gradient["layers"][0]["feed_forward"]["weights"])


def test_scored_tables_alone_have_no_projections():
    layer = GPT(dataclasses.replace(SMALL, **SCORED_ALONE), rngs=nnx.Rngs(0)).layers[0].feed_forward
    learned = set(nnx.to_pure_dict(nnx.state(layer, nnx.Param)))
    assert learned == {"weights", "log_beta", "log_gamma", "log_tau"}
    assert layer.weights.shape == (2 * 3, 2**3, 8)
    assert layer.anchors.shape == (2 * 3, 3, 2)


def test_config_as_json():
    config = dataclasses.replace(SMALL, dtype="bfloat16", remat=True, read="hard")
    assert GPTConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize(("changes", "message"), [
    ({"vocab_size": 0}, "GPTConfig: vocab_size is 0; it must be at least 1"),
    ({"context": 1}, "context is 1; it must be at least 2"),
    ({"n_heads": 3}, "features is 8 and n_heads 3; .* must be a multiple of 6"),
    ({"feed_forward": "sparse"}, "feed_forward is 'sparse'; expected one of"),
    ({"dtype": "int8"}, "dtype is 'int8'; expected one of"),
    ({"dropout": 1.0}, "dropout is 1.0; it is a rate"),
    ({"read": "sure"}, "read is 'sure'; expected one of"),
    ({"lut_bits": 31}, "bits is 31"),
    ({"table_dropout": -0.5}, "table_dropout is -0.5"),
])  # fmt: skip
def test_impossible_configs(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SMALL, **changes)


@pytest.mark.usefixtures("without_typechecking")
def test_tokens():
    model = model_of()
    np.testing.assert_array_equal(
        *(logits_of(model, np.tile(np.int32(ids), (2, 7))) for ids in ([99, -1], [10, 0]))
    )
    with pytest.raises(ValueError, match=r"tokens is .*; expected integer ids \[..., length\]"):
        model(np.zeros((2, 3), np.float32))


@pytest.mark.parametrize(("capability", "head_size", "dtype", "length", "reason"), [
    (9, 64, "bfloat16", 512, None),
    (8, 128, "float16", None, None),
    (9, 256, "bfloat16", 2, None),
    (9, 64, "float32", 512, "not float32"),
    (7, 64, "bfloat16", 512, "compute capability 8.0"),
    (0, 64, "bfloat16", 512, "compute capability 8.0"),
    (8, 256, "bfloat16", 512, "up to 128"),
    (9, 36, "bfloat16", 512, "multiples of 8"),
    (9, 64, "bfloat16", 77, "even lengths"),
])  # fmt: skip
def test_flash_attention_is_chosen_where_cudnn_supports_it(
    monkeypatch, capability, head_size, dtype, length, reason
):
    assert "GPU" in _attention.unsupported_reason(
        64, "bfloat16"
    )  # of this process, which has a CPU only
    gpu = Device(Backend.GPU, "NVIDIA H100")
    monkeypatch.setattr(_attention, "devices_of", lambda _: (gpu,))
    monkeypatch.setattr(_attention, "_compute_capability", lambda: capability)
    result = _attention.unsupported_reason(head_size, dtype, length=length)
    assert result is None if reason is None else reason in result


def test_dtypes():
    tokens = tokens_of(2, 14)
    want, half = logits_of(model_of(), tokens), model_of(dtype="bfloat16")
    assert {a.dtype for a in jax.tree.leaves(nnx.state(half, nnx.Param))} == {jnp.dtype("float32")}
    got = logits_of(half, tokens)
    assert got.dtype == jnp.float32
    assert 0 < float(jnp.abs(got - want).max()) < 0.05 * float(jnp.abs(want).max())


class TestSlow:
    def test_new_tables_add_nothing(self):
        model, tokens = GPT(dataclasses.replace(SMALL, **TABLES), rngs=nnx.Rngs(0)), tokens_of(2, 6)
        layer = model.layers[0].feed_forward
        assert layer.weights.shape == (2 * 3, 2**3, 4)
        want = logits_of(model, tokens)
        layer.weights[...] = layer.weights[...] + 1
        np.testing.assert_array_equal(logits_of(model, tokens), want)
        layer.decompress_kernel[...] = layer.decompress_kernel[...] + 1
        assert np.any(logits_of(model, tokens) != want)
