"""Pruning of automata to the gates that affect the learned result."""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Int

from lutjax.circuits import Circuit, simplify
from lutjax.circuits.circuit import alive_nodes
from lutjax.extras import require_optional
from lutjax.layers.specifications import truth_of
from lutjax.models import LogicCA, automaton
from lutjax.training.automaton import EVALUATION_BATCH, Run
from lutjax.training.automaton_config import N_BOARDS
from lutjax.training.circuits import INPUTS, live

with require_optional("lutjax.training.pruning"):
    from flax import nnx

CONSTANTS = (0, 15)  # gates without an input
_SEED = 3  # of random updates
_TOGETHER = 32  # changes tested in one call of a compiled program
_LARGEST_GROUP = 32  # initial size of the gate groups changed together

Gates = Int[np.ndarray, " gates"]


@dataclasses.dataclass(frozen=True)
class Pruned:
    """An automaton after gate removal."""

    # The same wires with other gates: constants, and gates that pass an input through
    model: LogicCA
    proved: bool  # True if the tested samples, on which results are unchanged, are exhaustive
    where: str  # description of the tested samples

    def rule(self, n_outputs: int) -> Circuit:
        """Return the circuit of one cell in two-input gates.

        Logic without influence on the first channels, over any number of steps, is removed.
        """
        return without_channels(self.model.with_update_rate(1).circuit(merge=2), n_outputs)


def prune_automaton(run: Run, model: LogicCA) -> Pruned:
    """Prune an automaton to as few gates as trials find, with unchanged target channels on samples.

    A gate is tried as a constant, then as one of its inputs: many gates at first, single ones if
    the last state changes. If a run starts from one state or learns all boards, the samples are
    exhaustive and the result is proved. Otherwise they are random grids.

    Args:
      run: defines initial states and the number of steps.
      model: the trained automaton.
    """
    samples, proved, where = _samples(run)
    channels = list(run.compared)
    key, n_steps = jax.random.key(_SEED), run.training.n_steps
    last = automaton.run_hard(run.config, model.gates(), model.wiring, samples, n_steps, key)
    expected = last[np.array(channels)]

    def live_of(gates: Gates) -> np.ndarray:
        return live(model, max(channels) + 1, gates)

    def make_smaller(gates: Gates) -> "_Smaller":
        return _Smaller(run, model, live_of(gates), samples, expected)

    gates_left = _remove_gates(np.asarray(model.gates()), live_of, make_smaller)
    logits = np.where(np.arange(16)[:, None] == gates_left, 1.0, 0.0).astype(np.float32)
    same_wires = nnx.clone(model)
    same_wires.logits.set_value(jnp.asarray(logits))
    return Pruned(same_wires, proved, where)


def _samples(run: Run) -> tuple[jax.Array, bool, str]:
    """Return first states (channels first), True if they are exhaustive, and a description."""
    training = run.training
    drawn = training.start == "random"
    n = N_BOARDS if run.target is None else EVALUATION_BATCH if drawn else 1
    first, _ = run.sample(jax.random.key(1), n)
    if run.target is None:
        return first, True, f"all {N_BOARDS} neighborhoods"
    where = f"{training.n_steps} steps of {training.size} x {training.size} cells"
    where += f" from {n} random states" if drawn else ""
    where += ", with random updates" if run.config.update_rate < 1 else ""
    return first, not drawn and run.config.update_rate == 1, where


class _Smaller:
    """Live layers of an automaton, used to test whether gate changes preserve the last state."""

    def __init__(
        self,
        run: Run,
        model: LogicCA,
        live: Bool[np.ndarray, " gates"],
        samples: jax.Array,
        expected: jax.Array,
    ):
        config, n_layers = run.config, len(run.config.perception)
        self.n_gates = int(live.sum())
        of_layers = [np.flatnonzero(ids) for ids in np.split(live, np.cumsum(config.sizes)[:-1])]
        of_layers[-1] = np.arange(config.channels)
        # An empty layer computes one unread gate instead, since programs need at least one.
        of_layers = [ids if len(ids) else np.zeros(1, int) for ids in of_layers]
        starts = np.cumsum([0, *config.sizes[:-1]])
        self._places = tuple(first + ids for first, ids in zip(starts, of_layers, strict=True))
        all_wires = [
            np.asarray(w) for w in (automaton.first_wires(config.kernels), *model.wiring.wires)
        ]
        wires = [all_wires[0][of_layers[0]]]
        for layer in range(1, len(all_wires)):
            before, n_before = of_layers[layer - 1], config.sizes[layer - 1]
            place = np.zeros(n_before, np.int32)  # removed gates are not read either
            place[before] = np.arange(len(before))
            if layer == n_layers:  # after the cell's channels, every kernel output has all channels
                of_channels = np.arange(config.channels, dtype=np.int32)
                outputs = config.channels * (1 + place[:, None]) + of_channels
                place = np.concatenate([of_channels, outputs.reshape(-1)])
            wires.append(place[all_wires[layer][of_layers[layer]]])
        target, n_steps = np.array(run.compared), run.training.n_steps

        def reaches_target(tables: tuple[jax.Array, ...]) -> jax.Array:
            last = automaton.run_tables(
                config, n_steps, samples, tables, tuple(wires), jax.random.key(_SEED)
            )
            answer: jax.Array = (last[target] == expected).all()
            return answer

        self._same = jax.jit(jax.vmap(reaches_target))

    def check_candidates(self, several: Sequence[Gates]) -> Bool[np.ndarray, " several"]:
        same: list[np.ndarray] = []
        for start in range(0, len(several), _TOGETHER):
            # Batches of one size share one program; the padding repeats the last candidate.
            part = np.stack(several[start : start + _TOGETHER])
            padded = np.pad(part, ((0, _TOGETHER - len(part)), (0, 0)), mode="edge")
            tables = tuple(
                jax.vmap(truth_of)(jnp.asarray(padded[:, at], jnp.int32)) for at in self._places
            )
            same.append(np.asarray(self._same(tables))[: len(part)])
        return np.concatenate(same)


def _remove_gates(
    gates: Gates, live_of: Callable[[Gates], np.ndarray], smaller: Callable[[Gates], _Smaller]
) -> Gates:
    """Replace as many gates as trials find by constants or by one of their inputs."""
    before, without = -1, smaller(gates)
    while before != (before := int((live_of(gates) & ~np.isin(gates, INPUTS)).sum())):
        for value in (*CONSTANTS, *INPUTS):
            if 2 * live_of(gates).sum() < without.n_gates:  # worth another compilation
                without = smaller(gates)
            size = _LARGEST_GROUP
            passed_on = INPUTS if value in INPUTS else ()
            untried = np.flatnonzero(live_of(gates) & ~np.isin(gates, (*CONSTANTS, *passed_on)))
            while len(untried) and size:
                groups = [untried[k : k + size] for k in range(0, len(untried), size)]
                may = without.check_candidates(
                    [_change_gates(gates, group, value) for group in groups]
                )
                good = [group for group, ok in zip(groups, may, strict=True) if ok]
                gates = _accept_groups(gates, good, value, without.check_candidates)
                untried, size = (
                    untried[(gates[untried] != value) & live_of(gates)[untried]],
                    size // 2,
                )
    return gates


def _change_gates(gates: Gates, group: np.ndarray, value: int) -> Gates:
    new = gates.copy()
    new[group] = value
    return new


def _accept_groups(
    gates: Gates,
    groups: Sequence[np.ndarray],
    value: int,
    tried: Callable[[Sequence[Gates]], np.ndarray],
) -> Gates:
    """Return gates with the groups changed that can be changed together."""
    if not groups:
        return gates
    together = _change_gates(gates, np.concatenate(groups), value)
    if tried([together])[0]:
        return together
    if len(groups) == 1:
        return gates
    # Groups that are harmless on their own may do harm together: add halves to what was accepted.
    half = len(groups) // 2
    return _accept_groups(
        _accept_groups(gates, groups[:half], value, tried), groups[half:], value, tried
    )


def without_channels(circuit: Circuit, n_outputs: int) -> Circuit:
    """Return a cell rule with 0 for channels that never influence the first ones."""
    channels, first = circuit.about["channels"], circuit.first_gate
    needed = np.arange(channels) < n_outputs
    before = -1
    while before != (before := int(needed.sum())):
        literals_needed = [circuit.literals[c] for c in np.flatnonzero(needed)]
        read = (
            np.frombuffer(alive_nodes(first, circuit.fanins, literals_needed), np.uint8)[1:first]
            == 1
        )
        needed |= read.reshape(-1, channels).any(0)
    literals = tuple(
        literal if c else 0 for literal, c in zip(circuit.literals, needed, strict=True)
    )
    return simplify(dataclasses.replace(circuit, literals=literals), merge=2)
