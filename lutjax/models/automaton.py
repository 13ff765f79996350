"""Cellular automata with a logic circuit as their rule."""

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Bool, Float, Int, Shaped

import lutjax
from lutjax import circuits, sharding
from lutjax.arguments import format_value, require_array
from lutjax.circuits import Builder, Circuit, Format
from lutjax.circuits.layers import bits_of, tables_of
from lutjax.extras import require_optional
from lutjax.layers.initializers import residual_gates
from lutjax.layers.nnx import Wires, parts
from lutjax.layers.specifications import Initializer, missing_variable_error, truth_of
from lutjax.models._automaton_wires import CENTER, NEIGHBORS, draw, pairs
from lutjax.models._automaton_words import pack_bits, shift_words, unpack_bits
from lutjax.models._circuits import Inputs
from lutjax.models._config import require_arguments
from lutjax.models._logic_configs import LogicCAConfig as LogicCAConfig
from lutjax.ops.gate_network import gate_network
from lutjax.values import Array, check_once, check_wires

with require_optional("lutjax.models.automaton"):
    from flax import nnx


class Wiring(NamedTuple):
    """Wires of every layer except the first, and their inverse wires; see `lutjax.readers`."""

    wires: list[Array]
    readers: list[Array]


class LogicCA(nnx.Module):
    """Cellular automaton whose rule is a circuit of differentiable logic gates.

    Each kernel is a small circuit over the 3x3 neighborhood of a channel. Its first layer pairs the
    cell with each neighbor. The update circuit reads the cell and all kernel outputs for all
    channels, and outputs the new cell state.

    State: ``logits`` (`nnx.Param`, ``[16, gates]``, all layers), ``wires`` and ``readers`` (lists
    of `Wires`).

    Args:
      config: model configuration.
      rngs: the ``params`` stream initializes the logits and samples the wires.

    Source: docs/logic.md, section 5.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from lutjax.models import LogicCA, LogicCAConfig
      >>> config = LogicCAConfig(channels=2, kernels=2, perception=(8, 2), update=(8, 2))
      >>> model = LogicCA(config, rngs=nnx.Rngs(0))
      >>> model(jnp.zeros((5, 16, 16, 2)), 3, deterministic=True).shape
      (5, 16, 16, 2)
    """

    def __init__(self, config: LogicCAConfig, *, rngs: nnx.Rngs):
        require_arguments(self, config, LogicCAConfig, rngs)
        self.config = config
        init: Initializer = residual_gates(strength=config.residual)
        logits = init(rngs.params(), (config.n_gates, 16), jnp.float32)
        self.logits = parts.Param(logits.T)
        wires = draw(
            rngs.params(), config.wired, perception=config.perception, kernels=config.kernels
        )
        self.wires = nnx.List(Wires(w) for w in wires)
        self.readers = nnx.List(
            Wires(
                lutjax.readers(
                    w,
                    copies * n_inputs,
                    fan_out=int(np.bincount(pairs(n_inputs, n_gates).ravel()).max()),
                )
            )
            for w, (copies, n_inputs, n_gates) in zip(wires, config.wired, strict=True)
        )
        parts.link(self._variables())

    def _variables(self) -> dict[str, nnx.Variable[Any]]:
        ids = {f"wires[{i}]": w for i, w in enumerate(self.wires)}
        return {"logits": self.logits, **ids}

    @property
    def wiring(self) -> Wiring:
        """Wires and inverse wires, validated where their values are known: users may replace them.

        Raises:
          ValueError: an id is missing or out of range, or the logits belong to an automaton with
            other wires.
        """
        parts.check(type(self).__name__, self._variables())
        wires, readers = (
            [v.get_value() for v in variables] for variables in (self.wires, self.readers)
        )
        for layer, (w, r, sizes) in enumerate(zip(wires, readers, self.config.wired, strict=True)):
            _check_known(w, r, layer, sizes)
        return Wiring(wires, readers)

    def gates(self) -> Int[jax.Array, " gates"]:
        """Return the likeliest function index, 0 to 15, for every gate in all layers: int32."""
        return jnp.argmax(self.logits[...], 0).astype(jnp.int32)

    def with_update_rate(self, update_rate: float | int) -> "LogicCA":
        """Return a copy with the same rule and another update probability per cell and step.

        Raises:
          ValueError: the rate is not a probability above 0.
        """
        same = nnx.clone(self)
        same.config = dataclasses.replace(self.config, update_rate=update_rate)
        return same

    def circuit(self, **options: Any) -> Circuit:
        """Return the hard rule for one cell as a circuit, independent of JAX and later changes.

        `lutjax.circuits.step_automaton` runs it on a grid.

        Args:
          **options: simplify, merge, lut and about; see `lutjax.circuits.from_model`.

        Raises:
          ValueError: the automaton is asynchronous.
        """
        return circuits.from_model(self, **options)

    def _circuit(
        self, builder: Builder, *, inputs: Inputs, outputs: str | None, about: Mapping[str, Any]
    ) -> Circuit:
        config = self.config
        for name, value in (("inputs", inputs), ("outputs", outputs)):
            if value not in (None, "bits"):
                raise ValueError(
                    f"circuits.from_model: {name} is {value!r}; LogicCA cells are bits. Use 'bits'."
                )
        if config.update_rate < 1:
            raise ValueError(
                f"circuits.from_model: update_rate is {config.update_rate}; circuits cannot "
                "update cells at random. Use with_update_rate(1) for the rule itself."
            )
        if np.isnan(np.asarray(self.logits[...])).any():
            raise ValueError(
                "circuits.from_model: logits of the LogicCA hold NaN, which decides nothing."
            )
        channels, n_near = config.channels, 9
        bits = bits_of(builder.input("x", n_near * channels))
        cell = bits[-channels:]
        tables = iter(tables_of(np.asarray(truth_of(self.gates()))))
        # All channels share the perception layers: values are [values, channels].
        builder.start_part("layer 1")
        near = [bits[i * channels : (i + 1) * channels] for i in range(n_near)]

        def add_gates(first: list[Any], second: list[Any], table: Any) -> list[Any]:
            return [builder.gate([a, b], table) for a, b in zip(first, second, strict=True)]

        # Gates of the first layer compare the cell with each of its 8 neighbors in turn.
        values = [add_gates(near[k % 8], cell, next(tables)) for k in range(config.sizes[0])]
        for layer, wires in enumerate(self.wires, 1):
            if layer == len(config.perception):  # the update reads single bits of all channels
                values = [[bit] for bit in cell] + [[bit] for row in values for bit in row]
            builder.start_part(f"layer {layer + 1}")
            pairs = np.asarray(wires[...]).tolist()
            values = [add_gates(values[i], values[j], next(tables)) for i, j in pairs]
        builder.output("y", values, Format())
        facts = {
            "kind": "automaton",
            "channels": channels,
            "periodic": config.periodic,
            "layers": list(config.sizes),
        }
        return builder.circuit({**facts, **about})

    def __call__(
        self,
        state: Shaped[Array, "*batch height width channels"],
        n_steps: int = 1,
        *,
        key: Array | None = None,
        deterministic: bool = False,
        keep_every: int = 1,
    ) -> Shaped[jax.Array, "*batch height width channels"]:
        """Return the state after `n_steps` steps.

        Args:
          state: values from 0 to 1, or bits.
          n_steps: number of steps.
          key: `jax.random` key, required by asynchronous automata. All batch elements update the
            same cells.
          deterministic: run the hard automaton, 32 cells per word; nonzero values count as 1.
          keep_every: number of steps between the states that the soft automaton stores for its
            gradient; the backward pass recomputes the states in between. 0: store states by
            recursive halving, about ``2 log2(n_steps)`` at a time. The gradient is the same.

        Raises:
          ValueError: the number of channels differs, an asynchronous automaton has no key, or
            n_steps or keep_every is negative.
        """
        n_steps, keep_every = self._validate_run("LogicCA", state, n_steps, key, keep_every)
        last = self._run_steps(state, n_steps, key, deterministic, keep_every=keep_every)
        return _channels_last(last, state, deterministic)

    def rollout(
        self,
        state: Shaped[Array, "*batch height width channels"],
        n_steps: int,
        *,
        key: Array | None = None,
        deterministic: bool = False,
    ) -> Shaped[jax.Array, "{n_steps}+1 *batch height width channels"]:
        """Return the initial state and the state after each step.

        The last state equals the result of a call.

        Args:
          state: as in `__call__`.
          n_steps: as in `__call__`.
          key: as in `__call__`.
          deterministic: as in `__call__`.

        Raises:
          ValueError: see `__call__`.

        Example:
          >>> import jax.numpy as jnp
          >>> from flax import nnx
          >>> from lutjax.models import LogicCA, LogicCAConfig
          >>> config = LogicCAConfig(2, kernels=2, perception=(8, 2), update=(8, 2), periodic=True)
          >>> model = LogicCA(config, rngs=nnx.Rngs(0))
          >>> start = jnp.zeros((16, 16, 2)).at[8, 8].set(1)
          >>> states = model.rollout(start, 3, deterministic=True)
          >>> states.shape
          (4, 16, 16, 2)
          >>> bool((states[-1] == model(start, 3, deterministic=True)).all())
          True
        """
        n_steps, _ = self._validate_run("LogicCA.rollout", state, n_steps, key, 1)
        states = self._run_steps(state, n_steps, key, deterministic, states=True)
        return jax.vmap(lambda one: _channels_last(one, state, deterministic))(states)

    def _run_steps(
        self,
        state: Array,
        n_steps: int,
        key: Array | None,
        deterministic: bool,
        *,
        keep_every: int = 1,
        states: bool = False,
    ) -> jax.Array:
        """Return the last state, channels first, or all states."""
        config, wiring, grids = self.config, self.wiring, jnp.moveaxis(jnp.asarray(state), -1, 0)
        grids = grids.reshape(len(grids), math.prod(grids.shape[1:-2]), *grids.shape[-2:])
        if deterministic:
            bits = grids.astype(bool)
            return run_hard(config, self.gates(), wiring, bits, n_steps, key, states=states)
        numbers = grids.astype(jnp.result_type(grids.dtype, jnp.float32))
        coefficients = lutjax.gate_coefficients(self.logits[...], axis=0)
        options: dict[str, Any] = {"keep_every": keep_every, "states": states}
        return run_soft(config, coefficients, wiring, numbers, n_steps, key, **options)

    def _validate_run(
        self, where: str, state: Array, n_steps: int, key: Array | None, keep_every: int
    ) -> tuple[int, int]:
        require_array(where, "state", state)
        if state.ndim < 3 or state.shape[-1] != self.config.channels:
            raise ValueError(
                f"{where}: state has shape {list(state.shape)}; "
                f"expected [..., height, width, {self.config.channels}]."
            )
        for name, number in (("n_steps", n_steps), ("keep_every", keep_every)):
            if operator.index(number) < 0:
                raise ValueError(f"{where}: {name} is {number}; it must not be negative.")
        if key is None and self.config.update_rate < 1:
            raise ValueError(
                f"{where}: key is None; asynchronous automata sample the updated cells."
            )
        return operator.index(n_steps), operator.index(keep_every)


def _channels_last(grids: jax.Array, state: Array, deterministic: bool) -> jax.Array:
    """Reshape grids like the given state; convert bits to its dtype."""
    *batch, height, width, channels = state.shape
    last = jnp.moveaxis(grids.reshape(channels, *batch, height, width), 0, -1)
    return last.astype(state.dtype) if deterministic else last


def _check_known(wires: Any, readers: Any, layer: int, sizes: tuple[int, int, int]) -> None:
    """Raise if known wires or inverse wires after the first layer are empty or out of range."""
    copies, n_inputs, n_gates = sizes
    for kind, ids in (("wires", wires), ("readers", readers)):
        if isinstance(ids, jax.ShapeDtypeStruct):
            raise missing_variable_error("LogicCA", f"{kind}[{layer}]")
    ids_of = functools.partial(
        check_wires, n_inputs=copies * n_inputs, where=f"LogicCA: layer {layer}"
    )
    check_once(wires, ("LogicCA", layer, sizes), lambda: ids_of(wires))

    def check_readers() -> None:
        last, ids = 2 * copies * n_gates - 1, np.asarray(readers)
        if ids.shape[:1] != (copies * n_inputs,):
            raise ValueError(
                f"LogicCA: layer {layer}: readers is {format_value(ids)}; expected "
                f"{copies * n_inputs} rows, one per input."
            )
        if ids.size and (ids.min() < -1 or ids.max() > last):
            raise ValueError(
                f"LogicCA: layer {layer}: readers has ids from {ids.min()} to {ids.max()}; "
                f"expected 0 to {last}, or -1 for none. Use lutjax.readers(wires, "
                f"{copies * n_inputs})."
            )

    check_once(readers, ("LogicCA", layer, sizes), check_readers)


# ------------------------------------------------------------------------------------- soft
def run_soft(
    config: LogicCAConfig,
    coefficients: Float[Array, "4 gates"],
    wiring: Wiring,
    state: Float[Array, "channels batch height width"],
    n_steps: int,
    key: Array | None = None,
    *,
    keep_every: int = 1,
    states: bool = False,
) -> Float[jax.Array, "*states channels batch height width"]:
    """Run the soft automaton, channels first; the backward pass recomputes steps.

    Without a key every cell is updated. `states` returns all states, including the initial one. For
    `keep_every` see `LogicCA.__call__`.
    """
    run = functools.partial(_run_soft, config, n_steps, keep_every, states)
    spec = _spec_of_states if states else _spec_of_state
    sharded = sharding.shard_by_compiler(run, spec)
    last: jax.Array = sharded(jnp.asarray(state), coefficients, wiring, key)
    return last


def _spec_of_state(state: jax.Array, *rest: Any) -> PartitionSpec:
    return sharding.spec_of(state)


def _spec_of_states(state: jax.Array, *rest: Any) -> PartitionSpec:
    return PartitionSpec(None, *sharding.spec_of(state))


def _run_soft(
    config: LogicCAConfig,
    n_steps: int,
    keep_every: int,
    states: bool,
    state: jax.Array,
    coefficients: Array,
    wiring: Wiring,
    key: Array | None,
) -> jax.Array:
    networks = _networks(config, coefficients, wiring)

    def step(state: jax.Array, key: Array | None) -> jax.Array:
        new = _step(config, networks, state)
        if config.update_rate < 1:
            assert key is not None
            new = jnp.where(_sample_updates(config, key, state), new, state)
        return new

    keys = None if config.update_rate == 1 or key is None else jax.random.split(key, n_steps)
    if states:

        def keep_state(state: jax.Array, key: Array | None) -> tuple[jax.Array, jax.Array]:
            new = step(state, key)
            return new, new

        # Inside a scan nothing can be shared with the backward pass, so CSE may run.
        keep = jax.checkpoint(keep_state, prevent_cse=False)
        _, later = jax.lax.scan(keep, state, keys, length=n_steps)
        return jnp.concatenate([state[None], later])
    return _repeat_steps(step, state, keys, n_steps, keep_every)


def _repeat_steps(
    step: Callable[[jax.Array, Array | None], jax.Array],
    state: jax.Array,
    keys: Array | None,
    n_steps: int,
    keep_every: int,
) -> jax.Array:
    """Run steps with checkpoints at every n-th state; see `LogicCA.__call__`."""
    if n_steps <= 1:  # nothing to recompute
        return state if n_steps == 0 else step(state, None if keys is None else keys[0])
    length = min(keep_every, n_steps) or n_steps // 2

    def run_chunk(state: jax.Array, keys: Array | None) -> tuple[jax.Array, None]:
        return _repeat_steps(step, state, keys, length, min(keep_every, 1)), None

    whole = n_steps // length
    cut = whole * length
    parts = None if keys is None else keys[:cut].reshape(whole, length, *keys.shape[1:])
    run = jax.checkpoint(run_chunk, prevent_cse=False)
    last, _ = jax.lax.scan(run, state, parts, length=whole)
    rest = None if keys is None else keys[cut:]
    return _repeat_steps(step, last, rest, n_steps - cut, min(keep_every, 1))


def _sample_updates(config: LogicCAConfig, key: Array, state: Array) -> jax.Array:
    """Sample the updated cells, shared by all channels and all grids in a batch."""
    return jax.random.bernoulli(key, config.update_rate, state.shape[2:])[None, None]


class _Network(NamedTuple):
    """Gate layers that one call to `gate_network` evaluates, concatenated."""

    coefficients: jax.Array
    wires: jax.Array
    readers: tuple[Array, ...]
    sizes: tuple[int, ...]

    def __call__(self, x: jax.Array) -> jax.Array:
        coefficients, wires, readers, sizes = self
        outputs: jax.Array = gate_network(
            x, coefficients, wires, sizes=sizes, readers=list(readers), feature_axis=0
        )
        return outputs


def _networks(
    config: LogicCAConfig, coefficients: Array, wiring: Wiring
) -> tuple[_Network, _Network]:
    """Return the perception and update circuits, built outside the loop over steps."""
    # Pair each neighbor with its own copy of the center, so that the fan-out of a value is at most
    # the number of kernels: its cotangents are then gathered.
    of_neighbor = np.arange(CENTER * config.kernels, dtype=np.int32).reshape(-1, CENTER)
    first = np.stack([of_neighbor % CENTER, of_neighbor % CENTER + CENTER], -1).reshape(-1, 2)
    readers_of_first = np.concatenate([2 * of_neighbor.T, 2 * of_neighbor.T + 1])
    wires, readers = [first, *wiring.wires], [readers_of_first, *wiring.readers]
    n_layers = len(config.perception)
    n_perceiving = sum(config.sizes[:n_layers])

    def network(layers: slice, gates: slice) -> _Network:
        own = jnp.asarray(coefficients)[:, gates]
        own_wires = jnp.concatenate(wires[layers])
        return _Network(own, own_wires, tuple(readers[layers]), config.sizes[layers])

    perception = network(slice(n_layers), slice(n_perceiving))
    return perception, network(slice(n_layers, None), slice(n_perceiving, None))


def _step(config: LogicCAConfig, networks: tuple[_Network, _Network], state: Array) -> jax.Array:
    """Return the next state: perception for every channel, then the update circuit per cell."""
    channels, n_cells = config.channels, state[0].size
    perception, update = networks
    near = jnp.stack([*_shift_neighbors(config, state), *(state,) * CENTER])
    near = near.reshape(2 * CENTER, channels * n_cells)
    near = jax.lax.optimization_barrier(near)  # else XLA recomputes it for every reading gate
    perceived = perception(near)
    perceived = perceived.reshape(len(perceived) * channels, n_cells)
    x = jnp.concatenate([state.reshape(channels, n_cells), perceived])
    return update(x).reshape(state.shape)


def _shift_neighbors(config: LogicCAConfig, state: Array) -> list[jax.Array]:
    height, width = state.shape[-2:]
    mode = "wrap" if config.periodic else "constant"
    padded = jnp.pad(state, ((0, 0), (0, 0), (1, 1), (1, 1)), mode=mode)
    return [padded[..., y : y + height, x : x + width] for y, x in NEIGHBORS]


def first_wires(n_kernels: int) -> jax.Array:
    """Return the first layer's wires: neighbors, then the cell; int32 ``[kernels * 8, 2]``."""
    near = jnp.arange(n_kernels * CENTER, dtype=jnp.int32) % CENTER
    return jnp.stack([near, jnp.full_like(near, CENTER)], -1)


# ------------------------------------------------------------------------------------- hard
def run_hard(
    config: LogicCAConfig,
    gates: Int[Array, " gates"],
    wiring: Wiring,
    state: Shaped[Array, "channels batch height width"],
    n_steps: int,
    key: Array | None = None,
    *,
    states: bool = False,
) -> Shaped[jax.Array, "*states channels batch height width"]:
    """Run the hard automaton on bits, channels first, with 32 cells of a row packed into a word.

    `gates` are function indices, 0 to 15. For the other arguments see `run_soft`.
    """
    run = functools.partial(_run_gates, config, n_steps, states)
    spec = _spec_of_states if states else _spec_of_state
    sharded = sharding.shard_by_compiler(run, spec)
    last: jax.Array = sharded(jnp.asarray(state), gates, tuple(wiring.wires), key)
    return last


def _run_gates(
    config: LogicCAConfig,
    n_steps: int,
    states: bool,
    state: Array,
    gates: Array,
    wires: tuple[Array, ...],
    key: Array | None,
) -> jax.Array:
    tables = tuple(jnp.split(truth_of(gates), np.cumsum(config.sizes)[:-1]))
    every_wire = (first_wires(config.kernels), *wires)
    result: jax.Array = run_tables(config, n_steps, state, tables, every_wire, key, states=states)
    return result


@functools.partial(jax.jit, static_argnums=(0, 1), static_argnames="states")
def run_tables(
    config: LogicCAConfig,
    n_steps: int,
    state: Shaped[Array, "channels batch height width"],
    tables: tuple[Bool[Array, "_ 4"], ...],
    wires: tuple[Int[Array, "_ 2"], ...],
    key: Array | None,
    *,
    states: bool = False,
) -> Shaped[jax.Array, "*states channels batch height width"]:
    """Run a hard automaton with any layer sizes, and a final gate per channel; see `run_hard`.

    The config provides the channels, the number of perception layers, the edge mode and the update
    rate. For the first layer's wires see `first_wires`.
    """
    width = state.shape[-1]
    # Bits beyond the last column must stay 0: the next step would shift them in as neighbors.
    valid = pack_bits(jnp.ones((1, 1, 1, width), bool))

    def step(words: jax.Array, key: Array | None) -> tuple[jax.Array, jax.Array | None]:
        new = _packed_step(config, tables, wires, words, width) & valid
        if config.update_rate < 1:
            assert key is not None
            updated = pack_bits(_sample_updates(config, key, state))
            new = new & updated | words & ~updated
        return new, new if states else None

    keys = None if config.update_rate == 1 or key is None else jax.random.split(key, n_steps)
    first = pack_bits(jnp.asarray(state))
    words, others = jax.lax.scan(step, first, keys, length=n_steps)
    return unpack_bits(words if others is None else jnp.concatenate([first[None], others]), width)


def _packed_step(
    config: LogicCAConfig,
    tables: Sequence[Array | np.ndarray],
    wires: Sequence[Array | np.ndarray],
    words: jax.Array,
    width: int,
) -> jax.Array:
    channels, n_words = words.shape[0], words[0].size
    near = jnp.stack([*shift_words(words, width, periodic=config.periodic), words])
    x = near.reshape(CENTER + 1, channels * n_words)
    for layer, (table, w) in enumerate(zip(tables, wires, strict=True)):
        if layer == len(config.perception):
            perceived = x.reshape(len(x) * channels, n_words)
            x = jnp.concatenate([words.reshape(channels, n_words), perceived])
        x = lutjax.packed_lut(x, table, w)
    return x.reshape(words.shape)
