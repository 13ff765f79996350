"""Layer of differentiable logic over images: arguments, variables and forward pass, for all libraries."""

import dataclasses
import functools
import itertools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import UInt32

import lutjax
from lutjax import wiring
from lutjax._arguments import require_array
from lutjax._typing import Array
from lutjax.dispatch import _meshes
from lutjax.layers._logic import (
    INT32,
    PARAMETRISATIONS,
    RESIDUAL,
    LogicGatesSpec,
    SoftLUTSpec,
    _LogicArguments,
    _LogicSpec,
)
from lutjax.layers._spec import Arrays, Example, Initializer, Variable, names_layer
from lutjax.ops.logic_trees import MAX_LEAVES, LogicTrees, Places, logic_trees
from lutjax.wiring._images import window_sizes
from lutjax.wiring._sizes import Size, pair, shape_of

# A level of trees as a function: inputs, features first, the tables of the level, how often each follows itself, wires, and readers.
Level = Callable[[jax.Array, slice, int, Any, Any], jax.Array]


@dataclasses.dataclass(eq=False)
class LogicConvArguments(_LogicArguments):
    """Layer that convolves an image with trees of gates, and takes the or of neighbouring places.

    A kernel is a complete tree of gates, whose leaves are values in a window of the image. Its gates and wires are the same
    at each place of the window. The output is the largest of ``pool`` places, for bits their or, and its gradient goes to the
    first of the largest. Gates read the image itself: windows are not copied.

    Variables:
      logits: trained, ``[n_kernels * nodes of a tree, 16]``, the first level first. A tree has ``n_inputs**(depth - 1) + ... + 1`` nodes.
      table: trained, ``[n_kernels * nodes of a tree, 2**n_inputs]``, instead of logits, where nodes are tables.
      wires: int32 ``[n_kernels * n_inputs**(depth - 1), n_inputs]``: the leaves, ids in the window in the order row, column, channel.
      readers: int32 ``[channels, most readers]``: ``lutjax.readers(wires % channels, channels)``. Absent if it would be mostly empty.

    Args:
      in_shape: height, width and channels of the image. Inputs are ``[..., height, width, channels]``; with
        ``feature_axis=0`` ``[channels, height, width, ...]``. Outputs are laid out alike.
      n_kernels: trees, and channels of the output.
      kernel: height and width of a window, or one number for both.
      depth: levels of gates.
      stride: from one window to the next, in rows and in columns.
      padding: rows and columns of zeros around the image; less than `kernel`.
      pool: height and width of the groups of places whose maximum is taken; it divides the places and their padding.
      pool_padding: rows and columns around the places that groups may reach into, where there is nothing; less than `pool`.
      channels_per_kernel: channels that a tree reads, drawn for each so that all are read by about as many trees. None: all.
      n_inputs: inputs of a node, 2 to 8.
      parametrisation: ``"gates"``: nodes are gates of two inputs, as in `LogicGates`. ``"light"``, ``"walsh"``, ``"raw"``: nodes are
        tables, as in `SoftLUT`.
      logits_init: draws the logits; by default `lutjax.layers.initializers.residual_gates()`: a gate passes on its first
        input with probability 0.9.
      table_init: draws the tables; by default `lutjax.layers.initializers.residual_table`.
      wires: explicit leaves, instead of drawn ones; those of `lutjax.wiring.trees` are ``leaves.reshape(-1, n_inputs)``.
      estimator, temperature, feature_axis, dtype, param_dtype, implementation, deterministic: as in `LogicGates`.

    Raises:
      ValueError: a size is impossible, or a wire is not in the window.

    Source: docs/logic.md, section 8.
    """

    in_shape: tuple[int, int, int]
    n_kernels: int
    _: dataclasses.KW_ONLY
    kernel: Size = 3
    depth: int = 3
    stride: Size = 1
    padding: Size = 0
    pool: Size = 1
    pool_padding: Size = 0
    channels_per_kernel: int | None = None
    n_inputs: int = 2
    parametrisation: str = "gates"
    logits_init: Initializer = RESIDUAL
    table_init: Initializer | None = None


class _Gates(LogicGatesSpec):
    """Spec of nodes that are gates."""

    @property
    def layer(self) -> str:
        return "LogicConv"


class _Tables(SoftLUTSpec):
    """Spec of nodes that are tables."""

    @property
    def layer(self) -> str:
        return "LogicConv"


@dataclasses.dataclass(unsafe_hash=True)
class LogicConvSpec(LogicConvArguments, _LogicSpec):
    """Spec of `LogicConv`.

    Source: docs/logic.md, section 8.
    """

    example: ClassVar[Example] = (
        "(8, 8, 3), 16, kernel=3, depth=3, padding=1, pool=2",
        (32, 8, 8, 3),
        (32, 4, 4, 16),
    )

    sizes: ClassVar[tuple[str, ...]] = ("n_kernels", "depth")

    def _check_sizes(self) -> None:
        height, width, channels = shape_of(self.layer, "in_shape", self.in_shape, (3,))
        self.in_shape = height, width, channels
        names = ("kernel", "stride", "padding", "pool", "pool_padding")
        geometry = window_sizes(self.layer, self.in_shape, self.kernel, self.stride, self.padding)
        pool, around = (
            pair(self.layer, "pool", self.pool),
            pair(self.layer, "pool_padding", self.pool_padding, 0),
        )
        for name, size in zip(names, (*geometry, pool, around), strict=True):
            if isinstance(getattr(self, name), Sequence):
                setattr(self, name, size)
        if any(p >= k for k, p in zip(pool, around, strict=True)):
            raise ValueError(
                f"{self.layer}: pool_padding is {self.pool_padding} and pool is {self.pool}, so a group could have no place; the "
                "padding must be less than the group."
            )
        if any((n + 2 * p) % k for n, k, p in zip(self.places, pool, around, strict=True)):
            padded = f" with pool_padding {self.pool_padding}" if any(around) else ""
            raise ValueError(
                f"{self.layer}: pool is {self.pool}, which does not divide the {self.places} places of windows{padded}."
            )
        if self.channels_per_kernel is not None:
            self._require_size("channels_per_kernel", 1)
            if self.channels_per_kernel > self.in_shape[2]:
                raise ValueError(
                    f"{self.layer}: channels_per_kernel is {self.channels_per_kernel}, but the image has {self.in_shape[2]} "
                    "channels."
                )
        self._require_one_of("parametrisation", ("gates", *PARAMETRISATIONS))
        self._require_size("n_inputs", 2)
        if self.parametrisation == "gates" and self.n_inputs != 2:
            raise ValueError(
                f"{self.layer}: parametrisation is 'gates', which have 2 inputs, but n_inputs is {self.n_inputs}; use 'light'."
            )
        self._nodes()  # checks the other options

    # ------------------------------------------------------------------------------------- sizes
    def _nodes(self) -> _Gates | _Tables:
        """Return the spec of all nodes of all trees, without their wires."""
        n_nodes = sum(self.levels)
        options: dict[str, Any] = {
            name: getattr(self, name) for name in ("estimator", "param_dtype", "n_inputs")
        }
        if self.parametrisation == "gates":
            arity = options.pop("n_inputs")
            return _Gates(arity, n_nodes, logits_init=self.logits_init, **options).at(self.temperature)
        tables = _Tables(
            self.n_inputs,
            n_nodes,
            parametrisation=self.parametrisation,
            table_init=self.table_init,
            **options,
        )
        return tables.at(self.temperature)

    @property
    def geometry(self) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
        """Height and width of kernel, stride and padding."""
        return window_sizes(self.layer, self.in_shape, self.kernel, self.stride, self.padding)

    @property
    def padded(self) -> tuple[int, int, int]:
        """Height, width and channels of the padded image."""
        height, width, channels = self.in_shape
        rows, columns = self.geometry[2]
        return height + 2 * rows, width + 2 * columns, channels

    @property
    def places(self) -> tuple[int, int]:
        """Numbers of rows and columns of windows."""
        return self._places.counts

    @property
    def pooling(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Height and width of groups of places, and of their padding."""
        return pair(self.layer, "pool", self.pool), pair(self.layer, "pool_padding", self.pool_padding, 0)

    @property
    def out_shape(self) -> tuple[int, int, int]:
        """Height, width and channels of the output."""
        return (*self._places.groups, self.n_kernels)

    @property
    def window(self) -> int:
        """Number of values in a window, in the order of `lutjax.wiring.windows`."""
        height, width = self.geometry[0]
        return height * width * self.in_shape[2]

    @property
    def levels(self) -> list[int]:
        """Number of nodes of each level, all trees together."""
        return [self.n_kernels * self.n_inputs**level for level in reversed(range(self.depth))]

    @property
    def connectivity(self) -> wiring.Connectivity:
        """Windows at all places, and the trees there, before the or: for `lutjax.wiring.show`."""
        return wiring.window_groups(
            self.in_shape, self.kernel, self.stride, padding=self.padding, outputs=self.n_kernels
        )

    def compared(self, arrays: Arrays) -> np.ndarray:
        """Return neighbouring leaves of nodes at each place, ids of values of the image: ``[places, pairs, 2]``."""
        wires = np.asarray(arrays["wires"])
        pairs = np.stack([wires[:, :-1], wires[:, 1:]], -1).reshape(-1, 2)
        size, stride, around = self.geometry
        windows = wiring.windows(self.in_shape, size, stride, padding=around).reshape(-1, self.window)
        ids = windows[:, pairs]
        ids = np.where(ids < 0, ids[..., ::-1], ids)  # outside of the image there is nothing to draw
        found: np.ndarray = np.where(ids < 0, windows.max(1)[:, None, None], ids)
        return found

    def sizes_of(self, arrays: Arrays) -> dict[str, Any]:
        trained = np.shape(arrays[self._nodes()._trained_tables().name])
        return {"n_kernels": trained[0] // (sum(self.levels) // self.n_kernels)}

    # ------------------------------------------------------------------------------------- variables
    def variables(self) -> tuple[Variable, ...]:
        shape = (self.levels[0], self.n_inputs)

        def draw(key: Any) -> jax.Array:
            return self._drawn_leaves(key).reshape(shape)

        wires = self._wires(self.in_shape[2], shape, self._most_readers(), draw)
        return (*wires, self._nodes()._trained_tables())

    def _drawn_leaves(self, key: Any) -> jax.Array:
        """Return the leaves of each tree, ids in the window: ``[n_kernels, n_inputs**depth]``."""
        own, channels = self.channels_per_kernel, self.in_shape[2]
        options = {"n_trees": self.n_kernels, "depth": self.depth, "arity": self.n_inputs}
        if own is None:
            return wiring.trees(key, self.window, **options)
        channel_key, leaf_key = jax.random.split(key)
        of_tree = wiring.balanced(channel_key, channels, self.n_kernels, own)
        leaves = wiring.trees(leaf_key, self.window // channels * own, **options)
        return leaves // own * channels + jnp.take_along_axis(of_tree, leaves % own, 1)

    def _most_readers(self) -> int:
        """Return a bound of the number of leaves that read a channel: all, or what the wiring promises."""
        height, width = self.geometry[0]
        pixels, channels, own = height * width, self.in_shape[2], self.channels_per_kernel
        n_leaves = self.levels[0] * self.n_inputs
        if self.wires_fan_out is not None:
            return min(pixels * self.wires_fan_out, n_leaves)
        if own is None:
            rounds, rest = divmod(n_leaves, self.window)
            return pixels * rounds + min(pixels, rest)
        of_tree = n_leaves // self.n_kernels
        return -(-self.n_kernels * own // channels) * min(of_tree, pixels * -(-of_tree // (pixels * own)))

    @property
    def _n_readable(self) -> int:
        return self.window

    def _listed(self, wires: Any) -> tuple[Any, int]:
        return wires % self.in_shape[2], self.in_shape[2]

    # ------------------------------------------------------------------------------------- forward pass
    @names_layer
    def __call__(
        self,
        arrays: Arrays,
        x: Any,
        *,
        deterministic: bool = False,
        key: Any = None,
        temperature: Any = None,
    ) -> jax.Array:
        nodes, gates = self.at(temperature)._nodes(), self.parametrisation == "gates"
        tables = nodes.relaxed(arrays, deterministic, key)
        axis = 1 if gates else 0

        def level(x: jax.Array, part: slice, copies: int, wires: Any, readers: Any) -> jax.Array:
            own = _of_level(tables, part, copies, axis)
            op = lutjax.bilinear_gates if gates else lutjax.soft_lut
            return op(x, own, wires, readers=readers, feature_axis=0, implementation=self.implementation)

        x = self._features_first(x)
        if gates and self._in_one_kernel(x, tables):
            y = self._whole_trees(x, tables, arrays["wires"], arrays.get("readers"))
        else:
            y = self._in_trees(x, arrays["wires"], arrays.get("readers"), level)
            y = _meshes.divided_by_compiler(self._pooled, _meshes.spec_of)(y)
        return y if self.feature_axis == 0 else jnp.moveaxis(y, (1, 2, 0), (-3, -2, -1))

    @names_layer
    def from_words(self, arrays: Arrays, words: UInt32[Array, "..."]) -> UInt32[jax.Array, "..."]:
        """Return the bits of the hard trees, of 32 samples a word: ``[kernels, rows, columns, ...]``.

        Args:
          words: uint32 ``[channels, height, width, ...]``, whatever the `feature_axis`.
        """
        wires, truth = self.hard(arrays)
        return self.of_words(truth, wires, words)

    def hard(self, arrays: Arrays) -> tuple[jax.Array, jax.Array]:
        """Return the wires of leaves and bool tables of all nodes ``[nodes, 2**n_inputs]``, for `of_words`."""
        return jnp.asarray(arrays["wires"], INT32), self._nodes()._truth(arrays)

    def of_words(self, truth: Any, wires: Any, words: Any) -> jax.Array:
        """Return the same as `from_words` for tables of bits ``[nodes, 2**n_inputs]``."""
        height, width, channels = self.in_shape
        if words.dtype != np.uint32 or words.shape[:3] != (channels, height, width):
            raise ValueError(
                f"{self.layer}: words is {words.dtype}{list(words.shape)}; expected uint32 [{channels}, {height}, {width}, ...]."
            )

        def level(x: jax.Array, part: slice, copies: int, wires: Any, readers: Any) -> jax.Array:
            own = jnp.repeat(jnp.asarray(truth[part]), copies, 0)
            return lutjax.packed_lut(x, own, wires, implementation=self.implementation)

        y = self._in_trees(jnp.asarray(words), jnp.asarray(wires), None, level)
        return functools.reduce(operator.or_, self._places_of_groups(y, 0))

    @names_layer
    def truth_tables(self, arrays: Arrays) -> tuple[jax.Array, jax.Array]:
        """Return the hard trees of one window: wires ``[G, n]`` and bool tables ``[G, 2**n]``, the kernels' outputs last.

        Ids below `window` are values of the window, and ``window + g`` is node g.
        """
        n_inner = sum(self.levels) - self.levels[0]
        inner = jnp.arange(self.n_inputs * n_inner, dtype=INT32).reshape(-1, self.n_inputs) + self.window
        wires, truth = self.hard(arrays)
        return jnp.concatenate([wires, inner]), truth

    @names_layer
    def expected_needs(self, arrays: Arrays, temperature: Any = None) -> tuple[jax.Array, jax.Array]:
        """Return for each node, which is at all places, what `LogicGates` returns for each gate."""
        return self.at(temperature)._nodes().expected_needs(arrays)

    def _features_first(self, x: Any) -> jax.Array:
        """Return images as floats ``[channels, height, width, ...]``, checked and cast."""
        x = self._bits(x)
        height, width, channels = self.in_shape
        shape = (channels, height, width) if self.feature_axis == 0 else self.in_shape
        require_array(self.layer, "x", x)
        found = x.shape[:3] if self.feature_axis == 0 else x.shape[-3:]
        if found != shape:
            sizes = ", ".join(map(str, shape))
            expected = f"[{sizes}, ...]" if self.feature_axis == 0 else f"[..., {sizes}]"
            raise ValueError(f"{self.layer}: x has shape {list(x.shape)}; expected {expected}.")
        x = jnp.asarray(self._cast(x))
        return jnp.moveaxis(x, (-1, -3, -2), (0, 1, 2)) if self.feature_axis else x

    def _in_one_kernel(self, x: jax.Array, coefficients: jax.Array) -> bool:
        """Return whether one kernel evaluates whole trees of gates, and their pools."""
        n_leaves = self.n_inputs**self.depth

        def call() -> LogicTrees:
            shapes = (
                jax.ShapeDtypeStruct((math.prod(self.in_shape), math.prod(x.shape[3:])), x.dtype),
                jax.ShapeDtypeStruct((4, self.n_kernels, n_leaves - 1), coefficients.dtype),
                jax.ShapeDtypeStruct((self.n_kernels, n_leaves), INT32),
                None,
            )
            return LogicTrees.of(shapes, [("places", self._places)])

        return n_leaves <= MAX_LEAVES and lutjax.kernel_registry.has_gpu_kernel(
            LogicTrees.op, (x, coefficients), call, self.implementation
        )

    def _whole_trees(self, x: jax.Array, coefficients: jax.Array, wires: Any, readers: Any) -> jax.Array:
        """Return what `_in_trees` and `_pooled` return."""
        y = logic_trees(
            x.reshape(math.prod(self.in_shape), *x.shape[3:]),
            _meshes.divided_by_compiler(self._by_tree, self._spec_by_tree)(coefficients),
            jnp.asarray(wires, INT32).reshape(self.n_kernels, -1),
            places=self._places,
            readers=readers,
            implementation=self.implementation,
        )
        return y.reshape(self.n_kernels, *self.out_shape[:2], *x.shape[3:])

    def _by_tree(self, coefficients: jax.Array) -> jax.Array:
        """Return coefficients of nodes level by level in the order of trees: ``[4, nodes]`` -> ``[4, kernels, nodes of a tree]``."""
        ends = list(itertools.accumulate(self.levels))[:-1]
        parts = jnp.split(coefficients, ends, 1)
        return jnp.concatenate([part.reshape(4, self.n_kernels, -1) for part in parts], 2)

    def _spec_by_tree(self, coefficients: jax.Array) -> PartitionSpec:
        place = (*_meshes.spec_of(coefficients), None, None)[1]
        divides = place is None or self.n_kernels % _meshes.devices_along(place) == 0
        return PartitionSpec(None, place if divides else None)

    @property
    def _places(self) -> Places:
        return Places(self.in_shape[:2], *self.geometry, *self.pooling)

    def _padded_rows(self, x: jax.Array) -> jax.Array:
        """Return the padded image as a list of inputs: ``[channels, height, width, ...]`` -> ``[channels * height * width, ...]``."""
        around = [(p, p) for p in self.geometry[2]]
        x = jnp.pad(x, ((0, 0), *around, *((0, 0),) * (x.ndim - 3)))
        return x.reshape(math.prod(self.padded), *x.shape[3:])

    def _in_trees(self, x: jax.Array, wires: Any, readers: Any, level: Level) -> jax.Array:
        """Return the outputs of trees at all places: ``[channels, height, width, ...]`` -> ``[kernels, rows, columns, ...]``."""
        batch, n, (rows, columns) = x.shape[3:], self.n_inputs, self.places
        x = self._padded_rows(x)
        if readers is not None:
            readers = self._readers_of_image(readers, wires)
        # Leaves of all places are gates of one image, place by place; of what they give, places are a part of the batch.
        y = level(x, slice(0, self.levels[0]), rows * columns, self._wires_of_image(wires), readers)
        y = y.reshape(self.levels[0], rows, columns, *batch)
        first = self.levels[0]
        for n_nodes in self.levels[1:]:  # they read neighbours of the level before
            ids = jnp.arange(n * n_nodes, dtype=INT32)
            y = level(y, slice(first, first + n_nodes), 1, ids.reshape(-1, n), ids[:, None])
            first += n_nodes
        return y

    def _wires_of_image(self, wires: Any) -> jax.Array:
        """Return the wires of leaves at all places, ids of the padded image with channels first: ``[leaves * places, n_inputs]``."""
        height, width, channels = self.padded
        channel, row, column = self._places.in_window(jnp.asarray(wires, INT32), channels)
        ids = (channel * height + row) * width + column  # at the first place
        down, right = (
            np.arange(n, dtype=np.int32) * s for n, s in zip(self.places, self.geometry[1], strict=True)
        )
        shifts = (down[:, None] * width + right[None]).reshape(1, -1, 1)
        return (ids[:, None] + shifts).reshape(-1, self.n_inputs)

    def _readers_of_image(self, readers: Any, wires: Any) -> jax.Array:
        """Return the readers of each value of the padded image by those of its channel: ``[channels * height * width, F]``.

        A leaf that reads some pixel of the window reads this value at one place, or at none.
        """
        number = jnp.maximum(readers, 0)
        of_readers = jnp.asarray(wires, INT32).reshape(-1)[number]
        _, row, column = self._places.in_window(of_readers, self.padded[2])
        padded = dataclasses.replace(self._places, image=self.padded[:2], padding=(0, 0))
        row, column = padded.that_read(row, column)
        gate, slot = (a[..., None, None] for a in jnp.divmod(number, self.n_inputs))
        wire = (gate * math.prod(self.places) + row * self.places[1] + column) * self.n_inputs + slot
        exists = (row >= 0) & (column >= 0) & (readers >= 0)[..., None, None]
        return jnp.moveaxis(jnp.where(exists, wire, -1), 1, -1).reshape(math.prod(self.padded), -1)

    # ------------------------------------------------------------------------------------- pools
    def _pooled(self, y: jax.Array) -> jax.Array:
        """Return the largest value of each group of places: ``[kernels, rows, columns, ...]``."""
        return first_maximum(self._places_of_groups(y, -jnp.inf))

    def _places_of_groups(self, y: jax.Array, nothing: Any) -> list[jax.Array]:
        """Return for each place in a group the values there of all groups, row by row."""
        (height, width), around = self.pooling
        if any(around):
            outer = ((0, 0), *((p, p) for p in around), *((0, 0),) * (y.ndim - 3))
            y = jnp.pad(y, outer, constant_values=nothing)
        return [
            y[:, row::height, column::width] for row, column in itertools.product(range(height), range(width))
        ]


LogicConvArguments.spec_type = LogicConvSpec


def _of_level(tables: jax.Array, part: slice, copies: int, axis: int) -> jax.Array:
    """Return a part of tables along an axis, each several times in a row."""

    def own(tables: jax.Array) -> jax.Array:
        return jnp.repeat(jax.lax.slice_in_dim(tables, part.start, part.stop, axis=axis), copies, axis)

    def spec(tables: jax.Array) -> PartitionSpec:  # a level need not divide as all nodes do
        places = list(_meshes.spec_of(tables))
        if places[axis] is not None and (part.stop - part.start) % _meshes.devices_along(places[axis]):
            places[axis] = None
        return PartitionSpec(*places)

    result: jax.Array = _meshes.divided_by_compiler(own, spec)(tables)
    return result


def first_maximum(values: Sequence[jax.Array]) -> jax.Array:
    """Return the largest of several arrays, element by element, NaN before any number. Its gradient goes to the first that is as large.

    `jax.numpy.max` would divide the gradient among equal values, and bits are equal most of the time.
    """
    best, *others = values
    for value in others:
        best = jnp.where((value > best) | jnp.isnan(value), value, best)
    return best
