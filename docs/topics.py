"""Public names by topic, and the pages of the reference that are made of them.

`docs/conf.py` writes these pages into ``docs/reference/api`` when the site is built; their texts are the docstrings. A name of an
``__all__`` that no topic has is an error of `tests/repository/test_site.py`.
"""

import dataclasses
import importlib
import inspect
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "reference" / "api"


@dataclasses.dataclass(frozen=True)
class Topic:
    """Page of the reference.

    Attributes:
      title: its heading.
      lead: what is on it, in a sentence or two.
      sections: heading, module and names of each; names may have dots, as far as modules and classes go.
    """

    title: str
    lead: str
    sections: tuple[tuple[str, str, str], ...]

    def names(self) -> list[str]:
        """Return the full names of all that is on the page."""
        return [f"{module}.{name}" for _, module, names in self.sections for name in names.split()]


LAYERS = (
    ("Tables", "LUT SparseLUT LUTAttention LUTPairAttention ProjectionLUT"),
    ("Memory", "NgramMemory ProductKeyMemory ProductKeyExperts"),
    ("Images", "ConvLUT WindowLUT SpatialLUT LogicConv"),
    ("Logic", "LogicGates LogicRNN SoftLUT BinaryLUT GroupSum Thermometer"),
)

TOPICS: dict[str, Topic] = {
    "ops-tables": Topic(
        "Ops: tables",
        "Detections, look-ups, attention, and what tables need around them. The mathematics: [Look-up tables](../../semantics.md).",
        (
            ("Detection", "lutjax", "detect detect_signs margins sample_anchors Detection"),
            ("Look-ups", "lutjax", "lookup lut sparse_lookup sparse_lut conv_lut"),
            ("Weighted and scored look-ups", "lutjax", "weighted_lookup scored_lut"),
            ("Attention", "lutjax", "lookup_attention lut_attention lut_pair_attention"),
            ("Rows of n-grams", "lutjax", "ngram_rows"),
            ("Integers", "lutjax", "quantize_tables QuantizedTables FixedPoint"),
            (
                "Training",
                "lutjax",
                "update_table scale_gradient cell_total_variation usage Usage",
            ),
        ),
    ),
    "ops-logic": Topic(
        "Ops: logic",
        "Gates, tables over bits, and the packed form. The mathematics: [Differentiable logic](../../logic.md).",
        (
            ("Gates", "lutjax", "logic_gates gate_coefficients bilinear_gates"),
            ("Tables over bits", "lutjax", "soft_lut binary_lut"),
            ("Packed form", "lutjax", "packed_lut pack_bits unpack_bits"),
            ("Wires and thresholds", "lutjax", "readers thermometer_thresholds"),
            (
                "Fused ops",
                "lutjax.ops",
                "gate_network.gate_network logic_trees.logic_trees lut_at_places.lut_at_places",
            ),
        ),
    ),
    "reads": Topic(
        "Reads",
        "Strategies that give rows of scored tables their coefficients ([definition](../../semantics.md#12-weighted-and-scored-reads)).",
        (
            ("Reads", "lutjax.reads", "Hard Blend SoftSign Confidence PowersOfTwo"),
            ("For reads of your own", "lutjax.reads", "Read absolute address straight_through"),
        ),
    ),
    "layers-nnx": Topic(
        "Layers: Flax NNX",
        "Modules of Flax NNX.",
        (
            *((title, "lutjax.layers.nnx", names) for title, names in LAYERS),
            (
                "Kinds of variables",
                "lutjax.layers.nnx",
                "Tables Scalars Anchors Targets Wires Thresholds Quantized Keys",
            ),
            ("Functions of models", "lutjax.layers.nnx", "check quantize tables_of host_tables_of"),
            ("Initial values", "lutjax.layers.initializers", "residual_gates residual_table"),
        ),
    ),
    "layers-linen": Topic(
        "Layers: Flax Linen",
        "Modules of Flax Linen, with the same arguments as those of [NNX](layers-nnx.md).",
        (
            *((title, "lutjax.layers.linen", names) for title, names in LAYERS),
            ("Functions of models", "lutjax.layers.linen", "tables_of"),
        ),
    ),
    "layers-haiku": Topic(
        "Layers: Haiku",
        "Modules of Haiku, with the same arguments as those of [NNX](layers-nnx.md).",
        (
            *((title, "lutjax.layers.haiku", names) for title, names in LAYERS),
            ("Functions of models", "lutjax.layers.haiku", "tables_of"),
        ),
    ),
    "wiring": Topic(
        "Wiring",
        "Inputs that gates and detectors read, and outputs that tables reach ([images](../../images.md), [wiring of gates](../../logic.md#9-wiring)).",
        (
            (
                "Images",
                "lutjax.wiring",
                "Connectivity projections window_groups windows full trees show",
            ),
            ("Gates", "lutjax.wiring", "Windows Groups balanced random unique_pairs butterfly"),
            (
                "Lists of edges",
                "lutjax.wiring",
                "from_edges edges add_edges remove_edges carry_over Edges EdgeIds Changed",
            ),
            ("Names", "lutjax.wiring", "FIXED LEARNED"),
        ),
    ),
    "models": Topic(
        "Models",
        "Whole networks, their configurations and their packed forms.",
        (
            ("Language models", "lutjax.models", "GPT GPTConfig LUTTransformer LUTTransformerConfig"),
            (
                "Classifiers",
                "lutjax.models",
                "LogicClassifier LogicClassifierConfig LogicTreeNet LogicTreeNetConfig",
            ),
            ("Automata", "lutjax.models", "LogicCA LogicCAConfig PackedAutomaton"),
            ("Texts that join and leave", "lutjax.models", "Slots"),
            ("Packed networks", "lutjax.models", "pack PackedClassifier PackedTreeNet"),
        ),
    ),
    "bundles": Topic(
        "Bundles, conversion and serving",
        "Models as folders that everybody reads ([how-to](../../bundles.md)), those of other packages ([how-to](../../convert.md)), and answers over HTTP ([how-to](../../serving.md)).",
        (
            ("Saving and loading", "lutjax", "save load"),
            ("Bundles", "lutjax.bundles", "read Bundle BundleError"),
            ("Programs of JAX", "lutjax.bundles.programs", "write"),
            (
                "Models of other packages",
                "lutjax.convert",
                "read torchlogix difflogic torch_dwn spiky spiky_layer Image ConversionError",
            ),
            ("Serving", "lutjax.serving", "application Limits"),
        ),
    ),
    "training-tables": Topic(
        "Training: tables",
        "Gradients of tables in factors, optimizers that move rows in place, and penalties ([how-to](../../training-large-tables.md)).",
        (
            (
                "Gradients",
                "lutjax.training.tables",
                "value_and_grad microbatched TableGradient TableUseError",
            ),
            (
                "Optimizers",
                "lutjax.training.tables",
                "Optimizer OptimizerState SGD RowAdagrad RowAdam RowMomentum RowRule scaled normalized",
            ),
            ("Norms", "lutjax.training.tables", "global_norm clip_by_global_norm"),
            ("Flax NNX", "lutjax.training.nnx", "value_and_grad Optimizer update_host"),
            (
                "In the memory of the host",
                "lutjax.training.host",
                "HostTable HostTables HostMemoryError RowPrefetcher Batch ShardedHostTable given",
            ),
            ("Flax Linen", "lutjax.training.linen", "TrainState"),
            (
                "Kinds of parameters",
                "lutjax.training.parameters",
                "kind_of kinds decayed cell_total_variation",
            ),
            ("Several devices", "lutjax.sharding", "specs lookup_in_blocks DETECTORS"),
        ),
    ),
    "training-runs": Topic(
        "Training: runs and data",
        "Data sets, runs of classifiers and language models, and what is said of them.",
        (
            ("Data", "lutjax.training.datasets", "load Data Parts"),
            ("Columns", "lutjax.training.datasets.columns", "Encoding Table"),
            ("Text", "lutjax.training.text", "load_text Text bigram_loss"),
            ("Changed images", "lutjax.training.augment", "warp"),
            (
                "Classifiers",
                "lutjax.training.classifier",
                "TrainingConfig Run baselines load_model",
            ),
            ("Language models", "lutjax.training.lm", "Run TrainingConfig"),
            ("Automata", "lutjax.training.automaton", "Run TrainingConfig"),
            ("Published networks", "lutjax.training.recipes", "recipe RECIPES"),
            ("Rates", "lutjax.training.optimizers", "learning_rate annealed"),
            ("Reports", "lutjax.training.reports", "report tables in_words bit_names kinds confusion"),
            ("New rows and images", "lutjax.training.predictions", "load TrainedRun Predictions"),
            ("Forms of data", "lutjax.training.raw", "Form"),
            ("Pictures that move", "lutjax.training.animation", "animate film"),
            ("Several processes", "lutjax.training.hosts", "initialize is_first put fetch"),
            ("Checkpoints", "lutjax.training.checkpoints", "save restore"),
        ),
    ),
    "circuits": Topic(
        "Circuits",
        "Hard networks as netlists: made, simplified, written, read and proved ([how-to](../../circuits.md)).",
        (
            (
                "Netlists",
                "lutjax.circuits",
                "Circuit Port Format Builder from_model simplify tabulate resynthesize step_automaton draw",
            ),
            (
                "Writers and readers",
                "lutjax.circuits",
                "verilog.write verilog.testbench verilog.latency streams.write c.write c.c_test blif.write blif.read aiger.write aiger.read alkaid.write alkaid.read "
                "netlist_json.write netlist_json.read dot.write page.write page.read",
            ),
            (
                "Table columns",
                "lutjax.circuits.columns",
                "number category port_names Columns Number Category",
            ),
            ("Counts", "lutjax.circuits.statistics", "of Stats PartStats ClassStats"),
            ("FPGAs", "lutjax.circuits.fpga", "report part_of Report Cost Family"),
            ("Boards", "lutjax.circuits.boards", "write Board"),
            ("Microcontrollers", "lutjax.circuits.mcu", "write c_test report Report Target"),
            ("ABC", "lutjax.circuits.abc", "find cec lut_count optimize from_verilog Equivalence"),
            (
                "Folders and proofs",
                "lutjax.circuits",
                "proofs.verify proofs.Proof deployment.DeploymentError",
            ),
            ("Look-up layers in C", "lutjax.circuits.detectors", "of rounded IntegerLUT"),
            ("Language models in C", "lutjax.circuits.language_model", "of verify IntegerLanguageModel"),
        ),
    ),
    "implementations": Topic(
        "Implementations and launches",
        "Which kernel runs a call, why, and how its work is divided ([how-to](../../implementations.md)).",
        (
            ("Choosing", "lutjax", "explain use_implementation Platform Backend NoImplementationError"),
            ("Registry", "lutjax", "kernel_registry"),
            ("Class of the registry", "lutjax.dispatch.registry", "KernelRegistry KernelSpec Request"),
            (
                "Launches",
                "lutjax.tuning",
                "Launch launched use load recorded measured launch_of Asked Sizes",
            ),
            ("Measuring", "lutjax.benchmark.measure", "device_time Timing copy_bandwidth peak_bytes"),
        ),
    ),
    "testing": Topic(
        "For authors of kernels",
        "The parity suite that kernels of anybody can run, and the arguments at which ops are tested "
        "([adding an op](../../dev/adding-an-op.md)).",
        (
            (
                "Checks",
                "lutjax.testing",
                "check check_update check_factored check_lowering check_compilation assert_close assert_all_close",
            ),
            (
                "Cases and programs",
                "lutjax.testing",
                "case cases shapes program programs update_program Program",
            ),
            ("Transformations", "lutjax.testing", "TRANSFORMATIONS"),
            (
                "Cases of an op",
                "lutjax.cases",
                "Case CaseModule Size Sizes Axes Draw Detections Kind Tag Traffic LookUpTraffic of DENSE FORWARD IN_PLACE UPDATE ROWS",
            ),
        ),
    ),
    "oracles": Topic(
        "Oracles",
        "`lutjax.reference` has each op in plain `jax.numpy`, for any mode of differentiation. A function takes what the op of its name takes, "
        "without `implementation`.",
        (
            (
                "Tables",
                "lutjax.reference",
                "detect detect_signs margins lookup lut sparse_lookup sparse_lut weighted_lookup scored_lut conv_lut lut_at_places "
                "lookup_attention lut_attention lut_pair_attention scale_gradient",
            ),
            (
                "Logic",
                "lutjax.reference",
                "logic_gates gate_coefficients bilinear_gates gate_network logic_trees soft_lut binary_lut packed_lut pack_bits unpack_bits",
            ),
        ),
    ),
    "exceptions": Topic(
        "Exceptions",
        "Errors with a class of their own; all others are `ValueError` and `TypeError`. [Error messages](../errors.md) has the messages.",
        (
            (
                "Ops and gradients",
                "lutjax",
                "NoImplementationError RepeatedInputsWarning training.tables.TableUseError",
            ),
            (
                "Runs and folders",
                "lutjax",
                "files.errors.FolderError training.errors.RunError training.errors.InUseError training.errors.CheckpointError "
                "training.errors.DamagedError training.errors.HostError training.text.TextError",
            ),
            ("Circuits", "lutjax.circuits", "deployment.DamagedManifestError language_model.DifferenceError"),
        ),
    ),
}

# Modules whose `__all__` is public.
MODULES = (
    "lutjax",
    "lutjax.bundles",
    "lutjax.cases",
    "lutjax.circuits",
    "lutjax.convert",
    "lutjax.layers.haiku",
    "lutjax.layers.initializers",
    "lutjax.layers.linen",
    "lutjax.layers.nnx",
    "lutjax.models",
    "lutjax.reads",
    "lutjax.reference",
    "lutjax.serving",
    "lutjax.sharding",
    "lutjax.training.linen",
    "lutjax.training.host",
    "lutjax.training.nnx",
    "lutjax.training.parameters",
    "lutjax.training.tables",
    "lutjax.tuning",
    "lutjax.wiring",
)


def equations() -> dict[str, list[str]]:
    """Return for each op the labels of its equations, which ``docs/reference/equations.md`` lists in its last table."""
    path = ROOT / "docs" / "reference" / "equations.md"
    rows = re.findall(r"^\| `(lutjax\.\w+)` \| (.*) \|$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {name: re.findall(r"{eq}`([\w-]+)`", labels) for name, labels in rows}


def listed() -> set[str]:
    """Return the full names of all topics."""
    return {name for topic in TOPICS.values() for name in topic.names()}


def public() -> set[str]:
    """Return the full names of every ``__all__`` that is public, without the version and the modules of `lutjax`, which have pages of their own."""
    names = {f"{module}.{name}" for module in MODULES for name in importlib.import_module(module).__all__}
    package = importlib.import_module("lutjax")
    modules = {f"lutjax.{name}" for name in package.__all__ if inspect.ismodule(getattr(package, name))}
    return names - modules - {"lutjax.__version__"}


def found(name: str) -> Any:
    """Return what a full name means.

    Raises:
      AttributeError: there is no such thing.
    """
    module, _, rest = name.partition(".")
    value = importlib.import_module(module)
    for part in filter(None, rest.split(".")):
        module = f"{module}.{part}"
        try:
            value = getattr(value, part)
        except AttributeError:
            try:
                value = importlib.import_module(module)
            except ImportError:
                raise AttributeError(f"{name}: {part} is neither an attribute nor a module") from None
    return value


def _is_listed_before(name: str, page: str) -> bool:
    """Return whether an earlier topic describes a name too; links find it there."""
    before = list(TOPICS)[: list(TOPICS).index(page)]
    return any(name in TOPICS[key].names() for key in before)


def _directive(name: str, page: str) -> list[str]:
    value = found(name)
    options = ["   :no-index:"] if _is_listed_before(name, page) else []
    if isinstance(value, type):
        return [f".. autoclass:: {name}", *options, "   :members:", "   :inherited-members: " + INHERITED, ""]
    if callable(value) and hasattr(value, "__name__"):
        return [f".. autofunction:: {name}", *options, ""]
    return [f".. autodata:: {name}", *options, "   :no-value:", ""]


# Classes of other libraries, whose members are theirs.
INHERITED = "Module,Variable,Param,Pytree,Object,tuple,str,int,dict,BaseException,Exception,ValueError,object,Enum,StrEnum,PyTreeNode"


def page_of(key: str) -> str:
    """Return the page of a topic."""
    topic = TOPICS[key]
    lines = [f"# {topic.title}", "", topic.lead, ""]
    for heading, module, names in topic.sections:
        lines += [f"## {heading}", "", "```{eval-rst}", f".. currentmodule:: {module}", ""]
        for name in names.split():
            lines += _directive(f"{module}.{name}", key)
        lines += ["```", ""]
    return "\n".join(lines)


def commands() -> str:
    """Return the page of the command line, of its own help."""
    import click

    from lutjax.cli._main import cli

    lines = [
        "# Command line",
        "",
        "What `--help` of each command says. `python -m lutjax` is the same command; it comes with the extra `apps`.",
        "",
    ]

    def add(command: click.Command, name: str, parent: click.Context | None) -> None:
        context = click.Context(
            command, info_name=name, parent=parent, terminal_width=100, max_content_width=100
        )
        path = context.command_path
        lines.extend([f"## {path}" if parent else f"## {name}", "", "```text"])
        lines.extend([command.get_help(context).rstrip(), "```", ""])
        if isinstance(command, click.Group):
            for inner in command.list_commands(context):
                found = command.get_command(context, inner)
                if found is not None and not found.hidden:
                    add(found, inner, context)

    add(cli, "lutjax", None)
    return "\n".join(lines)


GENERATED = (*TOPICS, "command-line")


def write(folder: Path = FOLDER) -> None:
    """Write all pages that are made; a page that is as it was keeps its time, so that only others are built again."""
    folder.mkdir(exist_ok=True)
    pages = {key: page_of(key) for key in TOPICS} | {"command-line": commands()}
    for key, text in pages.items():
        path = folder / f"{key}.md"
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
    for path in folder.glob("*.md"):
        if path.stem not in pages:
            path.unlink()
