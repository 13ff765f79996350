"""Ops on several devices under plain jit: the bits of one device, for every layout of tables, groups and sequences."""

import contextlib
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from machine import needs_devices

import lutjax
from lutjax import reads
from lutjax.ops.lut_at_places import Windows, lut_at_places

pytestmark = [pytest.mark.slow, needs_devices(8)]


T, BATCH, LENGTH, FEATURES = 8, 16, 4, 6


RNG = np.random.default_rng(0)


READ = reads.Confidence()


def normal(*shape):
    return RNG.normal(size=shape).astype(np.float32)


MESHES = {"data": (8, 1), "detectors": (1, 8), "both": (2, 4)}


def mesh_of(name, kind="auto", n_devices=8):
    types = {"auto": jax.sharding.AxisType.Auto, "explicit": jax.sharding.AxisType.Explicit}
    shape = MESHES[name] if n_devices == 8 else (1, n_devices)
    devices = np.array(jax.devices()[:n_devices]).reshape(shape)
    return Mesh(devices, ("data", "detectors"), axis_types=(types[kind],) * 2)


def scored(read, x, weights, anchors, groups, **options):
    return lutjax.scored_lut(x, weights, anchors, read.initial(), read=read, groups=groups, **options)


def integers(x, weights, anchors, groups):
    return scored(reads.PowersOfTwo(), x, lutjax.quantize_tables(weights, groups=groups), anchors, groups)


def weighted(x, weights, anchors, groups):
    index, coefficients = READ(lutjax.margins(x, anchors, groups=groups), READ.initial())
    return lutjax.weighted_lookup(weights, index, coefficients, groups=groups)


def sparse(n_lists, x, weights, anchors, groups):
    targets = np.random.default_rng(0).integers(-1, 6, (n_lists or len(weights), 1, weights.shape[2]))
    return lutjax.sparse_lut(x, weights, anchors, targets.astype(np.int32), 6, groups=groups)


def at_places(reached, x, weights, anchors, groups):
    windows = Windows((1, groups, FEATURES), (1, 1), (1, 1), (0, 0), FEATURES)
    targets = np.random.default_rng(0).integers(-1, 6, (groups, weights.shape[2])).astype(np.int32)
    options = {"targets": targets, "n_outputs": 6} if reached else {}
    return lut_at_places(x[:, None], weights, anchors, windows=windows, groups=groups, **options)


def convolved(x, weights, anchors, groups):
    images = jnp.broadcast_to(x.reshape(len(x), 1, 1, groups * FEATURES), (len(x), 1, 2, groups * FEATURES))
    read = reads.PowersOfTwo()
    return lutjax.conv_lut(images, weights, anchors, read.initial(), kernel=1, groups=groups, read=read)


EVERY_READ = (reads.Hard(), reads.Blend(), reads.SoftSign(), reads.Confidence(), reads.PowersOfTwo(ways=1))


IN_GROUPS = {  # ops of inputs [B, G, I], tables, anchors and the number of groups
    "powers of two": functools.partial(scored, reads.PowersOfTwo()),
    **{f"{read}": functools.partial(scored, read) for read in EVERY_READ},
    "sum": lambda x, *rest: scored(READ, x[:, :1], *rest, sum_groups=True),
    "dropout": lambda x, *rest: scored(READ, x, *rest, keep=jnp.asarray([[1.0, 0]] * len(x)).repeat(len(rest[0]) // 2, 1)),
    "integers": integers,
    "weighted": weighted,
    "lut": lambda x, w, anchors, groups: lutjax.lut(x, w, anchors, groups=groups),
    "sparse": functools.partial(sparse, 0),
    "sparse, one list": functools.partial(sparse, 1),
    "places": functools.partial(at_places, False),
    "places, targets": functools.partial(at_places, True),
    "convolution": convolved,
}  # fmt: skip


# Tables, groups, devices: whole groups, halves, parts of several, and tables that cannot be divided.
SIZES_OF_GROUPS = [
    (4, 2, 4), (8, 2, 4), (6, 3, 2), (6, 2, 3), (4, 1, 4), (4, 4, 2), (16, 2, 8), (12, 4, 3), (6, 3, 4), (10, 5, 3),
]  # fmt: skip


OVER_DEVICES = [
    *(("powers of two", sizes, "auto") for sizes in SIZES_OF_GROUPS),
    *zip(IN_GROUPS, itertools.cycle(SIZES_OF_GROUPS), itertools.cycle(("explicit", "auto")), strict=False),
]


@pytest.mark.parametrize(("name", "sizes", "kind"), OVER_DEVICES)
def test_groups_over_devices(name, sizes, kind):
    n_tables, groups, n_devices = sizes
    anchors = lutjax.sample_anchors(jax.random.key(0), FEATURES, n_tables, 3)
    weights, x = normal(n_tables, 8, 5), normal(4, groups, FEATURES)

    def loss(weights, x):
        y = IN_GROUPS[name](x, weights, anchors, groups)
        return jnp.sum(jnp.sin(y)), y

    run = jax.jit(loss if name == "integers" else jax.value_and_grad(loss, (0, 1), has_aux=True))
    mesh = mesh_of("detectors", kind, n_devices)
    place = P() if n_tables % n_devices else P("detectors")
    with jax.set_mesh(mesh) if kind == "explicit" else contextlib.nullcontext():
        actual = run(*jax.device_put((weights, x), (NamedSharding(mesh, place), NamedSharding(mesh, P()))))
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(run(weights, x)), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5, rtol=2e-5)
