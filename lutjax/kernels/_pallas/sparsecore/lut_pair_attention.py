"""`lutjax.lut_pair_attention` on SparseCores: the rows of each tile of pairs are summed and multiplied next to the gather.

``y[j] = sum of weights[t, row]`` over detectors t and earlier keys i, ``row`` the signs of comparisons within ``[key i, query j,
position]``. Comparisons, sums over pairs and the table's gradient are those of plain JAX, tile by tile: SparseCores do not add to
rows in HBM.
"""

import functools

from lutjax.kernels._pallas.sparsecore import _gathered_rows
from lutjax.kernels._xla import lut_pair_attention as plain

forward = functools.partial(plain.forward_by, _gathered_rows)
backward = functools.partial(plain.backward_by, _gathered_rows)
