"""Function handling in layer state for `pickle` and `copy.deepcopy`.

`jax.nn.relu` and `jnp.sin` are objects that hold a function with the same name. `pickle` rejects
them, and `copy.deepcopy` creates another object, so `jit` recompiles. Layers therefore store the
name of such a function in their copied state.
"""

import importlib
import operator
import pickle
from typing import Any


class ByName:
    """Function reference by module and qualified name."""

    def __init__(self, module: str, name: str) -> None:
        self.module, self.name = module, name

    def __reduce__(self) -> tuple[Any, ...]:
        return find, (self.module, self.name)


def find(module: str, name: str) -> Any:
    return operator.attrgetter(name)(importlib.import_module(module))


def refer_by_name(value: Any) -> Any:
    """Return a `ByName` for a callable that its module holds by name; other values as is."""
    module, name = (getattr(value, attribute, None) for attribute in ("__module__", "__qualname__"))
    if not callable(value) or not isinstance(module, str) or not isinstance(name, str):
        return value
    # A local function or lambda has "<" in its name, and no module holds it.
    if "<" in name:
        return value
    try:
        return ByName(module, name) if find(module, name) is value else value
    except (AttributeError, ImportError):
        return value


def state_of(layer: Any) -> dict[str, Any]:
    """Return the attributes of a layer or spec for a copy, with functions by name."""
    return {name: refer_by_name(value) for name, value in vars(layer).items()}


def can_be_pickled(value: Any) -> bool:
    try:
        pickle.dumps(refer_by_name(value))
    except (AttributeError, TypeError, pickle.PicklingError):
        return False
    return True
