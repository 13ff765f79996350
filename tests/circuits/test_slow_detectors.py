"""Integer layers and every language-model kind: C99 compared with NumPy and lutjax ops, bit for bit."""

import dataclasses
import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from c_programs import CONFIG, FLAGS, LAYERS, check_texts, layer_of, model_of, run
from commands import command
from small_runs import FOX
from tools import STRICT, compiled

from lutjax.circuits import detectors, language_model
from lutjax.circuits.language_model import EXACT
from lutjax.layers.nnx import SparseLUT
from lutjax.training import integers, lm_runs, models, runs
from lutjax.training.integers import Rounded
from lutjax.training.lm import TrainingConfig
from lutjax.training.models import State
from lutjax.training.text import split_text

LARGEST = 2**31 - 1


def test_layers_of_fixed_point_numbers_keep_their_numbers(programs):
    of = {name: layer_of(name) for name in LAYERS}
    made = {name: detectors.from_layer(one) for name, one in of.items()}
    in_c, rng = programs(made), np.random.default_rng(0)
    for name, layer in of.items():
        x = rng.integers(-3, 4, (40, layer.in_features))
        integer = made[name]
        result = integer(x)
        assert integer.fraction == 10
        assert (np.abs(result).max(0) <= integer.bound).all()
        np.testing.assert_array_equal(
            result / 2.0**10, np.asarray(layer(jnp.asarray(x, jnp.float32)))
        )
        np.testing.assert_array_equal(in_c(name, x), result)
        # Whole numbers differ where float32 cannot tell them apart; and nothing overflows.
        extremes = rng.choice([-LARGEST - 1, -LARGEST, -1, 0, 1, LARGEST - 1, LARGEST], x.shape)
        np.testing.assert_array_equal(in_c(name, extremes), integer(extremes))
        if not integer.dead_zone:  # comparisons see the order of inputs alone
            order = np.searchsorted(np.unique(extremes), extremes)
            np.testing.assert_array_equal(integer(extremes), integer(order))


def test_rounded_sparse_layers(programs):
    made, exact = {}, {}
    for name in LAYERS:
        layer = layer_of(name)
        if isinstance(layer, SparseLUT):
            weights, anchors, targets = (
                np.asarray(a[...]) for a in (layer.weights, layer.anchors, layer.targets)
            )
            options = {"in_features": layer.in_features, "out_features": layer.out_features}
            options |= {"groups": layer.groups or 1, "targets": targets}
            made[name], exact[name] = (
                detectors.rounded(weights, anchors, tables=t, **options) for t in ("int8", "int32")
            )
    in_c, rng = programs(made), np.random.default_rng(5)
    for name, integer in made.items():
        x = rng.integers(-3, 4, (30, integer.in_features))
        np.testing.assert_array_equal(in_c(name, x), integer(x))
        n_addends = len(integer.values) * integer.values.shape[2]
        error = np.abs(
            integer(x) / 2.0**integer.fraction - exact[name](x) / 2.0 ** exact[name].fraction
        )
        assert 0 < error.max() <= n_addends * 2.0 ** (integer.shifts.max() - integer.fraction)


def test_the_program_writes_the_bytes_of_the_model(rounded, program):
    check_texts(rounded, program)
    text = b"--, or an argument?"
    assert run(program, "-n", 9, "--", text.decode()) == run(program, "-n", 9, given=text)
    assert run(program, "plain") == rounded.generate(b"plain", 500)  # the defaults are the same


INTERLEAVED = {"attention": "pair_interleaved", "n_position_bits": 8}


@pytest.mark.parametrize("tables", ["int8", "int16"])
@pytest.mark.parametrize("changes", [
    {"ffn": False},
    {"n_position_bits": 0},
    {"shared_positions": True, "context": 2},
    {"attention": "pair", "ffn": False},
    {"attention": "pair", "n_position_bits": 0},
    {"attention": "pair", "shared_positions": True},
    {**INTERLEAVED, "n_layers": 1},
    {**INTERLEAVED, "param_dtype": "bfloat16"},
    {"table_dtype": "bfloat16", "unembed_anchors": 0, "unembed_detectors": 1},
])  # fmt: skip
def test_every_kind_of_model(changes, tables, compiler, tmp_path):
    rounded = Rounded(model_of(dataclasses.replace(CONFIG, **changes)), tables=tables)
    check_texts(rounded, compiled(tmp_path, rounded.integer.to_c(), *FLAGS))
    in_file = tmp_path / "in file"
    in_file.mkdir()
    program = compiled(in_file, rounded.integer.to_c(tables_in_file=True), *FLAGS)
    result = run(program, "-m", in_file / "tables.bin", "-n", 30, given=b"a file")
    assert result == rounded.generate(b"a file", 30)


def test_no_sum_leaves_the_exact_numbers():
    for scale, tables in itertools.product((1e-3, 1.0, 300.0), ("int8", "int16")):
        integer = language_model.from_model(model_of(CONFIG, scale), tables=tables)
        most = np.abs(integer.embedding).max(0).astype(np.int64)
        for attention, ffn in zip(integer.attention, integer.ffn, strict=True):
            of_layer = np.abs(attention.values.astype(np.int64)).max(1).sum(0) << attention.shifts
            most += integer.window * of_layer + np.array(ffn.bound)
        assert EXACT // 4 < max(most) < EXACT or integer.attention[0].values.max() > 2**13
        assert max(integer.unembed.bound) < EXACT


def test_a_run_becomes_a_program(compiler, tmp_path):
    source, out = tmp_path / "fox.txt", tmp_path / "out"
    source.write_bytes(FOX)
    text = split_text(FOX, name="fox", context=6)
    of_text, training = (
        runs.Source.create(source, text.size, text.digest),
        TrainingConfig(steps=1, batch_size=4),
    )
    record = lm_runs.Record(CONFIG, training, of_text, 3.0, {}, runs.History())
    params, others = models.arrays(model_of())
    models.save(tmp_path / "run", 1, State(params, others, None), record)
    lines = []
    program = integers.program_of(tmp_path / "run", progress=lines.append)
    out.mkdir()
    for name, content in program.files.items():
        (out / name).write_bytes(content)
    facts = program.facts
    assert facts["loss_after"] == pytest.approx(facts["loss_before"], abs=0.02)
    assert f"{facts['loss_before']:.4f} nats per byte before rounding" in program.remarks[0]
    assert lines[:2] == ["rounding to int16", "testing the trained model"]
    assert "600 bytes of 3 texts" in language_model.verify(
        out, compiler=compiler, flags=(*STRICT, *FLAGS)
    )
    sources = {
        name: (out / name).read_bytes() for name in ("main.c", "language_model.c", "tables.c")
    }
    added = run(compiled(out, sources, *FLAGS), "-n", 30, "the fox")
    words = ("generate", "--checkpoint", tmp_path / "run", "--prompt", "the fox")
    words += ("--bytes", 30, "--integers", "int16")
    assert command(*words, "--no-echo").stdout_bytes == added
    assert command(*words).stdout_bytes == b"the fox" + added
    result = command(*words, "--temperature", "0.12345")
    assert result.exit_code == 2
    assert "at most three digits after the point" in result.output
    source.unlink()
    program_without = integers.program_of(tmp_path / "run", tables="int8")
    assert "the loss is not tested" in program_without.remarks[0]
    assert "loss_before" not in program_without.facts
