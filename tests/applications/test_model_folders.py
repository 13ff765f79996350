"""Every model folder kind: a run, a bundled run, and a bundled imported network."""

import json
import re
import shutil
import subprocess
import sys
import tomllib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tools
from cases import slow_except
from commands import output, refusal
from flax import nnx
from folders import ROOT
from safetensors.numpy import save_file
from small_runs import HISTORY, RUNS, ca_run, call

import lutjax
from lutjax.circuits import deployment, netlist_json
from lutjax.circuits.deployment import VECTORS, Vectors
from lutjax.extras import DISTRIBUTIONS, EXTRAS, require_optional
from lutjax.models import (
    LogicCA,
    LogicCAConfig,
    LogicClassifier,
    LogicClassifierConfig,
    LUTTransformer,
)
from lutjax.training import export as exporting, model_folders, models, predictions
from lutjax.training.classifier_runs import Classifier

IMPORTS = {
    "torchlogix": ("torchlogix_raw", ("--classes", 5, "--tau", 3)),
    "torchlogix thresholds": ("torchlogix_thermometer", ("--classes", 5, "--tau", 3)),
    "torchlogix trees": ("torchlogix_conv",
        ("--classes", 5, "--image", "8,8,1", "--padding", "1,0", "--pool", 2, "--pool-padding",
        "0,1")),
    "difflogic": ("difflogic", ("--classes", 5)),
    "torch-dwn": ("dwn", ("--classes", 5)),
    "spiky": ("spiky", ("--context", 8)),
}  # fmt: skip
"""Recorded networks from other packages, with import options."""

CLASSIFIERS = ("run", "bundle", *(name for name in IMPORTS if name != "spiky"))


@pytest.fixture(autouse=True)
def _usable_tools(monkeypatch):
    tools.hide_unusable(monkeypatch)


def write(kind, folder):
    """Write a model folder in the given kind and return it."""
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
    experiment = Classifier.create(sizes, folder / "data.npz")
    models.save(folder / "a_run", 1, experiment.run.init(), experiment.record)
    if kind == "run":
        return folder / "a_run"
    output("save", folder / "a_run", folder / "saved")
    return folder / "saved"


def gates_of(n, **sizes):
    config = LogicClassifierConfig(in_features=n, n_thresholds=0, **sizes)
    return LogicClassifier(config, rngs=nnx.Rngs(0))


def test_a_bundle_of_few_bits_has_all_inputs(tmp_path):
    lutjax.save(gates_of(5, n_classes=2, layers=(12,)), tmp_path)
    source = exporting.source_of(tmp_path)
    assert (source.samples_name, len(np.unique(source.samples, axis=0))) == ("all inputs", 32)


def test_refusals_are_one_line(tmp_path):
    spiky = write("spiky", tmp_path)
    np.savez(tmp_path / "rows.npz", x=np.zeros((1, 3), np.float32))
    for words, expected in (
        (("export", spiky), "vocab_size is 128; programs read and write bytes"),
        (("generate", spiky, "--prompt", "a"), "has 128 tokens; generate reads and writes bytes"),
        (
            ("predict", spiky, tmp_path / "rows.npz"),
            "is a bundle of a language model; this command takes a",
        ),
        (
            ("fpga", spiky, "--board", "icebreaker"),
            "holds a language model, which is not a circuit",
        ),
        (("verify", spiky), "holds a model without an export; write one first: lutjax export"),
    ):
        assert expected in refusal(*words)
    lutjax.save({"w": np.ones(3, np.float32)}, tmp_path / "arrays")
    for words in (
        ("export", tmp_path / "arrays"),
        ("info", tmp_path / "arrays"),
        ("predict", tmp_path / "arrays", tmp_path / "rows.npz"),
        ("generate", tmp_path / "arrays", "--prompt", "a"),
        ("fpga", tmp_path / "arrays", "--board", "icebreaker"),
        ("save", tmp_path / "arrays", tmp_path / "other"),
    ):
        assert "is a bundle of arrays, not of a lutjax.models class" in refusal(*words)


def test_a_run_of_another_kind_is_a_damaged_bundle(tmp_path):
    folder = write("bundle", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["run"]["kind"] = "lm"
    (folder / "config.json").write_text(json.dumps(config))
    assert "a run of the kind lm does not train a LogicClassifier" in refusal("info", folder)


@pytest.mark.parametrize("kind", slow_except(RUNS, "digits"))
def test_load(kind, tmp_path):
    want = RUNS[kind](tmp_path / "run")
    model = lutjax.load(str(tmp_path / "run"))
    assert type(model) is type(want)
    states = (nnx.to_pure_dict(nnx.state(m, nnx.Not(nnx.RngState))) for m in (model, want))
    jax.tree.map(np.testing.assert_array_equal, *states)
    record = model.record
    assert (record.kind, record.folder, record.steps) == (kind, tmp_path / "run", 3)
    assert record.training.steps == 9
    assert record.model == want.config
    assert record.history == HISTORY
    with pytest.raises(AttributeError, match="loss"):
        _ = record.loss
    # Ready: in the mode for evaluation, and as an argument of transformed functions.
    want.eval()
    jitted = nnx.jit(call)
    np.testing.assert_array_equal(jitted(model), jitted(want))


def test_folders_that_hold_no_run(tmp_path, monkeypatch):
    ca_run(tmp_path / "run")
    (tmp_path / "notes.txt").write_text("none")
    for folder, kind, message in (
        (tmp_path / "ran", FileNotFoundError, r"load: the folder .*/ran does not exist"),
        (tmp_path, ValueError, r"is not the folder of a run, but holds 1: give .*/run\."),
        (tmp_path / "notes.txt", ValueError, r"notes.txt is a file; give the folder of a run"),
        (tmp_path / "run" / "checkpoints" / "3", ValueError, r"checkpoints/3 is .* give .*/run\."),
    ):
        with pytest.raises(kind, match=message):
            lutjax.load(folder)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"run/checkpoints is a part of a run: give run\."):
        lutjax.load("run/checkpoints")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "3" / "model")
    with pytest.raises(ValueError, match="is missing"):
        lutjax.load("run")


@pytest.mark.usefixtures("without_typechecking")
def test_a_folder_is_a_path():
    with pytest.raises(TypeError, match="load: folder is 3; expected a string or a Path"):
        lutjax.load(3)


MISSING = {
    "flax": "layers.nnx layers.linen models:LUTTransformer models:LogicCA optim.nnx optim.linen training.models",
    "haiku": "layers.haiku",
    "optax": "training.optimizers training.automaton training.classifier training.lm",
    "orbax": "training.checkpoints load",
    "matplotlib": "benchmark.report",
}
"""Attributes to request, keyed by the missing package."""
CODE = """
import importlib, sys
import lutjax
from lutjax import extras as _extras
for package, names in {missing}.items():
    before = set(sys.modules)
    sys.modules[package] = None
    for name in names.split():
        module, _, attribute = name.partition(":")
        try:
            if name == "load":
                lutjax.load(".")
            else:
                getattr(importlib.import_module(f"lutjax.{{module}}"), attribute or "__name__")
        except ModuleNotFoundError as error:
            said = str(error)
            assert said.startswith("lutjax."), (name, said)
            assert f"needs {{package}}, which is not installed: {{_extras.command(package)}}" in said, (name, said)
            assert error.name.partition(".")[0] == package and type(error) is ModuleNotFoundError
        else:
            raise AssertionError(name)
    for name in set(sys.modules) - before:
        if name.partition(".")[0] == "lutjax":
            del sys.modules[name]
    del sys.modules[package]
"""


def test_a_package_of_no_extra_is_no_matter_of_ours():
    with (
        pytest.raises(ModuleNotFoundError, match=r"^No module named 'no_such_package'$"),
        require_optional("this"),
    ):
        import no_such_package  # noqa: F401


def test_extras_are_those_of_the_package():
    """Compare the extras with pyproject.toml, because the installed metadata may be older."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for package, extra in EXTRAS.items():
        if package == "triton":  # comes with jax-triton's own requirements
            continue
        name = DISTRIBUTIONS.get(package, package)
        assert any(one.startswith(name) for one in project["optional-dependencies"][extra]), package


class TestSlow:
    def test_the_page_about_imports_has_the_output_of_its_commands(self, tmp_path):
        text = (ROOT / "docs" / "convert.md").read_text(encoding="utf-8")
        weight = np.eye(16, dtype=np.float32)[[1, 6, 7, 14]]
        wires = np.array([[0, 1, 2, 0], [1, 2, 0, 2]])
        save_file(
            {"0.weight": weight, "0.connections.indices": wires}, tmp_path / "model.safetensors"
        )
        model = tmp_path / "model"
        output(
            "import", "--from", "torchlogix", tmp_path / "model.safetensors", model, "--classes", 2
        )
        said = output("export", model, "--format", "verilog,c") + output("verify", model)
        blocks = re.findall(r"```text\n(.*?)```", text, re.DOTALL)
        shown = next(block for block in blocks if "the bundle holds" in block)
        lines = {re.sub(r" +[\d.]+ s$", "", line) for line in said.splitlines()}
        for line in shown.splitlines()[:3]:  # the others need tools
            assert re.sub(r" +[\d.]+ s$", "", line) in lines

    def test_automata_without_a_run(self, tmp_path):
        small = LogicCAConfig(channels=2, kernels=2, perception=(8, 2), update=(8, 2))
        lutjax.save(LogicCA(small, rngs=nnx.Rngs(0)), tmp_path / "ca")
        output("export", tmp_path / "ca", "--format", "verilog,html")
        assert re.search(
            "PASS +automaton.json = the model in JAX", output("verify", tmp_path / "ca")
        )
        assert "a bundle of a model without a run" in output("info", tmp_path / "ca")

    def test_language_models_and_bundles_of_other_runs(self, tmp_path):
        for kind in ("lm", "ca"):
            RUNS[kind](tmp_path / kind)
            output("save", tmp_path / kind, tmp_path / f"{kind}_saved")
        assert "Wrote" in output("export", tmp_path / "ca_saved", "--format", "json")
        assert " 0 failed" in output("verify", tmp_path / "ca_saved")
        output("export", tmp_path / "lm_saved")
        facts = json.loads(output("info", tmp_path / "lm_saved", "--json"))
        assert (facts["steps_done"], facts["bundle"]["model"]) == (3, "LUTTransformer")
        lutjax.save(
            LUTTransformer(lutjax.load(tmp_path / "lm").config, rngs=nnx.Rngs(0)),
            tmp_path / "alone",
        )
        assert "a bundle holds no text" in output("export", tmp_path / "alone")
        assert " 0 failed" in output("verify", tmp_path / "alone")
        output("generate", tmp_path / "alone", "--prompt", "a", "--bytes", 2)

    def test_missing_packages_name_the_extra(self):
        subprocess.run(
            [sys.executable, "-c", CODE.format(missing=MISSING)], check=True, timeout=300
        )

    @pytest.mark.parametrize("kind", CLASSIFIERS)
    def test_classifiers(self, kind, tmp_path):
        folder = write(kind, tmp_path)
        actual = model_folders.read(folder)
        packed, has_data = actual.model.packed(), kind == "run"
        assert (actual.is_bundle, actual.has_data) == (not has_data, has_data)

        said = output("export", folder, "--format", "verilog,c,html,blif")
        export = folder / exporting.FOLDER
        vectors = Vectors.from_json((export / VECTORS).read_bytes())
        assert ("the bundle holds no samples" in said) == (not has_data)
        tested = f"the test part of {tmp_path / 'data.npz'}"
        assert vectors.source == (tested if has_data else exporting.RANDOM)
        first = vectors.inputs["x"]
        circuit = netlist_json.read(export / f"{exporting.name_of(folder)}.json")
        np.testing.assert_array_equal(circuit(first), vectors.outputs["y"][:, 0])
        if not has_data:
            bits = jnp.asarray(first, bool)
            words = lutjax.pack_bits(bits.T)
            np.testing.assert_array_equal(
                packed.from_words(words)[: len(first)], vectors.outputs["y"][:, 0]
            )
            assert len(np.unique(vectors.outputs["y"])) > 1
        for place in (export, folder):  # a model folder stands for its export
            proved = output("verify", place)
            assert re.search(r"PASS +\w+\.json = the model in JAX", proved)
            assert " 0 failed" in proved

        assert "model: " in output("info", folder)
        shape = predictions.form_of(actual.model).shape
        rows = np.random.default_rng(1).integers(0, 2, (5, *shape)).astype(np.uint8)
        np.savez(tmp_path / "rows.npz", x=rows)
        lines = output("predict", folder, tmp_path / "rows.npz").splitlines()
        expected = np.asarray(packed(jnp.asarray(rows, jnp.float32)))
        assert [line.split(",")[0] for line in lines[1:]] == [str(number) for number in expected]
        output("save", folder, tmp_path / "again")
        if kind == "difflogic":  # bundles of imports are served, too
            serving = pytest.importorskip(
                "lutjax.serving", reason="the extra serve is not installed"
            )
            client = pytest.importorskip(
                "starlette.testclient", reason="starlette has no test client"
            )
            with client.TestClient(serving.application(actual.model, "m")) as requests:
                answer = requests.post("/v1/classify", json={"rows": rows.tolist()}).json()
            assert answer["classes"] == [str(number) for number in expected]
            assert answer["names"] == ["0", "1", "2", "3", "4"]
        assert "host" in output(
            "fpga", folder, "--board", "icebreaker", "--out", tmp_path / "board"
        )

    @pytest.mark.parametrize("kind", CLASSIFIERS[1:4:2])
    def test_numbers_of_bundles(self, kind, tmp_path):
        folder = write(kind, tmp_path)
        assert "--inputs" not in output(
            "export", folder, "--inputs", "fixed16.8", "--format", "json"
        )
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

    def test_a_changed_bundle_proves_nothing(self, tmp_path):
        folder = write("difflogic", tmp_path)
        output("export", folder, "--format", "json", "--out", tmp_path / "out")
        manifest = deployment.read_manifest(tmp_path / "out")
        assert manifest["run"]["digest"] == model_folders.digest_of(folder)
        lutjax.save(gates_of(18, n_classes=5, layers=(20,)), folder)
        assert "holds another model than the exported one" in output("verify", tmp_path / "out")
