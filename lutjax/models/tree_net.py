"""Image classifier built from trees of logic gates."""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int, Num, UInt32

import lutjax
from lutjax.circuits import Builder, Circuit
from lutjax.circuits.layers import circuit_from_layers
from lutjax.dispatch.registry import Implementation
from lutjax.extras import require_optional
from lutjax.layers.nnx import GroupSum, LogicConv, LogicGates, SoftLUT
from lutjax.models._circuits import Inputs, WithCircuit
from lutjax.models._config import require_arguments
from lutjax.models._edges import with_edges as with_edges
from lutjax.models._encoder import encoder_of
from lutjax.models._logic_configs import LogicTreeNetConfig as LogicTreeNetConfig
from lutjax.models._samples import reshape_samples
from lutjax.models.packed import (
    Packed,
    bits_of,
    classes_of_bits,
    require_bits,
    shard_samples,
    through_layers,
)
from lutjax.values import Array

with require_optional("lutjax.models.tree_net"):
    from flax import nnx

# Sample words that pass through all layers together: values of whole images must fit the caches.
_WORDS = 4


class LogicTreeNet(WithCircuit, nnx.Module):
    """Image classifier by gate votes, after convolutions with trees of gates.

    A thermometer encodes each pixel value as bits. Convolution layers slide trees over the image,
    each followed by OR pooling. Gates read the remaining bits and vote: class k gets the sum of the
    k-th group.

    After soft training the model is a circuit: ``deterministic=True`` evaluates the selected gates
    on bits, and `packed` evaluates them on 32 samples per word.

    State: the state of the layers; see `lutjax.layers.nnx.LogicConv` and
    `lutjax.layers.nnx.LogicGates`. Gates and learned thresholds are `nnx.Param`; wires are stored
    with them, untrained.

    Args:
      config: model configuration.
      thresholds: ``[channels, n_thresholds]``, from `lutjax.thermometer_thresholds`; by default
        evenly spaced in (0, 1). Edges require five times as many rows: first the channels, then
        each difference for all channels.
      widths: ``[channels]``, as many as thresholds have rows: sigmoid widths for learned
        thresholds; by default the distances between thresholds.
      implementation: selects the implementation of the ops; see `lutjax.logic_gates`.
      rngs: the ``params`` stream initializes the model; the ``gates`` stream provides the noise of
        the gumbel estimator.

    Raises:
      ValueError: thresholds have a wrong shape, or are given for bit inputs.

    Source: docs/logic.md, section 8.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from lutjax.models import LogicTreeNet, LogicTreeNetConfig
      >>> config = LogicTreeNetConfig((8, 8, 1), 2, kernels=(4, 8), layers=(40, 20), padding=1)
      >>> model = LogicTreeNet(config, rngs=nnx.Rngs(0))
      >>> x = jnp.linspace(0, 1, 128).reshape(2, 8, 8, 1)
      >>> model(x).shape
      (2, 2)
      >>> bool((model.packed()(x) == model(x, deterministic=True).argmax(-1)).all())
      True
    """

    def __init__(
        self,
        config: LogicTreeNetConfig,
        *,
        thresholds: Array | None = None,
        widths: Array | None = None,
        implementation: Implementation = None,
        rngs: nnx.Rngs,
    ):
        require_arguments(self, config, LogicTreeNetConfig, rngs)
        self.config = config
        self.encoder: Any = nnx.data(None)
        self.encoder = encoder_of("LogicTreeNet", config, config.n_maps, thresholds, widths)
        options: dict[str, Any] = {"implementation": implementation, "rngs": rngs}
        self.trees: Any = nnx.List([LogicConv(**a, **options) for a in config.tree_arguments()])
        gates = LogicGates if config.tables == "gates" else SoftLUT
        self.gates: Any = nnx.List([gates(**a, **options) for a in config.gate_arguments()])
        self.votes = GroupSum(config.n_classes, config.tau, feature_axis=0)

    def __call__(
        self,
        x: Float[Array, "..."],
        *,
        deterministic: bool | None = None,
        temperature: Float[Array, ""] | float | None = None,
        rngs: nnx.Rngs | None = None,
    ) -> Float[jax.Array, "... classes"]:
        """Return class logits: votes over tau.

        Args:
          x: ``[..., height, width, channels]`` with a floating-point dtype, without the axis of a
            single channel, or flattened; bits (0 and 1) without thresholds.
          deterministic: run the hard network; overrides the mode of the model, which is soft unless
            `nnx.view` or `eval` changed it.
          temperature: temperature of all gates, 1 by default; may be traced. See
            `lutjax.layers.nnx.LogicGates`.
          rngs: noise for the gumbel estimator, instead of the model's own.

        Raises:
          ValueError: the image size differs.
        """
        y = _features_first(x, self.config)
        if self.config.edges:
            y = with_edges(y)
        if self.encoder is not None:
            y = self.encoder(y, deterministic=deterministic)
        for layer in self.trees:
            y = layer(y, deterministic=deterministic, temperature=temperature, rngs=rngs)
        y = y.reshape(math.prod(y.shape[:3]), *y.shape[3:])
        for layer in self.gates:
            y = layer(y, deterministic=deterministic, temperature=temperature, rngs=rngs)
        return jnp.moveaxis(self.votes(y), 0, -1)

    def packed(self) -> "PackedTreeNet":
        """Return the hard network on 32 samples per word, independent of later model changes."""
        trees = [layer.spec.hard(layer._arrays()) for layer in self.trees]
        gates = [layer.truth_tables() for layer in self.gates]
        return PackedTreeNet(
            tree_truth=tuple(truth for _, truth in trees),
            tree_wires=tuple(wires for wires, _ in trees),
            truth=tuple(truth for _, truth in gates),
            wires=tuple(wires for wires, _ in gates),
            thresholds=None if self.encoder is None else self.encoder.thresholds[...],
            config=self.config,
        )

    def _circuit(
        self, builder: Builder, *, inputs: Inputs, outputs: str | None, about: Mapping[str, Any]
    ) -> Circuit:
        require_bits(self.config, inputs)
        encoder = [] if self.encoder is None else [self.encoder]
        layers = [*encoder, *self.trees, *self.gates, self.votes]
        n_pixels = math.prod(self.config.in_shape[:2])
        return circuit_from_layers(
            layers, builder, inputs=inputs, outputs=outputs, about=about, n_pixels=n_pixels
        )


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("tree_truth", "tree_wires", "truth", "wires", "thresholds"),
    meta_fields=("config",),
)
@dataclasses.dataclass(frozen=True)
class PackedTreeNet(Packed):
    """Hard network of a `LogicTreeNet`: bitwise gate operations on 32 samples per word.

    A pytree of arrays. Any number of samples is supported; calls compile once per number of words.

    Attributes:
      tree_truth: node tables of each tree layer, bool ``[nodes, 2**n_inputs]``.
      tree_wires: wires of each tree layer, int32 ``[leaves / n_inputs, n_inputs]``.
      truth: tables of each gate layer, bool ``[gates, 2**n_inputs]``.
      wires: wires of each gate layer, int32 ``[gates, n_inputs]``.
      thresholds: ``[channels, thresholds]``; None for bit inputs.
      config: configuration of the model.

    Source: docs/logic.md, section 8.
    """

    tree_truth: tuple[Array, ...]
    tree_wires: tuple[Array, ...]
    truth: tuple[Array, ...]
    wires: tuple[Array, ...]
    thresholds: Array | None
    config: Any

    def __call__(self, x: Num[Array, "..."]) -> Int[jax.Array, " batch"]:
        """Return int32 classes ``[B]``; the first class wins a tie.

        Args:
          x: images ``[B, height, width, channels]`` of any dtype, also flattened, or without the
            axis of a single channel.

        Raises:
          ValueError: the image size differs.
        """
        x = _features_first(x, self.config)
        if x.ndim != 4:
            raise ValueError(f"PackedTreeNet: x has {x.ndim - 3} axes of samples; expected one.")
        return shard_samples(_classes)(self, x)

    def first_bits(self, x: Num[Array, "..."]) -> Bool[jax.Array, "batch bits"]:
        """Encode images as first-layer input bits, in the order of `from_words`."""
        images = _features_first(x, self.config)
        bits: jax.Array = shard_samples(_first_bits, results=2)(self, images)
        return bits.T

    def from_words(self, words: UInt32[Array, "bits words"]) -> Int[jax.Array, " samples"]:
        """Classify packed samples: int32 ``[32 * words]``.

        `lutjax.pack_bits` packs bits, here in the order channel, threshold, row, column.
        """
        classes: jax.Array = shard_samples(_classes_of_words)(self, words)
        return classes

    def _last_words(self, words: jax.Array) -> jax.Array:
        height, width, _ = self.config.in_shape
        words = words.reshape(len(words) // (height * width), height, width, words.shape[1])
        specs = self.config.tree_specs()
        for spec, truth, wires in zip(specs, self.tree_truth, self.tree_wires, strict=True):
            words = spec.run_words(truth, wires, words)
        return through_layers(self, words.reshape(math.prod(words.shape[:3]), words.shape[3]))


@jax.jit
def _classes(packed: PackedTreeNet, x: jax.Array) -> jax.Array:
    n_samples = x.shape[-1]
    n_words = min(max(-(-n_samples // 32), 1), _WORDS)
    blocks = max(-(-n_samples // (32 * n_words)), 1)
    x = jnp.pad(x, ((0, 0),) * 3 + ((0, blocks * 32 * n_words - n_samples),))
    x = jnp.moveaxis(x.reshape(*x.shape[:3], blocks, 32 * n_words), 3, 0)

    def classify_block(x: jax.Array) -> jax.Array:
        return _classes_of_words(packed, lutjax.pack_bits(_first_bits(packed, x)))

    classes: jax.Array = jax.lax.map(classify_block, x).reshape(-1)[:n_samples]
    return classes


def _classes_of_words(packed: PackedTreeNet, words: jax.Array) -> jax.Array:
    classes = classes_of_bits(packed._last_words(words), packed.config.n_classes)
    return classes.T.reshape(-1).astype(jnp.int32)


def _first_bits(packed: PackedTreeNet, x: jax.Array) -> jax.Array:
    """Encode images ``[channels, height, width, B]`` as tree input bits: ``[bits, B]``."""
    if packed.config.edges:
        assert packed.thresholds is not None
        x = with_edges(x.astype(packed.thresholds.dtype))
    bits = bits_of(packed.thresholds, x.reshape(x.shape[0], 1, math.prod(x.shape[1:])))
    return bits.reshape(bits.shape[0] * bits.shape[1] * math.prod(x.shape[1:3]), x.shape[-1])


def _features_first(x: Array, config: LogicTreeNetConfig) -> jax.Array:
    x = reshape_samples("LogicTreeNet", x, config.in_shape)
    return jnp.moveaxis(jnp.asarray(x), (-1, -3, -2), (0, 1, 2))
