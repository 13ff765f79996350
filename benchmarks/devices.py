"""Training on 1, 2, 4, ... devices of this host: `python benchmarks/devices.py [--only NAME ...] [--large GB]`.

Prints a table in Markdown of the time of a step, its speed-up or efficiency against one device, memory and collectives. Each step is run in
two ways: plain `jit` over arrays that lie as `lutjax.sharding.specs` says, and a `jax.shard_map` by hand. Each case is a process of its own,
so that its memory is measured; all compile side by side, and then run one after the other.
`--large GB` adds tables of so many GB over all devices: init, steps, a checkpoint in `--folder`, and that restored on half the devices; alone with
`--only large`.
On a machine without accelerators: `XLA_FLAGS=--xla_force_host_platform_device_count=8 python benchmarks/devices.py --tiny`.
"""

import argparse
import contextlib
import dataclasses
import functools
import gc
import json
import math
import os
import queue
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax
from harness import head, kernel_launches as kernel_launches, markdown_row, options  # beside this file
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import lutjax
from lutjax import optim, sharding, wiring
from lutjax.training import checkpoints
from lutjax.training.experiments import Show, Watcher, start

WAYS = ("jit", "shard_map")
RATE = 1e-4


class Parts(Protocol):
    """Exchange between devices, in the middle of a model: nothing in plain jit, where the compiler sees to it."""

    def summed(self, y: Any) -> Any:
        """Return the sum of what the detectors of each device gave."""

    def joined(self, y: Any, last: bool) -> Any:
        """Return the outputs of the gates of all devices, ``[gates, batch]``; `last`: no gates follow."""


class Whole:
    """`Parts` of plain jit, and of one device."""

    def summed(self, y: Any) -> Any:
        return y

    def joined(self, y: Any, last: bool) -> Any:
        return y


class OnDevices:
    """`Parts` in a shard_map."""

    def summed(self, y: Any) -> Any:
        return jax.lax.psum(y, "detectors")

    def joined(self, y: Any, last: bool) -> Any:
        # Cotangents of what only the device's own gates read are parts of sums, which its transpose adds up.
        to = "invarying" if last else "varying"
        return jax.lax.all_gather(y, "detectors", axis=0, tiled=True, to=to)


@dataclasses.dataclass(frozen=True)
class LanguageModel:
    """The published language model on the ops themselves: `lutjax.models.LUTTransformer` without dropout."""

    features: int = 32
    context: int = 32
    layers: int = 6
    detectors: int = 64
    anchors: int = 6
    position_bits: int = 4
    ffn_detectors: int = 16
    ffn_anchors: int = 10
    vocab: int = 256
    text: int = 2**20

    def params(self, key: Any) -> Any:
        """Draw what is trained."""
        n_rows = 2 ** (2 * self.anchors + self.position_bits)
        numbers = iter(range(10**6))

        def uniform(*shape: int) -> jax.Array:
            return jax.random.uniform(jax.random.fold_in(key, next(numbers)), shape, jnp.float32, -0.05, 0.05)

        def layer() -> Any:
            attention = {
                "weights": uniform(self.detectors, n_rows, self.features),
                "positions": uniform(self.context - 1, self.detectors, self.position_bits),
            }
            return {"attention": attention, "ffn": self._ffn(uniform, self.features)}

        return {
            "layers": [layer() for _ in range(self.layers)],
            "unembed": self._ffn(uniform, self.vocab),
        }

    def _ffn(self, uniform: Callable[..., Any], n_outputs: int) -> Any:
        return {"weights": uniform(self.ffn_detectors, 2**self.ffn_anchors, n_outputs)}

    def others(self, key: Any) -> Any:
        """Draw what is not trained."""
        keys = iter(jax.random.split(key, 2 * self.layers + 2))

        def ffn() -> Any:
            return lutjax.sample_anchors(next(keys), self.features, self.ffn_detectors, self.ffn_anchors)

        def layer() -> Any:
            anchors = lutjax.sample_anchors(next(keys), self.features, self.detectors, self.anchors)
            return {"attention": anchors, "ffn": ffn()}

        embedding = jax.random.uniform(next(keys), (self.vocab, self.features), jnp.float32, -1, 1)
        return {"embedding": embedding, "layers": [layer() for _ in range(self.layers)], "unembed": ffn()}

    def others_by_detector(self) -> Any:
        """Return how `others` are divided in a shard_map."""
        on = P("detectors")
        layer = {"attention": on, "ffn": on}
        return {"embedding": P(), "layers": [layer] * self.layers, "unembed": on}

    def data(self) -> np.ndarray:
        """Return what samples are drawn from."""
        return np.random.default_rng(0).integers(0, self.vocab, self.text).astype(np.uint8)

    def samples(self, key: Any, first: Any, batch: int, count: int, data: Any) -> Any:
        """Draw a batch; return `count` samples of it from `first` on, with a leading axis."""
        starts = jax.random.randint(key, (batch,), 0, data.size - self.context)
        starts = jax.lax.dynamic_slice_in_dim(starts, first, count)
        return data[starts[:, None] + jnp.arange(self.context + 1)[None]].astype(jnp.int32)

    def loss(self, params: Any, others: Any, windows: Any, parts: Parts) -> Any:
        """Return the sum of the losses of samples, over their number of predictions."""
        z = others["embedding"][windows[:, :-1]]
        for p, anchors in zip(params["layers"], others["layers"], strict=True):
            attention = p["attention"]
            y = lutjax.lut_attention(z, attention["weights"], anchors["attention"], attention["positions"])
            z = z + parts.summed(y)
            z = z + parts.summed(lutjax.lut(z, p["ffn"]["weights"], anchors["ffn"]))
        logits = parts.summed(lutjax.lut(z, params["unembed"]["weights"], others["unembed"]))
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:])
        return losses.sum() / self.context


@dataclasses.dataclass(frozen=True)
class Scored:
    """The feed-forward layers of scored tables in a `lutjax.models.GPT` of the preset ``small``, each added to its input."""

    features: int = 256
    layers: int = 4
    detectors: int = 256
    bits: int = 8
    pool: int = 2**16

    def params(self, key: Any) -> Any:
        """Draw what is trained; its other methods are those of `LanguageModel`."""
        shape = (self.detectors, 2**self.bits, self.features)
        return [
            {"weights": jax.random.uniform(k, shape, jnp.float32, -0.05, 0.05), "read": self._read.initial()}
            for k in jax.random.split(key, self.layers)
        ]

    @property
    def _read(self) -> Any:
        return lutjax.reads.Confidence()

    def others(self, key: Any) -> Any:
        return [
            lutjax.sample_anchors(k, self.features, self.detectors, self.bits)
            for k in jax.random.split(key, self.layers)
        ]

    def others_by_detector(self) -> Any:
        return [P("detectors")] * self.layers

    def data(self) -> np.ndarray:
        return np.random.default_rng(0).normal(size=(self.pool, self.features)).astype(np.float32)

    def samples(self, key: Any, first: Any, batch: int, count: int, data: Any) -> Any:
        start = jax.random.randint(key, (), 0, data.shape[0] - batch + 1)
        return jax.lax.dynamic_slice_in_dim(data, start + first, count)

    def loss(self, params: Any, others: Any, x: Any, parts: Parts) -> Any:
        z = x
        for p, anchors in zip(params, others, strict=True):
            z = z + parts.summed(lutjax.scored_lut(z, p["weights"], anchors, p["read"], read=self._read))
        return jnp.mean((z - jnp.roll(x, 1, -1)) ** 2, -1).sum()


@dataclasses.dataclass(frozen=True)
class Gates:
    """Layers of logic gates."""

    gates: int = 16384
    layers: int = 6
    pool: int = 2**15
    readers: bool = True

    def on(self, mesh: Mesh) -> "Gates":
        """Lists of readers name gates of all devices, so gates that are divided have none."""
        return dataclasses.replace(self, readers=mesh.shape["detectors"] == 1)

    def params(self, key: Any) -> Any:
        return [
            {"logits": jax.random.normal(k, (self.gates, 16))} for k in jax.random.split(key, self.layers)
        ]

    def others(self, key: Any) -> Any:
        wires = [wiring.balanced(k, self.gates, self.gates) for k in jax.random.split(key, self.layers)]
        return [(w, lutjax.readers(w, self.gates, fan_out=2) if self.readers else None) for w in wires]

    def others_by_detector(self) -> Any:
        return [(P("detectors"), P() if self.readers else None)] * self.layers

    def data(self) -> np.ndarray:
        return np.random.default_rng(0).random((self.gates, self.pool), np.float32)

    def samples(self, key: Any, first: Any, batch: int, count: int, data: Any) -> Any:
        start = jax.random.randint(key, (), 0, data.shape[1] - batch + 1)
        return jax.lax.dynamic_slice_in_dim(data, start + first, count, 1)

    def loss(self, params: Any, others: Any, x: Any, parts: Parts) -> Any:
        z = x
        for i, (p, (wires, readers)) in enumerate(zip(params, others, strict=True)):
            y = lutjax.logic_gates(z, p["logits"], wires, readers=readers, feature_axis=0)
            z = parts.joined(y, last=i == self.layers - 1)
        return jnp.mean((z - x) ** 2, 0).sum()


Subject = LanguageModel | Scored | Gates


@dataclasses.dataclass(frozen=True)
class Case:
    """A program that is measured.

    Attributes:
      figure: of which figure it is a row.
      subject: model and data.
      data, detectors: devices over which the batch and the detectors are divided.
      way: one of `WAYS`, or "train" for the loop of ``lutjax train lm``.
      batch: samples of a step.
      steps: of a timed call.
    """

    figure: str
    subject: Subject
    data: int
    detectors: int
    way: str
    batch: int
    steps: int = 50

    @property
    def name(self) -> str:
        """Name on the command line of its process."""
        return f"{self.figure}:{self.data}x{self.detectors}:{self.way}"


def cases(n_devices: int, *, tiny: bool) -> Iterator[Case]:
    """Yield all cases for so many devices."""
    counts = [n for n in (2, 4, 8) if n <= n_devices]
    batch, pool, images, steps = 128, 8192, 4096, 50
    model, long, scored = LanguageModel(), LanguageModel(context=4096, layers=2), Scored()
    gates = Gates(pool=images * max(counts, default=1))
    if tiny:
        sizes = {
            "layers": 1,
            "anchors": 2,
            "position_bits": 2,
            "detectors": 8,
            "ffn_detectors": 8,
            "ffn_anchors": 4,
        }
        model = LanguageModel(features=8, context=8, vocab=16, text=2**12, **sizes)
        long = dataclasses.replace(model, context=32)
        scored = Scored(features=8, layers=1, detectors=8, bits=3, pool=256)
        gates = Gates(gates=64, layers=2, pool=256)
        batch, pool, images, steps = 16, 16, 16, 2

    def case(
        figure: str, subject: Subject, data: int, detectors: int, batch: int, *ways: str
    ) -> Iterator[Case]:
        few = figure in ("context", "scored", "gates")  # tens of milliseconds
        for way in ways or ("jit",):
            yield Case(figure, subject, data, detectors, way, batch, min(steps, 10) if few else steps)

    yield from case("reference", model, 1, 1, batch)
    for n in counts:
        yield from case("reference", model, 1, n, batch, *WAYS)
        yield from case("reference", model, n, 1, batch, *WAYS)
        if n > 2:
            yield from case("reference", model, 2, n // 2, batch, *WAYS)
        yield from case("weak", model, 1, n, batch * n, *WAYS)
        yield from case("weak", model, n, 1, batch * n)
    yield from case("context", long, 1, 1, 1)
    for n in counts:
        yield from case("context", long, 1, n, 1, *WAYS)
    yield from case("train", model, 1, n_devices, batch, "train")
    for figure, subject, size in (("scored", scored, pool), ("gates", gates, images)):
        yield from case(figure, subject, 1, 1, size)
        for n in counts:
            yield from case(figure, subject, 1, n, size * n, *WAYS)
            yield from case(figure, subject, n, 1, size * n)


class Program:
    """A compiled case.

    Args:
      case: what is measured.
    """

    def __init__(self, case: Case):
        devices = np.array(jax.devices()[: case.data * case.detectors])
        self.case, self.mesh = case, Mesh(devices.reshape(case.data, case.detectors), ("data", "detectors"))
        self.subject: Any = case.subject.on(self.mesh) if isinstance(case.subject, Gates) else case.subject
        self.optimizer = optim.Optimizer(
            optim.SGD(), RATE, rest=optax.sgd(RATE), tables=lambda name, array: name.endswith("weights")
        )
        key = jax.random.key(0)
        arrays = jax.eval_shape(self._arrays, key)
        specs = sharding.specs(arrays, self.mesh)
        if case.way == "shard_map":
            specs = (*specs[:2], self.subject.others_by_detector())
        place = functools.partial(jax.tree.map, lambda spec: NamedSharding(self.mesh, spec))
        self.everywhere = place(P())
        self.data = self.subject.data()
        self._draw = jax.jit(self._arrays, out_shardings=place(specs)).lower(key).compile()
        abstract = jax.tree.map(
            lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), arrays, place(specs)
        )
        number, data = (
            jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=self.everywhere) for a in (np.int32(0), self.data)
        )
        run: Callable[..., Any] = self._run
        if case.way == "shard_map":
            every = P()
            in_specs = (*specs, every, every, every)
            run = jax.shard_map(run, mesh=self.mesh, in_specs=in_specs, out_specs=(*specs[:2], every))
        out = (*place(specs[:2]), self.everywhere)
        jitted = jax.jit(run, donate_argnums=(0, 1), out_shardings=out)
        self.compiled = jitted.lower(*abstract, number, number, data).compile()
        of_tables = jax.tree.leaves(jax.tree.map(lambda a: a.size * a.dtype.itemsize, arrays[0]))
        self.bytes = sum(of_tables)

    def _arrays(self, key: Any) -> tuple[Any, Any, Any]:
        params = self.subject.params(key)
        return params, self.optimizer.init(params), self.subject.others(jax.random.fold_in(key, 1))

    def _step(self, params: Any, state: Any, others: Any, number: Any, data: Any) -> Any:
        case, subject = self.case, self.subject
        key = jax.random.fold_in(jax.random.key(3), number)
        parts: Parts = Whole()
        if by_hand := case.way == "shard_map":
            parts, count = OnDevices(), case.batch // case.data
            x = subject.samples(key, jax.lax.axis_index("data") * count, case.batch, count, data)
        else:
            x = subject.samples(key, 0, case.batch, case.batch, data)
            spec = P(None, "data") if isinstance(subject, Gates) else P("data")  # features first
            x = jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, spec))
        loss, gradients = optim.value_and_grad(lambda p: subject.loss(p, others, x, parts) / case.batch)(
            params
        )
        if by_hand:
            factored = lambda g: isinstance(g, optim.TableGradient)  # noqa: E731
            gradients = jax.tree.map(
                lambda g: g.gathered("data") if factored(g) else g, gradients, is_leaf=factored
            )
            loss = jax.lax.psum(loss, "data")
        return *self.optimizer.apply(params, gradients, state), loss

    def _run(self, params: Any, state: Any, others: Any, first: Any, count: Any, data: Any) -> Any:
        """Run `count` steps; return parameters, state and the mean loss."""

        def body(i: Any, carry: Any) -> Any:
            params, state, total = carry
            params, state, loss = self._step(params, state, others, first + i, data)
            return params, state, total + loss

        params, state, total = jax.lax.fori_loop(0, count, body, (params, state, jnp.float32(0)))
        return params, state, total / count.astype(jnp.float32)

    def start(self) -> None:
        """Draw parameters and place the data."""
        self.params, self.state, self.others = self._draw(jax.random.key(0))
        self.on_devices = jax.device_put(self.data, self.everywhere)
        self.done = 0

    def run(self, count: int) -> tuple[float, float]:
        """Run steps; return seconds of one, and the mean loss."""
        numbers = jax.device_put((np.int32(self.done), np.int32(count)), self.everywhere)
        jax.block_until_ready((self.params, self.on_devices, numbers))
        start = time.perf_counter()
        self.params, self.state, loss = self.compiled(
            self.params, self.state, self.others, *numbers, self.on_devices
        )
        value = float(loss)
        self.done += count
        return (time.perf_counter() - start) / count, value

    def plan(self) -> dict[str, Any]:
        """Return memory and collectives as the compiler plans them."""
        m = self.compiled.memory_analysis()
        found = collectives(self.compiled.as_text())
        return {
            "arguments GB": m.argument_size_in_bytes / 1e9,
            "temporary GB": m.temp_size_in_bytes / 1e9,
            "collectives": sum(count for count, _ in found.values()),
            "exchanged MB": sum(n_bytes for _, n_bytes in found.values()) / 1e6,
            "each": {op: [count, n_bytes] for op, (count, n_bytes) in found.items()},
        }


_SIZES = {"pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "bf16": 2, "f16": 2, "s64": 8, "u64": 8, "f64": 8}
_COLLECTIVE = re.compile(
    r"= (.*?) (all-reduce|all-gather|reduce-scatter|collective-permute|all-to-all|collective-broadcast)(-start)?\("
)
_SHAPE = re.compile(r"(\w+)\[([\d,]*)\]")


def collectives(program: str) -> dict[str, tuple[int, int]]:
    """Return the collectives of a program: their number and the bytes of their results on a device, by op."""
    found: dict[str, tuple[int, int]] = {}
    for results, op, starting in _COLLECTIVE.findall(program):
        sizes = [
            _SIZES.get(kind, 4) * math.prod(int(n) for n in shape.split(",") if n)
            for kind, shape in _SHAPE.findall(results)
        ]
        if starting and op != "all-reduce":  # operands and results
            sizes = sizes[len(sizes) // 2 :]
        count, n_bytes = found.get(op, (0, 0))
        found[op] = (count + 1, n_bytes + sum(sizes))
    return found


def measure(case: Case, go: Callable[[], None]) -> dict[str, Any]:
    """Return the row of a case.

    Args:
      go: is called after compilation, and waits until the devices are free.
    """
    if case.way == "train":
        return measure_training(case, go)
    began = time.perf_counter()
    program = Program(case)
    row = {
        "case": case.name,
        "batch": case.batch,
        "compilation s": time.perf_counter() - began,
        **program.plan(),
    }
    go()
    program.start()
    program.run(1)
    results = [program.run(case.steps) for _ in range(5)]
    row["ms"] = 1e3 * float(np.median([seconds for seconds, _ in results]))
    row["fastest ms"] = 1e3 * min(seconds for seconds, _ in results)
    row["loss"] = results[-1][1]
    share = program.bytes / case.detectors
    stats = [device.memory_stats() or {} for device in program.mesh.devices.flat]
    planned = row["arguments GB"] + row["temporary GB"]
    row["peak GB"] = max(s.get("peak_bytes_in_use", 0) for s in stats) / 1e9 or planned
    row["over share"] = row["peak GB"] * 1e9 / share
    return row


class _EnoughError(Exception):
    """Enough steps were seen."""


class _Clock(Watcher):
    def __init__(self, n_intervals: int):
        self.times: list[tuple[int, float]] = []
        self._n_intervals = n_intervals

    def training(self, losses: Sequence[tuple[int, float]]) -> None:
        self.times.append((losses[-1][0], time.perf_counter()))
        if len(self.times) > self._n_intervals:
            raise _EnoughError


class _Watched(Show):
    def __init__(self, *watchers: Watcher):
        self._watchers = list(watchers)

    def watchers(self, experiment: Any, done: int) -> list[Watcher]:
        return self._watchers


def measure_training(case: Case, go: Callable[[], None]) -> dict[str, Any]:
    """Return the time of a step in the loop of ``lutjax train lm --model lut --preset reference``, and in a bare loop of such steps."""
    from lutjax.training.lm_runs import LanguageModel as Experiment

    never = {"steps": 10**6, "eval_every": 10**6, "checkpoint_every": 10**6}
    tiny = isinstance(case.subject, LanguageModel) and case.subject.layers == 1
    small = {"n_layers": 1, "n_anchors": 2, "n_position_bits": 2, "n_detectors": 2, "ffn_anchors": 4}
    experiment = Experiment.new({**never, **(small if tiny else {})}, None, "lut", "reference")
    # Without a wish it takes all GPUs, by detector; devices of a CPU only on demand.
    experiment.run.divide({"detectors": case.detectors} if jax.default_backend() == "cpu" else None)
    go()
    clock = _Clock(4 if tiny else 40)
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(_EnoughError):
        start(experiment, Path(folder) / "run", _Watched(clock))
    done, at = np.array(clock.times).T
    each = 1e3 * np.diff(at) / np.diff(done)
    gc.collect()
    state, times = experiment.run.init(), []
    for i in range(6):
        jax.block_until_ready(state)
        began = time.perf_counter()
        state, loss = experiment.run.advance(state, i * case.steps, case.steps)
        float(loss)
        times.append(1e3 * (time.perf_counter() - began) / case.steps)
    return {
        "case": case.name,
        "batch": experiment.record.training.batch_size,
        "ms": float(np.median(each)),
        "first ms": [round(float(ms), 2) for ms in each[:5]],
        "slowest ms": float(each.max()),
        "bare ms": float(np.median(times[1:])),
    }


def measure_large(case: Case, go: Callable[[], None], folder: Path) -> dict[str, Any]:
    """Return seconds of init, steps, a checkpoint, and of restoring it on half the devices, which go on from the same bits."""
    said = functools.partial(print, file=sys.stderr, flush=True)
    row: dict[str, Any] = {"case": case.name, "batch": case.batch}

    def timed(what: str, do: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        result = jax.block_until_ready(do())
        row[f"{what} s"] = time.perf_counter() - began
        said(f"{case.name}: {what} {row[f'{what} s']:.2f} s")
        return result

    fewer = dataclasses.replace(case, detectors=max(case.detectors // 2, 1))
    with ThreadPoolExecutor() as threads:
        program, half = timed("compilation", lambda: list(threads.map(Program, (case, fewer))))
    row |= {**program.plan(), "tables GB": program.bytes / 1e9}
    go()
    timed("init", lambda: (program.start(), program.params)[1])
    program.run(1)
    row["ms"] = 1e3 * float(np.median([program.run(10)[0] for _ in range(3)]))
    stats = [device.memory_stats() or {} for device in program.mesh.devices.flat]
    row["peak GB"] = max(s.get("peak_bytes_in_use", 0) for s in stats) / 1e9
    row["over share"] = row["peak GB"] * 1e9 / (program.bytes / case.detectors)
    said(
        f"{case.name}: {row['tables GB']:.1f} GB of tables: {row['ms']:.2f} ms a step, {row['peak GB']:.2f} GB on each, "
        f"{row['over share']:.2f} of its share"
    )
    before = int(timed("digest", lambda: digest(program.params)))
    timed("checkpoint", lambda: checkpoints.save(folder, 1, {"model": program.params}, {}))
    done = program.done
    program.params = program.state = program.others = None
    timed("check of the checkpoint", lambda: checkpoints.read_meta(folder)[0])
    half.start()
    template = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), half.params
    )
    half.params = None
    half.params = timed(
        "restore on half the devices", lambda: checkpoints.restore(folder, 1, "model", template)
    )
    row["same bits"] = int(digest(half.params)) == before
    half.done = done
    half.run(1)
    row["half ms"] = 1e3 * half.run(10)[0]
    return row


@jax.jit
def digest(params: Any) -> jax.Array:
    """Return a number that depends on all bits of arrays and on their places."""
    total = jnp.uint32(0)
    for a in jax.tree.leaves(params):
        bits = jax.lax.bitcast_convert_type(a, jnp.uint32)
        for axis, odd in enumerate((2654435761, 2246822519, 3266489917)[: a.ndim]):
            bits ^= (jax.lax.broadcasted_iota(jnp.uint32, a.shape, axis) + axis + 1) * jnp.uint32(odd)
        total += jnp.sum(bits * jnp.uint32(668265263), dtype=jnp.uint32)
    return total


def large(gb: float, n_devices: int, *, tiny: bool) -> Case:
    """Return the case of tables of so many GB over all devices."""
    sizes = {"features": 8, "detectors": 8, "ffn_detectors": 8, "context": 8, "text": 2**12} if tiny else {}
    model = LanguageModel(anchors=3 if tiny else 8, **sizes)  # type: ignore[arg-type]
    one = 4 * model.detectors * model.features * 2 ** (2 * model.anchors + model.position_bits)
    layers = max(round(gb * 1e9 / one), 1)
    return Case(
        "large", dataclasses.replace(model, layers=layers), 1, n_devices, "large", 16 if tiny else 128
    )


def serve(case: Case, arguments: argparse.Namespace) -> None:
    """Measure one case, as a process of its own: says when it is ready, and waits for a line."""

    def go() -> None:
        print("ready", flush=True)
        if not sys.stdin.readline():  # nobody waits for it any more
            raise SystemExit(1)

    if case.way == "large":
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            row = measure_large(case, go, Path(folder))
    else:
        row = measure(case, go)
    print(json.dumps(row), flush=True)


class Process:
    """A process that measures one case."""

    def __init__(self, case: Case, words: list[str]):
        self.case = case
        self._process = subprocess.Popen(
            [sys.executable, __file__, *words, "--case", case.name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def ready(self, until: float) -> bool:
        """Return whether it has compiled its case until then; otherwise it is ended."""
        with contextlib.suppress(queue.Empty):
            if self._lines.get(timeout=max(until - time.monotonic(), 0.01)):
                return True
        self._process.kill()
        return False

    def result(self) -> dict[str, Any] | None:
        """Let it run, and return its row; None if it failed."""
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        line = self._lines.get()
        self._process.wait()
        return json.loads(line) if line else None


def compare(rows: dict[Case, dict[str, Any]]) -> str:
    """Return the table in Markdown."""
    names = (
        "figure",
        "devices",
        "way",
        "batch",
        "ms",
        "against one",
        "peak GB",
        "over share",
        "collectives",
        "MB exchanged",
    )
    lines = [head(names, 4)]
    ones = {case.figure: row["ms"] for case, row in rows.items() if case.data * case.detectors == 1}
    for case, row in rows.items():
        one = ones.get("reference" if case.figure == "weak" else case.figure)
        weak = case.figure in ("weak", "scored", "gates")
        against = "-" if one is None else f"{one / row['ms']:.0%}" if weak else f"{one / row['ms']:.2f}x"
        if case.way == "train":
            against = f"{row['ms'] / row['bare ms'] - 1:+.1%} of the bare step"
        devices = f"{case.data} data x {case.detectors} detectors"
        parts = [f"{row[name]:.2f}" if name in row else "-" for name in ("peak GB", "over share")]
        exchanged = f"{row['exchanged MB']:.1f}" if "exchanged MB" in row else "-"
        cells = case.figure, devices, case.way, row["batch"], f"{row['ms']:.3f}", against, *parts
        lines.append(markdown_row([*cells, row.get("collectives", "-"), exchanged]))
    return "\n".join(lines)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--only", nargs="+", help="figures, or cases as they are named in the output")
    parser.add_argument("--large", type=float, metavar="GB", help="also tables of so many GB")
    parser.add_argument(
        "--folder", type=Path, help="where the checkpoint of large tables is written and deleted"
    )
    parser.add_argument("--devices", type=int, help="use only so many devices; default: all")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes: shows that everything runs")
    parser.add_argument(
        "--jobs", type=int, help="processes that compile side by side; default: a third of the cores"
    )
    parser.add_argument("--patience", type=float, default=300, help="seconds that compilation may take")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    arguments = parser.parse_args()

    if arguments.devices is None:
        count = "import jax; print(len(jax.devices()))"  # not in this process, which would hold memory of the devices
        found = subprocess.run([sys.executable, "-c", count], capture_output=True, text=True, check=True)
        arguments.devices = int(found.stdout)
    known = list(cases(arguments.devices, tiny=arguments.tiny))
    if arguments.large:
        known.append(large(arguments.large, arguments.devices, tiny=arguments.tiny))
    if arguments.case:
        serve(next(case for case in known if case.name == arguments.case), arguments)
        return
    wanted = [
        c for c in known if not arguments.only or c.way == "large" or {c.figure, c.name} & set(arguments.only)
    ]
    words = [word for word in sys.argv[1:] if word not in ("--only", *(arguments.only or ()))]
    words += ["--devices", str(arguments.devices)]
    jobs = arguments.jobs or max((os.cpu_count() or 1) // 3, 1)
    rows: dict[Case, dict[str, Any]] = {}
    for first in range(0, len(wanted), jobs):
        processes = [Process(case, words) for case in wanted[first : first + jobs]]
        until = time.monotonic() + arguments.patience
        for process in [p for p in processes if p.ready(until)]:
            row = process.result()
            if row is None:
                print(f"FAILED: {process.case.name}", flush=True)
                continue
            rows[process.case] = row
            print(
                json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}),
                flush=True,
            )
    print(f"\n{compare(rows)}")


if __name__ == "__main__":
    main()
