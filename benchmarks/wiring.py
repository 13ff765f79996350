"""Cost and accuracy of wirings: `python benchmarks/wiring.py cost|accuracy [--wirings NAME ...]`.

`cost`: a training step of layers of equal width, with Adam, random bits and softmax cross entropy.
`accuracy`: the hard network on the test parts of five splits of scikit-learn's digits (`lutjax.training.samples.split`), or of a `.npz` file,
with equal gates for every wiring; means and their standard errors. All splits train at the same time, in one program.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from splits import Trained

from lutjax.benchmark import measure
from lutjax.benchmark.results import duration
from lutjax.models import LogicClassifier, LogicClassifierConfig
from lutjax.training.classifier import TrainingConfig
from lutjax.training.samples import load_digits, load_samples, split

WIRINGS = ("random", "unique", "balanced", "butterfly", "learnable", "top-k", "full")


def step_of(config: LogicClassifierConfig) -> tuple[Any, Any]:
    """Return a training step ``(state, x, labels) -> (state, loss)`` and its first state."""
    model = nnx.jit(lambda: LogicClassifier(config, rngs=nnx.Rngs(0)))()
    graph, params, others = nnx.split(model, nnx.Param, ...)
    optimizer = optax.adam(0.01)

    def step(state: Any, x: jax.Array, labels: jax.Array) -> Any:
        params, others, moments = state

        def loss(params: Any) -> jax.Array:
            logits = nnx.merge(graph, params, others)(x)
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

        value, gradients = jax.value_and_grad(loss)(params)
        updates, moments = optimizer.update(gradients, moments)
        return (optax.apply_updates(params, updates), others, moments), value

    return step, (params, others, optimizer.init(params))


def cost(given: argparse.Namespace) -> None:
    """Print the time of a step with each wiring."""
    sizes: dict[str, Any] = {"in_features": given.inputs, "n_thresholds": 0, "layers": given.layers}
    x = jax.random.bernoulli(jax.random.key(0), 0.5, (given.batch, given.inputs)).astype(jnp.float32)
    labels = jax.random.randint(jax.random.key(1), (given.batch,), 0, 10)
    print(
        f"{jax.devices()[0].device_kind}, {given.inputs} inputs, layers {given.layers}, batch {given.batch}"
    )
    for name in given.wirings:
        step, state = step_of(LogicClassifierConfig(n_classes=10, wiring=name, **sizes))
        found = measure.device_time(step, state, x, labels, in_place=True, repeats=10)
        print(f"{name:10} {duration(found.p50)} a step", flush=True)


def accuracy(given: argparse.Namespace) -> None:
    """Print the accuracy of the hard network with each wiring."""
    whole = load_samples(given.data) if given.data else load_digits()
    seeds = list(range(given.seeds))
    parts = [split(whole, seed) for seed in seeds]
    training = TrainingConfig(steps=given.steps, augment=given.augment)
    for name in given.wirings:
        start = time.perf_counter()
        sizes = {
            "layers": given.layers,
            "wiring": name,
            "n_thresholds": given.thresholds,
            "tau": given.tau,
            "candidates": given.candidates,
        }
        config = LogicClassifierConfig(whole.x.shape[1], 10, **sizes)
        trained = Trained(config, training, [train for train, _ in parts], seeds)
        found = [trained.accuracy(seed, test, hard=True) for seed, (_, test) in enumerate(parts)]
        error = np.std(found, ddof=1) / len(found) ** 0.5 if len(found) > 1 else 0.0
        each = " ".join(f"{a:.2f}" for a in found)
        seconds = time.perf_counter() - start
        print(f"{name:10} {np.mean(found):.2f} ± {error:.2f} %   {each}   {seconds:.0f} s", flush=True)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("cost", "accuracy"))
    parser.add_argument("--wirings", nargs="+", default=list(WIRINGS))
    parser.add_argument("--layers", type=lambda text: tuple(map(int, text.split(","))), default=(300, 300))
    parser.add_argument("--inputs", type=int, default=784, help="bits of a sample, for the cost")
    parser.add_argument("--batch", type=int, default=128, help="samples of a step, for the cost")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--thresholds", type=int, default=3)
    parser.add_argument("--tau", type=float, default=4.0)
    parser.add_argument("--candidates", type=int, default=8)
    parser.add_argument("--augment", type=float, default=1.0)
    parser.add_argument("--data", type=Path, help="a .npz file with x and y, instead of the digits")
    given = parser.parse_args(arguments)
    {"cost": cost, "accuracy": accuracy}[given.what](given)


if __name__ == "__main__":
    main()
