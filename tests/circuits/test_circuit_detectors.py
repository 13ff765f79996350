"""Integer lookup layers and language models: C99 compared with NumPy and lutjax ops, bit for bit."""

import dataclasses
import functools
import itertools
import re
import subprocess
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from c_programs import CONFIG, FLAGS, KEPT, SLOTS, layer_of, model_of, run, ties
from flax import nnx
from tools import compiled

import lutjax
from lutjax.circuits import detectors, language_model
from lutjax.circuits.detectors import IntegerLUT
from lutjax.circuits.language_model import DifferenceError, Draws
from lutjax.layers.nnx import LUT
from lutjax.models import GPT, GPTConfig, LUTTransformer
from lutjax.training import integers
from lutjax.training.errors import RunError

LARGEST = 2**31 - 1


# ------------------------------------------------------------------------------------- layers
def test_rounded_layers(programs):
    groups = layer_of("groups")
    weights, anchors = np.asarray(groups.weights[...]), np.asarray(groups.anchors[...])
    options = {"in_features": 6, "groups": 2, "epsilon": 0.4, "input_fraction": 2}
    made = {
        t: detectors.rounded(weights, anchors, tables=t, **options)
        for t in ("int8", "int16", "int32")
    }
    in_c, rng = programs(made), np.random.default_rng(1)
    x = rng.integers(-6, 6, (50, 6))
    op = functools.partial(lutjax.lut, anchors=jnp.asarray(anchors), groups=2, epsilon=0.4)
    halves = jnp.asarray(x.reshape(50, 2, 3) / 4, jnp.float32)
    quantized, int8 = lutjax.quantize_tables(jnp.asarray(weights), groups=2), made["int8"]
    exponents = np.asarray(quantized.exponents)
    np.testing.assert_array_equal(int8.values, quantized.values)
    np.testing.assert_array_equal(int8.shifts - int8.fraction, exponents.ravel())
    expected = np.asarray(op(halves, weights)).reshape(50, 4)
    for name, integer in made.items():
        assert (integer.values.dtype, integer.dead_zone) == (name, 2)
        assert max(integer.bound) <= LARGEST
        np.testing.assert_array_equal(in_c(name, x), integer(x))
        error = np.abs(integer(x) / 2.0**integer.fraction - expected)
        assert error.max() <= 3 * (2.0 ** (integer.shifts.max() - integer.fraction) + 1e-6)
    scale = np.repeat(np.ldexp(np.float32(1), exponents), 3, 0)[:, None]
    exact = op(halves, quantized.values.astype(jnp.float32) * scale).reshape(50, 4)
    np.testing.assert_array_equal(int8(x) / 2.0**int8.fraction, exact)


def test_the_largest_sums_fit(programs):
    values = np.array([[[LARGEST // 2 + 1, -LARGEST]], [[LARGEST // 2, 0]]], np.int32)
    layer = IntegerLUT(2, np.zeros((2, 0, 2), int), values, np.zeros(2, int))
    assert layer.bound == (LARGEST, LARGEST)
    shifted = IntegerLUT(1, np.zeros((1, 0, 2), int), np.array([[[-1]]], np.int8), np.array([30]))
    in_c = programs({"largest": layer, "shifted": shifted})
    x = np.array([[LARGEST, -LARGEST - 1]])
    assert layer(x).tolist() == in_c("largest", x).tolist() == [[LARGEST, -LARGEST]]
    assert shifted(np.array([0])) == in_c("shifted", np.array([[0]]))[0] == -(2**30)
    values[1, 0, 0] += 1
    with pytest.raises(ValueError, match="sums can reach 2147483648, beyond int32"):
        dataclasses.replace(layer)


def test_a_flipped_entry_of_a_layer_is_found(programs):
    integer = detectors.from_layer(layer_of("dense"))
    x = np.random.default_rng(2).integers(-3, 4, (3, 4))
    values = integer.values.copy()
    values[6, integer.rows(x)[1, 6], 2] ^= 1
    wrong = programs({"wrong": dataclasses.replace(integer, values=values)})("wrong", x) != integer(
        x
    )
    assert wrong[1].tolist() == [False, False, True, False, False]


@pytest.mark.parametrize(("change", "message"), [
    ({"values": np.zeros((7, 16, 5), np.int8)}, "expected \\[T, C, 2\\] and \\[T, 2\\*\\*C, K\\]"),
    ({"values": np.zeros((7, 32, 5), np.int64)}, "values are int64"),
    ({"groups": 2}, "groups is 2; it must divide out_features, 5"),
    ({"shifts": np.zeros(4, int)}, "values have 5 columns; expected one for each of 4 outputs"),
    ({"shifts": np.full(5, 31)}, "shifts are from 31 to 31; expected 0 to 30"),
    ({"in_features": 3}, "anchors are from 0 to 3; expected 0 to 2"),
    ({"targets": np.full((1, 1, 5), 5)}, "targets are from 5 to 5; expected -1 to 4"),
    ({"targets": np.zeros((2, 1, 5), int)}, "targets have shape \\[2, 1, 5\\]"),
    ({"in_features": 2**16 + 1}, "a group has at most 65536 inputs"),
])  # fmt: skip
def test_layers_that_do_not_fit(change, message, without_typechecking):
    anchors, values = np.tile([[0, 3]], (7, 5, 1)), np.zeros((7, 32, 5), np.int8)
    layer = IntegerLUT(4, anchors, values, np.zeros(5, int))
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(layer, **change)


def lut(weight=None, **options):
    layer = LUT(4, 2, n_detectors=3, n_anchors=2, rngs=nnx.Rngs(0), **options)
    if weight is not None:
        layer.weights[0, 0, 0] = weight
    return layer


def kept():
    return detectors.from_layer(lut(**KEPT))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: detectors.from_layer(nnx.Linear(2, 2, rngs=nnx.Rngs(0))), "layer is a Linear"),
        (lambda: detectors.from_layer(lut(), tables="int4"), "tables is 'int4'"),
        (lambda: detectors.from_layer(lut(weights_init=ties), fraction=29), r"fit int16 and .* with a fraction of at most 1\d, not 29"),
        (lambda: detectors.from_layer(lut(), fraction=31), "fraction is 31; it must be from 0 to 30"),
        (lambda: detectors.from_layer(lut(jnp.inf)), "infinite or NaN entries"),
        (lambda: detectors.from_layer(lut(2.0**40)), "with a fraction of at most -1; scale them down"),
        (lambda: detectors.from_layer(lut(accumulate=lutjax.FixedPoint(1000))), r"the scale 1000; .* has the scale 2\*\*fraction"),
        (lambda: detectors.from_layer(lut(**KEPT), fraction=8), "the scale 1024, and fraction is 8"),
        (lambda: kept()(np.zeros(3, int)), r"x has shape \[3\]; expected \[\.\.\., 4\]"),
        (lambda: kept()(np.zeros(4)), "x is float64; expected whole numbers"),
        (lambda: kept()(np.full(4, 2**31)), "expected numbers that fit int32"),
        (lambda: kept().to_c("No-name"), "name is 'No-name'"),
        (lambda: kept().to_c(), "the tables have 24 entries, more than the 23"),
        (lambda: detectors.rounded(np.zeros((1, 2, 2)), SLOTS[:, :, :2], in_features=4, targets=SLOTS), "so out_features is required"),
    ],
)  # fmt: skip
def test_layers_without_an_integer_form(call, message, without_typechecking, monkeypatch):
    monkeypatch.setattr(detectors, "_MOST_IN_C", 23)
    with pytest.raises((TypeError, ValueError), match=message):
        call()


# ------------------------------------------------------------------------------------- language models
def status(program, *words, given=b""):
    return subprocess.run([program, *map(str, words)], input=given, capture_output=True).returncode


def logits_in_c(program, prompt, *words):
    return list(map(int, run(program, "-n", 1, "-l", *words, given=prompt).split()))


def test_logits_are_those_of_the_model_in_jax(rounded, program):
    text = b"a window slides over it"
    logits = nnx.jit(lambda model, tokens: model(tokens, deterministic=True))(
        rounded.model, np.frombuffer(text, np.uint8).astype(np.int32)
    )
    units = np.asarray(logits, np.float64) * 2.0**rounded.integer.unembed.fraction
    np.testing.assert_array_equal(units, np.round(units))
    for n in (1, 2, 7, len(text)):
        assert logits_in_c(program, text[:n]) == units[n - 1].tolist()


def test_the_program_writes_bytes_of_the_model(rounded, program):
    drawn = rounded.generate(b"It was", 9, temperature=1.25, top_k=20, seed=3)
    assert run(program, "-n", 9, "-t", "1.25", "-k", 20, "-s", 3, given=b"It was") == drawn
    likeliest = rounded.generate(b"It was", 9, temperature=0)
    assert run(program, "-n", 9, "-t", 0, given=b"It was") == likeliest


def test_tables_in_a_file(rounded, compiler, tmp_path):
    """A detector reads exactly one row, so only a flip in this row is detected."""
    program = compiled(tmp_path, rounded.integer.to_c(tables_in_file=True), *FLAGS)
    tables, prompt = tmp_path / "tables.bin", b"a prompt"
    expected, content = (
        logits_in_c(program, prompt),
        tables.read_bytes(),
    )  # found beside the program
    assert logits_in_c(program, prompt, "-m", tables) == expected
    text = rounded.text(prompt, 5, temperature=0, top_k=256, seed=0)
    assert expected == list(text.logits)
    (tmp_path / "texts.json").write_text(language_model.texts_to_json([text]))
    assert (
        language_model.verify(tmp_path, compiler=compiler)
        == "5 bytes of 1 texts, and 1 times 256 logits"
    )
    actual = []
    for row in range(8):
        entry = (
            rounded.integer.n_values - 256 * (8 - row) + 77
        )  # of the last detector of the last tables
        flipped = bytearray(content)
        flipped[2 * entry] ^= 1
        tables.write_bytes(flipped)
        logits = logits_in_c(program, prompt, "-m", tables)
        if logits != expected:
            actual.append([k for k in range(256) if logits[k] != expected[k]])
            with pytest.raises(DifferenceError, match="text 0: 1 of 256 logits"):
                language_model.verify(tmp_path, compiler=compiler)
    assert actual == [[77]]
    for damaged in (content[:-1], content + b"\0"):
        tables.write_bytes(damaged)
        assert status(program, "-m", tables, given=prompt) == 2
    assert status(program, "-m", tmp_path / "none", given=prompt) == 2


@pytest.mark.parametrize(
    "words",
    [
        ("-n",), ("-n", "-1"), ("-n", "18446744073709551616"), ("-t", "0.1234"), ("-t", "1000.001"), ("-t", "."),
        ("-t", "1e3"), ("-k", "0"), ("-k", "257"), ("-s", "x"), ("-m", "tables.bin"), ("two", "prompts"),
    ],
)  # fmt: skip
def test_bad_words(program, words):
    assert status(program, *words, given=b"a prompt") == 2


def test_an_empty_prompt(program, rounded):
    assert status(program) == status(program, "") == 2
    with pytest.raises(ValueError, match="the prompt is empty"):
        rounded.generate(b"", 1)


def test_draws_in_c_are_those_in_python(program):
    header = (program.parent / "model.h").read_text()
    fraction = int(re.search(r"LM_LOGIT_FRACTION\s+(\d+)", header)[1])
    logits = np.array(logits_in_c(program, b"x"))
    for t, top_k, seed in itertools.product(
        ("0.001", "0.05", "1", "1000"), (1, 3, 256), (1, 2**64 - 1)
    ):
        draws = Draws(seed=seed, fraction=fraction, temperature=round(1000 * float(t)), top_k=top_k)
        result = run(program, "-n", 1, "-t", t, "-k", top_k, "-s", seed, given=b"x")
        assert result == bytes([draws(logits)])


def test_draws_follow_the_softmax():
    rng = np.random.default_rng(0)
    units = np.round(rng.normal(0, 3, 12) * 2**12).astype(np.int64)
    for temperature in (300, 1000, 5000):
        exact = np.exp((units - units.max()) / 2**12 / (temperature / 1000))
        draws = Draws(seed=temperature, fraction=12, temperature=temperature)
        weights = draws._weights((units.max() - units).astype(np.uint64)) / 2.0**31
        np.testing.assert_allclose(weights, exact, rtol=2e-4, atol=2e-9)
        n, p = 2000, exact / exact.sum()
        counts = np.bincount([draws(units) for _ in range(n)], minlength=12)
        assert (np.abs(counts - n * p) <= 5 * np.sqrt(n * p * (1 - p)) + 1).all()


def test_ties_take_the_first():
    logits = np.array([1, 5, 0, 5, 5, -9])
    assert Draws(seed=0, fraction=0, temperature=0)(logits) == 1
    draws = Draws(seed=0, fraction=0, temperature=1000, top_k=2)
    assert {draws(logits) for _ in range(50)} == {1, 3}


def outline(**changes):
    config = dataclasses.replace(CONFIG, **changes)
    return nnx.eval_shape(lambda: LUTTransformer(config, rngs=nnx.Rngs(0)))


def softmax_attention():
    config = GPTConfig(features=8, context=8, n_layers=1, n_heads=2)
    return nnx.eval_shape(lambda: GPT(config, rngs=nnx.Rngs(0)))


def with_weight(weight):
    model = model_of()
    model.unembed.weights[0, 0, 0] = weight
    return model


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: language_model.from_model(outline(vocab_size=100)), "vocab_size is 100; programs read and write bytes, 256 of them"),
        (lambda: language_model.from_model(outline(batch_norm=True)), "batch_norm is True, which needs floats between tables"),
        (lambda: language_model.from_model(outline(), tables="int32"), "tables is 'int32'; expected one of"),
        (lambda: language_model.from_model(with_weight(2.0**25)), r"too much for whole numbers below 2\*\*24"),
        (lambda: language_model.from_model(with_weight(jnp.nan)), "infinite or NaN entries"),
        (lambda: integers.thousandths(0.1234), "1234; in whole numbers it is from 0 to 1000"),
        (lambda: language_model.from_model(softmax_attention()), "no integer form of GPT, whose softmax attention computes with floats"),
        (lambda: integers.rounded_model(Path("runs/lm"), softmax_attention(), tables="int8"), "lutjax train lm --model lut"),
    ],
)  # fmt: skip
def test_models_without_an_integer_form(call, message):
    with pytest.raises((TypeError, ValueError, RunError), match=message):
        call()
