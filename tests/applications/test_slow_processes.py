"""Multi-process programs: agreement, runs with a lost process, shared tables, signals.

As a program, ``test_slow_processes.py WORDS`` runs `lutjax` with these arguments, and receives a second Ctrl-C while it writes the
checkpoint for a stopped run.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import host_memory
import jax
import jax.numpy as jnp
import kills
import numpy as np
import processes
import pytest
from commands import command, output
from folders import TESTS
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from small_runs import FOX

import lutjax
from lutjax.tables.gradient import TableGradient
from lutjax.training import checkpoints, hosts, lm_runs, models, runs
from lutjax.training.errors import DamagedError, HostError


def main():
    from lutjax.cli import main as lutjax

    def save(*arguments):
        os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError("the signal did nothing")

    models.save = save
    lutjax()


SPECS = {
    "table": P("detectors"), "rows": P(None, "data"), "same": P(), "both": P(("data", "detectors")),
    "step": P(),
}  # fmt: skip


def values():
    """Arrays with all bits in use."""
    rng = np.random.default_rng(0)
    return {
        "table": rng.normal(size=(8, 6, 8)).astype(np.float32),
        "rows": np.arange(40, dtype=np.int32).reshape(5, 8),
        "same": rng.integers(0, 2**32, (2,), np.uint32),
        "both": rng.normal(size=(8, 3)).astype(np.float32).astype(jnp.bfloat16),
        "step": np.int32(7),
    }


def placed(n_data, specs=SPECS):
    """Arrays on a mesh with all devices."""
    mesh = Mesh(np.array(jax.devices()).reshape(n_data, -1), ("data", "detectors"))
    return {
        name: hosts.put(np.asarray(a), NamedSharding(mesh, specs[name]))
        for name, a in values().items()
    }


def save(directory, n_data, step):
    checkpoints.save(Path(directory), step, {"model": placed(n_data)}, {"name": "sharded"})


def check(directory, n_data, step):
    """Read a checkpoint with different sharding on another mesh, and compare bits."""
    assert checkpoints.read_meta(Path(directory)) == (step, {"name": "sharded"})
    wanted = placed(n_data, {**SPECS, "table": P("data", None, "detectors"), "rows": P()})
    template = {
        name: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding)
        for name, a in wanted.items()
    }
    actual = checkpoints.restore(Path(directory), step, "model", template)
    for name, a in values().items():
        assert actual[name].sharding == wanted[name].sharding, name
        np.testing.assert_array_equal(hosts.fetch(actual[name]), np.asarray(a), strict=True)


def together(directory, written_alone):
    i, n = hosts.index(), hosts.count()
    assert hosts.is_first() == (i == 0)
    hosts.barrier("here")
    assert hosts.gather({"process": i}) == [{"process": k} for k in range(n)]
    assert hosts.call_in_first(lambda: ("first", i)) == ("first", 0)
    assert hosts.agree(i == n - 1)
    assert not hosts.agree(False)

    def fail(error):
        raise error

    with pytest.raises(OSError if i == 0 else HostError, match="no space") as caught:
        hosts.call_in_first(lambda: fail(OSError(28, "no space")))
    assert hosts.is_shared_error(caught.value)

    @hosts.run_together()
    def fail_in_one():
        if i == 1:
            raise KeyError("name")

    with pytest.raises(
        KeyError if i == 1 else HostError, match="name" if i == 1 else "process 1: 'name'"
    ) as caught:
        fail_in_one()
    assert hosts.is_shared_error(caught.value)
    check(written_alone, 2, 1)
    path = Path(directory)
    save(path, 2, 5)
    save(path, 1, 6)
    # A damaged file is noticed by all, whoever reads it.
    files = sorted(
        p for p in (path / "6").rglob("*") if p.is_file() and p.name != "checkpoint.json"
    )
    hosts.call_in_first(lambda: files[-1].write_bytes(b"x"))
    with pytest.raises(DamagedError, match="has changed since it was written"):
        checkpoints.read_meta(path, 6)
    messages = []
    assert checkpoints.read_meta(path, on_damage=messages.append)[0] == 5
    assert len(messages) == 1
    save(path, 4, 6)  # in its place
    check(path, 1, 6)


def test_two_processes_agree_and_share_checkpoints(tmp_path):
    save(tmp_path / "alone", 2, 1)
    processes.run("test_slow_processes:together", str(tmp_path / "run"), str(tmp_path / "alone"))
    check(tmp_path / "run", 4, 6)  # eight devices of one process
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == ["5", "6"]
    template = {
        name: jax.ShapeDtypeStruct(np.shape(a), np.asarray(a).dtype) for name, a in values().items()
    }
    for name, array in checkpoints.restore(tmp_path / "run", 5, "model", template).items():
        assert array.devices() == {jax.local_devices()[0]}
        np.testing.assert_array_equal(np.asarray(array), np.asarray(values()[name]), strict=True)


SIZES = [
    "--model", "lut", "--context", "8", "--features", "8", "--n-layers", "1", "--n-heads", "1",
    "--n-detectors", "4", "--n-anchors", "2", "--n-position-bits", "2", "--ffn-detectors", "4",
    "--ffn-anchors", "3", "--batch-size", "4", "--schedule", "constant", "--learning-rate", "0.03",
    "--loss", "mean",
]  # fmt: skip
STEPS = ["--steps", "16", "--log-every", "4", "--eval-every", "8", "--checkpoint-every", "4"]
LOST = "process 0: another process of this run ended or cannot be reached.*continue with --resume"


@pytest.fixture(scope="module")
def whole(text, tmp_path_factory):
    """Uninterrupted single-device run."""
    out = tmp_path_factory.mktemp("whole") / "run"
    output("train", "lm", "--text", text, "--out", out, *SIZES, *STEPS)
    return out


def check_same(out, expected):
    """Check that two runs have equal measurements, within rounding."""
    actual = []
    for folder in (out, expected):
        step, meta = checkpoints.read_meta(folder / "checkpoints")
        history = meta["history"]
        actual.append((step, [point for name in ("train", "test") for point in history[name]]))
    (step, points), (wanted, others) = actual
    assert step == wanted
    np.testing.assert_allclose(points, others, rtol=1e-4)
    assert (out / "finished.json").exists()


def train(text, out, *words, **options):
    """Start or resume a run in several processes; return each status and output."""
    new = ["--resume"] if (out / "checkpoints").exists() else ["--text", str(text), *SIZES, *STEPS]
    with processes.Processes(
        "lutjax", "train", "lm", "--out", str(out), *new, *words, **options
    ) as started:
        return started.wait()


def test_a_run_that_loses_a_process_goes_on_without_it(
    text, whole, tmp_path, compilation_cache_directory
):
    options = {"victim": (1, "agree", 3, "kill"), "cache": compilation_cache_directory}
    result = train(text, tmp_path, "--mesh", "data=2,detectors=2", **options)
    (status, shown), (killed, nothing) = result
    assert (status, killed) == (1, -signal.SIGKILL)
    assert re.search(LOST, shown)
    assert "4 x cpu (data=2,detectors=2)" in shown
    assert "step 4/16" in shown
    assert "step" not in nothing
    assert checkpoints.steps(tmp_path / "checkpoints") == [4, 8]
    assert "resumed after 8 steps" in output("train", "lm", "--resume", "--out", tmp_path)
    check_same(tmp_path, whole)


def test_kills_wherever_processes_meet(text, whole, tmp_path, compilation_cache_directory):
    for i, name, count in (
        (0, "agree", 3),
        (1, "gather", 4),
        (0, "call_in_first", 12),
        (1, "call_in_first", 13),
        (1, "fetch", 1),
    ):
        result = train(
            text, tmp_path, victim=(i, name, count, "kill"), cache=compilation_cache_directory
        )
        assert result[i][0] in (0, -signal.SIGKILL)
        status, shown = result[1 - i]
        if status:  # of JAX, where the first process is lost
            assert re.search("another process of this run ended|another task died", shown)
    train(text, tmp_path, cache=compilation_cache_directory)
    check_same(tmp_path, whole)
    assert not list(tmp_path.glob("checkpoints/.*"))


def test_a_signal_to_one_process_stops_all(text, tmp_path, compilation_cache_directory):
    words = [
        "--text",
        str(text),
        "--out",
        str(tmp_path),
        *SIZES,
        "--log-every=4",
        "--checkpoint-every=4",
    ]
    with processes.Processes(
        "lutjax", "train", "lm", *words, cache=compilation_cache_directory
    ) as started:
        deadline = time.monotonic() + processes.SECONDS
        while not checkpoints.steps(tmp_path / "checkpoints") and time.monotonic() < deadline:
            time.sleep(0.1)
        started.signal(1, signal.SIGTERM)
        (first, shown), (second, nothing) = started.wait()
    assert (first, second) == (130, 130)
    done = re.search(
        r"Stopped after (\d+) of \d+ steps. Continue with:\n  lutjax train lm --resume", shown
    )
    assert checkpoints.steps(tmp_path / "checkpoints")[-1] == int(done[1])
    assert "stopped" not in nothing


@pytest.mark.parametrize(("words", "message"), [
    ("--text {folder}/fox{i}.txt", "process 1: cannot read the text"),
    ("--text {folder}/fox0.txt --eval-every 1{i}", "process 1 has other options or data than"),
    ("--text {folder}/fox0.txt --mesh data=3,detectors=1",
        ".*there are 4 .cpu., all of which take part"),
])  # fmt: skip
def test_an_error_of_one_process_is_said_once(text, tmp_path, words, message):
    (tmp_path / "fox0.txt").write_bytes(text.read_bytes())
    words = [*SIZES, *words.replace("{folder}", str(tmp_path)).split()]
    with processes.Processes(
        "lutjax", "train", "lm", "--out", str(tmp_path / "run"), *words
    ) as started:
        (first, shown), (second, nothing) = started.wait()
    assert first
    assert second
    assert re.search(f"Error: {message}", shown), shown
    assert "Error" not in nothing
    assert "Traceback" not in shown + nothing


def test_two_processes_generate_together(whole, compilation_cache_directory):
    words = ["generate", "--checkpoint", str(whole), "--prompt", "the ", "--bytes", "20"]
    outputs = processes.run("lutjax", *words, "--speed", cache=compilation_cache_directory)
    expected = output(*words)
    assert expected.startswith("the ")
    assert expected in re.sub(
        r"\[Gloo\].*\n", "", outputs[0]
    )  # which comes between parts of the text
    assert "the " not in outputs[1]
    assert [len(re.findall("bytes a second", text)) for text in outputs] == [1, 0]
    with processes.Processes("lutjax", *words, "--integers", "int16") as started:
        (first, shown), (second, nothing) = started.wait()
    assert first
    assert second
    assert "--integers runs on one device; start one process" in shown
    assert "integers" not in nothing


OTHERS = {
    "gpt": "lm --text {text} --model gpt --feed-forward lut --context 8 --features 8 --n-layers 1 --n-heads 1 --batch-size 4 "
    "--select-every 4 --validate --microbatches 2",
    "digits": "digits --layers 200,100 --batch-size 16",
    "ca": "ca --experiment checkerboard --runs 1 --batch-size 4 --no-pictures",
}


@pytest.mark.parametrize("name", OTHERS)
def test_runs_of_other_kinds(name, text, tmp_path, compilation_cache_directory):
    words = ["train", *OTHERS[name].format(text=text).split(), *STEPS]
    output(*words, "--out", tmp_path / "alone")
    outputs = processes.run(
        "lutjax", *words, "--out", str(tmp_path / "two"), cache=compilation_cache_directory
    )
    assert "finished, as all 16 steps are done" in outputs[0]
    assert "finished" not in outputs[1]
    check_same(tmp_path / "two", tmp_path / "alone")


def one_of_two_processes(folder):
    """Train 4 steps, with a checkpoint after 2, and test."""
    run = host_memory.run_of(memory_depth=1)
    run.divide()
    assert len(host_memory.table_of(run).rows) == 50
    state, losses = run.init(), []
    for i in range(4):
        if i == 2:
            nothing = runs.Source(None, 0, "")
            record = lm_runs.Record(
                run.config, run.training, nothing, 0.0, {}, history=runs.History()
            )
            models.save(Path(folder), 2, state, record, run)
        state, loss = run.advance(state, i, 1)
        losses.append(float(loss))
    result = {"losses": losses, "test": run.evaluate(state, host_memory.TEXT[:300])}
    table = host_memory.table_of(run)
    zeros = hosts.put(np.zeros((2, 1)), NamedSharding(run.mesh, P("data")))
    with pytest.raises(
        ValueError, match="is divided over devices of other processes; jit the step"
    ):
        table.update(TableGradient(None, zeros, None, None, table.shape, np.float32), 0.1)
    if hosts.is_first():
        (Path(folder) / "found.json").write_text(json.dumps(result))


def test_two_processes_share_the_rows(tmp_path, compilation_cache_directory):
    options = {"devices": 1, "cache": compilation_cache_directory}
    processes.run("test_slow_processes:one_of_two_processes", str(tmp_path), **options)
    actual = json.loads((tmp_path / "found.json").read_text())
    run = host_memory.run_of(memory_depth=1)
    expected, _ = host_memory.trained(run, 4)
    np.testing.assert_allclose(actual["losses"], expected, rtol=1e-5)
    state = models.restore(tmp_path, 2, run)
    for i in (2, 3):
        state, loss = run.advance(state, i, 1)
        assert float(loss) == pytest.approx(expected[i], rel=1e-5)
    assert actual["test"] == pytest.approx(run.evaluate(state, host_memory.TEXT[:300]), rel=1e-5)
    shares = sorted(path.name for path in (tmp_path / "checkpoints" / "2" / "host" / "0").iterdir())
    assert shares == ["0", "50"]


def test_a_run_with_tables_on_the_host_that_was_killed_ends_as_if_it_had_not(
    tmp_path, compilation_cache_directory
):
    words, cache = host_memory.words_of(tmp_path), {"cache": compilation_cache_directory}
    whole, out, two = (tmp_path / name for name in ("whole", "killed", "two"))
    output(*words, "--out", whole)
    assert kills.run(out, words, compilation_cache_directory, r"^/checkpoints/\.8\.tmp/host", 3)
    assert "resumed after 4 steps" in output("train", "lm", "--resume", "--out", out)
    for name in ("curves.csv", "sample.txt"):
        assert (out / name).read_bytes() == (whole / name).read_bytes()
    one, other = (
        np.load(path / "checkpoints" / "12" / "host" / "0" / "rows.npy") for path in (whole, out)
    )
    np.testing.assert_array_equal(one, other)
    # Rows that never moved are in no checkpoint.
    ids = out / "checkpoints" / "12" / "host" / "0" / "ids.npy"
    assert len(one) == len(np.load(ids)) < 6 * 300
    model, _ = lm_runs.load_model(out)
    prompt = ("--prompt", "ab", "--bytes", "5")
    assert output("generate", out, *prompt).startswith("ab")
    with pytest.raises(ValueError, match=r"weights lies in the memory of the host"):
        lutjax.save(model, tmp_path / "bundle")
    np.save(ids, np.arange(3))
    assert "ids.npy has changed since it was written" in command("generate", out, *prompt).output
    victim = (1, "agree", 3, "kill")
    with processes.Processes(
        "lutjax", *words, "--out", str(two), victim=victim, **cache
    ) as started:
        assert any(status for status, _ in started.wait())
    resumed = processes.run("lutjax", "train", "lm", "--resume", "--out", str(two), **cache)
    assert "resumed after " in resumed[0]
    lines = ((folder / "curves.csv").read_text().splitlines()[1:] for folder in (two, whole))
    np.testing.assert_allclose(
        *([float(line.split(",")[2]) for line in of] for of in lines), rtol=1e-5
    )
    outputs = processes.run("lutjax", "generate", str(two), *prompt, **cache)
    text = re.sub(r"\[Gloo\].*\n", "", outputs[0])  # which comes between parts of the text
    assert output("generate", two, *prompt) in text


GPT = [
    "--model", "gpt", "--feed-forward", "dense", "--context", "8", "--features", "8", "--n-layers", "1",
    "--n-heads", "1", "--batch-size", "2", "--steps", "1000000", "--log-every", "1", "--eval-every",
    "1000000", "--checkpoint-every", "1000000",
]  # fmt: skip
SECONDS = 120


@contextmanager
def running(program, out, cache):
    """Separate run process after its first step."""
    text = out.parent / "fox.txt"
    text.write_bytes(FOX)
    environment = {
        **os.environ,
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "PYTHONPATH": os.pathsep.join([str(TESTS / "support"), os.environ.get("PYTHONPATH", "")]),
        "PYTHONUNBUFFERED": "1",
    }
    words = [sys.executable, *program, "train", "lm", *GPT, "--text", str(text), "--out", str(out)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(words, env=environment, **pipes) as process:
        try:
            while not process.stdout.readline().startswith("step"):
                assert process.poll() is None, process.stderr.read()
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("how", ["hangup", "closed pipe"])
def test_a_run_saves_and_stops(how, tmp_path, compilation_cache_directory):
    with running(["-m", "lutjax"], tmp_path / "run", compilation_cache_directory) as process:
        if how == "hangup":
            for _ in range(3):  # the kernel sends one, and the shell another
                process.send_signal(signal.SIGHUP)
            shown, errors = process.communicate(timeout=SECONDS)
            assert "Continue with:\n  lutjax train lm --resume --out" in shown
        else:
            process.stdout.close()
            errors = process.stderr.read()
        assert process.wait(SECONDS) == 130
        assert not errors
    (saved,) = (tmp_path / "run" / "checkpoints").iterdir()
    assert int(saved.name) > 0


def test_a_second_signal_while_saving_is_one_line(tmp_path, compilation_cache_directory):
    with running([__file__], tmp_path / "run", compilation_cache_directory) as process:
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=SECONDS)
        assert process.returncode == 130
    again = f"lutjax train lm --resume --out {tmp_path / 'run'}"
    assert (
        errors
        == f"Stopped immediately. Checkpoints are intact: if there is one, continue with: {again}\n"
    )


if __name__ == "__main__":
    main()
