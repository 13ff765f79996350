"""Graphviz output and circuit pictures."""

import itertools
import re
import subprocess

import numpy as np
import pytest
from example_circuits import life_circuit, random_circuit
from tools import require_tool

from lutjax import circuits
from lutjax.circuits import Builder, Format, dot, drawing

NAMED = {
    "buffer": lambda bits, roles: bits[0],
    "not": lambda bits, roles: not bits[0],
    "and": lambda bits, roles: all(bits),
    "nand": lambda bits, roles: not all(bits),
    "or": lambda bits, roles: any(bits),
    "nor": lambda bits, roles: not any(bits),
    "xor": lambda bits, roles: sum(bits) % 2,
    "xnor": lambda bits, roles: 1 - sum(bits) % 2,
    "majority": lambda bits, roles: 2 * sum(bits) > len(bits),
    "minority": lambda bits, roles: 2 * sum(bits) < len(bits),
    "mux": lambda bits, roles: roles["1"] if roles["select"] else roles["0"],
    "and-or": lambda bits, roles: all(roles[""]) or roles["or"],
    "or-and": lambda bits, roles: any(roles[""]) and roles["and"],
    "and-xor": lambda bits, roles: all(roles[""]) ^ roles["xor"],
    "xor-and": lambda bits, roles: sum(roles[""]) % 2 and roles["and"],
    "xor-or": lambda bits, roles: sum(roles[""]) % 2 or roles["or"],
}


def answer(name, bits, roles):
    """Evaluate a named gate on already inverted bits, independently from the package."""
    if result := re.fullmatch(r"at least (\d+)", name):
        return int(sum(bits) >= int(result[1]))
    if result := re.fullmatch(r"less than (\d+)", name):
        return int(sum(bits) < int(result[1]))
    if result := re.fullmatch(r"bit (\d+) of sum", name):
        return sum(bits) >> int(result[1]) & 1
    if name in "01":
        return int(name)
    if name.startswith("0x"):
        return (
            int(name, 16) >> sum(bit << int(role) for bit, role in zip(bits, roles, strict=True))
            & 1
        )
    by_role = {role: bit for bit, role in zip(bits, roles, strict=True) if role}
    by_role[""] = [bit for bit, role in zip(bits, roles, strict=True) if not role]
    return int(NAMED[name](bits, by_role))


def table_of(function, n):
    """Return the truth table for a function description."""
    table = 0
    for address in range(1 << n):
        bits = [(address >> k & 1) ^ int(function.inverted[k]) for k in range(n)]
        table |= answer(function.name, bits, function.roles) << address
    return table


@pytest.mark.parametrize("n", range(4))
def test_words_of_every_small_table(n):
    for table in range(1 << (1 << n)):
        assert table_of(dot.function_of(table, n), n) == table


def test_words_of_functions_of_the_number_of_ones():
    """Sums, thresholds, and gates with inverted inputs have names at every size; other tables appear as numbers."""
    generator = np.random.default_rng(0)
    for n in range(4, 9):
        counts = np.array([address.bit_count() for address in range(1 << n)])
        sums = [(counts >> k & 1, f"bit {k} of sum" if k else "xor") for k in range(n.bit_length())]
        for values, name in [
            *sums,
            (counts >= 2, "at least 2"),
            (counts < n - 1, f"less than {n - 1}"),
        ]:
            table = sum(int(value) << address for address, value in enumerate(values))
            function = dot.function_of(table, n)
            assert table_of(function, n) == table
            if name not in ("bit 2 of sum", "bit 3 of sum"):  # which may be a threshold as well
                assert function.name == name
        place = int(generator.integers(1, 1 << n))
        for table, name in (
            (1 << place, "and"),
            ((1 << (1 << n)) - 1 ^ 1 << (place ^ (1 << n) - 1), "or"),
        ):
            function = dot.function_of(table, n)
            assert function.name == name
            assert table_of(function, n) == table
        table = int.from_bytes(generator.bytes(32), "little") & (1 << (1 << n)) - 1
        assert dot.function_of(table, n).name == f"0x{table:0{(1 << n) // 4}x}"


def test_few_inputs_are_inverted():
    assert dot.function_of(0b1110, 2) == ("or", (False, False), ("", ""))
    assert dot.function_of(0b0001, 2).name == "nor"
    assert dot.function_of(0b0111, 2).name == "nand"
    assert dot.function_of(0b1011, 2) == ("or", (False, True), ("", ""))
    assert dot.function_of(0b11010100, 3) == ("majority", (True, False, False), ("", "", ""))


def evaluated_text(text, inputs):
    """Evaluate Graphviz text for input bits by label and return the output bits."""
    labels = dict(re.findall(r'^ *([no]\d+) \[label="([^"]*)"', text, re.MULTILINE))
    edges = {}
    for source, sink, properties in re.findall(r"^ *(n\d+) -> ([no]\d+)(.*);", text, re.MULTILINE):
        role = re.search(r'headlabel="([^"]*)"', properties)
        edges.setdefault(sink, []).append(
            (source, "style=dashed" in properties, role[1] if role else "")
        )
    values = {node: inputs[label] for node, label in labels.items() if label in inputs}
    values |= {"n0": 0}
    for node in sorted(labels, key=lambda node: (node[0], int(node[1:]))):
        if node not in values and node[0] == "n":
            read = edges.get(node, [])
            bits = [values[source] ^ int(inverted) for source, inverted, _ in read]
            values[node] = answer(labels[node], bits, [role for *_, role in read])
    return {
        labels[sink]: values[read[0][0]] ^ int(read[0][1])
        for sink, read in edges.items()
        if sink[0] == "o"
    }


@pytest.mark.parametrize("seed", range(4))
def test_graphviz_text_computes_the_circuit(seed):
    ports = {"y": (2, Format(3)), "z": (1, Format())}
    circuit = random_circuit(
        seed, {"a": (2, Format(2)), "b": (3, Format())}, 40, ports=ports, simplify=bool(seed % 2)
    )
    text = circuits.dot.write(circuit)
    assert text == circuits.dot.write(circuit)
    names = ["a[0].0", "a[0].1", "a[1].0", "a[1].1", "b[0]", "b[1]", "b[2]"]
    for bits in itertools.islice(itertools.product((0, 1), repeat=7), 0, 128, 5):
        words = np.array(bits, np.uint8)[:, None]
        expected = (circuit.evaluate(words) & np.uint8(1))[:, 0].tolist()
        actual = evaluated_text(text, dict(zip(names, bits, strict=True)))
        assert [actual[f"y[{k}].{b}"] for k in range(2) for b in range(3)] + [
            actual["z"]
        ] == expected


def test_graphviz_text_has_parts_and_escapes_names():
    circuit = life_circuit(2)
    text = circuits.dot.write(circuit, name='a "name" \\')
    assert text.startswith('digraph "a \\"name\\" \\\\" {')
    assert re.findall(r'label="(perception|update)"', text) == ["perception", "update"]
    assert "x[1]" not in text  # which nothing reads
    assert text.count("{") == text.count("}")


def test_graphviz_reads_the_text():
    require_tool("dot")
    circuit = random_circuit(1, 6, 30)
    done = subprocess.run(
        ["dot", "-Tplain"],
        input=circuits.dot.write(circuit),
        capture_output=True,
        text=True,
        check=True,
    )
    complaints = [line for line in done.stderr.splitlines() if "<stdin>" in line]
    assert not complaints  # those about fonts are of the machine
    kinds = [line.split()[0] for line in done.stdout.splitlines()]
    assert kinds.count("edge") == sum(map(len, circuit.fanins)) + circuit.n_outputs


def test_pictures_are_files(tmp_path):
    require_tool("dot")
    circuit = life_circuit()
    for name in ("a.png", "b.png", "c.svg", "d.PDF", "e"):
        drawing.draw(circuit, tmp_path / name)
    assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"
    assert (
        (tmp_path / "a.png").read_bytes()
        == (tmp_path / "b.png").read_bytes()
        == (tmp_path / "e").read_bytes()
    )
    assert "<svg" in (tmp_path / "c.svg").read_text()
    assert (tmp_path / "d.PDF").read_bytes()[:5] == b"%PDF-"
    with pytest.raises(ValueError, match=r"Graphviz says: .*nothing"):
        drawing.draw(circuit, tmp_path / "f.nothing")


def test_pictures_on_axes():
    require_tool("dot")
    from matplotlib.figure import Figure

    axes = Figure().subplots()
    drawing.draw(life_circuit(2), axes, title="All of it, for $5")
    (image,) = axes.images
    assert min(image.get_array().shape[:2]) > 200
    assert axes.get_title() == r"All of it, for \$5"


def test_circuits_without_gates(tmp_path):
    require_tool("dot")
    builder = Builder()
    ((bit,),) = builder.input("x")
    builder.output("y", [[bit ^ 1], [0], [1]])
    drawing.draw(builder.circuit(), tmp_path / "none.png", title="Nothing")
    assert (tmp_path / "none.png").exists()
    assert circuits.dot.write(builder.circuit()).count("->") == 3


def test_what_is_not_drawn(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="the circuit has 201 gates; a picture holds up to 200"):
        drawing.draw(random_circuit(0, 5, 201), tmp_path / "large.png")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeError, match="dot is not on the path; install Graphviz"):
        drawing.draw(life_circuit(), tmp_path / "a.png")
    assert not list(tmp_path.iterdir())
