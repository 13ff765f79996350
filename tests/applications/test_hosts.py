"""Several processes: what they agree on, checkpoints that they write and read together, and runs that lose one of them."""

import re
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import processes
import pytest
from commands import output
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from lutjax.training import checkpoints, hosts, meshes
from lutjax.training.errors import DamagedError, HostError

pytestmark = pytest.mark.usefixtures("compilation_cache_directory")

SPECS = {
    "table": P("detectors"),
    "rows": P(None, "data"),
    "same": P(),
    "both": P(("data", "detectors")),
    "step": P(),
}


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
    """The arrays on a mesh of all devices."""
    mesh = Mesh(np.array(jax.devices()).reshape(n_data, -1), ("data", "detectors"))
    return {name: hosts.put(np.asarray(a), NamedSharding(mesh, specs[name])) for name, a in values().items()}


def save(directory, n_data, step):
    checkpoints.save(Path(directory), step, {"model": placed(n_data)}, {"name": "sharded"})


def check(directory, n_data, step):
    """Read a checkpoint in other pieces, on another mesh, and compare bits."""
    assert checkpoints.read_meta(Path(directory)) == (step, {"name": "sharded"})
    wanted = placed(n_data, {**SPECS, "table": P("data", None, "detectors"), "rows": P()})
    template = {
        name: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding) for name, a in wanted.items()
    }
    found = checkpoints.restore(Path(directory), step, "model", template)
    for name, a in values().items():
        assert found[name].sharding == wanted[name].sharding, name
        np.testing.assert_array_equal(hosts.fetch(found[name]), np.asarray(a), strict=True)


def together(directory, written_alone):
    i, n = hosts.index(), hosts.count()
    assert hosts.is_first() == (i == 0)
    hosts.barrier("here")
    assert hosts.gather({"process": i}) == [{"process": k} for k in range(n)]
    assert hosts.by_first(lambda: ("first", i)) == ("first", 0)
    assert hosts.agree(i == n - 1)
    assert not hosts.agree(False)

    def fail(error):
        raise error

    with pytest.raises(OSError if i == 0 else HostError, match="no space") as caught:
        hosts.by_first(lambda: fail(OSError(28, "no space")))
    assert hosts.shared(caught.value)

    @hosts.together()
    def fail_in_one():
        if i == 1:
            raise KeyError("name")

    with pytest.raises(
        KeyError if i == 1 else HostError, match="name" if i == 1 else "process 1: 'name'"
    ) as caught:
        fail_in_one()
    assert hosts.shared(caught.value)
    check(written_alone, 2, 1)
    path = Path(directory)
    save(path, 2, 5)
    save(path, 1, 6)
    # A damaged file is noticed by all, whoever reads it.
    files = sorted(p for p in (path / "6").rglob("*") if p.is_file() and p.name != "checkpoint.json")
    hosts.by_first(lambda: files[-1].write_bytes(b"x"))
    with pytest.raises(DamagedError, match="has changed since it was written"):
        checkpoints.read_meta(path, 6)
    messages = []
    assert checkpoints.read_meta(path, on_damage=messages.append)[0] == 5
    assert len(messages) == 1
    save(path, 4, 6)  # in its place
    check(path, 1, 6)


@pytest.mark.slow
def test_two_processes_agree_and_share_checkpoints(tmp_path: Path) -> None:
    save(tmp_path / "alone", 2, 1)
    processes.run("test_hosts:together", str(tmp_path / "run"), str(tmp_path / "alone"))
    check(tmp_path / "run", 4, 6)  # eight devices of one process
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == ["5", "6"]
    template = {name: jax.ShapeDtypeStruct(np.shape(a), np.asarray(a).dtype) for name, a in values().items()}
    for name, array in checkpoints.restore(tmp_path / "run", 5, "model", template).items():
        assert array.devices() == {jax.local_devices()[0]}
        np.testing.assert_array_equal(np.asarray(array), np.asarray(values()[name]), strict=True)


def test_one_process_needs_no_others() -> None:
    with hosts.together():
        hosts.initialize()
        hosts.barrier("alone")
        assert (hosts.count(), hosts.index(), hosts.is_first()) == (1, 0, True)
        assert hosts.gather(3) == [3]
        assert hosts.by_first(lambda: 4) == 4
        assert hosts.agree(True)
        assert not hosts.agree(False)
    assert not hosts.lost(RuntimeError("NCCL"))


def test_a_part_of_an_array_is_read_with_its_padding() -> None:
    class Noted(np.ndarray):
        def __getitem__(self, part):
            read.append(part)
            return super().__getitem__(part)

    read: list[slice] = []
    text = np.arange(1, 14, dtype=np.uint8)
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))
    lies = hosts.put(hosts.Padded(text.view(Noted), 16), NamedSharding(mesh, P("data")))
    np.testing.assert_array_equal(hosts.fetch(lies), np.pad(text, (0, 3)))
    assert sorted(part.start for part in read) == [0, 4, 8, 12]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("10.0.0.1:1",),
            "coordinator is 10.0.0.1:1, and n_processes and process are missing: .* give all three",
        ),
        (("10.0.0.1:1", 2), "process is missing"),
        (("10.0.0.1", 2, 0), r"coordinator is '10\.0\.0\.1'; it must be host:port"),
        (("10.0.0.1:1", 2, 2), "process is 2; it must be 0 to 1"),
        (("10.0.0.1:1", 0, 0), "n_processes is 0"),
    ],
)
def test_processes_that_cannot_be(arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        hosts.initialize(*arguments)


SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_PROCID": "1",
}


@pytest.mark.parametrize(
    ("changes", "arguments", "joined"),
    [
        ({}, (), (None, None, None, [], "slurm")),
        ({"SLURM_STEP_TASKS_PER_NODE": "4(x2)"}, (), (None, None, None, None, "slurm")),
        (
            {"SLURM_STEP_TASKS_PER_NODE": "4", "CUDA_VISIBLE_DEVICES": "0"},
            (),
            (None, None, None, [], "slurm"),
        ),
        ({"JAX_LOCAL_DEVICE_IDS": "0,1"}, (), (None, None, None, None, "slurm")),
        ({}, ("h:1",), ("h:1", None, None, [], "slurm")),
        ({}, ("h:1", 3, 2), ("h:1", 3, 2, [], "deactivate")),
        ({"SLURM_STEP_NUM_TASKS": "1"}, (), None),
    ],
)
def test_slurm(
    monkeypatch: pytest.MonkeyPatch, changes: dict, arguments: tuple, joined: tuple | None
) -> None:
    for name, value in {**SLURM, **changes}.items():
        monkeypatch.setenv(name, value)
    calls = []

    def initialize(*given, local_device_ids, cluster_detection_method, **_):
        calls.append((*given, local_device_ids, cluster_detection_method))

    monkeypatch.setattr("jax.distributed.initialize", initialize)
    enabled = jax.config.jax_enable_preemption_service
    try:
        hosts.initialize(*arguments)
    finally:
        jax.config.update("jax_enable_preemption_service", enabled)
    assert calls == ([] if joined is None else [joined])


SIZES = "--model lut --context 8 --features 8 --n-layers 1 --n-heads 1 --n-detectors 4 --n-anchors 2 --n-position-bits 2 --ffn-detectors 4"
SIZES = [
    *SIZES.split(),
    *[
        "--ffn-anchors",
        "3",
        "--batch-size",
        "4",
        "--schedule",
        "constant",
        "--learning-rate",
        "0.03",
        "--loss",
        "mean",
    ],
]
STEPS = ["--steps", "16", "--log-every", "4", "--eval-every", "8", "--checkpoint-every", "4"]
LOST = "process 0: another process of this run ended or cannot be reached.*continue with --resume"


@pytest.fixture(scope="module")
def whole(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on one device that was never stopped."""
    out = tmp_path_factory.mktemp("whole") / "run"
    output("train", "lm", "--text", text, "--out", out, *SIZES, *STEPS)
    return out


def check_same(out: Path, expected: Path) -> None:
    """Check that two runs have measured the same, within rounding."""
    found = []
    for folder in (out, expected):
        step, meta = checkpoints.read_meta(folder / "checkpoints")
        history = meta["history"]
        found.append((step, [point for name in ("train", "test") for point in history[name]]))
    (step, points), (wanted, others) = found
    assert step == wanted
    np.testing.assert_allclose(points, others, rtol=1e-4)
    assert (out / "finished.json").exists()


@pytest.mark.slow
def test_a_run_that_loses_a_process_goes_on_without_it(
    text: Path, whole: Path, tmp_path: Path, compilation_cache_directory: Path
) -> None:
    out = tmp_path / "run"
    words = ["train", "lm", "--text", text, "--out", out, *SIZES, *STEPS, "--mesh", "data=2,detectors=2"]
    options = {"victim": (1, "agree", 3, "kill"), "cache": compilation_cache_directory}
    with processes.Processes("lutjax", *map(str, words), **options) as started:
        (status, shown), (killed, nothing) = started.wait()
    assert (status, killed) == (1, -signal.SIGKILL)
    assert re.search(LOST, shown)
    assert "4 x cpu (data=2,detectors=2)" in shown
    assert "step 4/16" in shown
    assert "step" not in nothing
    assert checkpoints.steps(out / "checkpoints") == [4, 8]
    assert "resumed after 8 steps" in output("train", "lm", "--resume", "--out", out)
    check_same(out, whole)


def train(text: Path, out: Path, *words: str, **options) -> list[tuple[int, str]]:
    """Start a run in several processes, or go on with it: status and output of each."""
    new = ["--resume"] if (out / "checkpoints").exists() else ["--text", str(text), *SIZES, *STEPS]
    with processes.Processes("lutjax", "train", "lm", "--out", str(out), *new, *words, **options) as started:
        return started.wait()


@pytest.mark.slow
def test_four_processes_lose_one_and_two_go_on(
    text: Path, whole: Path, tmp_path: Path, compilation_cache_directory: Path
) -> None:
    cache = {"cache": compilation_cache_directory}
    start = time.monotonic()
    found = train(
        text,
        tmp_path,
        "--mesh",
        "data=2,detectors=2",
        n=4,
        devices=1,
        victim=(2, "agree", 4, "kill"),
        **cache,
    )
    assert time.monotonic() - start < processes.SECONDS / 2
    assert found[2][0] == -signal.SIGKILL
    assert all(status for status, _ in found)
    assert re.search(LOST, found[0][1])
    found = train(text, tmp_path, "--mesh", "detectors=4", **cache)
    assert [status for status, _ in found] == [0, 0]
    assert "resumed after 12 steps" in found[0][1]
    check_same(tmp_path, whole)


@pytest.mark.slow
def test_kills_wherever_processes_meet(
    text: Path, whole: Path, tmp_path: Path, compilation_cache_directory: Path
) -> None:
    kills = [
        (0, "agree", 3),
        (1, "gather", 4),
        (0, "by_first", 12),
        (1, "by_first", 13),
        (0, "gather", 4),
        (1, "fetch", 1),
    ]
    for victim in kills:
        found = train(text, tmp_path, victim=(*victim, "kill"), cache=compilation_cache_directory)
        assert found[victim[0]][0] in (0, -signal.SIGKILL)
        other = found[1 - victim[0]]
        if other[0]:  # of JAX, where the first process is lost
            assert re.search("another process of this run has ended|another task died", other[1])
    train(text, tmp_path, cache=compilation_cache_directory)
    check_same(tmp_path, whole)
    assert not list(tmp_path.glob("checkpoints/.*"))


@pytest.mark.slow
def test_a_signal_to_one_process_stops_all(
    text: Path, tmp_path: Path, compilation_cache_directory: Path
) -> None:
    words = [
        "train",
        "lm",
        "--text",
        str(text),
        "--out",
        str(tmp_path),
        *SIZES,
        "--log-every",
        "4",
        "--checkpoint-every",
        "4",
    ]
    with processes.Processes("lutjax", *words, cache=compilation_cache_directory) as started:
        deadline = time.monotonic() + processes.SECONDS
        while not checkpoints.steps(tmp_path / "checkpoints") and time.monotonic() < deadline:
            time.sleep(0.1)
        started.signal(1, signal.SIGTERM)
        (first, shown), (second, nothing) = started.wait()
    assert (first, second) == (130, 130)
    done = re.search(r"Stopped after (\d+) of \d+ steps. Continue with:\n  lutjax train lm --resume", shown)
    assert checkpoints.steps(tmp_path / "checkpoints")[-1] == int(done[1])
    assert "stopped" not in nothing


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--text", "{folder}/fox{i}.txt"],
            "Error: process 1: cannot read the text",
        ),
        (
            ["--text", "{folder}/fox0.txt", "--eval-every", "1{i}"],
            "Error: process 1 has other options or other data than process 0",
        ),
        (
            ["--text", "{folder}/fox0.txt", "--mesh", "data=3,detectors=1"],
            "Error: .*there are 4 .cpu., all of which take part",
        ),
    ],
)
def test_an_error_of_one_process_is_said_once(
    text: Path, tmp_path: Path, words: list[str], message: str
) -> None:
    (tmp_path / "fox0.txt").write_bytes(text.read_bytes())
    words = [word.replace("{folder}", str(tmp_path)) for word in words]
    with processes.Processes(
        "lutjax", "train", "lm", "--out", str(tmp_path / "run"), *SIZES, *words
    ) as started:
        (first, shown), (second, nothing) = started.wait()
    assert first
    assert second
    assert re.search(message, shown), shown
    assert "Error" not in nothing
    assert "Traceback" not in shown + nothing


@pytest.mark.slow
def test_a_process_that_fails_where_others_wait_ends_them(
    text: Path, whole: Path, tmp_path: Path, compilation_cache_directory: Path
) -> None:
    options = {"victim": (1, "agree", 3, "raise"), "cache": compilation_cache_directory}
    (first, shown), (second, other) = train(text, tmp_path, **options)
    assert first
    assert second == 1
    assert "Error: process 1: No space left on device" in other
    assert re.search(f"{LOST}|another task died", shown)
    train(text, tmp_path, cache=compilation_cache_directory)
    check_same(tmp_path, whole)


@pytest.mark.slow
def test_two_processes_generate_together(whole: Path, compilation_cache_directory: Path) -> None:
    words = ["generate", "--checkpoint", str(whole), "--prompt", "the ", "--bytes", "20"]
    outputs = processes.run("lutjax", *words, "--speed", cache=compilation_cache_directory)
    expected = output(*words)
    assert expected.startswith("the ")
    assert expected in re.sub(r"\[Gloo\].*\n", "", outputs[0])  # which comes between parts of the text
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
    "ca": "ca --experiment checkerboard --batch-size 4 --no-pictures",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_runs_of_other_kinds(
    name: str, text: Path, tmp_path: Path, compilation_cache_directory: Path
) -> None:
    words = ["train", *OTHERS[name].format(text=text).split(), *STEPS]
    output(*words, "--out", tmp_path / "alone")
    outputs = processes.run(
        "lutjax", *words, "--out", str(tmp_path / "two"), cache=compilation_cache_directory
    )
    assert "finished, as all 16 steps are done" in outputs[0]
    assert "finished" not in outputs[1]
    check_same(tmp_path / "two", tmp_path / "alone")


@pytest.mark.parametrize(
    ("hosts_of", "wanted"),
    [
        ([(0, 0), (0, 0), (1, 0), (1, 0)], {"data": 1, "detectors": 4}),  # two processes of one host
        ([(0, 0), (1, 0), (2, 1), (3, 1)], {"data": 2, "detectors": 2}),  # a process for each GPU
        ([(0, None), (0, None), (1, None), (1, None)], {"data": 2, "detectors": 2}),
    ],
)
@pytest.mark.usefixtures("without_typechecking")
def test_tables_are_divided_within_a_host(hosts_of: list, wanted: dict) -> None:
    devices = [
        SimpleNamespace(id=i, process_index=process, slice_index=host, platform="gpu", device_kind="GPU")
        for i, (process, host) in enumerate(hosts_of)
    ]
    params = {"weights": jax.ShapeDtypeStruct((8, 16, 4), jnp.float32)}
    assert meshes._best(params, devices, 4, n_processes=2, tables={"weights"}) == wanted
