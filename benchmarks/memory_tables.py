"""Published memory tables.

Run `python benchmarks/memory_tables.py {make,open,resident,gather,train,share,larger,beside}
--folder DIR`.

- `make`: writes a table of `--gigabytes` of random rows in the layout of `--family`: names, dtypes
  and shapes of the published checkpoint. `--sparse` leaves the rows out of the disk: they read as
  zeros.
- `open`: seconds until a table is open, with its file out of the page cache.
- `resident`: growth of the resident memory by reads of 1 % and 10 % of the rows, relative to the
  bytes of these rows.
- `gather`: microseconds until the 24 rows of one token are on the device, decoded, inside a jitted
  function with a projection; and milliseconds per batch. Compares a mapped table to a `HostTable`
  of float32 rows in memory.
- `train`: milliseconds per training step for both, with a prefetch queue.
- `share`: proportional set size (PSS) of `--processes` servers (`lutjax serve`) of one memory of
  `--gigabytes`, after `--requests` requests of 64 random tokens to each: one copy on the host.
- `larger`: trains rows for `--steps` steps, kills the process (SIGKILL) at a random step, resumes,
  and compares all bits to an uninterrupted run.
- `beside`: milliseconds per training step and per token of `generate` for a GPT whose memory is a
  sparse table of `--gigabytes` in the layout of Qwen3.8-Flash-Next, relative to the same GPT with a
  small table on the device. The rows that the text reads are written. Prints JSON lines.
"""

import contextlib
import functools
import json
import math
import os
import random
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from harness import parse, time_calls  # beside this file

import lutjax
from lutjax import optim
from lutjax.files.atomic import replace_folder
from lutjax.models import GPTConfig
from lutjax.optim.host import HostTable, RowPrefetcher, provide_rows
from lutjax.tables.overlays import read_overlay
from lutjax.training.lm import Run, TrainingConfig
from lutjax.training.text import load_text

FAMILIES = ("engram", "ple", "longcat")
COLUMNS = {"engram": 24, "ple": 16, "longcat": 12}
WIDTHS = {"engram": 256, "ple": 160, "longcat": 256}
SHARDS = 128
PREFIX = "model.language_model.layers.1.ple.ple_embedding.ngram_embedding."
CHUNK = 1 << 24
TOKENS = 2048


def primes(least: int, count: int) -> list[int]:
    """Return the first primes from `least` on."""
    found: list[int] = []
    n = least
    while len(found) < count:
        if n > 1 and all(n % p for p in range(2, math.isqrt(n) + 1)):
            found.append(n)
        n += 1
    return found


def tensors_of(family: str, gigabytes: float) -> dict[str, tuple[str, list[int]]]:
    """Return a family's dtypes and shapes by published tensor name."""
    n_bytes, width, columns = gigabytes * 1e9, WIDTHS[family], COLUMNS[family]
    if family == "engram":
        rows = sum(primes(int(n_bytes / (264 * columns)), columns))
        prefix = "layers.1.engram.embed."
        return {
            f"{prefix}weight": ("F8_E4M3", [rows, 256]),
            f"{prefix}scale": ("F8_E8M0", [rows, 8]),
        }
    if family == "ple":
        rows = sum(primes(int(n_bytes / (width * columns)), columns))
        part = -(-rows // SHARDS)
        shards = {f"{PREFIX}shard_{i}.weight": ("F8_E4M3", [part, width]) for i in range(SHARDS)}
        return {**shards, f"{PREFIX}weight_scale": ("BF16", [1])}
    first = int(n_bytes / (2 * width * columns)) // 2 * 2
    names = [f"model.ngram_embeddings.embedders.{i}.weight" for i in range(columns)]
    return {name: ("BF16", [first + 2 * i + 1, width]) for i, name in enumerate(names)}


def make(folder: Path, family: str, gigabytes: float, sparse: bool) -> Path:
    """Write a table, and return its file."""
    return write_checkpoint(folder, tensors_of(family, gigabytes), sparse)


def write_checkpoint(folder: Path, tensors: dict[str, tuple[str, list[int]]], sparse: bool) -> Path:
    """Write tensors, and return their file.

    All of a sparse file but the scale of a table are zeros.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path, header, at = folder / "model-00001-of-00001.safetensors", dict[str, Any](), 0
    for name, (dtype, shape) in tensors.items():
        stop = at + math.prod(shape) * (2 if dtype == "BF16" else 1)
        header[name], at = {"dtype": dtype, "shape": shape, "data_offsets": [at, stop]}, stop
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    rng = np.random.default_rng(0)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name, (dtype, shape) in tensors.items():
            first, stop = header[name]["data_offsets"]
            if name.endswith("weight_scale"):
                file.write(struct.pack("<H", 0x3C00))  # 2**-7
            elif sparse:
                file.seek(stop - first, os.SEEK_CUR)
            for i in range(0, 0 if sparse or shape == [1] else stop - first, CHUNK):
                file.write(_random_bytes(rng, dtype, min(CHUNK, stop - first - i)))
        file.truncate(8 + len(text) + at)
    index = {"weight_map": dict.fromkeys(tensors, path.name)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


def _random_bytes(rng: np.random.Generator, dtype: str, n_bytes: int) -> bytes:
    if dtype == "BF16":
        return bytes(
            (rng.standard_normal(n_bytes // 2, np.float32).view(np.uint32) >> 16).astype(np.uint16)
        )
    least, most = (118, 122) if dtype == "F8_E8M0" else (0, 127)  # without NaN
    codes = rng.integers(least, most, n_bytes, np.uint8)
    return bytes(
        codes if dtype == "F8_E8M0" else codes | rng.integers(0, 2, n_bytes, np.uint8) << 7
    )


def table_of(folder: Path, **options: Any) -> HostTable:
    """Return the mapped table in a folder from `make`."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    names = [(folder / file, name) for name, file in index.items()]
    if any("engram" in name for name in index):
        return HostTable.mapped(
            names[:1], codec="e4m3_ue8m0", width=256, scales=names[1:], **options
        )
    if any("ple" in name for name in index):
        return HostTable.mapped(names[:-1], codec="e4m3", width=160, scales=names[-1:], **options)
    return HostTable.mapped(names, codec="bfloat16", width=256, **options)


def columns_of(table: HostTable) -> int:
    """Return the rows read by a token."""
    codec = table.description["codec"]  # type: ignore[attr-defined]
    return {"e4m3_ue8m0": 24, "e4m3": 16, "bfloat16": 12}[codec]


def field_of(path: str, name: str) -> int:
    """Return a summed field in a /proc file, in bytes."""
    return 1024 * sum(
        int(n) for n in re.findall(rf"^{name}:\s+(\d+)", Path(path).read_text(), re.M)
    )


def uncache(folder: Path) -> None:
    """Remove a folder's files from the page cache."""
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure_open(folder: Path) -> None:
    table_of(folder)  # imports
    for what in ("cold", "cached"):
        if what == "cold":
            uncache(folder)
        start = time.perf_counter()
        table = table_of(folder)
        seconds = time.perf_counter() - start
        size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        print(
            f"open, {what}: {1e3 * seconds:.1f} ms for {table.shape[1]:,} rows, {size / 1e9:.2f} GB"
        )


def measure_resident(folder: Path) -> None:
    for share in (0.01, 0.1):
        table = table_of(folder)
        rng = np.random.default_rng(1)
        ids = rng.integers(0, table.shape[1], (int(share * table.shape[1]), 1, 1))
        table.fetch(ids[:1])
        before = field_of("/proc/self/status", "VmRSS")
        ids = np.unique(ids)
        records = np.empty((1, len(ids), table.record[0]), np.uint8)
        for first in range(0, len(ids), 1 << 16):
            part = ids[first : first + (1 << 16)].reshape(-1, 1, 1)
            table.fetch(part, records[:, first : first + len(part)])
        grown = field_of("/proc/self/status", "VmRSS") - before
        print(
            f"resident: {len(ids):,} rows of {records.nbytes / 1e6:.1f} MB grow it by "
            f"{grown / 1e6:.1f} MB, {grown / records.nbytes:.2f} times"
        )


def in_memory(table: HostTable) -> HostTable:
    """Return a float32 table in memory with the same rows."""
    other = HostTable(table.shape, np.float32, jax.nn.initializers.zeros, table.name)
    other.draw(jax.random.key(0))
    for first in range(0, table.shape[1], 1 << 16):
        ids = np.arange(first, min(first + (1 << 16), table.shape[1]))
        other.weights[0, ids] = table.gather(ids.reshape(-1, 1, 1))[0]
    return other


def in_turns(
    calls: dict[str, Callable[[], Any]], repeats: int, rounds: int = 7
) -> dict[str, float]:
    """Return median seconds per call, timed in turns."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            found[name].append(float(np.median(time_calls(call, repeats))))
    return {name: float(np.median(times)) for name, times in found.items()}


def report(what: str, found: dict[str, float], unit: float, name: str) -> None:
    mapped, memory = found["mapped"], found["memory"]
    print(
        f"{what}: mapped {unit * mapped:.3f} {name}, in memory {unit * memory:.3f} {name}, "
        f"{mapped / memory:.3f} times"
    )


def measure_gather(folder: Path, repeats: int) -> None:
    """Compare single-token reads, with a projection, and batch reads."""
    table = table_of(folder)
    tables = {"mapped": table, "memory": in_memory(table)}
    columns, width = columns_of(table), table.shape[2]
    kernel = jax.random.normal(jax.random.key(1), (columns * width, 2560))
    rng = np.random.default_rng(2)

    def token(table: HostTable) -> Callable[[], Any]:
        @jax.jit
        def read(ids: Any, kernel: Any) -> Any:
            rows = table.weighted_lookup(ids, jnp.ones(ids.shape))
            return rows.reshape(1, -1) @ kernel

        many = [jnp.asarray(rng.integers(0, table.shape[1], (columns, 1, 1))) for _ in range(512)]
        turns = iter(range(1 << 60))
        return lambda: jax.block_until_ready(read(many[next(turns) % len(many)], kernel))

    for call in (calls := {name: token(t) for name, t in tables.items()}).values():
        for _ in range(512):
            call()
    report("one token", in_turns(calls, repeats), 1e6, "us")
    ids = rng.integers(0, table.shape[1], (TOKENS * columns, 1, 1))
    for each in ("fetch", "gather"):
        found = in_turns(
            {name: functools.partial(getattr(t, each), ids) for name, t in tables.items()}, 2, 3
        )
        report(f"{each} of {TOKENS} tokens on the CPU", found, 1e3, "ms")


def train_loop(
    table: HostTable, n_columns: int, tokens: int, depth: int = 1
) -> tuple[Any, Callable[[int], Any]]:
    """Return a prefetch queue, and a training step that fits projected rows to a target."""
    table.start(optim.RowAdagrad())
    kernel = jax.random.normal(jax.random.key(1), (n_columns * table.shape[2], 512)) / 64

    def ids(step: int) -> dict[str, np.ndarray]:
        shape = (tokens * n_columns, 1, 1)
        return {
            "memory": np.random.default_rng(step)
            .integers(0, table.shape[1], shape)
            .astype(np.int32)
        }

    ahead = RowPrefetcher({"memory": table}, ids, lambda step: np.float32(0.01), depth)

    @jax.jit
    def step(rows: Any, index: Any) -> Any:
        def loss(rows: Any) -> Any:
            with provide_rows({table: rows["memory"]}):
                found = table.weighted_lookup(index, jnp.ones(index.shape))
            y = found.reshape(tokens, -1) @ kernel
            return jnp.mean(jnp.square(jnp.tanh(y) - 0.5))

        return optim.value_and_grad(loss)({"memory": table.decode(rows["memory"])})

    def run(number: int) -> Any:
        batch = ahead.batch(number)
        loss, gradients = step(batch.rows, batch.ids["memory"])
        ahead.update(number, gradients)
        return loss

    return ahead, run


def measure_train(folder: Path, steps: int) -> None:
    found = {}
    for name in ("memory", "mapped", "memory", "mapped"):
        table = table_of(folder, trains=True)
        columns = columns_of(table)
        ahead, run = train_loop(table if name == "mapped" else in_memory(table), columns, TOKENS)
        run(0)
        ahead.wait()
        start = time.perf_counter()
        for number in range(1, 1 + steps):
            loss = run(number)
        jax.block_until_ready(loss)
        ahead.wait()
        seconds = (time.perf_counter() - start) / steps
        found[name] = min(found.get(name, math.inf), seconds)
    report(f"training step of {TOKENS} tokens", found, 1e3, "ms")


def measure_share(folder: Path, gigabytes: float, n_processes: int, n_requests: int) -> None:
    """Start servers of one memory, let each answer requests for random n-grams, and add their PSS."""
    bundle = make_beside(folder / "served", gigabytes, np.arange(256, dtype=np.uint8))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        first = free.getsockname()[1]
    ports = range(first, first + n_processes)
    words = [sys.executable, "-m", "lutjax", "serve", str(bundle), "--port"]
    processes = [
        subprocess.Popen([*words, str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for port in ports
    ]

    def ask(port: int) -> None:
        url, rng = f"http://127.0.0.1:{port}", np.random.default_rng(port)
        while True:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health"):
                break
            time.sleep(0.5)
        vectors = np.ones((64, 16)).tolist()
        for _ in range(n_requests):
            body = json.dumps(
                {"tokens": rng.integers(0, 256, 64).tolist(), "vectors": vectors}
            ).encode()
            with urllib.request.urlopen(urllib.request.Request(f"{url}/v1/memory", body)) as answer:
                assert len(json.load(answer)["update"]) == 64

    try:
        with ThreadPoolExecutor(n_processes) as threads:
            list(threads.map(ask, ports))
        found = [f"/proc/{process.pid}/smaps_rollup" for process in processes]
        shown = {
            name.lower(): [field_of(path, name) / 1e9 for path in found]
            for name in ("Pss", "Pss_File", "Rss")
        }
        one = sum(a.stat().st_size for a in bundle.parent.glob("*.safetensors")) / 1e9
        tell(what="servers", processes=n_processes, requests=n_requests, file=one, **{
            name: round(sum(each), 3) for name, each in shown.items()
        }, pss_file_each=[round(each, 3) for each in shown["pss_file"]])  # fmt: skip
    finally:
        for process in processes:
            process.terminate()


def work(folder: Path, out: Path, steps: int, every: int, die: int) -> None:
    """Train from the latest checkpoint in `out`, and die by SIGKILL before a step, if it is not 0."""
    table = table_of(folder, trains=True)
    ahead, run = train_loop(table, columns_of(table), 256, depth=0)
    saved = sorted(out.glob("step-*"), key=lambda path: int(path.name[5:]))
    first = int(saved[-1].name[5:]) if saved else 0
    if saved:
        table.load(saved[-1])
    for number in range(first, steps):
        if number + 1 == die:
            os.kill(os.getpid(), signal.SIGKILL)
        run(number)
        if (number + 1) % every == 0 or number + 1 == steps:
            ahead.wait()
            with replace_folder(out / f"step-{number + 1}") as unfinished:
                shutil.rmtree(unfinished, ignore_errors=True)
                table.save(unfinished)


def measure_larger(folder: Path, steps: int) -> None:
    """Compare an uninterrupted run to a killed and resumed run."""
    path = next(folder.glob("*.safetensors"))
    before, die = path.stat(), random.randrange(2, steps)
    total = field_of("/proc/meminfo", "MemTotal")
    print(
        f"larger: a file of {before.st_size / 1e9:.1f} GB ({before.st_blocks * 512 / 1e9:.2f} GB "
        f"on the disk), memory {total / 1e9:.1f} GB"
    )

    def start(out: str, die: int) -> int:
        words = [
            sys.executable,
            __file__,
            "work",
            "--folder",
            str(folder),
            "--out",
            out,
            "--steps",
            str(steps),
            "--die",
            str(die),
        ]
        return subprocess.run(words, check=False).returncode

    assert start("whole", 0) == 0
    assert start("killed", die) == -signal.SIGKILL
    assert start("killed", 0) == 0
    one, two = (read_overlay(folder / out / f"step-{steps}") for out in ("whole", "killed"))
    assert one.digest == two.digest
    assert {name: a.tobytes() for name, a in one.arrays.items()} == {
        name: a.tobytes() for name, a in two.arrays.items()
    }
    after = path.stat()
    assert (before.st_size, before.st_mtime_ns) == (after.st_size, after.st_mtime_ns)
    print(
        f"larger: {steps} steps, killed before step {die}, resumed: {len(one.ids):,} updated rows "
        f"and their state are equal in all bits ({one.digest[:16]})"
    )


def make_beside(folder: Path, gigabytes: float, text: np.ndarray) -> Path:
    """Write a sparse checkpoint for tokens that are bytes, with random rows for the n-grams of a text; return its bundle."""
    folder.mkdir(parents=True, exist_ok=True)
    columns, width, features = COLUMNS["ple"], WIDTHS["ple"], 16
    config = {
        "ple_layer_ids": [2],
        "ngram_size": 3,
        "heads_per_ngram": columns // 2,
        "ple_embed_dim": columns * width,
    }
    config |= {
        "ngram_vocab_size_base": int(gigabytes * 1e9 / (columns * width)),
        "vocab_size": 256,
        "eos_token_id": 0,
    }
    config |= {
        "hc_count": 1,
        "hidden_size": features,
        "ple_conv_kernel_size": 1,
        "rms_norm_eps": 1e-6,
    }
    layout = lutjax.NgramLayout.qwen(config)
    prefix = PREFIX.removesuffix("ple_embedding.ngram_embedding.")
    shapes: dict[str, list[int]] = {
        "key_proj": [features, columns * width],
        "value_proj": [features, columns * width],
    }
    shapes |= {
        "conv1d": [features, 1, 1],
        **{f"norm_{name}": [features] for name in ("query", "key", "conv")},
    }
    tensors = {f"{prefix}{name}.weight": ("BF16", shape) for name, shape in shapes.items()}
    tensors[f"{PREFIX}weight_scale"] = ("BF16", [1])
    tensors[f"{PREFIX}shard_0.weight"] = ("F8_E4M3", [layout.n_rows, width])
    path = write_checkpoint(folder, tensors, sparse=True)
    rows = np.unique(layout.rows(text.astype(np.int64)))
    start = path.stat().st_size - layout.n_rows * width
    table = np.memmap(path, np.uint8, "r+", start, (layout.n_rows, width))
    table[rows] = np.random.default_rng(0).integers(0x20, 0x40, (len(rows), width), np.uint8)
    table.flush()
    (folder / "config.json").write_text(json.dumps(config))
    shutil.rmtree(folder / "bundle", ignore_errors=True)
    lutjax.convert.convert_memory(folder, folder / "bundle", family="ple")
    size, blocks = path.stat().st_size, path.stat().st_blocks * 512
    tell(
        what="table",
        gigabytes=size / 1e9,
        rows=layout.n_rows,
        written=len(rows),
        on_disk=blocks / 1e9,
    )
    return folder / "bundle"


def tell(**facts: Any) -> None:
    rounded = {
        name: round(value, 4) if isinstance(value, float) else value
        for name, value in facts.items()
    }
    print(json.dumps(rounded), flush=True)


def build_pair(
    bundle: Path, text: np.ndarray, features: int, layers: int, small: bool
) -> dict[str, Run]:
    """Return runs of a GPT with a small table on the device, and with the mapped table."""
    sizes: Any = {
        "features": features,
        "n_layers": layers,
        "n_heads": features // 64,
        "feed_forward": "dense",
    }
    sizes |= {
        "context": 64 if small else 512,
        "dtype": "float32" if small else "bfloat16",
        "memory_layers": (1,),
    }
    memory: Any = {
        "orders": (2, 3),
        "heads": COLUMNS["ple"] // 2,
        "width": WIDTHS["ple"],
        "rows": 1 << 14,
    }
    own = GPTConfig(
        memory=True, **sizes, **{f"memory_{name}": value for name, value in memory.items()}
    )
    configs = {"device": (own, 0), "mapped": (GPTConfig(memory_base=str(bundle), **sizes), 2)}
    rates: Any = {"optimizer": "adamw", "learning_rate": 1e-4, "memory_optimizer": "row_adagrad"}
    rates |= {"steps": 10_000, "batch_size": 8 if small else 16}
    return {
        name: Run(config, TrainingConfig(memory_depth=depth, **rates), text)
        for name, (config, depth) in configs.items()
    }


def measure_beside(folder: Path, options: Any) -> None:
    text = load_text(None, context=512).train
    bundle = make_beside(folder, options.gigabytes, text)
    small = jax.default_backend() == "cpu"
    tell(what="device", device=jax.devices()[0].device_kind)
    for features, layers in sizes_of(options.trained):
        measure_beside_steps(
            build_pair(bundle, text, features, layers, small), options.turns, 3 if small else 20
        )
    for features, layers in sizes_of(options.decoded):
        measure_beside_tokens(
            build_pair(bundle, text, features, layers, small), options.turns, 16 if small else 64
        )


def sizes_of(words: Sequence[str]) -> list[tuple[int, int]]:
    """Return features and layers."""
    return [
        (int(features), int(layers)) for features, layers in (word.split("x") for word in words)
    ]


def measure_beside_steps(runs: dict[str, Run], turns: int, steps: int) -> None:
    states = {name: run.init() for name, run in runs.items()}
    found: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(1 + turns):
        for name, run in runs.items():
            start = time.perf_counter()
            states[name], loss = run.advance(states[name], turn * steps, steps)
            float(loss)
            if turn:  # the first compiles
                found[name].append((time.perf_counter() - start) / steps)
    facts = {
        "parameters": runs["device"].structure.n_parameters(),
        "texts": runs["device"].training.batch_size,
    }
    report_beside("training step", found, **facts)


def measure_beside_tokens(runs: dict[str, Run], turns: int, n: int) -> None:
    models: dict[str, Any] = {
        name: run.structure.model(*run.structure.init(0)) for name, run in runs.items()
    }
    part = np.asarray(runs["device"]._train[: 16 * 64]).astype(np.int32).reshape(16, 64)[:, :16]
    for texts in (1, 16):
        found: dict[str, list[float]] = {name: [] for name in models}
        for turn in range(1 + turns):
            for name, model in models.items():
                seconds = []
                for length in (1, 1 + n):
                    start = time.perf_counter()
                    model.generate(part[:texts], length, key=jax.random.key(0)).block_until_ready()
                    seconds.append(time.perf_counter() - start)
                if turn:
                    found[name].append((seconds[1] - seconds[0]) / n)
        parameters = runs["device"].structure.n_parameters()
        report_beside("token of generate", found, texts=texts, parameters=parameters)


def report_beside(what: str, found: dict[str, list[float]], **facts: Any) -> None:
    least, middle = (
        {name: 1e3 * f(times) for name, times in found.items()} for f in (min, np.median)
    )
    ratio = least["mapped"] / least["device"]
    shown = {f"{name}_ms": least[name] for name in found} | {
        f"{name}_median_ms": float(middle[name]) for name in found
    }
    tell(
        what=what,
        **facts,
        **shown,
        ratio=ratio,
        ratio_of_medians=float(middle["mapped"] / middle["device"]),
    )


COMMANDS = ("make", "open", "resident", "gather", "train", "share", "larger", "beside")


def main() -> None:
    options = parse(
        __doc__,
        "commands",
        commands=(dict.fromkeys([*COMMANDS, "work"]), "default: all measurements of a table"),
        folder=(str, "folder of the table"),
        family=(FAMILIES, "layout of the table"),
        gigabytes=(1.0, "size of the table"),
        sparse=(False, "rows of zeros that take no space on the disk"),
        repeats=(200, "repetitions for single tokens"),
        steps=(20, "training steps"),
        processes=(4, "servers that share a table"),
        requests=(1500, "requests to each server"),
        out=("", "with work: name of the folder of checkpoints"),
        turns=(4, "with beside: repetitions"),
        trained=(["768x12", "2560x14"], "with beside: features and layers of GPTs for steps"),
        decoded=(["768x12", "4096x16"], "with beside: features and layers of GPTs for tokens"),
        every=(10, "with work: steps between checkpoints"),
        die=(0, "with work: number of the step that is never made"),
    )
    folder = Path(options.folder)
    every = [name for name in COMMANDS if name not in ("make", "larger", "beside")]
    commands: dict[str, Callable[[], Any]] = {
        "make": lambda: make(folder, options.family, options.gigabytes, options.sparse),
        "open": lambda: measure_open(folder),
        "resident": lambda: measure_resident(folder),
        "gather": lambda: measure_gather(folder, options.repeats),
        "train": lambda: measure_train(folder, options.steps),
        "share": lambda: measure_share(
            folder, options.gigabytes, options.processes, options.requests
        ),
        "larger": lambda: measure_larger(folder, options.steps),
        "beside": lambda: measure_beside(folder, options),
        "work": lambda: work(
            folder, folder / options.out, options.steps, options.every, options.die
        ),
    }
    chosen = options.commands if len(options.commands) < len(commands) else every
    for name in chosen:
        commands[name]()


if __name__ == "__main__":
    main()
