"""Training: texts, optimizers for tables, loops and checkpoints."""

from lutjax._lazy import modules_of

__getattr__ = modules_of(__name__)
