"""Model bundles: round trips, loading in other libraries, and one-line errors for damaged or hostile files."""

import json
import os
import shutil
import struct
import subprocess
import sys

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import slow_except
from commands import output, refusal
from every_layer import CASES
from flax import linen, nnx
from hypothesis import given, strategies as st
from hypothesis.extra import numpy as hnp
from layer_libraries import nnx_layer
from small_runs import HISTORY, RUNS, saved, tree_run

import lutjax
from lutjax import wiring
from lutjax.bundles import BundleError
from lutjax.bundles._layout import CARD, CODES, CONFIG, TENSORS
from lutjax.files.atomic import digest_of
from lutjax.layers import haiku as haiku_layers, linen as linen_layers, nnx as layers
from lutjax.models import GPTConfig, LogicClassifier, LogicClassifierConfig
from lutjax.training import lm, lm_runs, quantize, runs

SIZES = {"n_detectors": 4, "n_anchors": 3}
TABLE_DTYPES = slow_except(["bfloat16", "int8"], "int8")
X = np.linspace(-1, 1, 24, dtype=np.float32).reshape(3, 8)


def gpt_run(folder):
    sizes = {"features": 8, "context": 6, "n_layers": 1, "n_heads": 1}
    config = GPTConfig(**sizes, lut_heads=2, lut_tables=2, lut_bits=2, read="powers_of_two")
    text = runs.Source("fox.txt", 100, "f" * 64)
    record = lm_runs.Record(
        config, lm.TrainingConfig(steps=9), text, 2.5, {"log_every": 1}, HISTORY
    )
    return saved(folder, lm.structure_of(config), record)


def integers_run(folder):
    model = gpt_run(folder)
    _, record = lm_runs.load_model(folder)
    record = quantize.deployed_record(folder, record)
    model = quantize.deployed_model(model, record)
    quantize.save(folder / "quantized", 3, model, record)
    (folder / "checkpoints").rename(folder / "others")
    (folder / "quantized" / "checkpoints").rename(folder / "checkpoints")
    return model


ALL = {**RUNS, "trees": tree_run, "gpt": gpt_run, "integers": integers_run}


@pytest.mark.parametrize("kind", slow_except(ALL, "integers"))
def test_models_of_runs(kind, tmp_path):
    ALL[kind](tmp_path / "run")
    model, folder = lutjax.load(tmp_path / "run"), tmp_path / "saved"
    lutjax.save(model, folder)
    assert {path.name for path in folder.iterdir()} == {CARD, CONFIG, TENSORS}
    loaded = lutjax.load(folder)
    assert type(loaded) is type(model)
    assert loaded.record.folder == folder
    assert (loaded.record.kind, loaded.record.steps) == (model.record.kind, 3)
    assert loaded.record.history == HISTORY
    assert loaded.record.model == model.record.model
    written = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert not any(
        b"/secret" in content or str(tmp_path).encode() in content for content in written.values()
    )
    lutjax.save(loaded, folder)  # in its own place, to the same bytes
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == written
    for each in (loaded, model):
        del each.record  # the folders differ
    same(loaded, model)


def test_models_without_a_run(tmp_path):
    config = LogicClassifierConfig(
        in_features=6, n_classes=3, n_thresholds=2, layers=(12,), estimator="gumbel", reduce=(2,)
    )
    model = LogicClassifier(config, rngs=nnx.Rngs(0, gates=1))
    lutjax.save(model, tmp_path)
    loaded = lutjax.load(tmp_path)
    twin = nnx.eval_shape(
        lambda: LogicClassifier(config, rngs=nnx.Rngs(0))
    )  # with the usual random stream
    twin.eval()
    assert nnx.graphdef(loaded) == nnx.graphdef(twin)
    same_arrays(loaded, model)
    assert not hasattr(loaded, "record")
    model.layers[0].logits = jnp.zeros((9, 16))
    with pytest.raises(
        ValueError, match=r"layers\.0\.logits of this LogicClassifier is not that of"
    ):
        lutjax.save(model, tmp_path)


@pytest.mark.parametrize("table_dtype", TABLE_DTYPES)
def test_tables_in_fewer_bits(table_dtype, tmp_path):
    layer = layers.LUT(8, 5, **SIZES, rngs=nnx.Rngs(0))
    layer.weights = np.random.default_rng(0).normal(size=layer.weights.shape).astype(np.float32)
    lutjax.save(layer, tmp_path / "whole")
    lutjax.save(layer, tmp_path / "saved", table_dtype=table_dtype)
    sizes = [(tmp_path / name / TENSORS).stat().st_size for name in ("whole", "saved")]
    assert sizes[1] < sizes[0]
    loaded = lutjax.load(tmp_path / "saved", into=layers.LUT(8, 5, **SIZES, rngs=nnx.Rngs(1)))
    actual, want = np.asarray(loaded.weights[...]), np.asarray(layer.weights[...])
    assert actual.dtype == np.float32
    if table_dtype == "bfloat16":
        np.testing.assert_array_equal(actual, want.astype(jnp.bfloat16).astype(np.float32))
    else:
        quantized = lutjax.quantize_tables(layer.weights[...], groups=4)
        unit = np.ldexp(np.float32(1), np.asarray(quantized.exponents))[:, None]
        np.testing.assert_array_equal(actual, np.asarray(quantized.values) * unit)
        assert (np.abs(actual - want) <= unit).all()
    np.testing.assert_array_equal(loaded.anchors[...], layer.anchors[...])


def test_tables_that_cannot_be_stored_so(tmp_path):
    layer = layers.LUT(8, 5, **SIZES, rngs=nnx.Rngs(0))
    layer.weights[...] = layer.weights[...] + jnp.nan
    with pytest.raises(
        ValueError, match="table weights has values that are not finite, which int8 cannot"
    ):
        lutjax.save(layer, tmp_path, table_dtype="int8")
    gates = layers.LogicGates(6, 4, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="table_dtype is int8, but there are no float tables"):
        lutjax.save(gates, tmp_path, table_dtype="int8")
    with pytest.raises(
        ValueError, match="table_dtype is 'int4'; expected one of float32, bfloat16, int8"
    ):
        lutjax.save(layer, tmp_path, table_dtype="int4")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("table_dtype", TABLE_DTYPES)
def test_edge_lists_in_fewer_bits(table_dtype, tmp_path):
    """An edge-list table is one-dimensional and has a single scale."""
    edges = wiring.from_edges([0, 0, 1], [0, 3, 2], [1, 0, 1], n_detectors=2, n_rows=4, n_outputs=2)
    sizes = {"n_detectors": 2, "n_anchors": 2, "targets": edges}
    weights = np.float32([0.3, -1.7, 0.01])
    layer = layers.SparseLUT(5, 2, **sizes, rngs=nnx.Rngs(0))
    layer.weights = weights
    lutjax.save(layer, tmp_path, table_dtype=table_dtype)
    tensor = lutjax.bundles.read(tmp_path).config.tensors["weights"]
    assert (tensor.stored, tensor.scale) == (
        table_dtype,
        "weights.scale" if table_dtype == "int8" else None,
    )
    result = np.asarray(lutjax.load(tmp_path).weights[...])
    if table_dtype == "int8":
        np.testing.assert_array_equal(result, np.round(weights * 64) / 64)
    else:
        np.testing.assert_array_equal(result, weights.astype(table_dtype).astype(np.float32))
    linen_layer = linen_layers.SparseLUT(5, 2, **sizes)
    variables = linen_layer.init(jax.random.key(0), X[:, :5])
    tables = linen_layers.tables_of(linen_layer.init, jax.random.key(0), X[:, :5])
    lutjax.save(variables, tmp_path, tables=tables, table_dtype=table_dtype)
    assert lutjax.bundles.read(tmp_path).config.tensors["params.weights"].stored == table_dtype


def same(loaded, saved):
    """Check that a loaded layer has the saved graph and arrays, except for random states."""
    assert nnx.graphdef(loaded) == nnx.graphdef(saved)
    same_arrays(loaded, saved)


def same_arrays(loaded, saved):
    states = (nnx.to_flat_state(nnx.state(one, nnx.Not(nnx.RngState))) for one in (loaded, saved))
    for (path, actual), (other, want) in zip(*states, strict=True):
        assert path == other
        np.testing.assert_array_equal(actual[...], want[...])


@pytest.mark.parametrize(
    "name",
    slow_except(
        CASES,
        *(
            "SparseLUT, targets of rows",
            "LUTPairAttention, window",
            "LogicConv",
        ),
    ),
)
def test_every_layer_comes_back(name, tmp_path):
    layer = nnx_layer(CASES[name])
    lutjax.save(layer, tmp_path)
    if name == "ProductKeyExperts, sines":  # its activation has no name that a bundle may hold
        with pytest.raises(ValueError, match="and not the arguments of its constructor"):
            lutjax.load(tmp_path)
        return
    same(lutjax.load(tmp_path), layer)


def test_field_names_of_earlier_versions(tmp_path):
    layer = layers.SoftLUT(6, 4, n_inputs=2, parameterization="walsh", rngs=nnx.Rngs(0))
    lutjax.save(layer, tmp_path)
    path = tmp_path / CONFIG
    text = path.read_text()
    for now, earlier in (("parameterization", "parametrisation"), ("quantized", "quantised")):
        assert f'"{now}"' in text
        text = text.replace(f'"{now}"', f'"{earlier}"')
    path.write_text(text)
    loaded = lutjax.load(tmp_path)
    same(loaded, layer)
    assert loaded.parameterization == "walsh"


def test_a_changed_layer_comes_back(tmp_path):
    layer = layers.LUT(
        8, 5, **SIZES, rngs=nnx.Rngs(0), epsilon=0.25, accumulate=lutjax.FixedPoint(2.0**12)
    )
    layer.weights, layer.anchors = layer.weights[:3], layer.anchors[:3]
    lutjax.save(layer, tmp_path)
    loaded = lutjax.load(tmp_path)
    assert loaded.n_detectors == 3
    assert loaded.spec == layer.spec
    np.testing.assert_array_equal(loaded(X), layer(X))
    subclass = type("Own", (layers.LUT,), {})(8, 5, **SIZES, rngs=nnx.Rngs(0))
    lutjax.save(subclass, tmp_path)
    with pytest.raises(
        ValueError, match="the arrays of a Own, and not the arguments of its constructor"
    ):
        lutjax.load(tmp_path)


@pytest.mark.parametrize(("change", "message"), [
    (lambda c: c["model"].update(n_detectors=10**6), "does not fit this model"),
    (lambda c: c["model"].update(n_detectors="os.system"), "its model is no LUT"),
    (lambda c: c["model"].update(accumulate={"is": "os.system"}), "its model is no LUT"),
    (lambda c: c["model"].update(accumulate={"is": "gelu", "x": 1}), "its model is no LUT"),
    (lambda c: c["model"].update(accumulate={"is": ["gelu"]}), "its model is no LUT"),
    (lambda c: c["model"].update(accumulate={}), "its model is no LUT"),
    (lambda c: c["model"].update(given=["rngs"]), "its field 'given' is"),
    (lambda c: c["model"].pop("given"), "its field 'given' is None"),
    (lambda c: c["model"].update(weights_init="x"), None),
    (lambda c: c.update(architectures=["SparseLUT"]), "its model is no SparseLUT"),
])  # fmt: skip
def test_hostile_layers(change, message, tmp_path):
    lutjax.save(layers.LUT(8, 5, **SIZES, rngs=nnx.Rngs(0)), tmp_path)
    config(tmp_path, change)
    if message is None:
        lutjax.load(tmp_path)
        return
    with pytest.raises(BundleError, match=message) as result:
        lutjax.load(tmp_path)
    assert "\n" not in str(result.value)


class Net(nnx.Module):
    def __init__(self, *, seed, width=6):
        rngs = nnx.Rngs(seed)
        self.blocks = nnx.List(
            [layers.LUT(8, width, **SIZES, rngs=rngs), nnx.Linear(width, 2, rngs=rngs)]
        )
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.blocks[1](self.dropout(jnp.tanh(self.blocks[0](x)), deterministic=True))


def test_a_module_of_a_user(tmp_path):
    net = Net(seed=0)
    lutjax.save(net, tmp_path)
    other = Net(seed=1)
    assert lutjax.load(tmp_path, into=other) is other
    np.testing.assert_array_equal(other(X), net(X))
    with pytest.raises(
        ValueError, match=r"not the arguments of its constructor; build a Net and pass it as"
    ):
        lutjax.load(tmp_path)
    before = jax.tree.map(
        np.asarray, nnx.to_pure_dict(nnx.state(narrow := Net(seed=0, width=5), nnx.Param))
    )
    message = r"does not fit this model: its tensor \"blocks.0.weights\" is float32\[4, 8, 6\]; the model's is"
    with pytest.raises(BundleError, match=message):
        lutjax.load(tmp_path, into=narrow)
    jax.tree.map(
        np.testing.assert_array_equal, before, nnx.to_pure_dict(nnx.state(narrow, nnx.Param))
    )
    with pytest.raises(TypeError, match=r"holds a Net of Flax NNX; into is a dict"):
        lutjax.load(tmp_path, into={})


def test_ids_that_do_not_exist(tmp_path):
    net = Net(seed=0)
    net.blocks[0].anchors[...] = net.blocks[0].anchors[...] + 8
    lutjax.save(net, tmp_path)
    with pytest.raises(BundleError, match="cannot be used: LUT: anchors holds ids from 8 to"):
        lutjax.load(tmp_path, into=Net(seed=0))


def test_variables_of_linen(tmp_path):
    model = linen.Sequential([linen_layers.LUT(8, 6, **SIZES), linen.Dense(2)])
    variables = model.init(jax.random.key(0), X)
    tables = linen_layers.tables_of(model.init, jax.random.key(0), X)
    lutjax.save(variables, tmp_path, tables=tables, table_dtype="bfloat16")
    loaded = lutjax.load(tmp_path)
    np.testing.assert_array_equal(
        model.apply(loaded, X), model.apply(variables, X)
    )  # of tables of zeros
    kinds = {t.kind for t in lutjax.bundles.read(tmp_path).config.tensors.values()}
    assert kinds == {"anchors", "params", "tables"}
    into = model.init(jax.random.key(1), X)
    jax.tree.map(np.testing.assert_array_equal, lutjax.load(tmp_path, into=into), variables)
    with pytest.raises(ValueError, match="tables has 'no', which no array is called"):
        lutjax.save(variables, tmp_path, tables=["no"])


def test_variables_of_haiku(tmp_path):
    def forward(x):
        return hk.Linear(2)(haiku_layers.LUT(8, 6, **SIZES)(x))

    model = hk.without_apply_rng(hk.transform_with_state(forward))
    params, state = model.init(jax.random.key(0), X)
    lutjax.save({"params": params, "state": state}, tmp_path)
    loaded = lutjax.load(tmp_path)
    want, _ = model.apply(params, state, X)
    np.testing.assert_array_equal(model.apply(loaded["params"], loaded["state"], X)[0], want)
    lutjax.save((params, state), tmp_path)
    params, state = lutjax.load(tmp_path, into=(params, state))
    np.testing.assert_array_equal(model.apply(params, state, X)[0], want)


def test_trees_come_back(tmp_path):
    rng = np.random.default_rng(0)
    names = [name for name in CODES if "64" not in name]
    tree = {
        "ö/x": {
            k: rng.integers(0, 2, (2, 3)).astype(jnp.dtype(name)) for k, name in enumerate(names)
        }
    }
    tree |= {"a b": np.array(3.5, np.float32), "none": {"0x": np.zeros((2, 0, 3), np.int8)}}
    lutjax.save(tree, tmp_path)
    for loaded in (lutjax.load(tmp_path), lutjax.load(tmp_path, into=tree)):
        assert jax.tree.structure(loaded) == jax.tree.structure(tree)
        for actual, want in zip(jax.tree.leaves(loaded), jax.tree.leaves(tree), strict=True):
            assert actual.dtype == want.dtype
            np.testing.assert_array_equal(actual, want)


@given(hnp.arrays(np.float32, (2, 4, 3), elements=st.floats(-(2.0**40), 2.0**40, width=32)))
def test_tables_of_int8_are_off_by_at_most_a_unit(tmp_path_factory, table):
    folder = tmp_path_factory.mktemp("table")
    lutjax.save({"w": table}, folder, tables=["w"], table_dtype="int8")
    bundle = lutjax.bundles.read(folder)
    unit = bundle.tensors["w.scale"]
    assert (np.abs(bundle.values("w") - table) <= unit).all()
    assert (unit <= np.maximum(np.abs(table).max(1, keepdims=True), 1e-30) / 32).all()


@pytest.mark.usefixtures("without_typechecking")
@pytest.mark.parametrize(("model", "error", "message"), [
    (3, TypeError, "model is 3; expected an nnx.Module, or arrays in dicts"),
    ({}, TypeError, "model is {}; expected"),
    ({"a": "text"}, TypeError, "a is 'text'; expected an array of"),
    ({"a": jax.random.key}, TypeError, "expected an array of"),
    ({"a": np.zeros(2, complex)}, TypeError, "expected an array of"),
    ({"a\n": np.zeros(2)}, ValueError, "characters that can be printed"),
    ({"a.b": np.zeros(2), "a": {"b": np.zeros(2)}}, ValueError, "two arrays have the name 'a.b'"),
])  # fmt: skip
def test_what_is_no_model(model, error, message, tmp_path):
    with pytest.raises(error, match=message):
        lutjax.save(model, tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


ALONE = """
import json, sys
for name in ("lutjax", "jax", "flax", "ml_dtypes"):
    sys.modules[name] = None
import numpy as np
from safetensors.numpy import load_file

folder, file = sys.argv[1:]
stored, about = load_file(f"{folder}/model.safetensors"), json.load(open(f"{folder}/config.json"))["tensors"]


def value(name):
    scale = about[name]["scale"]
    return stored[name] if scale is None else stored[name].astype(np.float32) * stored[scale]


x, want = (np.load(file)[name] for name in ("x", "y"))
anchors, weights = value("anchors"), value("weights")
assert about["weights"]["kind"] == "tables" and about["anchors"]["kind"] == "anchors"
bits = x[:, anchors[..., 0]] > x[:, anchors[..., 1]]  # [samples, detectors, comparisons]
rows = (bits << np.arange(bits.shape[-1])).sum(-1)
y = weights[np.arange(len(weights)), rows].sum(1)
np.testing.assert_allclose(y, want, rtol=1e-5, atol=1e-5)
"""


def test_numpy_alone_reads_a_layer(tmp_path):
    layer = layers.LUT(8, 5, **SIZES, rngs=nnx.Rngs(0))
    layer.weights = np.random.default_rng(0).normal(size=layer.weights.shape).astype(np.float32)
    lutjax.save(layer, tmp_path / "saved", table_dtype="int8")
    loaded = lutjax.load(tmp_path / "saved", into=layer)
    np.savez(tmp_path / "a.npz", x=X, y=loaded(X))
    subprocess.run(
        [sys.executable, "-c", ALONE, tmp_path / "saved", tmp_path / "a.npz"], check=True
    )


def test_the_card(tmp_path):
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    RUNS["lm"](tmp_path / "run")
    folder = tmp_path / "my model"
    lutjax.save(lutjax.load(tmp_path / "run"), folder)
    text = (folder / CARD).read_text()
    head = yaml.safe_load(text.split("---\n")[1])
    assert head["library_name"] == "lutjax"
    assert head["pipeline_tag"] == "text-generation"
    result = head["model-index"][0]["results"][0]
    assert result["dataset"]["name"] == "fox.txt"
    assert result["metrics"][0]["value"] == 2.0
    for words in (
        "# my model",
        "| test loss, nats per byte | 3 | 2 |",
        "layers.0.ffn.layer.weights",
    ):
        assert words in text
    assert f"SHA-256 `{'f' * 64}`" in text
    assert "| steps | 9 |" in text
    kept = text.rstrip().rpartition("\n")[0] + "\nMine.\n"
    (folder / CARD).write_text(kept)
    (folder / "notes.txt").write_text("mine")
    lutjax.save(lutjax.load(tmp_path / "run"), folder)
    assert (folder / CARD).read_text() == kept
    assert (folder / "notes.txt").exists()


def test_commands_refuse_bundles(tmp_path):
    RUNS["digits"](tmp_path / "run")
    assert "model.safetensors" in output("save", tmp_path / "run", tmp_path / "saved")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / CONFIG).write_text("{}")
    for words, message in (
        (("quantize", tmp_path / "saved"), "is a bundle, without the optimizer state and the data"),
        (("save", tmp_path / "no", tmp_path / "saved"), "does not exist"),
        (("save", tmp_path / "run", tmp_path / "other"), "holds config.json, which is of no bundle that this"),
        (("save", tmp_path / "run", tmp_path / "x", "--table-dtype", "int8"), "but there are no float tables"),
    ):  # fmt: skip
        assert message in refusal(*words)
    assert (tmp_path / "other" / CONFIG).read_text() == "{}"


@pytest.fixture
def bundle(tmp_path):
    lutjax.save(Net(seed=0), tmp_path / "saved")
    return tmp_path / "saved"


def header(folder, change):
    """Change the tensor header and update its digest in the config."""
    content = (folder / TENSORS).read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    result = json.loads(content[8 : 8 + length])
    change(result)
    text = json.dumps(result).encode()
    (folder / TENSORS).write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])
    config = json.loads((folder / CONFIG).read_bytes())
    size = (folder / TENSORS).stat().st_size
    config["files"][TENSORS] = {"bytes": size, "sha256": digest_of(folder / TENSORS)}
    (folder / CONFIG).write_text(json.dumps(config))


def config(folder, change):
    result = json.loads((folder / CONFIG).read_bytes())
    change(result)
    (folder / CONFIG).write_text(json.dumps(result))


def link(folder, name):
    (folder / name).rename(folder.parent / name)
    (folder / name).symlink_to(folder.parent / name)


def pipe(folder):
    (folder / TENSORS).unlink()
    os.mkfifo(folder / TENSORS)


NAME = "blocks.0.weights"


def resize(folder):
    header(folder, lambda h: h[NAME].update(shape=[10**5] * 3))
    config(folder, lambda c: c["tensors"][NAME].update(shape=[10**5] * 3))


def nest(c):
    c["tensors"][f"{NAME}.x"] = {**c["tensors"][NAME], "path": ["blocks", 0, "weights", "x"]}


HOSTILE = {
    "a huge shape": (lambda f: header(f, lambda h: h[NAME].update(shape=[10**9] * 3)), "is damaged: .*overflow computing buffer size"),
    "a huge shape, twice": (resize, "is damaged"),
    "another shape": (lambda f: header(f, lambda h: h[NAME].update(shape=[8, 4, 6])), "blocks.0.weights.* is F32.8, 4, 6. in"),
    "another dtype": (lambda f: header(f, lambda h: h[NAME].update(dtype="I32")), "is I32.4, 8, 6. in model.safetensors, and F32"),
    "an unknown dtype": (lambda f: header(f, lambda h: h[NAME].update(dtype="object")), "is damaged: .*unknown variant"),
    "offsets beyond the file": (lambda f: header(f, lambda h: h[NAME].update(data_offsets=[0, 10**12])), "is damaged"),
    "a tensor more": (lambda f: config(f, lambda c: c["tensors"].pop(NAME)), "which model.safetensors has and config.json does not describe"),
    "a tensor less": (lambda f: header(f, lambda h: h.update(other=h.pop(NAME))), "which config.json describes and model.safetensors lacks"),
    "a header that lies": (lambda f: (f / TENSORS).write_bytes(struct.pack("<Q", 2**60) + (f / TENSORS).read_bytes()[8:]), "a header of 1,152,921,504,606,846,976 bytes"),
    "a byte": (lambda f: (f / TENSORS).write_bytes((f / TENSORS).read_bytes()[:-1] + b"\x7f"), "model.safetensors has changed since it was written"),
    "an end": (lambda f: (f / TENSORS).write_bytes((f / TENSORS).read_bytes()[:-1]), "bytes, not .* as config.json says"),
    "a link of tensors": (lambda f: link(f, TENSORS), "model.safetensors is a link, which may lead anywhere"),
    "a link of the config": (lambda f: link(f, CONFIG), "config.json is a link"),
    "a pipe": (pipe, "model.safetensors is no file"),
    "no tensors": (lambda f: (f / TENSORS).unlink(), "it has no model.safetensors"),
    "no config": (lambda f: (f / CONFIG).unlink(), "it has no config.json"),
    "another config": (lambda f: (f / CONFIG).write_text('{"model_type": "bert"}'), "is not a lutjax bundle"),
    "a text": (lambda f: (f / CONFIG).write_text("["), "is damaged: config.json: "),
    "a large text": (lambda f: (f / CONFIG).write_text(" " * (1 << 24) + "{}"), "exceeds 16,777,216 bytes"),
    "another version": (lambda f: config(f, lambda c: c.update(bundle=7)), "of version 7 of bundles; lutjax .* reads version 1"),
    "a path of another name": (lambda f: config(f, lambda c: c["tensors"][NAME].update(path=["x"])), "expected the keys that make the name"),
    "values of text": (lambda f: config(f, lambda c: c["tensors"][NAME].update(dtype="text")), "has values of .*text"),
    "int8 without a scale": (lambda f: config(f, lambda c: c["tensors"][NAME].update(stored="int8")), "'scale' is null"),
    "negative sizes": (lambda f: config(f, lambda c: c["tensors"][NAME].update(shape=[-1])), "expected sizes"),
    "a tensor in another one": (lambda f: config(f, nest), "lies in another one"),
}  # fmt: skip


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_bundles(what, bundle):
    change, message = HOSTILE[what]
    change(bundle)
    with pytest.raises(BundleError, match=message) as result:
        lutjax.load(bundle, into=Net(seed=1))
    assert "\n" not in str(result.value)
    assert len(str(result.value)) < 600


@pytest.fixture(scope="module")
def saved_digits(tmp_path_factory):
    folder = tmp_path_factory.mktemp("digits")
    RUNS["digits"](folder / "run")
    lutjax.save(lutjax.load(folder / "run"), folder / "saved")
    return folder / "saved"


@pytest.mark.parametrize(("change", "message"), [
    (lambda c: c["model"].update(layers=[10**12]), "its model is no LogicClassifier"),
    (lambda c: c["model"].update(layers=[10**9, 10**9]),
        "does not fit this model|is no LogicClassifier"),
    (lambda c: c["model"].update(layers="os.system"), "its model is no LogicClassifier"),
    (lambda c: c["model"].pop("tau"), None),
    (lambda c: c.update(architectures=["os.system"]), "holds a .*os.system.*; the models of this"),
    (lambda c: c.update(quantized=True), "has no form with tables of integers"),
    (lambda c: c["run"].update(kind="no"), "its run has the kind no"),
    (lambda c: c["run"]["record"].update(history=3), "is damaged: its history is 3"),
])  # fmt: skip
def test_hostile_configs(change, message, saved_digits, tmp_path):
    shutil.copytree(saved_digits, tmp_path / "saved")
    config(tmp_path / "saved", change)
    if message is None:  # fields of later versions have defaults
        lutjax.load(tmp_path / "saved")
        return
    with pytest.raises(BundleError, match=message) as result:
        lutjax.load(tmp_path / "saved")
    assert "\n" not in str(result.value)
