"""``lutjax import``: conversion of other packages' networks to bundles."""

from pathlib import Path
from typing import Any

import click

from lutjax.cli import _run
from lutjax.cli._flags import PATH, Command, Finite, Integer, IntegerOrIntegers, Integers, flag_of
from lutjax.models._fields import MOST, MOST_INT

_CLASSIFIERS = ("torchlogix", "difflogic", "torch-dwn")
_MEMORIES = ("engram", "ple", "longcat")
_SIZES = ("padding", "pool", "pool_padding")
_TORCHLOGIX = (
    "parameterization", "temperature", "binarization", "binarization_temperature", "image",
    *_SIZES,
)  # fmt: skip
_IS_FOR = {
    **dict.fromkeys(("classes", "tau", "bits"), _CLASSIFIERS),
    **dict.fromkeys(_TORCHLOGIX, ("torchlogix",)),
    **dict.fromkeys(("context", "attention", "shared_positions"), ("spiky",)),
    "layer": ("engram", "ple"),
    "tokenizer": ("engram",),
}
"""Packages by supported option."""


@click.command(
    "import",
    cls=Command,
    sections={
        "Source": "package",
        "Classifiers": "classes tau bits",
        "Torchlogix": (
            "parameterization temperature binarization binarization_temperature image padding "
            "pool pool_padding"
        ),
        "Spiky": "context attention shared_positions",
        "Memories": "layer tokenizer",
    },
)
@click.argument("file", metavar="FILE", type=PATH)
@click.argument("folder", metavar="DIR", type=PATH)
@click.option(
    "--from",
    "package",
    type=click.Choice([*_CLASSIFIERS, "spiky", *_MEMORIES]),
    required=True,
    help="Source package.",
)
@click.option(
    "--classes",
    type=Integer(2, MOST_INT),
    help="Number of classes (GroupSum).  [required; no default]",
)
@click.option("--tau", type=Finite(0, MOST), help="Vote temperature (GroupSum).  [default: 1]")
@click.option(
    "--bits",
    type=Integer(1, MOST_INT),
    help="Bits per sample, without thresholds.  [default: from the first layer]",
)
@click.option(
    "--parameterization",
    type=click.Choice(["light", "warp"]),
    help="Table parameterization.  [default: light]",
)
@click.option(
    "--temperature", type=Finite(0, MOST), help="Parameterization temperature.  [default: 1]"
)
@click.option(
    "--binarization",
    type=click.Choice(["fixed", "hard", "soft"]),
    help="Binarization in training.  [default: soft if learned, else fixed]",
)
@click.option(
    "--binarization-temperature", type=Finite(0, MOST), help="temperature_sampling.  [default: 0.1]"
)
@click.option(
    "--image",
    type=Integers(),
    help="Height, width and channels, for convolutions.  [default: none]",
)
@click.option(
    "--padding",
    type=IntegerOrIntegers(),
    help="Convolution padding, for all or each.  [default: 0]",
)
@click.option(
    "--pool", type=IntegerOrIntegers(), help="OR pooling size after convolutions.  [default: 1]"
)
@click.option("--pool-padding", type=IntegerOrIntegers(), help="Pooling padding.  [default: 0]")
@click.option(
    "--context", type=Integer(2, MOST_INT), help="Model's context_size.  [required; no default]"
)
@click.option(
    "--attention",
    type=click.Choice(["concatenated", "pair", "pair_interleaved"]),
    help="Attention type.  [default: from table sizes]",
)
@click.option(
    "--shared-positions",
    is_flag=True,
    default=None,
    help="The model has unified_pe.  [default: it has not]",
)
@click.option(
    "--layer", type=Integer(0, MOST_INT), help="Decoder layer, from 0.  [default: first memory]"
)
@click.option("--tokenizer", type=PATH, help="tokenizer.json.  [default: FILE's]")
def import_(file: Path, folder: Path, package: str, **options: Any) -> None:
    """Convert a network of another package to a bundle.

    FILE is a .safetensors, .pt or .pth file with a state dict; .pt files are read with PyTorch's
    weights-only loader. Other commands and lutjax.load take DIR like a run. In Python, use
    lutjax.convert.

    For engram, ple and longcat, FILE is a checkpoint folder with config.json and the safetensors
    files of an n-gram memory. DIR then names the table files by digest and has no table.
    """
    import lutjax
    from lutjax.convert._packages import PACKAGES

    arguments = {name: value for name, value in options.items() if value is not None}
    for name in arguments:
        if package not in _IS_FOR[name]:
            raise click.UsageError(
                f"{flag_of(name)} is for --from {', '.join(_IS_FOR[name])}; leave it out."
            )
    # A memory stays in its files: there is no state dict to read.
    if package in _MEMORIES:
        record = lutjax.convert.convert_memory(file, folder, family=package, **arguments)
        rows, width = record["base"]["rows"], record["base"]["width"]
        click.echo(
            f"Converted a memory of {rows:,} rows with {width} elements to {folder}. "
            f"The table stays in {file}."
        )
        return
    needed = "context" if package == "spiky" else "classes"
    if needed not in arguments:
        raise click.UsageError(f"Missing option '{flag_of(needed)}', which --from {package} needs.")
    sizes = {name: arguments.pop(name) for name in _SIZES if name in arguments}
    if "image" in arguments:
        arguments["image"] = lutjax.convert.Image(arguments["image"], **sizes)
    elif sizes:
        raise click.UsageError(f"{flag_of(min(sizes))} is for images; give their size: --image.")
    names = {"classes": "n_classes", "bits": "n_inputs"}
    arguments = {names.get(name, name): value for name, value in arguments.items()}
    model = PACKAGES[package](lutjax.convert.read(file), **arguments)
    lutjax.save(model, folder)
    click.echo(
        f"Converted {_describe_model(model)} to {folder}. "
        f"Export it with:\n  {_run.command('export', str(folder))}"
    )


def _describe_model(model: Any) -> str:
    from lutjax.models import LogicTreeNet, LUTTransformer

    config = model.config
    if isinstance(model, LUTTransformer):
        return (
            f"{config.n_layers} layers of tables over {config.features} numbers, "
            f"for {config.vocab_size} tokens"
        )
    layers = " + ".join(map(str, config.layers))
    if isinstance(model, LogicTreeNet):
        trees, shape = " + ".join(map(str, config.kernels)), " x ".join(map(str, config.in_shape))
        return f"{trees} trees and {layers} {config.tables} over {shape} numbers"
    return f"{layers} {config.kind} over {config.in_features} numbers"
