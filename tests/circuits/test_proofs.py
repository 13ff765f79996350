"""Proofs for damaged export folders and false manifests: one FAIL line, and the remaining checks continue."""

import dataclasses
import json
import re
import shutil
import sys
import tracemalloc

import numpy as np
import pytest
from commands import command
from example_circuits import random_circuit
from exports import put, state, write
from flax import nnx

from lutjax import circuits
from lutjax.circuits import abc, deployment, language_model, page, proofs, simulate, verilog
from lutjax.circuits.deployment import MANIFEST, VECTORS
from lutjax.training import export as exporting

pytestmark = pytest.mark.usefixtures("without_typechecking")
without_tools = pytest.mark.usefixtures("without_any_tool")
DIGESTS, STATED, PORTS = (
    "digests of all files",
    f"{MANIFEST} = the files",
    "life.v, its ports = life.json",
)
MODEL = "life.json = the model in JAX"


@pytest.fixture(scope="module")
def life(tmp_path_factory):
    """Read-only Game of Life export in every format."""
    return write(tmp_path_factory.mktemp("life") / "out", "life", ())


@pytest.fixture
def without_any_tool(monkeypatch):
    """Hide the compiler, Node.js, simulator and ABC, which dominate the test time."""
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(simulate, "find", lambda: None)
    monkeypatch.setattr(abc, "find", lambda: None)


@pytest.fixture
def folder(life, tmp_path):
    """Copy the export."""
    return shutil.copytree(life, tmp_path / "out")


def verified(folder, **options):
    """Return failures with their reasons; check that every other check ran and each file is counted once."""
    result = proofs.verify(folder, **options)
    words = proofs.coverage(folder, result)
    n, *numbers = map(
        int,
        re.findall(r"(?<![\w.])\d+(?= (?:files|proved|failed|not proved|compared|of make))", words),
    )
    listed = set(deployment.entries(folder)) - {MANIFEST}
    missing = {name for proof in result for name in proof.proves} | set(_files(folder))
    assert n == len(listed | missing) - ("of make" in words and numbers[-1])
    assert sum(numbers) - ("of make" in words and numbers[-1]) == n, words
    assert not any("\n" in str(proof) for proof in result)
    return {proof.name: proof.detail for proof in result if proof.passed is False}


def _files(folder):
    try:
        files = deployment.read_manifest(folder)["files"]
    except deployment.DamagedManifestError as error:
        files = error.found.get("files", {})
    return files if isinstance(files, dict) else {}


def lines(result):
    return result.output.strip().splitlines()


# ------------------------------------------------------------------------------------- the same set
@without_tools
def test_the_last_line_names_what_no_tool_has_proved(life):
    result = command("verify", life)
    assert result.exit_code == 0
    assert lines(result)[-1].endswith(
        " s. 14 files: 7 proved; 2 compared with their digests alone (Makefile, life.dot); "
        "3 not proved (life.c, life.h, life_test.c), as gcc or clang or cc is not found; "
        "1 not proved (life_testbench.v), as iverilog is not found; "
        "1 not proved (life.v), as iverilog is not found, and pyosys is not installed."
    )


@without_tools
@pytest.mark.parametrize(
    "name", ["life.v", "life.blif", "life.html", "life_test.c", "Makefile", "vectors.json"]
)
def test_a_file_that_the_manifest_does_not_list(name, folder):
    state(folder, files={one: facts for one, facts in _files(folder).items() if one != name})
    failed = verified(folder)
    assert failed.pop(DIGESTS) == f"{name} is not listed in manifest.json"
    assert failed == {STATED: f"{name} is not stated"}
    result = command("verify", folder)
    assert result.exit_code == 1
    assert f"1 failed ({name})" in lines(result)[-1]


@without_tools
@pytest.mark.parametrize("name", ["notes.txt", "build/notes.txt", "other.json", "again.v"])
def test_files_of_others(name, folder):
    (folder / "build").mkdir()
    (folder / "build" / "life_test").touch()
    (folder / name).write_text("{}")
    assert verified(folder) == {DIGESTS: f"{name} is not listed in manifest.json"}
    assert "1 of make not looked at" in lines(command("verify", folder))[-1]
    if "/" not in name:  # and if it is listed, with its number of bytes
        facts = {"format": "dot", "bytes": 2, "sha256": deployment.digest_of(folder / name)}
        state(folder, files={**_files(folder), name: facts})
        assert verified(folder) == {STATED: f'{name} is stated as "dot"'}


@without_tools
def test_names_that_end_as_those_of_tests(tmp_path):
    """Files with these names were mistaken for tests and never proved."""
    for name, file in (("some_testbench", "some_testbench.v"), ("some_test", "some_test.c")):
        folder = write(tmp_path / name, name, ())
        manifest = deployment.read_manifest(folder)
        checks = proofs.checks_of(folder, manifest, None)
        assert sum(file in check.proves for check in checks) == (2 if file.endswith(".v") else 1)
        assert not verified(folder)


@without_tools
def test_inputs_that_no_file_can_tell_of(folder):
    """A circuit with 16 million declared inputs: thousands of random samples for each would take gigabytes."""
    result = json.loads((folder / "life.json").read_text())
    result["inputs"][0]["count"], result["about"] = 16_000_000, {}
    put(folder, "life.json", json.dumps(result).encode())
    tracemalloc.start()
    try:
        failed = verified(folder)
        assert tracemalloc.get_traced_memory()[1] < 20 << 20
    finally:
        tracemalloc.stop()
    message = r"life\.json has 16000000 numbers of inputs, more than it and vectors\.json have bytes, \d+; a sample has a number for each"
    for name in ("life.json in NumPy = vectors.json", "life.html in NumPy = life.json"):
        assert re.fullmatch(message, failed[name])


def test_random_inputs_take_memory_within_bounds():
    for n_bits in (17, 4096, 8192, 10**5, 1 << 24):
        n = proofs._random_samples(n_bits)
        assert n == proofs.RANDOM_SAMPLES or n * n_bits <= proofs.MOST_BITS
        assert n % 64 == 0 or n == 1


# ------------------------------------------------------------------------------------- what the manifest states
WRONG = {
    "registers": (1, "registers is 1, expected", "life.v has no registers; manifest.json states registers: 1"),
    "latency": (7, "latency is 7, expected 0"),
    "inputs": ([], "inputs is [], expected [{"),
    "outputs": ([{"name": "z"}], 'outputs is [{"name": "z"}], expected [{'),
    "name": ("other", 'name is "other", expected "life"'),
    "circuit": ("other.json", 'circuit is "other.json", expected "life.json"'),
    "about": ({"kind": "network"}, 'about is {"kind": "network"}, expected {"kind": "automaton"'),
    "statistics": ({"gates": 1}, 'statistics is {"gates": 1}, expected {'),
    "vectors": ({"samples": 1000, "source": "many"}, 'vectors is {"samples": 1000, "source": "many"}, expected {"samples": 8'),
    "lutjax": (3, "'lutjax' is 3; expected a text"),
    "kind": ("network", "'kind' is \"network\"; expected circuit or language model"),
    "version": (True, "'version' is true; expected a whole number"),
    "run": ([1], "run is [1]; expected an object with 'kind'"),
    "files": ([], "'files' is []; expected an object"),
}  # fmt: skip


@without_tools
@pytest.mark.parametrize("field", WRONG)
def test_a_field_of_the_manifest_that_is_not_so_or_missing(field, folder):
    value, message, *ports = WRONG[field]
    before = (folder / MANIFEST).read_bytes()
    state(folder, **{field: value})
    failed = verified(folder)
    if field == "registers":  # the latency that is stated is that of no registers
        message = "latency is 0, expected 4"
        assert failed.pop(PORTS) == ports[0]
    digests = {DIGESTS} if field == "files" else set()
    assert message in failed.pop(STATED)
    assert failed.keys() <= digests
    (folder / MANIFEST).write_bytes(before)
    state(folder, field)
    failed = verified(folder)
    assert re.search("has no '|is not stated", failed.pop(STATED))
    assert failed.keys() <= digests


@without_tools
def test_a_manifest_without_any_field(folder):
    state(folder, *WRONG)
    assert verified(folder).keys() == {STATED, DIGESTS}
    result = command("verify", folder)
    assert result.exit_code == 1
    assert "PASS     life.blif in NumPy = life.json" in result.output


@without_tools
@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"\xff\xfe", b"null", b"[" * 200_000, b'{"version": 1}']
)
def test_a_manifest_that_is_none(content, folder):
    (folder / MANIFEST).write_bytes(content)
    failed = verified(folder)
    assert set(failed) == {DIGESTS, STATED}
    assert "is damaged" in failed[STATED]
    assert failed[DIGESTS] == f"{MANIFEST} is damaged and lists no files, so none has a digest"
    result = command("verify", folder)
    assert "not listed" not in result.output
    assert "0 failed" not in lines(result)[-1]
    assert "(Makefile, life.dot), as manifest.json has no digests" in lines(result)[-1]
    with pytest.raises(deployment.DeploymentError, match="is damaged"):
        write(folder)


@without_tools
def test_a_manifest_with_names_that_cannot_be(folder):
    """Names too long for any disk, outside the folder, or invalid; and a kind different from the files' kind."""
    files = _files(folder)
    for name in ("a" * 5000, "../out/life.v", "\0", "a\nb"):
        state(folder, files={**files, name: files["life.v"]})
        failed = verified(folder)
        assert set(failed) == {STATED, DIGESTS}
        assert "expected an export file name" in failed[STATED]
    state(folder, files=files, kind="language model", facts={})
    assert set(verified(folder)) == {STATED}
    (folder / MANIFEST).write_text('{"name": ' + "[" * 500 + "]" * 500 + "}")
    assert set(verified(folder)) == {STATED, DIGESTS}


@without_tools
def test_a_number_of_bytes_that_is_not_so(folder):
    files = _files(folder)
    state(folder, files={**files, "life.dot": {**files["life.dot"], "bytes": 7}})
    n = (folder / "life.dot").stat().st_size
    assert verified(folder) == {STATED: f"life.dot has {n} bytes, stated are 7"}


def test_a_manifest_of_a_later_version(folder):
    state(folder, version=2, kind="tree")
    with pytest.raises(
        deployment.DeploymentError, match=r"has version 2; expected 1\. Upgrade lutjax"
    ):
        proofs.verify(folder)


@without_tools
def test_registers_that_are_stated_as_none(tmp_path):
    folder = write(tmp_path / "out", "life", ("verilog",), registers=2)
    assert not verified(folder)
    state(folder, registers=0, latency=0)
    assert verified(folder) == {PORTS: "life.v has registers; manifest.json states registers: 0"}


@without_tools
def test_ports_that_verilog_declares(folder):
    text = (folder / "life.v").read_text()
    for changed, message in (
        (
            ("[8:0] x", "[7:0] x"),
            "life.v declares x as input wire [7:0], expected input wire [8:0]",
        ),
        (
            ("wire [0:0] y", "wire [0:0] y,\n  input wire z"),
            "declares z as input wire, expected None",
        ),
        (
            ("module life", "/* module life ( */ module  wife"),
            "life.v cannot be read: it declares 0 modules 'life'",
        ),
        ((text, text + text), "it declares 2 modules 'life'"),
        ((text, "\0"), "it declares 0 modules"),
    ):
        put(folder, "life.v", text.replace(*changed).encode())
        assert message in verified(folder)[PORTS]


# ------------------------------------------------------------------------------------- damaged files
def damaged(content):
    """Return damaged variants by name."""
    middle = len(content) // 2
    return {
        "empty": b"",
        "cut off": content[:middle],
        "no UTF-8": content[:middle] + b"\xff\xfe\x00" + content[middle:],
        "brackets": b"[" * 200_000,
        "another": b"{}\n",
    }


ALWAYS = {"life.json", "life.blif", "life.aig", "life.aag", "life.html", "life.v", VECTORS}
"""Files read without any tool."""


@without_tools
@pytest.mark.parametrize("damage", damaged(b""))
@pytest.mark.parametrize(
    "name", [*sorted(ALWAYS), "life.c", "life_test.c", "life_testbench.v", "life.dot"]
)
def test_a_damaged_file_fails_alone(name, damage, life, folder):
    """Damage the file first without, then with a matching manifest."""
    (folder / name).write_bytes(damaged((life / name).read_bytes())[damage])
    failed = verified(folder)
    assert failed.pop(DIGESTS) == f"{name} is not what was written"
    put(folder, name, (folder / name).read_bytes())
    assert set(failed) == set(verified(folder))
    assert any(name in check for check in failed) == (name in ALWAYS), failed
    if name not in ("life.json", VECTORS):  # with which all others are compared
        assert len(failed) == (name in ALWAYS)
    else:
        assert DIGESTS not in failed
        assert PORTS in failed or name == VECTORS


@without_tools
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda found: found["samples"].clear(), "there are no samples; expected at least one"),
        (lambda found: found.pop("samples"), "vectors has no 'samples'"),
        (lambda found: found.update(samples=[1]), "samples[0] is 1; expected an object with 'inputs'"),
        (lambda found: found.update(samples={"0": 1}), "vectors: 'samples' is {\"0\": 1}; expected a list"),
        (lambda found: found.update(source=5), "vectors: 'source' is 5; expected a text"),
        (lambda found: found["samples"][3].pop("outputs"), "samples[3] has no 'outputs'"),
        (lambda found: found["samples"][3]["inputs"].update(x="101"), "samples[3]: inputs: 'x' is \"101\"; expected a list"),
        (lambda found: found["samples"][3]["inputs"].update(z=[1]), 'samples[3] has inputs ["x", "z"]; the first has ["x"]'),
        (lambda found: found["samples"][3]["inputs"]["x"].append(1), "expected 9 numbers, as before"),
        (lambda found: found["samples"][3]["inputs"]["x"].__setitem__(2, None), "samples[3]: inputs: \"x\" is [1"),
        (lambda found: found["samples"][3]["inputs"]["x"].__setitem__(2, 2), "inputs of the port x: Format.encode: numbers[3, 2] is 2"),
        (lambda found: found["samples"][3]["inputs"]["x"].__setitem__(2, 10**40), "inputs of the port x: Format.encode: numbers is object"),
        (lambda found: found["samples"][3]["outputs"]["y"].__setitem__(0, -1), "outputs of the port y: Format.encode: numbers[3, 0] is -1"),
        (lambda found: found["samples"][3]["outputs"]["y"].__setitem__(0, 0.5), "outputs of the port y: Format.encode: numbers[3, 0] is 0.5"),
        (lambda found: [s["inputs"].update(z=s["inputs"].pop("x")) for s in found["samples"]], "inputs have {'z': 9} values per sample"),
    ],
)  # fmt: skip
def test_damaged_vectors(change, message, folder):
    result = json.loads((folder / VECTORS).read_bytes())
    for sample in result["samples"]:
        sample["inputs"]["x"][0] = 1
    change(result)
    put(folder, VECTORS, json.dumps(result).encode())
    failed = verified(folder)
    assert set(failed) == {
        STATED,
        f"life.json in NumPy = {VECTORS}",
        "life.html in NumPy = life.json",
    }
    for detail in failed.values():
        assert detail.startswith(f"{VECTORS} cannot be read: ")
        assert message in detail


@without_tools
def test_a_page_of_another_circuit(folder):
    for circuit, message in (
        (random_circuit(1, 9, 30, ports={"y": (1, deployment.Port("y").format)}), "samples differ"),
        (random_circuit(1, 9, 30), "samples differ"),
        (random_circuit(1, 8, 30), "life.html runs Circuit(x: 8 x uint1"),
    ):
        put(folder, "life.html", circuits.page.write(circuit).encode())
        assert message in verified(folder)["life.html in NumPy = life.json"]


@pytest.mark.parametrize(("outputs", "shown"), [("class", 10), ("bits", 5)])
def test_a_page_may_show_votes(outputs, shown, tmp_path):
    """Prove pages if the circuit returns the first class with the most votes, or the counted bits."""
    from lutjax import circuits
    from lutjax.layers.nnx import GroupSum, LogicGates

    layers = [LogicGates(6, 40, rngs=nnx.Rngs(0)), GroupSum(shown)]
    circuit, votes = (
        circuits.from_model(layers, outputs=one, about={"image": [2, 3]})
        for one in (outputs, "votes")
    )
    folder = write(tmp_path / "out", "life", ("html",), circuit=circuit)
    text = circuits.page.write(votes)
    put(folder, "life.html", text.encode())
    assert not verified(folder)
    other = dataclasses.replace(votes, tables=tuple(table ^ 1 for table in votes.tables))
    put(
        folder,
        "life.html",
        text.replace(page.encode_gates(votes), page.encode_gates(other)).encode(),
    )
    assert verified(folder).keys() >= {"life.html in NumPy = life.json"}


@pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not found")
def test_tests_of_c_that_always_pass(life, folder):
    """Compare the program with the vectors independently from the shipped test; accept arbitrary compiler output."""
    put(folder, "life_test.c", b"int main(void)\n{\n    return 0;\n}\n")
    text = (life / "life.c").read_bytes()

    def failed():
        checks = proofs.checks_of(folder, deployment.read_manifest(folder), None)
        (run,) = (run for name, run, _ in checks if name == f"C, compiled = {VECTORS}")
        try:
            run()
        except proofs.FailedError as error:
            return str(error)
        return ""

    assert not failed()
    put(folder, "life.c", re.sub(rb"y\[0\] = ", b"y[0] = ~", text))
    assert failed().endswith("wrong")
    put(folder, "life.c", text + b'\n#error "\xff\xfe"\n')
    assert failed().startswith("gcc: ")


# ------------------------------------------------------------------------------------- the model
@without_tools
def test_the_model_of_a_manifest(folder, tmp_path):
    """Exports without a run, with an invalid run, and with choices invalid for an export."""

    def model(folder):
        result = proofs.verify(folder, oracle=exporting.oracle)
        return next((proof.passed, proof.detail) for proof in result if proof.name == MODEL)

    assert model(folder) == (None, "the export was made without a run")
    run = {"kind": "ca", "folder": str(tmp_path), "step": 1, "digest": "0"}
    state(folder, run=run)
    passed, detail = model(folder)
    assert passed is None
    assert "holds no checkpoint" in detail or "is not the folder of a run" in detail
    state(folder, run={**run, "folder": 5})
    assert model(folder) == (None, f"{MANIFEST} is damaged")
    for choices in (None, {"inputs": "bits"}, {"inputs": "bits", "outputs": None, "lut": "6"}):
        with pytest.raises(proofs.FailedError, match="choices"):
            exporting._choices({"choices": choices})


@without_tools
def test_a_model_of_other_inputs(life):
    oracle = proofs.Oracle([np.zeros((3, 8), np.uint8)], lambda x: [x[:, :1]])
    result = {proof.name: proof for proof in proofs.verify(life, oracle=lambda manifest: oracle)}
    assert result[MODEL].passed is False
    assert "the model has [8] numbers of inputs" in result[MODEL].detail


# ------------------------------------------------------------------------------------- programs of language models
@pytest.fixture(scope="module")
def exported_model(rounded, tmp_path_factory):
    """Read-only language-model export."""
    texts = [rounded.text(b"ab", 5, temperature=800, top_k=256, seed=1)]
    files = {
        **rounded.integer.to_c(),
        language_model.TEXTS: language_model.texts_to_json(texts).encode(),
    }
    n, fraction, logit_fraction = (
        rounded.integer.n_values,
        rounded.integer.fraction,
        rounded.integer.unembed.fraction,
    )
    facts = {"tables": "int16", "values": n, "table_bytes": 2 * n, "fraction": fraction}
    facts |= {"logit_fraction": logit_fraction, "context": 6}
    written = {name: ("c", content) for name, content in files.items()}
    folder = tmp_path_factory.mktemp("lm") / "out"
    manifest = deployment.manifest_of("language model", written, {"facts": facts}, None)
    deployment.write(folder, written, manifest)
    return folder


@pytest.fixture
def model_folder(exported_model, tmp_path):
    """Copy the export."""
    return shutil.copytree(exported_model, tmp_path / "out")


HOLDS = "the C program = the model in JAX"


def test_a_program_is_proved(exported_model):
    if shutil.which("gcc") is None:
        pytest.skip("gcc is not found")
    result = command("verify", exported_model)
    assert result.exit_code == 0, result.output
    assert lines(result)[-1].endswith(
        "9 files: 8 proved; 1 compared with its digest alone (Makefile)."
    )


@pytest.mark.parametrize(("change", "message"), [
    (lambda texts: texts.clear(), "it holds []; expected a list of texts"),
    (lambda texts: texts[0].pop("seed"), "text 0 has no 'seed'"),
    (lambda texts: texts[0].update(more=1, seed="1"),
        "text 0: 'seed' is \"1\"; expected a whole number"),
    (lambda texts: texts[0].update(prompt="xyz"), "non-hexadecimal"),
    (lambda texts: texts[0].update(prompt=""), "text 0 has a prompt of 0 bytes"),
    (lambda texts: texts[0].update(continuation=""), "0 bytes; no program writes that"),
    (lambda texts: texts[0].update(temperature=-1), "a temperature of -1 thousandths"),
    (lambda texts: texts[0].update(top_k=10**30), "no program writes that"),
    (lambda texts: texts[0]["logits"].pop(), "expected 256 whole numbers"),
    (lambda texts: texts[0]["logits"].__setitem__(0, "a"), "expected 256 whole numbers"),
    (lambda texts: texts.__setitem__(0, [[[1]]]), "text 0 is [[[1]]]; expected an object"),
])  # fmt: skip
def test_damaged_texts(change, message, model_folder, monkeypatch):
    """Nothing is compiled here, so any compiler suffices."""
    monkeypatch.setattr(proofs, "_tool", lambda *names: "none")
    texts = json.loads((model_folder / language_model.TEXTS).read_bytes())
    change(texts)
    put(model_folder, language_model.TEXTS, json.dumps(texts).encode())
    failed = verified(model_folder)
    assert set(failed) == {HOLDS}
    assert failed[HOLDS].startswith("texts.json cannot be read: ")
    assert message in failed[HOLDS]


@without_tools
def test_a_program_that_is_not_what_is_stated(model_folder):
    folder = model_folder
    facts = deployment.read_manifest(folder)["facts"]
    state(folder, facts={**facts, "context": 9, "tables": "int8"})
    assert verified(folder) == {
        STATED: 'tables is "int8", expected "int16"; context is 9, expected 6'
    }
    state(folder, facts=facts)
    header = (folder / "model.h").read_bytes()
    put(folder, "model.h", header.replace(b"LM_WINDOW", b"LM_WINDOWS"))
    assert "model.h does not state WINDOW" in verified(folder)[STATED]
    put(folder, "model.h", header.replace(b"LM_TABLES_IN_FILE 0", b"LM_TABLES_IN_FILE 1"))
    assert verified(folder) == {STATED: "tables.bin is not stated"}
    put(folder, "model.h", header)
    (folder / "notes.txt").write_text("mine")
    assert verified(folder) == {DIGESTS: "notes.txt is not listed in manifest.json"}
    state(folder, "kind")
    assert set(verified(folder)) == {STATED, DIGESTS}


def test_registers_of_a_module_are_declared():
    circuit = random_circuit(0, 4, 20)
    for registers in (0, 2):
        text = verilog.write(circuit, "some", registers=registers)
        assert verilog.declared(text, "some") == verilog.ports_of(circuit, registers)
    assert list(verilog.ports_of(circuit, 2))[:4] == list(verilog.CONTROL)


def test_the_circuit_beside_an_encoding_of_columns(tmp_path):
    """Find the circuit even if a damaged manifest does not name its file."""
    for name in ("columns.json", "people.json"):
        (tmp_path / name).touch()
    assert proofs._Export(tmp_path, {}).name == "people"
    (tmp_path / "people.json").unlink()
    assert proofs._Export(tmp_path, {}).name == "columns"


def test_compilers_say_what_is_wrong(tmp_path):
    """Report the first error, not the trailing source excerpt."""
    said = "print('x.c: In function f:'); print('x.c:1:2: error: unknown type'); print('   | ^'); raise SystemExit(1)"
    with pytest.raises(proofs.FailedError, match=r"x.c:1:2: error: unknown type$"):
        proofs._call(sys.executable, "-c", said, cwd=tmp_path)
