"""Tests for the documentation site: every page is indexed, every public name is in the reference, and the build has no warnings."""

import importlib
import importlib.util
import inspect
import json
import os
import pkgutil
import re
import shutil
import subprocess
import sys
import tomllib
from collections import Counter

import pages
import pytest
from folders import ROOT
from tools import require_tool

DOCS = ROOT / "docs"
SOURCES = sorted(
    path
    for path in DOCS.rglob("*.md")
    if not {"_build", "benchmarks"} & set(path.relative_to(DOCS).parts)
)


content = pages.extension("content")
# Modules whose `__all__` is public.
MODULES = ("lutjax", *(f"lutjax.{name}" for name in (
    "bundles", "cases", "circuits", "convert", "layers.haiku", "layers.initializers", "layers.linen", "layers.nnx", "models",
    "reads", "reference", "serving", "sharding", "optim", "optim.host", "optim.linen",
    "optim.nnx", "tuning", "wiring",
)))  # fmt: skip


def names_of_toctrees(page):
    """Return the pages named in a page's toctrees, without suffixes."""
    for block in re.findall(r"```{toctree}\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
        for line in block.splitlines():
            if line and not line.startswith(":"):
                target = re.sub(r".*<(.*)>", r"\1", line)
                yield os.path.relpath((page.parent / target).resolve(), DOCS)


def test_every_page_is_in_the_index():
    result = {path.relative_to(DOCS).with_suffix("").as_posix() for path in SOURCES}
    named = [name for path in SOURCES for name in names_of_toctrees(path)]
    assert len(set(named)) == len(named), "a page is named twice"
    assert set(named) == result - {"index"}


def listed():
    """Count each full name in the reference pages."""
    blocks = (
        result
        for path in (DOCS / "reference" / "api").glob("*.md")
        for result in content.BLOCK.finditer(path.read_text(encoding="utf-8"))
    )
    return Counter(f"{b[2]}.{name}" for b in blocks if b[1] == "api" for name in b[3].split())


def public():
    """Return full names from every public ``__all__``, except the version and `lutjax` modules, which have their own pages."""
    package = importlib.import_module("lutjax")
    modules = {
        f"lutjax.{name}" for name in package.__all__ if inspect.ismodule(getattr(package, name))
    }
    names = {
        f"{module}.{name}" for module in MODULES for name in importlib.import_module(module).__all__
    }
    return names - modules - {"lutjax.__version__"}


def test_every_public_name_is_in_the_reference_once():
    names = listed()
    assert not public() - names.keys(), "docs/reference/api lists public names by topic"
    assert not [name for name, count in names.items() if count > 1]
    for name in names:
        pkgutil.resolve_name(name)


def test_api_blocks_have_a_directive_for_each_name():
    block = content.api("lutjax", "lookup Detection\nPlatform kernel_registry")
    assert re.findall(r"^\.\. (auto\w+):: (\S+)$", block, re.MULTILINE) == [
        ("autofunction", "lutjax.lookup"),
        ("autoclass", "lutjax.Detection"),
        ("autoclass", "lutjax.Platform"),
        ("autodata", "lutjax.kernel_registry"),
    ]


def test_names_in_pages_exist():
    """Check that each dotted lutjax name in page text resolves to a module or attribute."""
    for page in [ROOT / "README.md", *SOURCES]:
        text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        for name in set(re.findall(r"`(lutjax(?:\.\w+)+)", text)):
            pkgutil.resolve_name(name)


def test_every_op_has_equations():
    equations = content.equations()
    import lutjax

    listed = (DOCS / "reference" / "ops.md").read_text(encoding="utf-8")
    without = {
        "pack_bits",
        "unpack_bits",
        "packed_lut",
        "scale_gradient",
        "update_table",
        "readers",
        "Detection",
    }
    ops = {
        name for name in lutjax.__all__ if f"`{name}(" in listed and callable(getattr(lutjax, name))
    }
    assert ops - without - {"sample_anchors"} <= {
        name.removeprefix("lutjax.") for name in equations
    }
    text = (DOCS / "reference" / "equations.md").read_text(encoding="utf-8")
    defined = re.findall(r"^\$\$ \(([\w-]+)\)$", text, re.MULTILINE)
    assert len(set(defined)) == len(defined)
    assert {label for labels in equations.values() for label in labels} == set(defined)


def test_every_command_is_in_the_reference():
    page = content.cli()
    for command in ("lutjax train classify", "lutjax export", "lutjax verify", "lutjax tune"):
        assert f"\n## {command}\n" in page
    assert "--recipe" in page


def headings(path):
    text = path.read_text(encoding="utf-8")
    for included in re.findall(r"```{include} (\S+)", text):
        text += (path.parent / included).read_text(encoding="utf-8")
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}


def test_links_lead_somewhere():
    result = 0
    for path in [
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
        *SOURCES,
    ]:
        text = re.sub(r"```.*?```|`[^`]*`", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
        for name, heading in re.findall(r"\]\(([\w/.-]*)(?:#([\w-]+))?\)", text):
            target = (path.parent / name).resolve() if name else path
            result += 1
            if target.parent.name == "play":  # the site copies these pages
                target = DOCS / "gallery" / "pages" / "play" / target.name
            assert target.exists(), (path, name)
            assert not heading or heading in headings(target), (path, name, heading)
    assert result > 60


def test_there_is_one_version():
    """Check that the package, native kernels, changelog, citation and site version switcher share one version."""
    import lutjax

    version = lutjax.__version__
    native = (ROOT / "native" / "lutjax_cpu" / "__init__.py").read_text(encoding="utf-8")
    assert f'__version__ = "{version}"' in native
    assert f'"lutjax=={version}"' in (ROOT / "native" / "pyproject.toml").read_text(
        encoding="utf-8"
    )
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert version in [
        v["version"]
        for v in json.loads((DOCS / "_static" / "versions.json").read_text(encoding="utf-8"))
    ]
    assert f"\n## {version} - " in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


EXTRAS = """
import pathlib, sys
sys.path.insert(0, "docs")
from _ext import content
from lutjax.extras import EXTRAS
for path in pathlib.Path("docs").rglob("*.md"):
    content.expand(path.read_text())
print(*sorted({extra for package, extra in EXTRAS.items() if package in sys.modules}))
"""


def test_pictures_have_words():
    """Check that every picture has alternative text."""
    for path in SOURCES:
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"!\[\s*\]\(", text), path
        for directive in re.findall(r"```{(?:image|figure)}.*?```", text, re.DOTALL):
            assert ":alt:" in directive, path
        for cell in re.findall(r"```{code-cell} ipython3\n(.*?)```", text, re.DOTALL):
            drawn = re.search(r"plt\.(subplots|figure)|wiring\.show|^Image\(", cell, re.MULTILINE)
            assert not drawn or "    alt: " in cell, (path, cell[:200])


@pytest.fixture
def accessibility(monkeypatch):
    monkeypatch.syspath_prepend(DOCS)
    import accessibility

    return accessibility


def test_what_not_everybody_can_read_is_found(accessibility):
    page = "<!DOCTYPE html><html lang='en'><title>A</title><h1>A</h1>{}"
    good = "<h2>B</h2><img src='a.png' alt='a'><a href='b'><img src='c' alt='c'></a><label>D<input></label>"
    assert accessibility.problems(page.format(good)) == []
    for fault, result in {
        "<h3>B</h3>": "a heading of level 3 follows one of level 1",
        "<h1>B</h1>": "2 headings of the first level",
        "<img src='a.png'>": "no alt text: a.png",
        "<iframe src='b'></iframe>": "no title: iframe b",
        "<a href='b'></a>": "no name: <a {'href': 'b'}>",
        "<button><svg></svg></button>": "no name: <button {}>",
        "<input type='range'>": "a field without a name: {'type': 'range'}",
        "<p id='b'><p id='b'>": "the id b is there 2 times",
    }.items():
        assert accessibility.problems(page.format(fault)) == [result]
    assert accessibility.problems("<html><h1>A</h1>") == [
        "the page has no language",
        "the page has no title",
    ]


def test_everybody_can_read_the_pages_of_the_gallery(accessibility):
    for path in (DOCS / "gallery" / "pages").rglob("*.html"):
        assert accessibility.problems(path.read_text(encoding="utf-8")) == [], path


needs_sphinx = pytest.mark.skipif(
    importlib.util.find_spec("sphinx_book_theme") is None,
    reason="the packages of the site are not installed: nox -s docs",
)
AXE = ROOT / "node_modules" / "axe-core" / "axe.min.js"


def built(folder, *options):
    """Build the site from a copy, without files from earlier builds."""
    docs = folder / "docs"
    shutil.copytree(DOCS, docs, ignore=shutil.ignore_patterns("_build", "__pycache__"))
    for name in ("CHANGELOG.md", "CONTRIBUTING.md", "CITATION.cff", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    for name in ("lutjax", "benchmarks", "tests"):
        (folder / name).symlink_to(ROOT / name)
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    words = ["-W", "--keep-going", "-q", "-b", "html", *options]
    options = {"cwd": folder, "env": environment, "capture_output": True, "text": True}
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", *words, docs, folder / "html"], **options
    )
    assert done.returncode == 0, done.stderr[-6000:]
    return folder / "html"


class TestSlow:
    def test_the_site_installs_what_its_reference_imports(self):
        """Check that the guide, Read the Docs and nox install the same extras, including all packages imported by the reference."""
        guide = (DOCS / "dev" / "documentation.md").read_text(encoding="utf-8")
        install, extras, build = re.search(
            r'    (pip install -e "\.\[([\w,]+)\]" --group docs) && (sphinx-build .*)\n', guide
        ).groups()
        installed = {*extras.split(","), "flax"}  # which apps has
        done = subprocess.run(
            [sys.executable, "-c", EXTRAS], cwd=ROOT, capture_output=True, text=True, check=True
        )
        kernels = {"triton"}  # is looked for, and not needed
        assert set(done.stdout.split()) - kernels <= installed
        project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        assert "lutjax[flax]" in project["optional-dependencies"]["apps"]
        assert f"- {install}\n" in (ROOT / ".readthedocs.yaml").read_text(encoding="utf-8")
        session = (ROOT / "noxfile.py").read_text(encoding="utf-8")
        assert f'"-e", ".[{extras}]", *nox.project.dependency_groups(PROJECT, "docs")' in session
        assert all(f'"{word}"' in session for word in build.split())

    @needs_sphinx
    def test_the_site_is_built_without_a_warning_and_everybody_can_read_it(
        self, tmp_path, accessibility
    ):
        """Build the full site, notebooks included."""
        html = built(tmp_path)
        pages = accessibility.pages(html)
        assert len(pages) > len(SOURCES)
        wrong = {path: accessibility.problems(path.read_text(encoding="utf-8")) for path in pages}
        assert {path: result for path, result in wrong.items() if result} == {}
        cells = re.findall(
            r'<td class="support support-([\w -]+)"><p>(\w+)', (html / "status.html").read_text()
        )
        assert len(cells) > 80
        assert all(classes.split()[0] == word for classes, word in cells)
        assert ("validated", "validated") in cells

    @pytest.mark.skipif(
        not AXE.exists(), reason="axe-core is not found: npm install --no-save axe-core"
    )
    @needs_sphinx
    def test_a_browser_shows_pages_that_everybody_can_read(self, tmp_path, accessibility):
        """Open pages from every section in all sizes and colors, built without running notebooks."""
        require_tool("chromium")
        import browser as browsers

        html = built(
            tmp_path,
            "-D",
            "nb_execution_mode=off",
            "-D",
            "suppress_warnings=ref.python,myst-nb.lexer",
        )
        axe = AXE.read_text(encoding="utf-8")
        with browsers.Browser(tmp_path / "profile") as browser:
            wrong = {
                name: list(accessibility.opened(browser, html / f"{name}.html", axe))
                for name in accessibility.READ
            }
        assert {name: result for name, result in wrong.items() if result} == {}
