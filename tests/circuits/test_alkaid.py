"""Circuits in alkaid's interchange format, evaluated and written as Verilog by alkaid."""

import gzip
import subprocess
import sys

import numpy as np
import pytest
from circuit_strategies import SPECIAL, drawn, made, numbers, plans
from hypothesis import given, settings

from lutjax import circuits
from lutjax.circuits import Builder, Circuit, Format, Port

types = pytest.importorskip("alkaid.types", reason="alkaid is not installed: pip install alkaid")


def loaded(circuit, folder):
    """Return a circuit's program, read from its file by alkaid."""
    path = folder / "c_alkaid.json"
    path.write_text(circuits.alkaid.write(circuit))
    return types.CombLogic.load(path)


def answers(circuit, given):
    """Evaluate all outputs with lutjax and return them in order."""
    result = circuit(*(x[:, 0] if x.shape[1] == 1 else x for x in given))
    result = result if isinstance(result, tuple) else (result,)
    return np.concatenate([y.reshape(len(y), -1) for y in result], 1).astype(np.float64)


def check(circuit, folder, count=64):
    given = numbers(circuit, count)
    flat = np.concatenate(given, 1).astype(np.float64)
    result = loaded(circuit, folder).predict(flat, n_threads=1).reshape(count, -1)
    np.testing.assert_array_equal(result, answers(circuit, given))


@given(plan=plans())
@settings(max_examples=20)
def test_alkaid_computes_what_a_circuit_computes(plan, tmp_path_factory):
    check(made(plan), tmp_path_factory.getbasetemp())


@pytest.mark.parametrize("name", [name for name, circuit in SPECIAL.items() if circuit.inputs])
def test_special_circuits(name, tmp_path):
    check(SPECIAL[name], tmp_path)


@pytest.mark.parametrize(
    ("form", "signed"),
    [(Format(53), False), (Format(53, 20, signed=True), True), (Format(1, 1), False)],
)
def test_wide_numbers(form, signed, tmp_path):
    """Integers with the full float64 precision survive unchanged."""
    builder = Builder()
    (x,) = builder.input("x", 1, form)
    builder.output("y", [[*x[:-1], builder.gate([x[-1], x[0]], 0b0110)]], form)
    check(builder.circuit(), tmp_path)


def test_numbers_that_alkaid_does_not_hold():
    circuit = Circuit((Port("x", 1, Format(54)),), (Port("y"),), (), (), (2,))
    with pytest.raises(ValueError, match="numbers of port x have 54 bits; alkaid takes at most 53"):
        circuits.alkaid.write(circuit)


def test_what_alkaid_saves_is_read(tmp_path):
    """Table digests match alkaid's as well; alkaid drops lutjax ports."""
    circuit = circuits.simplify(drawn(3))
    program = loaded(circuit, tmp_path)
    for table in program.lookup_tables:
        assert type(table)(table.float_table).spec == table.spec
    program.save(tmp_path / "saved.json.gz")
    result = circuits.alkaid.read(gzip.decompress((tmp_path / "saved.json.gz").read_bytes()))
    assert [(port.name, port.count, port.format) for port in result.inputs] == [("x", 4, Format(3))]
    given = numbers(circuit, 256)
    np.testing.assert_array_equal(answers(result, given), answers(circuit, given))


def test_its_command_takes_the_file(tmp_path):
    """alkaid's command checks samples in its Python interpreter, which is stricter about numeric types than the C++ interpreter."""
    loaded(circuits.simplify(drawn(3)), tmp_path)
    words = (
        "-c",
        "from alkaid._cli import main; main()",
        "convert",
        "c_alkaid.json",
        "out",
        "--flavor",
        "vhdl",
    )
    subprocess.run([sys.executable, *words], cwd=tmp_path, check=True)
    assert "entity" in "".join(path.read_text() for path in (tmp_path / "out").rglob("*.vhd"))
