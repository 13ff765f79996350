"""``lutjax verify``: proofs that an export and the trained model agree."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from lutjax.cli import _run
from lutjax.cli._export import progress
from lutjax.cli._flags import PATH, Command
from lutjax.files.errors import FolderError


@click.command(cls=Command)
@click.argument("folder", metavar="DIR", type=PATH)
@click.option(
    "--run",
    "run",
    metavar="RUN",
    type=PATH,
    help="Exported run or bundle.  [default: its path at the export]",
)
def verify(folder: Path, run: Path | None) -> None:
    """Prove that exported files compute the trained model.

    DIR is an export, or a run or bundle with an export in its folder circuit. Each proof prints one
    line: passed, failed or skipped for a missing tool (gcc, Icarus Verilog, ABC). The exit status
    is 1 if a proof fails.
    """
    from lutjax.circuits import proofs
    from lutjax.training import export as exporting

    folder = export_folder(folder)

    @contextmanager
    def show_activity(name: str) -> Iterator[None]:
        with progress(name):
            yield

    # Results appear one by one, and survive a Ctrl-C: a proof may take minutes.
    results: list[proofs.Proof] = []

    def show(proof: proofs.Proof) -> None:
        results.append(proof)
        click.echo(str(proof))

    try:
        proofs.verify(
            folder,
            oracle=lambda manifest: exporting.oracle(manifest, run),
            doing=show_activity,
            on_proof=show,
        )
    except KeyboardInterrupt:
        click.echo(f"Stopped after {len(results)} proofs.")
        raise SystemExit(130) from None
    failed = [proof for proof in results if proof.passed is False]
    passed = sum(proof.passed is True for proof in results)
    seconds = sum(proof.seconds for proof in results)
    click.echo(
        f"{passed} passed, {len(failed)} failed, {len(results) - passed - len(failed)} skipped, "
        f"in {seconds:.1f} s. " + proofs.coverage(folder, results)
    )
    if failed:
        raise SystemExit(1)


def export_folder(folder: Path) -> Path:
    """Return an export's folder, given this folder or the run or bundle that holds it."""
    from lutjax.bundles._layout import is_bundle
    from lutjax.circuits import deployment
    from lutjax.training import export as exporting, runs

    if not (folder / deployment.MANIFEST).exists():
        if (folder / exporting.FOLDER / deployment.MANIFEST).exists():
            return folder / exporting.FOLDER
        if is_bundle(folder) or runs.exists(folder):
            raise FolderError(
                f"{folder} holds a model without an export; write one first: "
                f"{_run.command('export', str(folder))}"
            )
    return folder
