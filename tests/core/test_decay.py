"""Decay at every step: tables with occasional row reads, compared with steps decaying every row."""

import dataclasses
from typing import NamedTuple

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

import lutjax
from lutjax import optim as tables
from lutjax.testing import assert_close

T, R, OUTPUTS, WAYS, BATCH = 2, 5, 3, 2, 3
RULES = (
    tables.SGD(weight_decay=0.5),
    tables.RowAdagrad(weight_decay=0.25),
    tables.RowMomentum(momentum=0.5, weight_decay=0.5),
    tables.RowAdam(weight_decay=0.01),
    tables.RowAdam(b1=0.5, weight_decay=0.25),
)


class Steps(NamedTuple):
    rule: tables.RowRule  # with ``decay="read"``
    rates: tuple[float, ...]  # of each step
    factors: tuple[float, float] | None  # of each table's rate
    rows: int  # how many rows the steps read; reads differ from step to step
    dtype: str
    dense: bool  # whether gradients are arrays
    ahead: bool  # whether rows are made current before they are read
    seed: int


def steps():
    rates = st.lists(st.sampled_from((0.0, 0.125, 0.5, 1.0, 2.0)), min_size=1, max_size=6).map(
        tuple
    )
    return st.builds(
        Steps,
        st.sampled_from(RULES),
        rates,
        st.sampled_from((None, (1.0, 0.5))),
        st.integers(1, R),
        st.sampled_from(("float32", "float64")),
        st.booleans(),
        st.booleans(),
        st.integers(0, 9),
    )


def decay_everywhere(of: Steps, table, reads, cotangents):
    """Return the table and its state after all steps: read rows follow their update rule, and other rows only lose their share.

    The loss is half the squared output, if rows are current, plus its product with the step's cotangents.
    """
    factors = np.ones((T, 1, 1)) if of.factors is None else np.reshape(of.factors, (T, 1, 1))
    rows, state = jnp.asarray(table), of.rule.init(jnp.asarray(table))
    for rate, index, dy in zip(of.rates, reads, cotangents, strict=True):
        gradient, touched = np.zeros_like(table), np.zeros((T, R, 1), bool)
        for b in range(BATCH):
            at = np.arange(T)[:, None], index[b]
            np.add.at(gradient, at, (np.asarray(rows)[at].sum((0, 1)) if of.ahead else 0) + dy[b])
            touched[at] = True
        rate = jnp.asarray(rate * factors, table.dtype)
        moved, after = of.rule.step(rows, jnp.asarray(gradient), state, rate)
        rows = jnp.where(
            touched, moved, rows * (1 - rate * jnp.asarray(of.rule.weight_decay, table.dtype))
        )
        state = {name: jnp.where(touched, a, state[name]) for name, a in after.items()}
    return rows, state


def fits(of: Steps):
    return max(of.rates) * of.rule.weight_decay < 1


@pytest.mark.parametrize("ahead", [False, True])
def test_rows_that_are_skipped_have_the_decay_of_every_step(ahead):
    rates = (0.5, 0.0, 1.0, 0.125, 1.0)
    check(
        Steps(
            tables.RowAdagrad(weight_decay=0.25), rates, (1.0, 0.5), 2, "float32", False, ahead, 1
        )
    )


@pytest.mark.slow
@settings(settings.get_profile("quick"), max_examples=150)
@given(steps().filter(fits))
def test_many_steps(of):
    check(of)


def check(of: Steps):
    with jax.enable_x64(of.dtype == "float64"):
        rng = np.random.default_rng(of.seed)
        table = rng.normal(size=(T, R, OUTPUTS)).astype(of.dtype)
        reads = rng.integers(0, of.rows, (len(of.rates), BATCH, T, WAYS), np.int32)
        reads += np.arange(len(of.rates), dtype=np.int32)[:, None, None, None] * rng.integers(0, 2)
        reads = np.minimum(reads, R - 1)
        cotangents = rng.normal(size=(len(of.rates), BATCH, OUTPUTS)).astype(of.dtype)
        rule = dataclasses.replace(of.rule, decay="every")
        optimizer = tables.Optimizer(
            rule,
            lambda step: jnp.asarray(of.rates, of.dtype)[step],
            rates={} if of.factors is None else {"table": np.array(of.factors)},
            tables={"table"},
        )

        def loss(params, index, dy):
            y = lutjax.weighted_lookup(params["table"], index, jnp.ones(index.shape, of.dtype))
            return jnp.sum(y * dy) + (jnp.sum(y**2) / 2 if of.ahead else 0)

        gradient = jax.grad(loss) if of.dense else lambda *a: tables.value_and_grad(loss)(*a)[1]

        @jax.jit
        def step(params, state, index, dy):
            if of.ahead:
                rows = {"table": jnp.moveaxis(index, -1, 0)}
                params, state = optimizer.current(params, state, rows)
            return optimizer.apply(params, gradient(params, index, dy), state)

        params = {"table": jnp.asarray(table)}
        state = optimizer.init(params)
        for index, dy in zip(reads, cotangents, strict=True):
            params, state = step(params, state, index, dy)
        for _ in range(2):  # the second time nothing is left to be taken
            params, state = jax.jit(optimizer.current)(params, state)
            expected, of_rows = decay_everywhere(of, table, reads, cotangents)
            assert_close(f"{of}: table", params["table"], expected, 2e-5)
            for name, a in of_rows.items():
                assert_close(f"{of}: {name}", state.rows["table"][name], a, 2e-5)


def test_a_step_that_takes_all_of_a_row():
    rule = tables.SGD(weight_decay=1.0, decay="every")
    for rate in (1.0, 3.0):
        table, state = jnp.ones((1, 2, 1)), rule.init(jnp.ones((1, 2, 1)))
        for _ in range(3):
            state = rule.next_state(state, {"decayed": state["decayed"]}, jnp.asarray(rate))
        table, state = rule.current(table, state)
        assert not table.any()
        assert all(np.isfinite(a).all() for a in state.values())


def test_small_shares_are_not_lost_in_their_sum():
    rule = tables.SGD(weight_decay=1.0, decay="every")

    @jax.jit
    def skipped(state, rate, count):
        one = lambda _, state: rule.next_state(state, {"decayed": state["decayed"]}, rate)  # noqa: E731
        return jax.lax.fori_loop(0, count, one, state)

    state = skipped(rule.init(jnp.ones((1, 1, 1))), 0.5, 20)
    _, state = rule.current(jnp.ones((1, 1, 1)), state)
    left, _ = rule.current(jnp.ones((1, 1, 1)), skipped(state, 1e-7, 10**6))
    np.testing.assert_allclose(left.item(), np.exp(-0.1), rtol=2e-6)
