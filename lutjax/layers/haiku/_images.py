"""Tables with geometry for Haiku; `lutjax.layers._images` has the arguments of the layers."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

import lutjax
from lutjax.dispatch.registry import Implementation
from lutjax.layers import _images
from lutjax.layers._spec import Initializer
from lutjax.layers.haiku._layer import Switched
from lutjax.reads import Read
from lutjax.wiring import Connectivity
from lutjax.wiring._sizes import Size


class SpatialLUT(Switched):
    """Layer of look-up tables between two maps: groups of detectors read a part of one and reach a part of the other.

    The detectors of a group compare pairs of the inputs in its receptive field, and their tables add to the outputs in its
    projective field. `lutjax.wiring.projections` makes the fields, and `lutjax.wiring.show` draws them. Inputs are
    ``[..., *connectivity.in_shape]`` and outputs ``[..., *connectivity.out_shape]``; an output that no group reaches is 0.

    Variables:
      weights: trained, ``[groups * n_detectors, 2**n_anchors, outputs of a group]``, zeros at first. The detectors of a group follow
        each other.
      anchors: int32 ids of inputs ``[groups * n_detectors, n_anchors, 2]``.
      targets: int32 ids of outputs ``[groups, 1, outputs of a group]``, -1 for an unused slot.
      log_beta, log_gamma, log_tau: trained scalars of a read, by their names in ``read.initial()``.
      weights, exponents: int8 tables and their scale, int32 ``[groups, outputs of a group]``, not trained, with ``quantized=True``.

    Args:
      connectivity: the groups, from `lutjax.wiring.projections`, `lutjax.wiring.window_groups` or `lutjax.wiring.full`.
      n_detectors: detectors of each group, each with one table.
      n_anchors: anchor pairs of each detector.
      read: how tables are read, one of `lutjax.reads`, whose scores say how sure the comparisons are. None: one row each.
      table_dropout: share of tables that an image does not read in training; others count more. Only with a `read`.
      deterministic: no dropout.
      quantized: tables are int8, for a layer that was trained with `lutjax.reads.PowersOfTwo`; it has no gradients.
      epsilon: half-width of the dead zone of a comparison. There is none with a `read`.
      dtype: dtype of the output, to which inputs are cast. Rows are read in the dtype of the tables and summed in at least
        float32; only the sum is rounded to `dtype`. Tables narrower than `dtype` are first widened, in a copy. None: inputs are
        not cast, and the output has the dtype of the tables.
      param_dtype: dtype of the tables: float32, bfloat16, float16 or float64.
      weights_init: draws the tables, as in `jax.nn.initializers`.
      implementation: which implementation runs the op; see `lutjax.lut`.
      accumulate: sums of integers, the same in any order; see `lutjax.FixedPoint`. Not with a `read`, whose groups are added
        as floats.
      anchors: int32 ``[groups * n_detectors, n_anchors, 2]``, instead of drawn ones.
      name: of the module.

    Raises:
      ValueError: a size is impossible, a group has fewer than two inputs, or an anchor is not an input.

    Source: docs/semantics.md, section 11.

    In Haiku a trained variable is a parameter, and the others are state, so a layer needs `haiku.transform_with_state`: see
    `lutjax.layers.haiku`.

    Example:
      >>> import haiku as hk, jax, jax.numpy as jnp
      >>> from lutjax import wiring
      >>> from lutjax.layers.haiku import SpatialLUT
      >>> fields = wiring.projections(None, (8, 8), (4, 4), groups=3, receptive=3, projective=2)
      >>> f = hk.transform_with_state(lambda x: SpatialLUT(fields, n_detectors=2, n_anchors=4)(x))
      >>> params, state = f.init(jax.random.key(0), jnp.ones((32, 8, 8)))
      >>> y, state = f.apply(params, state, None, jnp.ones((32, 8, 8)))
      >>> y.shape
      (32, 4, 4)
    """

    spec_type = _images.SpatialLUTSpec

    def __init__(
        self,
        connectivity: Connectivity,
        *,
        n_detectors: int,
        n_anchors: int,
        epsilon: float | int = 0.0,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        weights_init: Initializer = jax.nn.initializers.zeros,
        accumulate: lutjax.FixedPoint | None = None,
        implementation: Implementation = None,
        anchors: Any = None,
        read: Read | None = None,
        table_dropout: float | int = 0.0,
        deterministic: bool = False,
        quantized: bool = False,
        name: str | None = None,
    ) -> None:
        """Layer of look-up tables between two maps: groups of detectors read a part of one and reach a part of the other.

        Args:
          connectivity: the groups, from `lutjax.wiring.projections`, `lutjax.wiring.window_groups` or `lutjax.wiring.full`.
          n_detectors: detectors of each group, each with one table.
          n_anchors: anchor pairs of each detector.
          read: how tables are read, one of `lutjax.reads`, whose scores say how sure the comparisons are. None: one row each.
          table_dropout: share of tables that an image does not read in training; others count more. Only with a `read`.
          deterministic: no dropout.
          quantized: tables are int8, for a layer that was trained with `lutjax.reads.PowersOfTwo`; it has no gradients.
          epsilon: half-width of the dead zone of a comparison. There is none with a `read`.
          dtype: dtype of the output, to which inputs are cast. Rows are read in the dtype of the tables and summed in at least
            float32; only the sum is rounded to `dtype`. Tables narrower than `dtype` are first widened, in a copy. None: inputs are
            not cast, and the output has the dtype of the tables.
          param_dtype: dtype of the tables: float32, bfloat16, float16 or float64.
          weights_init: draws the tables, as in `jax.nn.initializers`.
          implementation: which implementation runs the op; see `lutjax.lut`.
          accumulate: sums of integers, the same in any order; see `lutjax.FixedPoint`. Not with a `read`, whose groups are added
            as floats.
          anchors: int32 ``[groups * n_detectors, n_anchors, 2]``, instead of drawn ones.
          name: of the module.

        Raises:
          ValueError: a size is impossible, a group has fewer than two inputs, or an anchor is not an input.
        """
        super().__init__(name)
        self._make(locals())


class WindowLUT(Switched):
    """Layer of look-up tables over windows of an image: each place of the window has tables of its own.

    The detectors of a place compare pairs of the values in its window, and their tables add to the outputs of that place. Inputs are
    ``[..., *in_shape]`` and outputs ``[..., rows, columns, out_features]``, one row and column for each place of the window.

    Variables:
      weights: trained, ``[rows * columns * n_detectors, 2**n_anchors, out_features]``, zeros at first. The detectors of a place
        follow each other, and places row by row.
      anchors: int32 ids of values of the image ``[rows * columns * n_detectors, n_anchors, 2]``.
      log_beta, log_gamma, log_tau: trained scalars of a read, by their names in ``read.initial()``.
      weights, exponents: int8 tables and their scale, int32 ``[rows * columns, out_features]``, not trained, with ``quantized=True``.

    Args:
      in_shape: height and width of the image, and perhaps channels.
      out_features: outputs of each place.
      n_detectors: detectors of each place, each with one table.
      n_anchors: anchor pairs of each detector.
      kernel: height and width of a window, or one number for both.
      stride: from one window to the next, in rows and in columns.
      padding: rows and columns around the image into which windows may reach. There is nothing to compare: windows at the
        border have fewer values.
      read: how tables are read, one of `lutjax.reads`, whose scores say how sure the comparisons are. None: one row each.
      table_dropout: share of tables that an image does not read in training; others count more. Only with a `read`.
      deterministic: no dropout.
      quantized: tables are int8, for a layer that was trained with `lutjax.reads.PowersOfTwo`; it has no gradients.
      epsilon: half-width of the dead zone of a comparison. There is none with a `read`.
      dtype: dtype of the output, to which inputs are cast. Rows are read in the dtype of the tables and summed in at least
        float32; only the sum is rounded to `dtype`. Tables narrower than `dtype` are first widened, in a copy. None: inputs are
        not cast, and the output has the dtype of the tables.
      param_dtype: dtype of the tables: float32, bfloat16, float16 or float64.
      weights_init: draws the tables, as in `jax.nn.initializers`.
      accumulate: sums of integers, the same in any order; see `lutjax.FixedPoint`.
      implementation: which implementation runs the op; see `lutjax.lut`.
      anchors: int32 ``[rows * columns * n_detectors, n_anchors, 2]``, instead of drawn ones.
      name: of the module.

    Raises:
      ValueError: a size is impossible, a window is larger than the image or has fewer than two values, or an anchor is not a value of
        the image.

    Source: docs/semantics.md, section 11.

    In Haiku a trained variable is a parameter, and the others are state, so a layer needs `haiku.transform_with_state`: see
    `lutjax.layers.haiku`.

    Example:
      >>> import haiku as hk, jax, jax.numpy as jnp
      >>> from lutjax.layers.haiku import WindowLUT
      >>> f = hk.transform_with_state(lambda x: WindowLUT((8, 8), 10, kernel=4, stride=4, n_detectors=4, n_anchors=3)(x))
      >>> params, state = f.init(jax.random.key(0), jnp.ones((32, 8, 8)))
      >>> y, state = f.apply(params, state, None, jnp.ones((32, 8, 8)))
      >>> y.shape
      (32, 2, 2, 10)
    """

    spec_type = _images.WindowLUTSpec

    def __init__(
        self,
        in_shape: tuple[int, ...],
        out_features: int,
        *,
        n_detectors: int,
        n_anchors: int,
        epsilon: float | int = 0.0,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        weights_init: Initializer = jax.nn.initializers.zeros,
        accumulate: lutjax.FixedPoint | None = None,
        implementation: Implementation = None,
        anchors: Any = None,
        read: Read | None = None,
        table_dropout: float | int = 0.0,
        deterministic: bool = False,
        quantized: bool = False,
        kernel: Size,
        stride: Size = 1,
        padding: Size = 0,
        name: str | None = None,
    ) -> None:
        """Layer of look-up tables over windows of an image: each place of the window has tables of its own.

        Args:
          in_shape: height and width of the image, and perhaps channels.
          out_features: outputs of each place.
          n_detectors: detectors of each place, each with one table.
          n_anchors: anchor pairs of each detector.
          kernel: height and width of a window, or one number for both.
          stride: from one window to the next, in rows and in columns.
          padding: rows and columns around the image into which windows may reach. There is nothing to compare: windows at the
            border have fewer values.
          read: how tables are read, one of `lutjax.reads`, whose scores say how sure the comparisons are. None: one row each.
          table_dropout: share of tables that an image does not read in training; others count more. Only with a `read`.
          deterministic: no dropout.
          quantized: tables are int8, for a layer that was trained with `lutjax.reads.PowersOfTwo`; it has no gradients.
          epsilon: half-width of the dead zone of a comparison. There is none with a `read`.
          dtype: dtype of the output, to which inputs are cast. Rows are read in the dtype of the tables and summed in at least
            float32; only the sum is rounded to `dtype`. Tables narrower than `dtype` are first widened, in a copy. None: inputs are
            not cast, and the output has the dtype of the tables.
          param_dtype: dtype of the tables: float32, bfloat16, float16 or float64.
          weights_init: draws the tables, as in `jax.nn.initializers`.
          accumulate: sums of integers, the same in any order; see `lutjax.FixedPoint`.
          implementation: which implementation runs the op; see `lutjax.lut`.
          anchors: int32 ``[rows * columns * n_detectors, n_anchors, 2]``, instead of drawn ones.
          name: of the module.

        Raises:
          ValueError: a size is impossible, a window is larger than the image or has fewer than two values, or an anchor is not a value of
            the image.
        """
        super().__init__(name)
        self._make(locals())


class ConvLUT(Switched):
    """Layer of look-up tables over windows of an image, with the same tables at all places: `lutjax.conv_lut`.

    Detectors compare pairs of the values in a window, and their tables add to the outputs of its place. Windows are not copied, so the
    memory of a call is that of images, detections and outputs; on NVIDIA GPUs, without a `read`, detections take none. Inputs are
    ``[..., *in_shape]`` and outputs ``[..., *out_shape]``: ``(rows, columns, out_channels)``, one row and column for each place of the
    window, or fewer with `pool`.

    Variables:
      weights: trained, ``[n_detectors, 2**n_anchors, out_channels / groups]``, zeros at first.
      anchors: int32 ids of values of a window of a group ``[n_detectors, n_anchors, 2]``, in the order row, column, channel. They do not
        depend on the size of images.
      log_beta, log_gamma, log_tau: trained scalars of a read, by their names in ``read.initial()``.
      weights, exponents: int8 tables and their scale, int32 ``[groups, out_channels / groups]``, not trained, with ``quantized=True``.

    Args:
      in_shape: height and width of the image, and perhaps channels.
      out_channels: outputs of each place.
      n_detectors: detectors, each with one table.
      n_anchors: anchor pairs of each detector.
      kernel: height and width of a window, or one number for both.
      stride: from one window to the next, in rows and in columns.
      padding: rows and columns of zeros around the image.
      groups: groups of channels that follow each other: the detectors of a group read its channels and add to its outputs.
      pool: average the outputs of blocks of places: rows and columns of a block, or one number for both. Places that do not
        fill a block are left out. ``"all"``: average over all places, for outputs ``[..., out_channels]``.
      read: how tables are read, one of `lutjax.reads`, whose scores say how sure the comparisons are. None: one row each.
      table_dropout: share of tables that an image does not read in training; others count more. Only with a `read`.
      deterministic: no dropout.
      quantized: tables are int8, for a layer that was trained with `lutjax.reads.PowersOfTwo`; it has no gradients.
      epsilon: half-width of the dead zone of a comparison. There is none with a `read`.
      accumulate: sums of integers, the same in any order; see `lutjax.FixedPoint`. Averages are sums of floats.
      dtype: dtype of the output, to which inputs are cast. Rows are read in the dtype of the tables and summed in at least
        float32; only the sum is rounded to `dtype`. Tables narrower than `dtype` are first widened, in a copy. None: inputs are
        not cast, and the output has the dtype of the tables.
      param_dtype: dtype of the tables: float32, bfloat16, float16 or float64.
      weights_init: draws the tables, as in `jax.nn.initializers`.
      implementation: which implementation runs the op; see `lutjax.lut`.
      anchors: int32 ``[n_detectors, n_anchors, 2]``, instead of drawn ones.
      name: of the module.

    Raises:
      ValueError: a size is impossible, a window is larger than the padded image or has fewer than two values, groups do not divide
        a size, or an anchor is not a value of a window.

    Source: docs/semantics.md, section 11.

    In Haiku a trained variable is a parameter, and the others are state, so a layer needs `haiku.transform_with_state`: see
    `lutjax.layers.haiku`.

    Example:
      >>> import haiku as hk, jax, jax.numpy as jnp
      >>> from lutjax.layers.haiku import ConvLUT
      >>> f = hk.transform_with_state(lambda x: ConvLUT((8, 6, 3), 10, kernel=3, padding=1, n_detectors=16, n_anchors=5)(x))
      >>> params, state = f.init(jax.random.key(0), jnp.ones((32, 8, 6, 3)))
      >>> y, state = f.apply(params, state, None, jnp.ones((32, 8, 6, 3)))
      >>> y.shape
      (32, 8, 6, 10)
    """

    spec_type = _images.ConvLUTSpec

    def __init__(
        self,
        in_shape: tuple[int, ...],
        out_channels: int,
        *,
        n_detectors: int,
        n_anchors: int,
        epsilon: float | int = 0.0,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        weights_init: Initializer = jax.nn.initializers.zeros,
        accumulate: lutjax.FixedPoint | None = None,
        implementation: Implementation = None,
        anchors: Any = None,
        read: Read | None = None,
        table_dropout: float | int = 0.0,
        deterministic: bool = False,
        quantized: bool = False,
        kernel: Size,
        stride: Size = 1,
        padding: Size = 0,
        groups: int = 1,
        pool: Size | str | None = None,
        name: str | None = None,
    ) -> None:
        """Layer of look-up tables over windows of an image, with the same tables at all places: `lutjax.conv_lut`.

        Args:
          in_shape: height and width of the image, and perhaps channels.
          out_channels: outputs of each place.
          n_detectors: detectors, each with one table.
          n_anchors: anchor pairs of each detector.
          kernel: height and width of a window, or one number for both.
          stride: from one window to the next, in rows and in columns.
          padding: rows and columns of zeros around the image.
          groups: groups of channels that follow each other: the detectors of a group read its channels and add to its outputs.
          pool: average the outputs of blocks of places: rows and columns of a block, or one number for both. Places that do not
            fill a block are left out. ``"all"``: average over all places, for outputs ``[..., out_channels]``.
          read: how tables are read, one of `lutjax.reads`, whose scores say how sure the comparisons are. None: one row each.
          table_dropout: share of tables that an image does not read in training; others count more. Only with a `read`.
          deterministic: no dropout.
          quantized: tables are int8, for a layer that was trained with `lutjax.reads.PowersOfTwo`; it has no gradients.
          epsilon: half-width of the dead zone of a comparison. There is none with a `read`.
          accumulate: sums of integers, the same in any order; see `lutjax.FixedPoint`. Averages are sums of floats.
          dtype: dtype of the output, to which inputs are cast. Rows are read in the dtype of the tables and summed in at least
            float32; only the sum is rounded to `dtype`. Tables narrower than `dtype` are first widened, in a copy. None: inputs are
            not cast, and the output has the dtype of the tables.
          param_dtype: dtype of the tables: float32, bfloat16, float16 or float64.
          weights_init: draws the tables, as in `jax.nn.initializers`.
          implementation: which implementation runs the op; see `lutjax.lut`.
          anchors: int32 ``[n_detectors, n_anchors, 2]``, instead of drawn ones.
          name: of the module.

        Raises:
          ValueError: a size is impossible, a window is larger than the padded image or has fewer than two values, groups do not divide
            a size, or an anchor is not a value of a window.
        """
        super().__init__(name)
        self._make(locals())
