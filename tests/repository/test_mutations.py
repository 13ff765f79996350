"""The faults of `tools/mutate.py` can still be applied: each replaces text that occurs once."""

import runpy

from folders import ROOT


def test_every_mutation_can_be_applied():
    mutations = runpy.run_path(str(ROOT / "tools" / "mutations.py"))["MUTATIONS"]
    assert mutations
    for file, old, new, *_ in mutations:
        text = (ROOT / file).read_text(encoding="utf-8")
        assert (text.count(old), old != new) == (1, True), f"{file}: {old}"
