"""``lutjax generate``: text from a trained model."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from lutjax.models import LUTTransformer


@click.command()
@click.option(
    "--checkpoint",
    "folder",
    type=click.Path(path_type=Path),
    required=True,
    help="Folder of a run: what `train lm` got as --out.",
)
@click.option("--prompt", required=True, help="The text to continue.")
@click.option(
    "--bytes", "n_bytes", type=click.IntRange(1), default=500, show_default=True, help="How much to add."
)
@click.option(
    "--temperature",
    type=click.FloatRange(0),
    default=0.8,
    show_default=True,
    help="Below 1 more likely text, above 1 more varied; 0 takes the likeliest byte.",
)
@click.option("--top-k", type=click.IntRange(1, 256), help="Draw only from so many of the likeliest bytes.")
@click.option("--seed", type=click.IntRange(0, 2**32 - 1), default=0, show_default=True, help="Of the draws.")
def generate(
    folder: Path, prompt: str, n_bytes: int, temperature: float, top_k: int | None, seed: int
) -> None:
    """Continue a text with the model of a checkpoint."""
    if not prompt:
        raise click.BadParameter("it is empty; give at least one byte to continue.", param_hint="--prompt")

    from lutjax.training.checkpoints import CheckpointError
    from lutjax.training.lm_runs import load_model

    try:
        model, _ = load_model(folder)
    except CheckpointError as error:
        raise click.ClickException(str(error)) from error
    click.echo(prompt + sample(model, prompt, n_bytes, temperature=temperature, top_k=top_k, seed=seed))


def sample(
    model: "LUTTransformer",
    prompt: str,
    n_bytes: int,
    *,
    temperature: float = 0.8,
    top_k: int | None = None,
    seed: int = 0,
) -> str:
    """The text that a model adds to `prompt`; bytes that are not UTF-8 become replacement characters."""
    import jax
    import numpy as np

    tokens = np.frombuffer(prompt.encode(errors="surrogateescape"), np.uint8).astype(np.int32)
    added = model.generate(tokens, n_bytes, key=jax.random.key(seed), temperature=temperature, top_k=top_k)
    return np.asarray(added).astype(np.uint8).tobytes().decode(errors="replace")
