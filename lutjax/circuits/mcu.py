"""Circuits on microcontrollers: a single-sample C library, and its costs.

The costs are flash and RAM bytes and instructions.

Sizes come from a cross compiler, either ``pip install ziglang`` or an installed GCC. A simulator
counts instructions and compares the answers with the circuit: ``pip install unicorn`` (ARM,
RISC-V) or ``npm install --global avr8js`` (AVR).
"""

import base64
import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Shaped

from lutjax import __version__
from lutjax.circuits import _c_emitter as c99, _elf, _microcontroller, _programs, _templates, c
from lutjax.circuits._microcontroller import Style
from lutjax.circuits._targets import read_targets
from lutjax.circuits.circuit import Circuit, evaluate_ports, numbers_of
from lutjax.circuits.ports import Port, whole_numbers

SAMPLES = 64
"""Default number of simulated samples."""

_SECONDS = 600  # tool time limit
_MOST = 50_000_000  # instruction limit per sample
_STACK = 64 * 1024  # bytes of simulated stack, if the machine has enough memory
_PATTERN = 0xA5  # fill pattern of unwritten memory


@dataclasses.dataclass(frozen=True)
class Target:
    """Microcontrollers with a common instruction set.

    Attributes:
      machine: description of a common machine.
      flash, ram: bytes for programs and data on this machine; the report states if they are
        exceeded.
      functions: maximum operations written as instructions; larger circuits become tables, which
        take less flash.
      chunk: operations per function.
      address: maximum bytes of tables and RAM addressable by pointers.
      zig: target arguments for the ziglang compiler.
      gcc: GCC names for the machine, and GCC options.
      starts: flash and RAM start addresses of the simulated program.
      boards: PlatformIO board, platform and framework, and the Arduino architecture name.
    """

    machine: str
    flash: int
    ram: int
    functions: int
    chunk: int
    address: tuple[int, int]
    zig: tuple[str, ...]
    gcc: tuple[tuple[str, ...], tuple[str, ...]]
    starts: tuple[int, int]
    boards: tuple[str, str, str, str]


TARGETS = read_targets("microcontrollers", Target)
"""Targets by name: ARM Cortex-M4, 8-bit AVR, and 32-bit RISC-V (RV32IMC)."""


def check_target(target: str, where: str = "mcu.write") -> Target:
    """Return the target with this name, or raise ValueError."""
    if target not in TARGETS:
        raise ValueError(f"{where}: target is {target!r}; the known ones are {', '.join(TARGETS)}.")
    return TARGETS[target]


def write(
    circuit: Circuit,
    name: str = "circuit",
    *,
    target: str,
    layers: Circuit | None = None,
    style: str = "auto",
    sample: Sequence[Shaped[np.ndarray, " _"]] = (),
) -> dict[str, str]:
    """Return an Arduino and PlatformIO library that processes one sample at a time: texts by path.

    ``src/NAME.h`` declares ``NAME_predict``, which takes the input values of one sample. It
    returns the answer if this is a single value, and otherwise writes the output values.
    ``NAME_predict_row`` takes a table row, if the circuit does. ``examples/NAME/NAME.ino`` is a
    sketch that calls it.

    Args:
      circuit: any circuit; gates not required by the outputs are dropped.
      name: library and file name, and prefix of C identifiers.
      target: a name from `TARGETS`: ``"cortex-m4"``, ``"avr"`` or ``"riscv32"``. The program is
        C99 that runs anywhere; the target determines the style and the board files.
      layers: optional copy of the network with ``inputs="bits"`` and ``outputs="bits"``. The
        program then uses integers to compare numbers with thresholds, count votes and find the
        class. For one sample this takes far fewer instructions than the corresponding gates. If
        the circuit takes table rows, ``about["column_bits"]`` of the layers holds the ``bits``
        from its `lutjax.circuits.columns.Columns`.
      style: "functions" writes every operation as an instruction, the fastest form; "tables"
        writes tables in flash (PROGMEM on AVR) and a loop over them, which takes less flash;
        "auto" selects by the number of operations.
      sample: values for each input port in the sketch; default: zeros.

    Raises:
      ValueError: unknown target or style, a name that is not a word, a circuit without outputs, a
        different network in `layers`, or more values or tables than the target's pointers can
        address.

    Example:
      >>> from lutjax.circuits import Builder, mcu
      >>> builder = Builder()
      >>> (a,), (b,) = builder.input("x", 2)
      >>> builder.output("y", [[builder.gate([a, b], 0b0110)]])
      >>> sorted(mcu.write(builder.circuit(), "parity", target="avr"))[:3]
      ['examples/parity/parity.ino', 'library.json', 'library.properties']
    """
    return _library(circuit, name, target, layers, style, sample)[0]


def _library(
    circuit: Circuit,
    name: str,
    target: str,
    layers: Circuit | None,
    style: str,
    sample: Sequence[Shaped[np.ndarray, " _"]] = (),
) -> tuple[dict[str, str], int, Style]:
    of = check_target(target)
    c.check_name(name, (*circuit.inputs, *circuit.outputs))
    if style not in ("auto", "functions", "tables"):
        raise ValueError(
            f"mcu.write: style is {style!r}; expected 'auto', 'functions' or 'tables'."
        )
    if not circuit.inputs or not circuit.outputs:
        raise ValueError("mcu.write: circuit has no inputs or no outputs; expected both.")
    program = _microcontroller.make_program(circuit, layers)
    if layers is not None:
        _check_same(circuit, layers, program)
    n = len(program.operations)
    chosen: Style = "tables"
    if style == "functions" or (style == "auto" and n <= of.functions):
        chosen = "functions"
    sources, memory, tables = _microcontroller.source(program, name, chosen, of.chunk)
    needs = ("tables", tables, of.address[0]), ("values", memory, of.address[1])
    for what, bytes_, most in needs:
        if bytes_ > most:
            raise ValueError(
                f"mcu.write: the circuit of {n:,} operations needs {bytes_:,} bytes of {what}; "
                f"pointers of {target} reach {most:,}. Train a smaller network, "
                "or choose another target."
            )
    board, platform, framework, architecture = of.boards
    # The example sketch takes zeros for inputs without a sample.
    numbers = [*sample, *(np.zeros(port.count, int) for port in circuit.inputs[len(sample) :])]
    values = {
        "name": name,
        "title": f"{name}: {circuit!r}",
        "version": __version__,
        "architecture": architecture,
        "board": board,
        "platform": platform,
        "framework": framework,
        "arrays": [*c99.sample_arrays(circuit, numbers), *c99.output_arrays(circuit, 1)],
        "call": f"  {_microcontroller.call(circuit, name)}",
        "print": [
            _templates.fill_template("mcu_print.ino", port=port.name, count=port.count).rstrip()
            for port in circuit.outputs
        ],
    }
    files = {f"examples/{name}/{name}.ino": _templates.fill_template("mcu.ino", **values)}
    for path in ("library.json", "library.properties", "platformio.ini"):
        files[path] = _templates.fill_template(f"mcu_{path}", **values)
    files |= {f"src/{path}": text for path, text in sources.items()}
    return files, n, chosen


def c_test(circuit: Circuit, *samples: Shaped[np.ndarray, "..."], name: str = "circuit") -> str:
    """Return a C program that tests ``src/NAME.c`` from `write`, for use in an adjacent folder.

    It contains samples and expected answers, prints the number of wrong samples, and returns 0 if
    none is wrong.

    Args:
      circuit: as in `write`.
      *samples: sample values for each input port, as in `Circuit` calls.
      name: as in `write`.

    Raises:
      ValueError: no samples.
      ValueError, TypeError: samples that do not fit the circuit.
    """
    call = _microcontroller.call(circuit, name, "k")
    answers = c99.compute_answers(circuit, samples, where="mcu.c_test")
    return c99.write_test(circuit, samples, answers, name, call=call)


def _check_same(circuit: Circuit, layers: Circuit, program: _microcontroller.Program) -> None:
    # The layers give the program its rows of operations: a network that was trained further, or
    # another network, would give other answers.
    samples = random_samples(circuit, 256)
    answers = _microcontroller.evaluate(program, samples)
    expected = evaluate_ports(circuit, samples).values()
    wrong = sum((a != b).any(1) for a, b in zip(answers, expected, strict=True)).astype(bool).sum()
    if wrong:
        raise ValueError(
            f"mcu.write: layers differs from the circuit on {wrong} of 256 random samples."
        )


def random_samples(circuit: Circuit, n: int, seed: int = 0) -> list[np.ndarray]:
    """Return random values ``[n, count]`` for each input port."""
    draw = np.random.default_rng(seed)
    samples = []
    for port in circuit.inputs:
        bits = draw.integers(0, 2, (port.n_bits, n), dtype=np.uint8)
        samples.append(numbers_of(port, bits).reshape(n, port.count))
    return samples


# ------------------------------------------------------------------------------------------- report
@dataclasses.dataclass(frozen=True)
class Report:
    """Circuit costs on a target; formatted as lines of text.

    Attributes:
      target: a name from `TARGETS`.
      gates: circuit gates.
      operations: bit operations in the program.
      style: "functions" or "tables".
      flash: bytes of instructions and constants; None without a compiler.
      ram: bytes of static memory and maximum stack; None without a simulator.
      instructions: mean instructions per sample; None without a simulator.
      cycles: mean cycles per sample, from the simulator or the core's documentation; else None.
      cycles_from: source of the cycle count. For a Cortex-M4 it is a bound from the instruction
        timings in the manual: one cycle each, one more for each word read or written, and three
        more for each taken branch. Flash wait states add to it.
      samples: number of samples simulated and compared with the circuit.
      wrong: number of samples with answers different from the circuit.
      missing: reason for each missing figure, by name.
      tools: tool versions by name.
    """

    target: str
    gates: int
    operations: int
    style: str
    flash: int | None
    ram: int | None
    instructions: float | None
    cycles: float | None
    cycles_from: str
    samples: int
    wrong: int
    missing: Mapping[str, str]
    tools: Mapping[str, str]

    def to_json(self) -> str:
        """Return the report as a JSON object: bytes, instructions and cycles."""
        fields = {**dataclasses.asdict(self), "machine": TARGETS[self.target].machine}
        return json.dumps(fields, indent=2) + "\n"

    def __str__(self) -> str:
        of = TARGETS[self.target]
        lines = [
            f"{self.target}: {self.gates:,} gates, as {self.operations:,} operations "
            f"on bits ({self.style})"
        ]
        for name, used, most in (("flash", self.flash, of.flash), ("RAM", self.ram, of.ram)):
            if used is not None:
                fits = "" if used <= most else ", which is too much for it"
                lines.append(
                    f"{name:<12} {used:>9,} bytes of the {most:,} of an {of.machine}{fits}"
                )
        if self.instructions is not None:
            lines.append(f"{'instructions':<12} {self.instructions:>9,.0f} for one sample")
        if self.cycles is not None:
            lines.append(f"{'cycles':<12} {self.cycles:>9,.0f} for one sample ({self.cycles_from})")
        if self.samples:
            right = "all with the answers of the circuit"
            if self.wrong:
                right = f"{self.wrong} WITH OTHER ANSWERS"
            lines.append(f"simulated: {self.samples} samples, {right}")
        lines += [f"not {what}: {why}" for what, why in self.missing.items()]
        return "\n".join(lines)


def report(
    circuit: Circuit,
    target: str,
    *,
    layers: Circuit | None = None,
    style: str = "auto",
    samples: Sequence[Shaped[np.ndarray, "samples _"]] | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> Report:
    """Return the costs of a circuit on a microcontroller: flash, RAM and instructions per sample.

    Args:
      circuit: as in `write`.
      target: as in `write`.
      layers: as in `write`.
      style: as in `write`.
      samples: values ``[samples, count]`` for each input port, used to compare the simulated
        program with the circuit; default: 64 random samples.
      progress: receives the next step as text.

    Raises:
      ValueError: as `write`; samples that do not fit the circuit.
      RuntimeError: a tool fails.
      TimeoutError: a tool exceeds its time limit.

    Example:
      >>> from lutjax.circuits import Builder, mcu
      >>> builder = Builder()
      >>> (a,), (b,) = builder.input("x", 2)
      >>> builder.output("y", [[builder.gate([a, b], 0b0110)]])
      >>> found = mcu.report(builder.circuit(), "avr")
      >>> found.operations, found.wrong
      (1, 0)
    """
    of = check_target(target, "mcu.report")
    files, n_operations, chosen = _library(circuit, "circuit", target, layers, style)
    costs = Report(
        target=target,
        gates=len(circuit),
        operations=n_operations,
        style=chosen,
        **dict.fromkeys(("flash", "ram", "instructions", "cycles")),
        cycles_from="",
        samples=0,
        wrong=0,
        missing={},
        tools={"lutjax": __version__},
    )
    if why := _uncompiled_reason(of):
        return dataclasses.replace(costs, missing={"compiled": why})
    progress("compiling")
    compiled = _compile(files, "circuit", circuit, of)
    tools = {**costs.tools, **compiled.tools}
    costs = dataclasses.replace(costs, flash=compiled.flash, tools=tools)
    if why := _unsimulated_reason(target):
        return dataclasses.replace(costs, missing={"simulated": why})
    progress("simulating")
    numbers = random_samples(circuit, SAMPLES) if samples is None else list(samples)
    runs, n_wrong, version = _compare(compiled, circuit, target, numbers)
    cycles = [run.cycles for run in runs if run.cycles is not None]
    return dataclasses.replace(
        costs,
        ram=compiled.ram + max(run.stack for run in runs),
        instructions=float(np.mean([run.instructions for run in runs])),
        cycles=float(np.mean(cycles)) if cycles else None,
        cycles_from=_CYCLES.get(target, "") if cycles else "",
        samples=len(runs),
        wrong=n_wrong,
        tools={**costs.tools, **version},
    )


_CYCLES = {
    "avr": "those of avr8js",
    "cortex-m4": "at most, from ARM's Technical Reference Manual of the Cortex-M4, section 3.3",
}


def _bytes(ports: Sequence[Port], numbers: Sequence[np.ndarray]) -> np.ndarray:
    """Return port values ``[n, count]`` in their memory layout, uint8 ``[n, bytes]``."""
    rows = []
    for port, x in zip(ports, numbers, strict=True):
        codes = whole_numbers(port.format, port.format.encode(x))
        kind = f"<{'i' if port.format.signed else 'u'}{c99.width_of(port) // 8}"
        octets = np.ascontiguousarray(codes.astype(kind)).view(np.uint8).reshape(len(x), -1)
        # Structures of arrays have no gaps if each array has a multiple of eight octets: `_room`.
        rows.append(np.pad(octets, ((0, 0), (0, -octets.shape[1] % 8))))
    return np.concatenate(rows, 1)


def _room(port: Port) -> int:
    """Return the number of allocated elements; octets are padded to a multiple of eight."""
    size = c99.width_of(port) // 8
    return -(-port.count * size // 8) * 8 // size


def unsupported_reason(target: str) -> str | None:
    """Return the reason if programs cannot be compiled or simulated for a target, else None."""
    return _uncompiled_reason(TARGETS[target]) or _unsimulated_reason(target)


def count_wrong_answers(
    files: Mapping[str, str],
    name: str,
    circuit: Circuit,
    target: str,
    samples: Sequence[np.ndarray],
) -> int:
    """Return the number of samples with different answers from a simulated library and a circuit.

    The library is the ``src`` files from `write`; samples are ``[samples, count]`` by port.
    """
    compiled = _compile(files, name, circuit, TARGETS[target])
    return _compare(compiled, circuit, target, samples)[1]


def _compare(
    compiled: "_Compiled", circuit: Circuit, target: str, samples: Sequence[np.ndarray]
) -> "tuple[list[_Run], int, dict[str, str]]":
    expected = _bytes(circuit.outputs, [*evaluate_ports(circuit, samples).values()])
    inputs, n_out = _bytes(circuit.inputs, samples), expected.shape[1]
    if target == "avr":
        runs, tools = _simulate_avr(compiled.image, inputs, n_out)
    else:
        runs = [_emulate(compiled.image, row.tobytes(), n_out) for row in inputs]
        tools = {"unicorn": importlib.metadata.version("unicorn")}
    n_wrong = sum(run.output != row.tobytes() for run, row in zip(runs, expected, strict=True))
    return runs, n_wrong, tools


def _uncompiled_reason(of: Target) -> str | None:
    names = of.gcc[0]
    if any(map(shutil.which, names)) or importlib.util.find_spec("ziglang"):
        return None
    return f"neither {' nor '.join(names)} nor ziglang was found: pip install ziglang"


def _compiler(of: Target) -> tuple[list[str], dict[str, str]]:
    names, options = of.gcc
    for name in names:
        if path := shutil.which(name):
            version = _programs.run([path, "-dumpversion"], ".", 60)[1].strip()
            return [path, *options], {name: version}
    version = importlib.metadata.version("ziglang")
    return [sys.executable, "-m", "ziglang", "cc", *of.zig], {"ziglang": version}


_OPTIONS = (
    *(
        "-std=gnu11",
        "-Os",
        "-g0",
        "-ffreestanding",
        "-ffunction-sections",
        "-fdata-sections",
        "-I.",
    ),
    *("-fno-unwind-tables", "-fno-asynchronous-unwind-tables"),
)


class _Compiled(NamedTuple):
    """Image of a program wrapped in a function ``run``, and its bytes without ``run``."""

    image: _elf.Image
    flash: int
    ram: int  # static
    tools: dict[str, str]  # compiler version


def _compile(files: Mapping[str, str], name: str, circuit: Circuit, of: Target) -> _Compiled:
    compiler, tools = _compiler(of)
    arrays = []
    for kind, ports in (("input", circuit.inputs), ("output", circuit.outputs)):
        arrays.append("__attribute__((used, aligned(8))) struct {")
        arrays += [f"    {c99.type_of(port)} {port.name}[{_room(port)}];" for port in ports]
        arrays.append(f"}} {kind}s;")
        arrays += [f"#define {kind}_{port.name} {kind}s.{port.name}" for port in ports]
    call = f"    {_microcontroller.call(circuit, name)}"
    run = _templates.fill_template("mcu_run.c", name=name, arrays=arrays, call=call)
    flash, data = (hex(address) for address in of.starts)
    is_zig = "ziglang" in compiler
    link = ["-nostartfiles", "-Wl,-e,run"]
    if is_zig:
        link = ["-nostdlib", "-Wl,--no-gc-sections", "-T", "run.ld"]
    with tempfile.TemporaryDirectory(prefix="lutjax-") as place:
        folder = pathlib.Path(place)
        sources = {path: text for path, text in files.items() if path.startswith("src/")}
        texts = {path.removeprefix("src/"): text for path, text in sources.items()}
        texts["run.c"] = run
        texts["run.ld"] = _templates.fill_template("mcu.ld", flash=flash, data=data)
        # Zig has no avr-libc.
        if is_zig:
            (folder / "avr").mkdir()
            texts["avr/pgmspace.h"] = _templates.text("mcu_pgmspace.h")
        for path, text in texts.items():
            (folder / path).write_text(text, encoding="utf-8")
        begin = [*compiler, *_OPTIONS]
        for words in (
            [*begin, "-c", f"{name}.c", "-o", "program.o"],
            [*begin, "-c", "run.c", "-o", "run.o"],
            [*compiler, *link, "run.o", "program.o", "-o", "run.elf"],
        ):
            status, said = _programs.run(words, folder, _SECONDS, where="mcu.report: ")
            if status:
                raise RuntimeError(
                    f"mcu.report: the compiler failed: {' '.join(said.split())[-300:]}"
                )
        alone = _elf.read((folder / "program.o").read_bytes())
        image = _elf.read((folder / "run.elf").read_bytes())
    # Flash counts without the wrapper and without unwind tables, which programs do not read.
    sections = [section for section in alone.sections if not section.name.startswith(_UNWIND)]
    in_flash = sum(section.size for section in sections if section.content)
    in_ram = sum(section.size for section in sections if section.writable)
    return _Compiled(image, in_flash, in_ram, tools)


_UNWIND = (".ARM.ex", ".eh_frame", ".riscv", ".llvm")


# --------------------------------------------------------------------------------------- simulators
class _Run(NamedTuple):
    output: bytes
    instructions: int
    cycles: int | None
    stack: int


def _unsimulated_reason(target: str) -> str | None:
    if target != "avr":
        has_unicorn = importlib.util.find_spec("unicorn")
        return None if has_unicorn else "unicorn was not found: pip install unicorn"
    node = shutil.which("node")
    if node is None:
        return (
            "node was not found, which runs avr8js; install Node.js, then: "
            "npm install --global avr8js"
        )
    return None if _avr8js(node) else "avr8js was not found: npm install --global avr8js"


def _avr8js(node: str) -> dict[str, str] | None:
    """Return the environment for Node.js to find avr8js, or None if not found."""
    places = [os.environ.get("NODE_PATH", "")]
    if npm := shutil.which("npm"):
        places.append(_programs.run([npm, "root", "--global"], ".", 60)[1].strip())
    environment = {**os.environ, "NODE_PATH": os.pathsep.join(filter(None, places))}
    command = [node, "-e", 'require("avr8js")']
    done = subprocess.run(command, env=environment, capture_output=True, timeout=60, check=False)
    return None if done.returncode else environment


# The address spaces of an AVR both start at 0; linkers add this number to addresses of data.
_AVR_DATA = 0x800000
_AVR_FLASH_BYTES, _AVR_MEMORY_BYTES = 128 * 1024, 32 * 1024


def _simulate_avr(
    image: _elf.Image, inputs: np.ndarray, n_out: int
) -> tuple[list[_Run], dict[str, str]]:
    flash, memory, start = _avr_contents(image)
    job = {
        "flash": _to_base64(flash),
        "memory": _to_base64(memory),
        "memory_start": start,
        "memory_bytes": _AVR_MEMORY_BYTES,
        "samples": [_to_base64(row.tobytes()) for row in inputs],
        "input": image.symbols["inputs"] - _AVR_DATA,
        "output": image.symbols["outputs"] - _AVR_DATA,
        "output_bytes": n_out,
        "run": image.symbols["run"],
        "done": image.symbols["done"],
        "most": _MOST,
    }
    result = _run_avr8js(job)
    runs = [
        _Run(base64.b64decode(run["output"]), run["instructions"], run["cycles"], run["stack"])
        for run in result["runs"]
    ]
    return runs, {"avr8js": result["version"], "node": result["node"]}


def _avr_contents(image: _elf.Image) -> tuple[bytes, bytes, int]:
    """Return the flash, and the memory of variables with its first address."""
    start = TARGETS["avr"].starts[1] - _AVR_DATA
    flash, memory = bytearray(_AVR_FLASH_BYTES), bytearray(_AVR_MEMORY_BYTES)
    end = start
    for section in image.sections:
        if section.address >= _AVR_DATA:
            address = section.address - _AVR_DATA
            memory[address : address + len(section.content)] = section.content
            # Variables that start as zero have a size, but no content.
            end = max(end, address + section.size)
        else:
            flash[section.address : section.address + len(section.content)] = section.content
    # The rest of the memory is left to the simulator, which measures how far the stack gets.
    return bytes(flash), bytes(memory[start:end]), start


def _to_base64(content: bytes) -> str:
    return base64.b64encode(content).decode()


def _run_avr8js(job: Mapping[str, Any]) -> dict[str, Any]:
    node = str(shutil.which("node"))
    done = subprocess.run(
        [node, "-e", _templates.text("mcu_avr.js")],
        input=json.dumps(job),
        env=_avr8js(node),
        capture_output=True,
        text=True,
        timeout=_SECONDS,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"mcu.report: avr8js failed: {' '.join(done.stderr.split())[-300:]}")
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def _emulate(image: _elf.Image, sample: bytes, n_out: int) -> _Run:
    import unicorn
    from unicorn import arm_const, riscv_const

    new: Any = unicorn.Uc
    arm, top = image.is_arm, 0x30000000
    if arm:
        machine = new(unicorn.UC_ARCH_ARM, unicorn.UC_MODE_THUMB | unicorn.UC_MODE_MCLASS)
        machine.ctl_set_cpu_model(arm_const.UC_CPU_ARM_CORTEX_M4)
    else:
        machine = new(unicorn.UC_ARCH_RISCV, unicorn.UC_MODE_RISCV32)
    # Sections may share a page of 4096 bytes, which must not be mapped twice.
    pages: set[int] = set()
    for section in image.sections:
        pages.update(range(section.address // 4096, -(-(section.address + section.size) // 4096)))
    for page in sorted(pages):
        machine.mem_map(4096 * page, 4096)
    for section in image.sections:
        machine.mem_write(section.address, section.content)
    machine.mem_map(top - _STACK, _STACK)
    machine.mem_write(top - _STACK, bytes([_PATTERN]) * _STACK)
    machine.mem_write(image.symbols["inputs"], sample)
    run, done = image.symbols["run"], image.symbols["done"]
    # The function returns to `done`, where emulation stops. Bit 0 of an address selects Thumb.
    if arm:
        machine.reg_write(arm_const.UC_ARM_REG_SP, top)
        machine.reg_write(arm_const.UC_ARM_REG_LR, done | 1)
    else:
        machine.reg_write(riscv_const.UC_RISCV_REG_SP, top)
        machine.reg_write(riscv_const.UC_RISCV_REG_RA, done)
    instructions = accesses = branches = 0
    following = run & ~1

    def step(machine: Any, address: int, size: int, data: Any) -> None:
        nonlocal instructions, branches, following
        instructions += 1
        branches += address != following
        following = address + size

    def access(machine: Any, kind: int, address: int, size: int, value: int, data: Any) -> None:
        nonlocal accesses
        accesses += 1

    machine.hook_add(unicorn.UC_HOOK_CODE, step)
    machine.hook_add(unicorn.UC_HOOK_MEM_READ | unicorn.UC_HOOK_MEM_WRITE, access)
    try:
        machine.emu_start(run | arm, done & ~1, count=_MOST)
    except unicorn.UcError as error:
        raise RuntimeError(f"mcu.report: unicorn failed: {error}") from error
    # The stack grows down: what is above the untouched pattern was used.
    stack = bytes(machine.mem_read(top - _STACK, _STACK))
    # The Cortex-M4 takes a cycle per instruction, one more per access, and up to three more to
    # refill its pipeline after a branch. One branch is not counted above: the return to the caller.
    cycles = instructions + accesses + 3 * (branches + 1) if arm else None
    return _Run(
        bytes(machine.mem_read(image.symbols["outputs"], n_out)),
        instructions,
        cycles,
        len(stack.lstrip(bytes([_PATTERN]))),
    )
