"""Reading the model of a run, of whatever kind."""

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lutjax._extras import needed_by


@dataclasses.dataclass(
    frozen=True, eq=False
)  # equal to itself alone, because models are compared by their attributes
class Loaded:
    """What is known of the run that a model comes from.

    What its checkpoint says is an attribute too: `model` and `training` decide the run, beside `text` of a language model,
    `samples` of a classifier or `target` of an automaton; `history` has the losses and tests so far; `options` is
    what the command remembers.

    Attributes:
      kind: the command that trained it: ``"lm"``, ``"digits"`` or ``"ca"`` of ``lutjax train``.
      folder: of the run.
      steps: steps done at the checkpoint.
      record: the checkpoint's record.
    """

    kind: str
    folder: Path
    steps: int
    record: Any

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "record" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.record, name)


def load(folder: str | os.PathLike[str]) -> Any:
    """Return the model of a run of ``lutjax train lm``, ``digits`` or ``ca``, ready to call.

    The model is that of the latest checkpoint, of an automaton the best one so far, and it is in the mode for evaluation
    (`flax.nnx.Module.eval`): without dropout, and in a classifier with hard gates.

    Args:
      folder: of the run, what ``lutjax train`` got as ``--out``.

    Returns:
      A `lutjax.models.LUTTransformer`, `LogicClassifier` or `LogicCA`. Its attribute `record` says what decides the run
      (``model.record.training``), what was measured (``model.record.history``) and how many steps were done
      (``model.record.steps``).

    Raises:
      FileNotFoundError: there is no such folder.
      ValueError: it is not the folder of a run, or its checkpoint is damaged or of another version.
      ModuleNotFoundError: a package of the extra ``apps`` is missing.

    Example:
      >>> import jax, lutjax
      >>> text = lutjax.load("runs/lm").generate(tokens, 100, key=jax.random.key(0))  # doctest: +SKIP
      >>> classes = lutjax.load("runs/digits")(images).argmax(-1)  # images: [batch, features]  # doctest: +SKIP
      >>> automaton = lutjax.load("runs/ca")  # doctest: +SKIP
      >>> state = automaton(state, 10, deterministic=True)  # doctest: +SKIP
      >>> automaton.record.steps, automaton.record.history.test[-1]  # doctest: +SKIP
      (3000, (3000, 0.0))
      >>> lutjax.load("runs/none")
      Traceback (most recent call last):
      ...
      FileNotFoundError: load: the folder runs/none does not exist.
    """
    if not isinstance(folder, str | os.PathLike):
        raise TypeError(f"load: folder is a {type(folder).__name__}; expected a string or a Path.")
    path = Path(folder)
    if not path.exists():
        raise FileNotFoundError(f"load: the folder {path} does not exist.")
    with needed_by("lutjax.load"):
        kind = _kind(path)
        steps, record, model = _LOADERS[kind](path)
    model.eval()
    model.record = Loaded(kind, path, steps, record)
    return model


_FIELDS = {"lm": "text", "digits": "samples", "ca": "target"}
"""Each kind of run, and the field that only its record has."""


def _kind(folder: Path) -> str:
    """The kind of the run in a folder.

    Raises:
      CheckpointError: there is none, or of no known kind.
    """
    from lutjax.training import checkpoints, runs

    if not runs.exists(folder):
        around = next((p for p in folder.absolute().parents if runs.exists(p)), None)
        advice = f"it is a part of one: give {around}" if around else "give what `lutjax train` got as --out"
        raise checkpoints.CheckpointError(f"load: {folder} is not the folder of a run; {advice}.")
    _, meta = checkpoints.read_meta(folder / runs.FOLDER)
    for kind, field in _FIELDS.items():
        if field in meta:
            return kind
    raise checkpoints.CheckpointError(
        f"load: {folder} holds a run that this version of lutjax does not know."
    )


def _lm(folder: Path) -> tuple[int, Any, Any]:
    from lutjax.training import lm, lm_runs, models, runs

    steps, record = runs.read(folder, lm_runs.Record)
    return steps, record, models.load(folder, steps, lm.structure_of(record.model))


def _digits(folder: Path) -> tuple[int, Any, Any]:
    from lutjax.models import LogicClassifier
    from lutjax.training import classifier, models, runs

    steps, record = runs.read(folder, classifier.Record)
    structure = models.Structure(lambda rngs: LogicClassifier(record.model, rngs=rngs))
    return steps, record, models.load(folder, steps, structure)


def _ca(folder: Path) -> tuple[int, Any, Any]:
    import numpy as np

    from lutjax.training import automaton, models, runs

    steps, record = runs.read(folder, automaton.Record)
    target = None
    if record.target is not None:
        target = np.array([[[bit == "1" for bit in row] for row in channel] for channel in record.target])
    run = automaton.Run(record.model, record.training, target)
    return steps, record, run.best(models.restore(folder, steps, run))


_LOADERS: dict[str, Callable[[Path], tuple[int, Any, Any]]] = {"lm": _lm, "digits": _digits, "ca": _ca}
