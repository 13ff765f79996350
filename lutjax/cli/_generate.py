"""``lutjax generate``: text from a trained model."""

import codecs
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lutjax.cli._flags import Finite, MeshType
from lutjax.cli._run import process_options, processes, run_argument
from lutjax.files.errors import FolderError
from lutjax.models._fields import MOST, MOST_INT
from lutjax.training.errors import RunError

if TYPE_CHECKING:
    from lutjax.training.integers import Rounded
    from lutjax.training.lm import LanguageModel

N_BYTES = 256
"""Tokens of a model of bytes."""


@click.command()
@run_argument("folder", "--checkpoint")
@click.option(
    "--prompt",
    "prompts",
    multiple=True,
    help="The text to continue; given several times, as many texts. Default: the standard input.",
)
@click.option(
    "--prompt-file",
    type=click.Path(exists=True, dir_okay=False, allow_dash=True, path_type=Path),
    help="File with the text to continue, byte by byte as it is; - is the standard input. Default: none, as --prompt says.",
)
@click.option(
    "--bytes",
    "n_bytes",
    type=click.IntRange(1, MOST_INT),
    default=500,
    show_default=True,
    help="How much to add.",
)
@click.option(
    "--samples",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="How many texts to write for each prompt, drawn together. Their seeds are --seed and the numbers after it.",
)
@click.option(
    "--temperature",
    type=Finite(0, MOST),
    default=0.8,
    show_default=True,
    help="Below 1 more likely text, above 1 more varied; 0 takes the likeliest byte.",
)
@click.option(
    "--top-k",
    type=click.IntRange(1, 256),
    help="Draw only from so many of the likeliest bytes. Default: from all.",
)
@click.option("--seed", type=click.IntRange(0, 2**32 - 1), default=0, show_default=True, help="Of the draws.")
@click.option(
    "--echo/--no-echo",
    default=True,
    show_default=True,
    help="Write the prompt before the new bytes, or these alone.",
)
@click.option(
    "--integers",
    type=click.Choice(["int16", "int8"]),
    help="Round a model of train lm --model lut to whole numbers, with such tables, and draw as the C program does that "
    "`export` makes of it: the same bytes. Default: draw from the model as it was trained.",
)
@click.option(
    "--mesh",
    type=MeshType(),
    help="Devices over which tables are divided, such as detectors=4, for a model that is larger than one of them. Default: one device.",
)
@click.option(
    "--speed",
    is_flag=True,
    help="Draw the text again, compiled by now, and print bytes a second to standard error.",
)
def generate(coordinator: str | None, n_processes: int | None, process: int | None, **options: Any) -> None:
    """Continue a text with the language model of RUN.

    RUN is a run of `train lm`, the folder of its --out; its folder quantized, which `quantize` made; or a bundle of a language model of bytes (`lutjax save`, `lutjax import`).

    A text is written as it is drawn: to a terminal with characters that cannot be printed escaped, and else byte by byte, with nothing before or after it.
    Where there are several texts, a line feed follows each.
    """
    with processes(coordinator, n_processes, process):
        _generate(**options)


generate.params += process_options("Divide the model over the devices of several processes")


def _generate(
    folder: Path,
    prompts: Sequence[str],
    prompt_file: Path | None,
    n_bytes: int,
    samples: int,
    temperature: float,
    top_k: int | None,
    seed: int,
    echo: bool,
    integers: str | None,
    mesh: Mapping[str, int] | None,
    speed: bool,
) -> None:
    """Continue texts; the first of several processes prints them."""
    if seed + samples > 2**32:
        raise click.BadParameter(
            f"{samples} samples have seeds up to {seed + samples - 1}; the largest is {2**32 - 1}.",
            param_hint="--seed",
        )
    if integers is not None and mesh is not None:
        raise click.UsageError("--integers computes as the C program does, on one device; leave --mesh out.")

    import jax

    from lutjax.bundles._layout import is_bundle
    from lutjax.training import hosts, lm_runs, meshes, model_folders, runs

    bundled = is_bundle(folder)
    if bundled and mesh is not None:
        raise click.UsageError(f"{folder} is a bundle, which is read on one device; leave --mesh out.")
    waits = (
        not prompts and str(prompt_file or "-") == "-"
    )  # for somebody who types: the run is looked at first
    found = [] if waits else hosts.by_first(lambda: _prompts(prompts, prompt_file))
    if hosts.count() > 1:
        if integers is not None:
            raise click.UsageError(
                "--integers computes as the C program does, on one device; start one process."
            )
        if mesh is None:
            mesh = {meshes.DETECTORS: jax.device_count()}

    model: LanguageModel | None = None
    if bundled:
        model = model_folders.read(folder, lm_runs.Record.kind).model
    else:
        step, record = runs.read(folder, lm_runs.Record, on_damage=_say_error)
    if waits:
        found = hosts.by_first(lambda: _prompts(prompts, prompt_file))
    texts = [(text, seed + k) for text in found for k in range(samples)]
    try:
        model = model or lm_runs.language_model(folder, step, record, mesh)
    except RunError:
        raise
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--mesh") from error
    if model.config.vocab_size != N_BYTES:
        raise FolderError(
            f"{folder} has {model.config.vocab_size} tokens; generate reads and writes bytes, {N_BYTES} of them. Generate tokens in Python: lutjax.load(folder).generate."
        )
    drawn_by: LanguageModel | Rounded = model
    if integers is not None:
        from lutjax.training import integers as whole

        try:
            whole.thousandths(temperature)
        except ValueError as error:
            raise click.BadParameter(str(error), param_hint="--temperature") from error
        drawn_by = whole.rounded_model(folder, model, tables=integers)

    options: dict[str, Any] = {"temperature": temperature, "top_k": top_k}
    ends_line = _write(texts, _continuations(drawn_by, texts, n_bytes, **options), echo=echo)
    if speed:
        start = time.perf_counter()
        for parts in _continuations(drawn_by, texts, n_bytes, **options):
            for _ in parts:
                pass
        rate = len(texts) * n_bytes / (time.perf_counter() - start)
        # The text itself gets no line feed, as a pipe takes it byte by byte; the terminal may show both streams.
        _say_error(f"{'' if ends_line else chr(10)}{rate:,.0f} bytes a second.")


def _prompts(given: Sequence[str], file: Path | None) -> list[bytes]:
    """Return the prompts of the options, or of the standard input; none is empty."""
    if given and file is not None:
        raise click.UsageError("give --prompt or --prompt-file, not both.")
    if given:
        found, hint = [text.encode(errors="surrogateescape") for text in given], "--prompt"
    elif file is None and sys.stdin.isatty():
        raise click.UsageError("give a text to continue: --prompt, --prompt-file, or the standard input.")
    else:
        source = Path("-") if file is None else file
        hint = "the standard input" if str(source) == "-" else f"--prompt-file {source}"
        with click.open_file(str(source), "rb") as opened:
            found = [opened.read()]
    if not all(found):
        raise click.BadParameter("it is empty; give at least one byte to continue.", param_hint=hint)
    return found


def _continuations(
    model: "LanguageModel | Rounded", texts: Sequence[tuple[bytes, int]], n_bytes: int, **options: Any
) -> Iterator[Iterable[bytes]]:
    """Yield what is added to each text, in parts as they are drawn."""
    from lutjax.models._decoder import Decoder
    from lutjax.training import lm_runs

    if not isinstance(model, Decoder):
        for prompt, seed in texts:
            yield model.stream(prompt, n_bytes, seed=seed, **options)
    elif len(texts) == 1:
        prompt, seed = texts[0]
        yield lm_runs.stream(model, prompt, n_bytes, seed=seed, **options)
    else:
        yield from ([added] for added in lm_runs.batch(model, texts, n_bytes, **options))


def _write(
    texts: Sequence[tuple[bytes, int]], continuations: Iterable[Iterable[bytes]], *, echo: bool
) -> bool:
    """Write texts to the standard output, as they come, and return whether the output ends with a line feed."""
    from lutjax.training import hosts

    first, out = hosts.is_first(), sys.stdout.buffer
    terminal = first and sys.stdout.isatty()
    last = b""
    for (prompt, _), parts in zip(texts, continuations, strict=True):
        decode = codecs.getincrementaldecoder("utf-8")("backslashreplace").decode

        def write(part: bytes, final: bool = False, decode: Any = decode) -> None:
            nonlocal last
            last = part[-1:] or last
            if terminal:
                click.echo(escaped(decode(part, final)), nl=False)
            elif first:
                out.write(part)
                out.flush()

        if echo:
            write(prompt)
        for part in parts:
            write(part)
        write(b"", True)
        if first and (terminal or len(texts) > 1):
            click.echo()
            last = b"\n"
    return last == b"\n"


def escaped(text: str) -> str:
    r"""Return a text with characters that a terminal would obey, or cannot show, as escapes; line feeds and tabs stay.

    Example:
      >>> from lutjax.cli._generate import escaped
      >>> escaped("caf\xe9\x1b[2J\n")
      'café\\x1b[2J\n'
    """
    return "".join(
        c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode("ascii") for c in text
    )


def _say_error(text: str) -> None:
    from lutjax.training import hosts

    if hosts.is_first():
        click.echo(text, err=True)
