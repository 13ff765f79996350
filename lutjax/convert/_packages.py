"""Conversion of other packages' networks from their saved tensors."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from jaxtyping import Shaped

from lutjax.convert._networks import Layer, array, check_some, classifier, modules
from lutjax.convert._spiky import spiky
from lutjax.convert._torchlogix import torchlogix
from lutjax.convert.errors import ConversionError
from lutjax.models import LogicClassifier

Tensors = Mapping[str, Shaped[np.ndarray, "..."]]

SAVED_WIRES = (
    "safetensors.torch.save_file({**model.state_dict(), "
    "**{f'{k}.indices': torch.stack(layer.indices) for k, layer in enumerate(model) "
    "if hasattr(layer, 'indices')}}, FILE)"
)
"""Python code that saves a difflogic network with its wires, which its state dict lacks."""


_DUMMY = "_LUTLayer__dummy_mapping"  # a buffer of torch-dwn without information


def difflogic(
    tensors: Tensors, *, n_classes: int, tau: float | int = 1.0, n_inputs: int | None = None
) -> LogicClassifier:
    """Convert a difflogic network to a classifier.

    Hard outputs are identical, and soft outputs agree within rounding.

    Args:
      tensors: tensors by name: ``weights`` of each layer, ``[gates, 16]``, and its wires,
        ``indices``, ``[2, gates]``. A difflogic state dict does not include wires.
      n_classes, tau: arguments of its ``GroupSum``.
      n_inputs: bits per sample; by default as many as the first layer reads.

    Raises:
      ConversionError: the network is of another kind, or has no wires.

    Source: docs/convert.md, section 2.

    Example:
      >>> import numpy as np, lutjax
      >>> wires = np.array([[0, 1, 2, 3], [1, 2, 3, 0]])
      >>> weights = np.eye(16, dtype=np.float32)[[1, 6, 7, 14]]
      >>> model = lutjax.convert.difflogic({"0.weights": weights, "0.indices": wires}, n_classes=2)
      >>> model.packed()(np.array([[1, 1, 0, 1], [0, 0, 1, 1]], np.float32))
      Array([0, 1], dtype=int32)
    """
    layers = []
    for name, parts in modules(tensors, ("weights", "indices", "indices.0", "indices.1")):
        weights = array(name, parts, "weights", 2)
        # A pair of vectors, as in the modules of difflogic, or one matrix of both.
        if "indices.0" in parts:
            wires = np.stack([array(name, parts, f"indices.{k}", 1) for k in (0, 1)])
        elif "indices" in parts:
            wires = array(name, parts, "indices", 2)
        else:
            raise ConversionError(
                f"{name} has no indices; state dicts omit them. Save them: {SAVED_WIRES}"
            )
        layers.append(Layer(name, weights, wires.T))
    check_some(layers, {"gates"})
    return classifier(
        layers, kind="gates", n_classes=n_classes, tau=tau, thresholds=None, n_inputs=n_inputs
    )


def torch_dwn(
    tensors: Tensors, *, n_classes: int, tau: float | int = 1.0, n_inputs: int | None = None
) -> LogicClassifier:
    """Convert a torch-dwn network to a classifier with identical outputs.

    Its layers use a straight-through estimator, so every forward pass is hard. During training
    here, the last layer sums values, as in `lutjax.models.LogicClassifier` with
    ``tables="binary"``. Learned mappings become the selected wires.

    Args:
      tensors: tensors by name: ``luts`` and ``mapping``, or ``mapping.weights``, of each layer.
        Thermometers are not modules, so save their ``thresholds`` yourself, ``[features,
        thresholds]``, or ``[thresholds]`` if shared by all features; and ``randperm`` of its
        ``GroupSum``.
      n_classes, tau: arguments of its ``GroupSum``.
      n_inputs: bits per sample without thresholds; by default as many as the first layer reads.

    Raises:
      ConversionError: the network is of another kind.

    Source: docs/convert.md, section 3.

    Example:
      >>> import numpy as np, lutjax
      >>> luts = np.array([[-1, -1, -1, 1], [-1, 1, 1, -1]], np.float32)  # and, xor
      >>> tensors = {"0.luts": luts, "0.mapping": np.array([[0, 1], [1, 2]])}
      >>> model = lutjax.convert.torch_dwn(tensors, n_classes=2)
      >>> model(np.array([[1, 1, 0]], np.float32), deterministic=True)
      Array([[1., 1.]], dtype=float32)
    """
    layers, thresholds, order = [], None, None
    endings = ("luts", "mapping", "mapping.weights", _DUMMY, "thresholds", "randperm")
    for name, parts in modules(tensors, endings):
        if "thresholds" in parts:
            thresholds = np.atleast_2d(np.asarray(parts["thresholds"], np.float32))
            if thresholds.ndim != 2 or not thresholds.size:
                raise ConversionError(
                    f"{name}.thresholds has shape {list(thresholds.shape)}; "
                    "expected [features, thresholds]."
                )
        if "randperm" in parts:
            order = array(name, parts, "randperm", 1)
        if {"thresholds", "randperm"} & set(parts):  # modules of their own, without tables
            continue
        luts = array(name, parts, "luts", 2)
        arity = luts.shape[1].bit_length() - 1
        if "mapping.weights" in parts:
            wires = array(name, parts, "mapping.weights", 2).argmax(0).reshape(len(luts), -1)
        else:
            wires = array(name, parts, "mapping", 2)
        if 2**arity != luts.shape[1] or wires.shape != (len(luts), arity):
            raise ConversionError(
                f"{name} has luts {list(luts.shape)} and a mapping {list(wires.shape)}; "
                "expected [tables, 2**inputs] and [tables, inputs]."
            )
        layers.append(Layer(name, luts, wires))
    check_some(layers, {"binary"})
    if order is not None:  # GroupSum permutes the votes; here the tables change places
        layers[-1] = _in_order(layers[-1], order)
    # Shared thresholds: one row for each feature.
    if thresholds is not None and len(thresholds) == 1:
        n_bits = n_inputs or int(layers[0].wires.max()) + 1
        thresholds = np.tile(thresholds, (-(-n_bits // thresholds.size), 1))
    options: dict[str, Any] = {"kind": "binary", "n_classes": n_classes, "tau": tau}
    return classifier(layers, thresholds=thresholds, n_inputs=n_inputs, **options)


def _in_order(layer: Layer, order: np.ndarray) -> Layer:
    if not np.array_equal(np.sort(order), np.arange(len(layer.table))):
        raise ConversionError(
            f"randperm has {len(order)} ids from {order.min()} to {order.max()}; "
            f"expected each of the {len(layer.table)} tables of {layer.name} once."
        )
    return Layer(layer.name, layer.table[order], layer.wires[order])


PACKAGES: Mapping[str, Callable[..., Any]] = {
    "torchlogix": torchlogix,
    "difflogic": difflogic,
    "torch-dwn": torch_dwn,
    "spiky": spiky,
}
"""Conversion functions by package name."""
