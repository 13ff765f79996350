"""Conversion of spiky tables from its saved tensors and separately saved anchors."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
from flax import nnx
from jaxtyping import Float, Int, Shaped

from lutjax.convert._networks import array, modules
from lutjax.convert.errors import ConversionError
from lutjax.files.messages import in_a_line
from lutjax.layers.nnx import LUT, LUTAttention, LUTPairAttention
from lutjax.models import LUTTransformer, LUTTransformerConfig
from lutjax.models.transformer import ATTENTION

Tensors = Mapping[str, Shaped[np.ndarray, "..."]]

SAVED_ANCHORS = (
    "safetensors.torch.save_file({**model.state_dict(), **{f'{name}._detector_anchors': "
    "layer._export_anchors() for name, layer in model.named_modules() if hasattr(layer, "
    "'_export_anchors')}}, FILE)"
)
"""Python code that saves a spiky network with its anchors, which its state dict lacks."""

_WEIGHTS, _ANCHORS, _POSITIONS = "_weights", "_detector_anchors", "_positional_embeddings"
_NORM = {"weight": "scale", "bias": "bias", "running_mean": "mean", "running_var": "var"}
_ENDINGS = (_WEIGHTS, _ANCHORS, _POSITIONS, *_NORM, "num_batches_tracked")


@dataclasses.dataclass(frozen=True)
class _Tables:
    """Tables: anchors ``[detectors, pairs, 2]``, weights ``[detectors, rows, outputs]``, positions.

    Positions are ``[positions, detectors or 1, bits]`` for attention, flattened in the file.
    """

    name: str
    anchors: Int[np.ndarray, "detectors pairs 2"]
    weights: Float[np.ndarray, "detectors rows outputs"]
    positions: Float[np.ndarray, "..."] | None = None

    @property
    def n_detectors(self) -> int:
        return len(self.anchors)

    @property
    def n_anchors(self) -> int:
        return self.anchors.shape[1]

    @property
    def n_bits(self) -> int:
        return self.weights.shape[1].bit_length() - 1

    def put(self, layer: Any) -> None:
        least, largest, n = int(self.anchors.min()), int(self.anchors.max()), _n_compared(layer)
        if least < 0 or largest >= n:
            raise ConversionError(
                f"{self.name} has anchors {least} to {largest}; inputs are 0 to {n - 1}."
            )
        layer.anchors = self.anchors.astype(np.int32)
        layer.weights = self.weights.astype(np.float32)
        if self.positions is not None:
            layer.positions = self.positions.astype(np.float32)


def spiky(
    tensors: Tensors, *, context: int, attention: str | None = None, shared_positions: bool = False
) -> LUTTransformer:
    """Convert a spiky ``LUTTransformer`` to a language model.

    Logits agree within rounding, during and after training.

    Args:
      tensors: tensors by name: its state dict, and the anchors ``_detector_anchors`` of each layer,
        ``[detectors, pairs, 2]``, which the state dict does not include.
      context: its ``context_size``.
      attention: ``"concatenated"``; ``"pair"`` if its ``concatenation_product`` is False;
        ``"pair_interleaved"`` if its ``sliced_product_mode`` is also True. By default one of the
        first two, inferred from table sizes.
      shared_positions: its ``unified_pe``.

    Raises:
      ConversionError: the network is of another kind, has no anchors, or has inconsistent sizes.

    Source: docs/convert.md, section 4.

    Example:
      >>> import numpy as np, lutjax
      >>> rng = np.random.default_rng(0)
      >>> def tables(name, n_inputs, n_bits, n_outputs):  # of one detector
      ...     anchors = np.stack([rng.permutation(n_inputs)[:2] for _ in range(2)])[None]
      ...     weights = rng.normal(size=2**n_bits * n_outputs)
      ...     return {f"{name}._detector_anchors": anchors, f"{name}._weights": weights}
      >>> tensors = {"token_embedder.weight": rng.uniform(-1, 1, (10, 4))}
      >>> tensors |= tables("layers.0.attention_lut", 4, 4, 4) | tables("unembedder", 4, 2, 10)
      >>> model = lutjax.convert.spiky(tensors, context=6)
      >>> model(np.array([[3, 1, 4]]), deterministic=True).shape
      (1, 3, 10)
    """
    if attention not in (None, *ATTENTION):
        raise ConversionError(
            f"attention is {attention!r}; expected one of {', '.join(ATTENTION)}."
        )
    if context < 2:
        raise ConversionError(f"context is {context}; it must be at least 2.")
    remaining = dict(modules(tensors, _ENDINGS))
    embedder = remaining.pop("token_embedder", {})
    embedding = array("token_embedder", embedder, "weight", 2).astype(np.float32)
    vocab_size, features = embedding.shape
    layers: list[dict[str, Any]] = []
    while (name := f"layers.{len(layers)}") and f"{name}.attention_lut" in remaining:
        attended = _tables(remaining, f"{name}.attention_lut", features)
        ffn = _tables(remaining, f"{name}.ffn", features) if f"{name}.ffn" in remaining else None
        norms = {part: remaining.pop(f"{name}.{part}_bn", None) for part in ("attention", "ffn")}
        layers.append({"attention": attended, "ffn": ffn, "norms": norms})
    if not layers:
        raise ConversionError(
            "the file has no layers.0.attention_lut: it is no LUTTransformer of spiky."
        )
    last = _tables(remaining, "unembedder", vocab_size)
    if remaining:
        raise ConversionError(f"{in_a_line(min(remaining), 80)} is not part of a LUTTransformer.")
    first, ffn = layers[0]["attention"], layers[0]["ffn"]
    # Pairs address rows by comparisons of both tokens, so they have one bit per anchor pair.
    kind = attention or ("pair" if first.n_bits == first.n_anchors else "concatenated")
    n_position_bits = _position_bits(first, kind, context, shared_positions)
    # Heads only multiply the number of detectors, so any divisor gives the same model.
    n_heads = 1
    if first.n_detectors % last.n_detectors == 0:
        n_heads = first.n_detectors // last.n_detectors
    sizes = {} if ffn is None else {"ffn_detectors": ffn.n_detectors, "ffn_anchors": ffn.n_anchors}
    try:
        config = LUTTransformerConfig(
            vocab_size=vocab_size,
            features=features,
            context=context,
            n_layers=len(layers),
            n_heads=n_heads,
            n_detectors=first.n_detectors // n_heads,
            n_anchors=first.n_anchors,
            n_position_bits=n_position_bits,
            shared_positions=shared_positions,
            attention=kind,
            ffn=ffn is not None,
            **sizes,
            unembed_detectors=last.n_detectors,
            unembed_anchors=last.n_anchors,
            dropout=0.0,
            batch_norm=layers[0]["norms"]["attention"] is not None,
        )
    except ValueError as error:
        raise ConversionError(f"the layers make no language model: {in_a_line(error)}") from error
    model = LUTTransformer(config, rngs=nnx.Rngs(0))
    model.embedding.set_value(embedding)
    for layer, block in zip(layers, model.layers, strict=True):
        for part, branch in (("attention", block.attention), ("ffn", block.ffn)):
            if (branch is None) != (layer[part] is None):
                raise ConversionError("some layers have a feed-forward part, and others have none.")
            if branch is not None:
                own, n_bits = layer[part], n_position_bits if part == "attention" else 0
                tables = _reshape_positions(own, context, shared_positions, n_bits)
                tables.put(_check_shapes(own, branch.layer))
                _put_norm(f"{own.name}'s batch norm", layer["norms"][part], branch.norm)
    last.put(_check_shapes(last, model.unembed))
    return model


def spiky_layer(
    tensors: Tensors,
    name: str = "",
    *,
    in_features: int,
    out_features: int,
    context: int | None = None,
    attention: str | None = None,
    shared_positions: bool = False,
) -> LUT | LUTAttention | LUTPairAttention:
    """Convert a spiky ``LUTLayer``, or a ``Conv2DLUTLayer`` that spans its whole input and output.

    Args:
      tensors: state dict of any network, with the anchors it does not include; see `spiky`.
      name: layer name in it.
      in_features, out_features: its ``n_inputs`` and ``n_outputs``.
      context: its ``sequence_length``, for attention.
      attention, shared_positions: as in `spiky`.

    Raises:
      ConversionError: the layer is of another kind, has no anchors, or has inconsistent sizes.

    Source: docs/convert.md, section 4.

    Example:
      >>> import numpy as np, lutjax
      >>> anchors, weights = np.array([[[0, 1], [2, 0]]]), np.arange(8.0)
      >>> tensors = {"_detector_anchors": anchors, "_weights": weights}
      >>> layer = lutjax.convert.spiky_layer(tensors, in_features=3, out_features=2)
      >>> layer(np.array([[0.0, 1.0, 2.0]], np.float32))  # not 0 > 1, but 2 > 0: row 2
      Array([[4., 5.]], dtype=float32)
    """
    remaining = dict(modules(tensors, _ENDINGS))
    own = _tables(remaining, name, out_features)
    sizes: dict[str, Any] = {
        "n_detectors": own.n_detectors,
        "n_anchors": own.n_anchors,
        "rngs": nnx.Rngs(0),
    }
    try:
        if context is None:
            layer: Any = LUT(in_features, out_features, **sizes)
            n_position_bits = 0
        else:
            # A pair's row has one bit per anchor; a concatenated row those of both tokens and more.
            kind = attention or ("pair" if own.n_bits == own.n_anchors else "concatenated")
            n_position_bits = _position_bits(own, kind, context, shared_positions)
            sizes |= {"n_positions": context - 1, "n_position_bits": n_position_bits}
            sizes |= {"window": context - 1, "shared_positions": shared_positions}
            if kind == "concatenated":
                layer = LUTAttention(in_features, out_features, **sizes)
            else:
                sizes["interleave"] = kind == "pair_interleaved"
                layer = LUTPairAttention(in_features, out_features, **sizes)
    except ValueError as error:
        raise ConversionError(f"{name or 'the file'} makes no layer: {in_a_line(error)}") from error
    tables = _reshape_positions(own, context or 1, shared_positions, n_position_bits)
    tables.put(_check_shapes(own, layer))
    return layer


def _tables(remaining: dict[str, dict[str, Any]], name: str, n_outputs: int) -> _Tables:
    # Taken out, so that what remains at the end is unknown.
    parts = remaining.pop(name, {})
    if _WEIGHTS in parts and _ANCHORS not in parts:
        raise ConversionError(
            f"{name or 'the file'} has no {_ANCHORS}: a state dict of spiky has no anchors. "
            f"Save them with it: {SAVED_ANCHORS}"
        )
    anchors = array(name, parts, _ANCHORS, 3)
    weights = array(name, parts, _WEIGHTS, 1)
    n_rows = weights.size // (len(anchors) * n_outputs)
    is_power_of_two = n_rows & (n_rows - 1) == 0
    is_complete = n_rows * len(anchors) * n_outputs == weights.size
    if anchors.shape[2] != 2 or not is_power_of_two or not is_complete:
        raise ConversionError(
            f"{name or 'the file'} has anchors {list(anchors.shape)} and {weights.size} weights; "
            "expected anchors [detectors, pairs, 2], and a power of two of rows "
            f"of {n_outputs} outputs for each. "
            "Layers whose fields are not the whole input and output have none."
        )
    if not np.isfinite(weights).all():
        raise ConversionError(f"{name or 'the file'} has numbers that are not finite.")
    positions = array(name, parts, _POSITIONS, 1) if _POSITIONS in parts else None
    return _Tables(name, anchors, weights.reshape(len(anchors), n_rows, n_outputs), positions)


def _position_bits(layer: _Tables, kind: str, context: int, shared: bool) -> int:
    # Rows of concatenated attention are addressed by bits of query, key and position.
    if kind == "concatenated":
        return max(layer.n_bits - 2 * layer.n_anchors, 0)
    if layer.positions is None:
        return 0
    return layer.positions.size // ((context - 1) * (1 if shared else layer.n_detectors))


def _reshape_positions(layer: _Tables, context: int, shared: bool, n_position_bits: int) -> _Tables:
    shape = context - 1, 1 if shared else layer.n_detectors, n_position_bits
    n_found = 0 if layer.positions is None else layer.positions.size
    if n_found != np.prod(shape):
        raise ConversionError(
            f"{layer.name or 'the file'} has {n_found} numbers for positions; "
            f"expected {list(shape)}. Check the context, and whether positions are shared."
        )
    positions = layer.positions.reshape(shape) if layer.positions is not None else None
    return dataclasses.replace(layer, positions=positions)


def _check_shapes(own: _Tables, layer: Any) -> Any:
    expected = layer.anchors[...].shape, layer.weights[...].shape
    if expected != (own.anchors.shape, own.weights.shape):
        raise ConversionError(
            f"{own.name or 'the file'} has anchors {list(own.anchors.shape)} "
            f"and tables {list(own.weights.shape)}; "
            f"expected {list(expected[0])} and {list(expected[1])}."
        )
    return layer


def _n_compared(layer: Any) -> int:
    if not isinstance(layer, LUTPairAttention):
        return int(layer.in_features)
    return 2 * int(layer.in_features) + int(layer.n_position_bits)


def _put_norm(name: str, parts: Mapping[str, Any] | None, norm: Any) -> None:
    if (parts is None) != (norm is None):
        raise ConversionError(f"{name} is missing, or other layers have none.")
    if parts is None:
        return
    for there, here in _NORM.items():
        getattr(norm, here).set_value(array(name, parts, there, 1).astype(np.float32))
