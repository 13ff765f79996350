"""Pallas implementations for GPUs (Mosaic GPU) and TPU TensorCores."""
