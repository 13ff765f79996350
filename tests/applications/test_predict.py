"""Predictions from trained classifiers for raw samples, and regression instead of classes."""

import csv
import io
import json
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
from commands import command, output, refusal
from flax import nnx
from PIL import Image
from small_runs import LABELS, table_text
from starlette.testclient import TestClient

import lutjax
from lutjax.circuits import c, mcu
from lutjax.files import strict_json as _json
from lutjax.models import LogicClassifier, LogicClassifierConfig, LogicTreeNetConfig
from lutjax.serving import application
from lutjax.training import checkpoints, classifier, models, predictions, runs
from lutjax.training.classifier_runs import Classifier
from lutjax.training.datasets import columns
from lutjax.training.errors import CheckpointError
from lutjax.training.reports import Errors

ROWS = LogicClassifierConfig(in_features=24, n_classes=2, layers=(8,), n_thresholds=1)
IMAGES = LogicTreeNetConfig((4, 6, 1), 2, kernels=(4,), layers=(8,), n_thresholds=1)


def rows(text):
    return list(csv.reader(io.StringIO(text)))


def test_predictions_for_the_rows_of_a_table(table_run, tmp_path):
    out = table_run.out
    experiment = Classifier.from_record(runs.read(out, classifier.Record)[1])
    state = models.restore(out, 20, experiment.run)
    path, text = tmp_path / "new.csv", table_text(40, seed=1)
    path.write_text(text)
    new = columns.read(path, "class")
    expected = experiment.run.classes(state, experiment.encoding.encode(new), hard=True)
    header, *actual = rows(output("predict", out, path))
    assert header == ["class", *(f"votes {label}" for label in LABELS)]
    assert [row[0] for row in actual] == [LABELS[number] for number in expected]
    assert all(int(large) >= int(small) for name, large, small in actual if name == LABELS[0])
    path.write_text(table_text(40, target=False, seed=1))
    assert rows(output("predict", out, path)) == [header, *actual]
    trained = predictions.load(out)
    cells = {name: list(new.columns[name]) for name in reversed(new.columns)}
    assert trained.predict(cells).names == [row[0] for row in actual]
    mixed = {**cells, "size": [cell or None for cell in cells["size"]]}
    np.testing.assert_array_equal(trained.predict(mixed).votes, trained.predict(cells).votes)
    right = float(np.mean([row[0] == label for row, label in zip(actual, new.labels, strict=True)]))
    assert trained.accuracy(cells, new.labels) == pytest.approx(right)
    (tmp_path / "new.csv").write_text(text)
    said = command("predict", out, path, "--target", "class", "--out", tmp_path / "found.csv")
    assert f"Accuracy: {100 * right:.2f} % ({round(40 * right)} of 40 rows)" in said.output
    assert rows((tmp_path / "found.csv").read_text()) == [header, *actual]
    names, *lines = csv.reader(io.StringIO(text), delimiter=";")
    cells = np.array(lines)
    np.savez(tmp_path / "a.npz", x=cells[:, :3], names=names[:3], y=cells[:, 4])
    assert rows(output("predict", out, tmp_path / "a.npz")) == [header, *actual]
    assert "of 40 rows" in command("predict", out, tmp_path / "a.npz", "--target=y").output
    assert "standard input has no file type" in refusal("predict", out, "-")


def test_ids_of_rows_are_kept(table_run, tmp_path):
    out = table_run.out
    (tmp_path / "a.csv").write_text('size;kind;noise;customer\n1,5;a;1;"007, b"\n2,0;b;1;\n')
    plain = rows(output("predict", out, tmp_path / "a.csv"))
    result = rows(output("predict", out, tmp_path / "a.csv", "--id=customer", "--id=kind"))
    assert result[0] == ["customer", "kind", *plain[0]]
    assert result[1:] == [["007, b", "a", *plain[1]], ["", "b", *plain[2]]]
    x, row = np.array([["1,5", "a", "1"], ["2,0", "b", "1"]]), np.array([41, 40])
    np.savez(tmp_path / "a.npz", x=x, names=["size", "kind", "noise"], row=row, bad=np.arange(3))
    result = rows(output("predict", out, tmp_path / "a.npz", "--id=row"))
    assert [one[0] for one in result] == ["row", "41", "40"]
    for name, column, message in (
        (
            "a.csv",
            "none",
            "has no column 'none', which --id names; it has size, kind, noise, customer",
        ),
        ("a.npz", "none", "has no array none"),
        ("a.npz", "bad", "bad has shape [3]; expected [2]"),
    ):
        assert message in refusal("predict", out, tmp_path / name, "--id", column)


def test_categories_that_training_never_saw(table_run, tmp_path):
    out = table_run.out
    path = tmp_path / "new.csv"
    path.write_text("size;kind;noise\n1,5;a;1\n2,0;z;1\n0,5;a;1\n1,0;b;1\n1,0;y;1\n")
    result = command("predict", out, path)
    assert result.exit_code == 0
    assert len(rows(result.stdout)) == 6
    assert result.stderr.splitlines() == [
        "warning: column kind: 2 of 5 rows have a value that is none of the 2 categories that training knows; "
        "it is read as none of them, all bits 0."
    ]
    path.write_text(table_text(30, seed=3))
    assert not command("predict", out, path).stderr


def test_what_a_run_needs_travels_in_its_checkpoint(table_run, tmp_path):
    out = table_run.out
    (tmp_path / "new.csv").write_text(table_text(30, seed=2))
    expected = output("predict", out, tmp_path / "new.csv")
    other = tmp_path / "other"
    shutil.copytree(out / runs.FOLDER, other / runs.FOLDER)
    assert output("predict", other, tmp_path / "new.csv") == expected
    _, record = runs.read(out, classifier.Record)
    form = predictions._form_of_old(out, record)
    assert (form.classes, form.columns) == (record.form.classes, record.form.columns)
    with pytest.raises(
        CheckpointError, match=r"has no columns.json: finish it by lutjax train classify --resume"
    ):
        predictions._form_of_old(other, record)


@pytest.mark.parametrize(
    ("name", "content", "words", "message"),
    [
        ("a.csv", "kind\nb\n", (), "has no column size"),
        ("a.csv", "size;kind;noise\nlarge;b;1\n", (), "column size has 'large' in row 1"),
        ("a.csv", "size;kind;noise\n", (), "has no rows"),
        ("a.csv", "size;kind;noise;y\n1;b;1;x\n", ("--target=y",), "has the label 'x', which is missing from the training part"),
        ("a.csv", "size;kind;noise\n1;b;1\n", ("--target=y",), "has no column 'y', which --target names"),
        ("a.npz", "", (), "is not a .npz file"),
        ("none.csv", None, (), "cannot be read: No such file"),
        ("a.csv.gz", "size", (), "is not a whole gzip file"),
        ("a.csv", "size;kind;noise\n1;b;1\n", ("--encoding=klingon",), "which Python does not know"),
    ],
)  # fmt: skip
def test_rows_that_do_not_fit_are_one_line(table_run, name, content, words, message, tmp_path):
    if content is not None:
        (tmp_path / name).write_text(content)
    assert message in refusal("predict", table_run.out, tmp_path / name, *words)


@pytest.fixture(scope="module")
def of_images(tmp_path_factory):
    """Byte images in channels-first layout and a run on them with gaps in its labels, read-only."""
    folder = tmp_path_factory.mktemp("images")
    rng = np.random.default_rng(0)
    y = np.arange(60) % 2
    x = (rng.integers(0, 100, (60, 3, 6, 6)) + 120 * y[:, None, None, None]).astype(np.uint8)
    np.savez(folder / "a.npz", x=x, y=np.array([3, 7])[y])
    words = [
        "--layers=24", "--steps=10", "--n-thresholds=1", "--batch-size=16", "--log-every=10",
        "--no-baselines",
    ]  # fmt: skip
    said = output("train", "classify", "--data", folder / "a.npz", "--out", folder / "run", *words)
    assert "x: [60, 3, 6, 6] is read as channels first, 3 of 6 x 6 pixels." in said
    assert 'labels: the 2 classes are "3", "7".' in said
    return x, folder / "run"


def test_what_is_said_of_a_run(table_run):
    out, data = table_run.out, table_run.words[3]
    said = output("info", out)
    for text in (
        f"{out}: a run of train classify",
        f"lutjax {lutjax.__version__}; jax ",
        "steps: 20 of 20; finished, as all 20 steps are done",
        f"data: {data}, 90 in all",
        'classes: 2: "$large_$',
        'columns: "size", "kind", "noise"',
        "layers 24,24",
        "batch_size 16",
        "training loss after 20 steps: ",
        "Hard network: ",
    ):
        assert text in said
    result = json.loads(output("info", out, "--json"))
    record = runs.read(out, classifier.Record)[1]
    assert result["history"]["train"] == [list(point) for point in record.history.train]
    assert result["model"]["layers"] == [24, 24]
    assert command("info", out / "none").exit_code == 1


def test_files_of_a_run_that_have_changed(table_run, tmp_path):
    out = tmp_path / "run"
    shutil.copytree(table_run.out, out)
    assert command("info", out).stderr == ""
    (out / "report.json").write_bytes((out / "report.json").read_bytes()[:-9])
    (out / "columns.json").write_text("{")
    (out / "curves.csv").unlink()
    said = command("info", out)
    assert said.exit_code == 0
    assert sorted(said.stderr.splitlines()) == [
        f"{out / 'columns.json'} has changed since the run wrote it: delete it; --resume writes it again.",
        f"{out / 'curves.csv'} is missing: --resume writes it again.",
        f"{out / 'report.json'} has changed since the run wrote it: delete it; --resume writes it again.",
    ]
    assert "finished, as all 20 steps" in said.stdout
    (out / "finished.json").write_text('{"digest": 3}')
    [line] = command("info", out).stderr.splitlines()
    assert (
        "finished.json is damaged (finished.json: 'digest' is 3; expected a text.): delete it"
        in line
    )
    assert "not finished" in command("info", out).stdout


def test_a_record_that_was_signed_anew(table_run, tmp_path):
    _, meta = checkpoints.read_meta(table_run.out / runs.FOLDER)
    for field, value, message in (
        ("training", [], "'training' is []; expected an object"),
        ("history", {"train": [[1]]}, "its train is [[1]]"),
        ("form", {"shape": 3}, "its shape is 3"),
        ("model", None, "'model' is null"),
    ):
        out = tmp_path / field
        checkpoints.save(out / runs.FOLDER, 3, {}, {**meta, field: value})
        assert message in refusal("info", out)
    checkpoints.save(tmp_path / "x" / runs.FOLDER, 3, {}, {**meta, "options": {"a": "\x1b[2J\n"}})
    assert "a \\x1b[2J\\n" in output("info", tmp_path / "x")


def test_a_truth_value_in_json_is_no_integer():
    fields = _json.Fields("here")
    assert fields.field({"n": 1}, "n", int) == 1
    with pytest.raises(ValueError, match="here: 'n' is true; expected"):
        fields.field({"n": True}, "n", int)


def test_names_are_shown_with_their_letters():
    assert _json.format_names(["größe", "a\u202eb"], 60) == '"größe", "a\\u202eb"'
    assert _json.format_names(["a" * 100], 60) == f'"{"a" * 56}...'


CONFIG = LogicClassifierConfig(
    4, 1, layers=(30, 21), n_thresholds=2, residual=0, regression=True, scale=0.5, offset=-3.25
)


def table(n, seed=0):
    """Return a CSV table: the price is 10 per meter, plus 5 for kind b."""
    rng = np.random.default_rng(seed)
    lines = ["meters,kind,price"]
    for _ in range(n):
        meters, kind = rng.uniform(0, 3), rng.choice(["a", "b"])
        lines.append(f"{meters:.2f},{kind},{10 * meters + 5 * (kind == 'b'):.1f}")
    return "\n".join(lines) + "\n"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Read-only table, a finished run on it, and the command's output."""
    folder = tmp_path_factory.mktemp("regression")
    path, out = folder / "prices.csv", folder / "run"
    path.write_text(table(200))
    words = "--target=price --regression --layers=60 --steps=60 --batch-size=16 --log-every=20 --eval-every=20"
    words = (*words.split(), "--checkpoint-every=20", "--no-baselines")
    return path, out, output("train", "classify", "--data", path, "--out", out, *words)


@pytest.fixture(scope="module")
def regression():
    """Read-only new model of numbers."""
    structure = models.Structure(lambda rngs: LogicClassifier(CONFIG, rngs=rngs))
    return structure.model(*structure.init(0))


def test_numbers_are_counts_of_bits(regression):
    model = regression
    x = np.random.default_rng(0).uniform(0, 1, (70, 4)).astype(np.float32)
    x = np.round(x * 255) / 256
    soft, hard = (
        nnx.jit(lambda m, x, hard=hard: m(x, deterministic=hard))(model, x)
        for hard in (False, True)
    )
    assert soft.shape == hard.shape == (70,)
    hard = np.asarray(hard)
    counts = (hard + 3.25) / 0.5
    np.testing.assert_array_equal(counts, counts.round())
    assert 0 <= counts.min() < counts.max() <= 21
    packed = model.packed()
    np.testing.assert_array_equal(packed(x), hard)
    words = lutjax.pack_bits(packed.first_bits(x).T)
    np.testing.assert_array_equal(packed.from_words(words)[:70], hard)
    circuit = model.circuit(inputs="ufixed8.8")
    np.testing.assert_array_equal(circuit(x), counts)
    about = circuit.about
    assert (about["kind"], about["scale"], about["offset"]) == ("regression", 0.5, -3.25)
    assert packed.circuit(inputs="ufixed8.8").literals == circuit.literals
    with pytest.raises(ValueError, match="outputs is 'class', but the model is a regression"):
        model.circuit(outputs="class")


def test_gradients_go_to_gates(regression):
    x = jnp.asarray(np.random.default_rng(0).uniform(0, 1, (8, 4)), jnp.float32)
    gradients = nnx.jit(nnx.grad(lambda model: jnp.mean((model(x) - 1.0) ** 2)))(regression)
    assert all(float(abs(g).max()) > 0 for g in nnx.to_pure_dict(gradients)["layers"][1].values())


def test_configs():
    assert LogicClassifierConfig.from_dict(CONFIG.to_dict()) == CONFIG
    with pytest.raises(
        ValueError, match=r"regression is True and n_classes is 3; n_classes must be 1"
    ):
        LogicClassifierConfig(4, 3, layers=(6,), regression=True)
    with pytest.raises(ValueError, match="n_classes is 1; it must be at least 2"):
        LogicClassifierConfig(4, 1, layers=(6,))
    for fields in ({"scale": 0.0}, {"scale": float("inf")}, {"offset": float("nan")}):
        with pytest.raises(
            ValueError, match=r"both must be finite, and scale nonzero|expected a number"
        ):
            LogicClassifierConfig(4, 1, layers=(6,), regression=True, **fields)


def test_headers_make_numbers_of_answers(regression):
    circuit = regression.circuit(inputs="uint8")
    library = mcu.write(circuit, "price", target="avr")
    for header in (c.write(circuit, "price")["price.h"], library["src/price.h"]):
        assert "static inline float price_number(uint32_t answer)" in header
        assert "(float)answer * 0.5f + -3.25f" in header


def test_errors_of_numbers():
    result = Errors.compute(np.array([0.0, 2, 4]), np.array([0.0, 2, 1]))
    assert (result.absolute, result.squared, result.r2) == pytest.approx(
        (1.0, 3**0.5, 1 - 3 / (8 / 3))
    )
    assert Errors.compute(np.ones(3), np.ones(3)).r2 == 1.0


def test_a_run_learns_numbers(run):
    path, out, said = run
    assert "hard R2" in said
    report = json.loads((out / "report.json").read_text())
    errors = report["errors"]
    assert report["hard"] == errors["hard"]["r2"] > 0.6
    assert errors["mean"]["r2"] < 0.1
    assert errors["hard"]["absolute"] < errors["mean"]["absolute"]
    assert not (out / "confusion.png").exists()
    assert (out / "accuracy.png").exists()
    _, record = runs.read(out, classifier.Record)
    model = record.model
    prices = [float(line.rpartition(",")[2]) for line in path.read_text().splitlines()[1:]]
    assert min(prices) <= model.offset < model.offset + 60 * model.scale <= max(prices) + 1e-3
    assert "learns: a number (regression)" in output("info", out)
    assert "R2" in said.split("Hard network:")[1].splitlines()[0]


def test_predictions_are_numbers(run, tmp_path):
    _, out, _ = run
    new = tmp_path / "new.csv"
    new.write_text(table(50, seed=1))
    header, *result = csv.reader(io.StringIO(output("predict", out, new)))
    assert header == ["price", "bits"]
    _, record = runs.read(out, classifier.Record)
    model = record.model
    for number, bits in result:
        assert float(number) == pytest.approx(model.offset + model.scale * int(bits), rel=1e-5)
    trained = predictions.load(out)
    columns = list(zip(*csv.reader(io.StringIO(new.read_text())), strict=True))
    cells = {name: list(values) for name, *values in columns}
    prices = cells.pop("price")
    estimates = trained.predict(cells)
    np.testing.assert_allclose(
        estimates.numbers, [float(number) for number, _ in result], rtol=1e-5
    )
    r2 = trained.accuracy(cells, prices)
    said = command("predict", out, new, "--target", "price", "--out", tmp_path / "found.csv").output
    assert f"R2 {r2:.3f}, mean absolute error" in said
    assert len(estimates) == 50


SAME = "1,a,2\n2,b,2\n" * 10
OTHER = "1,a,2\n2,b,3\n" * 10


@pytest.mark.parametrize(
    ("rows", "words", "message"),
    [
        (SAME, ("--regression",), "the target is 2 in all rows; there is nothing to learn"),
        (OTHER.replace("3", "high"), ("--regression",), "the target is 'high' in row 2; --regression requires finite"),
        (OTHER, ("--regression", "--model=tree"), "regression requires gate layers"),
        (OTHER, ("--regression", "--stratified"), "have no classes; leave it out"),
        (table(30).partition("\n")[2], (), "Use --regression"),
    ],
)  # fmt: skip
def test_errors_are_one_line(rows, words, message, tmp_path):
    (tmp_path / "a.csv").write_text(f"meters,kind,price\n{rows}")
    words = ("--data", tmp_path / "a.csv", "--target=price", "--out", tmp_path / "run", *words)
    assert message in refusal("train", "classify", *words)
    said = refusal("train", "digits", "--regression", "--out", tmp_path / "run")
    assert "--regression is given, but it is for tables" in said


class TestSlow:
    def test_exports_are_proved(self, run, tmp_path):
        _, out, _ = run
        folder = tmp_path / "prices"
        said = output("export", out, "--out", folder, "--format", "c,json,html", "--name", "prices")
        assert "gates (encoder " in said
        manifest = json.loads((folder / "manifest.json").read_text())
        _, record = runs.read(out, classifier.Record)
        about, model = manifest["about"], record.model
        assert (about["kind"], about["scale"], about["offset"]) == (
            "regression",
            model.scale,
            model.offset,
        )
        assert "PASS     prices.json = the model in JAX" in output("verify", folder)
        refused = refusal("export", out, "--out", tmp_path / "other", "--outputs", "class")
        assert "the model is a regression" in refused

    @pytest.mark.usefixtures("without_typechecking")  # of sizes that are free
    def test_libraries_and_programs_give_numbers(self, run, tmp_path):
        _, out, _ = run
        output(
            "export",
            out,
            "--format",
            "c",
            "--target",
            "riscv32",
            "--name",
            "prices",
            "--out",
            tmp_path / "a",
        )
        program = (tmp_path / "a" / "src" / "prices.c").read_text()
        assert "sum r[1];" in program
        assert "best" not in program
        output("verify", tmp_path / "a")
        output("export", out, "--format", "jax", "--out", tmp_path / "jax")
        programs = json.dumps(json.loads((tmp_path / "jax" / "programs.json").read_text()))
        assert "numbers of the hard network" in programs
        assert "mean squared error" in programs

    @pytest.mark.parametrize("config", [ROWS, IMAGES], ids=["gates", "trees"])
    def test_classifiers_agree_on_the_shapes_of_samples(self, config):
        model = classifier.classifier_of(config, rngs=nnx.Rngs(0))
        images = np.random.default_rng(0).random((5, 4, 6)).astype(np.float32)
        given = [images, images[..., None], images.reshape(5, 24)]
        one, *others = (np.asarray(model(jnp.asarray(x))) for x in given)
        assert one.shape == (5, 2)
        for other in others:
            np.testing.assert_array_equal(one, other)
        packed = model.packed()
        hard = np.asarray(model(jnp.asarray(images), deterministic=True))
        for x in given:
            np.testing.assert_array_equal(packed(x), hard.argmax(-1))
            np.testing.assert_allclose(packed.votes(x), hard * model.config.tau, rtol=1e-6)
        for x in (images[:, :3], images[0, :, 0], images.reshape(5, 24)[:, :23]):
            with pytest.raises(ValueError, match=r"x has shape \[.*\]; expected \[..., .*\], or "):
                model(jnp.asarray(x))

    def test_predictions_for_images(self, of_images, tmp_path):
        x, out = of_images
        trained, images = predictions.load(out), np.moveaxis(x, 1, -1)
        expected = trained.predict(images)
        assert set(expected.names) <= {"3", "7"}
        for given in (x, images.reshape(60, -1), images.astype(np.float64)):
            np.testing.assert_array_equal(trained.predict(given).votes, expected.votes)
        np.savez(tmp_path / "b.npz", x=x[:20], labels=np.array([3, 7] * 10))
        actual = command("predict", out, tmp_path / "b.npz", "--target=labels")
        assert [row[0] for row in rows(actual.stdout)[1:]] == expected.names[:20]
        assert "of 20 rows" in actual.stderr
        folder = tmp_path / "pictures"
        folder.mkdir()
        for number in (2, 0, 1):
            Image.fromarray(images[number]).save(folder / f"{number}.png")
        of_files = rows(output("predict", out, folder))
        assert of_files[0] == ["file", *rows(actual.stdout)[0]]
        assert of_files[1:] == [[f"{k}.png", *rows(actual.stdout)[k + 1]] for k in range(3)]
        assert rows(output("predict", out, folder / "1.png"))[1:] == [
            ["1.png", *rows(actual.stdout)[2]]
        ]
        np.savez(tmp_path / "c.npz", x=x / 255 * 1e4)
        assert "warning: the numbers go from" in command("predict", out, tmp_path / "c.npz").stderr
        Image.fromarray(images[0, :4]).save(folder / "small.png")
        for path, message in (
            (folder, "has 4 x 6 pixels; expected 6 x 6"),
            (tmp_path / "a.csv", "is a table, but the run"),
        ):
            (tmp_path / "a.csv").write_text("a\n1\n")
            assert message in refusal("predict", out, path)

    def test_bundles_and_servers(self, run, tmp_path):
        path, out, _ = run
        bundle = tmp_path / "bundle"
        output("save", out, bundle)
        assert "tabular-regression" in (bundle / "README.md").read_text()
        assert output("predict", bundle, path) == output("predict", out, path)
        with TestClient(application(lutjax.load(out), "prices")) as client:
            response = client.post(
                "/v1/classify", json={"columns": {"meters": [1.0, 2.0], "kind": ["a", "b"]}}
            )
        assert response.status_code == 200, response.text
        actual = response.json()
        trained = predictions.load(out)
        expected = trained.predict({"meters": [1.0, 2.0], "kind": ["a", "b"]})
        np.testing.assert_allclose(actual["numbers"], expected.numbers)
        assert actual["votes"] == expected.votes.tolist()
