"""A classifier of images made of trees of logic gates."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int, Num, UInt32

import lutjax
from lutjax._arguments import shown
from lutjax._extras import needed_by
from lutjax._typing import Array
from lutjax.circuits import Builder, Circuit, Format
from lutjax.circuits._layers import of_layers
from lutjax.circuits.columns import Columns
from lutjax.dispatch import _meshes
from lutjax.dispatch.registry import Implementation
from lutjax.layers._logic import PARAMETERIZATIONS, LogicGatesSpec, SoftLUTSpec
from lutjax.layers._logic_images import LEAVES, LogicConvSpec
from lutjax.layers.initializers import residual_gates, residual_table
from lutjax.layers.nnx import GroupSum, LogicConv, LogicGates, SoftLUT
from lutjax.models._circuits import WithCircuit
from lutjax.models._config import FOLLOWS, MOST_DEPTH, MOST_THRESHOLDS, Config, require_arguments
from lutjax.models._encoder import check_threshold_gradient, encoder_of
from lutjax.models._fields import check_names, one_of
from lutjax.models._samples import of_shape
from lutjax.models.packed import Packed, bits_of, by_samples, classes_of_bits, through_layers

with needed_by("lutjax.models.tree_net"):
    from flax import nnx

# Words of samples that go through all layers together.
_WORDS = 4
# Name: factor of all sizes, thresholds of a pixel, temperature of the votes, and a further factor of the layers of gates.
_CIFAR10 = {
    "S": (32, 3, 20.0, 1),
    "M": (256, 3, 40.0, 1),
    "B": (512, 31, 280.0, 2),
    "L": (1024, 31, 340.0, 2),
    "G": (2560, 31, 450.0, 1),
}
_MNIST = {"S": (16, 1, 6.5, 2), "M": (64, 1, 28.0, 2), "L": (1024, 1, 35.0, 1)}

TABLES = ("gates", *PARAMETERIZATIONS)
EDGES = ("right - left", "below - above", "right - 2 middle + left", "below - 2 middle + above")
"""Edges of each channel: first and second differences of neighbors."""

PerLayer = int | tuple[int, ...]
_PER_LAYER = ("depth", "kernel", "stride", "padding", "pool", "pool_padding", "channels_per_kernel")


@dataclasses.dataclass(frozen=True)
class LogicTreeNetConfig(Config):
    """The sizes of a `LogicTreeNet`.

    Depths of trees, sizes of windows, strides, paddings, pools and channels are numbers for all layers of trees, or tuples with one for each.

    Attributes:
      in_shape: height, width and channels of the images.
      n_classes: classes.
      kernels: trees of each layer of trees.
      layers: gates of each layer after these; those of the last vote for the classes and are a multiple of them.
      n_thresholds: bits that each number is made into, by thresholds of its channel; 0 where samples are bits already.
      edges: whether trees also read bits of edges and of curvature: of the first and second differences of neighboring pixels in rows and
        in columns, each made into as many bits. Beyond the border a pixel is the one at the border.
      depth: levels of gates of a tree.
      kernel: height and width of the windows that trees read.
      stride: from one window to the next.
      padding: pixels that are put around an image first.
      pool: height and width of the places that each output is the or of.
      pool_padding: places that are put around these first.
      channels_per_kernel: channels that a tree reads; 0 for all. Of all six see `lutjax.layers.nnx.LogicConv`.
      leaves: which values of a window trees read, balanced or random; see `lutjax.layers.nnx.LogicConv`.
      n_inputs: inputs of a gate (2) or of a table (up to 8).
      tables: what is trained of each gate. gates: 16 logits; light: the logits of the 4 corners of its table; walsh: their Walsh
        coefficients; raw: numbers from -1 to 1.
      residual: probability with which a gate starts by passing on its first input.
      wiring: which inputs the gates of `layers` read: balanced, unique, butterfly, random, top-k, full or learnable, see
        `lutjax.layers.nnx.LogicGates`.
      candidates: for each input of such a gate where wiring is top-k or learnable.
      learned_thresholds: whether thresholds are trained, each through the derivative of a sigmoid of its own.
      threshold_gradient: straight_through: what is learned from are bits; soft: it is those sigmoids, and bits once training is over. See
        `lutjax.layers.nnx.Thermometer`.
      estimator: soft, gumbel or straight_through; see `lutjax.layers.nnx.LogicGates`.
      tau: the votes for a class are divided by it.

    Raises:
      ValueError: a size is impossible.

    Source: docs/logic.md, section 8.

    Example:
      >>> from lutjax.models import LogicTreeNetConfig
      >>> config = LogicTreeNetConfig.cifar10("S")
      >>> config.kernels, config.layers, config.n_gates
      ((32, 128, 512, 1024), (40960, 20480, 10240), 83552)
      >>> LogicTreeNetConfig.from_dict(config.to_dict()) == config
      True
    """

    in_shape: tuple[int, int, int]
    n_classes: int
    kernels: tuple[int, ...] = (32, 128)
    layers: tuple[int, ...] = (2560, 1280)
    n_thresholds: int = 1
    depth: PerLayer = 3
    kernel: PerLayer = 3
    padding: PerLayer = 0
    pool: PerLayer = 2
    pool_padding: PerLayer = 0
    channels_per_kernel: PerLayer = 0
    tables: str = one_of(TABLES, "gates")
    residual: float | int = 0.9
    wiring: str = "balanced"
    candidates: int = 8
    estimator: str = one_of(LogicGatesSpec.estimators, "soft")
    tau: float | int = 1.0
    edges: bool = False
    learned_thresholds: bool = dataclasses.field(default=False, metadata=FOLLOWS)
    threshold_gradient: str = dataclasses.field(default="straight_through", metadata=FOLLOWS)
    stride: PerLayer = dataclasses.field(default=1, metadata=FOLLOWS)
    leaves: str = dataclasses.field(default="balanced", metadata=FOLLOWS)
    n_inputs: int = dataclasses.field(default=2, metadata=FOLLOWS)

    def __post_init__(self) -> None:
        super().__post_init__()
        where = type(self).__name__
        self._check_sizes(n_classes=2, n_thresholds=0, kernels=1, layers=1, candidates=1)
        self._check_most(n_thresholds=MOST_THRESHOLDS)
        depths = self.depth if isinstance(self.depth, tuple) else (self.depth,)
        if max(depths, default=0) > MOST_DEPTH:
            raise ValueError(f"{where}: depth is {self.depth}; it must be at most {MOST_DEPTH}.")
        if not 0 <= self.residual <= 1:
            raise ValueError(f"{where}: residual is {self.residual}; it is a probability, 0 to 1.")
        for name in ("kernels", "layers"):
            if not getattr(self, name):
                raise ValueError(f"{where}: {name} is empty; give at least one layer.")
        for name in _PER_LAYER:
            size = getattr(self, name)
            if isinstance(size, Sequence) and len(size) != len(self.kernels):
                raise ValueError(
                    f"{where}: {name} is {size}; expected one number, or one for each of the {len(self.kernels)} layers of trees."
                )
        if self.layers[-1] % self.n_classes:
            raise ValueError(
                f"{where}: the last of layers is {self.layers[-1]}; it must be a multiple of the {self.n_classes} classes."
            )
        check_names(self, f"{where}: ")
        if self.learned_thresholds and not self.n_thresholds:
            raise ValueError(f"{where}: learned_thresholds is True, but n_thresholds is 0: samples are bits.")
        if self.edges and not self.n_thresholds:
            raise ValueError(f"{where}: edges is True, but n_thresholds is 0: samples are bits.")
        check_threshold_gradient(where, self.threshold_gradient)
        if self.leaves not in LEAVES:
            raise ValueError(f"{where}: leaves is {shown(self.leaves)}; expected one of {', '.join(LEAVES)}.")
        if self.tables == "gates" and self.n_inputs != 2:
            raise ValueError(
                f"{where}: tables is 'gates', whose gates have 2 inputs, but n_inputs is {self.n_inputs}; use 'light'."
            )
        for arguments in self.gate_arguments():  # the layers check the rest
            (LogicGatesSpec if self.tables == "gates" else SoftLUTSpec)(**arguments)

    @classmethod
    def cifar10(cls, size: str = "S") -> "LogicTreeNetConfig":
        """Return the published network for CIFAR-10 of a size: ``"S"``, ``"M"``, ``"B"``, ``"L"`` or ``"G"``.

        B, L and G read bits of edges and of curvature, too. How these are made is a choice of this package; see `edges`.

        Raises:
          ValueError: there is no such size.
        """
        k, n_thresholds, tau, n = _published("cifar10", size, _CIFAR10)
        return cls(
            (32, 32, 3),
            10,
            kernels=(k, 4 * k, 16 * k, 32 * k),
            layers=(1280 * k * n, 640 * k * n, 320 * k * n),
            n_thresholds=n_thresholds,
            padding=1,
            channels_per_kernel=2,
            tau=tau,
            edges=n_thresholds > 3,
        )

    @classmethod
    def mnist(cls, size: str = "S") -> "LogicTreeNetConfig":
        """Return the published network for MNIST of a size: ``"S"``, ``"M"`` or ``"L"``.

        Raises:
          ValueError: there is no such size.
        """
        k, n_thresholds, tau, n = _published("mnist", size, _MNIST)
        return cls(
            (28, 28, 1),
            10,
            kernels=(k, 3 * k, 9 * k),
            layers=(1280 * k * n, 640 * k * n, 320 * k * n),
            n_thresholds=n_thresholds,
            kernel=(5, 3, 3),
            pool_padding=(0, 1, 1),
            tau=tau,
        )

    def tree_specs(self) -> list[LogicConvSpec]:
        """Return the specs of the layers of trees."""
        return [LogicConvSpec(**arguments) for arguments in self.tree_arguments()]

    def tree_arguments(self) -> list[dict[str, Any]]:
        """Return the arguments of each layer of trees."""
        height, width, _ = self.in_shape
        shape, every = (height, width, self.n_maps * max(self.n_thresholds, 1)), []
        for i, n_kernels in enumerate(self.kernels):
            sizes: dict[str, Any] = {}
            for name in _PER_LAYER:
                size = getattr(self, name)
                sizes[name] = size if isinstance(size, int) else size[i]
            sizes["channels_per_kernel"] = sizes["channels_per_kernel"] or None
            sizes |= {"wiring": self.leaves, "n_inputs": self.n_inputs, "parameterization": self.tables}
            every.append({"in_shape": shape, "n_kernels": n_kernels, **sizes, **self._options()})
            shape = LogicConvSpec(**every[-1]).out_shape
        return every

    def gate_arguments(self) -> list[dict[str, Any]]:
        """Return the arguments of each layer of gates: of `LogicGates`, or of `SoftLUT` where gates are tables."""
        kind: dict[str, Any] = {"wiring": self.wiring, "candidates": self.candidates}
        kind |= {} if self.tables == "gates" else {"n_inputs": self.n_inputs, "parameterization": self.tables}
        sizes = (math.prod(self.tree_specs()[-1].out_shape), *self.layers)
        return [
            {"in_features": n_in, "out_features": n_out, **kind, **self._options()}
            for n_in, n_out in itertools.pairwise(sizes)
        ]

    def _options(self) -> dict[str, Any]:
        options = {"estimator": self.estimator, "feature_axis": 0}
        if self.tables == "gates":
            return {**options, "logits_init": residual_gates(self.residual)}
        return {**options, "table_init": residual_table(self.residual, self.tables)}

    @property
    def n_maps(self) -> int:
        """Number of maps that become bits: channels, and the edges of each."""
        return self.in_shape[2] * (1 + len(EDGES) if self.edges else 1)

    @property
    def n_gates(self) -> int:
        """Number of gates that are trained. A tree is at many places of the image."""
        return sum(sum(spec.levels) for spec in self.tree_specs()) + sum(self.layers)

    @property
    def n_gates_at_places(self) -> int:
        """Number of gates of the circuit before it is simplified, those of trees at all places of the image."""
        return sum(sum(spec.levels) * math.prod(spec.places) for spec in self.tree_specs()) + sum(self.layers)


def _published(
    name: str, size: str, sizes: dict[str, tuple[int, int, float, int]]
) -> tuple[int, int, float, int]:
    if size not in sizes:
        raise ValueError(f"LogicTreeNetConfig.{name}: size is {size!r}; expected one of {tuple(sizes)}.")
    return sizes[size]


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
        """The hard network on 32 samples a word. It does not follow later changes of this model."""
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

    result: jax.Array = _meshes.divided_by_compiler(maps_of, _meshes.spec_of)(x)
    return result


def _features_first(x: Array, config: LogicTreeNetConfig) -> jax.Array:
    """Return images ``[..., height, width, channels]`` as ``[channels, height, width, ...]``."""
    x = of_shape("LogicTreeNet", x, config.in_shape)
    return jnp.moveaxis(jnp.asarray(x), (-1, -3, -2), (0, 1, 2))
