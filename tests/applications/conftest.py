"""Fixtures of the application tests."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small text file. Not to be changed."""
    from small_runs import FOX

    path = tmp_path_factory.mktemp("text") / "fox.txt"
    path.write_bytes(FOX)
    return path
