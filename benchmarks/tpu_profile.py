"""Static profiles of TPU kernels by libtpu's compiler, without a TPU.

Run `python benchmarks/tpu_profile.py`.

Requires a separate environment (`pip install -e ".[tpu]"`). Each line shows the sum of the
compiler's cycle estimates for all operations of a program, also as time at the clock of the chip;
the bandwidth bound (arguments and results once through HBM); and for lookups the matrix-unit bound,
for one-hot rows times the table in three bfloat16 passes. This is no measurement: loops with
dynamic length count once, and reads and writes each get the full bandwidth. Differences below 30 %
are meaningless. For kernels with explicit copies the compiler has no estimate: the script counts
the executed instruction bundles of their loops, without the copies. For programs without any
estimates, it does so for every operation.
"""

import argparse
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness import parse, print_table  # beside this file

# Ops and sizes for `lutjax.testing.case`.
CASES: dict[str, tuple[str, dict[str, int]]] = {
    "lookup 4096 x 16, 6 bits, 128 outputs": ("lookup", {"batch": 4096, "detectors": 16, "bits": 6, "outputs": 128}),
    "lookup 4096 x 16, 10 bits, 256 outputs": ("lookup", {"batch": 4096, "detectors": 16, "bits": 10, "outputs": 256}),
    "lookup_attention 8 x 32 x 16, 6 + 6 + 4 bits, 32 outputs":
        ("lookup_attention", {"batch": 8, "queries": 32, "detectors": 16, "bits": 6, "position_bits": 4, "outputs": 32}),
}  # fmt: skip
IMPLEMENTATIONS = ("reference", "xla", "pallas/tpu")
_DUMP = "--xla_jf_dump_to={0} --xla_jf_dump_llo_text=true"
_ESTIMATE = "--xla_jf_dump_static_llo_profile_to={0}/profile"
_ESTIMATES = r'hlo_op_name: "(.*)"\s+estimated_cycles: (\d+)\s+num_equivalent_hlos: (\d+)'


def profile(case: str, implementation: str, tpu: str) -> dict[str, float | str]:
    """Return the profile of a program, compiled in a new process: the compiler reads its options once."""
    arguments = [case, implementation, tpu]
    with tempfile.TemporaryDirectory() as folder:
        dump, estimates = Path(folder), Path(folder) / "profile"
        estimates.mkdir()
        found = _compile(arguments, dump, f"{_DUMP} {_ESTIMATE}")
        if "error" not in found:
            cycles = 0
            for file in estimates.iterdir():
                for name, estimate, count in re.findall(_ESTIMATES, file.read_text()):
                    cycles += int(count) * (int(estimate) or bundles(dump, name))
            return {**found, "cycles": cycles}
    if not implementation.startswith("pallas"):  # bundles do not include the latency of gathers
        return found
    with tempfile.TemporaryDirectory() as folder:
        dump = Path(folder)
        found = _compile(arguments, dump, _DUMP)
        if "error" in found:
            return found
        names = {
            file.name.split("-", 1)[1].rsplit("-", 2)[0]
            for file in dump.glob("*-final_bundles.txt")
        }
        cycles = sum(bundles(dump, name) for name in names if "schedule-analysis" not in name)
        return {**found, "cycles": cycles, "bundles": "yes"}


def _compile(arguments: list[str], dump: Path, flags: str) -> dict[str, float | str]:
    flags = flags.format(dump)
    if arguments[-1] in ("v5e", "v5p"):
        flags += " --xla_tpu_check_llo_types=false"
    tpu = {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "JAX_PLATFORMS": "cpu"}
    environment = {**os.environ, "LIBTPU_INIT_ARGS": flags, **tpu}
    command = [sys.executable, __file__, "--compile", *arguments]
    child = subprocess.run(command, env=environment, capture_output=True, text=True)
    if child.returncode:
        errors = [
            line
            for line in child.stderr.splitlines()
            if re.match(r"[\w.]+(Error|Exception): ", line)
        ]
        return {"error": (errors or ["failed"])[-1][:200]}
    found: dict[str, float | str] = json.loads(child.stdout.strip().splitlines()[-1])
    return found


def bundles(folder: Path, name: str) -> int:
    """Return the executed bundles of a kernel; loops with unknown length count once."""
    (file, *_) = sorted(folder.glob(f"*-{name}-*-final_bundles.txt"))
    loops: list[list[int]] = [[0, 1]]  # around the line: bundles of one turn, turns
    steps: dict[str, int] = {}

    def close(depth: int) -> None:
        while len(loops) - 1 > depth:
            inside, turns = loops.pop()
            loops[-1][0] += inside * turns

    for line in file.read_text().splitlines():
        bundle = re.match(r"\s*(?:0x)?[0-9a-f]+\s+(LB)?\w*\s*: (>*) ?\{(.)", line)
        if not bundle:
            continue
        if bundle[3] != "}":  # an empty bundle has no loop depth
            depth = len(bundle[2])
            close(depth - 1 if bundle[1] else depth)
            loops += [[0, 1] for _ in range(depth + 1 - len(loops))]
        loops[-1][0] += 1
        steps |= {
            number: int(step) for number, step in re.findall(r"(%\w+) = sadd\.s32 (\d+),", line)
        }
        end = re.search(r"scmp\.ge\.s32\.totalorder (%\w+), (\d+) /\* loop exit test", line)
        if end and steps.get(end[1]):
            loops[-1][1] = -(-int(end[2]) // steps[end[1]])
    close(0)
    return loops[0][0]


def compile_case(case: str, implementation: str, tpu: str) -> dict[str, float | str]:
    """Compile a case, and return its bounds and memory."""
    import jax

    from lutjax import testing
    from lutjax.kernels._pallas._tpus import find_generation
    from lutjax.testing import _ahead_of_time

    op, sizes = CASES[case]
    program = testing.program(
        testing.case(op, "primes", **sizes),
        None if implementation == "reference" else implementation,
    )
    assert program.forward is not None
    program = program.forward
    function = program.expected if implementation == "reference" else program.function
    compiled = _ahead_of_time.compile_for_tpu(function, *program.shapes(), tpu=tpu)
    chip = find_generation(tpu)
    arrays = jax.tree.leaves(
        (program.shapes(), jax.eval_shape(program.expected, *program.shapes()))
    )
    moved = sum(a.size * a.dtype.itemsize for a in arrays)
    found: dict[str, float | str] = {"bandwidth_s": moved / chip.bandwidth, "clock": chip.clock}
    if op == "lookup":
        rows = sizes["batch"] * sizes["detectors"] * 2 ** sizes["bits"]
        found["matrix_s"] = 2 * rows * sizes["outputs"] * 3 / chip.flops  # three passes
    found["temporary_bytes"] = compiled.memory_analysis().temp_size_in_bytes
    found["loops"] = "while" if re.search(r"= [^\n]* while\(", compiled.as_text()) else ""
    return found


def _time(seconds: float | str | None) -> str:
    if not isinstance(seconds, float):
        return ""
    return f"{seconds * 1e6:.0f} us" if seconds < 1e-3 else f"{seconds * 1e3:.1f} ms"


def rows(given: Any) -> Iterator[list[str]]:
    """Yield rows of the table."""
    cases = [case for case in CASES if any(part in case for part in given.case)]
    for case, tpu, implementation in itertools.product(cases, given.tpu, IMPLEMENTATIONS):
        found = profile(case, implementation, tpu)
        shown = found.get("error") or f"{found['cycles']:,}"
        time = None if "error" in found else float(found["cycles"]) / float(found["clock"])
        notes = " (a loop counts once)" * bool(found.get("loops")) + " (bundles)" * bool(
            found.get("bundles")
        )
        bounds = (_time(found.get(name)) for name in ("bandwidth_s", "matrix_s"))
        yield [case, tpu, "forward", implementation, str(shown), _time(time) + notes, *bounds]


def main() -> None:
    given = parse(
        __doc__,
        tpu=(["v5e", "v6e"], "generations"),
        case=([""], "parts of case names; default: all"),
        compile=([str], argparse.SUPPRESS),
    )
    if given.compile:
        print(json.dumps(compile_case(*given.compile)))
        return
    names = (
        "case | TPU |  | implementation | cycles | static profile | bandwidth bound | matrix-unit "
        "bound"
    )
    print_table(names, rows(given), 4)


if __name__ == "__main__":
    main()
