"""Language model experiments: records, texts, final evaluation, and model loading."""

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from lutjax.arguments import format_value
from lutjax.models import GPTConfig, LUTTransformerConfig
from lutjax.training import lm, meshes, models, presets, reports, runs
from lutjax.training.errors import CheckpointError
from lutjax.training.experiments import Experiment, Part
from lutjax.training.lm import Run, structure_of
from lutjax.training.lm_config import CONFIGS, MODELS, Options, TrainingConfig
from lutjax.training.models import State
from lutjax.training.text import Text, TextError, bigram_loss, load_text

EVALUATION_WINDOWS = 1024
"""Test windows evaluated during a run; the final evaluation covers the whole part."""

SAMPLE_BYTES = 300  # final sample length


@dataclasses.dataclass
class Record(runs.Record):
    """Non-array checkpoint contents."""

    kind: ClassVar[str] = "lm"

    # model, training, text: run configuration
    model: LUTTransformerConfig | GPTConfig
    training: TrainingConfig
    text: runs.Source
    bigram: float  # baseline loss on the test part, in nats per byte
    options: dict[str, Any]  # mutable training program options, such as intervals
    # Whether the arrays belong to a deployed model with integer tables; see
    # `lutjax.training.quantize`
    quantized: bool = dataclasses.field(default=False, kw_only=True)
    history: runs.History  # losses over the run, in nats per byte


def language_model(
    folder: Path, step: int, record: Record, mesh: Mapping[str, int] | None = None
) -> lm.LanguageModel:
    """Return the selected or latest model from a checkpoint verified by `runs.read`.

    `mesh` has device counts by axis, as for `lutjax.training.meshes.choose`; by default the model
    is on a single device.

    Raises:
      ValueError: the model does not support this mesh, or there are too few devices.
    """
    structure, chosen = structure_of(record.model, quantized=record.quantized), None
    if mesh is not None:
        n_data = mesh.get(meshes.DATA, 1)
        if n_data > 1:
            raise ValueError(
                f"mesh has {meshes.DATA}={n_data}; generation has a single sequence. Give only "
                f"{meshes.DETECTORS}."
            )
        chosen = meshes.choose(
            structure.abstract(), jax.devices(), 1, mesh, tables=structure.tables
        )
    if record.quantized or not record.training.select_every:
        return models.load(folder, step, structure, chosen)
    # A run that takes no step: it only describes the checkpoint's optimizer state, which holds the
    # selected model.
    nothing = np.zeros(record.model.context + 2, np.uint8)
    run = Run(record.model, record.training, nothing, nothing)
    if chosen is not None:
        run.divide(mesh)
    state = run.selected(models.restore(folder, step, run))
    return run.structure.model(state.params, state.others)


load_model = models.Loader(Record, language_model)
"""Loader for a run's model, ready to generate, and record; see `lutjax.training.models.Loader`."""


def _run(record: Record, text: Text) -> Run:
    train = (
        text.train if record.training.validate else np.concatenate([text.train, text.validation])
    )
    return Run(record.model, record.training, train, text.validation)


def _check_memory_fields(
    config: GPTConfig | LUTTransformerConfig, fields: Mapping[str, Any]
) -> None:
    """Raise ValueError for a given field of memories that would have no effect."""
    if not isinstance(config, GPTConfig):
        return
    defaults = {field.name: field.default for field in dataclasses.fields(config)}
    for name, value in fields.items():
        if not name.startswith("memory") or value is None:
            continue
        if not config.memory and getattr(config, name) != defaults[name]:
            raise ValueError(
                f"{name} is {format_value(value)} and memory is off; give --memory, "
                f"or leave out --{name.replace('_', '-')}."
            )
        # The config accepts defaults beside a base, since it cannot tell them from given values.
        decided = getattr(config, name, value)
        if config.memory_base is not None and name != "memory_base" and decided != value:
            raise ValueError(
                f"{name} is {format_value(value)} and memory_base has {format_value(decided)}; "
                f"leave out --{name.replace('_', '-')}."
            )


class LanguageModel(Experiment):
    """Experiment with a language model on a text."""

    configs = CONFIGS
    kept = Record
    refuses = TextError
    files = ("loss.png", "usage.json", "sample.txt")
    curves = ("training loss", "test loss")

    record: Record
    run: Run

    def __init__(self, record: Record, run: Run, text: Text):
        self.record, self.run, self.text = record, run, text

    @classmethod
    def create(
        cls,
        fields: Mapping[str, Any],
        path: Path | None = None,
        model: str | None = None,
        preset: str = "demo",
    ) -> "LanguageModel":
        """Create a run on the text at `path`, with a preset's fields overridden by `fields`.

        Raises:
          ValueError: the model has no such preset, or a field belongs to another model.
        """
        name = model or presets.MODEL
        presets.refuse_others(f"the model {name}", (MODELS[name], TrainingConfig, Options), fields)
        config, training, options = cls.make_configs(
            {**presets.preset(name, preset), **fields}, MODELS[name]
        )
        _check_memory_fields(config, fields)
        text = load_text(path, context=config.context)
        record = Record(
            model=config,
            training=training,
            text=runs.Source.create(path, text.size, text.digest),
            bigram=bigram_loss(text.train, text.test),
            options=dataclasses.asdict(options),
            history=runs.History(),
        )
        return cls(record, _run(record, text), text)

    @classmethod
    def from_record(
        cls, record: Record, path: Path | None = None, model: str | None = None
    ) -> "LanguageModel":
        """Return the run of a record, with the text at `path` or its original location.

        If `model` is given, the run must have this model.
        """
        runs.check_model(record.model, model, MODELS)
        if record.quantized:
            raise CheckpointError(
                "quantized models cannot be trained: continue the original run instead."
            )
        text = load_text(path or record.text.path, context=record.model.context)
        if text.digest != record.text.digest:
            raise CheckpointError(
                f"the run belongs to another text: it was {record.text.size} bytes "
                f"of {record.text.path or 'the standard library'}, "
                f"now {text.size} other bytes of {text.name}."
            )
        return cls(record, _run(record, text), text)

    def describe(self) -> str:
        training = self.record.training
        return (
            f"on {self.text.name} ({self.text.size:,} bytes): "
            f"{self.run.structure.n_parameters():,} parameters, "
            f"bigram baseline {self.record.bigram:.4f} nats per byte, "
            f"{training.steps} steps of {training.batch_size} x {self.record.model.context} bytes"
        )

    def speed(self, seconds: float) -> str:
        n_bytes = self.record.training.batch_size * self.record.model.context
        return f"{n_bytes / seconds / 1000:.1f} kB/s"

    @property
    def sample_bytes(self) -> int:
        return self.record.model.context

    def evaluate(self, state: State) -> float:
        return self.run.evaluate(state, self.text.test, max_windows=EVALUATION_WINDOWS)

    def draw(self, folder: Path) -> None:
        with runs.write_atomically(folder / "loss.png") as path:
            self._draw_losses(path)

    def parts(self) -> list[Part]:
        usage = Part("usage.json", "counting reads of tables", self._count)
        return [
            Part("test", "testing the whole test part", self._test),
            Part("loss.png", "drawing the losses", lambda state, path: self._draw_losses(path)),
            self.curves_part(),
            *([usage] if self._counted else []),
            Part("sample.txt", "writing a sample", self._sample),
        ]

    @property
    def _counted(self) -> bool:
        """Whether table reads are counted at the end: for published tables only by request."""
        model = self.record.model
        own = isinstance(model, GPTConfig) and model.memory and model.memory_base is None
        return self.intervals.usage or own

    @property
    def prompt(self) -> str:
        """Start of the sample: the first line of the test part."""
        start = self.text.test[: self.record.model.context].tobytes()
        lines = start.decode(errors="ignore").splitlines()  # the cut may divide a character
        return next((line for line in lines if line.strip()), " ")

    def _test(self, state: State, path: Path) -> list[str]:
        loss = self.run.evaluate(self.run.selected(state), self.text.test)
        line = f"test loss {loss:.4f} nats per byte, bigram baseline {self.record.bigram:.4f}."
        if not self.record.training.select_every:
            return [line]
        chosen = state.optimizer
        selection = (
            f"tested after {chosen.step} steps, where the validation loss is lowest: "
            f"{chosen.loss:.4f}."
        )
        return [line, selection]

    def _count(self, state: State, path: Path) -> list[str]:
        if self.intervals.usage:
            usage = self.run.usage(
                self.run.selected(state), self.text.test, max_windows=EVALUATION_WINDOWS
            )
        else:
            usage = self.run.memory_usage(self.text.test, max_windows=EVALUATION_WINDOWS)
        tables = reports.tables(usage)
        facts = [dataclasses.asdict(table) for table in tables]
        path.write_text(json.dumps(facts, indent=1) + "\n")
        return [table.line() for table in tables]

    def _draw_losses(self, path: Path) -> None:
        from lutjax.training.pictures import plot_losses

        record = self.record
        steps = f"{record.training.batch_size} x {record.model.context} bytes"
        plot_losses(record.history, record.bigram, steps, path)

    def _sample(self, state: State, path: Path) -> list[str]:
        chosen = self.run.selected(state)
        model = self.run.structure.model(chosen.params, chosen.others)
        text = self.prompt + sample(model, self.prompt, SAMPLE_BYTES)
        path.write_text(text, encoding="utf-8")
        return ["sample:", "", text, ""]


def sample(
    model: lm.LanguageModel,
    prompt: str,
    n_bytes: int,
    *,
    temperature: float = 0.8,
    top_k: int | None = None,
    seed: int = 0,
) -> str:
    """Return a model's continuation of `prompt`; invalid UTF-8 becomes replacement characters."""
    options: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "seed": seed}
    added = b"".join(stream(model, prompt.encode(errors="surrogateescape"), n_bytes, **options))
    return added.decode(errors="replace")


def stream(
    model: lm.LanguageModel,
    prompt: bytes,
    n_bytes: int,
    *,
    temperature: float = 0.8,
    top_k: int | None = None,
    seed: int = 0,
) -> Iterator[bytes]:
    """Return an iterator over a model's continuation of a prompt, in chunks as they are sampled."""
    key = jax.random.key(seed)
    parts = model.stream(_tokens(prompt), n_bytes, key=key, temperature=temperature, top_k=top_k)
    return (_bytes(part) for part in parts)


def batch(
    model: lm.LanguageModel,
    texts: Sequence[tuple[bytes, int]],
    n_bytes: int,
    *,
    temperature: float = 0.8,
    top_k: int | None = None,
) -> list[bytes]:
    """Continue prompts of any lengths in one batch, each with its own seed."""
    keys = jnp.stack([jax.random.key(seed) for _, seed in texts])
    prompts = [_tokens(prompt) for prompt, _ in texts]
    added = model.generate(prompts, n_bytes, key=keys, temperature=temperature, top_k=top_k)
    return [_bytes(text) for text in np.asarray(added)]


def _tokens(prompt: bytes) -> np.ndarray:
    return np.frombuffer(prompt, np.uint8).astype(np.int32)


def _bytes(tokens: Any) -> bytes:
    return np.asarray(tokens).astype(np.uint8).tobytes()
