"""Training: texts, optimizers for tables, loops and checkpoints."""

from lutjax.lazy import modules_of

__getattr__ = modules_of(__name__)
