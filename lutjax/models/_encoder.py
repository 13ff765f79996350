"""Thermometer encoder for classifiers, with optional learned thresholds."""

from typing import Any

import numpy as np

from lutjax.arguments import format_value
from lutjax.layers.nnx import Thermometer
from lutjax.layers.specifications import GRADIENTS
from lutjax.values import Array


def encoder_of(
    where: str, config: Any, n_features: int, thresholds: Array | None, widths: Array | None
) -> Thermometer | None:
    """Return the encoder for features on the first axis; None for bit inputs.

    Default widths are the mean distance between neighboring thresholds of a feature, or 1 for a
    single threshold.

    Raises:
      ValueError: an argument has a wrong shape, or is unused by the config.
    """
    if not config.n_thresholds:
        if thresholds is not None:
            raise ValueError(
                f"{where}: thresholds are given, but n_thresholds is 0: samples are bits."
            )
        return None
    if not config.learned_thresholds:
        if widths is not None:
            raise ValueError(f"{where}: widths are given, but learned_thresholds is False.")
        return Thermometer(n_features, config.n_thresholds, thresholds=thresholds, feature_axis=0)
    if widths is None:
        widths = np.full(n_features, 1 / (config.n_thresholds + 1), np.float32)
        if thresholds is not None:
            n_gaps = max(config.n_thresholds - 1, 1)
            distance = np.ptp(np.asarray(thresholds, np.float64), axis=1) / n_gaps
            widths = np.where(distance > 0, distance, 1.0).astype(np.float32)
    return Thermometer(
        n_features,
        config.n_thresholds,
        thresholds=thresholds,
        widths=widths,
        learnable=True,
        gradient=config.threshold_gradient,
        feature_axis=0,
    )


def check_threshold_gradient(where: str, gradient: str) -> None:
    """Raise ValueError if the threshold gradient is unsupported."""
    if gradient not in GRADIENTS:
        raise ValueError(
            f"{where}: threshold_gradient is {format_value(gradient)}; "
            f"expected one of {', '.join(GRADIENTS)}."
        )
