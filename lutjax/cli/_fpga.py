"""``lutjax fpga``: FPGA resources of a circuit."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import click

from lutjax.cli._export import progress
from lutjax.cli._flags import FILE, PATH, Command, Finite, Integer
from lutjax.files.errors import FolderError


@click.command(
    cls=Command,
    sections={
        "Result (choose one)": "family board",
        "Output": "out layout",
        "Tools": "clock registers place seconds",
    },
)
@click.argument("folder", metavar="DIR", type=PATH)
@click.option(
    "--family",
    type=click.Choice(["ice40", "ecp5", "xc7"]),
    help="Report for Lattice iCE40, ECP5 or AMD 7 series.  [default: none]",
)
@click.option(
    "--board",
    type=click.Choice(["icebreaker", "ulx3s"]),
    help="Project for a board.  [default: none]",
)
@click.option(
    "--clock",
    metavar="MHZ",
    type=Finite(0, min_open=True),
    help="Target clock in MHz.  [default: fastest]",
)
@click.option(
    "--registers",
    type=Integer(0),
    help="Gate levels between registers; 0 for none.  [default: as exported, else 0]",
)
@click.option("--place/--no-place", default=True, help="Place and route with nextpnr if installed.")
@click.option(
    "--layout", metavar="FILE.svg", type=FILE, help="Layout picture to write.  [default: none]"
)
@click.option("--seconds", type=Finite(1), default=1800, help="Timeout per tool.")
@click.option(
    "--out",
    type=PATH,
    help="JSON report or project folder.  [default: DIR_FAMILY.json or DIR_BOARD]",
)
def fpga(
    folder: Path,
    family: str | None,
    board: str | None,
    registers: int | None,
    out: Path | None,
    **settings: Any,
) -> None:
    """Report FPGA resources of a circuit, or write a board project.

    DIR is an export, or a run or bundle of `train classify` or `train ca`. Reports require Yosys
    (`pip install pyosys`); with nextpnr (iCE40, ECP5) they include clock, latency and throughput. A
    project has Verilog with a serial port, pins, a Makefile and a test program.
    """
    if board is not None and family is None:
        _write_project(folder, board, registers, out)
        return
    if board is not None or family is None:
        raise click.UsageError("give --family for a report, or --board for a project.")
    from lutjax.circuits import fpga as reporting, yosys

    if not yosys.is_installed():
        raise click.ClickException(
            "lutjax fpga needs Yosys, which is not installed: pip install pyosys"
        )
    source = _read(folder, reporting.FAMILIES[family].lut)
    target = out or folder.absolute().with_name(f"{folder.absolute().name}_{family}.json")
    if target.is_dir():
        raise click.UsageError(f"--out is {target}, a folder; a report is a file.")
    registers = source.registers if registers is None else registers
    with progress("mapping") as doing:
        try:
            resources = reporting.report(
                source.circuit, family, registers=registers, progress=doing, **settings
            )
        except (RuntimeError, TimeoutError) as error:
            raise click.ClickException(str(error)) from error
    target.write_text(resources.to_json())
    click.echo(str(resources))
    if not source.exported:
        lut = reporting.FAMILIES[family].lut
        click.echo(
            f"gates are tables of up to {lut} inputs, as lutjax export --lut {lut} writes them; "
            "an export without --lut has other gates"
        )
    click.echo(f"Wrote {target}")
    if settings["layout"] is not None and resources.total.unplaced:
        click.echo(f"No layout written: {resources.total.unplaced}", err=True)


def _write_project(folder: Path, board: str, registers: int | None, out: Path | None) -> None:
    from lutjax.circuits import boards, fpga as reporting
    from lutjax.files.atomic import replace_folder

    place = folder.absolute()
    target = out or place.with_name(f"{place.name}_{board}")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise FolderError(f"{target} already exists; move it or choose another --out.")
    source = _read(folder, reporting.FAMILIES[boards.BOARDS[board].family].lut)
    registers = source.registers if registers is None else registers
    try:
        arguments = (source.circuit, source.name, board, source.vectors())
        files = boards.write(*arguments, registers=registers)
    except ValueError as error:
        raise FolderError(f"{folder} cannot be put on a board: {error}") from error
    target.parent.mkdir(parents=True, exist_ok=True)
    with replace_folder(target.resolve()) as temporary:
        temporary.mkdir()
        for name, text in files.items():
            (temporary / name).write_text(text, encoding="utf-8")
    for name, text in files.items():
        click.echo(f"  {name:<20}  {len(text):>11,} bytes")
    click.echo(f"Wrote {target}. Build and load the bitstream with:\n  make -C {target} program")


class _Given(NamedTuple):
    """Circuit from an export; or from a run or bundle, mapped to lookup tables."""

    exported: bool
    name: str
    circuit: Any  # a Circuit; not imported for --help
    registers: int  # gate levels between registers
    vectors: Callable[[], Any]  # samples and expected outputs


def _read(folder: Path, lut: int) -> _Given:
    from lutjax.circuits import deployment, netlist_json

    # A run is mapped here, for the tables of this family; an export is taken as it is.
    if not (folder / deployment.MANIFEST).exists():
        from lutjax.training import export as exporting

        if not folder.is_dir():
            raise FolderError(f"{folder} is not a folder; expected an export, a run or a bundle.")
        source = exporting.source_of(folder, lut=lut)
        return _Given(False, source.name, source.circuit, 0, source.vectors)
    manifest = deployment.read_manifest(folder)
    if manifest["kind"] != "circuit":
        raise FolderError(f"{folder} exports a {manifest['kind']}, which is no circuit.")
    place = folder / manifest["circuit"]
    try:
        circuit = netlist_json.read(place)
    except (OSError, ValueError) as error:
        raise FolderError(f"{place} cannot be read: {error}") from error

    def vectors() -> deployment.Vectors:
        samples = folder / deployment.VECTORS
        try:
            return deployment.Vectors.from_json(samples.read_bytes())
        except (OSError, ValueError) as error:
            raise FolderError(f"{samples} cannot be read: {error}") from error

    return _Given(True, manifest["name"], circuit, manifest["registers"], vectors)
