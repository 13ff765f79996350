"""Classifier built from logic gates or lookup tables over bits."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Float

from lutjax.circuits import Builder, Circuit
from lutjax.circuits.layers import circuit_from_layers
from lutjax.dispatch.registry import Implementation
from lutjax.extras import require_optional
from lutjax.layers.nnx.parts import in_sequence
from lutjax.models._circuits import Inputs, WithCircuit
from lutjax.models._classifier_layers import layers_of
from lutjax.models._config import require_arguments
from lutjax.models._edges import rows_with_edges
from lutjax.models._logic_configs import LogicClassifierConfig as LogicClassifierConfig
from lutjax.models._samples import reshape_samples
from lutjax.models.packed import PackedClassifier, number_of, outputs_of, require_bits
from lutjax.values import Array

with require_optional("lutjax.models.classifier"):
    from flax import nnx


class LogicClassifier(WithCircuit, nnx.Module):
    """Classifier by gate votes, or regression by the number of set output bits.

    A thermometer encodes each input as bits. Layers of gates (or tables) combine these bits, and
    the last layer votes: class k gets the sum of the k-th group of outputs, optionally reduced by
    trained tables. With ``config.regression`` there is one group, and the prediction is its sum
    times ``config.scale`` plus ``config.offset``.

    After soft training the model is a circuit with as many gates: ``deterministic=True`` evaluates
    the selected gates on bits, and `packed` evaluates them on 32 samples per word.

    State: the state of the layers; see `lutjax.layers.nnx.LogicGates`. Gates and learned thresholds
    are `nnx.Param`; wires are stored with them, untrained.

    Args:
      config: model configuration.
      thresholds: ``[in_features, n_thresholds]``, from `lutjax.thermometer_thresholds`; by default
        evenly spaced in (0, 1). Edges require five times as many rows: first the inputs, then
        each difference for all pixels.
      widths: ``[in_features]``, sigmoid widths for learned thresholds, in units of each feature; by
        default the distances between thresholds. See `lutjax.layers.nnx.Thermometer`.
      implementation: selects the implementation of the ops; see `lutjax.logic_gates`.
      rngs: the ``params`` stream initializes the model; the ``gates`` stream provides the noise of
        the gumbel estimator.

    Raises:
      ValueError: thresholds have a wrong shape, or are given for bit inputs.

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
        """Return class logits, votes / tau: ``[..., n_classes]``; for regression, values ``[...]``.

        Args:
          x: ``[..., in_features]`` with a floating-point dtype, or image batches with as many
            values; bits (0 and 1) without thresholds.
          deterministic: run the hard network; overrides the mode of the model, which is soft unless
            `nnx.view` or `eval` changed it.
          temperature: temperature of all gates, 1 by default; may be traced. See
            `lutjax.layers.nnx.LogicGates`.
          rngs: noise for the gumbel estimator, instead of the model's own.

        Raises:
          ValueError: the sample size differs.
        """
        x = reshape_samples("LogicClassifier", x, (self.config.in_features,))
        # Features first: a gate then reads and writes contiguous samples.
        y = jnp.moveaxis(jnp.asarray(x), -1, 0)
        if self.config.edges:
            y = rows_with_edges(y, self.config.image_shape)
        if self.encoder is not None:
            y = self.encoder(y, deterministic=deterministic)
        y = in_sequence(
            self.layers, y, deterministic=deterministic, temperature=temperature, rngs=rngs
        )
        votes = self.votes(y)
        if self.config.regression:
            return number_of(self.config, votes[0])
        return jnp.moveaxis(votes, 0, -1)

    def packed(self) -> PackedClassifier:
        """Return the hard network on 32 samples per word, independent of later model changes."""
        return pack(self)

    def _circuit(
        self, builder: Builder, *, inputs: Inputs, outputs: str | None, about: Mapping[str, Any]
    ) -> Circuit:
        require_bits(self.config, inputs)
        encoder = [] if self.encoder is None else [self.encoder]
        layers = [*encoder, *self.layers, self.votes]
        outputs, facts = outputs_of(self.config, outputs)
        return circuit_from_layers(
            layers, builder, inputs=inputs, outputs=outputs, about={**facts, **about}
        )


def pack(classifier: LogicClassifier) -> PackedClassifier:
    """Return the hard network for the current classifier, on 32 samples per word.

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
