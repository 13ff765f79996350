"""Implementations of the ops: a registry, and a folder for each platform."""

from lutjax.kernels import catalogue
from lutjax.kernels.registry import kernel_registry

catalogue.register(kernel_registry)
