"""Configs of the training runs of an automaton, importable without JAX."""

import dataclasses
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from lutjax.models._logic_configs import LogicCAConfig
from lutjax.training.configs import Configs, Intervals, Training
from lutjax.training.presets import EXPERIMENTS

STARTS = ("boards", "random", "seed", "zero")
N_BOARDS = 512  # periodic boards of 3x3 cells, and neighborhoods of a cell


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingConfig(Training):
    """Settings of a training run apart from the model.

    Attributes:
      experiment: its name, which decides the target.
      start: initial state: boards of the Game of Life, random bits, a seed (one cell of ones), or
        zero.
      size: grid rows and columns.
      n_steps: automaton steps before comparing with the target.
      batch_size: grids per step. In the Game of Life, 3x3 boards; 512 are all boards, as one torus
        with every neighborhood once.
      learning_rate: AdamW learning rate.
      weight_decay: AdamW weight decay. It pulls gates toward a uniform mixture.
      hard_share: hard-gate probability per training step.
      last_hard_share: hard-gate probability in the last step. It grows from `hard_share` after
        `hard_growth` of the run. Default: unchanged.
      hard_growth: fraction of steps before the hard-gate probability grows.
      runs: automata trained side by side, with consecutive seeds. The best automaton is kept.
      clip: maximum gradient magnitude per element.
      keep_every: automaton steps per state kept for the gradient. See
        `lutjax.models.LogicCA.__call__`.
      loss_channels: target channels to compare, counted from 0. Default: all.
    """

    experiment: str
    start: str
    size: int = 3
    n_steps: int = 1
    batch_size: int = N_BOARDS
    weight_decay: float | int = 0.01
    hard_share: float | int = 0.0
    last_hard_share: float | int | None = None
    hard_growth: float | int = 0.3
    runs: int = 1
    clip: float | int = 100.0
    keep_every: int = 1
    loss_channels: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_least(size=3, n_steps=1, runs=1, keep_every=0)
        if not 0 < self.clip < float("inf"):
            raise ValueError(f"clip is {self.clip}; it must be above 0 and finite.")
        channels = self.loss_channels
        if len(set(channels)) < len(channels) or min(channels, default=0) < 0:
            raise ValueError(
                f"loss_channels is {self.loss_channels}; "
                "expected distinct channel numbers from 0 on."
            )
        if self.start not in STARTS:
            raise ValueError(f"start is {self.start!r}; the known ones are {', '.join(STARTS)}.")
        if self.start == "boards" and (
            self.batch_size > N_BOARDS or self.size != 3 or self.n_steps != 1
        ):
            raise ValueError(
                f"batch_size is {self.batch_size}, size is {self.size}, n_steps is {self.n_steps}; "
                f"the Game of Life is learned from one step on at most {N_BOARDS} boards of size 3."
            )
        if not 0 <= self.weight_decay < float("inf"):
            raise ValueError(f"weight_decay is {self.weight_decay}; it must not be negative.")
        if not 0 <= self.hard_share <= 1:
            raise ValueError(f"hard_share is {self.hard_share}; it is a probability, 0 to 1.")
        if self.last_hard_share is not None and not 0 <= self.last_hard_share <= 1:
            raise ValueError(
                f"last_hard_share is {self.last_hard_share}; it is a probability, 0 to 1."
            )
        if not 0 <= self.hard_growth < 1:
            raise ValueError(
                f"hard_growth is {self.hard_growth}; it is a share of the run, 0 to below 1."
            )

    @property
    def hardens(self) -> bool:
        """True if gates are the likeliest ones in any step."""
        return bool(self.hard_share or self.last_hard_share)

    scheduled_name = "rate or share of hard gates"

    def scheduled_values(
        self, numbers: Int[np.ndarray, " steps"]
    ) -> Float[np.ndarray, "steps values"]:
        """Return the learning rate and the share of hard gates of steps."""
        import jax.numpy as jnp

        shares = np.asarray(self.hard_share_at(jnp.asarray(numbers)))
        shares = np.broadcast_to(shares, numbers.shape)[:, None]  # constant shares are scalars
        return np.concatenate([super().scheduled_values(numbers), shares], 1, dtype=np.float32)

    def hard_share_at(self, number: Any) -> Any:
        """Return the share of hard gates in a step."""
        import jax.numpy as jnp

        if self.last_hard_share is None:
            return float(self.hard_share)
        grown = jnp.clip((number / self.steps - self.hard_growth) / (1 - self.hard_growth), 0, 1)
        return self.hard_share + (self.last_hard_share - self.hard_share) * grown


@dataclasses.dataclass(frozen=True)
class Options(Intervals):
    """Options that may change while a run goes on.

    Attributes:
      stop_when_solved: stop after three tests without a wrong bit.
      pictures: draw the automaton at the end (requires Pillow).
    """

    stop_when_solved: bool = True
    pictures: bool = True


CONFIGS = Configs(LogicCAConfig, TrainingConfig, Options, preset=lambda model: EXPERIMENTS["life"])
