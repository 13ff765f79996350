"""Programs of several processes on this machine, for tests: ``processes.py MODULE:FUNCTION ARGUMENTS`` is one of them."""

import json
import os
import pkgutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

SECONDS = 120
"""Longest time of a program; then its processes are killed and the test fails."""

LOST_AFTER = 10


class Processes:
    """Processes that run ``function(*arguments)`` of a module of the tests, after they have joined. A context manager that kills them.

    Args:
      function: ``module:name``.
      arguments: of JSON.
      n: number of processes.
      devices: of each.
    """

    def __init__(self, function, *arguments, n=2, devices=2, words=None):
        with socket.socket() as free:
            free.bind(("localhost", 0))
            self.coordinator = f"localhost:{free.getsockname()[1]}"
        flags = [f for f in os.environ["XLA_FLAGS"].split() if "device_count" not in f]
        environment = {
            **os.environ,
            "XLA_FLAGS": " ".join([*flags, f"--xla_force_host_platform_device_count={devices}"]),
            "JAX_PLATFORMS": "cpu",
            "PYTHONUNBUFFERED": "1",
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]),
        }
        self.processes = [
            subprocess.Popen(
                [
                    sys.executable,
                    __file__,
                    self.coordinator,
                    str(n),
                    str(i),
                    function,
                    *map(json.dumps, arguments),
                ],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
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

    def kill(self, i, number=signal.SIGKILL):
        """Send a signal to one of them."""
        os.kill(self.processes[i].pid, number)

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


def main(coordinator, n, i, function, *arguments):
    import jax

    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    from lutjax.training import hosts

    hosts.initialize(coordinator, int(n), int(i), lost_after=LOST_AFTER)
    pkgutil.resolve_name(function)(*map(json.loads, arguments))


if __name__ == "__main__":
    main(*sys.argv[1:])
