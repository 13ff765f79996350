"""The ASGI application."""

import asyncio
import contextlib
import dataclasses
import json
import math
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import jax
import numpy as np

from lutjax.extras import require_optional
from lutjax.files.messages import in_a_line
from lutjax.files.strict_json import format_names, format_value
from lutjax.layers.nnx import NgramEmbedding, NgramMemory
from lutjax.models import LogicClassifier, LogicTreeNet
from lutjax.models._decoder import Decoder
from lutjax.serving._engine import Engine, FullError, Job, StoppedError
from lutjax.serving._limits import Limits
from lutjax.serving._metrics import Metrics
from lutjax.serving._requests import Completion, RequestError, check_cells, loads, not_hosted
from lutjax.serving._text import Answer
from lutjax.training import predictions
from lutjax.training.samples import SamplesError
from lutjax.values import NgramLayout

with require_optional("lutjax.serving"):
    from flax import nnx
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.exceptions import HTTPException
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
    from starlette.routing import Route

_STATE = ("tokens", "segments", "values")
"""Arrays of a memory's history."""

Handler = Callable[[Request], Awaitable[Response]]


def application(model: Any, name: str = "lutjax", limits: Limits | None = None) -> Starlette:
    """Return an ASGI application that serves a model.

    Text models have ``POST /v1/completions``, classifiers ``POST /v1/classify``, n-gram memories
    ``POST /v1/memory``; all have ``GET /v1/models``, ``/health`` and ``/metrics``. See
    `docs/serving.md`.

    Args:
      model: a byte-level text model or a classifier, as returned by `lutjax.load` and
        `lutjax.convert`, or a layer from `lutjax.convert.memory_layer`.
      name: model name in requests.
      limits: server limits.

    Raises:
      ValueError: the model is of another kind.

    Source: docs/serving.md, section 1.

    Example:
      >>> import lutjax
      >>> from lutjax.serving import application
      >>> app = application(lutjax.load("my-model"), "my-model")  # doctest: +SKIP
    """
    limits = limits or Limits()
    server: _Server
    if isinstance(model, Decoder):
        server = _TextServer(model, name, limits)
    elif isinstance(model, LogicClassifier | LogicTreeNet):
        server = _ClassServer(predictions.wrap_model(model), name, limits)
    elif isinstance(model, NgramMemory | NgramEmbedding) and model.spec.layout is not None:
        server = _MemoryServer(model, name, limits)
    else:
        raise ValueError(
            f"application: model is a {type(model).__name__}; "
            "only text models, classifiers and imported memories are served."
        )
    return server.application()


class _Server:
    """Base server: common routes, errors, and measurements."""

    path: str

    def __init__(self, name: str, limits: Limits):
        self.name, self.limits, self.metrics = name, limits, Metrics()
        self._created = int(time.time())

    async def answer(self, request: Request, body: dict[str, Any], start: float) -> Response:
        """Answer the body of a request."""
        raise NotImplementedError

    def gauges(self) -> dict[str, float | int]:
        """Return the current gauge values."""
        raise NotImplementedError

    def is_healthy(self) -> bool:
        """Return True if requests are answered."""
        return True

    def warm(self) -> None:
        """Compile programs for requests, before the first one."""

    def stop(self) -> None:
        """Stop everything that runs next to the application."""

    def application(self) -> Starlette:
        @contextlib.asynccontextmanager
        async def lifespan(app: Starlette) -> AsyncIterator[None]:
            # Compiling takes seconds to minutes, which the first client would wait.
            await run_in_threadpool(self.warm)
            yield
            await run_in_threadpool(self.stop)

        routes = [
            Route("/health", self._health, methods=["GET"]),
            Route("/metrics", self._metrics, methods=["GET"]),
            Route("/v1/models", self._models, methods=["GET"]),
            Route(self.path, self._post, methods=["POST"]),
        ]
        handlers: dict[Any, Any] = {
            HTTPException: _http_error,
            RequestError: _error,
            Exception: _unexpected_error,
        }
        return Starlette(routes=routes, lifespan=lifespan, exception_handlers=handlers)

    async def _health(self, request: Request) -> Response:
        status, code = ("ok", 200) if self.is_healthy() else ("failed", 503)
        return JSONResponse({"status": status, "model": self.name}, code)

    async def _metrics(self, request: Request) -> Response:
        text = self.metrics.text(self.gauges())
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")

    async def _models(self, request: Request) -> Response:
        about = {"id": self.name, "object": "model", "created": self._created, "owned_by": "lutjax"}
        return JSONResponse({"object": "list", "data": [about]})

    async def _post(self, request: Request) -> Response:
        start, response = time.perf_counter(), None
        status = 500  # for what no one expected, see `_unexpected_error`
        try:
            response = await self.answer(request, loads(await self._body(request)), start)
            status = response.status_code
        except RequestError as error:
            status = error.status
            raise
        finally:
            # A stream has only begun: `_events` counts it at its end.
            if not isinstance(response, StreamingResponse):
                self.metrics.request(self.path, status, time.perf_counter() - start)
        return response

    async def _body(self, request: Request) -> bytes:
        """Read a request body, up to the limit."""
        parts, size = [], 0
        try:
            async for part in request.stream():
                size += len(part)
                if size > self.limits.body:  # counted, since a header may claim any length
                    limit = f"{self.limits.body:,} bytes, the limit of this server."
                    raise RequestError(413, f"the body has more than {limit}")
                parts.append(part)
        except ClientDisconnect as error:
            raise RequestError(400, "the body is not whole.") from error
        return b"".join(parts)


async def _error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    headers = {} if error.retry is None else {"Retry-After": str(error.retry)}
    return JSONResponse(error.body(), error.status, headers)


async def _unexpected_error(request: Request, error: Exception) -> Response:
    # Starlette raises the error again after this answer, so that the server logs it.
    return JSONResponse(RequestError(500, "the server has failed.").body(), 500)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    what = f"{request.method} {request.url.path[:100]}"
    messages = {404: f"there is no {what}.", 405: f"{what} is not allowed."}
    message = messages.get(error.status_code, error.detail)
    body = RequestError(error.status_code, message).body()
    return JSONResponse(body, error.status_code, error.headers)


class _TextServer(_Server):
    path = "/v1/completions"

    def __init__(self, model: Decoder, name: str, limits: Limits):
        super().__init__(name, limits)
        self.engine = Engine(model, limits)

    def gauges(self) -> dict[str, float | int]:
        return {
            "active": self.engine.n_active,
            "waiting": self.engine.n_waiting,
            "slots": self.limits.slots,
        }

    def is_healthy(self) -> bool:
        return self.engine.failed is None

    def warm(self) -> None:
        self.engine.warm()

    def stop(self) -> None:
        self.engine.stop()

    async def answer(self, request: Request, body: dict[str, Any], start: float) -> Response:
        asked = Completion.parse(body, self.name, self.limits)
        parts: asyncio.Queue[bytes | BaseException | None] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        # The engine thread calls it; queues of asyncio belong to the thread of their loop.
        def push(part: bytes | BaseException | None) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(parts.put_nowait, part)

        job = Job(asked.prompt, asked.n_tokens, asked.temperature, asked.seed, push)
        try:
            self.engine.submit(job)
        except FullError:
            raise RequestError(
                429, f"{self.limits.queue} requests wait already; try again later.", retry=1
            ) from None
        except StoppedError:
            raise RequestError(503, "the server is stopping, or has failed.", retry=5) from None
        self.metrics.tokens("prompt", len(asked.prompt))
        about = {
            "id": f"cmpl-{secrets.token_hex(12)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": self.name,
        }
        texts = self._texts(asked, job, parts)
        if asked.stream:
            events = self._events(asked, about, job, texts, start)
            return StreamingResponse(events, media_type="text/event-stream")
        whole, ended = "", None
        watch = asyncio.ensure_future(_cancel_disconnected(request, job))
        try:
            async for text, reason in texts:
                whole, ended = whole + text, reason
        finally:
            watch.cancel()
            job.cancelled = True
        answer = {"choices": [_choice(whole, ended)], "usage": _usage(asked, job)}
        return JSONResponse({**about, **answer})

    async def _texts(
        self, asked: Completion, job: Job, parts: asyncio.Queue[bytes | BaseException | None]
    ) -> AsyncIterator[tuple[str, str | None]]:
        """Yield text parts of an answer, the last one with its finish reason."""
        if asked.echo:
            yield asked.prompt.decode(errors="replace"), None
        answer = Answer(asked.stops)
        while True:
            part = await parts.get()
            if isinstance(part, BaseException):
                raise RequestError(500, "the server has failed.")
            text = answer.add(part or b"", last=part is None)
            if part is not None:
                self.metrics.tokens("answer", len(part))
            # Cancel: the engine may sample further bytes after a stop sequence.
            if answer.stopped or part is None:
                job.cancelled = True
                yield text, "stop" if answer.stopped else "length"
                return
            if text:
                yield text, None

    async def _events(
        self,
        asked: Completion,
        about: dict[str, Any],
        job: Job,
        texts: AsyncIterator[tuple[str, str | None]],
        start: float,
    ) -> AsyncIterator[str]:
        status = 200
        try:
            async for text, reason in texts:
                yield _event({**about, "choices": [_choice(text, reason)]})
            if asked.usage:
                yield _event({**about, "choices": [], "usage": _usage(asked, job)})
            yield "data: [DONE]\n\n"
        except RequestError as error:
            status = error.status
            yield _event(error.body())
        except BaseException:  # the client has disconnected
            status = 499
            raise
        finally:
            job.cancelled = True
            self.metrics.request(self.path, status, time.perf_counter() - start)


async def _cancel_disconnected(request: Request, job: Job) -> None:
    """Cancel a job once its client has disconnected."""
    # Starlette cancels streams of disconnected clients, but not other answers.
    while not await request.is_disconnected():
        await asyncio.sleep(0.25)
    job.cancelled = True


def _choice(text: str, reason: str | None) -> dict[str, Any]:
    return {"text": text, "index": 0, "logprobs": None, "finish_reason": reason}


def _usage(asked: Completion, job: Job) -> dict[str, int]:
    return {
        "prompt_tokens": len(asked.prompt),
        "completion_tokens": job.done,
        "total_tokens": len(asked.prompt) + job.done,
    }


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content)}\n\n"


class _CallServer(_Server):
    """Server that computes one answer at a time."""

    def __init__(self, name: str, limits: Limits):
        super().__init__(name, limits)
        # One call at a time: a device has no use for several.
        self._one = asyncio.Semaphore(1)
        self._waiting = 0

    def gauges(self) -> dict[str, float | int]:
        return {"waiting": self._waiting}

    async def _call_in_turn(self, function: Callable[..., Any], *arguments: Any) -> Any:
        if self._waiting >= self.limits.queue:
            raise RequestError(
                429, f"{self.limits.queue} requests wait already; try again later.", retry=1
            )
        self._waiting += 1
        try:
            async with self._one:
                return await run_in_threadpool(function, *arguments)
        finally:
            self._waiting -= 1


class _ClassServer(_CallServer):
    path = "/v1/classify"

    def __init__(self, run: predictions.TrainedRun, name: str, limits: Limits):
        super().__init__(name, limits)
        self.run = run

    async def answer(self, request: Request, body: dict[str, Any], start: float) -> Response:
        if set(body) not in ({"rows"}, {"columns"}, {"rows", "model"}, {"columns", "model"}):
            raise RequestError(
                400,
                f"the body has the fields {format_names(sorted(body), 100) or 'none'}; "
                "it must have rows, a list of samples, or columns, an object of lists, "
                "and nothing else but model.",
            )
        if body.get("model") not in (None, self.name):
            raise RequestError(404, not_hosted(body["model"], self.name), "model")
        x = self._parse_samples(body)
        votes, numbers = await self._call_in_turn(self._answers, x)
        self.metrics.tokens("rows", len(x))
        answer: dict[str, Any] = {"model": self.name}
        if self.run.form.regression:
            return JSONResponse({**answer, "numbers": numbers.tolist(), "votes": votes.tolist()})
        names = self.run.form.classes
        answer |= {"classes": predictions.Predictions(votes, names).names}
        return JSONResponse({**answer, "votes": votes.tolist(), "names": list(names)})

    def _parse_samples(self, body: dict[str, Any]) -> np.ndarray:
        """Return the samples in a body.

        Raises:
          RequestError: the samples are invalid, or too many.
        """
        name = "rows" if "rows" in body else "columns"
        raw = body[name]
        # Check kinds and sizes before any conversion, which would copy the body.
        lists = [raw] if name == "rows" else raw.values() if isinstance(raw, dict) else []
        if not lists or not all(isinstance(one, list) for one in lists):
            kind = "a list of samples" if name == "rows" else "an object of lists"
            raise RequestError(400, f"{name} is {format_value(raw)}; it must be {kind}.", name)
        size = max(len(one) for one in lists)
        if not 1 <= size <= self.limits.rows:
            raise RequestError(
                400,
                f"{name} has {size} samples; the number must be from 1 to {self.limits.rows}.",
                name,
            )
        is_table = self.run.form.encoding is not None
        check_cells(raw, name, is_table=is_table)
        if name == "rows":
            raw = np.asarray(raw, None if is_table else np.float64)
        try:
            return self.run.form.numbers(raw, name=name)
        except (SamplesError, ValueError, TypeError) as error:  # its message begins with the name
            raise RequestError(400, in_a_line(error), name) from error

    def warm(self) -> None:
        self._answers(np.zeros((1, math.prod(self.run.form.shape)), np.float32))

    def _answers(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return votes, and classes or values, of samples padded to a power of two.

        The padding limits the number of compiled programs.
        """
        size = 1 << (len(x) - 1).bit_length()
        padded = np.concatenate([x, np.repeat(x[:1], size - len(x), 0)])
        predicted = self.run.predict_numbers(padded)
        return predicted.votes[: len(x)], predicted.numbers[: len(x)]


class _MemoryServer(_CallServer):
    """Server for an imported n-gram memory, whose state is in the requests."""

    path = "/v1/memory"

    def __init__(self, layer: NgramMemory | NgramEmbedding, name: str, limits: Limits):
        super().__init__(name, limits)
        graph, self._arrays = nnx.split(layer)
        self._layout: NgramLayout = layer.spec.layout
        self._first = layer.history((), np.float32)
        streams = getattr(layer.spec, "streams", 1)
        self._vector = (layer.features,) if streams == 1 else (streams, layer.features)

        @jax.jit
        def step(arrays: Any, x: Any, tokens: Any, history: Any) -> Any:
            return nnx.merge(graph, arrays)(x, tokens, history=history)

        self._step = step

    async def answer(self, request: Request, body: dict[str, Any], start: float) -> Response:
        if unknown := sorted(set(body) - {"model", "tokens", "vectors", "history"}):
            raise RequestError(
                400, f"the field {format_value(unknown[0])} is unknown; leave it out.", unknown[0]
            )
        if body.get("model") not in (None, self.name):
            raise RequestError(404, not_hosted(body["model"], self.name), "model")
        tokens = self._parse_tokens(body.get("tokens"))
        shape = (len(tokens), *self._vector)
        x = self._parse_array("vectors", body.get("vectors"), shape, np.float32)
        history = self._parse_history(body.get("history"))
        y, history = await self._call_in_turn(self._answer, x, tokens, history)
        # JSON has no infinities.
        if not (np.isfinite(y).all() and np.isfinite(np.asarray(history.values)).all()):
            raise RequestError(
                400,
                "vectors or history.values are so large that the update is not finite in float32; "
                "send smaller ones.",
                "vectors",
            )
        self.metrics.tokens("tokens", len(tokens))
        state = {name: np.asarray(getattr(history, name)).tolist() for name in _STATE}
        state["layout"] = self._layout.digest
        return JSONResponse({"model": self.name, "update": y.tolist(), "history": state})

    def _parse_tokens(self, raw: Any) -> np.ndarray:
        is_list = isinstance(raw, list)
        if not is_list or not 1 <= len(raw) <= self.limits.prompt:
            what = f"has {len(raw)} ids" if is_list else f"is {format_value(raw)}"
            raise RequestError(
                400, f"tokens {what}; expected a list of 1 to {self.limits.prompt} ids.", "tokens"
            )
        self._check_ids("tokens", raw)
        return np.asarray(raw, np.int32)

    def _check_ids(self, name: str, ids: list[Any]) -> None:
        n_tokens = self._layout.n_tokens
        for i, token in enumerate(ids):
            if type(token) is not int or not -1 <= token < n_tokens:
                raise RequestError(
                    400,
                    f"{name}[{i}] is {format_value(token)}; "
                    f"expected an id from 0 to {n_tokens - 1}, or -1.",
                    name,
                )

    def _parse_array(self, name: str, raw: Any, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        if not isinstance(raw, list):
            raise RequestError(
                400, f"{name} is {format_value(raw)}; expected lists of numbers.", name
            )
        check_cells(raw, name, is_table=False)
        array = np.asarray(raw, np.float64)  # holds int32 and float32 exactly, until the check
        if array.shape != shape and (array.size or math.prod(shape)):
            raise RequestError(
                400, f"{name} has shape {list(array.shape)}; expected {list(shape)}.", name
            )
        bounds: Any = np.finfo(dtype) if np.issubdtype(dtype, np.floating) else np.iinfo(dtype)
        if not ((array >= bounds.min) & (array <= bounds.max)).all():
            raise RequestError(
                400, f"{name} has numbers that {np.dtype(dtype)} does not hold.", name
            )
        if np.issubdtype(dtype, np.integer) and (array % 1).any():
            raise RequestError(400, f"{name} has fractions; expected whole numbers.", name)
        return array.reshape(shape).astype(dtype)

    def _parse_history(self, raw: Any) -> Any:
        if raw is None:
            return self._first
        if not isinstance(raw, dict) or set(raw) != {*_STATE, "layout"}:
            raise RequestError(
                400, "history is none of this server; send the history of an answer.", "history"
            )
        # Rows of another layout would be other n-grams, without an error.
        if raw["layout"] != self._layout.digest:
            raise RequestError(
                400,
                f"history is of the layout or vocabulary {format_value(raw['layout'])}, "
                f"and the memory has {self._layout.digest}.",
                "history",
            )
        parts = {
            name: self._parse_array(f"history.{name}", raw[name], like.shape, like.dtype)
            for name in _STATE
            for like in [getattr(self._first, name)]
        }
        self._check_ids("history.tokens", raw["tokens"])
        return dataclasses.replace(self._first, **parts)

    def warm(self) -> None:
        self._answer(np.zeros((1, *self._vector), np.float32), np.zeros(1, np.int32), self._first)

    def _answer(self, x: np.ndarray, tokens: np.ndarray, history: Any) -> tuple[np.ndarray, Any]:
        """Return the update and the next history, by parts whose lengths are powers of two.

        These lengths limit the number of compiled programs.
        """
        parts: list[np.ndarray] = []
        while tokens.size:
            size = 1 << (tokens.size.bit_length() - 1)
            y, history = self._step(self._arrays, x[:size], tokens[:size], history)
            parts.append(np.asarray(y))
            x, tokens = x[size:], tokens[size:]
        return np.concatenate(parts), history
