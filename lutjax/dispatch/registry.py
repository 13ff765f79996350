"""Registry of implementations; all implementation selection happens here.

An implementation is a module with the functions described in `lutjax.dispatch.contract`, registered
for an op, a platform (programming model) and a backend (hardware). `lutjax.dispatch.catalog` lists
lutjax's packages, whose modules declare themselves.
"""

import contextlib
import dataclasses
import enum
import functools
import importlib
import importlib.metadata
import importlib.util
import inspect
import pkgutil
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, TypeVar, overload

import jax

from lutjax import _compat, _jit_key, extras
from lutjax.arguments import format_value
from lutjax.dispatch import _records
from lutjax.dispatch._parts import Parts
from lutjax.dispatch.contract import DIRECTIONS, Call, Direction, Step
from lutjax.names import Backend as Backend, Platform as Platform
from lutjax.values._dtypes import accumulator
from lutjax.values._row_rules import SGD, RowRule

T = TypeVar("T")
K = TypeVar("K", bound=Callable[..., Any])
E = TypeVar("E", bound=enum.StrEnum)


@dataclasses.dataclass(frozen=True)
class Launched:
    """Implementations with kernel configs, as returned by `lutjax.tuning.launched`.

    Attributes:
      names: implementation names, in order of preference.
      launches: hashable; kernels are traced in the block of its ``activate()``.
    """

    names: tuple[str, ...]
    launches: Any


Implementation = str | tuple[str, ...] | Launched | None

_GRADIENT: tuple[Direction, ...] = ("forward", "backward")
_DEFAULT_PRIORITY = {Platform.XLA: 0, Platform.PALLAS: 10, Platform.TRITON: 20, Platform.NATIVE: 30}
_CALLED: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "forward": (("call",), ("device",)),
    "backward": (("call", "cotangent", "needs"), ("device",)),
    "update": (("call", "cotangent", "step"), ("device",)),
    "unsupported": (("request",), ()),
    "slower": (("request",), ()),
    "about": ((), ()),
}
"""Functions of an implementation, with their positional and keyword arguments."""
_LOWERING_NAMES = {"gpu": ("cuda", "rocm")}  # what jax calls the backends when it lowers


@dataclasses.dataclass(frozen=True)
class Device:
    """The device that will run a call."""

    backend: Backend
    kind: str

    def __str__(self) -> str:
        return f"{self.backend} ({self.kind})"

    @property
    def lowering_names(self) -> tuple[str, ...]:
        """Names of the backend in `jax.jit` lowering."""
        return _LOWERING_NAMES.get(self.backend, (str(self.backend),))


@dataclasses.dataclass(frozen=True)
class Request:
    """Call in need of an implementation, as rules see it.

    Attributes:
      call: the forward call, in every direction, with one batch axis; each array is a
          `jax.ShapeDtypeStruct`.
      device: the device that will run it.
      cotangent, step: set for updates only; the cotangent as shape and dtype.
    """

    direction: Direction
    call: Call
    device: Device
    cotangent: Any = None
    step: Step | None = None

    @property
    def op(self) -> str:
        """Name of the op."""
        return self.call.op


@dataclasses.dataclass(frozen=True)
class Made:
    """Op call made by a function, with its output, both as shapes and dtypes with one batch axis.

    Attributes:
      rule: rule of an update; None if the function runs the op itself.
      given: the original call, with arrays and batch dimensions; for `collecting`.
      devices: devices that run it; None: all devices the function may run on. If a fused op runs by
          its parts on some or all devices, the parts follow it.
    """

    call: Call
    output: Any
    rule: RowRule | None = None
    given: Call | None = None
    devices: tuple[Device, ...] | None = None

    def runs_on(self, device: Device) -> bool:
        """Return True if the call runs on a device."""
        return self.devices is None or device in self.devices

    @property
    def arrays(self) -> Call:
        """Call as kernels receive it, with arrays; for `collecting`, inside its trace."""
        call: Call = jax.tree.map(lambda a, shape: a.reshape(shape.shape), self.given, self.call)
        return call.prepare()

    def request(self, direction: Direction, device: Device, rule: RowRule | None = None) -> Request:
        """Return the implementation request in a direction."""
        if direction != "update":
            return Request(direction, self.call, device)
        rule = rule or self.rule or SGD()
        weights = getattr(self.call, str(self.call.table_name))
        scalar = jax.ShapeDtypeStruct((), accumulator(weights.dtype))
        step = Step(scalar, None, jax.eval_shape(rule.init, weights), rule)
        return Request(direction, self.call, device, self.output, step)


@dataclasses.dataclass(frozen=True)
class Op:
    """Registered op.

    Attributes:
      module: module with the op's function; None if only kernels were registered.
      cases: module with the sizes for tests, benchmarks and tuning.
    """

    name: str
    module: str | None = None
    cases: str | None = None


class Deferral(str):
    """Reason to leave a supported call to the next implementation.

    It is ignored if this implementation is requested by name.
    """


Rule = Callable[[Request], str | None]
"""Returns the reason why a call is not supported, a `Deferral`, or None."""


@dataclasses.dataclass(frozen=True)
class Declaration:
    """Properties of an implementation. A kernel module declares them as its ``SPEC``.

    Attributes:
      supports: returns the reason why the implementation cannot run a call, a `Deferral`, or None.
          None: it supports every call.
      directions: directions with a function; None: every direction with a function in the module.
      requires: required packages, in addition to its platform's.
      launches: names of its kernels with a kernel config, ``op.kernel``; see
          `lutjax.tuning.launch_of`.
      stacks: True if it supports stacked calls; see `lutjax.dispatch.contract`. Otherwise stacked
          calls run one by one under `jax.vmap` over all arrays.
    """

    supports: Rule | None = None
    directions: tuple[Direction, ...] | None = None
    requires: tuple[str, ...] = ()
    launches: tuple[str, ...] = ()
    stacks: bool = False


@dataclasses.dataclass(frozen=True)
class KernelSpec:
    """Registered implementation. Calling it with an op's arguments runs the op.

    Attributes:
      target: name of the module with a function for each direction; see `lutjax.dispatch.contract`.
      requires: packages required by its platform; it is not selected if one is missing.
      priority: the supporting implementation with the highest priority is selected.
      platform_rule: rule for all kernels of its platform, evaluated before the target is imported;
          None: no rule.
      declared: its properties; None: the target's ``SPEC``, imported on first use.
      about: returns details about this machine, such as the instruction set in use; called where it
          is selected.
      holder: object with its functions, in place of the target; None: the target.
      registry: registry that has it.
    """

    op: str
    platform: Platform
    backend: Backend
    target: str
    requires: tuple[str, ...] = ()
    priority: int = 0
    platform_rule: Rule | None = None
    declared: Declaration | None = None
    about: Callable[[], str] | None = None
    holder: Any = None
    registry: Any = dataclasses.field(default=None, repr=False, compare=False)

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Return the op's outputs, computed by this implementation only.

        Args:
          *args: arguments of the op's function.
          **options: keyword arguments of the op's function, except ``implementation``.

        Raises:
          NoImplementationError: it cannot run the call, or not on this device; the message gives
              the reason.
        """
        assert self.registry is not None, "an implementation that no registry has"
        function = self.registry.function(self.op)
        return function(*args, implementation=self.names[1], **options)

    @property
    def names(self) -> tuple[str, str]:
        """Names for requesting it."""
        return str(self.platform), f"{self.platform}/{self.backend}"

    def __str__(self) -> str:
        return f"{self.names[1]} ({'its parts' if self.is_decomposition else self.target})"

    @property
    def is_decomposition(self) -> bool:
        """True if it is a fused op's decomposition, which runs by other implementations."""
        return self.holder is Parts

    @functools.cached_property
    def declaration(self) -> Declaration:
        """Declared properties. Imports the target if they are declared there."""
        if self.declared is not None:
            return self.declared
        found: Declaration = getattr(self._holder, "SPEC", _EVERY_CALL)
        return found

    @functools.cached_property
    def directions(self) -> tuple[Direction, ...]:
        """Directions with a function."""
        if self.declaration.directions is not None:
            return self.declaration.directions
        holder = self._holder
        return tuple([d for d in DIRECTIONS if hasattr(holder, d)])

    @property
    def launches(self) -> tuple[str, ...]:
        """Names of its kernels with a kernel config."""
        return self.declaration.launches

    @property
    def stacks(self) -> bool:
        """True if it supports stacked calls."""
        return self.declaration.stacks

    @property
    def missing(self) -> str | None:
        """Missing required packages, as a reason; None if all are installed."""
        return _missing_reason(self.requires) or _missing_reason(self.declaration.requires)

    def load(self, direction: Direction) -> Callable[..., Any]:
        """Return its function for a direction. Imports the target.

        Raises:
          TypeError: the target has no such function, or one with other arguments.
        """
        found: Any = getattr(self._holder, direction, None)
        _require_function(f"{self.names[1]} of {self.op} ({self.target})", direction, found)
        result: Callable[..., Any] = found
        return result

    @property
    def _holder(self) -> Any:
        return importlib.import_module(self.target) if self.holder is None else self.holder

    def supports(self, request: Request) -> str | None:
        """Return the reason why this implementation cannot run a call, a `Deferral`, or None."""
        if self.backend not in (Backend.ANY, request.device.backend):
            return f"runs on {self.backend}, the call runs on {request.device}"
        if self.requires and (why := _missing_reason(self.requires)):
            return why
        deferral = self.platform_rule and self.platform_rule(request)
        if deferral and not isinstance(deferral, Deferral):
            return deferral
        if request.direction not in self.directions:
            return f"has no {request.direction}"
        needed = self.declaration.requires
        if needed and (why := _missing_reason(needed)):
            return why
        if self.platform is not Platform.XLA:
            if request.step is not None and request.step.rule.counts_decay:
                return "does not count the decay of steps that skip a row, as decay='every' asks"
            if self.platform not in request.call.also and request.call.plain:
                return request.call.plain
        why = self.declaration.supports and self.declaration.supports(request)
        if why and not isinstance(why, Deferral):
            return why
        return deferral or why or None

    def unsupported_reason(self, request: Request) -> str | None:
        """Return the reason why it cannot run a call, even if requested by name; None if it can."""
        why = self.supports(request)
        return None if isinstance(why, Deferral) else why


_EVERY_CALL = Declaration()


def record_deferral(request: Request, name: str) -> Deferral | None:
    """Return a deferral unless the implementation has a validation result on this device kind."""
    if _records.has_run(request.op, request.direction, name, request.device.kind):
        return None
    return Deferral(
        f"waits for a record: it has not run on {request.device.kind}; implementation={name!r} "
        "asks for it, and a record that `lutjax status` makes on such a device makes it a choice"
    )


@dataclasses.dataclass(frozen=True)
class Candidate:
    """Implementation considered for a call, with the reason for rejecting it, or None."""

    spec: KernelSpec
    reason: str | None


class NoImplementationError(ValueError):
    """Error for a call that no registered implementation supports.

    Attributes:
      direction: direction of the call. candidates: all the op's implementations, with reasons for
          rejection.
    """

    def __init__(self, message: str, direction: Direction, candidates: tuple[Candidate, ...]):
        super().__init__(message)
        self.direction = direction
        self.candidates = candidates


_OPTIONS = ("requires", "unsupported", "slower", "rates", "launches", "stacks", "about")
"""Options of `KernelRegistry.register`."""


def _check_options(how: Mapping[str, Any], directions: Any) -> None:
    """Raise TypeError or ValueError for invalid `KernelRegistry.register` options."""
    where = "kernel_registry.register"
    if unknown := sorted(set(how) - set(_OPTIONS)):
        raise TypeError(
            f"{where}: there is no option {unknown[0]!r}; the options are {', '.join(_OPTIONS)}."
        )
    for name in ("requires", "launches"):
        names = how.get(name, ())
        if not isinstance(names, tuple) or not all(isinstance(n, str) for n in names):
            raise TypeError(f"{where}: {name} is {format_value(names)}; expected a tuple of names.")
    for name in ("unsupported", "slower", "about"):
        if how.get(name) is not None:
            _require_function(where, name, how[name])
    for direction in directions or ():
        if direction not in DIRECTIONS:
            raise ValueError(
                f"{where}: directions has {format_value(direction)}; expected some of "
                f"{', '.join(DIRECTIONS)}."
            )


def _require_function(
    where: str, name: str, function: Any, holder: str | None = None, *, static: bool = False
) -> None:
    """Raise TypeError if an implementation's function does not accept its required arguments.

    Args:
      where: name of the implementation, for messages.
      name: name of the function.
      function: the function.
      holder: name of the decorated class or function, for messages.
      static: True for a class.
    """
    by_position, by_name = _CALLED[name]
    arguments = ", ".join((*by_position, *(("*",) if by_name else ()), *by_name))
    subject = name if holder in (None, name) else f"{name} of {holder}"
    if not callable(function):
        raise TypeError(
            f"{where}: {subject} is {format_value(function)}; expected a function "
            f"{name}({arguments})."
        )
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a function in C may have none
        return
    try:
        signature.bind(*by_position, **dict.fromkeys(by_name))
    except TypeError:
        raise TypeError(
            (
                f"{where}: {subject} takes {signature}; it is called as {name}({arguments}). Give "
                "it these arguments"
            )
            + (", as a static method." if static else ".")
        ) from None


def _rule(unsupported: Rule | None, slower: Rule | None, rates: bool) -> Rule:
    """Return the rule for these options; see `KernelRegistry.register`."""

    def supports(request: Request) -> str | None:
        if not rates and request.step is not None and request.step.differs_by_row:
            return "moves all rows at one rate, and the rates or factors of these differ"
        if why := unsupported and unsupported(request):
            return why
        why = slower and slower(request)
        return Deferral(why) if why else None

    return supports


def _missing_reason(packages: tuple[str, ...]) -> str | None:
    """Return the missing packages as a reason; None if all are installed."""
    missing = [package for package in packages if not _is_installed(package)]
    if not missing:
        return None
    cure = extras.command(*missing)
    return f"needs {', '.join(missing)}, not installed{cure and f': {cure}'}"


@functools.cache
def _is_installed(package: str) -> bool:
    # Unlike an import, finding a package runs none of its code.
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # a parent package is missing
        return False


class KernelRegistry:
    """Mapping from ops to implementations. lutjax's own is `lutjax.kernel_registry`.

    Args:
      compositions: modules with functions that call ops but are not ops, by name, for `explain`.
      entry_points: entry point group through which installed packages add kernels: functions of the
          registry, called when implementations are first needed. None: no group.
      in_cache_key: keeps the `use_implementation` choice in jit's cache key; see
          `jax.make_user_context`. None: a new one.
    """

    def __init__(
        self,
        compositions: Mapping[str, str] | None = None,
        *,
        entry_points: str | None = None,
        in_cache_key: Any = None,
    ) -> None:
        self._compositions = dict(compositions or {})
        self._entry_points = entry_points
        # Reentrant: a package that joins registers kernels here.
        self._joining = threading.RLock()
        self._joined = False
        self._made: ContextVar[list[Made] | None] = ContextVar("lutjax_made", default=None)
        self._ops: dict[str, Op] = {}
        self._specs: dict[str, dict[tuple[Platform, Backend], KernelSpec]] = {}
        self._elsewhere: dict[str, list[KernelSpec]] = {}
        self._resolved: dict[Any, Any] = {}
        # Choice of `use_implementation`, for each thread and each coroutine.
        self._forced: ContextVar[Any] = ContextVar("lutjax_implementation", default=None)
        # The same choice as a part of jit's cache key: a trace must not outlive the block that
        # forced its implementation.
        # JAX keeps one key per thread. Where coroutines take turns it is set again, see
        # `follow_coroutine`.
        self._in_cache_key = in_cache_key or jax.make_user_context(default_value=None)

    def register_op(self, op: str, module: str, *, cases: str | None = None) -> Op:
        """Add an op; add its implementations by `register`.

        Args:
          op: its name.
          module: the module with a function of the same name, e.g. ``"lutjax.ops.lookup"``.
          cases: module with its sizes and arguments, see `lutjax.cases`; without it the op is
              neither tested nor measured.

        Raises:
          ValueError: the op already exists.
        """
        if op in self._ops and self._ops[op].module:
            raise ValueError(
                f"kernel_registry.register_op: there is an op {op!r} in {self._ops[op].module}; "
                "choose another name, or unregister that one first."
            )
        self._ops[op] = Op(op, module, cases)
        return self._ops[op]

    def unregister_op(self, op: str) -> None:
        """Remove an op and its implementations."""
        self._check_op(op)
        del self._ops[op]
        self._specs.pop(op, None)
        self._elsewhere.pop(op, None)
        self._resolved.clear()

    def ops(self) -> tuple[str, ...]:
        """Return all ops with a function or an implementation, in registration order."""
        return tuple(name for name, op in self._ops.items() if op.module or self._specs.get(name))

    def compositions(self) -> tuple[str, ...]:
        """Return the names of compositions: functions that call ops but are not ops.

        `explain` accepts them like ops.
        """
        return tuple(self._compositions)

    def function(self, name: str) -> Callable[..., Any]:
        """Return the function of an op or composition."""
        if name not in self._compositions:
            self._check_op(name)
        module = self._compositions.get(name) or self._ops[name].module
        if module is None:
            raise ValueError(
                f"op {name!r} has kernels but no function; register the module of its function by "
                "kernel_registry.register_op."
            )
        function: Callable[..., Any] = getattr(importlib.import_module(module), name)
        return function

    def cases(self, op: str) -> str | None:
        """Return the module name of an op's cases; None if it has none."""
        self._check_op(op)
        return self._ops[op].cases

    def directions(self, op: str) -> tuple[Direction, ...]:
        """Return all directions in which an op has an implementation."""
        specs = list(self._op_specs(op).values())
        if (Platform.XLA, Backend.ANY) in self._op_specs(op):
            # Other platforms have no direction that plain JAX lacks, so their kernel modules are
            # not imported.
            specs = [spec for spec in specs if spec.declared or spec.platform is Platform.XLA]
        found = {direction for spec in specs for direction in spec.directions}
        return tuple(direction for direction in DIRECTIONS if direction in found)

    @overload
    def register(
        self, op: str, platform: Platform | str, backend: Backend | str, target: str, **how: Any
    ) -> KernelSpec: ...

    @overload
    def register(
        self, op: str, platform: Platform | str, backend: Backend | str, **how: Any
    ) -> Callable[[K], K]: ...

    def register(
        self,
        op: str,
        platform: Platform | str,
        backend: Backend | str,
        target: str | None = None,
        *,
        priority: int | None = None,
        directions: tuple[Direction, ...] | None = None,
        **how: Any,
    ) -> Any:
        """Add an implementation of an op; see `register_op` for your own ops.

        Without a target it is a decorator, either for a class with one static method per direction
        or for one function, the forward pass.

        Args:
          op: name of the op; its call is described in ``lutjax/ops/<op>.py``.
          platform: programming model.
          backend: hardware.
          target: module with a function for each direction, imported when it is selected.
          priority: by default native code before Triton before Pallas before XLA.
          directions: by default a decorated class's own directions, and ``("forward", "backward")``
              for a module.
          **how: ``requires``, ``launches``, ``stacks`` and ``about``, see `Declaration` and
              `KernelSpec`; ``unsupported(request)``, the reason why a call cannot run, or None;
              ``slower(request)``, a reason to leave a call to the next implementation unless this
              one is requested by name; ``rates=True`` if updates support rates and factors that
              differ by table, row or output.

        Raises:
          ValueError: an unknown op, platform, backend or direction, or the op already has one for
              this platform and backend.
          TypeError: a function has the wrong arguments, a class lacks a function for a direction,
              or an option is unknown or has the wrong type. Module functions are checked on import.

        Example:
          >>> import jax.numpy as jnp, lutjax
          >>> from lutjax.dispatch.registry import Backend, Platform
          >>> @lutjax.kernel_registry.register("detect_signs", Platform.TRITON, Backend.CPU)
          ... class Signs:
          ...     @staticmethod
          ...     def forward(call, *, device):
          ...         plain = lutjax.kernel_registry.get("detect_signs", Platform.XLA)
          ...         return plain.load("forward")(call, device=device)
          >>> signs = lutjax.kernel_registry.get("detect_signs", "triton", "cpu")
          >>> signs(jnp.array([[0.5, -1.0]])).index
          Array([1], dtype=int32)
          >>> lutjax.kernel_registry.unregister("detect_signs", "triton", "cpu")
        """
        if op not in self._ops:
            raise ValueError(
                f"kernel_registry.register: unknown op {op!r}; the ops are "
                f"{', '.join(self._ops) or 'none'}, and kernel_registry.register_op adds one."
            )
        platform, backend = _find_target("register", platform, backend)
        priority = _DEFAULT_PRIORITY[platform] if priority is None else priority
        _check_options(how, directions)
        rates = how.get("rates", False) or platform is Platform.XLA
        rule = _rule(how.get("unsupported"), how.get("slower"), rates)

        def make(target: str, directions: tuple[Direction, ...], holder: Any = None) -> KernelSpec:
            return KernelSpec(
                op,
                platform,
                backend,
                target,
                how.get("requires", ()),
                priority,
                declared=Declaration(
                    rule,
                    directions,
                    launches=how.get("launches", ()),
                    stacks=how.get("stacks", False),
                ),
                about=how.get("about"),
                holder=holder,
            )

        if target is not None:
            if not isinstance(target, str):
                raise TypeError(
                    f"kernel_registry.register: target is {format_value(target)}; expected the "
                    "name of a module. Use register as a decorator of a class or function."
                )
            spec = make(target, _GRADIENT if directions is None else directions)
            self._add(spec)
            return self._specs[op][platform, backend]

        def add(holder: K) -> K:
            found = (
                holder
                if isinstance(holder, type)
                else type("", (), {"forward": staticmethod(holder)})
            )
            has = (
                tuple(d for d in DIRECTIONS if hasattr(found, d))
                if directions is None
                else directions
            )
            if not has:
                raise TypeError(
                    f"kernel_registry.register: {holder.__qualname__} has no function of a "
                    f"direction; expected static methods named {', '.join(DIRECTIONS)}, or some of "
                    "them."
                )
            for direction in has:
                function = getattr(found, direction, None)
                _require_function(
                    "kernel_registry.register",
                    direction,
                    function,
                    holder.__qualname__,
                    static=found is holder,
                )
            self._add(make(holder.__module__, has, found))
            return holder

        return add

    def discover(
        self,
        package: str,
        platform: Platform | str,
        backend: Backend | str,
        *,
        requires: tuple[str, ...] = (),
        priority: int | None = None,
    ) -> None:
        """Add a package's kernel modules: every public module implements the op of the same name.

        A module is imported when its platform is considered for a call. It has a function for each
        direction and may declare a `Declaration` as its ``SPEC``. If the package has a function
        ``supports(request)``, it is called first.

        Args:
          package: name of the package, found by its path.
          platform: programming model of the kernels.
          backend: hardware.
          requires: packages required by all of them.
          priority: as for `register`.

        Raises:
          ValueError: an unknown op, platform or backend, or the op already has an implementation
              for this platform and backend.
        """
        platform, backend = _find_target("discover", platform, backend)

        def rule(request: Request) -> str | None:
            supports: Rule | None = getattr(importlib.import_module(package), "supports", None)
            return supports and supports(request)

        ops = public_modules(package)
        for op in ops:
            if op not in self._ops:
                self._check_op(op)  # raises
        self._add(
            *[
                KernelSpec(
                    op,
                    platform,
                    backend,
                    f"{package}.{op}",
                    requires,
                    _DEFAULT_PRIORITY[platform] if priority is None else priority,
                    platform_rule=None if platform is Platform.XLA else rule,
                )
                for op in ops
            ]
        )

    def _add(self, *specs: KernelSpec) -> None:
        for spec in specs:
            of_op = self._specs.setdefault(spec.op, {})
            if (spec.platform, spec.backend) in of_op:
                raise ValueError(
                    f"kernel_registry.register: {spec.op!r} already has the implementation "
                    f"{of_op[spec.platform, spec.backend]}; unregister it first, or register for "
                    "another platform or backend."
                )
            of_op[spec.platform, spec.backend] = dataclasses.replace(spec, registry=self)
        self._resolved.clear()

    def announce(
        self, ops: Iterable[str], platform: Platform | str, backend: Backend | str, package: str
    ) -> None:
        """Announce implementations from another package, in modules named like their ops.

        If the package is not installed, `explain` and errors include the install command.

        Args:
          ops: names of the ops.
          platform: programming model.
          backend: hardware.
          package: package of the modules.
        """
        platform, backend = _find_target("announce", platform, backend)
        how = (
            (package.partition(".")[0],),
            _DEFAULT_PRIORITY[platform],
            None,
            Declaration(directions=DIRECTIONS),
        )
        for op in ops:
            spec = KernelSpec(op, platform, backend, f"{package}.{op}", *how)
            self._elsewhere.setdefault(op, []).append(spec)

    def announced(self, op: str, name: str) -> KernelSpec | None:
        """Return the announced implementation by name if its package is missing. See `announce`."""
        return next(
            (spec for spec in self._missing_implementations(op) if name in spec.names), None
        )

    def not_installed(self, op: str, name: str) -> str | None:
        """Return the reason for a missing implementation if an installable package has it.

        See `announce`.
        """
        spec = self.announced(op, name)
        return None if spec is None else spec.missing

    def unregister(self, op: str, platform: Platform | str, backend: Backend | str) -> None:
        """Remove an implementation. Traces that jit holds keep using it."""
        spec = self.get(op, platform, backend)
        del self._specs[op][spec.platform, spec.backend]
        self._resolved.clear()

    def get(
        self, op: str, platform: Platform | str, backend: Backend | str | None = None
    ) -> KernelSpec:
        """Return the implementation for this platform and backend, callable like the op's function.

        Args:
          op: name of the op.
          platform: programming model.
          backend: optional if the platform has only one for this op.

        Raises:
          KeyError: no such implementation; the message lists the op's implementations.
          ValueError: an unknown op, platform or backend, or several backends on the platform and
              none given.

        Example:
          >>> import jax.numpy as jnp, lutjax
          >>> lutjax.kernel_registry.get("detect_signs", "xla")(jnp.array([[0.5, -1.0]])).index
          Array([1], dtype=int32)
        """
        platform = _find_member("get", "platform", Platform, platform)
        found = {
            spec.backend: spec for spec in self._op_specs(op).values() if spec.platform == platform
        }
        if backend is not None:
            backend = _find_member("get", "backend", Backend, backend)
        elif len(found) > 1:
            raise ValueError(
                f"kernel_registry.get: {op!r} has {platform} for {', '.join(found)}; name one of "
                "them as backend."
            )
        elif found:
            (backend,) = found
        if backend not in found:
            known = "; ".join(str(spec) for spec in self.candidates(op))
            name = platform if backend is None else f"{platform}/{backend}"
            raise KeyError(f"{op!r} has no implementation for {name}; it has: {known}")
        return found[backend]

    def candidates(self, op: str) -> tuple[KernelSpec, ...]:
        """Return all implementations of an op in order of preference."""
        return _sort_by_preference(self._op_specs(op).values())

    def resolve(
        self,
        op: str,
        *args: Any,
        implementation: Implementation = None,
        direction: Direction = "forward",
        device: Device | None = None,
        rule: RowRule | None = None,
        **options: Any,
    ) -> KernelSpec:
        """Return the implementation that runs a call.

        Args:
          op: name of the op.
          *args: arguments of the op's function; arrays may be `jax.ShapeDtypeStruct`. Nothing is
              computed.
          implementation: None for the first choice that supports the call, one required name, or a
              tuple of names in order of preference. A name is a platform, or platform and backend
              if a platform has several: ``"pallas/tpu"``. By default the choice of
              `use_implementation`.
          direction: ``"forward"``, ``"backward"`` or ``"update"``.
          device: the device that will run the call; by default the arrays' device.
          rule: rule of an update; by default `SGD`.
          **options: keyword arguments of the op's function.

        Raises:
          NoImplementationError: none supports the call; the message has every candidate's reason.
          ValueError: an unknown name.
        """
        request = self._make_request(op, args, options, direction, device, rule)
        return self.resolve_request(request, self.request(op, implementation))

    def consider(
        self,
        op: str,
        *args: Any,
        implementation: Implementation = None,
        direction: Direction = "forward",
        device: Device | None = None,
        rule: RowRule | None = None,
        **options: Any,
    ) -> tuple[Candidate, ...]:
        """Return all candidates in order of preference, with any reason for rejection.

        See `resolve`.
        """
        request = self._make_request(op, args, options, direction, device, rule)
        return tuple(
            Candidate(spec, why)
            for spec, why in self._evaluate_candidates(self.request(op, implementation), request)
        )

    def _make_request(
        self,
        op: str,
        args: tuple[Any, ...],
        options: Mapping[str, Any],
        direction: Direction,
        device: Device | None,
        rule: RowRule | None,
    ) -> Request:
        self._check_op(op)
        device = device or devices_of(jax.tree.leaves((args, dict(options))))[0]
        made = next(m for m in self.calls_of(op, *args, **options) if m.call.op == op)
        return made.request(direction, device, rule)

    def resolve_request(self, request: Request, names: tuple[str, ...]) -> KernelSpec:
        """Return the implementation for a request.

        `names`: requested names, in order; see `request`.
        """
        leaves, structure = jax.tree.flatten((request.call, request.cotangent, request.step))
        kinds = tuple([(a.shape, a.dtype) for a in leaves])

        def choose() -> KernelSpec:
            shapes = [jax.ShapeDtypeStruct(*kind) for kind in kinds]
            call, cotangent, step = jax.tree.unflatten(structure, shapes)
            asked = Request(request.direction, call, request.device, cotangent, step)
            return self._choose(names, asked)

        return self.remembered((structure, kinds, request.direction, names, request.device), choose)

    def remembered(self, key: Any, make: Callable[[], T]) -> T:
        """Return the cached result of `make` for a key, until implementations change."""
        found: T | None = self._resolved.get(key)
        if found is None:
            found = self._resolved[key] = make()
        return found

    def request(self, op: str, implementation: Implementation) -> tuple[str, ...]:
        """Return the requested implementations, in order; empty if any will do."""
        return names_of(self.requested(op, implementation))

    def launchable(self) -> dict[str, list[KernelSpec]]:
        """Return the configurable kernels by name, each with its implementations."""
        found: dict[str, list[KernelSpec]] = {}
        for op in self.ops():
            for spec in self._op_specs(op).values():
                for kernel in spec.launches:
                    found.setdefault(kernel, []).append(spec)
        return found

    def requested(self, op: str, implementation: Implementation) -> Implementation:
        """Return a call's own implementation, else the choice of `use_implementation`."""
        if implementation is not None:
            return implementation
        forced = dict(self._forced.get() or ())
        found: Implementation = forced.get(op) or forced.get("*")
        return found

    @contextlib.contextmanager
    def use_implementation(
        self, implementation: Implementation | Mapping[str, Implementation]
    ) -> Iterator[None]:
        """Make calls in this block use the given implementation, unless they name one.

        The choice also applies inside functions under `jax.jit`, which are traced again for it.
        Each thread and each coroutine has its own choice. A coroutine should not wait (``await``)
        inside the block: a jitted function called meanwhile by another coroutine may be the one
        traced for this block.

        Args:
          implementation: a name, a tuple of names in order of preference, a result of
              `lutjax.tuning.launched`, or a mapping from ops to these.

        Raises:
          ValueError, TypeError: an unknown name or op.

        Example:
          >>> import jax.numpy as jnp, lutjax
          >>> with lutjax.use_implementation("xla"):
          ...     d = lutjax.detect_signs(jnp.array([0.5, -0.25]))
          >>> with lutjax.use_implementation({"lookup": "xla"}):
          ...     pass
        """
        wanted = implementation if isinstance(implementation, Mapping) else {"*": implementation}
        for op, names in wanted.items():
            if op != "*":
                self._op_specs(op)
            names_of(names)
        inherited = dict(self._forced.get() or ())
        with self._force_implementations(tuple(sorted({**inherited, **wanted}.items()))):
            yield

    @contextlib.contextmanager
    def _force_implementations(
        self, value: tuple[tuple[str, Implementation], ...]
    ) -> Iterator[None]:
        token = self._forced.set(value)
        self._set_cache_key()
        try:
            yield
        finally:
            self._forced.reset(token)
            self._set_cache_key()

    def _set_cache_key(self) -> None:
        # Entered and never left: the previous value may belong to another coroutine.
        self._in_cache_key(self._forced.get()).__enter__()

    def follow_coroutine(self, *, traced: bool) -> None:
        """Set jit's cache key to the running coroutine's, if another coroutine changed it.

        Args:
          traced: True while a function is being traced; its cache key was made before.

        Raises:
          RuntimeError: a function is being traced under another coroutine's key.
        """
        if self._in_cache_key.value == self._forced.get():
            return
        self._set_cache_key()
        if traced:
            raise RuntimeError(
                "use_implementation: a function was traced in one coroutine (or in a worker "
                "thread that it started) under the choice of another. Keep `await` out of the "
                "block of use_implementation, enter the block where the function is called, or "
                "pass implementation= to the op. Calling it again works."
            )

    def explain(
        self, op: str, *args: Any, implementation: Implementation = None, **options: Any
    ) -> str:
        """Return a text with the implementation for a call and the reasons against all others.

        Args:
          op: name of a lutjax function, such as ``"lookup"`` or ``"lut"``, or of an op (see
              ``kernel_registry.ops()``). All ops called with these arguments are explained.
          *args: arguments of the function; arrays may be `jax.ShapeDtypeStruct`. Nothing is
              computed.
          implementation: as for `resolve`.
          **options: its keyword arguments.

        Returns:
          A line for each candidate in each direction.

        Raises:
          ValueError: an unknown name; the message lists the known names.

        Example:
          >>> import jax.numpy as jnp, lutjax
          >>> d = lutjax.detect_signs(jnp.array([[0.5, -0.25]]))
          >>> print(lutjax.explain("lookup", jnp.zeros((1, 4, 3)), d))  # doctest: +ELLIPSIS
          lookup on cpu (cpu)
            forward
              native/cpu (lutjax_cpu.kernels.lookup): needs lutjax_cpu, not installed: pip install
              ... pallas/gpu (lutjax.kernels._pallas.gpu.lookup): runs on gpu, the call runs on cpu
              (cpu) triton/gpu (lutjax.kernels._triton.lookup): runs on gpu, the call runs on cpu
              (cpu) pallas/tpu (lutjax.kernels._pallas.tpu.lookup): runs on tpu, the call runs on
              cpu (cpu) xla/any (lutjax.kernels._xla.lookup): chosen
          ...
          >>> anchors = jnp.array([[[0, 1]]])
          >>> text = lutjax.explain("lut", jnp.ones((2, 3)), jnp.zeros((1, 2, 3)), anchors)
          >>> [line for line in text.splitlines() if not line.startswith(" ")]
          ['lut calls detect, lookup', 'detect on cpu (cpu)', 'lookup on cpu (cpu)']
        """
        device = devices_of(jax.tree.leaves((args, options)))[0]
        # Also list a fused op that runs by its parts: the reasons against its kernels explain it.
        calls = [
            m
            for m in self.calls_of(op, *args, **options)
            if m.runs_on(device) or m.call.parts is not None
        ]
        names = [made.call.op for made in calls]
        lines = [] if names == [op] else [f"{op} calls {', '.join(names)}"]
        for made in calls:
            lines.append(f"{made.call.op} on {device}")
            for direction, candidates in self.considered(made, device, implementation).items():
                lines.append(f"  {direction}")
                chosen = False
                for spec, reason in candidates:
                    why = reason or ("another comes first" if chosen else "chosen")
                    chosen = chosen or reason is None
                    lines.append(f"    {spec}: {why}")
        return "\n".join(lines)

    def considered(
        self, made: Made, device: Device, implementation: Implementation = None
    ) -> dict[Direction, list[tuple[KernelSpec, str | None]]]:
        """Return the candidates of a call for each direction, with any reason for rejection.

        They are in order of preference.
        """
        asked = self.request(made.call.op, implementation)
        directions = ("update",) if made.rule else self.directions(made.call.op)
        return {
            d: list(self._evaluate_candidates(asked, made.request(d, device))) for d in directions
        }

    def calls_of(self, name: str, *args: Any, **options: Any) -> list[Made]:
        """Return the op calls made by an op or composition with these arguments.

        The function is traced, and nothing runs. Requested implementations are ignored.
        """
        function = self.function(name)
        leaves, structure = jax.tree.flatten((args, options))
        # Only arrays are traced: sizes and other options must stay Python values.
        is_array = [hasattr(leaf, "shape") for leaf in leaves]
        arrays = [leaf for leaf, a in zip(leaves, is_array, strict=True) if a]

        def trace_call(arrays: list[Any]) -> None:
            rest = iter(arrays)
            filled = [next(rest) if a else leaf for leaf, a in zip(leaves, is_array, strict=True)]
            arguments, keywords = jax.tree.unflatten(structure, filled)
            function(*arguments, **keywords)

        with self.collecting() as calls, self._force_implementations(()):
            jax.eval_shape(trace_call, arrays)
        return [dataclasses.replace(made, given=None) for made in calls]

    @contextlib.contextmanager
    def collecting(self) -> Iterator[list[Made]]:
        """Collect the op calls in this block, except calls inside jitted functions."""
        calls: list[Made] = []
        token = self._made.set(calls)
        try:
            yield calls
        finally:
            self._made.reset(token)

    def collected(self) -> list[Made] | None:
        """Return the calls of the innermost active `collecting` block; None outside of blocks."""
        return self._made.get()

    def note(self, place: int, made: Made, of_parts: tuple[Device, ...] | None = None) -> None:
        """Record a call for an active `collecting` block.

        Args:
          place: number of recorded calls when this one began. Its parts follow it.
          made: the call.
          of_parts: devices of the parts that follow it.
        """
        calls = self._made.get()
        assert calls is not None
        if of_parts is not None:
            calls[place:] = [
                dataclasses.replace(part, devices=of_parts) if part.devices is None else part
                for part in calls[place:]
            ]
        calls.insert(place, made)

    def _check_op(self, op: str) -> None:
        known = self._ops.get(op)
        if known is None or not (known.module or self._specs.get(op)):
            compositions = (
                f"; compositions of them are {', '.join(self._compositions)}"
                if self._compositions
                else ""
            )
            raise ValueError(
                f"unknown op {op!r}; the ops are {', '.join(self.ops())}{compositions}."
            )

    def _op_specs(self, op: str) -> dict[tuple[Platform, Backend], KernelSpec]:
        self._join()
        self._check_op(op)
        return self._specs.get(op, {})

    def _join(self) -> None:
        """Let installed packages register their kernels on first use; other threads wait."""
        if self._joined:
            return
        with self._joining:
            # Cleared first: registration asks for ops, which would join again.
            group, self._entry_points = self._entry_points, None
            for entry in importlib.metadata.entry_points(group=group) if group else ():
                try:
                    entry.load()(self)
                except Exception as error:
                    error.add_note(
                        f"{entry.value} of the installed package {entry.dist and entry.dist.name} "
                        "was to register kernels for lutjax; without that package lutjax runs "
                        "without them."
                    )
                    self._entry_points = group
                    raise
            self._joined = True

    def _evaluate_candidates(
        self, names: tuple[str, ...], request: Request, candidates: tuple[KernelSpec, ...] = ()
    ) -> Iterator[tuple[KernelSpec, str | None]]:
        """Yield candidates, by default all, with any reason for rejection."""
        candidates = candidates or _sort_by_preference(
            [*self._op_specs(request.op).values(), *self._missing_implementations(request.op)]
        )
        if names:
            asked = [spec for wanted in names for spec in candidates if wanted in spec.names]
            # A fused op's parts may run by any requested implementation if the op has no such
            # kernel for a call.
            asked = [
                *(spec for spec in asked if not spec.is_decomposition),
                *(spec for spec in candidates if spec.is_decomposition),
            ]
            for spec in asked:
                yield spec, spec.unsupported_reason(request)
            for spec in candidates:
                if spec not in asked:
                    yield spec, f"not asked for (implementation={'|'.join(names)})"
        else:
            for spec in candidates:
                yield spec, spec.supports(request)

    def _missing_implementations(self, op: str) -> list[KernelSpec]:
        """Return the announced implementations whose packages are missing."""
        return [spec for spec in self._elsewhere.get(op, ()) if spec.missing]

    def _choose(self, names: tuple[str, ...], request: Request) -> KernelSpec:
        # Reasons against missing packages and other hardware take longer than the selection.
        here = (Backend.ANY, request.device.backend)
        candidates = tuple([s for s in self.candidates(request.op) if s.backend in here])
        for spec, why in self._evaluate_candidates(names, request, candidates):
            if why is None:
                return spec
        considered = [
            Candidate(spec, why) for spec, why in self._evaluate_candidates(names, request)
        ]
        asked = f" that was asked for ({', '.join(names)})" if names else ""
        lines = [f"  {candidate.spec}: {candidate.reason}" for candidate in considered]
        raise NoImplementationError(
            (
                f"{request.op}: no implementation{asked} supports this {request.direction} call on "
                f"{request.device}:\n"
            )
            + "\n".join(lines),
            request.direction,
            tuple(considered),
        )


def public_modules(package: str) -> list[str]:
    """Return the sorted names of a package's public modules, without importing the package."""
    found = importlib.util.find_spec(package)
    folders = None if found is None else found.submodule_search_locations
    return sorted(
        [m.name for m in pkgutil.iter_modules(folders) if not (m.ispkg or m.name.startswith("_"))]
    )


def _sort_by_preference(specs: Iterable[KernelSpec]) -> tuple[KernelSpec, ...]:
    return tuple(sorted(specs, key=lambda s: (-s.priority, s.backend == Backend.ANY)))


def devices_of(leaves: Iterable[Any]) -> tuple[Device, ...]:
    """Return the devices that may run a call with these arrays.

    There is one, except for traced arrays in a process with several backends: jit has not yet
    determined where the function and its captured constants will reside.
    """
    arrays = [leaf for leaf in leaves if isinstance(leaf, jax.Array)]
    if arrays and not [a for a in arrays if isinstance(a, jax.core.Tracer)]:
        return (_device(next(iter(arrays[0].devices()))),)
    abstract = _compat.abstract_device()
    if abstract is not None:
        return (_make_device(*abstract),)
    default = jax.config.jax_default_device  # type: ignore[attr-defined]
    if default is not None:
        return (_device(jax.devices(default)[0] if isinstance(default, str) else default),)
    return _default_devices()


def _default_devices() -> tuple[Device, ...]:
    first = jax.devices()[0]
    if first.platform == "cpu":
        return (_device(first),)
    return (_device(first), _device(jax.local_devices(backend="cpu")[0]))


@functools.lru_cache(maxsize=256)
def _device(device: jax.Device) -> Device:
    return _make_device(device.platform, device.device_kind)


def _make_device(platform: str, kind: str) -> Device:
    platform = {"cuda": "gpu", "rocm": "gpu"}.get(platform, platform)
    if platform not in set(Backend):
        return Device(Backend.ANY, f"{platform} {kind}")
    return Device(Backend(platform), kind)


def _find_member(method: str, argument: str, known: type[E], value: Any) -> E:
    """Return an enumeration member by name.

    Raises:
      ValueError: an unknown name.
    """
    try:
        return known(value)
    except ValueError:
        raise ValueError(
            f"kernel_registry.{method}: {argument} is {value!r}; expected one of "
            f"{', '.join(known)}."
        ) from None


def _find_target(
    method: str, platform: Platform | str, backend: Backend | str
) -> tuple[Platform, Backend]:
    """Return a platform and a backend by name, see `_find_member`."""
    if isinstance(platform, Platform) and isinstance(backend, Backend):
        return platform, backend
    found = _find_member(method, "platform", Platform, platform)
    return found, _find_member(method, "backend", Backend, backend)


def names_of(implementation: Implementation) -> tuple[str, ...]:
    """Return the names in an `implementation` argument, in order of preference.

    Raises:
      ValueError: an unknown name. TypeError: another type.
    """
    if implementation is None:
        return ()
    if isinstance(implementation, Launched):
        return implementation.names
    names = (implementation,) if isinstance(implementation, str) else implementation
    if not isinstance(names, tuple | list) or not all(isinstance(name, str) for name in names):
        raise TypeError(
            f"implementation is {implementation!r}; expected a name, such as 'xla', a tuple of "
            "names, or what lutjax.tuning.launched returns."
        )
    return tuple(_parse_name(name) for name in names)


def _parse_name(name: str) -> str:
    platform, slash, backend = name.partition("/")
    if platform not in set(Platform) or (slash and backend not in set(Backend)):
        raise ValueError(
            f"unknown implementation {name!r}; the implementations are {', '.join(Platform)}, or "
            "one of these and the hardware that it runs on, as in 'pallas/tpu': "
            f"{', '.join(Backend)}."
        )
    return name


kernel_registry = KernelRegistry(
    {
        "logic_gates": "lutjax.ops.logic_gates",
        "lut": "lutjax.ops.lut",
        "sparse_lut": "lutjax.ops.sparse_lut",
        "lut_attention": "lutjax.ops.lut_attention",
        "conv_lut": "lutjax.ops.conv_lut",
        "update_table": "lutjax.tables.update",
    },
    entry_points="lutjax.kernels",
    in_cache_key=_jit_key.IMPLEMENTATION,
)
use_implementation = kernel_registry.use_implementation
explain = kernel_registry.explain
