"""Circuits of trained models, with samples and the packed model's answers."""

import dataclasses
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Shaped

import lutjax
from lutjax import circuits
from lutjax.bundles._layout import is_bundle
from lutjax.bundles.errors import BundleError
from lutjax.circuits import deployment, mcu, proofs
from lutjax.circuits.circuit import Circuit
from lutjax.circuits.columns import Value
from lutjax.circuits.deployment import Vectors
from lutjax.circuits.ports import Format, Port
from lutjax.circuits.resynthesis import MOST_INPUTS
from lutjax.models import LogicCA, LogicTreeNetConfig, PackedClassifier, PackedTreeNet
from lutjax.models.packed import votes_of
from lutjax.training import (
    automaton,
    checkpoints,
    classifier,
    model_folders,
    predictions,
    reports,
    runs,
)
from lutjax.training.classifier_runs import Classifier, bit_names
from lutjax.training.datasets.columns import Encoding, Table
from lutjax.training.errors import CheckpointError, RunError
from lutjax.training.model_folders import ModelFolder
from lutjax.training.raw import Form
from lutjax.training.samples import Samples, SamplesError
from lutjax.training.table_inputs import columns_of, table_of, values_of

MOST_VECTORS = 1000
"""Maximum number of samples written with a circuit, from the start of the test part."""

MOST_GATES = 2_000_000  # maximum gates in an exported network, over all image positions

Packed = PackedClassifier | PackedTreeNet

Numbers = Shaped[np.ndarray, "samples _"]


FOLDER = "circuit"  # default name of the export folder in its run folder


@dataclasses.dataclass(frozen=True)
class Wanted:
    """Export options.

    Raises:
      ValueError: an unknown format, or another invalid value.
    """

    formats: tuple[str, ...] = ()  # names in `lutjax.circuits.deployment.FORMATS`; empty for all
    # inputs, outputs, lut: see `source_of`
    inputs: str | None = None
    outputs: str | None = None
    lut: int | None = None
    # Name for the Verilog module, C functions and files; None to derive it from the run folder
    name: str | None = None
    registers: int = 0  # gate levels between registers in the Verilog module; 0 for none
    optimize: str | None = None  # optimization goal, one of `OPTIMIZED`; None for no optimization
    # Table dtype of a language model, "int16" or "int8"; None for int16, and for circuits
    integers: str | None = None
    # Target microcontroller for C code, a name in `lutjax.circuits.mcu.TARGETS`; None for none
    target: str | None = None

    def __post_init__(self) -> None:
        self.options("circuit")

    def options(self, name: str) -> deployment.Options:
        """Return the file options, with a default name."""
        return deployment.Options(self.formats, self.name or name, self.registers, self.target)


@dataclasses.dataclass(frozen=True)
class Source:
    """A circuit of a run, and the model it must agree with."""

    name: str  # default file name
    circuit: Circuit  # the model's circuit before optimization
    samples: Numbers  # values for all input ports, ``[samples, numbers]``
    samples_name: str  # sample source
    # Maps input values to values of the port ``y``, by the packed model in JAX
    answer: Callable[[Numbers], Numbers]
    run: dict[str, Any]  # facts about the run for the manifest
    # Page arguments, which may include another circuit; see `deployment.Request`
    page: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    remarks: tuple[str, ...] = ()  # lines for the user
    # Additional files, by name; see `deployment.Request`
    extras: Mapping[str, bytes] = dataclasses.field(default_factory=dict)
    # Returns a circuit with a classifier's layers only; see `lutjax.circuits.mcu.write`
    layers: Callable[[], Circuit] | None = None
    # Raw table rows for `samples`; None if the circuit does not take rows
    rows: Sequence[Sequence[Value]] | None = None
    # Returns the packed model's answers to the first rows
    row_answers: Callable[[int], Numbers] | None = None

    def split_by_port(self, numbers: Numbers) -> dict[str, Numbers]:
        """Return the values for each input port by name."""
        ends = np.cumsum([port.count for port in self.circuit.inputs])[:-1]
        names = (port.name for port in self.circuit.inputs)
        return dict(zip(names, np.split(numbers, ends, axis=1), strict=True))

    def vectors(self) -> Vectors:
        """Return samples with their answers, computed from raw rows for tables."""
        x = self.samples[:MOST_VECTORS]
        if self.rows is None or self.row_answers is None:
            return Vectors(self.split_by_port(x), {"y": self.answer(x)}, self.samples_name)
        # Answers come from the rows' text, so that a test also covers the encoding of columns.
        answers, rows = self.row_answers(len(x)), self.rows[:MOST_VECTORS]
        return Vectors(self.split_by_port(x), {"y": answers}, self.samples_name, rows)


def export(
    folder: Path,
    target: Path,
    wanted: Wanted,
    *,
    progress: Callable[[str], None] = lambda text: None,
    on_damage: Callable[[str], None] = checkpoints.warn,
) -> list[str]:
    """Export a run's or bundle's model, and return lines about it.

    `progress` is called with a description of each upcoming task. An earlier export in the target
    folder is replaced.

    Raises:
      RunError: there is no such run, it cannot be exported exactly, or the target contains other
        files.
    """
    replaced = deployment.check_place(target)
    make = _language_model if model_folders.kind_of(folder) == "lm" else _circuit
    files, manifest, lines, report = make(folder, wanted, progress, on_damage)
    deployment.write(target, files, manifest)
    if report is not None:
        place = target.absolute().with_name(f"{target.absolute().name}_report.json")
        place.write_text(report.to_json())
        lines = [*lines, *str(report).splitlines(), f"these figures are in {place}"]
    return [*lines, f"The export that was in {target} is replaced."] if replaced else lines


_Made = tuple[dict[str, tuple[str, bytes]], dict[str, Any], list[str], mcu.Report | None]
"""Files, manifest, lines about them, and microcontroller figures."""


def _circuit(
    folder: Path, wanted: Wanted, progress: Callable[[str], None], on_damage: Callable[[str], None]
) -> _Made:
    if wanted.integers:
        raise RunError(
            f"{folder} holds a model from {runs.COMMANDS[model_folders.kind_of(folder)]}, whose "
            "circuit has no integer tables. Omit --integers."
        )
    progress("making the circuit")
    source = source_of(
        folder, inputs=wanted.inputs, outputs=wanted.outputs, lut=wanted.lut, on_damage=on_damage
    )
    circuit = source.circuit
    is_small_rule = circuit.about["kind"] == "automaton" and circuit.n_inputs <= _TABULATED
    layers = source.layers() if wanted.target and source.layers is not None else None
    if wanted.optimize:
        progress("optimizing the circuit")
        circuit = optimize_circuit(circuit, wanted.optimize)
        layers = None if layers is None else optimize_circuit(layers, wanted.optimize)
    elif wanted.lut is None and is_small_rule:
        # Training finds some circuit for a rule, rarely the shortest.
        circuit = circuits.tabulate(circuit)
    progress("asking the model in JAX")
    vectors = source.vectors()
    options = wanted.options(source.name)
    request = deployment.Request(circuit, vectors, options, source.page, source.extras, layers)
    files = deployment.files_of(request, progress=progress)
    facts = {
        **deployment.facts_of(request),
        "choices": {"inputs": wanted.inputs, "outputs": wanted.outputs, "lut": wanted.lut},
        "optimized": wanted.optimize,
    }
    manifest = deployment.manifest_of("circuit", files, facts, source.run)
    lines = [f"{circuit!r}", *source.remarks, *deployment.summary(circuit, files)]
    if wanted.target is None:
        return files, manifest, lines, None
    samples = [vectors.inputs[port.name][: mcu.SAMPLES] for port in circuit.inputs]
    report = mcu.report(circuit, wanted.target, layers=layers, samples=samples, progress=progress)
    return files, manifest, lines, report


def _language_model(
    folder: Path, wanted: Wanted, progress: Callable[[str], None], on_damage: Callable[[str], None]
) -> _Made:
    from lutjax.training import integers

    if wanted.formats not in ((), ("c",)):
        raise RunError(
            f"{folder} holds a language model, whose only export format is c, not "
            f"{', '.join(wanted.formats)}."
        )
    for option in ("inputs", "outputs", "lut", "name", "registers", "optimize", "target"):
        if getattr(wanted, option):
            raise RunError(
                f"{folder} holds a language model, which has no option --{option}; leave it out."
            )
    tables = wanted.integers or "int16"
    program = integers.program_of(folder, tables=tables, progress=progress, on_damage=on_damage)
    files = {name: ("c", content) for name, content in program.files.items()}
    facts, run = {"facts": program.facts}, _facts(folder, "lm", program.steps)
    manifest = deployment.manifest_of("language model", files, facts, run)
    return files, manifest, [*program.remarks, *deployment.sizes(files)], None


_DEEP = "&get -n; &deepsyn -I 8 -J 50; &put"
"""Deep ABC search, reproducible because it stops after failed steps instead of a timeout."""

_TABULATED = 14
"""Maximum inputs for synthesis from an automaton's truth table; see `lutjax.circuits.tabulate`."""

_SMALL_INPUTS = 16
"""Maximum inputs for deep ABC searches, from the circuit and from its truth table."""

_SEEDS = 2  # resynthesis runs for circuits with few inputs, some 20 seconds each

OPTIMIZED = ("ands", "gates", "lut6")
"""Goals of `optimize_circuit`: minimize AND nodes, two-input gates of any kind, or 6-input LUTs."""


def optimize_circuit(circuit: Circuit, goal: str) -> Circuit:
    """Return a smaller equivalent circuit, for one of the goals `OPTIMIZED`.

    ABC minimizes AND nodes and tables; `lutjax.circuits.resynthesize` then optimizes circuits with
    few inputs, also for gates.

    Raises:
      RunError: ABC is needed and not installed, or a circuit has too many inputs for gates.
    """
    from lutjax.circuits import abc

    small = circuit.n_inputs <= MOST_INPUTS
    if goal == "gates":
        if not small:
            raise RunError(
                f"--optimize gates supports at most {MOST_INPUTS} inputs; this circuit has "
                f"{circuit.n_inputs}. Choose ands or lut6."
            )
        return _search_smallest(circuits.tabulate(circuit), goal)
    if abc.find() is None:
        raise RunError(f"--optimize {goal} needs ABC, which is not found: pip install pyosys")
    quick, end = (abc.SCRIPT, "") if goal == "ands" else ("strash", "; if -K 6 -a")
    candidates = [abc.optimize(circuit, quick + end)]
    if circuit.n_inputs <= _SMALL_INPUTS:
        for script in (f"{abc.SCRIPT}; {_DEEP}", f"collapse; sop; fx; strash; dc2; {_DEEP}"):
            try:
                candidates.append(abc.optimize(circuit, script + end))
            except RuntimeError:  # an ABC without this search, such as Debian's
                break
    best = min(candidates, key=len)
    return _search_smallest(best, goal) if small and goal == "ands" else best


def _search_smallest(circuit: Circuit, goal: str) -> Circuit:
    """Return the smallest circuit from successive searches, each from the previous result."""
    for seed in range(_SEEDS):
        circuit = circuits.resynthesize(circuit, goal, seed=seed)
    return circuit


def oracle(manifest: Mapping[str, Any], folder: Path | None = None) -> proofs.Oracle:
    """Return the model from a manifest's run or bundle, in `folder` if it has moved.

    Raises:
      SkippedError: the folder is missing, has changed since the export, or its model or samples
        cannot be read.
      FailedError: the manifest lacks the export options.
    """
    run = manifest["run"]
    if run is None:
        raise proofs.SkippedError("the export was made without a run")
    place = folder or Path(run["folder"])
    if not place.exists():
        raise proofs.SkippedError(f"the model is not in {place}; name its folder by --run")
    try:
        kind, digest = model_folders.kind_of(place), model_folders.digest_of(place)
        if (kind, digest) != (run["kind"], run["digest"]):
            raise proofs.SkippedError(
                f"the bundle {place} holds another model than the exported one"
                if is_bundle(place)
                else f"the latest checkpoint of {place} is not that of step {run['step']}"
            )
        source = source_of(place, **_choices(manifest), on_damage=lambda text: None)
    except (BundleError, CheckpointError, SamplesError) as error:
        raise proofs.SkippedError(f"the model in {place} cannot be read: {error}") from error
    except RunError as error:
        raise proofs.FailedError(f"the model has no such export: {error}") from error
    samples = list(source.split_by_port(source.samples).values())
    return proofs.Oracle(samples, lambda *x: [source.answer(np.concatenate(x, axis=1))])


def _choices(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `source_of` in a manifest; raise FailedError if it lacks them."""
    choices = manifest.get("choices")
    kinds = {"inputs": str, "outputs": str, "lut": int}
    if not isinstance(choices, dict) or set(choices) != set(kinds):
        raise proofs.FailedError(
            "the manifest does not say the choices of the export: inputs, outputs, lut"
        )
    for name, kind in kinds.items():
        if choices[name] is not None and type(choices[name]) is not kind:
            raise proofs.FailedError(f"the manifest: choices has {name} = {choices[name]!r}")
    return choices


def source_of(
    folder: Path,
    *,
    inputs: str | None = None,
    outputs: str | None = None,
    lut: int | None = None,
    on_damage: Callable[[str], None] = checkpoints.warn,
) -> Source:
    """Return the circuit for a model from ``train classify``, ``train ca`` or a bundle.

    A bundle without data of its own gets random samples from a fixed seed.

    Args:
      folder: bundle folder, or run folder, read at the latest checkpoint.
      inputs: see `lutjax.circuits.from_model`. Default: ``"rows"`` for table rows, with one port
        per column; ``"uint8"`` if samples are integers from 0 to 255; ``"bits"`` if samples are
        bits or missing. For tables a format applies to the numeric columns.
      outputs: see `lutjax.circuits.from_model`.
      lut: inputs of the target's lookup tables, 2 to 6; None for gates with up to three inputs.
      on_damage: see `lutjax.training.runs.read`.

    Raises:
      RunError: the model kind has no circuit; the circuit would not be exact; or the samples do not
        fit `inputs`.
      BundleError: the bundle is damaged.
    """
    kind = model_folders.kind_of(folder)
    tables = {} if lut is None else {"lut": lut}
    if kind == "lm":
        raise RunError(f"{folder} holds a language model, which is not a circuit of bits.")
    make = _automaton_source if kind == "ca" else _classifier_source
    return make(model_folders.read(folder, on_damage=on_damage), inputs, outputs, tables)


def _facts(folder: Path, kind: str, step: int) -> dict[str, Any]:
    return {
        "kind": kind,
        "folder": str(folder.absolute()),
        "step": step,
        "digest": model_folders.digest_of(folder),
    }


def _classifier_source(
    source_model: ModelFolder, inputs: str | None, outputs: str | None, tables: Mapping[str, int]
) -> Source:
    folder, model = source_model.folder, source_model.model
    _refuse_large(folder, model.config)
    form, packed = predictions.form_of(model), model.packed()
    if form.encoding is not None and inputs != "bits":
        return _rows_source(source_model, form, form.encoding, inputs, outputs, tables)
    experiment = _experiment(source_model)
    test = None if experiment is None else experiment.test
    remarks: tuple[str, ...] = ()
    # By default numbers, in a format of the test samples: without these its range is unknown.
    if inputs is None:
        of_numbers = model.config.n_thresholds and not getattr(model.config, "edges", False)
        inputs = _format_of(test) if of_numbers and test is not None else "bits"
        if of_numbers and test is None:
            remarks = (_READS_BITS,)
    about = _names(model.config, form, inputs, packed)
    circuit = circuit_of(folder, model, inputs=inputs, outputs=outputs, about=about, **tables)
    if test is None:
        x, source = generate_samples(packed, circuit.inputs[0], inputs)
        remarks = (_describe_vectors(source, len(x)), *remarks)
    else:
        source = f"the test part of {test.name}"
        x, remarks = _samples(test, inputs, packed)
    output_kind = outputs or ("votes" if form.regression else "class")

    def answer(numbers: Numbers) -> Numbers:
        return _answers(packed, numbers, bits=inputs == "bits", outputs=output_kind)

    return Source(
        name=name_of(folder, None if source_model.record is None else source_model.record.record),
        circuit=circuit,
        samples=x,
        samples_name=source,
        answer=answer,
        run=_facts(folder, source_model.kind, source_model.steps),
        page=_page(folder, model, test, x, inputs, circuit, about),
        remarks=remarks,
        extras={} if form.encoding is None else {COLUMNS: form.encoding.to_json().encode()},
        layers=lambda: circuit_of(folder, model, inputs="bits", outputs="bits"),
    )


def _rows_source(
    source_model: ModelFolder,
    form: Form,
    encoding: Encoding,
    inputs: str | None,
    outputs: str | None,
    tables: Mapping[str, int],
) -> Source:
    """Return a classifier's circuit with table rows as inputs.

    `inputs` is "rows", or the format of numeric columns.
    """
    folder, model = source_model.folder, source_model.model
    packed = model.packed()
    try:
        format = None if inputs in (None, "rows") else Format.parse(str(inputs))
        thresholds = None if packed.thresholds is None else np.asarray(packed.thresholds)
        ports = columns_of(encoding, thresholds, format)
    except ValueError as error:
        raise RunError(
            f"{folder} cannot be exported with inputs {inputs or 'rows'}: {error} Use --inputs "
            "bits to leave the comparisons outside."
        ) from error
    about = {
        **({} if form.regression else {"classes": list(form.classes)}),
        **({} if form.target is None else {"target": form.target}),
        "image": None,
        "input_names": [column.name for column in encoding.columns],
    }
    circuit = circuit_of(folder, model, inputs=ports, outputs=outputs, about=about, **tables)
    output_kind = outputs or ("votes" if form.regression else "class")
    experiment = _experiment(source_model)
    remarks: tuple[str, ...] = (_READS_ROWS,)
    if experiment is None or experiment.test_rows is None:
        table = table_of(encoding, ports.random_rows(MOST_VECTORS), name="random rows")
        source = "random rows from seed 0"
        remarks = (_describe_vectors(source, len(table)), *remarks)
    else:
        table, source = experiment.test_rows, f"the test part of {experiment.test.name}"
    rows, page = values_of(encoding, table), {}
    column_bits = {"column_bits": [list(b) for b in ports.bits]}
    if circuit.about.get("kind") == "classifier":
        page = {"circuit": circuit_of(folder, model, inputs=ports, outputs="votes", about=about)}

    def answer_table(table: Table) -> Numbers:
        return _answers(packed, encoding.encode(table), bits=False, outputs=output_kind)

    def answer(numbers: Numbers) -> Numbers:
        decoded = ports.decode(np.split(numbers, numbers.shape[1], axis=1))
        return answer_table(table_of(encoding, decoded, name="the rows"))

    return Source(
        name=name_of(folder, None if source_model.record is None else source_model.record.record),
        circuit=circuit,
        samples=np.concatenate(list(ports.encode(rows).values()), axis=1),
        samples_name=source,
        answer=answer,
        run=_facts(folder, source_model.kind, source_model.steps),
        page=page,
        remarks=remarks,
        layers=lambda: circuit_of(folder, model, inputs="bits", outputs="bits", about=column_bits),
        rows=rows,
        row_answers=lambda n: answer_table(table.rows(np.arange(n))),
    )


def _describe_vectors(source: str, n_samples: int) -> str:
    return (
        f"the bundle holds no samples: {deployment.VECTORS} has {source}, {n_samples:,}, "
        "with the answers of the model"
    )


_READS_BITS = (
    "the circuit reads bits: each is whether a number is above a threshold. "
    "--inputs, such as uint8 or fixed12.4, "
    "reads the numbers and puts the comparisons into the circuit"
)

_READS_ROWS = (
    "the circuit reads table rows, with one port per column; "
    "--inputs bits leaves their encoding outside"
)


def _experiment(source_model: ModelFolder) -> Classifier | None:
    """Return a classifier's run with its samples, or None without a sample source."""
    if source_model.record is None or not source_model.has_data:
        return None
    try:
        return Classifier.from_record(source_model.record.record)
    except SamplesError as error:
        raise CheckpointError(
            f"the data of {source_model.folder} cannot be used: {error}"
        ) from error


RANDOM = "random inputs from seed 0"  # sample source of an export without data
_ALL_INPUTS = 9  # maximum input bits for exhaustive samples in an export without data


def generate_samples(packed: Packed, port: Port, inputs: str) -> tuple[Numbers, str]:
    """Return samples for an export without data, and a description of their source.

    Samples are all inputs of few bits, random bits, or random numbers within each input's threshold
    range.
    """
    generator = np.random.default_rng(0)
    shape = (MOST_VECTORS, port.count)
    if inputs == "bits" or packed.thresholds is None:
        if port.count <= _ALL_INPUTS:
            return _all_bits(port.count), "all inputs"
        return generator.integers(0, 2, shape, dtype=np.uint8), RANDOM
    thresholds = np.asarray(packed.thresholds, np.float64)
    thresholds = np.where(np.isfinite(thresholds), thresholds, 0)  # inf: a constant bit
    # Image values are ordered by pixel, but thresholds by channel.
    of_input = np.arange(port.count) % len(thresholds)
    least, largest = thresholds.min(1)[of_input], thresholds.max(1)[of_input]
    unit = 2.0**-port.format.fraction
    margin = np.maximum((largest - least) / thresholds.shape[1], unit)
    x = generator.uniform(least - margin, largest + margin, shape)
    # Multiples of the format's unit, which the circuit reads without further rounding.
    return np.clip(np.round(x / unit) * unit, *port.format.range), RANDOM


def _all_bits(n: int) -> Numbers:
    return (np.arange(2**n)[:, None] >> np.arange(n) & 1).astype(np.uint8)


MOST_NAMES = 4096  # maximum number of input names in an export


def _names(config: classifier.Config, form: Form, inputs: str, packed: Packed) -> dict[str, Any]:
    about: dict[str, Any] = {} if form.regression else {"classes": list(form.classes)}
    shape = form.shape
    if len(shape) == 2 or (len(shape) == 3 and shape[2] == 1):
        return {**about, "image": list(shape[:2])}
    if inputs == "bits":
        thresholds = None if packed.thresholds is None else np.asarray(packed.thresholds)
        names = bit_names(config, form, thresholds, form.encoding)
    else:
        names = reports.bit_names(form, None, form.encoding)
    return {**about, "image": None, **({"input_names": names} if len(names) <= MOST_NAMES else {})}


COLUMNS = "columns.json"  # file name of the column encoding in a run and its export


def name_of(folder: Path, record: classifier.Record | None = None) -> str:
    """Return a file name for a classifier, from its folder, or from its data by default."""
    chosen = folder.absolute().name
    if record is not None and chosen == record.kind:  # the command's default folder
        path, chosen = record.samples.path, record.own_kind()
        if path is not None:
            chosen = Path(Path(path).name.removesuffix(".gz")).stem
    letters = unicodedata.normalize("NFKD", chosen)  # split an é into an e and its accent
    unaccented = "".join(c for c in letters if not unicodedata.combining(c))
    name = re.sub(r"[^A-Za-z0-9]+", "_", unaccented).strip("_")
    try:
        if f"{name}.json" not in (COLUMNS, deployment.VECTORS, deployment.MANIFEST):
            return deployment.Options(name=name).name
    except ValueError:  # not an identifier, or a keyword in Verilog or C
        pass
    return f"run_{name}".strip("_")


def _refuse_large(folder: Path, config: classifier.Config) -> None:
    if not isinstance(config, LogicTreeNetConfig) or config.n_gates_at_places <= MOST_GATES:
        return
    raise RunError(
        f"{folder} holds a network of {config.n_gates:,} trained gates, "
        f"{config.n_gates_at_places:,} over all image positions; circuits have at most "
        f"{MOST_GATES:,}. Train fewer trees (--kernels), larger pools (--pool) or narrower layers "
        "(--layers), run the packed network in JAX (lutjax.load(...).packed()), or build the "
        "circuit in a program, with about a kilobyte per gate (lutjax.load(...).circuit())."
    )


def _page(
    folder: Path,
    model: Any,
    test: Samples | None,
    x: Numbers,
    inputs: str,
    circuit: Circuit,
    about: dict[str, Any],
) -> dict[str, Any]:
    """Return page arguments for a classifier: sample images, and the votes for every class."""
    if inputs == "bits" or about["image"] is None:
        return {}
    votes = circuit_of(folder, model, inputs=inputs, outputs="votes", about=about)
    if test is None:
        return {"circuit": votes}
    firsts = [int(np.flatnonzero(test.y == label)[0]) for label in np.unique(test.y)]
    return {
        "circuit": votes,
        "examples": x[firsts],
        "labels": test.y[firsts].tolist(),
        "maximum": float(x.max()),
    }


def circuit_of(folder: Path, model: Any, **options: Any) -> Circuit:
    """Return the circuit for a run's model, or raise RunError; see `lutjax.circuits.from_model`."""
    try:
        return circuits.from_model(model, **options)
    except (TypeError, ValueError) as error:
        raise RunError(f"{folder} cannot be exported: {error}") from error


def _format_of(part: Samples) -> str:
    if (part.x == np.clip(np.floor(part.x), 0, 255)).all():
        return "uint8"
    raise RunError(
        f"the samples of {part.name} go from {part.x.min():g} to {part.x.max():g} and are not all "
        "integers from 0 to 255, but circuits have no floating-point numbers. Choose a "
        "fixed-point format by --inputs, such as fixed12.4 (12 bits, 4 after the point), or leave "
        "the comparisons outside by --inputs bits."
    )


def _samples(part: Samples, inputs: str, packed: Packed) -> tuple[np.ndarray, tuple[str, ...]]:
    """Return samples as bits or in a number format, and remarks."""
    if inputs == "bits":
        return _bits(packed, part.x), ()
    format = Format.parse(inputs)
    least, largest = format.range
    if part.x.min() < least or part.x.max() > largest:
        raise RunError(
            f"inputs is {inputs}, with a range of {least:g} to {largest:g}; the samples of "
            f"{part.name} go from {part.x.min():g} to {part.x.max():g}."
        )
    # In float64: float32 could not hold all numbers of a wide format.
    unit = 2.0**-format.fraction
    rounded = np.clip(np.round(part.x.astype(np.float64) / unit) * unit, least, largest)
    other = rounded != part.x
    if not other.any():
        return rounded, ()
    before, after = (
        (np.asarray(packed(_input_layout(packed, x))) == part.y).mean() for x in (part.x, rounded)
    )
    remark = (
        f"{other.sum():,} of {other.size:,} numbers of the test part are rounded to {inputs}: "
        f"{100 * before:.2f} % of it are right before, {100 * after:.2f} % after."
    )
    return rounded, (remark,)


def _input_layout(packed: Packed, x: Numbers) -> jax.Array:
    """Return samples in the packed network's input layout: images for trees."""
    shape = packed.config.in_shape if isinstance(packed, PackedTreeNet) else x.shape[1:]
    return jnp.asarray(x, jnp.float32).reshape(len(x), *shape)


def _bits(packed: Packed, x: Numbers) -> np.ndarray:
    return np.asarray(packed.first_bits(_input_layout(packed, x)), np.uint8)


def _answers(packed: Packed, x: Numbers, *, bits: bool, outputs: str) -> np.ndarray:
    if outputs == "class" and not bits:
        return np.asarray(packed(_input_layout(packed, x)))[:, None]
    first = jnp.asarray(x if bits else _bits(packed, x), bool)
    if outputs == "votes":
        return np.asarray(votes_of(packed, first), np.int64)
    # Packed words hold the bits of 32 samples, so the last word may have samples too many.
    words = lutjax.pack_bits(first.T)
    if outputs == "class":
        return np.asarray(jax.jit(type(packed).from_words)(packed, words))[: len(x), None]
    last_words = jax.jit(type(packed).last_words)(packed, words)
    answers: np.ndarray = np.asarray(lutjax.unpack_bits(last_words, len(x)), np.int64).T
    return answers


def _automaton_source(
    source_model: ModelFolder, inputs: str | None, outputs: str | None, tables: Mapping[str, int]
) -> Source:
    folder, model = source_model.folder, source_model.model
    record = None if source_model.record is None else source_model.record.record
    channels = model.config.channels
    circuit = circuit_of(folder, model, inputs=inputs or "bits", outputs=outputs, **tables)
    n_bits = 9 * channels
    if n_bits <= _ALL_INPUTS:
        x = _all_bits(n_bits)
        name = "all neighborhoods"
    else:
        x = np.random.default_rng(0).integers(0, 2, (MOST_VECTORS, n_bits), dtype=np.uint8)
        name = "random neighborhoods"

    def answer(numbers: Numbers) -> Numbers:
        return _next_states(model, numbers)

    remarks: tuple[str, ...] = ()
    # Trained without a target, an automaton of one channel learns the Game of Life.
    if channels == 1 and (record is None or record.target is None):
        wrong = int((answer(x) != proofs.life(x)).sum())
        if wrong and record is not None:
            remark = f"{wrong} of {len(x)} neighborhoods are wrong."
            remarks = (f"the automaton is not the Game of Life: {remark}",)
        elif not wrong:
            circuit = dataclasses.replace(circuit, about={**circuit.about, "rule": "life"})
    return Source(
        name="automaton",
        circuit=circuit,
        samples=x,
        samples_name=name,
        answer=answer,
        run=_facts(folder, "ca", source_model.steps),
        page={} if record is None else automaton.grid(record),
        remarks=remarks,
    )


def _next_states(model: LogicCA, x: Numbers) -> np.ndarray:
    """Return the next cells for 3x3 neighborhoods: neighbors row by row, then the cell."""
    places = [(r, c) for r in range(3) for c in range(3) if (r, c) != (1, 1)] + [(1, 1)]
    grids = np.zeros((len(x), 3, 3, model.config.channels), bool)
    for (r, c), bits in zip(places, np.split(np.asarray(x, bool), 9, axis=1), strict=True):
        grids[:, r, c] = bits
    after = model(jnp.asarray(grids), 1, deterministic=True)
    return np.asarray(after)[:, 1, 1].astype(np.uint8)
