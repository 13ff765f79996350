"""Layer docstrings for each library, derived from the specifications."""

import inspect
import textwrap
import types
from collections.abc import Callable
from typing import Any, NamedTuple

from lutjax.layers._spec import Spec, arguments, layer_name


class Library(NamedTuple):
    argument: str  # documentation of the library's own argument
    note: str  # where the library keeps variables
    example: str  # with ``{name}``, ``{arguments}``, ``{inputs}`` and ``{outputs}``


def document(spec_type: type[Spec], library: Library, own: str = "") -> str:
    """Return a spec's docstring plus a library's argument, note and example, or its `own` one."""
    text = inspect.getdoc(spec_type) or ""
    if library.argument and arguments(spec_type):
        before, raises, after = text.partition("\n\nRaises:\n")
        text = f"{before}\n  {library.argument}{raises}{after}"
    parts = [text, library.note, inspect.cleandoc(own)]
    if "Example:" not in own:
        example, inputs, outputs = spec_type.example
        imports = "\n>>> from lutjax import wiring" if "wiring." in example else ""
        body = library.example.format(
            name=layer_name(spec_type), arguments=example, inputs=inputs, outputs=outputs,
            imports=imports,
        )  # fmt: skip
        parts.append("Example:\n" + textwrap.indent(body, "  "))
    return "\n\n".join(part for part in parts if part)


def method_of(
    spec_type: type[Spec], name: str, call: Callable[..., Any], *first: inspect.Parameter
) -> Callable[..., Any]:
    """Return a layer method that passes a spec method's name and arguments to `call`.

    Its parameters begin with `first` in place of the spec method's arrays.
    """

    def method(self: Any, *args: Any, **options: Any) -> Any:
        return call(self, name, *args, **options)

    of_spec = getattr(spec_type, name)
    layer, *others = inspect.signature(of_spec).parameters.values()
    if others[0].name == "arrays":
        others[0:1] = first
    summary = (inspect.getdoc(of_spec) or "").partition("\n")[0]
    method.__name__, method.__qualname__ = name, f"{layer_name(spec_type)}.{name}"
    method.__doc__ = f"{summary}\n\nSee `lutjax.layers.nnx.{layer_name(spec_type)}.{name}`."
    signature = inspect.signature(of_spec).replace(parameters=[layer, *others])
    method.__signature__ = signature  # type: ignore[attr-defined]
    return method


def call_of(spec_type: type[Spec]) -> Callable[..., Any]:
    """Return a layer call renamed to ``__call__``: Flax and Haiku name scopes after it."""
    call = spec_type.call
    copy = types.FunctionType(
        call.__code__, call.__globals__, "__call__", call.__defaults__, call.__closure__
    )
    copy.__dict__.update(call.__dict__)
    copy.__kwdefaults__, copy.__annotations__ = call.__kwdefaults__, call.__annotations__
    copy.__doc__, copy.__module__ = call.__doc__, call.__module__
    copy.__qualname__ = f"{layer_name(spec_type)}.__call__"
    return copy
