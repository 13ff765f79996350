"""Elementwise functions with bit-identical results in every program.

Compilers fuse a multiply and an add in some programs only, rewrite quotients, and choose among
several versions of ``exp`` by array size. Fixed-point sums are independent of the addend order,
but float addends vary with these choices. `make_reproducible` removes the variation: each product
loses the last bit of its mantissa before an addition, so it is rounded separately, and functions
are composed of sums and products.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

F = TypeVar("F", bound=Callable[..., Any])

# Exact, or rounded identically by every compiler.
_ARITHMETIC = {
    *("abs", "add", "add_any", "ceil", "clamp", "floor", "max", "min", "neg", "rem", "round"),
    *("sign", "sub"),
}
_MOVES = {
    *("bitcast_convert_type", "broadcast_in_dim", "concatenate", "convert_element_type", "copy"),
    *("expand_dims", "pcast", "pvary", "reshape", "select_n", "slice", "squeeze"),
    *("stop_gradient", "transpose"),
}
_EXACT = _ARITHMETIC | _MOVES
# Operations with a program of their own, whose steps are evaluated one by one.
_CALLS = {
    *("jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call"),
}


def make_reproducible(function: F) -> F:
    """Return an elementwise function with bit-identical results in every program.

    It takes pytrees of arrays, and its results equal `function` up to rounding. In float32,
    quotients, ``exp``, ``exp2``, ``expm1``, ``log``, ``log1p``, ``log2``, ``logistic`` and ``tanh``
    are also the same on every device. Other functions use the compiler's implementation. It is
    slower, because the compiler fuses less.
    """

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
        # Between barriers a compiler sees the same expressions in every program, and no constant
        # arguments.
        leaves = jax.lax.optimization_barrier(jax.tree.leaves(args))
        results = jax.lax.optimization_barrier(_evaluate(closed.jaxpr, closed.consts, leaves))
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return jax.jit(call)  # type: ignore[return-value]


def _evaluate(jaxpr: Any, consts: Any, args: Any) -> list[Any]:
    known = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))

    def value(atom: Any) -> Any:
        # Literals have their value.
        return atom.val if hasattr(atom, "val") else known[atom]

    for eqn in jaxpr.eqns:
        results = _results(eqn, [value(atom) for atom in eqn.invars])
        known.update(zip(eqn.outvars, results, strict=True))
    return [value(atom) for atom in jaxpr.outvars]


def _results(eqn: Any, args: list[Any]) -> list[Any]:
    name, inner = eqn.primitive.name, eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
    if name in _CALLS and hasattr(inner, "consts"):
        return _evaluate(inner.jaxpr, inner.consts, args)
    if name in _FUNCTIONS and eqn.outvars[0].aval.dtype == jnp.float32:
        # Other arguments have the shape of the largest, or are scalars.
        compute, largest = _FUNCTIONS[name], max(args, key=np.ndim)
        args = [
            a if jnp.shape(a) == jnp.shape(largest) else jax.lax.full_like(largest, a) for a in args
        ]
        on_cpu = functools.partial(_compute_once, compute)
        return [jax.lax.platform_dependent(*args, cpu=on_cpu, default=compute)]
    results = eqn.primitive.bind(*args, **eqn.params)
    results = list(results) if eqn.primitive.multiple_results else [results]
    # A product without its last bit is exact in float32, so a fused multiply-add rounds as two
    # operations do.
    return results if name in _EXACT else [_drop_last_bit(a) for a in results]


def _compute_once(function: Callable[..., Any], x: Any, *others: Any) -> Any:
    """Return a function of arrays that is computed once; XLA would recompute it for each use."""
    if not x.size or jax.typeof(x).sharding.mesh.explicit_axes:  # no device has any element
        return function(x, *others)
    # The condition is always true, but unknown at compile time, so XLA cannot inline the branch.
    yes = (jax.lax.bitcast_convert_type(x.ravel()[0], jnp.int32) | 1) != 0
    return jax.lax.cond(yes, function, lambda x, *_: x, x, *others)


def _drop_last_bit(a: Any) -> Any:
    """Return floats without the last bit of their mantissas."""
    if not jnp.issubdtype(a.dtype, jnp.floating) or jnp.finfo(a.dtype).bits < 32:
        return a
    info = jnp.finfo(a.dtype)
    return jax.lax.reduce_precision(a, exponent_bits=info.nexp, mantissa_bits=info.nmant - 1)


# ----------------------------------------------------------------------------- functions of float32
# After S. Moshier's Cephes library. Every product is rounded, so fusion with an add has no effect.
# The first part of ln 2 has so few bits that its products with exponents are exact.
_LN2 = (0.693359375, -2.12194440e-4)
# fmt: off
_EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1,
        5.0000001201e-1)
_LOG = (7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1,
        -1.6668057665e-1, 2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1)
_TANH = (-5.70498872745e-3, 2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1,
         -3.33332819422e-1)
# fmt: on
_TINY = np.finfo(np.float32).tiny  # processors flush or keep smaller numbers
# Arguments whose exponentials are normal numbers.
_LEAST, _LARGEST = np.float32(-87.33654), np.float32(88.72283)


def _times(a: Any, b: Any) -> Any:
    return _drop_last_bit(a * b)


def _select(condition: Any, a: Any, b: Any) -> Any:
    a, b = (x if jnp.ndim(x) else jax.lax.full_like(condition, x, jnp.float32) for x in (a, b))
    return jax.lax.select(condition, a, b)


def _polynomial(coefficients: tuple[float, ...], x: Any) -> Any:
    total = x * np.float32(coefficients[0])
    for c in coefficients[1:-1]:
        total = _times(_drop_last_bit(total) + np.float32(c), x)
    return _drop_last_bit(total) + np.float32(coefficients[-1])


def _small_exponential(r: Any) -> Any:
    """Return ``exp(r) - 1`` for ``|r| < 0.35``."""
    return _times(_polynomial(_EXP, r), r * r) + r


def _scale_by_power(y: Any, n: Any) -> Any:
    """Return ``y * 2**n``, for integers from -126 to 128."""
    # A factor 2 and 2**(n - 1), because 2**128 is no float32.
    power = jax.lax.bitcast_convert_type((n.astype(jnp.int32) + 126) << 23, jnp.float32)
    return y * np.float32(2) * power


def _quotient(a: Any, b: Any) -> Any:
    """Return ``a / b``; division instructions of processors differ in the last digits."""
    a, b = (_select(jax.lax.abs(x) < _TINY, x * np.float32(0), x) for x in (a, b))
    (m, of_a), (n, of_b) = _magnitude(a), _magnitude(b)
    # The best linear start for m in [0.5, 1), wrong by at most 1/17. Each Newton step squares the
    # error: after three it is below the rounding of float32.
    r = np.float32(48 / 17) - _times(n, np.float32(32 / 17))
    for _ in range(3):
        r = r + _times(r, np.float32(1) - _times(n, r))
    exponent = of_a - of_b
    # Two factors, because the power itself may lie outside the normal numbers.
    half = exponent >> 1
    powers = [
        jax.lax.bitcast_convert_type((n + 127) << 23, jnp.float32) for n in (half, exponent - half)
    ]
    q = _times(m, r) * powers[0] * powers[1]
    q = _select(q < _TINY, 0, q)
    q = _select((a < 0) != (b < 0), -q, q)
    # Zeros, infinities and NaN have exact quotients on every processor.
    known = functools.reduce(jnp.logical_and, [(abs(x) > 0) & (abs(x) < np.inf) for x in (a, b)])
    return _select(known, q, a / b)


def _magnitude(x: Any) -> tuple[Any, Any]:
    """Return m in [0.5, 1) and an integer n with ``|x| = m 2**n``, for a normal number."""
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    m = jax.lax.bitcast_convert_type((bits & 0x7FFFFF) | (126 << 23), jnp.float32)
    return m, ((bits >> 23) & 0xFF) - 126


def _exp(x: Any) -> Any:
    inside = jax.lax.clamp(_LEAST, x, _LARGEST)
    n = jax.lax.floor(_times(inside, np.float32(1.44269504088896341)) + np.float32(0.5))
    # ln 2 in two parts: the first product is exact, the second corrects its error.
    rest = inside - n * np.float32(_LN2[0]) - _times(n, np.float32(_LN2[1]))
    result = _scale_by_power(_small_exponential(rest) + np.float32(1), n)
    return _select(x > _LARGEST, np.inf, _select(x < _LEAST, 0, result))


def _exp2(x: Any) -> Any:
    inside = jax.lax.clamp(np.float32(-126), x, np.float32(128))
    n = jax.lax.floor(inside + np.float32(0.5))
    rest = _times(inside - n, np.float32(0.6931471805599453))
    result = _scale_by_power(_small_exponential(rest) + np.float32(1), n)
    return _select(x < np.float32(-126), 0, result)


def _expm1(x: Any) -> Any:
    small = jax.lax.clamp(np.float32(-0.35), x, np.float32(0.35))
    return _select(abs(x) < np.float32(0.35), _small_exponential(small), _exp(x) - np.float32(1))


def _log(x: Any) -> Any:
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    exponent = ((bits >> 23) - 126).astype(jnp.float32)
    m = jax.lax.bitcast_convert_type((bits & 0x7FFFFF) | (126 << 23), jnp.float32)  # in [0.5, 1)
    low = m < np.float32(0.7071067811865476)
    f = _select(low, m + m, m) - np.float32(1)
    exponent = _select(low, exponent - np.float32(1), exponent)
    square = _times(f, f)
    y = _times(_times(_polynomial(_LOG, f), square), f)
    y = y + _times(exponent, np.float32(_LN2[1])) - square * np.float32(0.5)
    y = f + y + exponent * np.float32(_LN2[0])
    y = _select(x == np.inf, x, y)
    zero = jax.lax.abs(x) < _TINY  # as of processors that have no subnormal numbers
    return _select(zero, -np.inf, _select(x > 0, y, np.nan))


def _log1p(x: Any) -> Any:
    whole = _drop_last_bit(np.float32(1) + x)
    # The rounding error of 1 + x is known exactly, and its first-order effect on the logarithm is
    # added.
    lost = x - (whole - np.float32(1))
    result = _log(whole) + _quotient(lost, whole)
    return _select((whole == np.inf) | (whole == 0), _log(whole), result)


def _log2(x: Any) -> Any:
    return _times(_log(x), np.float32(1.4426950408889634))


def _logistic(x: Any) -> Any:
    e = _exp(-jax.lax.abs(x))  # exp(x) would overflow
    return _quotient(_select(x < 0, e, jnp.ones_like(e)), np.float32(1) + e)


def _tanh(x: Any) -> Any:
    a = jax.lax.abs(x)
    square = _times(x, x)
    # A polynomial below 0.625, where the difference of nearly equal numbers would lose digits.
    small = _times(_times(_polynomial(_TANH, square), square), x) + x
    e = _exp(a + a)
    large = np.float32(1) - _quotient(jnp.full_like(e, 2), e + np.float32(1))
    return _select(a < np.float32(0.625), small, _select(x < 0, -large, large))


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "div": _quotient,
    "exp": _exp,
    "exp2": _exp2,
    "expm1": _expm1,
    "log": _log,
    "log1p": _log1p,
    "log2": _log2,
    "logistic": _logistic,
    "tanh": _tanh,
}
