"""Values with a custom derivative, or with an error in some differentiation modes."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import ad, batching, mlir

from lutjax import _compat


def match_mapped_axes(value: jax.Array, *others: jax.Array) -> jax.Array:
    """Return `value`, mapped by any enclosing `jax.vmap` over the other arrays.

    JAX (0.12) returns wrong numbers or a TypeError, under `vmap` of `jit` or `checkpoint`, for a
    mapped custom derivative with an unmapped value.
    """
    for other in others:
        # Compilers keep this selection of equal values, as NaN differs from itself.
        value = jnp.where(other == other, value, value)
    return value


@jax.custom_jvp
def with_derivative_of(value: jax.Array, other: jax.Array) -> jax.Array:
    """Return `value` with the derivative of `other`."""
    return match_mapped_axes(value, other)


@with_derivative_of.defjvp
def _with_derivative_of_jvp(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    return with_derivative_of(*primals), tangents[1]


# Identities as primitives: `jax.vmap`, `jax.jit` and loops keep them until differentiation or
# lowering. Reverse mode transposes `_refused` without evaluation; forward mode evaluates it.
_reverse_only = _compat.Primitive("lutjax_reverse_only")
_refused = _compat.Primitive("lutjax_refused_tangent")
_final = _compat.Primitive("lutjax_final_derivative")


def _refuse(*_: Any, refusal: str, **__: Any) -> Any:
    raise TypeError(refusal)


def _reverse_only_jvp(primals: Any, tangents: Any, *, refusal: str) -> tuple[Any, Any]:
    # The primal stays differentiable: `without_derivative` raises for second derivatives.
    return primals[0], _refused.bind(tangents[0], refusal=refusal)


for _identity in (_reverse_only, _refused, _final):
    _identity.def_abstract_eval(lambda a, *, refusal: a)
for _identity in (_reverse_only, _final):
    _identity.def_impl(lambda a, *, refusal: a)
    batching.defvectorized(_identity)
    mlir.register_lowering(_identity, lambda context, a, *, refusal: [a])

ad.primitive_jvps[_reverse_only] = _reverse_only_jvp
ad.primitive_jvps[_final] = _refuse
ad.deflinear2(_refused, lambda cotangent, tangent, *, refusal: [cotangent])
# Only forward mode evaluates, maps or lowers a tangent.
_refused.def_impl(_refuse)
batching.primitive_batchers[_refused] = _refuse
mlir.register_lowering(_refused, _refuse)

FORWARD_MODE = "no forward mode (jax.jvp, jax.linearize, jax.jacfwd, jax.hessian)"
"""Missing feature named in errors of functions with reverse-mode gradients only."""


def reverse_only(arrays: Any, refusal: str) -> Any:
    """Return a pytree of arrays whose forward-mode derivatives raise a TypeError with this message.

    JAX detects forward mode when it evaluates a tangent: at once in `jax.jvp`, but only at lowering
    in `jax.jit`, `jax.lax.scan` and `jax.linearize`. Pass the arguments of a `jax.custom_vjp`
    through this function to replace JAX's own error in each of these cases.
    """
    return _each_float(lambda a: _reverse_only.bind(a, refusal=refusal), arrays)


def without_derivative(arrays: Any, refusal: str) -> Any:
    """Return a pytree of arrays whose derivatives raise a TypeError with this message."""
    return _each_float(lambda a: _final.bind(a, refusal=refusal), arrays)


def _each_float(function: Callable[[jax.Array], Any], arrays: Any) -> Any:
    return jax.tree.map(
        lambda a: function(a) if jnp.issubdtype(a.dtype, jnp.inexact) else a, arrays
    )
