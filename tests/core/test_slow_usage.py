"""Read counts for every lookup, compared with loops, and their names in models."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import lutjax
from lutjax import reads
from lutjax.layers import nnx as layers

BATCH, LENGTH, INPUTS, T = 3, 4, 6, 3


RNG = np.random.default_rng(0)


X = RNG.normal(size=(BATCH, LENGTH, INPUTS)).astype(np.float32)


POSITIONS = RNG.normal(size=(LENGTH - 1, 1, 2)).astype(np.float32)


SEGMENTS = np.array([[0, 0, 1, 1]], np.int32)


def anchors(n, inputs=INPUTS, seed=2):
    return lutjax.sample_anchors(jax.random.key(seed), inputs, T, n)


def detected(vectors, pairs):
    """Rows addressed by vectors ``[n, inputs]``, ``[n, T]``."""
    rows = np.zeros((len(vectors), len(pairs)), int)
    for n, t, r in np.ndindex(len(vectors), *pairs.shape[:2]):
        a, b = pairs[t, r]
        rows[n, t] |= int(vectors[n, a] > vectors[n, b]) << r
    return rows


def count(rows, n_rows):
    counts = np.zeros((T, n_rows), int)
    for row in rows:
        for t in range(T):
            counts[t, row[t]] += 1
    return counts


def pairs_that_count(causal=True, segments=False):
    for b, j, i in np.ndindex(BATCH, LENGTH, LENGTH):
        if (i < j or not causal) and (not segments or SEGMENTS[0, i] == SEGMENTS[0, j]):
            yield b, j, i


def test_every_look_up():
    pointwise, one = np.asarray(anchors(3)), np.asarray(anchors(1))
    x, positions = np.asarray(X), np.asarray(POSITIONS)[:, 0]
    joint = np.asarray(anchors(4, 2 * INPUTS + 2))
    read = reads.Confidence(ways=2)

    def model(tables, x):
        lutjax.lut(x, tables["lut"], pointwise)
        lutjax.lut(x[..., None, :], tables["groups"], pointwise, groups=3)
        lutjax.sparse_lut(x, tables["sparse"], pointwise, jnp.zeros((1, 1, 2), jnp.int32), 1)
        lutjax.scored_lut(x, tables["scored"], pointwise, read.initial(), read=read)
        lutjax.lut_attention(x, tables["attention"], one, POSITIONS, segments=SEGMENTS)
        lutjax.lut_attention(x, tables["all"], one, causal=False)
        lutjax.lut_pair_attention(x, tables["pairs"], joint, POSITIONS)
        return lutjax.lut(x, 2 * tables["lut"], pointwise)

    of_pairs = {"attention": 16, "all": 4, "pairs": 16}
    tables = {
        name: jnp.ones((T, of_pairs.get(name, 8), 2))
        for name in ("lut", "groups", "sparse", "scored", *of_pairs)
    }
    actual = jax.jit(lutjax.usage(model))(tables, X)

    flat = x.reshape(-1, INPUTS)
    rows = detected(flat, pointwise)
    margins = np.abs(flat[:, pointwise[..., 0]] - flat[:, pointwise[..., 1]])
    neighbors = rows ^ 1 << margins.argmin(-1)
    bits = detected(flat, one).reshape(BATCH, LENGTH, T)
    places = (positions > 0) @ [1, 2]
    of_pair = [
        [bits[b, j] << 3 | bits[b, i] << 2 | places[j - i - 1]]
        for b, j, i in pairs_that_count(segments=True)
    ]
    of_all = [[bits[b, j] << 1 | bits[b, i]] for b, j, i in pairs_that_count(causal=False)]
    vectors = [
        np.concatenate([x[b, i], x[b, j], positions[j - i - 1]]) for b, j, i in pairs_that_count()
    ]
    want = {
        "lut": count(rows, 8),
        "groups": count(rows, 8),
        "sparse": count(rows, 8),
        "scored": count(rows, 8) + count(neighbors, 8),
        "attention": count(np.concatenate(of_pair), 16),
        "all": count(np.concatenate(of_all), 4),
        "pairs": count(detected(np.stack(vectors), joint), 16),
        "lookup 1": count(rows, 8),
    }
    assert set(actual) == set(want)
    for name, counts in want.items():
        assert actual[name].counts.dtype == np.int32
        np.testing.assert_array_equal(actual[name].counts, counts, err_msg=name)


def test_libraries():
    x = X[:, 0]
    model = nnx.Sequential(
        layers.LUT(INPUTS, INPUTS, n_detectors=T, n_anchors=2, rngs=nnx.Rngs(0)),
        layers.LUT(INPUTS, 2, n_detectors=T, n_anchors=2, rngs=nnx.Rngs(1)),
    )
    first, second = (layer.anchors[...] for layer in model.layers)
    want = [
        count(detected(np.asarray(x), first), 4),
        count(detected(np.zeros((BATCH, INPUTS)), second), 4),
    ]

    def check(actual, names):
        assert set(actual) == set(names)
        for name, counts in zip(names, want, strict=True):
            np.testing.assert_array_equal(actual[name].counts, counts)

    check(jax.jit(lutjax.usage(model))(x), ["layers/0/weights", "layers/1/weights"])
    check(
        lutjax.usage(lambda model, x: model(x))(model, x), ["layers/0/weights", "layers/1/weights"]
    )


def test_tables_of_integers_and_scaled_gradients():
    pairs, read = anchors(3), reads.PowersOfTwo()
    weights = jax.random.normal(jax.random.key(4), (T, 8, 2))

    def model(tables, x):
        return lutjax.scored_lut(x, tables, pairs, read.initial(), read=read)

    scaled = lutjax.usage(lambda params, x: model(lutjax.scale_gradient(params["w"], 0.5), x))
    floats = jax.jit(scaled)({"w": weights}, X)
    (integers,) = jax.jit(lutjax.usage(model))(lutjax.quantize_tables(weights), X).values()
    np.testing.assert_array_equal(floats["w"].counts, integers.counts)
    assert integers.reads.min() > 0
    assert integers.reads.max() < 2 * BATCH * LENGTH, "reads of coefficient 0 are none"


def test_batches_and_devices_add_up():
    pairs, tables = anchors(3), {"w": jnp.zeros((T, 8, 2))}
    x = jax.random.normal(jax.random.key(3), (16, INPUTS))
    counts = lutjax.usage(lambda tables, x: lutjax.lut(x, tables["w"], pairs))
    want = count(detected(np.asarray(x), np.asarray(pairs)), 8)
    parts = [jax.jit(counts)(tables, part) for part in (x[:8], x[8:])]
    np.testing.assert_array_equal(jax.tree.map(jnp.add, *parts)["w"].counts, want)

    mesh = Mesh(jax.devices()[:4], ("data",))
    divided = jax.device_put(x, NamedSharding(mesh, P("data")))
    np.testing.assert_array_equal(jax.jit(counts)(tables, divided)["w"].counts, want)

    def of_device(tables, x):
        return jax.lax.psum(counts(tables, x), "data")

    run = jax.jit(jax.shard_map(of_device, mesh=mesh, in_specs=(P(), P("data")), out_specs=P()))
    np.testing.assert_array_equal(run(tables, divided)["w"].counts, want)

    explicit = jax.make_mesh(
        (4,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,), devices=jax.devices()[:4]
    )
    of_mesh = jax.device_put(x, NamedSharding(explicit, P("data")))
    tables = jax.device_put(tables, NamedSharding(explicit, P()))
    np.testing.assert_array_equal(jax.jit(counts)(tables, of_mesh)["w"].counts, want)
