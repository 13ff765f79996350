"""Kernel test fixtures."""

import pytest

from lutjax.values._ids import trusted_ids


@pytest.fixture(autouse=True)
def unchecked_ids():
    """Pass unchecked ids to kernels, like calls with traced ids: kernels clamp ids and never read other memory."""
    with trusted_ids():
        yield


@pytest.fixture
def interpreted():
    """Interpret Pallas kernels."""
    import pallas_interpreter

    with pallas_interpreter.interpreted():
        yield


@pytest.fixture
def triton_interpreted():
    """Interpret Triton kernels."""
    import triton_interpreter

    with triton_interpreter.interpreted():
        yield


@pytest.fixture
def kernel_cache(monkeypatch, tmp_path):
    """Keep Triton's compiled kernels in a per-test folder."""
    import triton

    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))


@pytest.fixture
def launches(monkeypatch, kernel_cache):
    """Record Triton kernel launches without running them; kernels may be compiled."""
    import triton_compiler

    yield from triton_compiler.recorded_launches(monkeypatch)


@pytest.fixture
def beside_a_gpu(monkeypatch):
    """Simulate a GPU host: the interpreter runs GPU kernels on memory in this process."""
    from lutjax.dispatch.registry import Backend, Device
    from lutjax.kernels import _triton
    from lutjax.tables import _registered, host

    class NoDriver:
        register = unregister = wait = copy_out = copy_in = staticmethod(lambda *_: None)

    monkeypatch.setattr(_registered, "driver", NoDriver)
    monkeypatch.setattr(_triton, "unfit_packages", lambda: None)
    monkeypatch.setattr(host, "devices_of", lambda _: (Device(Backend.GPU, "NVIDIA H200"),))
