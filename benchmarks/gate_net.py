"""Time and memory of a training step of layers of gates: `python benchmarks/gate_net.py [--layers 6 8000] [--batch 128 4096]`.

The default is the larger network for MNIST of *Deep Differentiable Logic Gate Networks*, 6 layers of 8000 gates over 784 bits. Adam,
softmax cross entropy, random bits. Memory is what the compiler plans, arguments and state included. With `--torchlogix` the same
network of that package runs afterward, eager and compiled.
"""

import argparse

import jax
from steps import step_of  # beside this file

from lutjax.benchmark import measure
from lutjax.benchmark.results import duration, size
from lutjax.models import LogicClassifier, LogicClassifierConfig


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, nargs=2, default=(6, 8000), metavar=("LAYERS", "GATES"))
    parser.add_argument("--inputs", type=int, default=784)
    parser.add_argument("--batch", type=int, nargs="+", default=[128, 4096])
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32", help="of values, not of logits"
    )
    parser.add_argument("--implementation", help="of the gates: xla or triton")
    parser.add_argument("--plan", action="store_true", help="compile, and print the memory that is planned")
    parser.add_argument("--torchlogix", action="store_true", help="run the network of that package, too")
    given = parser.parse_args(arguments)
    n_layers, n_gates = given.layers
    config = LogicClassifierConfig(given.inputs, 10, (n_gates,) * n_layers, n_thresholds=0, tau=30.0)
    what = f"{n_layers} layers of {n_gates} gates, {given.dtype}"
    for batch in given.batch:
        step, state = step_of(LogicClassifier, config, implementation=given.implementation)
        x = jax.random.bernoulli(jax.random.key(1), 0.5, (batch, given.inputs)).astype(given.dtype)
        labels = jax.random.randint(jax.random.key(2), (batch,), 0, config.n_classes)
        if given.plan:
            planned = measure.peak_bytes(step, state, x, labels, in_place=True)
            print(f"lutjax: {what}, batch {batch}: memory {size(planned or 0)}", flush=True)
            continue
        timing = measure.device_time(step, state, x, labels, in_place=True)
        shown = duration(timing.p20, timing.p80)
        print(
            f"lutjax: {what}, batch {batch}: step {shown}, memory {size(timing.peak_bytes or 0)}", flush=True
        )
        del state
    if given.torchlogix:
        import torchlogix_steps

        for batch in given.batch:
            torchlogix_steps.report(
                f"{n_layers} layers of {n_gates} gates, batch {batch}",
                lambda device: torchlogix_steps.gates(config.layers, given.inputs, 10, config.tau, device),
                (batch, given.inputs),
                10,
            )


if __name__ == "__main__":
    main()
