"""Does an implementation compute what the reference computes? For the kernels of lutjax and for yours.

Register an implementation, then run every case of its op through it, forward and backward, under the
transformations of JAX:

    @pytest.mark.parametrize("case", lutjax.testing.cases("lookup"), ids=str)
    def test_parity(case):
        lutjax.testing.check(case, implementation="triton")

Values are drawn from coarse grids: sums are exact in any order, and ties, zeros and repeated rows are everywhere.
"""

import dataclasses
import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jax.typing import DTypeLike

import lutjax
from lutjax import _ahead_of_time, _compat, reference
from lutjax._detection import Detection
from lutjax._dtypes import FLOATS, accumulator
from lutjax._fixed_point import FixedPoint
from lutjax._row_rules import SGD, RowRule
from lutjax.factored.collect import value_and_grad
from lutjax.kernels.registry import Implementation

Arrays = dict[str, Any]

OPS = (
    "detect",
    "detect_signs",
    "lookup",
    "sparse_lookup",
    "lookup_attention",
    "lut_pair_attention",
    "bilinear_gates",
    "soft_lut",
    "binary_lut",
)

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

LOOK_UPS = ("lookup", "sparse_lookup", "lookup_attention", "lut_pair_attention")
"""The ops that read tables."""

# What differs between two correct orders of the few operations that are not exact on the grids: the slope
# of the surrogate and the sums it enters. One rounding of the result for 16-bit results.
TOLERANCE = {"float64": 1e-13, "float32": 5e-6, "bfloat16": 2**-8, "float16": 2**-11}


@dataclasses.dataclass(frozen=True)
class Axes:
    """Which axis of an array is the batch, and which the detectors; None if it has none."""

    batch: int | None = None
    detector: int | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """Arguments of one op at one size.

    Attributes:
      op, shape: names; the sizes are in ``lutjax/ops/<op>.py``.
      differentiable, fixed: arguments with and without a gradient, by name.
      axes: of every argument. output_axes: of every output with a gradient.
      call: the op on these arguments, from a module that has it; returns its outputs by name.
    """

    op: str
    shape: str
    dtype: str
    differentiable: Arrays
    fixed: Arrays
    axes: Mapping[str, Axes]
    output_axes: Mapping[str, Axes]
    call: Callable[..., Arrays]

    def __str__(self) -> str:
        return f"{self.op}-{self.shape}-{self.dtype}"


def shapes(op: str) -> dict[str, dict[str, int]]:
    """The named sizes at which an op is tested, measured and tuned."""
    return importlib.import_module(f"lutjax.ops.{op}").SHAPES


def cases(op: str, dtype: DTypeLike = jnp.float32) -> list[Case]:
    """The cases of an op: one for each of its named sizes."""
    return [case(op, shape, dtype) for shape in shapes(op)]


def case(op: str, shape: str, dtype: DTypeLike = jnp.float32, **sizes: int) -> Case:
    """One case: an op at one of its named sizes, of which `sizes` may change some.

    Raises:
      ValueError: an unknown op, shape or dtype.
    """
    if op not in OPS:
        raise ValueError(f"lutjax.testing: unknown op {op!r}; the ops are {', '.join(OPS)}.")
    if shape not in shapes(op):
        raise ValueError(
            f"lutjax.testing: {op} has no shape {shape!r}; its shapes are {', '.join(shapes(op))}."
        )
    name = jnp.dtype(dtype).name
    if name not in FLOATS:
        raise ValueError(f"lutjax.testing: dtype is {name}; the dtypes are {', '.join(FLOATS)}.")
    return _BUILDERS[op](_Draw(op, shape, jnp.dtype(dtype)), {**shapes(op)[shape], **sizes})


def check(
    case: Case,
    implementation: Implementation = None,
    *,
    transformation: str = "none",
    accumulate: FixedPoint | None = None,
    tolerance: float | None = None,
) -> None:
    """Compares outputs and cotangents of an op with the reference, each by its name.

    Args:
      case: from `cases` or `case`.
      implementation: as the ops take it.
      transformation: one of `TRANSFORMATIONS`.
      accumulate: as the ops take it. The reference's cotangents are sums of floats in any case: choose a
        tolerance of as many resolutions as the longest sum has addends.
      tolerance: relative to the largest magnitude of each array; by default `TOLERANCE` of its dtype.

    Raises:
      AssertionError: names the first output or cotangent that differs.
    """
    _require_one_of("check", transformation, TRANSFORMATIONS)
    runs: dict[str, Callable[..., tuple[Arrays, Arrays]]] = {
        "none": _plain,
        "jit": _plain,
        "remat": lambda f, case, ct: _plain(jax.checkpoint(f), case, ct),
        "scan": _scanned,
        "vmap of grad": functools.partial(_mapped, grad_outside=False),
        "grad of vmap": functools.partial(_mapped, grad_outside=True),
        **{name: functools.partial(_sharded, axis=axis) for name, axis in _SHARDED_AXES.items()},
        "export": _exported,
    }
    run = runs[transformation]
    f = functools.partial(_call, case, lutjax, implementation, accumulate=accumulate)
    g = functools.partial(_call, case, reference, None, accumulate=accumulate)
    cotangent = _cotangent(case, jax.eval_shape(g, case.differentiable))
    whole = "shard_map" in transformation or transformation == "export"
    expected = _jitted(_plain if whole else run, g, case, cotangent)
    eager = transformation in ("none", "export")
    actual = run(f, case, cotangent) if eager else _jitted(run, f, case, cotangent)
    _assert_both_close(f"{case}, {transformation}", actual, expected, tolerance)


def check_factored(
    case: Case,
    implementation: Implementation = None,
    *,
    transformation: str = "none",
    tolerance: float | None = None,
) -> None:
    """Compares cotangents with the reference where that of the table is a `lutjax.training.tables.TableGradient`.

    Args:
      case, implementation, tolerance: as for `check`; of an op that looks up.
      transformation: of the gradient: one of `FACTORED_TRANSFORMATIONS`.

    Raises:
      AssertionError: names the first output or cotangent that differs. ValueError: another transformation.
    """
    _require_one_of("check_factored", transformation, FACTORED_TRANSFORMATIONS)
    runs: dict[str, Callable[..., tuple[Arrays, Arrays]]] = {
        "none": _plain,
        "jit": _plain,
        "remat": lambda f, case, ct, gradients: jax.checkpoint(functools.partial(gradients, f))(
            case.differentiable, ct
        ),
        "scan": _scanned_gradients,
        "vmap of grad": functools.partial(_mapped, grad_outside=False),
        **{name: functools.partial(_sharded_gradients, axis=axis) for name, axis in _SHARDED_AXES.items()},
        "export": _exported,
    }
    run = runs[transformation]
    f = functools.partial(_call, case, lutjax, implementation)
    g = functools.partial(_call, case, reference, None)
    cotangent = _cotangent(case, jax.eval_shape(g, case.differentiable))
    reference_run = _plain if "shard_map" in transformation or transformation == "export" else run
    expected = _jitted(reference_run, g, case, cotangent, _value_and_cotangents)
    if transformation in ("none", "export"):
        actual = run(f, case, cotangent, _value_and_factored)
    else:
        actual = _jitted(run, f, case, cotangent, _value_and_factored)
    _assert_both_close(f"{case}, factored, {transformation}", actual, expected, tolerance)


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """A function of arrays, and what it has to return: to be run, or lowered or compiled for another device.

    Attributes:
      what: for messages.
      function, expected: of the op, and of the reference. They return tuples of arrays by name: outputs, and cotangents;
        a table and its state.
      arguments: of both.
      forward: the same without cotangents, where there are any.
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
    """An op's outputs and cotangents on the arguments of a case."""
    f = functools.partial(_call, case, lutjax, implementation, accumulate=accumulate)
    g = functools.partial(_call, case, reference, None, accumulate=accumulate)
    ct = _cotangent(case, jax.eval_shape(g, case.differentiable))
    return Program(
        str(case),
        functools.partial(_value_and_cotangents, f),
        functools.partial(_value_and_cotangents, g),
        (case.differentiable, ct),
        Program(str(case), lambda d: (f(d),), lambda d: (g(d),), (case.differentiable,)),
    )


def update_program(
    case: Case, implementation: Implementation = None, rule: RowRule | None = None, **options: Any
) -> Program:
    """The table of a case and its state after a step, as `lutjax.update_table` takes `rule` and `options`."""
    rule = SGD() if rule is None else rule
    f = functools.partial(_call, case, lutjax, None)
    g = functools.partial(_call, case, reference, None)
    ct = _cotangent(case, jax.eval_shape(g, case.differentiable))
    weights = case.differentiable["weights"]
    state = jax.tree.map(lambda a: a + jnp.asarray(0.5, a.dtype), rule.init(weights))

    def actual(weights: Any, state: Any) -> tuple[Arrays, ...]:
        differentiable = {**case.differentiable, "weights": weights}
        _, gradients = _factored(f, differentiable, ct)
        new, new_state = lutjax.update_table(
            weights, gradients["weights"], 0.25, rule, state, implementation=implementation, **options
        )
        return ({"weights": new, **new_state},)

    def expected(weights: Any, state: Any) -> tuple[Arrays, ...]:
        dtype = accumulator(weights.dtype)
        differentiable = {**case.differentiable, "weights": weights.astype(dtype)}
        of_outputs = jax.tree.map(lambda a: a.astype(dtype), ct)
        _, gradients = _value_and_cotangents(g, differentiable, of_outputs)
        touched = _touched(case, differentiable)
        old = weights.astype(dtype)
        moved, new = rule.step(old, gradients["weights"], state, jnp.asarray(0.25, dtype))
        new = jax.tree.map(lambda n, o: jnp.where(touched, n, o), (moved, new), (old, state))
        return ({"weights": new[0].astype(weights.dtype), **new[1]},)

    return Program(f"{case}, {rule}", actual, expected, (weights, state))


def check_update(
    case: Case, implementation: Implementation = None, rule: RowRule | None = None, **options: Any
) -> None:
    """Compares the update of a table with the rule applied to the reference's gradient, row by row.

    Args:
      case: as for `check`; of an op that looks up.
      implementation: of the update.
      rule: as `lutjax.update_table` takes it. options: its other options.

    Raises:
      AssertionError: the table or a state of its rows differs by more than rounding.
    """
    update = update_program(case, implementation, rule, **options)
    (actual,), (expected,) = (jax.jit(f)(*update.arguments) for f in (update.function, update.expected))
    assert set(actual) == set(expected), f"{update.what}: {set(actual)}, expected {set(expected)}"
    assert_all_close(update.what, actual, expected)


def _touched(case: Case, differentiable: Arrays) -> jax.Array:
    """Which rows are looked up, ``[T, R, 1]``: those that a cotangent of ones reaches."""
    n_detectors, n_rows, _ = differentiable["weights"].shape
    ones = jnp.ones((n_detectors, n_rows, 1), jnp.float32)
    everything = {**differentiable, **case.fixed}

    def f(weights: jax.Array) -> jax.Array:
        if case.op == "sparse_lookup":  # its unused slots pass no cotangent on
            d = _detection("detection", n_rows.bit_length() - 1, everything)
            return jnp.asarray(reference.lookup(weights, d))
        return case.call(getattr(reference, case.op), {**everything, "weights": weights})["y"]

    y, pullback = jax.vjp(f, ones)
    touched: jax.Array = pullback(jnp.ones_like(y))[0]
    return jnp.not_equal(touched, 0)


def _assert_both_close(
    what: str, actual: tuple[Arrays, Arrays], expected: tuple[Arrays, Arrays], tolerance: float | None
) -> None:
    for kind, a, e in zip(("output", "cotangent"), actual, expected, strict=True):
        assert_all_close(f"{what}: {kind}", a, e, tolerance)


def assert_all_close(what: str, actual: Arrays, expected: Arrays, tolerance: float | None = None) -> None:
    """`assert_close` of each array, by its name."""
    for name in expected:
        assert_close(f"{what}: {name}", actual[name], expected[name], tolerance)


def check_lowering(
    case: Case,
    implementation: Implementation = None,
    *,
    platform: str,
    device_kind: str,
    transformation: str = "jit",
    accumulate: FixedPoint | None = None,
) -> None:
    """Lowers an op's outputs and cotangents for a device, or two, that need not be here.

    Args:
      case: from `cases` or `case`.
      implementation: as the ops take it.
      platform: ``"cpu"``, ``"cuda"``, ``"rocm"`` or ``"tpu"``, as `jax.export` names them.
      device_kind: as the device names itself, e.g. ``"NVIDIA H200"`` or ``"TPU v6e"``.
      transformation: ``"jit"``, ``"shard_map, replicated table"`` or ``"shard_map, sharded table"``.
      accumulate: as the ops take it.

    Raises:
      AssertionError: what was lowered has other shapes than the reference.
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

        def sharded(differentiable: Arrays, ct: Arrays) -> tuple[Arrays, Arrays]:
            shard = dataclasses.replace(case, differentiable=differentiable)
            return _sharded(f, shard, ct, axis=_SHARDED_AXES[transformation], mesh=mesh)

        exported = _ahead_of_time.lower_on_mesh(sharded, *of_op.shapes(), platform=platform)
    of_reference = jax.eval_shape(of_op.expected, *of_op.shapes())
    wanted = [(a.shape, a.dtype) for a in jax.tree.leaves(of_reference)]
    lowered = [(a.shape, a.dtype) for a in exported.out_avals]
    assert lowered == wanted, f"{case} for {platform}: lowered {lowered}, expected {wanted}"


def check_compilation(case: Case, implementation: Implementation = None, *, tpu: str) -> jax.stages.Compiled:
    """Compiles an op's outputs and cotangents for a TPU that need not be here; needs libtpu.

    Args:
      case, implementation: as for `check_lowering`.
      tpu: ``"v4"``, ``"v5e"``, ``"v5p"``, ``"v6e"`` or ``"v7x"``.

    Returns:
      The program. What does not compile raises `jax.errors.JaxRuntimeError`.
    """
    of_op = program(case, implementation)
    return _ahead_of_time.compile_for_tpu(of_op.function, *of_op.shapes(), tpu=tpu)


def assert_close(what: str, actual: Any, expected: Any, tolerance: float | None = None) -> None:
    """Raises if two arrays differ by more than rounding: relative to the largest magnitude, NaN equal to NaN."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.shape == expected.shape, f"{what}: shape {actual.shape}, expected {expected.shape}"
    assert actual.dtype == expected.dtype, f"{what}: dtype {actual.dtype}, expected {expected.dtype}"
    if not jnp.issubdtype(expected.dtype, np.floating):
        np.testing.assert_array_equal(actual, expected, err_msg=what)
        return
    if tolerance is None:
        tolerance = TOLERANCE[expected.dtype.name]
    actual, expected = actual.astype(np.float64), expected.astype(np.float64)
    finite = np.abs(expected[np.isfinite(expected)])
    scale = max(1.0, finite.max()) if finite.size else 1.0
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance * scale, err_msg=what)


# ------------------------------------------------------------------------------------- transformations
def _require_one_of(where: str, transformation: str, names: tuple[str, ...]) -> None:
    if transformation not in names:
        raise ValueError(
            f"lutjax.testing.{where}: unknown transformation {transformation!r}; they are {', '.join(names)}."
        )


def _call(
    case: Case,
    module: Any,
    implementation: Implementation,
    differentiable: Arrays,
    fixed: Arrays | None = None,
    *,
    accumulate: FixedPoint | None = None,
) -> Arrays:
    op = getattr(module, case.op)
    if accumulate is not None:
        op = functools.partial(op, accumulate=accumulate)
    if module is lutjax:
        op = functools.partial(op, implementation=implementation)
    return case.call(op, {**differentiable, **(case.fixed if fixed is None else fixed)})


def _with_gradient(outputs: Arrays) -> Arrays:
    return {name: a for name, a in outputs.items() if jnp.issubdtype(a.dtype, jnp.floating)}


def _cotangent(case: Case, outputs: Arrays) -> Arrays:
    draw = _Draw(case.op, case.shape, jnp.dtype(jnp.float32), seed=1)
    return {name: draw.grid(a.shape, 4, a.dtype) for name, a in _with_gradient(outputs).items()}


def _value_and_cotangents(
    f: Callable[..., Arrays], differentiable: Arrays, ct: Arrays
) -> tuple[Arrays, Arrays]:
    def split(d: Arrays) -> tuple[Arrays, Arrays]:
        outputs = f(d)
        return _with_gradient(outputs), outputs

    _, pullback, outputs = jax.vjp(split, differentiable, has_aux=True)
    return outputs, pullback(ct)[0]


def _factored(f: Callable[..., Arrays], differentiable: Arrays, ct: Arrays) -> tuple[Arrays, Arrays]:
    """The same, with the table's cotangent in factors."""

    def loss(d: Arrays) -> tuple[jax.Array, Arrays]:
        outputs = f(d)
        # Not multiplied: an output times a cotangent would be rounded, and a sum over the dtype overflow.
        return sum(
            (_inner(a, ct[name]) for name, a in _with_gradient(outputs).items()), jnp.float32(0)
        ), outputs

    gradient = value_and_grad(loss, tables=lambda name, a: name == "weights", has_aux=True)
    (_, outputs), cotangents = gradient(differentiable)
    return outputs, cotangents


def _value_and_factored(
    f: Callable[..., Arrays], differentiable: Arrays, ct: Arrays
) -> tuple[Arrays, Arrays]:
    outputs, cotangents = _factored(f, differentiable, ct)
    return outputs, {**cotangents, "weights": cotangents["weights"].to_dense()}


@jax.custom_vjp
def _inner(a: jax.Array, ct: jax.Array) -> jax.Array:
    """A scalar whose gradient in `a` is exactly `ct`."""
    return jnp.sum(a.astype(jnp.float32))


def _inner_forward(a: jax.Array, ct: jax.Array) -> tuple[jax.Array, jax.Array]:
    return _inner(a, ct), _compat.cast_varying(ct, _compat.varying_axes(a))


def _inner_backward(ct: jax.Array, one: jax.Array) -> tuple[jax.Array, None]:
    return ct, None


_inner.defvjp(_inner_forward, _inner_backward)

Gradients = Callable[[Callable[..., Arrays], Arrays, Arrays], tuple[Arrays, Arrays]]


def _jitted(
    run: Callable[..., Any], f: Callable[..., Arrays], case: Case, ct: Arrays, *how: Gradients
) -> Any:
    return jax.jit(lambda d, ct: run(f, dataclasses.replace(case, differentiable=d), ct, *how))(
        case.differentiable, ct
    )


def _plain(
    f: Callable[..., Arrays], case: Case, ct: Arrays, gradients: Gradients = _value_and_cotangents
) -> tuple[Arrays, Arrays]:
    return gradients(f, case.differentiable, ct)


def _scanned_gradients(
    f: Callable[..., Arrays], case: Case, ct: Arrays, gradients: Gradients
) -> tuple[Arrays, Arrays]:
    """Outputs and cotangents twice in a loop, the second time with other values."""

    def body(_: None, sign: jax.Array) -> tuple[None, Any]:
        return None, gradients(f, jax.tree.map(lambda a: a * sign.astype(a.dtype), case.differentiable), ct)

    return jax.lax.scan(body, None, jnp.array([1.0, -1.0], jnp.float32))[1]


def _sharded_gradients(
    f: Callable[..., Arrays], case: Case, ct: Arrays, gradients: Gradients, *, axis: str
) -> tuple[Arrays, Arrays]:
    """As `_sharded`, with the gradient taken by each device."""
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
    """Three different arrays of the kind of `a`, along a new first axis."""
    return jnp.stack([a, -a, jnp.roll(a, 1, axes.batch or 0)])


def _mapped(
    f: Callable[..., Arrays],
    case: Case,
    ct: Arrays,
    gradients: Gradients = _value_and_cotangents,
    *,
    grad_outside: bool,
) -> tuple[Arrays, Arrays]:
    """Mapped over batched arguments, then in addition over the others (a table for each element)."""
    results: list[tuple[Arrays, Arrays]] = []
    cts = {name: _variants(case, a, case.output_axes[name]) for name, a in ct.items()}
    for everything in (False, True):
        mapped = {name: everything or case.axes[name].batch is not None for name in case.differentiable}
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


def _scanned(f: Callable[..., Arrays], case: Case, ct: Arrays) -> tuple[Arrays, Arrays]:
    """Twice in a loop, the second time with other values."""

    def twice(d: Arrays) -> Arrays:
        def body(total: Arrays, sign: jax.Array) -> tuple[Arrays, Arrays]:
            outputs = f(jax.tree.map(lambda a: a * sign.astype(a.dtype), d))
            total = jax.tree.map(lambda t, a: t + a * sign.astype(a.dtype), total, outputs)
            return total, outputs

        zero = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(f, d))
        return jax.lax.scan(body, zero, jnp.array([1.0, -1.0], jnp.float32))[0]

    return _value_and_cotangents(twice, case.differentiable, ct)


def _exported(
    f: Callable[..., Arrays], case: Case, ct: Arrays, gradients: Gradients = _value_and_cotangents
) -> tuple[Arrays, Arrays]:
    function = jax.jit(functools.partial(gradients, f))
    exported = jax.export.export(function, disabled_checks=_ahead_of_time.KERNELS)(case.differentiable, ct)
    return jax.export.deserialize(exported.serialize()).call(case.differentiable, ct)


def _mesh(n_devices: int = 2) -> Mesh:
    if jax.device_count() < n_devices:
        raise ValueError(
            f"lutjax.testing: shard_map needs {n_devices} devices; there are {jax.device_count()}."
        )
    return Mesh(np.array(jax.devices()[:n_devices]), ("shards",))


def _sharding(case: Case, axis: str) -> tuple[dict[str, PartitionSpec], Callable[..., PartitionSpec]]:
    """How each argument is split over a mesh, and the rule."""

    def spec(axes: Axes) -> PartitionSpec:
        at = getattr(axes, axis)
        return PartitionSpec() if at is None else PartitionSpec(*[None] * at, "shards")

    return {name: spec(axes) for name, axes in case.axes.items()}, spec


def _sharded(
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
        if axis == "detector":  # each shard has a part of the sum over detectors
            outputs = {
                name: a if case.output_axes[name].detector is not None else jax.lax.psum(a, "shards")
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


# ------------------------------------------------------------------------------------- arguments
class _Draw:
    """Random arrays on coarse grids."""

    def __init__(self, op: str, shape: str, dtype: np.dtype, seed: int = 0):
        self.op, self.shape, self.dtype = op, shape, dtype
        self._rng = np.random.default_rng([seed, *op.encode(), *shape.encode()])

    def grid(self, shape: tuple[int, ...], steps: int, dtype: DTypeLike | None = None) -> jax.Array:
        """Multiples of 1/4 from ``-steps/4`` to ``steps/4``."""
        values = self._rng.integers(-steps, steps + 1, shape) / 4
        return jnp.asarray(values.astype(self.dtype if dtype is None else jnp.dtype(dtype)))

    def inputs(self, shape: tuple[int, ...]) -> jax.Array:
        return self.grid(shape, 2 if self.shape == "ties" else 40)

    def ids(self, shape: tuple[int, ...], low: int, high: int) -> jax.Array:
        return jnp.asarray(self._rng.integers(low, max(high, low + 1), shape, np.int32))

    def anchors(self, n_inputs: int, n_detectors: int, n_pairs: int) -> jax.Array:
        a = self._rng.integers(0, n_inputs, (n_detectors, n_pairs))
        b = (a + self._rng.integers(1, max(n_inputs, 2), a.shape)) % n_inputs
        return jnp.asarray(np.stack([a, b], -1).astype(np.int32))

    def detection(self, shape: tuple[int, ...], bits: int) -> Detection:
        """A detection of values of its own, as `lutjax.detect_signs` sees them; by numpy, without compiling anything."""
        values = np.asarray(self.inputs((*shape, bits))).astype(accumulator(self.dtype))
        if bits:
            closest = np.argmin(np.abs(values), -1)
            margin = np.take_along_axis(values, closest[..., None], -1)[..., 0]
            index, flip = ((values > 0) << np.arange(bits)).sum(-1), 1 << closest
        else:
            index, flip = np.zeros((2, *shape), int)
            margin = np.full(shape, np.inf, values.dtype)
        return Detection(
            jnp.asarray(index, jnp.int32), jnp.asarray(flip, jnp.int32), jnp.asarray(margin), bits
        )


def _detection_arguments(name: str, d: Detection) -> tuple[Arrays, Arrays]:
    """The margin, which has a gradient, and the ids, which have not."""
    return {f"{name}_margin": d.margin}, {f"{name}_index": d.index, f"{name}_flip": d.flip}


def _detection(name: str, bits: int, a: Arrays) -> Detection:
    return Detection(a[f"{name}_index"], a[f"{name}_flip"], a[f"{name}_margin"], bits)


def _detection_axes(name: str, axes: Axes) -> dict[str, Axes]:
    return {f"{name}_{part}": axes for part in ("index", "flip", "margin")}


def _outputs_of_detection(d: Detection) -> Arrays:
    # +inf, the margin without comparisons, times the zero of a cotangent would be NaN in the oracle.
    return {"index": d.index, "flip": d.flip, "margin": d.margin}


def _detect(draw: _Draw, s: dict[str, int]) -> Case:
    axes = Axes(0, 1)
    return Case(
        draw.op,
        draw.shape,
        draw.dtype.name,
        {"x": draw.inputs((s["batch"], s["inputs"]))},
        {"anchors": draw.anchors(s["inputs"], s["detectors"], s["bits"])},
        {"x": Axes(0), "anchors": Axes(detector=0)},
        {"index": axes, "flip": axes, "margin": axes},
        lambda op, a: _outputs_of_detection(op(a["x"], a["anchors"])),
    )


def _detect_signs(draw: _Draw, s: dict[str, int]) -> Case:
    return Case(
        draw.op,
        draw.shape,
        draw.dtype.name,
        {"positions": draw.inputs((s["batch"], s["bits"]))},
        {},
        {"positions": Axes(0, 0)},
        {"index": Axes(0, 0), "flip": Axes(0, 0), "margin": Axes(0, 0)},
        lambda op, a: _outputs_of_detection(op(a["positions"])),
    )


def _lookup(draw: _Draw, s: dict[str, int]) -> Case:
    bits = s["bits"]
    margin, ids = _detection_arguments("detection", draw.detection((s["batch"], s["detectors"]), bits))
    return Case(
        draw.op,
        draw.shape,
        draw.dtype.name,
        {"weights": draw.grid((s["detectors"], 2**bits, s["outputs"]), 8), **margin},
        ids,
        {"weights": Axes(detector=0), **_detection_axes("detection", Axes(0, 1))},
        {"y": Axes(0)},
        lambda op, a: {"y": op(a["weights"], _detection("detection", bits, a))},
    )


def _sparse_lookup(draw: _Draw, s: dict[str, int]) -> Case:
    bits, n_outputs = s["bits"], s["outputs"]
    weights = draw.grid((s["detectors"], 2**bits, s["slots"]), 8)
    lists = (s["detectors"] if s.get("table_lists", 1) else 1, 2**bits if s.get("row_lists", 1) else 1)
    margin, ids = _detection_arguments("detection", draw.detection((s["batch"], s["detectors"]), bits))
    return Case(
        draw.op,
        draw.shape,
        draw.dtype.name,
        {"weights": weights, **margin},
        {**ids, "targets": draw.ids((*lists, s["slots"]), -1, n_outputs)},
        {
            "weights": Axes(detector=0),
            "targets": Axes(detector=0 if lists[0] > 1 else None),
            **_detection_axes("detection", Axes(0, 1)),
        },
        {"y": Axes(0)},
        lambda op, a: {"y": op(a["weights"], _detection("detection", bits, a), a["targets"], n_outputs)},
    )


def _pair_options(draw: _Draw, s: dict[str, int], n_keys: int) -> tuple[dict[str, Any], Arrays]:
    options = {
        "window": s.get("window"),
        "query_start": s.get("query_start", 0),
        "key_start": s.get("key_start", 0),
    }
    segments: Arrays = {}
    if "segments" in s:
        for name, length in (("query_segments", s["queries"]), ("key_segments", n_keys)):
            segments[name] = jnp.sort(draw.ids((s["batch"], length), 0, s["segments"]), -1)
    return options, segments


def _n_distances(s: dict[str, int], n_keys: int) -> int:
    farthest = max(s.get("query_start", 0) + s["queries"] - 1 - s.get("key_start", 0), 0)
    return s.get("distances", min(farthest, s.get("window", farthest)) if n_keys else 0)


def _lookup_attention(draw: _Draw, s: dict[str, int]) -> Case:
    n_detectors, n_keys = s["detectors"], s.get("keys", s["queries"])
    q_bits, k_bits, p_bits = s["bits"], s.get("key_bits", s["bits"]), s["position_bits"]
    options, segments = _pair_options(draw, s, n_keys)
    rows = 2 ** (q_bits + k_bits + p_bits)
    differentiable = {"weights": draw.grid((n_detectors, rows, s["outputs"]), 8)}
    fixed, axes = dict(segments), {"weights": Axes(detector=0), **dict.fromkeys(segments, Axes(0))}
    of_position = 1 if s.get("shared") else n_detectors
    for name, d, of in (
        ("query", draw.detection((s["batch"], s["queries"], n_detectors), q_bits), Axes(0, 2)),
        ("key", draw.detection((s["batch"], n_keys, n_detectors), k_bits), Axes(0, 2)),
        (
            "position",
            draw.detection((_n_distances(s, n_keys), of_position), p_bits),
            Axes(detector=None if of_position == 1 else 1),
        ),
    ):
        margin, ids = _detection_arguments(name, d)
        differentiable, fixed = {**differentiable, **margin}, {**fixed, **ids}
        axes |= _detection_axes(name, of)
    return Case(
        draw.op,
        draw.shape,
        draw.dtype.name,
        differentiable,
        fixed,
        axes,
        {"y": Axes(0)},
        lambda op, a: {
            "y": op(
                a["weights"],
                _detection("query", q_bits, a),
                _detection("key", k_bits, a),
                _detection("position", p_bits, a),
                **options,
                **{name: a[name] for name in segments},
            )
        },
    )


def _lut_pair_attention(draw: _Draw, s: dict[str, int]) -> Case:
    n_detectors, n_inputs, p_bits = s["detectors"], s["inputs"], s["position_bits"]
    n_keys = s.get("keys", s["queries"])
    options, segments = _pair_options(draw, s, n_keys)
    if segments:
        segments = {"segments": segments["query_segments"], "key_segments": segments["key_segments"]}
    of_position = 1 if s.get("shared") else n_detectors
    differentiable = {
        "x": draw.inputs((s["batch"], s["queries"], n_inputs)),
        "weights": draw.grid((n_detectors, 2 ** s["bits"], s["outputs"]), 8),
    }
    axes = {
        "x": Axes(0),
        "keys": Axes(0),
        "weights": Axes(detector=0),
        "anchors": Axes(detector=0),
        "positions": Axes(detector=None if of_position == 1 else 1),
        **dict.fromkeys(segments, Axes(0)),
    }
    if p_bits:
        differentiable["positions"] = draw.inputs((_n_distances(s, n_keys), of_position, p_bits))
    if "keys" in s:
        differentiable["keys"] = draw.inputs((s["batch"], n_keys, n_inputs))
    return Case(
        draw.op,
        draw.shape,
        draw.dtype.name,
        differentiable,
        {"anchors": draw.anchors(2 * n_inputs + p_bits, n_detectors, s["bits"]), **segments},
        axes,
        {"y": Axes(0)},
        lambda op, a: {
            "y": op(
                a["x"],
                a["weights"],
                a["anchors"],
                a.get("positions"),
                interleave=bool(s.get("interleave")),
                keys=a.get("keys"),
                **options,
                **{name: a[name] for name in segments},
            )
        },
    )


def _gates(draw: _Draw, s: dict[str, int]) -> Case:
    """Gates on random inputs; an op on coefficients, or on a table."""
    bits, first = s.get("bits", 2), bool(s.get("features_first"))
    n_inputs, n_gates = s["inputs"], s["gates"]
    wires = draw.ids((n_gates, bits), 0, n_inputs)
    parameter, shape = (
        ("coefficients", (4, n_gates)) if draw.op == "bilinear_gates" else ("table", (n_gates, 2**bits))
    )
    fixed: Arrays = {"wires": wires}
    if s.get("readers"):
        fixed["readers"] = lutjax.readers(wires, n_inputs)
    batch, feature = (1, 0) if first else (0, 1)

    def call(op: Callable[..., Any], a: Arrays) -> Arrays:
        axis = 0 if first else -1
        return {"y": op(a["x"], a[parameter], a["wires"], readers=a.get("readers"), feature_axis=axis)}

    x = draw.grid((n_inputs, s["batch"]) if first else (s["batch"], n_inputs), 6)
    return Case(
        draw.op,
        draw.shape,
        draw.dtype.name,
        {"x": x, parameter: draw.grid(shape, 8)},
        fixed,
        {
            "x": Axes(batch),
            parameter: Axes(detector=1 if parameter == "coefficients" else 0),
            "wires": Axes(detector=0),
            "readers": Axes(),
        },
        {"y": Axes(batch, feature)},
        call,
    )


_BUILDERS: dict[str, Callable[[_Draw, dict[str, int]], Case]] = {
    "detect": _detect,
    "detect_signs": _detect_signs,
    "lookup": _lookup,
    "sparse_lookup": _sparse_lookup,
    "lookup_attention": _lookup_attention,
    "lut_pair_attention": _lut_pair_attention,
    "bilinear_gates": _gates,
    "soft_lut": _gates,
    "binary_lut": _gates,
}
