"""Documentation and constructors of the layers of each library, made from the arguments of their specs.

An editor shows of a class what its source says. So each layer of `lutjax.layers.nnx`, `linen` and `haiku` has its documentation and its
arguments in its own source, and what they say stands once, in the class ``...Arguments`` of the layer. After a change of it

    python docs/signatures.py

writes them into all layers. Of a layer's docstring, what follows the paragraph on the library is written by hand: the example above all.
"""

import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from lutjax.layers import _images, _logic, _logic_images, _memory, _product_keys, _projection, _tables

ROOT = Path(__file__).parents[1]
WIDTH = 124


class Library(NamedTuple):
    """Words and arguments that a library adds to those of a layer.

    Attributes:
      note: paragraph on its variables, which begins with the name of the library.
      arguments: names and documentation of its own arguments.
      drawn: and of those of layers that draw variables.
      example: for layers that have none of their own: name, arguments, shapes of inputs and outputs.
    """

    note: str
    arguments: str
    drawn: str
    example: str


LIBRARIES = {
    "nnx": Library(
        note="In Flax NNX a variable is an attribute: an `nnx.Param` if it is trained (tables are `Tables`), and otherwise an `Anchors`, "
        "`Targets`, `Wires` or `Thresholds`. Restore all of them with a checkpoint: `lutjax.layers.nnx.check` refuses other states.",
        arguments="",
        drawn="rngs: draws the variables, from its stream ``params``.",
        example="""Example:
  >>> import jax.numpy as jnp
  >>> from flax import nnx
  >>> from lutjax.layers.nnx import {0}
  >>> layer = {0}({1}, rngs=nnx.Rngs(0))
  >>> layer(jnp.ones({2})).shape
  {3}""",
    ),
    "linen": Library(
        note="In Flax Linen a trained variable is in the collection ``params``, and the others are in collections of their own, which "
        "`apply` needs: see `lutjax.layers.linen`. All are drawn from the stream ``params``. Arguments are checked on first use.",
        arguments="name: of the module.",
        drawn="",
        example="""Example:
  >>> import jax, jax.numpy as jnp
  >>> from lutjax.layers.linen import {0}
  >>> layer = {0}({1})
  >>> variables = layer.init(jax.random.key(0), jnp.ones({2}))
  >>> layer.apply(variables, jnp.ones({2})).shape
  {3}""",
    ),
    "haiku": Library(
        note="In Haiku a trained variable is a parameter, and the others are state, so a layer needs `haiku.transform_with_state`: see "
        "`lutjax.layers.haiku`.",
        arguments="name: of the module.",
        drawn="",
        example="""Example:
  >>> import haiku as hk, jax, jax.numpy as jnp
  >>> from lutjax.layers.haiku import {0}
  >>> f = hk.transform_with_state(lambda x: {0}({1})(x))
  >>> params, state = f.init(jax.random.key(0), jnp.ones({2}))
  >>> y, state = f.apply(params, state, None, jnp.ones({2}))
  >>> y.shape
  {3}""",
    ),
}
FILES = [
    ROOT / "lutjax" / "layers" / library / f"{name}.py"
    for library in LIBRARIES
    for name in ("_tables", "_images", "_projection", "_logic", "_memory")
]
MODULES = (_tables, _images, _projection, _logic, _logic_images, _memory, _product_keys)
UNDRAWN = ("GroupSum", "Thermometer")


def module_of(name: str) -> ModuleType:
    """Return the module that has a class."""
    return next(m for m in MODULES if getattr(getattr(m, name, None), "__module__", None) == m.__name__)


# --------------------------------------------------------------------------------------- documentation
INFERRED = " By default as many as the first input has."


def infers(library: str, names: list[str]) -> bool:
    """Return whether these are the names of the argument that a library's layers infer from their input."""
    return library != "nnx" and names == ["in_features"]


def entries(text: str) -> list[tuple[list[str], str]]:
    """Return the names and the words of each entry of a section "Args"."""
    found: list[tuple[list[str], str]] = []
    for entry in re.split(r"\n(?=  \S)", text.strip("\n")):
        names, _, words = " ".join(entry.split()).partition(": ")
        found.append((names.split(", "), words))
    return found


def sections(layer: str) -> tuple[str, list[tuple[list[str], str]], str]:
    """Return the documentation of a layer before its arguments, the arguments, and what follows.

    Arguments that are as in another layer have the words that they have there.
    """
    text = inspect.getdoc(getattr(module_of(f"{layer}Arguments"), f"{layer}Arguments")) or ""
    before, _, rest = text.partition("\nArgs:\n")
    args, _, after = rest.partition("\n\n")
    found = []
    for names, words in entries(args):
        same = re.match(r"as in `(\w+)`[.,;]? ?(.*)", words)
        if same is None:
            found.append((names, words))
            continue
        there = {name: entry for entry in sections(same[1])[1] for name in entry[0]}
        if same[2] and len(names) > 1:
            raise ValueError(f"{layer}: {names} are as in {same[1]}, and which of them is otherwise?")
        for name in names:
            of_name = there[name][1]
            found.append(([name], f"{of_name} {same[2][0].upper()}{same[2][1:]}" if same[2] else of_name))
    return before, found, after


def paragraph(text: str, indent: str = "") -> str:
    """Return text in lines; those after the first have an indent."""
    lines = textwrap.wrap(text, WIDTH - len(indent), break_long_words=False, break_on_hyphens=False)
    return f"\n{indent}".join(lines)


def arguments(layer: str, library: str) -> str:
    """Return the section on the arguments of a layer."""
    extra = [LIBRARIES[library].arguments, LIBRARIES[library].drawn if layer not in UNDRAWN else ""]
    lines = [
        paragraph(f"{', '.join(names)}: {words}{INFERRED if infers(library, names) else ''}", "    ")
        for names, words in sections(layer)[1]
    ]
    lines += [paragraph(text, "    ") for text in extra if text]
    return "Args:\n" + "\n".join(f"  {line}" for line in lines)


def documentation(layer: str, library: str, own: str, spec: Any) -> str:
    """Return the docstring of a layer; `own` is the part of it that is written by hand."""
    before, _, after = sections(layer)
    parts = [before.rstrip(), arguments(layer, library), after, paragraph(LIBRARIES[library].note), own]
    if "Example:" not in own:
        parts.append(LIBRARIES[library].example.format(layer, *spec.example))
    return "\n\n".join(part for part in parts if part)


def of_constructor(layer: str) -> str:
    """Return the docstring of the constructor of a layer in Haiku: without one pyright shows that of `haiku.Module`."""
    before, _, after = sections(layer)
    summary, raises = before.partition("\n")[0], after.partition("\n\n")[0]
    return f"{summary}\n\n{arguments(layer, 'haiku')}\n\n{raises}\n"


def by_hand(docstring: str) -> str:
    """Return what follows the paragraph on the library."""
    return re.split(r"(?ms)^In (?:Flax NNX|Flax Linen|Haiku) .*?(?:\n\n|\Z)", docstring)[-1].strip()


# --------------------------------------------------------------------------------------- constructor
def fields(layer: str) -> dict[str, str]:
    """Return the arguments of a layer as its source has them: annotation, and perhaps default."""
    found: dict[str, str] = {}
    for cls in reversed(getattr(module_of(f"{layer}Arguments"), f"{layer}Arguments").__mro__[:-1]):
        source = textwrap.dedent(inspect.getsource(cls))
        for node in ast.parse(source).body[0].body:  # type: ignore[attr-defined]
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                found[node.target.id] = (ast.get_source_segment(source, node) or "").partition(": ")[2]
    return found


def constructor(layer: str, library: str, spec: Any) -> str:
    """Return the constructor of a layer, or for Linen its fields."""
    of_source = fields(layer)
    given = [p for p in inspect.signature(spec).parameters.values() if p.name not in spec.implied]
    places = [f"{p.name}: {of_source[p.name]}" for p in given if p.kind is p.POSITIONAL_OR_KEYWORD]
    named = [f"{p.name}: {of_source[p.name]}" for p in given if p.kind is p.KEYWORD_ONLY]
    if infers(
        library, [given[0].name]
    ):  # arguments after one with a default need one, and the spec refuses None
        places = [place if "=" in place else f"{place} | None = None" for place in places]
    if library == "linen":  # which makes the constructor, with arguments of its own
        return "\n".join([*places, "_: dataclasses.KW_ONLY", *named])
    body = ["self._make(locals())"]
    if library == "haiku":
        named.append("name: str | None = None")
        body = ['"""' + of_constructor(layer) + '"""', "super().__init__(name)", *body]
    elif layer not in UNDRAWN:
        named.append("rngs: nnx.Rngs")
    lines = "".join(f"    {line},\n" for line in ("self", *places, "*", *named))
    return f"def __init__(\n{lines}) -> None:\n" + textwrap.indent("\n".join(body), "    ")


# --------------------------------------------------------------------------------------- files
def layers(tree: ast.Module) -> Iterator[tuple[ast.ClassDef, ast.Assign]]:
    """Return the layers of a module, with the line that names their spec."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            for line in node.body:
                if isinstance(line, ast.Assign) and ast.unparse(line.targets[0]) == "spec_type":
                    yield node, line


def written(text: str, library: str) -> str:
    """Return the source of a module of a library, with its layers as they are now."""
    lines, done, result = text.splitlines(), 0, []
    for node, line in layers(ast.parse(text)):
        layer, own = node.name, ast.get_docstring(node) or ""
        spec = getattr(module_of(f"{layer}Spec"), f"{layer}Spec")
        generated = [
            n
            for n in node.body
            if isinstance(n, ast.AnnAssign) or (isinstance(n, ast.FunctionDef) and n.name == "__init__")
        ]
        result += lines[done : node.body[0].lineno - 1]
        done = (generated or [line])[-1].end_lineno or 0
        body = '"""' + documentation(layer, library, by_hand(own), spec) + '\n"""\n\n'
        body += f"{ast.unparse(line)}\n\n{constructor(layer, library, spec)}"
        result += [f"    {of_body}" if of_body else "" for of_body in body.splitlines()]
    return "\n".join([*result, *lines[done:]]) + "\n"


def main() -> int:
    for path in FILES:
        before = path.read_text(encoding="utf-8")
        after = written(before, path.parent.name)
        if after != before:
            path.write_text(after, encoding="utf-8")
            print(f"written: {path.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
