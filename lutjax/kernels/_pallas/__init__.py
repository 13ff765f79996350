"""Implementations in Pallas: for GPUs (Mosaic GPU), and for the TensorCores and the SparseCores of TPUs."""
