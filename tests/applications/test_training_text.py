"""Texts, their parts, and the bigram baseline."""

import math
from pathlib import Path

import numpy as np
import pytest

from lutjax.training.text import STANDARD_LIBRARY_BYTES, TextError, bigram_loss, load_text, split_text


def test_parts_are_contiguous_and_complete():
    data = bytes(i % 251 for i in range(1234))
    text = split_text(data, name="t")
    assert (text.train.size, text.validation.size, text.test.size) == (1050, 61, 123)
    assert b"".join(p.tobytes() for p in (text.train, text.validation, text.test)) == data
    assert text.size == 1234


def test_standard_library_is_the_default_and_always_the_same():
    text = load_text()
    assert text.size == STANDARD_LIBRARY_BYTES
    assert text.digest == load_text().digest
    assert b"import " in text.train.tobytes()
    assert b"def " in text.test.tobytes()


def test_folder_is_read_in_sorted_order_without_what_is_not_text(tmp_path):
    for name, data in {
        "b.txt": b"b" * 40,
        "a.txt": b"a" * 40,
        "image.png": b"\xff\xfe",
        ".hidden": b"x",
        "test/c.txt": b"c" * 40,
    }.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
    text = load_text(tmp_path)
    whole = b"".join(p.tobytes() for p in (text.train, text.validation, text.test))
    assert whole == b"\n".join([b"a" * 40, b"b" * 40, b"c" * 40])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "empty"),
        (b"abc", "too short: its training part holds 3 of 3 bytes"),
        (b"x" * 600, "at least 680 in all"),
    ],
)
def test_unusable_text(tmp_path, data, message):
    path = tmp_path / "t.txt"
    path.write_bytes(data)
    with pytest.raises(TextError, match=message):
        load_text(path, context=32)


def test_a_text_longer_than_int32_reaches(tmp_path, monkeypatch):
    path = tmp_path / "t.txt"
    path.write_bytes(b"x" * 1001)
    monkeypatch.setattr("lutjax.training.text.MOST_BYTES", 1000)
    with pytest.raises(
        TextError, match=r"has 1,001 bytes; places in a text are int32, so at most 1,000 can be used"
    ):
        load_text(path)


def test_missing_file_and_folder_without_text(tmp_path):
    with pytest.raises(TextError, match="No such file"):
        load_text(tmp_path / "missing")
    with pytest.raises(TextError, match="holds no UTF-8 text"):
        load_text(tmp_path)


def test_a_large_file_is_mapped(tmp_path, monkeypatch):
    path = tmp_path / "t.txt"
    path.write_bytes(bytes(range(256)) * 4)
    whole = load_text(path)
    monkeypatch.setattr("lutjax.training.text.MAPPED_BYTES", 1000)
    monkeypatch.setattr(Path, "read_bytes", None)
    mapped = load_text(path)
    assert mapped.digest == whole.digest
    for part in ("train", "validation", "test"):
        np.testing.assert_array_equal(getattr(mapped, part), getattr(whole, part))
    assert bigram_loss(mapped.train, mapped.test) == bigram_loss(whole.train, whole.test)


def test_bigram_loss():
    train = np.frombuffer(b"ababab", np.uint8)
    test = np.frombuffer(b"aba", np.uint8)
    # a is followed by b 3 times of 3, b by a 2 times of 2
    expected = -(math.log(3.5 / (3 + 128)) + math.log(2.5 / (2 + 128))) / 2
    assert bigram_loss(train, test, smoothing=0.5) == pytest.approx(expected)
    uniform = np.random.default_rng(0).integers(0, 256, 100_000).astype(np.uint8)
    assert bigram_loss(uniform, uniform[:1000], smoothing=1e6) == pytest.approx(math.log(256), abs=0.01)
