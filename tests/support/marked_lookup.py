"""A recognizable `lookup` implementation: its outputs are larger by `MARK`."""

from lutjax.kernels._xla import lookup

MARK = 1024.0


def forward(*arguments, **options):
    return lookup.forward(*arguments, **options) + MARK


backward = lookup.backward
