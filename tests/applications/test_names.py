"""User-given names: drawn verbatim in figures, pages and text, and rejected as file or function names where invalid."""

import io
import os
import shutil
import subprocess
import warnings
from pathlib import Path

import numpy as np
import pytest
from commands import refusal
from example_circuits import life_circuit
from matplotlib.cbook import is_math_text
from matplotlib.figure import Figure

from lutjax import circuits
from lutjax.circuits import Circuit, c, dot
from lutjax.circuits.detectors import IntegerLUT
from lutjax.cli import _errors
from lutjax.files.pictures import as_drawn
from lutjax.training import checkpoints, pictures
from lutjax.training.datasets import columns
from lutjax.training.errors import CheckpointError

NAMES = [
    *("$a_$ and $\\x$", "costs $5", "$$", "$", "\\$ \\alpha$", "_under", "a\nb\tc", "\ud800"),
    *("<b> & 'x\"", "%s {} {{data}}", "é ß µ", " "),
]


@pytest.fixture
def figures(monkeypatch):
    """Saved figures, also drawn to turn unreadable formulas into errors."""
    saved = []

    def save(self, *args, **options):
        saved.append(self)
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", "Glyph .* missing from"
            )  # a font, which machines differ in
            self.canvas.draw()

    monkeypatch.setattr(Figure, "savefig", save)
    return saved


def seen(text):
    """Return the text as drawn by matplotlib: non-formulas lose only the backslash before a dollar sign."""
    assert not is_math_text(text)
    return text.replace(r"\$", "$")


def test_texts_are_drawn_as_they_are():
    for name in NAMES:
        expected = name.replace("\n", r"\n").replace("\t", r"\t").replace("\ud800", r"\ud800")
        assert seen(as_drawn(name)) == expected
    assert is_math_text(NAMES[0])


def test_classes_of_any_name(figures):
    pictures.plot_confusion(np.eye(len(NAMES), dtype=int), Path("none"), NAMES)
    (axes,) = figures[0].axes
    expected = [seen(as_drawn(name)) for name in NAMES]
    for axis in (axes.xaxis, axes.yaxis):
        assert [seen(label.get_text()) for label in axis.get_ticklabels()] == expected


def with_parts(names):
    """Circuit with one gate in each given part."""
    n = len(names)
    fanins = tuple((k, k + 1) for k in range(1, n + 1))
    ports = (circuits.Port("x", n + 1),), (circuits.Port("y", n),)
    literals = tuple(2 * (n + 2 + k) for k in range(n))
    return Circuit(*ports, fanins, (8,) * n, literals, tuple((name, 1) for name in names))


def test_parts_of_any_name_in_files():
    text = dot.write(with_parts(["a &amp; b", 'c "d" \\N']))
    assert 'label="a &amp;amp; b"' in text
    assert 'label="c \\"d\\" \\\\N"' in text
    assert 'label="&amp; \\\\N"; labelloc=t;' in dot.write(with_parts(["a"]), title="& \\N")
    with pytest.raises(ValueError, match="expected different, non-empty strings"):
        with_parts(["\ud800"])


def test_paths_that_are_no_text(tmp_path):
    said = refusal("train", "ca", "--out", f"{tmp_path}/\udcff", "--steps", 1)
    assert "is not UTF-8, which checkpoints need" in said
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(os.sep == "\\", reason="a backslash divides folders here")
def test_paths_with_a_backslash(tmp_path):
    """TensorStore treats a backslash as a slash: arrays went into another folder and could not be restored."""
    said = refusal("train", "ca", "--out", tmp_path / "a\\b", "--steps", 1)
    assert "has a backslash, which checkpoints cannot have: choose another folder." in said
    assert not list(tmp_path.iterdir())
    checkpoints.save(tmp_path / "run", 1, {"model": {"w": np.arange(3)}}, {})
    (tmp_path / "run").rename(tmp_path / "a\\b")
    with pytest.raises(
        CheckpointError, match="has a backslash, which checkpoints cannot have: rename or"
    ):
        checkpoints.restore(tmp_path / "a\\b", 1, "model", {"w": np.arange(3)})


def test_what_a_terminal_has_no_character_for(monkeypatch):
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="strict")
    monkeypatch.setattr("sys.stdout", out)
    with pytest.raises(SystemExit):
        _errors.Commands("lutjax", help="é \udcff").main(["--help"], prog_name="lutjax")
    out.flush()
    assert rb"\udcff" in out.buffer.getvalue()


def layer():
    """Layer with all optional arrays."""
    rng = np.random.default_rng(0)
    anchors, values = rng.integers(0, 4, (3, 2, 2)), rng.integers(-3, 4, (3, 4, 2)).astype(np.int8)
    return IntegerLUT(
        4, anchors, values, np.array([1, 0, 2, 0]), targets=rng.integers(-1, 4, (3, 4, 2))
    )


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        *((name, "it is a name in the files of each layer") for name in ("detectors", "anchors", "values", "shifts", "targets")),
        *((name, "it is a name in the files of each layer") for name in ("lutjax_row", "lutjax_detectors")),
        *((name, "it is a keyword of C or C++") for name in ("int", "main", "bool", "class", "xor", "restrict", "typeof")),
        *((name, "it is a name of the library of C") for name in ("printf", "exp", "expf", "int32_t", "stdint", "linux", "index", "fabsf32x", "read", "write", "open")),
        *((name, "expected lower-case letters") for name in ("", "A", "é", "a b", "1a", "_a", "a;", None, 3)),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("without_typechecking")
def test_names_that_c_takes_for_something_else(name, reason):
    with pytest.raises(ValueError, match=reason):
        layer().to_c(name)
    if name == "stdint":
        with pytest.raises(ValueError, match="and no C header name"):
            c.write(life_circuit(), name)


@pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not found")
def test_other_names_compile(tmp_path):
    names = [
        *"ktxya",
        *("layer", "row", "sum", "value", "target", "word", "door_1", "int7", "values_2"),
    ]
    for name in names:
        for file, text in layer().to_c(name).items():
            (tmp_path / file).write_text(text)
    (tmp_path / "all.cc").write_text("".join(f'#include "{name}.h"\n' for name in names))
    of_c = ("-std=c99", "-pedantic"), [f"{name}.c" for name in names]
    for flags, sources in (of_c, (("-xc++",), ["all.cc"])):
        words = ["gcc", *flags, "-Wall", "-Wextra", "-Werror", "-fsyntax-only", *sources]
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


def test_columns_of_any_name_are_a_line():
    names = [name for name in NAMES if name != "\ud800"] + ["\x1b[2J", "a\u202eb", "\0"]
    cells = {name: columns.strings(f"2024-01-{k + 10}" for k in range(10)) for name in names}
    table = columns.Table(cells, columns.strings("pq" * 5), "t")
    lines = columns.describe_columns(table, columns.Encoding.fit(table, 2))
    assert len(lines) == 1 + len(names)
    assert all(line.isprintable() for line in lines)
