"""Integer lookup-table language models, and a C99 program that generates the same bytes."""

import dataclasses
import itertools
import json
import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int

from lutjax.circuits._c_emitter import array, read_source
from lutjax.circuits.detectors import IntegerLUT, finest_fraction, integers, magnitudes, sums
from lutjax.files import strict_json
from lutjax.files.strict_json import Fields, format_value

EXACT = 2**24
"""Integers and integer sums below this bound are exact in float32, in any order."""

MOST_EMBEDDED = 2**21
"""Maximum table entries embedded in the program.

Larger tables are loaded from a file at startup.
"""

TABLES = ("int16", "int8")
TABLES_FILE = "tables.bin"
"""Name of the table file, if the tables are not embedded."""

TEXTS = "texts.json"
"""Name of the file with expected program texts; see `verify`."""

TEMPERATURES = 1000
"""Temperatures are integers in units of 1 over this value."""

_BYTES = 256
_LOG2_E = 94548  # in units of 2**-16
_MOST_TABLE_BYTES = 2**31 - 2**24


@dataclasses.dataclass(frozen=True, eq=False)
class IntegerAttention:
    """Integer lookup-table attention; fields shared with `IntegerLUT` are the same.

    Attributes:
      anchors: int32 ``[T, C, 2]``.
      values: int8 or int16 ``[T, R, O]``.
      shifts: left shift for each output ``[O]``.
      positions: int32 ``[distances, T or 1, N]``: bits of each distance, or with `pairs` the
        compared numbers.
      pairs: whether each pair of positions forms one detector input vector: earlier position,
        later position, distance encoding.
    """

    anchors: Int[np.ndarray, "detectors anchors 2"]
    values: Int[np.ndarray, "detectors rows outputs"]
    shifts: Int[np.ndarray, " outputs"]
    positions: Int[np.ndarray, "distances _ bits"]
    pairs: bool


@dataclasses.dataclass(frozen=True, eq=False)
class IntegerLanguageModel:
    """`lutjax.models.LUTTransformer` in integers, created by `of`.

    A vector represents its integers over ``2**fraction``, and logits represent theirs over
    ``2**unembed.fraction``. For any text, all of them are below `EXACT` in magnitude.

    Attributes:
      embedding: int32 ``[256, F]``.
      attention: attention of each layer.
      ffn: feed-forward tables of each layer, or empty.
      unembed: output tables.
      fraction: fraction bits of vectors.
      window: number of earlier bytes visible in each layer.
    """

    embedding: Int[np.ndarray, "vocab features"]
    attention: tuple[IntegerAttention, ...]
    ffn: tuple[IntegerLUT, ...]
    unembed: IntegerLUT
    fraction: int
    window: int

    @property
    def n_values(self) -> int:
        """Total table entries."""
        return sum(values.size for values in self._tables())

    @property
    def dtype(self) -> np.dtype:
        """Dtype of the tables."""
        return self.unembed.values.dtype

    def _tables(self) -> Iterator[np.ndarray]:
        for k, attention in enumerate(self.attention):
            yield attention.values
            yield from (layer.values for layer in self.ffn[k : k + 1])
        yield self.unembed.values

    def to_c(self, *, tables_in_file: bool | None = None) -> dict[str, bytes]:
        """Return the program files by name: C99 sources, a Makefile, and optionally the tables.

        ``make`` compiles ``language_model``, which continues the text in its argument or standard
        input and writes the new bytes; ``language_model -h`` lists the options.
        ``language_model.h`` is the interface for other programs. With embedded tables it needs no
        heap and no file.

        Args:
          tables_in_file: whether the program loads the tables from ``tables.bin``. None: if they
            have more than `MOST_EMBEDDED` entries, which take seconds to compile.

        Raises:
          ValueError: the tables are too large for one C array.
        """
        if tables_in_file is None:
            tables_in_file = self.n_values > MOST_EMBEDDED
        n_bytes = self.n_values * self.dtype.itemsize
        if n_bytes > _MOST_TABLE_BYTES:
            smaller = ", or tables of int8." if self.dtype == np.int16 else "."
            raise ValueError(
                f"to_c: the tables have {n_bytes:,} bytes; "
                f"programs address at most {_MOST_TABLE_BYTES:,}. Take a smaller model{smaller}"
            )
        files = {name: read_source(name) for name in _SOURCES}
        files["model.h"] = self._sizes(tables_in_file)
        files["tables.h"], files["tables.c"] = self._arrays(tables_in_file)
        files["Makefile"] = read_source("Makefile")
        texts = {name: text.encode("ascii") for name, text in files.items()}
        if not tables_in_file:
            return texts
        # Files have the same bytes on every processor.
        little = self.dtype.newbyteorder("<")
        return {**texts, TABLES_FILE: b"".join(t.astype(little).tobytes() for t in self._tables())}

    def _sizes(self, tables_in_file: bool) -> str:
        attention, ffn = self.attention[0], self.ffn[0] if self.ffn else None
        detectors, anchors, _ = attention.anchors.shape
        sizes = {
            "BYTES": len(self.embedding),
            "FEATURES": self.embedding.shape[1],
            "FRACTION": self.fraction,
            "LAYERS": len(self.attention),
            "WINDOW": self.window,
            "PAIRS": int(attention.pairs),
            "KEY_SIZE": self.embedding.shape[1] if attention.pairs else detectors,
            "ATTENTION_DETECTORS": detectors,
            "ATTENTION_ANCHORS": anchors,
            "ATTENTION_BITS": attention.values.shape[1].bit_length() - 1,
            "POSITION_BITS": attention.positions.shape[2],
            "POSITION_LISTS": attention.positions.shape[1],
            "FFN_DETECTORS": 0 if ffn is None else len(ffn.anchors),
            "FFN_ANCHORS": 0 if ffn is None else ffn.anchors.shape[1],
            "UNEMBED_DETECTORS": len(self.unembed.anchors),
            "UNEMBED_ANCHORS": self.unembed.anchors.shape[1],
            "LOGIT_FRACTION": self.unembed.fraction,
            "TABLE_SIZE": self.n_values,
            "TABLES_IN_FILE": int(tables_in_file),
        }
        lines = [f"#define LM_{name} {size}" for name, size in sizes.items()]
        head = ["/* Sizes of the model. A vector stands for its numbers over 2**LM_FRACTION. */"]
        head += ["#ifndef MODEL_H", "#define MODEL_H", "", "#include <stdint.h>", ""]
        return "\n".join([*head, *lines, "", f"typedef {self.dtype}_t lm_value;", "", "#endif", ""])

    def _arrays(self, tables_in_file: bool) -> tuple[str, str]:
        layers = self.attention
        positions = np.stack([a.positions for a in layers])
        if not layers[0].pairs:
            positions = (positions << np.arange(positions.shape[-1])).sum(-1)
        shifts = np.stack([a.shifts for a in layers])
        arrays: list[tuple[str, str, np.ndarray]] = [
            ("int32_t", "embedding", self.embedding),
            ("uint16_t", "attention_anchors", np.stack([a.anchors for a in layers])),
            ("uint8_t", "attention_shifts", shifts),
            ("int32_t", "positions", positions),
            ("uint16_t", "unembed_anchors", self.unembed.anchors),
            ("uint8_t", "unembed_shifts", self.unembed.shifts),
            ("uint32_t", "powers", powers()),
        ]
        if self.ffn:
            arrays += [
                ("uint16_t", "ffn_anchors", np.stack([f.anchors for f in self.ffn])),
                ("uint8_t", "ffn_shifts", np.stack([f.shifts for f in self.ffn])),
            ]
        if not tables_in_file:
            tables = np.concatenate([t.ravel() for t in self._tables()])
            arrays.append(("lm_value", "tables", tables))
        # C has no zero-size arrays.
        arrays = [
            (kind, f"lm_{name}", values if values.size else np.zeros(1, int))
            for kind, name, values in arrays
        ]
        head = ["/* Arrays of the model. */", "#ifndef TABLES_H", "#define TABLES_H", ""]
        head += ["#include <stddef.h>", "", '#include "model.h"', ""]
        head += [f"extern const {kind} {name}[{values.size}];" for kind, name, values in arrays]
        if tables_in_file:
            head.append("extern lm_value lm_tables[LM_TABLE_SIZE];")
        body = ['#include "tables.h"', ""]
        for kind, name, values in arrays:
            body += array(kind, name, values, static=False)
        return "\n".join([*head, "", "#endif", ""]), "\n".join(body)


def _error(text: str) -> ValueError:
    return ValueError(f"language_model.from_model: {text}")


def from_model(model: Any, *, tables: str = "int16") -> IntegerLanguageModel:
    """Return the integer form of a `lutjax.models.LUTTransformer`, rounded to nearest.

    Vectors and logits have the most fraction bits that keep every sum below `EXACT` for any text.
    Tables in int16 are fixed-point numbers with these bits; int8 tables have a power-of-two scale
    for each output, as in `lutjax.quantize_tables`.

    Args:
      model: the model.
      tables: ``"int16"`` or ``"int8"``.

    Raises:
      ValueError, TypeError: the model has no integer form, or its values are too large.
    """
    name = type(model).__name__
    if name != "LUTTransformer":
        softmax = ", whose softmax attention computes with floats" if name == "GPT" else ""
        raise TypeError(
            f"language_model.from_model: there is no integer form of {name}{softmax}; "
            "expected a LUTTransformer, which compares and adds alone."
        )
    if tables not in TABLES:
        raise _error(f"tables is {tables!r}; expected one of {TABLES}.")
    config = model.config
    if config.vocab_size != _BYTES:
        raise _error(
            f"vocab_size is {config.vocab_size}; programs read and write bytes, {_BYTES} of them."
        )
    if config.batch_norm:
        raise _error("batch_norm is True, which needs floats between tables; train without it.")
    if config.memory != "window":
        raise _error(
            f"memory is {config.memory!r}, which programs do not support; train with 'window'."
        )
    read = [(np.asarray(b.attention.layer.weights[...]), b.attention.layer) for b in model.layers]
    ffn_layers = [b.ffn.layer for b in model.layers if b.ffn is not None]
    ffn = [(np.asarray(layer.weights[...]), layer) for layer in ffn_layers]
    embedding = np.asarray(model.embedding[...]).astype(np.float64)
    window, pairs = config.context - 1, config.attention != "concatenated"
    positions = [np.zeros((window, 1, 0))] * len(read)
    for k, (_, layer) in enumerate(read):
        if layer.spec.n_position_bits:
            positions[k] = np.asarray(layer.positions[...]).astype(np.float64)
    # Attention adds once per position of its window, a feedforward layer once.
    added = [(weights, window) for weights, _ in read] + [(weights, 1) for weights, _ in ffn]
    largest_position = max(float(np.abs(p).max(initial=0)) for p in positions) if pairs else 0.0
    fraction = _fraction(added, np.abs(embedding).max(0), largest_position, tables)
    unembed = np.asarray(model.unembed.weights[...])
    logit_fraction = _fraction([(unembed, 1)], np.zeros(_BYTES), 0.0, tables)

    def table(layer: Any, weights: np.ndarray, fraction: int) -> IntegerLUT:
        values, shifts = integers(weights, fraction, tables)
        return IntegerLUT(config.features, np.asarray(layer.anchors[...]), values, shifts, fraction)

    attention = []
    for (weights, layer), position in zip(read, positions, strict=True):
        values, shifts = integers(weights, fraction, tables)
        anchors = np.asarray(layer.anchors[...])
        if config.attention == "pair_interleaved":
            # Inputs alternate between the three vectors of a pair. Programs have them one after
            # another.
            anchors = anchors % 3 * config.features + anchors // 3
        numbers = _units(position, fraction) if pairs else (position > 0).astype(np.int32)
        attention.append(IntegerAttention(anchors, values, shifts, numbers, pairs))
    return IntegerLanguageModel(
        _units(embedding, fraction),
        tuple(attention),
        tuple(table(layer, weights, fraction) for weights, layer in ffn),
        table(model.unembed, unembed, logit_fraction),
        fraction,
        window,
    )


def _fraction(
    tables: list[tuple[np.ndarray, int]], start: np.ndarray, apart: float, dtype: str
) -> int:
    """Return the most fraction bits with exact sums of tables, each added a number of times.

    A sum starts below `start` in magnitude; other values are up to `apart`.
    """
    most, largest, n_addends = start.astype(np.float64), 0.0, 1
    for weights, times in tables:
        if not np.isfinite(weights).all():
            raise _error("a table has infinite or NaN entries, which integers cannot represent.")
        reached = magnitudes(weights, dtype)
        most = most + times * sums(reached, len(start))
        largest = max(largest, float(reached.max(initial=0)))
        n_addends += times * len(weights)
    bound = max(float(most.max(initial=0)), apart)
    fraction = finest_fraction(bound, largest, n_addends, dtype, limit=EXACT - 1)
    if fraction < 0:
        raise _error(
            f"sums can reach {bound:.3g} and entries of tables {largest:.3g}, "
            f"too much for whole numbers below 2**24 and tables of {dtype}; "
            "train with weight decay or a smaller rate."
        )
    return fraction


def _units(numbers: np.ndarray, fraction: int) -> np.ndarray:
    # Ties round up, as in all tables.
    units: np.ndarray = np.floor(np.ldexp(numbers, fraction) + 0.5).astype(np.int32)
    return units


# -------------------------------------------------------------------------------------------- draws
def powers() -> Int[np.ndarray, " entries"]:
    """Return ``2**-(i / 2**8)``, followed by ``2**-(i / 2**16)``, in 2**-31 units."""
    i = np.arange(256)
    return np.round(2.0**31 * 2.0 ** -np.concatenate([i / 2**8, i / 2**16])).astype(np.int64)


class Draws:
    """Integer byte sampling, identical to the C program.

    The weight of a byte with a logit ``d`` below the maximum is ``2**-e``, where
    ``e = d log2(exp(1)) / temperature`` is truncated to 16 fraction bits. A SplitMix64 sample,
    modulo the sum of the weights, selects a byte.

    Args:
      seed: random seed, from 0 to 2**64 - 1.
      fraction: fraction bits of logits.
      temperature: in thousandths; 0 selects the most likely byte, the first in case of ties.
      top_k: sample only from this number of most likely bytes; ties prefer the first.

    Example:
      >>> import numpy as np
      >>> from lutjax.circuits.language_model import Draws
      >>> draws = Draws(seed=1, fraction=0, temperature=1000)
      >>> [draws(np.array([0, 2, 1])) for _ in range(8)]
      [1, 1, 1, 1, 1, 0, 1, 1]
    """

    def __init__(self, *, seed: int, fraction: int, temperature: int, top_k: int = _BYTES):
        self._state, self._fraction = seed, fraction
        self._temperature, self._top_k = temperature, top_k
        self._powers = powers().astype(np.uint64)

    def __call__(self, logits: Int[np.ndarray, " bytes"]) -> int:
        """Return the next byte for logits in ``2.0**-fraction`` units."""
        if self._temperature == 0:
            return int(logits.argmax())
        below = (int(logits.max()) - logits.astype(np.int64)).astype(np.uint64)
        weights = self._weights(below)
        # Among equal logits, lower bytes rank first, as in the program.
        rank = np.argsort(-logits.astype(np.int64), kind="stable")
        weights[rank[self._top_k :]] = 0
        drawn = self._next_number() % int(weights.sum())
        return int(np.searchsorted(np.cumsum(weights), drawn, side="right"))

    def _weights(self, below: np.ndarray) -> np.ndarray:
        u = np.uint64
        # The exponent e, in units of 2**-16, splits into its whole part and two bytes, which have a
        # table of powers each.
        e = below * u(_LOG2_E * TEMPERATURES) // u(self._temperature << self._fraction)
        whole, coarse_byte, fine_byte = e >> u(16), e >> u(8) & u(255), e & u(255)
        coarse, fine = self._powers[coarse_byte], self._powers[256:][fine_byte]
        # Shifts by 64 bits or more are undefined, and weights below 2**-31 are 0 anyway.
        shifted = coarse * fine >> u(31) >> np.minimum(whole, u(31))
        weights: np.ndarray = np.where(whole > 31, u(0), shifted)
        return weights

    def _next_number(self) -> int:
        # SplitMix64: two multiplications and shifts per number, and any seed is as good as another.
        mask = 2**64 - 1
        self._state = r = self._state + 0x9E3779B97F4A7C15 & mask
        r = (r ^ r >> 30) * 0xBF58476D1CE4E5B9 & mask
        r = (r ^ r >> 27) * 0x94D049BB133111EB & mask
        return r ^ r >> 31


# -------------------------------------------------------------------------------------------- proof
class DifferenceError(Exception):
    """A program with different output from its model."""


@dataclasses.dataclass(frozen=True)
class Text:
    """Expected program output for a prompt.

    Attributes:
      prompt: at least one byte.
      temperature: in thousandths. top_k, seed: as in `Draws`.
      logits: logits after the prompt, in ``2.0**-fraction`` units.
      continuation: bytes after the prompt.
    """

    prompt: bytes
    temperature: int
    top_k: int
    seed: int
    logits: tuple[int, ...]
    continuation: bytes

    def options(self, n_bytes: int) -> list[str]:
        """Return the program options for generating `n_bytes` bytes."""
        temperature = f"{self.temperature // TEMPERATURES}.{self.temperature % TEMPERATURES:03}"
        return ["-n", str(n_bytes), "-t", temperature, "-k", str(self.top_k), "-s", str(self.seed)]


def texts_to_json(texts: Sequence[Text]) -> str:
    """Return texts as JSON, with bytes in hexadecimal."""
    rows = []
    for text in texts:
        fields = dataclasses.asdict(text).items()
        rows.append({name: x.hex() if isinstance(x, bytes) else x for name, x in fields})
    return "[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n"


def texts_from_json(text: str | bytes) -> list[Text]:
    """Parse `texts_to_json` output. It takes at most 100 times the memory of the text."""
    try:
        rows = strict_json.loads(text)
    except ValueError as error:
        raise ValueError(f"the text is not JSON: {error}.") from None
    if not isinstance(rows, list) or not rows:
        raise ValueError(f"it holds {format_value(rows)}; expected a list of texts.")
    return [_text(Fields(f"text {k}"), row) for k, row in enumerate(rows)]


def _text(fields: Fields, row: Any) -> Text:
    prompt = bytes.fromhex(fields.field(row, "prompt", str))
    continuation = bytes.fromhex(fields.field(row, "continuation", str))
    logits = fields.field(row, "logits", list)
    numbers = (fields.field(row, name, int) for name in ("temperature", "top_k", "seed"))
    temperature, top_k, seed = numbers
    limits = (0 <= temperature <= 1000 * TEMPERATURES, 1 <= top_k <= _BYTES, 0 <= seed < 1 << 64)
    if not all(limits) or not prompt or not continuation:
        raise ValueError(
            f"{fields.where} has a prompt of {len(prompt)} bytes, "
            f"a temperature of {temperature} thousandths, top_k {top_k}, "
            f"the seed {seed} and {len(continuation)} bytes; no program writes that."
        )
    if len(logits) != _BYTES or any(type(logit) is not int for logit in logits):
        raise ValueError(
            f"{fields.where}: 'logits' is {format_value(logits)}; expected {_BYTES} whole numbers."
        )
    return Text(prompt, temperature, top_k, seed, tuple(logits), continuation)


def parse_header(header: str) -> tuple[dict[str, Any], list[str]]:
    """Return the model facts in ``model.h``, and the program files except the Makefile."""
    defines = re.findall(r"^#define LM_(\w+) (\d{1,12})$", header, re.MULTILINE)
    sizes = {name: int(size) for name, size in defines}
    values = re.findall(r"^typedef (int8|int16)_t lm_value;$", header, re.MULTILINE)
    needed = {"TABLE_SIZE", "FRACTION", "LOGIT_FRACTION", "WINDOW", "TABLES_IN_FILE"}
    if len(values) != 1 or not needed <= set(sizes):
        what = ", ".join(sorted(needed - set(sizes))) or "one type of values"
        raise ValueError(f"model.h does not state {what}.")
    facts = {
        "tables": values[0],
        "values": sizes["TABLE_SIZE"],
        "table_bytes": sizes["TABLE_SIZE"] * np.dtype(values[0]).itemsize,
        "fraction": sizes["FRACTION"],
        "logit_fraction": sizes["LOGIT_FRACTION"],
        "context": sizes["WINDOW"] + 1,
    }
    return facts, sorted(FILES if sizes["TABLES_IN_FILE"] else FILES - {TABLES_FILE})


def verify(folder: Path, *, compiler: str = "cc", flags: Sequence[str] = ("-O2",)) -> str:
    """Compile and run the program in a folder, and compare it with texts from the JAX model.

    Args:
      folder: folder with the `IntegerLanguageModel.to_c` files and `TEXTS`; it is not modified.
      compiler: C99 compiler.
      flags: compiler flags.

    Returns:
      A description of the compared data.

    Raises:
      DifferenceError: different bytes or logits, or the program does not terminate.
      ValueError: the texts are damaged.
      subprocess.CalledProcessError: compilation or execution fails.
      OSError: the compiler or folder does not exist.
    """
    try:
        texts = texts_from_json((folder / TEXTS).read_bytes())
    except ValueError as error:
        raise ValueError(f"{TEXTS} cannot be read: {error}") from None
    with tempfile.TemporaryDirectory() as place:
        program = Path(place, "language_model")
        sources = [str(folder / name) for name in ("main.c", "language_model.c", "tables.c")]
        command = [compiler, "-std=c99", *flags, "-o", str(program), *sources]
        subprocess.run(command, check=True, capture_output=True)

        def run(text: Text, n_bytes: int, *options: str) -> bytes:
            if (folder / TABLES_FILE).exists():
                options = (*options, "-m", str((folder / TABLES_FILE).absolute()))
            words = [str(program), *text.options(n_bytes), *options]
            try:
                done = subprocess.run(
                    words, input=text.prompt, check=True, capture_output=True, timeout=_SECONDS
                )
            except subprocess.TimeoutExpired:
                raise DifferenceError(
                    f"the program has not ended after {_SECONDS} seconds."
                ) from None
            return done.stdout

        for k, text in enumerate(texts):
            try:
                logits = tuple(map(int, run(text, 1, "-l").split()))
            except ValueError:
                raise DifferenceError(f"text {k}: the program does not write logits.") from None
            if logits != text.logits:
                wrong = sum(a != b for a, b in itertools.zip_longest(logits, text.logits))
                raise DifferenceError(
                    f"text {k}: {wrong} of {len(logits)} logits differ from the model."
                )
            written = run(text, len(text.continuation))
            if written != text.continuation:
                same = [a == b for a, b in zip(written, text.continuation, strict=False)]
                first = same.index(False) if False in same else len(same)
                raise DifferenceError(
                    f"text {k}: byte {first} after the prompt differs from the model."
                )
    n_bytes = sum(len(text.continuation) for text in texts)
    return f"{n_bytes} bytes of {len(texts)} texts, and {len(texts)} times {_BYTES} logits"


_SECONDS = 600  # time limit of a program
_SOURCES = ("language_model.h", "language_model.c", "detectors.h", "main.c")
FILES = frozenset((*_SOURCES, "model.h", "tables.h", "tables.c", TEXTS, TABLES_FILE))
"""Program file names except the Makefile; the table file is optional."""
