"""Fixtures of the kernel tests."""

from collections.abc import Iterator

import pytest

from lutjax.values._ids import trusted_ids


@pytest.fixture(autouse=True)
def unchecked_ids() -> Iterator[None]:
    """Pass any ids to kernels, as calls with traced ids do: kernels clamp ids and never read other memory."""
    with trusted_ids():
        yield


@pytest.fixture
def interpreted() -> Iterator[None]:
    """Interpret Pallas kernels; modules of Triton kernels have a fixture of this name too."""
    import pallas_interpreter

    with pallas_interpreter.interpreted():
        yield
