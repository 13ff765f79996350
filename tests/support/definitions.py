"""NumPy definitions from docstrings, as functions: the oracle for `lutjax.reference`.

A definition is the code in a docstring block "Definition ...::". It reads op arguments by name, for one sample where its
text says so, and assigns the outputs; ``da`` is the cotangent for ``a``. It shares no code with `lutjax.reference`.
"""

import functools
import inspect
import re
import textwrap
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np

import lutjax
from lutjax.cases import Case
from lutjax.wiring import Edges

Arrays = dict[str, Any]


def definition(documented: Any) -> str:
    """Return the definition code in a docstring."""
    blocks = re.findall(
        r"^Definition[^:]*::\n\n((?:    .*\n|\n)+)", inspect.getdoc(documented) + "\n", re.M
    )
    assert len(blocks) == 1, f"{documented}: {len(blocks)} definitions"
    return textwrap.dedent(blocks[0])


@functools.cache
def _compiled(code: str) -> Any:
    return compile(code, "definition", "exec")


def run(code: str, arguments: Mapping[str, Any], module: Any = lutjax) -> Arrays:
    """Run a definition, with `module` as its ``lutjax``, and return all assigned names."""
    namespace = {"np": np, "lutjax": module, **arguments}
    with np.errstate(all="ignore"):
        exec(_compiled(code), namespace)
    return namespace


# ------------------------------------------------------------------------------------- ops
def evaluate(
    case: Case, cotangents: Mapping[str, Any], code: str | None = None
) -> tuple[Arrays, Arrays]:
    """Return a case's outputs and cotangents by its op's definition, in float64.

    Args:
      cotangents: output cotangents, by name.
      code: replacement for the definition.
    """
    op = lutjax.kernel_registry.function(case.op)
    code = definition(op) if code is None else code
    arrays = {n: _wide(a) for n, a in {**case.differentiable, **case.fixed}.items()}
    n_samples = next(
        arrays[n].shape[axes.batch]
        for n, axes in case.axes.items()
        if axes.batch is not None and n in arrays
    )
    result = []
    for sample in range(n_samples):
        own = {n: _at(a, case.axes[n].batch, sample) for n, a in arrays.items()}
        ct = {n: _at(_wide(a), case.output_axes[n].batch, sample) for n, a in cotangents.items()}
        result.append((own, _evaluate_sample(case, op, code, own, ct)))
    outputs = {
        n: np.stack([each[n] for _, each in result], axes.batch) if result else None
        for n, axes in case.output_axes.items()
    }
    results: Arrays = {}
    for n, a in case.differentiable.items() if cotangents else ():
        batch, each = (
            case.axes[n].batch,
            [of[_cotangent_name(of, n)].reshape(own[n].shape) for own, of in result],
        )
        results[n] = (
            (np.sum(each, 0) if batch is None else np.stack(each, batch))
            if each
            else np.zeros(a.shape)
        )
    return outputs, results


def _wide(a: Any) -> np.ndarray:
    array = np.asarray(a)
    return array if array.dtype.kind in "iub" else array.astype(np.float64)


def _at(a: np.ndarray, axis: int | None, index: int) -> np.ndarray:
    return a if axis is None else np.take(a, index, axis)


def _cotangent_name(names: Mapping[str, Any], argument: str) -> str:
    """Return the definition's name for an argument's cotangent; margins share their detection's name."""
    short = argument.removesuffix("_margin")
    return next(n for n in (f"d{argument}", f"d{short}", "dmargin") if n in names)


def _evaluate_sample(case: Case, op: Any, code: str, arrays: Arrays, cotangents: Arrays) -> Arrays:
    """Run an op's definition on one sample and return the assigned names."""
    result: Arrays = {}

    def evaluate(*args: Any, **options: Any) -> Any:
        bound = inspect.signature(op).bind(*args, **options)
        bound.apply_defaults()
        arguments, gathered = _complete(dict(bound.arguments))
        ct = {f"d{n}": a for n, a in cotangents.items()}
        if "groups" in arguments and "dy" in ct:
            ct["dy"] = ct["dy"].reshape(arguments["groups"], -1)
        result.update(run(code, {**arguments, **ct}))
        if "dweights" in result:
            result["dweights"] = gathered(result["dweights"])
        return SimpleNamespace(**{n: result.get(n) for n in ("index", "flip", "margin")})

    case.call(evaluate, arrays)
    if bound_self := result.get("_self_attention"):
        result["dx"] = result["dx"] + result[bound_self]
    shapes = {n: a.shape for n, a in cotangents.items()}
    return {**result, **{n: np.reshape(result[n], shape) for n, shape in shapes.items()}}


def _complete(a: Arrays) -> tuple[Arrays, Any]:
    """Replace None arguments where the definition text specifies their meaning.

    The second result maps the gradient for a table with all outputs to the gradient for a table with targets.
    """
    gathered: Any = lambda g: g  # noqa: E731
    if "groups" in a and a["groups"] is None:
        a["groups"] = 1
    if "valued" in a and a["valued"] is None:
        a["valued"] = a["index"].shape[-1]
    if "keys" in a and a["keys"] is None:
        a |= {"keys": a["x"], "_self_attention": "dkeys"}
        if a["key_segments"] is None:
            a["key_segments"] = a["segments"]
    if "positions" in a and a["positions"] is None and "anchors" in a:
        a["positions"] = np.zeros((1, 1, 0))
    targets = a.get("targets")
    if isinstance(targets, Edges) or ("query_start" in a and targets is not None):
        a["weights"], gathered = dense_table(a["weights"], targets, a["n_outputs"])
        if isinstance(targets, Edges):  # a list of edges is equal to a table that is zero elsewhere
            a |= {
                "targets": np.arange(targets.n_outputs)[None, None],
                "n_outputs": targets.n_outputs,
            }
    return a, gathered


def dense_table(weights: np.ndarray, targets: Any, n_outputs: int | None) -> tuple[np.ndarray, Any]:
    """Return a table with all outputs, and a function to gather its gradient for slot or edge weights."""
    if isinstance(targets, Edges):
        row = np.repeat(np.arange(targets.n_detectors * targets.n_rows), np.diff(targets.first))
        shape = targets.n_detectors, targets.n_rows, targets.n_outputs
        at = (*np.divmod(row, targets.n_rows), np.asarray(targets.target))
        used = np.ones(len(row), bool)
    else:
        targets = np.broadcast_to(targets, weights.shape)
        shape = (*weights.shape[:2], n_outputs)
        detector, row, _ = np.indices(weights.shape)
        at, used = (detector, row, np.maximum(targets, 0)), targets >= 0
    table = np.zeros(shape)
    np.add.at(table, at, np.where(used, weights, 0))
    return table, lambda gradient: np.where(used, gradient[at], 0)


# ------------------------------------------------------------------------------------- reads
def read_margins(read: Any, u: np.ndarray, scalars: Mapping[str, Any]) -> Arrays:
    """Run a read's definition on one detector's margins and return the assigned names."""

    def confidence(ways: int) -> Any:
        def ways_of(u: Any, scalars: Any) -> Any:
            result = read_margins(lutjax.reads.Confidence(ways), u, scalars)
            return result["index"], result["coefficients"]

        return ways_of

    module = SimpleNamespace(reads=SimpleNamespace(Confidence=confidence))
    attributes = {n: getattr(read, n) for n in ("ways", "hard", "rounding") if hasattr(read, n)}
    return run(
        definition(type(read)), {"u": u, "scalars": scalars, **scalars, **attributes}, module
    )
