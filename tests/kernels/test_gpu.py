"""GPU tests. To run all suites on a GPU machine: `pytest -m gpu`."""

import dataclasses
import gc
import time
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import ops
from flax import nnx
from machine import needs_gpu
from small_runs import MEMORY

import lutjax
from lutjax import optim as tables, optim as training_tables, reads, testing
from lutjax.kernels._triton import _rules
from lutjax.layers.nnx import NgramMemory, ProductKeyMemory
from lutjax.models import GPT, GPTConfig, Slots, _attention
from lutjax.optim import nnx as training
from lutjax.optim.host import RowPrefetcher, provide_rows
from lutjax.tables import _registered
from lutjax.tables.host import HostTable, Normal

pytestmark = [pytest.mark.gpu, needs_gpu]


def needs_memory(gigabytes):
    free = jax.local_devices()[0].memory_stats()["bytes_limit"]
    if free < gigabytes * 1e9:
        pytest.skip(f"needs {gigabytes} GB of device memory, JAX may use {free / 1e9:.0f} GB")


def in_triton(op):
    return any(spec.platform == "triton" for spec in lutjax.kernel_registry.candidates(op))


@pytest.mark.parametrize("op", [op for op in ops() if in_triton(op)])
def test_triton_comes_first(op):
    case = testing.case(op, "primes" if "primes" in testing.shapes(op) else "pools")
    chosen = []
    resolve = lutjax.kernel_registry.resolve_request

    def spy(request, names):
        spec = resolve(request, names)
        if (
            request.device.backend == "gpu"
        ):  # a call that is traced may run on the CPU of this process too
            chosen.append((request.op, spec.platform))
        return spec

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lutjax.kernel_registry, "resolve_request", spy)
        patch.setattr(lutjax.kernel_registry, "_resolved", {})
        patch.setattr(_rules, "_FEW_VALUES", 0)  # of gates, few are left to plain JAX
        testing.check(case)
    assert {platform for name, platform in chosen if name == op} == {"triton"}


def test_tables_beyond_2_to_the_31():
    needs_memory(60)
    shape = (3, 2**16, 12_000)  # 2.4e9 numbers
    rows = np.array([[0, 1, 2**16 - 1], [2**16 - 1, 5, 2**16 - 2]], np.int32)
    weights = jax.jit(lambda: jnp.zeros(shape, jnp.float32))()
    write = jax.jit(lambda w, t, r, v: w.at[t, r].set(v), donate_argnums=0)
    value = {(t, r): float(1 + t + r % 7) for b in rows.tolist() for t, r in enumerate(b)}
    for t, r in value:
        weights = write(weights, t, r, value[t, r])
    margin = jnp.full(rows.shape, -0.5)
    d = lutjax.Detection(jnp.asarray(rows), jnp.ones(rows.shape, jnp.int32), margin, 16)
    y = jax.jit(lambda w, d: lutjax.lookup(w, d, implementation="triton"))(weights, d)
    expected = [sum(value[t, r] for t, r in enumerate(b)) for b in rows.tolist()]
    np.testing.assert_allclose(y[:, [0, -1]], np.stack([expected, expected], 1), rtol=1e-6)

    def margins(w, margin):
        d = lutjax.Detection(jnp.asarray(rows), jnp.ones(rows.shape, jnp.int32), margin, 16)
        return lutjax.lookup(w, d, implementation="triton").sum()

    d_margin = jax.jit(jax.grad(margins, 1))(weights, margin)
    differences = [
        [value[t, r] - value.get((t, r ^ 1), 0) for t, r in enumerate(b)] for b in rows.tolist()
    ]
    np.testing.assert_allclose(
        d_margin, -0.5 / 1.5**2 * shape[2] * np.array(differences), rtol=1e-4
    )
    d_weights = jax.jit(jax.grad(margins))(weights, margin)
    assert float(d_weights[2, 2**16 - 1, -1]) == 1
    assert float(d_weights[2, 2**16 - 2, -1]) == 1
    assert float(jnp.sum(d_weights[2, :, -1])) == 2


@pytest.mark.parametrize("batch", [70_000, 3_000_001])
def test_batches_beyond_the_limits_of_grids(batch):
    case = testing.case("lookup", "one", batch=batch)
    testing.check(case, "triton", transformation="jit")
    testing.check(testing.case("detect", "one", batch=batch), "triton", transformation="jit")


def test_long_sequences():
    case = testing.case("lookup_attention", "tiles", batch=1, queries=8192, detectors=1, outputs=1)

    def gradients(implementation):
        def f(differentiable):
            call = testing._call(case, lutjax, implementation, differentiable)
            return call["y"].sum()

        return jax.jit(jax.value_and_grad(f))(case.differentiable)

    actual, expected = gradients("triton"), gradients("xla")
    jax.tree.map(lambda a, e: testing.assert_close("8192 places", a, e, 1e-5), actual, expected)


@pytest.mark.parametrize(("op", "sizes"), [
    ("lookup", {"batch": 512, "detectors": 8}),
    ("weighted_lookup", {"batch": 512, "detectors": 8}),
    ("lookup_attention", {"batch": 8, "queries": 64}),
])  # fmt: skip
def test_fixed_point_is_the_same_every_time(op, sizes):
    """Atomic sums in arbitrary order."""
    case = testing.case(op, "primes", **sizes)

    def run():
        f = jax.jit(
            lambda d, ct: testing._value_and_cotangents(
                lambda d: testing._call(
                    case, lutjax, "triton", d, accumulate=lutjax.FixedPoint(2.0**20 + 1)
                ),
                d,
                ct,
            )
        )
        differentiable = jax.tree.map(lambda a: a * 0.7310585, case.differentiable)
        return jax.tree.leaves(
            f(differentiable, {"y": jnp.full((), 0.3) + jnp.zeros_like(reference)})
        )

    reference = testing._call(case, lutjax, "xla", case.differentiable)["y"]
    first = run()
    for _ in range(5):
        for a, b in zip(run(), first, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(("read", "dtype", "sizes", "n_parts"), [
    (reads.Confidence(2), "float32", (8195, 8, 33, 8, 48), 1),
    (reads.Confidence(2), "bfloat16", (4101, 8, 64, 8, 33), 1),
    (reads.Confidence(1), "bfloat16", (5000, 4, 321, 4, 32), 1),
    (reads.Hard(), "float32", (4096, 5, 513, 3, 16), 1),
    (reads.Blend(), "float32", (5000, 2, 400, 5, 16), 1),
    (reads.Confidence(2), "float32", (16387, 8, 64, 8, 48), 3),
], ids=str)  # fmt: skip
def test_tables_that_are_summed_by_owners(monkeypatch, read, dtype, sizes, n_parts):
    """Sums match plain JAX and are bitwise reproducible."""
    from lutjax.kernels._triton import _owned_columns

    n, groups, each, bits, n_outputs = sizes
    ways = len(read.select([jnp.ones((1,))] * bits, read.initial()))
    shape = (groups * each, 2**bits, n_outputs)
    if n_parts > 1:
        monkeypatch.setattr(
            _owned_columns, "_MOST_SCRATCH", 4 * (1 + ways) * shape[0] * n // n_parts + 1024
        )
    assert _owned_columns.count_parts(shape, groups, ways, n) == n_parts
    keys = jax.random.split(jax.random.key(0), 5)
    x = jax.random.normal(keys[0], (n, groups, 48))
    weights = jax.random.normal(keys[1], shape).astype(dtype)
    anchors = jax.random.randint(keys[2], (groups * each, bits, 2), 0, 48, jnp.int32)
    keep = jnp.where(jax.random.uniform(keys[3], (n, groups * each)) < 0.8, 1.25, 0.0)
    ct = jax.random.normal(keys[4], (n, groups, n_outputs)).astype(dtype)

    def run(implementation):
        @jax.jit
        def gradients(x, weights, scalars, keep, ct):
            def f(x, weights, scalars, keep):
                options = {"read": read, "groups": groups, "implementation": implementation}
                return lutjax.scored_lut(x, weights, anchors, scalars, keep=keep, **options)

            return jax.vjp(f, x, weights, scalars, keep)[1](ct)

        d_x, d_weights, d_scalars, d_keep = gradients(x, weights, read.initial(), keep, ct)
        return {"x": d_x, "weights": d_weights, "keep": d_keep, **d_scalars}

    first, second, expected = run("triton"), run("triton"), run("xla")
    np.testing.assert_array_equal(first["weights"], second["weights"])
    for name in ("x", "weights", "keep"):
        testing.assert_close(name, first[name], expected[name], testing.TOLERANCE[dtype])


def test_memory_that_does_not_suffice_leaves_the_arguments():
    weights = jnp.ones((4, 16, 8))
    d = lutjax.detect_signs(jnp.ones((1 << 20, 4, 4)))
    huge = jax.jit(lambda w: jnp.broadcast_to(lutjax.lookup(w, d)[None], (1 << 22, 1 << 20, 8)) * 2)
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
        huge(weights).block_until_ready()
    np.testing.assert_array_equal(weights, 1)
    assert float(lutjax.lookup(weights, d)[0, 0]) == 4


@pytest.mark.parametrize("within", [False, True])
@pytest.mark.parametrize("first", [0, 3])
def test_a_part_of_tables_moves_by_itself(first, within):
    """XLA passes slices to kernels in place, except for slices updated by the kernels."""
    keys = jax.random.split(jax.random.key(0), 2)
    tables = jax.random.normal(keys[0], (12, 64, 32))
    index = jax.random.randint(keys[1], (500, 8, 1), 0, 64)

    def moved(tables):
        part = tables[first : first + 8]

        def loss(part):
            return (lutjax.weighted_lookup(part, index, jnp.ones(index.shape)) ** 2).sum()

        gradient = training_tables.value_and_grad(loss)(part)[1]
        part, _ = lutjax.update_table(part, gradient, 0.001)
        return tables.at[first : first + 8].set(part) if within else part

    result = {}
    for implementation in ("triton", "xla"):
        with lutjax.use_implementation(implementation):
            result[implementation] = jax.jit(moved)(tables)
    np.testing.assert_allclose(result["triton"], result["xla"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("shape", "sizes"), [
    ("groups", {"detectors": 63, "outputs": 48}),
    ("hard", {"detectors": 7, "outputs": 48}),
    ("single", {"detectors": 12, "outputs": 64}),
    ("sum_groups", {"detectors": 63, "outputs": 30, "bits": 6}),
    ("shared_input", {"detectors": 12, "outputs": 17}),
])  # fmt: skip
def test_scored_rows_from_shared_memory(shape, sizes):
    """Maximum table sizes, and partially filled sample blocks."""
    case = testing.case("scored_lut", shape, **{"batch": 1100, "inputs": 40, "bits": 8, **sizes})
    testing.check(case, "pallas", transformation="jit")


def test_gradients_of_scored_reads_have_the_same_bits_in_every_run():
    keys = jax.random.split(jax.random.key(0), 3)
    read, n_groups = reads.Confidence(), 8
    x = jax.random.normal(keys[0], (4096, n_groups, 32))
    weights = jax.random.normal(keys[1], (n_groups * 32, 256, 32))
    anchors = jax.random.randint(keys[2], (n_groups * 32, 8, 2), 0, 32)

    def loss(x, weights, scalars):
        y = lutjax.scored_lut(x, weights, anchors, scalars, read=read, groups=n_groups)
        return jnp.sum(y**2)

    gradients = jax.jit(jax.grad(loss, (0, 1, 2)))
    first = jax.device_get(gradients(x, weights, read.initial()))
    for _ in range(5):
        jax.tree.map(
            np.testing.assert_array_equal,
            jax.device_get(gradients(x, weights, read.initial())),
            first,
        )


# ------------------------------------------------------------------------------------- tables in the memory of the host
def host_table(dtype=np.float32):
    table = HostTable((3, 1000, 12), dtype, Normal(1.0))
    table.draw(jax.random.key(0))
    return table


def read_by_gpu(table):
    """Program with a table read and no CPU callback."""
    f = jax.jit(lambda index: table.read(index)[0])
    index = jax.ShapeDtypeStruct((5, table.shape[0], 2), jnp.int32)
    assert "callback" not in f.lower(index).as_text()
    return f


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("n", [1, 5, 3000])
def test_a_gpu_reads_tables_of_the_host(n, dtype):
    table = host_table(dtype=jnp.dtype(dtype))
    f = read_by_gpu(table)
    rng = np.random.default_rng(0)
    index = rng.integers(-3, table.shape[1] + 3, (n, 3, 2)).astype(np.int32)
    np.testing.assert_array_equal(f(index), table.gather(index))
    several = np.stack([index, index + 1])
    mapped = jax.jit(jax.vmap(lambda index: table.read(index)[0]))(several)
    np.testing.assert_array_equal(mapped, [table.gather(index) for index in several])


def test_a_program_reads_what_the_table_has_now():
    table = host_table()
    f = read_by_gpu(table)
    index = np.arange(30, dtype=np.int32).reshape(5, 3, 2)
    first = np.asarray(f(index))
    table.weights[:] += 1
    np.testing.assert_array_equal(f(index), first + 1)
    table.draw(jax.random.key(1))
    np.testing.assert_array_equal(f(index), table.gather(index))
    assert (np.asarray(f(index)) != first).any()
    other = host_table()
    other.weights = table.weights  # an array of two tables
    g = read_by_gpu(other)
    table.weights = None
    assert np.isnan(f(index)).all()
    np.testing.assert_array_equal(g(index), other.gather(index))
    compiled = g.lower(jax.ShapeDtypeStruct(index.shape, index.dtype)).compile()
    rows = weakref.ref(other.weights)
    del g, other
    jax.clear_caches()
    for _ in range(100):  # a thread gives the memory back
        gc.collect()
        if rows() is None:
            break
        time.sleep(0.1)
    assert rows() is None
    assert np.isnan(compiled(index)).all()  # a program may outlive its table


@pytest.mark.parametrize("kind", ["ngrams", "keys"])
def test_layers_read_and_learn_as_when_the_cpu_reads(kind, monkeypatch):
    x = np.random.default_rng(1).normal(size=(3, 8, 6)).astype(np.float32)
    tokens = np.random.default_rng(2).integers(0, 9, (3, 8))

    def losses():
        options = {
            "placement": "host",
            "accumulate": lutjax.FixedPoint(2.0**16),
            "rngs": nnx.Rngs(0),
        }
        layer = (
            NgramMemory(6, rows=20, heads=2, **options)
            if kind == "ngrams"
            else ProductKeyMemory(6, 6, n_keys=5, heads=2, k=3, **options)
        )
        layer.weights.start(tables.RowAdagrad())

        def loss(layer):
            y = layer(x, tokens) if kind == "ngrams" else layer(x)
            return jnp.mean((y - 1) ** 2)

        @nnx.jit
        def step(layer):
            return training.value_and_grad(loss, host=True)(layer)

        result = []
        for _ in range(4):
            value, (_, of_host) = step(layer)
            training.update_host(layer, of_host, 0.1)
            result.append(float(value))
        return result

    by_gpu = losses()
    monkeypatch.setattr(_registered, "driver", lambda: None)
    assert by_gpu == losses()
    assert by_gpu[-1] < by_gpu[0]


HOST_CONFIG = dataclasses.replace(MEMORY, memory_placement="host")


def test_decoding_reads_as_when_the_cpu_reads(monkeypatch):
    prompts = np.random.default_rng(0).integers(0, 64, (2, 5)).astype(np.int32)

    def drawn():
        model = GPT(HOST_CONFIG, rngs=nnx.Rngs(0))
        for layer in model.layers:
            layer.memory.weights.weights[:] *= 20
        slots = Slots(model, 2, temperature=0)
        first, token = slots.join(prompts[0], key=jax.random.key(0))
        joined = [token, *np.asarray(slots.step(3)[first]).tolist()]
        return model.generate(prompts, 40, key=jax.random.key(0)), joined

    tokens, joined = drawn()
    monkeypatch.setattr(_registered, "driver", lambda: None)
    want, joined_by_cpu = drawn()
    np.testing.assert_array_equal(tokens, want)
    assert joined == joined_by_cpu


def test_memory_that_cannot_be_locked_is_read_by_the_cpu(monkeypatch):
    def refuse(*_):
        raise _registered.RegistrationError("cuMemHostRegister_v2: CUDA_ERROR_OUT_OF_MEMORY")

    table = host_table()
    monkeypatch.setattr(_registered.Cell, "point", refuse)
    index = np.arange(30, dtype=np.int32).reshape(5, 3, 2)
    with pytest.warns(
        UserWarning, match=r"did not lock its 0\.00 GB of host memory .*: choose fewer rows"
    ):
        rows = jax.jit(lambda index: table.read(index)[0])(index)
    np.testing.assert_array_equal(rows, table.gather(index))


def test_rows_land_beside_programs_that_run(monkeypatch):
    """Training reads and updates the same rows as with JAX copies, bit for bit; memory is reused."""
    n, n_tables, width = 4096, 2, 64
    rng = np.random.default_rng(0)
    index = rng.integers(0, 5000, (16, n, n_tables, 1)).astype(np.int32)
    matrix = jnp.eye(2048)

    def trained():
        table = HostTable((n_tables, 5000, width), np.float32, Normal(1.0))
        table.draw(jax.random.key(0))
        table.start(tables.RowAdam())
        ahead = RowPrefetcher(
            {"t": table}, lambda step: {"t": index[step]}, lambda step: 0.01, depth=2, lands=True
        )

        def loss(rows, own, late):
            with provide_rows({table: rows["t"]}):
                weights, ids = table.read(own)
                y = lutjax.weighted_lookup(weights, ids, jnp.ones(ids.shape), groups=n_tables)
            return ((y - 1) ** 2).sum() * late

        @jax.jit
        def step(matrix, batch):
            slow = jax.lax.fori_loop(
                0, 20, lambda _, m: m @ matrix, matrix
            )  # the next rows come meanwhile
            return tables.value_and_grad(loss)(batch.rows, batch.ids["t"], slow[0, 0])[1]

        places = set()
        for number in range(12):
            batch = ahead.batch(number)
            places.add(batch.rows["t"].unsafe_buffer_pointer())
            ahead.update(number, step(matrix, batch))
        ahead.wait()
        return ahead, table, places

    ahead, by_driver, places = trained()
    assert ahead._driver is not None
    assert len(places) <= 6  # of twelve steps: three that come, and those that run
    assert any(is_locked for *_, is_locked in ahead._buffers)
    monkeypatch.setattr(_registered, "driver_of", lambda array: None)
    ahead, by_jax, _ = trained()
    assert ahead._driver is None
    np.testing.assert_array_equal(by_driver.weights, by_jax.weights)
    jax.tree.map(np.testing.assert_array_equal, by_driver.state, by_jax.state)


ATTENTION = {
    "plain": ((2, 64, 4, 32), None, False),
    "window": ((2, 96, 3, 64), 17, False),
    "segments": ((2, 64, 4, 24), None, True),
    "segments in a window": ((2, 128, 2, 128), 40, True),
    "odd": ((2, 77, 4, 32), None, True),
    "one token": ((3, 1, 4, 32), None, False),
}


@pytest.fixture
def standard_promotion():
    """JAX lowers bfloat16 matrix products with float32 sums under standard promotion only."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ATTENTION)
def test_attention_agrees_with_xla(standard_promotion, name, dtype):
    shape, window, masked = ATTENTION[name]
    query, key, value, weight = (
        jax.random.normal(jax.random.key(i), shape, dtype) for i in range(4)
    )
    ids = jnp.cumsum(jax.random.bernoulli(jax.random.key(9), 0.05, shape[:2]), 1)
    mask = ids[:, None, :, None] == ids[:, None, None, :] if masked else None

    @jax.jit
    def both(*arrays):
        y, pull_back = jax.vjp(lambda *a: _attention.attend(*a, mask=mask, window=window), *arrays)
        return y, *pull_back(weight.astype(y.dtype))

    program = both.lower(query, key, value).compile().as_text()
    assert ("cudnn" in program) == (shape[1] % 2 == 0)
    result = both(query, key, value)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_attention, "unsupported_reason", lambda *_, **__: "not here")
        exact = jax.jit(lambda *a: both.__wrapped__(*a))(
            *(a.astype(jnp.float32) for a in (query, key, value))
        )
    for a, b in zip(result, exact, strict=True):
        rounding = 4 * float(jnp.finfo(dtype).eps) * float(jnp.abs(b).max())
        np.testing.assert_allclose(a.astype(jnp.float32), b, rtol=0, atol=rounding)


@pytest.mark.parametrize("remat", [False, True])
def test_gpt_with_cudnn_attention_agrees_with_xla(standard_promotion, remat):
    config = GPTConfig(
        features=64, n_heads=2, context=32, feed_forward="dense", dtype="bfloat16", remat=remat
    )
    model = GPT(config, rngs=nnx.Rngs(0))
    tokens = jax.random.randint(jax.random.key(1), (4, 48), 0, 256)

    def loss(model):
        return jnp.mean(jnp.square(model(tokens, deterministic=True)))

    gradients = [nnx.jit(nnx.value_and_grad(loss))(model)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_attention, "unsupported_reason", lambda *_, **__: "not here")
        jax.clear_caches()
        gradients.append(nnx.jit(nnx.value_and_grad(loss))(model))
    jax.clear_caches()
    for a, b in zip(*map(jax.tree.leaves, gradients), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=0.05 * float(jnp.abs(b).max()))
