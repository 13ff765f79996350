"""Converted networks from other packages: recorded outputs and supported operations."""

import dataclasses
import re
from pathlib import Path

import exports
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import slow_except
from commands import output, refusal
from flax import nnx
from folders import GOLDEN
from safetensors.numpy import save_file

import lutjax
from lutjax import convert
from lutjax.circuits import proofs
from lutjax.convert import ConversionError
from lutjax.convert._packages import PACKAGES

CASES = {path.stem.removeprefix("foreign_"): path for path in sorted(GOLDEN.glob("foreign_*.npz"))}
NOT_SOFT = {
    "torchlogix_warp",
    "torchlogix_conv_warp",
    *(name for name in CASES if name.startswith("dwn")),
}
"""Cases with different soft outputs."""
IMAGE = ("shape", "padding", "pool", "pool_padding")


def package(name):
    return {"dwn": "torch-dwn"}.get(result := name.partition("_")[0], result)


def case(name):
    """Return tensors, conversion arguments, inputs and outputs."""
    with np.load(CASES[name]) as file:
        whole = dict(file)
    parts = {"t": {}, "a": {}}
    for key in [key for key in whole if key[1:2] == "/"]:
        parts[key[0]][key[2:]] = whole.pop(key)
    given = {key: value.tolist() for key, value in parts["a"].items()}
    given = {
        key: tuple(value) if isinstance(value, list) else value for key, value in given.items()
    }
    if "shape" in given:
        given["image"] = convert.Image(**{key: given.pop(key) for key in IMAGE if key in given})
    return parts["t"], given, whole


def converted(name):
    tensors, arguments, result = case(name)
    return PACKAGES[package(name)](tensors, **arguments), result


@nnx.jit(static_argnames="given")
def called(model, x, given=()):
    return model(x, **dict(given))


HARD, SOFT = (("deterministic", True),), (("deterministic", False),)


FAST = ("difflogic", "dwn_one_thermometer", "spiky")


@pytest.mark.parametrize("name", slow_except(CASES, *FAST))
def test_outputs(name, tmp_path):
    model, result = converted(name)
    language = package(name) == "spiky"
    hard = called(model, result["x"], HARD)
    np.testing.assert_allclose(hard, result["hard"], rtol=0, atol=1e-5 if language else 1e-6)
    if not language:
        np.testing.assert_array_equal(model.packed()(result["x"]), result["hard"].argmax(-1))
    lutjax.save(model, tmp_path)
    np.testing.assert_array_equal(called(lutjax.load(tmp_path), result["x"], HARD), hard)
    if name not in NOT_SOFT:  # in training mode, where batch normalization learns
        np.testing.assert_allclose(
            called(model, result["x"], SOFT), result["soft"], rtol=0, atol=1e-5
        )


@pytest.mark.parametrize(
    ("name", "i", "context"), [("spiky", None, None), ("spiky", 0, 8), ("spiky_pair", 1, 8)]
)
def test_layers_of_spiky(name, i, context):
    model, layer = converted(name)[0], "unembedder" if i is None else f"layers.{i}.attention_lut"
    there = model.unembed if i is None else model.layers[i].attention.layer
    sizes = {"in_features": 12, "out_features": 128 if i is None else 12, "context": context}
    one = convert.spiky_layer(case(name)[0], layer, **sizes)
    assert (one.weights[...] == there.weights[...]).all()
    assert nnx.split(one)[0] == nnx.split(there)[0]


def test_what_is_no_language_model():
    tensors, given, _ = case("spiky")

    def without(*endings):
        return {name: array for name, array in tensors.items() if not name.endswith(endings)}

    first = "layers.0.attention_lut"
    for changed, options, message in (
        (without("_anchors"), {}, f"{first} has no _detector_anchors: a state dict of spiky has no anchors."),
        (without("embedder.weight"), {}, "token_embedder has no weight"),
        (without("attention_lut._weights"), {}, f"{first} has no _weights"),
        ({}, {}, "token_embedder has no weight"),
        (tensors, {"context": 9}, f"{first} has 84 numbers for positions; expected [8, 6, 2]"),
        (tensors, {"context": 1}, "context is 1; it must be at least 2"),
        (tensors, {"shared_positions": True}, f"{first} has 84 numbers for positions; expected [7, 1, 2]"),
        (tensors, {"attention": "pair"}, "expected [6, 2, 2] and [6, 4, 12]"),
        (tensors, {"attention": "all"}, "attention is 'all'; expected one of concatenated, pair"),
        ({**tensors, "head._weights": np.zeros(3)}, {}, "head is not part of a LUTTransformer"),
        ({**tensors, "unembedder._weights": np.zeros(3)}, {}, "unembedder has anchors [3, 4, 2] and 3 weights"),
        ({**tensors, f"{first}._detector_anchors": tensors[f"{first}._detector_anchors"] + 12}, {}, "inputs are 0 to 11"),
    ):  # fmt: skip
        with pytest.raises(ConversionError, match=re.escape(message)):
            convert.spiky(changed, **{**given, **options})


@pytest.mark.parametrize("name", ["difflogic"])
def test_they_are_proved_here(name, tmp_path):
    model, result = converted(name)
    circuit, bits = model.circuit(), result["x"].astype(np.uint8)
    if bits.ndim > 2:  # channels first
        bits = np.moveaxis(bits, -1, 1).reshape(len(bits), -1)
    np.testing.assert_array_equal(circuit(bits), result["hard"].argmax(-1))
    exports.write(tmp_path / "out", formats=("json", "blif", "aiger"), circuit=circuit)
    proved = proofs.verify(tmp_path / "out")
    assert proved
    assert all(proof.passed is not False for proof in proved), proved


def test_files_of_pytorch(tmp_path):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    tensors, _, _ = case("torchlogix_raw")
    torch.save(
        {name: torch.from_numpy(array) for name, array in tensors.items()}, tmp_path / "m.pt"
    )
    for name, array in convert.read(tmp_path / "m.pt").items():
        np.testing.assert_array_equal(array, tensors[name])
    torch.save({"x": Path()}, tmp_path / "code.pt")
    with pytest.raises(ConversionError, match="cannot be read as tensors alone"):
        convert.read(tmp_path / "code.pt")


def test_without_pytorch(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (tmp_path / "m.pt").write_bytes(b"")
    with pytest.raises(
        ModuleNotFoundError, match=r"is a file of PyTorch, which is not installed here"
    ):
        convert.read(tmp_path / "m.pt")


WEIGHT, WIRES = np.zeros((4, 16), np.float32), np.asarray([[0, 1, 2, 3], [1, 2, 3, 0]])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "the file has no layers"),
        ({"0.weight": WEIGHT}, "0 has no connections.indices"),
        ({"0.weight": WEIGHT[0], "0.connections.indices": WIRES}, "0.weight has shape [16]; expected 2 axes"),
        ({"0.weight": WEIGHT, "0.connections.indices": WIRES - 1}, "0 has wires -1 to 2; inputs are 0 to 2"),
        ({"0.weight": WEIGHT[:3], "0.connections.indices": WIRES}, "expected [4, 16] of gates with 2 inputs"),
        ({"0.weight": WEIGHT + np.nan, "0.connections.indices": WIRES}, "0 has numbers that are not finite"),
        ({"0.kernel": WEIGHT}, "0.kernel, which belongs to no layer that can be converted"),
        ({"0.tree_weights.0": WEIGHT}, "0.tree_weights.0 has shape [4, 16]; expected 3 axes"),
        ({f"{k}.{name}": a for k in (0, 1) for name, a in (("weight", WEIGHT), ("connections.indices", WIRES + 4 * k))}, "1 has wires 4 to 7; inputs are 0 to 3"),
        ({"0.weight": WEIGHT[:3], "0.connections.indices": WIRES[:, :3]}, "the last of layers is 3; it must be a multiple of the 2"),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("without_typechecking")
def test_what_is_no_network(given, message):
    with pytest.raises(ConversionError, match=re.escape(message)) as result:
        convert.torchlogix(given, n_classes=2)
    assert "\n" not in str(result.value)
    with pytest.raises(
        ConversionError, match=r"0 has no indices; .* Save them: safetensors.torch."
    ):
        convert.difflogic({"0.weights": WEIGHT}, n_classes=2)


def test_what_is_no_image():
    tensors, given, _ = case("torchlogix_conv")
    image = given.pop("image")
    with pytest.raises(ConversionError, match=r"has convolutions, and not the size of images"):
        convert.torchlogix(tensors, **given)
    for change, message in (
        (
            {"shape": (9, 8, 1)},
            "1 has 8 x 8 places 1 apart, and leaves in 3 rows and columns; no square",
        ),
        ({"shape": (8, 8, 2)}, "thresholds have 1 channels; images have 2"),
        (
            {"pool": 3},
            "1 does not fit the image: LogicConv: pool is 3, which must divide the (8, 8)",
        ),
        (
            {"padding": (1, 0, 0)},
            "padding is (1, 0, 0); expected one number, or one for each of the 2 conv",
        ),
        ({"pool_padding": 0}, "has wires 0 to 31; inputs are 0 to 7"),
    ):
        with pytest.raises(ConversionError, match=re.escape(message)):
            convert.torchlogix(tensors, image=dataclasses.replace(image, **change), **given)
    with pytest.raises(ConversionError, match="padding is -1; it must be at least 0"):
        convert.Image((8, 8, 1), padding=-1)
    dense, given, _ = case("torchlogix_raw")
    with pytest.raises(ConversionError, match="but the file has no convolutions"):
        convert.torchlogix(dense, image=image, **given)


class TestSlow:
    def test_files_of_tensors(self, tmp_path):
        tensors, arguments, result = case("torchlogix_raw")
        save_file(tensors, tmp_path / "m.safetensors")
        assert set(convert.read(tmp_path / "m.safetensors")) == set(tensors)
        words = ("--classes", 5, "--tau", arguments["tau"])
        said = output(
            "import", "--from", "torchlogix", tmp_path / "m.safetensors", tmp_path / "out", *words
        )
        assert "Converted 30 + 20 gates over 6 numbers to" in said
        np.testing.assert_allclose(
            lutjax.load(tmp_path / "out")(result["x"]), result["hard"], rtol=0, atol=1e-6
        )
        tensors, _, result = case("torchlogix_conv")
        save_file(tensors, tmp_path / "c.safetensors")
        sizes = ("--image", "8,8,1", "--padding", "1,0", "--pool", 2, "--pool-padding", "0,1")
        images = (tmp_path / "c.safetensors", tmp_path / "c", *sizes, *words)
        said = output("import", "--from", "torchlogix", *images)
        assert "Converted 6 + 8 trees and 30 + 20 gates over 8 x 8 x 1 numbers to" in said
        np.testing.assert_allclose(
            lutjax.load(tmp_path / "c")(result["x"]), result["hard"], rtol=0, atol=1e-6
        )
        for more, message in (
            (("difflogic", *words), "which belongs to no layer that can be converted"),
            (("difflogic", "--temperature", 2, *words), "--temperature is for --from"),
            (
                ("spiky", *words),
                "--classes is for --from torchlogix, difflogic, torch-dwn; leave it out",
            ),
            (("spiky",), "Missing option '--context', which --from spiky needs"),
        ):
            refused = refusal("import", tmp_path / "m.safetensors", tmp_path / "o", "--from", *more)
            assert message in refused
        save_file(case("spiky")[0], tmp_path / "s.safetensors")
        said = output(
            "import", "--from", "spiky", tmp_path / "s.safetensors", tmp_path / "s", "--context", 8
        )
        assert "Converted 2 layers of tables over 12 numbers, for 128 tokens to" in said
        (tmp_path / "bad.safetensors").write_bytes(b"nothing")
        for name, message in (
            ("bad.safetensors", "is no file of safetensors"),
            ("no", "is no file"),
        ):
            with pytest.raises(ConversionError, match=message):
                convert.read(tmp_path / name)

    @pytest.mark.parametrize("name", ["spiky", "torchlogix_raw"])
    def test_they_are_trained_here(self, name):
        model, result = converted(name)
        x, labels, rate = result["x"], np.arange(len(result["x"])) % 5, 0.1
        if name == "spiky":
            x, labels, rate = x[:, :-1], x[:, 1:], 0.01
        labels, optimizer = (
            jnp.asarray(labels, jnp.int32),
            nnx.Optimizer(model, optax.adam(rate), wrt=nnx.Param),
        )

        def loss(model):
            logits = model(x, deterministic=False)
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

        step = nnx.jit(nnx.value_and_grad(loss))
        losses = []
        for _ in range(20):
            value, gradients = step(model)
            with jax.numpy_dtype_promotion("standard"):  # of optax
                optimizer.update(model, gradients)
            losses.append(float(value))
        assert losses[-1] < losses[0] - (1 if name == "spiky" else 0.1)
