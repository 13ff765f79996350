"""Test cases for the op."""

import dataclasses

from lutjax.cases import Axes, Size, Tag

DTYPES = ("float32", "bfloat16")
REFERENCE = "toy_op.reference"

SIZES = {
    "split": Size(Tag.FAST, batch=4, detectors=2, rows=3, outputs=5),
    "primes": Size(Tag.DTYPES, batch=7, detectors=3, rows=5, outputs=2),
    "empty_batch": Size(batch=0, detectors=2, rows=3, outputs=1),
    "toy": Size(Tag.BENCH, Tag.CPU, batch=8, detectors=2, rows=4, outputs=3),
}


def case(draw, s):
    return draw.case(
        {
            "weights": draw.weights((s["detectors"], s["rows"], s["outputs"])),
            "gain": draw.weights((s["batch"], s["outputs"])),
        },
        {"index": draw.ids((s["batch"], s["detectors"]), 0, s["rows"])},
        {"weights": Axes(detector=0), "gain": Axes(0), "index": Axes(0, 1)},
        {"y": Axes(0)},
        lambda op, a: {"y": op(a["weights"], a["index"], a["gain"])},
        table="weights",
        # A gain may be zero, or sum to zero, and its row is read nevertheless.
        addresses=lambda reference, a: reference.gained_lookup(
            a["weights"], a["index"], 1 + 0 * a["gain"][:, :1]
        ),
    )


@dataclasses.dataclass(frozen=True)
class Traffic:
    sizes: dict[str, int]

    def table_bytes(self, itemsize):
        return self.sizes["detectors"] * self.sizes["rows"] * self.sizes["outputs"] * itemsize

    def bytes_moved(self, row, itemsize):
        s = self.sizes
        return (
            s["batch"]
            * s["outputs"]
            * itemsize
            * (s["detectors"] + 2)
            * (1 if row == "forward" else 3)
        )


def traffic(s):
    return Traffic(dict(s))
