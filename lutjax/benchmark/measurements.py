"""Measurements by shape, row and supported implementation."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

import lutjax
from lutjax import cases, optim
from lutjax.benchmark.measure import Timing, device_time
from lutjax.benchmark.shapes import (
    DENSE,
    FORWARD,
    IN_PLACE,
    UPDATE,
    LanguageModel,
    Measured,
    OfOp,
    name_of,
)
from lutjax.cases import Case
from lutjax.dispatch.contract import Direction
from lutjax.dispatch.registry import Made, Platform, devices_of, kernel_registry

IMPLEMENTATIONS = tuple(
    p.value for p in (Platform.NATIVE, Platform.TRITON, Platform.PALLAS, Platform.XLA)
)
DTYPES = ("float32", "bfloat16")
"""Dtypes of tables and outputs."""

_RATE = 1e-3  # of the updates

Kernels = dict[str, dict[Direction, str]]
"""Implementations by op and direction; updates have separate entries."""

Arrays = dict[str, Any]
Values = tuple[Arrays, Arrays, Any]
"""Differentiated arrays, other arrays, and the output cotangent."""


@dataclasses.dataclass(frozen=True)
class Measurement:
    """Measurement for one row and implementation.

    Attributes:
      row: one of `lutjax.benchmark.shapes.ROWS`.
      implementation: its kernels run where available, plain JAX elsewhere.
      dtype: dtype for tables and outputs; language models: tables only; gates: inputs and
          outputs.
      kernels: implementation by op.
    """

    shape: Measured
    row: str
    implementation: str
    dtype: str
    kernels: Kernels

    @property
    def name(self) -> str:
        """Name of the shape."""
        return name_of(self.shape)

    @property
    def kernel_names(self) -> str:
        """Implementations by op, such as ``lookup: triton/xla`` with different directions."""
        return ", ".join(
            f"{op}: {'/'.join(dict.fromkeys(of.values()))}"
            for op, of in sorted(self.kernels.items())
        )

    @property
    def bytes_moved(self) -> int:
        """See `lutjax.cases.Traffic.bytes_moved`."""
        if isinstance(self.shape, OfOp):
            return self.shape.traffic.bytes_moved(self.row, self._itemsize)
        from lutjax.benchmark import language_model

        return language_model.bytes_moved(self.shape, self.row, self._itemsize)

    @property
    def table_bytes(self) -> int:
        """Table bytes; parameter bytes for language models."""
        if isinstance(self.shape, OfOp):
            return self.shape.traffic.table_bytes(self._itemsize)
        return self._step().table_bytes

    @property
    def _itemsize(self) -> int:
        return jnp.dtype(self.dtype).itemsize

    def measure(self, **options: Any) -> Timing:
        """Run it; for `options` see `lutjax.benchmark.measure.device_time`."""
        shape, row, dtype = self.shape, self.row, self.dtype
        with lutjax.use_implementation(_names(self.implementation)):
            if not isinstance(shape, OfOp):
                return self._step().time(**options)
            args = jax.jit(lambda: arguments(shape, row, dtype))()
            in_place = row in (IN_PLACE, UPDATE)
            return device_time(function(shape, row, dtype), *args, in_place=in_place, **options)

    def _step(self) -> Any:
        assert isinstance(self.shape, LanguageModel)
        return _language_model_step(self.shape.batch, self.row, self.dtype)


@functools.lru_cache(maxsize=1)
def _language_model_step(batch: int, row: str, dtype: str) -> Any:
    from lutjax.benchmark import language_model

    return language_model.Step(batch, language_model.TABLE_GRADIENTS[row], table_dtype=dtype)


def measurements(
    shape: Measured,
    *,
    rows: tuple[str, ...] = (),
    dtype: str = "float32",
    implementations: tuple[str, ...] = IMPLEMENTATIONS,
) -> Iterator[Measurement]:
    """Yield all supported measurements on the default device.

    Args:
      shape: the shape to measure.
      rows: rows from `lutjax.benchmark.shapes.ROWS`. Empty: all rows; language models: the
          in-place step. They only have rows with a backward pass.
      dtype: table dtype.
      implementations: names; implementations without a kernel in a row are skipped.
    """
    if isinstance(shape, LanguageModel):
        from lutjax.benchmark import language_model

        layers: tuple[OfOp, ...] = tuple(dict.fromkeys(language_model.layers(shape)))
        rows = tuple(row for row in rows or (IN_PLACE,) if row in language_model.TABLE_GRADIENTS)
    else:
        if dtype not in cases.find_module(shape.op).dtypes:
            dtype = cases.find_module(shape.op).dtypes[0]
        layers, rows = (shape,), tuple(row for row in shape.rows if not rows or row in rows)
    for row in rows:
        for implementation in implementations:
            chosen: Kernels = {}
            for layer in layers:
                chosen |= kernels(layer, row, implementation, dtype)
            if any(implementation in of.values() for of in chosen.values()):
                yield Measurement(shape, row, implementation, dtype, chosen)


def kernels(shape: OfOp, row: str, implementation: str, dtype: str) -> Kernels:
    """Return the selected implementations on the default device, with this one preferred."""
    device, names = devices_of(())[0], _names(implementation)
    found: Kernels = {}
    for made, direction in requests(shape, row, dtype):
        spec = kernel_registry.resolve_request(made.request(direction, device), names)
        op = made.call.op
        found.setdefault(f"{op} update" if direction == "update" else op, {})[direction] = (
            spec.platform.value
        )
    return found


def requests(shape: OfOp, row: str, dtype: str) -> Iterator[tuple[Made, Direction]]:
    """Yield op calls on the default device, with directions."""
    device = devices_of(())[0]
    for made in (made for made in calls(shape, dtype) if made.runs_on(device)):
        if row != UPDATE:
            yield made, "forward"
            if row != FORWARD:
                yield made, "backward"
        if row in (IN_PLACE, UPDATE) and made.call.table_name is not None:
            yield made, "update"


@functools.cache
def calls(shape: OfOp, dtype: str) -> tuple[Made, ...]:
    """Return all op calls in the forward pass."""
    case = abstract_case(shape, dtype)
    args, options = abstract_arguments(case)
    return tuple(kernel_registry.calls_of(case.function or case.op, *args, **options))


def abstract_arguments(case: Case) -> tuple[Any, Any]:
    """Return the function arguments and options in a case: shapes and dtypes instead of arrays."""
    found: list[tuple[Any, Any]] = []

    def spy(*args: Any, **options: Any) -> Any:
        found.append(
            jax.tree.map(
                lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype) if hasattr(a, "shape") else a,
                (args, options),
            )
        )
        return _function(case)(*args, **options)

    jax.eval_shape(
        lambda params, constants: case.call(spy, {**params, **constants}),
        case.differentiable,
        case.fixed,
    )
    # Composed ops call the spy once, with the arguments of the measured function.
    ((args, options),) = found
    return args, options


@functools.cache
def abstract_case(shape: OfOp, dtype: str) -> Case:
    """Return the measured case, with shapes and dtypes instead of arrays."""
    made: list[Case] = []

    def build() -> tuple[Arrays, Arrays]:
        made.append(_measured_case(shape, dtype))
        return made[-1].differentiable, made[-1].fixed

    differentiable, fixed = jax.eval_shape(build)
    return dataclasses.replace(made[-1], differentiable=differentiable, fixed=fixed)


def _measured_case(shape: OfOp, dtype: str) -> Case:
    """Return the measured case, with its accumulation mode."""
    case = cases.find_module(shape.op).measured(shape.sizes, dtype)
    if shape.accumulate is None:
        return case
    call = case.call
    return dataclasses.replace(
        case, call=lambda op, a: call(functools.partial(op, accumulate=shape.accumulate), a)
    )


def accumulates(shape: Measured) -> bool:
    """Return True if the measured function takes `accumulate`."""
    if not isinstance(shape, OfOp):
        return False
    case = abstract_case(
        dataclasses.replace(shape, accumulate=None), cases.find_module(shape.op).dtypes[0]
    )
    return "accumulate" in inspect.signature(_function(case)).parameters


def arrays(shape: OfOp, dtype: str) -> Values:
    """Return random arrays: differentiated, others, and any output cotangent."""
    case = _measured_case(shape, dtype)
    y = jax.eval_shape(
        functools.partial(output, abstract_case(shape, dtype)), case.differentiable, case.fixed
    )
    dy = None
    if jnp.issubdtype(y.dtype, jnp.floating):
        dy = jax.random.normal(jax.random.key(1, impl="rbg"), y.shape, y.dtype)
    return case.differentiable, case.fixed, dy


def output(case: Case, params: Arrays, constants: Arrays) -> jax.Array:
    """Return the measured output."""
    (y,) = case.call(_function(case), {**params, **constants}).values()
    return jnp.asarray(y)


def _function(case: Case) -> Callable[..., Any]:
    return kernel_registry.function(case.function or case.op)


def _names(implementation: str) -> tuple[str, ...]:
    """Return preferred names: the implementation, Triton after Pallas, then plain JAX."""
    others = (
        (Platform.TRITON, Platform.XLA) if implementation == Platform.PALLAS else (Platform.XLA,)
    )
    return tuple(dict.fromkeys((implementation, *(p.value for p in others))))


def function(shape: OfOp, row: str, dtype: str) -> Callable[..., Any]:
    """Return the measured function for `arguments`; in-place rows take the table first."""
    case = abstract_case(shape, dtype)
    if row == FORWARD:
        return functools.partial(output, case)
    if row == DENSE:

        def run_dense(params: Any, constants: Any, dy: Any) -> Any:
            y, pullback = jax.vjp(lambda p: output(case, p, constants), params)
            if case.table is None:
                # Reading y and dy again would cost as much as the op; a barrier only orders them.
                y, dy = jax.lax.optimization_barrier((y, dy))
                return y, pullback(dy)[0]
            return y, pullback(_cotangent(y, dy))[0]

        return run_dense
    table = case.table
    assert table is not None
    if row == IN_PLACE:

        def in_place(weights: Any, inputs: Any, constants: Any, dy: Any) -> Any:
            y, gradients = _outputs_and_gradients(case, {table: weights, **inputs}, constants, dy)
            # The other gradients are outputs: otherwise the compiler would not compute them.
            weights, _ = lutjax.update_table(weights, gradients.pop(table), _RATE)
            return weights, (y, gradients)

        return in_place
    assert row == UPDATE
    return lambda weights, gradient: (lutjax.update_table(weights, gradient, _RATE)[0], ())


def arguments(shape: OfOp, row: str, dtype: str) -> tuple[Any, ...]:
    """Return random arrays for `function`."""
    params, constants, dy = arrays(shape, dtype)
    if row == FORWARD:
        return params, constants
    if row == DENSE:
        return params, constants, dy
    case = abstract_case(shape, dtype)
    assert case.table is not None
    if row == UPDATE:
        gradient = _outputs_and_gradients(case, params, constants, dy)[1][case.table]
        return params[case.table], gradient
    return params.pop(case.table), params, constants, dy


def _outputs_and_gradients(
    case: Case, params: Arrays, constants: Arrays, dy: Any
) -> tuple[jax.Array, dict[str, Any]]:
    """Return the outputs, and gradients with sparse table gradients."""

    def loss(params: Arrays) -> tuple[jax.Array, jax.Array]:
        y = output(case, params, constants)
        # The sum is not used, so not computed.
        return jnp.sum(y * jax.lax.stop_gradient(_cotangent(y, dy))), y

    gradient = optim.value_and_grad(loss, tables=lambda name, a: name == case.table, has_aux=True)
    (_, y), gradients = gradient(params)
    return y, gradients


def _cotangent(y: jax.Array, dy: jax.Array) -> jax.Array:
    """Return `dy`, made dependent on the output as in training.

    Otherwise the compiler could share rows between forward and backward, and would copy the table
    before its update.
    """
    return jnp.where(jnp.isnan(y), y, dy)
