"""`lutjax.lookup_attention` on SparseCores: the rows of each tile of pairs are summed and multiplied next to the gather.

Ids of rows, sums over pairs and the table's gradient are those of plain JAX, tile by tile: the ids of all pairs never exist at
once, and SparseCores do not add to rows in HBM.
"""

import functools

from lutjax.kernels._pallas.sparsecore import _rows
from lutjax.kernels._xla import lookup_attention as plain

forward = functools.partial(plain.forward_by, _rows)
backward = functools.partial(plain.backward_by, _rows)
