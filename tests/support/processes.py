"""Multi-process test programs on this machine.

``processes.py COORDINATOR N I VICTIM FUNCTION ARGUMENTS`` is one process.
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
"""Timeout in seconds; after it the processes are killed and the test fails."""

LOST_AFTER = 10


def held_port():
    """Return a socket and its port, reserved until the socket is closed; the coordinator may listen on it."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, getattr(socket, "SO_REUSEPORT", socket.SO_REUSEADDR), 1)
    try:
        held.bind(("127.0.0.1", 0))
    except OSError as error:
        held.close()
        pytest.skip(f"no process can be reached at 127.0.0.1: {error.strerror}")
    return held, held.getsockname()[1]


class Processes:
    """Context manager for processes: each joins, then runs ``function(*arguments)`` from a test module. Exiting kills them.

    Args:
      function: ``module:name``, or ``lutjax`` to run the command with these words and join inside it.
      arguments: JSON values; ``{i}`` in a string is replaced by the process number.
      n: number of processes.
      devices: devices per process.
      victim: ``(i, name, k, how)``: process i is killed, or raises an error, at its k-th call to function `name` in `hosts`.
      cache: folder for compiled programs.
    """

    def __init__(
        self, function, *arguments, n=2, devices=2, victim=(-1, "agree", 0, "kill"), cache=None
    ):
        self._held, port = held_port()
        self.coordinator = f"127.0.0.1:{port}"
        flags = [flag for flag in os.environ["XLA_FLAGS"].split() if "device_count" not in flag]
        environment = {
            # A proxy of the machine is no way to a process of it.
            **{
                name: value
                for name, value in os.environ.items()
                if not name.lower().endswith("_proxy")
            },
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
        """Send a signal to one process."""
        self.processes[i].send_signal(number)

    def wait(self):
        """Return each process's status and output, as soon as all have ended."""
        deadline = time.monotonic() + SECONDS
        result = [
            p.communicate(timeout=max(1, deadline - time.monotonic()))[0] for p in self.processes
        ]
        return [(p.returncode, text) for p, text in zip(self.processes, result, strict=True)]


def run(function, *arguments, **options):
    """Run a program to its end and return its processes' outputs; raise if a process fails."""
    with Processes(function, *arguments, **options) as processes:
        result = processes.wait()
    assert not any(status for status, _ in result), result
    return [text for _, text in result]


def fail_at(hosts, name, last, how):
    """Make this process fail at its `last`-th call to a function in `hosts`."""
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
    words = [
        word.replace("{i}", i) if isinstance(word, str) else word
        for word in map(json.loads, arguments)
    ]
    if function == "lutjax":
        from lutjax import cli

        sys.argv[1:] = [*words, "--coordinator", coordinator, "--processes", n, "--process", i]
        cli.main()
    else:
        hosts.initialize(coordinator, int(n), int(i))
        pkgutil.resolve_name(function)(*words)


if __name__ == "__main__":
    main(*sys.argv[1:])
