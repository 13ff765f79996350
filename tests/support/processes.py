"""Programs of several processes on this machine, for tests: ``processes.py COORDINATOR N I VICTIM FUNCTION ARGUMENTS`` is one of
them.
"""

import itertools
import json
import os
import pkgutil
import signal
import socket
import subprocess
import sys
import time

import pytest
from folders import ROOT, TESTS

SECONDS = 240
"""Longest time of a program; then its processes are killed and the test fails."""

LOST_AFTER = 10


def held_port():
    """Return a socket, and a port that no other program gets before it is closed; the coordinator may listen there."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, getattr(socket, "SO_REUSEPORT", socket.SO_REUSEADDR), 1)
    try:
        held.bind(("127.0.0.1", 0))
    except OSError as error:
        held.close()
        pytest.skip(f"no process can be reached at 127.0.0.1: {error.strerror}")
    return held, held.getsockname()[1]


class Processes:
    """Processes that run ``function(*arguments)`` of a module of the tests, after they have joined. A context manager that kills them.

    Args:
      function: ``module:name``; or ``lutjax``, the command of these words, which joins them.
      arguments: of JSON; ``{i}`` in a string is the number of the process.
      n: number of processes.
      devices: of each.
      victim: ``(i, name, k, how)``: process i is killed, or raises an error, where it calls a function of `hosts` for the k-th time.
      cache: folder of compiled programs.
    """

    def __init__(self, function, *arguments, n=2, devices=2, victim=(-1, "agree", 0, "kill"), cache=None):
        self._held, port = held_port()
        self.coordinator = f"127.0.0.1:{port}"
        flags = [flag for flag in os.environ["XLA_FLAGS"].split() if "device_count" not in flag]
        environment = {
            # A proxy of the machine is no way to a process of it.
            **{name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")},
            "XLA_FLAGS": " ".join([*flags, f"--xla_force_host_platform_device_count={devices}"]),
            "JAX_PLATFORMS": "cpu",
            "PYTHONUNBUFFERED": "1",
            "PYTHONPATH": os.pathsep.join(
                [str(ROOT), *(str(f) for f in TESTS.iterdir()), os.environ.get("PYTHONPATH", "")]
            ),
        }
        if cache is not None:
            environment |= {
                "JAX_COMPILATION_CACHE_DIR": str(cache),
                "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            }
        words = [json.dumps(victim), function, *map(json.dumps, arguments)]
        self.processes = [
            subprocess.Popen(
                [sys.executable, __file__, self.coordinator, str(n), str(i), *words],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                env=environment,
            )
            for i in range(n)
        ]

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for process in self.processes:
            process.kill()
            process.communicate()
        self._held.close()

    def signal(self, i, number=signal.SIGKILL):
        """Send a signal to one of them."""
        self.processes[i].send_signal(number)

    def wait(self):
        """Return status and output of each, as soon as all have ended."""
        deadline = time.monotonic() + SECONDS
        found = [p.communicate(timeout=max(1, deadline - time.monotonic()))[0] for p in self.processes]
        return [(p.returncode, text) for p, text in zip(self.processes, found, strict=True)]


def run(function, *arguments, **options):
    """Run a program to its end; return the outputs of its processes, none of which may fail."""
    with Processes(function, *arguments, **options) as processes:
        found = processes.wait()
    assert not any(status for status, _ in found), found
    return [text for _, text in found]


def fail_at(hosts, name, last, how):
    """Let this process fail where it calls a function of `hosts` for the `last`-th time."""
    function, times = getattr(hosts, name), itertools.count(1)

    def fail(*arguments):
        if next(times) == last:
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise OSError(28, "No space left on device")
        return function(*arguments)

    setattr(hosts, name, fail)


def main(coordinator, n, i, victim, function, *arguments):
    import jax

    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    from lutjax.training import hosts

    hosts.LOST_AFTER = LOST_AFTER
    victim, name, last, how = json.loads(victim)
    if victim == int(i):
        fail_at(hosts, name, last, how)
    words = [word.replace("{i}", i) if isinstance(word, str) else word for word in map(json.loads, arguments)]
    if function == "lutjax":
        from lutjax import cli

        sys.argv[1:] = [*words, "--coordinator", coordinator, "--processes", n, "--process", i]
        cli.main()
    else:
        hosts.initialize(coordinator, int(n), int(i))
        pkgutil.resolve_name(function)(*words)


if __name__ == "__main__":
    main(*sys.argv[1:])
