"""Further Triton kernel tests without a GPU: patched constants, custom reads, whole layers, and compilation for NVIDIA GPUs."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import fast_size, split
from flax import nnx

import lutjax
from lutjax import optim as tables, reads, testing, tuning, wiring
from lutjax.dispatch import _transforms
from lutjax.layers import nnx as layers
from lutjax.models import LogicCA, LogicCAConfig
from lutjax.ops.gate_network import gate_network
from lutjax.tables import _registered

triton_compiler = pytest.importorskip(
    "triton_compiler", reason="triton or jax-triton is not installed"
)
import triton_interpreter  # noqa: E402
from triton_compiler import GPUS, OPS, SUMMED, compiled  # noqa: E402

from lutjax.kernels._triton import _owned_columns, _row_additions, _weighted_rows  # noqa: E402

interpreted = pytest.mark.usefixtures("triton_interpreted")
TRANSFORMATIONS = [t for t in testing.TRANSFORMATIONS if t != "export"]


# ------------------------------------------------------------------------------------- in the interpreter
@interpreted
def test_updates_by_factors_that_differ(monkeypatch):
    """Gradient factors, and sequential updates for detector groups."""
    monkeypatch.setattr(_row_additions, "_SUMS", 2 * 8 * 5)
    x, weights = (
        jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate([(7, 6), (5, 8, 5)])
    )
    anchors = lutjax.sample_anchors(jax.random.key(2), 6, 5, 3)
    factor = jnp.linspace(0.5, 2, 5).reshape(5, 1, 1)

    def loss(params):
        return jnp.sum(
            lutjax.lut(x, lutjax.scale_gradient(params["weights"], factor), anchors) ** 2
        )

    @jax.jit
    def moved(weights):
        _, gradients = tables.value_and_grad(loss)({"weights": weights})
        return [
            lutjax.update_table(weights, gradients["weights"], 0.25, implementation=name)[0]
            for name in ("triton", "xla")
        ]

    testing.assert_close("factors", *moved(weights))


@pytest.mark.parametrize("scale", [2.0**10, 2.0**30])  # addends of every digit; sums that wrap
@interpreted
def test_counted_attention_in_fixed_point(monkeypatch, scale):
    """Integer sums have the same bits in every summation mode."""
    triton_interpreter.count_always(monkeypatch, small_blocks=True)
    case = testing.case("lookup_attention", "ties", batch=1, queries=6, detectors=2)
    found = []
    for implementation in ("triton", "xla"):
        program = testing.program(case, implementation, accumulate=lutjax.FixedPoint(scale))
        found.append(jax.tree.leaves(jax.jit(program.function)(*program.arguments)))
    for actual, expected in zip(*found, strict=True):
        assert np.any(expected)
        np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("weight_decay", [0.0, 0.5])
@pytest.mark.parametrize("shape", ["primes", "cross"])
@interpreted
def test_updates_of_counted_attention(monkeypatch, shape, weight_decay):
    triton_interpreter.count_always(monkeypatch, small_blocks=True)
    case = testing.case("lookup_attention", shape)
    testing.check_update(case, "triton", tables.SGD(weight_decay=weight_decay))


@pytest.mark.parametrize("transformation", TRANSFORMATIONS)
@pytest.mark.parametrize("op", ["lookup_attention", "scored_lut"])
@interpreted
def test_transformations_of_other_formulations(monkeypatch, op, transformation):
    if op == "lookup_attention":
        triton_interpreter.count_always(monkeypatch, small_blocks=True)
    else:
        triton_interpreter.own_always(monkeypatch)
    testing.check(split(op), "triton", transformation=transformation)


@interpreted
def test_blocks_of_detectors_in_several_groups(monkeypatch):
    """Update sums starting mid-group, programs spanning detectors from two groups, and a single last block."""
    case = testing.case("weighted_lookup", "groups", detectors=9)
    n_rows, n_outputs = case.differentiable["weights"].shape[1:]
    monkeypatch.setattr(_row_additions, "_SUMS", 4 * n_rows * n_outputs)
    monkeypatch.setattr(_weighted_rows, "_TOGETHER", 4 * 4 * n_rows * n_outputs)
    launch = tuning.Launch(rows=4, outputs=4, detectors=2, warps=1)
    with tuning.use(
        {f"weighted_lookup.{kernel}": launch for kernel in ("forward", "products", "table")}
    ):
        testing.check(case, "triton", transformation="jit")
        testing.check_update(case, "triton", tables.SGD(weight_decay=0.25))


@pytest.mark.parametrize(("shape", "sizes"), [
    ("funnel", (4, 8, 0)),
    ("primes", (4, 4, 3)),
    ("large_fan_out", (1, 32, 2)),
    ("one", (1, 1, 0)),
])  # fmt: skip
@interpreted
def test_networks_in_tiles_and_blocks(shape, sizes):
    launch = tuning.Launch(
        **dict(zip(("rows", "outputs", "detectors"), sizes, strict=True)), warps=1
    )
    with tuning.use({f"gate_network.{direction}": launch for direction in ("forward", "backward")}):
        testing.check(testing.case("gate_network", shape), "triton", transformation="jit")


@interpreted
def test_samples_that_do_not_exist_add_nothing():
    """An infinite coefficient times a padding sample's zero inputs would turn all sums into NaN."""
    wires = np.array([[0, 1], [1, 2], [0, 1], [1, 0], [0, 1]])
    readers = [
        lutjax.readers(w, n) for w, n in zip(np.split(wires, (2, 4)), (3, 2, 2), strict=True)
    ]
    coefficients = jnp.full((4, 5), 0.5).at[1, 0].set(jnp.inf).at[3, 2].set(jnp.inf)
    options = {"sizes": (2, 2, 1), "feature_axis": 0}

    def run(implementation):
        def network(x, coefficients):
            return gate_network(
                x, coefficients, wires, readers=readers, implementation=implementation, **options
            )

        y, pull = jax.vjp(network, jnp.ones((3, 3)), coefficients)
        return y, *pull(jnp.ones_like(y))

    found = run("triton")
    for actual, expected in zip(found, run("xla"), strict=True):
        np.testing.assert_array_equal(actual, expected)
    assert np.isposinf(found[0]).any()


@interpreted
def test_constants_are_those_of_the_read(monkeypatch):
    run, arguments = triton_interpreter.scored_call(reads.PowersOfTwo())
    ours = run("triton", *arguments)
    other = reads.Rounding(-2, 2, 2, negligible=1, most_shift=8, least_exact=1.0, most_ratio=2.0)
    monkeypatch.setattr(reads.PowersOfTwo, "rounding", other)
    _transforms.forget()
    try:
        triton_interpreter.check_plain_jax(run, *arguments)
        assert np.any(run("triton", *arguments) != ours)
    finally:
        _transforms.forget()


@pytest.mark.parametrize("sum_groups", [False, True])
@pytest.mark.parametrize("parts", [1, 3])
@interpreted
def test_scored_reads_of_integers(parts, sum_groups):
    """Outputs match plain JAX and the training form bit for bit, with NaN for NaN inputs."""
    run, (x, weights, scalars) = triton_interpreter.scored_call(reads.PowersOfTwo())
    x, quantized = x.at[3, 0].set(jnp.nan), lutjax.quantize_tables(weights, groups=2)
    calls = (("triton", quantized), ("triton", weights), ("xla", quantized))
    with tuning.use(
        {"scored_lut.forward": tuning.Launch(rows=16, outputs=8, detectors=3 // parts, warps=1)}
    ):
        actual, trained, expected = (run(i, x, w, scalars, sum_groups=sum_groups) for i, w in calls)
    np.testing.assert_array_equal(actual, expected)
    np.testing.assert_array_equal(actual, trained)
    assert np.isnan(actual[3, 0]).all()
    assert np.isfinite(actual).any()


@pytest.mark.parametrize(("shape", "dtype"), [("primes", "float32"), ("sum_groups", "bfloat16")])
@interpreted
def test_samples_of_owners_in_parts(monkeypatch, shape, dtype):
    """Rows and factors for all samples exceed the memory limit."""
    triton_interpreter.own_always(monkeypatch)
    monkeypatch.setattr(_owned_columns, "_MOST_SCRATCH", 256)
    case = testing.case("scored_lut", shape, dtype)
    assert (
        _owned_columns.count_parts(
            case.differentiable["weights"].shape, groups=1, ways=2, n_samples=5
        )
        > 1
    )
    testing.check(case, "triton", transformation="jit")


@dataclasses.dataclass(frozen=True)
class Closest(reads.Read):
    """Custom read unknown to lutjax."""

    def initial(self):
        return {"log_scale": jnp.float32(0.5)}

    def select(self, u, scalars):
        index, flip, closest = reads.address(u)
        return [(index, closest * jnp.exp(scalars["log_scale"])), (index ^ flip, closest)]


@pytest.mark.parametrize("read", [Closest(), type("Derived", (reads.Hard,), {})()], ids=str)
@interpreted
def test_scored_reads_that_users_write(read):
    run, arguments = triton_interpreter.scored_call(read)
    triton_interpreter.check_plain_jax(run, *arguments)


@pytest.mark.parametrize(
    ("interleave", "window", "start", "epsilon"),
    [(False, None, 3, 0.375), (True, 2, -2, 0.0), (False, 0, 0, 0.0), (False, None, 2**30, 0.0)],
)
@interpreted
def test_pair_attention_of_any_place(interleave, window, start, epsilon):
    """Out-of-range ids, runtime positions, and distances beyond the position table."""
    rng = np.random.default_rng(0)
    shapes = (2, 6, 3), (2, 9, 3), (3, 8, 5), (4, 3, 3)
    arrays = [jnp.asarray(rng.integers(-8, 9, shape) / 4, jnp.float32) for shape in shapes]
    anchors = jnp.asarray(rng.integers(-3, 14, (3, 3, 2)), jnp.int32)

    def attend(implementation, x, keys, weights, positions):
        options = {
            "interleave": interleave,
            "window": window,
            "query_start": jnp.int32(start),
            "epsilon": epsilon,
        }
        options |= {"keys": keys, "implementation": implementation}
        return lutjax.lut_pair_attention(x, weights, anchors, positions, **options)

    triton_interpreter.check_plain_jax(attend, *arrays)


@pytest.mark.usefixtures("triton_interpreted", "beside_a_gpu")
def test_layers_whose_rows_lie_in_the_host():
    layer = layers.ProductKeyMemory(
        6, 6, n_keys=5, heads=2, k=3, placement="host", rngs=nnx.Rngs(0)
    )
    x = np.random.default_rng(1).normal(size=(3, 6)).astype(np.float32)
    gradients = jax.jit(jax.grad(lambda x: layer(x).sum()))
    actual = gradients(x), nnx.jit(lambda layer: layer(x))(layer)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_registered, "driver", lambda: None)
        jax.clear_caches()
        expected = gradients(x), nnx.jit(lambda layer: layer(x))(layer)
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


# ------------------------------------------------------------------------------------- compiled
@pytest.mark.parametrize(
    ("op", "shape"),  # with and without readers
    [
        ("logic_trees", "pools"),
        ("logic_trees", "apart"),
        ("gate_network", "readers"),
        ("gate_network", "deep"),
    ],
)
def test_gates_add_without_atomics(op, shape, launches):
    triton_compiler.trace(testing.case(op, shape))
    for (kernel, types), common in launches.items():
        assert "atomic" not in compiled(common, types).asm["ttir"], kernel


@pytest.mark.parametrize("capability", GPUS)
def test_counted_attention_compiles(monkeypatch, capability, launches):
    """Compile with the block sizes used at run time."""
    triton_interpreter.count_always(monkeypatch)
    sizes = {
        "batch": 2,
        "queries": 300,
        "detectors": 2,
        "bits": 6,
        "position_bits": 4,
        "outputs": 32,
    }
    triton_compiler.trace(testing.case("lookup_attention", "tiles", **sizes), GPUS[capability])
    triton_compiler.check_compilation(launches, capability)
    assert "_add_counted" in {kernel.fn.__name__ for kernel, _ in launches}


@pytest.mark.parametrize("capability", GPUS)
def test_sums_of_owners_compile(capability, launches):
    """Kernels fit shared memory and registers at all sizes selected for them."""
    case = testing.case(
        "scored_lut", "split", batch=4096, inputs=64, detectors=256, bits=8, outputs=48
    )
    testing.check_lowering(case, "triton", platform="cuda", device_kind=GPUS[capability])
    owned = {
        key: c for key, c in launches.items() if key[0].fn.__name__ in ("_rotate", "_add_owned")
    }
    assert len(owned) == 2
    triton_compiler.check_compilation(owned, capability)


def test_all_of_sums_of_owners_compiles(monkeypatch, launches):
    triton_interpreter.own_always(monkeypatch)
    for shape, dtype in (("split", "bfloat16"), ("hard", "float32")):
        triton_compiler.trace(testing.case("scored_lut", shape, dtype, outputs=48))
    assert "_add_owned" in {kernel.fn.__name__ for kernel, _ in launches}
    triton_compiler.check_compilation(launches)


@pytest.mark.parametrize(("op", "dtype", "accumulate"), [
    *((op, dtype, None) for op in OPS for dtype in ("bfloat16", "float16", "float64")),
    *((op, "float32", lutjax.FixedPoint(2.0**16)) for op in SUMMED),
])  # fmt: skip
def test_compiles_in_other_arithmetic(op, dtype, accumulate, launches):
    with jax.enable_x64(dtype == "float64"):
        triton_compiler.trace(testing.case(op, fast_size(op), dtype), GPUS[90], accumulate)
    triton_compiler.check_compilation(launches)


def test_layers_of_trees_compile(launches):
    """The layer selects one kernel for whole trees with pooling on a GPU."""
    x = jax.ShapeDtypeStruct((2, 6, 6, 32), jnp.float32)
    options = {"padding": 1, "pool": 2, "feature_axis": 0}
    triton_compiler.trace_layer(
        lambda rngs: layers.LogicConv((6, 6, 2), 3, **options, rngs=rngs), x
    )
    assert {kernel.fn.__name__ for kernel, _ in launches} == {"_apply", "_reduce", "_add"}
    triton_compiler.check_compilation(launches)


def test_a_step_of_the_automaton_is_two_networks(launches):
    config = LogicCAConfig(channels=2, kernels=2, perception=(8, 4, 2), update=(520, 40, 2))
    grids = jax.ShapeDtypeStruct((3, 8, 8, 2), jnp.float32)
    triton_compiler.trace_layer(lambda rngs: LogicCA(config, rngs=rngs), grids, n_steps=3)
    result = {
        (key[0].fn.__name__, vars(common["c"])["LAYERS"].value) for key, common in launches.items()
    }
    assert result == {("_apply", 3), ("_reduce", 3)}
    triton_compiler.check_compilation(launches)


TABLES = {"n_detectors": 8, "n_anchors": 3}
FIELDS = {"groups": (2, 2), "receptive": 3, "projective": 2}


@pytest.mark.parametrize("make", [
    lambda rngs: layers.ConvLUT((6, 6, 4), 6, kernel=3, padding=1, stride=2, groups=2, **TABLES,
        rngs=rngs),
    lambda rngs: layers.WindowLUT((6, 6, 4), 6, kernel=3, stride=3, **TABLES, rngs=rngs),
    lambda rngs: layers.SpatialLUT(wiring.projections(None, (6, 6, 4), (3, 3), **FIELDS), **TABLES,
        rngs=rngs),
], ids=["conv", "windows", "fields"])  # fmt: skip
def test_layers_over_images_compile(make, launches):
    triton_compiler.trace_layer(make, jax.ShapeDtypeStruct((512, 6, 6, 4), jnp.float32))
    result = {kernel.fn.__name__ for kernel, _ in launches}
    assert result == {"_sum_rows", "_multiply_and_add_rows", "_sort", "_collect"}
    triton_compiler.check_compilation(launches)
