"""A layer from each library as a function of its parameters and input."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lutjax.layers import haiku as lutjax_haiku, linen, nnx as lutjax_nnx
from lutjax.layers._spec import QUANTIZED, Variable, build
from lutjax.layers._specs import specs

LIBRARIES = ("nnx", "linen", "haiku")
KINDS = {
    "tables": lutjax_nnx.Tables,
    "scalars": lutjax_nnx.Scalars,
    "params": nnx.All(nnx.Param, nnx.Not(nnx.Any(lutjax_nnx.Tables, lutjax_nnx.Scalars))),
    "anchors": lutjax_nnx.Anchors,
    "targets": lutjax_nnx.Targets,
    "wires": lutjax_nnx.Wires,
    "thresholds": lutjax_nnx.Thresholds,
    QUANTIZED: lutjax_nnx.Quantized,
}


def spec_type_of(layer: str) -> Any:
    return specs()[layer]


class Case(NamedTuple):
    layer: str
    options: dict[str, Any]
    shape: tuple[int, ...]  # of its input
    other_sizes: tuple[Any, ...] | None = (
        None  # than as many inputs as the last axis has, and 6 outputs
    )
    given: dict[str, Any] | None = (
        None  # other arguments of a call than those that follow from the shape
    )

    @property
    def sizes(self) -> tuple[Any, ...]:
        return (self.shape[-1], 6) if self.other_sizes is None else self.other_sizes

    @property
    def call(self) -> dict[str, Any]:
        """Call arguments in addition to the input."""
        if self.given is not None:
            return self.given
        if self.layer not in ("NgramMemory", "NgramEmbedding"):
            return {}
        shape = self.shape[: -2 if self.options.get("streams", 1) > 1 else -1]
        return {"tokens": np.arange(np.prod(shape), dtype=np.int32).reshape(shape) % 5}

    @property
    def spec_type(self) -> Any:
        return spec_type_of(self.layer)

    @property
    def spec(self) -> Any:
        return self.built()[0]

    def built(self) -> tuple[Any, tuple[Variable, ...]]:
        """Return the spec and its variables, including variables given as options."""
        names = (f.name for f in dataclasses.fields(self.spec_type) if not f.kw_only)
        sizes = dict(zip(names, self.sizes, strict=False))
        given = dict.fromkeys(self.spec_type.given)
        return build(self.spec_type, {**given, **sizes, **self.options})


def inputs_of(case: Case, dtype: Any = jnp.float32, seed: int = 1) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), case.shape, dtype)


def variables_of(case: Case) -> dict[str, jax.Array]:
    """Return variables with random values for non-scalar parameters and integer tables."""
    arrays: dict[str, jax.Array] = {}
    for i, v in enumerate(case.built()[1]):
        key = jax.random.key(i)
        if v.kind == QUANTIZED and v.name == "weights":
            arrays[v.name] = jax.random.randint(key, v.shape, -128, 128, v.dtype)
        elif v.collection == "params" and v.shape:
            arrays[v.name] = jax.random.normal(key, v.shape, v.dtype)
        else:
            arrays[v.name] = jnp.asarray(v.make(lambda key=key: key, arrays))
    return arrays


def variables_on_a_grid(case: Case) -> dict[str, jax.Array]:
    """Return variables with tables on a coarse grid: sums are exact, so their order cannot show."""
    key, arrays = jax.random.key(0), dict[str, jax.Array]()
    for v in case.spec.variables():
        key, draw = jax.random.split(key)
        on_grid = v.name == "weights"
        arrays[v.name] = (
            jax.random.randint(draw, v.shape, -32, 32) / 16 if on_grid else v.init(draw)
        )
    return arrays


def by_kind(case: Case, arrays: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    kinds: dict[str, dict[str, Any]] = {}
    for v in case.spec.variables():
        kinds.setdefault(v.collection, {})[v.name] = arrays[v.name]
    return kinds


def nnx_layer(case: Case, arrays: Mapping[str, Any] | None = None, **options: Any) -> Any:
    """Return an NNX layer; if all of its arrays are given, none is initialized."""

    def create() -> Any:
        rngs = {} if case.layer in ("GroupSum", "Thermometer") else {"rngs": nnx.Rngs(0)}
        return getattr(lutjax_nnx, case.layer)(*case.sizes, **case.options, **rngs, **options)

    names, keeps_stream = {v.name for v in case.spec.variables()}, case.spec.random
    are_given = names == (arrays or {}).keys() and not keeps_stream
    layer = nnx.eval_shape(create) if are_given else create()
    for name, array in (arrays or {}).items():
        getattr(layer, name).set_value(array)
    return layer


def function(
    library: str, case: Case, arrays: Mapping[str, Any], **arguments: Any
) -> Callable[[Any, Any], jax.Array]:
    """Return the layer as a function of its parameters and input, with `arguments` passed to the call.

    Layers with random numbers draw the same ones in each call.
    """
    kinds, key, arguments = by_kind(case, arrays), jax.random.key(0), {**case.call, **arguments}
    if library == "nnx":
        graphdef, _, kept = nnx.split(nnx_layer(case, arrays), nnx.Param, ...)

        def run(params: Any, x: Any) -> jax.Array:
            state = nnx.State({name: nnx.Param(value) for name, value in params.items()})
            drawn = {"rngs": nnx.Rngs(key)} if case.spec.random else {}
            return nnx.merge(graphdef, state, kept)(x, **drawn, **arguments)

    elif library == "linen":
        layer = getattr(linen, case.layer)(*case.sizes, **case.options)

        def run(params: Any, x: Any) -> jax.Array:
            return layer.apply(
                {**kinds, "params": params}, x, rngs={case.spec.stream: key}, **arguments
            )

    else:
        f = hk.transform_with_state(
            lambda x: getattr(lutjax_haiku, case.layer)(*case.sizes, **case.options, name="layer")(
                x, **arguments
            )
        )
        state = {
            "layer": {
                k: v for kind, part in kinds.items() if kind != "params" for k, v in part.items()
            }
        }

        def run(params: Any, x: Any) -> jax.Array:
            return f.apply({"layer": params}, state, key, x)[0]

    return run


def assert_libraries_agree(
    case: Case, arrays: Mapping[str, Any], x: jax.Array, cotangent: jax.Array, **arguments: Any
) -> None:
    """Assert that all libraries match the spec's outputs and gradients bit for bit."""
    layers = {library: function(library, case, arrays, **arguments) for library in LIBRARIES}
    layers["spec"] = lambda params, x: case.spec({**arrays, **params}, x, **case.call, **arguments)

    @jax.jit
    def all_of_them(params: Any, x: Any) -> Any:
        results = {}
        for library, layer in layers.items():
            y, back = jax.vjp(layer, params, x)
            results[library] = {"y": y, "gradients": back(cotangent)}
        return results

    results = all_of_them(by_kind(case, arrays)["params"], x)
    want = results.pop("spec")
    assert (want["y"].dtype, want["y"].shape) == (cotangent.dtype, cotangent.shape)
    assert all(np.any(np.asarray(a, np.float32)) for a in jax.tree.leaves(want)), (
        "nothing to compare"
    )
    for library, got in results.items():
        assert jax.tree.structure(got) == jax.tree.structure(want)
        for (path, a), b in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_array_equal(a, b, err_msg=f"{library} {jax.tree_util.keystr(path)}")


def drawn_by(library: str, case: Case, x: jax.Array) -> dict[str, tuple[str, Any]]:
    """Return a new layer's variables, as a dict from name to kind and array. Haiku has no kinds except ``"params"``."""
    if library == "nnx":
        layer = nnx_layer(case)
        layer(x, **case.call)
        result = {
            kind: nnx.to_pure_dict(nnx.state(layer, variable)) for kind, variable in KINDS.items()
        }
    elif library == "linen":
        result = getattr(linen, case.layer)(*case.sizes, **case.options).init(
            jax.random.key(0), x, **case.call
        )
    else:
        f = hk.transform_with_state(
            lambda x: getattr(lutjax_haiku, case.layer)(*case.sizes, **case.options)(x, **case.call)
        )
        params, state = f.init(jax.random.key(0), x)
        result = {"params": next(iter(params.values()), {}), "": next(iter(state.values()), {})}
    return {name: (kind, array) for kind, part in result.items() for name, array in part.items()}


def assert_drawn(case: Case, x: jax.Array) -> list[dict[str, jax.Array]]:
    """Assert that each library creates the spec's variables and separates ids from parameters."""
    every = []
    for library in LIBRARIES:
        want = {
            v.name: (v.kind if library == "nnx" else v.collection, v.shape, v.dtype)
            for v in case.spec.variables()
        }
        drawn = drawn_by(library, case, x)
        kinds = {n: kind or want[n][0] for n, (kind, _) in drawn.items()}
        assert {n: (kinds[n], a.shape, a.dtype) for n, (_, a) in drawn.items()} == want, library
        assert all(
            (kind == "") == (library == "haiku" and kinds[n] != "params")
            for n, (kind, _) in drawn.items()
        )
        every.append({n: a for n, (_, a) in drawn.items()})
        case.spec.check(every[-1])
    return every


def assert_refused(case: Case, message: str) -> None:
    """Assert that each library raises when creating a layer with these options."""
    for library in LIBRARIES:
        with pytest.raises(ValueError, match=message):
            drawn_by(library, case, jnp.zeros(case.shape))


def assert_outputs_agree(case: Case) -> None:
    """Assert that all libraries agree on a random input and cotangent."""
    arrays, x = variables_of(case), inputs_of(case)
    y = jax.eval_shape(case.spec, arrays, x, **case.call)
    assert_libraries_agree(case, arrays, x, jax.random.normal(jax.random.key(2), y.shape, y.dtype))
