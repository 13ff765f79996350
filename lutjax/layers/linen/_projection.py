"""Scored tables between projections for Flax Linen; `lutjax.layers._projection` has the arguments of the layer."""

from lutjax.layers import _projection
from lutjax.layers.linen._layer import Switched


class ProjectionLUT(Switched, _projection.ProjectionLUTArguments):
    """Layer of look-up tables to put in place of a feed-forward layer.

    Masks of table dropout are drawn from the stream ``dropout``. With ``quantised=True`` the collection ``quantised`` has the arrays of
    ``lutjax.quantise_tables(params["weights"], groups=heads)``, as ``weights`` and ``exponents``.
    """
