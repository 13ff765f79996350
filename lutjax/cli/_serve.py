"""``lutjax serve``: a model over HTTP."""

import socket
from pathlib import Path
from typing import Any

import click

from lutjax.cli import _run
from lutjax.cli._flags import Command, Integer


@click.command(
    cls=Command,
    sections={
        "Server": "host port model_name grace",
        "Batching": "slots queue block_size",
        "Request limits": "prompt tokens rows body",
    },
)
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--host", type=str, default="127.0.0.1", help="Address to listen on.")
@click.option("--port", type=Integer(0, 65535), default=8000, help="Port; 0 selects a free port.")
@click.option("--model-name", help="Model name in requests.  [default: folder name]")
@click.option("--slots", type=Integer(1, 4096), default=16, help="Texts generated concurrently.")
@click.option(
    "--queue",
    type=Integer(1),
    default=256,
    help="Waiting requests; more are rejected with status 429.",
)
@click.option(
    "--max-prompt", "prompt", type=Integer(1), default=16384, help="Maximum prompt length in bytes."
)
@click.option(
    "--max-tokens", "tokens", type=Integer(1), default=4096, help="Maximum answer length in bytes."
)
@click.option(
    "--max-rows",
    "rows",
    type=Integer(1),
    default=1024,
    help="Maximum samples per classification request.",
)
@click.option(
    "--max-body", "body", type=Integer(1), default=1 << 20, help="Maximum request body in bytes."
)
@click.option(
    "--block-size",
    type=Integer(1),
    help=(
        "Bytes per cache block; prompts share prefixes (--model lut).  "
        "[default: one cache per text]"
    ),
)
@click.option(
    "--grace", type=Integer(0), default=30, help="Seconds for open requests after a stop signal."
)
def serve(
    folder: Path, host: str, port: int, model_name: str | None, grace: int, **limits: Any
) -> None:
    """Serve a model over HTTP.

    DIR is a run of `train lm` or `train classify`, or a bundle, also of an imported memory. Text
    models answer POST /v1/completions, classifiers POST /v1/classify, memories POST /v1/memory; GET
    /health, /metrics and /v1/models report the state. The server has no encryption or
    authentication: put a proxy in front of it.
    """
    from lutjax.bundles._layout import is_memory
    from lutjax.convert import memory_layer
    from lutjax.extras import require_optional
    from lutjax.files.errors import FolderError
    from lutjax.serving import Limits, application

    with require_optional("lutjax serve"):
        import uvicorn

    _check_address(host, port)
    # After these checks: reading a model takes seconds.
    try:
        model: Any = memory_layer(folder) if is_memory(folder) else _run.model(folder)
        app = application(model, model_name or folder.resolve().name, Limits(**limits))
    except FolderError:
        raise
    except ValueError as error:
        raise FolderError(f"{folder}: {error}") from error
    uvicorn.run(app, host=host, port=port, log_level="info", timeout_graceful_shutdown=grace)


def _check_address(host: str, port: int) -> None:
    """Raise ClickException if the server cannot listen on an address."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
    except (OSError, UnicodeError) as error:  # UnicodeError: a name that is no host name
        why = getattr(error, "strerror", None) or error
        raise click.ClickException(
            f"--host {host} --port {port} cannot be listened on: {why}. "
            "Choose another --port or --host."
        ) from error
