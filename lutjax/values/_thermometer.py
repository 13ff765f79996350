"""Thresholds of thermometer codes."""

import statistics

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Num

from lutjax._typing import Array
from lutjax.arguments import format_value, require_integer

METHODS = ("uniform", "gaussian", "distributive")


def thermometer_thresholds(
    data: Num[Array, "*samples features"], n_thresholds: int, *, method: str = "uniform"
) -> Float[jax.Array, "features {n_thresholds}"]:
    """Return thermometer thresholds for each feature of a data set.

    Args:
      data: ``[..., features]``, with samples in all axes before the last. Use training samples, not
        test samples. Must be concrete.
      n_thresholds: thresholds per feature, ``n``; the k-th is for k from 1 to n.
      method: ``"uniform"``: k / (n + 1) between the smallest and the largest value; ``"gaussian"``:
        the quantile k / (n + 1) of the normal distribution with the mean and standard deviation of
        the values; ``"distributive"``: among N sorted values, the value at index ``floor(N k / (n +
        1))``.

    Returns:
      ``[features, n_thresholds]``, ascending; float64 for float64 data, else float32.

    Raises:
      ValueError: there are no samples or thresholds, a value is not finite, or `method` is unknown.

    Source: docs/logic.md, section 4.

    Example:
      >>> import jax.numpy as jnp, lutjax
      >>> data = jnp.array([[0, 10], [1, 11], [2, 12], [7, 30]])
      >>> lutjax.thermometer_thresholds(data, 1)
      Array([[ 3.5],
             [20. ]], dtype=float32)
      >>> lutjax.thermometer_thresholds(data, 1, method="distributive")
      Array([[ 2.],
             [12.]], dtype=float32)
    """
    if method not in METHODS:
        raise ValueError(
            f"thermometer_thresholds: method is {method!r}; expected one of {METHODS}."
        )
    n_thresholds = require_integer("thermometer_thresholds", "n_thresholds", n_thresholds)
    if n_thresholds < 1:
        raise ValueError(
            f"thermometer_thresholds: n_thresholds is {n_thresholds}; it must be at least 1."
        )
    if not (hasattr(data, "ndim") and hasattr(data, "shape")):
        raise TypeError(
            f"thermometer_thresholds: data is {format_value(data)}; expected a JAX or numpy array."
        )
    if data.ndim < 1 or not data.size:
        raise ValueError(
            f"thermometer_thresholds: data has shape {list(data.shape)}; "
            "expected [..., features] with at least one sample."
        )
    rows = np.asarray(data).reshape(-1, data.shape[-1])
    n_invalid = (~np.isfinite(rows)).sum(0)
    if n_invalid.any():
        feature = int(n_invalid.argmax())
        raise ValueError(
            f"thermometer_thresholds: feature {feature} of data is NaN or infinite "
            f"in {n_invalid[feature]} of {len(rows)} samples; "
            "expected finite numbers: fill what is missing, or leave the feature out."
        )
    dtype = rows.dtype if rows.dtype == np.float64 else np.float32
    share = np.arange(1, n_thresholds + 1) / (n_thresholds + 1)
    if method == "distributive":
        places = [len(rows) * k // (n_thresholds + 1) for k in range(1, n_thresholds + 1)]
        thresholds = np.sort(rows, axis=0)[places]
    elif method == "uniform":
        # In float64, because differences and means of large float32 values would lose digits.
        low, high = rows.min(0).astype(np.float64), rows.max(0).astype(np.float64)
        thresholds = low + (high - low) * share[:, None]
    else:
        quantiles = np.array([statistics.NormalDist().inv_cdf(k) for k in share])
        mean, deviation = rows.mean(0, dtype=np.float64), rows.std(0, dtype=np.float64)
        thresholds = mean + deviation * quantiles[:, None]
    return jnp.asarray(thresholds.T.astype(dtype))
