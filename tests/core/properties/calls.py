"""Calls of the ops as data: they are drawn, printed, replayed, run under any stack of transformations, and compared
with what the definitions say of each element.

    PYTHONPATH=tests/support:tests/core python -m properties.calls "Call('lut', wanted=('weights',))" "Call('lut', wanted=('x',))"

replays calls one after the other in a process of their own, and says which is the first that is wrong.
"""

import contextlib
import dataclasses
import functools
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import lutjax
from lutjax import FixedPoint, _compat
from lutjax.testing import assert_close
from lutjax.training.tables import value_and_grad as value_and_factored_grad
from properties.definitions import wide
from properties.layers import LAYERS, NETS
from properties.members import LOST, MAGNITUDES, SIZES, VALUES, Arrays, Pullback, Source, Undecided
from properties.ops import OPS as OF_OPS

OPS = {**OF_OPS, **LAYERS, **NETS}
"""All that can be called, by name: ops, layers and models."""


# ------------------------------------------------------------------------------------- data
@dataclasses.dataclass(frozen=True)
class Map:
    """A transformation that adds an axis to some arguments: ``vmap``, ``scan`` or ``shard_map``.

    axes: where the axis is, by argument; the others are shared. Only ``vmap`` has other axes than 0.
    """

    how: str
    axes: Mapping[str, int]

    @property
    def size(self) -> int:
        return 2 if self.how == "shard_map" else 3

    def __repr__(self) -> str:
        return f"Map({self.how!r}, {dict(self.axes)!r})"


Layer = str | Map  # "jit", "remat", "cond" or a map


@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class Call:
    """A call of an op, and of its gradient.

    Attributes:
      op, size, dtype, options, seed: which op on which arguments.
      values: their kind, one of `VALUES`.
      wanted: the arguments that are differentiated; none: only the op is called.
      inner: layers around the op, within the gradient, the outermost first.
      outer: layers around the gradient.
      contexts: managers around all of it, names of `CONTEXTS`.
      steps: more than 1: a scan of so many steps ``x = x + op(x, ...)`` takes the place of the op.
      how: ``"vjp"``, or ``"grad"`` of a scalar.
      reference: whether it is the function of `lutjax.reference`.
    """

    op: str
    _: dataclasses.KW_ONLY
    size: str = "a"
    dtype: str = "float32"
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    wanted: tuple[str, ...] = ()
    inner: tuple[Layer, ...] = ()
    outer: tuple[Layer, ...] = ()
    contexts: tuple[str, ...] = ()
    steps: int = 1
    how: str = "vjp"
    seed: int = 0
    values: str = "grid"
    reference: bool = False

    def __repr__(self) -> str:
        changed = {
            f.name: getattr(self, f.name)
            for f in dataclasses.fields(self)[1:]
            if getattr(self, f.name) != (f.default_factory() if f.name == "options" else f.default)
        }
        return f"Call({', '.join([repr(self.op), *(f'{n}={v!r}' for n, v in changed.items())])})"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:  # as hypothesis prints it
        printer.text(repr(self))

    @property
    def function_key(self) -> str:
        """Key that calls share which are the same function of other numbers."""
        return repr(dataclasses.replace(self, seed=0, values=VALUES[0]))

    @property
    def maps(self) -> list[Map]:
        """The maps of all layers, the outermost first."""
        return [layer for layer in (*self.outer, *self.inner) if isinstance(layer, Map)]


# ------------------------------------------------------------------------------------- arguments
def _sizes_and_options(call: Call) -> dict[str, Any]:
    return {**call.options, "sizes": SIZES[call.size]}


def _stacked(draw: Callable[[int], np.ndarray], sizes: list[int]) -> np.ndarray:
    """An array for each index of some axes, which come first."""
    elements = [draw(i) for i in range(int(np.prod(sizes, dtype=int)))]
    return np.stack(elements).reshape((*sizes, *elements[0].shape))


def arguments(call: Call) -> Arrays:
    """The arguments of a call; in front of each the axes of the maps that map it, the outermost first."""
    op, z = OPS[call.op], SIZES[call.size]

    @functools.cache
    def element(i: int) -> Arrays:
        source = Source(call.dtype, call.op, call.size, call.seed, i, values=call.values)
        return op.arrays(source, z, call.options)

    found = {
        name: _stacked(lambda i, name=name: element(i)[name], [m.size for m in call.maps if name in m.axes])
        for name in element(0)
    }
    for name in op.clipped(call.options):
        if name in found and any(name not in m.axes for m in call.maps):
            most = np.asarray(0.75, found[name].dtype)
            found[name] = np.clip(found[name], -most, most)
    return found


def cotangent(call: Call, y: np.ndarray, seed: int = 0) -> np.ndarray:
    """A cotangent of an output, with the axes of all maps in front."""
    return Source(y.dtype.name, "cotangent", call.op, call.seed, seed).grid(*y.shape)


def _element(call: Call, arrays: Arrays, at: tuple[int, ...]) -> Arrays:
    """The arguments of one element."""
    return {
        name: a[tuple(i for i, m in zip(at, call.maps, strict=True) if name in m.axes)]
        for name, a in arrays.items()
    }


def _moved(a: np.ndarray, axes: list[int], first: int = 0) -> np.ndarray:
    """An array whose mapped axes, from `first` on, are where the maps look for them."""
    for i, axis in reversed(list(enumerate(axes, first))):
        a = np.moveaxis(a, i, i + axis)
    return a


def _axes_of(name: str, call: Call) -> list[int]:
    return [m.axes[name] for m in call.maps if name in m.axes]


def _batch_axis(name: str, call: Call, ndim: int) -> int | None:
    """The axis of an argument that a mesh splits, when its mapped axes are where the maps look for them."""
    core = OPS[call.op].batch(call.options).get(name)
    if core is None:
        return None
    axes = _axes_of(name, call)
    # The shape tells where an axis of size 2 went among axes of size 1.
    shape = [2 if i == core + len(axes) else 1 for i in range(ndim)]
    return _moved(np.empty(shape), axes).shape.index(2)


# ------------------------------------------------------------------------------------- what is right
def expected(
    call: Call, arrays: Arrays, of_outputs: Callable[[Arrays], np.ndarray | None]
) -> tuple[Arrays, Arrays]:
    """Outputs and cotangents, from the definition of each element.

    of_outputs: the cotangent of all outputs, given them; with the axes of all maps in front.
    """
    sizes = [m.size for m in call.maps]
    indices = list(itertools.product(*map(range, sizes)))
    found = {at: define(call, _element(call, arrays, at)) for at in indices}
    outputs = {
        name: np.stack([found[at][0][name] for at in indices]).reshape(
            (*sizes, *found[indices[0]][0][name].shape)
        )
        for name in found[indices[0]][0]
    }
    truncates = call.options.get("accumulate") is not None
    if not call.wanted and not truncates:
        return outputs, {}
    ct = of_outputs(outputs) if call.wanted else np.zeros_like(outputs[OPS[call.op].output])
    of_elements = {at: found[at][1](ct[at]) for at in indices}
    if not call.wanted:
        return outputs, {LOST: _lost(call, of_elements.values())}
    n_outer = sum(isinstance(layer, Map) for layer in call.outer)
    cotangents: Arrays = {
        MAGNITUDES: _magnitudes(call, of_elements.values()),
        LOST: _lost(call, of_elements.values()),
    }
    for name in call.wanted:
        # Where a map shares an argument, its cotangent is a sum if the map is within the gradient, or if the
        # devices of a mesh share it.
        kept = [name in m.axes or (i < n_outer and m.how != "shard_map") for i, m in enumerate(call.maps)]
        core = of_elements[indices[0]][name].shape
        all_of_them = np.stack([of_elements[at][name] for at in indices]).reshape((*sizes, *core))
        with np.errstate(invalid="ignore"):  # infinities of both signs add to NaN
            total = all_of_them.sum(axis=tuple(i for i, k in enumerate(kept) if not k))
        within = [m.axes[name] for m in call.maps[n_outer:] if name in m.axes]
        cotangents[name] = _moved(total, within, sum(kept[:n_outer]))
    return outputs, cotangents


def _magnitudes(call: Call, of_elements: Iterable[Arrays]) -> dict[str, float]:
    """Return for cotangents that are one number the largest that the magnitudes of its addends add up to."""
    total: dict[str, float] = {}
    for of in of_elements:
        for name, size in of.get(MAGNITUDES, {}).items():
            if name in call.wanted:
                total[name] = total.get(name, 0.0) + float(size)
    return total


def _lost(call: Call, of_elements: Iterable[Arrays]) -> dict[str, float]:
    """Return for the output and for cotangents, of which some are sums over elements, the most that fixed point drops."""
    total: dict[str, float] = {}
    for of in of_elements:
        for name, lost in of.get(LOST, {}).items():
            if name == "y":
                total[name] = max(total.get(name, 0.0), lost)
            elif name in call.wanted:
                total[name] = total.get(name, 0.0) + lost
    return total


def define(call: Call, a: Arrays) -> tuple[Arrays, Pullback]:
    """Outputs of one element, and its cotangents given that of the output."""
    if call.steps == 1:
        return _definition(call, a)
    x, pullbacks = a["x"], []
    for _ in range(call.steps):
        outputs, pullback = _definition(call, {**a, "x": x})
        x = (x + outputs["y"]).astype(x.dtype)
        pullbacks.append(pullback)

    def pull(ct: np.ndarray) -> Arrays:
        total: Arrays = {}
        for pullback in reversed(pullbacks):
            cotangents = pullback(ct)
            ct = ct + cotangents.pop("x")
            total = {n: total.get(n, 0) + c for n, c in cotangents.items()}
        return {**total, "x": ct}

    return {"y": x}, pull


def _definition(call: Call, a: Arrays) -> tuple[Arrays, Pullback]:
    op, options = OPS[call.op], _sizes_and_options(call)
    with np.errstate(all="ignore"):
        outputs, pullback = op.define(a, options)
    if "y" in outputs and outputs["y"].dtype == np.float64:
        outputs["y"] = outputs["y"].astype(op.dtype(a, options))

    def pull(ct: np.ndarray) -> Arrays:
        with np.errstate(all="ignore"):
            return pullback(ct)

    return outputs, pull


def with_gradient(call: Call, names: Iterable[str]) -> tuple[str, ...]:
    """Return those of the names of arguments that can be differentiated."""
    op = OPS[call.op]
    return () if op.constant(call.options) else tuple(n for n in op.differentiable if n in names)


# ------------------------------------------------------------------------------------- what is run
CONTEXTS: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "x64": lambda: jax.enable_x64(True),
    "debug_nans": lambda: jax.debug_nans(True),
    "standard": lambda: jax.numpy_dtype_promotion("standard"),
    "auto mesh": lambda: jax.set_mesh(mesh(AxisType.Auto)),
    "explicit mesh": lambda: jax.set_mesh(mesh(AxisType.Explicit)),
    "xla": lambda: lutjax.use_implementation("xla"),
}


def mesh(axis_type: AxisType) -> jax.sharding.Mesh:
    return jax.make_mesh((2,), ("data",), axis_types=(axis_type,), devices=jax.devices()[:2])


@contextlib.contextmanager
def within(call: Call) -> Iterator[None]:
    """The contexts of a call."""
    with contextlib.ExitStack() as stack:
        for name in call.contexts:
            stack.enter_context(CONTEXTS[name]())
        yield


def placed(call: Call, arrays: Arrays) -> Arrays:
    """The arguments as the call takes them: mapped axes in their places, split over a mesh if there is one."""
    arrays = {name: _moved(a, _axes_of(name, call)) for name, a in arrays.items()}
    if not any("mesh" in name for name in call.contexts):
        return {name: jax.device_put(a) for name, a in arrays.items()}
    of = mesh(AxisType.Explicit if "explicit mesh" in call.contexts else AxisType.Auto)

    def put(name: str, a: np.ndarray) -> jax.Array:
        axis = _batch_axis(name, call, a.ndim)
        spec = PartitionSpec() if axis is None else PartitionSpec(*[None] * axis, "data")
        return jax.device_put(a, NamedSharding(of, spec))

    return {name: put(name, a) for name, a in arrays.items()}


def function(call: Call) -> Callable[[Arrays], tuple[Any, Arrays]]:
    """The op with its inner layers: of the arguments, returns the output with a gradient, and the others."""
    op, options = OPS[call.op], _sizes_and_options(call)

    def base(a: Arrays) -> Arrays:
        return op.call(lutjax.reference if call.reference else lutjax, a, options)

    def repeated(a: Arrays) -> Arrays:
        def step(x: Any, _: None) -> tuple[Any, None]:
            return x + base({**a, "x": x})["y"], None

        axes = frozenset[str]().union(*map(_compat.varying_axes, a.values()))
        return {"y": jax.lax.scan(step, _compat.cast_varying(a["x"], axes), None, length=call.steps)[0]}

    f: Callable[[Arrays], Arrays] = base if call.steps == 1 else repeated
    for layer in reversed(call.inner):
        f = _with_layer(layer, f)

    def split(a: Arrays) -> tuple[Any, Arrays]:
        outputs = f(a)
        return outputs[op.output], {n: y for n, y in outputs.items() if n != op.output}

    return split


def gradient(call: Call) -> Callable[..., tuple[Any, Arrays, Arrays]]:
    """The function of a call: of arguments and, if some are differentiated, a cotangent.

    It returns the output with a gradient, the other outputs, and cotangents.
    """
    f = function(call)

    def g(a: Arrays, ct: Any = None) -> tuple[Any, Arrays, Arrays]:
        if not call.wanted:
            return *f(a), {}
        rest = {n: v for n, v in a.items() if n not in call.wanted}
        wanted = {n: a[n] for n in call.wanted}
        if call.how == "vjp":
            y, pull, others = jax.vjp(lambda w: f({**rest, **w}), wanted, has_aux=True)
            return y, others, pull(ct)[0]

        def scalar(w: Arrays) -> tuple[Any, Any]:
            y, others = f({**rest, **w})
            return jnp.sum(y * ct), (y, others)

        cotangents, (y, others) = jax.grad(scalar, has_aux=True)(wanted)
        return y, others, cotangents

    for layer in reversed(call.outer):
        g = _with_layer(layer, g, call.wanted)
    return g


def _with_layer(layer: Layer, f: Callable[..., Any], wanted: tuple[str, ...] = ()) -> Callable[..., Any]:
    """A function with one more transformation around it: of arguments by name and perhaps a cotangent of the output."""
    if layer == "jit":
        return jax.jit(f)
    if layer == "remat":
        return jax.checkpoint(f)
    if layer == "cond":
        return lambda *a: jax.lax.cond(_true(), f, f, *a)
    assert isinstance(layer, Map)
    if layer.how == "shard_map":
        return _sharded(layer, f, wanted)
    return _vmapped(layer, f) if layer.how == "vmap" else _scanned(layer, f)


def _true() -> jax.Array:
    return jax.lax.optimization_barrier(jnp.asarray(True))


def _vmapped(layer: Map, f: Callable[..., Any]) -> Callable[..., Any]:
    def call(a: Arrays, *ct: Any) -> Any:
        return jax.vmap(f, in_axes=({name: layer.axes.get(name) for name in a}, *(0 for _ in ct)))(a, *ct)

    return call


def _scanned(layer: Map, f: Callable[..., Any]) -> Callable[..., Any]:
    def call(a: Arrays, *ct: Any) -> Any:
        shared = {name: v for name, v in a.items() if name not in layer.axes}
        mapped = {name: a[name] for name in a if name in layer.axes}

        def step(_: None, slices: tuple[Any, ...]) -> tuple[None, Any]:
            of_a, *of_ct = slices
            return None, f({**shared, **of_a}, *of_ct)

        return jax.lax.scan(step, None, (mapped, *ct))[1]

    return call


def _sharded(layer: Map, f: Callable[..., Any], wanted: tuple[str, ...]) -> Callable[..., Any]:
    def call(a: Arrays, *ct: Any) -> Any:
        def shard(a: Arrays, *ct: Any) -> Any:
            result = f({n: v[0] if n in layer.axes else v for n, v in a.items()}, *(c[0] for c in ct))
            if not ct:
                return jax.tree.map(lambda y: y[None], result)
            y, others, cotangents = result
            y, others = jax.tree.map(lambda y: y[None], (y, others))
            return y, others, {n: c[None] if n in layer.axes else c for n, c in cotangents.items()}

        split = PartitionSpec("shards")
        of_arguments = {n: split if n in layer.axes else PartitionSpec() for n in a}
        # Cotangents of shared arguments are the same on all devices: they are sums.
        out: Any = (
            (split, split, {n: split if n in layer.axes else PartitionSpec() for n in wanted})
            if ct
            else split
        )
        return jax.shard_map(
            shard,
            mesh=jax.make_mesh((2,), ("shards",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2]),
            in_specs=(of_arguments, *(split for _ in ct)),
            out_specs=out,
        )(a, *ct)

    return call


# ------------------------------------------------------------------------------------- comparison
TOLERANCE = {"float64": 1e-12, "float32": 2e-5, "bfloat16": 2**-6, "float16": 2**-9}


class Wrong(AssertionError):
    """A call returned something else than its definition."""


def compare(what: Any, actual: Arrays, wanted: Arrays, tolerance: float = 0) -> None:
    """Raises Wrong if arrays differ by more than rounding, or by more than a tolerance that is larger."""
    wanted = dict(wanted)
    magnitudes, lost = wanted.pop(MAGNITUDES, {}), wanted.pop(LOST, {})
    if set(actual) != set(wanted):
        raise Wrong(f"{what}: {sorted(actual)}, expected {sorted(wanted)}")
    for name, e in wanted.items():
        a = np.asarray(actual[name])
        with np.errstate(all="ignore"):
            e = e.astype(a.dtype)
        relative = max(tolerance, TOLERANCE.get(a.dtype.name, 0))
        with np.errstate(all="ignore"):
            if name in magnitudes and np.all(np.abs(wide(a) - wide(e)) <= relative * magnitudes[name]):
                continue
            if name in lost:  # in which direction it does so is left open
                gap = wide(a) - wide(e)
                a = (wide(e) + np.sign(gap) * np.maximum(np.abs(gap) - lost[name], 0)).astype(a.dtype)
        try:
            assert_close(f"{what}: {name}", a, e, relative)
        except AssertionError as error:
            raise Wrong(str(error)) from None


def check(call: Call, functions: dict[str, Any] | None = None) -> None:
    """Runs a call and compares it with its definition, unless that leaves it to rounding.

    functions: those of earlier calls, so that one that was there before is called again.
    """
    with contextlib.suppress(Undecided), within(call):
        arrays = arguments(call)
        given = placed(call, arrays)
        ct: np.ndarray | None = None

        def of_outputs(outputs: Arrays) -> np.ndarray:
            nonlocal ct
            ct = cotangent(call, outputs[OPS[call.op].output])
            return ct

        outputs, cotangents = expected(call, arrays, of_outputs)
        functions = {} if functions is None else functions
        g = functions.setdefault(call.function_key, gradient(call))
        y, others, of_wanted = g(given) if ct is None else g(given, ct)
        actual = {OPS[call.op].output: y, **others, **of_wanted}
        compare(call, actual, {**outputs, **cotangents}, _tolerance(call))


def _tolerance(call: Call) -> float:
    """Largest difference where a layer casts, and where several ops round to 16 bits one after another."""
    dtypes = [call.dtype, *((call.options["dtype"],) if call.options.get("dtype") else ())]
    widest = max(TOLERANCE[dtype] for dtype in dtypes)
    narrow = any(dtype in ("bfloat16", "float16") for dtype in dtypes)
    return widest * OPS[call.op].chain if narrow else widest if len(dtypes) > 1 else 0.0


def check_factored(call: Call) -> None:
    """Check a call as `check` does without transformations or contexts, with the gradient of the table in factors."""
    arrays = arguments(call)
    call = dataclasses.replace(call, wanted=with_gradient(call, arrays))
    f = function(call)
    outputs, pull = define(call, arrays)
    ct = cotangent(call, outputs["y"])
    of_all = pull(ct)
    rest = {n: jnp.asarray(a) for n, a in arrays.items() if n not in call.wanted}

    def loss(params: Arrays) -> tuple[jax.Array, jax.Array]:
        y, _ = f({**rest, **params})
        return jnp.sum(y * ct), y

    value_and_grad = value_and_factored_grad(loss, has_aux=True)
    (_, y), gradients = value_and_grad({n: jnp.asarray(arrays[n]) for n in call.wanted})
    actual = {"y": y, **gradients, "weights": gradients["weights"].to_dense()}
    wanted = {
        "y": outputs["y"],
        **{n: of_all[n] for n in call.wanted},
        **{key: of_all.get(key, {}) for key in (MAGNITUDES, LOST)},
    }
    compare(f"{call}, factored", actual, wanted, _tolerance(call))


class Late:
    """A gradient of which the forward pass is made, and the backward pass comes later."""

    def __init__(self, call: Call):
        self.call = call
        f = function(call)
        with within(call):
            self._arrays = arguments(call)

            def forward(a: Arrays) -> tuple[Any, Any]:
                rest = {n: v for n, v in a.items() if n not in call.wanted}
                y, pull, _ = jax.vjp(lambda w: f({**rest, **w}), {n: a[n] for n in call.wanted}, has_aux=True)
                return y, pull

            for layer in reversed(call.outer):
                forward = _with_layer(layer, forward)
            self._y, self._pull = forward(placed(call, self._arrays))

    def pull(self, how: str, seed: int = 0) -> None:
        """Makes the backward pass and compares it.

        how: ``"plain"``, in a ``"jit"`` as its argument or in the ``"closure"`` of one, or for several cotangents by
        ``"vmap"`` or ``"scan"``.
        """
        with contextlib.suppress(Undecided), within(self.call):
            self._pull_and_compare(how, seed)

    def _pull_and_compare(self, how: str, seed: int) -> None:
        call, output = self.call, OPS[self.call.op].output
        n_cotangents = 3 if how in ("vmap", "scan") else 1
        with within(call):
            cts: list[np.ndarray] = []
            of_each = []
            for i in range(n_cotangents):

                def of_outputs(outputs: Arrays, i: int = i) -> np.ndarray:
                    cts.append(cotangent(call, outputs[output], 10 * seed + i))
                    return cts[-1]

                outputs, cotangents = expected(call, self._arrays, of_outputs)
                of_each.append(cotangents)

            def pull_one(pull: Any, ct: Any) -> Any:
                return pull(ct)[0]

            pull = pull_one
            for layer in reversed(call.outer):
                if isinstance(layer, Map):  # the pullback itself is mapped
                    pull = {"vmap": jax.vmap, "scan": _mapped_by_scan}[layer.how](pull)
            if how == "plain":
                actual = pull(self._pull, cts[0])
            elif how == "jit":
                actual = jax.jit(pull)(self._pull, cts[0])
            elif how == "closure":
                actual = jax.jit(lambda ct: pull(self._pull, ct))(cts[0])
            else:
                over = jax.vmap if how == "vmap" else _mapped_by_scan
                actual = over(lambda ct: pull(self._pull, ct))(np.stack(cts))
        of_all = {
            n: np.stack([c[n] for c in of_each]) if n_cotangents > 1 else of_each[0][n] for n in call.wanted
        }
        each = [c[MAGNITUDES] for c in of_each]
        of_all[MAGNITUDES] = {n: max(one[n] for one in each) for n in each[0]}
        of_all[LOST] = {n: max(c[LOST].get(n, 0.0) for c in of_each) for n in of_each[0][LOST]}
        what = f"{call}, pulled {how}"
        actual, wanted = {output: self._y, **actual}, {output: outputs[output], **of_all}
        compare(what, actual, wanted, _tolerance(call))


def _mapped_by_scan(f: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *a: jax.lax.scan(lambda _, slices: (None, f(*slices)), None, a)[1]


# ------------------------------------------------------------------------------------- replay
def main(calls: list[str]) -> None:
    """Runs calls one after the other."""
    names = {"Call": Call, "Map": Map, "FixedPoint": FixedPoint}
    for text in calls:
        check(eval(text, names))
        print(f"right: {text}")


if __name__ == "__main__":
    main(sys.argv[1:])
