"""Record small networks of other packages, with their outputs, for the tests of `lutjax.convert`.

    python tests/golden/record_foreign.py --difflogic CHECKOUT --dwn CHECKOUT

writes ``foreign_*.npz`` beside this file. It needs PyTorch and torchlogix, and the published code of the two packages that no registry has for CPUs. Of torch-dwn, whose
kernels are for CUDA, the forward pass of the layer is written here, as its kernel defines it. lutjax is not imported.
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
    """Let modules of a package be imported without what it imports itself: CUDA extensions, or syntax of a later Python."""
    found = types.ModuleType(name)
    found.__path__ = [str(folder)]
    sys.modules[name] = found


def record(name: str, model: Any, x: Any, call: Callable[..., Any] | None = None, **arguments: Any) -> None:
    """Write tensors, inputs, hard and soft outputs of a network, and arguments of its conversion."""
    call = call or model
    outputs = {}
    for what, training in (("hard", False), ("soft", True)):
        model.train(training)
        outputs[what] = call(x).detach().numpy()
    tensors = {f"t/{key}": value.detach().numpy() for key, value in model.state_dict().items()}
    for key, layer in enumerate(model):
        if isinstance(getattr(layer, "indices", None), tuple):  # difflogic keeps them out of the state dict
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
        "torchlogix_raw", network(layers.FixedBinarization(thresholds), *dense(18, 30, 20)), numbers, **common
    )
    learned = network(layers.LearnableBinarization(thresholds), *dense(18, 30, 20))
    torch.nn.init.normal_(learned[0].raw_diffs, mean=0.2, std=0.1)
    record("torchlogix_thermometer", learned, numbers, **common)
    for name, rank in (("light", 4), ("warp", 2)):
        options = {"lut_rank": rank, "parametrization": name, "parametrization_kwargs": {"temperature": 0.7}}
        given = {**common, "parametrisation": name, "temperature": 0.7}
        record(f"torchlogix_{name}", network(*dense(18, 30, 20, **options)), bits, **given)
    one = network(*dense(18, 20, lut_rank=4, parametrization="warp"))
    record("torchlogix_warp_once", one, bits, **common, parametrisation="warp")
    chosen = dense(18, 30, 20, connections="learnable", connections_kwargs={"num_candidates": 4})
    record("torchlogix_learned_wires", network(*chosen), bits, n_inputs=18, **common)


def difflogic(torch: Any, folder: Path) -> None:
    package("difflogic", folder / "difflogic")
    sys.modules["difflogic_cuda"] = types.ModuleType("difflogic_cuda")
    layer = importlib.import_module("difflogic.difflogic").LogicLayer

    def made(n_in: int, n_out: int) -> Any:
        return layer(n_in, n_out, device="cpu", implementation="python")

    model = torch.nn.Sequential(made(18, 30), made(30, 20))
    bits = (torch.rand(40, 18) > 0.5).float()
    record("difflogic", model, bits, lambda x: model(x).reshape(-1, 5, 4).sum(-1) / 3.0, n_classes=5, tau=3.0)


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--difflogic", type=Path, required=True)
    parser.add_argument("--dwn", type=Path, required=True)
    given = parser.parse_args()
    torch: Any = importlib.import_module("torch")
    torch.manual_seed(0)
    torchlogix(torch)
    difflogic(torch, given.difflogic)
    torch_dwn(torch, given.dwn)


if __name__ == "__main__":
    main()
