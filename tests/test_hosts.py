"""Several processes: what they agree on, and checkpoints that they write and read together."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import processes
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from lutjax.training import checkpoints, hosts
from lutjax.training.errors import DamagedError, HostError

SPECS = {
    "table": P("detectors"),
    "rows": P(None, "data"),
    "same": P(),
    "both": P(("data", "detectors")),
    "key": P(),
}


def values():
    """Arrays with all bits in use."""
    return {
        "table": np.random.default_rng(0).normal(size=(8, 6, 8)).astype(np.float32),
        "rows": np.arange(40, dtype=np.int32).reshape(5, 8),
        "same": np.float32(3.25),
        "both": np.random.default_rng(1).normal(size=(8, 3)).astype(np.float32).astype(jnp.bfloat16),
        "key": jax.random.key_data(jax.random.key(5)),
    }


def placed(n_data, specs=SPECS):
    """The arrays on a mesh of all devices."""
    mesh = Mesh(np.array(jax.devices()).reshape(n_data, -1), ("data", "detectors"))
    return {name: hosts.put(np.asarray(a), NamedSharding(mesh, specs[name])) for name, a in values().items()}


def save(directory, n_data, step):
    checkpoints.save(Path(directory), step, {"model": placed(n_data)}, {"name": "sharded"})


def check(directory, n_data, step):
    """Read a checkpoint in pieces on another mesh, and compare bits."""
    assert checkpoints.read_meta(Path(directory)) == (step, {"name": "sharded"})
    other = {**SPECS, "table": P("data", None, "detectors"), "rows": P()}
    wanted = placed(n_data, other)
    template = {
        name: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding) for name, a in wanted.items()
    }
    found = checkpoints.restore(Path(directory), step, "model", template)
    for name, a in values().items():
        assert found[name].sharding == wanted[name].sharding, name
        np.testing.assert_array_equal(hosts.fetch(found[name]), np.asarray(a), strict=True)


def write_and_read(directory):
    save(directory, 2, 5)
    check(directory, 1, 5)
    check(directory, 4, 5)


def test_a_checkpoint_of_two_processes(tmp_path: Path) -> None:
    processes.run("test_hosts:write_and_read", str(tmp_path))
    for n_data in (1, 4):  # of eight devices of one process
        check(tmp_path, n_data, 5)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["5"]
    alone = {name: jax.ShapeDtypeStruct(np.shape(a), np.asarray(a).dtype) for name, a in values().items()}
    for name, array in checkpoints.restore(tmp_path, 5, "model", alone).items():
        assert array.devices() == {jax.local_devices()[0]}
        np.testing.assert_array_equal(np.asarray(array), np.asarray(values()[name]))


def agreements(directory):
    i, n = hosts.index(), hosts.count()
    assert hosts.is_first() == (i == 0)
    hosts.barrier("here")
    assert hosts.gather({"process": i}) == [{"process": k} for k in range(n)]
    assert hosts.by_first(lambda: ("first", i)) == ("first", 0)
    assert hosts.agree(i == n - 1)
    assert not hosts.agree(False)

    def fail():
        raise OSError(28, "no space")

    with pytest.raises(OSError if i == 0 else HostError, match="no space") as caught:
        hosts.by_first(fail)
    assert hosts.shared(caught.value)
    with pytest.raises(
        KeyError if i == 1 else HostError, match="process 1: 'name'" if i != 1 else "name"
    ) as caught:
        with hosts.together():
            if i == 1:
                raise KeyError("name")
    assert hosts.shared(caught.value)
    with hosts.together():
        pass
    # A damaged file is noticed by all, whoever reads it.
    path = Path(directory)
    save(path, 1, 1)
    save(path, 2, 2)
    if i == 0:
        damaged = sorted(p for p in (path / "2").rglob("*") if p.is_file() and p.name != "checkpoint.json")
        damaged[-1].write_bytes(b"x")
    hosts.barrier("damaged")
    with pytest.raises(DamagedError, match="has changed since it was written"):
        checkpoints.read_meta(path, 2)
    messages = []
    assert checkpoints.read_meta(path, on_damage=messages.append)[0] == 1
    assert len(messages) == 1
    save(path, 1, 2)  # in its place
    check(path, 4, 2)


def test_two_processes_agree(tmp_path: Path) -> None:
    processes.run("test_hosts:agreements", str(tmp_path))
