"""Circuits as ASCII and binary AIGER, and back."""

import os
from collections.abc import Iterator

from lutjax.circuits import _netlists
from lutjax.circuits.ands import and_graph
from lutjax.circuits.circuit import Circuit
from lutjax.files import atomic

_PORTS = b"lutjax ports "  # start of the ports comment
_INPUTS = 1 << 16  # maximum inputs without names in the binary form


def write(circuit: Circuit, *, binary: bool = True) -> bytes:
    """Return a circuit as AIGER: AND nodes and inverters.

    Port bits are named ``x[3]`` in the symbol table. A comment keeps the port formats for `read`.

    Args:
      circuit: the circuit.
      binary: whether to use the compact form (``aig``), readable by ABC, or the ASCII form
        (``aag``).

    Example:
      >>> from lutjax.circuits import Circuit, Port, aiger
      >>> either = Circuit((Port("x", 2),), (Port("y"),), ((1, 2),), (0b1110,), (2 * 3,))
      >>> print(aiger.write(either, binary=False).decode())  # doctest: +ELLIPSIS
      aag 3 2 0 1 1
      2
      4
      7
      6 5 3
      i0 x[0]
      i1 x[1]
      o0 y[0]
      c
      lutjax ports ...
    """
    ands, outputs = and_graph(circuit)
    n = circuit.n_inputs
    head = f"{'aig' if binary else 'aag'} {n + len(ands)} {n} 0 {len(outputs)} {len(ands)}\n"
    lines = [] if binary else [f"{2 * k}\n" for k in range(1, n + 1)]
    lines += [f"{literal}\n" for literal in outputs]
    if binary:
        # Nodes are in order, so differences are small, and most take one octet each.
        deltas = (delta for k, (a, b) in enumerate(ands, n + 1) for delta in (2 * k - a, a - b))
        body = b"".join(map(_netlists.varint, deltas))
    else:
        body = "".join(f"{2 * k} {a} {b}\n" for k, (a, b) in enumerate(ands, n + 1)).encode()
    symbols = [f"i{k} {name}\n" for k, name in enumerate(_netlists.bit_names(circuit.inputs))]
    symbols += [f"o{k} {name}\n" for k, name in enumerate(_netlists.bit_names(circuit.outputs))]
    comment = b"c\n" + _PORTS + _netlists.ports_to_text(circuit).encode() + b"\n"
    return (head + "".join(lines)).encode() + body + "".join(symbols).encode() + comment


def read(data: bytes | os.PathLike[str]) -> Circuit:
    """Return the circuit in an AIGER file of either form, given its bytes or path.

    Each AND node becomes a gate. Symbol names such as ``x[3]`` are grouped into ports; without
    names the ports are ``x`` and ``y``. It takes at most 500 times the memory of the file, because
    a binary node may take only two bytes.

    Raises:
      TypeError: text instead of bytes.
      ValueError: a damaged file, a file with latches, properties or constraints, or a ports
        comment that contradicts the file. The message gives the location.
    """
    content = atomic.content(data)
    if not isinstance(content, bytes | bytearray):
        raise TypeError(
            f"aiger.read: data is a {type(content).__name__}; expected bytes or a pathlib.Path."
        )
    file = _File(bytes(content))
    binary, top, n_inputs, n_outputs, n_ands = _header(file)
    if binary:
        inputs = list(range(2, 2 * n_inputs + 2, 2))
    else:
        inputs = [_literals(file, f"input {k}", 1, top)[0] for k in range(n_inputs)]
    outputs = [_literals(file, f"output {k}", 1, top)[0] for k in range(n_outputs)]
    if binary:
        ands = list(_binary_ands(file, 2 * (n_inputs + 1), n_ands))
    else:
        ands = [_literals(file, f"AND {k}", 3, top) for k in range(n_ands)]
    names, ports = _symbols(file, n_inputs, n_outputs)
    network = _netlists.Network("aiger.read", "variable ")
    network.add(0, (), (), 0, "the constant")
    for k, literal in enumerate(inputs):
        if literal & 1 or literal < 2:
            raise _error(f"input {k} is the literal {literal}; expected an even one of at least 2.")
    for k, (literal, a, b) in enumerate(ands):
        if literal & 1 or literal < 2:
            what = f"AND {k} defines the literal {literal}"
            raise _error(f"{what}; expected an even one of at least 2.")
        product = 0b11, (~a & 1) | (~b & 1) << 1
        network.add(literal >> 1, (a >> 1, b >> 1), (product,), 0, f"AND {k}")
    return network.circuit(
        [literal >> 1 for literal in inputs],
        [(literal >> 1, literal & 1) for literal in outputs],
        names,
        ports,
    )


def _error(text: str) -> ValueError:
    return ValueError(f"aiger.read: {text}")


class _File:
    def __init__(self, data: bytes):
        self.data, self.at = data, 0

    def line(self, what: str) -> str:
        end = self.data.find(b"\n", self.at)
        if end < 0:
            raise _error(f"the file ends before {what}; is it complete?")
        line = self.data[self.at : end]
        self.at = end + 1
        try:
            return line.decode().removesuffix("\r")
        except UnicodeDecodeError:
            raise _error(f"{what} is {line[:40]!r}; expected text.") from None

    def number(self, what: str) -> int:
        """Read a binary number: 7-bit groups, the lowest first."""
        number = shift = 0
        while True:
            if self.at >= len(self.data):
                raise _error(f"the file ends in {what}; is it complete?")
            octet = self.data[self.at]
            self.at += 1
            number |= (octet & 127) << shift
            if octet < 128:
                return number
            shift += 7
            if shift > 63:
                raise _error(f"{what} has a number of more than 64 bits; is the file damaged?")


def _header(file: _File) -> tuple[bool, int, int, int, int]:
    """Return the binary flag, maximum variable, and input, output and AND node counts."""
    line = file.line("its header")
    words = line.split(" ")
    is_header = words[0] in ("aig", "aag") and 6 <= len(words) <= 10
    if not is_header or not all(map(_is_number, words[1:])):
        raise _error(
            f"the header is {line[:60]!r}; expected 'aig' or 'aag', "
            "and M I L O A after single spaces."
        )
    top, n_inputs, n_latches, n_outputs, n_ands, *rest = map(int, words[1:])
    if n_latches:
        raise _error(
            f"the file has {n_latches} latches; a circuit here is combinational (in ABC, "
            "`comb` makes their inputs and outputs ports)."
        )
    if any(rest):
        raise _error(
            f"the header is {line!r}; properties and constraints (B C J F) are unsupported."
        )
    binary = words[0] == "aig"
    if top < n_inputs + n_ands or (binary and top > n_inputs + n_ands):
        raise _error(
            f"the header has {top} variables; inputs and AND nodes need {n_inputs + n_ands}."
        )
    # Inputs take no octets, unlike all other elements, so a short file could name billions of them.
    if binary and n_inputs > max(_INPUTS, len(file.data)):
        raise _error(
            f"the header says {n_inputs} inputs; a file of {len(file.data)} octets has at most "
            f"{max(_INPUTS, len(file.data))}."
        )
    return binary, top, n_inputs, n_outputs, n_ands


def _is_number(word: str) -> bool:
    return word.isascii() and word.isdigit() and len(word) <= 18


def _literals(file: _File, what: str, count: int, top: int) -> list[int]:
    line = file.line(what)
    words = line.split(" ")
    if len(words) != count or not all(map(_is_number, words)):
        expected = "a literal" if count == 1 else f"{count} literals"
        raise _error(f"{what} is {line[:60]!r}; expected {expected}.")
    literals = [int(word) for word in words]
    if max(literals) > 2 * top + 1:
        raise _error(
            f"{what} is {line[:60]!r}; with {top} variables literals go up to {2 * top + 1}."
        )
    return literals


def _binary_ands(file: _File, literal: int, count: int) -> Iterator[list[int]]:
    for k in range(count):
        what = f"AND {k}"
        larger = literal - file.number(what)
        smaller = larger - file.number(what)
        if not 0 <= smaller <= larger < literal:
            raise _error(
                f"{what} reads {larger} and {smaller}; expected literals from 0 to {literal - 1}."
            )
        yield [literal, larger, smaller]
        literal += 2


def _symbols(
    file: _File, n_inputs: int, n_outputs: int
) -> tuple[tuple[list[str], list[str]], _netlists.Ports | None]:
    """Return the input and output names, and ports from a lutjax comment if present."""
    names = [f"x[{k}]" for k in range(n_inputs)], [f"y[{k}]" for k in range(n_outputs)]
    while file.at < len(file.data):
        line = file.line("the end of a line of the symbol table")
        if line == "c":
            for comment in file.data[file.at :].splitlines():
                if comment.startswith(_PORTS + b"["):
                    try:
                        text = comment.removeprefix(_PORTS).decode()
                        return names, _netlists.ports_from_text(text, names)
                    except ValueError as error:
                        raise _error(f"the comment with the ports does not fit: {error}.") from None
            break
        place, _, name = line.partition(" ")
        kind, number = "io".find(place[:1]), place[1:]
        is_place = kind >= 0 and place and _is_number(number)
        if not is_place or int(number) >= len(names[kind]) or not name:
            raise _error(
                f"the symbol table has {line[:60]!r}; expected i or o, "
                "the number of an input or output, a blank and a name."
            )
        names[kind][int(number)] = name
    return names, None
