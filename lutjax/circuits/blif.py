"""Circuits as BLIF (Berkeley Logic Interchange Format), and back."""

import collections
import functools
import itertools
import os
import re
from collections.abc import Iterable, Iterator, Sequence

from lutjax.circuits import _netlists, truth
from lutjax.circuits.circuit import Circuit, walk
from lutjax.files import atomic
from lutjax.files.messages import in_a_line

_PORTS = "lutjax ports "  # start of the ports comment
_LINE = 100  # maximum characters before name lists continue on a new line
_SKIPPED = {  # timing and layout, or Yosys names without effect on the function
    *(".area", ".delay", ".wire_load_slope", ".wire", ".input_arrival", ".default_input_arrival"),
    *(".output_required", ".default_output_required", ".input_drive", ".default_input_drive"),
    *(".output_load", ".default_output_load", ".max_input_load", ".default_max_input_load"),
    *(".attr", ".param", ".cname"),
}
_REFUSED = {
    ".latch": (
        "it has latches; a circuit here is combinational (in ABC, "
        "`comb` makes their inputs and outputs ports)"
    ),
    ".mlatch": "it has latches; a circuit here is combinational",
    ".gate": "it is mapped to cells of a library; in ABC, `strash; write_blif` writes tables",
    ".subckt": "it has other models in it; flatten it first (in yosys, `flatten`)",
    ".exdc": "it has don't-cares of the network, which a circuit here has not",
    ".start_kiss": "it is a state machine; a circuit here is combinational",
    ".blackbox": "it is a black box",
}


def write(circuit: Circuit, name: str = "circuit") -> str:
    """Return a circuit as BLIF, each gate as an irredundant sum of products.

    Port bits are named ``x[3]``. A comment keeps the port formats for `read`.

    Args:
      circuit: the circuit.
      name: model name.

    Example:
      >>> from lutjax.circuits import Circuit, Port, blif
      >>> either = Circuit((Port("x", 2),), (Port("y"),), ((1, 2),), (0b1110,), (2 * 3,))
      >>> print(blif.write(either))  # doctest: +ELLIPSIS
      # lutjax ports ...
      .model circuit
      .inputs x[0] x[1]
      .outputs y[0]
      .names x[0] x[1] g0
      -1 1
      1- 1
      .names g0 y[0]
      1 1
      .end
      <BLANKLINE>
    """
    if not re.fullmatch(r"[^\s#\\]+", name):
        raise ValueError(
            f"blif.write: name is {name!r}; it must have no space, # or \\, and not be empty."
        )
    inputs, outputs = _netlists.bit_names(circuit.inputs), _netlists.bit_names(circuit.outputs)
    lines = [
        f"# {_PORTS}{_netlists.ports_to_text(circuit)}",
        f".model {name}",
        *_wrap_names(".inputs", inputs),
        *_wrap_names(".outputs", outputs),
    ]
    gates_read_zero = any(0 in nodes for nodes in circuit.fanins)
    if gates_read_zero or any(literal < 2 for literal in circuit.literals):
        lines.append(".names zero")

    gates = itertools.count()

    def gate(reads: list[str], table: int) -> str:
        name = f"g{next(gates)}"
        # ABC rejects a table with inputs but no rows, so a constant has no inputs.
        if table in (0, truth.FULL[len(reads)]):
            lines.extend([f".names {name}", *("1" for _ in range(table & 1))])
        else:
            lines.extend([f".names {' '.join(reads)} {name}", *_cover(table, len(reads))])
        return name

    names = walk(circuit.fanins, circuit.tables, ["zero", *inputs], gate)
    for bit, literal in zip(outputs, circuit.literals, strict=True):
        lines += [f".names {names[literal >> 1]} {bit}", "0 1" if literal & 1 else "1 1"]
    return "\n".join([*lines, ".end", ""])


@functools.lru_cache(maxsize=1 << 16)
def _cover(table: int, n: int) -> tuple[str, ...]:
    return tuple(
        "".join("-" if not read >> i & 1 else "01"[values >> i & 1] for i in range(n)) + " 1"
        for read, values in truth.cubes(table, n)
    )


def _wrap_names(word: str, names: Sequence[str]) -> Iterator[str]:
    line = word
    for name in names:
        if len(line) + len(name) > _LINE:
            yield line + " \\"
            line = ""
        line += " " + name
    yield line


def read(text: str | bytes | os.PathLike[str]) -> Circuit:
    """Return the circuit in a BLIF text, or in the file at a path.

    The text may come from `write`, ABC or Yosys. Names such as ``x[3]`` are grouped into a port.
    Any other name becomes its own port, with invalid characters replaced. Constants, buffers and
    inverters become literals. A ``.names`` with too many inputs becomes several gates. It takes at
    most 100 times the memory of the text.

    Raises:
      ValueError: invalid BLIF, a ports comment that contradicts the text, signals without or with
        two drivers, loops, or unsupported elements: latches, cells, submodels. The message has the
        line number.
    """
    content = atomic.content(text)
    if isinstance(content, bytes):
        try:
            content = content.decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"blif.read: the text is not UTF-8: {error}.") from None
    inputs: list[str] = []
    outputs: list[str] = []
    comments: list[tuple[int, str]] = []  # ports comment
    network = _netlists.Network("blif.read")
    # Line, signals and rows of the last .names, until another command ends it.
    table: tuple[int, list[str], list[tuple[str, str]]] | None = None
    models = ended = 0

    def close() -> None:
        if table is not None:
            line, signals, rows = table
            cover = _read_cover(line, signals, rows)
            network.add(signals[-1], signals[:-1], *cover, where=f"line {line}")

    for number, words, comment in _lines(content):
        if comment.startswith(f"{_PORTS}["):
            comments.append((number, comment.removeprefix(_PORTS)))
        if not words:
            continue
        word = words[0]
        if not word.startswith("."):
            if table is None:
                what = f"{' '.join(words)!r} is a row of a table"
                raise _syntax_error(number, f"{what}, but no .names is before it")
            if len(words) > 2:
                what = f"{' '.join(words)!r} has {len(words)} words"
                raise _syntax_error(number, f"{what}; a table row has 1 or 2")
            table[2].append((words[0], words[1]) if len(words) == 2 else ("", words[0]))
            continue
        close()
        table = None
        if word == ".model":
            models += 1
            if models > 1:
                raise _syntax_error(number, "a second .model begins; expected one, flat model")
        elif word == ".inputs":
            inputs += words[1:]
        elif word == ".outputs":
            outputs += words[1:]
        elif word == ".names":
            if len(words) < 2:
                raise _syntax_error(number, ".names has no signal")
            table = (number, words[1:], [])
        elif word == ".conn" and len(words) == 3:
            network.add(words[2], words[1:2], ((1, 1),), 0, f"line {number}")
        elif word == ".end":
            ended = number
            break
        elif word in _REFUSED:
            raise _syntax_error(number, f"{word}: {_REFUSED[word]}")
        elif word not in _SKIPPED:
            raise _syntax_error(
                number, f"{word} is not known; expected .inputs, .outputs, .names and .end"
            )
    close()
    if not models and not ended and not network.drivers:
        raise ValueError("blif.read: the text has no .model, no .names and no .end; is it BLIF?")
    for kind, names in (("inputs", inputs), ("outputs", outputs)):
        if len(set(names)) < len(names):
            twice = next(name for name, count in collections.Counter(names).items() if count > 1)
            raise ValueError(f"blif.read: {twice[:60]} is twice among the {kind}.")
    ports = None
    for number, comment in comments:
        try:
            ports = _netlists.ports_from_text(comment, (inputs, outputs))
        except ValueError as error:
            raise _syntax_error(
                number, f"the comment with the ports does not fit: {error}"
            ) from None
    return network.circuit(inputs, [(name, 0) for name in outputs], (inputs, outputs), ports)


def _lines(text: str) -> Iterator[tuple[int, list[str], str]]:
    """Yield number, words and comment of each line; a trailing backslash continues a line."""
    words: list[str] = []
    start = None
    for number, line in enumerate(text.splitlines(), 1):
        line, _, comment = line.partition("#")
        line = line.rstrip()
        start = start or number
        if line.endswith("\\"):
            words += line[:-1].split()
            continue
        yield start, words + line.split(), comment.strip()
        words, start = [], None
    if words:
        yield start or 0, words, ""


def _read_cover(
    line: int, signals: Sequence[str], rows: Iterable[tuple[str, str]]
) -> tuple[list[tuple[int, int]], int]:
    """Return products as in `truth.cubes`, and 1 if they give output 0."""
    n, products, answers = len(signals) - 1, [], set()
    for row, answer in rows:
        if len(row) != n or set(row) - set("01-") or answer not in ("0", "1"):
            text = f"{row} {answer}".strip()
            what = f"the table of {signals[-1]} has the row {text!r}"
            raise _syntax_error(line, f"{what}; expected {n} of 0, 1 and -, a blank, and 0 or 1")
        answers.add(answer)
        read = sum(1 << i for i, c in enumerate(row) if c != "-")
        products.append((read, sum(1 << i for i, c in enumerate(row) if c == "1")))
    if len(answers) > 1:
        what = f"the table of {signals[-1]} has rows that answer 0 and rows that answer 1"
        raise _syntax_error(line, f"{what}; expected one kind")
    return products, int(answers == {"0"})


def _syntax_error(line: int, what: str) -> ValueError:
    return ValueError(f"blif.read: line {line}: {in_a_line(what)}.")
