"""Training on 1, 2, 4, ... devices of this host.

Run `python benchmarks/devices.py [--only NAME ...] [--large GB]`.

Prints a Markdown table with the time of a step, its speed-up or efficiency relative to one device,
memory and collectives. Each step runs in two ways: plain `jit` over arrays sharded by
`lutjax.sharding.specs`, and a handwritten `jax.shard_map`. Each case is a separate process, which
measures its memory. `--large GB` adds tables with that size over all devices: initialization,
steps, a checkpoint in `--folder`, and its restoration on half the devices; only these with `--only
large`. On a machine without accelerators: `XLA_FLAGS=--xla_force_host_platform_device_count=8
python benchmarks/devices.py --tiny`.
"""

import argparse
import dataclasses
import functools
import json
import math
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax
from harness import parse, table  # beside this file
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import lutjax
from lutjax import optim, sharding, wiring
from lutjax.training import checkpoints

WAYS = ("jit", "shard_map")
RATE = 1e-4


class Parts(Protocol):
    """Exchange between devices inside a model. With plain jit the compiler inserts it."""

    def sum(self, y: Any) -> Any:
        """Return the outputs summed over all detectors."""

    def join(self, y: Any, last: bool) -> Any:
        """Return the gate outputs of all devices, ``[gates, batch]``; `last`: no gates follow."""


class Whole:
    """`Parts` for plain jit and one device."""

    def sum(self, y: Any) -> Any:
        return y

    def join(self, y: Any, last: bool) -> Any:
        return y


class OnDevices:
    """`Parts` in a shard_map."""

    def sum(self, y: Any) -> Any:
        return jax.lax.psum(y, "detectors")

    def join(self, y: Any, last: bool) -> Any:
        # Each device's gates contribute a part of the cotangents, which the transpose sums.
        to = "invarying" if last else "varying"
        return jax.lax.all_gather(y, "detectors", axis=0, tiled=True, to=to)


def _uniform(key: Any, *shape: int) -> jax.Array:
    return jax.random.uniform(key, shape, jnp.float32, -0.05, 0.05)


def _anchors(key: Any, *sizes: int) -> jax.Array:
    return lutjax.sample_anchors(key, *sizes)


@dataclasses.dataclass(frozen=True)
class LanguageModel:
    """The published language model on plain ops: `lutjax.models.LUTTransformer` without dropout."""

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
        """Initialize the trained arrays."""
        n_rows = 2 ** (2 * self.anchors + self.position_bits)
        draw = (functools.partial(_uniform, jax.random.fold_in(key, n)) for n in range(10**6))

        def ffn(n_outputs: int) -> Any:
            return {"weights": next(draw)(self.ffn_detectors, 2**self.ffn_anchors, n_outputs)}

        def layer() -> Any:
            weights = next(draw)(self.detectors, n_rows, self.features)
            positions = next(draw)(self.context - 1, self.detectors, self.position_bits)
            return {
                "attention": {"weights": weights, "positions": positions},
                "ffn": ffn(self.features),
            }

        return {"layers": [layer() for _ in range(self.layers)], "unembed": ffn(self.vocab)}

    def others(self, key: Any) -> Any:
        """Initialize the other arrays."""
        keys = iter(jax.random.split(key, 2 * self.layers + 2))

        def ffn() -> Any:
            return _anchors(next(keys), self.features, self.ffn_detectors, self.ffn_anchors)

        def layer() -> Any:
            attention = _anchors(next(keys), self.features, self.detectors, self.anchors)
            return {"attention": attention, "ffn": ffn()}

        embedding = jax.random.uniform(next(keys), (self.vocab, self.features), jnp.float32, -1, 1)
        return {
            "embedding": embedding,
            "layers": [layer() for _ in range(self.layers)],
            "unembed": ffn(),
        }

    def others_by_detector(self) -> Any:
        """Return the specs of `others` in a shard_map."""
        on = P("detectors")
        layers = [{"attention": on, "ffn": on}] * self.layers
        return {"embedding": P(), "layers": layers, "unembed": on}

    def data(self) -> np.ndarray:
        """Return the data set."""
        return np.random.default_rng(0).integers(0, self.vocab, self.text).astype(np.uint8)

    def samples(self, key: Any, first: Any, batch: int, count: int, data: Any) -> Any:
        """Sample a batch; return `count` of its samples from `first` on."""
        starts = jax.random.randint(key, (batch,), 0, data.size - self.context)
        starts = jax.lax.dynamic_slice_in_dim(starts, first, count)
        return data[starts[:, None] + jnp.arange(self.context + 1)[None]].astype(jnp.int32)

    def loss(self, params: Any, others: Any, windows: Any, parts: Parts) -> Any:
        """Return the summed losses, divided by the predictions per sample."""
        z = others["embedding"][windows[:, :-1]]
        for p, anchors in zip(params["layers"], others["layers"], strict=True):
            attention = p["attention"]
            y = lutjax.lut_attention(
                z, attention["weights"], anchors["attention"], attention["positions"]
            )
            z = z + parts.sum(y)
            z = z + parts.sum(lutjax.lut(z, p["ffn"]["weights"], anchors["ffn"]))
        logits = parts.sum(lutjax.lut(z, params["unembed"]["weights"], others["unembed"]))
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:])
        return losses.sum() / self.context


@dataclasses.dataclass(frozen=True)
class Scored:
    """Residual feed-forward layers with scored tables, as in a `lutjax.models.GPT` with the preset ``small``."""

    features: int = 256
    layers: int = 4
    detectors: int = 256
    bits: int = 8
    pool: int = 2**16

    def params(self, key: Any) -> Any:
        """Initialize the trained arrays; see `LanguageModel` for all methods."""
        shape, read = (self.detectors, 2**self.bits, self.features), lutjax.reads.Confidence()
        keys = jax.random.split(key, self.layers)
        return [{"weights": _uniform(k, *shape), "read": read.initial()} for k in keys]

    def others(self, key: Any) -> Any:
        keys = jax.random.split(key, self.layers)
        return [_anchors(k, self.features, self.detectors, self.bits) for k in keys]

    def others_by_detector(self) -> Any:
        return [P("detectors")] * self.layers

    def data(self) -> np.ndarray:
        return np.random.default_rng(0).normal(size=(self.pool, self.features)).astype(np.float32)

    def samples(self, key: Any, first: Any, batch: int, count: int, data: Any) -> Any:
        start = jax.random.randint(key, (), 0, data.shape[0] - batch + 1)
        return jax.lax.dynamic_slice_in_dim(data, start + first, count)

    def loss(self, params: Any, others: Any, x: Any, parts: Parts) -> Any:
        z, read = x, lutjax.reads.Confidence()
        for p, anchors in zip(params, others, strict=True):
            z = z + parts.sum(lutjax.scored_lut(z, p["weights"], anchors, p["read"], read=read))
        return jnp.mean((z - jnp.roll(x, 1, -1)) ** 2, -1).sum()


@dataclasses.dataclass(frozen=True)
class Gates:
    """Layers of logic gates."""

    gates: int = 16384
    layers: int = 6
    pool: int = 2**15
    readers: bool = True

    def on(self, mesh: Mesh) -> "Gates":
        """Return layers for a mesh.

        Fan-out lists contain gates of all devices, so sharded gates have none.
        """
        return dataclasses.replace(self, readers=mesh.shape["detectors"] == 1)

    def params(self, key: Any) -> Any:
        keys = jax.random.split(key, self.layers)
        return [{"logits": jax.random.normal(k, (self.gates, 16))} for k in keys]

    def others(self, key: Any) -> Any:
        wires = [
            wiring.balanced(k, self.gates, self.gates) for k in jax.random.split(key, self.layers)
        ]
        return [
            (w, lutjax.readers(w, self.gates, fan_out=2) if self.readers else None) for w in wires
        ]

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
            z = parts.join(y, last=i == self.layers - 1)
        return jnp.mean((z - x) ** 2, 0).sum()


Subject = LanguageModel | Scored | Gates


@dataclasses.dataclass(frozen=True)
class Case:
    """A measured program.

    Attributes:
      figure: the figure with this row.
      subject: model and data.
      data, detectors: devices along the batch and along the detectors.
      way: one of `WAYS`, or "large".
      batch: samples per step.
      steps: steps per timed call.
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
    """Yield all cases for some devices."""
    counts = [n for n in (2, 4, 8) if n <= n_devices]
    batch, pool, images, steps = 128, 8192, 4096, 50
    model, long, scored = LanguageModel(), LanguageModel(context=4096, layers=2), Scored()
    gates = Gates(pool=images * max(counts, default=1))
    if tiny:
        sizes = {"layers": 1, "anchors": 2, "position_bits": 2, "detectors": 8, "ffn_detectors": 8, "ffn_anchors": 4}  # fmt: skip
        model = LanguageModel(features=8, context=8, vocab=16, text=2**12, **sizes)
        long = dataclasses.replace(model, context=32)
        scored = Scored(features=8, layers=1, detectors=8, bits=3, pool=256)
        gates = Gates(gates=64, layers=2, pool=256)
        batch, pool, images, steps = 16, 16, 16, 2

    def both(
        figure: str, subject: Subject, *sizes: int, ways: tuple[str, ...] = WAYS
    ) -> Iterator[Case]:
        few = figure in ("context", "scored", "gates")  # tens of milliseconds
        data, detectors, batch = sizes
        for way in ways:
            yield Case(
                figure, subject, data, detectors, way, batch, min(steps, 10) if few else steps
            )

    plain = functools.partial(both, ways=("jit",))
    yield from plain("reference", model, 1, 1, batch)
    for n in counts:
        yield from both("reference", model, 1, n, batch)
        yield from both("reference", model, n, 1, batch)
        if n > 2:
            yield from both("reference", model, 2, n // 2, batch)
        yield from both("weak", model, 1, n, batch * n)
        yield from plain("weak", model, n, 1, batch * n)
    yield from plain("context", long, 1, 1, 1)
    for n in counts:
        yield from both("context", long, 1, n, 1)
    for figure, subject, size in (("scored", scored, pool), ("gates", gates, images)):
        yield from plain(figure, subject, 1, 1, size)
        for n in counts:
            yield from both(figure, subject, 1, n, size * n)
            yield from plain(figure, subject, n, 1, size * n)


def large_case(gb: float, n_devices: int, *, tiny: bool) -> Case:
    """Return the case with some GB of tables over all devices."""
    sizes = (
        {"features": 8, "detectors": 8, "ffn_detectors": 8, "context": 8, "text": 2**12}
        if tiny
        else {}
    )
    model = LanguageModel(anchors=3 if tiny else 8, **sizes)  # type: ignore[arg-type]
    one = 4 * model.detectors * model.features * 2 ** (2 * model.anchors + model.position_bits)
    model = dataclasses.replace(model, layers=max(round(gb * 1e9 / one), 1))
    return Case("large", model, 1, n_devices, "large", 16 if tiny else 128)


class Program:
    """A compiled case.

    Args:
      case: the measured program.
    """

    def __init__(self, case: Case):
        devices = np.array(jax.devices()[: case.data * case.detectors])
        self.case, self.mesh = (
            case,
            Mesh(devices.reshape(case.data, case.detectors), ("data", "detectors")),
        )
        self.subject: Any = (
            case.subject.on(self.mesh) if isinstance(case.subject, Gates) else case.subject
        )
        self.optimizer = optim.Optimizer(
            optim.SGD(),
            RATE,
            rest=optax.sgd(RATE),
            tables=lambda name, array: name.endswith("weights"),
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
            jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=self.everywhere)
            for a in (np.int32(0), self.data)
        )
        run: Callable[..., Any] = self._run
        if case.way == "shard_map":
            every = P()
            in_specs = (*specs, every, every, every)
            run = jax.shard_map(
                run, mesh=self.mesh, in_specs=in_specs, out_specs=(*specs[:2], every)
            )
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
        value_and_grad = optim.value_and_grad(
            lambda p: subject.loss(p, others, x, parts) / case.batch
        )
        loss, gradients = value_and_grad(params)
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
        """Initialize parameters and place the data."""
        self.params, self.state, self.others = self._draw(jax.random.key(0))
        self.on_devices = jax.device_put(self.data, self.everywhere)
        self.done = 0

    def run(self, count: int) -> tuple[float, float]:
        """Run steps; return the seconds per step and the mean loss."""
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
        """Return planned memory and collectives of the compiled program."""
        m = self.compiled.memory_analysis()
        found = collectives(self.compiled.as_text())
        return {
            "arguments GB": m.argument_size_in_bytes / 1e9,
            "temporary GB": m.temp_size_in_bytes / 1e9,
            "collectives": sum(count for count, _ in found.values()),
            "exchanged MB": sum(n_bytes for _, n_bytes in found.values()) / 1e6,
            "each": {op: [count, n_bytes] for op, (count, n_bytes) in found.items()},
        }

    def memory(self) -> dict[str, float]:
        """Return the peak memory per device, also relative to its parameter share."""
        stats = [device.memory_stats() or {} for device in self.mesh.devices.flat]
        m = self.compiled.memory_analysis()
        planned = m.argument_size_in_bytes + m.temp_size_in_bytes
        peak = max(s.get("peak_bytes_in_use", 0) for s in stats) or planned
        return {"peak GB": peak / 1e9, "over share": peak / (self.bytes / self.case.detectors)}


_SIZES = {
    "pred": 1,
    "s8": 1,
    "u8": 1,
    "s16": 2,
    "u16": 2,
    "bf16": 2,
    "f16": 2,
    "s64": 8,
    "u64": 8,
    "f64": 8,
}
_COLLECTIVE = re.compile(
    r"= (.*?) "
    r"(all-reduce|all-gather|reduce-scatter|collective-permute|all-to-all|collective-broadcast)(-start)?\("
)
_SHAPE = re.compile(r"(\w+)\[([\d,]*)\]")


def collectives(program: str) -> dict[str, tuple[int, int]]:
    """Return number and result bytes per device of the collectives in a program, by op."""
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


def measure(case: Case) -> dict[str, Any]:
    """Return the row of a case."""
    began = time.perf_counter()
    program = Program(case)
    compilation = {"compilation s": time.perf_counter() - began}
    program.start()
    program.run(1)
    results = [program.run(case.steps) for _ in range(5)]
    seconds = [seconds for seconds, _ in results]
    times = {
        "ms": 1e3 * float(np.median(seconds)),
        "fastest ms": 1e3 * min(seconds),
        "loss": results[-1][1],
    }
    row = {"case": case.name, "batch": case.batch, **compilation}
    return {**row, **program.plan(), **times, **program.memory()}


def measure_large(case: Case, folder: Path) -> dict[str, Any]:
    """Measure initialization, steps, a checkpoint, and its restoration on half the devices with equal bits."""
    row: dict[str, Any] = {"case": case.name, "batch": case.batch}

    def time_part(part: str, do: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        result = jax.block_until_ready(do())
        row[f"{part} s"] = time.perf_counter() - began
        print(f"{case.name}: {part} {row[f'{part} s']:.2f} s", file=sys.stderr, flush=True)
        return result

    program = time_part("compilation", lambda: Program(case))
    half = Program(dataclasses.replace(case, detectors=max(case.detectors // 2, 1)))
    row |= {**program.plan(), "tables GB": program.bytes / 1e9}
    time_part("init", lambda: (program.start(), program.params)[1])
    program.run(1)
    row |= {
        "ms": 1e3 * float(np.median([program.run(10)[0] for _ in range(3)])),
        **program.memory(),
    }
    before = int(time_part("digest", lambda: digest(program.params)))
    time_part("checkpoint", lambda: checkpoints.save(folder, 1, {"model": program.params}, {}))
    done = program.done
    program.params = program.state = program.others = None
    time_part("check of the checkpoint", lambda: checkpoints.read_meta(folder)[0])
    half.start()
    template = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), half.params
    )
    half.params = None
    restore = functools.partial(checkpoints.restore, folder, 1, "model", template)
    half.params = time_part("restore on half the devices", restore)
    row["same bits"] = int(digest(half.params)) == before
    half.done = done
    half.run(1)
    return {**row, "half ms": 1e3 * half.run(10)[0]}


@jax.jit
def digest(params: Any) -> jax.Array:
    """Return a checksum over all bits and their positions."""
    total = jnp.uint32(0)
    for a in jax.tree.leaves(params):
        bits = jax.lax.bitcast_convert_type(a, jnp.uint32)
        for axis, odd in enumerate((2654435761, 2246822519, 3266489917)[: a.ndim]):
            bits ^= (jax.lax.broadcasted_iota(jnp.uint32, a.shape, axis) + axis + 1) * jnp.uint32(
                odd
            )
        total += jnp.sum(bits * jnp.uint32(668265263), dtype=jnp.uint32)
    return total


def compare(rows: dict[Case, dict[str, Any]]) -> str:
    """Return the table in Markdown."""
    lines = []
    ones = {case.figure: row["ms"] for case, row in rows.items() if case.data * case.detectors == 1}
    for case, row in rows.items():
        one = ones.get("reference" if case.figure == "weak" else case.figure)
        weak = case.figure in ("weak", "scored", "gates")
        against = (
            "-" if one is None else f"{one / row['ms']:.0%}" if weak else f"{one / row['ms']:.2f}x"
        )
        devices = f"{case.data} data x {case.detectors} detectors"
        parts = [f"{row[name]:.2f}" if name in row else "-" for name in ("peak GB", "over share")]
        exchanged = f"{row['exchanged MB']:.1f}" if "exchanged MB" in row else "-"
        cells = case.figure, devices, case.way, row["batch"], f"{row['ms']:.3f}", against, *parts
        lines.append((*cells, row.get("collectives", "-"), exchanged))
    names = (
        "figure | devices | way | batch | ms | against one | peak GB | over share | collectives | "
        "MB exchanged"
    )
    return table(names, lines, 4)


def main() -> None:
    given = parse(
        __doc__,
        only=([str], "figures, or cases by their names in the output"),
        large=(float, "also measure some GB of tables"),
        folder=(Path, "temporary location for the checkpoint of large tables"),
        devices=(int, "number of devices; default: all"),
        tiny=(False, "tiny sizes, as a test"),
        case=(str, argparse.SUPPRESS),
    )
    if given.devices is None:
        count = "import jax; print(len(jax.devices()))"  # this process would reserve device memory
        found = subprocess.run(
            [sys.executable, "-c", count], capture_output=True, text=True, check=True
        )
        given.devices = int(found.stdout)
    known = list(cases(given.devices, tiny=given.tiny))
    if given.large:
        known.append(large_case(given.large, given.devices, tiny=given.tiny))
    if given.case:
        case = next(case for case in known if case.name == given.case)
        if case.way != "large":
            print(json.dumps(measure(case)))
            return
        with tempfile.TemporaryDirectory(dir=given.folder) as folder:
            print(json.dumps(measure_large(case, Path(folder))))
        return
    words = [word for word in sys.argv[1:] if word not in ("--only", *given.only)]
    rows: dict[Case, dict[str, Any]] = {}
    for case in known:
        if not given.only or case.way == "large" or {case.figure, case.name} & set(given.only):
            command = [
                sys.executable,
                __file__,
                *words,
                "--devices",
                str(given.devices),
                "--case",
                case.name,
            ]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
            if done.returncode:
                print(f"FAILED: {case.name}", flush=True)
                continue
            rows[case] = row = json.loads(done.stdout)
            print(
                json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}),
                flush=True,
            )
    print(f"\n{compare(rows)}")


if __name__ == "__main__":
    main()
