"""Optimizer that updates tables in place and all other parameters with Optax."""

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from lutjax import sharding
from lutjax.arguments import format_value
from lutjax.extras import require_optional
from lutjax.optim._transformations import next_step, update_dense
from lutjax.tables.collect import Chosen, Split, is_factored, select_tables
from lutjax.tables.update import (
    broadcast_factors,
    check_devices,
    check_rates,
    check_state,
    update_table,
)
from lutjax.values._dtypes import accumulator
from lutjax.values._row_rules import RowRule, RowState

with require_optional("lutjax.optim.Optimizer"):
    import optax

__all__ = ["Optimizer", "OptimizerState"]


class OptimizerState(NamedTuple):
    """State of an `Optimizer`.

    Attributes:
      step: completed steps, int32; it saturates at the int32 maximum.
      rows: row state by table name.
      rest: Optax state for other parameters, with lists in place of parameter trees.
    """

    step: jax.Array
    rows: dict[str, RowState]
    rest: Any


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """Optimizer that updates tables in place with a row rule, and all other parameters with Optax.

    ``init`` and ``apply`` are pure functions. A training step with `value_and_grad` and `apply`,
    jitted with donated parameters and state, allocates no other array with the shape of a table.

    It is not an `optax.GradientTransformation`: table updates would be an array of the table's
    shape. `row_transform` applies the same rules to dense gradients inside Optax.

    Attributes:
      rule: row update rule.
      rate: table learning rate, a number or a schedule: a function of the completed steps.
      rest: any Optax optimizer for all other parameters; by default SGD with the same rate. It gets
        the parameter tree with an `optax.MaskedNode` in place of each table, so labels and masks by
        name work. Its clipping ignores table gradients: call `clip_by_global_norm` before `apply`
        for the norm of all gradients.
      rules: rules for some tables, by name, in place of `rule`: a memory, for example, next to
        detector tables.
      rates: rate factors for some tables, by name: a number, an array with one factor per table,
        ``[T]``, or per edge, ``[T or 1, R or 1, O or 1]`` (for `lutjax.sparse_lookup`
        ``[T or 1, R or 1, K or 1]``).
      tables: table parameters: their names, as `lutjax.layers.linen.tables_of` finds them, or a
        function of name and array. Optional in `lutjax.optim.nnx.Optimizer`, which reads them from
        the layers of its model.

    Source: docs/semantics.md, section 8.

    Example:
      >>> import jax, jax.numpy as jnp, lutjax, optax
      >>> from lutjax import optim
      >>> sizes = {"n_inputs": 8, "n_detectors": 4, "n_anchors": 10}
      >>> anchors = lutjax.sample_anchors(jax.random.key(0), **sizes)
      >>> params = {"weights": jnp.zeros((4, 2**10, 5)), "bias": jnp.zeros(5)}
      >>> def loss(params, x):
      ...     return jnp.mean((lutjax.lut(x, params["weights"], anchors) + params["bias"] - 1) ** 2)
      >>> rule, rest = optim.RowAdagrad(), optax.adam(1e-3)
      >>> optimizer = optim.Optimizer(rule, rate=0.1, rest=rest, tables={"weights"})
      >>> @jax.jit
      ... def step(params, state, x):
      ...     value, gradients = optim.value_and_grad(loss)(params, x)
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
    rest: optax.GradientTransformation | optax.MultiSteps | None = None
    rules: Mapping[str, RowRule] = dataclasses.field(default_factory=dict, hash=False)
    rates: Mapping[str, Any] = dataclasses.field(default_factory=dict, hash=False)
    tables: Chosen | None = None

    def __post_init__(self) -> None:
        rules = {f"rules[{n!r}]": r for n, r in self.rules.items()}
        for name, rule in {"rule": self.rule, **rules}.items():
            if not isinstance(rule, RowRule):
                raise TypeError(
                    f"Optimizer: {name} is {format_value(rule)}; expected a row rule, such as "
                    "optim.RowAdagrad()."
                )
        number = isinstance(self.rate, int | float) or hasattr(self.rate, "dtype")
        if not number and not callable(self.rate):
            raise TypeError(
                f"Optimizer: rate is {format_value(self.rate)}; expected a number or a schedule."
            )
        if isinstance(self.rate, float) and self.rate != self.rate:
            raise ValueError("Optimizer: rate is nan; expected a number or a schedule.")
        if self.tables is not None:
            object.__setattr__(self, "tables", select_tables("Optimizer", self.tables))
        if self.rest is not None and not hasattr(self.rest, "update"):
            raise TypeError(
                f"Optimizer: rest is {format_value(self.rest)}; expected an Optax optimizer, such "
                "as optax.sgd(0.1)."
            )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Optimizer):
            return NotImplemented

        # Rates may be arrays, which `==` does not compare as a whole.
        def values(optimizer: Optimizer) -> tuple[Any, ...]:
            fields = (f.name for f in dataclasses.fields(optimizer) if f.name != "rates")
            return tuple(getattr(optimizer, name) for name in fields)

        return values(self) == values(other) and _same_rates(self.rates, other.rates)

    @property
    def _rest_optimizer(self) -> optax.GradientTransformation | optax.MultiSteps:
        return optax.sgd(self.rate) if self.rest is None else self.rest

    def _split(self, params: Any) -> Split:
        if self.tables is None:
            raise ValueError(
                "Optimizer: the tables are unknown. Give their names as tables=, from "
                "tables_of(model.init, key, x) in lutjax.layers.linen, tables_of in haiku or nnx, "
                "or your own, such as {'hidden/weights'}."
            )
        return Split(params, self.tables)

    def init(self, params: Any) -> OptimizerState:
        """Return the state before the first step.

        Raises:
          ValueError: the tables are unspecified; `tables` or `rates` names a missing parameter;
            `rates` has factors of a wrong shape; or a rule with ``decay="every"`` is for an edge
            list, or for rates that differ within a table.
        """
        split = self._split(params)
        for what, names in (("rates", self.rates), ("rules", self.rules)):
            unknown = sorted(set(names) - set(split.tables))
            if unknown:
                raise ValueError(
                    f"Optimizer: {what} names {unknown}; "
                    f"the tables are {sorted(split.tables) or 'none'}."
                )
        for name in self.rates:
            self._rates_of(name, split.tables[name])
        rows = {name: self._rule_of(name).init(table) for name, table in split.tables.items()}
        others = _mask_tables(split, split.others)
        # Step counts and row states are arrays by name. Optax state becomes lists of arrays, so a
        # checkpoint does not depend on the parameter tree.
        return OptimizerState(
            jnp.zeros((), jnp.int32),
            rows,
            _flatten_state(self._rest_optimizer.init(others), others),
        )

    def _rule_of(self, name: str) -> RowRule:
        return self.rules.get(name, self.rule)

    def _rates_of(self, name: str, table: Any) -> Any:
        dtype = accumulator(table.dtype)
        argument, factor = f"rates[{name!r}]", self.rates.get(name, 1.0)
        factors = broadcast_factors("Optimizer", argument, factor, table.shape, dtype)
        check_rates("Optimizer", argument, self._rule_of(name), factors)
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
        """Return the state sharding over a mesh: a `jax.sharding.PartitionSpec` per array.

        The state of a parameter is sharded like the parameter in `lutjax.sharding.specs`. That
        function cannot handle Optax state itself, because Optax state has no parameter names.

        Args:
          params: shapes or arrays.
          mesh: as for `lutjax.sharding.specs`.
          axis: as for `lutjax.sharding.specs`.
          tables: table names, including tables that `rest` updates; by default the optimizer's
            tables.
          by_rows: names of the tables that are sharded by row blocks.

        Raises:
          ValueError: as `init`, or as `lutjax.sharding.specs`.

        Example:
          >>> import jax.numpy as jnp, optax
          >>> from jax.sharding import AbstractMesh
          >>> from lutjax import optim
          >>> rule, rest = optim.RowAdagrad(), optax.adam(1e-3)
          >>> optimizer = optim.Optimizer(rule, rate=0.1, rest=rest, tables={"weights"})
          >>> params = {"positions": jnp.zeros((7, 8, 2)), "weights": jnp.zeros((8, 2**10, 5))}
          >>> state = optimizer.specs(params, AbstractMesh((4,), ("detectors",)))
          >>> tuple(state.rest[0].mu[0]), tuple(state.rows["weights"]["sum_of_squares"])
          ((None, 'detectors', None), ('detectors', None, None))
        """
        state = jax.eval_shape(self.init, params)
        specs = functools.partial(
            sharding.specs, mesh=mesh, axis=axis,
            tables=state.rows if tables is None else tables, by_rows=by_rows,
        )  # fmt: skip
        named = jax.tree_util.tree_leaves_with_path(params)
        others = {
            path: (array, spec)
            for (path, array), spec in zip(named, jax.tree.leaves(specs(params)), strict=True)
            if jax.tree_util.keystr(path, simple=True, separator="/") not in state.rows
        }

        def rest_spec(path: tuple[Any, ...], array: Any) -> PartitionSpec:
            # Optax keeps copies of the parameter tree, so a state path ends with the path of its
            # parameter.
            ends = (path[first:] for first in range(len(path) + 1))
            param, spec = next((others[end] for end in ends if end in others), (None, None))
            # A state with another rank, such as a count, is replicated.
            if param is None or spec is None or len(array.shape) != len(param.shape):
                return PartitionSpec()
            sizes = zip(spec, array.shape, param.shape, strict=False)
            return PartitionSpec(*(axis if n == m else None for axis, n, m in sizes))

        def init_rest(params: Any) -> tuple[Any, Any]:
            split = self._split(params)
            tree = _mask_tables(split, split.others)
            return self._rest_optimizer.init(tree), tree

        step: Any = PartitionSpec()
        rest, tree = jax.eval_shape(init_rest, params)
        rest = jax.tree_util.tree_map_with_path(rest_spec, rest)
        return OptimizerState(step, specs(state.rows), _flatten_state(rest, tree))

    def update(self, *_: Any, **__: Any) -> NoReturn:
        """Raise TypeError: tables are updated in place, see `apply`."""
        raise TypeError(
            "Optimizer.update: tables are updated in place, but Optax needs updates with their "
            "shape. Call apply(params, gradients, state), or use optim.row_transform(rule, rate) "
            "with dense gradients."
        )

    def apply(
        self, params: Any, gradients: Any, state: OptimizerState
    ) -> tuple[Any, OptimizerState]:
        """Return parameters and state after a step.

        Args:
          params: parameters. Donate them to the enclosing `jit` to save memory.
          gradients: from `value_and_grad` with the same choice of tables. A table gradient may also
            be dense, from `jax.grad`; rows with a nonzero gradient then count as read.
          state: state of the optimizer.

        Raises:
          ValueError, TypeError: the gradients or the state belong to another model or rule. Nothing
            is changed then.
        """
        split = self._split(params)
        others, table_gradients = split.gradients(gradients)
        if set(state.rows) != set(split.tables):
            raise ValueError(
                f"Optimizer: the state has rows for the tables {sorted(state.rows)}; the "
                f"parameters have {sorted(split.tables)}. Use init(params)."
            )
        # All checks come before the first update: an update in place cannot be undone.
        for name, table in split.tables.items():
            check_state(self._rule_of(name), table, state.rows[name])
            if is_factored(table_gradients[name]):
                check_devices(name, table, table_gradients[name])
        rate = self.rate(state.step) if callable(self.rate) else self.rate
        moved = {}
        for name, table in split.tables.items():
            update = update_table if is_factored(table_gradients[name]) else update_dense
            factor, rates = self.rates.get(name, 1.0), None
            # A scalar stays a scalar: a rate per row would cost a read of an array per row.
            if np.ndim(factor):
                factor, rates = 1.0, self._rates_of(name, table)
            moved[name] = update(
                table, table_gradients[name], rate * factor, self._rule_of(name),
                state.rows[name], rates=rates,
            )  # fmt: skip
        other_params = _mask_tables(split, split.others)
        # Optax needs its own state classes; `_flatten_state` stored only their leaves.
        structure = jax.tree.structure(jax.eval_shape(self._rest_optimizer.init, other_params))
        other_state = jax.tree.unflatten(structure, jax.tree.leaves(state.rest))
        updates, rest = self._rest_optimizer.update(
            _mask_tables(split, others), other_state, other_params
        )
        others = jax.tree.leaves(optax.apply_updates(other_params, updates))
        params = split.join(others, {n: table for n, (table, _) in moved.items()})
        rows = {name: of_rows for name, (_, of_rows) in moved.items()}
        rest = _flatten_state(rest, other_params)
        return params, OptimizerState(next_step(state.step), rows, rest)

    def current(
        self, params: Any, state: OptimizerState, rows: Mapping[str, jax.Array] | None = None
    ) -> tuple[Any, OptimizerState]:
        """Return parameters and state with all accumulated decay applied.

        Only rules with ``decay="every"`` accumulate decay, for rows that the last steps did not
        touch. Call it before you test, save or distribute parameters, and continue with its
        results. It reads and writes each table once, in place if both arguments are donated.
        Repeated calls change only rounding.

        Args:
          params: as `apply` returns them.
          state: as `apply` returns them.
          rows: row ids by table name, ``[..., T]``: decay only these rows, at the cost of reading
            and writing them. If the reads of a table are known before a step, as in an n-gram
            memory (``layer.row_ids(tokens)``), the loss is then the same as if every step decayed
            every row. Ids refer to whole tables, not to a block of rows.

        Raises:
          ValueError: `rows` names a parameter that is not a table, or ids have a wrong number of
            tables.

        Example:
          >>> import jax, jax.numpy as jnp, lutjax
          >>> from lutjax import optim
          >>> rule = optim.SGD(weight_decay=0.5, decay="every")
          >>> optimizer = optim.Optimizer(rule, rate=1.0, tables={"weights"})
          >>> def loss(params, row):
          ...     return 0 * lutjax.weighted_lookup(params["weights"], row, jnp.ones((1, 1))).sum()
          >>> params = {"weights": jnp.ones((1, 2, 1))}
          >>> state = optimizer.init(params)
          >>> for row in (0, 0, 1):  # every step halves
          ...     _, gradients = optim.value_and_grad(loss)(params, jnp.array([[row]]))
          ...     params, state = optimizer.apply(params, gradients, state)
          >>> params["weights"].ravel(), optimizer.current(params, state)[0]["weights"].ravel()
          (Array([0.25 , 0.125], dtype=float32), Array([0.125, 0.125], dtype=float32))
        """
        split = self._split(params)
        unknown = sorted(set(rows or ()) - set(split.tables))
        if unknown:
            raise ValueError(
                f"Optimizer.current: rows names {unknown}; "
                f"the tables are {sorted(split.tables) or 'none'}."
            )
        tables = {name: (table, state.rows[name]) for name, table in split.tables.items()}
        for name in split.tables if rows is None else rows:
            table, ids = split.tables[name], None if rows is None else rows[name]
            if ids is not None and (not np.ndim(ids) or ids.shape[-1] != table.shape[0]):
                raise ValueError(
                    f"Optimizer.current: rows[{name!r}] has shape {list(np.shape(ids))}; expected "
                    f"ids [..., {table.shape[0]}], one per table."
                )
            tables[name] = self._rule_of(name).current(table, state.rows[name], ids)
        params = split.join(split.others, {name: table for name, (table, _) in tables.items()})
        return params, state._replace(rows={name: of_rows for name, (_, of_rows) in tables.items()})


def _mask_tables(split: Split, others: list[Any]) -> Any:
    """Return the tree of parameters for Optax, without tables."""
    return split.join(others, dict.fromkeys(split.tables, optax.MaskedNode()))


def _flatten_state(state: Any, others: Any) -> Any:
    """Return Optax state with lists in place of parameter trees, as checkpoints store it."""
    structure: Any = jax.tree.structure(others)

    def is_tree(part: Any) -> bool:
        return bool(structure == jax.tree.structure(part))

    return jax.tree.map(lambda a: jax.tree.leaves(a) if is_tree(a) else a, state, is_leaf=is_tree)


def _same_rates(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    return a.keys() == b.keys() and all(a[n] is b[n] or np.array_equal(a[n], b[n]) for n in a)
