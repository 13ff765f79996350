"""Checks of an exported folder: is each file what was written, and do all of them compute what the model computes?"""

import contextlib
import dataclasses
import functools
import hashlib
import importlib.util
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lutjax.circuits import deployment
from lutjax.circuits.circuit import Circuit, Port
from lutjax.circuits.deployment import VECTORS, Vectors, as_called, by_port, evaluated

MOST_INPUTS = 16
"""Circuits of at most so many input bits are compared on all inputs."""

RANDOM_SAMPLES = 4096
"""Random inputs on which larger ones are compared."""


_C_FLAGS = ("-std=c99", "-O1", "-Wall", "-Wextra", "-Werror", "-pedantic")


class FailedError(Exception):
    """A difference that a check found."""


class SkippedError(Exception):
    """The reason why a check cannot be made here."""


@dataclasses.dataclass(frozen=True)
class Proof:
    """Result of a check.

    Attributes:
      name: what was compared.
      passed: None where it was skipped.
      detail: on what it was compared, the difference that was found, or why it was skipped.
      seconds: that it took.

    Example:
      >>> from lutjax.circuits.proofs import Proof
      >>> print(Proof("circuit.json in NumPy = vectors.json", True, "360 samples", 0.25))
      PASS     circuit.json in NumPy = vectors.json         360 samples                               0.2 s
    """

    name: str
    passed: bool | None
    detail: str
    seconds: float

    def __str__(self) -> str:
        result = {True: "PASS", False: "FAIL", None: "skipped"}[self.passed]
        time = "" if self.passed is None else f"{self.seconds:.1f} s"
        return f"{result:<8} {self.name:<44} {self.detail:<40} {time:>6}".rstrip()


class Check(NamedTuple):
    """Comparison of files with each other or with the model.

    Attributes:
      name: what is compared.
      run: returns on what it was compared; raises FailedError or SkippedError.
    """

    name: str
    run: Callable[[], str]


class Oracle(NamedTuple):
    """A model that a circuit has to agree with.

    Attributes:
      samples: numbers of each input port.
      answer: numbers of each output port for numbers of the input ports.
    """

    samples: Sequence[np.ndarray]
    answer: Callable[..., Sequence[np.ndarray]]


def verify(
    folder: Path,
    *,
    oracle: Callable[[dict[str, Any]], Oracle] | None = None,
    doing: Callable[[str], contextlib.AbstractContextManager[object]] = lambda name: contextlib.nullcontext(),
    on_proof: Callable[[Proof], None] = lambda proof: None,
) -> list[Proof]:
    """Make every check of an exported folder that can be made here.

    Args:
      folder: what `lutjax export` wrote.
      oracle: returns the model of a manifest's run; raises SkippedError where it is not there.
      doing: shows what is checked in a block.
      on_proof: is told of each result.

    Raises:
      DeploymentError: the folder is no export.
    """
    manifest = deployment.read_manifest(folder)
    proofs = []
    for check in checks_of(folder, manifest, oracle):
        start = time.perf_counter()
        try:
            with doing(check.name):
                passed, detail = True, check.run()
        except FailedError as error:
            passed, detail = False, str(error)
        except SkippedError as error:
            passed, detail = None, str(error)
        proofs.append(Proof(check.name, passed, detail, time.perf_counter() - start))
        on_proof(proofs[-1])
    return proofs


def checks_of(
    folder: Path, manifest: dict[str, Any], oracle: Callable[[dict[str, Any]], Oracle] | None
) -> list[Check]:
    """Return the checks of an export, those that need nothing but NumPy first."""
    checks = [Check("digests of all files", functools.partial(_digests, folder, manifest))]
    if manifest["kind"] == "language model":
        return [*checks, Check("the C program = the model in JAX", functools.partial(_program_holds, folder))]
    export = _Export(folder, manifest)
    checks += [Check(f"{export.circuit_name} in NumPy = {VECTORS}", export.vectors_hold)]
    if oracle is not None:
        checks += [
            Check(f"{export.circuit_name} = the model in JAX", functools.partial(export.model_holds, oracle))
        ]
    if export.about.get("rule") == "life":
        checks += [Check(f"{export.circuit_name} = the Game of Life", export.is_life)]
    for format, suffix in _READERS:
        for name in export.names(format, suffix):
            if name != export.circuit_name:
                checks += [
                    Check(
                        f"{name} in NumPy = {export.circuit_name}", functools.partial(export.read_holds, name)
                    )
                ]
    if export.names("c", "_test.c"):
        checks += [Check(f"C, compiled = {VECTORS}", export.c_holds)]
    if export.names("verilog", "_testbench.v"):
        checks += [Check(f"Verilog, simulated = {VECTORS}", export.verilog_holds)]
    for name in export.names("html", ".html"):
        checks += [Check(f"{name}, its script = {VECTORS}", functools.partial(export.page_holds, name))]
    combinational = [] if manifest["registers"] else export.names("verilog", ".v")
    for name in (*export.names("blif", ".blif"), *export.names("aiger", ".aig"), *combinational):
        if not name.endswith("_testbench.v"):
            what = f"{name} = {export.circuit_name}, by ABC"
            checks += [Check(what, functools.partial(export.equal_by_abc, name))]
    return checks


def _digests(folder: Path, manifest: dict[str, Any]) -> str:
    wrong = []
    for name, facts in manifest["files"].items():
        try:
            content = (folder / name).read_bytes()
        except FileNotFoundError:
            wrong.append(f"{name} is missing")
            continue
        if hashlib.sha256(content).hexdigest() != facts["sha256"]:
            wrong.append(f"{name} is not what was written")
    if wrong:
        raise FailedError("; ".join(wrong))
    return f"{len(manifest['files'])} files"


def _program_holds(folder: Path) -> str:
    from lutjax.circuits import language_model

    compiler = _tool("gcc", "clang", "cc")
    try:
        with _running(compiler, "language_model"):
            return language_model.verify(folder, compiler=compiler)
    except language_model.DifferenceError as error:
        raise FailedError(str(error)) from error
    except subprocess.CalledProcessError as error:
        raise FailedError(f"{Path(error.cmd[0]).name} ends with status {error.returncode}") from error


class _Export:
    """Files of an export, read where a check needs them."""

    def __init__(self, folder: Path, manifest: dict[str, Any]):
        self.folder, self.manifest = folder, manifest
        self.about: dict[str, Any] = manifest.get("about", {})
        self.circuit_name = str(manifest["circuit"])

    def names(self, format: str, suffix: str) -> list[str]:
        """Return the files of a format whose names end so."""
        files = self.manifest["files"].items()
        return [name for name, facts in files if facts["format"] == format and name.endswith(suffix)]

    @functools.cached_property
    def circuit(self) -> Circuit:
        """The circuit that all files are compared with."""
        return self.read(self.circuit_name)

    @functools.cached_property
    def vectors(self) -> Vectors:
        try:
            found = Vectors.from_json((self.folder / VECTORS).read_text())
            found.check(self.circuit)
            return found
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise FailedError(f"{VECTORS} cannot be read: {error}") from error

    def read(self, name: str) -> Circuit:
        """Return the circuit of a file."""
        reader = next(read for (_, suffix), read in _READERS.items() if name.endswith(suffix))
        try:
            return reader((self.folder / name).read_bytes())
        except (OSError, ValueError) as error:
            raise FailedError(f"{name} cannot be read: {error}") from error

    def vectors_hold(self) -> str:
        given = [self.vectors.inputs[port.name] for port in self.circuit.inputs]
        _same(evaluated(self.circuit, given), self.vectors.outputs)
        return _samples(len(self.vectors))

    def model_holds(self, oracle: Callable[[dict[str, Any]], Oracle]) -> str:
        model = oracle(self.manifest)
        others, what = _tried(self.circuit.inputs)
        for x in (list(model.samples), others):
            expected = dict(zip((port.name for port in self.circuit.outputs), model.answer(*x), strict=True))
            _same(evaluated(self.circuit, x), expected)
        return f"{_samples(len(model.samples[0]))} and {what}"

    def is_life(self) -> str:
        x = (np.arange(512)[:, None] >> np.arange(9) & 1).astype(np.uint8)
        _same(evaluated(self.circuit, [x]), {self.circuit.outputs[0].name: life(x)})
        return "all 512 neighbourhoods"

    def read_holds(self, name: str) -> str:
        return _same_circuit(self.read(name), self.circuit)

    def c_holds(self) -> str:
        """Compile the C code with all warnings as errors and run its test program."""
        compiler = _tool("gcc", "clang", "cc")
        with _scratch() as scratch:
            program = scratch / "test"
            _called(compiler, *_C_FLAGS, *self.names("c", ".c"), "-o", program, cwd=self.folder)
            _called(program, cwd=self.folder)  # its status says whether all answers are right
            return f"{_samples(len(self.vectors))}, {Path(compiler).name}"

    def page_holds(self, name: str) -> str:
        """Run the script of a page, outside of a browser. A page may show the votes where the circuit says the class."""
        from lutjax.circuits import page

        node, text = _tool("node"), (self.folder / name).read_text()
        try:
            shown = page.from_html(text)
            words, n = shown.encode(*as_called(shown.inputs, self.vectors.inputs))
            with _running(node):
                found = page.evaluate_in_node(
                    text, words.astype("<u8").view("<u4").astype(np.uint32), node=node
                )
            given = by_port(shown, shown.decode(found.astype("<u4").view("<u8").astype(np.uint64), n))
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise FailedError(f"{name} cannot be read: {error}") from error
        except subprocess.CalledProcessError as error:
            raise FailedError(f"the script of {name} fails") from error
        expected = self.vectors.outputs
        if shown.outputs != self.circuit.outputs:
            if self.circuit.outputs[0].count == 1:
                given = {name: votes.argmax(1)[:, None] for name, votes in given.items()}
            else:
                expected = evaluated(shown, [self.vectors.inputs[port.name] for port in shown.inputs])
        _same(given, expected)
        return f"{_samples(n)}, node"

    def verilog_holds(self) -> str:
        """Run the testbench in Icarus Verilog."""
        from lutjax.circuits import simulate

        if simulate.find() is None:
            raise SkippedError("iverilog is not found")
        names = sorted(self.names("verilog", ".v"), key=lambda name: name.endswith("_testbench.v"))
        with _running("iverilog", "vvp"):
            found = simulate.run(*((self.folder / name).read_text() for name in names))
        if not found:
            raise FailedError(found.line.removeprefix("FAIL: "))
        return found.line.removeprefix("PASS: ") + ", iverilog"

    def equal_by_abc(self, name: str) -> str:
        """Prove that a file is equal to the circuit for all inputs."""
        from lutjax.circuits import abc

        program = abc.find()
        if program is None or (name.endswith(".v") and importlib.util.find_spec("pyosys") is None):
            raise SkippedError("pyosys is not installed")
        try:
            with _running(program):
                found = abc.cec(self.folder / name, self.circuit)
        except (RuntimeError, ValueError) as error:
            raise FailedError(str(error)) from error
        if found.status == "undecided":
            raise SkippedError(found.line)
        if not found:
            raise FailedError(found.line)
        return "proved for all inputs"


def life(neighbourhoods: np.ndarray) -> np.ndarray:
    """Return the next state in the Game of Life, ``[samples, 1]``, of cells: 8 neighbours and then the cell, ``[samples, 9]``."""
    alive = neighbourhoods[:, :8].sum(1)
    after: np.ndarray = (alive == 3) | (neighbourhoods[:, 8] == 1) & (alive == 2)
    return after.astype(np.uint8)[:, None]


def _tried(ports: Sequence[Port]) -> tuple[list[np.ndarray], str]:
    """Return numbers of input ports, all that there are or random ones, and how many these are in words."""
    n = sum(port.n_bits for port in ports)
    if n <= MOST_INPUTS:
        bits, what = np.arange(1 << n)[:, None] >> np.arange(n) & 1, f"all 2^{n} inputs"
    else:
        bits = np.random.default_rng(0).integers(0, 2, (RANDOM_SAMPLES, n), dtype=np.uint8)
        what = f"{RANDOM_SAMPLES} random ones"
    numbers, start = [], 0
    for port in ports:
        own = (
            bits[:, start : start + port.n_bits]
            .reshape(len(bits), port.count, port.format.bits)
            .astype(np.uint64)
        )
        codes = (own << np.arange(port.format.bits, dtype=np.uint64)).sum(-1, dtype=np.uint64)
        numbers.append(np.asarray(port.format.decode(codes)))
        start += port.n_bits
    return numbers, what


def _samples(n: int) -> str:
    return f"{n} sample" if n == 1 else f"{n} samples"


def _same(found: dict[str, np.ndarray], expected: Any) -> None:
    for name, answers in expected.items():
        wrong = (found[name] != answers).any(1)
        if wrong.any():
            k = int(wrong.argmax())
            raise FailedError(
                f"{wrong.sum()} of {_samples(len(answers))} differ; of sample {k}, {name} is {found[name][k].tolist()}, "
                f"expected {np.asarray(answers[k]).tolist()}"
            )


def _same_circuit(one: Circuit, other: Circuit) -> str:
    """Compare two circuits bit by bit, on all inputs where there are few enough of them."""
    n = other.n_inputs
    if (one.n_inputs, one.n_outputs) != (n, other.n_outputs):
        raise FailedError(
            f"it has {one.n_inputs} bits of inputs and {one.n_outputs} of outputs, expected {n} and {other.n_outputs}"
        )
    if n <= MOST_INPUTS:
        bits = (np.arange(max(1 << n, 64))[None] >> np.arange(n)[:, None] & 1).astype(np.uint8)
        words, what = (
            np.packbits(bits, axis=1, bitorder="little").view("<u8").astype(np.uint64),
            f"all 2^{n} inputs",
        )
    else:
        words = np.random.default_rng(0).integers(0, 2**64, (n, RANDOM_SAMPLES // 64), dtype=np.uint64)
        what = f"{RANDOM_SAMPLES} random inputs"
    different = one.evaluate(words) != other.evaluate(words)
    if different.any():
        raise FailedError(f"{different.any(1).sum()} of {other.n_outputs} bits of outputs differ on {what}")
    return what


def _from_json(content: bytes) -> Circuit:
    from lutjax.circuits import netlist_json

    return netlist_json.from_json(content)


def _from_blif(content: bytes) -> Circuit:
    from lutjax.circuits import blif

    return blif.from_blif(content)


def _from_aiger(content: bytes) -> Circuit:
    from lutjax.circuits import aiger

    return aiger.from_aiger(content)


_READERS: dict[tuple[str, str], Callable[[bytes], Circuit]] = {
    ("json", ".json"): _from_json,
    ("blif", ".blif"): _from_blif,
    ("aiger", ".aig"): _from_aiger,
    ("aiger", ".aag"): _from_aiger,
}
"""For each format and ending of a name how its circuit is read."""


@contextlib.contextmanager
def _scratch() -> Iterator[Path]:
    """Yield a folder that is removed at the end of the block."""
    with tempfile.TemporaryDirectory(prefix="lutjax-") as path:
        yield Path(path)


def _tool(*names: str) -> str:
    """Return the path of the first of some programs that is found.

    Raises:
      SkippedError: none is.
    """
    for name in names:
        if path := shutil.which(name):
            return path
    raise SkippedError(f"{' or '.join(names)} is not found")


@contextlib.contextmanager
def _running(*programs: str | Path) -> Iterator[None]:
    """Raise SkippedError if the machine refuses to run one of these programs in this block."""
    try:
        yield
    except OSError as error:
        path = Path(error.filename or "")
        if path.name not in [Path(program).name for program in programs]:
            raise
        place = tempfile.gettempdir()
        if isinstance(error, PermissionError) and path.is_relative_to(place):
            raise SkippedError(
                f"no program can be run in {place}; set TMPDIR to a folder that is not mounted noexec"
            ) from error
        raise SkippedError(f"{path} cannot be run: {error.strerror}") from error


def _called(*words: str | Path, cwd: Path) -> str:
    """Return what a program prints.

    Raises:
      FailedError: it ends with an error; what it printed last.
      SkippedError: the machine refuses to run it.
    """
    with _running(words[0]):
        done = subprocess.run(
            list(map(str, words)), cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
    if done.returncode:
        lines = [line for line in done.stdout.splitlines() if line.strip()]
        why = lines[-1] if lines else f"status {done.returncode}"
        raise FailedError(f"{Path(words[0]).name}: {why}")
    return done.stdout
