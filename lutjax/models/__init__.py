"""Flax NNX models: `GPT`, `LUTTransformer`, `LogicClassifier`, `LogicTreeNet` and `LogicCA`."""

from typing import TYPE_CHECKING, Any

from lutjax.extras import attribute, importable_names

if TYPE_CHECKING:
    from lutjax.models._slots import Slots
    from lutjax.models.automaton import LogicCA, LogicCAConfig
    from lutjax.models.classifier import LogicClassifier, LogicClassifierConfig, pack
    from lutjax.models.gpt import GPT, GPTConfig
    from lutjax.models.packed import PackedClassifier
    from lutjax.models.packed_automaton import PackedAutomaton
    from lutjax.models.transformer import LUTTransformer, LUTTransformerConfig
    from lutjax.models.tree_net import LogicTreeNet, LogicTreeNetConfig, PackedTreeNet

__all__ = [
    "GPT",
    "GPTConfig",
    "LUTTransformer",
    "LUTTransformerConfig",
    "LogicCA",
    "LogicCAConfig",
    "LogicClassifier",
    "LogicClassifierConfig",
    "LogicTreeNet",
    "LogicTreeNetConfig",
    "PackedAutomaton",
    "PackedClassifier",
    "PackedTreeNet",
    "Slots",
    "pack",
]

_MODULES = {
    "Slots": "_slots",
    "GPT": "gpt",
    "GPTConfig": "gpt",
    "LUTTransformer": "transformer",
    "LUTTransformerConfig": "transformer",
    "LogicCA": "automaton",
    "LogicCAConfig": "automaton",
    "LogicClassifier": "classifier",
    "LogicClassifierConfig": "classifier",
    "LogicTreeNet": "tree_net",
    "LogicTreeNetConfig": "tree_net",
    "PackedAutomaton": "packed_automaton",
    "PackedClassifier": "packed",
    "PackedTreeNet": "tree_net",
    "pack": "classifier",
}


def __getattr__(name: str) -> Any:
    return attribute(__name__, name, _MODULES)


def __dir__() -> list[str]:
    return importable_names(__name__, _MODULES)
