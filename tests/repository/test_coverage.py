"""Tests for `docs/coverage.md`: its code parses, and its names exist in the installed libraries."""

import ast
import pkgutil
import re

from folders import DOCS

PAGE = (DOCS / "coverage.md").read_text(encoding="utf-8")


def test_names_exist():
    names = set(re.findall(r"\b(?:jax|jnp|flax|optax)(?:\.[A-Za-z]\w*)+", PAGE))
    assert len(names) > 60
    for name in names:
        pkgutil.resolve_name(re.sub(r"^jnp\b", "jax.numpy", name))


def test_each_kernel_has_a_call():
    rows = re.findall(r"^\| (?!kernel |---)([\w/]+) \| (.*) \|$", PAGE, re.MULTILINE)
    assert len(rows) == 164
    for kernel, call in rows:
        statements = re.match(r"(?:`[^`]*`(?:<br>|$))+", call)
        assert statements, kernel
        ast.parse("\n".join(re.findall(r"`(.*?)`", statements[0])).replace("\\|", "|"))
