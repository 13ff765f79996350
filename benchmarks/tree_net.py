"""Time and memory of a training step of a `LogicTreeNet`: `python benchmarks/tree_net.py [--data cifar10] [--size S] [--batch 128]`.

Adam, softmax cross entropy, random images of the right shape. Memory is what the compiler plans, arguments and state included; beside it
stand the bytes that all layers read and write in the forward pass: inputs, outputs and parameters. `--plan` compiles and does not run. With `--torchlogix` the same network of that package runs
afterward, eager and compiled.
"""

import argparse
import math

import jax
from steps import step_of  # beside this file

from lutjax.benchmark import measure
from lutjax.benchmark.results import duration, size
from lutjax.models import LogicTreeNet, LogicTreeNetConfig


def forward_bytes(config: LogicTreeNetConfig, batch: int, itemsize: int) -> int:
    """Return the bytes of the inputs, outputs and parameters of all layers, each once."""
    values = math.prod(config.in_shape) * max(config.n_thresholds, 1)
    for spec in config.tree_specs():
        values += 2 * math.prod(spec.out_shape)
    values += 2 * sum(config.layers) - config.layers[-1]
    return batch * itemsize * values + 4 * 16 * config.n_gates


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", choices=("cifar10", "mnist"), default="cifar10")
    parser.add_argument("--size", default="S")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32", help="of values, not of logits"
    )
    parser.add_argument("--plan", action="store_true", help="compile, and print the memory that is planned")
    parser.add_argument("--torchlogix", action="store_true", help="run the network of that package, too")
    given = parser.parse_args(arguments)
    config = getattr(LogicTreeNetConfig, given.data)(given.size)
    step, state = step_of(LogicTreeNet, config)
    x = jax.random.uniform(jax.random.key(1), (given.batch, *config.in_shape), given.dtype)
    labels = jax.random.randint(jax.random.key(2), (given.batch,), 0, config.n_classes)
    least = forward_bytes(config, given.batch, x.dtype.itemsize)
    what = f"{given.data} {given.size}, {config.n_gates} gates, batch {given.batch}, {given.dtype}"
    if given.plan:
        planned = measure.peak_bytes(step, state, x, labels, in_place=True)
        print(f"{what}: memory {size(planned or 0)}, layers {size(least)}")
        return
    timing = measure.device_time(step, state, x, labels, in_place=True)
    shown = duration(timing.p20, timing.p80)
    print(
        f"lutjax: {what}: step {shown}, memory {size(timing.peak_bytes or 0)}, layers {size(least)}",
        flush=True,
    )
    if given.torchlogix:
        import torchlogix_steps

        height, width, channels = config.in_shape
        torchlogix_steps.report(
            f"{given.data} {given.size}, batch {given.batch}",
            lambda device: torchlogix_steps.trees(config, device),
            (given.batch, channels, height, width),
            config.n_classes,
        )


if __name__ == "__main__":
    main()
