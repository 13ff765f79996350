"""Gate and table layers from other packages, as a `lutjax.models.LogicClassifier`."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from flax import nnx
from jaxtyping import Float, Int

from lutjax.convert.errors import ConversionError
from lutjax.files.messages import in_a_line
from lutjax.models import LogicClassifier, LogicClassifierConfig

GRADIENTS = {"soft": "soft", "hard": "straight_through"}
"""Names in `lutjax.layers.nnx.Thermometer` for gradients of learned thresholds."""


@dataclasses.dataclass(frozen=True)
class Layer:
    """A gate or table layer.

    Attributes:
      name: name in the file, for messages.
      table: trained values, ``[gates, 16]`` gate logits, or ``[gates, 2**inputs]`` with the first
        input as the lowest address bit.
      wires: ``[gates, inputs]``.
    """

    name: str
    table: Float[np.ndarray, "gates entries"]
    wires: Int[np.ndarray, "gates inputs"]


def classifier(
    layers: Sequence[Layer],
    *,
    kind: str,
    n_classes: int,
    tau: float | int,
    thresholds: Float[np.ndarray, "features thresholds"] | None,
    n_inputs: int | None,
    sampling: str = "fixed",
    width: float | int = 1.0,
) -> LogicClassifier:
    """Return the classifier for layers; the first one reads threshold bits, or samples.

    Args:
      kind: one of `lutjax.models._logic_configs.CLASSIFIER_TABLES`.
      sampling: threshold output in training: ``"fixed"``: bits; ``"soft"``: sigmoids; ``"hard"``:
        bits with sigmoid derivatives. All except fixed thresholds are learned.
      width: sigmoid width.
    """
    arity = layers[0].wires.shape[1]
    expected = 16 if kind == "gates" else 2**arity
    first_wires = layers[0].wires
    n_before = n_inputs or int(first_wires.max()) + 1
    if thresholds is not None and thresholds.size:
        n_before = thresholds.size
    # A damaged wire must not decide the size of a model.
    if thresholds is None and n_inputs is None and n_before > first_wires.size:
        raise ConversionError(
            f"{layers[0].name} has {first_wires.size} wires, and the largest is {n_before - 1}: "
            "it cannot read all inputs. Say how many there are."
        )
    wiring, first = [], n_before
    for layer in layers:
        wiring.append(check_layer(layer, arity, expected, n_before))
        n_before = len(layer.wires)
    # A config checks all sizes before a model allocates anything.
    try:
        config = LogicClassifierConfig(
            in_features=first if thresholds is None else len(thresholds),
            n_classes=n_classes,
            layers=tuple(len(layer.wires) for layer in layers),
            n_inputs=arity,
            tables=kind,
            wiring=",".join(wiring),
            tau=tau,
            **encode_thresholds(thresholds, sampling),
        )
    except ValueError as error:
        raise ConversionError(f"the layers make no classifier: {in_a_line(error)}") from error
    model = LogicClassifier(config, rngs=nnx.Rngs(0), **encoder(thresholds, sampling, width))
    for layer, gates in zip(layers, model.layers, strict=True):
        put(gates, kind, layer.table, layer.wires)
    return model


def check_layer(layer: Layer, arity: int, expected: int, n_before: int) -> str:
    """Return the wiring of a layer, balanced or random, after a check of its sizes and ids."""
    n_gates, n = layer.wires.shape
    if n != arity or layer.table.shape != (n_gates, expected):
        raise ConversionError(
            f"{layer.name} has tables {list(layer.table.shape)} "
            f"and wires {list(layer.wires.shape)}; "
            f"expected [{n_gates}, {expected}] of gates with {arity} inputs, as in the first layer."
        )
    if not np.isfinite(layer.table).all():
        raise ConversionError(f"{layer.name} has numbers that are not finite.")
    least, largest = int(layer.wires.min()), int(layer.wires.max())
    if least < 0 or largest >= n_before:
        raise ConversionError(
            f"{layer.name} has wires {least} to {largest}; inputs are 0 to {n_before - 1}."
        )
    # Only the name that the config records; `put` replaces the wires themselves.
    most_read = int(np.unique(layer.wires, return_counts=True)[1].max())
    return "balanced" if most_read <= -(-layer.wires.size // n_before) else "random"


def encode_thresholds(thresholds: Any, sampling: str) -> dict[str, Any]:
    n_thresholds = 0 if thresholds is None else thresholds.shape[1]
    if thresholds is None or sampling == "fixed":
        return {"n_thresholds": n_thresholds}
    learned = {"learned_thresholds": True, "threshold_gradient": GRADIENTS[sampling]}
    return {"n_thresholds": n_thresholds, **learned}


def encoder(thresholds: Any, sampling: str, width: float | int) -> dict[str, Any]:
    if thresholds is None or sampling == "fixed":
        return {"thresholds": thresholds}
    return {"thresholds": thresholds, "widths": np.full(len(thresholds), width, np.float32)}


def put(layer: Any, kind: str, table: np.ndarray, wires: np.ndarray) -> None:
    layer.wires = wires.astype(np.int32)
    setattr(layer, "logits" if kind == "gates" else "table", table.astype(np.float32))


def check_some(layers: list[Layer], kinds: set[str]) -> None:
    if not layers:
        raise ConversionError("the file has no layers of gates or tables.")
    if len(kinds) > 1:
        raise ConversionError(
            f"layers are {' and '.join(sorted(kinds))}; a classifier has one kind."
        )


def modules(tensors: Mapping[str, Any], endings: Iterable[str]) -> list[tuple[str, dict[str, Any]]]:
    """Return the modules of a state dict in order, each with its tensors by longest ending."""
    # Longest first: "mapping.weights" also ends in "weights".
    known = sorted(endings, key=len, reverse=True)
    by_module: dict[str, dict[str, Any]] = {}
    for name, tensor in tensors.items():
        ending = next((e for e in known if name == e or name.endswith(f".{e}")), None)
        if ending is None:  # the first numbered name represents all
            digits = "0123456789"
            examples = sorted(
                {e.rstrip(digits) + "0" * (e[-1] in digits) for e in known if "_export" not in e}
            )
            raise ConversionError(
                f"the file has the tensor {in_a_line(name, 80)}, "
                "which belongs to no layer that can be converted; "
                f"these have {', '.join(examples)}."
            )
        by_module.setdefault(name.removesuffix(ending).removesuffix("."), {})[ending] = tensor
    return sorted(by_module.items(), key=lambda item: _natural_sort_key(item[0]))


def _natural_sort_key(name: str) -> list[tuple[bool, int, str]]:
    # Layer 10 comes after layer 2. A longer number is a name: int would accept any length.
    keys = []
    for part in name.split("."):
        is_number = part.isdecimal() and len(part) < 10
        keys.append((not is_number, int(part) if is_number else 0, part))
    return keys


def array(where: str, parts: Mapping[str, Any], name: str, ndim: int) -> Any:
    """Return a module tensor with this rank."""
    if name not in parts:
        raise ConversionError(f"{where or 'the file'} has no {name}.")
    values = np.asarray(parts[name])
    if values.ndim != ndim or not values.size:
        raise ConversionError(
            f"{where}.{name} has shape {list(values.shape)}; expected {ndim} axes."
        )
    return values
