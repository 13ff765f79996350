"""Strategies that draw calls of an op: arguments and options from small pools, and stacks of transformations."""

import dataclasses
from typing import Any

import hypothesis.strategies as st

from properties.calls import OPS, Call, Layer, Map, with_gradient
from properties.members import SIZES, Source

LAYERS = ("jit", "remat", "cond")
CONTEXTS = ("", "", "", "", "", "", "", "x64", "debug_nans", "standard", "xla", "auto mesh", "explicit mesh")
DTYPES = ("float32", "float32", "float32", "bfloat16", "float16")
NOT_FINITE = ("nan", "infinite")


def names(call: Call) -> dict[str, int]:
    """The arguments of a call, and their ranks without mapped axes."""
    op = OPS[call.op]
    arrays = op.arrays(Source(call.dtype, 0), SIZES[call.size], call.options)
    return {name: a.ndim for name, a in arrays.items()}


@st.composite
def kinds(draw: Any, op: str) -> Call:
    """A call without transformations: of some size and dtype, with some options, in a context.

    Calls of one kind share traces, so that one can disturb the other.
    """
    options = {
        name: draw(st.sampled_from(values[1:]))
        for name, values in OPS[op].options.items()
        if draw(st.sampled_from((False, False, False, True)))
    }
    context = draw(st.sampled_from(CONTEXTS))
    sizes = [size for size in SIZES if divides(size) or "mesh" not in context]
    return Call(
        op,
        size=draw(st.sampled_from(sizes)),
        dtype="float64" if context == "x64" and draw(st.booleans()) else draw(st.sampled_from(DTYPES)),
        options=options,
        contexts=(context,) if context else (),
    )


@st.composite
def calls(draw: Any, kind: Call, *, late: bool = False) -> Call:
    """A call of a kind, with gradients and transformations; `late`: one whose backward pass can be made later."""
    of, ranks = OPS[kind.op], names(kind)
    if late:
        kind = dataclasses.replace(kind, contexts=tuple(c for c in kind.contexts if "mesh" not in c))
    may_shard = divides(kind.size) and not any("mesh" in c for c in kind.contexts)
    fits = of.recurrent and not kind.options.get("shared_input")  # outputs have the shape of inputs
    recurrent = fits and draw(st.sampled_from((False, False, False, False, True)))
    call = dataclasses.replace(
        kind,
        steps=2 if recurrent else 1,
        how="grad" if "explicit mesh" in kind.contexts else draw(st.sampled_from(("vjp", "vjp", "grad"))),
        seed=draw(st.integers(0, 2)),
        values=draw(_values(kind)),
        wanted=draw(_wanted(with_gradient(kind, ranks), none=not late)),
    )
    outer = draw(_one_layer(ranks) if late else _layers(ranks, may_shard))
    mapped = any(isinstance(layer, Map) for layer in outer)
    inner = draw(_layers(ranks, may_shard and not mapped))
    return dataclasses.replace(call, outer=outer, inner=inner)


def divides(size: str) -> bool:
    """Return whether devices can divide arrays: JAX cannot read those without elements that an eager `jax.shard_map` returns."""
    return SIZES[size]["batch"] > 0


def _values(kind: Call) -> st.SearchStrategy[str]:
    """Strategy that draws kinds of values: mostly quarters."""
    others = [v for v in OPS[kind.op].values if not ("debug_nans" in kind.contexts and v in NOT_FINITE)]
    return st.sampled_from((*len(others) * ("grid",), *others))


@st.composite
def _wanted(draw: Any, possible: tuple[str, ...], none: bool) -> tuple[str, ...]:
    """The arguments to differentiate: often all of them, often one, some of them, or none."""
    if not possible:
        return ()
    which = draw(st.sampled_from(("all", "all", "all", "one", "one", "some", "none" if none else "one")))
    if which == "none":
        return ()
    if which == "all":
        return possible
    most = 1 if which == "one" else len(possible)
    chosen = draw(st.lists(st.sampled_from(possible), min_size=1, max_size=most, unique=True))
    return tuple(n for n in possible if n in chosen)


@st.composite
def _map(draw: Any, ranks: dict[str, int], hows: tuple[str, ...]) -> Map:
    """A map of some arguments, at least one."""
    how = draw(st.sampled_from(hows))
    chosen = draw(st.lists(st.sampled_from(list(ranks)), min_size=1, max_size=3, unique=True))
    listed = ("leaves" if "leaves" in ranks else "wires", "readers")
    if set(listed) & set(chosen) and "readers" in ranks:
        chosen = list(dict.fromkeys([*chosen, *listed]))  # the reverse of each other
    axes = {n: draw(st.integers(0, min(ranks[n], 1))) if how == "vmap" else 0 for n in chosen}
    return Map(how, axes)


@st.composite
def _layers(draw: Any, ranks: dict[str, int], may_shard: bool) -> tuple[Layer, ...]:
    """Up to two layers; the first map of them may be a ``shard_map``."""
    layers: list[Layer] = []
    for _ in range(draw(st.sampled_from((0, 0, 1, 1, 2)))):
        if draw(st.booleans()):
            layers.append(draw(st.sampled_from(LAYERS)))
        else:
            first = not any(isinstance(layer, Map) for layer in layers)
            hows = ("vmap", "vmap", "scan", *(("shard_map",) if may_shard and first else ()))
            layers.append(draw(_map(ranks, hows)))
    return tuple(layers)


@st.composite
def _one_layer(draw: Any, ranks: dict[str, int]) -> tuple[Layer, ...]:
    """A layer that can return pullbacks, or none."""
    which = draw(st.sampled_from(("none", "none", "jit", "map")))
    if which == "map":
        return (draw(_map(ranks, ("vmap", "scan"))),)
    return ("jit",) if which == "jit" else ()
