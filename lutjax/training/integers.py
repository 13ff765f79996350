"""Integer language models of lookup tables: rounding, JAX evaluation, and C export."""

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lutjax.circuits import language_model
from lutjax.circuits.detectors import IntegerLUT
from lutjax.circuits.language_model import TEMPERATURES, TEXTS, Draws, IntegerLanguageModel, Text
from lutjax.models import LUTTransformer, LUTTransformerConfig
from lutjax.models._decoder import feed_tokens, open_caches
from lutjax.training import checkpoints, lm_runs, model_folders, models, runs
from lutjax.training.errors import CheckpointError, RunError
from lutjax.training.lm import Evaluation, LanguageModel, structure_of
from lutjax.training.lm_config import ModelConfig
from lutjax.training.model_folders import ModelFolder
from lutjax.training.text import TextError
from lutjax.values import Array

TEXT_BYTES = 200  # bytes per reference text exported with a program


class Rounded:
    """Integer language model of lookup tables, identical in JAX and the exported C program.

    The JAX model computes in float32, but all its values are integer multiples of powers of two
    below `language_model.EXACT`, so sums are exact in any order.

    Args:
      model: the trained model.
      tables: ``"int16"`` or ``"int8"``; see `lutjax.circuits.language_model.from_model`.

    Attributes:
      integer: the integer model.
      model: the JAX model with rounded arrays.

    Raises:
      ValueError, TypeError: the model has no integer form.

    Example:
      >>> from flax import nnx
      >>> from lutjax.models import LUTTransformer, LUTTransformerConfig
      >>> from lutjax.training.integers import Rounded
      >>> sizes = {"n_layers": 1, "n_heads": 1, "n_anchors": 2, "ffn_anchors": 2}
      >>> config = LUTTransformerConfig(features=4, context=4, **sizes)
      >>> rounded = Rounded(LUTTransformer(config, rngs=nnx.Rngs(0)), tables="int8")
      >>> rounded.integer.dtype, rounded.integer.window, rounded.model.embedding.dtype
      (dtype('int8'), 3, dtype('float32'))
    """

    def __init__(self, model: LUTTransformer, *, tables: str = "int16"):
        self.integer = language_model.from_model(model, tables=tables)
        self.model = _in_floats(model, self.integer)
        form, self._empty, self._others = open_caches(self.model, ())

        @jax.jit
        def feed(
            cache: list[jax.Array], others: list[jax.Array], byte: Array
        ) -> tuple[list[jax.Array], jax.Array]:
            new, logits = feed_tokens(form.graphdef, *form.states(cache, others), byte[None])
            return jax.tree.leaves(new), logits

        self._feed = feed

    def generate(
        self,
        prompt: bytes,
        n_bytes: int,
        *,
        temperature: float | int = 0.8,
        top_k: int | None = None,
        seed: int = 0,
    ) -> bytes:
        """Continue a prompt with the same bytes as the C program with the same options.

        Args:
          prompt: at least one byte.
          n_bytes: number of bytes to add.
          temperature: an integer number of thousandths, at most 1000; 0 selects the first of the
            most likely bytes.
          top_k: sample from this many most likely bytes only; from all by default.
          seed: sampling seed.

        Raises:
          ValueError: the prompt is empty, or the temperature is not an integer number of
            thousandths.
        """
        return b"".join(
            self.stream(prompt, n_bytes, temperature=temperature, top_k=top_k, seed=seed)
        )

    def stream(
        self,
        prompt: bytes,
        n_bytes: int,
        *,
        temperature: float | int = 0.8,
        top_k: int | None = None,
        seed: int = 0,
    ) -> Iterator[bytes]:
        """Return an iterator over the bytes of `generate`, one at a time as they are sampled."""
        texts = self._continue_text(prompt, thousandths(temperature), top_k, seed)
        return (bytes([byte]) for _, (_, byte) in zip(range(n_bytes), texts, strict=False))

    def text(self, prompt: bytes, n_bytes: int, *, temperature: int, top_k: int, seed: int) -> Text:
        """Return a reference text for the C program; `temperature` in thousandths."""
        texts = self._continue_text(prompt, temperature, top_k, seed)
        steps = [next(texts) for _ in range(n_bytes)]
        continuation = bytes(byte for _, byte in steps)
        return Text(prompt, temperature, top_k, seed, tuple(steps[0][0].tolist()), continuation)

    def _continue_text(
        self, prompt: bytes, temperature: int, top_k: int | None, seed: int
    ) -> Iterator[tuple[np.ndarray, int]]:
        """Yield each next byte with its integer logits, endlessly."""
        if not prompt:
            raise ValueError("generate: the prompt is empty; give at least one byte to continue.")
        fraction = self.integer.unembed.fraction
        draws = Draws(seed=seed, fraction=fraction, temperature=temperature, top_k=top_k or 256)
        cache = self._empty

        def feed_byte(byte: int) -> np.ndarray:
            nonlocal cache
            cache, logits = self._feed(cache, self._others, np.int32(byte))
            # Exact: logits are multiples of 2**-fraction.
            return np.ldexp(np.asarray(logits, np.float64), fraction).astype(np.int64)

        for byte in prompt[:-1]:
            feed_byte(byte)
        byte = prompt[-1]
        while True:
            logits = feed_byte(byte)
            byte = draws(logits)
            yield logits, byte


def thousandths(temperature: float | int) -> int:
    """Convert a temperature to thousandths, an integer from 0 to 1000 (else ValueError)."""
    number = round(temperature * TEMPERATURES)
    if not 0 <= temperature <= 1000 or abs(number / TEMPERATURES - temperature) > 1e-9:
        raise ValueError(
            f"temperature is {temperature}; in whole numbers it is from 0 to 1000, with at most "
            "three digits after the point."
        )
    return number


def _in_floats(model: LUTTransformer, integer: IntegerLanguageModel) -> LUTTransformer:
    options = {"param_dtype": "float32", "table_dtype": None, "dropout": 0.0}
    config = dataclasses.replace(model.config, **options)
    params, others = models.arrays(model)
    # Uncommitted to a device, as the arrays below; committed ones could not be combined with them.
    others = jax.tree.map(lambda a: jnp.asarray(np.asarray(a)), others)
    of_layers: dict[Any, Any] = {}
    for k, attention in enumerate(integer.attention):
        block = params["layers"][k]
        layer = {"weights": _floats(attention.values, attention.shifts - integer.fraction)}
        if "positions" in block["attention"]["layer"]:
            positions, unit = attention.positions, -integer.fraction
            if not attention.pairs:  # only their signs matter
                positions, unit = 2 * positions - 1, 0
            layer["positions"] = _floats(positions, unit)
        of_layers[k] = {**block, "attention": {**block["attention"], "layer": layer}}
        if integer.ffn:
            ffn = integer.ffn[k]
            of_layers[k]["ffn"] = {**block["ffn"], "layer": {"weights": _table(ffn)}}
    params = {**params, "layers": of_layers, "unembed": {"weights": _table(integer.unembed)}}
    others = {**others, "embedding": _floats(integer.embedding, -integer.fraction)}
    rounded = structure_of(config).model(params, others)
    assert isinstance(rounded, LUTTransformer)
    return rounded


def _table(layer: IntegerLUT) -> jax.Array:
    return _floats(layer.values, layer.shifts - layer.fraction)


def _floats(values: np.ndarray, exponents: np.ndarray | int) -> jax.Array:
    return jnp.asarray(np.ldexp(values.astype(np.float32), exponents))


# ------------------------------------------------------------------------------------- export
def rounded_model(folder: Path, model: LanguageModel, *, tables: str) -> Rounded:
    """Convert a run's model to integers; raise RunError if it has no integer form."""
    _check_kind(folder, model.config)
    assert isinstance(model, LUTTransformer)
    try:
        return Rounded(model, tables=tables)
    except ValueError as error:
        raise RunError(f"{folder} cannot be rounded to whole numbers: {error}") from error


def _check_kind(folder: Path, config: ModelConfig) -> None:
    if not isinstance(config, LUTTransformerConfig):
        raise RunError(
            f"{folder} holds a gpt model, whose softmax attention has no integer form. Train "
            "lutjax train lm --model lut."
        )


@dataclasses.dataclass(frozen=True)
class Program:
    """A language model as a C program."""

    # Contents by name: C99 sources, a Makefile, reference texts, and possibly the tables
    files: dict[str, bytes]
    facts: dict[str, Any]  # JSON-compatible facts about the model
    remarks: tuple[str, ...]  # lines for the user
    steps: int  # the model's training steps; 0 without a run


def program_of(
    folder: Path,
    *,
    tables: str = "int16",
    text_path: Path | None = None,
    progress: Callable[[str], None] = lambda text: None,
    on_damage: Callable[[str], None] = checkpoints.warn,
) -> Program:
    """Return the C program for a language model of lookup tables, from a run or a bundle.

    The test part of the run's text (at `text_path`, if it has moved) measures the rounding loss;
    without a text, as for a bundle, nothing is tested.

    Raises:
      RunError: the folder holds another kind of model, or one without an integer form.
    """
    kind = model_folders.kind_of(folder)
    if kind != "lm":
        raise RunError(
            f"{folder} holds a model from {runs.COMMANDS[kind]}; a text program requires a "
            "language model (train lm)."
        )
    source = model_folders.read(folder, on_damage=on_damage)
    model = source.model
    _check_kind(folder, model.config)
    assert isinstance(model, LUTTransformer)
    progress(f"rounding to {tables}")
    rounded = rounded_model(folder, model, tables=tables)
    try:
        files = rounded.integer.to_c()
    except ValueError as error:
        raise RunError(f"{folder} cannot be exported: {error}") from error
    losses, remark = _losses(source, rounded, text_path, progress)
    progress("generating texts in JAX")
    texts = _texts(rounded, model.config.context)
    files[TEXTS] = language_model.texts_to_json(texts).encode("ascii")
    integer = rounded.integer
    facts = {
        "tables": integer.dtype.name,
        "values": integer.n_values,
        "table_bytes": integer.n_values * integer.dtype.itemsize,
        "fraction": integer.fraction,
        "logit_fraction": integer.unembed.fraction,
        "context": model.config.context,
        **losses,
    }
    size = f"{integer.n_values:,} entries of tables of {integer.dtype}"
    where = "in tables.bin" if language_model.TABLES_FILE in files else "in the program"
    remarks = (remark, f"{size}, {facts['table_bytes']:,} bytes, {where}")
    return Program(files, facts, remarks, source.steps)


def _losses(
    source: ModelFolder, rounded: Rounded, text_path: Path | None, progress: Callable[[str], None]
) -> tuple[dict[str, float], str]:
    if source.record is None or not (source.has_data or text_path):
        return {}, "the loss is not tested: a bundle holds no text"
    config = source.model.config
    try:
        test = lm_runs.LanguageModel.from_record(source.record.record, text_path).text.test
    except (TextError, CheckpointError) as error:
        return {}, f"the loss is not tested: {error}"
    # Both on the same windows, so that their difference is due to rounding alone.
    losses = []
    for what, own in (
        ("the trained model", source.model),
        ("the model of integers", rounded.model),
    ):
        progress(f"testing {what}")
        evaluate = Evaluation(structure_of(own.config), config.context)
        losses.append(evaluate(*models.arrays(own), test, max_windows=lm_runs.EVALUATION_WINDOWS))
    before, after = losses
    line = (
        f"test loss: {before:.4f} nats per byte before rounding, "
        f"{after:.4f} after ({after - before:+.4f})"
    )
    return {"loss_before": before, "loss_after": after}, line


def _texts(rounded: Rounded, context: int) -> list[Text]:
    """Return reference texts with a one-byte prompt, one beyond the context, and any bytes."""
    sentence = b"The quick brown fox jumps over the lazy dog. "
    long = (sentence * (context // 15 + 1))[: 2 * context + 1]
    anything = np.random.default_rng(0).integers(0, 256, 9, np.uint8).tobytes()
    return [
        rounded.text(b"\n", TEXT_BYTES, temperature=0, top_k=256, seed=0),
        rounded.text(long, TEXT_BYTES, temperature=800, top_k=256, seed=1),
        rounded.text(anything, TEXT_BYTES, temperature=1500, top_k=5, seed=2**32 - 1),
    ]
