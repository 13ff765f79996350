"""Native kernels for gates and binary tables, beyond the common suites."""

import jax
import jax.numpy as jnp
import native_kernels
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import lutjax
from lutjax.models import LogicCA, LogicCAConfig, automaton

pytestmark = pytest.mark.skipif(
    native_kernels.why_not() is not None, reason=str(native_kernels.why_not())
)


def close(actual, expected):
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * np.abs(b).max(initial=1e-30))


def gates(op, x, parameters, wires, dy, implementation):
    """Return gates and their cotangents."""
    options = {"feature_axis": 0, "implementation": implementation}
    y, pull_back = jax.vjp(lambda x, p: getattr(lutjax, op)(x, p, wires, **options), x, parameters)
    return y, *pull_back(dy)


@pytest.mark.parametrize("periodic", [False, True])
def test_the_step_of_an_automaton_is_a_network_of_gates(periodic):
    """A native kernel runs all layers at once; plain JAX runs layer by layer."""
    config = LogicCAConfig(
        channels=2, kernels=3, perception=(8, 2), update=(8, 2), periodic=periodic
    )
    model = LogicCA(config, rngs=nnx.Rngs(0))
    coefficients = lutjax.gate_coefficients(
        jax.random.normal(jax.random.key(0), (config.n_gates, 16))
    )
    state = jax.random.uniform(jax.random.key(1), (2, 3, 5, 6))

    def both(implementation):
        with lutjax.use_implementation(implementation):

            def loss(coefficients, state):
                last = automaton.run_soft(config, coefficients, model.wiring, state, 3)
                return jnp.square(last - 0.25).sum()

            text = str(jax.make_jaxpr(jax.grad(loss))(coefficients, state))
            return text, jax.jit(jax.grad(loss, (0, 1)))(coefficients, state)

    (plain_text, plain), (native_text, native) = both("xla"), both("native")
    assert "lutjax_cpu" in native_text
    assert "lutjax_gate_network" not in plain_text
    assert "lutjax_gate_network" in native_text
    assert "bilinear_gates_forward" not in native_text
    close(native, plain)


@pytest.mark.parametrize("op", ["bilinear_gates", "soft_lut", "binary_lut"])
def test_rows_of_any_length_and_inputs_with_many_readers(op):
    """Batches indivisible by any lane count and longer than a task's columns; every gate reads one shared input."""
    key = jax.random.key(3)
    wires = jnp.stack([jnp.zeros(60, jnp.int32), jax.random.randint(key, (60,), 0, 9)], 1)
    parameters = jax.random.normal(key, (4, 60) if op == "bilinear_gates" else (60, 4))
    x, dy = jax.random.normal(key, (9, 2051)), jax.random.normal(key, (60, 2051))

    close(*(gates(op, x, parameters, wires, dy, i) for i in ("native", "xla")))


def test_the_sum_of_binary_tables_takes_no_part_of_other_slots():
    """An infinite cotangent reaches only the slot addressed by its sample, and creates no NaN elsewhere."""
    x, table, dy = jnp.array([[1.0, -1.0]]), jnp.zeros((1, 2)), jnp.array([[jnp.inf, 2.0]])
    *_, d_table = gates("binary_lut", x, table, jnp.zeros((1, 1), jnp.int32), dy, "native")
    np.testing.assert_array_equal(d_table, [[2.0, jnp.inf]])


@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_words_of_any_number(n):
    key = jax.random.key(n)
    words = jax.random.bits(key, (11, 37), jnp.uint32)
    truth, wires = (
        jax.random.bernoulli(key, shape=(23, 2**n)),
        jax.random.randint(key, (23, n), 0, 11),
    )
    actual, expected = (
        lutjax.packed_lut(words, truth, wires, implementation=i) for i in ("native", "xla")
    )
    np.testing.assert_array_equal(actual, expected)


def test_the_step_of_an_automaton_on_a_mesh():
    """Coefficients are equal on all devices, and their gradient is summed over devices, including under plain jit."""
    config = LogicCAConfig(channels=1, kernels=2, perception=(8, 1), update=(3, 1))
    model = LogicCA(config, rngs=nnx.Rngs(0))
    coefficients = lutjax.gate_coefficients(
        jax.random.normal(jax.random.key(0), (config.n_gates, 16))
    )
    state = jax.random.uniform(jax.random.key(1), (1, 4, 3, 5))
    mesh, divided = Mesh(np.asarray(jax.devices()[:2]), ("data",)), PartitionSpec(None, "data")

    def gradients(coefficients, state):
        def loss(coefficients, state):
            return jnp.square(
                automaton.run_soft(config, coefficients, model.wiring, state, 1) - 0.25
            ).sum()

        return jax.grad(loss, (0, 1))(coefficients, state)

    specs = (PartitionSpec(), divided)
    mapped = jax.shard_map(gradients, mesh=mesh, in_specs=specs, out_specs=specs)
    expected = jax.jit(gradients)(coefficients, state)
    close(jax.jit(mapped)(coefficients, state), expected)
    placed = jax.device_put(state, NamedSharding(mesh, divided))
    close(jax.jit(gradients)(coefficients, placed), expected)


def same_bits(run, *args, lowest_level=0):
    """Run a function with one, two and seven threads, at every level from the lowest; return its results at the highest."""
    from lutjax_cpu import _native

    for level in [level for level in _native.levels() if level >= lowest_level] or _native.levels()[
        -1:
    ]:
        with _native.use_level(level):
            result = []
            for n in (1, 2, 7):
                with _native.use_threads(n):
                    result.append([np.asarray(a) for a in jax.block_until_ready(run(*args))])
            for other in result[1:]:
                assert all(
                    a.tobytes() == b.tobytes() for a, b in zip(result[0], other, strict=True)
                ), level
    return result[0]


@pytest.mark.parametrize(("batch", "n_outputs"), [(197, 9), (4609, 1), (64, 40), (0, 3)])
def test_networks_of_gates_are_their_gates_one_after_the_other(batch, n_outputs):
    """Partial blocks, tasks with several blocks, out-of-range ids, unread gates, and gates with a repeated input row."""
    from lutjax_cpu._call import kernel

    n_inputs, n_gates = 5, 47
    generator = np.random.default_rng(batch)
    x, dy = (generator.normal(size=(n, batch)) for n in (n_inputs, n_outputs))
    c = 0.5 * generator.normal(size=(4, n_gates))
    rows_before = n_inputs + np.arange(n_gates)[:, None]
    wires = generator.integers(-3, rows_before + 2, (n_gates, 2))
    wires[20], wires[30] = 7, 2
    arrays = (*(jnp.asarray(a, jnp.float32) for a in (x, c)), jnp.asarray(wires, jnp.int32))

    rows = np.concatenate([x, np.zeros((n_gates, batch))])
    reads = np.clip(wires, 0, rows_before - 1)
    for g, (a, b) in enumerate(reads):
        rows[n_inputs + g] = (
            c[0, g] + c[1, g] * rows[a] + c[2, g] * rows[b] + c[3, g] * rows[a] * rows[b]
        )
    d_rows, dc = np.zeros_like(rows), np.zeros_like(c)
    d_rows[-n_outputs:] = dy
    for g, (a, b) in reversed(list(enumerate(reads))):
        of = d_rows[n_inputs + g]
        dc[:, g] = [np.sum(of * factor) for factor in (1, rows[a], rows[b], rows[a] * rows[b])]
        d_rows[a] += of * (c[1, g] + c[3, g] * rows[b])
        d_rows[b] += of * (c[2, g] + c[3, g] * rows[a])

    @jax.jit
    def both(x, c, wires):
        given, of_outputs = (x, c, wires), jnp.asarray(dy, jnp.float32)
        (y,) = kernel("gate_network_forward", given, (jax.ShapeDtypeStruct(dy.shape, jnp.float32),))
        outlines = [jax.ShapeDtypeStruct(a.shape, jnp.float32) for a in (x, c)]
        return y, *kernel("gate_network_backward", (*given, of_outputs), outlines)

    close(same_bits(both, *arrays), (rows[-n_outputs:], d_rows[:n_inputs], dc))


@pytest.mark.parametrize(
    ("op", "batch", "shared"),
    [("bilinear_gates", 4096, 1), ("bilinear_gates", 4101, 1), ("bilinear_gates", 4096, 100),
     ("soft_lut", 4096, 1), ("packed_lut", 4096, 1)],
)  # fmt: skip
def test_inputs_beyond_the_caches(op, batch, shared):
    """Gates are visited along their wires, with non-temporal stores for aligned rows; `shared` gates read one input."""
    n_inputs, n_gates = 1060, 1101
    keys = jax.random.split(jax.random.key(shared), 4)
    wires = (
        jax.random.randint(keys[0], (n_gates, 2), 0, n_inputs - 1)
        .at[:shared, 0]
        .set(0)
        .at[5]
        .set(9)
    )
    if op == "packed_lut":
        words = jax.random.bits(keys[1], (n_inputs, batch), jnp.uint32)
        truth = jax.random.bernoulli(keys[2], shape=(n_gates, 4))
        actual, expected = (
            lutjax.packed_lut(words, truth, wires, implementation=i) for i in ("native", "xla")
        )
        np.testing.assert_array_equal(actual, expected)
        return
    x, dy = (
        jax.random.normal(keys[1], (n_inputs, batch)),
        jax.random.normal(keys[2], (n_gates, batch)),
    )
    parameters = jax.random.normal(
        keys[3], (4, n_gates) if op == "bilinear_gates" else (n_gates, 4)
    )

    native = jax.jit(lambda: gates(op, x, parameters, wires, dy, "native"))
    every_level = op == "bilinear_gates" and shared == 1
    actual = same_bits(native, lowest_level=0 if every_level else 2)
    close(actual, gates(op, x, parameters, wires, dy, "xla"))
