"""Search for the fastest kernel config on this device.

Only `lutjax tune` imports it, so user calls never measure.
"""

import dataclasses
import functools
import importlib.metadata
import itertools
import math
from collections.abc import Callable, Hashable, Iterator
from typing import Any, Literal

import jax
import jax.numpy as jnp

from lutjax.benchmark import measurements, shapes
from lutjax.benchmark.measure import device_time
from lutjax.dispatch.contract import Call, Direction, Step
from lutjax.dispatch.registry import Device, KernelSpec, Made, Platform, devices_of, kernel_registry
from lutjax.tuning import Asked, Document, Entry, Key, Launch, Sizes, bucket, recorded, use
from lutjax.values import Detection, accumulator

Effort = Literal["quick", "thorough"]
EFFORTS: dict[Effort, int] = {"quick": 1, "thorough": 2}
"""Number of config fields varied at once."""

_RATE = 1e-3  # of updates
_GAIN = 0.01  # required relative gain; smaller differences are noise
_VALUES = (4.0, 64.0)  # range of tile elements per thread
_VERSIONS_OF = ("jax", "jax-triton", "jaxlib", "lutjax", "triton")


# --------------------------------------------------------------------------------- what is launched
@dataclasses.dataclass(frozen=True, eq=False)
class Part:
    """Measured kernel function.

    Attributes:
      prepare: returns its arrays from the shape's arrays.
      run: function with bound static arguments.
      in_place: see `lutjax.benchmark.measure.device_time`.
    """

    shape: shapes.OfOp
    dtype: str
    prepare: Callable[[measurements.Values], tuple[Any, ...]]
    run: Callable[..., Any]
    in_place: bool = False

    def abstract_arrays(self) -> tuple[Any, ...]:
        """Return its abstract arrays."""
        return jax.eval_shape(lambda: self.prepare(measurements.arrays(self.shape, self.dtype)))

    def arrays(self) -> tuple[Any, ...]:
        """Return random arrays."""
        return jax.jit(self.prepare)(_values(self.shape, self.dtype))

    def launches(self) -> list[Asked]:
        """Return its launched kernels."""
        with recorded() as asked:
            jax.eval_shape(self.run, *self.abstract_arrays())
        return asked


@functools.lru_cache(maxsize=1)
def _values(shape: shapes.OfOp, dtype: str) -> measurements.Values:
    return jax.jit(lambda: measurements.arrays(shape, dtype))()


class NoKernelError(ValueError):
    """No tunable kernel can run here."""


@dataclasses.dataclass(frozen=True)
class Kernel:
    """Kernel at some sizes, launched by a part."""

    asked: Asked
    part: Part

    def __str__(self) -> str:
        return f"{self.asked.kernel}, {', '.join(f'{n} {s}' for n, s in self.asked.sizes.items())}"

    @property
    def key(self) -> Key:
        """Kernel name and rounded sizes."""
        return self.asked.kernel, bucket(self.asked.sizes)


def kernels(measured: list[shapes.Measured], dtypes: tuple[str, ...]) -> list[Kernel]:
    """Return launched kernels on the default device, one per name and rounded sizes.

    Raises:
      NoKernelError: no kernel; the message lists a reason for every op.
    """
    found: dict[Key, Kernel] = {}
    reasons: dict[str, None] = {}
    for shape, dtype in itertools.product(_look_ups(measured), dtypes):
        for part in training_parts(shape, dtype, reasons):
            for asked in part.launches():
                kernel = Kernel(asked, part)
                found.setdefault(kernel.key, kernel)
    if not found:
        lines = "".join(f"\n  {reason}" for reason in reasons)
        raise NoKernelError(f"no kernel in Triton can run on {devices_of(())[0]}:{lines}")
    return list(found.values())


def _look_ups(measured: list[shapes.Measured]) -> Iterator[shapes.OfOp]:
    """Iterate over distinct lookups, including each in a language model."""
    found: dict[shapes.OfOp, None] = {}
    for shape in measured:
        if isinstance(shape, shapes.LanguageModel):
            from lutjax.benchmark import language_model

            found |= dict.fromkeys(language_model.layers(shape))
        else:
            found[shape] = None
    return iter(found)


def training_parts(
    shape: shapes.OfOp, dtype: str, reasons: dict[str, None] | None = None
) -> list[Part]:
    """Return the parts of a training step that run in Triton on the default device.

    These are the forward pass, all cotangents except the table gradient, the in-place table update,
    and the table gradient, which may launch the update kernel after writing zeros.

    Args:
      shape: the shape.
      dtype: table dtype.
      reasons: receives reasons against unsupported parts.
    """
    device = devices_of(())[0]
    reasons = {} if reasons is None else reasons
    # In this order, because the table gradient may launch the kernel of the update again.
    found: dict[str, list[Part]] = {"forward": [], "backward": [], "update": [], "table": []}
    row = shapes.IN_PLACE if shapes.IN_PLACE in shape.rows else shape.rows[-1]
    calls = measurements.calls(shape, dtype)
    for made, direction in measurements.requests(shape, row, dtype):
        spec = _spec(made, direction, device, reasons)
        if spec is None:
            continue
        make = functools.partial(
            _build_part, shape, dtype, calls.index(made), spec, direction, device
        )
        if direction != "backward":
            found[direction].append(make())
            continue
        table = made.call.table_name
        names = zip(made.call.arrays(), made.call.values(), strict=True)
        found["backward"].append(
            make(needs=frozenset(n for n, a in names if n != table and _is_differentiable(a)))
        )
        if table is not None:
            found["table"].append(make(needs=frozenset({table})))
    return [part for of in found.values() for part in of]


def _spec(
    made: Made, direction: Direction, device: Device, reasons: dict[str, None]
) -> KernelSpec | None:
    """Return the Triton implementation."""
    op, request = made.call.op, made.request(direction, device)
    specs = [spec for spec in kernel_registry.candidates(op) if spec.platform == Platform.TRITON]
    why = {spec: spec.unsupported_reason(request) for spec in specs}
    fit = next((spec for spec in specs if why[spec] is None), None)
    if fit is None:
        text = (
            "; ".join(dict.fromkeys(reason or "" for reason in why.values()))
            or "has no kernel in Triton"
        )
        reasons[f"{op}: {text}"] = None
    return fit


def _is_differentiable(array: Any) -> bool:
    if isinstance(array, Detection):
        return True
    return hasattr(array, "dtype") and jnp.issubdtype(array.dtype, jnp.inexact)


def _build_part(
    shape: shapes.OfOp,
    dtype: str,
    number: int,
    spec: KernelSpec,
    direction: Direction,
    device: Device,
    needs: frozenset[str] = frozenset(),
) -> Part:
    """Return the part for one call."""
    function = functools.partial(spec.load(direction), device=device)
    case = measurements.abstract_case(shape, dtype)

    def forward_arguments(values: measurements.Values) -> tuple[Call]:
        with kernel_registry.collecting() as calls:
            measurements.output(case, *values[:2])
        return (calls[number].arrays,)

    def with_cotangent(values: measurements.Values) -> tuple[Call, Any]:
        (call,) = forward_arguments(values)
        # Where the call itself is kept for the backward pass, jit leaves this out.
        plain = kernel_registry.get(call.op, platform="xla", backend="any").load("forward")
        outputs = plain(call, device=device)
        if isinstance(outputs, Detection):
            return call.residuals(outputs), jnp.ones_like(outputs.margin)
        return call.residuals(outputs), values[2].reshape(outputs.shape)

    def update_arguments(values: measurements.Values) -> tuple[Any, Call, Any]:
        call, cotangent = with_cotangent(values)
        # The table comes first and only once: the measured loop donates it.
        table = str(call.table_name)
        return getattr(call, table), call.replace(**{table: None}), cotangent

    def update(weights: Any, call: Call, cotangent: Any) -> tuple[Any, tuple[()]]:
        step = Step(jnp.asarray(_RATE, accumulator(weights.dtype)))
        call = call.replace(**{str(call.table_name): weights})
        return function(call, cotangent, step)[0], ()

    if direction == "backward":
        return Part(shape, dtype, with_cotangent, lambda call, dy: function(call, dy, needs))
    if direction == "update":
        return Part(shape, dtype, update_arguments, update, in_place=True)
    return Part(shape, dtype, forward_arguments, function)


# --------------------------------------------------------------------------------------- the search
Fields = dict[str, tuple[int, ...]]
"""Candidate values by config field."""


def fields(sizes: Sizes, rule: Launch) -> Fields:
    """Return candidate values for these sizes, including the rule's."""
    reads = math.prod(sizes.get(name, 1) for name in ("samples", "queries", "keys"))
    width = max(sizes.get(name, 1) for name in ("outputs", "slots", "inputs"))
    detectors = sizes.get("detectors", 16 if "places" in sizes else 1)  # of gates: tiles of samples

    def powers(most: int, up_to: int) -> set[int]:
        enough = 1 << (max(up_to, 1) - 1).bit_length()
        return {n for n in (8, 16, 32, 64, 128, 256) if n <= min(most, max(enough, 8))}

    return {
        "rows": tuple(sorted(powers(128, reads) | {rule.rows})),
        "outputs": tuple(sorted(powers(256, width) | {rule.outputs})),
        "detectors": tuple(
            sorted({n for n in (1, 2, 4, 8, 16) if n < detectors} | {0, rule.detectors})
        ),
        "warps": tuple(sorted({1, 2, 4, 8} | {rule.warps})),
    }


class Cost:
    """Seconds per config, each measured once; infinite for configs that do not run.

    Args:
      time: returns seconds per call; raises the error of a config that does not run.
      identity: effective form of a config. Configs with equal identity are measured once.

    Attributes:
      measured: number of measured configs.
      skipped: number of configs that do not run.
      problem: reason of the last failure.
    """

    def __init__(
        self,
        time: Callable[[Launch], float],
        identity: Callable[[Launch], Hashable] = lambda launch: launch,
    ):
        self._time, self._identity = time, identity
        self._of_launch: dict[Launch, float] = {}
        self._of_identity: dict[Hashable, float] = {}
        self.measured = self.skipped = 0
        self.problem = ""

    def __call__(self, launch: Launch) -> float:
        """Return the seconds for a config, measured once."""
        if launch not in self._of_launch:
            self._of_launch[launch] = self._measure(launch)
        return self._of_launch[launch]

    def _measure(self, launch: Launch) -> float:
        identity: Hashable = launch
        try:
            identity = self._identity(launch)
            # A kernel clips tiles to the arrays, so different configs may be the same program.
            if identity in self._of_identity:
                return self._of_identity[identity]
            seconds = self._time(launch)
            self.measured += 1
        except _does_not_run() as error:
            self.skipped += 1
            self.problem = f"{type(error).__name__}: {error}".splitlines()[0]
            seconds = math.inf
        self._of_identity[identity] = seconds
        return seconds


@functools.cache
def _does_not_run() -> tuple[type[Exception], ...]:
    """Return error types for configs rejected by compiler or device. JAX raises RuntimeError."""
    refused: tuple[type[Exception], ...] = (ValueError, RuntimeError)
    try:
        from triton.errors import TritonError
    except ImportError:
        return refused
    return (*refused, TritonError)


def descend(
    starts: list[Launch], values: Fields, cost: Callable[[Launch], float], together: int
) -> Launch:
    """Return a locally optimal config by coordinate descent over field groups.

    Args:
      starts: initial configs; the first is preferred.
      values: candidate values by field.
      cost: returns the seconds for a config.
      together: group size.
    """
    best = _select_fastest(starts[0], starts[1:], cost)
    groups = list(itertools.combinations(values, together))
    low, high = _values_of_thread(starts)
    unchanged = 0
    for group in itertools.cycle(groups):
        if unchanged == len(groups):
            return best
        tried = _list_variants(best, {name: values[name] for name in group})
        faster = _select_fastest(best, [t for t in tried if low <= _values_of(t) <= high], cost)
        unchanged = unchanged + 1 if faster == best else 0
        best = faster
    return best


def _select_fastest(best: Launch, others: list[Launch], cost: Callable[[Launch], float]) -> Launch:
    """Return the fastest config, or the first if no other is clearly faster."""
    fastest = min([best, *others], key=cost)
    return fastest if cost(fastest) < cost(best) * (1 - _GAIN) else best


def _list_variants(launch: Launch, values: Fields) -> list[Launch]:
    """Return all valid configs with changed fields."""
    made = []
    for chosen in itertools.product(*values.values()):
        with_values = {**dataclasses.asdict(launch), **dict(zip(values, chosen, strict=True))}
        if with_values["rows"] * with_values["outputs"] <= 2**20:
            made.append(Launch(**with_values))
    return made


def _values_of(launch: Launch) -> float:
    """Return tile elements per thread."""
    return launch.rows * launch.outputs / (32 * launch.warps)


def _values_of_thread(starts: list[Launch]) -> tuple[float, float]:
    """Return the searched range of tile elements per thread, including all starts."""
    given = [_values_of(launch) for launch in starts]
    return min(*given, _VALUES[0]), max(*given, _VALUES[1])


# ---------------------------------------------------------------------------------------- a kernel
@dataclasses.dataclass(frozen=True)
class Found:
    """Search result.

    Attributes:
      entry: None if no config runs.
      measured: number of measured configs.
      skipped: number of configs that do not run.
      problem: reason of a failure.
    """

    kernel: Kernel
    entry: Entry | None
    measured: int
    skipped: int
    problem: str

    def __str__(self) -> str:
        if self.entry is None:
            return f"{self.kernel}: no launch runs ({self.problem})"
        rule = self.entry.rule_microseconds
        return (
            f"{self.kernel}: {'-' if rule is None else rule} us by the rule, "
            f"{self.entry.microseconds} us by {self.entry.launch} ({self.measured} measured, "
            f"{self.skipped} do not run)"
        )


def tune(
    kernel: Kernel,
    effort: Effort,
    tell: Callable[[str], None] = lambda text: None,
    *,
    repeats: int = 7,
) -> Found:
    """Search for a faster config, starting from the rule's and the current config.

    Args:
      kernel: the kernel.
      effort: search effort.
      tell: receives progress messages.
      repeats: timed loops per config.
    """
    asked, part = kernel.asked, kernel.part
    abstract, arrays = part.abstract_arrays(), part.arrays()
    best = math.inf

    def trace_program(launch: Launch) -> str:
        with use({asked.kernel: launch}):
            return str(jax.make_jaxpr(part.run)(*abstract))

    def time(launch: Launch) -> float:
        nonlocal best
        args = arrays
        if part.in_place:  # the measurement consumes it
            args = (jax.tree.map(jnp.copy, arrays[0]), *arrays[1:])
        with use({asked.kernel: launch}):
            seconds = device_time(
                part.run,
                *args,
                in_place=part.in_place,
                repeats=repeats,
                loop_seconds=0.01,
                budget=0.3,
            ).p50
        best = min(best, seconds)
        tell(f"{kernel}: {cost.measured + 1} launches, {best * 1e6:.2f} us")
        return seconds

    cost = Cost(time, trace_program)
    starts = list(dict.fromkeys((asked.rule, asked.launch)))
    launch = descend(starts, fields(asked.sizes, asked.rule), cost, EFFORTS[effort])
    entry = None
    if math.isfinite(cost(launch)):
        entry = Entry(
            asked.kernel,
            asked.sizes,
            launch,
            _microseconds(cost(launch)),
            _microseconds(cost(asked.rule)),
        )
    return Found(kernel, entry, cost.measured, cost.skipped, cost.problem)


def _microseconds(seconds: float) -> float | None:
    return round(seconds * 1e6, 2) if math.isfinite(seconds) else None


def document() -> Document:
    """Return an empty config document for this device."""
    versions = {}
    for package in _VERSIONS_OF:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return Document(jax.devices()[0].device_kind, versions)
