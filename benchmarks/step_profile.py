"""Profile of a GPT training step on a GPU.

Run `python benchmarks/step_profile.py --preset small --set features=1024`.

Prints for each feed-forward layer the startup seconds (structure, initial parameters, compilation),
milliseconds per step, and time and launches per kernel group in a profile. Inputs are random bytes.
"""

import collections
import re
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from harness import about, kernel_launches, parse, time_calls  # beside this file
from language_models import OPTIONS, values_of

from lutjax.models import GPTConfig
from lutjax.training import presets
from lutjax.training.lm import Run, TrainingConfig

STEPS = 20
KINDS = {
    "attention": r"cudnn|fmha|flash",
    "tables": r"mosaic|lutjax|_owned|_rows|_pull_back|_rotate",
    "matrix products": r"nvjet|gemm|cutlass|cublas|splitK|xmma",
    "copies": r"^Mem(cpy|set)|copy",
}
"""Kernel groups by name pattern; all other kernels are XLA fusions."""


def kind_of(name: str) -> str:
    """Return the group of a kernel."""
    found = (kind for kind, pattern in KINDS.items() if re.search(pattern, name, re.IGNORECASE))
    return next(found, "fusions")


def measure(values: dict[str, Any], limit: int) -> None:
    """Print the times of one model."""
    parts: dict[str, float] = {}

    def time_part(name: str, do: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        result = jax.block_until_ready(do())
        parts[name] = time.perf_counter() - start
        return result

    text = np.frombuffer(np.random.default_rng(0).bytes(1 << 20), np.uint8)
    configs = presets.make(GPTConfig, values), presets.make(TrainingConfig, values)
    run = time_part("structure", lambda: Run(*configs, text))
    state = time_part("parameters", run.init)
    _, advance = time_part("compilation", lambda: run.advance.compile_program(run.abstract()))

    def steps(count: int) -> Any:
        nonlocal state
        state, loss = advance(state, 0, count)
        return loss

    time_part("first step", lambda: steps(1))
    ms = 1e3 * min(time_calls(lambda: steps(STEPS), 3)) / STEPS
    startup = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in parts.items())
    print(f"{values['feed_forward']}: {startup}, {ms:.2f} ms a step", flush=True)
    times, kinds = collections.defaultdict(list), collections.defaultdict(list)
    for launches in kernel_launches(lambda: jax.block_until_ready(steps(5))).values():
        for name, begin, end in launches:
            times[name].append((end - begin) / 1e3)
            kinds[kind_of(name)].append((end - begin) / 1e3)
    for kind, each in sorted(kinds.items(), key=lambda item: -sum(item[1])):
        print(f"  {sum(each) / 5e3:7.2f} ms {len(each) / 5:6.0f} launches  {kind}")
    for name, each in sorted(times.items(), key=lambda item: -sum(item[1]))[:limit]:
        median = f"{sum(each) / 5:8.1f} us {len(each) / 5:6.1f} x {np.median(each):7.1f}"
        print(f"    {median}  {kind_of(name):10.10} {name[:100]}")


def main() -> None:
    given = parse(
        __doc__,
        **OPTIONS,
        layers=("dense,projection_lut", "feed-forward layers, separated by commas"),
        limit=(40, "number of printed kernels"),
    )
    values = values_of(given)
    print(about())
    for layer in given.layers.split(","):
        measure(values | {"feed_forward": layer}, given.limit)


if __name__ == "__main__":
    main()
