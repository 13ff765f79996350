"""In-place table update by a sparse gradient."""

import dataclasses
import functools
import importlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Float

from lutjax import _compat, _meshes
from lutjax._typing import Array, Scalar
from lutjax.dispatch._leading_axes import fold_call
from lutjax.dispatch._transforms import run_update
from lutjax.dispatch.contract import Call, Step
from lutjax.dispatch.registry import Device, Implementation, devices_of, kernel_registry
from lutjax.ops import _checks
from lutjax.tables.gradient import TableGradient
from lutjax.values._dtypes import accumulator
from lutjax.values._row_rules import SGD, RowRule, RowState

Rates = Float[Array, " _"] | Float[Array, "#detectors #rows #outputs"]
"""Learning rate factors for each table or each edge."""


def update_table(
    weights: Float[Array, "detectors rows outputs"] | Float[Array, " edges"],
    gradient: TableGradient,
    rate: Scalar,
    rule: RowRule | None = None,
    state: RowState | None = None,
    *,
    rates: Rates | None = None,
    implementation: Implementation = None,
) -> tuple[jax.Array, RowState]:
    """Return a table after one optimizer step that reads and writes only rows that were looked up.

    Under `jax.jit` with a donated table the step happens in the table's own memory. It runs the
    kernels of the lookup's op, in their direction ``update``.

    Definition; ``touched`` ``[T, R, 1]`` is the mask of accessed rows::

        rates = 1 if rates is None else rates[:, None, None] if rates.ndim == 1 else rates
        moved, moved_state = rule.step(weights, gradient.to_dense(), state, rate * rates)
        new_weights = np.where(touched, moved, weights)
        new_state = {
            name: moved_state[name] if name == "decay" else np.where(touched, moved_state[name],
                state[name])
            for name in state
        }

    Args:
      weights: ``[T, R, O]``, with any lookup dtype; 16-bit rows are summed in float32. Or ``[E]``,
          an edge list: each edge is a row with one element and its own state.
      gradient: from `lutjax.optim.value_and_grad`.
      rate: the learning rate of this step, perhaps traced.
      rule: row update rule: `SGD` (the default), `RowAdagrad`, `RowMomentum` or `RowAdam` from
          `lutjax.optim`.
      state: state of the rule, from ``rule.init(weights)``; not needed by a rule without state.
      rates: learning rate factors: one for each table, ``[T]``, or for each edge, ``[T or 1, R or
          1, O or 1]``, or ``[E]`` for an edge list. They scale steps, not gradients or the
          cotangents through the lookup. None: 1.
      implementation: see `lutjax.detect`.

    Returns:
      The table, and the state of its rows.

    Raises:
      ValueError, TypeError: the gradient belongs to a table with another shape or dtype, or the
      state to another rule or table; or `rates` have another shape, or differ within a table for a
      rule with ``decay="every"``; or, inside a `jax.shard_map`, devices that share the table have
      gradients from their own batches (`TableGradient.gathered` joins them).

    Source: docs/semantics.md, section 8.

    Example:
      >>> import jax.numpy as jnp, lutjax
      >>> from lutjax import optim
      >>> d = lutjax.detect(jnp.array([0.5, 0.25]), jnp.array([[[0, 1]]]))
      >>> loss = lambda params: lutjax.lookup(params["weights"], d).sum()
      >>> params = {"weights": jnp.zeros((1, 2, 3))}
      >>> _, gradients = optim.value_and_grad(loss)(params)
      >>> table, _ = lutjax.update_table(params["weights"], gradients["weights"], 0.5)
      >>> table[0]
      Array([[ 0. ,  0. ,  0. ],
             [-0.5, -0.5, -0.5]], dtype=float32)
    """
    rule, state = SGD() if rule is None else rule, {} if state is None else state
    if not isinstance(gradient, TableGradient):
        raise TypeError(
            f"update_table: gradient is {_checks.describe(gradient)}; expected a TableGradient "
            "from lutjax.optim.value_and_grad."
        )
    _checks.floats(
        "update_table", "weights", weights, len(gradient.shape),
        "[detectors, rows, outputs], or [edges]",
    )  # fmt: skip
    _checks.require(
        weights.shape == gradient.shape and weights.dtype == gradient.dtype,
        "update_table",
        "weights",
        weights,
        f"the gradient belongs to a table {gradient.dtype}{list(gradient.shape)}",
    )
    check_state(rule, weights, state)
    check_devices("weights", weights, gradient)
    accumulate = dict(gradient.look_up.options()).get("accumulate")
    if accumulate is not None and accumulate.checked:
        raise ValueError(
            f"update_table: the lookup has accumulate={accumulate}, but in-place updates cannot be "
            "checked. Use checked=False to train; gradient.to_dense() is checked."
        )
    dtype = accumulator(weights.dtype)
    rate = jnp.asarray(rate, dtype)
    later = _order_after(rate, gradient.after)
    factors: Any = 1
    if rates is not None:
        factors = broadcast_factors("update_table", "rates", rates, weights.shape, dtype)
        check_rates("update_table", "rates", rule, factors)
    step = Step(
        rate=later * factors,
        factor=None if gradient.factor is None else jnp.asarray(gradient.factor, dtype),
        state=state,
        rule=rule,
    )
    call = _with_table(gradient.look_up, weights)
    table, moved = run_update(call, gradient.cotangent, step, implementation=implementation)
    return table, rule.next_state(state, moved, rate * factors)


def check_rates(op: str, name: str, rule: RowRule, factors: jax.Array) -> None:
    """Raise ValueError if a rule cannot count decay at these factors from `broadcast_factors`."""
    if rule.counts_decay and any(n > 1 for n in factors.shape[1:]):
        raise ValueError(
            f"{op}: {name} has shape {list(factors.shape)}, but {rule} counts decay once per "
            "table. Give one factor per table, or use decay='read'."
        )


def broadcast_factors(
    op: str, name: str, factors: Any, shape: tuple[int, ...], dtype: Any
) -> jax.Array:
    """Return table or edge factors as an array that broadcasts to tables; a number as a scalar."""
    array = jnp.asarray(factors, dtype)
    if array.shape == shape[:1] and len(shape) > 1:
        return array.reshape(-1, *(1,) * (len(shape) - 1))
    fits = len(array.shape) == len(shape) and all(
        n in (1, m) for n, m in zip(array.shape, shape, strict=True)
    )
    if array.ndim and not fits:
        sizes = ", ".join(f"{m} or 1" for m in shape)
        raise ValueError(
            f"{op}: {name} has shape {list(array.shape)}; expected a number, one per table "
            f"[{shape[0]}], or one per edge [{sizes}]."
        )
    return array


def _with_table(look_up: Call, weights: Any) -> Call:
    return look_up.replace(**{str(look_up.table_name): weights})


def _order_after(rate: jax.Array, token: jax.Array) -> jax.Array:
    """Return the rate, available once the backward pass has read the table."""
    # Without this dependency the compiler may write the table before its last read, and then copies
    # it first. An `optimization_barrier` is not enough: compilers remove it before they decide
    # about copies. The rate is therefore selected by a predicate that is never true, which no
    # simplifier can prove: x**2 == 7 y**2 - 1 has no solution in integers modulo 8, and so none in
    # 32-bit integers (an opaque predicate: Collberg, Thomborson and Low, 1998).
    x, y = (jax.lax.bitcast_convert_type(a.astype(jnp.float32), jnp.uint32) for a in (token, rate))
    never = x * x == jnp.uint32(7) * y * y - jnp.uint32(1)
    return jnp.where(never, -rate, rate)


def check_state(rule: RowRule, weights: Any, state: RowState) -> None:
    """Raise ValueError if a state does not belong to this rule and table."""
    initial = jax.eval_shape(rule.init, weights)
    actual = {name: (tuple(a.shape), jnp.dtype(a.dtype)) for name, a in state.items()}
    expected = {name: (tuple(a.shape), jnp.dtype(a.dtype)) for name, a in initial.items()}
    if actual != expected:

        def text(arrays: dict[str, Any]) -> str:
            described = (f"{n} {d}{list(s)}" for n, (s, d) in sorted(arrays.items()))
            return ", ".join(described) or "no arrays at all"

        raise ValueError(
            f"update_table: the state has {text(actual)}; "
            f"{rule} needs {text(expected)} for a table {_checks.describe(weights)}. "
            "Use rule.init(weights)."
        )


def check_devices(name: str, weights: Any, gradient: TableGradient) -> None:
    """Raise ValueError if devices would update a shared table by different gradients."""
    # A replicated table needs the same gradient on all devices, or its copies would diverge.
    apart = sorted(gradient.varying_axes() - _compat.varying_axes(weights))
    axes = ", ".join(map(repr, apart))
    if apart:
        raise ValueError(
            f"update_table: the table {name} is replicated over the mesh axes {axes}, but its "
            f"gradient covers one device's batch. Gather it first: gradient.gathered(({axes},)), "
            "and gradient.scaled(1 / n) if the loss is a mean over the batch on each of n devices."
        )
    untracked = _compat.untracked_axes()
    if untracked and not gradient.is_gathered:
        raise ValueError(
            "update_table: inside a shard_map with check_vma=False, the batch of the gradient for "
            f"the table {name} is unknown, and tables could silently diverge between devices. Omit "
            "check_vma=False, or call gradient.gathered(axes) with the mesh axes that divide the "
            "batch, () for none."
        )


def squared_norm(gradient: TableGradient) -> jax.Array:
    """Return the squared norm of a gradient, after adding all reads of the same row.

    It allocates no table-shaped array, with three exceptions: an edge list; a replicated table
    inside a `jax.shard_map`, because its gradient is a sum over devices; and an external op whose
    plain kernel has no function `hits`.
    """
    is_partial = gradient.varying_axes() - gradient.axes
    if is_partial or hits_of(gradient.op) is None or len(gradient.shape) == 1:
        return jnp.sum(jnp.square(gradient.to_dense().astype(accumulator(gradient.dtype))))
    device = devices_of(jax.tree.leaves(gradient))[0]
    norm = _meshes.shard_by_compiler(
        lambda g: _squared_norm_of_factors(g, device), lambda _: PartitionSpec()
    )
    result: jax.Array = norm(gradient)
    return result


def hits_of(op: str) -> Callable[..., Any] | None:
    """Return the function in an op's plain-JAX kernel that yields a call's hits, or None."""
    target = kernel_registry.get(op, platform="xla", backend="any").target
    return getattr(importlib.import_module(target), "hits", None)


@functools.partial(jax.jit, static_argnums=1)
def _squared_norm_of_factors(gradient: TableGradient, device: Device) -> jax.Array:
    # A call's hits are the same on every device and need only plain JAX, so no implementation is
    # selected.
    hits = hits_of(gradient.op)
    assert hits is not None
    updates = importlib.import_module("lutjax.kernels._xla._row_updates")
    like = next(iter(jax.tree.leaves(gradient.look_up)))
    # Only the shape matters, so the compiler allocates no memory for it.
    weights = _compat.zeros_varying(like, gradient.shape, gradient.dtype)
    call, cotangent = fold_call(_with_table(gradient.look_up, weights), gradient.cotangent)
    visit, n_hits = hits(call, cotangent, device=device)
    factor = None if gradient.factor is None else jnp.asarray(gradient.factor)
    square: jax.Array = updates.squared_norm(call, visit, n_hits, factor, device=device)
    return square


def join_gradients(gradient: TableGradient) -> TableGradient:
    """Join a gradient for several parts, on a leading axis, into one for all their lookups."""
    look_up = gradient.look_up
    arrays = (
        # Arrays without a batch axis are the same in every part.
        jax.tree.map(lambda a: a[0], array) if rank is None else array
        for array, rank in zip(look_up.values(), look_up.ranks(), strict=True)
    )
    return dataclasses.replace(
        gradient,
        look_up=look_up.from_arrays(arrays, look_up.options()),
        factor=None if gradient.factor is None else jnp.asarray(gradient.factor)[0],
        after=jnp.sum(gradient.after),
    )
