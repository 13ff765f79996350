"""A row: a kernel's name, the call in JAX that serves it, what it is compared with, and the comparison.

Values are compared with a reference in NumPy; cotangents with central differences of that reference, element by element
and in float64, and those of backward kernels with a formula written by hand as well.
"""

import ast
import dataclasses
import inspect
import textwrap
import zlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

VALUE_TOLERANCE = 1e-13  # a few roundings of float64, where sums are short
GRADIENT_TOLERANCE = 1e-8  # central differences with STEP lose about half of the digits
STEP = 6e-6


@dataclasses.dataclass(frozen=True)
class Row:
    """Called, it is the call that serves the kernel.

    ``reference`` is the expected value in NumPy, None where only a backward kernel's differences are known. ``primal`` is
    what the cotangents are those of, also in NumPy; ``wrt`` names its arguments that have one. Without a primal there is
    no gradient, and ``no_gradient`` says why. A backward kernel returns a cotangent for each of ``wrt``.
    """

    name: str
    served: Callable
    shown: Callable
    arguments: dict[str, Any]
    reference: Callable | None
    primal: Callable | None
    wrt: tuple[str, ...]
    backward: bool = False
    no_gradient: str = ""
    value_tolerance: float = VALUE_TOLERANCE
    gradient_tolerance: float = GRADIENT_TOLERANCE

    def __call__(self, *arguments):
        return self.served(*arguments)

    @property
    def code(self) -> list[str]:
        """The statements that serve the kernel, without the word return."""
        *statements, last = self._body()
        return [ast.unparse(statement) for statement in statements] + [ast.unparse(last.value)]

    @property
    def remark(self) -> str:
        return inspect.getdoc(self.shown) or ""

    def _body(self):
        [function] = ast.parse(textwrap.dedent(inspect.getsource(self.shown))).body
        return function.body[1:] if self.remark else function.body

    def checked(self) -> tuple[float | None, float | None]:
        """The errors, which have to be within the tolerances."""
        value, gradient = self.errors()
        assert value is None or value <= self.value_tolerance, f"{self.name}: the value is off by {value:.1e}"
        assert gradient is None or gradient <= self.gradient_tolerance, (
            f"{self.name}: the gradient is off by {gradient:.1e}"
        )
        return value, gradient

    def errors(self) -> tuple[float | None, float | None]:
        """Largest relative errors of the value and of the cotangents, None for what has none. With JAX's own settings,
        except for float64."""
        with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            random = np.random.default_rng(zlib.crc32(self.name.encode()))
            arguments = _drawn(self.arguments, random)
            return (self._backward_errors if self.backward else self._forward_errors)(arguments, random)

    def _forward_errors(self, arguments, random) -> tuple[float, float | None]:
        value = largest_error(jax.jit(self.served)(**arguments), self.reference(**arguments))
        if self.primal is None:
            return value, None
        others = {name: argument for name, argument in arguments.items() if name not in self.wrt}

        @jax.jit
        def cotangents(moved, dy):
            return jax.vjp(lambda moved: self.served(**moved, **others), moved)[1](dy)[0]

        dy = self._cotangent(arguments, random)
        got = cotangents({name: arguments[name] for name in self.wrt}, dy)
        got = tuple(got[name] for name in self.wrt)
        return value, largest_error(got, self._differences(arguments, dy))

    def _backward_errors(self, arguments, random) -> tuple[float | None, float]:
        is_loss = "dy" not in inspect.signature(self.served).parameters
        dy = np.float64(1.0) if is_loss else self._cotangent(arguments, random)
        everything = arguments if is_loss else {**arguments, "dy": dy}
        got = _tuple(jax.jit(self.served)(**everything))
        value = largest_error(got, _tuple(self.reference(**everything))) if self.reference else None
        return value, largest_error(got, self._differences(arguments, dy))

    def _cotangent(self, arguments, random):
        """A random one for each number of the result."""
        return jax.tree.map(lambda y: random.normal(size=np.shape(y)), self.primal(**arguments))

    def _differences(self, arguments: dict[str, Any], cotangent) -> tuple:
        """Return central differences of the primal for each argument that has a cotangent.

        Of copies, because a call that is still running may read the arrays that it was given.
        """
        arguments = arguments | {name: jax.tree.map(np.array, arguments[name]) for name in self.wrt}

        def at(leaf, place, step):
            before = leaf[place]
            leaf[place] = before + step
            value = self.primal(**arguments)
            leaf[place] = before
            return value

        def cotangent_of(leaf):
            found = np.empty(leaf.shape)
            for place in np.ndindex(leaf.shape):
                moved = jax.tree.map(
                    lambda dy, above, below: np.sum(dy * (above - below)),
                    cotangent,
                    at(leaf, place, STEP),
                    at(leaf, place, -STEP),
                )
                found[place] = sum(jax.tree.leaves(moved)) / (2 * STEP)
            return found

        return tuple(jax.tree.map(cotangent_of, arguments[name]) for name in self.wrt)


class Section:
    """The rows of one section, in order; `forward` and `backward` decorate the call that serves a row."""

    def __init__(self, title: str, *remarks: str):
        self.title, self.remarks = title, remarks
        self.rows: list[Row] = []

    def forward(self, reference: Callable, *, name: str = "", no_gradient: str = "", **options):
        """A kernel whose value is that of the reference, and its gradient with respect to every float argument."""
        arguments, options = _split(options)
        moved = tuple(name for name, value in arguments.items() if _floating(value))

        def add(function: Callable) -> Row:
            row = Row(
                name or function.__name__,
                function,
                function,
                arguments,
                reference,
                None if no_gradient else reference,
                () if no_gradient else moved,
                no_gradient=no_gradient,
                **options,
            )
            return self.add(row)

        return add

    def backward(
        self,
        primal: Row | Callable,
        *wrt: str,
        formula: Callable | None = None,
        **options,
    ):
        """A kernel of cotangents: of a row in its place, or of a function in NumPy and arguments of its own.

        With an argument ``dy`` it is given the cotangent of the result; without, the result is a loss.
        """
        arguments, options = _split(options)
        if isinstance(primal, Row):
            arguments, primal = primal.arguments, primal.reference

        def add(function: Callable) -> Row:
            row = Row(
                function.__name__,
                function,
                function,
                arguments,
                formula,
                primal,
                wrt,
                backward=True,
                **options,
            )
            return self.add(row)

        return add

    def add(self, row: Row) -> Row:
        self.rows.append(row)
        return row


@dataclasses.dataclass(frozen=True)
class _Draw:
    """An array that is drawn anew for each row, from the row's own stream."""

    draw: Callable[[np.random.Generator], Any]
    floating: bool = True


def normal(*shape: int, scale: float = 1.0) -> _Draw:
    return _Draw(lambda random: np.array(scale * random.normal(size=shape)))


def positive(*shape: int) -> _Draw:
    return _Draw(lambda random: random.uniform(0.5, 2.0, size=shape))


def distinct(*shape: int) -> _Draw:
    """No two are closer than a difference reaches, so that every maximum is one element's."""
    size = int(np.prod(shape))
    return _Draw(lambda random: (random.permutation(size) - size / 2 + 0.25).reshape(shape) / size)


def indices(below: int, *shape: int) -> _Draw:
    return _Draw(lambda random: random.integers(below, size=shape), floating=False)


def bits(*shape: int) -> _Draw:
    return _Draw(lambda random: random.integers(2, size=shape).astype(bool), floating=False)


def fixed(value) -> _Draw:
    """An argument that has no gradient."""
    return _Draw(lambda random: np.array(value), floating=False)


def key() -> _Draw:
    """Key of a random mask."""
    return _Draw(lambda random: jax.random.key(int(random.integers(2**31))), floating=False)


def largest_error(got, want) -> float:
    """The largest difference over the largest number, of the worst leaf; structure, shapes and kinds have to agree."""
    structures = jax.tree.structure(got), jax.tree.structure(want)
    assert structures[0] == structures[1], f"{structures[0]} where {structures[1]} is expected"
    return float(
        np.max([*map(_leaf_error, jax.tree.leaves(got), jax.tree.leaves(want))])
    )  # not max: it drops NaNs


def _leaf_error(got, want) -> float:
    got, want = np.asarray(got), np.asarray(want)
    assert got.shape == want.shape, f"shape {got.shape} where {want.shape} is expected"
    assert got.dtype.kind == want.dtype.kind, f"{got.dtype} where {want.dtype} is expected"
    assert got.dtype.kind != "f" or got.dtype == np.float64, f"{got.dtype}, a check is in float64"
    assert np.isfinite(want).all()
    assert want.any(), "nothing but zeros is expected: that checks nothing"
    return np.max(np.abs(got - want)) / np.max(np.abs(want))


def _tuple(value) -> tuple:
    return value if isinstance(value, tuple) else (value,)


def _drawn(tree, random):
    return jax.tree.map(lambda draw: draw.draw(random), tree, is_leaf=lambda leaf: isinstance(leaf, _Draw))


def _floating(tree) -> bool:
    return all(draw.floating for draw in jax.tree.leaves(tree, is_leaf=lambda leaf: isinstance(leaf, _Draw)))


def _split(options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arguments of the row, and fields of `Row`."""
    fields = {field.name for field in dataclasses.fields(Row)}
    arguments = {name: value for name, value in options.items() if name not in fields}
    return arguments, {name: value for name, value in options.items() if name in fields}
