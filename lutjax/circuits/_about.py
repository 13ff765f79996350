"""Validation of a circuit's self-declared facts against its ports and gates."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lutjax.circuits import columns
from lutjax.circuits.ports import Port
from lutjax.files.strict_json import format_value

Ports = Sequence[Port]

STARTS = ("sparse", "random", "seed", "empty")
"""Initial states of an automaton page."""

MOST_CLASSES = 1 << 16
_DEEPEST = 32  # nested brackets


def circuit_error(text: str) -> ValueError:
    return ValueError(f"Circuit: {text}")


def check(
    about: Mapping[str, Any], inputs: Ports, outputs: Ports, parts: Mapping[str, range]
) -> None:
    """Raise ValueError if ``about`` is no JSON object or contradicts the ports and gates."""
    if not isinstance(about, Mapping):
        raise circuit_error(f"about is {_describe_value(about)}; expected facts by name.")
    _check_json(about)
    for name, (good, expected) in _FACTS.items():
        value = about.get(name)
        if value is not None and not good(value):
            raise circuit_error(
                f"about[{name!r}] is {_describe_value(value)}; expected {expected}."
            )
    if about.get("kind") == "classifier":
        _check_classifier(about, inputs, outputs)
    elif about.get("kind") == "automaton":
        _check_automaton(about, inputs, outputs)
    try:
        columns.circuit_columns(about, inputs)
    except ValueError as error:
        raise circuit_error(f"by its about {error}") from None
    runs = about.get("vote_gates")
    if runs is not None and "votes" in parts:
        n_gates = len(parts["votes"])
        if sum(runs) > n_gates:
            raise circuit_error(
                f"about['vote_gates'] sums to {_describe_value(sum(runs))}; "
                f"votes has {n_gates} gates."
            )


def _holds_classes(port: Port, n_classes: int) -> bool:
    if port.count == 1:
        return port.format.range[1] >= n_classes - 1
    return port.count % n_classes == 0


def _check_classifier(about: Mapping[str, Any], inputs: Ports, outputs: Ports) -> None:
    n_classes, image = about.get("n_classes"), about.get("image")
    if n_classes is not None and not any(_holds_classes(port, n_classes) for port in outputs):
        ports = ", ".join(f"{port.count} x {port.format}" for port in outputs) or "none"
        raise circuit_error(
            f"about['n_classes'] is {n_classes}; no output port has a number for each class, "
            f"or one that can be each class. The output ports have {ports}."
        )
    classes, names = about.get("classes"), about.get("input_names")
    if classes is not None and n_classes is not None and len(classes) != n_classes:
        raise circuit_error(f"about['classes'] has {len(classes)} names; expected {n_classes}.")
    n_numbers = sum(port.count for port in inputs)
    if names is not None and len(names) != n_numbers:
        raise circuit_error(f"about['input_names'] has {len(names)} names; expected {n_numbers}.")
    # Several numbers of a pixel are its channels.
    if image is not None and len(inputs) == 1 and inputs[0].count % (image[0] * image[1]):
        raise circuit_error(
            f"about['image'] is {_describe_value(image)}, {image[0] * image[1]} pixels; "
            f"the input port has {inputs[0].count} numbers, which are not as many for each pixel."
        )


def _check_automaton(about: Mapping[str, Any], inputs: Ports, outputs: Ports) -> None:
    channels = about.get("channels")
    bits = tuple(sum(port.n_bits for port in ports) for ports in (inputs, outputs))
    if channels is None or bits != (9 * channels, channels):
        raise circuit_error(
            f"about describes an automaton with {channels} channels, "
            f"{bits[0]} input and {bits[1]} output bits; "
            "a cell rule has 9 inputs and one output per channel."
        )
    n_shown = about.get("shown")
    if n_shown is not None and n_shown > channels:
        raise circuit_error(f"about['shown'] is {n_shown}; the automaton has {channels} channels.")
    if about.get("rule") == "life" and channels != 1:
        raise circuit_error(
            f"about['rule'] is 'life', which has one channel; the automaton has {channels}."
        )


def _is_whole(value: Any, least: int, most: int = 1 << 53) -> bool:
    return type(value) is int and least <= value <= most


def _is_finite(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _is_list_of_whole(value: Any, least: int) -> bool:
    return isinstance(value, list | tuple) and all(_is_whole(one, least) for one in value)


def _is_list_of_pairs(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(
        isinstance(one, list | tuple) and len(one) == 2 and all(_is_whole(k, -1) for k in one)
        for one in value
    )


def _is_list_of_texts(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(one, str) for one in value)


_FACTS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "kind": (lambda value: isinstance(value, str), "a text"),
    "rule": (lambda value: isinstance(value, str), "a text"),
    "n_classes": (
        lambda value: _is_whole(value, 1, MOST_CLASSES),
        f"a whole number from 1 to {MOST_CLASSES}",
    ),
    "scale": (_is_finite, "a finite number"),
    "offset": (_is_finite, "a finite number"),
    "image": (
        lambda value: _is_list_of_whole(value, 1) and len(value) == 2,
        "height and width, two whole numbers of at least 1",
    ),
    "classes": (_is_list_of_texts, "a list of texts"),
    "input_names": (_is_list_of_texts, "a list of texts"),
    "column_bits": (_is_list_of_pairs, "a list of pairs of whole numbers of at least -1"),
    "target": (lambda value: isinstance(value, str), "a text"),
    "channels": (lambda value: _is_whole(value, 1), "a whole number of at least 1"),
    "periodic": (lambda value: isinstance(value, bool), "true or false"),
    "start": (lambda value: value in STARTS, f"one of {', '.join(STARTS)}"),
    "shown": (lambda value: type(value) is int and value in (1, 3), "1 or 3"),
    "vote_gates": (
        lambda value: _is_list_of_whole(value, 0),
        "a list of whole numbers of at least 0",
    ),
}
"""Validator and expectation for each fact used by lutjax."""


def _check_json(about: Mapping[str, Any]) -> None:
    """Raise ValueError if a value is not valid JSON."""
    # A stack instead of recursion: a circuit from a file may be nested deeper than Python recurses.
    todo: list[tuple[str, Any, int]] = [("about", about, 0)]
    while todo:
        where, value, depth = todo.pop()
        if depth > _DEEPEST:
            raise circuit_error(f"about has brackets in brackets, more than {_DEEPEST} deep.")
        if isinstance(value, Mapping):
            for name, one in value.items():
                if not isinstance(name, str):
                    raise circuit_error(f"{where} has the key {name!r}; JSON has texts as keys.")
                todo.append((f"{where}[{name[:40]!r}]", one, depth + 1))
        elif isinstance(value, list | tuple):
            todo += [(where, one, depth + 1) for one in value]
        elif isinstance(value, float) and not math.isfinite(value):
            raise circuit_error(
                f"{where} has {value}, which JSON cannot represent; write it as text."
            )
        elif value is not None and type(value) not in (str, int, float, bool):
            raise circuit_error(
                f"{where} has a {type(value).__name__}; expected JSON values: str, int, float, "
                "bool, None, and lists and dicts of them."
            )


def names(about: Mapping[str, Any], inputs: Ports) -> list[str]:
    """Return comment lines with the class and input names, or the pixel order, if known."""
    classes, numbers = (about.get(name) or () for name in ("classes", "input_names"))
    height, width = about.get("image") or (0, 0)
    is_image = len(inputs) == 1 and inputs[0].count == height * width
    place_names = [
        f"{port.name}[{i}]" if port.count > 1 else port.name
        for port in inputs
        for i in range(port.count)
    ]
    target = about.get("target")
    rows = columns.circuit_columns(about, inputs)
    if rows is None:
        named_inputs = [
            f"{place}: {in_a_comment(name)}"
            for place, name in zip(place_names, numbers, strict=False)
        ]
    else:
        named_inputs = [f"{column.port}: {_column(column)}" for column in rows.columns]
    return [
        *([] if target is None else [f"answers: {in_a_comment(target)}"]),
        *(f"class {number}: {in_a_comment(name)}" for number, name in enumerate(classes)),
        *([f"{inputs[0].name}: {height} x {width} pixels, row after row"] if is_image else []),
        *named_inputs,
    ]


def _column(column: columns.Column) -> str:
    name = in_a_comment(column.name)
    if isinstance(column, columns.Number):
        own = "" if column.missing else ", as the median is"
        return (
            f"{name}, in units of {column.unit}; "
            f"{column.missing_code / 2**column.format.fraction:g} where missing{own}"
        )
    codes = [f"{code} {in_a_comment(value)}" for code, value in enumerate(column.values)]
    own = f", {column.missing_code} missing" if column.missing else ", missing too"
    return f"{name}: {', '.join([*codes, f'{column.other_code} any other'])}{own}"


def in_a_comment(text: str) -> str:
    """Quote text as one ASCII line that neither begins nor ends a C comment."""
    return json.dumps(text).replace("/*", "/ *").replace("*/", "* /")


def _describe_value(value: Any) -> str:
    try:
        return format_value(value)
    except (TypeError, ValueError):  # not representable in JSON
        return repr(value)[:60]
