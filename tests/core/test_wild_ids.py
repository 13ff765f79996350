"""Ids out of range: refused where they are known, and clamped where they are traced, in every implementation.

A traced id counts as the nearest that exists, and nothing else is read: an op returns for it what the reference returns for ids
that NumPy has clamped, one by one.
"""

import dataclasses
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
from cases import ops, slow, slow_among, slow_except, split
from every_layer import CASES as LAYER_CASES
from flax import nnx
from layer_libraries import by_kind, inputs_of, nnx_layer, variables_of
from machine import needs_gpu

import lutjax
from lutjax import testing
from lutjax.layers import haiku, linen, nnx as lutjax_nnx
from lutjax.models import LogicCA, LogicCAConfig
from lutjax.ops import _checks
from lutjax.ops.logic_trees import Places
from lutjax.ops.lut_at_places import Windows
from lutjax.wiring import from_edges

WILD = np.array([-5, -1, 2**31 - 1, -(2**31), 0, 1, 2, 3, 4, 9], np.int32)
N_OUTPUTS = 5


def numbers(seed, *shape):
    return np.random.default_rng([seed, *shape]).integers(-4, 5, shape) / 4


def ids(seed, *shape):
    return np.random.default_rng([seed, *shape]).choice(WILD, shape)


def array(a):
    return jnp.asarray(a, jnp.int32 if np.issubdtype(a.dtype, np.integer) else jnp.float32)


def detection(seed, *shape, bits):
    """Wild ids, and the detection that they mean: of ``index`` and of ``index ^ flip`` the nearest that exist."""
    index, flip, margin = ids(seed, *shape), ids(seed + 1, *shape), numbers(seed + 2, *shape) + 1 / 8
    last = 2**bits - 1
    there = np.clip(index, 0, last)
    return (index, flip, margin), (there, there ^ np.clip(index ^ flip, 0, last), margin)


def of_lookup():
    weights = array(numbers(1, 3, 4, N_OUTPUTS))
    d, clamped = detection(2, 7, 3, bits=2)

    def call(op, ids, weights, margin, **options):
        return op(weights, lutjax.Detection(*ids, margin, 2), **options)

    return call, d[:2], clamped[:2], (weights, array(d[2]))


def of_sparse_lookup():
    weights = array(numbers(1, 3, 4, 2))
    d, clamped = detection(2, 7, 3, bits=2)
    targets = ids(5, 3, 4, 2)

    def call(op, ids, weights, margin, **options):
        index, flip, targets = ids
        return op(weights, lutjax.Detection(index, flip, margin, 2), targets, N_OUTPUTS, **options)

    existing = np.clip(targets, -1, N_OUTPUTS - 1)
    return call, (*d[:2], targets), (*clamped[:2], existing), (weights, array(d[2]))


def of_lookup_attention():
    bits = (2, 2, 1)
    shapes = (2, 5, 2), (2, 5, 2), (4, 2)
    wild, clamped = zip(
        *(detection(10 * n, *shape, bits=b) for n, (shape, b) in enumerate(zip(shapes, bits, strict=True))),
        strict=True,
    )
    weights = array(numbers(1, 2, 2 ** sum(bits), N_OUTPUTS))

    def call(op, ids, weights, *margins, **options):
        of = zip(ids[::2], ids[1::2], margins, bits, strict=True)
        return op(weights, *(lutjax.Detection(*d) for d in of), **options)

    flat = [tuple(a for d in of for a in d[:2]) for of in (wild, clamped)]
    return call, *flat, (weights, *(array(d[2]) for d in wild))


def of_lut_pair_attention():
    weights, x = array(numbers(1, 2, 4, N_OUTPUTS)), array(numbers(2, 2, 5, 3) + np.arange(3) / 16)
    positions, anchors = array(numbers(3, 4, 2, 1) + 1 / 32), ids(4, 2, 2, 2)

    def call(op, ids, x, weights, positions, **options):
        return op(x, weights, *ids, positions, **options)

    return call, (anchors,), (np.clip(anchors, 0, 6),), (x, weights, positions)


def of_detect():
    x, anchors = array(numbers(1, 7, 3)), ids(2, 4, 3, 2)

    def call(op, ids, x, **options):
        return op(x, *ids, **options).margin

    return call, (anchors,), (np.clip(anchors, 0, 2),), (x,)


def of_margins():
    x, anchors = array(numbers(1, 7, 3)), ids(2, 4, 3, 2)

    def call(op, ids, x, **options):
        return op(x, *ids, **options)

    return call, (anchors,), (np.clip(anchors, 0, 2),), (x,)


def of_weighted_lookup():
    weights, index, c = array(numbers(1, 3, 4, N_OUTPUTS)), ids(2, 7, 3, 2), array(numbers(3, 7, 3, 2))

    def call(op, ids, weights, c, **options):
        return op(weights, *ids, c, **options)

    return call, (index,), (np.clip(index, 0, 3),), (weights, c)


def of_scored_lut():
    x, weights = array(numbers(1, 7, 3) + np.arange(3) / 16), array(numbers(2, 3, 4, N_OUTPUTS))
    anchors, read = ids(3, 3, 2, 2), lutjax.reads.Confidence()

    def call(op, ids, x, weights, **options):
        return op(x, weights, *ids, read.initial(), read=read, **options)

    return call, (anchors,), (np.clip(anchors, 0, 2),), (x, weights)


def of_gates(shape, n_wires):
    def case():
        x, parameter, wires = array(numbers(1, 7, 3)), array(numbers(2, *shape)), ids(3, 6, n_wires)

        def call(op, ids, x, parameter, **options):
            return op(x, parameter, *ids, **options)

        return call, (wires,), (np.clip(wires, 0, 2),), (x, parameter)

    return case


def of_trees():
    places = Places((3, 2), (2, 2), (1, 1), (1, 1), (2, 1))
    x, coefficients, leaves = array(numbers(1, 6, 3)), array(numbers(2, 4, 2, 3)), ids(3, 2, 4)

    def call(op, ids, x, coefficients, **options):
        return op(x, coefficients, *ids, places=places, **options)

    return call, (leaves,), (np.clip(leaves, 0, 3),), (x, coefficients)


def of_places():
    windows = Windows((3, 2, 2), (2, 2), (1, 1), (1, 0), 1)
    images, weights = array(numbers(1, 3, 3, 2, 2) + np.arange(2) / 16), array(numbers(2, 4, 4, 3))
    anchors, targets = ids(3, 4, 2, 2), ids(4, 2, 3)

    def call(op, ids, images, weights, **options):
        return op(images, weights, *ids, N_OUTPUTS, windows=windows, groups=2, **options)

    clamped = np.clip(anchors, 0, 3), np.clip(targets, -1, N_OUTPUTS - 1)
    return call, (anchors, targets), clamped, (images, weights)


def of_network():
    x, coefficients = array(numbers(1, 3, 6)), array(numbers(2, 4, 9))
    wires = np.int32([[0, 99], [-7, 2], [5, 6], [1, 1], [0, 4], [9, 2], [-1, 3], [3, 5], [2, 77]])
    clamped = np.concatenate([np.clip(wires[:5], 0, 5), np.clip(wires[5:], 0, 4)])

    def call(f, ids, x, coefficients, **options):
        return f(x, coefficients, *ids, sizes=(5, 4), **options)

    return call, (wires,), (clamped,), (x, coefficients)


CASES = {
    "lookup": of_lookup,
    "sparse_lookup": of_sparse_lookup,
    "lookup_attention": of_lookup_attention,
    "lut_pair_attention": of_lut_pair_attention,
    "detect": of_detect,
    "margins": of_margins,
    "weighted_lookup": of_weighted_lookup,
    "scored_lut": of_scored_lut,
    "bilinear_gates": of_gates((4, 6), 2),
    "gate_network": of_network,
    "logic_trees": of_trees,
    "lut_at_places": of_places,
    "soft_lut": of_gates((6, 8), 3),
    "binary_lut": of_gates((6, 8), 3),
}


def test_every_op_with_ids_is_tried():
    def has_ids(op):
        return any(jnp.issubdtype(a.dtype, jnp.integer) for a in split(op).fixed.values())

    assert set(CASES) == {op for op in ops("backward") if has_ids(op)}


def check(op, implementation):
    """Values and all cotangents."""
    call, wild, clamped, arguments = CASES[op]()

    def run(f, ids, **options):
        y, pullback = jax.vjp(lambda *a: call(f, ids, *a, **options), *arguments)
        return y, *pullback(array(numbers(0, *y.shape)))

    wild, clamped = ([array(a) for a in ids] for ids in (wild, clamped))
    function = lutjax.kernel_registry.function(op)
    actual = jax.jit(lambda ids: run(function, ids, implementation=implementation))(wild)
    expected = jax.jit(lambda ids: run(getattr(lutjax.reference, op), ids))(clamped)
    assert np.any(expected[0])
    for number, (a, e) in enumerate(zip(actual, expected, strict=True)):
        testing.assert_close(f"{op}, {implementation}: {number}", a, e)


@pytest.mark.parametrize(
    ("world", "op"),
    slow_except(
        worlds.in_worlds(CASES, slow),
        "xla-lookup",
        "xla-sparse_lookup",
        "xla-detect",
        "xla-scored_lut",
        "xla-bilinear_gates",
        "xla-logic_trees",
        "xla, accelerators-lookup",
        "xla, TPUs-lookup",
        "triton-lookup",
        "triton, counted-lookup_attention",
        "pallas/tpu-lookup",
    ),
)
def test_ids_out_of_range_are_clamped(world, op, request):
    with worlds.of(world, request) as implementation:
        check(op, implementation)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("op", CASES)
@pytest.mark.parametrize("implementation", ["xla", "triton", "pallas"])
def test_ids_out_of_range_are_clamped_on_gpus(implementation, op):
    check(op, (implementation, "xla"))


# ------------------------------------------------------------------------------------- known ids
DATA = {"lookup", "lookup_attention", "weighted_lookup"}
"""Ops whose ids are computed, as activations are: a check of each new array would wait for the device."""


@pytest.mark.parametrize("make", [jnp.asarray, np.asarray], ids=["jax", "numpy"])
@pytest.mark.parametrize("op", sorted(set(CASES) - DATA))
def test_known_ids_are_refused(op, make):
    """An error in each call, also of ids that are constants of a trace."""
    call, wild, clamped, arguments = CASES[op]()
    function = lutjax.kernel_registry.function(op)
    wild, fine = ([a.astype(np.int32) for a in ids] for ids in (wild, clamped))
    if op == "sparse_lookup":  # a detection holds arrays of JAX; targets come after it
        wild[:2], fine[:2] = map(jnp.asarray, wild[:2]), map(jnp.asarray, fine[:2])
    wild[-1], fine[-1] = make(wild[-1]), make(fine[-1])
    refused = pytest.raises(ValueError, match=rf"{op}: \w+ holds ids from -?\d+ to \d+; ")
    for _ in range(2):
        with refused:
            call(function, wild, *arguments)
    with refused:
        jax.jit(lambda *a: call(function, wild, *a))(*arguments)
    jax.eval_shape(lambda *a: call(function, fine, *a), *arguments)


@pytest.mark.parametrize("op", sorted(DATA))
def test_computed_ids_are_clamped(op):
    call, wild, clamped, arguments = CASES[op]()
    function = lutjax.kernel_registry.function(op)
    y, want = (call(function, [array(a) for a in ids], *arguments) for ids in (wild, clamped))
    testing.assert_close(op, y, want)


ANCHORS = np.array([[[0, 7]], [[6, 2]]], np.int32)
X, TABLES = np.zeros((3, 8), np.float32), np.zeros((2, 2, 4), np.float32)
GATES, WIRES = np.zeros((4, 2), np.float32), np.array([[0, 1], [1, 7]], np.int32)


def edges(**by):
    """An edge list with each id of some of its arrays raised."""
    made = from_edges([0, 0, 1], [1, 1, 0], [2, 0, 2], n_detectors=2, n_rows=2, n_outputs=3)
    return dataclasses.replace(made, **{name: getattr(made, name) + n for name, n in by.items()})


CALLS = {
    "lut, fewer inputs": (
        lambda: lutjax.lut(X[:, :4], TABLES, ANCHORS),
        "anchors holds ids from 0 to 7; inputs of x are 0 to 3.",
    ),
    "lut, groups": (
        lambda: lutjax.lut(X.reshape(3, 2, 4), TABLES, ANCHORS, groups=2),
        "lut: anchors holds ids from 0 to 7; inputs of x are 0 to 3.",
    ),
    "lut_attention": (lambda: lutjax.lut_attention(X, jnp.zeros((2, 4, 4)), ANCHORS + 1), "from 1 to 8"),
    "scored_lut": (
        lambda: lutjax.scored_lut(X, TABLES, ANCHORS[..., 1] + 1, {}, read=lutjax.reads.Hard()),
        "scored_lut: anchors holds ids from 3 to 8; inputs of x are 0 to 7.",
    ),
    "conv_lut": (
        lambda: lutjax.conv_lut(jnp.zeros((3, 3, 2)), TABLES, ANCHORS + 1, kernel=2),
        "conv_lut: anchors holds ids from 1 to 8; values of a window are 0 to 7.",
    ),
    "sparse_lut": (
        lambda: lutjax.sparse_lut(X, TABLES, ANCHORS, np.array([[[0, 1, 4, -1]]]), 4),
        "targets holds ids from -1 to 4; outputs are 0 to 3, and -1 marks an unused slot.",
    ),
    "sparse_lut, edges": (
        lambda: lutjax.sparse_lut(X, jnp.zeros(3), ANCHORS, edges(target=1)),
        "sparse_lookup: targets.target holds ids from 1 to 3; outputs are 0 to 2.",
    ),
    "sparse_lut, bounds": (
        lambda: lutjax.sparse_lut(X, jnp.zeros(3), ANCHORS, edges(first=1)),
        "sparse_lookup: targets: first goes from 1 to 4",
    ),
    "readers": (
        lambda: lutjax.bilinear_gates(X, GATES, WIRES, readers=np.full((8, 1), 4)),
        "readers holds ids from 4 to 4; entries of wires are 0 to 3, and -1 marks an unused slot.",
    ),
    "logic_gates": (
        lambda: lutjax.logic_gates(X[:, :7], jnp.zeros((2, 16)), WIRES),
        "wires holds ids from 0 to 7",
    ),
    "packed_lut": (
        lambda: lutjax.packed_lut(jnp.zeros((7, 1), jnp.uint32), jnp.zeros((2, 4), bool), WIRES),
        "packed_lut: wires holds ids from 0 to 7; inputs of words are 0 to 6.",
    ),
}


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
    """Ids that an op makes of checked ones are new arrays in each call."""
    read = []
    monkeypatch.setattr(_checks, "_check_ids", lambda op, name, a, *_, **__: read.append((op, name)))
    anchors, images = jnp.asarray(ANCHORS % 4), jnp.zeros((3, 3, 2))
    confidence = lutjax.reads.Confidence(ways=1)
    for _ in range(2):
        lutjax.conv_lut(images, TABLES, anchors, kernel=2, groups=2)
        lutjax.conv_lut(images, TABLES, anchors, confidence.initial(), kernel=2, groups=2, read=confidence)
    assert read == [("conv_lut", "anchors")]


def test_a_check_is_an_explicit_transfer():
    anchors = jnp.asarray(ANCHORS)
    with jax.transfer_guard_device_to_host("disallow"):
        lutjax.lut(X, TABLES, anchors)


# ------------------------------------------------------------------------------------- layers
KEPT = {"anchors": "anchors", "targets": "targets", "wires": "wires"}
LAYERS = {
    case.layer: case
    for name, case in LAYER_CASES.items()
    if any(v.kind in KEPT for v in case.spec.variables())
}
"""A case of each layer with ids."""


def ids_of(case):
    """The name of the first variable of a layer that holds ids, and wild ones."""
    v = next(v for v in case.spec.variables() if v.kind in KEPT)
    return v.name, v.kind, jnp.full(v.shape, 1000, jnp.int32)


@pytest.mark.parametrize("layer", slow_among(LAYERS, "ProjectionLUT", "SpatialLUT", "LogicConv"))
def test_layers_refuse_ids_that_are_known(layer):
    """However they came there, in all three libraries; where they are traced, ops clamp them."""
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
    f = hk.transform_with_state(lambda x: getattr(haiku, layer)(*case.sizes, **case.options, name="layer")(x))

    state = {"layer": {n: a for k, arrays in wrong.items() if k != "params" for n, a in arrays.items()}}
    with pytest.raises(ValueError, match=rf"{layer}: {name} holds ids"):
        f.apply({"layer": kinds["params"]}, state, jax.random.key(0), x)


@pytest.mark.parametrize("layer", LAYERS)
def test_layers_without_their_ids(layer):
    """Restored without them, they raise an error and draw no others."""
    case = LAYERS[layer]
    name, _, _ = ids_of(case)
    x = jax.nn.sigmoid(inputs_of(case))
    kinds = by_kind(case, variables_of(case))
    message = rf"{layer}: there is no {name}: the layer was restored without it"
    ours = getattr(linen, case.layer)(*case.sizes, **case.options)
    rngs = {name: jax.random.key(0) for name in ("params", case.spec.stream)}
    with pytest.raises(ValueError, match=message):
        ours.apply({"params": kinds["params"]}, x, rngs=rngs, mutable=True)
    f = hk.transform_with_state(lambda x: getattr(haiku, layer)(*case.sizes, **case.options, name="layer")(x))
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
    """Two layers of a case whose ids differ, and an input."""
    one, other = nnx_layer(case), nnx_layer(case)
    name, _, _ = ids_of(case)
    setattr(other, name, getattr(one, name).get_value()[:, ::-1])
    return one, other, jax.nn.sigmoid(inputs_of(case))


@nnx.jit
def run(model, x):
    return model(x)


@pytest.mark.parametrize("taken", ["state", "pickle"])
@pytest.mark.parametrize("layer", LAYERS)
def test_trained_variables_of_other_ids(layer, taken):
    """They are refused in every call, also of a jitted function, until the ids follow; those of the same ids are taken."""
    one, other, x = other_ids(LAYERS[layer])
    state = nnx.state(one, nnx.Param)
    if taken == "pickle":
        state = pickle.loads(pickle.dumps(state))
    structure = nnx.split(other)[0]
    nnx.update(other, state)
    message = rf"^{layer}: \w+ is from the state of another layer, whose \w+ differ"
    for use in (lambda m: m(x), lambda m: run(m, x), lutjax_nnx.check, lambda m: nnx.clone(m)(x)):
        with pytest.raises(ValueError, match=message):
            use(other)
    same = nnx_layer(LAYERS[layer])
    nnx.update(same, state)
    same(x)
    nnx.update(other, nnx.state(one))
    assert nnx.split(other)[0] == structure
    run(other, x)
    other(x)


@pytest.mark.parametrize("layer", LAYERS)
def test_other_updates_of_trained_variables_are_taken(layer):
    """Steps of an optimizer and results of jitted functions have the ids of their model; of a restored array nothing is known."""
    one, other, x = other_ids(LAYERS[layer])
    nnx.update(other, jax.tree.map(lambda a: a + 0, nnx.state(one, nnx.Param)))
    run(other, x)
    nnx.update(other, nnx.to_pure_dict(nnx.state(one, nnx.Param)))
    run(other, x)
    copy = nnx.clone(one)
    nnx.update(copy, nnx.state(one, nnx.Param))
    run(copy, x)
    nnx.update(other, nnx.state(one, nnx.Param))  # all ids follow in a second update
    nnx.update(other, nnx.state(one, nnx.Not(nnx.Param)))
    run(other, x)


def test_an_automaton_of_other_wires():
    config = LogicCAConfig(channels=2, kernels=2, perception=(8, 2), update=(8, 2))
    one, other = (LogicCA(config, rngs=nnx.Rngs(seed)) for seed in range(2))
    state = jnp.zeros((1, 4, 4, 2))
    nnx.update(other, nnx.state(one, nnx.Param))
    with pytest.raises(
        ValueError, match=r"LogicCA: logits is from the state of another layer, whose wires\[0\]"
    ):
        other(state, 1)
    nnx.update(other, nnx.state(one))
    other(state, 1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["wires", "readers"])
def test_automata_refuse_ids_that_are_known(kind):
    """Their own wires and readers, as of layers; where they are traced, ops clamp them."""
    config = LogicCAConfig(channels=2, kernels=2, perception=(8, 2), update=(8, 2))
    made, state = LogicCA(config, rngs=nnx.Rngs(0)), jnp.zeros((1, 4, 4, 2))
    variable = getattr(made, kind)[0]
    good = variable.get_value()
    for wrong in (1000, -2):
        variable.set_value(jnp.full_like(good, wrong))
        for deterministic in (False, True):
            with pytest.raises(ValueError, match=rf"LogicCA: layer 0: {kind} .*ids from {wrong} to {wrong}"):
                made(state, deterministic=deterministic)
    nnx.eval_shape(lambda made, x: made(x), made, state)
    variable.set_value(good)
    assert made(state).shape == state.shape
    abstract = nnx.eval_shape(lambda: LogicCA(config, rngs=nnx.Rngs(0)))
    nnx.update(abstract, nnx.state(made, nnx.Param))
    with pytest.raises(
        ValueError, match=r"LogicCA: there is no wires\[0\]: the layer was restored without it"
    ):
        abstract(state)
