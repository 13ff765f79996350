"""``lutjax import``: a network of another package as a bundle."""

from pathlib import Path
from typing import Any

import click

from lutjax.cli import _run
from lutjax.cli._flags import Finite, IntegerOrIntegers, Integers, flag_of
from lutjax.models._fields import MOST, MOST_INT

_CLASSIFIERS = ("torchlogix", "difflogic", "torch-dwn")
_SIZES = ("padding", "pool", "pool_padding")
_IS_FOR = {
    **dict.fromkeys(("classes", "tau", "bits"), _CLASSIFIERS),
    **dict.fromkeys(
        (
            *("parameterization", "temperature", "binarization", "binarization_temperature", "image"),
            *_SIZES,
        ),
        ("torchlogix",),
    ),
    **dict.fromkeys(("context", "attention", "shared_positions"), ("spiky",)),
}
"""Packages that options are for."""


@click.command("import")
@click.argument("file", metavar="FILE", type=click.Path(path_type=Path))
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@click.option(
    "--from",
    "package",
    type=click.Choice([*_CLASSIFIERS, "spiky"]),
    required=True,
    help="Package that the network was trained with.",
)
@click.option(
    "--classes",
    type=click.IntRange(2, MOST_INT),
    help="Classes of a classifier: the first argument of its GroupSum. There is no default.",
)
@click.option("--tau", type=Finite(0, MOST), help="The second argument of its GroupSum. Default: 1.")
@click.option(
    "--bits",
    type=click.IntRange(1, MOST_INT),
    help="Bits of a sample, where the file has no thresholds. Default: as many as the first layer reads.",
)
@click.option(
    "--parameterization",
    type=click.Choice(["light", "warp"]),
    help="Of tables of torchlogix that are no gates with 16 logits. Default: light.",
)
@click.option(
    "--temperature", type=Finite(0, MOST), help="Of the parameterization of torchlogix. Default: 1."
)
@click.option(
    "--binarization",
    type=click.Choice(["fixed", "hard", "soft"]),
    help="What a binarization of torchlogix gives in training. Default: soft where thresholds are learned, else fixed.",
)
@click.option(
    "--binarization-temperature", type=Finite(0, MOST), help="Its temperature_sampling. Default: 0.1."
)
@click.option(
    "--image",
    type=Integers(),
    help="Height, width and channels of images, for convolutions. Default: no images.",
)
@click.option(
    "--padding", type=IntegerOrIntegers(), help="Of convolutions: a number, or one for each. Default: 0."
)
@click.option("--pool", type=IntegerOrIntegers(), help="Size of the or after convolutions. Default: 1, none.")
@click.option("--pool-padding", type=IntegerOrIntegers(), help="Its padding. Default: 0.")
@click.option(
    "--context",
    type=click.IntRange(2, MOST_INT),
    help="context_size of a language model of spiky. There is no default.",
)
@click.option(
    "--attention",
    type=click.Choice(["concatenated", "pair", "pair_interleaved"]),
    help="Its attention. Default: what the sizes of its tables say, of the first two.",
)
@click.option(
    "--shared-positions", is_flag=True, default=None, help="It has unified_pe. Default: it has not."
)
def import_(file: Path, folder: Path, package: str, **options: Any) -> None:
    """Convert the network in FILE, which another package trained, to a bundle in DIR.

    FILE is a .safetensors file of a state dict, or a .pt or .pth file of one, which PyTorch's loader of weights alone reads. `export`, `verify`, `fpga`, `info`, `serve`, `save`, and `predict` or
    `generate` take DIR as the folder of a run, and lutjax.load reads it. lutjax.convert does the same in Python.
    """
    import lutjax
    from lutjax.convert._packages import PACKAGES

    given = {name: value for name, value in options.items() if value is not None}
    for name in given:
        if package not in _IS_FOR[name]:
            raise click.UsageError(f"{flag_of(name)} is for --from {', '.join(_IS_FOR[name])}; leave it out.")
    needed = "context" if package == "spiky" else "classes"
    if needed not in given:
        raise click.UsageError(f"Missing option '{flag_of(needed)}', which --from {package} needs.")
    sizes = {name: given.pop(name) for name in _SIZES if name in given}
    if "image" in given:
        given["image"] = lutjax.convert.Image(given["image"], **sizes)
    elif sizes:
        raise click.UsageError(f"{flag_of(min(sizes))} is for images; give their size: --image.")
    names = {"classes": "n_classes", "bits": "n_inputs"}
    given = {names.get(name, name): value for name, value in given.items()}
    model = PACKAGES[package](lutjax.convert.read(file), **given)
    lutjax.save(model, folder)
    click.echo(
        f"{_described(model)} are written to {folder}. Export it by:\n  {_run.command('export', str(folder))}"
    )


def _described(model: Any) -> str:
    from lutjax.models import LogicTreeNet, LUTTransformer

    config = model.config
    if isinstance(model, LUTTransformer):
        return f"{config.n_layers} layers of tables over {config.features} numbers, for {config.vocab_size} tokens,"
    layers = " + ".join(map(str, config.layers))
    if isinstance(model, LogicTreeNet):
        trees = " + ".join(map(str, config.kernels))
        return (
            f"{trees} trees and {layers} {config.tables} over {' x '.join(map(str, config.in_shape))} numbers"
        )
    return f"{layers} {config.kind} over {config.in_features} numbers"
