"""A training step of the published language model as a function that can be measured."""

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
    """Steps of the `reference` preset on random bytes, each on other windows of them.

    Args:
      batch: windows in a step.
      table_gradient: ``"factored"`` or ``"dense"``, see `lutjax.training.lm.TrainingConfig`.
      model: sizes that differ from the preset's.
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
        """Bytes of all that is trained, which is nearly all tables."""
        return sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(self.run.abstract().params))

    def time(self, **options: Any) -> Timing:
        """Time of a step; `options` are those of `device_time`."""
        state = self.run.init()
        # Tables start at zero, and the memory of zeros that were never written is one page: write it.
        write = jax.jit(
            lambda p: jax.tree.map(lambda a: a + jnp.asarray(0.001, a.dtype), p), donate_argnums=0
        )
        state = state._replace(params=write(state.params))
        return device_time(self._next, (state, jnp.int32(0)), self._text, in_place=True, **options)

    def peak_bytes(self) -> int | None:
        """Memory that steps need in all, as the compiler plans it."""
        number = jax.ShapeDtypeStruct((), jnp.int32)
        return peak_bytes(self._next, (self.run.abstract(), number), self._text, in_place=True)

    def _next(self, carry: tuple[State, Array], text: Array) -> tuple[tuple[State, Array], Array]:
        state, number = carry
        state, loss = self.run.step(state, number, text)
        return (state, number + 1), loss


def layers(shape: LanguageModel) -> tuple[OfOp, ...]:
    """Return the look-ups of a step, one by one."""
    c = LUTTransformerConfig()

    def dense(outputs: int) -> OfOp:
        samples = shape.batch * c.context
        return shapes.of("fc", samples, c.features, outputs, c.ffn_detectors, c.ffn_anchors)

    heads = c.n_heads * c.n_detectors
    attention = shapes.of("seq", shape.batch, c.context, c.features, heads, c.n_anchors, c.n_position_bits)
    return (*(attention, dense(c.features)) * c.n_layers, dense(c.vocab_size))


def bytes_moved(shape: LanguageModel, row: str, itemsize: int) -> int:
    """Bytes that the look-ups of a step have to move."""
    return sum(layer.traffic.bytes_moved(row, itemsize) for layer in layers(shape))


TABLE_GRADIENTS = {IN_PLACE: "factored", DENSE: "dense"}
"""Form of the tables' gradients, by row."""
