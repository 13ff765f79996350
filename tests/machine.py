"""The machine that tests run on: its CPU, or with ``-m gpu`` its GPU, which the workers share.

Nothing touches a device while tests are collected. Which ones there are says a process of its own, once for all workers of a run: they
collect the same tests, whichever of them could use a device first.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import jax
import pytest

_KNOWN = "LUTJAX_TESTS_RUN_ON"  # what the first process found, for its workers
_ASK = "import jax, json; d = jax.local_devices()[0]; print(json.dumps([d.platform, (d.memory_stats() or {}).get('bytes_limit')]))"
_OF_A_WORKER = 4e9  # bytes of a device that a worker may need
_CPU_WORKERS = 4  # more share few cores with the threads of each
_NONE = "none while tests are collected"

needs_gpu = pytest.mark.skipif("jax.default_backend() != 'gpu'", reason="needs a GPU, and JAX sees none")


def needs_devices(n: int) -> pytest.MarkDecorator:
    """Mark of tests of a mesh."""
    return pytest.mark.skipif(
        f"jax.device_count() < {n}", reason=f"needs a mesh of {n} devices, and this machine has fewer"
    )


def backend() -> str:
    """Return the backend that this run is for, as JAX names it: ``"cpu"`` or ``"gpu"``."""
    return str(json.loads(os.environ[_KNOWN])[0])


def _asked(config: pytest.Config) -> bool:
    """Return whether tests are selected that are worth running on a GPU."""
    return bool(re.search(r"(?<!not )\bgpu\b", config.option.markexpr))


def prepare(config: pytest.Config) -> tuple[str, float]:
    """Choose the backend of this run, before JAX looks for devices; return it, and its memory in bytes."""
    if _KNOWN not in os.environ:
        found: list[Any] = ["cpu", None]
        if _asked(config) or os.environ.get("JAX_PLATFORMS", "cpu") != "cpu":
            os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # the workers share a device
            text = subprocess.run([sys.executable, "-c", _ASK], stdout=subprocess.PIPE, check=True).stdout
            found = json.loads(text.splitlines()[-1])
        os.environ[_KNOWN] = json.dumps(found)
        if found[0] == "cpu":
            os.environ["JAX_PLATFORMS"] = "cpu"
    platforms = os.environ.get("JAX_PLATFORMS")
    jax.config.update("jax_platforms", platforms)
    name, memory = json.loads(os.environ[_KNOWN])
    return name, memory or 0


# ------------------------------------------------------------------------------------- hooks, which conftest.py takes over
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Return the number of workers of ``--numprocesses=auto``: a core each, and on a GPU some of its memory."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    name, memory = prepare(config)
    return max(1, min(cores, _CPU_WORKERS if name == "cpu" else int(memory / _OF_A_WORKER)))


def pytest_configure(config: pytest.Config) -> None:
    prepare(config)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    platforms = jax.config.jax_platforms  # type: ignore[attr-defined]
    jax.config.update("jax_platforms", _NONE)
    try:
        return (yield)
    finally:
        jax.config.update("jax_platforms", platforms)


def pytest_markeval_namespace() -> dict[str, Any]:
    """Return what conditions of `needs_gpu` name."""
    return {"jax": jax}
