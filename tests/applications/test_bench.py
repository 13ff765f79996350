"""`lutjax bench`: measured calls, timings, and saved results."""

import csv
import dataclasses
import io
import re
import signal
from types import SimpleNamespace

import jax
import jax.experimental
import jax.numpy as jnp
import numpy as np
import pytest
from cases import slow_except
from commands import command
from rich.console import Console

import lutjax
from lutjax.benchmark import language_model, measure, measurements, report, results, shapes
from lutjax.benchmark.measure import Timing, device_time, peak_bytes
from lutjax.cases import Tag
from lutjax.cli import _bench, _measuring

pytestmark = pytest.mark.usefixtures("without_native")  # rows are those of plain JAX

TINY = {
    "fc": "fc:8,4,3,2,2",
    "scored": "scored:8,4,3,4,2,2",
    "scored_powers": "scored:8,4,3,4,2,2,6",
    "sparse": "sparse:8,4,5,2,2,3",
    "seq": "seq:2,5,4,3,1,1",
    "window": "seq:2,5,4,3,1,1,2",
    "no_positions": "seq:2,5,4,3,1,0",
    "pair": "pair:2,5,4,3,2,1",
    "pair-interleaved": "pair-interleaved:2,5,4,3,2,4",
}
GATES = {"gates": "gates:7,5,3", "soft_lut": "soft_lut:7,5,3,4", "binary_lut": "binary_lut:7,5,3,4"}


def bench(*words):
    return command("bench", *words)


def rows_of(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture
def instantly(monkeypatch):
    """Record the planned measurements without running them."""
    measured = []

    def time(self, **options):
        measured.append(self)
        return Timing(1e-3, 2e-3, 3e-3, 10, 20, 3 * self.table_bytes)

    monkeypatch.setattr(measurements.Measurement, "measure", time)
    monkeypatch.setattr(results, "copy_bandwidth", lambda: 1e9)
    return measured


# ------------------------------------------------------------------------------------------------- measuring
def products_in_the_loop(*args):
    """Count the computations with products reachable from the loop."""
    text = measure._any_count(jnp.dot, False, (), args).as_text()
    computations = dict(
        re.findall(r"^(?:ENTRY )?%(\S+) \(.*?\{\n(.*?)^\}", text, re.DOTALL | re.MULTILINE)
    )
    reached, todo = set(), set(re.findall(r" while\(.*body=%([^,\s]+)", text))
    while todo:
        reached |= todo
        called = {n for name in todo for n in re.findall(r"%([\w.-]+)", computations[name])}
        todo = (called & set(computations)) - reached
    return sum("dot_general" in computations[name] for name in reached)


def test_work_stays_in_the_loop(monkeypatch):
    a = jnp.ones((64, 64))
    assert products_in_the_loop(a, a)
    monkeypatch.setattr(jax.lax, "optimization_barrier", lambda arrays: arrays)
    assert not products_in_the_loop(a, a)


def test_time_grows_with_the_work():
    short, long = (
        device_time(jnp.sort, jnp.arange(n, 0, -1), repeats=5, loop_seconds=0.01)
        for n in (2**8, 2**15)
    )
    assert short.loops == 5
    assert short.p20 <= short.p50 <= short.p80
    assert short.p50 < long.p50


def test_state_is_carried_on_and_consumed_in_place():
    counts = []

    def step(count, by):
        jax.debug.callback(lambda c: counts.append(int(c)), count, ordered=True)
        return count + by, ()

    state = jnp.int32(0)
    timing = device_time(step, state, jnp.int32(2), in_place=True, repeats=3, loop_seconds=1e-6)
    jax.effects_barrier()
    assert counts == list(range(0, 2 * len(counts), 2))
    assert len(counts) >= timing.calls * timing.loops
    assert state.is_deleted()


class Machine:
    """Fake clock, advanced by a fixed number of seconds per call; also records the compiled loop lengths."""

    def __init__(self, monkeypatch, backend, seconds):
        self.now, self.seconds, self.lengths = 0.0, seconds, []
        loop = measure._loop

        def remember(f, in_place, count):
            self.lengths.append(count)
            return loop(f, in_place, count)

        monkeypatch.setattr(jax, "default_backend", lambda: backend)
        monkeypatch.setattr(measure, "time", SimpleNamespace(perf_counter=lambda: self.now))
        monkeypatch.setattr(measure, "_loop", remember)

    def time(self, **options):
        def call(x):
            self.now += self.seconds
            return x

        x = jnp.ones(())
        return device_time(lambda x: jax.experimental.io_callback(call, x, x), x, **options)


@pytest.mark.parametrize(("seconds", "calls"), [(1e-4, 100), (6e-3, 1), (1.0, 1)])
def test_loop_takes_the_requested_seconds(monkeypatch, seconds, calls):
    timing = Machine(monkeypatch, "cpu", seconds).time(repeats=4, loop_seconds=0.01, budget=1e9)
    assert timing.calls == pytest.approx(calls, abs=1)
    assert timing.p50 == pytest.approx(seconds)
    assert timing.loops == 4


@pytest.mark.parametrize(("backend", "seconds"), [("gpu", 1e-3), ("gpu", 3e-3), ("cpu", 1e-3)])
def test_accelerator_gets_a_loop_of_static_length_for_short_calls(monkeypatch, backend, seconds):
    machine = Machine(monkeypatch, backend, seconds)
    timing = machine.time(repeats=3)
    assert machine.lengths == [
        None,
        *([timing.calls] if (backend, seconds) == ("gpu", 1e-3) else []),
    ]


def test_slow_calls_stop_at_the_budget(monkeypatch):
    machine = Machine(monkeypatch, "cpu", 1.0)
    assert machine.time(repeats=1000, budget=0.0).loops == 3
    assert machine.time(repeats=1000, budget=10.0).loops == 10


def test_copy_bandwidth_is_plausible():
    assert 1e6 < measure.copy_bandwidth(2**20) < 1e14


# ---------------------------------------------------------------------------------------------------- shapes
def test_names_and_sizes_are_the_same_shapes():
    for name, shape in shapes.named_shapes().items():
        assert shapes.parse(name) == shape == shapes.parse(str(shape))
        assert shapes.name_of(shape) == name


@pytest.mark.parametrize(("text", "message"), [
    ("large", "'large' is not a shape; it must be one of ffn, unembed"),
    ("conv:1,2", "or sizes: fc:batch,inputs,outputs,detectors,anchors; scored:"),
    ("fc:1,2,x,4,5", "sizes that are not whole numbers; expected fc:batch"),
    ("fc:1,2,3", "has 3 sizes; expected fc:batch,inputs,outputs,detectors,anchors"),
    ("seq:1,2,3,4,5,6,7,8", "has 8 sizes; expected seq:batch,length,inputs"),
    ("fc:0,4,4,4,4", "batch is 0; it must be at least 1"),
    ("fc:1,1,4,4,4", "inputs is 1; it must be at least 2"),
    ("seq:1,4,4,4,14,4", "a row has 32 address bits; it can have at most 30"),
    ("pair-interleaved:1,4,4,4,4,3",
        "position_bits is 3; interleaved it must be that of inputs, 4"),
    ("lm:0", "batch is 0"),
    ("gates:4,0,2", "inputs is 0; it must be at least 1"),
    ("soft_lut:4,4,4,9", "places is 9; a table can have at most 8"),
])  # fmt: skip
def test_invalid_shape_is_refused(text, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        shapes.parse(text)


def test_bytes_of_a_fully_connected_shape():
    """2 samples, 3 inputs, 5 outputs, 7 detectors with 1 pair each."""
    traffic = shapes.op_shape("fc", 2, 3, 5, 7, 1).traffic
    uses, row = 2 * 7, 5 * 4
    inputs, outputs = (2 * 3 + 7 * 2) * 4, 2 * 5 * 4
    assert traffic.bytes_moved("forward", 4) == inputs + uses * 8 + uses * row + outputs
    both = inputs + 2 * 3 * 4 + uses * 36 + 5 * uses * row + 2 * outputs
    assert traffic.bytes_moved("in-place", 4) == both
    assert traffic.bytes_moved("dense", 4) == both + 7 * 2 * row
    assert traffic.bytes_moved("update", 4) == uses * 4 + outputs + 2 * uses * row
    # Rows and outputs of half the size.
    assert traffic.bytes_moved("forward", 2) == inputs + uses * 8 + uses * row // 2 + outputs // 2


def test_bytes_of_pairs():
    """4 positions, each attending to at most 2 earlier positions: 0 + 1 + 2 + 2 pairs."""
    traffic = shapes.op_shape("seq", 3, 4, 2, 5, 1, 1, 2).traffic
    assert (traffic.uses, traffic.table) == (3 * 5 * 5, (5, 2**3, 2))
    assert traffic.detections == 5 * (3 * 4 + 2)
    assert traffic.bytes_moved("update", 4) == traffic.detections * 4 + 3 * 4 * 2 * 4 + 2 * 75 * 8
    full, windowed = (
        shapes.op_shape("seq", 3, 4, 2, 5, 1, 1, *window).traffic for window in ((), (3,))
    )
    assert full.uses == 3 * 6 * 5 == windowed.uses
    assert shapes.op_shape("pair", 3, 4, 2, 5, 1, 1).traffic.detections == 0


def test_bytes_of_gates():
    """7 samples, 5 inputs, 3 two-input gates, and therefore at most 2 readers."""
    traffic = shapes.op_shape("gates", 7, 5, 3).traffic
    x, y, wires, readers, parameters = 5 * 7 * 2, 3 * 7 * 2, 3 * 2 * 4, 5 * 2 * 4, 4 * 3 * 4
    assert traffic.bytes_moved("forward", 2) == x + y + wires + parameters
    assert traffic.bytes_moved("dense", 2) == 3 * x + 2 * y + 2 * wires + readers + 3 * parameters


def test_bytes_of_the_language_model_are_those_of_its_layers():
    """Number of bytes an H200 moves in about 4 ms without caching."""
    layers = language_model.layers(shapes.LanguageModel(128))
    assert len(layers) == 13
    assert 15e9 < language_model.bytes_moved(shapes.LanguageModel(128), "in-place", 4) < 17e9
    tables, positions = sum(layer.traffic.table_bytes(4) for layer in layers), 6 * 31 * 64 * 4 * 4
    assert tables + positions == language_model.Step(1, "factored").table_bytes


# ----------------------------------------------------------------------------------------------------- calls
def abstract(shape, row, dtype="float32"):
    return jax.eval_shape(lambda: measurements.arguments(shape, row, dtype))


def outputs(shape, row, dtype="float32"):
    return jax.eval_shape(measurements.function(shape, row, dtype), *abstract(shape, row, dtype))


BOTH = [(text, dtype) for text in TINY.values() for dtype in measurements.DTYPES]


@pytest.mark.parametrize(
    ("text", "dtype"), slow_except(BOTH, *(f"{TINY[name]}-float32" for name in ("fc", "sparse")))
)
def test_rows_of_lookups_have_the_shapes_of_their_traffic(text, dtype):
    shape = shapes.parse(text)
    out = {r: outputs(shape, r, dtype) for r in shapes.ROWS}
    y, gradients = out["dense"]
    assert y == out["forward"] == out["in-place"][1][0]
    table = gradients.pop("weights")
    assert y.dtype == table.dtype == dtype
    assert table == out["in-place"][0] == out["update"][0]
    assert gradients == out["in-place"][1][1]
    if text.startswith("scored"):  # bytes, in which no array is counted apart
        size = table.dtype.itemsize
        assert table.size * size == shape.traffic.table_bytes(size)
    else:
        assert y.size == shape.traffic.numbers_out
        assert table.shape == shape.traffic.table
        assert sum(g.size for g in gradients.values()) == shape.traffic.numbers_in


@pytest.mark.parametrize("text", slow_except(GATES.values(), "binary_lut", ids=GATES), ids=GATES)
def test_rows_of_gates_are_forward_and_dense(text):
    shape = shapes.parse(text)
    actual = list(measurements.measurements(shape, dtype="bfloat16"))
    assert {c.row: c.kernel_names for c in actual} == dict.fromkeys(
        ("forward", "dense"), f"{shape.op}: xla"
    )
    y, gradients = outputs(shape, "dense", "bfloat16")
    assert y == outputs(shape, "forward", "bfloat16")
    assert (y.shape, y.dtype) == ((3, 7), "bfloat16")
    name, size = ("coefficients", (4, 3)) if shape.op == "bilinear_gates" else ("table", (3, 16))
    assert {n: g.shape for n, g in gradients.items()} == {"x": (5, 7), name: size}
    _, constants, _ = jax.jit(lambda: measurements.arrays(shape, "float32"))()
    assert constants["readers"].shape == (5, 2 if shape.op == "bilinear_gates" else 3)
    assert jnp.array_equal(constants["readers"], lutjax.readers(constants["wires"], 5))


class _Unrounded(lutjax.reads.PowersOfTwo):
    """Read for tables with entries at integer multiples of their scale."""

    rounds_tables = False


def test_in_place_row_copies_no_table():
    shape = shapes.parse("fc:4,4,3,2,12")
    function = measurements.function(shape, "in-place", "float32")
    peak = peak_bytes(function, *abstract(shape, "in-place"), in_place=True)
    assert 1 <= peak / shape.traffic.table_bytes(4) < 1.1


def test_implementations_are_those_with_a_kernel_here():
    def unsupported(request):
        return request.call.window and "a window"

    shape = shapes.parse(TINY["seq"])
    plain = list(measurements.measurements(shape))
    assert [(c.row, c.implementation) for c in plain] == [(row, "xla") for row in shapes.ROWS]
    kernels = "detect: xla, detect_signs: xla, lookup_attention: "
    assert plain[-2].kernel_names == f"{kernels}xla, lookup_attention update: xla"
    registry = lutjax.kernel_registry
    registry.register("lookup_attention", "pallas", "any", "nowhere", unsupported=unsupported)
    try:
        both = {(c.row, c.implementation): c for c in measurements.measurements(shape)}
        windowed = list(measurements.measurements(shapes.parse(TINY["window"])))
    finally:
        registry.unregister("lookup_attention", "pallas", "any")
    assert len(both) == 7  # the update has no kernel of it
    assert both["forward", "pallas"].kernel_names == f"{kernels}pallas"
    assert {c.implementation for c in windowed} == {"xla"}


# ----------------------------------------------------------------------------------------------- the command


def test_measurement_larger_than_the_memory_is_a_note(tmp_path, monkeypatch, instantly):
    def fail(self, **options):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    monkeypatch.setattr(measurements.Measurement, "measure", fail)
    path = tmp_path / "rows.csv"
    assert bench("--shape", TINY["fc"], "--row", "forward", "--csv", path).exit_code == 0
    [row] = rows_of(path)
    assert (row["p50_s"], row["note"]) == ("", "out of memory")


@pytest.mark.usefixtures("without_typechecking")
def test_defaults_on_a_cpu(instantly):
    assert bench("--row", "forward", "--dtype", "bfloat16").exit_code == 0
    if jax.default_backend() == "cpu":
        assert [(c.name, c.dtype) for c in instantly] == [
            (name, "bfloat16") for name in shapes.named_shapes(Tag.CPU)
        ]
    instantly.clear()
    assert (
        bench(
            "--shape", "lm", "--lm-batch", 4, "--dtype", "float32", "--dtype", "bfloat16"
        ).exit_code
        == 0
    )
    assert [(c.name, c.row, c.dtype) for c in instantly] == [
        ("lm:4", "in-place", dtype) for dtype in ("float32", "bfloat16")
    ]


@pytest.mark.parametrize(("words", "message"), [
    (["--csv", "missing/rows.csv"], "'missing' is not a writable folder"),
    (["--png", "."], "is a directory"),
    (["--repeats", "2"], "2; it must be at least 3"),
    (["--dtype", "int8"], "'float32', 'bfloat16'"),
    (["--shape", "ffn", "--shape", "large"],
        "'large' is not a shape; it must be one of ffn, unembed"),
    (["--shape", "lm", "--row", "forward"], "nothing to measure"),
    (["--accumulate", "0"], "0.0; it must be above 0"),
    (["--shape", "gate_network", "--accumulate", "16"], "gate_network has no sums that take it"),
])  # fmt: skip
def test_errors_come_before_measurements(words, message, tmp_path, monkeypatch, instantly):
    monkeypatch.chdir(tmp_path)
    out = bench(*words)
    assert out.exit_code == 2
    assert message in " ".join(out.output.split())
    assert not instantly
    assert not list(tmp_path.iterdir())


# --------------------------------------------------------------------------------------------------- reports
def result(shape, device="cpu", dtype="float32"):
    measurement = measurements.Measurement(shapes.parse(shape), "in-place", "xla", dtype, {})
    timing = Timing(1e-4, 1e-4, 1e-4, 1, 3, 10**6)
    return results.Result(results.Machine(device, 3.9e12), measurement, timing)


def test_recorded_figures_are_shown_where_they_were_measured():
    for name, row, dtype, device in results.load_recorded_figures():
        assert name in shapes.named_shapes()
        assert row in shapes.ROWS
        assert (dtype, device) == ("float32", "NVIDIA H200")
    for where, shown in (
        (("NVIDIA H200", "float32"), True),
        (("NVIDIA H200", "bfloat16"), False),
        (("cpu", "float32"), False),
    ):
        names, [cells] = report.columns([result("seq-128x32", *where)])
        assert ("CUDA" in names) == shown == ("3.62 ms" in cells)
        assert len(names) == len(cells)


@pytest.mark.parametrize(
    ("width", "left_out"), [(200, set()), (60, {"p20-p80", "/ tables", "moves"})]
)
def test_narrow_terminal_gets_fewer_columns(width, left_out):
    made = report.table([result("ffn")], Console(width=width))
    names, _ = report.columns([result("ffn")])
    assert set(names) - {str(column.header) for column in made.columns} == left_out


def test_terminal_shows_the_running_measurement():
    stream = io.StringIO()
    with _measuring.Progress(Console(file=stream, force_terminal=True, width=120), 2) as progress:
        progress.starts("ffn, forward, xla, float32")
    assert "ffn, forward, xla, float32" in stream.getvalue()


class TestSlow:
    @pytest.mark.parametrize("dtype", measurements.DTYPES)
    def test_integer_tables_have_only_a_forward_row(self, dtype):
        """8 samples, 2 groups with 4 inputs and 3 outputs, 4 int8 tables with 4 rows each."""
        shape = shapes.parse("scored-int8:8,4,3,4,2,2")
        (actual,) = measurements.measurements(shape, dtype=dtype)
        assert (actual.row, actual.kernel_names, actual.table_bytes) == (
            "forward",
            "scored_lut: xla",
            4 * 4 * 3,
        )
        numbers_in, ids, rows = 2 * 8 * 4 + 3, 2 * 4 * 2, 2 * 8 * 4 * 3
        assert actual.bytes_moved == (numbers_in + ids) * 4 + rows + 2 * 8 * 3 * 4
        params, constants = measurements.arguments(shape, "forward", dtype)
        assert "weights" not in params
        assert constants["weights"].dtype == jnp.int8
        y = measurements.function(shape, "forward", dtype)(params, constants)
        assert (y.shape, y.dtype) == ((8, 2, 3), "float32")
        x, scale = params.pop("x").astype(jnp.float32), 2.0**-7
        weights = constants["weights"].astype(jnp.float32) * scale
        wanted = lutjax.scored_lut(
            x, weights, constants["anchors"], params, read=_Unrounded(), groups=2
        )
        assert jnp.allclose(y, wanted, rtol=1e-5, atol=1e-6)

    def test_command_writes_rows_table_and_picture(self, tmp_path, monkeypatch):
        monkeypatch.setattr(results, "copy_bandwidth", lambda: 1e9)
        files = {f"--{name}": tmp_path / f"rows.{name}" for name in ("csv", "markdown", "png")}
        written = [word for pair in files.items() for word in pair]
        out = bench(
            "--shape", TINY["fc"], "--row", "forward", "--row", "in-place", "--repeats", 3, *written
        )
        assert out.exit_code == 0, out.output
        assert "a copy moves 1.0 GB/s" in out.output
        assert "It is a reference, not a promise" in " ".join(out.output.split())
        rows = rows_of(files["--csv"])
        assert [(r["shape"], r["row"], r["implementation"]) for r in rows] == [
            (TINY["fc"], row, "xla") for row in ("forward", "in-place")
        ]
        for row in rows:
            assert 0 < float(row["p20_s"]) <= float(row["p50_s"]) <= float(row["p80_s"])
            assert float(row["limit_s"]) == int(row["bytes"]) / 1e9
            assert row["device"] == jax.devices()[0].device_kind
            assert (row["jax"], row["lutjax"], row["dtype"]) == (
                jax.__version__,
                lutjax.__version__,
                "float32",
            )
            assert int(row["peak_bytes"]) > int(row["table_bytes"]) == 2 * 4 * 3 * 4
        assert f"| {TINY['fc']} | in-place | xla |" in files["--markdown"].read_text()
        assert files["--png"].read_bytes().startswith(b"\x89PNG")
        for option, path in files.items():
            _measuring.check_file(option, path, _bench.MARKS[option])  # they are written again

    def test_interrupted_run_keeps_finished_rows(self, tmp_path, monkeypatch, instantly):
        measure_one = measurements.Measurement.measure

        def interrupt(self, **options):
            if len(instantly) == 2:
                signal.raise_signal(signal.SIGINT)
            return measure_one(self, **options)

        monkeypatch.setattr(measurements.Measurement, "measure", interrupt)
        rows, picture = tmp_path / "rows.csv", tmp_path / "bars.png"
        out = bench("--shape", TINY["fc"], "--csv", rows, "--png", picture)
        assert out.exit_code == 130
        assert "Interrupted after 2 of 4 rows" in out.output
        assert [r["row"] for r in rows_of(rows)] == ["forward", "dense"]
        assert picture.exists()

    def test_integer_accumulation_is_measured_where_it_is_supported(self, instantly):
        assert (
            bench("--row", "forward", "--accumulate", 16, "--implementation", "xla").exit_code == 0
        )
        if jax.default_backend() == "cpu":
            expected = [
                name
                for name, of in shapes.named_shapes(Tag.CPU).items()
                if measurements.accumulates(of)
            ]
            assert {"ffn", "seq-sparse"} <= set(expected)
            assert [c.name for c in instantly] == [f"{name} at 16" for name in expected]
        [shape] = {c.shape for c in instantly if c.name == "ffn at 16"}
        tiny = dataclasses.replace(shapes.parse(TINY["fc"]), accumulate=shape.accumulate)
        params, constants, _ = measurements.arrays(tiny, "float32")
        y = measurements.function(tiny, "forward", "float32")(params, constants)
        np.testing.assert_array_equal(y * 16, np.round(y * 16))
