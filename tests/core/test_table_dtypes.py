"""Layers with a `dtype` different from their tables: stored rows are read, and only their sums are rounded."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import worlds
from cases import slow_except
from every_layer import CASES
from flax import nnx
from layer_libraries import Case, by_kind, function, inputs_of, variables_of

import lutjax
from lutjax import optim as tables, reads
from lutjax.layers import nnx as lutjax_nnx
from lutjax.layers.nnx import quantize
from lutjax.optim import nnx as training
from lutjax.testing import assert_close

FEW = {
    "LUT": CASES["LUT, groups"],
    "SparseLUT": CASES["SparseLUT, targets of rows"],
    "LUTAttention": CASES["LUTAttention, targets"],
    "LUTPairAttention": CASES["LUTPairAttention, window"],
    "SpatialLUT": CASES["SpatialLUT"],
    "WindowLUT": CASES["WindowLUT, confidence"],
    "ConvLUT": CASES["ConvLUT, powers of two"],
    "ProjectionLUT": CASES["ProjectionLUT, alone"]._replace(
        options={**CASES["ProjectionLUT, alone"].options, "table_dropout": 0.0}
    ),
}
"""One case for each layer with summed table rows."""
INTEGERS = [
    "ProjectionLUT, integers", "WindowLUT, integers", "ConvLUT, integers", "SpatialLUT, integers",
]  # fmt: skip


def in_dtype(case: Case, dtype, **options) -> Case:
    return case._replace(options={**case.options, "dtype": jnp.dtype(dtype), **options})


def test_every_layer_with_tables_is_here():
    with_tables = {
        case.layer
        for case in CASES.values()
        if any(v.kind == "tables" for v in case.spec.variables())
    }
    memories = {
        "NgramMemory",
        "NgramEmbedding",
        "ProductKeyMemory",
        "ProductKeyExperts",
    }  # which sum no rows in their op
    assert with_tables == set(FEW) | memories


@pytest.mark.parametrize("name", ["LUT", "LUTAttention"])
def test_only_sums_are_rounded(name):
    case, dtype = FEW[name], jnp.dtype("bfloat16")
    arrays, x = variables_of(case), inputs_of(case).astype(dtype)
    if "positions" in arrays:  # small, and cast: their signs count
        arrays["positions"] = arrays["positions"].astype(dtype).astype(jnp.float32)
    y = jax.jit(in_dtype(case, dtype).spec)(arrays, x)
    exact = jax.jit(case.spec)(arrays, x.astype(jnp.float32))
    assert (y.dtype, exact.dtype) == (dtype, jnp.float32)
    np.testing.assert_array_equal(y, exact.astype(dtype))


@pytest.mark.parametrize("name", INTEGERS)
def test_integer_tables_return_the_dtype(name):
    case = in_dtype(CASES[name], "bfloat16")
    y = jax.eval_shape(case.spec, variables_of(case), inputs_of(case))
    assert y.dtype == jnp.bfloat16


@pytest.mark.parametrize(("library", "name", "dtype", "param_dtype"), [
    ("nnx", "LUT", "float32", "bfloat16"),
    ("nnx", "LUTAttention", "bfloat16", "float32"),
    ("linen", "LUT", "bfloat16", "float32"),
    ("haiku", "LUT", "bfloat16", "float32"),
])  # fmt: skip
def test_sparse_gradients(library, name, dtype, param_dtype):
    case = in_dtype(FEW[name], dtype, param_dtype=jnp.dtype(param_dtype))
    arrays = variables_of(case)
    call, params = function(library, case, arrays), by_kind(case, arrays)["params"]
    x = inputs_of(case)

    def loss(params):
        return jnp.sum(jnp.square(call(params, x).astype(jnp.float32)))

    @jax.jit
    def both(params):
        _, result = tables.value_and_grad(loss, tables={"weights"})(params)
        return (
            result["weights"].to_dense(),
            jax.grad(loss)(params)["weights"],
            result["weights"].cotangent,
        )

    sparse, dense, cotangent = both(params)
    assert sparse.dtype == dense.dtype == cotangent.dtype == jnp.dtype(param_dtype)
    # A sum of cotangents, each of which is rounded to the tables' dtype before or after it is added.
    rounding = max(float(jnp.finfo(param_dtype).eps), 1e-6)
    assert float(jnp.abs(dense).max()) > 0
    assert_close("gradient", sparse.astype(jnp.float32), dense.astype(jnp.float32), 4 * rounding)


SIZES = {"n_detectors": 4, "n_anchors": 12}
LARGE = {
    "LUT": (lambda **k: lutjax_nnx.LUT(8, 8, **SIZES, **k), (2, 8, 8)),
    "int8": (
        lambda **k: quantize(
            lutjax_nnx.WindowLUT((6, 6), 8, kernel=6, read=reads.PowersOfTwo(), **SIZES, **k)
        ),
        (2, 6, 6),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", slow_except(LARGE, "LUT"))
def test_no_copy_of_a_table(name):
    make, shape = LARGE[name]
    layer = make(dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    graph, state = nnx.split(layer)
    n_bytes = layer.weights.get_value().nbytes

    def forward(state, x):
        return nnx.merge(graph, state)(x)

    def backward(state, x):
        def loss(layer):
            return jnp.sum(jnp.square(layer(x).astype(jnp.float32)))

        return training.value_and_grad(loss)(nnx.merge(graph, state))

    with lutjax.use_implementation("xla"):
        for function_ in (forward,) if name == "int8" else (forward, backward):
            lowered = jax.jit(function_).lower(state, jnp.zeros(shape))
            assert lowered.compile().memory_analysis().temp_size_in_bytes < n_bytes // 4


KERNELS = {
    "lookup_attention": FEW["LUTAttention"],
    "lut_pair_attention": FEW["LUTPairAttention"],
    "lut_at_places": CASES["ConvLUT"],
    "scored_lut": FEW["ProjectionLUT"],
    "sparse_lookup": FEW["SparseLUT"],
}
"""A layer case for each op with kernels receiving inputs and tables."""


@pytest.mark.parametrize(("world", "op"), worlds.in_worlds(KERNELS, ()))
def test_kernels_take_inputs_and_tables_of_two_dtypes(world, op, request):
    case = in_dtype(KERNELS[op], "bfloat16")
    arrays, x = variables_of(case), inputs_of(case)
    trained = {name: a for name, a in arrays.items() if name in ("weights", "positions")}

    def run(implementation):
        spec = dataclasses.replace(case.spec, implementation=implementation)

        @jax.jit
        def both(trained, x):
            y, pull = jax.vjp(lambda trained, x: spec({**arrays, **trained}, x), trained, x)
            return y, pull(jnp.ones_like(y))

        return jax.tree.map(lambda a: a.astype(jnp.float32), both(trained, x))

    wanted = run("xla")
    with worlds.of(world, request) as implementation:
        actual = run((implementation, "xla"))
    for (path, a), b in zip(
        jax.tree.leaves_with_path(actual), jax.tree.leaves(wanted), strict=True
    ):
        assert_close(f"{op}, {world}: {jax.tree_util.keystr(path)}", a, b, 2**-7)
