"""Finding out what an implementation does with an op: run and compared, lowered, compiled."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import lutjax
from lutjax import _ahead_of_time, reference, testing
from lutjax.kernels._pallas._tpus import TPUS
from lutjax.kernels.registry import NoImplementationError
from lutjax.status._digests import digest
from lutjax.status._matrix import PACKED, Cell, Column, State, registered_name

SHAPE = "primes"
"""The size that is checked; the suites check all."""


def programs(op: str, dtype: str, implementation: str) -> dict[tuple[str, ...], testing.Program]:
    """What is checked of an op, by the directions that each shows."""
    if op == PACKED:
        return {("forward",): _packed(implementation)}
    case = testing.case(op, SHAPE, dtype)
    of_op: dict[tuple[str, ...], testing.Program] = {}
    of_op["forward", "backward"] = testing.program(case, implementation)
    if op in testing.LOOK_UPS:
        of_op["update",] = testing.update_program(case, implementation)
    return of_op


def _packed(implementation: str) -> testing.Program:
    rng = np.random.default_rng(0)
    words = jnp.asarray(rng.integers(0, 2**32, (7, 5), np.uint32))
    truth = jnp.asarray(rng.integers(0, 2, (11, 8)) > 0)
    wires = jnp.asarray(rng.integers(0, 7, (11, 3)), jnp.int32)
    return testing.Program(
        PACKED,
        lambda *a: ({"y": lutjax.packed_lut(*a, implementation=implementation)},),
        lambda *a: ({"y": reference.packed_lut(*a)},),
        (words, truth, wires),
    )


def check(op: str, column: Column, dtype: str) -> dict[str, Cell]:
    """Runs an op where a device of the column is here, and lowers it elsewhere: a cell for each direction."""
    device = column.device
    if device is not None:
        return _each_direction(op, column, dtype, functools.partial(_run, device=device))
    kind = column.kinds[0]
    return _each_direction(op, column, dtype, functools.partial(_lower, column=column, kind=kind))


def check_compilation(op: str, column: Column, dtype: str) -> dict[str, Cell]:
    """Compiles an op for every TPU of the column."""
    found: dict[str, Cell] = {}
    for tpu in TPUS:
        if tpu.device_kind not in column.kinds:
            continue
        for direction, cell in _each_direction(
            op, column, dtype, functools.partial(_compile, tpu=tpu.name)
        ).items():
            found[direction] = _together(found.get(direction), cell)
    return found


def _together(before: Cell | None, cell: Cell) -> Cell:
    """What several TPUs say: the kinds of all that compile; a failure or a reason of any."""
    if before is None or before.state != cell.state:
        return cell if before is None or before.state == State.COMPILES else before
    kinds = (*before.kinds, *cell.kinds) if cell.state == State.COMPILES else cell.kinds
    return dataclasses.replace(cell, kinds=kinds)


# A check of a program: its outcome for each of the directions that it shows.
_Check = Callable[[testing.Program, tuple[str, ...]], dict[str, tuple[State, tuple[str, ...], str]]]


def _each_direction(op: str, column: Column, dtype: str, check: _Check) -> dict[str, Cell]:
    cells = {}
    with jax.enable_x64(dtype == "float64"):
        for directions, program in programs(op, dtype, column.implementation).items():
            spec = column.spec(registered_name(op, directions[0]))
            if spec is None:
                continue
            for direction, (state, kinds, reason) in _outcome(check, program, directions).items():
                cells[direction] = Cell(
                    op,
                    direction,
                    column.key,
                    dtype,
                    state,
                    kinds,
                    jax.__version__,
                    lutjax.__version__,
                    reason,
                    digest(spec.target),
                )
    return cells


def _outcome(
    check: _Check, program: testing.Program, directions: tuple[str, ...]
) -> dict[str, tuple[State, tuple[str, ...], str]]:
    try:
        return check(program, directions)
    except NoImplementationError as error:
        reason = next(c.reason for c in error.candidates if c.reason is not None)
        if error.direction == "backward":
            assert program.forward is not None
            forward = _outcome(check, program.forward, ("forward",))
            return {**forward, "backward": (State.UNSUPPORTED, (), reason)}
        return dict.fromkeys(directions, (State.UNSUPPORTED, (), reason))
    except Exception as error:  # noqa: BLE001 - whatever a compiler raises is what the cell has to say
        first_line = (str(error).strip() or repr(error)).splitlines()[0]
        return dict.fromkeys(directions, (State.FAILS, (), f"{type(error).__name__}: {first_line}"))


def _run(program: testing.Program, directions: tuple[str, ...], device: jax.Device) -> Any:
    with jax.default_device(device):
        actual = jax.jit(program.function)(*program.arguments)
        expected = jax.jit(program.expected)(*program.arguments)
    outcomes = {}
    for direction, a, e in zip(directions, actual, expected, strict=True):
        try:
            testing.assert_all_close(program.what, a, e)
        except AssertionError as error:
            line = next(line for line in str(error).splitlines() if line.strip())
            outcomes[direction] = (State.FAILS, (device.device_kind,), f"differs from the reference: {line}")
        else:
            outcomes[direction] = (State.RUNS, (device.device_kind,), "")
    return outcomes


def _lower(program: testing.Program, directions: tuple[str, ...], column: Column, kind: str) -> Any:
    _ahead_of_time.lower(program.function, *program.arguments, platform=column.platform, device_kind=kind)
    return dict.fromkeys(directions, (State.LOWERS, (kind,), ""))


def _compile(program: testing.Program, directions: tuple[str, ...], tpu: str) -> Any:
    _ahead_of_time.compile_for_tpu(program.function, *program.arguments, tpu=tpu)
    return dict.fromkeys(directions, (State.COMPILES, (f"TPU {tpu}",), ""))
