"""Everything that the package has is a member of the properties: ops, layers and reads, with each of their arguments."""

import ast
import dataclasses
import inspect
import itertools
import pkgutil
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from layer_libraries import spec_type_of

import lutjax
from lutjax import ops, reads, tables as factored, wiring
from lutjax.dispatch import catalog
from lutjax.layers import _logic, _logic_images, _spec, _tables, haiku, linen, nnx
from lutjax.models import LogicTreeNetConfig
from properties import calls, checking, layers, members, strategies
from properties.calls import OPS, Call, arguments

OF_LAYERS = checking.OF_LAYERS
NOT_DRAWN = {
    "update_table": "test_updates_of_tables, test_factored.py: steps of rules",
    "thermometer_thresholds": "tests/core/test_logic_layers.py: of data that are known before anything is traced",
}
"""Public functions of arrays that are no members, with the tests that they have."""
WITHOUT_SIZES = {
    "pack_bits": "test_packing_bits",
    "unpack_bits": "test_packing_bits",
    "quantize_tables": "test_tables_as_integers",
}
"""Ops whose values are not drawn in test_values.py by sizes, with the tests there that draw them."""
LEFT_OUT = {
    "implementation": "contexts of calls choose it, and tests/core/test_parity.py tries each",
    "sequence_axis": "an axis of a mesh over sequences: tests/core/test_sharding.py",
    "param_dtype": "that of a call",
    "row_axis": "an axis of a mesh over rows: tests/core/test_row_blocks.py",
}
"""Arguments of ops and layers that members do not give."""
_OF_GATES = "in fixed point ops of coefficients and tables are members, of which these are made: tests/core/test_integer_gates.py"
_GOES_ON = "what calls that go on remember: tests/core/test_counts.py and test_pages.py"
LEFT_OUT_OF = {
    **{
        member: {"accumulate": _OF_GATES}
        for member in ("logic_gates", "LogicGates", "LogicRNN", "SoftLUT", "BinaryLUT", "GroupSum")
    },
    **{
        member: dict.fromkeys(("blocks", "cached", "block_tables", "lengths"), _GOES_ON)
        for member in ("LUTAttention", "LUTPairAttention")
    },
    **{
        member: {"placement": "tables in the memory of the host: tests/core/test_host_tables.py"}
        for member in ("NgramMemory", "ProductKeyMemory", "ProductKeyExperts")
    },
}
"""Those of single members."""
OF_CONSTRUCTION = (
    "weights_init",
    "positions_init",
    "compress_init",
    "decompress_init",
    "logits_init",
    "table_init",
    "scores_init",
    "keys_init",
    "kernel_init",
)
"""Arguments of layers that draw variables: calls give them."""
OF_CALLS = {
    "tables": "those of a layer that shares them with others: tests/core/test_logic_layers.py",
    "history": "of calls that go on, which the option decode makes",
}
"""Arguments of the call of a layer's spec that members do not give."""


# ------------------------------------------------------------------------------------- members
def public_ops() -> set[str]:
    """Names of the public functions in the modules of ops."""
    return {
        name
        for room in (ops, factored)
        for module in pkgutil.iter_modules(room.__path__)
        if not module.name.startswith("_")
        for name, value in vars(__import__(f"{room.__name__}.{module.name}", fromlist=[""])).items()
        if name in lutjax.__all__ and inspect.isfunction(value)
    }


def test_every_op():
    every = public_ops() | set(catalog.KERNELS)
    assert {"lut", "conv_lut", "logic_trees", "unpack_bits"} <= every
    drawn = every - set(NOT_DRAWN)
    assert not drawn - set(OPS), "ops that are no members: see properties/ops.py"
    of_values = drawn - set(WITHOUT_SIZES)
    for name in ("CALLS", "POOLS", "SIZES"):
        missing = of_values - set(getattr(strategies, name))
        assert not missing, f"ops whose values are not drawn: see strategies.{name}"
    assert not of_values - set(checking.DEFINED), "ops whose values are not defined: see checking.DEFINED"
    assert set(WITHOUT_SIZES) <= every


def test_every_layer():
    of_library = {
        name
        for name in nnx.__all__
        if inspect.isclass(getattr(nnx, name)) and hasattr(getattr(nnx, name), "spec_type")
    }
    assert of_library == {name for name in linen.__all__ if hasattr(getattr(linen, name), "spec_type")}
    assert of_library == {name for name in haiku.__all__ if hasattr(getattr(haiku, name), "spec_type")}
    assert of_library == set(layers.LAYERS), "layers that are no members: see properties/layers.py"


def test_every_read():
    """Each with each value of its attributes, in the tables of values and of sequences."""
    every = {
        c
        for name in reads.__all__
        if inspect.isclass(c := getattr(reads, name)) and issubclass(c, reads.Read) and c is not reads.Read
    }
    drawn = [read for _, read in members.READS.values()]
    assert {type(read) for read in drawn} == every, "reads that are no members: see properties/members.py"
    for kind in every:
        for field in dataclasses.fields(kind):
            found = {getattr(read, field.name) for read in drawn if type(read) is kind}
            assert len(found) > 1, f"{kind.__name__}: {field.name} is always {found}"
    for op in ("scored_lut", "conv_lut", "ProjectionLUT", "SpatialLUT", "WindowLUT", "ConvLUT"):
        assert set(members.READS) <= set(OPS[op].options["read"]), op


# ------------------------------------------------------------------------------------- their arguments
class Recorded(Exception):
    """A call has come to what it calls."""


class Recorder:
    """Stands for the module of ops: notes the arguments of the one that is called, in place of calling it."""

    def __init__(self) -> None:
        self.given: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        function = OF_LAYERS[name] if name in OF_LAYERS else getattr(lutjax, name)

        def note(*given: Any, **named: Any) -> None:
            bound = inspect.signature(function).bind(*given, **named).arguments
            self.given |= {
                n for n, v in bound.items() if differs(v, inspect.signature(function).parameters[n].default)
            }
            raise Recorded

        return note


def left_out(member: str) -> set[str]:
    return {*LEFT_OUT, *LEFT_OUT_OF.get(member, {})}


def differs(value: Any, default: Any) -> bool:
    return not (value is default or (isinstance(value, (bool, int, float, str)) and value == default))


def kinds_of(op: str) -> list[dict[str, Any]]:
    """Options of calls: each by itself, and the first of each with that of each other one."""
    of = OPS[op].options
    one = [{name: value} for name, values in of.items() for value in values[1:]]
    first = [{name: values[1]} for name, values in of.items()]
    return [{}, *one, *(a | b for a, b in itertools.combinations(first, 2))]


def noted(op: str, note: Any) -> None:
    for options in kinds_of(op):
        call = Call(op, options=options)
        of = calls._sizes_and_options(call)
        with pytest.raises(Recorded):
            OPS[op].call(note, arguments(call), of)


@pytest.mark.usefixtures("without_typechecking")  # of arrays that are not yet those of JAX
@pytest.mark.parametrize("op", [*calls.OF_OPS])
def test_every_argument_of_ops(op):
    function = OF_LAYERS[op] if op in OF_LAYERS else getattr(lutjax, op)
    recorder = Recorder()
    noted(op, recorder)
    missing = set(inspect.signature(function).parameters) - recorder.given - left_out(op)
    assert not missing, f"{op}: members never give {sorted(missing)}"


@pytest.mark.parametrize("layer", [*layers.LAYERS])
def test_every_argument_of_layers(layer, monkeypatch):
    spec_type, found, of_call = spec_type_of(layer), defaultdict(list), set()
    defaults = {f.name: f.default for f in spec_type.__dataclass_fields__.values()}

    def note(library: str, name: str, options: Any, a: Any, *inputs: Any, **how: Any) -> None:
        for n, value in options.items():
            found[n].append(value)
        variables = [v.name for v in spec_type(**options).variables()]
        for n in spec_type.given:
            if n in variables:
                found[n].append(a[n])
        of_call.update(("x", "keys")[: len(inputs)], how)
        raise Recorded

    def decoded(layer: str, options: Any, a: Any) -> None:
        found["decode"].append(True)
        raise Recorded

    monkeypatch.setattr(layers, "in_library", note)
    monkeypatch.setattr(layers, "decoded", decoded)
    noted(layer, lutjax)
    given = {n for n, values in found.items() if any(differs(v, defaults.get(n)) for v in values)}
    missing = set(_spec.arguments(spec_type)) - given - of_call - set(OF_CONSTRUCTION) - left_out(layer)
    assert not missing, f"{layer}: members never give {sorted(missing)}"
    for name, every in choices(spec_type).items():
        if name in found:
            values = {v for v in found[name] if isinstance(v, str)} | {defaults[name]}
            assert set(every) <= values, f"{layer}: members never have {set(every) - values} as {name}"
    parameters = set(inspect.signature(spec_type.__call__).parameters) - {"self", "arrays"}
    if "gumbel" not in getattr(spec_type, "estimators", ("gumbel",)):
        parameters -= {"key"}  # it draws nothing
    assert parameters - of_call <= {*OF_CALLS, *LEFT_OUT_OF.get(layer, {})}, (
        f"{layer}: calls never give {parameters - of_call}"
    )


def choices(spec_type: Any) -> dict[str, Any]:
    """Return the names that an argument takes, by arguments."""
    parameterizations = (
        ("gates", *_logic.PARAMETERIZATIONS) if hasattr(spec_type, "depth") else _logic.PARAMETERIZATIONS
    )
    return {
        "wiring": _logic_images.LEAVES if hasattr(spec_type, "depth") else wiring.LEARNED,
        "estimator": getattr(spec_type, "estimators", ()),
        "parameterization": parameterizations,
        "gradient": _logic.GRADIENTS,
        "targets_per": _tables.TARGET_LISTS,
    }


def test_every_option_of_tree_nets():
    """Fields that decide what a `LogicTreeNet` computes; other fields are sizes."""
    sizes = {
        "in_shape",
        "n_classes",
        "kernels",
        "layers",
        "depth",
        "kernel",
        "stride",
        "padding",
        "pool",
        "pool_padding",
    }
    sizes |= {"channels_per_kernel", "candidates", "tau", "residual"}
    assert set(LogicTreeNetConfig.__dataclass_fields__) - sizes <= set(OPS["LogicTreeNet"].options)


# ------------------------------------------------------------------------------------- definitions
@pytest.mark.parametrize("module", ["definitions", "layer_definitions"])
def test_definitions_do_not_know_the_package(module):
    code = ast.parse((Path(__file__).parent / f"{module}.py").read_text(encoding="utf-8"))
    imported = {
        name
        for node in ast.walk(code)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([node.module] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names])
    }
    assert not [name for name in imported if name.partition(".")[0] == "lutjax"]


def test_what_is_left_out_exists():
    parameters = {
        n
        for name in calls.OF_OPS
        for n in inspect.signature(OF_LAYERS.get(name) or getattr(lutjax, name)).parameters
    }
    of_layers = {n for layer in layers.LAYERS for n in _spec.arguments(spec_type_of(layer))}
    assert set(LEFT_OUT) <= parameters | of_layers
    assert set(OF_CONSTRUCTION) <= of_layers
    assert set(NOT_DRAWN) <= set(lutjax.__all__)
