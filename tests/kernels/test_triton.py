"""Triton kernels without a GPU, run by Triton's interpreter, and kernel selection."""

import functools
import importlib
import itertools
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import (
    RATES,
    case_of,
    detections,
    fast_size,
    rates_of,
    slow_except,
    slow_where,
    typed_size,
)

import lutjax
from lutjax import optim as tables, reads, testing, tuning
from lutjax.dispatch import _transforms
from lutjax.dispatch.registry import Backend, Device, Request
from lutjax.kernels import _triton
from lutjax.layers import nnx as layers
from lutjax.ops.gate_network import gate_network
from lutjax.ops.lookup import Lookup
from lutjax.tables import host
from lutjax.testing import _ahead_of_time

triton_compiler = pytest.importorskip(
    "triton_compiler", reason="triton or jax-triton is not installed"
)
import triton_interpreter  # noqa: E402
from triton_compiler import GPUS, OPS, SUMMED, UPDATED  # noqa: E402

from lutjax.kernels._triton import _owned_columns, _weighted_rows, detect, sparse_lookup  # noqa: E402
from lutjax.kernels._xla import _row_gathers  # noqa: E402

CPU, H200 = Device(Backend.CPU, "cpu"), Device(Backend.GPU, GPUS[90])
array = jax.ShapeDtypeStruct
interpreted = pytest.mark.usefixtures("triton_interpreted")


# ------------------------------------------------------------------------------------- values
def is_slow(op, shape, dtype, transformation):
    if transformation != "jit":
        fast_op = op in ("lookup", "bilinear_gates")
        return not fast_op or transformation not in ("vmap of grad", "shard_map, sharded table")
    if dtype is not None:
        return dtype != "bfloat16" or op not in ("lookup", "sparse_lookup", "bilinear_gates")
    return shape != "split" and (op, shape) not in (
        ("lookup", "empty_batch"),
        ("sparse_lookup", "one_list"),
    )


@pytest.mark.parametrize(
    ("op", "shape", "dtype", "transformation"),
    slow_where(
        [
            *((op, shape, None, "jit") for op in OPS for shape in testing.shapes(op, "triton")),
            *((op, typed_size(op), t, "jit") for op in OPS for t in ("bfloat16", "float16", "float64")),
            # What the interpreter runs cannot be exported.
            *((op, fast_size(op), None, t) for op in OPS for t in testing.TRANSFORMATIONS if t not in ("jit", "export")),
        ],
        is_slow,
    ),
)  # fmt: skip
@interpreted
def test_values(op, shape, dtype, transformation):
    with jax.enable_x64(dtype == "float64"):
        case = testing.case(op, shape, dtype) if dtype else case_of(op, shape)
        testing.check(case, "triton", transformation=transformation)


@pytest.mark.parametrize(
    ("op", "dtype"),
    slow_where(
        [(op, dtype) for op in SUMMED for dtype in ("float32", "bfloat16", "float64")],
        lambda op, dtype: op not in ("lookup", "sparse_lookup") or dtype != "float32",
    ),
)
@interpreted
def test_fixed_point(op, dtype):
    tolerance = max(2.0**-10, 1.01 * testing.TOLERANCE[dtype])
    options = {
        "accumulate": lutjax.FixedPoint(2.0**20),
        "tolerance": tolerance,
        "transformation": "jit",
    }
    with jax.enable_x64(dtype == "float64"):
        testing.check(testing.case(op, typed_size(op), dtype), "triton", **options)


@pytest.mark.parametrize(
    ("op", "shape", "dtype", "weight_decay", "rates"),
    slow_where(
        [
            *((op, shape, None, 0.0, None) for op in UPDATED for shape in testing.shapes(op, "triton")),
            *((op, "split", t, 0.0, None) for op in UPDATED for t in ("bfloat16", "float16", "float64")),
            *((op, "split", None, 0.5, None) for op in UPDATED),
            *(
                (op, "split", None, 0.5, kind)
                for op in UPDATED
                for kind in (RATES if op == "lookup" else ("table", "edge"))
            ),
        ],
        lambda op, shape, dtype, _, rates: (
            op != "lookup" or (shape, dtype, rates) not in (("primes", None, None), ("split", "bfloat16", None), ("split", None, "edge"))
        ),
    ),
)  # fmt: skip
@interpreted
def test_updates(op, shape, dtype, weight_decay, rates):
    with jax.enable_x64(dtype == "float64"):
        case = testing.case(op, shape, dtype)
        options = {} if rates is None else {"rates": rates_of(case, rates)}
        testing.check_update(case, "triton", tables.SGD(weight_decay=weight_decay), **options)


COUNTED = {"batch": 1, "queries": 6, "detectors": 2}


@pytest.mark.parametrize(("how", "shape", "sizes", "dtype"), slow_except([
    ("count_always", "ties", COUNTED, "float32"),
    *(("count_always", shape, {}, "float32") for shape in testing.shapes("lookup_attention",
        "triton") if not shape.startswith("tiles")),
    ("count_always", "tiles", {"batch": 1, "queries": 40, "detectors": 1}, "float32"),
    *(("count_always", "ties", {}, dtype) for dtype in ("bfloat16", "float64")),
    ("own_always", "primes", {}, "float32"),
    *(("own_always", shape, {}, "float32") for shape in ("sum_groups", "powers", "powers_one_way")),
    *(("own_always", shape, {}, "bfloat16") for shape in ("hard", "groups")),
    ("own_always", "shared_input", {}, "float16"),
], f"count_always-ties-{COUNTED}-float32", "own_always-primes-{}-float32", ids=str), ids=str)  # fmt: skip
@interpreted
def test_values_of_other_formulations(monkeypatch, how, shape, sizes, dtype):
    """Row-counting attention, and scored tables with sums by column owners, at any size."""
    if how == "count_always":
        triton_interpreter.count_always(monkeypatch, small_blocks=True)
    else:
        triton_interpreter.own_always(monkeypatch)
    op = "lookup_attention" if how == "count_always" else "scored_lut"
    with jax.enable_x64(dtype == "float64"):
        testing.check(testing.case(op, shape, dtype, **sizes), "triton", transformation="jit")


# ------------------------------------------------------------------------------------- arguments outside of cases
@pytest.mark.parametrize(("compared", "epsilon"), [(True, 0.375), (False, 0.0)])
@interpreted
def test_detect_of_any_input(monkeypatch, compared, epsilon):
    """NaN, infinities, both zeros and out-of-range ids; comparison-based and atomic cotangents."""
    monkeypatch.setattr(detect, "_COMPARED", 2**14 if compared else 0)
    rng = np.random.default_rng(0)
    values = np.array([0.0, -0.0, 0.25, -0.25, 0.5, 3.0, np.inf, -np.inf, np.nan])
    x = jnp.asarray(rng.choice(values, (37, 6)), jnp.float32)
    anchors = jnp.asarray(rng.integers(-3, 9, (5, 4, 2)), jnp.int32)
    actual, expected = (
        lutjax.detect(x, anchors, epsilon=epsilon, implementation=i) for i in ("triton", "xla")
    )
    for name in ("index", "flip", "margin"):
        testing.assert_close(name, getattr(actual, name), getattr(expected, name))

    def margins(implementation, x):
        return lutjax.detect(x, anchors, implementation=implementation).margin

    triton_interpreter.check_plain_jax(margins, x)


@pytest.mark.parametrize("compared", [True, False])
@interpreted
def test_sparse_lookup_of_any_ids(monkeypatch, compared):
    monkeypatch.setattr(sparse_lookup, "_COMPARED", 2**13 if compared else 0)
    rng = np.random.default_rng(0)
    weights = jnp.asarray(rng.integers(-4, 5, (3, 4, 5)) / 4, jnp.float32)
    margin = jnp.asarray(rng.integers(-4, 5, (37, 3)) / 4, jnp.float32)
    index, flip = (jnp.asarray(rng.integers(-3, 9, margin.shape), jnp.int32) for _ in range(2))
    targets = jnp.asarray(rng.integers(-3, 9, (1, 4, 5)), jnp.int32)

    def look_up(implementation, weights, margin):
        d = lutjax.Detection(index, flip, margin, 2)
        return lutjax.sparse_lookup(weights, d, targets, 6, implementation=implementation)

    triton_interpreter.check_plain_jax(look_up, weights, margin)


def ways_of_rows(dtype, coefficient_dtype):
    """Return tables in 2 groups, two weighted rows per table, and cotangents: some coefficients are 0, with infinite rows."""
    rng = np.random.default_rng(0)
    weights, dy = (
        jnp.asarray(rng.integers(-8, 9, shape), dtype) for shape in ((6, 5, 7), (13, 14))
    )
    if jnp.issubdtype(dtype, jnp.floating):
        weights = weights.at[:, -1].set(jnp.inf)
    ways = []
    for _ in range(2):
        index = rng.integers(-3, 9, (6, 13))
        coefficients = np.where(index >= 4, 0, rng.integers(-2, 3, index.shape))
        ways.append((jnp.asarray(index, jnp.int32), jnp.asarray(coefficients, coefficient_dtype)))
    return weights, ways, dy


@interpreted
def test_rows_of_integers():
    weights, ways, _ = ways_of_rows(jnp.int8, jnp.int32)
    actual, expected = (
        rows.sum_ways(weights, ways, CPU, None, 2) for rows in (_weighted_rows, _row_gathers)
    )
    assert actual.dtype == expected.dtype == jnp.int32
    np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize(
    "read",
    slow_except(
        [reads.Confidence(), reads.Hard(), reads.Confidence(1), reads.Blend(), reads.SoftSign(), reads.PowersOfTwo(),
         reads.PowersOfTwo(1)],
        "Confidence(ways=2)", ids=str,
    ),
    ids=str,
)  # fmt: skip
@interpreted
def test_scored_reads_of_any_input(read):
    """Zeros, ties, out-of-range ids, NaN and infinities; unread rows are infinite."""
    run, (x, weights, scalars) = triton_interpreter.scored_call(read)
    launch = tuning.Launch(
        rows=16, outputs=16, warps=1
    )  # all tables of a group, 11 outputs in two tiles
    with tuning.use(dict.fromkeys(("scored_lut.forward", "scored_lut.backward"), launch)):
        triton_interpreter.check_plain_jax(run, x, weights, scalars)
        x = x.at[3, 0, 2].set(jnp.nan).at[5, 1, 4].set(jnp.inf).at[7].set(0)
        if not read.rounds_tables:
            # All margins of sample 7 are 0: of scores nothing is read.
            weights = weights.at[:, 0, 0].set(jnp.inf)
        actual, expected = (
            run(implementation, x, weights, scalars) for implementation in ("triton", "xla")
        )
        testing.assert_close("y", actual, expected)


@pytest.mark.parametrize("needed", slow_except(["x", "weights", "keep", "scalars"], "weights"))
@interpreted
def test_one_cotangent_of_scored_reads(needed):
    run, (x, weights, scalars) = triton_interpreter.scored_call(reads.Confidence(), jnp.bfloat16)
    arrays = {
        "x": x,
        "weights": weights,
        "scalars": scalars,
        "keep": jnp.ones((13, 6)).at[::2].set(0),
    }
    triton_interpreter.check_plain_jax(
        lambda implementation, a: run(implementation, **{**arrays, needed: a}), arrays[needed]
    )


@pytest.mark.parametrize(
    ("ways", "dtype", "n", "groups", "each", "n_rows", "n_outputs"),
    slow_where(
        [(2, "float32", 83, 1, 3, 4, 20), (1, "bfloat16", 99, 2, 2, 2, 16), (2, "bfloat16", 99, 2, 1, 256, 5),
         (1, "float32", 16, 1, 4, 8, 33), (2, "float32", 5, 2, 2, 2, 16)],
        lambda ways, dtype, n, *sizes: n < 83 or 256 in sizes,
    ),
)  # fmt: skip
@interpreted
def test_sums_of_owners(ways, dtype, n, groups, each, n_rows, n_outputs):
    """Samples for all rows, odd sizes, colliding rows; skipped and non-finite terms end up in the right place."""
    rng = np.random.default_rng(n)
    n_tables = groups * each
    first = rng.integers(0, n_rows, (n_tables, n))
    row = np.stack([first, first ^ (1 << rng.integers(0, n_rows.bit_length() - 1, first.shape))])[
        :ways
    ]
    factors = rng.normal(size=(ways, n_tables, n)).astype(np.float32)
    factors[rng.random(factors.shape) < 0.3] = 0
    dy = np.array(jnp.asarray(rng.normal(size=(n, groups, n_outputs)), dtype).astype(jnp.float32))
    if n > 16:
        factors[:, :, 7], dy[7] = 0, np.inf  # adds nothing
        factors[0, 0, 8], factors[-1, -1, 9] = np.nan, np.inf
    expected = np.zeros((n_tables, n_rows, n_outputs))
    with np.errstate(all="ignore"):
        for k, t, b in np.argwhere(factors != 0):
            expected[t, row[k, t, b]] += factors[k, t, b] * dy[b, t // each].astype(np.float64)
    places = jnp.asarray(_owned_columns.pack_offsets.fn(row[0], row[-1]), jnp.int32)
    actual = _owned_columns.sums(
        places, jnp.asarray(factors), jnp.asarray(dy, dtype), expected.shape, groups, H200
    )
    testing.assert_close("sums", actual, expected.astype(np.float32))


@pytest.mark.parametrize(
    ("with_readers", "nested"),
    slow_where(
        itertools.product([True, False], repeat=2),
        lambda with_readers, nested: nested or not with_readers,
    ),
)
@interpreted
def test_networks_side_by_side(with_readers, nested):
    """Networks vmapped with all their arguments run in one launch and match separate networks."""
    sizes, n_inputs, n_calls = (6, 4, 3), 5, 4 if nested else 2
    random = np.random.default_rng(0)
    wired = list(zip((n_inputs, *sizes[:-1]), sizes, strict=True))
    wires = [random.integers(0, before, (n_calls, n, 2)) for before, n in wired]
    readers = [
        jnp.stack([lutjax.readers(jnp.asarray(w), before, fan_out=2 * n) for w in of_layer])
        for of_layer, (before, n) in zip(wires, wired, strict=True)
    ]
    x = jnp.asarray(random.integers(0, 9, (n_calls, n_inputs, 7)) / 8, jnp.float32)
    coefficients = jnp.asarray(random.integers(-2, 3, (4, sum(sizes))) / 2, jnp.float32)  # of all
    dy = jnp.asarray(random.integers(-4, 5, (n_calls, sizes[-1], 7)) / 4, jnp.float32)

    def both(x, coefficients, wires, readers, dy):
        def run(x, coefficients):
            lists = readers if with_readers else None
            options = {"sizes": sizes, "feature_axis": 0, "implementation": "triton"}
            return gate_network(x, coefficients, wires, readers=lists, **options)

        y, pull = jax.vjp(run, x, coefficients)
        return y, *pull(dy)

    own = (x, jnp.asarray(np.concatenate(wires, 1)), readers, dy)
    ones = (jax.tree.map(lambda a, i=i: a[i], own) for i in range(n_calls))
    expected = [both(x, coefficients, *others) for x, *others in ones]
    mapped, axes = both, (0, None, 0, 0, 0)
    if nested:
        own = jax.tree.map(lambda a: a.reshape(2, n_calls // 2, *a.shape[1:]), own)
        mapped = jax.vmap(both, axes)
    mapped = jax.vmap(mapped, axes)
    assert "scan" not in str(jax.make_jaxpr(mapped)(own[0], coefficients, *own[1:]))
    found = mapped(own[0], coefficients, *own[1:])
    for actual, *ones in zip(found, *expected, strict=True):
        np.testing.assert_array_equal(actual.reshape(n_calls, *ones[0].shape), np.stack(ones))


@pytest.mark.parametrize("op", ["bilinear_gates", "binary_lut"])
@interpreted
def test_gates_of_any_ids(op):
    """Out-of-range wires and readers, fan-out lists with spare capacity, NaN, both zeros."""
    rng = np.random.default_rng(0)
    x = rng.integers(-8, 9, (5, 21)) / 4
    x[0, :3] = [0.0, -0.0, np.nan] if op == "binary_lut" else 0.0
    x = jnp.asarray(x, jnp.float32)
    shape = (4, 6) if op == "bilinear_gates" else (6, 4)
    parameter = jnp.asarray(rng.integers(-8, 9, shape) / 4, jnp.float32)
    wires = jnp.asarray(rng.integers(-3, 9, (6, 2)), jnp.int32)
    readers = jnp.asarray(np.random.default_rng(1).integers(-9, 20, (5, 7)), jnp.int32)

    def gates(implementation, x, parameter, readers=None):
        options = {"feature_axis": 0, "readers": readers, "implementation": implementation}
        return getattr(lutjax, op)(x, parameter, wires, **options)

    triton_interpreter.check_plain_jax(gates, x, parameter)
    triton_interpreter.check_plain_jax(lambda i, x: gates(i, x, parameter, readers), x)


# ------------------------------------------------------------------------------------- compilation
@pytest.mark.parametrize(
    ("op", "capability"),
    slow_where(
        [(op, capability) for op in OPS for capability in GPUS],
        lambda op, capability: (op, capability) != ("lookup", 90),
    ),
)
def test_compiles(op, capability, launches):
    triton_compiler.trace(testing.case(op, triton_compiler.compiled_size(op)), GPUS[capability])
    triton_compiler.check_compilation(launches, capability)


def test_products_of_both_ways_leave_their_loop(launches):
    """Triton drops a loop variable if its final value equals another variable's initial value; Python does not."""
    triton_compiler.trace(testing.case("scored_lut", "split"))
    ((_, types),) = [key for key in launches if key[0].fn.__name__ == "_differentiate"]
    (common,) = [
        common for (kernel, _), common in launches.items() if kernel.fn.__name__ == "_differentiate"
    ]
    ir = triton_compiler.compiled(common, types).asm["ttir"]
    (carried,) = re.findall(r"scf.for %way = .* iter_args\(([^)]*)\)", ir)
    assert {"%main", "%other"} <= set(re.findall(r"%[a-z]+", carried))


@pytest.fixture
def jax_triton(monkeypatch, kernel_cache):
    """The actual package, with a stub for jaxlib's CUDA-only compiled-kernel interface."""
    if why_not := _triton.unfit_packages():
        try:
            importlib.import_module("jax_triton")
        except ImportError:
            pytest.skip(f"jax-triton cannot be imported here: {why_not}")
        compiled_kernel = SimpleNamespace(to_proto=lambda *_: b"a kernel")
        library = importlib.import_module("jaxlib.gpu_triton")
        for name in (
            "TritonKernel",
            "TritonKernelCall",
            "create_array_parameter",
            "create_scalar_parameter",
        ):
            monkeypatch.setattr(library, name, lambda *_: compiled_kernel, raising=False)
        monkeypatch.setattr(_triton, "unfit_packages", lambda: None)
        monkeypatch.setattr(lutjax.kernel_registry, "_resolved", {})
        _transforms.forget()


@pytest.mark.parametrize("op", slow_except(OPS, "lookup", "lookup_attention", "binary_lut"))
@pytest.mark.usefixtures("jax_triton")
def test_lowers_through_jax_triton(op):
    """Lower with the actual package, and include its kernels in the lowered module."""
    case = testing.case(op, fast_size(op))
    testing.check_lowering(case, "triton", platform="cuda", device_kind=H200.kind)


@pytest.mark.usefixtures("jax_triton")
def test_updates_lower_in_place():
    d, weights = detections(16, 4, bits=2), array((4, 4, 8), jnp.float32)

    def step(weights, d):
        def loss(params):
            return jnp.sum(lutjax.lookup(params["weights"], d, implementation="triton"))

        _, gradients = tables.value_and_grad(loss)({"weights": weights})
        return lutjax.update_table(weights, gradients["weights"], 0.5, implementation="triton")[0]

    lowered = _ahead_of_time.lower(step, weights, d, platform="cuda", device_kind=H200.kind)
    module = lowered.mlir_module()
    (call,) = (line for line in module.splitlines() if "output_operand_aliases = [#" in line)
    # The target that CUDA graphs record, whatever version of jax-triton.
    operands = re.search(r"@triton_kernel_call_ffi\(([^)]*)\)", call).group(1).split(", ")
    table = re.search(r"output_tuple_indices = \[0\], operand_index = (\d+)", call).group(1)
    # The launch puts barriers, which copy nothing, around what changes in place.
    barriers = re.findall(r"(%\d+) = stablehlo\.optimization_barrier (%\w+) ", module)
    operand = operands[int(table)]
    assert dict(barriers).get(operand, operand) == "%arg0"


@pytest.mark.parametrize("op", ["lookup", "bilinear_gates"])
@pytest.mark.usefixtures("launches")
def test_several_backends_in_one_process(op, monkeypatch):
    """Trace GPU and CPU kernels on a machine with both: shapes and dtypes agree."""
    monkeypatch.setattr("lutjax.dispatch.registry._default_devices", lambda: (H200, CPU))
    of_op = testing.program(testing.case(op, typed_size(op), "bfloat16"), ("triton", "xla"))
    traced = jax.jit(of_op.function).trace(*of_op.shapes())
    assert "platform_index" in str(traced.jaxpr)
    assert traced.out_info == jax.eval_shape(of_op.expected, *of_op.shapes())


def test_layers_over_images_detect_and_look_up_in_one_kernel(launches):
    options = {
        "kernel": 3,
        "padding": 1,
        "stride": 2,
        "groups": 2,
        "n_detectors": 8,
        "n_anchors": 3,
    }
    triton_compiler.trace_layer(
        lambda rngs: layers.ConvLUT((6, 6, 4), 6, **options, rngs=rngs),
        array((512, 6, 6, 4), jnp.float32),
    )
    result = {kernel.fn.__name__ for kernel, _ in launches}
    assert result == {"_sum_rows", "_multiply_and_add_rows", "_sort", "_collect"}


# ------------------------------------------------------------------------------------- which calls
def on_gpu(function, *arguments):
    """Trace a function for an H200."""
    with _ahead_of_time.use_target("cuda", H200.kind):
        return jax.eval_shape(function, *arguments)


def wide_look_up(implementation=None):
    weights = array((4, 4, 1024), jnp.float32)
    return (
        functools.partial(lutjax.lookup, implementation=implementation),
        weights,
        detections(4096, 4, bits=2),
    )


@pytest.mark.usefixtures("launches")
def test_a_launch_that_does_not_fit_shared_memory():
    message = (
        r"a tile of 512 rows and 512 outputs takes 1048576 bytes; the shared memory of NVIDIA H200"
    )
    launch = {"lookup.forward": tuning.Launch(rows=512, outputs=512)}
    with tuning.use(launch), pytest.raises(ValueError, match=message):
        on_gpu(*wide_look_up("triton"))
    assert on_gpu(*wide_look_up("triton")).shape == (
        4096,
        1024,
    )  # the launch was that of one block of calls


def test_why_not_triton(monkeypatch):
    look_up, weights, d = wide_look_up("triton")
    registry = lutjax.kernel_registry

    def refused(why, call, *arguments, **options):
        monkeypatch.setattr(registry, "_resolved", {})  # what was chosen with other packages
        with pytest.raises(lutjax.NoImplementationError, match=why):
            call(*arguments, **options)

    refused(r"runs on gpu, the call runs on cpu", jax.eval_shape, look_up, weights, d)
    old = "needs jax-triton 0.3.1 or newer, found 0.2.0"
    monkeypatch.setattr(_triton, "unfit_packages", lambda: old)
    refused(re.escape(old), on_gpu, look_up, weights, d)
    assert on_gpu(functools.partial(look_up, implementation=None), weights, d).shape == (4096, 1024)
    monkeypatch.setattr(_triton, "unfit_packages", lambda: None)
    for kind, reason in (
        ("NVIDIA Something", "whose compute capability is known, not NVIDIA Something"),
        ("AMD Instinct MI300X", "needs an NVIDIA GPU"),
    ):
        of = {"device": Device(Backend.GPU, kind), "implementation": "triton"}
        refused(reason, registry.resolve, "lookup", weights, d, **of)
    d = jax.tree.map(lambda a: array(a.shape, a.dtype if a.dtype != "int32" else "int16"), d)
    request = Request(
        "forward", Lookup.from_arrays((weights, d), {"groups": 1, "accumulate": None}.items()), H200
    )
    refused("has no kernel for int16", registry.resolve_request, request, ("triton",))


def gates_call(n_inputs, n_gates, dtype="float32"):
    return (
        array((128, n_inputs), dtype),
        array((4, n_gates), "float32"),
        array((n_gates, 2), "int32"),
    )


def read_call(batch, n_outputs=1024, ways=None):
    weights = array((4, 4, n_outputs), "float32")
    if ways is None:
        return weights, detections(batch, 4, bits=2)
    return weights, *(array((batch, 4, ways), dtype) for dtype in ("int32", "float32"))


@pytest.mark.parametrize(
    ("op", "call", "options", "platform"),
    [
        # Few gates of float32 values are left to plain JAX.
        ("bilinear_gates", gates_call(800, 8000), {}, "xla"),
        ("bilinear_gates", gates_call(800, 80_000), {}, "triton"),
        ("bilinear_gates", gates_call(800, 8000, "bfloat16"), {}, "triton"),
        # So are small updates, whose numbers are counted in ways and groups: 2**24 of 2048 samples of one way with a value.
        ("lookup", read_call(4096), {}, "xla"),
        ("lookup", read_call(4097), {}, "triton"),
        ("lookup", read_call(4096), {"implementation": "triton"}, "triton"),
        ("lookup", read_call(4097), {"rule": tables.RowAdagrad()}, "xla"),
        *(
            ("weighted_lookup", read_call(batch, 2048, 2), {"groups": groups, **valued}, platform)
            for groups in (1, 2)
            for valued, most in (({"valued": 1}, 2048), ({}, 1024))
            for batch, platform in ((most, "xla"), (most + 1, "triton"))
        ),
    ],
)
@pytest.mark.usefixtures("launches")
def test_small_calls_are_left_to_plain_jax(op, call, options, platform):
    if op != "bilinear_gates":
        options = {"direction": "update", **options}
    assert lutjax.kernel_registry.resolve(op, *call, device=H200, **options).platform == platform


@pytest.mark.parametrize(
    ("sizes", "platform", "reason"),
    [
        ((512, 512, 128), "triton", ": chosen"),
        ((512,), "xla", "has one layer, which is bilinear_gates"),
        (
            (8000,) * 6,
            "xla",
            "keeps values of all gates in the caches, at most 8192 of a sample, here 80000",
        ),
    ],
)
@pytest.mark.usefixtures("launches")
def test_networks_whose_values_no_cache_holds_run_layer_by_layer(sizes, platform, reason):
    call = gates_call(800, sum(sizes))
    spec = lutjax.kernel_registry.resolve("gate_network", *call, sizes=sizes, device=H200)
    assert spec.platform == platform
    with _ahead_of_time.use_target("cuda", H200.kind):
        assert reason in lutjax.explain("gate_network", *call, sizes=sizes)


# ------------------------------------------------------------------------------------- tables in host memory
def host_table(shape, dtype=np.float32):
    table = host.HostTable(shape, dtype, host.Normal(1.0))
    table.draw(jax.random.key(0))
    return table


@pytest.mark.parametrize(
    ("shape", "dtype", "n"),
    slow_except(
        [((3, 9, 5), "float32", 1), ((2, 50, 128), "float16", 300), ((1, 7, 700), "float32", 3),
         ((2, 40, 8), "bfloat16", 1100)],
        "(3, 9, 5)-float32-1", ids=str,
    ),
    ids=str,
)  # fmt: skip
@pytest.mark.usefixtures("triton_interpreted", "beside_a_gpu")
def test_rows_of_the_host(shape, dtype, n):
    table = host_table(shape, jnp.dtype(dtype))
    index = np.random.default_rng(0).integers(-3, shape[1] + 3, (n, shape[0], 2)).astype(np.int32)
    read = jax.jit(lambda index: table.read(index)[0])
    np.testing.assert_array_equal(read(index), table.gather(index))
    before = np.asarray(read(index))
    table.draw(jax.random.key(1))
    np.testing.assert_array_equal(read(index), table.gather(index))
    assert (np.asarray(read(index)) != before).any()
    if n == 3:
        several = np.stack([index, index + 1, index, index - 1]).reshape(2, 2, *index.shape)
        mapped = jax.jit(jax.vmap(jax.vmap(lambda index: table.read(index)[0])))(several)
        np.testing.assert_array_equal(mapped[1, 1], table.gather(index - 1))
        np.testing.assert_array_equal(mapped[0, 1], table.gather(index + 1))
        assert read(index[:0]).shape == (1, 0, 700)
    table.weights = None
    assert np.isnan(np.asarray(read(index), np.float32)).all()


@pytest.mark.usefixtures("beside_a_gpu")
def test_rows_of_the_host_compile(launches):
    for n in (1, 3000):
        table = host_table((2, 50, 128))
        jax.eval_shape(table.read, array((n, 2, 1), jnp.int32))
    triton_compiler.check_compilation(launches)
    for (_, types), common in launches.items():
        # Whole rows are on their way in few instructions.
        assert "ld.global.v4.b32" in triton_compiler.compiled(common, types).asm["ptx"]


@pytest.mark.usefixtures("triton_interpreted", "beside_a_gpu")
def test_programs_of_tables_differ():
    """The cell address is a program constant, and therefore part of the compilation cache key."""
    tables_there = [host_table((2, 50, 128)) for _ in range(2)]
    for table in tables_there:
        read = jax.jit(lambda index, table=table: table.read(index)[0])
        text = read.lower(np.zeros((1, 2, 1), np.int32)).as_text()
        low, high = np.array([table._cell.address], np.uint64).view(np.int32)
        values = low if low == high else f"[{low}, {high}]"
        assert f"dense<{values}> : tensor<2xi32>" in text
    assert len({table._cell.address for table in tables_there}) == 2


@interpreted
def test_rows_in_ways():
    """Functions for custom reads, with the plain-JAX signatures."""
    weights, ways, dy = ways_of_rows(jnp.float32, jnp.float32)
    finite = jnp.where(jnp.isinf(weights), 9, weights)

    def results(rows):
        index = tuple(index for index, _ in ways)
        assert rows.products(finite, (), dy, CPU, None, 2) == ()
        return {
            "sums": rows.sum_ways(weights, ways, CPU, None, 2),
            "products": rows.products(finite, index, dy, CPU, None, 2),
            "additions": rows.add_ways(jnp.ones(weights.shape), ways, dy, CPU, None, 2),
        }

    actual, expected = (
        jax.jit(functools.partial(results, r))() for r in (_weighted_rows, _row_gathers)
    )
    assert jnp.isfinite(expected["sums"]).all()
    testing.assert_all_close("rows in ways", actual, expected)
