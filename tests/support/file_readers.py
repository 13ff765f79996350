"""File readers, their inputs and their limits, for tests with damaged files.

A damaged file loads or raises a one-line error, within time and memory bounds.
"""

import contextlib
import dataclasses
import functools
import gzip
import hashlib
import io
import json
import pickle
import random
import signal
import struct
import tempfile
import tracemalloc
import warnings
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import damage
import exports
import numpy as np
import pytest
import safetensors.numpy
import small_runs
from example_circuits import random_circuit
from flax import nnx
from folders import contents
from PIL import Image

from lutjax import bundles, circuits, convert, load, save, tuning
from lutjax.bundles import BundleError
from lutjax.bundles._layout import CONFIG, TENSORS
from lutjax.circuits import Format, deployment, language_model, proofs
from lutjax.circuits.deployment import DeploymentError, Vectors
from lutjax.convert import ConversionError
from lutjax.models import LogicClassifierConfig, LUTTransformer, LUTTransformerConfig
from lutjax.training import (
    about,
    checkpoints,
    classifier,
    datasets,
    integers,
    models,
    patterns,
    pixels,
    predictions,
    raw,
    runs,
    text,
)
from lutjax.training.datasets import columns
from lutjax.training.datasets.columns import Encoding
from lutjax.training.errors import CheckpointError, DamagedError
from lutjax.training.samples import SamplesError
from lutjax.tuning import _files as launches

try:
    import resource
except ImportError:  # Windows
    resource = None

SECONDS = 5
"""Timeout before a reader counts as hung."""

ROOM = 1 << 20
"""Default fixed allowance in bytes, on top of memory proportional to the file sizes."""

ADDRESSES = 1 << 30
"""Address-space limit for a reader in bytes; also covers native libraries."""


@dataclasses.dataclass(frozen=True)
class Reader:
    """Reader under test with its inputs and limits.

    Attributes:
      good: returns valid files by name.
      read: reads the files in a folder.
      errors: the only exceptions it may raise.
      times: maximum memory as a multiple of the total file size; see the docstring of `says`.
      named: required substring in messages; by default the damaged file's name.
      weight: relative number of damaged files to try.
      only: name of the only file to damage.
      room: additional bytes, for image text chunks (Pillow reads up to a megabyte each) or exported JAX programs.
    """

    good: Callable
    read: Callable
    errors: tuple
    times: int
    says: Callable
    named: str | None = None
    damages: tuple = (damage.of_bytes,)
    weight: float = 1.0
    only: str | None = None
    room: int = ROOM


CIRCUIT = random_circuit(
    0, {"x": (3, Format(2)), "z": (2, Format())}, 12, about={"kind": "network", "by": ["me", 1.5]}
)
FOREIGN = b""".model m # by hand
.inputs a b \\
c d[0] d[1]
.outputs y z
.names a b t
11 1
.names t c y
0- 0
.conn y z
.end
"""


def of(name, read):
    """Return a function to read a file from its content."""
    return lambda folder: read((folder / name).read_bytes())


def vectors():
    rng = np.random.default_rng(0)
    x, z = rng.integers(0, 4, (4, 3), np.uint8), rng.integers(0, 2, (4, 2), np.uint8)
    return Vectors({"x": x, "z": z}, deployment.evaluate_ports(CIRCUIT, [x, z]), "random ones")


LAUNCHES = (
    launches.Document("cpu", {"jax": "0.10"}, {})
    .with_entry(
        launches.Entry("lookup", {"rows": 16, "outputs": 8}, tuning.Launch(32, 64, 4, 2), 3.5, 4.0)
    )
    .text()
)


def encoding():
    job = columns.Categories("job", ("a", "b"), True)
    age = columns.Number("age", 2.5, (1.0, 2.0), False)
    return Encoding(
        (age, job, columns.Number("x", 0.0, None, False, False, 5.0, 2.0)), ("p", "q")
    ).to_json()


def texts():
    given = language_model.Text(b"ab", 800, 256, 1, tuple(range(-128, 128)), b"xyz")
    return language_model.texts_to_json([given])


@contextlib.contextmanager
def temporary():
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def one(name, content):
    """Return a function to write a file with the given content."""
    return lambda: {name: content if isinstance(content, bytes) else content.encode()}


@functools.cache
def exported():
    with temporary() as folder:
        return contents(exports.write(folder / "out", formats=("json", "dot")))


def check_export(folder):
    """Read an export like `lutjax verify` and `lutjax export`. A changed file must never pass as the original."""
    result = proofs.verify(folder)
    proofs.coverage(folder, result)
    changed = [name for name, content in contents(folder).items() if content != exported()[name]]
    if changed != [deployment.MANIFEST]:  # which has facts that no file proves, such as versions
        assert any(proof.passed is False for proof in result) == bool(changed)
    with contextlib.suppress(DeploymentError):
        deployment.check_place(folder)


@functools.cache
def program():
    """Files in a language-model export."""
    config = LUTTransformerConfig(
        features=4, context=4, n_layers=1, n_heads=1, n_anchors=2, ffn_anchors=2
    )
    rounded = integers.Rounded(LUTTransformer(config, rngs=nnx.Rngs(0)), tables="int8")
    given = language_model.texts_to_json(
        [rounded.text(b"ab", 5, temperature=800, top_k=256, seed=1)]
    )
    files = {**rounded.integer.to_c(), language_model.TEXTS: given.encode()}
    header = files["model.h"]
    facts, _ = language_model.parse_header(header if isinstance(header, str) else header.decode())
    written = {name: ("c", content) for name, content in files.items()}
    with temporary() as folder:
        manifest = deployment.manifest_of("language model", written, {"facts": facts}, None)
        deployment.write(folder / "out", written, manifest)
        return contents(folder / "out")


def check_program(folder):
    """Read a language-model export like `lutjax verify` without a compiler."""
    with mock.patch.object(proofs, "_tool", side_effect=proofs.SkippedError("no compiler")):
        result = proofs.verify(folder)
    proofs.coverage(folder, result)
    changed = [name for name, content in contents(folder).items() if content != program()[name]]
    if changed != [deployment.MANIFEST]:
        assert any(proof.passed is False for proof in result) == bool(changed)


TABLE = b"age,job name,city,y\n" + b"".join(
    b'%d, %s ,"a, b",%s\n'
    % (20 + 7 * k, (b"cook", b"?", b"M\xc3\xbcller")[k % 3], b"pq"[k % 2 : k % 2 + 1])
    for k in range(20)
)


def read_data(folder, name="", **options):
    """Read data like `lutjax train classify`."""
    result = datasets.load(folder / name, **options)
    result.parts(bits=4)
    assert result.digest


@functools.cache
def form_of(end):
    """Return the sample form to match file content with this extension."""
    if end == ".npz":
        return raw.Form((3,), ("0", "1"))
    if end == ".png":
        return raw.Form((8, 8, 3), ("0", "1"))
    with temporary() as folder:
        (folder / "t.csv").write_bytes(TABLE)
        parts = datasets.load(folder / "t.csv", target="y").parts(bits=4)
    return raw.Form.from_samples(parts.train, 2, parts.encoding)


def read_raw(path):
    """Read samples like `lutjax predict`."""
    raw.read(path, form_of(path.suffix), target={".csv": "y", ".npz": "y"}.get(path.suffix))


def table_of_parquet():
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    from pyarrow import parquet

    columns = {
        "age": [20.5, None, 31.0, 64.0] * 5,
        "job": pyarrow.array(["cook", None, "smith", "cook"] * 5).dictionary_encode(),
        "day": pyarrow.array([0, 1, 20_000, 5] * 5, pyarrow.date32()),
        "time": pyarrow.array([0, 1, 20_000, 5] * 5, pyarrow.timestamp("ms")),
        "y": ["p", "q"] * 10,
    }
    out = io.BytesIO()
    parquet.write_table(pyarrow.table(columns), out)
    return {"t.parquet": out.getvalue()}


def arrays(save, **more):
    def make():
        out = io.BytesIO()
        given = {"x": np.arange(60.0).reshape(20, 3), "y": np.arange(20) % 2, **more}
        save(out, **given)
        return {"a.npz": out.getvalue()}

    return make


def idx_files(pack=bytes, end=""):
    files = {}
    for part, n in (("train", 6), ("t10k", 3)):
        for name, shape in (("images-idx3", (n, 2, 3)), ("labels-idx1", (n,))):
            head = struct.pack(f">BBBB{len(shape)}I", 0, 0, 8, len(shape), *shape)
            files[f"{part}-{name}-ubyte{end}"] = pack(
                head + bytes(k % 3 for k in range(int(np.prod(shape))))
            )
    return files


def folders_of_images():
    bits = np.random.default_rng(0).integers(0, 2, (12, 8, 8), np.uint8) * 255
    files = {}
    for k, image in enumerate(bits):
        out, (end, format) = io.BytesIO(), (("png", "PNG"), ("jpg", "JPEG"))[k % 3 == 2]
        Image.fromarray(image).save(out, format)
        files[f"{('cat', 'dog')[k % 2]}/{k}.{end}"] = out.getvalue()
    return files


def batches(pack, end=""):
    pixels = np.random.default_rng(0).integers(0, 256, (2, 3072), np.uint8)
    names = (*(f"data_batch_{k}" for k in range(1, 6)), "test_batch")
    return {f"{name}{end}": pack(pixels, [3, 9]) for name in names}


def pickled(protocol):
    return lambda pixels, labels: pickle.dumps({b"data": pixels, b"labels": labels}, protocol)


def image(format, mode="RGB"):
    def make():
        bits = np.random.default_rng(0).integers(0, 2, (8, 8), np.uint8) * 255
        out = io.BytesIO()
        Image.fromarray(bits).convert(mode).save(out, format)
        return {f"i.{format.lower()}": out.getvalue()}

    return make


def checkpoint():
    trees = {"model": TREE}
    with temporary() as folder:
        checkpoints.save(folder, 3, trees, {"name": "first"})
        return contents(folder)


TREE = {"w": np.ones((2, 3), np.float32), "anchors": np.arange(4, dtype=np.int32)}


def read_checkpoint(folder):
    step, _ = checkpoints.read_meta(folder)
    list(checkpoints.foreign_entries(folder))
    checkpoints.restore(folder, step, "model", TREE)


def read_run(folder):
    """Read a run like `lutjax info`, `lutjax predict`, `lutjax.load` and `--resume`."""
    runs.is_lock(folder / runs.LOCK)
    list(runs.existing_outputs(folder, ("gates.txt",)))
    runs.read_finishing_record(folder).is_complete(folder)
    said = []
    said += about.lines(about.facts(folder, on_damage=said.append))
    assert not any("\n" in line for line in said)
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", "Explicitly requested dtype int64"
        )  # of sizes that no model has
        load(folder)
        if runs.COMMANDS[runs.kind(folder)] == "train classify":
            predictions.load(folder)


def of_table(folder):
    """Write a run on a table, including its best network."""
    cells = {"a": columns.strings(map(str, range(20))), "b": columns.strings("xyxx" * 5)}
    parts = datasets.Data(columns.Table(cells, columns.strings("pq" * 10), "t")).parts(bits=3)
    n = len(parts.encoding.features)
    config = LogicClassifierConfig(in_features=n, n_classes=2, n_thresholds=0, layers=(8, 8))
    training = classifier.TrainingConfig(steps=3, select_every=1)
    form, source = (
        raw.Form.from_samples(parts.train, 2, parts.encoding),
        runs.Source("t.csv", 100, "f" * 64),
    )
    baselines = {"forest": 0.5}
    record = classifier.Record(
        config, training, source, baselines, {}, small_runs.HISTORY, "y", form=form
    )
    models.save(folder, 3, classifier.Run(config, training, parts.train).init(), record)
    (folder / "columns.json").write_text(parts.encoding.to_json())


RUNS = {
    "ca": small_runs.ca_run,
    "table": of_table,
    "trees": small_runs.tree_run,
    "lm": small_runs.lm_run,
}


@functools.cache
def run(name):
    """Return the files in a run."""
    with temporary() as folder:
        RUNS[name](folder)
        digest = checkpoints.peek(folder / runs.FOLDER)[2]
        runs.Finished(digest, {"gates.txt": (True, ["a"])}, "done").write(folder)
        runs.write_curves(folder / runs.CURVES, small_runs.HISTORY, ("training loss", "wrong bits"))
        (folder / runs.LOCK).write_text("123")
        return contents(folder)


@functools.cache
def bundle(name):
    """Return the bundle files for a run."""
    with temporary() as folder:
        RUNS[name](folder / "run")
        save(load(folder / "run"), folder / "saved")
        return contents(folder / "saved")


def bundle_of_arrays():
    with temporary() as folder:
        table = np.linspace(-1, 1, 24, dtype=np.float32).reshape(2, 4, 3)
        save(
            {
                "params": {"w": table, "b": np.ones(3, np.float16)},
                "ids": np.arange(4, dtype=np.int32),
            },
            folder,
            tables=["w"],
            table_dtype="int8",
        )
        return contents(folder)


def read_bundle(folder):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Explicitly requested dtype")  # of 64 bits
        load(folder)


def read_signed(folder):
    """Read the arrays in a bundle after updating the config's tensor digest, so that damage passes the digest check."""
    result, content = json.loads((folder / CONFIG).read_bytes()), (folder / TENSORS).read_bytes()
    result["files"][TENSORS] = {
        "bytes": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
    }
    (folder / CONFIG).write_text(json.dumps(result))
    bundles.read(folder).tree()


def network_of_others():
    wires = np.asarray([[0, 1, 2, 3], [1, 2, 3, 0]])
    return {
        "m.safetensors": safetensors.numpy.save(
            {"0.weight": np.eye(16, dtype=np.float32)[:4], "0.connections.indices": wires}
        )
    }


def read_network(folder):
    """Read a network like `lutjax import`."""
    convert.torchlogix(convert.read(folder / "m.safetensors"), n_classes=2)


def in_header(data, draw):
    """Return a tensor file with a changed header value and a matching header length."""
    length = int.from_bytes(data[:8], "little")
    text = draw.choice((JSON, BYTES))(data[8 : 8 + length], draw)
    return len(text).to_bytes(8, "little") + text + data[8 + length :]


def resigned(data, draw):
    """Return a checkpoint's JSON with a changed value and a matching digest."""
    content = json.loads(damage.of_json(data, draw))
    if isinstance(content, dict):
        content.pop("digest", None)
        content["digest"] = checkpoints._content_digest(content)
    return json.dumps(content).encode()


def in_page(data, draw):
    """Return a page with one changed value in its circuit."""
    begin = data.index(b'id="circuit">') + len(b'id="circuit">')
    end = data.index(b"</script>", begin)
    return data[:begin] + draw.choice((JSON, BYTES))(data[begin:end], draw) + data[end:]


def near_the_ends(data, draw):
    """Return a pickle damaged before or after its pixels."""
    n = min(200, len(data) // 2)
    if draw.random() < 0.5:
        return BYTES(data[:n], draw) + data[n:]
    return data[:-n] + BYTES(data[-n:], draw)


def read_picture(path):
    patterns.read_image(path, 8, threshold=0.5)


BYTES, JSON = damage.of_bytes, damage.of_json
VALUE, DATA = (ValueError,), (SamplesError,)
SIGNED, ALL_JSON, CHECKPOINT = (
    "checkpoints/3/checkpoint.json",
    (BYTES, JSON),
    (CheckpointError, DamagedError),
)
ROOMY = {"room": 4 * ROOM}
MANIFEST = {"weight": 0.5, "only": "manifest.json", "damages": (JSON,), **ROOMY}


def data(good, name="", times=200, damages=(BYTES,), **more):
    """Return a reader for training data."""
    target = {"target": "y"} if name.startswith("t.") else {}
    return Reader(
        good, lambda folder: read_data(folder, name, **target), DATA, times, datasets.load, None, damages,
        **more,
    )  # fmt: skip


READERS = {
    **{
        name: Reader(one(file, content), of(file, read), VALUE, times, read, named, damages)
        for name, file, content, read, times, named, damages in (
            ("blif", "c.blif", circuits.blif.write(CIRCUIT), circuits.blif.read, 100, "blif.read", (BYTES,)),
            ("blif of others", "c.blif", FOREIGN, circuits.blif.read, 100, "blif.read", (BYTES,)),
            ("aiger, binary", "c.aig", circuits.aiger.write(CIRCUIT), circuits.aiger.read, 500, "aiger.read", (BYTES,)),
            ("aiger, ascii", "c.aag", circuits.aiger.write(CIRCUIT, binary=False), circuits.aiger.read, 500, "aiger.read", (BYTES,)),
            ("json", "c.json", circuits.netlist_json.write(CIRCUIT), circuits.netlist_json.read, 100, "netlist_json.read", ALL_JSON),
            ("texts", "t.json", texts(), language_model.texts_from_json, 100, "", ALL_JSON),
            ("encoding", "e.json", encoding(), Encoding.from_json, 100, "", ALL_JSON),
        )
    },
    "page": Reader(
        one("c.html", circuits.page.write(CIRCUIT)), lambda folder: circuits.page.read((folder / "c.html").read_text("utf-8", "surrogateescape")),
        VALUE, 100, circuits.page.read, "page.read", (in_page, in_page, BYTES),
    ),
    "vectors": Reader(one("v.json", vectors().to_json()), of("v.json", lambda data: Vectors.from_json(data).check(CIRCUIT)), VALUE, 100, Vectors.from_json, "", ALL_JSON),
    "export": Reader(exported, check_export, (DeploymentError,), 100, deployment.read_manifest, "manifest.json", weight=0.5, **ROOMY),
    "manifest": Reader(exported, check_export, (DeploymentError,), 100, deployment.read_manifest, **MANIFEST),
    "program": Reader(program, check_program, (DeploymentError,), 100, deployment.read_manifest, "manifest.json", weight=0.1, **ROOMY),
    "program, manifest": Reader(program, check_program, (DeploymentError,), 100, deployment.read_manifest, **MANIFEST),
    "launches": Reader(one("l.json", LAUNCHES), lambda folder: tuning.load(folder / "l.json"), VALUE, 100, tuning.load, None, ALL_JSON),
    **{
        f"predict, {name}": Reader(make, lambda folder, end=end: read_raw(folder / f"t{end}"), DATA, times, raw.read, None, damages, **ROOMY)
        for name, make, end, times, damages in (
            ("csv", one("t.csv", TABLE), ".csv", 200, (BYTES,)),
            ("npz", one("t.npz", arrays(np.savez_compressed)()["a.npz"]), ".npz", 8000, (BYTES, damage.of_members)),
            ("image", one("t.png", image("PNG")()["i.png"]), ".png", 200, (BYTES, damage.of_png)),
        )
    },
    "csv": data(one("t.csv", TABLE), "t.csv"),
    "tsv": data(one("t.tsv", TABLE.replace(b",", b"\t")), "t.tsv"),
    "csv, gzip": data(one("t.csv.gz", gzip.compress(TABLE, mtime=0)), "t.csv.gz", 8000, (BYTES, damage.of_gzip)),
    "parquet": data(table_of_parquet, "t.parquet", 8000),
    "npz, stored": data(arrays(np.savez), "a.npz", 8000, (BYTES, damage.of_members)),
    "npz, compressed": data(arrays(np.savez_compressed), "a.npz", 8000, (BYTES, damage.of_members)),
    "npz, text": data(
        arrays(np.savez, x=np.array([["a", "1"], ["b", "2"]] * 10), y=np.array(["p", "q"] * 10), names=["one", "two"]),
        "a.npz", 8000, (BYTES, damage.of_members),
    ),
    "idx": data(idx_files),
    "idx, gzip": data(lambda: idx_files(gzip.compress, ".gz"), "", 8000, (BYTES, damage.of_gzip)),
    "folder of images": data(folders_of_images, **ROOMY),
    "folder of images, chunks": data(folders_of_images, damages=(damage.of_png,), only="dog/3.png", **ROOMY),
    "cifar, binary": data(lambda: batches(lambda x, y: b"".join(bytes([k]) + row.tobytes() for k, row in zip(y, x, strict=True)), ".bin")),
    **{f"cifar, protocol {k}": data(lambda k=k: batches(pickled(k)), damages=(near_the_ends, BYTES)) for k in (0, 2, 4)},
    **{
        f"image, {format}": Reader(
            image(format, mode), lambda folder, format=format: read_picture(folder / f"i.{format.lower()}"),
            (patterns.PatternError,), 200, pixels.read, None, (BYTES, damage.of_png) if format == "PNG" else (BYTES,), **ROOMY,
        )
        for format, mode in (("PNG", "RGB"), ("GIF", "L"), ("BMP", "RGB"), ("PPM", "RGB"), ("WEBP", "RGB"), ("JPEG", "L"), ("TIFF", "RGB"))
    },
    "text": Reader(
        lambda: {f"t/{name}.txt": TABLE for name in "abc"}, lambda folder: text.load_text(folder / "t"), (text.TextError,), 20,
        text.load_text, "",
    ),
    "checkpoint": Reader(checkpoint, read_checkpoint, CHECKPOINT, 100, checkpoints.read_meta, "", weight=0.2),
    "checkpoint, signed": Reader(checkpoint, read_checkpoint, CHECKPOINT, 100, checkpoints.read_meta, "", (resigned,), 0.2, "3/checkpoint.json"),
    **{
        f"{what}, {name}": Reader(functools.partial(make, name), read, errors, 100, says, named, (how,), 0.1, only, 16 * ROOM)
        for name in RUNS
        for what, make, read, errors, says, named, how, only in (
            ("run", run, read_run, CHECKPOINT, runs.read, "", BYTES, None),
            ("run signed", run, read_run, CHECKPOINT, runs.read, "", resigned, SIGNED),
            ("bundle", bundle, read_bundle, (BundleError,), bundles.read, "bundle", BYTES, None),
            ("config", bundle, read_bundle, (BundleError,), bundles.read, "bundle", JSON, CONFIG),
        )
    },
    "bundle of arrays": Reader(bundle_of_arrays, read_bundle, (BundleError,), 100, bundles.read, "bundle"),
    "bundle of arrays, config": Reader(bundle_of_arrays, read_bundle, (BundleError,), 100, bundles.read, "bundle", (JSON,), 1.0, CONFIG),
    "bundle of arrays, signed": Reader(bundle_of_arrays, read_signed, (BundleError,), 100, bundles.read, "bundle", (BYTES, in_header), 1.0, TENSORS),
    "network of others": Reader(network_of_others, read_network, (ConversionError,), 100, convert.read, "", (BYTES, in_header)),
}  # fmt: skip
"""All readers for files from untrusted sources. The measurement file (curves.csv) is write-only and never read."""


def tried(reader, seed, n, folder):
    """Read the given number of damaged files; yield each name and its error, if any, while the file exists."""
    draw, good = random.Random(seed), reader.good()
    for name, content in good.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    reader.read(folder)
    size = sum(map(len, good.values()))
    for _ in range(n):
        name = reader.only or draw.choice(list(good))
        content = draw.choice(reader.damages)(good[name], draw)
        if content != good[name]:
            (folder / name).write_bytes(content)
            most = reader.room + reader.times * (size + max(0, len(content) - len(good[name])))
            yield name, complaint(reader, folder, name, most)
            (folder / name).write_bytes(good[name])


def complaint(reader, folder, name, most):
    """Return an error description for a reader on a folder with one damaged file, or None on success.

    Args:
      most: memory limit in bytes.
    """
    error, peak = outcome(reader, folder)
    if peak > most:  # twice: of Python's own tables one grows now and then
        peak = outcome(reader, folder)[1]
    if peak > most:
        return f"takes {peak:,} octets, expected at most {most:,}"
    if error is None:
        return None
    said = f"{type(error).__name__}: {error}"
    if type(error) not in reader.errors:
        return said
    if (name.split("/")[-1] if reader.named is None else reader.named) not in said:
        return f"the message does not name the file: {said}"
    return f"{len(said)} characters: {said}" if "\n" in said or len(said) > 1000 else None


def outcome(reader, folder):
    """Return the error raised by a reader for the folder content, and its peak memory in bytes."""
    tracemalloc.start()
    try:
        with in_time(), few_addresses():
            reader.read(folder)
        return None, tracemalloc.get_traced_memory()[1]
    except Exception as error:  # noqa: BLE001 (which are allowed, is asked then)
        return error, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@contextlib.contextmanager
def in_time():
    """Raise TimeoutError if a block exceeds its time limit."""

    def hangs(*_):
        raise TimeoutError(f"reading takes more than {SECONDS} seconds")

    if not hasattr(signal, "setitimer"):  # Windows
        yield
        return
    before = signal.signal(signal.SIGPROF, hangs)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)  # of the processor
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


@contextlib.contextmanager
def few_addresses():
    """Limit total memory inside a block, including native libraries."""
    if resource is None or not Path("/proc/self/statm").exists():
        yield
        return
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + ADDRESSES, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def check(name, seed, n, folder):
    """Damage about `n` files of a reader."""
    for file, wrong in tried(READERS[name], seed, round(n * READERS[name].weight), folder):
        assert wrong is None, f"{folder / file}: {wrong}"
