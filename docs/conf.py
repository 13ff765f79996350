"""Settings of the documentation site; docs/dev/documentation.md has the build command."""

import importlib.util
import re
import shutil
import sys
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS))

import inventories  # noqa: E402
import topics  # noqa: E402

from lutjax import __version__  # noqa: E402

project = "lutjax"
author = "the authors of lutjax"
copyright = author
version = release = __version__
language = "en"

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.intersphinx",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
]
exclude_patterns = ["_build", "benchmarks/README.md", "**/.ipynb_checkpoints"]
root_doc = "index"
topics.write()
intersphinx_mapping = inventories.write(DOCS / "_build" / "inventories")
# Formulas are drawn by MathJax, one file of it, which the site brings with it.
(DOCS / "_build" / "static").mkdir(parents=True, exist_ok=True)
for _folder in importlib.util.find_spec("sphinx-mathjax-offline").submodule_search_locations:
    shutil.copy(Path(_folder, "static", "mathjax", "tex-svg.js"), DOCS / "_build" / "static")

# Markdown and notebooks: text, executed when the site is built; what has not changed is kept in the cache.
myst_enable_extensions = ["amsmath", "colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 4
myst_dmath_double_inline = True
nb_execution_mode = "cache"
nb_execution_cache_path = str(DOCS / "_build" / "notebooks")
nb_execution_timeout = 600
nb_execution_raise_on_error = True
nb_merge_streams = True
nb_execution_show_tb = True
math_number_all = False
math_eqref_format = "({number})"

# Docstrings: Google's sections, and names in single backticks, which are links where there is something to link.
default_role = "py:obj"
autodoc_member_order = "bysource"
autodoc_typehints = "none"
autodoc_preserve_defaults = True
autodoc_inherit_docstrings = False
python_maximum_signature_line_length = 88
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False
napoleon_custom_sections = [("Variables", "params_style")]
nitpicky = False
suppress_warnings = ["ref.python"]  # several libraries have a layer of each name

html_theme = "sphinx_book_theme"
html_title = f"lutjax {release}"
html_static_path = ["_static", "_build/static"]
mathjax_path = "tex-svg.js"
html_css_files = ["site.css"]
html_js_files = ["site.js"]
html_extra_path = ["gallery/pages"]
html_show_sourcelink = False
html_copy_source = False
html_theme_options: dict[str, Any] = {
    "show_toc_level": 2,
    "show_navbar_depth": 1,
    "use_download_button": False,
    "use_fullscreen_button": False,
    "home_page_in_toc": False,
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
    "navbar_persistent": [],
    "primary_sidebar_end": ["version-switcher"],
    "switcher": {"json_url": "_static/versions.json", "version_match": release},
    "check_switcher": False,
    "show_version_warning_banner": False,
}
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True


def _sources(docname: str, line: str) -> str:
    """Return a line of sources ("docs/semantics.md, sections 2 and 3") with links to the sections."""
    up = "../" * docname.count("/")
    links = []
    for source in line.removesuffix(".").split("; "):
        page, _, rest = source.partition(", section")
        name = page.removeprefix("docs/").removesuffix(".md")
        numbers = re.findall(r"\d+", rest)
        text = (DOCS / f"{name}.md").read_text(encoding="utf-8")
        for number in numbers:
            heading = re.search(rf"^## ({number}\. .*)$", text, re.MULTILINE)
            title = heading[1] if heading else number
            slug = re.sub(r"[^\w -]", "", title).lower().replace(" ", "-")
            links.append(f"`{title} <{up}{name}.html#{slug}>`__")
    return ", ".join(links)


def _docstring(app: Any, what: str, name: str, value: object, options: object, lines: list[str]) -> None:
    """Make of docstrings as people read them in a terminal those of the site."""
    if lines and any(
        lines[0] == (kind.__doc__ or "").partition("\n")[0] for kind in (dict, list, tuple, str, int, float)
    ):
        lines[:] = ["A constant.", ""]  # it has no words of its own, but those of its type
    literal = False
    for at, line in enumerate(lines):
        bare = line.strip()
        if literal and bare and not line.startswith(" " * (literal + 1)):
            literal = False
        if not literal and "Source: docs/" in bare:
            head, _, rest = line.partition("Source: ")
            following = at + 1
            while following < len(lines) and lines[following].strip():
                rest, lines[following] = f"{rest} {lines[following].strip()}", ""
                following += 1
            lines[at] = f"{head}Source: {_sources(app.env.docname, rest)}."
        if bare.endswith("::") and not literal:
            literal = len(line) - len(line.lstrip()) or 0
    numbers = topics.equations().get(name)
    if numbers:
        lines += ["", "Equations: " + ", ".join(f":eq:`{number}`" for number in numbers) + ".", ""]


def _body(app: Any, pagename: str, templatename: str, context: dict[str, Any], doctree: Any) -> None:
    """Make lines of the parameters of long signatures, which Sphinx writes as descriptions of nothing, and plain cells of empty heads of columns."""

    def lines(found: re.Match[str]) -> str:
        return '<div class="sig-lines">\n' + re.sub(r"(</?)dd>", r"\1div>", found[1]) + "</div>"

    context["body"] = re.sub(r"<dl>\n((?:<dd>.*</dd>\n)+)</dl>", lines, context.get("body", ""))
    context["body"] = re.sub(r"<th (class=\"[^\"]*\")><p></p></th>", r"<td \1></td>", context["body"])


def setup(app: Any) -> None:
    app.connect("autodoc-process-docstring", _docstring)
    app.connect("html-page-context", _body)
