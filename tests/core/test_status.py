"""`lutjax status`: cells say what was checked, and a wrong kernel shows."""

import csv
import dataclasses
import importlib
import json
import re
import sys
import types

import forgotten
import jax
import pytest
from commands import command
from folders import DOCS

import lutjax
from lutjax import extras as _extras
from lutjax.dispatch import _records as shipped
from lutjax.kernels._xla import lookup as plain
from lutjax.status import (
    _absences,
    _digests,
    checks as _checks,
    matrix as _matrix,
    report as _report,
    results as _records,
)

CPU = next(c for c in _matrix.COLUMNS if c.key == "xla/cpu")
TPU = next(c for c in _matrix.COLUMNS if c.key == "pallas/tpu")


def cell(state, op="lookup", direction="forward", column="xla/cpu", dtype="float32", **rest):
    return _matrix.Cell(op, direction, column, dtype, state, **rest)


def test_every_op_and_direction_has_its_row():
    registry = lutjax.kernel_registry
    ops = [op for op in registry.ops() if registry.cases(op)]
    assert _matrix.rows() == [(op, d) for op in ops for d in registry.directions(op)]
    assert {("lookup", "update"), ("packed_lut", "forward")} < set(_matrix.rows())


@pytest.mark.slow
def test_what_runs_here_is_compared_with_the_reference(monkeypatch):
    found = _checks.check("lookup", CPU, "float32")
    assert {d: c.state for d, c in found.items()} == dict.fromkeys(
        ("forward", "backward", "update"), "runs here"
    )

    wrong = types.SimpleNamespace(
        forward=lambda *a, **o: plain.forward(*a, **o) + 1, backward=plain.backward, update=plain.update
    )
    spec = lutjax.kernel_registry.get("lookup", platform="xla", backend="any")
    monkeypatch.setattr(type(spec), "load", lambda self, direction: getattr(wrong, direction))
    forgotten.compiled()
    directions = _checks._each_direction(
        "lookup", CPU, "float32", lambda p, d: _checks._run(p, d, CPU.device), ("cpu",)
    )
    assert directions["forward"].state == "fails"
    assert "differs from the reference" in directions["forward"].reason
    assert directions["backward"].state == "runs here"
    forgotten.compiled()


@pytest.mark.slow
def test_checks_in_processes_say_the_same(monkeypatch):
    main = sys.modules["__main__"]  # new processes would run it first
    monkeypatch.setattr(main, "__spec__", None)
    monkeypatch.delattr(main, "__file__", raising=False)
    monkeypatch.setattr(_checks, "_WORTH_A_PROCESS", 1)
    keys = [("detect_signs", column, dtype) for dtype in ("float32", "bfloat16") for column in (CPU, TPU)]
    with _checks.in_processes(_checks.check, keys) as check:
        assert check is not _checks.check
        found = [check(*key) for key in keys]
    assert found == [_checks.check(*key) for key in keys]
    with _checks.in_processes(_checks.check, keys[:1]) as check:
        assert check is _checks.check


@pytest.mark.slow
def test_what_cannot_run_here_is_lowered_or_has_a_reason():
    found = _checks.check("lookup", TPU, "float32")
    assert found["forward"].state == "lowers"
    found = _checks.check("lookup", TPU, "float64")
    assert found["backward"].state == "unsupported"
    assert "float64" in found["backward"].reason


def test_what_fails_says_where():
    def fail(program, directions):
        raise ValueError("no such thing")

    found = _checks._each_direction("detect_signs", CPU, "float32", fail, ("a kind",))
    assert {(c.state, c.kinds, c.reason) for c in found.values()} == {
        ("fails", ("a kind",), "ValueError: no such thing")
    }


def test_records_of_an_older_source_say_so(tmp_path):
    now, of_older = (_digests.digest("lutjax.kernels._xla.lookup", d) for d in ("forward", "backward"))
    current = cell(_matrix.State.RUNS, kinds=("cpu",), jax="0.10.2", digest=now)
    older = dataclasses.replace(current, direction="backward", digest="0" * 16)
    _records.write([current, older], tmp_path / "cpu.json")
    read = _records.read(tmp_path)
    assert read[current.place].state == "ran"
    assert read[current.place].reason == ""
    assert "older source" in str(read[older.place])
    assert [cell.word for cell in read.values()] == ["validated", "validated*"]
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\d", cell.date) for cell in read.values())
    assert (
        _report.summary(read.values())
        == "2 validated, 1 of these before the last change to their kernels (*)"
    )
    [remark] = _report.remarks(read.values())
    assert remark.startswith("XLA, CPU: validated on cpu with jax 0.10.2, ")
    # Compiled from this source says more than run from an older one.
    compiled = dataclasses.replace(older, state=_matrix.State.COMPILES, digest=of_older)
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
    page = _report.markdown(cells)
    assert "| `lookup` | runs here |" in page
    assert "\n- **validated**: outputs and gradients" in page
    assert "\n- **\\***: checked before the last change" in page
    assert json.loads(_report.as_json(cells))["totals"] == {"runs here": 1, "unsupported": 1, "missing": 1}


def test_tables_of_platforms():
    """Directions with equal words share a row; a cell lists its dtypes where they are not those of its column."""
    state = _matrix.State
    cells = [
        *(
            cell(state.RAN, direction=d, dtype=t)
            for d in ("forward", "backward")
            for t in ("float32", "bfloat16")
        ),
        cell(state.RAN, direction="update"),
        cell(state.UNSUPPORTED, direction="update", dtype="bfloat16"),
        cell(state.LOWERS, op="detect", reason=_matrix.OLDER),
        cell(state.RAN, op="detect", dtype="bfloat16"),
        cell(state.UNSUPPORTED, column="native/cpu"),
        cell(state.COMPILES, column="pallas/tpu"),
    ]
    cpu, tpu = _report.platform_tables(cells)
    assert (cpu.platform, cpu.columns, tpu.columns) == ("cpu", ["XLA", "Native"], ["Pallas"])
    assert cpu.dtypes == ["XLA: float32, bfloat16", "Native: none"]
    assert cpu.rows == [
        ("detect", ["lowers* (float32); validated (bfloat16)", ""]),
        ("lookup forward", ["validated", "—"]),
        ("lookup backward", ["validated", ""]),
        ("lookup update", ["validated (float32)", ""]),
    ]
    assert tpu.rows == [("lookup", ["compiles"])]
    assert _report.table_in_markdown(tpu).splitlines()[-1] == "| `lookup` | compiles |"
    shared = [cell(state.RAN, direction=d) for d in ("forward", "backward", "update")]
    assert _report.platform_tables(shared)[0].rows == [("lookup", ["validated"])]


@pytest.mark.slow
def test_command(tmp_path):
    result = command("status", "--op", "packed_lut", "--json", "--record", tmp_path / "r.json")
    document = json.loads(result.stdout)
    states = {c["column"]: c["state"] for c in document["cells"]}
    assert states["xla/cpu"] == "runs here"
    assert states["triton/gpu"] == "unsupported"
    assert result.exit_code == bool(document["gaps"])
    assert [
        r["state"] for r in json.loads((tmp_path / "r.json").read_text()) if r["column"] == "xla/cpu"
    ] == ["ran"]
    result = command("status", "--op", "look")
    assert result.exit_code == 2
    assert "'look' is not one of" in result.stderr
    result = command("status", "--recorded", "--compile")
    assert "--recorded checks nothing" in result.stderr


@pytest.mark.usefixtures("without_native")
def test_every_check_is_shown_at_once():
    """The standard error has a line before the first check, and one for each."""
    result = command("status", "--op", "packed_lut", "--json")
    first, *lines = result.stderr.splitlines()
    assert first == f"Checking {len(lines)} combinations of op, implementation and dtype"
    assert "packed_lut, xla/cpu, uint32: runs here" in lines
    json.loads(result.stdout)
    assert not command("status", "--op", "packed_lut", "--recorded").stderr


@pytest.mark.usefixtures("without_native")
def test_what_is_not_installed_is_named():
    native = next(c for c in _matrix.COLUMNS if c.key == "native/cpu")
    cells = list(_matrix.matrix({}, _checks.check, [native], ["lookup"]))
    assert {c.state for c in cells} == {"not checked"}
    assert _report.not_installed(cells) == [
        f"Native, CPU: needs lutjax_cpu, not installed: {_extras.command(_extras.NATIVE)}"
    ]
    assert not _report.gaps(cells)


# ---------------------------------------------------------------------------------------------- digests
SOURCE = '''"""Documentation,
of several lines."""

import math  # a comment


def f(x: int) -> str:
    """Documentation."""  # and a comment
    if x < 0:
        raise ValueError(  # why
            f"x is {x}; "
            """ expected
            more """
        ) from None
    assert x, "words"  # why

    # another comment
    a = """a string SPACES

    # no comment
    """  # a comment
    b = f"{x!r:>{x}} \N{GREEK SMALL LETTER ALPHA} ü" "#"  # ü
    return (  # why

        a + b
    )


class C:
    """Documentation."""

    value = 1
    """Of a value."""
'''
CODE = '''import math
def f(x: int) -> str:
    if x < 0:
        raise  from None
    assert x,
    a = """a string SPACES

    # no comment
    """
    b = f"{x!r:>{x}} \N{GREEK SMALL LETTER ALPHA} ü" "#"
    return (
        a + b
    )
class C:
    value = 1
'''


def test_digests_are_of_code_alone():
    """Text that is the same on every version of Python that runs this test."""
    source, code = (text.replace("SPACES", "  ") for text in (SOURCE, CODE))
    assert _digests.code_of(source).decode() == code
    with_words = code.replace("raise  from", "raise E from").replace("assert x,", "assert x, 1")
    assert _digests.code_of(with_words).decode() == code


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Writes modules of a package, and returns the digest of one of them as a new process would find it."""
    monkeypatch.syspath_prepend(tmp_path)
    folder = tmp_path / "digested"
    folder.mkdir()
    (folder / "__init__.py").write_text("")

    def digest(direction="forward", **modules):
        for name, text in modules.items():
            (folder / f"{name}.py").write_text(text)
        forget_sources()
        importlib.invalidate_caches()
        return _digests.digest("digested.kernel", direction)

    yield digest
    forget_sources()
    for name in [name for name in sys.modules if name.partition(".")[0] == "digested"]:
        del sys.modules[name]


def forget_sources():
    for function in (_digests.digest, _digests._source, _digests._text):
        function.cache_clear()


KERNEL = """
from digested import shared, deep as below

def forward(call):
    if call < 0:
        raise ValueError(f"call is {call}")
    return shared.f(call) + below.LIMIT

def backward(call):
    return call - 1
"""
SHARED = """
import digested.deep

def f(call):
    assert call is not None, "call is None"
    return digested.deep.g(call)

def unused(call):
    return 3 * call
"""
DEEP = """
LIMIT = 5

class Base:
    def h(self, a: "int") -> int:
        return a

class Derived(Base):
    def h(self, a):
        return a + 1

def g(call, base: Base = Base()):
    return base.h(call)

def register(f):
    return f

register(g)
"""


@pytest.mark.parametrize(
    ("module", "old", "new", "ages"),
    [
        ("kernel", "shared.f(call) +", "shared.f(call) -", True),
        ("kernel", "if call < 0", "if call < 1", True),
        ("kernel", "call is {call}", "call is {call}; expected a number", False),
        ("kernel", "call - 1", "call - 2", False),  # of another direction
        ("shared", "return digested", "# why\n    return digested", False),
        ("shared", "call is None", "there is no call", False),
        ("shared", "3 * call", "4 * call", False),  # not used
        ("deep", "LIMIT = 5", "LIMIT = 6", True),
        ("deep", "return a + 1", "return a + 2", True),  # a subclass may be what is given
        ("deep", "register(g)", "register(forward=g)", True),
        ("deep", "class Base:\n", 'class Base:\n    """Words."""\n\n', False),
    ],
)
def test_digests_are_of_all_that_a_kernel_uses(package, module, old, new, ages):
    modules = {"kernel": KERNEL, "shared": SHARED, "deep": DEEP}
    before = package(**modules, other="a = 1\n")
    assert old in modules[module]
    assert (package(**{module: modules[module].replace(old, new)}, other="a = 2\n") != before) == ages


def test_modules_that_are_passed_on_are_used_as_a_whole(package):
    kernel = "from digested import shared\n\ndef forward(call):\n    return call.by(shared)\n"
    before = package(kernel=kernel, shared=SHARED, deep=DEEP)
    assert package(shared=SHARED.replace("3 * call", "4 * call")) != before


def test_digests_of_what_this_machine_cannot_import(package):
    """Kernels for other hardware, whose packages are on some platforms alone."""
    kernel = "from digested.shared import f\n\ndef forward(call):\n    return f(call)\n"
    shared = "raise ImportError('another platform')\n\ndef f(call):\n    return call\n"
    digest = package(kernel=kernel, shared=shared)
    assert digest != package(kernel=kernel, shared=shared.replace("return call", "return 2 * call"))


def test_digests_follow_sources_in_other_languages():
    spec = next(s for s in lutjax.kernel_registry.candidates("lookup") if s.platform == "xla")
    assert _digests.digest_of(spec, "forward") == _digests.digest(spec.target, "forward")
    found = [
        _digests.digest_of(dataclasses.replace(spec, sources=lambda text=text: text), "forward")
        for text in "aba"
    ]
    assert found[0] == found[2]
    assert len({*found, _digests.digest(spec.target, "forward")}) == 3


EDITS = {  # of lutjax: what a look-up computes by, and what it does not
    "sums of rows": ("lutjax.kernels._xla._row_gathers", "def sum_rows(", "def sum_rows(_, ", True),
    "addends": ("lutjax.values._fixed_point", "* self.scale", "* 2 * self.scale", True),
    "its arrays": ("lutjax.ops.lookup", 'weights: jax.Array = shared("t r o"', 'weights: jax.Array = shared("t o r"', True),
    "an error of it": ("lutjax.values._fixed_point", "beyond the range", "outside of the range", False),
    "a check of it": ("lutjax.ops._checks", "def require(", "def require(_, ", False),
    "its documentation": ("lutjax.ops.lookup", "Returns:", "Return values:", False),
    "transformations": ("lutjax.dispatch._transforms", "def apply(", "def apply(_, ", False),
    "the choice of kernels": ("lutjax.dispatch.registry", "def resolve(", "def resolve(_, ", False),
    "another kernel": ("lutjax.kernels._xla.detect", "def forward(", "def forward(_, ", False),
}  # fmt: skip


@pytest.mark.parametrize("name", EDITS)
def test_a_record_is_old_when_its_kernel_has_changed(monkeypatch, name):
    module, old, new, ages = EDITS[name]
    text = _digests._text
    before = _digests.digest("lutjax.kernels._xla.lookup", "forward")
    assert old in text(module)

    def edited(name):
        found = text(name)
        return found.replace(old, new) if name == module else found

    monkeypatch.setattr(_digests, "_text", edited)
    _digests.digest.cache_clear()
    _digests._source.cache_clear()
    after = _digests.digest("lutjax.kernels._xla.lookup", "forward")
    monkeypatch.undo()
    forget_sources()
    assert (after != before) == ages


# The library itself says the same of the sources that it was built of, see tests/kernels/test_native.py.
def test_digests_of_native_kernels_are_those_of_the_checkout(monkeypatch, tmp_path):
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "a.cc").write_text("// words\nint f() {\n\n  return 1;  // one\n}\n")
    monkeypatch.setattr(_digests, "_CHECKOUT", tmp_path)

    def digest():
        _digests._sources_of_checkout.cache_clear()
        return _digests._sources_of_checkout()

    before = digest()
    (tmp_path / "src" / "a.cc").write_text("// Other\n// words\nint f() {\n  return 1;\n  // a\n}\n")
    assert digest() == before
    (tmp_path / "src" / "a.cc").write_text("// words\nint f() {\n\n  return 2;  // one\n}\n")
    assert digest() != before
    (tmp_path / "src" / "a.cc").unlink()
    assert digest() is None
    _digests._sources_of_checkout.cache_clear()


# ---------------------------------------------------------------------------------------------- records
@pytest.fixture
def records(tmp_path, monkeypatch):
    """A folder in the place of that of the package."""
    monkeypatch.setattr(shipped, "folder", lambda: tmp_path)
    shipped.forget()
    yield tmp_path
    shipped.forget()


def test_kernels_that_ran_have_run(records):
    assert not shipped.has_run("lookup", "forward", "pallas/tpu", "TPU v6e")
    ran = cell(_matrix.State.RUNS, column="pallas/tpu", kinds=("TPU v6e",), digest="0")
    fails = dataclasses.replace(ran, direction="backward", dtype="bfloat16", state=_matrix.State.FAILS)
    lowers = dataclasses.replace(ran, direction="update", state=_matrix.State.LOWERS)
    backward = dataclasses.replace(ran, direction="backward")
    _records.write([ran, backward, fails, lowers], _records.path_of("TPU v6e"))
    assert [path.name for path in records.iterdir()] == ["tpu-v6e.json"]

    def has_run(direction, kind="TPU v6e", op="lookup", column="pallas/tpu"):
        return shipped.has_run(op, direction, column, kind)

    assert has_run("forward")
    assert not has_run("backward")  # one of its dtypes fails
    assert not has_run("update")  # lowered only
    assert not has_run("forward", kind="TPU v5p")
    assert not has_run("forward", op="detect")
    assert not has_run("forward", column="pallas/gpu")


def test_only_what_was_checked_now_is_written(records):
    old = cell(_matrix.State.COMPILES, column="xla/tpu", kinds=("TPU v6e",), digest="0")
    new = cell(_matrix.State.RUNS, kinds=("cpu",), digest="0")
    _records.write([old, new], records / "cpu.json", {old.place: old})
    assert [record["column"] for record in shipped.read()] == ["xla/cpu"]


@pytest.mark.usefixtures("without_native")
def test_records_of_kernels_that_are_not_installed_are_shown(records):
    """Expect a remark where the sources are here and have changed."""
    native = next(c for c in _matrix.COLUMNS if c.key == "native/cpu")
    now = _digests.digest_of(lutjax.kernel_registry.announced("lookup", "native/cpu"), "forward")
    ran = cell(_matrix.State.RUNS, column="native/cpu", kinds=("cpu",), digest=now)
    _records.write([ran, dataclasses.replace(ran, direction="backward", digest="0")], records / "cpu.json")
    cells = {
        c.direction: c
        for c in _matrix.matrix(_records.read(), None, [native], ["lookup"])
        if c.dtype == "float32"
    }
    assert (cells["forward"].state, cells["forward"].reason) == ("ran", "")
    assert (cells["backward"].state, cells["update"].state) == ("ran", "not checked")
    assert "older source" in cells["backward"].reason


def test_records_of_ops_that_are_not_there_are_left_out(records):
    _records.write([cell(_matrix.State.RUNS, op="gone", digest="0")], records / "cpu.json")
    assert _records.read() == {}


@pytest.mark.slow
def test_record_alone_writes_where_the_registry_looks(records):
    result = command("status", "--op", "detect_signs", "--record")
    assert f"Wrote {_records.path_of(jax.devices()[0].device_kind)}" in result.stderr
    assert any(
        shipped.has_run("detect_signs", "backward", key, jax.devices()[0].device_kind)
        for key in ("xla/cpu", "xla/gpu")
    )


def test_reasons_with_figures_are_measurements():
    with (DOCS / "benchmarks" / "h200.csv").open(newline="") as file:
        rows = {
            (r["shape"], r["row"]): r
            for r in csv.DictReader(file)
            if r["implementation"] == "triton" and r["dtype"] == "float32"
        }
    reasons = [reason for of in _absences.ABSENT.values() for reason in of.values()]
    for reason in reasons:
        if isinstance(reason, _absences.Measured):
            row = rows[reason.shape, reason.row]
            assert row["device"] == "NVIDIA H200"
            assert reason.microseconds == round(1e6 * float(row["p50_s"]))
            assert reason.limit == round(1e6 * float(row["limit_s"]))
        else:
            assert not re.search(r"\d (us|ms|times|%)|\d\.\d|\d [KMGT]", reason), reason


@pytest.mark.usefixtures("without_native")
def test_every_kernel_is_recorded():
    cells = list(_matrix.matrix(_records.read(), None))
    missing = {(c.op, c.column) for c in cells if c.state.is_gap and c.direction != "update"}
    assert not missing
    unknown = {(c.op, c.column) for c in cells if c.state == _matrix.State.UNKNOWN}
    assert not unknown, "lutjax status --record checks them"
    by_parts = {c.op for c in cells if c.state == _matrix.State.PARTS}
    assert by_parts <= {"gate_network", "logic_trees", "lut_at_places"}
