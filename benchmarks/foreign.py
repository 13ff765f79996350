"""Training step and inference of one network in another package and, after conversion, in lutjax, on CPUs.

    python benchmarks/foreign.py there gates model.safetensors    # with PyTorch and the package; writes the network
    python benchmarks/foreign.py here gates model.safetensors     # with lutjax

Networks: ``gates``, 3 x 2000 torchlogix gates over 192 bits with 10 classes; ``difflogic``, the
  same in difflogic (on ``PYTHONPATH``); ``trees``, torchlogix's
convolutional MNIST network with size S; ``language``, a spiky language model (its ``src`` and its
CPU extension on ``PYTHONPATH``). Figures are process CPU times, the minimum over `REPEATS`. PyTorch
uses one thread, because its threads spin while they wait.
"""

import dataclasses
import importlib
import importlib.util
import itertools
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

SIZES, CLASSES, TAU = (192, 2000, 2000, 2000), 10, 4.0
IMAGE = (28, 28, 1)
VOCABULARY, FEATURES, CONTEXT = 256, 32, 32
REPEATS = 10


@dataclasses.dataclass(frozen=True)
class Network:
    """A measured network.

    Attributes:
      batch, samples: training batch size, and inference samples.
      there: returns the PyTorch model and its saved tensors.
      here: returns the model for these tensors.
    """

    batch: int
    samples: int
    there: Callable[[Any], tuple[Any, dict[str, Any]]]
    here: Callable[[Any], Any]

    def data(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Return inputs, bits or tokens, and labels."""
        rng = np.random.default_rng(0)
        if name == "language":
            tokens = rng.integers(0, VOCABULARY, (self.samples, CONTEXT + 1))
            return tokens[:, :-1], tokens[:, 1:]
        shape = IMAGE if name == "trees" else SIZES[:1]
        x = rng.integers(0, 2, (self.samples, *shape)).astype(np.float32)
        return x, rng.integers(0, CLASSES, self.samples)


def least(call: Callable[[], object]) -> float:
    """Return the minimum CPU seconds per call, after a warm-up."""
    for _ in range(2):
        call()
    times = []
    for _ in range(REPEATS):
        start = time.process_time()
        call()
        times.append(time.process_time() - start)
    return min(times)


def layers_of_torchlogix() -> Any:
    spec = importlib.util.find_spec("torchlogix")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    package = types.ModuleType("torchlogix")  # other parts of it need a later Python
    package.__path__ = list(spec.submodule_search_locations)
    sys.modules["torchlogix"] = package
    return importlib.import_module("torchlogix.layers")


def gates(torch: Any) -> tuple[Any, dict[str, Any]]:
    layers = layers_of_torchlogix()
    made = [layers.LogicDense(a, b) for a, b in itertools.pairwise(SIZES)]
    model = torch.nn.Sequential(*made, layers.GroupSum(CLASSES, tau=TAU))
    return model, model.state_dict()


def of_difflogic(torch: Any) -> tuple[Any, dict[str, Any]]:
    sys.modules["difflogic_cuda"] = types.ModuleType("difflogic_cuda")
    found = importlib.import_module("difflogic.difflogic")
    how = {"device": "cpu", "implementation": "python"}
    made = [found.LogicLayer(a, b, **how) for a, b in itertools.pairwise(SIZES)]
    wires = {f"{k}.indices": torch.stack(layer.indices) for k, layer in enumerate(made)}
    model = torch.nn.Sequential(*made, found.GroupSum(CLASSES, tau=TAU, device="cpu"))
    return model, {**model.state_dict(), **wires}


def trees(torch: Any) -> tuple[Any, dict[str, Any]]:
    layers = layers_of_torchlogix()
    made, size, channels = [], IMAGE[0], 1
    for kernels, field, padding in ((16, 5, 0), (48, 3, 1), (144, 3, 1)):
        made.append(
            layers.LogicConv2d(
                size, channels, num_kernels=kernels, tree_depth=3, receptive_field_size=field
            )
        )
        made.append(layers.OrPooling2d(2, 2, padding=padding))
        size, channels = (size - field + 1 + 2 * padding) // 2, kernels
    sizes = (size**2 * channels, 20480, 10240, 5120)
    made += [torch.nn.Flatten(), *(layers.LogicDense(a, b) for a, b in itertools.pairwise(sizes))]
    model = torch.nn.Sequential(*made, layers.GroupSum(CLASSES, tau=TAU))
    return model, model.state_dict()


def language(torch: Any) -> tuple[Any, dict[str, Any]]:
    transformer = importlib.import_module("spiky.lut.LUTTransformer").LUTTransformer
    sizes = {"positional_dim": 4, "num_layers": 2, "num_heads": 4, "n_detectors": 16}
    anchors = {"n_anchors_per_detector": 8, "n_anchors_per_detector_attention": 4}
    model = transformer(VOCABULARY, FEATURES, CONTEXT, **sizes, **anchors)
    of_layers = {
        f"{name}._detector_anchors": layer._export_anchors()
        for name, layer in model.named_modules()
        if hasattr(layer, "_export_anchors")
    }
    return model, {**model.state_dict(), **of_layers}


def convert_with(package: str, **options: Any) -> Callable[[Any], Any]:
    """Return a converter for tensors from a package."""

    def run(tensors: Any) -> Any:
        from lutjax import convert

        if image := options.pop("image", None):
            options["image"] = convert.Image(image, pool=2, pool_padding=(0, 1, 1))
        return getattr(convert, package)(tensors, **options)

    return run


CLASSIFIER = {"n_classes": CLASSES, "tau": TAU}
NETWORKS = {
    "gates": Network(100, 10_000, gates, convert_with("torchlogix", **CLASSIFIER)),
    "difflogic": Network(100, 10_000, of_difflogic, convert_with("difflogic", **CLASSIFIER)),
    "trees": Network(100, 1000, trees, convert_with("torchlogix", image=IMAGE, **CLASSIFIER)),
    "language": Network(16, 64, language, convert_with("spiky", context=CONTEXT)),
}


def there(name: str, path: Path) -> tuple[float, float]:
    torch: Any = importlib.import_module("torch")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    network = NETWORKS[name]
    model, tensors = network.there(torch)
    importlib.import_module("safetensors.torch").save_file(
        {key: tensor.contiguous() for key, tensor in tensors.items()}, path
    )
    optimizer, loss_of = torch.optim.Adam(model.parameters(), lr=0.01), torch.nn.CrossEntropyLoss()
    x, y = (torch.from_numpy(a) for a in network.data(name))
    x = x.permute(0, 3, 1, 2).contiguous() if name == "trees" else x

    def step() -> None:
        model.train()
        optimizer.zero_grad()
        logits = model(x[: network.batch])
        loss_of(logits.flatten(0, -2), y[: network.batch].flatten()).backward()
        optimizer.step()

    def infer() -> None:
        model.eval()
        with torch.no_grad():
            for part in x.split(network.batch):
                model(part).argmax(-1)

    return least(step), least(infer)


def here(name: str, path: Path) -> tuple[float, float]:
    import jax
    import jax.numpy as jnp
    import optax
    from flax import nnx

    from lutjax import convert

    network = NETWORKS[name]
    model = network.here(convert.read(path))
    x, y = (
        jnp.asarray(a, jnp.float32 if a.dtype == np.float32 else jnp.int32)
        for a in network.data(name)
    )
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    optimizer = optax.adam(0.01)

    @jax.jit
    def advance(params: Any, state: Any) -> Any:
        def loss(params: Any) -> Any:
            logits = nnx.merge(graph, params, rest)(x[: network.batch], deterministic=False)
            return optax.softmax_cross_entropy_with_integer_labels(
                logits, y[: network.batch]
            ).mean()

        updates, state = optimizer.update(jax.grad(loss)(params), state)
        return optax.apply_updates(params, updates), state

    state = [params, optimizer.init(params)]

    def step() -> None:
        state[:] = jax.block_until_ready(advance(*state))

    if name == "language":
        classes = jax.jit(
            lambda x: nnx.merge(graph, params, rest)(x, deterministic=True).argmax(-1)
        )
    else:
        classes = model.packed()
    return least(step), least(lambda: jax.block_until_ready(classes(x)))


def main() -> None:
    where, name, path = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    step, infer = {"there": there, "here": here}[where](name, path)
    print(f"| {name} | {where} | {1e3 * step:.1f} ms | {1e3 * infer:.1f} ms |")


if __name__ == "__main__":
    main()
