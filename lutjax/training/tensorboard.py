"""Losses and tests for TensorBoard, through tensorboardX in the extra ``tensorboard``."""

from collections.abc import Sequence
from pathlib import Path

from lutjax.extras import require_optional
from lutjax.training.experiments import Watcher


class Events(Watcher):
    """Writer for measurements as TensorBoard scalars.

    Events of an earlier process after the `done` completed steps are hidden.
    """

    def __init__(self, folder: Path, names: tuple[str, ...], done: int):
        with require_optional("lutjax.training.tensorboard"):
            from tensorboardX import SummaryWriter

        self._names = [name.replace(" ", "_") for name in names]  # naming expected by TensorBoard
        self._writer = SummaryWriter(str(folder), purge_step=done + 1 if done else None)

    def __enter__(self) -> "Events":
        return self

    def __exit__(self, *error: object) -> None:
        self._writer.close()

    def training(self, losses: Sequence[tuple[int, float]]) -> None:
        """Write training losses."""
        for done, loss in losses:
            self._writer.add_scalar(self._names[0], loss, done)

    def test(self, done: int, value: float) -> None:
        """Write a test result."""
        self._writer.add_scalar(self._names[1], value, done)
