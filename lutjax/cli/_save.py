"""``lutjax save``: a trained run as a bundle, a folder that hubs of models take."""

from pathlib import Path

import click

from lutjax.cli import _run


@click.command()
@click.argument("run", metavar="RUN", type=click.Path(path_type=Path))
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@click.option(
    "--table-dtype",
    type=click.Choice(["float32", "bfloat16", "int8"]),
    help="Dtype in which tables of numbers are stored; int8 has a power of two as scale of each table and output. Default: that of the model.",
)
def save(run: Path, folder: Path, table_dtype: str | None) -> None:
    """Save the model of RUN as a bundle in DIR: config.json, model.safetensors and README.md.

    RUN is a run of any `train` command, the folder of its --out, or another bundle. DIR can be uploaded to a hub of models as it is; lutjax.load, `generate` and `predict`
    read it, and so does whoever has no lutjax. README.md has the sizes, the losses that were measured and the digest of the data.
    """
    import lutjax
    from lutjax.bundles.errors import BundleError
    from lutjax.training import model_folders, runs

    if folder.resolve() == run.resolve():
        raise click.BadParameter("it is RUN; give another folder.", param_hint="DIR")
    model = _run.model(run)
    kind = model_folders.kind_of(run)
    try:
        lutjax.save(model, folder, table_dtype=table_dtype)
    except BundleError:
        raise
    except ValueError as error:
        raise click.UsageError(
            str(error).removeprefix("save: ").replace("table_dtype", "--table-dtype")
        ) from error
    for path in sorted(folder.iterdir()):
        if path.name in ("config.json", "model.safetensors", "README.md"):
            click.echo(f"  {path.name:<17}  {path.stat().st_size:>11,} bytes")
    uses = "" if runs.COMMANDS[kind] == "train ca" else f" Use it by:\n  lutjax {runs.use(kind, folder)}"
    click.echo(f"written to {folder}.{uses}")
