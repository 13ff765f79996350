"""Docstrings of the layers of a library, from those of their specifications."""

import inspect
import textwrap
import types
from collections.abc import Callable
from typing import Any, NamedTuple

from lutjax.layers._spec import Spec, arguments, layer_name


class Library(NamedTuple):
    """Text that a library adds to the documentation of a layer.

    Attributes:
      argument: documentation of an argument of its own.
      note: where the library keeps variables.
      example: example of a layer with ``{name}``, ``{arguments}``, ``{inputs}`` and ``{outputs}``.
    """

    argument: str
    note: str
    example: str


def document(spec_type: type[Spec], library: Library, own: str = "") -> str:
    """Return the docstring of a layer: the docstring of its spec, with the argument, note and example of a library.

    Args:
      own: text about the layer in this library, which replaces the example if it contains one.
    """
    text = inspect.getdoc(spec_type) or ""
    if library.argument and arguments(spec_type):
        before, raises, after = text.partition("\n\nRaises:\n")
        text = f"{before}\n  {library.argument}{raises}{after}"
    parts = [text, library.note, inspect.cleandoc(own)]
    if "Example:" not in own:
        example, inputs, outputs = spec_type.example
        imports = "\n>>> from lutjax import wiring" if "wiring." in example else ""
        body = library.example.format(
            name=layer_name(spec_type), arguments=example, inputs=inputs, outputs=outputs, imports=imports
        )
        parts.append("Example:\n" + textwrap.indent(body, "  "))
    return "\n\n".join(part for part in parts if part)


def method_of(
    spec_type: type[Spec], name: str, call: Callable[..., Any], *first: inspect.Parameter
) -> Callable[..., Any]:
    """Return a method of a layer that calls the method of its spec with the same name.

    Args:
      call: gets the layer, the name of the method, and its arguments.
      first: parameters before those of the method of the spec, in place of its arrays.
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
    method.__signature__ = inspect.signature(of_spec).replace(parameters=[layer, *others])  # type: ignore[attr-defined]
    return method


def call_of(spec_type: type[Spec]) -> Callable[..., Any]:
    """Return a copy of the call of a layer with the name ``__call__``, by which Flax and Haiku name scopes and intermediates."""
    call = spec_type.call
    copy = types.FunctionType(
        call.__code__, call.__globals__, "__call__", call.__defaults__, call.__closure__
    )
    copy.__dict__.update(call.__dict__)
    copy.__kwdefaults__, copy.__annotations__ = call.__kwdefaults__, call.__annotations__
    copy.__doc__, copy.__module__ = call.__doc__, call.__module__
    copy.__qualname__ = f"{layer_name(spec_type)}.__call__"
    return copy
