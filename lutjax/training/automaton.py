"""Configuration and training step for a `LogicCA`; `lutjax.training.loop` has the loop."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Bool

import lutjax
from lutjax.extras import require_optional
from lutjax.models import LogicCA, LogicCAConfig, automaton
from lutjax.training import hosts, meshes, models, runs
from lutjax.training.automaton_config import N_BOARDS, TrainingConfig as TrainingConfig
from lutjax.training.models import ModelRun, State, Structure
from lutjax.values import Array

with require_optional(__name__):
    import optax


T = TypeVar("T")

EVALUATION_BATCH = 16
_SMOOTHING = 0.9


@dataclasses.dataclass
class Record(runs.Record):
    """Non-array checkpoint contents.

    `target` has rows per pattern channel as strings with 0 and 1, or is None in the Game of Life.
    """

    kind: ClassVar[str] = "ca"

    model: LogicCAConfig
    training: TrainingConfig
    target: list[list[str]] | None
    options: dict[str, Any]
    history: runs.History


class Optimizer(NamedTuple):
    """Optimizer state, and the best hard automaton (by a running mean if starts are random)."""

    adam: Any
    best: Any
    best_loss: Array
    running: Array


class Run(ModelRun[LogicCA]):
    """Automata and their training procedure, without the trained arrays.

    With several automata, all state arrays have a leading run axis.

    Args:
      model: model sizes.
      training: all other run configuration.
      target: target bits for the first channels; None for the Game of Life.

    Raises:
      ValueError: the target does not fit the model or the grid, or is missing.
    """

    def __init__(
        self,
        model: LogicCAConfig,
        training: TrainingConfig,
        target: Bool[np.ndarray, "channels height width"] | None,
    ):
        if (target is None) != (training.start == "boards"):
            rule = "give the bits to draw"
            if target is not None:
                rule = "the Game of Life has no target"
            raise ValueError(f"target is {target} and start is {training.start!r}: {rule}.")
        if target is None:
            if not model.periodic or model.update_rate != 1:
                raise ValueError(
                    "periodic and update_rate must be True and 1 to learn the Game of Life."
                )
        elif target.shape[1:] != (training.size, training.size) or len(target) > model.channels:
            raise ValueError(
                f"the target has shape {list(target.shape)}; the grid has {training.size} rows and "
                f"columns and {model.channels} channels."
            )
        n_shown = 1 if target is None else len(target)
        if max(training.loss_channels, default=0) >= n_shown:
            raise ValueError(
                f"loss_channels is {training.loss_channels}; "
                f"target channels are 0 to {n_shown - 1}."
            )
        self.config, self.training, self.target = model, training, target
        adamw = optax.adamw(
            training.learning_rate, b1=0.9, b2=0.99, weight_decay=training.weight_decay
        )
        self.optimizer = optax.chain(optax.clip(training.clip), adamw)
        structure = Structure(lambda rngs: LogicCA(model, rngs=rngs))
        # One torus contains all boards of the Game of Life.
        samples = 1 if target is None and training.batch_size >= N_BOARDS else training.batch_size
        super().__init__(structure, self._initialize_optimizer, training.seed, samples)
        self._place_on_mesh(None)
        self._wrong = jax.jit(
            lambda best, others: self._map_runs(self._count_wrong_bits, best, others)
        )

    def divide(self, asked: Mapping[str, int] | None = None) -> None:
        """Shard the batch over devices and replicate the few gates; see `ModelRun.divide`."""
        if asked is not None and asked.get(meshes.DETECTORS, 1) > 1:
            raise ValueError(
                f"mesh has {meshes.DETECTORS}={asked[meshes.DETECTORS]}; automaton gates are "
                f"replicated. Give only {meshes.DATA}."
            )
        if self.training.runs > 1:
            if asked is not None and math.prod(asked.values()) > 1:
                raise ValueError(
                    f"runs is {self.training.runs}; a mesh divides a single run. Use runs=1."
                )
            if hosts.count() > 1:
                raise ValueError(
                    f"runs is {self.training.runs}; {hosts.count()} processes share a single run. "
                    "Use runs=1."
                )
            return
        super().divide(asked)

    def _map_runs(self, function: Callable[..., T], *trees: Any) -> T:
        """Apply a function to a seed and trees of arrays, mapped over runs if there are several."""
        seeds = range(self.training.seed, self.training.seed + self.training.runs)
        keys = jnp.stack([jax.random.key(seed) for seed in seeds])
        if self.training.runs == 1:
            return function(keys[0], *trees)
        # A GPU has enough memory for all runs at once; on a CPU one run at a time fits the caches.
        if jax.default_backend() == "gpu":
            return jax.vmap(function)(keys, *trees)
        results: T = jax.lax.map(lambda own: function(*own), (keys, *trees))
        return results

    def init(self) -> State:
        if self.training.runs == 1:
            return super().init()
        state: State = jax.jit(lambda: self._map_runs(self.sample_state))()
        return state

    def abstract(self) -> State:
        if self.training.runs == 1:
            return super().abstract()
        state: State = jax.eval_shape(lambda: self._map_runs(self.sample_state))
        return state

    def _place_on_mesh(self, mesh: Mesh | None) -> None:
        self.advance = self._repeat_step(self.step, None)

    def _initialize_optimizer(self, params: Any) -> Optimizer:
        # Copy: the state's memory is donated, so no array may appear twice.
        best = jax.tree.map(jnp.copy, params)
        return Optimizer(self.optimizer.init(params), best, jnp.float32(jnp.inf), jnp.float32(0))

    def sample(self, key: Array, batch: int) -> tuple[jax.Array, jax.Array]:
        """Return initial and target states: bool ``[C, B, H, W]`` and ``[T, B, H, W]``."""
        training, size = self.training, self.training.size
        shape = (self.config.channels, batch, size, size)
        if self.target is None:
            if batch >= N_BOARDS:
                boards = jnp.asarray(every_neighborhood())[None]
            else:
                number = jax.random.randint(key, (batch, 1), 0, N_BOARDS)
                boards = (number >> jnp.arange(9)[None] & 1).reshape(batch, 3, 3) == 1
            hidden = jnp.zeros((self.config.channels - 1, *boards.shape), bool)
            return jnp.concatenate([boards[None], hidden]), life(boards)[None]
        if training.start == "random":
            state = jax.random.bernoulli(key, shape=shape)
        else:
            state = jnp.zeros(shape, bool)
            if training.start == "seed":
                state = state.at[:, :, size // 2, size // 2].set(True)
        target = jnp.asarray(self.target)[:, None]
        return state, jnp.broadcast_to(target, (target.shape[0], batch, size, size))

    def step(self, state: State, number: Array, data: None) -> tuple[State, Array]:
        """Return the next state and the loss per grid; see `lutjax.training.loop.Step`."""
        new, losses = self._map_runs(lambda key, state: self._step_of(key, state, number), state)
        return new, losses.mean()

    def _step_of(self, seed: Array, state: State, number: Array) -> tuple[State, Array]:
        training, config = self.training, self.config
        key = jax.random.fold_in(seed, number)
        sample_key, update_key, gate_key = jax.random.split(key, 3)
        first, target = meshes.shard_samples(
            self.sample(sample_key, training.batch_size), self.mesh, axis=1
        )
        target = self._select_compared(target)
        soft_first, soft_target = first.astype(jnp.float32), target.astype(jnp.float32)
        model = self.structure.model(state.params, state.others)
        wiring = model.wiring
        hard_gates = jax.random.bernoulli(
            gate_key, training.hard_share_at(number), (1, config.n_gates)
        )

        def loss_of(params: Any) -> Array:
            logits = self.structure.model(params, state.others).logits[...]
            coefficients = lutjax.gate_coefficients(logits, axis=0)
            if training.hardens:
                # Some gates compute as their likeliest kind, with the gradient of the mixture.
                hard = lutjax.gate_coefficients(logits, hard=True, axis=0)
                likeliest = coefficients + jax.lax.stop_gradient(hard - coefficients)
                coefficients = jnp.where(hard_gates, likeliest, coefficients)
            last = automaton.run_soft(
                *(config, coefficients, wiring, soft_first, training.n_steps, update_key),
                keep_every=training.keep_every,
            )
            return jnp.square(self._select_compared(last) - soft_target).sum()

        loss, gradients = jax.value_and_grad(loss_of)(state.params)
        last = automaton.run_hard(
            config, model.gates(), wiring, first, training.n_steps, update_key
        )
        wrong = (self._select_compared(last) != target).sum().astype(jnp.float32) / target.shape[1]
        old = state.optimizer
        samples_boards = self.target is None and training.batch_size < N_BOARDS
        keep = _SMOOTHING if training.start == "random" or samples_boards else 0.0
        # A batch of random starts is a noisy measure; all boards or one start are an exact one.
        running = jnp.where(number == 0, wrong, keep * old.running + (1 - keep) * wrong)
        # Of equally good automata the later one, which has trained longer.
        better = running <= old.best_loss
        with jax.numpy_dtype_promotion("standard"):  # Optax promotes the number of steps implicitly
            updates, adam = self.optimizer.update(gradients, old.adam, state.params)
        optimizer = Optimizer(
            adam,
            jax.tree.map(lambda new, best: jnp.where(better, new, best), state.params, old.best),
            jnp.where(better, running, old.best_loss),
            running,
        )
        params = optax.apply_updates(state.params, updates)
        return State(params, state.others, optimizer), loss / target.shape[1]

    @property
    def compared(self) -> tuple[int, ...]:
        """State channels compared with the target."""
        return self.training.loss_channels or tuple(
            range(1 if self.target is None else len(self.target))
        )

    def _select_compared(self, states: jax.Array) -> jax.Array:
        """Select the compared channels from states or their targets."""
        if not self.training.loss_channels:
            return states[: len(self.compared)]
        return states[np.array(self.compared)]

    def best(self, state: State) -> LogicCA:
        """Return the model with the best hard automaton, on one device."""
        params, others = meshes.copy_to_local((state.optimizer.best, state.others))
        if self.training.runs > 1:
            first = int(np.argmin(self.wrong_of_runs(state)))
            params, others = jax.tree.map(lambda a: a[first], (params, others))
        return self.structure.model(params, others)

    def wrong(self, state: State) -> float:
        """Return the best hard automaton's wrong bits per grid, on unseen samples."""
        return min(self.wrong_of_runs(state))

    def wrong_of_runs(self, state: State) -> list[float]:
        """Return the wrong bits per grid for each run's best hard automaton; see `wrong`."""
        wrong = self._wrong(state.optimizer.best, state.others)  # a scalar for a single run
        counts: list[float] = np.reshape(wrong, -1).tolist()
        return counts

    def _count_wrong_bits(self, seed: Array, params: Any, others: Any) -> jax.Array:
        model = self.structure.model(params, others)
        # No step has this number, so these samples were not trained on.
        sample_key, update_key = jax.random.split(jax.random.fold_in(seed, 0xFFFFFFFF))
        sample = self.sample(sample_key, N_BOARDS if self.target is None else EVALUATION_BATCH)
        # Prevent XLA from constant-folding the steps.
        first, target = jax.lax.optimization_barrier(sample)
        n_steps = self.training.n_steps
        last = automaton.run_hard(
            self.config, model.gates(), model.wiring, first, n_steps, update_key
        )
        different = self._select_compared(last) != self._select_compared(target)
        per_grid: jax.Array = different.sum() / target.shape[1]
        return per_grid


def _load_best(folder: Path, step: int, record: Record) -> LogicCA:
    run = Run(record.model, record.training, pattern(record))
    return run.best(models.restore(folder, step, run))


load_model = models.Loader(Record, _load_best)
"""Loader for a run's best hard automaton and record; see `lutjax.training.models.Loader`."""


def grid(record: Record) -> dict[str, Any]:
    """Return the trained grid and start as arguments for the page; see `lutjax.circuits.page`."""
    training = record.training
    if record.target is None:
        return {}
    start = {"random": "random", "seed": "seed", "zero": "empty"}[training.start]
    return {
        "size": (training.size, training.size),
        "start": start,
        "shown": 3 if len(record.target) >= 3 else 1,
    }


def pattern(record: Record) -> Bool[np.ndarray, "channels height width"] | None:
    """Return a run's target bits; None in the Game of Life."""
    if record.target is None:
        return None
    return np.array([[[bit == "1" for bit in row] for row in channel] for channel in record.target])


def life(boards: Bool[Array, "*batch height width"]) -> Bool[jax.Array, "*batch height width"]:
    """Return the states after one step of the Game of Life on tori."""
    boards = jnp.asarray(boards)
    near = [(y, x) for y in (-1, 0, 1) for x in (-1, 0, 1) if (y, x) != (0, 0)]
    alive = sum(jnp.roll(boards, shift, (-2, -1)).astype(jnp.int32) for shift in near)
    return (alive == 3) | boards & (alive == 2)


def every_neighborhood() -> Bool[np.ndarray, "8 64"]:
    """Return an 8 x 64 torus with each of the 512 neighborhoods of 3 x 3 cells exactly once.

    All columns are rotations of one cyclic 8-bit sequence, a de Bruijn sequence for 3-bit words.
    The rotations between successive columns form a sequence that contains every pair once.
    """
    column = np.array([0, 0, 0, 1, 0, 1, 1, 1], bool)
    turns = _de_bruijn_of_pairs(8)
    return np.stack([np.roll(column, turn) for turn in np.cumsum(turns)], -1)


def _de_bruijn_of_pairs(n: int) -> list[int]:
    """Return a cyclic sequence with n * n numbers below n and every pair once."""
    # The Lyndon words whose length divides 2, in lexicographic order, concatenate to the sequence.
    pairs = [[a] if a == b else [a, b] for a in range(n) for b in range(a, n)]
    return [number for word in pairs for number in word]
