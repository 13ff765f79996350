"""Export folders: one file per format, samples with answers, and a manifest that describes them."""

import dataclasses
import hashlib
import json
import platform
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Shaped

from lutjax import __version__
from lutjax.circuits import (
    _names,
    _templates,
    aiger,
    alkaid,
    ands,
    blif,
    c,
    dot,
    mcu,
    netlist_json,
    page,
    statistics,
    verilog,
)
from lutjax.circuits.circuit import Circuit, columns_of, evaluate_ports as evaluate_ports
from lutjax.circuits.columns import Number, Value
from lutjax.circuits.page import interface as interface
from lutjax.circuits.ports import Port
from lutjax.files import strict_json
from lutjax.files.atomic import digest_of, entries, replace_folder
from lutjax.files.errors import FolderError
from lutjax.files.strict_json import Fields, format_value

MANIFEST = "manifest.json"
MOST_LEVELS = 1 << 31
"""Upper bound on levels between registers, because JSON can hold larger numbers."""
MOST_ROWS = 24
"""Maximum example rows on a page."""
VECTORS = "vectors.json"
MAKEFILE = "Makefile"
README = "README.md"
BUILD = "build"
EXTRA = "extra"
"""Manifest format for additional files that belong to a circuit."""
KINDS = ("circuit", "language model")
"""Export kinds."""

VERSION = 1
"""Version of the folder layout."""


class DeploymentError(FolderError):
    """A folder that cannot be written or read, or files that cannot be generated."""


@dataclasses.dataclass(frozen=True)
class Vectors:
    """Circuit samples with expected answers.

    Attributes:
      inputs, outputs: values ``[samples, count]`` for each port.
      source: description of the sample source.
      rows: raw table rows of the samples, see `lutjax.circuits.columns.Columns.encode`; None
        without table rows.

    Raises:
      ValueError: the ports have different numbers of samples.

    Example:
      >>> import numpy as np
      >>> from lutjax.circuits.deployment import Vectors
      >>> inputs, outputs = {"x": np.array([[0, 1], [1, 1]])}, {"y": np.array([[0], [1]])}
      >>> len(Vectors(inputs, outputs, "two by hand"))
      2
    """

    inputs: Mapping[str, Shaped[np.ndarray, "samples _"]]
    outputs: Mapping[str, Shaped[np.ndarray, "samples _"]]
    source: str
    rows: Sequence[Sequence[Value]] | None = None

    def __post_init__(self) -> None:
        sizes = {name: len(x) for name, x in (*self.inputs.items(), *self.outputs.items())}
        if self.rows is not None:
            sizes["rows"] = len(self.rows)
        if len(set(sizes.values())) > 1:
            raise ValueError(f"Vectors: ports have {sizes} samples; expected the same number.")

    def __len__(self) -> int:
        """Return the number of samples."""
        return next((len(x) for x in (*self.inputs.values(), *self.outputs.values())), 0)

    def check(self, circuit: Circuit) -> None:
        """Raise ValueError if the vectors are empty or do not fit the circuit ports."""
        if not len(self):
            raise ValueError("Vectors: there are no samples; expected at least one.")
        sides = (
            ("inputs", circuit.inputs, self.inputs),
            ("outputs", circuit.outputs, self.outputs),
        )
        for what, ports, arrays in sides:
            expected = {port.name: port.count for port in ports}
            counts = {name: x.shape[1] if x.ndim == 2 else None for name, x in arrays.items()}
            if counts != expected:
                raise ValueError(
                    f"Vectors: {what} have {counts} values per sample; expected {expected}."
                )
            for port in ports:
                try:
                    port.format.encode(arrays[port.name])
                except (ValueError, TypeError) as error:
                    raise ValueError(f"Vectors: {what} of the port {port.name}: {error}") from None

        taken = columns_of(circuit)
        if (taken is None) != (self.rows is None):
            words = {True: "no rows", False: "rows"}
            raise ValueError(
                f"Vectors: there are {words[self.rows is None]}; "
                f"the circuit takes {words[taken is None]}."
            )
        if taken is None or self.rows is None:
            return
        for name, codes in taken.encode(self.rows).items():
            wrong = (codes != self.inputs[name]).any(1)
            if wrong.any():
                k = int(wrong.argmax())
                raise ValueError(
                    f"Vectors: row {k} has {codes[k].tolist()} in the port {name}; "
                    f"inputs have {self.inputs[name][k].tolist()}."
                )

    def to_json(self) -> str:
        """Return JSON for `from_json`, one line per sample."""
        rows = []
        for k in range(len(self)):
            sample = [
                {name: x[k].tolist() for name, x in side.items()}
                for side in (self.inputs, self.outputs)
            ]
            named = dict(zip(("inputs", "outputs"), sample, strict=True))
            own = {} if self.rows is None else {"row": list(self.rows[k])}
            rows.append(json.dumps({**own, **named}, separators=(",", ":")))
        samples = ",\n".join(rows)
        return f'{{"source": {json.dumps(self.source)}, "samples": [\n{samples}\n]}}\n'

    @classmethod
    def from_json(cls, text: str | bytes) -> "Vectors":
        """Parse the `to_json` text. It takes at most 100 times the memory of the text.

        Raises:
          ValueError: invalid text; the message names the wrong sample.
        """
        try:
            document, fields = strict_json.loads(text), Fields("vectors")
        except ValueError as error:
            raise ValueError(f"the text is not JSON: {error}.") from None
        source = fields.field(document, "source", str)
        samples = fields.field(document, "samples", list)
        sides: dict[str, dict[str, list[list[float | int]]]] = {"inputs": {}, "outputs": {}}
        has_rows = samples and isinstance(samples[0], dict) and "row" in samples[0]
        table: list[list[Value]] | None = [] if has_rows else None
        for k, sample in enumerate(samples):
            if table is not None:
                table.append(_read_row(f"samples[{k}]", sample))
            for side, ports in sides.items():
                numbers = Fields(f"samples[{k}]").field(sample, side, dict)
                if k == 0:
                    ports |= {name: [] for name in numbers}
                elif set(numbers) != set(ports):
                    raise ValueError(
                        f"samples[{k}] has {side} {format_value(list(numbers))}; "
                        f"the first has {format_value(list(ports))}."
                    )
                for name, rows in ports.items():
                    rows.append(_read_numbers(f"samples[{k}]: {side}", name, numbers, rows))
        inputs, outputs = (
            {name: np.asarray(rows) for name, rows in ports.items()} for ports in sides.values()
        )
        return cls(inputs, outputs, source, table)


def _read_row(where: str, sample: Any) -> list[Value]:
    row: list[Value] = Fields(where).field(sample, "row", list)
    if not {type(cell) for cell in row} <= {int, float, str, type(None)}:
        raise ValueError(
            f"{where}: 'row' is {format_value(row)}; expected numbers, texts and null."
        )
    return row


def _read_numbers(
    where: str, name: str, ports: Mapping[str, Any], before: list[Any]
) -> list[float | int]:
    row: list[float | int] = Fields(where).field(ports, name, list)
    has_numbers = {type(number) for number in row} <= {int, float}
    if not has_numbers or (before and len(row) != len(before[0])):
        expected = f"{len(before[0])} numbers, as before" if before else "numbers"
        raise ValueError(
            f"{where}: {format_value(name)} is {format_value(row)}; expected {expected}."
        )
    return row


@dataclasses.dataclass(frozen=True)
class Options:
    """Export options.

    Attributes:
      formats: names from `FORMATS`.
      name: Verilog module, C function and file name.
      registers: gate levels between Verilog registers; 0 for none.
      target: a name from `lutjax.circuits.mcu.TARGETS`, whose library replaces the C files; None
        for none.

    Raises:
      ValueError: an unknown format, or another invalid value.
    """

    formats: tuple[str, ...] = ()
    name: str = "circuit"
    registers: int = 0
    target: str | None = None

    def __post_init__(self) -> None:
        if not self.formats:
            object.__setattr__(self, "formats", tuple(FORMATS))
        for format in self.formats:
            if format not in FORMATS:
                raise ValueError(
                    f"formats has {format!r}; the known ones are {', '.join(FORMATS)}."
                )
        if not 0 <= self.registers < MOST_LEVELS:
            raise ValueError(
                f"registers is {self.registers}; expected a number of levels below 2^31."
            )
        if why := _names.explain_bad_port(self.name):
            raise ValueError(f"name is {self.name!r}; {why}.")
        if f"{self.name}.json".lower() in (VECTORS, MANIFEST):
            raise ValueError(
                f"name is {self.name!r}, but exports use {self.name}.json; choose another name."
            )
        if "c" in self.formats:
            c.check_name(self.name)
        if self.target is not None:
            mcu.check_target(self.target, "export")
            if not set(self.formats) <= {"c", "json"}:
                raise ValueError(
                    f"target is {self.target!r}, a microcontroller; formats must be only c."
                )
            if self.registers:
                raise ValueError(
                    f"registers is {self.registers}, but target {self.target} supports no "
                    "registers; leave one out."
                )


@dataclasses.dataclass(frozen=True)
class Request:
    """All inputs required to generate the export files.

    Attributes:
      circuit, vectors, options: exported circuit, its samples, and the options.
      page: arguments for `lutjax.circuits.page.write`, such as examples and labels; ``circuit``
        selects another circuit to show, such as one with votes.
      layers: layers for a microcontroller library, see `lutjax.circuits.mcu.write`.
      extras: additional circuit files by name, such as the encoding from raw data to inputs.
    """

    circuit: Circuit
    vectors: Vectors
    options: Options
    page: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    extras: Mapping[str, bytes] = dataclasses.field(default_factory=dict)
    layers: Circuit | None = None


def as_called(ports: Sequence[Port], numbers: Mapping[str, np.ndarray]) -> tuple[np.ndarray, ...]:
    """Return port values ``[samples, count]`` in the form used by `Circuit` calls."""
    return tuple(
        numbers[port.name][:, 0] if port.count == 1 else numbers[port.name] for port in ports
    )


def _verilog(request: Request) -> dict[str, str]:
    circuit, name, registers = request.circuit, request.options.name, request.options.registers
    vectors = request.vectors
    return {
        f"{name}.v": verilog.write(circuit, name, registers=registers),
        f"{name}_testbench.v": verilog.testbench(
            circuit,
            as_called(circuit.inputs, vectors.inputs),
            as_called(circuit.outputs, vectors.outputs),
            name=name,
            registers=registers,
        ),
    }


def _c(request: Request) -> dict[str, str]:
    circuit, name, target = request.circuit, request.options.name, request.options.target
    samples = as_called(circuit.inputs, request.vectors.inputs)
    if target is None:
        test = c.c_test(circuit, *samples, name=name, rows=request.vectors.rows)
        return {**c.write(circuit, name), f"{name}_test.c": test}
    sample = [request.vectors.inputs[port.name][0] for port in circuit.inputs]
    library = mcu.write(circuit, name, target=target, layers=request.layers, sample=sample)
    return {**library, f"extras/{name}_test.c": mcu.c_test(circuit, *samples, name=name)}


def _html(request: Request) -> dict[str, str]:
    rows = request.vectors.rows
    options: dict[str, Any] = {"circuit": request.circuit, "exported": request.circuit}
    if rows is not None:
        options["rows"] = rows[:MOST_ROWS]
    return {f"{request.options.name}.html": page.write(**{**options, **request.page})}


class Format(NamedTuple):
    """Files of an export in one format."""

    endings: tuple[str, ...]  # file name suffixes
    write: Callable[[Request], Mapping[str, str | bytes]]  # returns files by name
    read: Callable[[bytes], Circuit] | None = None  # if a file holds the complete circuit


FORMATS: dict[str, Format] = {
    "verilog": Format((".v", "_testbench.v"), _verilog),
    "blif": Format(
        (".blif",),
        lambda r: {f"{r.options.name}.blif": blif.write(r.circuit, r.options.name)},
        blif.read,
    ),
    "aiger": Format(
        (".aig", ".aag"),
        lambda r: {
            f"{r.options.name}.aig": aiger.write(r.circuit),
            f"{r.options.name}.aag": aiger.write(r.circuit, binary=False),
        },
        aiger.read,
    ),
    "json": Format(
        (".json",),
        lambda r: {f"{r.options.name}.json": netlist_json.write(r.circuit)},
        netlist_json.read,
    ),
    "alkaid": Format(
        ("_alkaid.json",),
        lambda r: {f"{r.options.name}_alkaid.json": alkaid.write(r.circuit)},
        alkaid.read,
    ),
    "c": Format((".c", ".h", "_test.c"), _c),
    "html": Format((".html",), _html),
    "dot": Format(
        (".dot",), lambda r: {f"{r.options.name}.dot": dot.write(r.circuit, r.options.name)}
    ),
}
"""Formats by name."""


def library(name: str) -> tuple[str, ...]:
    """Return the C file paths in a microcontroller export."""
    return (
        *(f"src/{name}.c", f"src/{name}.h", f"extras/{name}_test.c", f"examples/{name}/{name}.ino"),
        *("library.json", "library.properties", "platformio.ini"),
    )


def formats_of(options: Options, circuit: Circuit) -> dict[str, str]:
    """Return all file names in an export except its manifest, each with its format."""
    formats = dict.fromkeys(("json", *options.formats))
    files = {}
    for format in formats:
        if format == "c" and options.target:
            names = library(options.name)
        else:
            names = tuple(f"{options.name}{end}" for end in FORMATS[format].endings)
        files.update(dict.fromkeys(names, format))
    described = {} if circuit.about.get("columns") is None else {README: "readme"}
    return {**files, **described, VECTORS: "vectors", MAKEFILE: "make"}


def files_of(
    request: Request, *, progress: Callable[[str], None] = lambda text: None
) -> dict[str, tuple[str, bytes]]:
    """Return the format and content of each export file except its manifest."""
    options = request.options
    files: dict[str, tuple[str, bytes]] = {}
    # The JSON form is always written: it alone has the ports, parts and facts, and proofs start
    # from it.
    for format in dict.fromkeys(("json", *options.formats)):
        progress(f"writing {format}")
        for name, content in FORMATS[format].write(request).items():
            files[name] = format, content if isinstance(content, bytes) else content.encode()
    for name, content in request.extras.items():
        if name in formats_of(options, request.circuit):
            raise DeploymentError(
                f"name is {options.name!r}, whose files replace {name}; choose another."
            )
        files[name] = EXTRA, content
    text = readme(request.circuit, options)
    if text:
        files[README] = "readme", text.encode()
    files[VECTORS] = "vectors", request.vectors.to_json().encode()
    formats = {format for format, _ in files.values()}
    targets, name = [target for target in ("c", "verilog") if target in formats], options.name
    test, program = f"{name}_test.c", f"{name}.c"
    if options.target:
        test, program = f"extras/{test}", f"src/{program}"
    rules = [
        "\n" + _templates.fill_template(f"{target}.mk", name=name, test=test, program=program)
        for target in targets
    ]
    make = _templates.fill_template(
        "Makefile", all="".join(f" {target}" for target in targets), rules="".join(rules)
    )
    files[MAKEFILE] = "make", make.encode()
    return files


def readme(circuit: Circuit, options: Options) -> str:
    """Return a Markdown README for a circuit with table rows, else an empty string."""
    taken = columns_of(circuit)
    if taken is None:
        return ""
    name, target, classes = options.name, circuit.about.get("target"), circuit.about.get("classes")
    answer = "the answer" if target is None else f"`{_cell(target)}`"
    lines = [f"# {name}", "", f"This circuit takes a table row and predicts {answer}."]
    lines += ["", "## Columns", ""]
    lines += ["| column | port | takes | missing |", "| --- | --- | --- | --- |"]
    for column in taken.columns:
        if isinstance(column, Number):
            seen = ""
            if column.least is not None and column.largest is not None:
                seen = f", {column.least:g} to {column.largest:g} in training"
            takes = f"numbers in units of {column.unit} ({column.format}){seen}"
            code = column.missing_code / 2**column.format.fraction
            missing = f"{code:g}" if column.missing else f"{code:g}, the median"
        else:
            values = ", ".join(f"{code} {_cell(value)}" for code, value in enumerate(column.values))
            takes = f"codes: {values}, {column.other_code} any other"
            missing = str(column.missing_code)
        lines.append(f"| {_cell(column.name)} | `{column.port}` | {takes} | {missing} |")
    rounding = "Each category has a code."
    if any(isinstance(column, Number) for column in taken.columns):
        rounding = (
            f"Numbers with more digits than their unit are exact in `{name}_predict_rows` and "
            "on the page. For the ports, round them up, which is exact where thresholds "
            "are multiples of the unit, and clip numbers beyond the range of the port."
        )
    lines += ["", rounding, "", "## Answers", ""]
    for port in circuit.outputs:
        noun = "number" if port.count == 1 else "numbers"
        lines.append(f"- `{port.name}`: {port.count} {noun} ({port.format})")
    if circuit.about.get("kind") == "regression":
        scale, offset = (circuit.about.get(fact) for fact in ("scale", "offset"))
        lines.append(f"- the number is `y * {scale!r} + {offset!r}`")
    lines += [f"- class {number}: {_cell(word)}" for number, word in enumerate(classes or ())]
    lines += ["", "## Calls", ""]
    if "c" in options.formats and options.target is None:
        lines.append(
            f"- C: `{name}_predict_rows` of `{name}.h` takes numbers as double, "
            "NAN where they are missing, and codes of categories, "
            f"which `{name}_code_PORT` finds by name. `{name}_predict` takes the numbers "
            "of the ports."
        )
    elif "c" in options.formats:
        lines.append(
            f"- C: `{name}_predict_row` of `src/{name}.h` takes a row of the numbers of the ports."
        )
    if "verilog" in options.formats:
        lines.append(f"- Verilog: the module `{name}` has a port for each column.")
    if "html" in options.formats:
        lines.append(f"- `{name}.html` has a field for each column.")
    lines.append(
        f"- `{VECTORS}` has rows of the table, the numbers of the ports that they become, "
        "and the answers."
    )
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    line = " ".join(text.split())
    return re.sub(r"([\\`*_|<>\[\]#&$])", r"\\\1", line)


def facts_of(request: Request) -> dict[str, Any]:
    """Return the circuit facts in a manifest: interface, options, statistics, vectors."""
    circuit, options = request.circuit, request.options
    return {
        "circuit": f"{options.name}.json",
        "name": options.name,
        "inputs": interface(circuit.inputs),
        "outputs": interface(circuit.outputs),
        "about": dict(circuit.about),
        "statistics": dataclasses.asdict(statistics.compute(circuit, lut6=False)),
        "vectors": {"samples": len(request.vectors), "source": request.vectors.source},
        "registers": options.registers,
        "latency": verilog.latency(circuit, options.registers),
        "target": options.target,
    }


def summary(circuit: Circuit, files: Mapping[str, tuple[str, bytes]]) -> list[str]:
    """Return summary lines about a circuit and its files."""
    stats = statistics.compute(circuit, lut6=False)
    return [
        f"{statistics.gates_in_words(circuit)} in {stats.levels} levels; "
        f"as {stats.ands:,} AND nodes or {len(ands.operations(circuit)[0]):,} operations "
        "on two bits",
        *sizes(files),
    ]


def sizes(files: Mapping[str, tuple[str, bytes]]) -> list[str]:
    """Return a line for each file."""
    width = max(map(len, files))
    return [f"  {name:<{width}}  {len(content):>11,} bytes" for name, (_, content) in files.items()]


def manifest_of(
    kind: str,
    files: Mapping[str, tuple[str, bytes]],
    facts: Mapping[str, Any],
    run: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Return a manifest of a `kind` from `KINDS`, for files and their training run."""
    return {
        "lutjax": __version__,
        "version": VERSION,
        "kind": kind,
        "run": None if run is None else dict(run),
        **facts,
        "versions": {"python": platform.python_version(), "numpy": np.__version__},
        "files": {
            name: {
                "format": format,
                "bytes": len(content),
                "sha256": hashlib.sha256(content).hexdigest(),
            }
            for name, (format, content) in sorted(files.items())
        },
    }


def check_place(folder: Path) -> bool:
    """Return True if a folder holds a replaceable export, or False if the path is free.

    Raises:
      DeploymentError: anything else is there, such as a modified export.
    """
    if not folder.exists():
        return False
    if not folder.is_dir():
        raise DeploymentError(f"{folder} is a file; choose another folder.")
    entries_of_folder = {path.relative_to(folder).parts[0] for path in folder.iterdir()}
    if not entries_of_folder:
        return False
    if MANIFEST not in entries_of_folder:
        raise DeploymentError(
            f"{folder} has other files, such as {min(entries_of_folder)}: choose another folder."
        )
    # Only an unchanged export may be replaced: nothing that a user wrote is lost.
    manifest = read_manifest(folder)
    for name, difference in differences(folder, manifest).items():
        if difference == "not listed":
            raise DeploymentError(
                f"{folder} holds an export and other files, such as {name}, which would be lost: "
                "move them, or choose another folder."
            )
        if difference == "changed":
            raise DeploymentError(
                f"{folder} holds an export with changes to {name}, which would be lost: move it, "
                "or choose another folder."
            )
    return True


def make_outputs(manifest: Mapping[str, Any]) -> set[str]:
    """Return the paths that the export's Makefile may create."""
    if manifest.get("kind") == "language model":
        return {"language_model"}
    name = manifest.get("name")
    names = (f"{name}_test", f"{name}.vvp") if isinstance(name, str) else ()
    return {f"{BUILD}/", *(f"{BUILD}/{output}" for output in (*names, "verilog.log"))}


def write(
    folder: Path, files: Mapping[str, tuple[str, bytes]], manifest: Mapping[str, Any]
) -> None:
    """Write the export files and their manifest atomically, replacing an earlier export."""
    check_place(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with replace_folder(folder.resolve()) as place:
        place.mkdir()
        for name, (_, content) in files.items():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            (place / name).write_bytes(content)
        (place / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")


class DamagedManifestError(DeploymentError):
    """A manifest with missing or invalid fields.

    Attributes:
      found: fields by name; empty if the manifest is not a JSON object.
    """

    def __init__(self, message: str, found: Mapping[str, Any]):
        super().__init__(message)
        self.found = dict(found)


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest of an export, after validating the field types.

    It takes at most 100 times the memory of the export, and so do all proofs of an export.

    Raises:
      DeploymentError: the manifest does not exist or has a later version. DamagedManifestError: it
        is damaged.
    """
    path = folder / MANIFEST
    if not folder.is_dir():
        raise DeploymentError(
            f"{folder} is not a folder; expected an export written by `lutjax export`."
        )
    if not path.exists():
        raise DeploymentError(
            f"{folder} is not an export: it has no {MANIFEST}. Run `lutjax export`."
        )
    fields: Any = {}
    try:
        fields = strict_json.loads(path.read_bytes())
        _check_manifest(fields)
    except (OSError, ValueError) as error:
        # A newer version may have other fields, so its number is the better explanation.
        known = fields if isinstance(fields, dict) else {}
        if type(known.get("version")) is int and known["version"] > VERSION:
            raise DeploymentError(
                f"{path} has version {known['version']}; expected {VERSION}. Upgrade lutjax."
            ) from None
        raise DamagedManifestError(f"{path} is damaged: {error}", known) from error
    return dict(fields)


# File systems limit names to 255 bytes, and all files are inside the folder.
_FILE = re.compile(
    r"(src/|extras/|examples/\w{1,240}/)?[A-Za-z0-9_]{1,240}(\.[a-z]{1,10})?", re.ASCII
)
_SHA256 = re.compile("[0-9a-f]{64}")


def _check_manifest(manifest: Any) -> None:
    fields = Fields("the manifest")
    if fields.field(manifest, "version", int) != VERSION:
        raise ValueError(f"the manifest: 'version' is {manifest['version']}; expected {VERSION}.")
    kind = fields.field(manifest, "kind", str)
    if kind not in KINDS:
        raise ValueError(
            f"the manifest: 'kind' is {format_value(kind)}; expected {' or '.join(KINDS)}."
        )
    fields.field(manifest, "lutjax", str)
    for name, facts in fields.field(manifest, "files", dict).items():
        fields_of_file = Fields(f"files[{format_value(name)}]")
        if not _FILE.fullmatch(name) or name == MANIFEST:
            raise ValueError(
                f"the manifest: files has {format_value(name)}; expected an export file name."
            )
        fields_of_file.field(facts, "format", str)
        fields_of_file.field(facts, "bytes", int)
        if not _SHA256.fullmatch(fields_of_file.field(facts, "sha256", str)):
            raise ValueError(
                f"{fields_of_file.where}: 'sha256' is {format_value(facts['sha256'])}; "
                "expected 64 hexadecimal digits."
            )
    run = fields.field(manifest, "run", object)
    for name, kind_of_field in _RUN.items():
        if run is not None:
            Fields("run").field(run, name, kind_of_field)
    for name, kind_of_field in (_FACTS if kind == "circuit" else {"facts": dict}).items():
        fields.field(manifest, name, kind_of_field)
    if kind == "circuit" and not 0 <= manifest["registers"] < MOST_LEVELS:
        raise ValueError(
            f"the manifest: 'registers' is {format_value(manifest['registers'])}; expected levels."
        )


_RUN: dict[str, type] = {"kind": str, "folder": str, "step": int, "digest": str}
_FACTS: dict[str, type] = {
    **{"circuit": str, "name": str, "inputs": list, "outputs": list},
    **{"about": dict, "statistics": dict, "vectors": dict, "registers": int, "latency": int},
}
"""Fields from `facts_of`, and their types."""


def differences(folder: Path, manifest: Mapping[str, Any]) -> dict[str, str]:
    """Return the files that differ from a manifest, which may be damaged, and how."""
    files = manifest.get("files")
    listed = files if isinstance(files, dict) else {}
    digests = {name: digest_of(folder / name) if _FILE.fullmatch(name) else None for name in listed}
    wrong = {}
    for name, facts in listed.items():
        if digests[name] is None:
            wrong[name] = "missing"
        elif not isinstance(facts, dict) or facts.get("sha256") != digests[name]:
            wrong[name] = "changed"
    others = entries(folder) - {MANIFEST, *listed, *make_outputs(manifest)}
    return {**wrong, **dict.fromkeys(sorted(others), "not listed")}
