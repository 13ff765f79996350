"""Exported JAX programs: a process without lutjax reproduces the model's outputs."""

import dataclasses
import itertools
import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import slow_except
from commands import output, refusal
from flax import nnx
from small_runs import RUNS

import lutjax
from lutjax.bundles import BundleError, programs
from lutjax.models import (
    GPT,
    GPTConfig,
    LogicCA,
    LogicCAConfig,
    LogicClassifierConfig,
    LogicTreeNetConfig,
    LUTTransformer,
    LUTTransformerConfig,
)
from lutjax.training.classifier import classifier_of

# Sizes are annotated as ints, which symbolic ones are not: as a user calls the package.
pytestmark = pytest.mark.usefixtures("without_typechecking")

ALONE = """
import json, sys
sys.modules["lutjax"] = sys.modules["flax"] = None
import jax, jax.export, jax.numpy as jnp, numpy as np
from safetensors.numpy import load_file

folder, file = sys.argv[1:]
weights = {name: jnp.asarray(array) for name, array in load_file(f"{folder}/model.safetensors").items()}
about = json.load(open(f"{folder}/programs.json"))
program = {}
for name, facts in about["programs"].items():
    program[name] = jax.export.deserialize(bytearray(open(f"{folder}/{facts['file']}", "rb").read()))
    assert program[name].platforms == ("cpu", "cuda", "tpu"), program[name].platforms
given = dict(np.load(file))
found = {}
if "decode" in program:
    tokens, targets = given["tokens"], given["targets"]
    found["logits"] = program["forward"].call(weights, tokens)
    found["one"] = program["forward"].call(weights, tokens[:1, :1])
    found["loss"], gradient = jax.value_and_grad(program["loss"].call, allow_int=True)(weights, tokens, targets)
    state, found["after prompt"] = program["start"].call(weights, given["prompt"])
    for k in range(given["more"].shape[1]):
        state, found["after more"] = program["decode"].call(weights, state, given["more"][:, k])
elif "x" in given:
    found["logits"] = program["forward"].call(weights, given["x"])
    found["loss"], gradient = jax.value_and_grad(program["loss"].call, allow_int=True)(weights, given["x"], given["labels"])
else:
    found["state"] = program["forward"].call(weights, *(given[name] for name in ("state", "key") if name in given))
if "loss" in program:
    found |= {f"gradient {name}": g for name, g in gradient.items() if jnp.issubdtype(weights[name].dtype, jnp.floating)}
np.savez(file, **found)
"""


def alone(model, folder, **given):
    """Run a model's programs in a process without lutjax and return the results."""
    paths = programs.write(model, folder)
    facts = json.loads((folder / programs.ABOUT).read_bytes())
    assert [path.name for path in paths] == [one["file"] for one in facts["programs"].values()]
    np.savez(folder.parent / "a.npz", **given)
    subprocess.run(
        [sys.executable, "-c", ALONE, folder, folder.parent / "a.npz"], check=True, timeout=300
    )
    with np.load(folder.parent / "a.npz") as result:
        return dict(result)


def loss_of(logits, labels):
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1).mean()


def check_gradients(model, loss, result):
    value, gradients = nnx.value_and_grad(loss)(model)
    np.testing.assert_allclose(result["loss"], value, rtol=1e-5)
    for path, g in nnx.to_flat_state(gradients):
        name = ".".join(map(str, path))
        np.testing.assert_allclose(
            result[f"gradient {name}"], g[...], rtol=1e-4, atol=1e-6, err_msg=name
        )


SIZES = {"vocab_size": 11, "context": 5, "n_layers": 1}
LUT = LUTTransformerConfig(
    **SIZES, features=6, n_heads=1, n_detectors=3, n_anchors=2, ffn_anchors=3
)
SOFTMAX = GPTConfig(**SIZES, features=8, n_heads=2, lut_heads=2, lut_tables=2, lut_bits=2)
LANGUAGE_MODELS = {
    "lut": LUT,
    "counts": dataclasses.replace(LUT, memory="counts", n_position_bits=0),
    "pairs": dataclasses.replace(LUT, attention="pair"),
    "gpt": SOFTMAX,
    "memory": dataclasses.replace(SOFTMAX, memory=True, memory_rows=7),
}


def language_model(kind):
    config = LANGUAGE_MODELS[kind]
    return (GPT if isinstance(config, GPTConfig) else LUTTransformer)(config, rngs=nnx.Rngs(0))


@pytest.mark.parametrize(
    ("name", "kind"),
    slow_except(
        itertools.product(["forward", "loss", "start", "decode"], LANGUAGE_MODELS),
        "decode-counts",
        "start-memory",
    ),
)
def test_programs_of_language_models_are_traced(name, kind):
    model = language_model(kind)
    program = programs.programs_of(model)[name]
    weights = {".".join(map(str, p)): v[...] for p, v in nnx.to_flat_state(nnx.state(model))}
    with lutjax.use_implementation("xla"):
        jax.jit(program.function).trace(weights, *program.arguments.values())


def test_other_models_have_no_programs(tmp_path):
    with pytest.raises(BundleError, match=r"a Linear is no model of lutjax\.models"):
        programs.write(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), tmp_path)
    assert not list(tmp_path.iterdir())


class TestSlow:
    @pytest.mark.parametrize("kind", LANGUAGE_MODELS)
    def test_language_models(self, kind, tmp_path):
        model = language_model(kind)
        rng = np.random.default_rng(0)
        for _, layer in nnx.iter_modules(model):
            if hasattr(layer, "weights"):
                layer.weights = rng.normal(size=layer.weights.shape).astype(np.float32)
        model.eval()
        tokens, targets, prompt, more = (
            rng.integers(0, 11, shape).astype(np.int32)
            for shape in ((3, 4), (3, 4), (2, 12), (2, 3))
        )
        result = alone(
            model, tmp_path / "saved", tokens=tokens, targets=targets, prompt=prompt, more=more
        )
        np.testing.assert_allclose(result["logits"], model(tokens), rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(result["one"], model(tokens[:1, :1]), rtol=1e-5, atol=1e-5)
        check_gradients(
            model, lambda model: loss_of(model(tokens, deterministic=True), targets), result
        )
        # Of texts longer than the context.
        np.testing.assert_allclose(
            result["after prompt"], model(prompt)[:, -1], rtol=1e-5, atol=1e-5
        )
        whole = np.concatenate([prompt, more], 1)
        np.testing.assert_allclose(result["after more"], model(whole)[:, -1], rtol=1e-5, atol=1e-5)

    @pytest.mark.parametrize("kind", ["gates", "trees"])
    def test_classifiers(self, kind, tmp_path):
        gates = LogicClassifierConfig(in_features=6, n_classes=3, n_thresholds=2, layers=(12, 12))
        trees = LogicTreeNetConfig((4, 4, 1), 3, n_thresholds=1, kernels=(2,), layers=(9,), depth=1)
        config, shape = (gates, (6,)) if kind == "gates" else (trees, (4, 4, 1))
        model = classifier_of(config, rngs=nnx.Rngs(0))
        x = np.random.default_rng(0).random((5, *shape), np.float32)
        labels = np.asarray([0, 1, 2, 1, 0], np.int32)
        result = alone(model, tmp_path / "saved", x=x, labels=labels)
        np.testing.assert_array_equal(result["logits"], model(x, deterministic=True))
        check_gradients(model, lambda model: loss_of(model(x, deterministic=False), labels), result)

    @pytest.mark.parametrize("rate", [1.0, 0.5])
    def test_automata(self, rate, tmp_path):
        config = LogicCAConfig(
            channels=2, kernels=2, perception=(8, 2), update=(8, 2), update_rate=rate
        )
        model = LogicCA(config, rngs=nnx.Rngs(0))
        state = np.random.default_rng(0).integers(0, 2, (3, 5, 40, 2)).astype(bool)
        key = jax.random.key(3)
        given = {} if rate == 1 else {"key": np.asarray(jax.random.key_data(key))}
        result = alone(model, tmp_path / "saved", state=state, **given)
        np.testing.assert_array_equal(result["state"], model(state, 1, key=key, deterministic=True))

    def test_the_command(self, tmp_path):
        RUNS["digits"](tmp_path / "run")
        said = output("export", tmp_path / "run", "--format", "jax")
        assert "forward.jax" in said
        assert "for cpu, cuda, tpu" in said
        model = lutjax.load(tmp_path / "run" / "jax")  # a bundle, too
        assert model.record.kind == "digits"
        again = output(
            "export", tmp_path / "run" / "jax", "--format", "jax", "--out", tmp_path / "other"
        )
        assert "loss.jax" in again
        for words, message in (
            (("--format", "jax,c"), "export it separately"),
            (("--format", "jax", "--name", "x"), "--format jax has no option --name"),
        ):
            assert message in refusal("export", tmp_path / "run", *words)
