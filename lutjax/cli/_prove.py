"""``lutjax prove``: proofs and counterexamples of circuit properties."""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lutjax.cli._export import progress
from lutjax.cli._flags import FILE, PATH, Command, Integer, parameter_error
from lutjax.cli._measuring import check_folder
from lutjax.cli._verify import export_folder

if TYPE_CHECKING:
    from lutjax.circuits.properties import Verdict

METHODS = ("evaluation", "abc")


def _columns(name: str, claim: str) -> Callable[[Any], Any]:
    return click.option(
        name, metavar="COLUMN", multiple=True, help=f"{claim}; repeatable.  [default: none]"
    )


@click.command(
    cls=Command,
    sections={
        "Properties": "flips monotone antitone unused",
        "Samples": "n_samples sample in_range",
        "Run": "method seconds out",
    },
)
@click.argument("folder", metavar="DIR", type=PATH)
@click.option(
    "--robust",
    "flips",
    type=Integer(1),
    help="No flip of K input bits changes the class.  [default: none]",
)
@_columns("--monotone", "A larger value never lowers the class")
@_columns("--antitone", "A larger value never raises the class")
@_columns("--unused", "The column never changes the class")
@click.option(
    "--samples",
    "n_samples",
    type=Integer(1),
    default=10,
    help="First samples of vectors.json for --robust.",
)
@click.option(
    "--sample",
    type=Integer(0),
    multiple=True,
    help="Index of a sample for --robust instead; repeatable.  [default: none]",
)
@click.option(
    "--in-range",
    is_flag=True,
    help="Only known categories and numbers of the training range (tables).",
)
@click.option(
    "--method",
    type=click.Choice(METHODS),
    help="How to prove --robust.  [default: evaluation of few inputs, else ABC]",
)
@click.option("--seconds", type=Integer(1), default=60, help="Time limit of each proof.")
@click.option("--out", type=FILE, help="JSON file of results.  [default: none]")
def prove(
    folder: Path,
    flips: int | None,
    monotone: tuple[str, ...],
    antitone: tuple[str, ...],
    unused: tuple[str, ...],
    n_samples: int,
    sample: tuple[int, ...],
    in_range: bool,
    method: str | None,
    seconds: int,
    out: Path | None,
) -> None:
    """Prove properties of an exported circuit, or find counterexamples.

    DIR is an export, or a run or bundle with an export in its folder circuit. Each property prints
    proved, refuted or undecided, and a counterexample with both samples. A column is a table
    column, an input name or an input such as x[3]. The exit status is 1 unless every property is
    proved.
    """
    from lutjax.circuits import abc, properties

    if flips is None and not (monotone or antitone or unused):
        raise click.UsageError("name a property: --robust, --monotone, --antitone or --unused.")
    circuit, vectors, name = properties.read_export(export_folder(folder))
    chosen = sample or tuple(range(min(n_samples, len(vectors))))
    if flips is not None and max(chosen) >= len(vectors):
        raise parameter_error(
            "--sample", f"{max(chosen)} is too large; {folder} has {len(vectors)} samples."
        )
    # Check all words before the first proof; dicts keep their order without repeats.
    columns = {**dict.fromkeys(monotone), **dict.fromkeys(antitone), **dict.fromkeys(unused)}
    if (columns or method == "abc") and abc.find() is None:
        raise click.ClickException(
            "ABC is not installed: pip install pyosys, or apt install berkeley-abc."
        )
    try:
        for word in columns:
            properties.check_column("prove", circuit, word, ordered=word in (*monotone, *antitone))
    except ValueError as error:
        raise click.UsageError(str(error).partition(": ")[2]) from error
    if out is not None:
        check_folder("--out", out)
    limits: dict[str, Any] = {"in_range": in_range, "seconds": seconds}
    tasks: list[tuple[str, Callable[[], Verdict]]] = []
    for words, decreasing in ((monotone, False), (antitone, True)):
        order = functools.partial(
            properties.prove_monotonicity, circuit, decreasing=decreasing, **limits
        )
        tasks += [(word, functools.partial(order, column=word)) for word in words]
    alone = functools.partial(properties.prove_independence, circuit, **limits)
    tasks += [(word, functools.partial(alone, column=word)) for word in unused]
    if flips is not None:
        near = functools.partial(
            properties.prove_robustness, circuit, flips=flips, method=method, seconds=seconds
        )
        for k in chosen:
            values = {port: x[k] for port, x in vectors.inputs.items()}
            tasks.append((f"sample {k}", functools.partial(near, sample=values)))
    verdicts: list[tuple[str, Verdict]] = []
    click.echo(f"{name}: {circuit!r}")
    try:
        for what, task in tasks:
            with progress(what):
                verdicts.append((what, task()))
            prefix = f"{what}: " if what.startswith("sample ") else ""
            click.echo(f"{prefix}{verdicts[-1][1]}")
            for line in properties.describe(circuit, verdicts[-1][1]):
                click.echo(line)
    except KeyboardInterrupt:
        click.echo(f"Stopped after {len(verdicts)} of {len(tasks)} proofs.")
        raise SystemExit(130) from None
    finally:
        if out is not None:  # also after a Ctrl-C: proofs may have taken hours
            facts = [_facts(what, verdict) for what, verdict in verdicts]
            out.write_text(json.dumps(facts, indent=1) + "\n")
    counts = {
        status: sum(v.status == status for _, v in verdicts) for status in properties.STATUSES
    }
    click.echo(f"{', '.join(f'{n} {status}' for status, n in counts.items())}.")
    if counts["proved"] < len(verdicts):
        raise SystemExit(1)


def _facts(what: str, verdict: "Verdict") -> dict[str, Any]:
    return {
        "about": what,
        "claim": verdict.claim,
        "status": verdict.status,
        "detail": verdict.detail,
        "seconds": round(verdict.seconds, 3),
        "samples": [{port: x.tolist() for port, x in sample.items()} for sample in verdict.samples],
        "answers": list(verdict.answers),
    }
