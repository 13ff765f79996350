"""Measure a training step and inference of one network in torchlogix and, converted, in lutjax, on the CPUs of this machine.

    python benchmarks/foreign.py torchlogix model.safetensors    # with PyTorch and torchlogix; writes the network
    python benchmarks/foreign.py lutjax model.safetensors        # with lutjax

The network is 3 x 2000 gates over 192 bits, 10 classes; batches have 100 samples, and inference takes 10 000. Each figure is CPU
time of the process, the median of `REPEATS`; PyTorch has one thread, as its threads wait for each other by computing.
"""

import importlib
import importlib.util
import itertools
import statistics
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

SIZES, CLASSES, TAU = (192, 2000, 2000, 2000), 10, 4.0
BATCH, SAMPLES, REPEATS = 100, 10_000, 10


def median(call: Callable[[], object]) -> float:
    """Return the seconds of CPUs that a call takes, after a few that warm up."""
    for _ in range(3):
        call()
    times = []
    for _ in range(REPEATS):
        start = time.process_time()
        call()
        times.append(time.process_time() - start)
    return statistics.median(times)


def data() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.integers(0, 2, (SAMPLES, SIZES[0])).astype(np.float32), rng.integers(0, CLASSES, SAMPLES)


def of_torchlogix(path: Path) -> tuple[float, float]:
    torch: Any = importlib.import_module("torch")
    spec = importlib.util.find_spec("torchlogix")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    package = types.ModuleType("torchlogix")  # of which other parts need a later Python
    package.__path__ = list(spec.submodule_search_locations)
    sys.modules["torchlogix"] = package
    layers = importlib.import_module("torchlogix.layers")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    gates = [layers.LogicDense(a, b) for a, b in itertools.pairwise(SIZES)]
    model = torch.nn.Sequential(*gates, layers.GroupSum(CLASSES, tau=TAU))
    importlib.import_module("safetensors.torch").save_file(model.state_dict(), path)
    optimizer, loss_of = torch.optim.Adam(model.parameters(), lr=0.01), torch.nn.CrossEntropyLoss()
    x, y = (torch.from_numpy(a) for a in data())

    def step() -> None:
        model.train()
        optimizer.zero_grad()
        loss_of(model(x[:BATCH]), y[:BATCH]).backward()
        optimizer.step()

    def infer() -> None:
        model.eval()
        with torch.no_grad():
            model(x).argmax(-1)

    return median(step), median(infer)


def of_lutjax(path: Path) -> tuple[float, float]:
    import jax
    import jax.numpy as jnp
    import optax
    from flax import nnx

    from lutjax import convert

    model = convert.torchlogix(convert.read(path), n_classes=CLASSES, tau=TAU)
    x, y = (jnp.asarray(a) for a in data())
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    optimizer = optax.adam(0.01)

    @jax.jit
    def advance(params: Any, state: Any) -> Any:
        def loss(params: Any) -> Any:
            logits = nnx.merge(graph, params, rest)(x[:BATCH], deterministic=False)
            return optax.softmax_cross_entropy_with_integer_labels(logits, y[:BATCH]).mean()

        updates, state = optimizer.update(jax.grad(loss)(params), state)
        return optax.apply_updates(params, updates), state

    state = [params, optimizer.init(params)]

    def step() -> None:
        state[:] = jax.block_until_ready(advance(*state))

    packed = model.packed()
    return median(step), median(lambda: jax.block_until_ready(packed(x)))


def main() -> None:
    where, path = sys.argv[1], Path(sys.argv[2])
    step, infer = {"torchlogix": of_torchlogix, "lutjax": of_lutjax}[where](path)
    print(f"| {where} | {1e3 * step:.1f} ms | {1e3 * infer:.1f} ms |")


if __name__ == "__main__":
    main()
