"""Docstrings and signatures as the site shows them."""

import re
from typing import Any

from _ext.content import DOCS, equations


def link_sources(docname: str, line: str) -> str:
    """Link the sections in a source line such as "docs/semantics.md, sections 2 and 3"."""
    up = "../" * docname.count("/")
    links = []
    for source in line.removesuffix(".").split("; "):
        page, _, rest = source.partition(", section")
        name = page.removeprefix("docs/").removesuffix(".md")
        text = (DOCS / f"{name}.md").read_text(encoding="utf-8")
        for number in re.findall(r"\d+", rest):
            heading = re.search(rf"^## ({number}\. .*)$", text, re.MULTILINE)
            title = heading[1] if heading else number
            slug = re.sub(r"[^\w -]", "", title).lower().replace(" ", "-")
            links.append(f"`{title} <{up}{name}.html#{slug}>`__")
    return ", ".join(links)


def process_docstring(
    app: Any, what: str, name: str, value: object, options: object, lines: list[str]
) -> None:
    """Link sources and equations, and drop type docstrings from constants."""
    if lines and any(
        lines[0] == (kind.__doc__ or "").partition("\n")[0]
        for kind in (dict, list, tuple, str, int, float)
    ):
        lines[:] = ["A constant.", ""]
    for at, line in enumerate(lines):
        if "Source: docs/" in line:
            head, _, rest = line.partition("Source: ")
            following = at + 1
            while following < len(lines) and lines[following].strip():
                rest, lines[following] = f"{rest} {lines[following].strip()}", ""
                following += 1
            lines[at] = f"{head}Source: {link_sources(app.env.current_document.docname, rest)}."
    if numbers := equations().get(name):
        lines += ["", "Equations: " + ", ".join(f":eq:`{number}`" for number in numbers) + ".", ""]


SHORT_TYPES = (
    (
        r"~?jaxtyping\.(\w+)\[jaxlib\._jax\.Array, ('[^']*')\] \| ~?jaxtyping\.\1\[ndarray, \2\]",
        r"~jaxtyping.\1[~jax.Array, \2]",
    ),
    (r"jaxlib\._jax\.Array", "~jax.Array"),
    (
        r"str \| type\[~typing\.Any\] \| ~numpy\.dtype \| ~jax\._src\.typing\.SupportsDType",
        "~jax.typing.DTypeLike",
    ),
)
"""Types that Sphinx writes in full, and their short forms."""


def process_signature(
    app: Any,
    what: str,
    name: str,
    value: object,
    options: object,
    signature: str | None,
    result: str | None,
) -> tuple[str | None, str | None]:
    """Write defaults as code (``jax.numpy.float32``, not ``<class 'jax.numpy.float32'>``) and shorten types."""
    types = app.env.current_document.autodoc_annotations.get(name, {})
    types.pop("return", None)  # "Returns" describes it
    for argument, annotation in list(types.items()):
        for pattern, short in SHORT_TYPES:
            annotation = re.sub(pattern, short, annotation)
        types[argument] = annotation
        if annotation == "~typing.Any":
            del types[argument]
    if signature:
        signature = re.sub(r"<class '([\w.]+)'>", r"\1", signature)
        signature = re.sub(r"<function ([\w.]+)(?: at 0x\w+)?>", r"\1", signature)
    return signature, result


def process_body(
    app: Any, pagename: str, templatename: str, context: dict[str, Any], doctree: Any
) -> None:
    """Repair HTML for screen readers: parameter lines in long signatures, and empty column heads."""

    def signature_lines(found: re.Match[str]) -> str:
        return '<div class="sig-lines">\n' + re.sub(r"(</?)dd>", r"\1div>", found[1]) + "</div>"

    body = re.sub(r"<dl>\n((?:<dd>.*</dd>\n)+)</dl>", signature_lines, context.get("body", ""))
    context["body"] = re.sub(r"<th (class=\"[^\"]*\")><p></p></th>", r"<td \1></td>", body)


def setup(app: Any) -> None:
    app.setup_extension("sphinx.ext.autodoc")
    app.connect("autodoc-process-docstring", process_docstring)
    app.connect(
        "autodoc-process-signature", process_signature, priority=600
    )  # after types are recorded
    app.connect("html-page-context", process_body)
