"""Record small networks from other packages, with their outputs, for the `lutjax.convert` tests.

    python tests/golden/record_foreign.py --difflogic CHECKOUT --dwn CHECKOUT

writes ``foreign_*.npz`` next to this file. It requires PyTorch, torchlogix and scikit-learn, plus checkouts for the two packages
without CPU builds on any registry. torch-dwn has CUDA kernels only, so this script reimplements the layer's forward pass
as its kernel defines it. lutjax is not imported.
"""

import argparse
import importlib
import importlib.util
import itertools
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent


def package(name: str, folder: Path) -> None:
    """Make package modules importable without their own imports, such as CUDA extensions or newer Python syntax."""
    result = types.ModuleType(name)
    result.__path__ = [str(folder)]
    sys.modules[name] = result


def record(
    name: str, model: Any, x: Any, call: Callable[..., Any] | None = None, **arguments: Any
) -> None:
    """Write tensors, inputs, hard and soft network outputs, and conversion arguments."""
    call = call or model
    outputs = {}
    for what, training in (("hard", False), ("soft", True)):
        model.train(training)
        outputs[what] = call(x).detach().numpy()
    tensors = {f"t/{key}": value.detach().numpy() for key, value in model.state_dict().items()}
    for key, layer in enumerate(model):
        if isinstance(
            getattr(layer, "indices", None), tuple
        ):  # difflogic keeps them out of the state dict
            tensors[f"t/{key}.indices"] = np.stack([index.numpy() for index in layer.indices])
    given = {f"a/{key}": np.asarray(value) for key, value in arguments.items()}
    np.savez_compressed(HERE / f"foreign_{name}.npz", x=x.numpy(), **outputs, **tensors, **given)
    print(name, outputs["hard"].shape)


def torchlogix(torch: Any) -> None:
    spec = importlib.util.find_spec("torchlogix")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    package("torchlogix", Path(spec.submodule_search_locations[0]))
    layers = importlib.import_module("torchlogix.layers")
    thresholds = torch.sort(torch.rand(6, 3))[0]
    bits, numbers = (torch.rand(40, 18) > 0.5).float(), torch.rand(40, 6)

    def dense(*sizes: int, **options: Any) -> list[Any]:
        made = [layers.LogicDense(a, b, **options) for a, b in itertools.pairwise(sizes)]
        for layer in made:
            torch.nn.init.normal_(layer.weight, std=2.0)
        return made

    def network(*parts: Any) -> Any:
        return torch.nn.Sequential(*parts, layers.GroupSum(5, tau=3.0))

    common = {"n_classes": 5, "tau": 3.0}
    record(
        "torchlogix_raw",
        network(layers.FixedBinarization(thresholds), *dense(18, 30, 20)),
        numbers,
        **common,
    )
    learned = network(layers.LearnableBinarization(thresholds), *dense(18, 30, 20))
    torch.nn.init.normal_(learned[0].raw_diffs, mean=0.2, std=0.1)
    record("torchlogix_thermometer", learned, numbers, **common)
    for name, rank in (("light", 4), ("warp", 2)):
        options = {
            "lut_rank": rank,
            "parametrization": name,
            "parametrization_kwargs": {"temperature": 0.7},
        }
        given = {**common, "parameterization": name, "temperature": 0.7}
        record(f"torchlogix_{name}", network(*dense(18, 30, 20, **options)), bits, **given)
    one = network(*dense(18, 20, lut_rank=4, parametrization="warp"))
    record("torchlogix_warp_once", one, bits, **common, parameterization="warp")
    chosen = dense(18, 30, 20, connections="learnable", connections_kwargs={"num_candidates": 4})
    record("torchlogix_learned_wires", network(*chosen), bits, n_inputs=18, **common)


def torchlogix_images(torch: Any) -> None:
    """Record thermometers with other sampling modes, and convolutions over digit images."""
    torch.manual_seed(1)
    layers = importlib.import_module("torchlogix.layers")
    digits = importlib.import_module("sklearn.datasets").load_digits().images[:40]
    images = torch.from_numpy(digits.astype(np.float32) / 16)[:, None]
    rows = images[:, 0, 2:5, 3:5].reshape(40, 6)
    thresholds = torch.tensor([[0.1, 0.3, 0.7]]).repeat(6, 1)
    common = {"n_classes": 5, "tau": 3.0}

    def drawn(layer: Any, std: float = 2.0) -> Any:
        for name, parameter in layer.named_parameters():
            if "weight" in name:
                torch.nn.init.normal_(parameter, std=std)
        return layer

    def network(*parts: Any) -> Any:
        return torch.nn.Sequential(*parts, layers.GroupSum(5, tau=3.0))

    def dense(n_in: int, n_out: int, **options: Any) -> Any:
        return drawn(layers.LogicDense(n_in, n_out, **options))

    def conv(size: int, channels: int, kernels: int, depth: int, field: int, **options: Any) -> Any:
        sizes = {"num_kernels": kernels, "tree_depth": depth, "receptive_field_size": field}
        return drawn(layers.LogicConv2d(size, channels, **sizes, **options))

    for name, first in (
        ("soft", layers.SoftBinarization(thresholds, temperature=0.3)),
        (
            "hard",
            layers.LearnableBinarization(
                thresholds, forward_sampling="hard", temperature_sampling=0.3
            ),
        ),
    ):
        given = {**common, "binarization": name, "binarization_temperature": 0.3}
        record(f"torchlogix_thermometer_{name}", network(first, dense(18, 20)), rows, **given)

    def record_images(name: str, model: Any, x: Any, **arguments: Any) -> None:
        """Record a network with channels-last images in the file."""
        record(
            name,
            model,
            x.permute(0, 2, 3, 1).contiguous(),
            lambda x: model(x.permute(0, 3, 1, 2)),
            **arguments,
        )

    flat, pool = torch.nn.Flatten(), layers.OrPooling2d
    shape = np.asarray([8, 8, 1])
    few = torch.tensor([[0.2, 0.6]])
    model = network(
        layers.FixedBinarization(few, feature_dim=1),
        conv(8, 2, 6, 3, 3, padding=1),
        pool(2, 2),  # 6 x 4 x 4
        conv(4, 6, 8, 2, 3, connections_kwargs={"channel_group_size": 2}),
        pool(2, 2, padding=1),  # 8 x 2 x 2
        flat,
        dense(32, 30),
        dense(30, 20),
    )
    given = {"padding": np.asarray([1, 0]), "pool": 2, "pool_padding": np.asarray([0, 1])}
    record_images("torchlogix_conv", model, images, **common, shape=shape, **given)
    model = network(
        layers.LearnableBinarization(few, feature_dim=1, forward_sampling="soft"),
        conv(8, 2, 6, 2, 4, padding=1, stride=3),  # 6 x 3 x 3
        flat,
        dense(54, 40),
    )
    torch.nn.init.normal_(model[0].raw_diffs, mean=0.3, std=0.1)
    record_images("torchlogix_conv_strides", model, images, **common, shape=shape, padding=1)
    bits = (torch.rand(40, 3, 5, 5) > 0.5).float()
    for name, rank in (("light", 4), ("warp", 2)):
        options = {
            "lut_rank": rank,
            "parametrization": name,
            "parametrization_kwargs": {"temperature": 0.7},
        }
        model = network(
            conv(5, 3, 6, 2, 2, **options),
            pool(2, 2),  # 6 x 2 x 2
            conv(2, 6, 12, 1, 2, padding=1, **options),
            pool(3, 3),  # 12
            flat,
            dense(12, 15, **options),
        )
        given = {
            **common,
            "parameterization": name,
            "temperature": 0.7,
            "padding": np.asarray([0, 1]),
        }
        record_images(
            f"torchlogix_conv_{name}",
            model,
            bits,
            **given,
            shape=np.asarray([5, 5, 3]),
            pool=np.asarray([2, 3]),
        )


def difflogic(torch: Any, folder: Path) -> None:
    package("difflogic", folder / "difflogic")
    sys.modules["difflogic_cuda"] = types.ModuleType("difflogic_cuda")
    layer = importlib.import_module("difflogic.difflogic").LogicLayer

    def made(n_in: int, n_out: int) -> Any:
        return layer(n_in, n_out, device="cpu", implementation="python")

    model = torch.nn.Sequential(made(18, 30), made(30, 20))
    bits = (torch.rand(40, 18) > 0.5).float()
    record(
        "difflogic",
        model,
        bits,
        lambda x: model(x).reshape(-1, 5, 4).sum(-1) / 3.0,
        n_classes=5,
        tau=3.0,
    )


def torch_dwn(torch: Any, folder: Path) -> None:
    package("torch_dwn", folder / "src" / "torch_dwn")
    sys.modules["efd_cuda"] = types.ModuleType("efd_cuda")
    module = importlib.import_module("torch_dwn.lut_layer")

    def forward(x: Any, mapping: Any, luts: Any, *_: Any) -> Any:
        places = 2 ** torch.arange(mapping.shape[1])
        address = ((x[:, mapping.long()] > 0) * places).sum(-1)  # input l is bit l
        return luts[torch.arange(len(luts)), address]

    module.EFDFunction = types.SimpleNamespace(apply=forward)
    groups = importlib.import_module("torch_dwn.utils").GroupSum
    thermometer = importlib.import_module("torch_dwn.binarization").DistributiveThermometer(3)
    x = torch.randn(40, 6)
    thermometer.fit(x)

    def network(mapping: str) -> Any:
        first = module.LUTLayer(18, 30, n=4, mapping=mapping)
        return torch.nn.Sequential(first, module.LUTLayer(30, 20, n=4), groups(5, 3.0))

    for mapping in ("random", "learnable"):
        model = network(mapping)
        model.register_buffer("thresholds", thermometer.thresholds)
        bits = thermometer.binarize(x).flatten(1)
        name = "dwn" if mapping == "random" else "dwn_learned_wires"
        record(name, model, x, lambda x, model=model, bits=bits: model(bits), n_classes=5, tau=3.0)
    one = (
        importlib.import_module("torch_dwn.binarization").Thermometer(3, feature_wise=False).fit(x)
    )
    votes = groups(5, 3.0, randperm=20)
    model = torch.nn.Sequential(module.LUTLayer(18, 20, n=6, mapping="arange"), votes)
    model.register_buffer("thresholds", one.thresholds)
    model.register_buffer("randperm", votes.randperm)
    bits = one.binarize(x).flatten(1)
    record(
        "dwn_one_thermometer", model, x, lambda x: model(bits), n_classes=5, tau=3.0, n_inputs=18
    )


def spiky(torch: Any, folder: Path) -> None:
    """Record language models over a text; the folder of the same name builds the extension ``spiky_cuda`` for CPUs."""
    sys.path.insert(0, str(folder / "src"))
    transformer = importlib.import_module("spiky.lut.LUTTransformer").LUTTransformer
    text = torch.tensor(
        list(
            b"to be, or not to be, that is the question: whether 'tis nobler in the mind to suffer"
        )
    )
    x = text[:80].reshape(10, 8)
    kinds: dict[str, dict[str, Any]] = {
        "": {},
        "_shared_positions": {"unified_pe": True, "use_batch_norm": True},
        "_pair": {"concatenation_product": False, "no_ffn": True},
        "_pair_interleaved": {
            "concatenation_product": False,
            "sliced_product_mode": True,
            "positional_dim": 12,
        },
    }
    for name, options in kinds.items():
        sizes = {"positional_dim": 2, "num_layers": 2, "num_heads": 2, "n_detectors": 3, **options}
        model = transformer(
            128,
            12,
            8,
            n_anchors_per_detector=4,
            n_anchors_per_detector_attention=2,
            seed=1,
            **sizes,
        )
        saved = dict(model.state_dict())
        for layer_name, layer in model.named_modules():
            if hasattr(layer, "_export_anchors"):
                torch.nn.init.normal_(layer._weights, std=0.2)
                saved[f"{layer_name}._detector_anchors"] = layer._export_anchors()
        outputs = {}
        for what, training in (
            ("soft", True),
            ("hard", False),
        ):  # batch normalization moves in training
            model.train(training)
            outputs[what] = model(x).detach().numpy()
        given: dict[str, Any] = {"context": 8, "shared_positions": options.get("unified_pe", False)}
        given |= {"attention": "pair_interleaved"} if "sliced_product_mode" in options else {}
        tensors = {f"t/{key}": value.detach().numpy() for key, value in saved.items()}
        arguments = {f"a/{key}": np.asarray(value) for key, value in given.items()}
        file = HERE / f"foreign_spiky{name}.npz"
        np.savez_compressed(file, x=x.numpy().astype(np.int32), **outputs, **tensors, **arguments)
        print("spiky", name, outputs["hard"].shape)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--difflogic", type=Path)
    parser.add_argument("--dwn", type=Path)
    parser.add_argument("--spiky", type=Path)
    given = parser.parse_args()
    torch: Any = importlib.import_module("torch")
    torch.manual_seed(0)
    torchlogix(torch)
    if given.difflogic:
        difflogic(torch, given.difflogic)
    if given.dwn:
        torch_dwn(torch, given.dwn)
    torchlogix_images(torch)
    if given.spiky:
        spiky(torch, given.spiky)


if __name__ == "__main__":
    main()
