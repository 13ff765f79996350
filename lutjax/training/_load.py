"""Reading the model of a run or of a bundle, of whatever kind."""

import os
from pathlib import Path
from typing import Any

from lutjax.arguments import shown
from lutjax.bundles._layout import is_bundle
from lutjax.extras import needed_by


def load(folder: str | os.PathLike[str], into: Any = None) -> Any:
    """Return the model of a run of ``lutjax train lm``, ``classify`` or ``ca``, or of a bundle of `lutjax.save`, ready to call.

    The model is that of the latest checkpoint, or the best one so far where a run keeps one (automata, ``--select-every``).
    It is in the mode for evaluation (`flax.nnx.Module.eval`): without dropout, and in a classifier with hard gates.

    Args:
      folder: of the run, what ``lutjax train`` got as ``--out``; or the folder ``quantized`` in it, of ``lutjax quantize``; or of a bundle.
      into: for a bundle of your own model: an instance of its class, a `flax.nnx.Module` whose arrays are replaced, or arrays in the saved
        structure. By default arrays are returned in nested dicts.

    Returns:
      A `lutjax.models.GPT`, `LUTTransformer`, `LogicClassifier`, `LogicTreeNet` or `LogicCA`. Its attribute `record` says what decides the run
      (``model.record.training``), what was measured (``model.record.history``) and how many steps were done
      (``model.record.steps``). For the bundle of a layer of `lutjax.layers.nnx`, that layer, in the mode in which it was saved. For other
      bundles, `into` or arrays.

    Raises:
      FileNotFoundError: there is no such folder.
      ValueError: it is not the folder of a run or of a bundle, it is damaged or of another version, or does not fit `into`.
      ModuleNotFoundError: a package of the extra ``apps``, or for bundles of ``bundles``, is missing.

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
        if is_bundle(path):
            from lutjax.bundles import loading

            return loading.load(path, into)
        if into is not None:
            raise TypeError(f"load: into is given, but {path} holds no bundle; leave it out.")
        from lutjax.training import model_folders

        return model_folders.read(path).model
