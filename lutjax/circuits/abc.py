"""Proofs and optimization of circuits by ABC, the synthesis tool of Berkeley.

It comes with ``pip install pyosys``; otherwise ``yosys-abc``, ``berkeley-abc`` or ``abc`` on the path is taken.
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
# Written out, since not every ABC is installed with its file of aliases.
_ALIASES = {
    "resyn2": "balance; rewrite; refactor; balance; rewrite; rewrite -z; balance; refactor -z; rewrite -z; balance"
}
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")


@dataclasses.dataclass(frozen=True)
class Equivalence:
    """Result of a comparison of two circuits.

    Attributes:
      status: ``"equal"``, proved for all inputs; ``"different"``; or ``"undecided"``, where the time was over.
      counterexample: where they differ, a bit for each input of the first circuit, by its name (``x[3]``).
      line: what ABC said.
    """

    status: str
    counterexample: Mapping[str, int] | None
    line: str

    def __bool__(self) -> bool:
        return self.status == "equal"


def find() -> str | None:
    """Return the path of ABC, None where it is not installed."""
    spec = importlib.util.find_spec("pyosys")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for name in ("yosys-abc", "yosys-abc.exe"):
            path = pathlib.Path(folder, name)
            if path.is_file() and os.access(path, os.X_OK):
                return str(path)
    return next((path for path in map(shutil.which, _NAMES) if path), None)


def run(script: str, folder: str | pathlib.Path = ".", *, seconds: float | int = 600) -> str:
    """Run commands of ABC, and return what it prints.

    Args:
      script: commands, with semicolons between them.
      folder: in which file names of the commands are.
      seconds: after which it is ended.

    Raises:
      RuntimeError: ABC is not installed, or it crashed. ABC prints errors of commands and goes on: look at the text.
      TimeoutError: the time was over.
    """
    program = find()
    if program is None:
        raise RuntimeError("lutjax.circuits.abc: ABC is not installed; `pip install pyosys` brings it.")
    for alias, commands in _ALIASES.items():
        script = re.sub(rf"\b{alias}\b", commands, script)
    status, text = _programs.run([program, "-q", script], folder, seconds, where="lutjax.circuits.abc: ")
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
    """Prove that two circuits compute the same for all inputs, or find inputs for which they differ.

    Inputs and outputs are paired by name where both have the same names, else in order.

    Args:
      first: circuit, or a file: BLIF (``.blif``) and binary AIGER (``.aig``), which ABC reads itself; ASCII
        AIGER (``.aag``) and JSON (``.json``), which lutjax reads; combinational Verilog (``.v``), which Yosys
        reads if pyosys is installed.
      second: circuit or file to compare with the first one.
      seconds: after which the result is ``"undecided"``.

    Raises:
      ValueError: other files, or circuits with different numbers of inputs or outputs.
      RuntimeError: ABC is not installed, or cannot read a file.
    """
    with tempfile.TemporaryDirectory() as folder:
        places = [_placed(given, pathlib.Path(folder), name) for given, name in ((first, "a"), (second, "b"))]
        names = [_names_of(place, folder, seconds) for place in places]
        sizes = [tuple(map(len, some)) for some in names]
        if sizes[0] != sizes[1]:
            raise ValueError(
                f"cec: the circuits have {sizes[0]} and {sizes[1]} inputs and outputs; expected as many of each."
            )
        by_name = all(sorted(a) == sorted(b) for a, b in zip(*names, strict=True))
        options = f"-C 100000000 -T {max(1, int(seconds))}" + ("" if by_name else " -n")
        try:
            text = run(f"cec {options} {places[0].name} {places[1].name}", folder, seconds=seconds + 5)
        except TimeoutError as error:
            return Equivalence("undecided", None, str(error))
    line = next((row for row in text.splitlines() if row.startswith("Networks are")), text.strip()[-300:])
    if line.startswith("Networks are equivalent"):
        return Equivalence("equal", None, line)
    if line.startswith("Networks are NOT EQUIVALENT"):
        pattern = re.search(r"Input pattern:(.*)", text)
        bits = dict(re.findall(r"(\S+)=([01])", pattern[1])) if pattern else {}
        inputs = names[0][0]
        keys = inputs if by_name else [f"pi{k}" for k in range(len(inputs))]
        return Equivalence(
            "different", {name: int(bits.get(key, 0)) for name, key in zip(inputs, keys, strict=True)}, line
        )
    return Equivalence("undecided", None, line)


def lut_count(circuit: Circuit, k: int = 6, *, seconds: float | int = 300) -> int:
    """Return how many look-up tables of k inputs ABC needs for a circuit, of at most 2 to 16 inputs.

    Raises:
      ValueError: k out of this range.
      RuntimeError: ABC is not installed.
      TimeoutError: the time was over.
    """
    if type(k) is not int or not 2 <= k <= 16:
        raise ValueError(f"lut_count: k is {k!r}; it must be a whole number from 2 to 16.")
    with tempfile.TemporaryDirectory() as folder:
        pathlib.Path(folder, "a.aig").write_bytes(aiger.write(circuit))
        text = run(f"read a.aig; strash; if -K {k} -a; print_stats", folder, seconds=seconds)
    found = re.search(r"\bnd = *(\d+)", text)
    if found is None:
        raise RuntimeError(f"lut_count: ABC printed no number of nodes: {text.strip()[-300:]}")
    return int(found[1])


def optimize(circuit: Circuit, script: str = SCRIPT, *, seconds: float | int = 600) -> Circuit:
    """Return the circuit that commands of ABC make of a circuit, with the same ports.

    Parts are lost, since ABC knows none. Prove the result by `cec`.

    Args:
      circuit: the circuit.
      script: commands, after the circuit is read and before it is written: AND nodes by default; ``"strash; if -K 6 -a"``
        maps it to tables of 6 inputs.
      seconds: after which it is ended.

    Raises:
      RuntimeError: ABC is not installed, or wrote nothing: a command is wrong.
      TimeoutError: the time was over.
    """
    with tempfile.TemporaryDirectory() as folder:
        pathlib.Path(folder, "a.aig").write_bytes(aiger.write(circuit))
        text = run(f"read a.aig; {script}; write_blif b.blif", folder, seconds=seconds)
        written = pathlib.Path(folder, "b.blif")
        if not written.is_file():
            raise RuntimeError(f"optimize: ABC wrote no circuit after {script!r}: {text.strip()[-300:]}")
        found = blif.read(written.read_bytes())
    for before, after in ((circuit.inputs, found.inputs), (circuit.outputs, found.outputs)):
        if _netlists.bit_names(before) != _netlists.bit_names(after):
            raise RuntimeError(f"optimize: after {script!r} the circuit has other ports: {found!r}.")
    return dataclasses.replace(found, inputs=circuit.inputs, outputs=circuit.outputs, about=circuit.about)


def from_verilog(text: str, *, seconds: float | int = 300) -> Circuit:
    """Return the circuit of a combinational module of Verilog, as Yosys reads it (of pyosys).

    Raises:
      RuntimeError: pyosys is not installed, or Yosys cannot read the text.
      TimeoutError: the time was over.
    """
    with tempfile.TemporaryDirectory() as folder:
        pathlib.Path(folder, "a.v").write_text(text, encoding="utf-8")
        yosys.run(_TO_ANDS, folder, seconds=seconds, where="from_verilog")
        return aiger.read(pathlib.Path(folder, "a.aig").read_bytes())


_TO_ANDS = (
    *(
        "read_verilog a.v",
        "hierarchy -auto-top -check",
        "proc -norom",
        "flatten",
        "opt_clean",
        "techmap",
        "opt",
        "aigmap",
    ),
    "write_aiger -symbols a.aig",
)


def _placed(given: Circuit | str | os.PathLike[str], folder: pathlib.Path, name: str) -> pathlib.Path:
    """Return the file of a circuit in a form that ABC reads; files of other forms are read first."""
    if not isinstance(given, Circuit):
        path = pathlib.Path(given).resolve()
        if path.suffix not in (".blif", ".aig", ".aag", ".json", ".v"):
            raise ValueError(f"cec: the file is {path.name!r}; expected .blif, .aig, .aag, .json or .v.")
        data = path.read_bytes()
        if path.suffix in (".blif", ".aig"):  # copied, since a path may have blanks
            place = folder / (name + path.suffix)
            place.write_bytes(data)
            return place
        readers: dict[str, Callable[[bytes], Circuit]] = {
            ".aag": aiger.read,
            ".json": netlist_json.read,
            ".v": lambda data: from_verilog(data.decode()),
        }
        given = readers[path.suffix](data)
    place = folder / f"{name}.aig"
    place.write_bytes(aiger.write(given))
    return place


def _names_of(place: pathlib.Path, folder: str, seconds: float | int) -> tuple[list[str], list[str]]:
    """Names of the inputs and outputs, as ABC reads them."""
    text = run(f"read {place.name}; print_io", folder, seconds=seconds)
    names = []
    for kind in ("inputs", "outputs"):
        found = re.search(rf"Primary {kind} \((\d+)\):(.*)", text)
        if found is None:
            raise RuntimeError(f"cec: ABC cannot read {place.name}: {text.strip()[-300:]}")
        names.append(re.findall(r"\b\d+=(\S+)", found[2]))
        if len(names[-1]) != int(found[1]):
            raise RuntimeError(f"cec: ABC names {len(names[-1])} of {found[1]} {kind} of {place.name}.")
    return names[0], names[1]
