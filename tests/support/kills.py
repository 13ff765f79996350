"""Killed `lutjax` runs, and checks for identical results after resuming.

As a program, ``kills.py FOLDER PATTERN COUNT lutjax-arguments...`` runs the command and kills itself with SIGKILL at the
COUNT-th event on a file in FOLDER with a path matching PATTERN. Events are opening, creating, renaming and deleting a file.
"""

import os
import random
import re
import signal
import subprocess
import sys

EVENTS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree")


def main(folder, pattern, count, *words):
    seen = 0

    def hook(event, arguments):
        nonlocal seen
        if event not in EVENTS or not isinstance(arguments[0], str | os.PathLike):
            return
        path = os.path.abspath(arguments[0])
        if path.startswith(folder) and re.search(pattern, path.removeprefix(folder)):
            seen += 1
            if seen == int(count):
                os.write(1, f"\nkilled before {event} {path.removeprefix(folder)}".encode())
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    sys.argv[1:] = words
    from lutjax.cli import main as lutjax

    lutjax()


def run(out, words, cache, pattern="", count=0):
    """Run a command in a separate process, killed at the `count`-th event (0: never). Return the event, or None if not killed."""
    environment = {
        **os.environ,
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    done = subprocess.run(
        [sys.executable, __file__, str(out), pattern, str(count), *words, "--out", str(out)],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.returncode in (0, -signal.SIGKILL), done.stdout + done.stderr
    return done.stdout.splitlines()[-1] if done.returncode else None


def check(words, expected, folder, cache, n_kills=20):
    """Start runs in a folder, kill their processes at random events, and compare the finished runs.

    Event counts start over with each process; a process resumes the run left by the previous one.
    """
    from lutjax.training import runs

    rng, total, number = random.Random(0), 0, 0
    while total < n_kills:
        out, number = folder / f"run{number}", number + 1
        while True:
            # Anywhere, in checkpoints, and where a run is finished and drawn.
            pattern, most = rng.choice(
                (("", 120), ("^/checkpoints/", 80), (r"^/(\.unfinished|finished)", 20))
            )
            count = rng.randint(1, most) if total < n_kills else 0
            again = [*words[:2], "--resume"] if runs.exists(out) else words
            place = run(out, again, cache, pattern, count)
            if place is None:
                break
            total += 1
            print(f"{out.name}: {place}", flush=True)
        assert_same(out, expected)
    print(f"{total} kills, {number} runs", flush=True)


def assert_same(out, expected):
    """Assert that two finished runs have bit-identical checkpoints and the same curves and outputs."""
    import jax
    import numpy as np

    from lutjax.training import automaton_runs, classifier_runs, lm_runs, models, runs

    kinds = (lm_runs.LanguageModel, classifier_runs.Classifier, automaton_runs.Automaton)
    [kind] = (kind for kind in kinds if kind.kept.kind == runs.kind(expected))
    actual = []
    for folder in (out, expected):
        step, record = runs.read(folder, kind.kept)
        leaves = jax.tree.leaves(models.restore(folder, step, kind.from_record(record).run))
        keys = [jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) for leaf in leaves]
        arrays = [jax.random.key_data(a) if key else a for a, key in zip(leaves, keys, strict=True)]
        actual.append((step, record, [np.asarray(array).tobytes() for array in arrays]))
    assert actual[0] == actual[1]
    finished = [runs.Finished.read(folder) for folder in (out, expected)]
    assert finished[0].is_complete(out)
    assert finished[1].is_complete(expected)
    assert finished[0].parts == finished[1].parts
    for name, (is_file, _) in finished[1].parts.items():
        assert not is_file or (out / name).read_bytes() == (expected / name).read_bytes(), name
    assert not list(out.glob(".unfinished-*"))


if __name__ == "__main__":
    main(*sys.argv[1:])
