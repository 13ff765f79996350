"""Predictions of trained classifiers for raw samples, and what is said of a run."""

import csv
import gzip
import io
import json
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from commands import command, output
from flax import nnx
from PIL import Image

import lutjax
from lutjax.files import strict_json as _json
from lutjax.models import LogicClassifier, LogicClassifierConfig, LogicTreeNet, LogicTreeNetConfig
from lutjax.training import checkpoints, classifier, models, predictions, runs
from lutjax.training.classifier_runs import Classifier
from lutjax.training.datasets import columns
from lutjax.training.errors import CheckpointError

pytestmark = pytest.mark.usefixtures("compilation_cache_directory")


def classifiers() -> list[LogicClassifier | LogicTreeNet]:
    rows = LogicClassifierConfig(in_features=24, n_classes=2, layers=(8,), n_thresholds=1)
    images = LogicTreeNetConfig((4, 6, 1), 2, kernels=(4,), layers=(8,), n_thresholds=1)
    return [LogicClassifier(rows, rngs=nnx.Rngs(0)), LogicTreeNet(images, rngs=nnx.Rngs(0))]


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1], ids=["gates", "trees"])
def test_classifiers_agree_on_the_shapes_of_samples(number: int) -> None:
    """Rows of all numbers, images, and images with an axis of one channel are the same samples to each model."""
    model = classifiers()[number]
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


# --- runs


SMALL = ["--batch-size=16", "--log-every=10", "--eval-every=10", "--checkpoint-every=10", "--no-baselines"]
HEADER = "size;kind;day;income"


def table(n: int, *, target: bool = True, seed: int = 0) -> str:
    """Return a table in CSV: the income is high where the size is above 1.5, and some cells are missing."""
    rng = np.random.default_rng(seed)
    lines = [HEADER if target else HEADER.removesuffix(";income")]
    for _ in range(n):
        size, kind, day = round(rng.uniform(0, 3), 1), rng.choice(["a", "b", "?"]), rng.integers(1, 29)
        cells = [str(size).replace(".", ","), str(kind), f"2024-01-{day:02}", "high" if size > 1.5 else "low"]
        lines.append(";".join(cells if target else cells[:-1]))
    return "\n".join(lines) + "\n"


@pytest.fixture(scope="module")
def of_table(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, str]:
    """A table, a run on it that has ended, and what the command printed. Not to be changed."""
    folder = tmp_path_factory.mktemp("predict")
    path, out = folder / "people.csv.gz", folder / "run"
    path.write_bytes(gzip.compress(table(120).encode("latin-1")))
    words = ["--target=income", "--exclude=day", "--encoding=latin-1", "--layers=24", "--steps=20"]
    return path, out, output("train", "classify", "--data", path, "--out", out, *words, *SMALL)


def rows(text: str) -> list[list[str]]:
    return list(csv.reader(io.StringIO(text)))


def test_predictions_for_the_rows_of_a_table(of_table: tuple[Path, Path, str], tmp_path: Path) -> None:
    """Compare with the classes that the run gives the encoded rows; columns may be in another order, and labels are not needed."""
    _, out, _ = of_table
    experiment = Classifier.of(runs.read(out, classifier.Record)[1])
    state = models.restore(out, 20, experiment.run)
    path, text = tmp_path / "new.csv", table(40, seed=1)
    path.write_text(text)
    new = columns.read(path, "income")
    assert experiment.encoding is not None
    expected = experiment.run.classes(state, experiment.encoding.encode(new), hard=True)
    header, *found = rows(output("predict", out, path))
    assert header == ["income", "votes high", "votes low"]
    assert [row[0] for row in found] == [("high", "low")[number] for number in expected]
    assert all(int(high) >= int(low) for name, high, low in found if name == "high")
    path.write_text(table(40, target=False, seed=1))
    assert rows(output("predict", out, path)) == [header, *found]
    trained = predictions.load(out)
    cells = {name: list(new.columns[name]) for name in reversed(new.columns)}
    assert trained.predict(cells).names == [row[0] for row in found]
    mixed = {**cells, "kind": [None if cell == "?" else cell for cell in cells["kind"]]}
    np.testing.assert_array_equal(trained.predict(mixed).votes, trained.predict(cells).votes)
    right = float(np.mean([row[0] == label for row, label in zip(found, new.labels, strict=True)]))
    assert trained.accuracy(cells, new.labels) == pytest.approx(right)
    (tmp_path / "new.csv").write_text(text)
    said = command("predict", out, path, "--target", "income", "--out", tmp_path / "found.csv")
    assert f"Accuracy: {100 * right:.2f} % ({round(40 * right)} of 40 rows)" in said.output
    assert rows((tmp_path / "found.csv").read_text()) == [header, *found]


def test_ids_of_rows_are_kept(of_table: tuple[Path, Path, str], tmp_path: Path) -> None:
    """The output begins with the columns that --id names, as the file has them, whether training knows them or not."""
    _, out, _ = of_table
    (tmp_path / "a.csv").write_text('size;kind;customer\n1,5;a;"007, b"\n2,0;b;\n')
    plain = rows(output("predict", out, tmp_path / "a.csv"))
    found = rows(output("predict", out, tmp_path / "a.csv", "--id=customer", "--id=kind"))
    assert found[0] == ["customer", "kind", *plain[0]]
    assert found[1:] == [["007, b", "a", *plain[1]], ["", "b", *plain[2]]]
    x = np.array([["1,5", "a"], ["2,0", "b"]])
    np.savez(tmp_path / "a.npz", x=x, names=["size", "kind"], row=np.array([41, 40]), bad=np.arange(3))
    assert [one[0] for one in rows(output("predict", out, tmp_path / "a.npz", "--id=row"))] == [
        "row",
        "41",
        "40",
    ]
    for name, column, message in (
        ("a.csv", "none", "has no column 'none', which --id names; it has size, kind, customer"),
        ("a.npz", "none", "has no array none"),
        ("a.npz", "bad", "bad has shape [3]; expected [2]"),
    ):
        result = command("predict", out, tmp_path / name, "--id", column)
        assert result.exit_code == 2
        assert message in " ".join(result.output.replace("│", "").split())


def test_categories_that_training_never_saw(of_table: tuple[Path, Path, str], tmp_path: Path) -> None:
    """Once for each column, how many rows have them; they have no bit, as no category has."""
    _, out, _ = of_table
    path = tmp_path / "new.csv"
    path.write_text("size;kind\n1,5;a\n2,0;z\n0,5;?\n1,0;b\n1,0;y\n")
    result = command("predict", out, path)
    assert result.exit_code == 0
    assert len(rows(result.stdout)) == 6
    assert result.stderr.splitlines() == [
        "warning: column kind: 2 of 5 rows have a value that is none of the 2 categories that training knows; "
        "it is read as none of them, all bits 0."
    ]
    path.write_text(table(30, seed=3))
    assert not command("predict", out, path).stderr


def test_text_in_arrays_is_a_table_to_predict(of_table: tuple[Path, Path, str], tmp_path: Path) -> None:
    _, out, _ = of_table
    lines = [line.split(";") for line in table(9).splitlines()]
    np.savez(
        tmp_path / "a.npz", x=np.array(lines[1:])[:, :3], names=lines[0][:3], y=np.array(lines[1:])[:, 3]
    )
    (tmp_path / "a.csv").write_text(table(9))
    found = output("predict", out, tmp_path / "a.npz")
    assert found == output("predict", out, tmp_path / "a.csv")
    assert "of 9 rows" in command("predict", out, tmp_path / "a.npz", "--target=y").output


def test_what_a_run_needs_travels_in_its_checkpoint(of_table: tuple[Path, Path, str], tmp_path: Path) -> None:
    """The data and every file but the checkpoint may be gone; of an earlier version columns.json says what there is to say."""
    _, out, _ = of_table
    (tmp_path / "new.csv").write_text(table(30, seed=2))
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
        ("a.csv", "size;kind\nlarge;b\n", (), "column size has 'large' in row 1"),
        ("a.csv", "size;kind\n", (), "has no rows"),
        (
            "a.csv",
            "size;kind;y\n1;b;x\n",
            ("--target=y",),
            "has the label 'x', which the training part lacks",
        ),
        ("a.csv", "size;kind\n1;b\n", ("--target=y",), "has no column 'y', which --target names"),
        ("a.npz", "", (), "is not a .npz file"),
        ("none.csv", None, (), "cannot be read: No such file"),
        ("a.csv.gz", "size", (), "is not a whole gzip file"),
        ("a.csv", "size;kind\n1;b\n", ("--encoding=klingon",), "which Python does not know"),
    ],
)
def test_rows_that_do_not_fit_are_one_line(
    of_table: tuple[Path, Path, str],
    name: str,
    content: str | None,
    words: tuple[str, ...],
    message: str,
    tmp_path: Path,
) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    result = command("predict", of_table[1], tmp_path / name, *words)
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", "").split())


@pytest.fixture(scope="module")
def of_images(tmp_path_factory: pytest.TempPathFactory) -> tuple[np.ndarray, Path]:
    """Images of bytes, channels first, and a run on them whose labels have gaps. Not to be changed."""
    folder = tmp_path_factory.mktemp("images")
    rng = np.random.default_rng(0)
    y = np.arange(60) % 2
    x = (rng.integers(0, 100, (60, 3, 6, 6)) + 120 * y[:, None, None, None]).astype(np.uint8)
    np.savez(folder / "a.npz", x=x, y=np.array([3, 7])[y])
    words = [
        "--data",
        folder / "a.npz",
        "--out",
        folder / "run",
        "--layers=24",
        "--steps=10",
        "--n-thresholds=1",
    ]
    said = output("train", "classify", *words, *SMALL)
    assert "x: [60, 3, 6, 6] is read as channels first, 3 of 6 x 6 pixels." in said
    assert 'labels: the 2 classes are "3", "7".' in said
    return x, folder / "run"


@pytest.mark.slow
def test_predictions_for_images(of_images: tuple[np.ndarray, Path], tmp_path: Path) -> None:
    """An array in any of its shapes, and files of images, get the same classes and votes."""
    x, out = of_images
    trained, images = predictions.load(out), np.moveaxis(x, 1, -1)
    expected = trained.predict(images)
    assert set(expected.names) <= {"3", "7"}
    for given in (x, images.reshape(60, -1), images.astype(np.float64)):
        np.testing.assert_array_equal(trained.predict(given).votes, expected.votes)
    np.savez(tmp_path / "b.npz", x=x[:20], labels=np.array([3, 7] * 10))
    found = command("predict", out, tmp_path / "b.npz", "--target=labels")
    assert [row[0] for row in rows(found.stdout)[1:]] == expected.names[:20]
    assert "of 20 rows" in found.stderr
    folder = tmp_path / "pictures"
    folder.mkdir()
    for number in (2, 0, 1):
        Image.fromarray(images[number]).save(folder / f"{number}.png")
    of_files = rows(output("predict", out, folder))
    assert of_files[0] == ["file", *rows(found.stdout)[0]]
    assert of_files[1:] == [[f"{k}.png", *rows(found.stdout)[k + 1]] for k in range(3)]
    assert rows(output("predict", out, folder / "1.png"))[1:] == [["1.png", *rows(found.stdout)[2]]]
    np.savez(tmp_path / "c.npz", x=x / 255 * 1e4)
    assert "warning: the numbers go from" in command("predict", out, tmp_path / "c.npz").stderr
    Image.fromarray(images[0, :4]).save(folder / "small.png")
    for path, message in (
        (folder, "has 4 x 6 pixels; expected 6 x 6"),
        (tmp_path / "a.csv", "is a table, but the run"),
    ):
        (tmp_path / "a.csv").write_text("a\n1\n")
        result = command("predict", out, path)
        assert result.exit_code == 2
        assert message in " ".join(result.output.replace("│", "").split())


def test_what_is_said_of_a_run(of_table: tuple[Path, Path, str]) -> None:
    data, out, _ = of_table
    said = output("info", out)
    for text in (
        f"{out}: a run of train classify",
        f"lutjax {lutjax.__version__}; jax ",
        "steps: 20 of 20; finished, as all 20 steps are done",
        f"data: {data}, 120 in all",
        'classes: 2: "high", "low"',
        'columns: "size", "kind"',
        "layers 24",
        "batch_size 16",
        "training loss after 20 steps: ",
        "Hard network: ",
    ):
        assert text in said
    found = json.loads(output("info", out, "--json"))
    record = runs.read(out, classifier.Record)[1]
    assert found["history"]["train"] == [list(point) for point in record.history.train]
    assert found["model"]["layers"] == [24]
    assert command("info", out / "none").exit_code == 1


def test_files_of_a_run_that_have_changed(of_table: tuple[Path, Path, str], tmp_path: Path) -> None:
    """Each has its line, and nothing else is said of a run that is whole."""
    out = tmp_path / "run"
    shutil.copytree(of_table[1], out)
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
    assert "finished.json is damaged (finished.json: 'digest' is 3; expected a text.): delete it" in line
    assert "not finished" in command("info", out).stdout


def test_a_record_that_was_signed_anew(of_table: tuple[Path, Path, str], tmp_path: Path) -> None:
    """A digest says that a file is whole, and not who wrote it."""
    _, meta = checkpoints.read_meta(of_table[1] / runs.FOLDER)
    for field, value, message in (
        ("training", [], "'training' is []; expected an object"),
        ("history", {"train": [[1]]}, "its train is [[1]]"),
        ("form", {"shape": 3}, "its shape is 3"),
        ("model", None, "'model' is null"),
    ):
        out = tmp_path / field
        checkpoints.save(out / runs.FOLDER, 3, {}, {**meta, field: value})
        result = command("info", out)
        assert result.exit_code == 1
        assert message in " ".join(result.output.replace("│", "").split())
    checkpoints.save(tmp_path / "x" / runs.FOLDER, 3, {}, {**meta, "options": {"a": "\x1b[2J\n"}})
    assert "a \\x1b[2J\\n" in output("info", tmp_path / "x")


def test_the_standard_input_is_no_file(of_table: tuple[Path, Path, str]) -> None:
    result = command("predict", of_table[1], "-")
    assert result.exit_code == 2
    assert "standard input has no file type" in " ".join(result.output.replace("│", "").split())


def test_names_are_shown_with_their_letters() -> None:
    assert _json.listed(["größe", "a\u202eb"], 60) == '"größe", "a\\u202eb"'
    assert _json.listed(["a" * 100], 60) == f'"{"a" * 56}...'
