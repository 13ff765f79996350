"""Values with a custom derivative in every mode of differentiation, or with an error in some modes."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import ad, batching, mlir

from lutjax import _compat


def mapped_as(value: jax.Array, *others: jax.Array) -> jax.Array:
    """Return `value`, mapped by a `jax.vmap` in scope as soon as one of the others is.

    JAX (0.12) returns wrong numbers or a TypeError, under `vmap` of `jit` or `checkpoint`, for a custom derivative that is
    mapped where its value is not.
    """
    for other in others:
        value = jnp.where(other == other, value, value)  # compilers leave the value alone
    return value


@jax.custom_jvp
def with_derivative_of(value: jax.Array, other: jax.Array) -> jax.Array:
    """Return `value`, with the derivative of `other`."""
    return mapped_as(value, other)


@with_derivative_of.defjvp
def _with_derivative_of_jvp(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    return with_derivative_of(*primals), tangents[1]


# Identities. They are primitives, which `jax.vmap`, `jax.jit` and loops keep until a derivative is taken or the program is lowered.
_reverse_only = _compat.Primitive("lutjax_reverse_only")
_refused = _compat.Primitive("lutjax_refused_tangent")  # reverse mode transposes it, and never evaluates it
_final = _compat.Primitive("lutjax_final_derivative")


def _refuse(*_: Any, refusal: str, **__: Any) -> Any:
    raise TypeError(refusal)


def _reverse_only_jvp(primals: Any, tangents: Any, *, refusal: str) -> tuple[Any, Any]:
    # The primal stays differentiable: `without_derivative` has the error for second derivatives.
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
# Whatever evaluates, maps or lowers a tangent is forward mode.
_refused.def_impl(_refuse)
batching.primitive_batchers[_refused] = _refuse
mlir.register_lowering(_refused, _refuse)

FORWARD_MODE = "no forward mode (jax.jvp, jax.linearize, jax.jacfwd, jax.hessian)"
"""What errors say that something lacks, which has gradients alone."""


def reverse_only(arrays: Any, refusal: str) -> Any:
    """Return a pytree of arrays, of which forward-mode derivatives raise a TypeError with this message.

    JAX detects forward mode when it evaluates a tangent: at once in `jax.jvp`, but only when the program is lowered in `jax.jit`, `jax.lax.scan` and
    `jax.linearize`. Pass the arguments of a `jax.custom_vjp` through this function to replace JAX's own error in each of these cases.
    """
    return _each_float(lambda a: _reverse_only.bind(a, refusal=refusal), arrays)


def without_derivative(arrays: Any, refusal: str) -> Any:
    """Return a pytree of arrays, of which derivatives raise a TypeError with this message."""
    return _each_float(lambda a: _final.bind(a, refusal=refusal), arrays)


def _each_float(function: Callable[[jax.Array], Any], arrays: Any) -> Any:
    return jax.tree.map(lambda a: function(a) if jnp.issubdtype(a.dtype, jnp.inexact) else a, arrays)
