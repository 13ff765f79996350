"""JAX function made from the kernels of an op.

The only module that knows custom_vjp, custom_vmap, the mesh axes of shard_map and implicit casts. An op
describes itself by its `Call`; a kernel is a set of functions of a call with one batch axis in front (see
`lutjax.dispatch.contract`); `apply` puts them together:

    jit( fold leading axes -> custom_vjp( custom_vmap(forward), custom_vmap(backward) ) -> unfold )

and `updated` the third one, an optimiser step of a table:

    jit( fold leading axes -> custom_vmap(update) )

Inside, a call is the tuple of its arrays (`Call.values`) and the tuple of its options (`Call.options`): the first is
transformed, the second is a part of every cache key.
"""

import functools
import math
import os
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap
from jax.sharding import PartitionSpec

from lutjax import _compat
from lutjax.dispatch import _meshes, _table_reads
from lutjax.dispatch._partition import Layout, first_element, on_part, partitioned, some_element
from lutjax.dispatch._parts import by_parts, why_apart
from lutjax.dispatch.contract import Call, Direction, Step
from lutjax.dispatch.registry import (
    Backend,
    Device,
    Implementation,
    KernelSpec,
    NoImplementationError,
    Platform,
    Request,
    devices_of,
    kernel_registry,
)
from lutjax.values._detection import Detection, cotangent as cotangent_of_margin
from lutjax.values._fixed_point import FixedPoint, Totals, nan_where_apart, without_check
from lutjax.values._ids import as_jax

# One implementation for each device that may run the call.
Choice = tuple[tuple[Device, KernelSpec], ...]

Options = tuple[tuple[str, Any], ...]

Ranks = tuple[int | None, ...]

Over = tuple[str, ...] | None
"""Mesh axes over which detectors are divided, inside a shard_map of the op; None: arrays are whole, and need no rule either."""

F = TypeVar("F", bound=Callable[..., Any])


def _cached(function: F) -> F:
    """Remember what a function returned, for hashable arguments."""
    return functools.lru_cache(maxsize=4096)(function)  # type: ignore[return-value]


def apply(call: Call, *, implementation: Implementation = None, feature_axis: int = -1) -> Any:
    """Return the outputs of an op: choose its implementation and run it, with any leading axes.

    Args:
      call: with leading axes in front of every batched array.
      feature_axis: -1 where leading axes come first; 0 where features come first and they follow, of ops whose
        kernels want it so.
    """
    leaves, structure = jax.tree.flatten(call.values())
    if not all(isinstance(a, jax.Array) for a in leaves):
        call = jax.tree.map(as_jax, call)
        leaves = jax.tree.leaves(call.values())
    traced = any(isinstance(a, jax.core.Tracer) for a in leaves)
    _refuse_in_fork(call.op)
    kernel_registry.follow_coroutine(traced=traced)
    names = kernel_registry.request(call.op, implementation)
    devices, options = devices_of(leaves), call.options()
    # Of the next call with these shapes and options no implementation is asked again.
    kinds = tuple([(a.shape, a.dtype) for a in leaves])
    choose = _choose_forward if call.parts is None else _choose_fused
    choice = kernel_registry.remembered(
        (type(call), options, names, devices, feature_axis, structure, kinds),
        lambda: choose(_shapes_of_kernel(call, feature_axis), names, devices),
    )
    n_noted = kernel_registry.n_noted()
    apart = call.parts is not None and (why_apart(call) is not None or any(s.of_parts for _, s in choice))
    static = (type(call), choice, names, options, _own_thread() if traced else None)
    if apart:
        y = _by_parts(call, static, implementation, feature_axis)
    else:
        y = _by_kernels(call, static, feature_axis)
    kernel_registry.note(
        n_noted,
        call,
        lambda: _shapes_of_kernel(call, feature_axis),
        lambda shapes: _folded_output(shapes, y),
        apart=apart,
    )
    return y


# Of `_compiled`: the class of the call, the implementations, the names that were asked for, the options, and the thread.
Static = tuple[type[Call], Choice, tuple[str, ...], Options, int | None]


def _by_kernels(call: Call, static: Static, feature_axis: int) -> Any:
    reads = _table_reads.current()
    table = None if reads is None or call.table_name is None else reads.name(getattr(call, call.table_name))
    try:
        if reads is not None and table is not None:
            return reads.look_up(table, call, functools.partial(_run_tapped, static))
        return _compiled(*static, feature_axis=feature_axis)(*call.values())
    except TypeError as error:
        if not _compat.is_refused_forward_mode(error):
            raise
        raise TypeError(
            f"{call.op}: the op has gradients (jax.grad, jax.vjp) and no forward mode (jax.jvp, jax.jacfwd, "
            f"jax.hessian); use lutjax.reference.{call.op}, which has derivatives of every order in every mode."
        ) from error


def _by_parts(call: Call, static: Static, implementation: Implementation, feature_axis: int) -> Any:
    """Return the outputs of a fused op from its parts; where the device is not known yet, from a kernel on devices that have one."""
    op, choice, names, options, thread = static

    def parts(*arrays: Any) -> Any:
        return by_parts(op.of(arrays, options), implementation, feature_axis)

    fused = tuple((device, spec) for device, spec in choice if not spec.of_parts)
    if why_apart(call) or not fused:
        return parts(*call.values())
    by_kernel = _compiled(op, fused, names, options, thread, feature_axis=feature_axis)
    kernels = {name: by_kernel for device, _ in fused for name in device.lowering_names}
    return jax.lax.platform_dependent(*call.values(), **kernels, default=parts)


def _run_tapped(static: Static, taps: Any, call: Call) -> Any:
    return _compiled(*static, tapped=taps is not None)(*(taps or ()), *call.values())


def updated(call: Call, cotangent: jax.Array, step: Step, *, implementation: Implementation = None) -> Any:
    """Return the table of a call and the state of its rows after an optimiser step, in the table's own memory.

    Args:
      call: with leading axes, as for `apply`. cotangent: of its output.
    """
    _refuse_in_fork(call.op)
    kernel_registry.follow_coroutine(
        traced=any(isinstance(a, jax.core.Tracer) for a in jax.tree.leaves((call, cotangent, step)))
    )
    names = kernel_registry.request(call.op, implementation)
    shapes = _shapes_of_kernel(call, -1)
    choice = _choose(
        shapes,
        names,
        "update",
        devices_of(jax.tree.leaves((call, cotangent, step))),
        _folded_output(shapes, cotangent),
        jax.tree.map(lambda a: jax.ShapeDtypeStruct(jnp.shape(a), jnp.result_type(a)), step),
    )
    kernel_registry.note(
        kernel_registry.n_noted(),
        call,
        lambda: shapes,
        lambda shapes: _folded_output(shapes, cotangent),
        step.rule,
    )
    return _compiled_update(type(call), choice, (*call.options(), ("rule", step.rule)))(
        *call.values(), cotangent, step.rate, step.factor, step.state
    )


def _own_thread() -> int | None:
    """Return the id of this thread; None of the main one.

    JAX keeps the structure of residuals with the trace of a function, and has none while a thread traces a forward rule of it anew:
    a pullback in another thread would raise its StoreException. So every thread traces functions of its own.
    """
    own = threading.get_ident()
    return None if own == threading.main_thread().ident else own


_ran_in: list[int] = []
"""The process in which an op ran first."""


def _refuse_in_fork(op: str) -> None:
    """Raise an error in a process that was forked from the one in which ops ran: what JAX compiles there waits for threads that are not there."""
    own = os.getpid()
    if not _ran_in:
        _ran_in.append(own)
    if _ran_in[0] != own:
        raise RuntimeError(
            f"{op}: this process was forked from one in which JAX had run, and JAX's threads are not here: it would wait for them without "
            "end. Start processes by multiprocessing's method 'spawn' or 'forkserver', or fork before JAX is used."
        )


def _shapes_of_kernel(call: Call, feature_axis: int) -> Call:
    """The call with shapes in place of arrays, as kernels get it with one batch axis: by it an implementation is chosen."""
    n = 0 if call.features_first else math.prod(_batch_shape(call.ranks(), call.values()))

    def shape(a: jax.Array, rank: int) -> jax.Array | jax.ShapeDtypeStruct:
        wanted: tuple[int, ...] = (n, *a.shape[a.ndim - rank :])
        if call.features_first:
            features = a.shape[feature_axis]
            wanted = (features, a.size // max(features, 1))
        return a if a.shape == wanted else jax.ShapeDtypeStruct(wanted, a.dtype)

    return call.of(
        (
            a if rank is None else jax.tree.map(functools.partial(shape, rank=rank), a)
            for a, rank in zip(call.values(), call.ranks(), strict=True)
        ),
        call.options(),
    )


def _folded_output(call: Call, output: Any) -> Any:
    """Shape and dtype of an output, or of its cotangent, as kernels get it.

    Args:
      call: with one batch axis. output: with any leading axes; features first as it comes.
    """
    first = next(a for a, rank in zip(call.values(), call.ranks(), strict=True) if rank is not None)
    n, rank = jax.tree.leaves(first)[0].shape[0], _rank_of_output(call.ranks())

    def outline(a: jax.Array) -> jax.ShapeDtypeStruct:
        shape = a.shape if call.features_first else (n, *a.shape[a.ndim - rank :])
        return jax.ShapeDtypeStruct(shape, a.dtype)

    return jax.tree.map(outline, output)


def _rank_of_output(ranks: Ranks) -> int:
    """Rank of a look-up's output without leading axes: that of what is detected."""
    return max(rank for rank in ranks if rank is not None)


def _choose(
    call: Call,
    names: tuple[str, ...],
    direction: Direction,
    devices: tuple[Device, ...],
    cotangent: Any = None,
    step: Step | None = None,
) -> Choice:
    """An implementation for each device; for some of several, if the others have none.

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


def _choose_forward(call: Call, names: tuple[str, ...], devices: tuple[Device, ...]) -> Choice:
    return _choose(call, names, "forward", devices)


def _choose_fused(call: Call, names: tuple[str, ...], devices: tuple[Device, ...]) -> Choice:
    """A kernel for each device that has it in both directions, else the parts."""
    backward = dict(_choose(call, names, "backward", devices))
    return tuple(
        (device, backward[device] if backward[device].of_parts else spec)
        for device, spec in _choose(call, names, "forward", devices)
    )


@_cached
def _compiled(
    op: type[Call],
    choice: Choice,
    names: tuple[str, ...],
    options: Options,
    thread: int | None = None,
    tapped: bool = False,
    feature_axis: int = -1,
) -> Callable[..., Any]:
    """The op as a jitted function of its arrays.

    Args:
      thread: whose own the function is, see `_own_thread`. tapped: with two taps in front, see `_differentiable`.
    """
    ranks = op.ranks()

    @functools.cache
    def function_of(over: Over) -> Callable[..., Any]:
        """The op with a batch axis in front."""
        if op.differentiable:
            return _differentiable(op, choice, names, options, tapped, over)
        kernel = _kernel(op, "forward", choice, None, options, over)
        return lambda *args: kernel(*_common_mesh_axes(args))

    def call_features_first(over: Over, *args: Any) -> Any:
        batch = next(
            a.shape[1:] if feature_axis == 0 else a.shape[:-1]
            for a, rank in zip(args, ranks, strict=True)
            if rank is not None
        )
        n, first = math.prod(batch), feature_axis == 0
        args = tuple(
            a if rank is None else a.reshape(a.shape[0], n) if first else a.reshape(n, a.shape[-1]).T
            for a, rank in zip(args, ranks, strict=True)
        )
        y = function_of(over)(*args)
        if first:
            return y.reshape(*y.shape[:-1], *batch)
        return jnp.moveaxis(y, -1, 0).reshape(*batch, *y.shape[:-1])

    def call(over: Over, *args: Any) -> Any:
        taps, args = (args[:2], args[2:]) if tapped else ((), args)
        batch = _batch_shape(ranks, args)
        if taps:
            zero, token = taps
            token = _compat.cast_varying(token, _mesh_axes(args))
            taps = (zero.reshape(math.prod(batch), *zero.shape[len(batch) :]), token)
        outputs = function_of(over)(*taps, *_fold(ranks, op.of(args, options).prepared().values(), batch))
        return jax.tree.map(lambda a: a.reshape(*batch, *a.shape[1:]), outputs)

    inner = call_features_first if op.features_first else call

    def on_explicit_axes(*args: Any) -> Any:
        taps, args = (args[:2], args[2:]) if tapped else ((), args)
        given = op.of(args, options).prepared()
        layout = Layout.of(given, first=op.features_first and feature_axis == 0)
        parts = layout.parts("forward")
        if not parts.divides or _lacks_elements((taps, given.values()), options):
            whole = functools.partial(inner, None)
            return _meshes.divided_by_compiler(whole, lambda *_: layout.of_outputs(op))(
                *taps, *given.values()
            )
        outputs, over = parts.of_outputs(op), parts.over
        specs = (*((outputs, PartitionSpec()) if taps else ()), *parts.of_arrays(given))
        y = _meshes.in_parts(functools.partial(inner, over), specs, outputs)(*taps, *given.values())
        return _meshes.laid_out(y, layout.of_outputs(op))

    return _jitted(functools.partial(inner, ()), on_explicit_axes, f"lutjax_{op.op}")


@_cached
def _compiled_update(op: type[Call], choice: Choice, options: Options) -> Callable[..., Any]:
    """The update of an op as a jitted function of the arrays of its call, the cotangent, rate, factor and state."""
    ranks, table = _ranks_of_update(op), op.arrays().index(str(op.table_name))

    def call(over: Over, *args: Any) -> Any:
        n, kernel = len(op.arrays()), _kernel(op, "update", choice, None, options, over)
        prepared = (*op.of(args[:n], options).prepared().values(), *args[n:])
        return kernel(*_common_mesh_axes(_fold(ranks, prepared, _batch_shape(ranks, args))))

    def on_explicit_axes(*args: Any) -> Any:
        n = len(op.arrays())
        given = op.of(args[:n], options[:-1]).prepared()
        parts = Layout.of(given).parts("update")
        of_call = parts.of_arrays(given)
        *rest, state = jax.tree.map(
            lambda a: parts.of_axes((), ("t",), a.shape) if a.ndim else PartitionSpec(), args[n + 1 :]
        )
        specs, outputs = (*of_call, PartitionSpec(), *rest, state), (of_call[table], state)
        of_all = (*given.values(), *args[n:])
        if _lacks_elements(of_all, options):
            update = _meshes.divided_by_compiler(functools.partial(call, None), lambda *_: outputs)
        else:
            update = _meshes.in_parts(functools.partial(call, parts.over), specs, outputs)
        return jax.tree.map(
            _meshes.laid_out, update(*of_all), jax.tree.map(_meshes.spec_of, (args[table], args[-1]))
        )

    return _jitted(functools.partial(call, ()), on_explicit_axes, f"lutjax_{op.op}_update")


def _lacks_elements(arrays: Any, options: Options) -> bool:
    """Return whether an array of a call, or its output, has no elements: it is not divided by a `jax.shard_map` then."""
    return _meshes.lacks_elements(arrays) or dict(options).get("n_outputs") == 0


def _ranks_of_update(op: type[Call]) -> Ranks:
    """Return the ranks of the call's arrays, the cotangent, rate, factor and state."""
    return (*op.ranks(), _rank_of_output(op.ranks()), None, None, None)


def _jitted(
    function: Callable[..., Any], on_explicit_axes: Callable[..., Any], name: str
) -> Callable[..., Any]:
    """A jitted function that a profile shows by its name.

    `on_explicit_axes` takes its place where arrays lie on a mesh with explicit axes.
    """

    def outer(*args: Any) -> Any:
        if not any(_meshes.explicit_axes(a) for a in jax.tree.leaves(args)):
            return function(*args)
        with _meshes.mesh_of(args):
            return on_explicit_axes(*args)

    outer.__name__ = name
    return jax.jit(outer)


# ------------------------------------------------------------------------------------- leading axes
def _batch_shape(ranks: Ranks, args: tuple[Any, ...]) -> tuple[int, ...]:
    leading = [
        leaf.shape[: leaf.ndim - rank]
        for arg, rank in zip(args, ranks, strict=True)
        if rank is not None
        for leaf in jax.tree.leaves(arg)
    ]
    return jnp.broadcast_shapes(*leading)


def folded(call: Call, cotangent: jax.Array) -> tuple[Any, jax.Array]:
    """The call of an op and the cotangent of its output as kernels get them."""
    ranks = (*call.ranks(), _rank_of_output(call.ranks()))
    args = (*call.prepared().values(), cotangent)
    *values, cotangent = _fold(ranks, args, _batch_shape(ranks, args))
    return call.of(values, call.options()), cotangent


def _fold(ranks: Ranks, args: tuple[Any, ...], batch: tuple[int, ...]) -> tuple[Any, ...]:
    """All leading axes as one batch axis."""

    def fold(a: jax.Array, rank: int) -> jax.Array:
        core = a.shape[a.ndim - rank :]
        if a.shape != (*batch, *core):
            a = jnp.broadcast_to(a.reshape((1,) * (len(batch) + rank - a.ndim) + a.shape), (*batch, *core))
        return a.reshape(math.prod(batch), *core)

    return tuple(
        arg if rank is None else jax.tree.map(functools.partial(fold, rank=rank), arg)
        for arg, rank in zip(args, ranks, strict=True)
    )


def _mesh_axes(args: Any) -> frozenset[str]:
    return frozenset[str]().union(*(_compat.varying_axes(a) for a in jax.tree.leaves(args)))


def _common_mesh_axes(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return arguments that vary over the same mesh axes inside shard_map: all axes over which any of them varies."""
    axes = _mesh_axes(args)
    return jax.tree.map(lambda a: _compat.cast_varying(a, axes), args) if axes else args


# ------------------------------------------------------------------------------------- gradients
# JAX may trace a forward rule several times for one call: once for each set of arguments that is differentiated, and
# again under other transformations. It then keeps the *structure* of the residuals of the last trace alone, and
# may hand it to the backward rule together with the *leaves* of an earlier one. So the structure must be the same in
# every trace: nothing stands in it that depends on which arguments are differentiated, on shapes, dtypes or mesh axes.
# Such things are read from the shapes and types of leaves, which always belong to the right trace. Both kinds of
# leaves below are empty and cost nothing. (The bits of a detection are static and part of the call itself: all traces of
# one call have the same.)


def _mark(needs: tuple[bool, ...]) -> jax.Array:
    """An empty array whose shape says which arguments are differentiated; see `_marked`."""
    return jnp.zeros((0, sum(need << i for i, need in enumerate(needs)) + 1), jnp.int8)


def _marked(mark: jax.Array, n: int) -> tuple[bool, ...]:
    """Return for each of `n` arguments whether it is differentiated."""
    bits = mark.shape[1] - 1
    return tuple(bool(bits >> i & 1) for i in range(n))


def _outline(a: jax.Array) -> jax.Array:
    """An empty array that keeps the shape of `a`, behind an axis of length 0, its dtype and the mesh axes it varies over."""
    return _compat.cast_varying(jnp.zeros((0, *a.shape), a.dtype), _compat.varying_axes(a))


def _outlined(outline: jax.Array) -> jax.ShapeDtypeStruct:
    """Shape and dtype of the array that `_outline` was given."""
    return jax.ShapeDtypeStruct(outline.shape[1:], outline.dtype)


def _differentiable(
    op: type[Call],
    choice: Choice,
    names: tuple[str, ...],
    options: Options,
    tapped: bool,
    over: Over = (),
) -> Callable[..., Any]:
    """The op with its gradient, as a function of its arrays.

    `over`: outputs without an axis of detectors are summed over these axes.

    `tapped`: it takes two taps in front, zeros that change nothing. The cotangent of the first, of the output's
    shape, is the output's. That of the second is a dependency token: a scalar that is available once the backward pass
    has read the table. What has to come later can be made to depend on it.
    """
    n = len(op.arrays())
    kernel = _kernel(op, "forward", choice, None, options, over)
    in_floats = _in_floats(options)
    twin = None if in_floats is None else _kernel(op, "forward", choice, None, in_floats, over)
    devices = tuple(device for device, _ in choice)
    on_tpu = any(device.backend == Backend.TPU for device in devices)
    accumulate: Any = dict(options).get("accumulate")
    n_taps = 2 if tapped else 0

    def summed(kernel: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        outputs = kernel(*args)
        if accumulate is None or op.table_name is None or outputs.dtype != np.int32:
            return outputs
        # Kernels return integer totals: the parts of all devices are summed before they are divided.
        return accumulate.total(outputs, args[op.arrays().index(op.table_name)].dtype)

    def run(*args: Any) -> Any:
        outputs = summed(kernel, args)
        if twin is None or isinstance(outputs, Detection):  # a detection has no sums
            return outputs
        return nan_where_apart(outputs, summed(twin, args), accumulate)

    @jax.custom_vjp
    def call(*args: Any) -> Any:
        return run(*_common_mesh_axes(args[n_taps:]))

    def forward(*primals: Any) -> tuple[Any, Any]:
        # symbolic_zeros: each leaf says whether it is differentiated.
        args = jax.tree.map(lambda p: p.value, primals[n_taps:])
        needs = tuple(any(p.perturbed for p in jax.tree.leaves(arg)) for arg in primals[n_taps:])
        outlines = jax.tree.map(_outline, args)
        args = _common_mesh_axes(args)
        if any(needs):  # a call that has no gradient fails here, not in the backward pass
            _choose(op.of(args, options), names, "backward", devices)
        outputs = _without_derivative(op.op, run)(*args)
        return outputs, (_mark(needs), outlines, op.of(args, options).residuals(outputs).values())

    def backward(residuals: Any, cotangent: Any) -> tuple[Any, ...]:
        cotangent = _differentiable_part(cotangent)
        if isinstance(cotangent, jax.custom_derivatives.SymbolicZero):
            return (None,) * (n_taps + n)
        axes = _mesh_axes(residuals[1])
        cotangents = of_arguments(residuals, _compat.cast_varying(cotangent, axes))
        return (cotangent, _known_after(cotangents, axes, on_tpu), *cotangents) if tapped else cotangents

    def of_arguments(residuals: Any, cotangent: Any) -> tuple[Any, ...]:
        mark, outlines, saved = residuals
        needs = _marked(mark, n)
        if not any(needs):
            return (None,) * n
        shapes = jax.tree.map(_outlined, outlines)
        chosen = _choose(op.of(shapes, options), names, "backward", devices)
        every_axis = _mesh_axes(outlines)

        def cotangents(options: Options) -> list[Any]:
            kernel = _without_derivative(op.op, _kernel(op, "backward", chosen, needs, options, over))

            def of_argument(ct: Any, need: bool, outline: Any) -> Any:
                if not need:
                    return None
                part = _differentiable_part(outline)
                others = tuple(sorted(every_axis - _mesh_axes(part)))
                return _sum_over_devices(ct, others, part.dtype, dict(options).get("accumulate"))

            return list(map(of_argument, kernel(*saved, cotangent), needs, outlines))

        found = cotangents(options)
        if in_floats is not None:
            check = functools.partial(nan_where_apart, accumulate=accumulate)
            found = jax.tree.map(check, found, cotangents(in_floats))
        return tuple(
            cotangent_of_margin(ct, outline.bits) if isinstance(outline, Detection) and ct is not None else ct
            for ct, outline in zip(found, outlines, strict=True)
        )

    call.defvjp(forward, backward, symbolic_zeros=True)
    return call


def _without_derivative(name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel as the forward and backward rules of a gradient call it: what differentiates it wants a second one."""
    function = jax.custom_jvp(kernel)

    @function.defjvp
    def refuse(primals: Any, tangents: Any) -> Any:
        raise TypeError(
            f"{name}: its gradient is differentiated again, and the op has no second derivative; use "
            f"lutjax.reference.{name}, which has derivatives of every order in every mode."
        )

    return function


def _in_floats(options: Options) -> Options | None:
    """The options of the floating-point twin of an op whose sums are checked; None if they are not."""
    accumulate = dict(options).get("accumulate")
    if accumulate is None or not accumulate.checked:
        return None
    return tuple({**dict(options), "accumulate": None}.items())


def _known_after(cotangents: tuple[Any, ...], axes: frozenset[str], on_tpu: bool) -> jax.Array:
    """The dependency token: a scalar that depends on every cotangent, and varies over these mesh axes."""
    element = first_element if on_tpu else _some_element  # JAX has no rules for the compiler on TPUs
    leaves = [a for a in jax.tree.leaves(cotangents) if a.size]
    total = sum((element(a).astype(jnp.float32) for a in leaves), jnp.float32(0))
    return _compat.cast_varying(total, axes)


_some_element = custom_vmap(some_element)


@_some_element.def_vmap
def _some_element_of_each(size: int, mapped: Any, a: jax.Array) -> tuple[jax.Array, bool]:
    return a.reshape(size, -1)[:, 0], True


def _sum_over_devices(
    ct: jax.Array, axes: tuple[str, ...], dtype: Any, accumulate: FixedPoint | None
) -> jax.Array:
    """A kernel's cotangent in the dtype of its argument, summed over the mesh axes that only other arguments vary over.

    That sum is the transpose of their common cast. It is made here because integers must be summed before they
    are divided.
    """
    if axes and accumulate is not None and ct.dtype != np.int32:
        ct = accumulate.quantised(ct)
    in_integers = ct.dtype == np.int32
    ct = ct if in_integers else ct.astype(dtype)
    ct = jax.lax.psum(ct, axes) if axes else ct
    return accumulate.total(ct, dtype) if in_integers and accumulate is not None else ct


def _differentiable_part(a: Any) -> Any:
    return a.margin if isinstance(a, Detection) else a


# ------------------------------------------------------------------------------------- vmap
@_cached
def _kernel(
    op: type[Call],
    direction: Direction,
    choice: Choice,
    needs: tuple[bool, ...] | None,
    options: Options,
    over: Over = (),
) -> Callable[..., Any]:
    """An implementation's function, of arrays, with a rule for vmap.

    Its arguments are the arrays of the call; then, backward, the cotangent; of an update the cotangent, rate, factor and
    state. Backward it returns a cotangent or None for each array. `needs`: of the backward one.

    A mapped axis joins the batch where it can: a kernel then needs no rule of its own, and tiles of a
    bounded size stay so. Where it cannot (a table for each element, or the gradient of one), plain JAX is
    mapped by `jax.vmap` and any other kernel runs once for each element.
    """
    batched = tuple(rank is not None for rank in op.ranks())
    foldable = direction == "forward"
    if direction == "update":
        batched = tuple(rank is not None for rank in _ranks_of_update(op))
    elif needs is not None:
        foldable = not any(need and not b for need, b in zip(needs, batched, strict=True))
        batched = (*batched, True)

    def batch_axis(a: jax.Array, n_mapped: int = 0) -> int:
        return a.ndim - 1 - n_mapped if op.features_first else 0

    def run(options: Options, *args: Any) -> Any:
        return _by_platform(op, direction, choice, needs, options, args)

    def raw(*args: Any, over: Over = over) -> Any:
        return on_part(op, direction, options, args, over, run) if over else run(options, *args)

    on_tpu = any(device.backend == Backend.TPU for device, _ in choice)
    has_rule = over is not None and not on_tpu  # JAX has no such rules on TPUs
    call = custom_vmap(partitioned(op, direction, needs, options, raw) if has_rule else raw)

    @call.def_vmap
    def rule(size: int, mapped: Any, *args: Any) -> tuple[Any, Any]:
        is_mapped = jax.tree.leaves(mapped)
        places = [_meshes.spec_of(a)[0] for a, m in zip(jax.tree.leaves(args), is_mapped, strict=True) if m]
        place = next((place for place in places if place), None)
        if size == 0:  # other arrays without elements are never divided here, see `_lacks_elements`
            outputs = of_no_elements(mapped, args, place)
        elif place is None:
            outputs = of_elements(size, mapped, *args)
        else:  # the mapped axis is divided over a mesh with explicit axes
            specs = jax.tree.map(lambda m: PartitionSpec(place) if m else PartitionSpec(), tuple(mapped))
            part = functools.partial(of_part, size // _meshes.devices_along(place), mapped)
            axes = (place,) if isinstance(place, str) else place
            outputs = _meshes.in_parts(part, specs, PartitionSpec(place), axes)(*args)
        return outputs, jax.tree.map(lambda _: True, outputs)

    def of_no_elements(mapped: Any, args: Any, place: Any) -> Any:
        one = jax.tree.map(
            lambda a, m: jax.ShapeDtypeStruct(a.shape[m:], a.dtype), tuple(args), tuple(mapped)
        )
        lies, over = PartitionSpec(place) if place else None, _mesh_axes(args)
        return jax.tree.map(
            lambda a: _compat.cast_varying(jnp.zeros((0, *a.shape), a.dtype, out_sharding=lies), over),
            jax.eval_shape(raw, *one),
        )

    def of_part(size: int, mapped: Any, *args: Any) -> Any:
        return of_elements(size, mapped, *_common_mesh_axes(args))

    def of_elements(size: int, mapped: Any, *args: Any) -> Any:
        shared_is_mapped = any(any(jax.tree.leaves(m)) for m, b in zip(mapped, batched, strict=True) if not b)
        if foldable and not shared_is_mapped:

            def join(a: jax.Array, is_mapped: bool) -> jax.Array:
                a = a if is_mapped else jnp.broadcast_to(a[None], (size, *a.shape))
                axis = batch_axis(a, 1)
                a = jnp.moveaxis(a, 0, axis)
                return a.reshape(*a.shape[:axis], size * a.shape[axis + 1], *a.shape[axis + 2 :])

            joined = [
                jax.tree.map(join, arg, m) if b else arg
                for arg, m, b in zip(args, mapped, batched, strict=True)
            ]
            a_batched = [arg for arg, b in zip(joined, batched, strict=True) if b]
            one = jax.tree.leaves(a_batched)[0]
            batch = one.shape[batch_axis(one)] // size

            def part(a: jax.Array) -> jax.Array:
                axis = batch_axis(a)
                return jnp.moveaxis(a.reshape(*a.shape[:axis], size, batch, *a.shape[axis + 1 :]), axis, 0)

            outputs = jax.tree.map(part, call(*joined))
        elif all(spec.platform == Platform.XLA for _, spec in choice):
            outputs = jax.vmap(raw, in_axes=jax.tree.map(lambda m: 0 if m else None, mapped))(*args)
        else:
            outputs = _one_by_one(call, args, mapped)
        return outputs

    return call


def _one_by_one(call: Callable[..., Any], args: Any, mapped: Any) -> Any:
    leaves: list[jax.Array]
    leaves, treedef = jax.tree.flatten(args)
    is_mapped = jax.tree.leaves(mapped)

    def one(slices: list[jax.Array]) -> Any:
        rest = iter(slices)
        return call(
            *jax.tree.unflatten(
                treedef, [next(rest) if m else a for a, m in zip(leaves, is_mapped, strict=True)]
            )
        )

    return jax.lax.map(one, [a for a, m in zip(leaves, is_mapped, strict=True) if m])


def _by_platform(
    op: type[Call],
    direction: Direction,
    choice: Choice,
    needs: tuple[bool, ...] | None,
    options: Options,
    args: tuple[Any, ...],
) -> Any:
    functions = [
        (device, functools.partial(_run, op, direction, spec.load(direction), needs, options, device))
        for device, spec in choice
    ]
    if len(functions) == 1:
        return functions[0][1](*args)
    # Traced in a process with several backends: the branch is taken when the function is lowered. Branches return the same
    # dtypes, but kernels may give cotangents in wider ones than their arguments' (see the contract).
    outlines = [jax.eval_shape(function, *args) for _, function in functions]
    wide = jax.tree.map(lambda *found: max((a.dtype for a in found), key=lambda d: d.itemsize), *outlines)

    def widened(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: jax.tree.map(lambda a, dtype: a.astype(dtype), function(*args), wide)

    return jax.lax.platform_dependent(
        *args, **{name: widened(function) for device, function in functions for name in device.lowering_names}
    )


def _run(
    op: type[Call],
    direction: Direction,
    function: Callable[..., Any],
    needs: tuple[bool, ...] | None,
    options: Options,
    device: Device,
    *args: Any,
) -> Any:
    axes = _mesh_axes(args)
    given = without_check(dict(options))
    rule = given.pop("rule", None)
    arrays, others = args[: len(op.arrays())], args[len(op.arrays()) :]
    if direction == "forward" and given.get("accumulate") is not None:
        given["accumulate"] = Totals(given["accumulate"].scale)
    call = op.of(arrays, given.items())
    outputs: Any
    if direction == "forward":
        outputs = function(call, device=device)
    elif direction == "backward":
        assert needs is not None
        wanted = frozenset(name for name, need in zip(op.arrays(), needs, strict=True) if need)
        found = function(call, *others, wanted, device=device)
        outputs = tuple(found.get(name) for name in op.arrays())
    else:
        cotangent, rate, factor, state = others
        assert rule is not None
        outputs = function(call, cotangent, Step(rate, factor, state, rule), device=device)
    # Not all kernels say that their results vary over the mesh axes that their arguments vary over.
    return jax.tree.map(lambda a: _compat.cast_varying(a, axes), outputs) if axes else outputs
