"""Variables of the Flax NNX layers. Trained variables detect updates from a layer with other ids.

Tables and gates belong to the ids they were trained with. A file of trained variables does not name
these ids, but inside one process ``nnx.state(model, nnx.Param)`` holds the model's own variables. A
trained variable therefore refers to the id variables of its layer. When `nnx.update` copies it to
another layer, the layer compares both sets of ids, and its next call raises an error if they
differ.

The reference is an attribute outside the metadata, so pytree structures and `jit` cache keys do
not depend on it. Only a variable with foreign ids has metadata, which carries the error into jitted
calls. `pickle` keeps the reference, so a pickled state of trained variables holds their ids.
`jax.tree.map`, Orbax and other files drop it, and then nothing is checked.
"""

import copyreg
import weakref
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx
from flax.nnx import variablelib

from lutjax.layers._spec import QUANTIZED
from lutjax.values._ids import is_concrete

FOREIGN = "lutjax_foreign_ids"
"""Metadata key of a trained variable: name of the ids that differ from its source."""


class _Trained(nnx.Param[Any]):
    # `_ids`: id variables of the layer, by name. `_source`: ids of the source layer of the value.
    __slots__ = ("__weakref__", "_ids", "_source")

    def update_from_state(self, variable_state: Any) -> None:
        super().update_from_state(variable_state)
        theirs = _slot(variable_state, "_ids")
        source = None
        if theirs is not None and theirs is not _slot(self, "_ids"):
            values = {name: v.get_raw_value() for name, v in theirs.items()}
            # Only values: a tracer that is stored here would leak.
            source = {name: a for name, a in values.items() if is_concrete(a)}
        _set_slot(self, "_source", source)
        compare(self)

    def set_raw_value(self, value: Any, **options: Any) -> None:
        super().set_raw_value(value, **options)
        # An array of unknown origin belongs to any ids: only states name their source.
        _set_slot(self, "_source", None)
        compare(self)

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()  # type: ignore[no-untyped-call]
        return {**state, "_ids": _slot(self, "_ids")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        _refer(self, state.get("_ids"))


class Param(_Trained):
    """Trained variable other than a table or a read scalar."""


class Tables(_Trained):
    """Trained tables: ``[tables, rows, outputs]``."""


class Scalars(nnx.Param[Any]):
    """Learned read scalars."""


class _Ids(nnx.Variable[Any]):
    # `_trained`: weak references to trained variables; strong references would keep tables alive.
    __slots__ = ("_trained",)

    def update_from_state(self, variable_state: Any) -> None:
        super().update_from_state(variable_state)
        for reference in _slot(self, "_trained") or ():
            trained = reference()
            if trained is not None:
                compare(trained)


class Anchors(_Ids):
    """Input ids compared by detectors. Kept with the tables, never trained."""


class Targets(_Ids):
    """Output ids reached by rows. Kept with the tables, never trained."""


class Wires(_Ids):
    """Input ids read by gates, and their readers. Kept with the gates, never trained."""


class Thresholds(nnx.Variable[Any]):
    """Fixed encoder thresholds."""


class Quantized(nnx.Variable[Any]):
    """Quantized tables and their scale exponents, never trained."""


class Keys(nnx.Variable[Any]):
    """PRNG keys that initialize host-resident tables."""


KINDS: Mapping[str, type[nnx.Variable[Any]]] = {
    "params": Param, "tables": Tables, "scalars": Scalars, "anchors": Anchors, "targets": Targets,
    "wires": Wires, "thresholds": Thresholds, QUANTIZED: Quantized, "keys": Keys,
}  # fmt: skip
"""Variable types by `lutjax.layers._spec.Variable` kind."""


def link(variables: Mapping[str, nnx.Variable[Any]]) -> None:
    """Link trained variables to the layer's ids."""
    ids = {name: v for name, v in variables.items() if _Ids in type(v).__mro__}
    for v in variables.values():
        # `isinstance` alone accepts hijax variables, which have no slots.
        if isinstance(v, _Trained) and _Trained in type(v).__mro__:
            _refer(v, ids)


def _refer(trained: _Trained, ids: Mapping[str, Any] | None) -> None:
    _set_slot(trained, "_ids", ids)
    for v in (ids or {}).values():
        _set_slot(v, "_trained", [*(_slot(v, "_trained") or ()), weakref.ref(trained)])


def compare(trained: Any) -> None:
    """Compare the ids of a trained variable with its source, and set or clear its metadata."""
    source, ids = _slot(trained, "_source"), _slot(trained, "_ids")
    differ = []
    if source:
        current = {name: v.get_raw_value() for name, v in (ids or {}).items() if name in source}
        differ = [name for name, value in current.items() if _differ(source[name], value)]
    if differ:
        trained.set_metadata(FOREIGN, min(differ))
    elif trained.has_metadata(FOREIGN):
        trained.del_metadata(FOREIGN)


def check(layer: str, variables: Mapping[str, nnx.Variable[Any]]) -> None:
    """Raise ValueError if a trained variable comes from a layer with other ids."""
    trained = {name: v for name, v in variables.items() if _Trained in type(v).__mro__}
    # Variables that Flax copied or merged have lost their links.
    if any(_slot(v, "_ids") is None for v in trained.values()):
        link(variables)
    for name, v in trained.items():
        # Ids may have been assigned since the last comparison.
        if v.has_metadata(FOREIGN) and _slot(v, "_source") is not None:
            compare(v)
        if v.has_metadata(FOREIGN):
            ids = v.get_metadata(FOREIGN)
            raise ValueError(
                f"{layer}: {name} is from the state of another layer, whose {ids} differ; "
                f"{name} and {ids} belong together. Update all variables, nnx.update(model, "
                "nnx.state(other)), not the trained ones alone."
            )


def array_of(variable: nnx.Variable[Any]) -> Any:
    """Return the array object of a variable; indexing, even [...], creates another one.

    See `lutjax.optim`.
    """
    if nnx.Variable in type(variable).__mro__ and not variable.has_metadata("on_get_value"):
        value = variable.get_raw_value()
        if isinstance(value, jax.Array) and not isinstance(value, jax.core.Tracer):
            # Like `get_value`, in a hundredth of its time.
            return value
    return variable.get_value()


def _reduce_hijax(variable: Any) -> tuple[Any, ...]:
    return variable.var_type.from_metadata, (variable.get_raw_value(), variable.get_metadata())


# In newer versions of Flax, `pickle` of such a variable recurses without end.
if hasattr(variablelib, "HijaxVariable"):
    copyreg.pickle(variablelib.HijaxVariable, _reduce_hijax)


def _differ(a: Any, b: Any) -> bool:
    if a is b or not (is_concrete(a) and is_concrete(b)):
        return False
    return a.shape != b.shape or bool((np.asarray(a) != np.asarray(b)).any())


def _slot(variable: Any, name: str) -> Any:
    return getattr(variable, name, None)


def _set_slot(variable: Any, name: str, value: Any) -> None:
    # Past Flax's own `__setattr__`, so that the slot is no metadata.
    object.__setattr__(variable, name, value)
