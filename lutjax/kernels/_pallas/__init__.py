"""Implementations in Pallas: for GPUs (Mosaic GPU), and for the TensorCores of TPUs."""
