"""`lutjax status`: cells state the checks performed, wrong kernels fail, and validation results are stored per device."""

import csv
import dataclasses
import json
import re
import types

import forgotten
import jax
import pytest
from commands import command
from folders import DOCS

import lutjax
from lutjax import extras as _extras
from lutjax.dispatch import _records as shipped
from lutjax.kernels._pallas.gpu import Measured
from lutjax.kernels._xla import detect_signs as plain
from lutjax.status import (
    checks as _checks,
    matrix as _matrix,
    report as _report,
    results as _records,
)
from lutjax.status.matrix import State

CPU, NATIVE, TPU = (
    next(c for c in _matrix.COLUMNS if c.key == key)
    for key in ("xla/cpu", "native/cpu", "pallas/tpu")
)


def cell(state, op="lookup", direction="forward", column="xla/cpu", dtype="float32", **rest):
    return _matrix.Cell(op, direction, column, dtype, state, **rest)


# ---------------------------------------------------------------------------------------------- checks
def test_wrong_kernel_fails_and_right_kernel_runs(monkeypatch):
    assert {d: c.state for d, c in _checks.check("detect_signs", CPU, "float32").items()} == {
        "forward": "runs here",
        "backward": "runs here",
    }

    def forward(*args, **options):  # with wrong margins
        return jax.tree.map(
            lambda y: y + 1 if y.dtype == "float32" else y, plain.forward(*args, **options)
        )

    wrong = types.SimpleNamespace(forward=forward, backward=plain.backward)
    spec = lutjax.kernel_registry.get("detect_signs", platform="xla", backend="any")
    monkeypatch.setattr(type(spec), "load", lambda self, direction: getattr(wrong, direction))
    forgotten.compiled()
    result = _checks.check("detect_signs", CPU, "float32")
    assert result["forward"].state == "fails"
    assert "differs from the reference" in result["forward"].reason
    assert result["backward"].state == "runs here"
    forgotten.compiled()


def test_error_of_a_check_becomes_the_reason():
    def fail(program, directions):
        raise ValueError("no such thing")

    result = _checks._each_direction("detect_signs", CPU, "float32", fail, ("a kind",))
    assert {(c.state, c.kinds, c.reason) for c in result.values()} == {
        ("fails", ("a kind",), "ValueError: no such thing")
    }


# ---------------------------------------------------------------------------------------------- the matrix
def test_every_op_and_direction_has_a_row():
    registry = lutjax.kernel_registry
    ops = [op for op in registry.ops() if registry.cases(op)]
    assert _matrix.rows() == [(op, d) for op in ops for d in registry.directions(op)]
    assert {("lookup", "update"), ("packed_lut", "forward")} < set(_matrix.rows())


def test_recorded_cells_of_this_device_are_checked_again():
    assert {c.state for c in _matrix.matrix({}, None, [CPU], ["lookup"])} == {"not checked"}
    directions = "forward", "backward", "update"
    recorded = {c.position: c for c in (cell(State.RAN, direction=d) for d in directions)}
    assert set(recorded.values()) <= set(_matrix.matrix(recorded, None, [CPU], ["lookup"]))
    checked = []

    def check(op, column, dtype):
        checked.append((op, dtype))
        return {d: cell(State.RUNS, op, d, dtype=dtype) for d in directions}

    cells = list(_matrix.matrix(recorded, check, [CPU], ["lookup"]))
    assert {c.state for c in cells} == {"runs here"}
    assert checked == [("lookup", dtype) for dtype in ("float32", "bfloat16", "float16", "float64")]


@pytest.mark.usefixtures("without_native")
def test_missing_packages_are_named():
    cells = list(_matrix.matrix({}, _checks.check, [NATIVE], ["lookup"]))
    assert {c.state for c in cells} == {"not checked"}
    assert _report.not_installed(cells) == [
        f"Native, CPU: needs lutjax_cpu, not installed: {_extras.command(_extras.NATIVE)}"
    ]
    assert not _report.gaps(cells)


def test_reasons_with_figures_are_measurements():
    with (DOCS / "benchmarks" / "h200.csv").open(newline="") as file:
        rows = {
            (r["shape"], r["row"]): r
            for r in csv.DictReader(file)
            if r["implementation"] == "triton" and r["dtype"] == "float32"
        }
    for reason in (reason for reasons in _matrix.ABSENT.values() for reason in reasons.values()):
        if isinstance(reason, Measured):
            row = rows[reason.shape, reason.row]
            assert row["device"] == "NVIDIA H200"
            assert reason.microseconds == round(1e6 * float(row["p50_s"]))
            assert reason.limit == round(1e6 * float(row["limit_s"]))
        else:
            assert not re.search(r"\d (us|ms|times|%)|\d\.\d|\d [KMGT]", reason), reason


# ---------------------------------------------------------------------------------------------- reports
def test_report_lists_totals_gaps_and_reasons():
    cells = [
        cell(State.RUNS, kinds=("cpu",)),
        cell(State.MISSING, column="pallas/gpu", reason="has no kernel yet"),
        cell(State.UNSUPPORTED, column="pallas/tpu", reason="because"),
        cell(State.RAN, column="xla/gpu", kinds=("H",), lutjax="1", jax="2", date="3"),
    ]
    assert _report.summary(cells) == "1 runs here, 1 validated, 1 unsupported, 1 missing"
    assert _report.gaps(cells) == [
        "lookup forward, Pallas, GPU: missing: has no kernel yet (float32)"
    ]
    assert _report.reasons(cells) == ["Pallas, TPU: because (lookup forward)"]
    assert _report.remarks(cells)[1] == "XLA, GPU: validated on H with lutjax 1, jax 2, 3"
    page = _report.markdown(cells)
    assert "| `lookup` | runs here |" in page
    assert "\n- **validated**: outputs and gradients" in page
    assert json.loads(_report.as_json(cells))["totals"] == {
        "runs here": 1,
        "ran": 1,
        "unsupported": 1,
        "missing": 1,
    }


def test_directions_with_equal_words_share_a_row():
    """A cell lists its dtypes where they differ from its column's dtypes."""
    cells = [
        *(
            cell(State.RAN, direction=d, dtype=t)
            for d in ("forward", "backward")
            for t in ("float32", "bfloat16")
        ),
        cell(State.RAN, direction="update"),
        cell(State.UNSUPPORTED, direction="update", dtype="bfloat16"),
        cell(State.LOWERS, op="detect"),
        cell(State.RAN, op="detect", dtype="bfloat16"),
        cell(State.UNSUPPORTED, column="native/cpu"),
        cell(State.COMPILES, column="pallas/tpu"),
    ]
    cpu, tpu = _report.platform_tables(cells)
    assert (cpu.platform, cpu.columns, tpu.columns) == ("cpu", ["XLA", "Native"], ["Pallas"])
    assert cpu.dtypes == ["XLA: float32, bfloat16", "Native: none"]
    assert cpu.rows == [
        ("detect", ["lowers (float32); validated (bfloat16)", ""]),
        ("lookup forward", ["validated", "—"]),
        ("lookup backward", ["validated", ""]),
        ("lookup update", ["validated (float32)", ""]),
    ]
    assert tpu.rows == [("lookup", ["compiles"])]
    assert _report.table_in_markdown(tpu).splitlines()[-1] == "| `lookup` | compiles |"
    shared = [cell(State.RAN, direction=d) for d in ("forward", "backward", "update")]
    assert _report.platform_tables(shared)[0].rows == [("lookup", ["validated"])]


# ---------------------------------------------------------------------------------------------- records
@pytest.fixture
def records(tmp_path, monkeypatch):
    """Replace the package folder by a temporary one."""
    monkeypatch.setattr(shipped, "folder", lambda: tmp_path)
    shipped.forget()
    yield tmp_path
    shipped.forget()


def test_records_are_read_as_written(records):
    ran = cell(State.RUNS, kinds=("cpu",), jax="2", lutjax="1")
    others = [
        dataclasses.replace(ran, dtype="bfloat16"),
        dataclasses.replace(
            ran, direction="backward", state=State.UNSUPPORTED, kinds=(), reason="because"
        ),
        dataclasses.replace(ran, op="detect", date="2026-01-02"),
    ]
    left_out = [
        dataclasses.replace(ran, op="gone"),  # not registered
        dataclasses.replace(ran, column="xla/gpu"),  # another platform
        dataclasses.replace(ran, op="margins", jax=""),  # not checked
    ]
    known = dataclasses.replace(ran, op="margins")  # recorded before
    _records.write(
        [ran, *others, *left_out, known], records / "cpu.json", "cpu", {known.position: known}
    )
    assert '\n"lookup forward xla/cpu float32 bfloat16",\n' in (records / "cpu.json").read_text()
    read = _records.read()
    assert read.keys() == {c.position for c in [ran, *others]}
    for one in [ran, *others]:
        state = State.RAN if one.state == State.RUNS else one.state
        date = read[one.position].date
        assert read[one.position] == dataclasses.replace(one, state=state, date=date)
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", date)
    assert read[others[-1].position].date == "2026-01-02"


def test_strongest_result_is_shown_and_the_newest_among_equals(records):
    old = cell(State.COMPILES, kinds=("TPU v6e",), jax="2", date="2026-01-01", column="pallas/tpu")
    new = dataclasses.replace(old, date="2026-02-01")
    ran = dataclasses.replace(old, state=State.RAN, date="2025-01-01")
    for name, cells, best in (
        ("b", [old], old),
        ("c", [new], new),
        ("a", [ran], ran),
        ("d", [new], ran),
    ):
        _records.write(cells, records / f"{name}.json", "tpu")
        assert _records.read() == {best.position: best}


def test_kernel_has_run_where_one_dtype_ran_and_none_failed(records):
    def has_run(direction="forward", kind="TPU v6e", op="lookup", column="pallas/tpu"):
        return shipped.has_run(op, direction, column, kind)

    assert not has_run()
    ran = cell(State.RUNS, column="pallas/tpu", kinds=("TPU v6e",), jax="2")
    backward = dataclasses.replace(ran, direction="backward")
    fails = dataclasses.replace(backward, dtype="bfloat16", state=State.FAILS)
    lowers = dataclasses.replace(ran, direction="update", state=State.LOWERS)
    _records.write([ran, backward, fails, lowers], _records.path_of("TPU v6e"), "tpu")
    assert [path.name for path in records.iterdir()] == ["tpu-v6e.json"]
    assert has_run()
    assert not has_run("backward")
    assert not has_run("update")
    assert not has_run(kind="TPU v5p")
    assert not has_run(op="detect")
    assert not has_run(column="pallas/gpu")


@pytest.mark.usefixtures("without_native")
def test_every_kernel_is_recorded():
    cells = list(_matrix.matrix(_records.read(), None))
    assert not {(c.op, c.column) for c in cells if c.state.is_gap and c.direction != "update"}
    unknown = {(c.op, c.column) for c in cells if c.state == State.UNKNOWN}
    assert not unknown, "lutjax status --record checks them"
    assert {c.op for c in cells if c.state == State.PARTS} <= {
        "gate_network",
        "logic_trees",
        "lut_at_places",
    }


# ---------------------------------------------------------------------------------------------- the command
@pytest.mark.usefixtures("without_native")
def test_command_shows_each_check_and_records_this_device(records):
    result = command("status", "--op", "packed_lut", "--json", "--record")
    first, *lines = result.stderr.splitlines()
    path = _records.path_of(jax.devices()[0].device_kind)
    assert lines.pop() == f"Wrote {path}"
    assert first == f"Checking {len(lines)} combinations of op, implementation and dtype"
    assert "packed_lut, xla/cpu, uint32: runs here" in lines
    document = json.loads(result.stdout)
    states = {c["column"]: c["state"] for c in document["cells"]}
    assert (states["xla/cpu"], states["triton/gpu"]) == ("runs here", "unsupported")
    assert result.exit_code == bool(document["gaps"])
    column = {"cpu": "xla/cpu", "gpu": "xla/gpu"}.get(jax.default_backend(), "xla/tpu")
    assert shipped.has_run("packed_lut", "forward", column, jax.devices()[0].device_kind)
    assert not command("status", "--op", "packed_lut", "--recorded").stderr


@pytest.mark.parametrize(("words", "message"), [
    (["--op", "look"], "'look' is not one of"),
    (["--recorded", "--compile"], "--recorded checks nothing"),
])  # fmt: skip
def test_bad_options_are_refused(words, message):
    result = command("status", *words)
    assert result.exit_code == 2
    assert message in result.stderr
