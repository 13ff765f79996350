"""Array types in public signatures."""

import jax
import numpy as np
from jaxtyping import Float as _Float, Int as _Int, Num as _Num

Array = jax.Array | np.ndarray
"""Op input: a JAX array (traced or not) or a NumPy array."""

Integer = int | np.integer | _Int[Array, ""]
"""An integer, possibly traced."""

Scalar = float | _Num[Array, ""]
"""A number, possibly traced."""

Anchors = _Int[Array, "detectors bits 2"]
Positions = _Float[Array, "distances #detectors position_bits"]
