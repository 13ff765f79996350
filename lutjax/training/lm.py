"""Training of the byte language model: its config and its step; the loop itself is `lutjax.training.loop`."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int, UInt8

from lutjax._extras import needed_by
from lutjax._typing import Array
from lutjax.models import LUTTransformer, LUTTransformerConfig
from lutjax.training import optimizers, tables
from lutjax.training.configs import Training
from lutjax.training.loop import Repeated
from lutjax.training.models import ModelRun, State, Structure, arrays
from lutjax.training.text import Bytes

with needed_by(__name__):
    import optax
    from flax import nnx


EVALUATION_BATCH = 64
"""Windows that are evaluated together; it bounds the memory and changes no result beyond rounding."""


TABLE_GRADIENTS = ("factored", "dense")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingConfig(Training):
    """Settings of a training run apart from the model and the text. Data order and dropout follow from the seed.

    Attributes:
      batch_size: windows of the text in one step.
      learning_rate: rate before warm-up and cool-down; a factor of the published schedule.
      table_gradient: factored, the rows that were looked up and their cotangents, or dense, arrays of the tables'
        shapes; both give the same results up to rounding. Only factored ones know of rows that were looked up and have
        a gradient of exactly 0: row_adam counts these look-ups, and momentum and weight decay move such rows.
      table_optimizer: how table rows move: sgd, row_adagrad, row_momentum or row_adam.
      table_weight_decay: share of a row that a step takes away from it if it was looked up, times the rate.
      optimizer: of everything else: sgd, momentum, adam, adagrad or row_adagrad.
      microbatches: parts of a batch that are computed one after the other, to save memory.
      schedule: constant or published: the rate between warm-up and cool-down.
      warmup: fraction of the steps over which the rate rises linearly.
      cooldown: fraction of the steps, at the end, over which the rate falls linearly to 0.
      loss: mean or sum, of the cross-entropies of all bytes that a batch predicts.
      seed: of the model, the data order and dropout.
    """

    learning_rate: float = 0.005
    table_gradient: str = "factored"
    table_optimizer: str = "row_adagrad"
    table_weight_decay: float = 0.0
    optimizer: str = "row_adagrad"
    microbatches: int = 1
    schedule: str = "constant"
    warmup: float = 0.0
    cooldown: float = 0.5
    loss: str = "mean"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_least(microbatches=1)
        self.check_fractions("warmup", "cooldown")
        if self.batch_size % self.microbatches:
            raise ValueError(
                f"microbatches is {self.microbatches}; it must divide the batch size, {self.batch_size}."
            )
        if self.table_weight_decay < 0:
            raise ValueError(f"table_weight_decay is {self.table_weight_decay}; it must not be negative.")
        for name, known in (
            ("table_gradient", TABLE_GRADIENTS),
            ("table_optimizer", tuple(optimizers.TABLE_OPTIMIZERS)),
            ("optimizer", optimizers.OPTIMIZERS),
            ("schedule", optimizers.SCHEDULES),
            ("loss", ("mean", "sum")),
        ):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} is {getattr(self, name)!r}; the known ones are {', '.join(known)}.")

    def rate(self) -> optax.Schedule:
        """Return the learning rate of every step, counted from 0."""
        return self.scheduled(self.schedule, warmup=self.warmup, cooldown=self.cooldown)


def structure_of(config: LUTTransformerConfig) -> Structure[LUTTransformer]:
    """Return how arrays make a model of this config."""
    return Structure(lambda rngs: LUTTransformer(config, rngs=rngs))


class Run(ModelRun[LUTTransformer]):
    """A model and how it is trained, without the arrays that training changes.

    Args:
      model: sizes of the model.
      training: everything else that decides the run.
      train: the bytes to train on.

    Raises:
      ValueError: the vocabulary is not that of bytes.
    """

    def __init__(self, model: LUTTransformerConfig, training: TrainingConfig, train: Bytes):
        if model.vocab_size != 256:
            raise ValueError(f"vocab_size is {model.vocab_size}; a language model of bytes needs 256.")
        self.config, self.training = model, training
        rate = training.rate()
        rule = optimizers.TABLE_OPTIMIZERS[training.table_optimizer](weight_decay=training.table_weight_decay)
        self._optimizer = tables.Optimizer(rule, rate, rest=optimizers.optimizer(training.optimizer, rate))
        super().__init__(structure_of(model), self._optimizer.init, training.seed)
        self.advance = Repeated(self.step, jnp.asarray(train))
        self._evaluate = jax.jit(self._total_loss)

    def step(self, state: State, number: Array, text: UInt8[Array, "bytes"]) -> tuple[State, Array]:
        """Return the state after one step, and the mean loss of its batch. See `lutjax.training.loop.Step`."""
        training, context = self.training, self.config.context
        data_key, dropout_key = jax.random.split(jax.random.fold_in(jax.random.key(training.seed), number))
        starts = jax.random.randint(data_key, (training.batch_size,), 0, text.size - context)
        part = jnp.arange(training.batch_size) // (training.batch_size // training.microbatches)

        def loss_of(params: Any, batch: tuple[Array, Array, Array]) -> tuple[Array, tuple[Array, Any]]:
            inputs, labels, part = batch
            model = self.structure.model(params, state.others)
            rngs = nnx.Rngs(dropout=jax.random.fold_in(dropout_key, part[0]))
            logits = model(inputs, deterministic=False, rngs=rngs)
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
            mean = losses.mean()
            total = losses.sum() * training.microbatches  # the parts' losses and gradients are averaged
            return total if training.loss == "sum" else mean, (mean, arrays(model)[1])

        value_and_grad = (
            jax.value_and_grad if training.table_gradient == "dense" else tables.value_and_grad
        )(loss_of, has_aux=True)
        if training.microbatches > 1:
            value_and_grad = tables.microbatched(value_and_grad, training.microbatches)
        batch = (*_windows(text, starts, context), part)
        (_, (losses, others)), gradients = value_and_grad(state.params, batch)
        if training.microbatches > 1:
            others = jax.tree.map(lambda a: a[-1], others)
        params, optimizer = self._optimizer.apply(state.params, gradients, state.optimizer)
        return State(params, others, optimizer), jnp.mean(losses)

    def evaluate(self, state: State, part: Bytes, *, max_windows: int | None = None) -> float:
        """Mean loss over a part of a text, in nats per byte, without dropout.

        Every byte but the first is predicted exactly once, from the bytes before it in its window of
        `context` inputs; windows follow each other through the whole part.

        Args:
          max_windows: takes only so many windows, spread evenly over the part.
        """
        context = self.config.context
        first = np.arange(0, part.size - 1, context)  # the first input of every window
        starts = np.minimum(first, part.size - 1 - context)
        skipped = first - starts  # only in the last window: what the one before it has predicted
        if max_windows is not None and len(first) > max_windows:
            chosen = np.linspace(0, len(first) - 1, max_windows).astype(int)
            starts, skipped = starts[chosen], skipped[chosen]
        count = int((context - skipped).sum())
        padding = -len(starts) % EVALUATION_BATCH
        starts = np.pad(starts, (0, padding)).reshape(-1, EVALUATION_BATCH)
        skipped = np.pad(skipped, (0, padding), constant_values=context).reshape(-1, EVALUATION_BATCH)
        totals = self._evaluate(
            state.params, state.others, part, jnp.asarray(starts, jnp.int32), jnp.asarray(skipped, jnp.int32)
        )
        return float(np.asarray(totals, np.float64).sum() / count)

    def _total_loss(
        self,
        params: Any,
        others: Any,
        text: UInt8[Array, "bytes"],
        starts: Int[Array, "batches batch"],
        skipped: Int[Array, "batches batch"],
    ) -> Float[Array, "batches batch"]:
        def batch(windows: tuple[Array, Array]) -> Array:
            inputs, labels = _windows(text, windows[0], self.config.context)
            logits = self.structure.model(params, others)(inputs, deterministic=True)
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
            counted = jnp.arange(self.config.context)[None, :] >= windows[1][:, None]
            return jnp.sum(jnp.where(counted, losses, 0), -1)

        totals: Array = jax.lax.map(batch, (starts, skipped))
        return totals


def _windows(text: Array, starts: Array, context: int) -> tuple[Array, Array]:
    """Inputs and labels, int32 ``[batch, context]``."""
    windows = text[starts[:, None] + jnp.arange(context + 1)[None, :]].astype(jnp.int32)
    return windows[:, :-1], windows[:, 1:]
