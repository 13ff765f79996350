"""Reports about trained classifiers and table reads, computed with NumPy only.

A classifier report has the confusion matrix, gates by kind, and inputs that reach no vote.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int, Num, Shaped

from lutjax import Usage, wiring
from lutjax.layers.specifications import LogicConvSpec
from lutjax.training.datasets.columns import Encoding
from lutjax.training.raw import Form
from lutjax.training.samples import Samples

KINDS = {
    "constant": (0b0000, 0b1111),
    "input": (0b1010, 0b1100),
    "not": (0b0101, 0b0011),
    "and": (0b1000,),
    "nand": (0b0111,),
    "or": (0b1110,),
    "nor": (0b0001,),
    "and not": (0b0010, 0b0100),
    "or not": (0b1011, 0b1101),
    "xor": (0b0110,),
    "xnor": (0b1001,),
}
"""Kinds of two-input gates with their truth tables.

Bit k is the output at address k; the first input is the lowest address bit.
"""

Truth = Bool[np.ndarray, "_ _"]  # truth tables of a layer, ``[gates, addresses]``
Wires = Int[np.ndarray, "_ _"]  # wires of a layer, ``[gates, inputs]``


class Trees(NamedTuple):
    """A layer of gate trees for images, with features first."""

    spec: LogicConvSpec  # layer sizes
    # wires, truth: trees of one window; see `truth_tables` of `lutjax.layers.nnx.LogicConv`
    wires: Wires
    truth: Truth


@dataclasses.dataclass(frozen=True)
class Layer:
    """Gates or tables of one layer."""

    # Number of gates for each kind in `KINDS`, or number of tables by required inputs ("needs 2")
    kinds: dict[str, int]
    dead: int  # gates without influence on any vote; in a tree, gates dead at every position


@dataclasses.dataclass(frozen=True)
class Errors:
    """Regression errors.

    Attributes:
      absolute: mean absolute error.
      squared: root mean squared error.
      r2: 1 minus the mean squared error divided by the target variance.

    Example:
      >>> import numpy as np
      >>> from lutjax.training.reports import Errors
      >>> print(Errors.compute(np.array([1.0, 2, 3, 4]), np.array([1.0, 2, 3, 6])))
      R2 0.200, mean absolute error 0.5, root mean squared error 1
    """

    absolute: float
    squared: float
    r2: float

    @classmethod
    def compute(
        cls, numbers: Shaped[np.ndarray, " samples"], predictions: Shaped[np.ndarray, " samples"]
    ) -> "Errors":
        """Return the errors of predictions `found` for targets `numbers`."""
        wrong = predictions.astype(np.float64) - numbers.astype(np.float64)
        variance = float(numbers.astype(np.float64).var()) or 1.0  # nothing to explain
        squared = float((wrong**2).mean())
        return cls(float(abs(wrong).mean()), squared**0.5, 1 - squared / variance)

    def __str__(self) -> str:
        return (
            f"R2 {self.r2:.3f}, mean absolute error {self.absolute:.4g}, "
            f"root mean squared error {self.squared:.4g}"
        )


@dataclasses.dataclass(frozen=True)
class Report:
    """JSON-serializable facts about a classifier and its test part.

    Attributes:
      hard, soft: accuracy of the hard and the soft network; R2 for regression.
      classes: class names.
      confusion: confusion matrix of the hard network; rows are actual classes, columns predicted
        ones.
      layers: gates per layer.
      bits: bits available to the first layer.
      dead_bits: names of the bits without influence on any vote.
      baselines: accuracies of other classifiers on the same bits; R2 for regression.
      errors: for regression, errors of the hard network, the soft network and the training mean;
        see `Errors`.
      gates: gate counts by category; see `lutjax.training.classifier_runs.Classifier`.
      samples: sizes of the training and the test part.
      model, training, options: sizes and options of the run, by name.
      recipe: published network used for sizes and rates, if any.
    """

    hard: float
    soft: float
    classes: list[str]
    confusion: list[list[int]]
    layers: list[Layer]
    bits: int
    dead_bits: list[str]
    baselines: dict[str, float] = dataclasses.field(default_factory=dict)
    gates: dict[str, int | None] = dataclasses.field(default_factory=dict)
    samples: dict[str, int] = dataclasses.field(default_factory=dict)
    model: dict[str, Any] = dataclasses.field(default_factory=dict)
    training: dict[str, Any] = dataclasses.field(default_factory=dict)
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    recipe: str | None = None
    errors: dict[str, "Errors"] = dataclasses.field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as a JSON-serializable dict."""
        return dataclasses.asdict(self)

    def lines(self) -> list[str]:
        """Return text lines about gates and dead inputs."""
        totals: dict[str, int] = {}
        for layer in self.layers:
            for kind, count in layer.kinds.items():
                totals[kind] = totals.get(kind, 0) + count
        kinds = ", ".join(f"{kind} {count:,}" for kind, count in totals.items() if count)
        dead = sum(layer.dead for layer in self.layers)
        gates = f"no vote depends on {dead:,} of {sum(totals.values()):,}"
        return [
            f"Gates by kind, as they were trained: {kinds}; {gates}.",
            f"Dead inputs: no vote depends on {len(self.dead_bits):,} of {self.bits:,} bits.",
        ]


@dataclasses.dataclass(frozen=True)
class Tables:
    """JSON-serializable read statistics for the tables of one lookup."""

    name: str  # path of the tables in the model
    # tables, rows: table count, and rows per table
    tables: int
    rows: int
    reads: int  # reads of all tables
    never_read: int  # rows never read, in all tables
    entropy: list[float]  # read entropy per table, in bits
    largest_share: list[float]  # for each table, its most read row's share of all reads

    def line(self) -> str:
        """Return a text line with means over the tables."""
        rows, share = self.tables * self.rows, float(np.mean(self.largest_share or [0]))
        return (
            f"{self.name}: never read {self.never_read:,} of {rows:,} rows; "
            f"entropy {np.mean(self.entropy or [0]):.2f} of {np.log2(max(self.rows, 1)):.0f} bits; "
            f"the most read row of a table has {share:.1%} of its reads."
        )


def tables(usage: Mapping[str, Usage]) -> list[Tables]:
    """Convert the result of `lutjax.usage` for reports.

    Example:
      >>> import numpy as np, lutjax
      >>> from lutjax.training import reports
      >>> usage = lutjax.Usage(np.array([[3, 0, 1, 0], [2, 2, 0, 0]]))
      >>> [report] = reports.tables({"hidden/weights": usage})
      >>> report.line()
      'hidden/weights: never read 4 of 8 rows; entropy 0.91 of 2 bits; the most read row of a table
      has 62.5% of its reads.'
    """
    return [
        Tables(
            name=name,
            tables=reads.counts.shape[0],
            rows=reads.counts.shape[1],
            reads=int(reads.reads.sum()),
            never_read=int(reads.never_read.sum()),
            entropy=reads.entropy.tolist(),
            largest_share=reads.largest_share.tolist(),
        )
        for name, reads in usage.items()
    ]


def report(
    labels: Num[np.ndarray, " samples"],
    hard: Num[np.ndarray, " samples"],
    soft: Num[np.ndarray, " samples"],
    *,
    classes: Sequence[str],
    truth: Sequence[Truth],
    wires: Sequence[Wires],
    bits: Sequence[str],
    trees: Sequence[Trees] = (),
) -> Report:
    """Return the report of a network.

    Args:
      labels: test labels, or regression targets.
      hard: hard network predictions.
      soft: soft network predictions.
      classes: all class names; empty for regression.
      truth: truth tables per layer; see `lutjax.models.PackedClassifier`.
      wires: wires per layer.
      bits: names of the bits available to the first layer.
      trees: preceding tree layers.
    """
    live, read = live_gates(
        truth, wires, math.prod(trees[-1].spec.out_shape) if trees else len(bits)
    )
    # From the outputs back: a node is live if a live node reads it.
    for layer in reversed(trees):
        alive, read = live_nodes(layer, read)
        live, truth = [alive, *live], [layer.truth, *truth]
    errors = {}
    if not classes:
        errors = {"hard": Errors.compute(labels, hard), "soft": Errors.compute(labels, soft)}
    return Report(
        hard=errors["hard"].r2 if errors else float((hard == labels).mean()),
        soft=errors["soft"].r2 if errors else float((soft == labels).mean()),
        classes=list(classes),
        confusion=confusion(labels, hard, len(classes)).tolist() if classes else [],
        errors=errors,
        layers=[
            Layer(kinds(table), int((~alive).sum()))
            for table, alive in zip(truth, live, strict=True)
        ],
        bits=len(bits),
        dead_bits=[name for name, is_read in zip(bits, read, strict=True) if not is_read],
    )


def confusion(
    labels: Int[np.ndarray, " samples"], classes: Int[np.ndarray, " samples"], n_classes: int
) -> Int[np.ndarray, "{n_classes} {n_classes}"]:
    """Return the confusion matrix; rows are actual classes, columns predicted ones.

    Example:
      >>> import numpy as np
      >>> from lutjax.training.reports import confusion
      >>> confusion(np.array([0, 0, 1]), np.array([0, 1, 1]), 2)
      array([[1, 1],
             [0, 1]])
    """
    counts = np.zeros((n_classes, n_classes), int)
    np.add.at(counts, (labels, classes), 1)
    return counts


def kinds(truth: Truth) -> dict[str, int]:
    """Count gates by the kinds in `KINDS`, or tables without two inputs by required inputs.

    Example:
      >>> import numpy as np
      >>> from lutjax.training.reports import kinds
      >>> truth = np.array([[0, 0, 0, 1], [0, 1, 1, 0], [1, 1, 1, 1]], bool)
      >>> {kind: n for kind, n in kinds(truth).items() if n}
      {'constant': 1, 'and': 1, 'xor': 1}
    """
    if truth.shape[1] != 4:
        counts = np.bincount(needs(truth).sum(1), minlength=truth.shape[1].bit_length())
        return {f"needs {number}": int(count) for number, count in enumerate(counts)}
    codes = truth @ (1 << np.arange(4))
    return {kind: int(np.isin(codes, tables).sum()) for kind, tables in KINDS.items()}


def needs(truth: Truth) -> Bool[np.ndarray, "gates inputs"]:
    """Return a mask for the inputs with influence on each table's output."""
    n_inputs = truth.shape[1].bit_length() - 1
    influential = []
    for bit in range(n_inputs):
        halves = truth.reshape(len(truth), -1, 2, 1 << bit)
        influential.append((halves[:, :, 0] != halves[:, :, 1]).any((1, 2)))
    return np.stack(influential, 1)


def live_gates(
    truth: Sequence[Truth], wires: Sequence[Wires], n_bits: int
) -> tuple[list[Bool[np.ndarray, " _"]], Bool[np.ndarray, " bits"]]:
    """Return masks for the gates in each layer and the input bits with influence on votes.

    A constant vote counts as relevant, because it shifts its class sum. A gate counts as read if a
    relevant table depends on that input, so bits that cancel in later layers count as live.
    """
    alive = np.ones(len(truth[-1]), bool)
    live = [alive]
    for number in reversed(range(len(truth))):
        used = needs(truth[number]) & alive[:, None]
        alive = np.zeros(len(truth[number - 1]) if number else n_bits, bool)
        alive[wires[number][used]] = True
        live.append(alive)
    return live[-2::-1], live[-1]


def live_nodes(
    trees: Trees, alive: Bool[np.ndarray, " outputs"]
) -> tuple[Bool[np.ndarray, " nodes"], Bool[np.ndarray, " inputs"]]:
    """Return masks of the nodes and inputs that influence a relevant output at any position.

    Outputs and inputs have the order channel, row, column.
    """
    spec, needed = trees.spec, needs(trees.truth)
    rows, columns, kernels = spec.out_shape
    (height, width), (up, left) = spec.pooling
    at = np.repeat(np.repeat(alive.reshape(kernels, rows, columns), height, 1), width, 2)
    n_rows, n_columns = spec.places
    # From roots to leaves; a mask has the shape [nodes of a level, positions].
    below = at[:, up : up + n_rows, left : left + n_columns].reshape(kernels, -1)
    live, last = [], len(needed)
    for n_nodes in reversed(spec.levels):
        live.append(below.any(1))
        used = below[:, None] & needed[last - n_nodes : last, :, None]  # [nodes, 2, positions]
        last -= n_nodes
        # The two inputs of a node are neighbors in the level below.
        below = used.reshape(-1, used.shape[2])
    size, stride, around = spec.geometry
    windows = wiring.windows(spec.in_shape, size, stride, padding=around).reshape(-1, spec.window)
    ids = windows.T[trees.wires[: spec.levels[0]]][used]
    inputs = np.zeros(math.prod(spec.in_shape), bool)
    inputs[ids[ids >= 0]] = True  # negative ids are padding
    return np.concatenate(live[::-1]), inputs.reshape(spec.in_shape).transpose(2, 0, 1).ravel()


_WORDS = (
    "false", "not ({0} or {1})", "{0} and not {1}", "not {1}",
    "{1} and not {0}", "not {0}", "{0} differs from {1}", "not ({0} and {1})",
    "{0} and {1}", "{0} equals {1}", "{0}", "{0} or not {1}",
    "{1}", "{1} or not {0}", "{0} or {1}", "true",
)  # fmt: skip
"""Two-input gates in words, by truth table as in `KINDS`."""


def in_words(truth: Truth, wires: Wires, names: Sequence[str]) -> list[str]:
    """Describe each gate of a layer in words, usable as input names for the next layer.

    Args:
      truth: truth tables of the layer, with two inputs per gate; see
        `lutjax.models.PackedClassifier`.
      wires: wires of the layer.
      names: names of the layer's inputs.

    Raises:
      ValueError: tables have another number of inputs.

    Example:
      >>> import numpy as np
      >>> from lutjax.training.reports import in_words
      >>> truth = np.array([[0, 0, 0, 1], [0, 1, 0, 0]], bool)
      >>> in_words(truth, np.array([[0, 1], [2, 0]]), ["age > 40", "job = nurse", "sex = f"])
      ['(age > 40) and (job = nurse)', '(sex = f) and not (age > 40)']
    """
    if truth.shape[1] != 4:
        raise ValueError(
            f"truth has {truth.shape[1]} entries per table; "
            "only tables with 4 (two inputs) can be described."
        )
    codes = truth @ (1 << np.arange(4))
    return [
        _WORDS[code].format(*(f"({names[wire]})" for wire in pair))
        for code, pair in zip(codes, wires, strict=True)
    ]


def bit_names(
    part: Samples | Form,
    thresholds: Shaped[np.ndarray, "features thresholds"] | None,
    encoding: Encoding | None,
    *,
    channels_first: bool = False,
    maps: Sequence[str] = (),
) -> list[str]:
    """Return names for a network's input bits: pixels by row and column, table columns by name.

    Args:
      part: samples, or their form.
      thresholds: thresholds per numeric input; None for bits.
      encoding: table column encoding; None for arrays.
      channels_first: whether thresholds are per channel, and bits have the order channel,
        threshold, row, column.
      maps: names of the maps after the channels, with the same number of bits each.
    """
    names = [",".join(map(str, place)) for place in np.ndindex(part.shape)]
    if channels_first or maps:
        by_channel = np.asarray(names, object).reshape(*part.shape[:2], -1).transpose(2, 0, 1)
        planes = by_channel.reshape(len(by_channel), -1)
        edges = [planes + f" {name}" for name in maps]
        names = [*names, *np.concatenate(edges).ravel()] if edges else names
    if channels_first:
        planes = np.concatenate([planes, *edges])
        rows = [[""]] * len(planes)
        if thresholds is not None:
            rows = [[f" > {t:g}" for t in row] for row in thresholds]
        return [
            name + end
            for plane, ends in zip(planes, rows, strict=True)
            for end in ends
            for name in plane
        ]
    if encoding is not None:
        names = encoding.features
        # Bits of columns have a threshold as well.
        if encoding.thresholds is not None and thresholds is not None:
            columns = zip(names, encoding.is_number, thresholds[:, 0], strict=True)
            return [
                encoding.above(i, threshold) if is_number else name
                for i, (name, is_number, threshold) in enumerate(columns)
            ]
        if thresholds is not None:
            return [encoding.above(i, t) for i, row in enumerate(thresholds) for t in row]
    if thresholds is None:
        return names
    return [f"{name} > {t:g}" for name, row in zip(names, thresholds, strict=True) for t in row]
