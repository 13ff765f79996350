"""Measured training step of the published language model."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lutjax.benchmark import shapes
from lutjax.benchmark.measure import Timing, device_time, peak_bytes
from lutjax.benchmark.shapes import DENSE, IN_PLACE, LanguageModel, OfOp
from lutjax.models import LUTTransformerConfig
from lutjax.training.lm import Run, TrainingConfig
from lutjax.training.models import State
from lutjax.training.presets import PRESETS, make
from lutjax.values import Array


class Step:
    """Training steps with the preset `reference` on windows from random bytes.

    Args:
      batch: windows per step.
      table_gradient: ``"factored"`` or ``"dense"``, see `lutjax.training.lm.TrainingConfig`.
      model: changed model sizes.
    """

    def __init__(self, batch: int, table_gradient: str, **model: Any):
        values = {
            **PRESETS["lut"]["reference"],
            **model,
            "batch_size": batch,
            "table_gradient": table_gradient,
        }
        text = np.random.default_rng(0).integers(0, 256, 2**20).astype(np.uint8)
        self.run = Run(make(LUTTransformerConfig, values), make(TrainingConfig, values), text)
        self._text = jnp.asarray(text)

    @property
    def table_bytes(self) -> int:
        """Parameter bytes, nearly all in tables."""
        return sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(self.run.abstract().params))

    def time(self, **options: Any) -> Timing:
        """Measure a step; for `options` see `device_time`."""
        state = self.run.init()
        # Unwritten zeros would share one memory page.
        write = jax.jit(
            lambda p: jax.tree.map(lambda a: a + jnp.asarray(0.001, a.dtype), p), donate_argnums=0
        )
        state = state._replace(params=write(state.params))
        return device_time(
            self._advance, (state, jnp.int32(0)), self._text, in_place=True, **options
        )

    def peak_bytes(self) -> int | None:
        """Return the peak memory planned by the compiler."""
        number = jax.ShapeDtypeStruct((), jnp.int32)
        return peak_bytes(self._advance, (self.run.abstract(), number), self._text, in_place=True)

    def _advance(
        self, carry: tuple[State, Array], text: Array
    ) -> tuple[tuple[State, Array], Array]:
        state, number = carry
        state, loss = self.run.step(state, number, text)
        return (state, number + 1), loss


def layers(shape: LanguageModel) -> tuple[OfOp, ...]:
    """Return each lookup in a step."""
    c = LUTTransformerConfig()

    def dense_shape(outputs: int) -> OfOp:
        samples = shape.batch * c.context
        return shapes.op_shape("fc", samples, c.features, outputs, c.ffn_detectors, c.ffn_anchors)

    heads = c.n_heads * c.n_detectors
    attention = shapes.op_shape(
        "seq", shape.batch, c.context, c.features, heads, c.n_anchors, c.n_position_bits
    )
    return (*(attention, dense_shape(c.features)) * c.n_layers, dense_shape(c.vocab_size))


def bytes_moved(shape: LanguageModel, row: str, itemsize: int) -> int:
    """Return the required memory traffic for all lookups in a step, in bytes."""
    return sum(layer.traffic.bytes_moved(row, itemsize) for layer in layers(shape))


TABLE_GRADIENTS = {IN_PLACE: "factored", DENSE: "dense"}
"""Table gradient mode, by row."""
