"""The contract of a kernel: what it is given, and what it returns.

Each op declares a subclass of `Call`, a frozen dataclass of its arrays and static options, in ``lutjax/ops/<op>.py``. A kernel is a
module with functions of it::

    forward(call, *, device) -> outputs
    backward(call, cotangent, needs, *, device) -> cotangents of arrays, by their names
    update(call, cotangent, step, *, device) -> the table, and the state of its rows, after an optimizer step

It may declare which calls it supports as its ``SPEC``, a `lutjax.dispatch.registry.Declaration`.

- `call` has one batch axis in front of every array of it that is declared `batched`.
- `device` is the `lutjax.dispatch.registry.Device` that will run the call.
- `cotangent` is that of the output. The cotangent of an output or array that is a `Detection` is that of its margin.
- `needs` has the names of the arrays that are differentiated. The cotangents of others are not read, and work on them is wasted.
- Every output has the batch axis in front. Cotangents may come in a wider dtype than their arrays: they are rounded once, by
  `lutjax.dispatch._transforms`.
- The backward pass gets the call that `Call.residuals` of the forward call returned.
- Ops that add up have the option `accumulate`: None, or a `lutjax.FixedPoint`. With that one every sum is of its int32 addends, and a
  cotangent that is a sum over samples, detectors or pairs is returned as the int32 total: it is divided after the sum over devices.
  So is an output, where it is what `accumulate.total` (or `lutjax.values._fixed_point.result`) returns of its sums.
- A kernel that declares `stacks` also gets calls whose arrays, all of them, have one more axis in front: such calls run side by
  side, as under a `jax.vmap` that maps what a batch shares, too. What it returns has that axis in front.
- An op with a table has a third direction, `update`: it moves the rows that the call read.
- A fused op is one that other ops compute in several steps: it declares these as its `parts`, and its kernels are only faster. Where no kernel
  fits, the parts run, with their own kernels, gradients and rules.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Literal, TypeVar

import jax

from lutjax.values._row_rules import SGD, RowRule, RowState

C = TypeVar("C", bound="Call")

Direction = Literal["forward", "backward", "update"]
DIRECTIONS: tuple[Direction, ...] = ("forward", "backward", "update")


def batched(rank: int, axes: str = "", **options: Any) -> Any:
    """Field of an array, or of a pytree of arrays, that has leading axes in front of `rank` axes of its own.

    Args:
      rank: number of the array's own axes.
      axes: a letter for each axis of its own, with spaces between them; ``t`` is that of detectors, by which kernels can be divided over
        devices; ``g`` and ``h`` count groups of them, and ``go`` groups times outputs. The batch is ``b``.
      **options: of `dataclasses.field`; ``default=None`` where the array may be missing.
    """
    return dataclasses.field(metadata={"rank": rank, "axes": axes}, **options)


def shared(axes: str = "", **options: Any) -> Any:
    """Field of an array that has no leading axes: the whole batch shares it. For `axes` see `batched`."""
    return dataclasses.field(metadata={"rank": None, "axes": axes}, **options)


def static(**options: Any) -> Any:
    """Field of an option: hashable, part of the compiled program."""
    return dataclasses.field(metadata={"static": True}, kw_only=True, **options)


class Call:
    """Base of the calls of an op: its arrays and options by name. A pytree of the arrays.

    Subclasses are frozen dataclasses whose fields are declared by `batched`, `shared` and `static`.

    Attributes:
      op: name of the op, as in the registry.
      table_name: name of the array that is a table, whose gradient may be wanted in factors, and which has updates.
      differentiable: whether the op has a gradient.
      features_first: kernels get and return batched arrays as ``[features, batch]``. Ranks are 1 then.
      output: letters of the output's axes without the batch; None: of the axes of this op nothing is said.
      parts: of a fused op the function that returns the outputs of a call by other ops, ``parts(call, implementation=...)``. Arrays have
        any leading axes; with `features_first` features are first and the others follow. None: the op is not fused.
      plain: the reason why plain JAX alone runs this call; None: any implementation may. An op whose arguments are of two
        kinds may have two classes of calls of its name.
      also: platforms that run a call with such a reason, too.
    """

    op: ClassVar[str]
    table_name: ClassVar[str | None]
    differentiable: ClassVar[bool]
    features_first: ClassVar[bool]
    output: ClassVar[str | None]
    parts: ClassVar[Callable[..., Any] | None]
    also: ClassVar[tuple[str, ...]] = ()

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
        jax.tree_util.register_pytree_with_keys(
            cls,
            lambda call: (
                tuple(zip(map(jax.tree_util.GetAttrKey, cls.arrays()), call.values(), strict=True)),
                call.options(),
            ),
            lambda options, arrays: cls.of(arrays, options),
            lambda call: (call.values(), call.options()),
        )

    @classmethod
    @functools.cache
    def _fields(cls) -> tuple[dataclasses.Field[Any], ...]:
        return dataclasses.fields(cls)  # type: ignore[arg-type]

    @classmethod
    @functools.cache
    def arrays(cls) -> tuple[str, ...]:
        """Names of the arrays, in their order."""
        return tuple([f.name for f in cls._fields() if "rank" in f.metadata])

    @classmethod
    @functools.cache
    def ranks(cls) -> tuple[int | None, ...]:
        """Rank of each array without leading axes; None of one that has none."""
        return tuple([f.metadata["rank"] for f in cls._fields() if "rank" in f.metadata])

    @classmethod
    @functools.cache
    def letters(cls) -> dict[str, tuple[str, ...]]:
        """Return a letter for each axis of each array, by its name, and of the ``output``, as kernels get them; empty if nothing is said."""
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

    def of_part(self: C, index: Any) -> C:
        """Return the call as a device runs it that has a part of the detectors, the part with this number: what numbers them begins at 0 there."""
        return self

    @property
    def plain(self) -> str | None:
        """The reason why only plain JAX and the platforms in `also` support the call; None if there is none."""
        return None

    @classmethod
    @functools.cache
    def _options(cls) -> tuple[str, ...]:
        return tuple([f.name for f in cls._fields() if "static" in f.metadata])

    def values(self) -> tuple[Any, ...]:
        """Return the arrays, in the order of their names."""
        return tuple(map(self.__dict__.__getitem__, self.arrays()))

    def options(self) -> tuple[tuple[str, Any], ...]:
        """Return the static options with their names."""
        names = self._options()
        return tuple(zip(names, map(self.__dict__.__getitem__, names), strict=True))

    @classmethod
    def of(cls: type[C], arrays: Iterable[Any], options: Iterable[tuple[str, Any]]) -> C:
        """Return the call of `values` and `options`. Transformations put placeholders where the arrays are: none is looked at."""
        call = object.__new__(cls)
        call.__dict__.update(zip(cls.arrays(), arrays, strict=True))
        call.__dict__.update(options)
        return call

    def replace(self: C, **changes: Any) -> C:
        """Return the call with other values of some fields; unlike those of a constructor they may be placeholders."""
        call = object.__new__(type(self))
        call.__dict__.update(self.__dict__, **changes)
        return call

    def by_rows(self) -> "Call":
        """Return the call with a table ``[T, R, ...]``, whose values do not matter, that reads the same rows."""
        return self

    def prepared(self: C) -> C:
        """Return the call as kernels get it: what every kernel would do to an array first. Runs inside the compiled op."""
        return self

    def residuals(self: C, outputs: Any) -> C:
        """Return the call as the backward pass gets it: what it needs is kept, other arrays may be left out (None)."""
        return self


@dataclasses.dataclass(frozen=True)
class Step:
    """An optimizer step of a table, as an update is given it.

    Attributes:
      rate: learning rate, in the dtype that rows are moved in: a scalar, or ``[T or 1, R or 1, O or 1]`` for plain JAX and for kernels that
        are registered with `rates`.
      factor: of the gradient, likewise; None: 1.
      state: of the rows, by name. rule: how a row moves.
    """

    rate: Any
    factor: Any = None
    state: RowState = dataclasses.field(default_factory=dict)
    rule: RowRule = dataclasses.field(default_factory=SGD)

    @property
    def differs_by_row(self) -> bool:
        """True if rate or factor are arrays."""
        return any(a.ndim for a in (self.rate, self.factor) if a is not None)


jax.tree_util.register_dataclass(Step, ["rate", "factor", "state"], ["rule"])
