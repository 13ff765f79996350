"""How an op's two array functions become one JAX function.

The only module that knows custom_vjp, custom_vmap, the mesh axes of shard_map and implicit casts. An op
describes itself by an `Operation`; a kernel is a pair of functions on arrays with one batch axis in
front (see `Operation`); `apply` puts them together:

    jit( fold leading axes -> custom_vjp( custom_vmap(forward), custom_vmap(backward) ) -> unfold )
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap

from lutjax import _compat
from lutjax._detection import Detection, cotangent as cotangent_of_margin
from lutjax._fixed_point import FixedPoint, nan_where_apart, without_check
from lutjax.kernels.registry import (
    Device,
    Direction,
    Implementation,
    KernelSpec,
    NoImplementationError,
    Platform,
    devices_of,
    kernel_registry,
)
from lutjax.ops import _watch

# One implementation for each device that may run the call.
Choice = tuple[tuple[Device, KernelSpec], ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Operation:
    """What the machinery needs to know of an op. Kernels implement

        forward(*arguments, device, **options) -> outputs
        backward(saved, cotangent, needs, *, device, **options) -> a cotangent for each argument, or None

    where ``saved = save(arguments, outputs)``, ``needs[i]`` says whether argument ``i`` is
    differentiated (the others' cotangents may be None, and work on them is wasted), the cotangent of an output
    or argument that is a `Detection` is that of its margin, every output has the batch axis in front, and
    `device` is the `lutjax.kernels.registry.Device` that will run the call. Cotangents may come in a wider
    dtype than their arguments; they are rounded once, here. Ops that add up have the option `accumulate`: None,
    or a `lutjax.FixedPoint`. With that one every sum is of its int32 addends, and a cotangent that is a
    sum over samples, detectors or pairs is returned as the int32 total: it is divided here, after the sum over
    devices.

    Attributes:
      name: as in the registry.
      ranks: for each argument its rank without leading axes, or None if it has no leading axes
        (shared by the whole batch).
      save: what backward needs: a tuple. None if the op has no gradient.
      saved_batched: for each part of it, whether it has the batch axis in front.
      table: which argument is a table whose gradient may be wanted in factors, see `lutjax.ops._watch`.
      reduces: the outputs have no batch axis: the op sums over the batch.
      features_first: kernels get and return the arrays that have leading axes as ``[features, batch]``: the batch
        is the last axis of them, not the first. Ranks are 1 then.
    """

    name: str
    ranks: tuple[int | None, ...]
    save: Callable[[tuple[Any, ...], Any], tuple[Any, ...]] | None = None
    saved_batched: tuple[bool, ...] = ()
    table: int | None = None
    reduces: bool = False
    features_first: bool = False

    @property
    def batched(self) -> tuple[bool, ...]:
        return tuple(rank is not None for rank in self.ranks)

    @property
    def batch_axis(self) -> int:
        """The batch axis of a kernel's arrays."""
        return 1 if self.features_first else 0


def apply(
    op: Operation,
    *args: Any,
    implementation: Implementation = None,
    options: Mapping[str, Any],
    feature_axis: int = -1,
) -> Any:
    """Calls an op: chooses its implementation and runs it, with any leading axes.

    `feature_axis`: -1 where they lead; 0 where features come first and these axes follow, of ops whose kernels want
    it so.
    """
    args = jax.tree.map(_as_jax, args)
    kernel_registry.follow_coroutine(
        traced=any(isinstance(a, jax.core.Tracer) for a in jax.tree.leaves(args))
    )
    request = kernel_registry.request(op.name, implementation)
    shapes = _shapes_of_kernel(op, args, feature_axis)
    choice = _choose(op.name, shapes, request, "forward", devices_of(jax.tree.leaves(args)), options)
    static = (op, choice, request, tuple(options.items()))
    watch = _watch.current()
    name = None if watch is None or op.table is None else watch.name(args[op.table])
    try:
        if watch is not None and name is not None:
            return _watched(watch, name, static, args)
        return _compiled(*static, feature_axis=feature_axis)(*args)
    except TypeError as error:
        if not _compat.is_refused_forward_mode(error):
            raise
        raise TypeError(
            f"{op.name}: the op has gradients (jax.grad, jax.vjp) and no forward mode (jax.jvp, jax.jacfwd, "
            f"jax.hessian); use lutjax.reference.{op.name}, which has derivatives of every order in every mode."
        ) from error


def _shapes_of_kernel(op: Operation, args: tuple[Any, ...], feature_axis: int) -> tuple[Any, ...]:
    """Shapes of the arguments as kernels get them, with one batch axis: by these an implementation is chosen."""
    n = 0 if op.features_first else math.prod(_batch_shape(op, args))

    def shape(a: jax.Array, rank: int) -> jax.Array | jax.ShapeDtypeStruct:
        wanted: tuple[int, ...] = (n, *a.shape[a.ndim - rank :])
        if op.features_first:
            features = a.shape[feature_axis]
            wanted = (features, a.size // max(features, 1))
        return a if a.shape == wanted else jax.ShapeDtypeStruct(wanted, a.dtype)

    return tuple(
        arg if rank is None else jax.tree.map(functools.partial(shape, rank=rank), arg)
        for arg, rank in zip(args, op.ranks, strict=True)
    )


def _watched(watch: _watch.Watch, name: str, static: Any, args: tuple[Any, ...]) -> Any:
    """Calls an op whose table is watched: the cotangents of its taps take the place of the table's."""
    op, _, _, options = static
    args = (*args[: op.table], jax.lax.stop_gradient(args[op.table]), *args[op.table + 1 :])
    tap = watch.tap(name)
    y = _compiled(*static)(*args) if tap is None else _compiled(*static, tapped=True)(*tap, *args)
    others = jax.lax.stop_gradient((*args[: op.table], *args[op.table + 1 :]))
    output = _watch.Output(y.shape, y.dtype, _compat.varying_axes(y))
    watch.record(name, _watch.LookUp(op.name, others, options, output))
    return y


def _as_jax(a: Any) -> jax.Array:
    return a if isinstance(a, jax.Array) else jnp.asarray(a)


def _choose(
    name: str,
    args: tuple[Any, ...],
    request: tuple[str, ...],
    direction: Direction,
    devices: tuple[Device, ...],
    options: Mapping[str, Any],
) -> Choice:
    """An implementation for each device; for some of several, if the others have none.

    Only one of several devices will run the call: a forced implementation need not fit them all.
    """
    choice, errors = [], []
    for device in devices:
        try:
            spec = kernel_registry.resolve(
                name, *args, implementation=request, direction=direction, device=device, **options
            )
        except NoImplementationError as error:
            errors.append(error)
        else:
            choice.append((device, spec))
    if not choice:
        raise errors[0]
    return tuple(choice)


@functools.lru_cache(maxsize=4096)
def _compiled(
    op: Operation,
    choice: Choice,
    request: tuple[str, ...],
    options: tuple[tuple[str, Any], ...],
    tapped: bool = False,
    feature_axis: int = -1,
) -> Callable[..., Any]:
    """The op as a jitted function; `tapped`: with two taps as arguments in front, see `_differentiable`."""
    if op.save is None:
        kernel = _kernel(op, "forward", choice, None, options)

        def function(*args: Any) -> Any:
            return kernel(*_common_mesh_axes(args))
    else:
        function = _differentiable(op, choice, request, options, tapped)

    def call_features_first(*args: Any) -> Any:
        batch = next(
            a.shape[1:] if feature_axis == 0 else a.shape[:-1]
            for a, rank in zip(args, op.ranks, strict=True)
            if rank is not None
        )
        n, first = math.prod(batch), feature_axis == 0
        args = tuple(
            a if rank is None else a.reshape(a.shape[0], n) if first else a.reshape(n, a.shape[-1]).T
            for a, rank in zip(args, op.ranks, strict=True)
        )
        y = function(*args)
        return y.reshape(y.shape[0], *batch) if first else y.T.reshape(*batch, y.shape[0])

    def call(*args: Any) -> Any:
        taps, args = (args[:2], args[2:]) if tapped else ((), args)
        batch = _batch_shape(op, args)
        if taps:
            zero, token = taps
            taps = (zero.reshape(math.prod(batch), *zero.shape[len(batch) :]), token)
        outputs = function(*taps, *_fold(op, args, batch))
        if op.reduces:
            return outputs
        return jax.tree.map(lambda a: a.reshape(*batch, *a.shape[1:]), outputs)

    inner = call_features_first if op.features_first else call

    def outer(*args: Any) -> Any:
        specs = _explicit_specs(op, args[2:] if tapped else args, feature_axis)
        if specs is None:
            return inner(*args)
        with _compat.mesh_of(args):
            return jax.sharding.auto_axes(inner, out_sharding=specs)(*args)

    outer.__name__ = f"lutjax_{op.name}"  # what a profile shows
    return jax.jit(outer)


def _explicit_specs(op: Operation, args: tuple[Any, ...], feature_axis: int) -> Any:
    """How outputs lie on a mesh with explicit axes; None where no argument lies on one.

    The compiler divides the work (kernels know nothing of such meshes). Leading axes of outputs lie as those of the
    arguments, and the tables that an update returns as they did.
    """
    if not any(_compat.explicit_axes(a) for a in jax.tree.leaves(args)):
        return None
    if op.reduces:  # an update: its table and state come first
        return jax.tree.map(_compat.spec_of, args[:2])
    axes: list[Any] = []  # of the last leading axis first
    for arg, rank in zip(args, op.ranks, strict=True):
        for a in () if rank is None else jax.tree.leaves(arg):
            spec = (*_compat.spec_of(a), *(None,) * a.ndim)[: a.ndim]
            leading = spec[1:] if op.features_first and feature_axis == 0 else spec[: a.ndim - rank]
            axes += [None] * (len(leading) - len(axes))
            for i, axis in enumerate(reversed(leading)):
                if axes[i] is None and axis not in axes:
                    axes[i] = axis
    features = (None,) if op.features_first and feature_axis == 0 else ()
    return jax.sharding.PartitionSpec(*features, *reversed(axes))


# ------------------------------------------------------------------------------------- leading axes
def _batch_shape(op: Operation, args: tuple[Any, ...]) -> tuple[int, ...]:
    leading = [
        leaf.shape[: leaf.ndim - rank]
        for arg, rank in zip(args, op.ranks, strict=True)
        if rank is not None
        for leaf in jax.tree.leaves(arg)
    ]
    return jnp.broadcast_shapes(*leading)


def folded(op: Operation, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of an op as its kernels get them."""
    return _fold(op, args, _batch_shape(op, args))


def _fold(op: Operation, args: tuple[Any, ...], batch: tuple[int, ...]) -> tuple[Any, ...]:
    """All leading axes as one batch axis."""

    def fold(a: jax.Array, rank: int) -> jax.Array:
        core = a.shape[a.ndim - rank :]
        if a.shape != (*batch, *core):
            a = jnp.broadcast_to(a.reshape((1,) * (len(batch) + rank - a.ndim) + a.shape), (*batch, *core))
        return a.reshape(math.prod(batch), *core)

    return tuple(
        arg if rank is None else jax.tree.map(functools.partial(fold, rank=rank), arg)
        for arg, rank in zip(args, op.ranks, strict=True)
    )


def _mesh_axes(args: Any) -> frozenset[str]:
    return frozenset[str]().union(*(_compat.varying_axes(a) for a in jax.tree.leaves(args)))


def _common_mesh_axes(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Inside shard_map: every argument varies over the mesh axes that any of them varies over."""
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
    """Which of `n` arguments are differentiated."""
    bits = mark.shape[1] - 1
    return tuple(bool(bits >> i & 1) for i in range(n))


def _outline(a: jax.Array) -> jax.Array:
    """An empty array that keeps the shape of `a`, behind an axis of length 0, its dtype and the mesh axes it varies over."""
    return _compat.cast_varying(jnp.zeros((0, *a.shape), a.dtype), _compat.varying_axes(a))


def _outlined(outline: jax.Array) -> jax.ShapeDtypeStruct:
    """Shape and dtype of the array that `_outline` was given."""
    return jax.ShapeDtypeStruct(outline.shape[1:], outline.dtype)


def _differentiable(
    op: Operation,
    choice: Choice,
    request: tuple[str, ...],
    options: tuple[tuple[str, Any], ...],
    tapped: bool,
) -> Callable[..., Any]:
    """The op with its gradient.

    `tapped`: it takes two taps in front, zeros that change nothing. The cotangent of the first, of the output's
    shape, is the output's. That of the second, a scalar, is a number without meaning that is known only when the
    backward pass has read everything it reads: what has to come later can be made to depend on it.
    """
    save = op.save
    assert save is not None
    kernel = _kernel(op, "forward", choice, None, options)
    in_floats = _in_floats(options)
    twin = None if in_floats is None else _kernel(op, "forward", choice, None, in_floats)
    devices = tuple(device for device, _ in choice)
    accumulate: Any = dict(options).get("accumulate")
    n_taps = 2 if tapped else 0

    def run(*args: Any) -> Any:
        outputs = kernel(*args)
        if twin is None or isinstance(outputs, Detection):  # a detection has no sums
            return outputs
        return nan_where_apart(outputs, twin(*args), accumulate)

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
            _choose(op.name, args, request, "backward", devices, dict(options))
        outputs = _without_derivative(op.name, run)(*args)
        return outputs, (_mark(needs), outlines, save(args, outputs))

    def backward(residuals: Any, cotangent: Any) -> tuple[Any, ...]:
        cotangent = _differentiable_part(cotangent)
        if isinstance(cotangent, jax.custom_derivatives.SymbolicZero):
            return (None,) * (n_taps + len(op.ranks))
        cotangents = of_arguments(residuals, cotangent)
        return (cotangent, _known_after(cotangents, cotangent), *cotangents) if tapped else cotangents

    def of_arguments(residuals: Any, cotangent: Any) -> tuple[Any, ...]:
        mark, outlines, saved = residuals
        needs = _marked(mark, len(op.ranks))
        if not any(needs):
            return (None,) * len(op.ranks)
        shapes = jax.tree.map(_outlined, outlines)
        chosen = _choose(op.name, shapes, request, "backward", devices, dict(options))
        every_axis = _mesh_axes(outlines)

        def cotangents(options: tuple[tuple[str, Any], ...]) -> list[Any]:
            kernel = _without_derivative(op.name, _kernel(op, "backward", chosen, needs, options))

            def of_argument(ct: Any, need: bool, outline: Any) -> Any:
                if not need:
                    return None
                part = _differentiable_part(outline)
                others = tuple(sorted(every_axis - _mesh_axes(part)))
                return _sum_over_devices(ct, others, part.dtype, dict(options).get("accumulate"))

            return list(map(of_argument, kernel(saved, cotangent), needs, outlines))

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


def _in_floats(options: tuple[tuple[str, Any], ...]) -> tuple[tuple[str, Any], ...] | None:
    """The options of the floating-point twin of an op whose sums are checked; None if they are not."""
    accumulate = dict(options).get("accumulate")
    if accumulate is None or not accumulate.checked:
        return None
    return tuple({**dict(options), "accumulate": None}.items())


def _known_after(cotangents: tuple[Any, ...], like: jax.Array) -> jax.Array:
    """A scalar that depends on every cotangent, and varies over the mesh axes of `like`."""
    leaves = [a for a in jax.tree.leaves(cotangents) if a.size]
    total = sum((a.ravel()[0].astype(jnp.float32) for a in leaves), jnp.float32(0))
    return _compat.cast_varying(total, _compat.varying_axes(like))


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
@functools.lru_cache(maxsize=4096)
def _kernel(
    op: Operation,
    direction: Direction,
    choice: Choice,
    needs: tuple[bool, ...] | None,
    options: tuple[tuple[str, Any], ...],
) -> Callable[..., Any]:
    """An implementation's function with a rule for vmap. `needs`: of the backward one, which gets it.

    A mapped axis joins the batch where it can: a kernel then needs no rule of its own, and tiles of a
    bounded size stay so. Where it cannot (a table for each element, or the gradient of one), plain JAX is
    mapped by `jax.vmap` and any other kernel runs once for each element.
    """
    if needs is not None:
        foldable = not any(need and not b for need, b in zip(needs, op.batched, strict=True))
        in_batched: Any = (op.saved_batched, True)
        extra: tuple[Any, ...] = (needs,)
    else:
        foldable, in_batched, extra = not op.reduces, op.batched, ()
    axis = op.batch_axis

    def raw(*args: Any) -> Any:
        return _by_platform(choice, direction, extra, without_check(dict(options)), args)

    call = custom_vmap(raw)

    @call.def_vmap
    def rule(size: int, mapped: Any, *args: Any) -> tuple[Any, Any]:
        shared_is_mapped = any(any(jax.tree.leaves(m)) for m, b in _zip_prefix(mapped, in_batched) if not b)
        if foldable and not shared_is_mapped:

            def join(a: jax.Array, is_mapped: bool) -> jax.Array:
                a = a if is_mapped else jnp.broadcast_to(a[None], (size, *a.shape))
                a = jnp.moveaxis(a, 0, axis)
                return a.reshape(*a.shape[:axis], size * a.shape[axis + 1], *a.shape[axis + 2 :])

            def part(a: jax.Array) -> jax.Array:
                a = a.reshape(*a.shape[:axis], size, batch, *a.shape[axis + 1 :])
                return jnp.moveaxis(a, axis, 0)

            joined = _map_prefix(
                lambda arg, m, b: jax.tree.map(join, arg, m) if b else arg, args, mapped, in_batched
            )
            batch = _batch_size(args, mapped, in_batched, axis)
            outputs = jax.tree.map(part, call(*joined))
        elif all(spec.platform == Platform.XLA for _, spec in choice):
            outputs = jax.vmap(raw, in_axes=jax.tree.map(lambda m: 0 if m else None, mapped))(*args)
        else:
            outputs = _one_by_one(call, args, mapped)
        return outputs, jax.tree.map(lambda _: True, outputs)

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


def _batch_size(args: Any, mapped: Any, in_batched: Any, axis: int) -> int:
    """Length of the batch axis of the first argument that has one."""
    for arg, (m, batched) in zip(
        _flat_prefix(args, in_batched), _zip_prefix(mapped, in_batched), strict=True
    ):
        if batched and jax.tree.leaves(arg):
            return jax.tree.leaves(arg)[0].shape[axis + int(jax.tree.leaves(m)[0])]
    raise AssertionError("an op has at least one batched argument")


def _flat_prefix(args: Any, flags: Any) -> list[Any]:
    return [arg for arg, _ in _zip_prefix(args, flags)]


def _zip_prefix(mapped: Any, flags: Any) -> list[tuple[Any, bool]]:
    if isinstance(flags, tuple):
        return [pair for m, f in zip(mapped, flags, strict=True) for pair in _zip_prefix(m, f)]
    return [(mapped, flags)]


def _map_prefix(f: Callable[..., Any], args: Any, mapped: Any, flags: Any) -> Any:
    if isinstance(flags, tuple):
        return tuple(_map_prefix(f, a, m, b) for a, m, b in zip(args, mapped, flags, strict=True))
    return f(args, mapped, flags)


def _by_platform(
    choice: Choice,
    direction: Direction,
    extra: tuple[Any, ...],
    options: dict[str, Any],
    args: tuple[Any, ...],
) -> Any:
    functions = [
        (device, functools.partial(_run, spec.load(direction), extra, {**options, "device": device}))
        for device, spec in choice
    ]
    if len(functions) == 1:
        return functions[0][1](*args)
    # Traced in a process with several backends: the branch is taken when the function is lowered.
    return jax.lax.platform_dependent(
        *args, **{name: function for device, function in functions for name in device.lowering_names}
    )


def _run(function: Callable[..., Any], extra: tuple[Any, ...], options: dict[str, Any], *args: Any) -> Any:
    axes = _mesh_axes(args)
    outputs = function(*args, *extra, **options)
    # Not all kernels say that what they return varies over the mesh axes that their arguments vary over.
    return jax.tree.map(lambda a: _compat.cast_varying(a, axes), outputs) if axes else outputs
