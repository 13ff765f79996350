"""Differentiable logic layers for all libraries: variables, estimators and forward pass."""

import copy
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Int, UInt32

import lutjax
from lutjax import _compat, _meshes, wiring
from lutjax._typing import Array
from lutjax.arguments import require_array
from lutjax.dispatch.registry import Implementation
from lutjax.layers import _choices
from lutjax.layers._spec import (
    Arrays,
    Example,
    Initializer,
    Inputs,
    LayerCall,
    Mode,
    Op,
    Outputs,
    Scalar,
    Spec,
    Variable,
    names_layer,
    plain_call,
    switched_call,
)
from lutjax.layers.initializers import Normal, residual_gates, residual_table
from lutjax.names import ESTIMATORS, PARAMETERIZATIONS as PARAMETERIZATIONS
from lutjax.ops._checks import MAX_WIRES, accumulation
from lutjax.values._derivatives import FORWARD_MODE, reverse_only, with_derivative_of
from lutjax.values._dtypes import accumulator
from lutjax.values._fixed_point import nan_where_apart
from lutjax.values._wires import check_wires
from lutjax.wiring._gates import sample_balanced
from lutjax.wiring._names import EVEN, Wiring, sample_wires

INT32 = jnp.dtype("int32")
S = TypeVar("S", bound="_LogicSpec")
CHOSEN = ("top-k", "full")  # a soft layer with these wirings reads one wire per gate input
_WITH_CANDIDATES = ("top-k", "learnable")
GRADIENTS = ("straight_through", "soft")

# Ids of gates without inputs (false, true), and with one (a, b, not b, not a).
_CONSTANTS, _OF_ONE_INPUT = np.array([0, 15]), np.array([3, 5, 10, 12])

# A reader list is as wide as the largest fan-out. If this is far above the average, the list would
# be mostly empty, so the gradient is scattered instead.
_MOST_READ = 8

RESIDUAL = residual_gates()
GAUSSIAN = Normal(1.0)


def uniform_table(key: Any, shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.Array:
    return jax.random.uniform(key, shape, dtype, -1, 1)


def _clip_values(layer: str, values: jax.Array) -> jax.Array:
    """Clip values to [-1, 1]. At the ends, only gradients pointing inward pass."""
    refusal = f"{layer}: a table has gradients and {FORWARD_MODE}; use jax.grad or jax.vjp."
    return _clip_inward(reverse_only(values, refusal))


@jax.custom_vjp
def _clip_inward(values: jax.Array) -> jax.Array:
    return jnp.clip(values, -1, 1)


def _clipped_backward(values: jax.Array, cotangent: jax.Array) -> tuple[jax.Array]:
    # A gradient that points inward must pass, or a value at an end would stay there.
    outward = jnp.where(cotangent < 0, values >= 1, values <= -1)
    return (jnp.where(outward, 0, cotangent),)


_clip_inward.defvjp(lambda values: (_clip_inward(values), values), _clipped_backward)


def truth_of(gates: Int[Array, " gates"]) -> jax.Array:
    """Return truth tables for gate ids, for `lutjax.packed_lut`: bool ``[gates, 4]``."""
    # Bit 3 of a gate id is its output for ab = 00, bit 2 for 01; in an address a is the lowest bit.
    return (jnp.asarray(gates)[:, None] >> jnp.asarray([[3, 1, 2, 0]])) & 1 == 1


def _split(key: Any) -> Any:
    return (None, None) if key is None else jax.random.split(key)


def _one_hot(scores: jax.Array) -> jax.Array:
    return jax.nn.one_hot(jnp.argmax(scores, -1), scores.shape[-1], dtype=scores.dtype)


def _gates_of_pairs(shares: jax.Array, wires: Array) -> tuple[jax.Array, jax.Array]:
    """Return gates that each mix two candidates, with wire pairs and coefficients ``[4, gates]``.

    The shares of two candidates are the coefficients in ``c1 a + c2 b``; the gate kernels mix them.
    """

    def gates(shares: jax.Array, wires: jax.Array) -> tuple[jax.Array, jax.Array]:
        zero = jnp.zeros((shares.size // 2,), shares.dtype)
        a, b = shares.reshape(-1, 2).T
        return jnp.stack([zero, a, b, zero]), wires.reshape(-1, 2)

    # Pairs of a gate are adjacent, so a device has both candidates of its pairs.
    def specs(*arrays: jax.Array) -> tuple[PartitionSpec, PartitionSpec]:
        of_shares, of_wires = (_meshes.spec_of(a)[0] for a in arrays)
        return PartitionSpec(None, of_shares), PartitionSpec(of_wires)

    return _meshes.shard_by_compiler(gates, specs)(shares, wires)


def _sums_of_groups(x: jax.Array, k: int, feature_axis: int) -> jax.Array:
    size = x.shape[feature_axis] // k

    def sums(x: jax.Array) -> jax.Array:
        if feature_axis:
            return x.reshape(*x.shape[:-1], k, size).sum(-1)
        return x.reshape(k, size, *x.shape[1:]).sum(1)

    # The group axis may need other sharding than the feature axis.
    def spec(x: jax.Array) -> Any:
        axes = _meshes.spec_of(x)
        return PartitionSpec(*axes[:-1]) if feature_axis else PartitionSpec(None, *axes[1:])

    return _meshes.shard_by_compiler(sums, spec)(x)


def _with_whole(x: Array, axis: int) -> PartitionSpec:
    """Return the partition over explicit mesh axes, with one array axis unsharded."""
    places = list(_meshes.spec_of(x))
    places[axis] = None
    return PartitionSpec(*places)


def _checked_features(spec: Any, x: Any, size: int) -> Any:
    """Return inputs with the right size as floats: ops accept any number of inputs."""
    x = spec._bits(x)
    require_array(spec.layer, "x", x)
    if not x.ndim or x.shape[spec.feature_axis] != size:
        expected = f"[..., {size}]" if spec.feature_axis else f"[{size}, ...]"
        raise ValueError(f"{spec.layer}: x has shape {list(x.shape)}; expected {expected}.")
    return spec._cast(x)


def wired_call(
    self: Any, x: Inputs, *, deterministic: Mode = None, temperature: Scalar = None
) -> Outputs:
    """Return outputs for inputs; other arguments take precedence over the layer's own."""
    y: jax.Array = self._run(x, deterministic, temperature=temperature)
    return y


def recurrent_call(
    self: Any,
    x: Inputs,
    *,
    state: Inputs | None = None,
    deterministic: Mode = None,
    temperature: Scalar = None,
) -> Outputs:
    """Return the states after each step; the state before the first step is 0 by default."""
    y: jax.Array = self._run(x, deterministic, temperature=temperature, state=state)
    return y


@dataclasses.dataclass(unsafe_hash=True)
class _LogicSpec(Spec):
    """Base spec with wires and estimators; `wires_fan_out` is the largest explicit fan-out."""

    _: dataclasses.KW_ONLY
    estimator: str = "soft"
    temperature: float | int = 1.0
    feature_axis: int = -1
    dtype: DTypeLike | None = None
    param_dtype: DTypeLike = jnp.float32
    implementation: Implementation = None
    wires: Any = None
    deterministic: bool = False

    wires_fan_out: int | None = None

    given: ClassVar[tuple[str, ...]] = ("wires",)
    implied: ClassVar[tuple[str, ...]] = ("wires_fan_out",)
    sizes: ClassVar[tuple[str, ...]] = ()
    estimators: ClassVar[tuple[str, ...]] = ESTIMATORS
    call: ClassVar[Callable[..., Any]] = wired_call

    def __post_init__(self) -> None:
        self._require_sizes(1, *self.sizes)
        self._require_one_of("estimator", self.estimators)
        self._require_one_of("feature_axis", (-1, 0))
        self._require_positive("temperature")
        self._normalize_dtypes()
        self._check_sizes()

    def _check_sizes(self) -> None:
        """Check the arguments added by a subclass."""

    @classmethod
    def infer_fields(cls, explicit: Arrays) -> dict[str, Any]:
        if "wires" not in explicit:
            return {}
        ids = np.asarray(explicit["wires"])
        return {"wires_fan_out": int(np.unique(ids, return_counts=True)[1].max(initial=0))}

    @property
    def random(self) -> bool:
        return self.estimator == "gumbel"

    def with_temperature(self: S, temperature: Any) -> S:
        """Return the spec at another temperature, maybe a traced scalar; None keeps its own."""
        if temperature is None:
            return self
        if isinstance(temperature, int | float):
            return dataclasses.replace(self, temperature=temperature)
        if np.shape(temperature):
            raise self._error(
                f"temperature has shape {list(np.shape(temperature))}; expected one number."
            )
        self._check_other_temperature()
        # No further checks: a traced value cannot be compared.
        spec = copy.copy(self)
        spec.temperature = temperature
        return spec

    def _check_other_temperature(self) -> None:
        """Check that a call may override the temperature."""

    def _estimate(
        self,
        logits: jax.Array,
        key: Any,
        noise: Op,
        soft: Op,
        hard: Op,
        estimator: str | None = None,
    ) -> jax.Array:
        estimator = self.estimator if estimator is None else estimator
        relaxed = soft(self._scale_logits(logits, key, noise, estimator))
        if estimator == "straight_through":
            return with_derivative_of(hard(logits), relaxed)
        return relaxed

    def _scale_logits(self, logits: jax.Array, key: Any, noise: Op, estimator: str) -> jax.Array:
        if estimator == "gumbel":
            if key is None:
                raise self._error("estimator is 'gumbel'; pass rngs, or deterministic=True.")
            logits = logits + noise(key, logits.shape, logits.dtype)
        return logits / jnp.asarray(self.temperature, logits.dtype)

    def _wires(
        self, n_inputs: int, shape: tuple[int, ...], fan_out: int | None, draw: Callable[[Any], Any]
    ) -> tuple[Variable, ...]:
        """Return wire variables, with readers unless the list would be mostly empty."""
        wires = Variable("wires", "wires", shape, INT32, draw)
        balanced = -(-math.prod(shape) // n_inputs)
        fan_out = balanced if fan_out is None else fan_out
        if fan_out > _MOST_READ * balanced:
            return (wires,)

        def derive(arrays: Arrays) -> jax.Array:
            return lutjax.readers(*self._reader_wires(arrays["wires"]), fan_out=fan_out)

        readers = Variable("readers", "wires", (n_inputs, fan_out), INT32, lambda key: None, derive)
        return (wires, readers)

    def follow(self, name: str, arrays: Arrays) -> dict[str, Any]:
        if name != "wires" or "readers" not in arrays:
            return {}
        return {"readers": lutjax.readers(*self._reader_wires(arrays["wires"]))}

    def _reader_wires(self, wires: Any) -> tuple[Any, int]:
        """Return the wires ``[gates, inputs]`` inverted by `readers`, and their id range."""
        return wires.reshape(-1, wires.shape[-1]), self._n_readable

    @property
    def _n_readable(self) -> int:
        raise NotImplementedError

    def _check_shape(self, variable: Variable, array: Any) -> None:
        # Wires in a checkpoint may have another fan-out.
        if variable.name != "readers":
            super()._check_shape(variable, array)

    def _check_values(self, variable: Variable, arrays: Arrays) -> None:
        ids = np.asarray(arrays[variable.name])
        if variable.name == "wires":
            check_wires(ids.reshape(len(ids), -1), self._n_readable, where=self.layer)
        elif variable.name == "readers" and "wires" in arrays:
            expected = lutjax.readers(*self._reader_wires(np.asarray(arrays["wires"])))
            n_listed, width = expected.shape
            fits = ids.ndim == 2 and len(ids) == n_listed and ids.shape[1] >= width
            same = fits and np.array_equal(ids[:, :width], expected)
            if not same or not (ids[:, width:] == -1).all():
                raise self._error(
                    "readers is not the list of who reads each input through wires; "
                    "set it to lutjax.readers(wires, inputs) when wires are replaced."
                )

    @property
    def _options(self) -> dict[str, Any]:
        return {"feature_axis": self.feature_axis, "implementation": self.implementation}


@dataclasses.dataclass(unsafe_hash=True)
class WiredSpec(_LogicSpec):
    """Base spec for gates or tables over a vector.

    Trained scores choose among the candidates of learned wirings (`CHOSEN`), or mix them.
    """

    in_features: int
    out_features: int
    _: dataclasses.KW_ONLY
    wiring: str | Wiring = "balanced"
    candidates: int = 8
    scores_init: Initializer = GAUSSIAN
    accumulate: lutjax.FixedPoint | None = None

    sizes: ClassVar[tuple[str, ...]] = ("in_features", "out_features")
    methods: ClassVar[tuple[str, ...]] = ("truth_tables", "expected_needs")
    _trained_tables: ClassVar[Callable[..., Variable]]
    relax_tables: ClassVar[Op]  # estimator or hard tables in the op's format
    _truth: ClassVar[Op]  # hard tables as bools

    @property
    def arity(self) -> int:
        raise NotImplementedError

    def _check_sizes(self) -> None:
        accumulation(self.layer, self.accumulate)
        if self.accumulate is not None and self.wiring in wiring.LEARNED:
            raise self._error(
                f"accumulate is {self.accumulate} and wiring is {self.wiring!r}, "
                "whose scores are judged by sums of floats; "
                "use a wiring that is drawn, or leave accumulate out."
            )
        if self.wiring in ("windows", "groups"):
            cure = {
                "windows": "lutjax.wiring.Windows(image_shape)",
                "groups": "lutjax.wiring.Groups(n)",
            }
            raise self._error(
                f"wiring is {self.wiring!r}, which needs sizes: use {cure[str(self.wiring)]}."
            )
        if not callable(self.wiring):
            self._require_one_of("wiring", (*wiring.FIXED, *wiring.LEARNED))
        if self.wiring == "unique" and self.arity != 2:
            raise self._error(
                f"wiring is 'unique', but n_inputs is {self.arity}, not 2; use 'balanced'."
            )
        if self.wiring in _WITH_CANDIDATES:
            self._require_sizes(2, "candidates")
        if self.wiring == "learnable" and self.candidates % 2:
            raise self._error(f"candidates is {self.candidates}; it must be even.")
        if self.wiring == "full" and self.wires_fan_out is not None:
            raise self._error("wiring is 'full', but wires are given; use 'top-k' for candidates.")

    @property
    def _options(self) -> dict[str, Any]:
        sums = {} if self.accumulate is None else {"accumulate": self.accumulate}
        return {**super()._options, **sums}

    def variables(self) -> tuple[Variable, ...]:
        shape: tuple[int, ...] = (self.out_features, self.arity)
        trained: tuple[Variable, ...] = (self._trained_tables(),)
        if self.wiring in wiring.LEARNED:
            shape = (*shape, self._n_readable if self.wiring == "full" else self.candidates)
            trained = (self._trained_variable("scores", shape, self.scores_init), *trained)
        if self.wiring == "full":
            return trained

        draw = functools.partial(self._drawn_wires, shape=shape)
        # Scores change the wires in each step, and other wirings do not bound the fan-out of an
        # input.
        if self.wiring in CHOSEN or not (self.wiring in EVEN or self.wires_fan_out):
            return Variable("wires", "wires", shape, INT32, draw), *trained
        return (*self._wires(self._n_readable, shape, self.wires_fan_out, draw), *trained)

    @names_layer
    def _drawn_wires(self, key: Any, shape: tuple[int, ...]) -> jax.Array:
        if self.wiring in wiring.LEARNED:
            # A gate selects one of its candidates per input, so candidates of two inputs may repeat.
            sample = wiring.balanced if self.arity > self._n_readable else sample_balanced
            wires = sample(key, self._n_readable, self.out_features, math.prod(shape[1:]))
            return wires.reshape(shape)
        return sample_wires(self.wiring, key, self._n_readable, self.out_features, self.arity)

    @property
    def _n_readable(self) -> int:
        return self.in_features

    def sizes_of(self, arrays: Arrays) -> dict[str, Any]:
        sizes = {"out_features": np.shape(arrays[self._trained_tables().name])[0]}
        if self.wiring in _WITH_CANDIDATES and np.ndim(arrays["wires"]) == 3:
            sizes["candidates"] = np.shape(arrays["wires"])[2]
        return sizes

    @names_layer
    def run(self, op: Op, x: Any, **options: Any) -> jax.Array:
        x, apply, _ = self._bind(op, x, **options)
        return apply(x)

    def _bind(
        self, op: Op, x: Any, *, deterministic: bool = False, key: Any = None,
        temperature: Any = None, tables: Any = None, **arrays: Any,
    ) -> tuple[Any, Callable[[Any], jax.Array], Any]:  # fmt: skip
        """Return checked inputs, a function that runs the op on them, and all arrays it reads."""
        # Tables and scores need keys of their own: they are sampled independently.
        spec, (table_key, scores_key) = self.with_temperature(temperature), _split(key)
        x = _checked_features(spec, x, spec.in_features)
        if tables is None:
            tables = spec.relax_tables(arrays, deterministic, table_key)

        def apply(x: Any) -> jax.Array:
            if spec.wiring in CHOSEN:
                return spec._run_chosen(op, arrays, x, tables, deterministic, scores_key)
            x, wires, readers = spec._read(arrays, x, deterministic, scores_key)
            return spec._apply(op, x, tables, wires, readers, deterministic)

        return x, apply, (arrays, tables)

    def _apply(
        self, op: Op, x: Any, tables: Any, wires: Any, readers: Any, deterministic: bool
    ) -> jax.Array:
        return op(x, tables, wires, readers=readers, **self._options)

    def _read(self, arrays: Arrays, x: Any, deterministic: bool, key: Any) -> tuple[Any, Any, Any]:
        wires, readers = arrays["wires"], arrays.get("readers")
        if self.wiring != "learnable":
            return x, wires, readers
        if deterministic:
            return x, self._chosen_wires(arrays), None
        shares = self._estimate(
            arrays["scores"], key, jax.random.gumbel, jax.nn.softmax, _one_hot,
            self.scores_estimator,
        )  # fmt: skip
        mixtures, ends = _gates_of_pairs(shares, wires)
        # Each gate input is a sum over pairs of candidates, so the gate kernels compute the
        # mixture.
        pairs = lutjax.bilinear_gates(x, mixtures, ends, readers=readers, **self._options)
        slots = self.out_features * self.arity
        x = _sums_of_groups(pairs, slots, self.feature_axis)
        # Mixed inputs are read in order, each by one gate input.
        places = jnp.arange(slots, dtype=jnp.int32)
        return x, places.reshape(-1, self.arity), places[:, None]

    def _run_chosen(
        self, op: Op, arrays: Arrays, x: Any, tables: Any, deterministic: bool, scores_key: Any
    ) -> jax.Array:
        """Run the op on the best wires; in training with a gradient for all scores."""
        scores = arrays["scores"]
        if not deterministic:
            scores = jnp.asarray(scores) / jnp.asarray(self.temperature, scores.dtype)
            # Without a key, the table estimate raises the error.
            if self.estimator == "gumbel" and scores_key is not None:
                scores = scores + jax.random.gumbel(scores_key, scores.shape, scores.dtype)
        # XLA would recompute the choice for every sample.
        wires = jax.lax.optimization_barrier(self._chosen_wires({**arrays, "scores": scores}))
        y = self._apply(op, x, tables, wires, None, deterministic)
        if deterministic:
            return y
        inputs = scores, x, wires, arrays.get("wires"), tables
        return _choices.add_score_gradients(
            y, *inputs, slopes=self._slopes, feature_axis=self.feature_axis
        )

    def _slopes(self, tables: Any, inputs: list[jax.Array], dy: jax.Array) -> Sequence[jax.Array]:
        """Return the cotangents of each gate input, given gate inputs: ``[G, B]`` each."""
        arity, n_gates = len(inputs), len(dy)
        # Each gate reads inputs of its own, so that the gradient of an input belongs to one gate.
        wires = jnp.arange(n_gates * arity, dtype=jnp.int32).reshape(arity, n_gates).T
        readers = jnp.argsort(wires.reshape(-1))[:, None].astype(INT32)

        def op(*inputs: jax.Array) -> jax.Array:
            options = {"readers": readers, "feature_axis": 0, "implementation": self.implementation}
            return self.op(jnp.concatenate(inputs), tables, wires, **options)

        slopes: Sequence[jax.Array] = jax.vjp(op, *inputs)[1](dy)
        return slopes

    def _chosen_wires(self, arrays: Arrays) -> jax.Array:
        best = jnp.argmax(arrays["scores"], -1).astype(INT32)
        if self.wiring == "full":
            return best
        return jnp.take_along_axis(jnp.asarray(arrays["wires"]), best[..., None], -1)[..., 0]

    @property
    def scores_estimator(self) -> str:
        return self.estimator

    @names_layer
    def truth_tables(self, arrays: Arrays) -> tuple[jax.Array, jax.Array]:
        """Return the hard network for `packed_lut`: wires ``[G, n]`` and tables ``[G, 2**n]``."""
        learned = self.wiring in wiring.LEARNED
        wires = self._chosen_wires(arrays) if learned else jnp.asarray(arrays["wires"])
        return wires, self._truth(arrays)

    @names_layer
    def expected_needs(
        self, arrays: Arrays, temperature: Any = None
    ) -> tuple[jax.Array, jax.Array]:
        """Return the expected number of needed inputs, and the probability of any, ``[G]`` each.

        Tables are random with their training probabilities. A table that needs n inputs takes
        ``n - 1`` gates with two inputs or more; circuits omit constants, buffers and inverters.
        """
        raise NotImplementedError


@dataclasses.dataclass(unsafe_hash=True)
class LogicGatesSpec(WiredSpec):
    """Differentiable two-input logic gates, each a mixture of all sixteen: `lutjax.logic_gates`.

    With ``deterministic=True`` every gate is the one with the largest logit: bits in, bits out.

    Variables:
      logits: trained, ``[out_features, 16]``.
      wires: int32 input ids ``[out_features, 2]``; candidates ``[out_features, 2, candidates]``.
      readers: int32 ``[in_features, fan-out]``: inverse wires, if the fan-out is known and even.
      scores: trained, one for each candidate or input; only with learned wires.

    Args:
      in_features, out_features: number of inputs, from 0 to 1 or bits, and of gates.
      wiring: fixed gate inputs: ``"balanced"``, ``"unique"``, ``"butterfly"``, ``"random"``, or a
        function such as `lutjax.wiring.Windows`. Learned by trained scores: ``"top-k"`` and
        ``"full"``, with one wire per gate input, ``"learnable"``, with mixtures of candidates. See
        docs/logic.md, section 9.
      candidates, scores_init: candidates per input, even for ``"learnable"``; score initializer.
      logits_init: logit initializer; `lutjax.layers.initializers.residual_gates()` by default.
      estimator: relaxation in training. ``"soft"``: gate mixtures. ``"gumbel"``: mixtures with
        Gumbel noise, one sample per call, from the stream ``gates`` in Flax and the key of `apply`
        in Haiku. ``"straight_through"``: hard gates, with a mixture's gradient.
      temperature: divisor of logits and scores, also in a call, and traced.
      feature_axis: -1, or 0 for inputs and outputs ``[features, ...]``: the fast layout.
      accumulate: fixed-point accumulation, not with learned wires; see `lutjax.FixedPoint`.
      dtype: output dtype, to which inputs are cast; by default they are not cast.
      param_dtype: dtype of logits and scores: float32, bfloat16, float16 or float64.
      implementation: implementation of the op; see `lutjax.bilinear_gates`.
      wires: explicit wires or candidates, instead of random ones.
      deterministic: whether calls run the hard network.

    Raises:
      ValueError: a size is impossible, pairs are too few, or a wire is not an input.

    Source: docs/logic.md, sections 1 and 4.
    """

    _: dataclasses.KW_ONLY
    logits_init: Initializer = RESIDUAL

    example: ClassVar[Example] = ("16, 40", (32, 16), (32, 40))

    op = staticmethod(lutjax.bilinear_gates)
    arity = 2

    def _trained_tables(self) -> Variable:
        return self._trained_variable("logits", (self.out_features, 16), self.logits_init)

    def relax_tables(self, arrays: Arrays, deterministic: bool, key: Any) -> jax.Array:
        if deterministic:
            return lutjax.gate_coefficients(arrays["logits"], hard=True)
        mixtures = lutjax.gate_coefficients(self.mixed_logits(arrays, key))
        return self.estimated_coefficients(arrays, mixtures)

    def mixed_logits(self, arrays: Arrays, key: Any) -> jax.Array:
        """Return the logits for gate mixtures in training: ``[gates, 16]``."""
        return self._scale_logits(arrays["logits"], key, jax.random.gumbel, self.estimator)

    def estimated_coefficients(self, arrays: Arrays, mixtures: jax.Array) -> jax.Array:
        """Return estimator coefficients from the coefficients of `mixed_logits`: ``[4, gates]``."""
        if self.estimator != "straight_through":
            return mixtures
        return with_derivative_of(lutjax.gate_coefficients(arrays["logits"], hard=True), mixtures)

    def _slopes(self, tables: Any, inputs: list[jax.Array], dy: jax.Array) -> Sequence[jax.Array]:
        (_, c1, c2, c3), (a, b) = tables.astype(dy.dtype)[:, :, None], inputs
        return dy * (c1 + c3 * b), dy * (c2 + c3 * a)

    def _truth(self, arrays: Arrays) -> jax.Array:
        return truth_of(jnp.argmax(arrays["logits"], -1))

    @names_layer
    def expected_needs(
        self, arrays: Arrays, temperature: Any = None
    ) -> tuple[jax.Array, jax.Array]:
        logits = jnp.asarray(arrays["logits"])
        temperature = self.with_temperature(temperature).temperature
        shares = jax.nn.softmax(logits / jnp.asarray(temperature, logits.dtype))
        constant, one = (shares[:, ids].sum(-1) for ids in (_CONSTANTS, _OF_ONE_INPUT))
        # A gate of two inputs needs two, a buffer or inverter one, and a constant none.
        return 2 * (1 - constant) - one, 1 - constant


@dataclasses.dataclass(unsafe_hash=True)
class LogicRNNSpec(LogicGatesSpec):
    """Recurrent layer of logic gates that map a step's inputs and the state to the next state.

    Inputs are ``[..., length, in_features]`` and outputs, the state after each step,
    ``[..., length, out_features]``; with ``feature_axis=0`` ``[features, length, ...]``. With
    ``deterministic=True`` every gate is the one with the largest logit: bits in, bits out.

    Variables:
      logits: trained, ``[out_features, 16]``.
      wires, readers, scores: as in `LogicGates`, for the layer's inputs, then the state.

    Args:
      in_features: inputs per step, values from 0 to 1 or bits.
      out_features: number of gates, and state size.
      estimator: as in `LogicGates`. All steps of a call share the noise.
      wires: as in `LogicGates`; ids ``in_features + g`` are the states of gates.
      wiring, candidates, scores_init, logits_init, temperature, feature_axis, dtype, param_dtype,
        implementation, deterministic: as in `LogicGates`.
      accumulate: as in `LogicGates`, in each step; sums over steps are floats.

    Raises:
      ValueError: a size is impossible, or a wire is neither an input nor a gate.

    Source: docs/logic.md, section 10.
    """

    example = ("16, 40", (32, 5, 16), (32, 5, 40))
    methods = ("truth_tables", "expected_needs", "from_words")
    call: ClassVar[Callable[..., Any]] = recurrent_call

    @property
    def _n_readable(self) -> int:
        return self.in_features + self.out_features

    @property
    def _steps_axis(self) -> int:
        return -2 if self.feature_axis else 1

    @names_layer
    def run(self, op: Op, x: Any, *, state: Any = None, **options: Any) -> jax.Array:
        x, apply, read = self._bind(op, x, **options)
        if x.ndim < 2:
            expected = "[..., length, features]" if self.feature_axis else "[features, length, ...]"
            raise self._error(f"x has shape {list(x.shape)}; expected {expected}.")

        def step(state: Any, x: Any) -> tuple[Any, Any]:
            state = whole(apply(join(x, state)))
            return state, state

        # On a mesh with explicit axes, features are unsharded: gates read both inputs and state.
        axis = self.feature_axis
        join = _meshes.shard_by_compiler(
            lambda *inputs_and_state: jnp.concatenate(inputs_and_state, axis),
            lambda x, _: _with_whole(x, axis),
        )
        whole = _meshes.shard_by_compiler(lambda y: y, lambda y: _with_whole(y, axis))
        return self._scan_steps(step, x, self._initial_state(x, state, read))

    def _initial_state(self, x: Any, state: Any, read: Any) -> jax.Array:
        x, read = jax.tree.map(jnp.asarray, (x, read))
        axes = _meshes.joint_varying_axes((x, read))
        shape = list(x.shape)
        shape[self.feature_axis] = self.out_features
        del shape[self._steps_axis]
        if state is not None:
            require_array(self.layer, "state", state)
            if list(state.shape) != shape:
                raise self._error(f"state has shape {list(state.shape)}; expected {shape}.")
        states = () if state is None else (jnp.asarray(state).astype(x.dtype),)

        def make_state(x: Any, *state: Any) -> jax.Array:
            return _compat.cast_varying(state[0] if state else jnp.zeros(shape, x.dtype), axes)

        def laid_out(x: Any, *state: Any) -> PartitionSpec:
            places = list(_with_whole(x, self.feature_axis))
            del places[self._steps_axis]
            return PartitionSpec(*places)

        return _meshes.shard_by_compiler(make_state, laid_out)(x, *states)

    def _scan_steps(self, step: Callable[..., Any], x: Any, state: Any) -> jax.Array:
        _, states = jax.lax.scan(step, state, jnp.moveaxis(jnp.asarray(x), self._steps_axis, 0))
        return jnp.moveaxis(states, 0, self._steps_axis)

    @names_layer
    def from_words(
        self, arrays: Arrays, words: UInt32[Array, "inputs length *batch"],
        state: UInt32[Array, " outputs *batch"] | None = None,
    ) -> UInt32[jax.Array, "outputs length *batch"]:  # fmt: skip
        """Return hard network states for 32 sequences per word ``[in_features, length, ...]``."""
        if words.dtype != np.uint32 or words.ndim < 2 or words.shape[0] != self.in_features:
            raise self._error(
                f"words is {words.dtype}{list(words.shape)}; "
                f"expected uint32 [{self.in_features}, length, ...]."
            )
        wires, truth = self.truth_tables(arrays)

        def step(state: Any, words: Any) -> tuple[Any, Any]:
            read = jnp.concatenate([words, state])
            state = lutjax.packed_lut(read, truth, wires, implementation=self.implementation)
            return state, state

        first_axes = dataclasses.replace(self, feature_axis=0)
        return first_axes._scan_steps(step, words, first_axes._initial_state(words, state, arrays))


def in_sequence(calls: Sequence[LayerCall], x: Any) -> jax.Array:
    """Return the outputs of consecutive layers; equal logit shapes share one computation."""
    tables = _mixtures_of_all(calls)
    for number, call in enumerate(calls):
        x = call.run(call.spec.op, x, tables=tables.get(number))
    y: jax.Array = x
    return y


def _mixtures_of_all(calls: Sequence[LayerCall]) -> dict[int, jax.Array]:
    """Return training coefficients of gate layers that share a logit shape, by position."""
    gates: dict[int, LogicGatesSpec] = {}
    logits: dict[Any, dict[int, jax.Array]] = {}
    for number, call in enumerate(calls):
        spec, mode = call.spec, call.mode
        if isinstance(spec, LogicGatesSpec) and not mode["deterministic"]:
            at_temperature = spec.with_temperature(mode["temperature"])
            mixed = at_temperature.mixed_logits(call.arrays, _split(mode.get("key"))[0])
            gates[number] = spec
            logits.setdefault((mixed.shape, mixed.dtype), {})[number] = mixed
    coefficients = {}
    for same in logits.values():
        if len(same) > 1:
            # Layers get their own axis, because the gate axis may be sharded.
            mixtures = jax.vmap(lutjax.gate_coefficients)(jnp.stack(list(same.values())))
            for mixture, number in zip(mixtures, same, strict=True):
                coefficients[number] = gates[number].estimated_coefficients(
                    calls[number].arrays, mixture
                )
    return coefficients


@dataclasses.dataclass(unsafe_hash=True)
class _TableSpec(WiredSpec):
    _corners: ClassVar[Op]  # training probabilities of a 1
    _: dataclasses.KW_ONLY
    n_inputs: int = 4

    @property
    def arity(self) -> int:
        return self.n_inputs

    def _check_sizes(self) -> None:
        self._require_sizes(1, "n_inputs")
        if self.n_inputs > MAX_WIRES:
            raise self._error(
                f"n_inputs is {self.n_inputs}; expected at most {MAX_WIRES}. Use more layers."
            )
        super()._check_sizes()

    @names_layer
    def expected_needs(
        self, arrays: Arrays, temperature: Any = None
    ) -> tuple[jax.Array, jax.Array]:
        ones = self.with_temperature(temperature)._corners(arrays)
        # A table is constant if all of its bits are 0 or all are 1.
        constant = ones.prod(-1) + (1 - ones).prod(-1)
        needed = jnp.zeros_like(constant)
        for bit in range(self.n_inputs):
            low, high = jnp.moveaxis(ones.reshape(len(ones), -1, 2, 1 << bit), 2, 0)
            # An input is needed unless the tables for its two values are equal.
            equal = low * high + (1 - low) * (1 - high)
            needed += 1 - equal.prod((1, 2))
        return needed, 1 - constant

    def sizes_of(self, arrays: Arrays) -> dict[str, Any]:
        read = np.shape(arrays["scores" if self.wiring == "full" else "wires"])
        return super().sizes_of(arrays) | ({"n_inputs": read[1]} if len(read) > 1 else {})


@dataclasses.dataclass(unsafe_hash=True)
class SoftLUTSpec(_TableSpec):
    """Tables over up to 8 inputs between 0 and 1, interpolated between corners: `lutjax.soft_lut`.

    With ``deterministic=True`` corners above 1/2 are 1 and other corners 0: bits in, bits out.

    Variables:
      table: trained, ``[out_features, 2**n_inputs]``; the first input is the lowest address bit.
      wires, readers, scores: as in `LogicGates`, for `n_inputs` inputs per table.

    Args:
      in_features: number of inputs, values from 0 to 1 or bits.
      out_features: number of tables, with one output each.
      n_inputs: inputs per table, 1 to 8.
      parameterization: meaning of the trained values. ``"light"``: corner logits. ``"walsh"``:
        Walsh coefficients ``c``; the logit of corner k is
        ``-sum_s c[s] (-1)**(number of common bits of s and k)``.
        ``"raw"``: values v clipped to [-1, 1], with corners ``(v + 1) / 2``. Outside, only
        gradients pointing inward pass.
      table_init: table initializer; `lutjax.layers.initializers.residual_table` by default.
      estimator: as in `LogicGates`; ``"gumbel"`` adds logistic noise to the corner logits, and
        excludes raw tables.
      wiring: as in `LogicGates`; ``"unique"`` is for 2 inputs.
      candidates, scores_init, temperature, feature_axis, accumulate, dtype, param_dtype,
        implementation, wires, deterministic: as in `LogicGates`.

    Raises:
      ValueError: a size is impossible, or a wire is not an input.

    Source: docs/logic.md, sections 3 and 4.
    """

    _: dataclasses.KW_ONLY
    parameterization: str = "light"
    table_init: Initializer | None = None

    example = ("16, 40, n_inputs=3", (32, 16), (32, 40))

    op = staticmethod(lutjax.soft_lut)

    def _check_sizes(self) -> None:
        super()._check_sizes()
        self._require_one_of("parameterization", PARAMETERIZATIONS)
        if self.parameterization == "raw" and (self.estimator == "gumbel" or self.temperature != 1):
            raise self._error(
                f"parameterization is 'raw', which has no logits, but estimator is "
                f"{self.estimator!r} and temperature is {self.temperature}; use 'light' or 'walsh'."
            )

    def _check_other_temperature(self) -> None:
        if self.parameterization == "raw":
            raise self._error(
                "parameterization is 'raw', without temperature; use 'light' or 'walsh'."
            )

    def _trained_tables(self) -> Variable:
        init = self.table_init or residual_table(parameterization=self.parameterization)
        return self._trained_variable("table", (self.out_features, 2**self.n_inputs), init)

    def _logits(self, arrays: Arrays) -> jax.Array:
        """Return values that are positive where a corner's bit is 1: logits, or raw values."""
        table = jnp.asarray(arrays["table"])
        if self.parameterization == "raw":
            return _clip_values(self.layer, table)
        if self.parameterization == "light":
            return table
        ids = np.arange(2**self.n_inputs)
        walsh = 1 - 2 * (np.bitwise_count(ids[:, None] & ids) % 2).astype(np.int8)
        return -jnp.matmul(table, jnp.asarray(walsh, table.dtype), precision="highest")

    def relax_tables(self, arrays: Arrays, deterministic: bool, key: Any) -> jax.Array:

        def hard(logits: jax.Array) -> jax.Array:
            return (logits > 0).astype(logits.dtype)

        logits = self._logits(arrays)
        if deterministic:
            return hard(logits)
        return self._estimate(logits, key, jax.random.logistic, self._soft_table, hard)

    def _soft_table(self, logits: jax.Array) -> jax.Array:
        return (logits + 1) / 2 if self.parameterization == "raw" else jax.nn.sigmoid(logits)

    def _corners(self, arrays: Arrays) -> jax.Array:
        logits = self._logits(arrays)
        return self._soft_table(logits / jnp.asarray(self.temperature, logits.dtype))

    def _truth(self, arrays: Arrays) -> jax.Array:
        return self._logits(arrays) > 0


@dataclasses.dataclass(unsafe_hash=True)
class BinaryLUTSpec(_TableSpec):
    """Tables over up to 8 inputs, addressed by their signs: `lutjax.binary_lut`.

    An address bit is ``x > 0``, and an output is the bit ``value > 0`` of the addressed slot. The
    slot and the inputs receive gradients, the extended finite difference, as if there were no
    threshold, so training already runs the hard network. With ``estimator="soft"`` outputs are
    values, for example before a group sum, and bits only with ``deterministic=True``. Values are
    clipped to [-1, 1]; outside, only gradients pointing inward pass.

    Variables:
      table: trained, ``[out_features, 2**n_inputs]``; the first input is the lowest address bit.
      wires, readers, scores: as in `LogicGates`, for `n_inputs` inputs per table.

    Args:
      in_features, out_features: number of inputs, and of tables with one output each.
      n_inputs: inputs per table, 1 to 8.
      table_init: table initializer; uniform(-1, 1) by default.
      estimator: ``"straight_through"`` or ``"soft"``.
      temperature: divisor of learned wire scores, whose forward pass is the hard choice.
      wiring: as in `LogicGates`; ``"unique"`` is for 2 inputs.
      candidates, scores_init, feature_axis, accumulate, dtype, param_dtype, implementation, wires,
        deterministic: as in `LogicGates`.

    Raises:
      ValueError: a size is impossible, or a wire is not an input.

    Source: docs/logic.md, section 3.
    """

    _: dataclasses.KW_ONLY
    estimator: str = "straight_through"
    table_init: Initializer = uniform_table

    example = ("16, 40, n_inputs=3", (32, 16), (32, 40))

    op = staticmethod(lutjax.binary_lut)

    estimators: ClassVar[tuple[str, ...]] = ("soft", "straight_through")

    def _trained_tables(self) -> Variable:
        return self._trained_variable(
            "table", (self.out_features, 2**self.n_inputs), self.table_init
        )

    @property
    def scores_estimator(self) -> str:
        # A mixture with any 1 bit would be above 0, so its sign says nothing.
        return "straight_through"

    def _apply(
        self, op: Op, x: Any, tables: Any, wires: Any, readers: Any, deterministic: bool
    ) -> jax.Array:
        y = super()._apply(op, x, tables, wires, readers, deterministic)
        if deterministic or self.estimator == "soft":
            return y
        return with_derivative_of((y > 0).astype(y.dtype), y)

    def relax_tables(self, arrays: Arrays, deterministic: bool, key: Any) -> jax.Array:
        table = _clip_values(self.layer, jnp.asarray(arrays["table"]))
        return (table > 0).astype(table.dtype) if deterministic else table

    def _corners(self, arrays: Arrays) -> jax.Array:
        return (_clip_values(self.layer, jnp.asarray(arrays["table"])) + 1) / 2

    def _truth(self, arrays: Arrays) -> jax.Array:
        return jnp.asarray(arrays["table"]) > 0


@dataclasses.dataclass(unsafe_hash=True)
class GroupSumSpec(Spec):
    """Sums of contiguous feature groups over a temperature: gate votes for classes.

    Outputs are ``[..., k]`` for inputs ``[..., features]``, and ``[k, ...]`` for
    ``[features, ...]`` with ``feature_axis=0``.

    Args:
      k: number of groups and outputs; must divide the number of features.
      tau: divisor of the sums.
      feature_axis: -1, or 0 for features first.
      accumulate: fixed-point accumulation; see `lutjax.FixedPoint`.

    Raises:
      ValueError: a size is impossible; in a call, `k` does not divide the number of features.

    Source: docs/logic.md, section 4.
    """

    k: int
    tau: float | int = 1.0
    _: dataclasses.KW_ONLY
    feature_axis: int = -1
    accumulate: lutjax.FixedPoint | None = None

    example = ("2, tau=2.0", (32, 6), (32, 2))
    call: ClassVar[Callable[..., Any]] = plain_call

    @property
    def out_features(self) -> int:
        return self.k

    def __post_init__(self) -> None:
        self._require_sizes(1, "k")
        self._require_positive("tau")
        self._require_one_of("feature_axis", (-1, 0))
        accumulation(self.layer, self.accumulate)

    def __call__(self, arrays: Arrays, x: Any) -> jax.Array:
        return self.sum_groups(x)

    @names_layer
    def sum_groups(self, x: Any) -> jax.Array:
        x = self._bits(x)
        require_array(self.layer, "x", x)
        if not x.ndim or x.shape[self.feature_axis] % self.k:
            raise self._error(
                f"x has shape {list(x.shape)}; expected a multiple of {self.k} features."
            )
        sums = _sums_of_groups(x, self.k, self.feature_axis)
        if self.accumulate is not None:
            addends = self.accumulate.quantize(jax.lax.stop_gradient(jnp.asarray(x)))
            # The sums of integers are exact, and have the derivative of the sums of floats.
            totals = _sums_of_groups(addends, self.k, self.feature_axis).astype(jnp.int32)
            fixed = self.accumulate.total(totals, x.dtype)
            if self.accumulate.checked:
                fixed = nan_where_apart(fixed, jax.lax.stop_gradient(sums), self.accumulate)
            sums = with_derivative_of(fixed, sums)
        return sums / jnp.asarray(self.tau, x.dtype)


@dataclasses.dataclass(unsafe_hash=True)
class ThermometerSpec(Spec):
    """Thresholds that convert values to bits: ``x > threshold`` for each threshold of a feature.

    Outputs are ``[..., in_features * n_thresholds]``, with adjacent bits per feature, for inputs
    ``[..., in_features]``; on the first axis with ``feature_axis=0``. NaN gives bits 0.

    Variables:
      thresholds: ``[in_features, n_thresholds]``, trained only if learnable.
      widths: ``[in_features]``, not trained; only if given.

    Args:
      in_features: number of inputs.
      n_thresholds: thresholds, and bits, per input.
      learnable: whether thresholds are trained; they may then cross. Otherwise neither inputs nor
        thresholds get a gradient.
      gradient: of learnable thresholds. ``"straight_through"``: outputs are bits, with the gradient
        of ``sigmoid((x - threshold) / temperature)``. ``"soft"``: outputs are this sigmoid.
      temperature: width of this sigmoid, in units of `x`.
      widths: ``[in_features]``, positive factors of `temperature`.
      feature_axis: -1, or 0 for features first.
      dtype: output dtype, to which inputs are cast; by default they are not cast.
      param_dtype: threshold dtype.
      thresholds: from `lutjax.thermometer_thresholds`; by default evenly spaced in (0, 1).
      deterministic: whether calls return bits.

    Raises:
      ValueError: a size is impossible, or thresholds or widths are invalid.

    Source: docs/logic.md, section 4.
    """

    in_features: int
    n_thresholds: int
    _: dataclasses.KW_ONLY
    learnable: bool = False
    gradient: str = "straight_through"
    temperature: float | int = 1.0
    feature_axis: int = -1
    dtype: DTypeLike | None = None
    param_dtype: DTypeLike = jnp.float32
    thresholds: Any = None
    widths: Any = None
    deterministic: bool = False

    example = ("16, 3", (32, 16), (32, 48))

    has_widths: bool = False

    given: ClassVar[tuple[str, ...]] = ("thresholds", "widths")
    implied: ClassVar[tuple[str, ...]] = ("has_widths",)
    call: ClassVar[Callable[..., Any]] = switched_call

    def __post_init__(self) -> None:
        self._require_sizes(1, "in_features", "n_thresholds")
        self._require_one_of("gradient", GRADIENTS)
        self._require_one_of("feature_axis", (-1, 0))
        self._require_positive("temperature")
        if self.has_widths and not self.learnable:
            raise self._error("widths are given, but learnable is False; leave them out.")
        self._normalize_dtypes()

    @classmethod
    def infer_fields(cls, explicit: Arrays) -> dict[str, Any]:
        return {"has_widths": "widths" in explicit}

    def variables(self) -> tuple[Variable, ...]:
        def init(key: Any) -> jax.Array:
            row = np.arange(1, self.n_thresholds + 1) / (self.n_thresholds + 1)
            return jnp.tile(jnp.asarray(row[None], self.param_dtype), (self.in_features, 1))

        kind = "params" if self.learnable else "thresholds"
        shape = (self.in_features, self.n_thresholds)
        thresholds = Variable("thresholds", kind, shape, self.param_dtype, init)
        if not self.has_widths:
            return (thresholds,)

        ones = functools.partial(jnp.ones, (self.in_features,), self.param_dtype)
        widths = Variable(
            "widths", "thresholds", (self.in_features,), self.param_dtype, lambda key: ones()
        )
        return thresholds, widths

    @property
    def out_features(self) -> int:
        return self.in_features * self.n_thresholds

    def sizes_of(self, arrays: Arrays) -> dict[str, Any]:
        shape = np.shape(arrays["thresholds"])
        return {"in_features": shape[0], "n_thresholds": shape[1]} if len(shape) == 2 else {}

    def _check_values(self, variable: Variable, arrays: Arrays) -> None:
        values = np.asarray(arrays[variable.name], np.float64)
        if variable.name == "widths" and not (np.isfinite(values) & (values > 0)).all():
            raise self._error(
                f"widths are {values.min()} to {values.max()}; expected positive, finite values."
            )
        if np.isnan(values).any():
            # Thresholds may be infinite: their bits are constant.
            raise self._error("thresholds holds NaN, which no number exceeds.")

    def __call__(self, arrays: Arrays, x: Any, *, deterministic: bool = False) -> jax.Array:
        return self.compare(x, **arrays, deterministic=deterministic)

    @names_layer
    def compare(
        self, x: Any, thresholds: Any, widths: Any = None, *, deterministic: bool = False
    ) -> jax.Array:
        """Return bits, or with soft gradients the sigmoids of differences."""
        x = _checked_features(self, x, self.in_features)
        dtype, wide = x.dtype, accumulator(x.dtype, thresholds.dtype)
        leading = x.shape[: x.ndim - 1] if self.feature_axis else ()
        trailing = () if self.feature_axis else x.shape[1:]
        before, after = (1,) * len(leading), (1,) * len(trailing)
        t = thresholds.astype(wide).reshape(*before, *thresholds.shape, *after)
        x = jnp.asarray(x).astype(wide).reshape(*leading, self.in_features, 1, *trailing)
        bits = (x > t).astype(dtype)
        if self.learnable:
            width = jnp.asarray(self.temperature, wide)
            if self.has_widths:
                width = width * widths.astype(wide).reshape(*before, -1, 1, *after)
            soft = jax.nn.sigmoid((x - t) / width).astype(dtype)
            if self.gradient == "straight_through":
                bits = with_derivative_of(bits, soft)
            elif not deterministic:
                bits = soft
        y: jax.Array = bits.reshape(*leading, self.in_features * self.n_thresholds, *trailing)
        return y
