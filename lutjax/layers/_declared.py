"""Table declarations of running layers, for libraries whose parameters are plain arrays."""

from collections.abc import Callable, Iterable
from contextvars import ContextVar
from typing import Any

import jax

from lutjax.layers._spec import Variable
from lutjax.tables.host import HostTable
from lutjax.tables.host_tables import Blank, HostTables

__all__ = ["declare", "host_tables", "tables_of"]

_declared: ContextVar[list[tuple[str, str]] | None] = ContextVar("lutjax_declared", default=None)


def declare(path: Iterable[str], variables: Iterable[Variable]) -> None:
    declared = _declared.get()
    if declared is not None:
        declared.extend(("/".join((*path, v.name)), v.kind) for v in variables)


def host_tables(
    placement: Any, path: Iterable[str], variables: Iterable[Variable], *, making: bool
) -> dict[str, HostTable]:
    """Return the host-resident tables of the layer at a parameter path, by variable name.

    Missing tables are added. While a layer is `making` its variables, tables are read as zeros.
    """
    tables = dict[str, HostTable]()
    for v in variables:
        if v.drawn is not None:
            assert isinstance(placement, HostTables)
            sizes = (v.drawn.shape, v.drawn.dtype, v.drawn.initializer)
            table = placement.table("/".join((*path, v.drawn.name)), *sizes)
            tables[v.drawn.name] = Blank(*sizes) if making else table
    return tables


def tables_of(init: Callable[..., Any], *args: Any, **kwargs: Any) -> frozenset[str]:
    """Return the names of table parameters, as declared by the layers when `init` runs.

    A name is the parameter path joined by ``/``, as in ``"first/weights"``. The option `tables` in
    `lutjax.optim` and `lutjax.sharding` takes these names.

    Args:
      init: ``init`` method of a Flax Linen module or a transformed Haiku function.
      args, kwargs: arguments of `init`: arrays, or their shapes and dtypes. Nothing is computed.

    Raises:
      ValueError: `init` runs no layer of lutjax.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from flax import linen
      >>> from lutjax.layers.linen import LUT, tables_of
      >>> model = linen.Sequential([LUT(8, 5, n_detectors=4, n_anchors=3), linen.Dense(2)])
      >>> tables_of(model.init, jax.random.key(0), jnp.ones((3, 8)))
      frozenset({'layers_0/weights'})
    """
    leaves, structure = jax.tree.flatten((args, kwargs))
    arrays = [hasattr(leaf, "shape") and hasattr(leaf, "dtype") for leaf in leaves]

    def run(traced: list[Any]) -> Any:
        rest, each = iter(traced), zip(leaves, arrays, strict=True)
        every = [next(rest) if array else leaf for leaf, array in each]
        args, kwargs = jax.tree.unflatten(structure, every)
        return init(*args, **kwargs)

    declared: list[tuple[str, str]] = []
    token = _declared.set(declared)
    try:
        # A function that jit compiled before would not run its layers again.
        with jax.disable_jit():
            jax.eval_shape(run, [leaf for leaf, array in zip(leaves, arrays, strict=True) if array])
    finally:
        _declared.reset(token)
    if not declared:
        raise ValueError(
            "tables_of: init runs no lutjax layer with variables; pass the model's init."
        )
    return frozenset(name for name, kind in declared if kind == "tables")
