"""Rules by which the compiler divides kernels over the devices of a mesh, under plain `jax.jit`.

A kernel in Triton, Pallas or native code is one opaque operation for XLA, which would gather its arguments and run all of it on
every device. A call declares the axes of its arrays by letters (`lutjax.kernels.contract`); with those each device runs the kernel on
its part of the batch (``b``) and of the detectors (``t``), and what lacks one of both is summed over the devices. Updates get
all samples, which are factors of a gradient, and the device's own tables. Every other axis is whole on all devices.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

from lutjax.kernels.contract import Call, Direction

Axes = tuple[str, ...]
"""A letter for each axis of an array."""

_DIVIDED = {"forward": "bt", "backward": "bt", "update": "t"}


def partitioned(
    op: type[Call],
    direction: Direction,
    needs: tuple[bool, ...] | None,
    options: Any,
    function: Callable[..., Any],
    *,
    on_tpu: bool,
) -> Callable[..., Any]:
    """Return a kernel's function of arrays with its rule; without one where the op declares no axes."""
    if not op.letters() or on_tpu:  # JAX has no such rules on TPUs
        return function

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        # Inside of a shard_map there is nothing to divide. On meshes in scope, which may have explicit axes, XLA divides its own operations
        # and gathers for others.
        if jax.device_count() == 1 or not jax.sharding.get_abstract_mesh().empty:
            return function(*args)
        leaves, structure = jax.tree.flatten(args)

        def of_leaves(*leaves: jax.Array) -> Any:
            return function(*jax.tree.unflatten(structure, leaves))

        closed, shapes = jax.make_jaxpr(of_leaves, return_shape=True)(*leaves)
        if closed.effects:  # of interpreters of kernels, which JAX keeps in order
            return function(*args)
        operands = [*_of_operands(op, direction, args), *(("",) * np.ndim(c) for c in closed.consts)]
        results = _of_results(op, direction, needs, shapes)
        given = op.of(args[: len(op.arrays())], options)
        divided = [axis for axis in _DIVIDED[direction] if axis in given.divided()]
        if (
            direction == "forward"
            and getattr(given, "accumulate", None) is not None
            and "t" not in op.letters()["output"]
        ):
            divided = [
                "b"
            ]  # kernels divide their sums of integers: a sum of such parts would not have the same bits
        run = _with_rule(of_leaves, closed.jaxpr, len(leaves), operands, results, tuple(divided))
        return jax.tree.unflatten(jax.tree.structure(shapes), run(*leaves, *closed.consts))

    return call


def first_element(a: jax.Array) -> jax.Array:
    """Return the first element of an array that is not empty."""
    return a.ravel()[0]


def some_element(a: jax.Array) -> jax.Array:
    """Return an element of an array that is not empty, whichever is at hand: on a mesh each device takes one of its own part.

    It serves what depends on the array and not on its values. Devices exchange nothing, so they have different scalars.
    """
    here = jax.sharding.get_abstract_mesh()
    if jax.device_count() == 1 or here.manual_axes or here.explicit_axes:
        return first_element(a)

    def partition(mesh: Any, arg_shapes: Any, result_shape: Any) -> Any:
        (given,) = arg_shapes
        return mesh, first_element, NamedSharding(mesh, PartitionSpec()), (given.sharding,)

    run = custom_partitioning(first_element)
    run.def_partition(partition, sharding_rule=f"{' '.join(f'f{i}' for i in range(a.ndim))} -> ")
    result: jax.Array = run(a)
    return result


def _of_operands(op: type[Call], direction: Direction, args: tuple[Any, ...]) -> Iterator[Axes]:
    letters, n = op.letters(), len(op.arrays())
    for name, array in zip(op.arrays(), args, strict=False):
        for _ in jax.tree.leaves(array):
            yield letters[name]
    if direction == "forward":
        return
    yield letters["output"]  # the cotangent
    if direction == "update":
        _, rate, factor, state = args[n:]
        for _ in jax.tree.leaves((rate, factor)):
            yield ()
        for _ in jax.tree.leaves(state):
            yield ("t", "r", "")


def _of_results(
    op: type[Call], direction: Direction, needs: tuple[bool, ...] | None, shapes: Any
) -> list[Axes]:
    letters = op.letters()
    if direction == "forward":
        return [letters["output"] for _ in jax.tree.leaves(shapes)]
    if direction == "update":
        state = shapes[1]
        return [letters[str(op.table_name)], *(("t", "r", "") for _ in jax.tree.leaves(state))]
    assert needs is not None
    return [
        letters[name]
        for name, need, found in zip(op.arrays(), needs, shapes, strict=True)
        if need and found is not None
    ]


def _with_rule(
    function: Callable[..., Any],
    jaxpr: Any,
    n_leaves: int,
    operands: list[Axes],
    results: list[Axes],
    divided: tuple[str, ...],
) -> Callable[..., Any]:
    """Return the function of a jaxpr whose constants are its last operands, with the rule that divides it.

    Args:
      function: what the jaxpr was made of; parts are traced anew, with their own shapes.
    """

    def evaluate(*arrays: Any) -> Any:
        return tuple(jax.core.eval_jaxpr(jaxpr, arrays[n_leaves:], *arrays[:n_leaves]))

    sizes: dict[str, int] = {}
    shapes = [
        *(v.aval.shape for v in (*jaxpr.invars, *jaxpr.constvars)),
        *(v.aval.shape for v in jaxpr.outvars),
    ]
    for axes, shape in zip((*operands, *results), shapes, strict=True):
        for letter, size in zip(axes, shape, strict=False):  # single probes have one axis less than pairs
            if letter in divided:
                sizes[letter] = max(sizes.get(letter, 0), size)
    numbers = iter(range(10**6))

    def named(axes: Axes, shape: tuple[int, ...]) -> list[str]:
        # An axis that is not divided, or of size 1 where others have more, is a factor of its own.
        return [
            letter if letter in divided and sizes[letter] == size else f"f{next(numbers)}"
            for letter, size in zip(axes, shape, strict=False)
        ]

    factors = [named(axes, shape) for axes, shape in zip((*operands, *results), shapes, strict=True)]
    of_operands, of_results = factors[: len(operands)], factors[len(operands) :]
    every = list(dict.fromkeys(f for one in factors for f in one))
    kept = {f for one in of_results for f in one}
    whole = tuple(f for f in every if f not in divided)
    summed = tuple(f for f in every if f in divided and f not in kept)
    rule = f"{', '.join(' '.join(f) for f in of_operands)} -> {', '.join(' '.join(f) for f in of_results)}"

    def partition(mesh: Any, arg_shapes: Any, result_shapes: Any) -> Any:
        places: dict[str, Any] = {}
        used: set[str] = set()
        for one, shape in zip(factors, (*arg_shapes, *result_shapes), strict=True):
            for factor, place in zip(one, shape.sharding.spec, strict=False):
                names = place if isinstance(place, tuple) else (place,)
                if place and factor in divided and factor not in places and not used & set(names):
                    places[factor] = place
                    used |= set(names)

        def sharding(one: list[str]) -> NamedSharding:
            return NamedSharding(mesh, PartitionSpec(*(places.get(f) for f in one)))

        def over(one: list[str]) -> tuple[str, ...]:
            missing = [places[f] for f in places if f not in one]
            return tuple(
                name for place in missing for name in (place if isinstance(place, tuple) else (place,))
            )

        def part(*arrays: Any) -> Any:
            return tuple(
                jax.lax.psum(y, over(one)) if over(one) else y
                for y, one in zip(jax.tree.leaves(function(*arrays[:n_leaves])), of_results, strict=True)
            )

        return mesh, part, tuple(map(sharding, of_results)), tuple(map(sharding, of_operands))

    run = custom_partitioning(evaluate)
    run.def_partition(partition, sharding_rule=rule, reduction_factors=summed, need_replication_factors=whole)
    return run
