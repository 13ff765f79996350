"""Arguments of compositions, functions that call several ops, at measured sizes of one op."""

from typing import Any

import jax
import jax.numpy as jnp

import lutjax
from lutjax import cases
from lutjax.benchmark import measurements
from lutjax.benchmark.shapes import OfOp
from lutjax.tables.collect import value_and_grad

OPS = {
    "lut": "lookup",
    "sparse_lut": "sparse_lookup",
    "lut_attention": "lookup_attention",
    "conv_lut": "lut_at_places",
    "logic_gates": "bilinear_gates",
    "update_table": "lookup",
}
"""Op that defines the measured sizes, by composition."""


def abstract_arguments(
    name: str, size: str | None = None, dtype: str | None = None
) -> tuple[Any, Any]:
    """Return abstract arguments and options for a composition: shapes and dtypes instead of arrays.

    Args:
      name: composition name.
      size: measured size name. None: the first one.
      dtype: element dtype. None: the op's first one.

    Raises:
      ValueError: the size or dtype is unknown; the message lists the known ones.
    """
    module = cases.find_module(OPS[name])
    size = next(iter(module.measured_sizes)) if size is None else size
    if size not in module.measured_sizes:
        raise ValueError(
            f"{name}: size is {size!r}; it must be one of {', '.join(module.measured_sizes)}. "
            "Choose one of them."
        )
    dtype = module.dtypes[0] if dtype is None else dtype
    if dtype not in module.dtypes:
        raise ValueError(
            f"{name}: dtype is {dtype}; it must be one of {', '.join(module.dtypes)}. Choose one "
            "of them."
        )
    sizes = module.measured_sizes[size]
    shape = OfOp(module.op, module.kind(sizes), tuple(sizes.items()))
    args, options = measurements.abstract_arguments(measurements.abstract_case(shape, dtype))
    if name == "conv_lut":
        windows, images = options["windows"], args[:3]
        places = {"kernel": windows.size, "stride": windows.stride, "padding": windows.padding}
        return images, {**places, "groups": options["groups"], "epsilon": options["epsilon"]}
    if name == "logic_gates":
        x, _, wires = args
        return (x, jax.ShapeDtypeStruct((wires.shape[0], 16), jnp.dtype(dtype)), wires), options
    if name == "update_table":
        x, weights, anchors = args
        return (weights, jax.eval_shape(_table_gradient, x, weights, anchors), 0.1), {}
    return args, options


def _table_gradient(x: jax.Array, weights: jax.Array, anchors: jax.Array) -> Any:
    _, gradients = value_and_grad(lambda tables: lutjax.lut(x, tables["weights"], anchors).sum())(
        {"weights": weights}
    )
    return gradients["weights"]
