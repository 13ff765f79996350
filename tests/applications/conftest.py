"""Runs for each model kind, trained once by the command and read-only for tests."""

import gzip

import numpy as np
import pytest
import small_runs


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """Small text file."""
    path = tmp_path_factory.mktemp("text") / "fox.txt"
    path.write_bytes(small_runs.FOX)
    return path


@pytest.fixture(scope="session")
def lm_run(text, tmp_path_factory):
    words = ("--text", text, *small_runs.LM_SIZES, *small_runs.LM_STEPS)
    return small_runs.finished(tmp_path_factory.mktemp("lm"), "lm", *words)


@pytest.fixture(scope="session")
def table_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("table")
    path = folder / "table.csv.gz"
    path.write_bytes(gzip.compress(small_runs.table_text().encode("latin-1")))
    return small_runs.finished(folder, "classify", "--data", path, *small_runs.TABLE)


@pytest.fixture(scope="session")
def digits_run(tmp_path_factory):
    folder, whole = tmp_path_factory.mktemp("digits"), small_runs.blobs()
    np.savez(folder / "blobs.npz", x=whole.x.reshape(-1, 2, 3), y=whole.y)
    return small_runs.finished(folder, "digits", "--data", folder / "blobs.npz", *small_runs.DIGITS)


@pytest.fixture(scope="session")
def tree_run(tmp_path_factory):
    folder, whole = tmp_path_factory.mktemp("trees"), small_runs.images(n_channels=2)
    np.savez(folder / "images.npz", x=whole.x.reshape(-1, 4, 4, 2).astype(np.uint8), y=whole.y)
    return small_runs.finished(
        folder, "classify", "--data", folder / "images.npz", *small_runs.TREES
    )


@pytest.fixture(scope="session")
def automaton_run(tmp_path_factory):
    return small_runs.finished(tmp_path_factory.mktemp("ca"), "ca", *small_runs.CA)
