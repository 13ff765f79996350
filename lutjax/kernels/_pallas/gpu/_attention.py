"""Which calls of `lookup_attention` counting in shared memory fits. Imports no Pallas: the registry asks at every call."""

import math

from lutjax._row_rules import SGD
from lutjax.kernels._triton._support import unfit_packages
from lutjax.kernels.registry import Call

_MOST_COUNTS = 2**12  # of a query, in shared memory
_MOST_IDS = 2**12  # of queries: each has a program that looks for them
_MOST_NUMBERS = 2**28  # counts of all queries
_MOST_KEYS = 2**15 - 1  # a count is a signed integer of 16 bits


def unsupported(call: Call) -> str | None:
    """Why a call does not fit; None if it does."""
    why = unfit_packages()
    if why is not None:
        return f"multiplies counts by Triton kernels, and Triton {why}"
    if call.options["accumulate"] is not None:
        return "multiplies counts by floating-point numbers, not in fixed point"
    rule = call.options.get("rule")
    if rule is not None and not isinstance(rule, SGD):
        return f"moves rows by SGD only, not by {rule}"
    sizes = _sizes(call)
    for name, most in (("counts", _MOST_COUNTS), ("ids", _MOST_IDS), ("keys", _MOST_KEYS)):
        if sizes[name] > most:
            what = {"counts": "rows for each id of a query", "ids": "ids of queries", "keys": "keys"}[name]
            return f"counts the reads of at most {most} {what}, here {sizes[name]}"
    numbers = sizes["queries"] * sizes["counts"]
    if numbers > _MOST_NUMBERS:
        return f"keeps at most {_MOST_NUMBERS} counts of a detector in memory, here {numbers}"
    return None


def slower(call: Call) -> str | None:
    """Why the next implementation comes first for a call that would fit; None if this one does."""
    kind = "update" if call.op.endswith("_update") else call.direction
    sizes = _sizes(call)
    met = sizes["keys"] if call.options["window"] is None else min(sizes["keys"], call.options["window"])
    for name, number, fewest in (
        ("keys", met, _FEWEST_KEYS[kind]),
        ("queries for each of their ids", sizes["queries"] // sizes["ids"], _FEWEST_OF_ID),
    ):
        if number < fewest:
            return f"was measured faster than Triton from {fewest} {name} on, here {number}"
    if sizes["counts"] > _MOST_COUNTED:
        return f"was measured faster than Triton up to {_MOST_COUNTED} rows for each id of a query, here {sizes['counts']}"
    return None


# Of long texts: microseconds on an H200 are in `lutjax.kernels._triton._histograms`.
_FEWEST_KEYS = {"forward": 512, "backward": 256, "update": 256}
_FEWEST_OF_ID = 16
_MOST_COUNTED = 2**10


def _sizes(call: Call) -> dict[str, int]:
    """What a call counts."""
    weights = call.arguments[0]
    query, key, position = call.arguments[5:8] if call.op.endswith("_update") else call.arguments[1:4]
    counts = 2 ** (key.bits + (0 if position is None else position.bits))
    return {
        "counts": counts,
        "ids": weights.shape[1] // counts,
        "keys": key.shape[-2],
        "queries": math.prod(query.shape[:2]),
    }
