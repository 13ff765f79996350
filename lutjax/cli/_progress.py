"""Training progress: a bar on a terminal, else a line per interval.

Speed and remaining time refer to the latest interval; the first one includes compilation.
"""

import time
from collections.abc import Callable, Sequence

import rich.progress
from rich.console import Console

from lutjax.training.experiments import Watcher


class Report(Watcher):
    """Context manager for training progress: steps, losses, speed and remaining time.

    Of all `steps`, the `first` are done; `speed` formats seconds per step.
    """

    def __init__(
        self,
        console: Console,
        *,
        first: int,
        steps: int,
        speed: Callable[[float], str],
        measure: str = "test",
    ):
        self._console, self._steps, self._speed, self._measure = console, steps, speed, measure
        self._done, self._time = first, time.perf_counter()
        self._test: float | None = None
        self._bar: rich.progress.Progress | None = None
        if console.is_terminal:
            self._bar = rich.progress.Progress(
                rich.progress.BarColumn(),
                rich.progress.TextColumn("{task.description}"),
                console=console,
            )
            self._task = self._bar.add_task("compiling ...", total=steps, completed=first)
        else:
            console.print("Compiling the training step ...", highlight=False, soft_wrap=True)

    def __enter__(self) -> "Report":
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def training(self, losses: Sequence[tuple[int, float]]) -> None:
        # Short steps come several at a time: the bar needs only the last one.
        now, last = time.perf_counter(), losses[-1][0]
        latest = (now - self._time) / (last - self._done)
        self._done, self._time = last, now
        test = "-" if self._test is None else f"{self._test:.4f}"
        for done, loss in losses:
            line = (
                f"step {done}/{self._steps}  train {loss:.4f}  {self._measure} {test}  "
                f"{self._speed(latest)}"
            )
            line += f"  {_clock(latest * (self._steps - done))} left"
            if self._bar is None:
                self._console.print(line, highlight=False, soft_wrap=True)
            elif done == last:
                self._bar.update(self._task, completed=done, description=line)

    def test(self, done: int, value: float) -> None:
        self._test = value
        if self._bar is None:
            self._console.print(
                f"step {done}/{self._steps}  {self._measure} {value:.4f}",
                highlight=False,
                soft_wrap=True,
            )
        self.resume()

    def remark(self, done: int, text: str) -> None:
        line = f"step {done}/{self._steps}  {text}"
        self._console.print(line, highlight=False, soft_wrap=True)
        self.resume()

    def resume(self) -> None:
        """Exclude the time until now from the speed."""
        self._time = time.perf_counter()


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
