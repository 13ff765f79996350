"""Cycle-by-cycle simulation for Verilog modules with registers: Yosys turns one cycle's state update into a circuit."""

import re
import tempfile
from pathlib import Path

import numpy as np

from lutjax.circuits import aiger, yosys

COMMANDS = (
    *("read_verilog a.v", "hierarchy -check -top {top}", "proc", "flatten", "opt", "memory -nomap",
        "memory_map"),
    *("opt", "techmap", "dffunmap", "setundef -zero", "opt_clean -purge", "aigmap",
        "write_aiger -ascii -symbols a.aag"),
)  # fmt: skip


class Machine:
    """Parallel copies of a module, 64 per word, in any state.

    Args:
      text: Verilog source.
      top: module name; its only clock is removed.
      n_words: words with 64 copies each.
    """

    def __init__(self, text, top, n_words, seed):
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "a.v").write_text(text)
            yosys.run([line.format(top=top) for line in COMMANDS], folder, where="Machine")
            lines = Path(folder, "a.aag").read_text().splitlines()
        n_max, n_in, n_latches, n_out, n_ands = map(int, lines[0].split()[1:6])
        assert lines[0].startswith("aag ")
        read, latches = lines[1 : 1 + n_in], lines[1 + n_in : 1 + n_in + n_latches]
        rest = lines[1 + n_in + n_latches :]
        header = f"aag {n_max} {n_in + n_latches} 0 {n_out + n_latches} {n_ands}"
        before, after = zip(*(line.split()[:2] for line in latches), strict=True)
        body = [*read, *before, *rest[:n_out], *after, *rest[n_out : n_out + n_ands]]
        self.cycle = aiger.read("\n".join([header, *body, ""]).encode())
        names = dict(
            re.findall(r"^([io]\d+) (\S+)$", "\n".join(rest[n_out + n_ands :]), re.MULTILINE)
        )
        self.inputs, self.outputs = (
            [names[f"{kind}{k}"] for k in range(n)] for kind, n in (("i", n_in), ("o", n_out))
        )
        self.random = np.random.default_rng(seed)
        self.n_words = n_words
        self.state = self.drawn(n_latches)

    def drawn(self, n):
        """Draw random words."""
        return self.random.integers(0, 2**64, (n, self.n_words), np.uint64)

    def step(self, inputs):
        """Advance by one cycle and return the outputs before its end, as words by bit name."""
        rows = [inputs.get(name, np.zeros(self.n_words, np.uint64)) for name in self.inputs]
        result = self.cycle.evaluate(np.vstack([*rows, self.state]))
        self.state = result[len(self.outputs) :]
        return dict(zip(self.outputs, result[: len(self.outputs)], strict=True))
