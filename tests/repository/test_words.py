"""Docstrings begin with a verb or a noun phrase, and the developer guides name existing modules."""

import ast
import re

from folders import ROOT

ROOMS = ("lutjax", "native", "tests", "benchmarks", "docs")
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
    "Who",
    "Whose",
    "That",
    "All that",
    "With",
    "Without",
    "In",
    "For",
    "From",
    "By",
    "At",
    "To",
    "Between",
    "Inside",
    "Also",
    "So",
    "Not",
    "It",
)
BEGINNING = re.compile(rf"({'|'.join(FORBIDDEN)})\b")
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def docstrings(source):
    """Return the line and the docstring of everything in a module that has one."""
    statements = [ast.parse(source)]
    while statements:  # expressions, which are most of a module, have none
        node = statements.pop()
        if isinstance(node, DOCUMENTED) and (text := ast.get_docstring(node)):
            yield getattr(node, "lineno", 1), text
        for part in ("body", "orelse", "finalbody", "handlers", "cases"):
            inner = getattr(node, part, ())
            statements += inner if isinstance(inner, list) else ()


def refused(source):
    """Return line and first line of each docstring that begins with a forbidden word."""
    return [(line, text.splitlines()[0]) for line, text in docstrings(source) if BEGINNING.match(text)]


def test_docstrings_begin_with_a_verb_or_a_noun():
    found = []
    for path in sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py")):
        found += [f"{path.relative_to(ROOT)}:{line}: {text}" for line, text in refused(path.read_text())]
    assert not found, "\n".join(found)


def test_each_forbidden_word_is_refused():
    for word in FORBIDDEN:
        assert refused(f'def f():\n    """{word} it returns."""') == [(1, f"{word} it returns.")]
    assert not refused('"""Whatever."""\n\n\nclass A:\n    """Offset, or Onefold."""')


def test_developer_guides_name_every_subpackage():
    pages = [ROOT / "CONTRIBUTING.md", *(ROOT / "docs" / "dev").glob("*.md")]
    text = "\n".join(page.read_text() for page in pages)
    named = set(re.findall(r"`((?:lutjax|docs|tests|benchmarks)/[\w./]+)`", text.replace("<op>", "lookup")))
    assert not {name for name in named if not (ROOT / name).exists()}
    rooms = {path.parent for path in (ROOT / "lutjax").glob("*/__init__.py")}
    missing = {room.relative_to(ROOT).as_posix() for room in rooms} - {
        "/".join(name.split("/")[:2]) for name in named
    }
    assert not missing


def test_the_glossary_has_each_term_once():
    text = (ROOT / "docs" / "reference" / "glossary.md").read_text()
    entries = re.findall(r"^((?:\w[^\n]*\n)+)  (\w[^\n]*[.)])$", text, re.MULTILINE)
    terms = [term for names, _ in entries for term in names.splitlines()]
    assert len(terms) > 40
    assert len(set(terms)) == len(terms) == len(re.findall(r"^\w", text, re.MULTILINE))
    firsts = [names.splitlines()[0] for names, _ in entries]
    assert firsts == sorted(firsts)
