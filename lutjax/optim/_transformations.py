"""Optax transformations of dense gradients."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from lutjax.arguments import format_value
from lutjax.extras import require_optional
from lutjax.tables.collect import is_factored
from lutjax.tables.update import broadcast_factors
from lutjax.values._dtypes import accumulator
from lutjax.values._row_rules import DECAY, RowRule, RowState

with require_optional("lutjax.optim"):
    import optax

__all__ = [
    "RowTransformState",
    "next_step",
    "normalized",
    "row_transform",
    "scaled",
    "update_dense",
]


_MOST_STEPS = 2**31 - 1


class RowTransformState(NamedTuple):
    """State of a `row_transform`.

    Attributes:
      step: completed steps, int32.
      rows: row state of each parameter, in the tree of the parameters.
    """

    step: jax.Array
    rows: Any


def row_transform(
    rule: RowRule, learning_rate: optax.ScalarOrSchedule
) -> optax.GradientTransformation:
    """Return the Optax transformation that applies a row rule to dense gradients.

    It composes with `optax.partition`, `optax.masked`, `optax.MultiSteps`, `optax.chain` and
    `optax.inject_hyperparams`. Rows with a nonzero gradient count as read. Use it for small tables,
    and where sparse gradients are unavailable, as inside a `jax.lax.scan`. `Optimizer` updates
    large tables in place.

    Args:
      rule: row rule, such as ``optim.RowAdagrad()``.
      learning_rate: a number or a schedule.

    Returns:
      A transformation of any arrays, with rows along the last axis. Batch dimensions may be added,
      as by a scan over layers. In an array with one axis, such as an edge list, every element is a
      row.

    Raises:
      TypeError: `rule` is not a row rule; on use: a gradient is a `TableGradient`.
      ValueError: on use: no parameters are given.

    Source: docs/semantics.md, section 8.

    Example:
      >>> import functools, jax.numpy as jnp, optax
      >>> from lutjax import optim
      >>> params = {"weights": jnp.zeros((1, 2, 1)), "bias": jnp.zeros(1)}
      >>> tx = optax.partition(
      ...     {"table": optim.row_transform(optim.RowAdagrad(), 0.5), "vector": optax.sgd(0.1)},
      ...     functools.partial(optim.kinds, tables={"weights"}),
      ... )
      >>> gradients = {"weights": jnp.array([[[4.0], [0.0]]]), "bias": jnp.ones(1)}
      >>> updates, _ = tx.update(gradients, tx.init(params), params)
      >>> updates["weights"].ravel(), updates["bias"]
      (Array([-0.5,  0. ], dtype=float32), Array([-0.1], dtype=float32))
    """
    if not isinstance(rule, RowRule):
        raise TypeError(
            f"row_transform: rule is {format_value(rule)}; "
            "expected a row rule, such as optim.RowAdagrad()."
        )

    def init(params: optax.Params) -> RowTransformState:
        def init_rows(param: Any) -> RowState:
            return _like_rows(rule.init(_as_table(param)), param)

        return RowTransformState(jnp.zeros((), jnp.int32), jax.tree.map(init_rows, params))

    def update(
        updates: optax.Updates, state: RowTransformState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, RowTransformState]:
        if params is None:
            raise ValueError(
                "row_transform: params is None; call update(gradients, state, params)."
            )
        rate = learning_rate(state.step) if callable(learning_rate) else learning_rate

        def change(gradient: Any, param: Any, rows: RowState) -> tuple[jax.Array, RowState]:
            _refuse_factored("row_transform", gradient)
            table = _as_table(param)
            dtype = accumulator(table.dtype)
            if param.ndim > 1:
                rows = {name: a.reshape(-1, *a.shape[-2:]) for name, a in rows.items()}
            # The difference, computed in the sum's dtype, keeps all bits of narrow tables.
            table = table.astype(dtype)
            moved, new = update_dense(table, _as_table(gradient), rate, rule, rows)
            return (moved - table).reshape(param.shape), _like_rows(new, param)

        structure: Any
        leaves, structure = jax.tree.flatten(updates, is_leaf=is_factored)
        # Parameters and row states have the structure of the gradients at their leaves.
        others = structure.flatten_up_to(params), structure.flatten_up_to(state.rows)
        changed = [change(*leaf) for leaf in zip(leaves, *others, strict=True)]
        changes = jax.tree.unflatten(structure, [change for change, _ in changed])
        rows = jax.tree.unflatten(structure, [row_state for _, row_state in changed])
        return changes, RowTransformState(next_step(state.step), rows)

    return optax.GradientTransformation(init, update)


def next_step(step: jax.Array) -> jax.Array:
    """Return the step count plus one, saturated at the int32 maximum."""
    return jnp.minimum(step, _MOST_STEPS - 1) + 1


def _as_table(array: Any) -> jax.Array:
    """Return an array as a table ``[tables, rows, outputs]`` or an edge list ``[edges]``."""
    table: jax.Array = jnp.asarray(array)
    return table.reshape(-1, *table.shape[-2:]) if table.ndim > 1 else table.reshape(-1)


def _like_rows(rows: RowState, param: Any) -> RowState:
    return {
        name: a.reshape(*param.shape[:-2], *a.shape[1:]) if a.ndim > 1 else a
        for name, a in rows.items()
    }


def update_dense(
    table: jax.Array,
    gradient: jax.Array,
    rate: Any,
    rule: RowRule,
    state: RowState,
    *,
    rates: Any = None,
) -> tuple[jax.Array, RowState]:
    """Return table and row state after a dense gradient; nonzero rows count as read."""
    dtype = accumulator(table.dtype)
    gradient = gradient.astype(dtype)
    rate = jnp.asarray(rate, dtype) if rates is None else jnp.asarray(rate, dtype) * rates
    moved, new = rule.step_table(table.astype(dtype), gradient, state, rate)
    touched = gradient != 0 if gradient.ndim == 1 else jnp.any(gradient != 0, -1, keepdims=True)
    # The decay of a table belongs to all rows: `next_state` advances it.
    row_state = {name: a for name, a in state.items() if name != DECAY}
    moved, new = jax.tree.map(
        lambda n, o: jnp.where(touched, n.astype(o.dtype), o),
        (moved, {name: new[name] for name in row_state}),
        (table, row_state),
    )
    return moved, rule.next_state(state, new, rate)


def scaled(rates: Mapping[str, Any]) -> optax.GradientTransformation:
    """Return the Optax transformation that multiplies some updates by learning-rate factors.

    Place it after the optimizer in `optax.chain`. For tables of an `Optimizer`, use the same
    factors as `rates`.

    Args:
      rates: factors by parameter name: a number, an array ``[T]`` with one factor per table, or an
        array that broadcasts to the parameter and has the same number of axes.

    Raises:
      ValueError, TypeError: on use: a parameter does not exist, factors have a wrong shape, or a
        gradient is a `TableGradient`.

    Source: docs/semantics.md, section 8.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from lutjax import optim
      >>> tx = optax.chain(optax.sgd(1.0), optim.scaled({"weights": jnp.array([1.0, 0.5])}))
      >>> params = {"bias": jnp.ones(3), "weights": jnp.ones((2, 1, 1))}
      >>> updates, _ = tx.update(params, tx.init(params))
      >>> updates["weights"].ravel(), updates["bias"]
      (Array([-1. , -0.5], dtype=float32), Array([-1., -1., -1.], dtype=float32))
    """

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        names = []

        def multiply(path: Any, value: Any) -> Any:
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            if name not in rates:
                return value
            names.append(name)
            _refuse_factored("scaled", value)
            argument = f"rates[{name!r}]"
            return value * broadcast_factors(
                "scaled", argument, rates[name], value.shape, value.dtype
            )

        multiplied = jax.tree_util.tree_map_with_path(multiply, updates, is_leaf=is_factored)
        unknown = sorted(set(rates) - set(names))
        if unknown:
            raise ValueError(f"scaled: rates names {unknown}, which are no parameters.")
        return multiplied, state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def _refuse_factored(name: str, gradient: Any) -> None:
    if is_factored(gradient):
        raise TypeError(
            f"{name}: a gradient is a TableGradient; use this table's dense gradient (jax.grad, or "
            "to_dense())."
        )


def normalized(eps: float = 1e-16) -> optax.GradientTransformation:
    """Return the Optax transformation that divides each gradient by its largest magnitude.

    The divisor is at least `eps`. It requires dense gradients: the largest magnitude of a sparse
    gradient is unknown before its rows are summed.

    Raises:
      TypeError: on use, a gradient is a `TableGradient`.

    Source: docs/semantics.md, section 8.

    Example:
      >>> import jax.numpy as jnp
      >>> from lutjax import optim
      >>> updates, _ = optim.normalized().update({"w": jnp.array([-4.0, 1.0])}, None)
      >>> updates["w"]
      Array([-1.  ,  0.25], dtype=float32)
    """

    def divide(gradient: Any) -> jax.Array:
        _refuse_factored("normalized", gradient)
        largest = jnp.max(jnp.abs(gradient), initial=0)
        return jnp.divide(gradient, jnp.maximum(largest, jnp.asarray(eps, gradient.dtype)))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        return jax.tree.map(divide, updates, is_leaf=is_factored), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)
