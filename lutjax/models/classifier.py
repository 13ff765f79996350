"""A classifier made of logic gates, or of tables over bits."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Float

from lutjax.circuits import Builder, Circuit, Format
from lutjax.circuits.columns import Columns
from lutjax.circuits.layers import of_layers
from lutjax.dispatch.registry import Implementation
from lutjax.extras import needed_by
from lutjax.layers.nnx.parts import in_sequence
from lutjax.models._circuits import WithCircuit
from lutjax.models._classifier_layers import layers_of
from lutjax.models._config import require_arguments
from lutjax.models._logic_configs import LogicClassifierConfig as LogicClassifierConfig
from lutjax.models._samples import of_shape
from lutjax.models.packed import PackedClassifier, number_of, outputs_of
from lutjax.values import Array

with needed_by("lutjax.models.classifier"):
    from flax import nnx


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
        encoder, layers, self.votes = layers_of(
            config, thresholds=thresholds, widths=widths, implementation=implementation, rngs=rngs
        )
        self.encoder: Any = nnx.data(encoder)
        self.layers: Any = nnx.List(layers)

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
        """Return the hard network on 32 samples a word. It does not follow later changes of this model."""
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
    """Return the hard network of a classifier as it is now, on 32 samples a word.

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
