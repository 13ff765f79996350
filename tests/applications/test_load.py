"""The model of a run, of whatever kind, by one function; and what a package that is missing says."""

import shutil
import subprocess
import sys
import tomllib

import jax
import numpy as np
import pytest
from cases import slow_among
from flax import nnx
from folders import ROOT
from small_runs import HISTORY, RUNS, ca_run, call

import lutjax

pytestmark = pytest.mark.usefixtures("compilation_cache_directory")


@pytest.mark.parametrize("kind", slow_among(RUNS, "ca"))
def test_load(kind, tmp_path):
    want = RUNS[kind](tmp_path / "run")
    model = lutjax.load(str(tmp_path / "run"))
    assert type(model) is type(want)
    jax.tree.map(
        np.testing.assert_array_equal,
        *(nnx.to_pure_dict(nnx.state(m, nnx.Not(nnx.RngState))) for m in (model, want)),
    )
    record = model.record
    assert (record.kind, record.folder, record.steps) == (kind, tmp_path / "run", 3)
    assert record.training.steps == 9
    assert record.model == want.config
    assert record.history == HISTORY
    with pytest.raises(AttributeError, match="loss"):
        _ = record.loss
    # Ready: in the mode for evaluation, and as an argument of transformed functions.
    want.eval()
    np.testing.assert_array_equal(call(model), call(want))
    np.testing.assert_array_equal(nnx.jit(call)(model), call(want))


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


# ------------------------------------------------------------------------------------- packages that are missing
MISSING = {  # what is asked for, by the packages that are then missing, and the extra that brings them
    ("flax", "flax"): (
        "lutjax.layers.nnx",
        "lutjax.layers.linen",
        "lutjax.models.LUTTransformer",
        "lutjax.models.LogicCA",
        "lutjax.optim.nnx",
        "lutjax.optim.linen",
        "lutjax.training.models",
    ),
    ("haiku", "haiku"): ("lutjax.layers.haiku",),
    ("optax", "apps"): (
        "lutjax.optim.Optimizer",
        "lutjax.training.optimizers",
        "lutjax.training.automaton",
        "lutjax.training.classifier",
        "lutjax.training.lm",
    ),
    ("orbax", "apps"): ("lutjax.training.checkpoints", "lutjax.load"),
    ("matplotlib", "apps"): ("lutjax.benchmark.report",),
}
CODE = """
import importlib, sys
import lutjax
from lutjax import extras as _extras
missing = {missing}
for (package, extra), names in missing.items():
    before = set(sys.modules)
    sys.modules[package] = None
    for name in names:
        try:
            if name == "lutjax.load":
                lutjax.load(".")
            elif name.startswith("lutjax.models."):
                getattr(importlib.import_module("lutjax.models"), name.rpartition(".")[2])
            else:
                importlib.import_module(name)
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


@pytest.mark.slow
def test_missing_packages_name_the_extra():
    subprocess.run([sys.executable, "-c", CODE.format(missing=MISSING)], check=True, timeout=300)


def test_a_package_of_no_extra_is_no_matter_of_ours():
    from lutjax.extras import needed_by

    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'no_such_package'$"), needed_by("this"):
        import no_such_package  # noqa: F401


def test_extras_are_those_of_the_package():
    """Compare the extras with those of pyproject.toml: the installed metadata may be older."""
    from lutjax.extras import DISTRIBUTIONS, EXTRAS

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for package, extra in EXTRAS.items():
        if package == "triton":  # comes with jax-triton's own requirements
            continue
        name = DISTRIBUTIONS.get(package, package)
        assert any(one.startswith(name) for one in project["optional-dependencies"][extra]), package
