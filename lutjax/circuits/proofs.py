"""Verification of export folders: file integrity, and equivalence with circuit and model."""

import contextlib
import dataclasses
import functools
import importlib.util
import json
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lutjax import __version__
from lutjax.circuits import (
    _programs,
    abc,
    c,
    deployment,
    language_model,
    mcu,
    page,
    simulate,
    verilog,
)
from lutjax.circuits.circuit import Circuit, columns_of, evaluate_ports, group_by_port, numbers_of
from lutjax.circuits.deployment import MANIFEST, VECTORS, Vectors, as_called
from lutjax.circuits.ports import Port, bit_ranges
from lutjax.files.atomic import entries
from lutjax.files.strict_json import format_value

MOST_INPUTS = 16
"""Maximum input bits for an exhaustive comparison."""

RANDOM_SAMPLES = 4096
"""Random inputs for larger circuits, fewer if they would exceed `MOST_BITS` together."""

MOST_BITS = 1 << 25
"""Total bits of all random inputs in a comparison, if each has fewer."""


_SECONDS = 600  # time limit of a program
_C_FLAGS = ("-std=c99", "-O1", "-Wall", "-Wextra", "-Werror", "-pedantic")


class FailedError(Exception):
    """A difference found by a check."""


class SkippedError(Exception):
    """The reason to skip a check on this machine."""


@dataclasses.dataclass(frozen=True)
class Proof:
    """Result of a check.

    Attributes:
      name: compared files.
      passed: None if skipped.
      detail: compared data, the difference, or the reason for skipping.
      seconds: duration.
      proves: files verified by the check if it passes.

    Example:
      >>> from lutjax.circuits.proofs import Proof
      >>> print(Proof("circuit.json in NumPy = vectors.json", True, "360 samples", 0.25))
      PASS     circuit.json in NumPy = vectors.json         360 samples                               0.2 s
    """

    name: str
    passed: bool | None
    detail: str
    seconds: float
    proves: tuple[str, ...] = ()

    def __str__(self) -> str:
        result = {True: "PASS", False: "FAIL", None: "skipped"}[self.passed]
        time = "" if self.passed is None else f"{self.seconds:.1f} s"
        return f"{result:<8} {self.name:<44} {self.detail:<40} {time:>6}".rstrip()


class Check(NamedTuple):
    """Comparison between files, or between a file and the model."""

    name: str  # of the compared files
    run: Callable[[], str]  # describes the compared data, or raises FailedError or SkippedError
    proves: tuple[str, ...] = ()  # see `Proof`


class Oracle(NamedTuple):
    """Reference model for a circuit.

    Attributes:
      samples: values for each input port.
      answer: function from input port values to output port values.
    """

    samples: Sequence[np.ndarray]
    answer: Callable[..., Sequence[np.ndarray]]


def verify(
    folder: Path,
    *,
    oracle: Callable[[dict[str, Any]], Oracle] | None = None,
    doing: Callable[[str], contextlib.AbstractContextManager[object]] = lambda name: (
        contextlib.nullcontext()
    ),
    on_proof: Callable[[Proof], None] = lambda proof: None,
) -> list[Proof]:
    """Run every check of an export folder that this machine supports.

    Args:
      folder: folder from `lutjax export`.
      oracle: returns the model for a manifest's run; raises SkippedError if it is unavailable.
      doing: context manager that displays the current check.
      on_proof: receives each result.

    The manifest is not trusted: it is compared with the files, and the files with each other.

    Raises:
      DeploymentError: the folder is not an export, or has a later version.
    """
    manifest = _read_known_fields(folder)
    proofs = []
    for check in checks_of(folder, manifest, oracle):
        start = time.perf_counter()
        try:
            with doing(check.name):
                passed, detail = True, check.run()
        except SkippedError as error:
            passed, detail = None, str(error)
        # Damaged files raise these; anything else is a bug of the check itself, and is not caught.
        except (FailedError, OSError, ValueError, RuntimeError) as error:
            passed, detail = False, " ".join(str(error).split())
        proofs.append(Proof(check.name, passed, detail, time.perf_counter() - start, check.proves))
        on_proof(proofs[-1])
    return proofs


def _read_known_fields(folder: Path) -> dict[str, Any]:
    try:
        return deployment.read_manifest(folder)
    except deployment.DamagedManifestError as error:
        return error.found


def coverage(folder: Path, proofs: Sequence[Proof]) -> str:
    """Describe the proved, failed and merely unchanged files, each named or counted once."""
    manifest = _read_known_fields(folder)
    different = deployment.differences(folder, manifest) if _lists_files(manifest) else {}
    outputs_of_make = entries(folder) & deployment.make_outputs(manifest)
    checked = {name for proof in proofs for name in proof.proves}
    # Missing files count as well.
    files = (entries(folder) | set(different) | checked) - outputs_of_make
    files.discard(deployment.MANIFEST)
    results: dict[str, list[bool | None]] = {
        name: [proof.passed for proof in proofs if name in proof.proves] for name in files
    }
    # One failure outweighs any number of passed checks.
    failed = {name for name, passed in results.items() if False in passed or name in different}
    proved = {name for name, passed in results.items() if True in passed} - failed
    reasons: dict[str, set[str]] = {}
    for name in files - failed - proved:
        why = ", and ".join(sorted({proof.detail for proof in proofs if name in proof.proves}))
        reasons.setdefault(why, set()).add(name)
    alone = reasons.pop("", set())
    parts = [f"{len(proved)} proved"]
    if failed:
        parts.append(f"{len(failed)} failed ({_format_names(failed)})")
    if alone and not _lists_files(manifest):
        reasons[f"{MANIFEST} has no digests"] = alone
    elif alone:
        digests = "its digest" if len(alone) == 1 else "their digests"
        parts.append(f"{len(alone)} compared with {digests} alone ({_format_names(alone)})")
    for why, names in sorted(reasons.items()):
        parts.append(f"{len(names)} not proved ({_format_names(names)}), as {why}")
    if outputs_of_make:
        parts.append(f"{len(outputs_of_make)} of make not looked at")
    return f"{len(files)} files: {'; '.join(parts)}."


def _format_names(names: set[str]) -> str:
    return ", ".join(sorted(names))


def checks_of(
    folder: Path, manifest: dict[str, Any], oracle: Callable[[dict[str, Any]], Oracle] | None
) -> list[Check]:
    """Return the checks for an export, starting with the pure NumPy checks; None skips the model's.

    The manifest may have only the fields of a damaged one.
    """
    checks = [Check("digests of all files", functools.partial(_digests, folder, manifest))]

    def add(name: str, run: Callable[[], str], *proves: str) -> None:
        checks.append(Check(name, run, proves))

    def add_each(names: Iterable[str], what: str, run: Callable[[str], str]) -> None:
        for name in names:
            add(f"{name}{what}", functools.partial(run, name), name)

    # No circuit has this name, for any kind of export.
    if (folder / "main.c").exists():
        names = sorted(entries(folder) & language_model.FILES)
        add(f"{MANIFEST} = the files", functools.partial(_program_is_described, folder, manifest))
        add("the C program = the model in JAX", functools.partial(_program_holds, folder), *names)
        return checks
    export = _Export(folder, manifest)
    circuit, module = export.circuit_name, f"{export.name}.v"
    netlists = [name for format in ("blif", "aiger", "alkaid") for name in export.names(format)]
    add(f"{MANIFEST} = the files", export.is_described)
    add(f"{circuit} in NumPy = {VECTORS}", export.vectors_hold, circuit, VECTORS)
    if (folder / deployment.README).exists():
        add(f"{deployment.README} = {circuit}", export.readme_holds, deployment.README)
    if oracle is not None:
        add(f"{circuit} = the model in JAX", functools.partial(export.model_holds, oracle), circuit)
    if export.states_life():
        add(f"{circuit} = the Game of Life", export.is_life, circuit)
    add_each(netlists, f" in NumPy = {circuit}", export.read_holds)
    add_each(export.names("html"), f" in NumPy = {circuit}", export.page_circuit_holds)
    if module in export.names("verilog"):
        add(f"{module}, its ports = {circuit}", export.ports_hold)
    if export.program in export.names("c"):
        add(f"C, compiled = {VECTORS}", export.c_holds, *export.names("c"))
    if export.is_library:
        add(f"{export.program}, simulated = {circuit}", export.simulated_holds, export.program)
    if module in export.names("verilog"):
        add(f"Verilog, simulated = {VECTORS}", export.verilog_holds, *export.names("verilog"))
    add_each(export.names("html"), f", its script = {VECTORS}", export.page_holds)
    # ABC proves circuits without registers only.
    proved = {f"{export.name}{end}" for end in (".blif", ".aig", "_alkaid.json")}
    if not export.has_registers():
        proved.add(module)
    written = (*netlists, *export.names("verilog"))
    by_abc = (name for name in written if name in proved)
    add_each(by_abc, f" = {circuit}, by ABC", export.equal_by_abc)
    return checks


def _lists_files(manifest: dict[str, Any]) -> bool:
    return isinstance(manifest.get("files"), dict)


def _digests(folder: Path, manifest: dict[str, Any]) -> str:
    if not _lists_files(manifest):
        raise FailedError(f"{MANIFEST} is damaged and lists no files, so none has a digest")
    wrong = deployment.differences(folder, manifest)
    words = {
        "missing": "is missing",
        "changed": "is not what was written",
        "not listed": f"is not listed in {MANIFEST}",
    }
    if wrong:
        raise FailedError("; ".join(f"{name} {words[what]}" for name, what in wrong.items()))
    return f"{len(manifest['files'])} files"


def _check_described(folder: Path, facts: dict[str, Any], expected: dict[str, str]) -> None:
    # Reading again names the damaged field.
    manifest = deployment.read_manifest(folder)
    formats = {name: stated["format"] for name, stated in manifest["files"].items()}
    wrong = [
        f"{name} is stated as {format_value(formats[name])}"
        for name in sorted(formats)
        if expected.get(name) != formats[name]
    ]
    wrong += [f"{name} is not stated" for name in sorted(set(expected) - set(formats))]
    # Different files fail the digest check already.
    different = deployment.differences(folder, manifest)
    for name in sorted(set(manifest["files"]) - set(different)):
        n_bytes, size = manifest["files"][name]["bytes"], (folder / name).stat().st_size
        if n_bytes != size:
            wrong.append(f"{name} has {size} bytes, stated are {format_value(n_bytes)}")
    stated = manifest["facts"] if manifest["kind"] == "language model" else manifest
    # Facts as they are after JSON, where tuples are lists.
    for name, value in json.loads(json.dumps(facts)).items():
        if stated.get(name) != value:
            wrong.append(
                f"{name} is {format_value(stated.get(name))}, expected {format_value(value)}"
            )
    if wrong:
        raise FailedError("; ".join(wrong))


def _program_is_described(folder: Path, manifest: dict[str, Any]) -> str:
    facts, names = language_model.parse_header(_text(folder, "model.h"))
    _check_described(folder, facts, dict.fromkeys([*names, deployment.MAKEFILE], "c"))
    return f"{len(facts)} facts"


def _program_holds(folder: Path) -> str:
    compiler = _tool("gcc", "clang", "cc")
    try:
        with _require_executable(compiler, "language_model"):
            return language_model.verify(folder, compiler=compiler)
    except language_model.DifferenceError as error:
        raise FailedError(str(error)) from error
    except subprocess.CalledProcessError as error:
        raise FailedError(
            f"{Path(error.cmd[0]).name} ends with status {error.returncode}"
        ) from error


class _Export:
    """Export files, read on demand from the folder, independent of the manifest."""

    def __init__(self, folder: Path, manifest: dict[str, Any]):
        self.folder, self.manifest = folder, manifest
        stems = {path.stem for path in folder.glob("*.json")}
        stems -= {Path(MANIFEST).stem, Path(VECTORS).stem}
        stated = manifest.get("name")
        # The manifest names the circuit, if it is right. Otherwise: columns.json is the encoding of
        # a table, next to its circuit.
        others = {"columns"} | {name for name in stems if name.endswith("_alkaid")}
        circuits = stems - others or stems
        self.name: str = stated if stated in list(stems) else min(circuits, default="circuit")
        self.circuit_name = f"{self.name}.json"

    def names(self, format: str) -> tuple[str, ...]:
        names: Iterable[str] = (f"{self.name}{end}" for end in deployment.FORMATS[format].endings)
        if format == "c" and self.is_library:
            names = deployment.library(self.name)
        return tuple(name for name in names if (self.folder / name).exists())

    @property
    def is_library(self) -> bool:
        return (self.folder / "src").is_dir()

    @property
    def program(self) -> str:
        return f"src/{self.name}.c" if self.is_library else f"{self.name}.c"

    @property
    def target(self) -> str | None:
        """Microcontroller from the manifest for a library, or any; None without a library."""
        stated = self.manifest.get("target")
        if not self.is_library:
            return None
        return stated if isinstance(stated, str) and stated in mcu.TARGETS else min(mcu.TARGETS)

    def states_life(self) -> bool:
        about = self.manifest.get("about")
        with contextlib.suppress(FailedError):
            about = self.circuit.about
        return isinstance(about, Mapping) and about.get("rule") == "life"

    def has_registers(self) -> bool:
        with contextlib.suppress(FailedError):
            return "clk" in self.ports()
        return False

    def ports(self) -> dict[str, str]:
        name = f"{self.name}.v"
        with _require_readable(name):
            return verilog.declared(_text(self.folder, name), self.name)

    @property
    def registers(self) -> int:
        """Register level count from the manifest, 0 or 1 if not given."""
        stated = self.manifest.get("registers")
        return stated if type(stated) is int and stated >= 0 else int(self.has_registers())

    @functools.cached_property
    def circuit(self) -> Circuit:
        """Reference circuit."""
        circuit = self.read(self.circuit_name)
        # Each input gets random values, so file sizes must bound the inputs of a damaged file.
        paths = (self.folder / name for name in (self.circuit_name, VECTORS))
        sizes = [path.stat().st_size for path in paths if path.exists()]
        numbers = sum(port.count for port in circuit.inputs)
        if numbers > sum(sizes):
            raise FailedError(
                f"{self.circuit_name} has {numbers} numbers of inputs, "
                f"more than it and {VECTORS} have bytes, {sum(sizes)}; "
                "a sample has a number for each"
            )
        return circuit

    @functools.cached_property
    def vectors(self) -> Vectors:
        with _require_readable(VECTORS):
            vectors = Vectors.from_json((self.folder / VECTORS).read_bytes())
            vectors.check(self.circuit)
            return vectors

    def read(self, name: str) -> Circuit:
        end = name.removeprefix(self.name)
        read = next(format.read for format in deployment.FORMATS.values() if end in format.endings)
        assert read is not None
        with _require_readable(name):
            return read((self.folder / name).read_bytes())

    @property
    def options(self) -> deployment.Options:
        formats = [format for format in deployment.FORMATS if self.names(format)]
        return deployment.Options(tuple(formats), self.name, self.registers, self.target)

    def is_described(self) -> str:
        options = self.options
        facts = deployment.facts_of(deployment.Request(self.circuit, self.vectors, options))
        # Another version may count differently.
        if self.manifest.get("lutjax") != __version__:
            del facts["statistics"]
        expected = {}
        for name, stated in deployment.read_manifest(self.folder)["files"].items():
            if stated["format"] == deployment.EXTRA:
                expected[name] = deployment.EXTRA
        expected |= deployment.formats_of(options, self.circuit)
        _check_described(self.folder, facts, expected)
        return f"{len(facts)} facts"

    def vectors_hold(self) -> str:
        samples = [self.vectors.inputs[port.name] for port in self.circuit.inputs]
        _check_answers(evaluate_ports(self.circuit, samples), self.vectors.outputs)
        return _samples(len(self.vectors))

    def readme_holds(self) -> str:
        if _text(self.folder, deployment.README) != deployment.readme(self.circuit, self.options):
            raise FailedError(f"{deployment.README} does not describe the circuit")
        return f"{len(self.circuit.inputs)} columns"

    def model_holds(self, oracle: Callable[[dict[str, Any]], Oracle]) -> str:
        try:
            model = oracle(deployment.read_manifest(self.folder))
        except deployment.DamagedManifestError as error:
            raise SkippedError(f"{MANIFEST} is damaged") from error
        counts = [x.shape[1] for x in model.samples]
        if [port.count for port in self.circuit.inputs] != counts:
            raise FailedError(
                f"the model has {counts} numbers of inputs; the circuit is {self.circuit!r}"
            )
        others, what = _choose_samples(self.circuit.inputs)
        comparisons = [list(model.samples), others]
        # Random numbers rarely are next to a threshold, where a wrong comparison would show.
        if columns := columns_of(self.circuit):
            comparisons.append(columns.boundaries(model.samples))
            what = f"{len(comparisons[-1][0])} next to thresholds and {what}"
        names = [port.name for port in self.circuit.outputs]
        for samples in comparisons:
            expected = dict(zip(names, model.answer(*samples), strict=True))
            _check_answers(evaluate_ports(self.circuit, samples), expected)
        return f"{_samples(len(model.samples[0]))}{',' if columns else ' and'} {what}"

    def is_life(self) -> str:
        x = (np.arange(512)[:, None] >> np.arange(9) & 1).astype(np.uint8)
        _check_answers(evaluate_ports(self.circuit, [x]), {self.circuit.outputs[0].name: life(x)})
        return "all 512 neighborhoods"

    def read_holds(self, name: str) -> str:
        return _check_circuit(self.read(name), self.circuit)

    def page_circuit_holds(self, name: str) -> str:
        """Compare a page's circuit, which may show votes instead of the class."""
        circuit, (others, what) = self.page_circuit(name), _choose_samples(self.circuit.inputs)
        for x in ([self.vectors.inputs[port.name] for port in circuit.inputs], others):
            self._check_page_answers(evaluate_ports(circuit, x), evaluate_ports(self.circuit, x))
        return f"{_samples(len(self.vectors))} and {what}"

    def page_circuit(self, name: str) -> Circuit:
        with _require_readable(name):
            circuit = page.read(_text(self.folder, name))
        if circuit.inputs != self.circuit.inputs:
            raise FailedError(f"{name} runs {circuit!r}; the export is {self.circuit!r}")
        return circuit

    def _check_page_answers(
        self, answers: dict[str, np.ndarray], expected: dict[str, np.ndarray]
    ) -> None:
        (port, votes), *more = answers.items()
        numbers = expected.get(port)
        is_single = not more and len(expected) == 1
        # A page shows votes where the export has the class, or the bits that are counted.
        if is_single and numbers is not None and votes.shape[1] != numbers.shape[1]:
            if numbers.shape[1] == 1:
                answers = {port: votes.argmax(1)[:, None]}
            elif numbers.shape[1] % votes.shape[1] == 0:
                expected = {port: numbers.reshape(*votes.shape, -1).sum(-1)}
        _check_answers(answers, expected)

    def ports_hold(self) -> str:
        expected, declared = verilog.ports_of(self.circuit, self.registers), self.ports()
        if self.has_registers() != (self.registers > 0):
            words = {True: "registers", False: "no registers"}
            raise FailedError(
                f"{self.name}.v has {words[self.has_registers()]}; "
                f"{MANIFEST} states registers: {self.registers}"
            )
        if declared != expected:
            names = {*declared, *expected}
            wrong = sorted(name for name in names if declared.get(name) != expected.get(name))
            raise FailedError(
                f"{self.name}.v declares {wrong[0]} as {declared.get(wrong[0])}, "
                f"expected {expected.get(wrong[0])}"
            )
        return f"{len(declared)} ports"

    def c_holds(self) -> str:
        """Compile without warnings, and run a test of the vectors and the folder's own test."""
        compiler = _tool("gcc", "clang", "cc")
        own = f"extras/{self.name}_test.c" if self.is_library else f"{self.name}_test.c"
        make = mcu.c_test if self.is_library else c.c_test
        rows = {} if self.is_library else {"rows": self.vectors.rows}
        samples = as_called(self.circuit.inputs, self.vectors.inputs)
        test = make(self.circuit, *samples, name=self.name, **rows)
        with tempfile.TemporaryDirectory(prefix="lutjax-") as folder:
            scratch = Path(folder)
            (scratch / "test.c").write_text(test, encoding="utf-8")
            tests: list[Path] = [scratch / "test.c"]
            is_other = own in self.names("c") and (self.folder / own).read_bytes() != test.encode()
            if is_other:
                tests.append(Path(own))
            program, place = scratch / "test", str(Path(self.program).parent)
            for path in tests:
                words: list[str | Path] = [
                    compiler,
                    *_C_FLAGS,
                    "-I",
                    place,
                    self.program,
                    path,
                    "-o",
                    program,
                ]
                _call(*words, cwd=self.folder)
                # The exit status is zero if all answers are right.
                _call(program, cwd=self.folder)
            return f"{_samples(len(self.vectors))}, {Path(compiler).name}"

    def simulated_holds(self) -> str:
        target = str(self.target)
        if why := mcu.unsupported_reason(target):
            raise SkippedError(why)
        sources = [name for name in self.names("c") if name.startswith("src/")]
        files = {name: _text(self.folder, name) for name in sources}
        own = [self.vectors.inputs[port.name][: mcu.SAMPLES] for port in self.circuit.inputs]
        others = mcu.random_samples(self.circuit, mcu.SAMPLES)
        samples = [np.concatenate(two) for two in zip(own, others, strict=True)]
        wrong = mcu.count_wrong_answers(files, self.name, self.circuit, target, samples)
        if wrong:
            raise FailedError(f"{wrong} of {_samples(len(samples[0]))} differ on {target}")
        return f"{_samples(len(own[0]))} and {len(others[0])} random ones, {target}"

    def page_holds(self, name: str) -> str:
        node, circuit, rows = _tool("node"), self.page_circuit(name), self.vectors.rows
        words, n = circuit.encode(*as_called(circuit.inputs, self.vectors.inputs))
        # Words of 64 samples are two words of 32, the lower one first, on any machine.
        words_32 = words.astype("<u8").view("<u4").astype(np.uint32)
        text, bits_of_rows = _text(self.folder, name), None
        try:
            with _require_executable(node):
                bits = page.evaluate_in_node(text, words_32, node=node)
                if rows is not None:
                    bits_of_rows = page.evaluate_rows_in_node(text, rows, node=node)
        except ValueError as error:
            raise FailedError(f"{name} cannot be read: {error}") from error
        except subprocess.CalledProcessError as error:
            raise FailedError(f"the script of {name} fails") from error
        if len(bits) != circuit.n_outputs:
            raise FailedError(
                f"the script of {name} returns {len(bits)} bits, expected {circuit.n_outputs}"
            )
        words_64 = bits.astype("<u4").view("<u8").astype(np.uint64)
        answers = group_by_port(circuit, circuit.decode(words_64, n))
        self._check_page_answers(answers, dict(self.vectors.outputs))
        if bits_of_rows is not None and (bits_of_rows != bits[:, : bits_of_rows.shape[1]]).any():
            raise FailedError(f"the script of {name} encodes the rows of {VECTORS} differently")
        return f"{_samples(n)}, node"

    def verilog_holds(self) -> str:
        """Run testbenches: one from the vectors, and the folder's if different."""
        if simulate.find() is None:
            raise SkippedError("iverilog is not found")
        module, *own = (_text(self.folder, name) for name in self.names("verilog"))
        vectors, circuit = self.vectors, self.circuit
        test = verilog.testbench(
            circuit,
            as_called(circuit.inputs, vectors.inputs),
            as_called(circuit.outputs, vectors.outputs),
            name=self.name,
            registers=self.registers,
        )
        for testbench in dict.fromkeys((test, *own)):
            with _require_executable("iverilog", "vvp"):
                simulation = simulate.run(module, testbench)
            if not simulation:
                raise FailedError(simulation.line.removeprefix("FAIL: "))
        return simulation.line.removeprefix("PASS: ") + ", iverilog"

    def equal_by_abc(self, name: str) -> str:
        program = abc.find()
        if program is None or (name.endswith(".v") and importlib.util.find_spec("pyosys") is None):
            raise SkippedError("pyosys is not installed")
        try:
            with _require_executable(program):
                # ABC reads all formats but Alkaid's.
                netlist = self.read(name) if name in self.names("alkaid") else self.folder / name
                result = abc.cec(netlist, self.circuit)
        except TimeoutError as error:
            raise SkippedError(str(error)) from error
        except (RuntimeError, ValueError) as error:
            raise FailedError(str(error)) from error
        if result.status == "undecided":
            raise SkippedError(result.line)
        if not result:
            raise FailedError(result.line)
        return "proved for all inputs"


def life(neighborhoods: np.ndarray) -> np.ndarray:
    """Return the next states ``[samples, 1]`` for 8 neighbors and the cell, ``[samples, 9]``."""
    alive = neighborhoods[:, :8].sum(1)
    after: np.ndarray = (alive == 3) | (neighborhoods[:, 8] == 1) & (alive == 2)
    return after.astype(np.uint8)[:, None]


def _choose_samples(ports: Sequence[Port]) -> tuple[list[np.ndarray], str]:
    n = sum(port.n_bits for port in ports)
    if n <= MOST_INPUTS:
        bits, what = np.arange(1 << n)[:, None] >> np.arange(n) & 1, f"all 2^{n} inputs"
    else:
        samples = _random_samples(n)
        bits = np.random.default_rng(0).integers(0, 2, (samples, n), dtype=np.uint8)
        what = f"{samples} random ones"
    numbers = []
    for port, own in bit_ranges(ports):
        numbers.append(numbers_of(port, bits[:, own].T).reshape(-1, port.count))
    return numbers, what


def _random_samples(n_bits: int) -> int:
    """Return the number of random inputs to compare: whole 64-bit words, or one very wide input."""
    words = min(RANDOM_SAMPLES, MOST_BITS // n_bits) // 64
    return max(1, 64 * words)


def _samples(n: int) -> str:
    return f"{n} sample" if n == 1 else f"{n} samples"


def _text(folder: Path, name: str) -> str:
    try:
        return (folder / name).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise FailedError(f"{name} cannot be read: {why}") from error


def _check_answers(answers: dict[str, np.ndarray], expected: Any) -> None:
    for name, numbers in expected.items():
        if name not in answers or answers[name].shape != np.shape(numbers):
            shapes = {name: list(array.shape) for name, array in answers.items()}
            raise FailedError(
                f"the answers have shapes {shapes}; "
                f"expected {name} of shape {list(np.shape(numbers))}"
            )
        wrong = (answers[name] != numbers).any(1)
        if wrong.any():
            k = int(wrong.argmax())
            raise FailedError(
                f"{wrong.sum()} of {_samples(len(numbers))} differ; "
                f"of sample {k}, {name} is {answers[name][k].tolist()}, "
                f"expected {np.asarray(numbers[k]).tolist()}"
            )


def _check_circuit(one: Circuit, other: Circuit) -> str:
    n = other.n_inputs
    if (one.n_inputs, one.n_outputs) != (n, other.n_outputs):
        raise FailedError(
            f"it has {one.n_inputs} bits of inputs and {one.n_outputs} of outputs, "
            f"expected {n} and {other.n_outputs}"
        )
    if n <= MOST_INPUTS:
        # Few inputs repeat, to fill a word of 64 samples.
        bits = (np.arange(max(1 << n, 64))[None] >> np.arange(n)[:, None] & 1).astype(np.uint8)
        words = np.packbits(bits, axis=1, bitorder="little").view("<u8").astype(np.uint64)
        what = f"all 2^{n} inputs"
    else:
        n_words = max(1, _random_samples(n) // 64)
        words = np.random.default_rng(0).integers(0, 2**64, (n, n_words), dtype=np.uint64)
        what = f"{64 * n_words} random inputs"
    different = one.evaluate(words) != other.evaluate(words)
    if different.any():
        raise FailedError(
            f"{different.any(1).sum()} of {other.n_outputs} bits of outputs differ on {what}"
        )
    return what


def _tool(*names: str) -> str:
    for name in names:
        if path := shutil.which(name):
            return path
    raise SkippedError(f"{' or '.join(names)} is not found")


@contextlib.contextmanager
def _require_readable(name: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        raise FailedError(f"{name} cannot be read: {error}") from error


@contextlib.contextmanager
def _require_executable(*programs: str | Path) -> Iterator[None]:
    """Raise SkippedError if the machine cannot execute these programs."""
    try:
        yield
    except OSError as error:
        path = Path(error.filename or "")
        if path.name not in [Path(program).name for program in programs]:
            raise
        # A folder mounted noexec is the usual reason, and the user can choose another.
        place = tempfile.gettempdir()
        if isinstance(error, PermissionError) and path.is_relative_to(place):
            raise SkippedError(
                f"no program can be run in {place}; set TMPDIR to a folder that is "
                "not mounted noexec"
            ) from error
        raise SkippedError(f"{path} cannot be run: {error.strerror}") from error


def _call(*words: str | Path, cwd: Path) -> None:
    """Run a program; raise FailedError, or SkippedError if it cannot be executed."""
    try:
        with _require_executable(words[0]):
            status, text = _programs.run(words, cwd, _SECONDS)
    except TimeoutError as error:
        raise FailedError(f"{Path(words[0]).name}: {str(error).removesuffix('.')}") from error
    if status:
        lines = [line for line in text.splitlines() if line.strip()]
        last = lines[-1] if lines else f"status {status}"
        # Compilers end with a source excerpt.
        why = next((line for line in lines if re.search(r"\berror\b", line)), last)
        raise FailedError(f"{Path(words[0]).name}: {why}")
