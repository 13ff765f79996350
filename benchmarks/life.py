"""Speed of the exported C Game of Life on one core: `python benchmarks/life.py [CIRCUIT.json]`.

The rule is a circuit exported by `lutjax export` from a `train ca` run, or one that counts
neighbors with full adders. The timed program is the output of `lutjax.circuits.c`, with
`NAME_step`; its last grid is compared with the rule in NumPy.
"""

import pathlib
import platform
import subprocess
import tempfile

import numpy as np
from harness import parse  # beside this file

from lutjax.circuits import Builder, Circuit, arithmetic, c, netlist_json, proofs

MAIN = """\
#define _POSIX_C_SOURCE 199309L
#include <stdio.h>
#include <time.h>
#include "life.h"
static life_unit grids[2][ROWS * COLUMNS / (8 * sizeof(life_unit))];
static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
    return time.tv_sec + 1e-9 * time.tv_nsec;
}
int main(int count, char **words)
{
    FILE *file = fopen(words[1], "rb");
    double start;
    long step;
    if (count < 2 || !file || fread(grids[0], sizeof grids[0], 1, file) != 1)
        return 1;
    start = now();
    for (step = 0; step < STEPS; step++)
        life_step(grids[step & 1], grids[~step & 1], ROWS, COLUMNS);
    printf("%.9f\\n", now() - start);
    file = fopen(words[1], "wb");
    return fwrite(grids[STEPS & 1], sizeof grids[0], 1, file) != 1 || fclose(file) != 0;
}
"""


def rule() -> Circuit:
    """Return the rule of one cell: alive if its neighborhood of nine has three live cells, or four with itself."""
    builder = Builder()
    cells = [bit for (bit,) in builder.input("x", 9)]
    count = arithmetic.popcount(builder, cells)
    three, four = (
        builder.gate([literal ^ (~number >> k & 1) for k, literal in enumerate(count)], 1 << 15)
        for number in (3, 4)
    )
    builder.output("y", [[builder.gate([three, four, cells[8]], 0b11101010)]])
    return builder.circuit({"kind": "automaton", "channels": 1, "periodic": True, "rule": "life"})


def best(
    circuit: Circuit, side: int, lanes: int, flags: list[str], steps: int, repeats: int
) -> float:
    """Return the steps per second of the fastest repetition.

    Raises:
      SystemExit: a grid is wrong.
    """
    grid = np.random.default_rng(0).integers(0, 2, (side, side), np.uint8)
    expected = grid.copy()
    for _ in range(steps % 1000):
        near = (
            sum(np.roll(expected, (y, x), (0, 1)) for y in (-1, 0, 1) for x in (-1, 0, 1))
            - expected
        )
        expected = ((near == 3) | ((near == 2) & (expected == 1))).astype(np.uint8)
    seconds = []
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        for file, text in c.write(circuit, "life").items():
            (folder / file).write_text(text)
        (folder / "main.c").write_text(MAIN)
        for kept, n in ((True, steps % 1000), *((False, steps) for _ in range(repeats))):
            sizes = [
                f"-DROWS={side}",
                f"-DCOLUMNS={side}",
                f"-DLIFE_LANES={lanes}",
                f"-DSTEPS={n}L",
            ]
            command = ["gcc", "-std=c99", *flags, *sizes, "main.c", "life.c", "-o", "life"]
            subprocess.run(command, cwd=folder, check=True)
            (folder / "grid").write_bytes(np.packbits(grid, axis=1, bitorder="little").tobytes())
            done = subprocess.run(
                ["./life", "grid"], cwd=folder, check=True, capture_output=True, text=True
            )
            seconds.append(float(done.stdout) / n)
            found = np.frombuffer((folder / "grid").read_bytes(), np.uint8).reshape(side, -1)
            if kept and (np.unpackbits(found, axis=1, bitorder="little") != expected).any():
                raise SystemExit(f"the grid after {n} steps is not that of the rule")
    return 1 / min(seconds[1:])


def main() -> None:
    given = parse(
        __doc__,
        "circuit",
        circuit=([pathlib.Path], "a rule exported as JSON"),
        side=(512, "side of the grid, a multiple of 64"),
        lanes=([64, 256, 512], "bits per word"),
        flags=("-O3 -march=native", "flags of gcc, after = and in quotation marks"),
        steps=(20040, "timed steps"),
        repeats=(5, "repetitions"),
    )
    circuit = netlist_json.read(given.circuit[0]) if given.circuit else rule()
    inputs = (np.arange(512)[:, None] >> np.arange(9) & 1).astype(np.uint8)
    if not (
        np.asarray(circuit(inputs)).reshape(-1) == np.asarray(proofs.life(inputs)).reshape(-1)
    ).all():
        raise SystemExit("the circuit is not the Game of Life")
    version = subprocess.run(
        ["gcc", "--version"], check=True, capture_output=True, text=True
    ).stdout
    machine = f"{platform.processor() or platform.machine()}, {version.splitlines()[0]}"
    print(f"{len(circuit)} gates, {given.side} x {given.side} cells, one core of {machine}")
    for lanes in given.lanes:
        rate = best(circuit, given.side, lanes, given.flags.split(), given.steps, given.repeats)
        cells = rate * given.side**2 / 1e9
        speed = f"{rate:,.0f} frames a second, {cells:.1f} G cells a second"
        print(f"{given.flags}, words of {lanes} bits: {speed}")


if __name__ == "__main__":
    main()
