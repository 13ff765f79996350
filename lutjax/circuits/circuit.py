"""A flat netlist of tables over bits."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import UInt64

from lutjax.circuits import truth


@dataclasses.dataclass(frozen=True)
class Format:
    """Fixed-point numbers of a port: a whole number of some bits, divided by a power of two.

    Attributes:
      bits: of a number; negative ones are in two's complement.
      fraction: bits after the point; the number is its whole number over ``2**fraction``.
      signed: whether the highest bit counts negative.

    Example:
      >>> from lutjax.circuits import Format
      >>> Format.parse("uint8"), Format.parse("fixed12.4")
      (Format(bits=8, fraction=0, signed=False), Format(bits=12, fraction=4, signed=True))
    """

    bits: int = 1
    fraction: int = 0
    signed: bool = False


@dataclasses.dataclass(frozen=True)
class Port:
    """Numbers that enter or leave a circuit side by side.

    Attributes:
      name: a word of letters, digits and underscores.
      count: numbers.
      format: of each; its bits lie lowest first, number after number.
    """

    name: str
    count: int = 1
    format: Format = Format()

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
      parts: names of runs of gates, in order, and how many gates each has: encoder, layers, votes, argmax.
      about: facts that pages and manifests show, all of JSON.
    """

    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    fanins: tuple[tuple[int, ...], ...]
    tables: tuple[int, ...]
    literals: tuple[int, ...]
    parts: tuple[tuple[str, int], ...] = ()
    about: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
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

    @functools.cached_property
    def levels(self) -> tuple[int, ...]:
        """Gates on the longest path to each node; 0 for the constant and inputs."""
        level = [0] * self.first_gate
        for nodes in self.fanins:
            level.append(1 + max((level[n] for n in nodes), default=-1))
        return tuple(level)

    @property
    def depth(self) -> int:
        """Gates on the longest path to an output."""
        return max((self.levels[literal >> 1] for literal in self.literals), default=0)

    def evaluate(self, words: UInt64[np.ndarray, "inputs words"]) -> UInt64[np.ndarray, "outputs words"]:
        """Return the bits of the outputs for 64 samples a word: bit j of word w is sample ``64 * w + j``."""
        ones = ~words.dtype.type(0)
        values = [np.zeros_like(words[0]), *words]
        for nodes, table in zip(self.fanins, self.tables, strict=True):
            values.append(truth.evaluate([values[n] for n in nodes], table, ones))
        return np.stack([values[k >> 1] ^ (ones if k & 1 else ones & 0) for k in self.literals])

    def to_html(self, title: str | None = None, **options: Any) -> str:
        """Return a page that runs the circuit in a browser; the options are those of `lutjax.circuits.page.to_html`."""
        from lutjax.circuits import page

        return page.to_html(self, title, **options)

    def to_dot(self, name: str = "circuit") -> str:
        """Return the circuit as text of Graphviz; see `lutjax.circuits.drawing.to_dot`."""
        from lutjax.circuits import drawing

        return drawing.to_dot(self, name)
