"""Automata over seeds: `python benchmarks/automaton_seeds.py life --seeds 0 1 2 [--steps N] [--set FIELD=VALUE ...]`.

A seed draws wires and batches. Every seed is trained by itself (`--set runs=1` is the default here) until three tests, one after the other, find no
wrong bit, as `lutjax train ca` does, or with `--all-steps` to the end. Its best hard automaton is tested every `eval_every` steps of the experiment, on
samples that no step has seen. A row says how many bits of a grid were wrong in the best and the last test, after how many steps a test
found none for the first time, and the mean training loss since the last test but one. A run of several automata, such as ``--runs 4 --seed 3``, keeps
the best of the seeds 3 to 6.
"""

import argparse
import json
import time

from lutjax.training.automaton_runs import SOLVED_TESTS, Automaton
from lutjax.training.models import State
from lutjax.training.presets import EXPERIMENTS


def fields(words: list[str]) -> dict[str, object]:
    """Return fields and values of words such as ``residual=10`` and ``update=[8,1]``."""
    pairs = (word.partition("=") for word in words)
    values = {name: json.loads(value) for name, _, value in pairs}
    return {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}


def trained(experiment: Automaton, all_steps: bool = False) -> tuple[list[tuple[int, float]], float, State]:
    """Return the steps and wrong bits of all tests, the last mean loss, and the last state."""
    run, steps, every = experiment.run, experiment.record.training.steps, experiment.intervals.eval_every
    state, tests, done, loss = run.init(), [], 0, float("nan")
    while done < steps:
        count = min(every, steps - done)
        state, mean = run.advance(state, done, count)
        done, loss = done + count, float(mean)
        tests.append((done, run.wrong(state)))
        if not all_steps and [wrong for _, wrong in tests[-SOLVED_TESTS:]] == [0] * SOLVED_TESTS:
            break
    return tests, loss, state


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("experiment", choices=EXPERIMENTS)
    parser.add_argument("--seeds", nargs="+", type=int, default=list(range(10)))
    parser.add_argument("--steps", type=int, help="default: those of the experiment")
    parser.add_argument(
        "--set", nargs="+", default=[], help="other fields of its configs, with values as in JSON"
    )
    parser.add_argument("--all-steps", action="store_true", help="go on where the task is solved")
    arguments = parser.parse_args()
    values = {"runs": 1} | fields(arguments.set) | ({"steps": arguments.steps} if arguments.steps else {})
    print("| seed | steps | first without a wrong bit | wrong at best | wrong at last | loss | seconds |")
    print("| --: | --: | --: | --: | --: | --: | --: |")
    solved = 0
    for seed in arguments.seeds:
        start = time.perf_counter()
        tests, loss, _ = trained(
            Automaton.new({**values, "seed": seed}, arguments.experiment), arguments.all_steps
        )
        wrong = [count for _, count in tests]
        first = next((str(done) for done, count in tests if count == 0), "never")
        solved += first != "never"
        cells = (seed, tests[-1][0], first, f"{min(wrong):g}", f"{wrong[-1]:g}", f"{loss:.4g}")
        print(f"| {' | '.join(map(str, cells))} | {time.perf_counter() - start:.0f} |", flush=True)
    print(f"\n{arguments.experiment}: without a wrong bit {solved} of {len(arguments.seeds)}")


if __name__ == "__main__":
    main()
