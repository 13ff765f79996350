"""Tests for developer guides: they name existing files and every subpackage."""

import re

from folders import ROOT


def test_developer_guides_name_every_subpackage():
    pages = [ROOT / "CONTRIBUTING.md", *(ROOT / "docs" / "dev").glob("*.md")]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    names = set(
        re.findall(r"`((?:lutjax|docs|tests|benchmarks)/[\w./]+)`", text.replace("<op>", "lookup"))
    )
    assert not {name for name in names if not (ROOT / name).exists()}
    subpackages = {f"lutjax/{path.parent.name}" for path in (ROOT / "lutjax").glob("*/__init__.py")}
    assert subpackages <= {"/".join(name.split("/")[:2]) for name in names}
