"""Models over HTTP: answers match the model under concurrent requests, and bad requests receive an explanation."""

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2 as httpx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import slow_except
from flax import nnx
from small_runs import HISTORY, saved
from starlette.testclient import TestClient

import lutjax
from lutjax.models import (
    LogicCA,
    LogicCAConfig,
    LogicClassifier,
    LogicClassifierConfig,
    LUTTransformer,
    LUTTransformerConfig,
)
from lutjax.serving import Limits, application
from lutjax.serving._engine import Job
from lutjax.serving._requests import RequestError, check_cells
from lutjax.serving._text import Answer
from lutjax.training import classifier, models, runs
from lutjax.training.raw import Form

LIMITS = Limits(slots=3, queue=64, prompt=64, tokens=64, rows=8, body=4096)


@pytest.fixture(scope="module")
def model():
    sizes = {
        "features": 8,
        "context": 6,
        "n_layers": 1,
        "n_heads": 1,
        "n_detectors": 3,
        "n_anchors": 2,
    }
    model = LUTTransformer(
        LUTTransformerConfig(**sizes, ffn_detectors=4, ffn_anchors=3), rngs=nnx.Rngs(0)
    )
    rng = np.random.default_rng(0)
    for _, layer in nnx.iter_modules(model):
        if hasattr(layer, "weights"):
            layer.weights = rng.normal(size=layer.weights.shape).astype(np.float32)
    model.eval()
    return model


@pytest.fixture(scope="module")
def client(model):
    with TestClient(application(model, "texts", LIMITS)) as client:
        yield client


def complete(client, **fields):
    response = client.post("/v1/completions", json=fields)
    assert response.status_code == 200, response.text
    return response.json()


def text_of(result):
    return result["choices"][0]["text"]


@pytest.mark.parametrize("prompt", slow_except(["a", "The quick brown fox", "größe"], "größe"))
def test_the_likeliest_text(prompt, client, model):
    actual = complete(client, model="texts", prompt=prompt, max_tokens=12, temperature=0)
    tokens = np.frombuffer(prompt.encode(), np.uint8).astype(np.int32)
    want = model.generate(jnp.asarray(tokens), 12, key=jax.random.key(0), temperature=0)
    assert text_of(actual) == np.asarray(want).astype(np.uint8).tobytes().decode(errors="replace")
    assert actual["choices"][0]["finish_reason"] == "length"
    n = len(prompt.encode())
    assert actual["usage"] == {"prompt_tokens": n, "completion_tokens": 12, "total_tokens": n + 12}
    of_bytes = complete(client, prompt=list(prompt.encode()), max_tokens=12, temperature=0)
    assert of_bytes["choices"] == actual["choices"]


def events(text):
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_streams(client):
    asked = {"prompt": "x", "max_tokens": 30, "seed": 5, "temperature": 0.9}
    want = complete(client, **asked)
    response = client.post(
        "/v1/completions", json={**asked, "stream": True, "stream_options": {"include_usage": True}}
    )
    assert response.headers["content-type"].startswith("text/event-stream")
    *parts, usage = events(response.text)
    assert "".join(text_of(part) for part in parts) == text_of(want)
    assert [part["choices"][0]["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + [
        "length"
    ]
    assert usage["usage"] == want["usage"]
    assert len({part["id"] for part in parts}) == 1
    assert len(parts) > 2


def test_stops_and_echo(client):
    asked = {"prompt": "ab", "max_tokens": 40, "seed": 1}
    whole = text_of(complete(client, **asked))
    stop = whole[5:7]
    result = complete(client, **asked, stop=[stop, "not there"], echo=True)
    assert text_of(result) == "ab" + whole[: whole.index(stop)]
    assert result["choices"][0]["finish_reason"] == "stop"


def test_answers_in_parts():
    for cut in range(1, 12):
        answer, text = Answer(("END", "E!")), "größer ENE END x".encode()
        parts = [text[k : k + cut] for k in range(0, len(text), cut)]
        assert (
            "".join(answer.add(part) for part in parts) + answer.add(b"", last=True)
            == "größer ENE "
        )
        assert answer.stopped
    answer = Answer(("END",))
    assert answer.add(b"EN") + answer.add(b"", last=True) == "EN"


def test_many_at_once(client):
    prompts = (chr(97 + k % 26) * (1 + 3 * k % 20) for k in range(24))
    asked = [
        {"prompt": prompt, "max_tokens": 1 + 5 * k % 40, "seed": k, "temperature": k % 3 / 2}
        for k, prompt in enumerate(prompts)
    ]
    alone = [text_of(complete(client, **one)) for one in asked]
    with ThreadPoolExecutor(24) as pool:
        together = list(pool.map(lambda one: text_of(complete(client, **one)), asked))
    assert together == alone
    assert len(set(alone)) > 20


BAD = [
    (b"{", 400, "the body is not JSON"),
    (b"[1]", 400, "expected an object"),
    (b"[" * 3000, 400, "the body is not JSON"),  # nested too deeply on Python 3.11 only
    ({}, 400, "prompt is null; expected one text"),
    ({"prompt": ""}, 400, "prompt has 0 bytes; expected 1 to 64"),
    ({"prompt": "x" * 65}, 400, "prompt has 65 bytes"),
    ({"prompt": ["a", "b"]}, 400, "expected one text"),
    ({"prompt": [300]}, 400, "expected one text"),
    ({"prompt": "x", "max_tokens": 65}, 400, "max_tokens is 65; expected a number from 1 to 64"),
    ({"prompt": "x", "max_tokens": True}, 400, "max_tokens is true"),
    ({"prompt": "x", "temperature": -1}, 400, "temperature is -1"),
    ({"prompt": "x", "temperature": "hot"}, 400, 'temperature is "hot"'),
    ({"prompt": "x", "seed": 2**32}, 400, "seed is 4294967296"),
    ({"prompt": "x", "stop": [""]}, 400, "stop is"),
    ({"prompt": "x", "stop": {"a": 1}}, 400, "stop is"),
    ({"prompt": "x", "stream": "yes"}, 400, 'stream is "yes"; expected true or false'),
    ({"prompt": "x", "stream_options": 3}, 400, "stream_options is 3"),
    ({"prompt": "x", "n": 2}, 400, "n is 2, which this server does not have"),
    ({"prompt": "x", "top_p": 0.5}, 400, "top_p is 0.5, which this server does not have"),
    ({"prompt": "x", "color": 2}, 400, 'the field "color" is unknown'),
    ({"prompt": "x", "model": "other"}, 404, 'model is "other"; this server hosts "texts"'),
    (b" " * 5000, 413, "the body has more than 4,096 bytes"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "status", "message"), BAD)
def test_bad_requests(body, status, message, client):
    response = client.post(
        "/v1/completions", content=body if isinstance(body, bytes) else json.dumps(body)
    )
    assert response.status_code == status
    error = response.json()["error"]
    assert message in error["message"]
    assert error["type"] == "invalid_request_error"
    assert "\n" not in error["message"]


def test_how_it_is(client):
    assert client.get("/health").json() == {"status": "ok", "model": "texts"}
    assert client.get("/v1/models").json()["data"][0]["id"] == "texts"
    complete(client, prompt="x", max_tokens=3)
    text = client.get("/metrics").text
    assert re.search(r'lutjax_requests_total\{path="/v1/completions",status="200"\} \d+', text)
    assert "lutjax_slots 3" in text
    # The worker frees a slot after the last token has been sent, so the answer may arrive first.
    _until(lambda: "lutjax_active 0" in client.get("/metrics").text)
    for path, status in (("/nothing", 404), ("/v1/completions", 405)):
        response = client.get(path)
        assert response.status_code == status
        assert path in response.json()["error"]["message"]


def test_who_leaves_frees_a_slot(model):
    engine = _engine(application(model, "texts", Limits(slots=1, queue=4, tokens=100_000)))
    got = []
    job = Job(b"x", 100_000, 1.0, 0, got.append)
    engine.submit(job)
    _until(lambda: len(got) > 1)
    job.cancelled = True
    other = []
    engine.submit(Job(b"y", 3, 1.0, 0, other.append))
    _until(lambda: other and other[-1] is None)
    engine.stop()
    assert sum(map(len, filter(None, other))) == 3


def _engine(app):
    return app.routes[-1].endpoint.__self__.engine


def _until(true, seconds=60):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.fixture
def classes(tmp_path):
    config = LogicClassifierConfig(in_features=3, n_classes=2, n_thresholds=2, layers=(12, 12))
    samples, form = runs.Source("t.npz", 100, "f" * 64), Form((3,), ("no", "yes"), None, 0.0, 1.0)
    record = classifier.Record(
        config, classifier.TrainingConfig(steps=9), samples, {}, {}, HISTORY, form=form
    )
    saved(
        tmp_path / "run", models.Structure(lambda rngs: LogicClassifier(config, rngs=rngs)), record
    )
    lutjax.save(lutjax.load(tmp_path / "run"), tmp_path / "saved")
    with TestClient(application(lutjax.load(tmp_path / "saved"), "classes", LIMITS)) as client:
        yield client


def test_classifiers(classes, tmp_path):
    rows = np.random.default_rng(0).random((5, 3)).round(3)
    result = classes.post("/v1/classify", json={"rows": rows.tolist()}).json()
    votes = lutjax.load(tmp_path / "run").packed().votes(jnp.asarray(rows, jnp.float32))
    np.testing.assert_array_equal(result["votes"], votes)
    assert result["classes"] == [("no", "yes")[k] for k in np.asarray(votes).argmax(1)]
    for body, message in (
        ({"rows": [[1, 2]]}, "expected [N, 3]"),
        (
            {"rows": [[1, 2], [3]]},
            "rows[1] has 1 values, but rows[0] has 2 values; all must have as many.",
        ),
        ({"rows": [[1, 2, 3], 4]}, "rows[1] has a single value, but rows[0] has 3 values;"),
        ({"rows": [[1, [2], 3]]}, "rows[0][1] has 1 values, but rows[0][0] has a single value;"),
        ({"rows": [["a", "b", "c"]]}, 'rows[0][0] is "a"; it must be a number.'),
        ({"rows": [[1, 2, None]]}, "rows[0][2] is null; it must be a number."),
        ({"rows": [[1, 2, {"a": 1}]]}, 'rows[0][2] is {"a": 1}; it must be a number.'),
        ({"rows": [[1, 2, 10**400]]}, "it must be finite."),
        ({"rows": [[[[[1]]]]]}, "a sample has at most 3 axes"),
        ({"rows": [[]]}, "expected [N, 3]"),
        ({"rows": []}, "rows has 0 samples; the number must be from 1 to 8"),
        ({"rows": [[0, 0, 0]] * 9}, "rows has 9 samples"),
        ({"rows": 3}, "rows is 3; it must be a list of samples."),
        ({"columns": [[1]]}, "columns is [[1]]; it must be an object of lists."),
        ({"columns": {"a": [1]}}, "columns are columns, but the run was trained on arrays"),
        ({"x": 1}, 'the body has the fields "x"; it must have rows'),
        ({"rows": [[1, 2, 3]], "model": "other"}, 'this server hosts "classes"'),
    ):
        response = classes.post("/v1/classify", json=body)
        assert response.status_code == (404 if "model" in body else 400), (body, response.text)
        result = response.json()["error"]["message"]
        assert message in result
        assert not re.search(
            r"(\w+): \1:|inhomogeneous|dtype|setting an array|object arrays", result
        ), result
    assert 'lutjax_items_total{kind="rows"} 5' in classes.get("/metrics").text


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"a": [1, 2], "b": [1]}, 'columns["b"] has 1 cells, but columns["a"] has 2; all columns must have as many.'),
        ({"a": [[1]]}, 'columns["a"][0] is [1]; it must be a number, a text or null.'),
        ({"a": [True]}, None),
        ([["x", None, 3]], None),
        ([["x", {}, 3]], "rows[0][1] is {}; it must be a number, a text or null."),
        ([["x"], ["y", "z"]], "rows[1] has 2 values, but rows[0] has 1 values; all must have as many."),
    ],
)  # fmt: skip
def test_cells_of_tables(raw, message):
    name = "rows" if isinstance(raw, list) else "columns"
    if message is None:
        check_cells(raw, name, is_table=True)
    else:
        with pytest.raises(RequestError, match=f"^{re.escape(message)}$"):
            check_cells(raw, name, is_table=True)


def test_other_models_are_not_served():
    automaton = nnx.eval_shape(lambda: LogicCA(LogicCAConfig(), rngs=nnx.Rngs(0)))
    with pytest.raises(
        ValueError,
        match="model is a LogicCA; only text models, classifiers and imported memories are served",
    ):
        application(automaton)
    with pytest.raises(ValueError, match="slots is 0; it must be at least 1"):
        Limits(slots=0)


@contextlib.contextmanager
def served(folder, *words):
    """Run `lutjax serve` in a subprocess; yield the process and its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "lutjax",
        "serve",
        str(folder),
        "--port",
        str(port),
        *map(str, words),
    ]
    with (folder.parent / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        address = f"http://127.0.0.1:{port}"

        def answers():
            assert process.poll() is None, (folder.parent / "log").read_text()
            with contextlib.suppress(httpx.TransportError):
                return httpx.get(f"{address}/health").status_code == 200
            return False

        try:
            _until(answers, 120)
            yield process, address
        finally:
            process.kill()
            process.wait()


class TestSlow:
    def test_blocks_change_no_answer(self, client, model):
        app = application(model, "texts", Limits(slots=2, block_size=4))
        with TestClient(app) as other:
            for prompt in ("The quick brown fox", "The quick brown dog", "The quick brown fox"):
                fields = {"prompt": prompt, "max_tokens": 20, "temperature": 0}
                assert text_of(complete(other, **fields)) == text_of(complete(client, **fields))
            assert _engine(app).slots.blocks == {"all": 8, "free": 8, "shared": 0}

    def test_too_many(self, model):
        app = application(model, "texts", Limits(slots=1, queue=1))
        with TestClient(app) as client:
            gate, engine = threading.Event(), _engine(app)
            step = engine.slots.step

            def slow(count):
                gate.wait()
                return step(count)

            engine.slots.step = slow
            with ThreadPoolExecutor(2) as pool:
                result = []
                for n in (1, 2):
                    result.append(pool.submit(complete, client, prompt="x", max_tokens=20, seed=n))
                    _until(
                        lambda n=n: engine.n_active + engine.n_waiting == n and engine.n_active == 1
                    )
                refused = client.post("/v1/completions", json={"prompt": "x"})
                gate.set()
                assert [len(one.result()["choices"]) for one in result] == [1, 1]
        assert refused.status_code == 429
        assert refused.headers["retry-after"] == "1"
        assert "1 requests wait already" in refused.json()["error"]["message"]

    def test_a_failure_is_told(self, model):
        app = application(model, "texts", Limits(slots=2))
        with TestClient(app, raise_server_exceptions=False) as client:

            def broken(*_):
                raise RuntimeError("no memory")

            _engine(app).slots.step = broken
            assert client.post("/v1/completions", json={"prompt": "x"}).status_code == 500
            assert client.post("/v1/completions", json={"prompt": "x"}).status_code == 503
            assert client.get("/health").status_code == 503

    def test_two_hundred_clients_for_a_minute(self, model, tmp_path):
        """Memory stays bounded, and requests finish before the server exits."""
        n_clients, seconds = 200, 60

        def memory(pid):
            return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf(
                "SC_PAGE_SIZE"
            )

        lutjax.save(model, tmp_path / "texts")
        kinds = [
            {"prompt": f"text {k} " * (1 + k % 4), "max_tokens": 8 + k % 40, "seed": k}
            for k in range(20)
        ]
        with served(tmp_path / "texts", "--queue", n_clients) as (process, address):
            with httpx.Client(base_url=address, timeout=60) as one:
                alone = [text_of(complete(one, **kind)) for kind in kinds]
            before = memory(process.pid)

            async def client(number, http, end):
                done = 0
                while time.monotonic() < end:
                    k = (number + done) % len(kinds)
                    if number % 2:
                        response = await http.post(
                            "/v1/completions", json={**kinds[k], "stream": True}
                        )
                        text = "".join(text_of(part) for part in events(response.text))
                    else:
                        response = await http.post("/v1/completions", json=kinds[k])
                        text = text_of(response.json())
                    assert response.status_code == 200, response.text
                    assert text == alone[k]
                    done += 1
                return done

            async def clients():
                limits = httpx.Limits(max_connections=n_clients)
                async with httpx.AsyncClient(base_url=address, limits=limits, timeout=120) as http:
                    end = time.monotonic() + seconds
                    return await asyncio.gather(
                        *(client(number, http, end) for number in range(n_clients))
                    )

            done = asyncio.run(clients())
            assert min(done) >= 1
            after = memory(process.pid)
            assert after < before + 200e6, (before, after)
            counted = f'lutjax_requests_total{{path="/v1/completions",status="200"}} {sum(done) + len(kinds)}'
            assert counted in httpx.get(f"{address}/metrics").text
            _until(lambda: "lutjax_active 0" in httpx.get(f"{address}/metrics").text)
            with httpx.Client(base_url=address, timeout=60) as one, ThreadPoolExecutor(1) as pool:
                answer = pool.submit(complete, one, prompt="x", max_tokens=4096)
                _until(lambda: "lutjax_active 1" in httpx.get(f"{address}/metrics").text)
                process.send_signal(signal.SIGTERM)
                assert answer.result()["usage"]["completion_tokens"] == 4096
            assert process.wait(60) in (0, -signal.SIGTERM)
            assert "Application shutdown complete" in (tmp_path / "log").read_text()
