"""From a trained run to an exported folder and its proofs, and training that counts gates."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from click.testing import CliRunner, Result

from lutjax import circuits
from lutjax.circuits import deployment, proofs
from lutjax.circuits.circuit import Circuit
from lutjax.circuits.deployment import MANIFEST, VECTORS, Vectors
from lutjax.cli._main import cli
from lutjax.models import LogicClassifierConfig
from lutjax.training import automaton_runs, classifier, classifier_runs, export as exporting, models
from lutjax.training.automaton_runs import Automaton
from lutjax.training.classifier_runs import Classifier
from lutjax.training.samples import samples

pytestmark = pytest.mark.usefixtures("compilation_cache_directory")


def lutjax_command(*words: object) -> Result:
    result = CliRunner().invoke(cli, [str(word) for word in words])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def message(result: Result) -> str:
    return " ".join(result.output.replace("│", "").split())


def images(n: int = 50) -> tuple[np.ndarray, np.ndarray]:
    """Images of 2 x 3 whole numbers, of three classes."""
    y = np.arange(n) % 3
    x = np.random.default_rng(0).integers(0, 5, (n, 2, 3))
    x[np.arange(n), 0, y] += 7
    return x, y


def write_classifier(folder: Path, x: np.ndarray, y: np.ndarray, **fields: Any) -> Path:
    """Write the run of a classifier as it is before the first step; return its folder."""
    np.savez(folder / "data.npz", x=x, y=y)
    options = {"layers": (24, 24), "n_thresholds": 2, "steps": 1, "noise": 2.0, **fields}
    experiment = Classifier.new(options, folder / "data.npz")
    models.save(folder / "run", 1, experiment.run.init(), experiment.record)
    return folder / "run"


def write_automaton(folder: Path, *, channels: int = 1, **fields: Any) -> Path:
    """Write the run of an automaton whose gates are random; return its folder."""
    options = {"kernels": 2, "perception": (8, 2), "update": (12, channels), "channels": channels, **fields}
    experiment = Automaton.new(options, "life" if channels == 1 else "checkerboard")
    state = experiment.run.init()
    logits = np.random.default_rng(3).normal(size=state.params["logits"].shape).astype(np.float32)
    params = {"logits": jnp.asarray(logits)}
    state = state._replace(params=params, optimizer=state.optimizer._replace(best=params))
    models.save(folder / "run", 1, state, experiment.record)
    return folder / "run"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Runs, and the folders that they were exported to. Not to be changed."""
    found = {}
    for kind in ("digits", "automaton"):
        folder = tmp_path_factory.mktemp(kind)
        run = write_classifier(folder, *images()) if kind == "digits" else write_automaton(folder)
        result = lutjax_command("export", "--run", run, "--out", folder / "out", "--registers", 3)
        assert result.exit_code == 0, result.output
        assert f"lutjax verify {folder / 'out'}" in result.output
        found |= {f"{kind} run": run, kind: folder / "out"}
    return found


@pytest.mark.parametrize("kind", ["digits", "automaton"])
def test_export_writes_every_format(kind: str, folders: dict[str, Path]) -> None:
    folder = folders[kind]
    endings = (".v", "_testbench.v", ".blif", ".aig", ".aag", ".json", ".c", ".h", "_test.c", ".html", ".dot")
    names = {f"{kind}{ending}" for ending in endings} | {VECTORS, "Makefile"}
    assert {path.name for path in folder.iterdir()} == names | {MANIFEST}
    manifest = deployment.read_manifest(folder)
    assert set(manifest["files"]) == names
    assert manifest["run"]["folder"] == str(folders[f"{kind} run"].absolute())
    assert manifest["registers"] == 3
    circuit = circuits.from_json((folder / f"{kind}.json").read_text())
    assert manifest["inputs"] == deployment.interface(circuit.inputs)
    assert manifest["statistics"]["gates"] == len(circuit) > 10
    assert manifest["latency"] == -(-circuit.depth // 3)
    vectors = Vectors.from_json((folder / VECTORS).read_text())
    assert len(vectors) == (10 if kind == "digits" else 512)
    assert len(np.unique(vectors.outputs["y"])) > 1


@pytest.mark.parametrize("kind", ["digits", "automaton"])
def test_every_proof_of_an_export_passes(kind: str, folders: dict[str, Path]) -> None:
    result = lutjax_command("verify", folders[kind])
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert lines[-1].startswith(f"{sum(line.startswith('PASS') for line in lines)} passed, 0 failed")
    for name in ("digests", f"{kind}.json in NumPy = {VECTORS}", "the model in JAX", f"{kind}.aag in NumPy"):
        assert any(line.startswith("PASS") and name in line for line in lines), name
    if kind == "automaton":
        assert any("all 2^9 inputs" in line for line in lines)
        assert "the Game of Life" not in result.output  # its gates are random
