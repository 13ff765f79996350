"""Names that arguments, configs and command-line options choose from, importable without JAX."""

import enum

FLOATS = ("float32", "bfloat16", "float16", "float64")
"""Dtypes of the ops."""

PLACEMENTS = ("device", "host")
"""Memories that hold tables."""

ESTIMATORS = ("soft", "gumbel", "straight_through")
"""Estimators of logic layers."""

PARAMETERIZATIONS = ("light", "walsh", "raw")
"""Trained forms of soft tables."""

READS = (
    "hard",
    "blend",
    "soft_sign",
    "confidence",
    "confidence_1",
    "powers_of_two",
    "powers_of_two_1",
)
"""Reads of the tables of a `lutjax.models.GPT`."""

OPTIMIZERS = ("sgd", "momentum", "adam", "adamw", "adagrad", "row_adagrad")
TABLE_OPTIMIZERS = ("sgd", "row_adagrad", "row_momentum", "row_adam")
SCHEDULES = ("constant", "published", "cosine")
ANNEALINGS = ("linear", "exponential", "cosine")

BENCHMARK_ROWS = ("forward", "dense", "in-place", "update")
"""Measurements of an op; see `lutjax.cases`."""


class Platform(enum.StrEnum):
    """Language in which an implementation is written."""

    XLA = "xla"
    PALLAS = "pallas"
    TRITON = "triton"
    NATIVE = "native"


class Backend(enum.StrEnum):
    """Hardware on which an implementation runs."""

    CPU = "cpu"
    GPU = "gpu"
    TPU = "tpu"
    ANY = "any"
