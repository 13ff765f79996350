"""Kernels in Triton, for GPUs, through jax-triton."""
