"""A self-contained HTML page that runs a circuit."""

import base64
import dataclasses
import html
import json
import re
import subprocess
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Int, Shaped, UInt32

from lutjax.circuits import _netlists, _templates, truth
from lutjax.circuits._about import STARTS
from lutjax.circuits.circuit import Circuit, columns_of, gate_counts, gates_in_words
from lutjax.circuits.columns import Value
from lutjax.circuits.ports import Format, Port, whole_range
from lutjax.files import strict_json
from lutjax.files.strict_json import Fields, format_value

_CELLS_OF_A_SIDE = 64
_BITS_OF_A_NUMBER = 53  # the integers that JavaScript computes exactly
_NAMED = 12
"""Maximum classes named above the circuit."""


def _error(text: str) -> ValueError:
    return ValueError(f"page.write: {text}")


def write(
    circuit: Circuit,
    title: str | None = None,
    *,
    examples: Shaped[np.ndarray, "examples features"] | None = None,
    labels: Sequence[int] | Int[np.ndarray, " examples"] | None = None,
    classes: Sequence[str] | None = None,
    maximum: float | int | None = None,
    size: tuple[int, int] | None = None,
    start: str | Bool[np.ndarray, "height width channels"] | None = None,
    shown: int | None = None,
    update_rate: float | int | None = None,
    exported: Circuit | None = None,
    rows: Sequence[Sequence[Value]] | None = None,
) -> str:
    """Return a page that runs the circuit in a browser, offline and without other files.

    The page depends on the circuit:

    * An image classifier has a drawing area.
    * An automaton runs, and clicks damage its cells.
    * A circuit with table rows has a field for each column.
    * Any other circuit has bit switches.

    `Circuit.about` describes the circuit. ``kind`` is ``"classifier"``, with ``n_classes``,
    ``classes``, ``input_names`` and ``image`` (height and width; without them inputs are not
    images), or ``"automaton"``, with ``channels`` and ``periodic``. An image classifier has one
    input port, with an element for each pixel.

    A classifier shows votes from a port with one element per class, and the class from a port with
    one element. Without a class port, the class is the first with the most votes.

    Args:
      circuit: the circuit.
      title: page heading.
      examples: clickable images in the input format.
      labels: class of each example.
      classes: class names; default: from `Circuit.about`, or class numbers.
      maximum: value of a fully drawn pixel; default: the maximum of the examples, or of the
        format.
      size: height and width of the automaton grid; default: from `start`, or 64 x 64.
      start: initial automaton state: ``"sparse"`` (3 of 10 cells, in the first channel),
        ``"random"`` (half of all bits), ``"seed"`` (all channels in the center cell), ``"empty"``,
        or bits. Default: ``start`` in `Circuit.about`, or sparse.
      shown: initially displayed automaton channels: 1, or 3 as red, green and blue.
      update_rate: probability that an automaton cell updates in a step. Default: 1.
      exported: circuit in the other export files, whose gates the page also counts. Default:
        `circuit`.
      rows: example table rows, see `lutjax.circuits.columns.Columns.encode`. The page starts with
        the first one.

    Raises:
      ValueError: an argument does not fit the circuit or its kind.

    Example:
      >>> from lutjax.circuits import Builder, page
      >>> builder = Builder()
      >>> (a,), (b,) = builder.input("x", 2)
      >>> builder.output("y", [[builder.gate((a, b), 0b0110)]])
      >>> text = page.write(builder.circuit(), title="Exclusive or")
      >>> text.startswith("<!doctype html>"), "Exclusive or</h1>" in text
      (True, True)
    """
    kind = _kind(circuit)
    images = {"examples": examples, "labels": labels, "classes": classes, "maximum": maximum}
    options: dict[str, dict[str, Any]] = {
        "classifier": images,
        "automaton": {"size": size, "start": start, "shown": shown, "update_rate": update_rate},
        "rows": {"rows": rows},
    }
    owners = ("classifiers of images", "automata", "circuits that take rows of a table")
    for (owner, arguments), whom in zip(options.items(), owners, strict=True):
        for name, value in arguments.items():
            if value is not None and owner != kind:
                raise _error(
                    f"{name} is given, which is for {whom}; "
                    f"by its `about` this circuit is shown as kind {kind!r}. "
                    f"Leave {name} out, or give the circuit an `about` that says what it is, "
                    "such as {'image': [8, 8]}."
                )
    data: dict[str, Any] = {
        "kind": kind,
        "inputs": interface(circuit.inputs),
        "outputs": interface(circuit.outputs),
        "literals": list(circuit.literals),
        "parts": [list(part) for part in circuit.parts],
        "about": dict(circuit.about),
        "gates": encode_gates(circuit),
    }
    if kind == "classifier":
        data |= _classifier(circuit, examples, labels, classes, maximum)
    elif kind == "rows":
        # Encoding validates the rows.
        if columns := columns_of(circuit):
            columns.encode(rows or ())
        data["rows"] = [list(row) for row in rows or ()]
    elif kind == "automaton":
        data |= _automaton(circuit, size, start, shown, update_rate)
    default_title = {
        "classifier": "A circuit that reads images",
        "automaton": "A circuit as a cellular automaton",
        "rows": f"A circuit that predicts {circuit.about.get('target') or 'from rows of a table'}",
    }
    # Only pages of rows encode their inputs.
    encode = ""
    if kind == "rows":
        encode = f'\n<script id="encode">\n{_templates.text("encode.js").strip()}\n</script>'
    text = {
        "title": html.escape(default_title.get(kind, "A circuit") if title is None else title),
        "lead": _lead(kind, circuit, data.get("update_rate", 1), exported or circuit),
        "gates": _gates(kind, circuit, exported or circuit),
        # Inside a script element, only "<" could end it or start a comment.
        "data": json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"),
        "encode": encode,
        "body": _templates.text(f"{kind}.html").strip(),
        "script": _templates.text(f"{kind}.js").strip(),
    }
    # One pass over the template, so that nothing in a title or in the data is taken for a name.
    return re.sub(
        r"{{([\w.]+)}}",
        lambda m: text[m[1]] if m[1] in text else _templates.text(m[1]).strip(),
        _templates.text("page.html").strip(),
    )


def encode_gates(circuit: Circuit) -> str:
    """Return fan-ins and tables for all gates in base64.

    Each gate consists of its fan-in count n, its table (``2**n`` bits, lowest first, in whole
    bytes), and the node distance to each fan-in. Distances use 7 bits per byte, lowest first; the
    highest bit is set if another byte follows.
    """
    data = bytearray()
    gates = zip(circuit.fanins, circuit.tables, strict=True)
    for node, (fanin, table) in enumerate(gates, circuit.first_gate):
        data.append(len(fanin))
        data += int(table).to_bytes(max(1, (1 << len(fanin)) // 8), "little")
        for source in fanin:
            data += _netlists.varint(node - source)
    return base64.b64encode(bytes(data)).decode("ascii")


def read(text: str) -> Circuit:
    """Return the circuit in a page from `write`.

    It takes at most 100 times the memory of the text.

    Raises:
      ValueError: the text contains no valid circuit.

    Example:
      >>> from lutjax.circuits import Builder, page
      >>> builder = Builder()
      >>> (a,), (b,) = builder.input("x", 2)
      >>> builder.output("y", [[builder.gate((a, b), 0b0110)]])
      >>> page.read(page.write(builder.circuit()))
      Circuit(x: 2 x uint1 -> y: 1 x uint1; 1 gates)
    """
    try:
        script = _script(text, "circuit")
        if not text.rstrip().endswith("</html>"):
            raise ValueError("the text does not end as a page does; is it complete?")
        return _from_data(strict_json.loads(script))
    except (ValueError, TypeError) as error:
        raise ValueError(f"page.read: {error}") from None


def _from_data(data: Any) -> Circuit:
    fields = Fields("the circuit")
    inputs, outputs = (_ports_of(fields, data, side) for side in ("inputs", "outputs"))
    parts, literals = (fields.field(data, name, list) for name in ("parts", "literals"))
    for k, part in enumerate(parts):
        if not isinstance(part, list) or list(map(type, part)) != [str, int]:
            raise ValueError(
                f"parts[{k}] is {format_value(part)}; expected a name, and a number of gates."
            )
    for k, literal in enumerate(literals):
        if type(literal) is not int:
            raise ValueError(f"literals[{k}] is {format_value(literal)}; expected a whole number.")
    first = 1 + sum(port.n_bits for port in inputs)
    fanins, tables = _decode_gates(fields.field(data, "gates", str), first)
    return Circuit(
        inputs=inputs,
        outputs=outputs,
        fanins=fanins,
        tables=tables,
        literals=tuple(literals),
        parts=tuple((name, count) for name, count in parts),
        about=fields.field(data, "about", dict),
    )


def _ports_of(fields: Fields, data: Any, side: str) -> tuple[Port, ...]:
    ports = enumerate(fields.field(data, side, list))
    return tuple(_port_of(Fields(f"{side}[{k}]"), port) for k, port in ports)


def _port_of(fields: Fields, port: Any) -> Port:
    bits, fraction = (fields.field(port, name, int) for name in ("bits", "fraction"))
    return Port(
        fields.field(port, "name", str),
        fields.field(port, "count", int),
        Format(bits, fraction, fields.field(port, "signed", bool)),
    )


def evaluate_in_node(
    text: str, words: UInt32[np.ndarray, "inputs words"], *, node: str = "node"
) -> UInt32[np.ndarray, "outputs words"]:
    """Run a page's script in Node.js on words with 32 samples, as in `Circuit.evaluate`.

    Raises:
      ValueError: the text is not a valid page, or its script does not return words.
      OSError, subprocess.CalledProcessError: the executable does not exist, or the script failed.
    """
    return _run(text, "words", str(words.ravel().tolist()), words.shape[1], node)


def evaluate_rows_in_node(
    text: str, rows: Sequence[Sequence[Value]], *, node: str = "node"
) -> UInt32[np.ndarray, "outputs words"]:
    """Return the answers of a page's script to table rows; see `evaluate_in_node`."""
    encode = f"{_script(text, 'encode')}\nconst words = wordsOfRows(data, rows);"
    numbers = json.dumps([list(row) for row in rows])
    return _run(text, "rows", numbers, -(-len(rows) // 32), node, encode)


def _run(
    text: str, name: str, inputs: str, n: int, node: str, encode: str = ""
) -> UInt32[np.ndarray, "outputs words"]:
    """Return the answers of a page's script to words, or to inputs that `encode` converts."""
    program = f"""{_script(text, "evaluate")}
const {{ data, {name}, n }} = JSON.parse(require("fs").readFileSync(0, "utf8"));
{encode}
console.log(JSON.stringify(Array.from(new Evaluator(data).evaluate(words, n))));
"""
    job = f'{{"data":{_script(text, "circuit")},"{name}":{inputs},"n":{n}}}'
    # Standard input, because arguments have a limited length.
    done = subprocess.run(
        [node, "-e", program],
        input=job,
        capture_output=True,
        text=True,
        errors="replace",
        check=True,
    )
    answer = strict_json.loads(done.stdout)
    # The script may have been changed, so it can return anything.
    is_words = isinstance(answer, list) and all(
        type(word) is int and 0 <= word < 1 << 32 for word in answer
    )
    if not is_words:
        raise ValueError(
            f"evaluate_in_node: the script returned {format_value(answer)}; expected uint32 words."
        )
    return np.array(answer, np.uint32).reshape(-1, n)


def _script(text: str, name: str) -> str:
    pattern = rf'<script(?: type="application/json")? id="{name}">(.*?)</script>'
    scripts: list[str] = re.findall(pattern, text, re.DOTALL)
    if len(scripts) != 1:
        raise ValueError(
            f"text has {len(scripts)} scripts {name!r}; a page of circuits.page.write has one."
        )
    return scripts[0]


def _decode_gates(text: str, first: int) -> tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]:
    data, at = base64.b64decode(text, validate=True), 0
    fanins: list[tuple[int, ...]] = []
    tables: list[int] = []
    while at < len(data):
        n, start = data[at], at + 1
        # Checked before 2**n bits are taken, which would be the memory of a damaged file.
        if n > truth.MAX_INPUTS:
            raise ValueError(
                f"gate {len(fanins)} reads {n} nodes; a gate reads at most {truth.MAX_INPUTS}."
            )
        at = start + max(1, (1 << n) // 8)
        tables.append(int.from_bytes(data[start:at], "little"))
        fanin = []
        for _ in range(n):
            distance = shift = 0
            while True:
                # Distances of any length would take quadratic time.
                if at >= len(data) or shift > 62:
                    raise ValueError(
                        f"gate {len(fanins)} is truncated, or has a distance over 63 bits."
                    )
                distance |= (data[at] & 127) << shift
                shift, at = shift + 7, at + 1
                if not data[at - 1] & 128:
                    break
            fanin.append(first + len(fanins) - distance)
        fanins.append(tuple(fanin))
    if at > len(data):
        raise ValueError(f"gates end in the table of gate {len(fanins) - 1}.")
    return tuple(fanins), tuple(tables)


def interface(ports: Sequence[Port]) -> list[dict[str, Any]]:
    """Return ports as JSON."""
    return [
        {"name": port.name, "count": port.count, **dataclasses.asdict(port.format)}
        for port in ports
    ]


def _image(circuit: Circuit) -> tuple[int, int] | None:
    if circuit.about.get("kind") != "classifier" or len(circuit.inputs) != 1:
        return None
    count = circuit.inputs[0].count
    if circuit.inputs[0].format.bits > _BITS_OF_A_NUMBER:
        return None
    # A square number of inputs is no image by itself: table columns can also form a square.
    if circuit.about.get("image") is None:
        return None
    height, width = circuit.about["image"]
    return (height, width) if height * width == count else None


def _kind(circuit: Circuit) -> str:
    if circuit.about.get("kind") == "automaton":
        return "automaton"
    if circuit.about.get("columns") is not None and len(circuit.outputs) == 1:
        return "rows"
    return "classifier" if _image(circuit) else "network"


def _classifier(
    circuit: Circuit,
    examples: np.ndarray | None,
    labels: Sequence[int] | np.ndarray | None,
    classes: Sequence[str] | None,
    maximum: float | int | None,
) -> dict[str, Any]:
    port = circuit.inputs[0]
    form, scale = port.format, 2**port.format.fraction
    n_classes = circuit.about.get("n_classes")
    n_examples = 0 if examples is None else len(examples)
    least, most = whole_range(form)
    rows: list[list[int]] = []
    if examples is not None:
        if examples.ndim != 2 or examples.shape[1] != port.count:
            raise _error(
                f"examples has shape {list(examples.shape)}; "
                f"expected [examples, {port.count}], one number for each input."
            )
        whole = np.asarray(examples, np.float64) * scale
        if not ((whole == np.round(whole)) & (whole >= least) & (whole <= most)).all():
            raise _error(
                f"examples has numbers that an input of {form} cannot be: "
                f"they must be multiples of {1 / scale:g} from {least / scale:g} "
                f"to {most / scale:g}. Round them as the circuit's inputs are."
            )
        rows = whole.astype(np.int64).tolist()
    if labels is not None and len(labels) != n_examples:
        raise _error(
            f"labels has {len(labels)} entries for {n_examples} examples; give one for each."
        )
    if classes is not None and n_classes is not None and len(classes) != n_classes:
        raise _error(f"classes has {len(classes)} names; the circuit has {n_classes} classes.")
    if classes is None and n_classes is not None:
        classes = circuit.about.get("classes") or [str(k) for k in range(n_classes)]
    # Drawn pixels have the maximum of the examples, so that drawings look like them.
    if maximum is None:
        full = max((max(row) for row in rows), default=0) or most
    else:
        full = round(maximum * scale)
        if not 0 < full <= most:
            raise _error(
                f"maximum is {maximum}; an input of {form} is above 0 and at most {most / scale:g}."
            )
    return {
        "image": _image(circuit),
        "classes": None if classes is None else list(classes),
        "examples": rows,
        "labels": None if labels is None else [int(label) for label in labels],
        "maximum": full,
    }


def _automaton(
    circuit: Circuit,
    size: tuple[int, int] | None,
    start: str | np.ndarray | None,
    shown: int | None,
    update_rate: float | int | None,
) -> dict[str, Any]:
    channels = circuit.about["channels"]
    if start is None:
        start = circuit.about.get("start") or "sparse"
    encoded = None
    if isinstance(start, str):
        if start not in STARTS:
            raise _error(
                f"start is {start!r}; it is one of {', '.join(STARTS)}, or an array of bits."
            )
    else:
        if start.ndim != 3 or start.shape[-1] != channels:
            raise _error(
                f"start has shape {list(start.shape)}; expected [height, width, {channels}] bits."
            )
        if size is not None and start.shape[:2] != tuple(size):
            raise _error(
                f"size is {tuple(size)} and start has shape {list(start.shape)}; leave size out."
            )
        size = start.shape[0], start.shape[1]
        bits = np.moveaxis(start.astype(bool), -1, 0)
        encoded = base64.b64encode(np.packbits(bits, bitorder="little").tobytes()).decode("ascii")
    if size is None:
        size = _CELLS_OF_A_SIDE, _CELLS_OF_A_SIDE
    if len(size) != 2 or min(size) < 3:
        raise _error(f"size is {tuple(size)}; give height and width, each at least 3.")
    if shown is None:
        shown = circuit.about.get("shown") or 1
    if shown not in (1, 3) or shown > channels:
        raise _error(f"shown is {shown}; it is 1, or 3 if there are so many channels ({channels}).")
    update_rate = 1 if update_rate is None else update_rate
    if not 0 < update_rate <= 1:
        raise _error(f"update_rate is {update_rate}; it is a probability, above 0 and at most 1.")
    return {
        "size": [int(side) for side in size],
        "start": encoded,
        "begin": "given" if encoded else start,
        "shown": shown,
        "update_rate": update_rate,
    }


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _lead(kind: str, circuit: Circuit, update_rate: float | int, exported: Circuit) -> str:
    gates = f"A circuit of {_count(len(exported), 'gate')}"
    names = circuit.about.get("classes") or ()
    some = ", ".join(names[:_NAMED]) + (", ..." if len(names) > _NAMED else "")
    if kind == "classifier":
        n_classes = circuit.about.get("n_classes")
        classes = f"which of {n_classes} classes" if n_classes else "which class"
        return (
            f"{gates} reads the pixels of a picture and says {classes} it belongs to. "
            "Draw, and watch the answer."
        )
    if kind == "automaton":
        edge = "Cells beyond the edge of the grid are 0."
        if circuit.about.get("periodic"):
            edge = "The grid is a torus: each edge meets the opposite one."
        when = "All cells change at once"
        if update_rate != 1:
            when = f"In a step each cell changes with a probability of {update_rate:g}"
        return (
            f"{gates} is the rule of every cell: "
            f"it reads the {_count(circuit.about['channels'], 'bit')} of the cell and of each "
            f"of its eight neighbors, and answers with the cell's new bits. {when}. {edge}"
        )
    if kind == "rows":
        target = circuit.about.get("target")
        what = target if target is not None else "its class" if names else "a number"
        return html.escape(
            f"{gates} reads {_count(len(circuit.inputs), 'column')} of a table "
            f"and predicts {what}{': ' * bool(some)}{some}. Change the row, and watch the answer."
        )
    if circuit.about.get("kind") == "classifier" and names:
        return html.escape(
            f"{gates} tells {len(names)} classes apart: {some}. "
            f"It reads {_count(circuit.n_inputs, 'bit')}. Switch the inputs, and watch the answer."
        )
    return (
        f"{gates} computes {_count(circuit.n_outputs, 'output bit')} "
        f"from {_count(circuit.n_inputs, 'input bit')}. Switch the inputs, and watch the outputs."
    )


def _gates(kind: str, circuit: Circuit, exported: Circuit) -> str:
    counts, exported_counts, of_export = gate_counts(circuit), gate_counts(exported), ""
    # A page may run less than the export: the class is the maximum of the votes, without argmax.
    if counts != exported_counts:
        only_exported = [name for name in exported_counts if name not in counts]
        argmax_is_missing = "votes" in counts and only_exported == ["argmax"]
        itself = "; the page computes argmax itself" if argmax_is_missing else ""
        of_export = f" The exported circuit has {gates_in_words(exported)}{itself}."
    widest = max((len(fanin) for fanin in circuit.fanins), default=0)
    of = {"automaton": " for the cell in the middle of the grid, in the last step"}.get(kind, "")
    return (
        f"The circuit has {gates_in_words(circuit)}.{of_export} A gate reads "
        f"at most {_count(widest, 'bit')}, looks its answer up in a table, "
        "and answers with one bit; the longest path from an input "
        f"to an output passes {_count(circuit.depth, 'gate')}. "
        f"Each dot is a gate, and is filled if its answer is 1{of}."
    )
