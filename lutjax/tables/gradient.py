"""Sparse table gradient: the ids of the accessed rows, and the output's cotangent.

Its leaves are not gradient elements: their norm, their sum over batches or their running mean would
be silently wrong. One leaf therefore has a dtype without arithmetic, the dtype of random keys. Any
arithmetic on it raises a TypeError with the dtype's name, which says what to use instead.
`jax.jit`, `vmap`, `scan`, `shard_map` and export handle it like any array.
"""

import dataclasses
import functools
import math
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lutjax import _compat
from lutjax.dispatch._transforms import apply
from lutjax.dispatch.contract import Call
from lutjax.values._dtypes import accumulator

_CURE = "use lutjax.optim.Optimizer, optim.global_norm or optim.clip_by_global_norm"


@dataclasses.dataclass(frozen=True, repr=False)
class TableGradient:
    """Sparse gradient of one table: its lookup and the output's cotangent, no dense array.

    Made by `lutjax.optim.value_and_grad`, applied by `lutjax.update_table`. It is a pytree, but
    arithmetic on its leaves, or on itself, raises a TypeError. `jax.numpy.isfinite` on its leaves
    is not arithmetic, and does not find a NaN: use it on `lutjax.optim.global_norm`.

    Attributes:
      look_up: the call that read the table, with None instead of the table.
      sealed: `cotangent` in the form returned by `seal`, a leaf without arithmetic.
      factor: product of all `lutjax.scale_gradient` factors on the path to the table: a scalar, an
          array that broadcasts to the table, or None.
      after: dependency token, a scalar that is available once the backward pass has read the table.
      shape, dtype: of the table. axes: mesh axes over which it is sharded, inside a
      `jax.shard_map`.
      is_gathered: True if made by `gathered`.

    Source: docs/semantics.md, section 8.
    """

    look_up: Call
    sealed: Any  # an array of `seal`, or whatever jax makes of the leaves of a pytree
    factor: Any
    after: Any
    shape: tuple[int, ...]
    dtype: np.dtype
    axes: frozenset[str] = frozenset()
    is_gathered: bool = False

    @property
    def op(self) -> str:
        """Name of the lookup, e.g. ``"lookup"``."""
        return self.look_up.op

    @property
    def cotangent(self) -> Any:
        """The lookup output's cotangent, ``[..., O]``: ``dy``."""
        return _open_sealed(self.sealed, self.dtype)

    def to_dense(self) -> jax.Array:
        """Return the gradient as a table-shaped array, as `jax.grad` does. For checks."""
        look_up = self.look_up

        def f(weights: jax.Array) -> Any:
            return apply(look_up.replace(**{str(look_up.table_name): weights}))

        # A replicated table gets the sum of the devices' gradients, a sharded one does not.
        axes = self.axes & self.varying_axes()
        zeros = _compat.cast_varying(jnp.zeros(self.shape, self.dtype), axes)
        (dense,) = jax.vjp(f, zeros)[1](self.cotangent)
        if self.factor is not None:
            dense = dense * jnp.asarray(self.factor, dense.dtype)
        result: jax.Array = dense
        return result

    def varying_axes(self) -> frozenset[str]:
        """Return the mesh axes over which any of its arrays varies."""
        return frozenset[str]().union(*(_compat.varying_axes(a) for a in jax.tree.leaves(self)))

    def scaled(self, factor: Any) -> "TableGradient":
        """Return the gradient times a factor."""
        dtype = accumulator(self.dtype)
        factor = jnp.asarray(factor, dtype)
        if self.factor is not None:
            factor = jnp.asarray(self.factor, dtype) * factor
        return dataclasses.replace(self, factor=factor)

    def gathered(self, axes: str | tuple[str, ...]) -> "TableGradient":
        """Return the joint gradient of all devices, in a `jax.shard_map` that divides the batch.

        Devices exchange sparse gradients, never a table-shaped array. All devices then apply the
        same update to a replicated table. As with dense gradients, the result is the sum of the
        devices' gradients: if the loss is a mean over a device's batch, divide it by the number of
        devices (`scaled`).

        Args:
          axes: names of the mesh axes over which the batch, or the sequences of attention
              (`sequence_axis`), are divided; () if each device has the whole batch, as with tables
              sharded by detector. Axes on which nothing differs need no gathering.

        Raises:
          ValueError: there is no such mesh axis here.

        Example:
          >>> import jax, jax.numpy as jnp, lutjax
          >>> from jax.sharding import Mesh, PartitionSpec as P
          >>> from lutjax import optim
          >>> anchors, mesh = jnp.array([[[0, 1]]]), Mesh(jax.devices(), ("data",))
          >>> def step(weights, x):
          ...     loss = lambda params: lutjax.lut(x, params["weights"], anchors).sum()
          ...     _, gradients = optim.value_and_grad(loss)({"weights": weights})
          ...     return lutjax.update_table(weights, gradients["weights"].gathered("data"), 1.0)[0]
          >>> step = jax.shard_map(step, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
          >>> weights = jax.jit(step)(jnp.zeros((1, 2, 1)), jnp.ones((2 * mesh.size, 2)))
          >>> weights.sum() == -2 * mesh.size
          Array(True, dtype=bool)
        """
        axes = (axes,) if isinstance(axes, str) else tuple(axes)
        mesh_axes = jax.sharding.get_abstract_mesh().manual_axes
        unknown = sorted(set(axes) - set(mesh_axes))
        if unknown:
            raise ValueError(
                f"TableGradient.gathered: axes is {axes}; "
                f"this shard_map has the mesh axes {tuple(mesh_axes)}."
            )
        # Without tracking, every array with a batch may differ.
        untracked = _compat.untracked_axes()

        def gather(a: jax.Array) -> tuple[str, ...]:
            differs = untracked | _compat.varying_axes(a)
            return tuple(axis for axis in axes if axis in differs)

        def all_of(a: jax.Array, mesh_axis: str, axis: int = 0) -> jax.Array:
            if mesh_axis in gather(a):
                every: jax.Array = jax.lax.all_gather(
                    a, mesh_axis, axis=axis, tiled=True, to="invarying"
                )
                return every
            # This leaf is the same on all devices, next to leaves that differ.
            return jnp.concatenate([a] * jax.lax.axis_size(mesh_axis), axis)

        cotangent, factor, call = self.cotangent, self.factor, self.look_up
        after = jnp.asarray(self.after)
        after = jax.lax.psum(after, gather(after)) if gather(after) else after
        # A factor that differs between devices becomes a part of the cotangent, as the joint
        # gradient has one factor.
        if factor is not None and not jnp.ndim(factor) and gather(jnp.asarray(factor)):
            cotangent, factor = cotangent * jnp.asarray(factor, cotangent.dtype), None
        sequence_axis = getattr(call, "sequence_axis", None)
        if sequence_axis in axes:
            join = functools.partial(all_of, mesh_axis=sequence_axis)
            call, cotangent = _gather_sequences(call, cotangent, join)
            axes = tuple(axis for axis in axes if axis != sequence_axis)
        batched = [
            (leaf, leaf.ndim - rank)
            for array, rank in zip(call.values(), call.ranks(), strict=True)
            if rank is not None
            for leaf in jax.tree.leaves(array)
        ]
        differing = set(gather(cotangent)).union(*(gather(leaf) for leaf, _ in batched))
        batch_axes = tuple(axis for axis in axes if axis in differing)
        if batch_axes and min((n_leading for _, n_leading in batched), default=0) < 1:
            raise ValueError(
                f"TableGradient.gathered: the lookup in this table ({call.op}) has no batch "
                "dimension to join over devices. Add one to its arguments."
            )

        # The last mesh axis first, so that the batch has the order of the devices.
        def gather_batch(a: jax.Array) -> jax.Array:
            return functools.reduce(all_of, reversed(batch_axes), a)

        arrays = (
            a if rank is None else jax.tree.map(gather_batch, a)
            for a, rank in zip(call.values(), call.ranks(), strict=True)
        )
        return dataclasses.replace(
            self,
            look_up=call.from_arrays(arrays, call.options()),
            sealed=seal(gather_batch(cotangent)),
            factor=factor,
            after=after,
            is_gathered=True,
        )

    @property
    def nbytes(self) -> int:
        """Bytes of the sparse gradient."""
        factors = (self.cotangent, self.look_up, self.factor, self.after)
        return sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(factors))

    def __repr__(self) -> str:
        return f"TableGradient of {self.op}, for a table {self.dtype}{list(self.shape)}"

    def __array__(self, *_: Any, **__: Any) -> np.ndarray:
        raise _no_number("given as an array")

    def __jax_array__(self) -> jax.Array:
        raise _no_number("given as an array")


def _gather_sequences(
    call: Any, cotangent: jax.Array, all_of: Callable[..., jax.Array]
) -> tuple[Any, jax.Array]:
    """Return an attention lookup and its output cotangent for the queries of all devices.

    `all_of` joins the parts of all devices along an axis.
    """
    letters = call.letters()

    def gather_axis(name: str, a: jax.Array) -> jax.Array:
        if "q" not in letters[name]:  # keys are those of all devices already
            return a
        return all_of(a, axis=a.ndim - len(letters[name]) + letters[name].index("q"))

    arrays = {
        name: jax.tree.map(functools.partial(gather_axis, name), array)
        for name, array in zip(call.arrays(), call.values(), strict=True)
    }
    # Queries from the first device come first, so its start is the start of all.
    for name in ("start", "starts"):
        if arrays[name] is not None:
            arrays[name] = jax.lax.pmin(arrays[name], call.sequence_axis)
    return call.replace(**arrays, sequence_axis=None), gather_axis("output", cotangent)


def seal(cotangent: jax.Array) -> jax.Array:
    """Return a cotangent as an array with the same shape and no arithmetic."""
    size = cotangent.dtype.itemsize
    words = jax.lax.bitcast_convert_type(cotangent, np.dtype(f"uint{min(8 * size, 32)}"))
    n_words = math.ceil(size / 4)
    words = words.astype(jnp.uint32).reshape(*cotangent.shape, n_words)
    # JAX has no arithmetic for keys of random numbers, so a sealed cotangent is an error in it.
    result: jax.Array = jax.random.wrap_key_data(words, impl=_sealed_key_type(n_words))
    return result


def _open_sealed(sealed: Any, dtype: np.dtype) -> Any:
    """Return the array inside a sealed one; anything else is returned as it is."""
    kind = getattr(sealed, "dtype", None)
    if kind is None or not jnp.issubdtype(kind, jax.dtypes.prng_key):
        return sealed
    if isinstance(sealed, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(sealed.shape, dtype)
    words = jax.random.key_data(sealed).astype(np.dtype(f"uint{min(8 * dtype.itemsize, 32)}"))
    return jax.lax.bitcast_convert_type(words if dtype.itemsize > 4 else words[..., 0], dtype)


@functools.cache
def _sealed_key_type(n_words: int) -> Any:
    """Return a random-key type whose keys are unusable. Its dtype name says what to do."""
    return _compat.define_prng_impl(
        key_shape=(n_words,),
        **dict.fromkeys(("seed", "split", "random_bits", "fold_in"), _refuse_key),
        name=f"lutjax_table_gradient_{n_words}",
        tag=f"part of a TableGradient, not a number: {_CURE}",
    )


def _refuse_key(*_: Any) -> Any:
    raise _no_number("used as a random key")


def _no_number(what: str) -> TypeError:
    return TypeError(
        f"a TableGradient was {what}, but it is a sparse gradient, not an array: {_CURE}; "
        "`to_dense()` returns the array."
    )


def _make_refusal(name: str) -> Any:
    def refuse(self: TableGradient, *_: Any) -> Any:
        raise _no_number(f"used in arithmetic ({name})")

    return refuse


for _name in ("add", "sub", "mul", "truediv", "pow", "matmul"):
    setattr(TableGradient, f"__{_name}__", _make_refusal(f"__{_name}__"))
    setattr(TableGradient, f"__r{_name}__", _make_refusal(f"__r{_name}__"))

# The leaf without arithmetic first, so that its error is the one raised.
_DATA = ("sealed", "look_up", "factor", "after")
_META = ("shape", "dtype", "axes", "is_gathered")


def _flatten(gradient: TableGradient) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    _refuse_optimizers()
    return tuple(getattr(gradient, n) for n in _DATA), tuple(getattr(gradient, n) for n in _META)


def _flatten_with_keys(
    gradient: TableGradient,
) -> tuple[tuple[tuple[Any, Any], ...], tuple[Any, ...]]:
    children, meta = _flatten(gradient)
    keys = map(jax.tree_util.GetAttrKey, _DATA)
    return tuple(zip(keys, children, strict=True)), meta


def _unflatten(meta: tuple[Any, ...], children: Any) -> TableGradient:
    return TableGradient(
        **dict(zip(_META, meta, strict=True)), **dict(zip(_DATA, children, strict=True))
    )


def _refuse_optimizers() -> None:
    """Raise TypeError if optax or `nnx.Optimizer` walks the tree."""
    # This only improves the message. The sealed leaf stops them too, but outside of jit the error
    # only reports a random-key array without an attribute that optax reads; and `nnx.Optimizer`
    # drops leaves outside `nnx.Param`, and reports a different structure.
    frame: Any = sys._getframe(2)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        package = module.partition(".")[0]
        if package == "optax" or module.startswith("flax.nnx.training."):
            raise _no_number(f"given to {'optax' if package == 'optax' else 'nnx.Optimizer'}")
        if package not in ("jax", "flax", "lutjax", "jaxtyping", "beartype"):
            return
        frame = frame.f_back


jax.tree_util.register_pytree_with_keys(TableGradient, _flatten_with_keys, _unflatten, _flatten)
