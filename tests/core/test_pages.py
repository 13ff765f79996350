"""Paged caches: keys for many sequences in one pool match separate caches, bit for bit."""

import dataclasses
import functools

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings, strategies as st

from lutjax.layers import _pages, _tables, haiku as of_haiku, linen as of_linen, nnx as of_nnx

FEATURES, OUTPUTS, WINDOW, BLOCKS = 6, 3, 7, (16, 3)
SIZES = {"n_detectors": 4, "n_anchors": 2}
ATTENTION = _tables.LUTAttentionSpec(
    FEATURES, OUTPUTS, **SIZES, n_positions=WINDOW, n_position_bits=2, window=WINDOW
)
SPECS = {
    "ids": dataclasses.replace(ATTENTION, cached="ids"),
    "keys": ATTENTION,
    "pairs": _tables.LUTPairAttentionSpec(
        FEATURES, OUTPUTS, **SIZES, n_positions=WINDOW, n_position_bits=2, window=WINDOW
    ),
}
ENTRIES = 4


def drawn(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def arrays_of(spec):
    rng = np.random.default_rng(0)
    anchors = rng.integers(0, spec.n_inputs, (4, 2, 2))
    anchors[..., 1] = (anchors[..., 0] + 1) % spec.n_inputs
    positions = drawn(1, WINDOW, 1, 2)
    return {
        "anchors": jnp.asarray(anchors, jnp.int32),
        "weights": jnp.asarray(drawn(2, *spec.weights_shape)),
        "positions": jnp.asarray(positions),
    }


@functools.cache
def step(spec):
    return jax.jit(spec.attend_with_cache)


def alone(spec, x):
    """Outputs for one sequence with its own cache, one position at a time."""
    cache, result = spec.empty_cache(x.shape, x.dtype), []
    for position in np.split(x, len(x)):
        y, cache = step(spec)(arrays_of(spec), cache, position)
        result.append(y)
    return np.concatenate(result)


class Sequences:
    def __init__(self, spec, n, order):
        self.spec, self.free = spec, list(order)
        self.cache = spec.empty_cache((1, 1, FEATURES), np.float32, blocks=BLOCKS)
        self.tables, self.lengths = np.full((n, ENTRIES), -1, np.int32), np.zeros(n, np.int32)
        self.found = [[] for _ in range(n)]

    def feed(self, x, counts):
        """Continue all sequences by ``x [n, length, features]``, each with the given number of positions followed by padding."""
        size, width = BLOCKS[1], self.tables.shape[1]
        for row, (length, count) in enumerate(zip(self.lengths, counts, strict=True)):
            for block in range(-(-length // size), -(-(length + count) // size)):
                old = self.tables[row, block % width]
                if old >= 0:
                    self.free.append(old)
                self.tables[row, block % width] = self.free.pop(0)
        segments = np.where(np.arange(x.shape[1]) < np.asarray(counts)[:, None], 0, -1).astype(
            np.int32
        )
        places = {"block_tables": self.tables.copy(), "lengths": self.lengths.copy()}
        y, self.cache = step(self.spec)(arrays_of(self.spec), self.cache, x, segments, **places)
        for row, count in enumerate(counts):
            self.found[row].extend(np.asarray(y)[row, :count])
        self.lengths += np.asarray(counts, np.int32)


@pytest.mark.parametrize("name", ["ids", "pairs"])
def test_sequences_in_one_pool(name):
    spec = SPECS[name]

    @given(
        st.permutations(range(BLOCKS[0])),
        st.lists(
            st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 3)),
            min_size=3,
            max_size=8,
        ),
    )
    def check(order, counts):
        sequences, x = Sequences(spec, 3, order), drawn(5, 3, 32, FEATURES)
        for of_sequences in counts:
            parts = [x[r, n : n + 3] for r, n in enumerate(sequences.lengths)]
            sequences.feed(np.stack(parts), of_sequences)
        for row, actual in enumerate(sequences.found):
            if actual:
                np.testing.assert_array_equal(actual, wanted[row][: len(actual)])

    x = drawn(5, 3, 32, FEATURES)
    wanted = [alone(spec, of) for of in x]
    check()


def test_a_prefix_is_shared():
    spec, x = SPECS["ids"], drawn(5, 2, 9, FEATURES)
    x[1, :3] = x[0, :3]
    sequences = Sequences(spec, 1, range(16))
    sequences.feed(x[:1, :3], (3,))
    shared = sequences.tables[0].copy()
    two = Sequences(spec, 2, sequences.free)
    two.cache, two.tables[:], two.lengths[:] = sequences.cache, shared, 3
    for n in range(3, 9):
        two.feed(x[:, n : n + 1], (1, 1))
    assert two.tables[0, 0] == two.tables[1, 0]
    assert not set(two.tables[0, 1:3]) & set(two.tables[1, 1:3])
    for row in range(2):
        np.testing.assert_array_equal(two.found[row], alone(spec, x[row])[3:])


def _empty(spec):
    return spec.empty_cache((1, 1, FEATURES), jnp.float32, blocks=BLOCKS)


def call(spec=SPECS["ids"], cache=None, x=None, segments=None, **places):
    x = drawn(0, 2, 3, FEATURES) if x is None else x
    cache = spec.empty_cache(x.shape, x.dtype, blocks=BLOCKS) if cache is None else cache
    given = {
        "block_tables": np.zeros((2, ENTRIES), np.int32),
        "lengths": np.zeros(2, np.int32),
        **places,
    }
    return spec.attend_with_cache(arrays_of(spec), cache, x, segments, **given)


BAD = {
    "no tables": (lambda: call(block_tables=None), "block_tables is not given, but the cache is a pool of blocks"),
    "no lengths": (lambda: call(lengths=None), "lengths is not given, but the cache is a pool"),
    "tables of no pool": (
        lambda: call(cache=SPECS["ids"].empty_cache((2, 3, FEATURES), "float32")),
        "block_tables is given, but each sequence has a cache of its own",
    ),
    "short tables": (
        lambda: call(block_tables=np.zeros((2, 2), np.int32)),
        r"block_tables is \[2, 2\] with blocks of 3, so a sequence has 6 places, but a query sees 7 keys; give tables of at least 3 entries",
    ),
    "tables of other sequences": (
        lambda: call(block_tables=np.zeros((3, 4), np.int32)),
        r"block_tables is int32\[3, 4\]; expected \[2, entries\], one of each sequence",
    ),
    "lengths of other sequences": (
        lambda: call(lengths=np.zeros(3, np.int32)), r"lengths is int32\[3\]; expected \[2\]"
    ),
    "segments": (
        lambda: call(segments=np.ones((2, 3), np.int32)), "segments has ids up to 1; a pool of blocks holds keys of segment 0 alone"
    ),
    "a pool of another dtype": (
        lambda: call(cache={"cached_key_index": np.zeros((16, 3, 4), np.int32)}), r"these inputs need uint8\[16, 3, 4\]"
    ),
    "no decoding": (
        lambda: ATTENTION(arrays_of(ATTENTION), drawn(0, 3, FEATURES), lengths=np.zeros(1, np.int32)),
        "lengths is given, but the call does not decode",
    ),
    "blocks without positions": (
        lambda: dataclasses.replace(ATTENTION, blocks=(4, 0)), r"blocks is \(4, 0\); expected the number of blocks"
    ),
    "blocks of counts": (
        lambda: _tables.LUTAttentionSpec(FEATURES, OUTPUTS, **SIZES, cached="counts", blocks=(4, 4)),
        "but counts have no positions",
    ),
}  # fmt: skip


@pytest.mark.usefixtures("without_typechecking")
@pytest.mark.parametrize("name", BAD)
def test_bad_input(name):
    run, message = BAD[name]
    with pytest.raises(ValueError, match=f"LUTAttention: {message}|LUTAttention: .*{message}"):
        run()


class TestSlow:
    def test_libraries(self):
        spec, x = SPECS["ids"], jnp.asarray(drawn(5, 2, 6, FEATURES))
        arrays, want = arrays_of(spec), jnp.stack([alone(spec, np.asarray(of)) for of in x])
        options = {
            **SIZES,
            "n_positions": WINDOW,
            "n_position_bits": 2,
            "window": WINDOW,
            "cached": "ids",
        }
        tables = jnp.asarray([[5, 2, -1], [0, 7, -1]], jnp.int32)
        parts = [(x[:, :5], 0), (x[:, 5:], 5)]

        def places(length):
            return {
                "block_tables": tables,
                "lengths": jnp.full((2,), length, jnp.int32),
                "decode": True,
            }

        layer = of_nnx.LUTAttention(
            FEATURES, OUTPUTS, **options, anchors=arrays["anchors"], rngs=nnx.Rngs(0)
        )
        layer.weights, layer.positions = arrays["weights"], arrays["positions"]
        layer.init_cache(x.shape, blocks=BLOCKS)
        actual = [layer(part, **places(n)) for part, n in parts]
        np.testing.assert_array_equal(jnp.concatenate(actual, 1), want)
        assert layer.cached_key_index.shape == (*BLOCKS, 4)
        assert layer.cached_segments is None

        layer = of_linen.LUTAttention(FEATURES, OUTPUTS, **options, blocks=BLOCKS)
        params = {n: arrays[n] for n in ("weights", "positions")}
        kinds, actual = {"params": params, "anchors": {"anchors": arrays["anchors"]}}, []
        cache = layer.init(jax.random.key(0), x, **places(0))["cache"]
        for part, n in parts:
            y, new = layer.apply({**kinds, "cache": cache}, part, **places(n), mutable=["cache"])
            cache = new["cache"]
            actual.append(y)
        np.testing.assert_array_equal(jnp.concatenate(actual, 1), want)

        f = hk.transform_with_state(
            lambda x, **how: of_haiku.LUTAttention(
                FEATURES, OUTPUTS, **options, blocks=BLOCKS, name="layer"
            )(x, **how)
        )
        state, actual = {"layer": {"anchors": arrays["anchors"], **_empty(spec)}}, []
        for part, n in parts:
            y, state = f.apply({"layer": params}, state, None, part, **places(n))
            actual.append(y)
        np.testing.assert_array_equal(jnp.concatenate(actual, 1), want)

    @settings(max_examples=4)
    @given(
        st.integers(1, 4),
        st.integers(1, 5),
        st.integers(1, 40),
        st.integers(0, 40),
        st.integers(1, 9),
        st.data(),
    )
    def test_places(self, size, entries, n_blocks, length, n_new, data):
        table = data.draw(
            st.lists(st.integers(-2, n_blocks + 1), min_size=entries, max_size=entries)
        )
        n_keys, window = data.draw(st.integers(0, n_new)), data.draw(st.integers(1, size * entries))
        places = _pages.Places(
            jnp.asarray([table], jnp.int32), jnp.asarray([length], jnp.int32), n_blocks, size
        )

        def place(p):
            block = table[p // size % entries] if p >= 0 else -1
            return block * size + p % size if 0 <= block < n_blocks else None

        actual, there = places.latest(window)
        wanted = [place(p) for p in range(length - window, length)]
        assert there[0].tolist() == [p is not None for p in wanted]
        assert [
            p for p, is_there in zip(actual[0].tolist(), there[0], strict=True) if is_there
        ] == [p for p in wanted if p is not None]
        is_key = jnp.arange(n_new)[None] < n_keys
        new = places.new_indices(is_key)[0].tolist()
        kept = range(max(length, length + n_keys - size * entries), length + n_keys)
        outside = n_blocks * size
        wanted = [place(p) if p in kept else None for p in range(length, length + n_new)]
        assert new == [outside if p is None else p for p in wanted]
