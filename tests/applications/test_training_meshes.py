"""Runs on device meshes: process setup, and results equal to a single device."""

import csv
import dataclasses
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from commands import output
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from machine import needs_devices
from small_runs import TEXT

import lutjax
from lutjax import optim as tables
from lutjax.dispatch._partition import some_element
from lutjax.models import GPTConfig, LUTTransformerConfig
from lutjax.training import hosts, lm, lm_runs, meshes, models, runs


def of_tables(*detectors):
    shapes = ((n, 16, 4) for n in detectors)
    return {str(i): {"weights": jax.ShapeDtypeStruct(s, jnp.float32)} for i, s in enumerate(shapes)}


@dataclasses.dataclass(frozen=True)
class Device:
    """Device attributes used for mesh selection."""

    id: int
    process_index: int = 0
    platform: str = "gpu"
    device_kind: str = "H100"


def devices(n, platform="gpu", hosts=1, kind="H100"):
    return [Device(i, i % hosts, platform, kind) for i in reversed(range(n))]


def choose(params, *args, **options):
    tables = [f"{i}/weights" for i in params if i != "layers"]
    return meshes.choose(params, *args, **options, tables=tables)


def chosen(*args, **options):
    mesh = choose(*args, **options)
    return None if mesh is None else (mesh.shape["data"], mesh.shape["detectors"])


GATES = {"layers": {"0": {"logits": jax.ShapeDtypeStruct((64, 16), jnp.float32)}}}
T4 = Device(9, device_kind="T4")


@pytest.mark.usefixtures("without_typechecking")  # devices are made up
@pytest.mark.parametrize(
    ("params", "found", "batch", "asked", "expected"),
    [
        (of_tables(64, 16), devices(4), 32, None, (1, 4)),
        (
            of_tables(64, 6),
            devices(4),
            32,
            None,
            (2, 2),
        ),  # the largest divisor by detector, the rest by sample
        (of_tables(66, 6), devices(6), 32, None, (1, 6)),
        (of_tables(5), devices(4), 32, None, (4, 1)),
        (of_tables(5), devices(4), 3, None, (3, 1)),  # as many devices as can be used
        (of_tables(8, 6), devices(8), 1, None, (1, 2)),
        (GATES, devices(4), 32, None, (4, 1)),
        (of_tables(64), devices(1), 32, None, None),
        (of_tables(5), devices(4), 1, None, None),
        (of_tables(64), devices(8, "cpu"), 32, None, None),
        (of_tables(64), devices(8, "tpu"), 32, None, None),
        (of_tables(64), [*devices(2), T4], 32, None, (1, 2)),
        (of_tables(8), devices(8, "cpu"), 32, {"data": 2, "detectors": 4}, (2, 4)),
        (of_tables(8), devices(8), 32, {"detectors": 1}, None),
        (of_tables(8), devices(8), 32, meshes.parse("data=4"), (4, 1)),
    ],
)
def test_which_mesh_is_chosen(params, found, batch, asked, expected):
    assert chosen(params, found, batch, *([asked] if asked else [])) == expected


@pytest.mark.usefixtures("without_typechecking")
def test_meshes_over_hosts_and_those_that_cannot_be():
    params, cpus = of_tables(8), jax.devices()
    result = choose(
        of_tables(64), devices(8, hosts=2), 32
    )  # detectors within a host, samples over hosts
    assert [[d.process_index for d in row] for row in result.devices] == [[0] * 4, [1] * 4]
    many, two = cpus * 4 if len(cpus) < 8 else cpus, devices(8, hosts=2)
    for given, message in (
        ((params, many, 32, {"data": 4, "detectors": 16}), r"mesh is data=4,detectors=16, so 64 devices; there are "),
        ((params, many, 3, {"data": 2}), r"mesh is data=2; 2 does not divide the 3 samples"),
        ((params, many, 32, {"detectors": 3}), r"0/weights has shape \[8, 16, 4\], and its 8 detectors .* by the 3 devices"),
        ((params, two, 3), r"batch_size is 3; .* over 8 devices of 2 processes.*a multiple of 2"),
        ((params, two, 32, {"data": 2}), r"mesh is data=2, so 2 devices; there are 8 \(H100\), all of which take part"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            choose(*given)
    for text in (
        "",
        "data",
        "data=0",
        "data=-1",
        "data=2,data=2",
        "rows=2",
        "data=2,",
        "data=2;detectors=2",
        "data=x",
    ):
        with pytest.raises(
            ValueError, match=f"^mesh is {re.escape(repr(text))}: .* Write data=2,detectors=4"
        ):
            meshes.parse(text)


ROWS = 512
"""Row count for all tables, different from every other dimension."""

GPT = {
    "features": 16, "context": 8, "n_layers": 1, "n_heads": 2, "lut_heads": 2, "lut_tables": 4,
    "lut_bits": 9,
}  # fmt: skip
MODELS = {
    "lut": LUTTransformerConfig(
        features=8, context=8, n_layers=1, n_heads=1, n_detectors=8, n_anchors=3, n_position_bits=3, ffn_detectors=8,
        ffn_anchors=9, dropout=0.1,
    ),
    **{name: GPTConfig(**GPT, feed_forward=name, dropout=0.1) for name in ("scored_lut", "projection_lut", "dense")},
    "gpt_lut": GPTConfig(**GPT, feed_forward="lut", dropout=0.1),
}  # fmt: skip
LAYOUTS = {
    "data=8": {"data": 8},
    "detectors=8": {"detectors": 8},
    "2x4": {"data": 2, "detectors": 4},
}
DENSE = {"table_optimizer": "same", "table_gradient": "dense", "clip": 1.0}


def run_of(model, options, axes=None):
    training = lm.TrainingConfig(
        steps=7, batch_size=16, **{"optimizer": "adamw", "cooldown": 0.0, **options}
    )
    run = lm.Run(MODELS[model], training, TEXT.train, TEXT.validation)
    if axes is not None:
        run.divide(axes)
    return run


def exchanged(compiled):
    """Return the result shapes for all collectives in a compiled program."""
    kinds = "all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute"
    result = re.findall(rf"= (.*?) (?:{kinds})(?:-start)?\(", compiled.as_text())
    shapes = (shape for shapes in result for shape in re.findall(r"\w+\[([\d,]*)\]", shapes))
    return [tuple(int(n) for n in shape.split(",") if n) for shape in shapes]


CASES = [
    *((layout, "lut", options)
      for layout in LAYOUTS
      for options in ({}, {"microbatches": 2}, {"select_every": 3}, {"optimizer": "row_adagrad"}, {"clip": 0.1})),
    *((layout, model, {}) for model in ("gpt_lut", "scored_lut", "projection_lut", "dense") for layout in LAYOUTS),
    *((layout, "scored_lut", DENSE) for layout in LAYOUTS),
]  # fmt: skip


DIGITS = "digits --layers=64,40 --n-thresholds=2 --batch-size=16"
CA = """ca --experiment=checkerboard --size=8 --channels=2 --kernels=3 --perception=8,4,2 --update=12,6,2 --n-steps=4
    --batch-size=4 --runs=1 --no-pictures --no-stop-when-solved"""


@needs_devices(8)
def test_some_element_exchanges_nothing():
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("data", "detectors"))
    a = jax.device_put(jnp.ones((4, 8)), NamedSharding(mesh, P("data", "detectors")))
    compiled = jax.jit(some_element).lower(a).compile()
    assert "all-" not in compiled.as_text()
    assert compiled(a) == 1

    def of_each(weights, x):
        def loss(params):
            return jnp.sum(lutjax.lut(x, params["weights"], jnp.array([[[0, 1]], [[1, 0]]])))

        return tables.value_and_grad(loss)({"weights": weights})[1]["weights"]

    gradient = jax.vmap(of_each, (None, 0))(jnp.ones((2, 2, 1)), jnp.ones((3, 4, 2)))
    assert gradient.after.shape == (3,)


class TestSlow:
    @needs_devices(8)
    @pytest.mark.parametrize(("layout", "model", "options"), CASES)
    def test_a_run_on_a_mesh_ends_as_on_one_device(
        self, model, layout, options, tmp_path, monkeypatch
    ):
        monkeypatch.setattr(
            lm, "EVALUATION_BATCH", 32
        )  # 64 have as many positions as tables have rows
        one, run = run_of(model, options), run_of(model, options, LAYOUTS[layout])
        expected, loss = one.advance(one.init(), 0, 7)
        program, advance = run.advance.compile_program(run.abstract())
        first = run.init()
        assert jax.tree.all(
            jax.tree.map(lambda a, b: a.sharding == b.sharding, first, run.abstract())
        )
        state, _ = advance(first, 0, 4)
        assert jax.tree.all(
            jax.tree.map(lambda a, b: a.sharding == b.sharding, state, run.abstract())
        )
        source = runs.Source(None, 0, "")
        record = lm_runs.Record(run.config, run.training, source, 0.0, {}, history=runs.History())
        models.save(tmp_path, 4, state, record)
        on_mesh, loss_on_mesh = advance(models.restore(tmp_path, 4, run), 4, 3)
        resumed, _ = one.advance(models.restore(tmp_path, 4, one), 4, 3)
        assert loss_on_mesh < loss  # the mean of the last steps alone
        for actual in (on_mesh, resumed):
            jax.tree.map(
                lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5, rtol=2e-5),
                actual,
                expected,
            )
        shapes = exchanged(program)
        # Without tables nothing is divided by detector: devices compute the same, and exchange nothing.
        assert bool(shapes) == (model != "dense" or "data" in LAYOUTS[layout])
        if not (
            options == DENSE and "data" in LAYOUTS[layout]
        ):  # whose gradients are of the shape of tables
            assert not any(ROWS in shape for shape in shapes)

    @needs_devices(8)
    def test_a_run_on_a_mesh_is_deployed_as_any_other(self, text, tmp_path):
        words = """--context=8 --features=12 --n-layers=1 --n-heads=2 --lut-heads=1 --lut-tables=8 --lut-bits=3 --batch-size=8
        --microbatches=2 --steps=8 --validate --select-every=4 --read=powers_of_two --feed-forward=scored_lut"""
        train = ("train", "lm", "--text", text, "--out", tmp_path, *words.split())
        assert "on 8 x cpu (data=2,detectors=4)" in output(*train, "--mesh", "data=2,detectors=4")
        generate = ("generate", tmp_path, "--prompt", "the ", "--bytes", 9)
        assert output(*generate, "--mesh", "detectors=8") == output(*generate)
        assert "test loss" in output("quantize", tmp_path)
        generate = ("generate", tmp_path / "quantized", *generate[2:])
        assert output(*generate, "--mesh", "detectors=2") == output(*generate)

    @needs_devices(8)
    @pytest.mark.parametrize(
        ("words", "mesh"), [(DIGITS, "data=4"), (DIGITS, "data=2,detectors=4"), (CA, "data=2")]
    )
    def test_gates_on_a_mesh(self, words, mesh, tmp_path):
        def curves(out):
            with (out / "curves.csv").open() as file:
                return [float(row["value"]) for row in csv.DictReader(file)]

        words = (
            "train",
            *words.split(),
            *["--steps=12", "--log-every=6", "--eval-every=6", "--checkpoint-every=6"],
        )
        one, several = tmp_path / "one", tmp_path / "several"
        output(*words, "--out", one)
        assert f" x cpu ({mesh})" in output(*words, "--out", several, "--mesh", mesh)
        assert curves(several) == pytest.approx(curves(one), rel=1e-5)
        output("export", several, "--out", tmp_path / "circuit", "--format", "json")


def test_one_process_needs_no_others():
    with hosts.run_together():
        hosts.initialize()
        hosts.barrier("alone")
        assert (hosts.count(), hosts.index(), hosts.is_first()) == (1, 0, True)
        assert hosts.gather(3) == [3]
        assert hosts.call_in_first(lambda: 4) == 4
        assert hosts.agree(True)
        assert not hosts.agree(False)
    assert not hosts.is_lost_process(RuntimeError("NCCL"))


def test_a_part_of_an_array_is_read_with_its_padding():
    class Noted(np.ndarray):
        def __getitem__(self, part):
            read.append(part)
            return super().__getitem__(part)

    read = []
    text = np.arange(1, 14, dtype=np.uint8)
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))
    lies = hosts.put(hosts.Padded(text.view(Noted), 16), NamedSharding(mesh, P("data")))
    np.testing.assert_array_equal(hosts.fetch(lies), np.pad(text, (0, 3)))
    assert sorted(part.start for part in read) == [0, 4, 8, 12]


@pytest.mark.parametrize(("arguments", "message"), [
    (("10.0.0.1:1",), "is 10.0.0.1:1, and n_processes and process are missing: give all three"),
    (("10.0.0.1:1", 2), "process is missing"),
    (("10.0.0.1", 2, 0), r"coordinator is '10\.0\.0\.1'; it must be host:port"),
    (("10.0.0.1:1", 2, 2), "process is 2; it must be 0 to 1"),
    (("10.0.0.1:1", 0, 0), "n_processes is 0"),
])  # fmt: skip
def test_processes_that_cannot_be(arguments, message):
    with pytest.raises(ValueError, match=message):
        hosts.initialize(*arguments)


SLURM = {
    "SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "n[1-2]", "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_PROCID": "1",
}  # fmt: skip


@pytest.mark.parametrize(("changes", "arguments", "joined"), [
    ({}, (), (None, None, None, [], "slurm")),
    ({"SLURM_STEP_TASKS_PER_NODE": "4(x2)"}, (), (None, None, None, None, "slurm")),
    ({"SLURM_STEP_TASKS_PER_NODE": "4", "CUDA_VISIBLE_DEVICES": "0"}, (),
        (None,) * 3 + ([], "slurm")),
    ({"JAX_LOCAL_DEVICE_IDS": "0,1"}, (), (None, None, None, None, "slurm")),
    ({}, ("h:1",), ("h:1", None, None, [], "slurm")),
    ({}, ("h:1", 3, 2), ("h:1", 3, 2, [], "deactivate")),
    ({"SLURM_STEP_NUM_TASKS": "1"}, (), None),
])  # fmt: skip
def test_slurm(monkeypatch, changes, arguments, joined):
    for name, value in {**SLURM, **changes}.items():
        monkeypatch.setenv(name, value)
    calls = []

    def initialize(*given, local_device_ids, cluster_detection_method, **_):
        calls.append((*given, local_device_ids, cluster_detection_method))

    monkeypatch.setattr("jax.distributed.initialize", initialize)
    enabled = jax.config.jax_enable_preemption_service
    try:
        hosts.initialize(*arguments)
    finally:
        jax.config.update("jax_enable_preemption_service", enabled)
    assert calls == ([] if joined is None else [joined])


@pytest.mark.parametrize(
    ("hosts_of", "wanted"),
    [
        (
            [(0, 0), (0, 0), (1, 0), (1, 0)],
            {"data": 1, "detectors": 4},
        ),  # two processes of one host
        ([(0, 0), (1, 0), (2, 1), (3, 1)], {"data": 2, "detectors": 2}),  # a process for each GPU
        ([(0, None), (0, None), (1, None), (1, None)], {"data": 2, "detectors": 2}),
    ],
)
@pytest.mark.usefixtures("without_typechecking")
def test_tables_are_divided_within_a_host(hosts_of, wanted):
    devices = [
        SimpleNamespace(
            id=i, process_index=process, slice_index=host, platform="gpu", device_kind="GPU"
        )
        for i, (process, host) in enumerate(hosts_of)
    ]
    params = {"weights": jax.ShapeDtypeStruct((8, 16, 4), jnp.float32)}
    assert meshes._best_axes(params, devices, 4, n_processes=2, tables={"weights"}) == wanted
