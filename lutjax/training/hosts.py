"""Multi-process training: startup, and work by one process for all.

All processes run the same program, each on its own devices. They compute together, in jitted
functions of global arrays. Only the first process prints, and writes everything except the other
processes' array shards in a checkpoint. A standalone program is the first and only process, without
any overhead.
"""

import dataclasses
import itertools
import os
import pickle
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from lutjax.training.errors import HostError

if TYPE_CHECKING:
    import jax

T = TypeVar("T")

JOINED_AFTER = 300  # seconds to wait for other processes at startup
LOST_AFTER = 100  # seconds without a heartbeat before a process counts as lost; all others then end
PATIENCE = 10  # seconds a failed process waits for others to notice, before it ends without them

# Variables set by clusters for each process: the process count, and indicators of the cluster.
_CLUSTERS = {
    "slurm": ("SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST", "SLURM_JOB_ID", "SLURM_PROCID"),
    "ompi": ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_MCA_orte_hnp_uri"),
}

# Numbers of exchanges: all processes make the same ones in the same order, so equal numbers meet.
_numbers = itertools.count()
_shared: BaseException | None = None  # latest error that all processes know of


def initialize(
    coordinator: str | None = None,
    n_processes: int | None = None,
    process: int | None = None,
    *,
    lost_after: int | None = None,
) -> None:
    """Join the processes of a run, before any code accesses JAX devices.

    Without arguments it joins if SLURM (``srun``) or Open MPI (``mpirun``) has started several
    processes, and does nothing otherwise. It does nothing in a process that has already joined.
    With one process per host of a cluster, each process gets all local devices.

    Args:
      coordinator: ``host:port`` of the first process, at a free port; the same in every process.
      n_processes: number of processes.
      process: index of this process, from 0.
      lost_after: seconds without a heartbeat before a process counts as lost, and all others end;
        by default `LOST_AFTER`.

    Raises:
      ValueError: only some arguments are given, or one is invalid.
      HostError: processes cannot meet at the coordinator's address.
    """
    import jax

    if jax.distributed.is_initialized():
        return
    arguments = {"coordinator": coordinator, "n_processes": n_processes, "process": process}
    missing = [name for name, value in arguments.items() if value is None]
    cluster, in_cluster = _cluster() or (None, None)
    if cluster is None and 0 < len(missing) < 3:
        name = next(name for name, value in arguments.items() if value is not None)
        raise ValueError(
            f"{name} is {arguments[name]}, and {' and '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} missing: give all three, as this process was "
            "not started by SLURM or Open MPI."
        )
    if coordinator is not None and not re.fullmatch(r".+:\d+", coordinator):
        raise ValueError(
            f"coordinator is {coordinator!r}; "
            "it must be host:port of the first process, such as 10.0.0.1:1234."
        )
    if n_processes is not None and n_processes < 1:
        raise ValueError(f"n_processes is {n_processes}; it must be at least 1.")
    if process is not None and not 0 <= process < (n_processes or in_cluster or process + 1):
        raise ValueError(
            f"process is {process}; it must be 0 to {(n_processes or in_cluster or 1) - 1}."
        )
    if (n_processes or in_cluster or 1) == 1:
        return
    # JAX would handle SIGTERM itself, but it must end a run with a checkpoint.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            coordinator,
            n_processes,
            process,
            local_device_ids=[] if cluster and _all_are_its_own() else None,
            cluster_detection_method=cluster if missing else "deactivate",
            initialization_timeout=JOINED_AFTER,
            heartbeat_timeout_seconds=LOST_AFTER if lost_after is None else lost_after,
        )
    except jax.errors.JaxRuntimeError as error:
        raise HostError(
            f"processes cannot meet at {coordinator}: {str(error).splitlines()[0]}"
        ) from error


def _cluster() -> tuple[str, int] | None:
    """Return JAX's name for the cluster of this process, and its process count, or None."""
    for name, (size, *others) in _CLUSTERS.items():
        if all(variable in os.environ for variable in (size, *others)):
            return name, int(os.environ[size])
    return None


def _all_are_its_own() -> bool:
    """Return True if a process gets all visible devices; JAX's default is one per local process."""
    if "JAX_LOCAL_DEVICE_IDS" in os.environ:
        return False
    per_host = os.environ.get(
        "SLURM_STEP_TASKS_PER_NODE", os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE", "")
    )
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return bool(re.fullmatch(r"1(\(x\d+\))?", per_host)) or (
        visible is not None and "," not in visible
    )


def _joined_jax() -> Any:
    """Return the module JAX after `initialize` has joined, or None."""
    # Commands that need no JAX must not import it, which takes a second.
    jax = sys.modules.get("jax")
    return jax if jax is not None and jax.distributed.is_initialized() else None


def count() -> int:
    """Return the number of processes."""
    jax = _joined_jax()
    return 1 if jax is None else int(jax.process_count())


def index() -> int:
    """Return the index of this process, from 0."""
    jax = _joined_jax()
    return 0 if jax is None else int(jax.process_index())


def is_first() -> bool:
    """Return True in the process that prints and writes."""
    return index() == 0


@dataclasses.dataclass(frozen=True)
class Padded:
    """One-dimensional array with trailing zeros up to a length, read lazily in parts."""

    array: np.ndarray
    length: int

    @property
    def shape(self) -> tuple[int]:
        """Padded shape."""
        return (self.length,)

    def __getitem__(self, parts: tuple[slice]) -> np.ndarray:
        first, last, _ = parts[0].indices(self.length)
        part = np.asarray(self.array[first:last])
        return np.pad(part, (0, last - first - part.size))


def put(array: np.ndarray | Padded, sharding: "jax.sharding.Sharding") -> "jax.Array":
    """Return a global array from a host array that every process has.

    Each process reads only the parts for its own devices, for example from a memory-mapped file.
    """
    import jax

    def read(part: Any) -> np.ndarray:
        return np.asarray(array[part])

    return jax.make_array_from_callback(array.shape, sharding, read)


def fetch(array: "jax.Array") -> np.ndarray:
    """Return a global array as a host array in every process. All processes must call it."""
    if array.is_fully_addressable or array.is_fully_replicated:
        return np.asarray(array)
    from jax.experimental import multihost_utils

    return np.asarray(multihost_utils.process_allgather(array, tiled=True))


def barrier(name: str) -> None:
    """Wait for all processes, which must give the same name."""
    if count() > 1:
        names = gather(name)
        assert len(set(names)) == 1, f"processes wait at different places: {names}"


def agree(flag: bool) -> bool:
    """Return, in every process, True if a flag is true in any process."""
    return bool(max_over_processes(float(flag)))


def max_over_processes(number: float) -> float:
    """Return, in every process, the maximum over processes, in float32 for several processes."""
    if count() == 1:
        return number
    from jax.experimental import multihost_utils

    # The devices reduce it in the time of a step, for any number of processes.
    return float(np.max(multihost_utils.process_allgather(np.asarray(number, np.float32))))


def gather(value: T) -> list[T]:
    """Return, in every process, the small (pickled) values of all processes in order."""
    if count() == 1:
        return [value]
    return _gather(value)


def call_in_first(function: Callable[[], T]) -> T:
    """Call a function in the first process only, and return its result in every process.

    Raises:
      HostError: in the other processes, if it raises an error in the first.
    """
    if count() == 1:
        return function()
    key = f"lutjax/{next(_numbers)}"
    if is_first():
        try:
            value = function()
        except Exception as error:
            _set(key, (None, _describe_error(error)))
            _share(error)
            raise
        _set(key, (value, None))
        return value
    value, failed = _get(key)
    if failed is not None:
        raise _share(HostError(f"process 0: {failed}"))
    return value


@contextmanager
def run_together() -> Iterator[None]:
    """Run a block in all processes, and raise an error in all if any fails.

    Processes without an error of their own raise `HostError`. If other processes wait for it, a
    failing process ends after `PATIENCE` seconds by raising its error, which is then unknown to
    `is_shared_error`.
    """
    if count() == 1:
        yield
        return
    try:
        yield
    except Exception as error:
        if not is_shared_error(error) and not is_lost_process(error):
            try:
                _gather(_describe_error(error), time.monotonic() + PATIENCE)
                _share(error)
            except TimeoutError:  # others wait in a computation, which only this end interrupts
                pass
        raise
    for process, failed in enumerate(_gather(None)):
        if failed is not None:
            raise _share(HostError(f"process {process}: {failed}"))


def is_shared_error(error: BaseException) -> bool:
    """Return True if all processes know of an error or its cause, and will end with one."""
    cause: BaseException | None = error
    while cause is not None and cause is not _shared:
        cause = cause.__cause__ or cause.__context__
    return cause is not None


def is_lost_process(error: BaseException) -> bool:
    """Return True if an error reports another process as ended or unreachable."""
    # Backends raise their general error types; only the texts tell a lost connection.
    lost = r"Gloo|NCCL|[Cc]oordination ?[Ss]ervice|heartbeat|Connection (closed|reset)"
    return (
        count() > 1
        and isinstance(error, RuntimeError | ValueError)
        and re.search(lost, str(error)) is not None
    )


def _share(error: T) -> T:
    global _shared
    _shared = error  # type: ignore[assignment]
    return error


def _describe_error(error: BaseException) -> str:
    return str(error) or type(error).__name__


def _gather(value: Any, deadline: float | None = None) -> list[Any]:
    key = f"lutjax/{next(_numbers)}"
    if not is_first():
        _set(f"{key}/{index()}", value)
        received: list[Any] = _get(key, deadline)
        return received
    values = [value, *(_get(f"{key}/{process}", deadline) for process in range(1, count()))]
    _set(key, values)
    return values


def _coordination() -> Any:
    """Return the client for small values between processes; JAX has no public name for it."""
    from jax._src import distributed

    return distributed.global_state.client


def _set(key: str, value: Any) -> None:
    _coordination().key_value_set_bytes(key, pickle.dumps(value))


def _get(key: str, deadline: float | None = None) -> Any:
    """Wait for a value set by a process, at most until the deadline (TimeoutError)."""
    import jax

    while True:
        try:
            # Short waits let Ctrl-C through.
            return pickle.loads(_coordination().blocking_key_value_get_bytes(key, 2000))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
        if deadline is not None and time.monotonic() > deadline:
            raise TimeoutError
