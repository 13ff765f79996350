"""Implementations of the ops: a registry, and a folder for each platform."""
