"""Implementations in Pallas for the SparseCores of TPUs."""
