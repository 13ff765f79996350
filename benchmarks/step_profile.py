"""Profile of a GPT training step on a GPU: `python benchmarks/step_profile.py --preset small --set features=1024`.

Prints for each feed-forward layer the seconds before the first step (structure, initial parameters, compilation), milliseconds per step, and the time and number of launches of
every group of kernels in a profile. `--hlo FOLDER` writes the compiled programs. Inputs are random bytes.
"""

import argparse
import collections
import math
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from devices import kernel_launches  # beside this file
from language_models import about, add_options, values_of  # beside this file

from lutjax.models import GPTConfig
from lutjax.training import presets
from lutjax.training.lm import Run, TrainingConfig

KINDS = {
    "attention": r"cudnn|fmha|flash",
    "tables": r"mosaic|lutjax|_owned|_rows|_pull_back|_rotate",
    "matrix products": r"nvjet|gemm|cutlass|cublas|splitK|xmma",
    "copies": r"^Mem(cpy|set)|copy",
}
"""Groups of kernels: names of their kernels; all others are fusions of XLA."""


def kind_of(name: str) -> str:
    """Return the group of a kernel."""
    found = (kind for kind, pattern in KINDS.items() if re.search(pattern, name, re.IGNORECASE))
    return next(found, "fusions")


def kernel_times(run: Callable[[], Any]) -> dict[str, list[float]]:
    """Return microseconds of every launch while a function runs, by kernel."""
    times: dict[str, list[float]] = collections.defaultdict(list)
    for launches in kernel_launches(run).values():
        for name, begin, end in launches:
            times[name].append((end - begin) / 1e3)
    return times


def measure(values: dict[str, Any], steps: int, hlo: Path | None, limit: int) -> None:
    """Print the times of one model."""
    text = np.frombuffer(np.random.default_rng(0).bytes(1 << 20), np.uint8)
    began = time.perf_counter()
    run = Run(presets.make(GPTConfig, values), presets.make(TrainingConfig, values), text)
    built = time.perf_counter()
    state = jax.block_until_ready(run.init())
    drawn = time.perf_counter()
    program, advance = run.advance.compiled(run.abstract())
    compiled = time.perf_counter()
    state, loss = advance(state, 0, 1)
    loss.block_until_ready()
    first = time.perf_counter()
    best = math.inf
    for k in range(3):
        start = time.perf_counter()
        state, loss = advance(state, k * steps, steps)
        loss.block_until_ready()
        best = min(best, (time.perf_counter() - start) / steps)
    print(
        f"{values['feed_forward']}: structure {built - began:.1f} s, parameters {drawn - built:.1f} s, compilation {compiled - drawn:.1f} s, "
        f"first step {first - compiled:.1f} s, {1e3 * best:.2f} ms a step",
        flush=True,
    )
    if hlo is not None:
        (hlo / f"{values['feed_forward']}.txt").write_text(program.as_text())

    def few() -> None:
        nonlocal state
        state, loss = advance(state, 0, 5)
        loss.block_until_ready()

    times = kernel_times(few)
    kinds: dict[str, list[float]] = collections.defaultdict(list)
    for name, each in times.items():
        kinds[kind_of(name)].extend(each)
    for kind, each in sorted(kinds.items(), key=lambda item: -sum(item[1])):
        print(f"  {sum(each) / 5e3:7.2f} ms {len(each) / 5:6.0f} launches  {kind}")
    for name, each in sorted(times.items(), key=lambda item: -sum(item[1]))[:limit]:
        print(
            f"    {sum(each) / 5:8.1f} us {len(each) / 5:6.1f} x {np.median(each):7.1f}  {kind_of(name):10.10} {name[:100]}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_options(parser)
    parser.add_argument("--layers", default="dense,projection_lut", help="feed-forward layers")
    parser.add_argument("--hlo", type=Path, help="write compiled programs into this folder")
    parser.add_argument("--limit", type=int, default=40, help="kernels that are printed")
    arguments = parser.parse_args()
    values = values_of(parser, arguments)
    print(about())
    for layer in arguments.layers.split(","):
        measure(values | {"feed_forward": layer}, 20, arguments.hlo, arguments.limit)


if __name__ == "__main__":
    main()
