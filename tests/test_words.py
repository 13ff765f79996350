"""Docstrings begin with a verb or a noun phrase, and CONTRIBUTING.md names what there is."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROOMS = ("lutjax", "tests", "benchmarks", "docs")
# Folders and files of these rooms that are not done.
NOT_YET: tuple[str, ...] = (
    "benchmarks/bench_table.py",
    "benchmarks/figures.py",
    "benchmarks/tpu_profile.py",
    "lutjax/benchmark",
    "lutjax/cases",
    "lutjax/cli",
    "lutjax/kernels/_pallas/tpu/lut_pair_attention.py",
    "lutjax/kernels/_triton/lookup_attention.py",
    "lutjax/kernels/_triton/lut_pair_attention.py",
    "lutjax/layers/_spec.py",
    "lutjax/models",
    "lutjax/status",
    "lutjax/testing.py",
    "lutjax/training",
    "tests/cases.py",
    "tests/conftest.py",
    "tests/coverage_rows",
    "tests/pallas_interpreter.py",
    "tests/properties",
    "tests/test_bench.py",
    "tests/test_ca.py",
    "tests/test_cli.py",
    "tests/test_definitions.py",
    "tests/test_fixed_point.py",
    "tests/test_gpu.py",
    "tests/test_large_rows.py",
    "tests/test_layers.py",
    "tests/test_load.py",
    "tests/test_logic_layers.py",
    "tests/test_models.py",
    "tests/test_ops.py",
    "tests/test_pallas.py",
    "tests/test_pallas_pairs.py",
    "tests/test_registry.py",
    "tests/test_sparsecore.py",
    "tests/test_status.py",
    "tests/test_tpu_compilation.py",
    "tests/test_training_experiments.py",
    "tests/test_training_lm.py",
    "tests/test_training_tables.py",
    "tests/test_triton.py",
    "tests/test_tuning.py",
    "tests/triton_interpreter.py",
    "tests/worlds.py",
)
FORBIDDEN = (
    "What",
    "Of",
    "How",
    "Whether",
    "Which",
    "Where",
    "Why",
    "When",
    "Those",
    "As",
    "If",
    "One",
    "Such",
    "The same",
)
BEGINNING = re.compile(rf"({'|'.join(FORBIDDEN)})\b")
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def docstrings(source):
    """Return the line and the docstring of everything in a module that has one."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, DOCUMENTED) and (text := ast.get_docstring(node)):
            yield getattr(node, "lineno", 1), text


def refused(source):
    """Return line and first line of each docstring that begins with a forbidden word."""
    return [(line, text.splitlines()[0]) for line, text in docstrings(source) if BEGINNING.match(text)]


def test_docstrings_begin_with_a_verb_or_a_noun():
    found = []
    for path in sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        if not any(name == room or name.startswith(f"{room}/") for room in NOT_YET):
            found += [f"{name}:{line}: {text}" for line, text in refused(path.read_text())]
    assert not found, "\n".join(found)


def test_each_forbidden_word_is_refused():
    for word in FORBIDDEN:
        assert refused(f'def f():\n    """{word} it returns."""') == [(1, f"{word} it returns.")]
    assert not refused('"""Whatever."""\n\n\nclass A:\n    """Offset, or Onefold."""')


def test_contributing_names_every_room():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    named = set(re.findall(r"`((?:lutjax|docs|tests|benchmarks)/[\w./]+)`", text.replace("<op>", "lookup")))
    made = "lutjax/tuning/data/nvidia_h200.json"  # the example of a file that a command writes
    assert not {name for name in named if name != made and not (ROOT / name).exists()}
    rooms = {path.parent for path in (ROOT / "lutjax").glob("*/__init__.py")}
    missing = {room.relative_to(ROOT).as_posix() for room in rooms} - {
        "/".join(name.split("/")[:2]) for name in named
    }
    assert not missing


def test_the_glossary_has_each_term_once():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    glossary = text[text.index("| term | meaning |") : text.index("## Habits")]
    terms = [t for row in re.findall(r"^\| ([^|]+) \| [^|]+ \|$", glossary, re.M) for t in row.split(", ")]
    assert len(terms) > 40
    assert len(set(terms)) == len(terms)
