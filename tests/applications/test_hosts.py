"""How processes join and share arrays; `test_slow_processes` runs several of them."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from lutjax.training import hosts, meshes


def test_one_process_needs_no_others():
    with hosts.together():
        hosts.initialize()
        hosts.barrier("alone")
        assert (hosts.count(), hosts.index(), hosts.is_first()) == (1, 0, True)
        assert hosts.gather(3) == [3]
        assert hosts.by_first(lambda: 4) == 4
        assert hosts.agree(True)
        assert not hosts.agree(False)
    assert not hosts.lost(RuntimeError("NCCL"))


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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("10.0.0.1:1",), "is 10.0.0.1:1, and n_processes and process are missing: .* give all three"),
        (("10.0.0.1:1", 2), "process is missing"),
        (("10.0.0.1", 2, 0), r"coordinator is '10\.0\.0\.1'; it must be host:port"),
        (("10.0.0.1:1", 2, 2), "process is 2; it must be 0 to 1"),
        (("10.0.0.1:1", 0, 0), "n_processes is 0"),
    ],
)
def test_processes_that_cannot_be(arguments, message):
    with pytest.raises(ValueError, match=message):
        hosts.initialize(*arguments)


SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_PROCID": "1",
}


@pytest.mark.parametrize(
    ("changes", "arguments", "joined"),
    [
        ({}, (), (None, None, None, [], "slurm")),
        ({"SLURM_STEP_TASKS_PER_NODE": "4(x2)"}, (), (None, None, None, None, "slurm")),
        ({"SLURM_STEP_TASKS_PER_NODE": "4", "CUDA_VISIBLE_DEVICES": "0"}, (), (None,) * 3 + ([], "slurm")),
        ({"JAX_LOCAL_DEVICE_IDS": "0,1"}, (), (None, None, None, None, "slurm")),
        ({}, ("h:1",), ("h:1", None, None, [], "slurm")),
        ({}, ("h:1", 3, 2), ("h:1", 3, 2, [], "deactivate")),
        ({"SLURM_STEP_NUM_TASKS": "1"}, (), None),
    ],
)
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
        ([(0, 0), (0, 0), (1, 0), (1, 0)], {"data": 1, "detectors": 4}),  # two processes of one host
        ([(0, 0), (1, 0), (2, 1), (3, 1)], {"data": 2, "detectors": 2}),  # a process for each GPU
        ([(0, None), (0, None), (1, None), (1, None)], {"data": 2, "detectors": 2}),
    ],
)
@pytest.mark.usefixtures("without_typechecking")
def test_tables_are_divided_within_a_host(hosts_of, wanted):
    devices = [
        SimpleNamespace(id=i, process_index=process, slice_index=host, platform="gpu", device_kind="GPU")
        for i, (process, host) in enumerate(hosts_of)
    ]
    params = {"weights": jax.ShapeDtypeStruct((8, 16, 4), jnp.float32)}
    assert meshes._best(params, devices, 4, n_processes=2, tables={"weights"}) == wanted
