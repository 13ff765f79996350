"""Values and every cotangent of every op, as defined, wherever its arguments lie on a mesh of devices."""

import itertools
import math

import jax
import pytest
from cases import slow_except
from hypothesis import given, settings, strategies as st
from machine import needs_devices

from properties import on_meshes
from properties.bounds import bounded
from properties.strategies import POOLS, SIZES, calls, is_float64

pytestmark = needs_devices(4)

# Sizes of an op that four devices can share in some way; a sixth of a mesh's cost is the drawing, the rest compilation.
EVEN = {"batch": (4,), "detectors": 4, "gates": 4, "trees": 4, "inputs": 4, "outputs": 4, "queries": 4}
FIRST = {op: next(iter(pool)) for op, pool in POOLS.items()}
FAST = ("lookup", "scored_lut", "weighted_lookup", "margins", "lut_at_places")


def even(sizes):
    """Sizes that divide, where these sizes have an axis; detectors are a multiple of their groups, too."""
    found = {**sizes, **{n: size for n, size in EVEN.items() if sizes.get(n)}}
    if found.get("detectors"):
        found["detectors"] = math.lcm(found["detectors"], found.get("groups") or 1)
    return found


def on_a_mesh(op, sizes):
    return calls(op, sizes).flatmap(lambda call: st.tuples(st.just(call), on_meshes.places(call)))


@pytest.mark.parametrize(
    ("op", "kind"),
    slow_except(
        itertools.product(POOLS, on_meshes.KINDS), "lookup-explicit", "weighted_lookup-auto", "margins-auto"
    ),
)
def test_values_and_cotangents(op, kind):
    @bounded(2)
    @given(on_a_mesh(op, even(POOLS[op][FIRST[op]])))
    def check(drawn):
        on_meshes.check(*drawn, kind)

    check()


@pytest.mark.slow
@pytest.mark.parametrize("kind", on_meshes.KINDS)
@pytest.mark.parametrize("op", POOLS)
def test_every_size(op, kind):
    @settings(settings.get_profile("quick"))
    @given(
        st.sampled_from(tuple(POOLS[op])).flatmap(
            lambda name: st.tuples(st.just(name), on_a_mesh(op, even(POOLS[op][name])))
        )
    )
    def check(drawn):
        name, of = drawn
        with jax.enable_x64(is_float64(POOLS[op][name])):
            on_meshes.check(*of, kind)

    check()
    jax.clear_caches()


@pytest.mark.slow
@pytest.mark.parametrize("kind", on_meshes.KINDS)
@pytest.mark.parametrize("op", SIZES)
def test_drawn_sizes(op, kind):
    @settings(settings.get_profile("quick"))
    @given(SIZES[op].flatmap(lambda sizes: st.tuples(st.just(sizes), on_a_mesh(op, sizes))))
    def check(drawn):
        sizes, of = drawn
        with jax.enable_x64(is_float64(sizes)):
            on_meshes.check(*of, kind)

    check()
    jax.clear_caches()
