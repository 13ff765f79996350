"""Array types of the public signatures."""

import jax
import numpy as np
from jaxtyping import Float as _Float, Int as _Int, Num as _Num

Array = jax.Array | np.ndarray
"""What an op takes: a JAX array (traced or not) or a numpy array."""

Integer = int | np.integer | _Int[Array, ""]
"""A whole number, perhaps traced."""

Scalar = float | _Num[Array, ""]
"""A number, perhaps traced."""

Anchors = _Int[Array, "detectors bits 2"]
Positions = _Float[Array, "distances #detectors position_bits"]
