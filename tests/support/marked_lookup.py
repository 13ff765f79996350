"""An implementation of `lookup` that can be told from others: its outputs are larger by `MARK`."""

from typing import Any

import jax

from lutjax.kernels._xla import lookup

MARK = 1024.0


def forward(*arguments: Any, **options: Any) -> jax.Array:
    return lookup.forward(*arguments, **options) + MARK


backward = lookup.backward
