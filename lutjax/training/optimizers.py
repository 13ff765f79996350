"""Optimisers and learning-rate schedules, chosen by name."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from lutjax._extras import needed_by
from lutjax.training import tables

with needed_by(__name__):
    import optax


OPTIMIZERS = ("sgd", "momentum", "adam", "adamw", "muon", "adagrad", "row_adagrad")
DECAYING = ("adamw", "muon")
"""Those that have a weight decay."""

SCHEDULES = ("constant", "published", "cosine")

TABLE_OPTIMIZERS: dict[str, Callable[..., tables.RowRule]] = {
    "sgd": tables.SGD,
    "row_adagrad": tables.RowAdagrad,
    "row_momentum": tables.RowMomentum,
    "row_adam": tables.RowAdam,
}
"""Rules by which table rows move, by name."""

# The mean loss of a large batch has squared gradients around 1e-10: the usual 1e-7 would drown them.
_EPS = 1e-20

_MUON_RATE = 10.0  # of matrices, beside that of other parameters


def learning_rate(
    schedule: str, *, rate: float, steps: int, batch_size: int, warmup: float, cooldown: float
) -> optax.Schedule:
    """The rate of every step, counted from 0.

    `constant` is ``rate``; `cosine` falls from ``rate`` after the warm-up to a tenth of it after the last step; `published` is ``rate * min(1 / sqrt(1 + t), t / 4000 / sqrt(4000))`` with ``t`` the
    samples seen so far (docs/semantics.md, section 9; meant for ``rate = 1`` and the summed loss). All
    rise linearly over the first ``warmup * steps`` steps and fall linearly to 0 over the last
    ``cooldown * steps``.

    Raises:
      ValueError: an unknown schedule.
    """
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule is {schedule!r}; the known ones are {', '.join(SCHEDULES)}.")

    def schedule_of(count: jax.typing.ArrayLike) -> jax.Array:
        step = jnp.asarray(count, jnp.float32)
        value: jax.Array = jnp.float32(rate)
        if schedule == "published":
            t = step * batch_size
            value *= jnp.minimum(1 / jnp.sqrt(1 + t), t / (4000 * 4000**0.5))
        if schedule == "cosine":
            first = warmup * steps
            share = jnp.clip((step - first) / max(steps - first, 1.0), 0.0, 1.0)
            value *= 0.55 + 0.45 * jnp.cos(jnp.pi * share)
        if warmup:
            value *= jnp.minimum(1.0, (step + 1) / (warmup * steps))
        if cooldown:
            value *= jnp.minimum(1.0, (steps - step) / (cooldown * steps))
        return value

    return schedule_of


def optimizer(
    name: str, rate: optax.ScalarOrSchedule, *, weight_decay: float = 0.0
) -> optax.GradientTransformation:
    """An optimiser by name.

    Args:
      weight_decay: of `adamw` and `muon`, on matrices alone: not on tables, scales, biases and scalars.

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
            # The second moment forgets sooner than usual: runs are short.
            return optax.adamw(rate, b2=0.99, weight_decay=weight_decay, mask=_matrices)
        case "muon":
            return optax.multi_transform(
                {
                    "inner": optax.chain(
                        scale_by_muon(),
                        optax.scale(_MUON_RATE),
                        optax.add_decayed_weights(weight_decay),
                        optax.scale_by_learning_rate(rate),
                    ),
                    "others": optimizer("adamw", rate, weight_decay=weight_decay),
                },
                _inner_matrices,
            )
        case "adagrad":
            return optax.adagrad(rate, initial_accumulator_value=0.0, eps=_EPS)
        case "row_adagrad":
            return optax.chain(scale_by_row_rss(), optax.scale_by_learning_rate(rate))
        case _:
            raise ValueError(f"optimizer is {name!r}; the known ones are {', '.join(OPTIMIZERS)}.")


def _matrices(params: optax.Params) -> Any:
    return jax.tree.map(lambda p: p.ndim == 2, params)


def _inner_matrices(params: optax.Params) -> Any:
    """Return ``"inner"`` for each matrix between layers of features, ``"others"`` for all else, vectors of tokens among it."""

    def label(path: Any, p: Any) -> str:
        return "inner" if p.ndim == 2 and "embed" not in jax.tree_util.keystr(path) else "others"

    return jax.tree.map_with_path(label, params)


def scale_by_muon(decay: float = 0.95) -> optax.GradientTransformation:
    """Muon: the nearest orthogonal matrix to the momentum of a matrix, about, so that every direction moves alike.

    The momentum is Nesterov's. A matrix with more outputs than inputs moves more, by the root of their ratio.

    Source: K. Jordan and others, "Muon: an optimizer for hidden layers in neural networks", 2024.
    """

    def update(
        updates: optax.Updates, state: optax.TraceState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, optax.TraceState]:
        del params
        trace = jax.tree.map(lambda g, m: decay * m + g, updates, state.trace)
        moved = jax.tree.map(
            lambda g, m: max(1.0, g.shape[1] / g.shape[0]) ** 0.5 * _orthogonal(g + decay * m), updates, trace
        )
        return moved, optax.TraceState(trace)

    return optax.GradientTransformation(lambda params: optax.TraceState(jax.tree.map(jnp.zeros_like, params)), update)


def _orthogonal(matrix: jax.Array) -> jax.Array:
    """Five steps of an iteration by which all singular values but the smallest come to about 1 (0.7 to 1.2)."""
    wide = matrix.shape[0] <= matrix.shape[1]
    x = matrix if wide else matrix.T
    x = x / jnp.maximum(jnp.linalg.norm(x), jnp.asarray(1e-8, x.dtype))

    def step(_: int, x: jax.Array) -> jax.Array:
        square = x @ x.T
        return 3.4445 * x + (-4.7750 * square + 2.0315 * (square @ square)) @ x

    x = jax.lax.fori_loop(0, 5, step, x)
    return x if wide else x.T


class RowRssState(NamedTuple):
    """Sum over steps of each row's mean squared gradient; the last axis has size 1."""

    sum_of_squares: optax.Params


def scale_by_row_rss(eps: float = _EPS) -> optax.GradientTransformation:
    """Adagrad with one accumulator for a table row (the last axis) instead of one for every number.

    A table's rows are read at very different frequencies, and the numbers of a row always together: this costs
    ``1 / outputs`` of Adagrad's memory. Rows without a gradient do not move.
    """

    def init(params: optax.Params) -> RowRssState:
        return RowRssState(jax.tree.map(lambda p: jnp.zeros_like(p[..., :1]), params))

    def update(
        updates: optax.Updates, state: RowRssState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, RowRssState]:
        del params
        total = jax.tree.map(
            lambda g, s: s + jnp.mean(jnp.square(g), -1, keepdims=True), updates, state.sum_of_squares
        )
        scaled = jax.tree.map(lambda g, s: g * jax.lax.rsqrt(s + eps), updates, total)
        return scaled, RowRssState(total)

    return optax.GradientTransformation(init, update)
