"""Every implementation matches the reference for drawn sizes and values, regardless of earlier calls and array placement."""

import contextlib
import dataclasses
import functools
import inspect
import itertools
from types import SimpleNamespace
from typing import Any

import drawn_cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn_cases import Spec
from hypothesis import given, settings, strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    rule,
    run_state_machine_as_test,
)
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from machine import needs_devices

import lutjax
from lutjax import optim as tables, testing

Arrays = dict[str, Any]
# Beartype draws random numbers, which strategies must not.
pytestmark = pytest.mark.usefixtures("without_typechecking")
OPS = tuple(drawn_cases.REPRESENTATIVES)


def compare(spec: Spec, implementation: str, context: str = "") -> None:
    with spec.context():
        for case in spec.cases():
            reference = drawn_cases.results(spec, case)
            drawn_cases.compare_implementation(spec, case, implementation, reference, context)


# ------------------------------------------------------------------------------------- values
FORMULATED = (
    "lookup", "weighted_lookup", "sparse_lookup", "lookup_attention", "lut_pair_attention",
    "bilinear_gates",
)  # fmt: skip
"""Ops with a different plain-JAX computation on accelerators."""


@pytest.mark.parametrize(("op", "formulation"), [
    ("lookup", "accelerator"),
    ("lookup_attention", "accelerator"),
    ("bilinear_gates", "accelerator"),
    ("lookup", "tpu"),
    ("sparse_lookup", "tpu"),
])  # fmt: skip
def test_formulations_for_accelerators(op, formulation, request):
    request.getfixturevalue(f"{formulation}_formulation")
    compare(drawn_cases.REPRESENTATIVES[op][0], "xla", formulation)


DRAWN = [(op, i, "") for op in OPS for i in drawn_cases.implemented(op)]
DRAWN += [(op, "xla", formulation) for op in FORMULATED for formulation in ("accelerator", "tpu")]


# ------------------------------------------------------------------------------------- updates of tables
UPDATED = (
    "lookup", "sparse_lookup", "weighted_lookup", "scored_lut", "lookup_attention",
    "lut_pair_attention",
)  # fmt: skip
RULES = (
    tables.SGD(weight_decay=0.25),
    tables.RowAdagrad(eps=2.0**-10),
    tables.RowMomentum(momentum=0.5),
    tables.RowAdam(b1=0.5, b2=0.75, eps=2.0**-10, weight_decay=0.25),
)


# ------------------------------------------------------------------------------------- sequences of calls
TRANSFORMATIONS = tuple(t for t in testing.TRANSFORMATIONS if t not in ("export", "none"))


def wanted(case: Any, names: tuple[str, ...]) -> Any:
    """Return a case differentiating only some arguments."""
    fixed = {n: a for n, a in case.differentiable.items() if n not in names}
    kept = {n: a for n, a in case.differentiable.items() if n in names}
    return dataclasses.replace(case, differentiable=kept, fixed={**case.fixed, **fixed})


@st.composite
def calls(draw: Any, op: str) -> tuple[Any, ...]:
    """Draw a size, a dtype, the differentiated arguments, and a transformation."""
    module = testing.cases_of(op)
    dtype = draw(
        st.sampled_from([d for d in ("float32", "bfloat16") if d in module.dtypes] or module.dtypes)
    )
    name = draw(st.sampled_from(sizes(op)))
    arguments = tuple(testing.case(op, name, dtype).differentiable)
    some = draw(st.lists(st.sampled_from(arguments), min_size=1, unique=True))
    return (
        op,
        name,
        dtype,
        tuple(n for n in arguments if n in some),
        draw(st.sampled_from(TRANSFORMATIONS)),
    )


@functools.cache
def sizes(op: str) -> tuple[str, ...]:
    return tuple(n for n in ("split", "primes") if n in testing.cases_of(op).sizes)


def check_call(
    op: str, name: str, dtype: str, arguments: tuple[str, ...], transformation: str
) -> None:
    if "shard_map" in transformation and name != "split":
        transformation = "jit"
    testing.check(wanted(testing.case(op, name, dtype), arguments), transformation=transformation)


def sequences(op: str) -> type[RuleBasedStateMachine]:
    """Return op call sequences, with pullbacks called later, perhaps twice."""

    class Sequences(RuleBasedStateMachine):
        waiting = Bundle("waiting")

        @initialize()
        def start(self) -> None:
            jax.clear_caches()  # as in a fresh process

        @rule(call=calls(op))
        def call(self, call: Any) -> None:
            check_call(*call)

        @rule(target=waiting, call=calls(op))
        def begin(self, call: Any) -> Any:
            return Late(*call[:4])

        @rule(late=waiting, how=st.sampled_from(PULLS))
        def pull(self, late: Any, how: str) -> None:
            late.pull(how)

    return Sequences


PULLS = ("plain", "jit", "closure", "vmap", "scan")


class Late:
    """A gradient with a finished forward pass and a later backward pass."""

    def __init__(self, op: str, name: str, dtype: str, arguments: tuple[str, ...]):
        self.case = wanted(testing.case(op, name, dtype), arguments)
        self.what = f"{self.case}, {arguments}"
        self.pulled = self._pullback(lutjax.kernel_registry.function(op))
        self.expected = self._pullback(getattr(lutjax.reference, op))

    def _pullback(self, op: Any) -> Any:
        case = self.case

        def f(d: Arrays) -> Arrays:
            outputs = case.call(op, {**d, **case.fixed})
            return {n: y for n, y in outputs.items() if jnp.issubdtype(y.dtype, jnp.floating)}

        return jax.jit(lambda d: jax.vjp(f, d))(case.differentiable)

    def pull(self, how: str) -> None:
        """Run the backward pass: at once, as a jitted function's argument or constant, or for several cotangents."""
        y, pull = self.pulled
        one = drawn_cases.cotangents(self.case, y)
        several = jax.tree.map(lambda a: jnp.stack([a, -a, 2 * a]), one)
        scan = lambda cts: jax.lax.scan(lambda _, ct: (None, pull(ct)[0]), None, cts)[1]  # noqa: E731
        actual = {
            "plain": lambda: pull(one)[0],
            "jit": lambda: jax.jit(lambda pull, ct: pull(ct)[0])(pull, one),
            "closure": lambda: jax.jit(lambda ct: pull(ct)[0])(one),
            "vmap": lambda: jax.vmap(lambda ct: pull(ct)[0])(several),
            "scan": lambda: scan(several),
        }[how]()
        expected = jax.jit(lambda pull, ct: pull(ct)[0])(self.expected[1], one)
        if how in ("vmap", "scan"):
            expected = jax.tree.map(lambda a: jnp.stack([a, -a, 2 * a]), expected)
        testing.assert_all_close(
            f"{self.what}, pulled {how}", {**y, **actual}, {**self.expected[0], **expected}, None
        )


DIFFERENTIABLE = tuple(op for op in OPS if "backward" in lutjax.kernel_registry.directions(op))


def test_pullbacks_belong_to_the_call_that_made_them():
    jax.clear_caches()
    op = "lookup"
    arguments = tuple(testing.case(op, "split").differentiable)
    first = Late(op, "split", "float32", arguments)
    one = Late(op, "split", "float32", arguments[-1:])
    other = Late(op, "primes", "bfloat16", arguments)
    check_call(op, "split", "float32", arguments, "vmap of grad")
    for how in PULLS[:2]:
        first.pull(how)
    one.pull("vmap")
    other.pull("jit")
    first.pull("plain")


# ------------------------------------------------------------------------------------- meshes
MESH = {"data": 2, "detectors": 2}
EVEN = {"batch", "detectors", "gates", "trees", "queries", "outputs", "inputs"}


def even(op: str) -> Spec:
    """Return an op spec with arrays divisible by four devices."""
    size = dict(testing.cases_of(op).sizes["split"])
    return drawn_cases.spec(op, kinds=("grid",), **{**size, **dict.fromkeys(set(size) & EVEN, 4)})


@st.composite
def placements(draw: Any, case: Any) -> dict[str, PartitionSpec]:
    """Draw the axis of each argument sharded by each mesh axis, if any."""
    result = {}
    for name, a in {**case.differentiable, **case.fixed}.items():
        spec: list[str | None] = [None] * np.ndim(a)
        for axis, size in MESH.items():
            free = [i for i, n in enumerate(np.shape(a)) if n and n % size == 0 and spec[i] is None]
            at = draw(st.sampled_from((*free[:1], *free, None)))
            if at is not None:
                spec[at] = axis
        result[name] = PartitionSpec(*spec)
    return result


KINDS = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}


@needs_devices(4)
@pytest.mark.parametrize(("op", "kind"), list(itertools.product(OPS, KINDS)))
def test_arguments_on_a_mesh(op, kind):
    mesh = Mesh(
        np.array(jax.devices()[:4]).reshape(*MESH.values()),
        tuple(MESH),
        axis_types=(KINDS[kind],) * len(MESH),
    )
    spec = even(op)
    case = next(spec.cases())
    outputs, cotangents = drawn_cases.results(spec, case)

    @settings(settings.get_profile("quick"), max_examples=2)
    @given(placements(case))
    def check(at):
        with jax.set_mesh(mesh) if kind == "explicit" else contextlib.nullcontext():
            put = {
                n: jax.device_put(a, NamedSharding(mesh, at[n]))
                for n, a in {**case.differentiable, **case.fixed}.items()
            }
            ct = drawn_cases.cotangents(case, outputs)
            differentiable = {n: put[n] for n in case.differentiable}
            fixed = {n: put[n] for n in case.fixed}

            @jax.jit
            def run(differentiable, fixed, ct):
                f = functools.partial(_run, case, fixed)
                y, pull = jax.vjp(f, differentiable)
                placed = (
                    {n: jax.device_put(a, jax.typeof(y[n]).sharding) for n, a in ct.items()}
                    if kind == "explicit"
                    else ct
                )
                return y, pull(placed)[0]

            y, result = (
                run(differentiable, fixed, ct) if ct else (_run(case, fixed, differentiable), {})
            )
        testing.assert_all_close(f"{spec} at {at}", y, {n: outputs[n] for n in y})
        testing.assert_all_close(f"{spec} at {at}", result, {n: cotangents[n] for n in result})

    check()


def _run(case: Any, fixed: Arrays, differentiable: Arrays) -> Arrays:
    outputs = case.call(lutjax.kernel_registry.function(case.op), {**differentiable, **fixed})
    with_gradient = {n: y for n, y in outputs.items() if jnp.issubdtype(y.dtype, jnp.floating)}
    return with_gradient or outputs


# ------------------------------------------------------------------------------------- all arguments
LEFT_OUT = {
    "implementation": "given by each test",
    "sequence_axis": "test_sharding.py",
    "accumulate": "test_fixed_point.py, test_integer_sums.py, test_integer_gates.py",
}


@pytest.mark.parametrize("op", OPS)
def test_specs_use_every_argument(op):
    """An argument missing from all specs fails here: add it to `drawn_cases.REPRESENTATIVES`."""
    signature, used = inspect.signature(lutjax.kernel_registry.function(op)), set()

    def note(*args: Any, **options: Any) -> Any:
        for name, value in signature.bind(*args, **options).arguments.items():
            default = signature.parameters[name].default
            if not (
                value is default or (isinstance(value, (bool, int, float)) and value == default)
            ):
                used.add(name)
        return SimpleNamespace(index=None, flip=None, margin=None)

    for spec in drawn_cases.REPRESENTATIVES[op]:
        for case in spec.cases():
            case.call(note, {**case.differentiable, **case.fixed})
    assert set(signature.parameters) - used - set(LEFT_OUT) == set()


class TestSlow:
    @pytest.mark.parametrize(("op", "implementation", "formulation"), DRAWN)
    def test_implementations_at_drawn_sizes(self, op, implementation, formulation, request):
        if formulation:
            request.getfixturevalue(f"{formulation}_formulation")

        @settings(settings.get_profile("quick"), max_examples=25)
        @given(drawn_cases.specs(op))
        def check(spec):
            compare(spec, implementation, formulation)

        check()
        jax.clear_caches()

    @pytest.mark.parametrize("op", UPDATED)
    def test_updates_of_drawn_tables(self, op):
        @settings(settings.get_profile("quick"), max_examples=20)
        @given(drawn_cases.specs(op), st.sampled_from(RULES))
        def check(spec, rule):
            with spec.context():
                case = next(spec.cases())
                testing.check_factored(case, "xla", transformation="jit")
                testing.check_update(case, "xla", rule)

        check()
        jax.clear_caches()

    @pytest.mark.parametrize("op", DIFFERENTIABLE)
    def test_no_call_depends_on_earlier_ones(self, op):
        quick = settings(settings.get_profile("quick"), max_examples=4, stateful_step_count=12)
        run_state_machine_as_test(sequences(op), settings=quick)
