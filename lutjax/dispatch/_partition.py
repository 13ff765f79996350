"""Partitioning rules that divide kernels over a device mesh under plain `jax.jit`.

XLA treats a Triton, Pallas or native kernel as one opaque operation: it would gather the arguments
and run the whole kernel on every device. A call therefore names its array axes by letters
(`lutjax.dispatch.contract`). With these, each device runs the kernel on its part of the batch
(``b``) and the detectors (``t``), and results without one of these axes are summed over the
devices. Updates receive all samples, the sparse gradient, and the device's own tables. Every other
axis is whole on all devices. With detector groups, each device takes the groups of its own
detectors.

`partition_kernel` passes the rule to the compiler. On a mesh with explicit axes, where types carry
the array layout, `Layout` builds a `jax.shard_map` from it. In both cases each device runs
`on_part`.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from lutjax import _compat, _meshes
from lutjax.dispatch.contract import Call, Direction

Axes = tuple[str, ...]
"""One letter for each array axis."""

Place = str | tuple[str, ...] | None
"""Mesh axes that divide an array axis."""

_DIVIDED: dict[str, Axes] = {"forward": ("b", "t"), "backward": ("b", "t"), "update": ("t",)}


def partition_kernel(
    op: type[Call],
    direction: Direction,
    needs: tuple[bool, ...] | None,
    function: Callable[..., Any],
) -> Callable[..., Any]:
    """Return a kernel's function with its partitioning rule.

    If the op declares no axes, the function has no rule.

    Args:
      function: takes the kernel's arguments, and the mesh axes that divide detectors.
    """

    def call(*args: Any) -> Any:
        here = jax.sharding.get_abstract_mesh()
        # In a shard_map there is nothing to divide.
        whole = jax.device_count() == 1 or here.manual_axes or here.explicit_axes
        if whole or not op.letters():
            return function(*args)
        leaves, structure = jax.tree.flatten(args)

        def call_leaves(*leaves: jax.Array, over: tuple[str, ...] = ()) -> Any:
            return function(*jax.tree.unflatten(structure, leaves), over=over)

        # Traced here for its effects and output shapes; each part is traced again by the compiler.
        closed, shapes = jax.make_jaxpr(call_leaves, return_shape=True)(*leaves)
        if closed.effects:  # of interpreters of kernels, which JAX keeps in order
            return function(*args)
        operands = [*_operand_axes(direction, *args), *(("",) * np.ndim(c) for c in closed.consts)]
        results = _result_axes(op, direction, needs, shapes)
        run = _with_rule(
            call_leaves,
            closed.jaxpr,
            len(leaves),
            operands,
            results,
            _DIVIDED[direction],
            direction == "forward",
        )
        return jax.tree.unflatten(jax.tree.structure(shapes), run(*leaves, *closed.consts))

    return call


def first_element(a: jax.Array) -> jax.Array:
    """Return the first element of a nonempty array."""
    return a.ravel()[0]


def some_element(a: jax.Array) -> jax.Array:
    """Return any element of a nonempty array; on a mesh, each device takes one from its own part.

    Use it to depend on an array but not on its values. Devices exchange nothing, so their scalars
    differ.
    """
    here = jax.sharding.get_abstract_mesh()
    if jax.device_count() == 1 or here.manual_axes or here.explicit_axes:
        return first_element(a)

    def partition(mesh: Any, arg_shapes: Any, result_shape: Any) -> Any:
        (given,) = arg_shapes
        return mesh, first_element, NamedSharding(mesh, PartitionSpec()), (given.sharding,)

    run = custom_partitioning(first_element)
    rule = f"{' '.join(f'f{i}' for i in range(a.ndim))} -> "
    run.def_partition(partition, sharding_rule=rule, decode_shardings=False)  # see _places_of
    result: jax.Array = run(a)
    return result


def _operand_axes(direction: Direction, call: Call, *others: Any) -> Iterator[Axes]:
    letters = call.letters()
    for name, array in zip(call.arrays(), call.values(), strict=True):
        for _ in jax.tree.leaves(array):
            yield letters[name]
    if direction == "forward":
        return
    yield letters["output"]  # the cotangent
    for a in jax.tree.leaves(others[1:]):  # an update's step
        yield ("t", "r", "") if a.ndim else ()


def _result_axes(
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
    divided: Axes,
    summed_by_kernel: bool,
) -> Callable[..., Any]:
    """Return a jaxpr's function with its partitioning rule; the jaxpr's constants come last.

    Args:
      function: source of the jaxpr. It is traced again for each part, with the part's shapes.
      summed_by_kernel: True if the kernel sums its results over the devices.
    """

    def evaluate(*arrays: Any) -> Any:
        return tuple(jax.core.eval_jaxpr(jaxpr, arrays[n_leaves:], *arrays[:n_leaves]))

    variables = (*jaxpr.invars, *jaxpr.constvars, *jaxpr.outvars)
    shapes = [v.aval.shape for v in variables]
    factors = _name_factors([*operands, *results], shapes, divided)
    of_operands, of_results = factors[: len(operands)], factors[len(operands) :]
    every = dict.fromkeys(f for one in factors for f in one)
    kept = {f for one in of_results for f in one}
    in_float64 = bool(jax.config.jax_enable_x64)  # type: ignore[attr-defined]

    def partition(mesh: Any, arg_shapes: Any, result_shapes: Any) -> Any:
        places = _choose_places(mesh, (*arg_shapes, *result_shapes), factors, divided)

        def sharding(one: list[str]) -> NamedSharding:
            return NamedSharding(mesh, PartitionSpec(*(places.get(f) for f in one)))

        def sum_parts(y: jax.Array, one: list[str]) -> jax.Array:
            axes = tuple(name for f in places if f not in one for name in _names(places[f]))
            return jax.lax.psum(y, axes) if axes and not summed_by_kernel else y

        def run_on_shards(*arrays: Any) -> Any:
            # A mesh in scope is that of the whole program; here there is one device's part. JAX may
            # ask in a thread of its own, which knows no `jax.enable_x64` of the caller's.
            with jax.enable_x64(in_float64), jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
                found = function(*arrays[:n_leaves], over=_names(places.get("t")))
                return tuple(map(sum_parts, jax.tree.leaves(found), of_results))

        shardings = [tuple(map(sharding, of)) for of in (of_results, of_operands)]
        return mesh, run_on_shards, *shardings

    run = custom_partitioning(evaluate)
    run.def_partition(
        partition,
        decode_shardings=False,  # see _places_of
        sharding_rule=" -> ".join(
            ", ".join(" ".join(one) for one in of) for of in (of_operands, of_results)
        ),
        reduction_factors=tuple(f for f in every if f in divided and f not in kept),
        need_replication_factors=tuple(f for f in every if f not in divided),
    )
    return run


def _name_factors(
    axes: list[Axes], shapes: list[tuple[int, ...]], divided: Axes
) -> list[list[str]]:
    """Return the factor of each array axis, by which the compiler knows equal axes.

    Factors of divided axes are their letters. An axis that is not divided, or has size 1 where
    other arrays have more, is a factor of its own.
    """
    # Not strict, also below: single probes have one axis less than pairs.
    pairs = [list(zip(*one, strict=False)) for one in zip(axes, shapes, strict=True)]
    sizes: dict[str, int] = {}
    for letter, size in (pair for one in pairs for pair in one):
        sizes[letter] = max(sizes.get(letter, 0), size)
    numbers = itertools.count()

    def name(letter: str, size: int) -> str:
        whole = letter not in divided or sizes[letter] != size
        return f"f{next(numbers)}" if whole else letter

    return [[name(letter, size) for letter, size in one] for one in pairs]


def _choose_places(
    mesh: Mesh, arrays: tuple[Any, ...], factors: list[list[str]], divided: Axes
) -> dict[str, Place]:
    """Return the mesh axes that divide each divided factor.

    The first array that the compiler divides along a factor counts, and each mesh axis divides one
    factor only.
    """
    places: dict[str, Place] = {}
    used: set[str] = set()
    for one, array in zip(factors, arrays, strict=True):
        for factor, place in zip(one, _places_of(array, mesh), strict=True):
            names = set(_names(place))
            if place and factor in divided and factor not in places and not used & names:
                places[factor] = place
                used |= names
    return places


def _places_of(array: jax.ShapeDtypeStruct, mesh: Mesh) -> tuple[Place, ...]:
    """Return the mesh axes that divide each array axis into equal parts in the compiler's sharding.

    Arrays computed inside a program may have other shardings: a reshape may divide an axis by an
    unnamed part of a mesh axis (which JAX cannot represent, and fails), or the last device may have
    padding where a size is no multiple of the number of devices, and a kernel would read the
    padding as samples or detectors. Kernels receive such axes whole.
    """
    sharding: Any = array.sharding
    parts = sharding.devices_indices_map((mesh.size,) * len(array.shape))
    starts = np.array([[s.start or 0 for s in parts[device]] for device in mesh.devices.flat], int)

    def find_mesh_axes(n: int, starts: np.ndarray) -> Place:
        """Return the mesh axes that divide an axis, given each device's start index."""
        along = {
            i: int(starts.take(1, i).flat[0]) for i, size in enumerate(starts.shape) if size > 1
        }
        axes = sorted((i for i, step in along.items() if step), key=lambda i: -along[i])
        sizes = [mesh.devices.shape[i] for i in axes]
        n_parts = math.prod(sizes)
        equal = np.arange(n_parts).reshape(sizes) * (mesh.size // n_parts)
        others = starts.ndim - len(axes)
        found = np.moveaxis(starts, axes, range(len(axes)))
        if n % n_parts or np.any(found != equal.reshape(*sizes, *(1,) * others)):
            return None
        return tuple(mesh.axis_names[i] for i in axes) or None

    return tuple(
        find_mesh_axes(n, starts[:, i].reshape(mesh.devices.shape))
        for i, n in enumerate(array.shape)
    )


def _names(place: Place) -> tuple[str, ...]:
    return () if place is None else (place,) if isinstance(place, str) else tuple(place)


def run_shard(
    direction: Direction, call: Call, *others: Any, over: tuple[str, ...], run: Callable[..., Any]
) -> Any:
    """Return a kernel's result for one device's detectors, in the groups of all devices.

    Outputs without a detector axis are summed over the devices. If no group spans two devices, each
    device sends its own groups' outputs, half the traffic of a sum.

    Args:
      call: with the device's part of each detector axis, and all groups.
      *others: the kernel's other arguments: a cotangent has all groups.
      over: mesh axes that divide detectors.
      run: the kernel, a function of these arguments.
    """
    call = call.select_shard(jax.lax.axis_index(over))
    sums_outputs = direction == "forward" and "t" not in call.letters()["output"]
    if getattr(call, "groups", 1) == 1:
        outputs = run(call, *others)
        return jax.lax.psum(outputs, over) if sums_outputs else outputs
    own = _OwnGroups.find(call, over)
    local = own.take_call(call)
    if direction == "forward":
        outputs = run(local)
        if not sums_outputs:
            return own.scatter("output", own.output_shape(outputs), outputs)
        return own.sum_outputs(outputs, over)
    cotangent, *step = others
    found = run(local, own.take("output", cotangent), *step)
    if direction == "update":
        return found
    return tuple(
        None if y is None else own.scatter(name, jax.tree.leaves(array)[0].shape, y)
        for name, array, y in zip(call.arrays(), call.values(), found, strict=True)
    )


@dataclasses.dataclass(frozen=True)
class _OwnGroups:
    """Groups to which one device's detectors belong, numbered from 0 on this device.

    A device may have several whole groups, one, or a part of one. In the last case other devices
    have the rest of the same group.

    Attributes:
      call: with the device's detectors, and all groups.
      ids: number of each own group among all groups, int32 ``[own groups]``.
      whole: True if this device has all detectors of its groups.
    """

    call: Call
    ids: jax.Array
    whole: bool

    @property
    def n_all(self) -> int:
        found: int = self.call.groups  # type: ignore[attr-defined]
        return found

    @classmethod
    def find(cls, call: Call, over: tuple[str, ...]) -> "_OwnGroups":
        n_detectors = next(
            leaf.shape[call.letters()[name].index("t")]
            for name, array in zip(call.arrays(), call.values(), strict=True)
            if "t" in call.letters()[name]
            for leaf in jax.tree.leaves(array)
        )
        n_groups: int = call.groups  # type: ignore[attr-defined]
        group_size = n_detectors * jax.lax.axis_size(over) // n_groups
        # Whole groups, or the largest parts of equal size that no group boundary cuts.
        part = math.gcd(group_size, n_detectors)
        first = jax.lax.axis_index(over) * n_detectors
        starts = first + part * jnp.arange(n_detectors // part, dtype=jnp.int32)
        return cls(call, starts // group_size, part == group_size)

    def take_call(self, call: Call) -> Call:
        """Return the call with the own groups of each array that has groups."""
        arrays = [
            jax.tree.map(functools.partial(self.take, name), array)
            for name, array in zip(call.arrays(), call.values(), strict=True)
        ]
        return call.from_arrays(arrays, call.options()).replace(groups=len(self.ids))

    def take(self, name: str, a: jax.Array) -> jax.Array:
        """Return the own groups of an array with all groups."""
        axis = self._axis(name, a.shape)
        if axis is None:
            return a
        n_all, n_own = self.n_all, len(self.ids)
        before, size, after = a.shape[:axis], a.shape[axis] // n_all, a.shape[axis + 1 :]
        by_group = a.reshape(*before, n_all, size, *after)
        own = jnp.take(by_group, self.ids, axis=axis, mode="clip")
        return own.reshape(*before, n_own * size, *after)

    def scatter(self, name: str, shape: tuple[int, ...], y: jax.Array) -> jax.Array:
        """Return an array with all groups that has the own groups' values, and zeros elsewhere.

        Args:
          shape: an array's shape with all groups.
        """
        axis = self._axis(name, shape)
        if axis is None:
            return y
        n_all, n_own = self.n_all, len(self.ids)
        before, size, after = y.shape[:axis], y.shape[axis] // n_own, y.shape[axis + 1 :]
        own = jnp.moveaxis(y.reshape(*before, n_own, size, *after), axis, 0)
        zeros = _compat.zeros_varying(y, (n_all, *own.shape[1:]), y.dtype)
        # Added, not stored: two parts of one group have the same id.
        every = jnp.moveaxis(zeros.at[self.ids].add(own), 0, axis)
        return every.reshape(*before, n_all * size, *after)

    def sum_outputs(self, outputs: jax.Array, over: tuple[str, ...]) -> jax.Array:
        """Return all groups' outputs, summed over the devices."""
        shape = self.output_shape(outputs)
        axis = self._axis("output", shape)
        if axis is not None and self.whole:
            # In a shard_map types say what differs from device to device; in a rule for the
            # compiler there are none.
            manual = jax.sharding.get_abstract_mesh().manual_axes
            to = "invarying" if manual else "varying"
            return jax.lax.all_gather(outputs, over, axis=axis, tiled=True, to=to)
        return jax.lax.psum(self.scatter("output", shape, outputs), over)

    def output_shape(self, outputs: jax.Array) -> tuple[int, ...]:
        """Return the shape of the outputs with all groups, if they have a group axis."""
        axes = self.call.letters()["output"]
        if "g" not in axes or getattr(self.call, "sum_groups", False):
            return outputs.shape
        n_all = self.n_all
        return tuple([n_all if a == "g" else n for a, n in zip(axes, outputs.shape, strict=True)])

    def _axis(self, name: str, shape: tuple[int, ...]) -> int | None:
        """Return the group axis of an array with all groups; None if it has none."""
        for axis, letter in enumerate(self.call.letters()[name]):
            # ``go`` is one axis with groups times outputs. An input shared by all groups has a
            # group axis of size 1.
            if letter == "go" or (letter in ("g", "h") and shape[axis] == self.n_all):
                return axis
        return None


# ------------------------------------------------------------------------ meshes with explicit axes
@dataclasses.dataclass(frozen=True)
class Layout:
    """Array layout of a call on a mesh with explicit axes, by axis letter.

    Attributes:
      leading: layout of the batch dimensions, shared by batched arrays. own: layout of the other
          axes, by letter.
      first: True if features precede the batch dimensions.
    """

    leading: tuple[Place, ...]
    own: Mapping[str, Place]
    first: bool

    @classmethod
    def from_call(cls, call: Call, *, first: bool = False) -> "Layout":
        """Return the layout of a call with batch dimensions.

        Where arrays differ, the first one counts.
        """
        leading: list[Place] = []  # the last first
        own: dict[str, Place] = {}
        for name, array, rank in zip(call.arrays(), call.values(), call.ranks(), strict=True):
            for a in jax.tree.leaves(array):
                spec = (*_meshes.spec_of(a), *(None,) * a.ndim)[: a.ndim]
                n = 0 if rank is None else a.ndim - rank
                around = spec[1:] if first and n else spec[:n]
                leading += [None] * (len(around) - len(leading))
                for i, place in enumerate(reversed(around)):
                    leading[i] = leading[i] or place
                for letter, place in zip(
                    _own_axes(call, name), spec[:1] if first and n else spec[n:], strict=False
                ):
                    own[letter] = own.get(letter) or place
        return cls(tuple(reversed(leading)), own, first)

    def kernel_layout(self, direction: Direction) -> "Layout":
        """Return the kernels' layout: all divisible axes are divided, tables stay in place."""
        detectors = self.own.get("t")
        free = tuple(
            None
            if "b" not in _DIVIDED[direction] or set(_names(place)) & set(_names(detectors))
            else place
            for place in self.leading
        )
        return Layout(free, {"t": detectors}, self.first)

    def array_specs(self, call: Call) -> Call:
        """Return the partition specs of a call's arrays, in their place."""

        def spec(name: str, rank: int | None, a: jax.Array) -> PartitionSpec:
            n = 0 if rank is None else a.ndim - rank
            return self.axes_spec(
                self.leading[len(self.leading) - n :], _own_axes(call, name), a.shape
            )

        specs = [
            jax.tree.map(functools.partial(spec, name, rank), array)
            for name, array, rank in zip(call.arrays(), call.values(), call.ranks(), strict=True)
        ]
        return call.from_arrays(specs, call.options())

    def output_spec(self, op: type[Call]) -> PartitionSpec:
        """Return the partition spec of the outputs."""
        return self.axes_spec(self.leading, _own_axes(op, "output"))

    def axes_spec(
        self, leading: tuple[Place, ...], own: Axes, shape: tuple[int, ...] | None = None
    ) -> PartitionSpec:
        """Return an array's partition spec.

        Axes with size 1 are not divided, and each mesh axis divides one array axis only.
        """
        places = [*leading, *(self.own.get(letter) for letter in own)]
        used: set[str] = set()
        for i, place in enumerate(places):
            if used & set(_names(place)):
                places[i] = None
            used |= set(_names(place))
        if self.first:
            places = [*places[len(leading) :], *places[: len(leading)]]
        if shape is not None:
            places = [
                None if size == 1 else place for place, size in zip(places, shape, strict=False)
            ]
        return PartitionSpec(*places)

    @property
    def divides(self) -> bool:
        """Return True if any axis is divided."""
        return any(self.leading) or any(self.own.values())

    @property
    def over(self) -> tuple[str, ...]:
        """Mesh axes that divide detectors."""
        return _names(self.own.get("t"))


def _own_axes(op: Call | type[Call], name: str) -> Axes:
    """Return the letters of an array's axes without the batch."""
    return tuple(letter for letter in op.letters().get(name, ()) if letter != "b")
