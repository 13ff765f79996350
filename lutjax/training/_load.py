"""Reading the model of a run, of whatever kind."""

import dataclasses
import importlib
import os
from pathlib import Path
from typing import Any

from lutjax._arguments import shown
from lutjax._extras import needed_by


# Equal to itself alone, because models are compared by their attributes.
@dataclasses.dataclass(frozen=True, eq=False)
class Loaded:
    """Record of the run that a model comes from.

    Fields of its checkpoint are attributes too: `model` and `training` decide the run, beside `text` of a language model,
    `samples` of a classifier or `target` of an automaton; `history` has the losses and tests so far; `options` is
    what the command remembers.

    Attributes:
      kind: the command that trained it: ``"lm"``, ``"classify"`` (``"digits"`` without data of its own) or ``"ca"`` of ``lutjax train``.
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


_READERS = {"lm": "lm_runs", "digits": "classifier", "classify": "classifier", "ca": "automaton"}
"""The module that reads the models of each kind of run."""


def load(folder: str | os.PathLike[str]) -> Any:
    """Return the model of a run of ``lutjax train lm``, ``classify`` or ``ca``, ready to call.

    The model is that of the latest checkpoint, or the best one so far where a run keeps one (automata, ``--select-every``).
    It is in the mode for evaluation (`flax.nnx.Module.eval`): without dropout, and in a classifier with hard gates.

    Args:
      folder: of the run, what ``lutjax train`` got as ``--out``; or the folder ``quantised`` in it, of ``lutjax quantise``.

    Returns:
      A `lutjax.models.GPT`, `LUTTransformer`, `LogicClassifier`, `LogicTreeNet` or `LogicCA`. Its attribute `record` says what decides the run
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
        raise TypeError(f"load: folder is {shown(folder)}; expected a string or a Path.")
    path = Path(folder)
    if not path.exists():
        raise FileNotFoundError(f"load: the folder {path} does not exist.")
    with needed_by("lutjax.load"):
        from lutjax.training import checkpoints, runs

        kind = runs.kind(path)
        steps = checkpoints.steps(path / runs.FOLDER)

        def passed_over(message: str) -> None:
            steps.pop()
            checkpoints.warn(message)

        reader = importlib.import_module(f"lutjax.training.{_READERS[kind]}")
        model, record = reader.load_model(path, on_damage=passed_over)
    model.eval()
    model.record = Loaded(kind, path, steps[-1], record)
    return model
