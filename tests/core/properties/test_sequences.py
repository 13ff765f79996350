"""No result depends on what was called before: sequences of calls, each compared with its definition."""

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import slow, slow_except
from hypothesis import given
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

import lutjax
from properties.bounds import bounded
from properties.calls import OPS, Call, Late, Map, arguments, check, check_factored, function
from properties.drawn_calls import calls, kinds as kinds_of, names
from properties.layers import LAYERS, NETS
from properties.marked_lookup import MARK
from properties.members import FINE

# Long to compile, where `lookup_attention` stays.
COMPOSED = ("lut_pair_attention", "lut_attention")
# Those of whose kind another one stays: `scored_lut`, `lut` and `sparse_lookup`, `soft_lut`, `bilinear_gates`.
RELATIVES = ("margins", "sparse_lut", "binary_lut", "logic_gates")
# Those whose rules are of the same parts: `lut`, `lookup`, `bilinear_gates` and `lookup_attention` stay, and in the longest
# test the two in the middle alone.
OF_THE_SAME_PARTS = (
    "scored_lut", "soft_lut", "sparse_lookup", "weighted_lookup", "detect", "detect_signs", "lut_attention", "logic_trees", "gate_network",
    "lut_at_places", "conv_lut", "cell_total_variation", "gate_coefficients", "quantize_tables", "packed_lut", "pack_bits", "unpack_bits",
    *LAYERS, *NETS,
)  # fmt: skip
PULLS = ("plain", "jit", "closure", "vmap", "scan")


def sequences(*members: str) -> type[RuleBasedStateMachine]:
    """Sequences of calls of members; some pullbacks are called later, and perhaps twice."""
    drawn = st.sampled_from(members).flatmap(kinds_of)

    class Sequences(RuleBasedStateMachine):
        kinds, waiting = Bundle("kinds"), Bundle("waiting")

        def __init__(self) -> None:
            super().__init__()
            jax.clear_caches()  # each sequence starts as a fresh process does
            self.functions: dict[str, Any] = {}

        @initialize(target=kinds, kind=drawn)
        def start(self, kind: Call) -> Call:
            return kind

        @precondition(lambda self: len(self.functions) > 3)
        @rule(target=kinds, kind=drawn)
        def another_kind(self, kind: Call) -> Call:
            return kind

        @rule(call=kinds.flatmap(calls))
        def call(self, call: Call) -> None:
            check(call, self.functions)

        @rule(call=kinds.flatmap(calls))
        def call_more(self, call: Call) -> None:
            check(call, self.functions)

        @precondition(lambda self: any(OPS[op].factored for op in members))
        @rule(kind=kinds, seed=st.integers(0, 2))
        def call_for_factors(self, kind: Call, seed: int) -> None:
            of = OPS[kind.op]
            # A table that a layer casts first is an array of its own, with a dense gradient; one whose keys are pooled is read twice.
            casts = kind.options.get("dtype") not in (None, kind.dtype)
            as_it_is = not casts and not kind.options.get("pool")
            if of.factored and as_it_is and not kind.contexts and not of.constant(kind.options):
                check_factored(dataclasses.replace(kind, seed=seed))

        @precondition(lambda self: all(OPS[op].differentiable for op in members))
        @rule(target=waiting, call=kinds.flatmap(late_calls))
        def begin(self, call: Call) -> Late:
            return Late(call)

        @rule(late=waiting, how=st.sampled_from(PULLS), seed=st.integers(0, 1))
        def pull(self, late: Late, how: str, seed: int) -> None:
            late.pull(how, seed)

    return Sequences


def late_calls(kind: Call) -> st.SearchStrategy[Call]:
    return calls(kind, late=True)


@pytest.mark.parametrize(
    "op",
    slow_except(OPS, "scale_gradient"),
)
def test_no_call_depends_on_earlier_ones(op):
    run_state_machine_as_test(sequences(op), settings=bounded(2, 10))


@pytest.mark.slow
@pytest.mark.parametrize("op", OPS)
def test_no_call_depends_on_earlier_ones_in_long_sequences(op):
    of_ops = op not in (*LAYERS, *NETS)  # layers are made of ops, and take longer to compile
    run_state_machine_as_test(sequences(op), settings=bounded(40, 40) if of_ops else bounded(10, 20))


# ------------------------------------------------------------------------------------- all, one, all in a fresh context
IN_CONTEXT: dict[str, Callable[[Call], None]] = {
    "vmap": lambda call: check(dataclasses.replace(call, inner=(Map("vmap", {call.wanted[0]: 0}),))),
    "scan": lambda call: check(dataclasses.replace(call, inner=(Map("scan", {call.wanted[0]: 0}),))),
    "checkpoint": lambda call: check(dataclasses.replace(call, inner=("remat",))),
    "cond": lambda call: check(dataclasses.replace(call, inner=("cond",))),
    "shard_map": lambda call: check(
        dataclasses.replace(call, inner=(Map("shard_map", {call.wanted[0]: 0}),))
    ),
    "vmap of the gradient": lambda call: check(
        dataclasses.replace(call, outer=(Map("vmap", {call.wanted[0]: 0}),))
    ),
    "a scan whose carry has a gradient only from its second step on": lambda call: check(
        dataclasses.replace(call, steps=2, wanted=call.wanted[1:])
    ),
}
ALL_AT_ONCE = {
    op: Call(op, wanted=tuple(n for n in of.differentiable if n in names(Call(op)))) for op, of in OPS.items()
}
SEVERAL = [op for op, call in ALL_AT_ONCE.items() if len(call.wanted) > 1]
OF_REFERENCE = [op for op in SEVERAL if OPS[op].reference]
FAST = ("lut",)  # in every context; in that of vmap all ops but those whose relatives are there
CASES = [
    (context, op)
    if op in FAST
    or (
        context == "vmap"
        and op not in ("lookup_attention", "lut_pair_attention", *RELATIVES, *OF_THE_SAME_PARTS)
    )
    else slow(context, op)
    for context in IN_CONTEXT
    for op in SEVERAL
    if OPS[op].recurrent or not context.startswith("a scan whose carry")
]


@pytest.mark.parametrize(
    ("context", "op"), slow_except(CASES, "vmap-lookup", "vmap-bilinear_gates", "scan-lut")
)
def test_gradients_to_all_after_those_to_one(context, op):
    every = ALL_AT_ONCE[op]
    jax.clear_caches()
    check(every)
    check(dataclasses.replace(every, wanted=every.wanted[-1:]))
    IN_CONTEXT[context](every)


@pytest.mark.parametrize("op", [op if op in FAST else slow(op) for op in SEVERAL])
def test_pullbacks_are_of_the_call_that_made_them(op):
    """Whatever was called between, how often they are called, and where."""
    every = ALL_AT_ONCE[op]
    jax.clear_caches()
    first = Late(every)
    one = Late(dataclasses.replace(every, wanted=every.wanted[-1:], seed=1))
    other = Late(dataclasses.replace(every, size="b", dtype="bfloat16"))
    check(dataclasses.replace(every, wanted=every.wanted[:1]))
    for how in PULLS:
        first.pull(how)
    one.pull("jit")
    other.pull("plain")
    first.pull("plain", seed=1)


@pytest.mark.slow
def test_other_shapes_bits_and_dtypes_between_two_traces():
    jax.clear_caches()
    call = ALL_AT_ONCE["lut"]
    functions: dict[str, Any] = {}
    mapped = dataclasses.replace(call, inner=(Map("vmap", {"x": 0}),))
    for between in (
        dataclasses.replace(call, size="b"),
        dataclasses.replace(call, dtype="bfloat16"),
        dataclasses.replace(call, dtype="float64", contexts=("x64",)),
        dataclasses.replace(call, inner=(Map("shard_map", {"x": 0}),)),
    ):
        check(between, functions)
        check(mapped, functions)


# ------------------------------------------------------------------------------------- what only some arguments have
@pytest.mark.parametrize("inner", [(), ("jit",), ("remat",), ("cond",)], ids=str)
@pytest.mark.parametrize("reference", [False, slow(True)])
def test_a_mapped_factor_of_a_gradient_that_is_not_mapped(reference, inner):
    mapped = Map("vmap", {"factor": 0})
    call = Call("scale_gradient", wanted=("x",), inner=(*inner, mapped), reference=reference)
    check(call)
    check(dataclasses.replace(call, inner=(mapped, *inner)))


@pytest.mark.slow
@pytest.mark.parametrize("op", OF_REFERENCE)
def test_the_reference_with_one_mapped_argument(op):
    every = dataclasses.replace(ALL_AT_ONCE[op], reference=True)
    for name in every.wanted:
        for inner in (("jit", Map("vmap", {name: 0})), (Map("vmap", {name: 0}), "remat")):
            check(dataclasses.replace(every, inner=inner))


# ------------------------------------------------------------------------------------- modes that are not supported
@pytest.mark.parametrize("op", ["lut", "binary_lut"])
def test_forward_mode_where_no_tangent_reaches_the_op(op):
    call = ALL_AT_ONCE[op]
    f, a = function(call), {n: jnp.asarray(v) for n, v in arguments(call).items()}
    expected, _ = f(a)

    def product(z: jax.Array) -> jax.Array:
        y, _ = f(jax.lax.stop_gradient({**a, "x": a["x"] + 0 * z}))
        return z * y

    y, tangent = jax.jvp(product, (jnp.float32(3),), (jnp.float32(1),))
    np.testing.assert_array_equal(tangent, expected)
    np.testing.assert_array_equal(jax.linearize(product, jnp.float32(3))[1](jnp.float32(2)), 2 * expected)
    np.testing.assert_array_equal(y, 3 * expected)


# ------------------------------------------------------------------------------------- implementations
@pytest.fixture
def marked():
    """Calls that ask for Pallas run `marked_lookup`; nobody else does."""
    registry = lutjax.kernel_registry
    registry.register("lookup", "pallas", "cpu", "properties.marked_lookup", priority=-1)
    yield
    registry.unregister("lookup", "pallas", "cpu")
    jax.clear_caches()


CHOICES: tuple[Any, ...] = (None, "xla", "pallas", {"lookup": "pallas"}, ("pallas", "xla"))
WEIGHTS = np.ones((1, 2, 1), np.float32)


def look_up(weights: Any) -> jax.Array:
    none = jnp.zeros((1, 1), jnp.int32)
    return lutjax.lookup(weights, lutjax.Detection(none, none, none.astype(jnp.float32), 1))[0, 0]


JITTED = jax.jit(look_up)


def marks() -> list[float]:
    """Excess of two calls over the right number; one of them is jitted."""
    return [float(f(WEIGHTS)) - 1 for f in (look_up, JITTED)]


def expected_marks(choice: Any) -> list[float]:
    return [MARK if "pallas" in str(choice) else 0.0] * 2


def in_turns(choices: list[Any], turns: list[int]) -> list[list[float]]:
    """Coroutines that each call within a block of their own, in turns."""

    async def one(choice: Any, turn: asyncio.Queue[None], done: asyncio.Queue[None]) -> list[float]:
        async def next_turn() -> None:
            done.put_nowait(None)
            await turn.get()

        found: list[float] = []
        await turn.get()
        with contextlib.nullcontext() if choice is None else lutjax.use_implementation(choice):
            await next_turn()
            found += marks()
            await next_turn()
            found += marks()
        await next_turn()
        assert marks() == [0.0, 0.0], "after the block"
        done.put_nowait(None)
        return found

    async def every() -> list[list[float]]:
        of_turns: list[asyncio.Queue[None]] = [asyncio.Queue() for _ in choices]
        done: asyncio.Queue[None] = asyncio.Queue()
        tasks = [
            asyncio.create_task(one(choice, turn, done))
            for choice, turn in zip(choices, of_turns, strict=True)
        ]
        for i in turns:
            of_turns[i].put_nowait(None)
            waiting = asyncio.create_task(done.get())
            await asyncio.wait([waiting, tasks[i]], return_when=asyncio.FIRST_COMPLETED)
            if tasks[i].done():
                waiting.cancel()
                tasks[i].result()  # raises what it raised
        return await asyncio.gather(*tasks)

    return asyncio.run(every())


@st.composite
def turns_of(draw: Any) -> tuple[list[Any], list[int]]:
    choices = draw(st.lists(st.sampled_from(CHOICES), min_size=2, max_size=3))
    return choices, draw(st.permutations([i for i in range(len(choices)) for _ in range(4)]))


@bounded(20, 1)
@given(turns_of())
def _coroutines(drawn: tuple[list[Any], list[int]]) -> None:
    choices, turns = drawn
    assert in_turns(choices, turns) == [2 * expected_marks(c) for c in choices]


@pytest.mark.usefixtures("marked")
def test_coroutines_do_not_see_each_others_implementation():
    _coroutines()


@pytest.mark.usefixtures("marked")
def test_threads_do_not_see_each_others_implementation():
    barrier = threading.Barrier(len(CHOICES))

    def one(choice: Any) -> list[float]:
        with contextlib.nullcontext() if choice is None else lutjax.use_implementation(choice):
            barrier.wait()
            found = marks()
            barrier.wait()
        return found

    with concurrent.futures.ThreadPoolExecutor(len(CHOICES)) as pool:
        assert list(pool.map(one, CHOICES)) == [expected_marks(c) for c in CHOICES]


# ------------------------------------------------------------------------------------- threads, processes
def check_in_thread(call):
    """Check a call, again where JAX has interrupted it.

    While one thread traces the forward rule of a `jax.custom_vjp` for another set of arguments, JAX has no structure of its
    residuals, and a pullback in another thread raises its StoreException. That is so of any function with such a rule under
    `jax.jit`; results are right or there are none.
    """
    for _ in range(100):
        try:
            return check(call)
        except Exception as error:
            if type(error).__name__ != "StoreException":
                raise
    raise AssertionError("interrupted 100 times")


@pytest.mark.slow
def test_gradients_of_several_threads_at_once():
    """Traces of one op that overlap."""
    jax.clear_caches()
    every = ALL_AT_ONCE["lut"]
    calls = [
        every,
        dataclasses.replace(every, wanted=("weights",)),
        dataclasses.replace(every, wanted=("x",), inner=("remat",)),
        dataclasses.replace(every, inner=(Map("vmap", {"x": 0}),)),
    ]
    with concurrent.futures.ThreadPoolExecutor(len(calls)) as pool:
        for _ in pool.map(check_in_thread, 2 * calls):
            pass


@pytest.mark.slow
def test_a_printed_call_can_be_replayed_in_a_process_of_its_own():
    call = dataclasses.replace(
        ALL_AT_ONCE["lookup_attention"],
        options={"accumulate": FINE, "window": 2},
        inner=(Map("vmap", {"query.margin": 1}),),
    )
    replayed = subprocess.run(
        [sys.executable, "-m", "properties.calls", repr(call), repr(call)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert replayed.stdout == 2 * f"right: {call!r}\n"
