"""`lutjax status`: cells say what was checked, and a wrong kernel shows."""

import dataclasses
import json
import types
from pathlib import Path

from click.testing import CliRunner

import lutjax
from lutjax import testing
from lutjax.cli._main import cli
from lutjax.kernels._xla import lookup as plain
from lutjax.status import _checks, _digests, _matrix, _records, _report

PAGE = Path(__file__).parents[1] / "docs" / "status.md"
CPU = next(c for c in _matrix.COLUMNS if c.key == "xla/cpu")
TPU = next(c for c in _matrix.COLUMNS if c.key == "pallas/tpu")


def cell(state, op="lookup", direction="forward", column="xla/cpu", dtype="float32", **rest):
    return _matrix.Cell(op, direction, column, dtype, state, **rest)


def test_every_op_has_its_rows():
    ops = {_matrix.registered_name(op, direction) for op, direction in _matrix.ROWS}
    assert ops == set(lutjax.kernel_registry.ops())


def test_what_runs_here_is_compared_with_the_reference(monkeypatch):
    found = _checks.check("lookup", CPU, "float32")
    assert {d: c.state for d, c in found.items()} == dict.fromkeys(
        ("forward", "backward", "update"), "runs here"
    )

    wrong = types.SimpleNamespace(forward=lambda *a, **o: plain.forward(*a, **o) + 1, backward=plain.backward)
    spec = lutjax.kernel_registry.get("lookup", platform="xla", backend="any")
    monkeypatch.setattr(type(spec), "load", lambda self, direction: getattr(wrong, direction))
    lutjax.ops._transforms._compiled.cache_clear()
    lutjax.ops._transforms._kernel.cache_clear()
    directions = _checks._each_direction(
        "lookup", CPU, "float32", lambda p, d: _checks._run(p, d, CPU.device)
    )
    assert directions["forward"].state == "fails"
    assert "differs from the reference" in directions["forward"].reason
    assert directions["backward"].state == "runs here"
    lutjax.ops._transforms._compiled.cache_clear()
    lutjax.ops._transforms._kernel.cache_clear()


def test_what_cannot_run_here_is_lowered_or_has_a_reason():
    found = _checks.check("lookup", TPU, "float32")
    assert found["forward"].state == "lowers"
    found = _checks.check("lookup", TPU, "float64")
    assert found["backward"].state == "unsupported"
    assert "float64" in found["backward"].reason


def test_records_of_an_older_source_say_so(tmp_path):
    now = _digests.digest("lutjax.kernels._xla.lookup")
    assert (
        now == _digests.digest("lutjax.kernels._xla.lookup") != _digests.digest("lutjax.kernels._xla.detect")
    )
    current = cell(_matrix.State.RUNS, kinds=("cpu",), jax="0.10.2", digest=now)
    older = dataclasses.replace(current, direction="backward", digest="0" * 16)
    _records.write([current, older], tmp_path / "cpu.json")
    read = _records.read(tmp_path)
    assert read[current.place].state == "ran"
    assert read[current.place].reason == ""
    assert "older source" in str(read[older.place])
    # Compiled from this source says more than run from an older one.
    compiled = dataclasses.replace(older, state=_matrix.State.COMPILES, digest=now)
    _records.write([compiled], tmp_path / "z.json")
    assert _records.read(tmp_path)[older.place].state == "compiles"


def test_matrix_of_records():
    recorded = {}
    cells = list(_matrix.matrix(recorded, None, [CPU], ["lookup"]))
    assert {c.state for c in cells} == {"not checked"}
    of_record = cell(_matrix.State.RAN, digest="1")
    cells = list(_matrix.matrix({of_record.place: of_record}, None, [CPU], ["lookup"]))
    assert of_record in cells
    asked = []

    def check(op, column, dtype):
        asked.append((op, dtype))
        return {d: cell(_matrix.State.RUNS, op, d, dtype=dtype) for d in ("forward", "backward", "update")}

    cells = list(_matrix.matrix({of_record.place: of_record}, check, [CPU], ["lookup"]))
    assert {c.state for c in cells} == {"runs here"}  # this machine's device is asked again
    assert asked == [("lookup", dtype) for dtype in ("float32", "bfloat16", "float16", "float64")]


def test_report():
    cells = [
        cell(_matrix.State.RUNS, kinds=("cpu",)),
        cell(_matrix.State.MISSING, column="pallas/gpu", reason="has no kernel yet"),
        cell(_matrix.State.UNSUPPORTED, column="pallas/tpu", reason="because"),
    ]
    assert _report.summary(cells) == "1 runs here, 1 unsupported, 1 missing"
    assert _report.gaps(cells) == ["lookup forward, Pallas, GPU: missing: has no kernel yet (float32)"]
    assert _report.reasons(cells) == ["Pallas, TPU: because (lookup forward)"]
    assert "| lookup forward | `R` |" in _report.markdown(cells)
    assert json.loads(_report.as_json(cells))["totals"] == {"runs here": 1, "unsupported": 1, "missing": 1}


def test_command(tmp_path):
    run = CliRunner().invoke
    result = run(cli, ["status", "--op", "packed_lut", "--json", "--record", str(tmp_path / "r.json")])
    document = json.loads(result.stdout)
    states = {c["column"]: c["state"] for c in document["cells"]}
    assert states["xla/cpu"] == "runs here"
    assert states["triton/gpu"] == "unsupported"
    assert result.exit_code == bool(document["gaps"])
    assert [
        r["state"] for r in json.loads((tmp_path / "r.json").read_text()) if r["column"] == "xla/cpu"
    ] == ["ran"]
    result = run(cli, ["status", "--op", "look"])
    assert result.exit_code == 2
    assert "'look' is none of" in result.stderr
    result = run(cli, ["status", "--recorded", "--compile"])
    assert "--recorded checks nothing" in result.stderr


def test_every_op_has_the_size_that_is_checked():
    assert all(_checks.SHAPE in testing.shapes(op) for op in testing.OPS)


def test_page_is_current():
    cells = list(_matrix.matrix(_records.read(), None))
    assert PAGE.read_text() == _report.markdown(cells), (
        "lutjax status --recorded --markdown docs/status.md writes the page"
    )
    missing = {(c.op, c.column) for c in cells if c.state.is_gap and c.direction != "update"}
    assert not missing
