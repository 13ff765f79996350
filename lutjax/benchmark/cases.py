"""What is measured of a shape: its rows, for each implementation that can run here."""

import dataclasses
import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

import lutjax
from lutjax._dtypes import accumulator
from lutjax.benchmark.measure import Timing, device_time
from lutjax.benchmark.shapes import (
    DENSE,
    FORWARD,
    IN_PLACE,
    ROWS,
    UPDATE,
    FullyConnected,
    Gates,
    LanguageModel,
    Measured,
    OfOp,
    Pair,
    Sequence,
    Shape,
    Sparse,
    name_of,
)
from lutjax.kernels.registry import Direction, Platform
from lutjax.training import tables

IMPLEMENTATIONS = tuple(p.value for p in (Platform.TRITON, Platform.PALLAS, Platform.XLA))
DTYPES = ("float32", "bfloat16")
"""Of tables and outputs."""

_RATE = 1e-3  # of the updates

Kernels = dict[str, dict[Direction, str]]
"""The implementation that runs each op, in each direction."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One row of a shape by one implementation.

    Attributes:
      row: one of `lutjax.benchmark.shapes.ROWS`.
      implementation: its kernels run where there are any, those in plain JAX elsewhere.
      dtype: of tables and outputs; of the tables alone in a language model; of inputs and outputs of gates.
      kernels: what runs each op.
    """

    shape: Measured
    row: str
    implementation: str
    dtype: str
    kernels: Kernels

    @property
    def name(self) -> str:
        """Of the shape."""
        return name_of(self.shape)

    @property
    def kernel_names(self) -> str:
        """``lookup: triton/xla`` where forward and backward differ."""
        return ", ".join(
            f"{op}: {'/'.join(dict.fromkeys(of.values()))}" for op, of in sorted(self.kernels.items())
        )

    @property
    def bytes_moved(self) -> int:
        """See `lutjax.benchmark.shapes.Shape.bytes_moved`."""
        if isinstance(self.shape, OfOp):
            return self.shape.bytes_moved(self.row, self._itemsize)
        from lutjax.benchmark import language_model

        return language_model.bytes_moved(self.shape, self.row, self._itemsize)

    @property
    def table_bytes(self) -> int:
        """Bytes of the tables; of all that is trained in a language model."""
        if isinstance(self.shape, OfOp):
            return self.shape.table_bytes(self._itemsize)
        return self._step().table_bytes

    @property
    def _itemsize(self) -> int:
        return jnp.dtype(self.dtype).itemsize

    def measure(self, **options: Any) -> Timing:
        """Runs it; `options` are those of `lutjax.benchmark.measure.device_time`."""
        shape, row = self.shape, self.row
        with lutjax.use_implementation(_request(self.implementation)):
            if not isinstance(shape, OfOp):
                return self._step().time(**options)
            args = jax.jit(lambda: arguments(shape, row, self.dtype))()
            return device_time(function(shape, row), *args, in_place=row in (IN_PLACE, UPDATE), **options)

    def _step(self) -> Any:
        assert isinstance(self.shape, LanguageModel)
        return _language_model_step(self.shape.batch, self.row, self.dtype)


@functools.lru_cache(maxsize=1)
def _language_model_step(batch: int, row: str, dtype: str) -> Any:
    from lutjax.benchmark import language_model

    return language_model.Step(batch, language_model.TABLE_GRADIENTS[row], table_dtype=dtype)


def cases(
    shape: Measured,
    *,
    rows: tuple[str, ...] = (),
    dtype: str = "float32",
    implementations: tuple[str, ...] = IMPLEMENTATIONS,
) -> Iterator[Case]:
    """The cases of a shape that can run on the default device.

    Args:
      rows: those of `lutjax.benchmark.shapes.ROWS` that are wanted. Empty: all, of a language model the step in
        place. It has the rows with a backward pass only.
      implementations: names; one that has no kernel for any op of a row gives no case.
    """
    if isinstance(shape, LanguageModel):
        from lutjax.benchmark import language_model

        layers: tuple[OfOp, ...] = tuple(dict.fromkeys(language_model.layers(shape)))
        rows = tuple(row for row in rows or (IN_PLACE,) if row in language_model.TABLE_GRADIENTS)
    else:
        measured = (FORWARD, DENSE) if isinstance(shape, Gates) else ROWS
        layers, rows = (shape,), tuple(row for row in measured if not rows or row in rows)
    for row in rows:
        for implementation in implementations:
            chosen: Kernels = {}
            for layer in layers:
                chosen |= kernels(layer, row, implementation, dtype)
            if any(implementation in of.values() for of in chosen.values()):
                yield Case(shape, row, implementation, dtype, chosen)


def kernels(shape: OfOp, row: str, implementation: str, dtype: str) -> Kernels:
    """Which implementation runs each op of a row on the default device, if this one comes first."""
    return {
        call.op: {
            direction: lutjax.kernel_registry.resolve(
                call.op,
                *call.arguments,
                implementation=_request(implementation),
                direction=direction,
                **call.options,
            ).platform.value
            for direction in call.directions
        }
        for call in calls(shape, row, *abstract(shape, dtype))
    }


@dataclasses.dataclass(frozen=True)
class OpCall:
    """An op that a row calls, as the registry and the ops' kernels know it.

    Attributes:
      arguments: with leading axes.
      cotangent: of the output of a look-up, None of others.
      directions: in which it is called.
    """

    op: str
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    cotangent: Any
    directions: tuple[Direction, ...]


def calls(
    shape: OfOp, row: str, params: dict[str, Any], constants: dict[str, Any], gradient: Any
) -> Iterator[OpCall]:
    """The ops that a row calls, of `arrays`."""
    directions: tuple[Direction, ...] = ("forward",) if row == FORWARD else ("forward", "backward")
    if isinstance(shape, Gates):
        arguments = (params["x"], params[shape.parameter[0]], constants["wires"], constants["readers"])
        yield OpCall(shape.op, arguments, {}, gradient, directions)
        return
    weights = params["weights"]
    if row != UPDATE:
        if not isinstance(shape, Pair):
            detect = {"epsilon": 0.0, "n_inputs": params["x"].shape[-1], "accumulate": None}
            yield OpCall("detect", (params["x"], constants["anchors"]), detect, None, directions)
            if "positions" in params:
                yield OpCall("detect_signs", (params["positions"],), {"epsilon": 0.0}, None, directions)
        operation = importlib.import_module(f"lutjax.ops.{gradient.op}").OPERATION
        look_up = list(gradient.arguments)
        look_up.insert(operation.table, weights)
        options = dict(gradient.options)
        yield OpCall(gradient.op, tuple(look_up), options, gradient.cotangent, directions)
    if row in (IN_PLACE, UPDATE):
        rate = jnp.asarray(_RATE, accumulator(weights.dtype))
        update = (weights, {}, rate, gradient.factor, gradient.cotangent, *gradient.arguments)
        options = {**dict(gradient.options), "rule": tables.SGD()}
        yield OpCall(f"{gradient.op}_update", update, options, None, ("forward",))


@functools.cache
def abstract(shape: OfOp, dtype: str) -> tuple[dict[str, Any], dict[str, Any], Any]:
    """Shapes and dtypes of `arrays`."""
    return jax.eval_shape(functools.partial(arrays, shape, dtype))


def arrays(shape: OfOp, dtype: str) -> tuple[dict[str, Any], dict[str, Any], Any]:
    """Random arrays that have a cotangent, arrays that have none, and the gradient of the tables in factors.

    Of gates: with the cotangent of the output instead of the gradient.
    """
    params, constants, dy = _arrays(shape, dtype)
    if isinstance(shape, Gates):
        return params, constants, dy
    return params, constants, _gradient(shape, params, constants, dy)


def _request(implementation: str) -> tuple[str, ...]:
    """That implementation where it has a kernel, else plain JAX; beside kernels in Pallas those in Triton, as by default."""
    others = (Platform.TRITON, Platform.XLA) if implementation == Platform.PALLAS else (Platform.XLA,)
    return tuple(dict.fromkeys((implementation, *(p.value for p in others))))


def function(shape: OfOp, row: str) -> Callable[..., Any]:
    """What is measured, of `arguments`. The table comes first, and is carried on where it is updated in place."""
    if row == FORWARD:
        return functools.partial(_output, shape)
    if row == DENSE:

        def dense(params: Any, constants: Any, dy: Any) -> Any:
            y, pullback = jax.vjp(lambda p: _output(shape, p, constants), params)
            if isinstance(shape, Gates):
                # A pass over y and dy would count as much as the gates: an order is enough.
                y, dy = jax.lax.optimization_barrier((y, dy))
                return y, pullback(dy)[0]
            return y, pullback(_cotangent(y, dy))[0]

        return dense
    assert isinstance(shape, Shape)
    if row == IN_PLACE:

        def in_place(weights: Any, inputs: Any, constants: Any, dy: Any) -> Any:
            y, gradients = _outputs_and_gradients(shape, {"weights": weights, **inputs}, constants, dy)
            weights, _ = lutjax.update_table(weights, gradients.pop("weights"), _RATE)
            return weights, (y, gradients)

        return in_place
    assert row == UPDATE
    return lambda weights, gradient: (lutjax.update_table(weights, gradient, _RATE)[0], ())


def arguments(shape: OfOp, row: str, dtype: str) -> tuple[Any, ...]:
    """Random arrays for `function`."""
    params, constants, dy = _arrays(shape, dtype)
    if row == FORWARD:
        return params, constants
    if row == DENSE:
        return params, constants, dy
    assert isinstance(shape, Shape)
    if row == UPDATE:
        return params["weights"], _gradient(shape, params, constants, dy)
    return params.pop("weights"), params, constants, dy


def _arrays(shape: OfOp, dtype: str) -> tuple[dict[str, Any], dict[str, Any], Any]:
    """Arrays that have a cotangent; those that have none; the cotangent of the output."""
    # This generator is fast also for the numbers of large tables.
    keys = iter(jax.random.split(jax.random.key(0, impl="rbg"), 6))
    if isinstance(shape, Gates):
        return _arrays_of_gates(shape, dtype, keys)
    if isinstance(shape, Sequence):
        leading: tuple[int, ...] = (shape.batch, shape.length)
        inputs = outputs = compared = shape.inputs
        if isinstance(shape, Pair):
            compared = 2 * shape.inputs + shape.position_bits
    else:
        assert isinstance(shape, FullyConnected)
        leading, inputs, outputs, compared = (shape.batch,), shape.inputs, shape.outputs, shape.inputs
    params = {
        "weights": jax.random.uniform(next(keys), shape.table, dtype, -1, 1),
        "x": jax.random.normal(next(keys), (*leading, inputs)),
    }
    if isinstance(shape, Sequence) and shape.position_bits:
        positions = (shape.distances, shape.detectors, shape.position_bits)
        params["positions"] = jax.random.normal(next(keys), positions)
    anchors = lutjax.sample_anchors(next(keys), compared, shape.detectors, shape.anchors)
    constants = {"anchors": anchors}
    if isinstance(shape, Sparse):
        constants["targets"] = jax.random.randint(next(keys), shape.table, 0, shape.outputs)
    return params, constants, jax.random.normal(next(keys), (*leading, outputs), dtype)


def _arrays_of_gates(
    shape: Gates, dtype: str, keys: Iterator[jax.Array]
) -> tuple[dict[str, Any], dict[str, Any], Any]:
    name, size = shape.parameter
    inputs = (shape.inputs, shape.batch)
    # The sign of an input is a bit of binary tables.
    x = jax.random.uniform(next(keys), inputs, dtype, -1 if shape.op == "binary_lut" else 0, 1)
    params = {"x": x, name: jax.random.normal(next(keys), size)}
    wires = jax.random.permutation(next(keys), shape.gates * shape.bits).astype(jnp.int32) % shape.inputs
    wires = wires.reshape(shape.gates, shape.bits)
    readers = lutjax.readers(wires, shape.inputs, fan_out=shape.fan_out)
    dy = jax.random.normal(next(keys), (shape.gates, shape.batch), dtype)
    return params, {"wires": wires, "readers": readers}, dy


def _output(shape: OfOp, params: dict[str, Any], constants: dict[str, Any]) -> jax.Array:
    """What is measured: detection and look-up, or gates."""
    if isinstance(shape, Gates):
        parameter = params[shape.parameter[0]]
        return getattr(lutjax, shape.op)(params["x"], parameter, **constants, feature_axis=0)
    x, weights, anchors = params["x"], params["weights"], constants["anchors"]
    if isinstance(shape, Sparse):
        return lutjax.sparse_lut(x, weights, anchors, constants["targets"], shape.outputs)
    if isinstance(shape, FullyConnected):
        return lutjax.lut(x, weights, anchors)
    assert isinstance(shape, Sequence)
    positions = params.get("positions")
    if isinstance(shape, Pair):
        return lutjax.lut_pair_attention(
            x, weights, anchors, positions, interleave=shape.interleave, window=shape.window
        )
    return lutjax.lut_attention(x, weights, anchors, positions, window=shape.window)


def _outputs_and_gradients(
    shape: Shape, params: dict[str, Any], constants: dict[str, Any], dy: Any
) -> tuple[jax.Array, dict[str, Any]]:
    """The outputs, and gradients with those of the tables in factors."""

    def loss(params: dict[str, Any]) -> tuple[jax.Array, jax.Array]:
        y = _output(shape, params, constants)
        return jnp.sum(
            y * jax.lax.stop_gradient(_cotangent(y, dy))
        ), y  # the sum is not used, so not computed

    (_, y), gradients = tables.value_and_grad(loss, has_aux=True)(params)
    return y, gradients


def _cotangent(y: jax.Array, dy: jax.Array) -> jax.Array:
    """`dy` that depends on the output, as in training.

    Else the compiler could share rows between forward and backward, and would copy a table that it writes, because
    nothing says that the output is read from it before.
    """
    return jnp.where(jnp.isnan(y), y, dy)


def _gradient(shape: Shape, params: dict[str, Any], constants: dict[str, Any], dy: Any) -> Any:
    """The gradient of the tables in factors."""
    return _outputs_and_gradients(shape, params, constants, dy)[1]["weights"]
