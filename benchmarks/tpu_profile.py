"""Static profiles of kernels for TPUs, by libtpu's compiler; no TPU is needed: `python benchmarks/tpu_profile.py`.

In an environment of its own (`pip install -e ".[tpu]"`). Each line is the sum of the compiler's estimates of every
operation of a program, in cycles and, at the clock of the chip, in time; beside it stand the bandwidth bound (arguments
and results once through HBM) and, of look-ups, the bound of the matrix units for rows of ones and zeros times the
table in three bfloat16 passes. It is no measurement: loops whose length is known at run time only count once, gathers by
SparseCores not at all, and reads and writes are each given the full bandwidth. Differences below 30 % mean nothing.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

# Sizes as `lutjax.testing.case` takes them.
CASES = {
    "lookup 4096 x 16, 6 bits, 128 outputs": (
        "lookup",
        {"batch": 4096, "detectors": 16, "bits": 6, "outputs": 128},
    ),
    "lookup 4096 x 16, 10 bits, 256 outputs": (
        "lookup",
        {"batch": 4096, "detectors": 16, "bits": 10, "outputs": 256},
    ),
    "lookup_attention 128 x 32 x 64, 6 + 6 + 4 bits, 32 outputs": (
        "lookup_attention",
        {"batch": 128, "queries": 32, "detectors": 64, "bits": 6, "position_bits": 4, "outputs": 32},
    ),
    "lut_pair_attention 128 x 32 x 64, 6 bits, 32 outputs": (
        "lut_pair_attention",
        {
            "batch": 128,
            "queries": 32,
            "inputs": 32,
            "detectors": 64,
            "bits": 6,
            "position_bits": 4,
            "outputs": 32,
        },
    ),
    "bilinear_gates 16384 of 16384, 4096 samples": (
        "bilinear_gates",
        {"inputs": 16384, "gates": 16384, "batch": 4096, "features_first": 1},
    ),
    "bilinear_gates 2000 of 2000, 512 samples": (
        "bilinear_gates",
        {"inputs": 2000, "gates": 2000, "batch": 512, "features_first": 1},
    ),
}
IMPLEMENTATIONS = ("reference", "xla", "pallas/tpu")
_FLAGS = "--xla_jf_dump_to={0} --xla_jf_dump_llo_text=true --xla_jf_dump_static_llo_profile_to={0}/profile"


def profile(case: str, implementation: str, direction: str, tpu: str) -> dict[str, float | str]:
    """One program, compiled in a process of its own: the compiler writes its estimates when it is loaded so."""
    with tempfile.TemporaryDirectory() as folder:
        flags = _FLAGS.format(folder)
        if tpu in ("v5e", "v5p"):
            flags += " --xla_tpu_check_llo_types=false"
        environment = {
            **os.environ,
            "LIBTPU_INIT_ARGS": flags,
            "TPU_SKIP_MDS_QUERY": "1",
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
            "JAX_PLATFORMS": "cpu",
        }
        (Path(folder) / "profile").mkdir()
        arguments = [sys.executable, __file__, "--compile", case, implementation, direction, tpu]
        child = subprocess.run(arguments, env=environment, capture_output=True, text=True)
        if child.returncode:
            errors = [
                line for line in child.stderr.splitlines() if re.match(r"[\w.]+(Error|Exception): ", line)
            ]
            return {"error": (errors or ["failed"])[-1][:200]}
        found: dict[str, float | str] = json.loads(child.stdout.strip().splitlines()[-1])
        cycles = 0
        for file in (Path(folder) / "profile").iterdir():
            text = file.read_text()
            estimates = re.findall(r"estimated_cycles: (\d+)\s+num_equivalent_hlos: (\d+)", text)
            cycles += sum(int(c) * int(n) for c, n in estimates)
        return {**found, "cycles": cycles}


def compile_case(case: str, implementation: str, direction: str, tpu: str) -> dict[str, float | str]:
    """Compiles it, and says what it moves and adds."""
    import jax

    from lutjax import _ahead_of_time, testing
    from lutjax.kernels._pallas._tpus import named

    op, sizes = CASES[case]
    program = testing.program(
        testing.case(op, "primes", **sizes), None if implementation == "reference" else implementation
    )
    if direction == "forward" and program.forward is not None:
        program = program.forward
    function = program.expected if implementation == "reference" else program.function
    compiled = _ahead_of_time.compile_for_tpu(function, *program.shapes(), tpu=tpu)
    chip = named(tpu)
    arrays = jax.tree.leaves((program.shapes(), jax.eval_shape(program.expected, *program.shapes())))
    moved = sum(a.size * a.dtype.itemsize for a in arrays)
    found: dict[str, float | str] = {"bandwidth_s": moved / chip.bandwidth, "clock": chip.clock}
    if op == "lookup":
        passes = 3 if direction == "forward" else 9
        rows = sizes["batch"] * sizes["detectors"] * 2 ** sizes["bits"]
        found["matrix_s"] = 2 * rows * sizes["outputs"] * passes / chip.flops
    found["temporary_bytes"] = compiled.memory_analysis().temp_size_in_bytes
    found["loops"] = "while" if re.search(r"= [^\n]* while\(", compiled.as_text()) else ""
    return found


def _time(seconds: float | str | None) -> str:
    if not isinstance(seconds, float):
        return ""
    return f"{seconds * 1e6:.0f} us" if seconds < 1e-3 else f"{seconds * 1e3:.1f} ms"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tpu", nargs="+", default=["v5e", "v6e"])
    parser.add_argument("--case", nargs="+", default=[""], help="parts of the names of cases; default: all")
    parser.add_argument("--implementation", nargs="+", default=IMPLEMENTATIONS)
    parser.add_argument("--direction", nargs="+", default=["forward", "backward"])
    parser.add_argument("--compile", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.compile:
        print(json.dumps(compile_case(*options.compile)))
        return
    print("| case | TPU | | implementation | cycles | static profile | bandwidth bound | matrix-unit bound |")
    print("| --- | --- | --- | --- | --: | --: | --: | --: |")
    for case in CASES:
        if not any(part in case for part in options.case):
            continue
        for tpu in options.tpu:
            for direction in options.direction:
                for implementation in options.implementation:
                    found = profile(case, implementation, direction, tpu)
                    shown = found.get("error") or f"{found['cycles']:,}"
                    time = None if "error" in found else float(found["cycles"]) / float(found["clock"])
                    loops = " (a loop counts once)" if found.get("loops") else ""
                    named = {
                        "forward": "forward",
                        "backward": "forward + backward",
                    }[direction]
                    cells = [case, tpu, named, implementation, shown, _time(time) + loops]
                    cells += [_time(found.get("bandwidth_s")), _time(found.get("matrix_s"))]
                    print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
