"""Training of Flax NNX models with tables: `lutjax.optim` for modules."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax

from lutjax.extras import require_optional
from lutjax.layers.nnx import host_tables_of, tables_of
from lutjax.optim import _optimizer
from lutjax.tables import collect
from lutjax.tables.collect import Chosen
from lutjax.tables.gradient import TableGradient
from lutjax.tables.host_tables import HostTables

with require_optional(__name__):
    from flax import nnx


__all__ = ["Optimizer", "update_host", "value_and_grad"]


def value_and_grad(
    loss: Callable[..., Any],
    *,
    tables: Chosen | None = None,
    has_aux: bool = False,
    host: bool = False,
) -> Callable[..., tuple[Any, Any]]:
    """Return `lutjax.optim.value_and_grad` for a loss of a module.

    If the loss changes other variables than `nnx.Param`, such as batch-norm statistics or the
    counts of an `nnx.Rngs`, the module keeps the changes, as in `nnx.value_and_grad`. The loss must
    not add variables.

    Args:
      loss: a function of an `nnx.Module` and other arguments that are not modules; returns a
        scalar, or with `has_aux` a scalar and a pytree.
      tables: table parameters: their names, the paths in the module joined by ``/``, or a function
        of name and array. By default all `lutjax.layers.nnx.Tables` of the layers.
      has_aux: as in JAX.
      host: return a pair of gradients: dense and device-table gradients, then gradients of
        host-resident tables, a `TableGradient` by table name, for `update_host`.

    Returns:
      A function like `loss` that returns its value (and aux) and gradients: nested dicts of the
      module's `nnx.Param`, like `nnx.to_pure_dict`, with a `TableGradient` for each table.

    Raises:
      TableUseError: as `lutjax.optim.value_and_grad`. A layer must pass its table to the op as
        ``variable.get_value()``; an index, even ``variable[...]``, makes another array. The module
        is unchanged then.

    Source: docs/semantics.md, section 8.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from lutjax.layers.nnx import LUT
      >>> from lutjax.optim.nnx import value_and_grad
      >>> model = nnx.Sequential(LUT(8, 5, n_detectors=4, n_anchors=10, rngs=nnx.Rngs(0)))
      >>> loss, gradients = value_and_grad(lambda model, x: model(x).sum())(model, jnp.ones((3, 8)))
      >>> gradients["layers"][0]["weights"].cotangent.shape
      (3, 5)
    """

    def compute_gradients(model: nnx.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        parts: Any = nnx.split(model, nnx.Param, ...)
        graph, params, others = parts

        def evaluate(arrays: Any) -> tuple[Any, tuple[Any, Any]]:
            # A copy of the module inside the gradient, so that traced values never reach `model`.
            variables = fill_state(others, nnx.to_pure_dict(others))
            inside = nnx.merge(graph, fill_state(params, arrays), variables)
            result = loss(inside, *args, **kwargs)
            value, aux = result if has_aux else (result, None)
            return value, (aux, nnx.to_pure_dict(nnx.state(inside, nnx.Not(nnx.Param))))

        names = tables_of(model) if tables is None else tables
        on_host = None
        if host:
            on_host = {name: table for name, (table, _) in host_tables_of(model).items()}
        gradient = collect.value_and_grad(evaluate, tables=names, has_aux=True, host=on_host)
        (value, (aux, changed)), gradients = gradient(nnx.to_pure_dict(params))
        nnx.update(model, fill_state(others, changed))
        return ((value, aux) if has_aux else value), gradients

    return compute_gradients


def update_host(model: nnx.Module, gradients: Mapping[str, TableGradient], rate: Any) -> None:
    """Update the host-resident tables of a module by one step; call it outside of jit.

    Each table uses the rule given to ``table.start(rule)``.

    Args:
      model: the module.
      gradients: gradients of these tables, from `value_and_grad` with ``host=True``.
      rate: the learning rate of the step.

    Raises:
      ValueError: a table has no rule yet, or the gradients belong to another module.

    Source: docs/semantics.md, section 8.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from lutjax.layers.nnx import ProductKeyMemory
      >>> from lutjax.optim.nnx import update_host, value_and_grad
      >>> from lutjax.optim import RowAdam
      >>> layer = ProductKeyMemory(8, 4, n_keys=16, k=2, placement="host", rngs=nnx.Rngs(0))
      >>> layer.weights.start(RowAdam())
      >>> @nnx.jit
      ... def step(layer, x):
      ...     def loss(layer):
      ...         return jnp.mean((layer(x) - 1) ** 2)
      ...     value, (_, gradients) = value_and_grad(loss, host=True)(layer)
      ...     return value, gradients
      >>> losses = []
      >>> for _ in range(3):
      ...     loss, gradients = step(layer, jnp.ones((3, 8)))
      ...     update_host(layer, gradients, 0.1)
      ...     losses.append(float(loss))
      >>> losses[0] > losses[1] > losses[2]
      True
    """
    tables = {name: table for name, (table, _) in host_tables_of(model).items()}
    HostTables(tables).update(gradients, rate)


class Optimizer(nnx.Module):
    """A `lutjax.optim.Optimizer` with its state, as `nnx.Optimizer` wraps an Optax optimizer.

    Args:
      model: module with the trained `nnx.Param`.
      tx: optimizer. If it does not name the tables, all `lutjax.layers.nnx.Tables` are tables.

    Attributes:
      tx: the given optimizer, with table names.
      state: an `OptimizerState` of `nnx.optimizer.OptState` variables.

    Raises:
      ValueError: as ``tx.init``.

    Source: docs/semantics.md, section 8.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from lutjax.layers.nnx import LUT
      >>> from lutjax import optim
      >>> from lutjax.optim.nnx import Optimizer, value_and_grad
      >>> model = LUT(8, 5, n_detectors=4, n_anchors=10, rngs=nnx.Rngs(0))
      >>> optimizer = Optimizer(model, optim.Optimizer(optim.RowAdagrad(), rate=0.1))
      >>> @nnx.jit(donate_argnums=(0, 1))
      ... def step(model, optimizer, x):
      ...     def loss(model):
      ...         return ((model(x) - 1) ** 2).mean()
      ...     value, gradients = value_and_grad(loss)(model)
      ...     optimizer.update(model, gradients)
      ...     return value
      >>> [round(float(step(model, optimizer, jnp.ones((3, 8)))), 2) for _ in range(3)]
      [1.0, 0.36, 0.16]
    """

    def __init__(self, model: nnx.Module, tx: _optimizer.Optimizer):
        self.tx = tx if tx.tables is not None else dataclasses.replace(tx, tables=tables_of(model))
        self.state = nnx.data(jax.tree.map(nnx.optimizer.OptState, self.tx.init(_arrays(model))))

    def update(self, model: nnx.Module, gradients: Any) -> None:
        """Update the module's parameters by one step.

        Args:
          model: the module.
          gradients: from `value_and_grad` with the same choice of tables, or nested dicts of arrays
            with the same structure.

        Raises:
          ValueError, TypeError: as ``tx.apply``; nothing is changed then.
        """
        self._keep(model, *self.tx.apply(_arrays(model), gradients, self._state))

    def current(self, model: nnx.Module, rows: Mapping[str, Any] | None = None) -> None:
        """Apply all accumulated decay to the module's tables: see `lutjax.optim.Optimizer.current`.

        Raises:
          ValueError: as ``tx.current``.
        """
        self._keep(model, *self.tx.current(_arrays(model), self._state, rows))

    @property
    def _state(self) -> Any:
        return jax.tree.map(_value, self.state, is_leaf=_is_variable)

    def _keep(self, model: nnx.Module, moved: Any, state: Any) -> None:
        nnx.update(model, fill_state(nnx.state(model, nnx.Param), moved))
        jax.tree.map(lambda v, a: v.set_value(a), self.state, state, is_leaf=_is_variable)


def fill_state(state: Any, arrays: Any) -> Any:
    """Return a copy of an `nnx.State` with values from nested dicts of arrays."""
    # A copy, because `replace_by_pure_dict` writes into its argument.
    state = jax.tree.map(lambda a: a, state)
    nnx.replace_by_pure_dict(state, arrays)
    return state


def _arrays(model: nnx.Module) -> Any:
    return nnx.to_pure_dict(nnx.state(model, nnx.Param))


def _is_variable(a: Any) -> bool:
    return isinstance(a, nnx.Variable)


def _value(variable: nnx.Variable[Any]) -> Any:
    return variable.get_value()
