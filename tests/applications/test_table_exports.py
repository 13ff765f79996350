"""Exports for runs on tables: circuits for numbers and categories, including missing values."""

import csv
import dataclasses
import json

import numpy as np
import pytest
from cases import slow, slow_except
from commands import output, refusal

from lutjax import circuits
from lutjax.circuits import deployment, netlist_json
from lutjax.circuits.columns import Columns, circuit_columns
from lutjax.training import classifier, export, models, predictions, runs
from lutjax.training.classifier_runs import Classifier
from lutjax.training.datasets.columns import Encoding, Number, Table, strings
from lutjax.training.table_inputs import columns_of, table_of, values_of

HEADER = ["age", "rate", "hours per week", "job", "income"]


def write_table(path, n=90, *, comma=False):
    """Write a table with whole numbers, decimals, a column without missing cells, and categories."""
    rng = np.random.default_rng(0)
    lines = [HEADER]
    for _ in range(n):
        age, rate, hours = rng.integers(18, 80), rng.normal() / 100, rng.integers(1, 60) / 2
        job = rng.choice(["clerk", "farmer", "naïve, Ω", "?"])
        income = "high" if (age > 40 and hours > 15) or job == "farmer" else "low"
        cells = ["NA" if rng.random() < 0.2 else str(age), f"{rate:.4f}"]
        cells.append(
            "" if rng.random() < 0.1 else f"{hours:.1f}".replace(".", "," if comma else ".")
        )
        lines.append([*cells, str(job), income])
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, delimiter=";").writerows(lines)
    return path


def untrained(folder, table, target="income", **fields):
    """Write a run on a table at step 1, with an untrained network and distinct gates."""
    regression = fields.pop("regression", None)
    gates = {"layers": (48,), "wiring": "balanced", "noise": 2.0, "residual": 0.0}
    made = Classifier.create(
        {**gates, "column_bits": 6, "batch_size": 16, **fields},
        table,
        target,
        regression=regression,
    )
    models.save(folder, 1, made.run.init(), made.record)
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Read-only run on a table."""
    folder = tmp_path_factory.mktemp("table")
    return untrained(folder / "people", write_table(folder / "people.csv", comma=True))


KINDS = {
    "bits": {},
    "learned": {"thresholds": "learned"},
    "numbers": {"column_bits": 0, "n_thresholds": 3},
    "regression": {"regression": True, "layers": (30,)},
}


@pytest.mark.parametrize("kind", slow_except(KINDS, "bits"))
def test_a_circuit_answers_to_rows_as_the_run_does(kind, tmp_path):
    table = write_table(tmp_path / "people.csv")
    target = "age" if kind == "regression" else "income"
    if kind == "regression":
        lines = table.read_text().replace("NA;", "33;").splitlines()
        table.write_text("\n".join(lines))
    folder = untrained(tmp_path / "run", table, target, **KINDS[kind])
    source = export.source_of(folder, outputs="votes")
    taken = circuit_columns(source.circuit.about, source.circuit.inputs)
    assert source.circuit.about["target"] == target
    trained = predictions.load(folder)
    vectors = source.vectors()
    vectors.check(source.circuit)
    near = taken.boundaries(list(source.split_by_port(source.samples).values()))
    names = [column.name for column in taken.columns]
    unseen = [
        [50.5, 1e9, None, "pilot", "high"],
        [-1e30, -0.00011, 7.3, None, None],
        [None, 0.0, 1e-9, "farmer", "?"],
    ]
    places = [HEADER.index(name) for name in names]
    for rows in (vectors.rows, taken.decode(near), [[row[k] for k in places] for row in unseen]):
        cells = {name: [row[i] for row in rows] for i, name in enumerate(names)}
        expected = trained.predict(cells).votes
        actual = source.circuit(*deployment.as_called(source.circuit.inputs, taken.encode(rows)))
        np.testing.assert_array_equal(np.reshape(actual, expected.shape), expected)


@pytest.mark.parametrize(
    ("words", "kind"),
    [slow(("--inputs", "fixed24.8"), "fixed24.8"), (("--inputs", "rows"), "int7")],
)
def test_formats_of_numbers(words, kind, tmp_path):
    rng, path = np.random.default_rng(0), tmp_path / "a.csv"
    lines = (f"{rng.integers(-50, 50)},{'xyz'[i % 3]},{i % 2}\n" for i in range(60))
    path.write_text("a,b,c\n" + "".join(lines))
    run = untrained(tmp_path / "run", path, "c")
    said = output("export", run, "--out", tmp_path / "out", "--format", "json", *words)
    assert f"Circuit(a: 1 x {kind}, b: 1 x uint2 -> " in said
    if kind == "int7":
        said = refusal("export", run, "--out", tmp_path / "other", "--inputs", "int3")
        assert 'inputs int3: column "a": format is int3' in said
        assert "--inputs bits" in said
    else:
        assert "next to thresholds" in output("verify", tmp_path / "out")


def test_encodings_of_earlier_versions_have_columns():
    encoding = Encoding(
        (Number("a", 0.5, (0.25, 1.5), True), Number("b", 7.0, (3.0,), False)), ("p", "q")
    )
    text = json.loads(encoding.to_json())
    for column in text["columns"]:
        for name in ("digits", "least", "largest"):
            del column[name]
    assert Encoding.from_json(json.dumps(text)) == encoding
    assert [column.decimals for column in columns_of(encoding, None).columns] == [2, 0]


def test_cells_come_back_from_values():
    cells = {"a": strings(["1,5", "", "-2,25", "3e-7"]), "b": strings(["x", "?", "y", "x"])}
    table = Table(cells, strings("pqpq"), "t")
    encoding = Encoding.fit(table, 4)
    rows = values_of(encoding, table)
    assert rows == [[1.5, "x"], [None, None], [-2.25, "y"], [3e-7, "x"]]
    again = table_of(encoding, rows, name="again")
    assert values_of(encoding, again) == rows
    np.testing.assert_array_equal(encoding.encode(again), encoding.encode(table))


def test_digits_and_ranges_are_kept():
    table = Table(
        {"a": strings(["1.250", "2", "10.5", ""]), "b": strings("0123")}, strings("pqpq"), "t"
    )
    encoding = Encoding.fit(table, 4)
    one, two = encoding.columns
    assert (one.digits, one.least, one.largest) == (2, 1.25, 10.5)
    assert (two.digits, two.least, two.largest) == (0, 0.0, 3.0)
    assert Encoding.from_json(encoding.to_json()) == encoding


class TestSlow:
    def test_a_bundle_without_data_takes_rows(self, run, tmp_path):
        bundle = tmp_path / "bundle"
        output("save", run, bundle)
        said = output(
            "export", bundle, "--out", tmp_path / "out", "--format", "json", "--name", "people"
        )
        assert "vectors.json has random rows from seed 0" in said
        written = netlist_json.read((tmp_path / "out" / "people.json").read_bytes())
        assert written == export.source_of(run).circuit
        cells = np.array(export.source_of(bundle).rows, object)
        assert all(
            None in column and len(set(column)) > 3 for column in cells.T[[0, 2, 3]].tolist()
        )
        assert "next to thresholds" in output("verify", tmp_path / "out")

    def test_an_export_takes_rows(self, run, tmp_path):
        folder = tmp_path / "out"
        said = output("export", run, "--out", folder, "--format", "c,html,json")
        assert "Circuit(age: 1 x int8, rate: 1 x int" in said
        circuit = netlist_json.read((folder / "people.json").read_bytes())
        assert [port.name for port in circuit.inputs] == ["age", "rate", "hours_per_week", "job"]
        manifest = json.loads((folder / "manifest.json").read_text())
        assert manifest["about"] == circuit.about
        hours, job = manifest["about"]["columns"][2:]
        assert (hours["name"], hours["decimals"], hours["missing"]) == ("hours per week", 1, True)
        assert 0.5 <= hours["least"] < hours["largest"] <= 29.5
        assert (job["values"], job["missing"]) == (["clerk", "farmer", "naïve, Ω"], True)
        header, readme, page = (
            (folder / name).read_text() for name in ("people.h", "README.md", "people.html")
        )
        assert 'PEOPLE_JOB_NAIVE = 2, /* "na\\u00efve, \\u03a9" */' in header
        assert "| hours per week | `hours_per_week` | numbers in units of 0.1" in readme
        assert "A circuit that predicts income" in page
        assert '"kind":"rows"' in page
        assert not (folder / "columns.json").exists()
        lines = (folder / "vectors.json").read_text().splitlines()[1:-1]
        assert any(None in json.loads(line.rstrip(","))["row"] for line in lines)
        said = output("verify", folder)
        for name in (
            "people.json = the model in JAX",
            "README.md = people.json",
            "manifest.json = the files",
        ):
            assert f"PASS     {name}" in said
        assert "next to thresholds" in said

    def test_a_network_with_another_encoding_fails(self, run, tmp_path):
        folder = tmp_path / "out"
        output("export", run, "--out", folder, "--format", "json", "--outputs", "votes")
        source = export.source_of(run, outputs="votes")
        experiment = Classifier.from_record(runs.read(run, classifier.Record)[1])
        taken = columns_of(experiment.encoding, None)
        first = taken.columns[0]
        moved = dataclasses.replace(
            first, thresholds=(first.thresholds[0] + 1, *first.thresholds[1:])
        )
        other = circuits.from_model(
            classifier.load_model(run)[0],
            inputs=Columns((moved, *taken.columns[1:]), taken.bits),
            outputs="votes",
            about={**source.circuit.about, "columns": taken.facts(), "vote_gates": None},
        )
        oracle = export.oracle(json.loads((folder / "manifest.json").read_text()))
        near = taken.boundaries(list(oracle.samples))
        expected = oracle.answer(*near)[0]
        np.testing.assert_array_equal(
            deployment.evaluate_ports(source.circuit, near)["y"], expected
        )
        assert (deployment.evaluate_ports(other, near)["y"] != expected).any()
