"""Model loading from run folders and bundles."""

import os
from pathlib import Path
from typing import Any

from lutjax.arguments import format_value
from lutjax.bundles._layout import is_bundle
from lutjax.extras import require_optional


def load(folder: str | os.PathLike[str], into: Any = None) -> Any:
    """Return a model from a run or bundle, ready to call.

    Runs are from ``lutjax train lm``, ``classify`` or ``ca``, bundles from `lutjax.save`. The model
    is from the latest checkpoint, or the best one if the run selects (automata,
    ``--select-every``). It is in evaluation mode (`flax.nnx.Module.eval`): no dropout, and hard
    gates in a classifier.

    Args:
      folder: run folder (``--out`` of ``lutjax train``), its subfolder ``quantized`` from ``lutjax
        quantize``, or a bundle.
      into: for a bundle of a custom model: an instance of its class (a `flax.nnx.Module` whose
        arrays are replaced), or arrays in the saved structure. By default arrays are returned in
        nested dicts.

    Returns:
      A `lutjax.models.GPT`, `LUTTransformer`, `LogicClassifier`, `LogicTreeNet` or `LogicCA`. Its
      attribute `record` holds the configuration (``model.record.training``), the measurements
      (``model.record.history``) and the number of completed steps (``model.record.steps``). For a
      bundled layer of `lutjax.layers.nnx`, that layer, in its saved mode. For other bundles, `into`
      or arrays.

    Raises:
      FileNotFoundError: the folder does not exist.
      ValueError: the folder is not a run or a bundle, is damaged, has another version, or does not
        fit `into`.
      ModuleNotFoundError: a package of the extra ``apps`` (``bundles`` for bundles) is missing.

    Example:
      >>> import jax, lutjax
      >>> model = lutjax.load("runs/lm")  # doctest: +SKIP
      >>> text = model.generate(tokens, 100, key=jax.random.key(0))  # doctest: +SKIP
      >>> votes = lutjax.load("runs/digits")(images)  # doctest: +SKIP
      >>> classes = votes.argmax(-1)  # of images [batch, features]  # doctest: +SKIP
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
        raise TypeError(f"load: folder is {format_value(folder)}; expected a string or a Path.")
    path = Path(folder)
    if not path.exists():
        raise FileNotFoundError(f"load: the folder {path} does not exist.")
    with require_optional("lutjax.load"):
        if is_bundle(path):
            from lutjax.bundles import loading

            return loading.load(path, into)
        if into is not None:
            raise TypeError(f"load: into is given, but {path} holds no bundle; leave it out.")
        from lutjax.training import model_folders

        return model_folders.read(path).model
