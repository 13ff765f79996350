"""Cases of `lutjax.scored_lut` with every read."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lutjax import reads
from lutjax.cases._case import Arrays, Axes, Case, Draw, Size, Sizes, Tag
from lutjax.cases._lookups import LEAST, WORDS, address_bits
from lutjax.cases._traffic import DENSE, FORWARD, ID_BYTES, IN_PLACE, UPDATE, Bytes, Kind
from lutjax.cases.margins import anchors_of, inputs_of
from lutjax.values._quantized import QuantizedTables

READS: tuple[reads.Read, ...] = (
    reads.Confidence(ways=2),
    reads.Confidence(ways=1),
    reads.Hard(),
    reads.Blend(),
    reads.SoftSign(),
    reads.SoftSign(hard=True),
    reads.PowersOfTwo(ways=2),
    reads.PowersOfTwo(ways=1),
)
"""Reads by the size ``read``; 0 is the default."""


def _problem(sizes: Sizes) -> str | None:
    if sizes["detectors"] % sizes["groups"]:
        return f"{sizes['groups']} groups do not divide {sizes['detectors']} detectors"
    if sizes.get("read", 0) >= len(READS):
        return f"read is {sizes['read']}; reads are numbered from 0 to {len(READS) - 1}"
    return address_bits(sizes)


SCORED = Kind(
    "scored",
    ("batch", "inputs", "outputs", "detectors", "bits", "groups", "read"),
    words=WORDS,
    optional=1,
    least={**LEAST, "read": 0},
    problem=_problem,
)
"""Inputs and outputs of each group, tables of all groups, and the read's number in `READS`."""
DEPLOYED = Kind(
    "scored-int8",
    ("batch", "inputs", "outputs", "detectors", "bits", "groups"),
    words=WORDS,
    least=LEAST,
    fixed={"read": READS.index(reads.PowersOfTwo(ways=2)), "integers": 1},
    rows=(FORWARD,),
    problem=_problem,
)
"""The same with integer tables, as in deployment: two rows per table, without gradients."""
KINDS = (SCORED, DEPLOYED)

SLOW = True
SIZES = {
    "one": Size(Tag.SLOW, batch=1, inputs=2, detectors=1, bits=1, outputs=1),
    "split": Size(Tag.FAST, batch=4, inputs=5, detectors=4, bits=2, outputs=3),
    "primes": Size(batch=13, inputs=11, detectors=5, bits=3, outputs=7),
    "ties": Size(batch=7, inputs=5, detectors=5, bits=3, outputs=3),
    "groups": Size(Tag.DTYPES, batch=5, inputs=4, detectors=6, bits=2, outputs=5, groups=3),
    "shared_input": Size(
        Tag.SLOW, batch=5, inputs=4, detectors=6, bits=2, outputs=5, groups=3, shared=1, read=1
    ),
    "sum_groups": Size(
        batch=5, inputs=4, detectors=6, bits=2, outputs=5, groups=3, sum_groups=1, keep=1
    ),
    "single": Size(Tag.SLOW, batch=5, inputs=6, detectors=3, bits=3, outputs=4, single=1, read=1),
    "hard": Size(batch=7, inputs=5, detectors=3, bits=3, outputs=4, read=2, keep=1),
    "blend": Size(Tag.SLOW, batch=7, inputs=5, detectors=3, bits=3, outputs=4, read=3),
    "soft_sign": Size(Tag.SLOW, batch=7, inputs=5, detectors=3, bits=3, outputs=4, read=4),
    "hard_soft_sign": Size(Tag.SLOW, batch=7, inputs=5, detectors=3, bits=3, outputs=4, read=5),
    "powers": Size(batch=7, inputs=5, detectors=4, bits=3, outputs=4, read=6, groups=2),
    "powers_one_way": Size(
        Tag.SLOW, batch=7, inputs=5, detectors=4, bits=3, outputs=4, read=7, keep=1
    ),
    "empty_batch": Size(batch=0, inputs=3, detectors=3, bits=2, outputs=4),
    "heads": SCORED.size(24576, 48, 48, 512, 8, 8, 0),
    "heads_one_way": SCORED.size(24576, 48, 48, 512, 8, 8, 1, tags=(Tag.BENCH,)),
    "heads_hard": SCORED.size(24576, 48, 48, 512, 8, 8, 2, tags=(Tag.BENCH,)),
    "heads_powers": SCORED.size(24576, 48, 48, 512, 8, 8, 6, tags=(Tag.BENCH,)),
    "heads_int8": DEPLOYED.size(24576, 48, 48, 512, 8, 8, tags=(Tag.BENCH,)),
}


def case(draw: Draw, s: Sizes) -> Case:
    read = READS[s.get("read", 0)]
    names = tuple(read.initial())
    differentiable = {
        "x": inputs_of(draw, s),
        "weights": draw.weights((s["detectors"], 2 ** s["bits"], s["outputs"])),
        **{name: jnp.asarray(value, draw.dtype) for name, value in read.initial().items()},
    }
    axes = {"x": Axes(0), "weights": Axes(detector=0), "anchors": Axes(detector=0)}
    axes |= {name: Axes() for name in names}
    if s.get("keep"):
        differentiable["keep"] = draw.ids((s["batch"], s["detectors"]), 0, 3).astype(draw.dtype)
        axes["keep"] = Axes(0, 1)

    def call(op: Any, a: Arrays) -> Arrays:
        y: jax.Array = op(
            a["x"],
            a["weights"],
            a["anchors"],
            {name: a[name] for name in names},
            read=read,
            groups=s.get("groups"),
            sum_groups=bool(s.get("sum_groups")),
            keep=a.get("keep"),
        )
        return {"y": y}

    return draw.case(
        differentiable,
        {"anchors": anchors_of(draw, s)},
        axes,
        {"y": Axes(0)},
        call,
        table="weights",
    )


def measured(draw: Draw, s: Sizes) -> Case:
    """Return a layer case: normally distributed inputs and tables, distinct inputs per pair."""
    made = case(draw, s)
    drawn = {
        name: draw.normal(a.shape, a.dtype) if name in ("x", "weights") else a
        for name, a in made.differentiable.items()
    }
    made = dataclasses.replace(made, differentiable=drawn)
    return _deploy_case(draw, made, s["groups"]) if s.get("integers") else made


def _deploy_case(draw: Draw, made: Case, groups: int) -> Case:
    """Return a case with integer tables, without gradients."""
    weights = made.differentiable["weights"]
    integers = {
        "weights": draw.ids(weights.shape, -128, 128).astype(jnp.int8),
        "exponents": jnp.full((groups, weights.shape[-1]), -7, jnp.int32),
    }

    def call(op: Any, a: Arrays) -> Arrays:
        return made.call(op, {**a, "weights": QuantizedTables(a["weights"], a["exponents"])})

    others = {name: a for name, a in made.differentiable.items() if name != "weights"}
    fixed, axes = {**made.fixed, **integers}, {**made.axes, "exponents": Axes()}
    return dataclasses.replace(
        made, differentiable=others, fixed=fixed, axes=axes, call=call, table=None
    )


def traffic(s: Sizes) -> Bytes:
    """Return the bytes moved by `measured`. No arrays are stored between inputs and rows.

    Forward reads a row in each way that has a value, backward in every way. A gradient, or an
    in-place update, reads and writes a row in each way that has a value; a dense gradient is zeroed
    first. Inputs are read in each direction.
    """
    read = READS[s.get("read", 0)]
    ways = getattr(read, "ways", 2)
    valued = ways if read.valued is None else read.valued
    per_group = s["batch"] * s["groups"]
    ids = 2 * s["detectors"] * s["bits"] * ID_BYTES
    n_table = s["detectors"] * 2 ** s["bits"] * s["outputs"]
    n_read, n_outputs = s["batch"] * s["detectors"] * s["outputs"], per_group * s["outputs"]
    integers = bool(s.get("integers"))
    # Elements in the dtype of the tables, and other bytes: tables may be read as int8, or be int8
    # themselves, with outputs in float32.
    inputs = np.array((0, (per_group * s["inputs"] + len(read.initial())) * ID_BYTES + ids))
    outputs = np.array((0, n_outputs * ID_BYTES) if integers else (n_outputs, 0))
    rows = np.array((0, n_read) if read.rounds_tables else (n_read, 0))
    table = np.array((0, n_table) if integers else (n_table, 0))
    moved = np.array((2 * valued * n_read, 0))
    both = 3 * inputs - (0, ids) + (valued + ways) * rows + 2 * outputs + moved
    moves = {
        FORWARD: inputs + valued * rows + outputs,
        UPDATE: inputs + outputs + moved,
        IN_PLACE: both,
        DENSE: both + table,
    }
    return Bytes(
        tuple(table.tolist()), {row: tuple(total.tolist()) for row, total in moves.items()}
    )
