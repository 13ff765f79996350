"""Library-independent layer specifications: arguments, variables, checks and casts.

A layer is a dataclass such as ``LUTSpec`` in `_tables.py`, `_images.py`, `_projection.py`,
`_memory.py`, `_product_keys.py`, `_logic.py` or `_logic_images.py`. Its fields are the constructor
arguments, and its docstring documents the layer in every library. It declares and checks the
variables, and computes the forward pass from a mapping of names to arrays. A spec holds no arrays:
each library stores the variables in its own way.
"""

import dataclasses
import functools
import inspect
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Shaped

from lutjax._typing import Array
from lutjax.arguments import check_arguments, format_value, require_array
from lutjax.dispatch import _table_reads
from lutjax.layers._copies import state_of
from lutjax.tables.host import HostTable
from lutjax.tables.host_tables import HostTables
from lutjax.values._dtypes import FLOATS, holds_all_of
from lutjax.values._ids import check_once, trusted_ids

_MOST_NUMBERS = 1 << 43  # largest size of a trained array

Arrays = Mapping[str, Any]
Initializer = Callable[..., Any]
Op = Callable[..., jax.Array]
Mode = bool | None
Inputs = Shaped[Array, "..."]
Outputs = Float[jax.Array, "..."]
Scalar = Float[Array, ""] | float | None
Example = tuple[str, tuple[int, ...], tuple[int, ...]]  # arguments, shapes of inputs and outputs
F = TypeVar("F", bound=Callable[..., Any])
QUANTIZED = "quantised"  # a collection in old checkpoints, hence its spelling


@dataclasses.dataclass(frozen=True)
class Variable:
    """Array stored by a layer, with the same name in every library.

    The kind is ``"params"``, ``"tables"`` or ``"scalars"`` if trained. Never trained:
    ``"anchors"``, ``"targets"``, ``"wires"`` (ids), ``"thresholds"``, `QUANTIZED` (int8 tables) or
    ``"keys"`` (PRNG keys for host-resident tables).
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: Any
    init: Callable[[Any], Any]  # samples the array from a `jax.random` key
    derive: Callable[[Arrays], Any] | None = None  # computes it from earlier variables instead
    drawn: "Variable | None" = None  # host-resident variable initialized from this key
    initializer: Any = None  # behind `init`, called with key, shape and dtype

    @property
    def collection(self) -> str:
        """``"params"`` for all trained variables, or else the kind."""
        return "params" if self.kind in ("tables", "scalars") else self.kind

    def make(self, key: Callable[[], Any], before: Arrays) -> Any:
        """Return the initial value; `key` is called only if the value is sampled."""
        return self.init(key()) if self.derive is None else self.derive(before)


# Treat specs as immutable. They are not frozen because `__post_init__` normalizes arguments.
@dataclasses.dataclass(unsafe_hash=True)
class Spec:
    """Base class for specs, which add arguments, variables and a forward pass."""

    example: ClassVar[Example]
    given: ClassVar[tuple[str, ...]] = ()  # arguments that are explicit variables
    # Fields inferred from explicit variables; not arguments.
    implied: ClassVar[tuple[str, ...]] = ()
    methods: ClassVar[tuple[str, ...]] = ()  # methods shared by the layers
    call: ClassVar[Callable[..., Any]]  # `__call__` of the layers of Linen and Haiku
    op: ClassVar[Op]  # op of the forward pass, which the calls of NNX layers name
    run: ClassVar[Callable[..., Any]]  # forward pass around an op, with the variables by name
    stream: ClassVar[str] = "gates"  # random stream, in libraries with streams

    class_name: str = dataclasses.field(default="", kw_only=True, repr=False, compare=False)

    def __call__(self, arrays: Arrays, x: Any, *args: Any, **options: Any) -> Any:
        """Return the outputs: the call of an NNX layer, for all other callers."""
        return self.run(self.op, x, *args, **options, **arrays)

    def __getstate__(self) -> dict[str, Any]:
        state = state_of(self)
        # Variables hold functions, which `pickle` rejects.
        state.pop("all_variables", None)
        return state

    @functools.cached_property
    def all_variables(self) -> tuple[Variable, ...]:
        """Cached result of `variables`: every call needs the names."""
        return self.variables()

    @property
    def random(self) -> bool:
        """Whether nondeterministic calls need random numbers."""
        return False

    @property
    def layer(self) -> str:
        """Layer name in messages: the class name, which may be a user's subclass."""
        return self.class_name or layer_name(type(self))

    def _error(self, message: str) -> ValueError:
        return ValueError(f"{self.layer}: {message}")

    @classmethod
    def arrays_of(cls, explicit: Arrays) -> Arrays:
        """Return explicit variables by name: an argument may consist of several arrays."""
        return explicit

    @classmethod
    def infer_fields(cls, explicit: Arrays) -> dict[str, Any]:
        """Return the `implied` fields of explicit variables."""
        return {}

    def variables(self) -> tuple[Variable, ...]:
        return ()

    def host_table(self, placement: Any, drawn: Variable) -> HostTable:
        """Return the host-resident table of a layer: an existing one, or a new one without rows."""
        if not isinstance(placement, HostTable):
            return HostTable(drawn.shape, drawn.dtype, drawn.initializer, drawn.name)
        if (placement.shape, placement.dtype) != (drawn.shape, np.dtype(drawn.dtype)):
            raise self._error(
                f"placement is {placement}, {placement.dtype}{list(placement.shape)}; "
                f"expected a table {np.dtype(drawn.dtype)}{list(drawn.shape)}."
            )
        return placement

    def sizes_of(self, arrays: Arrays) -> dict[str, Any]:
        """Return fields inferred from array shapes, which pruning can change."""
        return {}

    def fit_to_arrays(self, arrays: Arrays) -> "Spec":
        """Return the spec that fits the arrays: itself if the sizes are equal."""
        sizes = self.sizes_of(arrays)
        if all(getattr(self, name) == size for name, size in sizes.items()):
            return self
        return dataclasses.replace(self, **sizes)

    def follow(self, name: str, arrays: Arrays) -> dict[str, Any]:
        """Return the variables derived from the replaced variable `name`."""
        return {}

    def check(self, arrays: Arrays) -> None:
        """Raise ValueError if a variable has a wrong shape or holds an id that does not exist."""
        for variable in self.all_variables:
            if variable.name in arrays:
                self._check_shape(variable, arrays[variable.name])
                self._check_values(variable, arrays)

    def checked_arrays(self, arrays: Arrays) -> Arrays:
        """Return the arrays of a call; raise ValueError if one is missing or has invalid ids."""
        for v in self.all_variables:
            if v.kind in ("anchors", "targets", "wires") and v.name in arrays:
                if isinstance(arrays[v.name], jax.ShapeDtypeStruct):
                    raise missing_variable_error(self.layer, v.name)
                check_values = functools.partial(self._check_values, v, {v.name: arrays[v.name]})
                check_once(arrays[v.name], self, check_values)
        return arrays

    def _check_shape(self, variable: Variable, array: Any) -> None:
        if np.shape(array) != variable.shape:
            raise self._error(
                f"{variable.name} has shape {list(np.shape(array))}; "
                f"expected {list(variable.shape)}."
            )

    def _check_values(self, variable: Variable, arrays: Arrays) -> None:
        pass

    def _require_sizes(self, least: int, *names: str) -> None:
        for name in names:
            size = getattr(self, name)
            try:
                whole = operator.index(size)
            except TypeError:
                message = f"{name} is {format_value(size)}; expected a whole number."
                raise self._error(message) from None
            if whole < least:
                raise self._error(f"{name} is {size}; it must be at least {least}.")

    def _require_features(self, x: Any, size: int, rank: int = 1, name: str = "x") -> None:
        """Raise unless inputs are ``[..., size]``: ops accept any number, as ids are clamped."""
        require_array(self.layer, name, x)
        if x.ndim < rank or x.shape[-1] != size:
            length = "length, " * (rank - 1)
            raise self._error(f"{name} has shape {list(x.shape)}; expected [..., {length}{size}].")

    def _require_one_of(self, name: str, choices: tuple[Any, ...]) -> None:
        value = getattr(self, name)
        if value not in choices:
            raise self._error(f"{name} is {format_value(value)}; expected one of {choices}.")

    def _require_positive(self, name: str) -> None:
        if isinstance(getattr(self, name), jax.core.Tracer):
            raise TypeError(
                f"{self.layer}: {name} is a traced value, as inside jax.jit; "
                "the constructor needs a number. Calls of layers of gates take another "
                "temperature."
            )
        if not 0 < getattr(self, name) < float("inf"):
            raise self._error(f"{name} is {getattr(self, name)}; it must be positive and finite.")

    def _normalize_dtypes(self) -> None:
        for name in ("dtype", "param_dtype"):
            dtype = getattr(self, name)
            if dtype is None and name == "dtype":
                continue
            is_array = isinstance(dtype, jax.Array | np.ndarray | np.generic)
            try:
                # NumPy would take the dtype from an array, and JAX hash it.
                known = format_value(dtype) if is_array else jnp.dtype(dtype).name
            except TypeError:
                known = format_value(dtype)
            if known not in FLOATS:
                raise self._error(f"{name} is {known}; expected one of {FLOATS}.")
            if jax.dtypes.canonicalize_dtype(dtype) != jnp.dtype(dtype):
                raise self._error(
                    f"{name} is {jnp.dtype(dtype).name}, which JAX has switched off; "
                    "switch it on with jax.config.update('jax_enable_x64', True)."
                )
            setattr(self, name, jnp.dtype(dtype))

    def _bits(self, x: Any) -> Any:
        """Return logic layer inputs as floats; they may be bools or integers."""
        dtype = getattr(x, "dtype", None)
        if dtype is None or not (dtype == np.bool_ or jnp.issubdtype(dtype, np.integer)):
            return x
        if dtype == np.uint32:
            raise TypeError(
                f"{self.layer}: x is uint32, as bits packed by lutjax.pack_bits, "
                "which lutjax.packed_lut and lutjax.models.pack run; "
                "give one bit a number (bool, int32 or a float), e.g. lutjax.unpack_bits(x, n)."
            )
        float_dtype = getattr(self, "dtype", None) or getattr(self, "param_dtype", jnp.float32)
        return jnp.asarray(x).astype(float_dtype)

    def _trained_variable(
        self, name: str, shape: tuple[int, ...], init: Initializer, kind: str = "params"
    ) -> Variable:
        dtype = self.param_dtype  # type: ignore[attr-defined]
        if math.prod(shape) > _MOST_NUMBERS:
            raise self._error(
                f"{name} has shape {list(shape)}, {math.prod(shape):,} numbers; "
                "no machine holds so many. Choose smaller sizes."
            )
        return Variable(
            name, kind, shape, dtype, lambda key: init(key, shape, dtype), initializer=init
        )

    def _cast(self, array: Any) -> Any:
        dtype = self.dtype  # type: ignore[attr-defined]
        if dtype is None or array is None or jnp.asarray(array).dtype == dtype:
            return array  # the array itself: see lutjax.optim
        return jnp.asarray(array).astype(dtype)

    def _resolve_dtype(self, x: Any) -> Any:
        """Return the layer's dtype, by default promoted from inputs and parameters."""
        own, of_parameters = self.dtype, self.param_dtype  # type: ignore[attr-defined]
        return jnp.promote_types(jnp.asarray(x).dtype, of_parameters) if own is None else own

    def _cast_tables(self, tables: Any) -> Any:
        """Return tables in the dtype read by an op: their own, unless `dtype` is wider."""
        # Ops round float32 sums to the table dtype; `_cast_sums` rounds them to a narrower `dtype`.
        dtype = self.dtype  # type: ignore[attr-defined]
        if dtype is None or holds_all_of(tables.dtype, dtype):
            return tables  # the array itself: see lutjax.optim
        widened = self._cast(tables)
        if (reads := _table_reads.current_reads()) is not None:
            # A sparse gradient of the copy is also the table's.
            reads.stand_in(tables, widened)
        return widened

    def _cast_sums(self, y: jax.Array) -> jax.Array:
        """Return row sums in `dtype`, or in the table dtype without one."""
        dtype = self.dtype  # type: ignore[attr-defined]
        return y if dtype is None else y.astype(dtype)


@dataclasses.dataclass(frozen=True)
class LayerCall:
    spec: Any
    arrays: Arrays
    mode: Mapping[str, Any]

    def run(self, op: Op, x: Any, **options: Any) -> jax.Array:
        """Run the forward pass around an op, with the variables by name."""
        y: jax.Array = self.spec.run(op, x, **options, **self.mode, **self.arrays)
        return y


def plain_call(self: Any, x: Inputs) -> Outputs:
    """Return outputs ``[..., out_features]`` for inputs ``[..., in_features]``."""
    y: jax.Array = self._run(x)
    return y


def switched_call(self: Any, x: Inputs, *, deterministic: Mode = None) -> Outputs:
    """Return outputs for inputs; `deterministic` takes precedence over the layer's own."""
    y: jax.Array = self._run(x, deterministic)
    return y


def missing_variable_error(layer: str, name: str, hint: str = "") -> ValueError:
    return ValueError(
        f"{layer}: there is no {name}: the layer was restored without it. "
        "Restore all variables, not the trained ones alone; "
        f"others than those of training would be silently wrong.{hint}"
    )


def names_layer(method: F) -> F:
    """Decorate a spec method so that errors name the layer, and ops skip checks on its ids."""

    @functools.wraps(method)
    def call_method(self: Spec, *args: Any, **options: Any) -> Any:
        try:
            with trusted_ids():
                return method(self, *args, **options)
        except (TypeError, ValueError) as error:
            if not str(error).startswith(f"{self.layer}: "):
                error.args = (f"{self.layer}: {error}", *error.args[1:])
            raise

    return call_method  # type: ignore[return-value]


def cache_calls(function: F) -> F:
    return functools.cache(function)  # type: ignore[return-value]


def layer_name(spec_type: type[Spec]) -> str:
    return spec_type.__name__.removesuffix("Spec")


@cache_calls
def arguments(spec_type: type[Spec]) -> tuple[str, ...]:
    others = {*spec_type.implied, "class_name"}
    return tuple(field.name for field in dataclasses.fields(spec_type) if field.name not in others)


def parameters(spec_type: type[Spec], *, inferred: bool = False) -> list[inspect.Parameter]:
    """Return a layer's constructor parameters; `inferred` allows None for `in_features`."""
    names = set(arguments(spec_type))
    own_parameters = [
        p for p in inspect.signature(spec_type).parameters.values() if p.name in names
    ]
    if not inferred or own_parameters[0].name != "in_features":
        return own_parameters
    # Arguments after one with a default need a default too; the spec rejects None for them.
    for k, p in enumerate(own_parameters):
        if p.kind is p.POSITIONAL_OR_KEYWORD and p.default is p.empty:
            own_parameters[k] = p.replace(default=None, annotation=p.annotation | None)
    return own_parameters


@cache_calls
def sizes(spec_type: type[Spec]) -> frozenset[str]:
    """Return the names of attributes shared by a layer and its spec."""
    fields = set(arguments(spec_type)) | set(spec_type.implied)
    fields -= set(spec_type.given)
    derived = ("out_features", "out_shape", "connectivity")
    return frozenset(fields | {name for name in derived if hasattr(spec_type, name)})


def n_inputs(layer: str, options: Mapping[str, Any], x: Any) -> int | None:
    """Return the number of inputs if a layer has ``in_features=None``, or else None."""
    if options.get("in_features", 0) is not None:
        return None
    require_array(layer, "x", x)
    if not x.ndim:
        raise ValueError(f"{layer}: x has shape []; expected an axis of inputs.")
    size: int = x.shape[0 if options.get("feature_axis") == 0 else -1]
    return size


def unknown_inputs(layer: str) -> ValueError:
    return ValueError(
        f"{layer}: in_features is None, and the number of inputs that init found is not there. "
        "Pass in_features, or all variables that init returned."
    )


def build(
    spec_type: type[Spec], options: Mapping[str, Any], *, name: str = "", owner: bool = False
) -> tuple[Any, tuple[Variable, ...]]:
    """Return a layer's spec and variables, with explicit variables in place of sampled ones.

    An `owner` of host-resident tables, instead of `HostTables`, accepts an existing `HostTable`.
    """
    explicit = {name: options[name] for name in spec_type.given if options[name] is not None}
    options = {name: value for name, value in options.items() if name not in spec_type.given}
    name = name or layer_name(spec_type)
    options = check_arguments(name, spec_type, options)
    placed = isinstance(options.get("placement"), HostTables)
    if placed or (owner and isinstance(options.get("placement"), HostTable)):
        options["placement"] = "host"
    spec = spec_type(**options, **spec_type.infer_fields(explicit), class_name=name)
    explicit_arrays = spec_type.arrays_of(explicit)
    if placed and owner:
        raise ValueError(
            f"{spec.layer}: placement is HostTables; Flax NNX layers own their tables: use 'host'."
        )
    if not placed and not owner and any(v.drawn for v in spec.all_variables):
        raise ValueError(
            f"{spec.layer}: placement is 'host'; layers of Flax Linen "
            "and Haiku hold arrays alone: give lutjax.optim.host.HostTables(), "
            "which has the tables of a model."
        )
    spec.check(explicit_arrays)

    def variable(v: Variable) -> Variable:
        return dataclasses.replace(
            v, derive=lambda before: jnp.asarray(explicit_arrays[v.name], v.dtype)
        )

    return spec, tuple(variable(v) if v.name in explicit_arrays else v for v in spec.all_variables)
