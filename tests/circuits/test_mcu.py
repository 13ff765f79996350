"""Microcontroller libraries compared with `Circuit`: arithmetic in NumPy, C on this machine and in simulators, and reports."""

import dataclasses
import functools
import importlib.util
import json
import shutil
import subprocess

import numpy as np
import pytest
import tools
from cases import slow
from commands import command
from example_circuits import life_circuit, random_circuit
from exports import put, write
from flax import nnx
from tools import require_tool

from lutjax.circuits import Circuit, Format, Port, _elf, _microcontroller, deployment, mcu, proofs
from lutjax.models import LogicClassifier, LogicClassifierConfig, LogicTreeNet, LogicTreeNetConfig

CHECKED = ("-fsanitize=undefined,address", "-fno-sanitize-recover=all")
STYLES = ("functions", "tables")
SEVERAL = {
    "inputs": {"x": (9, Format(5)), "n": (2, Format(12, 3, True)), "wide": (1, Format(40))},
    "outputs": {"y": (2, Format(3)), "low": (1, Format(4, 0, True)),
        "far": (2, Format(33, 0, True))},
}  # fmt: skip


@functools.cache
def several():
    return random_circuit(0, SEVERAL["inputs"], 60, ports=SEVERAL["outputs"])


@functools.cache
def classifier(layers=(40, 30), n_classes=3, n_thresholds=3, in_features=5):
    config = LogicClassifierConfig(
        in_features, n_classes, layers=layers, n_thresholds=n_thresholds, residual=0, noise=2
    )
    model = LogicClassifier(config, rngs=nnx.Rngs(0))
    if n_thresholds:
        drawn = np.random.default_rng(0).normal(0, 40, (in_features, n_thresholds))
        model.encoder.thresholds[...] = np.sort(drawn, 1).astype(np.float32)
    return model


@functools.cache
def both(model, inputs, outputs):
    return model.circuit(inputs=inputs, outputs=outputs), model.circuit(
        inputs="bits", outputs="bits"
    )


def same(circuit, layers=None, n=300):
    samples = mcu.random_samples(circuit, n)
    actual = _microcontroller.evaluate(_microcontroller.make_program(circuit, layers), samples)
    for y, expected in zip(
        actual, [*deployment.evaluate_ports(circuit, samples).values()], strict=True
    ):
        np.testing.assert_array_equal(y, expected)


def run_on_this_machine(folder, circuit, *flags, layers=None, style="auto"):
    """Compile a library and its test, and run the test on this machine."""
    files = mcu.write(circuit, "net", target="riscv32", layers=layers, style=style)
    given = dict(
        zip([p.name for p in circuit.inputs], mcu.random_samples(circuit, 200), strict=True)
    )
    test = mcu.c_test(circuit, *deployment.as_called(circuit.inputs, given), name="net")
    texts = {
        path.removeprefix("src/"): text for path, text in files.items() if path.startswith("src/")
    }
    subprocess.run([tools.compiled(folder, {**texts, "test.c": test}, *flags)], check=True)


# ------------------------------------------------------------------------------------- arithmetic
def trees():
    config = LogicTreeNetConfig((6, 6, 2), n_classes=2, kernels=(4,), layers=(20,), n_thresholds=2)
    model = LogicTreeNet(config, rngs=nnx.Rngs(0))
    model.encoder.thresholds[...] = np.array([[40.0, 90], [60, 200]], np.float32)
    return model


@pytest.mark.parametrize(
    "make",
    [
        lambda: (several(),),
        lambda: (life_circuit(),),
        slow(lambda: both(classifier(), "bits", "class")),
        lambda: both(classifier(), "bits", "votes"),
        lambda: both(classifier(n_thresholds=0), "bits", "class"),
        slow(lambda: both(trees(), "uint8", "class")),
        lambda: both(
            classifier(layers=(4,), n_classes=4, n_thresholds=1), "int8", "class"
        ),  # many equal votes
    ],
)
def test_a_program_of_any_circuit_is_the_circuit(make):
    same(*make())


@pytest.mark.parametrize(("inputs", "outputs"), [("uint8", "class"), ("fixed24.10", "votes")])
def test_thresholds_and_votes_are_counted(inputs, outputs):
    circuit, layers = both(classifier(), inputs, outputs)
    same(circuit, layers)
    program = _microcontroller.make_program(circuit, layers)
    assert all(load.bit is None for load in program.loads)
    assert len(program.operations) < len(circuit)


# ------------------------------------------------------------------------------------- C
WIRES = Circuit((Port("x", 3),), (Port("y", 4),), (), (), (0, 1, 2, 5))


@pytest.mark.parametrize(("make", "style"), [
    *((lambda: (several(),), style) for style in STYLES),
    *((lambda: (WIRES,), style) for style in STYLES),
    (lambda: both(classifier(), "fixed12.4", "class"), "functions"),
    (lambda: both(classifier(), "fixed24.3", "votes"), "tables"),
])  # fmt: skip
def test_c_is_the_circuit(tmp_path, make, style):
    require_tool("cc", *CHECKED)
    circuit, *layers = make()
    run_on_this_machine(tmp_path, circuit, *CHECKED, layers=(*layers, None)[0], style=style)


def test_functions_are_divided(tmp_path, monkeypatch):
    require_tool("cc")
    small = dataclasses.replace(mcu.TARGETS["riscv32"], chunk=20)
    monkeypatch.setitem(mcu.TARGETS, "riscv32", small)
    circuit = several()
    assert (
        mcu.write(circuit, "net", target="riscv32")["src/net.c"].count("static SEPARATE void part_")
        > 2
    )
    run_on_this_machine(tmp_path, circuit)


def test_a_sketch_has_a_sample():
    circuit, layers = both(classifier(), "uint8", "class")
    files = mcu.write(
        circuit, "net", target="avr", layers=layers, sample=[np.array([3, 1, 4, 1, 5])]
    )
    sketch = files["examples/net/net.ino"]
    assert "3u, 1u, 4u, 1u, 5u," in sketch
    assert "output_y[0] = net_predict(input_x);" in sketch
    assert json.loads(files["library.json"])["name"] == "net"
    assert "board = uno" in files["platformio.ini"]
    assert "uint8_t net_predict(const uint8_t *input_x);" in files["src/net.h"]


# ------------------------------------------------------------------------------------- simulators
@pytest.mark.parametrize("target", mcu.TARGETS)
def test_simulated_programs_are_the_circuit(target):
    style = "tables" if target == "avr" else "functions"
    require_tool("microcontroller", target)
    circuit, layers = both(classifier(layers=(150, 90), in_features=12), "uint8", "class")
    result = mcu.report(circuit, target, layers=layers, style=style)
    assert (result.samples, result.wrong, result.style) == (64, 0, style)
    assert 300 < result.flash < 20_000
    assert 10 < result.ram < 2_000
    assert result.instructions > len(_microcontroller.make_program(circuit, layers).operations)
    if target == "riscv32":
        assert result.cycles is None
    else:
        assert result.instructions < result.cycles < 4 * result.instructions
    stated = json.loads(result.to_json())
    assert (stated["flash"], stated["machine"]) == (result.flash, mcu.TARGETS[target].machine)
    assert "64 samples, all with the answers of the circuit" in str(result)


@pytest.mark.slow
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("target", mcu.TARGETS)
def test_simulated_programs_of_many_ports(target, style):
    require_tool("microcontroller", target)
    assert mcu.report(several(), target, style=style).wrong == 0
    circuit, layers = both(classifier(), "uint8", "votes")
    assert mcu.report(circuit, target, layers=layers, style=style).wrong == 0


def test_wrong_programs_are_found():
    require_tool("microcontroller", "riscv32")
    circuit = life_circuit()
    files = mcu.write(circuit, "life", target="riscv32")
    text = files["src/life.c"].replace("r[k] = 0;", "r[k] = 1;", 1)
    samples = mcu.random_samples(circuit, 16)
    assert (
        mcu.count_wrong_answers({**files, "src/life.c": text}, "life", circuit, "riscv32", samples)
        == 16
    )
    with pytest.raises(RuntimeError, match="the compiler failed"):
        mcu.count_wrong_answers({**files, "src/life.c": "int"}, "life", circuit, "riscv32", samples)


def test_what_is_missing_is_said(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name, *rest, **options: None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    result = mcu.report(life_circuit(), "cortex-m4")
    assert (result.flash, result.ram, result.instructions, result.cycles) == (
        None,
        None,
        None,
        None,
    )
    assert (
        "not compiled: neither arm-none-eabi-gcc nor ziglang was found: pip install ziglang"
        in str(result).splitlines()
    )
    monkeypatch.setattr(mcu, "_uncompiled_reason", lambda of: None)
    assert mcu.unsupported_reason("avr") == (
        "node was not found, which runs avr8js; install Node.js, then: npm install --global avr8js"
    )
    assert mcu.unsupported_reason("riscv32") == "unicorn was not found: pip install unicorn"


# ------------------------------------------------------------------------------------- errors
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: mcu.write(life_circuit(), target="z80"), "target is 'z80'; the known ones are cortex-m4, avr, riscv32"),
        (lambda: mcu.report(life_circuit(), target="z80"), "target is 'z80'; the known ones are"),
        (lambda: mcu.write(life_circuit(), target="avr", style="fast"), "style is 'fast'; expected"),
        (lambda: mcu.write(life_circuit(), "a b", target="avr"), "expected a word, and no C header name"),
        (lambda: mcu.write(Circuit((), (Port("y"),), (), (), (1,)), target="avr"), "has no inputs or no outputs"),
        (lambda: mcu.c_test(life_circuit(), np.zeros((0, 9), int)), "there are no samples"),
        (lambda: _elf.read(b""), "no ELF of 32 bits"),
        (lambda: _elf.read(b"\x7fELF\x02\x01" + bytes(60)), "no ELF of 32 bits"),
        (lambda: deployment.Options(("verilog",), target="avr"), "a microcontroller; formats must be only c"),
        (lambda: deployment.Options(("c",), registers=1, target="avr"), "supports no registers"),
        (lambda: deployment.Options(("c",), target="z80"), "target is 'z80'"),
    ],
)  # fmt: skip
def test_arguments_that_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_layers_of_another_network():
    circuit, layers = both(classifier(), "uint8", "class")
    wrong = dataclasses.replace(
        circuit, literals=tuple(literal ^ 1 for literal in circuit.literals)
    )
    (x,), (y,) = circuit.inputs, circuit.outputs
    for other, given, message in (
        (wrong, layers, "layers differs from the circuit on .* of 256 random"),
        (random_circuit(0, {"x": (6, x.format)}, 20, ports={"y": (1, y.format)}), layers, "15 thresholds, which do not fit the 6 numbers"),
        (random_circuit(0, {"x": (5, x.format)}, 20, ports={"y": (4, y.format)}), layers, "which cannot vote"),
        (circuit, life_circuit(), "no thresholds between them"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            mcu.write(other, target="avr", layers=given)


def test_networks_beyond_what_pointers_reach(monkeypatch):
    circuit = several()
    for address, what in (((1000, 1000), "bytes of tables"), ((1 << 15, 20), "bytes of values")):
        small = dataclasses.replace(mcu.TARGETS["avr"], functions=10, address=address)
        monkeypatch.setitem(mcu.TARGETS, "avr", small)
        with pytest.raises(
            ValueError, match=rf"{what}; pointers of avr reach .* Train a smaller network"
        ):
            mcu.write(circuit, target="avr")


# ------------------------------------------------------------------------------------- exports
def test_an_export_is_proved(tmp_path):
    folder = write(tmp_path / "life", formats=("c",), target="avr")
    assert deployment.entries(folder) == {
        *deployment.library("life"),
        *("life.json", "vectors.json", "manifest.json", "Makefile"),
    }
    for proof in proofs.verify(folder):
        assert proof.passed is not False, proof
    assert deployment.check_place(folder)


def test_a_changed_program_of_an_export_fails(tmp_path):
    require_tool("cc")
    folder = write(tmp_path / "life", formats=("c",), target="riscv32")
    text = (folder / "src" / "life.c").read_text()
    put(folder, "src/life.c", text.replace("r[k] = 0;", "r[k] = 1;", 1).encode())
    failed = [proof.name for proof in proofs.verify(folder) if proof.passed is False]
    simulated = [] if mcu.unsupported_reason("riscv32") else ["src/life.c, simulated = life.json"]
    assert failed == ["C, compiled = vectors.json", *simulated]


def test_errors_of_the_command_are_one_line(tmp_path):
    assert (
        "'z80' is not one of 'cortex-m4', 'avr', 'riscv32'"
        in command("export", tmp_path, "--target", "z80").output
    )
    for words, message in (
        (("--target", "avr"), "--target avr is for programs in C: add --format c."),
        (("--target", "avr", "--format", "c", "--registers", 2), "supports no registers"),
        (("--target", "avr", "--format", "jax"), "--format jax has no option --target"),
    ):
        result = command("export", tmp_path, *words)
        assert (result.exit_code, message in " ".join(result.output.split())) == (2, True), (
            result.output
        )
