"""Scored tables between projections for Haiku; `lutjax.layers._projection` has the arguments of the layer."""

import dataclasses

from lutjax.layers import _projection
from lutjax.layers.haiku._layer import Switched


@dataclasses.dataclass(eq=False, repr=False)
class ProjectionLUT(Switched, _projection.ProjectionLUTArguments):
    """Layer of look-up tables to put in place of a feed-forward layer.

    Masks of table dropout need a key in `apply`. With ``quantised=True`` the state has the arrays of
    ``lutjax.quantise_tables(params["weights"], groups=heads)``, as ``weights`` and ``exponents``.
    """
