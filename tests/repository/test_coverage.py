"""Check of `docs/coverage.md`: its code parses, and its names exist in the installed libraries."""

import ast
import importlib
import re

from folders import DOCS

PAGE = (DOCS / "coverage.md").read_text(encoding="utf-8")


def find(name):
    """Import a module by its dotted name, or the attribute of one."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        module, _, attribute = name.rpartition(".")
        return getattr(find(module), attribute)


def test_names_exist():
    names = set(re.findall(r"\b(?:jax|jnp|flax|optax)(?:\.[A-Za-z]\w*)+", PAGE))
    assert len(names) > 60
    for name in names:
        find(re.sub(r"^jnp\b", "jax.numpy", name))


def test_each_kernel_has_a_call():
    rows = re.findall(r"^\| (?!kernel |---)([\w/]+) \| (.*) \|$", PAGE, re.MULTILINE)
    assert len(rows) == 164
    for kernel, call in rows:
        statements = re.match(r"(?:`[^`]*`(?:<br>|$))+", call)
        assert statements, kernel
        ast.parse("\n".join(re.findall(r"`(.*?)`", statements[0])).replace("\\|", "|"))
