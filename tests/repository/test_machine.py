"""Tests for device selection: collection touches no device, and workers share a GPU."""

import json
import os
import subprocess
import sys

import cases
import machine
import pytest
from folders import TESTS

EARLY = "import jax.numpy as jnp\n\nONE = jnp.ones(3)\n\n\ndef test_early():\n    pass\n"
LATE = "import jax.numpy as jnp\n\n\ndef test_late():\n    assert jnp.ones(3).sum() == 3\n"


def test_a_module_that_touches_a_device_is_not_collected(tmp_path):
    """Check `machine.pytest_collection`, which treats every test file this way in any run."""
    for name, text in (("early", EARLY), ("late", LATE)):
        (tmp_path / f"test_{name}.py").write_text(text)
    options = [
        "-p",
        "machine",
        "-p",
        "no:cacheprovider",
        "--continue-on-collection-errors",
        "--rootdir",
        ".",
    ]
    result = subprocess.run(
        [sys.executable, "-m", "pytest", *options],
        env={
            **os.environ,
            "PYTHONPATH": str(TESTS / "support"),
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        },
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert "1 passed, 1 error" in result.stdout, result.stdout
    assert "test_early.py:3" in result.stdout
    assert "Unable to initialize backend 'none while tests are collected'" in result.stdout


@pytest.mark.parametrize(("markers", "expected"), [
    ("gpu", True),
    ("slow and gpu", True),
    ("not gpu", False),
    ("slow and not gpu", False),
    ("", False),
])  # fmt: skip
def test_markers_that_ask_for_a_gpu(markers, expected):
    assert machine.is_for_a_gpu(markers) == expected


@pytest.mark.parametrize(("cores", "name", "memory", "expected"), [
    (16, "gpu", 141e9, 16),
    (16, "gpu", 22e9, 5),
    (4, "gpu", 141e9, 4),
    (8, "gpu", 1e9, 1),
    (16, "cpu", 0, 4),
    (2, "cpu", 0, 2),
])  # fmt: skip
def test_workers(cores, name, memory, expected):
    assert machine.workers(cores, name, memory) == expected


@pytest.mark.parametrize(("name", "runs"), [("cpu", False), ("gpu", True)])
def test_all_workers_collect_the_tests_of_one_backend(name, runs, monkeypatch):
    """Check that workers reuse the backend found by the first process, without querying JAX."""
    monkeypatch.setenv("LUTJAX_TESTS_RUN_ON", json.dumps([name, None]))
    assert ("triton" in cases.implementations("lookup")) == runs
