"""A flat netlist of tables over bits."""

import dataclasses
import functools
import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import UInt

from lutjax.circuits import _about, _evaluation, truth
from lutjax.circuits.ports import Port
from lutjax.ops import describe

MOST_INPUTS = 1 << 24
"""Bits of all input ports of a circuit, so that a wrong digit in a file does not take the memory of the machine."""


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
        _about.check(self.about, self.inputs, self.outputs, self.part_ranges)

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
            numbers_of(port, found[start:end])
            for port, start, end in zip(self.outputs, rows[:-1], rows[1:], strict=True)
        )
        return results[0] if len(results) == 1 else results


def evaluated(circuit: Circuit, inputs: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
    """Return the numbers ``[samples, count]`` of each output port, as the evaluator in NumPy finds them."""
    numbers = [x[:, 0] if port.count == 1 else x for port, x in zip(circuit.inputs, inputs, strict=True)]
    return by_port(circuit, circuit(*numbers))


def by_port(circuit: Circuit, found: Any) -> dict[str, np.ndarray]:
    """Return what a call of a circuit returned as numbers ``[samples, count]`` of each output port."""
    outputs = found if isinstance(found, tuple) else (found,)
    return {port.name: y.reshape(len(y), -1) for port, y in zip(circuit.outputs, outputs, strict=True)}


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


def alive(first: int, fanins: Sequence[Sequence[int]], literals: Sequence[int]) -> bytearray:
    """Return for each gate, the first of which is the node `first`, whether one of these literals depends on it."""
    return alive_nodes(first, fanins, literals)[first:]


def alive_nodes(first: int, fanins: Sequence[Sequence[int]], literals: Sequence[int]) -> bytearray:
    """Return for each node, the constant and the inputs included, whether one of these literals depends on it; see `alive`."""
    found = bytearray(first + len(fanins))
    for literal in literals:
        found[literal >> 1] = 1
    for gate in range(len(fanins) - 1, -1, -1):
        if found[first + gate]:
            for node in fanins[gate]:
                found[node] = 1
    return found


def numbers_of(port: Port, bits: np.ndarray) -> np.ndarray:
    """Return bits ``[count * bits, samples]`` as numbers ``[samples, count]``, or ``[samples]`` of one."""
    bits = bits.reshape(port.count, port.format.bits, bits.shape[1])
    codes = np.zeros((port.count, bits.shape[2]), np.uint64)
    for k in range(port.format.bits):
        codes |= bits[:, k].astype(np.uint64) << np.uint64(k)
    numbers = port.format.decode(codes.T)
    return numbers[:, 0] if port.count == 1 else numbers


def _pack(bits: np.ndarray) -> np.ndarray:
    """Return samples of uint8 0 and 1 ``[rows, samples]`` as uint64 ``[rows, words]``, whatever the byte order of the machine."""
    octets = np.packbits(bits, axis=1, bitorder="little")
    octets = np.pad(octets, ((0, 0), (0, -octets.shape[1] % 8)))
    return np.ascontiguousarray(octets).view("<u8").astype(np.uint64)


def _unpack(words: np.ndarray, n_samples: int) -> np.ndarray:
    """Return the reverse of `_pack`."""
    octets = np.ascontiguousarray(words.astype("<u8")).view(np.uint8)
    return np.unpackbits(octets, axis=1, count=n_samples, bitorder="little")


def gate_counts(circuit: Circuit) -> dict[str, int]:
    """Return how many gates compute each part of a circuit; the counts add up to all its gates.

    The report, page and board files of an export take their numbers of gates from here.

    Args:
      circuit: any.

    Returns:
      Gates by part, in the order of the circuit: ``"encoder"``, ``"layers"`` (all layers together), ``"votes"``, ``"argmax"``, or other names.

    Example:
      >>> from flax import nnx
      >>> from lutjax.circuits import statistics
      >>> from lutjax.models import LogicClassifier, LogicClassifierConfig
      >>> config = LogicClassifierConfig(in_features=4, n_classes=2, layers=(8, 8), n_thresholds=0)
      >>> circuit = LogicClassifier(config, rngs=nnx.Rngs(0)).circuit()
      >>> counts = statistics.gate_counts(circuit)
      >>> list(counts), sum(counts.values()) == len(circuit)
      (['layers', 'votes', 'argmax'], True)
    """
    found: dict[str, int] = {}
    for name, count in circuit.parts:
        name = "layers" if name.startswith("layer ") else name
        found[name] = found.get(name, 0) + count
    return found


def gates_in_words(circuit: Circuit) -> str:
    """Return the number of gates of a circuit and of its parts in words, such as ``"9 gates (layers 4, votes 5)"``."""
    counts = gate_counts(circuit)
    total = f"{len(circuit):,} gate{'' if len(circuit) == 1 else 's'}"
    parts = ", ".join(f"{name} {count:,}" for name, count in counts.items())
    return f"{total} ({parts})" if len(counts) > 1 else total
