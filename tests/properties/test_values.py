"""Values and every cotangent of every op, as defined, on drawn arguments.

Sizes come from a pool by name, so that each is tried in every run; values are drawn. ``pytest -m slow`` draws sizes too.
"""

import jax
import pytest
from hypothesis import given

from properties import checking
from properties.strategies import POOLS, calls, is_float64

EXAMPLES = [pytest.param(op, name, id=f"{op}-{name}") for op, pool in POOLS.items() for name in pool]


@pytest.mark.parametrize(("op", "name"), EXAMPLES)
def test_values_and_cotangents(op, name):
    sizes = POOLS[op][name]

    @given(calls(op, sizes))
    def check(call):
        checking.check(call)

    with jax.enable_x64(is_float64(sizes)):
        check()
