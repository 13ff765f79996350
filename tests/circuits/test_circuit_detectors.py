"""Look-up layers and language models in whole numbers: C99 against NumPy and against lutjax's own ops, bit for bit."""

import dataclasses
import functools
import itertools
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tools
from commands import command
from flax import nnx
from small_runs import FOX

import lutjax
from lutjax.circuits import detectors, language_model
from lutjax.circuits.detectors import IntegerLUT
from lutjax.circuits.language_model import EXACT, DifferenceError, Draws, IntegerLanguageModel
from lutjax.layers.nnx import LUT, SparseLUT
from lutjax.models import GPT, GPTConfig, LUTTransformer, LUTTransformerConfig
from lutjax.training import integers, lm_runs, models, runs
from lutjax.training.errors import RunError
from lutjax.training.integers import Rounded
from lutjax.training.lm import TrainingConfig
from lutjax.training.models import State
from lutjax.training.text import split_text

FLAGS = (
    "-std=c99",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-O2",
    "-fsanitize=undefined",
    "-fno-sanitize-recover=all",
)
LARGEST = 2**31 - 1

DRIVER = """
#include <stdio.h>
%s
int main(int argc, char **argv)
{
    int32_t x[64], y[64];
    (void)argc;
    switch (argv[1][0] - 'a') {
%s
    }
    return 1;
}
"""
CASE = """    case %d:
        while (fread(x, 4, {0}_INPUTS, stdin) == {0}_INPUTS) {{
            {1}(x, y);
            fwrite(y, 4, {0}_OUTPUTS, stdout);
        }}
        return 0;"""


@pytest.fixture(scope="module")
def compiler() -> str:
    if why := tools.missing(" ".join(("cc", *FLAGS))):
        pytest.skip(why)
    found = tools.c_compiler()
    assert found is not None
    return found


def run(program: Path, *words: object, given: bytes = b"") -> bytes:
    return subprocess.run([program, *map(str, words)], input=given, check=True, capture_output=True).stdout


def status(program: Path, *words: object, given: bytes = b"") -> int:
    return subprocess.run([program, *map(str, words)], input=given, capture_output=True).returncode


def compile_c(compiler: str, folder: Path, sources: list[str], flags: tuple[str, ...] = FLAGS) -> Path:
    program = folder / "program"
    subprocess.run([compiler, *flags, "-o", program, *(folder / s for s in sources)], check=True)
    return program


# ------------------------------------------------------------------------------------- layers
def ties(key: Any, shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.Array:
    """Return tables of negative and positive numbers, of which many are no multiples of the resolution."""
    return jax.random.normal(key, shape, dtype) * 3


KEPT = {"accumulate": lutjax.FixedPoint(2.0**10), "weights_init": ties}
SLOTS = np.array([[[0, 3, -1], [2, 2, 1]]])  # of two rows: an unused slot, and an output twice


def layers() -> dict[str, Any]:
    """Return a layer of each kind; few inputs make pairs that a detector holds twice, and orders of ids both ways."""
    make = functools.partial(LUT, rngs=nnx.Rngs(0), **KEPT)
    sparse = functools.partial(SparseLUT, rngs=nnx.Rngs(1), **KEPT)
    return {
        "dense": make(4, 5, n_detectors=7, n_anchors=5),
        "groups": make(6, 4, n_detectors=6, n_anchors=3, groups=2, epsilon=2.0),
        "no_pairs": make(3, 4, n_detectors=2, n_anchors=0),
        "by_row": sparse(5, 9, n_detectors=6, n_anchors=3, n_targets=4),
        "by_table": sparse(8, 12, n_detectors=4, n_anchors=2, n_targets=2, targets_per="table", groups=2),
        "given": sparse(4, 4, n_detectors=3, n_anchors=1, targets=SLOTS),
    }


@pytest.fixture(scope="module")
def programs(
    compiler: str, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[dict[str, IntegerLUT]], Any]:
    """Compile layers into one program; return a function that runs a layer on inputs."""

    def compiled(made: dict[str, IntegerLUT]) -> Callable[[str, np.ndarray], np.ndarray]:
        folder, cases = tmp_path_factory.mktemp("layers"), []
        for k, (name, layer) in enumerate(made.items()):
            for file, text in layer.to_c(name).items():
                (folder / file).write_text(text)
            cases.append(CASE.format(name.upper(), name) % k)
        includes = "\n".join(f'#include "{name}.h"' for name in made)
        (folder / "driver.c").write_text(DRIVER % (includes, "\n".join(cases)))
        program = compile_c(compiler, folder, ["driver.c", *(f"{name}.c" for name in made)])

        def call(name: str, x: np.ndarray) -> np.ndarray:
            place = chr(ord("a") + list(made).index(name))
            written = run(program, place, given=x.astype("<i4").tobytes())
            return np.frombuffer(written, "<i4").reshape(len(x), -1)

        return call

    return compiled


@pytest.mark.slow
def test_layers_of_fixed_point_numbers_keep_their_numbers(programs: Any) -> None:
    of = layers()
    made = {name: detectors.of(layer) for name, layer in of.items()}
    in_c = programs(made)
    rng = np.random.default_rng(0)
    for name, layer in of.items():
        x = rng.integers(-3, 4, (40, layer.in_features))
        integer = made[name]
        found = integer(x)
        assert integer.fraction == 10
        assert (np.abs(found).max(0) <= integer.bound).all()
        np.testing.assert_array_equal(found / 2.0**10, np.asarray(layer(jnp.asarray(x, jnp.float32))))
        np.testing.assert_array_equal(in_c(name, x), found)
        # Whole numbers differ where float32 cannot tell them apart; and nothing overflows.
        extremes = rng.choice([-LARGEST - 1, -LARGEST, -1, 0, 1, LARGEST - 1, LARGEST], x.shape)
        np.testing.assert_array_equal(in_c(name, extremes), integer(extremes))
        if not integer.dead_zone:  # comparisons see the order of inputs alone
            order = np.searchsorted(np.unique(extremes), extremes)
            np.testing.assert_array_equal(integer(extremes), integer(order))


def test_rounded_layers(programs: Any) -> None:
    layer = layers()["groups"]
    weights, anchors = np.asarray(layer.weights[...]), np.asarray(layer.anchors[...])
    options = {"in_features": 6, "groups": 2, "epsilon": 0.4, "input_fraction": 2}
    made = {t: detectors.rounded(weights, anchors, tables=t, **options) for t in ("int8", "int16", "int32")}
    in_c, rng = programs(made), np.random.default_rng(1)
    x = rng.integers(-6, 6, (50, 6))
    op = functools.partial(lutjax.lut, anchors=jnp.asarray(anchors), groups=2, epsilon=0.4)
    halves = jnp.asarray(x.reshape(50, 2, 3) / 4, jnp.float32)
    quantized = lutjax.quantize_tables(jnp.asarray(weights), groups=2)
    scale = np.repeat(np.ldexp(np.float32(1), np.asarray(quantized.exponents)), 3, 0)[:, None]
    np.testing.assert_array_equal(made["int8"].values, quantized.values)
    np.testing.assert_array_equal(
        made["int8"].shifts - made["int8"].fraction, np.asarray(quantized.exponents).ravel()
    )
    for name, integer in made.items():
        assert integer.values.dtype == name
        assert integer.dead_zone == 2
        assert max(integer.bound) <= LARGEST
        np.testing.assert_array_equal(in_c(name, x), integer(x))
        error = np.abs(integer(x) / 2.0**integer.fraction - np.asarray(op(halves, weights)).reshape(50, 4))
        assert error.max() <= 3 * (2.0 ** (integer.shifts.max() - integer.fraction) + 1e-6)
    exact = np.asarray(op(halves, quantized.values.astype(jnp.float32) * scale)).reshape(50, 4)
    np.testing.assert_array_equal(made["int8"](x) / 2.0 ** made["int8"].fraction, exact)


@pytest.mark.slow
def test_rounded_sparse_layers(programs: Any) -> None:
    of = {name: layer for name, layer in layers().items() if isinstance(layer, SparseLUT)}
    made, exact = {}, {}
    for name, layer in of.items():
        weights, anchors, targets = (
            np.asarray(a[...]) for a in (layer.weights, layer.anchors, layer.targets)
        )
        sizes = {
            "in_features": layer.in_features,
            "out_features": layer.out_features,
            "groups": layer.groups or 1,
        }
        made[name] = detectors.rounded(weights, anchors, targets=targets, tables="int8", **sizes)
        exact[name] = detectors.rounded(weights, anchors, targets=targets, tables="int32", **sizes)
    in_c, rng = programs(made), np.random.default_rng(5)
    for name, integer in made.items():
        x = rng.integers(-3, 4, (30, integer.in_features))
        np.testing.assert_array_equal(in_c(name, x), integer(x))
        n_addends = len(integer.values) * integer.values.shape[2]
        error = np.abs(integer(x) / 2.0**integer.fraction - exact[name](x) / 2.0 ** exact[name].fraction)
        assert 0 < error.max() <= n_addends * 2.0 ** (integer.shifts.max() - integer.fraction)


def test_the_largest_sums_fit(programs: Any) -> None:
    values = np.array([[[LARGEST // 2 + 1, -LARGEST]], [[LARGEST // 2, 0]]], np.int32)
    layer = IntegerLUT(2, np.zeros((2, 0, 2), int), values, np.zeros(2, int))
    assert layer.bound == (LARGEST, LARGEST)
    x = np.array([[LARGEST, -LARGEST - 1]])
    assert layer(x).tolist() == programs({"largest": layer})("largest", x).tolist() == [[LARGEST, -LARGEST]]
    shifted = IntegerLUT(1, np.zeros((1, 0, 2), int), np.array([[[-1]]], np.int8), np.array([30]))
    assert shifted(np.array([0])) == programs({"shifted": shifted})("shifted", np.array([[0]]))[0] == -(2**30)
    values[1, 0, 0] += 1
    with pytest.raises(ValueError, match="can add up to 2147483648, beyond int32"):
        dataclasses.replace(layer)


def test_a_flipped_entry_of_a_layer_is_found(programs: Any) -> None:
    integer = detectors.of(layers()["dense"])
    x = np.random.default_rng(2).integers(-3, 4, (3, 4))
    values = integer.values.copy()
    values[6, integer.rows(x)[1, 6], 2] ^= 1
    wrong = programs({"wrong": dataclasses.replace(integer, values=values)})("wrong", x) != integer(x)
    assert wrong[1].tolist() == [False, False, True, False, False]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"values": np.zeros((7, 16, 5), np.int8)}, "expected \\[T, C, 2\\] and \\[T, 2\\*\\*C, K\\]"),
        ({"values": np.zeros((7, 32, 5), np.int64)}, "values are int64"),
        ({"groups": 2}, "groups is 2; it must divide out_features, 5"),
        ({"shifts": np.zeros(4, int)}, "values have 5 columns; expected one for each of 4 outputs"),
        ({"shifts": np.full(5, 31)}, "shifts are from 31 to 31; expected 0 to 30"),
        ({"in_features": 3}, "anchors are from 0 to 3; expected 0 to 2"),
        ({"targets": np.full((1, 1, 5), 5)}, "targets are from 5 to 5; expected -1 to 4"),
        ({"targets": np.zeros((2, 1, 5), int)}, "targets have shape \\[2, 1, 5\\]"),
        ({"in_features": 2**16 + 1}, "a detector chooses from at most 65536 inputs"),
    ],
)
def test_layers_that_do_not_fit(change: dict[str, Any], message: str, without_typechecking: None) -> None:
    layer = IntegerLUT(
        4,
        np.tile([[0, 3]], (7, 5, 1)),
        np.zeros((7, 32, 5), np.int8),
        np.zeros(5, int),
    )
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(layer, **change)


def test_layers_without_an_integer_form(without_typechecking: None, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = LUT(4, 2, n_detectors=3, n_anchors=2, weights_init=ties, rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match="no integer form of Linear"):
        detectors.of(nnx.Linear(2, 2, rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match="tables is 'int4'"):
        detectors.of(layer, tables="int4")
    with pytest.raises(
        ValueError, match=r"fit int16 and sums of int32 with a fraction of at most 1\d, not 29"
    ):
        detectors.of(layer, fraction=29)
    with pytest.raises(ValueError, match="fraction is 31; it must be from 0 to 30"):
        detectors.of(layer, fraction=31)
    layer.weights[0, 0, 0] = jnp.inf
    with pytest.raises(ValueError, match="an infinity or NaN"):
        detectors.of(layer)
    layer.weights[0, 0, 0] = 2.0**40
    with pytest.raises(ValueError, match="with a fraction of at most -1; scale them down"):
        detectors.of(layer)
    fixed = LUT(4, 2, n_detectors=3, n_anchors=2, accumulate=lutjax.FixedPoint(1000), rngs=nnx.Rngs(0))
    with pytest.raises(
        ValueError, match="the scale 1000; the integer form of these has the scale 2\\*\\*fraction"
    ):
        detectors.of(fixed)
    kept = LUT(4, 2, n_detectors=3, n_anchors=2, **KEPT, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="the scale 1024, and fraction is 8"):
        detectors.of(kept, fraction=8)
    integer = detectors.of(kept)
    with pytest.raises(ValueError, match=r"x has shape \[3\]; expected \[\.\.\., 4\]"):
        integer(np.zeros(3, int))
    with pytest.raises(TypeError, match="x is float64; expected whole numbers"):
        integer(np.zeros(4))
    with pytest.raises(ValueError, match="expected numbers that fit int32"):
        integer(np.full(4, 2**31))
    with pytest.raises(ValueError, match="name is 'No-name'"):
        integer.to_c("No-name")
    monkeypatch.setattr(detectors, "_MOST_IN_C", 23)
    with pytest.raises(ValueError, match="the tables have 24 entries, more than the 23"):
        integer.to_c()
    with pytest.raises(ValueError, match="give out_features, too"):
        detectors.rounded(np.zeros((1, 2, 2)), SLOTS[:, :, :2], in_features=4, targets=SLOTS)


# ------------------------------------------------------------------------------------- language models
CONFIG = LUTTransformerConfig(
    features=8,
    context=6,
    n_layers=2,
    n_heads=1,
    n_detectors=3,
    n_anchors=2,
    n_position_bits=2,
    ffn_detectors=4,
    ffn_anchors=3,
    dropout=0.0,
)
PAIRS = dataclasses.replace(CONFIG, n_layers=1, attention="pair_interleaved", n_position_bits=8)
PROMPTS = (b"a", b"It was", b"much longer than the context", bytes(range(256))[::-37])


def model_of(config: LUTTransformerConfig, scale: float = 0.3) -> LUTTransformer:
    """Return a model with random tables: those of a new one are zeros."""
    model = LUTTransformer(config, rngs=nnx.Rngs(3))
    rng = np.random.default_rng(4)
    for path, part in nnx.iter_graph(model):
        if path and path[-1] == "weights":
            part.set_value(jnp.asarray(rng.normal(0, scale, part.shape), part.dtype))
    return model


def written(integer: IntegerLanguageModel, folder: Path, **options: Any) -> Path:
    for name, content in integer.to_c(**options).items():
        (folder / name).write_bytes(content)
    return folder


def built(compiler: str, folder: Path) -> Path:
    return compile_c(compiler, folder, ["main.c", "language_model.c", "tables.c"])


@pytest.fixture(scope="module")
def rounded() -> Rounded:
    return Rounded(model_of(CONFIG))


@pytest.fixture(scope="module")
def program(rounded: Rounded, compiler: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(compiler, written(rounded.integer, tmp_path_factory.mktemp("program")))


def logits_in_c(program: Path, prompt: bytes, *words: object) -> list[int]:
    return list(map(int, run(program, "-n", 1, "-l", *words, given=prompt).split()))


def check_texts(rounded: Rounded, program: Path) -> None:
    for seed, prompt in enumerate(PROMPTS):
        drawn = rounded.generate(prompt, 40, temperature=1.25, top_k=20, seed=seed)
        assert run(program, "-n", 40, "-t", "1.25", "-k", 20, "-s", seed, given=prompt) == drawn
        likeliest = rounded.generate(prompt, 20, temperature=0)
        assert run(program, "-n", 20, "-t", 0, given=prompt) == likeliest


@pytest.mark.slow
def test_the_program_writes_the_bytes_of_the_model(rounded: Rounded, program: Path) -> None:
    check_texts(rounded, program)
    text = b"--, or an argument?"
    assert run(program, "-n", 9, "--", text.decode()) == run(program, "-n", 9, given=text)
    assert run(program, "plain") == rounded.generate(b"plain", 500)  # the defaults are the same


def test_logits_are_those_of_the_model_in_jax(rounded: Rounded, program: Path) -> None:
    text = b"a window slides over it"
    logits = nnx.jit(lambda model, tokens: model(tokens, deterministic=True))(
        rounded.model, np.frombuffer(text, np.uint8).astype(np.int32)
    )
    units = np.asarray(logits, np.float64) * 2.0**rounded.integer.unembed.fraction
    np.testing.assert_array_equal(units, np.round(units))
    for n in (1, 2, 7, len(text)):
        assert logits_in_c(program, text[:n]) == units[n - 1].tolist()


@pytest.mark.slow
def test_pairs(compiler: str, tmp_path: Path) -> None:
    rounded = Rounded(model_of(PAIRS), tables="int8")
    check_texts(rounded, built(compiler, written(rounded.integer, tmp_path)))


@pytest.mark.slow
@pytest.mark.parametrize("tables", ["int8", "int16"])
@pytest.mark.parametrize(
    "changes",
    [
        {"ffn": False},
        {"n_position_bits": 0},
        {"shared_positions": True, "context": 2},
        {"attention": "pair", "ffn": False},
        {"attention": "pair", "n_position_bits": 0},
        {"attention": "pair", "shared_positions": True},
        {"attention": "pair_interleaved", "n_position_bits": 8, "param_dtype": "bfloat16"},
        {"table_dtype": "bfloat16", "unembed_anchors": 0, "unembed_detectors": 1},
    ],
)
def test_every_kind_of_model(changes: dict[str, Any], tables: str, compiler: str, tmp_path: Path) -> None:
    rounded = Rounded(model_of(dataclasses.replace(CONFIG, **changes)), tables=tables)
    check_texts(rounded, built(compiler, written(rounded.integer, tmp_path)))
    in_file = tmp_path / "in file"
    in_file.mkdir()
    program = built(compiler, written(rounded.integer, in_file, tables_in_file=True))
    words = ("-m", in_file / "tables.bin", "-n", 30)
    assert run(program, *words, given=b"a file") == rounded.generate(b"a file", 30)


@pytest.mark.slow
def test_no_sum_leaves_the_exact_numbers() -> None:
    for scale, tables in itertools.product((1e-3, 1.0, 300.0), ("int8", "int16")):
        integer = language_model.of(model_of(CONFIG, scale), tables=tables)
        most = np.abs(integer.embedding).max(0).astype(np.int64)
        for attention, ffn in zip(integer.attention, integer.ffn, strict=True):
            of_layer = np.abs(attention.values.astype(np.int64)).max(1).sum(0) << attention.shifts
            most += integer.window * of_layer + np.array(ffn.bound)
        assert EXACT // 4 < max(most) < EXACT or integer.attention[0].values.max() > 2**13
        assert max(integer.unembed.bound) < EXACT


def test_tables_in_a_file(rounded: Rounded, compiler: str, tmp_path: Path) -> None:
    """A detector reads exactly one row, so that a flipped entry of it is found, and no other."""
    program = built(compiler, written(rounded.integer, tmp_path, tables_in_file=True))
    tables, prompt = tmp_path / "tables.bin", b"a prompt"
    expected, content = logits_in_c(program, prompt), tables.read_bytes()  # found beside the program
    assert logits_in_c(program, prompt, "-m", tables) == expected
    text = rounded.text(prompt, 5, temperature=0, top_k=256, seed=0)
    assert expected == list(text.logits)
    (tmp_path / "texts.json").write_text(language_model.texts_to_json([text]))
    assert language_model.verify(tmp_path, compiler=compiler) == "5 bytes of 1 texts, and 1 times 256 logits"
    found = []
    for row in range(8):
        entry = rounded.integer.n_values - 256 * (8 - row) + 77  # of the last detector of the last tables
        flipped = bytearray(content)
        flipped[2 * entry] ^= 1
        tables.write_bytes(flipped)
        logits = logits_in_c(program, prompt, "-m", tables)
        wrong = [k for k in range(256) if logits[k] != expected[k]]
        if wrong:
            found.append(wrong)
            with pytest.raises(DifferenceError, match="text 0: 1 of 256 logits"):
                language_model.verify(tmp_path, compiler=compiler)
    assert found == [[77]]
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
def test_bad_words(program: Path, words: tuple[str, ...]) -> None:
    assert status(program, *words, given=b"a prompt") == 2


def test_an_empty_prompt(program: Path, rounded: Rounded) -> None:
    assert status(program) == status(program, "") == 2
    with pytest.raises(ValueError, match="the prompt is empty"):
        rounded.generate(b"", 1)


def test_draws_in_c_are_those_in_python(program: Path) -> None:
    fraction = None
    for line in (program.parent / "model.h").read_text().splitlines():
        if "LM_LOGIT_FRACTION" in line:
            fraction = int(line.split()[-1])
    assert fraction is not None
    logits = np.array(logits_in_c(program, b"x"))
    for temperature, top_k, seed in itertools.product(
        ("0.001", "0.05", "1", "1000"), (1, 3, 255, 256), (1, 2**64 - 1)
    ):
        draws = Draws(seed=seed, fraction=fraction, temperature=round(1000 * float(temperature)), top_k=top_k)
        words = ("-n", 1, "-t", temperature, "-k", top_k, "-s", seed)
        assert run(program, *words, given=b"x") == bytes([draws(logits)])


def test_draws_follow_the_softmax() -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 3, 12)
    units = np.round(logits * 2**12).astype(np.int64)
    for temperature in (300, 1000, 5000):
        exact = np.exp((units - units.max()) / 2**12 / (temperature / 1000))
        draws = Draws(seed=temperature, fraction=12, temperature=temperature)
        weights = draws._weights((units.max() - units).astype(np.uint64)) / 2.0**31
        np.testing.assert_allclose(weights, exact, rtol=2e-4, atol=2e-9)
        n, p = 4000, exact / exact.sum()
        counts = np.bincount([draws(units) for _ in range(n)], minlength=12)
        assert (np.abs(counts - n * p) <= 5 * np.sqrt(n * p * (1 - p)) + 1).all()


def test_ties_take_the_first() -> None:
    logits = np.array([1, 5, 0, 5, 5, -9])
    assert Draws(seed=0, fraction=0, temperature=0)(logits) == 1
    draws = Draws(seed=0, fraction=0, temperature=1000, top_k=2)
    assert {draws(logits) for _ in range(50)} == {1, 3}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 100}, "vocab_size is 100; programs read and write bytes, 256 of them"),
        (
            {"batch_norm": True},
            "batch_norm is True, which computes with floats between tables; train without it",
        ),
    ],
)
def test_models_without_an_integer_form(changes: dict[str, Any], message: str) -> None:
    config = dataclasses.replace(CONFIG, **changes)
    model = nnx.eval_shape(lambda: LUTTransformer(config, rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match=message):
        language_model.of(model)


def test_numbers_without_an_integer_form() -> None:
    model = model_of(CONFIG)
    with pytest.raises(ValueError, match="tables is 'int32'; expected one of"):
        language_model.of(model, tables="int32")
    weights = model.unembed.weights
    weights[0, 0, 0] = 2.0**25
    with pytest.raises(ValueError, match="too much for whole numbers below 2\\*\\*24"):
        language_model.of(model)
    weights[0, 0, 0] = jnp.nan
    with pytest.raises(ValueError, match="an infinity or NaN"):
        language_model.of(model)
    with pytest.raises(ValueError, match="1234; in whole numbers it is from 0 to 1000"):
        integers.thousandths(0.1234)


def test_softmax_attention_is_refused() -> None:
    config = GPTConfig(features=8, context=8, n_layers=1, n_heads=2)
    model = nnx.eval_shape(lambda: GPT(config, rngs=nnx.Rngs(0)))
    with pytest.raises(
        TypeError, match="no integer form of GPT, whose softmax attention computes with floats"
    ):
        language_model.of(model)
    with pytest.raises(RunError, match="Train a model of tables alone by lutjax train lm --model lut"):
        integers.rounded_model(Path("runs/lm"), model, tables="int8")


# ------------------------------------------------------------------------------------- runs
@pytest.mark.slow
def test_a_run_becomes_a_program(compiler: str, tmp_path: Path) -> None:
    data = FOX
    source = tmp_path / "fox.txt"
    source.write_bytes(data)
    text = split_text(data, name="fox", context=6)
    training = TrainingConfig(steps=1, batch_size=4)
    record = lm_runs.Record(
        CONFIG, training, runs.Source.of(source, text.size, text.digest), 3.0, {}, runs.History()
    )
    params, others = models.arrays(model_of(CONFIG))
    models.save(tmp_path / "run", 1, State(params, others, None), record)
    lines: list[str] = []
    paths = integers.export_language_model(tmp_path / "run", tmp_path / "out", progress=lines.append)
    assert sorted(paths) == sorted((tmp_path / "out").iterdir())
    facts = json.loads((tmp_path / "out" / "model.json").read_text())
    assert facts["loss_after"] == pytest.approx(facts["loss_before"], abs=0.02)
    assert f"{facts['loss_before']:.4f} nats per byte before rounding" in lines[-2]
    assert lines[:2] == ["rounding to int16", "testing the trained model"]
    assert "600 bytes of 3 texts" in language_model.verify(tmp_path / "out", compiler=compiler, flags=FLAGS)

    program = built(compiler, tmp_path / "out")
    words = (
        "generate",
        "--checkpoint",
        str(tmp_path / "run"),
        "--prompt",
        "the fox",
        "--bytes",
        "30",
        "--integers",
        "int16",
    )
    added = run(program, "-n", 30, "the fox")
    assert command(*words, "--no-echo").stdout_bytes == added
    assert command(*words).stdout_bytes == b"the fox" + added
    result = command(*words, "--temperature", "0.12345")
    assert result.exit_code == 2
    assert "at most three digits after the point" in result.output

    source.unlink()
    program_without = integers.program_of(tmp_path / "run", tables="int8")
    assert "the loss is not tested" in program_without.remarks[0]
    assert "loss_before" not in program_without.facts
