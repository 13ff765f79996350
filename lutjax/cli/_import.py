"""``lutjax import``: a network of another package as a bundle."""

from pathlib import Path
from typing import Any

import click

from lutjax.cli._flags import Finite, IntegerOrIntegers, Integers
from lutjax.models._fields import MOST, MOST_INT


@click.command("import")
@click.argument("file", metavar="FILE", type=click.Path(path_type=Path))
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@click.option(
    "--from",
    "package",
    type=click.Choice(["torchlogix", "difflogic", "torch-dwn"]),
    required=True,
    help="Package that the network was trained with.",
)
@click.option(
    "--classes",
    type=click.IntRange(2, MOST_INT),
    required=True,
    help="Classes: the first argument of its GroupSum.",
)
@click.option(
    "--tau", type=Finite(0, MOST), default=1.0, show_default=True, help="The second argument of its GroupSum."
)
@click.option(
    "--bits",
    type=click.IntRange(1, MOST_INT),
    help="Bits of a sample, where the file has no thresholds. Default: as many as the first layer reads.",
)
@click.option(
    "--parametrisation",
    type=click.Choice(["light", "warp"]),
    help="Of tables of torchlogix that are no gates with 16 logits. Default: light.",
)
@click.option("--temperature", type=Finite(0, MOST), help="Of the parametrisation of torchlogix. Default: 1.")
@click.option(
    "--binarization",
    type=click.Choice(["fixed", "hard", "soft"]),
    help="What a binarization of torchlogix gives in training. Default: soft where thresholds are learned, else fixed.",
)
@click.option(
    "--binarization-temperature", type=Finite(0, MOST), help="Its temperature_sampling. Default: 0.1."
)
@click.option("--image", type=Integers(), help="Height, width and channels of images, for convolutions.")
@click.option(
    "--padding", type=IntegerOrIntegers(), help="Of convolutions: a number, or one for each. Default: 0."
)
@click.option("--pool", type=IntegerOrIntegers(), help="Size of the or after convolutions. Default: 1, none.")
@click.option("--pool-padding", type=IntegerOrIntegers(), help="Its padding. Default: 0.")
def import_(
    file: Path,
    folder: Path,
    package: str,
    classes: int,
    tau: float,
    bits: int | None,
    parametrisation: str | None,
    temperature: float | None,
    binarization: str | None,
    binarization_temperature: float | None,
    image: tuple[int, ...] | None,
    padding: int | tuple[int, ...] | None,
    pool: int | tuple[int, ...] | None,
    pool_padding: int | tuple[int, ...] | None,
) -> None:
    """Convert the network in FILE, which another package trained, to a bundle in DIR.

    FILE is a .safetensors file of a state dict, or a .pt or .pth file of one, which PyTorch's loader of weights alone reads. lutjax.load reads DIR, and so do `export` with --format jax and whoever has
    no lutjax. lutjax.convert does the same in Python.
    """
    import lutjax
    from lutjax.convert._packages import PACKAGES

    options = _given(
        parametrisation=parametrisation,
        temperature=temperature,
        binarization=binarization,
        binarization_temperature=binarization_temperature,
    )
    sizes = _given(padding=padding, pool=pool, pool_padding=pool_padding)
    if package != "torchlogix" and (others := {**options, **sizes, **_given(image=image)}):
        raise click.UsageError(f"--{min(others).replace('_', '-')} is for --from torchlogix; leave it out.")
    if sizes and image is None:
        raise click.UsageError(f"--{min(sizes).replace('_', '-')} is for images; give their size: --image.")
    if image is not None:
        options["image"] = lutjax.convert.Image(image, **sizes)  # type: ignore[arg-type]
    tensors = lutjax.convert.read(file)
    model = PACKAGES[package](tensors, n_classes=classes, tau=tau, n_inputs=bits, **options)
    lutjax.save(model, folder)
    click.echo(f"{_described(model)} are written to {folder}: lutjax.load reads it.")


def _given(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _described(model: Any) -> str:
    from lutjax.models import LogicTreeNet

    config = model.config
    layers = " + ".join(map(str, config.layers))
    if isinstance(model, LogicTreeNet):
        trees = " + ".join(map(str, config.kernels))
        return (
            f"{trees} trees and {layers} {config.tables} over {' x '.join(map(str, config.in_shape))} numbers"
        )
    return f"{layers} {config.kind} over {config.in_features} numbers"
