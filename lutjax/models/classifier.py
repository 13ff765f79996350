"""A classifier made of logic gates, or of tables over bits."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Float

from lutjax import wiring as wirings
from lutjax._extras import needed_by
from lutjax._typing import Array
from lutjax.circuits import Builder, Circuit, Format
from lutjax.circuits._layers import of_layers
from lutjax.circuits.columns import Columns
from lutjax.circuits.truth import MAX_INPUTS
from lutjax.dispatch.registry import Implementation
from lutjax.layers._logic import LogicGatesSpec
from lutjax.layers._spec import Initializer
from lutjax.layers.initializers import residual_gates, residual_table
from lutjax.layers.nnx import BinaryLUT, GroupSum, LogicGates, SoftLUT
from lutjax.layers.nnx._logic import in_sequence
from lutjax.models._circuits import WithCircuit
from lutjax.models._config import FOLLOWS, MOST_THRESHOLDS, Config, require_arguments
from lutjax.models._encoder import check_threshold_gradient, encoder_of
from lutjax.models._fields import check_names, one_of
from lutjax.models._samples import of_shape
from lutjax.models.packed import PackedClassifier, number_of, outputs_of

with needed_by("lutjax.models.classifier"):
    from flax import nnx

TABLES = ("gates", "light", "walsh", "raw", "binary")


@dataclasses.dataclass(frozen=True)
class LogicClassifierConfig(Config):
    """The sizes of a `LogicClassifier`.

    Attributes:
      in_features: numbers of a sample, such as the pixels of an image.
      n_classes: classes; 1 where a number is learned.
      layers: gates (or tables) of each layer; those of the last vote for the classes and are a multiple of them.
      n_thresholds: bits that each number is made into; 0 where samples are bits already.
      n_inputs: inputs of a gate (2) or of a table (up to 8).
      tables: what is trained of each. gates: 16 logits, for 2 inputs; light: the logit of each corner of a table, 4 for a gate;
        walsh: their Walsh coefficients; raw: numbers from -1 to 1; binary: tables addressed by bits already while
        training. Default: gates for 2 inputs, else light.
      residual: what the first values have for passing on the first input: the logit of that gate, or of corners.
        Deep networks need more of it. Default: 2 for gates, 0 for tables. Binary tables have first values of their
        own.
      noise: standard deviation of the first values.
      wiring: which inputs gates read: balanced, unique, butterfly, random, top-k, full or learnable, see
        `lutjax.layers.nnx.LogicGates`; or windows of an image, see `lutjax.wiring.Windows`. Several with commas are those of the first
        layers, and the last of them is that of all further layers, such as windows,balanced.
      candidates: for each input of a gate where wiring is top-k or learnable.
      image_shape: height, width and perhaps channels of a sample that is an image, for windows and for pages of circuits.
      window: height and width of windows.
      learned_thresholds: whether thresholds are trained, each through the derivative of a sigmoid of its own.
      threshold_gradient: straight_through: what is learned from are bits; soft: it is those sigmoids, and bits once training is over. See
        `lutjax.layers.nnx.Thermometer`.
      reduce: inputs of the tables that make fewer votes of those of each class before they are counted, layer by layer; they are trained, and start as
        majorities. (3, 6) makes 12 of 200. Default: none, and all votes are counted.
      estimator: soft, gumbel or straight_through; see `lutjax.layers.nnx.LogicGates`. Binary tables have their own.
      tau: the votes for a class are divided by it.
      regression: whether a number is learned in place of a class: how many of the last layer's bits are 1, times `scale`, plus `offset`.
      scale, offset: of that number. Training takes them from the training part, so that no bits give its least number and all bits its largest.

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
    tables: str | None = one_of(TABLES, None)
    residual: float | int | None = None
    noise: float | int = 1.0
    wiring: str = "balanced"
    candidates: int = 8
    image_shape: tuple[int, ...] = ()
    window: int = 5
    estimator: str = one_of(LogicGatesSpec.estimators, "soft")
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
                f"{where}: regression is True and n_classes is {self.n_classes}; a number has no classes: n_classes must be 1."
            )
        if not math.isfinite(self.scale) or not math.isfinite(self.offset) or not self.scale:
            raise ValueError(
                f"{where}: scale is {self.scale} and offset {self.offset}; they must be finite, and scale not 0."
            )
        if not self.layers or min(self.layers) < 1:
            raise ValueError(
                f"{where}: layers is {self.layers}; give at least one layer of at least one gate."
            )
        if self.layers[-1] % self.n_classes:
            raise ValueError(
                f"{where}: the last of layers is {self.layers[-1]}; it must be a multiple of the {self.n_classes} "
                f"classes, such as {-(-self.layers[-1] // self.n_classes) * self.n_classes}."
            )
        if self.kind == "gates" and self.n_inputs != 2:
            raise ValueError(
                f"{where}: tables is 'gates', whose gates have 2 inputs, but n_inputs is {self.n_inputs}; use 'light'."
            )
        self._check_reduce()
        if self.learned_thresholds and not self.n_thresholds:
            raise ValueError(f"{where}: learned_thresholds is True, but n_thresholds is 0: samples are bits.")
        check_threshold_gradient(where, self.threshold_gradient)
        if any(name == "windows" for name in self._wirings[1:]) or (len(self.layers) < len(self._wirings)):
            raise ValueError(
                f"{where}: wiring is {self.wiring!r} for {len(self.layers)} layers; windows are for the first layer, and each layer has one "
                "wiring, such as windows,balanced."
            )
        if self._wirings[0] == "windows" and math.prod(self.image_shape or (0,)) != self.in_features:
            raise ValueError(
                f"{where}: wiring is {self.wiring!r} and image_shape is {self.image_shape}; expected the height, width and perhaps channels "
                f"of an image of in_features {self.in_features} values."
            )
        # The layers check the rest; abstract ones cost nothing.
        nnx.eval_shape(lambda: LogicClassifier(self, rngs=nnx.Rngs(0)))

    def _check_reduce(self) -> None:
        where, size = "LogicClassifierConfig", self.layers[-1] // self.n_classes
        if self.reduce and self.regression:
            raise ValueError(
                f"{where}: reduce is {self.reduce}, but regression is True, where all bits are counted; leave one of both out."
            )
        if self.reduce and self.kind == "binary":
            raise ValueError(
                f"{where}: reduce is {self.reduce}, but tables is 'binary', and tables that reduce votes are trained as logits; choose another kind."
            )
        for n_inputs in self.reduce:
            if not 2 <= n_inputs <= min(size, MAX_INPUTS):
                raise ValueError(
                    f"{where}: reduce is {self.reduce}; a table reads 2 to {MAX_INPUTS} votes of its class, and at {n_inputs} a class has {size}."
                )
            size = -(-size // n_inputs)

    @property
    def _wirings(self) -> list[str]:
        return self.wiring.split(",")

    @property
    def reducing(self) -> tuple[int, ...]:
        """Tables of each layer that makes fewer votes of the votes of all classes."""
        sizes, size = [], self.layers[-1] // self.n_classes
        for n_inputs in self.reduce:
            size = -(-size // n_inputs)
            sizes.append(size * self.n_classes)
        return tuple(sizes)

    def wiring_of(self, layer: int) -> str | wirings.Windows:
        """Return the wiring of a layer of gates, counted from 0, as `lutjax.layers.nnx.LogicGates` takes it."""
        name = self._wirings[min(layer, len(self._wirings) - 1)]
        if name != "windows":
            return name
        height, width, channels = (*self.image_shape, 1)[:3]
        return wirings.Windows((height, width, channels * max(self.n_thresholds, 1)), self.window)

    @property
    def kind(self) -> str:
        """The trained form of each gate or table, one of `TABLES`."""
        return self.tables or ("gates" if self.n_inputs == 2 else "light")


class LogicClassifier(WithCircuit, nnx.Module):
    """Classes of samples by the votes of logic gates, or a number (regression) by how many bits are 1.

    Each number of a sample becomes bits, gates (or tables) combine bits layer by layer, and those of the last layer
    vote: class k gets the sum of the k-th group of them, which trained tables may have made fewer. With ``config.regression`` there is one group, and the
    answer is its sum times ``config.scale`` plus ``config.offset``. Trained soft, it is a circuit of that many gates: with
    ``deterministic=True`` bits go through the gates that were chosen, and `packed` runs that on 32 samples a word.

    State: what the layers hold; see `lutjax.layers.nnx.LogicGates`. `nnx.Param` are the gates, and thresholds if they are
    learned; wires are kept with them and not trained.

    Args:
      config: the sizes.
      thresholds: ``[in_features, n_thresholds]``, from `lutjax.thermometer_thresholds`; by default evenly in (0, 1).
      widths: ``[in_features]``, of the sigmoids through which thresholds are learned, in units of each number; by default the
        distances between thresholds. See `lutjax.layers.nnx.Thermometer`.
      implementation: which implementation runs the ops; see `lutjax.logic_gates`.
      rngs: its ``params`` stream draws everything, its ``gates`` stream the noise of the estimator gumbel.

    Raises:
      ValueError: thresholds do not fit, or are given for bits.

    Source: docs/logic.md, sections 3 and 4.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from lutjax.models import LogicClassifier, LogicClassifierConfig
      >>> config = LogicClassifierConfig(in_features=4, n_classes=2, layers=(20, 20))
      >>> model = LogicClassifier(config, rngs=nnx.Rngs(0))
      >>> x = jnp.array([[0.1, 0.4, 0.6, 0.9]])
      >>> model(x).shape
      (1, 2)
      >>> bool(model.packed()(x)[0] == model(x, deterministic=True).argmax())
      True
    """

    def __init__(
        self,
        config: LogicClassifierConfig,
        *,
        thresholds: Array | None = None,
        widths: Array | None = None,
        implementation: Implementation = None,
        rngs: nnx.Rngs,
    ):
        require_arguments(self, config, LogicClassifierConfig, rngs)
        self.config = config
        self.encoder: Any = nnx.data(None)
        self.encoder = encoder_of("LogicClassifier", config, config.in_features, thresholds, widths)
        n_bits = config.in_features * max(config.n_thresholds, 1)
        self.layers: Any = nnx.List()
        for number, size in enumerate(config.layers):
            last = number == len(config.layers) - 1
            options: dict[str, Any] = {"implementation": implementation, "feature_axis": 0}
            options |= {"wiring": config.wiring_of(number), "candidates": config.candidates}
            self.layers.append(_layer(config, n_bits, size, last=last, rngs=rngs, **options))
            n_bits = size
        for n_inputs in config.reduce:
            wires = _wires_of_classes(n_bits, config.n_classes, n_inputs)
            self.layers.append(_reducing(config, n_bits, wires, implementation=implementation, rngs=rngs))
            n_bits = len(wires)
        tau = 1.0 if config.regression else config.tau
        self.votes = GroupSum(config.n_classes, tau, feature_axis=0)

    def __call__(
        self,
        x: Float[Array, "..."],
        *,
        deterministic: bool | None = None,
        temperature: Float[Array, ""] | float | None = None,
        rngs: nnx.Rngs | None = None,
    ) -> Float[jax.Array, "..."]:
        """Logits of the classes, votes over tau: ``[..., n_classes]``; of regression numbers ``[...]``.

        Args:
          x: ``[..., in_features]`` of a floating-point dtype, or batches of images with as many numbers; bits of 0 and 1 where there are no
            thresholds.
          deterministic: whether to run the hard network; takes precedence over the model's own mode, soft unless
            `nnx.view` or `eval` changed it.
          temperature: of all gates, in place of 1; it may be traced. See `lutjax.layers.nnx.LogicGates`.
          rngs: for the noise of the estimator gumbel, in place of the model's own.

        Raises:
          ValueError: samples have another size.
        """
        x = of_shape("LogicClassifier", x, (self.config.in_features,))
        y = jnp.moveaxis(jnp.asarray(x), -1, 0)  # features first: the fast layout
        if self.encoder is not None:
            y = self.encoder(y, deterministic=deterministic)
        y = in_sequence(self.layers, y, deterministic=deterministic, temperature=temperature, rngs=rngs)
        votes = self.votes(y)
        if self.config.regression:
            return number_of(self.config, votes[0])
        return jnp.moveaxis(votes, 0, -1)

    def packed(self) -> PackedClassifier:
        """The hard network on 32 samples a word. It does not follow later changes of this model."""
        return pack(self)

    def _circuit(
        self,
        builder: Builder,
        *,
        inputs: str | Format | Columns,
        outputs: str | None,
        about: Mapping[str, Any],
    ) -> Circuit:
        """Return the circuit of the layers, for `lutjax.circuits.from_model`."""
        encoder = [] if self.encoder is None else [self.encoder]
        layers = [*encoder, *self.layers, self.votes]
        outputs, facts = outputs_of(self.config, outputs)
        return of_layers(layers, builder, inputs=inputs, outputs=outputs, about={**facts, **about})


def pack(classifier: LogicClassifier) -> PackedClassifier:
    """The hard network of a classifier as it is now, on 32 samples a word.

    Source: docs/logic.md, section 7.
    """
    tables = [layer.truth_tables() for layer in classifier.layers]
    thresholds = None if classifier.encoder is None else classifier.encoder.thresholds[...]
    return PackedClassifier(
        truth=tuple(truth for _, truth in tables),
        wires=tuple(wires for wires, _ in tables),
        thresholds=thresholds,
        config=classifier.config,
    )


def _layer(
    config: LogicClassifierConfig, n_in: int, n_out: int, *, last: bool, rngs: nnx.Rngs, **options: Any
) -> LogicGates | SoftLUT | BinaryLUT:
    kind = config.kind
    if kind == "binary":
        # Values of the last tables are summed as they are; what others read is a bit.
        estimator = "soft" if last else "straight_through"
        return BinaryLUT(n_in, n_out, n_inputs=config.n_inputs, estimator=estimator, rngs=rngs, **options)
    options |= {"estimator": config.estimator, "rngs": rngs}
    if kind == "gates":
        strength = 2.0 if config.residual is None else config.residual
        init = _WithNoise(residual_gates(strength=strength), config.noise)
        return LogicGates(n_in, n_out, logits_init=init, **options)
    probability = 1 / (1 + math.exp(-(config.residual or 0.0)))
    init = _WithNoise(residual_table(probability, kind), config.noise)
    return SoftLUT(n_in, n_out, n_inputs=config.n_inputs, parameterization=kind, table_init=init, **options)


def _wires_of_classes(n_votes: int, n_classes: int, n_inputs: int) -> np.ndarray:
    """Return wires of tables that each read votes of one class, in their order: int32 ``[tables, n_inputs]``, as many for each class.

    The last table of a class reads its first votes again where its votes are no multiple of the inputs.
    """
    size = n_votes // n_classes
    within = np.arange(-(-size // n_inputs) * n_inputs, dtype=np.int32) % size
    wires: np.ndarray = np.arange(n_classes, dtype=np.int32)[:, None] * size + within
    return wires.reshape(-1, n_inputs)


@dataclasses.dataclass(frozen=True)
class _Majority:
    """Initializer of logits of tables ``[gates, 2**inputs]`` that answer as most of their inputs do: from minus to plus a number."""

    most: float

    def __call__(self, key: Array, shape: tuple[int, ...], dtype: DTypeLike = jnp.float32) -> jax.Array:
        n_inputs = shape[-1].bit_length() - 1
        shares = np.bitwise_count(np.arange(shape[-1])) / n_inputs
        return jnp.broadcast_to(jnp.asarray((2 * shares - 1) * self.most, dtype), shape)


def _reducing(config: LogicClassifierConfig, n_in: int, wires: Array, **options: Any) -> SoftLUT:
    """Return tables that make fewer votes of votes."""
    init = _WithNoise(_Majority(2.0), config.noise)
    options |= {"estimator": config.estimator, "feature_axis": 0, "table_init": init}
    return SoftLUT(n_in, len(wires), n_inputs=wires.shape[1], wires=wires, **options)


@dataclasses.dataclass(frozen=True)
class _WithNoise:
    """Initializer with normally distributed numbers added to another's."""

    init: Initializer
    noise: float | int

    def __call__(self, key: Array, shape: tuple[int, ...], dtype: DTypeLike = jnp.float32) -> jax.Array:
        drawn = jax.random.normal(key, shape, dtype)
        first: jax.Array = self.init(key, shape, dtype)
        return first + drawn * jnp.asarray(self.noise, dtype)
