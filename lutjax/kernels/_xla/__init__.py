"""Implementations in plain `jax.numpy`, for every device."""
