"""Plan of a call: all static properties of its execution."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeVar

from lutjax import _compat
from lutjax.dispatch.contract import Call, Direction, Step
from lutjax.dispatch.registry import (
    Device,
    KernelSpec,
    NoImplementationError,
    Request,
    kernel_registry,
)

F = TypeVar("F", bound=Callable[..., Any])

# One implementation for each device that may run the call.
Choice = tuple[tuple[Device, KernelSpec], ...]

Over = tuple[str, ...] | None
"""Mesh axes that divide detectors in the op's shard_map; None if arrays are whole, without a rule.
"""


def cache_calls(function: F) -> F:
    """Cache a function with hashable arguments."""
    return functools.lru_cache(maxsize=4096)(function)  # type: ignore[return-value]


@dataclasses.dataclass(frozen=True)
class Plan:
    """Execution plan of a call, the cache key for its functions.

    The functions take the call itself, a pytree with its options.

    Attributes:
      op: class of the call.
      choice: implementations of the forward pass or the update. names: requested implementations,
          used to select the backward pass.
      over: see `Over`.
      launches: kernel configs given for this call; see `lutjax.dispatch.registry.Launched`.
      stacked: all arrays have one more leading axis, for calls that run together; see the contract.
      thread: owner of the functions; None: the main thread. JAX stores the residual structure with
          a function's trace, and has none while another thread traces its forward rule again: a
          pullback in that thread would raise StoreException. Every thread therefore traces its own
          functions.
    """

    op: type[Call]
    choice: Choice
    names: tuple[str, ...] = ()
    over: Over = ()
    launches: Any = None
    thread: int | None = None
    stacked: bool = False

    @functools.cached_property
    def _hash(self) -> int:
        mode = (self.over, self.launches, self.thread, self.stacked)
        return hash((self.op, self.choice, self.names, *mode))

    def __hash__(self) -> int:
        return self._hash

    def replace(self, **changes: Any) -> "Plan":
        return dataclasses.replace(self, **changes)

    @property
    def devices(self) -> tuple[Device, ...]:
        """Devices that may run the call."""
        return tuple([device for device, _ in self.choice])

    @property
    def has_rules(self) -> bool:
        """True if the compilers for all possible devices need partitioning rules."""
        return all(_compat.partitions_by_rule(device.backend) for device, _ in self.choice)

    @property
    def has_parts(self) -> bool:
        """True if a fused op runs by its decomposition on some devices."""
        return any(spec.is_decomposition for _, spec in self.choice)

    @property
    def fused(self) -> "Plan":
        """Plan for the devices that run the fused op as one kernel."""
        return self.replace(
            choice=tuple((d, spec) for d, spec in self.choice if not spec.is_decomposition)
        )

    def backward(self, call: Call) -> "Plan":
        """Return the plan of a call's backward pass.

        Raises:
          NoImplementationError: no implementation has a backward pass.
        """
        return self.replace(choice=choose(call, self.names, "backward", self.devices))


def choose(
    call: Call,
    names: tuple[str, ...],
    direction: Direction,
    devices: tuple[Device, ...],
    cotangent: Any = None,
    step: Step | None = None,
) -> Choice:
    """Return an implementation for each device; for some devices only, if the others have none.

    Only one device will run the call, so a forced implementation need not support all devices.
    """
    choice, errors = [], []
    for device in devices:
        try:
            spec = kernel_registry.resolve_request(
                Request(direction, call, device, cotangent, step), names
            )
        except NoImplementationError as error:
            # Not an error yet: a process with an accelerator also has a CPU.
            errors.append(error)
        else:
            choice.append((device, spec))
    if not choice:
        raise errors[0]
    return tuple(choice)


def choose_whole(call: Call, names: tuple[str, ...], devices: tuple[Device, ...]) -> Choice:
    """Return forward implementations.

    Fused ops use kernels that also have a backward pass, else the decomposition.
    """
    forward = choose(call, names, "forward", devices)
    if call.parts is None:
        return forward
    backward = dict(choose(call, names, "backward", devices))
    return tuple((d, backward[d] if backward[d].is_decomposition else spec) for d, spec in forward)
