"""Loss gradients with sparse table gradients. Needs only jax, and supports any functional model."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from lutjax import _compat, _meshes
from lutjax.arguments import format_value
from lutjax.dispatch import _table_reads
from lutjax.tables.gradient import TableGradient, seal
from lutjax.tables.host import HostTable
from lutjax.tables.update import join_gradients
from lutjax.tables.watch import Read, TableUseError, Watch

__all__ = [
    "Chosen",
    "Split",
    "TableUseError",
    "is_factored",
    "microbatched",
    "select_tables",
    "value_and_grad",
]

Chosen = Collection[str] | Callable[[str, Any], bool]
"""Selection of table parameters: names, or a predicate on name and array.

A name joins the keys from the root by ``/``.
"""


def select_tables(where: str, tables: Any) -> Any:
    """Return the table selection for `Split`: a function, or a set of names; else TypeError."""
    if callable(tables):
        return tables
    if isinstance(tables, str) or not isinstance(tables, Collection) or isinstance(tables, Mapping):
        raise TypeError(
            f"{where}: tables is {format_value(tables)}; expected parameter names, as from "
            "lutjax.layers.nnx.tables_of(model), or a function of name and array."
        )
    return frozenset(tables)


def value_and_grad(
    loss: Callable[..., Any],
    *,
    tables: Chosen | None = None,
    has_aux: bool = False,
    host: Mapping[str, HostTable] | None = None,
) -> Callable[..., tuple[Any, Any]]:
    """`jax.value_and_grad`, with sparse table gradients.

    Args:
      loss: a function of the parameters, a pytree of float arrays, and of any other arguments;
          returns a scalar, or with `has_aux` a scalar and a pytree. Each table must reach exactly
          one `lutjax.lookup`, `sparse_lookup`, `lookup_attention` or `lut_pair_attention` (or one
          of their compositions), at the level of the loss itself: not inside a `jax.jit`, `vmap`,
          `scan` or `checkpoint` within it. Transform the whole step instead.
      tables: table parameters: names, keys from the root joined by ``/``, as
          `lutjax.layers.linen.tables_of` finds them; or a predicate on name and array. By default
          all tables that the loss itself looks up: a table that reaches its op in another way, cast
          for example, then has a dense gradient.
      has_aux: as in jax.
      host: host-resident tables that the loss reads, by names of your choice. The gradients are
          then a pair: parameter gradients, and a dict with the `TableGradient` of each host table,
          for `HostTable.update`.

    Returns:
      A function like `loss` that returns its value (and aux) and gradients with the structure of
      the parameters: a `TableGradient` for each table, and arrays for other parameters. Under
      `jax.shard_map` each device gets the sparse gradient for its own part of the batch.

    Raises:
      TableUseError: a table is looked up twice, or used in another way; or one of `tables` is not
          looked up at all (it is frozen, or was cast or copied before). Nothing has been computed
          then.
      ValueError: `tables` has a name that no parameter has.

    Source: docs/semantics.md, section 8.

    Example:
      >>> import jax, jax.numpy as jnp, lutjax
      >>> from lutjax import optim
      >>> sizes = {"n_inputs": 8, "n_detectors": 4, "n_anchors": 10}
      >>> anchors = lutjax.sample_anchors(jax.random.key(0), **sizes)
      >>> params = {"weights": jnp.zeros((4, 2**10, 5)), "bias": jnp.zeros(5)}
      >>> def loss(params, x):
      ...     return jnp.mean((lutjax.lut(x, params["weights"], anchors) + params["bias"] - 1) ** 2)
      >>> value, gradients = optim.value_and_grad(loss)(params, jnp.ones((3, 8)))
      >>> of_table, of_bias = gradients["weights"], gradients["bias"]
      >>> type(of_table).__name__, of_table.cotangent.shape, of_bias.shape
      ('TableGradient', (3, 5), (5,))
    """
    if tables is not None:
        tables = select_tables("value_and_grad", tables)

    def compute_gradients(params: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        names = {table: name for name, table in (host or {}).items()}

        def watch_reads(params: Any, watch: Watch) -> Any:
            with _table_reads.observe_reads(watch):
                return loss(params, *args, **kwargs)

        # A first evaluation in shapes finds the tables that the loss looks up, and the shapes of
        # the taps.
        watches = list[Watch]()

        def trace_reads(params: Any) -> None:
            split = Split(params, (lambda name, array: True) if tables is None else tables)
            watches.append(Watch(split.tables, None, names))
            watch_reads(split.join(split.others, split.tables), watches[-1])

        jax.eval_shape(trace_reads, params)
        reads = watches[-1].look_ups
        for name in names.values():
            if name not in reads:
                raise TableUseError(
                    f"the host-resident table {name} is not read by the loss: "
                    "remove it from `host`."
                )
        table_names = frozenset(reads) - frozenset(names.values())
        split = Split(params, table_names if tables is None else tables)
        split.check_look_ups(watches[-1])
        # The loss is also differentiated by a zero for each table, so that its guard runs: it
        # raises if a gradient reaches the table outside of the lookup.
        guards = tuple(jnp.zeros((), jnp.float32) for _ in split.tables)
        taps = {name: _zeros(reads[name]) for name in (*split.tables, *names.values())}

        def run_tapped(others: Any, taps: Any, guards: Any) -> tuple[Any, Any]:
            guarded = {
                name: _guard(name)(table, guard)
                for (name, table), guard in zip(split.tables.items(), guards, strict=True)
            }
            watch = Watch(guarded, taps, names)
            result = watch_reads(split.join(others, guarded), watch)
            # Again: outside of jit, more operations make a new array than while tracing.
            split.check_look_ups(watch)
            value, aux = result if has_aux else (result, None)
            look_ups = {name: read.call for name, read in watch.look_ups.items()}
            return value, (aux, look_ups, watch.factors, watch.ids)

        run = jax.value_and_grad(run_tapped, argnums=(0, 1, 2), has_aux=True)
        (value, (aux, look_ups, factors, ids)), (of_others, of_taps, _) = run(
            split.others, taps, guards
        )

        def table_gradient(name: str, table: Any) -> TableGradient:
            return TableGradient(
                look_up=look_ups[name],
                # A layer may widen its tables for the lookup: the cotangent is then wider than the
                # tables.
                sealed=seal(of_taps[name][0].astype(table.dtype)),
                factor=factors.get(name),
                after=of_taps[name][1],
                shape=table.shape,
                dtype=table.dtype,
                axes=_compat.varying_axes(table) if isinstance(table, jax.Array) else frozenset(),
            )

        of_tables = {name: table_gradient(name, table) for name, table in split.tables.items()}
        gradients = split.join(of_others, of_tables)
        if host is not None:
            read = {
                name: table.gradient_of(table_gradient(name, table), ids[name])
                for name, table in host.items()
            }
            gradients = (gradients, read)
        return ((value, aux) if has_aux else value), gradients

    return compute_gradients


class Split:
    """Parameters split into tables, by name, and a list of other parameters."""

    def __init__(self, params: Any, tables: Any):
        leaves, self._structure = jax.tree_util.tree_flatten_with_path(params)
        named = [
            (jax.tree_util.keystr(path, simple=True, separator="/"), leaf) for path, leaf in leaves
        ]
        if not callable(tables):
            unknown = sorted(tables - {name for name, _ in named})
            if unknown:
                raise ValueError(
                    f"tables has {unknown}; the parameters are {[name for name, _ in named]}."
                )
        self._names = [
            name if (tables(name, leaf) if callable(tables) else name in tables) else None
            for name, leaf in named
        ]
        pairs = list(zip(self._names, (leaf for _, leaf in named), strict=True))
        self.tables = {name: jnp.asarray(leaf) for name, leaf in pairs if name is not None}
        self.others = [leaf for name, leaf in pairs if name is None]

    def join(self, others: list[Any], tables: Mapping[str, Any]) -> Any:
        """Return the parameter pytree with these tables and other parameters."""
        rest = iter(others)
        return jax.tree.unflatten(
            self._structure, [next(rest) if name is None else tables[name] for name in self._names]
        )

    def gradients(self, gradients: Any) -> tuple[list[Any], dict[str, Any]]:
        """Split gradients into a list for other parameters and a dict for tables, by name."""
        leaves, structure = jax.tree.flatten(gradients, is_leaf=is_factored)
        if structure != self._structure:  # type: ignore[operator]
            raise ValueError(
                f"the gradients have the structure {structure}; "
                f"the parameters have {self._structure}."
            )
        others, of_tables = [], {}
        for name, gradient in zip(self._names, leaves, strict=True):
            if name is not None:
                of_tables[name] = gradient
            elif is_factored(gradient):
                raise TypeError(
                    "a parameter that is not a table has a sparse gradient; pass the same "
                    "`tables` to `value_and_grad` and the optimizer."
                )
            else:
                others.append(gradient)
        return others, of_tables

    def check_look_ups(self, watch: Watch) -> None:
        """Raise TableUseError if a table was not looked up.

        The reads of other arrays with its shape show the cause.
        """
        for name, table in self.tables.items():
            if name in watch.look_ups:
                continue
            # The shapes of the table, and of a table that a scan or vmap divides.
            shapes = (table.shape, table.shape[1:])
            inside = {inner for shape, inner in watch.unknown if shape in shapes}
            if True in inside:
                raise TableUseError(
                    f"the table {name} is an argument of a jit, vmap, scan, checkpoint (nnx.remat) "
                    "or shard_map within the loss, which replaces it by another array; a sparse "
                    "gradient requires a lookup outside. Transform the whole training step "
                    "instead, or remove this table from `tables` to get a dense gradient."
                )
            if inside:
                raise TableUseError(
                    f"the table {name} is not looked up by the loss, but another array with its "
                    "shape is, as after a cast, an index, a product or `stop_gradient`. Pass the "
                    "parameter itself to the op (in NNX `variable.get_value()` instead of "
                    "`variable[...]`), or remove this table from `tables` to get a dense gradient."
                )
            raise TableUseError(
                f"the table {name} is not looked up by the loss: it is unused, or an op reads "
                "another array computed from it. Pass the parameter itself to the op, or remove "
                "this table from `tables` or from the parameters."
            )


def _zeros(read: Read) -> tuple[jax.Array, jax.Array]:
    scalar = _compat.cast_varying(jnp.zeros((), jnp.float32), _compat.varying_axes_of(read.output))
    return _meshes.zeros_of(read.output), scalar


def _guard(name: str) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Return the identity on a table, which raises if the table has a gradient outside the taps."""

    @jax.custom_vjp
    def guard(table: jax.Array, zero: jax.Array) -> jax.Array:
        return table

    def forward(table: Any, zero: Any) -> tuple[jax.Array, None]:
        return table.value, None

    def backward(_: None, cotangent: Any) -> tuple[None, None]:
        if not isinstance(cotangent, jax.custom_derivatives.SymbolicZero):
            raise TableUseError(
                f"the loss uses the table {name} outside of its lookup as well, but a sparse "
                "gradient covers only the lookup. Remove the other use (a penalty, a second "
                "lookup inside jit or scan) from the loss, or remove this table from `tables` to "
                "get a dense gradient."
            )
        return None, None

    guard.defvjp(forward, backward, symbolic_zeros=True)
    return guard


def microbatched(value_and_grad: Callable[..., Any], count: int) -> Callable[..., Any]:
    """Return a function with the same value and gradients that splits a batch into serial parts.

    Dense gradients are averaged. Sparse gradients are concatenated: an optimizer then takes one
    step, exactly as for an undivided batch.

    Args:
      value_and_grad: for a loss that is a mean over its batch, the argument after the parameters: a
          pytree of arrays with a leading batch axis. Any aux is returned with a leading axis for
          the parts.
      count: number of parts.

    Raises:
      ValueError: the batch cannot be divided, or `count` is less than 1.
    """
    if count < 1:
        raise ValueError(f"microbatched: count is {count}; it must be at least 1.")

    def split_batch(a: jax.Array) -> jax.Array:
        return a.reshape(count, a.shape[0] // count, *a.shape[1:])

    def spec_of_parts(a: jax.Array) -> PartitionSpec:
        # Each part lies on all devices, as the batch did.
        return PartitionSpec(None, *_meshes.spec_of(a))

    def accumulate_gradients(params: Any, batch: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        for a in jax.tree.leaves(batch):
            if not a.ndim or a.shape[0] % count:
                raise ValueError(
                    f"microbatched: a batch array has shape {list(a.shape)}; its first axis must "
                    f"be a multiple of {count}."
                )
        parts = jax.tree.map(_meshes.shard_by_compiler(split_batch, spec_of_parts), batch)

        def split(batch: Any) -> tuple[Any, list[Any], list[Any]]:
            result, gradients = value_and_grad(params, batch, *args, **kwargs)
            leaves = jax.tree.leaves(gradients, is_leaf=is_factored)
            dense = [None if is_factored(g) else g for g in leaves]
            return result, dense, [g if is_factored(g) else None for g in leaves]

        def add_chunk(total: list[Any], batch: Any) -> tuple[list[Any], Any]:
            result, dense, factored = split(batch)
            return jax.tree.map(jnp.add, total, dense), (result, factored)

        first, types = jax.tree.map(lambda a: a[0], parts), list[Any]()
        jax.eval_shape(lambda: types.extend(jax.tree.map(jax.typeof, split(first)[1])))
        zeros = jax.tree.map(_meshes.zeros_of, types)
        # The loop adds dense gradients, and stacks sparse gradients, which are joined at the end.
        total, (result, factored) = jax.lax.scan(add_chunk, zeros, parts)
        leaves = [
            t / count if g is None else join_gradients(g).scaled(1 / count)
            for t, g in zip(total, factored, strict=True)
        ]
        has_aux = isinstance(result, tuple)
        mean = jnp.mean(result[0] if has_aux else result)
        gradients = jax.tree.unflatten(jax.tree.structure(params), leaves)
        return ((mean, result[1]) if has_aux else mean), gradients

    return accumulate_gradients


def is_factored(gradient: Any) -> bool:
    """Return True for a sparse gradient; for ``is_leaf``."""
    return isinstance(gradient, TableGradient)
