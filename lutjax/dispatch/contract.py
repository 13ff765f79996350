"""Kernel contract: arguments and results of kernels.

Each op declares a subclass of `Call`, a frozen dataclass with its arrays and static options, in
``lutjax/ops/<op>.py``. A kernel is a module with functions that take a call:

    forward(call, *, device) -> outputs
    backward(call, cotangent, needs, *, device) -> cotangents of arrays, by their names
    update(call, cotangent, step, *, device) -> the table, and the state of its rows,
        after an optimizer step

It may declare its supported calls as its ``SPEC``, a `lutjax.dispatch.registry.Declaration`.

- `call` has one batch axis in front of every array declared `batched`.
- `device` is the `lutjax.dispatch.registry.Device` that will run the call.
- `cotangent` is the output's cotangent. For an output or array that is a `Detection`, it is the
  margin's cotangent.
- `needs` has the names of the differentiated arrays. Other cotangents are never read; computing
  them wastes work.
- Every output has the batch axis in front. Cotangents may have a wider dtype than their arrays:
  `lutjax.dispatch._transforms` rounds them once.
- The backward pass receives the call returned by the forward call's `Call.residuals`.
- Ops with sums have the option `accumulate`: None, or a `lutjax.FixedPoint`. With `FixedPoint`,
  every sum has int32 addends, and a cotangent that is a sum over samples, detectors or pairs is
  returned as the int32 total: it is divided after the sum over devices. The same holds for an
  output returned by `accumulate.total` (or `lutjax.values._fixed_point.result`).
- A kernel that declares `stacks` also receives calls in which all arrays have one more leading
  axis. Such calls run together, as under a `jax.vmap` that also maps shared arrays. Its results
  have the same axis.
- An op with a table has a third direction, `update`: it updates the rows read by the call.
- A fused op combines several steps that other ops compute. It declares these as its `parts`, and
  its kernels are only faster. Where no kernel fits, the parts run, with their own kernels,
  gradients and rules.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Literal, TypeVar

import jax

from lutjax.values._fixed_point import FixedPoint
from lutjax.values._row_rules import SGD, RowRule, RowState

C = TypeVar("C", bound="Call")

Direction = Literal["forward", "backward", "update"]
DIRECTIONS: tuple[Direction, ...] = ("forward", "backward", "update")


def batched(rank: int, axes: str = "", **options: Any) -> Any:
    """Return a field for an array or array pytree with batch dimensions in front of `rank` axes.

    Args:
      rank: number of the array's own axes.
      axes: a letter for each own axis, separated by spaces. ``t`` is the detector axis, over which
          kernels can be divided; ``g`` and ``h`` are group axes, and ``go`` is groups times
          outputs. The batch is ``b``.
      **options: options for `dataclasses.field`; ``default=None`` if the array is optional.
    """
    return dataclasses.field(metadata={"rank": rank, "axes": axes}, **options)


def shared(axes: str = "", **options: Any) -> Any:
    """Return a field for an array without batch dimensions, shared by the whole batch.

    For `axes` see `batched`.
    """
    return dataclasses.field(metadata={"rank": None, "axes": axes}, **options)


def static(**options: Any) -> Any:
    """Return a field for a hashable option, part of the compiled program."""
    return dataclasses.field(metadata={"static": True}, kw_only=True, **options)


class Call:
    """Base class for op calls: named arrays and options. A pytree with the arrays as leaves.

    Subclasses are frozen dataclasses with fields declared by `batched`, `shared` and `static`.

    Attributes:
      op: name of the op, as in the registry.
      table_name: name of the table array, which can have a sparse gradient and updates.
      differentiable: True if the op has a gradient.
      features_first: kernels take and return batched arrays as ``[features, batch]``. Ranks are 1
          then.
      output: letters of the output's axes without the batch; None: the op declares no axes.
      parts: decomposition of a fused op: ``parts(call, implementation=...)`` returns the outputs of
          a call by other ops. Arrays have any batch dimensions; with `features_first`, features
          precede them. None: the op is not fused.
      plain: reason for which only plain JAX runs this call; None: any implementation may. An op
          with two kinds of arguments may have two call classes with its name.
      also: additional platforms that run such a call.
      accumulate: accumulation mode of ops with sums; None for other ops.
    """

    op: ClassVar[str]
    table_name: ClassVar[str | None]
    differentiable: ClassVar[bool]
    features_first: ClassVar[bool]
    output: ClassVar[str | None]
    parts: ClassVar[Callable[..., Any] | None]
    also: ClassVar[tuple[str, ...]] = ()
    accumulate: FixedPoint | None = None

    def __init_subclass__(
        cls,
        *,
        op: str,
        table: str | None = None,
        differentiable: bool = True,
        features_first: bool = False,
        output: str | None = None,
        parts: Callable[..., Any] | None = None,
    ) -> None:
        cls.op, cls.table_name, cls.parts = op, table, parts
        cls.differentiable, cls.features_first = differentiable, features_first
        cls.output = output
        unflatten = functools.partial(_unflatten, cls)
        # JAX flattens a call at every transformation: no Python function runs for it.
        flatten = operator.attrgetter("_tree")
        jax.tree_util.register_pytree_with_keys(cls, _flatten_with_keys, unflatten, flatten)

    @classmethod
    @functools.cache
    def _fields(cls) -> tuple[dataclasses.Field[Any], ...]:
        return dataclasses.fields(cls)  # type: ignore[arg-type]

    @classmethod
    @functools.cache
    def arrays(cls) -> tuple[str, ...]:
        """Array names, in order."""
        return tuple([f.name for f in cls._fields() if "rank" in f.metadata])

    @classmethod
    @functools.cache
    def ranks(cls) -> tuple[int | None, ...]:
        """Rank of each array without batch dimensions; None for shared arrays."""
        return tuple([f.metadata["rank"] for f in cls._fields() if "rank" in f.metadata])

    @classmethod
    @functools.cache
    def letters(cls) -> dict[str, tuple[str, ...]]:
        """Return axis letters in kernel layout, by array and for ``output``; or nothing."""
        if cls.output is None:
            return {}

        def with_batch(axes: str) -> tuple[str, ...]:
            return (*axes.split(), "b") if cls.features_first else ("b", *axes.split())

        arrays = {f.name: f.metadata for f in cls._fields() if "rank" in f.metadata}
        found = {
            name: tuple(of["axes"].split()) if of["rank"] is None else with_batch(of["axes"])
            for name, of in arrays.items()
        }
        return {**found, "output": with_batch(cls.output)}

    def select_shard(self: C, index: Any) -> C:
        """Return the call for one device's part of the detectors.

        Numbering begins at 0 in each part.
        """
        return self

    @property
    def plain(self) -> str | None:
        """The reason why only plain JAX and the platforms in `also` support the call, or None."""
        return None

    @classmethod
    @functools.cache
    def _options(cls) -> tuple[str, ...]:
        return tuple([f.name for f in cls._fields() if "static" in f.metadata])

    def values(self) -> tuple[Any, ...]:
        """Return the arrays in declaration order."""
        arrays: tuple[Any, ...] = self.__dict__["_tree"][0]
        return arrays

    def options(self) -> tuple[tuple[str, Any], ...]:
        """Return the named static options."""
        options: tuple[tuple[str, Any], ...] = self.__dict__["_tree"][1]
        return options

    def __post_init__(self) -> None:
        get, options = self.__dict__.__getitem__, self._options()
        named = tuple(zip(options, map(get, options), strict=True))
        self.__dict__["_tree"] = (tuple(map(get, self.arrays())), named)

    @classmethod
    def from_arrays(cls: type[C], arrays: Iterable[Any], options: Iterable[tuple[str, Any]]) -> C:
        """Return the call with these `values` and `options`.

        Values are not checked: transformations pass placeholders.
        """
        return _unflatten(cls, options, arrays)

    def replace(self: C, **changes: Any) -> C:
        """Return the call with some fields replaced.

        Unlike constructor arguments, they may be placeholders.
        """
        call = object.__new__(type(self))
        call.__dict__.update(self.__dict__, **changes)
        call.__post_init__()
        return call

    def row_call(self) -> "Call":
        """Return a call that reads the same rows of an arbitrary table ``[T, R, ...]``."""
        return self

    def prepare(self: C) -> C:
        """Return the call as kernels receive it, with common preprocessing applied.

        Runs inside the compiled op.
        """
        return self

    def residuals(self: C, outputs: Any) -> C:
        """Return the call for the backward pass. Unneeded arrays may be None."""
        return self


def _flatten_with_keys(call: Call) -> tuple[tuple[tuple[Any, Any], ...], Any]:
    arrays, options = call.__dict__["_tree"]
    keys = map(jax.tree_util.GetAttrKey, call.arrays())
    return tuple(zip(keys, arrays, strict=True)), options


def _unflatten(cls: type[C], options: Iterable[tuple[str, Any]], arrays: Iterable[Any]) -> C:
    call, arrays, options = object.__new__(cls), tuple(arrays), tuple(options)
    call.__dict__.update(zip(cls.arrays(), arrays, strict=True), _tree=(arrays, options))
    call.__dict__.update(options)
    return call


@dataclasses.dataclass(frozen=True)
class Step:
    """Optimizer step for a table, as passed to `update`.

    Attributes:
      rate: learning rate, in the dtype of the update: a scalar, or ``[T or 1, R or 1, O or 1]`` for
          plain JAX and kernels registered with `rates`.
      factor: gradient factor with the same shapes; None: 1.
      state: row state, by name. rule: row update rule.
    """

    rate: Any
    factor: Any = None
    state: RowState = dataclasses.field(default_factory=dict)
    rule: RowRule = dataclasses.field(default_factory=SGD)

    @property
    def differs_by_row(self) -> bool:
        """True if rate or factor are arrays."""
        return any(a.ndim for a in (self.rate, self.factor) if a is not None)

    @property
    def rate_and_factor(self) -> jax.Array:
        """Product of rate and factor in float32, for kernels that scale a cotangent once."""
        rate: jax.Array = self.rate.astype("float32")
        return rate if self.factor is None else rate * self.factor.astype("float32")


jax.tree_util.register_dataclass(Step, ["rate", "factor", "state"], ["rule"])
