"""Implementations in Triton, for GPUs, through jax-triton. None is registered yet."""
