"""Circuits on table rows: netlist, C, page and exported folders compared with Python comparisons."""

import dataclasses
import itertools
import json
import re
import subprocess

import numpy as np
import pytest
import tools
from exports import put
from tools import require_tool

from lutjax.circuits import (
    Builder,
    Circuit,
    Format,
    Port,
    _microcontroller,
    arithmetic,
    c,
    columns,
    deployment,
    mcu,
    netlist_json,
    page,
    proofs,
    verilog,
)
from lutjax.circuits._rows import bits_of_rows
from lutjax.circuits.columns import MISSING, Category, Columns, Number
from lutjax.circuits.deployment import Options, Request, Vectors

without_typechecking = pytest.mark.usefixtures("without_typechecking")
AGE = columns.number(
    "age", "age", [30.0, 50.0, 41.5], 40.0, True, decimals=0, least=17.0, largest=90.0
)
RATE = columns.number("rate (%)", "rate", [-1.0, 0.3, 0.7], 0.5, False)
WIDE = columns.number("seconds", "seconds", [1.7e12, 1.7e12 + 0.25], 0.0, True, decimals=0)
JOB = columns.category('job "?" */', "job", ["clerk", "farmer", "größe??="], True)
INT4 = Format.parse("int4")
KIND = columns.category("kind", "kind", ["a"], False)
CONSTANT = columns.number("unread", "unread", [], 2.5, False)
ROWS = Columns(
    (AGE, RATE, WIDE, JOB, KIND, CONSTANT),
    (
        *(
            (0, 0),
            (0, 1),
            (0, 2),
            (0, MISSING),
            (1, 0),
            (1, 1),
            (1, 2),
            (2, 0),
            (2, 1),
            (2, MISSING),
        ),
        *((3, 0), (3, 1), (3, 2), (3, MISSING), (4, 0), (-1, 0), (-1, 1), (0, 1)),
    ),
)
"""Columns in every kind."""
WIRE = Circuit((Port("x"),), (Port("y"),), (), (), (2,))


def bits_of(row):
    """Return a row's bits, computed like the table encoding."""
    age, _, seconds, job, kind, _ = row
    numbers = [
        column.fill if x is None else x
        for column, x in zip((AGE, RATE, WIDE), row[:3], strict=True)
    ]
    above = [
        [x > t for t in column.thresholds]
        for column, x in zip((AGE, RATE, WIDE), numbers, strict=True)
    ]
    return [
        *(*above[0], age is None, *above[1], *above[2], seconds is None),
        *(
            *(job == value for value in JOB.values),
            job is None,
            kind == "a",
            False,
            True,
            above[0][1],
        ),
    ]


def every_row(n=400, seed=0):
    """Return random rows: numbers near and far from thresholds, known and unknown categories, and missing cells."""
    draw = np.random.default_rng(seed)
    choices = []
    for column in ROWS.columns:
        if isinstance(column, Number):
            near = [
                float(np.nextafter(t, end)) for t in column.thresholds for end in (-1e300, t, 1e300)
            ]
            choices.append([None, -1e12, 1e15, 0.1 + 0.2, *near, *column.thresholds])
        else:
            choices.append([None, "", "pilot", *column.values])
    return [[some[draw.integers(len(some))] for some in choices] for _ in range(n)]


def row_bits(builder):
    numbers = [number for port in ROWS.ports for number in builder.input(port.name, 1, port.format)]
    return bits_of_rows(builder, ROWS, numbers)


def circuit_of_bits():
    """Return a circuit with the row bits as outputs."""
    builder = Builder()
    builder.output("y", [[bit] for bit in row_bits(builder)])
    return builder.circuit({"columns": ROWS.facts(), "target": "income"})


def classifier():
    """Return a vote-counting circuit over some row bits for two classes, and its layers."""
    made = []
    for rows in (True, False):
        builder = Builder()
        bits = row_bits(builder) if rows else [bit for (bit,) in builder.input("x", len(ROWS.bits))]
        votes = [builder.gate([a, b], 0b0110) for a, b in itertools.pairwise(bits[:16])]
        votes.append(builder.gate([bits[10], bits[0]], 0b0010))
        if not rows:
            builder.output("y", [[vote] for vote in votes])
            made.append(builder.circuit({"column_bits": [list(bit) for bit in ROWS.bits]}))
            continue
        builder.output("y", arithmetic.popcounts(builder, [votes[:8], votes[8:]]))
        about = {"kind": "classifier", "n_classes": 2, "classes": ["high", "<low>"], "image": None}
        made.append(builder.circuit({**about, "target": "income & all", "columns": ROWS.facts()}))
    return made


def vectors_of(circuit, rows):
    """Return row vectors with the circuit's answers."""
    given = ROWS.encode(rows)
    return Vectors(
        given, deployment.evaluate_ports(circuit, list(given.values())), "some rows", rows
    )


# ------------------------------------------------------------------------------------- the netlist
def test_a_circuit_compares_as_python_does():
    """Check numbers near and far beyond thresholds, unknown categories, and missing cells."""
    rows = every_row()
    codes = ROWS.encode(rows)
    assert [port.name for port in ROWS.ports] == list(codes)
    result = deployment.evaluate_ports(circuit_of_bits(), list(codes.values()))["y"]
    np.testing.assert_array_equal(result, np.array([bits_of(row) for row in rows]))


def test_rows_come_back_from_codes():
    """Decode and encode codes, including all codes next to thresholds."""
    codes = list(ROWS.encode(every_row(50)).values())
    for given in (codes, ROWS.boundaries(codes)):
        again = ROWS.encode(ROWS.decode(given))
        for one, other in zip(given, again.values(), strict=True):
            np.testing.assert_array_equal(one, other)
    assert [AGE.value(AGE.code(x)) for x in (None, 41.5, 41.6, 90.0)] == [None, 41.0, 42.0, 90.0]


@pytest.mark.parametrize("thresholds", [[30.0, 30.0, 50.0], [50.0, 30.0, 41.5]])
def test_facts_with_thresholds_out_of_order(thresholds):
    ports = [Port(AGE.port, 1, AGE.format)]
    assert Columns.parse([AGE.facts()], ports).columns == (AGE,)
    with pytest.raises(ValueError, match=r"columns\[0\]: 'thresholds' must ascend"):
        Columns.parse([{**AGE.facts(), "thresholds": thresholds}], ports)


def test_decimals_are_exact():
    """Check 0.3, parsed as a float64 below 3/10, with unit 0.1."""
    assert (RATE.decimals, RATE.levels) == (1, (-10, 3, 7))
    assert [RATE.code(x) for x in (0.3, 0.30000001, 0.4, -5.0)] == [3, 4, 4, -16]
    fixed = Number("f", "f", Format.parse("ufixed8.4"), 0, (0.5, 3.25), 1.0, True)
    assert [fixed.code(x) for x in (0.5, 0.51, 99.0, None)] == [0.5, 0.5625, 254 / 16, 255 / 16]
    assert fixed.value(255 / 16) is None
    assert WIDE.decimals > 0  # the thresholds differ by less than a second
    large = columns.number("large", "large", [1e30, 2e30], 0.0, False)
    assert (large.decimals, large.format.bits) == (-21, 32)
    assert large.value(large.code(1e30)) == 1e30


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Number("a", "a", INT4, 0, (1.25, 1.5), 0.0, False), "cannot separate its thresholds"),
        (lambda: Number("a", "a", INT4, 0, (7.0,), 0.0, False), "cannot separate its thresholds"),
        (lambda: Number("a", "a", Format(64, signed=True), 0, (7.0,), 0.0, False), "at most 53 bits"),
        (lambda: Category("a", "a", Format(1), ("p", "q"), False), "with the codes 0 to 2"),
        (lambda: columns.number("a", "a", [1.0, np.nextafter(1.0, 2)], 0.0, False), "cannot separate its thresholds"),
        (lambda: ROWS.encode([[1.0]]), "row 0 has 1 cells; expected 6"),
        (lambda: AGE.code("old"), "expected a finite number"),
        (lambda: AGE.code(float("nan")), "expected a finite number"),
        (lambda: JOB.code(5.0), "expected a string"),
        (lambda: Columns((AGE, AGE)), "expected different ports"),
        (lambda: Columns((KIND,), ((0, MISSING),)), "is no part of a column"),
    ],
)  # fmt: skip
def test_what_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_names_of_ports():
    names = ["Hours per week", "hours-per-week", "class", "new", "errno", "3d", "%", "clk", "Y"]
    result = columns.port_names(names, ("y", *verilog.CONTROL))
    assert result == [
        *("hours_per_week", "hours_per_week_column", "class_column", "new_column", "errno_column"),
        *("column_3d", "column_7", "clk_column", "y_column"),
    ]
    assert all(Port(name) for name in result)


def test_a_circuit_with_other_columns_is_refused():
    """Refuse inconsistent codes, wrong port names, and unknown column kinds."""
    circuit = circuit_of_bits()
    text = netlist_json.write(circuit)
    assert netlist_json.read(text) == circuit
    for old, new in (
        ('"codes": [-10', '"codes": [-11'),
        ('"missing_code": -128', '"missing_code": 0'),
        ('"port": "rate"', '"port": "age"'),
        ('"kind": "category"', '"kind": "text"'),
        ('"fill": 40.0', '"fill": "x"'),
    ):
        facts = json.dumps(json.loads(text)["about"]["columns"])
        assert old in facts
        about = {**circuit.about, "columns": json.loads(facts.replace(old, new, 1))}
        with pytest.raises(ValueError, match=r"Circuit: by its about columns\[\d\]"):
            dataclasses.replace(circuit, about=about)


# ------------------------------------------------------------------------------------- C
def test_the_header_has_a_struct_and_names():
    circuit, _ = classifier()
    files = c.write(circuit, "people")
    header = files["people.h"]
    for line in (
        '    double age; /* "age", from 17 to 90 in training; NAN where missing */',
        '    int kind; /* "kind"; a code above */',
        '    PEOPLE_JOB_CLERK = 0, /* "clerk" */',
        "    PEOPLE_JOB_OTHER = 3, /* an unknown category */",
        "    PEOPLE_JOB_MISSING = 4 /* a missing cell */",
        "#define PEOPLE_AGE_MISSING (-128)",
        "void people_predict_rows(const people_row *rows, size_t n, uint8_t *output_y);",
        "int people_code_job(const char *text);",
        ' * answers: "income & all"',
    ):
        assert line in header.splitlines(), line
    assert '"job \\"?\\" * /"' in header  # ends no comment
    assert r'"gr\303\266\303\237e\077\077="' in files["people.c"]
    assert "people_row" not in c.write(WIRE, "people")["people.h"]


def result_of(folder, files, *options):
    """Compile a program and its test; return the test's status and output."""
    done = subprocess.run([tools.compiled(folder, files, *options)], capture_output=True, text=True)
    return done.returncode, done.stdout


@pytest.mark.parametrize(
    "options", [("-DPEOPLE_LANES=8",), ("-DPEOPLE_LANES=64", "-DPEOPLE_STATIC")], ids=str
)
def test_c_takes_rows(options, tmp_path):
    """Compare answers with Python, and look up categories by name."""
    require_tool("cc")
    circuit, rows = circuit_of_bits(), every_row(150)
    vectors = vectors_of(circuit, rows)
    test = c.c_test(
        circuit, *deployment.as_called(circuit.inputs, vectors.inputs), name="people", rows=rows
    )
    assert test.count("people_predict") == 2
    codes = {"NULL": 4, '""': 4, '"farmer"': 1, '"gr\\303\\266\\303\\237e?\\?="': 2, '"x"': 3}
    named = "".join(f"if (people_code_job({t}) != {code}) return 3;\n" for t, code in codes.items())
    files = {
        **c.write(circuit, "people"),
        "test.c": test.replace("    printf(", f"{named}    printf(", 1),
    }
    assert result_of(tmp_path, files, *options) == (0, "people: 150 samples, 0 wrong\n")


# ------------------------------------------------------------------------------------- microcontrollers
def test_a_library_compares_whole_numbers():
    """Check the answers with and without the layers, with comparisons in place of gates."""
    circuit, layers = classifier()
    samples = list(ROWS.encode(every_row(200)).values())
    program = _microcontroller.make_program(circuit, layers)
    assert all(load.bit is None for load in program.loads)
    assert (
        len(program.operations) < len(_microcontroller.make_program(circuit, None).operations) / 2
    )
    (result,) = _microcontroller.evaluate(program, samples)
    np.testing.assert_array_equal(result, deployment.evaluate_ports(circuit, samples)["y"])
    header = mcu.write(circuit, "people", target="avr", layers=layers)["src/people.h"]
    assert (
        '    int8_t age; /* "age", from 17 to 90 in training; in units of 1, from -128 to 127; PEOPLE_AGE_MISSING where missing */'
        in header
    )
    assert (
        "static inline void people_predict_row(const people_row *row, uint8_t *output_y)" in header
    )


@pytest.mark.parametrize("style", ["functions", "tables"])
def test_a_library_takes_rows(style, tmp_path):
    require_tool("cc")
    circuit, layers = classifier()
    vectors = vectors_of(circuit, every_row(120, 1))
    files = mcu.write(circuit, "people", target="avr", layers=layers, style=style)
    test = mcu.c_test(circuit, *deployment.as_called(circuit.inputs, vectors.inputs), name="people")
    assert "people_predict_row(&row, output_y)" in test
    sources = {name: files[f"src/{name}"] for name in ("people.c", "people.h")}
    assert result_of(tmp_path, {**sources, "test.c": test}) == (0, "people: 120 samples, 0 wrong\n")


# ------------------------------------------------------------------------------------- the page
def test_the_page_has_fields():
    """Find escaped columns, example rows and the target in the page."""
    circuit, _ = classifier()
    rows = every_row(3)
    text = page.write(circuit, rows=rows)
    data = json.loads(re.findall(r'id="circuit">(.*?)</script>', text)[0])
    assert (data["kind"], data["rows"], data["about"]["columns"]) == ("rows", rows, ROWS.facts())
    assert "<h1>A circuit that predicts income &amp; all</h1>" in text
    assert "reads 6 columns of a table and predicts income &amp; all: high, &lt;low&gt;." in text
    assert 'id="fields"' in text
    assert page.read(text) == circuit
    with pytest.raises(ValueError, match="row 0 has 1 cells"):
        page.write(circuit, rows=[[1.0]])
    with pytest.raises(
        ValueError, match="rows is given, which is for circuits that take rows of a table"
    ):
        page.write(WIRE, rows=rows)


def test_the_page_compares_as_python_does():
    require_tool("node")
    rows = every_row(100)
    result = page.evaluate_rows_in_node(page.write(circuit_of_bits()), rows)
    bits = np.unpackbits(result.astype("<u4").view(np.uint8), axis=1, count=100, bitorder="little")
    np.testing.assert_array_equal(bits.T, np.array([bits_of(row) for row in rows]))


DOM = """
const [text, rows] = JSON.parse(require("fs").readFileSync(0, "utf8")), ids = {};
const scripts = [...text.matchAll(/<script(?: type="application.json")?(?: id="(\\w+)")?>([^]*?)<.script>/g)];
function element(tag) {
  return {
    tag, children: [], style: {}, classList: { toggle() {} }, append(...more) { this.children.push(...more); }, setAttribute() {}, addEventListener() {},
    getContext: () => ({ createImageData: (w, h) => ({ data: new Uint8ClampedArray(4 * w * h) }), putImageData() {} }),
    parentElement: { clientWidth: 300 }, get tBodies() { return [this]; },
    get valueAsNumber() { return this.value === "" ? NaN : Number(this.value); },
  };
}
globalThis.document = { getElementById: (id) => (ids[id] ??= element("div")), createElement: element };
document.getElementById("circuit").textContent = scripts.find(([, id]) => id === "circuit")[2];
globalThis.getComputedStyle = () => ({ getPropertyValue: () => "#112233" });
Object.assign(globalThis, { window: {}, setTimeout() {} });
(0, eval)(scripts.filter(([, id]) => id !== "circuit").map(([, , script]) => script).join("\\n"));
const shown = ids.fields.children.map(({ children: [name, cell, range] }) => {
  const [field] = cell.children;
  return [name.children[0].textContent, field.tag, field.step ?? null, range.textContent, field.children.map((one) => one.textContent)];
});
const begin = window.lutjax.row(), answers = rows.map((row) => {
  window.lutjax.set(row);
  return [window.lutjax.row(), window.lutjax.get(), window.lutjax.answer(), ids["answer-text"].textContent];
});
console.log(JSON.stringify([shown, begin, answers, ids.target.textContent]));
"""
"""Minimal page elements for the page scripts, with the page's fields and answers to rows."""


def test_the_fields_of_the_page():
    """Run all page scripts: the fields, the first row, and the answers in words."""
    require_tool("node")
    circuit, _ = classifier()
    rows = [
        [31.0, 0.25, None, "farmer", "a", 1.0],
        [None, None, None, None, None, None],
        *every_row(20),
    ]
    given = json.dumps([page.write(circuit, rows=rows[:2]), rows])
    done = subprocess.run(
        ["node", "-e", DOM], input=given, capture_output=True, text=True, check=True
    )
    shown, begin, answers, target = json.loads(done.stdout)
    assert shown[0] == ["age", "input", 1, "17 to 90 in the data", []]
    assert shown[1][:4] == ["rate (%)", "input", 0.1, ""]
    assert shown[3] == ['job "?" */', "select", None, "", [*JOB.values, "(any other)", "(missing)"]]
    assert (begin, target) == (rows[0], "income & all:")
    votes = deployment.evaluate_ports(circuit, list(ROWS.encode(rows).values()))["y"].tolist()
    for row, counts, (read, result, name, words) in zip(rows, votes, answers, strict=True):
        assert [
            cell
            for cell, column in zip(read, ROWS.columns, strict=True)
            if isinstance(column, Number)
        ] == row[:3] + row[5:]
        assert (result, name) == (counts, "high" if counts[0] >= counts[1] else "<low>")
        plural = ["vote" if count == 1 else "votes" for count in counts]
        assert words.startswith(
            f"{counts[0]} {plural[0]} for high, {counts[1]} {plural[1]} for <low>."
        )


# ------------------------------------------------------------------------------------- exports
def exported(folder, formats=(), **options):
    circuit, layers = classifier()
    vectors = vectors_of(circuit, every_row(40))
    request = Request(circuit, vectors, Options(formats, "people", **options), layers=layers)
    files = deployment.files_of(request)
    deployment.write(
        folder, files, deployment.manifest_of("circuit", files, deployment.facts_of(request), None)
    )
    return folder


def failed(folder):
    return {proof.name: proof.detail for proof in proofs.verify(folder) if proof.passed is False}


@without_typechecking
def test_an_export_describes_rows(tmp_path):
    folder = exported(tmp_path / "out", ("verilog", "c", "html"))
    assert not failed(folder)
    text = (folder / "README.md").read_text()
    assert "| age | `age` | numbers in units of 1 (int8), 17 to 90 in training | -128 |" in text
    assert "| kind | `kind` | codes: 0 a, 1 any other | 1 |" in text
    assert "predicts `income & all`" in text.replace("\\", "")
    assert "- class 1: \\<low\\>" in text
    manifest = json.loads((folder / "manifest.json").read_text())
    assert [column["name"] for column in manifest["about"]["columns"]] == [
        c.name for c in ROWS.columns
    ]
    assert "input wire [7:0] age" in (folder / "people.v").read_text()
    assert '// kind: "kind": 0 "a", 1 any other, missing too' in (folder / "people.v").read_text()
    rows = [
        json.loads(line.rstrip(","))["row"]
        for line in (folder / "vectors.json").read_text().splitlines()[1:-1]
    ]
    assert rows == every_row(40)


@without_typechecking
def test_changed_rows_and_columns_fail(tmp_path):
    folder = exported(tmp_path / "out", ("json",))
    text = (folder / "vectors.json").read_bytes()
    first = json.dumps(every_row(1)[0], separators=(",", ":"))
    assert first.encode() in text
    put(
        folder,
        "vectors.json",
        text.replace(first.encode(), b'[null,9.5,null,"pilot",null,null]', 1),
    )
    assert any("row 0 has" in detail for detail in failed(folder).values())
    put(folder, "vectors.json", text)
    put(folder, "README.md", (folder / "README.md").read_bytes() + b"\n")
    assert failed(folder) == {"README.md = people.json": "README.md does not describe the circuit"}


@without_typechecking
def test_a_changed_encoding_in_c_fails(tmp_path):
    """Change a threshold used only by the row function."""
    require_tool("cc")
    folder = exported(tmp_path / "out", ("c",))
    text = (folder / "people.c").read_bytes()
    assert b"thresholds[3] = {30.0, 41.5, 50.0}" in text
    put(folder, "people.c", text.replace(b"{30.0, 41.5, 50.0}", b"{-1e13, -1e12, -1e11}", 1))
    assert list(failed(folder)) == ["C, compiled = vectors.json"]


@without_typechecking
def test_a_changed_encoding_in_a_page_fails(tmp_path):
    require_tool("node")
    folder = exported(tmp_path / "out", ("html",))
    text = (folder / "people.html").read_bytes()
    put(
        folder,
        "people.html",
        text.replace(b"cell > column.thresholds", b"cell >= column.thresholds", 1),
    )
    result = failed(folder)
    assert list(result) == ["people.html, its script = vectors.json"]
    assert "encodes the rows" in result["people.html, its script = vectors.json"]
