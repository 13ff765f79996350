"""Kernel configurations: selection, file contents, and the `lutjax tune` search."""

import dataclasses
import functools
import itertools
import json
import math
import pickle
import re
import signal
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import slow
from commands import command

import lutjax
from lutjax import optim as tables, testing, tuning
from lutjax.benchmark import search, shapes
from lutjax.benchmark.measure import Timing
from lutjax.dispatch.registry import Backend, Device
from lutjax.tuning import Launch, _files, _launch, _launches

H200 = Device(Backend.GPU, "NVIDIA H200")
SIZES = {"samples": 4096, "detectors": 16, "outputs": 32}
BUCKET = _launch.bucket(SIZES)
RULE, OTHER, THIRD = Launch(32, 32, 4, 4), Launch(64, 32, 0, 2), Launch(16, 16, 1, 1)


def chosen(kernel="lookup.forward", device=H200, **sizes):
    return tuning.launch_of(kernel, {**SIZES, **sizes}, device, lambda sizes: RULE)


@pytest.fixture
def shipped(monkeypatch):
    """Configurations measured on an H200."""
    launches = {}
    monkeypatch.setattr(_launches, "measured", lambda kind: launches if kind == H200.kind else {})
    return launches


# ---------------------------------------------------------------------------------------------- values
@pytest.mark.parametrize(("values", "message"), [
    ((3, 32), "rows is 3; expected a power of two from 1 to 65536"),
    ((0, 32), "rows is 0"),
    ((True, 32), "rows is True"),
    ((32, 2**17), "outputs is 131072"),
    ((32, 32, -1), "detectors is -1; expected a whole number, 0 for all"),
    ((32, 32, 0, 64), "warps is 64; expected a power of two from 1 to 32"),
    ((2**11, 2**10), "a tile of rows * outputs = 2048 * 1024 values; at most 2**20"),
])  # fmt: skip
@pytest.mark.usefixtures("without_typechecking")
def test_invalid_launch_is_refused(values, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        Launch(*values)


def test_sizes_are_rounded_to_powers_of_two():
    sizes = (0, 1, 2, 3, 5, 6, 11, 12, 4095)
    assert [_launch.round_to_power(size) for size in sizes] == [0, 1, 2, 4, 4, 8, 8, 16, 4096]
    assert _launch.bucket({"samples": 11, "outputs": 5}) == (("outputs", 4), ("samples", 8))


# ---------------------------------------------------------------------------------------------- the choice
def test_explicit_precedes_measured_precedes_rule(shipped):
    assert chosen() == RULE
    shipped["lookup.forward", BUCKET] = OTHER
    assert chosen() == chosen(samples=5000) == OTHER
    assert chosen(samples=8192) == chosen("lookup.table") == RULE
    assert chosen(device=Device(Backend.GPU, "NVIDIA A100")) == RULE
    with tuning.use({"lookup.forward": THIRD}):
        assert chosen() == chosen(samples=8192) == THIRD
        assert chosen("lookup.table") == RULE
    assert chosen() == OTHER


def test_inner_block_precedes_outer_block():
    with tuning.use({"lookup.forward": RULE, "lookup.table": THIRD}):
        with tuning.use({("lookup.forward", BUCKET): OTHER}):
            assert chosen() == OTHER
            assert chosen(samples=1) == RULE
            with tuning.use({"lookup.forward": THIRD}):
                assert chosen() == THIRD
            assert chosen("lookup.table") == THIRD
        assert chosen() == RULE


def test_blocks_are_part_of_the_cache_key_of_jit(tmp_path):
    traces, file = [], tmp_path / "launches.json"
    f = jax.jit(lambda x: traces.append(chosen()) or x)
    document_of(OTHER).write(file)
    for _ in range(2):
        jax.eval_shape(f, 1.0)
        for launches in ({"lookup.forward": THIRD}, file):
            with tuning.use(launches):
                jax.eval_shape(f, 1.0)
    assert traces == [RULE, THIRD, OTHER]


def test_recorded_calls_are_traced_anew(shipped):
    f = jax.jit(lambda x: x * chosen().rows)
    jax.eval_shape(f, 1.0)
    shipped["lookup.forward", BUCKET] = OTHER
    for _ in range(2):
        with tuning.recorded() as asked:
            jax.eval_shape(f, 1.0)
        assert asked == [tuning.Asked("lookup.forward", SIZES, OTHER, "measured", RULE)]
    with tuning.recorded() as asked, tuning.use({"lookup.forward": THIRD}):
        jax.eval_shape(f, 1.0)
    assert [(a.launch, a.source) for a in asked] == [(THIRD, "use")]


# ---------------------------------------------------------------------------------------------- launches of one call
KERNELS = {"forward": "forward", "backward": "margins", "update": "table"}
EVERY = {f"lookup.{kernel}": OTHER for kernel in KERNELS.values()}
TABLES, PAIR = np.ones((1, 4, 2), np.float32), np.int32([[[0, 1], [1, 2]]])
X = np.float32([[1.0, 0.5, 0.0]])


@pytest.fixture
def traced():
    """Lookup configurations by kernel, where "triton" is plain JAX on CPUs."""
    asked, plain = [], lutjax.kernel_registry.get("lookup", "xla")

    def run(direction):
        def function(*args, **how):
            asked.append((KERNELS[direction], chosen(f"lookup.{KERNELS[direction]}")))
            return plain.load(direction)(*args, **how)

        return staticmethod(function)

    own = type("Own", (), {direction: run(direction) for direction in KERNELS})
    lutjax.kernel_registry.register("lookup", "triton", "cpu", priority=-1, launches=tuple(EVERY))(
        own
    )
    yield asked
    lutjax.kernel_registry.unregister("lookup", "triton", "cpu")


def looked_up(weights, x, implementation):
    return lutjax.lookup(weights, lutjax.detect(x, PAIR), implementation=implementation)


def test_launches_of_one_call_hold_in_every_direction_and_for_no_other_call(traced):
    how = tuning.launched("triton", EVERY)

    @jax.jit
    def f(weights, x):
        return jnp.sum(looked_up(weights, x, how) + looked_up(weights, x, "triton"))

    with tuning.use({"lookup.forward": THIRD}):
        jax.eval_shape(f, TABLES, X)
    assert traced == [("forward", OTHER), ("forward", THIRD)]
    traced.clear()
    jax.eval_shape(lambda *args: jax.vjp(f, *args)[1](jnp.float32(1)), TABLES, X)
    assert set(traced) == set(itertools.product(("forward", "margins"), (OTHER, RULE)))
    traced.clear()
    jax.eval_shape(jax.vmap(functools.partial(looked_up, TABLES, implementation=how)), X[None])
    jax.eval_shape(jax.grad(lambda x: jnp.sum(looked_up(TABLES, x, how))), X)
    assert {launch for _, launch in traced} == {OTHER}
    traced.clear()
    gradient = tables.value_and_grad(
        lambda w: jnp.sum(looked_up(w, X, "xla")), tables=lambda *_: True
    )
    jax.eval_shape(
        lambda w: lutjax.update_table(w, gradient(w)[1], 0.5, implementation=how), TABLES
    )
    assert traced == [("table", OTHER)]


def test_launches_of_one_call_are_part_of_its_key(traced):
    for _ in range(2):
        looked_up(TABLES, X, tuning.launched("triton", EVERY))
        third = tuning.launched(("triton", "xla"), {"lookup.forward": THIRD})
        looked_up(TABLES, X, pickle.loads(pickle.dumps(third)))
        looked_up(TABLES, X, tuning.launched("xla", {}))
    assert traced == [("forward", OTHER), ("forward", THIRD)]
    with lutjax.use_implementation({"lookup": tuning.launched("triton", {"lookup.forward": RULE})}):
        looked_up(TABLES, X, None)
    assert traced[2:] == [("forward", RULE)]


@pytest.mark.parametrize(
    ("implementation", "launches", "error", "message"),
    [
        ("triton", {"lookup.forward": 32}, TypeError, "'lookup.forward' is 32; expected a tuning.Launch"),
        ("triton", {"lookup.front": RULE}, ValueError, "launches has 'lookup.front'; the kernels of triton that"),
        ("pallas/gpu", {"detect.forward": RULE}, ValueError, "take a launch are lookup.margins, lookup_attention.m"),
        ("xla", {"lookup.forward": RULE}, ValueError, "xla has no kernels that take a launch; those have triton"),
        ("tritn", {}, ValueError, "unknown implementation 'tritn'; the implementations are xla,"),
        (RULE, {}, TypeError, "implementation is Launch(rows=32, outputs=32, detectors=4, warps=4); expected a name"),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("without_typechecking")
def test_invalid_launches_of_one_call_are_refused(implementation, launches, error, message):
    with pytest.raises(error, match=re.escape(message)):
        tuning.launched(implementation, launches)
    if error is TypeError and launches:
        with pytest.raises(TypeError, match=re.escape(message)):
            tuning.use(launches).__enter__()
    if implementation is RULE:
        with pytest.raises(
            TypeError, match=r"implementation is Launch\(.*what lutjax.tuning.launched returns"
        ):
            looked_up(TABLES, X, RULE)


TUNED_OPS = sorted({kernel.partition(".")[0] for kernel in lutjax.kernel_registry.launchable()})


@pytest.mark.parametrize(
    ("op", "sizes"),
    [("lookup", ["split"]), *(slow(op, [*testing.shapes(op, "triton")]) for op in TUNED_OPS)],
)
def test_kernels_that_take_a_launch_are_declared(interpreted, op, sizes):
    asked = set()
    for size in sizes:
        for program in testing.programs(testing.case(op, size), "triton").values():
            with tuning.recorded() as result:
                jax.eval_shape(program.function, *program.shapes())
            asked |= {a.kernel for a in result}
    assert f"{op}.forward" in asked <= set(lutjax.kernel_registry.launchable())


# ---------------------------------------------------------------------------------------------- files
def entry(launch=RULE, **sizes):
    return _files.Entry("lookup.forward", {**SIZES, **sizes}, launch, 12.5, 20.0)


def document_of(*launches):
    document = _files.Document(H200.kind, {"jax": "0.10.2"})
    for number, launch in enumerate(launches):
        document = document.with_entry(entry(launch, samples=4096 << number))
    return document


def test_files_are_read_as_written(tmp_path):
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
    backwards = dataclasses.replace(document, entries=dict(reversed(document.entries.items())))
    assert backwards.text() == document.text()
    replaced = document.with_entry(entry(THIRD, samples=4000)).entries.values()
    assert {(e.sizes["samples"], e.launch) for e in replaced} == {(4000, THIRD), (8192, OTHER)}


GOOD = {
    "kernel": "a.b",
    "sizes": {"samples": 1},
    "launch": {"rows": 8, "outputs": 8, "detectors": 0, "warps": 1},
}


@pytest.mark.parametrize(("content", "message"), [
    ("{", "is not JSON"),
    ([], "is []; expected an object with 'device'"),
    ({"device": "x", "versions": {}}, "has no 'launches'"),
    ({"device": 1}, "'device' is 1; expected a text"),
    ({"launches": {}}, "'launches' is {}; expected a list"),
    ({"launches": [GOOD, 5]}, "launches[1] is 5; expected an object with 'kernel'"),
    ({"launches": [GOOD | {"sizes": 5}]}, "launches[0] (a.b): 'sizes' is 5; expected an object"),
    ({"launches": [GOOD | {"sizes": {"samples": "1"}}]},
        "sizes: 'samples' is \"1\"; expected a whole"),
    ({"launches": [GOOD | {"launch": {"rows": 8}}]},
        "'launch' has the fields ['rows']; expected ['det"),
    ({"launches": [GOOD | {"launch": GOOD["launch"] | {"rows": 7}}]}, "(a.b): Launch: rows is 7"),
    ({"launches": [GOOD | {"microseconds": "1"}]},
        "'microseconds' is \"1\"; expected a number or null"),
])  # fmt: skip
def test_invalid_file_is_refused(tmp_path, content, message):
    path = tmp_path / "bad.json"
    if isinstance(content, dict) and content.keys() == {"launches"}:
        content = {"device": "x", "versions": {}, **content}
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        tuning.load(path)
    assert str(error.value).startswith(str(path))


def test_shipped_files_have_declared_kernels_and_no_slower_launches():
    for path in (Path(_files.__file__).parent / "data").glob("*.json"):
        document = _files.read(path)
        assert tuning.measured(document.device) == document.launches()
        assert document.text() == path.read_text()
        for one in document.entries.values():
            assert one.microseconds <= (one.rule_microseconds or math.inf)
        tuning.launched("triton", document.launches())
    assert tuning.measured("an unknown device") == {}


# ---------------------------------------------------------------------------------------------- the search
LARGE = {"samples": 4096, "detectors": 64, "outputs": 256}


def bowl(launch):
    """Seconds, fewest of 64 x 128, 8 detectors, 8 warps."""
    best = Launch(64, 128, 8, 8)
    powers = (
        math.log2(getattr(launch, n) / getattr(best, n)) for n in ("rows", "outputs", "warps")
    )
    return 1 + sum(d * d for d in (*powers, (launch.detectors - 8) / 8))


def descend(seconds, start=RULE, together=1):
    """Return the best launch, and all launches in measurement order."""
    measured = []
    cost = search.Cost(lambda launch: measured.append(launch) or seconds(launch))
    best = search.descend([start], search.fields(LARGE, start), cost, together)
    assert len(measured) == len(set(measured)) == cost.measured + cost.skipped
    return best, measured, cost


@pytest.mark.parametrize(("effort", "most"), [("quick", 40), ("thorough", 200)])
def test_descent_finds_the_fastest(effort, most):
    best, measured, _ = descend(bowl, together=search.EFFORTS[effort])
    assert best == Launch(64, 128, 8, 8)
    assert measured[0] == RULE
    assert len(measured) < most
    assert all(4 <= n.rows * n.outputs / (32 * n.warps) <= 64 for n in measured)


def test_two_fields_at_once_cross_a_ridge():
    def ridge(launch):
        """Seconds, fewer only if more rows come with more warps."""
        return 1 / launch.rows if launch.rows == 8 * launch.warps else 10.0 + launch.rows

    start = Launch(8, 32, 0, 1)
    assert [descend(ridge, start, n)[0] for n in search.EFFORTS.values()] == [
        start,
        Launch(64, 32, 0, 8),
    ]


def test_noise_keeps_the_rule():
    noise = itertools.cycle([1.0, 0.995, 1.003, 0.998])
    best, measured, _ = descend(lambda launch: next(noise))
    assert best == RULE
    assert len(measured) > 10


def test_launches_that_do_not_run_are_skipped_and_counted():
    def refuse(launch):
        if launch.warps == 8 or launch == RULE:
            raise ValueError("the shared memory holds less\nthan that")
        return bowl(launch)

    best, _, cost = descend(refuse)
    assert best == Launch(64, 128, 8, 4)
    assert cost(RULE) == math.inf
    assert cost.skipped > 1
    assert cost.problem == "ValueError: the shared memory holds less"

    def bug(launch):
        raise TypeError("a mistake")

    with pytest.raises(TypeError, match="a mistake"):
        descend(bug)


def test_equal_programs_are_measured_once():
    measured = []
    cost = search.Cost(
        lambda launch: measured.append(launch) or 1.0, lambda launch: min(launch.rows, 8)
    )
    assert cost(Launch(8, 8)) == cost(Launch(64, 8)) == 1.0
    assert (len(measured), cost.measured) == (1, 1)


def test_values_of_fields_follow_the_sizes():
    values = search.fields({"samples": 20, "detectors": 3, "outputs": 3}, Launch(4, 2, 3, 16))
    assert [*values] == ["rows", "outputs", "detectors", "warps"]
    assert [*values.values()] == [(4, 8, 16, 32), (2, 8), (0, 1, 2, 3), (1, 2, 4, 8, 16)]


# ---------------------------------------------------------------------------------------------- kernels of a shape
TINY = "fc:4,3,2,2,1"
GATES = {"gates:6,5,4": 2, "soft_lut:6,5,4,3": 3, "binary_lut:6,5,4,3": 5}


@pytest.fixture
def interpreted():
    pytest.importorskip("triton")
    import triton_interpreter

    with triton_interpreter.interpreted():
        yield


@pytest.fixture
def instantly(monkeypatch):
    """Record the kernels to measure; nothing runs."""
    measured = []

    def time(f, *args, in_place, **options):
        with tuning.recorded() as asked:
            y = jax.eval_shape(f, *args)
        [kernel] = asked
        measured.append(kernel.kernel)
        assert kernel.source == "use"
        assert not in_place or y[0].shape == args[0].shape  # the carried state comes first
        return Timing(*[1e-6 * bowl(kernel.launch)] * 3, 1, 1, None)

    def arrays(part):
        return jax.tree.map(lambda a: np.zeros(a.shape, a.dtype), part.abstract_arrays())

    monkeypatch.setattr(search, "device_time", time)
    monkeypatch.setattr(search.Part, "arrays", arrays)
    return measured


def test_interrupted_run_keeps_finished_kernels(interpreted, instantly, tmp_path, monkeypatch):
    tune_one, done = search.tune, []

    def interrupt(kernel, *args):
        if done:
            signal.raise_signal(signal.SIGINT)
        done.append(kernel.asked.kernel)
        return tune_one(kernel, *args)

    monkeypatch.setattr(search, "tune", interrupt)
    path = tmp_path / "launches.json"
    out = command("tune", "--output", path, "--shape", TINY)
    assert out.exit_code == 130
    assert "Interrupted after 1 of" in out.output
    assert [kernel for kernel, _ in _files.read(path).entries] == done


@pytest.mark.parametrize(("words", "code", "message"), [
    ([], 2, "Missing option '--out'"),
    (["--output", "missing/a.json"], 2, "'missing' is not a writable folder"),
    (["--output", "old.json"], 2, "'old.json' exists; pass --update to replace"),
    (["--output", "old.json", "--update"], 2, "was measured on NVIDIA H200, this is"),
    (["--output", "old.json", "--update", "--resume"], 2, "exclude each other; choose one"),
    (["--output", "bad.json", "--resume"], 2, "bad.json is not JSON"),
    (["--output", "new.json", "--shape", "large"], 2, "'large' is not a shape"),
    (["--output", "new.json", "--shape", "ffn"], 1, "lookup: runs on gpu, the call runs on"),
])  # fmt: skip
def test_errors_come_before_measurements(words, code, message, tmp_path, monkeypatch):
    if jax.default_backend() != "cpu" and code == 1:
        pytest.skip("tests the error of a machine without a GPU")
    monkeypatch.chdir(tmp_path)
    document_of(RULE).write(tmp_path / "old.json")
    (tmp_path / "bad.json").write_text("no")
    monkeypatch.setattr(search, "tune", None)
    out = command("tune", *words)
    assert (out.exit_code, message in " ".join(out.output.split())) == (code, True), out.output
    assert not (tmp_path / "new.json").exists()


class TestSlow:
    def test_nothing_is_read_or_searched_at_import(self):
        code = (
            "import json, sys; json.loads = None; import lutjax, lutjax.tuning;"
            "bad = [m for m in sys.modules if m in ('lutjax.benchmark.search', 'lutjax.benchmark', 'triton')];"
            "sys.exit(str(bad) if bad else 0)"
        )
        subprocess.run([sys.executable, "-c", code], check=True)

    def test_kernels_of_shapes(self, interpreted):
        sequence = [shapes.parse("seq:1,3,4,2,1,0")] * 2
        actual = [
            k for k in search.kernels(sequence, ("float32",)) if "attention" in k.asked.kernel
        ]
        parts = {k.asked.kernel.partition(".")[2]: k.part for k in actual}
        assert {n: part.in_place for n, part in parts.items()} == {
            "forward": False,
            "margins": False,
            "table": True,
        }
        sizes = {f"{name} {size}" for name, size in actual[0].asked.sizes.items()}
        assert {"samples 1", "queries 3", "keys 3", "detectors 2"} <= sizes
        assert set(str(actual[0]).split(", ")) == {"lookup_attention.forward", *sizes}
        gates = search.kernels([shapes.parse(text) for text in GATES], ("float32",))
        ops = [k.asked.kernel.partition(".")[0] for k in gates]
        assert [ops.count(op) for op in dict.fromkeys(ops)] == [*GATES.values()]
        assert not any(k.part.in_place for k in gates)
        for part in (parts["table"], gates[1].part):
            arrays = part.arrays()
            assert [a.shape for a in jax.tree.leaves(arrays)] == [
                a.shape for a in jax.tree.leaves(part.abstract_arrays())
            ]
            result = part.run(*arrays)
            if part.in_place:
                assert result[0].shape == arrays[0].shape == (2, 2**2, 4)
                assert jnp.any(result[0] != arrays[0])
            else:
                assert {name: a.shape for name, a in result.items()} == {
                    "x": (5, 6),
                    "coefficients": (4, 4),
                }

    def test_command_measures_resumes_and_updates(self, interpreted, instantly, tmp_path):
        path = tmp_path / "launches.json"
        words = "tune", "--output", path, "--shape", TINY
        out = command(*words)
        assert out.exit_code == 0, out.output
        assert f"Wrote {path}" in out.output
        document = _files.read(path)
        kernels = {kernel for kernel, _ in document.entries}
        assert {"lookup.forward", "lookup.margins", "lookup.table"} <= kernels == set(instantly)
        assert document.device == jax.devices()[0].device_kind
        assert document.versions["lutjax"] == lutjax.__version__
        assert all(one.microseconds <= one.rule_microseconds for one in document.entries.values())
        # Again: not over what was measured, nothing that is known, or all of it anew.
        before = path.read_text()
        assert command(*words).exit_code == 2
        instantly.clear()
        out = command(*words, "--resume")
        assert "has all of these kernels and sizes" in out.output
        assert (out.exit_code, instantly) == (0, [])
        assert command(*words, "--update").exit_code == 0
        assert instantly
        assert path.read_text() == before
        with tuning.use(path), tuning.recorded() as asked:
            for part in search.training_parts(shapes.parse(TINY), "float32"):
                part.launches()  # has a list of its own
                jax.eval_shape(part.run, *part.abstract_arrays())
        assert {a.source for a in asked} == {"use"}
