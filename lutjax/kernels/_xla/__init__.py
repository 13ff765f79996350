"""Pure `jax.numpy` implementations for every device."""
