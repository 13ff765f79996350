"""Sphinx directives for `content`."""

from typing import Any

from docutils import nodes
from sphinx.util.docutils import SphinxDirective

from _ext import content


class Content(SphinxDirective):
    """Directive that parses the Markdown from a function in `content`."""

    optional_arguments = 1
    final_argument_whitespace = True
    has_content = True

    def run(self) -> list[nodes.Node]:
        text = content.DIRECTIVES[self.name](" ".join(self.arguments), "\n".join(self.content))
        self.env.note_dependency(content.__file__)
        if self.name != "api":  # autodoc notes the source files
            self.env.note_reread()
        return self.parse_text_to_nodes(text, allow_section_headings=True)


class SupportMatrix(Content):
    """Support matrix with a CSS class for each word."""

    def run(self) -> list[nodes.Node]:
        found = super().run()
        for table in (table for node in found for table in node.findall(nodes.table)):
            table["classes"].append("support-matrix")
            for row in (row for body in table.findall(nodes.tbody) for row in body):
                for cell in row[1:]:  # after the op
                    word = cell.astext().split()[0]
                    cell["classes"] += ["support", f"support-{'none' if word == '—' else word}"]
        return found


def setup(app: Any) -> None:
    app.add_css_file("support.css")
    for name in content.DIRECTIVES:
        app.add_directive(name, SupportMatrix if name == "support-matrix" else Content)
