"""Client requests: parsed and checked bodies, and error responses."""

import dataclasses
import secrets
import sys
from typing import Any

from lutjax.files import strict_json
from lutjax.serving._limits import Limits

_MOST_STOPS, _MOST_STOP = 4, 256
_MOST_TEMPERATURE = 100.0

_UNUSED: dict[str, tuple[Any, ...]] = {
    "best_of": (None, 1),
    "frequency_penalty": (None, 0),
    "logit_bias": (None, {}),
    "logprobs": (None,),
    "n": (None, 1),
    "presence_penalty": (None, 0),
    "suffix": (None, ""),
    "top_p": (None, 1),
}
"""Unsupported interface fields, each with its accepted no-op values."""

_KNOWN = {
    "echo", "max_tokens", "model", "prompt", "seed", "stop", "stream", "stream_options",
    "temperature", "user",
}  # fmt: skip


class RequestError(Exception):
    """A request answered with an error.

    Attributes:
      status: HTTP status, 400 to 599.
      param: the invalid body field, if any.
      retry: seconds after which a retry may succeed, if it can.
    """

    def __init__(
        self, status: int, message: str, param: str | None = None, retry: int | None = None
    ):
        super().__init__(message)
        self.status, self.param, self.retry = status, param, retry

    def body(self) -> dict[str, Any]:
        """Return the error body in the completion interface's format."""
        kind = "server_error"
        if self.status < 500 and self.status != 429:
            kind = "invalid_request_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": None}}


def loads(body: bytes) -> dict[str, Any]:
    """Parse the JSON object in a body.

    Raises:
      RequestError: the body is not a JSON object.
    """
    try:
        content = strict_json.loads(body)
    except ValueError as error:
        raise RequestError(400, f"the body is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise RequestError(
            400, f"the body is {strict_json.format_value(content)}; expected an object."
        )
    return content


def not_hosted(asked: Any, model: str) -> str:
    """Return the error message for a model not hosted by this server."""
    return (
        f"model is {strict_json.format_value(asked)}; "
        f"this server hosts {strict_json.format_value(model)}. Leave it out, or name that one."
    )


_MOST_AXES = 4  # samples: rows, columns and channels of an image


def check_cells(raw: dict[str, list[Any]] | list[Any], name: str, *, is_table: bool) -> None:
    """Raise unless samples are regular lists of numbers; table cells may also be text or null.

    Args:
      raw: a list of samples, or a list of cells per column.
      name: field name, for messages.

    Raises:
      RequestError: sibling lists differ in length or depth, or a cell has another type; the message
        names the first such position.
    """
    if isinstance(raw, dict):
        first = next(iter(raw))
        for column, cells in raw.items():
            if len(cells) != len(raw[first]):
                raise RequestError(
                    400,
                    f"{name}[{strict_json.format_value(column)}] has {len(cells)} cells, "
                    f"but {name}[{strict_json.format_value(first)}] has {len(raw[first])}; "
                    "all columns must have as many.",
                    name,
                )
            place = f"{name}[{strict_json.format_value(column)}]"
            for row, cell in enumerate(cells):
                _check_cell(cell, f"{place}[{row}]", name, is_table)
        return
    _shape(raw, name, name, is_table)


def _shape(value: Any, place: str, name: str, is_table: bool) -> tuple[int, ...]:
    """Return the shape of regular nested lists, or raise."""
    if not isinstance(value, list):
        _check_cell(value, place, name, is_table)
        return ()
    if place.count("[") >= _MOST_AXES:
        raise RequestError(
            400,
            f"{place} is {strict_json.format_value(value)}; "
            f"a sample has at most {_MOST_AXES - 1} axes.",
            name,
        )
    first: tuple[int, ...] = ()
    for i, item in enumerate(value):
        inner = _shape(item, f"{place}[{i}]", name, is_table)
        if i == 0:
            first = inner
        elif inner != first:
            raise RequestError(
                400,
                f"{place}[{i}] has {_sizes(inner)}, but {place}[0] has {_sizes(first)}; "
                "all must have as many.",
                name,
            )
    return len(value), *first


def _sizes(shape: tuple[int, ...]) -> str:
    return f"{' x '.join(map(str, shape))} values" if shape else "a single value"


def _check_cell(cell: Any, place: str, name: str, is_table: bool) -> None:
    if is_table and (cell is None or isinstance(cell, str)):
        return
    if not isinstance(cell, int | float):
        expected = "a number, a text or null" if is_table else "a number"
        raise RequestError(
            400, f"{place} is {strict_json.format_value(cell)}; it must be {expected}.", name
        )
    # A JSON integer may exceed any float.
    if not is_table and not abs(cell) <= sys.float_info.max:
        raise RequestError(
            400, f"{place} is {strict_json.format_value(cell)}; it must be finite.", name
        )


@dataclasses.dataclass(frozen=True)
class Completion:
    """A text completion request.

    Attributes:
      prompt: prompt bytes.
      n_tokens: maximum number of bytes to add.
      temperature: sampling temperature; 0 is greedy.
      seed: sampling seed; the same seed gives the same text.
      stops: stop sequences, excluded from the answer.
      stream: whether parts are sent as they are sampled.
      usage: whether a stream ends with token counts.
      echo: whether the answer begins with the prompt.
    """

    prompt: bytes
    n_tokens: int
    temperature: float
    seed: int
    stops: tuple[str, ...]
    stream: bool
    usage: bool
    echo: bool

    @classmethod
    def parse(cls, fields: dict[str, Any], model: str, limits: Limits) -> "Completion":
        """Parse the request in a body.

        Raises:
          RequestError: a field is invalid, unknown, or requests an unsupported feature.
        """
        # Clients send defaults of fields that they do not use. Another value would be ignored
        # silently, so it is an error.
        for name, value in fields.items():
            if name in _UNUSED and value not in _UNUSED[name]:
                raise RequestError(
                    400,
                    f"{name} is {strict_json.format_value(value)}, "
                    "which this server does not have; leave it out.",
                    name,
                )
            if name not in _UNUSED and name not in _KNOWN:
                raise RequestError(
                    400,
                    f"the field {strict_json.format_value(name)} is unknown; leave it out.",
                    name,
                )
        if fields.get("model") not in (None, model):
            raise RequestError(404, not_hosted(fields["model"], model), "model")
        prompt = fields.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str):
            prompt = prompt[0]
        text = _bytes_of(prompt)
        if text is None:
            raise RequestError(
                400,
                f"prompt is {strict_json.format_value(prompt)}; "
                "expected one text, or the bytes of one.",
                "prompt",
            )
        if not 1 <= len(text) <= limits.prompt:
            raise RequestError(
                400, f"prompt has {len(text):,} bytes; expected 1 to {limits.prompt:,}.", "prompt"
            )
        stops = fields.get("stop")
        stops = () if stops is None else (stops,) if isinstance(stops, str) else stops
        are_texts = isinstance(stops, list | tuple) and all(
            isinstance(stop, str) and 0 < len(stop) <= _MOST_STOP for stop in stops
        )
        if not are_texts or len(stops) > _MOST_STOPS:
            raise RequestError(
                400,
                f"stop is {strict_json.format_value(fields['stop'])}; "
                f"expected up to {_MOST_STOPS} texts of up to {_MOST_STOP} characters.",
                "stop",
            )
        options = fields.get("stream_options") or {}
        if not isinstance(options, dict):
            raise RequestError(
                400,
                f"stream_options is {strict_json.format_value(options)}; expected an object.",
                "stream_options",
            )
        seed = _number(fields, "seed", secrets.randbits(32), 0, 2**32 - 1, int)
        return cls(
            text,
            int(_number(fields, "max_tokens", 16, 1, limits.tokens, int)),
            float(_number(fields, "temperature", 1.0, 0, _MOST_TEMPERATURE, (int, float))),
            int(seed),
            tuple(stops),
            _flag(fields, "stream"),
            _flag(options, "include_usage"),
            _flag(fields, "echo"),
        )


def _bytes_of(prompt: Any) -> bytes | None:
    """Return the bytes of a text or of a list of bytes; None for another value."""
    if isinstance(prompt, str):
        # JSON may hold halves of surrogate pairs, which UTF-8 has no bytes for.
        return prompt.encode(errors="surrogatepass")
    if not isinstance(prompt, list) or not prompt:
        return None
    # type: true is an int.
    are_bytes = all(type(token) is int and 0 <= token < 256 for token in prompt)
    return bytes(prompt) if are_bytes else None


def _number(
    fields: dict[str, Any],
    name: str,
    default: float | int,
    least: float | int,
    most: float | int,
    kind: Any,
) -> float | int:
    """Return a numeric field within its bounds, or its default."""
    value = fields.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, kind) or not least <= value <= most:
        raise RequestError(
            400,
            f"{name} is {strict_json.format_value(value)}; "
            f"expected a number from {least} to {most}.",
            name,
        )
    number: float | int = value
    return number


def _flag(fields: dict[str, Any], name: str) -> bool:
    value = fields.get(name, False)
    if value not in (None, True, False) or (isinstance(value, int) and not isinstance(value, bool)):
        raise RequestError(
            400, f"{name} is {strict_json.format_value(value)}; expected true or false.", name
        )
    return bool(value)
