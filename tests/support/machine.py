"""Test device selection: the CPU or, with ``-m gpu``, the GPU, shared by all workers.

Test collection touches no device. A separate process detects the devices once for all workers in a run, so they
all collect the same tests, regardless of which worker first uses a device.
"""

import json
import os
import re
import subprocess
import sys

import jax
import pytest

_KNOWN = "LUTJAX_TESTS_RUN_ON"  # what the first process found, for its workers
_ASK = "import jax, json; d = jax.local_devices()[0]; print(json.dumps([d.platform, (d.memory_stats() or {}).get('bytes_limit')]))"
_OF_A_WORKER = 4e9  # bytes of a device that a worker may need
_CPU_WORKERS = 4  # more share few cores with the threads of each
_NONE = "none while tests are collected"

needs_gpu = pytest.mark.skipif(
    "jax.default_backend() != 'gpu'", reason="needs a GPU, and JAX sees none"
)


def needs_devices(n):
    """Return marks for tests on a mesh."""
    return pytest.mark.skipif(
        f"jax.device_count() < {n}",
        reason=f"needs a mesh of {n} devices, and this machine has fewer",
    )


def backend():
    """Return this run's backend by its JAX name: ``"cpu"`` or ``"gpu"``."""
    return _known()[0]


def workers(cores, name, memory):
    """Return the number of worker processes for these cores and this amount of device memory."""
    return max(1, min(cores, _CPU_WORKERS if name == "cpu" else int(memory / _OF_A_WORKER)))


def is_for_a_gpu(markers):
    """Return True if the words after ``-m`` select tests worth running on a GPU."""
    return bool(re.search(r"(?<!not )\bgpu\b", markers))


def _known():
    name, memory = json.loads(os.environ[_KNOWN])
    return name, memory or 0


def _choose(config):
    """Choose the backend for this run, before JAX looks for devices."""
    if _KNOWN in os.environ:
        return
    result = '["cpu", null]'
    if is_for_a_gpu(config.option.markexpr) or os.environ.get("JAX_PLATFORMS", "cpu") != "cpu":
        os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # the workers share a device
        asked = subprocess.run(
            [sys.executable, "-c", _ASK], stdout=subprocess.PIPE, text=True, check=True
        )
        result = asked.stdout.splitlines()[-1]
    os.environ[_KNOWN] = result
    if backend() == "cpu":
        os.environ["JAX_PLATFORMS"] = "cpu"  # also for the processes that tests start


# ------------------------------------------------------------------------------------- hooks, which conftest.py takes over
@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config):
    _choose(config)
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    return workers(cores, *_known())


def pytest_configure(config):
    _choose(config)
    jax.config.update("jax_platforms", os.environ.get("JAX_PLATFORMS"))


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    platforms = jax.config.jax_platforms
    jax.config.update("jax_platforms", _NONE)
    try:
        return (yield)
    finally:
        jax.config.update("jax_platforms", platforms)


def pytest_markeval_namespace():
    """Return names for the conditions in `needs_gpu` and `needs_devices`."""
    return {"jax": jax}
