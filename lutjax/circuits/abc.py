"""Circuit equivalence proofs and optimization with the Berkeley synthesis tool ABC.

``pip install pyosys`` includes it; otherwise ``yosys-abc``, ``berkeley-abc`` or ``abc`` on the
path is used.
"""

import dataclasses
import importlib.util
import os
import pathlib
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping

from lutjax.circuits import _netlists, _programs, aiger, blif, netlist_json, yosys
from lutjax.circuits.circuit import Circuit

_NAMES = ("yosys-abc", "berkeley-abc", "abc")
SCRIPT = "strash; ifraig; dc2; resyn2; dc2; resyn2"
# Written out, because not every ABC installation has its alias file.
_ALIASES = {
    "resyn2": (
        "balance; rewrite; refactor; balance; rewrite; rewrite -z; balance; refactor -z; "
        "rewrite -z; balance"
    )
}
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")


@dataclasses.dataclass(frozen=True)
class Equivalence:
    """Result of a comparison between two circuits.

    Attributes:
      status: ``"equal"``, proved for all inputs; ``"different"``; or ``"undecided"`` after the
        time limit.
      counterexample: inputs with different answers, a bit for each input of the first circuit by
        name (``x[3]``).
      line: ABC output line.
    """

    status: str
    counterexample: Mapping[str, int] | None
    line: str

    def __bool__(self) -> bool:
        return self.status == "equal"


def find() -> str | None:
    """Return the path of ABC, or None if it is not installed."""
    spec = importlib.util.find_spec("pyosys")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for name in ("yosys-abc", "yosys-abc.exe"):
            path = pathlib.Path(folder, name)
            if path.is_file() and os.access(path, os.X_OK):
                return str(path)
    return next((path for path in map(shutil.which, _NAMES) if path), None)


def run(script: str, folder: str | pathlib.Path = ".", *, seconds: float | int = 600) -> str:
    """Run ABC commands, which may name files in `folder`, and return the output.

    ABC prints command errors and continues: check the output.

    Raises:
      RuntimeError: ABC is not installed, or it crashed.
      TimeoutError: the time limit was exceeded.
    """
    program = find()
    if program is None:
        raise RuntimeError(
            "lutjax.circuits.abc: ABC is not installed; `pip install pyosys` brings it."
        )
    for alias, commands in _ALIASES.items():
        script = re.sub(rf"\b{alias}\b", commands, script)
    status, text = _programs.run(
        [program, "-q", script], folder, seconds, where="lutjax.circuits.abc: "
    )
    text = _ESCAPES.sub("", text)
    if status:
        raise RuntimeError(f"lutjax.circuits.abc: ABC ended with {status}: {text.strip()[-300:]}")
    return text


def cec(
    first: Circuit | str | os.PathLike[str],
    second: Circuit | str | os.PathLike[str],
    *,
    seconds: float | int = 300,
) -> Equivalence:
    """Prove that two circuits are equivalent for all inputs, or find a counterexample.

    Inputs and outputs are paired by name if both circuits have the same names, else in order.

    Args:
      first: circuit or file: BLIF (``.blif``) and binary AIGER (``.aig``), parsed by ABC; ASCII
        AIGER (``.aag``) and JSON (``.json``), parsed by lutjax; combinational Verilog (``.v``),
        parsed by Yosys if pyosys is installed.
      second: circuit or file to compare with the first one.
      seconds: time limit, after which the result is ``"undecided"``.

    Raises:
      ValueError: unsupported files, or different numbers of inputs or outputs.
      RuntimeError: ABC is not installed, or cannot read a file.
    """
    with tempfile.TemporaryDirectory() as folder:
        places = [
            _write_readable(netlist, pathlib.Path(folder), name)
            for netlist, name in ((first, "a"), (second, "b"))
        ]
        names = [_names_of(place, folder, seconds) for place in places]
        sizes = [tuple(map(len, some)) for some in names]
        if sizes[0] != sizes[1]:
            raise ValueError(
                "cec: the circuits have different interfaces: (inputs, outputs) "
                f"{sizes[0]} and {sizes[1]}."
            )
        by_name = all(sorted(a) == sorted(b) for a, b in zip(*names, strict=True))
        options = f"-C 100000000 -T {max(1, int(seconds))}" + ("" if by_name else " -n")
        # ABC stops by itself; the process gets some seconds more to write its result.
        command = f"cec {options} {places[0].name} {places[1].name}"
        try:
            text = run(command, folder, seconds=seconds + 5)
        except TimeoutError as error:
            return Equivalence("undecided", None, str(error))
    results = (row for row in text.splitlines() if row.startswith("Networks are"))
    line = next(results, text.strip()[-300:])
    if line.startswith("Networks are equivalent"):
        return Equivalence("equal", None, line)
    if line.startswith("Networks are NOT EQUIVALENT"):
        pattern = re.search(r"Input pattern:(.*)", text)
        # Inputs without influence have no value in the pattern: any value is a counterexample.
        bits = dict(re.findall(r"(\S+)=([01])", pattern[1])) if pattern else {}
        inputs = names[0][0]
        keys = inputs if by_name else [f"pi{k}" for k in range(len(inputs))]
        values = {name: int(bits.get(key, 0)) for name, key in zip(inputs, keys, strict=True)}
        return Equivalence("different", values, line)
    return Equivalence("undecided", None, line)


def lut_count(circuit: Circuit, k: int = 6, *, seconds: float | int = 300) -> int:
    """Return ABC's count of k-input lookup tables for a circuit, k from 2 to 16.

    Raises:
      ValueError: k out of range.
      RuntimeError: ABC is not installed.
      TimeoutError: the time limit was exceeded.
    """
    if type(k) is not int or not 2 <= k <= 16:
        raise ValueError(f"lut_count: k is {k!r}; it must be a whole number from 2 to 16.")
    with tempfile.TemporaryDirectory() as folder:
        pathlib.Path(folder, "a.aig").write_bytes(aiger.write(circuit))
        text = run(f"read a.aig; strash; if -K {k} -a; print_stats", folder, seconds=seconds)
    match = re.search(r"\bnd = *(\d+)", text)
    if match is None:
        raise RuntimeError(f"lut_count: ABC printed no number of nodes: {text.strip()[-300:]}")
    return int(match[1])


def optimize(circuit: Circuit, script: str = SCRIPT, *, seconds: float | int = 600) -> Circuit:
    """Optimize a circuit with ABC commands, keeping its ports.

    Parts are lost, because ABC has no parts. Prove the result by `cec`.

    Args:
      circuit: the circuit.
      script: commands between reading and writing the circuit: AND node minimization by default;
        ``"strash; if -K 6 -a"`` maps to 6-input tables.
      seconds: time limit.

    Raises:
      RuntimeError: ABC is not installed, or wrote no output because a command is wrong.
      TimeoutError: the time limit was exceeded.
    """
    with tempfile.TemporaryDirectory() as folder:
        pathlib.Path(folder, "a.aig").write_bytes(aiger.write(circuit))
        text = run(f"read a.aig; {script}; write_blif b.blif", folder, seconds=seconds)
        written = pathlib.Path(folder, "b.blif")
        if not written.is_file():
            raise RuntimeError(
                f"optimize: ABC wrote no circuit after {script!r}: {text.strip()[-300:]}"
            )
        optimized = blif.read(written.read_bytes())
    # Some commands change the ports.
    for before, after in ((circuit.inputs, optimized.inputs), (circuit.outputs, optimized.outputs)):
        if _netlists.bit_names(before) != _netlists.bit_names(after):
            raise RuntimeError(
                f"optimize: after {script!r} the circuit has other ports: {optimized!r}."
            )
    inputs, outputs, about = circuit.inputs, circuit.outputs, circuit.about
    return dataclasses.replace(optimized, inputs=inputs, outputs=outputs, about=about)


def from_verilog(text: str, *, seconds: float | int = 300) -> Circuit:
    """Return the circuit of a combinational Verilog module, parsed by Yosys (pyosys).

    Raises:
      RuntimeError: pyosys is not installed, or Yosys cannot read the text.
      TimeoutError: the time limit was exceeded.
    """
    with tempfile.TemporaryDirectory() as folder:
        pathlib.Path(folder, "a.v").write_text(text, encoding="utf-8")
        yosys.run(_TO_ANDS, folder, seconds=seconds, where="from_verilog")
        return aiger.read(pathlib.Path(folder, "a.aig").read_bytes())


_TO_ANDS = (
    *("read_verilog a.v", "hierarchy -auto-top -check", "proc -norom", "flatten", "opt_clean"),
    *("techmap", "opt", "aigmap", "write_aiger -symbols a.aig"),
)


def _write_readable(
    netlist: Circuit | str | os.PathLike[str], folder: pathlib.Path, name: str
) -> pathlib.Path:
    """Return a circuit as a file readable by ABC, converting other formats."""
    if not isinstance(netlist, Circuit):
        path = pathlib.Path(netlist).resolve()
        if path.suffix not in (".blif", ".aig", ".aag", ".json", ".v"):
            raise ValueError(
                f"cec: the file is {path.name!r}; expected .blif, .aig, .aag, .json or .v."
            )
        data = path.read_bytes()
        # Copied, because a path may contain spaces, which ABC takes for the ends of words.
        if path.suffix in (".blif", ".aig"):
            place = folder / (name + path.suffix)
            place.write_bytes(data)
            return place
        readers: dict[str, Callable[[bytes], Circuit]] = {
            ".aag": aiger.read,
            ".json": netlist_json.read,
            ".v": lambda data: from_verilog(data.decode()),
        }
        netlist = readers[path.suffix](data)
    place = folder / f"{name}.aig"
    place.write_bytes(aiger.write(netlist))
    return place


def _names_of(
    place: pathlib.Path, folder: str, seconds: float | int
) -> tuple[list[str], list[str]]:
    text = run(f"read {place.name}; print_io", folder, seconds=seconds)
    names = []
    for kind in ("inputs", "outputs"):
        match = re.search(rf"Primary {kind} \((\d+)\):(.*)", text)
        if match is None:
            raise RuntimeError(f"cec: ABC cannot read {place.name}: {text.strip()[-300:]}")
        names.append(re.findall(r"\b\d+=(\S+)", match[2]))
        if len(names[-1]) != int(match[1]):
            raise RuntimeError(
                f"cec: ABC names {len(names[-1])} of {match[1]} {kind} of {place.name}."
            )
    return names[0], names[1]
