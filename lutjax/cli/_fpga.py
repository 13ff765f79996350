"""``lutjax fpga``: what a circuit takes on an FPGA."""

from pathlib import Path

import click

from lutjax.cli._export import progress
from lutjax.cli._flags import Finite
from lutjax.files.errors import FolderError


@click.command()
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@click.option(
    "--family",
    required=True,
    type=click.Choice(["ice40", "ecp5", "xc7"]),
    help="FPGAs: Lattice iCE40, Lattice ECP5, or the 7 series of AMD (Xilinx).",
)
@click.option(
    "--clock",
    metavar="MHZ",
    type=Finite(0, min_open=True),
    help="Clock that the circuit is placed for, in MHz. Default: the fastest.",
)
@click.option(
    "--registers",
    type=click.IntRange(0),
    help="Levels of gates between two registers; 0 for none. Default: as DIR was exported, and 0 for a run.",
)
@click.option(
    "--place/--no-place",
    default=True,
    help="Place and route by nextpnr where it is found, or only count cells. Default: place.",
)
@click.option(
    "--seconds",
    type=Finite(1),
    default=1800,
    show_default=True,
    help="After which a tool is ended.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File of JSON to write. Default: beside DIR, of its name and the family, such as digits_ice40.json.",
)
def fpga(
    folder: Path,
    family: str,
    clock: float | None,
    registers: int | None,
    place: bool,
    seconds: float,
    out: Path | None,
) -> None:
    """Report what the circuit of DIR takes on an FPGA: look-up tables, flip-flops, carry cells, levels.

    DIR is what `lutjax export` wrote, or the folder of a run of `train classify` or `train ca`. Its encoder, layers, votes and argmax are counted apart, and
    all together. It needs Yosys (`pip install pyosys`). Where nextpnr is found (iCE40, ECP5), clock, latency and throughput are reported, too.
    """
    from lutjax.circuits import fpga as reporting, yosys

    if not yosys.is_installed():
        raise click.ClickException("lutjax fpga needs Yosys, which is not installed: pip install pyosys")
    circuit, exported = _read(folder, reporting.FAMILIES[family].lut)
    target = out or folder.absolute().with_name(f"{folder.absolute().name}_{family}.json")
    with progress("mapping") as doing:
        try:
            found = reporting.report(
                circuit,
                family,
                registers=exported if registers is None else registers,
                clock=clock,
                place=place,
                seconds=seconds,
                progress=doing,
            )
        except (RuntimeError, TimeoutError) as error:
            raise click.ClickException(str(error)) from error
    target.write_text(found.to_json())
    click.echo(str(found))
    click.echo(f"written to {target}")


def _read(folder: Path, lut: int):  # type: ignore[no-untyped-def]  # a Circuit, which is not imported for --help
    """Return the circuit of an export or of a run, and the number of levels between its registers."""
    from lutjax.circuits import deployment, netlist_json

    if not (folder / deployment.MANIFEST).exists():
        from lutjax.training import export as exporting

        if not folder.is_dir():
            raise FolderError(
                f"{folder} is no folder; give one that `lutjax export` wrote, or that of a run."
            )
        return exporting.source_of(folder, lut=lut).circuit, 0
    manifest = deployment.read_manifest(folder)
    if manifest["kind"] != "circuit":
        raise FolderError(
            f"{folder} is the export of a {manifest['kind']}, which is a program and no circuit."
        )
    place = folder / manifest["circuit"]
    try:
        return netlist_json.read(place), manifest["registers"]
    except (OSError, ValueError) as error:
        raise FolderError(f"{place} cannot be read: {error}") from error
