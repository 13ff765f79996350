"""Scripts in `benchmarks`: splits, counts and output files, and equal training results for both partitionings."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from folders import ROOT
from machine import needs_devices


@pytest.fixture(scope="module")
def programs():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks")
        import devices
        import images

        yield {"images": images, "devices": devices}


@pytest.fixture
def few(tmp_path):
    """Ten image classes, each with a bright square at a different position."""
    rng = np.random.default_rng(0)
    y = np.repeat(np.arange(10), 12)
    x = rng.integers(0, 40, (120, 28, 28))
    for image, label in zip(x, y, strict=True):
        row, column = divmod(int(label), 4)
        image[4 + 8 * row : 9 + 8 * row, 2 + 6 * column : 7 + 6 * column] += 200
    path = tmp_path / "few.npz"
    np.savez(path, x=x.astype(np.uint8), y=y)
    return path


def test_collectives_are_counted_and_rows_become_a_table(programs):
    devices = programs["devices"]
    program = """
      %a = f32[4,8]{1,0} all-reduce(%x), channel_id=1
      %b = (bf16[2]{0}, bf16[16]{0}) all-gather-start(%y), channel_id=2
      %c = (f32[], s32[3]{0}) all-reduce-start(%z, %w), channel_id=3
    """
    assert devices.collectives(program) == {
        "all-reduce": (2, 4 * 32 + 4 + 12),
        "all-gather": (1, 32),
    }
    one, two, weak, *_ = devices.cases(2, tiny=False)
    row = {"batch": 128, "ms": 2.5, "peak GB": 1.0, "over share": 1.02}
    *_, first, second = devices.compare({one: {"batch": 128, "ms": 4.0}, two: row}).splitlines()
    assert "| 4.000 | 1.00x | - |" in first
    assert "1 data x 2 detectors | jit | 128 | 2.500 | 1.60x | 1.00 | 1.02 |" in second
    assert weak.way == "shard_map"


def run(name, *words):
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / name, "--tiny", *words], capture_output=True, text=True,
        check=True, env={**os.environ, **flags},
    )  # fmt: skip
    return done.stdout


class TestSlow:
    @pytest.mark.usefixtures("without_typechecking")
    def test_figures_of_networks(self, programs, few, tmp_path, monkeypatch):
        images = programs["images"]
        # In so few steps, at a rate that warm-up holds down, networks learn from images as they are.
        still = {"strength": 0.0, "shift": 0.0, "bend": 0.0, "average": 0.9}

        def network(build, **rates):
            return images.Network(build=build, rates=images.Rates(**still, **rates), batch=32)

        small = {
            "CNN": network(images._cnn(4), rate=0.1),
            "convolutions of tables": network(
                images._tables(4, n_detectors=8, n_anchors=3), rate=0.1
            ),
            "logic trees": network(images._trees(2, 1), rate=0.1, tau=2.0),
        }
        monkeypatch.setattr(images, "NETWORKS", small)
        rows = tmp_path / "rows.jsonl"
        options = ["--rows", str(rows), "--only", *small, "--splits", "0", "--steps", "60"]
        images.main(["--data", str(few), *options])
        result = {
            row["learner"]: row["right"] for row in map(json.loads, rows.read_text().splitlines())
        }
        assert set(result) == set(small)
        assert result["CNN"] > 50
        assert result["convolutions of tables"] > 50
        assert all(name in images.page_table(rows) for name in small)

    @needs_devices(8)
    @pytest.mark.parametrize(
        "names",
        [
            ["reference:1x1:jit", "reference:1x8:jit", "reference:8x1:jit", "reference:2x4:jit", "reference:8x1:shard_map"],
            ["weak:1x8:jit", "weak:1x8:shard_map", "weak:8x1:jit"],
            ["context:1x1:jit", "context:1x8:jit", "context:1x8:shard_map"],
            ["scored:1x8:jit", "scored:1x8:shard_map", "scored:8x1:jit"],
            ["gates:1x8:jit", "gates:1x8:shard_map", "gates:8x1:jit"],
        ],
        ids=lambda names: names[0],
    )  # fmt: skip
    def test_both_ways_learn_the_same(self, programs, names):
        """With detector sharding, devices all-reduce each lookup output and every input cotangent except the first."""
        devices, result = programs["devices"], {}
        for case in devices.cases(8, tiny=True):
            if case.name in names:
                program = devices.Program(case)
                program.start()
                result[case.name] = program, program.run(2)[1]
        assert set(result) == set(names)
        for name, (_, loss) in result.items():
            np.testing.assert_allclose(loss, result[names[0]][1], rtol=1e-5, err_msg=name)
        if "reference:1x8:jit" in result:
            program = result["reference:1x8:jit"][0]
            sizes = 4 * program.subject.features + program.subject.vocab
            n_bytes = 4 * program.case.batch * program.subject.context * sizes
            assert devices.collectives(program.compiled.as_text()) == {"all-reduce": (5, n_bytes)}
            assert program.plan()["collectives"] == 5

    def test_commands_about_devices(self, tmp_path):
        words = "--devices 2 --only gates --large 0.0003 --folder"
        said = run("devices.py", *words.split(), str(tmp_path))
        for text in (
            "| gates | 2 data x 1 detectors | jit |",
            "| large | 1 data x 2 detectors |",
            '"same bits": true',
        ):
            assert text in said
        said = run("memory_devices.py")
        rows = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
        assert [r["way"] for r in rows] == 2 * ["jit", "detectors", "rows", "whole"] + [
            "rows",
            "whole",
        ]
        for of_size in (rows[:4], rows[4:8], rows[8:]):
            np.testing.assert_allclose([r["loss"] for r in of_size], of_size[-1]["loss"], rtol=1e-5)
            memory = {r["way"]: r["memory"] for r in of_size}
            assert memory["rows"] < memory["whole"] / 2
        assert "| n-grams | 8, 64, 4 | 16, 1 | rows |" in said
