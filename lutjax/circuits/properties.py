"""Proofs of circuit properties: robustness, monotonicity, and independence of an input.

Each property becomes a circuit that outputs 1 on a violation. Either ABC proves this output
constant, or all inputs near a sample are evaluated. A counterexample is evaluated again by the
given circuit before it is returned.
"""

import dataclasses
import functools
import itertools
import math
import re
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lutjax.circuits import _netlists, abc, aiger, arithmetic, columns, deployment, netlist_json
from lutjax.circuits.builder import ONE, ZERO, Builder, Literal
from lutjax.circuits.circuit import Circuit, columns_of, walk_literals
from lutjax.circuits.deployment import DeploymentError, Vectors
from lutjax.circuits.ports import Port, bit_ranges
from lutjax.files.messages import in_a_line
from lutjax.files.strict_json import format_names, format_value

METHODS = ("evaluation", "abc")
STATUSES = ("proved", "refuted", "undecided")

MOST_WORK = 1 << 36
"""Maximum gates times inputs for evaluating every input near a sample, some ten seconds."""

_MODEL = "model.txt"  # satisfying inputs, written by ABC
_AT_ONCE = 1 << 16  # evaluated inputs per batch


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Result of a proof.

    Attributes:
      claim: the property in words.
      status: ``"proved"``, ``"refuted"``, or ``"undecided"`` after the time limit.
      detail: the proof method, or the reason why there is no proof.
      seconds: duration.
      samples: two samples with different answers that violate the property, each with the values
        of every input port by name; empty unless refuted.
      answers: the class or number of each sample.

    Example:
      >>> from lutjax.circuits.properties import Verdict
      >>> print(Verdict("y is independent of race", "proved", "ABC", 0.25))
      proved     y is independent of race                                 ABC                             0.2 s
    """

    claim: str
    status: str
    detail: str
    seconds: float
    samples: tuple[Mapping[str, np.ndarray], ...] = ()
    answers: tuple[float | int, ...] = ()

    def __bool__(self) -> bool:
        return self.status == "proved"

    def __str__(self) -> str:
        return f"{self.status:<10} {self.claim:<56} {self.detail:<30} {self.seconds:>5.1f} s"


def prove_robustness(
    circuit: Circuit,
    sample: Mapping[str, Any],
    flips: int,
    *,
    method: str | None = None,
    seconds: float | int = 60,
) -> Verdict:
    """Prove that no flip of at most `flips` input bits changes the answer to a sample.

    The answer is the class, or all outputs of a circuit without classes or votes.

    Args:
      circuit: any circuit.
      sample: values for each input port by name.
      flips: maximum number of flipped bits, at least 1.
      method: ``"evaluation"`` evaluates every such input, ``"abc"`` uses ABC. Default: evaluation
        for at most `MOST_WORK`, else ABC.
      seconds: time limit.

    Raises:
      ValueError: the sample does not fit the ports, or another argument is invalid.
      RuntimeError: ABC is needed and not installed.

    Example:
      >>> from lutjax.circuits import Circuit, Port, properties
      >>> majority = Circuit((Port("x", 3),), (Port("y"),), ((1, 2, 3),), (0b11101000,), (2 * 4,))
      >>> properties.prove_robustness(majority, {"x": [1, 1, 1]}, 1).status
      'proved'
      >>> found = properties.prove_robustness(majority, {"x": [1, 1, 1]}, 2)
      >>> found.status, found.answers
      ('refuted', (1, 0))
    """
    if type(flips) is not int or flips < 1:
        raise ValueError(
            f"prove_robustness: flips is {flips!r}; it must be a whole number of at least 1."
        )
    if method is not None and method not in METHODS:
        raise ValueError(
            f"prove_robustness: method is {method!r}; expected {', '.join(METHODS)} or None."
        )
    _check_seconds("prove_robustness", seconds)
    question = _Question("prove_robustness", circuit)
    bits = question.bits_of(sample)
    flips = min(flips, circuit.n_inputs)
    count = sum(math.comb(circuit.n_inputs, k) for k in range(1, flips + 1))
    small = count * max(1, len(circuit)) <= MOST_WORK
    claim = f"no {flips} flip{'s change' if flips > 1 else ' changes'} {question.name(bits)}"
    start = time.perf_counter()
    if method == "evaluation" or (method is None and small):
        status, counterexample, n_evaluated = _evaluate_flips(
            circuit, question, bits, flips, start + seconds
        )
        detail = f"all {count:,} inputs"
        if status == "undecided":
            detail = f"{n_evaluated:,} of {count:,} inputs"
        if counterexample is not None:
            detail = "evaluation"
    else:
        violation = _flip_circuit(circuit, question, bits, flips)
        status, flipped, detail = _ask_abc(violation, seconds)
        counterexample = None if flipped is None else bits ^ flipped
    if counterexample is None:
        return question.verdict(claim, status, detail, start, None)
    n_flipped = (counterexample != bits).sum()
    if n_flipped > flips:
        raise RuntimeError(f"prove_robustness: ABC flipped {n_flipped} bits instead of {flips}.")
    return question.verdict(claim, status, detail, start, (bits, counterexample))


def prove_monotonicity(
    circuit: Circuit,
    column: str,
    *,
    decreasing: bool = False,
    in_range: bool = False,
    seconds: float | int = 60,
) -> Verdict:
    """Prove that a larger value of one input never lowers the answer.

    The answer is the class index, or the output number in regression. Missing numbers are excluded.

    Args:
      circuit: circuit with a class, votes for each class, or one number as output.
      column: name of a numeric table column, an input in ``about["input_names"]``, a port, or a
        port element such as ``x[3]``.
      decreasing: whether to prove that a larger value never raises the answer.
      in_range: whether to consider only table rows with known categories, and numbers in the
        training range; missing cells are included.
      seconds: time limit.

    Raises:
      ValueError: no such input, a categorical column, or an output without order.
      RuntimeError: ABC is not installed.

    Example:
      >>> from lutjax.circuits import Circuit, Port, properties
      >>> either = Circuit((Port("x", 2),), (Port("y"),), ((1, 2),), (0b1110,), (2 * 3,))
      >>> properties.prove_monotonicity(either, "x[0]").status  # doctest: +SKIP
      'proved'
    """
    where = "prove_monotonicity"
    _check_seconds(where, seconds)
    question = _Question(where, circuit)
    chosen = check_column(where, circuit, column, ordered=True)
    verb = "raises" if decreasing else "lowers"
    claim = f"more {column} never {verb} {question.output}"
    start = time.perf_counter()
    pair = _Pair(circuit, question, chosen, in_range)
    builder, (first, second) = pair.builder, pair.values
    wrong = [_greater_equal(builder, second, first, chosen.port.format.signed)]
    larger, smaller = pair.answers if decreasing else pair.answers[::-1]
    wrong.append(_greater_equal(builder, larger, smaller, question.signed) ^ 1)
    # A missing number is neither more nor less than another.
    if isinstance(chosen.column, columns.Number) and chosen.column.missing:
        code = chosen.column.missing_code % (1 << chosen.port.format.bits)
        wrong += [arithmetic.equal_to_constant(builder, bits, code) ^ 1 for bits in (first, second)]
    result = pair.ask(_all_of(builder, wrong), seconds)
    if result.inputs is not None:
        numbers, values = [], []
        for bits in result.inputs:
            elements = question.samples(bits)[chosen.port.name].ravel()
            numbers.append(elements[chosen.element])
            values.append(question.answer(bits))
        violates = values[0] < values[1] if decreasing else values[0] > values[1]
        _check_counterexample(where, bool(numbers[0] < numbers[1] and violates))
    return question.verdict(claim, result.status, result.detail, start, result.inputs)


def prove_independence(
    circuit: Circuit, column: str, *, in_range: bool = False, seconds: float | int = 60
) -> Verdict:
    """Prove that the answer does not depend on one input.

    Args:
      circuit: any circuit; see `prove_robustness`.
      column: see `prove_monotonicity`; categorical columns are supported.
      in_range: see `prove_monotonicity`.
      seconds: time limit.

    Raises:
      ValueError: no such input.
      RuntimeError: ABC is needed and not installed.

    Example:
      >>> from lutjax.circuits import Circuit, Port, properties
      >>> first = Circuit((Port("x", 2),), (Port("y"),), (), (), (2,))
      >>> properties.prove_independence(first, "x[1]").detail
      'no path to an output'
    """
    where = "prove_independence"
    _check_seconds(where, seconds)
    question = _Question(where, circuit)
    chosen = _input_of(where, circuit, column)
    claim = f"{question.output} is independent of {column}"
    start = time.perf_counter()
    pair = _Pair(circuit, question, chosen, in_range)
    different = [pair.builder.gate([a, b], 0b0110) for a, b in zip(*pair.answers, strict=True)]
    wrong = _all_of(pair.builder, [literal ^ 1 for literal in different]) ^ 1
    # Needs no proof: simplification found both answers equal.
    if wrong == ZERO:
        return question.verdict(claim, "proved", "no path to an output", start, None)
    result = pair.ask(wrong, seconds)
    if result.inputs is not None:
        same = np.ones(circuit.n_inputs, bool)
        same[chosen.bits] = False
        first, second = result.inputs
        good = (first == second)[same].all() and question.answer(first) != question.answer(second)
        _check_counterexample(where, bool(good))
    return question.verdict(claim, result.status, result.detail, start, result.inputs)


def read_export(folder: Path) -> tuple[Circuit, Vectors, str]:
    """Return the circuit of an export, its samples, and the name of the circuit file.

    The circuit comes from the binary AIGER file if there is one, else from JSON, which also states
    the table columns and classes.

    Raises:
      DeploymentError: the folder is no circuit export, or its files do not fit each other.
    """
    manifest = deployment.read_manifest(folder)
    if manifest["kind"] != "circuit":
        raise DeploymentError(
            f"{folder} holds a {manifest['kind']}; properties are proved of circuits."
        )
    name = str(manifest["name"])
    try:
        circuit = netlist_json.read((folder / f"{name}.json").read_bytes())
        vectors = Vectors.from_json((folder / deployment.VECTORS).read_bytes())
        vectors.check(circuit)
        file = folder / f"{name}.aig"
        if not file.exists():
            return circuit, vectors, f"{name}.json"
        netlist = aiger.read(file.read_bytes())
    except ValueError as error:
        raise DeploymentError(f"{folder} is damaged: {error} Export it again.") from error
    if (netlist.inputs, netlist.outputs) != (circuit.inputs, circuit.outputs):
        raise DeploymentError(f"{folder} is damaged: {file.name} has other ports than {name}.json.")
    # AIGER files have no facts, and other gates than the JSON form, whose counts do not fit.
    about = {fact: value for fact, value in circuit.about.items() if fact != "vote_gates"}
    return dataclasses.replace(netlist, about=about), vectors, file.name


def describe(circuit: Circuit, verdict: Verdict) -> list[str]:
    """Return lines about a counterexample: changed inputs, both answers, and the first sample."""
    if not verdict.samples:
        return []
    taken, classes = columns_of(circuit), circuit.about.get("classes")
    rows: list[list[Any]] = []
    for sample in verdict.samples:
        values = [sample[port.name] for port in circuit.inputs]
        if taken is not None:
            rows += taken.decode([value.reshape(1, 1) for value in values])
        else:
            rows.append(np.concatenate([value.ravel() for value in values]).tolist())
    names = _element_names(circuit)
    pairs = zip(names, *rows, strict=True)
    changed = [f"{name} {_word(a)} -> {_word(b)}" for name, a, b in pairs if a != b]
    answers = [classes[int(k)] if classes else f"{k:g}" for k in verdict.answers]
    whole = ", ".join(f"{name} {_word(a)}" for name, a in zip(names, rows[0], strict=True))
    if taken is None:
        whole = ",".join(_word(a) for a in rows[0])
    what = ", ".join(changed) or "codes with the same meaning"
    return [f"  {what}: answer {answers[0]} -> {answers[1]}", f"  from {whole}"]


def _word(value: Any) -> str:
    if value is None:
        return "missing"
    return f"{value:g}" if isinstance(value, float) else f"{value}"


# ---------------------------------------------------------------------------------------- questions
class _Question:
    """A circuit and the answer that a property is about, in literals and in NumPy."""

    def __init__(self, where: str, circuit: Circuit):
        self.where, self.circuit = where, circuit
        if not circuit.n_inputs or not circuit.n_outputs:
            raise ValueError(f"{where}: the circuit is {circuit!r}; expected inputs and outputs.")
        port, about = circuit.outputs[0], circuit.about
        # One bit for each class is a vote as well.
        has_classes = port.count > 1 and about.get("n_classes") == port.count
        self.votes = len(circuit.outputs) == 1 and has_classes
        self.output = "the class" if self.votes or about.get("kind") == "classifier" else port.name
        self.signed = not self.votes and port.format.signed

    def check_order(self) -> None:
        ports = self.circuit.outputs
        if not self.votes and (len(ports) > 1 or ports[0].count > 1):
            raise ValueError(
                f"{self.where}: the outputs are {self.circuit!r}; expected a class or one number. "
                "Export with --outputs class."
            )

    def bits_of(self, sample: Mapping[str, Any]) -> np.ndarray:
        ports = self.circuit.inputs
        if set(sample) != {port.name for port in ports}:
            raise ValueError(
                f"{self.where}: sample has {sorted(sample)}; expected {[p.name for p in ports]}."
            )
        values = []
        for port in ports:
            numbers = np.asarray(sample[port.name]).reshape(-1)
            if len(numbers) != port.count:
                raise ValueError(
                    f"{self.where}: {port.name} has {len(numbers)} values; expected {port.count}."
                )
            values.append(numbers[None] if port.count > 1 else numbers)
        words, _ = self.circuit.encode(*values)
        return (words[:, 0] & np.uint64(1)).astype(np.uint8)

    def samples(self, bits: np.ndarray) -> dict[str, np.ndarray]:
        values = {}
        for port, own in bit_ranges(self.circuit.inputs):
            elements = bits[own].reshape(port.count, -1).astype(np.uint64)
            codes = (elements << np.arange(port.format.bits, dtype=np.uint64)).sum(1)
            values[port.name] = port.format.decode(codes.astype(np.uint64))
        return values

    def answers(self, words: np.ndarray, n: int) -> np.ndarray:
        numbers = self.circuit.decode(self.circuit.evaluate(words), n)
        if self.votes:
            return np.asarray(numbers.argmax(1))
        if isinstance(numbers, tuple):
            return np.concatenate([values.reshape(n, -1) for values in numbers], axis=1)
        return np.asarray(numbers)

    def answer(self, bits: np.ndarray) -> Any:
        answer = self.answers(bits.astype(np.uint64)[:, None], 1)[0]
        return tuple(answer.tolist()) if np.ndim(answer) else answer.item()

    def name(self, bits: np.ndarray) -> str:
        answer, classes = self.answer(bits), self.circuit.about.get("classes")
        if self.output == "the class":
            return f"class {classes[answer] if classes else answer}"
        return f"answer {answer}"

    def literals(self, builder: Builder, bits: Sequence[Literal]) -> list[Literal]:
        """Return the literals of the answer, lowest bit first, given the input literals."""
        outputs = walk_literals(self.circuit, [ZERO, *bits], builder.gate)
        if not self.votes:
            return outputs
        size = self.circuit.outputs[0].format.bits
        votes = [outputs[k : k + size] for k in range(0, len(outputs), size)]
        return arithmetic.argmax(builder, votes)

    def verdict(
        self,
        claim: str,
        status: str,
        detail: str,
        start: float,
        pair: tuple[np.ndarray, np.ndarray] | None,
    ) -> Verdict:
        seconds = time.perf_counter() - start
        if pair is None:
            return Verdict(claim, status, detail, seconds)
        # Evaluated again, so that no error of a tool is shown as a counterexample.
        answers = [self.answer(bits) for bits in pair]
        _check_counterexample(self.where, answers[0] != answers[1])
        samples = tuple(map(self.samples, pair))
        return Verdict(claim, status, detail, seconds, samples, tuple(answers))


def _check_counterexample(where: str, good: bool) -> None:
    if not good:
        raise RuntimeError(f"{where}: the counterexample of ABC does not violate the property.")


def _check_seconds(where: str, seconds: float | int) -> None:
    if not 0 < seconds < math.inf:
        raise ValueError(f"{where}: seconds is {seconds!r}; it must be positive and finite.")


@dataclasses.dataclass(frozen=True)
class _Input:
    port: Port
    element: int
    bits: list[int]  # among all input bits
    column: columns.Column | None = None


def _input_of(where: str, circuit: Circuit, name: str) -> _Input:
    elements = [
        _Input(port, k, [*own[k * port.format.bits : (k + 1) * port.format.bits]])
        for port, own in bit_ranges(circuit.inputs)
        for k in range(port.count)
    ]
    names = _element_names(circuit)
    taken = columns_of(circuit)
    if taken is not None:
        with_columns = zip(elements, taken.columns, strict=True)
        elements = [dataclasses.replace(one, column=column) for one, column in with_columns]
    ports = [
        one.port.name if one.port.count == 1 else f"{one.port.name}[{one.element}]"
        for one in elements
    ]
    # Names of columns come first: a column may have the name of another port.
    for known in (names, ports):
        if name in known:
            return elements[known.index(name)]
    raise ValueError(
        f"{where}: column is {format_value(name)}; the inputs are {format_names(names, 300)}."
    )


def check_column(where: str, circuit: Circuit, column: str, *, ordered: bool) -> _Input:
    """Return an input, which must exist, and with `ordered`, have an order as the answers do."""
    chosen = _input_of(where, circuit, column)
    if ordered:
        _Question(where, circuit).check_order()
    if ordered and isinstance(chosen.column, columns.Category):
        raise ValueError(f"{where}: column {column!r} has categories, which have no order.")
    return chosen


def _element_names(circuit: Circuit) -> list[str]:
    taken = columns_of(circuit)
    if taken is not None:
        return [column.name for column in taken.columns]
    named = circuit.about.get("input_names")
    if named:
        return list(named)
    return [
        port.name if port.count == 1 else f"{port.name}[{k}]"
        for port in circuit.inputs
        for k in range(port.count)
    ]


# --------------------------------------------------------------------------------------- two copies
@dataclasses.dataclass(frozen=True)
class _Result:
    status: str
    detail: str
    inputs: tuple[np.ndarray, np.ndarray] | None


def _in_range(builder: Builder, circuit: Circuit, bits: Sequence[Literal]) -> list[Literal]:
    """Return literals that are 1 for columns in their training range or of known categories."""
    taken = columns_of(circuit)
    if taken is None:
        return []
    in_range: list[Literal] = []
    for (port, own), column in zip(bit_ranges(circuit.inputs), taken.columns, strict=True):
        number, signed = [bits[k] for k in own], port.format.signed
        above = functools.partial(arithmetic.above_constant, builder, number, signed=signed)
        if isinstance(column, columns.Category):
            known = above(len(column.values) - 1) ^ 1
        elif column.least is None or column.largest is None:
            continue
        else:
            least, largest = map(column.encode_integer, (column.least, column.largest))
            known = builder.gate([above(least - 1), above(largest) ^ 1], 0b1000)
        if column.missing:
            code = column.missing_code % (1 << port.format.bits)
            absent = arithmetic.equal_to_constant(builder, number, code)
            known = builder.gate([known, absent], 0b1110)
        in_range.append(known)
    return in_range


class _Pair:
    """Two copies of a circuit that share every input but one."""

    def __init__(self, circuit: Circuit, question: _Question, chosen: _Input, in_range: bool):
        self.circuit, self.chosen = circuit, chosen
        self.builder = Builder(merge=2)
        self.shared = [bit for (bit,) in self.builder.input("x", circuit.n_inputs)]
        other = [bit for (bit,) in self.builder.input("other", len(chosen.bits))]
        second = list(self.shared)
        for place, bit in zip(chosen.bits, other, strict=True):
            second[place] = bit
        self.values = [self.shared[k] for k in chosen.bits], other
        self.answers = [question.literals(self.builder, bits) for bits in (self.shared, second)]
        self.required: list[Literal] = []
        if in_range:
            for bits in (self.shared, second):
                self.required += _in_range(self.builder, circuit, bits)

    def ask(self, wrong: Literal, seconds: float | int) -> _Result:
        wrong = _all_of(self.builder, [wrong, *self.required])
        status, bits, detail = _ask_abc(_output(self.builder, wrong), seconds)
        if bits is None:
            return _Result(status, detail, None)
        n = self.circuit.n_inputs
        first, second = bits[:n], bits[:n].copy()
        second[self.chosen.bits] = bits[n:]
        return _Result(status, detail, (first, second))


def _greater_equal(
    builder: Builder, a: Sequence[Literal], b: Sequence[Literal], signed: bool
) -> Literal:
    """Compare numbers of equal width: a >= b."""
    # An inverted sign bit orders two's complement numbers as unsigned ones.
    if signed:
        a, b = ([*bits[:-1], bits[-1] ^ 1] for bits in (a, b))
    return arithmetic.greater_equal(builder, a, b)


def _all_of(builder: Builder, literals: Sequence[Literal]) -> Literal:
    conjunction = ONE
    for literal in literals:
        conjunction = builder.gate([conjunction, literal], 0b1000)
    return conjunction


def _output(builder: Builder, literal: Literal) -> Circuit:
    builder.output("wrong", [[literal]])
    return builder.circuit()


def _ask_abc(violation: Circuit, seconds: float | int) -> tuple[str, np.ndarray | None, str]:
    """Prove an output constant 0, or return input bits with output 1; and describe the proof."""
    # Builders simplify, which decides some properties without a tool.
    if violation.literals == (ZERO,):
        return "proved", None, "simplification"
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "a.aig").write_bytes(aiger.write(violation))
        try:
            commands = f"read a.aig; strash; iprove; write_cex -n {_MODEL}"
            text = abc.run(commands, folder, seconds=seconds)
        except TimeoutError:
            return "undecided", None, f"no proof in {seconds:g} s"
        if "UNSATISFIABLE" in text:
            return "proved", None, "ABC"
        path = Path(folder, _MODEL)
        if "SATISFIABLE" not in text or not path.is_file():
            return "undecided", None, f"ABC: {in_a_line(text.strip()[-300:], 60)}"
        # With one time frame, some versions write x[3]@0=1 instead of x[3]=1.
        bits = dict(re.findall(r"(\S+?)(?:@0)?=([01])", path.read_text()))
    # ABC leaves out the inputs that do not matter.
    inputs = [int(bits.get(name, 0)) for name in _netlists.bit_names(violation.inputs)]
    return "refuted", np.array(inputs, np.uint8), "ABC"


# -------------------------------------------------------------------------------------------- flips
def _flip_circuit(circuit: Circuit, question: _Question, bits: np.ndarray, flips: int) -> Circuit:
    """Return a circuit from flips to 1 if they are few and change the answer."""
    builder = Builder(merge=2)
    flipped = [bit for (bit,) in builder.input("flip", circuit.n_inputs)]
    inputs = [literal ^ int(bit) for literal, bit in zip(flipped, bits, strict=True)]
    answer = question.literals(builder, inputs)
    # Constant inputs make the answer to the sample constant.
    expected = question.literals(Builder(), [int(bit) for bit in bits])
    same = _all_of(builder, [a ^ b ^ 1 for a, b in zip(answer, expected, strict=True)])
    # Literal k: at least k of the flips so far.
    reached = [ONE] + [ZERO] * (flips + 1)
    for literal in flipped:
        steps = itertools.pairwise(reached)
        reached = [ONE] + [
            builder.gate([more, fewer, literal], 0b11101010) for fewer, more in steps
        ]
    return _output(builder, _all_of(builder, [same ^ 1, reached[-1] ^ 1]))


def _evaluate_flips(
    circuit: Circuit, question: _Question, bits: np.ndarray, flips: int, end: float
) -> tuple[str, np.ndarray | None, int]:
    """Evaluate inputs within `flips`, nearest first; return status, bits and their number."""
    expected, done = question.answer(bits), 0
    # A sample fills a bit of each word, so 64 samples are evaluated at once.
    base = bits.astype(np.uint64)[:, None] * np.uint64(2**64 - 1)
    for places in _flip_sets(circuit.n_inputs, flips):
        if time.perf_counter() > end:
            return "undecided", None, done
        n = len(places)
        changed = np.zeros((circuit.n_inputs, -(-n // 64) * 64), np.uint8)
        changed[places, np.arange(n)[:, None]] = 1
        words = np.packbits(changed, axis=1, bitorder="little").view("<u8").astype(np.uint64)
        answers = question.answers(words ^ base, n)
        wrong = (answers != np.asarray(expected)).reshape(n, -1).any(1)
        if wrong.any():
            return "refuted", bits ^ changed[:, wrong.argmax()], done
        done += n
    return "proved", None, done


def _flip_sets(n_inputs: int, flips: int) -> Iterator[np.ndarray]:
    # At most 64 MB of flags.
    at_once = max(64, min(_AT_ONCE, (1 << 26) // n_inputs))
    for size in range(1, flips + 1):
        sets = itertools.combinations(range(n_inputs), size)
        while True:
            places = itertools.chain.from_iterable(itertools.islice(sets, at_once))
            flat = np.fromiter(places, np.int64)
            if not len(flat):
                break
                break
            yield flat.reshape(-1, size)
