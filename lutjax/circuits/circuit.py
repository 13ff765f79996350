"""Flat netlist of bit-level lookup tables."""

import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from jaxtyping import UInt

from lutjax.circuits import _about, _evaluation, columns, truth
from lutjax.circuits._about import circuit_error
from lutjax.circuits.ports import Port, bit_ranges
from lutjax.ops import describe

T = TypeVar("T")

MOST_INPUTS = 1 << 24
"""Maximum input bits of a circuit, so that a wrong digit in a file cannot exhaust host memory."""


@dataclasses.dataclass(frozen=True, eq=False)
class Circuit:
    """Gates in topological order, each a table over earlier node values.

    Node 0 is the constant 0, nodes 1 to `n_inputs` are the input port bits, and all later nodes
    are gates. A literal is ``2 * node``, plus one if the value is inverted.

    Attributes:
      inputs, outputs: ports.
      fanins: input nodes for each gate, at most 8.
      tables: an integer for each gate. Bit k is the output at address k, and the first fan-in is
        the lowest address bit, as in `lutjax.packed_lut`.
      literals: output port bits.
      parts: names and gate counts for consecutive gate runs, in order: encoder, layers, votes,
        argmax. If empty, all gates form one part.
      about: JSON facts for pages and manifests. Known facts are validated against the ports and
        gates: `kind` ("classifier", "automaton" or another kind), `n_classes`, `classes` (a name
        for each class), `input_names` (a name for each input port element), `image`, `channels`,
        `periodic`, `start`, `shown`, `rule`, `vote_gates`.

    Raises:
      TypeError, ValueError: fields do not form a circuit; the message names the gate or fact.

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
        # Tuples, also of lists from files: circuits are values that can be compared and hashed.
        for name in ("inputs", "outputs", "tables", "literals"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        object.__setattr__(self, "fanins", tuple(map(tuple, self.fanins)))
        parts = tuple((name, count) for name, count in self.parts)
        object.__setattr__(
            self, "parts", parts or ((("gates", len(self.tables)),) if self.tables else ())
        )
        _check_ports(self.inputs, self.outputs)
        if self.n_inputs > MOST_INPUTS:
            raise circuit_error(
                f"there are {self.n_inputs} input bits; at most {MOST_INPUTS} are supported."
            )
        _check_gates(self.first_gate, self.fanins, self.tables)
        _check_rest(self)
        _about.check(self.about, self.inputs, self.outputs, self.part_ranges)

    @functools.cached_property
    def n_inputs(self) -> int:
        """Total bits in the input ports."""
        return sum(port.n_bits for port in self.inputs)

    @property
    def n_outputs(self) -> int:
        """Total bits in the output ports."""
        return len(self.literals)

    @property
    def first_gate(self) -> int:
        """Node of the first gate."""
        return 1 + self.n_inputs

    def __len__(self) -> int:
        """Return the number of gates."""
        return len(self.tables)

    def __eq__(self, other: object) -> bool:
        """Return True if the ports, gates, parts and facts are equal, in the same order."""
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
        # Facts may hold lists, which have no hash: circuits that differ only in facts share one.
        return hash(self._compared)

    def __repr__(self) -> str:
        ports = [
            ", ".join(f"{port.name}: {port.count} x {port.format}" for port in ports)
            for ports in (self.inputs, self.outputs)
        ]
        return f"Circuit({ports[0] or 'nothing'} -> {ports[1] or 'nothing'}; {len(self)} gates)"

    @functools.cached_property
    def levels(self) -> tuple[int, ...]:
        """Longest path to each node, in gates.

        It is 0 for the constant, inputs and gates without inputs.
        """
        levels = walk(
            self.fanins, self.tables, [0] * self.first_gate, lambda k, _: 1 + max(k, default=-1)
        )
        return tuple(levels)

    @property
    def depth(self) -> int:
        """Longest path to an output, in gates."""
        return max((self.levels[literal >> 1] for literal in self.literals), default=0)

    @functools.cached_property
    def part_ranges(self) -> dict[str, range]:
        """Gate range for each part, counted from 0; gate g is node ``first_gate + g``."""
        ends = list(itertools.accumulate(count for _, count in self.parts))
        return {
            name: range(end - count, end)
            for (name, count), end in zip(self.parts, ends, strict=True)
        }

    def evaluate(
        self, words: UInt[np.ndarray, "inputs words"]
    ) -> UInt[np.ndarray, "outputs words"]:
        """Return the output bits for packed samples.

        In uint64, bit j of word w is sample ``64 * w + j``.

        Args:
          words: packed samples for each input port bit, in any unsigned dtype.

        Returns:
          Packed samples for each output port bit, in the same dtype.

        Raises:
          ValueError, TypeError: wrong shape or dtype.
        """
        words = np.asarray(words)
        if words.dtype.kind != "u":
            raise TypeError(
                f"Circuit.evaluate: words is {describe(words)}; expected an unsigned dtype."
            )
        if words.ndim != 2 or len(words) != self.n_inputs:
            raise ValueError(
                f"Circuit.evaluate: words is {describe(words)}; "
                f"expected shape [{self.n_inputs}, words], a row for each bit of the inputs."
            )
        return self._plan.run(words)

    @functools.cached_property
    def _plan(self) -> "_evaluation.Plan":
        return _evaluation.Plan(self.n_inputs, self.fanins, self.tables, self.literals, self.levels)

    def __call__(self, *numbers: Any) -> Any:
        """Return the output port values for the given input port values.

        Args:
          *numbers: for each input port, an array ``[samples, count]``, or ``[samples]`` if its
            count is 1. For one sample, ``[count]`` for each port, or a scalar if its count is 1.
            Values must be representable in the port format: round and clip them first.

        Returns:
          For each output port, an array ``[samples, count]``, or ``[samples]`` if its count is 1;
          a tuple if there are several output ports. The dtype is int64, or float64 if the format
          has a fraction. One sample has no sample axis.

        Raises:
          ValueError, TypeError: wrong number of arrays, wrong shape or dtype, or values not
            representable in the format.
        """
        if len(numbers) == len(self.inputs):
            arrays = [np.asarray(array) for array in numbers]
            # One sample without a batch axis is evaluated as a batch of one.
            ranks = (port.count > 1 for port in self.inputs)
            if arrays and all(a.ndim == rank for a, rank in zip(arrays, ranks, strict=True)):
                outputs = self(*(a[None] for a in arrays))
                return tuple(a[0] for a in outputs) if isinstance(outputs, tuple) else outputs[0]
        words, n_samples = self.encode(*numbers)
        return self.decode(self.evaluate(words), n_samples)

    def encode(self, *numbers: Any) -> tuple[UInt[np.ndarray, "inputs words"], int]:
        """Return the packed `evaluate` inputs for input port values, and the number of samples.

        Args, Raises: as `__call__`.
        """
        if len(numbers) != len(self.inputs):
            names = ", ".join(port.name for port in self.inputs)
            raise TypeError(
                f"Circuit: {len(numbers)} arrays are given; the ports are {names or 'none'}."
            )
        if not numbers:
            raise TypeError(
                "Circuit: there is no input port, so no number of samples; call evaluate."
            )
        bits = [_encode(port, array) for port, array in zip(self.inputs, numbers, strict=True)]
        n_samples = {b.shape[1] for b in bits}
        if len(n_samples) > 1:
            raise circuit_error(
                f"the arrays have {sorted(n_samples)} samples; expected the same number."
            )
        octets = np.packbits(np.concatenate(bits), axis=1, bitorder="little")
        # Whole words of eight octets, the lowest first, whatever the byte order of the machine.
        octets = np.pad(octets, ((0, 0), (0, -octets.shape[1] % 8)))
        return np.ascontiguousarray(octets).view("<u8").astype(np.uint64), n_samples.pop()

    def decode(self, words: UInt[np.ndarray, "outputs words"], n_samples: int) -> Any:
        """Return the output port values for the uint64 words from `evaluate`; see `__call__`."""
        octets = np.ascontiguousarray(words.astype("<u8")).view(np.uint8)
        bits_of_outputs = np.unpackbits(octets, axis=1, count=n_samples, bitorder="little")
        results = tuple(
            numbers_of(port, bits_of_outputs[bits]) for port, bits in bit_ranges(self.outputs)
        )
        return results[0] if len(results) == 1 else results


def walk(
    fanins: Iterable[Sequence[int]],
    tables: Iterable[int],
    values: Iterable[T],
    gate: Callable[[list[T], int], T],
) -> list[T]:
    """Return a value for each node: `values`, then `gate` of fan-in values and table."""
    values_by_node = list(values)
    for nodes, table in zip(fanins, tables, strict=True):
        values_by_node.append(gate([values_by_node[n] for n in nodes], table))
    return values_by_node


def walk_literals(
    circuit: Circuit, values: Iterable[int], gate: Callable[[list[int], int], int]
) -> list[int]:
    """Return a literal for each output; see `walk`. Node values are also literals."""
    literals = walk(circuit.fanins, circuit.tables, values, gate)
    return [literals[literal >> 1] ^ literal & 1 for literal in circuit.literals]


def columns_of(circuit: Circuit) -> columns.Columns | None:
    """Return the columns of a circuit, or None if it does not take table rows."""
    return columns.circuit_columns(circuit.about, circuit.inputs)


def evaluate_ports(circuit: Circuit, inputs: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
    """Return the values ``[samples, count]`` for each output port, computed in NumPy."""
    numbers = [
        x[:, 0] if port.count == 1 else x for port, x in zip(circuit.inputs, inputs, strict=True)
    ]
    return group_by_port(circuit, circuit(*numbers))


def group_by_port(circuit: Circuit, answers: Any) -> dict[str, np.ndarray]:
    """Return the result from a circuit call as values ``[samples, count]`` by output port."""
    outputs = answers if isinstance(answers, tuple) else (answers,)
    return {
        port.name: y.reshape(len(y), -1) for port, y in zip(circuit.outputs, outputs, strict=True)
    }


def _check_ports(inputs: Sequence[Port], outputs: Sequence[Port]) -> None:
    seen: dict[str, str] = {}
    for name, ports in (("inputs", inputs), ("outputs", outputs)):
        for port in ports:
            if not isinstance(port, Port):
                raise TypeError(f"Circuit: {name} has {port!r}; expected ports.")
            if other := seen.get(port.name.lower()):
                raise circuit_error(f"port names {other!r} and {port.name!r} differ only in case.")
            seen[port.name.lower()] = port.name


def _check_gates(first: int, fanins: tuple[tuple[int, ...], ...], tables: tuple[int, ...]) -> None:
    if len(fanins) != len(tables):
        raise circuit_error(
            f"there are {len(fanins)} fanins and {len(tables)} tables; expected one each."
        )
    # Vectorized checks of all gates; the failing gate is searched for only on failure.
    sizes = np.fromiter(map(len, fanins), np.int64, len(fanins))
    if sizes.max(initial=0) > truth.MAX_INPUTS:
        gate = int(sizes.argmax())
        raise circuit_error(
            f"gate {gate} has {sizes[gate]} inputs; expected at most {truth.MAX_INPUTS}."
        )
    kinds = set(map(type, itertools.chain.from_iterable(fanins))) | set(map(type, tables))
    # Not `isinstance`: NumPy integers would overflow in tables of many bits.
    for kind in kinds - {int}:
        raise TypeError(f"Circuit: fanins and tables have a {kind.__name__}; expected Python ints.")
    # Numbers beyond int64 become -1, which is as wrong.
    nodes = np.array(
        [n if -1 <= n < 1 << 62 else -1 for n in itertools.chain.from_iterable(fanins)],
        dtype=np.int64,
    )
    reader = np.repeat(np.arange(len(fanins)), sizes)
    wrong = (nodes < 0) | (nodes >= first + reader)
    if wrong.any():
        gate = int(reader[wrong.argmax()])
        raise circuit_error(
            f"gate {gate}, node {first + gate}, has the fan-ins {fanins[gate]}; "
            f"expected nodes from 0 to {first + gate - 1}. Sort the gates topologically."
        )
    limits = [1 << (1 << n) for n in range(truth.MAX_INPUTS + 1)]
    for gate, (table, n) in enumerate(zip(tables, sizes.tolist(), strict=True)):
        if not 0 <= table < limits[n]:
            raise circuit_error(
                f"the table of gate {gate} is {table}; expected 0 to 2**{1 << n} - 1."
            )


def _check_rest(circuit: Circuit) -> None:
    bits = sum(port.n_bits for port in circuit.outputs)
    if len(circuit.literals) != bits:
        raise circuit_error(
            f"there are {len(circuit.literals)} literals; the output ports have {bits} bits."
        )
    end = 2 * (circuit.first_gate + len(circuit))
    for k, literal in enumerate(circuit.literals):
        if type(literal) is not int or not 0 <= literal < end:
            raise circuit_error(
                f"literal {k} is {literal!r}; expected an int from 0 to {end - 1}: 2 * node, plus "
                "one if the value is inverted."
            )
    names = [name for name, _ in circuit.parts]
    counts = [count for _, count in circuit.parts]
    # A file cannot hold lone surrogates.
    words = [
        name
        for name in names
        if isinstance(name, str) and name and not re.search("[\ud800-\udfff]", name)
    ]
    if len(set(words)) < len(names):
        raise circuit_error(f"parts have the names {names}; expected different, non-empty strings.")
    if any(type(count) is not int or count < 0 for count in counts) or sum(counts) != len(circuit):
        raise circuit_error(
            f"parts have {counts} gates; expected integers that sum to {len(circuit)}."
        )


def _encode(port: Port, values: Any) -> np.ndarray:
    """Convert port values ``[samples, count]`` to bits ``[count * bits, samples]``."""
    numbers = np.asarray(values)
    if numbers.ndim == 1 and port.count == 1:
        numbers = numbers[:, None]
    if numbers.ndim != 2 or numbers.shape[1] != port.count:
        alone = " or [samples]" if port.count == 1 else ""
        raise circuit_error(
            f"{port.name} is {describe(np.asarray(values))}; "
            f"expected shape [samples, {port.count}]{alone}."
        )
    codes = port.format.encode(numbers).T  # [count, samples]
    bits = codes[:, None] >> np.arange(port.format.bits, dtype=np.uint64)[:, None] & np.uint64(1)
    return bits.astype(np.uint8).reshape(port.n_bits, -1)


def alive_gates(first: int, fanins: Sequence[Sequence[int]], literals: Sequence[int]) -> bytearray:
    """Flag the gates required by the literals, where `first` is the first gate node."""
    return alive_nodes(first, fanins, literals)[first:]


def alive_nodes(first: int, fanins: Sequence[Sequence[int]], literals: Sequence[int]) -> bytearray:
    """Flag the nodes required by the literals, with the constant and inputs; see `alive_gates`."""
    is_alive = bytearray(first + len(fanins))
    for literal in literals:
        is_alive[literal >> 1] = 1
    # Readers come before their fan-ins in this order, so one pass is enough.
    for gate in range(len(fanins) - 1, -1, -1):
        if is_alive[first + gate]:
            for node in fanins[gate]:
                is_alive[node] = 1
    return is_alive


def numbers_of(port: Port, bits: np.ndarray) -> np.ndarray:
    """Convert bits ``[count * bits, samples]`` to values ``[samples, count]``, or ``[samples]``."""
    bits = bits.reshape(port.count, port.format.bits, bits.shape[1])
    codes = np.zeros((port.count, bits.shape[2]), np.uint64)
    for k in range(port.format.bits):
        codes |= bits[:, k].astype(np.uint64) << np.uint64(k)
    numbers = port.format.decode(codes.T)
    return numbers[:, 0] if port.count == 1 else numbers


def gate_counts(circuit: Circuit) -> dict[str, int]:
    """Return the number of gates by part, all layers together, for reports and pages."""
    counts: dict[str, int] = {}
    for name, count in circuit.parts:
        name = "layers" if name.startswith("layer ") else name
        counts[name] = counts.get(name, 0) + count
    return counts


def gates_in_words(circuit: Circuit) -> str:
    """Return the gate counts as text, such as ``"9 gates (layers 4, votes 5)"``."""
    counts = gate_counts(circuit)
    total = f"{len(circuit):,} gate{'' if len(circuit) == 1 else 's'}"
    parts = ", ".join(f"{name} {count:,}" for name, count in counts.items())
    return f"{total} ({parts})" if len(counts) > 1 else total
