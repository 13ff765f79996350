"""Tables larger than device memory: `python benchmarks/host_memory_larger.py`.

Trains a GPT whose host-resident n-gram tables exceed GPU memory, in a process that writes one
checkpoint, continues and is killed (SIGKILL). A second process resumes from the checkpoint. Its
losses must equal the losses of the first process in the same steps, bit for bit; then it generates
text. Both processes initialize all rows. `--xla_gpu_deterministic_ops` makes XLA compute the same
bits in every process.

`--gigabytes` sets the table size. Both processes together take about two minutes with 16 cores and
90 GB.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from harness import parse  # beside this file

from lutjax.tables.host import n_threads
from lutjax.training import lm_runs, models, runs
from lutjax.training.lm_runs import LanguageModel

ORDERS, HEADS, WIDTH = (2, 3, 4), 2, 128
N_TABLES = len(ORDERS) * HEADS

CHECKPOINT, STEPS = 10, 20
SIZES = {
    "features": 512,
    "context": 256,
    "n_layers": 6,
    "n_heads": 8,
    "batch_size": 16,
    "dtype": "bfloat16",
}
SMALL = {"features": 32, "context": 32, "n_layers": 1, "n_heads": 2, "batch_size": 4}


def log(start: float, what: str) -> None:
    print(f"{time.perf_counter() - start:.1f} s: {what}", flush=True)


def losses(run: Any, state: Any, first: int, start: float) -> Iterator[tuple[int, Any]]:
    """Train, and print the bits of each loss."""
    for step in range(first, STEPS):
        began = time.perf_counter()
        state, loss = run.advance(state, step, 1)
        bits, seconds = float(np.asarray(loss)).hex(), time.perf_counter() - began
        print(f"loss {step} {bits} {1e3 * seconds:.1f} ms", flush=True)
        yield step + 1, state
    log(start, f"trained steps {first} to {STEPS - 1}")


def fields_of(rows: int, small: bool) -> dict[str, Any]:
    memory = {
        "orders": ORDERS,
        "heads": HEADS,
        "width": WIDTH,
        "rows": rows,
        "layers": (0,),
        "placement": "host",
    }
    memory |= {"depth": 1, "optimizer": "row_adagrad"}
    training = {
        "optimizer": "adamw",
        "learning_rate": 1e-3,
        "steps": STEPS,
        "feed_forward": "dense",
    }
    named = {f"memory_{name}": value for name, value in memory.items()}
    return {**(SMALL if small else SIZES), **training, "memory": True, **named}


def first_process(folder: Path, rows: int, small: bool) -> None:
    """Train to the end, write a checkpoint on the way, and wait to be killed."""
    start = time.perf_counter()
    experiment = LanguageModel.create(fields_of(rows, small), folder / "text", "gpt")
    run = experiment.run
    [(table, _)] = run.structure.host_tables.values()
    state = run.init()
    log(start, f"drew {table}, {table.nbytes / 1e9:.1f} GB, by {n_threads()} threads")
    for done, last in losses(run, state, 0, start):
        if done == CHECKPOINT:
            models.save(folder, done, last, experiment.record, run)
            files = [path for path in folder.rglob("*") if path.is_file()]
            log(
                start,
                f"wrote a checkpoint of {sum(path.stat().st_size for path in files) / 1e9:.2f} GB",
            )
    device = jax.local_devices()[0]
    memory = device.memory_stats() or {}
    limit, peak = (memory.get(name, 0) for name in ("bytes_limit", "peak_bytes_in_use"))
    sizes = f"may use {limit / 1e9:.1f} GB and used {peak / 1e9:.2f} GB"
    print(
        f"tables of {table.nbytes / 1e9:.1f} GB beside {device.device_kind}, of whose memory JAX "
        f"{sizes}"
    )
    print("waits", flush=True)
    signal.pause()


def second_process(folder: Path) -> None:
    """Resume, train to the end, and generate."""
    start = time.perf_counter()
    step, record = runs.read(folder, lm_runs.Record)
    experiment = LanguageModel.from_record(record)
    run = experiment.run
    state = models.restore(folder, step, run)
    log(start, f"resumed after {step} steps")
    for _, last in losses(run, state, step, start):
        state = last
    model = run.structure.model(state.params, state.others)
    n = 64
    text = lm_runs.sample(model, "GPUs", n)
    log(start, f"generated {len(text.encode())} bytes, with compilation: {text[:20]!r}")
    began = time.perf_counter()
    lm_runs.sample(model, "CPUs", n, seed=1)
    print(f"{1e3 * (time.perf_counter() - began) / n:.2f} ms a byte")


def start_process(folder: Path, given: Any, what: str, rows: int) -> subprocess.Popen[str]:
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_deterministic_ops=true"
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "XLA_FLAGS": flags.strip()}
    words = [
        sys.executable,
        __file__,
        "--process",
        what,
        "--folder",
        str(folder),
        "--rows",
        str(rows),
    ]
    words += ["--small"] if given.small else []
    return subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment)


def echo(process: subprocess.Popen[str], until: str | None = None) -> dict[int, str]:
    """Print the output of a process until some line; return its losses by step."""
    found = {}
    assert process.stdout is not None
    for line in process.stdout:
        print(f"  {line}", end="", flush=True)
        if line.startswith("loss "):
            _, step, bits, *_ = line.split()
            found[int(step)] = bits
        if until is not None and line.strip() == until:
            break
    return found


def main() -> None:
    given = parse(
        __doc__,
        gigabytes=(88.1, "table size"),
        small=(False, "a small model for two cores"),
        process=(str, argparse.SUPPRESS),
        folder=(Path, argparse.SUPPRESS),
        rows=(int, argparse.SUPPRESS),
    )
    if given.process == "first":
        return first_process(given.folder, given.rows, given.small)
    if given.process == "second":
        return second_process(given.folder)
    rows = int(given.gigabytes * 1e9 / (N_TABLES * 4 * WIDTH))
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "run"
        folder.mkdir()
        (folder / "text").write_bytes(np.random.default_rng(0).bytes(1 << 22))
        print("a process that will be killed:")
        process = start_process(folder, given, "first", rows)
        wanted = echo(process, "waits")
        process.kill()
        assert process.wait() == -signal.SIGKILL, "the first process failed"
        print("a process that resumes:")
        process = start_process(folder, given, "second", rows)
        found = echo(process)
        assert process.wait() == 0, "the second process failed"
    expected = {step: bits for step, bits in wanted.items() if step >= CHECKPOINT}
    assert found == expected, "losses after the kill are others"
    print(
        f"the {len(found)} losses after the kill are those of the process that was killed, bit "
        f"for bit; {time.perf_counter() - start:.0f} s in all"
    )


if __name__ == "__main__":
    main()
