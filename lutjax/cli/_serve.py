"""``lutjax serve``: a model over HTTP."""

from pathlib import Path

import click

from lutjax.cli import _run


@click.command()
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--host", type=str, default="127.0.0.1", show_default=True, help="Address to listen at.")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="Port; 0 takes a free one."
)
@click.option("--model-name", help="Name by which requests call the model. Default: that of the folder.")
@click.option(
    "--slots",
    type=click.IntRange(1, 4096),
    default=16,
    show_default=True,
    help="Texts that are continued at the same time.",
)
@click.option(
    "--queue",
    type=click.IntRange(1),
    default=256,
    show_default=True,
    help="Requests that may wait; beyond, the answer is 429.",
)
@click.option(
    "--max-prompt",
    type=click.IntRange(1),
    default=16384,
    show_default=True,
    help="Bytes of the longest prompt.",
)
@click.option(
    "--max-tokens",
    type=click.IntRange(1),
    default=4096,
    show_default=True,
    help="Bytes of the longest answer.",
)
@click.option(
    "--max-rows",
    type=click.IntRange(1),
    default=1024,
    show_default=True,
    help="Samples of a call of a classifier.",
)
@click.option(
    "--max-body",
    type=click.IntRange(1),
    default=1 << 20,
    show_default=True,
    help="Bytes of the longest body of a request.",
)
@click.option(
    "--block-size",
    type=click.IntRange(1),
    help="Keep the cached bytes of all texts in blocks of so many, of which prompts that begin alike share the first: they are read and stored once. Of models of --model lut. Default: caches of each text.",
)
@click.option(
    "--grace",
    type=click.IntRange(0),
    default=30,
    show_default=True,
    help="Seconds that requests have to end after a signal to stop.",
)
def serve(
    folder: Path,
    host: str,
    port: int,
    model_name: str | None,
    slots: int,
    queue: int,
    max_prompt: int,
    max_tokens: int,
    max_rows: int,
    max_body: int,
    block_size: int | None,
    grace: int,
) -> None:
    """Serve the model in DIR over HTTP: a text model by POST /v1/completions, a classifier by POST /v1/classify.

    DIR is a run of `train lm` or `train classify`, or a bundle (`lutjax save`, `lutjax import`). GET /health, /metrics and /v1/models say how it is. There is no encryption and nobody is asked who they
    are: put a proxy in front of it. SIGTERM and Ctrl-C stop it, after the requests that are there.
    """
    from lutjax._extras import needed_by
    from lutjax.files.errors import FolderError
    from lutjax.serving import Limits, application

    with needed_by("lutjax serve"):
        import uvicorn

    limits = Limits(slots, queue, max_prompt, max_tokens, max_rows, max_body, block_size)
    model = _run.model(folder)
    try:
        app = application(model, model_name or folder.resolve().name, limits)
    except ValueError as error:
        raise FolderError(f"{folder}: {error}") from error
    uvicorn.run(app, host=host, port=port, log_level="info", timeout_graceful_shutdown=grace)
