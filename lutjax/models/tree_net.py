"""A classifier of images made of trees of logic gates."""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int, Num, UInt32

import lutjax
from lutjax import sharding
from lutjax.circuits import Builder, Circuit, Format
from lutjax.circuits.columns import Columns
from lutjax.circuits.layers import of_layers
from lutjax.dispatch.registry import Implementation
from lutjax.extras import needed_by
from lutjax.layers.nnx import GroupSum, LogicConv, LogicGates, SoftLUT
from lutjax.models._circuits import WithCircuit
from lutjax.models._config import require_arguments
from lutjax.models._encoder import encoder_of
from lutjax.models._logic_configs import LogicTreeNetConfig as LogicTreeNetConfig
from lutjax.models._samples import of_shape
from lutjax.models.packed import Packed, bits_of, by_samples, classes_of_bits, through_layers
from lutjax.values import Array

with needed_by("lutjax.models.tree_net"):
    from flax import nnx

# Words of samples that go through all layers together.
_WORDS = 4


# Name: factor of all sizes, thresholds of a pixel, temperature of the votes, and a further factor of the layers of gates.
class LogicTreeNet(WithCircuit, nnx.Module):
    """Classes of images by the votes of logic gates, after layers of trees of gates.

    Each number of an image becomes bits; layers of trees slide over the image, each with the or of neighboring places; gates
    read what is left and vote: class k gets the sum of the k-th group of them. Trained soft, it is a circuit: with
    ``deterministic=True`` bits go through the gates that were chosen, and `packed` runs that on 32 samples a word.

    State: what the layers hold; see `lutjax.layers.nnx.LogicConv` and `lutjax.layers.nnx.LogicGates`. `nnx.Param` are the gates, and
    thresholds if they are learned; wires are kept with them and not trained.

    Args:
      config: the sizes.
      thresholds: ``[channels, n_thresholds]``, from `lutjax.thermometer_thresholds`; by default evenly in (0, 1). With edges there are
        five times as many: those of channels, then those of each of the differences.
      widths: ``[channels]``, as many, of the sigmoids through which thresholds are learned; by default the distances between thresholds.
      implementation: which implementation runs the ops; see `lutjax.logic_gates`.
      rngs: its ``params`` stream draws everything, its ``gates`` stream the noise of the estimator gumbel.

    Raises:
      ValueError: thresholds do not fit, or are given for bits.

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
        """Logits of the classes: votes over tau.

        Args:
          x: ``[..., height, width, channels]`` of a floating-point dtype, or without an axis of one channel, or rows of all these numbers;
            bits of 0 and 1 where there are no thresholds.
          deterministic: whether to run the hard network; takes precedence over the model's own mode, soft unless
            `nnx.view` or `eval` changed it.
          temperature: of all gates, in place of 1; it may be traced. See `lutjax.layers.nnx.LogicGates`.
          rngs: for the noise of the estimator gumbel, in place of the model's own.

        Raises:
          ValueError: images have another size.
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
        """Return the hard network on 32 samples a word. It does not follow later changes of this model."""
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
        self,
        builder: Builder,
        *,
        inputs: str | Format | Columns,
        outputs: str | None,
        about: Mapping[str, Any],
    ) -> Circuit:
        """Return the circuit of the layers, for `lutjax.circuits.from_model`."""
        if inputs != "bits" and self.config.edges:
            raise ValueError(
                f"circuits.from_model: inputs is {inputs!r}, but the model also compares differences of pixels with thresholds, which its circuit "
                "leaves outside; use inputs='bits'."
            )
        encoder = [] if self.encoder is None else [self.encoder]
        layers = [*encoder, *self.trees, *self.gates, self.votes]
        n_pixels = math.prod(self.config.in_shape[:2])
        return of_layers(layers, builder, inputs=inputs, outputs=outputs, about=about, n_pixels=n_pixels)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("tree_truth", "tree_wires", "truth", "wires", "thresholds"),
    meta_fields=("config",),
)
@dataclasses.dataclass(frozen=True)
class PackedTreeNet(Packed):
    """The hard network of a `LogicTreeNet`, with all gates as bitwise operations on 32 samples a word.

    A pytree of arrays. The number of samples need not be a multiple of anything; calls are compiled once for each
    number of words.

    Attributes:
      tree_truth: for each layer of trees the tables of its nodes, bool ``[nodes, 2**n_inputs]``.
      tree_wires: for each layer of trees int32 ``[leaves / n_inputs, n_inputs]``.
      truth: for each layer of gates the tables, bool ``[gates, 2**n_inputs]``.
      wires: for each layer of gates int32 ``[gates, n_inputs]``.
      thresholds: ``[channels, thresholds]``, None where samples are bits.
      config: of the model.

    Source: docs/logic.md, section 8.
    """

    tree_truth: tuple[Array, ...]
    tree_wires: tuple[Array, ...]
    truth: tuple[Array, ...]
    wires: tuple[Array, ...]
    thresholds: Array | None
    config: Any

    def __call__(self, x: Num[Array, "..."]) -> Int[jax.Array, " batch"]:
        """Classes of images ``[B, height, width, channels]``, the first of those with the most votes: int32 ``[B]``.

        Args:
          x: numbers of any dtype. Rows of all numbers are taken, too, and images without an axis of one channel.

        Raises:
          ValueError: images have another size.
        """
        x = _features_first(x, self.config)
        if x.ndim != 4:
            raise ValueError(f"PackedTreeNet: x has {x.ndim - 3} axes of samples; expected one.")
        return by_samples(_classes)(self, x)

    def first_bits(self, x: Num[Array, "..."]) -> Bool[jax.Array, "batch bits"]:
        """Return the bits of images that the first layer can read, in the order of `from_words`."""
        bits: jax.Array = by_samples(_first_bits, results=2)(self, _features_first(x, self.config))
        return bits.T

    def from_words(self, words: UInt32[Array, "bits words"]) -> Int[jax.Array, " samples"]:
        """Classes of samples whose bits are packed, by `lutjax.pack_bits`, in the order channel, threshold, row, column: int32 ``[32 * words]``."""
        classes: jax.Array = by_samples(_classes_of_words)(self, words)
        return classes

    def _last_words(self, words: jax.Array) -> jax.Array:
        height, width, _ = self.config.in_shape
        words = words.reshape(len(words) // (height * width), height, width, words.shape[1])
        for spec, truth, wires in zip(
            self.config.tree_specs(), self.tree_truth, self.tree_wires, strict=True
        ):
            words = spec.of_words(truth, wires, words)
        return through_layers(self, words.reshape(math.prod(words.shape[:3]), words.shape[3]))


@jax.jit
def _classes(packed: PackedTreeNet, x: jax.Array) -> jax.Array:
    """Return the classes of images ``[channels, height, width, B]``."""
    n_samples = x.shape[-1]
    n_words = min(max(-(-n_samples // 32), 1), _WORDS)
    blocks = max(-(-n_samples // (32 * n_words)), 1)
    x = jnp.pad(x, ((0, 0),) * 3 + ((0, blocks * 32 * n_words - n_samples),))
    x = jnp.moveaxis(x.reshape(*x.shape[:3], blocks, 32 * n_words), 3, 0)

    def of_block(x: jax.Array) -> jax.Array:
        return _classes_of_words(packed, lutjax.pack_bits(_first_bits(packed, x)))

    classes: jax.Array = jax.lax.map(of_block, x).reshape(-1)[:n_samples]
    return classes


def _classes_of_words(packed: PackedTreeNet, words: jax.Array) -> jax.Array:
    """Return the classes of samples whose bits are packed: ``[32 * words]``."""
    classes = classes_of_bits(packed._last_words(words), packed.config.n_classes)
    return classes.T.reshape(-1).astype(jnp.int32)


def _first_bits(packed: PackedTreeNet, x: jax.Array) -> jax.Array:
    """Return the bits of images ``[channels, height, width, B]`` that trees read: ``[bits, B]``."""
    if packed.config.edges:
        assert packed.thresholds is not None
        x = with_edges(x.astype(packed.thresholds.dtype))
    bits = bits_of(packed.thresholds, x.reshape(x.shape[0], 1, math.prod(x.shape[1:])))
    return bits.reshape(bits.shape[0] * bits.shape[1] * math.prod(x.shape[1:3]), x.shape[-1])


def with_edges(x: jax.Array) -> jax.Array:
    """Return images ``[channels, height, width, ...]`` followed by their `EDGES`, each of all channels: ``[5 * channels, ...]``."""

    def maps_of(x: jax.Array) -> jax.Array:
        maps: list[list[jax.Array]] = [[], []]
        for axis in (2, 1):
            around = [(1, 1) if i == axis else (0, 0) for i in range(x.ndim)]
            padded, size = jnp.pad(x, around, mode="edge"), x.shape[axis]
            before, after = (jax.lax.slice_in_dim(padded, n, n + size, axis=axis) for n in (0, 2))
            maps[0].append(after - before)
            maps[1].append(after - 2 * x + before)
        return jnp.concatenate([x, *maps[0], *maps[1]])

    result: jax.Array = sharding.divided_by_compiler(maps_of, sharding.spec_of)(x)
    return result


def _features_first(x: Array, config: LogicTreeNetConfig) -> jax.Array:
    """Return images ``[..., height, width, channels]`` as ``[channels, height, width, ...]``."""
    x = of_shape("LogicTreeNet", x, config.in_shape)
    return jnp.moveaxis(jnp.asarray(x), (-1, -3, -2), (0, 1, 2))
