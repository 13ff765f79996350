"""Folders with a trained model: runs, their bundles, and bundles without a run (imported networks).

Every command that uses a trained model resolves its folder here.
"""

import dataclasses
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lutjax.bundles._layout import CONFIG, Config, is_bundle, is_memory
from lutjax.bundles.errors import BundleError
from lutjax.files import atomic
from lutjax.files.messages import in_a_line
from lutjax.training import checkpoints, runs
from lutjax.training.errors import CheckpointError
from lutjax.training.loaded import Loaded

_READERS = {"lm": "lm_runs", "digits": "classifier", "classify": "classifier", "ca": "automaton"}
"""Reader modules by run kind."""

_KINDS = {
    "GPT": "lm",
    "LUTTransformer": "lm",
    "LogicClassifier": "classify",
    "LogicTreeNet": "classify",
    "LogicCA": "ca",
}
"""Kinds of models without a run, by class name."""

_NOUNS = {
    "train lm": "language model",
    "train classify": "classifier",
    "train ca": "cellular automaton",
}


@dataclasses.dataclass(frozen=True, eq=False)
class ModelFolder:
    """A trained model with its run record."""

    folder: Path
    # Run kind, or the kind able to train such a model; a key of `lutjax.training.runs.COMMANDS`
    kind: str
    is_bundle: bool  # whether the folder is a bundle
    model: Any  # the model, in evaluation mode
    record: Loaded | None  # run record; None for a model without a run, such as an imported network

    def __str__(self) -> str:
        command = runs.COMMANDS[self.kind]
        return f"a bundle of a {_NOUNS[command]}" if self.is_bundle else f"a run of {command}"

    @property
    def steps(self) -> int:
        """Completed training steps; 0 without a known run."""
        return 0 if self.record is None else self.record.steps

    @property
    def has_data(self) -> bool:
        """True if the record names readable data.

        The record in a bundle keeps only a file name, so a bundle has data only if its run used the
        default data.
        """
        if self.record is None:
            return False
        source = getattr(self.record, "samples", None) or getattr(self.record, "text", None)
        return not self.is_bundle or source is None or source.path is None


def digest_of(folder: Path) -> str:
    """Return the SHA-256 that identifies the model in a folder.

    It is the digest of the latest checkpoint, or of ``config.json`` with its tensor digest.
    """
    if not is_bundle(folder):
        return checkpoints.peek(folder / runs.FOLDER)[2]
    _config(folder)
    digest = atomic.digest_of(folder / CONFIG)
    assert digest is not None
    return digest


def kind_of(folder: Path) -> str:
    """Return the model kind of a folder, a key of `lutjax.training.runs.COMMANDS`."""
    return _kind(folder, _config(folder)) if is_bundle(folder) else runs.kind(folder)


def check_kind(folder: Path, wanted: str) -> str:
    """Return the kind of a folder's model; raise CheckpointError unless `wanted`'s command fits."""
    if not is_bundle(folder):
        return runs.check_kind(folder, wanted, trains=False)
    kind = kind_of(folder)
    if runs.COMMANDS[kind] != runs.COMMANDS[wanted]:
        actual, needed = (_NOUNS[runs.COMMANDS[one]] for one in (kind, wanted))
        raise CheckpointError(
            f"{folder} is a bundle of a {actual}; this command takes a {needed}. "
            f"Use it with lutjax {runs.use(kind, folder)}"
        )
    return kind


def read(
    folder: Path, wanted: str | None = None, *, on_damage: Callable[[str], None] = checkpoints.warn
) -> ModelFolder:
    """Read the trained model in a folder.

    Args:
      folder: a run, a folder of `lutjax quantize`, or a bundle.
      wanted: model kind, as for `check_kind`; any by default.
      on_damage: called for every damaged checkpoint that is skipped.

    Raises:
      CheckpointError, BundleError: as `check_kind`, or the model cannot be read.

    Example:
      >>> import tempfile, lutjax
      >>> from flax import nnx
      >>> from pathlib import Path
      >>> from lutjax.models import LogicClassifier, LogicClassifierConfig
      >>> from lutjax.training import model_folders
      >>> config = LogicClassifierConfig(in_features=4, n_classes=2, layers=(8,), n_thresholds=0)
      >>> folder = Path(tempfile.mkdtemp())
      >>> lutjax.save(LogicClassifier(config, rngs=nnx.Rngs(0)), folder)
      >>> found = model_folders.read(folder)
      >>> str(found), found.kind, found.record
      ('a bundle of a classifier', 'classify', None)
    """
    kind = kind_of(folder) if wanted is None else check_kind(folder, wanted)
    if is_bundle(folder):
        from lutjax.bundles import loading

        model = loading.load(folder)
        return ModelFolder(folder, kind, True, model, getattr(model, "record", None))
    steps = checkpoints.steps(folder / runs.FOLDER)

    def passed_over(message: str) -> None:
        steps.pop()
        on_damage(message)

    reader = importlib.import_module(f"lutjax.training.{_READERS[kind]}")
    model, record = reader.load_model(folder, on_damage=passed_over)
    model.eval()
    model.record = Loaded(kind, folder, steps[-1], record, runs.results(folder))
    return ModelFolder(folder, kind, False, model, model.record)


def _config(folder: Path) -> Config:
    from lutjax.bundles._reading import read_config  # needs the extra bundles

    return read_config(folder)


def _kind(folder: Path, config: Config) -> str:
    if is_memory(folder):
        raise BundleError(
            f"{folder} is an imported memory, one layer of a model. Use it by lutjax serve, by "
            "lutjax train lm --memory-base, or in Python by lutjax.convert.memory_layer."
        )
    kind = _KINDS.get(config.architecture)
    if config.model is None or kind is None:
        raise BundleError(
            f"{folder} is a bundle of {config.architecture}, not of a lutjax.models class: read it "
            "in Python by lutjax.load(folder, into=model)."
        )
    of_run = kind if config.run is None else config.run.get("kind")
    if not isinstance(of_run, str) or runs.COMMANDS.get(of_run) != runs.COMMANDS[kind]:
        raise BundleError(
            f"the bundle {folder} is damaged: a run of the kind {in_a_line(of_run, 40)} does not "
            f"train a {config.architecture}."
        )
    return of_run
