"""In-place table updates: inputs for `native/src/rules.h`."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from lutjax.dispatch.contract import Step
from lutjax.values._fixed_point import FixedPoint
from lutjax.values._row_rules import SGD, RowAdagrad, RowAdam, RowMomentum, RowRule, RowState
from lutjax_cpu._call import kernel, scale

_RULES: tuple[type[RowRule], ...] = (SGD, RowAdagrad, RowMomentum, RowAdam)


def unsupported(rule: RowRule) -> str | None:
    """Return the reason that no kernel supports an update rule, or None."""
    if type(rule) in _RULES:
        return None
    return f"moves rows by {', '.join(r.__name__ for r in _RULES)}, not by {type(rule).__name__}"


def update(
    name: str,
    weights: jax.Array,
    step: Step,
    accumulate: FixedPoint | None,
    inputs: Sequence[jax.Array],
    *,
    integers: Sequence[int] = (),
    numbers: Sequence[float] = (),
) -> tuple[jax.Array, RowState]:
    """Run a kernel that calls ``move_rows`` from `native/src/rules.h`; return table and row state.

    Args:
      inputs, integers, numbers: kernel-specific arrays and options, ``update.inputs`` and so on in
        the kernel.
    """
    dtype = jnp.float32
    state, of_rule, of_numbers = options(step.rule, weights.shape[2], accumulate)
    arrays = [step.state[n] for n in state]
    factor = jnp.ones((), dtype) if step.factor is None else step.factor.astype(dtype)
    table, *moved = kernel(
        name,
        (weights, step.rate.astype(dtype), factor, *arrays, *inputs),
        [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (weights, *arrays)],
        integers=(*of_rule, *integers),
        numbers=(*of_numbers, *numbers),
        # The table and, after rate and factor, the arrays of its state.
        in_place={0: 0} | {3 + i: 1 + i for i in range(len(arrays))},
    )
    return table, dict(zip(state, moved, strict=True))


def options(
    rule: RowRule, n_outputs: int, accumulate: FixedPoint | None
) -> tuple[tuple[str, ...], tuple[int, ...], tuple[float, ...]]:
    """Return a rule's state names, integer options and float options."""
    state = tuple(rule.state_sizes(n_outputs))
    decays = {RowMomentum: ("momentum",), RowAdam: ("b1", "b2")}.get(type(rule), ())
    decay, second_decay = (*(getattr(rule, n) for n in decays), 0.0, 0.0)[:2]
    return (
        state,
        (_RULES.index(type(rule)), len(state), accumulate is not None),
        (rule.weight_decay, getattr(rule, "eps", 0.0), decay, second_decay, scale(accumulate)),
    )
