"""Layers in all three libraries: the same variables, outputs, gradients and decoding."""

import ast
import copy
import inspect
import pathlib
import pickle
import pydoc
import re
import runpy
import shutil
import subprocess
import sys
import types
from typing import Any

import flax.linen
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from folders import ROOT
from layer_libraries import (
    LIBRARIES,
    Case,
    assert_drawn,
    by_kind,
    inputs_of,
    nnx_layer,
    spec_type_of,
    variables_on_a_grid as variables_of,
)

import lutjax
from lutjax.layers import haiku as lutjax_haiku, linen, nnx as lutjax_nnx
from lutjax.layers._spec import parameters

TABLES = {"n_detectors": 5, "n_anchors": 3}
POSITIONS = {"n_positions": 8, "n_position_bits": 2}
IMAGES = {"n_detectors": 4, "n_anchors": 3}
CASES = {
    "lut": Case("LUT", TABLES, (4, 3, 7)),
    "sparse_per_row": Case("SparseLUT", {**TABLES, "n_targets": 4}, (9, 7)),
    "sparse_per_layer": Case(
        "SparseLUT", {**TABLES, "n_targets": 6, "targets_per": "layer"}, (9, 7)
    ),
    "attention_without_positions": Case("LUTAttention", {**TABLES, "window": 4}, (2, 9, 7)),
    "attention": Case("LUTAttention", {**TABLES, **POSITIONS}, (2, 9, 7)),
    "pair": Case("LUTPairAttention", {**TABLES, **POSITIONS, "shared_positions": False}, (2, 9, 7)),
    "window": Case("WindowLUT", {**IMAGES, "kernel": 2, "stride": 2}, (2, 4, 7), ((4, 7), 6)),
    "conv": Case("ConvLUT", {**IMAGES, "kernel": 2, "pool": (2, 1)}, (2, 4, 7), ((4, 7), 6)),
}


@nnx.jit
def run(layer: Any, *inputs: Any, **options: Any) -> jax.Array:
    return layer(*inputs, **options)


@pytest.mark.parametrize("name", ["attention", "pair"])
def test_keys_from_elsewhere(name):
    """A layer attends to itself with its own inputs as keys; a chunk sees the keys before it."""
    case = CASES[name]
    layer, x = nnx_layer(case, variables_of(case)), inputs_of(case)
    want = run(layer, x)
    np.testing.assert_array_equal(run(layer, x, x), want)
    chunk = run(layer, x[..., 4:, :], x, query_start=4)
    np.testing.assert_array_equal(chunk, want[..., 4:, :])
    other = run(layer, x, -x)
    assert other.shape == want.shape
    assert np.any(other != want)


def test_segments():
    case = CASES["attention"]
    layer, x = nnx_layer(case, variables_of(case)), inputs_of(case)
    segments = jnp.asarray([[0] * 4 + [1] * 5] * 2, jnp.int32)
    want = jnp.concatenate([run(layer, x[:, :4]), run(layer, x[:, 4:])], 1)
    np.testing.assert_array_equal(run(layer, x, segments=segments), want)
    np.testing.assert_array_equal(run(layer, x, x, segments=segments, key_segments=segments), want)


def test_optimizer_leaves_ids_alone():
    kinds = {
        name for name, kind in lutjax_nnx._variables.KINDS.items() if issubclass(kind, nnx.Param)
    }
    assert kinds == {"params", "tables", "scalars"}


def test_dtype_casts_inputs_and_outputs():
    case = CASES["attention"]
    layer = nnx_layer(case, variables_of(case), dtype=jnp.bfloat16)
    y = run(layer, inputs_of(case))
    assert y.dtype == jnp.bfloat16
    assert layer.weights.dtype == jnp.float32
    decoder = nnx.view(layer, decode=True, batch_size=2)
    np.testing.assert_array_equal(run(decoder, inputs_of(case)), y)


def test_options_reach_the_op(monkeypatch):
    seen, sums = [], lutjax.FixedPoint(256)

    def lut(x, weights, anchors, *, implementation, accumulate, epsilon):
        seen.append((implementation, accumulate))
        return jnp.zeros((*x.shape[:-1], weights.shape[-1]), weights.dtype)

    monkeypatch.setattr(lutjax, "lut", lut)
    nnx_layer(CASES["lut"], implementation=("triton", "xla"), accumulate=sums)(
        inputs_of(CASES["lut"])
    )
    assert seen == [(("triton", "xla"), sums)]


def test_explicit_ids():
    anchors = np.tile(np.asarray([[0, 1], [2, 3], [4, 5]], np.int32), (5, 1, 1))
    targets = np.asarray([[[0, 5, -1]]], np.int32)
    case = Case("SparseLUT", {**TABLES, "anchors": anchors, "targets": targets}, (9, 7))
    for arrays in assert_drawn(case, inputs_of(case)):
        np.testing.assert_array_equal(arrays["anchors"], anchors)
        np.testing.assert_array_equal(arrays["targets"], targets)
        assert arrays["weights"].shape == (5, 8, 3)


def test_unknown_option():
    with pytest.raises(TypeError, match="n_detector'"):
        lutjax_nnx.LUT(7, 6, **TABLES, n_detector=3, rngs=nnx.Rngs(0))


@pytest.mark.usefixtures("without_typechecking")
def test_wrong_calls():
    case = CASES["attention"]
    layer, x = nnx_layer(case), inputs_of(case)
    with pytest.raises(ValueError, match="no cache to decode with; call init_cache"):
        layer(x, decode=True)
    layer.init_cache(x.shape)
    short = {"segments": jnp.zeros((2, 8), jnp.int32)}
    for args, given, message in (
        ((x, x[..., :6]), {}, r"keys has shape \[2, 9, 6\]"),
        ((x,), {"query_start": 3}, "query_start is given but keys is not"),
        ((x,), {"query_start": 3, "decode": True}, "query_start cannot be given when decoding"),
        ((x,), {**short, "decode": True}, r"segments is int32\[2, 8\]; expected \[2, 9\]"),
        ((x[:1],), {"decode": True}, r"cached_key_index is int32\[2, 8, 5\]; .* int32\[1, 8, 5\]"),
    ):
        with pytest.raises(ValueError, match=f"^LUTAttention: {message}"):
            layer(*args, **given)
    with pytest.raises(ValueError, match="decoding must know how far back a query looks"):
        lutjax_nnx.LUTAttention(7, 6, **TABLES, rngs=nnx.Rngs(0)).init_cache(x.shape)


@pytest.mark.usefixtures("without_typechecking")
def test_attention_to_all_keys_refuses():
    """A distance before or after a query has a position; starts, caches and additional keys have none."""
    case = CASES["attention"]._replace(options={**TABLES, **POSITIONS, "causal": False})
    layer, x = nnx_layer(case), inputs_of(case)
    assert layer.positions.shape == (2 * 8 + 1, 1, 2)
    assert layer.n_positions == 8
    layer.check()
    for start in ("query_start", "key_start"):
        with pytest.raises(ValueError, match=f"LUTAttention: {start} is given but causal is False"):
            layer(x, x, **{start: 1})
    with pytest.raises(ValueError, match="LUTAttention: there are 10 keys, but n_positions is 8"):
        layer(jnp.zeros((2, 10, 7)))
    with pytest.raises(ValueError, match="LUTAttention: causal is False, so there is no decoding"):
        layer.init_cache(x.shape)
    with pytest.raises(ValueError, match="LUTAttention: decode is True but causal is False"):
        nnx.view(layer, decode=True)
    layer.positions = jnp.zeros((5, 1, 2))
    assert layer.n_positions == 2


def test_check_after_reading():
    case = CASES["sparse_per_row"]
    arrays = variables_of(case)
    model = nnx.List([nnx_layer(case, arrays), nnx_layer(case, arrays)])
    lutjax_nnx.check(model)
    wrong = {**arrays, "targets": arrays["targets"] + 1}
    model[1].targets.set_value(wrong["targets"])
    with pytest.raises(ValueError, match="SparseLUT: targets holds ids"):
        lutjax_nnx.check(model)
    layer = linen.SparseLUT(*case.sizes, **case.options)
    layer.check(by_kind(case, arrays))
    with pytest.raises(ValueError, match="SparseLUT: targets holds ids"):
        layer.check(by_kind(case, wrong))
    f = hk.transform_with_state(
        lambda: lutjax_haiku.SparseLUT(*case.sizes, **case.options, name="layer").check()
    )
    f.apply({"layer": arrays}, {"layer": arrays}, None)
    with pytest.raises(ValueError, match="SparseLUT: targets holds ids"):
        f.apply({"layer": arrays}, {"layer": wrong}, None)


STATES = {
    "state": lambda state: state,
    "pure dict": nnx.to_pure_dict,
    "frozen dict": lambda state: flax.core.freeze(nnx.to_pure_dict(state)),
    "dict of variables": lambda state: {
        "layers": {0: {**state["layers"][0]}, 1: state["layers"][1]}
    },
    "strings in place of numbers": lambda state: {
        "layers": {str(i): part for i, part in nnx.to_pure_dict(state)["layers"].items()}
    },
    "flat state": nnx.to_flat_state,
    "pairs": lambda state: list(nnx.to_flat_state(state)),
    "flat dict": lambda state: dict(nnx.to_flat_state(state)),
}


@pytest.mark.parametrize("form", STATES)
def test_check_of_a_state(form):
    case = CASES["sparse_per_row"]
    layer = nnx_layer(case)
    model = nnx.Sequential(layer, nnx_layer(case))
    lutjax_nnx.check(model, STATES[form](nnx.state(model)))
    trained = STATES[form](nnx.state(model, nnx.Param))
    with pytest.raises(
        ValueError, match="SparseLUT: the state has no anchors, which belong to its weights"
    ):
        lutjax_nnx.check(model, trained)


@pytest.mark.parametrize("wrong", [3, "weights", [1], [("weights", 1)], np.zeros(3)], ids=str)
def test_check_of_no_state(wrong):
    with pytest.raises(
        TypeError, match=r"check: restored is of type .*; expected an nnx\.State, nested dicts"
    ):
        lutjax_nnx.check(nnx_layer(CASES["sparse_per_row"]), wrong)


LAYERS = [name for name in linen.__all__ if name != "tables_of"]


@pytest.mark.parametrize("layer", LAYERS)
def test_constructors_are_the_same(layer):
    """Argument names, order, kinds, defaults and annotations match the spec in every library.

    Flax Linen and Haiku infer `in_features`, so it and the argument after it have a default.
    """
    spec_type = spec_type_of(layer)
    want = parameters(spec_type)
    assert all(p.annotation is not p.empty for p in want)
    sizes = [p for p in want if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert 0 < len(sizes) <= 2
    assert want[: len(sizes)] == sizes
    assert all(p.kind is p.KEYWORD_ONLY for p in want[len(sizes) :])
    for library in (lutjax_nnx, linen, lutjax_haiku):
        cls = getattr(library, layer)
        for actual in (inspect.signature(cls), inspect.signature(cls.__init__)):
            shown = [
                p
                for p in actual.parameters.values()
                if p.name not in ("self", "rngs", "name", "parent")
            ]
            inferred = library is not lutjax_nnx and sizes[0].name == "in_features"
            optional = [p.replace(default=None, annotation=p.annotation | None) for p in sizes]
            assert shown == [*(optional if inferred else sizes), *want[len(sizes) :]]
    assert ("rngs" in inspect.signature(getattr(lutjax_nnx, layer)).parameters) == (
        layer not in ("GroupSum", "Thermometer")
    )


@pytest.mark.parametrize("library", [lutjax_nnx, linen, lutjax_haiku], ids=LIBRARIES)
@pytest.mark.parametrize("layer", LAYERS)
def test_documentation_of_a_layer(layer, library):
    """`help` fits on a screen, and documents each argument once; a pointer to another layer is valid."""
    cls = getattr(library, layer)
    text = inspect.getdoc(cls)
    assert {"Args:", "Raises:", "Example:"} <= set(text.split("\n"))
    names = [p.name for p in inspect.signature(cls).parameters.values() if p.name != "parent"]
    section = text.partition("\nArgs:\n")[2].partition("\n\n")[0]
    entries = re.findall(r"(?m)^  (\w[\w, ]*): (?:as in `(\w+)`)?", re.sub(r",\n +", ", ", section))
    told = [(name, layer) for names, layer in entries for name in names.split(", ")]
    assert sorted(name for name, _ in told) == sorted(names)
    for name, other in told:
        assert not other or name in inspect.signature(getattr(library, other)).parameters
    shown = pydoc.plain(pydoc.render_doc(cls))
    of_flax = r"\n \|  -+\n \|  [\w ]+ inherited from flax"  # Linen documents its modules first
    end = of_flax if library is lutjax_nnx else "Method resolution order:"
    before, *after = re.split(end, shown, maxsplit=1)
    assert after
    assert len(before.splitlines()) <= 80


@pytest.mark.parametrize("layer", LAYERS)
def test_layers_name_their_op(layer):
    """Each NNX class shows its op to the reader: the op in the specification."""
    cls = getattr(lutjax_nnx, layer)
    op = getattr(cls.spec_type, "op", None)
    assert (op is None) == (layer in ("GroupSum", "Thermometer"))
    assert op is None or re.search(rf"\b{op.__name__}\b", inspect.getsource(cls))


@pytest.mark.parametrize("library", [lutjax_nnx, linen, lutjax_haiku], ids=LIBRARIES)
def test_layers_have_few_ancestors(library):
    for layer in LAYERS:
        ancestors = [
            c.__name__
            for c in getattr(library, layer).__mro__[1:]
            if c.__module__.startswith("lutjax.")
        ]
        assert 1 <= len(ancestors) <= 4, (layer, ancestors)


def build_module():
    return types.SimpleNamespace(
        **runpy.run_path(str(ROOT / "hatch_build.py"), run_name="hatch_build")
    )


@pytest.mark.parametrize("library", [linen, lutjax_haiku], ids=["linen", "haiku"])
def test_stubs_have_the_constructors_and_methods(library):
    tree = ast.parse(build_module().stub(ROOT, library.__name__.rpartition(".")[2]))
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    assert set(classes) == set(LAYERS)
    for name, node in classes.items():
        cls = getattr(library, name)
        for function in (line for line in node.body if isinstance(line, ast.FunctionDef)):
            if function.name == "__getattr__":
                continue
            arguments, signature = function.args, inspect.signature(getattr(cls, function.name))
            result = [a.arg for a in (*arguments.args, *arguments.kwonlyargs)]
            assert sorted(result) == sorted(signature.parameters), (name, function.name)
            n_defaults = len(arguments.defaults) + sum(d is not None for d in arguments.kw_defaults)
            assert n_defaults == sum(
                p.default is not p.empty for p in signature.parameters.values()
            )


CALLS = {
    "LUT(8, 4, n_detectors=3, n_anchors=2{end})": None,
    'LUT(8, 4, n_detectors="3", n_anchors=2{end})': 'Argument "n_detectors" to "LUT" has incompatible type "str"',
    "LUT(8, 4, n_anchors=2{end})": 'Missing named argument "n_detectors"',
    "LUT(8, 4, n_detectors=3, n_anchors=2, window=3{end})": 'Unexpected keyword argument "window"',
    "LUT(8, 4, 3, n_detectors=3, n_anchors=2{end})": "argument",
}


SIZES = {
    "first: int = layer.in_features": None,
    "name: str = layer.n_detectors": 'expression has type "int", variable has type "str"',
    "layer.n_gates": '"LUT" has no attribute "n_gates"',
}


@pytest.mark.parametrize("name", ["lut", "attention_without_positions"])
def test_linen_names_intermediates(name):
    """Flax captures the outputs from `__call__` methods, and summarizes modules by them."""
    case = CASES[name]
    layer, x = getattr(linen, case.layer)(*case.sizes, **case.options), inputs_of(case)
    variables = layer.init(jax.random.key(0), x)
    y, result = layer.apply(variables, x, capture_intermediates=True, mutable=["intermediates"])
    np.testing.assert_array_equal(result["intermediates"]["__call__"][0], y)
    assert case.layer in flax.linen.tabulate(layer, jax.random.key(0))(x)


@pytest.mark.slow
def test_mypy_checks_calls(tmp_path):
    pytest.importorskip("mypy")
    package = pathlib.Path(lutjax.__file__).parent
    shutil.copytree(package, tmp_path / "lutjax", ignore=shutil.ignore_patterns("__pycache__"))
    build_module().write(ROOT, tmp_path)
    lines, want = (
        ["from flax import nnx", "from lutjax.layers import haiku, linen, nnx as layers"],
        {},
    )
    for library, end in (("layers", ", rngs=nnx.Rngs(0)"), ("linen", ""), ("haiku", "")):
        for call, message in CALLS.items():
            lines.append(f"{library}.{call.format(end=end)}")
            want[len(lines)] = message
    lines.append("layer = layers.LUT(8, 4, n_detectors=3, n_anchors=2, rngs=nnx.Rngs(0))")
    for use, message in SIZES.items():
        lines.append(use)
        want[len(lines)] = message
    path = tmp_path / "calls.py"
    path.write_text("\n".join(lines) + "\n")
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(tmp_path), str(path)]
    actual = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path).stdout
    assert ".pyi" not in actual, "the stubs have errors"
    for line, message in want.items():
        errors = re.findall(rf"calls\.py:{line}: error: (.*)", actual)
        assert message in errors[0] if message else not errors, (lines[line - 1], actual)


@pytest.mark.parametrize("name", ["lut", "attention", "pair"])
def test_sizes_are_attributes(name):
    case = CASES[name]
    sizes = {"in_features": 7, "out_features": 6, **case.options}
    layers = [nnx_layer(case), getattr(linen, case.layer)(*case.sizes, **case.options)]
    result = hk.transform_with_state(
        lambda: {
            name: getattr(getattr(lutjax_haiku, case.layer)(*case.sizes, **case.options), name)
            for name in sizes
        }
    ).apply({}, {}, jax.random.key(0))[0]
    assert result == sizes
    for layer in layers:
        assert {name: getattr(layer, name) for name in sizes} == sizes
        assert not hasattr(layer, "n_gates")
    with pytest.raises(AttributeError, match=f"'{case.layer}' object has no attribute 'n_gates'"):
        _ = layers[0].n_gates


@pytest.mark.usefixtures("without_typechecking")
def test_arrays_are_assigned():
    case = CASES["lut"]
    layer, x, arrays = nnx_layer(case), inputs_of(case), variables_of(case)
    before = layer.weights
    layer.weights, layer.anchors = np.asarray(arrays["weights"]), arrays["anchors"]
    assert layer.weights is before
    assert isinstance(layer.weights.get_value(), jax.Array)
    np.testing.assert_array_equal(layer(x), case.spec(arrays, x))
    layer.weights = nnx.Param(2 * arrays["weights"])
    np.testing.assert_array_equal(layer(x), 2 * case.spec(arrays, x))
    layer.weights = arrays["weights"].astype(jnp.bfloat16)
    assert layer(x).dtype == jnp.bfloat16
    for name, value, message in (
        ("weights", [[1.0]], "LUT: weights is a variable and takes an array, not list"),
        (
            "anchors",
            arrays["anchors"].astype(jnp.float32),
            r"LUT: anchors holds ids, int32; it cannot take float32\[5, 3, 2\]",
        ),
        (
            "weights",
            arrays["anchors"],
            r"LUT: weights holds numbers, bfloat16; it cannot take int32\[5, 3, 2\]",
        ),
    ):
        with pytest.raises(TypeError, match=message):
            setattr(layer, name, value)


PRUNED = {
    "sparse_per_row": {"weights": (0,), "anchors": (0,), "targets": (0,)},
    "sparse_per_layer": {"weights": (2,), "targets": (2,)},
    "pair": {"weights": (0, 2), "anchors": (0,), "positions": (1,)},
    "conv": {"weights": (0,), "anchors": (0,)},
}


@pytest.mark.parametrize("name", PRUNED)
@pytest.mark.usefixtures("without_typechecking")
def test_sizes_follow_pruned_arrays(name):
    case = CASES[name]
    layer, x = nnx_layer(case, variables_of(case)), inputs_of(case)
    arrays = variables_of(case)
    for variable, axes in PRUNED[name].items():
        for axis in axes:
            arrays[variable] = jnp.take(arrays[variable], jnp.arange(2), axis=axis)
    first, *others = PRUNED[name]
    setattr(layer, first, arrays[first])
    with pytest.raises(ValueError, match=f"{case.layer}: (anchors|targets|weights) has shape"):
        lutjax_nnx.check(layer)
    with pytest.raises(ValueError, match=f"^{case.layer}: "):
        layer(x)
    for variable in others:
        setattr(layer, variable, arrays[variable])
    lutjax_nnx.check(layer)
    if 0 in PRUNED[name][first]:
        assert layer.n_detectors == 2
    again, n_outputs = nnx.merge(*nnx.split(layer)), 2 if name == "pair" else 6
    assert again.n_detectors == layer.n_detectors
    assert (layer.out_channels if name == "conv" else layer.out_features) == n_outputs
    assert run(again, x).shape[-1] == n_outputs


@pytest.mark.parametrize(
    "name", ["n_anchors", "in_features", "dtype", "weights_init", "implementation"]
)
def test_sizes_and_options_are_read_only(name):
    layer = nnx_layer(CASES["lut"])
    before, arrays = layer.spec, nnx.state(layer)
    with pytest.raises(
        AttributeError, match=f"^LUT: {name} is read-only, .*Create a layer with {name}=3"
    ):
        setattr(layer, name, 3)
    assert layer.spec == before
    assert nnx.state(layer) == arrays
    assert name in dir(layer)


@pytest.mark.parametrize("hijax", [False, True])
def test_other_modes_of_flax(hijax):
    """Layers run with hijax variables, including copies, and in transformations without graph updates."""
    x, options = jnp.ones((3, 8)), {"n_detectors": 4, "n_anchors": 2}
    want = lutjax_nnx.LUT(8, 2, **options, weights_init=jax.nn.initializers.ones, rngs=nnx.Rngs(0))(
        x
    )
    with nnx.var_defaults(hijax=hijax):
        layer = lutjax_nnx.LUT(
            8, 2, **options, weights_init=jax.nn.initializers.ones, rngs=nnx.Rngs(0)
        )
        calls = nnx.jit(lambda layer, x: layer(x), graph_updates=False)
        copies = layer, nnx.clone(layer), pickle.loads(pickle.dumps(layer)), copy.deepcopy(layer)
        for y in (calls(layer, x), *(actual(x) for actual in copies)):
            np.testing.assert_array_equal(y, want)
        noisy = lutjax_nnx.LogicGates(4, 4, estimator="gumbel", rngs=nnx.Rngs(0))
        again = pickle.loads(pickle.dumps(noisy))
        np.testing.assert_array_equal(again(x[:, :4]), noisy(x[:, :4]))


class Mine(lutjax_nnx.LUT):
    """User-defined subclass with another name and constructor."""

    def __init__(self, size, *, rngs):
        super().__init__(size, 2, n_detectors=3, n_anchors=2, rngs=rngs)


def test_errors_name_the_class_of_the_user():
    with pytest.raises(ValueError, match=r"^Mine: in_features is 1"):
        Mine(1, rngs=nnx.Rngs(0))
    layer = Mine(4, rngs=nnx.Rngs(0))
    assert layer(jnp.ones(4)).shape == (2,)
    with pytest.raises(ValueError, match=r"^Mine: x has shape \[5\]"):
        layer(jnp.ones(5))
    with pytest.raises(AttributeError, match=r"^Mine: n_anchors is read-only"):
        layer.n_anchors = 3
    layer.anchors[...] = layer.anchors[...] + 4
    with pytest.raises(ValueError, match=r"^Mine: anchors holds ids"):
        lutjax_nnx.check(layer)
    linens = type("OfLinen", (linen.LUT,), {})(4, 2, n_detectors=3, n_anchors=2)
    with pytest.raises(ValueError, match=r"^OfLinen: x has shape"):
        linens.init(jax.random.key(0), jnp.ones(5))
    haikus = type(hk.Module)("OfHaiku", (lutjax_haiku.LUT,), {})
    with pytest.raises(ValueError, match=r"^OfHaiku: in_features is 1"):
        hk.transform_with_state(lambda: haikus(1, 2, n_detectors=3, n_anchors=2)).init(None)
