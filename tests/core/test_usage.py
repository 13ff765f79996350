"""Reads of the rows of tables: counts against loops, in every library, under jit and on several devices."""

import json

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn, nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import lutjax
from lutjax import reads
from lutjax.layers import haiku, linen, nnx as layers
from lutjax.training import lm_runs, reports

BATCH, LENGTH, INPUTS, T = 3, 4, 6, 3
RNG = np.random.default_rng(0)
X = RNG.normal(size=(BATCH, LENGTH, INPUTS)).astype(np.float32)
POSITIONS = RNG.normal(size=(LENGTH - 1, 1, 2)).astype(np.float32)
SEGMENTS = np.array([[0, 0, 1, 1]], np.int32)


def anchors(n, inputs=INPUTS, seed=2):
    return lutjax.sample_anchors(jax.random.key(seed), inputs, T, n)


def detected(vectors, pairs):
    """Rows that vectors ``[n, inputs]`` address, ``[n, T]``."""
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


@pytest.mark.slow
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
    found = jax.jit(lutjax.usage(model))(tables, X)

    flat = x.reshape(-1, INPUTS)
    rows = detected(flat, pointwise)
    margins = np.abs(flat[:, pointwise[..., 0]] - flat[:, pointwise[..., 1]])
    neighbors = rows ^ 1 << margins.argmin(-1)
    bits = detected(flat, one).reshape(BATCH, LENGTH, T)
    places = (positions > 0) @ [1, 2]
    of_pair = [
        [bits[b, j] << 3 | bits[b, i] << 2 | places[j - i - 1]] for b, j, i in pairs_that_count(segments=True)
    ]
    of_all = [[bits[b, j] << 1 | bits[b, i]] for b, j, i in pairs_that_count(causal=False)]
    vectors = [np.concatenate([x[b, i], x[b, j], positions[j - i - 1]]) for b, j, i in pairs_that_count()]
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
    assert set(found) == set(want)
    for name, counts in want.items():
        assert found[name].counts.dtype == np.int32
        np.testing.assert_array_equal(found[name].counts, counts, err_msg=name)


def test_statistics_by_loops():
    counts = np.array([[5, 0, 2, 1], [0, 0, 0, 0], [1, 1, 1, 1], [0, 7, 0, 0]])
    found = lutjax.Usage(jnp.asarray(counts, jnp.int32))
    for t, table in enumerate(counts):
        shares = [c / sum(table) for c in table if c]
        assert found.reads[t] == sum(table)
        assert found.never_read[t] == 4 - len(shares)
        np.testing.assert_allclose(found.entropy[t], -sum(p * np.log2(p) for p in shares), rtol=1e-12)
        assert found.largest_share[t] == max(shares, default=0)
    assert not np.signbit(found.entropy).any()
    twice = found + found
    np.testing.assert_array_equal(twice.counts, 2 * counts)
    np.testing.assert_array_equal(twice.entropy, found.entropy)
    (table,) = reports.tables({"a": twice})
    assert (table.tables, table.rows, table.reads, table.never_read) == (4, 4, 38, 8)
    assert "never read 8 of 16 rows" in table.line()
    assert json.loads(json.dumps(table.entropy)) == found.entropy.tolist()


@pytest.mark.slow
def test_libraries():
    x = X[:, 0]
    model = nnx.Sequential(
        layers.LUT(INPUTS, INPUTS, n_detectors=T, n_anchors=2, rngs=nnx.Rngs(0)),
        layers.LUT(INPUTS, 2, n_detectors=T, n_anchors=2, rngs=nnx.Rngs(1)),
    )
    first, second = (layer.anchors[...] for layer in model.layers)
    want = [count(detected(np.asarray(x), first), 4), count(detected(np.zeros((BATCH, INPUTS)), second), 4)]

    def check(found, names):
        assert set(found) == set(names)
        for name, counts in zip(names, want, strict=True):
            np.testing.assert_array_equal(found[name].counts, counts)

    check(jax.jit(lutjax.usage(model))(x), ["layers/0/weights", "layers/1/weights"])
    check(lutjax.usage(lambda model, x: model(x))(model, x), ["layers/0/weights", "layers/1/weights"])

    sizes = [(INPUTS, INPUTS), (INPUTS, 2)]
    ids = [first, second]
    flax = nn.Sequential(
        [linen.LUT(*size, n_detectors=T, n_anchors=2, anchors=i) for size, i in zip(sizes, ids, strict=True)]
    )
    variables = flax.init(jax.random.key(0), x)
    check(
        jax.jit(lutjax.usage(flax.apply))(variables, x),
        [f"params/layers_{i}/weights" for i in range(2)],
    )

    def network(x):
        for i, size in enumerate(sizes):
            x = haiku.LUT(*size, n_detectors=T, n_anchors=2, anchors=ids[i])(x)
        return x

    f = hk.transform_with_state(network)
    params, state = f.init(jax.random.key(0), x)
    check(jax.jit(lutjax.usage(f.apply))(params, state, None, x), ["lut/weights", "lut_1/weights"])


@pytest.mark.slow
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


@pytest.mark.slow
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


def test_counts_beyond_int32_are_refused(monkeypatch):
    """Counts are bounded in one call before it counts, and of a sum of batches where it is looked at."""
    anchors, weights = np.int32([[[0, 1]]]), jnp.ones((1, 2, 3))
    counted = lutjax.usage(lambda w, x: lutjax.lut(x, w, anchors))
    monkeypatch.setattr("lutjax.tables._usage._MOST_READS", 4)
    assert counted(weights, jnp.ones((4, 2)))["lookup 1"].reads == 4
    with pytest.raises(
        ValueError, match="lookup reads each table up to 5 times in one call, more than int32"
    ):
        counted(weights, jnp.ones((5, 2)))
    many = lutjax.Usage(jnp.full((1, 2), 2**30, jnp.int32))
    assert (many.reads == 2**31).all()
    with pytest.raises(ValueError, match=r"went beyond int32\. Add batches in int64 of NumPy"):
        _ = (many + many).reads


def test_a_look_up_inside_of_a_transformation_is_refused():
    pairs, table = anchors(3), jnp.zeros((T, 8, 2))
    for transform in (jax.jit, jax.checkpoint, jax.vmap):
        inside = lutjax.usage(lambda table, x, of=transform: of(lambda x: lutjax.lut(x, table, pairs))(x))
        with pytest.raises(ValueError, match=r"looked up inside a jit.*Count inside of the transformation"):
            inside(table, X)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["gpt", "lut"])
def test_language_models_report_reads(model, tmp_path):
    text = tmp_path / "text"
    text.write_bytes(bytes(np.random.default_rng(0).integers(97, 103, 4000).astype(np.uint8)))
    sizes = {
        "n_layers": 1,
        "n_heads": 1,
        "context": 8,
        "features": 8,
        "steps": 1,
        "batch_size": 2,
        "usage": True,
    }
    sizes |= (
        {"lut_heads": 2, "lut_tables": 2, "lut_bits": 3, "remat": True}
        if model == "gpt"
        else {"n_detectors": 2, "n_anchors": 2, "n_position_bits": 1, "ffn_detectors": 2, "ffn_anchors": 3}
    )
    experiment = lm_runs.LanguageModel.new(sizes, text, model)
    part = next(p for p in experiment.parts() if p.name == "usage.json")
    lines = part.do(experiment.run.init(), tmp_path / "usage.json")
    found = json.loads((tmp_path / "usage.json").read_text())
    assert len(lines) == len(found) == (1 if model == "gpt" else 3)
    n_windows = -(-(experiment.text.test.size - 1) // 8)
    padded = -(-n_windows // 64) * 64
    for table in found:
        if model == "lut":
            pairs = 28 if table["rows"] == 32 else 8
            assert table["reads"] == padded * pairs * table["tables"]
        assert 0 <= table["never_read"] < table["tables"] * table["rows"]
    assert not any(
        p.name == "usage.json"
        for p in lm_runs.LanguageModel.new({**sizes, "usage": False}, text, model).parts()
    )
