"""``lutjax save``: a bundle for model hubs from a trained run."""

from pathlib import Path

import click

from lutjax.cli import _run
from lutjax.cli._flags import PATH, Command, parameter_error


@click.command(cls=Command)
@click.argument("run", metavar="RUN", type=PATH)
@click.argument("folder", metavar="DIR", type=PATH)
@click.option(
    "--table-dtype",
    type=click.Choice(["float32", "bfloat16", "int8"]),
    help="Stored table dtype.  [default: dtype of the model]",
)
def save(run: Path, folder: Path, table_dtype: str | None) -> None:
    """Save the model of a run as a bundle for model hubs.

    RUN is the output folder of any `train` command, or another bundle. DIR receives config.json,
    model.safetensors and README.md. Load it with lutjax.load, `generate` or `predict`.
    """
    import lutjax
    from lutjax.bundles.errors import BundleError
    from lutjax.training import model_folders, runs

    if folder.resolve() == run.resolve():
        raise parameter_error("DIR", "DIR is RUN; choose another folder.")
    # Read everything before the first file is written.
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
    use = f" Use it with:\n  lutjax {runs.use(kind, folder)}"
    click.echo(f"Wrote {folder}.{'' if runs.COMMANDS[kind] == 'train ca' else use}")
