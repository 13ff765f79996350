"""Gradient of ops: `jax.custom_vjp` with a forward and a backward kernel.

JAX may trace a forward rule several times for one call: once for each set of differentiated
arguments, and again under other transformations. It keeps only the residual *structure* from the
last trace, and may pass it to the backward rule with *leaves* from an earlier trace. The structure
must therefore be the same in every trace: it must not depend on the differentiated arguments,
shapes, dtypes or mesh axes. These properties are read from leaf shapes and types, which always
belong to the right trace. Both kinds of leaves below are empty and cost nothing. (Detection bits
are static and part of the call: all traces of one call share them.)
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap

from lutjax import _compat, _meshes
from lutjax.dispatch._batching import kernel
from lutjax.dispatch._partition import first_element, some_element
from lutjax.dispatch._plan import Plan
from lutjax.dispatch.contract import Call
from lutjax.values._derivatives import FORWARD_MODE, reverse_only, without_derivative
from lutjax.values._detection import Detection, cotangent as cotangent_of_margin
from lutjax.values._fixed_point import FixedPoint, nan_where_apart


def _mark(needs: tuple[bool, ...]) -> jax.Array:
    """Return an empty array whose shape encodes the differentiated arguments; see `_read_marks`."""
    # A shape is known at every trace, unlike values; and the number of leaves must not vary.
    return jnp.zeros((0, sum(need << i for i, need in enumerate(needs)) + 1), jnp.int8)


def _read_marks(mark: jax.Array, n: int) -> tuple[bool, ...]:
    """Return a flag for each of `n` arguments: True if it is differentiated."""
    bits = mark.shape[1] - 1
    return tuple(bool(bits >> i & 1) for i in range(n))


def _outline(a: jax.Array) -> jax.Array:
    """Return an empty array that keeps shape (behind a 0 axis), dtype and varying axes."""
    return _compat.cast_varying(jnp.zeros((0, *a.shape), a.dtype), _compat.varying_axes(a))


def _read_outline(outline: jax.Array) -> jax.ShapeDtypeStruct:
    """Return the shape and dtype encoded by `_outline`."""
    return jax.ShapeDtypeStruct(outline.shape[1:], outline.dtype)


def make_differentiable(plan: Plan, tapped: bool) -> Callable[..., Any]:
    """Return the differentiable op as a function of its call and taps.

    Outputs without a detector axis are summed over the mesh axes that divide detectors.

    Args:
      tapped: True if there are two taps, zeros with no effect on the result. The first has the
          output's shape and receives its cotangent. The second receives a dependency token: a
          scalar that is available once the backward pass has read the table. Later operations can
          depend on it. Without taps the second argument is None.
    """
    op, forward_kernel = plan.op, kernel(plan, "forward")
    of_every_order = (
        f"use lutjax.reference.{op.op}, which has derivatives of every order in every mode."
    )
    no_forward_mode = (
        f"{op.op}: the op has gradients (jax.grad, jax.vjp) and {FORWARD_MODE}; {of_every_order}"
    )
    no_second = (
        f"{op.op}: its gradient is differentiated again, and the op has no second derivative; "
        f"{of_every_order}"
    )

    def convert_totals(call: Call) -> Any:
        outputs = forward_kernel(call)
        if call.accumulate is None or op.table_name is None or outputs.dtype != np.int32:
            return outputs
        # Kernels return integer totals: the parts of all devices are summed before they are
        # divided.
        return call.accumulate.total(outputs, getattr(call, op.table_name).dtype)

    def run(call: Call) -> Any:
        outputs, accumulate = convert_totals(call), call.accumulate
        if accumulate is None or not accumulate.checked or isinstance(outputs, Detection):
            return outputs  # a detection has no sums
        in_floats = convert_totals(call.replace(accumulate=None))
        return nan_where_apart(outputs, in_floats, accumulate)

    @jax.custom_vjp
    def differentiable(call: Call, taps: Any) -> Any:
        return run(_meshes.varying_alike(call))

    def forward(call: Call, taps: Any) -> tuple[Any, Any]:
        # symbolic_zeros: each leaf says whether it is differentiated.
        # Read before the values replace the leaves.
        needs = tuple([any(p.perturbed for p in jax.tree.leaves(a)) for a in call.values()])
        call = jax.tree.map(lambda p: p.value, call)
        outlines = jax.tree.map(_outline, call)
        call = _meshes.varying_alike(call)
        if any(needs):  # a call that has no gradient fails here, not in the backward pass
            plan.backward(call)
        outputs = run(without_derivative(call, no_second))
        return outputs, (_mark(needs), outlines, call.residuals(outputs))

    def backward(residuals: Any, cotangent: Any) -> tuple[Any, Any]:
        cotangent = _differentiable_part(cotangent)
        if isinstance(cotangent, jax.custom_derivatives.SymbolicZero):
            return None, None
        axes = _meshes.joint_varying_axes(residuals[1])
        cotangents = pull_back(residuals, _compat.cast_varying(cotangent, axes))
        if not tapped:
            return cotangents, None
        return cotangents, (cotangent, _dependency_token(cotangents, axes, plan.has_rules))

    def pull_back(residuals: Any, cotangent: Any) -> Call | None:
        mark, outlines, saved = residuals
        needs = _read_marks(mark, len(op.arrays()))
        if not any(needs):
            return None
        backward_kernel = kernel(
            plan.backward(jax.tree.map(_read_outline, outlines)), "backward", needs
        )
        every_axis = _meshes.joint_varying_axes(outlines)

        def cotangents(saved: Call) -> list[Any]:
            def sum_cotangent(ct: Any, need: bool, outline: Any) -> Any:
                if not need:
                    return None
                part = _differentiable_part(outline)
                others = tuple(sorted(every_axis - _meshes.joint_varying_axes(part)))
                return _sum_over_devices(ct, others, part.dtype, saved.accumulate)

            found = backward_kernel(*without_derivative((saved, cotangent), no_second))
            return list(map(sum_cotangent, found, needs, outlines.values()))

        found = cotangents(saved)
        if saved.accumulate is not None and saved.accumulate.checked:
            check = functools.partial(nan_where_apart, accumulate=saved.accumulate)
            found = jax.tree.map(check, found, cotangents(saved.replace(accumulate=None)))
        of_arrays = [
            cotangent_of_margin(ct, outline.bits)
            if isinstance(outline, Detection) and ct is not None
            else ct
            for ct, outline in zip(found, outlines.values(), strict=True)
        ]
        return op.from_arrays(of_arrays, outlines.options())

    differentiable.defvjp(forward, backward, symbolic_zeros=True)

    def in_reverse(call: Call, taps: Any) -> Any:
        return differentiable(reverse_only(call, no_forward_mode), taps)

    return in_reverse


def _dependency_token(cotangents: Any, axes: frozenset[str], has_rules: bool) -> jax.Array:
    """Return the dependency token, a scalar that depends on all cotangents.

    It varies over the mesh axes `axes`.
    """
    element = _some_element if has_rules else first_element
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
    """Return a kernel's cotangent in its argument's dtype, summed over the mesh axes.

    The argument does not vary over these axes; other arguments do.

    The sum is the transpose of their common cast. It is computed here because integers must be
    summed before division.
    """
    if axes and accumulate is not None and ct.dtype != np.int32:
        ct = accumulate.quantize(ct)
    in_integers = ct.dtype == np.int32
    ct = ct if in_integers else ct.astype(dtype)
    ct = jax.lax.psum(ct, axes) if axes else ct
    return accumulate.total(ct, dtype) if in_integers and accumulate is not None else ct


def _differentiable_part(a: Any) -> Any:
    return a.margin if isinstance(a, Detection) else a
