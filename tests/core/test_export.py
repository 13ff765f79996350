"""Exported functions with a symbolic batch dimension: one program for all batch sizes."""

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from cases import ops, slow_except
from every_layer import CASES as LAYERS
from layer_libraries import by_kind, function as of_library, inputs_of, variables_of

import lutjax
from lutjax import optim as tables, testing
from lutjax.cases import Draw, Tag
from lutjax.testing import _ahead_of_time, assert_close

# Sizes are annotated as ints, which symbolic ones are not: as a user calls the package.
pytestmark = pytest.mark.usefixtures("without_typechecking")

INPUTS = 6
ANCHORS = np.array([[[2, 4], [0, 3]], [[5, 1], [4, 2]], [[3, 0], [1, 5]]], np.int32)


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


TABLE = (normal(0, 3, 4, 5),)


def exported(f, *arguments, shape):
    (batch,) = jax.export.symbolic_shape("batch")
    export = jax.export.export(jax.jit(f), disabled_checks=_ahead_of_time.KERNELS)
    whole = export(jax.ShapeDtypeStruct((batch, *shape), jnp.float32), *arguments)
    return jax.export.deserialize(whole.serialize()).call


@pytest.mark.parametrize("rule", [tables.RowAdagrad()], ids=str)
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


# ------------------------------------------------------------------------------------- every op and layer
def with_batch(array, axis, n):
    """An array with another batch size: its samples repeated, or a symbolic batch type."""
    if isinstance(n, int):
        return jnp.take(array, jnp.arange(n) % array.shape[axis], axis=axis)
    return jax.ShapeDtypeStruct((*array.shape[:axis], n, *array.shape[axis + 1 :]), array.dtype)


def symbolic(f, of_batch):
    (batch,) = jax.export.symbolic_shape("batch")
    with lutjax.use_implementation("xla"):
        whole = jax.export.export(jax.jit(f))(*of_batch(batch))
    return jax.export.deserialize(whole.serialize()).call


def assert_same_for_batches(name, f, of_batch, sizes):
    call = symbolic(f, of_batch)
    for n in sizes:
        with lutjax.use_implementation("xla"):
            want = jax.jit(f)(*of_batch(n))
        actual = jax.tree.leaves(call(*of_batch(n)))
        for (path, a), b in zip(jax.tree.leaves_with_path(want), actual, strict=True):
            assert_close(f"{name}{jax.tree_util.keystr(path)}, batch {n}", b, a)


SHAPES = [
    (op, shape)
    for op in ops()
    for shape, size in testing.shapes(op).items()
    if not size.is_measured and size.get("batch", 1)
]


def of_case(case):
    """Return the op and its gradient as a function of arrays and cotangents, the batched arguments, and the batch sizes."""
    arrays = {**case.differentiable, **case.fixed}
    arrays = {name: a for name, a in arrays.items() if isinstance(a, jax.Array)}
    axes = {name: case.axes[name].batch for name in arrays}
    size = max(arrays[name].shape[at] for name, at in axes.items() if at is not None)

    def outputs(given):
        result = case.call(lutjax.kernel_registry.function(case.op), {**case.fixed, **given})
        floats = {name: a for name, a in result.items() if jnp.issubdtype(a.dtype, jnp.floating)}
        return floats, result

    def f(differentiable, others, cotangents):
        if not cotangents:
            return outputs({**differentiable, **others})[1]
        _, back, result = jax.vjp(lambda d: outputs({**d, **others}), differentiable, has_aux=True)
        return result, back(cotangents)

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


@pytest.mark.parametrize(("op", "shape"), slow_except(SHAPES, "sparse_lookup-edges"))
def test_every_op(op, shape):
    case = testing.case(op, shape)
    f, of_batch, sizes = of_case(case)
    assert_same_for_batches(str(case), f, of_batch, sizes)


@pytest.mark.parametrize("formulation", ["accelerator_formulation", "tpu_formulation"])
@pytest.mark.parametrize("op", ["lookup", "weighted_lookup"])
def test_every_op_as_accelerators_get_it(op, formulation, request):
    request.getfixturevalue(formulation)
    shape = next(name for name, size in testing.shapes(op).items() if Tag.FAST in size.tags)
    f, of_batch, _ = of_case(testing.case(op, shape))
    symbolic(f, of_batch)


def of_layer(library, name, differentiated):
    case = LAYERS[name]
    arrays = variables_of(case)
    params, x, rest = by_kind(case, arrays).get("params", {}), inputs_of(case), case.call
    axis = len(case.shape) - 1 if case.options.get("feature_axis") == 0 else 0

    def f(params, x, rest):
        def loss(params, x):
            y = of_library(library, case._replace(given=rest), arrays)(params, x)
            return jnp.sum(jnp.sin(y.astype(jnp.float32))), y

        return (
            jax.grad(loss, (0, 1), has_aux=True)(params, x)
            if differentiated
            else loss(params, x)[1]
        )

    def of_batch(n):
        tokens = {name: with_batch(jnp.asarray(a), axis, n) for name, a in rest.items()}
        return params, with_batch(x, axis, n), tokens

    return f, of_batch, (x.shape[axis], x.shape[axis] + 2)


FAST_LAYERS = ("NgramMemory, gate alone",)


@pytest.mark.parametrize(
    ("library", "name"),
    slow_except(
        [(library, name) for library in ("nnx", "linen", "haiku") for name in LAYERS],
        *(f"nnx-{name}" for name in FAST_LAYERS),
    ),
)
def test_every_layer(library, name):
    f, of_batch, sizes = of_layer(
        library, name, differentiated="quantized" not in LAYERS[name].options
    )
    assert_same_for_batches(f"{library} {name}", f, of_batch, sizes)
