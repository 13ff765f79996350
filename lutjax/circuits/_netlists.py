"""Circuits from named signal networks in netlist files: named ports, and gates in any order."""

import functools
import itertools
import json
import re
from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple

from lutjax.circuits import _names, netlist_json, truth
from lutjax.circuits.circuit import Circuit
from lutjax.circuits.ports import Port
from lutjax.files import strict_json
from lutjax.files.messages import in_a_line
from lutjax.files.strict_json import format_value

Signal = Hashable
Product = tuple[int, int]  # input mask, and value mask
Ports = tuple[tuple[Port, ...], tuple[Port, ...]]
_BIT = re.compile(r"(.+)\[(\d{1,9})\]", re.ASCII | re.DOTALL)


def bit_names(ports: Sequence[Port]) -> list[str]:
    """Return the names of all port bits, such as ``x[3]``."""
    return [f"{port.name}[{k}]" for port in ports for k in range(port.n_bits)]


def varint(number: int) -> bytes:
    """Encode a number in 7-bit groups, the lowest first; all bytes but the last have bit 7 set."""
    data = bytearray()
    while number > 127:
        data.append(number & 127 | 128)
        number >>= 7
    data.append(number)
    return bytes(data)


def ports_to_text(circuit: Circuit) -> str:
    ports = [netlist_json.ports_to_json(some) for some in (circuit.inputs, circuit.outputs)]
    return json.dumps(ports, separators=(",", ":"))


def ports_from_text(text: str, names: tuple[Sequence[str], Sequence[str]]) -> Ports:
    """Parse `ports_to_text` for a file with these input and output names, or raise ValueError."""
    stored = strict_json.loads(text)
    if not isinstance(stored, list) or len(stored) != 2:
        raise ValueError(
            f"it is {format_value(stored)}; expected the ports of inputs and those of outputs"
        )
    inputs, outputs = (
        tuple(netlist_json.ports_from_json(some, kind))
        for some, kind in zip(stored, ("inputs", "outputs"), strict=True)
    )
    kinds = (("inputs", inputs, names[0]), ("outputs", outputs, names[1]))
    for kind, ports, file_names in kinds:
        n_bits = sum(port.n_bits for port in ports)
        if n_bits != len(file_names):
            n = len(file_names)
            raise ValueError(f"its {kind} have {n_bits} bits; the file has {n} {kind}")
        others = sorted(set(bit_names(ports)) ^ set(file_names))
        if others:
            raise ValueError(
                f"its {kind} have other names than the file's, such as {others[0][:60]!r}"
            )
    return inputs, outputs


def ports_of(names: Sequence[str], taken: dict[str, int]) -> tuple[tuple[Port, ...], list[int]]:
    """Return ports for bit names, and the name index of each port bit.

    Names in `taken` are unavailable, each with its next suffix; new names are added.
    """
    groups: dict[str, dict[int, int]] = {}  # name -> bit -> index
    for place, name in enumerate(names):
        match = _BIT.fullmatch(name)
        base, bit = (match[1], int(match[2])) if match else (name, 0)
        if bit in groups.get(base, {}):  # x in addition to x[0]
            base, bit = f"{name} {place}", 0
        groups.setdefault(base, {})[bit] = place
    ports: list[Port] = []
    places: list[int] = []
    # Bits from 0 on become one port. With a gap, each bit is a port of its own.
    for base, bits in groups.items():
        if set(bits) == set(range(len(bits))):
            vectors = [(base, [bits[k] for k in range(len(bits))])]
        else:
            vectors = [(f"{base}_{k}", [bits[k]]) for k in sorted(bits)]
        for name, vector in vectors:
            ports.append(Port(_word(name, taken), len(vector)))
            places += vector
    return tuple(ports), places


def _word(name: str, taken: dict[str, int]) -> str:
    word = candidate = re.sub(r"\W", "_", name, flags=re.ASCII)
    if not re.match(r"[A-Za-z_]", word):
        word = candidate = "n" + word
    while candidate in taken or _names.explain_bad_port(candidate):
        # `taken` keeps the next suffix of a word, so that many equal names take linear time.
        number = taken.setdefault(word, 0)
        taken[word] += 1
        candidate = f"{word}_{number}"
    taken[candidate] = 0
    return candidate


class _Driver(NamedTuple):
    reads: Sequence[Signal]
    products: Sequence[Product]
    inverted: int
    where: str


class Network:
    """Signals and their drivers, in any order.

    Errors begin with `caller` and put `noun` before signals.
    """

    def __init__(self, caller: str, noun: str = ""):
        self.caller, self.noun = caller, noun
        self.drivers: dict[Signal, _Driver] = {}

    def add(
        self,
        signal: Signal,
        reads: Sequence[Signal],
        products: Sequence[Product],
        inverted: int,
        where: str,
    ) -> None:
        if signal in self.drivers:
            what = f"has a second driver, after {self.drivers[signal].where}"
            raise self._signal_error(where, signal, what)
        self.drivers[signal] = _Driver(reads, products, inverted, where)

    def circuit(
        self,
        inputs: Sequence[Signal],
        outputs: Sequence[tuple[Signal, int]],
        names: tuple[Sequence[str], Sequence[str]],
        ports: Ports | None,
    ) -> Circuit:
        """Return the circuit of all signals; output signals come with their inversion.

        Without `ports`, which may order the bits differently, names are grouped into ports.
        """
        literals: dict[Signal, int] = {}
        if ports is None:
            taken: dict[str, int] = {}
            (in_ports, in_places), (out_ports, out_places) = (
                ports_of(names_of_kind, taken) for names_of_kind in names
            )
        else:
            in_ports, out_ports = ports
            in_places, out_places = (
                _places_of(bit_names(some), names_of_kind)
                for some, names_of_kind in zip(ports, names, strict=True)
            )
        for k, place in enumerate(in_places, 1):
            signal = inputs[place]
            if signal in literals:
                raise self._signal_error("the inputs", signal, "is an input twice")
            if signal in self.drivers:
                raise self._signal_error(
                    self.drivers[signal].where, signal, "is driven, but it is an input"
                )
            literals[signal] = 2 * k
        gates = _Gates(len(in_places))
        for signal in self._in_order([signal for signal, _ in outputs], literals):
            reads, products, inverted, _ = self.drivers[signal]
            literals[signal] = gates.sum([literals[name] for name in reads], products) ^ inverted
        out_literals = [literals[outputs[place][0]] ^ outputs[place][1] for place in out_places]
        return Circuit(
            in_ports, out_ports, tuple(gates.fanins), tuple(gates.tables), tuple(out_literals)
        )

    def _in_order(self, outputs: Sequence[Signal], known: Iterable[Signal]) -> list[Signal]:
        """Return all driven signals in topological order."""
        order: list[Signal] = []
        # False while the fan-ins of a signal are visited, which detects cycles.
        done = dict.fromkeys(known, True)
        # A stack instead of recursion, because netlists are deeper than Python recurses. All
        # drivers are visited, also unread ones, so that their errors are found.
        for root in itertools.chain(self.drivers, outputs):
            stack = [(root, "the outputs")]
            while stack:
                signal, reader = stack[-1]
                if signal not in done:
                    if signal not in self.drivers:
                        raise self._signal_error(
                            reader, signal, "is read, but it has no driver and is no input"
                        )
                    done[signal] = False
                    where = self.drivers[signal].where
                    for name in self.drivers[signal].reads:
                        if not done.get(name, True):
                            raise self._signal_error(
                                where, signal, f"is in a loop with {self.noun}{name}"
                            )
                        if name not in done:
                            stack.append((name, where))
                    continue
                if not done[signal]:
                    done[signal] = True
                    order.append(signal)
                stack.pop()
        return order

    def _signal_error(self, where: str, signal: Signal, what: str) -> ValueError:
        return ValueError(f"{self.caller}: {where}: {in_a_line(f'{self.noun}{signal} {what}')}.")


def _places_of(bits: Sequence[str], names: Sequence[str]) -> list[int]:
    place = {name: k for k, name in enumerate(names)}
    return [place[bit] for bit in bits]


class _Gates:
    """Gates under construction: constants, buffers and inverters become literals."""

    def __init__(self, n_inputs: int):
        self.n_inputs = n_inputs
        self.fanins: list[tuple[int, ...]] = []
        self.tables: list[int] = []

    def sum(self, literals: list[int], products: Sequence[Product]) -> int:
        n = len(literals)
        # A wider table, as synthesis tools write, becomes trees of gates.
        if n <= truth.MAX_INPUTS:
            return self._gate(literals, _table(tuple(products), n))
        terms = [
            self._conjunction([literals[i] ^ (~values >> i & 1) for i in range(n) if read >> i & 1])
            for read, values in products
        ]
        return self._conjunction([term ^ 1 for term in terms]) ^ 1

    def _gate(self, literals: list[int], table: int) -> int:
        n, table = len(literals), truth.negate_inverted(table, literals)
        if table in (0, truth.FULL[n]):
            return int(table != 0)
        if n == 1:
            return literals[0] & ~1 | (table == 0b01)
        self.fanins.append(tuple(literal >> 1 for literal in literals))
        self.tables.append(table)
        return 2 * (self.n_inputs + len(self.tables))

    def _conjunction(self, literals: list[int]) -> int:
        """Build a tree of gates with at most 8 inputs."""
        while len(literals) > 1:
            groups = [
                literals[k : k + truth.MAX_INPUTS]
                for k in range(0, len(literals), truth.MAX_INPUTS)
            ]
            literals = [self._gate(group, 1 << (1 << len(group)) - 1) for group in groups]
        return literals[0] if literals else 1


@functools.lru_cache(maxsize=1 << 16)
def _table(products: tuple[Product, ...], n: int) -> int:
    """Return the table for a sum of products, the inverse of `truth.cubes`."""
    table = 0
    for read, values in products:
        product = truth.FULL[n]
        for i in range(n):
            if read >> i & 1:
                product &= truth.variable(n, i) if values >> i & 1 else truth.LOW[n][i]
        table |= product
    return table
