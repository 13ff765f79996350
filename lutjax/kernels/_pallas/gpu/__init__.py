"""Implementations in Pallas for GPUs, by Mosaic GPU: Hopper and newer."""
