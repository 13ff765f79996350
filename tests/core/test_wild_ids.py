"""Out-of-range ids: rejected where known and clamped where traced, in every implementation.

A traced id counts as the nearest valid id, and nothing else is read: an op returns the reference result for ids
individually clamped by NumPy.
"""

import dataclasses
import functools
import gc
import pickle
import re
import weakref

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import worlds
from cases import ops, slow_except, split
from every_layer import CASES as LAYER_CASES
from flax import nnx
from layer_libraries import by_kind, inputs_of, nnx_layer, variables_of
from machine import needs_gpu

import lutjax
from lutjax import testing
from lutjax.layers import haiku, linen, nnx as lutjax_nnx
from lutjax.ops import _checks
from lutjax.wiring import from_edges

WILD = np.array([-5, -1, 2**31 - 1, -(2**31), 0, 1, 2, 3, 4, 9], np.int32)
IDS = ("anchors", "wires", "leaves", "index", "targets")
LAST_OF_DETECTION = {"detection": 3, "query": 3, "key": 3, "position": 1}
LAST = {  # the last id that exists, in cases of the size that can be split
    **dict.fromkeys(
        ("detect", "margins", "scored_lut", "bilinear_gates", "soft_lut", "binary_lut"), 4
    ),
    **{
        "weighted_lookup": 2,
        "sparse_lookup": 2,
        "lut_pair_attention": 6,
        "lut_at_places": 7,
        "logic_trees": 7,
    },
    "gate_network": np.repeat([[4], [3]], 4, 0),  # of inputs, and of gates of the first layer
}


def cases_of_ids(op):
    """Return an op case, wild ids by name, and their nearest valid ids (for a detection, the nearest ids in both rows)."""
    case, wild, near = split(op), {}, {}
    rng = np.random.default_rng(0)
    for name, a in case.fixed.items():
        if name.endswith("_index"):
            of = name.removesuffix("_index")
            index, flip = rng.choice(WILD, (2, *a.shape))
            row, other = (np.clip(i, 0, LAST_OF_DETECTION[of]) for i in (index, index ^ flip))
            wild |= {name: index, f"{of}_flip": flip}
            near |= {name: row, f"{of}_flip": row ^ other}
        elif name in IDS:
            wild[name] = rng.choice(WILD, a.shape)
            near[name] = np.clip(wild[name], -1 if name == "targets" else 0, LAST[op]).astype(
                np.int32
            )
    return case, wild, near


OPS = (*LAST, "lookup", "lookup_attention")


def test_every_op_with_ids_is_tried():
    def has_ids(op):
        return any(jnp.issubdtype(a.dtype, jnp.integer) for a in split(op).fixed.values())

    assert set(OPS) == {op for op in ops("backward") if has_ids(op)}


def run(op, function, ids, **options):
    """Return outputs and cotangents for traced ids."""
    case = split(op)

    @jax.jit
    def results(ids):
        def floats(differentiable):
            result = case.call(
                functools.partial(function, **options), {**differentiable, **case.fixed, **ids}
            )
            return {name: y for name, y in result.items() if jnp.issubdtype(y.dtype, jnp.floating)}

        y, pull = jax.vjp(floats, case.differentiable)
        return {**y, **pull(jax.tree.map(jnp.cos, y))[0]}

    return results(jax.tree.map(jnp.asarray, ids))


def check(op, implementation):
    _, wild, near = cases_of_ids(op)
    actual = run(op, lutjax.kernel_registry.function(op), wild, implementation=implementation)
    expected = run(op, getattr(lutjax.reference, op), near)
    assert any(map(np.any, expected.values()))
    testing.assert_all_close(f"{op}, {implementation}", actual, expected)


@pytest.mark.parametrize(
    ("world", "op"),
    worlds.in_worlds(
        OPS, ("lookup", "sparse_lookup", "detect", "scored_lut", "bilinear_gates", "logic_trees")
    ),
)
def test_ids_out_of_range_are_clamped(world, op, request):
    with worlds.of(world, request) as implementation:
        check(op, implementation)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("implementation", ["xla", "triton", "pallas"])
def test_ids_out_of_range_are_clamped_on_gpus(implementation, op):
    check(op, (implementation, "xla"))


# ------------------------------------------------------------------------------------- known ids
DATA = {"lookup", "lookup_attention", "weighted_lookup"}
"""Ops with computed ids, as activations are: checking each new array would wait for the device."""


@pytest.mark.parametrize("make", [jnp.asarray, np.asarray], ids=["jax", "numpy"])
@pytest.mark.parametrize("op", sorted(set(OPS) - DATA))
def test_known_ids_are_refused(op, make):
    """Raise in each call, also for ids stored as trace constants."""
    case, wild, near = cases_of_ids(op)
    name = next(name for name in IDS if name in wild)
    near = jax.tree.map(jnp.asarray, near)

    def call(ids):
        arrays = {**case.fixed, **near, name: make(ids[name])}
        return lambda d: case.call(lutjax.kernel_registry.function(op), {**arrays, **d})

    for f in (call(wild), call(wild), jax.jit(call(wild))):
        with pytest.raises(ValueError, match=rf"{op}: \w+ holds ids from -?\d+ to \d+; "):
            f(case.differentiable)
    jax.eval_shape(call(near), case.differentiable)


@pytest.mark.parametrize("op", sorted(DATA))
def test_computed_ids_are_clamped(op):
    case, wild, near = cases_of_ids(op)
    function = lutjax.kernel_registry.function(op)
    y, want = (
        case.call(function, {**case.differentiable, **case.fixed, **jax.tree.map(jnp.asarray, ids)})
        for ids in (wild, near)
    )
    testing.assert_all_close(op, y, want)


ANCHORS = np.array([[[0, 7]], [[6, 2]]], np.int32)
X, TABLES = np.zeros((3, 8), np.float32), np.zeros((2, 2, 4), np.float32)
GATES, WIRES = np.zeros((4, 2), np.float32), np.array([[0, 1], [1, 7]], np.int32)


def edges(**by):
    made = from_edges([0, 0, 1], [1, 1, 0], [2, 0, 2], n_detectors=2, n_rows=2, n_outputs=3)
    return dataclasses.replace(made, **{name: getattr(made, name) + n for name, n in by.items()})


CALLS = {
    "lut, fewer inputs": (lambda: lutjax.lut(X[:, :4], TABLES, ANCHORS),
        "anchors holds ids from 0 to 7; inputs of x are 0 to 3."),
    "lut, groups": (lambda: lutjax.lut(X.reshape(3, 2, 4), TABLES, ANCHORS, groups=2),
        "lut: anchors holds ids from 0 to 7; inputs of x are 0 to 3."),
    "lut_attention": (lambda: lutjax.lut_attention(X, jnp.zeros((2, 4, 4)), ANCHORS + 1), "from 1 to 8"),
    "scored_lut": (lambda: lutjax.scored_lut(X, TABLES, ANCHORS[..., 1] + 1, {}, read=lutjax.reads.Hard()),
        "scored_lut: anchors holds ids from 3 to 8; inputs of x are 0 to 7."),
    "conv_lut": (lambda: lutjax.conv_lut(jnp.zeros((3, 3, 2)), TABLES, ANCHORS + 1, kernel=2),
        "conv_lut: anchors holds ids from 1 to 8; values of a window are 0 to 7."),
    "sparse_lut": (lambda: lutjax.sparse_lut(X, TABLES, ANCHORS, np.array([[[0, 1, 4, -1]]]), 4),
        "targets holds ids from -1 to 4; outputs are 0 to 3, and -1 marks an unused slot."),
    "sparse_lut, edges": (lambda: lutjax.sparse_lut(X, jnp.zeros(3), ANCHORS, edges(target=1)),
        "sparse_lookup: targets.target holds ids from 1 to 3; outputs are 0 to 2."),
    "sparse_lut, bounds": (lambda: lutjax.sparse_lut(X, jnp.zeros(3), ANCHORS, edges(first=1)),
        "sparse_lookup: targets: first goes from 1 to 4"),
    "readers": (lambda: lutjax.bilinear_gates(X, GATES, WIRES, readers=np.full((8, 1), 4)),
        "readers holds ids from 4 to 4; entries of wires are 0 to 3, and -1 marks an unused slot."),
    "logic_gates": (lambda: lutjax.logic_gates(X[:, :7], jnp.zeros((2, 16)), WIRES),
        "wires holds ids from 0 to 7"),
    "packed_lut": (lambda: lutjax.packed_lut(jnp.zeros((7, 1), jnp.uint32), jnp.zeros((2, 4), bool), WIRES),
        "packed_lut: wires holds ids from 0 to 7; inputs of words are 0 to 6."),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_messages_about_known_ids(name):
    call, message = CALLS[name]
    with pytest.raises(ValueError, match=re.escape(message)):
        call()


def test_a_jax_array_of_ids_is_read_once(monkeypatch):
    """No warm call waits for the device; arrays are not kept alive, and NumPy arrays, which may change, are read in each call."""
    read = []
    monkeypatch.setattr(_checks, "_check_ids", lambda op, name, a, *_, **__: read.append(name))
    anchors = jnp.asarray(ANCHORS)
    alive = weakref.ref(anchors)
    grouped = jnp.asarray(ANCHORS // 2)
    for _ in range(3):
        lutjax.lut(X, TABLES, anchors)
        lutjax.lut(
            X.reshape(3, 2, 4), TABLES, grouped, groups=2
        )  # whose detection gets other ids in each call
    assert read == ["anchors"] * 2
    lutjax.lut(X[:, :4], TABLES, anchors)  # another rule
    assert len(read) == 3
    for _ in range(2):
        lutjax.lut(X, TABLES, ANCHORS)
    assert len(read) == 5
    del anchors
    gc.collect()
    assert alive() is None


def test_parts_and_images_read_no_ids_of_their_own(monkeypatch):
    read = []
    monkeypatch.setattr(
        _checks, "_check_ids", lambda op, name, a, *_, **__: read.append((op, name))
    )
    anchors, images = jnp.asarray(ANCHORS % 4), jnp.zeros((3, 3, 2))
    confidence = lutjax.reads.Confidence(ways=1)
    for _ in range(2):
        lutjax.conv_lut(images, TABLES, anchors, kernel=2, groups=2)
        lutjax.conv_lut(
            images, TABLES, anchors, confidence.initial(), kernel=2, groups=2, read=confidence
        )
    assert read == [("conv_lut", "anchors")]


def test_a_check_is_an_explicit_transfer():
    anchors = jnp.asarray(ANCHORS)
    with jax.transfer_guard_device_to_host("disallow"):
        lutjax.lut(X, TABLES, anchors)


# ------------------------------------------------------------------------------------- layers
KEPT = {"anchors": "anchors", "targets": "targets", "wires": "wires"}
LAYERS = {
    case.layer: case
    for case in LAYER_CASES.values()
    if case.layer in ("LUT", "SparseLUT", "SpatialLUT", "LogicConv")
}
"""Layers with every id kind: anchors, targets, fields and wires."""


def ids_of(case):
    """Return the name and kind of a layer's first id variable, and wild ids."""
    v = next(v for v in case.spec.variables() if v.kind in KEPT)
    return v.name, v.kind, jnp.full(v.shape, 1000, jnp.int32)


@pytest.mark.parametrize("layer", slow_except(LAYERS, "LUT", "SparseLUT"))
def test_layers_refuse_ids_that_are_known(layer):
    """Layers reject known wild ids from any source, in all three libraries; ops clamp traced ids."""
    case = LAYERS[layer]
    name, kind, wild = ids_of(case)
    x = jax.nn.sigmoid(inputs_of(case))
    made = nnx_layer(case)
    made(x)
    with pytest.raises(ValueError, match=rf"{layer}: {name} holds ids from 1000 to 1000"):
        setattr(made, name, wild)
    with pytest.raises(ValueError, match=rf"{layer}: {name} holds ids"):
        setattr(made, name, np.asarray(wild))
    made(x)  # neither is there
    getattr(made, name).set_value(wild)
    for _ in range(2):  # and no error makes them known
        with pytest.raises(ValueError, match=rf"{layer}: {name} holds ids from 1000 to 1000"):
            made(x)
    nnx.eval_shape(lambda made, x: made(x), made, x)

    kinds = by_kind(case, variables_of(case))
    wrong = {**kinds, kind: {**kinds[kind], name: wild}}
    ours = getattr(linen, case.layer)(*case.sizes, **case.options)
    random = {case.spec.stream: jax.random.key(0)}
    with pytest.raises(ValueError, match=rf"{layer}: {name} holds ids"):
        ours.apply(wrong, x, rngs=random)
    f = hk.transform_with_state(
        lambda x: getattr(haiku, layer)(*case.sizes, **case.options, name="layer")(x)
    )

    state = {
        "layer": {n: a for k, arrays in wrong.items() if k != "params" for n, a in arrays.items()}
    }
    with pytest.raises(ValueError, match=rf"{layer}: {name} holds ids"):
        f.apply({"layer": kinds["params"]}, state, jax.random.key(0), x)


@pytest.mark.parametrize("layer", LAYERS)
def test_layers_without_their_ids(layer):
    case = LAYERS[layer]
    name, _, _ = ids_of(case)
    x = jax.nn.sigmoid(inputs_of(case))
    kinds = by_kind(case, variables_of(case))
    message = rf"{layer}: there is no {name}: the layer was restored without it"
    ours = getattr(linen, case.layer)(*case.sizes, **case.options)
    rngs = {name: jax.random.key(0) for name in ("params", case.spec.stream)}
    with pytest.raises(ValueError, match=message):
        ours.apply({"params": kinds["params"]}, x, rngs=rngs, mutable=True)
    f = hk.transform_with_state(
        lambda x: getattr(haiku, layer)(*case.sizes, **case.options, name="layer")(x)
    )
    with pytest.raises(ValueError, match=message):
        f.apply({"layer": kinds["params"]}, {}, jax.random.key(0), x)
    made = nnx.eval_shape(lambda: nnx_layer(case))
    nnx.update(made, nnx.state(nnx_layer(case), nnx.Param))
    with pytest.raises(ValueError, match=message):
        made(x)
    whole = nnx_layer(case)
    lutjax_nnx.check(whole, nnx.state(whole))
    with pytest.raises(ValueError, match=rf"{layer}: the state has no {name}"):
        lutjax_nnx.check(nnx.List([whole]), nnx.state(nnx.List([whole]), nnx.Param))


def other_ids(case):
    """Return two layers from one case with different ids, and an input."""
    one, other = nnx_layer(case), nnx_layer(case)
    name, _, _ = ids_of(case)
    setattr(other, name, getattr(one, name).get_value()[:, ::-1])
    return one, other, jax.nn.sigmoid(inputs_of(case))


@nnx.jit
def run_jitted(model, x):
    return model(x)


@pytest.mark.parametrize(
    ("layer", "taken"), [*((layer, "state") for layer in LAYERS), ("LUT", "pickle")]
)
def test_trained_variables_of_other_ids(layer, taken):
    """Every call rejects a state with other ids, also in a jitted function, until the ids are updated; equal ids are accepted."""
    one, other, x = other_ids(LAYERS[layer])
    state = nnx.state(one, nnx.Param)
    if taken == "pickle":
        state = pickle.loads(pickle.dumps(state))
    structure = nnx.split(other)[0]
    nnx.update(other, state)
    message = rf"^{layer}: \w+ is from the state of another layer, whose \w+ differ"
    for use in (
        lambda m: m(x),
        lambda m: run_jitted(m, x),
        lutjax_nnx.check,
        lambda m: nnx.clone(m)(x),
    ):
        with pytest.raises(ValueError, match=message):
            use(other)
    same = nnx_layer(LAYERS[layer])
    nnx.update(same, state)
    run_jitted(same, x)
    nnx.update(other, nnx.state(one))
    assert nnx.split(other)[0] == structure
    run_jitted(other, x)
    lutjax_nnx.check(other)


@pytest.mark.parametrize("layer", LAYERS)
def test_other_updates_of_trained_variables_are_taken(layer):
    """Optimizer steps and jitted results keep their model's ids; for a restored array nothing is known."""
    one, other, x = other_ids(LAYERS[layer])
    nnx.update(other, jax.tree.map(lambda a: a + 0, nnx.state(one, nnx.Param)))
    run_jitted(other, x)
    nnx.update(other, nnx.to_pure_dict(nnx.state(one, nnx.Param)))
    run_jitted(other, x)
    copy = nnx.clone(one)
    nnx.update(copy, nnx.state(one, nnx.Param))
    run_jitted(copy, x)
    nnx.update(other, nnx.state(one, nnx.Param))  # all ids follow in a second update
    nnx.update(other, nnx.state(one, nnx.Not(nnx.Param)))
    run_jitted(other, x)
