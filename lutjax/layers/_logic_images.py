"""Differentiable logic layer over images for all libraries."""

import dataclasses
import functools
import itertools
import math
import operator
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import UInt32

import lutjax
from lutjax import _meshes, wiring
from lutjax._typing import Array
from lutjax.arguments import require_array
from lutjax.layers._logic import (
    INT32,
    PARAMETERIZATIONS,
    RESIDUAL,
    LogicGatesSpec,
    SoftLUTSpec,
    _LogicSpec,
)
from lutjax.layers._spec import Arrays, Initializer, Op, Variable, names_layer
from lutjax.ops.logic_trees import Places, in_levels, logic_trees, max_pool_groups
from lutjax.wiring import Connectivity
from lutjax.wiring._images import window_sizes
from lutjax.wiring._sizes import Size, pair, shape_of

LEAVES = ("balanced", "random")
"""Wirings of leaves."""


@dataclasses.dataclass(unsafe_hash=True)
class LogicConvSpec(_LogicSpec):
    """Convolution of an image with gate trees, and OR-pooling of neighboring windows.

    A kernel is a complete tree of gates whose leaves are values in an image window, with the same
    gates and wires in all windows. The output is the maximum over ``pool`` windows, for bits their
    OR, and its gradient goes to the first maximum. Windows are not copied.

    Variables:
      logits: trained, ``[n_kernels * nodes of a tree, 16]``, the first level first.
      table: trained, ``[n_kernels * nodes of a tree, 2**n_inputs]``, if nodes are tables.
      wires: int32 ``[n_kernels * n_inputs**(depth - 1), n_inputs]``: leaves, ids in the window.
      readers: int32 ``[channels, fan-out]``: ``lutjax.readers(wires % channels, channels)``.

    Args:
      in_shape: height, width and channels of the image. Inputs and outputs have this layout, or
        ``[channels, height, width, ...]`` with ``feature_axis=0``.
      n_kernels, depth: number of trees, one per output channel, and of their gate levels.
      kernel, stride: as in `WindowLUT`.
      padding: rows and columns of zeros around the image; less than `kernel`.
      pool, pool_padding: size of pooling groups, and of empty borders around all windows.
      channels_per_kernel: number of channels per tree, sampled with nearly equal fan-out; or all.
      wiring: leaf wiring: ``"balanced"``, with nearly equal fan-out, or ``"random"``.
      n_inputs: inputs per node, 2 to 8.
      parameterization: ``"gates"``, as in `LogicGates`, or a parameterization of `SoftLUT`.
      table_init: as in `SoftLUT`.
      wires: explicit leaves, such as ``lutjax.wiring.trees(...).reshape(-1, n_inputs)``.
      logits_init, estimator, temperature, feature_axis, dtype, param_dtype, implementation,
        deterministic: as in `LogicGates`.

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
    wiring: str = "balanced"
    n_inputs: int = 2
    parameterization: str = "gates"
    logits_init: Initializer = RESIDUAL
    table_init: Initializer | None = None

    example = ("(8, 8, 3), 16, kernel=3, depth=3, padding=1, pool=2", (32, 8, 8, 3), (32, 4, 4, 16))
    op = staticmethod(logic_trees)

    sizes: ClassVar[tuple[str, ...]] = ("n_kernels", "depth")
    methods: ClassVar[tuple[str, ...]] = ("truth_tables", "expected_needs", "from_words")

    def _check_sizes(self) -> None:
        height, width, channels = shape_of(self.layer, "in_shape", self.in_shape, (3,))
        self.in_shape = height, width, channels
        names = ("kernel", "stride", "padding", "pool", "pool_padding")
        geometry = window_sizes(self.layer, self.in_shape, self.kernel, self.stride, self.padding)
        pool, around = self.pooling
        for name, size in zip(names, (*geometry, pool, around), strict=True):
            if isinstance(getattr(self, name), Sequence):
                setattr(self, name, size)
        if any(p >= k for k, p in zip(pool, around, strict=True)):
            raise self._error(
                f"pool_padding is {self.pool_padding} and pool is {self.pool}, "
                "so a group could have no place; the padding must be less than the group."
            )
        if any((n + 2 * p) % k for n, k, p in zip(self.places, pool, around, strict=True)):
            padded = f" with pool_padding {self.pool_padding}" if any(around) else ""
            raise self._error(
                f"pool is {self.pool}, which must divide the {self.places} windows{padded}."
            )
        if self.channels_per_kernel is not None:
            self._require_sizes(1, "channels_per_kernel")
            if self.channels_per_kernel > self.in_shape[2]:
                raise self._error(
                    f"channels_per_kernel is {self.channels_per_kernel}; "
                    f"expected at most {self.in_shape[2]}."
                )
        self._require_one_of("wiring", LEAVES)
        self._require_one_of("parameterization", ("gates", *PARAMETERIZATIONS))
        self._require_sizes(2, "n_inputs")
        if self.parameterization == "gates" and self.n_inputs != 2:
            raise self._error(
                f"parameterization is 'gates', but n_inputs is {self.n_inputs}; use 'light'."
            )
        # The spec of the nodes checks the other options.
        self._nodes()

    def _nodes(self) -> LogicGatesSpec | SoftLUTSpec:
        n_nodes = sum(self.levels)
        names = ("estimator", "param_dtype")
        options: dict[str, Any] = {name: getattr(self, name) for name in names} | {
            "class_name": self.layer
        }
        if self.parameterization == "gates":
            gates = LogicGatesSpec(self.n_inputs, n_nodes, logits_init=self.logits_init, **options)
            return gates.with_temperature(self.temperature)
        options |= {"n_inputs": self.n_inputs, "parameterization": self.parameterization}
        tables = SoftLUTSpec(self.n_inputs, n_nodes, table_init=self.table_init, **options)
        return tables.with_temperature(self.temperature)

    @property
    def geometry(self) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
        return window_sizes(self.layer, self.in_shape, self.kernel, self.stride, self.padding)

    @property
    def padded(self) -> tuple[int, int, int]:
        height, width, channels = self.in_shape
        rows, columns = self.geometry[2]
        return height + 2 * rows, width + 2 * columns, channels

    @property
    def places(self) -> tuple[int, int]:
        return self._positions.counts

    @property
    def pooling(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Height and width of pooling groups and their padding."""
        padding = pair(self.layer, "pool_padding", self.pool_padding, 0)
        return pair(self.layer, "pool", self.pool), padding

    @property
    def out_shape(self) -> tuple[int, int, int]:
        return (*self._positions.groups, self.n_kernels)

    @property
    def window(self) -> int:
        """Number of values in a window, in the order of `lutjax.wiring.windows`."""
        height, width = self.geometry[0]
        return height * width * self.in_shape[2]

    @property
    def levels(self) -> list[int]:
        return [self.n_kernels * self.n_inputs**level for level in reversed(range(self.depth))]

    @property
    def connectivity(self) -> Connectivity:
        """Windows and their trees before the OR: for `lutjax.wiring.show`."""
        return wiring.window_groups(
            self.in_shape, self.kernel, self.stride, padding=self.padding, outputs=self.n_kernels
        )

    def compared_pairs(self, arrays: Arrays) -> np.ndarray:
        """Return neighboring leaves in each window, as image value ids: ``[places, pairs, 2]``."""
        wires = np.asarray(arrays["wires"])
        pairs = np.stack([wires[:, :-1], wires[:, 1:]], -1).reshape(-1, 2)
        size, stride, around = self.geometry
        windows = wiring.windows(self.in_shape, size, stride, padding=around)
        windows = windows.reshape(-1, self.window)
        ids = windows[:, pairs]
        # Outside the image there is nothing to draw: such a leaf is drawn at its neighbor, and a
        # pair outside at the last value of its window.
        ids = np.where(ids < 0, ids[..., ::-1], ids)
        pairs_inside: np.ndarray = np.where(ids < 0, windows.max(1)[:, None, None], ids)
        return pairs_inside

    def sizes_of(self, arrays: Arrays) -> dict[str, Any]:
        trained = np.shape(arrays[self._nodes()._trained_tables().name])
        return {"n_kernels": trained[0] // (sum(self.levels) // self.n_kernels)}

    # ------------------------------------------------------------------------------------ variables
    def variables(self) -> tuple[Variable, ...]:
        shape = (self.levels[0], self.n_inputs)

        def draw(key: Any) -> jax.Array:
            return self._drawn_leaves(key).reshape(shape)

        trained = self._nodes()._trained_tables()
        # This wiring does not bound the fan-out, so a reader list could be arbitrarily wide.
        if self.wiring == "random" and not self.wires_fan_out:
            return Variable("wires", "wires", shape, INT32, draw), trained
        return (*self._wires(self.in_shape[2], shape, self._most_readers(), draw), trained)

    def _drawn_leaves(self, key: Any) -> jax.Array:
        own, channels = self.channels_per_kernel, self.in_shape[2]

        def leaves_of(key: Any, n_values: int) -> jax.Array:
            if self.wiring == "random":
                shape = (self.n_kernels, self.n_inputs**self.depth)
                return jax.random.randint(key, shape, 0, n_values)
            options = {"n_trees": self.n_kernels, "depth": self.depth, "arity": self.n_inputs}
            return wiring.trees(key, n_values, **options)

        if own is None:
            return leaves_of(key, self.window)
        channel_key, leaf_key = jax.random.split(key)
        of_tree = wiring.balanced(channel_key, channels, self.n_kernels, own)
        leaves = leaves_of(leaf_key, self.window // channels * own)
        return leaves // own * channels + jnp.take_along_axis(of_tree, leaves % own, 1)

    def _most_readers(self) -> int:
        height, width = self.geometry[0]
        pixels, channels, own = height * width, self.in_shape[2], self.channels_per_kernel
        n_leaves = self.levels[0] * self.n_inputs
        if self.wires_fan_out is not None:
            return min(pixels * self.wires_fan_out, n_leaves)
        if own is None:
            rounds, rest = divmod(n_leaves, self.window)
            return pixels * rounds + min(pixels, rest)
        # A channel belongs to some kernels, and each of their trees reads its values evenly.
        n_tree_leaves = n_leaves // self.n_kernels
        n_kernels = -(-self.n_kernels * own // channels)
        return n_kernels * min(n_tree_leaves, pixels * -(-n_tree_leaves // (pixels * own)))

    @property
    def _n_readable(self) -> int:
        return self.window

    def _reader_wires(self, wires: Any) -> tuple[Any, int]:
        # Windows move over the image, so readers are listed by channel: of all pixels of a window.
        return wires % self.in_shape[2], self.in_shape[2]

    @names_layer
    def run(
        self, op: Op, x: Any, *, deterministic: bool = False, key: Any = None,
        temperature: Any = None, **arrays: Any,
    ) -> jax.Array:  # fmt: skip
        """Run `logic_trees`, or trees of tables level by level."""
        nodes = self.with_temperature(temperature)._nodes()
        tables = nodes.relax_tables(arrays, deterministic, key)
        options: dict[str, Any] = {"feature_axis": 0, "implementation": self.implementation}

        def level(x: jax.Array, part: slice, copies: int, wires: Any, readers: Any) -> jax.Array:
            own = _meshes.slice_repeated(tables, part.start, part.stop, 0, copies)
            return lutjax.soft_lut(x, own, wires, readers=readers, **options)

        x, wires, readers = self._features_first(x), arrays["wires"], arrays.get("readers")
        if self.parameterization == "gates":
            by_tree = _meshes.shard_by_compiler(self._reorder_by_tree, self._tree_sharding)(tables)
            leaves = jnp.asarray(wires, INT32).reshape(self.n_kernels, -1)
            x_flat = x.reshape(math.prod(self.in_shape), *x.shape[3:])
            y = op(
                x_flat, by_tree, leaves, places=self._positions,
                readers=readers, implementation=self.implementation,
            )  # fmt: skip
            y = y.reshape(self.n_kernels, *self.out_shape[:2], *x.shape[3:])
        else:
            roots = in_levels(self._positions, x, wires, readers, self.levels, level)
            y = max_pool_groups(self._positions, roots)
        return y if self.feature_axis == 0 else jnp.moveaxis(y, (1, 2, 0), (-3, -2, -1))

    @names_layer
    def from_words(self, arrays: Arrays, words: UInt32[Array, "..."]) -> UInt32[jax.Array, "..."]:
        """Return hard tree outputs for 32 samples per word ``[channels, height, width, ...]``."""
        wires, truth = self.hard(arrays)
        return self.run_words(truth, wires, words)

    def hard(self, arrays: Arrays) -> tuple[jax.Array, jax.Array]:
        """Return leaf wires and bool node tables ``[nodes, 2**n_inputs]``, for `run_words`."""
        return jnp.asarray(arrays["wires"], INT32), self._nodes()._truth(arrays)

    def run_words(self, truth: Any, wires: Any, words: Any) -> jax.Array:
        """Return the outputs of `from_words` for bit tables ``[nodes, 2**n_inputs]``."""
        height, width, channels = self.in_shape
        if words.dtype != np.uint32 or words.shape[:3] != (channels, height, width):
            raise self._error(
                f"words is {words.dtype}{list(words.shape)}; "
                f"expected uint32 [{channels}, {height}, {width}, ...]."
            )

        def level(x: jax.Array, part: slice, copies: int, wires: Any, readers: Any) -> jax.Array:
            own = jnp.repeat(jnp.asarray(truth[part]), copies, 0)
            return lutjax.packed_lut(x, own, wires, implementation=self.implementation)

        y = in_levels(
            self._positions, jnp.asarray(words), jnp.asarray(wires), None, self.levels, level
        )
        return functools.reduce(operator.or_, self._positions.in_groups(y, 0))

    @names_layer
    def truth_tables(self, arrays: Arrays) -> tuple[jax.Array, jax.Array]:
        """Return wires ``[G, n]`` and bool tables ``[G, 2**n]``; ids from `window` on are nodes."""
        n_inner = sum(self.levels) - self.levels[0]
        # Inputs of inner nodes are the nodes of the level below, in order.
        inner = jnp.arange(self.n_inputs * n_inner, dtype=INT32).reshape(-1, self.n_inputs)
        inner = inner + self.window
        wires, truth = self.hard(arrays)
        return jnp.concatenate([wires, inner]), truth

    @names_layer
    def expected_needs(
        self, arrays: Arrays, temperature: Any = None
    ) -> tuple[jax.Array, jax.Array]:
        """Return `LogicGates.expected_needs` for each node, shared by all windows."""
        return self.with_temperature(temperature)._nodes().expected_needs(arrays)

    def _features_first(self, x: Any) -> jax.Array:
        x = self._bits(x)
        height, width, channels = self.in_shape
        shape = (channels, height, width) if self.feature_axis == 0 else self.in_shape
        require_array(self.layer, "x", x)
        image_shape = x.shape[:3] if self.feature_axis == 0 else x.shape[-3:]
        if image_shape != shape:
            sizes = ", ".join(map(str, shape))
            expected = f"[{sizes}, ...]" if self.feature_axis == 0 else f"[..., {sizes}]"
            raise self._error(f"x has shape {list(x.shape)}; expected {expected}.")
        x = jnp.asarray(self._cast(x))
        return jnp.moveaxis(x, (-1, -3, -2), (0, 1, 2)) if self.feature_axis else x

    def _reorder_by_tree(self, coefficients: jax.Array) -> jax.Array:
        """Reorder level-major ``[4, nodes]`` to ``[4, kernels, nodes of a tree]``."""
        ends = list(itertools.accumulate(self.levels))[:-1]
        parts = jnp.split(coefficients, ends, 1)
        return jnp.concatenate([part.reshape(4, self.n_kernels, -1) for part in parts], 2)

    def _tree_sharding(self, coefficients: jax.Array) -> PartitionSpec:
        place = (*_meshes.spec_of(coefficients), None, None)[1]
        divides = place is None or self.n_kernels % _meshes.devices_along(place) == 0
        return PartitionSpec(None, place if divides else None)

    @property
    def _positions(self) -> Places:
        return Places(self.in_shape[:2], *self.geometry, *self.pooling)
