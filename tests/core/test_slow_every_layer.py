"""Each layer, variable set and read computes the same in all libraries."""

import pytest
from every_layer import CASES
from layer_libraries import assert_outputs_agree


def compared_cases():
    """Return the first case with nontrivial gradients for each layer, variable set and read."""
    result = {}
    for name, case in CASES.items():
        spec = case.spec
        kinds = tuple((v.name, v.kind, v.shape) for v in spec.variables())
        without = getattr(spec, "deterministic", False) or getattr(spec, "quantized", False)
        if not (spec.random or without) and any(v.collection == "params" for v in spec.variables()):
            result.setdefault((case.layer, kinds, getattr(spec, "read", None)), name)
    return list(result.values())


@pytest.mark.parametrize("name", compared_cases())
def test_libraries_agree(name):
    assert_outputs_agree(CASES[name])
