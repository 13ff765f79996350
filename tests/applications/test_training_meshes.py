"""Runs on meshes of devices: which mesh is chosen, and the same results as on one device."""

import csv
import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from commands import output
from jax.sharding import AbstractMesh, PartitionSpec as P
from machine import needs_devices
from small_runs import FOX, TEXT

from lutjax import optim as tables
from lutjax.models import GPTConfig, LUTTransformerConfig
from lutjax.training import lm, lm_runs, meshes, models, runs


def of_tables(*detectors):
    return {
        str(i): {"weights": jax.ShapeDtypeStruct((n, 16, 4), jnp.float32)} for i, n in enumerate(detectors)
    }


@dataclasses.dataclass(frozen=True)
class Device:
    """Attributes of a device by which a mesh is chosen."""

    id: int
    process_index: int = 0
    platform: str = "gpu"
    device_kind: str = "H100"


def devices(n, platform="gpu", hosts=1):
    return [Device(i, i % hosts, platform) for i in reversed(range(n))]


def names(params):
    return [f"{i}/weights" for i in params if i != "layers"]


def chosen(params, *args, **options):
    mesh = meshes.choose(params, *args, **options, tables=names(params))
    return None if mesh is None else dict(mesh.shape)


GATES = {"layers": {"0": {"logits": jax.ShapeDtypeStruct((64, 16), jnp.float32)}}}


@pytest.mark.usefixtures("without_typechecking")  # devices are made up
@pytest.mark.parametrize(
    ("params", "n", "batch", "expected"),
    [
        (of_tables(64, 16), 4, 32, (1, 4)),
        (of_tables(64, 6), 4, 32, (2, 2)),  # the largest divisor by detector, the rest by sample
        (of_tables(66, 6), 6, 32, (1, 6)),
        (of_tables(5), 4, 32, (4, 1)),
        (of_tables(5), 4, 3, (3, 1)),  # as many devices as can be used
        (of_tables(8, 6), 8, 1, (1, 2)),
        (GATES, 4, 32, (4, 1)),
        (of_tables(64), 1, 32, None),
        (of_tables(5), 4, 1, None),
    ],
)
def test_default_on_one_host(params, n, batch, expected):
    found = chosen(params, devices(n), batch)
    assert found == (None if expected is None else dict(zip(("data", "detectors"), expected, strict=True)))


@pytest.mark.usefixtures("without_typechecking")
def test_default_among_devices():
    params = of_tables(64)
    assert chosen(params, devices(8, "cpu"), 32) is None
    assert chosen(params, devices(8, "tpu"), 32) is None
    others = [*devices(2), Device(9, device_kind="T4")]
    assert chosen(params, others, 32) == {"data": 1, "detectors": 2}
    # Detectors within a host, samples over hosts.
    found = meshes.choose(params, devices(8, hosts=2), 32, tables=names(params))
    assert found is not None
    assert [[d.process_index for d in row] for row in found.devices] == [[0] * 4, [1] * 4]
    with pytest.raises(
        ValueError, match=r"batch_size is 3: .* over 8 devices of 2 processes.*a multiple of 2"
    ):
        meshes.choose(params, devices(8, hosts=2), 3, tables=names(params))


@pytest.mark.usefixtures("without_typechecking")
def test_a_mesh_that_is_asked_for():
    params, cpus = of_tables(8), jax.devices()
    assert chosen(params, devices(8, "cpu"), 32, asked={"data": 2, "detectors": 4}) == {
        "data": 2,
        "detectors": 4,
    }
    assert chosen(params, devices(8), 32, asked={"detectors": 1}) is None
    assert chosen(params, devices(8), 32, asked=meshes.parse("data=4")) == {"data": 4, "detectors": 1}
    for asked, batch, message in (
        ({"data": 4, "detectors": 16}, 32, r"mesh is data=4,detectors=16, so 64 devices; there are "),
        ({"data": 2}, 3, r"mesh is data=2, and a batch of 3 .* cannot be divided evenly by 2"),
        ({"detectors": 3}, 32, r"0/weights has shape \[8, 16, 4\], and its 8 detectors .* by the 3 devices"),
    ):
        with pytest.raises(ValueError, match=message):
            meshes.choose(params, cpus * 4 if len(cpus) < 8 else cpus, batch, asked, tables=names(params))
    with pytest.raises(
        ValueError, match=r"mesh is data=2, so 2 devices; there are 8 \(H100\), all of which take part"
    ):
        meshes.choose(params, devices(8, hosts=2), 32, {"data": 2})


@pytest.mark.parametrize(
    "text",
    ["", "data", "data=0", "data=-1", "data=2,data=2", "rows=2", "data=2,", "data=2;detectors=2", "data=x"],
)
def test_words_that_are_no_mesh(text):
    with pytest.raises(ValueError, match=f"^mesh is {re.escape(repr(text))}: .* Write data=2,detectors=4"):
        meshes.parse(text)


def test_specs_of_the_state_of_an_optimizer():
    """The state of an optimizer lies as the parameters do, whatever their names are there."""
    mesh = AbstractMesh((4,), ("detectors",))
    params = {
        "positions": jnp.zeros((7, 8, 2)),
        "scale": jnp.zeros(()),
        "unembed": {"weights": jnp.zeros((8, 16, 5))},
    }
    weights, positions = P("detectors", None, None), P(None, "detectors", None)
    rule = tables.Optimizer(
        tables.RowAdagrad(),
        0.1,
        rest=optax.chain(optax.clip(1.0), optax.adam(1e-3)),
        tables={"unembed/weights"},
    )
    state = rule.specs(params, mesh)
    assert state.rows == {"unembed/weights": {"sum_of_squares": weights}}
    moments = state.rest[1][0]
    assert moments.mu == moments.nu == [positions, P()]
    assert moments.count == P()
    everything = tables.Optimizer(tables.SGD(), 0.1, rest=optax.adamw(1e-3), tables=())
    assert everything.specs(params, mesh, tables={"unembed/weights"}).rest[0].mu == [positions, P(), weights]
    assert jax.tree.structure(everything.specs(params, mesh)) == jax.tree.structure(
        jax.eval_shape(everything.init, params)
    )


ROWS = 512
"""Rows of all tables, and of nothing else."""

MODELS = {
    "lut": LUTTransformerConfig(
        features=8,
        context=8,
        n_layers=1,
        n_heads=1,
        n_detectors=8,
        n_anchors=3,
        n_position_bits=3,
        ffn_detectors=8,
        ffn_anchors=9,
        dropout=0.1,
    ),
    **{
        name: GPTConfig(
            features=16,
            context=8,
            n_layers=1,
            n_heads=2,
            feed_forward=name.removeprefix("gpt_"),
            lut_heads=2,
            lut_tables=4,
            lut_bits=9,
            dropout=0.1,
        )
        for name in ("gpt_lut", "scored_lut", "projection_lut", "dense")
    },
}
LAYOUTS = {"data=8": {"data": 8}, "detectors=8": {"detectors": 8}, "2x4": {"data": 2, "detectors": 4}}
DENSE = {"table_optimizer": "same", "table_gradient": "dense", "clip": 1.0}


def run_of(model, options, axes=None):
    training = lm.TrainingConfig(steps=7, batch_size=16, **{"optimizer": "adamw", "cooldown": 0.0, **options})
    run = lm.Run(MODELS[model], training, TEXT.train, TEXT.validation)
    if axes is not None:
        run.divide(axes)
    return run


def exchanged(compiled):
    """Return the shapes of the results of all collectives in a compiled program."""
    found = re.findall(
        r"= (.*?) (?:all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute)(?:-start)?\(",
        compiled.as_text(),
    )
    return [
        tuple(int(n) for n in shape.split(",") if n)
        for shapes in found
        for shape in re.findall(r"\w+\[([\d,]*)\]", shapes)
    ]


CASES = [
    *((layout, "lut", options)
      for layout in LAYOUTS
      for options in ({}, {"microbatches": 2}, {"select_every": 3}, {"optimizer": "row_adagrad"}, {"clip": 0.1})),
    *((layout, model, {}) for model in ("gpt_lut", "scored_lut", "projection_lut", "dense") for layout in LAYOUTS),
    *((layout, "scored_lut", DENSE) for layout in LAYOUTS),
]  # fmt: skip


@needs_devices(8)
@pytest.mark.slow
def test_a_run_on_a_mesh_is_deployed_as_any_other(tmp_path):
    text, out = tmp_path / "fox.txt", tmp_path / "run"
    text.write_bytes(FOX)
    sizes = [
        "--context=8",
        "--features=12",
        "--n-layers=1",
        "--n-heads=2",
        "--lut-heads=1",
        "--lut-tables=8",
        "--lut-bits=3",
    ]
    options = [
        "--batch-size=8",
        "--microbatches=2",
        "--steps=8",
        "--validate",
        "--select-every=4",
        "--read=powers_of_two",
    ]
    train = ("train", "lm", "--text", text, "--out", out, *sizes, "--feed-forward=scored_lut", *options)
    assert "on 8 x cpu (data=2,detectors=4)" in output(*train, "--mesh", "data=2,detectors=4")
    prompt = ("--prompt", "the ", "--bytes", 9)
    expected = output("generate", "--checkpoint", out, *prompt)
    assert output("generate", "--checkpoint", out, *prompt, "--mesh", "detectors=8") == expected
    assert "test loss" in output("quantize", out)
    quantized = ("generate", "--checkpoint", out / "quantized", *prompt)
    assert output(*quantized, "--mesh", "detectors=2") == output(*quantized)


@needs_devices(8)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "mesh"),
    [
        (("digits", "--layers=64,40", "--n-thresholds=2", "--batch-size=16"), "data=4"),
        (("digits", "--layers=64,40", "--n-thresholds=2", "--batch-size=16"), "data=2,detectors=4"),
        (
            ("ca", "--experiment=checkerboard", "--size=8", "--channels=2", "--kernels=3", "--perception=8,4,2", "--update=12,6,2",
             "--n-steps=4", "--batch-size=4", "--no-pictures", "--no-stop-when-solved"),
            "data=2",
        ),
    ],
)  # fmt: skip
def test_gates_on_a_mesh(words, mesh, tmp_path):
    def curves(out):
        with (out / "curves.csv").open() as file:
            return [float(row["value"]) for row in csv.DictReader(file)]

    intervals = ("--steps=12", "--log-every=6", "--eval-every=6", "--checkpoint-every=6")
    one, several = tmp_path / "one", tmp_path / "several"
    output("train", *words, *intervals, "--out", one)
    assert f" x cpu ({mesh})" in output("train", *words, *intervals, "--out", several, "--mesh", mesh)
    assert curves(several) == pytest.approx(curves(one), rel=1e-5)
    output("export", "--run", several, "--out", tmp_path / "circuit", "--format", "json")


@pytest.mark.slow
@needs_devices(8)
def test_no_table_is_exchanged():
    run = run_of("lut", {}, LAYOUTS["2x4"])
    program, _ = run.advance.compiled(run.abstract())
    shapes = exchanged(program)
    assert shapes
    assert not any(ROWS in shape for shape in shapes)


@needs_devices(8)
@pytest.mark.slow
@pytest.mark.parametrize(("layout", "model", "options"), CASES)
def test_a_run_on_a_mesh_ends_as_on_one_device(model, layout, options, tmp_path, monkeypatch):
    """Saved by one mesh and gone on with by one device, within rounding; and no table is exchanged."""
    monkeypatch.setattr(lm, "EVALUATION_BATCH", 32)  # 64 have as many positions as tables have rows
    one, run = run_of(model, options), run_of(model, options, LAYOUTS[layout])
    expected, loss = one.advance(one.init(), 0, 7)
    program, advance = run.advance.compiled(run.abstract())
    first = run.init()
    assert jax.tree.all(jax.tree.map(lambda a, b: a.sharding == b.sharding, first, run.abstract()))
    state, _ = advance(first, 0, 4)
    assert jax.tree.all(jax.tree.map(lambda a, b: a.sharding == b.sharding, state, run.abstract()))
    record = lm_runs.Record(
        run.config, run.training, runs.Source(None, 0, ""), 0.0, {}, history=runs.History()
    )
    models.save(tmp_path, 4, state, record)
    on_mesh, loss_on_mesh = advance(models.restore(tmp_path, 4, run), 4, 3)
    resumed, _ = one.advance(models.restore(tmp_path, 4, one), 4, 3)
    assert loss_on_mesh < loss  # the mean of the last steps alone
    for (path, a), b, c in zip(
        jax.tree_util.tree_leaves_with_path(expected),
        jax.tree.leaves(on_mesh),
        jax.tree.leaves(resumed),
        strict=True,
    ):
        name = jax.tree_util.keystr(path)
        np.testing.assert_allclose(b, a, atol=2e-5, rtol=2e-5, err_msg=name)
        np.testing.assert_allclose(c, a, atol=2e-5, rtol=2e-5, err_msg=name)
    if not (options == DENSE and "data" in LAYOUTS[layout]):  # whose gradients are of the shape of tables
        assert not any(ROWS in shape for shape in exchanged(program))
