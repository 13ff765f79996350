"""Models as exported programs (StableHLO), which JAX runs without lutjax.

`jax.export` writes them next to the bundle, for any batch size and text length.
"""

import dataclasses
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.export
import jax.numpy as jnp

import lutjax
from lutjax.bundles import _modules
from lutjax.bundles._layout import name_of
from lutjax.bundles.errors import BundleError
from lutjax.bundles.saving import save
from lutjax.extras import require_optional
from lutjax.files.atomic import digest_of, write_atomically
from lutjax.models import LogicCA, LogicClassifier, LogicTreeNet, LUTTransformer
from lutjax.models._decoder import Decoder, feed_tokens
from lutjax.training.classifier import shape_of

with require_optional(__name__):
    import flatbuffers  # type: ignore[import-untyped] # noqa: F401 (jax.export writes with it)
    from flax import nnx

PLATFORMS = ("cpu", "cuda", "tpu")
"""Target platforms; each program supports all of them."""

ABOUT = "programs.json"
"""File that describes the inputs and outputs of the programs."""

ENDING = ".jax"

Arrays = Mapping[str, Any]
State = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Program:
    """A function to be exported.

    Attributes:
      says: description of the computation.
      function: takes weights by tensor name, and further arrays.
      arguments: shapes and dtypes of the further arrays, by name; a state is a dict of arrays.
      returns: names of the outputs.
      differentiable: whether its gradient is exported as well.
    """

    says: str
    function: Callable[..., Any]
    arguments: Mapping[str, Any]
    returns: tuple[str, ...]
    differentiable: bool = False


def write(
    model: Any,
    folder: str | os.PathLike[str],
    *,
    platforms: tuple[str, ...] = PLATFORMS,
    progress: Callable[[str], None] = lambda text: None,
) -> list[Path]:
    """Export a lutjax model as programs into a folder, with its bundle; return the program paths.

    A language model becomes ``forward``, ``loss``, ``start`` and ``decode``, a classifier
    ``forward`` and ``loss``, an automaton ``forward``. The first argument of each is a dict with
    the bundle's tensor values by name. ``programs.json`` describes the other arguments and the
    outputs.

    Args:
      model: a model from `lutjax.models`.
      folder: as for `lutjax.save`.
      platforms: platform names of `jax.export`. A program supports all of them at once.
      progress: called with a description of the next step.

    Raises:
      BundleError: the model is of another kind, or the folder cannot be written; see `lutjax.save`.

    Source: docs/programs.md, section 1.

    Example:
      >>> import jax, jax.numpy as jnp, lutjax, tempfile
      >>> from flax import nnx
      >>> from lutjax.bundles import programs
      >>> from lutjax.models import LogicClassifier, LogicClassifierConfig
      >>> config = LogicClassifierConfig(in_features=4, n_classes=2, layers=(8,), n_thresholds=2)
      >>> folder = tempfile.mkdtemp()
      >>> paths = programs.write(LogicClassifier(config, rngs=nnx.Rngs(0)), folder)
      >>> forward = jax.export.deserialize(bytearray(paths[0].read_bytes()))
      >>> weights = lutjax.bundles.read(folder)
      >>> weights = {name: jnp.asarray(weights.values(name)) for name in weights.tensors}
      >>> forward.call(weights, jnp.ones((3, 4))).shape
      (3, 2)
    """
    programs = programs_of(model)
    place = Path(folder)
    save(model, place)
    # Arrays are arguments, not constants: one copy of them serves all programs.
    weights, _ = _modules.functional(model)
    shapes = {
        name: jax.ShapeDtypeStruct(array.shape, array.dtype) for name, array in weights.items()
    }
    written, about = [], {}
    for name, program in programs.items():
        progress(f"exporting {name}")
        with lutjax.use_implementation("xla"):  # other kernels are calls into lutjax
            export = jax.export.export(jax.jit(program.function), platforms=platforms)
            exported = export(shapes, *program.arguments.values())
        path = place / f"{name}{ENDING}"
        with write_atomically(path) as unfinished:
            unfinished.write_bytes(exported.serialize(vjp_order=1 if program.differentiable else 0))
        written.append(path)
        outputs = jax.tree.unflatten(exported.out_tree, exported.out_avals)
        results = outputs if len(program.returns) > 1 else (outputs,)
        about[name] = {
            "file": path.name,
            "sha256": digest_of(path),
            "computes": program.says,
            "arguments": {
                "weights": "tensors of model.safetensors by name",
                **_describe_arrays(program.arguments),
            },
            "returns": _describe_arrays(dict(zip(program.returns, results, strict=True))),
            "differentiable": program.differentiable,
        }
    facts = {
        "jax": jax.__version__,
        "lutjax": lutjax.__version__,
        "platforms": list(platforms),
        "programs": about,
    }
    with write_atomically(place / ABOUT) as unfinished:
        unfinished.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    return written


def programs_of(model: Any) -> dict[str, Program]:
    """Return the programs of a lutjax model, by name."""
    if isinstance(model, Decoder):
        return _decoder_programs(model)
    if isinstance(model, LogicClassifier | LogicTreeNet):
        return _classifier_programs(model)
    if isinstance(model, LogicCA):
        return _automaton_programs(model)
    raise BundleError(
        f"a {type(model).__name__} is no model of lutjax.models, "
        "of whose programs is known what they take: export its call by jax.export."
    )


def _decoder_programs(model: Decoder) -> dict[str, Program]:
    context, vocab = model.config.context, model.config.vocab_size
    _, merge_module = _modules.functional(model)

    def forward(weights: Arrays, tokens: jax.Array) -> jax.Array:
        length, model = tokens.shape[1], merge_module(weights)
        if isinstance(model, LUTTransformer):
            # Its pairs are divided into tiles of fixed size. Padding after a token does not affect
            # its logits.
            tokens = jnp.pad(tokens, ((0, 0), (0, context - length)))
        logits: jax.Array = model(tokens, deterministic=True)[:, :length]
        return logits

    def loss(weights: Arrays, tokens: jax.Array, targets: jax.Array) -> jax.Array:
        return _cross_entropy(forward(weights, tokens), targets)

    def split(weights: Arrays, n_texts: Any) -> tuple[Any, Any, Any]:
        model = merge_module(weights)
        model.init_cache((n_texts,))
        parts: Any = nnx.split(model, nnx.Cache, ...)
        graph, cache, others = parts
        return graph, cache, others

    def decode(weights: Arrays, state: Arrays, tokens: jax.Array) -> tuple[State, jax.Array]:
        graph, cache, others = split(weights, tokens.shape[0])
        restored = [
            (path, v.replace(state[name_of(_modules.keys(path))]))
            for path, v in nnx.to_flat_state(cache)
        ]
        new, logits = feed_tokens(graph, nnx.from_flat_state(restored), others, tokens[:, None])
        return _name_arrays(new), logits

    def start(weights: Arrays, tokens: jax.Array) -> tuple[State, jax.Array]:
        _, cache, _ = split(weights, tokens.shape[0])

        def step(
            carry: tuple[State, jax.Array], token: jax.Array
        ) -> tuple[tuple[State, jax.Array], None]:
            state, logits = decode(weights, carry[0], token)
            return (state, logits.astype(carry[1].dtype)), None

        token = jax.ShapeDtypeStruct((1, 1), jnp.int32)
        dtype = jax.eval_shape(forward, weights, token).dtype
        logits = jnp.zeros((tokens.shape[0], vocab), dtype)
        return jax.lax.scan(step, (_name_arrays(cache), logits), tokens.T)[0]

    # Symbolic sizes: one program serves all batches and lengths.
    batch, length = jax.export.symbolic_shape("batch, length", constraints=[f"length <= {context}"])
    any_batch, any_length = jax.export.symbolic_shape("batch, length")
    texts = jax.ShapeDtypeStruct((batch, length), jnp.int32)
    prompts = jax.ShapeDtypeStruct((any_batch, any_length), jnp.int32)
    last = jax.ShapeDtypeStruct((any_batch,), jnp.int32)
    weights, _ = _modules.functional(model)
    state = jax.eval_shape(lambda weights: _name_arrays(split(weights, any_batch)[1]), weights)
    return {
        "forward": Program(
            f"logits of the token after each, of texts of up to {context} tokens",
            forward,
            {"tokens": texts},
            ("logits",),
        ),
        "loss": Program(
            "mean loss over all tokens of texts, in nats, without dropout",
            loss,
            {"tokens": texts, "targets": texts},
            ("loss",),
            differentiable=True,
        ),
        "start": Program(
            "state after prompts of any length, and logits of the token after each",
            start,
            {"tokens": prompts},
            ("state", "logits"),
        ),
        "decode": Program(
            "state after one token more of each text, and logits of the one after it",
            decode,
            {"state": state, "tokens": last},
            ("state", "logits"),
        ),
    }


def _name_arrays(cache: Any) -> dict[str, Any]:
    return {name_of(_modules.keys(path)): v.get_value() for path, v in nnx.to_flat_state(cache)}


def _classifier_programs(model: LogicClassifier | LogicTreeNet) -> dict[str, Program]:
    _, merge_module = _modules.functional(model)
    regression = isinstance(model, LogicClassifier) and model.config.regression

    def forward(weights: Arrays, x: jax.Array) -> jax.Array:
        logits: jax.Array = merge_module(weights)(x, deterministic=True)
        return logits

    def loss(weights: Arrays, x: jax.Array, labels: jax.Array) -> jax.Array:
        outputs = merge_module(weights)(x, deterministic=False)
        if regression:
            return jnp.mean((outputs - labels) ** 2)
        return _cross_entropy(outputs, labels)

    (batch,) = jax.export.symbolic_shape("batch")
    x = jax.ShapeDtypeStruct((batch, *shape_of(model.config)), jnp.float32)
    programs = {
        "forward": Program(
            "numbers of the hard network"
            if regression
            else "votes of the hard network for each class, over tau",
            forward,
            {"x": x},
            ("numbers" if regression else "logits",),
        )
    }
    # Noise would need a random key among the arguments, so such models have no loss.
    if not any(isinstance(v, nnx.RngState) for _, v in nnx.to_flat_state(nnx.state(model))):
        labels = jax.ShapeDtypeStruct((batch,), jnp.float32 if regression else jnp.int32)
        programs["loss"] = Program(
            "mean squared error of the soft network"
            if regression
            else "mean loss of the soft network, in nats",
            loss,
            {"x": x, "labels": labels},
            ("loss",),
            differentiable=True,
        )
    return programs


def _automaton_programs(model: LogicCA) -> dict[str, Program]:
    _, merge_module = _modules.functional(model)
    asynchronous = model.config.update_rate < 1

    def forward(weights: Arrays, state: jax.Array, key: jax.Array | None = None) -> jax.Array:
        keys = None if key is None else jax.random.wrap_key_data(key)
        model = merge_module(weights)
        # Words of 32 cells need fixed sizes, so the soft automaton runs, with one gate in each
        # mixture.
        chosen = jnp.arange(16, dtype=jnp.int32)[:, None] == model.gates()[None]
        # Minus infinity gives the other gates the weight 0, exactly.
        model.logits = jnp.where(chosen, 0.0, -jnp.inf).astype(model.logits[...].dtype)
        after: jax.Array = model(state.astype(jnp.float32), 1, key=keys) > 0.5
        return after

    sizes = jax.export.symbolic_shape("batch, height, width")
    state = jax.ShapeDtypeStruct((*sizes, model.config.channels), jnp.bool_)
    key = {"key": jax.ShapeDtypeStruct((2,), jnp.uint32)} if asynchronous else {}
    says = "state of the hard automaton after a step"
    return {"forward": Program(says, forward, {"state": state, **key}, ("state",))}


def _cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    log_probabilities = jax.nn.log_softmax(logits.astype(jnp.float32))
    return -jnp.take_along_axis(log_probabilities, labels[..., None], -1).mean()


def _describe_arrays(arrays: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: _describe_arrays(array)
        if isinstance(array, Mapping)
        else f"{jnp.dtype(array.dtype)}[{', '.join(map(str, array.shape))}]"
        for name, array in arrays.items()
    }
