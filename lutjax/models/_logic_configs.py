"""Logic model configs, importable without JAX."""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

from lutjax.arguments import format_value
from lutjax.models._config import FOLLOWS, MOST_DEPTH, MOST_THRESHOLDS, Config
from lutjax.models._fields import check_names, one_of
from lutjax.names import ESTIMATORS, PARAMETERIZATIONS

N_NEIGHBORS = 8

CLASSIFIER_TABLES = ("gates", "light", "walsh", "raw", "binary")
TREE_TABLES = ("gates", *PARAMETERIZATIONS)
EDGES = ("right - left", "below - above", "right - 2 middle + left", "below - 2 middle + above")
"""Edges per channel: first and second differences between neighbors."""

PerLayer = int | tuple[int, ...]
_PER_LAYER = ("depth", "kernel", "stride", "padding", "pool", "pool_padding", "channels_per_kernel")
# Name: factor of all sizes, thresholds of a pixel, temperature of the votes, and a further factor
# of the layers of gates.
_CIFAR10 = {
    "S": (32, 3, 20.0, 1),
    "M": (256, 3, 40.0, 1),
    "B": (512, 31, 280.0, 2),
    "L": (1024, 31, 340.0, 2),
    "G": (2560, 31, 450.0, 1),
}
_MNIST = {"S": (16, 1, 6.5, 2), "M": (64, 1, 28.0, 2), "L": (1024, 1, 35.0, 1)}


def _check_bits(config: Any, kind: str) -> None:
    """Raise ValueError if fields for input bits and gates contradict each other."""
    from lutjax.models._encoder import check_threshold_gradient

    where = type(config).__name__
    for name in ("learned_thresholds", "edges"):
        if getattr(config, name) and not config.n_thresholds:
            raise ValueError(f"{where}: {name} is True, but n_thresholds is 0: samples are bits.")
    check_threshold_gradient(where, config.threshold_gradient)
    if kind == "gates" and config.n_inputs != 2:
        raise ValueError(
            f"{where}: tables is 'gates' and n_inputs is {config.n_inputs}; gates have 2 inputs. "
            "Use 'light'."
        )


@dataclasses.dataclass(frozen=True)
class LogicClassifierConfig(Config):
    """The sizes of a `LogicClassifier`.

    Attributes:
      in_features: numbers of a sample, such as the pixels of an image.
      n_classes: number of classes; 1 for regression.
      layers: gates or tables per layer. The last layer votes for the classes; its size is a
        multiple of their number.
      n_thresholds: bits per input number; 0 for binary samples.
      n_inputs: inputs per gate (2) or table (2 to 8).
      tables: trained form per gate or table. gates: 16 logits, for 2 inputs. light: one logit per
        table entry, 4 for a gate. walsh: Walsh coefficients. raw: numbers from -1 to 1. binary:
        tables with binary addresses, also in training. Default: gates for 2 inputs, else light.
      residual: initial preference for passing on the first input. It is the logit of that gate, or
        of table entries; deep networks need a larger one, and binary tables ignore it. Default: 2
        for gates, 0 for tables.
      noise: initial standard deviation.
      wiring: balanced, unique, butterfly, random, top-k, full or learnable. See
        `lutjax.layers.nnx.LogicGates`; the first layer may also read windows of an image, see
        `lutjax.wiring.Windows`. Several names separated by commas apply to the first layers, and
        the last name to all further layers, as in windows,balanced.
      candidates: candidate wires per input, for top-k and learnable wiring.
      image_shape: image height, width and channels, for windows, edges and circuit pages.
      window: window height and width.
      edges: add bits for edges and curvature of images. They are first and second differences of
        neighboring pixels in rows and columns, each with as many bits; the image is extended by its
        border pixels.
      learned_thresholds: train thresholds, each through the derivative of its own sigmoid.
      threshold_gradient: straight_through trains on bits, soft on sigmoids that become bits after
        training. See `lutjax.layers.nnx.Thermometer`.
      reduce: inputs per table in layers that reduce votes before counting. The tables are trained
        and start as majorities; (3, 6) turns 200 votes per class into 12.
      estimator: gate gradient estimator. See `lutjax.layers.nnx.LogicGates`. Binary tables have
        their own.
      tau: vote temperature. It divides the votes.
      regression: learn a number instead of a class. The number is the count of ones in the last
        layer times `scale`, plus `offset`.
      scale, offset: of that number. Training derives both from the range of the training part.

    Raises:
      ValueError: a size is impossible.

    Source: docs/logic.md, sections 3 and 4.

    Example:
      >>> from lutjax.models import LogicClassifierConfig
      >>> config = LogicClassifierConfig(in_features=64, n_classes=10, layers=(500, 500))
      >>> LogicClassifierConfig.from_dict(config.to_dict()) == config
      True
    """

    in_features: int
    n_classes: int
    layers: tuple[int, ...] = (2000, 2000, 2000)
    n_thresholds: int = 3
    n_inputs: int = 2
    tables: str | None = one_of(CLASSIFIER_TABLES, None)
    residual: float | int | None = None
    noise: float | int = 1.0
    wiring: str = "balanced"
    candidates: int = 8
    image_shape: tuple[int, ...] = ()
    window: int = 5
    edges: bool = False
    estimator: str = one_of(ESTIMATORS, "soft")
    tau: float | int = 4.0
    learned_thresholds: bool = dataclasses.field(default=False, metadata=FOLLOWS)
    regression: bool = dataclasses.field(default=False, metadata=FOLLOWS)
    scale: float | int = dataclasses.field(default=1.0, metadata=FOLLOWS)
    offset: float | int = dataclasses.field(default=0.0, metadata=FOLLOWS)
    reduce: tuple[int, ...] = ()
    threshold_gradient: str = dataclasses.field(default="straight_through", metadata=FOLLOWS)

    def __post_init__(self) -> None:
        super().__post_init__()
        where = "LogicClassifierConfig"
        least = 1 if self.regression else 2
        self._check_sizes(
            in_features=1, n_classes=least, n_thresholds=0, candidates=1, image_shape=1, window=1
        )
        check_names(self, f"{where}: ")
        self._check_most(n_thresholds=MOST_THRESHOLDS)
        if not 0 <= self.noise < float("inf"):
            raise ValueError(f"{where}: noise is {self.noise}; it must not be negative.")
        if self.regression and self.n_classes != 1:
            raise ValueError(
                f"{where}: regression is True and n_classes is {self.n_classes}; "
                "n_classes must be 1."
            )
        if not math.isfinite(self.scale) or not math.isfinite(self.offset) or not self.scale:
            raise ValueError(
                f"{where}: scale is {self.scale} and offset {self.offset}; both must be finite, "
                "and scale nonzero."
            )
        if not self.layers or min(self.layers) < 1:
            raise ValueError(
                f"{where}: layers is {self.layers}; each layer needs at least one gate."
            )
        if self.layers[-1] % self.n_classes:
            raise ValueError(
                f"{where}: the last of layers is {self.layers[-1]}; it must be a multiple of the "
                f"{self.n_classes} classes, such as "
                f"{-(-self.layers[-1] // self.n_classes) * self.n_classes}."
            )
        _check_bits(self, self.kind)
        self._check_reduce()
        if "windows" in self._wirings[1:] or len(self.layers) < len(self._wirings):
            raise ValueError(
                f"{where}: wiring is {self.wiring!r} for {len(self.layers)} layers; windows are "
                "for the first layer. Give at most one wiring per layer, such as windows,balanced."
            )
        n_pixels = math.prod(self.image_shape or (0,))
        if self._wirings[0] == "windows" and n_pixels != self.in_features:
            raise ValueError(
                f"{where}: wiring is {self.wiring!r} and image_shape is {self.image_shape}; "
                f"expected the height, width and optional channels of {self.in_features} "
                "in_features."
            )
        if self.edges:
            self._check_edges()
        # The layers check the rest; abstract ones cost nothing.
        from flax import nnx

        from lutjax.models._classifier_layers import layers_of

        nnx.eval_shape(lambda: layers_of(self, rngs=nnx.Rngs(0)))

    def _check_edges(self) -> None:
        where = "LogicClassifierConfig"
        if self._wirings[0] == "windows":
            raise ValueError(
                f"{where}: edges is True and wiring is {self.wiring!r}; windows support only "
                "pixels. Omit one."
            )
        if len(self.image_shape) not in (2, 3) or math.prod(self.image_shape) != self.in_features:
            raise ValueError(
                f"{where}: edges is True and image_shape is {self.image_shape}; expected the "
                f"height, width and optional channels of {self.in_features} in_features."
            )

    def _check_reduce(self) -> None:
        from lutjax.circuits.truth import MAX_INPUTS

        where, size = "LogicClassifierConfig", self.layers[-1] // self.n_classes
        if self.reduce and self.regression:
            raise ValueError(
                f"{where}: reduce is {self.reduce} and regression is True; regression counts all "
                "bits. Omit one."
            )
        if self.reduce and self.kind == "binary":
            raise ValueError(
                f"{where}: reduce is {self.reduce} and tables is 'binary'; reducing tables are "
                "trained as logits. Choose another kind."
            )
        for n_inputs in self.reduce:
            if not 2 <= n_inputs <= min(size, MAX_INPUTS):
                raise ValueError(
                    f"{where}: reduce is {self.reduce}; a table reads 2 to {MAX_INPUTS} votes of "
                    f"its class, which has {size} at {n_inputs}."
                )
            size = -(-size // n_inputs)

    @property
    def n_encoded(self) -> int:
        """Number of values with bits: the inputs, and the edges of images."""
        return self.in_features * (1 + len(EDGES) if self.edges else 1)

    @property
    def _wirings(self) -> list[str]:
        return self.wiring.split(",")

    @property
    def reducing(self) -> tuple[int, ...]:
        """Tables in each layer that reduces the votes, over all classes."""
        sizes, size = [], self.layers[-1] // self.n_classes
        for n_inputs in self.reduce:
            size = -(-size // n_inputs)
            sizes.append(size * self.n_classes)
        return tuple(sizes)

    def wiring_of(self, layer: int) -> Any:
        """Return a gate layer's wiring for `lutjax.layers.nnx.LogicGates`; layers count from 0."""
        name = self._wirings[min(layer, len(self._wirings) - 1)]
        if name != "windows":
            return name
        height, width, channels = (*self.image_shape, 1)[:3]
        from lutjax.wiring import Windows

        return Windows((height, width, channels * max(self.n_thresholds, 1)), self.window)

    @property
    def kind(self) -> str:
        """Trained form of the gates or tables, one of `CLASSIFIER_TABLES`."""
        return self.tables or ("gates" if self.n_inputs == 2 else "light")


@dataclasses.dataclass(frozen=True)
class LogicTreeNetConfig(Config):
    """The sizes of a `LogicTreeNet`.

    Depths of trees, sizes of windows, strides, paddings, pools and channels are numbers for all
    layers of trees, or tuples with one for each.

    Attributes:
      in_shape: height, width and channels of the images.
      n_classes: number of classes.
      kernels: trees per tree layer.
      layers: gates per layer after the trees. The last layer votes for the classes; its size is a
        multiple of their number.
      n_thresholds: bits per input number; 0 for binary samples. Thresholds are shared by all pixels
        of a channel.
      edges: add bits for edges and curvature. They are first and second differences of neighboring
        pixels in rows and columns, each with as many bits; the image is extended by its border
        pixels.
      depth: gate levels per tree.
      kernel: window height and width per tree.
      stride: distance between windows.
      padding: image padding in pixels.
      pool: OR pooling height and width.
      pool_padding: pooling padding.
      channels_per_kernel: input channels per tree; 0 for all. See `lutjax.layers.nnx.LogicConv`.
      leaves: window pixels of trees, balanced or random. See `lutjax.layers.nnx.LogicConv`.
      n_inputs: inputs per gate (2) or table (2 to 8).
      tables: trained form per gate. gates: 16 logits. light: one logit for each of 4 table entries.
        walsh: Walsh coefficients. raw: numbers from -1 to 1.
      residual: initial probability that a gate passes on its first input.
      wiring: gate wiring after the trees. balanced, unique, butterfly, random, top-k, full or
        learnable; see `lutjax.layers.nnx.LogicGates`.
      candidates: candidate wires per input, for top-k and learnable wiring.
      learned_thresholds: train thresholds, each through the derivative of its own sigmoid.
      threshold_gradient: straight_through trains on bits, soft on sigmoids that become bits after
        training. See `lutjax.layers.nnx.Thermometer`.
      estimator: gate gradient estimator. See `lutjax.layers.nnx.LogicGates`.
      tau: vote temperature. It divides the votes.

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
    tables: str = one_of(TREE_TABLES, "gates")
    residual: float | int = 0.9
    wiring: str = "balanced"
    candidates: int = 8
    estimator: str = one_of(ESTIMATORS, "soft")
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
                    f"{where}: {name} is {size}; expected one number, or one per tree layer "
                    f"({len(self.kernels)})."
                )
        if self.layers[-1] % self.n_classes:
            raise ValueError(
                f"{where}: the last of layers is {self.layers[-1]}; it must be a multiple of the "
                f"{self.n_classes} classes."
            )
        check_names(self, f"{where}: ")
        _check_bits(self, self.tables)
        from lutjax.layers.specifications import LEAVES, LogicGatesSpec, SoftLUTSpec

        if self.leaves not in LEAVES:
            raise ValueError(
                f"{where}: leaves is {format_value(self.leaves)}; "
                f"expected one of {', '.join(LEAVES)}."
            )
        for arguments in self.gate_arguments():  # the layers check the rest
            (LogicGatesSpec if self.tables == "gates" else SoftLUTSpec)(**arguments)

    @classmethod
    def cifar10(cls, size: str = "S") -> "LogicTreeNetConfig":
        """Return the published CIFAR-10 network.

        Sizes are ``"S"``, ``"M"``, ``"B"``, ``"L"`` and ``"G"``. B, L and G also read edge and
        curvature bits, in this package's own definition; see `edges`.

        Raises:
          ValueError: unknown size.
        """
        k, n_thresholds, tau, n = _published_size("cifar10", size, _CIFAR10)
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
        """Return the published MNIST network: size ``"S"``, ``"M"`` or ``"L"``.

        Raises:
          ValueError: unknown size.
        """
        k, n_thresholds, tau, n = _published_size("mnist", size, _MNIST)
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

    def tree_specs(self) -> list[Any]:
        """Return the tree layer specs."""
        from lutjax.layers.specifications import LogicConvSpec

        return [LogicConvSpec(**arguments) for arguments in self.tree_arguments()]

    def tree_arguments(self) -> list[dict[str, Any]]:
        """Return each tree layer's arguments."""
        from lutjax.layers.specifications import LogicConvSpec

        height, width, _ = self.in_shape
        shape, every = (height, width, self.n_maps * max(self.n_thresholds, 1)), []
        for i, n_kernels in enumerate(self.kernels):
            sizes: dict[str, Any] = {}
            for name in _PER_LAYER:
                size = getattr(self, name)
                sizes[name] = size if isinstance(size, int) else size[i]
            sizes["channels_per_kernel"] = sizes["channels_per_kernel"] or None
            sizes |= {"wiring": self.leaves, "n_inputs": self.n_inputs}
            sizes["parameterization"] = self.tables
            every.append({"in_shape": shape, "n_kernels": n_kernels, **sizes, **self._options()})
            shape = LogicConvSpec(**every[-1]).out_shape
        return every

    def gate_arguments(self) -> list[dict[str, Any]]:
        """Return each gate layer's arguments for `LogicGates` or, with tables, `SoftLUT`."""
        kind: dict[str, Any] = {"wiring": self.wiring, "candidates": self.candidates}
        if self.tables != "gates":
            kind |= {"n_inputs": self.n_inputs, "parameterization": self.tables}
        sizes = (math.prod(self.tree_specs()[-1].out_shape), *self.layers)
        return [
            {"in_features": n_in, "out_features": n_out, **kind, **self._options()}
            for n_in, n_out in itertools.pairwise(sizes)
        ]

    def _options(self) -> dict[str, Any]:
        from lutjax.layers.initializers import residual_gates, residual_table

        options = {"estimator": self.estimator, "feature_axis": 0}
        if self.tables == "gates":
            return {**options, "logits_init": residual_gates(self.residual)}
        return {**options, "table_init": residual_table(self.residual, self.tables)}

    @property
    def n_maps(self) -> int:
        """Number of binarized maps: channels, and each channel's edges."""
        return self.in_shape[2] * (1 + len(EDGES) if self.edges else 1)

    @property
    def n_gates(self) -> int:
        """Number of trained gates. A tree's gates count once for all image positions."""
        return sum(sum(spec.levels) for spec in self.tree_specs()) + sum(self.layers)

    @property
    def n_gates_at_places(self) -> int:
        """Number of circuit gates before simplification, with trees at all image positions."""
        of_trees = (sum(spec.levels) * math.prod(spec.places) for spec in self.tree_specs())
        return sum(of_trees) + sum(self.layers)


def _published_size(
    name: str, size: str, sizes: dict[str, tuple[int, int, float, int]]
) -> tuple[int, int, float, int]:
    if size not in sizes:
        raise ValueError(
            f"LogicTreeNetConfig.{name}: size is {size!r}; expected one of {tuple(sizes)}."
        )
    return sizes[size]


@dataclasses.dataclass(frozen=True)
class LogicCAConfig(Config):
    """The sizes of a `LogicCA`.

    Attributes:
      channels: bits per cell.
      kernels: perception circuits. Each reads every channel of the 3x3 neighborhood.
      perception: gates per perception layer. The first layer has 8, one per neighbor of the cell.
      update: gates per update layer. The last layer has one gate per channel.
      periodic: wrap the grid around its edges. Otherwise cells beyond an edge are 0.
      update_rate: probability that a cell updates in a step. 1 is the synchronous automaton.
      residual: initial logit of passing on the first input.

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
                raise ValueError(
                    f"{where}: {name} is {getattr(self, name)}; it must be at least 1."
                )
        for name in ("perception", "update"):
            if not getattr(self, name) or min(getattr(self, name)) < 1:
                raise ValueError(
                    f"{where}: {name} is {getattr(self, name)}; each layer needs at least one gate."
                )
        if self.perception[0] != N_NEIGHBORS:
            raise ValueError(
                f"{where}: perception is {format_value(self.perception)}; it must start with "
                f"{N_NEIGHBORS}, one gate per neighbor."
            )
        if self.update[-1] != self.channels:
            raise ValueError(
                f"{where}: update is {format_value(self.update)}; it must end with "
                f"{self.channels}, one gate per channel."
            )
        if not 0 < self.update_rate <= 1:
            raise ValueError(
                f"{where}: update_rate is {self.update_rate}; it is a probability above 0, up to 1."
            )

    @property
    def sizes(self) -> tuple[int, ...]:
        """Gates per layer, over all kernels."""
        return (*(self.kernels * n for n in self.perception), *self.update)

    @property
    def n_gates(self) -> int:
        """Total gates; a perception circuit counts once for all channels."""
        return sum(self.sizes)

    @property
    def wired(self) -> tuple[tuple[int, int, int], ...]:
        """Copies, inputs and gates for every layer but the first."""
        perceived = self.channels * (1 + self.kernels * self.perception[-1])
        return (
            *(
                (self.kernels, *sizes)
                for sizes in zip(self.perception, self.perception[1:], strict=False)
            ),
            *((1, *sizes) for sizes in zip((perceived, *self.update), self.update, strict=False)),
        )
