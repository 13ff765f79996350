"""Implementation checks: run and compare, lower, compile."""

import concurrent.futures
import contextlib
import dataclasses
import functools
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax

import lutjax
from lutjax import cases, testing
from lutjax.cases import Tag
from lutjax.dispatch.registry import Device, KernelSpec, NoImplementationError, kernel_registry
from lutjax.kernels._pallas._tpus import TPUS
from lutjax.status.matrix import Cell, Column, State, first_device
from lutjax.testing import _ahead_of_time


def checked_size(op: str) -> str:
    """Return the name of the checked size; the suites check all sizes."""
    return cases.find_module(op).tagged(Tag.DTYPES)[0]


def check(op: str, column: Column, dtype: str) -> dict[str, Cell]:
    """Run an op if a suitable device is present, else lower it; return a cell per direction."""
    device = column.device
    if device is not None:
        run = functools.partial(_run, device=device)
        return _each_direction(op, column, dtype, run, (device.device_kind,))
    kind = column.kinds[0]
    lower = functools.partial(_lower, column=column, kind=kind)
    return _each_direction(op, column, dtype, lower, (kind,))


def check_compilation(op: str, column: Column, dtype: str) -> dict[str, Cell]:
    """Compile an op for every TPU in a column."""
    found: dict[str, Cell] = {}
    for tpu in TPUS:
        if tpu.device_kind not in column.kinds:
            continue
        compiled = functools.partial(_compile, tpu=tpu.name)
        for direction, cell in _each_direction(
            op, column, dtype, compiled, (f"TPU {tpu.name}",)
        ).items():
            found[direction] = _merge_cells(found.get(direction), cell)
    return found


def _merge_cells(before: Cell | None, cell: Cell) -> Cell:
    """Merge cells from several TPUs: compiled kinds, and any failure or reason."""
    if before is None or before.state != cell.state:
        return cell if before is None or before.state == State.COMPILES else before
    kinds = (*before.kinds, *cell.kinds) if cell.state == State.COMPILES else cell.kinds
    return dataclasses.replace(cell, kinds=kinds)


# ---------------------------------------------------------------------------------- all of a matrix
_Key = tuple[str, Column, str]
CheckOne = Callable[[str, Column, str], dict[str, Cell]]
_WORTH_A_PROCESS = 4  # checks of ops in a dtype: it takes as long to start


@contextlib.contextmanager
def in_processes(check: CheckOne, keys: Iterable[_Key]) -> Iterator[CheckOne]:
    """Run all checks in this block in parallel, with one process per core.

    Args:
      check: `check` or `check_compilation`.
      keys: its arguments.
    """
    groups: dict[tuple[str, str], dict[Column, None]] = {}
    # Columns of one op and dtype share the reference results, so one process checks them all.
    for op, column, dtype in keys:
        groups.setdefault((op, dtype), {})[column] = None
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    n = min(cores, len(groups) // _WORTH_A_PROCESS)
    if n < 2:
        yield check
        return
    pool = concurrent.futures.ProcessPoolExecutor(
        n, multiprocessing.get_context("spawn"), signal.signal, (signal.SIGINT, signal.SIG_IGN)
    )
    try:
        of_group = {
            (op, dtype): pool.submit(_check_group, check, op, tuple(columns), dtype)
            for (op, dtype), columns in groups.items()
        }
        yield lambda op, column, dtype: of_group[op, dtype].result()[column]
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _check_group(
    check: CheckOne, op: str, columns: tuple[Column, ...], dtype: str
) -> dict[Column, dict[str, Cell]]:
    """Check several implementations against shared reference results."""
    return {column: check(op, column, dtype) for column in columns}


# ------------------------------------------------------------------------------------- one op
# A check of a program: its outcome for each of the directions that it shows, a state and a reason.
_Outcomes = dict[str, tuple[State, str]]
_Check = Callable[[testing.Program, tuple[str, ...]], _Outcomes]


def _each_direction(
    op: str, column: Column, dtype: str, check: _Check, kinds: tuple[str, ...]
) -> dict[str, Cell]:
    """Return cells by direction. `kinds`: checked device kinds."""
    spec = column.spec(op)
    if spec is None:
        return {}
    cells = {}
    # Without a forward kernel, plain JAX runs the forward pass of the check.
    has_forward = "forward" in spec.directions
    implementation = column.implementation if has_forward else (column.implementation, "xla")
    with jax.enable_x64(dtype == "float64"):
        case = testing.case(op, checked_size(op), dtype)
        for directions, program in testing.programs(case, implementation).items():
            if not set(directions) & set(spec.directions):
                continue
            outcomes = _outcome(check, program, directions)
            why = None if has_forward else _unsupported_backward(spec, program, column.kinds[0])
            if why is not None:
                outcomes["backward"] = (State.UNSUPPORTED, why)
            for direction, (state, reason) in outcomes.items():
                cells[direction] = Cell(
                    op,
                    direction,
                    column.key,
                    dtype,
                    state,
                    () if state == State.UNSUPPORTED else kinds,
                    jax.__version__,
                    lutjax.__version__,
                    reason,
                )
    return cells


def _unsupported_backward(spec: KernelSpec, program: testing.Program, kind: str) -> str | None:
    """Return the reason that a kernel cannot run a program's backward pass, or None."""
    assert program.forward is not None
    with kernel_registry.collecting() as calls:
        jax.eval_shape(program.forward.function, *program.forward.shapes())
    made = next(made for made in calls if made.call.op == spec.op)
    return spec.unsupported_reason(made.request("backward", Device(spec.backend, kind)))


def _outcome(check: _Check, program: testing.Program, directions: tuple[str, ...]) -> _Outcomes:
    try:
        return check(program, directions)
    except NoImplementationError as error:
        reason = next(c.reason for c in error.candidates if c.reason is not None)
        # The forward pass may run: check it by itself.
        if error.direction == "backward":
            assert program.forward is not None
            forward = _outcome(check, program.forward, ("forward",))
            return {**forward, "backward": (State.UNSUPPORTED, reason)}
        return dict.fromkeys(directions, (State.UNSUPPORTED, reason))
    except Exception as error:  # noqa: BLE001 - the cell reports any compiler error
        first_line = (str(error).strip() or repr(error)).splitlines()[0]
        return dict.fromkeys(directions, (State.FAILS, f"{type(error).__name__}: {first_line}"))


def _run(program: testing.Program, directions: tuple[str, ...], device: jax.Device) -> _Outcomes:
    with jax.default_device(device):
        actual = jax.jit(program.function)(*program.arguments)
    expected = _reference_results(program, directions)
    outcomes: _Outcomes = {}
    for direction, a, e in zip(directions, actual, expected, strict=True):
        try:
            testing.assert_all_close(program.what, a, e)
        except AssertionError as error:
            line = next(line for line in str(error).splitlines() if line.strip())
            outcomes[direction] = (State.FAILS, f"differs from the reference: {line}")
        else:
            outcomes[direction] = (State.RUNS, "")
    return outcomes


_expectations: dict[tuple[str, tuple[str, ...]], Any] = {}


def _reference_results(program: testing.Program, directions: tuple[str, ...]) -> Any:
    """Return the reference results, on a CPU if available: the same for all implementations."""
    # Descriptions name op, size and dtype, which determine the arguments.
    key = program.what, directions
    if key not in _expectations:
        with jax.default_device(first_device("cpu")):
            _expectations[key] = jax.jit(program.expected)(*program.arguments)
    return _expectations[key]


def _lower(
    program: testing.Program, directions: tuple[str, ...], column: Column, kind: str
) -> _Outcomes:
    _ahead_of_time.lower(
        program.function, *program.arguments, platform=column.platform, device_kind=kind
    )
    return dict.fromkeys(directions, (State.LOWERS, ""))


def _compile(program: testing.Program, directions: tuple[str, ...], tpu: str) -> _Outcomes:
    _ahead_of_time.compile_for_tpu(program.function, *program.arguments, tpu=tpu)
    return dict.fromkeys(directions, (State.COMPILES, ""))
