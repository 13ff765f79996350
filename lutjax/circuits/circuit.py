"""A flat netlist of tables over bits."""

import dataclasses
import functools
import itertools
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Shaped, UInt

from lutjax.circuits import _about, _evaluation, _names, truth
from lutjax.files._messages import in_a_line
from lutjax.ops._checks import describe

if TYPE_CHECKING:
    from lutjax.circuits import c, statistics

MOST_INPUTS = 1 << 24
"""Bits of all input ports of a circuit, so that a wrong digit in a file does not take the memory of the machine."""

_FORMAT = re.compile(r"(u?)(int|fixed)(\d{1,3})(?:\.(\d{1,3}))?", re.ASCII)


@dataclasses.dataclass(frozen=True)
class Format:
    """Fixed-point numbers of a port: a whole number of some bits, divided by a power of two.

    Attributes:
      bits: of a number, 1 to 64; negative ones are in two's complement.
      fraction: bits after the point; the number is its whole number over ``2**fraction``. At most `bits`, and only for
        numbers of at most 53 bits, which float64 holds.
      signed: whether the highest bit counts negative.

    Raises:
      ValueError: sizes beyond these.

    Example:
      >>> from lutjax.circuits import Format
      >>> Format.parse("uint8"), Format.parse("fixed12.4")
      (Format(bits=8, fraction=0, signed=False), Format(bits=12, fraction=4, signed=True))
    """

    bits: int = 1
    fraction: int = 0
    signed: bool = False

    def __post_init__(self) -> None:
        if type(self.bits) is not int or not 1 <= self.bits <= 64:
            raise ValueError(f"Format: bits is {self.bits!r}; it must be a whole number from 1 to 64.")
        if type(self.fraction) is not int or not 0 <= self.fraction <= self.bits:
            raise ValueError(
                f"Format: fraction is {self.fraction!r}; it must be a whole number from 0 to the {self.bits} bits."
            )
        if type(self.signed) is not bool:
            raise ValueError(f"Format: signed is {self.signed!r}; it must be True or False.")
        if self.fraction and self.bits > 53:
            raise ValueError(
                f"Format: bits is {self.bits} and fraction is {self.fraction}; numbers with a fraction have at most 53 bits, "
                "which float64 holds."
            )

    @classmethod
    def parse(cls, text: str) -> "Format":
        """Return the format of a name: ``uint8``, ``int12``, ``ufixed8.4`` or ``fixed12.4``.

        The first number counts all bits, the second those of the fraction.

        Raises:
          ValueError: any other name.

        Example:
          >>> from lutjax.circuits import Format
          >>> Format.parse("ufixed8.4").range
          (0.0, 15.9375)
        """
        match = _FORMAT.fullmatch(text) if isinstance(text, str) else None
        if match is None or (match[2] == "fixed") != (match[4] is not None):
            raise ValueError(
                f"Format.parse: text is {in_a_line(repr(text), 60)}; expected 'uint8' or 'int8', with any number of bits, or 'ufixed8.4' or "
                "'fixed8.4', with the bits in all and those of the fraction."
            )
        return cls(int(match[3]), int(match[4] or 0), signed=not match[1])

    def __str__(self) -> str:
        kind = ("" if self.signed else "u") + ("fixed" if self.fraction else "int")
        return f"{kind}{self.bits}" + (f".{self.fraction}" if self.fraction else "")

    @property
    def range(self) -> tuple[int | float, int | float]:
        """The least and the largest number; whole numbers where there is no fraction."""
        least, largest = self._whole_range
        if not self.fraction:
            return least, largest
        return least / 2**self.fraction, largest / 2**self.fraction

    @property
    def _whole_range(self) -> tuple[int, int]:
        return (-(1 << self.bits - 1), (1 << self.bits - 1) - 1) if self.signed else (0, (1 << self.bits) - 1)

    def encode(self, numbers: Shaped[np.ndarray, "..."]) -> UInt[np.ndarray, "..."]:
        """Return the bits of numbers, as whole numbers (uint64): negative ones in two's complement.

        Args:
          numbers: of any real dtype.

        Raises:
          TypeError: numbers of another dtype.
          ValueError: a number that the format does not have.

        Example:
          >>> import numpy as np
          >>> from lutjax.circuits import Format
          >>> Format.parse("fixed8.4").encode(np.array([0.5, -0.0625]))
          array([  8, 255], dtype=uint64)
        """
        numbers = np.asarray(numbers)
        if numbers.dtype.kind not in "buif":
            try:
                numbers = numbers.astype(np.float64, casting="safe")  # bfloat16 and the like
            except TypeError:
                raise TypeError(
                    f"Format.encode: numbers is {describe(numbers)}; expected integers, floating-point numbers or bool."
                ) from None
        least, largest = self._whole_range
        if numbers.dtype.kind == "f":
            wide = numbers if numbers.dtype.itemsize > 8 else numbers.astype(np.float64)
            with np.errstate(over="ignore", invalid="ignore"):
                whole = np.ldexp(wide, self.fraction)
                good = (np.floor(whole) == whole) & (whole >= float(least)) & (whole < float(largest + 1))
            whole = np.where(good, whole, 0)
            # A conversion of negative floats to uint64, or of large ones to int64, is undefined.
            codes = whole.astype(np.int64).view(np.uint64) if self.signed else whole.astype(np.uint64)
        else:
            if numbers.dtype.kind == "b":
                numbers = numbers.astype(np.uint8)
            low, high = -(-least >> self.fraction), largest >> self.fraction
            limits = np.iinfo(numbers.dtype)
            good = np.ones(numbers.shape, bool)
            if limits.min < low:
                good &= numbers >= low
            if limits.max > high:
                good &= numbers <= high
            codes = np.where(good, numbers, 0).astype(np.uint64) << np.uint64(self.fraction)
        if not good.all():
            at = tuple(int(i) for i in np.argwhere(~good)[0])
            first, last = self.range
            steps = f"multiples of 1/{2**self.fraction}" if self.fraction else "whole numbers"
            raise ValueError(
                f"Format.encode: numbers[{', '.join(map(str, at))}] is {numbers[at]}; {self} has {steps} from {first} to "
                f"{last}. Round and clip the numbers first, or choose another format."
            )
        return codes & np.uint64((1 << self.bits) - 1)

    def decode(self, codes: UInt[np.ndarray, "..."]) -> Shaped[np.ndarray, "..."]:
        """Return the numbers of bits, the reverse of `encode`.

        Returns:
          int64; uint64 for 64 unsigned bits, float64 where there is a fraction.

        Example:
          >>> import numpy as np
          >>> from lutjax.circuits import Format
          >>> Format.parse("fixed8.4").decode(np.array([8, 255], np.uint64))
          array([ 0.5   , -0.0625])
        """
        codes = np.asarray(codes).astype(np.uint64)
        if self.bits == 64 and not self.signed:
            return codes
        whole = codes.astype(np.int64)
        if self.signed:
            unread = 64 - self.bits
            whole = whole << unread >> unread
        return np.ldexp(whole.astype(np.float64), -self.fraction) if self.fraction else whole


@dataclasses.dataclass(frozen=True)
class Port:
    """Numbers that enter or leave a circuit side by side.

    Attributes:
      name: a word of letters, digits and underscores, that is a keyword of neither Verilog, VHDL nor C.
      count: numbers, at least 1.
      format: of each; its bits lie lowest first, number after number.

    Raises:
      ValueError: another name or count.
    """

    name: str
    count: int = 1
    format: Format = Format()

    def __post_init__(self) -> None:
        if why := _names.why_not(self.name):
            raise ValueError(f"Port: name is {in_a_line(repr(self.name), 60)}; {why}.")
        if type(self.count) is not int or self.count < 1:
            raise ValueError(f"Port: count is {self.count!r}; it must be a whole number of at least 1.")
        if not isinstance(self.format, Format):
            raise TypeError(
                f"Port: format is {self.format!r}; expected a Format. Format.parse makes one from 'uint8' and the like."
            )

    @property
    def n_bits(self) -> int:
        """Bits of all numbers."""
        return self.count * self.format.bits


@dataclasses.dataclass(frozen=True, eq=False)
class Circuit:
    """Gates in topological order, each a table over the values of nodes before it.

    Node 0 is the constant 0, nodes 1 to `n_inputs` are the bits of the input ports, and the others are gates. A literal is
    ``2 * node``, and one more where the value is inverted.

    Attributes:
      inputs, outputs: the ports.
      fanins: for each gate the nodes that it reads, at most 8.
      tables: for each gate a whole number whose bit k is the answer at address k; the first fan-in is the lowest bit of
        the address, as in `lutjax.packed_lut`.
      literals: the bits of the output ports.
      parts: names of runs of gates, in order, and how many gates each has: encoder, layers, votes, argmax. Without any, all
        gates are one part.
      about: facts that pages and manifests show, all of JSON. Those that are read are compared with the ports and gates:
        `kind` ("classifier", "automaton" or another), `n_classes`, `classes` and `input_names` (of each class, and of each number of the
        input ports), `image`, `channels`, `periodic`, `start`, `shown`, `rule`, `vote_gates`.

    Raises:
      TypeError, ValueError: fields that make no circuit; the message says which gate or fact.

    Example:
      >>> from lutjax.circuits import Circuit, Port
      >>> half_adder = Circuit(
      ...     inputs=(Port("a"), Port("b")),
      ...     outputs=(Port("sum"), Port("carry")),
      ...     fanins=((1, 2), (1, 2)),
      ...     tables=(0b0110, 0b1000),
      ...     literals=(2 * 3, 2 * 4),
      ... )
      >>> half_adder([0, 1, 1], [0, 0, 1])
      (array([0, 1, 0]), array([0, 0, 1]))
    """

    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    fanins: tuple[tuple[int, ...], ...]
    tables: tuple[int, ...]
    literals: tuple[int, ...]
    parts: tuple[tuple[str, int], ...] = ()
    about: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("inputs", "outputs", "tables", "literals"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        object.__setattr__(self, "fanins", tuple(map(tuple, self.fanins)))
        parts = tuple((name, count) for name, count in self.parts)
        object.__setattr__(self, "parts", parts or ((("gates", len(self.tables)),) if self.tables else ()))
        _check_ports(self.inputs, self.outputs)
        if self.n_inputs > MOST_INPUTS:
            raise ValueError(
                f"Circuit: the input ports have {self.n_inputs} bits; a circuit has at most {MOST_INPUTS}."
            )
        _check_gates(self.first_gate, self.fanins, self.tables)
        _check_rest(self)
        _about.check(self)

    @functools.cached_property
    def n_inputs(self) -> int:
        """Bits of all input ports."""
        return sum(port.n_bits for port in self.inputs)

    @property
    def n_outputs(self) -> int:
        """Bits of all output ports."""
        return len(self.literals)

    @property
    def first_gate(self) -> int:
        """Node of the first gate."""
        return 1 + self.n_inputs

    def __len__(self) -> int:
        """Return the number of gates."""
        return len(self.tables)

    def __eq__(self, other: object) -> bool:
        """Return whether another circuit has the same ports, gates, parts and facts, in the same order."""
        if not isinstance(other, Circuit):
            return NotImplemented
        return self._compared == other._compared and dict(self.about) == dict(other.about)

    def __hash__(self) -> int:
        return self._hash

    @property
    def _compared(self) -> tuple[Any, ...]:
        return self.inputs, self.outputs, self.tables, self.literals, self.fanins, self.parts

    @functools.cached_property
    def _hash(self) -> int:
        return hash(self._compared)

    def __repr__(self) -> str:
        ports = [
            ", ".join(f"{port.name}: {port.count} x {port.format}" for port in ports)
            for ports in (self.inputs, self.outputs)
        ]
        return f"Circuit({ports[0] or 'nothing'} -> {ports[1] or 'nothing'}; {len(self)} gates)"

    @functools.cached_property
    def levels(self) -> tuple[int, ...]:
        """Gates on the longest path to each node; 0 for the constant, inputs and gates that read nothing."""
        level = [0] * self.first_gate
        append = level.append
        for nodes in self.fanins:
            append(1 + max([level[n] for n in nodes], default=-1))
        return tuple(level)

    @property
    def depth(self) -> int:
        """Gates on the longest path to an output."""
        return max((self.levels[literal >> 1] for literal in self.literals), default=0)

    @functools.cached_property
    def part_ranges(self) -> dict[str, range]:
        """Ranges of the gates of each part, counted from 0; the node of gate g is ``first_gate + g``."""
        ends = list(itertools.accumulate(count for _, count in self.parts))
        return {name: range(end - count, end) for (name, count), end in zip(self.parts, ends, strict=True)}

    def evaluate(self, words: UInt[np.ndarray, "inputs words"]) -> UInt[np.ndarray, "outputs words"]:
        """Return the bits of the outputs for many samples a word: with uint64, bit j of word w is sample ``64 * w + j``.

        Args:
          words: for each bit of the input ports the samples, of any unsigned dtype.

        Returns:
          For each bit of the output ports the samples, of the same dtype.

        Raises:
          ValueError, TypeError: a wrong shape or dtype.
        """
        words = np.asarray(words)
        if words.dtype.kind != "u":
            raise TypeError(
                f"Circuit.evaluate: words is {describe(words)}; its dtype must be unsigned, as uint64."
            )
        if words.ndim != 2 or len(words) != self.n_inputs:
            raise ValueError(
                f"Circuit.evaluate: words is {describe(words)}; expected shape [{self.n_inputs}, words], a row for each bit "
                "of the inputs."
            )
        return self._plan.run(words)

    @functools.cached_property
    def _plan(self) -> "_evaluation.Plan":
        return _evaluation.Plan(self.n_inputs, self.fanins, self.tables, self.literals, self.levels)

    def __call__(self, *numbers: Any) -> Any:
        """Return the numbers of the output ports for numbers of the input ports.

        Args:
          *numbers: for each input port an array ``[samples, count]``, or ``[samples]`` where its count is 1; or for each port the numbers of one sample,
            ``[count]``, or a number where its count is 1. Numbers that the format of the port does not have are an error: round and clip them first.

        Returns:
          For each output port an array ``[samples, count]``, or ``[samples]`` where its count is 1, in a tuple unless there is
          one output port: int64, or float64 where the format has a fraction. Of one sample without the axis of samples.

        Raises:
          ValueError, TypeError: a wrong number of arrays, a wrong shape or dtype, numbers that a format does not have.
        """
        if len(numbers) == len(self.inputs):
            arrays = [np.asarray(given) for given in numbers]
            if arrays and all(a.ndim == (p.count > 1) for a, p in zip(arrays, self.inputs, strict=True)):
                found = self(*(a[None] for a in arrays))
                return tuple(a[0] for a in found) if isinstance(found, tuple) else found[0]
        words, n_samples = self.encode(*numbers)
        return self.decode(self.evaluate(words), n_samples)

    def encode(self, *numbers: Any) -> tuple[UInt[np.ndarray, "inputs words"], int]:
        """Return the words that `evaluate` takes for numbers of the input ports, and the number of samples.

        Args, Raises: as of a call.
        """
        if len(numbers) != len(self.inputs):
            names = ", ".join(port.name for port in self.inputs)
            raise TypeError(
                f"Circuit: {len(numbers)} arrays are given; expected {len(self.inputs)}, for the ports {names or 'of none'}."
            )
        if not numbers:
            raise TypeError("Circuit: there is no input port, so no number of samples; call evaluate.")
        bits = [_encode(port, given) for port, given in zip(self.inputs, numbers, strict=True)]
        n_samples = {b.shape[1] for b in bits}
        if len(n_samples) > 1:
            raise ValueError(
                f"Circuit: the arrays have {sorted(n_samples)} samples; expected the same number."
            )
        return _pack(np.concatenate(bits)), n_samples.pop()

    def decode(self, words: UInt[np.ndarray, "outputs words"], n_samples: int) -> Any:
        """Return the numbers of the output ports for words that `evaluate` returned, of uint64; see a call."""
        found = _unpack(words, n_samples)
        rows = np.cumsum([0] + [port.n_bits for port in self.outputs])
        results = tuple(
            _decode(port, found[start:end])
            for port, start, end in zip(self.outputs, rows[:-1], rows[1:], strict=True)
        )
        return results[0] if len(results) == 1 else results

    def simplify(self, *, merge: int = 3) -> "Circuit":
        """Return a circuit that computes the same with fewer gates; see `Builder`.

        Args:
          merge: gates may have so many inputs where that saves a gate, 2 to 8: 2 for two-input gates, 3 for instructions
            of three operands, 6 for FPGAs.
        """
        from lutjax.circuits import builder

        return builder.rebuild(self, builder.Builder(merge=merge))

    def tabulated(self) -> "Circuit":
        """Return a circuit made anew from the answers to all inputs, or this one if it has fewer AND nodes.

        For the rule of an automaton and other functions of few inputs: training finds any circuit for a rule, and this one
        does not depend on which. All its gates are one part.

        Raises:
          ValueError: more than 14 inputs.

        Example:
          >>> from lutjax.circuits import Builder
          >>> builder = Builder(simplify=False)
          >>> (a,), (b,) = builder.input("x", 2)
          >>> long_way = builder.gate([builder.gate([a, b], 0b1000), builder.gate([a, b], 0b0010)], 0b1110)
          >>> builder.output("y", [[long_way]])
          >>> len(builder.circuit()), len(builder.circuit().tabulated())
          (3, 0)
        """
        from lutjax.circuits import _tabulation

        if self.n_inputs > _tabulation.MAX_INPUTS:
            raise ValueError(
                f"Circuit.tabulated: the circuit has {self.n_inputs} inputs; it tries all of them, for at most "
                f"{_tabulation.MAX_INPUTS}. Call simplify."
            )
        return _tabulation.tabulated(self)

    def stats(self, *, lut6: bool = True) -> "statistics.Stats":
        """Return counts of gates, AND nodes, levels, fan-out, parts and classes.

        Args:
          lut6: whether to map the circuit to look-up tables of 6 inputs, where pyosys is installed.
        """
        from lutjax.circuits import statistics

        return statistics.of(self, lut6=lut6)

    # ---------------------------------------------------------------------------- formats, each in a module of its own
    def to_c(self, name: str = "circuit", *, style: "c.Style" = "auto") -> dict[str, str]:
        """Return the circuit as C99: the texts of its files by name; see `lutjax.circuits.c.to_c`."""
        from lutjax.circuits import c

        return c.to_c(self, name, style=style)

    def to_html(self, title: str | None = None, **options: Any) -> str:
        """Return a page that runs the circuit in a browser; the options are those of `lutjax.circuits.page.to_html`."""
        from lutjax.circuits import page

        return page.to_html(self, title, **options)

    def to_dot(self, name: str = "circuit") -> str:
        """Return the circuit as text of Graphviz; see `lutjax.circuits.drawing.to_dot`."""
        from lutjax.circuits import drawing

        return drawing.to_dot(self, name)

    def to_verilog(self, name: str = "circuit", *, registers: int = 0) -> str:
        """Return a module of Verilog-2001; see `lutjax.circuits.verilog`."""
        from lutjax.circuits import verilog

        return verilog.to_verilog(self, name, registers=registers)

    def to_blif(self, name: str = "circuit") -> str:
        """Return BLIF; see `lutjax.circuits.blif`."""
        from lutjax.circuits import blif

        return blif.to_blif(self, name)

    def to_aiger(self, *, binary: bool = True) -> bytes:
        """Return AIGER, binary or ASCII; see `lutjax.circuits.aiger`."""
        from lutjax.circuits import aiger

        return aiger.to_aiger(self, binary=binary)

    def to_json(self) -> str:
        """Return JSON, from which `from_json` makes the same circuit; see `lutjax.circuits.netlist_json`."""
        from lutjax.circuits import netlist_json

        return netlist_json.to_json(self)


def _check_ports(inputs: Sequence[Port], outputs: Sequence[Port]) -> None:
    seen: dict[str, str] = {}
    for name, ports in (("inputs", inputs), ("outputs", outputs)):
        for port in ports:
            if not isinstance(port, Port):
                raise TypeError(f"Circuit: {name} has {port!r}; expected ports.")
            if other := seen.get(port.name.lower()):
                raise ValueError(
                    f"Circuit: two ports are named {other!r} and {port.name!r}; names must differ, and in more than capitals."
                )
            seen[port.name.lower()] = port.name


def _check_gates(first: int, fanins: tuple[tuple[int, ...], ...], tables: tuple[int, ...]) -> None:
    if len(fanins) != len(tables):
        raise ValueError(
            f"Circuit: there are {len(fanins)} fanins and {len(tables)} tables; every gate has one of each."
        )
    # Checks of all gates at once; only where one fails, its gate is looked for.
    sizes = np.fromiter(map(len, fanins), np.int64, len(fanins))
    if sizes.max(initial=0) > truth.MAX_INPUTS:
        gate = int(sizes.argmax())
        raise ValueError(
            f"Circuit: gate {gate} reads {sizes[gate]} nodes; a gate reads at most {truth.MAX_INPUTS}."
        )
    for kind in (set(map(type, itertools.chain.from_iterable(fanins))) | set(map(type, tables))) - {int}:
        raise TypeError(
            f"Circuit: fanins and tables have a {kind.__name__}; expected whole numbers (int) of Python."
        )
    nodes = np.array(
        [n if -1 <= n < 1 << 62 else -1 for n in itertools.chain.from_iterable(fanins)], dtype=np.int64
    )
    reader = np.repeat(np.arange(len(fanins)), sizes)
    wrong = (nodes < 0) | (nodes >= first + reader)
    if wrong.any():
        gate = int(reader[wrong.argmax()])
        raise ValueError(
            f"Circuit: gate {gate}, node {first + gate}, reads nodes {fanins[gate]}; it may read nodes from 0 to "
            f"{first + gate - 1}. Give the gates in an order in which each comes after what it reads."
        )
    limits = [1 << (1 << n) for n in range(truth.MAX_INPUTS + 1)]
    for gate, (table, n) in enumerate(zip(tables, sizes.tolist(), strict=True)):
        if not 0 <= table < limits[n]:
            raise ValueError(
                f"Circuit: the table of gate {gate} is {table}; over {n} inputs it must be from 0 to 2**{1 << n} - 1."
            )


def _check_rest(circuit: Circuit) -> None:
    bits = sum(port.n_bits for port in circuit.outputs)
    if len(circuit.literals) != bits:
        raise ValueError(
            f"Circuit: there are {len(circuit.literals)} literals; the output ports have {bits} bits."
        )
    end = 2 * (circuit.first_gate + len(circuit))
    for k, literal in enumerate(circuit.literals):
        if type(literal) is not int or not 0 <= literal < end:
            raise ValueError(
                f"Circuit: literal {k} is {literal!r}; it must be a whole number (int) from 0 to {end - 1}: 2 * node, and "
                "one more where the value is inverted."
            )
    names = [name for name, _ in circuit.parts]
    counts = [count for _, count in circuit.parts]
    if not all(_is_text(name) for name in names) or len(set(names)) < len(names):
        raise ValueError(f"Circuit: parts have the names {names}; expected different, non-empty strings.")
    if any(type(count) is not int or count < 0 for count in counts) or sum(counts) != len(circuit):
        raise ValueError(
            f"Circuit: parts have {counts} gates; expected whole numbers whose sum is the {len(circuit)} gates of the circuit."
        )


def _is_text(name: Any) -> bool:
    """Return whether a name is some characters that files can hold, without those of half a surrogate pair."""
    return isinstance(name, str) and bool(name) and not re.search("[\ud800-\udfff]", name)


def _encode(port: Port, given: Any) -> np.ndarray:
    """Numbers ``[samples, count]`` of a port as bits ``[count * bits, samples]``."""
    numbers = np.asarray(given)
    if numbers.ndim == 1 and port.count == 1:
        numbers = numbers[:, None]
    if numbers.ndim != 2 or numbers.shape[1] != port.count:
        alone = " or [samples]" if port.count == 1 else ""
        raise ValueError(
            f"Circuit: {port.name} is {describe(np.asarray(given))}; expected shape [samples, {port.count}]{alone}."
        )
    codes = port.format.encode(numbers).T  # [count, samples]
    bits = codes[:, None] >> np.arange(port.format.bits, dtype=np.uint64)[:, None] & np.uint64(1)
    return bits.astype(np.uint8).reshape(port.n_bits, -1)


def _decode(port: Port, bits: np.ndarray) -> np.ndarray:
    """Bits ``[count * bits, samples]`` as numbers ``[samples, count]``, or ``[samples]`` of one."""
    bits = bits.reshape(port.count, port.format.bits, bits.shape[1])
    codes = np.zeros((port.count, bits.shape[2]), np.uint64)
    for k in range(port.format.bits):
        codes |= bits[:, k].astype(np.uint64) << np.uint64(k)
    numbers = port.format.decode(codes.T)
    return numbers[:, 0] if port.count == 1 else numbers


def _pack(bits: np.ndarray) -> np.ndarray:
    """Samples of uint8 0 and 1 ``[rows, samples]`` as uint64 ``[rows, words]``, whatever the byte order of the machine."""
    octets = np.packbits(bits, axis=1, bitorder="little")
    octets = np.pad(octets, ((0, 0), (0, -octets.shape[1] % 8)))
    return np.ascontiguousarray(octets).view("<u8").astype(np.uint64)


def _unpack(words: np.ndarray, n_samples: int) -> np.ndarray:
    """The reverse of `_pack`."""
    octets = np.ascontiguousarray(words.astype("<u8")).view(np.uint8)
    return np.unpackbits(octets, axis=1, count=n_samples, bitorder="little")
