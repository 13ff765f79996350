"""Training step of a classifier, for benchmarks."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx


def step_of(model_of: Any, config: Any, **options: Any) -> tuple[Any, Any]:
    """Return a training step ``(state, x, labels) -> (state, loss)`` of Adam on softmax cross entropy, and its first state.

    Args:
      model_of: an NNX module of the config. options: of it.
    """
    model = nnx.jit(lambda: model_of(config, rngs=nnx.Rngs(0), **options))()
    graph, params, others = nnx.split(model, nnx.Param, ...)
    optimizer = optax.adam(0.01)

    def step(state: Any, x: jax.Array, labels: jax.Array) -> Any:
        params, others, moments = state

        def loss(params: Any) -> jax.Array:
            logits = nnx.merge(graph, params, others)(x).astype(jnp.float32)
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

        value, gradients = jax.value_and_grad(loss)(params)
        updates, moments = optimizer.update(gradients, moments)
        return (optax.apply_updates(params, updates), others, moments), value

    return step, (params, others, optimizer.init(params))
