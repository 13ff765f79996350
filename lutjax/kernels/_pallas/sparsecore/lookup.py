"""`lutjax.lookup` on SparseCores: sums of rows, and their products with the output's cotangent, next to the gather.

``y[b] = sum_t weights[t, index[b, t]]`` and ``<dy[b], row - flipped row>`` of each detector, for a block of samples on each
subcore. The table's gradient is that of plain JAX: SparseCores do not add to rows in HBM.
"""

import functools

from lutjax.kernels._pallas.sparsecore import _gathered_rows
from lutjax.kernels._xla import lookup as plain

forward = functools.partial(plain.forward_by, _gathered_rows)
backward = functools.partial(plain.backward_by, _gathered_rows)
