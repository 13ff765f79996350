"""Layers of Flax Linen, made from their specifications."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike
from jaxtyping import Float, Int, Shaped, UInt32

from lutjax._typing import Array
from lutjax.layers import _memory, _spec, _tables
from lutjax.layers._copies import state_of
from lutjax.layers._declared import declare, on_host
from lutjax.layers._documentation import Library, document

_INPUTS, _IN_FEATURES = "inputs", "in_features"
"""Collection and name of the variable whose shape is the number of inputs."""

_LIBRARY = Library(
    argument="name: of the module.",
    note="In Flax Linen a trained variable is in the collection ``params``, and other variables are in collections of their own, which\n"
    "`apply` needs: see `lutjax.layers.linen`. All are drawn from the stream ``params``. Arguments are checked on first use.",
    example=""">>> import jax, jax.numpy as jnp{imports}
>>> from lutjax.layers.linen import {name}
>>> layer = {name}({arguments})
>>> variables = layer.init(jax.random.key(0), jnp.ones({inputs}))
>>> layer.apply(variables, jnp.ones({inputs})).shape
{outputs}""",
)


class Layer(nn.Module):
    """Base of layers, whose fields are the arguments of their spec."""

    spec_type: ClassVar[type[_spec.Spec]]

    @nn.nowrap
    def __getstate__(self) -> dict[str, Any]:
        """Return the fields for `pickle` and `copy.deepcopy`."""
        return state_of(self)

    def _options(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _spec.arguments(self.spec_type)}

    def _build(self, n_inputs: int | None = None) -> tuple[Any, tuple[_spec.Variable, ...]]:
        """Return the spec and its variables.

        Args:
          n_inputs: value of `in_features` where the field is None.
        """
        options, name = self._options(), type(self).__name__
        if options.get("in_features", 0) is None:
            if n_inputs is None:
                raise _spec.unknown_inputs(name)
            options["in_features"] = n_inputs
        return _spec.build(self.spec_type, options, name=name)

    def _n_inputs(self, x: Any) -> int | None:
        """Return the number of inputs that `init` found where `in_features` is None.

        The shapes of most variables do not depend on it. A variable of its own keeps it, so that an input of another size is an error.
        """
        found = _spec.n_inputs(type(self).__name__, self._options(), x)
        if found is None:
            return None
        if not (self.is_initializing() or self.has_variable(_INPUTS, _IN_FEATURES)):
            raise _spec.unknown_inputs(type(self).__name__)
        kept = self.variable(_INPUTS, _IN_FEATURES, lambda: jnp.zeros(found, bool)).value
        return int(kept.shape[0])

    def _bound(self, x: Any) -> tuple[Any, dict[str, jax.Array]]:
        """Return the spec and the arrays of its variables, which `init` makes.

        Args:
          x: the input of the call.
        """
        spec, variables = self._build(self._n_inputs(x))
        declare(self.path, variables)
        arrays: dict[str, jax.Array] = {}

        def array(v: _spec.Variable) -> Any:
            if v.collection == "params":
                return self.param(v.name, lambda key: v.make(lambda: key, arrays))
            if not (self.is_initializing() or self.has_variable(v.kind, v.name)):
                raise _spec.missing(spec.layer, v.name)
            return self.variable(
                v.kind, v.name, lambda: v.make(lambda: self.make_rng("params"), arrays)
            ).value

        for v in variables:
            arrays[v.name] = array(v)
        placement = getattr(self, "placement", None)
        return spec, {
            **spec.held(arrays),
            **on_host(placement, self.path, variables, making=self.is_initializing()),
        }

    def _spec_and_arrays(self, variables: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Return the spec of the layer, and the arrays of its own part of `variables`."""
        kept = variables.get(_INPUTS, {}).get(_IN_FEATURES)
        arrays = {name: array for kind in variables.values() for name, array in kind.items()}
        return self._build(None if kept is None else len(kept))[0], arrays

    def check(self, variables: Mapping[str, Any]) -> None:
        """Check variables, for example those of a checkpoint.

        Args:
          variables: the layer's own part of them: ``layer.check({"params": ..., "anchors": ...})``.

        Raises:
          ValueError: a variable has a wrong shape or holds an id that does not exist.
        """
        spec, arrays = self._spec_and_arrays(variables)
        spec.check(arrays)


def make_layer(spec_type: type[_spec.Spec], base: type[Layer], own: str = "") -> Any:
    """Return the class of a layer, whose fields are the arguments of its spec.

    Args:
      base: class with the call of the layer.
      own: documentation of the layer in Linen, see `document`.
    """
    fields: dict[str, Any] = {}
    annotations: dict[str, Any] = {}
    for p in _spec.parameters(spec_type, inferred=True):
        if p.kind is p.KEYWORD_ONLY:
            annotations.setdefault("_", dataclasses.KW_ONLY)
        annotations[p.name] = p.annotation
        if p.default is not p.empty:
            fields[p.name] = p.default
    namespace = {
        "__module__": __package__,
        "__doc__": document(spec_type, _LIBRARY, own),
        "__annotations__": annotations,
        "spec_type": spec_type,
        **fields,
    }
    return type(base)(_spec.layer_name(spec_type), (base,), namespace)


class Plain(Layer):
    """Base of layers whose calls take inputs alone."""

    @nn.compact
    def __call__(self, x: Shaped[Array, "..."]) -> Float[jax.Array, "..."]:
        """Return outputs ``[..., out_features]`` for inputs ``[..., in_features]``."""
        spec, arrays = self._bound(x)
        y: jax.Array = spec(arrays, x)
        return y


class Switched(Layer):
    """Base of layers whose calls are deterministic or not: hard or soft, without dropout or with it."""

    @nn.compact
    def __call__(
        self, x: Shaped[Array, "..."], *, deterministic: bool | None = None
    ) -> Float[jax.Array, "..."]:
        """Return outputs for inputs; `deterministic` takes precedence over the field."""
        return self._run(x, deterministic)

    def _run(self, x: Any, deterministic: bool | None, **options: Any) -> jax.Array:
        spec, arrays = self._bound(x)
        calm = spec.deterministic if deterministic is None else deterministic
        noise = {"key": self.make_rng(spec.stream)} if spec.random and not calm else {}
        y: jax.Array = spec(arrays, x, deterministic=calm, **noise, **options)
        return y


class Wired(Switched):
    """Base of layers of gates with wires."""

    @nn.compact
    def __call__(
        self,
        x: Shaped[Array, "..."],
        *,
        deterministic: bool | None = None,
        temperature: Float[Array, ""] | float | None = None,
    ) -> Float[jax.Array, "..."]:
        """Return outputs for inputs.

        Args:
          x: inputs.
          deterministic: whether to run the hard network; takes precedence over the field.
          temperature: in place of the field; it may be traced.
        """
        return self._run(x, deterministic, temperature=temperature)

    def truth_tables(self, variables: Mapping[str, Any]) -> tuple[jax.Array, jax.Array]:
        """Return the hard network for `lutjax.packed_lut`: wires ``[G, n]`` and bool tables ``[G, 2**n]``.

        Those of `LogicConv` are the trees of one window: ids below its number of values are values of the window, the next ones gates.

        Args:
          variables: the layer's own part of them.
        """
        spec, arrays = self._spec_and_arrays(variables)
        wires, tables = spec.truth_tables(arrays)
        return wires, tables

    def expected_needs(
        self, variables: Mapping[str, Any], temperature: Float[Array, ""] | float | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """Return for each gate the expected number of required inputs, and the probability that it requires any.

        See `lutjax.layers.nnx.LogicGates.expected_needs`.

        Args:
          variables: the layer's own part of them.
          temperature: in place of the field.
        """
        spec, arrays = self._spec_and_arrays(variables)
        inputs, any_input = spec.expected_needs(arrays, temperature)
        return inputs, any_input


class Convolution(Wired):
    """Base of `LogicConv`, whose hard trees also run on packed images."""

    def from_words(
        self, variables: Mapping[str, Any], words: UInt32[Array, "channels height width *batch"]
    ) -> UInt32[jax.Array, "..."]:
        """Return the bits of the hard trees, for 32 samples a word; see `lutjax.layers.nnx.LogicConv.from_words`."""
        spec, arrays = self._spec_and_arrays(variables)
        y: jax.Array = spec.from_words(arrays, words)
        return y


class Recurrent(Wired):
    """Base of `LogicRNN`, whose calls take a state."""

    @nn.compact
    def __call__(
        self,
        x: Shaped[Array, "..."],
        *,
        state: Shaped[Array, "..."] | None = None,
        deterministic: bool | None = None,
        temperature: Float[Array, ""] | float | None = None,
    ) -> Float[jax.Array, "..."]:
        """Return the states after each step, ``[..., length, out_features]``; see `lutjax.layers.nnx.LogicRNN`."""
        return self._run(x, deterministic, temperature=temperature, state=state)

    def from_words(
        self,
        variables: Mapping[str, Any],
        words: UInt32[Array, "inputs length *batch"],
        state: UInt32[Array, "outputs *batch"] | None = None,
    ) -> UInt32[jax.Array, "outputs length *batch"]:
        """Return the states of the hard network, for 32 sequences a word; see `lutjax.layers.nnx.LogicRNN.from_words`."""
        spec, arrays = self._spec_and_arrays(variables)
        y: jax.Array = spec.from_words(arrays, words, state)
        return y


class Attention(Layer):
    """Base of the two kinds of attention: the call and the cache."""

    __call__ = _tables.attention_call

    @nn.compact
    def _attend(self, x: Any, decode: bool | None, **others: Any) -> Any:
        spec, arrays = self._bound(x)
        if not (spec.decode if decode is None else decode):
            return spec(arrays, x, **others)
        empty = spec.empty_cache(x.shape, x.dtype)
        cache = {
            name: self.variable("cache", name, lambda value: value, value) for name, value in empty.items()
        }
        y, latest = spec.attend_with_cache(arrays, {n: v.value for n, v in cache.items()}, x, **others)
        if not self.is_initializing():  # which leaves the cache empty
            for name, value in latest.items():
                cache[name].value = value
        return y


class Memory(Layer):
    """Base of `NgramMemory`, whose calls take token ids."""

    __call__ = _memory.memory_call

    @nn.compact
    def _remember(self, x: Any, tokens: Any, **others: Any) -> Any:
        spec, arrays = self._bound(x)
        return spec(arrays, x, tokens, **others)

    def row_ids(self, tokens: Int[Array, "*batch length"], segments: Any = None) -> Any:
        """Return the rows that tokens read, ``[..., length, tables]``, from ids alone; see `lutjax.ngram_rows`."""
        return self._build()[0].row_ids(tokens, segments)

    def history(self, batch_shape: tuple[int, ...], dtype: DTypeLike | None = None) -> _memory.History:
        """Return the state before the first token of texts; see `lutjax.layers.nnx.NgramMemory.history`."""
        found: _memory.History = self._build()[0].history(batch_shape, dtype)
        return found


class Keyed(Plain):
    """Base of layers whose rows are addressed by products of keys."""

    def reads(
        self, variables: Mapping[str, Any], x: Float[Array, "*batch inputs"]
    ) -> tuple[Int[jax.Array, "*batch reads"], Float[jax.Array, "*batch reads"]]:
        """Return the row ids of inputs, those of each head one after the other, and their weights.

        Args:
          variables: the layer's own part of them.
          x: inputs.
        """
        spec, arrays = self._spec_and_arrays(variables)
        found: tuple[jax.Array, jax.Array] = spec.reads(arrays, x)
        return found
