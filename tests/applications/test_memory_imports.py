"""Imports for published n-gram memories: small folders in published layouts, their layers, and rejected inputs."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import kills
import ml_dtypes
import numpy as np
import pytest
from cases import slow_except
from commands import output, refusal
from flax import nnx
from host_memory import run_of, table_of, words_of
from starlette.testclient import TestClient
from tensor_files import write_memory_of_bytes, write_safetensors

import lutjax
from lutjax.convert import ConversionError, convert_memory, memory_layer
from lutjax.files.errors import FolderError
from lutjax.layers.nnx import NgramMemory
from lutjax.models import GPTConfig
from lutjax.optim.host import HostTable
from lutjax.serving import Limits, application
from lutjax.tables.overlays import read_overlay
from lutjax.training import experiments
from lutjax.training.errors import CheckpointError
from lutjax.training.lm_config import TrainingConfig

RECORDED = np.load(Path(__file__).parents[1] / "golden" / "memory_tables.npz")
CONFIGS = {
    "engram": {
        "engram_layer_ids": [1, 3], "engram_max_ngram_size": 4, "engram_n_heads": 2, "engram_head_dim": 32, "engram_vocab_size": 41,
        "engram_compressed_vocab_size": 90, "engram_pad_token_id": 2, "hc_mult": 3, "hidden_size": 16, "rms_norm_eps": 1e-20,
    },
    "ple": {
        "ple_layer_ids": [2, 3], "ngram_size": 3, "heads_per_ngram": 2, "ple_embed_dim": 32, "ngram_vocab_size_base": 100, "vocab_size": 150,
        "eos_token_id": 149, "hc_count": 2, "hidden_size": 12, "ple_conv_kernel_size": 4, "rms_norm_eps": 1e-6,
    },
    "longcat": {"vocab_size": 50, "ngram_vocab_size_ratio": 3, "emb_neighbor_num": 4, "emb_split_num": 2, "eos_token_id": 2, "hidden_size": 24},
}  # fmt: skip
KEYS = {"engram": "deepseek", "ple": "ple", "longcat": "longcat"}
LAYERS = {"engram": 1, "ple": 2, "longcat": None}


def bfloat16(a):
    return "BF16", np.asarray(a, np.float32).astype(ml_dtypes.bfloat16).view(np.uint16)


def tensors_of(family):
    a = {
        n.removeprefix(f"{KEYS[family]}_"): x
        for n, x in RECORDED.items()
        if n.startswith(KEYS[family])
    }
    if family == "engram":
        tiles = np.array([[119] * 6, [130] * 6], np.uint8)
        each = np.repeat(np.repeat(2.0 ** (tiles.astype(float) - 127), 32, 0), 32, 1)
        codes = (a["wkv"] / each).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
        result = {
            "wkv.weight": ("F8_E4M3", codes), "wkv.scale": ("F8_E8M0", tiles), "q_weight": bfloat16(a["q"]), "k_weight": bfloat16(a["k"]),
            "embed.weight": ("F8_E4M3", a["weight"]), "embed.scale": ("F8_E8M0", a["scale"]),
        }  # fmt: skip
        return {f"layers.1.engram.{name}": value for name, value in result.items()}
    if family == "ple":
        layout = lutjax.NgramLayout.qwen(CONFIGS["ple"], 1)
        result = {
            f"ple_embedding.ngram_embedding.shard_{i}.weight": ("F8_E4M3", part)
            for i, part in enumerate(np.array_split(a["table"], 11))
        }
        result |= {
            f"{name}.weight": bfloat16(a[name])
            for name in ("key_proj", "value_proj", "conv1d", "norm_key", "norm_query", "norm_conv")
        }
        result["ple_embedding.ngram_embedding.weight_scale"] = bfloat16([0.0078125])
        for name, values in (
            ("layer_multipliers", layout.multipliers),
            ("ngram_heads_vocab_sizes", layout.sizes),
            ("ngram_heads_offsets", layout.offsets),
        ):
            result[f"ple_embedding.{name}"] = "I64", np.array(values)
        return {
            f"model.language_model.layers.2.ple.{name}": value for name, value in result.items()
        }
    sizes = lutjax.NgramLayout.longcat(CONFIGS["longcat"]).sizes
    parts = np.split(a["tables"], np.cumsum(sizes)[:-1])
    result = {f"embedders.{i}.weight": bfloat16(part) for i, part in enumerate(parts)}
    result |= {f"post_projs.{i}.weight": bfloat16(part) for i, part in enumerate(a["projections"])}
    return {f"model.ngram_embeddings.{name}": value for name, value in result.items()}


def write(folder, family, **changes):
    """Write a checkpoint with tables in its second shard."""
    folder.mkdir(exist_ok=True)
    tensors = tensors_of(family) | changes
    tables = {
        n: v
        for n, v in tensors.items()
        if "embed" in n.split(".")[-2] + n.split(".")[-3] or "shard" in n
    }
    small = {n: v for n, v in tensors.items() if n not in tables}
    for file, part in (("model-1.safetensors", small), ("model-2.safetensors", tables)):
        write_safetensors(folder / file, part)
    files = {
        name: "model-1.safetensors" if name in small else "model-2.safetensors" for name in tensors
    }
    files["model.embed_tokens.weight"] = "model-3.safetensors"  # which is not here
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    (folder / "config.json").write_text(json.dumps({"text_config": CONFIGS[family]}))
    # A byte-level tokenizer with 90 tokens that differ.
    vocab = {chr(0x4E00 + i): i for i in range(90)}
    tokenizer = {"model": {"type": "BPE", "vocab": vocab}, "decoder": {"type": "ByteLevel"}}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


@pytest.mark.parametrize("family", slow_except(CONFIGS, "engram"))
def test_layers_of_imported_memories(family, tmp_path):
    """Compare imported layers with the recorded outputs."""
    base = write(tmp_path / "base", family)
    before = {path.name: path.read_bytes() for path in base.iterdir()}
    record = convert_memory(base, tmp_path / "model", family=family, layer=LAYERS[family])
    layer = memory_layer(tmp_path / "model", base)
    assert layer.spec.layout.digest == record["layout"]["digest"]
    if family == "engram":
        codes, tiles = (
            tensors_of(family)[f"layers.1.engram.wkv.{name}"][1] for name in ("weight", "scale")
        )
        each = np.repeat(np.repeat(2.0 ** (tiles.astype(np.float32) - 127), 32, 0), 32, 1)
        wkv = np.concatenate([layer.key_kernel[...], layer.value_kernel[...]], 1).T
        np.testing.assert_array_equal(
            wkv, codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32) * each
        )
        for name, part in zip(
            ("key_kernel", "value_kernel"),
            np.split(RECORDED["deepseek_wkv"].T, [48], 1),
            strict=True,
        ):
            setattr(layer, name, part.astype(np.float32))  # without the rounding of fp8
    key = KEYS[family]
    x, tokens = RECORDED[f"{key}_{'words' if family == 'longcat' else 'h'}"], RECORDED[f"{key}_ids"]
    y = jax.jit(lambda x, tokens: layer(x, tokens))(
        jnp.asarray(x, jnp.float32), jnp.asarray(tokens, jnp.int32)
    )
    want = RECORDED[f"{key}_y"] - (x if family == "engram" else 0)
    np.testing.assert_allclose(y, want, atol=2e-6, rtol=2e-6)
    assert before == {path.name: path.read_bytes() for path in base.iterdir()}
    assert sum(path.stat().st_size for path in (tmp_path / "model").iterdir()) < 60_000


def test_commands(tmp_path):
    base = write(tmp_path / "base", "ple")
    text = output("import", "--from", "ple", base, tmp_path / "model", "--layer", "2")
    assert "Converted a memory of 512 rows with 8 elements" in text
    text = output("info", tmp_path / "model")
    layout = lutjax.NgramLayout.qwen(CONFIGS["ple"], 1)
    for line in (
        "converted from ple, layer 2",
        "512 rows of 8 elements, e4m3",
        f"digest {layout.digest}",
        "model-2.safetensors: ",
    ):
        assert line in text
    result = json.loads(output("info", tmp_path / "model", "--json"))
    assert result["layout"]["digest"] == layout.digest


def test_refused_checkpoints(tmp_path):
    at = "model.language_model.layers.2.ple."
    for change, message in (
        ({f"{at}ple_embedding.layer_multipliers": ("I64", np.arange(3))}, r"multipliers of the config are \[.*\]; stored are \[0, 1, 2\]"),
        ({f"{at}conv1d.weight": bfloat16(np.zeros((24, 1, 3)))}, r"conv1d.weight has shape \[24, 1, 3\]; the config needs \[24, 1, 4\]"),
        ({f"{at}ple_embedding.ngram_embedding.shard_11.weight": ("F8_E4M3", np.zeros((5, 8), np.uint8))}, "has 517 rows; its config has 512"),
    ):  # fmt: skip
        base = write(tmp_path / "base", "ple", **change)
        with pytest.raises(ValueError, match=message):
            convert_memory(base, tmp_path / "model", family="ple", layer=2)
    with pytest.raises(ConversionError, match="layer 5 has no memory; layers with one are 1, 2"):
        convert_memory(base, tmp_path / "model", family="ple", layer=5)
    with pytest.raises(
        ConversionError, match=r"has 0 tensors layers.1.ple.key_proj.weight; expected one"
    ):
        convert_memory(base, tmp_path / "model", family="ple")
    base = write(tmp_path / "base", "ple")
    convert_memory(base, tmp_path / "model", family="ple", layer=2)
    shards = {name: value for name, value in tensors_of("ple").items() if "shard" in name}
    write_safetensors(base / "model-2.safetensors", shards)  # without the scale
    with pytest.raises(FolderError, match=r"model-2.safetensors"):
        memory_layer(tmp_path / "model", base)
    with pytest.raises(ConversionError, match="family is 'other'"):
        convert_memory(base, tmp_path / "model", family="other")
    with pytest.raises(FolderError, match="cannot be read"):
        memory_layer(tmp_path, base)


def test_rows_of_another_layout(tmp_path):
    base = write(tmp_path / "base", "ple")
    record = convert_memory(base, tmp_path / "model", family="ple", layer=2)
    own, other = (lutjax.NgramLayout.qwen(CONFIGS["ple"], place) for place in (1, 0))
    parts, scales = (
        [(base / file, name) for file, name in record[which]] for which in ("parts", "scales")
    )
    table = HostTable.mapped(parts, codec="e4m3", width=8, scales=scales, layout=own)
    layer = NgramMemory(12, layout=other, streams=2, placement=table, rngs=nnx.Rngs(0))
    with pytest.raises(
        ValueError, match=f"the rows have layout {own.digest}, and the layer {other.digest}"
    ):
        layer(jnp.zeros((3, 2, 12)), jnp.zeros(3, jnp.int32))


def test_bundles_of_layers_with_a_layout(tmp_path):
    layout = lutjax.NgramLayout.hash(20, (2, 3), 1, vocabulary=lutjax.Vocabulary([0, 1, 1, 2]))
    layer = NgramMemory(8, layout=layout, gate="root", rngs=nnx.Rngs(0))
    lutjax.save(layer, tmp_path / "bundle")
    loaded = lutjax.load(tmp_path / "bundle")
    assert (loaded.spec.layout, loaded.spec.layout.digest) == (layout, layout.digest)
    x, tokens = jnp.ones((4, 8)), jnp.array([3, 1, 2, 0])
    np.testing.assert_array_equal(loaded(x, tokens), layer(x, tokens))


SIZES = {"features": 8, "context": 8, "n_layers": 1, "n_heads": 1, "feed_forward": "dense"}


def test_language_models_on_imported_rows(tmp_path):
    """A run updates rows apart from the files, and resumes with the same bits; its checkpoint is an overlay."""
    bundle = write_memory_of_bytes(tmp_path / "base")
    before = {path: path.read_bytes() for path in bundle.parent.iterdir() if path.is_file()}
    config = GPTConfig(memory_base=str(bundle), **SIZES)
    assert GPTConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    run = run_of(config, memory_depth=1)
    state = run.init()
    state, _ = run.advance(state, 0, 2)
    kept = jax.tree.map(jnp.copy, state)
    (tmp_path / "2").mkdir()
    run.write_beside(tmp_path / "2")
    run.advance(state, 2, 2)
    table_of(run).save(tmp_path / "whole")
    again = run_of(config, memory_depth=1)
    again.read_beside(tmp_path / "2", kept.others)
    again.advance(kept, 2, 2)
    table_of(again).save(tmp_path / "resumed")
    one, two = (read_overlay(tmp_path / name) for name in ("whole", "resumed"))
    assert one.digest == two.digest
    layer = memory_layer(bundle, overlays=[tmp_path / "whole"])
    np.testing.assert_array_equal(
        layer.weights.gather(one.ids.reshape(-1, 1, 1))[0], one.arrays["rows"]
    )
    assert before == {path: path.read_bytes() for path in before}


def test_imported_rows_that_do_not_fit(tmp_path, monkeypatch):
    bundle = write_memory_of_bytes(tmp_path / "base")
    for changes, message in (
        (
            {"vocab_size": 100},
            r"for a vocabulary of 256 tokens \(layout \w{64}\) and vocab_size is 100",
        ),
        ({"memory_rows": 7}, "memory_rows is 7 and memory_base has 512"),
        (
            {"n_layers": 2, "memory_layers": (0, 1)},
            "an imported memory has one table, for one layer",
        ),
        ({"memory_base": str(tmp_path)}, "memory.json cannot be read"),
        ({"memory_base": "nowhere"}, "memory_base is 'nowhere', which is no folder"),
    ):
        with pytest.raises((ValueError, FolderError), match=message):
            GPTConfig(**{**SIZES, "memory_base": str(bundle), **changes})
    config = GPTConfig(memory_base=str(bundle), **SIZES)
    # A resumed run compares paths as the config stores them.
    monkeypatch.chdir(tmp_path)
    record = SimpleNamespace(model=config, training=TrainingConfig())
    experiments._check_same(tmp_path, record, {"memory_base": str(bundle.relative_to(tmp_path))})
    with pytest.raises(CheckpointError, match=r"memory_base is .* in the checkpoint, not 'other'"):
        experiments._check_same(tmp_path, record, {"memory_base": "other"})
    (bundle.parent / "model.safetensors").write_bytes(b"no table")
    with pytest.raises(FolderError, match=r"model\.safetensors"):
        run_of(config)


def test_commands_name_damaged_and_moved_memories(tmp_path):
    bundle = write_memory_of_bytes(tmp_path / "base")
    path = bundle / "memory.json"
    record = json.loads(path.read_text())
    for change in ({"layout": {}}, {"base": {}}, {"layer": "first"}):
        path.write_text(json.dumps(record | change))
        assert f"{path} is damaged" in refusal("info", bundle)
    path.write_text(json.dumps(record | {"class": "Other"}))
    assert f"{path} is damaged: it has no 'Other'" in refusal("serve", bundle)
    path.write_text(json.dumps(record))
    assert "is an imported memory" in refusal("generate", bundle, "--prompt", "a")
    (tmp_path / "base").rename(tmp_path / "moved")
    assert f"imported from {tmp_path / 'base'}" in refusal("serve", tmp_path / "moved" / "bundle")


def test_fields_of_memories_without_effect(tmp_path):
    bundle = write_memory_of_bytes(tmp_path / "base")
    for options, message in (
        (("--memory-rows", 100), "--memory-rows is 100 and --memory is off"),
        (
            ("--memory-base", bundle, "--memory-placement", "device"),
            "--memory-placement is 'device' and --memory-base has 'host'",
        ),
        (
            ("--memory-base", bundle, "--no-memory"),
            "--memory is False and --memory-base has True; leave out --memory",
        ),
    ):
        assert message in refusal("train", "lm", "--out", tmp_path / "run", *options)


@pytest.mark.parametrize("family", slow_except(CONFIGS, "ple"))
def test_served_memories(family, tmp_path):
    """Answers to parts of a text, each with the history of the one before, are those of the layer to the text."""
    base = write(tmp_path / "base", family)
    convert_memory(base, tmp_path / "model", family=family, layer=LAYERS[family])
    layer = memory_layer(tmp_path / "model")
    digest, vector = layer.spec.layout.digest, layer.history((), np.float32).values.shape[1:]
    tokens = np.array([5, 7, 5, 7, -1, 3, 8, 5, 7])
    x = np.random.default_rng(0).standard_normal((9, *vector), np.float32)
    want, _ = jax.jit(lambda x, tokens: layer(x, tokens, history=layer.history((), np.float32)))(
        x, tokens
    )
    with TestClient(application(layer, "memory", Limits(prompt=8))) as client:

        def ask(**body):
            actual = client.post("/v1/memory", json=body)
            return (
                actual.json()
                if actual.status_code == 200
                else (actual.status_code, actual.json()["error"]["message"])
            )

        first = ask(tokens=tokens[:6].tolist(), vectors=x[:6].tolist())
        second = ask(
            tokens=tokens[6:].tolist(),
            vectors=x[6:].tolist(),
            history=first["history"],
            model="memory",
        )
        np.testing.assert_allclose([*first["update"], *second["update"]], want, atol=2e-6)
        good = {"tokens": [1], "vectors": x[:1].tolist(), "history": second["history"]}
        for change, message in (
            ({"tokens": [1.5]}, r"tokens\[0\] is 1.5; expected an id from 0 to"),
            ({"tokens": []}, "expected a list of 1 to 8 ids"),
            ({"vectors": [[1]]}, r"vectors has shape \[1, 1\]; expected"),
            (
                {"vectors": np.full((1, *vector), 1e300).tolist()},
                "vectors has numbers that float32 does not hold",
            ),
            (
                {"history": good["history"] | {"layout": "other"}},
                f'layout or vocabulary "other", and the memory has {digest}',
            ),
            ({"history": {}}, "send the history of an answer"),
            (
                {"history": good["history"] | {"tokens": [99999] * len(good["history"]["tokens"])}},
                r"history.tokens\[0\] is 99999; expected an id from 0 to",
            ),
            (
                {"history": good["history"] | {"tokens": [0.5] * len(good["history"]["tokens"])}},
                "history.tokens has fractions",
            ),
            ({"tokens": [1] * 9}, "tokens has 9 ids; expected a list of 1 to 8"),
            ({"prompt": "a"}, 'the field "prompt" is unknown'),
        ):
            status, text = ask(**good | change)
            assert status == 400
            assert re.search(message, text), text
        values = np.asarray(good["history"]["values"])
        if values.size:  # their convolution overflows
            large = good["history"] | {"values": np.full(values.shape, 3e38).tolist()}
            assert "is not finite in float32" in ask(**good | {"history": large})[1]


@pytest.mark.slow
def test_a_killed_run_on_imported_rows(tmp_path, compilation_cache_directory):
    """Runs killed at random events resume to the same bits, and base files never change."""
    bundle = write_memory_of_bytes(tmp_path / "base")
    base = bundle.parent / "model.safetensors"
    before = base.read_bytes(), base.stat().st_mtime_ns
    words = [*words_of(tmp_path), "--model", "gpt", "--memory-base", str(bundle)]
    dropped = {"--memory", "--memory-placement", "host", "--memory-rows", "300"}
    words = [word for word in words if word not in dropped]
    assert kills.run(tmp_path / "whole", words, compilation_cache_directory) is None
    kills.check(words, tmp_path / "whole", tmp_path, compilation_cache_directory, n_kills=3)
    overlays = [
        read_overlay(path / "checkpoints" / "12" / "host" / "0")
        for path in tmp_path.glob("[rw]*[0-9e]")
    ]
    assert len(overlays) > 1
    assert len({overlay.digest for overlay in overlays}) == 1
    assert before == (base.read_bytes(), base.stat().st_mtime_ns)
    assert "memory_base" in output("info", tmp_path / "whole")
    assert output("generate", tmp_path / "whole", "--prompt", "a", "--bytes", "4")
