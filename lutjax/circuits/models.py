"""Circuits of lists of layers in Flax NNX, Linen or Haiku, and of models, which say by their method ``_circuit`` what they are made of."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Shaped

from lutjax import wiring
from lutjax.circuits import arithmetic
from lutjax.circuits.builder import ZERO, Builder, Literal
from lutjax.circuits.circuit import Circuit
from lutjax.circuits.ports import Format
from lutjax.layers import _logic, _logic_images
from lutjax.layers._spec import Spec
from lutjax.values._dtypes import accumulator
from lutjax.values._wires import check_wires

OUTPUTS = ("bits", "votes", "class")

_OR = 0b1110
_ONLY = (
    "a circuit is made of Thermometer, LogicGates, SoftLUT, BinaryLUT and LogicConv, and of GroupSum as the last layer. Leave "
    "out functions that only flatten: a layer takes the bits of the one before it in their order"
)


def of(
    model: Any,
    *,
    inputs: str | Format = "bits",
    outputs: str | None = None,
    simplify: bool = True,
    merge: int = 3,
    lut: int | None = None,
    about: Mapping[str, Any] | None = None,
) -> Circuit:
    """Return the circuit of a hard model: the same bits, votes and classes as ``deterministic=True``.

    Args:
      model: a `LogicClassifier`, `PackedClassifier`, `LogicTreeNet` or `LogicCA`; or a list of layers in the order of their calls, such as
        ``[Thermometer, LogicConv, LogicGates, GroupSum]``, or a ``Sequential`` of them. Layers of Flax NNX are given as they
        are; those of Haiku inside of a transformed function that is not jitted; those of Linen bound, or as pairs
        ``(layer, variables)`` with the layer's own part of the variables. Between layers bits are flattened, images
        in the order of their axes.
      inputs: what the port ``x`` takes. ``"bits"``: the bits that the first layer of gates reads, so all of a
        thermometer's; those of a `LogicTreeNet` in the order channel, threshold, row, column. A `Format` or its text, such as
        ``"uint8"`` or ``"fixed12.4"``: numbers, which a thermometer in the circuit compares with its thresholds; images of a
        `LogicTreeNet` in the order row, column, channel.
      outputs: what the port ``y`` gives. ``"bits"``: those of the last layer; ``"votes"``: the sum of bits for each class,
        not divided by tau; ``"class"``: the first class with the most votes. Default: the class where there are votes.
      simplify: whether constants, copies, repeated and unread gates are removed; else the circuit has every gate.
      merge: gates absorb others while they have at most so many inputs; see `Builder`.
      lut: inputs of the largest tables that count votes, 2 to 6; see `Builder`.
      about: facts to add to those of the model, such as ``{"image": [8, 8]}``.

    Returns:
      The circuit. An automaton's is the rule of one cell: ``x`` has the bits of its 8 neighbours row by row and then its
      own, the channels of a cell side by side, and ``y`` those of its next state; see `step_automaton`.

    Raises:
      ValueError: the model has no exact circuit, or `inputs` or `outputs` do not fit it; the message says why.
      TypeError: the model, or a layer, is of no kind that has a circuit.

    Source: docs/logic.md, section 7.

    Example:
      Flax NNX:

      >>> import jax, jax.numpy as jnp, numpy as np
      >>> from flax import nnx
      >>> from lutjax import circuits
      >>> from lutjax.layers.nnx import GroupSum, LogicGates, Thermometer
      >>> rngs = nnx.Rngs(0)
      >>> thresholds = jnp.array([[0.5, 2.5], [1.0, 2.0]])
      >>> layers = [Thermometer(2, 2, thresholds=thresholds), LogicGates(4, 12, rngs=rngs), GroupSum(3)]
      >>> circuit = circuits.of(layers, inputs="uint2")
      >>> [(port.name, port.count, port.format.bits) for port in (*circuit.inputs, *circuit.outputs)]
      [('x', 2, 2), ('y', 1, 2)]
      >>> [name for name, _ in circuit.parts]
      ['encoder', 'layer 1', 'votes', 'argmax']

      Linen, bound or in pairs:

      >>> from flax import linen as nn
      >>> from lutjax.layers import linen
      >>> model, x = nn.Sequential([linen.LogicGates(4, 6), linen.GroupSum(3)]), jnp.ones((1, 4))
      >>> variables = model.init(jax.random.key(0), x)
      >>> circuit = circuits.of(model.bind(variables))
      >>> own = {kind: of_layers["layers_0"] for kind, of_layers in variables.items()}
      >>> same = circuits.of([(linen.LogicGates(4, 6), own), (linen.GroupSum(3), {})])
      >>> circuit.fanins == same.fanins and circuit.tables == same.tables
      True

      Haiku, inside of a transformed function:

      >>> import haiku as hk
      >>> from lutjax.layers import haiku as layers
      >>> def network():
      ...     return hk.Sequential([layers.LogicGates(4, 6), layers.GroupSum(3)])
      >>> f = hk.transform_with_state(lambda x: network()(x))
      >>> params, state = f.init(jax.random.key(0), x)
      >>> to_circuit = hk.transform_with_state(lambda: circuits.of(network(), outputs="bits"))
      >>> circuit, _ = to_circuit.apply(params, state, None)
      >>> circuit([[0, 1, 1, 0]]).shape
      (1, 6)
    """
    builder = Builder(simplify=simplify, merge=merge, lut=lut)
    own = getattr(model, "_circuit", None)  # a model knows its parts, and this module knows no model
    if own is not None:
        made: Circuit = own(builder, inputs=inputs, outputs=outputs, about=about or {})
        return made
    return of_layers(_layers_of(model), builder, inputs=inputs, outputs=outputs, about=about or {})


def of_layers(
    layers: Sequence[Any],
    builder: Builder,
    *,
    inputs: str | Format,
    outputs: str | None,
    about: Mapping[str, Any],
    n_pixels: int = 1,
) -> Circuit:
    """Return the circuit of layers, as `of` does; what a model's own ``_circuit`` calls with its layers.

    Args:
      layers: of any library, or stages of `stages_of_tables`.
      builder: an empty one.
      inputs, outputs, about: as of `of`.
      n_pixels: places of an image at each of which a thermometer in front encodes the channels.

    Raises:
      ValueError, TypeError: as `of`.
    """
    stages = _network(layers, n_pixels)
    encoder = stages[0] if isinstance(stages[0], _Thermometer) else None
    votes = stages[-1] if isinstance(stages[-1], _Votes) else None
    between = stages[encoder is not None : len(stages) - (votes is not None)]
    format, outputs = _format(inputs, encoder), _checked_outputs(outputs, votes)

    if encoder is None:
        bits = bits_of(builder.input("x", stages[0].n_inputs))
    elif format is None:
        bits = bits_of(builder.input("x", encoder.n_outputs))
    else:
        numbers = builder.input("x", encoder.n_inputs, format)
        builder.part("encoder")
        bits = encoder.of_numbers(builder, numbers, format)
    for number, stage in enumerate(between, 1):
        builder.part(f"layer {number}")
        bits = stage(builder, bits)
    if votes is None or outputs == "bits":
        builder.output("y", [[bit] for bit in bits], Format())
    else:
        _vote(builder, bits, votes.k, outputs)
    unread = encoder if format is None else None
    return builder.circuit({**_facts(unread, between, votes), **about})


def _facts(unread: "_Thermometer | None", layers: "list[_Layer]", votes: "_Votes | None") -> dict[str, Any]:
    """Return facts about a network; of a thermometer that is not in the circuit its thresholds."""
    facts: dict[str, Any] = (
        {"kind": "network"} if votes is None else {"kind": "classifier", "n_classes": votes.k}
    )
    facts["layers"] = [layer.n_gates for layer in layers]
    if layers and isinstance(layers[0], _Trees):
        facts["image"] = list(layers[0].spec.in_shape[:2])
    if unread is not None:  # JSON has no infinity
        facts["thresholds"] = [
            [t if math.isfinite(t) else str(t) for t in row] for row in unread.thresholds.tolist()
        ]
    return facts


def bits_of(numbers: list[list[Literal]]) -> list[Literal]:
    """Return the bits of numbers, one after the other."""
    return [literal for number in numbers for literal in number]


def step_automaton(
    circuit: Circuit, state: Shaped[np.ndarray, "*batch height width channels"], n_steps: int = 1
) -> Shaped[np.ndarray, "*batch height width channels"]:
    """Return the state of an automaton after some steps of its rule, a circuit that `of` made of a `LogicCA`.

    Args:
      circuit: the rule of one cell, which says of itself whether the grid is a torus.
      state: bits of any dtype: what is not 0 is 1.
      n_steps: how many.

    Raises:
      ValueError: the circuit is of no automaton, or cells have other channels.

    Example:
      >>> import jax.numpy as jnp, numpy as np
      >>> from flax import nnx
      >>> from lutjax import circuits
      >>> from lutjax.models import LogicCA, LogicCAConfig
      >>> model = LogicCA(LogicCAConfig(channels=2, kernels=2, perception=(8, 2), update=(8, 2)), rngs=nnx.Rngs(0))
      >>> state = np.random.default_rng(0).integers(0, 2, (5, 6, 2))
      >>> after = circuits.step_automaton(model.circuit(), state, 3)
      >>> bool((after == model(jnp.asarray(state), 3, deterministic=True)).all())
      True
    """
    where = "circuits.step_automaton"
    if circuit.about.get("kind") != "automaton":
        raise ValueError(
            f"{where}: circuit is of kind {circuit.about.get('kind')!r}; it must be the rule of an automaton, which "
            "circuits.of makes of a LogicCA."
        )
    channels = circuit.n_outputs
    if state.ndim < 3 or state.shape[-1] != channels:
        raise ValueError(
            f"{where}: state has shape {list(state.shape)}; expected [..., height, width, {channels}]."
        )
    height, width = state.shape[-3:-1]
    bits, around = state.astype(bool), [(0, 0)] * (state.ndim - 3) + [(1, 1), (1, 1), (0, 0)]
    mode: Any = "wrap" if circuit.about.get("periodic") else "constant"
    places = [(y, x) for y in range(3) for x in range(3) if (y, x) != (1, 1)] + [(1, 1)]
    for _ in range(n_steps):
        padded = np.pad(bits, around, mode=mode)
        near = [padded[..., y : y + height, x : x + width, :] for y, x in places]
        seen = np.concatenate(near, -1).reshape(-1, 9 * channels)
        bits = circuit(seen).reshape(state.shape)
    return bits.astype(state.dtype)


# ------------------------------------------------------------------------------------- stages
@dataclasses.dataclass(frozen=True)
class _Thermometer:
    """Comparisons of numbers with thresholds ``[features, thresholds]``, in some dtype.

    Of images, features are channels: numbers come pixel by pixel, and bits leave in the order channel, threshold, pixel.
    """

    thresholds: np.ndarray
    dtype: np.dtype
    n_pixels: int = 1

    @property
    def n_inputs(self) -> int:
        return len(self.thresholds) * self.n_pixels

    @property
    def n_outputs(self) -> int:
        return self.thresholds.size * self.n_pixels

    @property
    def n_gates(self) -> int:
        return self.n_outputs

    def __call__(self, builder: Builder, bits: list[Literal]) -> list[Literal]:
        return self.of_numbers(builder, [[bit] for bit in bits], Format())

    def of_numbers(self, builder: Builder, numbers: list[list[Literal]], format: Format) -> list[Literal]:
        return [
            arithmetic.above_constant(builder, number, k, signed=format.signed)
            for feature, row in enumerate(self.levels(format).tolist())
            for k in row
            for number in numbers[feature :: len(self.thresholds)]
        ]

    def levels(self, format: Format) -> np.ndarray:
        """Return the largest whole number of the format that is not above each threshold; one less than all if there is none."""
        lowest = -(1 << format.bits - 1) if format.signed else 0
        highest = lowest + (1 << format.bits) - 1
        scaled = np.ldexp(np.clip(self.thresholds, -(2.0**80), 2.0**80), format.fraction)
        levels: np.ndarray = np.clip(np.floor(scaled), lowest - 1, highest).astype(np.int64)
        return levels


@dataclasses.dataclass(frozen=True)
class _Gates:
    """Tables ``[gates, 2**n]`` over the bits that wires ``[gates, n]`` name."""

    wires: np.ndarray
    truth: np.ndarray
    n_inputs: int

    @property
    def n_outputs(self) -> int:
        return len(self.wires)

    @property
    def n_gates(self) -> int:
        return len(self.wires)

    def __call__(self, builder: Builder, bits: list[Literal]) -> list[Literal]:
        gate = builder.gate
        tables = tables_of(self.truth)
        return [
            gate([bits[i] for i in wires], table)
            for wires, table in zip(self.wires.tolist(), tables, strict=True)
        ]


@dataclasses.dataclass(frozen=True)
class _Trees:
    """Trees of gates at each place of an image, and the or of neighbouring places."""

    spec: _logic_images.LogicConvSpec
    wires: np.ndarray
    truth: np.ndarray

    @property
    def n_inputs(self) -> int:
        return math.prod(self.spec.in_shape)

    @property
    def n_outputs(self) -> int:
        return math.prod(self.spec.out_shape)

    @property
    def n_gates(self) -> int:
        return len(self.wires) * math.prod(self.spec.places)

    def __call__(self, builder: Builder, bits: list[Literal]) -> list[Literal]:
        spec, first = self.spec, self.spec.feature_axis == 0
        height, width, channels = spec.in_shape
        image = np.asarray(bits).reshape((channels, height, width) if first else spec.in_shape)
        image = np.moveaxis(image, 0, -1) if first else image
        size, stride, around = spec.geometry
        image = _surrounded(image, around)
        windows = image.ravel()[wiring.windows(image.shape, size, stride)]
        gates = list(zip(self.wires.tolist(), tables_of(self.truth), strict=True))
        trees = np.empty((*spec.places, spec.n_kernels), object)
        for place in np.ndindex(*spec.places):
            values = windows[place].tolist()
            for wires, table in gates:
                values.append(builder.gate([values[i] for i in wires], table))
            trees[place] = values[-spec.n_kernels :]
        (height, width), around = spec.pooling
        rows, columns, kernels = spec.out_shape
        pools = _surrounded(trees, around).reshape(rows, height, columns, width, kernels)
        pools = pools.transpose((4, 0, 2, 1, 3) if first else (0, 2, 4, 1, 3))
        return [_any(builder, pool.tolist()) for pool in pools.reshape(-1, height * width)]


@dataclasses.dataclass(frozen=True)
class _Votes:
    """Sums of `k` groups of bits, or the first of the largest sums."""

    k: int
    n_inputs: int

    n_outputs = 0  # no layer reads sums


_Layer = _Thermometer | _Gates | _Trees
_Stage = _Layer | _Votes


def _surrounded(image: np.ndarray, around: tuple[int, int]) -> np.ndarray:
    """Return an image of literals with rows and columns of zeros around it."""
    (rows, columns), (height, width, channels) = around, image.shape
    found = np.full((height + 2 * rows, width + 2 * columns, channels), ZERO, image.dtype)
    found[rows : rows + height, columns : columns + width] = image
    return found


def tables_of(truth: np.ndarray) -> list[int]:
    """Return tables, bool ``[gates, 2**inputs]``, as a `Builder` takes them."""
    packed = np.packbits(truth.astype(bool), axis=1, bitorder="little")
    return [int.from_bytes(row, "little") for row in packed.tolist()]


def _any(builder: Builder, bits: list[Literal]) -> Literal:
    while len(bits) > 1:
        pairs = [builder.gate(bits[i : i + 2], _OR) for i in range(0, len(bits) - 1, 2)]
        bits = pairs + bits[2 * len(pairs) :]
    return bits[0]


def _vote(builder: Builder, bits: list[Literal], k: int, outputs: str) -> None:
    size = len(bits) // k
    groups = [bits[i * size : (i + 1) * size] for i in range(k)]
    builder.part("votes")
    numbers = arithmetic.popcounts(builder, groups, relative=outputs == "class")
    if outputs == "class":
        builder.part("argmax")
        numbers = [arithmetic.argmax(builder, numbers)]
    builder.output("y", numbers)


# ------------------------------------------------------------------------------------- options
def _format(inputs: str | Format, encoder: _Thermometer | None) -> Format | None:
    """Return the format of numbers, or None for bits."""
    where = f"circuits.of: inputs is {inputs!r}"
    if inputs == "bits":
        return None
    if isinstance(inputs, str):
        if "float" in inputs:
            raise ValueError(
                f"{where}: a circuit has no floating-point numbers. Name a fixed-point format that holds the samples, such "
                "as 'uint8', or 'fixed12.4' for 12 bits of which 4 are after the point; comparisons with thresholds are "
                "exact for every number of the format."
            )
        inputs = Format.parse(inputs)
    if not isinstance(inputs, Format):
        raise TypeError(f"{where}; expected 'bits', a Format, or the text of one such as 'uint8'.")
    if encoder is None:
        if inputs == Format():
            return None
        raise ValueError(
            f"{where}: the first layer reads bits, because the model has no thermometer; use inputs='bits'."
        )
    largest = int(jnp.finfo(encoder.dtype).nmant) + 1  # type: ignore[no-untyped-call]
    if inputs.bits - inputs.signed > largest:
        raise ValueError(
            f"{where}: the thermometer compares numbers in {encoder.dtype}, which rounds some of this format; use one of "
            f"at most {largest} bits, or a wider dtype."
        )
    return inputs


def _checked_outputs(outputs: str | None, votes: _Votes | None) -> str:
    if outputs is None:
        return "bits" if votes is None else "class"
    if outputs not in OUTPUTS:
        raise ValueError(f"circuits.of: outputs is {outputs!r}; expected one of {OUTPUTS}.")
    if outputs != "bits" and votes is None:
        raise ValueError(
            f"circuits.of: outputs is {outputs!r}, but the model has no votes; use outputs='bits', or end the list of "
            "layers with GroupSum."
        )
    return outputs


# ------------------------------------------------------------------------------------- models
def _network(layers: Sequence[Any], n_pixels: int) -> list[Any]:
    """Return the stages of layers, of which some may be stages already."""
    stages: list[_Stage] = []
    n_bits = None
    for number, layer in enumerate(layers, 1):
        stage = layer
        if not isinstance(layer, _Stage):
            stage = _stage(f"layer {number}", layer, n_bits, last=number == len(layers))
            if n_bits is None and isinstance(stage, _Thermometer):
                stage = dataclasses.replace(stage, n_pixels=n_pixels)
        stages.append(stage)
        n_bits = stage.n_outputs
    return stages


def stages_of_tables(
    truth: Sequence[Any], wires: Sequence[Any], thresholds: Any, n_features: int, n_classes: int
) -> list[Any]:
    """Return the stages of a classifier that is given by its arrays, for `of_layers`.

    Args:
      truth, wires: of each layer, ``[gates, 2**inputs]`` and ``[gates, inputs]``.
      thresholds: ``[features, thresholds]``, or None where features are bits.
      n_features: numbers of a sample.
      n_classes: groups of the gates of the last layer.

    Raises:
      ValueError: arrays do not fit, or hold NaN.
    """
    stages: list[_Stage] = []
    n_bits = n_features
    if thresholds is not None:
        stages.append(_thermometer("thresholds", np.asarray(thresholds), thresholds.dtype))
        n_bits = stages[-1].n_outputs
    for number, (tables, read) in enumerate(zip(truth, wires, strict=True), 1):
        stages.append(_gates(f"layer {number}", read, tables, n_bits))
        n_bits = stages[-1].n_outputs
    return [*stages, _votes("votes", n_classes, n_bits)]


def _layers_of(model: Any) -> list[Any]:
    """Return the layers of a list, or of a ``Sequential``, of which Linen's may come with its variables."""
    if (
        isinstance(model, tuple)
        and len(model) == 2
        and isinstance(model[1], Mapping)
        and hasattr(model[0], "bind")
    ):
        model = model[0].bind(model[1])
    layers = model if isinstance(model, Sequence) else getattr(model, "layers", None)
    if not isinstance(layers, Sequence) or isinstance(layers, str):
        raise TypeError(
            f"circuits.of: model is a {type(model).__name__}; expected a LogicClassifier, PackedClassifier, LogicTreeNet or LogicCA, "
            "or a list of layers."
        )
    if not layers:
        raise ValueError("circuits.of: model is an empty list; give at least one layer.")
    return list(layers)


def _spec_and_arrays(where: str, layer: Any) -> tuple[Spec, dict[str, Any]]:
    """Return the spec of a layer of any library, and its arrays."""
    variables = None
    if isinstance(layer, tuple) and len(layer) == 2 and isinstance(layer[1], Mapping):
        layer, variables = layer
    if not hasattr(layer, "spec_type"):
        raise TypeError(
            f"circuits.of: {where} is a {type(layer).__name__}, which has no exact circuit: {_ONLY}."
        )
    if hasattr(layer, "_arrays"):  # NNX, Haiku
        if variables is not None:
            raise TypeError(
                f"circuits.of: {where} has variables of its own; give the {type(layer).__name__} alone."
            )
        spec, arrays = layer.spec, layer._arrays()
    else:
        if variables is None and layer.scope is None:
            raise ValueError(
                f"circuits.of: {where} is a {type(layer).__name__} of Linen without variables; give the pair (layer, "
                "variables), or layers of model.bind(variables)."
            )
        spec, arrays = layer._spec_and_arrays(layer.variables if variables is None else variables)
    for name, array in arrays.items():
        if isinstance(array, jax.core.Tracer):
            raise ValueError(
                f"circuits.of: {name} of {where} is traced; a circuit is made outside of jax.jit."
            )
        if np.isnan(np.asarray(array, np.float64)).any():
            raise ValueError(
                f"circuits.of: {name} of {where}, a {spec.layer}, holds NaN, which decides nothing."
            )
    return spec.fitted(arrays), arrays


def _stage(where: str, layer: Any, n_bits: int | None, *, last: bool) -> _Stage:
    """Return what a layer does to `n_bits` bits; None where it is the first."""
    spec, arrays = _spec_and_arrays(where, layer)
    where = f"{where}, a {spec.layer},"
    if isinstance(spec, _logic.GroupSumSpec):
        if not last:
            raise ValueError(
                f"circuits.of: {where} gives sums, which no layer of bits reads; it must be the last layer."
            )
        if n_bits is None:
            raise ValueError(
                f"circuits.of: {where} is the only layer, and so the number of its bits is not known."
            )
        return _votes(where, spec.k, n_bits)
    if isinstance(spec, _logic.ThermometerSpec):
        stage: _Stage = _thermometer(where, arrays["thresholds"], spec.dtype)
    elif isinstance(spec, _logic_images.LogicConvSpec):
        check_wires(arrays["wires"], spec.window, where=f"circuits.of: {where}")
        stage = _Trees(spec, *map(np.asarray, spec.truth_tables(arrays)))
    elif isinstance(spec, _logic._WiredSpec):
        stage = _gates(where, *spec.truth_tables(arrays), spec.in_features)
    else:
        raise TypeError(f"circuits.of: {where} has no exact circuit: {_ONLY}.")
    if n_bits is not None and stage.n_inputs != n_bits:
        raise ValueError(
            f"circuits.of: {where} reads {stage.n_inputs} bits, but the layer before it gives {n_bits}."
        )
    return stage


def _thermometer(where: str, thresholds: Any, dtype: Any) -> _Thermometer:
    values = np.asarray(thresholds).astype(np.float64)
    if np.isnan(values).any():
        raise ValueError(f"circuits.of: {where} holds NaN, which no number exceeds.")
    return _Thermometer(values, np.dtype(dtype or accumulator(thresholds.dtype)))


def _gates(where: str, wires: Any, truth: Any, n_inputs: int) -> _Gates:
    wires, truth = np.asarray(wires), np.asarray(truth)
    check_wires(wires, n_inputs, where=f"circuits.of: {where}")
    if truth.shape != (len(wires), 1 << wires.shape[1]):
        raise ValueError(
            f"circuits.of: {where} has tables {list(truth.shape)}; its wires {list(wires.shape)} need "
            f"{[len(wires), 1 << wires.shape[1]]}."
        )
    return _Gates(wires, truth, n_inputs)


def _votes(where: str, k: int, n_bits: int) -> _Votes:
    if n_bits % k:
        raise ValueError(f"circuits.of: {where} sums {k} groups, which do not divide {n_bits} bits.")
    return _Votes(k, n_bits)
