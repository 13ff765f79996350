"""Truth tables as whole numbers: bit k is the answer at address k, whose lowest bit is the first input."""

from typing import Any

import numpy as np


def evaluate(inputs: list[np.ndarray], table: int, ones: Any) -> np.ndarray:
    """Return the answers to words of inputs."""
    if not inputs:
        raise ValueError("a gate without inputs")
    half = 1 << (len(inputs) - 1)
    low, high, x = table & ((1 << half) - 1), table >> half, inputs[-1]
    if len(inputs) == 1:
        return (x & 0, ~x, x, x | ones)[table]
    a, b = evaluate(inputs[:-1], low, ones), evaluate(inputs[:-1], high, ones)
    return a ^ (x & (a ^ b))
