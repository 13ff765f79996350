"""Table statistics: the read count of each row."""

import dataclasses
import functools
import importlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Float, Int

from lutjax import _compat, _meshes
from lutjax._typing import Array
from lutjax.arguments import format_value
from lutjax.dispatch import _table_reads
from lutjax.dispatch._leading_axes import fold_call
from lutjax.dispatch.contract import Call
from lutjax.dispatch.registry import Device, devices_of
from lutjax.tables.update import hits_of
from lutjax.values._dtypes import FLOATS

_MOST_READS = 2**31 - 1  # of a row


@dataclasses.dataclass(frozen=True)
class Usage:
    """Row read counts of tables, made by `lutjax.usage`. A pytree.

    Counts from two batches are added by ``+``, and over the devices of a `jax.shard_map` by
    `jax.lax.psum`. NumPy computes the statistics, outside of jit.

    Attributes:
      counts: ``[T, R]``, int32. Convert them to NumPy int64 if summed batches may exceed ``2**31``
          reads of one row.

    Example:
      >>> import numpy as np, lutjax
      >>> first = lutjax.Usage(np.array([[2, 2, 0, 0], [0, 0, 0, 0]]))
      >>> total = first + lutjax.Usage(np.array([[2, 2, 0, 0], [0, 1, 0, 0]]))
      >>> total.reads, total.never_read, total.entropy, total.largest_share
      (array([8, 1]), array([2, 3]), array([1., 0.]), array([0.5, 1. ]))
    """

    counts: Int[Array, "detectors rows"]

    def __add__(self, other: "Usage") -> "Usage":
        return Usage(self.counts + other.counts)

    @property
    def reads(self) -> Int[np.ndarray, " detectors"]:
        """Number of reads per table."""
        return np.asarray(self._counts.sum(-1))

    @property
    def never_read(self) -> Int[np.ndarray, " detectors"]:
        """Number of unread rows per table."""
        return np.asarray((self._counts == 0).sum(-1))

    @property
    def entropy(self) -> Float[np.ndarray, " detectors"]:
        """Entropy of each table's reads in bits.

        It is 0 if all reads hit one row or there are none. If all rows are read equally often, it
        equals the number of address bits.
        """
        share = self._shares
        bits = -share * np.log2(share, out=np.zeros_like(share), where=share > 0)
        # The absolute value, so that no entropy is -0.
        return np.asarray(np.abs(bits.sum(-1)))

    @property
    def largest_share(self) -> Float[np.ndarray, " detectors"]:
        """Share of reads that hit the most read row of each table; 0 for an unread table."""
        return np.asarray(self._shares.max(-1, initial=0.0))

    @property
    def _counts(self) -> np.ndarray:
        counts = np.asarray(self.counts).astype(np.int64)
        if (counts < 0).any():
            raise ValueError(
                "Usage: counts are negative: a sum over batches exceeded int32. Add batches in "
                "NumPy's int64: lutjax.Usage(np.asarray(found.counts, np.int64))."
            )
        return counts

    @property
    def _shares(self) -> np.ndarray:
        shares: np.ndarray = self._counts / np.maximum(self.reads, 1)[:, None]
        return shares


jax.tree_util.register_dataclass(Usage, ["counts"], [])


def usage(function: Callable[..., Any]) -> Callable[..., dict[str, Usage]]:
    """Return a function that counts the reads of all tables in `function`, with the same arguments.

    It accepts any JAX function, including models from other libraries::

        counts = jax.jit(lutjax.usage(model))                      # Flax NNX: counts(x)
        counts = jax.jit(lutjax.usage(model.apply))                # Flax Linen: counts(variables,
        x)
        counts = jax.jit(lutjax.usage(transformed.apply))          # Haiku: counts(params, state,
        key, x)
        total = jax.tree.map(jnp.add, counts(x), counts(other_x))  # of two batches

    Under jit the result of `function` is not computed unless a lookup depends on it. A lookup reads
    a row once per sample; a scored or weighted lookup reads each row with a nonzero coefficient;
    attention reads a row for each query-key pair.

    Args:
      function: takes arrays, with lookups at its own level: not inside a `jax.jit`, `vmap`, `scan`
          or `checkpoint` within it.

    Returns:
      A function with the arguments of `function`. It returns a `lutjax.Usage` for each table, by
      the table's path in the model or in its argument, as in ``"layers/0/weights"``. If a table is
      looked up twice, its reads are added. A table that is not an argument, because the function
      cast or created it, is named by op and number, as in ``"lookup 1"``.

    Raises:
      TypeError: `function` is not callable.
      ValueError: on a call: a lookup is inside a transformation, or an external op's plain-JAX
          kernel has no ``hits``.

    Source: docs/semantics.md, section 13.

    Example:
      >>> import jax, jax.numpy as jnp, lutjax
      >>> anchors = lutjax.sample_anchors(jax.random.key(0), n_inputs=8, n_detectors=4, n_anchors=3)
      >>> def model(params, x):
      ...     return lutjax.lut(x, params["hidden"]["weights"], anchors)
      >>> params = {"hidden": {"weights": jnp.zeros((4, 2**3, 5))}}
      >>> x = jax.random.normal(jax.random.key(1), (16, 8))
      >>> usage = jax.jit(lutjax.usage(model))(params, x)
      >>> usage["hidden/weights"].counts.shape, usage["hidden/weights"].reads
      ((4, 8), array([16, 16, 16, 16]))
    """
    if not callable(function):
        raise TypeError(
            f"usage: function is {format_value(function)}; expected a function or a model."
        )

    def count_reads(*args: Any, **kwargs: Any) -> dict[str, Usage]:
        reads = _Counts(_names((getattr(function, "__self__", function), *args, *kwargs.values())))
        with _table_reads.observe_reads(reads):
            function(*args, **kwargs)
        return {name: Usage(counts) for name, counts in reads.found.items()}

    return count_reads


def _names(arguments: tuple[Any, ...]) -> list[tuple[str, Any]]:
    """Return all arrays in the arguments with their paths."""
    named = []
    for argument in arguments:
        for path, leaf in jax.tree_util.tree_leaves_with_path(argument):
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            # Flax NNX calls the array of a variable `value`.
            named.append((name.removesuffix("/value"), leaf))
    return named


class _Counts(_table_reads.TableReads):
    """Tables with counted reads: `found` has the counts by table name."""

    def __init__(self, names: list[tuple[str, Any]]):
        self._names = {id(array): name for name, array in names if name}
        self._arrays = names  # kept, so that an id stays that of one object
        self._trace = _compat.trace_state()
        self.found: dict[str, jax.Array] = {}

    def name(self, table: Any) -> str:
        return self._names.get(id(table), "")

    def look_up(self, name: str, call: Call, run: _table_reads.Run) -> jax.Array:
        name = name or f"{call.op} {1 + sum(n.startswith(f'{call.op} ') for n in self.found)}"
        if _compat.trace_state() != self._trace:
            raise ValueError(
                f"usage: the table {name} is looked up inside a jit, vmap, scan, checkpoint or "
                "shard_map within the function, where reads cannot be counted. Count inside the "
                "transformation, as in jax.jit(lutjax.usage(function)), or without it."
            )
        y = run(None, call)
        device = devices_of(jax.tree.leaves(call))[0]
        count = functools.partial(_count_rows, device=device)
        counts = _meshes.shard_by_compiler(count, lambda *_: PartitionSpec())(call, y)
        self.found[name] = self.found[name] + counts if name in self.found else counts
        return y

    def stand_in(self, table: Any, made: jax.Array) -> None:
        if id(table) in self._names:
            self._names[id(made)] = self._names[id(table)]
            self._arrays.append(("", made))

    def scale(self, name: str, factor: Any) -> None:
        """Gradients do not matter."""


@functools.partial(jax.jit, static_argnames="device")
def _count_rows(call: Call, output: jax.Array, *, device: Device) -> jax.Array:
    """Return the read count of each row in a call's tables, ``[T, R]``."""
    hits = hits_of(call.op)
    if hits is None:
        raise ValueError(
            f"usage: {call.op} reads a table, but its pure-JAX kernel has no function `hits`, "
            "which lists the reads."
        )
    updates = importlib.import_module("lutjax.kernels._xla._row_updates")
    axes = frozenset[str]().union(*(_compat.varying_axes(a) for a in jax.tree.leaves(call)))
    call = call.row_call()
    weights = getattr(call, str(call.table_name))
    # Int8 tables have no gradient: float tables in their place make the same reads.
    dtype = weights.dtype if weights.dtype.name in FLOATS else jnp.float32
    # Only the shape matters, so the compiler allocates no memory for it.
    weights = _compat.cast_varying(jnp.zeros(weights.shape, dtype), axes)
    call, cotangent = fold_call(
        call.replace(**{str(call.table_name): weights}), jnp.zeros_like(output, dtype=dtype)
    )
    visit, n_hits = hits(call, cotangent, device=device)
    if isinstance(n_hits, int) and n_hits > _MOST_READS:
        raise ValueError(
            f"usage: {call.op} reads each table up to {n_hits:,} times per call, which exceeds "
            "int32. Call it with fewer samples, and add the counts."
        )
    counts: jax.Array = updates.counts(call, visit)
    return counts
