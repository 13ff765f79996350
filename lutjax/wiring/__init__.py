"""Wiring: the inputs that gates and detectors read, and the outputs that tables reach.

Wires are int32 ``[gates, inputs of a gate]``, ids of inputs. What is drawn uses every input about equally
often: no input is read by more than ``ceil(wires / inputs)`` gates, so the reverse list of `lutjax.readers`
has a width that is known under `jax.jit`.
"""

from lutjax.wiring._gates import balanced, trees, unique_pairs
from lutjax.wiring._images import windows

__all__ = ["balanced", "trees", "unique_pairs", "windows"]
