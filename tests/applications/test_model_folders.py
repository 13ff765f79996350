"""Commands that use a trained model take every folder that holds one: a run, a bundle of a run, and a bundle of an imported network."""

import json
import re

import jax.numpy as jnp
import numpy as np
import pytest
import tools
from cases import slow, slow_among
from commands import command, output
from flax import nnx
from folders import ROOT
from safetensors.numpy import save_file
from small_runs import RUNS

import lutjax
from lutjax.circuits import deployment, netlist_json, statistics
from lutjax.circuits.deployment import MANIFEST, VECTORS, Vectors
from lutjax.models import (
    LogicCA,
    LogicCAConfig,
    LogicClassifier,
    LogicClassifierConfig,
    LUTTransformer,
    LUTTransformerConfig,
)
from lutjax.training import export as exporting, model_folders, models, predictions
from lutjax.training.classifier_runs import Classifier

pytestmark = pytest.mark.usefixtures("compilation_cache_directory")

IMPORTS = {
    "torchlogix": ("torchlogix_raw", ("--classes", 5, "--tau", 3)),
    "torchlogix thresholds": ("torchlogix_thermometer", ("--classes", 5, "--tau", 3)),
    "torchlogix trees": (
        "torchlogix_conv",
        ("--classes", 5, "--image", "8,8,1", "--padding", "1,0", "--pool", 2, "--pool-padding", "0,1"),
    ),
    "difflogic": ("difflogic", ("--classes", 5)),
    "torch-dwn": ("dwn", ("--classes", 5)),
    "spiky": ("spiky", ("--context", 8)),
}
"""Recorded networks of other packages, and options of their import."""

CLASSIFIERS = ("run", "bundle", *(name for name in IMPORTS if name != "spiky"))


@pytest.fixture(autouse=True)
def _usable_tools(monkeypatch):
    tools.hide_unusable(monkeypatch)


def write(kind, folder):
    """Write a folder of a kind that holds a model; return it."""
    if kind in IMPORTS:
        name, options = IMPORTS[kind]
        with np.load(ROOT / "tests" / "golden" / f"foreign_{name}.npz") as file:
            tensors = {key[2:]: file[key] for key in file.files if key.startswith("t/")}
        save_file(tensors, folder / "m.safetensors")
        package = kind.partition(" ")[0]
        output("import", "--from", package, folder / "m.safetensors", folder / "imported", *options)
        return folder / "imported"
    y = np.arange(60) % 3
    x = np.random.default_rng(0).integers(0, 9, (60, 2, 3), np.uint8)
    np.savez(folder / "data.npz", x=x, y=y)
    sizes = {"layers": (24, 24), "n_thresholds": 2, "steps": 1, "noise": 2.0}
    experiment = Classifier.new(sizes, folder / "data.npz")
    models.save(folder / "a_run", 1, experiment.run.init(), experiment.record)
    if kind == "run":
        return folder / "a_run"
    output("save", folder / "a_run", folder / "saved")
    return folder / "saved"


def refusal(result):
    """Return the message of a command that refuses, which is one line after at most one line of usage."""
    assert result.exit_code in (1, 2), result.output
    assert "Traceback" not in result.output
    return " ".join(result.output.split())


@pytest.mark.parametrize(
    "kind", slow_among(CLASSIFIERS, "torchlogix thresholds", "torchlogix trees", "torch-dwn")
)
def test_classifiers(kind, tmp_path):
    folder = write(kind, tmp_path)
    found = model_folders.read(folder)
    packed, has_data = found.model.packed(), kind == "run"
    assert (found.is_bundle, found.has_data) == (not has_data, has_data)

    said = output("export", folder, "--format", "verilog,c,html,blif")
    export = folder / exporting.FOLDER
    vectors = Vectors.from_json((export / VECTORS).read_bytes())
    assert ("the bundle holds no samples" in said) == (not has_data)
    assert vectors.source == (
        "the test part of " + str(tmp_path / "data.npz") if has_data else exporting.RANDOM
    )
    first = vectors.inputs["x"]
    circuit = netlist_json.read(export / f"{exporting.name_of(folder)}.json")
    np.testing.assert_array_equal(circuit(first), vectors.outputs["y"][:, 0])
    if not has_data:
        bits = jnp.asarray(first, bool)
        words = lutjax.pack_bits(bits.T)
        np.testing.assert_array_equal(packed.from_words(words)[: len(first)], vectors.outputs["y"][:, 0])
        assert len(np.unique(vectors.outputs["y"])) > 1
    for place in (export, folder):  # a model folder stands for its export
        proved = output("verify", place)
        assert re.search(r"PASS +\w+\.json = the model in JAX", proved)
        assert " 0 failed" in proved

    assert "model: " in output("info", folder)
    shape = predictions.form_of(found.model).shape
    rows = np.random.default_rng(1).integers(0, 2, (5, *shape)).astype(np.uint8)
    np.savez(tmp_path / "rows.npz", x=rows)
    lines = output("predict", folder, tmp_path / "rows.npz").splitlines()
    expected = np.asarray(packed(jnp.asarray(rows, jnp.float32)))
    assert [line.split(",")[0] for line in lines[1:]] == [str(number) for number in expected]
    output("save", folder, tmp_path / "again")
    assert "host" in output("fpga", folder, "--board", "icebreaker", "--out", tmp_path / "board")


@pytest.mark.parametrize(
    "kind", ["bundle", slow("torchlogix thresholds"), "torchlogix trees", slow("torch-dwn")]
)
def test_numbers_of_bundles(kind, tmp_path):
    """The circuit of a bundle reads numbers on request, and its random numbers lie around the thresholds."""
    folder = write(kind, tmp_path)
    options = ("--inputs", "fixed16.8", "--format", "json")
    assert "--inputs" not in output("export", folder, *options)
    vectors = Vectors.from_json((folder / exporting.FOLDER / VECTORS).read_bytes())
    packed = lutjax.load(folder).packed()
    shape = predictions.form_of(lutjax.load(folder)).shape
    x = vectors.inputs["x"]
    expected = packed(jnp.asarray(x.reshape(-1, *shape), jnp.float32))
    np.testing.assert_array_equal(vectors.outputs["y"][:, 0], expected)
    assert len(np.unique(vectors.outputs["y"])) > 1
    thresholds = np.asarray(packed.thresholds)
    above = (x.reshape(len(x), -1, len(thresholds), 1) > thresholds).mean((0, 1))
    assert ((above > 0.02) & (above < 0.98)).all()
    assert " 0 failed" in output("verify", folder)


def test_a_bundle_of_few_bits_has_all_inputs(tmp_path):
    config = LogicClassifierConfig(in_features=5, n_classes=2, layers=(12,), n_thresholds=0)
    lutjax.save(LogicClassifier(config, rngs=nnx.Rngs(0)), tmp_path)
    source = exporting.source_of(tmp_path)
    assert (source.samples_name, len(np.unique(source.samples, axis=0))) == ("all inputs", 32)


def test_the_page_about_imports_has_the_output_of_its_commands(tmp_path):
    text = (ROOT / "docs" / "convert.md").read_text(encoding="utf-8")
    weight = np.eye(16, dtype=np.float32)[[1, 6, 7, 14]]
    wires = np.array([[0, 1, 2, 0], [1, 2, 0, 2]])
    save_file({"0.weight": weight, "0.connections.indices": wires}, tmp_path / "model.safetensors")
    output(
        "import", "--from", "torchlogix", tmp_path / "model.safetensors", tmp_path / "model", "--classes", 2
    )
    said = output("export", tmp_path / "model", "--format", "verilog,c") + output(
        "verify", tmp_path / "model"
    )
    shown = next(
        block for block in re.findall(r"```text\n(.*?)```", text, re.DOTALL) if "the bundle holds" in block
    )
    lines = {re.sub(r" +[\d.]+ s$", "", line) for line in said.splitlines()}
    for line in shown.splitlines()[:3]:  # the others need tools
        assert re.sub(r" +[\d.]+ s$", "", line) in lines


def test_serving(tmp_path):
    serving = pytest.importorskip("lutjax.serving", reason="the extra serve is not installed")
    client = pytest.importorskip("starlette.testclient", reason="starlette's test client is not installed")
    model = lutjax.load(write("torchlogix", tmp_path))
    rows = np.random.default_rng(0).normal(size=(4, 6)).round(3)
    with client.TestClient(serving.application(model, "m")) as requests:
        answer = requests.post("/v1/classify", json={"rows": rows.tolist()}).json()
    assert answer["classes"] == [str(number) for number in model.packed()(jnp.asarray(rows, jnp.float32))]
    assert answer["names"] == ["0", "1", "2", "3", "4"]


def test_other_models_without_a_run(tmp_path):
    sizes = {"features": 8, "context": 6, "n_layers": 1, "n_heads": 1, "n_detectors": 2, "n_anchors": 2}
    config = LUTTransformerConfig(**sizes, ffn_detectors=2, ffn_anchors=3)
    lutjax.save(LUTTransformer(config, rngs=nnx.Rngs(0)), tmp_path / "lm")
    assert "a bundle holds no text" in output("export", tmp_path / "lm")
    assert " 0 failed" in output("verify", tmp_path / "lm")
    output("generate", tmp_path / "lm", "--prompt", "a", "--bytes", 2)
    small = LogicCAConfig(channels=2, kernels=2, perception=(8, 2), update=(8, 2))
    lutjax.save(LogicCA(small, rngs=nnx.Rngs(0)), tmp_path / "ca")
    output("export", tmp_path / "ca", "--format", "verilog,html")
    assert re.search("PASS +automaton.json = the model in JAX", output("verify", tmp_path / "ca"))
    assert "a bundle of a model without a run" in output("info", tmp_path / "ca")


def test_bundles_of_other_runs(tmp_path):
    for kind in ("lm", "ca"):
        RUNS[kind](tmp_path / kind)
        output("save", tmp_path / kind, tmp_path / f"{kind}_saved")
    said = output("export", tmp_path / "ca_saved", "--format", "json")
    assert "Wrote" in said
    assert " 0 failed" in output("verify", tmp_path / "ca_saved")
    output("export", tmp_path / "lm_saved")
    facts = json.loads(output("info", tmp_path / "lm_saved", "--json"))
    assert (facts["steps_done"], facts["bundle"]["model"]) == (3, "LUTTransformer")


def test_refusals_are_one_line(tmp_path):
    spiky = write("spiky", tmp_path)
    np.savez(tmp_path / "rows.npz", x=np.zeros((1, 3), np.float32))
    for words, expected in (
        (("export", spiky), "vocab_size is 128; programs read and write bytes"),
        (("generate", spiky, "--prompt", "a"), "has 128 tokens; generate reads and writes bytes"),
        (
            ("predict", spiky, tmp_path / "rows.npz"),
            "is a bundle of a language model; this command takes a classifier",
        ),
        (("fpga", spiky, "--board", "icebreaker"), "holds a language model, which is not a circuit"),
        (("verify", spiky), "holds a model without an export; write one first: lutjax export"),
    ):
        assert expected in refusal(command(*words))
    lutjax.save({"w": np.ones(3, np.float32)}, tmp_path / "arrays")
    for words in (
        ("export", tmp_path / "arrays"),
        ("info", tmp_path / "arrays"),
        ("predict", tmp_path / "arrays", tmp_path / "rows.npz"),
        ("generate", tmp_path / "arrays", "--prompt", "a"),
        ("fpga", tmp_path / "arrays", "--board", "icebreaker"),
        ("save", tmp_path / "arrays", tmp_path / "other"),
    ):
        assert "is a bundle of arrays, no model of lutjax.models" in refusal(command(*words))


def test_a_run_of_another_kind_is_a_damaged_bundle(tmp_path):
    folder = write("bundle", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["run"]["kind"] = "lm"
    (folder / "config.json").write_text(json.dumps(config))
    assert "its run has the kind lm, which trains no LogicClassifier" in refusal(command("info", folder))


def test_a_changed_bundle_proves_nothing(tmp_path):
    folder = write("difflogic", tmp_path)
    output("export", folder, "--format", "json", "--out", tmp_path / "out")
    manifest = deployment.read_manifest(tmp_path / "out")
    assert manifest["run"]["digest"] == model_folders.digest_of(folder)
    config = LogicClassifierConfig(in_features=18, n_classes=5, layers=(20,), n_thresholds=0)
    lutjax.save(LogicClassifier(config, rngs=nnx.Rngs(0)), folder)
    said = output("verify", tmp_path / "out")
    assert "holds another model than the exported one" in said


def test_every_text_has_the_same_gates(tmp_path):
    """The report of an export, its page, its manifest and its Verilog."""
    y = np.arange(60) % 3
    np.savez(tmp_path / "data.npz", x=np.random.default_rng(0).integers(0, 9, (60, 4, 4), np.uint8), y=y)
    experiment = Classifier.new(
        {"layers": (24, 24), "n_thresholds": 2, "steps": 1, "noise": 2.0}, tmp_path / "data.npz"
    )
    models.save(tmp_path / "pixels", 1, experiment.run.init(), experiment.record)
    said = output("export", tmp_path / "pixels", "--format", "verilog,html", "--out", tmp_path / "out")
    circuit = netlist_json.read(tmp_path / "out" / "pixels.json")
    words = statistics.gates_in_words(circuit)
    assert re.fullmatch(r"[\d,]+ gates \(encoder \d+, layers \d+, votes \d+, argmax \d+\)", words)
    texts = {name: (tmp_path / "out" / name).read_text() for name in ("pixels.html", "pixels.v", MANIFEST)}
    assert words in said
    assert f"The exported circuit has {words}; the page computes argmax itself" in texts["pixels.html"]
    assert f"A circuit of {len(circuit)} gates" in texts["pixels.html"]
    assert f"pixels: {len(circuit)} gates" in texts["pixels.v"]
    stated = json.loads(texts[MANIFEST])["statistics"]
    assert sum(part["gates"] for part in stated["parts"]) == stated["gates"] == len(circuit)
