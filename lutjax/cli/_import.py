"""``lutjax import``: a network of another package as a bundle."""

from pathlib import Path

import click

from lutjax.cli._flags import Finite
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
def import_(
    file: Path,
    folder: Path,
    package: str,
    classes: int,
    tau: float,
    bits: int | None,
    parametrisation: str | None,
    temperature: float | None,
) -> None:
    """Convert the network in FILE, which another package trained, to a bundle in DIR.

    FILE is a .safetensors file of a state dict, or a .pt or .pth file of one, which PyTorch's loader of weights alone reads. lutjax.load reads DIR, and so do `export` with --format jax and whoever has
    no lutjax. lutjax.convert does the same in Python.
    """
    import lutjax
    from lutjax.convert._packages import PACKAGES

    of_torchlogix = {"parametrisation": parametrisation, "temperature": temperature}
    options = {name: value for name, value in of_torchlogix.items() if value is not None}
    if options and package != "torchlogix":
        raise click.UsageError(f"--{min(options)} is for --from torchlogix; leave it out.")
    tensors = lutjax.convert.read(file)
    model = PACKAGES[package](tensors, n_classes=classes, tau=tau, n_inputs=bits, **options)
    lutjax.save(model, folder)
    layers = " + ".join(map(str, model.config.layers))
    click.echo(
        f"{layers} {model.config.kind} over {model.config.in_features} numbers are written to {folder}: lutjax.load reads it."
    )
