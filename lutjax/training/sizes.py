"""Network sizes for circuits with a requested number of 6-input lookup tables (LUT6).

A circuit's LUT6 depend on training: gates become constant, equal or unread. Networks are therefore
trained at several sizes, without checkpoints, until a circuit has the requested size.
"""

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from lutjax import circuits
from lutjax.circuits import abc
from lutjax.circuits.circuit import Circuit
from lutjax.models import LogicClassifierConfig
from lutjax.training import meshes
from lutjax.training.classifier import Model
from lutjax.training.classifier_runs import Classifier
from lutjax.training.errors import RunError
from lutjax.training.models import State
from lutjax.training.table_inputs import columns_of

TOLERANCE = 0.05  # maximum relative deviation from the requested LUT6

MOST_ATTEMPTS = 8

_FIRST_RATIO = 1.2  # LUT6 per trained gate, before the first attempt
_FIRST_EXPONENT = 0.8  # of LUT6 in the number of gates, after one attempt
_AT_ONCE = 100  # steps between interruptions


@dataclasses.dataclass(frozen=True)
class Attempt:
    """A trained network size."""

    layers: tuple[int, ...]  # gates per layer
    lut6: int  # LUT6 from inputs to class, by ABC
    accuracy: float  # hard test accuracy, or R2 in regression. Sizes are not chosen by it.
    fields: Mapping[str, Any]  # config fields with this size

    def deviation(self, luts: int) -> float:
        """Return the relative deviation from the requested LUT6."""
        return self.lut6 / luts - 1

    def __str__(self) -> str:
        return (
            f"{'+'.join(map(str, self.layers))} gates: "
            f"{self.lut6:,} LUT6, hard {100 * self.accuracy:.1f} %"
        )


def find(
    luts: int,
    make: Callable[[Mapping[str, Any]], Classifier],
    fields: Mapping[str, Any],
    *,
    attempts: Sequence[Attempt] = (),
    on_attempt: Callable[[Attempt], None] = lambda attempt: None,
) -> Attempt:
    """Return a network size whose circuit has a number of LUT6, within `TOLERANCE`.

    Layers keep their proportions, and unless given, the vote temperature follows the square root of
    the votes per class.

    Args:
      luts: requested LUT6 from inputs to class.
      make: returns a new experiment for config fields.
      fields: config fields; ``layers`` are proportions.
      attempts: earlier attempts with the same fields and data.
      on_attempt: receives each new attempt.

    Raises:
      ValueError: the model has no layers to scale.
      RunError: no size was found; or ABC is not installed.
    """
    check_abc()
    # A given gate cost needs no cross-validation.
    base = make({"gate_cost": 0.0, **fields}).record.model
    if not isinstance(base, LogicClassifierConfig):
        raise ValueError("luts scales gate layers, not trees over images. Omit --luts.")
    tried = list(attempts)
    for attempt in tried:
        if abs(attempt.deviation(luts)) <= TOLERANCE:
            return attempt
    for _ in range(MOST_ATTEMPTS):
        layers = _untried_layers(base, _next_size(luts, tried), luts, tried)
        chosen = {**fields, "layers": layers}
        if "tau" not in fields:
            chosen["tau"] = round(base.tau * math.sqrt(layers[-1] / base.layers[-1]), 3)
        tried.append(_attempt(make(chosen), chosen))
        on_attempt(tried[-1])
        if abs(tried[-1].deviation(luts)) <= TOLERANCE:
            return tried[-1]
    nearest = min(tried, key=lambda attempt: abs(attempt.deviation(luts)))
    raise RunError(
        f"no network with {luts:,} LUT6 was found; the nearest has {nearest}. Choose another size, "
        "or other --layers."
    )


def check_abc() -> None:
    """Raise RunError if ABC is not installed."""
    if abc.find() is None:
        raise RunError("--luts counts LUT6 by ABC, which is not found: pip install pyosys")


def _next_size(luts: int, attempts: Sequence[Attempt]) -> float:
    """Return the number of gates to try next, from a power law through the nearest attempts."""
    points = sorted({(sum(attempt.layers), attempt.lut6) for attempt in attempts})
    if not points:
        return luts / _FIRST_RATIO
    below = [point for point in points if point[1] <= luts]
    above = [point for point in points if point[1] > luts]
    nearest = min(points, key=lambda point: abs(math.log(point[1] / luts)))
    exponent = _FIRST_EXPONENT
    if len(points) > 1:
        first, last = (
            (below[-1], above[0]) if below and above else points[-2:] if below else points[:2]
        )
        exponent = (
            math.log(last[1] / first[1]) / math.log(last[0] / first[0]) if last != first else 1.0
        )
    # Encoders and counters grow more slowly than layers; training adds noise, which would make
    # the exponent from two close points extreme.
    exponent = min(max(exponent, 0.3), 1.5)
    return float(nearest[0] * (luts / nearest[1]) ** (1 / exponent))


def _scale_layers(base: LogicClassifierConfig, n_gates: float) -> tuple[int, ...]:
    """Return layers with the proportions of a config, and about this number of gates."""
    factor = n_gates / sum(base.layers)
    *layers, last = (max(base.n_classes, round(size * factor)) for size in base.layers)
    return (*layers, max(1, round(last / base.n_classes)) * base.n_classes)


def _untried_layers(
    base: LogicClassifierConfig, n_gates: float, luts: int, attempts: Sequence[Attempt]
) -> tuple[int, ...]:
    """Return scaled layers, larger or smaller if this size was tried."""
    tried = {attempt.layers: attempt.lut6 for attempt in attempts}
    # The last layer is a multiple of the classes; a step of all layers changes it by one multiple.
    step = base.n_classes * sum(base.layers) / base.layers[-1]
    layers = _scale_layers(base, n_gates)
    direction = 1 if tried.get(layers, 0) < luts else -1
    while layers in tried:
        n_gates += direction * step
        if n_gates < step:  # all smaller sizes were tried: continue above the largest
            n_gates, direction = float(max(map(sum, tried))), 1
        layers = _scale_layers(base, n_gates)
    return layers


def _attempt(experiment: Classifier, fields: Mapping[str, Any]) -> Attempt:
    state = _train(experiment)
    model = experiment.run.structure.model(*meshes.copy_to_local((state.params, state.others)))
    return Attempt(
        tuple(experiment.record.model.layers),
        max(1, abc.lut_count(circuit_of(experiment, model))),
        experiment.run.accuracy(state, experiment.test, hard=True),
        fields,
    )


def _train(experiment: Classifier) -> State:
    run, steps = experiment.run, experiment.record.training.steps
    state = run.init()
    for done in range(0, steps, _AT_ONCE):
        state, loss = run.advance(state, done, min(_AT_ONCE, steps - done))
        if not np.isfinite(jax.block_until_ready(loss)).all():
            raise FloatingPointError(f"the loss is not finite after {done + _AT_ONCE} steps.")
    return run.selected(state)


def circuit_of(experiment: Classifier, model: Model) -> Circuit:
    """Return a model's circuit with the default inputs of an export, else with bits."""
    thresholds, numbers = model.packed().thresholds, experiment.test.x
    if experiment.encoding is not None:
        taken = columns_of(
            experiment.encoding, None if thresholds is None else np.asarray(thresholds)
        )
        return circuits.from_model(model, inputs=taken)
    whole = thresholds is not None and bool((numbers == np.clip(np.floor(numbers), 0, 255)).all())
    return circuits.from_model(model, inputs="uint8" if whole else "bits")


# ------------------------------------------------------------------------------------- fronts
@dataclasses.dataclass(frozen=True)
class Point:
    """A finished network on the front of accuracy against size."""

    # wanted, lut6: requested and actual LUT6
    wanted: int
    lut6: int
    gates: int  # gates of the circuit
    accuracy: float  # hard test accuracy, or R2 in regression
    folder: str


def measure(folder: Path, wanted: int) -> Point:
    """Return the size and accuracy of a finished run."""
    from lutjax.training import export

    circuit = export.source_of(folder, on_damage=lambda text: None).circuit
    hard = json.loads((folder / "report.json").read_text())["hard"]
    return Point(wanted, abc.lut_count(circuit), len(circuit), hard, str(folder))


def front_table(points: Sequence[Point]) -> list[str]:
    """Return the lines of a table of points."""
    lines = [f"{'wanted':>9} {'LUT6':>9} {'gates':>9} {'hard %':>7}  run"]
    for point in points:
        numbers = f"{point.wanted:>9,} {point.lut6:>9,} {point.gates:>9,}"
        lines.append(f"{numbers} {100 * point.accuracy:>7.2f}  {point.folder}")
    return lines


def write_front(folder: Path, points: Sequence[Point], attempts: Sequence[Attempt]) -> None:
    """Write ``front.json`` and the plot ``front.png``: accuracy against LUT6."""
    from lutjax.training.pictures import plot_front

    facts = {
        "points": [dataclasses.asdict(point) for point in points],
        "attempts": [
            {"layers": list(attempt.layers), "lut6": attempt.lut6, "accuracy": attempt.accuracy}
            for attempt in attempts
        ],
    }
    (folder / "front.json").write_text(json.dumps(facts, indent=1) + "\n")
    plot_front(
        [(point.lut6, point.accuracy) for point in points],
        [(attempt.lut6, attempt.accuracy) for attempt in attempts],
        folder / "front.png",
    )
