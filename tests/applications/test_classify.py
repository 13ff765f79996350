"""Data to classify: folders of images, tables, splits; recipes, reports, and the command."""

import csv
import dataclasses
import gzip
import io
import json
import os
import pickle
import re
import shutil
import struct
import sys
import zipfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from click.testing import Result
from commands import command
from small_runs import assert_resumes

import lutjax
from lutjax import extras as _extras
from lutjax.models import LogicClassifierConfig
from lutjax.training import (
    checkpoints,
    classifier,
    datasets,
    experiments,
    export as exporting,
    models,
    reports,
    runs,
)
from lutjax.training.augment import warp
from lutjax.training.classifier_runs import MODELS, Classifier
from lutjax.training.datasets import cifar, columns, idx
from lutjax.training.datasets._published import md5
from lutjax.training.datasets.columns import Encoding, Table
from lutjax.training.presets import fields_of
from lutjax.training.recipes import RECIPES, recipe
from lutjax.training.samples import SamplesError, read_arrays, samples, split_ids

pytestmark = pytest.mark.usefixtures("compilation_cache_directory")

RNG = np.random.default_rng(0)


# --- folders of images


def idx_bytes(array: np.ndarray) -> bytes:
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()


IMAGES = {
    "train": (RNG.integers(0, 256, (12, 3, 5), np.uint8), (np.arange(12) % 3).astype(np.uint8)),
    "t10k": (RNG.integers(0, 256, (4, 3, 5), np.uint8), (np.arange(4) % 3).astype(np.uint8)),
}


def write_idx(folder: Path, *, compressed: bool = False, dot: bool = False) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for part, arrays in IMAGES.items():
        for array, name in zip(arrays, ("images-idx3-ubyte", "labels-idx1-ubyte"), strict=True):
            data = idx_bytes(array)
            name = f"{part}-{name.replace('-idx', '.idx') if dot else name}"
            if compressed:
                (folder / f"{name}.gz").write_bytes(gzip.compress(data))
            else:
                (folder / name).write_bytes(data)
    return folder


def cifar_batches() -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(1)
    sizes = (2, 3, 1, 2, 4, 5)
    return [(rng.integers(0, 256, (n, 3, 32, 32), np.uint8), rng.integers(0, 10, n)) for n in sizes]


def write_cifar(folder: Path, *, binary: bool) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for protocol, name, (images, labels) in zip(
        (2, 3, 4, 2, 3, 4), cifar.FILES, cifar_batches(), strict=True
    ):
        rows = images.reshape(len(images), -1)
        if binary:
            (folder / f"{name}.bin").write_bytes(np.column_stack([labels.astype(np.uint8), rows]).tobytes())
        else:
            batch = {b"data": rows, b"labels": labels.tolist(), b"filenames": [b"a.png"] * len(rows)}
            (folder / name).write_bytes(pickle.dumps(batch, protocol))
    return folder


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("place", ["", "MNIST/raw"])
def test_idx_files(compressed: bool, place: str, tmp_path: Path) -> None:
    write_idx(tmp_path / place, compressed=compressed, dot=compressed)
    parts = datasets.load(tmp_path).parts()
    for part, (images, labels) in zip((parts.train, parts.test), IMAGES.values(), strict=True):
        assert part.x.dtype == np.uint8
        assert part.shape == (3, 5)
        np.testing.assert_array_equal(part.x.reshape(images.shape), images)
        np.testing.assert_array_equal(part.y, labels)
    assert parts.n_classes == 3


def test_checksums_name_the_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_idx(tmp_path)
    assert datasets.load(folder).name == str(folder)
    sums = {name: md5((folder / name).read_bytes()) for name in idx.FILES}
    monkeypatch.setitem(idx.PUBLISHED, "Fashion-MNIST", sums)
    data = datasets.load(folder)
    assert data.name == f"Fashion-MNIST in {folder}"
    assert data.parts().test.classes[9] == "Ankle boot"
    path = folder / idx.FILES[2]
    path.write_bytes(path.read_bytes()[:-1] + b"\x07")
    with pytest.raises(
        SamplesError, match=r"are those of Fashion-MNIST .* but t10k-images-idx3-ubyte has MD5"
    ):
        datasets.load(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: (f / idx.FILES[1]).unlink(), "has no file train-labels-idx1-ubyte"),
        (lambda f: cut(f / idx.FILES[0], -1), r"has 195 bytes; its header says \[12, 3, 5\], which are 196"),
        (lambda f: cut(f / idx.FILES[0], 9), r"has 9 bytes; its header says \[\]"),
        (lambda f: (f / idx.FILES[3]).write_bytes(b"P5 3 5"), "begins with the bytes 50 35 20 33"),
        (lambda f: (f / idx.FILES[3]).write_bytes(b""), r"begins with the bytes \(none\)"),
        (
            lambda f: (f / idx.FILES[3]).write_bytes(idx_bytes(np.zeros(5, np.uint8))),
            r"has shape \[4, 3, 5\] and its labels \[5\]",
        ),
        (
            lambda f: (f / idx.FILES[2]).write_bytes(idx_bytes(np.zeros((4, 5, 3), np.uint8))),
            r"training images are \(3, 5\) pixels, test images \(5, 3\)",
        ),
        (lambda f: write_cifar(f / "more", binary=True), "holds several data sets: give one of"),
    ],
)
def test_bad_idx_files(change: Callable[[Path], object], message: str, tmp_path: Path) -> None:
    folder = write_idx(tmp_path)
    change(folder)
    with pytest.raises(SamplesError, match=message):
        datasets.load(folder)


def cut(path: Path, end: int) -> None:
    path.write_bytes(path.read_bytes()[:end])


def test_a_damaged_gzip_file(tmp_path: Path) -> None:
    folder = write_idx(tmp_path, compressed=True)
    cut(folder / f"{idx.FILES[0]}.gz", -9)
    with pytest.raises(SamplesError, match=r"train-images-idx3-ubyte.gz is not a whole gzip file"):
        datasets.load(folder)
    (tmp_path / "empty").mkdir()
    with pytest.raises(SamplesError, match="holds neither IDX files"):
        datasets.load(tmp_path / "empty")


@pytest.mark.parametrize("binary", [False, True])
def test_cifar(binary: bool, tmp_path: Path) -> None:
    write_cifar(tmp_path / "cifar-10-batches", binary=binary)
    parts = datasets.load(tmp_path).parts()
    batches = cifar_batches()
    for part, some in ((parts.train, batches[:-1]), (parts.test, batches[-1:])):
        images = np.concatenate([x for x, _ in some])
        assert part.shape == (32, 32, 3)
        for n, channel, row, column in [(0, 0, 0, 0), (1, 2, 31, 30), (4, 1, 7, 19)]:
            found = part.x.reshape(-1, 32, 32, 3)[n, row, column, channel]
            assert found == images[n, channel, row, column]
        np.testing.assert_array_equal(part.y, np.concatenate([y for _, y in some]))
        assert part.classes == cifar.CLASSES


def of_python_2(rows: np.ndarray, labels: list[int]) -> bytes:
    """Return a batch as Python 2 and its NumPy pickled the published files: strings are bytes."""
    n, width = rows.shape
    return b"".join(
        (
            b"\x80\x02}U\x04datacnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R(K\x01",
            b"K" + bytes([n]) + b"M" + width.to_bytes(2, "little") + b"\x86",
            b"cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb",
            b"\x89T" + rows.nbytes.to_bytes(4, "little") + rows.tobytes() + b"tbs",
            b"U\x06labels](" + b"".join(b"K" + bytes([label]) for label in labels) + b"es.",
        )
    )


def test_batches_of_python_2(tmp_path: Path) -> None:
    folder = write_cifar(tmp_path, binary=False)
    images, labels = cifar_batches()[-1]
    (folder / "test_batch").write_bytes(of_python_2(images.reshape(len(images), -1), labels.tolist()))
    test = datasets.load(folder).parts().test
    np.testing.assert_array_equal(test.x.reshape(-1, 32, 32, 3), images.transpose(0, 2, 3, 1))
    np.testing.assert_array_equal(test.y, labels)


class Malicious:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch stolen",)


@pytest.mark.parametrize(
    ("binary", "name", "content", "message"),
    [
        (True, "data_batch_3.bin", b"\0" * 3072, "has 3,072 bytes; expected a multiple of 3,073"),
        (True, "test_batch.bin", b"\x0a" + b"\0" * 3072, "labels are from 10 to 10; expected 0 to 9"),
        (True, "data_batch_2.bin", None, "has no file data_batch_2.bin"),
        (False, "data_batch_2", pickle.dumps({b"data": Malicious()}), r"it asks for \w+\.system"),
        (False, "data_batch_2", b"GIF89", "is not a batch of CIFAR-10's Python version"),
        (False, "data_batch_2", pickle.dumps([1]), "a pickled dict of data and labels"),
        (
            False,
            "data_batch_2",
            pickle.dumps({"data": np.zeros((2, 9), np.uint8), "labels": [1, 2]}, 4),
            r"data are uint8 \[2, 9\]; expected uint8 \[N, 3072\]",
        ),
        (
            False,
            "test_batch",
            pickle.dumps({"data": np.zeros((2, 3072), np.uint8), "labels": [1]}, 4),
            r"labels are int64 \[1\]; expected one integer for each of 2 images",
        ),
    ],
)
def test_bad_cifar(binary: bool, name: str, content: bytes | None, message: str, tmp_path: Path) -> None:
    folder = write_cifar(tmp_path, binary=binary)
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(content)
    with pytest.raises(SamplesError, match=message):
        datasets.load(folder)
    assert not Path("stolen").exists()


# --- tables


CSV = """age; job ;pay;note;class
20;clerk;1.5;same;no
?;smith;2.5;same;yes
31;clerk;;same;no
64;cook;3.5;same;yes
"""


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_a_table_is_encoded(tmp_path: Path) -> None:
    table = columns.read(write(tmp_path / "a.csv", "\ufeff" + CSV), "class")
    encoding = Encoding.fit(table, bits=2)
    assert encoding.features == [
        *("age > 20", "age > 31", "age missing"),
        *("job = clerk", "job = cook", "job = smith"),
        *("pay > 1.5", "pay > 2.5", "pay missing"),
    ]
    expected = [
        [0, 0, 0, 1, 0, 0, 0, 0, 0],
        [1, 0, 1, 0, 0, 1, 1, 0, 0],
        [1, 0, 0, 1, 0, 0, 1, 0, 1],
        [1, 1, 0, 0, 1, 0, 1, 1, 0],
    ]
    found = encoding.encode(table)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(encoding.labels(table), [0, 1, 0, 1])
    numbers = Encoding.fit(table, bits=0)
    np.testing.assert_array_equal(numbers.encode(table)[:, :2], [[20, 0], [31, 1], [31, 0], [64, 0]])
    again = Encoding.from_json(encoding.to_json())
    assert again == encoding
    others = {"job": np.array(["?", "queen"]), "pay": np.array(["9", "NA"]), "age": np.array(["1e3", "-1"])}
    other = Table(others, np.array(["no", "no"]), "b")
    np.testing.assert_array_equal(
        again.encode(other), [[1, 1, 0, 0, 0, 0, 1, 1, 0], [0, 0, 0, 0, 0, 0, 1, 0, 1]]
    )


def test_thresholds_separate_numbers() -> None:
    """Compare with a loop: as many thresholds as asked for where there are numbers to separate, each of them of use."""
    rng = np.random.default_rng(2)
    for bits, numbers in (
        (3, rng.normal(size=50)),
        (4, np.where(rng.random(90) < 0.9, 0, rng.integers(1, 40, 90))),  # mostly one number
        (5, rng.integers(0, 3, 30)),
        (1, np.array([1, 2])),
    ):
        found = columns._thresholds(numbers.astype(float), bits)
        assert len(found) == min(bits, len(np.unique(numbers)) - 1)
        codes = [sum(n > t for t in found) for n in numbers]
        assert len(set(codes)) == len(found) + 1
    spread = columns._thresholds(np.arange(100.0), 3)
    np.testing.assert_array_equal(np.histogram(np.arange(100), [-1, *(spread + 0.5), 100])[0], [25] * 4)


def test_many_categories() -> None:
    cells = np.array([f"city {n}" for n in range(80) for _ in range(1 + (n < 60))])
    [column] = Encoding.fit(
        Table({"a": cells}, np.arange(len(cells)).astype(str) > "5", "t"), 3, ("n", "y")
    ).columns
    assert isinstance(column, columns.Categories)
    assert len(column.values) == columns.MOST_CATEGORIES
    assert {f"city {n}" for n in range(60)} < set(column.values)


def test_parquet_is_the_same_table(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    made = {
        "age": pyarrow.array([20, None, 31, 64]),
        "job": pyarrow.array(["clerk", "smith", "clerk", "cook"]).dictionary_encode(),
        "pay": pyarrow.array([1.5, 2.5, None, 3.5]),
        "note": ["same"] * 4,
        "class": ["no", "yes", "no", "yes"],
    }
    parquet.write_table(pyarrow.table(made), tmp_path / "a.parquet")
    one, two = (
        columns.read(path, "class") for path in (tmp_path / "a.parquet", write(tmp_path / "a.csv", CSV))
    )
    encoding = Encoding.fit(one, 2)
    assert encoding == Encoding.fit(two, 2)
    np.testing.assert_array_equal(encoding.encode(one), encoding.encode(two))
    parquet.write_table(pyarrow.table({"class": ["no"], "a": [[1]]}), tmp_path / "b.parquet")
    with pytest.raises(SamplesError, match=r"column a has the type list"):
        columns.read(tmp_path / "b.parquet", "class")
    with pytest.raises(SamplesError, match="is not a Parquet file"):
        columns.read(write(tmp_path / "c.parquet", "text"), "class")


def test_parquet_without_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    remedy = re.escape(f"pyarrow, which reads it, is not installed: {_extras.command('pyarrow')}")
    with pytest.raises(SamplesError, match=remedy):
        columns.read(tmp_path / "a.parquet", "class")


@pytest.mark.parametrize(
    ("text", "target", "message"),
    [
        (CSV, "clas", "has no column 'clas', which --target names; it has age, job, pay, note, class"),
        ("a,b\n1,2\n1\n", "b", "line 3 has 1 cells, but there are 2 columns"),
        ("a,a\n1,2\n", "a", "expected a different name for each"),
        ("", "a", "is empty"),
        ("a,b\n", "b", "has 0 rows and 1 columns beside b"),
        ("b\n1\n", "b", "has 1 rows and 0 columns beside b"),
        ("a,b\n1,x\n2,?\n", "b", "b is missing in row 2 and 0 others"),
        ('a,b\n"1,x\n', "b", "line 2 has 1 cells"),
    ],
)
def test_bad_tables(text: str, target: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(SamplesError, match=message):
        columns.read(write(tmp_path / "a.csv", text), target)


def table_of(n: int, labels: Any = None) -> Table:
    rng = np.random.default_rng(n)
    made = {"a": rng.integers(0, 50, n).astype(str), "b": rng.choice(["x", "y", "?"], n)}
    return Table(made, np.where(rng.random(n) < 0.3, "no", "yes") if labels is None else labels, "made")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda t: datasets.Data(t, dataclasses.replace(t, columns={"a": t.columns["a"]})).parts(),
            "has no column b",
        ),
        (
            lambda t: datasets.Data(
                t, dataclasses.replace(t, columns={**t.columns, "a": t.columns["b"]})
            ).parts(),
            "made: column a has '[xy]' in row",
        ),
        (
            lambda t: datasets.Data(t, table_of(9, np.array(["so"] * 9))).parts(),
            "has the label 'so', which the training",
        ),
        (
            lambda t: datasets.Data(table_of(30, np.arange(30).astype(str))).parts(),
            "has 30 different values in 30 rows",
        ),
        (lambda t: datasets.Data(table_of(30, np.array(["no"] * 30))).parts(), "every label is 'no'"),
        (
            lambda t: datasets.Data(table_of(30, np.array(["so", *"yn" * 14, "n"]))).parts(stratified=True),
            "class so has 1 of 30 samples",
        ),
        (
            lambda t: datasets.Data(
                Table({"a": np.array([*map(str, range(99)), "1,5"])}, np.array([*"yn" * 50]), "made")
            ).parts(),
            r"made: column a has numbers, and \['1,5'\] in 1 of",
        ),
        (
            lambda t: datasets.Data(Table({"a": np.array(["1"] * 30)}, t.labels, "made")).parts(),
            "every column has the same cell",
        ),
        (
            lambda t: columns.of_arrays(np.array(["a", "b"]), np.array([1, 2]), None, name="t"),
            r"x has shape \[2\]",
        ),
        (
            lambda t: columns.of_arrays(np.array([["a", "b"]]), np.array([1]), ["c"], name="t"),
            "a different one for each of 2 columns",
        ),
    ],
)
def test_tables_that_do_not_fit(call: Callable[[Table], object], message: str) -> None:
    with pytest.raises(SamplesError, match=message):
        call(table_of(30))


def test_the_encoding_is_of_the_training_part() -> None:
    data = datasets.Data(table_of(200))
    parts = data.parts(split=3, stratified=True, bits=4)
    train, test = split_ids(data.train.labels, 3, stratified=True)
    encoding = Encoding.fit(data.train.rows(train), 4)
    assert parts.encoding == encoding
    np.testing.assert_array_equal(parts.test.x, encoding.encode(data.train.rows(test)))
    assert parts.test.classes == ("no", "yes")
    assert data.digest != datasets.Data(data.train.rows(np.arange(199))).digest


# --- arrays and splits


def test_arrays_of_a_file(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.uniform(size=(20, 4, 4, 3)), np.arange(20) % 2
    path = tmp_path / "a.npz"
    np.savez(path, x_train=x[:14], y_train=y[:14], x_test=x[14:], y_test=y[14:])
    with pytest.raises(SamplesError, match="there are 6 samples; at least 10"):
        datasets.load(path)
    np.savez(path, x_train=x[:10], y_train=y[:10], x_test=x[10:], y_test=y[10:])
    data = datasets.load(path)
    parts = data.parts(split=5)
    assert len(data) == 20
    np.testing.assert_array_equal(parts.train.x, x[:10].reshape(10, -1).astype(np.float32))
    np.testing.assert_array_equal(parts.test.y, y[10:])
    np.savez(path, x_train=x, y_train=y)
    with pytest.raises(
        SamplesError, match=r"has no array x_test and no array y_test; it has \['x_train', 'y_train'\]"
    ):
        datasets.load(path)
    text = np.array([["1", "a"], ["2", "b"], ["3", "?"]] * 4)
    np.savez(path, x=text, y=np.arange(12) % 2, names=["n", "c"])
    encoding = datasets.load(path).parts(bits=3).encoding
    assert encoding is not None
    assert encoding.features == ["n > 1", "n > 2", "c = a", "c = b", "c missing"]


def test_a_stratified_split_keeps_the_shares_of_classes() -> None:
    y = np.repeat(np.arange(3), (50, 30, 20))
    train, test = split_ids(y, 0, stratified=True)
    assert sorted([*train, *test]) == list(range(100))
    np.testing.assert_array_equal(np.bincount(y[test]), [10, 6, 4])
    np.testing.assert_array_equal(test, split_ids(y, 0, stratified=True)[1])
    assert not np.array_equal(test, split_ids(y, 1, stratified=True)[1])
    with pytest.raises(SamplesError, match=r"class 3 has 1 of 101 samples.*--no-stratified"):
        split_ids(np.append(y, 3), 0, stratified=True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"target": "y"}, "--target is y, but it is for tables"),
        ({"path": "a.npz", "test": Path("b.csv")}, "--test-data is b.csv, but it is for tables"),
        ({"path": "a.csv"}, "is a table: name its column of labels by --target"),
        ({"path": "a.csv", "target": "y", "test": Path("b.npz")}, "--test-data is b.npz; expected a table"),
        ({"path": "a.png"}, "ends in .png; expected a .npz file, a table"),
        ({"path": "none.csv", "target": "y"}, "none.csv cannot be read: No such file"),
        ({"path": "none"}, "none cannot be read"),
    ],
)
def test_data_that_are_not_there(arguments: dict[str, Any], message: str, tmp_path: Path) -> None:
    for name in ("a.npz", "a.csv", "a.png"):
        (tmp_path / name).write_text("x,y\n")
    if "path" in arguments:
        arguments = {**arguments, "path": tmp_path / arguments["path"]}
    with pytest.raises(SamplesError, match=message):
        datasets.load(**arguments)


@pytest.mark.slow
def test_channels_move_together() -> None:
    images = jnp.asarray(RNG.uniform(size=(3, 6, 5, 2)), jnp.float32)
    key = jax.random.key(3)
    found = warp(key, images)
    for channel in range(2):
        np.testing.assert_allclose(found[..., channel], warp(key, images[..., channel]), atol=1e-6)


@pytest.mark.parametrize("changes", [{"shift": 2.0}, {"bend": 1.0}, {"augment": 0.5}, {}])
def test_a_step_changes_images_as_asked(changes: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def noted(key: jax.Array, x: jax.Array, strength: float, **how: float) -> jax.Array:
        asked.append({"augment": strength, **how})
        return x

    monkeypatch.setattr(classifier, "warp", noted)
    train = samples(RNG.uniform(size=(20, 3, 3)), np.arange(20) % 2, name="squares")
    training = classifier.TrainingConfig(**{"augment": 0.0, **changes})
    run = classifier.Run(LogicClassifierConfig(9, 2, layers=(4,)), training, train)
    jax.eval_shape(run.step, run.abstract(), jnp.int32(0), (train.x, train.y))
    assert asked == [{"augment": 0.0, "shift": 0.0, "bend": 0.0, **changes}][: len(changes)]
    with pytest.raises(ValueError, match="shift is -1; it must not be negative"):
        classifier.TrainingConfig(shift=-1)


# --- recipes


def test_recipes() -> None:
    for name, one in RECIPES.items():
        assert one.name == name
        of_model, of_training = (
            fields_of(config, one.fields()) for config in (MODELS[one.model], classifier.TrainingConfig)
        )
        assert len(of_model) + len(of_training) == len(one.fields())
        layers = one.sizes()["layers"]
        assert not layers[-1] % (2 if one.data == "Adult" else 10)
        assert str(one).startswith(f"{name}: ")
        assert one.model == "tree" or f" {sum(layers):,} " in str(one)
    with pytest.raises(ValueError, match="recipe is 'none'; the known ones are difflogic-mnist-small"):
        recipe("none")


def test_a_recipe_gives_sizes_and_rates(tmp_path: Path) -> None:
    table = write_table(tmp_path)
    run = Classifier.new({"tau": 7.0, "wiring": "balanced"}, table, "class", None, "difflogic-adult")
    assert run.record.model.layers == (256,) * 5
    assert (run.record.model.tau, run.record.training.steps) == (7.0, 100_000)
    assert run.record.recipe == "difflogic-adult"
    with pytest.raises(ValueError, match="n_thresholds is 2, but columns are made bits already"):
        Classifier.new({"n_thresholds": 2}, table, "class")


# --- reports


def test_gates_by_kind() -> None:
    functions: dict[str, list[Callable[[bool, bool], bool]]] = {
        "constant": [lambda a, b: False, lambda a, b: True],
        "input": [lambda a, b: a, lambda a, b: b],
        "not": [lambda a, b: not a, lambda a, b: not b],
        "and": [lambda a, b: a and b],
        "nand": [lambda a, b: not (a and b)],
        "or": [lambda a, b: a or b],
        "nor": [lambda a, b: not (a or b)],
        "and not": [lambda a, b: a and not b, lambda a, b: b and not a],
        "or not": [lambda a, b: a or not b, lambda a, b: b or not a],
        "xor": [lambda a, b: a != b],
        "xnor": [lambda a, b: a == b],
    }
    for kind, gates in functions.items():
        truth = np.array([[gate(bool(k & 1), bool(k & 2)) for k in range(4)] for gate in gates])
        assert reports.kinds(truth) == {name: len(gates) * (name == kind) for name in functions}
    of_three = np.array([[0] * 8, [0, 1] * 4, [0, 1, 1, 0] * 2, [0, 1, 1, 0, 1, 0, 0, 1]], bool)
    assert reports.kinds(of_three) == {"needs 0": 1, "needs 1": 1, "needs 2": 1, "needs 3": 1}
    np.testing.assert_array_equal(reports.needs(of_three).sum(0), [3, 2, 1])


def test_gates_in_words_mean_what_they_say() -> None:
    meaning = {"differs from": "!=", "equals": "==", "true": "True", "false": "False"}
    answers = (np.arange(16)[:, None] >> np.arange(4) & 1).astype(bool)
    for words, truth in zip(reports.in_words(answers, np.tile([1, 0], (16, 1)), "ba"), answers, strict=True):
        for word, operator in meaning.items():
            words = words.replace(word, operator)
        found = [eval(words, {"a": bool(address & 1), "b": address > 1}) for address in range(4)]
        assert found == truth.tolist(), words
    with pytest.raises(ValueError, match="truth has 8 answers"):
        reports.in_words(np.zeros((1, 8), bool), np.zeros((1, 3), int), "abc")


@pytest.mark.parametrize("seed", range(6))
def test_dead_bits_change_no_vote(seed: int) -> None:
    """Compare with the network on all inputs: a bit that is said to be dead changes nothing."""
    rng = np.random.default_rng(seed)
    n_bits, sizes = 8, (6, 5, 4)
    truth, wires, before = [], [], n_bits
    for size in sizes:
        truth.append(rng.random((size, 4)) < 0.5)
        wires.append(rng.integers(0, before, (size, 2)))
        before = size
    live, read = reports.live_gates(truth, wires, n_bits)
    assert [len(one) for one in live] == list(sizes)
    bits = (np.arange(2**n_bits)[:, None] >> np.arange(n_bits)) & 1

    def votes(bits: np.ndarray) -> np.ndarray:
        for table, wire in zip(truth, wires, strict=True):
            bits = table[np.arange(len(table)), bits[:, wire[:, 0]] + 2 * bits[:, wire[:, 1]]].astype(int)
        return bits

    for bit in np.flatnonzero(~read):
        np.testing.assert_array_equal(votes(bits), votes(bits ^ (np.arange(n_bits) == bit)))
    assert not read.all()


def test_live_gates_by_hand() -> None:
    """Two gates below, of which a vote reads the first one alone; that one reads bit 2 alone."""
    truth = [np.array([[0, 0, 1, 1], [0, 0, 0, 1]], bool), np.array([[0, 1, 0, 1], [1, 1, 1, 1]], bool)]
    wires = [np.array([[0, 2], [0, 1]]), np.array([[0, 1], [1, 1]])]
    (first, last), read = reports.live_gates(truth, wires, 3)
    np.testing.assert_array_equal(first, [True, False])
    np.testing.assert_array_equal(last, [True, True])
    np.testing.assert_array_equal(read, [False, False, True])


def damaged(good: bytes, step: int = 1) -> Iterator[bytes]:
    """Return the content of a file with one wrong octet, and cut off, at some places of it."""
    for i in range(0, len(good), step):
        for wrong in (good[i] ^ 1, good[i] ^ 0x80, 255):
            yield good[:i] + bytes([wrong]) + good[i + 1 :]
        yield good[:i]


def refused(read: Callable[[bytes], object], contents: Iterable[bytes]) -> int:
    """Return how many of these contents are refused as data should be: no other error leaves."""
    n = 0
    for content in contents:
        try:
            read(content)
        except SamplesError:
            n += 1
    return n


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_damaged_arrays_are_refused(save: Callable[..., None], tmp_path: Path) -> None:
    path, arrays = tmp_path / "a.npz", {"x": np.arange(24.0).reshape(12, 2), "y": np.arange(12) % 2}
    save(path, **arrays)
    good = path.read_bytes()

    def read(content: bytes) -> dict[str, np.ndarray]:
        path.write_bytes(content)
        return read_arrays(path, ("x", "y"))

    for name, array in read(good).items():
        np.testing.assert_array_equal(array, arrays[name], strict=True)
    assert refused(read, damaged(good, 3)) > len(good) // 3
    local, central = good.index(b"PK\x03\x04"), good.index(b"PK\x01\x02")
    for at, value, message in ((6, 1, "encrypted"), (8, 99, "compression")):
        wrong = bytearray(good)
        wrong[local + at] = wrong[central + at + 2] = value
        with pytest.raises(SamplesError, match=f"a.npz is not a .npz file of plain arrays.*{message}"):
            read(bytes(wrong))
    np.savez(path, x=np.array([{}], object), y=np.zeros(1))
    with pytest.raises(SamplesError, match=r"x.npy holds Python objects; convert it .*astype\(str\)"):
        read(path.read_bytes())


def test_an_array_is_as_large_as_its_header_says(tmp_path: Path) -> None:
    """No memory is taken for a shape that the file has no numbers for."""
    path = tmp_path / "a.npz"
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        header, {"descr": "<f8", "fortran_order": False, "shape": (2**50, 2)}
    )
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("x.npy", header.getvalue() + bytes(16))
    with pytest.raises(
        SamplesError,
        match=r"x.npy has 16 bytes of numbers, and its header says float64 \[1125899906842624, 2\]",
    ):
        read_arrays(path, ("x",))


@pytest.mark.filterwarnings("ignore:invalid escape sequence")  # of pickletools, about damaged text
@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_damaged_pickles_are_refused(protocol: int) -> None:
    """A batch of CIFAR-10: nothing is run, and no instruction takes more memory than the file has."""
    x, path = np.arange(2 * 3072).reshape(2, 3072).astype(np.uint8), Path("data_batch_1")
    good = pickle.dumps({b"data": x, b"labels": [1, 2]}, protocol)

    def read(content: bytes) -> tuple[np.ndarray, np.ndarray]:
        return cifar._of_pickle(content, path)

    pixels, labels = read(good)
    np.testing.assert_array_equal(labels, [1, 2])
    np.testing.assert_array_equal(pixels.reshape(2, 32, 32, 3).transpose(0, 3, 1, 2).reshape(2, -1), x)
    head, tail = range(min(300, len(good))), range(len(good) - 100, len(good))
    wrong = (
        good[:i] + bytes([value]) + good[i + 1 :]
        for i in (*head, *tail)
        for value in (good[i] ^ 1, good[i] ^ 0x80, ord("r"), ord("b"))
    )
    assert refused(read, wrong) > 100
    with pytest.raises(SamplesError, match="LONG_BINPUT 4294967295"):
        read(b"\x80\x02}r\xff\xff\xff\xff.")
    for content in (
        pickle.dumps({b"data": x.astype(object), b"labels": [1]}),
        pickle.dumps({b"data": print, b"labels": [1]}),
    ):
        with pytest.raises(SamplesError, match="is not a batch of CIFAR-10"):
            read(content)


def test_damaged_idx_files_are_refused() -> None:
    good = bytes([0, 0, 8, 3, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0, 2, *range(12)])
    assert refused(lambda content: idx.parse(content, name="images"), damaged(good)) > 50
    with pytest.raises(SamplesError, match="images has 65 axes"):
        idx.parse(bytes([0, 0, 8, 65]) + b"\0\0\0\1" * 65 + b"\7", name="images")


def test_a_number_is_what_a_table_calls_one(tmp_path: Path) -> None:
    """Codes that Python takes for numbers are categories, each of its own."""
    codes = ["12_3", "1_23", "123", "١٢٣", "0x7b", "infinity"]
    text = "code,size,class\n" + "".join(f"{codes[i % 6]},{i % 5}e-{i % 3},{i % 2}\n" for i in range(60))
    encoding = Encoding.fit(columns.read(write(tmp_path / "a.csv", text), "class"), 8)
    code, size = encoding.columns
    assert isinstance(code, columns.Categories)
    assert set(code.values) == set(codes)
    assert isinstance(size, columns.Number)
    assert columns.classes_of(Table({}, np.array(["1_0", "9", "1_0", "9"]), "t")) == ["1_0", "9"]
    for cell, number in (
        ("+1.", True),
        (".5", True),
        ("-1e-3", True),
        ("1e400", False),
        ("1 2", False),
        (".", False),
        ("", False),
    ):
        assert columns._is_number(cell) == number


def test_endings_say_how_a_table_is_read(tmp_path: Path) -> None:
    text = "a, b, c, d\tclass\n1\tx\n2\ty\n"
    table = columns.read(write(tmp_path / "T.TSV", text), "class")
    assert list(table.columns) == ["a, b, c, d"]
    (tmp_path / "T.PARQUET").write_text("a,class\n1,x\n")
    with pytest.raises(SamplesError, match=r"is not a Parquet file|is a Parquet file; pyarrow"):
        columns.read(tmp_path / "T.PARQUET", "class")


def of_numbers(numbers: np.ndarray) -> Table:
    cells = {"t": np.array([repr(float(number)) for number in numbers])}
    return Table(cells, np.array(["a", "b"])[np.arange(len(numbers)) % 2], "numbers")


@pytest.mark.parametrize(
    "numbers",
    [
        1.7e9 + np.arange(40),
        1e300 * (1 + np.arange(40)),
        1e-60 * np.arange(40),
        2.0**60 + 2.0**20 * np.arange(40),
    ],
    ids=["times in seconds", "large", "small", "integers"],
)
@pytest.mark.parametrize(("bits", "learned"), [(0, False), (8, True)])
def test_numbers_that_float32_does_not_tell_apart(numbers: np.ndarray, bits: int, learned: bool) -> None:
    """They keep their order and their differences as features, and what was learned from some rows is used for others."""
    encoding = Encoding.fit(of_numbers(numbers), bits, numbers=learned)
    again = Encoding.from_json(encoding.to_json())
    assert again == encoding
    x = encoding.encode(of_numbers(numbers))[:, 0]
    assert x.dtype == np.float32
    np.testing.assert_allclose(np.diff(x), 2 / 39, rtol=1e-5)  # from -1 to 1
    np.testing.assert_array_equal(again.encode(of_numbers(numbers[[3, 30]]))[:, 0], x[[3, 30]])
    if learned:
        above = x[:, None] > encoding.thresholds[:, 0]
        exact = Encoding.fit(of_numbers(numbers), bits)
        np.testing.assert_array_equal(above, exact.encode(of_numbers(numbers)))
        names = [encoding.above(i, t) for i, t in enumerate(encoding.thresholds[:, 0])]
        for shown, own in zip(names, exact.columns[0].thresholds, strict=True):
            assert float(shown.removeprefix("t > ")) == pytest.approx(own, abs=1e-4 * np.ptp(numbers))
        assert len(set(exact.features)) == bits


def test_numbers_that_no_unit_tells_apart() -> None:
    uneven = of_numbers(np.array([*range(39), 1e300]))
    for bits, learned in ((0, False), (8, True)):
        with pytest.raises(
            SamplesError,
            match=r"column t has 40 different numbers, of which 2 differ in float32: .*--column-bits",
        ):
            Encoding.fit(uneven, bits, numbers=learned)
    assert len(Encoding.fit(uneven, 8).features) == 8
    # Where float32 holds all numbers, they are as they were; those of other rows beyond it are its largest.
    encoding = Encoding.fit(of_numbers(np.arange(40.0)), 0)
    np.testing.assert_array_equal(
        encoding.encode(of_numbers(np.array([3.0, -1e300, 1e300])))[:, 0],
        np.float32([3, np.finfo(np.float32).min, np.finfo(np.float32).max]),
    )
    drawn = np.random.default_rng(0).normal(size=3000)
    assert len(np.unique(Encoding.fit(of_numbers(drawn), 0).encode(of_numbers(drawn)))) > 2990


def test_names_of_bits() -> None:
    whole = samples(np.zeros((10, 2, 2)), np.arange(10) % 2, name="w")
    thresholds = np.array([[0.5, 1]] * 4)
    assert reports.bit_names(whole, thresholds, None)[:3] == ["0,0 > 0.5", "0,0 > 1", "0,1 > 0.5"]


# --- the command


def write_table(folder: Path, n: int = 90) -> Path:
    """A table whose class is whether a number is large, except for some of one category."""
    rng = np.random.default_rng(0)
    path = folder / "table.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["size", "kind", "noise", "class"])
        for row in range(n):
            size, kind = rng.normal(), rng.choice(["a", "b"])
            label = "$large_$ & \\x$$" if (size > 0) != (kind == "b") else "<small>\n_"  # texts, no formulas
            writer.writerow(["" if row % 17 == 3 else f"{size:.3f}", kind, rng.integers(5), label])
    return path


SMALL = ["--layers=24,24", "--batch-size=16", "--log-every=10", "--eval-every=10", "--checkpoint-every=10"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Result]:
    """A table, and a run on it that has ended. Not to be changed."""
    folder = tmp_path_factory.mktemp("classify")
    table, out = write_table(folder), folder / "run"
    words = ["--target=class", "--learning-rate=0.1", "--steps=20", "--no-baselines", "--out", out]
    return table, out, command("train", "classify", "--data", table, *words, *SMALL)


def test_the_command_trains_on_a_table(finished: tuple[Path, Path, Result]) -> None:
    table, out, result = finished
    assert result.exit_code == 0, result.output
    for text in (
        f"on 72 samples of {table}, testing on 18",
        "step 20/20  soft accuracy",
        ", gap ",
        "Gates by kind, as they were trained: ",
        "Dead inputs: no vote depends on",
    ):
        assert text in result.output
    record = runs.read(out, classifier.Record)[1]
    assert record.training.stratified
    assert (record.target, record.model.n_thresholds) == ("class", 0)
    report = json.loads((out / "report.json").read_text())
    assert report["classes"] == ["$large_$ & \\x$$", "<small>\n_"]
    assert np.sum(report["confusion"]) == 18
    assert np.trace(report["confusion"]) / 18 == pytest.approx(report["hard"])
    assert [step for step, _ in record.history.other] == [10, 20]
    assert report["model"] == json.loads(json.dumps(record.model.to_dict()))
    assert (report["training"]["steps"], report["options"]["eval_every"]) == (20, 10)
    assert (report["samples"], report["baselines"]) == ({"train": 72, "test": 18}, {})
    gates = report["gates"]
    assert gates["trained"] == gates["at all places"] == 48
    assert (
        f"Circuit: {gates['simplified']} of 48 gates of the layers survive simplification from bits to bits; an export adds"
        in result.output
    )
    assert (
        "columns: size numbers (32 bits), some missing; kind 2 categories; noise numbers (4 bits)"
        in result.output
    )
    assert record.history.other[-1][1] == pytest.approx(report["soft"])
    assert "20,soft accuracy," in (out / "curves.csv").read_text()
    encoding = Encoding.from_json((out / "columns.json").read_text())
    assert len(encoding.features) == report["bits"] == record.model.in_features
    assert (out / "accuracy.png").read_bytes().startswith(b"\x89PNG")
    own = {*Classifier.files, "checkpoints", "curves.csv", "finished.json", ".lock"}
    assert {path.name for path in out.iterdir()} == own


@pytest.mark.slow
def test_an_export_has_the_name_of_the_run(finished: tuple[Path, Path, Result], tmp_path: Path) -> None:
    """RUN is an argument, or the option of earlier versions."""
    out = finished[1]
    for words in ((out,), ("--run", out)):
        result = command("export", *words, "--out", tmp_path, "--format", "verilog", "--inputs", "bits")
        assert result.exit_code == 0, result.output
        assert (tmp_path / "run.v").exists()
    for words in ((), (out, "--run", out)):
        assert "Error: give the folder of one run or bundle, as RUN." in command("export", *words).output


@pytest.mark.slow
def test_an_export_names_classes_and_bits(finished: tuple[Path, Path, Result], tmp_path: Path) -> None:
    """They are in the circuit, the manifest, the header, the module and the page, which shows no pixels; the encoding travels."""
    _, out, _ = finished
    result = command("export", out, "--out", tmp_path, "--format", "verilog,c,html", "--inputs", "bits")
    assert result.exit_code == 0, result.output
    encoding = Encoding.from_json((tmp_path / "columns.json").read_text())
    assert encoding == Encoding.from_json((out / "columns.json").read_text())
    for name in ("run.json", "manifest.json"):
        about = json.loads((tmp_path / name).read_text())["about"]
        assert about["input_names"] == encoding.features
        assert about["classes"] == ["$large_$ & \\x$$", "<small>\n_"]
        assert about["image"] is None
    for name, begin in (("run.h", " * "), ("run.v", "// ")):
        lines = (tmp_path / name).read_text().splitlines()
        assert begin + 'class 1: "<small>\\n_"' in lines  # in one line, whatever the name
        for number, feature in enumerate(encoding.features):
            assert any(line.startswith(f'{begin}x[{number}]: "{feature}"') for line in lines)
    page = (tmp_path / "run.html").read_text()
    assert "pixels" not in re.sub(r"(?s)<script.*?</script>", "", page)
    assert "tells 2 classes apart: $large_$ &amp; \\x$$, &lt;small&gt;" in page
    assert "size &gt; " in page or '"size > ' in page
    told = json.loads((tmp_path / "manifest.json").read_text())["files"]["columns.json"]
    assert told["format"] == "extra"
    assert "PASS     manifest.json = the files" in command("verify", tmp_path).output


@pytest.mark.parametrize(
    ("run", "data", "name"),
    [
        ("runs/adult", "a.csv", "adult"),
        ("runs/classify", "data/iris.csv", "iris"),
        ("runs/classify", "data/my iris.csv.gz", "my_iris"),
        ("runs/classify", "fashion-mnist", "fashion_mnist"),
        ("runs/classify", None, "digits"),
        ("runs/digits", None, "digits"),
        ("2024 (b)", "a.csv", "run_2024_b"),
        ("été 1", "a.csv", "ete_1"),
        ("日本", "a.csv", "run"),
        ("module", "a.csv", "run_module"),
        ("columns", "a.csv", "run_columns"),
        ("vectors", "a.csv", "run_vectors"),
    ],
)
def test_names_of_exports(finished: tuple[Path, Path, Result], run: str, data: str | None, name: str) -> None:
    _, record = runs.read(finished[1], Classifier.kept)
    samples = dataclasses.replace(record.samples, path=data)
    assert exporting.name_of(Path(run), dataclasses.replace(record, samples=samples)) == name


def test_a_run_has_the_kind_of_its_data(finished: tuple[Path, Path, Result], tmp_path: Path) -> None:
    """Runs on data of their own were all of the kind digits; such a folder is refused in a line."""
    old = tmp_path / "old"
    shutil.copytree(finished[1], old)
    assert runs.kind(old) == "classify"
    path = old / "checkpoints" / str(runs.read(old, Classifier.kept)[0]) / "checkpoint.json"
    content = json.loads(path.read_text())
    content["meta"]["kind"] = "digits"
    del content["digest"]
    path.write_text(json.dumps({**content, "digest": checkpoints._content_digest(content)}))
    said = f"{old} is recorded as a run of the kind digits, but by its data it is of the kind classify: an earlier version"
    for words in (
        ("export", old),
        ("predict", old, finished[0]),
        ("train", "classify", "--resume", "--steps=99", "--out", old),
    ):
        result = command(*words)
        assert result.exit_code == 1
        assert said in " ".join(result.output.split()), result.output
    with pytest.raises(ValueError, match="is recorded as a run of the kind digits"):
        lutjax.load(old)
    of_digits = Classifier.new({"layers": (20,)})
    assert (of_digits.record.own_kind(), of_digits.record.kind) == ("digits", "classify")


def test_errors_name_the_command_that_trains(finished: tuple[Path, Path, Result], tmp_path: Path) -> None:
    out = finished[1]
    for words, message in (
        (["train", "lm", "--resume", "--out", out], "is a run of train classify, not of train lm: continue it with lutjax train classify"),
        (["quantize", out], "is a run of train classify; quantize takes"),
        (["generate", out, "--prompt=x"], "is a run of train classify, not of train lm"),
        (["export", out, "--integers=int8"], "holds a model of train classify, whose circuit has gates"),
    ):  # fmt: skip
        result = command(*words)
        assert result.exit_code == 1
        assert message in " ".join(result.output.split())


@pytest.mark.slow
def test_a_run_on_a_table_goes_on(finished: tuple[Path, Path, Result], tmp_path: Path) -> None:
    out, other = finished[1], tmp_path / "run"
    assert_resumes("classify", out, other, last=20, before=10)
    assert (out / "report.json").read_text() == (other / "report.json").read_text()


def test_defaults_are_those_of_the_kind_of_data(tmp_path: Path) -> None:
    """Rows of a table get one layer that learns its wires and is hard while it trains; recipes, options and arrays have their own."""
    path = write_table(tmp_path)
    run = Classifier.new({}, path, "class")
    model, training = run.record.model, run.record.training
    assert (model.layers, model.wiring, model.estimator) == ((1280,), "learnable", "straight_through")
    assert (training.steps, training.select_every, training.column_bits) == (1000, 50, 32)
    assert Classifier.new({"layers": (30, 20), "tau": 3.0}, path, "class").record.model.layers == (30, 20)
    plain = Classifier.new({"wiring": "balanced"}, path, "class", recipe="difflogic-adult").record
    assert (plain.model.layers, plain.model.estimator) == ((256,) * 5, "soft")
    assert (plain.training.column_bits, plain.training.select_every) == (8, 0)
    labels = "".join(f"{i % 7},{'pqr'[i % 3]}\n" for i in range(30))
    three = write(tmp_path / "three.csv", f"a,class\n{labels}")
    assert Classifier.new({}, three, "class").record.model.layers == (1281,)
    np.savez(tmp_path / "a.npz", x=np.arange(24.0).reshape(12, 2), y=np.arange(12) % 2)
    arrays = Classifier.new({}, tmp_path / "a.npz").record
    assert (arrays.model.layers, arrays.model.wiring, arrays.training.steps) == (
        (2000,) * 3,
        "balanced",
        15000,
    )


@pytest.mark.slow
def test_the_best_hard_network_is_kept(tmp_path: Path) -> None:
    """Compare with a loop: of the networks after every second step the last of those that are right most often on the training part."""
    fields = {"layers": (12,), "steps": 9, "batch_size": 8, "select_every": 2, "learning_rate": 0.5}
    experiment = Classifier.new(
        {**fields, "estimator": "soft"}, write_table(tmp_path), "class", stratified=True
    )
    run, state = experiment.run, experiment.run.init()
    found = []
    for step in range(9):
        state, _ = run.advance(state, step, 1)
        if step + 1 in (2, 4, 6, 8, 9):
            plain = state._replace(params=jax.tree.map(jnp.copy, state.params))
            found.append((run.accuracy(plain, experiment.train, hard=True), step + 1, plain.params))
    best, step, params = max(found, key=lambda one: one[:2])
    assert len({accuracy for accuracy, *_ in found}) > 1
    kept = state.optimizer
    assert int(kept.step) == step < 9  # a later one is worse
    assert float(kept.accuracy) == pytest.approx(best)

    def same(a: Any, b: Any) -> bool:
        return bool(jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), a, b)))

    assert same(run.selected(state).params, params)
    models.save(tmp_path / "run", 9, state, experiment.record)
    model, _ = classifier.load_model(tmp_path / "run")
    assert same(models.arrays(model)[0], params)
    experiment.record.history.test.append((9, 0.5))
    lines = experiment._report(state, tmp_path / "report.json")
    assert any(line.startswith(f"Kept: the network after {step} of 9 steps") for line in lines)
    hard = run.accuracy(run.selected(state), experiment.test, hard=True)
    assert json.loads((tmp_path / "report.json").read_text())["hard"] == pytest.approx(hard)


def test_a_large_gap_is_said(tmp_path: Path) -> None:
    run = Classifier.new({"layers": (12,)}, write_table(tmp_path), "class")
    [line] = run._gap(0.144, 0.936)
    assert "79.2 points below the soft one" in line
    assert run._gap(0.85, 0.86) == []


def test_digits_is_classify_under_another_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both commands start the same run: record, which has all seeds, and samples in their order."""
    rng = np.random.default_rng(0)
    y = np.arange(40) % 2
    np.savez(tmp_path / "a.npz", x=rng.uniform(size=(40, 5)) + y[:, None], y=y)
    started: list[Classifier] = []
    monkeypatch.setattr(experiments, "start", lambda experiment, out, show: started.append(experiment))
    for name in ("digits", "classify"):
        result = command("train", name, "--data", tmp_path / "a.npz", "--out", tmp_path / name, *SMALL)
        assert result.exit_code == 0, result.output
    for name in ("digits", "classify"):
        assert command("train", name, "--out", tmp_path / name, *SMALL[1:], "--layers=40").exit_code == 0
    one, two, *of_digits = started
    for first, second in ((one, two), of_digits):
        assert first.record == second.record
        for part in ("train", "test"):
            np.testing.assert_array_equal(getattr(first, part).x, getattr(second, part).x)
    assert one.record.training.stratified
    assert not of_digits[1].record.training.stratified


@pytest.mark.slow
def test_images_of_bytes_train(tmp_path: Path) -> None:
    """Color images that are uint8, with a test part of their own, are moved and tested."""
    write_cifar(tmp_path, binary=True)
    run = Classifier.new({"layers": (20,), "n_thresholds": 1, "batch_size": 4}, tmp_path)
    assert run.train.x.dtype == np.uint8
    state, loss = run.run.advance(run.run.init(), 0, 2)
    assert np.isfinite(float(loss))
    expected = [
        run.run.classes(state, run.test.x[n : n + 1].astype(np.float32), hard=True)[0] for n in range(2)
    ]
    np.testing.assert_array_equal(run.run.classes(state, run.test.x, hard=True)[:2], expected)
    with pytest.raises(ValueError, match=r"split is 3, but .* has a test part of its own; leave --split out"):
        Classifier.new({"split": 3}, tmp_path)


def test_baselines_are_in_the_report(tmp_path: Path) -> None:
    experiment = Classifier.new({"layers": (12,)}, write_table(tmp_path), "class", stratified=True)
    experiment.record.baselines = {"logistic regression": 0.5}
    experiment.record.history.test.append((0, 0.5))
    experiment._report(experiment.run.init(), tmp_path / "report.json")
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["baselines"] == {"logistic regression": 0.5}


@pytest.mark.parametrize(
    ("name", "shape", "n_classes", "warns"),
    [
        ("difflogic-mnist-small", (28, 28), 10, False),
        ("difflogic-mnist-small", (784,), 10, False),
        ("difflogic-mnist-small", (8, 8), 10, True),
        ("difflogic-mnist-small", (28, 28), 2, True),
        ("difflogic-adult", (14,), 2, True),
    ],
)
def test_a_recipe_on_other_data_warns(
    name: str, shape: tuple[int, ...], n_classes: int, warns: bool, tmp_path: Path
) -> None:
    x = np.random.default_rng(0).integers(0, 2, (20, *shape))
    np.savez(tmp_path / "a.npz", x=x, y=np.arange(20) % n_classes)
    fields = {"layers": (20,), "wiring": "balanced"}
    run = Classifier.new(fields, tmp_path / "a.npz", recipe=name)
    words = f"warning: the recipe {name} was published for {RECIPES[name].data}, and these data are of shape"
    assert [line.startswith(words) for line in run.remarks] == [True] * warns
    run.record.history.test.append((0, 0.5))
    *_, published = run._report(run.run.init(), tmp_path / "report.json")
    assert ("these are other data" in published) == warns


def test_numbers_that_are_no_bits_are_refused(tmp_path: Path) -> None:
    """Refuse them in one line before anything runs, in arrays and in columns that are left numbers; bits train, and a run of before is not exported."""
    rng, y = np.random.default_rng(0), np.arange(40) % 2
    np.savez(tmp_path / "a.npz", x=rng.uniform(size=(40, 5)) + y[:, None], y=y)
    table = write_table(tmp_path)
    for words in (["--data", tmp_path / "a.npz"], ["--data", table, "--target=class", "--column-bits=0"]):
        result = command("train", "classify", *words, "--n-thresholds=0", "--out", tmp_path / "run", *SMALL)
        assert result.exit_code == 2
        said = " ".join(result.output.replace("│", "").split())
        assert "--n-thresholds is 0, so samples must be bits, but" in said
        assert "Make bits of them: --n-thresholds 1 or more." in said
        assert not (tmp_path / "run").exists()
    np.savez(tmp_path / "b.npz", x=rng.integers(0, 2, (40, 5)), y=y)
    before = Classifier.new({"layers": (20,), "n_thresholds": 0}, tmp_path / "b.npz")
    record = dataclasses.replace(
        before.record,
        samples=runs.Source.of(tmp_path / "a.npz", 40, datasets.load(tmp_path / "a.npz").digest),
    )
    models.save(tmp_path / "old", 1, before.run.init(), record)
    result = command("export", tmp_path / "old")
    assert result.exit_code == 1
    assert "n_thresholds is 0, so samples must be bits" in result.output


def test_the_command_refuses(finished: tuple[Path, Path, Result], tmp_path: Path) -> None:
    table, out, _ = finished
    for words, message in (
        (["--data", table], "name its column of labels by --target"),
        (["--data", table, "--target", "sizes"], "has no column 'sizes'"),
        (["--target", "class"], "--target is class, but it is for tables"),
        (["--recipe", "best"], "is not one of"),
        (["--recipe", "logictreenet-cifar10-g"], "has sizes for CIFAR-10; samples of"),
        (["--resume", "--out", out, "--recipe", "difflogic-adult"], "belongs to another configuration"),
    ):
        result = command("train", "classify", *words, *(["--out", tmp_path] if "--out" not in words else []))
        assert result.exit_code
        assert message in " ".join(result.output.replace("│", "").split())


# --- how data are read


def test_decimals_with_a_comma_are_numbers(tmp_path: Path) -> None:
    """They are the numbers that a point makes of them, in new rows, too; a comma in a few cells is a mistake as before."""
    rng = np.random.default_rng(0)
    numbers = np.round(rng.normal(size=60), 2)
    texts = {".": "a;class\n", ",": "a;class\n"}
    for point in texts:
        texts[point] += "".join(f"{n}".replace(".", point) + f";{i % 2}\n" for i, n in enumerate(numbers))
    one, two = (
        columns.read(write(tmp_path / f"{i}.csv", text), "class") for i, text in enumerate(texts.values())
    )
    for bits in (4, 0):
        encoding = Encoding.fit(two, bits)
        assert encoding.columns[0].decimal == ","
        np.testing.assert_array_equal(encoding.encode(two), Encoding.fit(one, bits).encode(one))
        again = Encoding.from_json(encoding.to_json())
        np.testing.assert_array_equal(again.encode(two), encoding.encode(two))
    assert "a numbers with a decimal comma (4 bits)" in columns.described(two, Encoding.fit(two, 4))[0]


@pytest.mark.parametrize(
    ("name", "cells", "words"),
    [
        ("date", [f"2024-{1 + i % 12:02}-{1 + i % 28:02} 10:30" for i in range(90)], "has dates, which are read as categories"),
        ("day", [f"{1 + i % 28}.{1 + i % 12}.24" for i in range(90)], "has dates"),
        ("id", [str(1000 + i) for i in range(90)], "counts the rows, as ids do"),
        ("name", [f"n{i}" for i in range(90)], "has 90 different texts in 90 rows, as names or ids have"),
        ("city", [f"c{i % 70}" for i in range(280)], "has 70 categories, of which the 64 most frequent"),
        ("age", [str(i % 80) for i in range(90)], ""),
        ("pay", [f"{i * 1.37:.2f}" for i in range(90)], ""),
        ("big", [str(i * i) for i in range(90)], ""),
        ("few", [str(i) for i in range(12)], ""),
        ("job", ["a", "b", "?"] * 30, ""),
    ],
)  # fmt: skip
def test_columns_that_look_like_something_else_are_warned_of(name: str, cells: list[str], words: str) -> None:
    labels = np.array(["no", "yes"])[np.arange(len(cells)) % 2]
    table = Table({name: np.array(cells), "b": labels}, labels, "t")
    _, *warnings = columns.described(table, Encoding.fit(table, 8))
    if words:
        assert len(warnings) == 1
        assert warnings[0].startswith(f"warning: column {name} {words}")
        assert f"--exclude {name}" in warnings[0] or name == "city"
    else:
        assert not warnings


def test_marks_at_the_beginning_of_a_table(tmp_path: Path) -> None:
    """Tables as spreadsheets write them."""
    plain = columns.read(write(tmp_path / "a.csv", CSV), "class")
    (tmp_path / "b.csv").write_bytes(CSV.encode("utf-8-sig"))
    for encoding in (None, "utf-8", "utf-8-sig"):
        assert (
            columns.read(tmp_path / "b.csv", "class", encoding=encoding).columns.keys()
            == plain.columns.keys()
        )
    (tmp_path / "c.csv").write_bytes(CSV.encode("utf-16"))
    with pytest.raises(SamplesError, match="such as utf-16"):
        columns.read(tmp_path / "c.csv", "class")
    assert columns.read(tmp_path / "c.csv", "class", encoding="utf-16").columns.keys() == plain.columns.keys()


def test_tables_compressed_excluded_and_in_another_encoding(tmp_path: Path) -> None:
    text = CSV.replace("cook", "Köchin")
    plain = columns.read(write(tmp_path / "a.csv", text), "class")
    (tmp_path / "b.CSV.GZ").write_bytes(gzip.compress(text.encode("latin-1")))
    with pytest.raises(
        SamplesError, match=r"is not a CSV file of UTF-8 text.*Name another encoding by --encoding"
    ):
        columns.read(tmp_path / "b.CSV.GZ", "class")
    same = datasets.load(tmp_path / "b.CSV.GZ", target="class", encoding="latin-1").train
    assert same.digest == plain.digest
    few = datasets.load(tmp_path / "a.csv", target="class", exclude=("job", "note")).train
    assert isinstance(few, Table)
    assert list(few.columns) == ["age", "pay"]
    for options, message in (
        ({"exclude": ("jobs",)}, "has no column 'jobs', which --exclude names"),
        ({"exclude": ("class",)}, "--exclude names 'class', the column of labels"),
        ({"encoding": "klingon"}, "which Python does not know"),
    ):
        with pytest.raises(SamplesError, match=message):
            datasets.load(tmp_path / "a.csv", target="class", **options)
    np.savez(tmp_path / "c.npz", x=np.zeros((12, 2)), y=np.arange(12) % 2)
    with pytest.raises(SamplesError, match="--exclude is job, but it is for tables"):
        datasets.load(tmp_path / "c.npz", exclude=("job",))


@pytest.mark.parametrize(
    ("y", "classes"),
    [
        (np.array([3, 7, 10] * 6), ("3", "7", "10")),
        (np.array([1, 2, 3] * 6), ("1", "2", "3")),
        (np.array(["high", "low", "a b"] * 6), ("a b", "high", "low")),
        (np.array([0, 1, 2] * 6), ()),
    ],
)
def test_labels_of_arrays_have_gaps_or_are_texts(
    y: np.ndarray, classes: tuple[str, ...], tmp_path: Path
) -> None:
    """Each class that there is has a number, and no other; labels of a test part are those of the training part."""
    x = np.random.default_rng(0).normal(size=(18, 2))
    np.savez(tmp_path / "a.npz", x=x, y=y)
    data = datasets.load(tmp_path / "a.npz")
    assert isinstance(data.train, datasets.Samples)
    assert data.train.n_classes == 3
    assert data.train.classes == classes
    if classes:
        assert [classes[number] for number in data.train.y] == y.astype(str).tolist()
        assert bool(data.remarks) == (y.dtype.kind == "i")
    np.savez(tmp_path / "b.npz", x_train=x, y_train=y, x_test=x[:12], y_test=y[:12])
    test = datasets.load(tmp_path / "b.npz").test
    assert isinstance(test, datasets.Samples)
    np.testing.assert_array_equal(test.y, data.train.y[:12])
    missing = np.where(np.arange(18) == 4, "?", y.astype(str))
    np.savez(tmp_path / "c.npz", x=x, y=missing)
    with pytest.raises(SamplesError, match="a label is missing"):
        datasets.load(tmp_path / "c.npz")


def test_labels_may_be_true_and_false(tmp_path: Path) -> None:
    """They name the classes, as those of a column of a table do."""
    y = np.arange(18) % 3 == 0
    np.savez(tmp_path / "a.npz", x=np.random.default_rng(0).normal(size=(18, 2)), y=y)
    train = datasets.load(tmp_path / "a.npz").train
    assert isinstance(train, datasets.Samples)
    assert train.classes == ("False", "True")
    np.testing.assert_array_equal(train.y, y)


def test_missing_numbers_are_alike_in_arrays_and_tables(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x, y = np.round(rng.normal(size=(30, 2)), 3), np.array(["yes", "no"] * 15)
    x[3, 0] = x[7, 1] = np.nan
    np.savez(tmp_path / "a.npz", x=x, y=y, names=["a", "b"])
    rows = ("" if np.isnan(cell) else repr(float(cell)) for cell in x.ravel())
    lines = "".join(f"{a},{b},{label}\n" for a, b, label in zip(rows, rows, y, strict=True))
    of_array = datasets.load(tmp_path / "a.npz").parts(bits=4)
    of_table = datasets.load(write(tmp_path / "a.csv", f"a,b,class\n{lines}"), target="class").parts(bits=4)
    assert of_array.encoding == of_table.encoding
    np.testing.assert_array_equal(of_array.train.x, of_table.train.x)
    np.testing.assert_array_equal(of_array.test.y, of_table.test.y)


def test_channels_may_come_first(tmp_path: Path) -> None:
    images = np.random.default_rng(0).random((12, 16, 16, 3))
    np.savez(tmp_path / "a.npz", x=np.moveaxis(images, -1, 1), y=np.arange(12) % 2)
    data = datasets.load(tmp_path / "a.npz")
    assert isinstance(data.train, datasets.Samples)
    assert data.train.shape == (16, 16, 3)
    np.testing.assert_array_equal(data.train.x, images.reshape(12, -1).astype(np.float32))
    assert data.remarks == ("x: [12, 3, 16, 16] is read as channels first, 3 of 16 x 16 pixels.",)
    np.savez(tmp_path / "a.npz", x=images, y=np.arange(12) % 2)
    assert datasets.load(tmp_path / "a.npz").remarks == ()
    assert datasets.channels_last(np.zeros((5, 3, 4, 4)))[0].shape == (5, 3, 4, 4)  # too small to tell
