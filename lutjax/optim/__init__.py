"""Optimizers for lookup tables in any training loop.

`value_and_grad` is `jax.value_and_grad` with a sparse `TableGradient` for each table. `Optimizer`
updates tables in place with row rules, and all other parameters with Optax. `row_transform`
applies the same rules to dense gradients as an Optax transformation, and `kinds` labels
parameters for `optax.partition`. `lutjax.optim.nnx` and `lutjax.optim.linen` wrap them for Flax;
`lutjax.optim.host` trains tables in host memory.
"""

import importlib
from typing import TYPE_CHECKING, Any

from lutjax.extras import attribute, importable_names
from lutjax.optim._gradients import clip_by_global_norm, global_norm
from lutjax.optim._parameters import cell_total_variation, decayed, kind_of, kinds
from lutjax.tables.collect import TableUseError, microbatched, value_and_grad
from lutjax.tables.gradient import TableGradient
from lutjax.values._row_rules import SGD, RowAdagrad, RowAdam, RowMomentum, RowRule

if TYPE_CHECKING:
    from lutjax.optim import host as host, linen as linen, nnx as nnx
    from lutjax.optim._optimizer import Optimizer, OptimizerState
    from lutjax.optim._transformations import RowTransformState, normalized, row_transform, scaled

__all__ = [
    "SGD",
    "Optimizer",
    "OptimizerState",
    "RowAdagrad",
    "RowAdam",
    "RowMomentum",
    "RowRule",
    "RowTransformState",
    "TableGradient",
    "TableUseError",
    "cell_total_variation",
    "clip_by_global_norm",
    "decayed",
    "global_norm",
    "kind_of",
    "kinds",
    "microbatched",
    "normalized",
    "row_transform",
    "scaled",
    "value_and_grad",
]

_MODULES = {  # names that need Optax
    "Optimizer": "_optimizer",
    "OptimizerState": "_optimizer",
    "RowTransformState": "_transformations",
    "normalized": "_transformations",
    "row_transform": "_transformations",
    "scaled": "_transformations",
}
_SUBMODULES = ("host", "linen", "nnx")


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return importlib.import_module(f"{__name__}.{name}")
    return attribute(__name__, name, _MODULES)


def __dir__() -> list[str]:
    return sorted(
        {*importable_names(__name__, _MODULES), *(name for name in __all__ if name in globals())}
    )
