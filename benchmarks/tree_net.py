"""Time and memory of a training step of a `LogicTreeNet`: `python benchmarks/tree_net.py [--data cifar10] [--size S] [--batch 128]`.

Adam, softmax cross entropy, random images of the right shape. Memory is what the compiler plans, arguments and state included; beside it
stand the bytes that all layers read and write in the forward pass: inputs, outputs and parameters. `--plan` compiles and does not run.
"""

import argparse
import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

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


def step_of(config: LogicTreeNetConfig) -> tuple[Any, Any]:
    """Return a training step ``(state, x, labels) -> (state, loss)`` and its first state."""
    model = nnx.jit(lambda: LogicTreeNet(config, rngs=nnx.Rngs(0)))()
    graph, params, others = nnx.split(model, nnx.Param, ...)
    optimizer = optax.adam(0.01)

    def step(state: Any, x: jax.Array, labels: jax.Array) -> Any:
        params, others, moments = state

        def loss(params: Any) -> jax.Array:
            logits = nnx.merge(graph, params, others)(x).astype(jnp.float32)
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

        value, gradients = jax.value_and_grad(loss)(params)
        updates, moments = optimizer.update(gradients, moments)
        return (optax.apply_updates(params, updates), others, moments), value

    return step, (params, others, optimizer.init(params))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", choices=("cifar10", "mnist"), default="cifar10")
    parser.add_argument("--size", default="S")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32", help="of values, not of logits"
    )
    parser.add_argument("--plan", action="store_true", help="compile, and print the memory that is planned")
    given = parser.parse_args(arguments)
    config = getattr(LogicTreeNetConfig, given.data)(given.size)
    step, state = step_of(config)
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
    print(f"{what}: step {shown}, memory {size(timing.peak_bytes or 0)}, layers {size(least)}")


if __name__ == "__main__":
    main()
