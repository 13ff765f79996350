"""Classification: image folders, tables, splits, recipes, reports, and the command."""

import dataclasses
import gzip
import hashlib
import io
import json
import os
import pickle
import re
import shutil
import signal
import struct
import sys
import zipfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import slow_where
from commands import command, output, refusal
from small_runs import LABELS, table_text

import lutjax
from lutjax import extras as _extras
from lutjax.models import LogicClassifierConfig, packed
from lutjax.training import (
    _gate_costs,
    checkpoints,
    classifier,
    classifier_runs,
    datasets,
    experiments,
    export as exporting,
    models,
    reports,
    runs,
)
from lutjax.training.augment import mirror
from lutjax.training.classifier_config import FOR_SMALL_TABLES, GATE_COSTS
from lutjax.training.classifier_runs import Classifier, bit_names
from lutjax.training.datasets import cifar, columns, idx
from lutjax.training.datasets.columns import Encoding, Table
from lutjax.training.recipes import RECIPES
from lutjax.training.samples import SamplesError, read_arrays, samples, split_ids

RNG = np.random.default_rng(0)


def idx_bytes(array):
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()


IMAGES = {
    "train": (RNG.integers(0, 256, (12, 3, 5), np.uint8), (np.arange(12) % 3).astype(np.uint8)),
    "t10k": (RNG.integers(0, 256, (4, 3, 5), np.uint8), (np.arange(4) % 3).astype(np.uint8)),
}


def write_idx(folder, *, compressed=False, dot=False):
    folder.mkdir(parents=True, exist_ok=True)
    for part, arrays in IMAGES.items():
        for array, name in zip(arrays, ("images-idx3-ubyte", "labels-idx1-ubyte"), strict=True):
            name = f"{part}-{name.replace('-idx', '.idx') if dot else name}"
            path = folder / (f"{name}.gz" if compressed else name)
            path.write_bytes(gzip.compress(idx_bytes(array)) if compressed else idx_bytes(array))
    return folder


def cifar_batches():
    rng = np.random.default_rng(1)
    sizes = (2, 3, 1, 2, 4, 5)
    return [(rng.integers(0, 256, (n, 3, 32, 32), np.uint8), rng.integers(0, 10, n)) for n in sizes]


def write_cifar(folder, *, binary):
    folder.mkdir(parents=True, exist_ok=True)
    for k, (name, (images, labels)) in enumerate(zip(cifar.FILES, cifar_batches(), strict=True)):
        rows = images.reshape(len(images), -1)
        if binary:
            (folder / f"{name}.bin").write_bytes(
                np.column_stack([labels.astype(np.uint8), rows]).tobytes()
            )
        else:
            batch = {
                b"data": rows,
                b"labels": labels.tolist(),
                b"filenames": [b"a.png"] * len(rows),
            }
            (folder / name).write_bytes(pickle.dumps(batch, 2 + k % 3))
    return folder


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("place", ["", "MNIST/raw"])
def test_idx_files(compressed, place, tmp_path):
    write_idx(tmp_path / place, compressed=compressed, dot=compressed)
    parts = datasets.load(tmp_path).parts()
    for part, (images, labels) in zip((parts.train, parts.test), IMAGES.values(), strict=True):
        assert part.x.dtype == np.uint8
        assert part.shape == (3, 5)
        np.testing.assert_array_equal(part.x.reshape(images.shape), images)
        np.testing.assert_array_equal(part.y, labels)
    assert parts.n_classes == 3


def test_checksums_name_the_data(tmp_path, monkeypatch):
    folder = write_idx(tmp_path)
    assert datasets.load(folder).name == str(folder)
    sums = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in idx.FILES}
    monkeypatch.setitem(idx.PUBLISHED, "Fashion-MNIST", sums)
    data = datasets.load(folder)
    assert data.name == f"Fashion-MNIST in {folder}"
    assert data.parts().test.classes[9] == "Ankle boot"
    path = folder / idx.FILES[2]
    path.write_bytes(path.read_bytes()[:-1] + b"\x07")
    with pytest.raises(
        SamplesError,
        match=r"are those of Fashion-MNIST .* but t10k-images-idx3-ubyte has SHA-256 [0-9a-f]{64} and not",
    ):
        datasets.load(folder)


@pytest.mark.parametrize("kind", ["binary", "python", "python 2"])
def test_cifar(kind, tmp_path):
    folder, batches = (
        write_cifar(tmp_path / "cifar-10-batches", binary=kind == "binary"),
        cifar_batches(),
    )
    if kind == "python 2":
        images, labels = batches[-1]
        (folder / "test_batch").write_bytes(
            of_python_2(images.reshape(len(images), -1), labels.tolist())
        )
    parts = datasets.load(tmp_path).parts()
    for part, some in ((parts.train, batches[:-1]), (parts.test, batches[-1:])):
        images = np.concatenate([x for x, _ in some])
        assert part.shape == (32, 32, 3)
        for n, channel, row, column in [(0, 0, 0, 0), (1, 2, 31, 30), (4, 1, 7, 19)]:
            result = part.x.reshape(-1, 32, 32, 3)[n, row, column, channel]
            assert result == images[n, channel, row, column]
        np.testing.assert_array_equal(part.y, np.concatenate([y for _, y in some]))
        assert part.classes == cifar.CLASSES


def cut(path, end):
    path.write_bytes(path.read_bytes()[:end])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: (f / idx.FILES[1]).unlink(), "has no file train-labels-idx1-ubyte"),
        (lambda f: cut(f / idx.FILES[0], -1), r"has 195 bytes, but its header requires 196 for \[12, 3, 5\]"),
        (lambda f: cut(f / idx.FILES[0], 9), r"has 9 bytes, but its header requires .* for \[\]"),
        (lambda f: (f / idx.FILES[0]).write_bytes(bytes([0, 0, 8, 65]) + b"\0\0\0\1" * 65 + b"\7"), "has 65 axes"),
        (lambda f: (f / idx.FILES[3]).write_bytes(b"P5 3 5"), "begins with the bytes 50 35 20 33"),
        (lambda f: (f / idx.FILES[3]).write_bytes(b""), r"begins with the bytes \(none\)"),
        (lambda f: (f / idx.FILES[3]).write_bytes(idx_bytes(np.zeros(5, np.uint8))), r"has shape \[4, 3, 5\] and its labels \[5\]"),
        (lambda f: (f / idx.FILES[2]).write_bytes(idx_bytes(np.zeros((4, 5, 3), np.uint8))), r"training images have \(3, 5\) pixels, test images \(5, 3\)"),
        (lambda f: write_cifar(f / "more", binary=True), "holds several data sets: give one of"),
        (lambda f: (f / f"{idx.FILES[0]}.gz").write_bytes(gzip.compress((f / idx.FILES[0]).read_bytes())[:-9]) and (f / idx.FILES[0]).unlink(), "ubyte.gz is not a whole gzip file"),
        (lambda f: [path.unlink() for path in f.iterdir()], "has no IDX files"),
    ],
)  # fmt: skip
def test_bad_idx_files(change, message, tmp_path):
    folder = write_idx(tmp_path)
    change(folder)
    with pytest.raises(SamplesError, match=message):
        datasets.load(folder)


def of_python_2(rows, labels):
    """Pickle a batch like the published Python 2 files, with strings as bytes."""
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


class Malicious:
    def __reduce__(self):
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
        (False, "data_batch_2", pickle.dumps({"data": np.zeros((2, 9), np.uint8), "labels": [1, 2]}, 4), r"data are uint8 \[2, 9\]; expected uint8 \[N, 3072\]"),
        (False, "test_batch", pickle.dumps({"data": np.zeros((2, 3072), np.uint8), "labels": [1]}, 4), r"labels are int64 \[1\]; expected one integer for each of 2"),
        (False, "test_batch", pickle.dumps({b"data": np.zeros((2, 3072), object), b"labels": [1]}), "is not a batch of CIFAR-10"),
        (False, "test_batch", pickle.dumps({b"data": print, b"labels": [1]}), "is not a batch of CIFAR-10"),
        (False, "test_batch", b"\x80\x02}r\xff\xff\xff\xff.", "LONG_BINPUT 4294967295"),
    ],
)  # fmt: skip
def test_bad_cifar(binary, name, content, message, tmp_path):
    folder = write_cifar(tmp_path, binary=binary)
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(content)
    with pytest.raises(SamplesError, match=message):
        datasets.load(folder)
    assert not Path("stolen").exists()


CSV = """age; job ;pay;note;class
20;clerk;1.5;same;no
?;smith;2.5;same;yes
31;clerk;;same;no
64;cook;3.5;same;yes
"""


def write(path, text):
    path.write_text(text)
    return path


def test_a_table_is_encoded(tmp_path):
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
    actual = encoding.encode(table)
    assert actual.dtype == np.float32
    np.testing.assert_array_equal(actual, expected)
    np.testing.assert_array_equal(encoding.labels(table), [0, 1, 0, 1])
    numbers = Encoding.fit(table, bits=0)
    np.testing.assert_array_equal(
        numbers.encode(table)[:, :2], [[20, 0], [31, 1], [31, 0], [64, 0]]
    )
    again = Encoding.from_json(encoding.to_json())
    assert again == encoding
    others = {
        "job": np.array(["?", "queen"]),
        "pay": np.array(["9", "NA"]),
        "age": np.array(["1e3", "-1"]),
    }
    other = Table(others, np.array(["no", "no"]), "b")
    expected = [[1, 1, 0, 0, 0, 0, 1, 1, 0], [0, 0, 0, 0, 0, 0, 1, 0, 1]]
    np.testing.assert_array_equal(again.encode(other), expected)


def test_thresholds_separate_numbers():
    rng = np.random.default_rng(2)
    for bits, numbers in (
        (3, rng.normal(size=50)),
        (4, np.where(rng.random(90) < 0.9, 0, rng.integers(1, 40, 90))),  # mostly one number
        (5, rng.integers(0, 3, 30)),
        (1, np.array([1, 2])),
    ):
        result = columns._thresholds(numbers.astype(float), bits)
        assert len(result) == min(bits, len(np.unique(numbers)) - 1)
        codes = [sum(n > t for t in result) for n in numbers]
        assert len(set(codes)) == len(result) + 1
    spread = columns._thresholds(np.arange(100.0), 3)
    np.testing.assert_array_equal(
        np.histogram(np.arange(100), [-1, *(spread + 0.5), 100])[0], [25] * 4
    )


def test_many_categories():
    cells = np.array([f"city {n}" for n in range(80) for _ in range(1 + (n < 60))])
    table = Table({"a": cells}, np.arange(len(cells)).astype(str) > "5", "t")
    [column] = Encoding.fit(table, 3, ("n", "y")).columns
    assert isinstance(column, columns.Categories)
    assert len(column.values) == columns.MOST_CATEGORIES
    assert {f"city {n}" for n in range(60)} < set(column.values)


def test_endings_say_how_a_table_is_read(tmp_path, monkeypatch):
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
    one = columns.read(tmp_path / "a.parquet", "class")
    two = columns.read(write(tmp_path / "a.csv", CSV), "class")
    encoding = Encoding.fit(one, 2)
    assert encoding == Encoding.fit(two, 2)
    np.testing.assert_array_equal(encoding.encode(one), encoding.encode(two))
    parquet.write_table(pyarrow.table({"class": ["no"], "a": [[1]]}), tmp_path / "b.parquet")
    with pytest.raises(SamplesError, match=r"column a has the type list"):
        columns.read(tmp_path / "b.parquet", "class")
    table = columns.read(write(tmp_path / "T.TSV", "a, b, c, d\tclass\n1\tx\n2\ty\n"), "class")
    assert list(table.columns) == ["a, b, c, d"]
    with pytest.raises(SamplesError, match="is not a Parquet file"):
        columns.read(write(tmp_path / "T.PARQUET", "text"), "class")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    remedy = re.escape(f"which requires pyarrow: {_extras.command('pyarrow')}")
    with pytest.raises(SamplesError, match=remedy):
        columns.read(tmp_path / "a.parquet", "class")


def table_of(n, labels=None):
    rng = np.random.default_rng(n)
    made = {"a": rng.integers(0, 50, n).astype(str), "b": rng.choice(["x", "y", "?"], n)}
    return Table(
        made, np.where(rng.random(n) < 0.3, "no", "yes") if labels is None else labels, "made"
    )


def test_the_encoding_is_of_the_training_part():
    data = datasets.Data(table_of(200))
    parts = data.parts(split=3, stratified=True, bits=4)
    train, test = split_ids(data.train.labels, 3, stratified=True)
    encoding = Encoding.fit(data.train.rows(train), 4)
    assert parts.encoding == encoding
    np.testing.assert_array_equal(parts.test.x, encoding.encode(data.train.rows(test)))
    assert parts.test.classes == ("no", "yes")
    assert data.digest != datasets.Data(data.train.rows(np.arange(199))).digest


def npz(folder, **arrays):
    np.savez(folder / "a.npz", **arrays)
    return datasets.load(folder / "a.npz")


X20, Y20 = np.random.default_rng(0).uniform(size=(20, 4, 4, 3)), np.arange(20) % 2
PARTS = {"x_train": X20[:14], "y_train": Y20[:14], "x_test": X20[14:], "y_test": Y20[14:]}
TABLE = table_of(30)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda f: datasets.Data(TABLE, dataclasses.replace(TABLE, columns={"a": TABLE.columns["a"]})).parts(), "has no column b"),
        (lambda f: datasets.Data(TABLE, dataclasses.replace(TABLE, columns={**TABLE.columns, "a": TABLE.columns["b"]})).parts(), "made: column a has '[xy]' in row"),
        (lambda f: datasets.Data(TABLE, table_of(9, np.array(["so"] * 9))).parts(), "has the label 'so', which is missing from the training"),
        (lambda f: datasets.Data(table_of(30, np.arange(30).astype(str))).parts(), "has 30 different values in 30 rows"),
        (lambda f: datasets.Data(table_of(30, np.array(["no"] * 30))).parts(), "every label is 'no'"),
        (lambda f: datasets.Data(table_of(30, np.array(["so", *"yn" * 14, "n"]))).parts(stratified=True), "class so has 1 of 30 samples"),
        (lambda f: datasets.Data(Table({"a": np.array([*map(str, range(99)), "1,5"])}, np.array([*"yn" * 50]), "made")).parts(), r"made: column a has numbers, and \['1,5'\] in 1 of"),
        (lambda f: datasets.Data(Table({"a": np.array(["1"] * 30)}, TABLE.labels, "made")).parts(), "every column has the same cell"),
        (lambda f: columns.table_from_arrays(np.array(["a", "b"]), np.array([1, 2]), None, name="t"), r"x has shape \[2\]"),
        (lambda f: columns.table_from_arrays(np.array([["a", "b"]]), np.array([1]), ["c"], name="t"), "a different one for each of 2 columns"),
        (lambda f: split_ids(np.append(np.repeat(np.arange(3), 30), 3), 0, stratified=True), "class 3 has 1 of 91 samples.*--no-stratified"),
        (lambda f: npz(f, **PARTS), "there are 6 samples; at least 10"),
        (lambda f: npz(f, x_train=X20, y_train=Y20), r"has no array x_test and no array y_test; it has \['x_train', 'y_train'\]"),
        (lambda f: npz(f, x=X20, y=np.where(np.arange(20) == 4, "?", Y20.astype(str))), "a label is missing"),
        (lambda f: datasets.load(target="y"), "--target is y, but it is for tables"),
        (lambda f: datasets.load(write(f / "a.npz", ""), test=Path("b.csv")), "--test-data is b.csv, but it is for tables"),
        (lambda f: npz(f, x=X20, y=Y20) and datasets.load(f / "a.npz", exclude=("job",)), "--exclude is job, but it is for tables"),
        (lambda f: datasets.load(write(f / "a.csv", CSV)), "is a table: name its column of labels by --target"),
        (lambda f: datasets.load(write(f / "a.csv", CSV), target="y", test=Path("b.npz")), "--test-data is b.npz; expected a table"),
        (lambda f: datasets.load(write(f / "a.csv", CSV), target="class", exclude=("jobs",)), "has no column 'jobs', which --exclude names"),
        (lambda f: datasets.load(write(f / "a.csv", CSV), target="class", exclude=("class",)), "--exclude names 'class', the column of labels"),
        (lambda f: datasets.load(write(f / "a.csv", CSV), target="class", encoding="klingon"), "which Python does not know"),
        (lambda f: datasets.load(write(f / "a.csv", CSV), target="class", encoding="hex"), "which Python does not know"),
        (lambda f: datasets.load(write(f / "a.png", "")), "ends in .png; expected a .npz file, a table"),
        (lambda f: datasets.load(f / "none.csv", target="y"), "none.csv cannot be read: No such file"),
        (lambda f: datasets.load(f / "none"), "none cannot be read"),
    ],
)  # fmt: skip
def test_data_that_cannot_be_used(call, message, tmp_path):
    with pytest.raises(SamplesError, match=message):
        call(tmp_path)


@pytest.mark.parametrize(("text", "target", "message"), [
    (CSV, "clas", "has no column 'clas', which --target names; it has age, job, pay, note, class"),
    ("a,b\n1,2\n1\n", "b", "line 3 has 1 cells, but there are 2 columns"),
    ("a,a\n1,2\n", "a", "expected distinct names"),
    ("", "a", "is empty"),
    ("a,b\n", "b", "has 0 rows and 1 columns besides b"),
    ("b\n1\n", "b", "has 1 rows and 0 columns besides b"),
    ("a,b\n1,x\n2,?\n", "b", "b is missing in row 2 and 0 others"),
    ('a,b\n"1,x\n', "b", "line 2 has 1 cells"),
])  # fmt: skip
def test_bad_tables(text, target, message, tmp_path):
    with pytest.raises(SamplesError, match=message):
        columns.read(write(tmp_path / "a.csv", text), target)


def test_arrays_of_a_file(tmp_path):
    data = npz(tmp_path, x_train=X20[:10], y_train=Y20[:10], x_test=X20[10:], y_test=Y20[10:])
    parts = data.parts(split=5)
    assert len(data) == 20
    np.testing.assert_array_equal(parts.train.x, X20[:10].reshape(10, -1).astype(np.float32))
    np.testing.assert_array_equal(parts.test.y, Y20[10:])
    text = np.array([["1", "a"], ["2", "b"], ["3", "?"]] * 4)
    encoding = npz(tmp_path, x=text, y=np.arange(12) % 2, names=["n", "c"]).parts(bits=3).encoding
    assert encoding.features == ["n > 1", "n > 2", "c = a", "c = b", "c missing"]


def test_a_stratified_split_keeps_the_shares_of_classes():
    y = np.repeat(np.arange(3), (50, 30, 20))
    train, test = split_ids(y, 0, stratified=True)
    assert sorted([*train, *test]) == list(range(100))
    np.testing.assert_array_equal(np.bincount(y[test]), [10, 6, 4])
    np.testing.assert_array_equal(test, split_ids(y, 0, stratified=True)[1])
    assert not np.array_equal(test, split_ids(y, 1, stratified=True)[1])


def test_a_step_changes_images_as_asked(monkeypatch):
    asked = []

    def warp(key, x, strength, **how):
        asked.append({"augment": strength, **how})
        return x

    monkeypatch.setattr(classifier, "warp", warp)
    train = samples(RNG.uniform(size=(20, 3, 3)), np.arange(20) % 2, name="squares")
    for changes in ({"shift": 2.0}, {"bend": 1.0}, {"augment": 0.5}, {}):
        training = classifier.TrainingConfig(**{"augment": 0.0, **changes})
        run = classifier.Run(LogicClassifierConfig(9, 2, layers=(4,)), training, train)
        jax.eval_shape(run.step, run.abstract(), jnp.int32(0), (train.x, train.y))
        assert asked == [{"augment": 0.0, "shift": 0.0, "bend": 0.0, **changes}][: len(changes)]
        asked.clear()
    with pytest.raises(ValueError, match="shift is -1; it must not be negative"):
        classifier.TrainingConfig(shift=-1)


def test_a_step_mirrors_images(monkeypatch):
    train = samples(RNG.uniform(size=(20, 3, 3)), np.arange(20) % 2, name="squares")
    shares = []
    monkeypatch.setattr(
        classifier, "mirror", lambda key, x, share: shares.append((x.shape, share)) or x
    )
    for flip in (0.0, 0.5):
        training = classifier.TrainingConfig(augment=0.0, flip=flip, batch_size=7)
        run = classifier.Run(LogicClassifierConfig(9, 2, layers=(4,)), training, train)
        jax.eval_shape(run.step, run.abstract(), jnp.int32(0), (train.x, train.y))
    assert shares == [((7, 3, 3), 0.5)]
    with pytest.raises(ValueError, match=r"flip is 1\.5; it is a probability, 0 to 1"):
        classifier.TrainingConfig(flip=1.5)


def test_mirrored_images():
    x = jnp.asarray(RNG.uniform(size=(64, 2, 3, 2)), jnp.float32)
    for share in (0, 1):
        np.testing.assert_array_equal(
            mirror(jax.random.key(0), x, share), x[:, :, ::-1] if share else x
        )
    same = (mirror(jax.random.key(0), x, 0.5) == x).all((1, 2, 3))
    assert 16 < same.sum() < 48


def test_edges_of_images_are_bits_of_gates(tmp_path, monkeypatch):
    x = RNG.integers(0, 256, (20, 4, 5), dtype=np.uint8)
    np.savez(tmp_path / "a.npz", x=x, y=np.arange(20) % 2)
    run = Classifier.create({"layers": (20,), "n_thresholds": 2, "edges": True}, tmp_path / "a.npz")
    model = run.record.model
    assert model.image_shape == (4, 5)
    assert run.run.thresholds.shape == (100, 2)
    assert run.run.thresholds[20:].min() < 0
    monkeypatch.setattr(classifier_runs, "baselines", lambda *args: {"rows": len(args[4])})
    run.compare(experiments.Show())
    assert run.record.baselines == {"rows": 20}
    names = bit_names(model, run.train, run.run.thresholds, None)
    assert len(names) == 200
    assert names[0].startswith("0,0 > ")
    assert names[40].startswith("0,0 right - left > ")
    state = run.run.init()
    run.run.accuracy(state, run.test, hard=True)
    with pytest.raises(ValueError, match="n_thresholds is 0"):
        Classifier.create({"layers": (20,), "n_thresholds": 0, "edges": True}, tmp_path / "a.npz")


KINDS = {
    "constant": (0b0000, 0b1111), "input": (0b1010, 0b1100), "not": (0b0101, 0b0011), "and": (0b1000,), "nand": (0b0111,),
    "or": (0b1110,), "nor": (0b0001,), "and not": (0b0010, 0b0100), "or not": (0b1011, 0b1101), "xor": (0b0110,), "xnor": (0b1001,),
}  # fmt: skip
"""Truth tables by kind: bit a + 2 b is the answer for inputs a and b."""


def test_gates_by_kind():
    for kind, gates in KINDS.items():
        truth = (np.array(gates)[:, None] >> np.arange(4) & 1).astype(bool)
        assert reports.kinds(truth) == {name: len(gates) * (name == kind) for name in KINDS}
    of_three = np.array([[0] * 8, [0, 1] * 4, [0, 1, 1, 0] * 2, [0, 1, 1, 0, 1, 0, 0, 1]], bool)
    assert reports.kinds(of_three) == {"needs 0": 1, "needs 1": 1, "needs 2": 1, "needs 3": 1}
    np.testing.assert_array_equal(reports.needs(of_three).sum(0), [3, 2, 1])
    whole = samples(np.zeros((10, 2, 2)), np.arange(10) % 2, name="w")
    names = reports.bit_names(whole, np.array([[0.5, 1]] * 4), None)
    assert names[:3] == ["0,0 > 0.5", "0,0 > 1", "0,1 > 0.5"]


def test_gates_in_words_mean_what_they_say():
    meaning = {"differs from": "!=", "equals": "==", "true": "True", "false": "False"}
    answers = (np.arange(16)[:, None] >> np.arange(4) & 1).astype(bool)
    for words, truth in zip(
        reports.in_words(answers, np.tile([1, 0], (16, 1)), "ba"), answers, strict=True
    ):
        for word, operator in meaning.items():
            words = words.replace(word, operator)
        result = [eval(words, {"a": bool(address & 1), "b": address > 1}) for address in range(4)]
        assert result == truth.tolist(), words
    with pytest.raises(ValueError, match="truth has 8 entries"):
        reports.in_words(np.zeros((1, 8), bool), np.zeros((1, 3), int), "abc")


@pytest.mark.parametrize("seed", range(3))
def test_dead_bits_change_no_vote(seed):
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

    def votes(bits):
        for table, wire in zip(truth, wires, strict=True):
            bits = table[
                np.arange(len(table)), bits[:, wire[:, 0]] + 2 * bits[:, wire[:, 1]]
            ].astype(int)
        return bits

    for bit in np.flatnonzero(~read):
        np.testing.assert_array_equal(votes(bits), votes(bits ^ (np.arange(n_bits) == bit)))
    assert not read.all()


def test_live_gates_by_hand():
    """The vote reads only the first of two lower gates, and this gate reads only bit 2."""
    truth = [
        np.array([[0, 0, 1, 1], [0, 0, 0, 1]], bool),
        np.array([[0, 1, 0, 1], [1, 1, 1, 1]], bool),
    ]
    wires = [np.array([[0, 2], [0, 1]]), np.array([[0, 1], [1, 1]])]
    (first, last), read = reports.live_gates(truth, wires, 3)
    np.testing.assert_array_equal(first, [True, False])
    np.testing.assert_array_equal(last, [True, True])
    np.testing.assert_array_equal(read, [False, False, True])


@pytest.mark.parametrize(("at", "value", "message"), [(6, 1, "encrypted"), (8, 99, "compression")])
def test_members_that_cannot_be_read_are_refused(at, value, message, tmp_path):
    path = tmp_path / "a.npz"
    np.savez(path, x=np.arange(24.0).reshape(12, 2), y=np.arange(12) % 2)
    wrong = bytearray(path.read_bytes())
    wrong[wrong.index(b"PK\x03\x04") + at] = wrong[wrong.index(b"PK\x01\x02") + at + 2] = value
    path.write_bytes(wrong)
    with pytest.raises(
        SamplesError, match=f"a.npz is not a .npz file with plain arrays.*{message}"
    ):
        read_arrays(path, ("x", "y"))
    np.savez(path, x=np.array([{}], object), y=np.zeros(1))
    with pytest.raises(SamplesError, match=r"x.npy has Python objects; convert it .*astype\(str\)"):
        read_arrays(path, ("x", "y"))


def test_an_array_is_as_large_as_its_header_says(tmp_path):
    path = tmp_path / "a.npz"
    header = io.BytesIO()
    facts = {"descr": "<f8", "fortran_order": False, "shape": (2**50, 2)}
    np.lib.format.write_array_header_1_0(header, facts)
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("x.npy", header.getvalue() + bytes(16))
    with pytest.raises(
        SamplesError, match=r"x.npy has 16 bytes of numbers, but its header requires"
    ):
        read_arrays(path, ("x",))


def test_a_number_is_what_a_table_calls_one(tmp_path):
    """Treat codes as distinct categories even if Python parses them as equal numbers."""
    codes = ["12_3", "1_23", "123", "١٢٣", "0x7b", "infinity"]
    text = "code,size,class\n" + "".join(
        f"{codes[i % 6]},{i % 5}e-{i % 3},{i % 2}\n" for i in range(60)
    )
    encoding = Encoding.fit(columns.read(write(tmp_path / "a.csv", text), "class"), 8)
    code, size = encoding.columns
    assert isinstance(code, columns.Categories)
    assert set(code.values) == set(codes)
    assert isinstance(size, columns.Number)
    assert columns.classes_of(Table({}, np.array(["1_0", "9", "1_0", "9"]), "t")) == ["1_0", "9"]
    for cell in ("+1.", ".5", "-1e-3", "1e400", "1 2", ".", ""):
        assert columns._is_number(cell) == (cell in ("+1.", ".5", "-1e-3"))


def of_numbers(numbers):
    cells = {"t": np.array([repr(float(number)) for number in numbers])}
    return Table(cells, np.array(["a", "b"])[np.arange(len(numbers)) % 2], "numbers")


@pytest.mark.parametrize(
    "numbers",
    [1.7e9 + np.arange(40), 1e300 * (1 + np.arange(40)), 1e-60 * np.arange(40)],
    ids=["times in seconds", "large", "small"],
)
@pytest.mark.parametrize(("bits", "learned"), [(0, False), (8, True)])
def test_numbers_that_float32_does_not_tell_apart(numbers, bits, learned):
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
            assert float(shown.removeprefix("t > ")) == pytest.approx(
                own, abs=1e-4 * np.ptp(numbers)
            )
        assert len(set(exact.features)) == bits


def test_numbers_that_no_unit_tells_apart():
    uneven = of_numbers(np.array([*range(39), 1e300]))
    for bits, learned in ((0, False), (8, True)):
        with pytest.raises(
            SamplesError, match=r"40 different numbers, of which 2 differ in float32: .*--col"
        ):
            Encoding.fit(uneven, bits, numbers=learned)
    assert len(Encoding.fit(uneven, 8).features) == 8
    # Where float32 holds all numbers, they are as they were; those of other rows beyond it are its largest.
    encoding = Encoding.fit(of_numbers(np.arange(40.0)), 0)
    x, limits = (
        encoding.encode(of_numbers(np.array([3.0, -1e300, 1e300])))[:, 0],
        np.finfo(np.float32),
    )
    np.testing.assert_array_equal(x, np.float32([3, limits.min, limits.max]))
    drawn = np.random.default_rng(0).normal(size=3000)
    assert len(np.unique(Encoding.fit(of_numbers(drawn), 0).encode(of_numbers(drawn)))) > 2990


SMALL = [
    "--layers=24,24", "--batch-size=16", "--log-every=10", "--eval-every=10",
    "--checkpoint-every=10",
]  # fmt: skip


def write_table(folder):
    return write(folder / "table.csv", table_text())


def test_the_command_trains_on_a_table(table_run):
    out, words, said = table_run
    record = runs.read(out, classifier.Record)[1]
    assert record.training.stratified
    assert (record.target, record.model.n_thresholds) == ("class", 0)
    report = json.loads((out / "report.json").read_text())
    assert report["classes"] == list(LABELS)
    assert np.sum(report["confusion"]) == 18
    assert np.trace(report["confusion"]) / 18 == pytest.approx(report["hard"])
    assert [step for step, _ in record.history.other] == [10, 20]
    assert report["model"] == json.loads(json.dumps(record.model.to_dict()))
    assert (report["training"]["steps"], report["options"]["eval_every"]) == (20, 10)
    assert (report["samples"], report["baselines"]) == ({"train": 72, "test": 18}, {})
    gates = report["gates"]
    assert gates["trained"] == gates["at all places"] == 48
    for text in (
        f"on 72 samples of {words[3]}, testing on 18",
        "step 20/20  soft accuracy",
        ", gap ",
        "Gates by kind, as they were trained: ",
        "Dead inputs: no vote depends on",
        f"Circuit: {gates['simplified']} of 48 gates of the layers survive simplification from bits to bits; an export adds",
        "columns: size numbers with a decimal comma (32 bits), some missing; kind 2 categories; noise numbers (4 bits)",
    ):
        assert text in said
    assert record.history.other[-1][1] == pytest.approx(report["soft"])
    assert "20,soft accuracy," in (out / "curves.csv").read_text()
    encoding = Encoding.from_json((out / "columns.json").read_text())
    assert len(encoding.features) == report["bits"] == record.model.in_features
    assert (out / "accuracy.png").read_bytes().startswith(b"\x89PNG")
    own = {*Classifier.files, "checkpoints", "curves.csv", "finished.json", ".lock"}
    assert {path.name for path in out.iterdir()} == own


@pytest.mark.parametrize(("run", "data", "name"), [
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
])  # fmt: skip
def test_names_of_exports(table_run, run, data, name):
    _, record = runs.read(table_run.out, Classifier.kept)
    samples = dataclasses.replace(record.samples, path=data)
    assert exporting.name_of(Path(run), dataclasses.replace(record, samples=samples)) == name


def test_a_run_has_the_kind_of_its_data(table_run, tmp_path):
    """Reject old folders: runs on custom data were once stored under kind "digits"."""
    old = tmp_path / "old"
    shutil.copytree(table_run.out, old)
    assert runs.kind(old) == "classify"
    path = old / "checkpoints" / str(runs.read(old, Classifier.kept)[0]) / "checkpoint.json"
    content = json.loads(path.read_text())
    content["meta"]["kind"] = "digits"
    del content["digest"]
    path.write_text(json.dumps({**content, "digest": checkpoints._content_digest(content)}))
    said = f"{old} is recorded as a run of the kind digits, but its data make it classify: an earlier version"
    resume = ("train", "classify", "--resume", "--steps=99", "--out", old)
    for words in (("export", old), ("predict", old, table_run.words[3]), resume):
        assert said in refusal(*words)
    with pytest.raises(ValueError, match="is recorded as a run of the kind digits"):
        lutjax.load(old)
    of_digits = Classifier.create({"layers": (20,)})
    assert (of_digits.record.own_kind(), of_digits.record.kind) == ("digits", "classify")


def test_the_commands_refuse(table_run, tmp_path):
    out, table, train = table_run.out, table_run.words[3], ["train", "classify", "--out", tmp_path]
    for words, message in (
        (["train", "lm", "--resume", "--out", out], "is a run of train classify, not of train lm: continue it with lutjax train classify"),
        (["quantize", out], "is a run of train classify; expected one of train lm"),
        (["generate", out, "--prompt=x"], "is a run of train classify, not of train lm"),
        (["export", out, "--integers=int8"], "holds a model from train classify, whose circuit has no integer tables"),
        ([*train, "--data", table], "name its column of labels by --target"),
        ([*train, "--data", table, "--target", "sizes"], "has no column 'sizes'"),
        ([*train, "--target", "class"], "--target is class, but it is for tables"),
        ([*train, "--recipe", "best"], "is not one of"),
        ([*train, "--recipe", "logictreenet-cifar10-g"], "has sizes for CIFAR-10; samples of"),
        ([*train, "--resume", "--out", out, "--recipe", "difflogic-adult"], "has another configuration"),
    ):  # fmt: skip
        assert message in refusal(*words)


def test_defaults_are_those_of_the_kind_of_data(tmp_path):
    path = write(tmp_path / "table.csv", table_text(400))
    run = Classifier.create({}, path, "class")
    model, training = run.record.model, run.record.training
    assert (model.layers, model.wiring, model.estimator) == (
        (1280,),
        "learnable",
        "straight_through",
    )
    assert (training.steps, training.select_every, training.column_bits) == (1000, 50, 32)
    assert Classifier.create(
        {"layers": (30, 20), "tau": 3.0}, path, "class"
    ).record.model.layers == (30, 20)
    plain = Classifier.create(
        {"wiring": "balanced"}, path, "class", recipe="difflogic-adult"
    ).record
    assert (plain.model.layers, plain.model.estimator) == ((256,) * 5, "soft")
    assert (plain.training.column_bits, plain.training.select_every) == (8, 0)
    labels = "".join(f"{i % 7},{'pqr'[i % 3]}\n" for i in range(330))
    three = write(tmp_path / "three.csv", f"a,class\n{labels}")
    several = Classifier.create({}, three, "class").record.model
    assert (several.layers, several.tau, several.wiring) == ((600, 600), 6.0, "learnable")
    given = Classifier.create({"layers": (30, 21)}, three, "class").record.model
    assert (given.layers, given.tau) == ((30, 21), 10.0)
    np.savez(tmp_path / "a.npz", x=np.arange(24.0).reshape(12, 2), y=np.arange(12) % 2)
    made = Classifier.create({}, tmp_path / "a.npz").record
    assert (made.model.layers, made.model.wiring, made.training.steps) == (
        (2000,) * 3,
        "balanced",
        15000,
    )


def test_small_tables_have_defaults_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setattr(
        classifier_runs,
        "FOR_SMALL_TABLES",
        {**FOR_SMALL_TABLES, "layers": (20,), "steps": 30, "batch_size": 16},
    )
    path, lines = write_table(tmp_path), []
    run = Classifier.create({}, path, "class", progress=lines.append)
    assert [line.partition(":")[0] for line in lines[1:]] == [
        f"  gate cost {cost:g}, fold {fold} of 5" for cost in GATE_COSTS for fold in range(1, 6)
    ]
    model, training = run.record.model, run.record.training
    assert (model.layers, model.tau, model.n_inputs) == ((40,), 2.0, 2)
    assert (training.learning_rate, training.select_every, training.column_bits) == (0.03, 0, 32)
    assert training.gate_cost in GATE_COSTS
    assert re.fullmatch(
        r"72 training rows: gate cost [03], chosen by 5-fold .* with 0, .* with 3\.",
        run.remarks[-1],
    )
    assert Classifier.from_record(run.record, path).record.training == training
    for given in ({"steps": 3}, {"gate_cost": 0.0}):
        other = Classifier.create(given, path, "class").record
        assert (other.model.tau, other.training.learning_rate) == (10.0, 0.05)


def test_cross_validation_can_be_interrupted(tmp_path, monkeypatch):
    def interrupt(*_):
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(classifier.Run, "sample_state", interrupt)
    words = ("train", "classify", "--data", write_table(tmp_path), "--target", "class")
    result = command(*words, "--out", tmp_path / "run")
    assert result.exit_code == 130
    assert result.output.splitlines()[-2:] == [
        "Choosing the gate cost by 5-fold cross-validation ...",
        "Stopped before the first step.",
    ]


def test_a_dry_run_does_not_cross_validate(tmp_path, monkeypatch):
    def show_remarks(experiment, show):
        assert experiment.record.training.gate_cost == 0
        show.line(experiment.remarks[-1])

    monkeypatch.setattr(_gate_costs, "cross_validate", None)
    monkeypatch.setattr(experiments, "dry_run", show_remarks)
    words = ("train", "classify", "--data", write_table(tmp_path), "--target", "class")
    assert output(*words, "--dry-run", "--out", tmp_path / "run").endswith(
        "72 training rows: the gate cost, 0 or 3, is chosen by 5-fold cross-validation "
        "at the start of the run.\n"
    )


def test_cross_validation_finds_the_better_gate_cost():
    x = np.random.default_rng(0).integers(0, 2, (64, 4)).astype(np.float32)
    train = samples(x, (x[:, 0] != x[:, 1]).astype(np.int32), name="two bits")
    config = LogicClassifierConfig(
        4,
        2,
        layers=(24,),
        n_thresholds=0,
        wiring="learnable",
        estimator="straight_through",
        tau=2.0,
    )
    training = classifier.TrainingConfig(steps=150, batch_size=32, learning_rate=0.05)
    result = _gate_costs.cross_validate(config, training, train, (0.0, 1e5))
    assert result[0] == 1
    assert result[1] < 0.8  # constants


def test_a_report_has_the_gap_and_the_baselines(tmp_path):
    run = Classifier.create({"layers": (12,)}, write_table(tmp_path), "class", stratified=True)
    [line] = run._gap(0.144, 0.936)
    assert "79.2 points below the soft one" in line
    assert run._gap(0.85, 0.86) == []
    run.record.baselines = {"logistic regression": 0.5}
    run.record.history.test.append((0, 0.5))
    run._report(run.run.init(), tmp_path / "report.json")
    assert json.loads((tmp_path / "report.json").read_text())["baselines"] == {
        "logistic regression": 0.5
    }


def test_digits_is_classify_under_another_name(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    y = np.arange(40) % 2
    np.savez(tmp_path / "a.npz", x=rng.uniform(size=(40, 5)) + y[:, None], y=y)
    started = []
    monkeypatch.setattr(
        experiments, "start", lambda experiment, out, show: started.append(experiment)
    )
    for words in (("--data", tmp_path / "a.npz", *SMALL), (*SMALL[1:], "--layers=40")):
        for name in ("digits", "classify"):
            output("train", name, "--out", tmp_path / name, *words)
    one, two, *of_digits = started
    for first, second in ((one, two), of_digits):
        assert first.record == second.record
        for part in ("train", "test"):
            np.testing.assert_array_equal(getattr(first, part).x, getattr(second, part).x)
    assert one.record.training.stratified
    assert not of_digits[1].record.training.stratified


@pytest.mark.parametrize(("name", "shape", "n_classes", "warns"), slow_where([
    ("difflogic-mnist-small", (28, 28), 10, False),
    ("difflogic-mnist-small", (8, 8), 10, True),
    ("difflogic-mnist-small", (784,), 10, False),
    ("difflogic-mnist-small", (28, 28), 2, True),
    ("difflogic-adult", (14,), 2, True),
], lambda name, shape, n_classes, warns: n_classes == 2 or len(shape) == 1))  # fmt: skip
def test_a_recipe_on_other_data_warns(name, shape, n_classes, warns, tmp_path):
    x = np.random.default_rng(0).integers(0, 2, (20, *shape))
    np.savez(tmp_path / "a.npz", x=x, y=np.arange(20) % n_classes)
    fields = {"layers": (20,), "wiring": "balanced"}
    run = Classifier.create(fields, tmp_path / "a.npz", recipe=name)
    words = f"warning: the recipe {name} is for {RECIPES[name].data}, and these data are of shape"
    assert [line.startswith(words) for line in run.remarks] == [True] * warns
    run.record.history.test.append((0, 0.5))
    *_, published = run._report(run.run.init(), tmp_path / "report.json")
    assert ("these are other data" in published) == warns


def test_numbers_that_are_no_bits_are_refused(tmp_path):
    rng, y = np.random.default_rng(0), np.arange(40) % 2
    np.savez(tmp_path / "a.npz", x=rng.uniform(size=(40, 5)) + y[:, None], y=y)
    table = write_table(tmp_path)
    for words in (
        ["--data", tmp_path / "a.npz"],
        ["--data", table, "--target=class", "--column-bits=0"],
    ):
        said = refusal(
            "train", "classify", *words, "--n-thresholds=0", "--out", tmp_path / "run", *SMALL
        )
        assert "--n-thresholds is 0, so samples must be bits, but" in said
        assert "Set --n-thresholds to 1 or more." in said
        assert not (tmp_path / "run").exists()
    np.savez(tmp_path / "b.npz", x=rng.integers(0, 2, (40, 5)), y=y)
    before = Classifier.create({"layers": (20,), "n_thresholds": 0}, tmp_path / "b.npz")
    source = runs.Source.create(tmp_path / "a.npz", 40, datasets.load(tmp_path / "a.npz").digest)
    record = dataclasses.replace(before.record, samples=source)
    models.save(tmp_path / "old", 1, before.run.init(), record)
    assert "n_thresholds is 0, so samples must be bits" in refusal("export", tmp_path / "old")


def test_decimals_with_a_comma_are_numbers(tmp_path):
    rng = np.random.default_rng(0)
    numbers = np.round(rng.normal(size=60), 2)
    text = "a;class\n" + "".join(f"{n};{i % 2}\n" for i, n in enumerate(numbers))
    one = columns.read(write(tmp_path / "one.csv", text), "class")
    two = columns.read(write(tmp_path / "two.csv", text.replace(".", ",")), "class")
    for bits in (4, 0):
        encoding = Encoding.fit(two, bits)
        assert encoding.columns[0].decimal == ","
        np.testing.assert_array_equal(encoding.encode(two), Encoding.fit(one, bits).encode(one))
        again = Encoding.from_json(encoding.to_json())
        np.testing.assert_array_equal(again.encode(two), encoding.encode(two))
    assert (
        "a numbers with a decimal comma (4 bits)"
        in columns.describe_columns(two, Encoding.fit(two, 4))[0]
    )


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
def test_columns_that_look_like_something_else_are_warned_of(name, cells, words):
    labels = np.array(["no", "yes"])[np.arange(len(cells)) % 2]
    table = Table({name: np.array(cells), "b": labels}, labels, "t")
    _, *warnings = columns.describe_columns(table, Encoding.fit(table, 8))
    if words:
        assert len(warnings) == 1
        assert warnings[0].startswith(f"warning: column {name} {words}")
        assert f"--exclude {name}" in warnings[0] or name == "city"
    else:
        assert not warnings


def test_tables_compressed_excluded_and_in_another_encoding(tmp_path):
    names = columns.read(write(tmp_path / "a.csv", CSV), "class").columns.keys()
    for written, encodings in (
        ("utf-8-sig", (None, "utf-8", "utf-8-sig")),
        ("utf-16", ("utf-16",)),
    ):
        (tmp_path / "b.csv").write_bytes(CSV.encode(written))
        for encoding in encodings:
            assert (
                columns.read(tmp_path / "b.csv", "class", encoding=encoding).columns.keys() == names
            )
    with pytest.raises(SamplesError, match="such as utf-16"):
        columns.read(tmp_path / "b.csv", "class")
    text = CSV.replace("cook", "Köchin")
    plain = columns.read(write(tmp_path / "a.csv", text), "class")
    (tmp_path / "b.CSV.GZ").write_bytes(gzip.compress(text.encode("latin-1")))
    with pytest.raises(
        SamplesError, match=r"is not a CSV file of UTF-8 text.*Name another encoding by --enc"
    ):
        columns.read(tmp_path / "b.CSV.GZ", "class")
    same = datasets.load(tmp_path / "b.CSV.GZ", target="class", encoding="latin-1").train
    assert same.digest == plain.digest
    few = datasets.load(tmp_path / "a.csv", target="class", exclude=("job", "note")).train
    assert list(few.columns) == ["age", "pay"]


@pytest.mark.parametrize(("y", "classes"), [
    (np.array([3, 7, 10] * 6), ("3", "7", "10")),
    (np.array([1, 2, 3] * 6), ("1", "2", "3")),
    (np.array(["high", "low", "a b"] * 6), ("a b", "high", "low")),
    (np.array([0, 1, 2] * 6), ()),
    (np.arange(18) % 3 == 0, ("False", "True")),
])  # fmt: skip
def test_labels_of_arrays_have_gaps_or_are_texts(y, classes, tmp_path):
    x = np.random.default_rng(0).normal(size=(18, 2))
    data = npz(tmp_path, x=x, y=y)
    assert data.train.n_classes == (len(classes) or 3)
    assert data.train.classes == classes
    if classes:
        assert [classes[number] for number in data.train.y] == y.astype(str).tolist()
        assert bool(data.remarks) == (y.dtype.kind == "i")
    test = npz(tmp_path, x_train=x, y_train=y, x_test=x[:12], y_test=y[:12]).test
    np.testing.assert_array_equal(test.y, data.train.y[:12])


def test_missing_numbers_are_alike_in_arrays_and_tables(tmp_path):
    rng = np.random.default_rng(0)
    x, y = np.round(rng.normal(size=(30, 2)), 3), np.array(["yes", "no"] * 15)
    x[3, 0] = x[7, 1] = np.nan
    np.savez(tmp_path / "a.npz", x=x, y=y, names=["a", "b"])
    rows = ("" if np.isnan(cell) else repr(float(cell)) for cell in x.ravel())
    lines = "".join(f"{a},{b},{label}\n" for a, b, label in zip(rows, rows, y, strict=True))
    of_array = datasets.load(tmp_path / "a.npz").parts(bits=4)
    of_table = datasets.load(
        write(tmp_path / "a.csv", f"a,b,class\n{lines}"), target="class"
    ).parts(bits=4)
    assert of_array.encoding == of_table.encoding
    np.testing.assert_array_equal(of_array.train.x, of_table.train.x)
    np.testing.assert_array_equal(of_array.test.y, of_table.test.y)


def test_a_packed_classifier_compares_integers_as_numbers():
    thresholds = np.array([[-1, -0.5, 0, 0.5, 254.5, 255, 300]], np.float32)
    x = np.array([[[0, 1, 254, 255]]], np.uint8)
    expected = x.astype(np.float32) > thresholds[:, :, None]
    np.testing.assert_array_equal(packed.bits_of(thresholds, jnp.asarray(x)), expected)


def test_channels_may_come_first(tmp_path):
    images = np.random.default_rng(0).random((12, 16, 16, 3))
    data = npz(tmp_path, x=np.moveaxis(images, -1, 1), y=np.arange(12) % 2)
    assert data.train.shape == (16, 16, 3)
    np.testing.assert_array_equal(data.train.x, images.reshape(12, -1).astype(np.float32))
    assert data.remarks == ("x: [12, 3, 16, 16] is read as channels first, 3 of 16 x 16 pixels.",)
    assert npz(tmp_path, x=images, y=np.arange(12) % 2).remarks == ()
    assert datasets.channels_last(np.zeros((5, 3, 4, 4)))[0].shape == (
        5,
        3,
        4,
        4,
    )  # too small to tell
