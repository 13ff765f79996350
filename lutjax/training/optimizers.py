"""Optimizers and learning-rate schedules, chosen by name."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from lutjax import names, optim
from lutjax.extras import require_optional
from lutjax.names import ANNEALINGS, OPTIMIZERS, SCHEDULES

with require_optional(__name__):
    import optax


TABLE_OPTIMIZERS: dict[str, Callable[..., optim.RowRule]] = dict(
    zip(
        names.TABLE_OPTIMIZERS,
        (optim.SGD, optim.RowAdagrad, optim.RowMomentum, optim.RowAdam),
        strict=True,
    )
)
"""Update rules for table rows, by name."""

# The mean loss of a large batch has squared gradients around 1e-10: the usual 1e-7 would hide them.
_EPS = 1e-20


def learning_rate(
    schedule: str, *, rate: Any, steps: Any, batch_size: int, warmup: float, cooldown: float
) -> optax.Schedule:
    """Return the learning rate of every step, counted from 0.

    * `constant` is ``rate``.
    * `cosine` falls from ``rate`` after the warm-up to a tenth of it after the last step.
    * `published` is ``rate * min(1 / sqrt(1 + t), t / 4000 / sqrt(4000))`` with ``t`` the samples
      seen so far (docs/semantics.md, section 9; meant for ``rate = 1`` and the summed loss).

    All rise linearly over the first ``warmup * steps`` steps and fall linearly to 0 over the last
    ``cooldown * steps``.

    Raises:
      ValueError: an unknown schedule.
    """
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule is {schedule!r}; the known ones are {', '.join(SCHEDULES)}.")

    def schedule_of(count: jax.typing.ArrayLike) -> jax.Array:
        step = jnp.asarray(count, jnp.float32)
        value: jax.Array = jnp.float32(rate)
        # The linear rise meets the fall at about sample 4000.
        if schedule == "published":
            t = step * batch_size
            value *= jnp.minimum(1 / jnp.sqrt(1 + t), t / (4000 * 4000**0.5))
        if schedule == "cosine":
            first = warmup * steps
            share = jnp.clip((step - first) / jnp.maximum(steps - first, 1.0), 0.0, 1.0)
            value *= 0.55 + 0.45 * jnp.cos(jnp.pi * share)
        if warmup:
            value *= jnp.minimum(1.0, (step + 1) / (warmup * steps))
        if cooldown:
            value *= jnp.minimum(1.0, (steps - step) / (cooldown * steps))
        return value

    return schedule_of


def annealed(annealing: str, *, first: float, last: float, steps: int) -> optax.Schedule:
    """Return a schedule from `first` before step 0 to `last` after all steps.

    With ``s`` the completed share of the steps, `linear` is ``first + (last - first) * s``,
    `exponential` is ``first * (last / first) ** s``, and `cosine` is `linear` with
    ``(1 - cos(pi s)) / 2`` in place of ``s``.

    Raises:
      ValueError: an unknown name.

    Example:
      >>> from lutjax.training.optimizers import annealed
      >>> [float(annealed("exponential", first=4.0, last=1.0, steps=2)(step)) for step in (0, 1, 2)]
      [4.0, 2.0, 1.0]
    """
    if annealing not in ANNEALINGS:
        raise ValueError(f"annealing is {annealing!r}; the known ones are {', '.join(ANNEALINGS)}.")

    def schedule_of(count: jax.typing.ArrayLike) -> jax.Array:
        share: jax.Array = jnp.clip(jnp.asarray(count, jnp.float32) / steps, 0.0, 1.0)
        if annealing == "exponential":
            value: jax.Array = first * jnp.float32(last / first) ** share
            return value
        if annealing == "cosine":
            share = (1 - jnp.cos(jnp.pi * share)) / 2
        return first + (last - first) * share

    return schedule_of


def optimizer(
    name: str, rate: optax.ScalarOrSchedule, *, weight_decay: float = 0.0
) -> optax.GradientTransformation:
    """Return one of `OPTIMIZERS`; `adamw` decays only matrices, not tables, biases or scalars.

    Raises:
      ValueError: an unknown name.
    """
    match name:
        case "sgd":
            return optax.sgd(rate)
        case "momentum":
            return optax.sgd(rate, momentum=0.9)
        case "adam":
            return optax.adam(rate)
        case "adamw":
            # The second moment decays faster than usual because runs are short.
            is_matrix = functools.partial(jax.tree.map, lambda p: p.ndim == 2)
            return optax.adamw(rate, b2=0.99, weight_decay=weight_decay, mask=is_matrix)
        case "adagrad":
            return optax.adagrad(rate, initial_accumulator_value=0.0, eps=_EPS)
        case "row_adagrad":
            return optax.chain(scale_by_row_rss(), optax.scale_by_learning_rate(rate))
        case _:
            raise ValueError(f"optimizer is {name!r}; the known ones are {', '.join(OPTIMIZERS)}.")


class RowRssState(NamedTuple):
    """Sum over steps of each row's mean squared gradient; the last axis has size 1."""

    sum_of_squares: optax.Params


def scale_by_row_rss(eps: float = _EPS) -> optax.GradientTransformation:
    """Scale by Adagrad with one accumulator per table row (the last axis), not one per element.

    Rows have very different read frequencies, but the elements of a row are always read together.
    This costs ``1 / outputs`` of Adagrad's memory. Rows without a gradient are not updated. A
    scalar is a row by itself.
    """

    def init(params: optax.Params) -> RowRssState:
        return RowRssState(
            jax.tree.map(lambda p: jnp.zeros_like(p[..., :1] if p.ndim else p), params)
        )

    def update(
        updates: optax.Updates, state: RowRssState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, RowRssState]:
        del params
        # A mean, not a sum, makes the rate independent of the number of outputs.
        total = jax.tree.map(
            lambda g, s: s + jnp.mean(jnp.square(g), (-1,) if g.ndim else (), keepdims=True),
            updates,
            state.sum_of_squares,
        )
        scaled = jax.tree.map(lambda g, s: g * jax.lax.rsqrt(s + eps), updates, total)
        return scaled, RowRssState(total)

    return optax.GradientTransformation(init, update)
