"""Implementations in Pallas, for GPUs and TPUs. None is registered yet."""
