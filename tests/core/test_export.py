"""Exported functions whose batch is a symbolic dimension: one program for batches of any size."""

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from cases import ops, slow, slow_except
from every_layer import CASES as LAYERS
from layer_libraries import by_kind, function as of_library, inputs_of, variables_of

import lutjax
from lutjax import optim as tables, testing, wiring
from lutjax.cases import Draw, Tag
from lutjax.testing import _ahead_of_time, assert_close

# Sizes are annotated as ints, which symbolic ones are not: as a user calls the package.
pytestmark = pytest.mark.usefixtures("without_typechecking")

INPUTS = 6
ANCHORS = np.array([[[2, 4], [0, 3]], [[5, 1], [4, 2]], [[3, 0], [1, 5]]], np.int32)
WIRES = np.array([[0, 1], [2, 3], [4, 5], [0, 5]], np.int32)


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def attention(x, weights, positions, **options):
    return lutjax.lut_attention(x, weights, ANCHORS, positions, **options)


def pairs(x, weights, positions, **options):
    return lutjax.lut_pair_attention(x, weights, ANCHORS, positions, **options)


def cross_attention(x, weights):
    d = lutjax.detect(x, ANCHORS)
    segments = jnp.zeros(x.shape[:-1], jnp.int32)
    return lutjax.lookup_attention(
        weights, d, d, query_start=2, query_segments=segments, key_segments=segments
    )


def windows(x, weights, positions):
    """More than a tile of pairs."""
    return attention(x, weights, positions, window=17)


EDGES = wiring.from_edges(
    [0, 0, 0, 1, 2], [0, 0, 0, 2, 3], [1, 0, 4, 1, 6], n_detectors=3, n_rows=4, n_outputs=7
)
TABLE = (normal(0, 3, 4, 5),)
ATTENTION = (normal(0, 3, 32, 5), normal(1, 80, 1, 1))
FUNCTIONS = {  # of the inputs, of their shape without the batch, and what else is differentiated
    "lut": (lambda x, w: lutjax.lut(x, w, ANCHORS), (INPUTS,), TABLE),
    "sparse_lut": (
        lambda x, w: lutjax.sparse_lut(x, w, ANCHORS, jnp.arange(5, dtype=jnp.int32)[None, None], 7),
        (INPUTS,),
        TABLE,
    ),
    "sparse_lut of edges": (lambda x, w: lutjax.sparse_lut(x, w, ANCHORS, EDGES), (INPUTS,), (normal(0, 5),)),
    "attention": (attention, (7, INPUTS), ATTENTION),
    "attention in windows": (windows, (80, INPUTS), ATTENTION),
    "attention with starts": (cross_attention, (7, INPUTS), (normal(0, 3, 16, 5),)),
    "pairs": (pairs, (7, INPUTS), (normal(0, 3, 4, 5), ATTENTION[1])),
    "gates": (lambda x, w: lutjax.logic_gates(x, w, WIRES), (INPUTS,), (normal(0, 4, 16),)),
    "tables of bits": (lambda x, w: lutjax.soft_lut(x, w, WIRES), (INPUTS,), (normal(0, 4, 4),)),
    "tables of signs": (lambda x, w: lutjax.binary_lut(x, w, WIRES), (INPUTS,), (normal(0, 4, 4),)),
}


def exported(f, *arguments, shape):
    (batch,) = jax.export.symbolic_shape("batch")
    export = jax.export.export(jax.jit(f), disabled_checks=_ahead_of_time.KERNELS)
    whole = export(jax.ShapeDtypeStruct((batch, *shape), jnp.float32), *arguments)
    return jax.export.deserialize(whole.serialize()).call


@pytest.mark.parametrize("name", slow_except(FUNCTIONS, "attention", "gates"))
def test_batches_of_any_size(name):
    function, shape, trained = FUNCTIONS[name]

    def f(x, *trained):
        y, back = jax.vjp(function, x, *trained)
        return y, back(jnp.cos(y))

    call = exported(f, *trained, shape=shape)
    x = normal(5, 3, *shape)
    got, want = (jax.tree.leaves(g(x, *trained)) for g in (call, jax.jit(f)))
    for a, b in zip(got, want, strict=True):
        assert_close(name, a, b)
    assert call(x[:1], *trained)[0].shape == (1, *got[0].shape[1:])


@pytest.mark.parametrize("rule", [slow(tables.SGD()), tables.RowAdagrad()], ids=str)
def test_a_step_of_batches_of_any_size(rule):
    optimizer = tables.Optimizer(rule, 0.5, tables={"weights"})

    def step(x, weights):
        params = {"weights": weights}
        _, gradients = tables.value_and_grad(
            lambda p: jnp.sum(jnp.sin(lutjax.lut(x, p["weights"], ANCHORS)))
        )(params)
        clipped = tables.clip_by_global_norm(gradients, 0.5)
        return optimizer.apply(params, clipped, optimizer.init(params))[0]["weights"]

    call = exported(step, *TABLE, shape=(INPUTS,))
    x = normal(5, 3, INPUTS)
    assert_close("table", call(x, *TABLE), jax.jit(step)(x, *TABLE))


@pytest.mark.parametrize("rule", [tables.SGD(), tables.RowAdagrad()], ids=str)
@pytest.mark.slow
def test_a_step_of_a_weighted_lookup(rule):
    optimizer = tables.Optimizer(rule, 0.5, tables={"weights"})

    def step(coefficients, weights):
        index = jnp.arange(6, dtype=jnp.int32).reshape(3, 2) % 4
        params = {"weights": weights}
        _, gradients = tables.value_and_grad(
            lambda p: jnp.sum(
                jnp.sin(
                    lutjax.weighted_lookup(
                        p["weights"], jnp.broadcast_to(index, coefficients.shape), coefficients
                    )
                )
            )
        )(params)
        return optimizer.apply(params, gradients, optimizer.init(params))[0]["weights"]

    call = exported(step, *TABLE, shape=(3, 2))
    x = normal(5, 3, 3, 2)
    assert_close("table", call(x, *TABLE), jax.jit(step)(x, *TABLE))


# ------------------------------------------------------------------------------------- every op and layer
def with_batch(array, axis, n):
    """An array with another size of the batch: the samples it has again and again, or the type of a symbolic batch."""
    if isinstance(n, int):
        return jnp.take(array, jnp.arange(n) % array.shape[axis], axis=axis)
    return jax.ShapeDtypeStruct((*array.shape[:axis], n, *array.shape[axis + 1 :]), array.dtype)


def symbolic(f, of_batch):
    """Return an exported function; `of_batch` returns its arguments for a batch."""
    (batch,) = jax.export.symbolic_shape("batch")
    with lutjax.use_implementation("xla"):
        whole = jax.export.export(jax.jit(f))(*of_batch(batch))
    return jax.export.deserialize(whole.serialize()).call


def assert_same_for_batches(name, f, of_batch, sizes):
    call = symbolic(f, of_batch)
    for n in sizes:
        with lutjax.use_implementation("xla"):
            want = jax.jit(f)(*of_batch(n))
        found = jax.tree.leaves(call(*of_batch(n)))
        for (path, a), b in zip(jax.tree.leaves_with_path(want), found, strict=True):
            assert_close(f"{name}{jax.tree_util.keystr(path)}, batch {n}", b, a)


SHAPES = [
    (op, shape)
    for op in ops()
    for shape, size in testing.shapes(op).items()
    if not size.is_measured and size.get("batch", 1)
]


def of_case(case):
    """Return the op and its gradient as a function of arrays and cotangents, those of a batch, and the sizes of the batch."""
    arrays = {**case.differentiable, **case.fixed}
    arrays = {name: a for name, a in arrays.items() if isinstance(a, jax.Array)}
    axes = {name: case.axes[name].batch for name in arrays}
    size = max(arrays[name].shape[at] for name, at in axes.items() if at is not None)

    def outputs(given):
        found = case.call(lutjax.kernel_registry.function(case.op), {**case.fixed, **given})
        floats = {name: a for name, a in found.items() if jnp.issubdtype(a.dtype, jnp.floating)}
        return floats, found

    def f(differentiable, others, cotangents):
        if not cotangents:
            return outputs({**differentiable, **others})[1]
        _, back, found = jax.vjp(lambda d: outputs({**d, **others}), differentiable, has_aux=True)
        return found, back(cotangents)

    floats = jax.eval_shape(outputs, arrays)[0] if case.differentiable else {}
    draw = Draw(case.op, case.shape, np.dtype(np.float32), seed=1)
    cotangents = {name: draw.grid(a.shape, 4, a.dtype) for name, a in floats.items()}

    def of_batch(n):
        def own(a, at):
            return a if at is None or a.shape[at] != size else with_batch(a, at, n)

        every = {name: own(a, axes[name]) for name, a in arrays.items()}
        differentiable = {name: every.pop(name) for name in case.differentiable}
        return (
            differentiable,
            every,
            {name: own(a, case.output_axes[name].batch) for name, a in cotangents.items()},
        )

    return f, of_batch, (size, size + 2)


@pytest.mark.parametrize(
    ("op", "shape"), slow_except(SHAPES, "lookup-split", "weighted_lookup-split", "sparse_lookup-edges")
)
def test_every_op(op, shape):
    case = testing.case(op, shape)
    f, of_batch, sizes = of_case(case)
    assert_same_for_batches(str(case), f, of_batch, sizes)


@pytest.mark.parametrize("formulation", ["accelerator_formulation", "tpu_formulation"])
@pytest.mark.parametrize("op", [op if op in ("weighted_lookup", "lookup") else slow(op) for op in ops()])
def test_every_op_as_accelerators_get_it(op, formulation, request):
    request.getfixturevalue(formulation)
    shape = next(name for name, size in testing.shapes(op).items() if Tag.FAST in size.tags)
    f, of_batch, _ = of_case(testing.case(op, shape))
    symbolic(f, of_batch)


def of_layer(library, name, differentiated):
    """Return a layer of a library, and perhaps its gradients, as a function; its arguments of a batch, and sizes of the batch."""
    case = LAYERS[name]
    arrays = variables_of(case)
    params, x, rest = by_kind(case, arrays).get("params", {}), inputs_of(case), case.call
    axis = len(case.shape) - 1 if case.options.get("feature_axis") == 0 else 0

    def f(params, x, rest):
        def loss(params, x):
            y = of_library(library, case._replace(given=rest), arrays)(params, x)
            return jnp.sum(jnp.sin(y.astype(jnp.float32))), y

        return jax.grad(loss, (0, 1), has_aux=True)(params, x) if differentiated else loss(params, x)[1]

    def of_batch(n):
        tokens = {name: with_batch(jnp.asarray(a), axis, n) for name, a in rest.items()}
        return params, with_batch(x, axis, n), tokens

    return f, of_batch, (x.shape[axis], x.shape[axis] + 2)


FAST_LAYERS = ("ProductKeyMemory", "NgramMemory, gate alone", "LogicGates, top-k, soft")


@pytest.mark.parametrize(
    "name",
    [n if n in FAST_LAYERS else pytest.param(n, marks=pytest.mark.slow) for n in LAYERS],
)
def test_every_layer_is_traced(name):
    """Trace layers of Flax NNX with their gradients; quantized layers have none."""
    f, of_batch, _ = of_layer("nnx", name, differentiated="quantized" not in LAYERS[name].options)
    (batch,) = jax.export.symbolic_shape("batch")
    with lutjax.use_implementation("xla"):
        jax.jit(f).trace(*of_batch(batch))


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("library", ["nnx", "linen", "haiku"])
def test_every_layer(library, name):
    f, of_batch, sizes = of_layer(library, name, differentiated="quantized" not in LAYERS[name].options)
    assert_same_for_batches(f"{library} {name}", f, of_batch, sizes)


@pytest.mark.slow
@pytest.mark.parametrize("n", [3, 700])
def test_candidates_are_judged_by_the_same_samples(n):
    """Judge by all samples where they are fewer than candidates, and else by parts of at most 64 samples."""
    f, of_batch, _ = of_layer("nnx", "LogicGates, top-k, soft", differentiated=True)
    assert_same_for_batches("LogicGates", f, of_batch, (n,))
