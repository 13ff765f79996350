"""Damaged files and false claims: one clear error at read time, with little memory."""

import copy
import dataclasses
import json
import random
import re
import time
import tracemalloc

import pytest
from cases import slow_except
from circuit_strategies import same
from example_circuits import life_circuit, random_circuit

from lutjax import circuits
from lutjax.circuits import Builder, Circuit, Format, Port

pytestmark = pytest.mark.usefixtures("without_typechecking")

CLASSIFIER = {"kind": "classifier", "n_classes": 3, "image": [2, 4], "vote_gates": [2, 1, 2]}


def classifier():
    """Circuit with all classifier metadata."""
    builder = Builder(simplify=False)
    bits = [bit for number in builder.input("x", 8, Format(2)) for bit in number]
    builder.start_part("votes")
    sums = [
        [builder.gate(bits[k : k + 2], 0b0110), builder.gate(bits[k + 1 : k + 3], 0b1000)]
        for k in (0, 5, 9)
    ]
    builder.output("y", sums, Format(2))
    return builder.circuit(CLASSIFIER)


def every_format(circuit):
    """Write a circuit in every format, and compute its statistics."""
    for format in ("page", "netlist_json", "alkaid", "blif", "aiger", "verilog", "c", "dot"):
        getattr(circuits, format).write(circuit)
    str(circuits.statistics.compute(circuit, lut6=False))
    circuits.simplify(circuit)


# ------------------------------------------------------------------------------------- facts that are not so
LIES = [
    ({"kind": 3}, "about['kind'] is 3; expected a text"),
    ({"n_classes": "ten"}, """about['n_classes'] is "ten"; expected a whole number from 1 to 65536"""),
    ({"n_classes": True}, "about['n_classes'] is true"),
    ({"n_classes": 3.0}, "about['n_classes'] is 3.0"),
    ({"n_classes": 10**9}, "about['n_classes'] is 1000000000; expected a whole number from 1 to 65536"),
    ({"n_classes": 4}, "about['n_classes'] is 4; no output port has a number for each class"),
    ({"image": "2x4"}, """about['image'] is "2x4"; expected height and width"""),
    ({"image": 8}, "about['image'] is 8; expected height and width"),
    ({"image": [2, 2, 2]}, "about['image'] is [2, 2, 2]; expected height and width"),
    ({"image": [2, "4"]}, """about['image'] is [2, "4"]"""),
    ({"image": [-2, -4]}, "about['image'] is [-2, -4]"),
    ({"image": [3, 3]}, "about['image'] is [3, 3], 9 pixels; the input port has 8 numbers"),
    ({"vote_gates": 5}, "about['vote_gates'] is 5; expected a list of whole numbers"),
    ({"vote_gates": [5, None]}, "about['vote_gates'] is [5, null]"),
    ({"vote_gates": [5, 4]}, "about['vote_gates'] sums to 9; votes has 6 gates"),
    ({"more": {"deep": [1, float("inf")]}}, "about['more']['deep'] has inf, which JSON cannot represent"),
]  # fmt: skip
LIES_OF_AUTOMATA = [
    ({"channels": None}, "an automaton with None channels"),
    ({"channels": "1"}, """about['channels'] is "1"; expected a whole number"""),
    ({"channels": 2}, "an automaton with 2 channels, 9 input and 1 output bits"),
    ({"periodic": "yes"}, """about['periodic'] is "yes"; expected true or false"""),
    ({"start": "alive"}, """about['start'] is "alive"; expected one of sparse"""),
    ({"start": ["seed"]}, """about['start'] is ["seed"]"""),
    ({"shown": 3}, "about['shown'] is 3; the automaton has 1 channels"),
    ({"shown": "1"}, """about['shown'] is "1"; expected 1 or 3"""),
    ({"rule": 30}, "about['rule'] is 30; expected a text"),
]


@pytest.mark.parametrize(
    ("make", "changed", "message"),
    [(classifier, *lie) for lie in LIES] + [(life_circuit, *lie) for lie in LIES_OF_AUTOMATA],
)
def test_facts_that_are_not_so(make, changed, message):
    """JSON file, page and program: each is rejected before its content is trusted."""
    circuit = make()
    every_format(circuit)
    about = {**circuit.about, **changed}
    with pytest.raises(ValueError, match=re.escape(message)):
        dataclasses.replace(circuit, about=about)
    if "more" in changed:  # JSON cannot write it
        about["more"] = "1e999"
    text = json.dumps({**json.loads(circuits.netlist_json.write(circuit)), "about": about}).replace(
        '"1e999"', '{"deep": [1, 1e999]}'
    )
    with pytest.raises(ValueError, match=r"netlist_json\.read: Circuit: ") as caught:
        circuits.netlist_json.read(text)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    page = circuits.page.write(circuit)
    script = re.search(r'id="circuit">(.*?)</script>', page, re.DOTALL)[1]
    lying = json.dumps({**json.loads(script), "about": about}).replace(
        '"1e999"', '{"deep": [1, 1e999]}'
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        circuits.page.read(page.replace(script, lying))


def test_facts_that_json_has_not():
    circuit = classifier()
    for about, message in (
        ({"a": [{"b": object()}]}, "about['a']['b'] has a object; expected JSON values"),
        ({1: 2}, "about has the key 1; JSON has texts as keys"),
        ([1], "about is [1]; expected facts by name"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            Circuit((), (), (), (), (), (), about)
    for number in ("NaN", "-Infinity"):
        text = circuits.netlist_json.write(circuit).replace(
            '"n_classes":3', f'"n_classes":{number}'
        )
        with pytest.raises(
            ValueError,
            match=f"netlist_json.read: the text is not JSON: {number} is no number of JSON",
        ):
            circuits.netlist_json.read(text)


def test_facts_that_others_state_are_left_alone():
    """Arbitrary JSON under other names, and null facts."""
    about = {"kind": "classifier", "n_classes": None, "image": None, "sizes": (1, 2)}
    about["by"] = {"who": ["me", 1, 2.5, True, None]}
    circuit = random_circuit(0, {"x": (9, Format(3))}, 20, about=about)
    every_format(circuit)
    result = circuits.netlist_json.read(circuits.netlist_json.write(circuit)).about
    assert result == {**about, "sizes": [1, 2]}
    deep = value = []
    for _ in range(40):
        value.append([])
        value = value[0]
    with pytest.raises(ValueError, match="about has brackets in brackets, more than 32 deep"):
        random_circuit(0, 3, 3, about={"deep": deep})


# ------------------------------------------------------------------------------------- any field, any value
ODD = (
    *(None, True, -1, 0, 1, 7, 2**31, 10**18, 10**30, 1.5, 1e300, "", "x", "$a$", "\ud800", "\n"),
    *([], [[]], [1, 2], {}, {"a": 1}),
)


def places(value, path=()):
    """Yield the path to every element in a JSON value."""
    yield path
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, one in items:
        yield from places(one, (*path, key))


def with_value(whole, path, odd):
    """Copy a JSON value with one element replaced."""
    if not path:
        return odd
    whole = copy.deepcopy(whole)
    inner = whole
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = odd
    return whole


def survived(read, texts):
    """Count texts read as circuits and accepted by every format; all other texts raise a one-line ValueError."""
    n, messages = 0, []
    for text in texts:
        try:
            circuit = read(text)
        except ValueError as error:
            messages.append(str(error))
            continue
        every_format(circuit)
        n += 1
    assert all(len(message) < 600 and "\n" not in message for message in messages)
    return n


@pytest.mark.parametrize("make", [classifier, life_circuit])
def test_any_field_of_json_may_have_any_value(make):
    whole = json.loads(circuits.netlist_json.write(make()))
    some = [path for path in places(whole) if len(path) < 3 or path[1] == 0 or path[0] == "about"]
    texts = [json.dumps(with_value(whole, path, odd)) for path in some for odd in ODD]
    assert 5 < survived(circuits.netlist_json.read, texts) < len(texts) / 3


@pytest.mark.parametrize("make", [classifier, life_circuit])
def test_any_field_of_a_page_may_have_any_value(make):
    page = circuits.page.write(make())
    script = re.search(r'id="circuit">(.*?)</script>', page, re.DOTALL)[1]
    whole = json.loads(script)
    names, gates = ("inputs", "outputs", "literals", "parts", "about", "gates"), whole["gates"]
    some = [path for path in places(whole) if path and path[0] in names]
    values = [*ODD, gates[:-1], gates[:-4], gates + "CAAA", "////" + gates]
    changed = (with_value(whole, path, odd) for path in some for odd in values)
    texts = [page.replace(script, json.dumps(value)) for value in changed]
    assert 5 < survived(circuits.page.read, texts) < len(texts) / 2


def test_a_page_without_a_title():
    assert "<h1></h1>" in circuits.page.write(classifier(), title="")


def test_a_format_is_signed_or_not():
    with pytest.raises(ValueError, match="signed is 'no'; it must be True or False"):
        Port("x", 1, Format(8, 0, "no"))


# ------------------------------------------------------------------------------------- netlists
FORMATS = {
    "alkaid": (lambda circuit: circuits.alkaid.write(circuit).encode(), circuits.alkaid.read),
    "blif": (lambda circuit: circuits.blif.write(circuit).encode(), circuits.blif.read),
    "aig": (circuits.aiger.write, circuits.aiger.read),
    "aag": (lambda circuit: circuits.aiger.write(circuit, binary=False), circuits.aiger.read),
    "json": (
        lambda circuit: circuits.netlist_json.write(circuit).encode(),
        circuits.netlist_json.read,
    ),
}
"""Writer and reader for each netlist format, keyed by extension."""


def memory_of(read, data):
    """Return the peak memory while reading data, in bytes, and the error."""
    tracemalloc.start()
    try:
        error = None
        try:
            read(data)
        except ValueError as raised:
            error = str(raised)
        return tracemalloc.get_traced_memory()[1], error
    finally:
        tracemalloc.stop()


HUGE = 400_000_000
COUNTS = [
    ("alkaid", b'"count":8,', b'"count":%d,' % HUGE, "the ports of inputs have 400000000 numbers; the program has 8 inputs"),
    ("alkaid", b'"uint2"', b'"uint3"', "inputs 0 is uint2; its port has uint3"),
    ("alkaid", b'"lutjax":', b'"lutjax":' + b"[" * 200_000, "nested too deeply"),
    ("alkaid", b'[[8,3]', b'[[%d,3]' % HUGE, "the shifts of inputs are"),
    ("alkaid", b'],10,', b'],7,', "its code is 7, a multiplication; supported codes are"),
    ("alkaid", b'[0.0,3.0,1.0]', b'[0,%d,1]' % (1 << 60), "of at most 53 bits"),
    ("blif", b'"count":8,', b'"count":%d,' % HUGE, "its inputs have 800000000 bits; the file has 16 inputs"),
    ("blif", b'"count":3,', b'"count":4,', "its outputs have 8 bits; the file has 6 outputs"),
    ("blif", b'"name":"x"', b'"name":"z"', "its inputs have other names than the file's, such as 'x[0]'"),
    ("blif", b'[{"name"', b'[{"nome"', "the field inputs[0] is"),
    ("blif", b"ports [[", b"ports [", "does not fit: "),
    ("blif", b"ports [[", b"ports " + b"[" * 200_000, "nested too deeply"),
    ("aag", b'"count":8,', b'"count":%d,' % HUGE, "its inputs have 800000000 bits; the file has 16 inputs"),
    ("aig", b'"count":3,', b'"count":%d,' % HUGE, "its outputs have 800000000 bits; the file has 6 outputs"),
    ("aig", b'"uint2"}]]\n', b'"uint', "the comment with the ports does not fit"),
    ("aig", b"aig 28 16 ", b"aig %d %d " % (HUGE + 12, HUGE), "the header says 400000000 inputs; a file of"),
    ("aig", b"aig 28 16 ", b"aig 28 %d " % HUGE, "the header has 28 variables"),
    ("aig", b" 0 6 12\n", b" 0 %d 12\n" % HUGE, "expected a literal"),
    ("aag", b"aag 28 16 ", b"aag %d %d " % (HUGE, HUGE - 12), "expected a literal"),
    ("aag", b"aag 28 16 ", b"aag 28 1" + b"0" * 5000 + b" ", "expected 'aig' or 'aag'"),
    ("json", b'"count":8,', b'"count":%d,' % HUGE, "there are 800000000 input bits; at most 16777216 are supported"),
    ("json", b'"count":3,', b'"count":%d,' % HUGE, "there are 6 literals; the output ports have 800000000 bits"),
    ("json", b'"parts": [', b'"parts": ' + b"[" * 200_000, "its brackets are nested too deeply"),
    ("json", b'"tables": ["', b'"tables": ["' + b"f" * 5000, "expected hexadecimal digits in quotes, at most 64"),
    ("json", b'"fanins": [[', b'"fanins": [[1' + b"0" * 4000 + b",", "expected a whole number"),
]  # fmt: skip


@pytest.mark.parametrize(("end", "text", "changed", "message"), COUNTS)
def test_counts_are_compared_before_anything_is_made(end, text, changed, message):
    """A wrong digit raises an error at once, with no more memory than the file size."""
    write, read = FORMATS[end]
    data = write(classifier())
    assert same(read(data), classifier())
    assert data.count(text) >= 1
    changed = data.replace(text, changed, 1)
    memory, error = memory_of(read, changed)
    assert error is not None
    assert message in error
    assert len(error) < 400
    assert memory < 300_000 + 40 * len(changed)


@pytest.mark.parametrize("end", FORMATS)
def test_memory_is_in_proportion_to_the_file(end):
    """Compare with the documented bound in the worst case for each format: two-input gates on nearby nodes."""
    circuit = random_circuit(0, 30, 3000, arities=(2,))
    write, read = FORMATS[end]
    data = write(circuit)
    memory, error = memory_of(read, data)
    assert error is None
    assert memory < (500 if end in ("aig", "aag") else 100) * len(data)


@pytest.mark.parametrize("end", slow_except(FORMATS, "json"))
def test_one_octet_of_a_netlist_may_be_any(end):
    """Change every byte once; each change raises a one-line error or yields another circuit."""
    write, read = FORMATS[end]
    data, rng = write(classifier()), random.Random(0)
    texts = []
    for at in range(0, len(data), 1 if len(data) < 600 else 2):
        octet = rng.choice(b'0123456789[]{}",x \n\xff\0')
        texts += [data[:at] + bytes([octet]) + data[at + 1 :], data[:at] + data[at + 1 :]]
    texts += [data[:at] for at in range(0, len(data), 5)]
    assert survived(read, texts) < len(texts) * 0.7


def test_names_that_become_the_same_are_many():
    """Names with a single remaining character, and repeated duplicates: neither takes quadratic time."""
    names = [chr(0x4E00 + k) for k in range(20_000)]
    text = f".model m\n.inputs {' '.join(names)}\n.outputs y\n.names {names[7]} y\n1 1\n.end\n"
    start = time.process_time()
    circuit = circuits.blif.read(text)
    assert [port.name for port in circuit.inputs[:3]] == ["_", "__0", "__1"]
    with pytest.raises(ValueError, match="is twice among the inputs"):
        circuits.blif.read(text.replace(".outputs y", f".inputs {names[-1]}\n.outputs y"))
    assert time.process_time() - start < 5


def test_a_comment_of_others_is_no_port():
    text = circuits.blif.write(classifier()).replace(
        "# lutjax ports [", "# lutjax ports are not here ["
    )
    assert [port.count for port in circuits.blif.read(text).inputs] == [16]
