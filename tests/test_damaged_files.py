"""Files that somebody damaged, or that state what is not so: one clear error where they are read, and little memory."""

import copy
import json
import re

import pytest
from example_circuits import life_circuit, random_circuit

from lutjax.circuits import Builder, Circuit, Format, Port, from_json
from lutjax.circuits.page import from_html

pytestmark = pytest.mark.usefixtures("without_typechecking")

CLASSIFIER = {"kind": "classifier", "n_classes": 3, "image": [2, 4], "vote_gates": [2, 1, 2]}


def classifier():
    """A circuit that states all that one of a classifier does."""
    builder = Builder(simplify=False)
    bits = [bit for number in builder.input("x", 8, Format(2)) for bit in number]
    builder.part("votes")
    sums = [
        [builder.gate(bits[k : k + 2], 0b0110), builder.gate(bits[k + 1 : k + 3], 0b1000)] for k in (0, 5, 9)
    ]
    builder.output("y", sums, Format(2))
    return builder.circuit(CLASSIFIER)


def every_format(circuit):
    """Write a circuit in every format, and count it."""
    circuit.to_html()
    for write in (
        circuit.to_json,
        circuit.to_blif,
        circuit.to_aiger,
        circuit.to_verilog,
        circuit.to_c,
        circuit.to_dot,
    ):
        write()
    str(circuit.stats(lut6=False))
    circuit.simplify()


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
    ({"vote_gates": [5, 4]}, "about['vote_gates'] adds up to 9 gates; the part votes has 6"),
    ({"more": {"deep": [1, float("inf")]}}, "about['more']['deep'] is or has inf, which JSON has not"),
]  # fmt: skip
LIES_OF_AUTOMATA = [
    ({"channels": None}, "an automaton of None channels"),
    ({"channels": "1"}, """about['channels'] is "1"; expected a whole number"""),
    ({"channels": 2}, "an automaton of 2 channels with 9 input and 1 output bits"),
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
    """A file of JSON, a page, and a program: each is refused before anything believes it."""
    circuit = make()
    every_format(circuit)
    about = {**circuit.about, **changed}
    with pytest.raises(ValueError, match=re.escape(message)):
        Circuit(
            circuit.inputs,
            circuit.outputs,
            circuit.fanins,
            circuit.tables,
            circuit.literals,
            circuit.parts,
            about,
        )
    if "more" in changed:  # JSON cannot write it
        about["more"] = "1e999"
    text = json.dumps({**json.loads(circuit.to_json()), "about": about}).replace(
        '"1e999"', '{"deep": [1, 1e999]}'
    )
    with pytest.raises(ValueError, match="from_json: Circuit: ") as caught:
        from_json(text)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    page = circuit.to_html()
    script = re.search(r'id="circuit">(.*?)</script>', page, re.DOTALL)[1]
    lying = json.dumps({**json.loads(script), "about": about}).replace('"1e999"', '{"deep": [1, 1e999]}')
    with pytest.raises(ValueError, match=re.escape(message)):
        from_html(page.replace(script, lying))


def test_facts_that_json_has_not():
    circuit = classifier()
    for about, message in (
        ({"a": [{"b": object()}]}, "about['a']['b'] is or has a object; expected what JSON holds"),
        ({1: 2}, "about has the key 1; JSON has texts as keys"),
        ([1], "about is [1]; expected facts by name"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            Circuit((), (), (), (), (), (), about)
    for number in ("NaN", "-Infinity"):
        text = circuit.to_json().replace('"n_classes":3', f'"n_classes":{number}')
        with pytest.raises(
            ValueError, match=f"from_json: the text is not JSON: {number} is no number of JSON"
        ):
            from_json(text)


def test_facts_that_others_state_are_left_alone():
    """Whatever JSON holds under other names, and facts that are null."""
    about = {
        "kind": "classifier",
        "n_classes": None,
        "image": None,
        "by": {"who": ["me", 1, 2.5, True, None]},
        "sizes": (1, 2),
    }
    circuit = random_circuit(0, {"x": (9, Format(3))}, 20, about=about)
    every_format(circuit)
    assert from_json(circuit.to_json()).about == {**about, "sizes": [1, 2]}
    deep = value = []
    for _ in range(40):
        value.append([])
        value = value[0]
    with pytest.raises(ValueError, match="about has brackets in brackets, more than 32 deep"):
        random_circuit(0, 3, 3, about={"deep": deep})


# ------------------------------------------------------------------------------------- any field, any value
ODD = (
    None,
    True,
    -1,
    0,
    1,
    7,
    2**31,
    10**18,
    10**30,
    1.5,
    1e300,
    "",
    "x",
    "$a$",
    "\ud800",
    "\n",
    [],
    [[]],
    [1, 2],
    {},
    {"a": 1},
)


def places(value, path=()):
    """Yield the path to everything in a value of JSON."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in items:
        yield from places(one, (*path, key))


def with_value(whole, path, odd):
    """A copy of a value of JSON with another one at a place."""
    if not path:
        return odd
    whole = copy.deepcopy(whole)
    inner = whole
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = odd
    return whole


def survived(read, texts):
    """Return how many texts are read as circuits, which every format takes; the others are refused by ValueError, in a line."""
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
    whole = json.loads(make().to_json())
    some = [path for path in places(whole) if len(path) < 3 or path[1] == 0 or path[0] == "about"]
    texts = [json.dumps(with_value(whole, path, odd)) for path in some for odd in ODD]
    assert 5 < survived(from_json, texts) < len(texts) / 3


@pytest.mark.parametrize("make", [classifier, life_circuit])
def test_any_field_of_a_page_may_have_any_value(make):
    page = make().to_html()
    script = re.search(r'id="circuit">(.*?)</script>', page, re.DOTALL)[1]
    whole = json.loads(script)
    some = [
        path
        for path in places(whole)
        if path[:1] in [(name,) for name in ("inputs", "outputs", "literals", "parts", "about", "gates")]
    ]
    some += [("gates",)]
    values = [
        *ODD,
        whole["gates"][:-1],
        whole["gates"][:-4],
        whole["gates"] + "CAAA",
        "////" + whole["gates"],
    ]
    texts = [
        page.replace(script, json.dumps(with_value(whole, path, odd))) for path in some for odd in values
    ]
    assert 5 < survived(from_html, texts) < len(texts) / 2


def test_a_page_without_a_title():
    assert "<h1></h1>" in classifier().to_html(title="")


def test_a_format_is_signed_or_not():
    with pytest.raises(ValueError, match="signed is 'no'; it must be True or False"):
        Port("x", 1, Format(8, 0, "no"))
