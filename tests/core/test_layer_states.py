"""Layer variables, initial values and outputs match the records in `layer_states.npz`.

Checkpoints depend on the names, collections and values. After an intended layer change,

    python tests/core/test_layer_states.py

records them again, from the repository root with `tests/support` on `PYTHONPATH`.
"""

import functools
import pathlib
from collections.abc import Iterator
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import slow_except
from every_layer import CASES, POSITIONS, sequences, vectors
from flax import nnx
from layer_libraries import LIBRARIES, Case, inputs_of, nnx_layer

from lutjax.layers import haiku as lutjax_haiku, linen

RECORDED = pathlib.Path(__file__).parents[1] / "golden" / "layer_states.npz"
DECODING = {"decode": True, "window": 3}
MORE = {
    "LUTAttention, cache of keys": sequences("LUTAttention", **POSITIONS, **DECODING),
    "LUTAttention, cache of ids": sequences("LUTAttention", cached="ids", **DECODING),
    "LUTAttention, cache of counts": sequences("LUTAttention", cached="counts", decode=True),
    "LUTPairAttention, cache": sequences("LUTPairAttention", **DECODING),
    "LUT, inferred": vectors("LUT", n_detectors=4, n_anchors=2),
    "LogicGates, inferred": vectors("LogicGates", wiring="learnable"),
}


@functools.cache
def recorded_cases() -> dict[str, Case]:
    """Return the first case for each layer and variable set."""
    result: dict[Any, str] = {}
    for name, case in CASES.items():
        if "gumbel" not in name:
            kinds = tuple((v.name, v.kind) for v in case.spec.variables())
            result.setdefault((case.layer, kinds), name)
    return {name: CASES[name] for name in result.values()} | MORE


def arguments_of(library: str, name: str, case: Case) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if name.endswith("inferred") and library != "nnx":
        return (), {"out_features": case.sizes[1], **case.options}
    return case.sizes, case.options


def drawn(library: str, name: str, case: Case, x: jax.Array) -> dict[str, Any]:
    """Return a new layer's variables, by collection or type and by name."""
    args, options = arguments_of(library, name, case)
    if library == "nnx":
        layer = nnx_layer(case)
        if case.options.get("decode"):
            layer.init_cache(x.shape, ids="ids" in name, counts="counts" in name)
        return {
            f"{type(v).__name__}/{'.'.join(map(str, path))}": v.get_value()
            for path, v in nnx.to_flat_state(nnx.state(layer, nnx.Not(nnx.RngState)))
        }
    if library == "linen":
        layer = getattr(linen, case.layer)(*args, **options)
        return flat(layer.init(jax.random.key(0), x, **case.call))
    params, state = transformed(name, case).init(jax.random.key(0), x)
    return {**flat({"params": params}), **flat({"state": state})}


def flat(tree: Any) -> dict[str, Any]:
    return {
        "/".join(str(k.key) for k in path): leaf for path, leaf in jax.tree.leaves_with_path(tree)
    }


def nested(arrays: dict[str, Any], depth: int) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for path, array in arrays.items():
        *parts, last = path.split("/", depth)
        place = result
        for part in parts:
            place = place.setdefault(part, {})
        place[last] = jnp.asarray(array)
    return result


def transformed(name: str, case: Case) -> Any:
    args, options = arguments_of("haiku", name, case)
    return hk.transform_with_state(
        lambda x: getattr(lutjax_haiku, case.layer)(*args, **options)(x, **case.call)
    )


def output(library: str, name: str, case: Case, arrays: dict[str, Any], x: jax.Array) -> jax.Array:
    args, options = arguments_of(library, name, case)
    if library == "nnx":
        layer = nnx_layer(case)
        if case.options.get("decode"):
            layer.init_cache(x.shape, ids="ids" in name, counts="counts" in name)
        for path, array in arrays.items():
            getattr(layer, path.partition("/")[2]).set_value(jnp.asarray(array))
        rngs = {"rngs": nnx.Rngs(5)} if case.spec.random else {}
        return layer(x, **case.call, **rngs)
    rng = jax.random.key(5)
    if library == "linen":
        layer = getattr(linen, case.layer)(*args, **options)
        rngs = {case.spec.stream: rng} if case.spec.random else {}
        return layer.apply(nested(arrays, 1), x, **case.call, rngs=rngs, mutable=["cache"])[0]
    trees = nested(arrays, 2)
    return transformed(name, case).apply(trees.get("params", {}), trees.get("state", {}), rng, x)[0]


def trained(arrays: dict[str, Any], case: Case) -> dict[str, Any]:
    """Return the variables with zeros replaced, for meaningful outputs."""
    names = {v.name for v in case.spec.variables() if v.kind in ("tables", "params", "quantised")}
    rng = np.random.default_rng(0)
    result = {}
    for path, array in sorted(arrays.items()):
        array, name = np.asarray(array), path.rpartition("/")[2]
        if name in names and name != "exponents" and array.size and not array.any():
            numbers = rng.integers(-100, 100, array.shape)
            array = (numbers if array.dtype == np.int8 else numbers / 64).astype(array.dtype)
        result[path] = array
    return result


def recorded() -> Iterator[tuple[str, np.ndarray]]:
    for name, case in recorded_cases().items():
        x = inputs_of(case)
        for library in LIBRARIES:
            arrays = drawn(library, name, case, x)
            for path, array in arrays.items():
                yield f"{name}|{library}|{path}", np.asarray(array)
            y = output(library, name, case, trained(arrays, case), x)
            yield f"{name}|{library}|", np.asarray(y)


@pytest.fixture(scope="module")
def states() -> dict[str, np.ndarray]:
    with np.load(RECORDED) as file:
        return dict(file)


def assert_same(actual: Any, want: np.ndarray, where: str) -> None:
    """Check equality up to elementary-function rounding, which differs between CPUs."""
    actual = np.asarray(actual)
    assert (actual.dtype, actual.shape) == (want.dtype, want.shape), where
    if np.issubdtype(want.dtype, np.floating):
        np.testing.assert_allclose(actual, want, rtol=1e-6, atol=1e-6, err_msg=where)
    else:
        np.testing.assert_array_equal(actual, want, err_msg=where)


FAST = (
    "LUT-linen", "LUT-haiku", "LogicRNN, balanced-linen", "ProjectionLUT, hard-haiku", "LUT-nnx", "ConvLUT-nnx", "LUTAttention, window-nnx",
    "ProjectionLUT, hard-nnx", "NgramMemory-nnx", "LogicGates, balanced-nnx", "SoftLUT, balanced-nnx",
)  # fmt: skip


def recorded_names() -> list[tuple[str, str]]:
    """Return names and libraries in the file, without the layers' specs."""
    with np.load(RECORDED) as file:
        return list(dict.fromkeys(tuple(key.split("|")[:2]) for key in file.files))


@pytest.mark.parametrize(("name", "library"), slow_except(recorded_names(), *FAST))
def test_recorded_state(name: str, library: str, states: dict[str, np.ndarray]) -> None:
    """A new layer has the recorded variables and values, and the recorded state gives the recorded output."""
    case, prefix = recorded_cases()[name], f"{name}|{library}|"
    x = inputs_of(case)
    of_layer = {key.removeprefix(prefix): a for key, a in states.items() if key.startswith(prefix)}
    want = of_layer.pop("")
    actual = drawn(library, name, case, x)
    assert actual.keys() == of_layer.keys()
    for path, array in actual.items():
        assert_same(array, of_layer[path], path)
    assert_same(output(library, name, case, trained(of_layer, case), x), want, "output")


def test_every_case_is_recorded() -> None:
    cases = {(name, library) for name in recorded_cases() for library in LIBRARIES}
    assert set(recorded_names()) == cases


if __name__ == "__main__":
    np.savez_compressed(RECORDED, **dict(recorded()))
