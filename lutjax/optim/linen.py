"""Training of Flax Linen models with tables: `lutjax.optim` in a train state."""

from collections.abc import Callable, Mapping
from typing import Any

from jaxtyping import Int

from lutjax._typing import Array
from lutjax.extras import require_optional
from lutjax.optim._optimizer import Optimizer

with require_optional(__name__):
    from flax import struct


__all__ = ["TrainState"]


class TrainState(struct.PyTreeNode):
    """Training state for a jitted step, like `flax.training.train_state.TrainState`.

    A pytree: jit the step with this state donated, and tables are updated in place.

    Attributes:
      apply_fn: the model's ``apply``.
      params: its collection ``"params"``.
      others: its other collections by name: anchors, targets, statistics.
      tx: optimizer of the parameters.
      opt_state: state of `tx`.

    Source: docs/semantics.md, section 8.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from lutjax.layers.linen import LUT, tables_of
      >>> from lutjax import optim
      >>> from lutjax.optim.linen import TrainState
      >>> model = LUT(8, 5, n_detectors=4, n_anchors=10)
      >>> example = jax.random.key(0), jnp.ones((3, 8))
      >>> others = model.init(*example)
      >>> params = others.pop("params")
      >>> tx = optim.Optimizer(optim.RowAdagrad(), rate=0.1, tables=tables_of(model.init, *example))
      >>> state = TrainState.create(apply_fn=model.apply, params=params, others=others, tx=tx)
      >>> def step(state, x):
      ...     def loss(params):
      ...         return ((state.apply_fn({"params": params, **state.others}, x) - 1) ** 2).mean()
      ...     value, gradients = optim.value_and_grad(loss, tables=state.tx.tables)(state.params)
      ...     return state.apply_gradients(grads=gradients), value
      >>> step = jax.jit(step, donate_argnums=0)
      >>> for _ in range(3):
      ...     state, value = step(state, jnp.ones((3, 8)))
      >>> int(state.step), round(float(value), 2)
      (3, 0.16)
    """

    apply_fn: Callable[..., Any] = struct.field(pytree_node=False)
    params: Any
    others: Any
    tx: Optimizer = struct.field(pytree_node=False)
    opt_state: Any

    @property
    def step(self) -> Int[Array, ""]:
        """Completed steps."""
        step: Array = self.opt_state.step
        return step

    @classmethod
    def create(
        cls,
        *,
        apply_fn: Callable[..., Any],
        params: Any,
        tx: Optimizer,
        others: Any = None,
        **more: Any,
    ) -> "TrainState":
        """Return the state before the first step.

        Args:
          apply_fn: the model's ``apply``.
          params: its collection ``"params"``.
          tx: optimizer of the parameters.
          others: its other collections by name.
          **more: attributes of a subclass.

        Raises:
          ValueError: as ``tx.init``.
        """
        others = {} if others is None else others
        state = tx.init(params)
        return cls(apply_fn=apply_fn, params=params, others=others, tx=tx, opt_state=state, **more)

    def apply_gradients(self, *, grads: Any, **more: Any) -> "TrainState":
        """Return the state after a step.

        Args:
          grads: from `lutjax.optim.value_and_grad` of the parameters.
          **more: attributes to replace, such as `others` with new statistics.

        Raises:
          ValueError, TypeError: as ``tx.apply``.
        """
        params, opt_state = self.tx.apply(self.params, grads, self.opt_state)
        return self.replace(params=params, opt_state=opt_state, **more)

    def current(self, rows: Mapping[str, Any] | None = None) -> "TrainState":
        """Return the state with accumulated decay applied: see `lutjax.optim.Optimizer.current`.

        Raises:
          ValueError: as ``tx.current``.
        """
        params, opt_state = self.tx.current(self.params, self.opt_state, rows)
        return self.replace(params=params, opt_state=opt_state)
