"""Collectives in compiled programs."""

import re

import numpy as np


def largest_collective(compiled):
    """Return the largest collective result in a compiled program in bytes, or 0 without collectives."""
    result = re.findall(
        r"= (.*?) (?:all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute)\(",
        compiled.as_text(),
    )
    sizes = {"f32": 4, "s32": 4, "u32": 4, "s8": 1, "pred": 1}
    return max(
        (
            sizes[kind] * int(np.prod([int(n) for n in shape.split(",") if n]))
            for shapes in result
            for kind, shape in re.findall(r"(\w+)\[([\d,]*)\]", shapes)
        ),
        default=0,
    )
