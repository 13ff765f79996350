"""Time and memory of training steps of logic networks.

Run `python benchmarks/logic_steps.py gates|trees|wirings`.

`gates`: gate layers, by default the larger MNIST network in *Deep Differentiable Logic Gate
  Networks*, 6 layers of 8000 gates over 784 bits.
`trees`: a `LogicTreeNet`. `wirings`: the layers of `gates` with every wiring.

Adam, softmax cross entropy, random samples. The compiler plans the memory, with arguments and
state. `--torchlogix` also measures the same network in that package, eager and compiled; it needs
`pip install torch torchvision` and `pip install --no-deps torchlogix`. Its step uses PyTorch's
fused Adam, its time includes host work while the GPU waits, and its memory is the peak of PyTorch's
allocator.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from digits import WIRINGS  # beside this file
from harness import parse

from lutjax.benchmark import measure
from lutjax.benchmark.results import duration, size
from lutjax.models import LogicClassifier, LogicClassifierConfig, LogicTreeNet, LogicTreeNetConfig


def build_step(model_of: Any, config: Any) -> tuple[Any, Any]:
    """Return a training step ``(state, x, labels) -> (state, loss)`` with Adam, and its initial state."""
    import optax
    from flax import nnx

    model = nnx.jit(lambda: model_of(config, rngs=nnx.Rngs(0)))()
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


def networks(given: Any) -> Iterator[tuple[str, Any, Any, tuple[int, ...]]]:
    """Yield the name, layer class, config and input shape of each network."""
    if given.what == "trees":
        trees = getattr(LogicTreeNetConfig, given.data)(given.size)
        yield (
            f"{given.data} {given.size}, {trees.n_gates} gates",
            LogicTreeNet,
            trees,
            trees.in_shape,
        )
        return
    n_layers, n_gates = given.layers
    for wiring in WIRINGS if given.what == "wirings" else (LogicClassifierConfig(64, 10).wiring,):
        sizes = {"n_thresholds": 0, "tau": 30.0, "wiring": wiring}
        config = LogicClassifierConfig(given.inputs, 10, (n_gates,) * n_layers, **sizes)
        name = (
            f"{n_layers} layers of {n_gates} "
            f"gates{f', {wiring}' if given.what == 'wirings' else ''}"
        )
        yield name, LogicClassifier, config, (given.inputs,)


def report(
    name: str, model: Any, config: Any, shape: tuple[int, ...], batch: int, given: Any
) -> None:
    """Print the time and memory of a step."""
    step, state = build_step(model, config)
    x = jax.random.bernoulli(jax.random.key(1), 0.5, (batch, *shape)).astype(given.dtype)
    if model is LogicTreeNet:
        x = jax.random.uniform(jax.random.key(1), (batch, *shape), given.dtype)
    labels = jax.random.randint(jax.random.key(2), (batch,), 0, config.n_classes)
    what = f"{name}, batch {batch}"
    timing = measure.device_time(step, state, x, labels, in_place=True)
    shown, memory = duration(timing.p20, timing.p80), size(timing.peak_bytes or 0)
    print(f"lutjax: {what}, {given.dtype}: step {shown}, memory {memory}", flush=True)
    if given.torchlogix:
        if model is LogicTreeNet:
            height, width, channels = shape
            shape = channels, height, width
        build = trees_in_torch if model is LogicTreeNet else gates_in_torch
        for compiled in (False, True):
            p20, p80, n_bytes = torch_times(build, config, (batch, *shape), compiled)
            how = "torchlogix, torch.compile" if compiled else "torchlogix, eager"
            print(f"{how}: {what}: step {duration(p20, p80)}, memory {size(n_bytes)}", flush=True)


# ------------------------------------------------------------------------------------- torchlogix
def gates_in_torch(config: Any, device: str) -> Any:
    """Return the network of a `LogicClassifierConfig` on bits."""
    import torch
    from torchlogix.layers import GroupSum, LogicDense

    sizes = (config.in_features, *config.layers)
    dense = [LogicDense(sizes[i], sizes[i + 1], device=device) for i in range(len(config.layers))]
    return torch.nn.Sequential(*dense, GroupSum(config.n_classes, config.tau)).to(device)


def trees_in_torch(config: Any, device: str) -> Any:
    """Return the network of a `LogicTreeNetConfig` with layers from torchlogix."""
    import torch
    from torchlogix.layers import GroupSum, LogicConv2d, LogicDense, OrPooling2d
    from torchlogix.layers.binarization import setup_binarization

    n_thresholds = max(config.n_thresholds, 1)
    thresholds = torch.arange(1, n_thresholds + 1) / (n_thresholds + 1)
    of_channels = thresholds.repeat(config.in_shape[2], 1)
    layers: list[Any] = [setup_binarization(of_channels, "fixed", feature_dim=1)]
    for spec in config.tree_specs():
        height, width, channels = spec.in_shape
        convolution = LogicConv2d(
            (height, width), channels=channels, num_kernels=spec.n_kernels, tree_depth=spec.depth,
            receptive_field_size=spec.kernel, padding=spec.padding, device=device,
            connections_kwargs={"channel_group_size": spec.channels_per_kernel},
        )  # fmt: skip
        layers += [convolution, OrPooling2d(spec.pool, spec.pool, spec.pool_padding)]
    layers.append(torch.nn.Flatten())
    for arguments in config.gate_arguments():
        layers.append(
            LogicDense(arguments["in_features"], arguments["out_features"], device=device)
        )
    return torch.nn.Sequential(*layers, GroupSum(config.n_classes, config.tau)).to(device)


def torch_times(
    build: Callable[[Any, str], Any], config: Any, shape: tuple[int, ...], compiled: bool
) -> tuple[float, float, int]:
    """Return percentiles 20 and 80 of the seconds per training step, and its memory."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    network = build(config, device).train()
    x = torch.rand(shape, device=device)
    labels = torch.randint(0, config.n_classes, (shape[0],), device=device)
    adam = torch.optim.Adam(network.parameters(), lr=0.01, fused=device == "cuda")

    def loss_of(x: Any, labels: Any) -> Any:
        return torch.nn.functional.cross_entropy(network(x), labels)

    loss = torch.compile(loss_of) if compiled else loss_of

    def loop(count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            adam.zero_grad(set_to_none=True)
            loss(x, labels).backward()
            adam.step()
        if device == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - start) / count

    loop(3)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    count = max(1, round(0.05 / loop(2)))
    begin, times = time.perf_counter(), [loop(count)]
    while len(times) < 20 and time.perf_counter() - begin < 2:
        times.append(loop(count))
    p20, *_, p80 = statistics.quantiles(times, n=5) if len(times) > 1 else times * 2
    return p20, p80, torch.cuda.max_memory_allocated() if device == "cuda" else 0


def main() -> None:
    given = parse(
        __doc__,
        "what",
        what=(("gates", "trees", "wirings"), "networks"),
        layers=([6, 8000], "numbers of layers and gates"),
        inputs=(784, "bits per sample"),
        data=(("cifar10", "mnist"), "data of trees"),
        size=("S", "size of trees"),
        batch=([int], "default: 128 and 4096, for trees 128"),
        dtype=(("float32", "bfloat16"), "dtype of values"),
        torchlogix=(False, "also measure the network of that package"),
    )
    for network in networks(given):
        for batch in given.batch or ([128] if given.what == "trees" else [128, 4096]):
            report(*network, batch, given)


if __name__ == "__main__":
    main()
