"""Training tables at the cost of the rows that a step touches.

`value_and_grad` is `jax.value_and_grad` of a loss, except that the gradient of each table is a
`TableGradient`, the factors of what would be an array of the table's shape. `Optimizer` moves tables by row-wise
rules in their own memory and everything else by any optax optimizer. `global_norm` and `clip_by_global_norm` are those of
optax for such gradients, which optax itself refuses.
"""

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from lutjax import sharding
from lutjax._arguments import shown
from lutjax._extras import needed_by
from lutjax.tables.collect import (
    Chosen,
    Split,
    TableUseError,
    chosen,
    is_factored,
    microbatched,
    value_and_grad,
)
from lutjax.tables.gradient import TableGradient
from lutjax.tables.update import check_devices, check_rates, check_state, of_edges, squared_norm, update_table
from lutjax.values._dtypes import accumulator
from lutjax.values._row_rules import DECAY, SGD, RowAdagrad, RowAdam, RowMomentum, RowRule, RowState

with needed_by(__name__):
    import optax


__all__ = [
    "SGD",
    "Optimizer",
    "OptimizerState",
    "RowAdagrad",
    "RowAdam",
    "RowMomentum",
    "RowRule",
    "TableGradient",
    "TableUseError",
    "clip_by_global_norm",
    "global_norm",
    "microbatched",
    "normalized",
    "scaled",
    "value_and_grad",
]


_MOST_STEPS = 2**31 - 1


class OptimizerState(NamedTuple):
    """State of an `Optimizer`.

    Attributes:
      step: steps done, int32; it stays at the largest that int32 holds.
      rows: state of the rows of each table, by the table's name.
      rest: optax state of the other parameters.
    """

    step: jax.Array
    rows: dict[str, RowState]
    rest: Any


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """Moves tables by a row-wise rule in their own memory, and the other parameters by an optax optimizer.

    ``init`` and ``apply`` are pure functions. A training step made of `value_and_grad` and `apply`, jitted with
    donated parameters and state, needs no memory of the size of a table beside the tables and the rule's state.

    Attributes:
      rule: how rows move.
      rate: learning rate of the tables, a number or a schedule: a function of the number of steps done.
      rest: any optax optimizer, for all that is no table; by default SGD with the same rate. What it clips is theirs
        alone: for a norm of all gradients call `clip_by_global_norm` before `apply`.
      rules: rules of some tables, by name, in place of `rule`: those of a memory, for example, beside tables of detectors.
      rates: factors of the rate for some tables, by name: a number, an array with one for each table, ``[T]``, or one for each edge,
        ``[T or 1, R or 1, O or 1]`` (of `lutjax.sparse_lookup` ``[T or 1, R or 1, K or 1]``).
      tables: which parameters are tables: their names, as `lutjax.layers.linen.tables_of` finds them, or a function of name and
        array. `lutjax.training.nnx.Optimizer` asks the layers of its model, so there it may be left out.

    Source: docs/semantics.md, section 8.

    Example:
      >>> import jax, jax.numpy as jnp, lutjax, optax
      >>> from lutjax.training import tables
      >>> anchors = lutjax.sample_anchors(jax.random.key(0), n_inputs=8, n_detectors=4, n_anchors=10)
      >>> params = {"weights": jnp.zeros((4, 2**10, 5)), "bias": jnp.zeros(5)}
      >>> def loss(params, x):
      ...     return jnp.mean((lutjax.lut(x, params["weights"], anchors) + params["bias"] - 1) ** 2)
      >>> optimizer = tables.Optimizer(tables.RowAdagrad(), rate=0.1, rest=optax.adam(1e-3), tables={"weights"})
      >>> @jax.jit
      ... def step(params, state, x):
      ...     value, gradients = tables.value_and_grad(loss)(params, x)
      ...     return *optimizer.apply(params, gradients, state), value
      >>> state = optimizer.init(params)
      >>> for _ in range(3):
      ...     params, state, value = step(params, state, jnp.ones((3, 8)))
      >>> float(value) < 0.2
      True
    """

    rule: RowRule
    rate: float | Callable[[Any], Any]
    _: dataclasses.KW_ONLY
    rest: optax.GradientTransformation | None = None
    rules: Mapping[str, RowRule] = dataclasses.field(default_factory=dict, hash=False)
    rates: Mapping[str, Any] = dataclasses.field(default_factory=dict, hash=False)
    tables: Chosen | None = None

    def __post_init__(self) -> None:
        for name, rule in {"rule": self.rule, **{f"rules[{n!r}]": r for n, r in self.rules.items()}}.items():
            if not isinstance(rule, RowRule):
                raise TypeError(
                    f"Optimizer: {name} is {shown(rule)}; expected a rule of rows, such as tables.RowAdagrad()."
                )
        number = isinstance(self.rate, int | float) or hasattr(self.rate, "dtype")
        if not number and not callable(self.rate):
            raise TypeError(f"Optimizer: rate is {shown(self.rate)}; expected a number or a schedule.")
        if isinstance(self.rate, float) and self.rate != self.rate:
            raise ValueError("Optimizer: rate is nan; expected a number or a schedule.")
        if self.tables is not None:
            object.__setattr__(self, "tables", chosen("Optimizer", self.tables))
        if self.rest is not None and not hasattr(self.rest, "update"):
            raise TypeError(
                f"Optimizer: rest is {shown(self.rest)}; expected an optimizer of optax, such as optax.sgd(0.1)."
            )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Optimizer):
            return NotImplemented

        def values(optimizer: Optimizer) -> tuple[Any, ...]:
            return tuple(
                getattr(optimizer, f.name) for f in dataclasses.fields(optimizer) if f.name != "rates"
            )

        return values(self) == values(other) and _same_rates(self.rates, other.rates)

    @property
    def _rest(self) -> optax.GradientTransformation:
        return optax.sgd(self.rate) if self.rest is None else self.rest

    def _split(self, params: Any) -> Split:
        if self.tables is None:
            raise ValueError(
                "Optimizer: nothing says which parameters are tables. Give tables=, their names: those of lutjax.layers.linen.tables_of("
                "model.init, key, x), of haiku.tables_of or nnx.tables_of, or {'hidden/weights'}, say, of parameters of your own."
            )
        return Split(params, self.tables)

    def init(self, params: Any) -> OptimizerState:
        """Return the state before the first step.

        Raises:
          ValueError: nothing says which parameters are tables; or `tables` or `rates` names one that is not there, or `rates` has
            factors of a wrong shape; or a rule with ``decay="every"`` is for a list of edges, or for rates that differ within a table.
        """
        split = self._split(params)
        for what, names in (("rates", self.rates), ("rules", self.rules)):
            unknown = sorted(set(names) - set(split.tables))
            if unknown:
                raise ValueError(
                    f"Optimizer: {what} names {unknown}; the tables are {sorted(split.tables) or 'none'}."
                )
        for name in self.rates:
            self._rates_of(name, split.tables[name])
        rows = {name: self._rule_of(name).init(table) for name, table in split.tables.items()}
        return OptimizerState(jnp.zeros((), jnp.int32), rows, self._rest.init(split.others))

    def _rule_of(self, name: str) -> RowRule:
        return self.rules.get(name, self.rule)

    def _rates_of(self, name: str, table: Any) -> Any:
        dtype = accumulator(table.dtype)
        factors = of_edges("Optimizer", f"rates[{name!r}]", self.rates.get(name, 1.0), table.shape, dtype)
        check_rates("Optimizer", f"rates[{name!r}]", self._rule_of(name), factors)
        return factors

    def specs(
        self,
        params: Any,
        mesh: Mesh | AbstractMesh,
        *,
        axis: str | None = None,
        tables: Collection[str] | None = None,
        by_rows: Collection[str] = (),
    ) -> OptimizerState:
        """Return how the state is divided over a mesh: `jax.sharding.PartitionSpec` in place of arrays.

        What is kept for a parameter lies as `lutjax.sharding.specs` says of that parameter; of the state of an optax optimizer
        `specs` itself cannot say it, because names of parameters are lost there.

        Args:
          params: shapes or arrays.
          mesh: as for `lutjax.sharding.specs`.
          axis: as for `lutjax.sharding.specs`.
          tables: names of the tables, also of those that `rest` moves; by default those of the optimizer.
          by_rows: names of the tables that are divided by blocks of rows.

        Raises:
          ValueError: as `init`, or as `lutjax.sharding.specs`.

        Example:
          >>> import jax.numpy as jnp, optax
          >>> from jax.sharding import AbstractMesh
          >>> from lutjax.training import tables
          >>> optimizer = tables.Optimizer(tables.RowAdagrad(), rate=0.1, rest=optax.adam(1e-3), tables={"weights"})
          >>> params = {"positions": jnp.zeros((7, 8, 2)), "weights": jnp.zeros((8, 2**10, 5))}
          >>> state = optimizer.specs(params, AbstractMesh((4,), ("detectors",)))
          >>> tuple(state.rest[0].mu[0]), tuple(state.rows["weights"]["sum_of_squares"])
          ((None, 'detectors', None), ('detectors', None, None))
        """
        state = jax.eval_shape(self.init, params)
        specs = functools.partial(
            sharding.specs,
            mesh=mesh,
            axis=axis,
            tables=state.rows if tables is None else tables,
            by_rows=by_rows,
        )
        named = jax.tree_util.tree_leaves_with_path(params)
        every = zip(named, jax.tree.leaves(specs(params)), strict=True)
        others = [
            (array, spec)
            for (path, array), spec in every
            if jax.tree_util.keystr(path, simple=True, separator="/") not in state.rows
        ]

        def per_parameter(part: Any) -> bool:
            return isinstance(part, list) and len(part) == len(others)

        def like(param: Any, spec: PartitionSpec, a: Any) -> PartitionSpec:
            if len(a.shape) != len(param.shape):
                return PartitionSpec()
            return PartitionSpec(
                *(p if n == m else None for p, n, m in zip(spec, a.shape, param.shape, strict=False))
            )

        def of_part(part: Any) -> Any:
            if not per_parameter(part):
                return PartitionSpec()
            return [
                jax.tree.map(functools.partial(like, *other), a)
                for a, other in zip(part, others, strict=True)
            ]

        step: Any = PartitionSpec()
        return OptimizerState(
            step,
            specs(state.rows),
            jax.tree.map(of_part, state.rest, is_leaf=per_parameter),
        )

    def apply(self, params: Any, gradients: Any, state: OptimizerState) -> tuple[Any, OptimizerState]:
        """Parameters and state after a step.

        Args:
          params: donated by the jit around it, if memory matters.
          gradients: from `value_and_grad` with the same choice of tables. A table's may also be an array, as
            `jax.grad` makes it; the rows in which it is not zero are then taken for those that were looked up.
          state: state of the optimizer.

        Raises:
          ValueError, TypeError: the gradients or the state are those of another model or rule. Nothing has been
            changed then.
        """
        split = self._split(params)
        others, of_tables = split.gradients(gradients)
        if set(state.rows) != set(split.tables):
            raise ValueError(
                f"Optimizer: the state has rows of the tables {sorted(state.rows)}; the parameters have "
                f"{sorted(split.tables)}. Make it with init(params)."
            )
        for name, table in split.tables.items():
            check_state(self._rule_of(name), table, state.rows[name])
            if is_factored(of_tables[name]):
                check_devices(name, table, of_tables[name])
        rate = self.rate(state.step) if callable(self.rate) else self.rate
        moved = {}
        for name, table in split.tables.items():
            update = update_table if is_factored(of_tables[name]) else _update_all
            factor, rates = self.rates.get(name, 1.0), None
            if np.ndim(factor):
                factor, rates = 1.0, self._rates_of(name, table)
            moved[name] = update(
                table, of_tables[name], rate * factor, self._rule_of(name), state.rows[name], rates=rates
            )
        updates, rest = self._rest.update(others, state.rest, split.others)
        params = split.join(
            optax.apply_updates(split.others, updates), {n: table for n, (table, _) in moved.items()}
        )
        step = jnp.minimum(state.step, _MOST_STEPS - 1) + 1
        return params, OptimizerState(step, {n: rows for n, (_, rows) in moved.items()}, rest)

    def current(
        self, params: Any, state: OptimizerState, rows: Mapping[str, jax.Array] | None = None
    ) -> tuple[Any, OptimizerState]:
        """Parameters and state with the decay of all steps so far taken of all rows.

        Only rules with ``decay="every"`` leave any to be taken: of rows that the last steps did not touch. Call it before parameters are
        tested, saved or given away, and go on with what it returns: it reads and writes each table once, in its own memory where both
        arguments are donated. Called more often it changes nothing but the rounding.

        Args:
          params: as `apply` returns them.
          state: as `apply` returns them.
          rows: ids of rows by the names of tables, ``[..., T]``: these rows alone, at the cost of reading and writing them. Of a table whose
            reads are known before a step, as those of a memory of n-grams (``layer.row_ids(tokens)``), the loss then sees what it
            would see if every step decayed every row. Ids are those of whole tables, not of a block of rows.

        Raises:
          ValueError: `rows` names what is no table, or ids have another number of tables.

        Example:
          >>> import jax, jax.numpy as jnp, lutjax
          >>> from lutjax.training import tables
          >>> rule = tables.SGD(weight_decay=0.5, decay="every")
          >>> optimizer = tables.Optimizer(rule, rate=1.0, tables={"weights"})
          >>> loss = lambda params, row: 0 * lutjax.weighted_lookup(params["weights"], row, jnp.ones((1, 1))).sum()
          >>> params = {"weights": jnp.ones((1, 2, 1))}
          >>> state = optimizer.init(params)
          >>> for row in (0, 0, 1):  # every step halves
          ...     _, gradients = tables.value_and_grad(loss)(params, jnp.array([[row]]))
          ...     params, state = optimizer.apply(params, gradients, state)
          >>> params["weights"].ravel(), optimizer.current(params, state)[0]["weights"].ravel()
          (Array([0.25 , 0.125], dtype=float32), Array([0.125, 0.125], dtype=float32))
        """
        split = self._split(params)
        unknown = sorted(set(rows or ()) - set(split.tables))
        if unknown:
            raise ValueError(
                f"Optimizer.current: rows names {unknown}; the tables are {sorted(split.tables) or 'none'}."
            )
        found = {name: (table, state.rows[name]) for name, table in split.tables.items()}
        for name in split.tables if rows is None else rows:
            table, ids = split.tables[name], None if rows is None else rows[name]
            if ids is not None and (not np.ndim(ids) or ids.shape[-1] != table.shape[0]):
                raise ValueError(
                    f"Optimizer.current: rows[{name!r}] has shape {list(np.shape(ids))}; expected ids [..., {table.shape[0]}], one for "
                    "each of the tables."
                )
            found[name] = self._rule_of(name).current(table, state.rows[name], ids)
        params = split.join(split.others, {name: table for name, (table, _) in found.items()})
        return params, state._replace(rows={name: of_rows for name, (_, of_rows) in found.items()})


def _update_all(
    table: jax.Array, gradient: jax.Array, rate: Any, rule: RowRule, state: RowState, *, rates: Any
) -> tuple[jax.Array, RowState]:
    """Return a table after a step of a rule, from its gradient as an array."""
    dtype = accumulator(table.dtype)
    gradient = gradient.astype(dtype)
    rate = jnp.asarray(rate, dtype) if rates is None else jnp.asarray(rate, dtype) * rates
    moved, new = rule.step_table(table.astype(dtype), gradient, state, rate)
    touched = gradient != 0 if gradient.ndim == 1 else jnp.any(gradient != 0, -1, keepdims=True)
    of_rows = {name: a for name, a in state.items() if name != DECAY}
    moved, new = jax.tree.map(
        lambda n, o: jnp.where(touched, n.astype(o.dtype), o),
        (moved, {name: new[name] for name in of_rows}),
        (table, of_rows),
    )
    return moved, rule.after(state, new, rate)


def _same_rates(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    return a.keys() == b.keys() and all(a[n] is b[n] or np.array_equal(a[n], b[n]) for n in a)


def scaled(rates: Mapping[str, Any]) -> optax.GradientTransformation:
    """Multiplies the updates of some parameters by factors: learning-rate factors of any optax optimizer, for tables and others.

    It comes after the optimizer in `optax.chain`. For tables that an `Optimizer` moves, its `rates` are the same factors.

    Args:
      rates: by the name of the parameter, a number, an array with one for each table, ``[T]``, or an array that broadcasts to
        the parameter and has as many axes.

    Raises:
      ValueError, TypeError: on use: there is no such parameter, factors have a wrong shape, or a gradient is a `TableGradient`.

    Source: docs/semantics.md, section 8.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from lutjax.training import tables
      >>> tx = optax.chain(optax.sgd(1.0), tables.scaled({"weights": jnp.array([1.0, 0.5])}))
      >>> params = {"bias": jnp.ones(3), "weights": jnp.ones((2, 1, 1))}
      >>> updates, _ = tx.update(params, tx.init(params))
      >>> updates["weights"].ravel(), updates["bias"]
      (Array([-1. , -0.5], dtype=float32), Array([-1., -1., -1.], dtype=float32))
    """

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        found = []

        def multiply(path: Any, value: Any) -> Any:
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            if name not in rates:
                return value
            found.append(name)
            _refuse_factored("scaled", value)
            return value * of_edges("scaled", f"rates[{name!r}]", rates[name], value.shape, value.dtype)

        multiplied = jax.tree_util.tree_map_with_path(multiply, updates, is_leaf=is_factored)
        unknown = sorted(set(rates) - set(found))
        if unknown:
            raise ValueError(f"scaled: rates names {unknown}, which are no parameters.")
        return multiplied, state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def _refuse_factored(name: str, gradient: Any) -> None:
    if is_factored(gradient):
        raise TypeError(
            f"{name}: a gradient is a TableGradient; use the dense gradient of this table (jax.grad, or "
            "its to_dense())."
        )


def global_norm(gradients: Any) -> jax.Array:
    """Return the norm of gradients, all of them taken as one vector: what `optax.global_norm` is for dense ones.

    A row that is looked up several times has the sum of their gradients, so the norm of a table's gradient takes about as
    long as a step of a row rule (`RowAdagrad`, for example), and a few numbers for each row of one detector and each of
    its look-ups in memory, never an array of the table's shape. Inside a `jax.shard_map` with a table that is the same on
    all devices, the sum over the devices is made as such an array.

    Args:
      gradients: a pytree of arrays and `TableGradient`.

    Returns:
      A scalar, float32 or, if there are float64 gradients, float64.

    Example:
      >>> import jax, jax.numpy as jnp, lutjax
      >>> from lutjax.training import tables
      >>> x = jnp.array([[0.5, 0.25], [0.75, 0.25]])  # both look up row 1
      >>> d = lutjax.detect(x, jnp.array([[[0, 1]]]))
      >>> loss = lambda params: lutjax.lookup(params["weights"], d).sum()
      >>> _, gradients = tables.value_and_grad(loss)({"weights": jnp.zeros((1, 2, 1))})
      >>> tables.global_norm(gradients)
      Array(2., dtype=float32)
    """
    squares = [
        squared_norm(g) if is_factored(g) else jnp.sum(jnp.square(jnp.abs(g).astype(accumulator(g.dtype))))
        for g in jax.tree.leaves(gradients, is_leaf=is_factored)
    ]
    dtype = accumulator(jnp.dtype("float32"), *(s.dtype for s in squares))
    return jnp.sqrt(sum((s.astype(dtype) for s in squares), jnp.zeros((), dtype)))


def clip_by_global_norm(gradients: Any, max_norm: Any) -> Any:
    """Return gradients whose `global_norm` is at most `max_norm`: all of them times one number, if it is more.

    Args:
      gradients: a pytree of arrays and `TableGradient`, as from `value_and_grad`.
      max_norm: a positive number, perhaps traced.

    Raises:
      ValueError: `max_norm` is not positive, as far as it is known.

    Example:
      >>> import jax, jax.numpy as jnp, lutjax
      >>> from lutjax.training import tables
      >>> d = lutjax.detect(jnp.array([0.5, 0.25]), jnp.array([[[0, 1]]]))
      >>> loss = lambda params: 8 * lutjax.lookup(params["weights"], d).sum()
      >>> _, gradients = tables.value_and_grad(loss)({"weights": jnp.zeros((1, 2, 1))})
      >>> tables.global_norm(tables.clip_by_global_norm(gradients, 0.5))
      Array(0.5, dtype=float32)
    """
    if not isinstance(max_norm, int | float) and not hasattr(max_norm, "dtype"):
        raise TypeError(f"clip_by_global_norm: max_norm is {shown(max_norm)}; expected a number.")
    if isinstance(max_norm, int | float) and not max_norm > 0:
        raise ValueError(f"clip_by_global_norm: max_norm is {max_norm}; it must be above 0.")
    norm = global_norm(gradients)
    limit = jnp.asarray(max_norm, norm.dtype)
    factor = jnp.where(norm > limit, limit / norm, jnp.ones_like(norm))

    def scaled(gradient: Any) -> Any:
        return gradient.scaled(factor) if is_factored(gradient) else gradient * factor.astype(gradient.dtype)

    return jax.tree.map(scaled, gradients, is_leaf=is_factored)


def normalized(eps: float = 1e-16) -> optax.GradientTransformation:
    """Divides the gradient of each parameter by its largest magnitude, or by `eps` if that is larger.

    For gradients as arrays: the largest magnitude of a factored one is not known without its sums.

    Raises:
      TypeError: on use, a gradient is a `TableGradient`.

    Source: docs/semantics.md, section 8.

    Example:
      >>> import jax.numpy as jnp
      >>> from lutjax.training import tables
      >>> updates, _ = tables.normalized().update({"w": jnp.array([-4.0, 1.0])}, None)
      >>> updates["w"]
      Array([-1.  ,  0.25], dtype=float32)
    """

    def divide(gradient: Any) -> jax.Array:
        _refuse_factored("normalized", gradient)
        largest = jnp.max(jnp.abs(gradient), initial=0)
        return jnp.divide(gradient, jnp.maximum(largest, jnp.asarray(eps, gradient.dtype)))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        return jax.tree.map(divide, updates, is_leaf=is_factored), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)
