"""No result depends on what was called before: sequences of calls, each compared with its definition."""

from typing import Any

import hypothesis.strategies as st
import jax
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from properties.calls import OPS, Call, Late, check
from properties.drawn_calls import calls, kinds as kinds_of

PULLS = ("plain", "jit", "closure", "vmap", "scan")


def sequences(op: str) -> type[RuleBasedStateMachine]:
    """Sequences of calls of an op; some pullbacks are called later, and perhaps twice."""

    class Sequences(RuleBasedStateMachine):
        kinds, waiting = Bundle("kinds"), Bundle("waiting")

        def __init__(self) -> None:
            super().__init__()
            jax.clear_caches()  # each sequence starts as a fresh process does
            self.functions: dict[str, Any] = {}

        @initialize(target=kinds, kind=kinds_of(op))
        def start(self, kind: Call) -> Call:
            return kind

        @precondition(lambda self: len(self.functions) > 3)
        @rule(target=kinds, kind=kinds_of(op))
        def another_kind(self, kind: Call) -> Call:
            return kind

        @rule(call=kinds.flatmap(calls))
        def call(self, call: Call) -> None:
            check(call, self.functions)

        @rule(call=kinds.flatmap(calls))
        def call_more(self, call: Call) -> None:
            check(call, self.functions)

        @rule(target=waiting, call=kinds.flatmap(late_calls))
        def begin(self, call: Call) -> Late:
            return Late(call)

        @rule(late=waiting, how=st.sampled_from(PULLS), seed=st.integers(0, 1))
        def pull(self, late: Late, how: str, seed: int) -> None:
            late.pull(how, seed)

    return Sequences


def late_calls(kind: Call) -> st.SearchStrategy[Call]:
    return calls(kind, late=True)


def profile(examples: int, steps: int) -> settings:
    """Bounded and the same in every run."""
    return settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        derandomize=True,
        database=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )


@pytest.mark.parametrize("op", OPS)
def test_no_call_depends_on_earlier_ones(op):
    run_state_machine_as_test(sequences(op), settings=profile(2, 14))


@pytest.mark.slow
@pytest.mark.parametrize("op", OPS)
def test_no_call_depends_on_earlier_ones_in_long_sequences(op):
    run_state_machine_as_test(sequences(op), settings=profile(60, 30))
