"""Networks of other packages, by the tensors that they save."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Shaped

from lutjax.convert._networks import Layer, array, classifier, modules
from lutjax.convert.errors import ConversionError
from lutjax.models import LogicClassifier

Tensors = Mapping[str, Shaped[np.ndarray, "..."]]

SAVED_WIRES = "safetensors.torch.save_file({**model.state_dict(), **{f'{k}.indices': torch.stack(layer.indices) for k, layer in enumerate(model) if hasattr(layer, 'indices')}}, FILE)"
"""Python that saves a network of difflogic with its wires, which its state dict has not."""


def torchlogix(
    tensors: Tensors,
    *,
    n_classes: int,
    tau: float | int = 1.0,
    parametrisation: str = "light",
    temperature: float | int = 1.0,
    n_inputs: int | None = None,
) -> LogicClassifier:
    """Return the classifier of a state dict of torchlogix: dense layers, and perhaps a binarization before them.

    Hard outputs are the same. Soft ones are the same within rounding for layers of gates (``"raw"`` there, 16 logits of each) and ``"light"`` tables over fixed thresholds or bits; of ``"warp"`` layers
    torchlogix takes the sigmoid after the interpolation, which makes no difference over bits alone. Connections that were learned become the wires that they have chosen.

    Args:
      tensors: by name: ``weight`` and ``connections.indices`` of each layer, ``thresholds`` of a binarization.
      n_classes, tau: arguments of its ``GroupSum``.
      parametrisation: of tables with ``2**inputs`` numbers, ``"light"`` or ``"warp"``; it is not in the file.
      temperature: of the parametrisation.
      n_inputs: bits of a sample, where there is no binarization; by default as many as the first layer reads.

    Raises:
      ConversionError: it is another network: with convolutions, for example.

    Source: docs/convert.md, section 1.

    Example:
      >>> import numpy as np, lutjax
      >>> wires, weight = np.array([[0, 1, 2, 3], [1, 2, 3, 0]]), np.eye(16, dtype=np.float32)[[1, 6, 7, 14]]
      >>> model = lutjax.convert.torchlogix({"0.weight": weight, "0.connections.indices": wires}, n_classes=2)
      >>> model(np.array([[1, 1, 0, 1]], np.float32), deterministic=True)  # 1 and 1, 1 xor 0; 0 or 1, 1 nand 1
      Array([[2., 1.]], dtype=float32)
    """
    if parametrisation not in ("light", "warp"):
        raise ConversionError(f"parametrisation is {parametrisation!r}; expected light or warp.")
    endings = ("weight", "connections.indices", "connections.weights", "thresholds", "raw_diffs")
    layers, thresholds, learned, kinds = [], None, False, set()
    for name, parts in modules(tensors, (*endings, "_export_lut_ids")):
        if "thresholds" in parts:
            learned = "raw_diffs" in parts
            thresholds = _thresholds(name, parts)
            continue
        table = array(name, parts, "weight", 2).astype(np.float32) / np.float32(temperature)
        wires = _chosen(name, parts)
        raw = wires.shape[1] == 2 and table.shape[1] == 16
        kinds.add("gates" if raw else {"light": "light", "warp": "walsh"}[parametrisation])
        # Its first input is the highest bit of an address, and of a gate's number it is the first here, too.
        layers.append(Layer(name, table, wires if raw else wires[:, ::-1]))
    _check_some(layers, kinds)
    if thresholds is not None and thresholds.ndim == 1:
        n_bits = n_inputs or int(layers[0].wires.max()) + 1
        thresholds = np.tile(thresholds, (-(-n_bits // len(thresholds)), 1))
    return classifier(
        layers,
        kind=kinds.pop(),
        n_classes=n_classes,
        tau=tau,
        thresholds=thresholds,
        learned_thresholds=learned,
        n_inputs=n_inputs,
    )


def _check_some(layers: list[Layer], kinds: set[str]) -> None:
    if not layers:
        raise ConversionError("the file has no layers of gates or tables.")
    if len(kinds) > 1:
        raise ConversionError(
            f"the file has layers of {' and of '.join(sorted(kinds))}; a classifier has one kind."
        )


def _thresholds(name: str, parts: Mapping[str, Any]) -> Any:
    """Return thresholds, or what makes some of the trained distances between them."""
    found = np.asarray(parts["thresholds"], np.float32)
    if found.ndim not in (1, 2) or not found.size:
        raise ConversionError(
            f"{name}.thresholds has shape {list(found.shape)}; expected [features, thresholds]."
        )
    if "raw_diffs" in parts:
        differences = array(name, parts, "raw_diffs", found.ndim).astype(np.float64)
        scale = 0.1 + 1e-6  # the default temperature_softplus, which the file has not
        later = scale * np.logaddexp(0, differences[..., 1:] / scale)
        found = np.cumsum(np.concatenate([differences[..., :1], later], -1), -1).astype(np.float32)
    return found


def _chosen(name: str, parts: Mapping[str, Any]) -> Any:
    """Return wires ``[gates, inputs]``: those that are fixed, or the best of the candidates."""
    if "connections.weights" not in parts:
        return array(name, parts, "connections.indices", 2).T
    scores = array(name, parts, "connections.weights", 3)
    candidates = array(name, parts, "connections.indices", 3)
    if candidates.shape != scores.shape:
        raise ConversionError(
            f"{name}.connections has scores {list(scores.shape)} for candidates {list(candidates.shape)}; expected as many."
        )
    return np.take_along_axis(candidates, scores.argmax(0)[None], 0)[0].T


def difflogic(
    tensors: Tensors, *, n_classes: int, tau: float | int = 1.0, n_inputs: int | None = None
) -> LogicClassifier:
    """Return the classifier of a network of difflogic; hard outputs are the same, and soft ones within rounding.

    Args:
      tensors: by name: ``weights`` of each layer, ``[gates, 16]``, and its wires, which a state dict of difflogic has not: ``indices``, ``[2, gates]``.
      n_classes, tau: arguments of its ``GroupSum``.
      n_inputs: bits of a sample; by default as many as the first layer reads.

    Raises:
      ConversionError: it is another network, or has no wires.

    Source: docs/convert.md, section 2.

    Example:
      >>> import numpy as np, lutjax
      >>> wires, weights = np.array([[0, 1, 2, 3], [1, 2, 3, 0]]), np.eye(16, dtype=np.float32)[[1, 6, 7, 14]]
      >>> model = lutjax.convert.difflogic({"0.weights": weights, "0.indices": wires}, n_classes=2)
      >>> model.packed()(np.array([[1, 1, 0, 1], [0, 0, 1, 1]], np.float32))
      Array([0, 1], dtype=int32)
    """
    layers = []
    for name, parts in modules(tensors, ("weights", "indices", "indices.0", "indices.1")):
        weights = array(name, parts, "weights", 2)
        if "indices.0" in parts:
            wires = np.stack([array(name, parts, f"indices.{k}", 1) for k in (0, 1)])
        elif "indices" in parts:
            wires = array(name, parts, "indices", 2)
        else:
            raise ConversionError(
                f"{name} has no indices: a state dict of difflogic has no wires. Save them with it: {SAVED_WIRES}"
            )
        layers.append(Layer(name, weights, wires.T))
    _check_some(layers, {"gates"})
    return classifier(layers, kind="gates", n_classes=n_classes, tau=tau, thresholds=None, n_inputs=n_inputs)


def torch_dwn(
    tensors: Tensors, *, n_classes: int, tau: float | int = 1.0, n_inputs: int | None = None
) -> LogicClassifier:
    """Return the classifier of a network of torch-dwn; outputs are the same.

    Its layers are those with a straight-through estimator, of which every forward pass is hard. Here the last layer sums values in training, as `lutjax.models.LogicClassifier` does with
    ``tables="binary"``. Mappings that were learned become the wires that they have chosen.

    Args:
      tensors: by name: ``luts`` and ``mapping``, or ``mapping.weights``, of each layer; and, because its thermometers are no modules,
        ``thresholds`` ``[features, thresholds]``, if it has some and you saved them.
      n_classes, tau: arguments of its ``GroupSum``.
      n_inputs: bits of a sample where there are no thresholds; by default as many as the first layer reads.

    Raises:
      ConversionError: it is another network.

    Source: docs/convert.md, section 3.

    Example:
      >>> import numpy as np, lutjax
      >>> luts = np.array([[-1, -1, -1, 1], [-1, 1, 1, -1]], np.float32)  # and, xor
      >>> model = lutjax.convert.torch_dwn({"0.luts": luts, "0.mapping": np.array([[0, 1], [1, 2]])}, n_classes=2)
      >>> model(np.array([[1, 1, 0]], np.float32), deterministic=True)
      Array([[1., 1.]], dtype=float32)
    """
    layers, thresholds = [], None
    endings = ("luts", "mapping", "mapping.weights", "_LUTLayer__dummy_mapping", "thresholds")
    for name, parts in modules(tensors, endings):
        if "thresholds" in parts:
            thresholds = array(name, parts, "thresholds", 2).astype(np.float32)
            continue
        luts = array(name, parts, "luts", 2)
        arity = luts.shape[1].bit_length() - 1
        if "mapping.weights" in parts:
            wires = array(name, parts, "mapping.weights", 2).argmax(0).reshape(len(luts), -1)
        else:
            wires = array(name, parts, "mapping", 2)
        if 2**arity != luts.shape[1] or wires.shape != (len(luts), arity):
            raise ConversionError(
                f"{name} has luts {list(luts.shape)} and a mapping {list(wires.shape)}; expected [tables, 2**inputs] and [tables, inputs]."
            )
        layers.append(Layer(name, luts, wires))
    _check_some(layers, {"binary"})
    return classifier(
        layers, kind="binary", n_classes=n_classes, tau=tau, thresholds=thresholds, n_inputs=n_inputs
    )


PACKAGES = {"torchlogix": torchlogix, "difflogic": difflogic, "torch-dwn": torch_dwn}
"""Functions by the names of packages."""
