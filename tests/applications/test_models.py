"""Transformer: recorded cases, generation, training modes and state."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import slow_except
from flax import nnx
from folders import GOLDEN

import lutjax.models
from lutjax.layers.nnx import check
from lutjax.models import LUTTransformer, LUTTransformerConfig, transformer

RECORDED = sorted(GOLDEN.glob("gt_tr_*.npz")) + sorted(GOLDEN.glob("ext_tr_*.npz"))

SMALL = LUTTransformerConfig(
    vocab_size=11, features=4, context=6, n_layers=1, n_heads=2, n_detectors=2, n_anchors=2, n_position_bits=2,
    ffn_detectors=3, ffn_anchors=3, dropout=0.0,
)  # fmt: skip
VARIANTS = {
    "concatenated": {"n_layers": 2},
    "pair_interleaved": {"attention": "pair_interleaved", "n_position_bits": 4},
    "no_ffn": {"ffn": False},
    "bfloat16": {"param_dtype": "bfloat16", "batch_norm": True},
}


def model_of(config=SMALL):
    """Model with vectors and tables on a coarse grid: sums are exact, so summation order has no effect."""
    return nnx.merge(*parts_of(config))


@functools.cache
def parts_of(config):
    model, rng = LUTTransformer(config, rngs=nnx.Rngs(0)), np.random.default_rng(0)
    for _, variable in nnx.iter_graph(model):
        if isinstance(variable, (transformer.Embedding, nnx.Param)) and variable.ndim > 1:
            variable.set_value(
                jnp.asarray(rng.integers(-64, 64, variable.shape) / 64, variable.dtype)
            )
    return nnx.split(model)


def tokens_of(*shape, seed=0):
    return jax.random.randint(jax.random.key(seed), shape, 0, SMALL.vocab_size)


@nnx.jit
def logits_of(model, tokens):
    return model(tokens, deterministic=True)


class Recorded:
    """Recorded case with normalized names and configuration."""

    def __init__(self, path):
        self.arrays = dict(np.load(path))
        self.steps = self.arrays["tokens"].shape[0] if self.arrays["kind"] == "transformer" else 0
        if self.steps:
            sizes = map(int, self.arrays["config"])
            vocab, d, context, bits, layers, heads, ffn, attention, anchors, *_ = sizes
            flags = {"n_detectors": attention, "n_anchors": anchors, "attention": "concatenated"}
        else:
            sizes = map(int, self.arrays["config"])
            vocab, d, context, bits, layers, heads, ffn, anchors, attention, _ = sizes
            concatenated, sliced = self.flag("concatenation_product"), self.flag("sliced")
            kind = "concatenated" if concatenated else "pair_interleaved" if sliced else "pair"
            flags = {"n_detectors": ffn, "n_anchors": attention, "attention": kind}
        self.config = LUTTransformerConfig(
            vocab_size=vocab, features=d, context=context, n_layers=layers, n_heads=heads, n_position_bits=bits,
            shared_positions=self.flag("unified_pe"), ffn=not self.flag("no_ffn"), ffn_detectors=ffn,
            ffn_anchors=anchors, dropout=0.0, batch_norm=self.flag("use_batch_norm"),
            param_dtype="float64" if self.steps else "float32", **flags,
        )  # fmt: skip

    def flag(self, name):
        return bool(self.arrays.get(name, False))

    def read(self, name):
        """Named array with a layer's heads concatenated along the detectors."""
        if name in self.arrays:
            return self.arrays[name]
        heads = [self.arrays[name.replace("attn", f"head{h}")] for h in range(self.config.n_heads)]
        return np.concatenate(heads, 1 if ".pe" in name else 0)

    def load(self):
        model = LUTTransformer(self.config, rngs=nnx.Rngs(0))
        before = "0" if self.steps else ""
        model.embedding.set_value(jnp.asarray(self.read("embeddings")))
        for name, layer in layers_of(model).items():
            layer.anchors.set_value(jnp.asarray(self.read(f"{name}.anchors")))
            for field, array in trained_of(layer).items():
                array.set_value(jnp.asarray(self.read(f"{name}.{field}{before}")))
        check(model)
        return model


def layers_of(model):
    layers = {"unembedder": model.unembed}
    for i, block in enumerate(model.layers):
        layers[f"layer{i}.attn"] = block.attention.layer
        if block.ffn is not None:
            layers[f"layer{i}.ffn"] = block.ffn.layer
    return layers


def trained_of(layer):
    fields = {"S": getattr(layer, "weights", None), "pe": getattr(layer, "positions", None)}
    return {name: array for name, array in fields.items() if array is not None}


def loss_of(logits, targets):
    return jnp.sum(optax.softmax_cross_entropy_with_integer_labels(logits, targets))


@nnx.jit
def gradients_of(model, tokens):
    def loss(model, z):
        logits = model.from_embedded(z, deterministic=False)
        return loss_of(logits, tokens[:, 1:]), logits

    graph = nnx.value_and_grad(loss, argnums=(nnx.DiffState(0, nnx.Param), 1), has_aux=True)
    (total, logits), (grads, z0_grad) = graph(model, model.embed(tokens[:, :-1]))
    result = {"loss_sum": total, "logits": logits, "z0_grad": z0_grad, "gradients": grads}
    by_layer = {"unembedder": grads["unembed"]}
    for i, block in grads["layers"].items():
        by_layer[f"layer{i}.attn"] = block["attention"]["layer"]
        if "ffn" in block:
            by_layer[f"layer{i}.ffn"] = block["ffn"]["layer"]
    for name, layer in by_layer.items():
        result[f"{name}.S_grad"] = layer["weights"][...]
        if "positions" in layer:
            result[f"{name}.pe_grad"] = layer["positions"][...]
    return result


# Two layers show all that one shows.
@pytest.mark.parametrize(
    "path", slow_except([pytest.param(p, id=p.stem) for p in RECORDED], "gt_tr_l2h1_pd0")
)
def test_recorded(path):
    with jax.enable_x64(path.stem.startswith("gt_")):
        case = Recorded(path)
        (check_training if case.steps else check_gradients)(case)


def assert_close(name, got, want, tolerance):
    np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance, err_msg=name)


def check_gradients(case):
    result = gradients_of(case.load(), jnp.asarray(case.read("tokens")))
    result.pop("gradients")
    for name, got in result.items():
        assert_close(name, got, case.read(name), float(case.arrays["tol"]))


def check_training(case):
    model = case.load()
    optimizer = nnx.Optimizer(model, optax.sgd(float(case.arrays["lr"])), wrt=nnx.Param)
    for step, tokens in enumerate(case.arrays["tokens"]):
        result = gradients_of(model, jnp.asarray(tokens))
        optimizer.update(model, result.pop("gradients"))
        for name, got in result.items():
            if name != "loss_sum":
                assert_close(f"step{step}.{name}", got, case.read(f"step{step}.{name}"), 1e-8)
    for name, layer in layers_of(model).items():
        for field, array in trained_of(layer).items():
            assert_close(f"{name}.{field}1", array[...], case.read(f"{name}.{field}1"), 1e-8)
    last = jnp.asarray(case.arrays["tokens"][-1, :, :-1])
    assert_close("final.logits", logits_of(model, last), case.read("final.logits"), 1e-8)


@pytest.mark.parametrize(("arguments", "message"), [
    ({"prompt_tokens": np.zeros((2, 0), np.int32)}, "the prompt is empty"),
    ({"n_tokens": -1}, "n_tokens is -1"),
    ({"temperature": -0.5}, "temperature is -0.5"),
    ({"top_k": 0}, "top_k is 0; it must be 1 to 11, the vocabulary size"),
    ({"top_k": 12}, "top_k is 12"),
])  # fmt: skip
def test_generate_refuses(arguments, message):
    arguments = {"prompt_tokens": np.zeros((2, 1), np.int32), "n_tokens": 1, **arguments}
    with pytest.raises(ValueError, match=message):
        model_of().generate(**arguments, key=jax.random.key(0))


def test_decoding_in_chunks_equals_full_pass():
    model, tokens = model_of(), tokens_of(2, 14)
    want = logits_of(model, tokens)
    decoder = nnx.view(model, decode=True, batch_size=2)
    got = [logits_of(decoder, tokens[:, i:j]) for i, j in ((0, 8), (8, 9), (9, 14))]
    np.testing.assert_array_equal(jnp.concatenate(got, 1), want)


def test_dropout_only_in_training():
    config = dataclasses.replace(SMALL, dropout=0.5)
    model, tokens, key = model_of(config), tokens_of(2, 5), jax.random.key(0)
    one = model(tokens, rngs=key)
    np.testing.assert_array_equal(model(tokens, rngs=key), one)
    np.testing.assert_array_equal(model(tokens, rngs=nnx.Rngs(dropout=key)), one)
    assert np.any(model(tokens, rngs=jax.random.key(1)) != one)
    plain = model_of()(tokens)
    np.testing.assert_array_equal(model(tokens, deterministic=True), plain)
    np.testing.assert_array_equal(nnx.view(model, deterministic=True)(tokens), plain)
    with pytest.raises(ValueError, match="rngs"):
        model(tokens)


def test_tables_start_at_zero():
    model = LUTTransformer(SMALL, rngs=nnx.Rngs(0))
    assert not np.any(model(tokens_of(2, 5)))
    assert np.abs(model.embedding[...]).max() <= 1
    kinds = {type(v).__name__ for _, v in nnx.iter_graph(model) if isinstance(v, nnx.Variable)}
    assert kinds == {"Anchors", "Embedding", "Param", "Tables"}


def test_published_size():
    model = nnx.eval_shape(lambda: LUTTransformer(LUTTransformerConfig(), rngs=nnx.Rngs(0)))
    count = sum(v.size for v in jax.tree.leaves(nnx.state(model, nnx.Param)))
    assert f"{count / 1e6:.1f}" == "812.7"


def test_config_as_json():
    config = dataclasses.replace(SMALL, attention="pair", unembed_anchors=2)
    fields = json.loads(json.dumps(config.to_dict()))
    assert LUTTransformerConfig.from_dict(fields) == config
    older = {name: value for name, value in fields.items() if name not in ("memory", "table_dtype")}
    assert LUTTransformerConfig.from_dict(older) == config
    with pytest.raises(
        ValueError, match=r"unknown fields \['heads'\]; the fields are \['attention'"
    ):
        LUTTransformerConfig.from_dict({**fields, "heads": 3})
    fields.pop("context")
    with pytest.raises(ValueError, match=r"missing fields \['context'\]"):
        LUTTransformerConfig.from_dict(fields)


@pytest.mark.parametrize(("changes", "message"), [
    ({"vocab_size": 0}, "LUTTransformerConfig: vocab_size is 0"),
    ({"features": 1}, "features is 1; it must be at least 2"),
    ({"context": 1}, "context is 1; it must be at least 2"),
    ({"n_heads": 0}, "n_heads is 0"),
    ({"n_anchors": 14, "n_position_bits": 3}, r"n_position_bits is 3, so a table has 2\*\*31 rows"),
    ({"ffn_anchors": 31}, r"n_anchors is 31, so a table has 2\*\*31 rows"),
    ({"attention": "soft"}, "attention is 'soft'; expected one of"),
    ({"memory": "counts"}, "n_position_bits is [1-9].*require n_position_bits=0"),
    ({"attention": "pair_interleaved"}, "interleave needs as many positional bits as inputs"),
    ({"dropout": 1.0}, "dropout is 1.0"),
    ({"param_dtype": "int8"}, "param_dtype is 'int8'"),
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
    for wrong in (np.zeros((2, 3), np.float32), np.zeros((), np.int32)):
        with pytest.raises(ValueError, match=r"tokens is .*; expected integer ids \[..., length\]"):
            model(wrong)


def test_names_of_the_package():
    assert {"GPT", "LUTTransformer", "LogicClassifier", "LogicCA"} < set(dir(lutjax.models))
    for name in dir(lutjax.models):
        assert getattr(lutjax.models, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'Transformer'"):
        lutjax.models.Transformer  # noqa: B018


class TestSlow:
    @pytest.mark.parametrize("name", VARIANTS)
    def test_trains(self, name):
        model = model_of(dataclasses.replace(SMALL, **VARIANTS[name]))
        optimizer = nnx.Optimizer(model, optax.sgd(0.01), wrt=nnx.Param)
        tokens = tokens_of(4, 7)

        @nnx.jit
        def step(model, optimizer, tokens):
            def of_model(m):
                return loss_of(m(tokens[:, :-1]).astype(jnp.float32), tokens[:, 1:])

            loss, grads = nnx.value_and_grad(of_model)(model)
            optimizer.update(model, grads)
            return loss

        before = nnx.to_pure_dict(nnx.state(model, nnx.Not(nnx.Param)))
        losses = [step(model, optimizer, tokens) for _ in range(8)]
        assert losses[-1] < losses[0]
        after = nnx.to_pure_dict(nnx.state(model, nnx.Not(nnx.Param)))
        for (path, a), b in zip(
            jax.tree.leaves_with_path(after), jax.tree.leaves(before), strict=True
        ):
            kept = "norm" not in jax.tree_util.keystr(path)
            assert np.array_equal(a, b) == kept, path
