"""Compiled cellular automaton rules on 32-cell words."""

import dataclasses
import functools
import operator

import jax
import jax.numpy as jnp
from jaxtyping import Shaped, UInt32

from lutjax.arguments import require_array
from lutjax.circuits import Circuit
from lutjax.circuits.gate_operations import operations
from lutjax.models._automaton_words import pack_bits, shift_words, unpack_bits
from lutjax.values import Array


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class PackedAutomaton:
    """Cellular automaton rule compiled into one XLA program on 32-cell words.

    A `LogicCA` reads its gates from arrays, so training never recompiles. Here the gates are part
    of the program: larger grids run faster, but a rule with thousands of gates takes long to
    compile. Each step updates all cells.

    Args:
      circuit: rule for one cell, such as ``LogicCA.circuit()``, or ``pruned.json`` read by
        `lutjax.circuits.netlist_json`.

    Raises:
      ValueError: the circuit is not an automaton rule.

    Source: docs/logic.md, section 5.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from lutjax.models import LogicCA, LogicCAConfig, PackedAutomaton
      >>> config = LogicCAConfig(channels=2, kernels=2, perception=(8, 2), update=(8, 2))
      >>> model = LogicCA(config, rngs=nnx.Rngs(0))
      >>> state = jnp.zeros((64, 100, 2), bool).at[32, 50].set(True)
      >>> after = PackedAutomaton(model.circuit())(state, 10)
      >>> bool((after == model(state, 10, deterministic=True)).all())
      True
    """

    circuit: Circuit
    periodic: bool = dataclasses.field(init=False)
    """True for a toroidal grid, as the circuit records it; circuit equality compares gates."""

    def __post_init__(self) -> None:
        if self.circuit.about.get("kind") != "automaton":
            raise ValueError(
                f"PackedAutomaton: circuit is of kind {self.circuit.about.get('kind')!r}; expected "
                "an automaton rule from LogicCA.circuit."
            )
        object.__setattr__(self, "periodic", bool(self.circuit.about.get("periodic")))

    def __call__(
        self, state: Shaped[Array, "*batch height width channels"], n_steps: int = 1
    ) -> Shaped[jax.Array, "*batch height width channels"]:
        """Return the state after `n_steps` steps, in the same dtype; nonzero values count as 1.

        Raises:
          ValueError: the number of channels differs, or n_steps is negative.
        """
        require_array("PackedAutomaton", "state", state)
        channels = self.circuit.n_outputs
        if state.ndim < 3 or state.shape[-1] != channels:
            raise ValueError(
                f"PackedAutomaton: state has shape {list(state.shape)}; "
                f"expected [..., height, width, {channels}]."
            )
        bits = jnp.moveaxis(jnp.asarray(state).astype(bool), -1, 0)
        words = self.steps(pack_bits(bits), state.shape[-2], n_steps)
        return jnp.moveaxis(unpack_bits(words, state.shape[-2]), 0, -1).astype(state.dtype)

    def steps(
        self, words: UInt32[Array, "channels *batch height words"], width: int, n_steps: int = 1
    ) -> UInt32[jax.Array, "channels *batch height words"]:
        """Return the state after `n_steps` steps without unpacking words: for large grids.

        Args:
          words: bit j of word w is column ``32 w + j``; bits beyond the row are 0, as in
            `lutjax.pack_bits`.
          width: number of columns.
          n_steps: number of steps.

        Raises:
          ValueError: the number of words does not match the width, or n_steps is negative.
        """
        channels, n_words = self.circuit.n_outputs, -(-width // 32)
        if words.ndim < 3 or (words.shape[0], words.shape[-1]) != (channels, n_words):
            raise ValueError(
                f"PackedAutomaton: words has shape {list(words.shape)}; "
                f"expected [{channels}, ..., height, {n_words}] for {width} columns."
            )
        if operator.index(n_steps) < 0:
            raise ValueError(f"PackedAutomaton: n_steps is {n_steps}; it must not be negative.")
        return _steps(self, jnp.asarray(words), width, operator.index(n_steps))


@functools.partial(jax.jit, static_argnums=(2, 3))
def _steps(rule: PackedAutomaton, words: jax.Array, width: int, n_steps: int) -> jax.Array:
    first = words.reshape(len(words), -1, *words.shape[-2:])
    # Bits beyond the last column must stay 0: the next step would shift them in as neighbors.
    valid = pack_bits(jnp.ones((1, 1, 1, width), bool))

    def step(words: jax.Array, _: None) -> tuple[jax.Array, None]:
        near = [*shift_words(words, width, periodic=rule.periodic), words]
        return _answers(rule.circuit, [bits for place in near for bits in place]) & valid, None

    last: jax.Array = jax.lax.scan(step, first, None, length=n_steps)[0]
    return last.reshape(words.shape)


def _answers(circuit: Circuit, bits: list[jax.Array]) -> jax.Array:
    program = operations(circuit)
    values: list[jax.Array] = [jnp.zeros_like(bits[0]), *bits]
    for nodes, table in zip(program.fanins, program.tables, strict=True):
        values.append(_gate(table, [values[node] for node in nodes]))
    return jnp.stack([~values[k >> 1] if k & 1 else values[k >> 1] for k in program.literals])


def _gate(table: int, inputs: list[jax.Array]) -> jax.Array:
    """Evaluate a non-constant table; the first input is the lowest address bit."""
    # Shannon expansion by the last input, with the cheapest operation for special halves.
    *rest, last = inputs
    ones = (1 << (1 << len(rest))) - 1
    low, high = table & ones, table >> (1 << len(rest))  # for last input 0 and 1
    if low == high:
        return _gate(low, rest)
    if low == ones - high:
        return last ^ _gate(low, rest) if 0 < low < ones else last if high else ~last
    if low in (0, ones):
        return last & _gate(high, rest) if low == 0 else ~last | _gate(high, rest)
    if high in (0, ones):
        return ~last & _gate(low, rest) if high == 0 else last | _gate(low, rest)
    return ~last & _gate(low, rest) | last & _gate(high, rest)
