"""Damaged or malicious data, images and runs, for cases too rare for `test_fuzz` to find by chance."""

import base64
import contextlib
import gzip
import hashlib
import io
import json
import os
import pickle
import shutil
import string
import struct
import time
import tracemalloc
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pytest
from cases import slow_except
from PIL import Image

from lutjax.training import automaton, checkpoints, datasets, patterns, pixels, raw, runs
from lutjax.training.datasets import cifar, columns, idx
from lutjax.training.datasets.columns import Encoding
from lutjax.training.errors import CheckpointError, DamagedError
from lutjax.training.samples import SamplesError, read_arrays, split_ids


def memory_of(call):
    """Return the peak memory during a call, in bytes."""
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_one_long_cell_does_not_make_the_others_as_long(tmp_path):
    """Fixed-width columns once padded every cell to the longest one: 2.6 GB for this file."""
    rows = "".join(f"c{k % 7},{k % 2}\n" for k in range(5000))
    (tmp_path / "t.csv").write_text(f"a,y\n{'x' * 130_000},0\n{rows}")
    size = (tmp_path / "t.csv").stat().st_size

    def read():
        parts = datasets.load(tmp_path / "t.csv", target="y").parts(bits=4, stratified=True)
        assert len(parts.train.x) == 4000

    read()  # imports scikit-learn
    assert memory_of(read) < 200 * size


def _pack(path, content):
    path.write_bytes(gzip.compress(content))
    return path


def _idx_bomb(folder):
    return [_pack(folder / f"{name}.gz", bytes(5 << 20)) for name in idx.FILES] and folder


def _npz_bomb(folder):
    np.savez_compressed(folder / "a.npz", x=np.zeros((20, 1 << 20), np.uint8), y=np.arange(20) % 2)
    return folder / "a.npz"


BOMBS = {
    "csv": (lambda folder: _pack(folder / "t.csv.gz", b"a,y\n" + b"1,0\n" * (2 << 20)),
        "gunzip t.csv.gz"),
    "tsv": (lambda folder: _pack(folder / "T.TSV.GZ", b"a\ty\n" + b"1\t0\n" * (2 << 20)),
        "gunzip T.TSV.GZ"),
    "a line": (lambda folder: _pack(folder / "t.csv.gz", b"a," * (4 << 20)), "gunzip t.csv.gz"),
    "idx": (_idx_bomb, "gunzip train-images-idx3-ubyte.gz"),
    "npz": (_npz_bomb, "save it by numpy.savez, not compressed"),
}  # fmt: skip


@pytest.mark.parametrize("name", slow_except(BOMBS, "a line", "idx", "npz"))
def test_files_that_unpack_to_far_more(name, tmp_path):
    """A 32 KB file took 12.6 seconds and 1.4 GB."""
    make, advice = BOMBS[name]
    path = make(tmp_path)
    target = {"target": "y"} if datasets.is_table(path) else {}

    def read():
        with pytest.raises(
            SamplesError, match=r"bytes, which unpack to [0-9,]+ or more; at most"
        ) as caught:
            datasets.load(path, **target)
        assert advice in str(caught.value)

    assert memory_of(read) < 100 << 20


def test_a_damaged_file_of_another_encoding(tmp_path):
    """The encoding check once reread only the beginning, an incomplete gzip file."""
    packed = gzip.compress("a,y\ngrö\xdfe,1\n".encode("latin-1"))
    for content, message in (
        (packed, "is not a CSV file of UTF-8 text: .* such as latin-1"),
        (packed[:-8] + bytes(8), "is not a"),
    ):
        (tmp_path / "t.csv.gz").write_bytes(content)
        with pytest.raises(SamplesError, match=f"t.csv.gz {message}"):
            columns.read(tmp_path / "t.csv.gz", "y")
    (tmp_path / "t.csv").write_text("a,y\n1,2\n", encoding="utf-16")
    with pytest.raises(SamplesError, match="such as utf-16"):
        columns.read(tmp_path / "t.csv", "y")


LONG = ("1" * 100_000 + "x", "1" * 50_000 + "." + "2" * 50_000 + "e", "." + "3" * 100_000 + "-")


def test_contents_that_take_no_squares_of_time():
    """Digit strings once allowed one split per digit, and a pickle with a few hundred bytes encodes 2**40 labels."""
    start, labels = time.process_time(), [1, 2]
    for cell in LONG:
        table = columns.Table({}, columns.strings([cell, "a"] * 3), "t")
        assert columns.classes_of(table) == sorted([cell, "a"])
    for _ in range(40):
        labels = [labels, labels]
    content = pickle.dumps({"data": np.zeros((2, 3072), np.uint8), "labels": labels})
    with pytest.raises(
        SamplesError, match="a list where an array or a list of integers is expected"
    ):
        cifar._parse_pickle(content, Path("batch"))
    assert time.process_time() - start < 3


def test_parts_of_labels_that_are_text():
    from sklearn.model_selection import train_test_split

    labels = np.array(["no", "yes", "maybe", "no"] * 15)
    expected = train_test_split(np.arange(60), test_size=12, stratify=labels, random_state=3)
    for cells in (labels, columns.strings(labels)):
        for actual, ids in zip(split_ids(cells, 3, stratified=True), expected, strict=True):
            np.testing.assert_array_equal(actual, ids)


def test_parquet_that_unpacks_to_far_more(tmp_path):
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    from pyarrow import parquet

    path = tmp_path / "t.parquet"
    numbers = {"a": np.zeros(5_000_000, np.int8), "y": np.zeros(5_000_000, bool)}
    few, labels = pyarrow.array(["x" * 60_000, "b"] * 2000).dictionary_encode(), ["p", "q"] * 2000
    long = pyarrow.array([f"{k % 10}" + "x" * 6000 for k in range(4000)])
    for cells, options, message in (
        (numbers, {}, "which unpack to 10,000,000 cells"),
        ({"a": few, "y": labels}, {}, "which unpack to 120,006,000 cells or characters"),
        ({"a": long, "y": labels}, {"compression": "zstd", "use_dictionary": False}, "24,[0-9,]+ or more.*write it without compression"),
    ):  # fmt: skip
        parquet.write_table(pyarrow.table(cells), path, **options)
        with pytest.raises(SamplesError, match=message):
            columns.read(path, "y")
    mixed = pyarrow.table({"a": [b"\xff", b"b"], "y": ["p", "q"]})
    parquet.write_table(
        mixed.cast(pyarrow.schema({"a": pyarrow.binary(), "y": pyarrow.string()})), path
    )
    assert columns.read(path, "y").columns["a"].tolist() == ["b'\\xff'", "b'b'"]


ENCODING = {
    "columns": [
        {"kind": "Number", "name": "n", "fill": 1.0, "thresholds": [0.5], "missing": False, "numbers": False, "center": 0.0, "scale": 1.0, "decimal": ".", "digits": 1, "least": 0.0, "largest": 1.0},
        {"kind": "Categories", "name": "c", "values": ["a", "b"], "missing": True},
    ],
    "classes": ["p", "q"],
}  # fmt: skip


@pytest.mark.parametrize(("column", "changed", "message"), [
    (0, {"kind": "Other"}, """columns[0]: 'kind' is "Other"; expected 'Number' or 'Categories'"""),
    (0, {"fill": None}, "columns[0]: 'fill' is null; expected a finite number"),
    (0, {"fill": 1e999}, "columns[0]: 'fill' is Infinity; expected a finite number"),
    (0, {"scale": 0}, "columns[0]: 'scale' is 0"),
    (0, {"thresholds": ["1"]}, "columns[0]: thresholds: '0' is"),
    (0, {"missing": 1}, "columns[0]: 'missing' is 1; expected true or false"),
    (1, {"values": ["a", 1]}, """columns[1]: 'values' is ["a", 1]; expected texts"""),
])  # fmt: skip
def test_encodings_that_are_none(column, changed, message):
    whole = json.loads(json.dumps(ENCODING))
    assert json.loads(Encoding.from_json(json.dumps(whole)).to_json()) == ENCODING
    whole["columns"][column].update(changed)
    written = json.dumps(whole).replace("Infinity", "1e999")
    with pytest.raises(ValueError, match="columns") as caught:
        Encoding.from_json(written)
    assert message in str(caught.value)
    for other in ("[]", "{", '{"columns": [3], "classes": []}', '{"columns": {}}', "[" * 200_000):
        with pytest.raises(ValueError, match=r"encoding|columns\[0\]"):
            Encoding.from_json(other)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": np.full((20, 2), 1e300)}, "x of sample 0 is not finite in float32"),
        ({"x": np.array([["\ud800", "b"]] * 20)}, "x.npy has text with characters that there are none of"),
        ({"x": np.frombuffer(np.full(40, 0x110000, np.uint32).tobytes(), "<U1").reshape(20, 2)}, "characters that there are none of"),
        ({"x": np.array([["a", "b"]] * 20), "names": np.array(3)}, "names are int64 []; expected a string per column"),
        ({"x": np.array([["a", "b"]] * 20), "names": np.array([[1, 2], [3, 4]])}, "names are int64 [2, 2]; expected a string"),
        ({"x": np.array([["a", "b"]] * 20), "names": np.array([1, 2])}, "names are int64 [2]; expected a string"),
    ],
)  # fmt: skip
def test_arrays_that_cannot_be_used(arrays, message, tmp_path):
    np.savez(tmp_path / "a.npz", y=np.arange(20) % 2, **arrays)
    with pytest.raises(SamplesError, match=r"a\.npz") as caught:
        datasets.load(tmp_path / "a.npz")
    assert message in str(caught.value)


def test_a_member_is_no_longer_than_its_file(tmp_path):
    """A header and two zip fields agree on a length beyond the available bytes."""
    path, header = tmp_path / "a.npz", io.BytesIO()
    np.lib.format.write_array_header_1_0(
        header, {"descr": "|u1", "fortran_order": False, "shape": (10**9,)}
    )
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("x.npy", header.getvalue())
    content, size = path.read_bytes(), len(header.getvalue())
    path.write_bytes(
        content.replace(size.to_bytes(4, "little"), (10**9 + size).to_bytes(4, "little"))
    )

    def read():
        with pytest.raises(SamplesError, match=r"x\.npy has 1,000,000,128 bytes; the file has"):
            read_arrays(path, ("x",))

    assert memory_of(read) < 1 << 20


def test_a_member_is_unpacked_as_far_as_it_is_read(tmp_path):
    """A member with 128 extra bytes according to the zip file; its data unpack to 64 MB."""
    path, out = tmp_path / "a.npz", io.BytesIO()
    np.lib.format.write_array(out, np.arange(128, dtype=np.uint8))
    data, packed = out.getvalue(), zlib.compressobj(9, zlib.DEFLATED, -15)
    content = packed.compress(data + bytes(64 << 20)) + packed.flush()
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("x.npy", content)
    with path.open("r+b") as written:
        whole = bytearray(written.read())
        for start, place in ((b"PK\3\4", 8), (b"PK\1\2", 10)):
            at = whole.index(start) + place
            whole[at : at + 2] = (8).to_bytes(2, "little")
            at += 6  # checksum, size of the data, and size that they unpack to
            whole[at : at + 12] = struct.pack("<III", zlib.crc32(data), len(content), len(data))
        written.seek(0)
        written.write(whole)
    assert (read_arrays(path, ("x",))["x"] == np.arange(128)).all()
    assert memory_of(lambda: read_arrays(path, ("x",))) < 4 << 20


def test_chunks_are_no_longer_than_an_image(tmp_path):
    """Python allocates the requested read size up front: a wrong length in 150 bytes took 3.3 GB."""
    path = tmp_path / "i.png"
    written = (
        "iVBORw0KGgoAAAANSUhEUgAAAAgAAAAICAIAAABLbSncxgAAOUlEQVR4nG2OSQ4AIAjEWv//5/GgIWjogbAMDAJJaKhJFhPq"
        "Krla8VKz7+bQesq+d81P1p2B4asj2twEJvJs0F1NAAAAAEkASQBJRU5ErkJggg=="
    )
    Image.new("1", (8, 8)).save(path)
    patterns.read_image(path, 8)  # what is imported by the first image is not its memory
    path.write_bytes(
        base64.b64decode(written)
    )  # an image of 8 x 8 pixels, and a damaged chunk after it

    def read():
        with contextlib.suppress(patterns.PatternError):
            patterns.read_image(path, 8)

    assert memory_of(read) < 4 << 20


def test_texts_in_an_image_are_bounded(tmp_path):
    path, out = tmp_path / "i.png", io.BytesIO()
    Image.new("L", (8, 8)).save(out, "PNG")
    image, text = out.getvalue(), zlib.compress(b"a" * ((1 << 20) - 1))

    def read(n_texts):
        kinds = (b"zTXt" + f"{k}".encode() + b"\0\0" + text for k in range(n_texts))
        chunks = (
            struct.pack(">I", len(one) - 4) + one + struct.pack(">I", zlib.crc32(one))
            for one in kinds
        )
        path.write_bytes(image[:33] + b"".join(chunks) + image[33:])
        assert pixels.read(path, "L", (8, 8)).shape == (8, 8)

    assert memory_of(lambda: read(60)) < 70 << 20
    with pytest.raises(ValueError, match=r"i.png: Too much memory used in text chunks"):
        read(70)


def test_one_line_of_a_damaged_image(tmp_path, caplog):
    """Pillow logs its own line in addition to the error, and this line once reached standard error."""
    path = tmp_path / "i.tiff"
    Image.new("RGB", (8, 8)).save(path)
    whole = bytearray(path.read_bytes())
    at = whole.index(struct.pack("<HH", 277, 3)) + 8  # samples of a pixel
    whole[at : at + 2] = b"\xff\xff"
    path.write_bytes(whole)
    with pytest.raises(ValueError, match=r"i\.tiff"):
        pixels.read(path, "RGB", (8, 8))
    assert not caplog.records


def test_images_are_not_executed(tmp_path, monkeypatch):
    """Pillow passes PostScript to an external program; lutjax opens only known formats."""
    (tmp_path / "gs").write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    (tmp_path / "gs").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    (tmp_path / "i.png").write_bytes(
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\n"
    )
    with pytest.raises(
        patterns.PatternError, match=r"i.png is no image of a known format; they are PNG"
    ):
        patterns.read_image(tmp_path / "i.png", 8)
    with pytest.raises(SamplesError, match=r"i.png is no image of a known format"):
        raw.read(tmp_path / "i.png", raw.Form((8, 8), ("0", "1")))
    assert not (tmp_path / "ran").exists()


TREE = {"w": np.ones((2, 3), np.float32)}


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("meta", [], "'meta' is []; expected an object"),
        ("files", None, "checkpoint.json has no 'files'"),
        ("files", {"../../x": "0" * 64}, "files has \"../../x\"; expected a checkpoint file"),
        ("files", {"/etc/passwd": "0" * 64}, 'files has "/etc/passwd"'),
        ("files", {"a\0b": "0" * 64}, "expected a checkpoint file"),
        ("files", {"a" * 300: "0" * 64}, "expected a checkpoint file"),
        ("arrays", {"model": {"w": ["float32"]}}, """the array "model/w" is ["float32"]; expected a dtype and a shape"""),
        ("arrays", {"model": 3}, "'model' is 3; expected an object"),
        ("step", "3", """'step' is "3"; expected a whole number"""),
    ],
)  # fmt: skip
def test_checkpoints_that_were_signed_anew(field, value, message, tmp_path):
    """A digest proves integrity, not authorship."""
    checkpoints.save(tmp_path, 3, {"model": TREE}, {})
    path = tmp_path / "3" / "checkpoint.json"
    content = json.loads(path.read_bytes())
    content.pop("digest")
    content[field] = value
    if value is None:
        del content[field]
    path.write_text(json.dumps({**content, "digest": checkpoints._content_digest(content)}))
    with pytest.raises(DamagedError, match="is damaged: ") as caught:
        checkpoints.read_meta(tmp_path)
    assert message in str(caught.value)


@pytest.mark.slow
def test_memory_of_tables_and_of_images_of_another_size(tmp_path):
    """Rows were Python strings, all in memory at once (44 times the file size); features were float64 and built twice (274 times)."""
    letters, path = string.ascii_letters + string.digits + "!@", tmp_path / "t.csv"
    path.write_text("a,y\n" + "".join(f"{letters[k % 64]},{k % 2}\n" for k in range(200_000)))
    size, data = path.stat().st_size, datasets.load(path, target="y")
    assert memory_of(lambda: datasets.load(path, target="y")) < 25 * size
    assert memory_of(lambda: data.parts(bits=4)) < 200 * size
    table = columns.read(path, "y")
    cells = (
        "\x1f".join((name, *column))
        for name, column in (("a", table.columns["a"]), ("", table.labels))
    )
    assert (
        table.digest
        == hashlib.sha256("".join(f"{column}\x1e" for column in cells).encode()).hexdigest()
    )
    Image.new("1", (9000, 9000)).save(tmp_path / "i.png")

    def read(message):
        with pytest.raises(patterns.PatternError, match=message):
            patterns.read_image(tmp_path / "i.png", 8)

    assert memory_of(lambda: read(r"i.png has 9000 x 9000 pixels; the grid is 8 x 8")) < 1 << 20
    Image.new("1", (20_000, 20_000)).save(tmp_path / "i.png")
    read(r"cannot read the image .*decompression bomb")


@pytest.mark.parametrize(("fields", "message"), [
    ({"model": []}, "its model is []"),
    ({"model": {"channels": "2"}}, 'its channels is "2"'),
    ({"model": {"channels": 2.0}}, "its channels is 2.0"),
    ({"training": {"steps": True}}, "its steps is true"),
    ({"training": {"steps": 10**18}}, "its steps is 1000000000000000000"),
    ({"training": {"learning_rate": 1e300}}, "its learning_rate is 1e+300"),
    ({"history": {"train": [[1]]}}, "its train is [[1]]"),
    ({"history": {"train": [[1, "2"]]}}, 'its train is [[1, "2"]]'),
    ({"target": [[1]]}, "its target is [[1]]"),
    ({"options": 3}, "its options is 3"),
    ({"kind": ["ca"]}, "holds a run of the kind ['ca']"),
])  # fmt: skip
def test_records_of_other_kinds_of_values(fields, message, tmp_path):
    training = {"experiment": "life", "start": "random"}
    meta = {
        "kind": "ca",
        "model": {},
        "training": training,
        "target": None,
        "options": {},
        "history": {},
    }
    checkpoints.save(tmp_path / runs.FOLDER, 3, {"model": TREE}, {**meta, **fields})
    with pytest.raises(CheckpointError) as caught:
        runs.read(tmp_path, automaton.Record)
    assert message in str(caught.value)
    shutil.rmtree(tmp_path / runs.FOLDER)
    checkpoints.save(tmp_path / runs.FOLDER, 3, {"model": TREE}, meta)
    assert runs.read(tmp_path, automaton.Record)[0] == 3
