"""Settings for the documentation site; docs/dev/documentation.md has the build command."""

import importlib.util
import os
import shutil
import sys
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS))

from lutjax import __version__  # noqa: E402

project = "lutjax"
author = "the authors of lutjax"
copyright = author
version = release = __version__
language = "en"

extensions = [
    "_ext",
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.intersphinx",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_design",
]
exclude_patterns = ["_build", "benchmarks/README.md", "**/.ipynb_checkpoints"]
root_doc = "index"
autosummary_generate = False
# Inventories of the linked names only, so that the site is built without a network.
intersphinx_mapping = {
    "jax": ("https://docs.jax.dev/en/latest/", "_inventories/jax.inv"),
    "optax": ("https://optax.readthedocs.io/en/latest/", "_inventories/optax.inv"),
    "flax": ("https://flax.readthedocs.io/en/latest/", "_inventories/flax.inv"),
}
# MathJax renders formulas, from one file in the site.
(DOCS / "_build" / "static").mkdir(parents=True, exist_ok=True)
for _folder in importlib.util.find_spec("sphinx-mathjax-offline").submodule_search_locations:
    shutil.copy(Path(_folder, "static", "mathjax", "tex-svg.js"), DOCS / "_build" / "static")

# Markdown and notebooks: text, executed when the site is built. The cache keeps unchanged results.
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

# Docstrings: Google's sections, and names in single backticks, which become links if possible.
default_role = "py:obj"
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
autodoc_typehints_format = "short"
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
# Pages of source code have no navigation of their own: a sidebar on each would take a third of the
# time of a build.
html_sidebars = {"_modules/**": ["navbar-logo.html", "search-button-field.html"]}
html_show_sourcelink = False
html_copy_source = True
html_sourcelink_suffix = ""
# Read the Docs and the GitHub workflow know the address of the repository; other builds have no
# links to it.
_repository = os.environ.get("READTHEDOCS_GIT_CLONE_URL", "").removesuffix(".git")
if "GITHUB_REPOSITORY" in os.environ:
    _repository = "{GITHUB_SERVER_URL}/{GITHUB_REPOSITORY}".format_map(os.environ)
if not _repository.startswith("https://"):
    _repository = ""  # an address for SSH is no link
html_theme_options: dict[str, Any] = {
    "show_toc_level": 2,
    "show_navbar_depth": 1,
    "use_download_button": True,
    "repository_url": _repository,
    "repository_provider": "github",
    "repository_branch": os.environ.get(
        "READTHEDOCS_GIT_COMMIT_HASH", os.environ.get("GITHUB_SHA", "main")
    ),
    "path_to_docs": "docs",
    "use_repository_button": bool(_repository),
    "use_source_button": bool(_repository),
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
