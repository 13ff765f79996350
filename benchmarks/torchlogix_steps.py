"""Training steps of torchlogix, the PyTorch package of logic networks, for `tree_net.py` and `gate_net.py`.

It needs `pip install torch torchvision` and `pip install --no-deps torchlogix`. A step is Adam (the fused one of PyTorch) on softmax cross
entropy. Its time is that between two events on the GPU around many steps, so what the host does counts where the GPU waits for it;
memory is the most that PyTorch's allocator held.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any


def gates(layers: tuple[int, ...], n_inputs: int, n_classes: int, tau: float, device: str) -> Any:
    """Return a network of layers of gates, with sums for each class."""
    import torch
    from torchlogix.layers import GroupSum, LogicDense

    sizes = (n_inputs, *layers)
    dense = [LogicDense(sizes[i], sizes[i + 1], device=device) for i in range(len(layers))]
    return torch.nn.Sequential(*dense, GroupSum(n_classes, tau)).to(device)


def trees(config: Any, device: str) -> Any:
    """Return the network of a `LogicTreeNetConfig`: of its layers torchlogix has each."""
    import torch
    from torchlogix.layers import GroupSum, LogicConv2d, LogicDense, OrPooling2d
    from torchlogix.layers.binarization import setup_binarization

    n_thresholds = max(config.n_thresholds, 1)
    thresholds = torch.arange(1, n_thresholds + 1) / (n_thresholds + 1)
    of_channels = thresholds.repeat(config.in_shape[2], 1)
    layers: list[Any] = [setup_binarization(of_channels, "fixed", feature_dim=1)]
    for spec in config.tree_specs():
        height, width, channels = spec.in_shape
        layers.append(
            LogicConv2d(
                (height, width),
                channels=channels,
                num_kernels=spec.n_kernels,
                tree_depth=spec.depth,
                receptive_field_size=spec.kernel,
                padding=spec.padding,
                device=device,
                connections_kwargs={"channel_group_size": spec.channels_per_kernel},
            )
        )
        layers.append(OrPooling2d(spec.pool, spec.pool, spec.pool_padding))
    layers.append(torch.nn.Flatten())
    for arguments in config.gate_arguments():
        layers.append(LogicDense(arguments["in_features"], arguments["out_features"], device=device))
    return torch.nn.Sequential(*layers, GroupSum(config.n_classes, config.tau)).to(device)


def timed(
    build: Callable[[str], Any],
    shape: tuple[int, ...],
    n_classes: int,
    *,
    compiled: bool,
    seconds: float = 2.0,
) -> tuple[float, float, int]:
    """Return seconds of a step, the 20th and 80th percentile over loops, and bytes of memory.

    Args:
      build: makes the network on a device. shape: of the samples. compiled: with `torch.compile`.
    """
    import torch
    import torch.nn.functional as F

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    network = build(device).train()
    x = torch.rand(shape, device=device)
    labels = torch.randint(0, n_classes, shape[:1], device=device)
    adam = torch.optim.Adam(network.parameters(), lr=0.01, fused=device == "cuda")

    def loss_of(x: Any, labels: Any) -> Any:
        return F.cross_entropy(network(x), labels)

    loss = torch.compile(loss_of) if compiled else loss_of

    def step() -> None:
        adam.zero_grad(set_to_none=True)
        loss(x, labels).backward()
        adam.step()

    def loop(count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            step()
        if device == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - start) / count

    loop(3)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    count = max(1, round(0.05 / loop(2)))
    begin, times = time.perf_counter(), [loop(count)]
    while len(times) < 20 and time.perf_counter() - begin < seconds:
        times.append(loop(count))
    p20, *_, p80 = statistics.quantiles(times, n=5) if len(times) > 1 else times * 2
    return p20, p80, torch.cuda.max_memory_allocated() if device == "cuda" else 0


def report(what: str, build: Callable[[str], Any], shape: tuple[int, ...], n_classes: int) -> None:
    """Print the figures of a network, eager and compiled."""
    from lutjax.benchmark.results import duration, size

    for compiled in (False, True):
        p20, p80, memory = timed(build, shape, n_classes, compiled=compiled)
        how = "torchlogix, torch.compile" if compiled else "torchlogix, eager"
        print(f"{how}: {what}: step {duration(p20, p80)}, memory {size(memory)}", flush=True)
