"""Launches: how they are chosen, what files of them hold, how `lutjax tune` finds them."""

import functools
import itertools
import json
import math
import pickle
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import slow
from click.testing import Result
from commands import command

import lutjax
from lutjax import optim as tables, testing, tuning
from lutjax.benchmark import search, shapes
from lutjax.benchmark.measure import Timing
from lutjax.dispatch.registry import Backend, Device
from lutjax.tuning import Launch, _files, _launch, _launches

H200 = Device(Backend.GPU, "NVIDIA H200")
SIZES = {"samples": 4096, "detectors": 16, "outputs": 32}
LAUNCHING = sorted({kernel.partition(".")[0] for kernel in lutjax.kernel_registry.launchable()})
RULE, OTHER, THIRD = Launch(32, 32, 4, 4), Launch(64, 32, 0, 2), Launch(16, 16, 1, 1)


def rule(sizes: dict[str, int]) -> Launch:
    return RULE


def chosen(kernel: str = "lookup.forward", **sizes: int) -> Launch:
    return tuning.launch_of(kernel, {**SIZES, **sizes}, H200, rule)


@pytest.fixture
def shipped(monkeypatch: pytest.MonkeyPatch) -> dict[Any, Launch]:
    """Launches that were measured on an H200."""
    launches: dict[Any, Launch] = {}
    monkeypatch.setattr(_launches, "measured", lambda kind: launches if kind == H200.kind else {})
    return launches


# ---------------------------------------------------------------------------------------------- values
@pytest.mark.parametrize(
    ("values", "message"),
    [
        ((3, 32), "rows is 3; expected a power of two from 1 to 65536"),
        ((0, 32), "rows is 0"),
        ((True, 32), "rows is True"),
        ((32, 2**17), "outputs is 131072"),
        ((32, 32, -1), "detectors is -1; expected a whole number, 0 for all"),
        ((32, 32, 0, 64), "warps is 64; expected a power of two from 1 to 32"),
        ((2**11, 2**10), "a tile of rows * outputs = 2048 * 1024 values; at most 2**20"),
    ],
)
@pytest.mark.usefixtures("without_typechecking")
def test_bad_launches(values: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Launch(*values)


@pytest.mark.parametrize(
    ("size", "rounded"), [(0, 0), (1, 1), (2, 2), (3, 4), (5, 4), (6, 8), (11, 8), (12, 16), (4095, 4096)]
)
def test_sizes_are_rounded_to_powers(size: int, rounded: int) -> None:
    assert _launch.round_to_power(size) == rounded
    assert _launch.bucket({"samples": size, "outputs": 5}) == (("outputs", 4), ("samples", rounded))


# ---------------------------------------------------------------------------------------------- the choice
def test_explicit_before_measured_before_the_rule(shipped: dict[Any, Launch]) -> None:
    assert chosen() == RULE
    shipped["lookup.forward", _launch.bucket(SIZES)] = OTHER
    assert chosen() == chosen(samples=5000) == OTHER
    assert chosen(samples=8192) == chosen("lookup.table") == RULE
    assert tuning.launch_of("lookup.forward", SIZES, Device(Backend.GPU, "NVIDIA A100"), rule) == RULE
    with tuning.use({"lookup.forward": THIRD}):
        assert chosen() == chosen(samples=8192) == THIRD
        assert chosen("lookup.table") == RULE
    assert chosen() == OTHER


def test_inner_blocks_count() -> None:
    at_sizes = {("lookup.forward", _launch.bucket(SIZES)): OTHER}
    with tuning.use({"lookup.forward": RULE, "lookup.table": THIRD}):
        with tuning.use(at_sizes):
            assert chosen() == OTHER
            assert chosen(samples=1) == RULE
            with tuning.use({"lookup.forward": THIRD}):
                assert chosen() == THIRD
            assert chosen("lookup.table") == THIRD
        assert chosen() == RULE


@pytest.mark.usefixtures("without_typechecking")
def test_only_launches_are_used() -> None:
    with pytest.raises(TypeError, match=re.escape("'lookup.forward' is 32; expected a tuning.Launch")):
        tuning.use({"lookup.forward": 32}).__enter__()


def test_blocks_are_part_of_the_cache_key_of_jit(tmp_path: Path) -> None:
    traces = []

    @jax.jit
    def f(x: jax.Array) -> jax.Array:
        traces.append(chosen())
        return x

    file = tmp_path / "launches.json"
    document_of(OTHER).write(file)
    for _ in range(2):
        f(jnp.ones(2))
        with tuning.use({"lookup.forward": THIRD}):
            f(jnp.ones(2))
        with tuning.use(file):
            f(jnp.ones(2))
    assert traces == [RULE, THIRD, OTHER]


def test_recorded_calls_are_traced_anew(shipped: dict[Any, Launch]) -> None:
    f = jax.jit(lambda x: x * chosen().rows)
    f(jnp.ones(2))
    shipped["lookup.forward", _launch.bucket(SIZES)] = OTHER
    for _ in range(2):
        with tuning.recorded() as asked:
            jax.eval_shape(f, jnp.ones(2))
        assert asked == [tuning.Asked("lookup.forward", SIZES, OTHER, "measured", RULE)]
    with tuning.recorded() as asked, tuning.use({"lookup.forward": THIRD}):
        f(jnp.ones(2))
    assert [(a.launch, a.source) for a in asked] == [(THIRD, "use")]


# ---------------------------------------------------------------------------------------------- launches of one call
@pytest.fixture
def traced() -> Iterator[list[tuple[str, Launch]]]:
    """Look-ups of the implementation "triton" on CPUs, in plain JAX; the launches that they ask for while they are traced."""
    asked: list[tuple[str, Launch]] = []
    plain = lutjax.kernel_registry.get("lookup", "xla")

    def run(direction: Any, kernel: str) -> Callable[..., Any]:
        def function(*args: Any, **how: Any) -> Any:
            asked.append((kernel, chosen(f"lookup.{kernel}")))
            return plain.load(direction)(*args, **how)

        return staticmethod(function)

    names = {"forward": "forward", "backward": "margins", "update": "table"}
    own = type("Own", (), {direction: run(direction, kernel) for direction, kernel in names.items()})
    launches = tuple(f"lookup.{kernel}" for kernel in names.values())
    lutjax.kernel_registry.register("lookup", "triton", "cpu", priority=-1, launches=launches)(own)
    yield asked
    lutjax.kernel_registry.unregister("lookup", "triton", "cpu")


TABLES = np.ones((1, 4, 2), np.float32)
PAIR = np.int32([[[0, 1], [1, 2]]])
EVERY = {f"lookup.{kernel}": OTHER for kernel in ("forward", "margins", "table")}


def looked_up(weights: jax.Array, x: jax.Array, implementation: Any) -> jax.Array:
    return lutjax.lookup(weights, lutjax.detect(x, PAIR), implementation=implementation)


def test_launches_of_one_call(traced: list[tuple[str, Launch]]) -> None:
    """They hold forward and backward, also where a function is differentiated or traced later, and for no other call."""
    how = tuning.launched("triton", EVERY)

    @jax.jit
    def f(weights: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sum(looked_up(weights, x, how) + looked_up(weights, x, "triton"))

    x = jnp.array([[1.0, 0.5, 0.0]])
    with tuning.use({"lookup.forward": THIRD}):
        f(TABLES, x)
    assert traced == [("forward", OTHER), ("forward", THIRD)]
    traced.clear()
    _, pull = jax.vjp(f, TABLES, x)
    pull(jnp.float32(1))
    assert set(traced) == set(itertools.product(("forward", "margins"), (OTHER, RULE)))
    traced.clear()
    jax.vmap(functools.partial(looked_up, TABLES, implementation=how))(x[None])
    jax.grad(lambda x: jnp.sum(looked_up(TABLES, x, how)))(x)
    assert {launch for _, launch in traced} == {OTHER}


def test_launches_of_one_call_are_part_of_its_key(traced: list[tuple[str, Launch]]) -> None:
    x = jnp.array([[1.0, 0.5, 0.0]])
    third = {"lookup.forward": THIRD}
    for _ in range(2):
        looked_up(TABLES, x, tuning.launched("triton", EVERY))
        looked_up(TABLES, x, pickle.loads(pickle.dumps(tuning.launched(("triton", "xla"), third))))
        looked_up(TABLES, x, tuning.launched("xla", {}))
    assert traced == [("forward", OTHER), ("forward", THIRD)]
    with lutjax.use_implementation({"lookup": tuning.launched("triton", {"lookup.forward": RULE})}):
        looked_up(TABLES, x, None)
    assert traced[2:] == [("forward", RULE)]


def test_launches_of_one_update(traced: list[tuple[str, Launch]]) -> None:
    def loss(weights: jax.Array) -> jax.Array:
        return jnp.sum(looked_up(weights, jnp.array([[1.0, 0.5, 0.0]]), None))

    weights = jnp.asarray(TABLES)
    _, gradient = tables.value_and_grad(loss, tables=lambda *_: True)(weights)
    moved, _ = lutjax.update_table(weights, gradient, 0.5, implementation=tuning.launched("triton", EVERY))
    assert traced == [("table", OTHER)]
    assert jnp.any(moved != weights)


@pytest.mark.parametrize(
    ("implementation", "launches", "error", "message"),
    [
        ("triton", {"lookup.forward": 32}, TypeError, "'lookup.forward' is 32; expected a tuning.Launch"),
        ("triton", {"lookup.front": RULE}, ValueError, "launches has 'lookup.front'; the kernels of triton that"),
        ("pallas/gpu", {"detect.forward": RULE}, ValueError, "take a launch are lookup.forward, lookup.margins, look"),
        ("xla", {"lookup.forward": RULE}, ValueError, "xla has no kernels that take a launch; those have triton"),
        ("tritn", {}, ValueError, "unknown implementation 'tritn'; the implementations are xla,"),
        (RULE, {}, TypeError, "implementation is Launch(rows=32, outputs=32, detectors=4, warps=4); expected a name"),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("without_typechecking")
def test_bad_launches_of_one_call(implementation: Any, launches: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        tuning.launched(implementation, launches)


@pytest.mark.usefixtures("without_typechecking")
def test_a_launch_is_no_implementation() -> None:
    with pytest.raises(TypeError, match=r"implementation is Launch\(.*what lutjax.tuning.launched returns"):
        looked_up(TABLES, jnp.ones((1, 3)), RULE)


@pytest.mark.parametrize("op", [op if op == "lookup" else slow(op) for op in LAUNCHING])
def test_kernels_that_take_a_launch_are_declared(interpreted: None, op: str) -> None:
    asked: list[tuning.Asked] = []
    for case in testing.cases(op):
        for program in testing.programs(case, "triton").values():
            with tuning.recorded() as found:
                jax.eval_shape(program.function, *program.shapes())
            asked += found
    assert {a.kernel for a in asked} <= set(lutjax.kernel_registry.launchable())
    assert f"{op}.forward" in {a.kernel for a in asked}


def test_shipped_launches_are_of_declared_kernels() -> None:
    tuning.launched("triton", tuning.measured(H200.kind))


@pytest.mark.slow
def test_nothing_is_read_or_searched_at_import() -> None:
    code = (
        "import json, sys; json.loads = None; import lutjax, lutjax.tuning;"
        "bad = [m for m in sys.modules if m in ('lutjax.benchmark.search', 'lutjax.benchmark', 'triton')];"
        "sys.exit(str(bad) if bad else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# ---------------------------------------------------------------------------------------------- files
def entry(launch: Launch = RULE, kernel: str = "lookup.forward", **sizes: int) -> _files.Entry:
    return _files.Entry(kernel, {**SIZES, **sizes}, launch, 12.5, 20.0)


def document_of(*launches: Launch) -> _files.Document:
    document = _files.Document(H200.kind, {"jax": "0.10.2"})
    for number, launch in enumerate(launches):
        document = document.with_entry(entry(launch, samples=4096 << number))
    return document


def test_files_are_read_as_written(tmp_path: Path) -> None:
    path = tmp_path / "launches.json"
    document = document_of(RULE, OTHER)
    document.write(path)
    assert _files.read(path) == document
    assert list(tmp_path.iterdir()) == [path]
    assert json.loads(path.read_text())["launches"][1] == {
        "kernel": "lookup.forward",
        "sizes": {"samples": 8192, "detectors": 16, "outputs": 32},
        "launch": {"rows": 64, "outputs": 32, "detectors": 0, "warps": 2},
        "microseconds": 12.5,
        "rule_microseconds": 20.0,
    }
    assert tuning.load(path)["lookup.forward", _launch.bucket({**SIZES, "samples": 8192})] == OTHER
    backwards = _files.Document(document.device, document.versions)
    for one in reversed(document.entries.values()):
        backwards = backwards.with_entry(one)
    assert backwards.text() == document.text()


def test_an_entry_replaces_that_of_like_sizes() -> None:
    document = document_of(RULE, OTHER).with_entry(entry(THIRD, samples=4000))
    assert sorted((e.sizes["samples"], e.launch) for e in document.entries.values()) == sorted(
        [(4000, THIRD), (8192, OTHER)]
    )


def test_a_failed_write_leaves_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "launches.json"
    document_of(RULE).write(path)
    before = path.read_text()

    def fail(number: int) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(_files.os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        document_of(OTHER).write(path)
    assert (path.read_text(), list(tmp_path.iterdir())) == (before, [path])


GOOD = {
    "kernel": "a.b",
    "sizes": {"samples": 1},
    "launch": {"rows": 8, "outputs": 8, "detectors": 0, "warps": 1},
}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ([], "is []; expected an object with 'device'"),
        ({"device": "x", "versions": {}}, "has no 'launches'"),
        ({"device": 1}, "'device' is 1; expected a text"),
        ({"launches": {}}, "'launches' is {}; expected a list"),
        ({"launches": [GOOD, 5]}, "launches[1] is 5; expected an object with 'kernel'"),
        ({"launches": [GOOD | {"sizes": 5}]}, "launches[0] (a.b): 'sizes' is 5; expected an object"),
        ({"launches": [GOOD | {"sizes": {"samples": "1"}}]}, "sizes: 'samples' is \"1\"; expected a whole"),
        ({"launches": [GOOD | {"launch": {"rows": 8}}]}, "'launch' has the fields ['rows']; expected ['det"),
        ({"launches": [GOOD | {"launch": GOOD["launch"] | {"rows": 7}}]}, "(a.b): Launch: rows is 7"),
        ({"launches": [GOOD | {"microseconds": "1"}]}, "'microseconds' is \"1\"; expected a number or null"),
    ],
)
def test_bad_files(tmp_path: Path, content: Any, message: str) -> None:
    path = tmp_path / "bad.json"
    if isinstance(content, dict) and content.keys() == {"launches"}:
        content = {"device": "x", "versions": {}, **content}
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        tuning.load(path)
    assert str(error.value).startswith(str(path))


def test_shipped_files_can_be_read() -> None:
    """Each is that of its kind of device, with launches that are not slower than the rule's."""
    folder = Path(_files.__file__).parent / "data"
    for path in folder.glob("*.json"):
        document = _files.read(path)
        assert tuning.measured(document.device) == document.launches()
        assert document.text() == path.read_text()
        for one in document.entries.values():
            assert one.microseconds is not None
            assert one.microseconds <= (one.rule_microseconds or math.inf)
    assert tuning.measured("an unknown device") == {}


# ---------------------------------------------------------------------------------------------- the search
def timer(seconds: Callable[[Launch], float]) -> tuple[search.Cost, list[Launch]]:
    """A cost of these seconds, and the launches it measured."""
    measured: list[Launch] = []

    def time(launch: Launch) -> float:
        measured.append(launch)
        return seconds(launch)

    return search.Cost(time), measured


def bowl(launch: Launch) -> float:
    """The fastest is 64 x 128, 8 detectors, 8 warps."""
    distances = (
        math.log2(launch.rows / 64),
        math.log2(launch.outputs / 128),
        (launch.detectors - 8) / 8,
        math.log2(launch.warps / 8),
    )
    return 1 + sum(d * d for d in distances)


LARGE = {"samples": 4096, "detectors": 64, "outputs": 256}


@pytest.mark.parametrize("effort", search.EFFORTS)
def test_descent_finds_the_fastest(effort: search.Effort) -> None:
    cost, measured = timer(bowl)
    values = search.fields(LARGE, RULE)
    best = search.descend([RULE], values, cost, search.EFFORTS[effort])
    assert best == Launch(64, 128, 8, 8)
    assert len(measured) == len(set(measured)) == cost.measured
    assert measured[0] == RULE
    assert len(measured) < (40 if effort == "quick" else 200)


def test_two_fields_at_once_cross_a_ridge() -> None:
    def ridge(launch: Launch) -> float:
        """Faster only if more rows come with more warps."""
        return 1 / launch.rows if launch.rows == 8 * launch.warps else 10.0 + launch.rows

    start = Launch(8, 32, 0, 1)
    values = search.fields(LARGE, start)
    found = [search.descend([start], values, timer(ridge)[0], n) for n in search.EFFORTS.values()]
    assert found == [start, Launch(64, 32, 0, 8)]


def test_noise_moves_nothing() -> None:
    noise = itertools.cycle([1.0, 0.995, 1.003, 0.998])
    cost, measured = timer(lambda launch: next(noise))
    assert search.descend([RULE], search.fields(LARGE, RULE), cost, 1) == RULE
    assert len(measured) > 10


def test_what_does_not_run_is_skipped_and_counted() -> None:
    def refuse(launch: Launch) -> float:
        if launch.warps == 8 or launch == RULE:
            raise ValueError("the shared memory holds less\nthan that")
        return bowl(launch)

    cost, _ = timer(refuse)
    best = search.descend([RULE], search.fields(LARGE, RULE), cost, 1)
    assert best == Launch(64, 128, 8, 4)
    assert cost(RULE) == math.inf
    assert cost.skipped > 1
    assert cost.problem == "ValueError: the shared memory holds less"

    def bug(launch: Launch) -> float:
        raise TypeError("a mistake")

    with pytest.raises(TypeError, match="a mistake"):
        timer(bug)[0](RULE)


def test_launches_that_come_to_the_same_are_measured_once() -> None:
    measured = []
    cost = search.Cost(lambda launch: measured.append(launch) or 1.0, lambda launch: min(launch.rows, 8))
    assert cost(Launch(8, 8)) == cost(Launch(64, 8)) == 1.0
    assert (len(measured), cost.measured) == (1, 1)


def test_values_that_are_tried() -> None:
    values = search.fields({"samples": 20, "detectors": 3, "outputs": 3}, Launch(4, 2, 3, 16))
    assert values == {
        "rows": (4, 8, 16, 32),
        "outputs": (2, 8),
        "detectors": (0, 1, 2, 3),
        "warps": (1, 2, 4, 8, 16),
    }
    cost, measured = timer(bowl)
    search.descend([RULE], search.fields(LARGE, RULE), cost, 2)
    assert all(4 <= n.rows * n.outputs / (32 * n.warps) <= 64 for n in measured)


# ---------------------------------------------------------------------------------------------- a shape's kernels
SEQUENCE, TINY = "seq:1,3,4,2,1,0", "fc:4,3,2,2,1"


@pytest.fixture
def interpreted() -> Iterator[None]:
    pytest.importorskip("triton")
    import triton_interpreter

    with triton_interpreter.interpreted():
        yield


@pytest.fixture
def instantly(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Nothing runs; the kernels whose launches would have been measured."""
    measured: list[str] = []

    def time(f: Any, *args: Any, in_place: bool, **options: Any) -> Timing:
        with tuning.recorded() as asked:
            jax.eval_shape(f, *args)
        [kernel] = asked
        measured.append(kernel.kernel)
        assert kernel.source == "use"
        # The state that is carried on comes first.
        if in_place:
            assert jax.eval_shape(f, *args)[0].shape == args[0].shape
        seconds = 1e-6 * bowl(kernel.launch)
        return Timing(seconds, seconds, seconds, 1, 1, None)

    def zeros(part: search.Part) -> Any:
        return jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), part.abstract())

    monkeypatch.setattr(search, "device_time", time)
    monkeypatch.setattr(search.Part, "arrays", zeros)
    return measured


def tune(*words: object) -> Result:
    return command("tune", *words)


def shapes_of(arrays: Any) -> list[tuple[int, ...]]:
    return [a.shape for a in jax.tree.leaves(arrays)]


@pytest.mark.slow
def test_kernels_of_a_shape(interpreted: None) -> None:
    shape = shapes.parse(SEQUENCE)
    found = [k for k in search.kernels([shape, shape], ("float32",)) if "attention" in k.asked.kernel]
    parts = {k.asked.kernel.partition(".")[2]: k.part.in_place for k in found}
    assert parts == {"forward": False, "margins": False, "table": True}
    assert all(k.asked.sizes["queries"] == k.asked.sizes["keys"] == 3 for k in found)
    sizes = {f"{name} {size}" for name, size in found[0].asked.sizes.items()}
    assert {"samples 1", "queries 3", "keys 3", "detectors 2"} <= sizes
    assert set(str(found[0]).split(", ")) == {"lookup_attention.forward", *sizes}
    table = found[-1].part
    arrays = table.arrays()
    assert shapes_of(arrays) == shapes_of(table.abstract())
    stepped, _ = table.run(*arrays)
    assert stepped.shape == arrays[0].shape == (2, 2**2, 4)
    assert jnp.any(stepped != arrays[0])


@pytest.mark.slow
def test_kernels_of_gates(interpreted: None) -> None:
    measured = [shapes.parse(text) for text in ("gates:6,5,4", "soft_lut:6,5,4,3", "binary_lut:6,5,4,3")]
    found = search.kernels(measured, ("float32",))
    assert {k.asked.kernel: k.part.in_place for k in found} == dict.fromkeys(
        (
            "bilinear_gates.forward",
            "bilinear_gates.inputs",
            "soft_lut.forward",
            "soft_lut.readers",
            "soft_lut.table",
            "binary_lut.forward",
            "binary_lut.words",
            "binary_lut.addresses",
            "binary_lut.inputs",
            "binary_lut.table",
        ),
        False,
    )
    part = found[1].part
    arrays = part.arrays()
    assert shapes_of(arrays) == shapes_of(part.abstract())
    cotangents = part.run(*arrays)
    assert {name: a.shape for name, a in cotangents.items()} == {"x": (5, 6), "coefficients": (4, 4)}


@pytest.mark.slow
def test_the_command(interpreted: None, instantly: list[str], tmp_path: Path) -> None:
    path = tmp_path / "launches.json"
    out = tune("--output", path, "--shape", TINY)
    assert out.exit_code == 0, out.output
    assert f"Wrote {path}" in out.output
    document = _files.read(path)
    kernels = {kernel for kernel, _ in document.entries}
    assert {"lookup.forward", "lookup.margins", "lookup.table"} <= kernels
    assert document.device == jax.devices()[0].device_kind
    assert document.versions["lutjax"] == lutjax.__version__
    assert kernels == set(instantly)
    for one in document.entries.values():
        assert one.microseconds is not None
        assert one.rule_microseconds is not None
        assert one.microseconds <= one.rule_microseconds
    # Again: not over what was measured, nothing that is known, or all of it anew.
    before = path.read_text()
    assert tune("--output", path, "--shape", TINY).exit_code == 2
    instantly.clear()
    out = tune("--output", path, "--shape", TINY, "--resume")
    assert "has all of these kernels and sizes" in out.output
    assert (out.exit_code, instantly) == (0, [])
    assert tune("--output", path, "--shape", TINY, "--update").exit_code == 0
    assert instantly
    assert path.read_text() == before
    with tuning.use(path), tuning.recorded() as asked:
        search.parts(shapes.parse(TINY), "float32")[0].launches()  # has a list of its own
        for part in search.parts(shapes.parse(TINY), "float32"):
            jax.eval_shape(part.run, *part.abstract())
    assert asked
    assert {a.source for a in asked} == {"use"}


def test_an_interrupted_run_has_what_was_measured(
    interpreted: None, instantly: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tune_one = search.tune
    done: list[str] = []

    def interrupt(kernel: search.Kernel, *args: Any) -> search.Found:
        if done:
            signal.raise_signal(signal.SIGINT)
        done.append(kernel.asked.kernel)
        return tune_one(kernel, *args)

    monkeypatch.setattr(search, "tune", interrupt)
    path = tmp_path / "launches.json"
    out = tune("--output", path, "--shape", TINY)
    assert out.exit_code == 130
    assert "Interrupted after 1 of" in out.output
    assert [kernel for kernel, _ in _files.read(path).entries] == done


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ([], 2, "Missing option '--out'"),
        (["--output", "missing/a.json"], 2, "'missing' is not a writable folder"),
        (["--output", "old.json"], 2, "'old.json' exists; measure it again (--update)"),
        (["--output", "old.json", "--update"], 2, "was measured on NVIDIA H200, this is"),
        (["--output", "old.json", "--update", "--resume"], 2, "exclude each other; choose one"),
        (["--output", "bad.json", "--resume"], 2, "bad.json is not JSON"),
        (["--output", "new.json", "--shape", "large"], 2, "'large' is not a shape"),
        (["--output", "new.json", "--shape", "ffn"], 1, "lookup: runs on gpu, the call runs on"),
    ],
)
def test_errors_before_anything_runs(
    words: list[str], code: int, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if jax.default_backend() != "cpu" and code == 1:
        pytest.skip("tests the error of a machine that has no GPU for kernels in Triton, and this one has")
    monkeypatch.chdir(tmp_path)
    document_of(RULE).write(tmp_path / "old.json")
    (tmp_path / "bad.json").write_text("no")
    monkeypatch.setattr(search, "tune", None)
    out = tune(*words)
    assert (out.exit_code, message in " ".join(out.output.split())) == (code, True), out.output
    assert not (tmp_path / "new.json").exists()
