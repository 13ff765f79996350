"""Gate counts for a hard automaton's circuit."""

import numpy as np
from jaxtyping import Bool, Int

from lutjax.models import LogicCA

NAMES = (
    "false", "a and b", "a and not b", "a", "not a and b", "b", "a xor b", "a or b",
    "nor", "equal", "not b", "a or not b", "not a", "not a or b", "nand", "true",
)  # fmt: skip
INPUTS = (3, 5)  # pass-through gates

_EXPLANATION = (
    "Gates of the hard automaton. A perception circuit counts once, "
    "whatever the number of channels; live gates are\n"
    "those on which the target channels depend over any number of steps; "
    "active ones are all but a and b, which\n"
    "pass an input on."
)


def live(
    model: LogicCA, n_outputs: int, gates: Int[np.ndarray, " gates"] | None = None
) -> Bool[np.ndarray, " gates"]:
    """Return a mask with the gates that affect the first channels, over any number of steps.

    Only inputs with an effect in a gate's truth table count. `gates` replaces the model's gates.
    """
    config = model.config
    gates = np.asarray(model.gates()) if gates is None else gates
    table = gates[:, None] >> np.arange(3, -1, -1) & 1  # answers to ab = 00, 01, 10, 11
    needs = np.stack(
        [(table[:, :2] != table[:, 2:]).any(1), (table[:, ::2] != table[:, 1::2]).any(1)], -1
    )
    starts = np.cumsum([0, *config.sizes])
    wires = [np.asarray(w[...]) for w in model.wires]
    used = np.zeros(config.n_gates, bool)
    channels: np.ndarray = np.arange(config.channels) < n_outputs
    n_perception = len(config.perception)
    while True:
        read, next_channels = channels, channels.copy()
        for layer in range(len(config.sizes) - 1, -1, -1):
            own = used[starts[layer] : starts[layer + 1]]
            if layer == n_perception - 1:
                # Sources of the update circuit: the cell, then [kernels * outputs, channels].
                perceived = read[config.channels :].reshape(-1, config.channels)
                next_channels |= read[: config.channels]
                next_channels |= np.any(perceived, 0)
                read = np.asarray(np.any(perceived, 1))
            own |= read
            if layer == 0:
                break
            n_inputs = config.wired[layer - 1][0] * config.wired[layer - 1][1]
            read = np.zeros(n_inputs, bool)
            where = wires[layer - 1][own[:, None] & needs[starts[layer] : starts[layer + 1]]]
            read[where] = True
        if (next_channels == channels).all():
            return used
        channels = next_channels


def table(model: LogicCA, n_outputs: int) -> str:
    """Format the sixteen gate counts, with an explanation."""
    gates, used = np.asarray(model.gates()), live(model, n_outputs)
    n_seen = sum(model.config.sizes[: len(model.config.perception)])
    parts = (np.arange(len(gates)) < n_seen, np.arange(len(gates)) >= n_seen)
    lines = [
        _EXPLANATION,
        "",
        f"{'gate':<14}{'perception':>11}{'live':>7}{'update':>9}{'live':>7}",
    ]
    for number, name in enumerate(NAMES):
        counts = [
            int((chosen & (gates == number)).sum()) for p in parts for chosen in (p, p & used)
        ]
        lines.append(f"{name:<14}{counts[0]:>11}{counts[1]:>7}{counts[2]:>9}{counts[3]:>7}")
    active = ~np.isin(gates, INPUTS)
    counts = [int((chosen & active).sum()) for p in parts for chosen in (p, p & used)]
    lines.append(f"{'active':<14}{counts[0]:>11}{counts[1]:>7}{counts[2]:>9}{counts[3]:>7}")
    return "\n".join(lines) + "\n"


def count_active_gates(model: LogicCA, n_outputs: int) -> int:
    """Count the live gates, without pass-through gates; see `table`."""
    return int((live(model, n_outputs) & ~np.isin(np.asarray(model.gates()), INPUTS)).sum())
