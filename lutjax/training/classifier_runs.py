"""Classifier experiments: data sources and final evaluation."""

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lutjax.models import LogicClassifierConfig, LogicTreeNet, LogicTreeNetConfig
from lutjax.models._logic_configs import EDGES
from lutjax.training import _gate_costs, datasets, hosts, meshes, presets, reports, runs
from lutjax.training.classifier import (
    Model,
    Record,
    Run,
    baselines,
    expected_gates,
    image_shape,
    is_regression,
)
from lutjax.training.classifier_config import (
    CONFIGS,
    FOR_SMALL_TABLES,
    FOR_TABLES,
    GATE_COSTS,
    GATES_PER_CLASS,
    MODELS,
    SMALL,
    TAU_OF_CLASSES,
    TREE_TAU,
    Options,
    TrainingConfig,
)
from lutjax.training.datasets.columns import Encoding, Table
from lutjax.training.errors import CheckpointError
from lutjax.training.experiments import Experiment, Part, Show
from lutjax.training.models import State
from lutjax.training.raw import Form
from lutjax.training.recipes import RECIPES, Published, recipe as recipe_of
from lutjax.training.samples import Samples, SamplesError

MOST_BITS = 20_000_000  # maximum training bits for which baselines are fitted by default

MOST_GATES = 1_000_000
"""Maximum gates, over all image positions, for simplification after the last step."""

LARGE_GAP = 0.02  # minimum accuracy drop from the soft to the hard network that triggers a remark


class Classifier(Experiment):
    """Experiment with a classifier on samples."""

    configs = CONFIGS
    kept = Record
    refuses = SamplesError
    files = ("report.json", "confusion.png", "accuracy.png", "columns.json")
    curves = ("training loss", "hard accuracy", "soft accuracy")
    ends_early = "--patience"

    record: Record
    run: Run

    def __init__(self, record: Record, parts: datasets.Parts):
        self.record, self.encoding = record, parts.encoding
        self.train, self.test, self.test_rows = parts.train, parts.test, parts.test_rows
        self.remarks = (*parts.remarks, *self._doubts())
        thresholds = None if self.encoding is None else self.encoding.thresholds
        self.run = Run(record.model, record.training, self.train, thresholds)
        if self.run.regression:
            self.curves = ("training loss", "hard R2", "soft R2")

    @classmethod
    def create(
        cls,
        fields: Mapping[str, Any],
        path: Path | None = None,
        target: str | None = None,
        test: Path | None = None,
        recipe: str | None = None,
        stratified: bool = False,
        model: str | None = None,
        exclude: Sequence[str] | None = None,
        encoding: str | None = None,
        regression: bool | None = None,
        image_size: tuple[int, int] | None = None,
        progress: Callable[[str], object] = lambda line: None,
        cross_validate: bool = True,
    ) -> "Classifier":
        """Create a run on the data at a path, or on scikit-learn's digits.

        Sizes missing from the fields come from the recipe or the samples. `stratified` applies
        unless the fields specify it, and the model is by default the recipe's, or gates. The gate
        cost of small tables is cross-validated, and `progress` receives lines about it; False in
        `cross_validate` leaves it at 0. For the other arguments see
        `lutjax.training.datasets.load`.

        Raises:
          ValueError: a field or the recipe belongs to another model.
        """
        named = recipe_of(recipe) if recipe else None
        name = model or (named.model if named else "gates")
        if named is not None and named.model != name:
            raise ValueError(
                f"model is {name}, but the recipe {named.name} is for {named.model}. Omit --model."
            )
        config: Any = MODELS[name]
        presets.refuse_others(f"the model {name}", (config, TrainingConfig, Options), fields)
        if regression and (named is not None or name != "gates"):
            what = f"the recipe {named.name}" if named is not None else f"the model {name}"
            raise ValueError(
                f"regression requires gate layers, but {what} is for classes. Omit one of them."
            )
        if regression and fields.get("stratified"):
            raise ValueError(
                "stratified is True, but numbers (--regression) have no classes; leave it out."
            )
        data = datasets.load(
            path,
            target=target,
            test=test,
            exclude=exclude or (),
            encoding=encoding,
            regression=bool(regression),
            image_size=image_size,
        )
        if data.test is not None:
            for name in ("split", "stratified"):
                if name in fields:
                    raise ValueError(
                        f"{name} is {fields[name]}, but {data.name} has its own test part. "
                        f"Omit --{name}."
                    )
        of_table = (
            isinstance(data.train, Table) and named is None and config is LogicClassifierConfig
        )
        usual = _default_fields(data, fields) if of_table else {}
        asked = {**(named.fields() if named else {}), **fields}
        by_class = stratified and data.test is None and not data.regression
        values = {"stratified": by_class, **usual, **asked}
        training = presets.make(TrainingConfig, values)
        parts = _split_parts(data, training)
        small = bool(usual) and _is_small(parts, fields)
        if small:
            # Column bits and split stay the same, and with them the parts.
            layers = tuple(size * parts.n_classes for size in FOR_SMALL_TABLES["layers"])
            usual = {**usual, **FOR_SMALL_TABLES, "layers": layers}
            values = {**values, **usual, **asked}
        sizes = _sizes(config, parts, training, values)
        try:
            model_config, training, options = cls.make_configs({**values, **sizes, **asked}, config)
        except ValueError as error:
            if named is None:
                raise
            raise ValueError(
                f"{error} The recipe {named.name} has sizes for {named.data}; "
                f"samples of {data.name} have shape {list(parts.train.shape)}."
            ) from error
        if small:
            if cross_validate:
                training, remark = _with_gate_cost(model_config, training, parts.train, progress)
            else:
                costs = " or ".join(f"{cost:g}" for cost in GATE_COSTS)
                remark = (
                    f"{len(parts.train.x)} training rows: the gate cost, {costs}, is chosen by "
                    f"{_gate_costs.N_FOLDS}-fold cross-validation at the start of the run."
                )
            parts = dataclasses.replace(parts, remarks=(*parts.remarks, remark))
        record = Record(
            model=model_config,
            training=training,
            samples=runs.Source.create(path, len(data), data.digest),
            baselines={},
            options=dataclasses.asdict(options),
            history=runs.History(),
            target=target,
            test=None if test is None else str(test.absolute()),
            recipe=recipe,
            exclude=list(exclude or ()),
            encoding=encoding,
            form=Form.from_samples(
                parts.train,
                model_config.n_classes,
                parts.encoding,
                scaled=image_size is not None,
                target=target,
            ),
        )
        return cls(record, parts)

    @classmethod
    def from_record(
        cls,
        record: Record,
        path: Path | None = None,
        target: str | None = None,
        test: Path | None = None,
        model: str | None = None,
        exclude: Sequence[str] | None = None,
        encoding: str | None = None,
        regression: bool | None = None,
        image_size: tuple[int, int] | None = None,
    ) -> "Classifier":
        """Return the run of a record, with samples from `path` or their original location.

        If `model` is given, the run must have this model.
        """
        runs.check_model(record.model, model, MODELS)
        learned = is_regression(record.model)
        if regression and not learned:
            raise CheckpointError(
                "the run learns classes, and --regression asks for numbers; leave it out."
            )
        places = (path or record.samples.path, test or record.test)
        whole, other = (None if place is None else Path(place) for place in places)
        if image_size is None and record.form.scaled:
            image_size = (record.form.shape[0], record.form.shape[1])
        data = datasets.load(
            whole,
            target=target or record.target,
            test=other,
            exclude=record.exclude if exclude is None else exclude,
            encoding=encoding or record.encoding,
            regression=learned,
            image_size=image_size,
        )
        if data.digest != record.samples.digest:
            raise CheckpointError(
                f"the run belongs to other samples: they were {record.samples.size} of "
                f"{record.samples.path or 'scikit-learn'}, now {len(data)} others of {data.name}."
            )
        parts = _split_parts(data, record.training)
        record.form = Form.from_samples(
            parts.train,
            record.model.n_classes,
            parts.encoding,
            scaled=image_size is not None,
            target=target or record.target,
        )
        return cls(record, parts)

    def compare(self, show: Show) -> None:
        record = self.record
        n_bits = self.train.x.size * max(record.model.n_thresholds, 1)
        requested = self.intervals.baselines
        if requested or (requested is None and n_bits <= MOST_BITS):
            thresholds = self.run.thresholds
            if thresholds is not None:
                # Pixels share their channel's thresholds, which precede edge thresholds.
                if isinstance(record.model, LogicTreeNetConfig):
                    thresholds = thresholds[: record.model.in_shape[2]]
                elif record.model.edges:
                    thresholds = thresholds[: record.model.in_features]
                thresholds = np.tile(thresholds, (self.train.x.shape[1] // len(thresholds), 1))
            linear = "ridge" if self.run.regression else "logistic"
            with show.show_activity(
                f"fitting {linear} regression and a random forest to the same bits"
            ):
                record.baselines = baselines(
                    self.train, self.test, record.training, record.model.n_thresholds, thresholds
                )

    def describe(self) -> str:
        model, training = self.record.model, self.record.training
        layers, gates = " + ".join(map(str, model.layers)), "gates"
        if isinstance(model, LogicTreeNetConfig):
            layers = f"{' + '.join(map(str, model.kernels))} trees and {layers}"
        elif model.n_inputs != 2:
            gates = f"tables of {model.n_inputs} inputs"
        if isinstance(model, LogicClassifierConfig) and model.reduce:
            tables = zip(model.reducing, model.reduce, strict=True)
            gates += f", whose votes {' and '.join(f'{n} tables of {k}' for n, k in tables)} reduce"
        return (
            f"on {len(self.train.x)} samples of {self.train.name}, testing on {len(self.test.x)}: "
            f"{layers} {gates}, {self.run.structure.n_parameters():,} parameters, "
            f"{training.steps} steps of {training.batch_size} samples"
        )

    @property
    def sample_bytes(self) -> int:
        return int(4 * self.train.x.shape[1])

    def evaluate(self, state: State) -> float:
        return self.run.accuracy(state, self.test, hard=True)

    def evaluate_other(self, state: State) -> float:
        return self.run.accuracy(state, self.test, hard=False, steps=self._completed_steps())

    @property
    def _measure(self) -> str:
        return "R2" if self.run.regression else "accuracy"

    def _completed_steps(self) -> int:
        """Return the number of completed steps at the latest test, 0 before the first."""
        tests = self.record.history.test
        return tests[-1][0] if tests else 0

    def remark(self, state: State) -> str:
        words, history = [], self.record.history
        if history.test and history.other:
            hard, soft = history.test[-1][1], history.other[-1][1]
            words.append(f"soft {self._measure} {soft:.4f}, gap {soft - hard:+.4f}")
            temperature = self.run.temperature(self._completed_steps())
            if temperature is not None:
                words.append(f"temperature {float(temperature):.3g}")
        if self.record.training.gate_cost:
            expected, survive = self._gates(state)
            words.append(
                f"gates of two inputs and votes expected {expected:.0f}; "
                f"gates that survive {survive}"
            )
        return "; ".join(words)

    def _gates(self, state: State) -> tuple[float, str]:
        """Return the expected number of gates, and a phrase with the simplified circuit's count."""
        model = self.run.structure.model(*meshes.copy_to_local((state.params, state.others)))
        expected = float(expected_gates(model, self.run.temperature(self._completed_steps())))
        counts = self._counts(model)
        if counts["simplified"] is None:
            return expected, f"not counted, of {counts['at all places']:,}"
        return expected, f"{counts['simplified']:,}"

    def _counts(self, model: Model) -> dict[str, int | None]:
        """Return gate counts by category.

        ``trained`` counts gates with trained tables; ``at all places`` counts tree gates at each
        image position; ``simplified`` counts the remaining gates in the circuit from input bits to
        voting bits, or is None if the network is too large.
        """
        config = self.record.model
        if isinstance(config, LogicTreeNetConfig):
            trained, n_gates = config.n_gates, config.n_gates_at_places
        else:
            trained = n_gates = sum((*config.layers, *config.reducing))
        simplified = len(model.circuit(outputs="bits")) if n_gates <= MOST_GATES else None
        return {"trained": trained, "at all places": n_gates, "simplified": simplified}

    def early_stop_reason(self) -> str | None:
        patience = self.intervals.patience
        accuracies = [accuracy for _, accuracy in self.record.history.test]
        if patience is None or not accuracies:
            return None
        n_since = len(accuracies) - 1 - accuracies.index(max(accuracies))
        return f"no better hard network in {n_since} tests" if n_since >= patience else None

    def parts(self) -> list[Part]:
        confusion = Part("confusion.png", "drawing the confusion matrix", self._draw)
        encoding = Part("columns.json", "writing the encoding of columns", self._write_encoding)
        return [
            Part("report.json", "testing the hard and the soft network", self._report),
            *([] if self.run.regression else [confusion]),
            Part("accuracy.png", "drawing the accuracies", self._draw_accuracies),
            *([] if self.encoding is None else [encoding]),
            self.curves_part(),
        ]

    def _report(self, state: State, path: Path) -> list[str]:
        # The report is of the selected network, which may be older than the last step.
        record, last = self.record, state
        state = self.run.selected(state)
        model = self.run.structure.model(*meshes.copy_to_local((state.params, state.others)))
        packed, trees = model.packed(), []
        if isinstance(model, LogicTreeNet):
            trees = [
                reports.Trees(layer.spec, *map(np.asarray, layer.truth_tables()))
                for layer in model.trees
            ]
        thresholds = None if packed.thresholds is None else np.asarray(packed.thresholds)
        hard, soft = (
            self.run.classes(state, self.test.x, hard=hard, steps=self._completed_steps())
            for hard in (True, False)
        )
        report = reports.report(
            self.test.y,
            hard,
            soft,
            classes=list(self.record.form.classes),
            truth=[np.asarray(truth) for truth in packed.truth],
            wires=[np.asarray(wires) for wires in packed.wires],
            trees=trees,
            bits=bit_names(record.model, self.test, thresholds, self.encoding),
        )
        counts = self._counts(model)
        report = dataclasses.replace(
            report,
            baselines=record.baselines,
            gates=counts,
            samples={"train": len(self.train.x), "test": len(self.test.x)},
            model=record.model.to_dict(),
            training=dataclasses.asdict(record.training),
            options=record.options,
            recipe=record.recipe,
        )
        # For a regression, the errors of always answering the training mean say what was learned.
        if report.errors:
            mean = np.full(len(self.test.y), self.train.y.mean())
            errors = {**report.errors, "mean": reports.Errors.compute(self.test.y, mean)}
            report = dataclasses.replace(report, errors=errors)
        path.write_text(json.dumps(report.to_dict(), indent=1))
        lines = [
            *(self._errors(report.errors) if report.errors else self._accuracies(report)),
            *self._selected_network(last),
            self._circuit(counts),
            *report.lines(),
        ]
        recipe = RECIPES.get(record.recipe or "")
        if recipe is not None and recipe.published is not None:
            other = ""
            if self._other_data(recipe):
                other = "; these are other data, with which it cannot be compared"
            lines.append(
                f"Published: {recipe.published:g} % on {recipe.data} (the recipe "
                f"{recipe.name}){other}."
            )
        return lines

    def _accuracies(self, report: reports.Report) -> list[str]:
        others = ", ".join(
            f"{name} {100 * accuracy:.1f} %" for name, accuracy in self.record.baselines.items()
        )
        return [
            f"Hard network: {100 * report.hard:.1f} % of the test part"
            + (f"; on the same bits {others}." if others else "."),
            f"Soft network: {100 * report.soft:.1f} %.",
            *self._gap(report.hard, report.soft),
        ]

    def _errors(self, errors: Mapping[str, reports.Errors]) -> list[str]:
        others = ", ".join(f"{name} {r2:.3f}" for name, r2 in self.record.baselines.items())
        return [
            f"Hard network: {errors['hard']} on the test part"
            + (f"; R2 on the same bits: {others}." if others else "."),
            f"Soft network: {errors['soft']}.",
            f"The mean of the training part as the answer: {errors['mean']}.",
        ]

    def _doubts(self) -> list[str]:
        """Return a warning if the recipe is for other data."""
        recipe = RECIPES.get(self.record.recipe or "")
        if recipe is None or not (what := self._other_data(recipe)):
            return []
        return [
            f"warning: the recipe {recipe.name} is for {recipe.data}, and these data are "
            f"{what}: its sizes and rates may not suit them."
        ]

    def _other_data(self, recipe: Published) -> str:
        """Describe samples of another size than the recipe's data; empty if equal."""
        shape, n_classes = self.train.shape, self.record.model.n_classes
        what = f"of shape {list(shape)} in {n_classes} classes"
        if self.encoding is not None:
            shape = ()  # rows of a table have no shape that a recipe could ask for
            what = f"rows of a table in {n_classes} classes"
        recipe_shape, recipe_classes = recipe.samples
        same = (
            bool(recipe_shape) == bool(shape)
            # Some files hold images as flat rows.
            and math.prod(recipe_shape) == math.prod(shape)
            and recipe_classes == n_classes
        )
        return "" if same else what

    def _gap(self, hard: float, soft: float) -> list[str]:
        """Return a line if the hard network is much worse than the soft one."""
        if soft - hard <= LARGE_GAP:
            return []
        return [
            "warning: the hard network, which is the result, "
            f"is {100 * (soft - hard):.1f} points below the soft one: "
            "train with --final-temperature 0.1, which ends near the hard network, "
            "with --estimator straight_through, which trains it, or for more steps."
        ]

    def _selected_network(self, state: State) -> list[str]:
        """Return a line about the selected network, if there is one."""
        if not self.record.training.select_every:
            return []
        selected = state.optimizer
        kept = f"Kept: the network after {int(selected.step)} of {self._completed_steps()} steps"
        quality = f"it is right most often, {100 * float(selected.accuracy):.1f} %"
        if self.run.regression:
            quality = f"its R2 is the highest, {float(selected.accuracy):.3f}"
        return [f"{kept}; on the training part {quality}."]

    def _circuit(self, counts: Mapping[str, int | None]) -> str:
        n_gates, simplified = counts["at all places"], counts["simplified"]
        if simplified is None:
            return f"Circuit: {n_gates:,} gates, too many to simplify here."
        trees, ends = "", "that count the votes and find the class"
        if isinstance(self.record.model, LogicTreeNetConfig):
            trees = ", those of trees at each place,"
        if self.run.regression:
            ends = "that count the bits"
        return (
            f"Circuit: {simplified:,} of {n_gates:,} gates of the layers{trees} survive "
            "simplification from bits to bits; "
            f"an export adds those that compare numbers with thresholds and those {ends}."
        )

    def _draw(self, state: State, path: Path) -> None:
        from lutjax.training.pictures import plot_confusion

        classes = self.run.classes(self.run.selected(state), self.test.x, hard=True)
        counts = reports.confusion(self.test.y, classes, self.record.model.n_classes)
        plot_confusion(counts, path, self.test.classes)

    def _draw_accuracies(self, state: State, path: Path) -> None:
        from lutjax.training.pictures import plot_accuracies

        plot_accuracies(
            self.record.history, self.record.baselines, path, regression=self.run.regression
        )

    def _write_encoding(self, state: State, path: Path) -> None:
        assert self.encoding is not None
        path.write_text(self.encoding.to_json())


def bit_names(
    config: LogicClassifierConfig | LogicTreeNetConfig,
    part: Samples | Form,
    thresholds: np.ndarray | None,
    encoding: Encoding | None,
) -> list[str]:
    """Return the names of a classifier's input bits, for samples or their form."""
    of_trees = isinstance(config, LogicTreeNetConfig)
    maps = EDGES if config.edges else ()
    return reports.bit_names(part, thresholds, encoding, channels_first=of_trees, maps=maps)


def _split_parts(data: datasets.Data, training: TrainingConfig) -> datasets.Parts:
    return data.parts(
        split=training.split,
        stratified=training.stratified,
        bits=training.column_bits,
        numbers=training.thresholds == "learned",
    )


def _default_fields(data: datasets.Data, fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the default fields for layers of gates on a table."""
    assert isinstance(data.train, Table)
    n_classes = 0 if data.regression else len(set(data.train.labels))
    if n_classes <= 2 or "layers" in fields:
        return FOR_TABLES
    layers = tuple(size * n_classes for size in GATES_PER_CLASS)
    return {**FOR_TABLES, "layers": layers, "tau": TAU_OF_CLASSES}


def _is_small(parts: datasets.Parts, fields: Mapping[str, Any]) -> bool:
    """Return True for a table with the defaults of `FOR_SMALL_TABLES`."""
    n_rows = len(parts.train.x)
    return (
        _gate_costs.N_FOLDS <= n_rows < SMALL
        and not parts.train.regression
        and FOR_SMALL_TABLES.keys().isdisjoint(fields)
    )


def _with_gate_cost(
    model: LogicClassifierConfig,
    training: TrainingConfig,
    train: Samples,
    progress: Callable[[str], object],
) -> tuple[TrainingConfig, str]:
    """Return the config with the cross-validated gate cost, and a line about it."""
    # Every process makes the same choice; one of them reports it.
    report = progress if hosts.is_first() else lambda line: None
    method = f"{_gate_costs.N_FOLDS}-fold cross-validation"
    report(f"Choosing the gate cost by {method} ...")
    accuracies = _gate_costs.cross_validate(model, training, train, GATE_COSTS, report)
    # Of equally accurate networks, prefer the smaller one: a higher cost leaves fewer gates.
    _, cost = max(zip(accuracies, GATE_COSTS, strict=True))
    compared = ", ".join(
        f"{100 * accuracy:.1f} % with {other:g}"
        for accuracy, other in zip(accuracies, GATE_COSTS, strict=True)
    )
    remark = f"{len(train.x)} training rows: gate cost {cost:g}, chosen by {method}: {compared}."
    return dataclasses.replace(training, gate_cost=cost), remark


def _sizes(
    config: type, parts: datasets.Parts, training: TrainingConfig, fields: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the model sizes required by the samples."""
    n_classes, learned = parts.n_classes, training.thresholds == "learned"
    sizes: dict[str, Any] = {"n_classes": n_classes, "learned_thresholds": learned}
    if config is LogicTreeNetConfig:
        sizes |= _tree_sizes(image_shape(parts.train))
    else:
        usual = LogicClassifierConfig.layers
        if parts.encoding is not None:
            usual = FOR_TABLES["layers"]
        layers = fields.get("layers") or usual
        sizes |= {"in_features": parts.train.x.shape[1], "layers": layers}
        if len(parts.train.shape) > 1 and (
            "windows" in str(fields.get("wiring")) or fields.get("edges")
        ):
            sizes["image_shape"] = parts.train.shape
    if parts.train.regression:
        # Ones in the last layer count from the least to the largest number of the training part.
        last = (fields.get("layers") or sizes["layers"])[-1]
        least, largest = float(parts.train.y.min()), float(parts.train.y.max())
        sizes |= {"regression": True, "offset": least, "scale": (largest - least) / last}
    # Classes have equally many votes.
    *layers, last = sizes["layers"]
    sizes["layers"] = (*layers, -(-last // n_classes) * n_classes)
    if parts.encoding is not None and training.column_bits:
        sizes["n_thresholds"] = int(parts.encoding.thresholds is not None)
        if fields.get("n_thresholds"):
            raise ValueError(
                f"n_thresholds is {fields['n_thresholds']}, but columns are already bits; "
                "--column-bits sets their number. Use --column-bits 0 for --n-thresholds."
            )
    return sizes


def _tree_sizes(in_shape: tuple[int, int, int]) -> dict[str, Any]:
    """Return sizes for images: at most four tree layers, while height and width can be halved."""
    height, width, _ = in_shape
    halves = 0
    while halves < 4 and not height % 2 and not width % 2 and min(height, width) >= 4:
        height, width, halves = height // 2, width // 2, halves + 1
    n = max(halves, 1)
    return {
        "in_shape": in_shape,
        "kernels": tuple(32 * factor for factor in (1, 4, 16, 32)[:n]),
        "layers": (2560, 1280),
        "kernel": min(3, *in_shape[:2]),
        "padding": min(1, *(size - 1 for size in in_shape[:2])),
        "pool": 2 if halves else 1,
        "tau": TREE_TAU,
    }
