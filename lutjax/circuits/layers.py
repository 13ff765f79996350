"""Circuit stages for layer lists, used by `lutjax.circuits.from_model` and the models."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lutjax import wiring
from lutjax.circuits import arithmetic
from lutjax.circuits._rows import bits_of_rows
from lutjax.circuits.builder import ZERO, Builder, Literal
from lutjax.circuits.circuit import Circuit
from lutjax.circuits.columns import Columns
from lutjax.circuits.ports import Format, levels_of
from lutjax.layers import specifications
from lutjax.layers.specifications import Spec
from lutjax.values import accumulator, check_wires

OUTPUTS = ("bits", "votes", "class")

_OR = 0b1110
_ONLY = (
    "a circuit is made of Thermometer, LogicGates, SoftLUT, BinaryLUT and LogicConv, "
    "and of GroupSum as the last layer. Leave out functions that only flatten: "
    "a layer takes the bits of the one before it in their order"
)


def _error(text: str) -> ValueError:
    return ValueError(f"circuits.from_model: {text}")


def circuit_from_layers(
    layers: Sequence[Any],
    builder: Builder,
    *,
    inputs: str | Format | Columns,
    outputs: str | None,
    about: Mapping[str, Any],
    n_pixels: int = 1,
) -> Circuit:
    """Return the circuit of layers, or stages from `stages_of_tables`, as `from_model`.

    An initial thermometer encodes the channels at each of `n_pixels` image sites.
    """
    stages = _network(layers, n_pixels)
    encoder = stages[0] if isinstance(stages[0], _Thermometer) else None
    votes = stages[-1] if isinstance(stages[-1], _Votes) else None
    between = stages[encoder is not None : len(stages) - (votes is not None)]
    rows = inputs if isinstance(inputs, Columns) else None
    format = _format("bits" if isinstance(inputs, Columns) else inputs, encoder)
    if outputs is None:
        outputs = "bits" if votes is None else "class"
    if outputs not in OUTPUTS:
        raise _error(f"outputs is {outputs!r}; expected one of {OUTPUTS}.")
    if outputs != "bits" and votes is None:
        raise _error(
            f"outputs is {outputs!r}, but the model has no votes; "
            "use outputs='bits', or end the list of layers with GroupSum."
        )
    if rows is not None:
        n_bits = stages[0].n_inputs if encoder is None else encoder.n_outputs
        if len(rows.bits) != n_bits:
            raise _error(
                f"inputs are columns with {len(rows.bits)} bits; the first layer reads {n_bits}."
            )
        numbers = []
        for port in rows.ports:
            numbers += builder.input(port.name, 1, port.format)
        builder.start_part("encoder")
        bits = bits_of_rows(builder, rows, numbers)
    elif encoder is None:
        bits = bits_of(builder.input("x", stages[0].n_inputs))
    elif format is None:
        bits = bits_of(builder.input("x", encoder.n_outputs))
    else:
        numbers = builder.input("x", encoder.n_inputs, format)
        builder.start_part("encoder")
        bits = encoder.compare(builder, numbers, format)
    for number, stage in enumerate(between, 1):
        builder.start_part(f"layer {number}")
        bits = stage(builder, bits)
    if votes is None or outputs == "bits":
        builder.output("y", [[bit] for bit in bits], Format())
    else:
        _vote(builder, bits, votes.k, outputs)
    # Thresholds outside the circuit are needed to run it, and the columns to encode rows.
    unread = encoder if format is None and rows is None else None
    facts = _facts(unread, between, votes)
    if rows is not None:
        facts["columns"] = rows.facts()
    return builder.circuit({**facts, **about})


def _facts(
    unread: "_Thermometer | None", layers: "list[_Layer]", votes: "_Votes | None"
) -> dict[str, Any]:
    """Return network facts, including the thresholds of a thermometer outside the circuit."""
    facts: dict[str, Any] = {"kind": "network"}
    if votes is not None:
        facts = {"kind": "classifier", "n_classes": votes.k}
    facts["layers"] = [layer.n_gates for layer in layers]
    if layers and isinstance(layers[0], _Trees):
        facts["image"] = list(layers[0].spec.in_shape[:2])
    if unread is not None:
        # JSON has no infinity.
        facts["thresholds"] = [
            [t if math.isfinite(t) else str(t) for t in row] for row in unread.thresholds.tolist()
        ]
    return facts


def bits_of(numbers: list[list[Literal]]) -> list[Literal]:
    """Concatenate the bits of numbers."""
    return [literal for number in numbers for literal in number]


# ------------------------------------------------------------------------------------------- stages
@dataclasses.dataclass(frozen=True)
class _Thermometer:
    """Comparisons between numbers and thresholds ``[features, thresholds]``, in some dtype.

    For images, numbers arrive pixel by pixel; bits leave in the order channel, threshold, pixel.
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
        return self.compare(builder, [[bit] for bit in bits], Format())

    def compare(
        self, builder: Builder, numbers: list[list[Literal]], format: Format
    ) -> list[Literal]:
        return [
            arithmetic.above_constant(builder, number, k, signed=format.signed)
            for feature, row in enumerate(levels_of(self.thresholds, format).tolist())
            for k in row
            for number in numbers[feature :: len(self.thresholds)]
        ]


@dataclasses.dataclass(frozen=True)
class _Gates:
    """Tables ``[gates, 2**n]`` over bits selected by wires ``[gates, n]``."""

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
        gates = zip(self.wires.tolist(), tables_of(self.truth), strict=True)
        return [gate([bits[i] for i in wires], table) for wires, table in gates]


@dataclasses.dataclass(frozen=True)
class _Trees:
    spec: specifications.LogicConvSpec
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
        image = _pad_image(image, around)
        windows = image.ravel()[wiring.windows(image.shape, size, stride)]
        gates = list(zip(self.wires.tolist(), tables_of(self.truth), strict=True))
        trees = np.empty((*spec.places, spec.n_kernels), object)
        for place in np.ndindex(*spec.places):
            # Wires count the window and the gates so far; the last gates are the kernel outputs.
            values = windows[place].tolist()
            for wires, table in gates:
                values.append(builder.gate([values[i] for i in wires], table))
            trees[place] = values[-spec.n_kernels :]
        # Pooling is the OR of the bits at its sites.
        (height, width), around = spec.pooling
        rows, columns, kernels = spec.out_shape
        pools = _pad_image(trees, around).reshape(rows, height, columns, width, kernels)
        pools = pools.transpose((4, 0, 2, 1, 3) if first else (0, 2, 4, 1, 3))
        return [_or_bits(builder, pool.tolist()) for pool in pools.reshape(-1, height * width)]


@dataclasses.dataclass(frozen=True)
class _Votes:
    k: int
    n_inputs: int

    # No layer follows sums.
    n_outputs = 0


_Layer = _Thermometer | _Gates | _Trees
_Stage = _Layer | _Votes


def _pad_image(image: np.ndarray, around: tuple[int, int]) -> np.ndarray:
    """Pad a literal image with zero rows and columns."""
    (rows, columns), (height, width, channels) = around, image.shape
    # np.pad would turn literals into NumPy integers.
    padded = np.full((height + 2 * rows, width + 2 * columns, channels), ZERO, image.dtype)
    padded[rows : rows + height, columns : columns + width] = image
    return padded


def tables_of(truth: np.ndarray) -> list[int]:
    """Convert bool tables ``[gates, 2**inputs]`` for a `Builder`."""
    # Bit k of a table is the output for the inputs with the code k.
    packed = np.packbits(truth.astype(bool), axis=1, bitorder="little")
    return [int.from_bytes(row, "little") for row in packed.tolist()]


def _or_bits(builder: Builder, bits: list[Literal]) -> Literal:
    # A balanced tree has the fewest levels.
    while len(bits) > 1:
        pairs = [builder.gate(bits[i : i + 2], _OR) for i in range(0, len(bits) - 1, 2)]
        bits = pairs + bits[2 * len(pairs) :]
    return bits[0]


def _vote(builder: Builder, bits: list[Literal], k: int, outputs: str) -> None:
    size = len(bits) // k
    groups = [bits[i * size : (i + 1) * size] for i in range(k)]
    builder.start_part("votes")
    numbers = arithmetic.popcounts(builder, groups, relative=outputs == "class")
    if outputs == "class":
        builder.start_part("argmax")
        numbers = [arithmetic.argmax(builder, numbers)]
    builder.output("y", numbers)


# ------------------------------------------------------------------------------------------ options
def _format(inputs: str | Format, encoder: _Thermometer | None) -> Format | None:
    where = f"circuits.from_model: inputs is {inputs!r}"
    if inputs == "bits":
        return None
    if isinstance(inputs, str):
        if "float" in inputs:
            raise ValueError(
                f"{where}: a circuit has no floating-point numbers. "
                "Name a fixed-point format that holds the samples, such as 'uint8', "
                "or 'fixed12.4' for 12 bits of which 4 are after the point; "
                "comparisons with thresholds are exact for every number of the format."
            )
        inputs = Format.parse(inputs)
    if not isinstance(inputs, Format):
        raise TypeError(f"{where}; expected 'bits', a Format, or the text of one such as 'uint8'.")
    if encoder is None:
        if inputs == Format():
            return None
        raise ValueError(f"{where}: without a thermometer, the first layer reads bits; use 'bits'.")
    # A circuit compares the numbers as they are, while the model may round them first.
    largest = int(jnp.finfo(encoder.dtype).nmant) + 1  # type: ignore[no-untyped-call]
    if inputs.bits - inputs.signed > largest:
        raise ValueError(
            f"{where}: the thermometer compares numbers in {encoder.dtype}, "
            f"which rounds some of this format; use one of at most {largest} bits, "
            "or a wider dtype."
        )
    return inputs


# ------------------------------------------------------------------------------------------- models
def _network(layers: Sequence[Any], n_pixels: int) -> list[Any]:
    """Return the stages of layers; some may already be stages."""
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
    """Return the stages of a classifier from its arrays, for `circuit_from_layers`.

    Layers have truth tables ``[gates, 2**inputs]`` and wires ``[gates, inputs]``. Without
    thresholds ``[features, thresholds]``, samples are bits.
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


def _spec_and_arrays(where: str, layer: Any) -> tuple[Spec, dict[str, Any]]:
    variables = None
    if isinstance(layer, tuple) and len(layer) == 2 and isinstance(layer[1], Mapping):
        layer, variables = layer
    if not hasattr(layer, "spec_type"):
        raise TypeError(
            f"circuits.from_model: {where} is a {type(layer).__name__}, "
            f"which has no exact circuit: {_ONLY}."
        )
    if hasattr(layer, "_arrays"):  # NNX, Haiku
        if variables is not None:
            raise TypeError(
                f"circuits.from_model: {where} holds its own variables; pass no others."
            )
        spec, arrays = layer.spec, layer._arrays()
    else:
        if variables is None and layer.scope is None:
            raise _error(
                f"{where} is a {type(layer).__name__} of Linen without variables; "
                "give the pair (layer, variables), or layers of model.bind(variables)."
            )
        spec, arrays = layer._spec_and_arrays(layer.variables if variables is None else variables)
    for name, array in arrays.items():
        if isinstance(array, jax.core.Tracer):
            raise _error(f"{name} of {where} is traced; call it outside of jax.jit.")
        if np.isnan(np.asarray(array, np.float64)).any():
            raise _error(f"{name} of {where}, a {spec.layer}, holds NaN.")
    return spec.fit_to_arrays(arrays), arrays


def _stage(where: str, layer: Any, n_bits: int | None, *, last: bool) -> _Stage:
    spec, arrays = _spec_and_arrays(where, layer)
    where = f"{where}, a {spec.layer},"
    if isinstance(spec, specifications.GroupSumSpec):
        if not last:
            raise _error(f"{where} outputs sums; it must be the last layer.")
        if n_bits is None:
            raise _error(f"{where} is the only layer, so its input size is unknown.")
        return _votes(where, spec.k, n_bits)
    # A recurrent layer has gates with wires as well, but also a state.
    is_recurrent = isinstance(spec, specifications.LogicRNNSpec)
    if isinstance(spec, specifications.ThermometerSpec):
        stage: _Stage = _thermometer(where, arrays["thresholds"], spec.dtype)
    elif isinstance(spec, specifications.LogicConvSpec):
        check_wires(arrays["wires"], spec.window, where=f"circuits.from_model: {where}")
        stage = _Trees(spec, *map(np.asarray, spec.truth_tables(arrays)))
    elif isinstance(spec, specifications.WiredSpec) and not is_recurrent:
        stage = _gates(where, *spec.truth_tables(arrays), spec.in_features)
    else:
        raise TypeError(f"circuits.from_model: {where} has no exact circuit: {_ONLY}.")
    if n_bits is not None and stage.n_inputs != n_bits:
        raise _error(
            f"{where} reads {stage.n_inputs} bits, but the layer before it gives {n_bits}."
        )
    return stage


def _thermometer(where: str, thresholds: Any, dtype: Any) -> _Thermometer:
    values = np.asarray(thresholds).astype(np.float64)
    if np.isnan(values).any():
        raise _error(f"{where} holds NaN, which no number exceeds.")
    return _Thermometer(values, np.dtype(dtype or accumulator(thresholds.dtype)))


def _gates(where: str, wires: Any, truth: Any, n_inputs: int) -> _Gates:
    wires, truth = np.asarray(wires), np.asarray(truth)
    check_wires(wires, n_inputs, where=f"circuits.from_model: {where}")
    if truth.shape != (len(wires), 1 << wires.shape[1]):
        raise _error(
            f"{where} has tables {list(truth.shape)}; its wires {list(wires.shape)} need "
            f"{[len(wires), 1 << wires.shape[1]]}."
        )
    return _Gates(wires, truth, n_inputs)


def _votes(where: str, k: int, n_bits: int) -> _Votes:
    if n_bits % k:
        raise _error(f"{where} sums {k} groups, which do not divide {n_bits} bits.")
    return _Votes(k, n_bits)
