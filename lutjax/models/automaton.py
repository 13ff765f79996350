"""A cellular automaton whose rule is a circuit of logic gates."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Float, Int, Shaped, UInt32

import lutjax
from lutjax import _compat, circuits
from lutjax._arguments import require_array, shown
from lutjax._typing import Array
from lutjax.circuits import Builder, Circuit, Format
from lutjax.circuits._layers import bits_of, tables_of
from lutjax.dispatch import _meshes
from lutjax.layers._logic import truth_of
from lutjax.layers._spec import Initializer, missing
from lutjax.layers.initializers import residual_gates
from lutjax.layers.nnx import Wires
from lutjax.models._config import Config, require_arguments
from lutjax.values._ids import check_once
from lutjax.values._wires import check_wires

_NEIGHBOURS = [(y, x) for y in (0, 1, 2) for x in (0, 1, 2) if (y, x) != (1, 1)]
_CENTRE = len(_NEIGHBOURS)


@dataclasses.dataclass(frozen=True)
class LogicCAConfig(Config):
    """The sizes of a `LogicCA`.

    Attributes:
      channels: bits of a cell.
      kernels: perception circuits; each sees every channel of the 3x3 neighbourhood.
      perception: gates in the layers of each; the first has 8, the cell with each of its neighbours.
      update: gates in the layers of the update circuit; the last has one for each channel.
      periodic: the grid is a torus; else cells beyond its edge are 0.
      update_rate: probability with which a cell takes its new state in a step; 1 is the synchronous automaton.
      residual: the logit with which a gate starts as its first input.

    Raises:
      ValueError: a size is impossible.

    Source: docs/logic.md, section 5.

    Example:
      >>> from lutjax.models import LogicCAConfig
      >>> config = LogicCAConfig(channels=4, kernels=2, update=(16, 4))
      >>> config.n_gates
      48
      >>> LogicCAConfig.from_dict(config.to_dict()) == config
      True
    """

    channels: int = 8
    kernels: int = 16
    perception: tuple[int, ...] = (8, 4, 2)
    update: tuple[int, ...] = (*[256] * 10, 128, 64, 32, 16, 8, 8)
    periodic: bool = False
    update_rate: float | int = 1.0
    residual: float | int = 5.0

    def __post_init__(self) -> None:
        super().__post_init__()
        where = "LogicCAConfig"
        for name in ("channels", "kernels"):
            if getattr(self, name) < 1:
                raise ValueError(f"{where}: {name} is {getattr(self, name)}; it must be at least 1.")
        for name in ("perception", "update"):
            if not getattr(self, name) or min(getattr(self, name)) < 1:
                raise ValueError(
                    f"{where}: {name} is {getattr(self, name)}; give layers of at least one gate."
                )
        if self.perception[0] != _CENTRE:
            raise ValueError(
                f"{where}: perception is {shown(self.perception)}; it must start with {_CENTRE}, a gate for each neighbour."
            )
        if self.update[-1] != self.channels:
            raise ValueError(
                f"{where}: update is {shown(self.update)}; it must end with {self.channels} gates, one for each channel."
            )
        if not 0 < self.update_rate <= 1:
            raise ValueError(
                f"{where}: update_rate is {self.update_rate}; it is a probability above 0, up to 1."
            )

    @property
    def sizes(self) -> tuple[int, ...]:
        """Gates of every layer, all kernels together."""
        return (*(self.kernels * n for n in self.perception), *self.update)

    @property
    def n_gates(self) -> int:
        """Gates in all; a perception circuit counts once, whatever the number of channels."""
        return sum(self.sizes)

    @property
    def wired(self) -> tuple[tuple[int, int, int], ...]:
        """Copies, inputs and gates of every layer but the first."""
        perceived = self.channels * (1 + self.kernels * self.perception[-1])
        return (
            *((self.kernels, *sizes) for sizes in zip(self.perception, self.perception[1:], strict=False)),
            *((1, *sizes) for sizes in zip((perceived, *self.update), self.update, strict=False)),
        )


class Wiring(NamedTuple):
    """The wires of every layer but the first, and the readers of its inputs: see `lutjax.readers`."""

    wires: list[Array]
    readers: list[Array]


class LogicCA(nnx.Module):
    """A cellular automaton whose rule is a circuit of differentiable logic gates.

    Each kernel is a small circuit over the 3x3 neighbourhood of a channel, and begins with the cell and each of its
    neighbours; the update circuit reads the cell and the outputs of all kernels for all channels, and its output is
    the cell's new state.

    State: ``logits`` (`nnx.Param`, ``[16, gates]``, those of all layers), ``wires`` and ``readers`` (lists of `Wires`).

    Args:
      config: the sizes.
      rngs: its ``params`` stream draws the wires.

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
        self.logits = nnx.Param(logits.T)
        wires = [_draw(rngs.params(), *layer) for layer in config.wired]
        self.wires = nnx.List(Wires(w) for w in wires)
        self.readers = nnx.List(
            Wires(
                lutjax.readers(
                    w, copies * n_inputs, fan_out=int(np.bincount(_pairs(n_inputs, n_gates).ravel()).max())
                )
            )
            for w, (copies, n_inputs, n_gates) in zip(wires, config.wired, strict=True)
        )

    @property
    def wiring(self) -> Wiring:
        """The wires and readers, checked where their values are known: whoever set them may have others than there are.

        Raises:
          ValueError: an id is out of range, or there is none.
        """
        wires, readers = ([v.get_value() for v in found] for found in (self.wires, self.readers))
        for layer, (w, r, sizes) in enumerate(zip(wires, readers, self.config.wired, strict=True)):
            _check_known(w, r, layer, sizes)
        return Wiring(wires, readers)

    def gates(self) -> Int[jax.Array, " gates"]:
        """Return the number of the likeliest gate, 0 to 15, for every gate of all layers: int32."""
        return jnp.argmax(self.logits[...], 0).astype(jnp.int32)

    def circuit(self, **options: Any) -> Circuit:
        """The hard rule of one cell as a circuit, outside of JAX. It does not follow later changes of this model.

        `lutjax.circuits.step_automaton` runs it on a grid.

        Args:
          **options: simplify, merge, lut and about; see `lutjax.circuits.of`.

        Raises:
          ValueError: the automaton is asynchronous.
        """
        return circuits.of(self, **options)

    def _circuit(
        self, builder: Builder, *, inputs: str | Format, outputs: str | None, about: Mapping[str, Any]
    ) -> Circuit:
        """Return the rule of one cell, for `lutjax.circuits.of`."""
        config = self.config
        for name, value in (("inputs", inputs), ("outputs", outputs)):
            if value not in (None, "bits"):
                raise ValueError(
                    f"circuits.of: {name} is {value!r}; the cells of a LogicCA are bits: use 'bits'."
                )
        if config.update_rate < 1:
            raise ValueError(
                f"circuits.of: update_rate is {config.update_rate}: cells of an asynchronous automaton are updated at random, "
                "which no circuit does. The rule itself is that of a LogicCA with the same variables and an update_rate of 1."
            )
        if np.isnan(np.asarray(self.logits[...])).any():
            raise ValueError("circuits.of: logits of the LogicCA hold NaN, which decides nothing.")
        channels, n_near = config.channels, 9
        bits = bits_of(builder.input("x", n_near * channels))
        cell = bits[-channels:]
        tables = iter(tables_of(np.asarray(truth_of(self.gates()))))
        # The layers of perception are the same for each channel: values are [values, channels].
        builder.part("layer 1")
        near = [bits[i * channels : (i + 1) * channels] for i in range(n_near)]
        values = []
        for gate in range(config.sizes[0]):
            table = next(tables)
            values.append([builder.gate([a, b], table) for a, b in zip(near[gate % 8], cell, strict=True)])
        for layer, wires in enumerate(self.wires, 1):
            if layer == len(config.perception):
                values = [[bit] for bit in cell] + [[bit] for row in values for bit in row]
            builder.part(f"layer {layer + 1}")
            new = []
            for i, j in np.asarray(wires[...]).tolist():
                table = next(tables)
                new.append([builder.gate([a, b], table) for a, b in zip(values[i], values[j], strict=True)])
            values = new
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
    ) -> Shaped[jax.Array, "*batch height width channels"]:
        """The state after some steps.

        Args:
          state: numbers from 0 to 1, or bits.
          n_steps: how many.
          key: of `jax.random`; asynchronous automata need one. All of a batch are updated at the same cells.
          deterministic: the hard automaton, 32 cells a word: what is not 0 is 1.

        Raises:
          ValueError: there are other channels, or an asynchronous automaton has no key.
        """
        require_array("LogicCA", "state", state)
        if state.ndim < 3 or state.shape[-1] != self.config.channels:
            raise ValueError(
                f"LogicCA: state has shape {list(state.shape)}; expected [..., height, width, {self.config.channels}]."
            )
        if key is None and self.config.update_rate < 1:
            raise ValueError(
                "LogicCA: key is None; an asynchronous automaton draws the cells that are updated."
            )
        first = jnp.moveaxis(jnp.asarray(state), -1, 0)
        grids = first.reshape(first.shape[0], math.prod(first.shape[1:-2]), *first.shape[-2:])
        if deterministic:
            last = run_hard(self.config, self.gates(), self.wiring, grids.astype(bool), n_steps, key)
        else:
            grids = grids.astype(jnp.result_type(grids.dtype, jnp.float32))
            coefficients = lutjax.gate_coefficients(self.logits[...], axis=0)
            last = run_soft(self.config, coefficients, self.wiring, grids, n_steps, key)
        return jnp.moveaxis(last.reshape(first.shape), 0, -1).astype(
            last.dtype if not deterministic else state.dtype
        )


def _check_known(wires: Any, readers: Any, layer: int, sizes: tuple[int, int, int]) -> None:
    """Raise if the wires or readers of a layer but the first are known and hold ids that do not exist, or have no values.

    Args:
      layer: its number in lists of wires.
      sizes: its copies, and inputs and gates of each.
    """
    copies, n_inputs, n_gates = sizes
    for kind, ids in (("wires", wires), ("readers", readers)):
        if isinstance(ids, jax.ShapeDtypeStruct):
            raise missing("LogicCA", f"{kind}[{layer}]")
    ids_of = functools.partial(check_wires, n_inputs=copies * n_inputs, where=f"LogicCA: layer {layer}")
    check_once(wires, ("LogicCA", layer, sizes), lambda: ids_of(wires))

    def check_readers() -> None:
        last, ids = 2 * copies * n_gates - 1, np.asarray(readers)
        if ids.shape[:1] != (copies * n_inputs,):
            raise ValueError(
                f"LogicCA: layer {layer}: readers is {shown(ids)}; expected a row for each of {copies * n_inputs} inputs."
            )
        if ids.size and (ids.min() < -1 or ids.max() > last):
            raise ValueError(
                f"LogicCA: layer {layer}: readers holds ids from {ids.min()} to {ids.max()}; places of wires are 0 to {last}, and -1 is "
                f"none. Set it to lutjax.readers(wires, {copies * n_inputs})."
            )

    check_once(readers, ("LogicCA", layer, sizes), check_readers)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _draw(key: Array, copies: int, n_inputs: int, n_gates: int) -> jax.Array:
    """Wires of a layer, in an order of its own in every copy: int32 ``[copies * n_gates, 2]``."""
    keys = jax.random.split(key, copies)
    wires = jax.vmap(lambda key: jax.random.permutation(key, _pairs(n_inputs, n_gates)))(keys)
    return (wires + n_inputs * jnp.arange(copies, dtype=jnp.int32)[:, None, None]).reshape(-1, 2)


def _pairs(n_inputs: int, n_gates: int) -> np.ndarray:
    """Pairs of inputs, neighbours first, as published: int32 ``[n_gates, 2]``.

    First inputs are all different as long as they can be, so that gates that start as their first input lose none.
    """
    first = np.arange(n_inputs - 1)
    pairs = [np.stack([a, a + 1], -1) for a in (first[::2], first[1::2])]
    pairs += [np.stack([a, a + d], -1) for d in range(2, n_inputs) for a in (np.arange(n_inputs - d),)]
    every = np.concatenate(pairs) if n_inputs > 1 else np.zeros((1, 2))
    return np.resize(every, (n_gates, 2)).astype(np.int32)


# ------------------------------------------------------------------------------------- soft
def run_soft(
    config: LogicCAConfig,
    coefficients: Float[Array, "4 gates"],
    wiring: Wiring,
    state: Float[Array, "channels batch height width"],
    n_steps: int,
    key: Array | None = None,
) -> Float[jax.Array, "channels batch height width"]:
    """The soft automaton, channels first. Its gradient keeps the states alone and computes each step again."""
    run = functools.partial(_run_soft, config, n_steps)
    last: jax.Array = _meshes.divided_by_compiler(run, _spec_of_state)(
        jnp.asarray(state), coefficients, wiring, key
    )
    return last


def _spec_of_state(state: jax.Array, *rest: Any) -> PartitionSpec:
    """Return how states lie on a mesh with explicit axes: as the first one."""
    return _meshes.spec_of(state)


def _run_soft(
    config: LogicCAConfig,
    n_steps: int,
    state: jax.Array,
    coefficients: Array,
    wiring: Wiring,
    key: Array | None,
) -> jax.Array:
    network = _network(config, coefficients, wiring, state)

    def step(state: jax.Array, key: Array | None) -> tuple[jax.Array, None]:
        new = _step(config, coefficients, wiring, state) if network is None else network(state)
        if config.update_rate < 1:
            assert key is not None
            new = jnp.where(_updated(config, key, state), new, state)
        return new, None

    keys = None if config.update_rate == 1 or key is None else jax.random.split(key, n_steps)
    if n_steps == 1:  # nothing to compute again
        return step(state, None if keys is None else keys[0])[0]
    last: jax.Array = jax.lax.scan(jax.checkpoint(step, prevent_cse=False), state, keys, length=n_steps)[0]
    return last


def _updated(config: LogicCAConfig, key: Array, state: Array) -> jax.Array:
    """Draw the cells that are updated, the same ones in all channels and grids of a batch."""
    return jax.random.bernoulli(key, config.update_rate, state.shape[2:])[None, None]


def _step(config: LogicCAConfig, coefficients: Array, wiring: Wiring, state: Array) -> jax.Array:
    channels, batch, height, width = state.shape
    n_cells = batch * height * width
    near = jnp.stack(_shifted(config, state)).reshape(_CENTRE, channels * n_cells)
    near = jax.lax.optimization_barrier(near)  # else XLA computes it again for every gate that reads it
    x, rest = jnp.asarray(state).reshape(channels * n_cells), config.sizes[0]
    of_first = coefficients[:, :rest].reshape(4, config.kernels, _CENTRE)
    x = _meet(near, x, of_first).reshape(rest, channels * n_cells)
    for layer, (wires, readers) in enumerate(zip(*wiring, strict=True)):
        if layer == len(config.perception) - 1:
            perceived = x.reshape(len(x) * channels, n_cells)
            x = jnp.concatenate([state.reshape(channels, n_cells), perceived])
        c = coefficients[:, rest : rest + len(wires)]
        x = lutjax.bilinear_gates(x, c, wires, readers=readers, feature_axis=0)
        rest += len(wires)
    return x.reshape(state.shape)


def _network(
    config: LogicCAConfig, coefficients: Array, wiring: Wiring, state: jax.Array
) -> Callable[[jax.Array], jax.Array] | None:
    """Return a step as one network of gates, where a kernel runs such; else None.

    Its inputs are the neighbours and the centre of every channel. Perception circuits have a gate for every channel.
    """
    shape = (config.channels, state[0].size)
    outline = jax.ShapeDtypeStruct(((_CENTRE + 1) * shape[0], shape[1]), state.dtype)
    wires = _network_wires(config, wiring)
    n_perceived = sum(config.kernels * n for n in config.perception)
    perceive, update = coefficients[:, :n_perceived], coefficients[:, n_perceived:]
    coefficients = jnp.concatenate([jnp.repeat(perceive, config.channels, axis=1), update], axis=1)
    coefficients = coefficients.astype(jnp.float32)
    spec = lutjax.kernel_registry.resolve("bilinear_gates", outline, coefficients, wires, feature_axis=0)
    network = spec.extra("network")
    if network is None or state.dtype != jnp.float32:
        return None

    def step(state: jax.Array) -> jax.Array:
        x = jnp.concatenate([*_shifted(config, state), state]).reshape(outline.shape)
        axes = frozenset[str]().union(*(_compat.varying_axes(a) for a in (x, coefficients, wires)))
        arrays = (_compat.cast_varying(a, axes) for a in (x, coefficients, wires))
        return jnp.reshape(network(*arrays, config.channels), state.shape)

    return step


def _network_wires(config: LogicCAConfig, wiring: Wiring) -> jax.Array:
    """Return the wires of `_network`: inputs first, then the gates of all layers, each of a perception circuit for every channel."""
    channels = jnp.arange(config.channels, dtype=jnp.int32)
    first, found = 0, []  # the row of what a layer's first wire reads
    wires = _first_wires(config.kernels)
    for layer, n_inputs in enumerate((_CENTRE + 1, *(copies * n for copies, n, _ in config.wired))):
        if layer > 0:
            wires = jnp.clip(wiring.wires[layer - 1], 0, n_inputs - 1)
        if layer < len(config.perception):
            found.append((first + wires[:, None] * config.channels + channels[None, :, None]).reshape(-1, 2))
            first += n_inputs * config.channels
        elif layer == len(config.perception):  # the cell itself, then what is perceived
            found.append(
                jnp.where(
                    wires < config.channels,
                    _CENTRE * config.channels + wires,
                    first + wires - config.channels,
                )
            )
            first += n_inputs - config.channels
        else:
            found.append(first + wires)
            first += n_inputs
    return jnp.concatenate(found)


def _shifted(config: LogicCAConfig, state: Array) -> list[jax.Array]:
    """The eight neighbours of every cell."""
    height, width = state.shape[-2:]
    mode = "wrap" if config.periodic else "constant"
    padded = jnp.pad(state, ((0, 0), (0, 0), (1, 1), (1, 1)), mode=mode)
    return [padded[..., y : y + height, x : x + width] for y, x in _NEIGHBOURS]


def _first_wires(n_kernels: int) -> jax.Array:
    """Return the wires of the first layer, into the neighbours and then the centre: int32 ``[kernels * 8, 2]``."""
    near = jnp.arange(n_kernels * _CENTRE, dtype=jnp.int32) % _CENTRE
    return jnp.stack([near, jnp.full_like(near, _CENTRE)], -1)


@jax.custom_vjp
def _meet(near: jax.Array, centre: jax.Array, coefficients: jax.Array) -> jax.Array:
    """Gates of each neighbour and the centre: ``[8, N]``, ``[N]``, ``[4, kernels, 8]`` -> ``[kernels, 8, N]``.

    The same as `lutjax.bilinear_gates` with `_first_wires`. Values and the cotangents of cells are written out, because
    every gate reads the centre: without wires XLA needs no array of all that they read. The cotangent of the coefficients
    is that of the op.
    """
    c0, c1, c2, c3 = coefficients[..., None]
    near, centre = near[None], centre[None, None]
    return c0 + c1 * near + (c2 + c3 * near) * centre


def _meet_forward(near: Array, centre: Array, coefficients: Array) -> tuple[jax.Array, Any]:
    return _meet(near, centre, coefficients), (near, centre, coefficients)


def _meet_backward(saved: Any, dy: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    near, centre, coefficients = saved
    by_kernel = jnp.einsum("ckj,kjn->cjn", coefficients[1:], dy, precision="highest")
    of_near, of_centre, of_both = jax.lax.optimization_barrier(tuple(by_kernel))
    x, wires = jnp.concatenate([near, centre[None]]), _first_wires(dy.shape[0])
    _, pull_back = jax.vjp(
        lambda c: lutjax.bilinear_gates(x, c.reshape(4, -1), wires, feature_axis=0), coefficients
    )
    return (
        of_near + of_both * centre[None],
        (of_centre + of_both * near).sum(0),
        *pull_back(dy.reshape(dy.shape[0] * dy.shape[1], centre.size)),
    )


_meet.defvjp(_meet_forward, _meet_backward)


# ------------------------------------------------------------------------------------- hard
def run_hard(
    config: LogicCAConfig,
    gates: Int[Array, " gates"],
    wiring: Wiring,
    state: Shaped[Array, "channels batch height width"],
    n_steps: int,
    key: Array | None = None,
) -> Shaped[jax.Array, "channels batch height width"]:
    """The hard automaton, channels first: bits in, bits out; 32 cells of a row are a word while it runs."""
    run = functools.partial(_run_hard, config, n_steps)
    last: jax.Array = _meshes.divided_by_compiler(run, _spec_of_state)(
        jnp.asarray(state), gates, tuple(wiring.wires), key
    )
    return last


@functools.partial(jax.jit, static_argnums=(0, 1))
def _run_hard(
    config: LogicCAConfig,
    n_steps: int,
    state: Array,
    gates: Array,
    wires: tuple[Array, ...],
    key: Array | None,
) -> jax.Array:
    shape, width = state.shape, state.shape[-1]
    truth = truth_of(gates)

    def pack(bits: jax.Array) -> jax.Array:
        *rows, _ = bits.shape
        words = lutjax.pack_bits(bits.reshape(math.prod(rows), width))
        return words.reshape(*rows, words.shape[-1])

    valid = pack(jnp.ones((1, 1, 1, width), bool))

    def step(words: jax.Array, key: Array | None) -> tuple[jax.Array, None]:
        new = _packed_step(config, truth, wires, words, width) & valid
        if config.update_rate < 1:
            assert key is not None
            updated = pack(_updated(config, key, state))
            new = new & updated | words & ~updated
        return new, None

    keys = None if config.update_rate == 1 or key is None else jax.random.split(key, n_steps)
    words: jax.Array = jax.lax.scan(step, pack(jnp.asarray(state)), keys, length=n_steps)[0]
    return lutjax.unpack_bits(words.reshape(math.prod(shape[:-1]), words.shape[-1]), width).reshape(shape)


def _packed_step(
    config: LogicCAConfig, truth: jax.Array, wires: tuple[Array, ...], words: jax.Array, width: int
) -> jax.Array:
    channels, n_words = words.shape[0], words[0].size
    near = jnp.stack([*_shifted_words(config, words, width), words])
    x, rest = near.reshape(_CENTRE + 1, channels * n_words), config.sizes[0]
    x = lutjax.packed_lut(x, truth[:rest], _first_wires(config.kernels))
    for layer, w in enumerate(wires):
        if layer == len(config.perception) - 1:
            perceived = x.reshape(len(x) * channels, n_words)
            x = jnp.concatenate([words.reshape(channels, n_words), perceived])
        x = lutjax.packed_lut(x, truth[rest : rest + len(w)], w)
        rest += len(w)
    return x.reshape(words.shape)


def _shifted_words(
    config: LogicCAConfig, words: UInt32[Array, "channels batch height words"], width: int
) -> list[jax.Array]:
    """The eight neighbours of every cell, where bit j of word w is column ``32 w + j``; bits beyond the row are 0."""
    words = jnp.asarray(words)
    edge = jnp.zeros_like(words[..., :1])
    before = jnp.concatenate([edge, words[..., :-1]], -1)
    after = jnp.concatenate([words[..., 1:], edge], -1)
    left, right = words << 1 | before >> 31, words >> 1 | after << 31
    if config.periodic:
        last = (width - 1) % 32
        left = left.at[..., 0].set(left[..., 0] | words[..., -1] >> last & 1)
        right = right.at[..., -1].set(right[..., -1] | (words[..., 0] & 1) << last)
    rows = []
    for a in (left, words, right):
        outer = ((0, 0), (0, 0), (1, 1), (0, 0))
        rows.append(jnp.pad(a, outer, mode="wrap" if config.periodic else "constant"))
    height = words.shape[2]
    return [rows[x][:, :, y : y + height] for y, x in _NEIGHBOURS]
