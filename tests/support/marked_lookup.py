"""An implementation of `lookup` that can be told from others: its outputs are larger by `MARK`."""

from lutjax.kernels._xla import lookup

MARK = 1024.0


def forward(*arguments, **options):
    return lookup.forward(*arguments, **options) + MARK


backward = lookup.backward
