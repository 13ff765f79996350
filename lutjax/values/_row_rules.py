"""Table optimizers: row-wise update rules."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lutjax.values._dtypes import accumulator

RowState = dict[str, Any]
"""Arrays ``[detectors, rows, 1 or outputs]`` by name; ``[edges]`` for an edge list. With
``decay="every"`` also `DECAY`.
"""

DECAYS = ("read", "every")

DECAY = "decay"
"""State of whole tables ``[detectors, 1, 2]``: the total decay of all steps.

It is minus the logarithm of the remaining share of a row, as a number and its rounding error.
"""

DECAYED = "decayed"  # state of a row: like `DECAY`, for the decay already applied to the row
_ALL = 100.0  # decay that reduces a row to 0 in float32


@dataclasses.dataclass(frozen=True, repr=False)
class RowRule:
    """Base of the rules. Static: part of the compiled program; the rate is an argument.

    A rule updates only rows that a step touches: a row is touched if it was looked up, however
    often, and its gradient is the sum over all its lookups. `weight_decay` subtracts ``rate *
    weight_decay`` of a touched row, once per step. With ``decay="every"``, steps that do not touch
    a row decay it too: the decay is accumulated, and applied before the next update of the row, or
    by `current`. Other row state is unchanged in these steps.

    Source: docs/semantics.md, section 8.
    """

    weight_decay: float = dataclasses.field(default=0.0, kw_only=True)
    decay: str = dataclasses.field(default="read", kw_only=True)

    def __post_init__(self) -> None:
        self._require("decay", self.decay in DECAYS, f"expected {' or '.join(map(repr, DECAYS))}")
        for field in dataclasses.fields(self):
            if field.name == "decay":
                continue
            value = getattr(self, field.name)
            is_number = isinstance(value, int | float | np.integer | np.floating)
            is_number = is_number and not isinstance(value, bool)
            is_finite = is_number and math.isfinite(value)
            self._require(field.name, is_finite, "expected a finite number")
        self._require("weight_decay", self.weight_decay >= 0, "it must not be negative")

    def __repr__(self) -> str:
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        fields = [f"{n}={v!r}" for n, v in values.items() if n != "decay" or v != "read"]
        return f"{type(self).__name__}({', '.join(fields)})"

    def _require(self, name: str, holds: bool, rule: str) -> None:
        if not holds:
            raise ValueError(f"{type(self).__name__}: {name} is {getattr(self, name)!r}; {rule}.")

    @property
    def additive(self) -> bool:
        """True if lookups may update the table one by one, without their sum for each row."""
        return False

    @property
    def moves_without_gradient(self) -> bool:
        """True if a touched row with a zero gradient changes, or its state."""
        return self.weight_decay > 0

    @property
    def counts_decay(self) -> bool:
        """True if steps also decay untouched rows."""
        return self.decay == "every" and self.weight_decay > 0

    def state_sizes(self, n_outputs: int) -> dict[str, int]:
        """Return the number of state elements per row, by name, without the decay state."""
        return {}

    def init(self, weights: Any) -> RowState:
        """Return the initial state, zeros, of a table ``[detectors, rows, outputs]``.

        In an edge list ``[edges]`` each edge is a row with one element.

        Raises:
          ValueError: `decay` is "every", and the table is an edge list.
        """
        dtype = accumulator(weights.dtype)
        if len(weights.shape) == 1:
            rule = (
                "the rows of a list of edges are touched one by one: "
                "give such a table a rule with decay='read'"
            )
            self._require("decay", not self.counts_decay, rule)
            return {n: jnp.zeros(weights.shape, dtype) for n in self.state_sizes(1)}
        detectors, rows, outputs = weights.shape
        sizes = {**self.state_sizes(outputs), **({DECAYED: 1} if self.counts_decay else {})}
        state = {n: jnp.zeros((detectors, rows, size), dtype) for n, size in sizes.items()}
        return {**state, DECAY: jnp.zeros((detectors, 1, 2), dtype)} if self.counts_decay else state

    def bytes_per_row(self, n_outputs: int) -> int:
        """Return the bytes of state for each row of a float32 table."""
        return 4 * (sum(self.state_sizes(n_outputs).values()) + self.counts_decay)

    def step_table(
        self, weights: jax.Array, gradient: jax.Array, state: RowState, rate: jax.Array
    ) -> tuple[jax.Array, RowState]:
        """Return a whole table and its state ``[detectors, rows, outputs]`` after a step.

        In an edge list ``[edges]`` each edge is a row with one element.
        """
        if weights.ndim > 1:
            return self.step(weights, gradient, state, rate)
        # A last axis of one element makes each edge a row. A scalar rate stays one.
        as_rows = jax.tree.map(
            lambda a: a[:, None] if jnp.ndim(a) else a, (weights, gradient, state, rate)
        )
        moved: tuple[jax.Array, RowState] = jax.tree.map(lambda a: a[:, 0], self.step(*as_rows))
        return moved

    def step(
        self, rows: jax.Array, gradient: jax.Array, state: RowState, rate: jax.Array
    ) -> tuple[jax.Array, RowState]:
        """Return touched rows and their state ``[..., outputs]`` after a step."""
        # The row first catches up with the decay of all steps since it was last touched.
        if self.counts_decay:
            rows = rows * jnp.exp(state[DECAYED] - state[DECAY][..., :1])
        direction, new = self._direction(gradient, state)
        if self.weight_decay:
            direction = direction + jnp.asarray(self.weight_decay, rows.dtype) * rows
        if self.counts_decay:
            decay = self._decay_after(state[DECAY], rate)
            new = {
                **new,
                DECAYED: jnp.broadcast_to(decay[..., :1], state[DECAYED].shape),
                DECAY: decay,
            }
        return rows - rate * direction, new

    def next_state(self, old: RowState, moved: RowState, rate: jax.Array) -> RowState:
        """Return the table state after a step, given the old state and the new row state."""
        return {**moved, DECAY: self._decay_after(old[DECAY], rate)} if self.counts_decay else moved

    def _decay_after(self, decay: jax.Array, rate: jax.Array) -> jax.Array:
        # The new total and its rounding error, because shares are small relative to their sum: the
        # next step adds the error. A share of 1 would give an infinite total; _ALL is enough to
        # reduce a row to 0.
        dtype = decay.dtype
        share = jnp.minimum(jnp.asarray(rate, dtype) * jnp.asarray(self.weight_decay, dtype), 1)
        total, rest = decay[..., :1], decay[..., 1:]
        more = rest + jnp.minimum(-jnp.log1p(-share), jnp.asarray(_ALL, decay.dtype))
        new = total + more
        return jnp.concatenate([new, more - (new - total)], -1)

    def current(
        self, weights: jax.Array, state: RowState, rows: jax.Array | None = None
    ) -> tuple[jax.Array, RowState]:
        """Return a table and its state with all accumulated decay applied.

        Args:
          weights: the table, ``[detectors, rows, outputs]``.
          state: its state.
          rows: ids ``[..., detectors]`` of the rows to decay. Default: all.
        """
        if not self.counts_decay:
            return weights, state
        total = state[DECAY][..., :1]

        def apply_decay(rows: jax.Array, decayed: jax.Array, total: jax.Array) -> jax.Array:
            share = jnp.exp(decayed - total)
            return (rows.astype(share.dtype) * share).astype(rows.dtype)

        if rows is None:
            decayed = jnp.broadcast_to(total, state[DECAYED].shape)
            return apply_decay(weights, state[DECAYED], total), {**state, DECAYED: decayed}
        n_detectors, n_rows, _ = weights.shape
        at = jnp.arange(n_detectors), jnp.clip(rows.reshape(-1, n_detectors), 0, n_rows - 1)
        old, total = state[DECAYED][at], total[None, :, 0]
        moved, decayed = apply_decay(weights[at], old, total), jnp.broadcast_to(total, old.shape)
        return weights.at[at].set(moved), {**state, DECAYED: state[DECAYED].at[at].set(decayed)}

    def _direction(self, gradient: jax.Array, state: RowState) -> tuple[jax.Array, RowState]:
        raise NotImplementedError


def _mean_square(gradient: jax.Array) -> jax.Array:
    return jnp.sum(jnp.square(gradient), -1, keepdims=True) / max(gradient.shape[-1], 1)


@dataclasses.dataclass(frozen=True, repr=False)
class SGD(RowRule):
    """Stochastic gradient descent. No state.

    Definition, for a row that a step touches::

        row = row - rate * (gradient + weight_decay * row)

    Source: docs/semantics.md, section 8.
    """

    @property
    def additive(self) -> bool:
        return not self.weight_decay

    def _direction(self, gradient: jax.Array, state: RowState) -> tuple[jax.Array, RowState]:
        return gradient, state


@dataclasses.dataclass(frozen=True, repr=False)
class RowAdagrad(RowRule):
    """Adagrad with one accumulator per row.

    State: 4 bytes a row.

    Definition, for a row that a step touches::

        sum_of_squares = sum_of_squares + (gradient**2).mean()
        direction = gradient / np.sqrt(sum_of_squares + eps)
        row = row - rate * (direction + weight_decay * row)

    Source: docs/semantics.md, section 8.
    """

    eps: float = 1e-20

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("eps", self.eps > 0, "it must be above 0")

    def state_sizes(self, n_outputs: int) -> dict[str, int]:
        return {"sum_of_squares": 1}

    def _direction(self, gradient: jax.Array, state: RowState) -> tuple[jax.Array, RowState]:
        total = state["sum_of_squares"] + _mean_square(gradient)
        scale = jax.lax.rsqrt(total + jnp.asarray(self.eps, total.dtype))
        return gradient * scale, {"sum_of_squares": total}


@dataclasses.dataclass(frozen=True, repr=False)
class RowMomentum(RowRule):
    """Momentum that updates a row only in the steps that touch it.

    State: 4 bytes for each element of a row, as much as the table.

    Definition, for a row that a step touches::

        velocity = momentum * velocity + gradient
        row = row - rate * (velocity + weight_decay * row)

    Source: docs/semantics.md, section 8.
    """

    momentum: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("momentum", 0 <= self.momentum < 1, "0 <= momentum < 1")

    @property
    def moves_without_gradient(self) -> bool:
        return True

    def state_sizes(self, n_outputs: int) -> dict[str, int]:
        return {"velocity": n_outputs}

    def _direction(self, gradient: jax.Array, state: RowState) -> tuple[jax.Array, RowState]:
        velocity = jnp.asarray(self.momentum, gradient.dtype) * state["velocity"] + gradient
        return velocity, {"velocity": velocity}


@dataclasses.dataclass(frozen=True, repr=False)
class RowAdam(RowRule):
    """Adam with one second moment and one step count per row.

    The count is the number of steps that touched the row.

    State: 8 bytes a row (the second moment and the count) with ``b1 = 0``, the default; ``b1 > 0``
    adds 4 bytes for each element of a row, as much as the table.

    Definition, for a row that a step touches; with ``b1 = 0`` the first moment is the gradient::

        count = count + 1
        first_moment = b1 * first_moment + (1 - b1) * gradient
        second_moment = b2 * second_moment + (1 - b2) * (gradient**2).mean()
        mean = first_moment / (1 - b1**count)
        direction = mean / (np.sqrt(second_moment / (1 - b2**count)) + eps)
        row = row - rate * (direction + weight_decay * row)

    Source: docs/semantics.md, section 8.
    """

    b1: float = 0.0
    b2: float = 0.99
    eps: float = 1e-10

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("b1", "b2"):
            self._require(name, 0 <= getattr(self, name) < 1, f"0 <= {name} < 1")
        self._require("eps", self.eps > 0, "it must be above 0")

    @property
    def moves_without_gradient(self) -> bool:
        return True

    def state_sizes(self, n_outputs: int) -> dict[str, int]:
        sizes = {"second_moment": 1, "count": 1}
        return {**sizes, "first_moment": n_outputs} if self.b1 else sizes

    def _direction(self, gradient: jax.Array, state: RowState) -> tuple[jax.Array, RowState]:
        def average(name: str, decay: float, value: jax.Array) -> jax.Array:
            b = jnp.asarray(decay, value.dtype)
            mean: jax.Array = b * state[name] + (1 - b) * value
            return mean

        def correct_bias(moment: jax.Array, decay: float) -> jax.Array:
            return moment / (1 - jnp.power(jnp.asarray(decay, moment.dtype), count))

        count = state["count"] + 1
        square = _mean_square(gradient)
        new = {"count": count, "second_moment": average("second_moment", self.b2, square)}
        if self.b1:
            new["first_moment"] = average("first_moment", self.b1, gradient)
            gradient = correct_bias(new["first_moment"], self.b1)
        deviation = jnp.sqrt(correct_bias(new["second_moment"], self.b2))
        return gradient / (deviation + jnp.asarray(self.eps, gradient.dtype)), new
