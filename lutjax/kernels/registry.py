"""Which implementation of an op runs a call: the only place that chooses.

An implementation is a module with two functions on arrays, ``forward`` and ``backward``, registered for
an op, a platform (how it is written) and a backend (where it runs). It is imported when it is chosen.
"""

import contextlib
import dataclasses
import enum
import functools
import importlib
import importlib.util
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, Literal

import jax

from lutjax import _compat, _extras


class Platform(enum.StrEnum):
    """How an implementation is written."""

    XLA = "xla"
    PALLAS = "pallas"
    TRITON = "triton"


class Backend(enum.StrEnum):
    """Where an implementation runs."""

    CPU = "cpu"
    GPU = "gpu"
    TPU = "tpu"
    SPARSECORE = "sparsecore"
    """The SparseCores of a TPU, beside its TensorCores, which are `TPU`."""
    ANY = "any"

    @property
    def of_device(self) -> "Backend":
        """The backend of the devices that have it."""
        return Backend.TPU if self is Backend.SPARSECORE else self


Direction = Literal["forward", "backward"]
DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")
Implementation = str | tuple[str, ...] | None

_DEFAULT_PRIORITY = {Platform.XLA: 0, Platform.PALLAS: 10, Platform.TRITON: 20}
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
        return _LOWERING_NAMES.get(self.backend, (str(self.backend),))


@dataclasses.dataclass(frozen=True)
class Call:
    """What an implementation may look at to say that it does not support a call.

    Attributes:
      arguments: the op's positional arguments, each array a `jax.ShapeDtypeStruct`.
      options: its static options (``epsilon``, ``window``, ...).
    """

    op: str
    direction: Direction
    arguments: tuple[Any, ...]
    options: Mapping[str, Any]
    device: Device


@dataclasses.dataclass(frozen=True)
class KernelSpec:
    """One registered implementation.

    Attributes:
      target: name of the module that holds ``forward`` and ``backward``.
      requires: packages it needs; it is not chosen where one is missing.
      priority: of several that support a call the highest is chosen.
      unsupported: why a call cannot be run, or None if it can.
      slower: why a call that can be run is better left to the next implementation, or None. It does not
        count where this one is asked for by name.
      directions: the functions the module has.
    """

    op: str
    platform: Platform
    backend: Backend
    target: str
    requires: tuple[str, ...] = ()
    priority: int = 0
    unsupported: Callable[[Call], str | None] | None = None
    directions: tuple[Direction, ...] = DIRECTIONS
    slower: Callable[[Call], str | None] | None = None

    @property
    def names(self) -> tuple[str, str]:
        """What it is asked for by."""
        return str(self.platform), f"{self.platform}/{self.backend}"

    def __str__(self) -> str:
        return f"{self.names[1]} ({self.target})"

    def load(self, direction: Direction) -> Callable[..., Any]:
        """The function on arrays. Imports the target."""
        return getattr(importlib.import_module(self.target), direction)

    def why_not(self, call: Call) -> str | None:
        """Why this implementation cannot run the call; None if it can."""
        if self.backend.of_device not in (Backend.ANY, call.device.backend):
            return f"runs on {self.backend}, the call runs on {call.device}"
        if call.direction not in self.directions:
            return f"has no {call.direction}"
        missing = [package for package in self.requires if not _installed(package)]
        if missing:
            cure = _extras.command(*missing)
            return f"needs {', '.join(missing)}, not installed{cure and f': {cure}'}"
        return None if self.unsupported is None else self.unsupported(call)


@dataclasses.dataclass(frozen=True)
class Candidate:
    """An implementation considered for a call, and the reason why it was passed over, if it was."""

    spec: KernelSpec
    reason: str | None


class NoImplementationError(ValueError):
    """No registered implementation supports a call.

    Attributes:
      direction: of the call. candidates: what was considered, with the reasons.
    """

    def __init__(self, message: str, direction: Direction, candidates: tuple[Candidate, ...]):
        super().__init__(message)
        self.direction = direction
        self.candidates = candidates


@functools.cache
def _installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # a parent package is missing
        return False


class KernelRegistry:
    """Maps each op to its implementations. The one of lutjax is `lutjax.kernel_registry`.

    Args:
      functions: modules of the functions that call ops, by their names, for `explain`.
    """

    def __init__(self, functions: Mapping[str, str] | None = None) -> None:
        self._functions = dict(functions or {})
        self._recorded: ContextVar[list[tuple[str, Any, Any]] | None] = ContextVar(
            "lutjax_resolved", default=None
        )
        self._specs: dict[str, dict[tuple[Platform, Backend], KernelSpec]] = {}
        self._resolved: dict[Any, KernelSpec] = {}
        # What `use_implementation` says, of each thread and each coroutine.
        self._forced: ContextVar[Any] = ContextVar("lutjax_implementation", default=None)
        # The same as a part of jit's cache key, so that no trace outlives the block that forced its implementation. JAX
        # keeps one for each thread: where coroutines take turns it is set anew, see `follow_coroutine`.
        self._in_cache_key = jax.make_user_context(default_value=None)

    def ops(self) -> tuple[str, ...]:
        """Names of the ops that have an implementation."""
        return tuple(sorted(self._specs))

    def register(
        self,
        op: str,
        platform: Platform | str,
        backend: Backend | str,
        target: str,
        *,
        requires: tuple[str, ...] = (),
        priority: int | None = None,
        unsupported: Callable[[Call], str | None] | None = None,
        directions: tuple[Direction, ...] = DIRECTIONS,
        slower: Callable[[Call], str | None] | None = None,
    ) -> KernelSpec:
        """Adds an implementation.

        Args:
          op: name of the op; the arguments of its functions are described in ``lutjax/ops/<op>.py``.
          platform: how it is written. backend: where it runs.
          target: module with ``forward`` and ``backward``, imported when it is chosen.
          requires, unsupported, directions, slower: see `KernelSpec`.
          priority: by default Triton before Pallas before XLA.

        Raises:
          ValueError: the op already has one for this platform and backend.
        """
        platform, backend = Platform(platform), Backend(backend)
        priority = _DEFAULT_PRIORITY[platform] if priority is None else priority
        spec = KernelSpec(op, platform, backend, target, requires, priority, unsupported, directions, slower)
        of_op = self._specs.setdefault(op, {})
        if (platform, backend) in of_op:
            raise ValueError(
                f"kernel_registry.register: {op!r} already has the implementation {of_op[platform, backend]}; "
                "unregister it first, or register for another platform or backend."
            )
        of_op[platform, backend] = spec
        self._resolved.clear()
        return spec

    def unregister(self, op: str, platform: Platform | str, backend: Backend | str) -> None:
        """Removes an implementation. Traces that jit holds keep using it."""
        spec = self.get(op, platform=platform, backend=backend)
        del self._specs[op][spec.platform, spec.backend]
        if not self._specs[op]:
            del self._specs[op]
        self._resolved.clear()

    def get(self, op: str, *, platform: Platform | str, backend: Backend | str) -> KernelSpec:
        """The implementation registered for exactly this platform and backend.

        Raises:
          KeyError: there is none; the message lists those that the op has.
        """
        try:
            return self._of(op)[Platform(platform), Backend(backend)]
        except KeyError:
            known = "; ".join(str(spec) for spec in self.candidates(op))
            raise KeyError(
                f"{op!r} has no implementation for {platform}/{backend}; it has: {known}"
            ) from None

    def candidates(self, op: str) -> tuple[KernelSpec, ...]:
        """All implementations of an op, the first choice first."""
        return tuple(sorted(self._of(op).values(), key=lambda s: (-s.priority, s.backend == Backend.ANY)))

    def resolve(
        self,
        op: str,
        *args: Any,
        implementation: Implementation = None,
        direction: Direction = "forward",
        device: Device | None = None,
        **options: Any,
    ) -> KernelSpec:
        """The implementation that runs a call.

        Args:
          op: name of the op. args: its arrays, concrete or traced or `jax.ShapeDtypeStruct`.
          implementation: None for the first choice that supports the call, one name that must be used,
            or a tuple of names in order of preference. A name is a platform, or with the backend, where a
            platform has several for a device: ``"pallas/sparsecore"``. By default what `use_implementation` says.
          device: the device that will run the call; by default that of the arrays.
          options: the op's static options.

        Raises:
          NoImplementationError: none supports the call; the message has every candidate's reason.
          ValueError: an unknown name.
        """
        request = self.request(op, implementation)
        recorded = self._recorded.get()
        if recorded is not None and direction == "forward":
            recorded.append((op, args, options))
        leaves, treedef = jax.tree.flatten(args)
        device = device or devices_of(leaves)[0]
        key = (
            op,
            direction,
            request,
            device,
            treedef,
            tuple([_signature(a) for a in leaves]),
            tuple(options.items()),
        )
        spec = self._resolved.get(key)
        if spec is None:
            spec = self._resolved[key] = self._choose(
                op, request, _call(op, direction, args, options, device)
            )
        return spec

    def consider(
        self,
        op: str,
        *args: Any,
        implementation: Implementation = None,
        direction: Direction = "forward",
        device: Device | None = None,
        **options: Any,
    ) -> tuple[Candidate, ...]:
        """Every candidate in the order of preference of a call, with its reason where it is unfit."""
        call = _call(op, direction, args, options, device or devices_of(jax.tree.leaves(args))[0])
        return tuple(
            Candidate(spec, why) for spec, why in self._considered(self.request(op, implementation), call)
        )

    def request(self, op: str, implementation: Implementation) -> tuple[str, ...]:
        """The implementations asked for, in order; empty if any will do."""
        if implementation is None:
            forced = self._forced.get()
            implementation = dict(forced).get(op) or dict(forced).get("*") if forced else None
        if implementation is None:
            return ()
        names = (implementation,) if isinstance(implementation, str) else tuple(implementation)
        return tuple(_known(name) for name in names)

    @contextlib.contextmanager
    def use_implementation(
        self, implementation: Implementation | Mapping[str, Implementation]
    ) -> Iterator[None]:
        """Calls in this block use the given implementation, unless they name one themselves.

        Also inside functions under `jax.jit`, which are traced anew for it. Each thread and each coroutine has its own
        choice; a coroutine should not wait (``await``) inside the block, because a function under `jax.jit` that another
        one calls meanwhile may be the one traced for this block.

        Args:
          implementation: a name, a tuple of names in order of preference, or a mapping from ops to these.

        Raises:
          ValueError: an unknown name or op.

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
                self._of(op)
            for name in (names,) if isinstance(names, str) else names or ():
                _known(name)
        inherited = dict(self._forced.get() or ())
        with self._forcing(tuple(sorted({**inherited, **wanted}.items()))):
            yield

    @contextlib.contextmanager
    def _forcing(self, value: tuple[tuple[str, Implementation], ...]) -> Iterator[None]:
        token = self._forced.set(value)
        self._set_cache_key()
        try:
            yield
        finally:
            self._forced.reset(token)
            self._set_cache_key()

    def _set_cache_key(self) -> None:
        # Entered and never left: what was there before may belong to another coroutine.
        self._in_cache_key(self._forced.get()).__enter__()

    def follow_coroutine(self, *, traced: bool) -> None:
        """Makes jit's cache key that of the running coroutine, where another one of its thread has changed it.

        Args:
          traced: whether a function is being traced; its cache key was made before.

        Raises:
          RuntimeError: one is, under the key of another coroutine.
        """
        if self._in_cache_key.value == self._forced.get():
            return
        self._set_cache_key()
        if traced:
            raise RuntimeError(
                "use_implementation: a function was traced in one coroutine (or in a worker thread that it started) "
                "under the choice of another. Keep `await` out of the block of use_implementation, enter the block "
                "where the function is called, or pass implementation= to the op. Calling it again works."
            )

    def explain(self, op: str, *args: Any, implementation: Implementation = None, **options: Any) -> str:
        """Which implementation runs a call, and why not each other one.

        Args:
          op: name of a function of lutjax, as ``"lookup"`` or ``"lut"``: every op is explained that it calls with these
            arguments. Or of an op that no function has the name of (see ``kernel_registry.ops()``).
          args, options: its arguments; arrays may be `jax.ShapeDtypeStruct`. Nothing is computed.

        Returns:
          Text of a line per candidate, for forward and backward.

        Raises:
          ValueError: an unknown name; the message lists those that are known.

        Example:
          >>> import jax.numpy as jnp, lutjax
          >>> d = lutjax.detect_signs(jnp.array([[0.5, -0.25]]))
          >>> print(lutjax.explain("lookup", jnp.zeros((1, 4, 3)), d))  # doctest: +ELLIPSIS
          lookup on cpu (cpu)
            forward
              pallas/gpu (lutjax.kernels._pallas.gpu.lookup): runs on gpu, the call runs on cpu (cpu)
              triton/gpu (lutjax.kernels._triton.lookup): runs on gpu, the call runs on cpu (cpu)
              pallas/tpu (lutjax.kernels._pallas.tpu.lookup): runs on tpu, the call runs on cpu (cpu)
              pallas/sparsecore (lutjax.kernels._pallas.sparsecore.lookup): runs on sparsecore, the call runs on cpu (cpu)
              xla/any (lutjax.kernels._xla.lookup): chosen
          ...
          >>> text = lutjax.explain("lut", jnp.ones((2, 3)), jnp.zeros((1, 2, 3)), jnp.array([[[0, 1]]]))
          >>> [line for line in text.splitlines() if not line.startswith(" ")]
          ['lut calls detect, lookup', 'detect on cpu (cpu)', 'lookup on cpu (cpu)']
        """
        device = devices_of(jax.tree.leaves(args))[0]
        if op in self._functions:
            calls = self._calls_of(op, args, options)
        else:
            self._of(op)
            calls = [(op, args, options)]
        names = [name for name, _, _ in calls]
        lines = [] if names == [op] else [f"{op} calls {', '.join(names)}"]
        for name, arguments, static in calls:
            lines.append(f"{name} on {device}")
            for direction in DIRECTIONS:
                lines.append(f"  {direction}")
                chosen = False
                for candidate in self.consider(
                    name,
                    *arguments,
                    implementation=implementation,
                    direction=direction,
                    device=device,
                    **static,
                ):
                    why = candidate.reason or ("another comes first" if chosen else "chosen")
                    chosen = chosen or candidate.reason is None
                    lines.append(f"    {candidate.spec}: {why}")
        return "\n".join(lines)

    def _calls_of(
        self, name: str, args: tuple[Any, ...], options: Mapping[str, Any]
    ) -> list[tuple[str, Any, Any]]:
        """The ops that a function calls with these arguments: name, arguments and options of each.

        It is traced, and nothing runs. Which implementations are asked for does not count here.
        """
        function = getattr(importlib.import_module(self._functions[name]), name)
        leaves, structure = jax.tree.flatten((args, dict(options)))
        is_array = [hasattr(leaf, "shape") for leaf in leaves]
        arrays = [leaf for leaf, a in zip(leaves, is_array, strict=True) if a]

        def traced(arrays: list[Any]) -> None:
            rest = iter(arrays)
            filled = [next(rest) if a else leaf for leaf, a in zip(leaves, is_array, strict=True)]
            arguments, keywords = jax.tree.unflatten(structure, filled)
            function(*arguments, **keywords)

        calls: list[tuple[str, Any, Any]] = []
        token = self._recorded.set(calls)
        try:
            with self._forcing(()):
                jax.eval_shape(traced, arrays)
        finally:
            self._recorded.reset(token)
        return calls

    def _of(self, op: str) -> dict[tuple[Platform, Backend], KernelSpec]:
        if op not in self._specs:
            more = [name for name in self._functions if name not in self._specs]
            made_of_them = f"; made of them are {', '.join(more)}" if more else ""
            raise ValueError(f"unknown op {op!r}; the ops are {', '.join(self.ops())}{made_of_them}.")
        return self._specs[op]

    def _considered(self, request: tuple[str, ...], call: Call) -> Iterator[tuple[KernelSpec, str | None]]:
        candidates = self.candidates(call.op)
        if request:
            asked = [spec for wanted in request for spec in candidates if wanted in spec.names]
            for spec in asked:
                yield spec, spec.why_not(call)
            for spec in candidates:
                if spec not in asked:
                    yield spec, f"not asked for (implementation={'|'.join(request)})"
        else:
            for spec in candidates:
                why = spec.why_not(call)
                if why is None and spec.slower is not None:
                    why = spec.slower(call)
                yield spec, why

    def _choose(self, op: str, request: tuple[str, ...], call: Call) -> KernelSpec:
        considered = []
        for spec, why in self._considered(request, call):
            if why is None:
                return spec
            considered.append(Candidate(spec, why))
        asked = f" that was asked for ({', '.join(request)})" if request else ""
        lines = [f"  {candidate.spec}: {candidate.reason}" for candidate in considered]
        raise NoImplementationError(
            f"{op}: no implementation{asked} supports this {call.direction} call on {call.device}:\n"
            + "\n".join(lines),
            call.direction,
            tuple(considered),
        )


def devices_of(leaves: Iterable[Any]) -> tuple[Device, ...]:
    """The devices that may run a call with these arrays.

    One, except where an array is traced in a process with several backends: where jit will run its function,
    and put the constants that it captured, is then not known yet.
    """
    arrays = [leaf for leaf in leaves if isinstance(leaf, jax.Array)]
    if arrays and not any(isinstance(a, jax.core.Tracer) for a in arrays):
        return (_device(next(iter(arrays[0].devices()))),)
    abstract = _compat.abstract_device()
    if abstract is not None:
        return (_described(*abstract),)
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
    return _described(device.platform, device.device_kind)


def _described(platform: str, kind: str) -> Device:
    platform = {"cuda": "gpu", "rocm": "gpu"}.get(platform, platform)
    if platform not in set(Backend):
        return Device(Backend.ANY, f"{platform} {kind}")
    return Device(Backend(platform), kind)


def _known(name: str) -> str:
    platform, slash, backend = name.partition("/")
    if platform not in set(Platform) or (slash and backend not in set(Backend)):
        raise ValueError(
            f"unknown implementation {name!r}; the implementations are {', '.join(Platform)}, or one of these with "
            f"where it runs, as in 'pallas/tpu': {', '.join(Backend)}."
        )
    return name


def _signature(a: Any) -> tuple[Any, ...] | type:
    return (a.shape, a.dtype) if hasattr(a, "shape") else type(a)


def _call(
    op: str, direction: Direction, args: tuple[Any, ...], options: Mapping[str, Any], device: Device
) -> Call:
    structs = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype) if hasattr(a, "shape") else a, args
    )
    return Call(op, direction, structs, dict(options), device)


kernel_registry = KernelRegistry(
    {
        **{
            name: f"lutjax.ops.{name}"
            for name in (
                "detect",
                "detect_signs",
                "lookup",
                "sparse_lookup",
                "lookup_attention",
                "lut_pair_attention",
                "bilinear_gates",
                "soft_lut",
                "binary_lut",
                "packed_lut",
                "logic_gates",
                "update_table",
            )
        },
        **dict.fromkeys(("lut", "sparse_lut", "lut_attention"), "lutjax.ops.compositions"),
    }
)


# Ops that have an implementation in Pallas, by where it runs.
_IN_PALLAS: dict[Backend, tuple[str, ...]] = {
    Backend.GPU: ("lookup", "lookup_attention", "binary_lut", "lookup_update", "lookup_attention_update"),
    Backend.TPU: (
        "detect",
        "detect_signs",
        "lookup",
        "sparse_lookup",
        "lookup_attention",
        "lut_pair_attention",
        "bilinear_gates",
        "soft_lut",
        "binary_lut",
        "lookup_update",
        "sparse_lookup_update",
        "lookup_attention_update",
        "lut_pair_attention_update",
        "packed_lut",
    ),
    Backend.SPARSECORE: ("lookup", "sparse_lookup", "lookup_attention", "lut_pair_attention"),
}
# On GPUs before Triton, to which it leaves what it does no faster. TensorCores first: what they leave is for SparseCores.
_PALLAS_PRIORITY = {Backend.GPU: 21, Backend.TPU: 10, Backend.SPARSECORE: 9}


def _register_builtin() -> None:
    look_ups = ("lookup", "sparse_lookup", "lookup_attention", "lut_pair_attention")
    gates = ("bilinear_gates", "soft_lut", "binary_lut")
    updates = tuple(f"{op}_update" for op in look_ups)
    forward_only = (*updates, "packed_lut")
    only: tuple[Direction, ...] = ("forward",)
    directions = dict.fromkeys(forward_only, only)
    for op in ("detect", "detect_signs", *look_ups, *gates, *forward_only):
        kernel_registry.register(
            op,
            Platform.XLA,
            Backend.ANY,
            f"lutjax.kernels._xla.{op}",
            directions=directions.get(op, DIRECTIONS),
        )
    for op in ("detect", *look_ups, *gates, *updates):
        kernel_registry.register(
            op,
            Platform.TRITON,
            Backend.GPU,
            f"lutjax.kernels._triton.{op}",
            requires=("jax_triton", "triton"),
            unsupported=_asked("lutjax.kernels._triton._support", "unsupported"),
            directions=directions.get(op, DIRECTIONS),
            slower=_asked("lutjax.kernels._triton._support", "slower") if op in updates + gates else None,
        )
    for backend, ops in _IN_PALLAS.items():
        support = f"lutjax.kernels._pallas.{backend}._support"
        for op in ops:
            kernel_registry.register(
                op,
                Platform.PALLAS,
                backend,
                f"lutjax.kernels._pallas.{backend}.{op}",
                # What jax's Mosaic GPU imports and jax does not bring.
                requires=("absl",) if backend == Backend.GPU else (),
                priority=_PALLAS_PRIORITY[backend],
                unsupported=_asked(support, "unsupported"),
                directions=directions.get(op, DIRECTIONS),
                slower=_asked(support, "slower"),
            )


def _asked(module: str, function: str) -> Callable[[Call], str | None]:
    """A function of a module that is imported when it is first asked."""

    def ask(call: Call) -> str | None:
        why: str | None = getattr(importlib.import_module(module), function)(call)
        return why

    return ask


_register_builtin()
