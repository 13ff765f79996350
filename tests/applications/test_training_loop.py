"""Training loop: hooks, signals, optimizers, and descriptions for the selected implementations."""

import signal
from contextlib import suppress
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lutjax.dispatch.registry import (
    Backend,
    Declaration,
    KernelSpec,
    Platform,
    devices_of,
    kernel_registry,
)
from lutjax.training import kernels, loop, optimizers


def counting_step(state, number, data):
    return {"sum": state["sum"] + data[number]}, number.astype(jnp.float32)


def new_state():
    return {"sum": jnp.float32(0)}


DATA = np.arange(100, dtype=np.float32)


def test_hooks_are_called_in_order_at_their_intervals_and_at_the_end():
    calls = []
    hooks = [
        loop.Hook(4, lambda n, loss, s: calls.append(("log", n, loss))),
        loop.Hook(6, lambda n, loss, s: calls.append(("test", n, loss))),
    ]
    state, done = loop.run(
        loop.Repeated(counting_step, DATA), new_state(), first=0, steps=9, hooks=hooks
    )
    assert done == 9
    assert state["sum"] == sum(range(9))
    assert calls == [
        ("log", 4, 1.5),
        ("test", 6, 4.5),
        ("log", 8, 6.5),
        ("log", 9, 8.0),
        ("test", 9, 8.0),
    ]


def test_stop_and_go_on():
    advance, calls = loop.Repeated(counting_step, DATA), []
    hooks = [loop.Hook(4, lambda n, loss, s: calls.append((n, loss)))]
    state, done = loop.run(
        advance, new_state(), first=0, steps=9, hooks=hooks, stopped=lambda: bool(calls)
    )
    assert done == 4
    state, done = loop.run(advance, state, first=done, steps=9, hooks=hooks)
    assert calls == [(4, 1.5), (8, 5.5), (9, 8.0)]
    assert state["sum"] == sum(range(9))


@pytest.mark.parametrize("call", [0.0, 1e-9, 60.0])
def test_losses_of_several_intervals_come_from_one_call(monkeypatch, call):
    monkeypatch.setattr(loop, "CALL", call)
    advance, told, seen = loop.Repeated(counting_step, DATA), [], []
    hook = loop.Hook(30, lambda n, loss, s: seen.append((n, loss, float(s["sum"]))))
    options = {"first": 2, "steps": 97, "log": loop.Log(4, told.append), "hooks": [hook]}
    state, done = loop.run(advance, {"sum": jnp.float32(1)}, **options)
    ends = [*range(4, 97, 4), 97]
    starts = {end: max(n for n in (2, *ends, 30, 60, 90) if n < end) for end in (*ends, 30, 60, 90)}
    means = {end: np.mean(np.arange(start, end)) for end, start in starts.items()}
    assert [point for points in told for point in points] == [(end, means[end]) for end in ends]
    assert seen == [(end, means[end], 1 + sum(range(2, end))) for end in (30, 60, 90, 97)]
    assert done == 97
    assert state["sum"] == 1 + sum(range(2, 97))
    assert advance.programs == 1
    assert (
        len(told) == len(ends) if call < 1 else len(told) == 5
    )  # the first call, and one until each hook
    assert all(points for points in told)


def test_a_call_is_as_long_as_the_slowest_process_lets_it():
    told = []
    loop.run(
        loop.Repeated(counting_step, DATA),
        new_state(),
        first=0,
        steps=50,
        log=loop.Log(2, told.append),
        slowest=lambda seconds: (
            loop.CALL / 5 if told else 60.0
        ),  # 5 steps take as long as a call should
    )
    assert [len(points) for points in told][:4] == [1, 1, 5, 25 - 7]


def test_loss_that_is_not_finite_reaches_no_hook():
    def step(state, number, data):
        return state, jnp.where(number == 5, jnp.nan, 1.0)

    calls = []
    told, hook = [], loop.Hook(2, lambda n, loss, s: calls.append(n))
    for options in (
        {"hooks": [hook]},
        {"log": loop.Log(2, told.extend), "slowest": lambda seconds: 1e-9},
    ):
        with pytest.raises(FloatingPointError, match="the training loss is nan after 6 steps"):
            loop.run(loop.Repeated(step), new_state(), first=0, steps=9, **options)
    assert calls == [2, 4]
    assert told == [(2, 1), (4, 1)]


def test_first_signal_asks_to_stop_and_the_second_interrupts():
    before = signal.getsignal(signal.SIGINT)
    with loop.stop_on_signal() as stopped:
        assert not stopped()
        signal.raise_signal(signal.SIGINT)
        assert stopped()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_schedules():
    def rates(schedule, **options):
        rate = optimizers.learning_rate(
            schedule, **{"rate": 2.0, "steps": 100, "batch_size": 10, **options}
        )
        return np.asarray([rate(jnp.int32(t)) for t in range(100)])

    constant = rates("constant", warmup=0.1, cooldown=0.5)
    np.testing.assert_allclose(
        constant[[0, 4, 9, 49, 50, 75, 99]], [0.2, 1, 2, 2, 2, 1, 0.04], rtol=1e-6
    )
    t = np.arange(100) * 10
    published = 2 * np.minimum(1 / np.sqrt(1 + t), t / 4000 / np.sqrt(4000))
    np.testing.assert_allclose(rates("published", warmup=0.0, cooldown=0.0), published, rtol=1e-5)
    with pytest.raises(ValueError, match="known ones are constant, published"):
        rates("linear", warmup=0.0, cooldown=0.0)


@pytest.mark.parametrize("name", optimizers.OPTIMIZERS)
def test_every_optimizer_descends_and_leaves_rows_without_gradient(name):
    optimizer = optimizers.optimizer(name, 0.05)
    target = {"rows": jnp.asarray([[1.0, 2.0], [3.0, 4.0], [0.0, 0.0]]), "scalar": jnp.asarray(2.0)}
    params = jax.tree.map(jnp.zeros_like, target)
    state = optimizer.init(params)
    for _ in range(20):
        gradients = jax.tree.map(jnp.subtract, params, target)
        with jax.numpy_dtype_promotion("standard"):  # optax's Adam needs it
            updates, state = optimizer.update(gradients, state, params)
        params = optax.apply_updates(params, updates)
    for name in target:
        assert jnp.sum((params[name] - target[name]) ** 2) < 0.8 * jnp.sum(target[name] ** 2)
    assert (params["rows"][2] == 0).all()
    with pytest.raises(ValueError, match="known ones are sgd, momentum"):
        optimizers.optimizer("lion", 0.1)


def test_row_adagrad_scales_rows():
    scale = optimizers.scale_by_row_rss()
    gradient = jnp.asarray([[3.0, 4.0], [0.0, 0.0]])
    updates, state = scale.update(gradient, scale.init(gradient))
    np.testing.assert_allclose(updates, [[3 / 12.5**0.5, 4 / 12.5**0.5], [0, 0]], rtol=1e-6)
    assert state.sum_of_squares.shape == (2, 1)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_no_signal_is_lost(number):
    def swallow():
        with suppress(KeyboardInterrupt):
            signal.raise_signal(number)

    def change():
        try:
            signal.raise_signal(number)
        except KeyboardInterrupt:
            raise RuntimeError("INTERNAL: callback") from None

    for block in (swallow, change, lambda: signal.raise_signal(number)):
        before = signal.getsignal(number)
        with loop.stop_on_signal() as stop:
            with pytest.raises(KeyboardInterrupt), stop.allow_interrupt():
                block()
            assert stop()
            with pytest.raises(KeyboardInterrupt), stop.allow_interrupt():
                pytest.fail("the block begins")
        assert signal.getsignal(number) is before
    with loop.stop_on_signal() as stop:
        with pytest.raises(RuntimeError), stop.allow_interrupt():
            raise RuntimeError("no signal")
        signal.raise_signal(number)
        assert stop()
        if number != signal.SIGINT:
            signal.raise_signal(number)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_a_hangup_that_is_ignored_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with loop.stop_on_signal() as stop:
            signal.raise_signal(signal.SIGHUP)
            assert not stop()
    finally:
        signal.signal(signal.SIGHUP, before)


def spec(platform, backend, **options):
    options["declared"] = Declaration(directions=("forward", "backward"))
    return KernelSpec("an op", Platform(platform), Backend(backend), "somewhere", **options)


NATIVE = spec("native", "cpu", about=lambda: "for this CPU")
TRITON = spec("triton", "gpu")
PLAIN = spec("xla", "any")
X = jax.ShapeDtypeStruct((2, 3), "float32")
ANCHORS = jax.ShapeDtypeStruct((1, 2, 2), "int32")
ARGUMENTS = {"detect_signs": (X,), "detect": (X, ANCHORS), "margins": (X, ANCHORS)}


@pytest.fixture
def words(monkeypatch):
    """Return the description for op calls with these candidates."""

    def make(of_op):
        calls = [made for op in of_op for made in kernel_registry.calls_of(op, *ARGUMENTS[op])]
        registry = SimpleNamespace(considered=lambda made, device: of_op[made.call.op])
        monkeypatch.setattr(kernels, "kernel_registry", registry)
        return kernels.describe_implementations(calls, devices_of([jnp.ones(1)])[0])

    return make


def test_each_op_is_said_once_with_what_runs_it(words):
    native = {
        "forward": [(NATIVE, None), (PLAIN, None)],
        "backward": [(NATIVE, None), (PLAIN, None)],
    }
    assert words({"detect": native, "margins": native, "detect_signs": native}) == [
        "kernels: native code, for this CPU, for detect, margins and detect_signs"
    ]
    assert words({}) == []


def test_of_plain_jax_it_is_said_why(words):
    half = [
        (NATIVE, "has no float16"),
        (TRITON, "runs on gpu, the call runs on cpu (cpu)"),
        (PLAIN, None),
    ]
    missing = [(NATIVE, "is not installed"), (PLAIN, None)]
    result = words(
        {
            "detect": {"forward": half, "backward": half},
            "margins": {"forward": missing},
            "detect_signs": {"forward": half},
        }
    )
    assert result == [
        "kernels: plain JAX for detect, margins and detect_signs",
        "no native code for detect and detect_signs: has no float16",
        "no native code for margins: is not installed",
    ]


def test_the_choice_is_that_of_the_registry():
    x = jnp.ones((2, 3))
    made = kernel_registry.calls_of("detect_signs", x)
    device = devices_of([x])[0]
    with kernel_registry.use_implementation("xla"):
        first, *_ = kernels.describe_implementations(made, device)
    assert first == "kernels: plain JAX for detect_signs"
    chosen = kernel_registry.resolve("detect_signs", x)
    assert (chosen.platform == "native") == kernels.describe_implementations(made, device)[
        0
    ].startswith("kernels: native code, ")
