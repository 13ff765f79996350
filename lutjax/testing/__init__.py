"""Comparison of implementations with the reference, for lutjax's kernels and your own.

Register an implementation, then run every case of its op through it, forward and backward, under
JAX transformations:

    @pytest.mark.parametrize("case", lutjax.testing.cases("lookup"), ids=str)
    def test_parity(case):
        lutjax.testing.check(case, implementation="triton")

Values come from coarse grids: sums are exact in any order, and ties, zeros and repeated rows are
everywhere.
"""

import dataclasses
import functools
import importlib
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jax.typing import DTypeLike

import lutjax
from lutjax import _compat
from lutjax.cases import Axes as Axes, Case as Case, Draw, Size, find_module as cases_of
from lutjax.dispatch.contract import Direction
from lutjax.dispatch.registry import Implementation, kernel_registry
from lutjax.tables.collect import value_and_grad
from lutjax.testing import _ahead_of_time
from lutjax.values._dtypes import accumulator
from lutjax.values._fixed_point import FixedPoint
from lutjax.values._row_rules import DECAY, SGD, RowRule

Arrays = dict[str, Any]

TRANSFORMATIONS = (
    "none",
    "jit",
    "vmap of grad",
    "grad of vmap",
    "remat",
    "scan",
    "shard_map, replicated table",
    "shard_map, sharded table",
    "export",
)

_SHARDED_AXES = {"shard_map, replicated table": "batch", "shard_map, sharded table": "detector"}
FACTORED_TRANSFORMATIONS = tuple(t for t in TRANSFORMATIONS if t != "grad of vmap")

# Largest difference between two correct orders of the few operations that are not exact on the
# grids: the slope of the surrogate and the sums it enters. One rounding of the result for 16-bit
# results.
TOLERANCE = {"float64": 1e-13, "float32": 5e-6, "bfloat16": 2**-8, "float16": 2**-11}


def shapes(op: str, implementation: str | None = None) -> dict[str, Size]:
    """Return an op's named test sizes; with an implementation, only its supported sizes."""
    sizes = cases_of(op).sizes
    return (
        sizes
        if implementation is None
        else {n: s for n, s in sizes.items() if s.is_for(implementation)}
    )


def cases(op: str, dtype: DTypeLike | None = None) -> list[Case]:
    """Return an op's cases, one for each named size."""
    return [case(op, shape, dtype) for shape in shapes(op)]


def case(op: str, shape: str, dtype: DTypeLike | None = None, **sizes: int) -> Case:
    """Return one case: an op at one of its named sizes, with `sizes` as overrides.

    Args:
      op: name of an op that is registered with cases.
      shape: name of one of the op's shapes.
      dtype: one of the op's dtypes; by default the first, usually float32.
      **sizes: sizes that replace the shape's sizes.

    Raises:
      ValueError: an unknown op, shape or dtype.
    """
    return cases_of(op).case(shape, dtype, **sizes)


def check(
    case: Case,
    implementation: Implementation = None,
    *,
    transformation: str = "none",
    accumulate: FixedPoint | None = None,
    tolerance: float | None = None,
) -> None:
    """Compare an op's outputs and cotangents with the reference, each by its name.

    Args:
      case: from `cases` or `case`.
      implementation: as the ops take it.
      transformation: one of `TRANSFORMATIONS`.
      accumulate: as the ops take it. The reference's cotangents are always floating-point sums:
          choose a tolerance with one resolution per addend in the longest sum.
      tolerance: relative to the largest magnitude of each array; by default its dtype's
          `TOLERANCE`.

    Raises:
      AssertionError: names the first output or cotangent that differs.
    """
    _require_one_of("check", transformation, TRANSFORMATIONS)
    runs: dict[str, Callable[..., tuple[Arrays, Arrays]]] = {
        "none": _run_plain,
        "jit": _run_plain,
        "remat": lambda f, case, ct: _run_plain(jax.checkpoint(f), case, ct),
        "scan": _run_scanned,
        "vmap of grad": functools.partial(_run_mapped, grad_outside=False),
        "grad of vmap": functools.partial(_run_mapped, grad_outside=True),
        **{
            name: functools.partial(_run_sharded, axis=axis) for name, axis in _SHARDED_AXES.items()
        },
        "export": _run_exported,
    }
    run = runs[transformation]
    f = functools.partial(_call, case, lutjax, implementation, accumulate=accumulate)
    g = functools.partial(_call, case, _reference(case), None, accumulate=accumulate)
    cotangent = _cotangent(case, jax.eval_shape(g, case.differentiable))
    expected = _reference_results(transformation, run, g, case, cotangent)
    eager = transformation in ("none", "export")
    actual = run(f, case, cotangent) if eager else _run_jitted(run, f, case, cotangent)
    _assert_both_close(f"{case}, {transformation}", actual, expected, tolerance)


def check_factored(
    case: Case,
    implementation: Implementation = None,
    *,
    transformation: str = "none",
    tolerance: float | None = None,
) -> None:
    """Compare cotangents with the reference, with the table's as a `lutjax.optim.TableGradient`.

    Args:
      case: as for `check`; for an op with lookups.
      implementation: as for `check`; for an op with lookups.
      transformation: gradient transformation: one of `FACTORED_TRANSFORMATIONS`.
      tolerance: as for `check`; for an op with lookups.

    Raises:
      AssertionError: names the first output or cotangent that differs. ValueError: another
          transformation.
    """
    _require_one_of("check_factored", transformation, FACTORED_TRANSFORMATIONS)
    factored = functools.partial(_value_and_factored, table=_table(case))
    runs: dict[str, Callable[..., tuple[Arrays, Arrays]]] = {
        "none": _run_plain,
        "jit": _run_plain,
        "remat": lambda f, case, ct, gradients: jax.checkpoint(functools.partial(gradients, f))(
            case.differentiable, ct
        ),
        "scan": _scanned_gradients,
        "vmap of grad": functools.partial(_run_mapped, grad_outside=False),
        **{
            name: functools.partial(_sharded_gradients, axis=axis)
            for name, axis in _SHARDED_AXES.items()
        },
        "export": _run_exported,
    }
    run = runs[transformation]
    f = functools.partial(_call, case, lutjax, implementation)
    g = functools.partial(_call, case, _reference(case), None, accumulate=None)
    cotangent = _cotangent(case, jax.eval_shape(g, case.differentiable))
    how = "scan of gradients" if transformation == "scan" else transformation
    expected = _reference_results(how, run, g, case, cotangent, _value_and_cotangents)
    if transformation in ("none", "export"):
        actual = run(f, case, cotangent, factored)
    else:
        actual = _run_jitted(run, f, case, cotangent, factored)
    _assert_both_close(f"{case}, factored, {transformation}", actual, expected, tolerance)


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """Function of arrays and its expected results, to run, lower or compile for another device.

    Attributes:
      what: description for messages.
      function, expected: the op, and the reference. They return tuples of arrays by name: outputs,
      and cotangents; a table and its state.
      arguments: arguments of both.
      forward: the program without cotangents, if it has any.
    """

    what: str
    function: Callable[..., tuple[Arrays, ...]]
    expected: Callable[..., tuple[Arrays, ...]]
    arguments: tuple[Any, ...]
    forward: "Program | None" = None

    def shapes(self) -> tuple[Any, ...]:
        """Shapes and dtypes of its arguments."""
        return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), self.arguments)


def program(
    case: Case, implementation: Implementation = None, *, accumulate: FixedPoint | None = None
) -> Program:
    """Return the program for an op's outputs and cotangents on a case's arguments.

    An op without a gradient has outputs only.
    """
    f = functools.partial(_call, case, lutjax, implementation, accumulate=accumulate)
    g = functools.partial(_call, case, _reference(case), None, accumulate=accumulate)
    ct = _cotangent(case, jax.eval_shape(g, case.differentiable))
    forward = Program(str(case), lambda d: (f(d),), lambda d: (g(d),), (case.differentiable,))
    if not ct:
        return forward
    return Program(
        str(case),
        functools.partial(_value_and_cotangents, f),
        functools.partial(_value_and_cotangents, g),
        (case.differentiable, ct),
        forward,
    )


def programs(
    case: Case, implementation: Implementation = None
) -> dict[tuple[Direction, ...], Program]:
    """Return all programs for a case, by the op directions that each covers."""
    of_op = program(case, implementation)
    found: dict[tuple[Direction, ...], Program] = {
        ("forward",) if of_op.forward is None else ("forward", "backward"): of_op
    }
    if case.table is not None:
        found["update",] = update_program(case, implementation)
    return found


def update_program(
    case: Case, implementation: Implementation = None, rule: RowRule | None = None, **options: Any
) -> Program:
    """Return the program for a table and its state after a step.

    `rule` and `options`, such as `rates`, are as in `lutjax.update_table`.
    """
    rule, table = SGD() if rule is None else rule, _table(case)
    f = functools.partial(_call, case, lutjax, None)
    g = functools.partial(_call, case, _reference(case), None)
    ct = _cotangent(case, jax.eval_shape(g, case.differentiable))
    weights = case.differentiable[table]
    state = jax.tree.map(lambda a: a + jnp.asarray(0.5, a.dtype), rule.init(weights))

    def compute_actual(weights: Any, state: Any) -> tuple[Arrays, ...]:
        differentiable = {**case.differentiable, table: weights}
        _, gradients = _run_factored(f, differentiable, ct, table)
        new, new_state = lutjax.update_table(
            weights, gradients[table], 0.25, rule, state, implementation=implementation, **options
        )
        return ({table: new, **new_state},)

    def compute_expected(weights: Any, state: Any) -> tuple[Arrays, ...]:
        dtype = accumulator(weights.dtype)
        differentiable = {**case.differentiable, table: weights.astype(dtype)}
        of_outputs = jax.tree.map(lambda a: a.astype(dtype), ct)
        _, gradients = _value_and_cotangents(g, differentiable, of_outputs)
        touched = _mask_touched(case, differentiable)
        old = weights.astype(dtype)
        rates = jnp.asarray(options.get("rates", 1.0), dtype)
        rates = rates[:, None, None] if rates.ndim == 1 else rates

        def rows(a: jax.Array) -> jax.Array:
            return a[:, None] if a.ndim == 1 else a  # an edge is a row of one number

        of_rows = (rows(old), rows(gradients[table]), jax.tree.map(rows, state))
        moved, new = rule.step(*of_rows, jnp.asarray(0.25, dtype) * rates)
        rows_of = {name: a for name, a in state.items() if name != DECAY}
        moved, new = jax.tree.map(
            lambda n, o: jnp.where(touched, n.reshape(o.shape), o),
            (moved, {name: new[name] for name in rows_of}),
            (old, rows_of),
        )
        new = rule.next_state(state, new, jnp.asarray(0.25, dtype) * rates)
        return ({table: moved.astype(weights.dtype), **new},)

    return Program(f"{case}, {rule}", compute_actual, compute_expected, (weights, state))


def check_update(
    case: Case, implementation: Implementation = None, rule: RowRule | None = None, **options: Any
) -> None:
    """Compare a table update with the rule applied to the reference's gradient, row by row.

    Args:
      case: as for `check`; for an op with lookups.
      implementation: implementation of the update.
      rule: as `lutjax.update_table` takes it.
      **options: other options for `lutjax.update_table`.

    Raises:
      AssertionError: the table or its row state differs by more than rounding.
    """
    update = update_program(case, implementation, rule, **options)
    (actual,), (expected,) = (
        jax.jit(f)(*update.arguments) for f in (update.function, update.expected)
    )
    assert set(actual) == set(expected), f"{update.what}: {set(actual)}, expected {set(expected)}"
    assert_all_close(update.what, actual, expected)


def _table(case: Case) -> str:
    if case.table is None:
        raise ValueError(
            f"lutjax.testing: {case.op} has no table, so it has no factored gradient and no update."
        )
    return case.table


def _mask_touched(case: Case, differentiable: Arrays) -> jax.Array:
    """Return True for each accessed row ``[T, R, 1]``, or each accessed edge ``[E]``.

    Outputs are sums of accessed rows, so the gradient of their total is the number of accesses.
    """
    name, reference = _table(case), _reference(case)
    shape = differentiable[name].shape
    # Rows with one output: the outputs of a row are accessed together.
    table = jnp.ones((*shape[:2], 1) if len(shape) > 1 else shape, jnp.float32)

    def total(table: jax.Array) -> jax.Array:
        arrays = {**differentiable, **case.fixed, name: table}
        if case.addresses is not None:
            y = case.addresses(reference, arrays)
        else:
            (y,) = case.call(getattr(reference, case.op), arrays).values()
        return jnp.sum(jnp.asarray(y))

    n_accesses: jax.Array = jax.grad(total)(table)
    return n_accesses != 0


def _assert_both_close(
    what: str,
    actual: tuple[Arrays, Arrays],
    expected: tuple[Arrays, Arrays],
    tolerance: float | None,
) -> None:
    for kind, a, e in zip(("output", "cotangent"), actual, expected, strict=True):
        assert_all_close(f"{what}: {kind}", a, e, tolerance)


def assert_all_close(
    what: str, actual: Arrays, expected: Arrays, tolerance: float | None = None
) -> None:
    """Apply `assert_close` to each array, by name.

    A scalar's cotangent sums addends that may cancel, and has no other element that shows their
    magnitude: the largest element of all arrays does.
    """
    largest = max((_largest_magnitude(a) for a in expected.values()), default=0.0)
    for name, array in expected.items():
        scale = None if np.ndim(array) else largest
        assert_close(f"{what}: {name}", actual[name], array, tolerance, scale=scale)


def _largest_magnitude(a: Any) -> float:
    """Return the largest finite magnitude in a floating-point array; else 0."""
    a = np.asarray(a)
    if not jnp.issubdtype(a.dtype, np.floating):
        return 0.0
    magnitudes = np.abs(a.astype(np.float64))
    return float(magnitudes[np.isfinite(magnitudes)].max(initial=0.0))


def check_lowering(
    case: Case,
    implementation: Implementation = None,
    *,
    platform: str,
    device_kind: str,
    transformation: str = "jit",
    accumulate: FixedPoint | None = None,
) -> None:
    """Lower an op's outputs and cotangents for one or two devices, which need not be present.

    Args:
      case: from `cases` or `case`.
      implementation: as the ops take it.
      platform: ``"cpu"``, ``"cuda"``, ``"rocm"`` or ``"tpu"``, as `jax.export` names them.
      device_kind: the device's own name, e.g. ``"NVIDIA H200"`` or ``"TPU v6e"``.
      transformation: ``"jit"``, ``"shard_map, replicated table"`` or ``"shard_map, sharded
          table"``.
      accumulate: as the ops take it.

    Raises:
      AssertionError: the lowered program's shapes differ from the reference.
      ValueError: another transformation.
    """
    _require_one_of("check_lowering", transformation, ("jit", *_SHARDED_AXES))
    of_op = program(case, implementation, accumulate=accumulate)
    if transformation == "jit":
        exported = _ahead_of_time.lower(
            of_op.function, *of_op.shapes(), platform=platform, device_kind=device_kind
        )
    else:
        f = functools.partial(_call, case, lutjax, implementation, accumulate=accumulate)
        mesh = _ahead_of_time.mesh(platform, device_kind, 2, "shards")

        def run_sharded(differentiable: Arrays, ct: Arrays | None = None) -> tuple[Arrays, Arrays]:
            shard = dataclasses.replace(case, differentiable=differentiable)
            return _run_sharded(f, shard, ct or {}, axis=_SHARDED_AXES[transformation], mesh=mesh)

        exported = _ahead_of_time.lower_on_mesh(run_sharded, *of_op.shapes(), platform=platform)
    of_reference = jax.eval_shape(of_op.expected, *of_op.shapes())
    wanted = [(a.shape, a.dtype) for a in jax.tree.leaves(of_reference)]
    lowered = [(a.shape, a.dtype) for a in exported.out_avals]
    assert lowered == wanted, f"{case} for {platform}: lowered {lowered}, expected {wanted}"


def check_compilation(
    case: Case, implementation: Implementation = None, *, tpu: str
) -> jax.stages.Compiled:
    """Compile an op's outputs and cotangents for an absent TPU; needs libtpu.

    Args:
      case: as for `check_lowering`.
      implementation: as for `check_lowering`.
      tpu: ``"v4"``, ``"v5e"``, ``"v5p"``, ``"v6e"`` or ``"v7x"``.

    Returns:
      The program. A failed compilation raises `jax.errors.JaxRuntimeError`.
    """
    of_op = program(case, implementation)
    return _ahead_of_time.compile_for_tpu(of_op.function, *of_op.shapes(), tpu=tpu)


def assert_close(
    what: str,
    actual: Any,
    expected: Any,
    tolerance: float | None = None,
    *,
    scale: float | None = None,
) -> None:
    """Raise if two arrays differ by more than rounding; NaN equals NaN.

    Args:
      what: the arrays' name, for the error.
      actual: the array to check.
      expected: an array of its shape and dtype.
      tolerance: relative to `scale`; by default `TOLERANCE`.
      scale: magnitude that the tolerance refers to; by default the largest in `expected`.
    """
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.shape == expected.shape, (
        f"{what}: shape {actual.shape}, expected {expected.shape}"
    )
    assert actual.dtype == expected.dtype, (
        f"{what}: dtype {actual.dtype}, expected {expected.dtype}"
    )
    if not jnp.issubdtype(expected.dtype, np.floating):
        np.testing.assert_array_equal(actual, expected, err_msg=what)
        return
    if tolerance is None:
        tolerance = TOLERANCE[expected.dtype.name]
    if scale is None:
        scale = _largest_magnitude(expected)
    if expected.dtype.itemsize == 2:
        # Sums in two orders may lie on both sides of a midpoint, and then round to neighbors.
        up, down = np.asarray(np.inf, expected.dtype), np.asarray(-np.inf, expected.dtype)
        above, below = np.nextafter(expected, up), np.nextafter(expected, down)
        is_neighbor = np.isfinite(actual) & ((actual == above) | (actual == below))
        actual = np.where(is_neighbor & np.isfinite(expected), expected, actual)
    actual, expected = actual.astype(np.float64), expected.astype(np.float64)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance * scale, err_msg=what)


# ---------------------------------------------------------------------------------- transformations
def _require_one_of(where: str, transformation: str, names: tuple[str, ...]) -> None:
    if transformation not in names:
        raise ValueError(
            f"lutjax.testing.{where}: unknown transformation {transformation!r}; they are "
            f"{', '.join(names)}."
        )


def _reference(case: Case) -> Any:
    """Return the module with the op's definition."""
    return importlib.import_module(case.reference)


def _call(
    case: Case,
    module: Any,
    implementation: Implementation,
    differentiable: Arrays,
    fixed: Arrays | None = None,
    *,
    accumulate: FixedPoint | None = None,
) -> Arrays:
    op = kernel_registry.function(case.op) if module is lutjax else getattr(module, case.op)
    if accumulate is not None:
        op = functools.partial(op, accumulate=accumulate)
    if module is lutjax:
        op = functools.partial(op, implementation=implementation)
    return case.call(op, {**differentiable, **(case.fixed if fixed is None else fixed)})


def _with_gradient(outputs: Arrays) -> Arrays:
    return {name: a for name, a in outputs.items() if jnp.issubdtype(a.dtype, jnp.floating)}


def _cotangent(case: Case, outputs: Arrays) -> Arrays:
    draw = Draw(case.op, case.shape, jnp.dtype(jnp.float32), seed=1)
    return {name: draw.grid(a.shape, 4, a.dtype) for name, a in _with_gradient(outputs).items()}


def _value_and_cotangents(
    f: Callable[..., Arrays], differentiable: Arrays, ct: Arrays
) -> tuple[Arrays, Arrays]:
    if not ct:  # an op without a gradient
        return f(differentiable), {}

    def split(d: Arrays) -> tuple[Arrays, Arrays]:
        outputs = f(d)
        return _with_gradient(outputs), outputs

    _, pullback, outputs = jax.vjp(split, differentiable, has_aux=True)
    return outputs, pullback(ct)[0]


def _run_factored(
    f: Callable[..., Arrays], differentiable: Arrays, ct: Arrays, table: str = "weights"
) -> tuple[Arrays, Arrays]:
    """Return outputs and cotangents, with a sparse cotangent for the table."""

    def loss(d: Arrays) -> tuple[jax.Array, Arrays]:
        outputs = f(d)
        # Not multiplied: an output times a cotangent would be rounded, and a sum over the dtype
        # overflow.
        return sum(
            (_inner_product(a, ct[name]) for name, a in _with_gradient(outputs).items()),
            jnp.float32(0),
        ), outputs

    gradient = value_and_grad(loss, tables=lambda name, a: name == table, has_aux=True)
    (_, outputs), cotangents = gradient(differentiable)
    return outputs, cotangents


def _value_and_factored(
    f: Callable[..., Arrays], differentiable: Arrays, ct: Arrays, *, table: str
) -> tuple[Arrays, Arrays]:
    outputs, cotangents = _run_factored(f, differentiable, ct, table)
    return outputs, {**cotangents, table: cotangents[table].to_dense()}


@jax.custom_vjp
def _inner_product(a: jax.Array, ct: jax.Array) -> jax.Array:
    """Return a scalar whose gradient in `a` is exactly `ct`."""
    return jnp.sum(a.astype(jnp.float32))


def _inner_forward(a: jax.Array, ct: jax.Array) -> tuple[jax.Array, jax.Array]:
    return _inner_product(a, ct), _compat.cast_varying(ct, _compat.varying_axes(a))


def _inner_backward(ct: jax.Array, one: jax.Array) -> tuple[jax.Array, None]:
    return ct, None


_inner_product.defvjp(_inner_forward, _inner_backward)

Gradients = Callable[[Callable[..., Arrays], Arrays, Arrays], tuple[Arrays, Arrays]]


def _run_jitted(
    run: Callable[..., Any], f: Callable[..., Arrays], case: Case, ct: Arrays, *how: Gradients
) -> Any:
    return jax.jit(lambda d, ct: run(f, dataclasses.replace(case, differentiable=d), ct, *how))(
        case.differentiable, ct
    )


_OWN_RESULTS = (
    "vmap of grad",
    "grad of vmap",
    "scan",
    "scan of gradients",
)  # those of others are the plain ones
_expectations: weakref.WeakKeyDictionary[Case, dict[Any, Any]] = weakref.WeakKeyDictionary()


def _reference_results(
    transformation: str, run: Callable[..., Any], g: Any, case: Case, ct: Arrays, *how: Gradients
) -> tuple[Arrays, Arrays]:
    """Return the reference's results, computed once per case."""
    if transformation not in _OWN_RESULTS:
        transformation, run, how = "plain", _run_plain, ()
    known = _expectations.setdefault(case, {})
    key = (transformation, getattr(_reference(case), case.op), g.keywords["accumulate"])
    if key not in known:
        known[key] = _run_jitted(run, g, case, ct, *how)
    results: tuple[Arrays, Arrays] = known[key]
    return results


def _run_plain(
    f: Callable[..., Arrays], case: Case, ct: Arrays, gradients: Gradients = _value_and_cotangents
) -> tuple[Arrays, Arrays]:
    return gradients(f, case.differentiable, ct)


def _times(arrays: Arrays, sign: jax.Array) -> Arrays:
    return jax.tree.map(lambda a: a * sign.astype(a.dtype), arrays)


def _scanned_gradients(
    f: Callable[..., Arrays], case: Case, ct: Arrays, gradients: Gradients
) -> tuple[Arrays, Arrays]:
    """Compute outputs and cotangents twice in a loop, the second time with other values."""

    def body(_: None, sign: jax.Array) -> tuple[None, Any]:
        return None, gradients(f, _times(case.differentiable, sign), ct)

    return jax.lax.scan(body, None, jnp.array([1, -1], jnp.int32))[1]


def _sharded_gradients(
    f: Callable[..., Arrays], case: Case, ct: Arrays, gradients: Gradients, *, axis: str
) -> tuple[Arrays, Arrays]:
    """Run a case as `_run_sharded` does, with the gradient taken by each device."""
    mesh = _mesh()
    specs, spec = _sharding(case, axis)
    fixed = {name: a for name, a in case.fixed.items() if isinstance(a, jax.Array)}
    of_outputs = {name: spec(axes) for name, axes in case.output_axes.items()}

    def shard(d: Arrays, fixed: Arrays, ct: Arrays) -> tuple[Arrays, Arrays]:
        outputs, cotangents = gradients(lambda d: f(d, fixed), d, ct)
        if axis == "detector":
            outputs = {name: jax.lax.psum(a, "shards") for name, a in outputs.items()}
        return outputs, cotangents

    of_arguments = {name: specs[name] for name in case.differentiable}
    return jax.shard_map(
        shard,
        mesh=mesh,
        in_specs=(of_arguments, {name: specs[name] for name in fixed}, of_outputs),
        out_specs=(of_outputs, of_arguments),
    )(case.differentiable, fixed, ct)


def _variants(case: Case, a: Any, axes: Axes) -> Any:
    """Return three different arrays like `a`, along a new first axis."""
    return jnp.stack([a, -a, jnp.roll(a, 1, axes.batch or 0) if a.ndim else 2 * a])


def _run_mapped(
    f: Callable[..., Arrays],
    case: Case,
    ct: Arrays,
    gradients: Gradients = _value_and_cotangents,
    *,
    grad_outside: bool,
) -> tuple[Arrays, Arrays]:
    """Map over batched arguments, then also over shared arguments (a table for each element)."""
    results: list[tuple[Arrays, Arrays]] = []
    cts = {name: _variants(case, a, case.output_axes[name]) for name, a in ct.items()}
    for everything in (False, True):
        mapped = {
            name: everything or case.axes[name].batch is not None for name in case.differentiable
        }
        arguments = {
            name: _variants(case, a, case.axes[name]) if mapped[name] else a
            for name, a in case.differentiable.items()
        }
        in_axes = ({name: 0 if m else None for name, m in mapped.items()},)
        if not any(mapped.values()):
            continue
        if grad_outside:
            result = _value_and_cotangents(jax.vmap(f, in_axes=in_axes), arguments, cts)
        else:
            one = functools.partial(gradients, f)
            result = jax.vmap(one, in_axes=(*in_axes, 0))(arguments, cts)
        results.append(result)
    return tuple(  # type: ignore[return-value]
        {f"{name}, mapping {n}": a for n, r in enumerate(results) for name, a in r[part].items()}
        for part in (0, 1)
    )


def _run_scanned(f: Callable[..., Arrays], case: Case, ct: Arrays) -> tuple[Arrays, Arrays]:
    """Run the function twice in a loop, the second time with other values."""

    def run_twice(d: Arrays) -> Arrays:
        def body(total: Arrays, sign: jax.Array) -> tuple[Arrays, Arrays]:
            outputs = f(_times(d, sign))
            return jax.tree.map(jnp.add, total, _times(outputs, sign)), outputs

        zero = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(f, d))
        return jax.lax.scan(body, zero, jnp.array([1, -1], jnp.int32))[0]

    return _value_and_cotangents(run_twice, case.differentiable, ct)


def _run_exported(
    f: Callable[..., Arrays], case: Case, ct: Arrays, gradients: Gradients = _value_and_cotangents
) -> tuple[Arrays, Arrays]:
    function = jax.jit(functools.partial(gradients, f))
    exported = jax.export.export(function, disabled_checks=_ahead_of_time.KERNELS)(
        case.differentiable, ct
    )
    return jax.export.deserialize(exported.serialize()).call(case.differentiable, ct)


def _mesh(n_devices: int = 2) -> Mesh:
    if jax.device_count() < n_devices:
        raise ValueError(
            f"lutjax.testing: shard_map needs {n_devices} devices; there are {jax.device_count()}."
        )
    return Mesh(np.array(jax.devices()[:n_devices]), ("shards",))


def _sharding(
    case: Case, axis: str
) -> tuple[dict[str, PartitionSpec], Callable[..., PartitionSpec]]:
    """Return each argument's partition over a mesh, and the rule."""

    def spec(axes: Axes) -> PartitionSpec:
        at = getattr(axes, axis)
        return PartitionSpec() if at is None else PartitionSpec(*[None] * at, "shards")

    return {name: spec(axes) for name, axes in case.axes.items()}, spec


def _has_detectors(case: Case) -> bool:
    """Return True if a case divides arrays with its detectors; network layers are not divided."""
    return any(axes.detector is not None for axes in case.axes.values())


def _run_sharded(
    f: Callable[..., Arrays],
    case: Case,
    ct: Arrays,
    *,
    axis: str,
    mesh: Mesh | AbstractMesh | None = None,
) -> tuple[Arrays, Arrays]:
    """Split over devices along the batch (tables replicated) or the detectors (tables sharded)."""
    mesh = _mesh() if mesh is None else mesh
    specs, spec = _sharding(case, axis)

    def shard(differentiable: Arrays, fixed: Arrays) -> Arrays:
        outputs = f(differentiable, fixed)
        if axis == "detector" and _has_detectors(
            case
        ):  # each shard has a part of the sum over them
            outputs = {
                name: a
                if case.output_axes[name].detector is not None
                else jax.lax.psum(a, "shards")
                for name, a in outputs.items()
            }
        return outputs

    fixed = {name: a for name, a in case.fixed.items() if isinstance(a, jax.Array)}
    mapped = jax.shard_map(
        shard,
        mesh=mesh,
        in_specs=(
            {name: specs[name] for name in case.differentiable},
            {name: specs[name] for name in fixed},
        ),
        out_specs={name: spec(axes) for name, axes in case.output_axes.items()},
        check_vma=True,
    )
    return _value_and_cotangents(lambda d: mapped(d, fixed), case.differentiable, ct)
