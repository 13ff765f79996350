"""Implementations in Pallas for the TensorCores of TPUs."""
