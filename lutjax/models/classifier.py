"""A classifier made of logic gates, or of tables over bits."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Float

from lutjax import wiring as wirings
from lutjax._typing import Array
from lutjax.circuits import Builder, Circuit, Format
from lutjax.circuits._layers import of_layers
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
from lutjax.models.packed import PackedClassifier

TABLES = ("gates", "light", "walsh", "raw", "binary")


@dataclasses.dataclass(frozen=True)
class LogicClassifierConfig(Config):
    """The sizes of a `LogicClassifier`.

    Attributes:
      in_features: numbers of a sample, such as the pixels of an image.
      n_classes: classes.
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
      image_shape: height, width and perhaps channels of a sample, for windows.
      window: height and width of windows.
      learned_thresholds: whether thresholds are trained, each through the derivative of a sigmoid of its own.
      threshold_gradient: straight_through: what is learned from are bits; soft: it is those sigmoids, and bits once training is over. See
        `lutjax.layers.nnx.Thermometer`.
      estimator: soft, gumbel or straight_through; see `lutjax.layers.nnx.LogicGates`. Binary tables have their own.
      tau: the votes for a class are divided by it.

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
    threshold_gradient: str = dataclasses.field(default="straight_through", metadata=FOLLOWS)

    def __post_init__(self) -> None:
        super().__post_init__()
        where = "LogicClassifierConfig"
        self._check_sizes(in_features=1, n_classes=2, n_thresholds=0, candidates=1, image_shape=1, window=1)
        check_names(self, f"{where}: ")
        self._check_most(n_thresholds=MOST_THRESHOLDS)
        if not 0 <= self.noise < float("inf"):
            raise ValueError(f"{where}: noise is {self.noise}; it must not be negative.")
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

    @property
    def _wirings(self) -> list[str]:
        return self.wiring.split(",")

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
    """Classes of samples by the votes of logic gates.

    Each number of a sample becomes bits, gates (or tables) combine bits layer by layer, and those of the last layer
    vote: class k gets the sum of the k-th group of them. Trained soft, it is a circuit of that many gates: with
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
        return jnp.moveaxis(self.votes(y), 0, -1)

    def packed(self) -> PackedClassifier:
        """The hard network on 32 samples a word. It does not follow later changes of this model."""
        return pack(self)

    def _circuit(
        self, builder: Builder, *, inputs: str | Format, outputs: str | None, about: Mapping[str, Any]
    ) -> Circuit:
        """Return the circuit of the layers, for `lutjax.circuits.of`."""
        encoder = [] if self.encoder is None else [self.encoder]
        layers = [*encoder, *self.layers, self.votes]
        return of_layers(layers, builder, inputs=inputs, outputs=outputs, about=about)


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
    return SoftLUT(n_in, n_out, n_inputs=config.n_inputs, parametrisation=kind, table_init=init, **options)


@dataclasses.dataclass(frozen=True)
class _WithNoise:
    """Initializer with normally distributed numbers added to another's."""

    init: Initializer
    noise: float | int

    def __call__(self, key: Array, shape: tuple[int, ...], dtype: DTypeLike = jnp.float32) -> jax.Array:
        drawn = jax.random.normal(key, shape, dtype)
        first: jax.Array = self.init(key, shape, dtype)
        return first + drawn * jnp.asarray(self.noise, dtype)
