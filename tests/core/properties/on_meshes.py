"""Drawn calls on a mesh of devices: any axis of any argument may be divided, and the results are those that are defined."""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any

import hypothesis.strategies as st
import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from properties import checking
from properties.strategies import Call

KINDS = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}
AXES = {"data": 2, "detectors": 2}

Places = tuple[tuple[str | None, ...], ...]
"""For each argument, by their names in order: the axis of the mesh that divides each of its axes."""


@functools.cache
def mesh(kind: str) -> Mesh:
    """Return the mesh of four devices with axes of a kind."""
    devices = np.array(jax.devices()[:4]).reshape(*AXES.values())
    return Mesh(devices, tuple(AXES), axis_types=(KINDS[kind],) * len(AXES))


@contextlib.contextmanager
def in_scope(kind: str) -> Iterator[Mesh]:
    """Yield the mesh of a kind, in scope where its axes are explicit."""
    with jax.set_mesh(mesh(kind)) if kind == "explicit" else contextlib.nullcontext():
        yield mesh(kind)


def put(array: Any, places: tuple[str | None, ...], kind: str) -> jax.Array:
    """Return an array that lies on the mesh so."""
    return jax.device_put(array, NamedSharding(mesh(kind), PartitionSpec(*places)))


@st.composite
def places(draw: Any, call: Call) -> Places:
    """Draw where the arguments of a call lie: each axis of the mesh divides one axis of an argument, or none.

    Detectors and samples are drawn more often than other axes: they come first.
    """

    def of(shape: tuple[int, ...]) -> tuple[str | None, ...]:
        found: list[str | None] = [None] * len(shape)
        for name, size in AXES.items():
            free = [i for i, n in enumerate(shape) if n and n % size == 0 and found[i] is None]
            axis = draw(st.sampled_from((*free[:1], *free, None)))
            if axis is not None:
                found[axis] = name
        return tuple(found)

    return tuple(of(np.shape(call.arguments[name])) for name in sorted(call.arguments))


def computed(call: Call, where: Places, kind: str) -> dict[str, np.ndarray]:
    """Return what `checking.computed` does, of arguments that lie on a mesh."""
    names = sorted(call.arguments)
    with in_scope(kind):
        arguments = {name: put(call.arguments[name], at, kind) for name, at in zip(names, where, strict=True)}
        return checking.computed(dataclasses.replace(call, arguments=arguments), f"{kind} mesh")


def check(call: Call, where: Places, kind: str) -> None:
    """Raise AssertionError where results on a mesh differ from the definition by more than rounding."""
    try:
        checking.compare(call, computed(call, where, kind), parts=math.prod(AXES.values()))
    except AssertionError as error:
        names = sorted(call.arguments)
        raise AssertionError(f"on a mesh, {kind}: {dict(zip(names, where, strict=True))}\n{error}") from None
