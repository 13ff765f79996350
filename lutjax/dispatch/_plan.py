"""The plan of a call: all that is static of how it runs."""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from lutjax import _compat
from lutjax.dispatch.contract import Call, Direction, Step
from lutjax.dispatch.registry import Device, KernelSpec, NoImplementationError, Request, kernel_registry
from lutjax.values._fixed_point import FixedPoint

F = TypeVar("F", bound=Callable[..., Any])

# One implementation for each device that may run the call.
Choice = tuple[tuple[Device, KernelSpec], ...]

Options = tuple[tuple[str, Any], ...]

Over = tuple[str, ...] | None
"""Mesh axes over which detectors are divided, inside a shard_map of the op; None: arrays are whole, and need no rule either."""


def cached(function: F) -> F:
    """Remember what a function returned, for hashable arguments."""
    return functools.lru_cache(maxsize=4096)(function)  # type: ignore[return-value]


@dataclasses.dataclass(frozen=True)
class Plan:
    """Plan of how a call runs: the key under which the functions made of it are kept.

    Attributes:
      op: class of the call. options: of the call, with their names; of an update also the rule.
      choice: implementations of the forward pass, or of the update. names: those that were asked for, by which the backward pass is chosen.
      over: see `Over`.
      launches: that were given for this call; see `lutjax.dispatch.registry.Launched`.
      stacked: all arrays have one more axis in front, of calls that run side by side; see the contract.
      thread: whose own the functions are; None: the main one's. JAX keeps the structure of residuals with the trace of a function, and has none
        while a thread traces a forward rule of it anew: a pullback in another thread would raise its StoreException. So every thread traces
        functions of its own.
    """

    op: type[Call]
    options: Options
    choice: Choice
    names: tuple[str, ...] = ()
    over: Over = ()
    launches: Any = None
    thread: int | None = None
    stacked: bool = False

    @functools.cached_property
    def _hash(self) -> int:
        mode = (self.over, self.launches, self.thread, self.stacked)
        return hash((self.op, self.options, self.choice, self.names, *mode))

    def __hash__(self) -> int:
        return self._hash

    def replace(self, **changes: Any) -> "Plan":
        """Return a plan with other values of some attributes."""
        return dataclasses.replace(self, **changes)

    def call(self, arrays: Iterable[Any]) -> Call:
        """Return the call of arrays; see `Call.of`."""
        return self.op.of(arrays, self.options)

    def option(self, name: str) -> Any:
        """Return an option; None if the op has none of this name."""
        return dict(self.options).get(name)

    @property
    def accumulate(self) -> FixedPoint | None:
        """The mode of the sums."""
        found: FixedPoint | None = self.option("accumulate")
        return found

    @property
    def devices(self) -> tuple[Device, ...]:
        """The devices that may run the call."""
        return tuple(device for device, _ in self.choice)

    @property
    def has_rules(self) -> bool:
        """True if the compilers of all devices that may run the call ask rules by which it is divided over a mesh."""
        return all(_compat.partitions_by_rule(device.backend) for device in self.devices)

    @property
    def has_parts(self) -> bool:
        """True if the parts of a fused op run on some of the devices."""
        return any(spec.of_parts for _, spec in self.choice)

    @property
    def fused(self) -> "Plan":
        """The plan of the devices on which a kernel runs a fused op, and not its parts."""
        return self.replace(choice=tuple((d, spec) for d, spec in self.choice if not spec.of_parts))

    @property
    def in_floats(self) -> "Plan | None":
        """The plan of the floating-point twin of an op whose sums are checked; None if they are not."""
        if self.accumulate is None or not self.accumulate.checked:
            return None
        return self.replace(options=tuple({**dict(self.options), "accumulate": None}.items()))

    def backward(self, shapes: Iterable[Any]) -> "Plan":
        """Return the plan of the backward pass of a call with these arrays.

        Raises:
          NoImplementationError: no implementation has one.
        """
        return self.replace(choice=choose(self.call(shapes), self.names, "backward", self.devices))


def choose(
    call: Call,
    names: tuple[str, ...],
    direction: Direction,
    devices: tuple[Device, ...],
    cotangent: Any = None,
    step: Step | None = None,
) -> Choice:
    """Return an implementation for each device; for some of several, if the others have none.

    Only one of several devices will run the call: a forced implementation need not fit them all.
    """
    choice, errors = [], []
    for device in devices:
        try:
            spec = kernel_registry.resolve_request(Request(direction, call, device, cotangent, step), names)
        except NoImplementationError as error:
            errors.append(error)
        else:
            choice.append((device, spec))
    if not choice:
        raise errors[0]
    return tuple(choice)


def choose_whole(call: Call, names: tuple[str, ...], devices: tuple[Device, ...]) -> Choice:
    """Return implementations of the forward pass; of a fused op kernels that also have the backward pass, else the parts."""
    forward = choose(call, names, "forward", devices)
    if call.parts is None:
        return forward
    backward = dict(choose(call, names, "backward", devices))
    return tuple((d, backward[d] if backward[d].of_parts else spec) for d, spec in forward)
